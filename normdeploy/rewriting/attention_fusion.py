"""Write a decomposed attention as one Attention node (opset 23) if the runtime runs that faster.

    softmax(c·(a·q)·(b·k)ᵀ + mask)·v   becomes   Attention(q, k, v, mask), scale = a·b·c

The scale is the exact product, rounded once. torch scales q and k by d^-¼ each, and the square of this rounded factor
is not float32's 1/√d. torch's exporter computes the scale from the shape of q. Such a scale first becomes a constant:
it is evaluated in float64 and rounded once, like all nodes with constant inputs
(`normdeploy.rewriting.constant_evaluation`). If keys and values are repeated for groups of heads (grouped-query
attention), the node reads them without the repetition.

The rewrite is made for onnxruntime's CPU provider only (1.31.1). `benchmarks.whole_models` measures its gain in whole
models; without a mask the outputs are bit-equal. Swin's window attentions stay unchanged.

**Masks.** For a row that a mask of −Inf hides entirely, ONNX's Attention gives zeros, and Softmax gives NaN.
If the mask of a row is the lowest float32 throughout, onnxruntime's kernel also gives zeros, but Softmax gives the mean
of all values. So the rewrite requires a proof that the mask hides no row entirely
(`normdeploy.rewriting.hidden_mask_rows`), or that hidden rows of the result are multiplied by zero after the node. The
kernel requires the full size of a mask's last two dims (`normdeploy.exporting.exporter_fixes` gives the reason).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import onnx_graphsurgeon as gs

from ..evaluate import evaluator
from ..graphs.graph import Graph
from ..graphs.region import Refusal, Region, compile_region
from ..proof.axis_plan import AxisPlan
from ..proof.interpreter import ProofInterpreter, RandomDraws
from ..proof.lemmas.attention import RoundedFloat
from ..proof.proof_errors import NotProved, RestartEvaluation
from ..proof.region_evaluation import evaluate_region
from ..storage.onnx_domains import is_standard
from .certification import ResultPair
from .hidden_mask_rows import may_hide_row
from .proposals import Proposal, RewriteTarget, StoredTensor, propose_for_speed, propose_stored
from .rounding_verdicts import fold_trial_maker

STAGE = "attention"
# Lowest opset that has Attention
OPSET = 23
BECAME = "Attention"
_RANK = 4


@dataclass(frozen=True)
class _KeysAndValues:
    """Keys and values of an attention.

    Attributes:
        k: the keys, [B, H, T, D], or a tensor whose transpose they are.
        perm: permutation that brings ``k`` to [B, H, T, D]; None if it already has this order.
        scale: factor of the keys.
        v: the values, [B, H, T, D].
    """

    k: gs.Tensor
    perm: tuple[int, ...] | None
    scale: Fraction
    v: gs.Tensor


@dataclass(frozen=True)
class _AttentionProduct:
    """Attention without its keys and values: softmax(scale·q·kᵀ + mask)·v is ``y``."""

    q: gs.Tensor
    mask: gs.Tensor | None
    scale: Fraction
    y: gs.Tensor


def propose_attention(graph: Graph, node: gs.Node, target: RewriteTarget) -> Proposal | None:
    """Propose one node for the attention whose Softmax is ``node``.

    Returns:
        the proposal; None if the nodes do not match, or the mask may hide a row.
    """
    if _standard_op(node) == "Softmax" and graph.opset >= 13 and target.wanted.limit >= OPSET:
        attention = _match_scores(graph, node)
    else:
        attention = None
    if attention is not None:
        product = _single_reader(graph, node.outputs[0])
    else:
        product = None
    if (
        attention is None
        or product is None
        or _standard_op(product) != "MatMul"
        or product.inputs[0] is not node.outputs[0]
    ):
        return None
    matmul, mask, scale = attention
    (y,) = product.outputs
    if mask is not None and may_hide_row(graph, mask, y):
        return None
    q, by = _split_scale(graph, matmul.inputs[0])
    found = _AttentionProduct(q, mask, scale * by, y)
    proposals = _attention_proposals(
        graph, node, found, _keys_and_values(graph, matmul.inputs[1], product.inputs[1]), target
    )
    first = next(proposals, None)
    if first is None:
        return None
    return replace(first, otherwise=lambda failure: proposals)


def _scales_of_sizes(graph: Graph, before: Region) -> list[StoredTensor]:
    """Find the scales of an attention that are computed from sizes, in the graph's order."""
    scales: dict[int, StoredTensor] = {}
    for node in before.nodes:
        if _standard_op(node) not in ("Mul", "Div") or graph.is_shape_valued(node.outputs[0]):
            continue
        for t in node.inputs:
            if id(t) in scales:
                number = None
            else:
                number = _number_from_sizes(graph, t)
            if number is not None:
                scales[id(t)] = StoredTensor(t, number)
    return list(scales.values())


