"""Fixtures: a real SLURM for the whole test run, and submissions to it."""

import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from mini_slurm import MiniSlurm, missing_programs

from experiments.run.config import parse
from experiments.run.train_config import TrainConfig
from experiments.study.graph import State
from slurm.records import latest_jobs, read_submission
from slurm.states import ALIVE, item_states
from slurm.submit import read_request, submit

CLUSTER = """
executor: slurm
partition: main
cpus: 1
parallel: 8
minutes: 30
signal_seconds: 30
environment:
  OMP_NUM_THREADS: "1"
  GLOO_SOCKET_IFNAME: lo
"""


@pytest.fixture(scope="session")
def cluster():
    """Skips where SLURM is not installed, unless TWELL_REQUIRE_SLURM is set: then that is a failure."""
    if missing := missing_programs():
        reason = f"SLURM is not here ({', '.join(missing)}): apt-get install slurmctld slurmd slurm-client munge"
        (pytest.fail if os.environ.get("TWELL_REQUIRE_SLURM") else pytest.skip)(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    slurm, before = MiniSlurm(folder), dict(os.environ)
    try:
        slurm.start()
        os.environ.update(slurm.environment)
        yield slurm
    finally:
        slurm.stop()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def arguments(corpus):
    """The command line of a small training; values given later win."""

    def make(*more):
        return [
            "model=smoke",
            "model.vocab_size=300",
            f"data=path:{corpus}/docs.jsonl",
            f"data.cache_dir={corpus}/cache",
            "data.validation_share=0.1",
            "training.precision=float32",
            "training.tokens_per_step=256",
            "execution.micro_batch=4",
            *more,
        ]

    return make


class Launched:
    """What was submitted in one folder."""

    def __init__(self, root: Path, cluster_file: Path, slurm: MiniSlurm) -> None:
        self.runs, self.folder = root / "runs", root / "runs" / "test"
        self.slurm, self.cluster_file, self.said = slurm, cluster_file, []

    def submit(self, *arguments, **fields):
        overrides = [f"cluster.{name}={value}" for name, value in fields.items()]
        submit(read_request([*arguments, f"cluster={self.cluster_file}", *overrides]), self.said.append)
        return self

    def train(self, item, arguments, **fields):
        """Submit one training; its configuration."""
        place = ["run.study=test", f"run.item={item}", f"run.dir={self.folder / item}"]
        self.submit("experiments.train", *arguments, *place, **fields)
        return parse(TrainConfig, [*arguments, *place])

    def states(self):
        return item_states(self.folder, read_submission(self.folder))

    def job(self, item):
        return latest_jobs(self.folder)[item].job

    def log(self, item):
        return Path(latest_jobs(self.folder)[item].log).read_text()

    def wait(self, *wanted, item=None, seconds=400):
        """Wait until all items (or one) have one of these states; by default, until nothing runs or waits any more."""
        deadline = time.monotonic() + seconds
        while True:
            states = self.states()
            found = {states[item].state} if item else {one.state for one in states.values()}
            if found <= set(wanted or set(State) - set(ALIVE)):
                return states
            if time.monotonic() > deadline:
                logs = [self.log(name) for name, one in states.items() if one.job and Path(one.job.log).is_file()]
                queue = self.slurm.output("scontrol", "show", "job")
                raise TimeoutError(f"after {seconds} s: {states}\n{queue}\n" + "\n".join(logs))
            time.sleep(0.2)


@pytest.fixture
def launched(tmp_path, cluster):
    (tmp_path / "mini.yaml").write_text(CLUSTER)
    umask, directory = os.umask(0), Path.cwd()
    os.umask(umask)
    try:
        yield Launched(tmp_path, tmp_path / "mini.yaml", cluster)
    finally:
        os.umask(umask)  # submitting makes everything private from then on
        os.chdir(directory)
        cluster.output("scancel", "--user", str(os.getuid()), check=False)
