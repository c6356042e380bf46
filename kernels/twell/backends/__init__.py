"""One file per backend; see `registry.Backend` for what each provides."""
