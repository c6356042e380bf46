"""The paper's published numbers, from analysis/reference/*.csv."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pandas as pd

REFERENCE = Path(__file__).parent / "reference"
PUBLISHED_KERNELS_ON = "H200"  # the device of reference/published_kernels_h200.csv
PLAN = "twell"  # how its kernels compute every block in inference
TRAINING_PLAN = "hybrid"  # and in training
WIDTH = 5632  # neurons of its blocks
ACTIVE = 29  # of these, for a token, at its recommended L1
BACKUP = 1 / 8  # of the tokens, in the dense backup of its training format


@functools.cache
def table(name: str) -> pd.DataFrame:
    """One table by its file name without the suffix, for instance "table1_scales". Do not change it in place."""
    return pd.read_csv(REFERENCE / f"{name}.csv", keep_default_na=False, na_values=[""])


@functools.cache
def published_kernels() -> pd.DataFrame:
    """The measurements of the paper's public kernels: of each block, that of the newest revision."""
    known = table("published_kernels_h200").sort_values("revision_date", na_position="first", kind="stable")
    return known.drop_duplicates(["op", "gated", "tokens", "hidden", "intermediate", "mean_nnz"], keep="last")


def facts(figure: int) -> str:
    """The published facts of a figure as text; empty if there are none."""
    return table("figures").set_index("figure")["published_facts"].fillna("")[figure]


def fact(figure: int, pattern: str) -> float:
    """The number that `pattern` (a regular expression with one group) finds in a figure's published facts.

    Raises:
        LookupError: the pattern does not match.
    """
    found = re.search(pattern, facts(figure))
    if found is None:
        raise LookupError(f"figures.csv, figure {figure}: no {pattern!r} in {facts(figure)!r}")
    return float(found.group(1))
