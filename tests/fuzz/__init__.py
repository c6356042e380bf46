"""Fuzzing: hostile options and damaged files of options, in this process, from a seed.

The rule of every case: a right result, or an error of ours that says in one line what is wrong; never another
exception, never a hang, and nothing left behind by a call that was refused.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nobody is asked about names that mean nothing
