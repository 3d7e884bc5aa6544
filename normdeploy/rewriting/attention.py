"""The step that writes a decomposed attention as one Attention node (opset 23), where the runtime runs that faster.

    softmax(c·(a·q)·(b·k)ᵀ + mask)·v   becomes   Attention(q, k, v, mask), scale = a·b·c

The scale is the exact product, rounded once: torch scales q and k by d^-¼ each, whose float32 squared is no float32's
1/√d. Where that is computed from the shape of q, as torch's exporter writes it, it becomes a constant first: evaluated
in float64 and rounded once, as what constants alone feed (`normdeploy.rewriting.constants`). Where keys and values are
repeated for groups of heads (grouped-query attention) the node reads them once.

It is made for onnxruntime's CPU provider alone (1.31.1). What it is worth in whole models `benchmarks.whole_models`
measures; the outputs are bit-equal without a mask. Swin's attentions of windows stay as they are.

**Masks.** ONNX makes zeros of a row that a mask of −Inf hides whole, where Softmax makes NaN. onnxruntime's kernel does
so too where the mask is the lowest float32 throughout, where Softmax makes the mean of all values. So a mask has to be
shown to have no such row (`normdeploy.rewriting.mask_rows`), or what is made of it has to be multiplied by zero behind
the node. The kernel wants a mask's last two dims in full, as `normdeploy.mends` says.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import onnx_graphsurgeon as gs

from ..domains import is_standard
from ..evaluate import evaluate
from ..graphs.graph import Graph
from ..graphs.region import Refusal, Region, compile_region
from ..proof.errors import NotProved, Restart
from ..proof.lemmas.attention import Rounded
from ..proof.machine import Draws, Machine
from ..proof.plan import Plan
from ..proof.run import run
from .certify import Pair
from .mask_rows import may_be_hidden
from .proposal import Proposal, StoredValue, Target, for_speed, stored_once
from .rounding import fold_trial

STAGE = "attention"
OPSET = 23  # the first with Attention
BECAME = "Attention"
_RANK = 4


@dataclass(frozen=True)
class _Keys:
    """The keys of an attention, [B, H, T, D], or what they are a transpose of; and its values."""

    k: gs.Tensor
    perm: tuple[int, ...] | None  # of ``k``, where it has another order
    scale: Fraction
    v: gs.Tensor


@dataclass(frozen=True)
class _Product:
    """An attention but for its keys and values: softmax(scale·q·kᵀ + mask)·v is ``y``."""

    q: gs.Tensor
    mask: gs.Tensor | None
    scale: Fraction
    y: gs.Tensor


def attend(graph: Graph, node: gs.Node, target: Target) -> Proposal | None:
    """Propose the attention whose Softmax is ``node`` as one node."""
    attention = (
        _scores(graph, node) if _op(node) == "Softmax" and graph.opset >= 13 and target.wanted.limit >= OPSET else None
    )
    product = _only_reader(graph, node.outputs[0]) if attention is not None else None
    if attention is None or product is None or _op(product) != "MatMul" or product.inputs[0] is not node.outputs[0]:
        return None
    matmul, mask, scale = attention
    (y,) = product.outputs
    if mask is not None and may_be_hidden(graph, mask, y):
        return None
    q, by = _scaled(graph, matmul.inputs[0])
    found = _Product(q, mask, scale * by, y)
    proposals = _proposals(graph, node, found, _keys(graph, matmul.inputs[1], product.inputs[1]), target)
    first = next(proposals, None)
    return None if first is None else replace(first, otherwise=lambda failure: proposals)


def _scales_of_sizes(graph: Graph, before: Region) -> list[StoredValue]:
    """Find the scales in an attention that are no constants yet, in the graph's order."""
    scales: dict[int, StoredValue] = {}
    for node in before.nodes:
        if _op(node) not in ("Mul", "Div") or graph.is_shape_valued(node.outputs[0]):
            continue
        for t in node.inputs:
            number = None if id(t) in scales else _of_sizes(graph, t)
            if number is not None:
                scales[id(t)] = StoredValue(t, number)
    return list(scales.values())


