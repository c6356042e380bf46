"""If a table, figure or claim cannot be made from the rows, it gives the reason, and the others are still made.

Missing rows are handled elsewhere: a drawing function raises `NotMeasured`, a check raises `Untested`, and a table has
empty cells with a note. This module catches errors of a computation that meets unexpected data. Such an error is a
defect of this package and is never silent: a `NotMade` warning names it, `analysis.build` exits with 1, and the tests
turn the warning into an error.
"""

from __future__ import annotations

import functools
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from analysis.load import Results

# What pandas, numpy and matplotlib raise on unexpected data.
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
    """Decorator for a function that makes a table: on an error, the table is one line with the reason."""

    @functools.wraps(make)
    def made(results: Results) -> pd.DataFrame:
        try:
            return make(results)
        except DATA_ERRORS as error:
            reason = report(f"table {make.__name__}", error)
            return pd.DataFrame([{"cannot be made from these rows": reason}])

    return made
