"""The names of the backends, without torch: programs check their options by them before they import it."""

import reprlib

AUTO, DENSE = "auto", "dense"
FILES = {
    DENSE: ".backends.dense",
    "reference": ".backends.reference",
    "hopper": ".backends.hopper",
    "triton": ".backends.triton",
}


def check_name(name: str) -> None:
    """Raises ValueError for anything but a backend's name, whether or not it could run here."""
    if not isinstance(name, str) or (name != AUTO and name not in FILES):
        raise ValueError(f"backend must be one of {', '.join((AUTO, *FILES))}, got {reprlib.repr(name)}")
