"""Clusters, studies, groups of jobs and sbatch files: everything before anything is submitted."""

import dataclasses
import functools
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.run.config import describe_options, parse, run_program, to_yaml
from experiments.run.errors import EXIT_FAILED, ConfigError, RunError
from experiments.run.train_config import TrainConfig
from experiments.study.graph import Item
from slurm.cluster import CLUSTERS, ClusterConfig, load_cluster
from slurm.cost import study_costs
from slurm.manage import LogConfig, StatusConfig
from slurm.records import naming
from slurm.sbatch import group, sbatch_text, slurm_parameters
from slurm.snapshot import CODE, Snapshot, take_snapshot
from slurm.submit import check_trainings, help_text, read_request, submit

SNAPSHOT = Snapshot(Path("/runs/l1 sweep/.code/abc"), "abc+dirty")


# --- clusters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.stem for path in CLUSTERS.glob("*.yaml")))
def test_every_example_can_be_read_and_written(name, tmp_path):
    cluster = load_cluster(name)
    (tmp_path / "copy.yaml").write_text(to_yaml(cluster))
    assert load_cluster(str(tmp_path / "copy.yaml")) == cluster


def test_kinds_have_their_own_resources():
    cluster = load_cluster("slurm", ["partition=gpu", "kinds={train: [gpus=4, nodes=2, partition=big]}"])
    train, other = cluster.resources("train"), cluster.resources("evaluate")
    assert (train.gpus, train.nodes, train.partition, train.cpus) == (4, 2, "big", cluster.cpus)
    assert (other.gpus, other.nodes, other.partition) == (1, 1, "gpu")
    assert (train.processes, other.processes) == (4, 1)
    cluster = load_cluster("slurm", ["gpus=2", "kinds={train: [gpus=4], notebooks: [gpus=1]}"])
    found = {kind: cluster.resources(kind).gpus for kind in ("train", "evaluate", "prepare_data", "build", "notebooks")}
    assert found == {"train": 4, "evaluate": 2, "prepare_data": 0, "build": 0, "notebooks": 1}
    assert load_cluster("slurm", ["kinds={train: [gpus=4, processes=2]}"]).resources("train").processes == 2


def test_what_a_command_says_wins_over_the_files_kinds_or_adds_to_them():
    cluster = load_cluster("slurm", ["minutes=600", "cpus=2", "kinds={train: [cpus=3], nonzeros: [minutes=9]}"])
    found = {kind: cluster.resources(kind) for kind in ("train", "nonzeros", "evaluate", "prepare_data")}
    assert {kind: (one.minutes, one.gpus, one.cpus) for kind, one in found.items()} == {
        "train": (600, 8, 3), "nonzeros": (9, 1, 2), "evaluate": (600, 1, 2), "prepare_data": (600, 0, 2),
    }  # fmt: skip
    assert load_cluster("slurm", ["gpus=1"]).resources("train").gpus == 1


def test_a_kind_adds_options_of_sbatch():
    overrides = ["sbatch={comment: a, exclusive: 'true'}", "kinds={train: ['sbatch={comment: b}']}"]
    cluster = load_cluster("slurm", overrides)
    assert cluster.resources("train").sbatch == {"comment": "b", "exclusive": "true"}
    assert cluster.resources("build").sbatch == {"comment": "a", "exclusive": "true"}


