"""The table of norm ops agrees with whoever defines them: onnx's schemas, our function bodies and kernels,
onnxruntime's schemas."""

import ast
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from normdeploy_plugins.ops import BY_NAME
from onnx import TensorProto, helper

from normdeploy.engines import norm_implementations, plugin_plans
from normdeploy.evaluate import evaluator
from normdeploy.graphs import own_op_functions
from normdeploy.graphs.graph import Graph
from normdeploy.norms.norm_table import DEFAULT, OURS, ROWS, STANDARD, NormOp, OpOwner, StatisticsKind, rows_of_owner
from normdeploy.proof import contrib_definitions as foreign
from normdeploy.proof import norm_definitions
from normdeploy.recognition import norm_attributes

REQUIRED, OPTIONAL = onnx.defs.OpSchema.FormalParameterOption.Single, onnx.defs.OpSchema.FormalParameterOption.Optional
NAMES = {  # what a schema calls an input, and what a row does
    **dict.fromkeys(("input", "X", "x"), "X"),
    **dict.fromkeys(("Scale", "scale", "gamma"), "scale"),
    **dict.fromkeys(("B", "bias", "beta"), "bias"),
    **dict.fromkeys(("var", "input_var"), "variance"),
    **dict.fromkeys(("mean", "input_mean"), "mean"),
    **dict.fromkeys(("skip", "residual"), "residual"),
}
SHAPE = (2, 6, 4, 5)
ROOT = Path(__file__).resolve().parents[2]


def schema(row: NormOp) -> onnx.defs.OpSchema:
    return onnx.defs.get_schema(row.op, row.since)


def test_a_row_is_found_by_owner_and_name() -> None:
    assert len({(row.owner, row.op) for row in ROWS}) == len(ROWS)
    assert not OURS.keys() & DEFAULT.keys()


@pytest.mark.parametrize(
    "row", [*STANDARD.values(), *rows_of_owner(OpOwner.ONNX_18).values()], ids=lambda row: f"{row.op} {row.since}"
)
def test_a_standard_row_is_the_schema_of_its_opset(row: NormOp) -> None:
    own = schema(row)
    assert own.since_version == row.since
    assert [NAMES[i.name] for i in own.inputs] == list(row.inputs)
    assert {NAMES[i.name] for i in own.inputs if i.option == OPTIONAL} == row.optional
    assert sorted(row.attributes) == sorted(own.attributes)
    assert len(row.outputs) == len(own.outputs)
    assert own.outputs[0].type_str == own.inputs[row.inputs.index(row.typed_by)].type_str
    takes = [
        s.since_version
        for s in onnx.defs.get_all_schemas_with_history()
        if (s.domain, s.name) == ("", row.op) and _in_bfloat16(s)
    ]
    assert row.first_opset("bfloat16") == max(row.since, min(takes))
    assert row.first_opset("float32") == row.since


def _in_bfloat16(own: onnx.defs.OpSchema) -> bool:
    return any(
        "tensor(bfloat16)" in c.allowed_type_strs
        for c in own.type_constraints
        if c.type_param_str == own.inputs[0].type_str
    )


@pytest.mark.parametrize("row", STANDARD.values(), ids=lambda row: row.op)
def test_a_standard_op_has_not_changed_since(row: NormOp) -> None:
    newest = onnx.defs.get_schema(row.op)
    assert [NAMES[i.name] for i in newest.inputs] == list(row.inputs)
    assert set(row.attributes) <= set(newest.attributes)
    assert not any(a.required for name, a in newest.attributes.items() if name not in row.attributes)
    if "stash_type" in row.attributes:  # `recognition.norm_attributes` reads a node that does not say it
        assert helper.get_attribute_value(newest.attributes["stash_type"].default_value) == TensorProto.FLOAT


def shapes(row: NormOp) -> list[tuple[int, ...] | None]:
    """By onnx's inference, of a node with all its inputs and outputs."""
    sizes: dict[str, tuple[int, ...]] = {"X": SHAPE} | dict.fromkeys(
        row.inputs[1:], SHAPE[-1:] if row.op[:2] in ("La", "RM") else SHAPE[1:2]
    )
    needed = {
        "num_groups": 3,
        "size": 3,
        "axes": [0, 2, 3],
    }  # onnx 1.23 infers nothing for a MeanVarianceNormalization by default
    given = {name: value for name, value in needed.items() if name in row.attributes}
    outputs = row.outputs if row.statistics is StatisticsKind.INPUT else row.outputs[:1]  # others are for training
    node = helper.make_node(row.op, row.inputs, outputs, **given)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes[name]) for name in row.inputs]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph([node], "g", inputs, made)
    model = onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]), strict_mode=True
    )
    return [
        tuple(d.dim_value for d in o.type.tensor_type.shape.dim) if o.type.tensor_type.HasField("shape") else None
        for o in model.graph.output
    ]


