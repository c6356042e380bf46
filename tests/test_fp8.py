"""The block by FP8 products, beside the other dense forms: with its error, and never the baseline."""

import pytest
import torch
from pairwise import slow

from experiments.bench import fp8
from experiments.bench.decoder import Decoder, decoder_alternatives
from experiments.bench.feedforward import alternatives
from experiments.bench.options import FP8
from experiments.models.llama import build_model
from experiments.run.train_config import ModelConfig
from experiments.timing.compare import Absent, Candidate, CheckFailed, compare
from experiments.timing.options import TimingConfig
from twell.testing import make_problem

CPU = torch.device("cpu")


@pytest.mark.parametrize("gated", [True, *slow(False)])
def test_the_block_is_timed_with_its_error_and_is_no_baseline(gated):
    problem = make_problem(48, 32, 64, 8.0, gated=gated, seed=3)
    exact, rounded = alternatives(problem, ["dense_eager", FP8], [])
    assert rounded.check_error > 3 * exact.check_error
    timing = TimingConfig(seconds=0.01, settle_seconds=0.0, rounds=1)
    rows = {row["backend"]: row for row in compare([exact, rounded], CPU, timing, ["time"], tokens=48)}
    assert rows[FP8]["plan"] == FP8
    assert rows[FP8]["baseline"] == rows["dense_eager"]["baseline"] == "dense_eager"


def test_it_is_for_a_forward_only():
    problem = make_problem(48, 32, 64, 8.0, seed=3)
    assert [form.backend for form in alternatives(problem, ["dense_eager", FP8], [], blocks=1)] == ["dense_eager"]


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (make_problem(16, 32, 64, 8.0, dtype=torch.float32), "FP8 products give bfloat16, not torch.float32"),
        (make_problem(16, 32, 72, 8.0), "multiples of 16, got K=32, N=72"),
    ],
)
def test_what_it_cannot_run_is_absent(problem, reason):
    (absent,) = alternatives(problem, [FP8], [])
    assert isinstance(absent, Absent)
    assert reason in absent.reason


def test_a_wrong_scale_is_no_rounding(monkeypatch):
    problem = make_problem(48, 32, 64, 8.0, seed=3)
    right = fp8.prepare
    monkeypatch.setattr(fp8, "prepare", lambda problem: (*right(problem)[:-1], right(problem)[-1] * 2))
    with pytest.raises(CheckFailed, match="dense_fp8 y"):
        alternatives(problem, [FP8], [])


@pytest.mark.parametrize("activation", ["relu", *slow("silu")])
def test_a_whole_decoder(activation):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 96, "max_positions": 32, "layers": 2}
    config = ModelConfig(activation=activation, attention_heads=2, key_value_heads=2, **sizes)
    model = build_model(config, dtype=torch.bfloat16)
    decoder = Decoder(model, torch.randint(0, 96, (2, 16)))
    before = decoder.forward("dense")
    exact, rounded = decoder_alternatives(decoder, ["dense_eager", FP8], [])
    assert isinstance(rounded, Candidate)
    assert exact.check_error < rounded.check_error < fp8.TOLERANCE
    assert torch.equal(decoder.forward("dense"), before), "the blocks are as they were"