def test_the_example_for_gpus_with_a_type(tmp_path):
    text = (CLUSTERS / "slurm.yaml").read_text()
    example = text.partition("# GPUs with a type: ")[2].partition("\n")[0]
    (tmp_path / "typed.yaml").write_text(text.replace("train: [gpus=8, minutes=1440]", example))
    train = load_cluster(str(tmp_path / "typed.yaml")).resources("train")
    assert (train.gpus, train.processes, train.sbatch) == (0, 8, {"gres": "gpu:h100:8"})


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (
            "slurm",
            ["partiton=gpu"],
            r"unknown option 'partiton'; did you mean 'partition'.*Valid are: .*partition, ac",
        ),
        (
            "slurm",
            ["kinds={train: [gpuz=1]}"],
            r"kinds.train: unknown option 'gpuz'.*Valid are: nodes, gpus, runs_per",
        ),
        ("slurm", ["minutes=soon"], "minutes must be an integer, got 'soon'"),
        ("slurm", ["executor=pbs"], "executor must be one of slurm, local, debug, got 'pbs'"),
        ("slurm", ["environment={HF_TOKEN: abc}"], r"environment must hold no secrets: .* got \['HF_TOKEN'\]"),
        ("slurm", ["environment={'A B': abc}"], "names of variables"),
        ("slurm", ["partition=a\n#SBATCH --account=root"], "partition must not hold control characters or line breaks"),
        ("slurm", ['sbatch={comment: "a\\nrm -rf"}'], "sbatch must not hold control characters"),
        ("slurm", ["minutes=3", "signal_seconds=120"], r"minutes must be at least 4 \(over .* \+ 65 = 185 s\), got 3$"),
        ("local", ["minutes=2"], r"minutes must be at least 3 \(over signal_seconds = 120 s\), got 2$"),
        ("slurm", ["kinds={trian: [gpus=1]}"], "kinds of items are prepare_data, train, .*, got trian"),
        ("slurm", ["kinds={other: [gpus=1]}"], "kinds of items are .*, got other"),
        ("slurm", ["sbatch={--gres: 'gpu:1'}"], "sbatch takes options without dashes, .*, got '--gres'"),
        ("gpu_box", ["total_gpus=8", "gpus=9"], "gpus must be at most total_gpus = 8, got 9"),
        ("gpu_box", ["kinds={train: [nodes=2]}"], "the local executor has one machine: nodes must be 1, got 2"),
        ("gpu_box", ["gpus=2", "runs_per_gpu=2"], "runs_per_gpu needs gpus=1: .* got 2"),
        ("slurm", ["kinds={train: [gpus=1, runs_per_gpu=2]}"], "runs_per_gpu must be 1 with slurm, .* got 2"),
        ("slurm", ["nodes=-3"], "nodes must be at least 1, got -3$"),
        ("slurm", ["memory_gb=nan"], "memory_gb must be a finite number, got nan$"),
        ("slurm", ["memory_gb=1e300"], r"memory_gb must be at most 100000, got 1e\+300$"),
        ("slurm", ["kinds={train: [nodes=0]}"], "kinds.train: nodes must be at least 1, got 0$"),
        ("moon", [], "there is none in .*; there are: debug, gpu_box, local, slurm"),
        ("other.yaml", [], "there is no such file"),
    ],
)
def test_a_wrong_cluster_is_refused(name, overrides, message):
    with pytest.raises(ConfigError, match=f"(?s)^cluster={name}: .*{message}"):
        load_cluster(name, overrides)


def test_a_wrong_field_of_a_file_is_named_with_the_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("nodes: -3\n")
    with pytest.raises(ConfigError, match=rf"^cluster={path}: nodes \(in {path}\) must be at least 1, got -3$"):
        load_cluster(str(path))


