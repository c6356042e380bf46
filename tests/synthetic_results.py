"""Invented run folders with the shape of real ones, for tests of the analysis only: never committed as results.

`write_study` follows the layout that experiments write: runs/<study>/<item>/ with rows.csv and, for a training,
metrics.jsonl and config.yaml, and for nonzeros_* the parquet files. Numbers come from simple formulas and a seed.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from analysis import schema
from analysis.load import Results, load

TASKS = tuple(schema.TASKS)
TOKENS_PER_STEP = 4096
PARAMETERS = 100_000
NEURONS = 24  # of a layer, where neurons are told apart


@dataclass(frozen=True)
class Study:
    """What the invented study measured.

    gpu: the sparse backend is hopper, and energy is measured; without it only the reference ran, and energy is missing.
    seeds: of every training; with several, items are named as those of a sweep.
    sweep: gated ReLU trainings only, without benchmarks, as the sweep of a small model.
    runs: these trainings instead of those that L1 values and seeds make.
    """

    name: str = "demo"
    model: str = "demo"
    layers: int = 4
    hidden: int = 128
    intermediate: int = 512
    l1: tuple[float, ...] = (0.0, 1e-5, 2e-5, 1e-4)
    steps: int = 60
    gpu: bool = False
    device: str = "Synthetic CPU"
    speed: float = 0.3  # sparse over dense speed at five non-zeros per hundred neurons
    tasks: tuple[str, ...] = ("piqa", "arc_easy")
    date: str = "2026-01-02T03:04:05+00:00"
    seeds: tuple[int, ...] = (0,)
    sweep: bool = False
    runs: tuple[Run, ...] = ()

    @property
    def backend(self) -> str:
        """The sparse one."""
        return "hopper" if self.gpu else "reference"


DEMO = Study(steps=20, layers=3)  # the fixtures `study` and `demo`
PAPER = Study(  # the fixture `paper`: a model of the paper's shape on a GPU
    name="h200", model="1.5b", layers=9, hidden=2048, intermediate=5632, steps=20, gpu=True, device="First GPU",
    speed=1.2, tasks=TASKS,
)  # fmt: skip
SWEEP = Study(  # the fixture `sweep`: L1 values of a small model, in three seeds
    name="scaled", model="21m", layers=8, hidden=384, intermediate=1056, steps=20, gpu=True, device="First GPU",
    tasks=TASKS, seeds=(0, 1, 2), sweep=True,
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One training of the study."""

    item: str
    l1: float = 0.0
    activation: str = "relu"
    gated: bool = True
    modification: str = "none"
    seed: int = 0


