"""Fix the exporter's form of attention rows that a mask hides completely.

torch's scaled_dot_product_attention gives 0 in a row whose mask has no True. For a bool mask, the exporter
(onnxscript's translation) writes m = Where(mask, 0, lowest), with the lowest number of the type. It also guards the
softmax against NaN:

    p = Softmax(scores + m);  Where(IsNaN(p), 0, p)·v

That guard is correct for a mask of −Inf. With the lowest number, the result is wrong: a hidden row becomes the mean of
all values, not 0. A NaN among the scores, which eager PyTorch propagates, becomes 0. The fix tests the mask instead,
and applies the test to the product with the values: (p·v)·shown, with shown = (ReduceMax(m) > lowest / 2) as 1 or 0.
The test is applied to the product because it has fewer elements than p, and because softmax and product stay adjacent
nodes. A hidden row becomes 0·(the mean of v). So NaN and Inf in v, and NaN in the scores, become NaN, as in eager
PyTorch. If another node reads p, the fix is Where(shown, p, 0) instead.

Only nodes that the exporter made from scaled_dot_product_attention are changed. If a user's model computes the same
operations explicitly, eager PyTorch computes exactly these nodes.

The exporter adds no guard for a mask of floats: a row of only −Inf is NaN in the file and 0 in eager PyTorch. The graph
itself may compute such a mask, as MultiheadAttention does from a padding mask. Then the fix replaces −Inf in the mask
by the type's lowest number, and adds the same test to the product.
"""

from __future__ import annotations

from collections.abc import Iterable

import ml_dtypes
import numpy as np
import onnx_ir as ir

_VIEWS = frozenset({"Reshape", "Expand", "Unsqueeze", "Squeeze", "Transpose", "Identity", "Slice"})
_MADE_OF = "pkg.torch.onnx.fx_node"


def fix_hidden_rows(graph: ir.Graph) -> int:
    """Replace the exporter's guards in ``graph`` and its bodies, in place.

    Returns:
        the number of fixed attentions.
    """
    seen: dict[ir.Value, ir.Value] = {}
    factors: dict[ir.Value, ir.Value] = {}
    count = 0
    for node in list(ir.traversal.RecursiveGraphIterator(graph)):
        mask = _mask_behind_guard(node)
        if mask is None:
            continue
        weights = node.inputs[2]
        zero = node.inputs[1]
        test = node.inputs[0]
        if mask not in seen or node.graph is not mask.graph:
            seen[mask] = _any_row_visible(mask)
        product = _only_reading_product(node)
        if product is not None and weights is not None:
            if seen[mask] not in factors:
                factors[seen[mask]] = _cast_condition(seen[mask], mask)
            _multiply_visible_rows(product, weights, factors[seen[mask]])
            node.graph.remove(node, safe=True)  # type: ignore[union-attr]
        else:
            for index, value in enumerate((seen[mask], weights, zero)):
                node.replace_input_with(index, value)
        if test is not None and not test.uses() and not test.is_graph_output():
            # Remove the IsNaN, because it would remain as another reader of the softmax.
            test.producer().graph.remove(test.producer(), safe=True)  # type: ignore[union-attr, arg-type]
        count += 1
    clamped: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    for node in list(ir.traversal.RecursiveGraphIterator(graph)):
        count += _fix_infinite_mask(node, clamped)
    return count


def _fix_infinite_mask(softmax: ir.Node, clamped: dict[ir.Value, tuple[ir.Value, ir.Value]]) -> int:
    """Guard the product after a softmax of scores plus a float mask, if the graph writes −Inf into this mask.

    Args:
        clamped: mask -> result of `_clamp_mask`. New masks are added.

    Returns:
        1 if the attention was fixed, otherwise 0.
    """
    if _op_type_of(softmax) != "Softmax" or not _is_from_attention(softmax):
        return 0
    scores = softmax.inputs[0].producer()  # type: ignore[union-attr]
    if _op_type_of(scores) != "Add" or not _is_from_attention(scores):
        return 0
    place = next((i for i, value in enumerate(scores.inputs) if value is not None and _is_hiding_mask(value)), None)  # type: ignore[union-attr]
    product = _only_reading_product(softmax)
    if place is None or product is None or softmax.graph is not product.graph:
        return 0
    mask = scores.inputs[place]  # type: ignore[union-attr]
    if mask not in clamped:
        clamped[mask] = _clamp_mask(scores, mask)  # type: ignore[index, arg-type]
    finite, shown = clamped[mask]  # type: ignore[index]
    scores.replace_input_with(place, finite)  # type: ignore[union-attr]
    _multiply_visible_rows(product, softmax.outputs[0], shown)
    return 1


