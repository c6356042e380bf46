"""Makes a run, and compares two bit for bit."""

import pandas
import pytest
import torch

from experiments import train
from experiments.models.checkpoint import newest_checkpoint, read_checkpoint
from experiments.run.errors import Stopped
from experiments.training import firing, metrics

TIMES = {"tokens_per_s", "seconds", "memory_gb"}


def run(config):
    """The records of this training, from its beginning or as it continues."""
    train.main(config)
    return metrics.read_metrics(config.run.folder)


def stop(config):
    """The same, up to a limit in its options."""
    with pytest.raises(Stopped, match=r"^run\.max_"):
        train.main(config)


def without_times(records):
    return [{key: value for key, value in record.items() if key not in TIMES} for record in records]


def final(config):
    return read_checkpoint(newest_checkpoint(config.run.folder))


def firing_rates_of(config):
    return pandas.read_parquet(config.run.folder / firing.FILE)


def assert_same_end(one, other):
    """Parameters, optimizer, random states, metrics and firing rates of two runs are equal bit for bit."""
    first, second = final(one), final(other)
    assert first.step == second.step == one.training.steps
    for name in ("model", "optimizer"):
        expected, found = getattr(first, name), getattr(second, name)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert first.state["reinitialiser"] == second.state["reinitialiser"]
    assert first.state["random"] == second.state["random"]
    runs = [without_times(metrics.read_metrics(config.run.folder)) for config in (one, other)]
    assert runs[0] == runs[1]
    rates = [firing_rates_of(config).drop(columns=["study", "item"]) for config in (one, other)]
    assert rates[0].equals(rates[1])
