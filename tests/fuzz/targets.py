"""The fuzzing targets. A target is made once, in a scratch folder; each call is one case, drawn from a `Random`."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import json
import logging
import lzma
import shutil
import typing
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from tiny_run import make_run

from experiments import train
from experiments.data.batches import prepare_text
from experiments.data.sources import open_texts
from experiments.data.tasks import read_records
from experiments.models.checkpoint import Checkpoint, load_trained, read_newest, write_checkpoint
from experiments.models.llama import build_model
from experiments.models.pretrained import load_pretrained
from experiments.run.config import check_ranges, entry, load_config, parse, save_config
from experiments.run.errors import RunError
from experiments.run.train_config import ModelConfig, TrainConfig, science
from experiments.study.definition import STUDIES, StudyConfig, load_study, study_graph
from experiments.training.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors
from fuzz.values import copy_of, damage, hostile_text, options
from slurm.cluster import ClusterConfig
from twell.formats import ELL, CapacityError, Hybrid, TwELL

Case = Callable[[Random], None]
PROGRAMS = (
    *("train", "prepare_data", "gather_nonzeros", "evaluate", "bench_kernels", "bench_forward", "bench_training"),
    *("bench_generate", "run_notebooks"),
)
ONE_LINE = 2000  # characters: longer than any message of ours


def configs() -> dict[str, type]:
    """Program -> the class of its configuration; and those of the launcher's files."""
    mains = {name: importlib.import_module(f"experiments.{name}").main for name in PROGRAMS}
    found = {name: next(iter(typing.get_type_hints(main).values())) for name, main in mains.items()}
    return {**found, "study": StudyConfig, "cluster": ClusterConfig}


@contextlib.contextmanager
def only_our_errors(*others: type[BaseException]) -> Iterator[None]:
    """Inside the block, an error of ours ends it; its message must be of one line. Any other one is a finding."""
    message = "fine"
    try:
        yield
    except (RunError, *others) as error:
        message = str(error)
    assert len(message.splitlines()) == 1, f"not one line: {message!r}"
    assert len(message) < ONE_LINE, f"{len(message)} characters: {message[:200]}"


# --- options ----------------------------------------------------------------------------------------------------------


def option_target(scratch: Path) -> Case:
    """Options of every program: refused with exit code 2 and one line, or valid, and saved and loaded unchanged."""
    classes = configs()
    saved = scratch / "config.yaml"

    def case(random: Random) -> None:
        cls = random.choice(list(classes.values()))
        arguments = [_argument(random, cls) for _ in range(random.randint(1, 3))]
        found: list[Any] = []
        code, messages = ended(lambda: entry(found.append, cls, arguments))
        assert code in (0, 2), f"{arguments}: exit code {code}"
        if code:
            assert len(messages) == 1, f"{arguments}: {messages}"
            assert len(messages[0]) < ONE_LINE, f"{arguments}: {len(messages[0])} characters"
        for config in found:
            check_ranges(config)
            save_config(config, saved)
            assert load_config(cls, saved) == config, f"{arguments}: another configuration comes back"

    return case


def _argument(random: Random, cls: type) -> str:
    key, kind, allowed = random.choice(options(cls))
    if random.random() < 0.1:
        key = random.choice(
            (key + "x", key[1:], "", "-", key.upper(), key.rpartition(".")[0], "config", "a" * 3000, "é")
        )
    return f"{key}={hostile_text(random, kind, allowed)}" if random.random() < 0.98 else key


def ended(program: Callable[[], Any]) -> tuple[Any, list[str]]:
    """(exit code, what it logged as warnings and errors) of a program that runs in this process."""
    kept = io.StringIO()
    handler = logging.StreamHandler(kept)
    handler.terminator = "\x1e"
    handler.setLevel(logging.WARNING)
    root = logging.getLogger()
    before, root.handlers = root.handlers, [handler]
    try:
        program()
    except SystemExit as end:
        return end.code, kept.getvalue().split("\x1e")[:-1]
    finally:
        root.handlers = before
    raise AssertionError("it did not exit")


