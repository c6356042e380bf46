"""torch's fused optimizers on a GPU: their steps are noticed, and their state follows a weight's memory layout."""

import pytest
import torch

from twell import SparseFeedForward, make_neuron_major

pytestmark = pytest.mark.gpu
FUSED = {"Adam": {"amsgrad": True}, "AdamW": {}, "SGD": {"momentum": 0.9}}


@pytest.mark.parametrize("name", FUSED)
def test_fused_steps_are_noticed_and_follow_a_change_of_layout(name):
    ends = []
    for fused in (False, True):
        torch.manual_seed(0)
        block = SparseFeedForward(64, 160, device="cuda", dtype=torch.float64)
        running = getattr(torch.optim, name)(block.parameters(), lr=0.01, fused=fused, **FUSED[name])
        x = torch.randn(32, 64, device="cuda", dtype=torch.float64)
        for step in range(5):
            if step == 2:
                make_neuron_major(block)
            running.zero_grad()
            (block(x) - 1).square().mean().backward()
            versions = [weight._version for weight in block.parameters()]
            running.step()
            assert all(w._version > before for w, before in zip(block.parameters(), versions, strict=True))
        ends.append(list(block.parameters()))
    for weight, other in zip(*ends, strict=True):
        torch.testing.assert_close(weight, other)
