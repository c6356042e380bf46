"""The whole graph at scale=smoke, interrupted and continued; and what a study does with failures."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from experiments.data.tasks import TASKS
from experiments.reproduce import graph_of, main
from experiments.run.config import parse, save_config
from experiments.run.environment import REPOSITORY
from experiments.run.errors import EXIT_STOPPED
from experiments.run.results import read_rows
from experiments.run.train_config import TrainConfig, with_values
from experiments.study.definition import ReproduceConfig, items
from experiments.study.graph import State
from experiments.study.journal import NAME as JOURNAL
from experiments.study.runner import config_difference, entry_point

TIMEOUT_SECONDS = 400


def command(action, root, *arguments):
    places = [f"runs={root / 'runs'}", f"figures={root / 'figures'}"]
    return [sys.executable, "-m", "experiments.reproduce", action, "scale=smoke", *places, *arguments]


def reproduce(action, root, *arguments):
    return subprocess.run(
        command(action, root, *arguments),
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )


def config_in(root, *arguments):
    places = [f"runs={root / 'runs'}", f"figures={root / 'figures'}"]
    return parse(ReproduceConfig, ["scale=smoke", *places, *arguments])


def runs_of(root):
    """Names of the items that ran, in order."""
    lines = (root / "runs" / "smoke" / JOURNAL).read_text().splitlines()
    return [json.loads(line)["item"] for line in lines]


def write_tasks(folder):
    folder.mkdir()
    cloze = {"context": "Question: what?\nAnswer:", "choices": ["this", "that one"], "answer": 0}
    blank = {"contexts": ["Ann saw Ann", "Ann saw Bob"], "continuation": "there.", "answer": 1}
    for task in TASKS:
        record = blank if task == "winogrande" else cloze
        (folder / f"{task}.jsonl").write_text(json.dumps(record) + "\n")
    return folder


@pytest.mark.slow
def test_the_whole_graph_interrupted_and_continued(tmp_path):
    tasks = f"tasks={write_tasks(tmp_path / 'tasks')}"
    interrupted = subprocess.Popen(
        command("run", tmp_path, tasks),
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    second = tmp_path / "runs" / "smoke" / "relu" / "metrics.jsonl"
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not second.is_file() and time.monotonic() < deadline:
        time.sleep(0.02)
    interrupted.send_signal(signal.SIGTERM)
    _, errors = interrupted.communicate(timeout=TIMEOUT_SECONDS)
    assert interrupted.returncode == EXIT_STOPPED
    assert "SIGTERM: the same command continues" in errors
    assert runs_of(tmp_path) == ["silu"]

    finished = reproduce("run", tmp_path, tasks)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    config = config_in(tmp_path, tasks)
    names = [item.name for item in items(config)]
    assert runs_of(tmp_path) == names, "every item ran once: the one done before was not repeated"
    assert "What came out" in finished.stdout
    assert str(config.output / "index.html") in finished.stdout
    for item in items(config):
        assert all(row["value"] is not None or row["missing"] for row in item.rows()), item.name
    assert (config.output / "index.html").stat().st_size > 1000
    graph = graph_of(config)
    assert {state for state, _ in graph.states().values()} == {State.DONE}

    again = reproduce("run", tmp_path, tasks)
    assert again.returncode == 0
    assert runs_of(tmp_path) == names, "nothing is left to do"

    # Take one training's rows away: it, and what was made from it, is to be done again; the rest is not.
    config_path = config.folder / "relu" / "rows.csv"
    config_path.unlink()
    states = graph.states()
    assert states["relu"][0] is State.READY
    waiting = {name for name, (state, _) in states.items() if state is State.BLOCKED}
    assert waiting == {"nonzeros_relu", "evaluate_relu", "bench_forward", "bench_training", "build", "notebooks"}


def test_a_failed_item_is_reported_and_the_others_go_on(tmp_path):
    # A file where the folder of the checkpoints should be: that training cannot write.
    folder = tmp_path / "runs" / "smoke" / "silu"
    folder.mkdir(parents=True)
    (folder / "checkpoints").write_text("in the way")
    result = reproduce("run", tmp_path, "only=[evaluate_silu,bench_kernels]")
    assert result.returncode == 1
    assert runs_of(tmp_path) == ["silu", "bench_kernels"]
    assert f"log: {folder / 'log.txt'}" in result.stdout
    assert "evaluate_silu: not run, waits for silu" in result.stdout
    assert (folder / "log.txt").read_text().startswith("$ python -m experiments.train")
    assert read_rows(tmp_path / "runs" / "smoke" / "bench_kernels" / "rows.csv")


def test_list_and_status(tmp_path):
    listed = reproduce("list", tmp_path)
    assert listed.returncode == 0
    assert "python -m experiments.train model=smoke sparsity.l1=1e-3 run.study=smoke" in listed.stdout
    status = reproduce("status", tmp_path)
    assert status.returncode == 0
    assert "not started" in status.stdout
    assert "waits" in status.stdout
    assert not (tmp_path / "runs").exists(), "looking makes nothing"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scale=enormous"], "enormous"),
        (["only=[relux]"], "relux"),
        (["arguments={trane: [x=1]}"], "trane"),
    ],
)
def test_a_wrong_request_is_refused(tmp_path, arguments, message):
    result = reproduce("run", tmp_path, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_two_runs_of_one_study_do_not_mix(tmp_path):
    folder = tmp_path / "runs" / "smoke"
    folder.mkdir(parents=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = reproduce("run", tmp_path, "only=[bench_kernels]")
    assert result.returncode == 1
    assert "another process" in result.stderr


def test_an_evaluation_is_done_again_when_tasks_are_given(tmp_path):
    def evaluation(*arguments):
        return next(i for i in items(config_in(tmp_path, *arguments)) if i.name == "evaluate_relu")

    without, given = evaluation(), evaluation("tasks=folder")
    assert [e.may_miss for e in without.expected] == [False, True]
    assert [e.may_miss for e in given.expected] == [False, False]
    assert "tasks=folder" in given.arguments


def test_only_options_with_an_effect_make_another_configuration(tmp_path):
    item = next(i for i in items(config_in(tmp_path)) if i.name == "relu")
    saved = [*item.arguments, "run.log_every=7", "execution.micro_batch=2"]
    save_config(parse(TrainConfig, saved), item.folder / "config.yaml")
    assert config_difference(item) is None
    save_config(parse(TrainConfig, [*saved, "training.steps=3"]), item.folder / "config.yaml")
    assert config_difference(item) == "training.steps was 3, now 20"
    (item.folder / "config.yaml").write_text("an_option_of_old: 1\n")
    assert "another version" in config_difference(item)


def test_a_training_on_a_data_set_of_the_hub_can_be_done(tmp_path):
    """It is saved with the number of tokens that are read, which nobody asked for."""
    item = next(i for i in items(config_in(tmp_path, "data=hf:some/text")) if i.name == "relu")
    item = replace(item, arguments=(*item.arguments, "data.max_tokens=null"))
    asked = parse(TrainConfig, list(item.arguments))
    budget = asked.training.steps * asked.training.tokens_per_step
    save_config(with_values(asked, data={"max_tokens": budget}), item.folder / "config.yaml")
    assert config_difference(item) is None
    assert asked.data.max_tokens == budget


@pytest.mark.parametrize("scale", ["smoke", "demo"])
def test_every_items_arguments_are_valid(tmp_path, scale):
    """As `parse` sees them, without running anything."""
    places = [f"runs={tmp_path / 'runs'}", f"figures={tmp_path / 'figures'}"]
    config = parse(ReproduceConfig, [f"scale={scale}", "tasks=folder", "data=stdlib", *places])
    kinds = set()
    for item in items(config):
        _, config_class = entry_point(item)
        if config_class is not None:
            parse(config_class, list(item.arguments))
        kinds.add(item.kind)
    assert kinds == set(config.seconds)


def test_kinds_of_items_and_benchmarks_one_by_one(tmp_path):
    chosen = items(config_in(tmp_path, "kinds=[train,bench_forward,build]", "bench_each=true"))
    names = {item.name: item for item in chosen}
    assert {item.kind for item in names.values()} == {"train", "bench_forward", "build"}
    assert names["bench_forward_silu"].needs == ("silu",)
    assert f"checkpoints=[{tmp_path / 'runs' / 'smoke' / 'silu'}]" in names["bench_forward_silu"].arguments
    assert set(names["build"].needs) == names.keys() - {"build"}
    together = next(item for item in items(config_in(tmp_path)) if item.kind == "bench_forward")
    assert len(together.needs) == len([item for item in names.values() if item.kind == "train"])


def test_an_unknown_action_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["tidy"])
    assert stopped.value.code == 2
    assert "the action must be one of run, list, status, got 'tidy'" in capsys.readouterr().err
