"""The options of a timing, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.run.config import option

A_DAY = 86_400.0
ALL_METRICS = ("time", "throughput", "energy", "peak_memory", "held_memory", "host_time")
# The machine's ceilings that `experiments.timing.ceilings` measures.
CEILINGS = ("ceiling_copy", "ceiling_matmul", "ceiling_gather")


@dataclass
class TimingConfig:
    """How long and how often to time. The defaults bring a GPU to its power limit."""

    seconds: float = option(
        6.0, "measured back-to-back loop of each alternative, over all rounds", unit="s", above=0, maximum=A_DAY
    )
    rounds: int = option(3, "rounds in each of which every alternative is timed once", minimum=1, maximum=10_000)
    settle_seconds: float = option(
        0.5, "loop before each measured one, to reach clocks and power limit", unit="s", minimum=0, maximum=A_DAY
    )
