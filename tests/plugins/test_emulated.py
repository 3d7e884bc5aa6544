"""What was compiled, run in the emulator: no access beside a buffer, no race, each output byte written, and the
reference's numbers."""

from __future__ import annotations

import re

import numpy as np
import pytest
from normdeploy_plugins._aot import CAPABILITIES
from normdeploy_plugins._launch import Tensor
from normdeploy_plugins.ops import BY_NAME, OPS

from .cases import EPS, MORE, ROW_OPS, UNUSUAL, Case, judge, sweep, unusual
from .emulated import run, run_last
from .emulator import Buffer, Fault, Memory
from .emulator import run as run_ptx
from .test_numerics import CASES
from .usual import USUAL, compiled

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize("case", list({str(case): case for case in (*CASES, *sweep())}.values()), ids=str)
def test_against_reference(case: Case) -> None:
    judge(case, *run(case, case.arrays()))


@pytest.mark.parametrize("case", MORE, ids=str)
def test_ops_with_bounds_of_their_own(case: Case) -> None:
    judge(case, *run(case, case.arrays()))


@pytest.mark.parametrize("name", USUAL)
def test_each_architecture(name: str) -> None:
    """The kernels that test_aot assembles, on a smaller batch: 7.5 has no instructions for bfloat16, 10.0 has some for
    pairs of float32."""
    shape, attributes = USUAL[name]
    case = Case(name, (1, 3, *shape[2:]) if len(shape) == 3 else (1, *shape[1:]), attributes, "bf16")
    different = {re.sub(r"\.target.*", "", compiled(name, shape, attributes, "bf16", c).ptx): c for c in CAPABILITIES}
    for capability in different.values():
        judge(case, *run(case, case.arrays(), capability=capability))


# 1004 and 6 · 10 are multiples of 8 bytes and not of 16: the second row begins between two places for 16 bytes
DYNAMIC = [
    *(Case(op, (*before, n), a, "fp16") for op, (before, a) in ROW_OPS.items() for n in (1, 1001, 1004, 9000)),
    *(
        Case(
            op,
            shape,
            EPS
            | {"num_groups": 2}
            | ({"activation": "silu"} if op == "GroupNormApply" else {})
            | {"channels_last": last},
            "fp16",
        )
        for op in ("GroupNorm", "GroupNormApply")
        for shape, last in (
            *(((2, 12, 7, 9), 0), ((2, 7, 9, 12), 1), ((2, 4, 33, 65), 0), ((2, 33, 65, 4), 1)),
            *(((2, 12, 6, 10), 0), ((2, 7, 9, 24), 1), ((2, 12, 8, 10), 0), ((2, 7, 9, 16), 1)),
        )
    ),
    *(
        Case("ChannelLayerNorm", shape, EPS, "fp16")
        for shape in ((2, 96, 7, 9), (2, 8, 6, 10), (2, 8, 8, 10), (2, 8, 0), (0, 8, 5), (1, 300, 3))
    ),
    *(
        Case("ScaleShift", shape, {"axis": 1, "activation": "relu"}, "fp16")
        for shape in ((2, 3, 7, 9), (2, 16, 7, 7), (2, 3, 6, 10), (2, 3, 8, 10), (2, 3, 0), (2, 0, 5), (0, 3, 5))
    ),
    *(Case(op, (*before, 0), a, "fp16") for op, (before, a) in ROW_OPS.items()),
    *(
        Case("GroupNorm", shape, EPS | {"num_groups": 2, "channels_last": last}, "fp16")
        for shape, last in (((2, 4, 0), 0), ((2, 0, 4), 1))
    ),
    Case("ModulatedLayerNorm", (2, 0, 64), EPS, "fp16"),
    Case("GatedRMSNorm", (2, 0, 64), EPS, "fp16"),
    *(
        Case("AdaGroupNormSiLU", shape, EPS | {"num_groups": 2, "spatial": spatial}, "fp16")
        for shape in ((2, 12, 7, 9), (2, 4, 33, 65), (2, 12, 6, 10), (2, 4, 0), (0, 4, 5))
        for spatial in (0, 1)
    ),
    *(
        Case("AdaGroupNormApply", shape, EPS | {"num_groups": 2, "spatial": spatial, "activation": "silu"}, "fp16")
        for shape in ((2, 12, 7, 9), (2, 4, 33, 65))
        for spatial in (0, 1)
    ),
    Case("NormStatistics", (2, 33, 65, 12), {"axis": 1, "groups": 4, "splits": 2, "channels_last": 1}, "fp16"),
    *(
        Case("NormStatistics", shape, {"axis": 1, "groups": 4, "splits": 2, "channels_last": 0}, "fp16")
        for shape in ((2, 12, 33, 31), (2, 12, 6, 10), (2, 12, 40, 40))
    ),
    Case("NormStatistics", (2, 7, 9, 16), {"axis": 1, "groups": 4, "splits": 2, "channels_last": 1}, "fp16"),
]


