"""The best rates of the machine, measured in the same run as the kernels (`analysis.floors` derives lower bounds).

* `ceiling_copy`: bytes read and written by a plain copy of more than any cache holds.
* `ceiling_matmul`: the gate product, M x K by K x N, by torch (cuBLAS on NVIDIA GPUs), output written.
* `ceiling_gather`: bytes of rows of K elements read at random from a table as large as the weights that the sparse
  plans read by row: Wu and Wd of a gated block, Wd of a non-gated one. On a large GPU this table fits into L2.

Each in the same sustained loop as the kernels. Shapes: M tokens, K hidden, N intermediate.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.run.results import make_row
from experiments.timing.compare import check
from experiments.timing.measure import GIGA, Call, time_alternatives
from experiments.timing.options import TimingConfig
from experiments.timing.power import energy_meter, power_state
from twell.testing import relative_error, tolerance

log = logging.getLogger(__name__)

TERA = 1e12
# Size of one call by kind of device: larger than every cache, and long enough that a GPU does not wait for the host.
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}
GATHER_BYTES = {"cuda": 2**33, "cpu": 2**26}
PRODUCT_FLOP = {"cuda": 5e11, "cpu": 0.0}
ROWS_PER_SUM = 128  # what is written is below a hundredth of what is read
# Warps of a program and rows in flight; the best of these counts.
GATHER_FORMS = ((1, 4), (1, 8), (2, 8), (4, 8), (4, 16))


class Shape(NamedTuple):
    """The block whose ceilings are measured."""

    hidden: int
    intermediate: int
    gated: bool
    dtype: torch.dtype
    device: torch.device


class Ceiling(NamedTuple):
    """One way to reach a ceiling: one call moves `amount` times 1e9 bytes, or does that many times 1e12 floating-point
    operations; `check_error` is None where plain torch does all of it."""

    backend: str
    call: Call
    amount: float
    check_error: float | None = None


def ceiling_row(op: str, shape: Shape, tokens: int | None, timing: TimingConfig, **columns: Any) -> dict[str, Any]:
    """The row of a ceiling: its highest rate over the ways to reach it, with its spread.

    Args:
        op: one of `experiments.timing.options.CEILINGS`.
        tokens: M, for ceiling_matmul; the others have no M.
        columns: further columns (study, item).

    Raises:
        CheckFailed: when the sums of what was read are wrong.
    """
    meter = energy_meter(shape.device)
    ways = {way.backend: way for way in _ways(op, shape, tokens)}
    timings = time_alternatives({name: way.call for name, way in ways.items()}, shape.device, meter, **vars(timing))
    rates = {name: timings[name].rate(way.amount) for name, way in ways.items()}
    best = max(rates, key=lambda name: rates[name].known)
    for name, rate in rates.items():
        log.info("%s, %s: %.4g", op, name, rate.value)
    # Columns that do not affect the rate stay empty.
    block = {"hidden": shape.hidden, "intermediate": shape.intermediate} if op != "ceiling_copy" else {}
    if op == "ceiling_gather":
        block["gated"] = shape.gated
    return make_row(
        op=op,
        backend=best,
        tokens=tokens,
        metric="rate" if op == "ceiling_matmul" else "bandwidth",
        check_error=ways[best].check_error,
        device=shape.device,
        power_state=power_state(meter),
        **block | columns | rates[best].columns(),
    )


def _ways(op: str, shape: Shape, tokens: int | None) -> Iterator[Ceiling]:
    match op:
        case "ceiling_copy":
            source = torch.ones(COPY_BYTES[shape.device.type], dtype=torch.uint8, device=shape.device)
            target = torch.empty_like(source)
            yield Ceiling("torch", lambda: target.copy_(source), 2 * source.nbytes / GIGA)
        case "ceiling_matmul" if tokens is not None:
            yield _product(shape, tokens)
        case "ceiling_gather":
            yield from _gathers(shape)


def _product(shape: Shape, tokens: int) -> Ceiling:
    device = shape.device
    generator = torch.Generator(device).manual_seed(0)
    x_MK = torch.randn(tokens, shape.hidden, generator=generator, device=device).to(shape.dtype)
    w_NK = torch.randn(shape.intermediate, shape.hidden, generator=generator, device=device) / shape.hidden**0.5
    w_NK = w_NK.to(shape.dtype)
    out_MN = x_MK.new_empty(tokens, shape.intermediate)
    flop = 2.0 * tokens * shape.hidden * shape.intermediate
    # Several products a call where one is short.
    repeats = max(1, math.ceil(PRODUCT_FLOP[shape.device.type] / flop))

    def call() -> None:
        for _ in range(repeats):
            torch.mm(x_MK, w_NK.t(), out=out_MN)

    return Ceiling("torch", call, repeats * flop / TERA)


def _gathers(shape: Shape) -> Iterator[Ceiling]:
    generator = torch.Generator(shape.device).manual_seed(0)
    rows = shape.intermediate * (2 if shape.gated else 1)
    table = torch.randn(rows, shape.hidden, generator=generator, device=shape.device).to(shape.dtype)
    row_bytes = shape.hidden * table.element_size()
    sums = max(1, GATHER_BYTES[shape.device.type] // (ROWS_PER_SUM * row_bytes))
    picks = torch.randint(rows, (sums, ROWS_PER_SUM), generator=generator, device=shape.device, dtype=torch.int32)
    amount = picks.numel() * row_bytes / GIGA
    if shape.device.type == "cuda" and importlib.util.find_spec("triton"):
        from experiments.timing.row_reads import exact_sums, sum_rows

        exact = exact_sums(table, picks)
        for warps, at_once in GATHER_FORMS:
            call = functools.partial(sum_rows, table, picks, warps=warps, at_once=at_once)
            name = f"triton, {warps} warps, {at_once} rows at once"
            error = check(name, float((call() != exact).double().mean()), 0.0)
            yield Ceiling(name, call, amount, error)
    else:
        yield _embedding_gather(table, picks, amount)


def _embedding_gather(table: Tensor, picks: Tensor, amount: float) -> Ceiling:
    call = functools.partial(F.embedding_bag, picks, table, mode="sum")
    exact = table[picks[0]].double().sum(0)
    plain_error = relative_error(table[picks[0]].sum(0), exact)
    error = check("embedding_bag", relative_error(call()[0], exact), tolerance(plain_error, table.dtype))
    return Ceiling("embedding_bag", call, amount, error)