def _attention_proposals(
    graph: Graph, softmax: gs.Node, found: _AttentionProduct, every: Iterable[_KeysAndValues], target: RewriteTarget
) -> Iterator[Proposal]:
    """Yield a proposal of the attention for each candidate for its keys."""
    for keys in every:
        scale = found.scale * keys.scale
        if scale <= 0 or not _has_fitting_types(graph, found.q, keys):
            continue
        leaves = list({id(t): t for t in (found.q, keys.k, keys.v, found.mask) if t is not None}.values())
        before = compile_region(graph, found.y, leaves)
        if isinstance(before, Refusal):
            continue
        scales = _scales_of_sizes(graph, before)
        if scales:
            yield propose_stored(found.y, "", scales, then=lambda: propose_attention(graph, softmax, target))
            return
        nodes = _attention_nodes(graph, found, keys, scale, target)
        yield propose_for_speed(
            "Attention",
            found.y,
            nodes,
            BECAME,
            graph.module(nodes[-1]),
            (ResultPair(before, nodes[-1].outputs[0]),),
            partly_hidden=() if found.mask is None else (found.mask,),
            opset=OPSET,
            trial=fold_trial_maker((), np.dtype(np.float32), OPSET),
            shared=_full_size_masks(nodes),
        )


def _full_size_masks(nodes: Sequence[gs.Node]) -> dict[tuple[object, ...], gs.Tensor]:
    """Return the masks that were expanded to their full size, for other attentions to read."""
    return {
        ("mask", n.inputs[0].name, *n.inputs[1].values.tolist()): n.outputs[0]
        for n in nodes
        if n.op == "Expand" and isinstance(n.inputs[1], gs.Constant)
    }


def _match_scores(graph: Graph, softmax: gs.Node) -> tuple[gs.Node, gs.Tensor | None, Fraction] | None:
    """Match the MatMul before a softmax over the last of four axes.

    Returns the MatMul, the mask that is added, and the scale after the product; None without a match.
    """
    (scores,) = softmax.inputs
    shape = graph.shape(scores)
    dtype = graph.dtype(scores)
    if (
        shape is None
        or len(shape) != _RANK
        or dtype != np.float32
        or graph.attrs(softmax).get("axis", -1) not in (-1, _RANK - 1)
    ):
        return None
    if not _is_read_once(graph, scores):
        return None
    add = _producer_behind_identities(graph, scores)
    if add is None or _standard_op(add) != "Add":
        return _match_scaled_product(graph, scores, None)
    return _match_scaled_product(graph, add.inputs[0], add.inputs[1]) or _match_scaled_product(
        graph, add.inputs[1], add.inputs[0]
    )


