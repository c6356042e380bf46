"""A training in two processes, of which only the second one meets a limit, gets a signal, fails, or sees no checkpoint:
for `run_two`."""

import os
import signal
import sys

from experiments import train
from experiments.run.config import parse
from experiments.run.errors import Stopped
from experiments.run.train_config import TrainConfig
from experiments.training import trainer


def limit_reached(config, steps, seconds):
    if os.environ["RANK"] == "1" and steps == 2:
        if what == "limit":
            return "run.max_seconds=7"
        if what == "signal":
            os.kill(os.getpid(), signal.SIGUSR2)
        if what == "failure":
            raise RuntimeError("the second process fails alone")
    return None


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    trainer.limit_reached = limit_reached
    if what == "blind" and os.environ["RANK"] == "1":
        trainer.read_newest = lambda folder: None
    try:
        train.main(parse(TrainConfig, arguments))
    except Stopped as stop:
        print(f"process {os.environ['RANK']}: {stop.signal!r} {stop}", file=sys.stderr)
