"""Translate scaled_dot_product_attention of tensors that do not have four dims.

torch accepts any number of leading dims: (batch, length, width) without heads, or (batch, windows, heads, length,
width). torch's exporter (2.13, onnxscript 0.7.2) stops with "only 4D query, key, and value are supported". This
translation writes the same nodes as the exporter, with a transpose that suits the rank.

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
            if node.target is _ATTENTION and any(_rank(argument) != _EXPORTED_RANK for argument in node.args[:3]):
                return {_ATTENTION: scaled_dot_product_attention}
    return {}


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
        key, value: shapes (..., S, E) and (..., S, V).
        attn_mask: bool or float, broadcast to (..., L, S).

    Returns:
        shape (..., L, V).
    """
    ranks = {len(tensor.shape) for tensor in (query, key, value)}
    if ranks == {_EXPORTED_RANK}:
        return torchlib.aten_scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def make_constant(number: float) -> Any:
        return op.Constant(value=ir.tensor(np.array(number, query.dtype.numpy())))

    rank = len(key.shape)
    transposed = op.Transpose(key, perm=[*range(rank - 2), rank - 1, rank - 2])
    # Both factors are scaled before the product, as in PyTorch, so that a half product does not overflow.
    root = _root_of_scale(query, scale, make_constant)
    scores = op.MatMul(op.Mul(query, root), op.Mul(transposed, root))
    if attn_mask is None and not is_causal:
        return op.MatMul(op.Softmax(scores, axis=-1), value)
    if not is_causal and attn_mask.dtype != ir.DataType.BOOL:
        return op.MatMul(op.Softmax(op.Add(scores, attn_mask), axis=-1), value)
    # These are the exporter's nodes for a bool mask. ``fix_hidden_rows`` corrects rows that the mask hides completely.
    if is_causal:
        attn_mask = _causal_mask(query, key)
    zero = make_constant(0.0)
    added = op.Where(attn_mask, zero, make_constant(float(query.dtype.min)))
    weights = op.Softmax(op.Add(scores, added), axis=-1)
    return op.MatMul(op.Where(op.IsNaN(weights), zero, weights), value)


def _root_of_scale(query: Any, scale: float | None, make_constant: Callable[[float], Any]) -> Any:
    """Compute the square root of the scale; without a scale, of 1/√E."""
    if scale is not None:
        return make_constant(math.sqrt(scale))
    width = query.shape[-1]
    if isinstance(width, int):
        return make_constant(width**-0.25)
    return op.Sqrt(op.Reciprocal(op.Sqrt(op.CastLike(op.Shape(query, start=-1), query))))


def _causal_mask(query: Any, key: Any) -> Any:
    """Compute the bool mask (L, S) that shows key s to query l if s ≤ l."""
    rank = len(query.shape)
    lengths = op.Concat(
        op.Shape(query, start=rank - 2, end=rank - 1), op.Shape(key, start=rank - 2, end=rank - 1), axis=0
    )
    ones = op.Expand(op.Constant(value=ir.tensor(np.array(1, np.int64))), lengths)
    return op.Cast(op.Trilu(ones, upper=0), to=ir.DataType.BOOL)
