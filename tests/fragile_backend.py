"""A double of a sparse backend for tests: dense products, bit for bit, but gradients of NaN where the non-zeros of a
call exceeded its capacity.

As a program it is `experiments.train` with this backend registered, capacity for just what was measured (so that steps
are retried often), and costs by which the sparse backend pays below BREAK_EVEN non-zeros.
"""

import torch

from experiments import train
from experiments.run.config import entry
from experiments.run.train_config import TrainConfig
from experiments.training import backend_scheduler
from experiments.training.layer_costs import Costs
from twell import registry
from twell.backends import dense
from twell.interface import Availability, Backend, Gradients

NAME = "fragile"
BREAK_EVEN = 20.0


def _forward(x, weights, options):
    result = dense.BACKEND.forward(x, weights, options._replace(stats=True))
    if not options.training:
        return result
    enough = result.nonzeros.sum() <= options.capacity * x.shape[0]
    return result._replace(saved=(*result.saved, enough))


def _backward(dy, dl1, x, weights, saved, needs, activation):
    *saved, enough = saved
    gradients = dense.BACKEND.backward(dy, dl1, x, weights, saved, needs, activation)
    return Gradients(*(None if g is None else torch.where(enough, g, torch.nan) for g in gradients))


def _saved_like(x, weights, options):
    return (*dense.BACKEND.saved_like(x, weights, options), x.new_empty((), dtype=torch.bool))


BACKEND = Backend(
    NAME, lambda device: Availability(True, "a test"), lambda request: None, _forward, _backward, _saved_like
)


def just_enough(nonzeros, intermediate):
    """Replaces `backend_scheduler.capacity_for`: no headroom."""
    return max(1, min(intermediate, int(nonzeros)))


def costs(*_):
    """Replaces `backend_scheduler.measure_costs`."""
    return Costs(dense_ms=1.0, fixed_ms=0.0, per_nonzero_ms=1 / BREAK_EVEN)


if __name__ == "__main__":
    registry.FILES[NAME] = "fragile_backend"
    backend_scheduler.capacity_for, backend_scheduler.measure_costs = just_enough, costs
    entry(train.main, TrainConfig)
