"""What was compiled, run in the emulator: no access beside a buffer, no race, each output byte written, and the reference's numbers."""

from __future__ import annotations

import re

import numpy as np
import pytest
from normdeploy_plugins._aot import CAPABILITIES
from normdeploy_plugins._launch import Tensor
from normdeploy_plugins.ops import BY_NAME, OPS

from .cases import EPS, ROW_OPS, UNIT, Case, allowed, sweep
from .emulated import run, run_last
from .emulator import Fault
from .test_numerics import CASES
from .usual import USUAL, compiled

pytestmark = pytest.mark.usefixtures("cache")


def judge(case: Case, stored: list[np.ndarray], outputs: list[np.ndarray]) -> None:
    """Every element within its bound, a NaN or an infinity where the reference has one."""
    op = BY_NAME[case.op]
    with np.errstate(all="ignore"):
        if "residual" in op.inputs:
            exact = stored[0] + stored[1]
            assert np.allclose(outputs[1], exact, rtol=UNIT[case.dtype], atol=0, equal_nan=True)
            stored = [outputs[1], np.zeros_like(exact), *stored[2:]]
        expected = op.reference(*stored, **case.attributes)
        expected = expected[0] if isinstance(expected, tuple) else expected
        finite = np.isfinite(expected)
        assert np.array_equal(outputs[0][~finite], expected[~finite], equal_nan=True)
        if case.op == "ScaleShift":
            magnitude = op.reference(*map(np.abs, stored), axis=case.attributes["axis"], activation="none")
            bound = (9 * UNIT["fp32"] + UNIT[case.dtype]) * magnitude
        elif case.op == "NormStatistics":
            # of normal data: a mean is off by its sum's roundings, M2 by those of its terms
            bound = np.where(np.arange(2) == 0, 1e-6, 1e-5 * np.abs(expected))
        else:
            bound = allowed(case, stored, expected, case.dtype)
        # no bound: where an RMSNorm divides by infinity
        over = ~(np.abs(outputs[0] - expected) <= np.nan_to_num(bound, nan=0.0)) & finite
    assert not over.any(), f"{over.sum()} of {over.size}, by {np.abs(outputs[0] - expected)[over].max()}"


@pytest.mark.parametrize("case", list({str(case): case for case in (*CASES, *sweep())}.values()), ids=str)
def test_against_reference(case: Case) -> None:
    stored, outputs = run(case, case.arrays())
    if stored[0].size:
        judge(case, stored, outputs)


MORE = [
    *(Case("ScaleShift", s, {"axis": a, "activation": f}, "fp16") for s, a in (((3, 5, 9, 7), 1), ((5, 40), 1)) for f in ("relu", "silu")),
    Case("ScaleShift", (2, 3, 5000), {"axis": 1, "activation": "none"}),
    Case("NormStatistics", (2, 9000), {"axis": -1, "groups": 1, "splits": 4, "channels_last": 0}),
    Case("NormStatistics", (2, 1000), {"axis": -1, "groups": 1, "splits": 4, "channels_last": 0}),  # three of the four parts are empty
    Case("NormStatistics", (2, 12, 33, 31), {"axis": 1, "groups": 4, "splits": 2, "channels_last": 0}, "fp16"),
    Case("NormStatistics", (2, 33, 65, 12), {"axis": 1, "groups": 4, "splits": 2, "channels_last": 1}, "bf16"),
]


@pytest.mark.parametrize("case", MORE, ids=str)
def test_ops_with_bounds_of_their_own(case: Case) -> None:
    judge(case, *run(case, case.arrays()))


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0)], ids=lambda c: f"{c[0]}.{c[1]}")
@pytest.mark.parametrize("name", USUAL)
def test_each_architecture(name: str, capability: tuple[int, int]) -> None:
    """The kernels that test_aot assembles, on a smaller batch: 7.5 has no instructions for bfloat16, 10.0 has some for pairs of float32.

    For the others they are the same (the next test).
    """
    shape, attributes = USUAL[name]
    shape = (1, 3, *shape[2:]) if len(shape) == 3 else (1, *shape[1:])
    splits = {"splits": attributes["splits"]} if "splits" in attributes else {}
    case = Case(name, shape, attributes | splits, "bf16")
    judge(case, *run(case, case.arrays(), capability=capability))


