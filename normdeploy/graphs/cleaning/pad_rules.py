"""Rules for a Pad before a convolution."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from .node_matching import constant_array, constant_integers, input_at, is_understood, replace_node, understood_producer


def merge_pad_into_convolution(graph: ir.Graph, node: ir.Node) -> bool:
    """Move the padding of a Pad into the Conv or ConvInteger that reads it.

    Premises:

    - Pad has the mode constant and the value +0. Its counts are known, ≥ 0, and nonzero only on spatial axes.
    - The convolution pads by counts too (``auto_pad`` is not set).
    - Conv pads x by 0. ConvInteger pads by its zero point, which must be absent or 0. So the windows hold the same
      numbers.
    - The weights are finite. Kernels may skip the products of the padding, and only for a finite w is 0 · w = 0.

    Returns: whether the graph changed.
    """
    op = node.op_type
    if op not in {"Conv", "ConvInteger"} or not is_understood(node, op):
        return False
    pad = understood_producer(node.inputs[0], "Pad")
    if pad is None:
        x = None
    else:
        x = pad.inputs[0]
    if pad is None or x is None or x.shape is None or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return False
    if pad.attributes.get_string("mode", "constant") != "constant" or not _is_zero_or_omitted(input_at(pad, 2)):
        return False
    if op == "ConvInteger" and not _is_zero_or_omitted(input_at(node, 2)):
        return False
    weights = constant_array(node.inputs[1])
    if weights is None or (weights.dtype.kind not in "iu" and not np.isfinite(weights.astype(np.float64)).all()):
        return False
    rank = len(x.shape)
    counts = _pad_counts(pad, rank)
    if counts is None or any(n < 0 for n in counts) or any(counts[:2]) or any(counts[rank : rank + 2]):
        return False
    spatial = [*counts[2:rank], *counts[rank + 2 :]]
    own = node.attributes.get_ints("pads", [0] * len(spatial))
    if len(own) != len(spatial):
        return False
    attributes = {name: attribute for name, attribute in node.attributes.items() if name != "pads"}
    made = ir.Node("", op, [x, *node.inputs[1:]], list(attributes.values()), num_outputs=1)
    made.attributes.add(ir.AttrInt64s("pads", [a + b for a, b in zip(own, spatial, strict=True)]))
    return replace_node(graph, node, made)


def _is_zero_or_omitted(value: ir.Value | None) -> bool:
    """Return whether a number is omitted or +0."""
    if value is None:
        return True
    array = constant_array(value)
    if array is None or array.size != 1:
        return False
    number = array.item()
    return bool(number == 0) and math.copysign(1, number) > 0


def _pad_counts(pad: ir.Node, rank: int) -> list[int] | None:
    """Return the counts before and after each axis, in the order of ONNX's ``pads``; None if they are not constant."""
    stated = constant_integers(input_at(pad, 1))
    axes = constant_integers(input_at(pad, 3))
    if stated is None or (input_at(pad, 3) is not None and axes is None):
        return None
    if axes is None:
        axes = list(range(rank))
    if len(stated) != 2 * len(axes) or len({axis % rank for axis in axes}) != len(axes):
        return None
    counts = [0] * (2 * rank)
    for place, axis in enumerate(axes):
        counts[axis % rank] = stated[place]
        counts[axis % rank + rank] = stated[place + len(axes)]
    return counts
