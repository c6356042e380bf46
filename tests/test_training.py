"""Training, end to end, at a few thousand parameters: it learns, stops, continues bit by bit, and fails loudly."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import re
import shutil
import signal
import time

import pytest
import torch
from pairwise import slow
from programs import run_two, start, wait_for
from same_run import assert_same_end, final, firing_rates_of, run, stop, without_times
from tiny_run import MODEL, with_values
from torch import nn

from experiments import train
from experiments.data import batches
from experiments.data.batches import text_batches
from experiments.models import checkpoint
from experiments.models.checkpoint import load_trained, newest_checkpoint, read_checkpoint
from experiments.models.llama import build_model, feed_forward_blocks
from experiments.run.config import load_config
from experiments.run.distributed import Processes, processes
from experiments.run.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergenceError,
    RunError,
    Stopped,
    StorageError,
)
from experiments.run.locks import exclusive, is_held
from experiments.run.results import read_rows
from experiments.run.train_config import OptimizerConfig, SparsityConfig, TrainConfig, sequences_per_step
from experiments.training import firing, hot_exempt, metrics, trainer
from experiments.training.dead_neurons import Activity, Reinitialiser
from experiments.training.loss import LossModel
from experiments.training.optimizer import build_optimizer, l1_coefficient, learning_rate, set_learning_rate
from experiments.training.progress import Progress
from experiments.training.trainer import Trainer
from twell import FFNStats


def assert_close(records, others, tolerance):
    """The metrics of two runs agree up to rounding."""
    assert [record["step"] for record in records] == [record["step"] for record in others]
    for one, other in zip(records, others, strict=True):
        assert one.keys() == other.keys()
        assert one["backend"] == other["backend"]
        for key in one.keys() - {"backend"}:
            assert one[key] == pytest.approx(other[key], rel=tolerance), (one["step"], key)


# --- it trains --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [("model.gated=false", "sparsity.l1=1e-3"), *slow((), ("model.activation=silu",), ("model.activation=relu2",))],
)
def test_a_run_learns_and_leaves_its_results(make, options):
    config = make("training.steps=60", "run.log_every=3", "run.evaluate_every=30", *options)
    records = run(config)
    assert [record["step"] for record in records] == [1, *range(3, 61, 3)]
    assert records[0]["cross_entropy"] == pytest.approx(math.log(300), abs=0.1)
    assert records[-1]["cross_entropy"] < 4.5
    assert records[-1]["validation_cross_entropy"] < 4.5
    assert [record["step"] for record in records if "validation_cross_entropy" in record] == [30, 60]
    assert all(0 < count <= 32 for record in records for count in record["nonzeros"])
    folder = config.run.folder
    assert load_config(TrainConfig, folder / "config.yaml") == config
    packages = json.loads((folder / "environment.json").read_text())["packages"]
    assert packages["torch"] == importlib.metadata.version("torch")
    assert {path.name for path in folder.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "rows.csv",
        "tokenizer",
        *(() if config.model.activation == "silu" else (firing.FILE,)),
    }


def test_rows(make, caplog):
    caplog.set_level("INFO")
    config = make("run.study=s", "run.item=i", "sparsity.l1=1e-4", "sparsity.l1_ramp_steps=3")
    records = run(config)
    rows = read_rows(config.run.folder / "rows.csv")
    whole = {row["metric"]: row for row in rows if row["layer"] is None}
    assert set(whole) == {
        "cross_entropy",
        "validation_cross_entropy",
        "nonzeros",
        "dead_fraction",
        "throughput",
        "peak_memory",
    }
    for row in rows:
        assert (row["study"], row["item"], row["op"], row["step"]) == ("s", "i", "train", 10)
        assert (row["model"], row["l1"], row["gated"], row["activation"]) == ("tiny", 1e-4, True, "relu")
        assert (row["modification"], row["backend"], row["tokens"]) == ("l1_warmup", "dense", 128)
    last = records[-1]
    loss, folder = last["validation_cross_entropy"], config.run.folder
    assert caplog.messages[-1] == f"i: held-out cross-entropy {loss:.3f}, rows in {folder / 'rows.csv'}"
    assert whole["cross_entropy"]["value"] == last["cross_entropy"]
    assert whole["validation_cross_entropy"]["value"] == last["validation_cross_entropy"]
    assert whole["nonzeros"]["value"] == pytest.approx(sum(last["nonzeros"]) / 2)
    by_layer = [row["value"] for row in rows if row["metric"] == "nonzeros" and row["layer"] is not None]
    assert by_layer == last["nonzeros"]
    assert whole["throughput"]["low"] <= whole["throughput"]["value"] <= whole["throughput"]["high"]
    assert whole["peak_memory"]["value"] is None
    assert "CPU" in whole["peak_memory"]["missing"]


def test_the_validation_is_that_of_the_trained_model(make):
    config = make()
    record = run(config)[-1]
    loaded = load_trained(config.run.folder)
    losses, sizes = [], []
    for tokens in text_batches(loaded.training.data, loaded.tokenizer, 16, 8):
        logits = loaded.model(tokens[:, :-1]).logits
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item())
        sizes.append(len(tokens))
    expected = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
    assert record["validation_cross_entropy"] == pytest.approx(expected, rel=1e-5)


class PlainBlock(nn.Module):
    """The feed-forward block in plain torch, and its L1 term."""

    def __init__(self, block):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = block.gate_proj, block.up_proj, block.down_proj

    def forward(self, x):
        h = self.up_proj(x).relu() if self.gate_proj is None else self.gate_proj(x).relu() * self.up_proj(x)
        self.l1 = h.abs().sum(-1).mean()
        return self.down_proj(h)


@pytest.mark.parametrize("gated", ["true", "false"])
def test_a_run_trains_as_a_bare_loop_of_plain_torch(make, gated):
    config = make("sparsity.l1=0.1", "sparsity.l1_ramp_steps=3", "execution.micro_batch=2", f"model.gated={gated}")
    records = run(config)
    _, tokens = batches.prepare_text(config.data, config.model.vocab_size)
    length, per_step = config.training.sequence_length, sequences_per_step(config)
    stream = batches.TokenStream(tokens.train, length, config.training.seed)
    model = build_model(config.model, seed=config.training.seed)
    for layer in model.model.layers:
        layer.mlp = PlainBlock(layer.mlp)
    optimizer = build_optimizer(model, config.optimizer)
    for step, record in enumerate(records):
        ids = stream.samples(step * per_step, per_step)
        logits = model(ids[:, :-1]).logits
        cross_entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        l1 = torch.stack([layer.mlp.l1 for layer in model.model.layers]).mean()
        (cross_entropy + l1_coefficient(config.sparsity, step) * l1).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
        set_learning_rate(optimizer, learning_rate(config.optimizer, step, config.training.steps))
        optimizer.step()
        optimizer.zero_grad()
        assert record["cross_entropy"] == pytest.approx(cross_entropy.item(), rel=1e-4), step
        assert record["l1"] == pytest.approx(l1.item(), rel=1e-4), step


@pytest.mark.parametrize(
    ("option", "tolerance"),
    [
        ("execution.micro_batch=2", 1e-4),
        ("execution.activation_checkpointing=true", 1e-5),
        pytest.param("execution.compile=true", 1e-3, marks=pytest.mark.slow),
    ],
)
def test_what_saves_memory_or_time_changes_rounding_only(make, monkeypatch, option, tolerance):
    """Compiled, each layer is traced as one graph, without the generation of code, which alone takes a minute."""
    compiled = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled(function, **options))
    options = ["sparsity.l1=1e-3", "sparsity.dead_neuron_reinit=true", "execution.micro_batch=8", option]
    plain, saving = (without_times(run(make(*options[:n], name=str(n)))) for n in (3, 4))
    assert_close(plain, saving, tolerance)


@pytest.mark.slow
def test_two_processes_train_as_one(make, arguments):
    options = ["sparsity.l1=1e-3", "sparsity.dead_neuron_reinit=true", "execution.micro_batch=2", "training.steps=6"]
    alone = make(*options, name="alone")
    run_two(arguments(*options, name="both"))
    both = without_times(metrics.read_metrics(make(name="both").run.folder))
    expected = without_times(run(alone))
    assert_close(expected, both, 1e-4)
    rates = [firing_rates_of(config)["rate"].to_numpy() for config in (alone, make(name="both"))]
    assert rates[0] == pytest.approx(rates[1], abs=0.01)
    assert len(final(make(name="both")).state["random"]) == 2
    again = make(*options, "run.max_steps=1", name="both")
    train.main(again)  # is finished, for one process as for two


# --- it stops and continues -------------------------------------------------------------------------------------------

CONTINUED = (
    "sparsity.l1=1e-3",
    "sparsity.l1_off_steps=2",
    "sparsity.l1_ramp_steps=6",
    "sparsity.dead_neuron_reinit=true",
)


EXEMPT = ("sparsity.l1=1e-2", "sparsity.exempt=0.25", "execution.sparse.backend=dense", "run.log_every=1")


@pytest.mark.parametrize(
    ("options", "stops", "begins"),
    [
        (CONTINUED, (3, 4), ["3", "7"]),
        ((*CONTINUED, "training.precision=bfloat16"), (3, 4), ["3", "7"]),
        (EXEMPT, (5,), ["5"]),  # between two choices of neurons
    ],
)
def test_a_run_continues_bit_by_bit(make, monkeypatch, options, stops, begins, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(hot_exempt, "EVERY", 3)
    whole, parts = (make(*options, "run.checkpoint_every=100", name=name) for name in ("whole", "parts"))
    run(whole)
    for stop_after in stops:
        with pytest.raises(Stopped, match=f"run.max_steps={stop_after}") as caught:
            run(with_values(parts, run={"max_steps": stop_after}))
        assert caught.value.exit_code == 85
    run(parts)
    assert re.findall(r"continuing .* from step (\d+)", caplog.text) == begins
    assert_same_end(whole, parts)
    assert final(whole).state.get("exemption") == final(parts).state.get("exemption")


def test_exempt_neurons_are_the_busiest_and_pay_no_l1(make, monkeypatch):
    monkeypatch.setattr(hot_exempt, "EVERY", 2)
    plain = run(make(*EXEMPT[::2], "training.steps=4", name="plain"))
    config = make(*EXEMPT, "training.steps=4", "execution.micro_batch=4", name="exempt")
    exempt = run(config)
    assert [record["l1"] for record in exempt][:2] == [record["l1"] for record in plain][:2]
    assert exempt[2]["l1"] < 0.9 * plain[2]["l1"]
    state = final(config).state["exemption"]
    sparse = (*EXEMPT[:2], "execution.sparse.backend=reference", EXEMPT[3])
    other = make(*sparse, "training.steps=4", "execution.micro_batch=2", name="other")
    assert [record["l1"] for record in run(other)] == pytest.approx([record["l1"] for record in exempt], rel=1e-2)
    torch.testing.assert_close(torch.tensor(final(other).state["exemption"]), torch.tensor(state), rtol=0, atol=1e-2)


def test_exemption_follows_a_moving_average():
    blocks = feed_forward_blocks(build_model(MODEL))
    exemption = hot_exempt.HotExemption(blocks, 2 / 32)
    assert all(block.l1_weight.eq(1).all() for block in blocks)
    rates = torch.zeros(2, 32)
    rates[0, [3, 5]], rates[1, [0, 31]] = 0.5, 0.25
    exemption.update(rates)
    assert [torch.where(block.l1_weight == 0)[0].tolist() for block in blocks] == [[3, 5], [0, 31]]
    exemption.update(rates.flip(0))  # 0.6 of the earlier average stay: 0.3 in layer 0 beside 0.1, 0.15 beside 0.2
    assert [torch.where(block.l1_weight == 0)[0].tolist() for block in blocks] == [[3, 5], [3, 5]]


@pytest.mark.slow
def test_a_killed_run_continues_bit_by_bit(make, arguments):
    options = (*CONTINUED, "training.steps=150", "run.checkpoint_every=10", "run.evaluate_every=150", "run.log_every=3")
    whole, killed = (make(*options, name=name) for name in ("whole", "killed"))
    process = start("experiments.train", *arguments(*options, name="killed"))
    wait_for(lambda: newest_checkpoint(killed.run.folder) is not None, process)
    assert is_held(killed.run.folder)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    while is_held(killed.run.folder):
        time.sleep(0.005)
    assert 10 <= read_checkpoint(newest_checkpoint(killed.run.folder)).step < 150
    with (killed.run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 149, "cross_en')  # as if killed while writing, and after the checkpoint
    run(killed)
    run(whole)
    assert_same_end(whole, killed)


def test_two_runs_of_one_folder_do_not_mix(make):
    folder = make().run.folder
    said = f"another process is running the training in {folder}"
    with exclusive(folder, "test"), pytest.raises(RunError, match=said):
        train.by_hand(make("training.seed=1"))
    assert [path.name for path in folder.iterdir()] == [".lock"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_signals_stop_after_the_step(make, monkeypatch, number):
    config = make()

    def interrupt(trainer, record, progress):
        if trainer.step == 3:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Trainer, "_show", interrupt)

    before = signal.getsignal(number)
    with pytest.raises(Stopped, match=f"{number.name}: stopped after step 3 of 10") as stopped:
        train.main(config)
    assert stopped.value.signal == number.name
    assert signal.getsignal(number) is before
    assert final(config).step == 3
    run(config)
    assert final(config).step == 10


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("experiments.train._is_finished", signal.SIGTERM),  # packages are imported
        ("experiments.data.batches.prepare_text", signal.SIGTERM),
        ("experiments.data.tokenizer.wrap", signal.SIGUSR2),
        ("experiments.training.trainer.Trainer._restore_state", signal.SIGTERM),
    ],
)
def test_a_signal_before_the_first_step_stops_at_once(make, monkeypatch, place, number):
    """Loaders report whatever goes wrong as an error of their own; a stop must pass through them."""
    if "restore" in place:
        stop(make("run.max_steps=1"))
    monkeypatch.setattr(place, lambda *arguments: os.kill(os.getpid(), number))
    with pytest.raises(Stopped, match=f"stopped by {number.name} before the first step") as stopped:
        train.by_hand(make())
    assert stopped.value.signal == number.name


def test_a_time_limit(make):
    with pytest.raises(Stopped, match=r"run.max_seconds=0.0: stopped after step 1 of 10") as stopped:
        train.main(make("run.max_seconds=0"))
    assert stopped.value.signal == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "name", "reason"), [("limit", "", "run.max_seconds=7"), ("signal", "SIGUSR2", "SIGUSR2")]
)
def test_all_processes_know_why_one_stops(make, arguments, what, name, reason):
    """A job of SLURM is requeued by the first process, after a signal but not at a limit."""
    logged = run_two([what, *arguments()], module="one_of_two")
    for rank in (0, 1):
        assert f"process {rank}: {name!r} {reason}: stopped after step 2 of 10" in logged
    assert final(make()).step == 2


@pytest.mark.parametrize(
    ("error", "leaves"),
    [
        (None, True),
        (Stopped("run.max_steps=1", together=True), True),
        (Stopped("stopped by SIGTERM before the first step", "SIGTERM"), False),
        (RuntimeError("alone"), False),
    ],
)
def test_processes_leave_the_group_only_together(monkeypatch, error, leaves):
    """With NCCL, leaving waits for the others, which a process that ends alone must not do."""
    left = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *a, **o: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: left.append(True))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(type(error)) if error else contextlib.nullcontext(), processes("cpu"):
        if error:
            raise error
    assert left == [True] * leaves


@pytest.mark.slow
def test_a_process_that_fails_alone_ends_the_others(arguments):
    logged = run_two(["failure", *arguments()], module="one_of_two", code=1)
    assert "RuntimeError: the second process fails alone" in logged


@pytest.mark.slow
def test_all_processes_continue_from_the_same_step(make, arguments):
    """As when the run's folder is not on a disk shared by all machines."""
    run_two(arguments("run.max_steps=5"), code=1)
    logged = run_two(["blind", *arguments()], module="one_of_two", code=1)
    assert "CheckpointError: the processes would continue from different steps (5, 0)" in logged
    assert final(make()).step == 5