@pytest.mark.parametrize(
    ("overrides", "pair"),
    [
        (["memory_gb=8", "sbatch={mem-per-cpu: 4G}"], "memory_gb and sbatch mem-per-cpu"),
        (["memory_gb=8", "sbatch={mem_per_gpu: 4G}"], "memory_gb and sbatch mem-per-gpu"),
        (["sbatch={mem: 8G, mem-per-cpu: 4G}"], "sbatch mem and sbatch mem-per-cpu"),
        (["gpus=1", "sbatch={gres: 'gpu:a100:2,nvme:1'}"], "gpus and sbatch gres"),
        (["kinds={nonzeros: ['sbatch={gpus-per-node: 1}']}"], "gpus and sbatch gpus-per-node"),
        (["cpus=2", "sbatch={cpus-per-gpu: 2}"], "cpus and sbatch cpus-per-gpu"),
        (["sbatch={ntasks: 4}"], "processes and sbatch ntasks"),
        (["sbatch={nodes: 2}"], "nodes and sbatch nodes"),
        (["sbatch={time: 60}"], "minutes and sbatch time"),
        (["qos=high", "sbatch={qos: low}"], "qos and sbatch qos"),
    ],
)
def test_options_that_exclude_each_other_are_refused(overrides, pair):
    with pytest.raises(ConfigError, match=f"^cluster=slurm: of these sbatch takes only one, got '{pair}'$"):
        load_cluster("slurm", overrides)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("slurm", ["gpus=1", "sbatch={gres: 'nvme:1'}"]),
        ("slurm", ["gpus=0", "kinds={train: [gpus=0]}", "sbatch={gres: 'shard:1', mem-per-cpu: 4G}"]),
        ("slurm", ["sbatch={qos: low}"]),
        ("debug", ["minutes=2"]),  # without a process of its own, a run has no signal to wait for
    ],
)
def test_what_contradicts_nothing_is_taken(name, overrides):
    load_cluster(name, overrides)


@pytest.mark.parametrize("cls", [ClusterConfig, StatusConfig, LogConfig])
def test_every_number_of_the_launcher_has_a_range_which_help_shows(cls):
    text = " ".join(describe_options(cls).split())
    for field in dataclasses.fields(cls):
        if field.type in ("int", "float", "int | None", "float | None"):
            allowed = field.metadata["range"]
            assert allowed.minimum is not None, field.name
            _, _, after = text.partition(f"{field.name}={'null' if field.default is None else field.default} ")
            assert after.partition(").")[0].endswith(f", {allowed}"), field.name


# --- command lines ---------------------------------------------------------------------------------------------------


def test_command_lines():
    wanted = read_request(["experiments.train", "model=smoke", "cluster=slurm", "cluster.minutes=7", "run.item=a"])
    assert (wanted.cluster.minutes, wanted.names[1:], wanted.study, wanted.dry_run) == (7, ("a",), None, False)
    assert [item.kind for item in wanted.items] == ["prepare_data", "train"]
    wanted = read_request(["study=six_runs", "only=[build]", "--dry-run"])
    assert len(wanted.items) == len(wanted.names) == 14, "build needs them all"
    wanted = read_request(["study=six_runs", "only=[smoke_l1_0_seed_1]"])
    assert (len(wanted.items), wanted.names[1:]) == (14, ("smoke_l1_0_seed_1",)), "and its text"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "wanted a module"),
        (["model=smoke"], "wanted a module"),
        (["cluster=local"], "wanted a module"),
        (["study=six_runs", "cluster=local", "cluster=debug"], "cluster is given 2 times"),
        (["study=six_runs", "clster=slurm"], "unknown option 'clster'; did you mean 'cluster'"),
        (["study=six_runs", "cluster=slurm", "cluster.nodes=-3"], "^cluster=slurm: nodes must be at least 1, got -3$"),
        (["study=six_runs", "--dryrun"], "unknown option .--dryrun.: the only ones with dashes are --dry-run"),
        (["study=seven"], "study=seven: there is none in .*demo.*six_runs"),
    ],
)
def test_wrong_command_lines_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        read_request(arguments)


# --- groups -----------------------------------------------------------------------------------------------------------


def item(name, kind, *needs):
    return Item(name, kind, "experiments.train", (), Path("/runs") / name, tuple(needs))


def test_a_statistic_waits_for_its_own_training_only():
    trainings = [item(f"t{n}", "train") for n in range(3)]
    dense = item("silu", "train")
    statistics = [item(f"n{n}", "nonzeros", f"t{n}") for n in range(3)]
    evaluations = [item(f"e_{one.name}", "evaluate", one.name) for one in (*trainings, dense)]
    build = item("build", "build", *(one.name for one in (*trainings, *statistics, *evaluations)))
    groups = group([*trainings, dense, *statistics, *evaluations, build], {}, 100)
    found = [(one.kind, [each.name for each in one.items], one.aligned) for one in groups]
    assert found == [
        ("train", ["t0", "t1", "t2"], False),
        ("train", ["silu"], False),  # nothing counts its non-zeros
        ("nonzeros", ["n0", "n1", "n2"], True),
        ("evaluate", ["e_t0", "e_t1", "e_t2"], True),
        ("evaluate", ["e_silu"], False),
        ("build", ["build"], False),
    ]
    ids = [str(100 + number) for number in range(len(groups))]
    waits = ["", "", "aftercorr:100", "aftercorr:100", "afterok:101", "afterok:100:102:103:104"]
    assert [one.dependency(ids) for one in groups] == waits


