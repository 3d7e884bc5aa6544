"""A plugin takes the place of the function body of the same name: both have to say the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from normdeploy_plugins._quantize import LARGEST
from normdeploy_plugins.ops import BY_NAME

from normdeploy.evaluate import evaluator
from normdeploy.graphs import own_op_functions
from tests.norms.norm_formulas import norm_by_formula

rng = np.random.default_rng(0)


def body(name: str, inputs: list[np.ndarray], attributes: dict[str, Any], outputs: int = 1) -> list[np.ndarray]:
    """What the function's nodes give in float64."""
    return [
        np.asarray(y)
        for y in evaluator.evaluate_node(
            name, inputs, attributes | {"stash_type": 1}, opset=18, domain=own_op_functions.DOMAIN, outputs=outputs
        )
    ]


def agree(made: Any, expected: list[np.ndarray]) -> None:
    made = list(made) if isinstance(made, tuple) else [made]
    assert len(made) == len(expected)
    for ours, theirs in zip(made, expected, strict=True):
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).max() <= 1e-13 * np.abs(theirs).max()


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "StdNorm"])
@pytest.mark.parametrize("axes", [(-1,), (-2, -1)])
@pytest.mark.parametrize("ddof", [0, 1])
def test_norms_over_axes(name: str, axes: tuple[int, ...], ddof: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 5, 7)) * 3 + 2
    op, row = BY_NAME[name], x.shape[min(axes) :]
    parameters = [rng.standard_normal(row) for _ in op.inputs[1:]]
    degrees = {"ddof": ddof} if "ddof" in op.attributes else {}
    plugin = op.reference(x, *parameters, epsilon=1e-2, axis=min(axes), **(degrees or {"offset": 0.0}))
    agree(plugin, body(name, [x, *parameters], {"epsilon": 1e-2, "axes": list(axes)} | degrees))
    agree(plugin, [norm_by_formula(name, x, *parameters, axes=axes, epsilon=1e-2, **degrees)])