@pytest.mark.usefixtures("own_clock")
def test_the_time_of_checkpoints_does_not_count_but_that_of_their_steps_does(make, monkeypatch):
    """Steps return at once, and leave their work to a device that whoever asks it for a number has to wait for."""
    queued, step, check, write = [], Trainer._train_step, Trainer._check_finite, trainer.write_checkpoint

    def train_step(self, *arguments):
        queued.append(0.2)
        return step(self, *arguments)

    def check_finite(self, *arguments):
        while queued:
            time.sleep(queued.pop())
        check(self, *arguments)

    def write_checkpoint(*arguments, **options):
        time.sleep(0.7)
        return write(*arguments, **options)

    monkeypatch.setattr(Trainer, "_train_step", train_step)
    monkeypatch.setattr(Trainer, "_check_finite", check_finite)
    monkeypatch.setattr(trainer, "write_checkpoint", write_checkpoint)
    options = ["training.steps=4", "run.checkpoint_every=1", "run.log_every=4", "run.evaluate_every=4"]
    config = make(*options, "run.keep_checkpoints=9")
    records = run(config)
    assert records[-1]["seconds"] == pytest.approx(0.8, abs=0.01)
    saved = read_checkpoint(checkpoint.checkpoint_path(config.run.folder, 3)).state["seconds"]
    assert saved == pytest.approx(0.6, abs=0.01)


