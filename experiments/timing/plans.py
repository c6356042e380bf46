"""How alternatives are called in result rows: the columns `backend` and `plan`, and the names that options use."""

from __future__ import annotations

import re
from typing import NamedTuple

from kernels.choose import HOT as WITH_HOT  # behind a name: hot neurons, found before timing, are computed densely

__all__ = ["AUTO", "BY_LAYER", "WITH_BACKUP", "WITH_HOT", "Name", "plan_of"]

# Behind a name, and behind WITH_HOT if that is there too: in training, BACKUP_SHARE of the tokens are a dense backup.
WITH_BACKUP = "+backup"
_NAME = re.compile(f"(?s:(.*?))({re.escape(WITH_HOT)})?({re.escape(WITH_BACKUP)})?")
AUTO = "auto"  # as a backend of a whole model: each layer dense or sparse, and with hot neurons, as is fastest for it
BY_LAYER = "by_layer"  # the plan of a model some of whose layers are dense, some sparse


class Name(NamedTuple):
    """What the name of a form says: a backend of `kernels` (or several, joined by a plus: a model with both kinds of
    layers), whether hot neurons are left to dense products, and whether training has a dense backup."""

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
    """What the form of this name does: dense products, the paper's format for inference (twell), and for training the
    paper's (hybrid) or that of the GPU backends (csr). With WITH_HOT, hot neurons are left to dense products. Several
    backends are a model with both kinds of layers."""
    backend, hot, backup = Name.of(name)
    if "+" in backend:
        return BY_LAYER
    if backend == "dense":
        return "dense"
    plan = "twell" if not training else "hybrid" if backup or backend == "reference" else "csr"
    return plan + WITH_HOT if hot else plan
