"""Translate scaled_dot_product_attention of tensors that do not have four dims, or with a negative scale.

torch accepts any number of leading dims: (batch, length, width) without heads, or (batch, windows, heads, length,
width). torch's exporter (2.13, onnxscript 0.7.2) stops with "only 4D query, key, and value are supported", and takes
the square root of a negative scale. This translation writes the same nodes as the exporter, with a transpose that suits
the rank.

The translation is used only for programs with such an attention, because it would otherwise replace the Attention nodes
of opset 23.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import nn as torchlib

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_EXPORTED_RANK = 4


def attention_translations(program: torch.export.ExportedProgram) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the translation of attentions for a program, in the format of ``custom_translation_table``.

    Returns:
        an empty table if the exporter can write every attention of ``program`` itself.
    """
    for part in program.graph_module.modules():
        if not isinstance(part, torch.fx.GraphModule):
            continue
        for node in part.graph.nodes:
            if node.target is _ATTENTION and not _is_exported_by_torch(node):
                return {_ATTENTION: scaled_dot_product_attention}
    return {}


def _is_exported_by_torch(node: torch.fx.Node) -> bool:
    scale = node.kwargs.get("scale")
    if isinstance(scale, float) and scale < 0:
        return False
    return all(_rank(argument) == _EXPORTED_RANK for argument in node.args[:3])


def _rank(argument: Any) -> int:
    value = argument.meta.get("val") if isinstance(argument, torch.fx.Node) else None
    return value.dim() if isinstance(value, torch.Tensor) else _EXPORTED_RANK


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Compute softmax(query · keyᵀ · scale + mask) · value over the last two dims.

    Args:
        query: shape (..., L, E).
        key, value: shapes (..., S, E) and (..., S, V). Leading dims are broadcast, and the ranks may differ.
        attn_mask: bool or float, broadcast to (..., L, S).
        enable_gqa: whether each head of key and value, at axis -3, serves several consecutive heads of the query.

    Returns:
        shape (..., L, V).
    """
    ranks = {len(tensor.shape) for tensor in (query, key, value)}
    if ranks == {_EXPORTED_RANK} and (scale is None or scale >= 0):
        return torchlib.aten_scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def make_constant(number: float) -> Any:
        return op.Constant(value=ir.tensor(np.array(number, query.dtype.numpy())))

    rank = len(key.shape)
    if enable_gqa:
        key = _repeat_heads(key, query)
        value = _repeat_heads(value, query)
    transposed = op.Transpose(key, perm=[*range(rank - 2), rank - 1, rank - 2])
    # Both factors are scaled before the product, as in PyTorch, so that a half product does not overflow.
    root = _root_of_scale(query, scale, make_constant)
    scaled = op.Mul(query, root)
    if scale is not None and scale < 0:
        scaled = op.Neg(scaled)
    scores = op.MatMul(scaled, op.Mul(transposed, root))
    if attn_mask is None and not is_causal:
        return op.MatMul(op.Softmax(scores, axis=-1), value)
    if not is_causal and attn_mask.dtype != ir.DataType.BOOL:
        return op.MatMul(op.Softmax(op.Add(scores, op.CastLike(attn_mask, scores)), axis=-1), value)
    # These are the exporter's nodes for a bool mask. ``fix_hidden_rows`` corrects rows that the mask hides completely.
    if is_causal:
        attn_mask = _causal_mask(query, key)
    zero = make_constant(0.0)
    added = op.Where(attn_mask, zero, make_constant(float(query.dtype.min)))
    weights = op.Softmax(op.Add(scores, added), axis=-1)
    return op.MatMul(op.Where(op.IsNaN(weights), zero, weights), value)


def _repeat_heads(tensor: Any, query: Any) -> Any:
    """Repeat each head of key or value, at axis -3, until there are as many heads as in the query."""
    repeats = op.Div(op.Shape(query, start=-3, end=-2), op.Shape(tensor, start=-3, end=-2))
    ones = op.Constant(value=ir.tensor(np.ones(2, np.int64)))
    minus_one = op.Constant(value=ir.tensor(np.array([-1], np.int64)))
    # (..., heads, 1, S, E) → (..., heads, repeats, S, E) → (..., heads · repeats, S, E)
    repeated = op.Expand(
        op.Unsqueeze(tensor, op.Constant(value=ir.tensor(np.array([-3], np.int64)))), op.Concat(repeats, ones, axis=0)
    )
    shape = op.Concat(op.Shape(tensor, start=0, end=-3), minus_one, op.Shape(tensor, start=-2), axis=0)
    return op.Reshape(repeated, shape)


def _root_of_scale(query: Any, scale: float | None, make_constant: Callable[[float], Any]) -> Any:
    """Compute the square root of the scale's absolute value; without a scale, of 1/√E."""
    if scale is not None:
        return make_constant(math.sqrt(abs(scale)))
    width = query.shape[-1]
    if isinstance(width, int):
        return make_constant(width**-0.25)
    return op.Sqrt(op.Reciprocal(op.Sqrt(op.CastLike(op.Shape(query, start=-1), query))))


def _causal_mask(query: Any, key: Any) -> Any:
    """Compute the bool mask (L, S) that shows key s to query l if s ≤ l."""
    lengths = op.Concat(op.Shape(query, start=-2, end=-1), op.Shape(key, start=-2, end=-1), axis=0)
    ones = op.Expand(op.Constant(value=ir.tensor(np.array(1, np.int64))), lengths)
    return op.Cast(op.Trilu(ones, upper=0), to=ir.DataType.BOOL)
