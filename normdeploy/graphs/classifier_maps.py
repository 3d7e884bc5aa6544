"""Read a classifier's maps as an array.

ZipMap turns the scores of a row, [N, classes], into a map from class to score. skl2onnx writes it by default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from ..storage.proto_traversal import copy_model

_ZIP = "ZipMap"


def replace_map_outputs(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Replace each ZipMap by a Gather that sorts the scores by class.

    Returns: a changed copy; ``proto`` itself if it has no ZipMap.
    """
    if not any(node.op_type == _ZIP for node in proto.graph.node):
        return proto
    proto = copy_model(proto)
    made = set[str]()
    for node in proto.graph.node:
        if node.op_type != _ZIP:
            continue
        (classes,) = (onnx.helper.get_attribute_value(a) for a in node.attribute if a.name.startswith("classlabels"))
        order = f"{node.output[0]}_order"
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.argsort(np.asarray(classes)), order))
        gather = onnx.helper.make_node("Gather", [node.input[0], order], list(node.output), name=node.name, axis=1)
        node.CopyFrom(gather)
        made.update(node.output)
    for output in proto.graph.output:
        if output.name in made:
            output.CopyFrom(onnx.helper.make_tensor_value_info(output.name, onnx.TensorProto.FLOAT, None))
    return proto


def map_values_to_array(rows: Sequence[Mapping[Any, float]]) -> np.ndarray:
    """Convert maps to an array with the classes in ascending order.

    Args:
        rows: one map from class to score per row.

    Returns: float32 [rows, classes].
    """
    return np.array([[row[key] for key in sorted(row)] for row in rows], np.float32)
