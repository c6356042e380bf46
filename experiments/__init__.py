"""The experiments: one file with a `main` for each, and in folders what they share."""

import os

# OpenMP reads this while torch is imported. Threads that spin while they wait slow small models several times as soon
# as anything else runs on the machine (docs/log/2026-11-21.md). On a machine of your own it may be `active`.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
