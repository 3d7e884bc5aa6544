"""Which nodes stay float32 in a half-precision model: those that have a reason (``keeping``), and what belongs to them.

To them belong: the squares that a reduction adds up, what follows a statistic or an epsilon up to the division by it, readers of a tensor
that does not fit, and cheap nodes between two that are kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from onnx import TensorProto

from .floating import View, module
from .keeping import MOVES, REDUCTIONS, as_written, out_of_range, reason

_STEPS = frozenset({"Add", "Sub", "Mul", "Div", "Sqrt", "Reciprocal", "Pow", "Max", "Min", "Clip", "Abs", "Neg", "Log"})
_SQUARES = frozenset({"Mul", "Pow", "Abs", "Sub"})
_HEAVY = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Attention", "LSTM", "GRU", "RNN", "Softmax"})


@dataclass(frozen=True)
class Island:
    """One reason to keep a node, and what is kept with it, in float32.

    ``kind``: "norm", "statistics", "constant", "range", "positions", "no half form", "control flow" or "as written"; ``tensor``: what the
    reason speaks of; ``value``: the largest magnitude seen of it, None where none was looked for; ``nodes``: outputs of the nodes kept.
    """

    kind: str
    op: str
    module: str
    tensor: str
    reason: str
    value: float | None = None
    nodes: tuple[str, ...] = ()


def find(view: View, carried: Collection[str] = (), wide_inputs: Collection[str] = ()) -> tuple[dict[int, Island], list[Island]]:
    """The nodes kept in float32, by place, each with the island that it belongs to; and the islands in the graph's order.

    Args:
        carried: tensors whose lower end does not count, since they carry a mask.
        wide_inputs: inputs of the graph that stay float32.
    """
    kept: dict[int, Island] = {}
    author = as_written(view)
    for i, node in enumerate(view.graph.node):
        if not view.floats(i):
            continue
        found = reason(view, i, carried, author)
        if found is not None:
            kind, tensor, text, value = found
            kept[i] = Island(kind, node.op_type, module(node), tensor, text, value)
    _positions(view, kept)
    _grow(view, kept, carried, wide_inputs)
    return kept, _listed(view, kept)


def _positions(view: View, kept: dict[int, Island]) -> None:
    """Angles made of whole numbers (rotary and sinusoidal positions): half of a turn's precision is lost at position 1 / unit."""
    steps = MOVES | _STEPS | {"MatMul", "Einsum", "Range"}
    counted: set[str] = set()
    for i, node in enumerate(view.graph.node):
        whole = node.op_type == "Range" or (node.op_type == "Cast" and view.types.get(node.input[0]) == TensorProto.INT64)
        if whole or (node.op_type in steps and view.reads(i) and counted.issuperset(view.reads(i))):
            counted.update(view.makes(i))
    said = f"angles made of positions: at {1 / view.form.unit:.0f} neighbours are one {view.form.dtype.name} number"
    for first, turned in enumerate(view.graph.node):
        if turned.op_type not in ("Sin", "Cos") or not view.reads(first) or not counted.issuperset(view.reads(first)):
            continue
        island, stack = Island("positions", turned.op_type, module(turned), turned.output[0], said), [first]
        while stack:
            i = stack.pop()
            if i not in kept:
                kept[i] = island
                stack += [view.producer[name] for name in view.reads(i) if name in view.producer]


# ------------------------------------------------------------------ what is kept around them


def _grow(view: View, kept: dict[int, Island], carried: Collection[str], wide_inputs: Collection[str]) -> None:
    roots = dict(kept)
    for i, island in roots.items():
        if island.kind == "statistics":
            _squares(view, kept, i, island)
    counting = ("statistics", "constant")
    _until_divided(view, kept, {i: s for i, s in roots.items() if s.kind in counting and s.op in _STEPS | REDUCTIONS})
    for i, island in roots.items():
        if island.kind in ("range", "constant"):
            for j in (j for name in view.makes(i) if out_of_range(view, name, carried) for j in view.readers.get(name, ())):
                kept.setdefault(j, island)
    for name in wide_inputs:
        if said := out_of_range(view, name, carried):
            for j in view.readers.get(name, ()):
                node = view.graph.node[j]
                kept.setdefault(j, Island("range", node.op_type, module(node), name, said, view.ranges[name].magnitude))
    _between(view, kept, wide_inputs)


def _squares(view: View, kept: dict[int, Island], i: int, island: Island) -> None:
    """What is computed only to be added up."""
    stack = [view.producer[name] for name in view.reads(i) if name in view.producer]
    while stack:
        j = stack.pop()
        node = view.graph.node[j]
        alone = all(k in kept for k in view.followers(j)) and not view.outputs.intersection(node.output)
        if j not in kept and node.op_type in _SQUARES and alone:
            kept[j] = island
            stack += [view.producer[name] for name in view.reads(j) if name in view.producer]


def _until_divided(view: View, kept: dict[int, Island], seeds: Mapping[int, Island]) -> None:
    """What follows statistics and epsilons up to where they meet the data, that node included."""
    owner: dict[str, Island] = {}  # tensors computed from these and constants alone
    for i, node in enumerate(view.graph.node):
        made_of = [owner[name] for name in view.reads(i) if name in owner]
        alone = len(made_of) == len(view.reads(i))
        if i in seeds:
            owner.update((name, seeds[i]) for name in view.makes(i))
        elif made_of and (node.op_type in _STEPS or (node.op_type in MOVES and alone)):
            kept.setdefault(i, made_of[0])
            if alone:
                owner.update((name, made_of[0]) for name in view.makes(i))


def _between(view: View, kept: dict[int, Island], wide_inputs: Collection[str]) -> None:
    """Cheap nodes whose every way in and out is kept: in float32 they cost less than the Casts around them."""
    nodes = view.graph.node
    cheap = {i for i, n in enumerate(nodes) if i not in kept and view.floats(i) and n.op_type not in _HEAVY and view.reads(i)}
    fed: set[int] = set()
    for i in sorted(cheap):
        sources = [view.producer.get(name) for name in view.reads(i)]
        if all(s in kept or s in fed if s is not None else name in wide_inputs for s, name in zip(sources, view.reads(i), strict=True)):
            fed.add(i)
    read: set[int] = set()
    for i in sorted(fed, reverse=True):
        after = list(view.followers(i))
        if after and all(j in kept or j in read for j in after) and not view.outputs.intersection(nodes[i].output):
            read.add(i)
            kept[i] = kept[after[0]]


def _listed(view: View, kept: Mapping[int, Island]) -> list[Island]:
    members: dict[int, list[int]] = defaultdict(list)
    by_id: dict[int, Island] = {}
    for i in sorted(kept):
        members[id(kept[i])].append(i)
        by_id[id(kept[i])] = kept[i]
    return [replace(island, nodes=tuple(view.graph.node[i].output[0] for i in members[key])) for key, island in by_id.items()]
