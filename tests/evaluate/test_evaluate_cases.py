"""The float64 evaluator against onnx's own node cases, and in its older and newer forms against onnxruntime."""

import functools
import warnings
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from normdeploy.evaluate.evaluator import OPS, UnsupportedOp, evaluate_node, is_supported, silence_numpy

# u, the largest relative error of storing a number
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
INTEGERS_AND_BOOL = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def frozen(*arrays):
    """The arrays made read-only, floats widened: an op that wrote into an input would raise."""
    wide = [a.astype(np.float64) if a.dtype.name in ROUNDOFF else a for a in arrays]
    for a in wide:
        a.setflags(write=False)
    return wide


def plain(attributes):
    return {
        a.name: numpy_helper.to_array(a.t) if a.type == a.TENSOR else helper.get_attribute_value(a) for a in attributes
    }


def agree(got, expected, roundoffs):
    """Shapes, and values within ``roundoffs`` · u · max|expected| of expected's own type; NaN, Inf, integers and bools
    the same."""
    assert got.shape == expected.shape
    if expected.dtype.name in INTEGERS_AND_BOOL:
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
        return
    assert got.dtype == np.float64
    with silence_numpy():
        stored, wanted = got.astype(expected.dtype).astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(stored[~finite], wanted[~finite])
    bound = roundoffs * ROUNDOFF[expected.dtype.name] * np.abs(wanted[finite]).max(initial=0.0)
    np.testing.assert_allclose(stored[finite], wanted[finite], rtol=0, atol=bound)


# --- onnx's own cases -------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    name: str
    model: onnx.ModelProto
    inputs: dict[str, Any]
    outputs: list[Any]


def held(array):
    return array.dtype.name in ROUNDOFF or array.dtype.name in INTEGERS_AND_BOOL


