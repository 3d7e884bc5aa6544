"""Every kernel, run by Triton's interpreter, against its float64 reference; every element within a bound
(``input_cases.allowed``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from normdeploy_plugins.ops import BY_NAME, OPS

from . import interpreted
from .cases import UNIT, Case, allowed, judge_quantized

EPS = {"epsilon": 1e-5}
LN, APPLY = EPS | {"axis": -1, "ddof": 0}, EPS | {"axis": -1}
RMS, ADD_RMS = EPS | {"axis": -1, "offset": 0.0}, EPS | {"offset": 0.0}
NCHW, NHWC = {"channels_last": 0}, {"channels_last": 1}

# 1: one element; 7: below every vector; 1000: vectors but no power of 2; 1001: no vectors; 4096: a power of 2; 65,536
# and 200,000: looped
ROWS = (1, 7, 1000, 1001, 4096, 65_536)
CASES = [
    Case("LayerNorm", (3, n), LN, dtype, data)
    for n in ROWS
    for dtype, data in (("fp32", "offset"), ("fp16", "normal"), ("bf16", "normal"))
]
CASES += [
    Case(op, (2, n), a, "fp32", "offset")
    for n in (*ROWS, 200_000)
    for op, a in (("RMSNorm", RMS), ("AddRMSNorm", ADD_RMS), ("AddLayerNorm", EPS))
]
CASES += [
    Case(op, (9, 768), a, dtype)
    for op, a in (("RMSNorm", RMS | {"offset": 1.0}), ("AddRMSNorm", EPS | {"offset": 1.0}))
    for dtype in ("fp16", "bf16")
]
CASES += [
    # looped at sizes that are no multiple of a block; the last block is short, or only the first lanes see it
    Case("LayerNorm", (5, 1001), LN, "fp32", "offset", tile=(4, 128, 4, True)),
    Case("LayerNorm", (2, 200_000), LN, "fp32", "offset"),
    Case("LayerNorm", (3, 20_000), LN, "fp16", "constant"),
    Case("LayerNorm", (17, 64), LN, "fp32", "constant"),
    Case("LayerNorm", (3, 4096), LN, "fp32", "outlier"),
    Case("LayerNorm", (3, 20_000), LN, "fp32", "outlier"),
    Case("LayerNorm", (0, 64), LN, "fp16"),
    Case("LayerNorm", (33, 257), {"epsilon": 1e-12, "axis": -1, "ddof": 0}, "fp16", parameters="fp32"),
    Case("LayerNorm", (2, 3, 4, 50), EPS | {"axis": 1, "ddof": 1}, "bf16", parameters="fp32"),
    Case("RMSNorm", (0, 5, 64), RMS),
    Case("RMSNorm", (3, 1), RMS, "fp16"),
    Case("RMSNorm", (2, 3, 50), EPS | {"axis": 1, "offset": 0.0}),
    Case("StdNorm", (2, 3, 50), {"epsilon": 1e-6, "axis": 1, "ddof": 1}),
    Case("LayerNorm", (4, 7), LN | {"ddof": 1}),
    Case("LayerNorm", (2, 20_000), LN | {"ddof": 1}, "fp16"),
    Case("AddLayerNorm", (2, 5, 768), EPS, "fp16"),
    Case("AddLayerNorm", (2, 5, 300), EPS, "bf16", parameters="fp32"),
    Case("AddLayerNorm", (3, 4096), EPS, "fp32", "constant"),
    Case("ModulatedLayerNorm", (3, 5, 1000), EPS, "fp16"),
    Case("ModulatedLayerNorm", (3, 5, 1152), EPS, "fp32", "offset"),
    Case("ModulatedLayerNorm", (2, 3, 20_000), EPS, "bf16"),
    Case("ModulatedLayerNorm", (2, 0, 64), EPS, "fp16"),
    Case("GatedRMSNorm", (3, 5, 1000), EPS, "fp16"),
    Case("GatedRMSNorm", (3, 5, 128), EPS, "bf16", parameters="fp32"),
    Case("GatedRMSNorm", (5, 1001), EPS, "fp32", "offset", tile=(4, 128, 4, True)),
    Case("GatedRMSNorm", (2, 20_000), EPS, "bf16"),
    Case("GatedRMSNorm", (2, 0, 64), EPS, "fp16"),
    Case("SigmoidGatedRMSNorm", (3, 5, 1000), EPS, "fp16"),
    Case("SigmoidGatedRMSNorm", (5, 1001), EPS, "fp32", "offset", tile=(4, 128, 4, True)),
    *(
        Case(op, shape, EPS | {"num_groups": groups, "spatial": spatial} | more, dtype, data)
        for op, more in (
            ("AdaGroupNorm", {}),
            ("AdaGroupNormSiLU", {}),
            ("AdaGroupNormApply", {"activation": "silu"}),
        )
        for shape, groups, spatial, dtype, data in (
            ((2, 20, 7, 7), 2, 0, "fp16", "normal"),
            ((2, 6, 8, 8), 6, 1, "fp32", "offset"),
            ((1, 20, 40, 40), 1, 0, "fp32", "offset"),
            ((1, 20, 40, 40), 1, 1, "bf16", "normal"),
            ((2, 6, 5), 3, 0, "fp16", "constant"),
        )
    ),
    Case("AdaGroupNorm", (2, 12, 9, 9), EPS | {"num_groups": 2, "spatial": 0}, "bf16", tile=(4, 32, 4, True)),
    Case("AdaGroupNorm", (2, 12, 9, 9), EPS | {"num_groups": 2, "spatial": 1}, "fp32", tile=(4, 32, 4, True)),
    *(
        Case("StdNorm", (5, n), {"epsilon": 1e-6, "axis": -1, "ddof": ddof}, "fp32")
        for n in (2, 7, 512, 20_000)
        for ddof in (0, 1)
    ),
    Case("StdNorm", (5, 512), {"epsilon": 1e-6, "axis": -1, "ddof": 1}, "fp16", "constant"),
    *(
        Case("ChannelLayerNorm", shape, EPS, dtype)
        for shape in ((2, 96, 14, 14), (1, 768, 7, 7), (2, 5, 3))
        for dtype in ("fp32", "fp16")
    ),
    Case("ChannelLayerNorm", (2, 300, 5, 5), EPS, "fp32", "offset", tile=(64, 16, 4, True)),
    Case("ChannelLayerNorm", (2, 64, 5, 5), EPS, "bf16", "constant"),
    Case("ChannelLayerNorm", (1, 20_000, 9), EPS, "fp32", "offset"),
    Case("ChannelLayerNorm", (2, 8, 0), EPS),
    *(
        Case("InstanceNorm", shape, EPS, dtype)
        for shape in ((2, 3, 28, 28), (2, 5, 7), (1, 3, 4, 5, 6))
        for dtype in ("fp32", "fp16")
    ),
    Case("InstanceNorm", (1, 2, 160, 160), EPS, "fp32", "offset"),
    Case("InstanceNorm", (2, 3, 1), EPS, "bf16"),
    *(
        Case(op, shape, EPS | {"num_groups": groups} | layout, dtype, data)
        for op in ("GroupNorm", "GroupNormSiLU")
        for shape, groups, layout in (
            ((2, 20, 7, 7), 2, NCHW),
            ((2, 7, 7, 20), 2, NHWC),
            ((1, 12, 8), 12, NCHW),
            ((2, 8, 12), 1, NHWC),
            ((1, 20, 40, 40), 1, NCHW),
            ((1, 40, 40, 20), 1, NHWC),
        )
        for dtype, data in (("fp32", "offset"), ("fp16", "normal"))
    ),
    Case("GroupNormSiLU", (2, 12, 9, 9), EPS | {"num_groups": 2} | NCHW, "bf16", tile=(4, 32, 4, True)),
    Case("GroupNormSiLU", (2, 9, 9, 12), EPS | {"num_groups": 2} | NHWC, "bf16", tile=(16, 8, 4, True)),
    # small images whose groups are rows, in registers, several to a program, and looped
    Case("GroupNormSiLU", (3, 16, 7, 7), EPS | {"num_groups": 2} | NCHW, "fp16"),
    Case("GroupNorm", (1, 8, 5, 5), EPS | {"num_groups": 2} | NCHW, "fp32", "offset"),
    Case("GroupNorm", (1, 1024, 7, 7), EPS | {"num_groups": 2} | NCHW, "bf16"),
    # several groups to a program; in the third the last program has fewer
    Case("GroupNormSiLU", (2, 7, 9, 320), EPS | {"num_groups": 32} | NHWC, "fp16", tile=(64, 64, 4, False, 4)),
    Case("GroupNormSiLU", (1, 11, 9, 40), EPS | {"num_groups": 4} | NHWC, "fp32", "offset", tile=(8, 32, 2, True, 2)),
    Case("GroupNorm", (2, 11, 9, 120), EPS | {"num_groups": 12} | NHWC, "bf16", tile=(8, 128, 4, True, 8)),
    Case("GroupNorm", (2, 5, 9, 40), EPS | {"num_groups": 4} | NHWC, "fp16", "constant", tile=(16, 64, 4, True, 4)),
    Case("GroupNorm", (2, 20, 40, 40), EPS | {"num_groups": 1} | NCHW, "fp16", "constant"),
    Case("GroupNorm", (0, 8, 3, 3), EPS | {"num_groups": 2} | NCHW),
    Case("LayerNormApply", (2, 5000), APPLY, "fp32", "offset"),
    Case("LayerNormApply", (2, 5000), APPLY, "fp16", "constant"),
    *(
        Case(op, (3, n), a | {"to": to}, dtype, parameters=parameters)
        for op, a in (("LayerNormQuantize", APPLY), ("RMSNormQuantize", APPLY))
        for n, dtype, parameters in ((768, "fp16", "fp32"), (1001, "fp32", ""), (20_000, "bf16", ""))
        for to in ("int8", "fp8")
    ),
    *(
        Case(op, (2, 3, n), EPS | {"to": to}, dtype)
        for op in ("AddLayerNormQuantize", "AddRMSNormQuantize")
        for n, dtype in ((1000, "fp16"), (7, "bf16"), (20_000, "fp32"))
        for to in ("int8", "fp8")
    ),
    *(
        Case(op, (3, n), a | {"least": 1e-5, "to": to}, dtype)
        for op, a in (
            ("LayerNormDynamicQuantize", APPLY),
            ("RMSNormDynamicQuantize", APPLY),
            ("AddLayerNormDynamicQuantize", EPS),
            ("AddRMSNormDynamicQuantize", EPS),
        )
        for n, dtype in ((768, "fp16"), (1001, "fp32"), (20_000, "bf16"))
        for to in ("int8", "fp8")
    ),
    Case("LayerNormDynamicQuantize", (2, 3, 4, 50), EPS | {"axis": 2, "least": 0.0, "to": "int8"}, "fp16"),
    Case("LayerNormQuantize", (2, 3, 50), EPS | {"axis": 1, "to": "int8"}, "fp16", "offset"),
    Case("RMSNormQuantize", (0, 64), APPLY | {"to": "int8"}, "fp16"),
    *(
        Case("GroupNormApply", s, EPS | {"num_groups": 2, "activation": a} | c, d)
        for s, c in (((2, 12, 30, 30), NCHW), ((2, 30, 30, 12), NHWC))
        for a, d in (("none", "fp32"), ("silu", "fp16"))
    ),
    # more channels than a block of 1024
    Case("GroupNormApply", (1, 2, 3, 1040), EPS | {"num_groups": 2, "activation": "relu"} | NHWC, "fp32"),
]


def run(interpreter: Callable[..., Any], case: Case) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """What the reference was given, the kernel's outputs, and the reference's.

    Where an op adds first, y is judged as the norm of the sum that the kernel stored, and the sum is judged by itself.
    """
    arrays = case.arrays()
    stored, outputs = interpreter(interpreted.run, case.op, arrays, case.dtypes(), case.attributes, 0, case.tile)
    if "residual" in BY_NAME[case.op].inputs:
        exact, total = stored[0] + stored[1], outputs[BY_NAME[case.op].outputs.index("sum")]
        assert (np.abs(total - exact) <= store_ulps(case) * UNIT[case.dtype] * np.abs(exact)).all()
        stored = [total, np.zeros_like(exact), *stored[2:]]
    expected = BY_NAME[case.op].reference(*stored, **case.attributes)
    return stored, outputs, list(expected) if isinstance(expected, tuple) else [expected]


def store_ulps(case: Case) -> float:
    """The interpreter truncates to bfloat16 where hardware rounds."""
    return 2.0 if case.dtype == "bf16" else 1.0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_reference(interpreter: Callable[..., Any], case: Case) -> None:
    stored, outputs, expected = run(interpreter, case)
    if "Q" in BY_NAME[case.op].types:
        judge_quantized(case, stored, outputs, store_ulps=store_ulps(case))
    elif expected[0].size:
        bound = allowed(case, stored, expected[0], case.dtype, store_ulps(case))
        excess = np.abs(outputs[0] - expected[0]) / bound
        assert excess.max() <= 1, f"{excess.max():.2f} of the bound, error {np.abs(outputs[0] - expected[0]).max():.3g}"


@pytest.mark.parametrize("case", [c for c in CASES if c.data == "constant" and c.op != "AddLayerNorm"], ids=str)
def test_constant_rows_give_beta_exactly(interpreter: Callable[..., Any], case: Case) -> None:
    _, outputs, expected = run(interpreter, case)
    beta = np.broadcast_to(expected[0], outputs[0].shape)
    assert (np.abs(outputs[0] - beta) <= 2 * UNIT[case.dtype] * np.abs(beta)).all()


@pytest.mark.parametrize("op", ["LayerNorm", "StdNorm"])
def test_one_element_and_ddof_1_is_not_a_number(interpreter: Callable[..., Any], op: str) -> None:
    _, outputs, expected = run(interpreter, Case(op, (3, 1), {"epsilon": 1e-6, "axis": -1, "ddof": 1}))
    assert np.isnan(outputs[0]).all()
    assert np.isnan(expected[0]).all()


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize(
    ("shape", "axis"), [((3, 5, 40, 41), 1), ((7, 1000), 1), ((2, 9, 3), -1), ((0, 4, 4), 1), ((2, 3, 70_000), 1)]
)
def test_scale_and_shift(interpreter: Callable[..., Any], shape: tuple[int, ...], axis: int, activation: str) -> None:
    case = Case("ScaleShift", shape, {"axis": axis, "activation": activation})
    (x, scale, shift), outputs, expected = run(interpreter, case)
    magnitude = BY_NAME["ScaleShift"].reference(np.abs(x), np.abs(scale), np.abs(shift), axis=axis, activation="none")
    assert (np.abs(outputs[0] - expected[0]) <= 8 * 2.0**-24 * magnitude).all()


@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        ((3, 5000), {"axis": -1, "groups": 1, "splits": 4}),
        ((2, 1000), {"axis": -1, "groups": 1, "splits": 4}),  # three of the four parts are empty
        ((2, 12, 30, 30), {"axis": 1, "groups": 4, "splits": 2}),
        ((2, 40, 60, 12), {"axis": 1, "groups": 4, "splits": 2, "channels_last": 1}),
    ],
)
def test_statistics(interpreter: Callable[..., Any], shape: tuple[int, ...], attributes: dict[str, Any]) -> None:
    case = Case("NormStatistics", shape, {"channels_last": 0} | attributes, data="offset")
    _, outputs, expected = run(interpreter, case)
    mean, m2 = outputs[0][..., 0], outputs[0][..., 1]
    assert (np.abs(mean - expected[0][..., 0]) <= 4 * 2.0**-24 * 1e4).all()
    # M2 of ± 1: a mean that is off by δ adds n·δ², which is far below the rounding of the n squares of numbers off by
    # u·1e4
    assert (np.abs(m2 - expected[0][..., 1]) <= 1e-3 * expected[0][..., 1]).all()


def test_a_write_outside_is_found(interpreter: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError, match="outside its output"):
        interpreter(interpreted.write_outside)


def test_every_op_is_tried() -> None:
    tried = {case.op for case in CASES} | {"ScaleShift", "NormStatistics"}
    assert tried == {op.name for op in OPS}
