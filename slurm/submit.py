"""Run an experiment, or what is not done of a whole study: on this machine, or on a SLURM cluster.

    python -m slurm.submit experiments.train model=demo sparsity.l1=1e-3 cluster=local
    python -m slurm.submit experiments.train model=demo training.seed=0,1,2 sparsity.l1=0,1e-3    # six runs
    python -m slurm.submit experiments.train config=runs/local/train/config.yaml cluster=slurm cluster.minutes=600
    python -m slurm.submit study=l1_sweep cluster=slurm              # experiments/studies/l1_sweep.yaml
    python -m slurm.submit study=l1_sweep cluster=slurm --dry-run    # print the jobs, submit nothing

`cluster` names a file of slurm/clusters/ (or is the path of one), `cluster.FIELD=VALUE` changes a field for this time.
Other arguments belong to the experiment (its `--help` lists them), or to the study (`only`, `tasks`, `data`, `runs`,
...). Several values of an experiment's option, separated by commas, are several runs; a comma that belongs to a value
is written with a backslash before it. What is done is not run again, what waits or runs is not submitted again. On
SLURM the command returns at once; on this machine it waits, and Ctrl-C stops the runs after a checkpoint. `python -m
slurm.status` shows how far all is, `slurm.log` what a run prints, `slurm.collect` gathers results, `slurm.cancel` ends
all. The same command tries again what failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from submitit.helpers import environment_variables

from analysis import check
from experiments.data.selection import select_files
from experiments.run.config import describe_options, load_config, nearest, option_types, run_program, yaml_names
from experiments.run.errors import ConfigError, DataError, RunError
from experiments.run.files import write_atomic
from experiments.run.locks import exclusive
from experiments.run.train_config import TrainConfig, micro_batch_size, science, science_differences
from experiments.study.definition import (
    DEFAULT_SECONDS,
    STUDIES,
    StudyConfig,
    command_items,
    load_study,
    naming_study,
    study_graph,
)
from experiments.study.graph import (
    PREPARE,
    Graph,
    Item,
    State,
    config_difference,
    config_of,
)
from experiments.training.trackers import check_trackers
from slurm.cluster import CLUSTERS, ClusterConfig, load_cluster
from slurm.cost import TOKEN_BYTES, costs
from slurm.display import Display, duration, results_table
from slurm.job import ItemJob
from slurm.local import LocalQueue, check_gpus
from slurm.records import (
    CODE,
    CONFIG,
    ITEMS,
    LOGS,
    QUEUE,
    Job,
    Submission,
    latest_jobs,
    naming,
    note_submitted,
    now,
    read_submission,
    write_submission,
)
from slurm.sbatch import group, sbatch_text, slurm_parameters, submit_slurm
from slurm.snapshot import Snapshot, take_snapshot
from slurm.states import ALIVE, ItemState, item_states


class SubmissionFailed(RunError):
    """Some items did not end well."""


@dataclass(frozen=True)
class Request:
    """What a command asks for: a study's name, its folder and items (their folders absolute), and where to run them.

    `names` are the items to submit, all of them or those that `only` names. `configs` are the configurations of the
    items' programs. `study` is the definition of a whole study; without it the items are added to those that the
    folder has.
    """

    name: str
    folder: Path
    items: tuple[Item, ...]
    names: tuple[str, ...]
    cluster: ClusterConfig
    dry_run: bool = False
    study: StudyConfig | None = None
    configs: Mapping[str, Any] = field(default_factory=dict)


def read_request(arguments: Sequence[str]) -> Request:
    """Read a command line.

    Raises:
        ConfigError: an unknown option, cluster, study or module, or a value that cannot be.
    """
    given = [argument.partition("=")[0] for argument in arguments]
    if twice := [key for key in ("cluster", "study") if given.count(key) > 1]:
        raise ConfigError(f"{twice[0]} is given {given.count(twice[0])} times")
    named = {key: argument.partition("=")[2] for key, argument in zip(given, arguments, strict=True)}
    overrides = [argument.removeprefix("cluster.") for argument in arguments if argument.startswith("cluster.")]
    cluster = load_cluster(named.get("cluster", "local"), overrides)
    rest = [word for word in arguments if word != "--dry-run" and not word.startswith(("cluster=", "cluster."))]
    if dashed := [word for word in rest if word.startswith("-")]:
        raise ConfigError(f"unknown option {dashed[0]!r}: the only ones with dashes are --dry-run and --help")
    study = None
    if rest and "=" not in rest[0]:
        name, folder, items, configs = command_items(rest[0], rest[1:])
        names = [item.name for item in items]
    elif named.get("study"):
        known = ["cluster", "study", *option_types(StudyConfig)]
        for key in (argument.partition("=")[0] for argument in rest):
            if key not in known and "'cluster'" in (meant := nearest(key, known)):  # no option of the study
                raise ConfigError(f"unknown option {key!r}{meant}")
        with naming_study(named["study"]):
            study = load_study(named["study"], [argument for argument in rest if not argument.startswith("study=")])
            graph = study_graph(study)
            names = list((graph.select(study.only) if study.only else graph).items)
            # As their programs will, so that a mistake shows before anything waits in a queue.
            configs = {item.name: config_of(item) for item in graph.items.values()}
        name, folder, items = study.name, study.folder, list(graph.items.values())
        if study.training_gpus is not None:
            cluster = cluster.with_training_gpus(study.training_gpus)
    else:
        raise ConfigError("wanted a module (experiments.train ...) or study=NAME; --help shows examples")
    absolute = tuple(
        # The arguments stay as they were typed.
        dataclasses.replace(item, folder=item.folder.absolute(), files=tuple(path.absolute() for path in item.files))
        for item in items
    )
    dry_run = "--dry-run" in arguments
    return Request(name, folder.absolute(), absolute, tuple(names), cluster, dry_run, study, configs)


def submit(request: Request, say: Callable[[str], None] = print) -> None:
    """Submit, or on this machine run, what is not done and not on its way; of a dry run, only say what that is.

    Raises:
        SubmissionFailed: on this machine, after everything else has run, when items failed.
        ConfigError: items wait, run or have progress with other options or elsewhere, or their text is not there.
        RunError: SLURM is not there or refuses; the study is being submitted or run by another process.
        Stopped: on this machine, by SIGTERM or Ctrl-C.
    """
    cluster, folder, executor = request.cluster, request.folder, request.cluster.executor
    trainings = {item.name: request.configs[item.name] for item in request.items if item.kind == "train"}
    chosen = {name: training for name, training in trainings.items() if name in request.names}
    if chosen:
        check_trainings(chosen, cluster)
    if not request.dry_run:
        if executor == "slurm" and shutil.which("sbatch") is None:
            raise RunError("there is no SLURM on this machine: log in to the cluster, or choose cluster=local")
        if executor == "local":
            check_gpus(cluster, {item.kind for item in request.items if item.name in request.names})
        os.umask(0o077)  # also of the jobs: both executors hand it on
        folder.mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext() if request.dry_run else exclusive(folder, "study"):
        items = request.items
        if not request.dry_run:
            (folder / QUEUE).unlink(missing_ok=True)  # of a launcher that was killed
            items = tuple(_with_own_config(item, folder) for item in items)
        before = read_submission(folder) if (folder / ITEMS).is_file() else None
        steps = {name: training.training.steps for name, training in trainings.items()}
        submission = Submission(items, str(Path.cwd()), steps)
        if before is not None and request.study is not None:
            _refuse_what_was_removed(folder, before, {item.name for item in items})
        elif before is not None:
            if before.directory != submission.directory:
                raise ConfigError(f"{folder} was submitted from {before.directory}: go there, or choose another folder")
            # First what others need: the text of a training that was there before may be new.
            others = (item for item in before.items if item.name not in request.configs)
            submission = Submission((*items, *others), before.directory, before.steps | steps)
        states = item_states(folder, submission, config_difference)
        for item in items:
            if item.name in request.names and item.kind != PREPARE:  # whose name stands for its options
                _refuse_other_options(item, states[item.name], before, is_study=request.study is not None)
        alive = [name for name, entry in states.items() if entry.state in ALIVE]
        places = {name: entry.job.executor for name in alive if (entry := states[name]).job is not None}
        if elsewhere := [name for name in places if (places[name] == "slurm") != (executor == "slurm")]:
            place = "this machine" if executor == "slurm" else "SLURM"
            what = "wait for it, cancel the study there first, or give another runs=FOLDER"
            raise ConfigError(f"{', '.join(elsewhere)}: still on {place}; {what}")
        # What still runs here from a launcher that was killed, the next one waits for.
        open_names = [name for name in request.names if states[name].state is not State.DONE]
        names = [name for name in open_names if executor != "slurm" or name not in alive]
        check_texts(states[name].item for name in names)
        on_their_way = len(open_names) - len(names)
        done = len(request.names) - len(open_names)
        say(f"study {request.name}: {len(names)} to submit, {on_their_way} on their way, {done} done, in {folder}")
        queued = {name: job.job for name in alive if (job := states[name].job) is not None}
        if request.dry_run:
            _show(request, [states[name].item for name in names], queued, say)
            return
        write_submission(folder, submission)
        if executor == "slurm" and names:
            _to_slurm(request, [states[name].item for name in names], queued, say, submission)
            study = naming(folder)
            say(f"python -m slurm.status {study} shows how far it is")
            say(f"python -m slurm.log {study} item={names[-1]} follow=true shows what an item prints")
        elif executor == "debug":
            _debug(cluster, submission, names)
        elif executor == "local":
            _run_here(request, submission, names, say)


def check_trainings(trainings: Mapping[str, TrainConfig], cluster: ClusterConfig) -> None:
    """Whether the cluster can run these trainings (by name), as far as that can be said before they wait in a queue.

    Raises:
        ConfigError: a training's steps cannot be dealt out to the processes that it would get, or it logs to a package
            that is not installed.
    """
    resources = cluster.resources("train")
    processes = resources.nodes * (resources.processes or 1) if cluster.executor != "debug" else 1
    for name, training in trainings.items():
        try:
            micro_batch_size(training, processes)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}; the cluster's nodes, gpus and processes say how many") from error
    if not cluster.python:  # another Python may have other packages
        check_trackers(sorted({tracker for training in trainings.values() for tracker in training.run.log}))


def check_texts(items: Iterable[Item]) -> None:
    """Whether the files that these items tokenize are there.

    Raises:
        ConfigError: naming the path.
    """
    for data in (config_of(item).data for item in items if item.kind == PREPARE):
        for text in (data.source, data.validation):
            if text.startswith("path:"):
                try:
                    select_files(text.removeprefix("path:"))
                except DataError as error:
                    raise ConfigError(str(error)) from error


def _with_own_config(item: Item, folder: Path) -> Item:
    """The item with copies of the files that `config=FILE` names: until the job starts they may change."""
    arguments = list(item.arguments)
    for number, argument in enumerate(arguments):
        if argument.startswith("config="):
            content = Path(argument.removeprefix("config=")).read_bytes()
            path = folder / CODE / f"config-{hashlib.sha256(content).hexdigest()[:10]}.yaml"
            write_atomic(path, content, "configuration")
            arguments[number] = f"config={path}"
    return dataclasses.replace(item, arguments=tuple(arguments))


def _refuse_what_was_removed(folder: Path, before: Submission, names: Collection[str]) -> None:
    """Refuse a study without an item that waits or runs: no command would show or end it any more."""
    gone = tuple(dataclasses.replace(item, needs=()) for item in before.items if item.name not in names)
    states = item_states(folder, dataclasses.replace(before, items=gone), lambda item: None)
    if alive := [f"{name} ({entry.state.value})" for name, entry in states.items() if entry.state in ALIVE]:
        raise ConfigError(f"the study no longer has {', '.join(alive)}: wait for it, or cancel the study first")


def _refuse_other_options(item: Item, current: ItemState, before: Submission | None, *, is_study: bool) -> None:
    """Refuse an item that waits, runs or has progress with other options under the same name: it would be dropped, or
    fail after waiting in the queue."""
    old = next((entry for entry in before.items if entry.name == item.name), None) if before else None
    if current.state in ALIVE and old is not None and old.arguments != item.arguments:
        earlier, what = config_of(old), f"{item.name} is {current.state.value} with other options"
    elif item.kind == "train" and current.state is not State.DONE and (item.folder / CONFIG).is_file():
        from experiments.models.checkpoint import has_checkpoints  # imports torch, which takes seconds

        if not (item.rows_path.is_file() or has_checkpoints(item.folder)):
            return
        try:
            earlier = load_config(TrainConfig, item.folder / CONFIG)
        except ConfigError:
            return  # made by another version: the training itself says so
        what = f"{item.folder} holds a run with other options"
    else:
        return
    asked = config_of(item)
    if asked is not None and (differences := science_differences(science(earlier), science(asked))):
        advice = "Give" if current.state in ALIVE else "Delete the folder, or give"
        other = "it another name in the study, or the study runs=FOLDER" if is_study else "another run.item"
        raise ConfigError(f"{what}: {differences}. {advice} {other}")


# --- on this machine --------------------------------------------------------------------------------------------------


def _run_here(request: Request, submission: Submission, names: list[str], say: Callable[[str], None]) -> None:
    """Run the named items, then say what came out of the study."""
    graph, study, folder, began = Graph(submission.items, config_difference), request.study, request.folder, time.time()
    failed = {}
    if names:
        snapshot = take_snapshot(folder / CODE)
        say(f"code {snapshot.revision}, copied to {snapshot.path}")
        by_kind = study.seconds if study is not None else {}
        expected = {name: by_kind.get(graph.items[name].kind, DEFAULT_SECONDS) for name in names}
        display = Display(request.name, expected, submission.steps, say)
        failed = LocalQueue(folder, graph, request.cluster, snapshot, submission.directory, display).run(names)
        say(f"{duration(time.time() - began)} in all")
    if study is not None:
        if text := results_table(graph):
            say(text)
        places = {
            "tables and figures": study.output / "index.html",
            "executed notebooks": study.folder / "notebooks",
            "runs and their logs": study.folder,
        }
        for what, path in places.items():
            if path.exists():
                say(f"{what + ':':<24}{path}")
    jobs = latest_jobs(folder)
    for name, reason in failed.items():
        say(f"{name}: {reason}" + (f" (log: {jobs[name].log})" if name in jobs else ""))
    if failed:
        raise SubmissionFailed(
            f"{len(failed)} of {len(names)} items are not done: {', '.join(failed)}; the same command tries them again"
        )
    if study is not None and is_as_committed(study):
        print(flush=True)
        check.main([f"study={study.name}", f"source={study.folder}"])


def is_as_committed(study: StudyConfig) -> bool:
    """Whether the repository holds rows of a study of this name, with all its items, of models that were trained on the
    same text as these."""
    from analysis.choose import where
    from analysis.load import FIGURES
    from analysis.read import read_rows

    if study.only or study.name not in yaml_names(STUDIES):
        return False
    committed_study = load_study(study.name)
    if any(getattr(study, name) != getattr(committed_study, name) for name in ("data", "kinds", "trainings")):
        return False
    committed = [where(read_rows(path), study=study.name)["text"] for path in FIGURES.glob("*/rows.csv")]
    here = [read_rows(path)["text"] for path in study.folder.glob("*/rows.csv")]
    others = {text for texts in here for text in texts} - {text for texts in committed for text in texts}
    return any(len(texts) for texts in committed) and not others - {""}


def _debug(cluster: ClusterConfig, submission: Submission, names: list[str]) -> None:
    """One item after the other in this process; the first error ends it, in a debugger if this is a terminal."""
    import submitit

    items = {item.name: item for item in submission.items}
    for item in (item for item in submission.items if item.name in names):
        item.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        minutes, needs = cluster.resources(item.kind).minutes, tuple(items[name] for name in item.needs)
        job = ItemJob(item, submission.directory, minutes, cluster.signal_seconds, needs)
        if sys.stdin.isatty():
            submitit.DebugExecutor(folder=item.folder / LOGS).submit(job).results()
        else:
            with environment_variables(SUBMITIT_DEBUG_JOB_ID="DEBUG"):
                job()


# --- on SLURM ---------------------------------------------------------------------------------------------------------


def _to_slurm(
    request: Request,
    items: Sequence[Item],
    queued: Mapping[str, str],
    say: Callable[[str], None],
    submission: Submission | None,
) -> int:
    """Submit items as jobs and arrays; `queued` are the jobs of those that are in the queue already. Without a
    submission, print what would be submitted: the first sbatch file, and the options of the others. Returns the number
    of jobs."""
    cluster, folder, ids = request.cluster, request.folder / LOGS, list[str]()
    snapshot = Snapshot(request.folder / CODE / "REVISION", "REVISION")
    if submission is not None:
        snapshot = take_snapshot(request.folder / CODE)
        say(f"code {snapshot.revision}, copied to {snapshot.path}")
    known = {item.name: item for item in (submission.items if submission is not None else ())}
    for number, entry in enumerate(group(items, queued, cluster.max_array)):
        count, after = len(entry.items), entry.dependency(ids)
        title = entry.items[0].name if count == 1 else f"{count} x {entry.kind}"
        note = f"{title}, after {after}" if after else title
        parameters = slurm_parameters(
            cluster,
            entry.kind,
            name=f"{request.name}-{entry.kind if count > 1 else title}",
            snapshot=snapshot,
            directory=submission.directory if submission is not None else str(Path.cwd()),
            dependency=after,
        )
        if submission is None:
            ids.append(f"JOB_{number}")
            say(f"# {'-' * 30} {ids[-1]}: {note}")
            text = sbatch_text(cluster, parameters, folder, count)
            options = [line for line in text.splitlines() if line.startswith("#SBATCH")]
            say("\n".join(options) if number else text)
            for task in sorted({0, count - 1}):
                say(f"# task {task}: {entry.items[task].command()}")
            continue
        fixed = (submission.directory, cluster.resources(entry.kind).minutes, cluster.signal_seconds)
        callables = [ItemJob(item, *fixed, tuple(known[need] for need in item.needs)) for item in entry.items]
        try:
            jobs = submit_slurm(cluster, parameters, folder, callables)
        except RunError as error:
            undo = f"; submitted before: {', '.join(ids)} (slurm.cancel {naming(request.folder)} ends all of the study)"
            raise RunError(f"{note}: {error}{undo if ids else ''}") from error
        logs = [str(folder / f"{job}_0_log.out") for job in jobs]
        pairs = zip(entry.items, jobs, logs, strict=True)
        seconds = cluster.signal_seconds
        submitted = [Job(item.name, job, "slurm", log, now(), signal_seconds=seconds) for item, job, log in pairs]
        note_submitted(request.folder, submitted)
        ids.append(jobs[0].partition("_")[0])
        say(f"job {ids[-1]}: {note}")
        say(f"    log: {logs[0]}" + (f" (and {count - 1} more)" if count > 1 else ""))
    return len(ids)


def _show(request: Request, items: Sequence[Item], queued: Mapping[str, str], say: Callable[[str], None]) -> None:
    """What would be submitted, and totals."""
    trainings, jobs = [request.configs[item.name] for item in items if item.kind == "train"], ""
    if request.cluster.executor == "slurm":
        jobs = f" in {_to_slurm(request, items, queued, say, None)} jobs of SLURM"
    else:
        for item in items:
            after = f" (after {', '.join(item.needs)})" if item.needs else ""
            say(f"# {item.name}{after}\n{item.command()}\n")
    models = costs(trainings)
    hours = sum(cost.all_hours for cost in models)
    disk = sum(cost.runs * cost.checkpoint_bytes for cost in models)
    disk += sum({cost.tokens for cost in models}) * TOKEN_BYTES
    need = request.cluster.resources("train")
    each = f" (GPUs of each: {need.nodes * need.gpus})" if trainings and need.gpus else ""
    say(
        f"# Nothing was submitted. {len(items)} items{jobs}, {len(trainings)} of them trainings{each}: "
        f"about {hours:,.1f} GPU hours of training (one H200), {disk / 1e9:,.1f} GB of checkpoints and token files"
    )


# --- the program ------------------------------------------------------------------------------------------------------


def help_text() -> str:
    """The text of `--help`."""
    fields = {"cluster": describe_options(ClusterConfig), "study": describe_options(StudyConfig)}
    listed = "\n\n".join(f"Fields of a {name}:\n{text}" for name, text in fields.items())
    names = f"clusters: {', '.join(yaml_names(CLUSTERS))}\nstudies: {', '.join(yaml_names(STUDIES))}"
    return f"{__doc__}\n{names}\n\n{listed}"


def main(arguments: Sequence[str]) -> None:
    """Read the arguments and submit; exits as `experiments.run.config.entry` does."""
    asks_for_help = not {"-h", "--help"}.isdisjoint(arguments)
    say = functools.partial(print, flush=True)
    run_program(lambda: say(help_text()) if asks_for_help else submit(read_request(arguments), say), logging.WARNING)


if __name__ == "__main__":
    main(sys.argv[1:])