@functools.cache
def onnx_cases():
    """Every case of onnx's node tests, one node or a function written out, whose nodes are all in the table and whose
    types are held."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx divides by zero on purpose
        collected = collect_testcases(None)
    cases = []
    for case in collected:
        graph = case.model.graph
        if not all(is_supported(node.domain, node.op_type) for node in graph.node) or not case.data_sets:
            continue
        for number, (inputs, outputs) in enumerate(case.data_sets):
            if any(isinstance(value, list) or value is None for value in [*inputs, *outputs]):
                continue  # sequences
            tensors = [
                numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else np.asarray(v)
                for v in [*inputs, *outputs]
            ]
            if all(map(held, tensors)):
                names = [value.name for value in graph.input]
                named = dict(zip(names, tensors[: len(names)], strict=True))
                cases.append(Case(f"{case.name}:{number}", case.model, named, tensors[len(names) :]))
    return cases


def run_model(case):
    """The outputs of a case; ``graph.initializer`` does not occur in these cases."""
    values = dict(zip(case.inputs, frozen(*case.inputs.values()), strict=True))
    opsets = {entry.domain: entry.version for entry in case.model.opset_import}
    for node in case.model.graph.node:
        results = evaluate_node(
            node.op_type,
            [values[name] if name else None for name in node.input],
            plain(node.attribute),
            opset=opsets[node.domain],
            domain=node.domain,
            outputs=len(node.output),
        )
        for name, result in zip(node.output, results, strict=True):
            if result is not None:
                result.setflags(write=False)
            values[name] = result
    return [values[output.name] for output in case.model.graph.output]


# The forms that are refused, and how many cases each has: 4 of Dropout and 2 of BatchNormalization; edge, reflect and
# wrap
REFUSED = {
    "training mode": 6,
    "Pad with mode": 3,
    "of an Attention": 81,
}  # that is more than a scale and a mask of four axes
# Its inputs and its expected output were printed with four decimals
FOUR_DECIMALS = "test_averagepool_2d_ceil_last_window_starts_on_pad:0"
# Not in onnx's cases because they are onnxruntime's; tested against it below
ONNXRUNTIME_ONLY = {
    ("", "SimplifiedLayerNormalization"),
    ("com.microsoft", "LayerNormalization"),
    ("com.microsoft", "SimplifiedLayerNormalization"),
    ("com.microsoft", "SkipLayerNormalization"),
    ("com.microsoft", "SkipSimplifiedLayerNormalization"),
    ("com.microsoft", "GatedRMSNorm"),
    ("com.microsoft", "BranchwiseRMSNorm"),
}


def test_onnx_cases():
    """577 cases of one node, each op of the table among them, and 324 functions written out as nodes, within 16 u of
    the case's own type.

    The largest seen was 4.5 u: the expectation was computed in float32.
    """
    nodes, refused, ops, failures = Counter(), Counter(), set(), []
    for case in onnx_cases():
        try:
            with silence_numpy():
                outputs = run_model(case)
        except UnsupportedOp as refusal:
            refused[next(reason for reason in REFUSED if reason in str(refusal))] += 1
            continue
        single = len(case.model.graph.node) == 1
        nodes["one" if single else "many"] += 1
        if single:
            ops.add((case.model.graph.node[0].domain, case.model.graph.node[0].op_type))
        try:
            for got, expected in zip(outputs, case.outputs, strict=True):
                if case.name == FOUR_DECIMALS:
                    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
                else:
                    agree(got, expected, 16)
        except AssertionError as error:
            failures.append(f"{case.name}: {error}")
    assert not failures, "\n".join(failures)
    assert refused == REFUSED
    assert nodes["one"] >= 577
    assert nodes["many"] >= 324
    assert OPS.keys() - ops == ONNXRUNTIME_ONLY


# --- the forms of older opsets, against onnxruntime -------------------------------------------------------------------

RNG = np.random.default_rng(0)


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*values):
    return np.array(values, np.int64)


X, IMAGE = floats(2, 3, 4), floats(2, 4, 5, 6)
CHANNEL = [floats(4), floats(4), floats(4), np.abs(floats(4))]
REDUCTIONS = ("Mean", "Sum", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp")
TOKENS, SKIP, GAMMA, BETA, BIAS = floats(2, 3, 8), floats(2, 3, 8), floats(8), floats(8), floats(8)
UPPER, LOWER, VALID = ({"auto_pad": mode} for mode in (b"SAME_UPPER", b"SAME_LOWER", b"VALID"))

Form = tuple[str, list[Any], dict[str, Any], int]
FORMS: list[Form] = [
    *(
        (f"Reduce{r}", [np.abs(X)], attrs, 11)
        for r in REDUCTIONS
        for attrs in ({}, {"axes": [1], "keepdims": 0}, {"axes": [-1, 0]})
    ),
    *((f"Reduce{r}", [np.abs(X), ints(-2)], {"keepdims": 0}, 18) for r in REDUCTIONS),
    *((f"Reduce{r}", [np.abs(X)], {"noop_with_empty_axes": 0}, 18) for r in REDUCTIONS),
    ("ReduceSum", [X, ints()], {"noop_with_empty_axes": 1}, 13),
    ("ReduceMean", [np.array([[-3, 0], [4, 4]], np.int32)], {"axes": [1]}, 13),
    ("Squeeze", [floats(1, 3, 1)], {}, 11),
    ("Squeeze", [floats(1, 3, 1)], {"axes": [-1]}, 11),
    ("Squeeze", [floats(1, 3, 1), ints(0)], {}, 13),
    ("Unsqueeze", [X], {"axes": [0, -1]}, 11),
    ("Unsqueeze", [X, ints(-2, 1)], {}, 13),
    ("Split", [X], {"axis": 2, "split": [1, 3]}, 11),
    ("Split", [X], {"axis": -1}, 11),
    ("Split", [X, ints(1, 2)], {"axis": 1}, 13),
    ("Split", [X], {"axis": 1, "num_outputs": 2}, 18),
    ("Slice", [X], {"starts": [0, -2], "ends": [1, 1000], "axes": [0, 2]}, 9),
    ("Slice", [X], {"starts": [1], "ends": [-1]}, 9),
    ("Slice", [X, ints(-1, 5), ints(-1000, 0), ints(1, -1), ints(-1, -2)], {}, 13),
    ("Slice", [X, ints(1), ints(2)], {}, 10),
    ("Clip", [X], {"min": -0.5, "max": 0.25}, 6),
    ("Clip", [X], {"min": 0.5}, 10),
    ("Clip", [X, np.float32(-0.5), np.float32(0.25)], {}, 11),
    ("Clip", [X, None, np.float32(0.25)], {}, 13),
    ("Pad", [X], {"pads": [0, 1, 0, 2, 0, 0], "value": 1.5}, 10),
    ("Pad", [X, ints(0, 1, -1, 2, 0, -1), np.float32(2)], {}, 11),
    ("Pad", [X, ints(1, -1), None, ints(-1)], {}, 18),
    ("Dropout", [X], {"ratio": 0.5}, 7),
    ("Dropout", [X], {"ratio": 0.5}, 10),
    ("Dropout", [X, np.float32(0.5), np.array(False)], {}, 13),
    *(("Softmax", [X], attrs, opset) for attrs in ({}, {"axis": 0}, {"axis": 2}) for opset in (7, 11, 12, 13)),
    ("Softmax", [X], {"axis": -2}, 11),
    ("Tile", [X, ints(1, 2, 3)], {}, 6),
    ("BatchNormalization", [IMAGE, *CHANNEL], {"epsilon": 0.125}, 7),
    ("BatchNormalization", [IMAGE, *CHANNEL], {}, 9),
    ("BatchNormalization", [IMAGE, *CHANNEL], {"training_mode": 0}, 14),
    ("Gemm", [floats(3, 2), floats(4, 3), floats(4)], {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}, 7),
    ("Gemm", [floats(2, 3), floats(3, 4)], {}, 11),
    ("Flatten", [IMAGE], {"axis": 0}, 9),
    ("Flatten", [IMAGE], {"axis": -1}, 11),
    ("Reshape", [X, ints(0, -1)], {}, 5),
    ("Reshape", [floats(2, 0), ints(0, 7)], {"allowzero": 1}, 14),
    ("Shape", [IMAGE], {"start": -3, "end": -1}, 15),
    ("Shape", [IMAGE], {"end": 100}, 15),
    ("Gather", [X, np.array([[-1, 0]])], {"axis": -2}, 13),
    ("Transpose", [X], {}, 13),
    ("Expand", [floats(3, 1), ints(2, 1, 4)], {}, 13),
    ("Concat", [X, X], {"axis": -1}, 11),
    ("Div", [ints(-7, 7, -7, 7, 6), ints(2, 2, -2, -2, -3)], {}, 14),
    ("Mod", [ints(-7, 7, -7), ints(3, -3, -3)], {}, 13),
    ("Mod", [floats(5), floats(5)], {"fmod": 1}, 13),
    ("Pow", [ints(2, 3), np.float32([2, 3])], {}, 15),
    ("Pow", [np.abs(X), ints(3)], {}, 15),
    ("Range", [np.int64(9), np.int64(0), np.int64(-4)], {}, 11),
    ("Range", [np.float32(0), np.float32(1), np.float32(0.375)], {}, 11),
    ("Cast", [np.float32([-1.7, 1.7, 0.0])], {"to": 7}, 13),
    ("Cast", [np.float32([-1.7, 1.7, 0.0])], {"to": 9}, 9),
    ("Cast", [ints(-1, 3)], {"to": 1}, 13),
    ("CastLike", [np.float32([-1.7, 1.7]), np.int32([0])], {}, 15),
    ("Constant", [], {"value": np.float16([1.5, 2])}, 13),
    ("Constant", [], {"value_floats": [1.5, 2.0]}, 13),
    ("Constant", [], {"value_int": 3}, 13),
    ("ConstantOfShape", [ints(2, 3)], {}, 9),
    ("ConstantOfShape", [ints()], {"value": ints(4)}, 9),
    ("Round", [np.float32([0.5, 1.5, 2.5, -0.5])], {}, 11),
    ("LeakyRelu", [X], {}, 6),
    ("HardSigmoid", [X], {}, 6),
    ("Gelu", [X], {"approximate": b"tanh"}, 20),
    ("LpNormalization", [X], {"axis": 1, "p": 1}, 1),
    ("LpNormalization", [X], {}, 1),
    ("Einsum", [floats(2, 3, 4), floats(4, 5)], {"equation": b"...ij, jk -> ...ik"}, 12),
    *(
        ("Conv", [IMAGE, floats(6, 2, 3, 2)], {"group": 2, "strides": [2, 3], **mode}, 11)
        for mode in (UPPER, LOWER, VALID)
    ),
    *(
        ("ConvTranspose", [IMAGE, floats(4, 2, 4, 3)], {"strides": [2, 3], **mode}, 11)
        for mode in (UPPER, LOWER, VALID)
    ),
    ("ConvTranspose", [IMAGE, floats(4, 2, 3, 3)], {"strides": [2, 2], "output_shape": [10, 12]}, 11),
    ("ConvTranspose", [IMAGE, floats(4, 2, 3, 3)], {"strides": [2, 2], "output_shape": [10, 12], **UPPER}, 11),
    *(
        ("AveragePool", [IMAGE], {"kernel_shape": [3, 2], "strides": [2, 2], **mode}, 10)
        for mode in (UPPER, LOWER, VALID)
    ),
    *(
        (
            "AveragePool",
            [IMAGE],
            {
                "kernel_shape": [3, 3],
                "strides": [2, 2],
                "pads": [1, 0, 1, 1],
                "ceil_mode": 1,
                "count_include_pad": include,
            },
            19,
        )
        for include in (0, 1)
    ),
    ("InstanceNormalization", [IMAGE, *CHANNEL[:2]], {}, 6),
    ("MeanVarianceNormalization", [IMAGE], {"axes": [1, 2, 3]}, 13),
    ("LayerNormalization", [IMAGE, floats(5, 6)], {"axis": -2, "epsilon": 0.125}, 17),
    ("SimplifiedLayerNormalization", [TOKENS, GAMMA], {"epsilon": 1e-6}, 17),
]
# onnxruntime's own: (op, inputs, attributes, number of outputs)
CONTRIB = [
    ("SkipLayerNormalization", [TOKENS, SKIP, GAMMA], {"epsilon": 0.125}, 1),
    ("SkipLayerNormalization", [TOKENS, SKIP[:1], GAMMA, BETA, BIAS], {}, 4),
    ("SkipLayerNormalization", [TOKENS, SKIP[0], GAMMA, None, BIAS], {}, 1),
    ("SkipSimplifiedLayerNormalization", [TOKENS, SKIP, GAMMA], {"epsilon": 0.125}, 1),
    ("SkipSimplifiedLayerNormalization", [TOKENS, SKIP, GAMMA, BIAS], {}, 4),
    ("GatedRMSNorm", [TOKENS, GAMMA, SKIP], {}, 1),
    ("GatedRMSNorm", [TOKENS, GAMMA[:4], SKIP], {"epsilon": 0.125, "activation": "swish"}, 1),
    ("GatedRMSNorm", [TOKENS, GAMMA[:2], SKIP], {"activation": "sigmoid"}, 1),
    ("BranchwiseRMSNorm", [TOKENS], {"epsilon": 0.125}, 1),
    ("BranchwiseRMSNorm", [TOKENS, GAMMA], {}, 1),
    ("BranchwiseRMSNorm", [TOKENS, GAMMA[:4]], {"num_branches": 2}, 1),
    ("BranchwiseRMSNorm", [TOKENS, GAMMA], {"num_branches": 2}, 1),
    ("BranchwiseRMSNorm", [TOKENS, GAMMA.reshape(2, 4)], {"num_branches": 2, "epsilon": 0.125}, 1),
]


def onnxruntime_outputs(op, inputs, attrs, opset, domain, outputs):
    """What onnxruntime's own kernel says, its optimizer off; None for an output that it doesn't fill."""
    names = ["" if value is None else f"x{i}" for i, value in enumerate(inputs)]
    attributes = {
        name: numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value
        for name, value in attrs.items()
    }
    wanted = [f"y{i}" for i in range(outputs)]
    if op.startswith("Skip"):
        wanted[1:3] = [""] * len(wanted[1:3])  # the CPU kernels fill neither mean nor 1 / std
    node = helper.make_node(op, names, wanted, domain=domain, **attributes)
    feeds = {name: np.asarray(value) for name, value in zip(names, inputs, strict=True) if name}
    graph = helper.make_graph(
        [node],
        "form",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in feeds.items()
        ],
        [helper.make_empty_tensor_value_info(name) for name in wanted if name],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, ir_version=10, opset_imports=imports)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    results = iter(session.run(None, feeds))
    return [next(results) if name else None for name in wanted]


def check_form(op, inputs, attrs, opset, domain="", outputs=1):
    expected = onnxruntime_outputs(op, inputs, attrs, opset, domain, outputs)
    ours = [None if value is None else frozen(np.array(value))[0] for value in inputs]
    with silence_numpy():
        got = evaluate_node(op, ours, attrs, opset=opset, domain=domain, outputs=outputs)
    assert len(got) == outputs
    for result, wanted in zip(got, expected, strict=True):
        if wanted is not None:
            agree(result, wanted, 8)  # 2 u seen


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}-{form[3]}")
def test_old_and_new_forms(form: Form):
    op, inputs, attrs, opset = form
    # onnxruntime's mask of opset 10 is all false, which no text asks for; onnx's own cases have the mask of later
    # opsets
    outputs = 2 if op == "Split" or (op == "Dropout" and opset >= 12) else 1
    check_form(op, inputs, attrs, opset, outputs=outputs)


@pytest.mark.parametrize("form", CONTRIB, ids=lambda form: f"{form[0]}-{len(form[1])}")
def test_onnxruntime_ops(form):
    op, inputs, attrs, outputs = form
    check_form(op, inputs, attrs, 17, "com.microsoft", outputs)
