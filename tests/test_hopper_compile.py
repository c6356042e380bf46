"""Every Hopper kernel compiles for its architecture, here without a GPU, and keeps its inner loops in registers."""

import importlib
import inspect
import re
import struct
from pathlib import Path
from typing import NamedTuple, get_type_hints

import pytest
import torch

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed on this system")

from twell.backends import hopper  # noqa: E402
from twell.hopper import backward, compiler, few, hot_steps, inference, params, screen  # noqa: E402
from twell.interface import Needs, Options, Weights  # noqa: E402


def spilled_bytes(log: str) -> int:
    """Bytes of register spills that ptxas reports."""
    found = re.findall(r"(\d+) bytes spill stores", log)
    assert found, f"the log does not speak of spills:\n{log}"
    return max(map(int, found))


@pytest.mark.parametrize(
    ("tiling", "screen"), [(inference.WIDE, False), (inference.NARROW, False), (inference.WIDE, True)]
)
def test_gate_pack(tiling, screen):
    cubin, log = compiler.compile_source("gate_pack", inference.gate_pack_macros(tiling, screen))
    assert cubin.startswith(b"\x7fELF")
    assert spilled_bytes(log) == 0
    assert tiling.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("hidden", [64, 2048, 8192])
def test_quantise(hidden):
    assert spilled_bytes(compiler.compile_source("quantise", screen.quantise_macros(hidden))[1]) == 0


@pytest.mark.parametrize("hidden", [64, 2048, *(pytest.param(size, marks=pytest.mark.slow) for size in (2112, 4096))])
def test_gated_down_of_screened_neurons(hidden):
    macros = {"K": hidden, "PARTS": 1, "WARPS": 12, "TILE": 256, "SLOTS": 32}
    log = compiler.compile_source("gated_down", macros | inference.Switches(True, False, screened=True).macros())[1]
    assert spilled_bytes(log) <= 64


def mostly_slow(cases, *fast):
    """Of these, `make test` compiles a few."""
    return [case if case in fast else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


# Without a gate, kernels do less and hold less: the ends, and a size that a pair of warps shares unevenly.
SIZES = mostly_slow(
    [*((1, hidden) for hidden in (64, 320, 2048, 2112, 5120, 8192)), (0, 64), (0, 2112), (0, 8192)],
    (1, 320), (0, 2112),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("gated", "hidden"), SIZES)
def test_gated_down(hidden, gated):
    for parts in {inference.parts_for(tokens, hidden, 132) for tokens in (1, 500, 2000, 5000, 10**5)}:
        macros = {"K": hidden, "PARTS": parts, "WARPS": 12, "TILE": 256, "SLOTS": 32}
        for save, squared in ((0, 0), (1, 1), *(((0, 1), (1, 0)) if hidden == 64 else ())):
            switches = inference.Switches(gated, squared, stats=True, save=save, weighted=save)
            cubin, log = compiler.compile_source("gated_down", macros | switches.macros())
            assert cubin.startswith(b"\x7fELF")
            # A few addresses, outside the inner loop.
            assert spilled_bytes(log) <= 64


@pytest.mark.parametrize(("gated", "hidden"), SIZES)
def test_backward(hidden, gated):
    macros = {"K": hidden, "GATED": gated}
    for tokens, squared in ((1, 0), (10**4, 1), (10**6, 0), *(((10**6, 1),) if hidden == 2048 else ())):
        own = backward.token_macros(hidden, tokens, 132) | {"SQUARED": squared, "WEIGHTED": squared}
        assert spilled_bytes(compiler.compile_source("token_gradients", macros | own)[1]) <= 64
    assert spilled_bytes(compiler.compile_source("weight_gradients", macros | backward.WEIGHT_MACROS)[1]) == 0


def test_transpose():
    for step in range(3):
        macros = backward.TRANSPOSE_MACROS | {"STEP": step}
        assert spilled_bytes(compiler.compile_source("transpose", macros)[1]) == 0


@pytest.mark.parametrize("scattered", [False, True])
def test_rows_of_hot_neurons(scattered):
    assert spilled_bytes(compiler.compile_source("hot_rows", hot_steps.rows_macros(scattered))[1]) == 0


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("squared", [False, True])
def test_hot_neurons(gated, squared):
    for name, stats in (("hot_forward", False), ("hot_forward", True), ("hot_backward", False)):
        macros = hot_steps.macros(gated, squared, stats, weighted=squared)
        assert spilled_bytes(compiler.compile_source(name, macros)[1]) == 0


@pytest.mark.parametrize("activation", ["relu", "relu2", "silu"])
def test_hidden_of_hot_neurons(activation):
    macros = hot_steps.hidden_macros(activation)
    log = compiler.compile_source("hot_hidden", macros)[1]
    assert spilled_bytes(log) == 0
    assert "Used 168 registers" in log  # of which setmaxnreg gives some away
    assert macros["SMEM_BYTES"] <= 227 * 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "tokens"),
    mostly_slow([(64, 16), (2112, 16), (6144, 8)], (6144, 8)),
)
def test_few_tokens(hidden, tokens):
    for most in {8, tokens}:
        assert few.takes(most, hidden)
        for rows in (1, 43, 96):
            for gated, squared, early in ((1, 0, 1), (1, 1, 0), (0, 0, 0)):
                macros = few.gate_macros(hidden, rows, most, gated, squared, early)
                assert spilled_bytes(compiler.compile_source("few_gate", macros)[1]) <= 16
            macros = few.down_macros(hidden, rows, 132)
            assert spilled_bytes(compiler.compile_source("few_down", macros)[1]) == 0


