"""Items as jobs of SLURM: which of them share an array, what each array waits for, and its sbatch file."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.helpers import clean_env, environment_variables
from submitit.slurm.slurm import SlurmExecutor, _make_sbatch_string

from experiments.run.errors import RunError
from experiments.study.graph import Item
from slurm.cluster import ClusterConfig
from slurm.job import ItemJob
from slurm.snapshot import Snapshot

MOST_TIMEOUTS = 100  # of a job: how often submitit requeues it after its time limit; preemption does not count


@dataclass
class Group:
    """Items of one kind that are submitted together, as one array if there are several.

    `after` are the groups that hold what they need, `jobs` jobs submitted earlier that they need. `aligned`: the n-th
    item needs the n-th of the only group in `after`, and nothing else.
    """

    kind: str
    after: tuple[int, ...]
    items: list[Item] = field(default_factory=list)
    jobs: set[str] = field(default_factory=set)
    aligned: bool = False

    def dependency(self, ids: Sequence[str]) -> str:
        """SLURM's --dependency; `ids` are the jobs of the groups before. Empty if there is nothing to wait for."""
        if self.aligned:
            return f"aftercorr:{ids[self.after[0]]}"
        jobs = [ids[number] for number in self.after] + sorted(self.jobs)
        return ":".join(["afterok", *jobs]) if jobs else ""


def group(items: Iterable[Item], queued: Mapping[str, str], max_array: int) -> list[Group]:
    """Groups in an order in which each comes after those it needs.

    `items` are to be submitted (each after what it needs), `queued` maps the needs that are in the queue already to
    their jobs. Items with the same kind of dependents stay together, so that a group can wait task by task for another:
    a statistic starts when its own training is done, not when all are.
    """
    items = list(items)
    dependents: dict[str, set[str]] = {item.name: set() for item in items}
    for item in items:
        for name in dependents.keys() & set(item.needs):
            dependents[name].add(item.kind)
    groups: list[Group] = []
    place: dict[str, int] = {}  # item -> group
    open_groups: dict[tuple, int] = {}
    for item in items:
        after = tuple(sorted({place[name] for name in item.needs if name in place}))
        jobs = {queued[name] for name in item.needs if name in queued}
        # Tasks of one array cannot wait for different jobs that were submitted before.
        key = (item.kind, after, frozenset(dependents[item.name]), item.name if jobs else "")
        number = open_groups.get(key)
        if number is None or len(groups[number].items) >= max_array:
            number = open_groups[key] = len(groups)
            groups.append(Group(item.kind, after))
        groups[number].items.append(item)
        groups[number].jobs |= jobs
        place[item.name] = number
    for array in groups:
        if len(array.after) == 1 and not array.jobs and len(array.items) > 1:
            needs = [[name for name in item.needs if name in place] for item in array.items]
            array.aligned = needs == [[item.name] for item in groups[array.after[0]].items]
    return groups


def slurm_parameters(
    cluster: ClusterConfig, kind: str, *, name: str, snapshot: Snapshot, directory: str, dependency: str = ""
) -> dict[str, Any]:
    """Options of submitit's SlurmExecutor for jobs of one kind."""
    resources = cluster.resources(kind)
    exports = [f"export {key}={shlex.quote(value)}" for key, value in cluster.variables(kind).items()]
    modules = [f"module load {shlex.quote(module)}" for module in cluster.modules]
    before = [f"{{ {command}\n}} || exit 1" for command in (*modules, *cluster.setup)]
    parameters = {
        "job_name": name,
        "time": resources.minutes,
        "nodes": resources.nodes,
        "ntasks_per_node": resources.processes,
        "cpus_per_task": resources.cpus or None,
        "gpus_per_node": resources.gpus or None,
        "mem": f"{round(resources.memory_gb * 1024)}M" if resources.memory_gb else None,
        "partition": resources.partition,
        "account": resources.account,
        "qos": resources.qos,
        "constraint": resources.constraint,
        "dependency": dependency,
        "signal_delay_s": cluster.signal_seconds,
        "array_parallelism": cluster.parallel,
        "setup": [*before, *exports, *snapshot.exports()],
        # One process that fails ends the job: the others would wait for it in a collective.
        "srun_args": ["--kill-on-bad-exit=1"],
        "stderr_to_stdout": True,
        "additional_parameters": {
            "chdir": directory,
            "requeue": True,  # also when a node dies
            "kill-on-invalid-dep": "yes",  # what needs a job that failed leaves the queue
            **{key: True if value == "true" else value for key, value in resources.sbatch.items()},
        },
    }
    # An empty value is one that the cluster decides. Without it, submitit asks for a wckey that few clusters have.
    return {key: value for key, value in parameters.items() if value not in ("", None)} | {"wckey": None}


def sbatch_text(cluster: ClusterConfig, parameters: dict[str, Any], folder: Path, count: int) -> str:
    """The sbatch file that submitit writes for `count` items."""
    python = shlex.join(cluster.python or [sys.executable])
    command = f"{python} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    return _make_sbatch_string(command=command, folder=folder, map_count=count if count > 1 else None, **parameters)


def submit_slurm(
    cluster: ClusterConfig, parameters: dict[str, Any], folder: Path, jobs: Sequence[ItemJob]
) -> list[str]:
    """Submit jobs, as one array if there are several; returns their ids.

    Raises:
        RunError: there is no SLURM here, or it refuses.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        python = shlex.join(cluster.python or [sys.executable])
        executor = SlurmExecutor(folder=folder, max_num_timeout=MOST_TIMEOUTS, python=python)
        executor.update_parameters(**parameters)
        with outside_of_jobs(), executor.batch():
            submitted = [executor.submit(job) for job in jobs]
        return [job.job_id for job in submitted]
    except (FailedJobError, FailedSubmissionError) as error:
        raise RunError(f"SLURM refuses the job: {error}") from error


@contextlib.contextmanager
def outside_of_jobs() -> Iterator[None]:
    """Inside the block, hide the SLURM variables of the job that this process is part of, so that a new job does not
    inherit its layout.

    Outside of jobs the environment stays as it is, since users keep SBATCH_ACCOUNT and the like in it.
    """
    if "SLURM_JOB_ID" not in os.environ:
        yield
        return
    configuration = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    with clean_env(), environment_variables(**configuration):
        yield
