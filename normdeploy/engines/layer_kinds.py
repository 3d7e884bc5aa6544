"""Classify the layers of an engine by the names that TensorRT gives them."""

from __future__ import annotations

import re
from enum import StrEnum

REFORMAT_PREFIX = re.compile(r"Reformatting CopyNode for (?:Input|Output) Tensor \d+ to ")
FOREIGN_PREFIX = "{ForeignNode["
# Suffix of the layers of a further optimization profile
_PROFILE_SUFFIX = re.compile(r" \[profile (\d{1,9})\]$")
# Suffix of the layers inside of a region that the compiler Myelin made
_MYELIN_SUFFIX = re.compile(r"_myl\d+_\d+$")


class LayerKind(StrEnum):
    """Kind of an engine's layer. The values appear in tables."""

    PLUGIN = "plugin"
    NORMALIZATION = "native normalization"
    KERNEL = "compiled kernel"
    REGION = "compiled region"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    CONVOLUTION = "convolution"
    MATMUL = "matrix product"
    REFORMAT = "reformat"
    NONE = "no computation"
    OTHER = "other"
    UNKNOWN = "unknown"


# Parts of a LayerType in small letters -> kind. The first match counts. Names with a small first letter ("kgen",
# "gemm", "conv", "fusion") are kernels of the compiler Myelin. The others are TensorRT's own layers, such as
# "CaskConvolution", "PointWiseV2" and "PluginV3".
_PARTS: tuple[tuple[str, LayerKind], ...] = (
    ("reformat", LayerKind.REFORMAT),
    ("plugin", LayerKind.PLUGIN),
    ("normaliz", LayerKind.NORMALIZATION),
    ("layernorm", LayerKind.NORMALIZATION),
    ("instancenorm", LayerKind.NORMALIZATION),
    ("conv", LayerKind.CONVOLUTION),
    ("gemm", LayerKind.MATMUL),
    ("matrixmultiply", LayerKind.MATMUL),
    ("matmul", LayerKind.MATMUL),
    ("fullyconnected", LayerKind.MATMUL),
    ("kgen", LayerKind.KERNEL),
    ("fusion", LayerKind.KERNEL),
    ("myelin", LayerKind.REGION),
    ("pointwise", LayerKind.POINTWISE),
    ("elementwise", LayerKind.POINTWISE),
    ("unary", LayerKind.POINTWISE),
    ("activation", LayerKind.POINTWISE),
    ("scale", LayerKind.POINTWISE),
    ("reduce", LayerKind.REDUCTION),
)
_NO_COMPUTATION = {"constant", "noop", "signal", "wait", "trainstation"}


def classify_layer(layer_type: str, name: str) -> LayerKind:
    """Classify a layer.

    Args:
        layer_type: the inspector's ``LayerType``; "" if only the name is known.
        name: name of the layer.

    Returns:
        the kind; UNKNOWN if there is no type and the name does not tell.
    """
    lower = layer_type.lower()
    if REFORMAT_PREFIX.match(name):
        return LayerKind.REFORMAT
    if name.startswith(FOREIGN_PREFIX):
        return LayerKind.REGION
    if lower in _NO_COMPUTATION or name.startswith("[trainStation"):
        return LayerKind.NONE
    for part, kind in _PARTS:
        if part in lower:
            return kind
    if name.startswith("__myl_"):
        return LayerKind.KERNEL
    if name.startswith("PWN("):
        return LayerKind.POINTWISE
    return LayerKind.OTHER if layer_type else LayerKind.UNKNOWN


def split_profile(name: str) -> tuple[str, int]:
    """Split the suffix " [profile N]" off a layer's name.

    Returns:
        the name without the suffix, and N; 0 for the first optimization profile, which has no suffix.
    """
    found = _PROFILE_SUFFIX.search(name[-24:])
    if found is None:
        return name, 0
    return name[: len(name) - len(found[0])], int(found[1])


def names_in_layer_name(name: str) -> tuple[str, ...]:
    """List the names of nodes that TensorRT joined to a layer's name.

    For example, "conv1 + bn1" gives conv1 and bn1, "PWN(add, PWN(relu))" gives add and relu, and
    "{ForeignNode[first...last]}" gives first and last. Versions before 8.6 write no other names.

    Returns:
        names of nodes, but also of weights, in the layer's order; () for a reformat.
    """
    if REFORMAT_PREFIX.match(name):
        return ()
    if name.startswith(FOREIGN_PREFIX):
        first, _, last = name.removeprefix(FOREIGN_PREFIX).removesuffix("]}").partition("...")
        return tuple(filter(None, (first, last)))
    pieces = (piece.strip() for joined in name.replace("PWN(", "").split(" + ") for piece in joined.split(", "))
    names = (_MYELIN_SUFFIX.sub("", _drop_unmatched(piece)) for piece in pieces)
    return tuple(filter(None, names))


def _drop_unmatched(piece: str) -> str:
    """Drop the closing parentheses that a removed "PWN(" leaves behind."""
    surplus = piece.count(")") - piece.count("(")
    ending = len(piece) - len(piece.rstrip(")"))
    drop = max(0, min(surplus, ending))
    return piece[: len(piece) - drop]
