"""A change of the model is one of what it computes, not of how its constants are stored."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from normdeploy.passes.model_changes import is_changed
from tests.passes.graphs import model_with_norm


def _rename_nodes(proto: onnx.ModelProto) -> None:
    for node in proto.graph.node:
        node.name = f"{node.name}_renamed"
        node.doc_string = "text"
        del node.metadata_props[:]


def _store_constants(proto: onnx.ModelProto) -> None:
    for node in [n for n in proto.graph.node if n.op_type == "Constant"]:
        tensor = onnx.TensorProto()
        tensor.CopyFrom(node.attribute[0].t)
        tensor.name = node.output[0]
        proto.graph.initializer.append(tensor)
        proto.graph.node.remove(node)


def _declare_shapes(proto: onnx.ModelProto) -> None:
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("hidden", 1, ["batch", 16]))


def _change_weight(proto: onnx.ModelProto) -> None:
    tensor = next(t for t in proto.graph.initializer if t.name == "first")
    array = numpy_helper.to_array(tensor).copy()
    array[0, 0] = np.nextafter(array[0, 0], np.float32(np.inf))
    tensor.CopyFrom(numpy_helper.from_array(array, "first"))


def _change_dtype(proto: onnx.ModelProto) -> None:
    tensor = next(t for t in proto.graph.initializer if t.name == "first")
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), "first"))


def _change_constant(proto: onnx.ModelProto) -> None:
    node = next(n for n in proto.graph.node if n.output[0] == "e")
    node.attribute[0].t.CopyFrom(numpy_helper.from_array(np.float32(1e-6)))


def _change_attribute(proto: onnx.ModelProto) -> None:
    next(n for n in proto.graph.node if n.op_type == "ReduceMean").attribute[0].i = 0


def _rewire(proto: onnx.ModelProto) -> None:
    proto.graph.node[-1].input[0] = "normed"


def _change_function(proto: onnx.ModelProto) -> None:
    proto.functions[0].node[0].op_type = "Mul"


def _raise_opset(proto: onnx.ModelProto) -> None:
    proto.opset_import[0].version += 1


@pytest.mark.parametrize("change", [_rename_nodes, _store_constants, _declare_shapes])
def test_storage_and_names_are_no_change(change: Callable[[onnx.ModelProto], None]) -> None:
    changed = model_with_norm()
    change(changed)
    assert not is_changed(model_with_norm(), changed)


@pytest.mark.parametrize(
    "change",
    [_change_weight, _change_dtype, _change_constant, _change_attribute, _rewire, _change_function, _raise_opset],
)
def test_another_function_is_a_change(change: Callable[[onnx.ModelProto], None]) -> None:
    changed = model_with_norm()
    change(changed)
    assert is_changed(model_with_norm(), changed)
