"""Run an experiment, or what is not done of a whole study: on this machine, or on a SLURM cluster.

    python -m slurm.submit experiments.train model=demo sparsity.l1=1e-3 cluster=local
    python -m slurm.submit experiments.train model=demo training.seed=0,1,2 sparsity.l1=0,1e-3    # six runs
    python -m slurm.submit experiments.train config=runs/local/train/config.yaml cluster=slurm cluster.minutes=600
    python -m slurm.submit study=l1_sweep cluster=slurm              # experiments/studies/l1_sweep.yaml
    python -m slurm.submit study=l1_sweep cluster=slurm --dry-run    # print the sbatch files, submit nothing

`cluster` names a file of slurm/clusters/ (or is the path of one), `cluster.FIELD=VALUE` changes a field for this
time. Other arguments belong to the experiment (its `--help` lists them), or to the study (`only`, `tasks`, `data`,
`runs`, `figures`, ...). Several values of an experiment's option, separated by commas, are several runs; a comma that
belongs to a value is written with a backslash before it. What is done is not run again, what waits or runs is not
submitted again. On SLURM the command returns at once; on this machine it waits, and Ctrl-C stops the runs after a
checkpoint. `python -m slurm.status` shows how far all is, `slurm.log` what a run prints, `slurm.collect` gathers
results, `slurm.resubmit` tries again what failed, `slurm.cancel` ends it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from rich.console import Console
from submitit.helpers import environment_variables

from analysis import check
from experiments.run.config import describe_options, load_config, nearest, run_program
from experiments.run.errors import EXIT_DONE, ConfigError, RunError
from experiments.run.files import sha256_file, write_atomic
from experiments.run.locks import exclusive
from experiments.run.train_config import TrainConfig, micro_batch_size
from experiments.study.definition import (
    DEFAULT_SECONDS,
    PREPARE,
    StudyConfig,
    load_study,
    naming_study,
    study_graph,
    study_names,
)
from experiments.study.graph import Graph, Item, State
from experiments.study.programs import check_arguments, config_difference, config_of, difference
from experiments.study.single import command_items
from experiments.study.summary import summary_table, where_to_look
from experiments.study.sweep import value_name
from experiments.training.trackers import check_trackers
from slurm.cluster import CLUSTERS, ClusterConfig, load_cluster, processes_per_node, to_yaml
from slurm.command import naming
from slurm.display import Display
from slurm.executors import sbatch_text, slurm_parameters, submit_slurm, time_limit
from slurm.groups import Group, dependency, group
from slurm.job import ItemJob
from slurm.local import LocalQueue, check_gpus
from slurm.records import (
    CLUSTER,
    CODE,
    CONFIG,
    LOGS,
    DamagedRecord,
    Job,
    Submission,
    latest_jobs,
    note_submitted,
    now,
    read_submission,
    was_submitted,
    write_submission,
)
from slurm.snapshot import Snapshot, take_snapshot
from slurm.states import ALIVE, ItemState, item_states
from slurm.status import duration

log = logging.getLogger(__name__)


class SubmissionFailed(RunError):
    """Some items did not end well."""


@dataclass(frozen=True)
class Request:
    """What a command asks for: a study's name, its folder and items (their folders absolute), and where to run them.

    `names` are the items to submit, all of them or those that `only` names. `study` is the definition of a whole study.
    With `adds` the items are added to those that the folder has; otherwise they are all that it has from now on.
    """

    name: str
    folder: Path
    items: tuple[Item, ...]
    names: tuple[str, ...]
    cluster: ClusterConfig
    dry_run: bool = False
    study: StudyConfig | None = None
    adds: bool = False

    def named(self) -> list[Item]:
        """The items to submit, if they are not done."""
        return [item for item in self.items if item.name in self.names]


def read_request(arguments: Sequence[str]) -> Request:
    """Read a command line.

    Raises:
        ConfigError: an unknown option, cluster, study or module, or a value that cannot be.
    """
    dry_run, rest = "--dry-run" in arguments, [argument for argument in arguments if argument != "--dry-run"]
    name, rest = take(rest, "cluster", "local")
    overrides = [argument.removeprefix("cluster.") for argument in rest if argument.startswith("cluster.")]
    cluster = load_cluster(name, overrides)
    rest = [argument for argument in rest if not argument.startswith("cluster.")]
    if rest and "=" not in rest[0]:
        command = command_items(rest[0], rest[1:])
        check_arguments(command.items)
        items = tuple(map(absolute, command.items))
        names = tuple(item.name for item in items)
        return Request(command.study, command.folder.absolute(), items, names, cluster, dry_run, adds=True)
    name, rest = take(rest, "study", "")
    if not name:
        raise ConfigError("wanted a module (experiments.train ...) or study=NAME; --help shows examples")
    known = ["cluster", *(field.name for field in dataclasses.fields(StudyConfig))]
    for key in (argument.partition("=")[0] for argument in rest):
        if key not in known and "'cluster'" in (meant := nearest(key, known)):  # no option of the study
            raise ConfigError(f"unknown option {key!r}{meant}")
    with naming_study(name):
        study = load_study(name, rest)
        graph = study_graph(study)
        check_arguments(graph.items.values())
        names = tuple((graph.select(study.only) if study.only else graph).items)
    items = tuple(map(absolute, graph.items.values()))
    return Request(study.name, study.folder.absolute(), items, names, cluster, dry_run, study=study)


def take(arguments: Sequence[str], key: str, default: str) -> tuple[str, list[str]]:
    """The value of `key=value`, and the other arguments. Raises `ConfigError` when it is given twice."""
    values = [argument.partition("=")[2] for argument in arguments if argument.startswith(f"{key}=")]
    if len(values) > 1:
        raise ConfigError(f"{key} is given {len(values)} times")
    return (values or [default])[0], [argument for argument in arguments if not argument.startswith(f"{key}=")]


def absolute(item: Item) -> Item:
    """The item with folders that mean the same everywhere. Its arguments stay as they were typed."""
    return dataclasses.replace(item, folder=item.folder.absolute(), files=tuple(path.absolute() for path in item.files))


# --- submitting -------------------------------------------------------------------------------------------------------


def submit(wanted: Request, say: Callable[[str], None] = print) -> None:
    """Submit, or on this machine run, what is not done and not on its way.

    Raises:
        SubmissionFailed: on this machine, after everything else has run, when items failed.
        RunError: SLURM is not there or refuses; the study is being submitted or run by another process.
        Stopped: on this machine, by SIGTERM or Ctrl-C.
    """
    trainings = {item.name: config_of(item) for item in wanted.items if item.kind == "train"}
    check_trainings({name: one for name, one in trainings.items() if name in wanted.names}, wanted.cluster)
    if wanted.dry_run:
        _show(wanted, say)
        return
    if wanted.cluster.executor == "slurm" and shutil.which("sbatch") is None:
        raise RunError("there is no SLURM on this machine: log in to the cluster, or choose cluster=local")
    if wanted.cluster.executor == "local":
        check_gpus(wanted.cluster, {item.kind for item in wanted.named()})
    os.umask(0o077)  # also of the jobs: both executors hand it on
    wanted.folder.mkdir(parents=True, exist_ok=True)
    with exclusive(wanted.folder, "study"):
        wanted = dataclasses.replace(
            wanted, items=tuple(_with_own_config(item, wanted.folder) for item in wanted.items)
        )
        before = _submitted_before(wanted)
        submission = _submission(wanted, before, trainings)
        states = item_states(wanted.folder, submission, config_difference)
        for damage in states.damaged:
            say(damage)
        _check_place(wanted.cluster.executor, states)
        _check_options(wanted, before, states)
        # What still runs here from a launcher that was killed, the next one waits for.
        over = (State.DONE, *ALIVE) if wanted.cluster.executor == "slurm" else (State.DONE,)
        names = [item.name for item in wanted.named() if states[item.name].state not in over]
        alive = [item.name for item in wanted.named() if states[item.name].state in ALIVE and item.name not in names]
        done = len(wanted.names) - len(names) - len(alive)
        say(f"study {wanted.name}: {len(names)} to submit, {len(alive)} on their way, {done} done, in {wanted.folder}")
        write_submission(wanted.folder, submission)
        write_atomic(wanted.folder / CLUSTER, to_yaml(wanted.cluster), "cluster")
        if wanted.cluster.executor == "slurm" and names:
            _submit_to_slurm(wanted, submission, _groups(wanted, states, names), say)
        elif wanted.cluster.executor == "debug":
            _debug(wanted.cluster, submission, names)
        elif wanted.cluster.executor == "local":
            _run_here(wanted, submission, names, say)


def check_trainings(trainings: Mapping[str, TrainConfig], cluster: ClusterConfig) -> None:
    """Whether the cluster can run these trainings (by name), as far as that can be said before they wait in a queue.

    Raises:
        ConfigError: a training's steps cannot be dealt out to the processes that it would get, or it logs to a package
            that is not installed.
    """
    resources = cluster.resources("train")
    processes = 1 if cluster.executor == "debug" else resources.nodes * processes_per_node(resources, "train")
    for name, training in trainings.items():
        try:
            micro_batch_size(training, processes)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}; the cluster's nodes, gpus and processes say how many") from error
    if not cluster.python:  # another Python may have other packages
        check_trackers(sorted({tracker for training in trainings.values() for tracker in training.run.log}))


def _with_own_config(item: Item, folder: Path) -> Item:
    """The item with copies of the files that `config=FILE` names: until the job starts they may change."""

    def own(argument: str) -> str:
        key, _, name = argument.partition("=")
        if key != "config":
            return argument
        path = folder / CODE / f"config-{sha256_file(Path(name))[:10]}.yaml"
        write_atomic(path, Path(name).read_bytes(), "configuration")
        return f"config={path}"

    return dataclasses.replace(item, arguments=tuple(map(own, item.arguments)))


def _check_place(executor: str, states: dict[str, ItemState]) -> None:
    """A study is in one place at a time: SLURM cannot wait for a process of this machine, nor the other way round."""
    alive = {name: one.job.executor for name, one in states.items() if one.state in ALIVE and one.job}
    if elsewhere := [name for name, place in alive.items() if (place == "slurm") != (executor == "slurm")]:
        place = "this machine" if executor == "slurm" else "SLURM"
        raise ConfigError(f"{', '.join(elsewhere)}: still on {place}; wait for it, or cancel the study there first")


def _check_options(wanted: Request, before: Submission | None, states: Mapping[str, ItemState]) -> None:
    """Refuse an item that waits, runs or has progress with other options under the same name: it would be dropped, or
    fail after waiting in the queue."""
    earlier = {item.name: item for item in before.items} if before else {}
    for item in wanted.named():
        if item.kind == PREPARE:  # its name stands for all that decides the tokens
            continue
        one, old = states[item.name], earlier.get(item.name)
        if one.state in ALIVE and old is not None and old.arguments != item.arguments:
            _refuse_change(item, config_of(old), f"{item.name} is {one.state.value} with other options")
        elif item.kind == "train" and one.state is not State.DONE and _has_progress(item):
            try:
                saved = load_config(TrainConfig, item.folder / CONFIG)
            except ConfigError:
                continue  # made by another version: the training itself says so
            _refuse_change(item, saved, f"{item.folder} holds a run with other options")


def _refuse_change(item: Item, before: Any, what: str) -> None:
    asked = config_of(item)
    change = None if asked is None else difference(before, asked)
    if change is not None:
        name = f"{item.name}_{value_name(change.key, change.now)}"
        raise ConfigError(
            f"{what}: {change}. Give this one a name of its own: run.item={name} on the command line; in the file of a "
            "study, another name under trainings, or name the study otherwise"
        )


def _has_progress(item: Item) -> bool:
    from experiments.models.checkpoint import has_checkpoints

    return (item.folder / CONFIG).is_file() and (item.rows_path.is_file() or has_checkpoints(item.folder))


def _submitted_before(wanted: Request) -> Submission | None:
    """What the folder has; for a whole study, which writes all of it anew, None also where that cannot be read."""
    if not was_submitted(wanted.folder):
        return None
    try:
        return read_submission(wanted.folder)
    except DamagedRecord as damage:
        if wanted.adds:
            raise
        log.warning("%s", damage)
        return None


def _submission(wanted: Request, before: Submission | None, trainings: Mapping[str, TrainConfig]) -> Submission:
    """All items that the study has from now on."""
    items, directory = wanted.items, str(Path.cwd())
    if wanted.adds and before is not None:
        if before.directory != directory:
            raise ConfigError(
                f"{wanted.folder} was submitted from {before.directory}: go there, or choose another folder"
            )
        added = {item.name for item in wanted.items}
        # First what others need: the text of a training that was there before may be new.
        items = (*wanted.items, *(item for item in before.items if item.name not in added))
    steps = dict(before.steps) if wanted.adds and before is not None else {}
    steps |= {name: training.training.steps for name, training in trainings.items()}
    return Submission(items, directory, steps)


def _snapshot(wanted: Request, say: Callable[[str], None]) -> Snapshot:
    snapshot = take_snapshot(wanted.folder / CODE)
    say(f"code {snapshot.revision}, copied to {snapshot.path}")
    return snapshot


# --- on this machine --------------------------------------------------------------------------------------------------


def _run_here(wanted: Request, submission: Submission, names: list[str], say: Callable[[str], None]) -> None:
    """Run the named items, then say what came out of the study."""
    graph, began = Graph(submission.items, config_difference), time.monotonic()
    failed = {}
    if names:
        snapshot = _snapshot(wanted, say)
        study = wanted.study
        expected = {n: study.expected_seconds(graph.items[n]) if study else DEFAULT_SECONDS for n in names}
        with Display(wanted.name, expected, submission.steps, say) as display:
            queue = LocalQueue(wanted.folder, graph, wanted.cluster, snapshot, submission.directory, display)
            failed = queue.run(names)
        say(f"{duration(time.monotonic() - began)} in all")
    if wanted.study is not None:
        _show_results(wanted.study, graph, say)
    logs = {name: job.log for name, job in latest_jobs(wanted.folder).items()}
    for name, reason in failed.items():
        say(f"{name}: {reason}" + (f" (log: {logs[name]})" if name in logs else ""))
    if failed:
        raise SubmissionFailed(
            f"{len(failed)} of {len(names)} items are not done: {', '.join(failed)}; the same command tries them again"
        )
    if wanted.study is not None:
        _compare_with_expected(wanted.study)


def _show_results(study: StudyConfig, graph: Graph, say: Callable[[str], None]) -> None:
    if (table := summary_table(graph)).row_count:
        # In a log file a line may be as long as it is.
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(table)
    say(where_to_look(study, graph))


def _compare_with_expected(study: StudyConfig) -> None:
    """Print how the results compare with those that the repository holds of the same study, if it holds any."""
    if _is_as_committed(study):
        print(flush=True)
        check.main([f"study={study.name}", f"source={study.folder}"])


def _is_as_committed(study: StudyConfig) -> bool:
    """Whether the repository holds rows of a study of this name, with all its items, of models that were trained on the
    same text as these."""
    from analysis.choose import where
    from analysis.load import FIGURES
    from analysis.read import read_rows

    if study.only or study.name not in study_names():
        return False
    own = load_study(study.name)
    if (study.data, study.kinds, study.trainings) != (own.data, own.kinds, own.trainings):
        return False
    committed = [where(read_rows(path), study=study.name)["text"] for path in FIGURES.glob("*/rows.csv")]
    here = [read_rows(path)["text"] for path in study.folder.glob("*/rows.csv")]
    others = {text for texts in here for text in texts} - {text for texts in committed for text in texts}
    return any(len(texts) for texts in committed) and not others - {""}


def _debug(cluster: ClusterConfig, submission: Submission, names: list[str]) -> None:
    """One item after the other in this process; the first error ends it, in a debugger if this is a terminal."""
    for item in submission.items:
        if item.name not in names:
            continue
        item.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        job = _job(item.name, cluster, submission)
        if sys.stdin.isatty():
            submitit.DebugExecutor(folder=item.folder / LOGS).submit(job).results()
        else:
            with environment_variables(SUBMITIT_DEBUG_JOB_ID="DEBUG"):
                job()


# --- on SLURM ---------------------------------------------------------------------------------------------------------


def _job(name: str, cluster: ClusterConfig, submission: Submission) -> ItemJob:
    items = {item.name: item for item in submission.items}
    needs = tuple(items[need] for need in items[name].needs)
    return ItemJob(items[name], submission.directory, time_limit(cluster, items[name].kind), needs)


def _submit_to_slurm(wanted: Request, submission: Submission, groups: list[Group], say: Callable[[str], None]) -> None:
    snapshot, folder = _snapshot(wanted, say), wanted.folder / LOGS
    ids: dict[int, str] = {}
    for number, one in enumerate(groups):
        after = dependency(one, ids)
        parameters = _parameters(wanted, one, snapshot, submission.directory, after)
        callables = [_job(item.name, wanted.cluster, submission) for item in one.items]
        jobs = submit_slurm(wanted.cluster, parameters, folder, callables)
        records = [_record(item, job, folder) for item, job in zip(one.items, jobs, strict=True)]
        note_submitted(wanted.folder, records)
        ids[number] = jobs[0].job_id.partition("_")[0]
        say(f"job {ids[number]}: {_title(one)}" + (f", after {after}" if after else ""))
        more = f" (and {len(records) - 1} more)" if len(records) > 1 else ""
        say(f"    log: {records[0].log}{more}")
    study = naming(wanted.folder)
    say(f"python -m slurm.status {study} shows how far it is")
    say(f"python -m slurm.log {study} item={wanted.names[-1]} follow=true shows what an item prints")


def _record(item: Item, job: submitit.Job, folder: Path) -> Job:
    return Job(item.name, job.job_id, "slurm", str(folder / f"{job.job_id}_0_log.out"), now())


def _groups(wanted: Request, states: dict[str, ItemState], names: list[str]) -> list[Group]:
    items = [states[name].item for name in names]
    on_their_way = {name: one.job.job for name, one in states.items() if one.state in ALIVE and one.job}
    done = {name for name, one in states.items() if one.state is State.DONE}
    pending = [dataclasses.replace(i, needs=tuple(n for n in i.needs if n not in done)) for i in items]
    return group(pending, on_their_way, wanted.cluster.max_array)


def _parameters(wanted: Request, one: Group, snapshot: Snapshot, directory: str, after: str) -> dict[str, Any]:
    name = f"{wanted.name}-{one.kind if len(one.items) > 1 else one.items[0].name}"
    return slurm_parameters(
        wanted.cluster, one.kind, name=name, snapshot=snapshot, directory=directory, dependency=after
    )


def _title(one: Group) -> str:
    return one.items[0].name if len(one.items) == 1 else f"{len(one.items)} x {one.kind}"


# --- dry run, help ----------------------------------------------------------------------------------------------------


def _show(wanted: Request, say: Callable[[str], None]) -> None:
    """What would be submitted if nothing were done yet."""
    snapshot = Snapshot(wanted.folder / CODE / "REVISION", "REVISION")
    if wanted.cluster.executor != "slurm":
        for item in wanted.named():
            after = f" (after {', '.join(item.needs)})" if item.needs else ""
            say(f"# {item.name}{after}\n{item.command()}\n")
        return
    groups = group(wanted.named(), {}, wanted.cluster.max_array)
    ids = {number: f"JOB_{number}" for number in range(len(groups))}
    for number, one in enumerate(groups):
        parameters = _parameters(wanted, one, snapshot, str(Path.cwd()), dependency(one, ids))
        say(f"# {'-' * 30} JOB_{number}: {_title(one)}")
        say(sbatch_text(wanted.cluster, parameters, wanted.folder / LOGS, len(one.items)))
        for task, item in enumerate(one.items):
            say(f"# task {task}: {item.command()}")


def help_text() -> str:
    """The text of `--help`."""
    clusters = ", ".join(sorted(path.stem for path in CLUSTERS.glob("*.yaml")))
    studies = ", ".join(study_names())
    fields = describe_options(ClusterConfig)
    return f"{__doc__}\nclusters: {clusters}\nstudies: {studies}\n\nFields of a cluster:\n{fields}"


def main(arguments: Sequence[str]) -> None:
    """Read the arguments and submit; exits as `experiments.run.config.entry` does."""
    if not {"-h", "--help"}.isdisjoint(arguments):
        print(help_text())
        sys.exit(EXIT_DONE)

    run_program(lambda: submit(read_request(arguments), lambda line: print(line, flush=True)), logging.WARNING)


if __name__ == "__main__":
    main(sys.argv[1:])
