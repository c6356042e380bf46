"""ELL, TwELL and Hybrid: exact round trips, capacities, corrupt structures."""

import re
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from packed_formats import check_valid

from twell.formats import ELL, CapacityError, Hybrid, TwELL
from twell.formats.hybrid import SPILLED

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, -3.0)
TILE = 256


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def sparse(rows: int, columns: int, density: float, dtype=torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    return torch.where(torch.rand(rows, columns, generator=generator) < density, values, 0.0).to(dtype)


def tile_rows(counts: list[int], tile: int = TILE) -> torch.Tensor:
    """One row per count, with that many non-zeros in its second tile and one in its first."""
    dense = torch.zeros(len(counts), 2 * tile, dtype=torch.bfloat16)
    for row, count in enumerate(counts):
        dense[row, tile + torch.randperm(tile)[:count]] = 1.5
        dense[row, row] = 2
    return dense


@st.composite
def matrices(draw):
    rows, columns = draw(st.integers(0, 12)), draw(st.integers(1, 70))
    dense = sparse(rows, columns, draw(st.floats(0, 1)), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    for _ in range(draw(st.integers(0, 3)) if rows else 0):
        row, column = draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))
        dense[row, column] = draw(st.sampled_from(SPECIAL))
    keep = torch.rand(rows, columns) < draw(st.sampled_from((0.0, 0.3))) if draw(st.booleans()) else None
    return dense, keep


@settings(deadline=None, max_examples=120)
@given(matrices(), st.integers(1, 40), st.integers(1, 20), st.integers(1, 20), st.integers(0, 5))
def test_round_trips_are_exact(matrix, tile, slots, width, capacity):
    dense, keep = matrix
    stored = (dense != 0) if keep is None else (dense != 0) | keep
    for packed in (
        ELL.from_dense(dense, keep=keep),
        ELL.from_dense(dense, width, on_overflow="grow", keep=keep),
        TwELL.from_dense(dense, tile, slots, on_overflow="grow", keep=keep),
        Hybrid.from_dense(dense, width, capacity, on_overflow="grow", keep=keep),
    ):
        check_valid(packed)
        assert packed.shape == dense.shape
        assert same(packed.to_dense(), dense)
        mask = packed.entries().mask(dense.shape)
        assert bool((mask >= stored).all())
        if not isinstance(packed, Hybrid):  # whose backup rows are whole
            assert torch.equal(mask, stored)


def test_full_and_overfull_tiles():
    slots = 32
    dense = tile_rows([0, 1, slots - 1, slots])
    packed = TwELL.from_dense(dense, TILE, slots)
    assert packed.counts[:, 1].tolist() == [0, 1, slots - 1, slots]
    assert packed.overflowing(slots - 1).item() == 1
    assert same(packed.to_dense(), dense)
    over = tile_rows([slots + 1, 0, TILE])
    with pytest.raises(CapacityError, match=r"2 tiles have more than 32 entries, the fullest 256.*pass slots=256"):
        TwELL.from_dense(over, TILE, slots)
    grown = TwELL.from_dense(over, TILE, slots, on_overflow="grow")
    assert grown.slots == TILE
    assert same(grown.to_dense(), over)


def test_words_are_the_value_above_the_column():
    dense = torch.zeros(1, 65536, dtype=torch.bfloat16)
    dense[0, 65535], dense[0, 300] = 1.5, -2.0
    packed = TwELL.from_dense(dense, TILE, 4)
    words = packed.lanes.view(torch.uint32).squeeze(-1)
    assert words.shape == (1, 256, 4)
    assert words[0, 255, 0].item() == (0x3FC0 << 16) | 65535
    assert words[0, 1, 0].item() == (0xC000 << 16) | 300
    assert same(packed.to_dense(), dense)
    with pytest.raises(ValueError, match="at most 65536 columns, got 65537"):
        TwELL.from_dense(torch.zeros(1, 65537))


def test_negative_zero_is_a_zero():
    dense = torch.tensor([[-0.0, 1.0]])
    packed = ELL.from_dense(dense)
    assert packed.lengths.tolist() == [1]
    assert not packed.to_dense()[0, 0].signbit()


def test_capacity_of_ell_and_hybrid():
    dense = torch.zeros(16, 40)
    dense[3], dense[9, :6], dense[12, :5] = 1, 2, 3
    with pytest.raises(CapacityError, match=r"2 rows have more than 5 entries, the longest 40: width=5 is 35 too few"):
        ELL.from_dense(dense, 5)
    with pytest.raises(CapacityError, match=r"2 rows have more than 5.*the backup holds 1.*pass capacity=2") as error:
        Hybrid.from_dense(dense, 5, 1)
    assert (error.value.parameter, error.value.capacity, error.value.needed) == ("capacity", 1, 2)
    exact = Hybrid.from_dense(dense, 5)  # 16 / 8 = 2 rows are planned
    assert exact.row_map[[3, 9, 12]].tolist() == [0, 1, -1]
    assert same(exact.to_dense(), dense)
    assert Hybrid.from_dense(dense, 5, 0, on_overflow="grow").backup.shape[0] == 2


