"""Ahead-of-time compilation, without a GPU: the PTX is portable, wide where it can be, and what ptxas makes of it
spills nothing."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from normdeploy_plugins import _aot
from normdeploy_plugins._aot import CAPABILITIES, PTX_VERSIONS, AotError, compile_launch
from normdeploy_plugins._launch import Launch, Tile
from normdeploy_plugins._ptxas import assemble
from normdeploy_plugins.ops import BY_NAME, OPS

from .usual import EPS, GROUPS, LN, USUAL, compiled, tensors

pytestmark = pytest.mark.usefixtures("cache")


def accesses(ptx: str, what: str) -> dict[str, int]:
    """How wide global loads ('ld') or stores ('st') are, and how many of each."""
    found = re.findall(rf"\b{what}\.global\.([a-z0-9.]+)", ptx)
    return {width: found.count(width) for width in found}


def test_every_op_is_compiled() -> None:
    assert set(USUAL) == {op.name for op in OPS}


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"{c[0]}.{c[1]}")
@pytest.mark.parametrize("name", USUAL)
def test_assembles_for(name: str, capability: tuple[int, int]) -> None:
    shape, attributes = USUAL[name]
    kernel = compiled(name, shape, attributes, "bf16", capability)
    assert f".target sm_{capability[0]}{capability[1]}\n" in kernel.ptx
    major, minor = divmod(PTX_VERSIONS[capability], 10)
    assert f".version {major}.{minor}\n" in kernel.ptx
    assert f".reqntid {kernel.warps * 32}" in kernel.ptx
    assert not re.search(r"\.py|/|\.loc|\.file", re.sub(r"//.*", "", kernel.ptx))
    op = BY_NAME[name]
    parameters = re.search(r"\.entry \w+\((.*?)\)", kernel.ptx, re.DOTALL)
    assert parameters is not None
    assert parameters.group(1).count(".param") == len(op.types) + len(kernel.arguments)
    resources = assemble(kernel.ptx, capability)
    assert resources.spilled == 0
    assert kernel.shared <= 48 * 1024


# GPUs between the targets (GB200, B300, Jetson Thor, GB10, Orin): the kernel for the target below, which ptxas takes
BETWEEN = {(8, 7): (8, 6), (10, 1): (10, 0), (10, 3): (10, 0), (11, 0): (10, 0), (12, 1): (12, 0), (13, 0): (12, 0)}


@pytest.mark.parametrize("capability", BETWEEN, ids=lambda c: f"{c[0]}.{c[1]}")
def test_a_gpu_between_two_targets_runs_the_lower_ones_kernel(capability: tuple[int, int]) -> None:
    for name in ("LayerNorm", "GroupNorm", "NormStatistics"):
        kernel = compiled(name, *USUAL[name], "bf16", capability)
        assert kernel == compiled(name, *USUAL[name], "bf16", BETWEEN[capability])
        if capability not in ((10, 1), (13, 0)):  # 10.1 has become 11.0 with CUDA 13; 13.0 is of the future
            assert assemble(kernel.ptx, capability).spilled == 0


def test_a_gpu_below_all_targets_is_refused() -> None:
    with pytest.raises(AotError, match=r"need a GPU of compute capability 7\.5 or newer, not 7\.0"):
        compiled("LayerNorm", (8, 512), LN, "fp16", (7, 0))


def test_what_ptxas_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """PTX 6.0 has not the instructions of sm_90: the words of ptxas, and what to do."""
    monkeypatch.setitem(PTX_VERSIONS, (9, 0), 60)
    with pytest.raises(AotError) as refused:
        compiled("LayerNorm", (8, 544), LN, "fp16", (9, 0))
    words = str(refused.value)
    assert re.match(r"ptxas of Triton [\d.]+ rejected layer_norm_kernel for compute capability 9\.0: .*PTX ISA", words)
    assert "install a newer triton, or set NORMDEPLOY_COMPUTE_CAPABILITY to a lower one, at least 7.5" in words


def test_every_variant_of_a_kernel_has_a_name_of_its_own() -> None:
    variants = [
        compiled("LayerNorm", (8, 640), LN | change, dtype, tactic=t)
        for change in ({}, {"ddof": 1})
        for dtype in ("fp16", "fp32")
        for t in (0, 1)
    ]
    names = {kernel.name for kernel in variants}
    assert len(names) == len({kernel.ptx for kernel in variants}) == len(variants)
    for kernel in variants:
        assert re.fullmatch(r"layer_norm_kernel_[0-9a-f]{16}", kernel.name)
        assert f".visible .entry {kernel.name}(" in kernel.ptx
        assert not re.search(r"\blayer_norm_kernel(\b|_param)", kernel.ptx)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("n", [64, 768, 1000, 4096, 8192, 16384, 20_000, 65_536])
def test_rows_are_read_and_written_by_128_bits(n: int, dtype: str) -> None:
    for name, attributes in (("LayerNorm", LN), ("AddRMSNorm", EPS | {"offset": 0.0})):
        kernel = compiled(name, (4096, n), attributes, dtype)
        assert set(accesses(kernel.ptx, "st")) == {"v4.b32"}
        loads = accesses(kernel.ptx, "ld")
        # the only narrow loads are of each row's first element: one, or one for each of a thread's few rows
        assert set(loads) <= {"v4.b32", "v2.b32", "b16", "b32"}
        assert loads["v4.b32"] >= 2
        assert sum(loads.values()) - loads["v4.b32"] <= max(2, 2048 // n)


def test_odd_rows_can_not_be_wide() -> None:
    assert set(accesses(compiled("LayerNorm", (64, 1001), LN, "fp16").ptx, "st")) == {"b16"}


LAST = {"channels_last": 1}
WIDE = [(name, *USUAL[name]) for name in USUAL if name not in ("GroupNormSiLU", "NormStatistics")] + [
    ("GroupNormSiLU", (2, 16, 16, 512), GROUPS | LAST),
    ("GroupNormApply", (2, 32, 32, 320), GROUPS | LAST | {"activation": "silu"}),
    ("ScaleShift", (512, 2048), {"axis": 1, "activation": "relu"}),
    ("ChannelLayerNorm", (2, 1024, 56, 56), EPS),  # looped
    ("InstanceNorm", (2, 16, 256, 128), EPS),  # looped
]


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize(
    ("name", "shape", "attributes"), WIDE, ids=lambda v: "x".join(map(str, v)) if isinstance(v, tuple) else None
)
def test_every_op_is_written_by_128_bits(
    name: str, shape: tuple[int, ...], attributes: dict[str, Any], dtype: str
) -> None:
    kernel = compiled(name, shape, attributes, dtype)
    stores = accesses(kernel.ptx, "st")
    if "y_scale" in BY_NAME[name].outputs:
        assert stores.pop("b32") <= 8  # one for each of a program's rows
    assert set(stores) == {"v4.b32"}
    # what is as large as an output is read as it is written
    whole = sum(given in ("x", "residual") for given in BY_NAME[name].inputs)
    assert accesses(kernel.ptx, "ld")["v4.b32"] >= whole * stores["v4.b32"] // len(BY_NAME[name].outputs)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_statistics_are_read_by_128_bits(dtype: str) -> None:
    for name, (shape, attributes) in {
        "rows": USUAL["NormStatistics"],
        "NHWC": ((2, 64, 64, 512), {"axis": 1, "groups": 32, "splits": 4} | LAST),
    }.items():
        loads = accesses(compiled("NormStatistics", shape, attributes, dtype).ptx, "ld")
        assert loads["v4.b32"] >= 2, name
        assert sum(loads.values()) == loads["v4.b32"] + 1, name  # the row's first element


# n -> the most registers that the default tactic of LayerNorm may use (fp16, fp32) on sm_90, where 65,536 / (threads ·
# registers) blocks fit on a multiprocessor, so that a rise here costs occupancy; they are allotted by eights. With
# Triton 3.6 and 3.7
REGISTERS = {
    64: (48, 48),
    768: (48, 48),
    1024: (48, 48),
    2048: (48, 48),
    4096: (48, 48),
    8192: (64, 72),
    16384: (128, 128),
    65_536: (64, 64),
}


@pytest.mark.parametrize("n", REGISTERS)
def test_registers(n: int) -> None:
    for dtype, most in zip(("fp16", "fp32"), REGISTERS[n], strict=True):
        resources = assemble(compiled("LayerNorm", (4096, n), LN, dtype).ptx, (9, 0))
        assert resources.spilled == 0
        assert resources.registers <= most, dtype


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("LayerNorm", LN),
        ("RMSNorm", EPS | {"axis": -1, "offset": 0.0}),
        ("AddLayerNorm", EPS),
        ("AddRMSNorm", EPS | {"offset": 0.0}),
        ("StdNorm", LN),
    ],
)
@pytest.mark.parametrize("n", [4096, 16384])
def test_no_tactic_spills(name: str, attributes: dict[str, Any], n: int) -> None:
    op, shape = BY_NAME[name], (4096, n)
    for tactic in range(len(op.tiles(tensors(op, shape, attributes, "fp16"), attributes))):
        assert assemble(compiled(name, shape, attributes, "fp16", tactic=tactic).ptx, (9, 0)).spilled == 0


@pytest.mark.parametrize("shape", [(8, 320, 64, 64), (8, 640, 32, 32), (8, 1280, 16, 16), (8, 1280, 8, 8)])
@pytest.mark.parametrize("last", [0, 1])
def test_no_tactic_of_group_norm_spills(shape: tuple[int, ...], last: int) -> None:
    """The GroupNorms of Stable Diffusion."""
    if last:
        shape = (shape[0], *shape[2:], shape[1])
    attributes = GROUPS | {"channels_last": last}
    for name, more in (("GroupNormSiLU", {}), ("GroupNormApply", {"activation": "silu"})):
        op = BY_NAME[name]
        for tactic in range(len(op.tiles(tensors(op, shape, attributes | more, "fp16"), attributes | more))):
            assert assemble(compiled(name, shape, attributes | more, "fp16", tactic=tactic).ptx, (9, 0)).spilled == 0


def test_a_second_build_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled("LayerNorm", (8, 640), LN, "fp16")
    monkeypatch.setattr(_aot, "_compile", lambda *a: pytest.fail("compiled again"))
    assert compiled("LayerNorm", (8, 640), LN, "fp16") == first
    # the number of rows is no part of the kernel
    assert compiled("LayerNorm", (9, 640), LN, "fp16") == first


@pytest.mark.parametrize("change", [{"epsilon": 1e-6}, {"ddof": 1}])
def test_another_attribute_is_another_kernel(change: dict[str, Any]) -> None:
    assert compiled("LayerNorm", (8, 640), LN | change, "fp16").ptx != compiled("LayerNorm", (8, 640), LN, "fp16").ptx


def test_a_damaged_cache_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMDEPLOY_CACHE", str(tmp_path))
    first = compiled("LayerNorm", (8, 512), LN, "fp16")
    (file,) = (tmp_path / "kernels").iterdir()
    file.write_text(file.read_text().replace("mul.f32", "add.f32", 1))
    assert compiled("LayerNorm", (8, 512), LN, "fp16") == first
    assert compiled("LayerNorm", (8, 512), LN, "fp16") == first


def test_a_cache_that_can_not_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NORMDEPLOY_CACHE", str(tmp_path / "file"))
    assert compiled("LayerNorm", (8, 512), LN, "fp16").name.startswith("layer_norm_kernel_")


def test_dynamic_sizes_are_arguments() -> None:
    """A size that is no int stays an argument of the kernel; TensorRT's symbolic sizes are such."""
    op = BY_NAME["LayerNorm"]
    inputs = tensors(op, (8, 640), LN, "fp16")
    known = op.launch(inputs, LN, Tile(1, 4096, 8, True))
    launch = Launch(known.kernel, known.grid, {"rows": object(), "n": object()}, known.constants, known.warps)
    kernel = compile_launch(op, launch, inputs, inputs[:1], (8, 0))
    assert kernel.arguments == ("rows", "n")
    assert assemble(kernel.ptx, (8, 0)).spilled == 0


