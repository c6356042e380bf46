"""Typed configuration: dataclasses <- YAML <- command line (`section.key=value`), through OmegaConf.

A configuration is a dataclass whose fields are made by `option` (a value) or `section` (a nested dataclass).

    python -m experiments.train model=0.5b sparsity.l1=2e-5 data=stdlib

* `model=0.5b` loads the preset `configs/model/0.5b.yaml`, because the section `model` says `presets="model"`.
* `data=stdlib` is short for `data.source=stdlib`, because the section `data` says `short="source"`.
* `config=FILE` merges a YAML file, for instance the `config.yaml` of an earlier run.

Presets and files come first, in the order given; single keys win over both.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import functools
import logging
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from analysis.program import begin
from experiments.run.errors import EXIT_DONE, ConfigError, RunError, Stopped
from experiments.run.files import write_atomic

CONFIG_ROOT = Path(__file__).resolve().parent.parent / "configs"
T = TypeVar("T")
log = logging.getLogger(__name__)


def option(default: Any, help: str, *, unit: str = "", source: str = "", presets: str = "") -> Any:
    """A configuration value: its default, meaning, unit, and where the default comes from (`source`).

    `presets` names a folder of `configs/`: then `key=value` also loads `configs/<presets>/<value>.yaml`.
    """
    metadata = {"help": help, "unit": unit, "source": source, "presets": presets}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=functools.partial(copy.deepcopy, default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type, help: str, *, presets: str = "", short: str = "") -> Any:
    """A nested dataclass. `section=value` loads a preset (see `option`), or sets the option named by `short`."""
    return dataclasses.field(default_factory=cls, metadata={"help": help, "presets": presets, "short": short})


# --- parsing ----------------------------------------------------------------------------------------------------------


def parse(cls: type[T], argv: Sequence[str]) -> T:
    """The configuration of class `cls` that a command line asks for. `--help` prints every option and exits.

    Raises `ConfigError` for an unknown key (naming the nearest), a value of the wrong type, a missing preset or file,
    or a combination that the dataclass itself refuses.
    """
    if any(argument in ("-h", "--help") for argument in argv):
        print(describe(cls))
        raise SystemExit(EXIT_DONE)
    values = OmegaConf.structured(cls)
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
        _merge_value(values, cls, key, _parse_text(key, text))
    return _to_object(values)


def load_config(cls: type[T], path: str | Path) -> T:
    """The configuration stored in a YAML file, as `save_config` wrote it. Raises `ConfigError`, as `parse` does."""
    values = OmegaConf.structured(cls)
    _merge_file(values, cls, Path(path))
    return _to_object(values)


def save_config(config: Any, path: str | Path) -> None:
    """Write a configuration, every value included, as YAML (atomically)."""
    write_atomic(Path(path), to_yaml(config), "configuration")


def to_yaml(config: Any) -> str:
    """A configuration as YAML text."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as a flat dictionary: {"model.layers": 8, ...}."""
    return {".".join(path): value for path, value in _leaves(dataclasses.asdict(config), type(config), ())}


def find_yaml(name: str, folder: Path, what: str) -> Path:
    """The file `<folder>/<name>.yaml`, or the one that `name` is the path of.

    Raises:
        ConfigError: there is none; the message names those there are.
    """
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise ConfigError(f"{what}={name}: there is no such file")
        return Path(name)
    path = folder / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
        raise ConfigError(f"{what}={name}: there is none in {folder}; there are: {known}")
    return path


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
        raise ConfigError(f"arguments are written key=value (or --help), got {argument!r}")
    return key.strip(), text


def _parse_text(key: str, text: str) -> Any:
    """The value of one argument. OmegaConf's YAML loader reads 2e-5 as a number; PyYAML's own takes it for text."""
    try:
        parsed = OmegaConf.from_dotlist([f"value={text}"])
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{key}: cannot read the value {text!r}: {_first_line(error)}") from error
    return dict(_container(parsed))["value"]


def _container(values: Any) -> Any:
    return OmegaConf.to_container(values)


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"no configuration file {path}")
    try:
        content = _container(OmegaConf.load(path))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values, got a {type(content).__name__}")
    return content


def _merge_file(values: Any, cls: type, path: Path) -> None:
    leaves = list(_leaves(_read_yaml(path), cls, ()))
    moved = [f"{key} to {_moved(cls)[key]}" for key in (".".join(keys) for keys, _ in leaves) if key in _moved(cls)]
    if moved:
        raise ConfigError(
            f"{path} is of an earlier version, some options have moved since: {', '.join(moved)}. Move these lines, or "
            "delete them, which means the defaults: they have no effect on results, and a run in that folder continues"
        )
    for keys, value in leaves:
        _merge_value(values, cls, ".".join(keys), value, where=f" (in {path})")


def _merge_preset(values: Any, cls: type, field: dataclasses.Field, name: str) -> None:
    """Merge the sections of a preset that `cls` has: one file serves training (all) and benchmarks (the model)."""
    folder = field.metadata["presets"]
    known = preset_names(folder)
    if name not in known:
        raise ConfigError(f"{field.name}={name}: no such preset{_nearest(name, known)}; there are: {', '.join(known)}")
    path = CONFIG_ROOT / folder / f"{name}.yaml"
    content = {key: value for key, value in _read_yaml(path).items() if key in _top_fields(cls)}
    for keys, value in _leaves(content, cls, ()):
        _merge_value(values, cls, ".".join(keys), value, where=f" (in {path})")
    if not dataclasses.is_dataclass(typing.get_type_hints(cls)[field.name]):
        _merge_value(values, cls, field.name, name)


