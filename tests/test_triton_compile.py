"""Every Triton kernel compiles for Ampere, Ada, Hopper and Blackwell, without a GPU, and keeps to its registers."""

import re
import subprocess

import pytest
from machine_code import innermost_loops

triton = pytest.importorskip("triton", reason="Triton is not installed on this system")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from twell.triton import backward, few, twell  # noqa: E402
from twell.triton.activation import activation_kernel  # noqa: E402
from twell.triton.few import add_parts_kernel, few_down_kernel, few_gate_kernel  # noqa: E402
from twell.triton.gate_pack import gate_pack_kernel  # noqa: E402
from twell.triton.gated_down import gated_down_kernel, reserve_kernel  # noqa: E402
from twell.triton.hot import hot_backward_kernel, hot_forward_kernel  # noqa: E402
from twell.triton.token_gradients import token_gradients_kernel  # noqa: E402
from twell.triton.transpose import mark_kernel, order_kernel, sum_up_kernel  # noqa: E402
from twell.triton.weight_gradients import weight_gradients_kernel  # noqa: E402

pytestmark = pytest.mark.skipif(twell.INTERPRET, reason="the interpreter compiles nothing")
SM_COUNTS = {80: 108, 89: 142, 90: 132, 100: 148}


def each(*capabilities):
    """Of these architectures, `make test` compiles for Hopper, and `make test-all` for the others."""
    return [one if one == 90 else pytest.param(one, marks=pytest.mark.slow) for one in capabilities]


ALL = each(*SM_COUNTS)
# Where there is no matrix product, Triton makes of Ada what it makes of Ampere.
DIFFERENT = each(80, 90, 100)
# What a thread block may have of shared memory, in bytes.
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
OF_TYPE = {
    "*bf16": "x w up down y saved_u dy gate dx dup dgate ddown result pre h dh activated d",
    "*u32": "words spilled saved_words",
    "*i32": "counts nonzeros queue_counters saved_rows state records before firsts totals order entries",
    "*u8": "fired used",
    "*i64": "overflow masks reserved hot",
    "*fp32": "l1 partial partial_l1 dl1 parts",
    "i32": "M N H size x_stride w_stride dy_stride capacity blocks",
}
TYPES = {name: type_ for type_, names in OF_TYPE.items() for name in names.split()}


def compiled(kernel, capability, constants, types=None, **options):
    """The kernel for one architecture; pointers and strides are multiples of 16, as they are in practice."""
    signature = {
        name: "constexpr" if name in constants else {**TYPES, **(types or {})}[name] for name in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, type_) in enumerate(signature.items())
        if type_.startswith("*") or name.endswith("stride")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def stack_bytes(binary, path) -> int:
    """What a thread keeps in local memory, that is spilled registers."""
    path.write_bytes(binary.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage).group(1))


def walks(binary, path) -> list[list[str]]:
    """The machine code of the loops over non-zeros: the innermost ones that multiply."""
    path.write_bytes(binary.asm["cubin"])
    tool = triton.knobs.nvidia.nvdisasm.path
    listing = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True).stdout
    return innermost_loops(listing, "FFMA2?")


@pytest.mark.parametrize("capability", ALL)
def test_gate_pack(capability, tmp_path):
    sm_count = SM_COUNTS[capability]
    chosen = {twell.gate_config(divmod(capability, 10), tokens, 5632, sm_count) for tokens in (1, 300, 500, 10**5)}
    assert len(chosen) >= 2
    for config in chosen:
        constants = {
            **{"K": 2048, "TILE": config.tile, "SLOTS": config.slots, "ROWS": config.rows, "STEP": config.step},
            **{"DESCRIPTORS": config.descriptors, "FULL": True, "FLATTEN": config.persistent, "INTERPRET": False},
            "QUEUES": sm_count,
        }
        types = {}
        if config.descriptors:
            types = {"x": f"tensordesc<bf16[{config.rows}, {config.step}]>"}
            types["w"] = f"tensordesc<bf16[{config.tile}, {config.step}]>"
        binary = compiled(
            gate_pack_kernel, capability, constants, types, num_warps=config.warps, num_stages=config.stages
        )
        assert stack_bytes(binary, tmp_path / "cubin") <= 16, config
        assert binary.metadata.shared <= SHARED[capability], config


@pytest.mark.parametrize("capability", ALL)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 2048), (64, 2048), (20, 80)])
@pytest.mark.parametrize("gated", [False, True])
def test_few_tokens(capability, tokens, hidden, gated, tmp_path):
    config = few.config_for(tokens, hidden)
    common = {"K": hidden, "ROWS": config.rows, "NEURONS": config.neurons, "INTERPRET": False}
    switches = {"GATED": gated, "SQUARED": not gated}
    warps, sizes = config.warps, {"COLUMNS": config.columns, "SPLITS": config.splits}
    gate = {**common, "STEP": config.step, **switches}
    gate = compiled(few_gate_kernel, capability, gate, num_warps=warps, num_stages=config.gate_stages)
    down = {**common, **sizes}
    down = compiled(few_down_kernel, capability, down, num_warps=warps, num_stages=config.down_stages)
    total = compiled(
        add_parts_kernel, capability, {"SPLITS": config.splits, "BLOCK": 1024, "INTERPRET": False}, num_warps=4
    )
    for binary in (gate, down, total):
        assert stack_bytes(binary, tmp_path / "cubin") <= 16
        assert binary.metadata.shared <= SHARED[capability]