def test_a_damaged_checkpoint_is_skipped(make, caplog):
    whole, harmed = make(*CONTINUED, name="whole"), make(*CONTINUED, name="harmed")
    run(whole)
    run(harmed)
    (harmed.run.folder / "rows.csv").unlink()
    with (checkpoint.checkpoint_path(harmed.run.folder, 10) / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    run(harmed)
    assert "skipping a damaged checkpoint" in caplog.text
    assert_same_end(whole, harmed)


@pytest.mark.parametrize("finished", [True, False])
def test_another_runs_folder_is_refused_by_its_options_or_those_in_its_checkpoint(make, finished):
    config = make() if finished else make("run.max_steps=1")
    run(config) if finished else stop(config)
    other = with_values(config, training={"seed": 1}, sparsity={"l1": 0.5})
    said = r"other options \(training.seed was 0, now 1; sparsity.l1 was 0.0, now 0.5\)"
    with pytest.raises(ConfigError, match=said):
        run(other)
    (config.run.folder / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=said):
        run(other)
    run(with_values(config, run={"max_steps": None}))
    assert final(config).step == 10


def test_results_of_unknown_options_are_not_taken_for_ours(make):
    config = make()
    run(config)
    (config.run.folder / "config.yaml").unlink()
    shutil.rmtree(config.run.folder / "checkpoints")
    with pytest.raises(ConfigError, match=r"has results, but no config.yaml that says of what"):
        run(config)
    truncated = (config.run.folder / "rows.csv").read_text()[:-20]
    (config.run.folder / "rows.csv").write_text(truncated)
    with pytest.raises(DataError, match=r"rows.csv: half-written.*delete the file"):
        run(config)


@pytest.mark.parametrize("state", ["finished", "finished, its cache purged", "stopped"])
def test_a_run_of_another_text_is_refused(make, corpus, tmp_path, state):
    text, place = tmp_path / "text.jsonl", tmp_path / "cache"
    shutil.copy(corpus / "docs.jsonl", text)
    config = make(f"data=path:{text}", f"data.cache_dir={place}", "training.steps=2")
    stop(with_values(config, run={"max_steps": 1})) if state == "stopped" else run(config)
    if "purged" in state:
        shutil.rmtree(place)
    content = text.read_text()
    text.write_text(content.replace("two", "TWO"))
    said = r"was trained on other text \(\w{12}\): that of path:.* has changed.*Restore that text, or train on this one"
    with pytest.raises(CheckpointError, match=said):
        train.by_hand(config)
    text.write_text(content)
    run(config)
    text.unlink()
    run(config)


def test_a_run_on_a_data_set_of_the_hub_asks_the_hub_once(make, corpus, tmp_path, hub, monkeypatch):
    shutil.copy(corpus / "docs.jsonl", tmp_path / "train.jsonl")
    places = [f"data=hf:{tmp_path}", f"data.cache_dir={tmp_path / 'cache'}", "data.tokenizer=bpe"]
    config = make(*places, "training.steps=2", "run.max_steps=1")
    stop(config)
    monkeypatch.setattr("datasets.load_dataset", None)
    run(config)
    train.by_hand(config)
    assert hub == [None]
    (note,) = (tmp_path / "cache" / "commits").iterdir()
    note.unlink()
    train.by_hand(config)
    assert hub == [None], "a finished run needs no network"


def test_a_run_killed_before_its_rows_writes_them(make):
    config = make()
    run(config)
    rows = (config.run.folder / "rows.csv").read_text()
    (config.run.folder / "rows.csv").unlink()
    run(config)
    again = (config.run.folder / "rows.csv").read_text()
    assert [line.rpartition(",")[0] for line in again.splitlines()] == [
        line.rpartition(",")[0] for line in rows.splitlines()
    ]


# --- it fails loudly --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_every", [1, 100])
def test_divergence(make, log_every):
    config = make(
        "optimizer.learning_rate=1e30",
        "run.checkpoint_every=1",
        f"run.log_every={log_every}",
        "optimizer.warmup_steps=0",
    )
    with pytest.raises(DivergenceError, match=r"not a finite number .*the last good checkpoint is .*step_0000000[12]"):
        run(config)
    found = final(config)
    assert all(tensor.isfinite().all() for tensor in found.model.values())
    assert not (config.run.folder / "rows.csv").exists()
    assert all(math.isfinite(record["cross_entropy"]) for record in metrics.read_metrics(config.run.folder))


def test_a_validation_that_is_not_finite_is_divergence(make, monkeypatch):
    monkeypatch.setattr(Trainer, "validate", lambda self: math.nan)
    with pytest.raises(
        DivergenceError, match=r"the validation cross-entropy after step 5 is nan; there is no checkpoint"
    ):
        run(make())


def test_a_disk_that_is_really_full(make, mounted):
    small_disk = mounted("300k")
    config = make(f"run.dir={small_disk}/run", "run.checkpoint_every=1", "run.keep_checkpoints=9")
    with pytest.raises(StorageError, match=r"cannot write checkpoint at .*No space left.*\(0.000 GB free\)"):
        run(config)
    folders = sorted(path.name for path in (small_disk / "run" / "checkpoints").iterdir())
    assert folders
    assert not [name for name in folders if name.startswith(".tmp")]
    assert newest_checkpoint(config.run.folder).name == folders[-1]


def test_what_cannot_run_is_refused_before_work(make):
    config = make("execution.sparse.backend=hopper")
    with pytest.raises(ConfigError, match="backend=hopper: it cannot train this model here: it needs a CUDA device"):
        run(config)
    assert not config.run.folder.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_must_be_there(make):
    with pytest.raises(ConfigError, match="has no CUDA device"):
        run(make("execution.device=cuda"))


def test_each_process_has_a_gpu_of_its_own(make, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="a process wants cuda:2, but it sees 2 GPUs: start one for each"):
        run(make())


@pytest.mark.parametrize(("rank", "local", "checked"), [("0", "0", True), ("9", "1", False), ("8", "0", True)])
def test_one_process_of_each_machine_checks_the_tokens(make, monkeypatch, tmp_path, rank, local, checked):
    config = make(f"data.cache_dir={tmp_path}/cache")
    batches.prepare_text(config.data, config.model.vocab_size)
    (path,) = tmp_path.rglob("train.bin")
    path.write_bytes(bytes(len(path.read_bytes())))
    monkeypatch.setenv("LOCAL_RANK", local)
    group = Processes(int(rank), 16, torch.device("cpu"))
    monkeypatch.setattr(Processes, "_wait", lambda self: None)
    with pytest.raises(DataError, match=r"train.bin is damaged") if checked else contextlib.nullcontext():
        train._prepare_text(config, group)


DAMAGES = {
    "lost": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:50]),
    "shuffled": lambda path: path.write_bytes(b"".join(reversed(path.read_bytes().splitlines(keepends=True)))),
    "damaged": lambda path: path.write_bytes(b"{broken\n" + path.read_bytes()),
    "longer": lambda path: path.open("ab").write(path.read_bytes()),
}


