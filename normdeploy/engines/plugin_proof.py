"""Proposes the nodes that are planned for an engine: the rewriter has to prove that the file's nodes and the new ones
are one function (`normdeploy.proof`).

A plugin node means what `normdeploy.proof.plugins` says of its kernel, with the attributes as TensorRT's parser will
read them off the node and the parameters that go with it. One of an installed package is taken to mean what the body of
its op says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import onnx_graphsurgeon as gs

from ..graphs.dims import dim_size
from ..graphs.functions import DOMAIN
from ..graphs.graph import Graph
from ..graphs.sizes import Size
from ..norms import guests
from ..proof.machine import Machine
from ..proof.nodes import leaky
from ..proof.plugins import NONE, TABLE, activated
from ..proof.run import apply, run_nodes, shape_of
from ..proof.sides import Side, Sides
from ..proof.value import Value
from ..records import Finding
from ..rewriting.proposal import Change, Proposal, untold
from .plugin_nodes import Plan

_ACTIVATIONS = frozenset({"Relu", "Sigmoid", "Swish"})


def proposal(graph: Graph, plan: Plan) -> Proposal:
    """Propose that the new nodes of ``plan`` take the place of the old ones."""
    first, *others = plan.outputs
    return Proposal(
        Finding("plugin", "fused", first.name, became=plan.became),
        pairs=(),
        changes=(Change(first, plan.new, also=dict(enumerate(others, 1))),),
        sides=lambda: _to_prove(graph, plan),
        unproved=untold,
    )


def _to_prove(graph: Graph, plan: Plan) -> Iterator[Sides]:
    """Yield what has to be one function.

    ScaleShift holds numbers that were computed and rounded: these are compared with the exact ones before the
    activation behind them, and the activations by themselves.
    """
    split = next(
        (i for i, n in enumerate(plan.old) if n.op in _ACTIVATIONS and plan.new[-1].op == "ScaleShift"), len(plan.old)
    )
    if split == len(plan.old):
        yield _sides(graph, plan, plan.old, plan.outputs)
        return
    middle = plan.old[split - 1].outputs[0]
    yield _sides(graph, plan, plan.old[:split], (middle,), {"activation": NONE})
    yield _activations(graph, plan, middle, plan.old[split:])


def _sides(
    graph: Graph,
    plan: Plan,
    old: Sequence[gs.Node],
    outputs: Sequence[gs.Tensor],
    other: Mapping[str, Any] | None = None,
) -> Sides:
    """``other``: attributes that the plugin nodes are taken to have instead of their own."""
    made = plan.new[-1].outputs[: len(outputs)]
    shapes = [_first(plan), *(shape_of(graph, t) for t in plan.leaves[1:])]
    before = _side(graph, old, plan.leaves, outputs, {})
    after = _side(graph, plan.new, plan.leaves, made, other or {})
    return Sides(tuple(shapes), before, after, outputs[0].name, graph=graph, nodes=tuple(plan.new))


def _first(plan: Plan) -> tuple[Size, ...]:
    """The shape of the normalized tensor, with what its parameters tell of it."""
    return tuple(dim_size(d, f"{plan.leaves[0].name}:{i}") for i, d in enumerate(plan.shape))


def _activations(graph: Graph, plan: Plan, middle: gs.Tensor, old: Sequence[gs.Node]) -> Sides:
    activation = int(plan.new[-1].attrs["activation"])
    before = _side(graph, old, (middle,), plan.outputs, {})
    return Sides((_first(plan),), before, lambda m, values: [activated(m, values[0], activation)], plan.outputs[0].name)


def _side(
    graph: Graph,
    nodes: Sequence[gs.Node],
    leaves: Sequence[gs.Tensor],
    outputs: Sequence[gs.Tensor],
    other: Mapping[str, Any],
) -> Side:
    def evaluated(m: Machine, values: Sequence[Value]) -> list[Value]:
        env: dict[int, Any] = dict(zip(map(id, leaves), values, strict=True))
        run_nodes(m, graph, nodes, env, partial(_meaning, other))
        return [env[id(t)] for t in outputs]

    return evaluated


def is_plugin(node: gs.Node) -> bool:
    return node.domain == DOMAIN and "plugin_namespace" in node.attrs


def _meaning(
    other: Mapping[str, Any], node: gs.Node
) -> Callable[[Machine, list[Any], Mapping[str, Any]], tuple[Any, ...]] | None:
    if is_plugin(node):
        definition = TABLE[node.op]
        return lambda m, inputs, attrs: definition(m, inputs, {**attrs, **other})
    if "plugin_namespace" in node.attrs and (guest := guests.of_plugin(node.domain, node.op)) is not None:
        row = guest.row
        return lambda m, inputs, attrs: apply(m, row.op, row.domains[0], inputs, attrs, row.since, 1)
    if node.op == "Relu" and not node.domain:
        return lambda m, inputs, attrs: (leaky(m, inputs[0], 0.0),)
    return None