def test_needs_that_are_in_the_queue_already():
    later = [item("n0", "nonzeros", "t0"), item("n1", "nonzeros", "t1")]
    groups = group(later, {"t0": "7_0", "t1": "7_1"}, 100)
    assert [one.dependency([]) for one in groups] == ["afterok:7_0", "afterok:7_1"]


@given(st.integers(1, 12), st.integers(1, 5), st.sets(st.integers(0, 11)))
def test_groups_hold_everything_once_and_in_order(count, longest, sparse):
    trainings = [item(f"t{n}", "train") for n in range(count)]
    later = [item(f"n{n}", "nonzeros", f"t{n}") for n in sorted(sparse) if n < count]
    build = item("build", "build", *(one.name for one in (*trainings, *later)))
    items = [*trainings, *later, build]
    groups = group(items, {}, longest)
    assert sorted(one.name for each in groups for one in each.items) == sorted(one.name for one in items)
    assert all(len(each.items) <= longest for each in groups)
    place = {one.name: number for number, each in enumerate(groups) for one in each.items}
    for number, each in enumerate(groups):
        assert {place[name] for one in each.items for name in one.needs} == set(each.after)
        assert all(before < number for before in each.after)
        if each.aligned:
            (before,) = each.after
            assert [one.needs for one in each.items] == [(one.name,) for one in groups[before].items]


# --- sbatch files -----------------------------------------------------------------------------------------------------


def text_of(cluster, kind="train", count=1, **fields):
    options = {"name": "study-train", "snapshot": SNAPSHOT, "directory": "/home/me/it's here", **fields}
    return sbatch_text(cluster, slurm_parameters(cluster, kind, **options), Path("/runs/l1 sweep/.jobs"), count)


def run_shell(folder, text):
    """What bash says of these lines, in this folder."""
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    return subprocess.run(["bash", "-c", text], cwd=folder, env=environment, capture_output=True, text=True)


def test_an_sbatch_file():
    overrides = ["account=ours", "modules=[cuda/13.0]", "memory_gb=1.5", "parallel=3", "sbatch={mail-type: END}"]
    lines = text_of(load_cluster("slurm", overrides), count=8, dependency="afterok:17").splitlines()
    for line in (
        "#SBATCH --account=ours",
        "#SBATCH --array=0-7%3",
        "#SBATCH --chdir='/home/me/it'\"'\"'s here'",
        "#SBATCH --cpus-per-task=12",
        "#SBATCH --dependency=afterok:17",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --kill-on-invalid-dep=yes",
        "#SBATCH --mail-type=END",
        "#SBATCH --mem=1536M",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --requeue",
        "#SBATCH --signal=USR2@180",
        "#SBATCH --time=1440",
        "{ module load cuda/13.0",
        "export OMP_NUM_THREADS=12",
        "export TWELL_REVISION=abc+dirty",
        "export PYTHONSAFEPATH=1",
    ):
        assert line in lines, line
    assert "--partition" not in "".join(lines), "what is not given, the cluster decides"
    assert "wckey" not in "".join(lines)


def test_what_the_launcher_writes_is_not_given_again():
    text = text_of(load_cluster("slurm", ["kinds={}"]), count=2, dependency="afterok:17")
    written = {line.removeprefix("#SBATCH --").partition("=")[0] for line in text.splitlines() if "#SBATCH" in line}
    for option in (*written, "no_requeue", "export", "wrap"):
        with pytest.raises(ConfigError, match=rf"(launcher writes|takes only one).*{option.replace('_', '-')}'$"):
            load_cluster("slurm", [f"sbatch={{{option}: x}}"])


