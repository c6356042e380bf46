"""Makes result rows for the alternatives of one operation, timed together and compared with the fastest dense one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from analysis.schema import LARGER_IS_BETTER
from experiments.run.results import make_row
from experiments.timing.measure import Call, Measurement, host_time, missing, peak_memory, time_alternatives
from experiments.timing.options import TimingConfig
from experiments.timing.power import NvmlMeter, Unavailable, energy_meter, power_state

# Metrics of one call, which calls of different sizes do not share.
PER_CALL = frozenset({"time", "host_time", "held_memory"})
REASON_LENGTH = 200  # characters of an error in the column `missing`


class CheckFailed(RuntimeError):
    """A result differs from the reference by more than rounding explains: no number is reported for it."""


@dataclass(frozen=True)
class Candidate:
    """One alternative, ready to run: its columns from `backend` to `backup`, the call to time, and the error of its
    check.

    `held` measures the memory that it holds for the backward, where there is one. `tokens` is set where one call has
    another number of tokens than the comparison; its times are then given without a ratio. `inputs`: if set, peak
    memory counts these tensors and what the call allocates. `known`: measurements of it that were made before, by
    metric; each becomes a row too, without a ratio.
    """

    backend: str
    plan: str
    call: Call
    check_error: float
    held: Callable[[], Measurement] | None = None
    tokens: int | None = None
    inputs: Sequence[torch.Tensor] | None = None
    hot: int | None = None
    silent: int | None = None
    screened: int | None = None
    backup: float | None = None
    known: Mapping[str, Measurement] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Unique among the alternatives of one comparison."""
        return f"{self.backend}, {self.plan}" + ("" if self.backup is None else f", backup {self.backup:g}")


@dataclass(frozen=True)
class Absent:
    """An alternative that cannot run here, and why."""

    backend: str
    plan: str
    reason: str
    backup: float | None = None


def check(name: str, error: float, allowed: float) -> float:
    """`error`, if it is within `allowed`.

    Raises:
        CheckFailed: otherwise, and for an error that is not a number.
    """
    if not error <= allowed:
        raise CheckFailed(
            f"{name}: relative error {error:.3g} against the reference, at most {allowed:.3g} is rounding"
        )
    return error


def compare(
    alternatives: Sequence[Candidate | Absent],
    device: torch.device,
    timing: TimingConfig,
    metrics: Sequence[str],
    *,
    tokens: int,
    baseline: str = "",
    **columns: Any,
) -> list[dict[str, Any]]:
    """Measure the alternatives of one operation in one run.

    Args:
        metrics: which of `experiments.timing.options.ALL_METRICS` to measure.
        baseline: backend of the candidate that ratios refer to; empty: the one of plan "dense" with the highest
            throughput. Without one, there are no ratios.
        tokens: tokens in one call.
        columns: further columns of every row (op, hidden, ...).

    Returns:
        A row for each alternative and metric, and for what is `known` of a candidate. For an alternative that cannot
        run, with the reason instead of a value.
    """
    candidates = [a for a in alternatives if isinstance(a, Candidate)]
    meter = energy_meter(device)
    common = {**columns, "device": device, "tokens": tokens, "power_state": power_state(meter)}
    measured = _measure(candidates, device, meter, timing, metrics, tokens)
    if not baseline and (dense := [candidate for candidate in candidates if candidate.plan == "dense"]):
        baseline = max(dense, key=lambda candidate: measured[candidate.name, "throughput"].known).backend
    base_name = next((candidate.name for candidate in candidates if candidate.backend == baseline), "")
    rows = []
    for candidate in candidates:
        own_rows = {metric: (measured[candidate.name, metric], measured.get((base_name, metric))) for metric in metrics}
        own_rows |= {metric: (known, None) for metric, known in candidate.known.items()}
        for metric, (own, base) in own_rows.items():
            relation: dict[str, Any] = {}
            if base is not None and base.value and own.value and not (metric in PER_CALL and candidate.tokens):
                is_larger = metric in LARGER_IS_BETTER
                ratio = own.value / base.value if is_larger else base.value / own.value  # above 1 is better
                relation = {"baseline": baseline, "ratio": ratio}
            rows.append(
                make_row(
                    **common
                    | _identity(candidate)
                    | {"metric": metric, "check_error": candidate.check_error, "tokens": candidate.tokens or tokens}
                    | own.columns()
                    | relation
                )
            )
    for absent in (a for a in alternatives if isinstance(a, Absent)):
        rows += [make_row(**common | _identity(absent), metric=metric, missing=absent.reason) for metric in metrics]
    return rows


def _identity(alternative: Candidate | Absent) -> dict[str, Any]:
    columns = {"backend": alternative.backend, "plan": alternative.plan, "backup": alternative.backup}
    if isinstance(alternative, Candidate):
        columns |= {name: getattr(alternative, name) for name in ("hot", "silent", "screened")}
    return columns


def _measure(
    candidates: Sequence[Candidate],
    device: torch.device,
    meter: NvmlMeter | Unavailable,
    timing: TimingConfig,
    metrics: Sequence[str],
    tokens: int,
) -> dict[tuple[str, str], Measurement]:
    """(name, metric) -> measurement. Throughput is always measured: the baseline is chosen by it."""
    if not candidates:
        return {}
    timings = time_alternatives({c.name: c.call for c in candidates}, device, meter, **vars(timing))
    measured: dict[tuple[str, str], Measurement] = {}
    for candidate in candidates:
        timed, own_tokens = timings[candidate.name], candidate.tokens or tokens
        measures: dict[str, Callable[[], Measurement]] = {
            "time": timed.time,
            "throughput": partial(timed.throughput, own_tokens),
            "energy": partial(timed.energy, own_tokens),
            "peak_memory": partial(peak_memory, candidate.call, device, candidate.inputs),
            "host_time": partial(host_time, candidate.call, device),
            "held_memory": candidate.held or partial(missing, "nothing is kept for a backward"),
        }
        measured |= {(candidate.name, metric): measures[metric]() for metric in {"throughput", *metrics}}
    return measured