@pytest.mark.parametrize("damage", ["lost", *slow("cut", "shuffled", "damaged", "longer")])
def test_a_run_that_continues_has_the_records_of_its_checkpoint(make, damage):
    whole, stopped = make(*CONTINUED, name="whole"), make(*CONTINUED, "run.max_steps=6")
    stop(stopped)
    for name in ("metrics.jsonl", firing.FILE):
        DAMAGES[damage](stopped.run.folder / name)
    continued = make(*CONTINUED)
    run(whole)
    run(continued)
    assert_same_end(whole, continued)


def test_records_that_are_deleted_while_their_training_runs(make, monkeypatch):
    config = make("run.checkpoint_every=4")
    monkeypatch.setattr(Trainer, "_show", lambda self, *_: (config.run.folder / metrics.METRICS).unlink())
    with pytest.raises(DataError, match=r"metrics\.jsonl was deleted while its training runs; the same command"):
        run(config)
    assert not (config.run.folder / "rows.csv").exists()
    monkeypatch.undo()
    assert [record["step"] for record in run(config)] == list(range(1, 11))


def test_a_checkpoint_without_records_is_not_continued(make):
    config = make("run.max_steps=2")
    stop(config)
    new = read_checkpoint(newest_checkpoint(config.run.folder))
    state = {key: value for key, value in new.state.items() if key != "files"}
    checkpoint.write_checkpoint(config.run.folder, dataclasses.replace(new, state=state, records={}), keep=1)
    with pytest.raises(CheckpointError, match="of another version, or damaged: KeyError"):
        run(make())
    assert load_trained(config.run.folder).step == 2


