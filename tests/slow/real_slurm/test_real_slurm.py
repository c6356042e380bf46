"""Launching on a real SLURM with two nodes, which runs in a folder of this machine (mini_slurm.py)."""

import json
import os
import re
import signal
import stat
from pathlib import Path

import pytest
from mini_slurm import wait_until
from programs import python
from same_run import assert_same_end, without_times

from analysis.load import load
from experiments import train
from experiments.models.checkpoint import checkpoint_path, newest_checkpoint, read_checkpoint
from experiments.run.config import parse
from experiments.run.errors import RunError
from experiments.run.train_config import TrainConfig
from experiments.study.graph import State
from experiments.training import metrics
from slurm import cancel, collect, log, scheduler, status
from slurm.records import latest_jobs

# Long enough for a signal to arrive in the middle, with everything on that a checkpoint must hold.
LONG = (
    "training.steps=300",
    "sparsity.l1=1e-3",
    "sparsity.dead_neuron_reinit=true",
    "run.log_every=5",
    "run.evaluate_every=150",
    "run.checkpoint_every=50",
)


@pytest.fixture
def forked():
    """Lets the processes of many short jobs be forked: each has a client of the server of the tests for a Python."""
    return {"python": json.dumps(python())}


def step(config):
    record = metrics.last_record(config.run.folder)
    return record["step"] if record else 0


def report_of(config):
    return json.loads((config.run.folder / "job.json").read_text())


@pytest.fixture(scope="session")
def whole(arguments, tmp_path_factory):
    """The long training in one go, in this process."""
    place = f"run.dir={tmp_path_factory.mktemp('whole')}"
    config = parse(TrainConfig, arguments(*LONG, place, "run.progress=none"))
    train.main(config)
    return config


# --- single jobs and arrays -------------------------------------------------------------------------------------------


def test_a_single_job(launched, arguments, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "do-not-write-me-down")
    config = launched.train("one", arguments("training.steps=4"))
    launched.wait(State.DONE)
    wait_until(lambda: report_of(config)["state"] == "done", 120, "end of the job")
    environment = json.loads((config.run.folder / "environment.json").read_text())
    about = json.loads(next(launched.folder.glob(".code/*/snapshot.json")).read_text())
    assert (environment["revision"], environment["dirty"]) == (about["revision"], about["dirty"])
    written = [path for path in launched.folder.rglob("*") if path.is_file() and ".code" not in path.parts]
    assert not any(b"do-not-write-me-down" in path.read_bytes() for path in written)
    assert stat.S_IMODE(launched.folder.stat().st_mode) == 0o700
    launched.train("one", arguments("training.steps=4"))
    assert "0 to submit, 0 on their way, 2 done" in launched.said[-1], "the second time, nothing is submitted"


def write_study(launched, name, training, arguments=None, **fields):
    """A study's file, and the words that submit it; `launched` looks at it from then on."""
    path = launched.runs.parent / f"{name}.yaml"
    path.write_text(json.dumps({**fields, "arguments": {"train": training, **(arguments or {})}}))
    launched.folder = launched.runs / name
    return [f"study={path}", f"runs={launched.runs}"]


def test_a_sweep_of_several_processes_whose_text_is_made_without_them(launched, arguments, capsys):
    """More processes than a preset's micro-batch of 16 leaves sequences for. The text is a job of its own, which the
    trainings wait for."""
    swept = [
        *arguments("training.steps=2"),
        "execution.micro_batch=16",
        "training.seed=0,1",
        f"run.dir={launched.folder}",
        f"data.cache_dir={launched.runs.parent / 'cache'}",  # of its own: another test has made the tokens already
    ]
    launched.submit("experiments.train", *swept, nodes=2, processes=2)
    text, *trainings = (job for job in launched.said if job.startswith("job "))
    assert len(trainings) == 1
    assert text.split()[1].strip(":") in trainings[0].partition("after")[2]
    states = launched.wait(State.DONE)
    (prepared,) = [name for name, one in states.items() if one.item.kind == "prepare_data"]
    assert "tokenizing" in launched.log(prepared)
    assert "tokenizing" not in launched.log("seed_0") + launched.log("seed_1")
    assert "micro-batches have 2 sequences" in launched.log("seed_0")
    log.main(parse(log.LogConfig, [f"study={launched.folder.name}", f"runs={launched.runs}", "item=seed_1"]))
    assert "training.seed=1" in capsys.readouterr().out


