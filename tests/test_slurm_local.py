"""Launching on this machine: a queue that uses all of it, failures, stopping and continuing, the debug executor."""

import contextlib
import errno
import fcntl
import io
import itertools
import json
import logging.config
import os
import platform
import shlex
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import programs
import pytest
import submitit.core.logger
from rich.console import Console
from same_run import assert_same_end, final
from submitit.slurm.slurm import SlurmJobEnvironment
from tiny_run import write_text

from analysis.load import FIGURES
from analysis.read import read_rows
from experiments import train
from experiments.data import batches
from experiments.run.config import parse, save_config
from experiments.run.errors import EXIT_STOPPED, ConfigError, RunError, Stopped
from experiments.run.locks import exclusive, is_held
from experiments.run.results import make_row, write_rows
from experiments.run.train_config import TrainConfig
from experiments.study.definition import load_study
from experiments.study.graph import Expected, Graph, Item, State, config_of
from experiments.training import metrics
from slurm import cancel, local, log, manage, status
from slurm.cluster import load_cluster
from slurm.collect import collect
from slurm.display import Display, duration, table
from slurm.job import ItemJob
from slurm.local import LocalQueue
from slurm.manage import SubmittedStudy
from slurm.records import (
    Job,
    Report,
    Submission,
    config_digest,
    latest_jobs,
    note_submitted,
    now,
    read_report,
    read_submission,
    submitted_studies,
    write_report,
    write_submission,
)
from slurm.scheduler import Seen
from slurm.snapshot import Snapshot
from slurm.states import ItemState, item_states, same_arguments
from slurm.submit import Request, SubmissionFailed, is_as_committed, read_request, submit

WITHOUT_A_WORD = "the job ended without a word (killed? then usually by the system, out of memory)"


@pytest.fixture(autouse=True)
def _private(monkeypatch):
    """Submitting makes everything private from then on. There is no terminal, hence no debugger."""
    monkeypatch.setattr("sys.stdin", io.StringIO())
    umask, directory = os.umask(0o022), Path.cwd()
    yield
    os.umask(umask)
    os.chdir(directory)


@pytest.fixture
def words(tmp_path):
    text = write_text(tmp_path / "text")
    data = [f"data=path:{text}", f"data.cache_dir={tmp_path / 'cache'}", "data.validation_share=0.3"]
    return ["model=smoke", "model.vocab_size=400", "training.precision=float32", *data]


def place(tmp_path, item):
    return ["run.study=test", f"run.item={item}", f"run.dir={tmp_path / 'runs' / 'test' / item}"]


# --- the queue --------------------------------------------------------------------------------------------------------


def local_queue(tmp_path, cluster, items=(), say=print):
    display = Display("study", {}, {}, say)
    return LocalQueue(tmp_path, Graph(items), cluster, Snapshot(tmp_path, "abc"), str(tmp_path), display)


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """A queue of a box with 4 GPUs whose jobs are not processes; each turn ends the oldest one that runs."""
    said, started, most = [], [], []

    def make(items, *overrides, fails=(), names=None, shared=False, made=()):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        cluster = load_cluster("gpu_box", ["total_gpus=4", "parallel=4", *overrides])
        done = set(made)
        monkeypatch.setattr(Graph, "problem", lambda self, item: None if item.name in done else "no rows")
        one = local_queue(tmp_path, cluster, items, said.append)

        def fake_submit(item, gpus):
            started.append((item.name, gpus))
            return Mock(spec=local.LocalJob, job_id=str(len(started)), done=Mock(return_value=False))

        def turn(_):
            assert len(most) < 100, "it never ends"
            used = [gpu for running in one._running for gpu in running.gpus]
            assert shared or len(used) == len(set(used)), "a GPU has one run at a time"
            most.append(len(one._running))
            if one._running:
                name = one._running[0].item.name
                if name not in fails:
                    done.add(name)
                if one._running[0].process is not None:
                    one._running[0].process.done.return_value = True

        monkeypatch.setattr(one, "_submit", fake_submit)
        monkeypatch.setattr(local.time, "sleep", turn)
        return one.run(names or [item.name for item in items])

    make.said, make.started, make.most = said, started, most
    return make


def item(tmp_path, name, kind="train", needs=()):
    return Item(name, kind, "experiments.train", (), tmp_path / name, tuple(needs), files=(tmp_path / name / "x",))


def test_all_gpus_are_busy(queue, tmp_path):
    failed = queue([item(tmp_path, f"run{n}") for n in range(10)])
    assert failed == {}
    assert [gpus for _, gpus in queue.started[:4]] == [(0,), (1,), (2,), (3,)]
    assert queue.most[:7] == [4] * 7, "as long as there are runs to do"
    assert len(queue.started) == 10


def test_runs_on_two_gpus_and_items_without(queue, tmp_path):
    items = [item(tmp_path, f"run{n}") for n in range(3)]
    items.append(item(tmp_path, "build", "build", ("run0", "run1")))
    assert queue(items, "gpus=2") == {}
    assert queue.started[:2] == [("run0", (0, 1)), ("run1", (2, 3))]
    assert dict(queue.started)["build"] == ()
    assert [name for name, _ in queue.started].index("build") >= 2


def test_what_needs_a_failed_item_is_not_run(queue, tmp_path):
    items = [item(tmp_path, "good"), item(tmp_path, "bad"), item(tmp_path, "n_bad", "nonzeros", ["bad"])]
    items += [item(tmp_path, "n_good", "nonzeros", ["good"]), item(tmp_path, "build", "build", ["n_bad", "n_good"])]
    failed = queue(items, fails=("bad",))
    assert failed == {"bad": "no rows", "n_bad": "not run, needs bad", "build": "not run, needs n_bad"}
    assert [name for name, _ in queue.started] == ["good", "bad", "n_good"]


def test_a_run_that_was_killed_is_reported_with_the_end_of_its_log(queue, tmp_path):
    (tmp_path / ".jobs").mkdir()
    (tmp_path / ".jobs" / "1_0_log.out").write_text("step 5\nended by signal 9 (SIGKILL); out of memory\n\n")
    failed = queue([item(tmp_path, "bad")], fails=("bad",))
    assert failed == {"bad": f"{WITHOUT_A_WORD}; its log ends: ended by signal 9 (SIGKILL); out of memory"}


def test_items_that_need_an_item_that_will_not_run_are_not_run(queue, tmp_path):
    """As where a training was made by another version, and only its statistics are submitted again."""
    items = [item(tmp_path, "old"), item(tmp_path, "n_old", "nonzeros", ["old"])]
    assert queue(items, names=["n_old"]) == {"n_old": "not run, needs old"}
    assert queue.started == []


@pytest.fixture
def orphan(tmp_path, monkeypatch):
    """A run that a killed launcher left behind holds its lock whenever one of these says so; `report` is its own."""

    def runs(*held, report=None):
        answers = iter(held)
        monkeypatch.setattr(local, "is_held", lambda folder: folder.name == "orphan" and next(answers, False))
        (tmp_path / "orphan").mkdir()
        if report is not None:
            state, node, gpus = report
            write_report(tmp_path / "orphan", Report("7", state, node, 0, (), now(), gpus=gpus))

    return runs