def test_spilled_rows_are_refused_until_put_back():
    dense = sparse(40, 64, 0.5, torch.float32)
    full = Hybrid.from_dense(dense, 8, on_overflow="grow")
    small = full.spill(5)
    check_valid(small)
    assert small.backup.shape == (5, 64)
    rows = small.spilled()
    assert rows.numel() == full.backup.shape[0] - 5
    with pytest.raises(CapacityError, match=rf"{rows.numel()} rows are spilled"):
        small.to_dense()
    with pytest.raises(CapacityError):
        small.entries()
    restored = small.with_rows(rows, dense[rows])
    check_valid(restored)
    assert same(restored.to_dense(), dense)
    assert SPILLED in small.row_map  # the first one is untouched


def test_explicit_zeros_are_kept():
    dense, keep = torch.zeros(2, 6), torch.zeros(2, 6, dtype=torch.bool)
    keep[1, 4] = True
    for packed in (ELL.from_dense(dense, keep=keep), TwELL.from_dense(dense, 4, 2, keep=keep)):
        rows, columns, values = packed.entries()
        assert (rows.tolist(), columns.tolist(), values.tolist()) == ([1], [4], [0.0])
    with pytest.raises(ValueError, match=r"keep must be a bool tensor of shape \[2, 6\], got torch.bool \[2, 5\]"):
        ELL.from_dense(dense, keep=keep[:, :5])
    with pytest.raises(ValueError, match=r"keep must be a bool tensor of shape \[2, 6\], got list"):
        ELL.from_dense(dense, keep=[[True] * 6] * 2)


@pytest.mark.parametrize("pack", [ELL.from_dense, TwELL.from_dense, Hybrid.from_dense])
def test_bad_input_says_so(pack):
    with pytest.raises(TypeError, match=r"floating tensor, got torch.int64"):
        pack(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match="got list"):
        pack([[1.0]])
    with pytest.raises(ValueError, match=r"two dimensions, got shape \[3\]"):
        pack(torch.zeros(3))
    with pytest.raises(ValueError, match="'grow' or 'raise', got 'drop'"):
        pack(torch.zeros(2, 2), on_overflow="drop")


def test_bad_sizes_say_so():
    dense = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="tile must be at least 1, got 0"):
        TwELL.from_dense(dense, tile=0)
    with pytest.raises(ValueError, match="slots must be at least 1, got -1"):
        TwELL.from_dense(dense, slots=-1)
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        Hybrid.from_dense(dense, width=0)
    with pytest.raises(ValueError, match="capacity must be at least 0, got -2"):
        Hybrid.from_dense(dense, capacity=-2)
    with pytest.raises(ValueError, match="width must be at least 0, got -1"):
        ELL.from_dense(dense, width=-1)
    for pack, name in ((ELL, "width"), (TwELL, "slots"), (Hybrid, "capacity")):
        with pytest.raises(TypeError, match=f"{name} must be an integer, got 1.5"):
            pack.from_dense(dense, **{name: 1.5})


ELLPACK = ELL.from_dense(sparse(8, 20, 0.4), 20)
TWELL = TwELL.from_dense(sparse(8, 20, 0.4), 8, 8)
HYBRID = Hybrid.from_dense(sparse(8, 20, 0.4), 6, 8)


def _with(tensor: torch.Tensor, index, value: int) -> torch.Tensor:
    changed = tensor.to(torch.int64)
    changed[index] = value
    return changed.to(tensor.dtype)


CORRUPT = {
    "lengths outside 0..20": replace(ELLPACK, lengths=_with(ELLPACK.lengths, 2, 21)),
    "columns outside": replace(ELLPACK, columns=_with(ELLPACK.columns, (0, 0), 20)),
    "a column used twice": replace(ELLPACK, columns=_with(ELLPACK.columns, (0, 1), int(ELLPACK.columns[0, 0]))),
    "lengths: wanted (8,) of torch.int32": replace(ELLPACK, lengths=ELLPACK.lengths.long()),
    "columns: wanted (8, 20) of torch.uint16": replace(ELLPACK, columns=ELLPACK.columns.int()),
    "lengths outside 0..8": replace(TWELL, counts=_with(TWELL.counts, (1, 1), -1)),
    "outside their row or tile": replace(TWELL, lanes=_with(TWELL.lanes, (0, 1, 0, 0), 7)),
    "tiles that do not make a row": replace(TWELL, tile=10),
    "lanes: wanted (8, 3, 8, 3)": replace(TWELL, dtype=torch.float32),
    "rows outside the backup": replace(HYBRID, row_map=_with(HYBRID.row_map, 0, 8)),
    "two rows share a row of the backup": replace(HYBRID, row_map=torch.zeros_like(HYBRID.row_map)),
    "both in the ELL part and outside": replace(HYBRID, row_map=torch.arange(8, dtype=torch.int32), ell=ELLPACK),
    "backup: wanted (8, 20)": replace(HYBRID, backup=HYBRID.backup[:, :4]),
}


@pytest.mark.parametrize(("message", "corrupt"), CORRUPT.items())
def test_what_is_corrupt_is_not_valid(message, corrupt):
    for sound in (ELLPACK, TWELL, HYBRID):
        check_valid(sound)
    with pytest.raises(AssertionError, match=re.escape(message)):
        check_valid(corrupt)
