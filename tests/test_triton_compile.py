"""Every launch of a Triton kernel compiles for Ampere, Ada, Hopper and Blackwell, without a GPU, and keeps to its
registers: the backend's functions run on operands without memory, and what they launch is compiled instead."""

import re
import subprocess

import pytest
import torch
from machine_code import innermost_loops

triton = pytest.importorskip("triton", reason="Triton is not installed on this system")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import mangle_type  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from twell.gpu.saved_csr import SavedCSR  # noqa: E402
from twell.interface import Forward, Needs, Options, Weights  # noqa: E402
from twell.triton import activation, backward, few, hot_steps, inference  # noqa: E402

pytestmark = pytest.mark.skipif(inference.INTERPRET, reason="the interpreter compiles nothing")
SM_COUNTS = {80: 108, 89: 142, 90: 132, 100: 148}
# What a thread block may have of shared memory, in bytes.
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
NEURONS = 5632


def each(*capabilities):
    """Of these architectures, `make test` compiles for Hopper, and `make test-all` for the others."""
    return [one if one == 90 else pytest.param(one, marks=pytest.mark.slow) for one in capabilities]


ALL = each(*SM_COUNTS)


@pytest.fixture(params=each(80, 90, 100))
def capability(request):
    """Where there is no matrix product, Triton makes of Ada what it makes of Ampere."""
    return request.param


@pytest.fixture
def binaries(capability, monkeypatch):
    """The kernels launched so far, by name, compiled for this architecture."""
    compiled = {}

    def run(kernel, *arguments, grid, warmup, **options):
        given = [*arguments, *(options.pop(name) for name in kernel.arg_names[len(arguments) :])]
        constants, aligned = {}, {}

        def type_of(value, path, constant=False):
            if constant or value is None or (type(value) is int and value == 1):
                constants[path] = value
                return "constexpr"
            if isinstance(value, tuple):
                return type(value)(*(type_of(part, (*path, i)) for i, part in enumerate(value)))
            if isinstance(value, TensorDescriptor):
                return f"tensordesc<bf16[{', '.join(map(str, value.block_shape))}]>"
            if isinstance(value, torch.Tensor) or value % 16 == 0:
                aligned[path] = [["tt.divisibility", 16]]
            return mangle_type(value)

        types = [type_of(a, (i,), kernel.params[i].is_constexpr) for i, a in enumerate(given)]
        source = ASTSource(kernel, dict(zip(kernel.arg_names, types, strict=True)), constants, aligned)
        target = GPUTarget("cuda", capability, 32)
        compiled[kernel.__name__] = triton.compile(source, target=target, options=options)

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", run)
    device = inference.Device(divmod(capability, 10), SM_COUNTS[capability])
    for module in (inference, backward):
        monkeypatch.setattr(module, "device", lambda device_: device)
    return compiled


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def block(hidden, gated):
    return Weights(empty(NEURONS, hidden) if gated else None, empty(NEURONS, hidden), empty(NEURONS, hidden))


def saved_of(x, weights):
    return SavedCSR.empty(x, weights, Options(stats=True, training=True, capacity=128))


def stack_bytes(binary, path) -> int:
    """What a thread keeps in local memory, that is spilled registers."""
    path.write_bytes(binary.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage).group(1))


def check(binaries, capability, tmp_path, stack=16):
    """None of these kernels spills registers or takes more shared memory than there is."""
    assert binaries
    for name, binary in binaries.items():
        assert stack_bytes(binary, tmp_path / "cubin") <= stack, name
        assert binary.metadata.shared <= SHARED[capability], name


def walks(binary, path) -> list[list[str]]:
    """The machine code of the loops over non-zeros: the innermost ones that multiply."""
    path.write_bytes(binary.asm["cubin"])
    tool = triton.knobs.nvidia.nvdisasm.path
    listing = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True).stdout
    return innermost_loops(listing, "FFMA2?")


@pytest.mark.parametrize("capability", ALL, indirect=True)
def test_gate_pack(capability, binaries, tmp_path):
    sm_count, weights = SM_COUNTS[capability], block(2048, gated=True)
    chosen = {
        inference.gate_config(divmod(capability, 10), tokens, NEURONS, sm_count) for tokens in (3, 300, 500, 10**5)
    }
    assert len(chosen) >= 2
    for config in chosen:
        inference.gate_pack(empty(300, 2048), weights, config)
        check(binaries, capability, tmp_path)


@pytest.mark.parametrize("capability", ALL, indirect=True)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 2048), (64, 2048), (20, 80)])
@pytest.mark.parametrize("gated", [False, True])
def test_few_tokens(capability, binaries, tokens, hidden, gated, tmp_path):
    few.forward(empty(tokens, hidden), block(hidden, gated), squared=not gated)
    assert len(binaries) == 3
    check(binaries, capability, tmp_path)


@pytest.mark.parametrize("capability", ALL, indirect=True)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("squared", [False, True])
def test_activation(capability, binaries, gated, squared, tmp_path):
    z = empty(300, NEURONS)
    activation.launch(z, z if gated else None, squared=squared)()
    check(binaries, capability, tmp_path)


@pytest.mark.parametrize(
    ("hidden", "gated", "save", "tokens"),
    [(2048, True, False, 3), (2048, True, False, 10**5), (2048, True, True, 10**5), (4096, False, True, 3)],
)
@pytest.mark.parametrize("squared", [False, True])
def test_gated_down(capability, binaries, hidden, gated, save, tokens, squared, tmp_path):
    if squared and (tokens == 3) != (capability == 90):
        return  # a product of two registers: half of them is enough
    x, weights = empty(tokens, hidden), block(hidden, gated)
    config = inference.GateConfig(128, 16, 128, 64, 8, 4, descriptors=False, persistent=False)
    packed = inference.PackedGate.empty(x, NEURONS, config)
    saved = saved_of(x, weights) if save else None
    inference.gated_down(packed, x, weights, stats=True, save=saved, squared=squared)
    # Where a token's walk stands, once for each token: how much of it depends on Triton's version.
    check(binaries, capability, tmp_path, stack=256)
    binary = binaries["gated_down_kernel"]
    loops = walks(binary, tmp_path / "cubin")
    assert loops
    for walk in loops:
        assert not [line for line in walk if re.search(r"\b(LDL|STL)\b", line)], "it uses the stack for each non-zero"
    assert binary.metadata.shared <= 99 * 1024


@pytest.mark.parametrize(("hidden", "tokens"), [(2048, 3), (2048, 10**5), (8192, 10**5)])
def test_backward(capability, binaries, hidden, tokens, tmp_path):
    x, weights, dl1 = empty(tokens, hidden), block(hidden, gated=True), empty(dtype=torch.float32)
    needs = Needs(x=True, gate=True, up=True, down=True)
    backward.backward(x, dl1, x, weights, saved_of(x, weights), needs, squared=hidden == 2048)
    assert len(binaries) == 5
    check(binaries, capability, tmp_path)


def test_hot_neurons(capability, binaries, tmp_path):
    pre, neurons = empty(300, 2 * 1000), empty(1000, dtype=torch.int64)
    nonzeros, l1 = empty(300, dtype=torch.int32), empty(dtype=torch.float32)
    rest = Forward(empty(300, 2048), nonzeros, l1, empty(NEURONS, dtype=torch.bool), None)
    hot_steps.activate(pre, neurons, True, rest, "relu2")
    hot_steps.derive(empty(300, 1000), pre, l1, True, "relu2")
    assert len(binaries) == 2
    check(binaries, capability, tmp_path)
