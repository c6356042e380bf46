"""How alternatives are called in result rows: the columns from `plan` to `backup`, and the names that
options use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from analysis.schema import COMPILED, HOT_PLANS, LIVE_PLANS, ORDERED_PLANS

WITH_HOT = "+hot"  # behind a name: hot neurons, found before timing, are computed densely
# Behind a name, of a forward only: neurons sorted by firing rate, the hot ones in front; and the same with those that
# fire for none of the tokens (silent neurons) left out, so that only the live ones remain: also behind "dense".
WITH_ORDERED, WITH_LIVE = "+ordered", "+live"
# Behind a name, and behind WITH_HOT if that is there too: in training, BACKUP_SHARE of the tokens are a dense backup.
WITH_BACKUP = "+backup"
SUFFIXES = (WITH_HOT, WITH_BACKUP, WITH_HOT + WITH_BACKUP, WITH_ORDERED, WITH_LIVE)
_PLANS = {WITH_HOT: HOT_PLANS, WITH_ORDERED: ORDERED_PLANS, WITH_LIVE: LIVE_PLANS}
AUTO = "auto"  # as a backend of a whole model: each layer dense or sparse, and with hot neurons, as is fastest for it
TRANSFORMERS = "transformers"  # as a backend of a whole model: blocks that compute as transformers' do
BY_LAYER = "by_layer"  # the plan of a model some of whose layers are dense, some sparse


class Name(NamedTuple):
    """What an entry of the option `backends` asks for: a backend of `kernels`; what is done with its neurons, which is
    WITH_HOT, WITH_ORDERED, WITH_LIVE or nothing (""); and whether training has a dense backup."""

    backend: str
    neurons: str
    backup: bool

    @classmethod
    def of(cls, name: str) -> Name:
        """Parse a backend's name, with one of SUFFIXES or nothing behind it."""
        suffix = max(filter(name.endswith, ("", *SUFFIXES)), key=len)
        return cls(name.removesuffix(suffix), suffix.removesuffix(WITH_BACKUP), suffix.endswith(WITH_BACKUP))

    @property
    def plain(self) -> bool:
        """Whether it is a backend and nothing else."""
        return not self.neurons and not self.backup

    @property
    def share(self) -> float | None:
        """Share of the tokens in the dense backup; None without one."""
        from twell.formats.hybrid import BACKUP_SHARE  # torch

        return BACKUP_SHARE if self.backup else None

    @property
    def in_order(self) -> bool:
        """Whether the neurons are sorted by firing rate: for a forward only."""
        return self.neurons in (WITH_ORDERED, WITH_LIVE)


def plan_of(name: str, *, training: bool) -> str:
    """One of `schema.PLANS` for an entry of the option `backends`: dense products, the paper's format for inference
    (twell), and for training the paper's (hybrid) or that of the GPU backends (csr).

    Raises:
        ValueError: for neurons sorted by firing rate in training, and for dense products with hot neurons, with neurons
            sorted by firing rate or with a backup.
    """
    asked = Name.of(name)
    if training and asked.in_order:
        raise ValueError(f"neurons sorted by firing rate are for a forward only, got {name!r} in training")
    if name == TRANSFORMERS:
        plan = "dense"
    elif asked.backend == "dense":
        if asked.backup or asked.neurons not in ("", WITH_LIVE):
            raise ValueError(f"dense products compute all neurons, or those that fire ({WITH_LIVE}), got {name!r}")
        plan = "dense"
    elif training:
        plan = "hybrid" if asked.backup or asked.backend == "reference" else "csr"
    else:
        plan = "twell"
    return _PLANS[asked.neurons][plan] if asked.neurons else plan


def named(backend: str, *, compiled: bool) -> str:
    """A backend's name in rows of whole models: whether what is around the blocks is compiled."""
    return backend + COMPILED if compiled else backend


def layers_columns(backends: Sequence[str], *, backup: float | None = None, hot: int | None = None) -> dict[str, Any]:
    """The columns plan, backend, hot and backup of a training whose layers have these backends: dense, that of all
    layers, or BY_LAYER with the backend of the sparse ones. hot: of these layers, where it is known."""
    sparse = sorted(set(backends) - {"dense"})
    if not sparse:
        return {"plan": "dense", "backend": "dense"}
    plan = plan_of(sparse[0] + (WITH_BACKUP if backup else ""), training=True)
    plan = BY_LAYER if "dense" in backends or len(sparse) > 1 else HOT_PLANS[plan] if hot else plan
    return {"plan": plan, "backend": ", ".join(sparse), "hot": hot, "backup": backup}
