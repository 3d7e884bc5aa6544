"""The definitions of the standard's norms, evaluated in float64, are what onnx's own function bodies and its reference
evaluator compute in float32, and what torch computes in float64."""

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from normdeploy.evaluate import evaluator
from normdeploy.norms.norm_table import ROWS, NormOp, OpOwner

X, CHANNELS, LAST = (2, 6, 4, 5), (6,), (5,)
# op -> (shapes of the inputs, attributes)
CASES: dict[str, list[tuple[list[tuple[int, ...]], dict[str, Any]]]] = {
    "LayerNormalization": [
        ([X, LAST, LAST], {"epsilon": 0.25}),
        ([X, (4, 5)], {"axis": 2}),
        ([X, X[1:]], {"axis": -3}),
    ],
    "RMSNormalization": [([X, LAST], {"epsilon": 0.25}), ([X, (4, 5)], {"axis": 2})],
    "GroupNormalization": [
        ([X, CHANNELS, CHANNELS], {"num_groups": 3}),
        ([(1, 6), CHANNELS, CHANNELS], {"num_groups": 2}),
    ],
    "InstanceNormalization": [([X, CHANNELS, CHANNELS], {"epsilon": 0.25}), ([(2, 6, 7), CHANNELS, CHANNELS], {})],
    "BatchNormalization": [([X, *[CHANNELS] * 4], {"epsilon": 0.25}), ([(2, 6), *[CHANNELS] * 4], {})],
    "MeanVarianceNormalization": [([X], {}), ([X], {"axes": [1, -1]})],
}
WITH_BODY = ["LayerNormalization", "RMSNormalization", "GroupNormalization", "MeanVarianceNormalization"]
EVERY = [(op, *case) for op, cases in CASES.items() for case in cases]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def arrays(rng: np.random.Generator, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    x, *parameters = (rng.standard_normal(shape) for shape in shapes)
    return [x, *map(np.abs, parameters)]  # a variance is positive


def defined(op: str, inputs: list[np.ndarray], attrs: dict[str, Any], outputs: int = 1) -> list[Any]:
    exact = {k: float(np.float32(v)) if isinstance(v, float) else v for k, v in attrs.items()}
    with evaluator.silence_numpy():
        return list(evaluator.evaluate_node(op, inputs, exact, opset=23, outputs=outputs))


def body_of(op: str, attrs: dict[str, Any], inputs: int, outputs: int) -> onnx.FunctionProto:
    """onnx's function body of a node in float32."""
    schema = onnx.defs.get_schema(op, 23)
    if not schema.has_context_dependent_function:
        return schema.function_body
    names = [i.name for i in schema.inputs][:inputs]
    node = helper.make_node(op, names, [o.name for o in schema.outputs][:outputs], **attrs)
    kind = helper.make_tensor_type_proto(TensorProto.FLOAT, None).SerializeToString()
    newest = schema.context_dependent_function_opset_versions[-1]
    return onnx.FunctionProto.FromString(
        schema.get_context_dependent_function_with_opset_version(newest, node.SerializeToString(), [kind] * inputs)
    )


@pytest.mark.parametrize(("op", "shapes", "attrs"), [case for case in EVERY if case[0] in WITH_BODY])
def test_definition_on_arrays_equals_onnx_function_body(
    op: str, shapes: list[tuple[int, ...]], attrs: dict[str, Any], rng: np.random.Generator
) -> None:
    inputs = arrays(rng, shapes)
    outputs = 3 if op == "LayerNormalization" else 1
    body = body_of(op, attrs, len(inputs), outputs)
    feeds = {name: a.astype(np.float32) for name, a in zip(body.input, inputs, strict=False)}
    for name in body.input[len(inputs) :]:
        feeds[name] = None
    given = {"axes": [0, 2, 3]} | attrs
    expected = ReferenceEvaluator(body).run(None, feeds, {name: given.get(name) for name in body.attribute})
    for got, ref in zip(defined(op, inputs, attrs, outputs), expected[:outputs], strict=True):
        np.testing.assert_allclose(got, ref, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("op", "shapes", "attrs"), EVERY)
def test_definition_on_arrays_equals_onnx_reference(
    op: str, shapes: list[tuple[int, ...]], attrs: dict[str, Any], rng: np.random.Generator
) -> None:
    inputs = arrays(rng, shapes)
    names = [f"i{i}" for i in range(len(inputs))]
    node = helper.make_node(op, names, ["y"], **attrs)
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in zip(names, inputs, strict=True)]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = helper.make_model(helper.make_graph([node], "g", values, [y]), opset_imports=[helper.make_opsetid("", 23)])
    feeds = {name: a.astype(np.float32) for name, a in zip(names, inputs, strict=True)}
    (expected,) = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(defined(op, inputs, attrs)[0], expected, rtol=0, atol=1e-5)


def test_definition_on_arrays_equals_torch(rng: np.random.Generator) -> None:
    x, scale, bias, mean, variance = arrays(rng, [X, *[CHANNELS] * 4])
    t, *vectors = (torch.from_numpy(a) for a in (x, scale, bias))
    functions = torch.nn.functional
    epsilon = float(np.float32(1e-5))
    last = rng.standard_normal(LAST)
    expected = {
        "LayerNormalization": ([x, last], functions.layer_norm(t, LAST, torch.from_numpy(last), eps=epsilon)),
        "RMSNormalization": ([x, last], functions.rms_norm(t, LAST, torch.from_numpy(last), eps=epsilon)),
        "GroupNormalization": ([x, scale, bias], functions.group_norm(t, 3, *vectors, eps=epsilon)),
        "InstanceNormalization": ([x, scale, bias], functions.instance_norm(t, None, None, *vectors, eps=epsilon)),
        "BatchNormalization": (
            [x, scale, bias, mean, variance],
            functions.batch_norm(t, torch.from_numpy(mean), torch.from_numpy(variance), *vectors, eps=epsilon),
        ),
    }
    for op, (inputs, ref) in expected.items():
        attrs = {"num_groups": 3} if op == "GroupNormalization" else {}
        np.testing.assert_allclose(defined(op, inputs, attrs)[0], ref.numpy(), rtol=1e-12, atol=1e-12, err_msg=op)


def test_definition_with_large_mean_keeps_all_digits(rng: np.random.Generator) -> None:
    """E[x²] − E[x]², as onnx's function bodies write it, would lose half of them."""
    x = np.round(rng.standard_normal((3, 64)) * 2**20) / 2**20  # exact beside 2**20
    near, far = (defined("LayerNormalization", [x + offset, np.ones(64)], {})[0] for offset in (0.0, 2.0**20))
    np.testing.assert_allclose(far, near, rtol=0, atol=1e-9)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.owner} {row.op}")
def test_row_has_one_definition(row: NormOp) -> None:
    """Ours are bodies that travel in the file. LRN is only named; LpNormalization is a primitive of the evaluation."""
    if row.owner is OpOwner.OURS:
        assert row.body
        assert row.definition is None
    elif row.op in ("LRN", "LpNormalization"):
        assert row.definition is None
    else:
        assert row.definition is not None