# --- files of configurations and studies ------------------------------------------------------------------------------


def file_target(scratch: Path) -> Case:
    """Damaged config.yaml and study files: refused, or a valid configuration."""
    save_config(parse(TrainConfig, ["model=smoke", "run.dir=runs/x"]), scratch / "sound.yaml")
    sources = [scratch / "sound.yaml", *(STUDIES / f"{name}.yaml" for name in ("smoke", "six_runs", "demo"))]

    def case(random: Random) -> None:
        source, path = random.choice(sources), scratch / "mine.yaml"
        if path.is_dir():
            path.rmdir()
        path.write_bytes(source.read_bytes())
        damage(random, path)
        with only_our_errors():
            if source.name == "sound.yaml":
                check_ranges(load_config(TrainConfig, path))
            else:
                study_graph(load_study(str(path)))

    return case


# --- checkpoints ------------------------------------------------------------------------------------------------------


def checkpoint_target(scratch: Path) -> Case:
    """Damaged run folders: one of the two checkpoints exactly as it was written, or an error of ours."""
    sound = make_run(scratch / "sound", "run", step=10)
    config = load_config(TrainConfig, sound / "config.yaml")
    originals = {}
    for step in (10, 20):
        model = build_model(config.model, seed=step)
        optimizer = build_optimizer(model, config.optimizer)
        model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        optimizer.step()
        state = {"tokens": step * 512, "science": science(config)}
        tensors = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        originals[step] = Checkpoint(step, tensors, optimizer_tensors(model, optimizer), state)
        write_checkpoint(sound, originals[step], keep=2)
    empty = build_model(config.model)

    def case(random: Random) -> None:
        folder = copy_of(sound, scratch / "copy")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        newest = [path for path in files if "step_00000020" in str(path)]
        done = [
            damage(random, path) for path in random.sample(random.choice((files, newest)), random.choice((1, 1, 2)))
        ]
        with only_our_errors():
            found = read_newest(folder)
            if found is not None:
                original = originals[found.step]
                assert _same(found.model, original.model), f"{done}: other weights"
                assert _same(found.optimizer, original.optimizer), f"{done}: other moments"
                assert original.state.items() <= found.state.items(), f"{done}: another state"
                load_optimizer_tensors(empty, build_optimizer(empty, config.optimizer), found.optimizer)
        with only_our_errors():
            assert not train._is_finished(replace(config, run=replace(config.run, dir=str(folder))))
        with only_our_errors():
            loaded = load_trained(folder)
            assert loaded.step in originals
            assert _same(dict(loaded.model.named_parameters()), originals[loaded.step].model), f"{done}: other weights"

    return case


def _same(found: typing.Mapping[str, torch.Tensor], wanted: typing.Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def published_target(scratch: Path) -> Case:
    """Damaged folders of Hugging Face: an error of ours, or a model of the shape that its configuration says."""
    sound = scratch / "published"
    config = ModelConfig("tiny", 2, 16, 32, 2, 2, vocab_size=64, max_positions=16)
    model = build_model(config)
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(sound)
    names = {name: "model.safetensors" for name in model.state_dict() if name != "lm_head.weight"}
    (sound / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))

    def case(random: Random) -> None:
        folder = copy_of(sound, scratch / "copy")
        damage(random, random.choice(sorted(folder.glob("*"))))
        with only_our_errors():
            loaded = load_pretrained(folder if random.random() < 0.95 else folder / "config.json")
            assert loaded.model(torch.arange(4)[None]).logits.shape == (1, 4, loaded.config.vocab_size)

    return case


# --- models -----------------------------------------------------------------------------------------------------------