# --- the parts --------------------------------------------------------------------------------------------------------


def test_the_last_record(tmp_path):
    assert metrics.last_record(tmp_path) is None
    assert metrics.read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "pad": "%s"}\n' % ("x" * 70000))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2}\n{"step": 3, "cross_en')  # just being written
    assert metrics.last_record(tmp_path) == {"step": 2}
    (tmp_path / "metrics.jsonl").write_text('{"step"')
    assert metrics.last_record(tmp_path) is None


def test_learning_rate():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, final_fraction=0.1)
    rates = [learning_rate(config, step, 104) for step in range(104)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[54] == pytest.approx(0.55)
    assert rates == sorted(rates[:4]) + sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert learning_rate(OptimizerConfig(warmup_steps=0), 0, 10) == 1e-3


def test_l1_warm_up():
    config = SparsityConfig(l1=3e-4, l1_off_steps=2, l1_ramp_steps=3)
    assert [l1_coefficient(config, step) for step in range(7)] == pytest.approx([0, 0, 1e-4, 2e-4, 3e-4, 3e-4, 3e-4])
    assert l1_coefficient(SparsityConfig(l1=2e-5), 0) == 2e-5
    assert [l1_coefficient(SparsityConfig(l1=1.0, l1_off_steps=1), step) for step in (0, 1)] == [0.0, 1.0]


def test_weight_decay_is_for_matrices():
    model = build_model(MODEL)
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.3))
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decays) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert decays[parameter] == (0.0 if "norm" in name else 0.3), name


