"""Feed-forward blocks whose ReLU activations are mostly zero: exact, safe, and usable in any PyTorch model.

    from kernels import sparse_ffn, SparseFeedForward, sparsify        # in this repository
    from twell import sparse_ffn, SparseFeedForward, sparsify          # after `pip install .`

Importing this package imports nothing else: `transformers` looks for a package of this name, and must find one without
side effects. Every public name is loaded on first use (PEP 562). See README.md.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .choose import Choice, choose_backends
    from .formats import ELL, CapacityError, Hybrid, TwELL
    from .hot import hot_neurons
    from .huggingface import sparsify
    from .memory import neuron_major
    from .modules import SparseFeedForward, feed_forward_blocks, make_neuron_major
    from .ops import FFNStats, sparse_ffn
    from .registry import Availability, BackendUnavailable, available_backends

_HOME = {
    "Availability": ".registry",
    "BackendUnavailable": ".registry",
    "CapacityError": ".formats",
    "Choice": ".choose",
    "ELL": ".formats",
    "FFNStats": ".ops",
    "Hybrid": ".formats",
    "SparseFeedForward": ".modules",
    "TwELL": ".formats",
    "available_backends": ".registry",
    "choose_backends": ".choose",
    "feed_forward_blocks": ".modules",
    "hot_neurons": ".hot",
    "neuron_major": ".memory",
    "make_neuron_major": ".modules",
    "sparse_ffn": ".ops",
    "sparsify": ".huggingface",
}

__all__ = [
    "ELL",
    "Availability",
    "BackendUnavailable",
    "CapacityError",
    "Choice",
    "FFNStats",
    "Hybrid",
    "SparseFeedForward",
    "TwELL",
    "available_backends",
    "choose_backends",
    "feed_forward_blocks",
    "hot_neurons",
    "make_neuron_major",
    "neuron_major",
    "sparse_ffn",
    "sparsify",
]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
