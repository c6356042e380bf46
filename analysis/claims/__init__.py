"""The paper's claims one by one: its number, ours, where it was measured, and whether it holds by a stated criterion.

Our numbers come from the rows, the paper's from `analysis/reference`. A claim without rows is "not tested", with the
reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pandas as pd

from analysis import guard
from analysis.claims import by_layer, quality, speed
from analysis.claims.evidence import CONSISTENT, HOLDS, SHORT, UNTESTED, Check, Claim, Evidence, Finding, Untested
from analysis.load import Results

CHECKS: tuple[Callable[[Evidence], Check], ...] = (
    quality.sparsity, quality.unregularised, quality.accuracy, quality.sizes, quality.silu, quality.gating,
    quality.dead, quality.reinitialisation, quality.warm_up, quality.settling, by_layer.profile, by_layer.maximum,
    by_layer.positions, by_layer.correlation, by_layer.slower_without, speed.forward_speed, speed.forward_energy,
    speed.training_speed, speed.training_memory, speed.devices, speed.power, speed.forward_block, speed.training_block,
)  # fmt: skip


def check(one: Callable[[Evidence], Check], evidence: Evidence) -> tuple[Claim, Finding]:
    """A claim and its finding; for a claim that could not be tested, the reason."""
    steps = one(evidence)
    claim = next(steps)
    try:
        next(steps)
    except StopIteration as end:
        finding: Finding = end.value
    except Untested as absent:
        return claim, Finding(str(absent), "", UNTESTED)
    except guard.DATA_ERRORS as error:
        reason = guard.report(f"claim {claim.claim!r}", error)
        return claim, Finding(f"cannot be computed from these rows ({reason})", "", UNTESTED)
    if evidence.is_short and finding.place.startswith(evidence.model_and_tokens):
        return claim, replace(finding, verdict=SHORT)
    if finding.verdict == HOLDS and finding.seeds == 1:
        return claim, replace(finding, verdict=CONSISTENT)
    return claim, finding


@guard.table
def table(results: Results) -> pd.DataFrame:
    """One line for each claim: claim, paper, ours, where, verdict, criterion."""
    evidence = Evidence.of(results)
    found = [check(one, evidence) for one in CHECKS]
    return pd.DataFrame(
        [
            {
                "claim": claim.claim,
                "paper": claim.paper,
                "ours": finding.ours,
                "where": finding.place,
                "verdict": finding.verdict,
                "reproduced if": claim.criterion,
            }
            for claim, finding in found
        ]
    )
