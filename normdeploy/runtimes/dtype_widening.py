"""A torch.fx graph with every floating dtype set to another: to float64 (complex to complex128), or float32 to half
precision.

The new type is written into the dtype arguments of the nodes, so upcasts inside a half-precision model, ``arange`` and
``full``, the dtype of a softmax and the bodies of control flow are all reached. Numbers stay as they are: float16's
lowest value in a mask is still that.
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
# return their input itself where the dtype is right
_ALIASING_CASTS = {
    "aten::to",
    "aten::type_as",
    "prims::convert_element_type",
}
# Operators that write a number as it is into a tensor.
_FILLS = frozenset(
    {
        *("full", "full_like", "new_full", "scalar_tensor", "fill", "fill_", "constant_pad_nd", "pad"),
        *("masked_fill", "masked_fill_", "where", "clamp", "clamp_", "clamp_min", "clamp_max", "index_fill"),
        *("hardtanh", "hardtanh_", "scatter", "scatter_"),
    }
)
# Operators that take the epsilon of their input's type where none is given.
_RMS_NORMS = frozenset({"aten::rms_norm", "aten::_fused_rms_norm"})
# its place among their arguments
_EPSILON = 3
# torch compares a tensor with a number in the tensor's type.
_COMPARISONS = frozenset(f"aten::{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_T = TypeVar("_T")
# the type that takes the place of one
Kind = Callable[[torch.dtype], torch.dtype]


def widened_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for a floating dtype, complex128 for a complex one, itself for any other."""
    if dtype.is_floating_point:
        return torch.float64
    if dtype.is_complex:
        return torch.complex128
    return dtype


def half_dtype_map(half: torch.dtype) -> Kind:
    """``half`` for float32 and float64; itself for any other."""
    return lambda dtype: half if dtype in (torch.float32, torch.float64) else dtype


def widen_tensor(value: _T, kind: Kind = widened_dtype) -> _T:
    """A tensor in its new dtype (itself where it is that already); anything else as it is."""
    return value.to(kind(value.dtype)) if isinstance(value, torch.Tensor) else value  # type: ignore[return-value]


def saturate_to_half(value: _T, half: torch.dtype) -> _T:
    """A floating tensor in ``half``, finite numbers beyond its range as its largest or lowest number; anything else as
    it is."""
    if not isinstance(value, torch.Tensor) or half_dtype_map(half)(value.dtype) == value.dtype:
        return value
    limit = torch.finfo(half).max
    clamped = torch.where(value.isinf(), value, value.clamp(-limit, limit))
    return clamped.to(half)  # type: ignore[return-value]


def saturate_fills(module: torch.fx.GraphModule, half: torch.dtype) -> None:
    """Cut the numbers that nodes of ``module`` write into tensors off at the range of ``half``, in place.

    torch refuses to fill a half tensor with a number beyond; factors and divisors stay, since they are read in float32.
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
    """``module`` changed in place, with the graphs of its control flow; returned for convenience.

    Raises:
        NormdeployError: a node looks at the bits of a floating tensor.
    """
    graphs = [m for m in module.modules() if isinstance(m, torch.fx.GraphModule)]
    for m in graphs:
        for node in list(m.graph.nodes):
            _widen_node(m, node, kind)
        m.recompile()
    return module


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
            f"{traced_dtype(node.args[0])}"
            f" tensor as {traced_dtype(node)}, and they are others there; compute it without .view(dtype)"
        )
    narrow = traced_dtype(node)
    if _op_name(node) in _RMS_NORMS:
        _write_out_epsilon(node)
    if _op_name(node) in _COMPARISONS:
        _round_compared_constant(node)
    node.args = map_aggregate(node.args, partial(_widen_argument, kind))  # type: ignore[assignment]
    node.kwargs = map_aggregate(node.kwargs, partial(_widen_argument, kind))  # type: ignore[assignment]
    # which knows no float64, leaves it alone, and warns
    if node.target is torch.ops.higher_order.wrap_with_autocast:
        node.args = (*node.args[:2], False, *node.args[3:])
    if _op_name(node) in _ALIASING_CASTS and traced_dtype(node.args[0]) != narrow:
        _copy_cast_result(module.graph, node)


def _write_out_epsilon(node: torch.fx.Node) -> None:
    """Write out the epsilon that a norm of torch takes of its type where none is given.

    In float64 it would be another number: 2.2e-16. torch takes the machine epsilon of the type in which it computes,
    float32 for half precision (``rms_norm`` in ATen/native/layer_norm.cpp).
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
    """Round the number with which a floating tensor is compared to the tensor's type."""
    tensor, number = node.args
    dtype = traced_dtype(tensor)
    if isinstance(number, float) and dtype is not None and dtype.is_floating_point:
        node.args = (tensor, float(torch.tensor(number, dtype=dtype)))


def _widen_argument(kind: Kind, value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return kind(value)
    return value


def _copy_cast_result(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """A cast that copied has become one that returns its input: copy, lest an in-place operator after it reach the
    input."""
    with graph.inserting_after(node):
        clone = graph.call_function(_aten.clone.default, (node,))
    clone.meta = dict(node.meta)
    node.replace_all_uses_with(clone, delete_user_cb=lambda user: user is not clone)


def _widen_attribute(module: torch.fx.GraphModule, path: str, kind: Kind) -> None:
    """A constant that a graph holds itself instead of taking it as an argument."""
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
