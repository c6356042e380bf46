"""A double of a sparse backend for tests: dense products, bit for bit, but gradients of NaN where the non-zeros of a
call exceeded its capacity, unless dense products are asked for them.

As a program it is `experiments.train` with this backend registered, faster than dense products in every measurement,
and measured from the start (`always_faster`).
"""

import torch

from experiments import train
from experiments.run.config import entry
from experiments.run.train_config import TrainConfig
from experiments.training import block_plans
from twell import registry
from twell.backends import dense
from twell.capacity import EntryCount
from twell.interface import Availability, Backend, Gradients
from twell.tuning import training

NAME = "fragile"


def _forward(x, weights, options):
    result = dense.BACKEND.forward(x, weights, options._replace(stats=True))
    if not options.training:
        return result
    counts = torch.stack([result.nonzeros.sum(), torch.tensor(options.capacity * len(x)), torch.tensor(len(x))])
    return result._replace(saved=(*result.saved, counts), saved_entries=EntryCount(counts[:1].view(torch.int32)))


def _needed_capacity(saved, count):
    entries, room, tokens = saved[-1].tolist()
    return -(-entries // tokens) if entries > room else None


def _backward(dy, dl1, x, weights, saved, needs, activation):
    *saved, counts = saved
    gradients = dense.BACKEND.backward(dy, dl1, x, weights, saved, needs, activation)
    return Gradients(*(None if g is None else torch.where(counts[0] <= counts[1], g, torch.nan) for g in gradients))


def _saved_like(x, weights, options):
    return (*dense.BACKEND.saved_like(x, weights, options), x.new_empty((3,), dtype=torch.int64))


BACKEND = Backend(
    lambda device: Availability(True, "a test"),
    lambda request: None,
    _forward,
    _backward,
    _saved_like,
    needed_capacity=_needed_capacity,
)


def always_faster(calls, device):
    """Replaces `quick_times` of a tuning for training: sparse forms take half as long as dense products."""
    return {plan: 2.0 if plan.backend == "dense" else 1.0 for plan in calls}


if __name__ == "__main__":
    registry.FILES[NAME] = "fragile_backend"
    training.quick_times, block_plans.MOST_NONZEROS = always_faster, 0.45
    entry(train.main, TrainConfig)
