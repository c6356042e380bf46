"""The time that status and collection take for a simulated study of 2,000 finished, running and failed runs."""

import dataclasses
import json
import time

import pytest
import yaml

from analysis.load import load
from experiments.run.config import parse, to_yaml
from experiments.run.results import make_row, write_rows
from experiments.run.train_config import TrainConfig
from experiments.study.definition import TRAINING_METRICS, load_study, study_items
from slurm import scheduler
from slurm.collect import collect
from slurm.manage import lines
from slurm.records import Job, Report, Submission, config_digest, note_submitted, now, write_submission

RUNS = 2000
# Of the time that the machine needs just to parse the configurations of the runs: its speed does not count, more than
# linear work does.
STATUS_LIMIT, COLLECT_LIMIT = 5, 20
LAYERS, RECORDS = 8, 20
UNITS = {"nonzeros": 30.0, "dead_fraction": 0.3, "throughput": 100.0}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The folder of a study of 2,000 trainings: all but the last 100 are done, 50 run, 50 failed."""
    root = tmp_path_factory.mktemp("thousands")
    seeds = ", ".join(map(str, range(RUNS // 8)))
    file = root / "large.yaml"
    file.write_text(
        f"grid:\n  sparsity.l1: [0, 1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4]\n  training.seed: [{seeds}]\n"
        "kinds: [train]\narguments:\n  train: [model=0.5b]\n"
    )
    config = load_study(str(file), [f"runs={root / 'runs'}"])
    # The text's own item stands for itself: what is looked at here are the runs.
    trainings = [dataclasses.replace(item, needs=()) for item in study_items(config) if item.kind == "train"]
    made = [dataclasses.replace(item, folder=item.folder.absolute()) for item in trainings]
    folder = config.folder.absolute()
    folder.mkdir(parents=True)
    write_submission(folder, Submission(tuple(made), str(root), {item.name: 10000 for item in made}))
    jobs = [Job(item.name, f"{7 + n // 1000}_{n % 1000}", "slurm", "log", now()) for n, item in enumerate(made)]
    note_submitted(folder, jobs)
    text = to_yaml(parse(TrainConfig, ["model=0.5b", "run.study=STUDY", "run.item=ITEM"]))
    rows = training_rows(root / "rows.csv")
    for number, (item, job) in enumerate(zip(made, jobs, strict=True)):
        finished, failed = number < RUNS - 100, number >= RUNS - 50
        item.folder.mkdir()
        seed, l1 = number % (RUNS // 8), float(item.arguments[1].partition("=")[2])
        (item.folder / "config.yaml").write_text(text.replace("STUDY", folder.name).replace("ITEM", item.name))
        write_metrics(item.folder, RECORDS if finished else RECORDS // 2)
        state = "done" if finished else "failed" if failed else "running"
        report = Report(job.job, state, "node7", 0, item.arguments, now(), error="ValueError: no" if failed else "")
        if finished:
            report = dataclasses.replace(report, config=config_digest(item.folder))
            own = rows.replace("STUDY", folder.name).replace("ITEM", item.name)
            (item.folder / "rows.csv").write_text(own.replace("0.125", str(l1)).replace("777777", str(seed)))
        (item.folder / "job.json").write_text(json.dumps(dataclasses.asdict(report)))
    return folder


def write_metrics(folder, records):
    with (folder / "metrics.jsonl").open("w") as file:
        for number in range(1, records + 1):
            record = {"step": 500 * number, "tokens": 500 * number * 2**20, "cross_entropy": 4.0, "tokens_per_s": 1e5}
            record |= {"nonzeros": [30.0] * LAYERS, "dead_fraction": [0.3] * LAYERS, "seconds": 10.0 * number}
            file.write(json.dumps(record) + "\n")


def training_rows(path):
    """The text of rows as a training leaves them, made once: what is measured here is reading."""
    known = {"study": "STUDY", "item": "ITEM", "op": "train", "plan": "hybrid", "backend": "dense", "model": "0.5b"}
    known |= {"layers": LAYERS, "activation": "relu", "gated": True, "l1": 0.125, "modification": "none"}
    known |= {"seed": 777777, "step": 10000, "tokens": 2**20, "hidden": 2048, "intermediate": 5632}
    rows = [make_row(**known, metric=name, value=UNITS.get(name, 4.0), n=1) for name in TRAINING_METRICS]
    by_layer = [(name, layer) for name in ("nonzeros", "dead_fraction") for layer in range(LAYERS)]
    rows += [make_row(**known, metric=name, layer=layer, value=UNITS[name], n=1) for name, layer in by_layer]
    write_rows(path, rows)
    return path.read_text()


def seconds(function, *arguments):
    """Of this process's own work: what else the machine does meanwhile is not the launcher's."""
    began = time.process_time()
    result = function(*arguments)
    return result, time.process_time() - began


@pytest.fixture(scope="module")
def parsing(study):
    """CPU seconds that it takes to parse the configurations of all runs."""
    texts = [path.read_text() for path in study.glob("*/config.yaml")]
    assert len(texts) == RUNS
    return seconds(lambda: [yaml.load(text, Loader=yaml.CSafeLoader) for text in texts])[1]


def in_queue(jobs):
    """What squeue says of 2,000 tasks: the last hundred are still known, half of them run."""
    last = list(jobs)[-100:]
    return {job: scheduler.Seen("RUNNING" if n < 50 else "FAILED", "node7", "1:00") for n, job in enumerate(last)}


def test_the_status_of_2000_runs(study, parsing, monkeypatch):
    monkeypatch.setattr(scheduler, "queue", in_queue)
    (title, made, states), took = seconds(lines, study)
    assert took < STATUS_LIMIT * parsing, f"{took:.1f} s for the status of {RUNS} runs, {parsing:.1f} s to parse them"
    assert title == "study large: 2000 items: 50 failed, 50 running, 1900 done"
    running = next(line for line in made if line["state"] == "running")
    shown = [running[name] for name in ("step", "loss", "non-zeros", "tokens/s", "node", "left")]
    assert shown == ["5000/10000", "4.000", "30.0", "100,000", "node7", "14:33 h"]
    assert len(states) == RUNS
    print(f"status of {RUNS} runs: {took:.1f} s (parsing alone: {parsing:.1f} s)")


def test_the_collection_of_2000_runs(study, parsing, tmp_path):
    missing, took = seconds(collect, study, tmp_path / "collected")
    assert took < COLLECT_LIMIT * parsing, f"{took:.1f} s to collect {RUNS} runs, {parsing:.1f} s to parse them"
    assert len(missing) == 100
    assert set(missing.values()) == {"interrupted, no results yet"}
    results = load(tmp_path / "collected")
    assert results.rows["item"].nunique() == RUNS - 100
    assert len(results.rows) == (RUNS - 100) * (len(TRAINING_METRICS) + 2 * LAYERS)
    assert len(results.curves) == (RUNS - 100) * RECORDS * (3 + 2 * LAYERS)
    assert results.settings["item"].nunique() == RUNS - 100
    print(f"collection of {RUNS} runs: {took:.1f} s (parsing alone: {parsing:.1f} s)")
