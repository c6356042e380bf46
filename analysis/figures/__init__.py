"""One function for each figure of the paper, in order, and for each of ours. Each takes `Results`, returns `Drawn`."""

from analysis.figures.blocks import against_nonzeros
from analysis.figures.devices import devices
from analysis.figures.drawn import Drawn as Drawn
from analysis.figures.formats import format_diagram
from analysis.figures.frontier import frontier
from analysis.figures.kernels_in_training import kernels_in_training
from analysis.figures.layer_speed import layer_speed, layer_training_speed, layers_against_nonzeros
from analysis.figures.layers import recommended, strongest, unions, unregularised
from analysis.figures.narrow import narrow_dense
from analysis.figures.overview import overview
from analysis.figures.quality import by_l1
from analysis.figures.sizes import model_sizes
from analysis.figures.speed import forward_gains, training_gains
from analysis.figures.tokens import tokens_and_positions
from analysis.figures.training import curves_by_l1, mitigation, sparsity_by_l1

FIGURES = (
    format_diagram,  # 1
    curves_by_l1,
    by_l1,
    forward_gains,
    training_gains,
    recommended,  # 6
    tokens_and_positions,
    mitigation,
    sparsity_by_l1,
    unregularised,
    strongest,
    devices,  # 12
    unions,  # A
    against_nonzeros,  # B
    kernels_in_training,  # C
    overview,  # D
    layer_speed,  # E
    layer_training_speed,  # F
    model_sizes,  # G
    narrow_dense,  # H
    layers_against_nonzeros,  # I
    frontier,  # J
)
