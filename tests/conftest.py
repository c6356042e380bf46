"""Shared by every test: the GPU marker, the order of files, one thread each, no network, options of a tiny training."""

import gc
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # the tests of kernels need torch and pytest only
    pass
else:  # how long an example takes says something about the machine, which other tests use too
    settings.register_profile("shared_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("shared_machine")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The package of this checkout, also where it is not installed, in every process that a test starts.
KERNELS = str(Path(__file__).parents[1] / "kernels")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [KERNELS, os.environ.get("PYTHONPATH")]))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; programs under test would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)


# The files that take longest, in this order: begun last, one of them would run while all other workers are done.
FIRST = ("test_real_slurm.py", "test_reproduce.py", "test_hopper_compile.py", "test_training.py", "test_figures.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """`-n auto`: one more than there are cores, since the tests of a real SLURM wait most of their time."""
    return len(os.sched_getaffinity(0)) + 1


SLOW = Path(__file__).parent / "slow"


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
    for item in items:
        if SLOW in item.path.parents:
            item.add_marker("slow")
    place = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(FIRST)))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device: run `make test-gpu` on a machine that has one")
    for item in items:
        if item.get_closest_marker("gpu"):  # a parameter may be called so, too
            item.add_marker(skip)


def pytest_collection_finish():
    """Collecting garbage, as each training does at its end, need not look at all that was imported: half a second."""
    gc.collect()
    gc.freeze()


POISON_BYTE = 0xA5  # integers become negative, or far too large


def _poison(tensor):
    """Fills newly allocated memory with NaN, or with bytes that no valid index or count has."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif not tensor.is_complex():
        tensor.unsqueeze(-1).view(torch.uint8).fill_(POISON_BYTE)


@pytest.fixture
def poisoned_memory(request, monkeypatch):
    """torch.empty, empty_like and new_empty with poison in them, so that a result that was never written shows. Tests
    marked `unpoisoned` are left alone."""
    if request.node.get_closest_marker("unpoisoned"):
        return

    def poisoned(make):
        def made(*arguments, **options):
            tensor = make(*arguments, **options)
            if not tensor.requires_grad:
                _poison(tensor)
            return tensor

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture
def own_clock(monkeypatch):
    """A clock that only advances by sleeping, so that measurements are the same on a busy machine."""
    now = 1000.0

    def read():
        nonlocal now
        now += 1e-6  # who waits for the clock itself is not kept waiting for ever
        return now

    def sleep(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(time, name, read)


@pytest.fixture
def backends(monkeypatch, own_clock):
    """Registers backends that compute densely in so many ms, a function of the non-zeros and the neurons, in place of
    the real ones. Dense products take 20 ms, or what they are given."""
    from twell import names, registry
    from twell.backends import dense
    from twell.interface import Availability, Backend, Options, Weights
    from twell.tuning import timing

    def a_backend(name, milliseconds):
        def forward(x, weights, options):
            result = dense.BACKEND.forward(x, weights, options._replace(stats=True))
            time.sleep(milliseconds(result.nonzeros.double().mean().item(), len(weights.up)) / 1e3)
            return result if options.stats else result._replace(nonzeros=None, l1=None, fired=None, overflow=None)

        yes = Availability(True, "a test")
        return Backend(lambda device: yes, lambda request: None, forward, None, None, sparse=name != "dense")

    def register(**times):
        times = {"dense": lambda nonzeros, neurons: 20.0, **times}
        made = {name: a_backend(name, milliseconds) for name, milliseconds in times.items()}
        monkeypatch.setattr(names, "FILES", dict.fromkeys(made))
        monkeypatch.setattr(registry, "FILES", names.FILES)
        monkeypatch.setattr(registry, "get", made.__getitem__)

        def inference(x, w_gate, w_up, w_down, activation):
            options, weights = (
                Options(stats=False, training=False, activation=activation),
                Weights(w_gate, w_up, w_down.t()),
            )
            return made["dense"].forward(x.flatten(0, -2), weights, options).y.view(x.shape)

        monkeypatch.setattr(dense, "inference", inference)
        monkeypatch.setattr(timing, "_SECONDS", 1e-6)  # one call a round: each takes as long as the others
        forget()

    def forget():
        registry._probed.clear()
        registry._resolve.cache_clear()
        registry._can_run.cache_clear()

    yield register
    forget()


@pytest.fixture
def mounted(tmp_path):
    """Makes a file system of its own of this size, where this system lets us make one: a folder."""
    folders, mount = [], shutil.which("mount")

    def make(size):
        folder = tmp_path / f"disk{len(folders)}"
        folder.mkdir()
        done = mount and subprocess.run(
            [mount, "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True
        )
        if not done or done.returncode:
            pytest.skip("mounting a tmpfs needs root")
        folders.append(folder)
        return folder

    yield make
    for folder in folders:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": f"{n} plus {n} is {n + n}, and {n} times two is {2 * n}. " * 4}) for n in range(200)]
    (folder / "docs.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def arguments(corpus, tmp_path):
    """The command line of a small run; values given later win."""

    def make(*more, name="run"):
        return [
            "model.name=tiny",
            "model.layers=2",
            "model.hidden_size=16",
            "model.intermediate_size=32",
            "model.attention_heads=2",
            "model.key_value_heads=2",
            "model.vocab_size=300",
            "model.max_positions=16",
            f"data=path:{corpus}/docs.jsonl",
            f"data.cache_dir={corpus}/cache",
            "data.validation_share=0.1",
            "training.sequence_length=16",
            "training.tokens_per_step=128",
            "training.steps=10",
            "training.precision=float32",
            "optimizer.learning_rate=1e-2",
            "optimizer.warmup_steps=2",
            "execution.micro_batch=4",
            "run.log_every=1",
            "run.evaluate_every=5",
            "run.checkpoint_every=5",
            f"run.dir={tmp_path / name}",
            "run.progress=none",
            *more,
        ]

    return make


@pytest.fixture
def make(arguments):
    # Only here: the tests of kernels run without the packages that experiments need.
    from experiments.run.config import parse
    from experiments.run.train_config import TrainConfig

    def make_config(*more, name="run"):
        return parse(TrainConfig, arguments(*more, name=name))

    return make_config


@pytest.fixture
def hub(monkeypatch):
    """A hub whose data sets get a new commit whenever it is asked; returns the revisions that were asked for. Their
    documents are those of a local folder: `datasets` streams hf:FOLDER as it does from the hub."""
    import huggingface_hub

    asked = []

    def dataset_info(self, name, revision=None):
        asked.append(revision)
        return huggingface_hub.DatasetInfo(id=name, sha=f"commit{len(asked)}")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    return asked


@pytest.fixture(scope="session")
def study(tmp_path_factory):
    """The folder of the invented study that the tests of the analysis share: to be read only."""
    from synthetic_results import DEMO, write_study

    return write_study(tmp_path_factory.mktemp("runs"), DEMO)


@pytest.fixture(scope="session")
def demo(study):
    """The same as `Results`."""
    from analysis.load import load

    return load(study)


@pytest.fixture(scope="session")
def nothing(tmp_path_factory):
    """`Results` with a single row, which no table, figure or chart shows."""
    from synthetic_results import DEMO, results_of, row

    return results_of(
        tmp_path_factory.mktemp("runs"), [row(DEMO, None, "item", "ffn_other", "time", 1.0, plan="dense")]
    )


@pytest.fixture(scope="session")
def paper(tmp_path_factory):
    """The folder of an invented study of a large model on a GPU: to be read only."""
    from synthetic_results import PAPER, write_study

    return write_study(tmp_path_factory.mktemp("runs"), PAPER)


@pytest.fixture(scope="session")
def sweep(tmp_path_factory):
    """The `Results` of an invented sweep in several seeds."""
    from synthetic_results import SWEEP, write_study

    from analysis.load import load

    return load(write_study(tmp_path_factory.mktemp("runs"), SWEEP))
