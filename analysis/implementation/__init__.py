"""As `experiments/implementation`: what programs do once their options are read."""