@pytest.mark.parametrize("case", DYNAMIC, ids=str)
def test_sizes_known_when_it_runs_alone(case: Case) -> None:
    """Nothing is compiled for a size; empty tensors too, where a division by 0 gives what it gives on a GPU."""
    judge(case, *run(case, case.arrays(), dynamic=True))


@pytest.mark.parametrize("op", UNUSUAL)
@pytest.mark.parametrize("looped", [False, True])
def test_what_is_no_number_stays_in_its_row(op: str, looped: bool) -> None:
    """Rows of NaN, of infinities, of large, tiny and negative zero elements beside usual ones, several of them in one
    program."""
    case, arrays = unusual(op, looped)
    judge(case, *run(case, arrays))


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_an_activation_keeps_a_nan(activation: str) -> None:
    case = Case("ScaleShift", (2, 3, 40), {"axis": 1, "activation": activation}, "fp16")
    arrays = case.arrays()
    arrays[0][1, 2, 5] = np.nan
    _, (y,) = run(case, arrays)
    assert np.argwhere(np.isnan(y)).tolist() == [[1, 2, 5]]


NAN, ONE, HALVES = "0f7FC00000", "0f3F800000", "0x3C007E00"  # HALVES: 1 and NaN in float16


@pytest.mark.parametrize(
    ("instruction", "bits"),
    [
        (f"max.f32 %r1, {NAN}, {ONE}", 0x3F800000),
        (f"min.f32 %r1, {ONE}, {NAN}", 0x3F800000),
        (f"max.f32 %r1, {NAN}, {NAN}", 0x7FC00000),
        (f"max.NaN.f32 %r1, {NAN}, {ONE}", 0x7FC00000),
        (f"min.NaN.f32 %r1, {ONE}, {NAN}", 0x7FC00000),
        (f"max.f16x2 %r1, {HALVES}, 0x00003C00", 0x3C003C00),
        (f"max.NaN.f16x2 %r1, {HALVES}, 0x00003C00", 0x3C007E00),
        ("max.f32 %r1, 0f80000000, 0f00000000", 0),
        ("max.f32 %r1, 0f00000000, 0f80000000", 0),
        ("min.f32 %r1, 0f00000000, 0f80000000", 0x80000000),
        ("min.NaN.f32 %r1, 0f80000000, 0f00000000", 0x80000000),
        ("max.f16x2 %r1, 0x80000000, 0x00008000", 0),
        ("max.s32 %r1, -3, 2", 2),
        ("min.u32 %r1, 3, 4", 3),
    ],
)
def test_min_and_max_drop_a_nan_unless_told(instruction: str, bits: int) -> None:
    """As the PTX ISA says (and +0 above −0): otherwise a kernel that loses NaN on a GPU would keep it here."""
    ptx = f""".visible .entry one(
        .param .u64 one_param_0
)
.reqntid 1
{{
        ld.param.u64 %rd1, [one_param_0];
        {instruction};
        st.global.b32 [ %rd1 + 0 ], {{ %r1 }};
        ret;
}}"""
    made = Buffer(1 << 44, np.zeros(4, np.uint8), np.zeros(4, np.uint8))
    run_ptx(ptx, [made.base], [0], Memory([made]), 0)
    assert int(made.data.view(np.uint32)[0]) == bits


@pytest.mark.parametrize(
    ("shape", "statistics", "apply"),
    [
        (
            (2, 70_000),
            {"axis": -1, "groups": 1},
            Case("LayerNormApply", (2, 70_000), EPS | {"axis": -1}, "fp32", "offset"),
        ),
        *(
            (
                shape,
                {"axis": 1, "groups": 2},
                Case("GroupNormApply", shape, EPS | {"num_groups": 2, "activation": "silu"} | layout, "fp32", "offset"),
            )
            for shape, layout in (((1, 6, 9000), {"channels_last": 0}), ((1, 9000, 6), {"channels_last": 1}))
        ),
    ],
    ids=["rows", "NCHW", "NHWC"],
)
def test_two_launches(shape: tuple[int, ...], statistics: dict[str, int], apply: Case) -> None:
    """64 parts of each row by the first kernel, given to the second: merging them must not round 64 times at the mean's
    size."""
    arrays, last = apply.arrays(), {"channels_last": apply.attributes.get("channels_last", 0)}
    _, (made,) = run(Case("NormStatistics", shape, statistics | last | {"splits": 64}), arrays[:1])
    arrays[1] = made
    judge(apply, *run(apply, arrays))


@pytest.mark.parametrize("op", ["LayerNorm", "LayerNormApply", "NormStatistics"])
def test_a_large_mean_with_lanes_and_parts_of_no_element(op: str) -> None:
    """(mean − 0)² is infinite in float32: what no element has must not bring it in."""
    attributes = {"NormStatistics": {"axis": -1, "groups": 1, "splits": 4, "channels_last": 0}}.get(
        op, ROW_OPS["LayerNorm"][1]
    )
    attributes = {"epsilon": 1e-5, "axis": -1} if op == "LayerNormApply" else attributes
    case = Case(op, (2, 1000), attributes, "fp32", tile=(2, 2048, 4, True) if op == "LayerNorm" else None)
    arrays = [np.full(a.shape, 2.0**66) if i == 0 else a for i, a in enumerate(case.arrays())]
    if op == "LayerNormApply":
        arrays[1] = np.array([[[2.0**66, 0], [0, 0], [0, 0]]] * 2)
    judge(case, *run(case, arrays))


