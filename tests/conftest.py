"""Shared by every test: the GPU marker, one thread a test, and no network."""

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
