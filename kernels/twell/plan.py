"""How a block is computed. Results do not depend on it, beyond rounding; times do. Imports no torch."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .names import AUTO, DENSE, FILES, check_name

CAPACITY = 128  # of a plan that names none: the paper's width of an ELL row in training


@dataclass(frozen=True)
class Plan:
    """How a block is computed: `block.plan`, and the argument `plan` of `sparse_ffn`. A backend's name alone is short
    for a plan with this backend.

    backend: "auto" (the fastest sparse backend of the device, whatever the non-zeros; "dense" on a CPU), or one of
        `available_backends()`.
    hot: the neurons that sparse backends leave to dense products, because they fire so often that these are cheaper. A
        number: so many leading ones, of neurons sorted by firing rate, whose weights are slices. A tuple: distinct
        neurons, whose weights are copied in each call: for trainings, where an optimizer has a state by neuron
        and neurons cannot be sorted.
    screened: so many trailing neurons, of neurons sorted by firing rate, fire so rarely that a bound of their gate
        products rules most entries out. For calls of a gated block for y alone, from `memory.SCREENS_FROM` tokens on,
        on a backend that can ("hopper": int8 decides what is computed, no value); others compute all neurons alike.
    up_to: ((tokens, backend), ...), ascending: the backends of calls with at most so many tokens, where it is not
        `backend`. Programs that torch.export made for any number of tokens use `backend` alone.
    capacity: the non-zeros per token (mean over the tokens) that a sparse call with gradients can save. With more,
        dense products compute its gradients: as exact, but slower, and NaN in a CUDA graph, which cannot wait for the
        count. None: 128, which a block raises for its next calls after one with more.
    backup: the share of tokens, those with the most non-zeros, that a sparse call with gradients computes and saves
        densely. The paper's hybrid format has room for 1/8, and takes those with over 128. They need no capacity.

    Raises ValueError for values that cannot be right for any block.
    """

    backend: str = DENSE
    hot: int | tuple[int, ...] = 0
    up_to: tuple[tuple[int, str], ...] = ()
    capacity: int | None = None
    backup: float = 0.0
    screened: int = 0

    def __post_init__(self) -> None:
        check_name(self.backend)
        set_field = object.__setattr__  # the dataclass is frozen
        set_field(self, "hot", _checked_hot(self.hot))
        set_field(self, "up_to", _checked_ranges(self.up_to))
        if self.capacity is not None and (type(self.capacity) is not int or self.capacity < 1):
            wanted = "None or a whole number of non-zeros per token, at least 1"
            raise ValueError(f"capacity must be {wanted}, got {self.capacity!r}")
        if type(self.backup) not in (int, float) or not 0 <= self.backup <= 1:
            raise ValueError(f"backup must be a share of the tokens from 0 to 1, got {self.backup!r}")
        set_field(self, "backup", float(self.backup))
        if type(self.screened) is not int or self.screened < 0:
            raise ValueError(f"screened must be a number of trailing neurons, got {self.screened!r}")
        if self.screened and self.indices:
            raise ValueError("screened neurons are sorted, with hot ones in front: hot must be a number, got indices")

    @classmethod
    def of(cls, plan: "Plan | str | Mapping[str, Any]") -> "Plan":
        """The plan itself, that of a backend's name, or that of the fields in a mapping (`as_dict`, or read from JSON).
        Raises TypeError for anything else, and ValueError for unknown fields and wrong values."""
        if isinstance(plan, Plan):
            return plan
        if isinstance(plan, str):
            return _NAMED[plan] if plan in _NAMED else cls(plan)
        if not isinstance(plan, Mapping):
            raise TypeError(f"plan must be a Plan or a backend's name, got {reprlib.repr(plan)}")
        fields = ("backend", "hot", "up_to", "capacity", "backup", "screened")
        for name in plan:
            if name not in fields:
                raise ValueError(f"a plan has the fields {', '.join(fields)}, got {name!r}")
        return cls(**plan)

    def as_dict(self) -> dict[str, Any]:
        """The backend, and the other fields that differ from a dense plan's, as JSON values: `Plan.of` makes the same
        plan of them."""
        others = {name: _as_json(value) for name, value in asdict(self).items() if value != getattr(_DENSE, name)}
        return {"backend": self.backend, **others}

    def backend_for(self, tokens: int) -> str:
        """The backend of a call with so many tokens."""
        for most, name in self.up_to:
            if tokens <= most:
                return name
        return self.backend

    @property
    def backends(self) -> tuple[str, ...]:
        """All backends that calls may use."""
        return tuple(dict.fromkeys((self.backend, *(name for _, name in self.up_to))))

    @property
    def leading(self) -> int:
        """The number of hot neurons that are leading ones."""
        return self.hot if isinstance(self.hot, int) else 0

    @property
    def indices(self) -> tuple[int, ...]:
        """The hot neurons that are given by index."""
        return () if isinstance(self.hot, int) else self.hot

    @property
    def of_sorted(self) -> bool:
        """Whether it is for neurons sorted by firing rate."""
        return bool(self.leading or self.screened)

    @property
    def hot_count(self) -> int:
        """The number of hot neurons."""
        return self.leading + len(self.indices)

    def check_fits(self, neurons: int) -> None:
        """Raises ValueError if a block with so many neurons has not all of the hot ones and, beside them, the screened
        ones."""
        if self.leading + self.screened > neurons >= self.leading:
            raise ValueError(
                f"screened must be at most the {neurons - self.leading} neurons that are not hot, got {self.screened}"
            )
        if max((self.leading, *(neuron + 1 for neuron in self.indices))) > neurons:
            raise ValueError(f"hot must name some of the block's {neurons} neurons, got {reprlib.repr(self.hot)}")

    def __str__(self) -> str:
        parts = [self.backend, *(f"{name} up to {most} tokens" for most, name in self.up_to)]
        if self.hot_count:
            parts.append(f"{self.hot_count} hot neurons{' by index' if self.indices else ''}")
        if self.screened:
            parts.append(f"{self.screened} screened neurons")
        if self.capacity is not None:
            parts.append(f"capacity {self.capacity}")
        if self.backup:
            parts.append(f"backup {self.backup:g}")
        return ", ".join(parts)


def _checked_hot(hot: Any) -> int | tuple[int, ...]:
    if type(hot) is int and hot >= 0:
        return hot
    neurons = tuple(hot) if isinstance(hot, Sequence) and not isinstance(hot, str) else (None,)
    if any(type(neuron) is not int or neuron < 0 for neuron in neurons) or len(set(neurons)) < len(neurons):
        wanted = "a number of leading neurons or a tuple of distinct neurons"
        raise ValueError(f"hot must be {wanted}, got {reprlib.repr(hot)}")
    return neurons or 0


def _checked_ranges(ranges: Any) -> tuple[tuple[int, str], ...]:
    try:
        pairs = tuple((tokens, name) for tokens, name in ranges)
    except (TypeError, ValueError):
        raise ValueError(f"up_to must hold pairs (tokens, backend), got {reprlib.repr(ranges)}") from None
    counts = [tokens for tokens, _ in pairs]
    if any(type(tokens) is not int or tokens < 1 for tokens in counts) or counts != sorted(set(counts)):
        raise ValueError(f"up_to must hold ascending numbers of tokens, at least 1, got {reprlib.repr(counts)}")
    for _, name in pairs:
        check_name(name)
        if name == AUTO:
            raise ValueError('the backends of up_to must be named one by one, got "auto"')
    return pairs


def _as_json(value: Any) -> Any:
    return [_as_json(part) for part in value] if isinstance(value, tuple) else value


_DENSE = Plan()
_NAMED = {name: Plan(name) for name in (AUTO, *FILES)}
