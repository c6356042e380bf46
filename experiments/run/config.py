"""Typed configuration: dataclasses <- YAML <- command line (`section.key=value`), through OmegaConf.

A configuration is a dataclass whose fields are made by `option` (a value) or `section` (a nested dataclass).

    python -m experiments.train model=0.5b sparsity.l1=2e-5 data=stdlib

* `model=0.5b` loads the preset `configs/model/0.5b.yaml`, because the section `model` says `presets="model"`.
* `data=stdlib` is short for `data.source=stdlib`, because the section `data` says `short="source"`.
* `config=FILE` merges a YAML file, for instance the `config.yaml` of an earlier run.

Presets and files come first, in the order given; single keys win over both.

An option's type decides what its text means, on the command line and in files: text is taken as typed (`3.10`, `yes`,
`a #2`), and nothing is ever replaced in it (`${oc.env:X}` stays what it is). Its range is checked here, for every
program alike.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import functools
import logging
import os
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf

from experiments.run.errors import EXIT_DONE, EXIT_FAILED, ConfigError, RunError, Stopped
from experiments.run.files import write_atomic
from experiments.run.values import (
    Range,
    convert,
    from_text,
    in_one_line,
    name_shown,
    read_yaml,
    shown,
    type_name,
)

CONFIG_ROOT = Path(__file__).resolve().parent.parent / "configs"
INTERRUPTED = 130  # as a shell reports a program that Ctrl-C ended
T = TypeVar("T")
log = logging.getLogger(__name__)


def option(
    default: Any,
    help: str,
    *,
    unit: str = "",
    source: str = "",
    presets: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    finite: bool = True,
    required: bool = False,
    distinct: bool = False,
    pattern: re.Pattern[str] | None = None,
    wanted: str = "",
    choices: Sequence[str] = (),
    check: Callable[[str], None] | None = None,
) -> Any:
    """A configuration value: its default, meaning, unit, and where the default comes from (`source`).

    `presets` names a folder of `configs/`: then `key=value` also loads `configs/<presets>/<value>.yaml`. The others are
    the option's range (`experiments.run.values.Range`), which `parse` and `load_config` check.
    """
    bounds = {"minimum": minimum, "maximum": maximum, "above": above, "below": below, "finite": finite}
    texts = {"pattern": pattern, "wanted": wanted, "choices": choices, "check": check}
    allowed = Range(**bounds, required=required, distinct=distinct, **texts)  # type: ignore[arg-type]
    metadata = {"help": help, "unit": unit, "source": source, "presets": presets, "range": allowed}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=functools.partial(copy.deepcopy, default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type, help: str, *, presets: str = "", short: str = "") -> Any:
    """A nested dataclass. `section=value` loads a preset (see `option`), or sets the option named by `short`."""
    return dataclasses.field(default_factory=cls, metadata={"help": help, "presets": presets, "short": short})


# --- parsing ----------------------------------------------------------------------------------------------------------


def parse(cls: type[T], argv: Sequence[str]) -> T:
    """The configuration of class `cls` that a command line asks for. `--help` prints every option and exits.

    Raises `ConfigError` for an unknown key (naming the nearest), a value of the wrong type or out of its range, a
    missing preset or file, or a combination that the dataclass itself refuses.
    """
    if any(argument in ("-h", "--help") for argument in argv):
        print(describe(cls))
        raise SystemExit(EXIT_DONE)
    values = _Values(cls)
    single_keys = []
    for key, text in map(_split_argument, argv):
        field = _top_fields(cls).get(key)
        if key == "config" and field is None:
            _merge_file(values, cls, Path(text))
        elif field is not None and field.metadata.get("presets"):
            _merge_preset(values, cls, field, text)
        elif field is not None and field.metadata.get("short"):
            single_keys.append((f"{key}.{field.metadata['short']}", text))
        else:
            single_keys.append((key, text))
    for key, text in single_keys:
        _merge_value(values, cls, key, text, from_text)
    return _to_object(cls, values)


def load_config(cls: type[T], path: str | Path) -> T:
    """The configuration stored in a YAML file, as `save_config` wrote it. Raises `ConfigError`, as `parse` does."""
    values = _Values(cls)
    _merge_file(values, cls, Path(path))
    return _to_object(cls, values)


def check_ranges(config: T) -> T:
    """`config`, if every value in it is in its option's range: for one that no text was parsed for.

    Raises:
        ConfigError: naming the option.
    """
    _check_ranges(type(config), to_dict(config), {})
    return config


def save_config(config: Any, path: str | Path) -> None:
    """Write a configuration, every value included, as YAML (atomically)."""
    write_atomic(Path(path), to_yaml(config), "configuration")


def to_yaml(config: Any) -> str:
    """A configuration as YAML text, which `load_config` reads back as it was."""
    return yaml.dump(dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """OmegaConf hands out the text `???` as a subclass of str."""


_Dumper.add_multi_representer(str, yaml.SafeDumper.represent_str)


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as a flat dictionary: {"model.layers": 8, ...}."""
    return {".".join(path): value for path, value in _leaves(dataclasses.asdict(config), type(config), ())}


