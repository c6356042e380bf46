"""CUDA C++ to cubins with NVRTC, cached on disk.

A cubin is keyed by everything that decides its content: source, included files, macros, architecture and the version of
NVRTC. Needs no GPU and no driver, so that CI can compile every kernel.
"""

import contextlib
import functools
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from . import params

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
ARCHITECTURE = "sm_90a"
_INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)
_DIGEST = 32  # bytes of SHA-256, after the cubin in its file


class CompileError(RuntimeError):
    """NVRTC refused a source; the message holds its log."""


def cache_folder() -> Path:
    """Where cubins are cached: $TWELL_CACHE, else $XDG_CACHE_HOME/twell, else ~/.cache/twell."""
    if folder := os.environ.get("TWELL_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twell"


@functools.cache
def cubin(name: str, macros: tuple[tuple[str, int], ...]) -> bytes:
    """The compiled `<name>.cu` with these macros defined; from the cache where it is there, whole and can be read.

    Raises CompileError with NVRTC's log, ImportError where cuda-bindings or NVRTC is not installed.
    """
    from cuda.bindings import nvrtc

    sources, version = _sources(name, dict(macros)), tuple(_checked(nvrtc.nvrtcVersion()))
    key = hashlib.sha256(repr((sources, macros, ARCHITECTURE, version)).encode()).hexdigest()
    path = cache_folder() / f"{name}-{key[:32]}.cubin"
    with contextlib.suppress(OSError):
        content = path.read_bytes()
        code, digest = content[:-_DIGEST], content[-_DIGEST:]
        if hashlib.sha256(code).digest() == digest:  # else it was cut or damaged
            return code
    code = compile_source(name, dict(macros))[0]
    try:
        _write_atomically(path, code + hashlib.sha256(code).digest())
    except OSError as error:  # a home that is read-only, somebody else's folder, a full disk
        logger.warning("%s.cu is compiled anew in each process, which takes seconds (set TWELL_CACHE): %s", name, error)
    return code


def compile_source(name: str, macros: Mapping[str, int]) -> tuple[bytes, str]:
    """(cubin, log of the assembler with registers and spills) of `<name>.cu`, always compiled anew."""
    from cuda.bindings import nvrtc

    main, *headers = _sources(name, macros)
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            main[1].encode(),
            f"{name}.cu".encode(),
            len(headers),
            [text.encode() for _, text in headers],
            [header.encode() for header, _ in headers],
        )
    )
    options = [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", "--ptxas-options=-v"]
    options += [f"-D{macro}={value}" for macro, value in macros.items()]
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = (
            _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace").rstrip("\0")
        )
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"NVRTC could not compile {name}.cu with {dict(macros)}: {status.name}\n{log}")
        return _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _sources(name: str, macros: Mapping[str, int]) -> list[tuple[str, str]]:
    """The file itself and all that it includes, as (name, text)."""
    sources: dict[str, str] = {}
    wanted = [f"{name}.cu"]
    while wanted:
        file = wanted.pop(0)
        if file not in sources:
            match file:
                case "wgmma.cuh":
                    sources[file] = _wgmma(macros["TILE"], int8=bool(macros.get("SCREEN")))
                case "params_check.cuh":
                    sources[file] = params.checks(name)
                case _:
                    sources[file] = (_SOURCES / file).read_text(encoding="utf8")
            wanted += _INCLUDE.findall(sources[file])
    return list(sources.items())


def _wgmma(columns: int, *, int8: bool) -> str:
    """The wgmma instruction for 64 x `columns` accumulators, of type Sum: too many operands to write by hand for each
    width. A step is 32 bytes of each operand's rows."""
    count = columns // 2
    accumulators = ", ".join(f"%{i}" for i in range(count))
    scalar, letter, types, negate = (
        ("int", "r", "k32.s32.s8.s8", "") if int8 else ("float", "f", "k16.f32.bf16.bf16", ", 1, 1, 0, 0")
    )
    outputs = ", ".join(f'"+{letter}"(d[{i}])' for i in range(count))
    return f"""#pragma once
using Sum = {scalar};
__device__ __forceinline__ void wgmma(Sum (&d)[{count}], u64 a, u64 b, int accumulate) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
               "wgmma.mma_async.sync.aligned.m64n{columns}{types} "
               "{{{accumulators}}}, %{count}, %{count + 1}, p{negate};\\n}}"
               : {outputs} : "l"(a), "l"(b), "r"(accumulate));
}}
// Keeps the compiler from moving accesses to the accumulators across an asynchronous product.
__device__ __forceinline__ void pin_registers(Sum (&d)[{count}]) {{
#pragma unroll
  for (int i = 0; i < {count}; i++) asm volatile("" : "+{letter}"(d[i])::"memory");
}}
"""


def _text(size_of, read, program) -> bytes:
    buffer = b" " * _checked(size_of(program))
    _checked(read(program, buffer))
    return buffer


def _checked(result: tuple):
    """The payload of a call of cuda.bindings.nvrtc. Raises CompileError where it failed."""
    status, *payload = result
    if status.value != 0:
        raise CompileError(f"NVRTC: {status.name}")
    return payload[0] if len(payload) == 1 else payload


def _write_atomically(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    Path(file.name).chmod(0o644)  # other users of a shared cache read it
    Path(file.name).replace(path)
