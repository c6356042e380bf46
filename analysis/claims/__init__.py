"""The paper's claims one by one: its number, ours, the verdict by a stated criterion, and the reason of the verdict.

`analysis/reference/claims.csv` has the claims, the paper's numbers and the criteria; ours come from the rows. A claim
without rows is "not tested", with the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd

from analysis import paper
from analysis.choose import RECOMMENDED_L1, where
from analysis.claims import by_layer, quality, speed
from analysis.claims.evidence import (
    CONSISTENT,
    HOLDS,
    INCONSISTENT,
    SHORT,
    UNTESTED,
    VERDICTS,
    Evidence,
    Finding,
    Untested,
    barely_trained,
)
from analysis.gains import published
from analysis.load import DATA_ERRORS, Results, not_made
from analysis.render import NOTHING, signed, span

CELLS = ("claim", "paper", "ours", "verdict", "why")
WHOLE_MODELS = {
    "forward-speed": ("model_forward", "throughput"),
    "forward-energy": ("model_forward", "energy"),
    "training-speed": ("model_training", "throughput"),
    "training-memory": ("model_training", "peak_memory"),
}
# By the name in claims.csv, in the order of pages.
TESTS: dict[str, Callable[[Evidence], Finding]] = {
    "sparsity": quality.sparsity, "unregularised": quality.unregularised, "accuracy": quality.accuracy,
    "sizes": quality.sizes, "silu": quality.silu, "gating": quality.gating, "dead": quality.dead,
    "reinitialisation": partial(quality.mitigation, "dead_neuron_reinit"),
    "warm-up": partial(quality.mitigation, "l1_warmup"),
    "settling": quality.settling, "profile": by_layer.profile, "maximum": by_layer.maximum,
    "positions": by_layer.positions, "correlation": by_layer.correlation, "slower-without": by_layer.slower_without,
    **{name: partial(speed.whole_model, *measured) for name, measured in WHOLE_MODELS.items()},
    "growth": partial(speed.growth, WHOLE_MODELS),
    "non-gated-speed": partial(speed.whole_model, *WHOLE_MODELS["forward-speed"], gated=False),
    "packing": speed.packing, "devices": speed.devices, "power": speed.power, "no-loss": quality.no_loss,
}  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """A claim in five short cells, with lines of details. `name`: the anchor of its details."""

    name: str
    claim: str
    paper: str
    ours: str
    verdict: str
    why: str
    details: tuple[str, ...]


def check_all(results: Results) -> list[Claim]:
    """All claims, in the order of pages."""
    evidence = Evidence.of(results)
    return [check(name, evidence) for name in TESTS]


def check(name: str, evidence: Evidence) -> Claim:
    """The claim of this name in TESTS."""
    claim = paper.table("claims").set_index("name").loc[name]
    finding = _decide(name, evidence)
    seeds = "" if finding.seeds is None else f", {finding.seeds} seed{'' if finding.seeds == 1 else 's'}"
    place = finding.place or (evidence.place if seeds else "")
    measured = [f"Measured: {place}{seeds}."] if place else []
    return Claim(
        name,
        claim["claim"],
        claim["paper"].format(printed=_printed().get(name)),
        finding.ours,
        finding.verdict,
        "; ".join(filter(None, finding.reasons)),
        (f"Criterion: {claim['criterion']}.", *finding.details, *measured),
    )


def _decide(name: str, evidence: Evidence) -> Finding:
    """The finding of a test; rows that are missing, of short trainings or of one seed limit its verdict."""
    try:
        finding = TESTS[name](evidence)
    except Untested as absent:
        return Finding(NOTHING, UNTESTED, [str(absent)])
    except DATA_ERRORS as error:
        reason = not_made(f"claim {name}", error)
        return Finding(NOTHING, UNTESTED, [f"cannot be computed from these rows ({reason})"])
    too_short = "" if finding.seeds is None else barely_trained(evidence.sweep)
    if too_short:
        return replace(finding, verdict=SHORT, reasons=[too_short])
    if finding.verdict == HOLDS and finding.seeds == 1:
        return replace(finding, verdict=CONSISTENT, reasons=["one seed"])
    return finding


@functools.cache
def _printed() -> dict[str, str]:
    """The paper's numbers that follow from its tables, by claim."""
    changes = {name: span(published(op)[metric], signed) for name, (op, metric) in WHOLE_MODELS.items()}
    pairs = speed.papers_gains(*WHOLE_MODELS["forward-speed"], gated=False)["published"]
    accuracies = "; ".join(f"{line.Index} {line[1]:.1f} to {line[2]:.1f}%" for line in quality.table4().itertuples())
    by_size = {
        name: where(published(op), l1=RECOMMENDED_L1).set_index("model")[metric].map(signed)
        for name, (op, metric) in WHOLE_MODELS.items()
    }
    mitigated = paper.table("table5_dead_neurons").set_index("modification")
    before = where(mitigated, sparse="no")["forward_tokens_per_ms"].item()
    many = mitigated.loc["l1_warmup"]
    at_many = f"with {many['nonzeros']} active (table 5) {signed((many['forward_tokens_per_ms'] / before - 1) * 100)}"
    return {
        **changes,
        "forward-speed": f"{changes['forward-speed']}, by scale and L1; {at_many}",
        "power": span(speed.papers_watts(), "{:.0f}".format),
        "non-gated-speed": span(pairs, signed),
        "no-loss": accuracies,
        "growth": "; ".join(
            f"{name.replace('-', ' ')} {of.iloc[0]} to {of.iloc[-1]} ({of.index[-1]})" for name, of in by_size.items()
        ),
    }


def table(claims: Sequence[Claim]) -> pd.DataFrame:
    """One line for each claim: claim, paper, ours, verdict, why; the index is its name."""
    return pd.DataFrame(claims).set_index("name")[list(CELLS)]


def tally(claims: Sequence[Claim]) -> str:
    """How many claims have each verdict, in one sentence; what the paper's own numbers contradict is counted apart."""
    verdicts = [claim.verdict for claim in claims if claim.verdict != INCONSISTENT]
    counted = ", ".join(f"{verdicts.count(name)} {name}" for name in VERDICTS if name in verdicts)
    apart = len(claims) - len(verdicts)
    return f"{len(verdicts)} claims: {counted}{f'; beside them, {apart} {INCONSISTENT}' if apart else ''}."


def details(claims: Sequence[Claim]) -> str:
    """Markdown: for each claim a heading with its name, its cells, and the details."""
    lines = ["# The claims in detail", "", tally(claims), ""]
    for claim in claims:
        lines += [f"## {claim.name}", ""]
        lines += [f"* {cell}: {text}" for cell in CELLS if (text := getattr(claim, cell))]
        lines += ["", "Details:", "", *(f"* {line}" for line in claim.details), ""]
    return "\n".join(lines)
