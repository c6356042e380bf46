"""The paper's six tables, one function each, with the paper's rows and ours in one frame.

Every frame but the second has a column `source` (paper or ours) and a column `note` with the reason for missing numbers
of ours. Our rows follow the paper's row of the same scale and variant; our scales that the paper does not have (21m,
demo) come first. A column `..._ci95` holds half the width of the 95% interval of a number of ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pandas as pd

from analysis import choose, paper, render, schema, stats
from analysis.choose import where
from analysis.load import Results
from analysis.measures import MEASURES, NOT_MEASURED, TASKS, Measured, Variant, measure

PAPER_DEVICE = "H100 PCIe"
# Column -> one of our measures.
FORWARD_COLUMNS = {
    "mean_task_accuracy_pct": "accuracy",
    "forward_tokens_per_ms": "forward_throughput",
    "energy_mj_per_token": "forward_energy",
}
VARIANT_COLUMNS = FORWARD_COLUMNS | {"cross_entropy": "cross_entropy", "nonzeros": "nonzeros"}  # of tables 3 to 5


def scales(results: Results) -> pd.DataFrame:
    """Table 1: quality, speed, energy and memory of the dense and the sparse model at every scale."""
    columns = FORWARD_COLUMNS | {"train_tokens_per_ms": "training_throughput", "peak_memory_gb": "training_memory"}
    frame = _compare(results, "table1_scales", ["layers"], columns, _with_baselines)
    # The paper's sparse rows against its dense row of the same scale; ours are relative to the dense form of their run.
    printed = where(frame, source="paper", sparse="yes")
    dense = where(frame, source="paper", sparse="no").set_index("scale")
    for name in list(columns)[1:]:
        changes = (printed[name] / printed["scale"].map(dense[name]) - 1) * 100
        own = frame.get(name + render.CHANGE, math.nan)
        frame[name + render.CHANGE] = pd.Series(own, index=frame.index, dtype="float64").fillna(changes)
    return frame


def hyperparameters(results: Results) -> pd.DataFrame:
    """Table 2: the paper's hyper-parameters beside those of every scale trained, from the saved configs."""
    theirs = paper.table("table2_hyperparameters")
    frame = theirs[["name"]].assign(
        **{"paper, gated": theirs["gated"].map(as_printed), "paper, non-gated": theirs["non_gated"].map(as_printed)}
    )
    runs = where(choose.trainings(choose.at_full_width(results.rows)), modification="none", activation="relu")
    runs = runs.sort_values(["l1", "seed", "item"], kind="stable")
    for model in choose.model_order(runs["model"]):
        first = where(runs, model=model).iloc[0]
        settings = where(results.settings, study=first["study"], item=first["item"]).set_index("key")["value"]
        # The name of the text; the config has the path that it was read from.
        settings = settings.drop("data.source", errors="ignore")
        if first["text"]:
            settings.loc["data.source"] = first["text"]
        frame[f"ours, {model}"] = [_setting(settings, name) for name in frame["name"]]
    return frame


def activations(results: Results) -> pd.DataFrame:
    """Table 3: SiLU and ReLU, dense and sparse."""
    return _compare(results, "table3_activations", ["activation"], VARIANT_COLUMNS, _activation_variants, varied=True)


def gating(results: Results) -> pd.DataFrame:
    """Table 4: gated and non-gated blocks without and with L1."""
    return _compare(results, "table4_gating", ["gated"], VARIANT_COLUMNS, _gating_variants, varied=True)


def dead_neurons(results: Results) -> pd.DataFrame:
    """Table 5: mitigations of dead neurons."""
    return _compare(
        results, "table5_dead_neurons", ["modification"], VARIANT_COLUMNS, _modification_variants, varied=True
    )


def tasks(results: Results) -> pd.DataFrame:
    """Table 6: accuracy on each task, dense and sparse."""
    columns = {"mean": "accuracy"} | {task: f"accuracy:{task}" for task in TASKS}
    frame = _compare(results, "table6_tasks", [], columns, _dense_and_sparse)
    chance = {"mean": schema.MEAN_CHANCE} | {name: task.chance for name, task in schema.TASKS.items()}
    guess = pd.DataFrame([{"scale": "a guess", "sparse": "", "source": "chance", "note": ""} | chance])
    return pd.concat([frame, guess], ignore_index=True)


