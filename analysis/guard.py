"""A table, figure or claim that cannot be made of the rows at hand says why, and the others are made all the same.

Rows that are missing are no case for this module: a drawing function raises `NotMeasured`, a check `Untested`, and a
table has empty cells with a note. What is caught here is a computation that meets data which it was not written for.
It is a defect of this package, so it is never silent: a `NotMade` warning names it, `analysis.build` exits with 1, and
the tests turn the warning into an error.
"""

from __future__ import annotations

import functools
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from analysis.load import Results

# What pandas, numpy and matplotlib raise on data that a computation does not expect.
DATA_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
HERE = Path(__file__).parent


class NotMade(UserWarning):
    """A table, figure or claim that could not be made: which one, the error, and where it was raised."""


def report(what: str, error: Exception) -> str:
    """Warn that `what` could not be made, and return the reason as one line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if HERE in Path(frame.filename).parents]
    place = f", {Path(frames[-1].filename).name} line {frames[-1].lineno}" if frames else ""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
    warnings.warn(f"{what} could not be made: {reason}", NotMade, stacklevel=3)
    return reason


def table(make: Callable[[Results], pd.DataFrame]) -> Callable[[Results], pd.DataFrame]:
    """Decorator of a function that makes a table: on an error, one line that says why stands in its place."""

    @functools.wraps(make)
    def made(results: Results) -> pd.DataFrame:
        try:
            return make(results)
        except DATA_ERRORS as error:
            reason = report(f"table {make.__name__}", error)
            return pd.DataFrame([{"scale": "", "source": "ours", "note": f"cannot be made of these rows ({reason})"}])

    return made