@pytest.mark.parametrize("row", STANDARD.values(), ids=lambda row: row.op)
def test_outputs_alike_have_the_inputs_shape(row: NormOp) -> None:
    assert {i for i, shape in enumerate(shapes(row)) if shape in (SHAPE, None)} == set(row.x_shaped_outputs)


# nodes for which onnx 1.23 infers nothing: the opset is too old, the op is not its own, an attribute is left to its
# default
LEFT_OPEN: dict[str, tuple[str, int, dict[str, tuple[Any, Any]]]] = {
    "LayerNormalization": (
        "y, m, d = LayerNormalization(x, w)",
        16,
        {"y": (SHAPE, "float32"), "m": (None, None), "d": (None, None)},
    ),
    "RMSNormalization": ("y = RMSNormalization(x, w)", 16, {"y": (SHAPE, "float16")}),
    "SimplifiedLayerNormalization": (
        "y, d = SimplifiedLayerNormalization(x, w)",
        21,
        {"y": (SHAPE, "float16"), "d": (None, None)},
    ),
    "MeanVarianceNormalization": ("y = MeanVarianceNormalization(x)", 21, {"y": (SHAPE, "float32")}),
    "AddRMSNormQuantize": (
        "z = Constant <value = int8 {0}> () y, s = normdeploy.AddRMSNormQuantize(x, x, w, w, z)",
        21,
        {"y": (SHAPE, "int8"), "s": (SHAPE, "float32")},
    ),
    "AddLayerNorm": (
        "y, s = normdeploy.AddLayerNorm(x, x, w, w)",
        21,
        {"y": (SHAPE, "float32"), "s": (SHAPE, "float32")},
    ),
}


@pytest.mark.parametrize("op", LEFT_OPEN)
def test_a_graph_knows_a_norms_results_where_onnx_does_not(op: str) -> None:
    """The statistics of a norm are no tensors of its input's shape, and the type of an RMSNormalization is that of its
    scale."""
    body, opset, expected = LEFT_OPEN[op]
    ends = " ".join(f"{name}_end = Abs({name})" for name in expected)
    outputs = ", ".join(f"float {name}_end" for name in expected)
    head = (
        f'<ir_version: 10, opset_import: ["": {opset}, "normdeploy": 1]> g (float[2,6,4,5] x, float16[5] w) =>'
        f" ({outputs})"
    )
    graph = Graph(onnx.parser.parse_model(f"{head} {{ {body} {ends} }}"))
    node = next(n for n in graph.nodes if n.op == op)
    found = {t.name: (graph.shape(t), graph.dtype(t)) for t in node.outputs}
    assert {name: (shape, None if kind is None else kind.name) for name, (shape, kind) in found.items()} == expected


@pytest.mark.parametrize("op", ["LayerNormalization", "SimplifiedLayerNormalization", "InstanceNormalization"])
def test_the_census_tells_the_type_of_the_statistics(op: str) -> None:
    """An op with a stash_type takes them in float32 where the node does not say; another one in its input's type."""
    row = DEFAULT[op]
    given = ", ".join(row.inputs)
    graph = Graph(
        onnx.parser.parse_model(
            f"""<ir_version: 10, opset_import: ["": 21]> g (float16[2,6,4] X, float16[4] scale, float16[4] bias) =>
            (float16[2,6,4] y)
            {{ y = {op}({given}) }}"""
        )
    )
    assert norm_attributes.statistics_dtype(graph, graph.nodes) == (
        "float32" if "stash_type" in row.attributes else "float16"
    )


@pytest.mark.parametrize("op", OURS)
def test_a_body_reads_what_its_row_says(op: str) -> None:
    assert not [row.op for row in ROWS if bool(row.body) != (row.owner is OpOwner.OURS)]
    row = OURS[op]
    body = own_op_functions.own_op_body(op, row.since)
    assert set(row.inputs) <= {i for n in body.node for i in n.input}
    assert set(row.attributes) == {a.ref_attr_name for n in body.node for a in n.attribute if a.ref_attr_name}
    assert set(row.outputs) <= {o for n in body.node for o in n.output}
    assert len(row.x_shaped_outputs) == len([name for name in row.outputs if name != "y_scale"])
    assert all(onnx.defs.has(n.op_type, max_inclusive_version=row.since, domain="") for n in body.node)


