"""Checkpoints are atomic, damage is found, nothing is pickled, and models are loaded ready to use."""

import errno
import json
import pickle
import random
import struct
from dataclasses import replace
from unittest.mock import Mock

import numpy
import pytest
import torch
from safetensors import SafetensorError, safe_open
from tiny_run import MODEL, with_values

from experiments.data.tokenizer import train_bpe, wrap
from experiments.models import checkpoint
from experiments.models.checkpoint import (
    Checkpoint,
    check,
    checkpoint_path,
    load_parameters,
    load_trained,
    newest_checkpoint,
    read_checkpoint,
    read_newest,
    remove_leftovers,
    write_checkpoint,
)
from experiments.models.llama import build_model, feed_forward_blocks
from experiments.run import files
from experiments.run.config import save_config
from experiments.run.errors import CheckpointError, StorageError
from experiments.run.train_config import OptimizerConfig, TrainConfig, TrainingConfig, science
from experiments.training import random_state
from experiments.training.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors

CONFIG = TrainConfig(model=MODEL, training=TrainingConfig(sequence_length=32, tokens_per_step=64))


def tensors(seed):
    return {"a": torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)), "b/step": torch.tensor(float(seed))}


def write(run_dir, step, keep=10):
    state = {"tokens": step * 512, "random": [None]}
    content = Checkpoint(step, tensors(step), tensors(step + 1), state, {"metrics.jsonl": b"step %d and more\n" % step})
    write_checkpoint(run_dir, content, keep=keep)
    return checkpoint_path(run_dir, step)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_comes_back(tmp_path):
    path = write(tmp_path, 7)
    assert path == checkpoint_path(tmp_path, 7) == newest_checkpoint(tmp_path)
    found = read_checkpoint(path)
    assert (found.step, found.state["tokens"]) == (7, 7 * 512)
    assert same(found.model, tensors(7))
    assert same(found.optimizer, tensors(8))
    assert found.records == {"metrics.jsonl": b"step 7 and more\n"}
    names = ["metrics.jsonl", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert sorted(file.name for file in path.iterdir()) == names


def test_nothing_is_pickled(tmp_path):
    path = write(tmp_path, 1)
    for name in checkpoint.TENSOR_FILES:
        with safe_open(path / name, "pt") as file:
            assert list(file.keys())
    json.loads((path / "state.json").read_text())
    for file in path.iterdir():
        with (
            pytest.raises((pickle.UnpicklingError, ValueError, KeyError, EOFError, IndexError)),
            file.open("rb") as data,
        ):
            pickle.load(data)  # noqa: S301 (our own file)


def test_only_the_newest_are_kept(tmp_path):
    for step in (5, 10, 20, 100_000_000):
        write(tmp_path, step, keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_00000020", "step_100000000"]
    assert newest_checkpoint(tmp_path).name == "step_100000000"


@pytest.mark.parametrize(("keep", "left"), [(1, [20]), (2, [10, 20])])
def test_damaged_checkpoints_do_not_count_among_those_kept(tmp_path, keep, left):
    for step in (5, 10, 30):
        write(tmp_path, step)
    truncate(checkpoint_path(tmp_path, 30) / "state.json")
    written = write(tmp_path, 20, keep=keep)
    assert newest_checkpoint(tmp_path) == written
    assert sorted((tmp_path / "checkpoints").iterdir()) == [checkpoint_path(tmp_path, step) for step in left]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-10])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("harm", "name", "message"),
    [
        (truncate, "model.safetensors", "is truncated"),
        (flip, "model.safetensors", "its checksum is not the one in state.json"),
        (flip, "optimizer.safetensors", "its checksum is not the one in state.json"),
        (lambda path: path.unlink(), "optimizer.safetensors", "optimizer.safetensors is missing"),
        (truncate, "metrics.jsonl", "is truncated"),
        (truncate, "state.json", "state.json is missing or damaged"),
        (lambda path: path.unlink(), "state.json", "state.json is missing or damaged"),
        (lambda path: path.write_text("[]"), "state.json", "state.json is missing or damaged"),
        (
            lambda path: path.write_text(path.read_text().replace('"format": 2', '"format": 9')),
            "state.json",
            "its checksum is not that of its content",
        ),
    ],
)
def test_damage_is_reported_and_the_one_before_is_taken(harm, name, message, tmp_path, caplog):
    older, newer = write(tmp_path, 5), write(tmp_path, 10)
    harm(newer / name)
    with pytest.raises(CheckpointError, match=message):
        check(newer)
    assert newest_checkpoint(tmp_path) == older
    assert message in caplog.text
    assert str(newer) in caplog.text
    assert read_newest(tmp_path).step == 5


