"""Compile kernels ahead of time to portable PTX, and cache the PTX on disk by content.

The PTX runs on every driver from CUDA 12.0 on that supports the GPU. This module makes Triton's output portable and
checks it, so that a fault raises an error now instead of breaking an engine later. Triton's two hidden parameters
(global and profile scratch) must be unused, and are removed. A target such as ``sm_90a`` becomes the plain architecture
``sm_90``. This is possible because no instruction of the kernels needs the features of the suffix. The PTX must not
contain the path of a source file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ._launch import QUANTIZED, Launch, Op, Tensor
from ._ptxas import without_spills

# Compute capability → PTX version times ten. The version is 8.0 (CUDA 12.0, drivers from R525 on), or the first version
# that supports the capability (8.6: R565, 8.7: R570). Triton would choose a version that many drivers do not support. A
# GPU that is not listed, such as 10.3 or 12.1, uses the kernel of the next lower capability: without
# architecture-specific instructions, PTX runs on every later GPU (PTX ISA, ".target").
PTX_VERSIONS = {(7, 5): 80, (8, 0): 80, (8, 6): 80, (8, 9): 80, (9, 0): 80, (10, 0): 86, (12, 0): 87}
CAPABILITIES = tuple(PTX_VERSIONS)
# Lowest compute capability with conversions to E4M3, and lowest PTX version with these instructions (CUDA 12.1, R530).
FP8_SINCE, FP8_PTX = (8, 9), 81
# Instructions that exist only on sm_90a, sm_100a and sm_120a, not on the plain architectures.
_SPECIFIC = re.compile(r"\b(wgmma|tcgen05|setmaxnreg|multimem|clusterlaunchcontrol)\b")


@dataclass(frozen=True)
class Compiled:
    """Compiled kernel.

    Attributes:
        name: name of the kernel's entry function; contains a digest of the PTX.
        shared: shared memory of a block, in bytes.
        warps: number of warps of a block.
        arguments: names of the int32 arguments, which are passed between inputs and outputs.
    """

    name: str
    ptx: str
    shared: int
    warps: int
    arguments: tuple[str, ...]


class AotError(RuntimeError):
    """Raised if a kernel can't be put into an engine. The message says how to fix this, if possible."""


def cache_folder() -> Path:
    """Return the folder of compiled kernels.

    Returns:
        NORMDEPLOY_CACHE or the user's cache folder, with ``kernels`` appended.
    """
    named = os.environ.get("NORMDEPLOY_CACHE")
    return Path(named or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "normdeploy") / "kernels"


def target_of(capability: tuple[int, int]) -> tuple[int, int]:
    """Return the compute capability to compile for.

    Returns:
        the highest of CAPABILITIES that is not above the GPU's compute capability.

    Raises:
        AotError: the GPU is older than all of CAPABILITIES.
    """
    known = [c for c in CAPABILITIES if c <= capability]
    if not known:
        least, asked = (".".join(map(str, c)) for c in (CAPABILITIES[0], capability))
        raise AotError(f"the kernels need a GPU of compute capability {least} or newer, not {asked}")
    return known[-1]


def specialized(launch: Launch) -> dict[str, int]:
    """Select the scalars that the kernel is compiled for.

    Returns:
        every constant size except the number of rows. A constant number of rows would make no kernel faster.
    """
    return {name: value for name, value in launch.scalars.items() if isinstance(value, int) and name != "rows"}


def compile_launch(
    op: Op, launch: Launch, inputs: Sequence[Tensor], outputs: Sequence[Tensor], capability: tuple[int, int]
) -> Compiled:
    """Compile the kernel of ``launch`` for a compute capability and all higher ones, or read the kernel from the cache.

    Returns:
        the kernel; its name contains a digest of the PTX.

    Raises:
        AotError: the GPU lacks the type, or Triton or its ptxas fails. Also raised if the PTX uses scratch memory, uses
            instructions of a single architecture, or names a source file.
    """
    if capability < FP8_SINCE and any(t.dtype == QUANTIZED["fp8"] for t in outputs):
        least, asked = (".".join(map(str, c)) for c in (FP8_SINCE, capability))
        raise AotError(
            f"{op.name} to FP8 needs a GPU of compute capability {least} or newer, not {asked}; quantize to int8 there"
        )
    capability = target_of(capability)
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
            f"{op.name}: the kernel's parameters {names} do not match its inputs, {list(launch.scalars)}, outputs "
            f"and {list(launch.constants)}"
        )
    file = cache_folder() / (_key(launch.kernel, signature, constants, launch.warps, capability) + ".json")
    stored = _read(file)
    if stored is None:
        stored = _compile(launch.kernel, signature, constants, launch.warps, capability)
        _write(file, stored)
    return stored


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
    own = Path(__file__)
    return hashlib.sha256(own.read_bytes() + own.with_name("_ptxas.py").read_bytes()).hexdigest()


