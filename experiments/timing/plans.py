"""How alternatives are called in result rows: the columns `backend`, `plan`, `hot` and `backup`, and the names that
options use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from analysis.schema import COMPILED, HOT_PLANS

__all__ = ["AUTO", "BY_LAYER", "COMPILED", "WITH_BACKUP", "WITH_HOT", "Name", "layers_columns", "plan_of"]

WITH_HOT = "+hot"  # behind a name: hot neurons, found before timing, are computed densely
# Behind a name, and behind WITH_HOT if that is there too: in training, BACKUP_SHARE of the tokens are a dense backup.
WITH_BACKUP = "+backup"
_NAME = re.compile(f"(?s:(.*?))({re.escape(WITH_HOT)})?({re.escape(WITH_BACKUP)})?")
AUTO = "auto"  # as a backend of a whole model: each layer dense or sparse, and with hot neurons, as is fastest for it
BY_LAYER = "by_layer"  # the plan of a model some of whose layers are dense, some sparse


class Name(NamedTuple):
    """What an entry of the option `backends` asks for: a backend of `kernels`, whether hot neurons are left to dense
    products, and whether training has a dense backup. Rows have a column for each of the three."""

    backend: str
    hot: bool
    backup: bool

    @classmethod
    def of(cls, name: str) -> Name:
        """Of a backend's name, with WITH_HOT, WITH_BACKUP or both in this order behind it."""
        found = _NAME.fullmatch(name)
        assert found is not None  # the pattern takes any text
        backend, hot, backup = found.groups()
        return cls(backend, hot is not None, backup is not None)


def plan_of(name: str, *, training: bool) -> str:
    """One of `schema.PLANS` for an entry of the option `backends`: dense products, the paper's format for inference
    (twell), and for training the paper's (hybrid) or that of the GPU backends (csr)."""
    backend, hot, backup = Name.of(name)
    if backend == "dense":
        return "dense"
    plan = "twell" if not training else "hybrid" if backup or backend == "reference" else "csr"
    return HOT_PLANS[plan] if hot else plan


def layers_columns(backends: Sequence[str], *, backup: float | None = None, hot: int | None = None) -> dict[str, Any]:
    """The columns plan, backend, hot and backup of a training whose layers have these backends: dense, that of all
    layers, or BY_LAYER with the backend of the sparse ones. hot: of these layers, where it is known."""
    sparse = sorted(set(backends) - {"dense"})
    if not sparse:
        return {"plan": "dense", "backend": "dense"}
    plan = plan_of(sparse[0] + (WITH_BACKUP if backup else ""), training=True)
    plan = BY_LAYER if "dense" in backends or len(sparse) > 1 else HOT_PLANS[plan] if hot else plan
    return {"plan": plan, "backend": ", ".join(sparse), "hot": hot, "backup": backup}
