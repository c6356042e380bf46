"""What an option takes: its value from text, by the option's type, and the range that belongs to the option.

Text is taken as it stands. Nothing in it is resolved: `${X}`, `???`, `yes`, `3.10` and `12:30` are text to an option
that takes text.
"""

from __future__ import annotations

import math
import re
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

# Names of studies and items become those of folders and jobs. None of these characters means anything to a shell, to
# SLURM's file name patterns (%j), or to a path; files get longer names than 200 characters beside them.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,199}")
A_NAME = "of at most 200 letters, digits and . _ + = -, the first of them a letter or a digit"
DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")
A_DEVICE = "auto, cpu, cuda or cuda:N"
# Seeds of numpy have 32 bits, and a training draws from the next seed as well.
LARGEST_SEED = 2**32 - 2
LARGEST_INTEGER = 2**63 - 1
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_INFINITIES = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}
_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 100
_shortened.maxlevel = 3


def shown(value: Any) -> str:
    """A value in an error message: on one line, and not longer than a line."""
    return "null" if value is None else _shortened.repr(value)


def name_shown(name: str) -> str:
    """A name in an error message: as it is where that stays on one line, and is not too long."""
    return name if name.isprintable() and len(name) <= 100 else shown(name)


# --- types ------------------------------------------------------------------------------------------------------------


def from_text(text: str, option_type: Any) -> Any:
    """The value that an argument of the command line gives to an option of this type; lists and mappings as in YAML.

    Raises:
        ValueError: it is of another type; the message says why, or is empty where the type says it all.
    """
    allowed, optional = _without_null(option_type)
    if optional and text == "null":
        return None
    if typing.get_origin(allowed) in (list, dict):
        try:
            return convert(read_yaml(text), allowed)
        except yaml.YAMLError as error:
            raise ValueError(f"it cannot be read: {in_one_line(error)}") from error
    return convert(text, allowed)


def convert(value: Any, option_type: Any) -> Any:
    """A value from a file as one of this type: text becomes a number, true or false where the option takes those.

    Raises:
        ValueError: as `from_text` does.
    """
    allowed, optional = _without_null(option_type)
    if value is None and optional:
        return None
    match typing.get_origin(allowed) or allowed:
        case types.NoneType:
            raise ValueError
        case typing.Literal:
            if value not in typing.get_args(allowed):
                raise ValueError
            return value
        case builtin if builtin is list:
            if not isinstance(value, list):
                raise ValueError
            return [convert(item, *typing.get_args(allowed)) for item in value]
        case builtin if builtin is dict:
            if not isinstance(value, dict):
                raise ValueError
            key_type, item_type = typing.get_args(allowed)
            return {convert(key, key_type): convert(item, item_type) for key, item in value.items()}
        case builtin if builtin in _CONVERTERS:
            return _CONVERTERS[builtin](value)
    raise TypeError(f"options of type {option_type} are not supported")


def _without_null(option_type: Any) -> tuple[Any, bool]:
    """(the type, whether null is allowed beside it)."""
    arguments = typing.get_args(option_type)
    if types.NoneType not in arguments:
        return option_type, False
    (inner,) = (argument for argument in arguments if argument is not types.NoneType)
    return inner, True


