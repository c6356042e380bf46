"""A lower bound on the time of a sparse plan on a machine, from the ceilings measured there (op ceiling_*).

    floor = gate product + the longer of (rows read by non-zeros, vectors of the tokens)

    gate product             2 M K N / rate of ceiling_matmul at this M, K, N
    rows read by non-zeros   M nnz R 2K bytes / bandwidth of ceiling_gather for this K, N, gated or not
    vectors of the tokens    M V 2K bytes / bandwidth of ceiling_copy

R and V (WORK): the rows of K elements that an operation reads for each non-zero, and the vectors of K elements (x, y
and their gradients) that it reads or writes for each token. An element has 2 bytes (bfloat16, float16). Vectors move to
and from main memory while rows come from a cache, so only the longer of the two counts. The vectors of the gate product
are part of its own ceiling. The formats themselves (4 bytes per non-zero) are ignored.

This is a floor of the PLANS, in which every non-zero reads its rows again. It is not a floor of the computation: a
kernel whose neighbouring tokens share rows in a nearer cache can be faster, and so can another plan, or a hybrid whose
dense backup holds many of the non-zeros. M tokens, K hidden, N intermediate, nnz mean non-zeros per token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.choose import where
from analysis.load import Results

PLANS = ("twell", "hybrid", "csr")
ELEMENT_BYTES = 2


class Work(NamedTuple):
    """The work of one call: gate products, and R and V of the formula above."""

    products: int = 0
    rows: int = 0
    vectors: int = 0


# op -> (gated block, non-gated block)
WORK: dict[str, tuple[Work, Work]] = {
    "gate_pack": (Work(products=1), Work(products=1)),
    # Rows of Wu (dot product with x) and of Wd (added to y); without a gate, of Wd.
    "gated_down": (Work(rows=2, vectors=2), Work()),
    "down": (Work(), Work(rows=1, vectors=1)),
    "ffn_forward": (Work(1, 2, 2), Work(1, 1, 1)),
    # Forward as above; dh reads Wd; dx reads Wu and Wg; dWd reads dy, and dWu and dWg share a row of x. Vectors: x, y,
    # dy, dx and, in the backward, x again.
    "ffn_training": (Work(1, 7, 5), Work(1, 5, 5)),
}
WORK["ffn_forward_stats"], WORK["ffn_training_stack"] = WORK["ffn_forward"], WORK["ffn_training"]

# The columns that a ceiling depends on.
BLOCK = {
    "ceiling_copy": ["device"],
    "ceiling_gather": ["device", "hidden", "intermediate", "gated"],
    "ceiling_matmul": ["device", "tokens", "hidden", "intermediate"],
}
CEILING_COLUMNS = (
    "op", "backend", "device", "tokens", "hidden", "intermediate", "gated", "value", "low", "high", "unit",
)  # fmt: skip


def ceilings(results: Results) -> pd.DataFrame:
    """The measured ceilings, one per line, with the 20th and 80th percentile."""
    rows = where(results.rows, op=tuple(BLOCK))
    ordered = rows.sort_values(["device", "op", "hidden", "intermediate", "tokens"], kind="stable")
    return ordered.assign(gated=yes_or_no(ordered["gated"]))[list(CEILING_COLUMNS)].reset_index(drop=True)


def yes_or_no(column: pd.Series) -> pd.Series:
    """A boolean column as "yes" and "no"; empty where it does not apply."""
    return column.map({True: "yes", False: "no"}).astype(object).where(column.notna(), "")


def floors(rows: pd.DataFrame, all_rows: pd.DataFrame) -> pd.Series:
    """The floor of each of `rows` in ms, from the highest ceilings of its kind of device among `all_rows`. NaN where a
    ceiling was not measured, for operations that are not in WORK, and for other plans."""
    rows_of_plans = rows["plan"].isin(PLANS) & rows["op"].isin(WORK) & rows[["gated", "mean_nnz"]].notna().all(axis=1)
    index, rows = rows.index, rows[rows_of_plans]
    kinds = [WORK[op][0 if gated else 1] for op, gated in zip(rows["op"], rows["gated"], strict=True)]
    work = pd.DataFrame(kinds, columns=Work._fields, index=rows.index, dtype="float64")
    tokens, hidden, intermediate = (rows[name].astype("float64") for name in ("tokens", "hidden", "intermediate"))
    vector_bytes = tokens * hidden * ELEMENT_BYTES

    def milliseconds(amount: pd.Series, op: str) -> pd.Series:
        highest = where(all_rows, op=op).groupby(BLOCK[op], as_index=False)["value"].max()
        rate = rows[BLOCK[op]].merge(highest, on=BLOCK[op], how="left")["value"].set_axis(rows.index)
        return (amount / (rate * (1e12 if op == "ceiling_matmul" else 1e9)) * 1e3).where(amount != 0, 0.0)

    product = milliseconds(work["products"] * (2.0 * tokens * hidden * intermediate), "ceiling_matmul")
    by_nonzeros = milliseconds(work["rows"] * rows["mean_nnz"] * vector_bytes, "ceiling_gather")
    by_tokens = milliseconds(work["vectors"] * vector_bytes, "ceiling_copy")
    return (product + np.maximum(by_nonzeros, by_tokens)).reindex(index)
