"""The machine's ceilings: rates from known durations, and checked reads."""

import pytest
import torch

from experiments.timing import ceilings
from experiments.timing.ceilings import ROWS_PER_SUM, Ceiling, Shape, ceiling_row
from experiments.timing.compare import CheckFailed, TimingConfig
from experiments.timing.measure import Timing
from experiments.timing.options import CEILINGS

CPU = torch.device("cpu")
SHAPE = Shape(hidden=32, intermediate=96, gated=True, dtype=torch.bfloat16, device=CPU)
SHORT = TimingConfig(seconds=0.01, rounds=1, settle_seconds=0.0)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(ceilings, "GATHER_BYTES", {"cpu": 2**20})


@pytest.mark.parametrize("op", CEILINGS)
def test_a_row_has_the_columns_that_its_rate_depends_on(op):
    row = ceiling_row(op, SHAPE, 48 if op == "ceiling_matmul" else None, SHORT, study="s", item="i")
    assert row["low"] <= row["value"] <= row["high"]
    assert row["unit"] == ("TFLOP/s" if op == "ceiling_matmul" else "GB/s")
    given = {name for name in ("tokens", "hidden", "intermediate", "gated") if row[name] is not None}
    assert (
        given
        == {
            "ceiling_copy": set(),
            "ceiling_matmul": {"tokens", "hidden", "intermediate"},
            "ceiling_gather": {"hidden", "intermediate", "gated"},
        }[op]
    )


def test_what_one_call_moves_and_does():
    (copy,) = ceilings._ways("ceiling_copy", SHAPE, None)
    assert copy.amount == pytest.approx(2 * 2**20 / 1e9)
    (product,) = ceilings._ways("ceiling_matmul", SHAPE, 48)
    assert product.amount == pytest.approx(2 * 48 * 32 * 96 / 1e12)
    (gather,) = ceilings._ways("ceiling_gather", SHAPE, None)
    assert gather.amount == pytest.approx(2**20 / 1e9)
    assert len(gather.call()) == 2**20 // (ROWS_PER_SUM * 32 * 2)


def test_the_table_is_of_the_size_of_the_weights_read_by_row(monkeypatch):
    seen = []
    monkeypatch.setattr(ceilings, "_embedding_gather", lambda table, *_: seen.append(table.shape))
    for gated in (True, False):
        list(ceilings._ways("ceiling_gather", SHAPE._replace(gated=gated), None))
    assert seen == [(192, 32), (96, 32)]


def test_the_rate_is_the_amount_over_the_time_and_the_best_way_counts(monkeypatch):
    milliseconds = {"slow": [4.0], "fast": [2.0, 2.0, 4.0], "third": [3.0]}
    ways = [Ceiling(name, lambda: None, 6.0) for name in milliseconds]
    monkeypatch.setattr(ceilings, "_ways", lambda *_: ways)
    monkeypatch.setattr(
        ceilings,
        "time_alternatives",
        lambda *_, **__: {name: Timing(milliseconds=ms) for name, ms in milliseconds.items()},
    )
    row = ceiling_row("ceiling_copy", SHAPE, None, SHORT)
    assert (row["backend"], row["value"], row["n"]) == ("fast", 3000.0, 3)


def test_wrong_reads_are_refused(monkeypatch):
    right = torch.nn.functional.embedding_bag
    monkeypatch.setattr(ceilings.F, "embedding_bag", lambda *a, **o: right(*a, **o) * 1.1)
    with pytest.raises(CheckFailed, match="embedding_bag"):
        ceiling_row("ceiling_gather", SHAPE, None, SHORT)