def rewrite_state(path, change):
    """Change the state of a checkpoint, and make its checksum that of the new content."""
    state = json.loads((path / "state.json").read_text())
    del state["sha256"]
    change(state)
    (path / "state.json").write_text(json.dumps({**state, "sha256": files.sha256_json(state)}))


def test_any_change_of_the_state_is_found_and_the_one_before_is_taken(tmp_path, caplog):
    older, newer = write(tmp_path, 5), write(tmp_path, 10)
    text = (newer / "state.json").read_text()
    for old, new in (
        ('"step": 10', '"step": 11'),
        ('"tokens": 5120', '"tokens": 5121'),
        ('\n "sha256"', '\n "sha255"'),
    ):
        assert old in text
        (newer / "state.json").write_text(text.replace(old, new))
        assert newest_checkpoint(tmp_path) == older
    assert len(caplog.messages) == 3
    (newer / "state.json").write_text(text)
    assert newest_checkpoint(tmp_path) == newer


def test_a_format_of_another_version_and_a_renamed_folder_are_refused(tmp_path):
    path = write(tmp_path, 10)
    rewrite_state(path, lambda state: state.update(format=9))
    with pytest.raises(CheckpointError, match="is of format 9, wanted 2"):
        check(path)
    rewrite_state(path, lambda state: state.update(format=2))
    path.rename(path.with_name("step_00000020"))
    with pytest.raises(CheckpointError, match="its step is 10"):
        check(path.with_name("step_00000020"))


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x00" * 8, struct.pack("<Q", 2**62) + b"{}"])
def test_hostile_tensor_files_are_named(tmp_path, content):
    path = write(tmp_path, 10)
    file = path / "optimizer.safetensors"
    file.write_bytes(content)
    fingerprint = {"bytes": len(content), "sha256": files.sha256_file(file)}
    rewrite_state(path, lambda state: state["files"].update({file.name: fingerprint}))
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors is missing or damaged"):
        read_checkpoint(path)
    assert read_newest(tmp_path) is None