def model_target(scratch: Path) -> Case:
    """Configurations of models: refused, or one that computes."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32))
    counts = dict.fromkeys(("layers", "attention_heads", "key_value_heads"), (1, 2, 3, 4))
    known = {key: (kind, allowed) for key, kind, allowed in options(ModelConfig)}

    def case(random: Random) -> None:
        values = {name: str(random.choice(of)) for name, of in {**sizes, **counts}.items()}
        for _ in range(random.randint(0, 2)):
            name = random.choice(list(known))
            values[name] = hostile_text(random, *known[name])
        with only_our_errors():
            config = parse(ModelConfig, [f"{name}={value}" for name, value in values.items()])
            if config.parameters < 200_000 and config.layers < 8:
                logits = build_model(config)(torch.zeros(1, 3, dtype=torch.int64)).logits
                assert logits.shape == (1, 3, config.vocab_size), values

    return case


# --- data -------------------------------------------------------------------------------------------------------------


def data_target(scratch: Path) -> Case:
    """Damaged text, tasks, tokenizers and token files: an error that names the file, or text, and the same tokens."""
    text = [
        {"text": f"{n} and {n * n}, so it is", "context": "a", "choices": ["b", "c"], "answer": n % 2}
        for n in range(60)
    ]
    lines = "\n".join(map(json.dumps, text)).encode()
    sound = scratch / "sound"
    sound.mkdir()
    (sound / "a.jsonl").write_bytes(lines)
    (sound / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (sound / "a.jsonl.xz").write_bytes(lzma.compress(lines))
    (sound / "a.txt").write_bytes(lines)
    columns = {"a": [one["text"] for one in text], "null": ["a", None], "int": [1, 2], "bytes": [b"\xff"]}
    for name, column in columns.items():
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), sound / f"{name}.parquet")
    (sound / "lone.jsonl").write_text('{"text": "a"}\n{"text": "\\ud800"}')
    run = scratch / "tokens"
    run.mkdir()
    (run / "docs.jsonl").write_bytes(lines)
    places = [f"source=path:{run}/docs.jsonl", f"cache_dir={run}/cache", "validation_share=0.3"]
    config = parse(TrainConfig, ["model=smoke", "model.vocab_size=300", *(f"data.{place}" for place in places)]).data
    original = prepare_text(config, 300)[1].train.copy()

    def read_text(random: Random) -> None:
        folder = copy_of(sound, scratch / "copy")
        path = random.choice(sorted(folder.glob("*")))
        if random.random() < 0.9:
            damage(random, path)
        with only_our_errors():
            for document in open_texts(f"path:{path}", text_field="text", cache_dir=str(scratch))[0].documents():
                document.encode()
        if path.name.startswith("a.jsonl") and path.is_file():
            with only_our_errors(ValueError):
                read_records(path, random.choice(("piqa", "winogrande")))

    def read_tokens(random: Random) -> None:
        folder = copy_of(run, scratch / "copy")
        damage(random, random.choice(sorted(path for path in (folder / "cache").rglob("*") if path.is_file())))
        with only_our_errors():
            _, tokens = prepare_text(
                replace(config, source=f"path:{folder}/docs.jsonl", cache_dir=f"{folder}/cache"), 300
            )
            assert (tokens.train == original).all(), "other tokens"

    def case(random: Random) -> None:
        random.choice((read_text, read_tokens))(random)

    return case


# --- formats ----------------------------------------------------------------------------------------------------------


def format_target(scratch: Path) -> Case:
    """Changed structures: `validate` raises ValueError, or the structure is one that makes a matrix."""

    def case(random: Random) -> None:
        generator = torch.Generator().manual_seed(random.randrange(2**31))
        rows, columns = random.randint(0, 9), random.randint(1, 40)
        values = torch.randn(rows, columns, generator=generator)
        dense = values.where(torch.rand(rows, columns, generator=generator) < random.random(), 0)
        dense = dense.to(random.choice((torch.bfloat16, torch.float16, torch.float32, torch.float64)))
        packed: Any = random.choice(
            (
                lambda: ELL.from_dense(dense),
                lambda: TwELL.from_dense(dense, random.randint(1, 20), 4, on_overflow="grow"),
                lambda: Hybrid.from_dense(dense, random.randint(1, 6), 2, on_overflow="grow"),
            )
        )()
        packed.validate()
        assert torch.equal(packed.to_dense(), dense)
        for _ in range(random.randint(1, 2)):
            name = random.choice(list(vars(packed)))
            packed = replace(packed, **{name: _changed(random, getattr(packed, name))})
        with only_our_errors(ValueError, CapacityError):
            packed.validate()
            assert packed.to_dense().shape == packed.shape

    return case


def _changed(random: Random, value: Any) -> Any:
    if isinstance(value, ELL):
        name = random.choice(list(vars(value)))
        return replace(value, **{name: _changed(random, getattr(value, name))})
    if not isinstance(value, torch.Tensor):
        return random.choice((-1, 0, 1, 2, 7, 40, 2**40, 1.5, None, "a", True, torch.int32, torch.float32, torch.bool))
    if value.device.type == "meta" or value.layout != torch.strided:
        return torch.empty(0)  # changed before: little can be done with it
    if value.numel() and random.random() < 0.4:
        changed = value.clone().flatten()
        place, wanted = random.randrange(len(changed)), random.choice((-3, -2, -1, 0, 1, 7, 40, 65535))
        wide = changed.to(torch.complex128 if value.is_complex() else torch.float64)
        wide[place] = wanted
        return wide.to(value.dtype).view(value.shape)
    return random.choice(
        (
            lambda: None,
            lambda: value[:-1],
            lambda: value[None],
            lambda: value.flatten(),
            lambda: value.to("meta"),
            lambda: value.to(random.choice((torch.int64, torch.float32, torch.bool, torch.uint8, torch.complex64))),
            lambda: value.to_sparse() if value.is_floating_point() else value.tolist(),
            lambda: torch.empty(0),
            lambda: value.new_zeros((3,) * value.ndim),
        )
    )()


# --- whole trainings --------------------------------------------------------------------------------------------------


def training_target(scratch: Path) -> Case:
    """A step of a tiny training with hostile options: it ends with a code of ours, and leaves nothing if refused."""
    text = scratch / "docs.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"{n} and {n * n}, so it is"}) for n in range(200)))
    sizes = ("layers=1", "hidden_size=8", "intermediate_size=16", "attention_heads=2", "key_value_heads=2")
    tiny = [f"model.{size}" for size in (*sizes, "vocab_size=300", "max_positions=16")]
    tiny += [f"data=path:{text}", f"data.cache_dir={scratch}/cache", "data.validation_share=0.3"]
    tiny += ["training.sequence_length=16", "training.tokens_per_step=64", "training.precision=float32"]
    tiny += ["training.steps=1", "run.evaluation_tokens=64", "run.progress=none", f"run.dir={scratch}/run"]
    # Sizes that are valid and too large for a test; and folders outside of the scratch folder.
    others = ("model.", "training.", "data.source", "data.tokenizer", "data.cache_dir", "run.dir", "execution.compile")
    known = [one for one in options(TrainConfig) if not one[0].startswith(others)]

    def case(random: Random) -> None:
        folder = scratch / "run"
        shutil.rmtree(folder, ignore_errors=True)
        arguments = [*tiny]
        for _ in range(random.randint(1, 2)):
            key, kind, allowed = random.choice(known)
            arguments.append(f"{key}={hostile_text(random, kind, allowed)}")
        if random.random() < 0.2:
            (scratch / "file").touch()
            place = random.choice(
                (scratch / "file", scratch / "file" / "below", scratch / ("a" * 300), "/proc/nowhere")
            )
            arguments.append(f"run.dir={place}")
        code, messages = ended(lambda: entry(train.by_hand, TrainConfig, arguments))
        assert code in (0, 1, 2, 85), f"{arguments[len(tiny) :]}: exit code {code}"
        assert all(len(message.splitlines()) == 1 for message in messages), messages
        if code == 2:
            assert not folder.exists(), f"{arguments[len(tiny) :]} was refused and left {folder}"

    return case


TARGETS: dict[str, Callable[[Path], Case]] = {
    "options": option_target,
    "files": file_target,
    "checkpoints": checkpoint_target,
    "published": published_target,
    "models": model_target,
    "data": data_target,
    "formats": format_target,
    "trainings": training_target,
}
