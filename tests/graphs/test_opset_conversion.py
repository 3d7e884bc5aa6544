"""Raising the opset: each op that onnx's converter is trusted with computes the same before and after; all others are
refused."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from benchmarks.attack import opsets as opset_attack
from normdeploy.evaluate import evaluator
from normdeploy.graphs import opset_conversion
from normdeploy.graphs.region import RefusedError
from normdeploy.proof.proto_evaluation import attributes_of
from normdeploy.rewriting import norm_optimizer
from tests.support import run_onnxruntime

NEWEST = 23
X = "(float[2,3,4] x) => (float[N,M,K] y)"
IMAGE = "(float[2,3,6,6] x) => (float[N,M,K,L] y)"
AXES = "y = {op} <axes = [1], keepdims = 0> (x)", "y = {op} <axes = [0, 2]> (x)", "y = {op} (x)"
NORMALIZED = "y = BatchNormalization <epsilon: float = 0.01{0}> (x, s, b, m, v)"

# op -> (the opset that it is written at, what it is given, the node in its forms of that opset). Where the evaluator
# has no such op, the oldest is one that onnxruntime takes and in which the op is still what it was in opset 1.
FORMS: dict[str, list[tuple[int, str, tuple[str, ...]]]] = {
    **{
        op: [(o, X, tuple(form.format(op=op) for form in AXES)) for o in (1, 11, 13)]
        for op in (
            "ReduceL1",
            "ReduceL2",
            "ReduceLogSum",
            "ReduceLogSumExp",
            "ReduceMax",
            "ReduceMean",
            "ReduceMin",
            "ReduceProd",
            "ReduceSumSquare",
        )
    },
    "ReduceSum": [(o, X, tuple(form.format(op="ReduceSum") for form in AXES)) for o in (1, 11)],
    **{
        op: [
            (o, X, tuple(f"y = {op} {axis} (x)" for axis in ("", "<axis = 0>", "<axis = 1>", "<axis = 2>")))
            for o in (9, 11)
        ]
        for op in ("Softmax", "LogSoftmax")
    },
    "BatchNormalization": [
        (1, IMAGE, (NORMALIZED.format(", is_test = 1, consumed_inputs = [0, 0, 0, 1, 1]"),)),
        (6, IMAGE, (NORMALIZED.format(", is_test = 1"),)),
        *((o, IMAGE, (NORMALIZED.format(""),)) for o in (7, 9)),
    ],
    "Clip": [
        (
            o,
            X,
            tuple(
                f"y = Clip {a} (x)"
                for a in ("<min: float = 0.5>", "<max: float = 1.0>", "<min: float = 0.5, max: float = 1.0>", "")
            ),
        )
        for o in (1, 6)
    ],
    "Dropout": [
        (1, X, ("y = Dropout <is_test = 1> (x)",)),
        (6, X, ("y = Dropout <is_test = 1> (x)",)),
        *((o, X, ("y = Dropout <ratio: float = 0.3> (x)",)) for o in (7, 10)),
    ],
    "Pad": [
        (
            9,
            X,
            (
                "y = Pad <pads = [0, 1, 2, 0, 0, 1], value: float = 2.0> (x)",
                'y = Pad <mode = "reflect", pads = [0, 1, 2, 0, 0, 1]> (x)',
            ),
        ),
    ],
    "Scatter": [(9, X, ("y = Scatter <axis = 1> (x, i, u)", "y = Scatter (x, j, u)"))],
    "Slice": [
        (
            1,
            X,
            (
                "y = Slice <axes = [1, 2], starts = [1, -3], ends = [3, -1]> (x)",
                "y = Slice <starts = [0, 1], ends = [1, 9000]> (x)",
            ),
        )
    ],
    "Split": [(o, X, ("y, z = Split <axis = 2, split = [1, 3]> (x)", "y, z = Split <axis = 2> (x)")) for o in (2, 11)],
    "Squeeze": [
        (o, X, ("t = Slice <axes = [1], starts = [1], ends = [2]> (x) y = Squeeze <axes = [1]> (t)",)) for o in (1, 9)
    ],
    "Unsqueeze": [(o, X, ("y = Unsqueeze <axes = [0, 3]> (x)",)) for o in (1, 11)],
    "TopK": [(9, X, ("y, z = TopK <k = 2, axis = 1> (x)",)), (10, X, ("y, z = TopK <axis = 2> (x, k)",))],
    "AveragePool": [
        *(
            (o, IMAGE, ("y = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]> (x)",))
            for o in (1, 7, 10)
        ),
        *(
            (o, IMAGE, ("y = AveragePool <kernel_shape = [3, 2], count_include_pad = 1, pads = [1, 1, 1, 0]> (x)",))
            for o in (7, 11)
        ),
    ],
    "GridSample": [
        (
            16,
            IMAGE,
            tuple(
                f'y = GridSample <mode = "{m}", align_corners = {a}> (x, g)'
                for m in ("bilinear", "bicubic", "nearest")
                for a in (0, 1)
            ),
        )
    ],
    "Resize": [
        (
            o,
            IMAGE,
            tuple(
                f'y = Resize <mode = "{m}", coordinate_transformation_mode = "{c}"> (x, roi, scales)'
                for m in ("nearest", "linear", "cubic")
                for c in ("half_pixel", "asymmetric", "align_corners")
            ),
        )
        for o in (11, 13, 18)
    ],
}
CASES = [(op, opset, given, form) for op, forms in FORMS.items() for opset, given, nodes in forms for form in nodes]


def held() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    return {
        **{name: rng.uniform(0.5, 1.5, 3).astype(np.float32) for name in "sbmv"},
        "i": rng.permuted(np.tile(np.arange(3), (2, 4, 1)), axis=2).transpose(0, 2, 1)[:1].astype(np.int64),
        "j": rng.permuted(np.tile(np.arange(2), (3, 4, 1)), axis=2).transpose(2, 0, 1)[:1].astype(np.int64),
        "u": rng.standard_normal((1, 3, 4)).astype(np.float32),
        "k": np.array([3], np.int64),
        "g": rng.uniform(-1.2, 1.2, (2, 4, 5, 2)).astype(np.float32),
        "roi": np.zeros(0, np.float32),
        "scales": np.array([1, 1, 1.5, 2], np.float32),
    }


def model(opset: int, given: str, form: str) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(f'<ir_version: 7, opset_import: ["": {opset}]> f {given} {{ {form} }}')
    read = {i for n in proto.graph.node for i in n.input}
    proto.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in held().items() if n in read)
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=o) for o in proto.graph.node[-1].output)
    for out, value in zip(proto.graph.output, computed(proto, drawn(proto)), strict=True):
        kind = TensorProto.INT64 if value.dtype.kind == "i" else TensorProto.FLOAT
        out.CopyFrom(onnx.helper.make_tensor_value_info(out.name, kind, value.shape))
    return proto


def drawn(proto: onnx.ModelProto) -> np.ndarray:
    shape = [d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim]
    return np.random.default_rng(4).uniform(0.2, 2.0, shape).astype(np.float32)


def computed(proto: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    """By onnxruntime where it takes the opset, else by our evaluator."""
    opset = proto.opset_import[0].version
    if opset >= 7:
        return run_onnxruntime(proto, {"x": x})
    values = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer} | {"x": x}
    values = {k: v.astype(np.float64) if v.dtype.kind == "f" else v for k, v in values.items()}
    for node in proto.graph.node:
        made = evaluator.evaluate_node(
            node.op_type,
            [values.get(i) for i in node.input],
            attributes_of(node),
            opset=opset,
            outputs=len(node.output),
        )
        values.update(zip(node.output, made, strict=False))
    return [values[o.name] for o in proto.graph.output]


@pytest.mark.parametrize("target", [17, NEWEST])
@pytest.mark.parametrize(
    ("op", "opset", "given", "form"), CASES, ids=lambda v: str(v) if not str(v).startswith("(") else ""
)
def test_converted_op_computes_the_same(op: str, opset: int, given: str, form: str, target: int) -> None:
    if opset >= target:
        pytest.skip("no raise")
    proto = model(opset, given, form)
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    out = (
        opset_conversion.convert_opset(proto, target)
        if opset_conversion.ops_needing_conversion(proto, target)
        else opset_conversion.raise_opset_number(copy, target)
    )
    assert {e.version for e in out.opset_import} == {target}
    assert not opset_conversion.ops_needing_conversion(out, target)
    onnx.checker.check_model(out, full_check=True)
    x = drawn(proto)
    for before, after in zip(computed(proto, x), computed(out, x), strict=True):
        np.testing.assert_allclose(
            after, before, rtol=1e-6, atol=1e-6
        )  # float32 reductions of 12 values, in another order at most


def test_every_op_that_is_trusted_is_tried() -> None:
    assert set(FORMS) == set(opset_conversion.CONVERTED)
    for op, oldest in opset_conversion.CONVERTED.items():
        assert min(o for o, _, _ in FORMS[op]) >= oldest


REFUSED = {
    "Hardmax": (11, X, "y = Hardmax (x)"),
    "Resize": (10, IMAGE, 'y = Resize <mode = "linear"> (x, scales)'),
    "Upsample": (9, IMAGE, 'y = Upsample <mode = "linear"> (x, scales)'),
    "GroupNormalization": (18, IMAGE, "y = GroupNormalization <num_groups = 3> (x, s, b)"),
    "RoiAlign": (10, IMAGE, "y = RoiAlign (x, rois, batch)"),
}


@pytest.mark.parametrize("op", REFUSED)
def test_op_that_the_converter_gets_wrong_is_refused(op: str) -> None:
    opset, given, form = REFUSED[op]
    proto = onnx.parser.parse_model(f'<ir_version: 7, opset_import: ["": {opset}]> f {given} {{ {form} }}')
    assert opset_conversion.ops_needing_conversion(proto, NEWEST) == [op]
    with pytest.raises(RefusedError, match=op):
        opset_conversion.convert_opset(proto, NEWEST)


NORM = """u = ReduceMean <axes = [-1]> (x) d = Sub (x, u) q = Mul (d, d) w = ReduceMean <axes = [-1]> (q)
    e = Add (w, eps) r = Sqrt (e) n = Div (d, r)"""


@pytest.mark.parametrize(
    ("tail", "opset", "core"), [("y = Softmax (n)", 17, "LayerNormalization"), ("y = Hardmax (n)", 11, "Sqrt")]
)
def test_file_is_raised_only_where_all_its_ops_can_be(tail: str, opset: int, core: str) -> None:
    text = (
        '<ir_version: 7, opset_import: ["": 11]> f (float[2,3,4] x) => (float[2,3,4] y) <float eps = {0.001}> {'
        f" {NORM} {tail} }}"
    )
    proto = onnx.parser.parse_model(text)
    out, summary = norm_optimizer.optimize_norms(proto)
    assert summary.opset == opset
    assert core in [n.op_type for n in out.graph.node]
    assert (summary.findings[0].status == "fused") == (opset == 17)
    x = np.random.default_rng(1).standard_normal((2, 3, 4)).astype(np.float32)
    np.testing.assert_allclose(run_onnxruntime(out, {"x": x})[0], run_onnxruntime(proto, {"x": x})[0], atol=1e-5)


def test_nothing_is_raised_where_no_norm_needs_it() -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 7, opset_import: ["": 11]> f (float[2,3] x) => (float[2,3] y) { y = Softmax (x) }'
    )
    out, summary = norm_optimizer.optimize_norms(proto)
    assert summary.opset == 11
    assert out.graph.node[0] == proto.graph.node[0]


def test_converter_keeps_metadata_and_stated_shapes() -> None:
    text = """<ir_version: 7, opset_import: ["": 11, "own": 1]> f (float[2,3] x) => (float[N,M] y) <float[2,3] b>
        { b = own.Strange (x) y = Softmax <axis = 1> (b) }"""
    proto = onnx.parser.parse_model(text)
    proto.graph.node[1].metadata_props.add(key="normdeploy.module", value="head")
    out = opset_conversion.convert_opset(proto, 17)
    assert [p.value for n in out.graph.node for p in n.metadata_props if n.output[0] == "y"] == ["head"]
    assert [v.name for v in out.graph.value_info if v.name == "b"] == ["b"]


def test_drawn_nodes_of_all_ops_compute_the_same_or_are_refused() -> None:
    for seed in range(50):
        case = opset_attack.draw(seed)
        verdict = opset_attack.judge(case)
        assert verdict.kind not in ("false", "failed"), (seed, case.op, case.opset, case.target, verdict)


@pytest.mark.parametrize("opset", [7, 10, 11])
def test_dropout_whose_mask_is_read_is_refused(opset: int) -> None:
    proto = _parsed(opset, "(float[2,3] x) => (float[2,3] y, bool[2,3] m) { y, m = Dropout (x) }")
    assert opset_conversion.ops_needing_conversion(proto, 17) == ["Dropout"]
    with pytest.raises(RefusedError, match="mask 'm'"):
        opset_conversion.convert_opset(proto, 17)


@pytest.mark.parametrize("opset", [7, 10, 11])
def test_dropout_mask_that_nothing_reads_is_left_out(opset: int) -> None:
    proto = _parsed(opset, "(float[2,3] x) => (float[2,3] y) { y, m = Dropout (x) }")
    out = opset_conversion.convert_opset(proto, 17)
    assert [list(n.output) for n in out.graph.node if n.op_type == "Dropout"] == [["y"]]


CONVERTED_TYPES = {
    "Clip of doubles": (10, "double", "y = Clip <min: float = 0.5> (x)"),
    "Clip of halves": (10, "float16", "y = Clip <max: float = 1.0> (x)"),
    "Clip without bounds, of infinities": (6, "float", "y = Clip (x)"),
    "Clip to infinity": (10, "float", "y = Clip <min: float = inf> (x)"),
    "Pad of doubles": (10, "double", "y = Pad <pads = [0, 1, 0, 2], value: float = 2.5> (x)"),
    "Pad of halves": (10, "float16", "y = Pad <pads = [0, 1, 0, 2]> (x)"),
    "Pad that does not fill": (10, "float", 'y = Pad <mode = "reflect", pads = [0, 1, 0, 2], value: float = 1.0> (x)'),
}


@pytest.mark.parametrize("case", CONVERTED_TYPES)
def test_constants_of_converted_nodes_have_the_type_and_the_range_of_their_data(case: str) -> None:
    opset, kind, node = CONVERTED_TYPES[case]
    proto = _parsed(opset, f"({kind}[2,4] x) => ({kind}[N,M] y) {{ {node} }}")
    out = opset_conversion.convert_opset(proto, 17)
    onnx.checker.check_model(out, full_check=True)
    dtype = {"float": np.float32, "double": np.float64, "float16": np.float16}[kind]
    x = np.array([[0.25, np.inf, -np.inf, 2], [-1, 1e4, 0, 0.75]], dtype)
    # Outside the attributes, the bounds are those of float32 at the old opset.
    wanted = {
        "Clip of doubles": np.clip(x, 0.5, np.finfo(np.float32).max),
        "Clip of halves": np.clip(x, -np.inf, 1),
        "Clip without bounds, of infinities": np.clip(x, -np.finfo(np.float32).max, np.finfo(np.float32).max),
        "Clip to infinity": np.full(x.shape, np.finfo(np.float32).max),
        "Pad of doubles": np.pad(x, ((0, 0), (1, 2)), constant_values=2.5),
        "Pad of halves": np.pad(x, ((0, 0), (1, 2))),
        "Pad that does not fill": np.pad(x, ((0, 0), (1, 2)), mode="reflect"),
    }[case]
    np.testing.assert_array_equal(run_onnxruntime(out, {"x": x})[0], wanted.astype(dtype))


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
def test_softmax_of_a_vector_along_an_axis_that_it_lacks_is_refused(op: str) -> None:
    proto = _parsed(11, f"(float[4] x) => (float[4] y) {{ y = {op} (x) }}")
    with pytest.raises(RefusedError, match=op):
        opset_conversion.convert_opset(proto, 17)


def test_batch_norm_that_computes_statistics_is_refused() -> None:
    text = """(float[2,3] x, float[3] s) => (float[2,3] y, float[3] m)
        { y, m, v, a, b = BatchNormalization (x, s, s, s, s) }"""
    with pytest.raises(RefusedError, match="statistics"):
        opset_conversion.convert_opset(_parsed(9, text), 17)


@pytest.mark.parametrize("opset", [11, 13])
def test_resize_to_sizes_loses_its_empty_scales(opset: int) -> None:
    text = """(float[1,1,2,2] x) => (float[1,1,4,4] y) <float[0] none = {}, int64[4] sizes = {1, 1, 4, 4}>
        { y = Resize <mode = "nearest", nearest_mode = "floor"> (x, none, none, sizes) }"""
    proto = _parsed(opset, text)
    assert opset_conversion.ops_needing_conversion(proto, 18) == ["Resize"]
    out = opset_conversion.convert_opset(proto, 18)
    x = np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2)
    np.testing.assert_array_equal(run_onnxruntime(out, {"x": x})[0], run_onnxruntime(proto, {"x": x})[0])


def _parsed(opset: int, text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 7, opset_import: ["": {opset}]> f {text}')


@pytest.mark.parametrize(("node", "opset", "target"), [("Softmax", 11, 21), ("Softmax", 12, 13), ("Relu", 11, 21)])
def test_raised_file_has_the_ir_version_of_its_opset(node: str, opset: int, target: int) -> None:
    text = f'<ir_version: 5, opset_import: ["": {opset}]> g (float[2,3,4] x) => (float[2,3,4] y) {{ y = {node}(x) }}'
    raised = opset_conversion.convert_to_opset(onnx.parser.parse_model(text), target)
    assert raised.ir_version >= onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", target)])
