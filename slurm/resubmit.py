"""Submit again what failed, and what could not run because of it; nothing else.

    python -m slurm.resubmit study=l1_sweep                  # where it was submitted before
    python -m slurm.resubmit study=l1_sweep cluster=big      # somewhere else, for instance with more memory

The code is that of now: mend what was broken, then resubmit. Trainings continue from their newest checkpoint.
"""

from experiments.run.config import entry
from slurm.manage import ResubmitConfig
from slurm.manage import resubmit as main

if __name__ == "__main__":
    entry(main, ResubmitConfig)
