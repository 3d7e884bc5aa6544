"""Find the inputs of an exported program that are attention masks: inputs that select the keys to which an attention
attends.

From each integer, bool or floating input, the search follows operators whose result is still a mask: views, casts,
comparisons, logic, sums, products, and selections. The input is a mask if the search reaches the mask of an attention
or the input of a softmax. An embedding, a matmul or a convolution ends the search, since its results are features and
not masks.
"""

from __future__ import annotations

import torch

from .program_signature import user_inputs
from .shape_expressions import split_words
from .train_mode_checks import bind_node_arguments, plain_operator_name

_KEEPING = split_words(
    "view _unsafe_view reshape unsqueeze squeeze expand expand_as broadcast_to slice select narrow transpose permute"
    " movedim t contiguous clone alias detach flatten unflatten repeat repeat_interleave to _to_copy type_as"
    " lift_fresh_copy index eq ne gt ge lt le logical_and logical_or logical_not logical_xor bitwise_and bitwise_or"
    " bitwise_not bitwise_xor __and__ __or__ add sub rsub mul where masked_fill cat pad constant_pad_nd all any"
)
_ATTENTION = "scaled_dot_product_attention"
_SOFTMAX = split_words("softmax _softmax _safe_softmax special_softmax log_softmax _log_softmax")


def find_attention_masks(program: torch.export.ExportedProgram) -> set[str]:
    """Find the inputs that hide keys of an attention.

    Returns:
        Placeholder names.
    """
    inputs = {item.name for item in user_inputs(program)}
    return {
        node.name
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in inputs and _is_attention_mask(node)
    }


def _is_attention_mask(placeholder: torch.fx.Node) -> bool:
    value = placeholder.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.is_complex() or value.dim() < 2:
        return False
    seen = {placeholder}
    stack = [placeholder]
    while stack:
        node = stack.pop()
        for user in node.users:
            name = plain_operator_name(user)
            if name in _SOFTMAX or (name == _ATTENTION and bind_node_arguments(user).get("attn_mask") is node):
                return True
            if name in _KEEPING and user not in seen:
                seen.add(user)
                stack.append(user)
    return False