VECTOR = lambda: rng.standard_normal(6)  # noqa: E731
ROWS = lambda: rng.standard_normal((2, 4, 6)) * 3 + 2  # noqa: E731
IMAGE = lambda: rng.standard_normal((2, 6, 4, 5)) * 3 + 2  # noqa: E731
SAMPLES = lambda: rng.standard_normal((2, 1, 6))  # noqa: E731
CHANNELS = lambda: rng.standard_normal((2, 6, 1, 1))  # noqa: E731
# op -> how its inputs are made, and attributes of the plugin beside those of the function
OTHERS: dict[str, tuple[list[Callable[[], np.ndarray]], dict[str, Any], dict[str, Any]]] = {
    "AddLayerNorm": ([ROWS, ROWS, VECTOR, VECTOR], {}, {}),
    "AddRMSNorm": ([ROWS, ROWS, VECTOR], {}, {"offset": 0.0}),
    "ModulatedLayerNorm": ([ROWS, SAMPLES, SAMPLES], {}, {}),
    "GatedRMSNorm": ([ROWS, VECTOR, ROWS], {}, {}),
    "SigmoidGatedRMSNorm": ([ROWS, VECTOR, ROWS], {}, {}),
    "ChannelLayerNorm": ([IMAGE, VECTOR, VECTOR], {}, {}),
    "AdaGroupNorm": ([IMAGE, CHANNELS, CHANNELS], {"num_groups": 3}, {"spatial": 0}),
    "AdaGroupNormSiLU": ([IMAGE, IMAGE, IMAGE], {"num_groups": 6}, {"spatial": 1}),
    "GroupNorm": ([IMAGE, VECTOR, VECTOR], {"num_groups": 3}, {"channels_last": 0}),
    "GroupNormSiLU": ([IMAGE, VECTOR, VECTOR], {"num_groups": 3}, {"channels_last": 0}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_norms_joined_with_neighbours(name: str) -> None:
    made, shared, own = OTHERS[name]
    inputs, op = [make() for make in made], BY_NAME[name]
    expected = body(name, inputs, {"epsilon": 1e-2} | shared, len(op.outputs))
    agree(op.reference(*inputs, epsilon=1e-2, **shared, **own), expected)


# the norm that is quantized; its own body is compared above, or is one standard node
QUANTIZED: dict[str, tuple[list[Callable[[], np.ndarray]], dict[str, Any]]] = {
    "LayerNormQuantize": ([ROWS, VECTOR, VECTOR], {"axis": -1}),
    "RMSNormQuantize": ([ROWS, VECTOR], {"axes": [-1]}),
    "AddLayerNormQuantize": ([ROWS, ROWS, VECTOR, VECTOR], {}),
    "AddRMSNormQuantize": ([ROWS, ROWS, VECTOR], {}),
    "LayerNormDynamicQuantize": ([ROWS, VECTOR, VECTOR], {"least": 1e-5}),
    "RMSNormDynamicQuantize": ([ROWS, VECTOR], {"least": 1e-5}),
    "AddLayerNormDynamicQuantize": ([ROWS, ROWS, VECTOR, VECTOR], {"least": 1e-5}),
    "AddRMSNormDynamicQuantize": ([ROWS, ROWS, VECTOR], {"least": 1e-5}),
}


@pytest.mark.parametrize("to", ["int8", "fp8"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_norms_that_are_quantized(name: str, to: str) -> None:
    """The body as onnxruntime runs it in float32, over scales that leave no quotient near a tie."""
    made, shared = QUANTIZED[name]
    op, opset = BY_NAME[name], 21
    for _ in range(3):
        inputs = [make().astype(np.float32) for make in made]
        own = {name: {"axis": -1, "least": 1e-5}[name] for name in op.attributes if name in ("axis", "least")}
        scale, by_row = [np.float64(0.03125)], "least" in own
        expected = op.reference(*inputs, *scale[by_row:], epsilon=1e-2, to=to, **own)
        kind = onnx.TensorProto.INT8 if to == "int8" else onnx.TensorProto.FLOAT8E4M3FN
        given = [f"i{i}" for i in range(len(inputs))]
        attributes = shared | ({"largest": LARGEST[to]} if by_row else {})
        node = onnx.helper.make_node(
            name,
            [*given, *["s"][by_row:], "z"],
            op.outputs,
            domain=own_op_functions.DOMAIN,
            epsilon=1e-2,
            stash_type=1,
            **attributes,
        )
        graph = onnx.helper.make_graph(
            [node],
            "g",
            [onnx.helper.make_tensor_value_info(n, 1, a.shape) for n, a in zip(given, inputs, strict=True)],
            [onnx.helper.make_tensor_value_info(n, kind if n == "y" else 1, None) for n in op.outputs],
            [onnx.helper.make_tensor("s", 1, [], [0.03125]), onnx.helper.make_tensor("z", kind, [], [0])],
        )
        imports = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid(own_op_functions.DOMAIN, 1)]
        model = onnx.helper.make_model(
            graph, opset_imports=imports, ir_version=10, functions=[own_op_functions.own_op_body(name, opset)]
        )
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        q, *total = session.run(None, dict(zip(given, inputs, strict=True)))
        q = (q if to == "int8" else q.view(ml_dtypes.float8_e4m3fn)).astype(np.float64)
        expected = expected if isinstance(expected, tuple) else (expected,)
        # float32's error of a quotient below 128 is under 1e-4: of 144 one may lie that near to a tie, and be off by
        # one step, an eighth of what an E4M3 is at most
        off = np.abs(q - expected[0]) > (0 if to == "int8" else 1e-12)
        assert off.sum() <= 1
        assert (np.abs(q - expected[0])[off] <= (1 if to == "int8" else np.abs(q[off]) / 7)).all()
        for ours, theirs in zip(total, expected[1:], strict=True):
            assert np.abs(ours - theirs).max() <= 1e-6 * np.abs(theirs).max()


def test_every_function_is_compared() -> None:
    assert {
        "LayerNorm",
        "RMSNorm",
        "StdNorm",
        *OTHERS,
        *QUANTIZED,
    } == own_op_functions.OPS - own_op_functions.WITHOUT_KERNEL
    assert not own_op_functions.WITHOUT_KERNEL & set(BY_NAME)


def test_a_function_without_a_kernel_is_its_formula(rng: np.random.Generator) -> None:
    x, scale = rng.standard_normal((3, 5, 7)) * np.array([1.0, 1e-3, 0.0])[:, None, None], rng.standard_normal((5, 1))
    expected = norm_by_formula("L2Norm", x, scale, axes=(-2,), epsilon=1e-2)
    agree(expected, body("L2Norm", [x, scale], {"epsilon": 1e-2, "axes": [-2]}))