@pytest.mark.parametrize("made", [[], ["orphan"]], ids=["nothing yet", "results of earlier options"])
def test_a_run_that_was_left_behind_is_waited_for(queue, orphan, tmp_path, made):
    """Where results of earlier options lie there, what needs the new ones must not begin with those."""
    orphan(True, True, True, False)
    items = [item(tmp_path, "orphan"), item(tmp_path, "n_orphan", "nonzeros", ["orphan"])]
    assert queue(items, made=made) == {}
    assert queue.most[0] == 1
    assert [name for name, _ in queue.started] == ["n_orphan"]
    assert "orphan is running already" in queue.said[0]


def test_a_queue_ends_well_when_its_record_was_deleted(queue, tmp_path, monkeypatch):
    monkeypatch.setattr(Display, "ended", lambda *arguments: (tmp_path / "queue.json").unlink())
    assert queue([item(tmp_path, "a")]) == {}


@pytest.mark.parametrize(
    ("report", "late", "others", "said"),
    [
        (("running", platform.node(), "2"), False, (0, 1, 3), " on GPU 2, started"),
        (None, False, (1, 2, 3), ", started"),
        (("running", "another machine", "2"), True, (1, 2, 3), ", started"),
        (("done", platform.node(), "2"), False, (1, 2, 3), ", started"),
    ],
)
def test_a_run_that_was_left_behind_keeps_its_gpus(queue, orphan, tmp_path, report, late, others, said):
    """As many as it gets, where they are not known."""
    orphan(*[False] * late, True, True, False, report=report)
    assert queue([item(tmp_path, name) for name in ("orphan", "a", "b", "c", "d")]) == {}
    assert queue.started[:3] == [(name, (gpu,)) for name, gpu in zip("abc", others, strict=True)]
    assert f"orphan is running already{said}" in queue.said[0]


@pytest.mark.parametrize(
    ("overrides", "warned"), [([], True), (["total_gpus=8"], True), (["total_gpus=8", "gpus=1"], False)]
)
def test_gpus_that_no_run_sees(tmp_path, monkeypatch, overrides, warned):
    said = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(local, "_machine_gpus", lambda: 8)
    local_queue(tmp_path, load_cluster("local", overrides), say=said.append)
    assert [line.startswith("trainings see none of this machine's 8 GPUs") for line in said] == [True] * warned


@pytest.mark.parametrize(
    ("visible", "total", "names"),
    [(None, 2, "0,1"), ("4,6,7", 2, "4,6"), ("GPU-8f, MIG-3a", 2, "GPU-8f,MIG-3a"), ("", 0, "")],
)
def test_gpus_are_those_that_the_launcher_may_use(tmp_path, monkeypatch, visible, total, names):
    executor = Mock()
    executor.return_value.submit.return_value = Mock(spec=local.LocalJob)
    monkeypatch.setattr(local, "LocalExecutor", executor)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    cluster = load_cluster("local", [f"total_gpus={total}", f"gpus={total}", "python=[python]"])
    local_queue(tmp_path, cluster)._submit(item(tmp_path, "a"), tuple(range(total)))
    assert shlex.split(executor.call_args.kwargs["python"]) == ["env", f"CUDA_VISIBLE_DEVICES={names}", "python"]