def test_an_array_with_a_cap_submitted_twice(launched, arguments, forked):
    grid = {"training.seed": ["0", "1", "2", "3"]}
    words = write_study(launched, "capped", arguments("training.steps=4"), grid=grid, kinds=["train"])
    launched.submit(*words, parallel=2, **forked)
    launched.submit(*words, parallel=2, **forked)
    assert "0 to submit, 5 on their way, 0 done" in launched.said[-1]
    jobs = {job.job for name, job in latest_jobs(launched.folder).items() if name.startswith("seed_")}
    (array,) = {job.partition("_")[0] for job in jobs}
    assert jobs == {f"{array}_{task}" for task in range(4)}
    most = 0

    def over():
        nonlocal most
        found = [one.state for one in launched.states().values()]
        most = max(most, found.count(State.RUNNING))
        return set(found) == {State.DONE}

    wait_until(over, 300, "end of the array")
    assert most == 2


def test_a_failure_keeps_its_traceback_and_only_it_is_submitted_again(launched, arguments, forked, capsys):
    options = {"grid": {"training.seed": ["0", "1"]}, "kinds": ["train", "nonzeros"]}
    options["arguments"] = {"nonzeros": ["tokens=512", "groups=[4]"]}
    words = write_study(launched, "broken", arguments("training.steps=4"), **options)
    bad = launched.folder / "seed_1"
    bad.mkdir(parents=True)
    (bad / "checkpoints").write_text("in the way of the checkpoints")
    launched.submit(*words, **forked)
    states = launched.wait(State.DONE, State.FAILED, State.WAITS)
    found = {name: one.state for name, one in states.items() if one.item.kind != "prepare_data"}
    assert found == {
        "seed_0": State.DONE,
        "seed_1": State.FAILED,
        "nonzeros_seed_0": State.DONE,
        "nonzeros_seed_1": State.WAITS,
    }
    status.main(parse(status.StatusConfig, ["study=broken", f"runs={launched.runs}"]))
    shown = capsys.readouterr().out
    assert "Traceback" not in shown, "of an error that its message explains"
    assert "checkpoints" in shown
    assert "study broken: 5 items: 1 failed, 1 waits, 3 done" in shown
    (bad / "checkpoints").unlink()
    before = {name: job.job for name, job in latest_jobs(launched.folder).items()}
    launched.submit(*words, "only=[seed_1]", **forked)
    states = launched.wait(State.DONE, State.TODO)
    assert states["nonzeros_seed_1"].state is State.TODO, "SLURM dropped its job, nobody cancelled it"
    launched.submit(*words, **forked)
    launched.wait(State.DONE)
    again = {name for name, job in latest_jobs(launched.folder).items() if job.job != before[name]}
    assert again == {"seed_1", "nonzeros_seed_1"}


# --- stopped, requeued, cancelled -------------------------------------------------------------------------------------


def test_preemption_continues_bit_by_bit(launched, arguments, whole):
    victim = launched.train("victim", arguments(*LONG), partition="scavenge")
    wait_until(lambda: step(victim) >= 20, 240, "progress")
    launched.train("winner", arguments("training.steps=2"), nodes=2, sbatch="{exclusive: 'true'}")
    launched.wait(State.DONE)
    assert re.search(r"SIG(TERM|USR2): stopped after step", launched.log("victim"))
    assert report_of(victim)["restarts"] == 1
    assert_same_end(whole, victim)


