"""Shared by every test: the GPU marker, one thread a test, no network, and the options of a tiny training."""

import json
import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device: run `make test-gpu` on a machine that has one")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


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
