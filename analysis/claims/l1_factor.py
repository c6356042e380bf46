"""The two readings of the paper's L1 coefficients: as written, or 64 times that.

The released program divides the cross-entropy of a step by the tokens of the whole step, but adds the L1 term to each
micro-batch undivided, so it counts once for every micro-batch: with 512 sequences in a step and 8 in a micro-batch, 64
times. Whether the paper's runs did so is open. Our rows under both readings stand beside the paper's numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis import choose, paper
from analysis.choose import RECOMMENDED_L1, l1_label, where
from analysis.claims.evidence import ENOUGH
from analysis.figures.quality import published
from analysis.load import Results
from analysis.render import NOTHING, markdown, signed, significant, span
from analysis.summary import summary

SEQUENCES = 512  # of an optimizer step, in the released program's configurations
MICRO_BATCH = 8  # sequences
OPEN = "open"
PER = "tokens_per_parameter"
FACTOR = SEQUENCES // MICRO_BATCH
READINGS = {"as_written": 1, "times_64": FACTOR}
WORDS = {"as_written": "as written", "times_64": f"{FACTOR} times"}
NUMBERS = ["active_pct", "cross_entropy_change_pct", "dead_pct"]
TEXT = f"""\
By the released program's code, **L1 in effect = nominal L1 × sequences of a step / sequences of a micro-batch** = \
nominal × {SEQUENCES} / {MICRO_BATCH}: it divides the cross-entropy by the tokens of the whole step, but not the L1 \
term of a micro-batch. Whether the paper's runs did so is open. Here `sparsity.l1` is the coefficient of the mean over \
the tokens of a step, whatever the micro-batch. The paper's {l1_label(RECOMMENDED_L1)}, read either way:

```
python -m experiments.train model=0.5b sparsity.l1={l1_label(RECOMMENDED_L1)}  # as written
python -m experiments.train model=0.5b sparsity.l1={l1_label(RECOMMENDED_L1 * FACTOR)}  # {FACTOR} times
```

Claims on quality take the L1 by its price (cross-entropy at most 2% higher), and claims on whole models hold only if \
they do both at the nominal L1 and with as few active neurons as the paper's.

Our small models come nearer to the paper's 20 tokens per parameter, but are narrower; our 0.5b has its shape, but \
saw far fewer tokens.
"""


def _published() -> dict[float, dict[str, float]]:
    """By L1: the share of `active` neurons and the `change` of the cross-entropy in percent, of the paper's 1.5B."""
    known, at = published(), RECOMMENDED_L1
    active = {at: known["active"][at], 1e-4: 1 / paper.WIDTH * 100}  # "below one at 1e-4" (figure 3)
    return {l1: {"active_pct": a, "cross_entropy_change_pct": known["change"].get(l1)} for l1, a in active.items()}


def table(results: Results) -> pd.DataFrame:
    """One line for each model, length of training and L1 of the paper for which both readings were trained, or larger
    and smaller values than theirs: our numbers under both, and which is nearer the paper by active neurons and by the
    price in cross-entropy ("open" where the values around overlap). Of several sources the first that has any."""
    return _compared(results).drop(columns=PER, errors="ignore")


def _compared(results: Results) -> pd.DataFrame:
    """`table`, and the training tokens per parameter."""
    made = (_lines(summary(source)) for source in results.sources or (results,))
    return pd.DataFrame(next(filter(None, made), []))