@pytest.mark.parametrize(
    ("override", "ends"),
    [
        ("modules=[cuda]", True),
        ('setup=["false  # why", "true"]', True),
        ('setup=["if false; then\\n  false\\nfi\\n", "cd /"]', False),
    ],
)
def test_a_command_that_fails_ends_the_job(tmp_path, override, ends):
    """`module` is not here."""
    done = run_shell(tmp_path, text_of(load_cluster("slurm", [override])).replace("\nsrun ", "\npwd #srun "))
    assert (done.returncode, done.stdout) == ((1, "") if ends else (0, "/\n")), done.stderr


def test_nothing_in_an_sbatch_file_is_run_by_accident(tmp_path):
    """The file's shell lines, run by a shell: odd values arrive as they are, and nothing else happens."""
    trap = tmp_path / "trap"
    odd = f'a\'b $(touch {trap}) `touch {trap}` ; touch {trap} "c" \\ #'
    snapshot = Snapshot(tmp_path / "it's $(touch trap) here", odd)
    overrides = ["python=[/bin/true]", "executor=slurm", "partition=x; touch trap"]
    cluster = dataclasses.replace(load_cluster("slurm", overrides), environment={"ODD": odd})
    done = run_shell(tmp_path, text_of(cluster, snapshot=snapshot).replace("\nsrun ", "\nenv #srun "))
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    assert f"ODD={odd}" in found
    assert f"TWELL_REVISION={odd}" in found
    assert f"PYTHONPATH={snapshot.path}:{snapshot.path}/kernels" in found
    assert list(tmp_path.iterdir()) == []


def test_dry_run_submits_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # there is no SLURM here
    said = []
    place = f"runs={tmp_path / 'runs'}"
    submit(read_request(["study=six_runs", "cluster=slurm", "--dry-run", place]), said.append)
    text = "\n".join(said)
    assert text.count("#!/bin/bash") == 1
    assert text.count("#SBATCH --time=") == 4
    assert "--array=0-5%6" in text
    assert text.count("--gpus-per-node=1\n") == 2, "of a training on a cluster whose trainings take 8, and of nonzeros"
    assert "JOB_2: 6 x nonzeros, after aftercorr:JOB_1" in text
    assert "JOB_3: build, after afterok:JOB_0:JOB_1:JOB_2" in text
    assert "# task 5: python -m experiments.train model=smoke sparsity.l1=1e-2 training.seed=1" in text
    assert f"study six_runs: 14 to submit, 0 on their way, 0 done, in {tmp_path}" in said[0]
    assert "# Nothing was submitted. 14 items in 4 jobs of SLURM, 6 of them trainings (GPUs of each: 1): " in said[-1]
    assert list(tmp_path.iterdir()) == []
    said.clear()
    submit(read_request(["study=six_runs", "cluster=local", "--dry-run", place]), said.append)
    assert "# nonzeros_smoke_l1_0_seed_0 (after smoke_l1_0_seed_0)\npython -m experiments.gather_nonzeros" in said[8]


def test_a_dry_run_ends_with_what_the_study_costs():
    said = []
    submit(read_request(["study=paper", "cluster=slurm", "--dry-run"]), said.append)
    models = study_costs("paper")
    hours, tokens = sum(cost.all_hours for cost in models), sum({cost.tokens for cost in models})
    disk = (sum(cost.runs * cost.checkpoint_bytes for cost in models) + 2 * tokens) / 1e9
    costs = f"about {hours:,.1f} GPU hours of training (one H200), {disk:,.1f} GB of"
    assert f"20 of them trainings (GPUs of each: 8): {costs}" in said[-1]


