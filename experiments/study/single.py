"""One command as a study of a single item."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.run.config import parse
from experiments.run.errors import ConfigError
from experiments.run.output import OutputConfig
from experiments.run.train_config import RunConfig
from experiments.study.definition import TRAINING_METRICS, check_name, check_path
from experiments.study.graph import Expected, Item
from experiments.study.programs import entry_point


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