def _is_minus_infinity(value: ir.Value | None) -> bool:
    """Return True for a constant −Inf, which the exporter may cast to the type of the other operand."""
    if value is not None:
        made = value.producer()
    else:
        made = None
    if _op_type_of(made) in ("Cast", "CastLike"):
        value = made.inputs[0]  # type: ignore[union-attr]
    return _constant_number(value) == -np.inf


def _clamp_mask(scores: ir.Node, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Insert max(mask, lowest) before ``scores``, and a test of each row of the mask.

    Returns:
        the new mask, and 1 for each row that shows any element, otherwise 0.
    """
    assert scores.graph is not None
    low = np.asarray(np.finfo(np.float32).min, np.float32)
    lowest = _constant_node(low, f"{scores.name}_lowest")
    finite = ir.node("Max", [mask, lowest.outputs[0]], name=f"{scores.name}_finite")
    _copy_type(mask, finite.outputs[0])
    tests = _row_tests(finite.outputs[0], low, scores.name)
    factor = ir.node("Cast", tests[-1].outputs, {"to": ir.DataType.FLOAT}, name=f"{scores.name}_factor")
    nodes = [lowest, finite, *tests, factor]
    _copy_metadata(scores, nodes)
    scores.graph.insert_before(scores, nodes)
    return finite.outputs[0], factor.outputs[0]


def _row_tests(mask: ir.Value, low: np.ndarray, name: str | None) -> list[ir.Node]:
    """Build nodes that test, for each row of ``mask``, whether it has a number above the lowest number ``low``.

    Returns:
        the nodes; the last one gives bools of shape [..., 1].
    """
    axes = _constant_node(np.array([-1]), f"{name}_axes")
    half = _constant_node((low / 2).astype(low.dtype).reshape(()), f"{name}_half")
    most = ir.node("ReduceMax", [mask, axes.outputs[0]], {"keepdims": 1}, name=f"{name}_most")
    return [axes, half, most, ir.node("Greater", [most.outputs[0], half.outputs[0]], name=f"{name}_shown")]


def _constant_node(value: np.ndarray, name: str) -> ir.Node:
    return ir.node("Constant", [], {"value": ir.tensor(value)}, name=name)


def _copy_metadata(source: ir.Node, nodes: Iterable[ir.Node]) -> None:
    for node in nodes:
        node.metadata_props.update(source.metadata_props)


def _copy_type(source: ir.Value, value: ir.Value) -> None:
    value.type = source.type
    value.shape = source.shape


def _is_hiding_mask(mask: ir.Value) -> bool:
    """Return True for a float32 mask into which a Where of the graph writes −Inf. Views and Adds may follow the
    Where.
    """
    if mask.dtype != ir.DataType.FLOAT:
        return False
    waiting = [mask]
    while waiting:
        node = waiting.pop().producer()
        kind = _op_type_of(node)
        if kind == "Where" and any(map(_is_minus_infinity, node.inputs[1:])):  # type: ignore[union-attr]
            return True
        if kind in _VIEWS:
            waiting.append(node.inputs[0])  # type: ignore[union-attr, arg-type]
        elif kind == "Add":
            waiting += [v for v in node.inputs if v is not None]  # type: ignore[union-attr]
    return False


def _mask_behind_guard(node: ir.Node) -> ir.Value | None:
    """Find m of ``Where(IsNaN(p), 0, p)`` with p = Softmax(s + m) and m = Where(b, 0, lowest)."""
    if _op_type_of(node) != "Where":
        return None
    asked, zero, weights = node.inputs
    if asked is not None:
        test = asked.producer()
    else:
        test = None
    if weights is not None:
        softmax = weights.producer()
    else:
        softmax = None
    if (
        _op_type_of(test) != "IsNaN"
        or _op_type_of(softmax) != "Softmax"
        or test.inputs[0] is not weights  # type: ignore[union-attr]
        or _constant_number(zero) != 0
    ):
        return None
    scores = softmax.inputs[0].producer()  # type: ignore[union-attr]
    if _op_type_of(scores) != "Add" or not all(map(_is_from_attention, (node, test, softmax, scores))):
        return None
    return next((value for value in scores.inputs if value is not None and _lowest_mask_value(value) is not None), None)  # type: ignore[union-attr]


def _lowest_mask_value(mask: ir.Value) -> np.ndarray | None:
    """Return the number with which ``mask`` hides elements; None if it is not such a mask."""
    node = mask.producer()
    if _op_type_of(node) != "Where" or _constant_number(node.inputs[1]) != 0:  # type: ignore[union-attr]
        return None
    low = _constant_array(node.inputs[2])  # type: ignore[union-attr]
    floating = low is not None and low.size == 1 and low.dtype.name in ("float16", "bfloat16", "float32", "float64")
    return low if floating and float(low) == float(ml_dtypes.finfo(low.dtype).min) else None  # type: ignore[arg-type, union-attr]


def _any_row_visible(mask: ir.Value) -> ir.Value:
    """Insert a test of each row of ``mask`` after the mask's own node. The test's shape is [..., 1]."""
    made = mask.producer()
    low = _lowest_mask_value(mask)
    assert made is not None
    assert made.graph is not None
    assert low is not None
    tests = _row_tests(mask, low, made.name)
    _copy_metadata(made, tests)
    made.graph.insert_after(made, tests)
    return tests[-1].outputs[0]


def _only_reading_product(guard: ir.Node) -> ir.Node | None:
    """Find the MatMul with the values, if it alone reads the output of ``guard``."""
    (out,) = guard.outputs
    uses = list(out.uses())
    if len(uses) != 1 or out.is_graph_output() or uses[0].idx != 0 or uses[0].node.graph is not guard.graph:
        return None
    if _op_type_of(uses[0].node) == "MatMul":
        return uses[0].node
    return None


def _cast_condition(shown: ir.Value, mask: ir.Value) -> ir.Value:
    """Insert a Cast of ``shown`` to the type of the mask, after the node that computes ``shown``: true becomes 1, false
    0.
    """
    made = shown.producer()
    low = _lowest_mask_value(mask)
    assert made is not None
    assert made.graph is not None
    assert low is not None
    cast = ir.node("Cast", [shown], {"to": ir.DataType.from_numpy(low.dtype)}, name=f"{made.name}_factor")
    _copy_metadata(made, [cast])
    made.graph.insert_after(made, [cast])
    return cast.outputs[0]


def _multiply_visible_rows(product: ir.Node, weights: ir.Value, factor: ir.Value) -> None:
    """Replace ``product`` by the product of the unguarded softmax ``weights`` with the values, times ``factor``. Hidden
    rows become zeros.
    """
    assert product.graph is not None
    (out,) = product.outputs
    every = ir.node("MatMul", [weights, product.inputs[1]], name=f"{product.name}_every_row")
    made = ir.node("Mul", [every.outputs[0], factor], name=product.name)
    every.outputs[0].name = f"{out.name}_every_row"
    made.outputs[0].name = out.name
    for node in (every, made):
        _copy_type(out, node.outputs[0])
    _copy_metadata(product, (every, made))
    ir.convenience.replace_nodes_and_values(product.graph, product, [product], [every, made], [out], made.outputs)


def _is_from_attention(node: ir.Node | None) -> bool:
    """Return True if the exporter made the node from torch's operator, according to its metadata."""
    return node is not None and "scaled_dot_product_attention" in node.metadata_props.get(_MADE_OF, "")


def _op_type_of(node: ir.Node | None) -> str:
    if node is not None and node.domain == "":
        return node.op_type
    return ""


def _constant_number(value: ir.Value | None) -> float | None:
    """Return the only number of a constant; None for other tensors."""
    constant = _constant_array(value)
    if constant is not None and constant.size == 1 and constant.dtype.kind != "U":
        return float(constant.reshape(()))
    return None


def _constant_array(value: ir.Value | None) -> np.ndarray | None:
    """Return a constant of one element as an array; None for other tensors."""
    if value is None:
        return None
    constant = value.const_value
    node = value.producer()
    if constant is None and _op_type_of(node) == "Constant":
        attribute = node.attributes.get("value")  # type: ignore[union-attr]
        if attribute is not None:
            constant = attribute.as_tensor()
        else:
            constant = None
    if constant is not None and constant.size == 1:
        return constant.numpy()
    return None