@pytest.mark.parametrize("source", sorted(Path(compiler.__file__).parent.glob("*.cu")), ids=lambda path: path.stem)
def test_each_source_names_what_sets_its_macros(source):
    (module, name), *_ = re.findall(r"^// Macros: (\w+)\.py's `(\w+)`", source.read_text(), re.MULTILINE)
    assert hasattr(importlib.import_module(f"twell.hopper.{module}"), name)


def test_more_than_few_tokens_and_rows_that_do_not_fit_go_elsewhere():
    assert not few.takes(few.MAX_TOKENS + 1, 2048)
    assert not few.takes(16, 6144)
    assert not few.takes(1, 8192)
    assert not few.takes(0, 2048)


TINY = {"PARTS": 1, "WARPS": 12, "TILE": 128, "SLOTS": 16, **inference.Switches(False, False).macros()}


def test_cubins_are_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("TWELL_CACHE", str(tmp_path))
    compiler.cubin.cache_clear()
    macros = tuple(sorted({**TINY, "K": 64}.items()))
    first = compiler.cubin("gated_down", macros)
    compiler.cubin.cache_clear()
    (path,) = tmp_path.iterdir()
    assert first.startswith(b"\x7fELF")
    monkeypatch.setattr(compiler, "compile_source", lambda name, macros: (b"compiled anew", ""))
    assert compiler.cubin("gated_down", macros) == first
    for damaged in (path.read_bytes()[:-1000], b""):
        path.write_bytes(damaged)
        compiler.cubin.cache_clear()
        assert compiler.cubin("gated_down", macros) == b"compiled anew"
    compiler.cubin.cache_clear()


@pytest.mark.parametrize("broken", ["a file", "no permission"])
def test_a_cache_that_cannot_be_used_costs_time_only(broken, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "cache"
    if broken == "a file":
        folder.touch()
    else:
        monkeypatch.setattr(compiler.Path, "read_bytes", _refused)
        monkeypatch.setattr(compiler.Path, "mkdir", _refused)
    monkeypatch.setenv("TWELL_CACHE", str(folder))
    monkeypatch.setattr(compiler, "compile_source", lambda name, macros: (b"compiled", ""))
    compiler.cubin.cache_clear()
    assert compiler.cubin("gated_down", tuple({**TINY, "K": 64}.items())) == b"compiled"
    assert "is compiled anew in each process" in caplog.text
    compiler.cubin.cache_clear()


def _refused(*_, **__):
    raise PermissionError(13, "Permission denied")


def test_other_users_may_read_cached_cubins(tmp_path):
    compiler._write_atomically(tmp_path / "a.cubin", b"code")
    assert (tmp_path / "a.cubin").stat().st_mode & 0o777 == 0o644


def test_an_error_brings_the_log():
    with pytest.raises(compiler.CompileError, match="hidden size must be a multiple of 64"):
        compiler.compile_source("gated_down", {**TINY, "K": 100})


def test_what_the_backends_share_fits_these_kernels():
    """`gpu.adapter` calls them by these arguments; nothing here runs them."""
    kernels = hopper._KERNELS
    inspect.signature(kernels.gate_pack).bind("x", "weights", stats=True)
    inspect.signature(kernels.gated_down).bind("packed", "x", "weights", stats=True, save=None, squared=True)
    inspect.signature(kernels.few).bind("x", "weights", squared=True)
    inspect.signature(kernels.backward).bind("dy", "dl1", "x", "weights", "saved", "needs", squared=True)
    x = torch.zeros(0, 64, dtype=torch.bfloat16)
    w = torch.zeros(8, 64, dtype=torch.bfloat16)
    for backup, lengths in ((None, [0, 0, 2, 3]), (0.125, [0, 0, 2, 3, 0, 0])):
        weights = Weights(w, w, w)
        result = hopper.BACKEND.forward(x, weights, Options(stats=True, training=True, capacity=4, backup=backup))
        assert [len(t) for t in result.saved] == lengths
        gradients = hopper.BACKEND.backward(x, None, x, weights, result.saved, Needs(True, False, True, True), "relu")
        assert [None if g is None else tuple(g.shape) for g in gradients] == [(0, 64), None, (8, 64), (8, 64)]


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: [fields[1], fields[0], *fields[2:]],
        lambda fields: [*fields[:-1], (fields[-1][0], params.Int64)],
        lambda fields: fields[:-2],
    ],
    ids=["another order", "another size", "fewer"],
)
def test_parameters_that_differ_from_those_of_python_do_not_compile(change, monkeypatch):
    macros = hot_steps.macros(True, False, False, False)
    compiler.compile_source("hot_backward", macros)
    fields = list(get_type_hints(params.PARAMS["hot_backward"], include_extras=True).items())
    monkeypatch.setitem(params.PARAMS, "hot_backward", NamedTuple("Wrong", change(fields)))
    params.layout.cache_clear()
    try:
        with pytest.raises(compiler.CompileError, match=r"params\.py"):
            compiler.compile_source("hot_backward", macros)
    finally:
        params.layout.cache_clear()


def test_parameters_are_packed_as_c_lays_them_out():
    expected = params.layout("gate_pack")
    assert expected.size == expected.packer.size == 384
    assert expected.fields["counts"] == (264, 8)
    values = params.GatePackParams(b"x" * 128, b"w" * 128, *range(1, 14))
    packed = params.pack("gate_pack", values)
    assert struct.unpack_from("<8Q5i", packed, 256) == tuple(range(1, 14))