def test_the_time_limit_continues_bit_by_bit(launched, arguments, whole):
    # SLURM looks at the clock twice a minute. With this warning its signal comes 40 to 70 s after the start (a busy
    # machine needs 20 s to import torch, and each restart must get further); the training is held meanwhile, so that it
    # does not end before. SLURM itself lets it go on for the signal.
    config = launched.train("limited", arguments(*LONG), minutes=2, signal_seconds=50)
    wait_until(lambda: step(config) >= 20, 240, "progress")
    (process,) = launched.slurm.processes(launched.job("limited"))
    os.kill(process, signal.SIGSTOP)
    launched.wait(State.DONE)
    assert "SIGUSR2: stopped after step" in launched.log("limited")
    assert report_of(config)["restarts"] >= 1, "on a slow machine, the time may be too short twice"
    assert_same_end(whole, config)


def test_an_item_that_cannot_continue_fails_at_its_time_limit(launched, arguments):
    """The text of a training; it is held as the training above is."""
    cache = launched.runs.parent / "cache"  # of its own: another test has made the tokens already
    launched.train("late", arguments("training.steps=2", f"data.cache_dir={cache}"), minutes=2, signal_seconds=50)
    (text,) = [name for name, one in launched.states().items() if one.item.kind == "prepare_data"]
    log_file = Path(latest_jobs(launched.folder)[text].log)
    wait_until(lambda: log_file.is_file() and "$ python" in log_file.read_text(), 240, "begin")
    (process,) = launched.slurm.processes(launched.job(text))
    os.kill(process, signal.SIGSTOP)
    states = launched.wait(State.FAILED, State.WAITS)
    assert f"{text} needs more than the 2 minutes of its job, and cannot continue" in states[text].reason
    assert "Restarts=0" in launched.slurm.output("scontrol", "show", "job", launched.job(text))


def test_both_tasks_of_an_array_requeue_themselves(launched, arguments, whole):
    """The last task of an array has the array's own id as SLURM_JOB_ID."""
    launched.submit("experiments.train", *arguments(*LONG), "training.seed=0,1", f"run.dir={launched.folder}")
    names = ("seed_0", "seed_1")
    configs = [parse(TrainConfig, [*arguments(*LONG), f"run.dir={launched.folder / name}"]) for name in names]
    wait_until(lambda: all(step(config) >= 20 for config in configs), 240, "progress")
    for name in names:
        seen = scheduler.look(launched.job(name))
        assert seen.state == "RUNNING"
        assert 0 < seen.seconds_left <= 30 * 60
    launched.slurm.output("scancel", "--signal=USR2", *(launched.job(name) for name in names))
    launched.wait(State.DONE)
    for name, config in zip(names, configs, strict=True):
        assert "SIGUSR2: stopped after step" in launched.log(name)
        assert report_of(config)["restarts"] == 1
    assert_same_end(whole, configs[0])


def test_a_requeue_by_hand_continues_bit_by_bit(launched, arguments, whole):
    config = launched.train("requeued", arguments(*LONG))
    wait_until(lambda: step(config) >= 20, 240, "progress")
    launched.slurm.output("scontrol", "requeue", launched.job("requeued"))
    launched.wait(State.DONE)
    assert report_of(config)["restarts"] == 1, "once: the job itself must not requeue what was requeued"
    assert_same_end(whole, config)


def test_a_cancelled_job_stays_so_and_can_be_continued(launched, arguments, whole, capsys):
    config = launched.train("cancelled", arguments(*LONG))
    wait_until(lambda: step(config) >= 20, 240, "progress")
    cancel.main(parse(cancel.CancelConfig, ["study=test", f"runs={launched.runs}"]))
    assert "cancelled 1 of 2 items: cancelled" in capsys.readouterr().out
    job = launched.job("cancelled")
    assert scheduler.look(job).state in ("COMPLETING", "FAILED"), "its end is waited for"
    assert launched.wait()["cancelled"].state is State.CANCELLED
    stopped = int(re.search(r"SIGUSR2: stopped after step (\d+) of 300", launched.log("cancelled"))[1])
    assert checkpoint_path(config.run.folder, stopped).is_dir()
    assert "Requeue=1 Restarts=0" in launched.slurm.output("scontrol", "show", "job", job), "it does not come back"
    launched.train("cancelled", arguments(*LONG))
    launched.wait(State.DONE)
    assert_same_end(whole, config)


