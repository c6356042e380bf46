"""The loss of a model without its weakest activations."""

import pytest
import torch
from tiny_run import make_run
from torch.nn import functional as F

from experiments.models.subject import load_subject
from experiments.nonzeros.ablation import without_weakest

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["relu", "relu2", "silu", "nongated"])
def checkpoint(request, tmp_path_factory):
    options = {"nongated": ["model.gated=false"]}.get(request.param, [f"model.activation={request.param}"])
    return str(make_run(tmp_path_factory.mktemp(request.param), request.param, *options))


def plain_loss(subject):
    (ids,) = subject.batches(64, max_tokens=512)
    with torch.no_grad():
        logits = subject.model(input_ids=ids[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()


def test_without_anything_removed_the_loss_is_that_of_the_model(checkpoint):
    frame = without_weakest(checkpoint, shares=(0.0, 0.5), tokens=512, batch=64)
    assert frame["cross_entropy"][0] == pytest.approx(plain_loss(load_subject(checkpoint, CPU)), rel=1e-5)
    assert frame["change_pct"][0] == 0
    again = without_weakest(checkpoint, shares=(0.5,), tokens=512, batch=64)
    assert again["cross_entropy"][0] == frame["cross_entropy"][1], "a share does not depend on those before it"


def test_shares_of_the_non_zeros_are_removed_and_at_last_the_blocks(checkpoint):
    frame = without_weakest(checkpoint, shares=(0.0, 0.25, 0.5, 1.0), tokens=512, batch=64)
    # One batch: the thresholds are those of the very tokens that are counted. Later layers see other inputs.
    left = frame["nonzeros"] / frame["nonzeros"][0]
    assert left[1] == pytest.approx(0.75, abs=0.02)
    assert left[2] == pytest.approx(0.5, abs=0.02)
    assert left[3] < 0.01
    subject = load_subject(checkpoint, CPU)
    for layer in subject.model.model.layers:
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    without_blocks = plain_loss(subject)
    assert frame["cross_entropy"][3] == pytest.approx(without_blocks, rel=1e-4)
    assert without_blocks != pytest.approx(frame["cross_entropy"][0], rel=1e-6)
