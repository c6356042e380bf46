"""Runs jobs on this machine, as many at a time as it has room for, each in its own processes, until all are done."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from submitit.helpers import environment_variables
from submitit.local.local import LocalExecutor, LocalJob

from experiments.run.errors import ConfigError, Stopped
from experiments.run.files import write_json
from experiments.run.locks import is_held
from experiments.study.graph import Graph, Item, State, modules_of
from slurm import fork_server
from slurm.cluster import ClusterConfig
from slurm.display import Display
from slurm.fork_server import ForkServer
from slurm.job import ItemJob
from slurm.records import LOGS, QUEUE, Job, note_submitted, now, read_report
from slurm.sbatch import MOST_TIMEOUTS, outside_of_jobs
from slurm.snapshot import Snapshot
from slurm.states import without_a_word

POLL_SECONDS = 0.05
SERVER_LOG = "fork_server.log"
# What every job imports, beside its own module.
PRELOADED = ("slurm.job", "submitit.core.submission", "torch")  # torch after what sets OMP_WAIT_POLICY
# A training that is told to stop writes its checkpoint first.
STOP_SECONDS = 120.0


@dataclass
class _Running:
    """An item that runs. `process` and `job` are None where an earlier queue, which was killed, started it: then the
    item's lock tells when it ends."""

    item: Item
    process: LocalJob | None
    job: Job | None
    gpus: tuple[int, ...]
    since: float

    def has_ended(self) -> bool:
        return self.process.done() if self.process is not None else not is_held(self.item.folder)


def _machine_gpus() -> int:
    """How many NVIDIA GPUs this machine has, whether or not this process may use them."""
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()])


