"""The items of a study: what to run, in which order, with which arguments, and which rows prove that it was done."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.run.config import option
from experiments.run.environment import REPOSITORY
from experiments.run.errors import ConfigError
from experiments.study.graph import Expected, Item

NOTEBOOKS = REPOSITORY / "notebooks"
# Parquet files of gather_nonzeros that figures are drawn from.
ACTIVITY_FILES = ("by_layer", "histogram", "by_position", "by_token", "unions")
TRAINING_METRICS = ("cross_entropy", "validation_cross_entropy", "nonzeros", "dead_fraction", "throughput")
KINDS = ("train", "nonzeros", "evaluate", "bench_kernels", "bench_forward", "bench_training", "build", "notebooks")


@dataclass
class ReproduceConfig:
    """Reproduce the paper at one scale: train, measure, evaluate, and draw every table and figure.

    The actions are run, list (the commands) and status (what is done): python -m experiments.reproduce run scale=demo
    """

    scale: str = option("demo", "which study", presets="reproduce")
    tasks: str = option("", "folder with the task files, or hub to download them; empty: cross-entropy only")
    data: str = option("", "text to train on instead of the scale's own: stdlib, path:... or hf:...")
    only: list[str] = option([], "items to run, with what they need; empty: all")
    kinds: list[str] = option([], "kinds of items to have, with train among them; empty: all")
    bench_each: bool = option(
        False, "bench_forward and bench_training as one item for each training, to run in parallel"
    )
    runs: str = option("runs", "folder of the runs; the study is a folder in it")
    figures: str = option("paper_figures", "folder of tables and figures; the study is a folder in it")
    trainings: dict[str, list[str]] = option({}, "name of a training -> its own arguments of experiments.train")
    arguments: dict[str, list[str]] = option({}, "kind of item -> arguments that all items of the kind share")
    seconds: dict[str, float] = option({}, "kind of item -> expected duration, for the time left", unit="s")

    def __post_init__(self) -> None:
        for name, kinds in (("arguments", self.arguments), ("seconds", self.seconds), ("kinds", self.kinds)):
            if unknown := [kind for kind in kinds if kind not in KINDS]:
                raise ConfigError(f"{name}: kinds of items are {', '.join(KINDS)}, got {', '.join(unknown)}")

    @property
    def folder(self) -> Path:
        """Where the study's runs are."""
        return Path(self.runs) / self.scale

    @property
    def output(self) -> Path:
        """Where its tables, figures and page are."""
        return Path(self.figures) / self.scale


def items(config: ReproduceConfig) -> Iterator[Item]:
    """Every item of the study, each after what it needs."""
    wanted, there = config.kinds or KINDS, set()
    for item in _all_items(config):
        if item.kind in wanted:
            there.add(item.name)
            yield replace(item, needs=tuple(name for name in item.needs if name in there))


def _all_items(config: ReproduceConfig) -> Iterator[Item]:
    trainings = list(config.trainings)
    # Whether a neuron fires is a question for ReLU models: a SiLU is never exactly zero.
    sparse = [name for name in trainings if "model.activation=silu" not in config.trainings[name]]
    measured = [_training(config, name) for name in trainings]
    measured += [_nonzeros(config, name) for name in sparse]
    measured += [_evaluation(config, name) for name in trainings]
    measured.append(_bench_kernels(config))
    for kind, op in (("bench_forward", "model_forward"), ("bench_training", "model_training")):
        if config.bench_each:
            measured += [_bench_model(config, f"{kind}_{name}", kind, op, [name]) for name in trainings]
        else:
            measured.append(_bench_model(config, kind, kind, op, trainings))
    yield from measured
    yield _build(config, tuple(item.name for item in measured))
    yield _notebooks(config)


def _item(config: ReproduceConfig, name: str, kind: str, *own: str, **fields: object) -> Item:
    module = {"train": "experiments.train", "nonzeros": "experiments.gather_nonzeros"}.get(kind, f"experiments.{kind}")
    place = (f"run.study={config.scale}", f"run.item={name}", f"run.dir={config.folder / name}")
    arguments = (*config.arguments.get(kind, []), *own, *place)
    return Item(name=name, kind=kind, module=module, arguments=arguments, folder=config.folder / name, **fields)


def _data(config: ReproduceConfig) -> tuple[str, ...]:
    return (f"data={config.data}",) if config.data else ()


def _expected(op: str, *metrics: str, may_miss: bool = True, **columns: object) -> tuple[Expected, ...]:
    return tuple(Expected((("op", op), ("metric", m), *columns.items()), may_miss) for m in metrics)


def _training(config: ReproduceConfig, name: str) -> Item:
    expected = _expected("train", *TRAINING_METRICS, may_miss=False, layer=None)
    return _item(config, name, "train", *_data(config), *config.trainings[name], expected=expected)


def _nonzeros(config: ReproduceConfig, training: str) -> Item:
    name = f"nonzeros_{training}"
    return _item(
        config,
        name,
        "nonzeros",
        f"checkpoint={config.folder / training}",
        needs=(training,),
        expected=_expected("nonzeros", "nonzeros", "nonzeros_max", "silent_fraction", may_miss=False, layer=0),
        files=tuple(config.folder / name / f"nonzeros_{table}.parquet" for table in ACTIVITY_FILES),
    )


def _evaluation(config: ReproduceConfig, training: str) -> Item:
    return _item(
        config,
        f"evaluate_{training}",
        "evaluate",
        f"checkpoint={config.folder / training}",
        *([f"tasks={config.tasks}"] if config.tasks else []),
        needs=(training,),
        expected=(
            *_expected("evaluate", "validation_cross_entropy", may_miss=False, task=None),
            *_expected("evaluate", "accuracy", may_miss=not config.tasks, task="mean"),
        ),
    )


def _bench_kernels(config: ReproduceConfig) -> Item:
    expected = (*_expected("ffn_forward", "time"), *_expected("ffn_training", "time"))
    return _item(config, "bench_kernels", "bench_kernels", expected=expected)


def _bench_model(config: ReproduceConfig, name: str, kind: str, op: str, trainings: list[str]) -> Item:
    folders = ",".join(str(config.folder / training) for training in trainings)
    expected = [
        found for training in trainings for found in _expected(op, "throughput", "peak_memory", pattern=training)
    ]
    return _item(config, name, kind, f"checkpoints=[{folders}]", needs=tuple(trainings), expected=tuple(expected))


def _build(config: ReproduceConfig, needs: tuple[str, ...]) -> Item:
    return Item(
        name="build",
        kind="build",
        module="analysis.build",
        arguments=(f"source={config.folder}", f"out={config.output}"),
        folder=config.folder / "build",
        needs=needs,
        files=(config.output / "index.html", config.output / "rows.csv"),
    )


def _notebooks(config: ReproduceConfig) -> Item:
    folder = config.folder / "notebooks"
    names = [path.name for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
    return Item(
        name="notebooks",
        kind="notebooks",
        module="experiments.run_notebooks",
        arguments=(f"notebooks={NOTEBOOKS}", f"results={config.output}", f"out={folder}"),
        folder=folder,
        needs=("build",),
        # Without any notebook the item is never done, and running it says why.
        files=tuple(folder / name for name in names or ["*.ipynb"]),
    )
