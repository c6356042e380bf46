"""Runs one item of a study inside a job, in each of the job's processes.

A signal (before the time limit, at preemption) makes a training write a checkpoint and raise `Stopped`. Only then is
the signal passed on to submitit, whose handler puts the job back into the queue. When the job starts again, the
training finds its checkpoint by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from submitit.core.job_environment import JobEnvironment
from submitit.helpers import Checkpointable, TorchDistributedEnvironment

from experiments.run.config import parse
from experiments.run.environment import describe_environment
from experiments.run.errors import EXIT_FAILED, RunError, Stopped
from experiments.run.files import write_json
from experiments.run.locks import exclusive
from experiments.run.progress import ProgressFile
from experiments.study.graph import Graph, Item, write_made_from
from experiments.study.programs import config_difference, entry_point
from slurm.records import Report, failure, now, write_report

ENVIRONMENT = "environment.json"
# How often a process looks whether another one has failed, and how long it may take to end by itself then.
WATCH_SECONDS, LEAVE_SECONDS = 5.0, 30.0
log = logging.getLogger(__name__)
REQUEUE_SIGNAL = JobEnvironment._usr_sig()


@dataclass(frozen=True)
class ItemJob(Checkpointable):
    """The callable that submitit pickles. `directory` is where the item's relative paths start, `needs` are the items
    that it needs."""

    item: Item
    directory: str
    needs: tuple[Item, ...] = ()

    def __call__(self) -> None:
        """Run the item. After a signal, ends with exit code 85, unless the job is requeued.

        Raises:
            RunError: the item failed, or left no sound results.
        """
        os.umask(0o077)
        os.chdir(self.directory)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True)
        job = JobEnvironment()
        self.item.folder.mkdir(parents=True, exist_ok=True)
        log.info("$ %s", self.item.command())
        try:
            with _reported(self.item, job), _alone(self.item, job), _stoppable(job), _not_left_alone(self.item, job):
                made_from = {need.name: need.digest() for need in self.needs}
                _run(self.item, job)
                if made_from and job.global_rank == 0:
                    write_made_from(self.item.folder, made_from)
        except Stopped as stop:
            if job.global_rank > 0:
                return  # the first process decides for all, and srun would end it if this one failed
            _requeue(job, stop)
            log.warning("%s", stop)
            sys.exit(stop.exit_code)


def _run(item: Item, job: JobEnvironment) -> None:
    if job.num_tasks > 1:
        TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        if job.cluster == "local":
            os.environ["MASTER_ADDR"] = "127.0.0.1"  # a laptop's own name need not resolve
    sys.argv = [item.module, *item.arguments]  # what environment.json calls the command
    main, config_class = entry_point(item)
    if config_class is not None:
        reports = "report" in inspect.signature(main).parameters
        main(parse(config_class, list(item.arguments)), **({"report": ProgressFile(item.folder)} if reports else {}))
    elif code := main(list(item.arguments)):
        raise RunError(f"{item.module} ended with code {code}")
    if job.global_rank > 0:
        return
    if problem := _problem(item):
        raise RunError(f"ended without its results: {problem}")
    if not (item.folder / ENVIRONMENT).is_file():  # a training writes its own, with its device
        write_json(item.folder / ENVIRONMENT, describe_environment())


def _problem(item: Item) -> str | None:
    alone = dataclasses.replace(item, needs=())
    return Graph([alone], config_difference).problem(alone)


@contextlib.contextmanager
def _alone(item: Item, job: JobEnvironment) -> Iterator[None]:
    """Hold the item's lock, so that no other process of this machine runs it. Under SLURM no lock is needed, and that
    of a machine that died would block the same job on another one."""
    if job.cluster == "slurm" or job.global_rank > 0:
        yield
        return
    with exclusive(item.folder, "item"):
        yield


@contextlib.contextmanager
def _not_left_alone(item: Item, job: JobEnvironment) -> Iterator[None]:
    """On this machine, end the process some time after another process of its job has failed: a process that waits for
    a GPU, or works alone, may not notice the failure. SLURM ends it by itself (--kill-on-bad-exit)."""
    if job.cluster != "local" or job.num_tasks == 1:
        yield
        return
    began, ended = now(), threading.Event()

    def watch() -> None:
        while not ended.wait(WATCH_SECONDS):
            report = failure(item.folder, job.job_id, began)
            if report is not None and not ended.wait(LEAVE_SECONDS):
                log.error("another process has failed, this one ends: %s", report.error)
                os._exit(EXIT_FAILED)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class _Terminated(BaseException):
    """Not an `Exception`, since packages that are being imported might catch those."""


@contextlib.contextmanager
def _stoppable(job: JobEnvironment) -> Iterator[None]:
    """On this machine, let SIGTERM end an item that is not a training, or a training that has not set its own handler
    yet. submitit, and therefore SLURM's jobs, ignore SIGTERM."""
    if job.cluster != "local":
        yield
        return

    def end(number: int, _: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except _Terminated:
        raise Stopped("SIGTERM: the same command starts it again", "SIGTERM") from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _reported(item: Item, job: JobEnvironment) -> Iterator[None]:
    """Keep job.json up to date."""
    rank = job.global_rank
    begin = Report(
        job=job.job_id,
        state="running",
        node=os.environ.get("SLURM_JOB_NODELIST") or platform.node(),
        restarts=int(os.environ.get("SLURM_RESTART_COUNT", 0)),
        arguments=item.arguments,
        began=now(),
        gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
    )
    if rank == 0:
        write_report(item.folder, begin)
    try:
        yield
    except Stopped as stop:
        if rank == 0:
            write_report(item.folder, dataclasses.replace(begin, state="stopped", ended=now(), error=str(stop)))
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        failed = dataclasses.replace(begin, state="failed", ended=now(), error=what, traceback=traceback.format_exc())
        write_report(item.folder, failed, rank)
        raise
    if rank == 0:
        write_report(item.folder, dataclasses.replace(begin, state="done", ended=now()))


def _requeue(job: JobEnvironment, stop: Stopped) -> None:
    """Put the job back into the queue and exit, if the signal asked for that; otherwise return."""
    if job.cluster == "slurm":
        wanted = bool(stop.signal) and _still_running(job.raw_job_id)
    else:
        # submitit's controller sends this signal at the time limit. SIGTERM comes from someone who wants the job to
        # end.
        wanted = stop.signal == signal.Signals(REQUEUE_SIGNAL).name
    if wanted:
        log.info("%s", stop)
        signal.raise_signal(REQUEUE_SIGNAL)  # submitit's handler requeues, and exits


def _still_running(job: str) -> bool:
    """Whether SLURM still counts the job as running. A job that is being cancelled, or was requeued by hand, gets
    SIGTERM as a preempted one does; to requeue it again would revive a cancelled job."""
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%T"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        log.error("cannot ask SLURM about job %s, it is not requeued: %s", job, done.stderr.strip())
    return done.stdout.strip() == "RUNNING"
