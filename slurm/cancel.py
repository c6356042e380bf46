"""End the jobs of a study. Trainings write a checkpoint first, so that `slurm.submit` can continue them later: under
SLURM this command waits for that, at most the cluster's `signal_seconds`.

python -m slurm.cancel study=l1_sweep
python -m slurm.cancel study=l1_sweep "only=[0.5b_l1_0_seed_0]"
"""

from experiments.run.config import entry
from slurm.manage import CancelConfig
from slurm.manage import cancel as main

if __name__ == "__main__":
    entry(main, CancelConfig)
