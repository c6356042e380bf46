"""Launching: any experiment, or a whole study, on a laptop, a GPU box or a SLURM cluster (slurm/README.md)."""