def find_yaml(name: str, folder: Path, what: str) -> Path:
    """The file `<folder>/<name>.yaml`, or the one that `name` is the path of.

    Raises:
        ConfigError: there is none; the message names those there are.
    """
    if name.endswith((".yaml", ".yml")):
        if not os.path.isfile(name):  # noqa: PTH113 (of a name that is too long, Path raises)
            raise ConfigError(f"{what}={name_shown(name)}: there is no such file")
        return Path(name)
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        raise ConfigError(f"{what}={name_shown(name)}: there is none in {folder}; there are: {', '.join(known)}")
    return folder / f"{name}.yaml"


@contextlib.contextmanager
def listing_options(cls: type, what: str) -> Iterator[None]:
    """Inside the block, a `ConfigError` says what it is about, and one about an unknown option lists the valid ones."""
    try:
        yield
    except ConfigError as error:
        valid = f". Valid are: {', '.join(_top_fields(cls))}"
        raise ConfigError(f"{what}: {error}{valid if 'unknown option' in str(error) else ''}") from error


def preset_names(folder: str) -> list[str]:
    """The names of the presets in `configs/<folder>`."""
    return sorted(path.stem for path in (CONFIG_ROOT / folder).glob("*.yaml"))


def _split_argument(argument: str) -> tuple[str, str]:
    key, equals, text = argument.partition("=")
    if not equals or not key or key.startswith("-"):
        raise ConfigError(f"arguments are written key=value (or --help), got {shown(argument)}")
    return key.strip(), text


class _Values:
    """The structured configuration that files and arguments are merged into, and where each value comes from."""

    def __init__(self, cls: type) -> None:
        self.config: DictConfig = copy.deepcopy(_structured(cls))
        self.where: dict[str, str] = {}  # by dotted key: " (in FILE)", or nothing for the command line

    def set(self, key: str, value: Any, where: str) -> None:
        """Set an option to a value of its type; a mapping is merged with the one that is there."""
        OmegaConf.update(self.config, key, _literal(value))
        self.where[key] = where

    def by_key(self, cls: type) -> dict[str, Any]:
        """Dotted key -> value of every option of the class."""
        content: Any = OmegaConf.to_container(self.config, resolve=True)
        return {".".join(path): value for path, value in _leaves(content, cls, ())}


# Kept: to make one takes six times as long as to copy it, and a study has hundreds of configurations.
_structured = functools.cache(OmegaConf.structured)


def _literal(value: Any) -> Any:
    """The value with each text escaped, so that OmegaConf reads it as it stands: no interpolation, nothing missing."""
    if isinstance(value, str):
        escaped = re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
        return "\\" + escaped if re.fullmatch(r"\\*\?\?\?", escaped) else escaped
    if isinstance(value, list):
        return [_literal(item) for item in value]
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    return value


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = read_yaml(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"no configuration file {path}") from None
    except OSError as error:
        raise ConfigError(f"{name_shown(str(path))} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} cannot be read: {in_one_line(error)}") from error
    except ValueError as error:  # of a name that no file can have
        raise ConfigError(f"no configuration file {shown(str(path))}") from error
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values, got a {type(content).__name__}")
    return content or {}


def _merge_file(values: _Values, cls: type, path: Path) -> None:
    leaves = list(_leaves(_read_yaml(path), cls, ()))
    moved = [f"{key} to {_moved(cls)[key]}" for key in (".".join(keys) for keys, _ in leaves) if key in _moved(cls)]
    if moved:
        raise ConfigError(
            f"{path} is of an earlier version, some options have moved since: {', '.join(moved)}. Move these lines, or "
            "delete them, which means the defaults: they have no effect on results, and a run in that folder continues"
        )
    for keys, value in leaves:
        _merge_value(values, cls, ".".join(keys), value, convert, where=f" (in {path})")