def _match_scaled_product(
    graph: Graph, scores: gs.Tensor, mask: gs.Tensor | None
) -> tuple[gs.Node, gs.Tensor | None, Fraction] | None:
    t, scale = _split_scale(graph, scores)
    matmul = _producer_behind_identities(graph, t)
    if (
        matmul is None
        or _standard_op(matmul) != "MatMul"
        or not _is_read_once(graph, scores)
        or not _is_read_once(graph, t)
    ):
        return None
    if mask is not None and (graph.dtype(mask) != np.float32 or len(graph.shape(mask) or ()) not in (2, _RANK)):
        return None
    return matmul, mask, scale


def _split_scale(graph: Graph, t: gs.Tensor) -> tuple[gs.Tensor, Fraction]:
    """Split ``t`` into a tensor and a constant factor."""
    factor = Fraction(1)
    while (node := _producer_behind_identities(graph, t)) is not None and _standard_op(node) in ("Mul", "Div"):
        numbers = [_nonzero_fraction(graph, i) for i in node.inputs]
        if numbers[1] is not None:
            place = 1
        else:
            place = 0
        number = numbers[place]
        if number is None or (place == 0 and _standard_op(node) == "Div") or numbers[1 - place] is not None:
            break
        if _standard_op(node) == "Mul":
            factor = factor * number
        else:
            factor = factor / number
        t = node.inputs[1 - place]
    return t, factor


def _nonzero_fraction(graph: Graph, t: gs.Tensor) -> Fraction | None:
    """Read a single nonzero number from a constant, or from sizes that the file states."""
    if graph.is_constant(t):
        value = graph.known_value(t)
    else:
        value = _number_from_sizes(graph, t)
    if value is None or value.size != 1 or not np.isfinite(value).all() or not value.any():
        return None
    return Fraction(float(value.reshape(())))


def _number_from_sizes(graph: Graph, t: gs.Tensor) -> np.ndarray | None:
    """Evaluate a float32 number computed from sizes, with the prover's ops; None if it depends on an open size."""
    if graph.is_constant(t) or not graph.is_shape_valued(t) or graph.dtype(t) != np.float32:
        return None
    region = compile_region(graph, t, [])
    if isinstance(region, Refusal):
        return None
    try:
        with evaluator.silence_numpy():
            value = evaluate_region(ProofInterpreter(AxisPlan(), RandomDraws(random.Random(0)), None), region, {})
    except (NotProved, RestartEvaluation):
        return None
    if value.data or value.sized or value.f.size != 1:
        return None
    return value.f.astype(np.float32).reshape((1,) * len(value.axes))


def _keys_and_values(graph: Graph, turned: gs.Tensor, v: gs.Tensor) -> Iterator[_KeysAndValues]:
    """Yield candidates for keys and values.

    ``turned`` is [B, H, D, T] and ``v`` is [B, H, T, D], as the products read them. Keys and values before a repeat of
    heads come first.
    """
    t, scale = _split_scale(graph, turned)
    node = _producer_behind_identities(graph, t)
    if node is None:
        return
    perm = tuple(graph.attrs(node).get("perm") or ())
    k = node.inputs[0]
    order = None
    if _standard_op(node) == "Transpose" and len(perm) == _RANK:
        order = (*perm[:2], perm[3], perm[2])
    elif (
        _standard_op(node) == "Reshape"
        and (flat := _producer_behind_identities(graph, k)) is not None
        and _standard_op(flat) == "Transpose"
    ):
        # The spelling of torch's exporter.
        made = _producer_behind_identities(graph, flat.inputs[0])
        if made is None or _standard_op(made) != "Reshape":
            return
        k = made.inputs[0]
    else:
        return
    if order in (None, (0, 1, 2, 3)):
        k, by = _split_scale(graph, k)
        one = _before_head_repeat(graph, k)
        other = _before_head_repeat(graph, v)
        if one is not None and other is not None:
            yield _KeysAndValues(one, None, scale * by, other)
        yield _KeysAndValues(k, None, scale * by, v)
    else:
        yield _KeysAndValues(k, order, scale, v)


