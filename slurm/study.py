"""What is to be run: the items of a study's file, or the single item of one command."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.run.config import CONFIG_ROOT, option, parse
from experiments.run.errors import ConfigError
from experiments.run.output import OutputConfig
from experiments.run.train_config import RunConfig
from experiments.study.definition import TRAINING_METRICS, ReproduceConfig, items
from experiments.study.graph import Expected, Graph, Item
from experiments.study.runner import config_difference, entry_point
from slurm.cluster import check_name, check_path, find_yaml, listing

STUDIES = Path(__file__).resolve().parent / "studies"


@dataclass
class StudyConfig(ReproduceConfig):
    """A study: trainings, what is measured on each of them, and the tables and figures of it all."""

    scale: str = option("", "name of the study: that of its file")
    grid: dict[str, list[str]] = option({}, "option of a training -> its values; each combination is one training")

    def __post_init__(self) -> None:
        super().__post_init__()
        if twice := sorted(self.from_grid().keys() & self.trainings.keys()):
            raise ConfigError(f"{', '.join(twice)}: both in the grid and among the trainings")

    def from_grid(self) -> dict[str, list[str]]:
        """The trainings of the grid: name -> arguments."""
        if not self.grid:
            return {}
        combinations = [tuple(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        return {_training_name(chosen): [f"{key}={value}" for key, value in chosen] for chosen in combinations}


def _training_name(chosen: Sequence[tuple[str, str]]) -> str:
    """As `0.5b_l1_2e-05_seed_0`."""
    return "_".join(value if key == "model" else f"{key.rpartition('.')[2]}_{value}" for key, value in chosen)


def load_study(name: str, arguments: Sequence[str] = ()) -> StudyConfig:
    """The study `studies/<name>.yaml` or `experiments/configs/reproduce/<name>.yaml` (or of a file, when `name` is a
    path), with `option=value` arguments.

    Raises:
        ConfigError: no such study (the message names those there are), an unknown option (it lists the valid ones), or
            a wrong value.
    """
    path = find_yaml(name, STUDIES, "study", CONFIG_ROOT / "reproduce")
    with listing(StudyConfig, f"study={name}"):
        config = parse(StudyConfig, [f"config={path}", *arguments])
        if config.scale:
            raise ConfigError("the name of a study is that of its file: scale must not be given")
        check_name(path.stem, "study")
        trainings = config.from_grid() | config.trainings
        return dataclasses.replace(config, scale=path.stem, trainings=trainings, grid={})


def study_graph(config: StudyConfig) -> Graph:
    """All items of a study. Raises `ConfigError` for a name or a folder that cannot be."""
    graph = Graph(items(config), config_difference)
    for name in graph.items:
        check_name(name, "item")
    check_path(config.folder.absolute())
    return graph


def single_item(module: str, arguments: Sequence[str]) -> tuple[str, Item]:
    """(study, item) of one command: `module.main` with these arguments.

    Raises:
        ConfigError: no such module, one without a typed configuration, or wrong arguments.
    """
    probe = Item(name="", kind="", module=module, arguments=tuple(arguments), folder=Path())
    try:
        _, config_class = entry_point(probe)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{module} cannot be launched: {error}") from error
    if config_class is None:
        raise ConfigError(f"{module} takes no typed configuration: run it by hand, or as part of a study")
    run = getattr(parse(config_class, list(arguments)), "run", None)
    program = module.rpartition(".")[2]
    training = isinstance(run, RunConfig) and program == "train"
    if not training and not isinstance(run, OutputConfig):
        raise ConfigError(f"{module} leaves no result rows that would tell when it is done: run it by hand")
    name = run.item if training else run.name(program)
    folder = run.folder if training else run.folder(program)
    check_path(folder.absolute())
    expected = [Expected((("op", "train"), ("metric", metric)), False) for metric in TRAINING_METRICS]
    return check_name(run.study, "study"), Item(
        name=check_name(name, "item"),
        kind="nonzeros" if program == "gather_nonzeros" else program,
        module=module,
        arguments=tuple(arguments),
        folder=folder,
        expected=tuple(expected) if training else (Expected(()),),
    )


def check_arguments(graph: Graph) -> None:
    """Parse every item's arguments as its program will, so that a mistake shows before anything waits in a queue.

    Raises:
        ConfigError: naming the item.
    """
    for item in graph.items.values():
        _, config_class = entry_point(item)
        if config_class is None:
            continue
        try:
            parse(config_class, list(item.arguments))
        except ConfigError as error:
            raise ConfigError(f"{item.name}: {error}") from error


def total_steps(item: Item) -> int | None:
    """Optimizer steps of a training, None for any other item."""
    if item.kind != "train":
        return None
    _, config_class = entry_point(item)
    return parse(config_class, list(item.arguments)).training.steps