def _merge_preset(values: _Values, cls: type, field: dataclasses.Field, name: str) -> None:
    """Merge the options of a preset that `cls` has: one file serves training (all) and benchmarks (the model)."""
    folder = field.metadata["presets"]
    known = preset_names(folder)
    if name not in known:
        there = f"no such preset{nearest(name, known)}; there are: {', '.join(known)}"
        raise ConfigError(f"{field.name}={name_shown(name)}: {there}")
    path = CONFIG_ROOT / folder / f"{name}.yaml"
    for keys, value in _leaves(_read_yaml(path), cls, ()):
        key = ".".join(keys)
        of_another_kind = isinstance(value, dict) and typing.get_origin(_option_types(cls).get(key)) is not dict
        if key in _option_types(cls) and not of_another_kind:  # a benchmark's `data` is one option, not a section
            _merge_value(values, cls, key, value, convert, where=f" (in {path})")
    if not dataclasses.is_dataclass(_types(cls)[field.name]):
        _merge_value(values, cls, field.name, name, convert)


def _merge_value(
    values: _Values, cls: type, key: str, given: Any, read: Callable[[Any, Any], Any], where: str = ""
) -> None:
    """Set one option; a mapping is merged with the one that was given before, or with the default."""
    field_type = _option_type(cls, key, where)
    if dataclasses.is_dataclass(field_type):
        raise ConfigError(f"{key}{where} is a group of options, not one; --help lists them")
    try:
        value = read(given, field_type)
    except ValueError as error:
        because = f": {error}" if str(error) else ""
        raise ConfigError(f"{key}{where} must be {type_name(field_type)}, got {shown(given)}{because}") from error
    values.set(key, value, where)


def _to_object(cls: Any, values: _Values) -> Any:
    _check_ranges(cls, values.by_key(cls), values.where)
    return OmegaConf.to_object(values.config)


def _check_ranges(cls: type, values: dict[str, Any], where: dict[str, str]) -> None:
    for key, _, field in _options(cls):
        allowed = field.metadata.get("range")
        if allowed is None:
            continue
        if problem := allowed.problem(key + where.get(key, ""), values[key]):
            raise ConfigError(problem)


