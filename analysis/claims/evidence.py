"""Verdicts, what a test of a claim finds, and the rows that tests look at."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from analysis import choose, describe
from analysis.choose import l1_label, where
from analysis.load import Results
from analysis.measures import MEASURES, Measured, Variant, measure
from analysis.render import significant, span

HOLDS = "reproduced"  # our rows meet the criterion
# They meet it in one seed only, at fewer sizes than it asks for, or over tasks chosen by their scores, or the number's
# 95% interval reaches beyond it.
CONSISTENT = "consistent"
PARTLY = "partly"
FAILS = "not reproduced"
SHORT = "training too short"  # our models saw too few tokens to decide a claim on quality or sparsity
# What the claim is about is lost in the noise of our rows even where it must have changed.
UNTESTABLE = "not testable here"
UNTESTED = "not tested"  # the rows needed for it do not exist
INCONSISTENT = "inconsistent in the paper"  # the paper's own numbers contradict each other
VERDICTS = (HOLDS, CONSISTENT, PARTLY, FAILS, SHORT, UNTESTABLE, UNTESTED, INCONSISTENT)
ENOUGH = 5.0  # training tokens per parameter; below, a training is too short to decide a claim (the paper has 20)


class Untested(Exception):
    """There are no rows to test a claim with; the message names the missing ones."""


@dataclass(frozen=True)
class Finding:
    """The result of testing a claim on the rows.

    reasons: what falls short, and the limits of the test; empty texts are left out.
    seeds: the number of equal trainings behind the numbers, the fewest where they differ; None if none is.
    place: models and devices where they are not those of the sweep.
    """

    ours: str
    verdict: str
    reasons: Sequence[str] = ()
    seeds: int | None = None
    details: Sequence[str] = ()
    place: str = ""


def graded(met: dict[str, bool]) -> tuple[str, list[str]]:
    """The verdict on criteria, each named by how it falls short, and the names of those that are not met."""
    short = [reason for reason, is_met in met.items() if not is_met]
    return HOLDS if not short else PARTLY if len(short) < len(met) else FAILS, short


def barely_trained(rows: pd.DataFrame) -> str:
    """The training tokens per parameter of the models in these rows, if they are too few for a claim on quality."""
    tokens = rows["tokens_per_parameter"].dropna().astype("float64")
    if tokens.empty or tokens.max() >= ENOUGH:
        return ""
    return f"models barely trained ({span(tokens, lambda value: significant(value, 2))} tokens per parameter)"


@dataclass(frozen=True)
class Evidence:
    """The results, and the sweep: the rows of the model with the most L1 values, equally trained."""

    results: Results
    sweep: pd.DataFrame

    @classmethod
    def of(cls, results: Results) -> Evidence:
        return cls(results, choose.sweep(results.rows, "evaluate"))

    @functools.cached_property
    def model(self) -> str:
        if where(self.sweep, op="train", l1=0.0).empty:
            raise Untested("no training without L1 to compare with")
        return self.sweep["model"].iloc[0]

    @functools.cached_property
    def recommended(self) -> float:
        l1 = choose.recommended_l1(self.results.rows, self.model)
        if l1 is None or l1 == 0:
            raise Untested("at no L1 value is the held-out cross-entropy within 2%")
        return l1

    @property
    def width(self) -> float:
        """Neurons in each block of the sweep's model."""
        widths = self.sweep["intermediate"].dropna()
        if widths.empty:
            raise Untested("how many neurons a block has is not in the rows")
        return float(widths.iloc[0])

    @property
    def place(self) -> str:
        """Model, training and devices of the sweep."""
        tokens = self.sweep["tokens_per_parameter"].median()
        trained = "" if pd.isna(tokens) else f", {significant(tokens, 2)} tokens per parameter"
        devices = choose.trainings(self.sweep)["device"]
        return f"{self.model}{trained}, {describe.devices(devices)}"

    def seeds(self, l1: float, op: str = "train") -> int:
        return int(where(self.sweep, op=op, l1=l1)["seed"].nunique())

    @functools.cached_property
    def _alike(self) -> pd.DataFrame:
        """All rows of the sweep's model and its non-gated counterpart, trained like the sweep."""
        names = (self.model, f"{self.model}-nongated")
        return choose.trained_alike(where(self.results.rows, model=names), self.sweep)

    def trainings(self, **columns: object) -> pd.DataFrame:
        """Trainings of the sweep's model (or its non-gated counterpart) with these values, trained like the sweep."""
        return where(choose.trainings(self._alike), **columns)

    def paired(self, variant: str, runs: pd.DataFrame, others: pd.DataFrame) -> Evidence:
        """This evidence with only the seeds that both groups of trainings have."""
        common = set(runs["seed"]) & set(others["seed"])
        if not common:
            raise Untested(f"no {variant} training with a seed of the trainings it is compared with")
        rows, sweep = (frame[frame["seed"].isin(common)] for frame in (self.results.rows, self.sweep))
        return Evidence(replace(self.results, rows=rows), sweep)

    def measured(self, name: str, l1: float, gated: bool = True, modification: str = "none") -> Measured:
        """A number of `measures.MEASURES` for one ReLU variant of the sweep's model, trained like the sweep."""
        variant = Variant(l1, sparse=False, gated=gated, modification=modification)
        measured = measure(variant.of(self._alike), name, variant)
        if math.isnan(measured.value):
            kind = f"{'gated' if gated else 'non-gated'} relu, mitigation: {choose.MODIFICATIONS[modification]}"
            raise Untested(f"no {MEASURES[name].title} at L1 {l1_label(l1)} ({kind}), trained like the others")
        return measured
