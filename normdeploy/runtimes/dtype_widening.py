"""Change every floating dtype of a torch.fx graph: to float64 (complex to complex128), or from float32 to half
precision.

The new dtype is written into the dtype arguments of the nodes. This covers upcasts inside a half-precision model,
``arange`` and ``full``, the dtype of a softmax, and the bodies of control flow. Numbers in the graph keep their values:
float16's lowest number in a mask stays the same number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch.fx.node import map_aggregate

from ..errors import NormdeployError
from ..loading.program_signature import traced_dtype

_aten = torch.ops.aten
# Casts that return their input itself, not a copy, if the input already has the target dtype.
_ALIASING_CASTS = {
    "aten::to",
    "aten::type_as",
    "prims::convert_element_type",
}
# Operators that write a number unchanged into a tensor.
_FILLS = frozenset(
    {
        *("full", "full_like", "new_full", "scalar_tensor", "fill", "fill_", "constant_pad_nd", "pad"),
        *("masked_fill", "masked_fill_", "where", "clamp", "clamp_", "clamp_min", "clamp_max", "index_fill"),
        *("hardtanh", "hardtanh_", "scatter", "scatter_"),
    }
)
# Operators whose default epsilon depends on their input's dtype.
_RMS_NORMS = frozenset({"aten::rms_norm", "aten::_fused_rms_norm"})
# Position of the epsilon among the arguments of these norms.
_EPSILON = 3
# Comparisons. torch compares a tensor with a number in the tensor's dtype.
_COMPARISONS = frozenset(f"aten::{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_T = TypeVar("_T")
# Maps each dtype to its replacement.
Kind = Callable[[torch.dtype], torch.dtype]


def widened_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype's widest form.

    Returns:
        float64 for a floating dtype, complex128 for a complex dtype, ``dtype`` itself otherwise.
    """
    if dtype.is_floating_point:
        return torch.float64
    if dtype.is_complex:
        return torch.complex128
    return dtype


def half_dtype_map(half: torch.dtype) -> Kind:
    """Make a map of dtypes to half precision.

    Returns:
        A function that maps float32 and float64 to ``half`` and other dtypes to themselves.
    """
    return lambda dtype: half if dtype in (torch.float32, torch.float64) else dtype


def widen_tensor(value: _T, kind: Kind = widened_dtype) -> _T:
    """Convert a tensor to the dtype that ``kind`` gives.

    Returns:
        The converted tensor; ``value`` itself if it already has the dtype or is not a tensor.
    """
    return value.to(kind(value.dtype)) if isinstance(value, torch.Tensor) else value  # type: ignore[return-value]


def saturate_to_half(value: _T, half: torch.dtype) -> _T:
    """Convert a float32 or float64 tensor to ``half``; finite numbers beyond its range become its largest or lowest
    number.

    Returns:
        The converted tensor; any other value is returned unchanged.
    """
    if not isinstance(value, torch.Tensor) or half_dtype_map(half)(value.dtype) == value.dtype:
        return value
    limit = torch.finfo(half).max
    clamped = torch.where(value.isinf(), value, value.clamp(-limit, limit))
    return clamped.to(half)  # type: ignore[return-value]


def saturate_fills(module: torch.fx.GraphModule, half: torch.dtype) -> None:
    """Clip the numbers that nodes of ``module`` write into tensors to the range of ``half``, in place.

    torch refuses to fill a half tensor with a larger number. Factors and divisors are not clipped, since torch reads
    them in float32.
    """
    limit = torch.finfo(half).max

    def clip_value(value: Any) -> Any:
        if isinstance(value, float) and math.isfinite(value):
            return max(-limit, min(limit, value))
        return value

    for inner in (m for m in module.modules() if isinstance(m, torch.fx.GraphModule)):
        for node in inner.graph.nodes:
            if _op_name(node).partition("::")[2] in _FILLS:
                node.args = map_aggregate(node.args, clip_value)
                node.kwargs = map_aggregate(node.kwargs, clip_value)
            if node.op == "get_attr":
                held = getattr(inner, str(node.target), None)
            else:
                held = None
            if isinstance(held, torch.Tensor) and str(node.target) not in inner._parameters:
                setattr(inner, str(node.target), saturate_to_half(held.detach(), half))
        inner.recompile()


