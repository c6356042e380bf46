"""`experiments.export`: what is trained here is an ordinary Hugging Face model. And: results of one model are not
replaced by those of another."""

import pytest
import torch
from test_bench import SMALL, rows_of
from tiny_run import make_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments import bench_forward, bench_kernels, export, gather_nonzeros
from experiments.models.checkpoint import load_trained
from experiments.run.config import parse
from experiments.run.errors import CheckpointError, ConfigError, StorageError
from twell import feed_forward_blocks, sparsify


def exported(checkpoint, out, *more):
    export.main(parse(export.ExportConfig, [f"checkpoint={checkpoint}", f"out={out}", *more]))
    return out


@pytest.mark.parametrize("activation", ["relu", "relu2", "silu"])
@torch.no_grad()
def test_transformers_loads_the_same_function(activation, tmp_path):
    run = make_run(tmp_path, activation, f"model.activation={activation}")
    folder = exported(run, tmp_path / "models" / "mine")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ours = load_trained(run)
    inputs = tokenizer("the cat sat on the mat", return_tensors="pt")
    assert inputs.input_ids.shape[1] > 1
    assert inputs.input_ids.tolist() == ours.tokenizer("the cat sat on the mat", return_tensors="pt").input_ids.tolist()
    wanted = ours.model(**inputs).logits
    torch.testing.assert_close(model(**inputs).logits, wanted)
    assert (model.config.hidden_act, model.dtype) == (activation, torch.float32)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    if activation != "silu":
        torch.testing.assert_close(sparsify(model)(**inputs).logits, wanted)
        assert len(feed_forward_blocks(model)) == ours.config.layers


def test_another_dtype_and_what_cannot_be_written(tmp_path):
    run = make_run(tmp_path)
    folder = exported(run, tmp_path / "half", "dtype=bfloat16")
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    with pytest.raises(StorageError, match="half exists: choose another folder"):
        exported(run, folder)
    with pytest.raises(CheckpointError, match="is a Hugging Face folder already"):
        exported(folder, tmp_path / "again")
    with pytest.raises(CheckpointError, match="has no gate, and transformers has no such Llama"):
        exported(make_run(tmp_path, "nongated", "model.gated=false"), tmp_path / "nongated_hf")
    assert not (tmp_path / "nongated_hf").exists()


def test_results_of_another_random_model_are_not_overwritten(tmp_path):
    def bench(model):
        options = ["sequence=16", "batch=1", "dense=[dense_eager]", "per_layer=false", f"model={model}"]
        rows_of(bench_forward, tmp_path / "out", *options)

    bench("smoke")
    bench("smoke")
    rows = (tmp_path / "out" / "rows.csv").read_bytes()
    changed = "holds results of a model with name=smoke, gated=true, not name=smoke-nongated, gated=false"
    with pytest.raises(ConfigError, match=changed):
        bench("smoke-nongated")
    assert (tmp_path / "out" / "rows.csv").read_bytes() == rows


@pytest.fixture
def gather(tmp_path):
    def of(checkpoint, *more):
        options = [f"checkpoint={checkpoint}", f"run.dir={tmp_path / 'out'}", "tokens=64", "batch=2", *more]
        gather_nonzeros.main(parse(gather_nonzeros.GatherConfig, options))

    return of


def test_results_of_another_model_are_not_overwritten(tmp_path, gather):
    first, second = make_run(tmp_path, "first"), make_run(tmp_path, "second")
    gather(first)
    gather(first, "tokens=128")  # the same model again
    rows = (tmp_path / "out" / "rows.csv").read_bytes()
    with pytest.raises(ConfigError, match=r"out holds results of checkpoint=.*first, not of .*second: choose another"):
        gather(second)
    assert (tmp_path / "out" / "rows.csv").read_bytes() == rows
    (tmp_path / "out" / "config.yaml").write_text("}")
    gather(second)


def test_results_of_another_program_are_not_overwritten(tmp_path, gather):
    """Where one has no model, or another option for it."""
    rows_of(bench_kernels, tmp_path / "out", *SMALL, "ops=[ffn_forward]", "tokens=[8]")
    rows = (tmp_path / "out" / "rows.csv").read_bytes()
    with pytest.raises(ConfigError, match=r"out holds results of checkpoint=None, not of .*first: choose another"):
        gather(make_run(tmp_path, "first"))
    assert (tmp_path / "out" / "rows.csv").read_bytes() == rows
