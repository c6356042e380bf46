"""Feed-forward blocks whose ReLU activations are mostly zero: exact, safe, and usable in any PyTorch model.

    from twell import sparse_ffn, SparseFeedForward, sparsify

Importing this package imports nothing else: every public name is loaded on first use (PEP 562). README.md of the folder
above says what each does.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .huggingface import sparsify
    from .modules import SparseFeedForward, feed_forward_blocks, l1_penalty
    from .ops import FFNStats, sparse_ffn
    from .plan import Plan
    from .prune import prune_silent
    from .registry import available_backends
    from .released import from_released
    from .tuning import autotune
    from .tuning.saved import load_plans, save_plans

__version__ = "0.1.0"  # pyproject.toml reads the package's version here

_HOME = {
    "FFNStats": ".ops",
    "Plan": ".plan",
    "SparseFeedForward": ".modules",
    "autotune": ".tuning",
    "available_backends": ".registry",
    "feed_forward_blocks": ".modules",
    "from_released": ".released",
    "l1_penalty": ".modules",
    "load_plans": ".tuning.saved",
    "prune_silent": ".prune",
    "save_plans": ".tuning.saved",
    "sparse_ffn": ".ops",
    "sparsify": ".huggingface",
}

__all__ = [
    "FFNStats",
    "Plan",
    "SparseFeedForward",
    "autotune",
    "available_backends",
    "feed_forward_blocks",
    "from_released",
    "l1_penalty",
    "load_plans",
    "prune_silent",
    "save_plans",
    "sparse_ffn",
    "sparsify",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