def test_more_gpus_than_the_launcher_may_use(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    with pytest.raises(ConfigError, match="total_gpus must be at most the 2 of CUDA_VISIBLE_DEVICES=1,2, got 3"):
        local_queue(tmp_path, load_cluster("local", ["total_gpus=3"]))


# --- real processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_failure_status_and_the_same_command_again(tmp_path, words, capsys):
    file = tmp_path / "broken.yaml"
    words = [*words, "training.steps=4"]
    study = {"grid": {"training.seed": ["0", "1"]}, "kinds": ["train", "nonzeros"]}
    study["arguments"] = {"train": words, "nonzeros": ["tokens=256", "groups=[4]"]}
    file.write_text(json.dumps(study))
    folder, runs = tmp_path / "runs" / "broken", f"runs={tmp_path / 'runs'}"
    (folder / "seed_1").mkdir(parents=True)
    (folder / "seed_1" / "checkpoints").write_text("in the way")
    with pytest.raises(SubmissionFailed, match="2 of 5 items are not done: seed_1, nonzeros_seed_1"):
        submit(read_request([f"study={file}", runs, "cluster=local", "cluster.parallel=2"]))
    assert not is_held(folder)
    capsys.readouterr()
    status.main(parse(status.StatusConfig, ["study=broken", runs]))
    shown = capsys.readouterr().out
    assert "study broken: 5 items: 1 failed, 1 waits, 3 done" in shown
    assert "Traceback" not in shown, "of an error that its message explains"
    assert f"log: {folder / '.jobs'}" in shown
    assert stat.S_IMODE((folder / "seed_0").stat().st_mode) == 0o700
    environment = json.loads((folder / "seed_0" / "environment.json").read_text())
    about = json.loads(next(folder.glob(".code/*/snapshot.json")).read_text())
    assert (environment["revision"], environment["dirty"]) == (about["revision"], about["dirty"])

    assert environment["command"][:2] == ["experiments.train", "model=smoke"]
    statistics = json.loads((folder / "nonzeros_seed_0" / "environment.json").read_text())
    assert statistics["packages"] == environment["packages"]

    (folder / "seed_1" / "checkpoints").unlink()
    before = latest_jobs(folder)
    submit(read_request([f"study={file}", runs, "cluster=local", "cluster.parallel=2"]))
    after = latest_jobs(folder)
    assert {name for name in after if after[name] != before.get(name)} == {"seed_1", "nonzeros_seed_1"}
    assert {one.state for one in item_states(folder, read_submission(folder)).values()} == {State.DONE}
    capsys.readouterr()
    submit(read_request([f"study={file}", runs, "cluster=local"]))
    assert "0 to submit, 0 on their way, 5 done" in capsys.readouterr().out


LONG = ("training.steps=400", "run.log_every=5", "run.checkpoint_every=400", "run.evaluate_every=400")


@pytest.fixture
def here():
    """The launcher's words for this machine, where the processes of jobs are forked from the server of the tests."""
    return ["cluster=local", "cluster.cpus=1", f"cluster.python={json.dumps(programs.python())}"]


def start(here, arguments):
    """A long training that has done some steps: its configuration, and the launcher's process."""
    config = parse(TrainConfig, arguments)
    process = programs.start("slurm.submit", "experiments.train", *here, *arguments)
    programs.wait_for(lambda: (metrics.last_record(config.run.folder) or {"step": 0})["step"] >= 20, process)
    return config, process


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancel", "Ctrl-C"])
def test_a_stopped_run_continues_bit_by_bit(tmp_path, words, here, how, capsys):
    arguments = [*words, *LONG, *place(tmp_path, "stopped")]
    config, process = start(here, arguments)
    with pytest.raises(RunError, match="another process is running the study"):
        submit(read_request(["experiments.train", *arguments, "cluster=local"]))
    if how == "cancel":
        cancel.main(parse(cancel.CancelConfig, ["study=test", f"runs={tmp_path / 'runs'}"]))
        assert "cancelled 1 of 2 items: stopped" in capsys.readouterr().out
    else:
        process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == EXIT_STOPPED, output + errors
    assert "the same command continues" in errors
    folder = tmp_path / "runs" / "test"
    assert item_states(folder, read_submission(folder))["stopped"].state is State.STOPPED
    assert read_report(config.run.folder).error.startswith("SIGTERM: stopped after step")
    submit(read_request(["experiments.train", *arguments, *here]))
    whole = parse(TrainConfig, [*words, *LONG, *place(tmp_path, "whole")])
    train.main(whole)
    assert_same_end(whole, config)


@pytest.mark.slow
def test_the_time_limits_signal_starts_the_run_again(tmp_path, words, here):
    arguments = [*words, *LONG, *place(tmp_path, "limited")]
    config, process = start(here, arguments)
    job = latest_jobs(tmp_path / "runs" / "test")["limited"]
    (task,) = Path(f"/proc/{job.job}/task/{job.job}/children").read_text().split()
    os.kill(int(task), signal.SIGUSR2)  # what submitit's process, which watches the time, does
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, output + errors
    log = Path(job.log).read_text()
    assert "SIGUSR2: stopped after step" in log
    assert "Requeued job" in log
    assert read_report(config.run.folder).state == "done"
    assert final(config).step == config.training.steps


@pytest.mark.slow
def test_two_processes_on_this_machine_train_as_one(tmp_path, words, here):
    arguments = [*words, "training.steps=4", "run.log_every=1", "execution.micro_batch=4"]
    both = [*arguments, *place(tmp_path, "both")]
    submit(read_request(["experiments.train", *both, *here, "cluster.processes=2"]))
    alone = parse(TrainConfig, [*arguments, *place(tmp_path, "alone")])
    train.main(alone)
    one, other = (metrics.read_metrics(c.run.folder) for c in (alone, parse(TrainConfig, both)))
    assert [r["cross_entropy"] for r in one] == pytest.approx([r["cross_entropy"] for r in other], rel=1e-5)


def test_debug_runs_in_this_process(tmp_path, words, monkeypatch):
    arguments = ["experiments.train", *words, "training.steps=2", *place(tmp_path, "here"), "cluster=debug"]
    submit(read_request(arguments))
    folder = tmp_path / "runs" / "test"
    assert read_report(folder / "here").state == "done"
    assert not (folder / ".code").exists(), "it is this process's own code"
    monkeypatch.setattr(batches, "prepare_text", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        submit(read_request([*arguments, *place(tmp_path, "broken")]))
    report = read_report(folder / "broken")
    assert (report.state, report.error) == ("failed", "ZeroDivisionError: division by zero")
    assert "prepare_text" in report.traceback


def test_a_config_file_is_that_of_the_submission(tmp_path, words):
    file, more = tmp_path / "mine.yaml", [*words, *place(tmp_path, "one"), "cluster=debug"]
    file.write_text("training: {steps: 2}\n")
    submit(read_request(["experiments.train", *more, f"config={file}"]))
    arguments = read_report(tmp_path / "runs" / "test" / "one").arguments
    assert f"config={file}" not in arguments
    file.write_text("training: {steps: 3}\n")
    assert parse(TrainConfig, list(arguments)).training.steps == 2
    # The same content is the same configuration, wherever it lies.
    file.write_text("training: {steps: 2}\n")
    again = file.rename(tmp_path / "moved.yaml")
    submit(read_request(["experiments.train", *more, f"config={again}"]))
    assert read_report(tmp_path / "runs" / "test" / "one").arguments == arguments


# --- states and records -----------------------------------------------------------------------------------------------


@pytest.fixture
def study(tmp_path):
    """A study of one training and its statistics, submitted to SLURM, and what the test lets SLURM say."""
    folder = tmp_path / "study"
    folder.mkdir()
    items = (item(folder, "a"), item(folder, "n_a", "nonzeros", ["a"]))
    write_submission(folder, Submission(items, str(tmp_path), {"a": 10}))
    assert read_submission(folder) == Submission(items, str(tmp_path), {"a": 10})
    note_submitted(folder, [Job("a", "7", "slurm", "log", now()), Job("n_a", "8", "slurm", "log", now())])
    return folder


def locally(study, process=4242):
    """Its items have been submitted to this machine since."""
    note_submitted(study, [Job(name, str(process), "local", "log", now()) for name in ("a", "n_a")])


def report(folder, state, job="7", **fields):
    folder.mkdir(exist_ok=True)
    return Report(job, state, "node1", 0, (), now(), **fields)


@pytest.fixture
def slurm_says(monkeypatch):
    """Lets SLURM's queue, and its accounting, know these jobs and no others."""

    def says(queue, accounting=()):
        monkeypatch.setattr("slurm.scheduler.queue", lambda jobs: queue)
        monkeypatch.setattr("slurm.scheduler.accounting", lambda jobs: dict(accounting))

    return says


def run(command, study, *options):
    """`python -m slurm.COMMAND` for this study."""
    config = {cancel: cancel.CancelConfig, status: status.StatusConfig, log: log.LogConfig}[command]
    command.main(parse(config, [f"study={study.name}", f"runs={study.parent}", *options]))


@pytest.mark.parametrize(
    ("seen", "reported", "state", "reason"),
    [
        (Seen("PENDING", reason="Resources"), None, State.QUEUED, "Resources"),
        (Seen("RUNNING"), "running", State.RUNNING, ""),
        (Seen("COMPLETING"), "failed", State.RUNNING, ""),
        (Seen("PENDING", reason="BeginTime"), "stopped", State.QUEUED, "BeginTime"),
        (Seen("FAILED"), "failed", State.FAILED, "ValueError: no"),
        (Seen("TIMEOUT"), "running", State.FAILED, "the job ended without a word (SLURM says TIMEOUT)"),
        (Seen("OUT_OF_MEMORY"), "running", State.FAILED, "the job ended without a word (SLURM says OUT_OF_MEMORY)"),
        (Seen("CANCELLED"), "stopped", State.CANCELLED, "outside of slurm.cancel"),
        (Seen("CANCELLED", reason="DependencyNeverSatisfied"), None, State.TODO, "no {}"),
        (None, "running", State.FAILED, "the job ended without a word (SLURM has forgotten it)"),
        (None, None, State.FAILED, "the job ended without a word (SLURM has forgotten it)"),
        (None, "stopped", State.STOPPED, "ValueError: no"),
        (None, "done", State.TODO, "no {}"),
    ],
)
def test_states(study, slurm_says, seen, reported, state, reason):
    slurm_says({"7": seen} if seen else {})
    if reported is not None:
        error = "" if reported in ("running", "done") else "ValueError: no"
        write_report(study / "a", report(study / "a", reported, error=error))
    states = item_states(study, read_submission(study))
    assert (states["a"].state, states["a"].reason) == (state, reason.format(study / "a" / "x"))
    assert states["n_a"].state is State.WAITS


@pytest.mark.parametrize(
    ("reported", "state"),
    [(None, State.QUEUED), ("running", State.QUEUED), ("failed", State.FAILED), ("done", State.TODO)],
)
def test_what_slurm_does_not_answer_for_may_still_run(study, monkeypatch, reported, state):
    """What is known without SLURM is shown; nothing is submitted or cancelled."""
    monkeypatch.setenv("PATH", "/nowhere")
    if reported is not None:
        write_report(study / "a", report(study / "a", reported))
    note_submitted(study, [Job("n_a", "4242", "local", "log", now())])
    states = item_states(study, read_submission(study), must_know=False)
    assert (states["a"].state, states["n_a"].state) == (state, State.WAITS)
    error = "there is no squeue on this machine, and the job is SLURM's"
    if state is State.QUEUED:
        assert states["a"].reason == f"unknown: {error}"
        with pytest.raises(RunError, match=rf"does not exist yet: the job is queued, unknown: {error}"):
            run(log, study, "item=a")
    before = (study / "jobs.jsonl").read_text()
    with pytest.raises(RunError, match=f"^{error}; asked for a, submitted to SLURM$"):
        run(cancel, study)
    assert (study / "jobs.jsonl").read_text() == before


def test_what_squeue_answered_holds_when_accounting_does_not_answer(study, monkeypatch):
    silent = Mock(side_effect=RunError("sacct did not answer within 120 s"))
    monkeypatch.setattr("slurm.scheduler.queue", lambda jobs: {"7": Seen("RUNNING")})
    monkeypatch.setattr("slurm.scheduler.accounting", silent)
    states = item_states(study, read_submission(study), must_know=False)
    assert (states["a"].state, states["a"].reason) == (State.RUNNING, "")
    assert (states["n_a"].state, states["n_a"].reason) == (State.QUEUED, "unknown: sacct did not answer within 120 s")


def test_an_item_whose_folder_was_deleted_was_not_killed(study):
    locally(study)
    assert "its folder was deleted" in item_states(study, read_submission(study))["a"].reason


def test_the_last_words_of_a_job_are_not_those_of_srun(study):
    """Which ends the other processes of a job, and says so for each."""
    (study / "log").write_text("out of memory\nsrun: error: n1: task 0: Exited with exit code 1\nsrun: Term\n")
    assert Job("a", "7", "slurm", str(study / "log"), now()).last_words() == "out of memory"


def test_a_study_that_loses_an_item_that_waits_or_runs_is_refused(tmp_path, slurm_says, monkeypatch):
    """It would run on, and neither `slurm.status` nor `slurm.cancel` would know of it."""
    monkeypatch.setenv("PATH", "/nowhere")
    words = ["study=six_runs", f"runs={tmp_path}", "cluster=slurm", "--dry-run"]
    folder, said = tmp_path / "six_runs", []
    folder.mkdir()
    before = read_request(words).items
    write_submission(folder, Submission(before, str(tmp_path), {}))
    note_submitted(folder, [Job(one.name, f"7_{n}", "slurm", "log", now()) for n, one in enumerate(before)])
    slurm_says({f"7_{len(before) - 1}": Seen("PENDING")})
    with pytest.raises(ConfigError, match=r"the study no longer has build \(queued\): wait for it, or cancel"):
        submit(read_request([*words, "kinds=[train,nonzeros]"]), said.append)
    slurm_says({})
    submit(read_request([*words, "kinds=[train,nonzeros]"]), said.append)
    assert "13 to submit, 0 on their way, 0 done" in said[0]


@pytest.mark.parametrize(("cluster", "place"), [("local", "SLURM"), ("slurm", "this machine")])
def test_a_study_is_in_one_place_at_a_time(study, monkeypatch, cluster, place):
    submission = read_submission(study)
    monkeypatch.chdir(submission.directory)
    elsewhere = Job("a", "7", "slurm" if cluster == "local" else "local", "log", now())
    alive = {one.name: ItemState(one, State.RUNNING, job=elsewhere) for one in submission.items}
    monkeypatch.setattr("slurm.submit.item_states", lambda *arguments: alive)
    monkeypatch.setattr("slurm.submit.shutil.which", lambda name: f"/usr/bin/{name}")
    configs = {each.name: config_of(each) for each in submission.items}
    cluster = load_cluster(cluster, ["kinds={}", "gpus=0"])
    with pytest.raises(ConfigError, match=f"a, n_a: still on {place}; wait for it"):
        submit(Request("study", study, submission.items, ("a", "n_a"), cluster, configs=configs))


def test_runs_left_behind_are_not_said_to_be_cancelled(study):
    (study / "a").mkdir()
    locally(study)
    with exclusive(study / "a", "item"), pytest.raises(RunError, match=r"no launcher to be told: a \(process 4242\)"):
        run(cancel, study)


def test_asking_who_holds_a_lock_does_not_take_it_away(tmp_path):
    """The query holds the lock for a moment, in which a job may start."""
    with (tmp_path / ".lock").open("w") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, (asking, fcntl.LOCK_UN)).start()
        with exclusive(tmp_path, "item"):
            assert is_held(tmp_path)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{"pid": 1, "host": "elsewhere"}', "the study was started on elsewhere: cancel it there"),
        *((damaged, r"queue\.json is damaged .*: end the launcher by hand$") for damaged in ("{", "[]", "[" * 100_000)),
    ],
)
def test_a_launcher_that_cannot_be_told_is_named(study, monkeypatch, record, message):
    """The lock of a shared folder is held here, too, but a process of that number is somebody else's."""
    locally(study)
    (study / "queue.json").write_text(record)
    monkeypatch.setattr("os.kill", lambda *arguments: pytest.fail(f"killed {arguments}"))
    with exclusive(study, "study"), pytest.raises(RunError, match=message):
        run(cancel, study)