def _proposals(
    graph: Graph, softmax: gs.Node, found: _Product, every: Iterable[_Keys], target: Target
) -> Iterator[Proposal]:
    """The attention with each of the keys that it may have."""
    for keys in every:
        scale = found.scale * keys.scale
        if scale <= 0 or not _fits(graph, found.q, keys):
            continue
        leaves = list({id(t): t for t in (found.q, keys.k, keys.v, found.mask) if t is not None}.values())
        before = compile_region(graph, found.y, leaves)
        if isinstance(before, Refusal):
            continue
        scales = _scales_of_sizes(graph, before)
        if scales:
            yield stored_once(found.y, "", scales, then=lambda: attend(graph, softmax, target))
            return
        nodes = _written(graph, found, keys, scale, target)
        yield for_speed(
            "Attention",
            found.y,
            nodes,
            BECAME,
            graph.module(nodes[-1]),
            (Pair(before, nodes[-1].outputs[0]),),
            partly_hidden=() if found.mask is None else (found.mask,),
            opset=OPSET,
            trial=fold_trial((), np.dtype(np.float32), OPSET),
            shared=_full_masks(nodes),
        )


def _full_masks(nodes: Sequence[gs.Node]) -> dict[tuple[object, ...], gs.Tensor]:
    """Masks that were brought to their full size, which other attentions may read."""
    return {
        ("mask", n.inputs[0].name, *n.inputs[1].values.tolist()): n.outputs[0]
        for n in nodes
        if n.op == "Expand" and isinstance(n.inputs[1], gs.Constant)
    }


def _scores(graph: Graph, softmax: gs.Node) -> tuple[gs.Node, gs.Tensor | None, Fraction] | None:
    """The MatMul before a softmax over the last of four axes, the mask that is added and the scale behind the
    product."""
    (scores,) = softmax.inputs
    shape, dtype = graph.shape(scores), graph.dtype(scores)
    if (
        shape is None
        or len(shape) != _RANK
        or dtype != np.float32
        or graph.attrs(softmax).get("axis", -1) not in (-1, _RANK - 1)
    ):
        return None
    if not _only(graph, scores):
        return None
    add = _maker(graph, scores)
    if add is None or _op(add) != "Add":
        return _product(graph, scores, None)
    return _product(graph, add.inputs[0], add.inputs[1]) or _product(graph, add.inputs[1], add.inputs[0])


def _product(
    graph: Graph, scores: gs.Tensor, mask: gs.Tensor | None
) -> tuple[gs.Node, gs.Tensor | None, Fraction] | None:
    t, scale = _scaled(graph, scores)
    matmul = _maker(graph, t)
    if matmul is None or _op(matmul) != "MatMul" or not _only(graph, scores) or not _only(graph, t):
        return None
    if mask is not None and (graph.dtype(mask) != np.float32 or len(graph.shape(mask) or ()) not in (2, _RANK)):
        return None
    return matmul, mask, scale


def _scaled(graph: Graph, t: gs.Tensor) -> tuple[gs.Tensor, Fraction]:
    """What ``t`` is a multiple of, and the factor."""
    factor = Fraction(1)
    while (node := _maker(graph, t)) is not None and _op(node) in ("Mul", "Div"):
        numbers = [_number(graph, i) for i in node.inputs]
        place = 1 if numbers[1] is not None else 0
        number = numbers[place]
        if number is None or (place == 0 and _op(node) == "Div") or numbers[1 - place] is not None:
            break
        factor = factor * number if _op(node) == "Mul" else factor / number
        t = node.inputs[1 - place]
    return t, factor


def _number(graph: Graph, t: gs.Tensor) -> Fraction | None:
    """The one number, and not zero, that a constant holds, or that sizes which the file states come to."""
    value = graph.known(t) if graph.is_constant(t) else _of_sizes(graph, t)
    if value is None or value.size != 1 or not np.isfinite(value).all() or not value.any():
        return None
    return Fraction(float(value.reshape(())))


def _of_sizes(graph: Graph, t: gs.Tensor) -> np.ndarray | None:
    """The float32 number that ``t`` is made of sizes, where it depends on none that is open: the prover's ops say
    so."""
    if graph.is_constant(t) or not graph.is_shape_valued(t) or graph.dtype(t) != np.float32:
        return None
    region = compile_region(graph, t, [])
    if isinstance(region, Refusal):
        return None
    try:
        with evaluate.quiet():
            value = run(Machine(Plan(), Draws(random.Random(0)), None), region, {})
    except (NotProved, Restart):
        return None
    if value.data or value.sized or value.f.size != 1:
        return None
    return value.f.astype(np.float32).reshape((1,) * len(value.axes))


