"""TensorRT's format HWC8, which convolutions of half precision have: where it is offered, another op or another layout
computes the same over its memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from normdeploy_plugins._launch import Tensor, in_channels_last
from normdeploy_plugins.ops import BY_NAME, OPS

from .cases import EPS, Case
from .emulated import Unknown

OFFERED: dict[str, dict[str, Any]] = {
    "GroupNorm": EPS | {"num_groups": 4, "channels_last": 0},
    "GroupNormSiLU": EPS | {"num_groups": 2, "channels_last": 0},
    "ScaleShift": {"axis": 1, "activation": "silu"},
    "ChannelLayerNorm": EPS,
}
# NormStatistics and GroupNormApply split a row by elements or by positions: TensorRT would choose for each by itself.
# InstanceNorm has no kernel there.
ALONE = {op.name for op in OPS} - set(OFFERED)


@pytest.mark.parametrize("name", OFFERED)
def test_it_computes_the_same(name: str) -> None:
    case = Case(name, (2, 16, 5, 7), OFFERED[name])
    x, *rest = case.arrays()
    last = in_channels_last(BY_NAME[name], [Tensor(a.shape, "fp16") for a in (x, *rest)], case.attributes)
    assert last is not None
    op, (moved, *_), attributes = last
    assert moved == Tensor((2, 5, 7, 16), "fp16")
    expected = np.moveaxis(BY_NAME[name].reference(x, *rest, **case.attributes), 1, -1)
    # in float64 both add the same numbers, in another order
    assert np.allclose(op.reference(np.moveaxis(x, 1, -1), *rest, **attributes), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OFFERED)
@pytest.mark.parametrize(
    "shape", [(2, 12, 5, 7), (2, 16, 35), (2, 16, 5, 7, 3), (2, Unknown(), 5, 7)], ids=["padded", "3", "5", "dynamic"]
)
def test_padded_channels_and_other_ranks_are_not_taken(name: str, shape: tuple[Any, ...]) -> None:
    channels = [Tensor(shape[1:2], "fp16")] * 2
    assert in_channels_last(BY_NAME[name], [Tensor(shape, "fp16"), *channels], OFFERED[name]) is None


@pytest.mark.parametrize("name", sorted(ALONE))
def test_the_other_ops_take_memory_in_order_alone(name: str) -> None:
    inputs = [Tensor((2, 16, 5, 7), "fp16")] * len(BY_NAME[name].inputs)
    assert in_channels_last(BY_NAME[name], inputs, {"axis": 1, "channels_last": 0}) is None


def test_what_lies_channels_last_already_is_not_turned_again() -> None:
    for name in ("GroupNorm", "GroupNormSiLU"):
        inputs = [Tensor((2, 8, 8, 16), "fp16")] + [Tensor((16,), "fp16")] * 2
        assert in_channels_last(BY_NAME[name], inputs, OFFERED[name] | {"channels_last": 1}) is None
    inputs = [Tensor((2, 16, 8, 8), "fp16")] + [Tensor((8,), "fp16")] * 2
    assert in_channels_last(BY_NAME["ScaleShift"], inputs, {"axis": -1, "activation": "none"}) is None
