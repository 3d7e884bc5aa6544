"""Lowering the opset: each adapter computes the same before and after; what the older opset can't hold is refused."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from normdeploy.graphs.newer_ops import inline_newer_functions
from normdeploy.graphs.opset_adapters import ADAPTERS
from normdeploy.graphs.opset_lowering import lower_opset
from normdeploy.graphs.region import RefusedError
from tests.support import run_onnxruntime

X = "(float[2,3,4] x) => (float[N,M,K] y)"
OPEN = "(float[2,n,5] x) => (float[N,M,K] y)"
IMAGE = "(float[2,3,6,6] x) => (float[N,M,K,L] y)"
SHAPE = "(float[2,3,4] x) => (int64[N] y)"
REDUCTIONS = [op for op in ADAPTERS if op.startswith("Reduce")]

# op → (opset of the file, signature, nodes)
FORMS: dict[str, list[tuple[int, str, str]]] = {
    **{
        op: [
            (18, X, f"y = {op} (x, axes)"),
            (20, X, f"y = {op} <keepdims = 0> (x)"),
            (22, X, f"y = {op} <noop_with_empty_axes = 1> (x)"),
            # torch's exporter computes the axes from constants.
            (18, X, f"minus = Constant <value_ints = [-1]> () flat = Reshape (axes, minus) y = {op} (x, flat)"),
        ]
        for op in REDUCTIONS
    },
    "AveragePool": [
        (19, IMAGE, "y = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1], dilations = [1, 1]> (x)")
    ],
    "BatchNormalization": [
        (15, IMAGE, "y = BatchNormalization <epsilon: float = 0.01, training_mode = 0> (x, s, b, b, s)")
    ],
    "Cast": [(24, X, 'z = Cast <to = 10, saturate = 0, round_mode = "down"> (x) y = Cast <to = 1> (z)')],
    "CastLike": [(15, X, "z = CastLike (x, axes) y = CastLike (z, x)"), (19, X, "y = CastLike <saturate = 1> (x, s)")],
    "GridSample": [
        (20, IMAGE, 'y = GridSample <mode = "linear"> (x, grid)'),
        (22, IMAGE, 'y = GridSample <mode = "cubic", align_corners = 1> (x, grid)'),
    ],
    "Pad": [
        (18, X, "y = Pad (x, pads, nothing, two_axes)"),
        (21, X, 'y = Pad <mode = "reflect"> (x, pads, , two_axes)'),
        (18, X, "y = Pad (x, all_pads, one, all_axes)"),
        (18, X, "y = Pad (x, all_pads)"),
    ],
    "Reshape": [
        (14, X, "y = Reshape <allowzero = 1> (x, shape)"),
        (
            14,
            OPEN,
            "all = Shape (x) first = Slice (all, i0, i2) "
            "minus = Constant <value_ints = [-1]> () to = Concat <axis = 0> (first, minus) "
            "y = Reshape <allowzero = 1> (x, to)",
        ),
    ],
    "Resize": [
        (18, IMAGE, "y = Resize <axes = [3, 2]> (x, , scales)"),
        (19, IMAGE, 'y = Resize <axes = [2, 3], mode = "linear"> (x, , , sizes)'),
        (18, IMAGE, 'y = Resize <mode = "cubic", antialias = 0> (x, , all_scales)'),
    ],
    "RoiAlign": [
        (
            16,
            IMAGE,
            'y = RoiAlign <coordinate_transformation_mode = "output_half_pixel", output_height = 2, sampling_ratio = 2>'
            " (x, rois, batches)",
        )
    ],
    "Shape": [
        (15, SHAPE, "y = Shape <start = 1> (x)"),
        (15, SHAPE, "y = Shape <start = -2, end = -1> (x)"),
        (19, SHAPE, "y = Shape <end = 9> (x)"),
        (21, SHAPE, "y = Shape (x)"),
    ],
    "Split": [
        (18, X, "y, z = Split <axis = 2, num_outputs = 2> (x)"),
        (18, X, "y, z = Split <axis = 1, num_outputs = 2> (x)"),
        (18, OPEN, "z, y = Split <axis = 1, num_outputs = 2> (x)"),
        (18, X, "y, z = Split <axis = 2> (x, parts)"),
    ],
    "Trilu": [
        (14, X, "y = Trilu (x)"),
        (14, X, "y = Trilu <upper = 0> (x, below)"),
        (14, OPEN, "y = Trilu <upper = 1> (x, above)"),
    ],
}
CASES = [(op, *form) for op, forms in FORMS.items() for form in forms]

# Ops that onnx defines by a function body
BODIES = [
    (20, "y = Gelu (x)"),
    (20, 'y = Gelu <approximate = "tanh"> (x)'),
    (14, "y = HardSwish (x)"),
    (18, "y = Mish (x)"),
    (24, "y = Swish (x)"),
    (24, "y = Swish <alpha: float = 0.5> (x)"),
    (23, "y = Attention <q_num_heads = 2, kv_num_heads = 2> (x, x, x)"),
    (23, "y = Attention <q_num_heads = 2, kv_num_heads = 2, is_causal = 1> (x, x, x)"),
]


def constants() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        "axes": np.array([1], np.int64),
        "s": rng.uniform(0.5, 1.5, 3).astype(np.float32),
        "b": rng.standard_normal(3).astype(np.float32),
        "grid": rng.uniform(-1.2, 1.2, (2, 4, 5, 2)).astype(np.float32),
        "pads": np.array([1, 0, 0, 1], np.int64),
        "two_axes": np.array([-1, 1], np.int64),
        "all_pads": np.array([0, 1, 0, 1, 0, 2], np.int64),
        "all_axes": np.arange(3),
        "nothing": np.zeros((), np.float32),
        "one": np.ones((), np.float32),
        "shape": np.array([3, -1, 2], np.int64),
        "scales": np.array([1.5, 2], np.float32),
        "all_scales": np.array([1, 1, 2, 1.5], np.float32),
        "sizes": np.array([4, 9], np.int64),
        "parts": np.array([3, 1], np.int64),
        "below": np.array(-1, np.int64),
        "above": np.array(1, np.int64),
        "rois": np.array([[0, 1, 4, 5], [1, 0, 5, 3]], np.float32),
        "batches": np.array([0, 1], np.int64),
        "i0": np.array([0], np.int64),
        "i2": np.array([2], np.int64),
    }


def model(opset: int, signature: str, nodes: str) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> f {signature} {{ {nodes} }}')
    read = {i for n in proto.graph.node for i in n.input}
    proto.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants().items() if n in read)
    # The parser needs a shape, but each form has its own.
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    return proto


def feeds(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    shape = [d.dim_value or 3 for d in proto.graph.input[0].type.tensor_type.shape.dim]
    return {"x": np.random.default_rng(4).uniform(0.2, 2.0, shape).astype(np.float32)}


def computed(proto: onnx.ModelProto) -> np.ndarray:
    """Run in onnxruntime; in onnx's evaluator if onnxruntime has no kernel for the newer opset."""
    try:
        return run_onnxruntime(proto, feeds(proto))[0]
    except Exception:
        return np.asarray(ReferenceEvaluator(proto).run(None, feeds(proto))[0])


