"""What is said of each kernel for the field is the kernel's own float64 reference, with every attribute."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from normdeploy_plugins._quantize import by_row, quantized
from normdeploy_plugins.ops import BY_NAME

from normdeploy.proof.plugin_definitions import TABLE
from normdeploy.proof.proof_errors import NotProved, ProofFailure

from .floats import evaluated

EPSILONS = {"epsilon": (1e-5, 0.25)}
X, ROW = (2, 3, 8), (8,)
IMAGE, SAMPLES = (2, 4, 3, 4), (2, 4, 1, 1)
LAST = {"channels_last": (0, 1)}
ACTIVATIONS = ("none", "relu", "silu")
# name -> (shapes of the inputs, the values of each attribute); gamma and beta may have any shape
CASES: dict[str, tuple[list[tuple[int, ...]], dict[str, tuple[Any, ...]]]] = {
    "LayerNorm": ([X, (3, 8), (24,)], {"axis": (-2,), "ddof": (0, 1)} | EPSILONS),
    "RMSNorm": ([X, ROW], {"axis": (-1,), "offset": (0.0, 1.0)} | EPSILONS),
    "AddLayerNorm": ([X, X, ROW, ROW], EPSILONS),
    "AddRMSNorm": ([X, X, ROW], {"offset": (0.0, 1.0)} | EPSILONS),
    "ModulatedLayerNorm": ([X, (2, 1, 8), (2, 1, 8)], EPSILONS),
    "GatedRMSNorm": ([X, ROW, X], EPSILONS),
    "SigmoidGatedRMSNorm": ([X, ROW, X], EPSILONS),
    "StdNorm": ([X, ROW, (1, 1, 8)], {"axis": (-1,), "ddof": (0, 1)} | EPSILONS),
    "ChannelLayerNorm": ([(2, 4, 3, 5), (4,), (4, 1, 1)], EPSILONS),
    "InstanceNorm": ([(2, 4, 3, 5), (4,), (4, 1, 1)], EPSILONS),
    "GroupNorm": ([(2, 4, 3, 4), (4,), (4,)], {"num_groups": (1, 2, 4)} | LAST | EPSILONS),
    "GroupNormSiLU": ([(2, 4, 3, 4), (4,), (4,)], {"num_groups": (1, 2)} | LAST | EPSILONS),
    "AdaGroupNorm": ([IMAGE, SAMPLES, SAMPLES], {"num_groups": (1, 2, 4), "spatial": (0,)} | EPSILONS),
    "AdaGroupNormSiLU": ([IMAGE, IMAGE, IMAGE], {"num_groups": (2,), "spatial": (1,)} | EPSILONS),
    "AdaGroupNormApply": (
        [IMAGE, (0,), SAMPLES, SAMPLES],
        {"num_groups": (2,), "spatial": (0,), "activation": ("none", "silu")} | EPSILONS,
    ),
    "ScaleShift": ([(2, 4, 3, 4), (4,), (4, 1, 1)], {"axis": (1, -3, -1), "activation": ACTIVATIONS}),
    "LayerNormQuantize": ([X, (3, 8), (24,), (1,)], {"axis": (-2,), "to": ("int8", "fp8")} | EPSILONS),
    "RMSNormQuantize": ([X, ROW, (1,)], {"axis": (-1,), "to": ("int8", "fp8")} | EPSILONS),
    "AddLayerNormQuantize": ([X, X, ROW, ROW, (1,)], {"to": ("int8", "fp8")} | EPSILONS),
    "AddRMSNormQuantize": ([X, X, ROW, (1,)], {"to": ("int8", "fp8")} | EPSILONS),
    **{
        name: (shapes, {"to": ("int8", "fp8"), "least": (0.0, 0.5)} | axis | EPSILONS)
        for name, shapes, axis in (
            ("LayerNormDynamicQuantize", [X, ROW, ROW], {"axis": (-1,)}),
            ("RMSNormDynamicQuantize", [X, ROW], {"axis": (-1,)}),
            ("AddLayerNormDynamicQuantize", [X, X, ROW, ROW], {}),
            ("AddRMSNormDynamicQuantize", [X, X, ROW], {}),
        )
    },
    "LayerNormApply": ([X, (0,), ROW, ROW], {"axis": (-1,)} | EPSILONS),
    "GroupNormApply": (
        [(2, 4, 3, 4), (0,), (4,), (4,)],
        {"num_groups": (2,), "activation": ("none", "silu")} | LAST | EPSILONS,
    ),
}


def test_every_kernel_has_a_meaning_and_every_attribute_is_tried() -> None:
    assert set(TABLE) == set(BY_NAME)
    assert set(CASES) == set(BY_NAME) - {"NormStatistics"}
    for name, (_, attributes) in CASES.items():
        assert set(attributes) == set(BY_NAME[name].attributes)


@pytest.mark.parametrize("name", CASES)
def test_the_meaning_is_the_reference(name: str) -> None:
    """In float64 at normal inputs, so that they differ by roundings of numbers around 1 alone."""
    shapes, attributes = CASES[name]
    for values in itertools.product(*attributes.values()):
        attrs = dict(zip(attributes, values, strict=True))
        rng = np.random.default_rng(4)
        arrays = [rng.standard_normal(s) for s in shapes]
        expected = BY_NAME[name].reference(*arrays, **attrs)

        held = BY_NAME[name].encoded(attrs)

        def definition(m: Any, leaves: list[Any], attrs: dict[str, Any] = held) -> Any:
            if not name.endswith("Apply"):
                return TABLE[name](m, leaves, attrs)
            groups = {"axis": 1, "groups": attrs.get("num_groups", 1), "channels_last": attrs.get("channels_last", 0)}
            (statistics,) = TABLE["NormStatistics"](
                m, leaves[:1], {**groups, **({"axis": -1} if "axis" in attrs else {})}
            )
            return TABLE[name](m, [leaves[0], statistics, *leaves[1:]], attrs)

        found = evaluated(definition, [a for a in arrays if a.size])
        if "least" in attrs:  # the meaning goes on with the norm, and stands for the scale by that
            found[:2] = by_row(np.asarray(found[0]), -1, attrs["least"], attrs["to"])
        for i, (got, ref) in enumerate(
            zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True)
        ):
            assert got is not None
            if i == 0 and "to" in attrs and "least" not in attrs:  # the meaning goes on with the quotient
                got = quantized(np.asarray(got), np.ones(()), attrs["to"])
            np.testing.assert_allclose(got, ref, rtol=1e-12, atol=1e-12, err_msg=str(attrs))


@pytest.mark.parametrize(("shape", "spatial"), [(SAMPLES, 1), (IMAGE, 0)])
def test_a_scale_of_another_shape_than_the_kernel_reads_is_refused(shape: tuple[int, ...], spatial: int) -> None:
    attrs = BY_NAME["AdaGroupNorm"].encoded({"num_groups": 2, "spatial": spatial, "epsilon": 1e-5})
    rng = np.random.default_rng(4)
    with pytest.raises(NotProved) as error:
        evaluated(
            lambda m, leaves: TABLE["AdaGroupNorm"](m, leaves, attrs),
            [rng.standard_normal(IMAGE), rng.standard_normal(shape), rng.standard_normal(shape)],
        )
    assert error.value.why is ProofFailure.DIFFERS


# of what the statistics are taken: the input itself (0) or another tensor of its shape (1), and how
OTHERS = {
    "of another tensor": (1, {"axis": 1, "groups": 2, "channels_last": 0}),
    "in other groups": (0, {"axis": 1, "groups": 4, "channels_last": 0}),
    "along another axis": (0, {"axis": 2, "groups": 2, "channels_last": 0}),
    "of another layout": (0, {"axis": 1, "groups": 2, "channels_last": 1}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_statistics_are_refused(name: str) -> None:
    place, how = OTHERS[name]
    attrs = BY_NAME["GroupNormApply"].encoded(
        {"num_groups": 2, "activation": "none", "channels_last": 0, "epsilon": 1e-5}
    )

    def definition(m: Any, leaves: list[Any]) -> Any:
        (statistics,) = TABLE["NormStatistics"](m, [leaves[place]], how)
        return TABLE["GroupNormApply"](m, [leaves[0], statistics, *leaves[2:]], attrs)

    rng = np.random.default_rng(4)
    with pytest.raises(NotProved) as error:
        evaluated(definition, [rng.standard_normal(shape) for shape in ((2, 4, 3, 4), (2, 4, 3, 4), (4,), (4,))])
    assert error.value.why is ProofFailure.DIFFERS
