"""Remembers which weights are finite, so that inference need not scan them for Inf and NaN in every call.

Each version of a weight is scanned once, in one pass on the device; a later call reads the result without waiting.
In-place operations increase a tensor's version, also under torch.no_grad, and so do steps of torch's optimizers, of the
fused ones by a hook (`optimizers.py`). Writes that bypass the version are not noticed: to `.data`, by other libraries
through the address, their fused optimizers included, and by replays of a CUDA graph that contains an optimizer's step.
FSDP writes so: it gathers the weights anew for each forward, into the same tensor with the same version. Nothing is
therefore remembered while torch.distributed is initialized.
"""

import weakref

import torch
from torch import Tensor

from . import optimizers  # noqa: F401 (its hooks make fused optimizers raise versions)
from .capacity import is_capturing
from .checks import in_process_group
from .gpu.adapter import on_device_of
from .torch_internals import base_of, version_of


class Version:
    """A tensor with the values that it has now, without keeping it alive. Raises RuntimeError for an inference tensor,
    which has no version."""

    __slots__ = ("address", "of", "version")

    def __init__(self, weight: Tensor) -> None:
        self.of, self.address, self.version = weakref.ref(weight), weight.data_ptr(), version_of(weight)

    def is_of(self, weight: Tensor) -> bool:
        """Whether this is the tensor, and neither its values nor their place have changed."""
        return self.of() is weight and self.version == version_of(weight) and self.address == weight.data_ptr()


class _Answer(Version):
    """What is known about one tensor at one version. The scan starts at the second call with the same version, so
    weights that change at every step are never scanned."""

    __slots__ = ("_event", "_largest", "finite")

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.finite: bool | None = None
        self._largest: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    @torch.no_grad()
    def ask(self, weight: Tensor) -> None:
        """Start the scan on the device, or read its result if it has finished."""
        if self._largest is None:
            with on_device_of(weight):
                largest = torch.linalg.vector_norm(weight, torch.inf)  # NaN if any entry is
                if weight.is_cuda:
                    pinned = torch.full((), torch.nan, dtype=largest.dtype, device="cpu", pin_memory=True)
                    largest = pinned.copy_(largest, non_blocking=True)
                    self._event = torch.cuda.Event()
                    self._event.record()
                self._largest = largest  # last: another thread that sees it waits for the event
        if self._event is None or self._event.query():
            self.finite = bool(self._largest.isfinite())


class WeightFiniteness:
    """Stores one result for each tensor, but keeps no tensor alive."""

    def __init__(self) -> None:
        self._answers: dict[int, _Answer] = {}

    def known(self, weights: tuple[Tensor | None, ...]) -> bool:
        """Whether all of these weights are known to be finite now. Never waits for the device. False while a CUDA graph
        is captured, since its replays may run with other weights, and in a process group, for the sake of FSDP."""
        found = weights[-1] is not None and not is_capturing(weights[-1]) and not in_process_group()
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
            self._answers = {key: other for key, other in list(self._answers.items()) if other.of() is not None}
            self._answers[id(whole)] = _Answer(whole)
        return False

    def clear(self) -> None:
        """Forget all results, for weights whose values were changed without increasing their version."""
        self._answers = {}


WEIGHTS = WeightFiniteness()