@pytest.mark.parametrize("target", [13, 17])
@pytest.mark.parametrize(("op", "opset", "signature", "nodes"), CASES)
def test_adapter_computes_the_same(op: str, opset: int, signature: str, nodes: str, target: int) -> None:
    if opset <= target or (op == "GridSample" and target < 16):
        pytest.skip("not lowered, or no such op")
    proto = model(opset, signature, nodes)
    before = proto.SerializeToString()
    out, _ = lower_opset(proto, target)
    assert proto.SerializeToString() == before
    assert {e.version for e in out.opset_import} == {target}
    onnx.shape_inference.infer_shapes(out, strict_mode=True, check_type=True)
    # onnxruntime has two kernels for AveragePool, which add nine numbers in different orders, and two for logarithms.
    rounding = 9 * 2.0**-24 if op in ("AveragePool", "ReduceLogSum") else 0
    np.testing.assert_allclose(run_onnxruntime(out, feeds(out))[0], computed(proto), rtol=rounding)


def test_every_adapter_is_tried() -> None:
    assert {*FORMS} | {op for _, _, op, *_ in REFUSED} >= {*ADAPTERS}


@pytest.mark.parametrize("opset", range(14, 27))
def test_op_of_every_newer_opset_is_lowered(opset: int) -> None:
    proto = model(opset, X, "a = Relu (x) c = Softmax (a) t = Transpose <perm = [0, 2, 1]> (c) y = MatMul (x, t)")
    out, _ = lower_opset(proto, 13)
    np.testing.assert_array_equal(run_onnxruntime(out, feeds(out))[0], run_onnxruntime(proto, feeds(proto))[0])
    assert out.ir_version == 7


