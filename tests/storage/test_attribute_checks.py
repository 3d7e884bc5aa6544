"""Attributes that runtimes read as other numbers than the file states."""

from __future__ import annotations

from pathlib import Path

import onnx.parser
import pytest

from normdeploy.errors import GraphError
from normdeploy.storage.attribute_checks import require_attributes
from normdeploy.storage.onnx_files import load_onnx


def node(text: str) -> onnx.NodeProto:
    return onnx.parser.parse_node(f"y = {text} (x)")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Softmax <axis = 9223372036854775807>", "Softmax '' has the attribute axis = 9223372036854775807"),
        ("LogSoftmax <axis = -4294967297>", "axis = -4294967297"),
        ("ReduceMean <keepdims = 4294967296>", "keepdims = 4294967296"),
        ("MaxPool <kernel_shape = [2, 4294967298]>", "kernel_shape = 4294967298"),
        ("GatherND <batch_dims = -1>", "batch_dims below 0"),
        ("Cast <to = 99>", "casts to the type 99"),
    ],
)
def test_require_attributes_number_that_is_cut_is_refused(text: str, words: str) -> None:
    with pytest.raises(GraphError, match=words):
        require_attributes([node(text)])


@pytest.mark.parametrize(
    "text",
    [
        "Softmax <axis = -1>",
        # Values and the ends of ranges are read in 64 bits.
        "Constant <value_int = 9223372036854775807>",
        "Slice <starts = [0], ends = [9223372036854775807], axes = [0]>",
        "Shape <end = 9223372036854775807>",
        "EyeLike <k = 4294967296>",
        "my.own.Twist <axis = 9223372036854775807>",
        "Softmax <axis : int = @axis>",
    ],
)
def test_require_attributes_other_number_is_taken(text: str) -> None:
    require_attributes([node(text)])


def test_load_onnx_axis_in_a_body_is_refused(tmp_path: Path) -> None:
    text = (
        '<ir_version: 10, opset_import: ["": 21]> g (bool b, float[2, 8] x) => (float[2, 8] y) { y = If (b)'
        " <then_branch = t () => (float[2, 8] p) { p = Softmax <axis = 4294967297> (x) },"
        " else_branch = e () => (float[2, 8] q) { q = Relu (x) }> }"
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    with pytest.raises(GraphError, match="axis = 4294967297, which runtimes truncate to 32 bits"):
        load_onnx(path)


@pytest.mark.parametrize(
    "nodes",
    [
        "y = Cast <to : int = @kind> (x)",
        "y = my.own.Twist <axis : int = @axis> (x)",
        "y = If (b) <then_branch = t () => (float[2, 8] p) { p = Softmax <axis : int = @axis> (x) },"
        " else_branch = e () => (float[2, 8] q) { q = Relu (x) }>",
    ],
)
def test_load_onnx_attribute_of_no_function_is_refused(nodes: str, tmp_path: Path) -> None:
    text = (
        '<ir_version: 10, opset_import: ["": 21, "my.own": 1]> g (bool b, float[2, 8] x) => (float[2, 8] y)'
        f" {{ {nodes} }}"
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    with pytest.raises(GraphError, match="but the node is not in a function; the file is damaged"):
        load_onnx(path)
