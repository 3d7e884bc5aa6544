"""Expand onnxruntime's MatMulNBits into a blocked DequantizeLinear and a MatMul.

Y = A · Wᵀ + bias, with W[n, k] = (code − zero point) · scale of k's block. The codes of a block are packed into whole
bytes, lowest bits first. The zero points of a row of W are packed the same way. If zero points are missing, the zero
point is half the range of the codes
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.MatMulNBits).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import numpy as np
import onnx
from onnx import helper

from .quantization_info import DEQUANTIZE

_BITS = (2, 4, 8)
# Value of the attribute ``accuracy_level`` at which the kernel also quantizes A, to 8 bits.
_EIGHT_BIT_ACTIVATIONS = 4


def is_plain_form(node: onnx.NodeProto, weights: Collection[str]) -> bool:
    """Return whether a node has the plain form.

    Args:
        weights: names of the initializers.

    Returns: True if the codes are stored and not reordered, and activations are not rounded.
    """
    attributes = {a.name: a.i for a in node.attribute}
    _, *stored, order = [*node.input, *[""] * 5][:5]
    if order or attributes.get("accuracy_level", 0) == _EIGHT_BIT_ACTIVATIONS:
        return False
    return attributes.get("bits", 4) in _BITS and all(name in weights for name in stored if name)


def expand_node(
    node: onnx.NodeProto,
    fresh: Callable[[str], str],
    constant: Callable[[str, np.ndarray], str],
    stored: Callable[[str], np.ndarray | None],
) -> Iterator[onnx.NodeProto]:
    """Expand a node for which `is_plain_form` holds. Each new node has the original node's name.

    Args:
        fresh: makes a tensor name that is not in use yet.
        constant: adds an initializer under an unused name and returns the name.
        stored: returns the value of an initializer; None for any other tensor.

    Yields: the new nodes in topological order.
    """
    attributes = {a.name: a.i for a in node.attribute}
    n, k, block, bits = (attributes[name] for name in ("N", "K", "block_size", "bits"))
    blocks = -(-k // block)
    x, codes, scales, zeros, _, bias = [*node.input, *[""] * 6][:6]
    value = stored(codes)
    scale = stored(scales)
    assert value is not None
    assert scale is not None
    zero = np.full((n, blocks), 1 << (bits - 1), np.uint8)
    if zeros:
        given = stored(zeros)
        assert given is not None
        zero = _unpack_codes(given.reshape(n, -1), bits)[:, :blocks]
    whole = _unpack_codes(value.reshape(n, blocks, -1), bits)[..., :block].reshape(n, -1)[:, :k]
    parts = [constant(codes, whole), constant(scales, scale.reshape(n, blocks)), constant(f"{codes}_zeros", zero)]
    rows = fresh(codes)
    columns = fresh(codes)
    yield helper.make_node(DEQUANTIZE, parts, [rows], node.name, axis=1, block_size=block)
    yield helper.make_node("Transpose", [rows], [columns], node.name, perm=[1, 0])
    if bias:
        product = fresh(node.output[0])
    else:
        product = node.output[0]
    yield helper.make_node("MatMul", [x, columns], [product], node.name)
    if bias:
        yield helper.make_node("Add", [product, bias], node.output[:1], node.name)


def _unpack_codes(values: np.ndarray, bits: int) -> np.ndarray:
    """Unpack codes from bytes, lowest bits first: [..., bytes] → [..., bytes · 8 / bits]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (values.view(np.uint8)[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(*values.shape[:-1], -1)
