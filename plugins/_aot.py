"""Kernels ahead of time: one launch → PTX that any driver from CUDA 12.8 on takes, with nothing else in it; kept on
disk by content.

What Triton writes is made portable and checked, each of which is an error here rather than a broken engine later:
the two hidden parameters (global and profile scratch) are unused and removed; ``.target sm_90a`` and its like become
the plain architecture, as no instruction needs the letter; no source path is inside.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ._launch import Launch, Op, Tensor

# PTX 8.7 (CUDA 12.8) knows every architecture up to sm_120; what Triton would choose by itself is newer than many
# drivers.
PTX_VERSION = 87
CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
# Instructions of sm_90a, sm_100a and sm_120a alone, which the plain architecture lacks.
_SPECIFIC = re.compile(r"\b(wgmma|tcgen05|setmaxnreg|multimem|clusterlaunchcontrol)\b")


@dataclass(frozen=True)
class Compiled:
    """``arguments`` are the names of the int32 arguments between inputs and outputs; ``shared`` is in bytes."""

    name: str
    ptx: str
    shared: int
    warps: int
    arguments: tuple[str, ...]


class AotError(RuntimeError):
    """Triton wrote something that can't be put into an engine."""


def cache_folder() -> Path:
    """Where compiled kernels are kept: NORMDEPLOY_CACHE, else the user's cache folder."""
    named = os.environ.get("NORMDEPLOY_CACHE")
    return Path(named or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "normdeploy") / "kernels"


def specialized(launch: Launch) -> dict[str, int]:
    """The scalars that the kernel is compiled for: every size that is constant, but not the number of rows, which
    nothing gains from."""
    return {name: value for name, value in launch.scalars.items() if isinstance(value, int) and name != "rows"}


def compile_launch(
    op: Op, launch: Launch, inputs: Sequence[Tensor], outputs: Sequence[Tensor], capability: tuple[int, int]
) -> Compiled:
    """The kernel of ``launch`` for a compute capability and all later ones; from disk where it was compiled before.

    Raises AotError where Triton's PTX uses scratch memory, instructions of one architecture alone, or names a source
    file.
    """
    fixed = specialized(launch)
    constants = fixed | launch.constants
    kinds = (
        [f"*{t.dtype}" for t in inputs]
        + ["constexpr" if s in fixed else "i32" for s in launch.scalars]
        + [f"*{t.dtype}" for t in outputs]
    )
    names = list(launch.kernel.arg_names)
    signature = dict(zip(names, kinds + ["constexpr"] * (len(names) - len(kinds)), strict=True))
    unknown = set(launch.constants) - {n for n, kind in signature.items() if kind == "constexpr"}
    if unknown or names[len(inputs) : len(inputs) + len(launch.scalars)] != list(launch.scalars):
        raise AotError(
            f"{op.name}: the kernel's parameters {names} are not inputs, {list(launch.scalars)}, outputs and"
            f" {list(launch.constants)}"
        )
    file = cache_folder() / (_key(launch.kernel, signature, constants, launch.warps, capability) + ".json")
    found = _read(file)
    if found is None:
        found = _compile(launch.kernel, signature, constants, launch.warps, capability)
        _write(file, found)
    return found


def _key(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int, capability: tuple[int, int]
) -> str:
    import triton

    told = [
        triton.__version__,
        _own_source(),
        kernel.cache_key,
        signature,
        sorted(constants.items()),
        warps,
        capability,
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


@functools.cache
def _own_source() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _read(file: Path) -> Compiled | None:
    """What was kept, or None where there is nothing or not what was written."""
    try:
        digest, text = file.read_text().split("\n", 1)
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            return None
        held = json.loads(text)
    except (OSError, ValueError):
        return None
    return Compiled(**held | {"arguments": tuple(held["arguments"])})


def _write(file: Path, compiled: Compiled) -> None:
    text = json.dumps(asdict(compiled))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as out:
            out.write(hashlib.sha256(text.encode()).hexdigest() + "\n" + text)
        os.replace(out.name, file)
    except OSError:  # a cache that can't be written costs time, nothing else
        return


def _compile(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int, capability: tuple[int, int]
) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.knobs import compilation

    # pointers are aligned as cudaMalloc and TensorRT align them: without the hint loads are 2 bytes wide
    hints = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=hints)
    options = {"num_warps": warps, "ptx_version": PTX_VERSION, "enable_fp_fusion": True}
    with compilation.scope():
        compilation.disable_line_info = True
        built = triton.compile(
            source, target=GPUTarget("cuda", 10 * capability[0] + capability[1], 32), options=options
        )
    scratch = built.metadata.global_scratch_size, built.metadata.profile_scratch_size
    if any(scratch):
        raise AotError(f"{built.metadata.name} wants scratch memory of {scratch} bytes, which a plugin has not")
    visible = sum(kind != "constexpr" for kind in signature.values())
    ptx = portable(built.asm["ptx"], built.metadata.name, visible)
    arguments = tuple(name for name, kind in signature.items() if kind == "i32")
    return Compiled(built.metadata.name, ptx, built.metadata.shared, built.metadata.num_warps, arguments)


def portable(ptx: str, name: str, visible: int) -> str:
    """``ptx`` with the ``visible`` first parameters alone, for the plain architecture; see the head of this file for
    what is checked."""
    head = re.search(rf"\.entry {name}\((.*?)\)", ptx, re.DOTALL)
    if head is None:
        raise AotError(f"no entry {name} in the PTX")
    parameters = [line.strip() for line in head.group(1).strip().split(",\n")]
    hidden = [line.split()[-1] for line in parameters[visible:]]
    used = [p for p in hidden if len(re.findall(rf"\b{p}\b", ptx)) > 1]
    if len(hidden) > 2 or len(parameters) < visible or used:
        raise AotError(
            f"{name}: {len(parameters)} parameters for {visible} arguments, of the hidden ones {used or 'none'} are"
            " used"
        )
    kept = ",\n".join(f"\t{line}" for line in parameters[:visible])
    ptx = ptx[: head.start(1)] + f"\n{kept}\n" + ptx[head.end(1) :]
    specific = _SPECIFIC.search(ptx)
    if specific:
        raise AotError(f"{name} uses {specific.group()}, which one architecture alone has")
    path = re.search(r"^\s*\.(file|loc|section).*|\"[^\"]*\.py\"", ptx, re.MULTILINE)
    if path:
        raise AotError(f"{name} names a source: {path.group().strip()}")
    return re.sub(r"(\.target sm_\d+)[af]", r"\1", ptx)