def test_without_statistics_there_is_no_l1_term():
    model = build_model(MODEL)
    for block in feed_forward_blocks(model):
        block.keep_stats = False
    _, l1 = LossModel(model)(torch.zeros(1, 5, dtype=torch.int64))
    assert (l1.item(), l1.requires_grad) == (0.0, False)


def stats(fired, nonzeros):
    fired, nonzeros = torch.tensor(fired), torch.tensor(nonzeros, dtype=torch.int32)
    return FFNStats(nonzeros, None, fired, torch.zeros((), dtype=torch.int64), "dense")


def test_activity_is_that_of_the_whole_step():
    activity = Activity(2, 4, torch.device("cpu"))
    activity.add([stats([True, False, False, False], [1, 1]), stats([True] * 4, [4, 2])])
    activity.add([stats([False, True, False, False], [1, 0]), stats([False] * 4, [0, 0])])
    activity.share(Processes(0, 1, torch.device("cpu")))
    assert activity.nonzeros() == [0.75, 1.5]
    assert activity.dead_fraction() == [0.5, 0.0]
    assert activity.fired_LN.tolist() == [[True, True, False, False], [True] * 4]
    activity.clear()
    activity.add([stats([False] * 4, [0])] * 2)
    assert (activity.nonzeros(), activity.dead_fraction()) == ([0.0, 0.0], [1.0, 1.0])


