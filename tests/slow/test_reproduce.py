"""What `make reproduce` runs, at its smallest scale: interrupted and continued, and with an item that fails."""

import json
import re
import signal
import time

import programs
import pytest

from analysis.load import load
from analysis.read import NONZEROS
from experiments.data.tasks import TASKS
from experiments.run.errors import EXIT_STOPPED
from experiments.study.definition import load_study, study_graph, study_items
from experiments.study.graph import State
from slurm.collect import collect
from slurm.records import JOBS

TIMEOUT_SECONDS = 1500  # only against a hang


def command(root, *arguments):
    return ["slurm.submit", "study=smoke", "cluster=local", "cluster.cpus=1", f"runs={root / 'runs'}", *arguments]


def reproduce(root, *arguments):
    return programs.run(*command(root, *arguments), timeout=TIMEOUT_SECONDS)


def config_in(root, *arguments):
    return load_study("smoke", [f"runs={root / 'runs'}", *arguments])


def started(root):
    """Names of the items that were started, in order."""
    lines = (root / "runs" / "smoke" / JOBS).read_text().splitlines()
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
    interrupted = programs.start(*command(tmp_path, tasks))
    second = tmp_path / "runs" / "smoke" / "relu" / "config.yaml"
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not second.is_file() and time.monotonic() < deadline:
        time.sleep(0.02)
    interrupted.send_signal(signal.SIGTERM)
    output, errors = interrupted.communicate(timeout=TIMEOUT_SECONDS)
    assert interrupted.returncode == EXIT_STOPPED, output + errors
    assert "SIGTERM: the same command continues" in errors
    first = started(tmp_path)
    graph = study_graph(config_in(tmp_path, tasks))
    (text,) = [item.name for item in graph.items.values() if item.kind == "prepare_data"]
    assert first == [text, "silu", "evaluate_silu", "relu"]
    left = [name for name, (state, _) in graph.states().items() if state is not State.DONE]

    finished = reproduce(tmp_path, tasks)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    config = config_in(tmp_path, tasks)
    assert sorted(started(tmp_path)[len(first) :]) == sorted(left), "what was done before is not repeated"
    assert f"[{len(left)}/{len(left)}] notebooks done" in finished.stdout
    assert "Results" in finished.stdout
    assert re.search(r"^relu_l1_1e-3 +\d\.\d{3} ", finished.stdout, re.M)
    assert str(config.output / "index.html") in finished.stdout
    for item in study_items(config):
        assert all(row["value"] is not None or row["missing"] for row in item.rows()), item.name
    assert (config.output / "index.html").stat().st_size > 1000
    assert {state for state, _ in graph.states().values()} == {State.DONE}

    assert collect(config.folder, tmp_path / "collected") == {}, "nothing is missing"
    assert set(load(tmp_path / "collected").nonzeros) == set(NONZEROS)

    count = len(started(tmp_path))
    again = reproduce(tmp_path, tasks)
    assert again.returncode == 0
    assert len(started(tmp_path)) == count, "nothing is left to do"
    assert "Results" in again.stdout

    # Take one training's rows away: it, and what was made from it, is to be done again; the rest is not.
    (config.folder / "relu" / "rows.csv").unlink()
    states = graph.states()
    assert states["relu"][0] is State.TODO
    waiting = {name for name, (state, _) in states.items() if state is State.WAITS}
    assert waiting == {
        "nonzeros_relu",
        "evaluate_relu",
        "bench_forward",
        "bench_training",
        "bench_generate",
        "build",
        "notebooks",
    }
