"""Feed-forward blocks whose ReLU activations are mostly zero: exact, safe, and usable in any PyTorch model.

    from twell import sparse_ffn, SparseFeedForward, sparsify

Importing this package imports nothing else: every public name is loaded on first use (PEP 562). README.md of the folder
above says what each does.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .formats import ELL, CapacityError, Hybrid, TwELL
    from .hot import hot_neurons
    from .huggingface import sparsify
    from .interface import Availability
    from .memory import neuron_major
    from .modules import SparseFeedForward, feed_forward_blocks, l1_penalty, make_neuron_major
    from .ops import FFNStats, sparse_ffn
    from .ordering import order_neurons, restore_order
    from .registry import BackendUnavailable, available_backends, why_not
    from .saved_tuning import keep_silent, restore_tuning, tuning_settings
    from .training_tuning import autotune_training
    from .tuning import Alternative, Choice, Tuning, autotune

__version__ = "0.1.0"  # pyproject.toml reads the package's version here

_HOME = {
    "Alternative": ".tuning",
    "Availability": ".interface",
    "BackendUnavailable": ".registry",
    "CapacityError": ".formats",
    "Choice": ".tuning",
    "ELL": ".formats",
    "FFNStats": ".ops",
    "Hybrid": ".formats",
    "SparseFeedForward": ".modules",
    "TwELL": ".formats",
    "available_backends": ".registry",
    "autotune": ".tuning",
    "autotune_training": ".training_tuning",
    "feed_forward_blocks": ".modules",
    "keep_silent": ".saved_tuning",
    "restore_tuning": ".saved_tuning",
    "tuning_settings": ".saved_tuning",
    "hot_neurons": ".hot",
    "l1_penalty": ".modules",
    "neuron_major": ".memory",
    "make_neuron_major": ".modules",
    "order_neurons": ".ordering",
    "restore_order": ".ordering",
    "sparse_ffn": ".ops",
    "sparsify": ".huggingface",
    "why_not": ".registry",
    "Tuning": ".tuning",
}

__all__ = [
    "ELL",
    "Alternative",
    "Availability",
    "BackendUnavailable",
    "CapacityError",
    "Choice",
    "FFNStats",
    "Hybrid",
    "SparseFeedForward",
    "Tuning",
    "TwELL",
    "autotune",
    "autotune_training",
    "available_backends",
    "feed_forward_blocks",
    "hot_neurons",
    "keep_silent",
    "l1_penalty",
    "make_neuron_major",
    "neuron_major",
    "order_neurons",
    "restore_order",
    "restore_tuning",
    "sparse_ffn",
    "sparsify",
    "tuning_settings",
    "why_not",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