@pytest.mark.parametrize("gated", [True, False])
def test_reinitialisation_moves_dead_neurons_only(gated):
    config = dataclasses.replace(MODEL, gated=gated, intermediate_size=2000)
    model = build_model(config)
    blocks = feed_forward_blocks(model)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    fired = torch.rand(2, 2000, generator=torch.Generator().manual_seed(0)) < 0.5
    Reinitialiser(blocks, strength=0.1, std=0.5, seed=1).apply(fired)
    target = "gate_proj" if gated else "up_proj"
    for name, weight in model.named_parameters():
        if target not in name:
            assert torch.equal(weight, before[name]), name
    for layer, block in enumerate(blocks):
        old, new = before[f"model.layers.{layer}.mlp.{target}.weight"], getattr(block, target).weight.detach()
        assert torch.equal(new[fired[layer]], old[fired[layer]])
        draw = (new - 0.9 * old)[~fired[layer]] / 0.1
        assert draw.mean().item() == pytest.approx(0.0, abs=0.02)
        assert draw.std().item() == pytest.approx(0.5, rel=0.05)


def test_the_draws_go_on_on_the_same_kind_of_device_only():
    def draws(one):
        one.apply(torch.zeros(2, 32, dtype=torch.bool))
        return [weight.clone() for weight in one._weights_NK]

    def make():
        blocks = feed_forward_blocks(build_model(MODEL))
        return Reinitialiser(blocks, strength=1.0, std=0.02, seed=1)

    one = make()
    first, state = draws(one), one.generator.get_state()
    second, again, of_a_gpu = draws(one), make(), make()
    again.restore(state, 7)
    assert all(map(torch.equal, draws(again), second))
    of_a_gpu.restore(torch.zeros(16, dtype=torch.uint8), 7)
    assert not any(map(torch.equal, draws(of_a_gpu), first))


