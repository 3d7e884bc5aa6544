"""Rules for a Cast that follows a lossless Cast, and for a Cast of a ConstantOfShape."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .node_matching import bypass_node, is_understood, replace_node, understood_producer

_T = ir.DataType
# Type → the types that represent each of its values exactly.
_HELD: dict[ir.DataType, frozenset[ir.DataType]] = {
    _T.FLOAT16: frozenset({_T.FLOAT, _T.DOUBLE}),
    _T.BFLOAT16: frozenset({_T.FLOAT, _T.DOUBLE}),
    _T.FLOAT: frozenset({_T.DOUBLE}),
    _T.BOOL: frozenset({_T.INT8, _T.UINT8, _T.INT32, _T.INT64, _T.FLOAT16, _T.FLOAT, _T.DOUBLE}),
    _T.INT8: frozenset({_T.INT16, _T.INT32, _T.INT64, _T.FLOAT, _T.DOUBLE}),
    _T.UINT8: frozenset({_T.INT16, _T.UINT16, _T.INT32, _T.UINT32, _T.INT64, _T.UINT64, _T.FLOAT, _T.DOUBLE}),
    _T.INT16: frozenset({_T.INT32, _T.INT64, _T.FLOAT, _T.DOUBLE}),
    _T.UINT16: frozenset({_T.INT32, _T.UINT32, _T.INT64, _T.UINT64, _T.FLOAT, _T.DOUBLE}),
    _T.INT32: frozenset({_T.INT64, _T.DOUBLE}),
    _T.UINT32: frozenset({_T.INT64, _T.UINT64, _T.DOUBLE}),
}
_HALVES = frozenset({_T.FLOAT16, _T.BFLOAT16})
_WHOLE = frozenset({_T.INT8, _T.UINT8, _T.INT16, _T.UINT16, _T.INT32, _T.UINT32, _T.INT64, _T.UINT64, _T.BOOL})


def merge_casts(graph: ir.Graph, node: ir.Node) -> bool:
    """Drop a Cast to its input's type. Drop the first of two consecutive Casts if this first Cast is lossless.

    The first Cast, x → A, is lossless if `_HELD` lists A for the type of x. The second Cast, A → B, then reads the
    numbers of x. The first Cast is dropped in three cases:

    - B is the type of x.
    - A is FLOAT, and x and B are half precision: with or without the first Cast, the number is rounded once.
    - x, A and B are integers or bool: with or without the first Cast, the number wraps modulo 2^bits of B. If the wider
      type A wraps the number first, the result is the same.

    Returns: whether the graph changed.
    """
    if not is_understood(node, "Cast"):
        return False
    x = node.inputs[0]
    to = _T(node.attributes.get_int("to", 0))
    assert x is not None
    if x.dtype == to:
        return bypass_node(graph, node, x)
    inner = understood_producer(x, "Cast")
    if inner is None:
        given = None
    else:
        given = inner.inputs[0]
    if given is None or given.dtype is None or x.dtype not in _HELD.get(given.dtype, ()):
        return False
    if given.dtype == to:
        return bypass_node(graph, node, given)
    halves = given.dtype in _HALVES and x.dtype == _T.FLOAT and to in _HALVES
    whole = {given.dtype, x.dtype, to} <= _WHOLE
    return (halves or whole) and replace_node(graph, node, ir.node("Cast", [given], {"to": int(to)}))


def cast_filling(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace the Cast of a ConstantOfShape by one ConstantOfShape with the cast value.

    Premise: `exact_cast` covers the Cast.

    Returns: whether the graph changed.
    """
    if is_understood(node, "Cast"):
        filled = understood_producer(node.inputs[0], "ConstantOfShape")
    else:
        filled = None
    if filled is None:
        return False
    stated = filled.attributes.get("value")
    if stated is None:
        value = np.zeros(1, np.float32)
    else:
        value = stated.as_tensor().numpy()
    made = exact_cast(value, _T(node.attributes.get_int("to", 0)))
    if made is None:
        return False
    return replace_node(graph, node, ir.node("ConstantOfShape", [filled.inputs[0]], {"value": ir.tensor(made)}))


def exact_cast(array: np.ndarray, to: ir.DataType) -> np.ndarray | None:
    """Cast an array if every runtime gives the same result for it.

    These casts are covered:

    - to and from bool;
    - integer to integer, which wraps;
    - integer to float, if the float type holds every integer up to the array's largest magnitude;
    - float to integer, if finite and in range;
    - float to a wider float, float32 to half precision and float64 to float32, which round at most once.

    Returns: the result; None if runtimes may differ.
    """
    source = array.dtype
    try:
        target = np.dtype(to.numpy())
    except TypeError:
        return None
    name = source.name
    wide = target.name
    floats = {"float16", "bfloat16", "float32", "float64"}
    if not (source.kind in "iub" or name in floats) or not (target.kind in "iub" or wide in floats):
        return None
    with np.errstate(all="ignore"):
        if name in floats and target.kind in "iu":
            limits = np.iinfo(target)
            whole = np.trunc(array.astype(np.float64))
            # float64 does not hold the largest 64-bit integer, so the upper limit itself is excluded.
            if not (
                np.isfinite(whole).all() and (whole >= float(limits.min)).all() and (whole < float(limits.max)).all()
            ):
                return None
            return whole.astype(target)
        made = array.astype(target)
        if source.kind in "iu" and wide in floats:
            most = {"float16": 2**11, "bfloat16": 2**8, "float32": 2**24, "float64": 2**53}[wide]
            if bool((array.astype(object) <= most).all() and (array.astype(object) >= -most).all()):
                return made
            return None
        if name == "float64" and wide in {"float16", "bfloat16"}:
            return None
        return made
