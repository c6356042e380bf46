"""The processes of a run: one by default, several when started by torchrun or as a job of several (slurm/job.py).

Every function works for one, too.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.run.errors import ConfigError, Stopped
from experiments.run.output import device_of

# The first process may tokenize a large corpus while the others wait; torchrun, or srun, ends them when it fails.
_TIMEOUT = datetime.timedelta(hours=24)


@dataclass(frozen=True)
class Processes:
    """This process among those of the run: its rank, their number, and its own device."""

    rank: int
    count: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and logs."""
        return self.rank == 0

    @property
    def first_of_machine(self) -> bool:
        """Whether this is the first process of its machine, by LOCAL_RANK of torchrun and submitit."""
        return int(os.environ.get("LOCAL_RANK", self.rank)) == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, tensor: Tensor) -> Tensor:
        """Element-wise "or" of a bool tensor over all processes, in place."""
        if self.count > 1:
            counts = tensor.to(torch.uint8)
            dist.all_reduce(counts, dist.ReduceOp.MAX)
            tensor.copy_(counts)
        return tensor

    def agree(self, flag: bool) -> bool:
        """Whether the flag is set in any process. Runs on the host (gloo), so that it does not wait for the device."""
        return bool(self.any(torch.tensor([flag])).item())

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank."""
        if self.count == 1:
            return [value]
        values = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """Let the first process run the block alone, then all others, which find what it left on disk."""
        if not self.first:
            self._wait()
        yield
        if self.first:
            self._wait()

    def _wait(self) -> None:
        if self.count > 1:
            dist.barrier()


@contextlib.contextmanager
def processes(device: str = "auto") -> Iterator[Processes]:
    """Join the other processes of the launch, if any; all but the first then log warnings only.

    The process group is destroyed only when all processes are done or have agreed to stop. A process that fails leaves
    it alone: with NCCL, destroying it would wait for the other processes, which wait for this one.

    Raises `ConfigError` for a device that is absent.
    """
    rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    own = device_of(device)
    if own.type == "cuda":
        own = own if own.index is not None else torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        if own.index >= (gpus := torch.cuda.device_count()):
            raise ConfigError(f"a process wants {own}, but it sees {gpus} GPUs: start one for each")
        torch.cuda.set_device(own)
    if count > 1:
        backend = "cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=_TIMEOUT)
    if rank > 0:
        logging.disable(logging.INFO)
    together = False
    try:
        yield Processes(rank, count, own)
        together = True
    except Stopped as stop:
        together = stop.together
        raise
    finally:
        logging.disable(logging.NOTSET)
        if count > 1 and together:
            dist.destroy_process_group()
