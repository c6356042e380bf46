"""Typed configuration: dataclasses <- YAML <- command line (`section.key=value`), through OmegaConf.

A configuration is a dataclass whose fields are made by `option` (a value) or `section` (a nested dataclass).

    python -m experiments.train model=0.5b sparsity.l1=2e-5 data=stdlib

* `model=0.5b` loads the preset `configs/model/0.5b.yaml`, because the section `model` says `presets="model"`.
* `data=stdlib` is short for `data.source=stdlib`, because the section `data` says `short="source"`.
* `config=FILE` merges a YAML file, for instance the `config.yaml` of an earlier run.

Presets and files come first, in the order given; single keys win over both.

An option's type decides what its text means, on the command line and in files: text is taken as typed (`3.10`, `yes`,
`a #2`), and nothing is ever replaced in it (`${oc.env:X}` stays what it is). OmegaConf converts, `Range` checks.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.run.errors import EXIT_DONE, EXIT_FAILED, ConfigError, RunError, Stopped
from experiments.run.files import write_atomic
from experiments.run.values import Range, in_one_line, name_shown, read_yaml, shown, type_name

CONFIG_ROOT = Path(__file__).resolve().parent.parent / "configs"
INTERRUPTED = 130  # as a shell reports a program that Ctrl-C ended
T = TypeVar("T")
Assignment = tuple[str, Any, str]  # dotted key, value, where it comes from: " (in FILE)", or nothing
log = logging.getLogger(__name__)


def option(default: Any, help: str, *, unit: str = "", source: str = "", **allowed: Any) -> Any:
    """A configuration value: its default, meaning, unit, and where the default comes from (`source`). `allowed` are the
    fields of its `Range`, which `parse` and `load_config` check."""
    metadata = {"help": help, "unit": unit, "source": source, "range": Range(**allowed)}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=functools.partial(copy.deepcopy, default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type, help: str, *, presets: str = "", short: str = "") -> Any:
    """A nested dataclass. `section=value` loads `configs/<presets>/<value>.yaml`, or sets the option named by
    `short`."""
    return dataclasses.field(default_factory=cls, metadata={"help": help, "presets": presets, "short": short})


# --- from text to a configuration -------------------------------------------------------------------------------------


def parse(cls: type[T], argv: Sequence[str]) -> T:
    """The configuration of class `cls` that a command line asks for. `--help` prints every option and exits.

    Raises `ConfigError` for an unknown key (naming the nearest), a value of the wrong type or out of its range, a
    missing preset or file, or a combination that the dataclass itself refuses.
    """
    if not {"-h", "--help"}.isdisjoint(argv):
        print(describe(cls))
        raise SystemExit(EXIT_DONE)
    groups: list[Assignment] = []
    single: list[Assignment] = []
    for argument in argv:
        key, equals, text = argument.partition("=")
        if not equals or not key or key.startswith("-"):
            raise ConfigError(f"arguments are written key=value (or --help), got {shown(argument)}")
        key = key.strip()
        metadata = _metadata(cls).get(key, {})
        if key == "config":
            groups += _of_file(cls, Path(text))
        elif metadata.get("presets"):
            groups += _of_preset(cls, find_yaml(text, CONFIG_ROOT / metadata["presets"], key))
        else:
            key = f"{key}.{metadata['short']}" if metadata.get("short") else key
            single.append((key, _of_text(cls, key, text), ""))
    return _object(cls, [*groups, *single])


def load_config(cls: type[T], path: str | Path) -> T:
    """The configuration stored in a YAML file, as `save_config` wrote it. Raises `ConfigError`, as `parse` does."""
    try:
        return _object(cls, _of_file(cls, Path(path)))
    except ConfigError as error:
        raise ConfigError(
            f"{error}. If another version wrote it, choose another run.item, or delete the folder"
        ) from error


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
    values = {key: value for key, value in dataclasses.asdict(config).items() if key in _metadata(type(config))}
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """OmegaConf hands out the text `???` as a subclass of str."""


_Dumper.add_multi_representer(str, yaml.SafeDumper.represent_str)


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as a flat dictionary: {"model.layers": 8, ...}."""
    return dict(_leaves(dataclasses.asdict(config), type(config)))


def find_yaml(name: str, folder: Path, what: str) -> Path:
    """The file `<folder>/<name>.yaml`, or the one that `name` is the path of.

    Raises:
        ConfigError: there is none; the message names those there are.
    """
    if name.endswith((".yaml", ".yml")):
        if not os.path.isfile(name):  # noqa: PTH113 (of a name that is too long, Path raises)
            raise ConfigError(f"{what}={name_shown(name)}: there is no such file")
        return Path(name)
    if name not in (known := yaml_names(folder)):
        absent = f"there is none in {folder}{nearest(name, known)}; there are: {', '.join(known)}"
        raise ConfigError(f"{what}={name_shown(name)}: {absent}")
    return folder / f"{name}.yaml"


