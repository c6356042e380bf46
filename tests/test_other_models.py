"""The programs on a model that is no Llama and was not trained here: counted, timed and scored with data=."""

import pytest
import torch
from test_bench import rows_of
from tiny_models import SIZES
from tiny_run import make_run, write_text
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config

from experiments import bench_forward, bench_generate, bench_training, evaluate, gather_nonzeros
from experiments.models.subject import load_subject
from experiments.run.config import parse
from experiments.run.errors import CheckpointError, DataError
from experiments.run.results import read_rows
from twell import feed_forward_blocks, sparsify


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """(folder of a random Gemma 2, which caps its logits, with the tokenizer of a run; folder of a text)."""
    root = tmp_path_factory.mktemp("gemma")
    text = write_text(root / "split")
    for number, path in enumerate(text.iterdir()):
        path.rename(text / f"{'train' if number % 3 else 'validation'}_{number}.txt")
    tokenizer = AutoTokenizer.from_pretrained(make_run(root) / "tokenizer")
    torch.manual_seed(0)
    special = {"hidden_activation": "relu", "final_logit_softcapping": 0.5, "attn_implementation": "eager"}
    config = Gemma2Config(**SIZES | {"vocab_size": len(tokenizer)}, **special)
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    return root / "model", text


def rows(program, config, out, folder, *arguments):
    model, text = folder
    places = [f"checkpoint={model}", *([f"data=path:{text}"] if text else []), f"run.dir={out}", "device=cpu"]
    program.main(parse(config, [*places, *arguments]))
    return read_rows(out / "rows.csv")


def test_its_neurons_are_counted(folder, tmp_path):
    found = rows(gather_nonzeros, gather_nonzeros.GatherConfig, tmp_path, folder, "tokens=256", "batch=2", "groups=[4]")
    counted = {row["layer"]: row["value"] for row in found if row["metric"] == "nonzeros"}
    assert set(counted) == {None, 0, 1}
    assert {(row["model"], row["hidden"], row["intermediate"], row["activation"]) for row in found} == {
        ("model", 32, 48, "relu")
    }
    assert 10 < counted[0] < 40, "about half of 48"
    assert (tmp_path / "nonzeros_by_token.parquet").is_file()


def test_its_cross_entropy_is_that_of_its_own_logits(folder, tmp_path):
    found = rows(evaluate, evaluate.EvaluateConfig, tmp_path, folder, "evaluation_tokens=128", "batch=1")
    [row] = [row for row in found if row["metric"] == "validation_cross_entropy"]
    model = AutoModelForCausalLM.from_pretrained(folder[0]).eval()
    subject = load_subject(str(folder[0]), torch.device("cpu"))
    [*batches] = subject.batches(1, max_tokens=128, data=f"path:{folder[1]}")
    with torch.no_grad():
        losses = [F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten()) for ids in batches]
    assert row["value"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


def timed(folder):
    model, text = folder
    return [f"checkpoints=[{model}]", f"data=path:{text}", "dense=[dense_eager]", "dtype=float32"]


@pytest.mark.slow
def test_its_forward_is_timed(folder, tmp_path):
    found = rows_of(bench_forward, tmp_path, *timed(folder), "batch=2", "sequence=16")
    assert {(row["op"], row["layer"], row["backend"]) for row in found} >= {
        ("model_forward", None, "reference"),
        ("ffn_forward", 0, "dense_eager"),
        ("ffn_forward", 1, "reference"),
    }


def test_its_generation_is_timed(folder, tmp_path):
    found = rows_of(bench_generate, tmp_path, *timed(folder), "batch=[2]", "prompt=8", "new_tokens=4")
    times = {row["backend"]: row for row in found if row["metric"] == "time"}
    assert set(times) == {"dense_eager", "reference"}
    assert all(row["value"] > 0 and row["check_error"] < 1e-4 for row in times.values())


def test_what_it_cannot_do_is_reported(folder, tmp_path):
    with pytest.raises(DataError, match=r"was not trained here: name the text to read, data="):
        rows(evaluate, evaluate.EvaluateConfig, tmp_path, (folder[0], None))
    with pytest.raises(CheckpointError, match="the training step is that of Llama models, this is a Gemma2ForCausalLM"):
        rows_of(bench_training, tmp_path, f"checkpoints=[{folder[0]}]", "sequence=16")


def test_a_model_that_sparsify_made_is_read_again(folder, tmp_path):
    """What an owner does: replace the activation, train, save, and gather."""
    torch.manual_seed(0)
    config = Gemma2Config.from_pretrained(folder[0], hidden_activation="gelu_pytorch_tanh")
    model = sparsify(AutoModelForCausalLM.from_config(config), activation="relu")
    model.save_pretrained(tmp_path)
    subject = load_subject(str(tmp_path), torch.device("cpu"))
    assert len(feed_forward_blocks(subject.model)) == 2