def test_a_launcher_that_has_just_ended_needs_no_signal(study, capsys):
    locally(study)
    process = subprocess.Popen(["true"])
    process.wait()
    (study / "queue.json").write_text(json.dumps({"pid": process.pid, "host": platform.node()}))
    with exclusive(study, "study"):
        run(cancel, study)
    assert "cancelled 0 of 2 items: none ran" in capsys.readouterr().out


def test_the_number_of_a_launcher_that_was_killed_is_forgotten(tmp_path, words, monkeypatch):
    """Another process may have it by now, and `slurm.cancel` would end that."""
    record = tmp_path / "runs" / "test" / "queue.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"pid": os.getpid(), "host": platform.node()}))
    monkeypatch.setattr("slurm.submit._debug", lambda *arguments: None)
    submit(read_request(["experiments.train", *words, *place(tmp_path, "one"), "cluster=debug"]))
    assert not record.exists()


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    with pytest.raises(RunError, match=r"\.lock cannot be locked \(Function not impl.*\): choose a folder elsewhere"):
        exclusive(tmp_path / "a", "item").__enter__()


@pytest.mark.parametrize(
    ("known", "said"), [({}, "SLURM has forgotten it"), ({"7": Seen("NODE_FAIL", "node3")}, "SLURM says NODE_FAIL")]
)
def test_accounting_knows_what_the_queue_forgot_and_an_earlier_report_does_not_count(study, slurm_says, known, said):
    slurm_says({}, known)
    write_report(study / "a", report(study / "a", "failed", job="6", error="of the job before"))
    assert item_states(study, read_submission(study))["a"].reason == f"the job ended without a word ({said})"


def test_nothing_submitted(tmp_path):
    write_submission(tmp_path, Submission((), "/", {}))
    with pytest.raises(ConfigError, match=f"nothing was submitted in .*; there are: {tmp_path.name}"):
        read_submission(tmp_path.parent / "other")


