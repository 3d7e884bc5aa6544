"""Fix nodes from torch's exporter that onnxruntime does not run, or computes differently from PyTorch.

- Conv: for a 3-D convolution without bias, torch_lib writes a bias of zeros with the wrong shape (channels, 2). The fix
  removes a bias of zeros.
- Attention (opset 23): in ONNX, the mask may broadcast to (batch, heads, queries, keys). onnxruntime requires the full
  size of the mask's last two dims (``attention_helper.h``, onnxruntime 1.31).
- Clip with the lower bound 0 and no upper bound: onnxruntime (1.31, CPU) uses the type's largest number as upper bound
  and turns Inf into 3.4e38. PyTorch keeps Inf. The fix replaces the Clip by Max, which keeps Inf too. An example is
  `torch.cdist`, which clamps a square before it takes the root. A Clip with other bounds is not changed, because the
  proof of normdeploy's own op L2Norm needs a Clip of a root, and because onnxruntime merges Relu and Clip.
"""

from __future__ import annotations

import onnx_ir as ir

_COPIES = ("Expand", "Cast", "CastLike", "Identity")


def apply_fixes(graph: ir.Graph) -> None:
    """Fix every node of ``graph`` and of the bodies in it, in place."""
    for node in list(ir.traversal.RecursiveGraphIterator(graph)):
        if node.domain == "" and node.op_type in ("Conv", "ConvTranspose"):
            _drop_zero_bias(node)
        elif node.domain == "" and node.op_type == "Attention":
            _expand_attention_mask(node)
        elif node.domain == "" and node.op_type == "Clip":
            _replace_by_max(node)


def _drop_zero_bias(node: ir.Node) -> None:
    """Remove a Conv's bias if it is an Expand of zeros."""
    if len(node.inputs) > 2:
        bias = node.inputs[2]
    else:
        bias = None
    if bias is None:
        maker = None
    else:
        maker = bias.producer()
    if maker is None or maker.op_type != "Expand" or not _is_all_zero(bias):
        return
    node.resize_inputs(2)
    _remove_unread_nodes(maker)


def _is_all_zero(value: ir.Value | None) -> bool:
    """Return True if a tensor is copied or expanded from a constant that contains only zeros."""
    while value is not None and (maker := value.producer()) is not None and maker.op_type in _COPIES:
        value = maker.inputs[0]
    if value is None:
        constant = None
    else:
        constant = ir.convenience.get_const_tensor(value)
    return constant is not None and not constant.numpy().any()


def _remove_unread_nodes(node: ir.Node) -> None:
    """Remove a node without readers, and also the nodes before it whose outputs no other node reads."""
    if any(out.uses() or out.is_graph_output() for out in node.outputs) or node.graph is None:
        return
    makers = {maker for value in node.inputs if value is not None and (maker := value.producer()) is not None}
    node.graph.remove(node, safe=True)
    for maker in makers:
        _remove_unread_nodes(maker)


def _expand_attention_mask(node: ir.Node) -> None:
    """Expand the mask to (..., queries, keys) unless its last two dims are known to be full."""
    query, key, _, mask, past, *_ = (*node.inputs, None, None)
    if query is None or key is None or mask is None or past is not None or node.graph is None:
        return
    wanted = [_dim_at(query), _dim_at(key)]
    if None not in wanted and [_dim_at(mask), _dim_at(mask, -1)] == wanted:
        return
    rows, columns = (ir.node("Shape", [value], {"start": -2, "end": -1}) for value in (query, key))
    full = ir.node("Concat", [rows.outputs[0], columns.outputs[0]], {"axis": 0})
    spread = ir.node("Expand", [mask, full.outputs[0]])
    out = spread.outputs[0]
    out.name = f"{mask.name}_full"
    out.type = mask.type
    made = [rows, columns, full, spread]
    for new in made:
        new.metadata_props.update(node.metadata_props)
    node.graph.insert_before(node, made)
    node.replace_input_with(3, out)


def _replace_by_max(node: ir.Node) -> None:
    """Replace a floating Clip from zero without an upper bound by Max."""
    data, low, high, *_ = (*node.inputs, None, None)
    if (
        data is None
        or low is None
        or high is not None
        or data.dtype is None
        or not data.dtype.is_floating_point()
        or node.graph is None
    ):
        return
    if not _is_all_zero(low):
        return
    (out,) = node.outputs
    made = ir.node("Max", [data, low], name=node.name)
    made.outputs[0].name = out.name
    made.outputs[0].type = out.type
    made.outputs[0].shape = out.shape
    made.metadata_props.update(node.metadata_props)
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], [made], [out], made.outputs)


def _dim_at(value: ir.Value, axis: int = -2) -> int | str | None:
    """Return a size or its symbol; None if the shape or the size is unknown."""
    if value.shape is None or len(value.shape) < -axis:
        return None
    dim = value.shape[axis]
    if isinstance(dim, int):
        return dim
    return dim.value
