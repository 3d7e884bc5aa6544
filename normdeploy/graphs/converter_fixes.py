"""Refuse or rewrite nodes that onnx's version converter (1.23) knows but converts incorrectly.

- Dropout's mask holds 0 or False below opset 12, and True from opset 12 on. Below opset 10, the mask has the data's
  type.
- Below opset 14, a BatchNormalization with more than one output computes training statistics.
- The converter gives Clip and Pad float32 bounds for every type of data. A Pad in a mode other than constant keeps an
  invalid attribute ``value``. An absent bound of Clip meant float32's largest number, which the converter ignores.
- Softmax accepted axis 1 for a vector too. The converter writes a Softmax that normalizes each element alone.
- From opset 18 on, Resize takes either scales or sizes. Before opset 18, a Resize with sizes had an empty scales input
  too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from ..storage.onnx_domains import is_standard
from ..storage.proto_traversal import attribute_value, iter_subgraphs, unique_name
from .dims import Types
from .region import RefusedError
from .shape_inference import infer_types

_LARGEST = float(np.finfo(np.float32).max)
# Positions of Resize's inputs from opset 11 on.
_SCALES = 2
_SIZES = 3


@dataclass(frozen=True)
class ConverterFacts:
    """Facts about a file that the fixes need.

    Attributes:
        types: types and shapes of the file's tensors.
        read: names that a node reads, and names of graph outputs.
        empty: names of constants without elements.
    """

    types: Types
    read: frozenset[str]
    empty: frozenset[str]


def collect_facts(proto: onnx.ModelProto) -> ConverterFacts:
    """Collect the facts that `require_convertible`, `prepare_for_converter` and `restore_bounds` need.

    Returns: facts of the file before the conversion.
    """
    bodies = [proto.graph, *(body for node in proto.graph.node for body in iter_subgraphs(node))]
    read = {name for body in bodies for node in body.node for name in node.input}
    read |= {output.name for body in bodies for output in body.output}
    types = infer_types(proto)
    fed = {value.name for value in proto.graph.input}
    empty = {tensor.name for tensor in proto.graph.initializer if 0 in tensor.dims and tensor.name not in fed}
    empty |= {
        node.output[0] for node in proto.graph.node if node.op_type == "Constant" and types[node.output[0]][1] == (0,)
    }
    return ConverterFacts(types, frozenset(read), frozenset(empty))


def has_mask(node: onnx.NodeProto) -> bool:
    """Return whether a Dropout has the optional mask output."""
    return node.op_type == "Dropout" and len(node.output) > 1 and bool(node.output[1])


def has_scales_and_sizes(node: onnx.NodeProto) -> bool:
    """Return whether a Resize has both the inputs scales and sizes."""
    return node.op_type == "Resize" and len(node.input) > _SIZES and all(node.input[_SCALES : _SIZES + 1])


def require_convertible(proto: onnx.ModelProto, old: int, new: int, known: ConverterFacts) -> None:
    """Check that each node has an equivalent form at opset ``new``.

    Args:
        old: opset of the file.

    Raises:
        RefusedError: a node has no such form, or its type or rank is unknown.
    """
    for node in proto.graph.node:
        if is_standard(node) and any(old < change <= new for change in _CHANGES.get(node.op_type, ())):
            _require_convertible_node(node, known)


# Op → the opsets in which its definition changed. The checks run only if the conversion crosses one of them.
_CHANGES = {
    "BatchNormalization": (9, 14),
    "Clip": (11,),
    "Dropout": (10, 12),
    "LogSoftmax": (13,),
    "Pad": (11,),
    "Resize": (18,),
    "Softmax": (13,),
}


def _require_convertible_node(node: onnx.NodeProto, known: ConverterFacts) -> None:
    dtype, shape = known.types[node.input[0]]
    if has_mask(node) and node.output[1] in known.read:
        raise RefusedError(
            f"the mask {node.output[1]!r} of a Dropout has another type or other values at the new opset"
        )
    if node.op_type == "BatchNormalization" and any(node.output[1:]):
        raise RefusedError(
            f"the BatchNormalization of {node.output[0]!r} computes training statistics, which differ at the new opset"
        )
    if node.op_type in ("Clip", "Pad") and dtype is None:
        raise RefusedError(
            f"the type of {node.input[0]!r} is unknown, but the new opset needs it for the constants of its "
            f"{node.op_type}"
        )
    if node.op_type in ("Softmax", "LogSoftmax"):
        axis = attribute_value(node, "axis", 1)
        if shape is None:
            raise RefusedError(
                f"the rank of {node.input[0]!r} is unknown, but the axis of its {node.op_type} depends on it"
            )
        if not -len(shape) <= axis < len(shape):
            raise RefusedError(f"{node.input[0]!r} has {len(shape)} dims, but its {node.op_type} has axis {axis}")
    if has_scales_and_sizes(node) and node.input[_SCALES] not in known.empty:
        raise RefusedError(
            f"the Resize of {node.output[0]!r} has both scales and sizes, but the new opset allows only one of them"
        )


def prepare_for_converter(proto: onnx.ModelProto, known: ConverterFacts) -> None:
    """Remove the unread masks of Dropout, and the empty scales of a Resize that has sizes, in place."""
    for node in proto.graph.node:
        if is_standard(node) and has_mask(node) and node.output[1] not in known.read:
            del node.output[1:]
        if is_standard(node) and has_scales_and_sizes(node) and node.input[_SCALES] in known.empty:
            node.input[_SCALES] = ""


def restore_bounds(made: onnx.ModelProto, originals: Mapping[str, onnx.NodeProto], known: ConverterFacts) -> None:
    """Rewrite the bounds of Clip and Pad in the converted model, in place.

    Args:
        made: the converted model.
        originals: name of a node's first output → the node before the conversion.
    """
    names = {name for node in made.graph.node for name in (*node.input, *node.output)}
    nodes: list[onnx.NodeProto] = []
    for node in made.graph.node:
        if node.output:
            before = originals.get(node.output[0])
        else:
            before = None
        if is_standard(node):
            write = _ANEW.get(node.op_type)
        else:
            write = None
        if before is not None and before.op_type == node.op_type and write is not None and len(before.input) == 1:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(known.types[before.input[0]][0])
            for place, value in write(before).items():
                name = unique_name(f"{node.output[0]}_{node.op_type.lower()}_{place}", names)
                with np.errstate(over="ignore"):
                    # A bound above the type's largest number becomes Inf, which does not limit anything.
                    number = np.array(value).astype(dtype)
                tensor = onnx.numpy_helper.from_array(number)
                nodes.append(onnx.helper.make_node("Constant", [], [name], value=tensor))
                node.input.extend([""] * (place + 1 - len(node.input)))
                node.input[place] = name
            for attribute in [a for a in node.attribute if a.name in ("min", "max", "value")]:
                node.attribute.remove(attribute)
        nodes.append(node)
    unread = _find_unread_constants(nodes, originals, {output.name for output in made.graph.output})
    kept = [node for node in nodes if not node.output or node.output[0] not in unread]
    del made.graph.node[:]
    made.graph.node.extend(kept)


def _default_clip_bounds(node: onnx.NodeProto) -> dict[int, float]:
    """Return the position of each bound's input, with the bound's value.

    An absent bound meant float32's largest number, which clips infinities.
    """
    return {1: attribute_value(node, "min", -_LARGEST), 2: attribute_value(node, "max", _LARGEST)}


def _default_pad_value(node: onnx.NodeProto) -> dict[int, float]:
    if attribute_value(node, "mode", b"constant") == b"constant":
        return {2: attribute_value(node, "value", 0.0)}
    return {}


_ANEW = {"Clip": _default_clip_bounds, "Pad": _default_pad_value}


def _find_unread_constants(
    nodes: list[onnx.NodeProto], originals: Mapping[str, onnx.NodeProto], outputs: set[str]
) -> set[str]:
    """Return the names of constants that the converter made and nothing reads."""
    read = outputs | {name for node in nodes for name in node.input}
    made = {n.output[0] for n in nodes if n.op_type == "Constant" and n.output[0] not in originals}
    return made - read