@pytest.mark.parametrize("name", USUAL)
def test_architectures_with_the_same_instructions(name: str) -> None:
    made = {c: re.sub(r"\.target.*", "", compiled(name, *USUAL[name], "bf16", c).ptx) for c in CAPABILITIES}
    assert made[8, 0] == made[8, 6] == made[8, 9]
    assert made[10, 0] == made[12, 0]


@pytest.mark.parametrize("op", [*ROW_OPS, "GroupNorm", "ChannelLayerNorm"])
@pytest.mark.parametrize("looped", [False, True])
def test_what_is_no_number_stays_in_its_row(op: str, looped: bool) -> None:
    """Rows of NaN, of infinities, of large, tiny and negative zero elements beside usual ones, several of them in one program."""
    before, attributes = ROW_OPS.get(op, ((2,), EPS | ({"num_groups": 2, "channels_last": 0} if op == "GroupNorm" else {})))
    shape = {"GroupNorm": (4, 2, 40), "ChannelLayerNorm": (1, 40, 8), "ModulatedLayerNorm": (2, 4, 40)}.get(op, (*before[:-1], 8, 40))
    case = Case(op, shape, attributes, "fp16", tile=(4, 16, 1, True) if looped and op != "LayerNormApply" else None)
    arrays = case.arrays()
    rows = arrays[0].swapaxes(1, 2)[0] if op == "ChannelLayerNorm" else arrays[0].reshape(8, 40)
    rows[1, 5], rows[2, 0], rows[3, 39], rows[4, 7] = np.nan, np.nan, np.inf, -np.inf
    rows[5], rows[6], rows[7] = 65504 * np.sign(rows[5]), 2.0**-24, -0.0
    arrays[1:] = [np.zeros(shape) if name == "residual" else a for name, a in zip(BY_NAME[op].inputs[1:], arrays[1:], strict=True)]
    if "statistics" in BY_NAME[op].inputs:
        with np.errstate(all="ignore"):
            arrays[1] = case._statistics(arrays[0])
    judge(case, *run(case, arrays))


@pytest.mark.parametrize("op", ["LayerNorm", "LayerNormApply", "NormStatistics"])
def test_a_large_mean_with_lanes_and_parts_of_no_element(op: str) -> None:
    """(mean − 0)² is infinite in float32: what no element has must not bring it in."""
    attributes = {"NormStatistics": {"axis": -1, "groups": 1, "splits": 4, "channels_last": 0}}.get(op, ROW_OPS["LayerNorm"][1])
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
    *(Case(op, (2**20, 8, 512), EPS | {"num_groups": 2, "channels_last": 0}, "fp16") for op in ("GroupNorm", "GroupNormSiLU")),
    Case("GroupNorm", (2**17, 8, 4096), EPS | {"num_groups": 1, "channels_last": 0}, "fp16"),
    Case("GroupNormSiLU", (2**20, 512, 8), EPS | {"num_groups": 2, "channels_last": 1}, "fp16"),
    Case("GroupNormSiLU", (2**17, 4096, 8), EPS | {"num_groups": 1, "channels_last": 1}, "fp16"),
    Case("ScaleShift", (2**18, 4, 4096), {"axis": 1, "activation": "relu"}, "fp16"),
    Case("ScaleShift", (2**24, 256), {"axis": 1, "activation": "silu"}, "fp16"),
    Case("NormStatistics", (2**18, 16_384), {"axis": -1, "groups": 1, "splits": 2, "channels_last": 0}, "fp16"),
    Case("NormStatistics", (2**18, 2048, 8), {"axis": 1, "groups": 2, "splits": 2, "channels_last": 1}, "fp16"),
    *(
        Case("GroupNormApply", (2**18, *s), EPS | {"num_groups": 2, "channels_last": last, "activation": "none"}, "fp16")
        for s, last in (((4, 4096), 0), ((4096, 4), 1))
    ),
]


@pytest.mark.parametrize("case", FAR, ids=str)
def test_offsets_beyond_2_to_the_31(case: Case) -> None:
    assert np.prod(case.shape, dtype=object) >= 2**32
    op = BY_NAME[case.op]
    rows = op.tiles([Tensor(case.shape, case.dtype)], case.attributes)[0].rows if case.op in (*ROW_OPS, "ScaleShift") else 1
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
