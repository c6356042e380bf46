"""What a study is: a file of `experiments/studies/` with trainings, and the items that are made of it."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.run.config import find_yaml, listing_options, option, parse
from experiments.run.environment import REPOSITORY
from experiments.run.errors import ConfigError
from experiments.study.graph import Expected, Graph, Item
from experiments.study.programs import config_difference

STUDIES = Path(__file__).resolve().parents[1] / "studies"
NOTEBOOKS = REPOSITORY / "notebooks"
# Parquet files of gather_nonzeros that figures are drawn from.
ACTIVITY_FILES = ("by_layer", "histogram", "by_position", "by_token", "unions")
TRAINING_METRICS = ("cross_entropy", "validation_cross_entropy", "nonzeros", "dead_fraction", "throughput")
KINDS = ("train", "nonzeros", "evaluate", "bench_kernels", "bench_forward", "bench_training", "build", "notebooks")
# Where a study does not say how long an item of some kind takes.
DEFAULT_SECONDS = 10.0
# Names of studies and items become those of jobs and folders. None of these characters means anything to a shell, to
# SLURM's file name patterns (%j), or to a path.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")


@dataclass
class StudyConfig:
    """A study: trainings, what is measured on each of them, and the tables and figures of all of them."""

    name: str = option("", "name of the study: that of its file, so it cannot be given")
    tasks: str = option("", "folder with the task files, or hub to download them; empty: cross-entropy only")
    data: str = option("", "text to train on instead of the study's own: stdlib, path:... or hf:...")
    only: list[str] = option([], "items to run, with what they need; empty: all")
    kinds: list[str] = option([], "kinds of items to have, with train among them; empty: all")
    bench_each: bool = option(
        False, "bench_forward and bench_training as one item for each training, to run in parallel"
    )
    runs: str = option("runs", "folder of the runs; the study is a folder in it")
    figures: str = option("paper_figures", "folder of tables and figures; the study is a folder in it")
    grid: dict[str, list[str]] = option({}, "option of a training -> its values; each combination is one training")
    trainings: dict[str, list[str]] = option({}, "name of a training -> its own arguments of experiments.train")
    arguments: dict[str, list[str]] = option({}, "kind of item -> arguments that all items of the kind share")
    seconds: dict[str, float] = option({}, "kind of item -> expected duration, for the time left", unit="s")

    def __post_init__(self) -> None:
        for name, kinds in (("arguments", self.arguments), ("seconds", self.seconds), ("kinds", self.kinds)):
            if unknown := [kind for kind in kinds if kind not in KINDS]:
                raise ConfigError(f"{name}: kinds of items are {', '.join(KINDS)}, got {', '.join(unknown)}")
        if twice := sorted(self._from_grid().keys() & self.trainings.keys()):
            raise ConfigError(f"{', '.join(twice)}: both in the grid and among the trainings")

    @property
    def folder(self) -> Path:
        """Where the study's runs are."""
        return Path(self.runs) / self.name

    @property
    def output(self) -> Path:
        """Where its tables, figures and page are."""
        return Path(self.figures) / self.name

    def expanded(self) -> StudyConfig:
        """The same study with the trainings of its grid written out."""
        return replace(self, trainings=self._from_grid() | self.trainings, grid={})

    def expected_seconds(self, item: Item) -> float:
        """How long the item is expected to take."""
        return self.seconds.get(item.kind, DEFAULT_SECONDS)

    def _from_grid(self) -> dict[str, list[str]]:
        if not self.grid:
            return {}
        combinations = [tuple(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        return {_training_name(values): [f"{key}={value}" for key, value in values] for values in combinations}


def _training_name(values: Sequence[tuple[str, str]]) -> str:
    """For instance `0.5b_l1_2e-05_seed_0`."""
    return "_".join(value if key == "model" else f"{key.rpartition('.')[2]}_{_plain(value)}" for key, value in values)


def _plain(value: str) -> str:
    """The same number is the same name, however it is written."""
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return str(number(value))
    return value


def study_names() -> list[str]:
    """The studies that this repository brings."""
    return sorted(path.stem for path in STUDIES.glob("*.yaml"))


def load_study(name: str, arguments: Sequence[str] = ()) -> StudyConfig:
    """The study `experiments/studies/<name>.yaml` (or of a file, when `name` is a path), with `option=value` arguments
    and its grid expanded.

    Raises:
        ConfigError: no such study (the message names those there are), an unknown option (it lists the valid ones), or
            a wrong value.
    """
    path = find_yaml(name, STUDIES, "study")
    with listing_options(StudyConfig, f"study={name}"):
        config = parse(StudyConfig, [f"config={path}", *arguments])
        if config.name:
            raise ConfigError("the name of a study is that of its file: the option name must not be given")
        return replace(config, name=check_name(path.stem, "study")).expanded()


def study_graph(config: StudyConfig) -> Graph:
    """All items of a study.

    Raises:
        ConfigError: for a name or a folder that cannot be used.
    """
    graph = Graph(study_items(config), config_difference)
    for name in graph.items:
        check_name(name, "item")
    check_path(config.folder.absolute())
    return graph


def check_name(name: str, what: str) -> str:
    """`name`, if a study, an item or a job may be called so.

    Raises:
        ConfigError: it holds anything but letters, digits and . _ + = -, or begins with one of these.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(f"{what} {name!r}: names have letters, digits and . _ + = - only, and begin with the former")
    return name


def check_path(path: Path) -> Path:
    """`path`, if jobs may write there.

    Raises:
        ConfigError: it holds a control character, or a % (which SLURM would replace in the names of log files).
    """
    if not str(path).isprintable() or "%" in str(path):
        raise ConfigError(f"{str(path)!r}: the folder of runs must not hold %, control characters or line breaks")
    return path


# --- items ------------------------------------------------------------------------------------------------------------


def study_items(config: StudyConfig) -> Iterator[Item]:
    """Every item of the study, each after what it needs."""
    wanted, there = config.kinds or KINDS, set()
    for item in _all_items(config):
        if item.kind in wanted:
            there.add(item.name)
            yield replace(item, needs=tuple(name for name in item.needs if name in there))


def _all_items(config: StudyConfig) -> Iterator[Item]:
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


def _item(config: StudyConfig, name: str, kind: str, *own: str, **fields: Any) -> Item:
    module = {"train": "experiments.train", "nonzeros": "experiments.gather_nonzeros"}.get(kind, f"experiments.{kind}")
    place = (f"run.study={config.name}", f"run.item={name}", f"run.dir={config.folder / name}")
    arguments = (*config.arguments.get(kind, []), *own, *place)
    return Item(name=name, kind=kind, module=module, arguments=arguments, folder=config.folder / name, **fields)


def _expected(op: str, *metrics: str, may_miss: bool = True, **columns: object) -> tuple[Expected, ...]:
    return tuple(Expected((("op", op), ("metric", m), *columns.items()), may_miss) for m in metrics)


def _training(config: StudyConfig, name: str) -> Item:
    data = (f"data={config.data}",) if config.data else ()
    expected = _expected("train", *TRAINING_METRICS, may_miss=False, layer=None)
    return _item(config, name, "train", *data, *config.trainings[name], expected=expected)


def _nonzeros(config: StudyConfig, training: str) -> Item:
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


def _evaluation(config: StudyConfig, training: str) -> Item:
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


def _bench_kernels(config: StudyConfig) -> Item:
    expected = (*_expected("ffn_forward", "time"), *_expected("ffn_training", "time"))
    return _item(config, "bench_kernels", "bench_kernels", expected=expected)


def _bench_model(config: StudyConfig, name: str, kind: str, op: str, trainings: list[str]) -> Item:
    folders = ",".join(str(config.folder / training) for training in trainings)
    expected = [
        found for training in trainings for found in _expected(op, "throughput", "peak_memory", pattern=training)
    ]
    return _item(config, name, kind, f"checkpoints=[{folders}]", needs=tuple(trainings), expected=tuple(expected))


def _build(config: StudyConfig, needs: tuple[str, ...]) -> Item:
    return Item(
        name="build",
        kind="build",
        module="analysis.build",
        arguments=(f"source={config.folder}", f"out={config.output}"),
        folder=config.folder / "build",
        needs=needs,
        files=(config.output / "index.html", config.output / "rows.csv"),
    )


def _notebooks(config: StudyConfig) -> Item:
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
