"""Sparse formats for activations: ELL, TwELL and Hybrid (the paper's figure 1). Drawn as text in ../DESIGN.md."""

from .capacity import CapacityError
from .ell import ELL
from .hybrid import Hybrid
from .twell import TwELL

__all__ = ["ELL", "CapacityError", "Hybrid", "TwELL"]