def test_a_command_without_a_study_lists_those_that_were_submitted(tmp_path):
    assert submitted_studies(tmp_path / "none") == []
    write_submission(tmp_path / "scaled", Submission((), "/", {}))
    with pytest.raises(ConfigError, match=r"name a study, study=NAME; submitted in .*: scaled$"):
        _ = SubmittedStudy(runs=str(tmp_path)).folder
    for name in ("scaled", "experiments/studies/scaled.yaml"):
        assert SubmittedStudy(name, str(tmp_path)).folder == tmp_path / "scaled"


def exit_code(tmp_path, kind="train"):
    """That of the job of an item `a`; None where it just returns."""
    try:
        ItemJob(item(tmp_path, "a", kind), str(tmp_path), 60, 120)()
    except SystemExit as ended:
        return ended.code


@pytest.fixture
def slurm_job(tmp_path, monkeypatch):
    """As in the last task of a job array, which has the array's own id. `squeue` and `scontrol` are files of shell,
    which the test writes; the job's process stops by a signal (or by none), and submitit requeues it. Returns its exit
    code."""
    variables = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    variables |= {"SUBMITIT_FOLDER": str(tmp_path / ".jobs")}
    for name, value in (variables | {"SUBMITIT_EXECUTOR": "slurm", "PATH": f"{tmp_path}:/usr/bin:/bin"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("slurm.job.REQUEUE_PAUSES", (0.01, 0.01))

    def run(*, squeue=None, scontrol="true", stop="SIGUSR2", kind="train"):
        for name, script in {"squeue": squeue, "scontrol": scontrol}.items():
            if script is not None:
                (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
                (tmp_path / name).chmod(0o700)

        def requeue(number, frame):
            SlurmJobEnvironment()._requeue(3)
            sys.exit(255)

        if stop is not None:
            monkeypatch.setattr("slurm.job._run", Mock(side_effect=Stopped("stopped", stop)))
        before = signal.signal(signal.SIGUSR2, requeue)
        try:
            return exit_code(tmp_path, kind)
        finally:
            signal.signal(signal.SIGUSR2, before)

    return run


def squeue(state, left="1:00:00"):
    """What squeue says of the two tasks of job 7, when it is asked for them."""
    one = f"|{state}|node1|{left}|None"
    return f"case $* in *--jobs=7_1*) ;; *) echo '7_0{one}' ;; esac; echo '7_1{one}'"


@pytest.mark.parametrize(
    ("says", "stop", "cancelled", "code"),
    [
        (squeue("RUNNING"), "SIGTERM", None, 255),
        (squeue("RUNNING"), "SIGUSR2", None, 255),
        (squeue("RUNNING"), "SIGUSR2", "6_1", 255),  # an earlier job of the item
        (squeue("RUNNING"), "SIGUSR2", "7_1", EXIT_STOPPED),
        (squeue("COMPLETING"), "SIGTERM", None, EXIT_STOPPED),
        (squeue("RUNNING"), "", None, EXIT_STOPPED),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "SIGUSR2", None, EXIT_STOPPED),
    ],
)
def test_when_a_job_of_slurm_requeues_itself(tmp_path, slurm_job, says, stop, cancelled, code):
    """Not when `slurm.cancel` has stopped it, of which SLURM does not know yet, when it is being cancelled or requeued
    by someone (COMPLETING), for a limit of the run's own, nor when SLURM has forgotten it."""
    if cancelled is not None:
        note_submitted(tmp_path, [Job("a", cancelled, "slurm", "log", now(), cancelled=True)])
    assert slurm_job(squeue=says, scontrol=f'echo "$*" > {tmp_path}/told', stop=stop) == code
    assert (tmp_path / "told").exists() == (code == 255)
    assert code != 255 or (tmp_path / "told").read_text() == "requeue 7_1\n"
    assert read_report(tmp_path / "a").state == "stopped"


@pytest.mark.parametrize(
    ("kind", "left", "again"),
    [
        ("nonzeros", "1-00:10:00", True),
        ("nonzeros", "10:00", True),
        ("nonzeros", "UNLIMITED", True),
        ("nonzeros", "2:30", False),
        ("nonzeros", "INVALID", False),
        ("train", "1:59", True),
    ],
)
def test_only_a_training_is_requeued_at_its_time_limit(tmp_path, slurm_job, kind, left, again):
    """Other items begin anew: they would reach it again. When they were preempted before, they are requeued."""
    message = r"a needs more than the 60 minutes of its job, .* raise cluster.minutes"
    with contextlib.nullcontext() if again else pytest.raises(RunError, match=message):
        assert slurm_job(squeue=squeue("RUNNING", left), kind=kind) == 255
    assert read_report(tmp_path / "a").state == ("stopped" if again else "failed")


@pytest.mark.parametrize("kind", ["train", "nonzeros"])
def test_a_signal_ends_an_item_of_slurm_that_does_not_listen(tmp_path, slurm_job, monkeypatch, kind):
    """It must not reach submitit's handler before it is known whether the job is to be requeued."""
    went_on = []

    def interrupted(arguments):
        os.kill(os.getpid(), signal.SIGUSR2)
        went_on.append(True)

    monkeypatch.setattr("slurm.job.entry_point", lambda item: (interrupted, None))
    assert slurm_job(squeue=squeue("COMPLETING"), kind=kind, stop=None) == EXIT_STOPPED
    assert not went_on


def test_on_this_machine_only_a_training_is_started_again(tmp_path, local_job, monkeypatch):
    monkeypatch.setattr("slurm.job.entry_point", lambda item: (lambda _: os.kill(os.getpid(), signal.SIGUSR2), None))
    raised = []
    monkeypatch.setattr("slurm.job.signal.raise_signal", raised.append)
    with pytest.raises(RunError, match="a needs more than the 60 minutes of its job"):
        exit_code(tmp_path, "nonzeros")
    assert not raised
    assert exit_code(tmp_path) == EXIT_STOPPED
    assert raised == [signal.SIGUSR2]


@pytest.fixture
def measured(tmp_path, slurm_says):
    """A study of one measurement, which a job of SLURM has made with `tokens=512`; a second job, 9, makes it again with
    `tokens=1024`. The test says how far that is."""
    folder, expected = tmp_path / "study", (Expected((("op", "nonzeros"),)),)
    one = Item("n_a", "nonzeros", "experiments.gather_nonzeros", (), folder / "n_a", expected=expected)
    old, new = (replace(one, arguments=(f"checkpoint={tmp_path}", f"tokens={n}", "groups=[4]")) for n in (512, 1024))
    old.folder.mkdir(parents=True)
    save_config(config_of(old), old.folder / "config.yaml")
    known = {"study": "study", "item": "n_a", "op": "nonzeros", "metric": "nonzeros", "value": 3.0}
    write_rows(old.folder / "rows.csv", [make_row(**known)])
    write_submission(folder, Submission((new,), str(tmp_path), {}))
    note_submitted(folder, [Job("n_a", "9", "slurm", "log", now())])

    def state(reported, seen=None, config=""):
        if reported is not None:
            write_report(old.folder, Report("9", reported, "n", 0, new.arguments, now(), config=config))
        slurm_says({"9": Seen(seen)} if seen else {})
        return item_states(folder, read_submission(folder))["n_a"]

    state.old, state.new, state.folder = old, new, folder
    return state


def test_results_of_earlier_options_are_not_those_of_a_job_that_failed(measured):
    assert measured("failed").state is State.FAILED
    assert same_arguments(measured.new) == "tokens was 512, now 1024"
    with pytest.raises(RunError, match="n_a: tokens was 512, now 1024"):
        collect(measured.folder, measured.folder.with_suffix(".collected"))
    assert measured("stopped").state is State.STOPPED


def test_a_job_that_is_done_has_made_the_configuration_that_lies_there(measured):
    assert measured("done", config=config_digest(measured.old.folder)).state is State.DONE, "it says so"
    assert collect(measured.folder, measured.folder.with_suffix(".collected")) == {}, "of a study without trainings"
    save_config(config_of(measured.new), measured.old.folder / "config.yaml")
    assert measured(None).state is State.DONE, "made again by hand, with the options asked for"
    save_config(config_of(measured.old), measured.old.folder / "config.yaml")
    (measured.old.folder / "config.yaml").write_text((measured.old.folder / "config.yaml").read_text() + "\n")
    assert same_arguments(measured.new) == "tokens was 512, now 1024", "made again by hand, with others"


@pytest.mark.parametrize(
    ("reported", "seen", "state"),
    [(None, "PENDING", State.QUEUED), ("running", "RUNNING", State.RUNNING), ("stopped", "PENDING", State.QUEUED)],
)
def test_a_job_that_makes_results_anew_is_on_its_way(measured, in_slurm, capsys, reported, seen, state):
    save_config(config_of(measured.new), measured.old.folder / "config.yaml")
    assert measured(reported, seen).state is state
    run(cancel, measured.folder)
    assert "cancelled 1 of 1 items: n_a" in capsys.readouterr().out
    assert "9" in in_slurm
    assert measured(reported).state is State.DONE, "once it is over, the results count"


@pytest.mark.parametrize("busy", ["squeue", "scontrol"])
def test_a_job_asks_a_busy_controller_again(tmp_path, slurm_job, busy):
    scripts = {"squeue": squeue("RUNNING"), "scontrol": "true"}
    once = f"test -e {tmp_path}/asked || {{ touch {tmp_path}/asked; echo 'Unable to contact controller' >&2; exit 1; }}"
    assert slurm_job(**scripts | {busy: f"{once}\n{scripts[busy]}"}) == 255


def test_a_job_that_no_controller_answers_has_failed(tmp_path, slurm_job):
    with pytest.raises(RunError, match=r"Not requeued: squeue failed: timed out; slurm.submit continues it"):
        slurm_job(squeue="echo 'timed out' >&2; exit 1")
    found = read_report(tmp_path / "a")
    assert (found.state, found.error.partition(": ")[0]) == ("failed", "RunError")


def test_a_container_without_the_clients_of_slurm_says_so_at_once(tmp_path, slurm_job, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match=r"stopped. Not requeued: there is no squeue here. A container needs SLURM's"):
        slurm_job()
    assert "this job ends for good: there is no squeue here" in capsys.readouterr().err.splitlines()[0]
    assert read_report(tmp_path / "a").state == "failed"


@pytest.fixture
def local_job(monkeypatch):
    """As in a process that submitit starts on this machine, which ignores SIGTERM."""
    for name, value in {"JOB_ID": "7", "NTASKS": "1", "JOB_NUM_NODES": "1", "NODEID": "0", "GLOBALID": "0"}.items():
        monkeypatch.setenv(f"SUBMITIT_LOCAL_{name}", value)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("when", ["imports", "runs"])
def test_an_item_that_does_not_listen_is_stopped_on_this_machine(tmp_path, local_job, monkeypatch, when):
    went_on = []

    def terminated(*_):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
            went_on.append(True)
        except Exception:  # noqa: BLE001 (as some packages do that import others)
            pass

    def entry_point(item):
        if when == "imports":
            terminated()
        return terminated, None

    monkeypatch.setattr("slurm.job.entry_point", entry_point)
    assert exit_code(tmp_path) == EXIT_STOPPED
    assert not went_on
    found = read_report(tmp_path / "a")
    assert (found.state, found.error) == ("stopped", "SIGTERM: the same command starts it again")


def test_a_process_does_not_wait_for_one_that_has_failed(tmp_path, local_job, monkeypatch):
    """As for a GPU, which never says that the other one is gone."""
    left, before = threading.Event(), []
    monkeypatch.setenv("SUBMITIT_LOCAL_NTASKS", "2")
    monkeypatch.setattr("slurm.job.TorchDistributedEnvironment", Mock())
    monkeypatch.setattr("slurm.job.entry_point", lambda item: (lambda arguments: left.wait(10), None))
    monkeypatch.setattr("slurm.job.WATCH_SECONDS", 0.01)
    monkeypatch.setattr("slurm.job.LEAVE_SECONDS", 0.1)
    monkeypatch.setattr("os._exit", lambda code: left.set())
    (tmp_path / "a").mkdir()
    for job, when, ended in (("6", now(), "9999"), ("7", "2000", "2001")):  # of another job, and before it began again
        write_report(tmp_path / "a", Report(job, "failed", "n", 0, (), when, ended, "OSError: of old"), rank=int(job))

    def fail():
        before.append(left.is_set())
        write_report(tmp_path / "a", Report("7", "failed", "n", 0, (), now(), now(), "ValueError: the cause"), rank=1)

    threading.Timer(0.5, fail).start()
    with pytest.raises(RunError):
        exit_code(tmp_path)
    assert left.is_set()
    assert before == [False]
    assert read_report(tmp_path / "a").error == "ValueError: the cause", "the first of the job's failures"


def test_an_item_that_leaves_no_results_has_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("SUBMITIT_DEBUG_JOB_ID", "D")
    monkeypatch.setattr("slurm.job.entry_point", lambda item: (lambda arguments: 0, None))
    with pytest.raises(RunError, match=r"ended without its results: no .*x"):
        exit_code(tmp_path)
    monkeypatch.setattr("slurm.job.entry_point", lambda item: (lambda arguments: 3, None))
    with pytest.raises(RunError, match="ended with code 3"):
        exit_code(tmp_path)
    found = read_report(tmp_path / "a")
    assert (found.state, found.traceback) == ("failed", "")


def test_a_job_whose_folder_is_gone_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("SUBMITIT_DEBUG_JOB_ID", "D")
    with pytest.raises(FileNotFoundError):
        ItemJob(item(tmp_path, "a"), str(tmp_path / "gone"), 60, 120)()
    found = read_report(tmp_path / "a")
    assert (found.state, found.error.endswith(f"No such file or directory: '{tmp_path}/gone'")) == ("failed", True)


def test_submitit_says_everything_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SUBMITIT_DEBUG_JOB_ID", "D")
    logging.config.dictConfig(submitit.core.logger.CONFIG)
    monkeypatch.setattr("slurm.job._run", lambda item, job: submitit.core.logger.warning("Bypassing signal"))
    exit_code(tmp_path)
    assert "".join(capsys.readouterr()).count("Bypassing signal") == 1


def test_one_process_at_a_time_runs_an_item(tmp_path, monkeypatch):
    monkeypatch.setenv("SUBMITIT_DEBUG_JOB_ID", "D")
    (tmp_path / "a").mkdir()
    with exclusive(tmp_path / "a", "item"), pytest.raises(RunError, match="another process is running the item"):
        exit_code(tmp_path)


def test_a_job_that_has_no_report_yet_is_starting(study):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "submitit"])
    try:
        locally(study, process.pid)
        (study / "a").mkdir()
        command = Path(f"/proc/{process.pid}/cmdline")  # empty while it is being executed
        programs.wait_for(command.read_bytes, process)
        found = item_states(study, read_submission(study))["a"]
        assert (found.state, found.reason) == (State.QUEUED, "starting")
    finally:
        process.kill()
        process.wait()
    found = item_states(study, read_submission(study))["a"]
    assert (found.state, found.reason) == (State.FAILED, WITHOUT_A_WORD)