@contextlib.contextmanager
def listing_options(cls: type, what: str) -> Iterator[None]:
    """Inside the block, a `ConfigError` says what it is about, and one about an unknown option lists the valid ones."""
    try:
        yield
    except ConfigError as error:
        valid = f". Valid are: {', '.join(_metadata(cls))}"
        raise ConfigError(f"{what}: {error}{valid if 'unknown option' in str(error) else ''}") from error


def yaml_names(folder: Path) -> list[str]:
    """The names of the YAML files in a folder."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def nearest(name: str, candidates: Sequence[str]) -> str:
    """'; did you mean ...?', by the whole key or, for a key in the wrong group, by its last part."""
    name = name[:100]  # the comparison takes the square of its length
    by_last_part = {candidate.rpartition(".")[2]: candidate for candidate in candidates}
    match = difflib.get_close_matches(name, candidates, n=1, cutoff=0.75)
    if not match:
        parts = difflib.get_close_matches(name.rpartition(".")[2], by_last_part, n=1, cutoff=0.6)
        match = [by_last_part[part] for part in parts] or difflib.get_close_matches(name, candidates, n=1, cutoff=0.4)
    return f"; did you mean {match[0]!r}?" if match else ""


def _of_text(cls: type, key: str, text: str) -> Any:
    """The value of an argument: a list or a mapping as in YAML, else the text."""
    option_type = option_types(cls).get(key)
    if type(None) in typing.get_args(option_type) and text == "null":
        return None
    if typing.get_origin(option_type) not in (list, dict):
        return text
    try:
        return read_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key} cannot be read: {in_one_line(error)}") from error


def _of_file(cls: type, path: Path) -> list[Assignment]:
    try:
        content = read_yaml(path.read_bytes())
    except (OSError, yaml.YAMLError, ValueError) as error:  # ValueError: of a name that no file can have
        reason = error.strerror if isinstance(error, OSError) else in_one_line(error)
        raise ConfigError(f"{name_shown(str(path))} cannot be read: {reason}") from error
    if not isinstance(content, dict | None):
        raise ConfigError(f"{path} must hold a mapping of keys to values, got a {type(content).__name__}")
    return [(key, value, f" (in {path})") for key, value in _leaves(content or {}, cls)]


def _of_preset(cls: type, path: Path) -> list[Assignment]:
    """The options of a preset that `cls` has: one file serves training (all) and benchmarks (the model), where `data`
    is one option."""
    types = option_types(cls)
    return [of_file for of_file in _of_file(cls, path) if of_file[0] in types and not isinstance(of_file[1], dict)]


def _leaves(content: dict, cls: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested mappings; a mapping is one value where the dataclass has no nested one."""
    for key, value in content.items():
        option_type = _types(cls).get(str(key))
        if isinstance(value, dict) and dataclasses.is_dataclass(option_type):
            yield from _leaves(value, option_type, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _object(cls: Any, assignments: Iterable[Assignment]) -> Any:
    config, types = copy.deepcopy(_structured(cls)), option_types(cls)
    where: dict[str, str] = {}
    for key, value, place in assignments:
        if key not in types:
            raise ConfigError(
                f"unknown option {shown(key)}{place}{nearest(key, list(types))}; --help lists all options"
            )
        if dataclasses.is_dataclass(types[key]):
            raise ConfigError(f"{key}{place} is a group of options, not one; --help lists them")
        must_be = f"{key}{place} must be {type_name(types[key])}, got {shown(value)}"
        try:
            of_yaml = types[key] is float and value in (".inf", "-.inf")
            OmegaConf.update(config, key, value.replace(".", "") if of_yaml else _literal(value, types[key]))
            converted = OmegaConf.select(config, key)
            if OmegaConf.is_config(converted):
                OmegaConf.to_container(converted, resolve=True)  # raises where text with ${ stands for a number
        except (OmegaConfBaseException, OverflowError, TypeError) as error:
            raise ConfigError(must_be) from error
        except ValueError as error:
            raise ConfigError(f"{must_be}: {error}") from error
        where[key] = place
    values: Any = OmegaConf.to_container(config, resolve=True)
    _check_ranges(cls, dict(_leaves(values, cls)), where)
    return OmegaConf.to_object(config)


# Kept: to make one takes six times as long as to copy it, and a study has hundreds of configurations.
_structured = functools.cache(OmegaConf.structured)


def _literal(value: Any, option_type: Any) -> Any:
    """The value with each text escaped, so that OmegaConf reads it as it stands: no interpolation, nothing missing.

    Raises:
        TypeError: a list or a mapping among texts, which OmegaConf would take, or something else in place of one.
        ValueError: a text that cannot be written down.
    """
    container = typing.get_origin(option_type)
    if container in (list, dict) or isinstance(value, list | dict):
        if container is not type(value):
            raise TypeError(value)
        item_type = typing.get_args(option_type)[-1]
        if container is list:
            return [_literal(item, item_type) for item in value]
        return {key: _literal(item, item_type) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    if "\0" in value:
        raise ValueError("no text here has a NUL in it")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("it is not valid Unicode: in UTF-8 it cannot be written down") from None
    escaped = re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return "\\" + escaped if re.fullmatch(r"\\*\?\?\?", escaped) else escaped


def _check_ranges(cls: type, values: dict[str, Any], where: dict[str, str]) -> None:
    for key, _, metadata in options(cls):
        if "range" in metadata and (problem := metadata["range"].problem(key + where.get(key, ""), values[key])):
            raise ConfigError(problem)


# --- the dataclasses' own description ---------------------------------------------------------------------------------


# Kept: a large study asks for them a hundred thousand times.
_types = functools.cache(typing.get_type_hints)


def _metadata(cls: type) -> dict[str, typing.Mapping[str, Any]]:
    """What `option` and `section` said, by the names of the fields. A field that neither made is no option."""
    return {field.name: field.metadata for field in dataclasses.fields(cls) if field.metadata}


@functools.cache
def options(cls: type, prefix: str = "") -> tuple[tuple[str, Any, typing.Mapping[str, Any]], ...]:
    """(dotted key, type, metadata) of every option: single ones, then sections, each before what it holds."""
    types, listed = _types(cls), []
    for name, metadata in sorted(_metadata(cls).items(), key=lambda item: dataclasses.is_dataclass(types[item[0]])):
        listed.append((prefix + name, types[name], metadata))
        if dataclasses.is_dataclass(types[name]):
            listed += options(types[name], f"{prefix}{name}.")
    return tuple(listed)


@functools.cache
def option_types(cls: type) -> dict[str, Any]:
    """Dotted key -> type."""
    return {key: option_type for key, option_type, _ in options(cls)}


def describe(cls: type) -> str:
    """The text of `--help`: the docstring of the program that runs, if it takes these options, else the first paragraph
    of the class's; then every option."""
    program = sys.modules.get("__main__")
    spec = getattr(program, "__spec__", None)
    module = spec.name if spec is not None else cls.__module__
    introduction = (getattr(program, "__doc__", None) or "").strip()
    if f"python -m {module} " not in introduction:
        introduction = (cls.__doc__ or "").strip().split("\n\n")[0]
    return f"{introduction}\n\nusage: python -m {module} [config=FILE] [key=value ...]\n\n{describe_options(cls)}"


def describe_options(cls: type) -> str:
    """Every option with its type, default, meaning, unit, and the default's source."""
    lines: list[str] = []
    defaults = to_dict(cls())
    for key, option_type, metadata in options(cls):
        if dataclasses.is_dataclass(option_type):
            lines += ["", f"{key}: {metadata['help']}"]
        else:
            kind = ", ".join(filter(None, (type_name(option_type), metadata["unit"], str(metadata["range"]))))
            source = f" Default: {metadata['source']}." if metadata["source"] else ""
            head = f"  {key}={'null' if defaults[key] is None else defaults[key]}"
            if len(head) >= 44:
                lines.append(head)
                head = ""
            lines += _wrap(f"{metadata['help']} ({kind}).{source}", head.ljust(44), " " * 44)
        if metadata.get("presets"):
            lines += _wrap(
                f"  {key}=NAME loads a preset: {', '.join(yaml_names(CONFIG_ROOT / metadata['presets']))}", "", "    "
            )
        elif metadata.get("short"):
            lines.append(f"  {key}=VALUE is short for {key}.{metadata['short']}=VALUE")
    return "\n".join(lines).strip("\n")


def _wrap(text: str, first: str, following: str) -> list[str]:
    return textwrap.wrap(text, 120, initial_indent=first, subsequent_indent=following, break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip


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
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # of a reader that has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python flushes into the pipe
            sys.exit(EXIT_FAILED)
        if error.filename is None:  # of something that no user named
            raise
        log.error("%s: %s", type(error).__name__, in_one_line(error))
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        log.error("interrupted")
        sys.exit(INTERRUPTED)
    sys.exit(EXIT_DONE)