@pytest.mark.parametrize("capability", ALL)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("squared", [False, True])
def test_activation(capability, gated, squared, tmp_path):
    constants = {"GATED": gated, "SQUARED": squared, "BLOCK": 2048, "INTERPRET": False}
    binary = compiled(activation_kernel, capability, constants, {"z": "*bf16", "u": "*bf16"}, num_warps=4)
    assert stack_bytes(binary, tmp_path / "cubin") <= 16


def by_tokens(capability, hidden, tokens, backward=False):
    """The constants and options of a pass over tokens."""
    config = twell.token_config(tokens, hidden, SM_COUNTS[capability], backward=backward)
    constants = {"CHUNK": config.chunk, "PARTS": config.parts, "SHARE": config.share, "ACROSS": config.across}
    constants |= {"K": hidden, "LIST": 32, "QUEUES": SM_COUNTS[capability], "INTERPRET": False}
    return constants, {"num_warps": config.across, "num_stages": 1}


@pytest.mark.parametrize("capability", DIFFERENT)
@pytest.mark.parametrize(
    ("hidden", "gated", "save", "tokens"),
    [(2048, True, False, 1), (2048, True, False, 10**5), (2048, True, True, 10**5), (4096, False, True, 1)],
)
@pytest.mark.parametrize("squared", [False, True])
def test_gated_down(capability, hidden, gated, save, tokens, squared, tmp_path):
    if squared and (tokens == 1) != (capability == 90):
        return  # a product of two registers: half of them is enough
    constants, options = by_tokens(capability, hidden, tokens)
    constants |= {
        "TILE": 128,
        "SLOTS": 16,
        "GATED": gated,
        "SQUARED": squared,
        "STATS": True,
        "SAVE": save,
        "WINDOW": 32,
    }
    binary = compiled(gated_down_kernel, capability, constants, **options)
    # Where a token's walk stands, once for each token: how much of it depends on Triton's version.
    assert stack_bytes(binary, tmp_path / "cubin") <= 256
    found = walks(binary, tmp_path / "cubin")
    assert found
    for walk in found:
        assert not [line for line in walk if re.search(r"\b(LDL|STL)\b", line)], "it uses the stack for each non-zero"
    assert binary.metadata.shared <= 99 * 1024


@pytest.mark.parametrize("capability", DIFFERENT)
@pytest.mark.parametrize(("hidden", "gated", "tokens"), [(2048, True, 1), (2048, True, 10**5), (8192, True, 10**5)])
def test_token_gradients(capability, hidden, gated, tokens, tmp_path):
    constants, options = by_tokens(capability, hidden, tokens, backward=True)
    constants |= {"GATED": gated, "SQUARED": hidden == 2048, "HAS_L1": True, "FOR_X": True, "FOR_WEIGHTS": True}
    binary = compiled(token_gradients_kernel, capability, constants, **options)
    assert stack_bytes(binary, tmp_path / "cubin") <= 16


@pytest.mark.parametrize("capability", DIFFERENT)
def test_weight_gradients(capability, tmp_path):
    config = backward.weight_config(2048)
    constants = {"K": 2048, "FOR_UP": True, "FOR_GATE": True, "FOR_DOWN": True, "INTERPRET": False}
    constants |= {"SLICE": config.slice_, "AHEAD": config.ahead}
    options = {"num_warps": config.warps, "num_stages": 1}
    binary = compiled(weight_gradients_kernel, capability, constants, **options)
    assert stack_bytes(binary, tmp_path / "cubin") <= 16


@pytest.mark.parametrize("capability", DIFFERENT)
def test_small_kernels(capability, tmp_path):
    hot = {"GATED": True, "SQUARED": True, "COLUMNS": 1024, "INTERPRET": False}
    for kernel, constants in {
        hot_forward_kernel: {**hot, "STATS": True},
        hot_backward_kernel: {**hot, "HAS_L1": True},
        reserve_kernel: {"TILES": 22, "TILES_PADDED": 32, "ROWS": 64},
        mark_kernel: {"LIST": 128},
        sum_up_kernel: {"ROWS": 64, "COLUMNS": 32},
        order_kernel: {"FREQUENT": 512, "COLUMNS": 2048},
    }.items():
        assert stack_bytes(compiled(kernel, capability, constants, num_warps=4), tmp_path / "cubin") <= 16, kernel