@pytest.mark.parametrize("line", [b"{", b"[]", b"\xff", b"[" * 10_000])
def test_a_record_that_cannot_be_read_leaves_the_progress_empty(study, in_slurm, line):
    (study / "a").mkdir(exist_ok=True)
    (study / "a" / "metrics.jsonl").write_bytes(line + b"\n")
    (study / "n_a").mkdir(exist_ok=True)
    (study / "n_a" / "progress.json").write_bytes(line)
    (study / "n_a" / "needs.json").write_bytes(line)
    _, made, _ = manage.lines(study)
    assert [each["step"] for each in made] == ["", ""]


def narrow(title, lines, room):
    """The table on a terminal of 70 characters."""
    terminal = io.StringIO()
    Console(file=terminal, width=70).print(table(title, lines, room, 70))
    return terminal.getvalue()


def test_progress_is_shown(study, slurm_says):
    slurm_says({"7": Seen("RUNNING", "node[1-2]"), "8": Seen("PENDING")})
    write_report(study / "a", report(study / "a", "running"))
    record = {"step": 4, "tokens": 400, "cross_entropy": 3.5, "tokens_per_s": 1.0, "nonzeros": [10.0, 30.0]}
    (study / "a" / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    title, made, _ = manage.lines(study)
    assert [*made[0].values()] == ["a", "running", "4/10", "3.500", "20.0", "1", "node[1-2]", "", "10:00 min", ""]
    assert title == "study study: 2 items: 1 running, 1 queued"
    shown = narrow(title, made, 1)
    assert "3.500" in shown
    assert "10:00 min" in shown
    assert "n_a" not in shown
    assert "and 1 more" in shown
    failed = made[1] | {"item": "of_a_long_name", "state": "failed", "": "the job ended without a word"}
    shown = narrow(title, [*made, failed], None)
    assert "the job ended without" in shown
    assert not {"node", "left"} & {*shown.split()}, "columns that matter less make room"
    assert [duration(s) for s in (8, 125, 11220, 183600)] == ["8 s", "2:05 min", "3:07 h", "2 d 03 h"]


def test_the_time_left_is_what_is_expected_until_there_is_more_to_judge_by(monkeypatch, tmp_path):
    clock, said = itertools.count(0, 20), []
    monkeypatch.setattr("slurm.display.time", SimpleNamespace(monotonic=lambda: next(clock)))
    display = Display("study", {"a": 100.0, "b": 100.0}, {}, said.append)
    display.show([item(tmp_path, "a")])
    assert said[0] == "-- study study: 2 items: 1 running, 1 to do, 20 s, about 3:00 min left"


def test_small_runs_share_a_gpu_and_measurements_have_it_alone(queue, tmp_path):
    items = [item(tmp_path, f"run{n}") for n in range(3)] + [item(tmp_path, "speed", "bench_forward")]
    shared = ["total_gpus=2", "parallel=8", "gpus=1", "kinds={train: [runs_per_gpu=2]}"]
    assert queue(items, *shared, shared=True) == {}
    assert queue.started[:3] == [("run0", (0,)), ("run1", (1,)), ("run2", (0,))]
    assert dict(queue.started)["speed"] == (1,), "the first GPU that is empty again"
    assert queue.most[0] == 3


def test_what_a_training_is_waited_for_comes_before_the_next_training(queue, tmp_path):
    items = [item(tmp_path, name) for name in ("a", "b", "c")] + [item(tmp_path, "n_a", "nonzeros", ["a"])]
    assert queue(items, "parallel=1") == {}
    assert [name for name, _ in queue.started] == ["a", "n_a", "b", "c"]


# --- cancelling -------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_slurm(monkeypatch, slurm_says, own_clock):
    """Jobs that run until they are signalled or cancelled, and what SLURM is told to cancel."""
    cancelled = []
    slurm_says({})
    monkeypatch.setattr("slurm.scheduler.queue", lambda jobs: {job: Seen("RUNNING") for job in {*jobs} - {*cancelled}})
    monkeypatch.setattr("slurm.scheduler.cancel", lambda jobs: cancelled.extend(jobs))
    monkeypatch.setattr("slurm.scheduler.signal", lambda jobs, name: cancelled.extend(jobs))
    return cancelled


@pytest.mark.parametrize(("late", "told"), [(False, ["8"]), (True, ["8", "7"])], ids=["ends in time", "too late"])
def test_cancelling_waits_for_checkpoints(study, monkeypatch, slurm_says, own_clock, late, told):
    """The job that waits is cancelled at once, and the one that runs only if it does not end by itself."""
    states = {"7": Seen("RUNNING"), "8": Seen("PENDING")}
    did = []
    note_submitted(study, [Job("a", "7", "slurm", "log", now(), signal_seconds=77)])

    def signalled(jobs, name):
        assert latest_jobs(study)["a"].cancelled, "the job must see it when the signal comes"
        did.append((*jobs, name))
        states["7"] = Seen("RUNNING") if late else Seen("FAILED")

    began = time.monotonic()
    slurm_says(states)
    monkeypatch.setattr("slurm.scheduler.cancel", did.extend)
    monkeypatch.setattr("slurm.scheduler.signal", signalled)
    run(cancel, study)
    assert did == [told[0], ("7", "USR2"), *told[1:]]
    assert (time.monotonic() - began > 77) == late
    assert time.monotonic() - began < 85


def test_a_job_that_is_requeued_while_it_is_cancelled_does_not_come_back(study, monkeypatch, slurm_says, own_clock):
    """Its time limit came at the same moment, and it had not seen the note yet."""
    told = []
    seen = {"7": Seen("RUNNING"), "8": Seen("RUNNING")}
    slurm_says(seen)
    monkeypatch.setattr("slurm.scheduler.cancel", told.append)
    monkeypatch.setattr("slurm.scheduler.signal", lambda jobs, name: seen.update({"7": Seen("PENDING"), "8": Seen("")}))
    run(cancel, study)
    assert told == [[], ["7"], []]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("items.json", "delete it and submit the study again"),
        ("jobs.jsonl", "delete the line"),
        ("a/job.json", "delete it"),
    ],
)
@pytest.mark.parametrize("content", [b"{", b"[]", b'{"job": 7}', b"\xff", b"[" * 100_000])
def test_a_damaged_file_is_named_with_what_to_do(study, in_slurm, name, remedy, content):
    (study / "a").mkdir()
    (study / name).write_bytes(content + b"\n")
    for command in (status, cancel):
        with pytest.raises(RunError, match=rf"{name}.* is damaged .*: {remedy}$"):
            run(command, study)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_commands_take_the_file_of_a_study(study, in_slurm, monkeypatch, capsys, elsewhere):
    """Also where it names a folder of runs."""
    monkeypatch.chdir(study.parent)
    file = study.parent / "study.yaml"
    file.write_text(f"kinds: [build]\nruns: {study.parent}\n" if elsewhere else "kinds: [build]\n")
    if not elsewhere:
        (study.parent / "runs").mkdir()
        study.rename(study.parent / "runs" / "study")
    for command, cls in ((status.main, status.StatusConfig), (cancel.main, cancel.CancelConfig)):
        command(parse(cls, [f"study={file}"]))
    assert "cancelled 2 of 2 items: a, n_a" in capsys.readouterr().out