def _lines(trained: pd.DataFrame) -> list[dict[str, Any]]:
    about = ["model", "tokens_trained_m", PER]
    trained = trained.reindex(columns=[*about, "text", "activation", "modification", "l1", *NUMBERS])
    plain = where(trained, activation="relu", modification="none").dropna(subset=["l1", "active_pct"])
    plain = plain[plain["model"].map(choose.scale) == plain["model"]]
    lines = []
    for model in choose.by_size(plain["model"]):
        for (tokens, _), swept in where(plain, model=model).groupby(["tokens_trained_m", "text"], dropna=False):
            swept = swept.set_index("l1").sort_index()
            per = significant(swept[PER].iloc[0], 2)
            without = "".join(f"; {_share(share)} active without L1" for share in swept["active_pct"][swept.index == 0])
            for l1, theirs in _published().items():
                ours = {name: _around(swept, l1 * factor)[NUMBERS] for name, factor in READINGS.items()}
                exact = {at for around in ours.values() if len(around) == 1 for at in around.index}
                # What one reading has exactly says nothing about the other.
                ours = {name: a if len(a) == 1 else a[~a.index.isin(exact)] for name, a in ours.items()}
                at = [set(around.index) for around in ours.values()]
                if all(at) and at[0].isdisjoint(at[1]):  # else both lie around one value
                    trained_as = f"{model}, {significant(tokens)}M tokens ({per} per parameter){without}"
                    line = {"trained": trained_as, "paper_l1": l1_label(l1), "paper": _paper(l1, theirs)}
                    line[PER] = swept[PER].iloc[0]
                    line |= {name: _cell(around, l1 * READINGS[name]) for name, around in ours.items()}
                    line |= {f"nearer_{name}": _nearer(ours, theirs, number) for name, number in _DISTANCES.items()}
                    lines.append(line)
    return lines


def _share(percent: float) -> str:
    return f"{significant(percent, 2)}%"


_DISTANCES = {"active": "active_pct", "loss": "cross_entropy_change_pct"}


def _around(swept: pd.DataFrame, l1: float) -> pd.DataFrame:
    """The line with this L1, or those of the next smaller and larger ones; none if it is beyond all."""
    exact = swept[np.isclose(swept.index, l1, rtol=1e-6, atol=0)]
    if len(exact):
        return exact
    below, above = swept[swept.index < l1].tail(1), swept[swept.index > l1].head(1)
    return pd.concat([below, above]) if len(below) and len(above) else swept.iloc[:0]


def _nearer(ours: dict[str, pd.DataFrame], theirs: dict[str, float], number: str) -> str:
    """The reading all of whose values are nearer the paper's than any of the other's."""
    published = theirs[number]
    if published is None or any(around[number].isna().any() for around in ours.values()):
        return NOTHING
    # Shares are compared by their ratio, changes of the cross-entropy by their difference.
    by_ratio = number == "active_pct"
    with np.errstate(divide="ignore"):  # no active neuron is infinitely far away
        away = {
            name: (np.log(around[number] / published) if by_ratio else around[number] - published).abs()
            for name, around in ours.items()
        }
    first, second = away
    if away[first].max() < away[second].min():
        return WORDS[first]
    return WORDS[second] if away[second].max() < away[first].min() else OPEN


def _cell(around: pd.DataFrame, l1: float) -> str:
    parts = [
        f"{span(around['active_pct'], lambda value: significant(value, 2))}% active",
        span(around["cross_entropy_change_pct"].dropna(), lambda value: signed(value, 1)),
        f"{span(around['dead_pct'], '{:.0f}'.format)}% dead",
    ]
    whole = [text for text, name in zip(parts, around, strict=True) if around[name].notna().all()]
    exact = np.allclose(around.index, l1, rtol=1e-6, atol=0)
    at = "" if exact else f" (L1 {' to '.join(l1_label(value) for value in around.index)})"
    return f"{', '.join(whole)}{at}"


def _paper(l1: float, theirs: dict[str, float]) -> str:
    if l1 != RECOMMENDED_L1:
        return "below one active"
    dead = paper.fact(9, r"more than (\d+)% dead")
    change = signed(theirs["cross_entropy_change_pct"], 1)
    return f"{_share(theirs['active_pct'])} active, {change}, over {dead:.0f}% dead"


def section(results: Results) -> str:
    """Markdown: the question, the formula, our rows, and what they say."""
    lines = _compared(results)
    if lines.empty:
        return TEXT
    enough = lines.pop(PER).astype("float64").fillna(0) >= ENOUGH
    trained = {f"at least {ENOUGH:g}": lines[enough], "fewer": lines[~enough]}
    nearer = "; ".join(
        f"with {tokens} tokens per parameter, by active neurons {_counted(of['nearer_active'])}, by cross-entropy "
        f"{_counted(of['nearer_loss'])}"
        for tokens, of in trained.items()
        if len(of)
    )
    return f"{TEXT}\nNearer the paper: {nearer}.\n\n{markdown(lines)}"


def _counted(nearer: pd.Series) -> str:
    counts = nearer.value_counts()
    return ", ".join(f"{word} in {counts[word]}" for word in (*WORDS.values(), OPEN) if word in counts) or "undecided"