def test_reinitialisation_follows_every_step(make, monkeypatch):
    dead = []
    real = Reinitialiser.apply
    monkeypatch.setattr(
        Reinitialiser, "apply", lambda self, fired: (dead.append((~fired).double().mean(1).tolist()), real(self, fired))
    )
    records = run(make("sparsity.dead_neuron_reinit=true", "sparsity.l1=10", "training.steps=30", "run.log_every=5"))
    assert len(dead) == 30
    assert max(map(max, dead)) > 0.1, "otherwise this test shows nothing"
    for record in records:
        assert record["dead_fraction"] == dead[record["step"] - 1]


# --- what it shows ----------------------------------------------------------------------------------------------------

VALUES = {"cross_entropy": 1.5, "tokens_per_s": 12345.6, "nonzeros": 29.04}


def test_lines_in_a_log(caplog):
    caplog.set_level("INFO")
    progress = Progress("relu", 0, 10, "lines")
    for done in (1, 2, 10):
        progress.step()
        progress.show(done, **VALUES)
    progress.close()
    lines = [record.message for record in caplog.records]
    assert len(lines) == 2, "the first and the last; others after ten seconds"
    assert lines[1].startswith("relu: step 10/10, loss 1.500, 12,346 tokens/s, 29.0 non-zeros, 00:00 left")


def test_a_bar(capsys):
    progress = Progress("relu", 5, 10, "bar")
    progress.step()
    progress.show(6, **VALUES)
    progress.close()
    shown = capsys.readouterr().err
    assert "relu" in shown
    assert "6/10" in shown
    assert "loss 1.500, 12,346 tokens/s, 29.0 non-zeros" in shown
