"""What an option takes (`Range`), its type in words, and YAML whose scalars are text."""

from __future__ import annotations

import math
import re
import reprlib
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

LARGEST_INTEGER = 2**63 - 1
# Seeds of numpy have 32 bits, and a training draws from the next seed as well.
LARGEST_SEED = 2**32 - 2
_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 100
_shortened.maxlevel = 3


class Pattern(NamedTuple):
    """What a text must match as a whole, and the same in words."""

    expression: re.Pattern[str]
    words: str


# Names of studies and items become those of folders and jobs. None of these characters means anything to a shell, to
# SLURM's file name patterns (%j), or to a path; files get longer names than 200 characters beside them.
NAME = Pattern(
    re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,199}"),
    "of at most 200 letters, digits and . _ + = -, the first of them a letter or a digit",
)
DEVICE = Pattern(re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?"), "auto, cpu, cuda or cuda:N")


def shown(value: Any) -> str:
    """A value in an error message: on one line, and not longer than a line."""
    return "null" if value is None else _shortened.repr(value)


def name_shown(name: str) -> str:
    """A name in an error message: as it is where that stays on one line, and is not too long."""
    return name if name.isprintable() and len(name) <= 100 else shown(name)


def in_one_line(error: BaseException, length: int | None = None) -> str:
    """An error's message without line breaks, or the beginning of it."""
    return " ".join(str(error).split())[:length]


def type_name(option_type: Any) -> str:
    """A type in words: "an integer or null"."""
    arguments = [argument for argument in typing.get_args(option_type) if argument is not types.NoneType]
    match typing.get_origin(option_type):
        case typing.Literal:
            return f"one of {', '.join(map(str, arguments))}"
        case typing.Union | types.UnionType:
            return f"{type_name(arguments[0])} or null"
        case container if container is list:
            items = {int: "integers", float: "numbers", str: "texts"}
            return f"a list of {items[arguments[0]]}, like [a,b]" if arguments[0] in items else "a list like [a,b]"
        case container if container is dict:
            return f"a mapping, each value {type_name(arguments[1])}"
    return {bool: "true or false", int: "an integer", float: "a number", str: "text"}[option_type]


@dataclass(frozen=True)
class Range:
    """Which values of its type an option takes; of a list's, the bounds hold for each item.

    `minimum` and `maximum` are allowed themselves, `above` and `below` are not. `finite` forbids infinities; NaN never
    is a value. `required`: a text or a list must not be empty. `distinct`: the items of a list must differ. `pattern`
    must match a text; an empty one passes unless it is required. `choices` are the only texts, `check` raises
    ValueError for those that are none.
    """

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    finite: bool = True
    required: bool = False
    distinct: bool = False
    pattern: Pattern | None = None
    choices: Sequence[str] = ()
    check: Callable[[str], None] | None = None

    def __str__(self) -> str:
        """In words, for `--help`; a pattern and a check are explained by the option's own help."""
        both = self.minimum is not None and self.maximum is not None
        parts = {
            f"{self.minimum} to {self.maximum}": both,
            f"at least {self.minimum}": self.minimum is not None and not both,
            f"at most {self.maximum}": self.maximum is not None and not both,
            f"above {self.above}": self.above is not None,
            f"below {self.below}": self.below is not None,
            "not empty": self.required,
            f"of {', '.join(self.choices)}": self.choices,
        }
        return ", ".join(words for words, applies in parts.items() if applies)

    def problem(self, key: str, value: Any) -> str | None:
        """What is wrong with the option's value, in a sentence; None if nothing is."""
        if self.required and value in ("", []):
            return f"{key} must not be empty"
        if not isinstance(value, list):
            return self._problem(key, value)
        if self.distinct and (twice := first_twice(value)) is not None:
            return f"{key} has {shown(twice)} twice"
        return next(filter(None, (self._problem(f"each of {key}", item) for item in value)), None)

    def _problem(self, key: str, value: Any) -> str | None:
        must = None
        if isinstance(value, str):
            if self.pattern is not None and value and not self.pattern.expression.fullmatch(value):
                must = self.pattern.words
            elif self.choices and value not in self.choices:
                must = f"of {', '.join(self.choices)}"
            elif self.check is not None:
                try:
                    self.check(value)
                except ValueError as error:
                    return f"{key}: {in_one_line(error)}"
        elif isinstance(value, int | float) and not isinstance(value, bool):
            must = self._bound_broken(value)
        return must and f"{key} must be {must}, got {shown(value)}"

    def _bound_broken(self, value: float) -> str | None:
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            return "an integer of 64 bits"
        if math.isnan(value) or (self.finite and math.isinf(value)):
            return "a finite number" if self.finite else "a number"
        broken = {
            f"at least {self.minimum}": self.minimum is not None and value < self.minimum,
            f"at most {self.maximum}": self.maximum is not None and value > self.maximum,
            f"above {self.above}": self.above is not None and value <= self.above,
            f"below {self.below}": self.below is not None and value >= self.below,
        }
        return next((words for words, is_broken in broken.items() if is_broken), None)


def first_twice(items: Iterable[Any]) -> Any:
    """The first item that is there twice; None if all differ."""
    return next((item for item, count in Counter(items).items() if count > 1), None)


class _TextLoader(yaml.SafeLoader):
    """YAML whose scalars are text as they stand, since the option decides what they mean; only null, and nothing at
    all, is None. A key that comes twice in a mapping is an error."""

    yaml_implicit_resolvers: typing.ClassVar[dict[str, Any]] = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in ("null", "merge")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if (twice := first_twice(names)) is not None:
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
