"""Print what the latest job of an item has written, and go on until it ends.

    python -m slurm.log study=l1_sweep item=0.5b_l1_0_seed_0
    python -m slurm.log study=l1_sweep item=0.5b_l1_0_seed_0 follow=true

Ctrl-C ends the command, not the job.
"""

from experiments.run.config import entry
from slurm.manage import LogConfig
from slurm.manage import log as main

if __name__ == "__main__":
    entry(main, LogConfig)
