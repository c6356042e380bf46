"""One file per backend; see `interface.Backend` for what each provides."""
