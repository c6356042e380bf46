"""Every Triton kernel compiles for Ampere, Ada, Hopper and Blackwell, without a GPU, and keeps to its registers."""

import re
import subprocess

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed on this system")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kernels.triton import twell  # noqa: E402
from kernels.triton.gate_pack import gate_pack_kernel  # noqa: E402
from kernels.triton.gated_down import gated_down_kernel  # noqa: E402
from kernels.triton.suspects import suspects_kernel  # noqa: E402

pytestmark = pytest.mark.skipif(twell.INTERPRET, reason="the interpreter compiles nothing")
PROCESSORS = {80: 108, 89: 142, 90: 132, 100: 148}
# What a thread block may have of shared memory, in bytes.
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TYPES = {
    **dict.fromkeys(("x", "w", "up", "down", "y"), "*bf16"),
    **dict.fromkeys(("words", "spilled"), "*u32"),
    **dict.fromkeys(("counts", "nonzeros", "suspects", "queues"), "*i32"),
    **dict.fromkeys(("suspect", "fired"), "*u8"),
    **dict.fromkeys(("M", "N", "x_stride", "w_stride"), "i32"),
    "overflow": "*i64",
    "l1": "*fp32",
}


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


@pytest.mark.parametrize("capability", PROCESSORS)
def test_gate_pack(capability, tmp_path):
    processors = PROCESSORS[capability]
    chosen = {twell.gate_config(divmod(capability, 10), tokens, 5632, processors) for tokens in (1, 300, 500, 10**5)}
    assert len(chosen) >= 2
    for config in chosen:
        constants = {
            **{"K": 2048, "TILE": config.tile, "SLOTS": config.slots, "ROWS": config.rows, "STEP": config.step},
            **{"DESCRIPTORS": config.descriptors, "FULL": True, "FLATTEN": config.persistent, "INTERPRET": False},
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


@pytest.mark.parametrize("capability", PROCESSORS)
@pytest.mark.parametrize(("hidden", "gated"), [(2048, True), (4096, False), (8192, True)])
def test_gated_down(capability, hidden, gated, tmp_path):
    for config in {twell.down_config(tokens, hidden, PROCESSORS[capability]) for tokens in (1, 10**5)}:
        constants = {
            **{"K": hidden, "TILE": 128, "SLOTS": 16, "GATED": gated, "STATS": True, "CHUNK": config.chunk},
            **{"TEAM": config.team, "ACROSS": config.across, "LIST": 32, "WINDOW": 32, "SUSPECT_COUNTS": 256},
            **{"QUEUES": PROCESSORS[capability], "INTERPRET": False},
        }
        options = {"maxnreg": config.registers} if config.registers else {}
        binary = compiled(gated_down_kernel, capability, constants, num_warps=config.warps, num_stages=1, **options)
        # Where a token's walk stands, outside the inner loop.
        assert stack_bytes(binary, tmp_path / "cubin") <= 128, config
        assert binary.metadata.shared <= 99 * 1024, config


@pytest.mark.parametrize("capability", PROCESSORS)
def test_suspects(capability, tmp_path):
    constants = {"K": 5120, "GATED": True, "ROWS": 1, "PADDED": 8192, "PROGRAMS": 256, "QUEUES": 132}
    binary = compiled(suspects_kernel, capability, {**constants, "QUEUES_PADDED": 256}, num_warps=4)
    assert stack_bytes(binary, tmp_path / "cubin") == 0
