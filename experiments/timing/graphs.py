"""Calls recorded in a CUDA graph, which a replay runs one after the other with a single launch by the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import torch

# Calls before the capture, as in torch's documentation: they compile, choose kernels and allocate workspaces.
WARM_UP = 3
SYNCHRONIZES = "synchronizing CUDA operation"  # in the error of torch.cuda.set_sync_debug_mode("error")

Result = TypeVar("Result")


class CannotCapture(RuntimeError):
    """A call that a CUDA graph cannot hold."""


def why_no_graph(device: torch.device) -> str:
    """Why nothing can be captured on this device; empty if it can."""
    return "" if device.type == "cuda" else "CUDA graphs need a CUDA device"


def l2_cache_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size


class CapturedCalls(Generic[Result]):
    """A CUDA graph of the calls, in their order; calling it replays the graph on the current stream.

    `outputs` are what the calls returned during the capture: every replay writes their values anew.

    Args:
        calls: at least one, all alike. They are kept alive, and with them the tensors that the graph reads.
        device: a CUDA device.

    Raises:
        CannotCapture: the first call waits for the device.
    """

    def __init__(self, calls: Sequence[Callable[[], Result]], device: torch.device) -> None:
        self._calls = calls
        with torch.cuda.device(device):
            before = torch.cuda.Stream()
            before.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(before):
                _warm_up(calls[:1])
                # A call that waits would break off the capture, and leave torch's allocator in the middle of it.
                with _no_waiting():
                    calls[0]()
                _warm_up(calls[1:])
            torch.cuda.current_stream().wait_stream(before)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.outputs = [call() for call in calls]

    def __call__(self) -> None:
        self._graph.replay()


def _warm_up(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        for _ in range(WARM_UP):
            call()


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """Raises CannotCapture when torch waits for the device inside."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if SYNCHRONIZES not in str(error):
            raise
        raise CannotCapture("it waits for the device, which a CUDA graph cannot do") from error
    finally:
        torch.cuda.set_sync_debug_mode(mode)
