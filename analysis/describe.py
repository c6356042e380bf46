"""Sentences for captions about the trainings behind a table or figure: tokens, text, seeds, device."""

from __future__ import annotations

import pandas as pd

from analysis import choose, paper
from analysis.choose import where
from analysis.render import device, significant, span


def by_model(trained: pd.DataFrame) -> list[str]:
    """What `choose.trainings` are: one sentence for the models whose tokens, text, seeds and devices are the same."""
    alike: dict[str, list[tuple[str, pd.Series]]] = {}
    for name in choose.model_order(trained["model"]):
        trainings = where(trained, model=name)
        tokens, text = trainings["tokens_trained"], " or ".join(sorted(set(trainings["text"]) - {""}))
        parts = [f"{listed(tokens / 1e6, ' or ')} million training tokens" + (f" of {text}" if text else "")]
        if times := passes(trainings):
            parts.append(f"read about {times} times")
        behind = "; ".join([*(parts if tokens.any() else []), seeds(trainings["seed"]), devices(trainings["device"])])
        size = f"{listed(trainings['layers'], ' or ')} layers, N = {listed(trainings['intermediate'], ' or ')}"
        alike.setdefault(behind, []).append((f"{name} ({size})", trainings["tokens_per_parameter"].dropna()))
    return [
        f"{', '.join(name for name, _ in models)}: {behind}{_per_parameter(pd.concat([per for _, per in models]))}."
        for behind, models in alike.items()
    ]


def _per_parameter(values: pd.Series) -> str:
    if values.empty:
        return ""
    return f"; tokens per parameter: {span(values, lambda value: significant(value, 2))} (the paper: 20)"


def brief(trainings: pd.DataFrame) -> str:
    """One sentence about `choose.trainings`: models with their training tokens, number of seeds, device."""
    alike: dict[str, list[str]] = {}
    for model in choose.model_order(trainings["model"]):
        runs = where(trainings, model=model)
        tokens = " or ".join(significant(float(value)) for value in sorted(set(runs["tokens_trained"].dropna() / 1e6)))
        behind = f"{counted(runs['seed'].nunique())}, {devices(runs['device'])}"
        alike.setdefault(behind, []).append(f"{model} ({tokens or 'unknown'} million tokens)")
    return "; ".join(f"{', '.join(models)}: {behind}" for behind, models in alike.items()) + "." if alike else ""


def counted(seeds: int) -> str:
    """ "1 seed", "3 seeds"."""
    return "1 seed" if seeds == 1 else f"{seeds} seeds"


def passes(trainings: pd.DataFrame) -> str:
    """How often the trainings read their text: "3.6"; empty if that is unknown or at most 1."""
    scaled = trainings.assign(scale=trainings["model"].map(choose.scale))
    known = scaled.merge(paper.table("texts"), on=["text", "scale"])
    times = (known["tokens_trained"].astype("float64") / 1e6 / known["tokens_m"]).round(1)
    return "" if times.dropna().empty or times.max() <= 1 else listed(times, " or ")


def devices(column: pd.Series) -> str:
    """ "NVIDIA H100 80GB HBM3 and NVIDIA H200"."""
    return " and ".join(device(one) for one in sorted(set(column)))


def elsewhere(timed: pd.DataFrame) -> pd.Series:
    """For each row the name of its device where that is another one than of most rows, else ""."""
    return timed["device"].map(device).mask(timed.index.isin(choose.main_device(timed).index), "")


def seeds(column: pd.Series) -> str:
    """ "one seed (0)", "3 seeds (0, 1, 2)"."""
    known = sorted({int(seed) for seed in column.dropna()})
    if not known:
        return "seed unknown"
    return f"{'one seed' if len(known) == 1 else f'{len(known)} seeds'} ({', '.join(map(str, known))})"


def dead_and_silent(rows: pd.DataFrame) -> str:
    """The two terms side by side, which depend on the tokens of a step and on those of the held-out text."""
    step = choose.trainings(rows)["tokens"]
    held_out = where(rows, op="nonzeros", metric="silent_fraction")["tokens"]
    parts = []
    if step.notna().any():
        parts.append(f"dead in training is a neuron that fires for none of the {listed(step, ' or ')} tokens of a step")
    if held_out.notna().any():
        tokens = f"{listed(held_out, ' or ')} tokens of held-out text"
        parts.append(f"silent is a neuron that fires for none of the {tokens} on which non-zeros were counted")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def listed(values: pd.Series, word: str) -> str:
    """Each number once, in order: "8,192 or 65,536"; `word` with its spaces."""
    return word.join(dict.fromkeys(significant(float(value), 4) for value in sorted(set(values.dropna()))))
