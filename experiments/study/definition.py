"""What to run, as items: of a study (a file in `experiments/studies/`), or of one command with the values to sweep."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import experiments
from experiments.run.config import find_yaml, listing_options, nearest, option, parse, to_dict
from experiments.run.environment import REPOSITORY
from experiments.run.errors import ConfigError
from experiments.run.files import sha256_json
from experiments.run.output import OutputConfig
from experiments.run.train_config import TEXT, ModelConfig, RunConfig
from experiments.run.values import NAME, in_one_line, shown
from experiments.study.graph import PREPARE, Expected, Graph, Item, config_difference, config_of, entry_point

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
KINDS = (PREPARE, "train", "nonzeros", "evaluate", *BENCHMARKS, "build", "notebooks")
# Kinds of items whose programs use no GPU.
ON_CPU = (PREPARE, "build", "notebooks")
# Arguments of a training that determine which tokens it reads, or whether those options are compatible.
_OF_THE_TEXT = re.compile(r"\s*((config|model|data)\s*=|(model|data)\.|training\.(?!seed=))")
# Expected durations by kind, for studies that do not give them.
DEFAULT_SECONDS = 10.0
# Between values of a sweep: no comma in brackets, and none after a backslash.
_BETWEEN = re.compile(r"(?<!\\),(?![^\[{]*[\]}])")
_COMMAS = "commas separate values, each for a run of its own; a comma within a value is written \\,"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._+=-]+")

# Name of a model -> the first training that has it, and its options.
Models = dict[str, tuple[str, dict[str, Any]]]


@dataclass
class StudyConfig:
    """A study: trainings, the measurements on each of them, and the tables and figures of all of them.

    With `parts`, it also includes the trainings and measurements of other studies, in its own folder, and builds one
    set of tables and figures from everything.
    """

    name: str = ""  # of its file, and therefore no option
    tasks: str = option("", "folder with the task files, or hub to download them; empty: cross-entropy only")
    data: str = option("", "text to train on instead of the study's own: stdlib, path:... or hf:...")
    only: list[str] = option([], "items to run, together with the items that they need; empty: all")
    kinds: list[str] = option(
        [], f"kinds of items to include, of {', '.join(KINDS[1:])}; empty: all. Text is always prepared"
    )
    parts: list[str] = option([], "other studies whose trainings and measurements are included")
    preview: list[str] = option(
        [],
        "trainings whose figures are made as soon as they are gathered, in the folder first_figures beside the others",
    )
    bench_each: bool = option(
        False, "make each benchmark of whole models one item per training, so that they run in parallel"
    )
    training_gpus: int | None = option(
        None, "GPUs of a training on each machine, at most; null: as the cluster's file says", minimum=0
    )
    runs: str = option(
        "runs", "folder of runs; the study's are in <runs>/<study>, tables and figures in <runs>/<study>.figures"
    )
    grid: dict[str, list[str]] = option({}, "option of a training -> its values; each combination is one training")
    trainings: dict[str, list[str]] = option({}, "name of a training -> its own arguments of experiments.train")
    checkpoints: dict[str, str] = option(
        {}, "name -> folder or hub name of a model that was trained elsewhere, measured like a training of the study"
    )
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
        for name in ("arguments", "seconds", "kinds"):
            if unknown := [kind for kind in getattr(self, name) if kind not in KINDS]:
                raise ConfigError(f"{name}: kinds of items are {', '.join(KINDS)}, got {', '.join(unknown)}")
        for name in ("trainings", "benchmarks", "arguments"):
            for key, words in getattr(self, name).items():
                arguments = _kind_and_arguments(words)[1] if name == "benchmarks" else words
                if wrong := [word for word in arguments if word.startswith("-") or word.find("=") < 1]:
                    first = f"; the first word may be one of {', '.join(BENCHMARKS)}" if name == "benchmarks" else ""
                    raise ConfigError(f"{name}: {key}: arguments are written option=value, got {wrong[0]!r}{first}")
        if wrong := [kind for kind, seconds in self.seconds.items() if not 0 < seconds < math.inf]:
            raise ConfigError(f"seconds: {wrong[0]} must be positive, got {self.seconds[wrong[0]]}")
        for key, values in self.grid.items():
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"grid: {key} must have values that differ, got {values}")
        from_grid = sweep(self.grid) if self.grid else {}
        if twice := sorted(from_grid.keys() & self.trainings.keys()):
            raise ConfigError(f"{', '.join(twice)}: both in the grid and among the trainings")
        if twice := sorted(self.checkpoints.keys() & (from_grid | self.trainings).keys()):
            raise ConfigError(f"{', '.join(twice)}: both among the checkpoints and among the trainings")
        if not self.runs:
            raise ConfigError("runs must name a folder, got an empty text")

    @property
    def folder(self) -> Path:
        """The folder of the study's runs."""
        return Path(self.runs) / self.name

    @property
    def output(self) -> Path:
        """The folder of its tables, figures and page."""
        return Path(f"{self.folder}.figures")

    def with_parts(self) -> list[StudyConfig]:
        """The parts, with this study's folder and name, and the study itself.

        Raises:
            ConfigError: a part does not exist, or has parts itself.
        """
        parts = []
        for name in self.parts:
            part = load_study(name)
            if part.parts:
                raise ConfigError(f"parts: {name} has parts itself")
            kinds = [kind for kind in part.kinds or KINDS if kind in (self.kinds or KINDS)]
            part = replace(part, name=self.name, runs=self.runs, kinds=kinds)
            parts.append(replace(part, data=self.data or part.data, tasks=self.tasks or part.tasks))
        return [*parts, self]

    def training_arguments(self, name: str) -> list[str]:
        """The arguments of experiments.train for one of its own trainings, without those that name its folder."""
        data = [f"data={self.data}"] if self.data else []
        return [*self.arguments.get("train", []), *data, *self.trainings[name]]


