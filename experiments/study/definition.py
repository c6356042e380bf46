"""Studies: files in `experiments/studies/` that list trainings, and the items that they expand to."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.run.config import find_yaml, listing_options, option, parse, to_dict
from experiments.run.environment import REPOSITORY
from experiments.run.errors import ConfigError
from experiments.run.files import sha256_json
from experiments.run.train_config import TEXT, TrainConfig
from experiments.run.values import A_NAME, NAME, in_one_line, shown
from experiments.study.graph import Expected, Graph, Item
from experiments.study.programs import PREPARE, config_difference, config_of

STUDIES = Path(__file__).resolve().parents[1] / "studies"
NOTEBOOKS = REPOSITORY / "notebooks"
# Parquet files of gather_nonzeros from which figures are drawn.
ACTIVITY_FILES = ("by_layer", "histogram", "by_position", "by_token", "unions")
TRAINING_METRICS = ("cross_entropy", "validation_cross_entropy", "nonzeros", "dead_fraction", "throughput")
# Of bench_kernels: what the rows of an operation must have, other than a time.
KERNEL_METRICS = {"ceiling_copy": "bandwidth", "ceiling_matmul": "rate", "ceiling_gather": "bandwidth"}
BLOCKS = ("ffn_forward", "ffn_training")
# Benchmarks of whole models and the operation of their rows; the metrics that these must have.
OF_MODELS = ("throughput", "peak_memory")
MODEL_BENCHMARKS = {"bench_forward": "model_forward", "bench_training": "model_training", "bench_generate": "generate"}
BENCHMARKS = ("bench_kernels", *MODEL_BENCHMARKS)
MEASUREMENTS = ("nonzeros", "evaluate", *BENCHMARKS)
KINDS = (PREPARE, "train", *MEASUREMENTS, "build", "notebooks")
# Kinds of items whose programs use no GPU.
ON_CPU = (PREPARE, "build", "notebooks")
# Arguments of a training that determine which tokens it reads, or whether those options are compatible.
_OF_THE_TEXT = ("config", "model", "model.", "data", "data.", "training.")
# Expected durations by kind, for studies that do not give them.
DEFAULT_SECONDS = 10.0


@dataclass
class StudyConfig:
    """A study: trainings, the measurements on each of them, and the tables and figures of all of them.

    With `parts`, it also includes the trainings and measurements of other studies, in its own folder, and builds one
    set of tables and figures from everything.
    """

    name: str = option("", "name of the study; set from the file name, so it cannot be given")
    tasks: str = option("", "folder with the task files, or hub to download them; empty: cross-entropy only")
    data: str = option("", "text to train on instead of the study's own: stdlib, path:... or hf:...")
    only: list[str] = option([], "items to run, together with the items that they need; empty: all")
    kinds: list[str] = option([], "kinds of items to include (train is required); empty: all. Text is always prepared")
    parts: list[str] = option([], "other studies whose trainings and measurements are included")
    preview: list[str] = option(
        [],
        "trainings whose figures are made as soon as they are gathered, in the folder first_figures beside the others",
    )
    bench_each: bool = option(
        False, "make each benchmark of whole models one item per training, so that they run in parallel"
    )
    runs: str = option("runs", "folder for runs; the study gets a folder in it")
    figures: str = option(
        "", "folder for tables and figures; the study gets a folder in it. Empty: <runs>/<study>.figures"
    )
    grid: dict[str, list[str]] = option({}, "option of a training -> its values; each combination is one training")
    trainings: dict[str, list[str]] = option({}, "name of a training -> its own arguments of experiments.train")
    benchmarks: dict[str, list[str]] = option(
        {},
        "name of an item that needs no training -> its kind, where that is not bench_kernels, and its own arguments: "
        "[bench_forward, model=0.5b]; empty: one item, called bench_kernels",
    )
    arguments: dict[str, list[str]] = option({}, "kind of item -> arguments that all items of the kind share")
    seconds: dict[str, float] = option(
        {}, "kind of item -> expected duration, to estimate the remaining time", unit="s"
    )

    def __post_init__(self) -> None:
        for name, kinds in (("arguments", self.arguments), ("seconds", self.seconds), ("kinds", self.kinds)):
            if unknown := [kind for kind in kinds if kind not in KINDS]:
                raise ConfigError(f"{name}: kinds of items are {', '.join(KINDS)}, got {', '.join(unknown)}")
        for name, lists in (
            ("trainings", self.trainings),
            ("benchmarks", self.benchmarks),
            ("arguments", self.arguments),
        ):
            for key, words in lists.items():
                arguments = _kind_and_arguments(words)[1] if name == "benchmarks" else words
                if wrong := [word for word in arguments if word.startswith("-") or word.find("=") < 1]:
                    first = f"; the first word may be one of {', '.join(BENCHMARKS)}" if name == "benchmarks" else ""
                    raise ConfigError(f"{name}: {key}: arguments are written option=value, got {wrong[0]!r}{first}")
        if wrong := [kind for kind, seconds in self.seconds.items() if not 0 < seconds < math.inf]:
            raise ConfigError(f"seconds: {wrong[0]} must be positive, got {self.seconds[wrong[0]]}")
        for key, values in self.grid.items():
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"grid: {key} must have values that differ, got {values}")
        if twice := sorted(self._from_grid().keys() & self.trainings.keys()):
            raise ConfigError(f"{', '.join(twice)}: both in the grid and among the trainings")
        if not self.runs:
            raise ConfigError("runs must name a folder, got an empty text")

    @property
    def folder(self) -> Path:
        """The folder of the study's runs."""
        return Path(self.runs) / self.name

    @property
    def output(self) -> Path:
        """The folder of its tables, figures and page."""
        return Path(self.figures) / self.name if self.figures else Path(f"{self.folder}.figures")

    def with_parts(self) -> list[StudyConfig]:
        """The parts, with this study's folder and name, and the study itself.

        Raises:
            ConfigError: a part does not exist, or has parts itself.
        """
        found = []
        for name in self.parts:
            part = load_study(name)
            if part.parts:
                raise ConfigError(f"parts: {name} has parts itself")
            kinds = [kind for kind in part.kinds or KINDS if kind in (self.kinds or KINDS)]
            part = replace(part, name=self.name, runs=self.runs, figures=self.figures, kinds=kinds)
            found.append(replace(part, data=self.data or part.data, tasks=self.tasks or part.tasks))
        return [*found, self]

    def training_arguments(self, name: str) -> list[str]:
        """The arguments of experiments.train for one of its own trainings, without those that name its folder."""
        data = [f"data={self.data}"] if self.data else []
        return [*self.arguments.get("train", []), *data, *self.trainings[name]]

    def expanded(self) -> StudyConfig:
        """The same study with the trainings of its grid written out."""
        return replace(self, trainings=self._from_grid() | self.trainings, grid={})

    def expected_seconds(self, item: Item) -> float:
        """The item's expected duration."""
        return self.seconds.get(item.kind, DEFAULT_SECONDS)

    def _from_grid(self) -> dict[str, list[str]]:
        if not self.grid:
            return {}
        combinations = [tuple(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        return {_training_name(values): [f"{key}={value}" for key, value in values] for values in combinations}


def _kind_and_arguments(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Of an item in `benchmarks`: its kind, which the first word may name, and its own arguments."""
    return (words[0], words[1:]) if words and words[0] in BENCHMARKS else ("bench_kernels", words)


def _training_name(values: Sequence[tuple[str, str]]) -> str:
    """For instance `0.5b_l1_2e-05_seed_0`."""
    return "_".join(value if key == "model" else f"{key.rpartition('.')[2]}_{_plain(value)}" for key, value in values)


def _plain(value: str) -> str:
    """A canonical name: equal numbers get equal names, however they are written."""
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return str(number(value))
    return value


def study_names() -> list[str]:
    """The studies in this repository."""
    return sorted(path.stem for path in STUDIES.glob("*.yaml"))


def load_study(name: str, arguments: Sequence[str] = ()) -> StudyConfig:
    """The study `experiments/studies/<name>.yaml` (or of a file, when `name` is a path), with `option=value` arguments
    and its grid expanded.

    Raises:
        ConfigError: no such study (the message names those there are), an unknown option (it lists the valid ones), or
            a wrong value.
    """
    with naming_study(name):
        return _load_study(name, arguments)


@contextlib.contextmanager
def naming_study(name: str) -> Iterator[None]:
    """Inside the block, every error of a study becomes one line that names the study.

    Raises:
        ConfigError: for any `ConfigError` inside, and for a file that cannot be read.
    """
    try:
        yield
    except (ConfigError, UnicodeDecodeError, OSError) as error:
        line = in_one_line(error)
        raise ConfigError(line if line.startswith(f"study={name}:") else f"study={name}: {line}") from error


def _load_study(name: str, arguments: Sequence[str]) -> StudyConfig:
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
    """Returns `name` if it is a valid name of a study, an item or a job.

    Raises:
        ConfigError: it does not match A_NAME.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(f"{what} {shown(name)}: a name must be {A_NAME}")
    return name


def check_path(path: Path) -> Path:
    """Returns `path` if jobs can write there.

    Raises:
        ConfigError: it contains a control character or a %, which SLURM would expand in names of log files.
    """
    if not str(path).isprintable() or "%" in str(path):
        raise ConfigError(f"{str(path)!r}: the folder of runs must not contain %, control characters or line breaks")
    return path


# --- items ------------------------------------------------------------------------------------------------------------


def study_items(config: StudyConfig) -> Iterator[Item]:
    """Every item of the study, each after the items that it needs."""
    there: dict[str, Item] = {}
    for item in _all_items(config):
        item = replace(item, needs=tuple(name for name in item.needs if name in there))
        if item.name not in there:
            there[item.name] = item
            yield item
        elif there[item.name] != item and item.kind != PREPARE:
            raise ConfigError(
                f"item {item.name} is there twice with different arguments: in two parts, or as a training's name"
            )


def _all_items(config: StudyConfig) -> Iterator[Item]:
    measured = []
    for part in config.with_parts():
        kinds = part.kinds or KINDS
        for item in _own_items(part):
            if item.kind in kinds or (item.kind == PREPARE and "train" in kinds):
                measured.append(item.name)
                yield item
    first = [f"nonzeros_{name}" for name in config.preview]
    builds = [_build(config, "first_figures", config.output / "first_figures", first)] if first else []
    builds.append(_build(config, "build", config.output, dict.fromkeys(measured)))
    for last in (*builds, _notebooks(config)):
        if last.kind in (config.kinds or KINDS):
            yield last


def _own_items(config: StudyConfig) -> Iterator[Item]:
    """The trainings, their texts and the measurements on them."""
    trainings = list(config.trainings)
    # Firing is defined for ReLU models only: a SiLU is never exactly zero.
    sparse = [name for name in trainings if "model.activation=silu" not in config.trainings[name]]
    texts = prepared_texts({name: config.training_arguments(name) for name in trainings}, config.name, config.folder)
    yield from {item.name: item for item in texts.values()}.values()
    measured = [_training(config, name, texts[name]) for name in trainings]
    measured += [_nonzeros(config, name) for name in sparse]
    measured += [_evaluation(config, name) for name in trainings]
    if not config.parts:
        benchmarks = config.benchmarks or {"bench_kernels": []}
        measured += [_benchmark(config, name, *_kind_and_arguments(words)) for name, words in benchmarks.items()]
    for kind, op in MODEL_BENCHMARKS.items():
        if config.bench_each:
            measured += [_bench_model(config, f"{kind}_{name}", kind, op, [name]) for name in trainings]
        elif trainings:
            measured.append(_bench_model(config, kind, kind, op, trainings))
    yield from measured


def prepared_texts(trainings: Mapping[str, Sequence[str]], study: str, folder: Path) -> dict[str, Item]:
    """Training -> the item that makes its token files; trainings that read the same tokens share one.

    Args:
        trainings: name -> arguments of experiments.train.
        study: the study's name, for the items' own arguments.
        folder: the study's folder.

    Raises:
        ConfigError: wrong arguments; the message names the training.
    """
    items: dict[tuple[str, ...], Item] = {}
    found = {}
    for name, arguments in trainings.items():
        own = tuple(argument for argument in arguments if _is_of_the_text(argument))
        # Parsing takes 14 ms, too long for thousands of trainings that differ only in their seed.
        if own not in items:
            config = config_of(Item(name, "train", "experiments.train", own, folder))
            items[own] = _preparation(config, own, study, folder)
        found[name] = items[own]
    return found


def _is_of_the_text(argument: str) -> bool:
    group, dot, _ = argument.partition("=")[0].strip().partition(".")
    return group + dot in _OF_THE_TEXT and not argument.startswith("training.seed=")


def _preparation(config: TrainConfig, arguments: Sequence[str], study: str, folder: Path) -> Item:
    """The name is a digest of everything that determines the tokens and their folder, so it is unique to a text."""
    text = {key: value for key, value in to_dict(config.data).items() if key != "name"}
    name = f"{PREPARE}_{sha256_json([text, config.model.vocab_size])[:8]}"
    place = (f"run.study={study}", f"run.item={name}", f"run.dir={folder / name}")
    return Item(
        name=name,
        kind=PREPARE,
        module="experiments.prepare_data",
        arguments=(*arguments, *place),
        folder=folder / name,
        files=(folder / name / TEXT,),
        transient=True,
    )


def _item(config: StudyConfig, name: str, kind: str, *own: str, **fields: Any) -> Item:
    module = {"train": "experiments.train", "nonzeros": "experiments.gather_nonzeros"}.get(kind, f"experiments.{kind}")
    place = (f"run.study={config.name}", f"run.item={name}", f"run.dir={config.folder / name}")
    shared = [] if kind == "train" else config.arguments.get(kind, [])
    return Item(
        name=name, kind=kind, module=module, arguments=(*shared, *own, *place), folder=config.folder / name, **fields
    )


def _expected(op: str, *metrics: str, may_miss: bool = True, **columns: object) -> tuple[Expected, ...]:
    return tuple(Expected((("op", op), ("metric", m), *columns.items()), may_miss) for m in metrics)


def _training(config: StudyConfig, name: str, text: Item) -> Item:
    expected = _expected("train", *TRAINING_METRICS, may_miss=False, layer=None)
    return _item(config, name, "train", *config.training_arguments(name), needs=(text.name,), expected=expected)


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


def _benchmark(config: StudyConfig, name: str, kind: str, own: Sequence[str]) -> Item:
    """An item that needs no training. Of kernels, rows are expected of the operations that the arguments name, or of
    blocks where they name none."""
    if kind in MODEL_BENCHMARKS:
        return _item(config, name, kind, *own, expected=_expected(MODEL_BENCHMARKS[kind], *OF_MODELS))
    arguments = (*config.arguments.get(kind, []), *own)
    named = [argument.partition("=")[2] for argument in arguments if argument.startswith("ops=")]
    ops = [op.strip() for op in named[-1].strip("[] ").split(",")] if named else BLOCKS
    expected = tuple(one for op in ops for one in _expected(op, KERNEL_METRICS.get(op, "time")))
    return _item(config, name, kind, *own, expected=expected)


def _bench_model(config: StudyConfig, name: str, kind: str, op: str, trainings: list[str]) -> Item:
    folders = ",".join(str(config.folder / training) for training in trainings)
    expected = [found for training in trainings for found in _expected(op, *OF_MODELS, pattern=training)]
    return _item(config, name, kind, f"checkpoints=[{folders}]", needs=tuple(trainings), expected=tuple(expected))


def _build(config: StudyConfig, name: str, out: Path, needs: Iterable[str]) -> Item:
    return Item(
        name=name,
        kind="build",
        module="analysis.build",
        arguments=(f"source={config.folder}", f"out={out}"),
        folder=config.folder / name,
        needs=tuple(needs),
        files=(out / "index.html", out / "rows.csv"),
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
        # Without notebooks the item is never done, and running it reports why.
        files=tuple(folder / name for name in names or ["*.ipynb"]),
    )