def _keys(graph: Graph, turned: gs.Tensor, v: gs.Tensor) -> Iterator[_Keys]:
    """What the keys and values may be, [B, H, D, T] and [B, H, T, D] as the products have them: before they are
    repeated, first."""
    t, scale = _scaled(graph, turned)
    node = _maker(graph, t)
    if node is None:
        return
    perm = tuple(graph.attrs(node).get("perm") or ())
    k, order = node.inputs[0], None
    if _op(node) == "Transpose" and len(perm) == _RANK:
        order = (*perm[:2], perm[3], perm[2])
    elif (
        _op(node) == "Reshape" and (flat := _maker(graph, k)) is not None and _op(flat) == "Transpose"
    ):  # as torch's exporter writes it
        made = _maker(graph, flat.inputs[0])
        if made is None or _op(made) != "Reshape":
            return
        k = made.inputs[0]
    else:
        return
    if order in (None, (0, 1, 2, 3)):
        k, by = _scaled(graph, k)
        one, other = _once(graph, k), _once(graph, v)
        if one is not None and other is not None:
            yield _Keys(one, None, scale * by, other)
        yield _Keys(k, None, scale * by, v)
    else:
        yield _Keys(k, order, scale, v)


def _once(graph: Graph, t: gs.Tensor) -> gs.Tensor | None:
    """[B, G, T, D] of [B, H, T, D] that repeats each of its heads."""
    for ops in (("Reshape", "Expand", "Unsqueeze"), ("Reshape", "Expand", "Reshape")):
        current: gs.Tensor | None = t
        for op in ops:
            node = _maker(graph, current) if current is not None else None
            current = node.inputs[0] if node is not None and _op(node) == op else None
        if current is not None:
            return current
    return None


def _fits(graph: Graph, q: gs.Tensor, keys: _Keys) -> bool:
    """Whether all are float32 of rank four, as far as the file says. What they are the certificate says."""
    return all(len(graph.shape(t) or ()) == _RANK and graph.dtype(t) == np.float32 for t in (q, keys.k, keys.v))


def _written(graph: Graph, found: _Product, keys: _Keys, scale: Fraction, target: Target) -> list[gs.Node]:
    nodes, k = list[gs.Node](), keys.k
    if keys.perm is not None:
        nodes.append(graph.node("Transpose", [k], k, {"perm": list(keys.perm)}))
        k = nodes[-1].outputs[0]
    inputs = [found.q, k, keys.v]
    if found.mask is not None:
        spread, made = _full(graph, (found.q, k), keys, found.mask, target)
        inputs.append(spread)
        nodes += made
    node = graph.node("Attention", inputs, found.y, {"scale": float(scale)})
    node.attrs["scale"] = Rounded(scale)
    return [*nodes, node]


def _full(
    graph: Graph, read: tuple[gs.Tensor, gs.Tensor], keys: _Keys, mask: gs.Tensor, target: Target
) -> tuple[gs.Tensor, list[gs.Node]]:
    """The mask with its last two dims in full, and the nodes that are new for it; of one mask the same for all
    attentions."""
    q, k = read
    shape, rows = graph.shape(keys.k) or (), (graph.shape(q) or ())[2]
    columns = shape[keys.perm[2] if keys.perm is not None else 2]
    wanted = (rows, columns)
    if None not in wanted and (graph.shape(mask) or ())[-2:] == wanted:
        return mask, []
    if isinstance(rows, int) and isinstance(columns, int):
        known = target.shared.get(("mask", mask.name, *wanted))
        if known is not None:
            return known, []
        full: gs.Tensor = graph.constant(f"{mask.name}_rows", np.array(wanted, dtype=np.int64), np.int64)
        nodes = []
    else:
        sizes = [graph.node("Shape", [t], t, {"start": 2, "end": 3}) for t in (q, k)]
        nodes = [*sizes, graph.node("Concat", [n.outputs[0] for n in sizes], mask, {"axis": 0})]
        for n in nodes:
            n.outputs[0].dtype = np.dtype(np.int64)
        full = nodes[-1].outputs[0]
    nodes.append(graph.node("Expand", [mask, full], mask))
    return nodes[-1].outputs[0], nodes


def _only(graph: Graph, t: gs.Tensor) -> bool:
    return not graph.is_output(t) and len(graph.every_consumer(t)) == 1


def _only_reader(graph: Graph, t: gs.Tensor) -> gs.Node | None:
    return graph.every_consumer(t)[0] if _only(graph, t) else None


def _maker(graph: Graph, t: gs.Tensor) -> gs.Node | None:
    """The node that makes ``t``, behind Identities, which torch's exporter leaves until the graph is cleaned up."""
    node = graph.producer(t)
    while node is not None and _op(node) == "Identity":
        node = graph.producer(node.inputs[0])
    return node


def _op(node: gs.Node) -> str:
    return str(node.op) if is_standard(node) else ""