def test_threads(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(24))
    assert load_cluster("local", ["parallel=3"]).variables("train")["OMP_NUM_THREADS"] == "8"
    both = load_cluster("local", ["parallel=3", "processes=2"])
    assert both.variables("train")["OMP_NUM_THREADS"] == "4", "of each process"
    assert both.variables("nonzeros")["OMP_NUM_THREADS"] == "8"
    assert load_cluster("gpu_box").variables("train")["OMP_NUM_THREADS"] == "8"
    slurm = load_cluster("slurm", ["cpus=5", "kinds={}"]).variables("train")
    assert slurm == {"OMP_NUM_THREADS": "5", "SRUN_CPUS_PER_TASK": "5"}
    assert load_cluster("slurm", ["cpus=0", "kinds={}"]).variables("train") == {}


# --- snapshots --------------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.delenv("TWELL_REVISION", raising=False)
    root = tmp_path / "repository"
    for name in CODE:
        (root / name).mkdir(parents=True)
        (root / name / "a.py").write_text(f"# {name}\n")
    (root / "README.md").write_text("not code")
    return root


def git(root, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(["git", "-C", root, *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit_all(root, ignored=""):
    (root / ".gitignore").write_text(ignored)
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "all")


def files(snapshot):
    return sorted(str(path.relative_to(snapshot.path)) for path in snapshot.path.rglob("*") if path.is_file())


def test_a_snapshot_is_what_was_there(repository, tmp_path):
    commit_all(repository, "ignored.py\n")
    clean = take_snapshot(tmp_path / "code", repository)
    assert clean.revision == git(repository, "rev-parse", "HEAD")
    assert files(clean) == sorted([*(f"{name}/a.py" for name in CODE), "changes.diff", "snapshot.json"])
    assert take_snapshot(tmp_path / "code", repository) == clean, "the same code is copied once"
    (repository / "README.md").write_text("changed")
    assert take_snapshot(tmp_path / "code", repository) == clean, "a change that no job sees is none"

    (repository / "slurm" / "a.py").write_text("# changed\n")
    (repository / "slurm" / "new.py").write_text("# new\n")
    (repository / "slurm" / "ignored.py").write_text("# ignored\n")
    dirty = take_snapshot(tmp_path / "code", repository)
    assert dirty.revision == f"{clean.revision}+dirty"
    assert (dirty.path / "slurm" / "a.py").read_text() == "# changed\n"
    assert "slurm/new.py" in files(dirty)
    assert "slurm/ignored.py" not in files(dirty)
    assert "+# changed" in (dirty.path / "changes.diff").read_text()
    (repository / "slurm" / "a.py").write_text("# changed again\n")
    assert (dirty.path / "slurm" / "a.py").read_text() == "# changed\n", "what was submitted stays as it was"


GITS = {
    "none": lambda repository, monkeypatch: None,
    "that of a folder around it, which ignores it": lambda repository, _: commit_all(repository.parent, "repository\n"),
    "one that does not answer": lambda _, monkeypatch: monkeypatch.setattr(
        "subprocess.run", Mock(side_effect=subprocess.TimeoutExpired("git", 60))
    ),
}


@pytest.mark.parametrize("make_git", GITS.values(), ids=GITS)
def test_a_snapshot_without_git(repository, tmp_path, monkeypatch, make_git):
    (repository / "slurm" / "__pycache__").mkdir()
    (repository / "slurm" / "__pycache__" / "a.pyc").write_text("")
    make_git(repository, monkeypatch)
    snapshot = take_snapshot(tmp_path / "code", repository)
    assert snapshot.revision == "unknown"
    assert files(snapshot) == sorted([*(f"{name}/a.py" for name in CODE), "changes.diff", "snapshot.json"])


def test_a_snapshot_of_nothing_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"empty has none of the code that jobs run: wanted files in kernels, exp"):
        take_snapshot(tmp_path / "code", tmp_path / "empty")
    assert not (tmp_path / "code").exists()


def test_jobs_find_the_snapshot_and_its_revision(repository, tmp_path):
    """Also when it lies inside of a repository that has moved on, and where the working folder has other code."""
    around = tmp_path / "around"
    (around / "slurm").mkdir(parents=True)
    (around / "slurm" / "a.py").write_text("raise SystemExit('the code of the working folder')")
    commit_all(around)
    snapshot = take_snapshot(around / "runs" / ".code", repository)
    (snapshot.path / "experiments" / "run").mkdir()
    source = Path(__file__).parent.parent / "experiments" / "run" / "environment.py"
    (snapshot.path / "experiments" / "run" / "environment.py").write_text(source.read_text())
    code = "from experiments.run.environment import git_revision, REPOSITORY; import slurm.a; print(*git_revision())"
    script = "\n".join([*Snapshot(snapshot.path, "abc+dirty").exports(), f'python3 -c "{code}"'])
    done = run_shell(around, script)
    assert done.stdout.strip() == "abc True", done.stderr


# --- before anything is submitted -------------------------------------------------------------------------------------


def trainings(**micro_batch):
    return {name: parse(TrainConfig, ["model=smoke", f"execution.micro_batch={n}"]) for name, n in micro_batch.items()}


def test_a_presets_micro_batch_is_an_upper_limit_for_many_processes():
    """The first example of the README: presets with 16 sequences in a micro-batch, and 8 processes."""
    cluster = load_cluster("slurm")
    assert cluster.resources("train").processes == 8
    check_trainings(trainings(a=16), cluster)


@pytest.mark.parametrize(("cluster", "gpus"), [("slurm", 1), ("gpu_box", 1), ("local", 0)])
def test_a_study_of_tiny_models_asks_for_no_more_gpus_than_it_needs(cluster, gpus):
    found = read_request(["study=six_runs", f"cluster={cluster}"]).cluster.resources("train")
    assert (found.gpus, found.minutes) == (gpus, load_cluster(cluster).resources("train").minutes)


def test_help_lists_the_fields_of_a_study_that_can_be_given():
    fields = help_text().partition("Fields of a study:")[2]
    assert all(f"  {name}=" in fields for name in ("training_gpus", "preview", "kinds"))
    assert "  name=" not in fields


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cluster=slurm", "cluster.processes=3"], "smoke_l1_0_seed_0: a step has 16 sequences .* which 3 processes"),
        (["cluster=slurm", "cluster.nodes=3"], "smoke_l1_0_seed_0: a step has 16 sequences .* which 3 processes"),
        (["cluster=slurm", "cluster.nodes=4", "cluster.processes=8"], "a step has 16 sequences .* which 32 processes"),
        (["cluster=slurm"], "there is no SLURM on this machine"),
        (["cluster=gpu_box", "cluster.gpus=1"], "this machine has 0 GPUs for runs that take 1 each"),
        (["cluster=slurm", "data=path:/nowhere", "--dry-run"], "path:/nowhere is missing"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_made(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    common = ["study=six_runs", f"runs={tmp_path / 'runs'}", "cluster.kinds={}", "cluster.gpus=0"]
    with pytest.raises(RunError, match=message):
        submit(read_request([*common, *arguments]))
    assert not (tmp_path / "runs").exists()


def test_advice_names_the_study_wherever_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert naming(tmp_path / "runs" / "mine") == "study=mine"
    wanted = read_request(["experiments.train", "model=smoke", "run.dir=/scratch/my runs/of mine/one"])
    assert naming(wanted.folder) == "'study=of mine' 'runs=/scratch/my runs'"
    found = parse(StatusConfig, shlex.split(naming(wanted.folder)))
    assert found.folder == wanted.folder


def test_folders_that_cannot_be_made_are_named_in_one_line(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    for runs in (tmp_path / "file", Path("/proc/runs"), tmp_path / ("x" * 300)):
        wanted = read_request(["study=six_runs", "cluster=local", f"runs={runs}"])
        caplog.clear()
        with pytest.raises(SystemExit) as caught:
            run_program(functools.partial(submit, wanted))
        assert caught.value.code == EXIT_FAILED
        (said,) = caplog.messages
        assert str(runs) in said
        assert "\n" not in said