def test_a_job_that_scancel_ends_stays_so(launched, arguments):
    config = launched.train("ended", arguments(*LONG))
    wait_until(lambda: step(config) >= 20, 240, "progress")
    job = launched.job("ended")
    launched.slurm.output("scancel", job)
    wait_until(lambda: "CANCELLED" in launched.slurm.output("scontrol", "show", "job", job), 120, "end")
    assert launched.wait()["ended"].state is State.CANCELLED
    assert "SIGTERM: stopped after step" in launched.log("ended")
    assert "Requeue=1 Restarts=0" in launched.slurm.output("scontrol", "show", "job", job), "it does not come back"


# --- machines that die ------------------------------------------------------------------------------------------------


def test_a_node_dies(launched, arguments, whole):
    config, slurm = launched.train("orphan", arguments(*LONG)), launched.slurm
    wait_until(lambda: newest_checkpoint(config.run.folder) is not None, 240, "checkpoint")
    saved, node = read_checkpoint(newest_checkpoint(config.run.folder)).step, report_of(config)["node"]
    slurm.kill_node(node)
    try:
        launched.wait(State.DONE)
    finally:
        slurm.start_node(node)
    assert report_of(config)["restarts"] == 1
    assert report_of(config)["node"] != node, "the other one takes over"
    assert continued_from(launched.log("orphan")) >= saved, "only the steps since the last checkpoint are lost"
    assert_same_end(whole, config)


def continued_from(log):
    return int(re.findall(r"continuing .* from step (\d+)", log)[-1])


def test_the_controller_restarts(launched, arguments):
    config = launched.train("steady", arguments(*LONG, "training.steps=900"))
    launched.train("later", arguments("training.steps=2"), sbatch="{begin: now+60}")
    wait_until(lambda: step(config) >= 20, 240, "progress")
    launched.slurm.stop_controller()
    before = step(config)
    with pytest.raises(RunError, match="squeue failed"):
        launched.states()
    wait_until(lambda: step(config) > before, 120, "progress without a controller")
    launched.slurm.start_controller()
    launched.wait(State.DONE)
    assert report_of(config)["restarts"] == 0


# --- more than one --------------------------------------------------------------------------------------------------


def test_two_nodes_train_the_demo_model_as_one(launched, corpus):
    words = ["model=demo", f"data=path:{corpus}/docs.jsonl", f"data.cache_dir={corpus}/cache", "sparsity.l1=1e-3"]
    words += ["data.validation_share=0.1", "training.precision=float32", "training.steps=4", "execution.micro_batch=8"]
    words += ["run.log_every=1", "run.evaluate_every=4", "run.checkpoint_every=4"]
    both = launched.train("both", words, nodes=2)
    alone = parse(TrainConfig, [*words, f"run.dir={launched.runs / 'alone'}", "run.progress=none"])
    train.main(alone)
    launched.wait(State.DONE)
    assert report_of(both)["node"] == "127.0.0.[1-2]"
    expected, found = (without_times(metrics.read_metrics(config.run.folder)) for config in (alone, both))
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        assert one["backend"] == other["backend"]
        for key in one.keys() - {"backend"}:
            assert one[key] == pytest.approx(other[key], rel=1e-4), (one["step"], key)


def test_a_study_of_six_runs_from_submission_to_a_figure(launched, arguments, forked, capsys):
    options = {"grid": {"sparsity.l1": ["0", "1e-3", "1e-2"], "training.seed": ["0", "1"]}}
    words = write_study(launched, "six", arguments("training.steps=6"), kinds=["train", "build"], **options)
    launched.submit(*words, **forked)
    launched.wait(State.DONE)
    figure = launched.runs / "six.figures" / "figure03_quality_and_nonzeros.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    status.main(parse(status.StatusConfig, ["study=six", f"runs={launched.runs}"]))
    assert "study six: 8 items: 8 done" in capsys.readouterr().out
    collect.main(parse(collect.CollectConfig, ["study=six", f"runs={launched.runs}"]))
    results = load(launched.runs / "six.collected")
    assert set(results.rows.loc[results.rows["op"] == "train", "seed"]) == {0, 1}
    assert results.curves["item"].nunique() == 6
    expected = load(launched.folder)
    assert expected.rows.equals(results.rows)