def trainings(study: Study) -> list[Run]:
    if study.runs:
        return list(study.runs)
    if study.sweep:
        return [
            Run(f"{study.model}_l1_{value:g}_seed_{seed}", value, seed=seed)
            for value in study.l1
            for seed in study.seeds
        ]
    relu = [Run("relu" if value == 0 else f"relu_l1_{value:g}", value) for value in study.l1]
    recommended = study.l1[len(study.l1) // 2]
    return [
        Run("silu", activation="silu"),
        *relu,
        Run("nongated", gated=False),
        Run(f"nongated_l1_{recommended:g}", recommended, gated=False),
        Run("dead_reinit", recommended, modification="dead_neuron_reinit"),
        Run("l1_warmup", recommended * 10, modification="l1_warmup"),
    ]


def row(study: Study, run: Run | None, item: str, op: str, metric: str, value: float | None, **fields) -> dict:
    """A whole result row; `run` fills in the description of the model."""
    described = {} if run is None else {
        "model": model_name(study, run), "layers": study.layers, "activation": run.activation, "gated": run.gated,
        "l1": run.l1, "modification": run.modification, "seed": run.seed, "text": "invented text", "step": study.steps,
        "tokens_trained": study.steps * TOKENS_PER_STEP,
        "tokens_per_parameter": study.steps * TOKENS_PER_STEP / PARAMETERS,
    }  # fmt: skip
    common = {
        "study": study.name, "item": item, "op": op, "metric": metric, "unit": schema.METRICS[metric][0],
        "value": value, "hidden": study.hidden, "intermediate": study.intermediate, "device": study.device,
        "torch": "2.13.0", "revision": "0" * 40, "dirty": False, "date": study.date,
    }  # fmt: skip
    merged = dict.fromkeys(schema.NAMES) | {"seed": 0} | described | common | fields
    unknown = merged.keys() - set(schema.NAMES)
    assert not unknown, unknown
    return merged


def model_name(study: Study, run: Run) -> str:
    """As the experiments name their configurations."""
    return study.model + ("" if run.gated else "-nongated")


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, schema.NAMES, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def results_of(folder: Path, rows: list[dict]) -> Results:
    """These rows, written beneath the folder and loaded."""
    write_rows(folder / "item" / "rows.csv", rows)
    return load(folder)


def layer_nonzeros(study: Study, run: Run) -> np.ndarray:
    """Invented mean non-zeros per layer: a hump, falling with L1."""
    if run.activation == "silu":
        return np.full(study.layers, float(study.intermediate))
    depth = np.linspace(0, 1, study.layers)
    shape = 0.03 + 0.35 * np.exp(-(((depth - 0.4) / 0.25) ** 2)) + 0.1 * depth
    fall = 1 / (1 + run.l1 / 3e-6) if run.modification != "l1_warmup" else 0.3
    return study.intermediate * shape * fall * (1.0 if run.gated else 1.2) * (1 + 0.05 * run.seed)


def write_study(root: Path, study: Study = Study()) -> Path:
    """Write every item of the study beneath root/<study>; returns that folder."""
    folder = root / study.name
    rng = np.random.default_rng(7)
    for run in trainings(study):
        _write_training(folder / run.item, study, run, rng)
        _write_evaluation(folder / f"evaluate_{run.item}", study, run)
        if run.activation == "relu":
            _write_nonzeros(folder / f"nonzeros_{run.item}", study, run, rng)
    if study.sweep:
        return folder
    _write_benchmark(folder / "bench_forward", study, "model_forward", "twell", 1.0)
    _write_benchmark(folder / "bench_training", study, "model_training", "hybrid", 0.8)
    _write_generation(folder / "bench_generate", study)
    _write_kernels(folder / "bench_kernels", study)
    return folder


def validation_loss(run: Run) -> float:
    excess = 800 * max(run.l1 - 2e-5, 0)
    return 4.0 + excess + (0.05 if run.activation == "relu" else 0) - (0 if run.gated else 0.03) + 0.02 * run.seed


def _write_training(folder: Path, study: Study, run: Run, rng: np.random.Generator) -> None:
    nonzeros = layer_nonzeros(study, run)
    dead = np.clip(0.5 - 2 * nonzeros / study.intermediate, 0, 1) * (0.2 if run.modification != "none" else 1)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, study.steps + 1):
            record = _record(study, run, rng, step, nonzeros, dead)
            file.write(json.dumps(record) + "\n")
    config = {
        "model": {"hidden_size": study.hidden, "intermediate_size": study.intermediate, "attention_heads": 4},
        "optimizer": {"learning_rate": 1e-3, "beta1": 0.9},
        "run": {"dir": "/somewhere/private"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    loss = validation_loss(run)
    rows = [
        row(study, run, run.item, "train", metric, value, plan="dense", backend="dense", tokens=TOKENS_PER_STEP)
        for metric, value in (
            ("cross_entropy", loss - 0.1),
            ("validation_cross_entropy", loss),
            ("nonzeros", float(nonzeros.mean())),
            ("dead_fraction", float(dead.mean())),
            ("throughput", 15.0),
        )
    ]
    write_rows(folder / "rows.csv", rows)
    if run.activation == "relu":
        described = {"study": study.name, "item": run.item, "model": model_name(study, run), "l1": run.l1}
        _write_tables(folder, described, {"in_training": _rates_in_training(study)})


def _rates_in_training(study: Study) -> pd.DataFrame:
    """Neuron 0 always fires, 1 never, 2 until step 2, 3 not at step 2; the others by their number."""
    steps = sorted({1, 2, 4, study.steps})
    rates = np.tile((np.arange(NEURONS) + 1) / (NEURONS + 1), (len(steps), 1))
    rates[:, 1] = 0
    rates[2:, 2] = 0
    rates[1, 3] = 0
    parts = [
        pd.DataFrame({"step": step, "tokens": 1024, "layer": layer, "neuron": range(NEURONS), "rate": rates[at]})
        for at, step in enumerate(steps)
        for layer in range(study.layers)
    ]
    return pd.concat(parts, ignore_index=True)


def _record(
    study: Study, run: Run, rng: np.random.Generator, step: int, nonzeros: np.ndarray, dead: np.ndarray
) -> dict:
    progress = step / study.steps
    settle = 1 + 3 * np.exp(-12 * progress) * (nonzeros < study.intermediate)
    decay = 4.5 * np.exp(-5 * progress)
    return {
        "step": step,
        "tokens": step * TOKENS_PER_STEP,
        "cross_entropy": validation_loss(run) - 0.1 + decay + 0.03 * rng.standard_normal(),
        "validation_cross_entropy": validation_loss(run) + decay if step % 10 == 0 else None,
        "l1": 2.0 / progress**0.2,
        "nonzeros": np.minimum(nonzeros * settle, study.intermediate).tolist(),
        "dead_fraction": (dead * (1 - np.exp(-6 * progress))).tolist(),
        "learning_rate": 1e-3,
    }


def _write_evaluation(folder: Path, study: Study, run: Run) -> None:
    item = folder.name
    rows = [row(study, run, item, "evaluate", "validation_cross_entropy", validation_loss(run), tokens=20000)]
    for i, task in enumerate(TASKS):
        measured = task in study.tasks
        value = 30.0 + 5 * i - 2e4 * max(run.l1 - 2e-5, 0) + run.seed if measured else None
        found = {"low": value - 1.5, "high": value + 1.5} if measured else {"missing": "no local data"}
        rows.append(row(study, run, item, "evaluate", "accuracy", value, task=task, **found))
    write_rows(folder / "rows.csv", rows)


def _write_nonzeros(folder: Path, study: Study, run: Run, rng: np.random.Generator) -> None:
    item, nonzeros = folder.name, layer_nonzeros(study, run)
    rows = []
    for layer, mean in enumerate(nonzeros):
        values = {
            "nonzeros": mean, "nonzeros_p50": mean * 0.8, "nonzeros_p99": mean * 3, "silent_fraction": 0.2,
            "nonzeros_max": round(min(mean * 12, study.intermediate)), "hot_share": 0.6,
        }  # fmt: skip
        rows += [row(study, run, item, "nonzeros", m, float(v), layer=layer, tokens=8192) for m, v in values.items()]
    dead = {window: 0.4 - 0.1 * i - 0.01 * run.seed for i, window in enumerate((2**15, 2**17, 2**20))}
    rows += [row(study, run, item, "nonzeros", "dead_fraction", v, tokens=window) for window, v in dead.items()]
    rows.append(row(study, run, item, "nonzeros", "nonzeros", float(nonzeros.mean()), tokens=8192))
    write_rows(folder / "rows.csv", rows)
    described = {"study": study.name, "item": item, "model": model_name(study, run), "l1": run.l1}
    _write_tables(folder, described, _nonzeros_frames(study, nonzeros, rng))


def _write_tables(folder: Path, described: dict, frames: dict[str, pd.DataFrame]) -> None:
    for name, frame in frames.items():
        for position, (column, value) in enumerate(described.items()):
            frame.insert(position, column, value)
        frame.to_parquet(folder / f"nonzeros_{name}.parquet", index=False)


def _nonzeros_frames(study: Study, nonzeros: np.ndarray, rng: np.random.Generator) -> dict[str, pd.DataFrame]:
    layers = np.arange(study.layers)
    words = [" the", "\n", " of", "self", "(", "_size", "日本", "$x", " return", "import"] + [
        f"tok{i}" for i in range(50)
    ]
    per_token = nonzeros.mean() * np.exp(rng.normal(0, 0.6, len(words)))
    counts = (20000 / np.arange(1, len(words) + 1)).astype(int)
    by_token = pd.DataFrame({"token_id": range(len(words)), "text": words, "count": counts})
    by_token["frequency"] = by_token["count"] / by_token["count"].sum()
    by_token["mean"] = per_token
    for layer in layers:
        by_token[f"layer_{layer}"] = per_token * nonzeros[layer] / nonzeros.mean()
    positions = np.arange(128)
    decay = 1 + 6 / (1 + positions)
    groups = np.array([16, 32, 64, 128, 256])
    fraction = 1 - (1 - np.minimum(nonzeros / study.intermediate, 0.99)[:, None]) ** (groups**0.45)
    levels = np.arange(0, study.intermediate + 1, max(study.intermediate // 64, 1))
    weight = np.exp(-(((np.log1p(levels)[None] - np.log1p(nonzeros)[:, None]) / 0.5) ** 2))
    frames = {
        "by_layer": {
            "layer": layers, "neurons": study.intermediate, "tokens": 80, "mean": nonzeros, "max": nonzeros * 4,
            "p50": nonzeros * 0.8, "p99": nonzeros * 3, "silent_fraction": 0.1, "hot_share": 0.5,
        },
        "histogram": {
            "layer": layers.repeat(len(levels)), "nonzeros": np.tile(levels, study.layers),
            "tokens": (weight * 1000).astype(int).ravel(),
        },
        "by_position": {
            "layer": layers.repeat(len(positions)), "position": np.tile(positions, study.layers),
            "mean": (nonzeros[:, None] * decay * np.exp(rng.normal(0, 0.05, (study.layers, 128)))).ravel(),
            "tokens": 64,
        },
        "by_neuron": {
            "layer": layers.repeat(NEURONS), "neuron": np.tile(np.arange(NEURONS), study.layers),
            "rate": np.tile(np.linspace(0.9, 0.0, NEURONS), study.layers),
        },
        "unions": {
            "layer": layers.repeat(len(groups)), "group": np.tile(groups, study.layers),
            "mean": (fraction * study.intermediate).ravel(), "fraction": fraction.ravel(),
        },
    }  # fmt: skip
    tables = {name: pd.DataFrame(columns) for name, columns in frames.items()}
    return tables | {"by_token": by_token, "masks": _masks(study, words, rng)}


def _masks(study: Study, words: list[str], rng: np.random.Generator) -> pd.DataFrame:
    """Two sequences of 40 tokens; neurons 4 and 5 of every layer fire together, 6 fires where 7 does not."""
    frame = pd.DataFrame({"index": range(80), "token_id": np.arange(80) % len(words)})
    frame["text"] = [words[token] for token in frame["token_id"]]
    frame["position"] = frame["index"] % 40
    for layer in range(study.layers):
        mask = rng.random((80, NEURONS)) < 0.3
        mask[:, 5], mask[:, 7] = mask[:, 4], ~mask[:, 6]
        frame[f"layer_{layer}"] = [row.tobytes() for row in np.packbits(mask, axis=1)]
    return frame


def sparse_speed(study: Study, active_fraction: float) -> float:
    """Invented speed of the sparse plan over the dense one."""
    return study.speed * 2 / (1 + active_fraction / 0.05)


def _write_benchmark(folder: Path, study: Study, op: str, plan: str, scale: float) -> None:
    rows = []
    for run in trainings(study):
        active = layer_nonzeros(study, run).mean() / study.intermediate
        gains = {"dense": 1.0}
        if run.activation == "relu":
            gains[plan] = scale * sparse_speed(study, active)
        for name, gain in gains.items():
            rows += _benchmark_rows(folder.name, study, run, op, name, gain)
        if op == "model_forward" and run.activation == "relu":
            rows += _layer_rows(folder.name, study, run)
    write_rows(folder / "rows.csv", rows)


def _benchmark_rows(item: str, study: Study, run: Run, op: str, plan: str, gain: float) -> list[dict]:
    sparse = plan != "dense"
    fields = {
        "plan": plan, "backend": study.backend if sparse else "dense_compiled", "baseline": "dense_compiled",
        "pattern": run.item, "tokens": 8192, "mean_nnz": float(layer_nonzeros(study, run).mean()), "n": 10,
    }  # fmt: skip
    rate = 100.0 * gain
    spread = {"low": rate * 0.97, "high": rate * 1.02}
    rows = [row(study, run, item, op, "throughput", rate, ratio=gain, **spread, **fields)]
    if not sparse:  # eager transformers: what the paper compares with, here 1.25 times slower than the fastest form
        eager = fields | {"backend": "dense_eager", "ratio": 0.8}
        rows.append(row(study, run, item, op, "throughput", 80.0, **eager))
    energy = {"ratio": gain**0.8} if study.gpu else {"missing": "no NVML on this device"}
    rows.append(row(study, run, item, op, "energy", 5 / gain**0.8 if study.gpu else None, **energy, **fields))
    if op == "model_training":
        rows.append(row(study, run, item, op, "peak_memory", 20.0 / gain**0.5, ratio=gain**0.5, **fields))
    return rows


# How much faster than twell, and the columns that count neurons.
LAYER_PLANS: dict[str, tuple[float, dict[str, int]]] = {
    "twell": (1.0, {}),
    "twell_hot": (1.1, {"hot": 128}),
    "twell_ordered": (1.2, {"hot": 256}),
    "twell_live": (1.4, {"hot": 256, "silent": 64}),
    "dense_live": (0.9, {"silent": 64}),
}
LAYER_TOKENS = 8192


def _layer_rows(item: str, study: Study, run: Run) -> list[dict]:
    rows = []
    for layer, mean in enumerate(layer_nonzeros(study, run)):
        ratio = sparse_speed(study, mean / study.intermediate)
        fields = {"layer": layer, "mean_nnz": float(mean), "tokens": LAYER_TOKENS}
        fields |= {"pattern": f"{run.item}/layer{layer}"}
        rows.append(row(study, run, item, "ffn_forward", "time", 2.0, plan="dense", backend="dense_fused", **fields))
        for plan, (faster, counts) in LAYER_PLANS.items() if study.gpu else [("twell", LAYER_PLANS["twell"])]:
            time = 2.0 / (ratio * faster)
            backend = "dense" if plan == "dense_live" else study.backend
            sparse = {"plan": plan, "backend": backend, "baseline": "dense_fused", "ratio": ratio * faster}
            spread = {"low": 0.95 * time, "high": 1.05 * time}
            rows.append(row(study, run, item, "ffn_forward", "time", time, **sparse, **spread, **counts, **fields))
    return rows


def ceiling_rows(study: Study, item: str) -> list[dict]:
    """The invented machine's rates, for blocks of the study's shape with LAYER_TOKENS tokens."""
    none = {"hidden": None, "intermediate": None}
    return [
        row(study, None, item, "ceiling_copy", "bandwidth", 4300.0, **none),
        row(study, None, item, "ceiling_gather", "bandwidth", 9300.0, gated=True),
        row(study, None, item, "ceiling_matmul", "rate", 680.0, tokens=LAYER_TOKENS),
    ]


def _write_generation(folder: Path, study: Study) -> None:
    """Of all ReLU runs: the sparse backend is twice as fast as dense products, CUDA graphs four times as fast as none;
    16 sequences take as long as one. Without a GPU nothing is compiled."""
    rows = []
    for run in trainings(study):
        if run.activation != "relu":
            continue
        for batch in (1, 16):
            for plan, backend, speed in (
                *(("dense", "dense_eager", 1.0), ("dense", "dense_compiled", 4.0)),
                *(("twell", study.backend, 2.0), ("twell", f"{study.backend}_compiled", 8.0)),
            ):
                absent = not study.gpu and backend.endswith("_compiled")
                base, name = (4.0, "dense_compiled") if study.gpu else (1.0, "dense_eager")
                fields = {
                    "plan": plan, "backend": backend, "batch": batch, "prompt_tokens": 128, "tokens": 128 * batch,
                    "mean_nnz": float(layer_nonzeros(study, run).mean()), "pattern": run.item,
                }  # fmt: skip
                alone = {"same_tokens": 0.75} | ({"device_time": 40.0} if study.gpu else {})
                values = {"throughput": 0.05 * batch * speed, "energy": 900.0 / batch / speed, **alone}
                for metric, value in values.items():
                    if absent and metric in alone:
                        continue
                    why = "no NVML on this device" if metric == "energy" and not study.gpu else absent and "no GPU"
                    cells = {"baseline": name, "ratio": speed / base, "low": value * 0.9, "high": value * 1.1}
                    cells = {"missing": why} if why else {"check_error": 1e-3} | (cells if metric not in alone else {})
                    value = None if why else value
                    rows.append(row(study, run, folder.name, "generate", metric, value, **fields, **cells))
    write_rows(folder / "rows.csv", rows)


def _write_kernels(folder: Path, study: Study) -> None:
    rows = ceiling_rows(study, folder.name) if study.gpu else []
    ops = {"ffn_forward": ("twell", 4096), "ffn_training": ("csr", 4096)}
    for op, (kind, tokens) in (ops | {"ffn_forward_graph": ("twell", 16)} if study.gpu else ops).items():
        for mean in (4, 10, 29, 60, 120):
            fields = {"tokens": tokens, "mean_nnz": float(mean), "pattern": "synthetic", "gated": True}
            rows.append(row(study, None, folder.name, op, "time", 2.0, plan="dense", backend="dense_fused", **fields))
            backends = ((study.backend, 1.0, kind), (study.backend, 1.3, schema.HOT_PLANS[kind]))
            for backend, scale, plan in (*backends, ("triton", 0.9, kind)) if study.gpu else backends:
                ratio = scale * sparse_speed(study, mean / study.intermediate)
                fields |= {"plan": plan, "backend": backend, "baseline": "dense_fused", "check_error": 1e-3}
                rows.append(row(study, None, folder.name, op, "time", 2.0 / ratio, ratio=ratio, **fields))
    write_rows(folder / "rows.csv", rows)