def _before_head_repeat(graph: Graph, t: gs.Tensor) -> gs.Tensor | None:
    """Return the tensor [B, G, T, D] whose heads are repeated in ``t``, [B, H, T, D]."""
    for ops in (("Reshape", "Expand", "Unsqueeze"), ("Reshape", "Expand", "Reshape")):
        current: gs.Tensor | None = t
        for op in ops:
            if current is not None:
                node = _producer_behind_identities(graph, current)
            else:
                node = None
            if node is not None and _standard_op(node) == op:
                current = node.inputs[0]
            else:
                current = None
        if current is not None:
            return current
    return None


def _has_fitting_types(graph: Graph, q: gs.Tensor, keys: _KeysAndValues) -> bool:
    """Return True if the file states float32 and rank four for all tensors. The certificate checks the shapes."""
    return all(len(graph.shape(t) or ()) == _RANK and graph.dtype(t) == np.float32 for t in (q, keys.k, keys.v))


def _attention_nodes(
    graph: Graph, found: _AttentionProduct, keys: _KeysAndValues, scale: Fraction, target: RewriteTarget
) -> list[gs.Node]:
    nodes = list[gs.Node]()
    k = keys.k
    if keys.perm is not None:
        nodes.append(graph.make_node("Transpose", [k], k, {"perm": list(keys.perm)}))
        k = nodes[-1].outputs[0]
    inputs = [found.q, k, keys.v]
    if found.mask is not None:
        spread, made = _expand_mask(graph, (found.q, k), keys, found.mask, target)
        inputs.append(spread)
        nodes += made
    node = graph.make_node("Attention", inputs, found.y, {"scale": float(scale)})
    node.attrs["scale"] = RoundedFloat(scale)
    return [*nodes, node]


def _expand_mask(
    graph: Graph, read: tuple[gs.Tensor, gs.Tensor], keys: _KeysAndValues, mask: gs.Tensor, target: RewriteTarget
) -> tuple[gs.Tensor, list[gs.Node]]:
    """Expand the last two dims of the mask to full size.

    Returns the expanded mask and its new nodes; attentions with the same mask share it.
    """
    q, k = read
    shape = graph.shape(keys.k) or ()
    rows = (graph.shape(q) or ())[2]
    columns = shape[keys.perm[2] if keys.perm is not None else 2]
    wanted = (rows, columns)
    if None not in wanted and (graph.shape(mask) or ())[-2:] == wanted:
        return mask, []
    if isinstance(rows, int) and isinstance(columns, int):
        known = target.shared.get(("mask", mask.name, *wanted))
        if known is not None:
            return known, []
        full: gs.Tensor = graph.add_constant(f"{mask.name}_rows", np.array(wanted, dtype=np.int64), np.int64)
        nodes = []
    else:
        sizes = [graph.make_node("Shape", [t], t, {"start": 2, "end": 3}) for t in (q, k)]
        nodes = [*sizes, graph.make_node("Concat", [n.outputs[0] for n in sizes], mask, {"axis": 0})]
        for n in nodes:
            n.outputs[0].dtype = np.dtype(np.int64)
        full = nodes[-1].outputs[0]
    nodes.append(graph.make_node("Expand", [mask, full], mask))
    return nodes[-1].outputs[0], nodes


def _is_read_once(graph: Graph, t: gs.Tensor) -> bool:
    return not graph.is_output(t) and len(graph.all_consumers_of(t)) == 1


def _single_reader(graph: Graph, t: gs.Tensor) -> gs.Node | None:
    if _is_read_once(graph, t):
        return graph.all_consumers_of(t)[0]
    return None


def _producer_behind_identities(graph: Graph, t: gs.Tensor) -> gs.Node | None:
    """Return the node that produces ``t``, skipping Identities that torch's exporter leaves until cleanup."""
    node = graph.producer(t)
    while node is not None and _standard_op(node) == "Identity":
        node = graph.producer(node.inputs[0])
    return node


def _standard_op(node: gs.Node) -> str:
    if is_standard(node):
        return str(node.op)
    return ""