def _kind_and_arguments(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Kind and arguments of an item in `benchmarks`; the first word may name the kind."""
    return (words[0], words[1:]) if words and words[0] in BENCHMARKS else ("bench_kernels", words)


def sweep(values: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Every combination of options' values, as arguments, keyed by a name made from the values
    (`0.5b_l1_2e-05_seed_0`).

    Raises:
        ConfigError: two combinations have one name.
    """
    runs: dict[str, list[str]] = {}
    for chosen in itertools.product(*values.values()):
        pairs = list(zip(values, chosen, strict=True))
        name = "_".join(value_name(key, value) for key, value in pairs)
        if name in runs:
            raise ConfigError(f"two of the runs would be called {name}: give their values in separate commands")
        runs[name] = [f"{key}={value}" for key, value in pairs]
    return runs


def value_name(key: str, value: object) -> str:
    """The part of a run's name for a value: `seed_1`; for the model, its name. Equal numbers get equal names, however
    they are written."""
    plain = str(value)
    for number in (int, float):
        with contextlib.suppress(ValueError):
            plain = str(number(plain))
            break
    plain = _NOT_IN_NAMES.sub("-", plain).strip("-") or "none"
    return plain if key == "model" else f"{key.rpartition('.')[2]}_{plain}"


def load_study(name: str, arguments: Sequence[str] = ()) -> StudyConfig:
    """The study `experiments/studies/<name>.yaml` (or of a file, when `name` is a path), with `option=value` arguments
    and its grid expanded.

    Raises:
        ConfigError: no such study (the message names those there are), an unknown option (it lists the valid ones), or
            a wrong value.
    """
    with naming_study(name):
        path = find_yaml(name, STUDIES, "study")
        with listing_options(StudyConfig, f"study={name}"):
            config = parse(StudyConfig, [f"config={path}", *arguments])
            trainings = (sweep(config.grid) if config.grid else {}) | config.trainings
            return replace(config, name=check_name(path.stem, "study"), trainings=trainings, grid={})


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
        ConfigError: it does not match NAME.
    """
    if not NAME.expression.fullmatch(name):
        raise ConfigError(f"{what} {shown(name)}: a name must be {NAME.words}")
    return name


def check_path(path: Path) -> None:
    """Whether jobs can write there.

    Raises:
        ConfigError: it contains a control character, a %, which SLURM would expand in names of log files, or a folder
            ~ that the shell did not expand.
    """
    if not str(path).isprintable() or "%" in str(path) or any(part.startswith("~") for part in path.parts):
        raise ConfigError(f"{str(path)!r}: a folder of runs must not contain %, /~, control characters or line breaks")


# --- items ------------------------------------------------------------------------------------------------------------


def study_items(config: StudyConfig) -> Iterator[Item]:
    """Every item of the study, each after the items that it needs."""
    items: dict[str, Item] = {}
    for item in _with_duplicates(config):
        item = replace(item, needs=tuple(name for name in item.needs if name in items))
        if item.name not in items:
            items[item.name] = item
            yield item
        elif items[item.name] != item and item.kind != PREPARE:
            raise ConfigError(
                f"item {item.name} is there twice with different arguments: in two parts, or as a training's name"
            )


def _with_duplicates(config: StudyConfig) -> Iterator[Item]:
    """The items of all parts, which may share some, and those that are made from all of them."""
    measured = []
    models: Models = {}
    for part in config.with_parts():
        kinds = part.kinds or KINDS
        for item in _own_items(part, models):
            if item.kind in kinds or (item.kind == PREPARE and "train" in kinds):
                measured.append(item.name)
                yield item
    kinds = config.kinds or KINDS
    builds = [("build", config.output, tuple(dict.fromkeys(measured)))]
    if config.preview:
        first = tuple(f"nonzeros_{name}" for name in config.preview)
        builds.insert(0, ("first_figures", config.output / "first_figures", first))
    for name, out, needs in builds if "build" in kinds else ():
        yield Item(
            name=name,
            kind="build",
            module="analysis.build",
            arguments=(f"source={config.folder}", f"out={out}"),
            folder=config.folder / name,
            needs=needs,
            files=(out / "index.html", out / "rows.csv"),
        )
    if "notebooks" in kinds:
        folder = config.folder / "notebooks"
        names = [path.name for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
        yield Item(
            name="notebooks",
            kind="notebooks",
            module="experiments.run_notebooks",
            arguments=(f"notebooks={NOTEBOOKS}", f"results={config.output}", f"out={folder}"),
            folder=folder,
            needs=("build",),
            # Without notebooks the item is never done, and running it reports why.
            files=tuple(folder / name for name in names or ["*.ipynb"]),
        )


def _own_items(config: StudyConfig, known: Models) -> Iterator[Item]:
    """The trainings, their texts and the measurements on them."""
    names, folder = list(config.trainings), config.folder
    texts = prepared_texts({name: config.training_arguments(name) for name in names}, config.name, folder, known)
    yield from {item.name: item for item in texts.values()}.values()
    for name in names:
        expected = _expected("train", *TRAINING_METRICS, may_miss=False, layer=None)
        arguments = config.training_arguments(name)
        yield _item(config, name, "train", *arguments, needs=(texts[name].name,), expected=expected)
    models = {name: str(folder / name) for name in names} | config.checkpoints
    needed = {name: (name,) if name in config.trainings else () for name in models}
    # That of a training is its checkpoint's.
    texts_of = {name: [f"data={config.data}"] if config.data and name in config.checkpoints else [] for name in models}
    for name, checkpoint in models.items():
        if "model.activation=silu" in config.trainings.get(name, []):
            continue  # firing is defined for ReLU models only: a SiLU is never exactly zero
        expected = _expected("nonzeros", "nonzeros", "nonzeros_max", "silent_fraction", may_miss=False, layer=0)
        files = tuple(folder / f"nonzeros_{name}" / f"nonzeros_{table}.parquet" for table in ACTIVITY_FILES)
        fields = {"needs": needed[name], "expected": expected, "files": files}
        arguments = [f"checkpoint={checkpoint}", *texts_of[name]]
        yield _item(config, f"nonzeros_{name}", "nonzeros", *arguments, **fields)
    tasks = [f"tasks={config.tasks}"] if config.tasks else []
    for name, checkpoint in models.items():
        expected = (
            *_expected("evaluate", "validation_cross_entropy", may_miss=False, task=None),
            *_expected("evaluate", "accuracy", may_miss=not config.tasks, task="mean"),
        )
        arguments = [f"checkpoint={checkpoint}", *tasks, *texts_of[name]]
        yield _item(config, f"evaluate_{name}", "evaluate", *arguments, needs=needed[name], expected=expected)
    if not config.parts:
        for name, words in (config.benchmarks or {"bench_kernels": []}).items():
            kind, own = _kind_and_arguments(words)
            yield _item(config, name, kind, *own, expected=_expected_of_benchmark(config, kind, own))
    for kind, op in MODEL_BENCHMARKS.items():
        together = {kind: names} if names and not config.bench_each else {f"{kind}_{name}": [name] for name in names}
        for item, measured in (together | {f"{kind}_{name}": [name] for name in config.checkpoints}).items():
            arguments = [f"checkpoints=[{','.join(models[name] for name in measured)}]", *texts_of[measured[0]]]
            expected = tuple(one for name in measured for one in _expected(op, *OF_MODELS, pattern=name))
            needs = tuple(need for name in measured for need in needed[name])
            yield _item(config, item, kind, *arguments, needs=needs, expected=expected)


def _expected_of_benchmark(config: StudyConfig, kind: str, own: Sequence[str]) -> tuple[Expected, ...]:
    """The rows of an item that needs no training: of kernels, those of the operations that the arguments name, or of
    blocks where they name none."""
    if kind in MODEL_BENCHMARKS:
        return _expected(MODEL_BENCHMARKS[kind], *OF_MODELS)
    arguments = (*config.arguments.get(kind, []), *own)
    named = [argument.partition("=")[2] for argument in arguments if argument.startswith("ops=")]
    ops = [op.strip() for op in named[-1].strip("[] ").split(",")] if named else BLOCKS
    return tuple(one for op in ops for one in _expected(op, KERNEL_METRICS.get(op, "time")))


def prepared_texts(
    trainings: Mapping[str, Sequence[str]], study: str, folder: Path, models: Models | None = None
) -> dict[str, Item]:
    """Training -> the item that makes its token files; trainings that read the same tokens share one.

    Args:
        trainings: name -> arguments of experiments.train.
        study: the study's name, for the items' own arguments.
        folder: the study's folder.
        models: those of the study's other parts, to which these are added; None: models may share a name.

    Raises:
        ConfigError: wrong arguments, or two models of one name; the message names the trainings.
    """
    items: dict[tuple[str, ...], Item] = {}
    texts = {}
    for name, arguments in trainings.items():
        chosen = tuple(filter(_OF_THE_TEXT.match, arguments))
        # Parsing takes 14 ms, too long for thousands of trainings that differ only in their seed.
        if chosen not in items:
            config = config_of(Item(name, "train", "experiments.train", chosen, folder))
            if models is not None:
                _check_model(name, config.model, models)
            text = {key: value for key, value in to_dict(config.data).items() if key != "name"}
            # A digest of everything that determines the tokens and their folder: it is unique to a text.
            item = f"{PREPARE}_{sha256_json([text, config.model.vocab_size])[:8]}"
            place = (f"run.study={study}", f"run.item={item}", f"run.dir={folder / item}")
            items[chosen] = Item(
                name=item,
                kind=PREPARE,
                module="experiments.prepare_data",
                arguments=(*chosen, *place),
                folder=folder / item,
                files=(folder / item / TEXT,),
                transient=True,
            )
        texts[name] = items[chosen]
    return texts


def _check_model(training: str, model: ModelConfig, models: Models) -> None:
    """Adds the training's model to `models`. Tables know a model by its name, activation and gate.

    Raises:
        ConfigError: another training has a model of that name that differs in other options.
    """
    own = {key: value for key, value in to_dict(model).items() if key not in ("activation", "gated")}
    first, known = models.setdefault(model.name, (training, own))
    if differing := [f"model.{key} is {known[key]} and {own[key]}" for key in own if own[key] != known[key]]:
        raise ConfigError(
            f"{first} and {training}: tables would take both for one model, {shown(model.name)}, but "
            f"{', '.join(differing)}: give one of them another model.name="
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


# --- one command ------------------------------------------------------------------------------------------------------


def command_items(module: str, arguments: Sequence[str]) -> tuple[str, Path, list[Item], dict[str, Any]]:
    """One item for each combination of values that the arguments name (`training.seed=0,1,2`), after what it needs.
    Several runs have items and folders of their own: inside of `run.dir` if that is given, else beside where a single
    run would be.

    Returns the study's name and folder, the items, and the configurations of their programs (None for the making of a
    text).

    Raises:
        ConfigError: no such module, one without a typed configuration, or wrong arguments.
    """
    swept: dict[str, list[str]] = {}
    fixed = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        values = [value.replace("\\,", ",") for value in _BETWEEN.split(text)]
        if len(values) == 1:
            fixed.append(key + equals + values[0])
        elif "" in values or len(set(values)) < len(values):
            raise ConfigError(f"{key} must be given values that differ, got {text!r} ({_COMMAS})")
        else:
            swept[key] = values
    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    base = given.get("run.item", "" if module == "experiments.train" else module.rpartition(".")[2])
    if "run.item" in swept:
        raise ConfigError("run.item: give one name, which then begins those of the runs, or none")
    items, configs = [], {}
    for name, chosen in sweep(swept).items():
        own = [*fixed, *chosen]
        try:
            study, item, config = _command_item(module, own)
        except ConfigError as error:
            raise ConfigError(f"{error} ({_COMMAS})" if name else str(error)) from error
        if name:
            run = f"{base}_{name}" if base else name
            folder = Path(given.get("run.dir", item.folder.parent)) / run
            study, item, config = _command_item(module, [*own, f"run.item={run}", f"run.dir={folder}"])
        items.append(item)
        configs[item.name] = config
    folder = items[0].folder.parent
    if items[0].kind != "train":
        return study, folder, items, configs
    texts = prepared_texts({item.name: item.arguments for item in items}, study, folder)
    trainings = [replace(item, needs=(texts[item.name].name,)) for item in items]
    made = {text.name: text for text in texts.values()}
    return study, folder, [*made.values(), *trainings], dict.fromkeys(made) | configs


def _command_item(module: str, arguments: Sequence[str]) -> tuple[str, Item, Any]:
    """(study, item, configuration) of one run: `module.main` with these arguments."""
    if not re.fullmatch(r"\w+(\.\w+)*", module):
        raise ConfigError(f"a module is wanted, such as experiments.train, got {module!r}")
    item = Item(name="", kind="", module=module, arguments=tuple(arguments), folder=Path())
    try:
        _, config_class = entry_point(item)
    except (ImportError, AttributeError) as error:
        programs = [f"experiments.{path.stem}" for path in Path(experiments.__file__).parent.glob("[a-z]*.py")]
        meant = nearest(module, programs) if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"{module} cannot be launched: {error}{meant}") from error
    if config_class is None:
        raise ConfigError(f"{module} takes no typed configuration: run it by hand, or as part of a study")
    config: Any = parse(config_class, list(arguments))
    run = getattr(config, "run", None)
    program = module.rpartition(".")[2]
    if isinstance(run, RunConfig) and program == "train":
        name, folder, expected = run.item, run.folder, _expected("train", *TRAINING_METRICS, may_miss=False)
    elif isinstance(run, OutputConfig):
        name, folder, expected = run.name(program), run.folder(program), (Expected(()),)
    else:
        raise ConfigError(f"{module} leaves no result rows that would tell when it is done: run it by hand")
    check_path(folder.absolute())
    kind = "nonzeros" if program == "gather_nonzeros" else program
    item = replace(item, name=check_name(name, "item"), kind=kind, folder=folder, expected=expected)
    return check_name(run.study, "study"), item, config