def _merge_value(values: Any, cls: type, key: str, value: Any, where: str = "") -> None:
    field_type = _option_type(cls, key, where)
    if dataclasses.is_dataclass(field_type):
        raise ConfigError(f"{key}{where} is a group of options, not one; --help lists them")
    try:
        OmegaConf.update(values, key, value)
    except OmegaConfBaseException as error:
        wanted = _type_name(field_type)
        raise ConfigError(f"{key}{where} must be {wanted}, got {value!r} ({type(value).__name__})") from error


def _to_object(values: Any) -> Any:
    try:
        return OmegaConf.to_object(values)
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from error


def _leaves(content: dict, cls: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The single values of nested mappings; a mapping counts as one value where the dataclass has no nested one."""
    types = typing.get_type_hints(cls)
    for key, value in content.items():
        field_type = types.get(str(key))
        if isinstance(value, dict) and dataclasses.is_dataclass(field_type):
            yield from _leaves(value, field_type, (*path, str(key)))
        else:
            yield (*path, str(key)), value


# --- the dataclasses' own description ---------------------------------------------------------------------------------


def _top_fields(cls: type) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(cls)}


def _options(cls: type, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """(dotted key, type, field) of every option: single ones, then sections, each before what it holds."""
    types = typing.get_type_hints(cls)
    for field in sorted(dataclasses.fields(cls), key=lambda field: dataclasses.is_dataclass(types[field.name])):
        yield prefix + field.name, types[field.name], field
        if dataclasses.is_dataclass(types[field.name]):
            yield from _options(types[field.name], f"{prefix}{field.name}.")


@functools.cache
def _option_types(cls: type) -> dict[str, Any]:
    """Dotted key -> type. Kept: a large study asks for it a hundred thousand times."""
    return {name: option_type for name, option_type, _ in _options(cls)}


def _option_type(cls: type, key: str, where: str) -> Any:
    known = _option_types(cls)
    if key in _moved(cls):
        raise ConfigError(f"{key}{where} has moved: it is {_moved(cls)[key]} now")
    if key not in known:
        raise ConfigError(f"unknown option {key!r}{where}{_nearest(key, list(known))}; --help lists all options")
    return known[key]


def _moved(cls: type) -> dict[str, str]:
    """Options that an earlier version had elsewhere: old name -> new name, of classes that have a table `MOVED`."""
    return getattr(cls, "MOVED", {})


def _nearest(name: str, candidates: Sequence[str]) -> str:
    """'; did you mean ...?', by the whole key or, for a key in the wrong group, by its last part."""
    by_last_part = {candidate.rpartition(".")[2]: candidate for candidate in candidates}
    match = difflib.get_close_matches(name, candidates, n=1, cutoff=0.75)
    if not match:
        parts = difflib.get_close_matches(name.rpartition(".")[2], by_last_part, n=1, cutoff=0.6)
        match = [by_last_part[part] for part in parts] or difflib.get_close_matches(name, candidates, n=1, cutoff=0.4)
    return f"; did you mean {match[0]!r}?" if match else ""


def _type_name(field_type: Any) -> str:
    origin = typing.get_origin(field_type)
    if origin is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(field_type)))
    if origin is list:
        (item,) = typing.get_args(field_type)
        items = {int: "integers", float: "numbers", str: "texts", bool: "true and false"}
        return f"a list of {items[item]}, like [a,b]" if item in items else f"a list, each {_type_name(item)}"
    if typing.get_args(field_type) and type(None) in typing.get_args(field_type):
        inner = [argument for argument in typing.get_args(field_type) if argument is not type(None)]
        return f"{_type_name(inner[0])} or null"
    return {bool: "true or false", int: "an integer", float: "a number", str: "text"}.get(field_type, str(field_type))


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


def _explain(key: str, option_type: Any, default: Any, metadata: typing.Mapping[str, str]) -> list[str]:
    head = f"  {key}={'null' if default is None else default}"
    unit = f", {metadata['unit']}" if metadata.get("unit") else ""
    source = f" Default: {metadata['source']}." if metadata.get("source") else ""
    text = f"{metadata.get('help', '')} ({_type_name(option_type)}{unit}).{source}"
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


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


# --- entry point ------------------------------------------------------------------------------------------------------


def entry(main: Callable[[T], Any], cls: type[T], argv: Sequence[str] | None = None) -> typing.NoReturn:
    """Run `main(config)` as a program: parse the command line, set up logging, exit.

    A `RunError` ends the program with its message and its exit code (1; 2 for a wrong configuration; 85 for a run that
    was stopped and can be continued). Any other exception is a bug and keeps its traceback.
    """
    run_program(lambda: main(parse(cls, sys.argv[1:] if argv is None else argv)))


def run_program(program: Callable[[], Any], level: int = logging.INFO) -> typing.NoReturn:
    """Run `program()` and exit, as `entry` does; messages of `level` and above are logged."""
    begin()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    try:
        program()
    except RunError as error:
        level = logging.WARNING if isinstance(error, Stopped) else logging.ERROR
        log.log(level, "%s: %s", type(error).__name__, error)
        sys.exit(error.exit_code)
    sys.exit(EXIT_DONE)
