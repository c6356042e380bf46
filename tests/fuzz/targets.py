"""The fuzzing targets. A target is made once, in a scratch folder; each call is one case, drawn from a `Random`."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import shutil
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from experiments import train
from experiments.run.config import check_ranges, entry, load_config, parse, save_config
from experiments.run.errors import RunError
from experiments.run.locks import LOCK
from experiments.run.train_config import TrainConfig
from experiments.study.definition import STUDIES, StudyConfig, load_study, study_graph
from fuzz.values import damage, hostile_text, options
from slurm.cluster import ClusterConfig

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
def only_our_errors() -> Iterator[None]:
    """Inside the block, an error of ours ends it; its message must be of one line. Any other one is a finding."""
    message = "fine"
    try:
        yield
    except RunError as error:
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


# --- whole trainings --------------------------------------------------------------------------------------------------


def training_target(scratch: Path) -> Case:
    """A step of a tiny training with hostile options: it ends with a code of ours, and leaves no results if refused."""
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
            left = {path.name for path in folder.glob("*")} - {LOCK}
            assert not left, f"{arguments[len(tiny) :]} was refused and left {left}"

    return case


TARGETS: dict[str, Callable[[Path], Case]] = {
    "options": option_target,
    "files": file_target,
    "trainings": training_target,
}