def test_a_line_that_is_being_written_is_not_read_yet(study):
    with (study / "jobs.jsonl").open("a") as file:
        file.write('{"item": "a", "jo')
    assert {name: job.job for name, job in latest_jobs(study).items()} == {"a": "7", "n_a": "8"}


# --- the same name with other options ---------------------------------------------------------------------------------


def test_other_options_under_the_name_of_a_waiting_run_are_refused(tmp_path, monkeypatch, words, in_slurm):
    said, place_ = [], place(tmp_path, "one")
    monkeypatch.setattr("slurm.submit.shutil.which", lambda name: f"/usr/bin/{name}")
    refuse_the_second = Mock(side_effect=[["99"], RunError("SLURM refuses the job: no such partition")])
    numbers = map(str, itertools.count())
    command = ["experiments.train", *words, *place_, "cluster=slurm", "cluster.kinds={}", "cluster.gpus=0"]
    monkeypatch.setattr("slurm.submit.submit_slurm", refuse_the_second)
    elsewhere = ["experiments.train", *words, *place(tmp_path / "refused", "one"), *command[-3:]]
    with pytest.raises(
        RunError, match=r"one, after afterok:99: SLURM refuses .* submitted before: 99 .slurm.cancel study=test"
    ):
        submit(read_request(elsewhere), said.append)
    monkeypatch.setattr("slurm.submit.submit_slurm", lambda *given: [next(numbers) for _ in given[-1]])
    submit(read_request(command), said.append)
    assert "job 1: one, after afterok:0" in said
    folder = tmp_path / "runs" / "test"
    assert latest_jobs(folder)["one"].signal_seconds == 180
    assert f"    log: {folder / '.jobs' / '1_0_log.out'}" in said
    assert f"python -m slurm.status study=test runs={tmp_path / 'runs'} shows how far it is" in said
    submit(read_request([*command, "run.log_every=3"]), said.append)
    assert "0 to submit, 2 on their way" in said[-1], "an option without an effect on results"
    with pytest.raises(
        ConfigError, match=r"one is running with other options: training.seed was 0, now 1\. Give another run.item$"
    ):
        submit(read_request([*command, "training.seed=1"]), said.append)
    with pytest.raises(ConfigError, match="one is running with other options"):
        submit(read_request([*command, "training.seed=1", "--dry-run"]), said.append)
    submit(read_request([*command, "--dry-run"]), said.append)
    assert "0 to submit, 2 on their way" in said[-2]
    assert "# Nothing was submitted. 0 items in 0 jobs of SLURM" in said[-1]
    before = len(read_submission(folder).items)
    swept = [argument for argument in command if not argument.startswith(("run.item", "run.dir"))]
    submit(read_request([*swept, f"run.dir={folder}", "training.seed=1,2"]), said.append)
    assert len(read_submission(folder).items) == before + 2