@pytest.mark.parametrize(("opset", "nodes"), BODIES)
def test_function_body_replaces_a_newer_op(opset: int, nodes: str) -> None:
    proto = model(opset, X, nodes)
    op = proto.graph.node[0].op_type
    out, _ = lower_opset(proto, 13)
    onnx.shape_inference.infer_shapes(out, strict_mode=True, check_type=True)
    assert op not in {n.op_type for n in out.graph.node}
    wide = {"x": feeds(proto)["x"].astype(np.float64)}
    exact = np.asarray(ReferenceEvaluator(doubled(proto)).run(None, wide)[0])
    # Sums of at most 8 float32 products
    np.testing.assert_allclose(run_onnxruntime(out, feeds(out))[0], exact, rtol=2e-6, atol=2e-6)


def doubled(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model in float64, for onnx's evaluator."""
    wide = onnx.ModelProto()
    wide.CopyFrom(proto)
    for value in (*wide.graph.input, *wide.graph.output):
        value.type.tensor_type.elem_type = TensorProto.DOUBLE
    return wide


REFUSED = [
    (16, "i = Unsqueeze (x, axes) y = RoiAlign (i, rois, batches)", "RoiAlign", "mode is half_pixel", 16),
    (21, "y = GroupNormalization <num_groups = 3> (x, b, b)", "GroupNormalization", "one scale for each group", 21),
    (20, "i = Unsqueeze (x, axes) y = DFT (i, , axes)", "DFT", "its axis had another default", 20),
    (
        15,
        "h = Cast <to = 10> (x) y = BatchNormalization (h, b, b, b, b)",
        "BatchNormalization",
        "one type for its T",
        15,
    ),
    (23, "y = TensorScatter (x, x, axes)", "TensorScatter", "the opset has no such op", 24),
    (18, "i = Cast <to = 7> (x) n = BitwiseNot (i) y = Cast <to = 1> (n)", "BitwiseNot", "no such op", 18),
    (
        22,
        "h = Cast <to = 16> (x) p = Sin (h) y = Cast <to = 1> (p)",
        "Sin",
        r"does not allow its types \(bfloat16\)",
        22,
    ),
    (18, "t = Cast <to = 7> (s) y = ReduceMean (x, t)", "ReduceMean", "its input 'axes' is not a constant", 18),
    (19, "y = AveragePool <kernel_shape = [2], ceil_mode = 1> (x)", "AveragePool", "ceil_mode", 19),
    (18, 'p = Cast <to = 7> (x) y = ScatterElements <reduction = "max"> (x, p, x)', "ScatterElements", "reduction", 18),
    (
        21,
        "q = QuantizeLinear <output_dtype = 22> (x, one) y = DequantizeLinear (q, one)",
        "QuantizeLinear",
        "output_dtype",
        21,
    ),
    (28, "y = Mod (x, s)", "Mod", "its fmod 0 needs integers", 28),
    (14, "t = Shape (x) u = Sub (t, axes) y = Reshape <allowzero = 1> (x, u)", "Reshape", "allowzero is 1", 14),
    (15, "y, m, v = BatchNormalization <training_mode = 1> (x, s, b, b, s)", "BatchNormalization", "statistics", 14),
    (
        19,
        'p = Constant <value_ints = [1, 1]> () a = Constant <value_ints = [1]> () y = Pad <mode = "wrap"> (x, p, , a)',
        "Pad",
        "wrap",
        19,
    ),
]


@pytest.mark.parametrize(("opset", "nodes", "op", "reason", "lowest"), REFUSED, ids=[case[2] for case in REFUSED])
def test_node_without_an_older_form_is_refused(opset: int, nodes: str, op: str, reason: str, lowest: int) -> None:
    signature = "(float[2,3,4] x, float[1] s, float[3] b) => (float[N,M,K] y)"
    proto = model(max(opset, lowest), signature, nodes)
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(
        numpy_helper.from_array(v, n) for n, v in constants().items() if n in nodes and n not in "sb"
    )
    with pytest.raises(RefusedError, match=reason) as refusal:
        lower_opset(proto, 13)
    assert f"({op}) can't be written at opset 13" in str(refusal.value)
    assert str(refusal.value).endswith(f"the lowest opset for it is {lowest}")


def test_bodies_of_if_are_lowered() -> None:
    text = """<ir_version: 10, opset_import: ["": 20]>
    f (float[2,3] x, bool c) => (float[2,M] y) <int64[1] axes = {1}> {
        y = If (c) <then_branch = t () => (float[2,M] a) { a = ReduceMean (x, axes) },
                    else_branch = e () => (float[2,M] b) { b = Gelu (x) }>
    }"""
    proto = onnx.parser.parse_model(text)
    out, lowered = lower_opset(proto, 13)
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    for choice in (True, False):
        given = {"x": x, "c": np.array(choice)}
        np.testing.assert_allclose(run_onnxruntime(out, given)[0], run_onnxruntime(proto, given)[0], rtol=1e-6)
    assert {change.place.split(" ")[0] for change in lowered if change.before.op_type == "ReduceMean"} == {
        "then_branch"
    }


@pytest.mark.parametrize(("body", "stays"), [("z = Relu (a)", True), ("z = Gelu (a)", False)])
def test_function_is_kept_if_its_body_needs_no_change(body: str, stays: bool) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 21, "own": 1]> f (float[2,3] x) => (float[2,3] y) {{ y = own.F (x) }}
    <opset_import: ["": 21], domain: "own"> F (a) => (z) {{ {body} }}"""
    proto = onnx.parser.parse_model(text)
    out, _ = lower_opset(inline_newer_functions(proto, 13), 13)
    assert bool(out.functions) == stays
    given = {"x": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)}
    np.testing.assert_allclose(run_onnxruntime(out, given)[0], run_onnxruntime(proto, given)[0], rtol=1e-6)


def test_module_names_and_weights_are_kept() -> None:
    proto = model(20, IMAGE, "y = Gelu (x)")
    proto.graph.node[0].metadata_props.add(key="module", value="act")
    proto.graph.initializer.append(numpy_helper.from_array(np.zeros(3, np.float32), "weight"))
    out, _ = lower_opset(proto, 13)
    assert all(n.metadata_props[0].value == "act" for n in out.graph.node)
    assert [t.name for t in out.graph.initializer] == ["weight"]
    assert [i.name for i in out.graph.input] == ["x"]


@pytest.mark.parametrize("kind", ["none", "tanh"])
def test_refusal_names_the_tensor_of_unknown_type(kind: str) -> None:
    """The type of a foreign op's output is unknown, and the body of Gelu has constants of its type."""
    text = f"""<ir_version: 10, opset_import: ["": 21, "other": 1]> f (float[2,3] x) => (float[2,3] y)
    {{ h = other.Op (x) y = Gelu <approximate = "{kind}"> (h) }}"""
    with pytest.raises(RefusedError, match=r"onnx does not know the type of 'h', which it reads$"):
        lower_opset(onnx.parser.parse_model(text), 13)