FAR = [
    *(
        Case(op, (2**32 // 4096, *before[1:], 4096), attributes, "fp16")
        for op, (before, attributes) in ROW_OPS.items()
        if op != "InstanceNorm"
    ),
    Case("LayerNorm", (2**27, 32), ROW_OPS["LayerNorm"][1], "fp16"),  # many rows to a program
    Case("LayerNorm", (2**17, 32_768), ROW_OPS["LayerNorm"][1], "fp16"),  # looped
    Case("InstanceNorm", (2**22, 4, 256), EPS, "fp16"),
    Case("ChannelLayerNorm", (2**20, 64, 64), EPS, "fp16"),
    Case("ChannelLayerNorm", (2**15, 2**12, 32), EPS, "fp16"),
    *(
        Case(op, (2**20, 8, 512), EPS | {"num_groups": 2, "channels_last": 0}, "fp16")
        for op in ("GroupNorm", "GroupNormSiLU")
    ),
    *(
        Case(op, (2**20, 8, 512), EPS | {"num_groups": 2, "spatial": spatial} | more, "fp16")
        for op, spatial, more in (
            ("AdaGroupNorm", 1, {}),
            ("AdaGroupNormSiLU", 0, {}),
            ("AdaGroupNormApply", 0, {"activation": "silu"}),
        )
    ),
    Case("GroupNorm", (2**17, 8, 4096), EPS | {"num_groups": 1, "channels_last": 0}, "fp16"),
    Case("GroupNormSiLU", (2**20, 512, 8), EPS | {"num_groups": 2, "channels_last": 1}, "fp16"),
    Case("GroupNormSiLU", (2**17, 4096, 8), EPS | {"num_groups": 1, "channels_last": 1}, "fp16"),
    Case("ScaleShift", (2**18, 4, 4096), {"axis": 1, "activation": "relu"}, "fp16"),
    Case("ScaleShift", (2**24, 256), {"axis": 1, "activation": "silu"}, "fp16"),
    Case("NormStatistics", (2**18, 16_384), {"axis": -1, "groups": 1, "splits": 2, "channels_last": 0}, "fp16"),
    Case("NormStatistics", (2**18, 2048, 8), {"axis": 1, "groups": 2, "splits": 2, "channels_last": 1}, "fp16"),
    *(
        Case(
            "GroupNormApply", (2**18, *s), EPS | {"num_groups": 2, "channels_last": last, "activation": "none"}, "fp16"
        )
        for s, last in (((4, 4096), 0), ((4096, 4), 1))
    ),
]


@pytest.mark.parametrize("case", FAR, ids=str)
def test_offsets_beyond_2_to_the_31(case: Case) -> None:
    assert np.prod(case.shape, dtype=object) >= 2**32
    op = BY_NAME[case.op]
    rows = (
        op.tiles([Tensor(case.shape, case.dtype)], case.attributes)[0].rows
        if case.op in (*ROW_OPS, "ScaleShift")
        else 1
    )
    kept = max(1, rows // (4 if len(case.shape) == 3 and case.op != "ModulatedLayerNorm" else 1))
    judge(Case(case.op, (kept, *case.shape[1:]), case.attributes, case.dtype), *run_last(case, kept))


def test_offsets_are_tried_for_every_op() -> None:
    assert {case.op for case in FAR} == {op.name for op in OPS}


CASE = Case("LayerNorm", (3, 1000), ROW_OPS["LayerNorm"][1], "fp16")


@pytest.mark.parametrize(
    ("pattern", "into", "message"),
    [
        (r"bar\.sync\s+0;", "mov.u32 %r1, %r1;", "before a barrier"),
        (r"(?m)^\t@%p\d+ (ld\.global)", r"\t\1", "outside every buffer"),
        (r"(?m)^\t@%p\d+ (st\.global)", r"\t\1", "with two values"),  # a row's masked lanes are in the next one
        (r"(?m)^\t@%p\d+ st\.global.*$", "", "not written"),
        (r"_param_4\]", "_param_0]", "an input is written"),
        (r"_param_0\]", "_param_4]", "an output is read"),
        (r"\.v4\.b32 (\{[^}]*\}), \[ (%rd\d+) \+ 0", r".v4.b32 \1, [ \2 + 2", "no multiple"),
        (r"(?s)(@%p\d+)( st\.shared.*?\t)bar", r"\1\2\1 bar", "not all threads reach"),
    ],
)
def test_what_is_wrong_in_a_kernel_is_found(pattern: str, into: str, message: str) -> None:
    with pytest.raises(Fault, match=message):
        run(CASE, CASE.arrays(), change=lambda ptx: re.sub(pattern, into, ptx))
