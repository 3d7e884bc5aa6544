"""Write the Split that torch's exporter spells as SplitToSequence and SequenceAt.

The exporter returns the list of ``torch.split`` as a sequence, and reads each part with SequenceAt. Rewrites and
runtimes know Split. Both spellings move the same elements, so no number changes.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

# Opset from which a Split takes its sizes as an input
_SINCE = 13


def write_splits(graph: ir.Graph) -> None:
    """Replace each SplitToSequence whose parts are known, and whose readers are SequenceAt, by a Split.

    Args:
        graph: changed in place; its opset is 13 or newer.
    """
    for node in list(graph):
        if node.op_type == "SplitToSequence" and node.domain == "" and graph.opset_imports.get("", 0) >= _SINCE:
            _write_split(graph, node)


def _write_split(graph: ir.Graph, node: ir.Node) -> None:
    sizes = _part_sizes(node)
    readers = [reader for reader, _ in node.outputs[0].uses()]
    if sizes is None or len(sizes) < 2 or node.outputs[0].is_graph_output():
        return
    if any(reader.op_type != "SequenceAt" or reader.domain != "" for reader in readers):
        return
    places = [_constant_array(reader.inputs[1]) for reader in readers]
    if not all(place is not None and -len(sizes) <= int(place) < len(sizes) for place in places):
        return
    lengths = ir.node("Constant", [], {"value_ints": sizes})
    split = ir.node("Split", [node.inputs[0], lengths.outputs[0]], {"axis": _split_axis(node)}, num_outputs=len(sizes))
    for key, text in node.metadata_props.items():
        split.metadata_props[key] = text
    graph.insert_before(node, [lengths, split])
    for reader, place in zip(readers, places, strict=True):
        old = reader.outputs[0]
        part = split.outputs[int(place) % len(sizes)]  # type: ignore[arg-type]
        if part.name is None:
            part.name, part.type, part.shape = old.name, old.type, old.shape
            part.metadata_props.update(old.metadata_props)
        ir.convenience.replace_all_uses_with(old, part, replace_graph_outputs=True)
    graph.remove([*readers, node], safe=True)


def _split_axis(node: ir.Node) -> int:
    return node.attributes.get_int("axis", 0)


def _part_sizes(node: ir.Node) -> list[int] | None:
    """Return the sizes of the parts; None if they are unknown, or if the parts lose the axis."""
    data = node.inputs[0]
    told = _constant_array(node.inputs[1]) if len(node.inputs) > 1 else None
    if told is None or data is None or data.shape is None or node.attributes.get_int("keepdims", 1) == 0:
        return None
    if told.ndim:
        return [int(n) for n in told]
    # One number is the size of each part, and the last part may be shorter.
    step = int(told)
    size = data.shape[_split_axis(node)]
    if not isinstance(size, int) or step < 1:
        return None
    return [min(step, size - start) for start in range(0, size, step)]


def _constant_array(value: ir.Value | None) -> np.ndarray | None:
    held = None if value is None else ir.convenience.get_const_tensor(value)
    return None if held is None else held.numpy()
