"""What a claim, its check and its finding are, and the rows that checks look at."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace

import pandas as pd

from analysis import choose, describe
from analysis.choose import l1_label, where
from analysis.load import Results
from analysis.measures import MEASURES, Variant, measure
from analysis.render import significant

HOLDS, CONSISTENT, PARTLY, FAILS, UNTESTED = "reproduced", "consistent", "partly", "not reproduced", "not tested"
SHORT = "training too short"
INCONSISTENT = "inconsistent in the paper"
FASTER, SLOWER = "faster than the public kernels", "slower than the public kernels"
ENOUGH = 5.0  # training tokens per parameter; below, a training is too short to decide a claim (the paper has 20)
VERDICTS: dict[str, str] = {
    HOLDS: "our rows meet the criterion",
    CONSISTENT: "they meet it in one seed only, or over tasks chosen by their scores, or a 95% interval given with the "
    "number reaches beyond it",
    PARTLY: "our rows meet part of it",
    FAILS: "our rows do not meet it",
    SHORT: f"our models saw fewer than {ENOUGH:g} tokens per parameter, too few to decide a claim on quality or "
    "sparsity",
    UNTESTED: "the rows needed for it do not exist, for the reason given",
    INCONSISTENT: "the paper's own numbers contradict each other; our rows decide nothing",
    FASTER: "no claim of the paper: ours against the authors' public kernels, which we measured",
    SLOWER: "likewise",
}
APART = (INCONSISTENT, FASTER, SLOWER)  # verdicts that are not about a claim of the paper
LISTED = 3  # up to so many numbers of a claim are listed; for more, the range


@dataclass(frozen=True)
class Claim:
    """One claim of the paper, its number, and the criterion for "reproduced"."""

    claim: str
    paper: str
    criterion: str


@dataclass(frozen=True)
class Finding:
    """Our result; `place`: model, training, device; `seeds`: of the fewest equal trainings that a number is the mean
    of, 0 where it is about a machine."""

    ours: str
    place: str
    verdict: str
    seeds: int = 0


class Untested(Exception):
    """There are no rows to test a claim with; the message names the missing ones."""


# A check yields its claim, then returns its finding or raises Untested.
Check = Generator[Claim, None, Finding]


@dataclass(frozen=True)
class Evidence:
    """The results, and the rows of the model with the most L1 values, equally trained."""

    results: Results
    sweep: pd.DataFrame

    @classmethod
    def of(cls, results: Results) -> Evidence:
        rows = where(choose.relu_runs(results.rows), op=("train", "nonzeros", "evaluate"))
        return cls(results, choose.main_model(choose.equally_trained(rows)) if len(rows) else rows)

    @property
    def model(self) -> str:
        """Name of the sweep's model."""
        if where(self.sweep, op="train", l1=0.0).empty:
            raise Untested("no training without L1 to compare with")
        return self.sweep["model"].iloc[0]

    @property
    def recommended(self) -> float:
        """The recommended L1 value of the sweep's model."""
        l1 = choose.recommended_l1(self.results.rows, self.model)
        if l1 is None or l1 == 0:
            raise Untested("at no L1 value is the held-out cross-entropy within 2%")
        return l1

    @property
    def is_short(self) -> bool:
        """Whether the sweep's trainings are too short to decide a claim."""
        return bool(self.sweep["tokens_per_parameter"].median() < ENOUGH)

    @property
    def trained(self) -> str:
        """Model, training, seeds and device of the sweep."""
        trained = choose.trainings(self.sweep)
        if trained.empty:
            return ""
        return f"{self.model_and_tokens}, {describe.seeds(trained['seed'])}, {describe.devices(trained['device'])}"

    @property
    def width(self) -> float:
        """Neurons in each block of the sweep's model."""
        widths = self.sweep["intermediate"].dropna()
        if widths.empty:
            raise Untested("how many neurons a block has is not in the rows")
        return float(widths.iloc[0])

    def counted(self, *values: float) -> int:
        """`seeds` of the non-zeros at these L1 values: of the trainings where none were gathered on held-out text."""
        gathered = set(where(self.sweep, op="nonzeros")["l1"])
        return min(self.seeds(l1, op="nonzeros" if l1 in gathered else "train") for l1 in values)

    @property
    def _alike(self) -> pd.DataFrame:
        """All rows of the sweep's model and its non-gated counterpart, trained like the sweep."""
        names = (self.model, f"{self.model}-nongated")
        return choose.trained_alike(where(self.results.rows, model=names), self.sweep)

    def seeds(self, *values: float, op: str = "train") -> int:
        """How many seeds the trainings of the sweep at these L1 values have, or what `op` made of them; where they
        differ, the fewest."""
        return min(where(self.sweep, op=op, l1=l1)["seed"].nunique() for l1 in values)

    @property
    def model_and_tokens(self) -> str:
        """The sweep's model and how long it was trained."""
        tokens = self.sweep["tokens_per_parameter"].dropna()
        per = f", {significant(tokens.median(), 2)} tokens per parameter" if len(tokens) else ""
        return f"{self.sweep['model'].iloc[0]}{per}"

    def paired(self, variant: str, runs: pd.DataFrame, others: pd.DataFrame) -> tuple[Evidence, str, int]:
        """This evidence, of those seeds only that both the trainings of a variant and those it is compared with have,
        what was trained, and the number of seeds; of all seeds if they have none in common."""
        common = set(runs["seed"]) & set(others["seed"])
        if common:
            own, sweep = (rows[rows["seed"].isin(common)] for rows in (self.results.rows, self.sweep))
            evidence = replace(self, results=replace(self.results, rows=own), sweep=sweep)
            return evidence, evidence.trained, len(common)
        place = f"{self.trained}; {variant}: {describe.seeds(runs['seed'])}"
        return self, place, min(runs["seed"].nunique(), others["seed"].nunique())

    def value(
        self, name: str, l1: float, *, activation: str = "relu", gated: bool = True, modification: str = "none"
    ) -> float:
        """A number of `measures.MEASURES` for one variant of the sweep's model (or its non-gated counterpart), trained
        like the sweep."""
        wanted = Variant(l1, sparse=False, activation=activation, gated=gated, modification=modification)
        value = measure(wanted.of(self._alike), name, wanted).value
        if math.isnan(value):
            raise Untested(f"no {MEASURES[name].title} of {describe_variant(wanted)}, trained like the others")
        return value

    def has(self, **wanted: object) -> pd.DataFrame:
        """Trainings of the sweep's model (or its non-gated counterpart) with these values, trained like the sweep."""
        return where(choose.trainings(self._alike), **wanted)


def describe_variant(variant: Variant) -> str:
    """For instance "a gated SiLU training without L1"."""
    kind = "gated" if variant.gated else "non-gated"
    activation = {"silu": "SiLU", "relu": "ReLU"}.get(variant.activation, variant.activation)
    at = f"at L1 {l1_label(variant.l1)}" if variant.l1 else "without L1"
    mitigation = "" if variant.modification == "none" else f" with {choose.MODIFICATIONS[variant.modification]}"
    return f"a {kind} {activation} training {at}{mitigation}"