def _leaves(content: dict, cls: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The single values of nested mappings; a mapping counts as one value where the dataclass has no nested one."""
    types = _types(cls)
    for key, value in content.items():
        field_type = types.get(str(key))
        if isinstance(value, dict) and dataclasses.is_dataclass(field_type):
            yield from _leaves(value, field_type, (*path, str(key)))
        else:
            yield (*path, str(key)), value


# --- the dataclasses' own description ---------------------------------------------------------------------------------


def _top_fields(cls: type) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(cls)}


# Kept: a large study asks for them a hundred thousand times.
_types = functools.cache(typing.get_type_hints)


@functools.cache
def _options(cls: type, prefix: str = "") -> tuple[tuple[str, Any, dataclasses.Field], ...]:
    """(dotted key, type, field) of every option: single ones, then sections, each before what it holds."""
    types, found = _types(cls), []
    for field in sorted(dataclasses.fields(cls), key=lambda field: dataclasses.is_dataclass(types[field.name])):
        found.append((prefix + field.name, types[field.name], field))
        if dataclasses.is_dataclass(types[field.name]):
            found += _options(types[field.name], f"{prefix}{field.name}.")
    return tuple(found)


@functools.cache
def _option_types(cls: type) -> dict[str, Any]:
    """Dotted key -> type."""
    return {name: option_type for name, option_type, _ in _options(cls)}


def _option_type(cls: type, key: str, where: str) -> Any:
    known = _option_types(cls)
    if key in _moved(cls):
        raise ConfigError(f"{key}{where} has moved: it is {_moved(cls)[key]} now")
    if key not in known:
        raise ConfigError(f"unknown option {shown(key)}{where}{nearest(key, list(known))}; --help lists all options")
    return known[key]


def _moved(cls: type) -> dict[str, str]:
    """Options that an earlier version had elsewhere: old name -> new name, of classes that have a table `MOVED`."""
    return getattr(cls, "MOVED", {})


def nearest(name: str, candidates: Sequence[str]) -> str:
    """'; did you mean ...?', by the whole key or, for a key in the wrong group, by its last part."""
    name = name[:100]  # the comparison takes the square of its length
    by_last_part = {candidate.rpartition(".")[2]: candidate for candidate in candidates}
    match = difflib.get_close_matches(name, candidates, n=1, cutoff=0.75)
    if not match:
        parts = difflib.get_close_matches(name.rpartition(".")[2], by_last_part, n=1, cutoff=0.6)
        match = [by_last_part[part] for part in parts] or difflib.get_close_matches(name, candidates, n=1, cutoff=0.4)
    return f"; did you mean {match[0]!r}?" if match else ""


def describe(cls: type) -> str:
    """The text of `--help`: what the program says of itself, which begins with examples, and every option."""
    usage = f"usage: python -m {_module_name(cls)} [config=FILE] [key=value ...]"
    return f"{_introduction(cls)}\n\n{usage}\n\n{describe_options(cls)}"


def describe_options(cls: type) -> str:
    """Every option with its type, default, meaning, unit, and the default's source."""
    lines: list[str] = []
    defaults = to_dict(cls())
    for key, option_type, field in _options(cls):
        if dataclasses.is_dataclass(option_type):
            lines += ["", f"{key}: {field.metadata.get('help', '')}"]
        else:
            lines += _explain(key, option_type, defaults[key], field.metadata)
        lines += _shorthand(key, field)
    return "\n".join(lines).strip("\n")


def _explain(key: str, option_type: Any, default: Any, metadata: typing.Mapping[str, Any]) -> list[str]:
    head = f"  {key}={'null' if default is None else default}"
    kind = ", ".join(filter(None, (type_name(option_type), metadata.get("unit"), str(metadata.get("range") or ""))))
    source = f" Default: {metadata['source']}." if metadata.get("source") else ""
    text = f"{metadata.get('help', '')} ({kind}).{source}"
    column = " " * 44
    if len(head) >= len(column):
        return [head, *_wrap(text, column, column)]
    return _wrap(text, head.ljust(len(column)), column)


def _wrap(text: str, first: str, following: str) -> list[str]:
    wrapper = textwrap.TextWrapper(120, first, following, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)


def _shorthand(key: str, field: dataclasses.Field) -> list[str]:
    if field.metadata.get("presets"):
        text = f"{key}=NAME loads a preset: {', '.join(preset_names(field.metadata['presets']))}"
    elif field.metadata.get("short"):
        text = f"{key}=VALUE is short for {key}.{field.metadata['short']}=VALUE"
    else:
        return []
    return _wrap(text, "  ", "    ")


def _module_name(cls: type) -> str:
    main_module = sys.modules.get("__main__")
    spec = getattr(main_module, "__spec__", None)
    return spec.name if spec is not None else cls.__module__


def _introduction(cls: type) -> str:
    """The docstring of the program that runs, if it takes these options, else the first paragraph of the class's."""
    program = sys.modules.get("__main__")
    of_program = (getattr(program, "__doc__", None) or "").strip()
    if program is not None and f"python -m {_module_name(cls)} " in of_program:
        return of_program
    return (cls.__doc__ or "").strip().split("\n\n")[0]


# --- entry point ------------------------------------------------------------------------------------------------------


def entry(main: Callable[[T], Any], cls: type[T], argv: Sequence[str] | None = None) -> typing.NoReturn:
    """Run `main(config)` as a program: parse the command line, set up logging, exit.

    A `RunError` ends the program with its message and its exit code (1; 2 for a wrong configuration; 85 for a run that
    was stopped and can be continued). So does a file or folder that the system refuses, which the message names, and
    Ctrl-C. Any other exception is a bug and keeps its traceback.
    """
    run_program(lambda: main(parse(cls, sys.argv[1:] if argv is None else argv)))


def run_program(program: Callable[[], Any], level: int = logging.INFO) -> typing.NoReturn:
    """Run `program()` and exit, as `entry` does; messages of `level` and above are logged."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    try:
        try:
            program()
        finally:
            sys.stdout.flush()
    except RunError as error:
        level = logging.WARNING if isinstance(error, Stopped) else logging.ERROR
        log.log(level, "%s: %s", type(error).__name__, error)
        sys.exit(error.exit_code)
    except BrokenPipeError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python flushes into the pipe at its end
        log.error("%s: %s", type(error).__name__, error)
        sys.exit(EXIT_FAILED)
    except OSError as error:
        if error.filename is None:  # of something that no user named
            raise
        log.error("%s: %s", type(error).__name__, in_one_line(error))
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        log.error("interrupted")
        sys.exit(INTERRUPTED)
    sys.exit(EXIT_DONE)
