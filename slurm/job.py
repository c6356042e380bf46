"""Runs one item of a study inside a job, in each of the job's processes.

A signal (before the time limit, at preemption) makes a training write a checkpoint and raise `Stopped`, and ends any
other item. Only then is the signal passed on to submitit, whose handler puts the job back into the queue. When the job
starts again, a training finds its checkpoint by itself. Other items begin anew: they are requeued when they were
preempted, but not at the time limit, which they would reach again.
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
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from submitit.core.job_environment import JobEnvironment
from submitit.helpers import Checkpointable, TorchDistributedEnvironment

from experiments.run.config import parse
from experiments.run.environment import describe_environment
from experiments.run.errors import EXIT_FAILED, RunError, Stopped
from experiments.run.files import write_json
from experiments.run.locks import exclusive
from experiments.run.progress import ProgressFile
from experiments.run.signals import stop_requests
from experiments.study.graph import Graph, Item, config_difference, entry_point, write_made_from
from slurm import scheduler
from slurm.cluster import EARLY_SECONDS
from slurm.records import Report, config_digest, failure, latest_jobs, now, write_report

ENVIRONMENT = "environment.json"
# How often a process looks whether another one has failed, and how long it may take to end by itself then.
WATCH_SECONDS, LEAVE_SECONDS = 5.0, 30.0
# Between attempts to be requeued.
REQUEUE_PAUSES = (2.0, 5.0, 10.0, 20.0)
log = logging.getLogger(__name__)
REQUEUE_SIGNAL = JobEnvironment._usr_sig()
AGAIN = "{}: the same command starts it again"  # of the signal's name


class OutOfTime(RunError):
    """An item that cannot continue has reached the time limit of its job."""


@dataclass(frozen=True)
class ItemJob(Checkpointable):
    """The callable that submitit pickles. `directory` is where the item's relative paths start, `needs` are the items
    that it needs. The job may take `minutes`; SLURM sends its signal `signal_seconds` before."""

    item: Item
    directory: str
    minutes: int
    signal_seconds: int
    needs: tuple[Item, ...] = ()

    def __call__(self) -> None:
        """Run the item. After a signal, ends with exit code 85, unless the job is requeued.

        Raises:
            RunError: the item failed, or left no sound results.
        """
        os.umask(0o077)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True)
        logging.getLogger("submitit").handlers.clear()  # its lines go to the root's: once is enough
        job = JobEnvironment()
        self.item.folder.mkdir(parents=True, exist_ok=True)
        if job.cluster == "slurm" and job.global_rank == 0 and (missing := scheduler.missing_clients()):
            log.warning("at its time limit or a preemption this job ends for good: %s", _without(missing))
        reports = _Reports(self.item, job)
        # So that no other process of this machine runs it. Under SLURM no lock is needed, and that of a machine that
        # died would block the same job on another one.
        free = job.cluster == "slurm" or job.global_rank > 0
        alone = contextlib.nullcontext() if free else exclusive(self.item.folder, "item")
        # Those that end an item that is not a training, or a training that has not set its own handlers yet: the one
        # that is sent before the time limit, and on this machine SIGTERM, which submitit, and so SLURM's jobs, ignore.
        signals = {"local": (signal.SIGTERM, REQUEUE_SIGNAL), "slurm": (REQUEUE_SIGNAL,)}.get(job.cluster, ())
        try:
            with reports.failing(), alone, stop_requests(signals, AGAIN), _not_left_alone(self.item, job):
                os.chdir(self.directory)
                log.info("$ %s", self.item.command())  # from here on signals end it
                made_from = {need.name: need.digest() for need in self.needs}
                _run(self.item, job)
                if made_from and job.global_rank == 0:
                    write_made_from(self.item.folder, made_from)
        except Stopped as stop:
            if job.global_rank > 0:
                return  # the first process decides for all, and srun would end it if this one failed
            reports.end("stopped", str(stop))
            with reports.failing():
                self._requeue(job, stop)
            log.warning("%s", stop)
            sys.exit(stop.exit_code)
        reports.end("done")

    def _requeue(self, job: JobEnvironment, stop: Stopped) -> None:
        """Put the job back into the queue and exit, if the signal asked for that; otherwise return.

        Raises:
            OutOfTime: it would reach its time limit again.
            RunError: SLURM cannot be told; the message says what to do.
        """
        if job.cluster == "slurm":
            latest = latest_jobs(job.paths.folder.parent).get(self.item.name)
            # `slurm.cancel` notes that it sends the signal.
            cancelled = latest is not None and latest.job == job.job_id and latest.cancelled
            if stop.signal and not cancelled:
                self._requeue_in_slurm(job.job_id, stop)
        elif stop.signal == signal.Signals(REQUEUE_SIGNAL).name:
            # submitit's controller sends this signal at the time limit. SIGTERM comes from someone who wants the job to
            # end.
            self._submit_again(stop, seconds_left=0)

    def _requeue_in_slurm(self, job: str, stop: Stopped) -> None:
        """Requeue the job, repeatedly for a while, since a busy controller may not answer at once."""
        if missing := scheduler.missing_clients():
            raise RunError(f"{stop}. Not requeued: {_without(missing)}")
        for pause in (*REQUEUE_PAUSES, None):
            try:
                seen = scheduler.look(job)
                # A job that is being cancelled, or was requeued by hand, gets SIGTERM as a preempted one does; to
                # requeue it again would revive a cancelled job.
                if seen is None or seen.state != "RUNNING":
                    return
                self._submit_again(stop, seen.seconds_left)
            except OutOfTime:
                raise
            except (RunError, OSError, subprocess.SubprocessError) as error:
                if pause is None:
                    raise RunError(f"{stop}. Not requeued: {error}; slurm.submit continues it") from error
                log.warning("job %s is not requeued yet, again in %s s: %s", job, pause, error)
                time.sleep(pause)

    def _submit_again(self, stop: Stopped, seconds_left: float) -> None:
        """Let submitit requeue the job, and exit."""
        kind = self.item.kind
        if kind != "train" and seconds_left <= self.signal_seconds + EARLY_SECONDS:
            raise OutOfTime(
                f"{self.item.name} needs more than the {self.minutes} minutes of its job, and cannot continue where "
                "it stopped: raise cluster.minutes"
            )
        log.info("%s", stop)
        signal.raise_signal(REQUEUE_SIGNAL)


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
    if problem := Graph([dataclasses.replace(item, needs=())], config_difference).problem(item):
        raise RunError(f"ended without its results: {problem}")
    if not (item.folder / ENVIRONMENT).is_file():  # a training writes its own, with its device
        write_json(item.folder / ENVIRONMENT, describe_environment())


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


class _Reports:
    """Keeps job.json up to date; made when the job begins."""

    def __init__(self, item: Item, job: JobEnvironment) -> None:
        self._folder, self._rank = item.folder, job.global_rank
        self._begin = Report(
            job=job.job_id,
            state="running",
            node=os.environ.get("SLURM_JOB_NODELIST") or platform.node(),
            restarts=int(os.environ.get("SLURM_RESTART_COUNT", 0)),
            arguments=item.arguments,
            began=now(),
            gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        )
        if self._rank == 0:
            write_report(self._folder, self._begin)

    def end(self, state: Literal["stopped", "done"], error: str = "") -> None:
        """Write how the job has ended: its first process does, unless another one has failed."""
        if self._rank == 0:
            config = config_digest(self._folder) if state == "done" else ""
            report = dataclasses.replace(self._begin, state=state, ended=now(), error=error, config=config)
            write_report(self._folder, report)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Report an error that is raised in the block; every process does."""
        try:
            yield
        except Stopped:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            where = "" if isinstance(error, RunError) else traceback.format_exc()  # the message says it all
            failed = dataclasses.replace(self._begin, state="failed", ended=now(), error=what, traceback=where)
            write_report(self._folder, failed, self._rank)
            raise


def _without(missing: Sequence[str]) -> str:
    return (
        f"there is no {' and no '.join(missing)} here. A container needs SLURM's clients (slurm/README.md, 'In a "
        "container'); slurm.submit continues the job"
    )
