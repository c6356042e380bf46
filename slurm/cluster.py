"""Describes clusters: `clusters/<name>.yaml`, or any YAML file, read as typed options."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.run.config import find_yaml, listing_options, option, parse
from experiments.run.errors import ConfigError
from experiments.study.definition import KINDS, ON_CPU

CLUSTERS = Path(__file__).resolve().parent / "clusters"
# More is a slip of the keyboard, or what SLURM itself does not take.
MOST_NODES = 100_000
MOST_GPUS = 1000  # of one machine
MOST_CORES = 10_000  # of one machine
MOST_GIB = 100_000  # of memory of one machine
MOST_MINUTES = 366 * 24 * 60
LONGEST_ARRAY = 4_000_001  # SLURM's own limit of MaxArraySize
LONGEST_SIGNAL_SECONDS = 65_535  # sbatch --signal
EARLY_SECONDS = 65  # SLURM's signal comes up to a minute earlier than it was asked for
# A field, and the options of sbatch of which one at most can be given, what the field writes included. Of gres, GPUs
# count.
_EXCLUSIVE = {
    "nodes": ["nodes"],
    "processes": ["ntasks", "ntasks-per-node", "ntasks-per-gpu"],
    "cpus": ["cpus-per-task", "cpus-per-gpu"],
    "gpus": ["gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres"],
    "memory_gb": ["mem", "mem-per-cpu", "mem-per-gpu"],
    "minutes": ["time"],
    **{name: [name] for name in ("partition", "account", "qos", "constraint")},
}
# Options of sbatch that the launcher writes itself, or that would undo them.
_OWN = ("array", "chdir", "dependency", "error", "export", "job-name", "kill-on-invalid-dep", "no-requeue", "open-mode",
        "output", "requeue", "signal", "wrap")  # fmt: skip
_GPU = re.compile(r"\b(gpu|shard)\b")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY", re.IGNORECASE)


@dataclass
class Resources:
    """The resources of one job."""

    nodes: int = option(1, "machines of one job", minimum=1, maximum=MOST_NODES)
    gpus: int = option(0, "GPUs of a job on each machine", minimum=0, maximum=MOST_GPUS)
    runs_per_gpu: int = option(
        1, "jobs that share a GPU, for runs too small to fill one (local, with gpus=1)", minimum=1, maximum=MOST_CORES
    )
    processes: int | None = option(
        None,
        "processes of a training on each machine; null: one per GPU, at least one. Other items always have one",
        minimum=1,
        maximum=MOST_CORES,
    )
    cpus: int = option(
        0,
        "CPU cores of one process; 0: the cluster's default (slurm), a share of all cores (local)",
        minimum=0,
        maximum=MOST_CORES,
    )
    # To SLURM, no memory means all of a machine's.
    memory_gb: float | None = option(
        None, "memory of a job on each machine; null: the cluster's default", unit="GiB", minimum=0.1, maximum=MOST_GIB
    )
    minutes: int = option(
        60,
        "time limit; a training that needs more is requeued and continues, any other item fails",
        unit="min",
        minimum=1,
        maximum=MOST_MINUTES,
    )
    partition: str = option("", "partition; empty: the cluster's default")
    account: str = option("", "account to charge; empty: the user's default")
    qos: str = option("", "quality of service; empty: the default")
    constraint: str = option("", "features that the machines must have; empty: any")
    sbatch: dict[str, str] = option({}, "another option of sbatch, without dashes -> its value; a kind adds its own")


@dataclass
class ClusterConfig(Resources):
    """A place to run jobs. Everything that is particular to a cluster is in its file and nowhere else."""

    executor: Literal["slurm", "local", "debug"] = option(
        "local", "slurm; local: processes of this machine, waited for; debug: one after the other in this process"
    )
    parallel: int = option(
        1,
        "jobs at a time: tasks of one job array (slurm), or processes on this machine (local)",
        minimum=1,
        maximum=LONGEST_ARRAY,
    )
    total_gpus: int | None = option(
        0,
        "GPUs of this machine that runs are dealt out to, the first of CUDA_VISIBLE_DEVICES if that is set; null: all "
        "(local)",
        minimum=0,
        maximum=MOST_GPUS,
    )
    max_array: int = option(
        1000,
        "longest job array; larger groups are split (scontrol show config: MaxArraySize)",
        minimum=1,
        maximum=LONGEST_ARRAY,
    )
    signal_seconds: int = option(
        120,
        "how long before its time limit a job is told to stop, by SLURM up to a minute earlier: `minutes` must be more",
        unit="s",
        minimum=1,
        maximum=LONGEST_SIGNAL_SECONDS,
    )
    python: list[str] = option([], "command of Python, for instance that of a container; empty: this interpreter")
    modules: list[str] = option([], "environment modules to load")
    setup: list[str] = option([], "commands of shell to run before; a job ends at one that fails")
    environment: dict[str, str] = option({}, "environment variables of the jobs; nothing secret, it is written down")
    kinds: dict[str, list[str]] = option({}, "kind of item (train, nonzeros, ...) -> its own resources: [gpus=8]")

    def __post_init__(self) -> None:
        if unknown := [kind for kind in self.kinds if kind not in KINDS]:
            raise ConfigError(f"kinds: kinds of items are {', '.join(KINDS)}, got {', '.join(unknown)}")
        shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(Resources)}
        self._by_kind: dict[str, Resources] = {}
        for kind in (*KINDS, ""):
            values = dict(shared)
            if kind in ON_CPU:
                values |= {"gpus": 0, "runs_per_gpu": 1}
            if kind != "train":
                values["nodes"] = 1
            if overrides := self.kinds.get(kind):
                with listing_options(Resources, f"kinds.{kind}"):
                    typed = parse(Resources, overrides)
                names = _fields(overrides)
                values |= {name: getattr(typed, name) for name in names} | {"sbatch": self.sbatch | typed.sbatch}
            # No other kind of item shares its work among processes.
            values["processes"] = (values["processes"] or max(1, values["gpus"])) if kind == "train" else 1
            self._by_kind[kind] = Resources(**values)
        self._check(list(self._by_kind.values()))

    def _check(self, kinds: list[Resources]) -> None:
        """Raise `ConfigError` for fields that contradict each other, or that sbatch would misread."""
        secret = [name for name in self.environment if _SECRET.search(name)]
        wrong = [name for name in self.environment if not _VARIABLE.fullmatch(name)]
        runs_here, in_slurm = self.executor == "local", self.executor == "slurm"
        own, exclusive = [], []
        for resources in kinds:
            for name in ("partition", "account", "qos", "constraint", "sbatch"):
                value = getattr(resources, name)
                for text in (value,) if isinstance(value, str) else (*value, *value.values()):
                    # A line break would end the #SBATCH comment, and what follows would be run.
                    if not text.isprintable():
                        raise ConfigError(f"{name} must not hold control characters or line breaks, got {text!r}")
            sbatch = [
                key.replace("_", "-") for key, text in resources.sbatch.items() if key != "gres" or _GPU.search(text)
            ]
            own += [key for key in sbatch if key.startswith("-") or key in _OWN]
            for name, group in _EXCLUSIVE.items():
                given = [name] * bool(getattr(resources, name)) + [f"sbatch {key}" for key in sbatch if key in group]
                if len(given) > 1 and in_slurm:
                    exclusive.append(" and ".join(given))
        most = math.inf if self.total_gpus is None or not runs_here else self.total_gpus
        shared = [resources for resources in kinds if resources.runs_per_gpu > 1]
        early = f" + {EARLY_SECONDS}" * in_slurm
        least = 0 if self.executor == "debug" else self.signal_seconds + in_slurm * EARLY_SECONDS
        problems: dict[str, list[Any]] = {
            "environment must hold no secrets: export them where you submit, jobs inherit them": [secret]
            if secret
            else [],
            "environment must hold names of variables": [wrong] if wrong else [],
            f"minutes must be at least {least // 60 + 1} (over signal_seconds{early} = {least} s)": [
                k.minutes for k in kinds if k.minutes * 60 <= least
            ],
            "runs_per_gpu needs gpus=1: a job of several GPUs has them alone": [k.gpus for k in shared if k.gpus != 1],
            "the local executor has one machine: nodes must be 1": [
                k.nodes for k in kinds if k.nodes > 1 and runs_here
            ],
            f"gpus must be at most total_gpus = {most}": [k.gpus for k in kinds if k.gpus > most],
            "runs_per_gpu must be 1 with slurm, which deals whole GPUs out (sbatch={gres: ...} asks for shards)": [
                k.runs_per_gpu for k in shared if in_slurm
            ],
            f"sbatch takes options without dashes, and none that the launcher writes ({', '.join(_OWN)})": own,
            "of these sbatch takes only one": exclusive,
        }
        for what, got in problems.items():
            if got:
                raise ConfigError(f"{what}, got {got[0]!r}")

    def resources(self, kind: str) -> Resources:
        """The resources of a job of this kind. Only trainings have several nodes, and kinds that use no GPU have none,
        unless `kinds` says otherwise. `processes` is a number: several for a training only."""
        return self._by_kind.get(kind, self._by_kind[""])

    def with_training_gpus(self, most: int) -> ClusterConfig:
        """The same cluster, where a training takes at most so many GPUs of each machine."""
        if self.resources("train").gpus <= most:
            return self
        return dataclasses.replace(self, kinds=self.kinds | {"train": [*self.kinds.get("train", []), f"gpus={most}"]})

    def variables(self, kind: str) -> dict[str, str]:
        """Environment variables of a job of this kind, without those of its code snapshot."""
        resources = self.resources(kind)
        cpus, threads = resources.cpus, {}
        if self.executor == "slurm" and cpus:
            # srun does not take over what sbatch was asked for (since SLURM 22.05).
            threads = {"OMP_NUM_THREADS": str(cpus), "SRUN_CPUS_PER_TASK": str(cpus)}
        elif self.executor == "local":
            share = len(os.sched_getaffinity(0)) // (self.parallel * (resources.processes or 1))
            threads = {"OMP_NUM_THREADS": str(cpus or max(1, share))}
        return {**threads, **self.environment}


@dataclass
class _Kinds:
    """What a command line adds to the kinds of a file."""

    kinds: dict[str, list[str]] = option({}, "")


def load_cluster(name: str, overrides: Sequence[str] = ()) -> ClusterConfig:
    """The cluster `clusters/<name>.yaml` (or of a file, when `name` is a path), with `field=value` overrides. These win
    over the same field of a kind; those of `kinds` are added to the file's.

    Raises:
        ConfigError: no such cluster (the message names those there are), an unknown field (it lists the valid ones), or
            a wrong value.
    """
    path = find_yaml(name, CLUSTERS, "cluster")
    with listing_options(ClusterConfig, f"cluster={name}"):
        kinds = parse(ClusterConfig, [f"config={path}"]).kinds
        added = parse(_Kinds, [word for word in overrides if _fields([word]) == ["kinds"]]).kinds
        for kind in kinds | added:
            own = kinds.get(kind, [])
            words = [word for word in overrides if set(_fields([word])) <= set(_fields(own))]
            kinds[kind] = [*own, *words, *added.get(kind, [])]
        return parse(ClusterConfig, [f"config={path}", *overrides, f"kinds={json.dumps(kinds, ensure_ascii=False)}"])


def _fields(words: Sequence[str]) -> list[str]:
    """The names in `field=value`."""
    return [word.partition("=")[0].strip() for word in words]
