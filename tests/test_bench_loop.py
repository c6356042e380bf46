"""Our training loop beside a bare one: they train alike, and what cannot be compared is refused."""

import contextlib
import dataclasses

import pytest
from tiny_run import write_text

from experiments import bench_loop
from experiments.run import distributed
from experiments.run.config import parse
from experiments.run.errors import ConfigError
from experiments.run.results import read_rows

SMALL = ["model=smoke", "training.steps=8", "run.log_every=4", "execution.device=cpu"]


@pytest.fixture
def config(tmp_path):
    text = write_text(tmp_path / "text")
    places = [
        f"data=path:{text}",
        "data.validation_share=0.3",
        f"data.cache_dir={tmp_path / 'cache'}",
        f"out={tmp_path / 'out'}",
    ]
    return lambda *arguments: parse(bench_loop.BenchLoopConfig, [*SMALL, *places, *arguments])


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_both_loops_train_alike(config, tmp_path, reduction):
    """Otherwise `main` raises."""
    bench_loop.main(config("sparsity.l1=0.1", f"sparsity.l1_reduction={reduction}"))
    bare, ours = read_rows(tmp_path / "out" / "rows.csv")
    assert (bare["backend"], ours["baseline"]) == ("bare_loop", "bare_loop")
    assert ours["ratio"] == pytest.approx(bare["value"] / ours["value"], rel=0.5)
    assert ours["l1"] == (0.1 if reduction == "sum" else 0.1 / ours["intermediate"])
    assert {bare["modification"], ours["modification"]} == {"none"}


def test_rows_say_that_the_l1_term_was_warmed_up(config, tmp_path):
    bench_loop.main(config("sparsity.l1=0.1", "sparsity.l1_ramp_steps=2"))
    assert {row["modification"] for row in read_rows(tmp_path / "out" / "rows.csv")} == {"l1_warmup"}


def test_several_processes_are_refused(config, monkeypatch):
    """The bare loop makes the whole step in each of them."""
    real = distributed.processes

    @contextlib.contextmanager
    def two(device):
        with real(device) as group:
            yield dataclasses.replace(group, count=2)

    monkeypatch.setattr(distributed, "processes", two)
    with pytest.raises(ConfigError, match="the bare loop is one process, got 2"):
        bench_loop.main(config())
