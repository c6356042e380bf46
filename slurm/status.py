"""Shows where the runs of a study stand.

python -m slurm.status study=l1_sweep               # a live table on a terminal, else plain lines, once
python -m slurm.status study=l1_sweep all=true      # every item, also those that are done
"""

from experiments.run.config import entry
from slurm.manage import StatusConfig
from slurm.manage import status as main

if __name__ == "__main__":
    entry(main, StatusConfig)
