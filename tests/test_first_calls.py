"""The first call of a process decides nothing for later ones, and what is refused leaves a block as it was."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from kernels import (
    SparseFeedForward,
    autotune,
    feed_forward_blocks,
    hot_neurons,
    order_neurons,
    restore_tuning,
    tuning,
    tuning_settings,
)

ROOT = Path(__file__).parents[1]
EXPORT = """
import torch
from kernels import SparseFeedForward, available_backends
block = SparseFeedForward(8, 24, backend="{backend}", stats="none").eval().requires_grad_(False)
x = torch.randn(4, 8)
program = torch.export.export(block, (x,), strict=False)
assert torch.allclose(program.module()(x), block(x), atol=1e-6)
assert available_backends("cpu")["{backend}"].ok, available_backends("cpu")
"""


@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_a_process_may_begin_with_an_export(backend):
    code = EXPORT.format(backend=backend)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("how", ["tied", "parametrized"])
def test_weights_that_cannot_be_reordered_in_place_are_refused(how):
    block = SparseFeedForward(8, 24)
    if how == "tied":
        block.gate_proj.weight = block.up_proj.weight
    else:
        parametrizations.weight_norm(block.gate_proj)
    x = torch.randn(5, 8)
    before = block(x)
    with pytest.raises(ValueError, match="separate, plain parameters, got tied or parametrized"):
        order_neurons(block, torch.randperm(24))
    assert torch.equal(block(x), before)


def test_an_order_of_floats_is_refused_before_anything_changes():
    block = SparseFeedForward(8, 24)
    block.hot_prefix = 8
    with pytest.raises(ValueError, match=r"order must be an int64 tensor, got torch\.float32"):
        order_neurons(block, torch.randperm(24).float())
    assert block.hot_prefix == 8


class Named(nn.Module):
    """Calls its blocks by keyword."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(SparseFeedForward(8, 256) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x=x)
        return x


def test_blocks_that_are_called_by_keyword_are_tuned():
    assert len(autotune(Named().eval(), torch.randn(16, 8), drop_silent=True, held_out=torch.randn(16, 8))) == 2


def test_without_tokens_nothing_can_be_tuned():
    with pytest.raises(ValueError, match="at least one token"):
        autotune(Named().eval(), torch.zeros(0, 8), drop_silent=True)
    with pytest.raises(ValueError, match="held_out has no tokens"):
        autotune(Named().eval(), torch.randn(16, 8), drop_silent=True, held_out=torch.zeros(0, 8))


def test_what_cannot_be_measured_on_other_text_leaves_no_neuron_out(monkeypatch):
    def fails(model, blocks, held_out):
        for block in blocks:
            block.silent_suffix = 64
        raise ValueError("no logits")

    monkeypatch.setattr(tuning, "measure_held_out", fails)
    model = Named().eval()
    with pytest.raises(ValueError, match="no logits"):
        autotune(model, torch.randn(16, 8), drop_silent=True, held_out=torch.randn(16, 8))
    assert [block.silent_suffix for block in feed_forward_blocks(model)] == [0, 0]


def test_a_tuning_without_hot_neurons_is_restored_and_a_wrong_one_changes_nothing():
    model, other = Named(), Named()
    blocks, others = feed_forward_blocks(model), feed_forward_blocks(other)
    blocks[0].hot = torch.tensor([3])
    blocks[1].hot = hot_neurons(-torch.ones(4, 8), torch.ones(256, 8))
    assert blocks[1].hot.shape == (0,)
    settings = tuning_settings(model)
    restore_tuning(other, settings)
    assert [block.hot.tolist() for block in others] == [[3], []]
    for wrong, said in (({"hot": [5, 5]}, "layer 1 names a hot neuron twice"), ({"hot_prefix": -1}, "another number")):
        with pytest.raises(ValueError, match=said):
            restore_tuning(other, [settings[0] | {"hot": [7]}, settings[1] | wrong])
    with pytest.raises(ValueError, match="layer 1 has no backend"):
        restore_tuning(other, [settings[0] | {"hot": [7]}, {k: v for k, v in settings[1].items() if k != "backend"}])
    assert [block.hot.tolist() for block in others] == [[3], []]