# rounding is no algebra: what is quantized has no evaluation in float64
@pytest.mark.parametrize("op", sorted(op for op, r in OURS.items() if "shift" not in r.inputs and not r.quantizes))
def test_a_centered_norm_does_not_see_an_offset(op: str) -> None:
    row = OURS[op]
    x = np.random.default_rng(0).standard_normal((2, 6, 4))
    held = {
        "X": x,
        "residual": np.zeros_like(x),
        "gate": np.ones_like(x),
        "scale": np.ones(6 if op == "ChannelLayerNorm" or row.kind == "GroupNorm" else 4),
    }
    given = {"axes": [-1], "epsilon": 1e-5, "ddof": 0, "stash_type": 11, "num_groups": 2}
    found = [
        evaluator.evaluate_node(
            op,
            [(held | {"bias": np.zeros_like(held["scale"]), "X": x + by})[name] for name in row.inputs],
            {name: given[name] for name in row.attributes},
            domain=own_op_functions.DOMAIN,
            opset=23,
        )[0]
        for by in (0.0, 1.0)
    ]
    assert np.allclose(*found, atol=1e-9) == row.centered


@pytest.mark.parametrize("row", [row for row in ROWS if row.plugin], ids=lambda row: row.name)
def test_a_plugin_takes_the_inputs_of_its_row(row: NormOp) -> None:
    assert row.owner in (OpOwner.ONNX, OpOwner.OURS)
    kernel = BY_NAME[row.plugin]
    if (
        row.statistics is not StatisticsKind.CONSTANT
    ):  # ScaleShift gets what is computed of a BatchNormalization's parameters
        told_by_type = ("y_zero_point",)  # of a plugin node the attribute ``to`` says it
        assert [NAMES.get(name, name) for name in kernel.inputs] == [n for n in row.inputs if n not in told_by_type]
    assert [n for n in kernel.outputs if n != "y_scale"] == [row.outputs[i].lower() for i in row.x_shaped_outputs]
    assert ("y_scale" in kernel.outputs) == ("y_scale" in row.outputs)


def test_every_norm_with_a_plugin_is_planned_for_tensorrt() -> None:
    assert plugin_plans.PLANS.keys() == norm_implementations.TABLE.keys()
    assert all(row.tensorrt for row in norm_implementations.TABLE.values())
    assert norm_implementations.OLDER.keys() == {
        op for op, row in STANDARD.items() if row.tensorrt > norm_implementations.PLUGINS_SINCE[:1]
    }


def test_every_norm_is_evaluated_and_all_but_two_are_proved() -> None:
    evaluated = {op for op in DEFAULT if evaluator.is_supported("", op)}
    assert set(DEFAULT) - evaluated == {"LRN"}
    assert evaluated - norm_definitions.TABLE.keys() == {"LpNormalization"}  # it gives 0 at zero, and is no algebra
    assert norm_definitions.TABLE.keys() <= DEFAULT.keys()


def test_every_foreign_norm_has_its_definition() -> None:
    owners = (OpOwner.ONNXRUNTIME, OpOwner.TENSORRT, OpOwner.ONNX_18)
    assert {(row.owner, row.op) for row in ROWS if row.owner in owners} == foreign.TABLE.keys()


def test_onnxruntimes_rows_are_its_schemas() -> None:
    state = pytest.importorskip("onnxruntime.capi.onnxruntime_pybind11_state")
    if not hasattr(state, "get_all_operator_schema"):
        pytest.skip("this onnxruntime gives no schemas")
    own = {(s.domain, s.name): s for s in state.get_all_operator_schema() if s.since_version == 1}
    for row in rows_of_owner(OpOwner.ONNXRUNTIME).values():
        found = own.get(("com.microsoft", row.op)) or own["", row.op]
        assert {found.domain} <= set(row.domains)
        options = [str(i.option).rpartition(".")[2] for i in found.inputs]
        assert len(row.inputs) == len(options), row.op
        assert {i for i, option in enumerate(options) if option == "Optional"} == {
            row.inputs.index(name) for name in row.optional
        }, row.op
        assert row.min_inputs == found.min_input
        assert set(row.attributes) == set(found.attributes), row.op
        assert len(row.outputs) == len(found.outputs), row.op


def test_no_other_module_lists_norm_ops() -> None:
    """A table from ops to functions is no list of them; those are asked for their keys above."""
    names = {row.op for row in ROWS} - {row.kind for row in ROWS}
    found = []
    assert (ROOT / "normdeploy" / "norms" / "norm_table.py").is_file()
    for path in sorted((ROOT / "normdeploy").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Set | ast.List | ast.Tuple):
                held = [e.value for e in node.elts if isinstance(e, ast.Constant) and e.value in names]
                found += [(str(path), held)] if len(held) > 1 else []
    assert not found