def test_a_folder_with_a_run_of_other_options_is_refused_before_it_waits(tmp_path, words):
    command = ["experiments.train", *words, "training.steps=2", *place(tmp_path, "one"), "cluster=debug"]
    submit(read_request(command))
    with pytest.raises(
        ConfigError, match=r"one holds a run with other options: sparsity.l1 was 0.0, now 0.5.*another run.item$"
    ):
        submit(read_request([*command, "sparsity.l1=0.5"]))
    trainings = {"one": [*words, "training.steps=2", "sparsity.l1=0.5"]}
    (tmp_path / "test.yaml").write_text(json.dumps({"trainings": trainings}))
    with pytest.raises(ConfigError, match=r"sparsity.l1 was 0.0, now 0.5\. Delete the folder, or give it another name"):
        submit(read_request([f"study={tmp_path / 'test.yaml'}", f"runs={tmp_path / 'runs'}"]))


# --- logs -------------------------------------------------------------------------------------------------------------


def test_the_log_of_an_item_is_followed_until_its_job_ends(study, monkeypatch, capsysbinary):
    path = study / ".jobs" / "7_0_log.out"
    path.parent.mkdir()
    note_submitted(study, [Job("a", "7", "slurm", str(path), now())])
    states = iter(["RUNNING", "RUNNING", "COMPLETED"])
    monkeypatch.setattr("slurm.scheduler.queue", lambda jobs: {"7": Seen(next(states))})
    monkeypatch.setattr("slurm.scheduler.accounting", lambda jobs: {})
    monkeypatch.setattr(manage, "STATE_SECONDS", 0)
    turns = iter([b"first\n", b"second\n", b"third\n"])

    def write_more(seconds):
        with path.open("ab") as file:
            file.write(next(turns))

    monkeypatch.setattr(manage.time, "sleep", write_more)
    run(log, study, "item=a", "follow=true")
    assert capsysbinary.readouterr().out.endswith(b"(a, running) <==\nfirst\nsecond\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["item=b"], "item=b: wanted one of a, n_a"),
        ([], "item=: wanted one of a, n_a"),
        (
            ["item=a"],
            "log does not exist yet: the job is failed, the job ended without a word .*; follow=true waits for it",
        ),
    ],
)
def test_a_log_that_is_not_there(study, slurm_says, words, message):
    slurm_says({})
    with pytest.raises(RunError, match=message):
        run(log, study, *words)


# --- at the end of a study --------------------------------------------------------------------------------------------


def test_figures_that_a_failed_study_did_not_make_are_not_named(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalQueue, "run", lambda queue, names: dict.fromkeys(names, "failed"))
    said = []
    with pytest.raises(SubmissionFailed, match="14 of 14 items are not done"):
        submit(read_request(["study=six_runs", f"runs={tmp_path}"]), said.append)
    assert f"runs and their logs:    {tmp_path / 'six_runs'}" in said
    assert not any("tables and figures" in line for line in said)


@pytest.mark.parametrize(
    ("name", "words", "compared"),
    [("demo", [], True), ("demo", ["only=[]", "data=path:/x"], False), ("smoke", [], False), ("gpu", [], False)],
)
def test_a_study_that_is_committed_is_compared_with_its_rows(tmp_path, name, words, compared):
    assert is_as_committed(load_study(name, [f"runs={tmp_path}", *words])) == compared


@pytest.mark.slow
def test_a_study_of_models_on_another_text_is_not_compared(tmp_path):
    """As with the paper's data, the default of the GPU studies: the committed models had another text."""
    study = load_study("scaled", [f"runs={tmp_path}"])
    item = tmp_path / "scaled" / "21m_l1_0_seed_0"
    item.mkdir(parents=True)
    rows = read_rows(FIGURES / "h200" / "rows.csv")
    rows = rows[rows["item"].eq(item.name) & rows["study"].eq("scaled")]
    rows.to_csv(item / "rows.csv", index=False)
    assert is_as_committed(study)
    rows.assign(text=study.data).to_csv(item / "rows.csv", index=False)
    assert not is_as_committed(study)
