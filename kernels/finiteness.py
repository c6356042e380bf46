"""Whether weights are known to be finite, so that inference need not scan them for Inf and NaN in every call.

A weight is asked once for each version of it: one pass on the device, whose answer a later call finds without waiting.
In-place operations raise a tensor's version, under torch.no_grad too. What bypasses it (writes to `.data`, or by other
libraries through the address) is not noticed.
"""

import weakref

import torch
from torch import Tensor

from .capacity import is_capturing
from .gpu.adapter import on_device_of
from .torch_internals import base_of, version_of


class _Answer:
    """What is known of one tensor at one version. It begins with one sight of it: weights that change at every step are
    never asked."""

    __slots__ = ("_event", "_largest", "address", "finite", "of", "version")

    def __init__(self, weight: Tensor) -> None:
        self.of, self.address, self.version = weakref.ref(weight), weight.data_ptr(), version_of(weight)
        self.finite: bool | None = None
        self._largest: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def is_of(self, weight: Tensor) -> bool:
        return self.of() is weight and self.version == version_of(weight) and self.address == weight.data_ptr()

    @torch.no_grad()
    def ask(self, weight: Tensor) -> None:
        """Has the device find out, or looks whether it has."""
        if self._largest is None:
            with on_device_of(weight):
                largest = torch.linalg.vector_norm(weight, torch.inf)  # NaN if there is one
                if weight.is_cuda:
                    self._largest = torch.full((), torch.nan, dtype=largest.dtype, pin_memory=True)
                    self._largest.copy_(largest, non_blocking=True)
                    self._event = torch.cuda.Event()
                    self._event.record()
                else:
                    self._largest = largest
        if self._event is None or self._event.query():
            self.finite = bool(self._largest.isfinite())


class WeightFiniteness:
    """Keeps one answer for each tensor, and no tensor."""

    def __init__(self) -> None:
        self._answers: dict[int, _Answer] = {}

    def known(self, weights: tuple[Tensor | None, ...]) -> bool:
        """Whether all of them are known to be finite now. Never waits for the device. While a CUDA graph is captured
        the answer is no, since its replays may find other weights."""
        found = weights[-1] is not None and not is_capturing(weights[-1])
        for weight in weights if found else ():
            found = weight is None or (self._known(weight) and found)
        return found

    def _known(self, weight: Tensor) -> bool:
        whole = base_of(weight)  # a slice is finite if the whole is
        answer = self._answers.get(id(whole))
        if answer is not None and answer.is_of(whole):
            if answer.finite is None:
                answer.ask(whole)
            return answer.finite is True
        if not (whole.is_inference() or whole.is_meta or whole.layout is not torch.strided):  # the first has no version
            self._answers = {key: other for key, other in self._answers.items() if other.of() is not None}
            self._answers[id(whole)] = _Answer(whole)
        return False

    def clear(self) -> None:
        """Forgets every answer: for weights that were written to behind their version."""
        self._answers = {}


WEIGHTS = WeightFiniteness()
