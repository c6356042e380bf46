"""Runs jobs on this machine, as many at a time as it has room for, each in its own processes, until all are done."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Protocol

from submitit.helpers import environment_variables
from submitit.local.local import LocalExecutor, LocalJob

from experiments.run.errors import ConfigError, Stopped
from experiments.run.files import write_json
from experiments.run.locks import is_held
from experiments.study.graph import Graph, Item, State
from experiments.study.programs import modules_of
from slurm import fork_server
from slurm.cluster import ClusterConfig, Resources, processes_per_node
from slurm.executors import environment, outside_of_jobs, python_command, time_limit
from slurm.fork_server import ForkServer
from slurm.job import ItemJob
from slurm.records import LOGS, Job, note_submitted, now, report_or_damage
from slurm.snapshot import Snapshot

QUEUE = "queue.json"
POLL_SECONDS = 0.05
SERVER_LOG = "fork_server.log"
# What every job imports, beside its own module.
PRELOADED = ("slurm.job", "submitit.core.submission", "torch")  # torch after what sets OMP_WAIT_POLICY
# A training that is told to stop writes its checkpoint first.
STOP_SECONDS = 120.0


@dataclass
class _Running:
    """An item that runs. `job` is None where an earlier queue, which was killed, started it: then the item's lock tells
    when it ends."""

    item: Item
    job: LocalJob | None
    gpus: tuple[int, ...]
    share: Fraction  # of each of these GPUs
    since: float


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
    there = len(_gpu_names(cluster.total_gpus))
    wanted = max((cluster.resources(kind).gpus for kind in kinds), default=0)
    if wanted > there:
        raise ConfigError(f"this machine has {there} GPUs for runs that take {wanted} each: see gpus and total_gpus")


def _machine_gpus() -> int:
    """How many NVIDIA GPUs this machine has, whether or not this process may use them."""
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()])


def _depths(graph: Graph) -> dict[str, int]:
    """By item, the longest chain of needs that leads to it."""
    depths: dict[str, int] = {}
    for name, item in graph.items.items():
        depths[name] = 1 + max((depths[need] for need in item.needs), default=-1)
    return depths


class Shown(Protocol):
    """Where a queue reports (`slurm.display.Display`)."""

    def say(self, text: str) -> None: ...

    def show(self, running: Sequence[Item]) -> None: ...

    def ended(self, item: Item, state: State) -> None: ...


class LocalQueue:
    """Runs the items of a study, each when what it needs is done and there is room.

    Args:
        folder: the study's folder; the caller holds its lock.
        directory: where relative paths among the items' arguments start.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES has fewer GPUs than the cluster's total_gpus.
    """

    def __init__(
        self,
        folder: Path,
        graph: Graph,
        cluster: ClusterConfig,
        snapshot: Snapshot,
        directory: str,
        display: Shown,
    ) -> None:
        self._folder, self._graph, self._cluster, self._display = folder, graph, cluster, display
        self._snapshot, self._directory = snapshot, directory
        self._gpu_names = _gpu_names(cluster.total_gpus)
        self._free = [Fraction(1)] * len(self._gpu_names)  # of each GPU
        self._depth = _depths(graph)
        self._running: list[_Running] = []
        self._servers: dict[frozenset[tuple[str, str]], ForkServer] = {}
        self._modules: list[str] = []
        self._ended = 0
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
        waiting, total = [self._graph.items[name] for name in names], len(names)
        failed: dict[str, str] = {}
        self._modules = sorted({name for item in waiting for name in modules_of(item)})
        with self._announced(), self._signals(), self._closed_servers():
            for item in [item for item in waiting if is_held(item.folder)]:
                waiting.remove(item)
                self._adopt(item)
            while (waiting or self._running) and self._signal is None:
                for one in [one for one in self._running if self._has_ended(one)]:
                    self._end(one, done, failed, total)
                # What a training was made for comes before the next training.
                for item in sorted(waiting, key=lambda item: -self._depth[item.name]):
                    coming = {other.name for other in waiting} | {one.item.name for one in self._running}
                    if lost := [name for name in item.needs if name not in done | coming]:
                        failed[item.name] = f"not run, needs {', '.join(lost)}"
                        waiting.remove(item)
                        self._count(item, State.WAITS, failed[item.name], total)
                    elif done.issuperset(item.needs) and self._has_room(item):
                        waiting.remove(item)
                        self._start(item)
                self._display.show([one.item for one in self._running])
                time.sleep(POLL_SECONDS)
            if self._signal is not None:
                self._stop()
        return failed

    # --- one item -----------------------------------------------------------------------------------------------------

    def _has_room(self, item: Item) -> bool:
        return len(self._running) < self._cluster.parallel and self._choose_gpus(item) is not None

    def _share(self, item: Item) -> Fraction:
        return Fraction(1, self._cluster.resources(item.kind).runs_per_gpu)

    def _choose_gpus(self, item: Item) -> tuple[int, ...] | None:
        """The emptiest GPUs with room for the item, None while there are too few."""
        wanted, share = self._cluster.resources(item.kind).gpus, self._share(item)
        with_room = [gpu for gpu, free in enumerate(self._free) if free >= share]
        chosen = sorted(with_room, key=lambda gpu: -self._free[gpu])[:wanted]
        return tuple(chosen) if len(chosen) == wanted else None

    def _note_running(self, item: Item, job: LocalJob | None, gpus: tuple[int, ...]) -> None:
        share = self._share(item)
        for gpu in gpus:
            self._free[gpu] -= share
        self._running.append(_Running(item, job, gpus, share, time.monotonic()))

    def _adopt(self, item: Item) -> None:
        """Wait for an item that already runs, and reserve its GPUs; if they are not known, as many as its kind
        takes."""
        report, _ = report_or_damage(item.folder)
        here = report is not None and report.state == "running" and report.node == platform.node()
        names = report.gpus.split(",") if report is not None and here else []
        own = tuple(gpu for gpu, name in enumerate(self._gpu_names) if name in names)
        where = f" on GPU {', '.join(self._gpu_names[gpu] for gpu in own)}" if own else ""
        self._display.say(f"{item.name} is running already{where}, started by a queue that is gone: waiting for it")
        self._note_running(item, None, own or self._choose_gpus(item) or ())

    def _start(self, item: Item) -> None:
        if is_held(item.folder):
            self._adopt(item)
            return
        gpus = self._choose_gpus(item) or ()
        item.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        job = self._submit(item, gpus)
        log = self._folder / LOGS / f"{job.job_id}_0_log.out"
        note_submitted(self._folder, [Job(item.name, job.job_id, "local", str(log), now())])
        self._note_running(item, job, gpus)
        where = f" on GPU {', '.join(self._gpu_names[gpu] for gpu in gpus)}" if gpus else ""
        self._display.say(f"{item.name} started{where}, log: {log}")

    def _submit(self, item: Item, gpus: tuple[int, ...]) -> LocalJob:
        wanted = self._cluster.resources(item.kind)
        # submitit numbers GPUs from 0, whatever of them this process may use.
        visible = shlex.quote(",".join(self._gpu_names[gpu] for gpu in gpus))
        variables = environment(self._cluster, item.kind) | self._snapshot.environment()
        executor = LocalExecutor(
            folder=self._folder / LOGS,
            max_num_timeout=self._cluster.max_timeouts,
            python=f"env CUDA_VISIBLE_DEVICES={visible} {self._python(wanted, variables)}",
        )
        executor.update_parameters(
            timeout_min=wanted.minutes,
            signal_delay_s=self._cluster.signal_seconds,
            tasks_per_node=processes_per_node(wanted, item.kind),
            stderr_to_stdout=True,
        )
        # Ctrl-C reaches every process of the terminal. submitit's, which would kill its job within a second, must not
        # see it; ignored signals are inherited, and a training sets its own handler.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with outside_of_jobs(), environment_variables(**variables):
                needs = tuple(self._graph.items[name] for name in item.needs)
                limit = time_limit(self._cluster, item.kind)
                job = executor.submit(ItemJob(item, self._directory, limit, needs))
        finally:
            signal.signal(signal.SIGINT, before)
        assert isinstance(job, LocalJob)  # a LocalExecutor's
        return job

    def _python(self, wanted: Resources, variables: Mapping[str, str]) -> str:
        """How Python is called for a job with these variables: by way of a fork server, where that can be."""
        if wanted.gpus or self._cluster.python or not fork_server.is_possible():
            return python_command(self._cluster)
        # Libraries read some of the variables while they are loaded, so that a server is for one set of them.
        key = frozenset(variables.items())
        if key not in self._servers:
            log = self._folder / LOGS / SERVER_LOG
            log.parent.mkdir(exist_ok=True, mode=0o700)
            self._servers[key] = ForkServer([*PRELOADED, *self._modules], variables, self._directory, log)
        return self._servers[key].python()

    def _has_ended(self, one: _Running) -> bool:
        return one.job.done() if one.job is not None else not is_held(one.item.folder)

    def _end(self, one: _Running, done: set[str], failed: dict[str, str], total: int) -> None:
        self._running.remove(one)
        for gpu in one.gpus:
            self._free[gpu] += one.share
        name, seconds = one.item.name, time.monotonic() - one.since
        if (reason := self._why_not_done(one)) is None:
            done.add(name)
            self._count(one.item, State.DONE, f"done in {seconds:.0f} s", total)
        else:
            failed[name] = reason
            self._count(one.item, State.FAILED, f"failed: {reason}", total)

    def _count(self, item: Item, state: State, verdict: str, total: int) -> None:
        self._ended += 1
        self._display.ended(item, state)
        self._display.say(f"[{self._ended}/{total}] {item.name} {verdict}")

    def _why_not_done(self, one: _Running) -> str | None:
        report, _ = report_or_damage(one.item.folder)
        own = one.job is None or (report is not None and report.job == one.job.job_id)
        if own and report is not None and report.state in ("failed", "stopped"):
            return report.error
        return self._graph.problem(one.item)

    # --- stopping -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _announced(self) -> Iterator[None]:
        """Record where the queue runs, for `slurm.cancel`. A queue that is killed leaves the file behind."""
        path = self._folder / QUEUE
        write_json(path, {"pid": os.getpid(), "host": platform.node()})
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _closed_servers(self) -> Iterator[None]:
        try:
            yield
        finally:
            for server in self._servers.values():
                server.close()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def note(number: int, _: object) -> None:
            self._signal = signal.Signals(number).name

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self) -> None:
        """Let the running items write their checkpoints, then end."""
        own = {one.item.name: one.job for one in self._running if one.job is not None}
        self._display.say(f"{self._signal}: stopping {', '.join(own) or 'nothing'}")
        for job in own.values():
            if not job.done():
                os.kill(int(job.job_id), signal.SIGTERM)  # submitit's process, a child of this one, passes it on
        deadline = time.monotonic() + STOP_SECONDS
        while any(not job.done() for job in own.values()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        late = [name for name, job in own.items() if not job.done()]
        more = f"; still writing: {', '.join(late)}" if late else ""
        raise Stopped(f"{self._signal}: the same command continues{more}", self._signal or "")
