"""The programs of kernels/examples run at small settings and show what they are meant to show."""

import importlib
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainingArguments

import hugging_face
import nonzeros as counting
import plain_pytorch
import text
import trainer
from twell import feed_forward_blocks, sparsify
from twell.trainer import SparseTrainer


def test_a_hugging_face_model_is_made_sparse(tmp_path, capsys):
    hugging_face.main(tmp_path, steps=51, l1=0.1)
    printed = capsys.readouterr().out
    first, last = (
        [float(count) for count in line.split("non-zeros of 256: ")[1].split(", ")]
        for line in printed.splitlines()
        if line.startswith("step")
    )
    assert sum(last) < 0.7 * sum(first)
    assert "layer  non-zeros" in printed
    assert "def " in printed
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.config.hidden_act == "relu"
    assert not feed_forward_blocks(plain)


def test_a_trainer_adds_the_l1_term(tmp_path):
    strong, none = (trainer.main(tmp_path / str(l1), steps=24, l1=l1) for l1 in (0.3, 0.0))
    assert [entry["step"] for entry in strong] == [4, 8, 12, 16, 20, 24, 24]
    assert strong[-2]["nonzeros"] < 0.8 * none[-2]["nonzeros"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "0.3").config.hidden_act == "relu"


def test_a_trainer_evaluates(tmp_path):
    model = sparsify(AutoModelForCausalLM.from_config(trainer.CONFIG), activation="relu", keep_stats=True)
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", disable_tqdm=True, use_cpu=True)
    found = SparseTrainer(model=model, args=arguments, eval_dataset=trainer.windows(1, 4), l1=0.1).evaluate()
    assert found["eval_loss"] > 0


def test_a_plain_model_learns_and_becomes_sparse():
    right, nonzeros = plain_pytorch.main(steps=120, l1=3e-3)
    assert right > 0.2, "one in twelve by chance"
    assert nonzeros < 50, "128 of 256 at the start"


def test_an_analysis_counts_and_draws(tmp_path, capsys):
    counters = counting.main(tmp_path / "nonzeros.png", steps=2)
    assert (tmp_path / "nonzeros.png").stat().st_size > 10_000
    assert [counter.tokens for counter in counters] == [2 * 16 * 64] * 2
    for counter in counters:
        assert counter.fired.sum() == torch.cat(counter.nonzeros).sum()
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_an_analysis_without_matplotlib_ends_before_it_counts(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "nonzeros")
    with pytest.raises(ImportError, match="matplotlib"):
        importlib.import_module("nonzeros")


def test_the_text_of_the_examples_comes_back():
    assert text.decode(text.encode("def f(x):")) == "def f(x):"
    one, other = (torch.cat(list(text.batches(2, batch=3, length=5))) for _ in range(2))
    assert one.shape == (6, 5)
    assert torch.equal(one, other)
