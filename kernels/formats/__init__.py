"""Sparse formats for activations: ELL, TwELL and Hybrid (the paper, section 4). Drawn as text in ../README.md."""

from .capacity import CapacityError
from .ell import ELL
from .hybrid import Hybrid
from .twell import TwELL

__all__ = ["ELL", "CapacityError", "Hybrid", "TwELL"]
