"""submitit's executors with the options of a cluster's file, and the sbatch files that they write."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.helpers import clean_env, environment_variables
from submitit.slurm.slurm import SlurmExecutor, _make_sbatch_string

from experiments.run.errors import RunError
from slurm.cluster import ClusterConfig, processes_per_node
from slurm.job import ItemJob, TimeLimit
from slurm.snapshot import Snapshot


def python_command(cluster: ClusterConfig) -> str:
    """The command that starts Python on this cluster, quoted for a shell."""
    return shlex.join(cluster.python or [sys.executable])


def time_limit(cluster: ClusterConfig, kind: str) -> TimeLimit:
    """That of a job of this kind."""
    return TimeLimit(cluster.resources(kind).minutes, cluster.signal_seconds)


def environment(cluster: ClusterConfig, kind: str) -> dict[str, str]:
    """Environment variables of a job of this kind, without those of its code snapshot."""
    cpus = cluster.resources(kind).cpus
    threads = {}
    if cluster.executor == "slurm" and cpus:
        # srun does not take over what sbatch was asked for (since SLURM 22.05).
        threads = {"OMP_NUM_THREADS": str(cpus), "SRUN_CPUS_PER_TASK": str(cpus)}
    elif cluster.executor == "local":
        at_a_time = cluster.parallel * processes_per_node(cluster.resources(kind), kind)
        threads = {"OMP_NUM_THREADS": str(cpus or max(1, len(os.sched_getaffinity(0)) // at_a_time))}
    return {**threads, **cluster.environment}


def slurm_parameters(
    cluster: ClusterConfig, kind: str, *, name: str, snapshot: Snapshot, directory: str, dependency: str = ""
) -> dict[str, Any]:
    """Options of submitit's SlurmExecutor for jobs of one kind."""
    wanted = cluster.resources(kind)
    exports = [f"export {key}={shlex.quote(value)}" for key, value in environment(cluster, kind).items()]
    modules = [f"module load {shlex.quote(module)}" for module in cluster.modules]
    parameters = {
        "job_name": name,
        "time": wanted.minutes,
        "nodes": wanted.nodes,
        "ntasks_per_node": processes_per_node(wanted, kind),
        "cpus_per_task": wanted.cpus or None,
        "gpus_per_node": wanted.gpus or None,
        "mem": f"{round(wanted.memory_gb * 1024)}M" if wanted.memory_gb else None,
        "partition": wanted.partition,
        "account": wanted.account,
        "qos": wanted.qos,
        "constraint": wanted.constraint,
        "dependency": dependency,
        "signal_delay_s": cluster.signal_seconds,
        "array_parallelism": cluster.parallel,
        "setup": [*modules, *cluster.setup, *exports, *snapshot.exports()],
        # One process that fails ends the job: the others would wait for it in a collective.
        "srun_args": ["--kill-on-bad-exit=1"],
        "stderr_to_stdout": True,
        "additional_parameters": {
            "chdir": directory,
            "requeue": True,  # also when a node dies
            "kill-on-invalid-dep": "yes",  # what needs a job that failed leaves the queue
            **{key: True if value == "true" else value for key, value in wanted.sbatch.items()},
        },
    }
    # An empty value is one that the cluster decides. Without it, submitit asks for a wckey that few clusters have.
    return {key: value for key, value in parameters.items() if value not in ("", None)} | {"wckey": None}


def sbatch_text(cluster: ClusterConfig, parameters: dict[str, Any], folder: Path, count: int) -> str:
    """The sbatch file that submitit writes for `count` items."""
    command = f"{python_command(cluster)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    return _make_sbatch_string(command=command, folder=folder, map_count=count if count > 1 else None, **parameters)


def submit_slurm(
    cluster: ClusterConfig, parameters: dict[str, Any], folder: Path, jobs: Sequence[ItemJob]
) -> list[submitit.Job]:
    """Submit jobs, as one array if there are several.

    Raises:
        RunError: there is no SLURM here, or it refuses.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        executor = SlurmExecutor(folder=folder, max_num_timeout=cluster.max_timeouts, python=python_command(cluster))
    except RuntimeError as error:
        raise RunError("there is no SLURM on this machine: log in to the cluster, or choose cluster=local") from error
    executor.update_parameters(**parameters)
    try:
        with outside_of_jobs(), executor.batch():
            return [executor.submit(job) for job in jobs]
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
