"""Policies for data that do not fit a format: grow or raise, as the caller chooses. Nothing is dropped."""

GROW, RAISE = "grow", "raise"


class CapacityError(RuntimeError):
    """The data do not fit: `parameter` is `capacity` and must be at least `needed`."""

    def __init__(self, what: str, parameter: str, *, capacity: int, needed: int) -> None:
        self.parameter, self.capacity, self.needed = parameter, capacity, needed
        over = f"{parameter}={capacity} is {needed - capacity} too few"
        super().__init__(f'{what}: {over}; pass {parameter}={needed} or on_overflow="{GROW}"')


def check_policy(on_overflow: str) -> None:
    """Raises ValueError for an unknown policy."""
    if on_overflow not in (GROW, RAISE):
        raise ValueError(f"on_overflow must be {GROW!r} or {RAISE!r}, got {on_overflow!r}")


def check_sizes(least: int, **parameters: int | None) -> None:
    """Raises TypeError or ValueError for anything but an integer of at least `least`; None (the format decides) is
    accepted."""
    for name, value in parameters.items():
        if value is not None and type(value) is not int:
            raise TypeError(f"{name} must be an integer, got {value!r}")
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