def _gpu_names(count: int | None) -> list[str]:
    """What CUDA calls the GPUs that runs are dealt out to: the first of those that this process may use, or all.

    Raises:
        ConfigError: they are fewer.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(_machine_gpus() if count is None else count)]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if count is not None and len(names) < count:
        raise ConfigError(f"total_gpus must be at most the {len(names)} of CUDA_VISIBLE_DEVICES={visible}, got {count}")
    return names[:count]


def check_gpus(cluster: ClusterConfig, kinds: Iterable[str]) -> None:
    """Whether this machine has the GPUs that items of these kinds get.

    Raises:
        ConfigError: it has fewer.
    """
    there, most = len(_gpu_names(cluster.total_gpus)), max((cluster.resources(kind).gpus for kind in kinds), default=0)
    if most > there:
        raise ConfigError(f"this machine has {there} GPUs for runs that take {most} each: see gpus and total_gpus")


class LocalQueue:
    """Runs the items of a study, each when what it needs is done and there is room.

    Args:
        folder: the study's folder; the caller holds its lock.
        directory: where relative paths among the items' arguments start.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES has fewer GPUs than the cluster's total_gpus.
    """

    def __init__(
        self, folder: Path, graph: Graph, cluster: ClusterConfig, snapshot: Snapshot, directory: str, display: Display
    ) -> None:
        self._folder, self._graph, self._cluster, self._display = folder, graph, cluster, display
        self._snapshot, self._directory = snapshot, directory
        self._gpu_names = _gpu_names(cluster.total_gpus)
        self._free = [Fraction(1)] * len(self._gpu_names)  # of each GPU
        self._depth: dict[str, int] = {}  # by item, the longest chain of needs that leads to it
        for name, item in graph.items.items():
            self._depth[name] = 1 + max((self._depth[need] for need in item.needs), default=-1)
        self._running: list[_Running] = []
        self._servers: dict[frozenset[tuple[str, str]], ForkServer] = {}
        self._modules: list[str] = []
        self._ended = self._total = 0
        self._signal: str | None = None
        if not cluster.resources("train").gpus and (there := _machine_gpus()):
            more = f"cluster=gpu_box, or cluster.total_gpus={there} cluster.gpus=1, deals them out"
            display.say(f"trainings see none of this machine's {there} GPUs: {more}")

    def run(self, names: list[str]) -> dict[str, str]:
        """Run the named items; returns those that failed or could not run, each with the reason.

        Raises:
            Stopped: by SIGTERM or Ctrl-C, after the running items have stopped.
        """
        # What is to be run is not done, also where an earlier queue's process is making results anew beside old ones.
        done = {name for name, (state, _) in self._graph.states().items() if state is State.DONE} - set(names)
        waiting = [self._graph.items[name] for name in names]
        failed: dict[str, str] = {}
        self._total = len(names)
        self._modules = sorted({name for item in waiting for name in modules_of(item)})
        with self._announced():
            for item in [item for item in waiting if is_held(item.folder)]:
                waiting.remove(item)
                self._adopt(item)
            while (waiting or self._running) and self._signal is None:
                for run in [run for run in self._running if run.has_ended()]:
                    name, seconds = run.item.name, time.monotonic() - run.since
                    self._running.remove(run)
                    self._take_gpus(run.item, run.gpus, -1)
                    if (reason := self._why_not_done(run)) is None:
                        done.add(name)
                        made = f": {run.item.files[0]}" if run.item.kind == "build" else ""
                        self._count(run.item, State.DONE, f"done in {seconds:.0f} s{made}")
                    else:
                        failed[name] = reason
                        self._count(run.item, State.FAILED, f"failed: {reason}")
                # What a training was made for comes before the next training.
                for item in sorted(waiting, key=lambda item: -self._depth[item.name]):
                    coming = {other.name for other in waiting} | {run.item.name for run in self._running}
                    if lost := [name for name in item.needs if name not in done | coming]:
                        waiting.remove(item)
                        failed[item.name] = f"not run, needs {', '.join(lost)}"
                        self._count(item, State.WAITS, failed[item.name])
                    elif done.issuperset(item.needs) and (gpus := self._choose_gpus(item)) is not None:
                        waiting.remove(item)
                        self._start(item, gpus)
                self._display.show([run.item for run in self._running])
                time.sleep(POLL_SECONDS)
            if self._signal is not None:
                self._stop(self._signal)
        return failed

    @contextlib.contextmanager
    def _announced(self) -> Iterator[None]:
        """Inside the block, signals are noted, and a file says where the queue runs, for `slurm.cancel`. A queue that
        is killed leaves the file behind."""

        def note(number: int, _: object) -> None:
            self._signal = signal.Signals(number).name

        path = self._folder / QUEUE
        write_json(path, {"pid": os.getpid(), "host": platform.node()})
        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for server in self._servers.values():
                server.close()
            path.unlink(missing_ok=True)

    # --- one item -----------------------------------------------------------------------------------------------------

    def _choose_gpus(self, item: Item) -> tuple[int, ...] | None:
        """The emptiest GPUs with room for the item, None while there is no room."""
        if len(self._running) >= self._cluster.parallel:
            return None
        resources = self._cluster.resources(item.kind)
        with_room = [gpu for gpu, free in enumerate(self._free) if free >= Fraction(1, resources.runs_per_gpu)]
        chosen = sorted(with_room, key=lambda gpu: -self._free[gpu])[: resources.gpus]
        return tuple(chosen) if len(chosen) == resources.gpus else None

    def _take_gpus(self, item: Item, gpus: tuple[int, ...], sign: int = 1) -> None:
        for gpu in gpus:
            self._free[gpu] -= sign * Fraction(1, self._cluster.resources(item.kind).runs_per_gpu)

    def _on(self, gpus: tuple[int, ...]) -> str:
        return f" on GPU {', '.join(self._gpu_names[gpu] for gpu in gpus)}" if gpus else ""

    def _adopt(self, item: Item) -> None:
        """Wait for an item that already runs, and reserve its GPUs; if they are not known, as many as its kind
        takes."""
        report = read_report(item.folder)
        here = report is not None and report.state == "running" and report.node == platform.node()
        names = report.gpus.split(",") if report is not None and here else []
        gpus = tuple(gpu for gpu, name in enumerate(self._gpu_names) if name in names)
        self._display.say(f"{item.name} is running already{self._on(gpus)}, started by a queue that is gone: waiting")
        gpus = gpus or self._choose_gpus(item) or ()
        self._take_gpus(item, gpus)
        self._running.append(_Running(item, None, None, gpus, time.monotonic()))

    def _start(self, item: Item, gpus: tuple[int, ...]) -> None:
        if is_held(item.folder):
            self._adopt(item)
            return
        item.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        process = self._submit(item, gpus)
        log = self._folder / LOGS / f"{process.job_id}_0_log.out"
        job = Job(item.name, process.job_id, "local", str(log), now())
        note_submitted(self._folder, [job])
        self._take_gpus(item, gpus)
        self._running.append(_Running(item, process, job, gpus, time.monotonic()))
        self._display.say(f"{item.name} started{self._on(gpus)}, log: {log}")

    def _submit(self, item: Item, gpus: tuple[int, ...]) -> LocalJob:
        cluster, resources = self._cluster, self._cluster.resources(item.kind)
        variables = cluster.variables(item.kind) | self._snapshot.environment()
        python = shlex.join(cluster.python or [sys.executable])
        if not (resources.gpus or cluster.python) and fork_server.is_possible():
            # Libraries read some of the variables while they are loaded, so that a server is for one set of them.
            key = frozenset(variables.items())
            if key not in self._servers:
                log = self._folder / LOGS / SERVER_LOG
                log.parent.mkdir(exist_ok=True, mode=0o700)
                self._servers[key] = ForkServer([*PRELOADED, *self._modules], variables, self._directory, log)
            python = self._servers[key].python()
        # submitit numbers GPUs from 0, whatever of them this process may use.
        visible = shlex.quote(",".join(self._gpu_names[gpu] for gpu in gpus))
        executor = LocalExecutor(
            folder=self._folder / LOGS,
            max_num_timeout=MOST_TIMEOUTS,
            python=f"env CUDA_VISIBLE_DEVICES={visible} {python}",
        )
        executor.update_parameters(
            timeout_min=resources.minutes,
            signal_delay_s=cluster.signal_seconds,
            tasks_per_node=resources.processes,
            stderr_to_stdout=True,
        )
        needs = tuple(self._graph.items[name] for name in item.needs)
        # Ctrl-C reaches every process of the terminal. submitit's, which would kill its job within a second, must not
        # see it; ignored signals are inherited, and a training sets its own handler.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with outside_of_jobs(), environment_variables(**variables):
                job = ItemJob(item, self._directory, resources.minutes, cluster.signal_seconds, needs)
                process = executor.submit(job)
        finally:
            signal.signal(signal.SIGINT, before)
        assert isinstance(process, LocalJob)  # a LocalExecutor's
        return process

    def _count(self, item: Item, state: State, verdict: str) -> None:
        self._ended += 1
        self._display.ended(item, state)
        self._display.say(f"[{self._ended}/{self._total}] {item.name} {verdict}")

    def _why_not_done(self, run: _Running) -> str | None:
        report = read_report(run.item.folder)
        if report is not None and run.job is not None and run.job.job != report.job:
            report = None  # an earlier job's
        if report is not None and report.state in ("failed", "stopped"):
            return report.error
        problem = self._graph.problem(run.item)
        if problem and run.job is not None and run.job.last_words():
            return without_a_word(run.job)
        return problem

    # --- stopping -----------------------------------------------------------------------------------------------------

    def _stop(self, reason: str) -> None:
        """Let the running items write their checkpoints, then end."""
        processes = {run.item.name: run.process for run in self._running if run.process is not None}
        self._display.say(f"{reason}: stopping {', '.join(processes) or 'nothing'}")
        for process in processes.values():
            if not process.done():
                os.kill(int(process.job_id), signal.SIGTERM)  # submitit's process, a child of this one, passes it on
        deadline = time.monotonic() + STOP_SECONDS
        while (
            late := [name for name, process in processes.items() if not process.done()]
        ) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        more = f"; still writing: {', '.join(late)}" if late else ""
        raise Stopped(f"{reason}: the same command continues{more}", reason)