# Name in table 2 -> key in the saved config. Only these settings are copied into a built folder.
SETTINGS: dict[str, str] = {
    "hidden_size": "model.hidden_size",
    "intermediate_size": "model.intermediate_size",
    "activation": "model.activation",
    "layers": "model.layers",
    "attention_heads": "model.attention_heads",
    "key_value_heads": "model.key_value_heads",
    "initializer_range": "model.initializer_range",
    "rope_theta": "model.rope_theta",
    "tied_embeddings": "model.tied_embeddings",
    "vocab_size": "model.vocab_size",
    "tokenizer": "data.tokenizer",
    "dtype": "training.precision",
    "dataset": "data.source",
    "sequence_length": "training.sequence_length",
    "tokens_per_step": "training.tokens_per_step",
    "steps": "training.steps",
    "learning_rate": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_eps": "optimizer.eps",
    "warmup_steps": "optimizer.warmup_steps",
    "max_grad_norm": "optimizer.max_grad_norm",
}
FIXED_SETTINGS = {"optimizer": "adamw", "schedule": "cosine"}  # the only ones in experiments.train


def _setting(settings: pd.Series, name: str) -> str:
    if name in FIXED_SETTINGS and len(settings):
        return FIXED_SETTINGS[name]
    if name == "head_dim" and {"model.hidden_size", "model.attention_heads"} <= set(settings.index):
        return str(int(settings["model.hidden_size"]) // int(settings["model.attention_heads"]))
    return as_printed(settings.get(SETTINGS.get(name, ""), ""))


def as_printed(value: str) -> str:
    """Numbers and booleans in one form: 10000, 0.02, 1e-3, 1, true. Any other text stays as it is."""
    try:
        number = float(value)
    except ValueError:
        return value.lower() if value in ("True", "False") else value
    return choose.l1_label(number) if 0 < number < 0.01 else f"{number:.12g}"


def _compare(
    results: Results,
    reference: str,
    variant_columns: list[str],
    columns: dict[str, str],
    variants: Callable[[pd.DataFrame], list[Variant]],
    *,
    varied: bool = False,
) -> pd.DataFrame:
    """The paper's rows of `reference` and ours.

    columns: column of the table -> one of our measures.
    varied: the first of `variant_columns` is the subject of the table, see `_varied`."""
    published = paper.table(reference)
    described = choose.at_full_width(results.rows[results.rows["model"] != ""])
    lines = [
        line
        for scale, rows in described.groupby(described["model"].map(choose.scale))
        for one in variants(rows)
        for line in _variant_lines(rows, str(scale), one, columns)
    ]
    theirs = {scale.lower() for scale in published["scale"]}
    ours = pd.DataFrame(lines, columns=None if lines else ["scale", *variant_columns])
    if varied:
        ours = _varied(ours, variant_columns[0], theirs)
    known = ours.columns[ours.notna().any()]
    beside = [name + ending for name in columns for ending in render.BESIDE if name + ending in known]
    names = ["scale", *variant_columns, "sparse", "l1", "source", "seeds", "device", *columns, *beside, "note"]
    own_scales = [scale for scale in choose.model_order(set(ours["scale"])) if scale.lower() not in theirs]
    parts = [where(ours, scale=scale) for scale in own_scales]
    for scale in dict.fromkeys(published["scale"]):
        printed = where(published, scale=scale).assign(source="paper", device=PAPER_DEVICE, note="")
        measured = ours[ours["scale"].str.lower() == scale.lower()].assign(scale=scale)
        absent = pd.DataFrame([{"scale": scale, "source": "ours", "note": NOT_MEASURED}])
        both = pd.concat([printed, measured if len(measured) else absent], ignore_index=True)
        parts.append(_by_variant(both, [*variant_columns, "sparse", "l1"]))
    frame = pd.concat([part for part in parts if len(part)], ignore_index=True).reindex(columns=names)
    timed = [name for name, wanted in columns.items() if MEASURES[wanted.split(":")[0]].benchmark]
    frame.loc[(frame["source"] == "ours") & frame[timed].isna().all(axis=1), "sparse"] = ""
    if not timed:
        frame = frame.drop(columns="device")
    return _typed(frame, variant_columns)


def _varied(ours: pd.DataFrame, about: str, published: set[str]) -> pd.DataFrame:
    """Without scales that have one line, and without scales of our own that have one value of `about`, if others have
    two."""
    scale = ours["scale"].str.lower()
    values = ours.groupby(scale)[about].transform("nunique")
    wanted = (values > 1) | scale.isin(published) | (values.max() <= 1)
    return ours[(ours.groupby(scale)[about].transform("size") > 1) & wanted]


def _by_variant(frame: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Sort our rows directly below the paper's row of the same variant; `layers` is not part of a variant."""
    variants = frame[[key for key in keys if key != "layers"]].astype(str).agg(tuple, axis=1)
    order = {variant: position for position, variant in enumerate(dict.fromkeys(variants))}
    return frame.iloc[variants.map(order).argsort(kind="stable")]


def _typed(frame: pd.DataFrame, variant_columns: list[str]) -> pd.DataFrame:
    """Convert to plain types: text columns without NaN, numbers as floats or Int64."""
    texts = {"scale", "sparse", "source", "device", "note", *variant_columns} - {"layers"}
    whole = {"layers", "seeds"}
    for name in frame.columns:
        if name in texts:
            frame[name] = frame[name].astype(object).where(frame[name].notna(), "").astype(str)
        else:
            frame[name] = pd.to_numeric(frame[name]).astype("Int64" if name in whole else "float64")
    return frame


def _variant_lines(
    rows: pd.DataFrame, scale: str, variant: Variant, columns: dict[str, str]
) -> list[dict[str, object]]:
    """One line for each device on which the variant was benchmarked, or one with the devices of its other rows."""
    own = variant.of(rows)
    if own.empty:
        return []
    kinds = [MEASURES[wanted.split(":")[0]] for wanted in columns.values()]
    timed = choose.made_for_speed(where(own, op=tuple({kind.op for kind in kinds if kind.benchmark})))
    devices = sorted(set(timed["device"]))
    lines = []
    for device in devices or [""]:
        values = {name: measure(own, wanted, variant, device) for name, wanted in columns.items()}
        if all(value.missing == NOT_MEASURED for value in values.values()):
            continue
        line = {"scale": scale, "layers": own["layers"].dropna().max(), "source": "ours"}
        line["device"] = device or " and ".join(sorted(set(own["device"]) - {""}))
        seeds = max((value.seeds for value in values.values()), default=0)
        line |= variant.columns() | {"seeds": seeds or None}
        for name, wanted in columns.items():
            line |= _cells(name, values[name], MEASURES[wanted.split(":")[0]].metric, seeds)
        lines.append(line | {"note": _note(columns, values)})
    return lines


def _cells(name: str, measured: Measured, metric: str, seeds: int) -> dict[str, float]:
    """The number's column, and its companion columns that have a value. `seeds`: of the line."""
    percent = stats.gain_percent if metric in schema.LARGER_IS_BETTER else stats.cost_percent
    beside = {
        name + render.INTERVAL: measured.half_width,
        name + render.CHANGE: percent(measured.ratio),
        name + render.FEWER_SEEDS: measured.seeds if 0 < measured.seeds < seeds else math.nan,
    }
    return {name: measured.value} | {key: value for key, value in beside.items() if not math.isnan(value)}


def _note(columns: dict[str, str], values: dict[str, Measured]) -> str:
    """Why numbers are missing, or how they differ, grouped by reason: "forward, energy: no rows yet". If all are
    missing for one reason, the reason alone."""
    titles: dict[str, list[str]] = {}
    for name, wanted in columns.items():
        if reason := values[name].missing or values[name].remark:
            kind, _, task = wanted.partition(":")
            title = schema.TASKS[task].title if task else MEASURES[kind].title
            titles.setdefault(reason, []).append(title)
    if len(titles) == 1 and all(value.missing for value in values.values()):
        return next(iter(titles))
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in titles.items())


def _dense_and_sparse(rows: pd.DataFrame) -> list[Variant]:
    """The gated ReLU model without L1, run dense; with the recommended L1, run sparse; and with other L1 values that
    were timed."""
    other = [Variant(l1=l1, sparse=True) for l1 in _timed_l1(rows)]
    return list(dict.fromkeys([Variant(l1=0.0, sparse=False), *_recommended(rows), *other]))


def _with_baselines(rows: pd.DataFrame) -> list[Variant]:
    """The variants of `_dense_and_sparse`, with the dense form of every timed model behind its sparse one."""
    timed = _timed_l1(rows)
    return [
        variant
        for one in _dense_and_sparse(rows)
        for variant in ([one, replace(one, sparse=False)] if one.sparse and one.l1 in timed else [one])
    ]


def _timed_l1(rows: pd.DataFrame) -> list[float]:
    """The L1 values above 0 at which whole gated ReLU models were timed."""
    timed = choose.made_for_speed(choose.relu_runs(where(rows, op=schema.WHOLE_MODELS)))
    return sorted(set(timed["l1"].dropna()) - {0.0})


def _recommended(rows: pd.DataFrame) -> list[Variant]:
    models = [name for name in set(rows["model"]) if choose.scale(name) == name]
    l1 = choose.recommended_l1(rows, models[0]) if models else None
    return [] if l1 is None else [Variant(l1=l1, sparse=True)]


def _activation_variants(rows: pd.DataFrame) -> list[Variant]:
    silu = Variant(l1=0.0, sparse=False, activation="silu")
    return [Variant(l1=0.0, sparse=False), silu, *_recommended(rows)]


def _gating_variants(rows: pd.DataFrame) -> list[Variant]:
    relu = where(rows, activation="relu", modification="none")
    both = set(where(relu, gated=True)["l1"].dropna()) & set(where(relu, gated=False)["l1"].dropna())
    return [Variant(l1=l1, sparse=l1 > 0, gated=gated) for gated in (True, False) for l1 in sorted(both)]


def _modification_variants(rows: pd.DataFrame) -> list[Variant]:
    changed = where(rows, activation="relu", gated=True)
    found = changed[["modification", "l1"]].dropna().drop_duplicates().sort_values("l1")
    plain = [Variant(l1=0.0, sparse=False), *_recommended(rows)]
    other = [name for name in choose.MODIFICATIONS if name != "none"]
    return plain + [
        Variant(l1=l1, sparse=True, modification=m) for m in other for l1 in where(found, modification=m)["l1"]
    ]


@dataclass(frozen=True)
class Spec:
    """A table: file name, title, the function that makes it from results, and caption."""

    name: str
    title: str
    make: Callable[[Results], pd.DataFrame]
    caption: str


# What holds for all tables: pages say it once.
COMMON: tuple[str, ...] = (
    "±: half the width of a 95% confidence interval of the mean over seeds (Student's t); for two seeds, half their "
    "range; for the accuracies of one seed, of the mean over the tasks' items.",
    f"Random guessing scores {schema.MEAN_CHANCE:.1f}% on average over the seven tasks.",
    "A dash under “run sparse”: speed was not measured, and quality does not depend on it.",
)

TABLES: tuple[Spec, ...] = (
    Spec(
        "table1_scales", "Table 1: dense and sparse models at every scale", scales,
        "Sparse rows use the fastest sparse plan, at the recommended L1 and at other values that were timed. In "
        "brackets: the change against the fastest dense implementation of the same run (the row below, not run "
        "sparse); for the paper's rows, against its dense row. The paper's sparse 2B model uses a larger micro-batch, "
        "hence more memory.",
    ),
    Spec(
        "table2_hyperparameters", "Table 2: hyper-parameters", hyperparameters,
        "Our values are from the config saved with each run.",
    ),
    Spec(
        "table3_activations", "Table 3: ReLU and SiLU", activations,
        "A SiLU gate leaves every neuron active. The rows with L1 = 0 show what ReLU alone costs in quality.",
    ),
    Spec(
        "table4_gating", "Table 4: gated and non-gated blocks", gating,
        "A gated block also skips the up projection of neurons that do not fire; a non-gated one has none.",
    ),
    Spec(
        "table5_dead_neurons", "Table 5: mitigating dead neurons", dead_neurons,
        "Reinitialisation and L1 warm-up against no mitigation, each at its own L1 value. Figure 8 shows the dead "
        "neurons.",
    ),
    Spec(
        "table6_tasks", "Table 6: accuracy by task (%)", tasks,
        "Share of correct answers by the sum of log-probabilities. The mean needs all seven tasks.",
    ),
)  # fmt: skip
