"""Draw single nodes of ONNX's operators: valid inputs, attributes present and absent, outputs requested or not.

Written from the operators' documents. ``onnx.defs`` gives the attributes, types, inputs and outputs of an operator at
an opset; the tables here list values worth trying. A drawn node need not be valid: if no runtime accepts it, another
one is drawn.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import NodeProto, helper

from .node_draw import Draw
from .node_layers import LAYERS
from .node_tensors import TENSORS

OPS = {**TENSORS, **LAYERS}


def draw_node(rng: np.random.Generator, op: str, opset: int) -> tuple[NodeProto, list[np.ndarray | None]]:
    """Draw a node of ``op`` with inputs named i0, i1, … and outputs o0, o1, ….

    Returns:
        the node, and the arrays of its inputs.
    """
    d = Draw(rng, op, opset)
    with np.errstate(all="ignore"):
        OPS[op](d)
    schema = d.schema
    asked = d.attributes.pop("_outputs", None)
    if asked is None:
        asked = int(rng.integers(schema.min_output, max(schema.min_output, min(schema.max_output, 4)) + 1))
    outputs = [f"o{k}" for k in range(max(asked, 1))]
    # An output that may be absent has no name.
    if len(outputs) > 1 and rng.random() < 0.15 and op not in ("Split",):
        outputs[int(rng.integers(1, len(outputs)))] = ""
    inputs = [f"i{k}" if value is not None else "" for k, value in enumerate(d.inputs)]
    node = helper.make_node(op, inputs, outputs)
    for name, value in d.attributes.items():
        # An empty list does not say its type.
        kind = onnx.AttributeProto.INTS if value == [] else None
        node.attribute.append(helper.make_attribute(name, value, attr_type=kind))
    return node, d.inputs