def widen_graph(module: torch.fx.GraphModule, kind: Kind = widened_dtype) -> torch.fx.GraphModule:
    """Change the dtypes of ``module`` and of its control-flow graphs, in place.

    Args:
        kind: maps each dtype to its replacement.

    Returns:
        ``module``.

    Raises:
        NormdeployError: a node reinterprets the bits of a floating tensor.
    """
    graphs = [m for m in module.modules() if isinstance(m, torch.fx.GraphModule)]
    for m in graphs:
        for node in list(m.graph.nodes):
            _widen_node(m, node, kind)
        _reshape_views(m.graph)
        m.recompile()
    return module


def _reshape_views(graph: torch.fx.Graph) -> None:
    """Replace each view by a reshape, which copies the tensor if its strides do not fit.

    Some kernels, such as that of attention, order their result in memory by the dtype. A copy would lose what a later
    operator writes into the view, so a graph that writes into tensors is not changed.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if any(getattr(getattr(node.target, "_schema", None), "is_mutable", False) for node in calls):
        return
    for node in calls:
        if node.target is _aten.view.default:
            node.target = _aten.reshape.default


def _widen_node(module: torch.fx.GraphModule, node: torch.fx.Node, kind: Kind) -> None:
    if node.op == "get_attr":
        _widen_attribute(module, str(node.target), kind)
    if node.op != "call_function":
        return
    if node.target is _aten._assert_tensor_metadata.default:
        module.graph.erase_node(node)
        return
    if node.target is _aten.view.dtype and traced_dtype(node) != traced_dtype(node.args[0]):
        raise NormdeployError(
            f"it can't be run in {kind(torch.float32)}: node {node.name!r} reads the bits of a "
            f"{traced_dtype(node.args[0])} tensor as {traced_dtype(node)}, and a wider tensor has other bits; "
            "compute it without .view(dtype)"
        )
    narrow = traced_dtype(node)
    if _op_name(node) in _RMS_NORMS:
        _write_out_epsilon(node)
    if _op_name(node) in _COMPARISONS:
        _round_compared_constant(node)
    node.args = map_aggregate(node.args, partial(_widen_argument, kind))  # type: ignore[assignment]
    node.kwargs = map_aggregate(node.kwargs, partial(_widen_argument, kind))  # type: ignore[assignment]
    # Autocast does not support float64: it does not cast such tensors, and it warns.
    if node.target is torch.ops.higher_order.wrap_with_autocast:
        node.args = (*node.args[:2], False, *node.args[3:])
    if _op_name(node) in _ALIASING_CASTS and traced_dtype(node.args[0]) != narrow:
        _copy_cast_result(module.graph, node)


def _write_out_epsilon(node: torch.fx.Node) -> None:
    """Write out the default epsilon of a torch norm, which depends on the dtype.

    The default is the machine epsilon of the dtype in which torch computes: float32 for half precision (``rms_norm`` in
    ATen/native/layer_norm.cpp). In float64 the default would change to 2.2e-16.
    """
    if len(node.args) > _EPSILON:
        stated = node.args[_EPSILON]
    else:
        stated = node.kwargs.get("eps")
    dtype = traced_dtype(node.args[0])
    if stated is not None or dtype is None:
        return
    epsilon = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    node.args = node.args[:_EPSILON]
    node.kwargs = {**node.kwargs, "eps": epsilon}


def _round_compared_constant(node: torch.fx.Node) -> None:
    """Round the number that a floating tensor is compared with to the tensor's dtype."""
    tensor, number = node.args
    dtype = traced_dtype(tensor)
    if isinstance(number, float) and dtype is not None and dtype.is_floating_point:
        node.args = (tensor, float(torch.tensor(number, dtype=dtype)))


def _widen_argument(kind: Kind, value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return kind(value)
    return value


def _copy_cast_result(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Copy the result of a cast that returned a copy before widening and now returns its own input. Without the copy,
    an in-place operator on the result would change that input.
    """
    with graph.inserting_after(node):
        clone = graph.call_function(_aten.clone.default, (node,))
    clone.meta = dict(node.meta)
    node.replace_all_uses_with(clone, delete_user_cb=lambda user: user is not clone)


def _widen_attribute(module: torch.fx.GraphModule, path: str, kind: Kind) -> None:
    """Widen a constant that the graph holds as an attribute of its module, not as an argument."""
    owner, _, name = path.rpartition(".")
    holder = module.get_submodule(owner)
    value = getattr(holder, name)
    if isinstance(value, torch.Tensor):
        wider = widen_tensor(value.detach(), kind)
        if name in holder._parameters:
            del holder._parameters[name]
        setattr(holder, name, wider)


def _op_name(node: torch.fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return schema.name
    return ""