@pytest.mark.parametrize(
    ("name", "shape", "attributes", "message"),
    [
        ("LayerNorm", (2**31, 2), LN, "rows is 2147483648, but kernels support only sizes below"),
        ("LayerNorm", (2, 2**31), LN, "n is 2147483648"),
        ("GroupNorm", (1, 64, 2**15, 2**15), GROUPS, "a group's size is 2147483648"),
        ("ScaleShift", (2**16, 2**15, 8), {"axis": 1, "activation": "none"}, "rows is 2147483648"),
    ],
)
def test_sizes_above_int32_are_refused(
    name: str, shape: tuple[int, ...], attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compiled(name, shape, attributes, "fp16")


PARAMETERS = ",\n".join(f"\t.param .u64 k_param_{i}" for i in range(3))
ENTRY = f".version 8.7\n.target sm_90a\n.visible .entry k(\n{PARAMETERS}\n)\n{{ %s }}"


def test_hidden_parameters_are_removed() -> None:
    ptx = _aot.portable(ENTRY % "ld.param.b64 %rd1, [k_param_0];", "k", 1)
    assert "k_param_1" not in ptx
    assert ".target sm_90\n" in ptx


@pytest.mark.parametrize(
    ("body", "visible", "message"),
    [
        ("ld.param.b64 %rd1, [k_param_2];", 1, "k_param_2"),
        ("", 4, "3 parameters for 4 arguments"),
        ("", 0, "3 parameters for 0 arguments"),
        ("wgmma.fence.sync.aligned;", 1, "wgmma"),
        ('\n.file 1 "kernel.py"', 1, "name of a source"),
    ],
)
def test_what_is_not_portable_is_refused(body: str, visible: int, message: str) -> None:
    with pytest.raises(AotError, match=message):
        _aot.portable(ENTRY % body, "k", visible)


PACKAGE = Path(str(_aot.__file__)).parent
KERNELS = sorted(f.stem for f in PACKAGE.glob("*.py") if "@triton.jit" in f.read_text())


@pytest.mark.parametrize("name", KERNELS)
def test_sizes_of_tiles_come_from_functions_of_constants(name: str) -> None:
    """What a `triton_config.jit` function returns is a tensor in Triton 3.6 and can't be the size of a tile: that
    release compiled no kernel that reads a row piece by piece."""
    import triton

    module = importlib.import_module(f"normdeploy_plugins.{name}")
    for node in ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text())):
        if not isinstance(node, ast.AnnAssign) or ast.unparse(node.annotation) != "tl.constexpr" or not node.value:
            continue
        for call in ast.walk(node.value):
            if isinstance(call, ast.Call):
                called = getattr(module, ast.unparse(call.func), None)
                assert not isinstance(called, triton.JITFunction), ast.unparse(node)