def _bool(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    if not isinstance(value, bool):
        raise ValueError
    return value


def _int(value: Any) -> int:
    if isinstance(value, str) and value.isascii():
        try:
            value = int(value)
        except ValueError:
            raise ValueError from None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError
    if abs(value) > LARGEST_INTEGER:
        raise ValueError("it has more than 64 bits")
    return value


def _float(value: Any) -> float:
    if isinstance(value, str) and value.isascii():
        try:
            value = _INFINITIES[value.lower()] if value.lower() in _INFINITIES else float(value)
        except ValueError:
            raise ValueError from None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError
    try:
        return float(value)
    except OverflowError:
        raise ValueError("it is too large") from None


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    if "\0" in value:
        raise ValueError("no text here has a NUL in it")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("it is not valid Unicode: in UTF-8 it cannot be written down") from None
    return value


_CONVERTERS: dict[Any, Callable[[Any], Any]] = {bool: _bool, int: _int, float: _float, str: _str}


def type_name(option_type: Any) -> str:
    """A type in words: "an integer or null"."""
    allowed, optional = _without_null(option_type)
    if optional:
        return f"{type_name(allowed)} or null"
    match typing.get_origin(allowed):
        case typing.Literal:
            return "one of " + ", ".join(map(str, typing.get_args(allowed)))
        case builtin if builtin is list:
            (item,) = typing.get_args(allowed)
            items = {int: "integers", float: "numbers", str: "texts", bool: "true and false"}
            return f"a list of {items[item]}, like [a,b]" if item in items else f"a list, each {type_name(item)}"
        case builtin if builtin is dict:
            return f"a mapping, each value {type_name(typing.get_args(allowed)[1])}"
    return {bool: "true or false", int: "an integer", float: "a number", str: "text"}[allowed]


# --- ranges -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """Which values of its type an option takes; of a list's, the bounds hold for each item.

    `minimum` and `maximum` are allowed themselves, `above` and `below` are not. `finite` forbids infinities; NaN never
    is a value. `required`: a text or a list must not be empty. `distinct`: the items of a list must differ. `pattern`,
    described by `wanted`, must match a text as a whole; an empty one passes unless it is required. `choices` are the
    only texts, `check` raises ValueError for those that are none.
    """

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    finite: bool = True
    required: bool = False
    distinct: bool = False
    pattern: re.Pattern[str] | None = None
    wanted: str = ""
    choices: Sequence[str] = ()
    check: Callable[[str], None] | None = None

    def __str__(self) -> str:
        """In words, for `--help`; a pattern and a check are explained by the option's own help."""
        return ", ".join(self._bounds())

    def _bounds(self) -> Iterator[str]:
        if self.minimum is not None and self.maximum is not None:
            yield f"{self.minimum} to {self.maximum}"
        elif self.minimum is not None:
            yield f"at least {self.minimum}"
        elif self.maximum is not None:
            yield f"at most {self.maximum}"
        if self.above is not None:
            yield f"above {self.above}"
        if self.below is not None:
            yield f"below {self.below}"
        if self.required:
            yield "not empty"
        if self.choices:
            yield f"of {', '.join(self.choices)}"

    def problem(self, key: str, value: Any) -> str | None:
        """What is wrong with the option's value, in a sentence; None if nothing is."""
        if value is None:
            return None
        if self.required and isinstance(value, str | list) and not value:
            return f"{key} must not be empty"
        if not isinstance(value, list):
            return self._item_problem(key, value)
        if self.distinct and (twice := _first_twice(value)) is not None:
            return f"{key} has {shown(twice)} twice"
        return next(filter(None, (self._item_problem(f"each of {key}", item) for item in value)), None)

    def _item_problem(self, key: str, value: Any) -> str | None:
        if isinstance(value, str):
            return self._text_problem(key, value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        wanted = None
        if isinstance(value, float) and (math.isnan(value) or (self.finite and math.isinf(value))):
            wanted = "a finite number" if self.finite else "a number"
        elif self.minimum is not None and value < self.minimum:
            wanted = f"at least {self.minimum}"
        elif self.maximum is not None and value > self.maximum:
            wanted = f"at most {self.maximum}"
        elif self.above is not None and value <= self.above:
            wanted = f"above {self.above}"
        elif self.below is not None and value >= self.below:
            wanted = f"below {self.below}"
        return wanted and f"{key} must be {wanted}, got {shown(value)}"

    def _text_problem(self, key: str, value: str) -> str | None:
        if self.pattern is not None and value and not self.pattern.fullmatch(value):
            return f"{key} must be {self.wanted}, got {shown(value)}"
        if self.choices and value not in self.choices:
            return f"{key} must be of {', '.join(self.choices)}, got {shown(value)}"
        if self.check is not None:
            try:
                self.check(value)
            except ValueError as error:
                return f"{key}: {in_one_line(error)}"
        return None


def _first_twice(items: Iterable[Any]) -> Any:
    seen = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None


def in_one_line(error: BaseException, length: int | None = None) -> str:
    """An error's message without line breaks, or the beginning of it."""
    return " ".join(str(error).split())[:length]


# --- YAML -------------------------------------------------------------------------------------------------------------


class _TextLoader(yaml.SafeLoader):
    """YAML whose scalars are text as they stand, since the option decides what they mean; only null, and nothing at
    all, is None. A key that comes twice in a mapping is an error."""

    yaml_implicit_resolvers: typing.ClassVar[dict[str, Any]] = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in ("null", "merge")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if (twice := _first_twice(names)) is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{shown(twice)} comes twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(content: str | bytes) -> Any:
    """YAML as lists, mappings, texts and None: numbers, dates, true and false stay the text that they are.

    Raises:
        yaml.YAMLError: it is not YAML, or nested too deeply.
    """
    try:
        return yaml.load(content, _TextLoader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except ValueError as error:  # of a value with a tag of its own, such as !!int x
        raise yaml.YAMLError(str(error)) from error
