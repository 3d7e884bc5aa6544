"""``build --norm-impl``: which form each norm takes, that it says the same, and why some stay as they are."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from normdeploy_plugins.ops import BY_NAME
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from normdeploy.engines import norm_implementations
from normdeploy.engines.norm_implementations import (
    TABLE,
    Implementation,
    implement_norms,
    needs_native_rewrite,
    parse_version,
)
from normdeploy.engines.plugin_nodes import PluginPlanner
from normdeploy.errors import InputError, RuntimeUnavailable
from normdeploy.graphs import own_op_functions
from normdeploy.proof.plugin_definitions import TABLE as DEFINITIONS
from normdeploy.rewriting.certification import Failure
from normdeploy.rewriting.proposals import Proposal
from normdeploy.rewriting.rewriter import DecidedProposal, Rewriter

from ..norm_nodes import DTYPES, MODELS, SIZES, Model, feeds
from ..support import run_onnxruntime

MARKS = {"plugin_namespace": b"normdeploy", "plugin_version": b"1", "aot": 1}
KERNEL_TYPES = {TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}


def plugins(proto: onnx.ModelProto, **given: Any) -> tuple[onnx.ModelProto, tuple[Implementation, ...]]:
    return implement_norms(proto, **{"norm_impl": "plugin", "runtime": "tensorrt", "version": "11.4.0.106"} | given)


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def is_plugin(node: onnx.NodeProto) -> bool:
    return "plugin_namespace" in attributes(node)


def by_references(proto: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every tensor of a model: plugin nodes by their kernels' references, the rest by onnx's own evaluator, in
    float64."""
    known = {k: v.astype(np.float64) for k, v in inputs.items()}
    known |= {
        t.name: numpy_helper.to_array(t).astype(np.float64)
        for t in proto.graph.initializer
        if t.data_type != TensorProto.INT64
    }
    known |= {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer if t.data_type == TensorProto.INT64}
    for node in proto.graph.node:
        read = [known[i] for i in node.input]
        if is_plugin(node):
            op, given = BY_NAME[node.op_type], attributes(node)
            chosen = op.decoded({k: np.array([given[k]]) for k in op.attributes})
            found = op.reference(*read, **chosen)
        else:
            found = ReferenceEvaluator(node).run(None, dict(zip(node.input, read, strict=True)))[0]
        known.update(zip(node.output, found if isinstance(found, tuple) else (found,), strict=True))
    return known


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("dtype", ["float", "float16", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_plugin_nodes_say_what_the_file_says(name: str, dtype: str, static: bool) -> None:
    model = MODELS[name]
    source = model.proto(dtype, static=static)
    written, account = plugins(model.portable(dtype, static=static), sizes=SIZES)
    nodes = [n for n in written.graph.node if is_plugin(n)]
    assert tuple(n.op_type for n in nodes) == model.plugins
    assert {n.op_type for n in written.graph.node} - set(model.plugins) <= set(model.left) | {"Constant"}
    assert [a.form for a in account] == [f"plugin {op}" for op in model.plugins]
    assert account[0].module.startswith("layers.")
    assert [f.name for f in written.functions] == []
    for node in nodes:
        op, given = BY_NAME[node.op_type], attributes(node)
        assert {k: type(v) for k, v in given.items()} == {
            **{k: int if kind is str else kind for k, kind in op.attributes.items()},
            **{k: type(v) for k, v in MARKS.items()},
        }
        assert given.items() >= MARKS.items()
        assert node.domain == "normdeploy"
        assert (len(node.input), len(node.output)) == (len(op.inputs), len(op.outputs))
    if dtype == "float":
        data = feeds(source)
        runs = source if not any(n.domain for n in source.graph.node) else model.portable(static=static)
        found, expected = by_references(written, data), run_onnxruntime(runs, data)
        for value, reference in zip(source.graph.output, expected, strict=True):
            # float32's rounding of a norm of values around 3: 2⁻²⁴ · |x| / σ, some additions of it
            assert np.abs(found[value.name] - reference).max() <= 5e-6 * max(1.0, np.abs(reference).max())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_types_of_parameters(dtype: str) -> None:
    """The data's type as it stands in the file; float32 where the parameters were computed, or are float32 beside half
    precision."""
    kinds = {v: k for k, v in KERNEL_TYPES.items()}
    same, _ = plugins(MODELS["LayerNormalization"].proto(dtype))
    assert {t.data_type for t in same.graph.initializer} == {helper.np_dtype_to_tensor_dtype(np.dtype(DTYPES[dtype]))}
    assert {t.name for t in same.graph.initializer} == {"gamma", "beta"}  # not written a second time
    computed, _ = plugins(MODELS["BatchNormalization, Relu"].proto(dtype))
    assert {t.data_type for t in computed.graph.initializer} == {kinds["fp32"]}
    mixed = MODELS["LayerNorm of ours, unbiased"].proto(dtype, parameters="float")
    beside, account = plugins(mixed)
    assert account[0].form == "plugin LayerNorm"
    assert {t.data_type for t in beside.graph.initializer} == {kinds["fp32"]}


def test_the_sum_that_nobody_reads_has_a_name() -> None:
    model = MODELS["Add, LayerNormalization"]
    proto = replace(model, outputs={"y": model.outputs["y"]}).portable()
    node = next(n for n in proto.graph.node if n.op_type == "AddLayerNorm")
    if len(node.output) > 1:
        node.output[1] = ""
    written, _ = plugins(proto)
    (node,) = written.graph.node
    assert len(node.output) == 2
    assert all(node.output)
    assert node.output[0] == "y"


def test_a_reader_of_the_transposed_image_keeps_the_transposes() -> None:
    model = MODELS["GroupNormalization, SiLU, NHWC"]
    more = replace(model, body=model.body + " z = Relu(t)", outputs=model.outputs | {"z": "b,32,h,w"})
    written, _ = plugins(more.portable())
    assert [n.op_type for n in written.graph.node if n.op_type != "Relu"] == ["Transpose", "GroupNormSiLU", "Transpose"]
    last = next(n for n in plugins(model.portable())[0].graph.node)
    assert attributes(last)["channels_last"] == 1


# ------------------------------------------------------------------ few long rows


@pytest.mark.parametrize(
    ("name", "sizes", "plugin_ops", "splits"),
    [
        ("GroupNormalization", {"b": 1, "h": 128, "w": 128}, ["NormStatistics", "GroupNormApply"], 8),
        ("GroupNormalization, SiLU, NHWC", {"b": 2, "h": 128, "w": 128}, ["NormStatistics", "GroupNormApply"], 8),
        (
            "GroupNormalization, adaptive, SiLU",
            {"b": 1, "h": 128, "w": 128},
            ["NormStatistics", "AdaGroupNormApply"],
            8,
        ),
        (
            "GroupNormalization",
            {"b": 16, "h": 128, "w": 128},
            ["GroupNorm"],
            0,
        ),  # 128 rows: a program for each multiprocessor
        ("GroupNormalization", {"b": 1, "h": 64, "w": 64}, ["GroupNorm"], 0),  # 16,384 elements: one program holds them
        ("GroupNormalization", {"b": 1, "h": 128}, ["GroupNorm"], 0),  # nothing is known of w
        ("LayerNormalization", {"b": 1, "s": 7}, ["LayerNorm"], 0),
    ],
)
def test_few_long_rows_get_two_launches(name: str, sizes: dict[str, int], plugin_ops: list[str], splits: int) -> None:
    source = MODELS[name].portable()
    written, account = plugins(source, sizes=sizes)
    nodes = [n for n in written.graph.node if is_plugin(n)]
    assert [n.op_type for n in nodes] == plugin_ops
    if splits:
        assert attributes(nodes[0])["splits"] == splits
        assert nodes[1].input[1] == nodes[0].output[0]
        assert account[0].form == f"plugins NormStatistics and {plugin_ops[1]}"
        data = feeds(source)
        assert np.allclose(by_references(written, data)["y"], run_onnxruntime(source, data)[0], rtol=0, atol=2e-5)


def test_one_long_row_of_a_layer_norm() -> None:
    model = Model("y = LayerNormalization(x, gamma)", {"x": "b,200000"}, {"y": "b,200000"}, {"gamma": (200_000,)}, ())
    written, _ = plugins(model.proto(), sizes={"b": 2})
    assert [n.op_type for n in written.graph.node] == ["NormStatistics", "LayerNormApply"]
    assert attributes(written.graph.node[0])["splits"] == 25  # parts of 8,192 elements: 64 would be smaller
    proto = model.proto()
    data = feeds(proto)
    assert np.allclose(by_references(written, data)["y"], run_onnxruntime(proto, data)[0], rtol=0, atol=2e-5)


# ------------------------------------------------------------------ what stays


def stays(proto: onnx.ModelProto, reason: str, form: str = "native node", **given: Any) -> None:
    written, account = plugins(proto, **given)
    assert [(a.form, reason in a.reason) for a in account] == [(form, True)], account
    assert [n.op_type for n in written.graph.node] == [n.op_type for n in proto.graph.node]
    data = feeds(proto)
    for one, other in zip(run_onnxruntime(proto, data), run_onnxruntime(written, data), strict=True):
        assert np.array_equal(one, other)


LN = MODELS["LayerNormalization"]
REFUSED: dict[str, tuple[Model, str, str]] = {
    "float64": (LN, "double", "its type is float64"),
    "mean": (
        replace(LN, body="y, m = LayerNormalization(x, gamma, beta)", outputs={"y": "b,s,64", "m": "b,s,1"}),
        "float",
        "its mean or its deviation is also read",
    ),
    "stash": (
        replace(LN, body="y = LayerNormalization<stash_type=11>(x, gamma, beta)"),
        "float",
        "its statistics are in float64",
    ),
    "row": (
        Model("y = LayerNormalization(x, gamma)", {"x": "b,s"}, {"y": "b,s"}, {"gamma": (1,)}, ()),
        "float",
        "the size of its rows",
    ),
    "scale of each row": (
        Model("y = LayerNormalization(x, g)", {"x": "b,s,64", "g": "b,1,64"}, {"y": "b,s,64"}, {}, ()),
        "float",
        "its scale varies from row to row",
    ),
    "BatchNorm by data": (
        Model(
            "n = GlobalAveragePool(x) f = Flatten<axis=0>(n) k = Reshape(f, shape) y = BatchNormalization(x, k, gamma,"
            " gamma, gamma)",
            {"x": "1,4,h,w"},
            {"y": "1,4,h,w"},
            {"gamma": (4,)},
            (),
        ),
        "float",
        "its parameters are not constant",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_takes_stays_with_its_reason(name: str) -> None:
    model, dtype, reason = REFUSED[name]
    proto = model.proto(dtype)
    if name == "BatchNorm by data":
        proto.graph.initializer.append(numpy_helper.from_array(np.array([4], np.int64), "shape"))
    if name in ("stash", "float64"):  # onnxruntime has no such kernel
        _, account = plugins(proto)
        assert reason in account[0].reason
        assert account[0].form == "native node"
        return
    stays(proto, reason)


def own(op: str, inputs: dict[str, list[Any]], outputs: list[str], kind: int = 1, **attrs: Any) -> onnx.ModelProto:
    infos = [helper.make_tensor_value_info(n, kind, shape) for n, shape in inputs.items()]
    node = helper.make_node(op, list(inputs), outputs, domain="normdeploy", stash_type=11 if kind == 11 else 1, **attrs)
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info(o, kind, None) for o in outputs])
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("normdeploy", 1)]
    return helper.make_model(
        graph, opset_imports=imports, functions=[own_op_functions.own_op_body(op, 21)], ir_version=10
    )


@pytest.mark.parametrize(
    ("proto", "reason"),
    [
        (
            own("ModulatedLayerNorm", {"x": ["b", "s", 8], "c": [1, 1, 8], "d": ["b", 1, 8]}, ["y"], epsilon=1e-5),
            "its scale is not known to be one row for each sample",
        ),
        (
            own("AddRMSNorm", {"x": ["b", "s", 8], "r": ["s", 8], "g": [8]}, ["y", "t"], epsilon=1e-5),
            "its two inputs are not known to have the same shape",
        ),
        (
            own("GatedRMSNorm", {"x": ["b", "s", 8], "g": [8], "z": ["s", 8]}, ["y"], epsilon=1e-5),
            "its input and its gate are not known to have the same shape",
        ),
        (
            own(
                "AdaGroupNorm",
                {"x": ["b", 8, "h"], "s": [1, 8, 1], "t": ["b", 8, 1]},
                ["y"],
                epsilon=1e-5,
                num_groups=4,
            ),
            "its scale and its shift are not known to have its input's shape",
        ),
        (
            own("RMSNorm", {"x": ["b", "s", 8], "g": [8]}, ["y"], 11, epsilon=1e-5, axes=[-1]),
            "its statistics are in float64",
        ),
    ],
)
def test_own_ops_that_no_kernel_takes_keep_their_functions(proto: onnx.ModelProto, reason: str) -> None:
    sizes = {"b": 3, "s": 3}
    written, account = plugins(proto)
    assert [(a.form, reason in a.reason) for a in account] == [("function body", True)], account
    assert [f.name for f in written.functions] == [proto.graph.node[0].op_type]
    data = feeds(proto, sizes=sizes)
    for one, other in zip(run_onnxruntime(proto, data), run_onnxruntime(written, data), strict=True):
        assert np.array_equal(one, other)


def test_data_as_a_scale_is_taken_where_it_is_one_row() -> None:
    written, account = plugins(own("RMSNorm", {"x": ["b", "s", 8], "g": [8]}, ["y"], epsilon=1e-5, axes=[-1]))
    assert account[0].form == "plugin RMSNorm"
    assert list(written.graph.node[0].input) == ["x", "g"]


def test_norms_in_bodies_stay() -> None:
    body = "{ y = LayerNormalization(x, gamma) }"
    model = Model(
        "one = Constant<value_int=1>() c = Cast<to=9>(one) y = If (c) <then_branch = t () => (float[b,s,64] y1)"
        f" {body.replace('y =', 'y1 =')}, else_branch = e () => (float[b,s,64] y2) {body.replace('y =', 'y2 =')}>",
        {"x": "b,s,64"},
        {"y": "b,s,64"},
        {"gamma": (64,)},
        (),
    )
    written, account = plugins(model.proto())
    assert [a.form for a in account] == ["native node"] * 2
    assert "a body of If, Loop or Scan, which is not changed" in account[0].reason
    assert not any(is_plugin(n) for n in written.graph.node)


WRONG: dict[str, Callable[[Any], Any]] = {
    "epsilon": lambda right: lambda m, inputs, attrs: right(m, inputs, {**attrs, "epsilon": attrs["epsilon"] * 1.01}),
    "axis": lambda right: lambda m, inputs, attrs: right(m, inputs, {**attrs, "axis": -2}),
    "ddof": lambda right: lambda m, inputs, attrs: right(m, inputs, {**attrs, "ddof": 1}),
    "mean": lambda right: (
        lambda m, inputs, attrs: (m.add(right(m, inputs, attrs)[0], m.mul(m.number(1e-6), inputs[0])),)
    ),
    "bias": lambda right: lambda m, inputs, attrs: right(m, [inputs[0], inputs[1], inputs[1]], attrs),
}


@pytest.mark.parametrize("change", WRONG)
def test_a_kernel_that_says_something_else_is_not_used(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof looks at all of the function: an epsilon off by a hundredth, or the mean's rounding, is found out."""
    monkeypatch.setitem(DEFINITIONS, "LayerNorm", WRONG[change](DEFINITIONS["LayerNorm"]))
    stays(LN.proto(), "it is not proved to compute the same as the file's nodes: ")


def test_a_kernel_whose_meaning_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("out of luck")

    monkeypatch.setitem(DEFINITIONS, "LayerNorm", fails)
    stays(LN.proto(), "LayerNorm can't be evaluated: ValueError: out of luck")


PLANS = {name: m for name, m in MODELS.items() if m.plugins}


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("name", PLANS)
def test_every_plugin_node_is_proved_exactly(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    prove = Rewriter.prove_proposal

    def noted(rewriter: Rewriter, proposal: Proposal) -> DecidedProposal | Failure:
        decided = prove(rewriter, proposal)
        seen.append(decided.certificate if isinstance(decided, DecidedProposal) else decided)
        return decided

    monkeypatch.setattr(Rewriter, "prove_proposal", noted)
    plugins(PLANS[name].portable(dtype))
    assert seen
    assert all(c and c.method == "exact" and c.bits >= 80 for c in seen)


@pytest.mark.parametrize("other", [{"axis": 2}, {"groups": 4}, {"channels_last": 1}])
def test_statistics_of_something_else_are_not_taken(other: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    right = DEFINITIONS["NormStatistics"]
    monkeypatch.setitem(DEFINITIONS, "NormStatistics", lambda m, inputs, attrs: right(m, inputs, {**attrs, **other}))
    _, account = plugins(MODELS["GroupNormalization"].portable(), sizes={"b": 1, "h": 128, "w": 128})
    assert account[0].form == "native node"
    assert "statistics for (axis, groups, channels_last) =" in account[0].reason


@pytest.mark.parametrize(
    ("alpha", "left", "activation"), [("", [], 2), ("<alpha=1.0>", [], 2), ("<alpha=0.5>", ["Swish"], 0)]
)
def test_only_the_swish_that_is_a_silu_is_part_of_the_kernel(alpha: str, left: list[str], activation: int) -> None:
    """SiLU is Swish with alpha 1, its default (onnx, Operators.md)."""
    model = MODELS["BatchNormalization, Relu"]
    proto = replace(model, body=model.body.replace("Relu(", f"Swish{alpha}("), opset=24).proto()
    written, (told,) = plugins(proto)
    assert told.form == "plugin ScaleShift"
    assert [n.op_type for n in written.graph.node] == ["ScaleShift", *left]
    assert attributes(written.graph.node[0])["activation"] == activation
    data = feeds(proto)
    found, expected = by_references(written, data)["y"], by_references(proto, data)["y"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)  # scale and shift are float32, the rest float64


@pytest.mark.parametrize("parameter", ["scale", "shift"])
@pytest.mark.parametrize("activation", ["Relu", "Identity"])
def test_a_parameter_that_is_off_by_two_ulp_is_found(
    activation: str, parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ScaleShift holds numbers that were computed from a BatchNorm's: each is compared with the exact one, before the
    activation too."""
    constant, model = PluginPlanner.make_constant, MODELS["BatchNormalization, Relu"]
    proto = replace(model, body=model.body.replace("Relu", activation)).proto()

    def off(self: PluginPlanner, like: Any, name: str, value: np.ndarray, kind: Any) -> Any:
        made = constant(self, like, name, value, kind)
        if name == parameter:
            made.values.flat[2] *= 1 + 2.0**-22
        return made

    assert plugins(proto)[1][0].form == "plugin ScaleShift"
    monkeypatch.setattr(PluginPlanner, "make_constant", off)
    (told,) = plugins(proto)[1]
    assert told.form == "native node"
    assert "differs by more than half an ulp from" in told.reason


# ------------------------------------------------------------------ functions


def test_functions_that_bear_a_plugin_s_name_get_another() -> None:
    """TensorRT's parser looks for functions by name alone, and before plugins."""
    proto = own("RMSNorm", {"x": ["b", "s", 8], "g": [8]}, ["y"], epsilon=1e-5, axes=[-1])
    wide = helper.make_node("RMSNorm", ["x", "g"], ["z"], domain="normdeploy", stash_type=11, epsilon=1e-5, axes=[-1])
    theirs = helper.make_function(
        "custom", "RMSNorm", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], [helper.make_opsetid("", 21)]
    )
    proto.graph.node.extend([wide, helper.make_node("RMSNorm", ["z"], ["w"], domain="custom")])
    proto.graph.output.append(helper.make_tensor_value_info("w", 1, None))
    proto.functions.append(theirs)
    proto.opset_import.append(helper.make_opsetid("custom", 1))
    written, account = plugins(proto)
    assert [a.form for a in account] == ["plugin RMSNorm", "function body"]
    names = {f.name for f in written.functions}
    assert len(names) == 2
    assert "RMSNorm" not in names
    assert {n.op_type for n in written.graph.node if not is_plugin(n)} == names
    data = feeds(proto, sizes={"b": 2, "s": 3})
    y, w = run_onnxruntime(proto, data)
    plain = onnx.ModelProto()
    plain.CopyFrom(written)
    del plain.graph.node[0], plain.graph.output[0]  # onnxruntime has no plugins
    assert np.array_equal(run_onnxruntime(plain, data)[0], w)
    assert np.allclose(
        by_references(onnx.ModelProto(graph=onnx.GraphProto(node=written.graph.node[:1])), data)["y"], y, rtol=1e-5
    )


# ------------------------------------------------------------------ the table


def test_the_table_has_every_op_that_there_is() -> None:
    assert {op for op in TABLE if op.startswith("normdeploy.")} == {
        f"normdeploy.{op}" for op in own_op_functions.OPS - own_op_functions.WITHOUT_KERNEL
    }
    assert {op.partition(".")[2] for op in TABLE if "." in op} <= set(BY_NAME)


RMS, GN, GN1 = (MODELS[n] for n in ("RMSNormalization", "GroupNormalization", "GroupNormalization of one group"))
GN18 = replace(GN1, opset=18, constants={"gamma": (1,), "beta": (1,)})


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize(
    ("model", "runtime", "version", "became"),
    [
        (RMS, "tensorrt", "10.14.1", ["RMSNorm"]),
        (RMS, "tensorrt", "10.15.1.29", None),
        (RMS, "tensorrt", "", None),
        (RMS, "tensorrt-rtx", "1.4.0.76", None),
        (GN, "tensorrt", "10.8.0", ["Shape", "Reshape", "InstanceNormalization", "Reshape", "Mul", "Add"]),
        (GN, "tensorrt", "10.9.0.34", None),
        (GN, "tensorrt-rtx", "1.4.0.76", None),
        (GN1, "tensorrt", "11.4", ["LayerNormalization"]),
        (GN1, "tensorrt-rtx", "1.7.1", ["LayerNormalization"]),
        (GN18, "tensorrt-rtx", "1.7.1", ["LayerNormalization"]),
        (LN, "tensorrt", "10.9", None),
    ],
)
def test_a_library_gets_the_form_that_it_reads(
    model: Model, runtime: str, version: str, became: list[str] | None, dtype: str
) -> None:
    proto = model.proto(dtype)
    assert needs_native_rewrite(proto, runtime, version) == (became is not None)
    written, account = implement_norms(proto, norm_impl="native", runtime=runtime, version=version)
    ops = [n.op_type for n in written.graph.node]
    if became is None:
        assert written.graph.node == proto.graph.node
        assert account[0].form == "native node"
        return
    assert sorted(op for op in ops if op != "Cast") == sorted(became)
    assert ("Cast" in ops) == (dtype == "float16" and len(became) > 1)
    if model is not GN18:
        onnx.checker.check_model(written)
        data = feeds(proto)
        before, after = run_onnxruntime(proto, data)[0], run_onnxruntime(written, data)[0]
        # the values are of order 1, and each form rounds to the type at its end (float16 once more in the affine)
        assert np.abs(before.astype(float) - after.astype(float)).max() <= {"float": 1e-5, "float16": 8e-3}[dtype]


def test_what_is_right_without_a_measurement() -> None:
    """auto: kernels where TensorRT has no layer of its own."""
    for name, form in {
        "LayerNormalization": "native node",
        "GroupNormalization": "native node",
        "InstanceNormalization": "native node",
        "BatchNormalization, Relu": "native node",
        "RMSNormalization": "plugin RMSNorm",
        "Add, LayerNormalization": "plugin AddLayerNorm",
        "LayerNorm over channels": "plugin ChannelLayerNorm",
        "std + eps": "plugin StdNorm",
    }.items():
        _, account = plugins(MODELS[name].portable(), norm_impl="auto")
        assert [a.form for a in account] == [form], name
        assert ("TensorRT has its own layer for it" in account[0].reason) == (form == "native node")
    assert plugins(MODELS["Mul and Add, SiLU"].portable(), norm_impl="auto")[1] == ()


def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "normdeploy_plugins"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)


@pytest.mark.parametrize(
    ("lacks", "version", "said"),
    [
        (without_triton, "11.4", r"the kernels are compiled with triton, which is not installed; pip install triton"),
        (
            lambda _: None,
            "10.8.0.43",
            r"TensorRT 10\.8 does not support kernels compiled ahead of time; 10\.9 and newer do",
        ),
    ],
)
def test_what_the_kernels_need(
    lacks: Callable[[pytest.MonkeyPatch], None], version: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proto = MODELS["Add, RMSNormalization"].portable()
    lacks(monkeypatch)
    with pytest.raises(RuntimeUnavailable, match=said):
        plugins(proto, version=version)
    written, account = plugins(proto, norm_impl="auto", version=version)
    assert account[0].form == "function body"
    assert re.search(said, account[0].reason)
    assert [f.name for f in written.functions] == ["AddRMSNorm"]
    data = feeds(proto)
    assert np.array_equal(run_onnxruntime(proto, data)[0], run_onnxruntime(written, data)[0])


@pytest.mark.parametrize("version", ["10.9", "10.9.0.34"])
def test_the_first_release_that_takes_kernels_gets_them(version: str) -> None:
    _, account = plugins(MODELS["Add, RMSNormalization"].portable(), version=version)
    assert account[0].form == "plugin AddRMSNorm"


def test_what_can_t_be_asked_for() -> None:
    with pytest.raises(InputError, match="TensorRT-RTX's ONNX parser supports no plugins"):
        implement_norms(LN.proto(), norm_impl="plugin", runtime="tensorrt-rtx")
    with pytest.raises(InputError, match="'fused'; choose one of native, plugin, auto"):
        norm_implementations.check_norm_impl("fused", "tensorrt")


def test_versions() -> None:
    assert parse_version("10.15.1.29") == (10, 15, 1, 29)
    assert parse_version("10.14.1.48.post1") == (10, 14, 1, 48)
    assert parse_version("") == ()


def test_the_model_that_is_given_is_not_changed() -> None:
    proto = MODELS["Add, LayerNormalization"].portable()
    before = proto.SerializeToString(deterministic=True)
    plugins(proto)
    assert proto.SerializeToString(deterministic=True) == before