def test_without_checkpoints(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    assert read_newest(tmp_path) is None
    truncate(write(tmp_path, 5) / "model.safetensors")
    assert read_newest(tmp_path) is None


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("where", "error"),
    [
        *(("save_file", FULL), ("write_json", FULL), ("sha256_file", FULL)),
        ("save_file", SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")),
    ],
)
def test_a_full_disk_leaves_the_older_checkpoints(where, error, tmp_path, monkeypatch):
    older = write(tmp_path, 5, keep=1)
    monkeypatch.setattr(checkpoint, where, Mock(side_effect=error))
    with pytest.raises(StorageError, match=r"cannot write checkpoint at .*step_00000010: .*No space left"):
        write(tmp_path, 10, keep=1)
    monkeypatch.undo()
    assert newest_checkpoint(tmp_path) == older
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000005"]


def test_leftovers_of_a_killed_process_are_no_checkpoints(tmp_path):
    older = write(tmp_path, 5)
    half = tmp_path / "checkpoints" / ".tmp-step_00000010-abc"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert newest_checkpoint(tmp_path) == older
    remove_leftovers(tmp_path)
    assert not half.exists()
    assert newest_checkpoint(tmp_path) == older


# --- what is in it ----------------------------------------------------------------------------------------------------


def draw():
    return [random.random(), numpy.random.random(), numpy.random.standard_normal(), torch.rand(2).tolist()]  # noqa: NPY002


def test_random_states_go_through_json():
    random_state.seed_all(3)
    draw()
    numpy.random.standard_normal()  # noqa: NPY002 (leaves half a pair of Gaussians in the state)
    state = json.loads(json.dumps(random_state.capture()))
    expected = draw()
    assert draw() != expected
    random_state.restore(state)
    assert draw() == expected


def step(model, optimizer, seed):
    ids = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(seed))
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_another_models_tensors_are_refused():
    model = build_model(MODEL)
    weights = dict(model.named_parameters())
    with pytest.raises(CheckpointError, match=r"of another model: model.norm.weight"):
        load_parameters(model, {name: weight for name, weight in weights.items() if name != "model.norm.weight"})
    with pytest.raises(CheckpointError, match="of another model"):
        load_parameters(model, {**weights, "model.norm.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"of another model: model.norm.weight differ"):
        load_parameters(model, {**weights, "model.norm.weight": weights["model.norm.weight"].double()})


def test_an_optimizers_tensors_must_be_those_of_the_parameters():
    model = build_model(MODEL)
    optimizer = build_optimizer(model, OptimizerConfig())
    step(model, optimizer, 1)
    sound = optimizer_tensors(model, optimizer)
    name = "model.norm.weight"
    half = {f"{name}/exp_avg": sound[f"{name}/exp_avg"][:-1]}
    for harm in (
        {"extra/step": torch.ones(())},
        half,
        {f"{name}/exp_avg_sq": sound[f"{name}/exp_avg_sq"].double()},
        {f"{name}/step": torch.ones(1)},
        {f"{name}/max_exp_avg_sq": sound[f"{name}/exp_avg"]},
    ):
        (key,) = harm
        with pytest.raises(CheckpointError, match=f"the optimizer's state is of another model: {key} differ"):
            load_optimizer_tensors(model, build_optimizer(model, OptimizerConfig()), {**sound, **harm})
    missing = {key: tensor for key, tensor in sound.items() if key != f"{name}/exp_avg"}
    with pytest.raises(CheckpointError, match=f"{name}/exp_avg differ"):
        load_optimizer_tensors(model, build_optimizer(model, OptimizerConfig()), missing)


# --- models to use ----------------------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path):
    save_config(CONFIG, tmp_path / "config.yaml")
    tokenizer = wrap(train_bpe(["some text to learn from, some more"], 300))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    for number in (1, 2):
        weights = dict(build_model(MODEL, seed=number).named_parameters())
        write_checkpoint(tmp_path, Checkpoint(number, weights, {"x": torch.ones(1)}, {}), keep=5)
    return tmp_path


@pytest.mark.parametrize(("where", "seed"), [(".", 2), ("checkpoints/step_00000001", 1)])
def test_trained_models_are_loaded(run_dir, where, seed):
    loaded = load_trained(run_dir / where)
    expected = build_model(MODEL, seed=seed)
    ids = torch.arange(20)[None]
    assert torch.equal(loaded.model(ids).logits, expected(ids).logits)
    assert (loaded.step, loaded.config, loaded.training.model) == (seed, MODEL, MODEL)
    assert (loaded.model.training, loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight) == (
        False,
        True,
    )
    assert {(block.plan.backend, block.keep_stats) for block in feed_forward_blocks(loaded.model)} == {("dense", True)}
    prompt = loaded.tokenizer("some text", return_tensors="pt").input_ids
    assert loaded.model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0).shape[1] > prompt.shape[1]


def test_trained_models_in_another_dtype(run_dir):
    loaded = load_trained(run_dir, dtype=torch.bfloat16)
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.model(torch.arange(5)[None]).logits.dtype == torch.bfloat16


def test_runs_that_cannot_be_loaded(run_dir):
    truncate(run_dir / "checkpoints/step_00000002/model.safetensors")
    with pytest.raises(CheckpointError, match="is truncated"):
        load_trained(run_dir / "checkpoints/step_00000002")
    assert load_trained(run_dir).step == 1
    truncate(run_dir / "checkpoints/step_00000001/model.safetensors")
    with pytest.raises(CheckpointError, match="a run without a whole checkpoint"):
        load_trained(run_dir)
    with pytest.raises(CheckpointError, match=r"checkpoints is neither a run \(no config\.yaml\) nor a checkpoint or"):
        load_trained(run_dir / "checkpoints")
    with pytest.raises(CheckpointError, match=rf"there is no {run_dir}/checkpoint; did you mean 'checkpoints'"):
        load_trained(run_dir / "checkpoint")


@pytest.mark.parametrize("where", [".", "checkpoints/step_00000002"])
def test_of_a_model_to_use_the_weights_are_checked_once_and_the_optimizer_is_not_read(where, run_dir, monkeypatch):
    """Of a 1.5B model, reading both files twice took two minutes. A training that continues needs both."""
    (run_dir / "checkpoints/step_00000002/optimizer.safetensors").unlink()
    read = []
    monkeypatch.setattr(checkpoint, "sha256_file", lambda path: read.append(path.name) or files.sha256_file(path))
    assert load_trained(run_dir / where).step == 2
    assert read == ["model.safetensors"]
    assert read_newest(run_dir).step == 1


def test_a_checkpoint_of_another_run_is_not_loaded_as_this_one(run_dir):
    path = run_dir / "checkpoints/step_00000002"
    rewrite_state(path, lambda state: state.update(science=science(CONFIG)))
    assert load_trained(run_dir).step == 2
    other = with_values(CONFIG, sparsity={"l1": 0.5})
    rewrite_state(path, lambda state: state.update(science=science(other)))
    with pytest.raises(
        CheckpointError, match=r"belong to the run that .*config.yaml describes \(sparsity.l1 was 0.5, now 0"
    ):
        load_trained(run_dir)


def test_a_run_of_another_configuration_cannot_be_loaded(run_dir):
    (run_dir / "config.yaml").write_text("model: {layer: 3}")
    with pytest.raises(CheckpointError, match=r"did you mean 'model.layers'"):
        load_trained(run_dir)
    save_config(replace(CONFIG, model=replace(MODEL, layers=3)), run_dir / "config.yaml")
    with pytest.raises(CheckpointError, match="the weights do not fit the configuration"):
        load_trained(run_dir)