@functools.cache
def sources() -> str:
    """Hash everything that determines kernels and tactics: this package and Triton's version.

    Returns:
        hex digest.
    """
    import triton

    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join([triton.__version__.encode(), *(f.read_bytes() for f in files)])).hexdigest()


def _read(file: Path) -> Compiled | None:
    """Read a cached kernel; return None if there is none or its content is damaged."""
    try:
        digest, text = file.read_text().split("\n", 1)
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            return None
        content = json.loads(text)
    except (OSError, ValueError):
        return None
    return Compiled(**content | {"arguments": tuple(content["arguments"])})


def _write(file: Path, compiled: Compiled) -> None:
    text = json.dumps(asdict(compiled))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as out:
            out.write(hashlib.sha256(text.encode()).hexdigest() + "\n" + text)
        os.replace(out.name, file)
    # If the cache can't be written, the kernel is only compiled again next time.
    except OSError:
        return


def _compile(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int, capability: tuple[int, int]
) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.knobs import compilation
    from triton.runtime.errors import PTXASError

    # Pointers from cudaMalloc and TensorRT are aligned to at least 16 bytes. Without this hint, each load would be only
    # 2 bytes wide.
    hints = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=hints)
    version = max(PTX_VERSIONS[capability], FP8_PTX if f"*{QUANTIZED['fp8']}" in signature.values() else 0)
    options = {"num_warps": warps, "ptx_version": version, "enable_fp_fusion": True}
    with compilation.scope():
        compilation.disable_line_info = True
        target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
        try:
            built = triton.compile(source, target=target, options=options)
        except PTXASError as error:
            raise AotError(_refused(kernel.__name__, capability, str(error))) from error
    scratch = built.metadata.global_scratch_size, built.metadata.profile_scratch_size
    if any(scratch):
        raise AotError(f"{built.metadata.name} needs {scratch} bytes of scratch memory, which plugins can't allocate")
    visible = sum(kind != "constexpr" for kind in signature.values())
    ptx = portable(built.asm["ptx"], built.metadata.name, visible)
    try:
        ptx = without_spills(ptx, capability)
    except subprocess.CalledProcessError as error:
        raise AotError(_refused(kernel.__name__, capability, error.stderr)) from error
    name, ptx = named(ptx, built.metadata.name)
    arguments = tuple(name for name, kind in signature.items() if kind == "i32")
    return Compiled(name, ptx, built.metadata.shared, built.metadata.num_warps, arguments)


def _refused(kernel: str, capability: tuple[int, int], told: str) -> str:
    import triton

    message = re.search(r"(?:line \d+; error|ptxas fatal)\s*:\s*(.+)", told)
    words = message.group(1).strip() if message else told.strip()[:300]
    asked, least = (".".join(map(str, c)) for c in (capability, CAPABILITIES[0]))
    return (
        f"ptxas of Triton {triton.__version__} rejected {kernel} for compute capability {asked}: {words}; "
        f"install a newer triton, or set NORMDEPLOY_COMPUTE_CAPABILITY to a lower one, at least {least}: "
        "later GPUs run such kernels too"
    )


def named(ptx: str, name: str) -> tuple[str, str]:
    """Put a digest of the PTX into the kernel's name.

    Variants of one kernel end up in the same engine, and TensorRT may distinguish them only by name.

    Returns:
        (name, PTX).
    """
    own = f"{name}_{hashlib.sha256(ptx.encode()).hexdigest()[:16]}"
    return own, re.sub(rf"\b{name}(?=\b|_param_)", own, ptx)


def portable(ptx: str, name: str, visible: int) -> str:
    """Make PTX portable, as the module's docstring describes: keep only the first ``visible`` parameters, and use the
    plain architecture.

    Returns:
        the new PTX.

    Raises:
        AotError: a check fails.
    """
    head = re.search(rf"\.entry {name}\((.*?)\)", ptx, re.DOTALL)
    if head is None:
        raise AotError(f"the PTX has no entry {name}")
    parameters = [line.strip() for line in head.group(1).strip().split(",\n")]
    hidden = [line.split()[-1] for line in parameters[visible:]]
    used = [p for p in hidden if len(re.findall(rf"\b{p}\b", ptx)) > 1]
    if len(hidden) > 2 or len(parameters) < visible or used:
        raise AotError(
            f"{name}: {len(parameters)} parameters for {visible} arguments; used hidden parameters: {used or 'none'}"
        )
    kept = ",\n".join(f"\t{line}" for line in parameters[:visible])
    ptx = ptx[: head.start(1)] + f"\n{kept}\n" + ptx[head.end(1) :]
    specific = _SPECIFIC.search(ptx)
    if specific:
        raise AotError(f"{name} uses {specific.group()}, which only one architecture supports")
    path = re.search(r"^\s*\.(file|loc|section).*|\"[^\"]*\.py\"", ptx, re.MULTILINE)
    if path:
        raise AotError(f"{name} contains the name of a source file: {path.group().strip()}")
    return re.sub(r"(\.target sm_\d+)[af]", r"\1", ptx)
