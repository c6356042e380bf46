"""One command, with one value or several for its options, as items of a study."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import experiments
from experiments.run.config import nearest, parse
from experiments.run.errors import ConfigError
from experiments.run.output import OutputConfig
from experiments.run.train_config import RunConfig
from experiments.study.definition import TRAINING_METRICS, check_name, check_path, prepared_texts
from experiments.study.graph import Expected, Item
from experiments.study.programs import entry_point
from experiments.study.sweep import combinations


class Command(NamedTuple):
    """A study's name and folder, and the items that a command line asks for."""

    study: str
    folder: Path
    items: list[Item]


def command_items(module: str, arguments: Sequence[str]) -> Command:
    """One item for each combination of values that the arguments name (`training.seed=0,1,2`), after what it needs.

    Raises:
        ConfigError: no such module, one without a typed configuration, or wrong arguments.
    """
    found = combinations(arguments)
    if len(found) > 1 and any(argument.startswith("run.item=") and "," in argument for argument in arguments):
        raise ConfigError("run.item: give one name, which then begins those of the runs, or none")
    named = [(name, _with_place(module, own, name) if name else own) for name, own in found.items()]
    runs = [_item(module, own) for _, own in named]
    study, folder = runs[0][0], runs[0][1].folder.parent
    items = [item for _, item in runs]
    if items[0].kind != "train":
        return Command(study, folder, items)
    texts = prepared_texts({item.name: item.arguments for item in items}, study, folder)
    trainings = [replace(item, needs=(texts[item.name].name,)) for item in items]
    return Command(study, folder, [*{text.name: text for text in texts.values()}.values(), *trainings])


def _with_place(module: str, arguments: Sequence[str], name: str) -> list[str]:
    """The arguments of one run of several, with an item and a folder of its own: inside of `run.dir` if that is given,
    else beside where a single run would be."""
    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    base = given.get("run.item", "" if module == "experiments.train" else module.rpartition(".")[2])
    item = f"{base}_{name}" if base else name
    place = given.get("run.dir")
    folder = Path(place) if place else _item(module, arguments)[1].folder.parent
    return [*arguments, f"run.item={item}", f"run.dir={folder / item}"]


def _item(module: str, arguments: Sequence[str]) -> tuple[str, Item]:
    """(study, item) of one command: `module.main` with these arguments."""
    if not re.fullmatch(r"\w+(\.\w+)*", module):
        raise ConfigError(f"a module is wanted, such as experiments.train, got {module!r}")
    probe = Item(name="", kind="", module=module, arguments=tuple(arguments), folder=Path())
    try:
        _, config_class = entry_point(probe)
    except (ImportError, AttributeError) as error:
        programs = [f"experiments.{path.stem}" for path in Path(experiments.__file__).parent.glob("[a-z]*.py")]
        meant = nearest(module, programs) if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"{module} cannot be launched: {error}{meant}") from error
    if config_class is None:
        raise ConfigError(f"{module} takes no typed configuration: run it by hand, or as part of a study")
    run = getattr(parse(config_class, list(arguments)), "run", None)
    program = module.rpartition(".")[2]
    expected: tuple[Expected, ...]
    if isinstance(run, RunConfig) and program == "train":
        name, folder = run.item, run.folder
        expected = tuple(Expected((("op", "train"), ("metric", metric)), False) for metric in TRAINING_METRICS)
    elif isinstance(run, OutputConfig):
        name, folder = run.name(program), run.folder(program)
        expected = (Expected(()),)
    else:
        raise ConfigError(f"{module} leaves no result rows that would tell when it is done: run it by hand")
    check_path(folder.absolute())
    return check_name(run.study, "study"), Item(
        name=check_name(name, "item"),
        kind="nonzeros" if program == "gather_nonzeros" else program,
        module=module,
        arguments=tuple(arguments),
        folder=folder,
        expected=expected,
    )
