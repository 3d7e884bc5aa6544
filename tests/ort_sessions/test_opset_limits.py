"""Opsets that the installed onnxruntime loads, and files of newer opsets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import normdeploy
from normdeploy.errors import ExportError, GraphError, InputError
from normdeploy.ort_sessions.opset_limits import describe_unloadable_opset

NEWEST = 28
# The reason names both opsets.
UNLOADABLE = r"onnxruntime \S+ loads opsets up to \d+, and the file has opset {opset}"
needs_newer_opset = pytest.mark.skipif(
    onnx.defs.onnx_opset_version() < NEWEST or not describe_unloadable_opset(27),
    reason="the installed onnx lacks opset 28, or the installed onnxruntime loads opset 27",
)


def norm_behind(node: onnx.NodeProto, opset: int, inputs: dict[str, list], state: list) -> onnx.ModelProto:
    """Write a layer norm in simple ops behind ``node``, whose first output is "s"."""
    nodes = [
        node,
        helper.make_node("ReduceMean", ["s", "axes"], ["mean"]),
        helper.make_node("Sub", ["s", "mean"], ["d"]),
        helper.make_node("Mul", ["d", "d"], ["square"]),
        helper.make_node("ReduceMean", ["square", "axes"], ["variance"]),
        helper.make_node("Add", ["variance", "epsilon"], ["shifted"]),
        helper.make_node("Sqrt", ["shifted"], ["deviation"]),
        helper.make_node("Div", ["d", "deviation"], ["y"]),
    ]
    first = next(iter(inputs.values()))
    outputs = {"y": first} | ({"state": state} if state else {})
    graph = helper.make_graph(
        nodes,
        "norm",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        [
            numpy_helper.from_array(np.array([-1]), "axes"),
            numpy_helper.from_array(np.array(1e-5, np.float32), "epsilon"),
            numpy_helper.from_array(np.ones((8, 1, 4), np.float32), "w"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=12)
    onnx.checker.check_model(model, full_check=True)
    return model


ATTENTION = {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "linear"}
MAKERS = {
    "SwiGLU": lambda: norm_behind(helper.make_node("SwiGLU", ["x", "x"], ["s"]), 28, {"x": ["b", 8]}, []),
    "LinearAttention": lambda: norm_behind(
        helper.make_node("LinearAttention", ["q", "k", "u"], ["s", "state"], **ATTENTION),
        27,
        {name: ["b", "t", 8] for name in ("q", "k", "u")},
        ["b", 2, 4, 4],
    ),
    "CausalConvWithState": lambda: norm_behind(
        helper.make_node("CausalConvWithState", ["x", "w"], ["s", "state"]), 27, {"x": ["b", 8, "t"]}, ["b", 8, 3]
    ),
}


@needs_newer_opset
@pytest.mark.parametrize("op", MAKERS)
def test_optimize_keeps_ops_of_newer_opsets_and_fuses_the_norm(op: str, tmp_path: Path) -> None:
    model = MAKERS[op]()
    opset = model.opset_import[0].version
    with pytest.raises(GraphError, match=UNLOADABLE.format(opset=opset)):
        normdeploy.optimize(model)
    result = normdeploy.optimize(model, runtime="tensorrt", output=tmp_path / "fast.onnx")
    assert [node.op_type for node in result.proto.graph.node] == [op, "LayerNormalization"]
    assert result.proto.graph.node[0] == model.graph.node[0]
    assert result.proto.graph.output == model.graph.output
    assert any("onnxruntime can't load the original model: onnxruntime" in note for note in result.notes)
    onnx.save(model, tmp_path / "plain.onnx")
    with pytest.raises(GraphError, match=UNLOADABLE.format(opset=opset)):
        normdeploy.verify(tmp_path / "plain.onnx", tmp_path / "fast.onnx", seeds=1)


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)).eval()


@pytest.mark.skipif(bool(describe_unloadable_opset(26)), reason="the installed onnxruntime lacks opset 26")
def test_export_opset_above_torchs_keeps_modules_and_is_verified(tmp_path: Path) -> None:
    result = normdeploy.export(net(), torch.ones(2, 4), opset=26, output=tmp_path / "m.onnx")
    assert (result.summary.opset, result.proto.opset_import[0].version) == (26, 26)
    norm = next(node for node in result.proto.graph.node if node.op_type == "LayerNormalization")
    assert {prop.key: prop.value for prop in norm.metadata_props}["normdeploy.module"] == "1"
    assert normdeploy.verify(result, seeds=1)


@needs_newer_opset
def test_export_opset_that_no_runtime_loads_is_refused_or_noted(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=f"{UNLOADABLE.format(opset=28)}. Pass an older --opset"):
        normdeploy.export(net(), torch.ones(2, 4), opset=28, output=tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()
    result = normdeploy.export(net(), torch.ones(2, 4), opset=28, runtime="tensorrt", output=tmp_path / "m.onnx")
    assert onnx.load(tmp_path / "m.onnx").opset_import[0].version == 28
    assert any("checked at opset 25 and then converted" in note for note in result.notes)


def test_export_unknown_opset_is_refused() -> None:
    with pytest.raises(InputError, match="opset 29 can't be written; choose one of 13 to 28"):
        normdeploy.export(net(), torch.ones(2, 4), opset=29)


def test_loadable_opset_has_no_description() -> None:
    assert describe_unloadable_opset(21) == ""
