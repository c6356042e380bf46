"""Launches experiments and whole studies on a laptop, a GPU box or a SLURM cluster (slurm/README.md)."""
