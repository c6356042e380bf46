"""Parameters of a test, pair by pair in place of all at once."""

import itertools
from typing import Any

import pytest


def pairwise(**values: list[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with a few cases in which every two values of different parameters meet."""
    cases = list(itertools.product(*(enumerate(choices) for choices in values.values())))

    def pairs(case: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations([(name, index) for name, (index, _) in zip(values, case, strict=True)], 2))

    missing, chosen = set().union(*map(pairs, cases)), []
    while missing:
        case = max(cases, key=lambda each: len(pairs(each) & missing))
        missing -= pairs(case)
        chosen.append(tuple(value for _, value in case))
    return pytest.mark.parametrize(tuple(values), chosen, ids=str)


def slow(*values: Any) -> list[Any]:
    """Parameters of the slow tests alone."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
