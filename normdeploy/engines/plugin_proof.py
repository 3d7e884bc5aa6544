"""Propose the planned nodes of an engine to the rewriter. The rewriter must prove that the file's nodes and the new
nodes compute the same function (`normdeploy.proof`).

`normdeploy.proof.plugin_definitions` defines each plugin, with its parameters and with the attributes that TensorRT's
parser reads from the node. A plugin of an installed package is assumed to compute the function body of its op.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx_graphsurgeon as gs

from ..findings.records import Finding
from ..graphs.dims import dim_size
from ..graphs.graph import Graph
from ..graphs.own_op_functions import DOMAIN
from ..graphs.symbolic_sizes import Size
from ..norms import third_party
from ..proof.equivalence import Equivalence, Side
from ..proof.interpreter import ProofInterpreter
from ..proof.plugin_definitions import NONE, TABLE, apply_activation
from ..proof.proto_evaluation import leaky_relu
from ..proof.region_evaluation import NodeDefinition, apply_op_of_domain, evaluate_nodes, shape_of
from ..proof.value import Value
from ..rewriting.proposals import NodeReplacement, Proposal, ignore_failure
from .plugin_nodes import PluginPlan

_ACTIVATIONS = frozenset({"Relu", "Sigmoid", "Swish"})


def propose_plan(graph: Graph, plan: PluginPlan) -> Proposal:
    """Propose to replace the old nodes of ``plan`` by the new nodes.

    Returns:
        the proposal, not yet proved.
    """
    first, *others = plan.outputs
    return Proposal(
        Finding("plugin", "fused", first.name, became=plan.became),
        pairs=(),
        changes=(NodeReplacement(first, plan.new, also=dict(enumerate(others, 1))),),
        sides=lambda: _iter_sides(graph, plan),
        unproved=ignore_failure,
    )


def _iter_sides(graph: Graph, plan: PluginPlan) -> Iterator[Equivalence]:
    """Yield pairs of old and new nodes that must be equal.

    The numbers of a ScaleShift were computed and then rounded. So its result before the activation is compared with the
    result of the exact numbers, and the activations are compared separately.
    """
    split = next(
        (i for i, n in enumerate(plan.old) if n.op in _ACTIVATIONS and plan.new[-1].op == "ScaleShift"), len(plan.old)
    )
    if split == len(plan.old):
        yield _sides_of_plan(graph, plan, plan.old, plan.outputs)
        return
    middle = plan.old[split - 1].outputs[0]
    yield _sides_of_plan(graph, plan, plan.old[:split], (middle,), {"activation": NONE})
    yield _activation_sides(graph, plan, middle, plan.old[split:])


def _sides_of_plan(
    graph: Graph,
    plan: PluginPlan,
    old: Sequence[gs.Node],
    outputs: Sequence[gs.Tensor],
    other: Mapping[str, Any] | None = None,
) -> Equivalence:
    """Return old and new nodes as an equivalence to prove.

    Args:
        other: attributes that override the attributes of the plugin nodes.
    """
    made = plan.new[-1].outputs[: len(outputs)]
    shapes = [_normalized_shape(plan), *(shape_of(graph, t) for t in plan.leaves[1:])]
    before = _make_side(graph, old, plan.leaves, outputs, {})
    after = _make_side(graph, plan.new, plan.leaves, made, other or {})
    return Equivalence(tuple(shapes), before, after, outputs[0].name, graph=graph, nodes=tuple(plan.new))


def _normalized_shape(plan: PluginPlan) -> tuple[Size, ...]:
    """Return the shape of the normalized tensor, with dims filled in from its parameters."""
    return tuple(dim_size(d, f"{plan.leaves[0].name}:{i}") for i, d in enumerate(plan.shape))


def _activation_sides(graph: Graph, plan: PluginPlan, middle: gs.Tensor, old: Sequence[gs.Node]) -> Equivalence:
    activation = int(plan.new[-1].attrs["activation"])
    before = _make_side(graph, old, (middle,), plan.outputs, {})
    return Equivalence(
        (_normalized_shape(plan),),
        before,
        lambda m, values: [apply_activation(m, values[0], activation)],
        plan.outputs[0].name,
    )


def _make_side(
    graph: Graph,
    nodes: Sequence[gs.Node],
    leaves: Sequence[gs.Tensor],
    outputs: Sequence[gs.Tensor],
    other: Mapping[str, Any],
) -> Side:
    found = {id(node): _plugin_definition(node, other) for node in nodes}
    definitions = {key: definition for key, definition in found.items() if definition is not None}

    def evaluate_side(m: ProofInterpreter, values: Sequence[Value]) -> list[Value]:
        """Evaluate the nodes for values of the leaves.

        Returns:
            values of the nodes' outputs.
        """
        env: dict[int, Any] = dict(zip(map(id, leaves), values, strict=True))
        evaluate_nodes(m, graph, nodes, env, definitions)
        return [env[id(t)] for t in outputs]

    return evaluate_side


def is_plugin_node(node: gs.Node) -> bool:
    """Check if a node is one of this project's plugins.

    Returns:
        true if the node has the domain ``normdeploy`` and a plugin namespace.
    """
    return node.domain == DOMAIN and "plugin_namespace" in node.attrs


def _plugin_definition(node: gs.Node, other: Mapping[str, Any]) -> NodeDefinition | None:
    """Return the computation of a plugin node or of the activation after it; None for other nodes."""
    if is_plugin_node(node):
        definition = TABLE[node.op]
        return lambda m, inputs, attrs: definition(m, inputs, {**attrs, **other})
    if "plugin_namespace" in node.attrs and (guest := third_party.norm_of_plugin(node.domain, node.op)) is not None:
        row = guest.row
        return lambda m, inputs, attrs: apply_op_of_domain(m, row.op, row.domains[0], inputs, attrs, row.since, 1)
    if node.op == "Relu" and not node.domain:
        return lambda m, inputs, attrs: (leaky_relu(m, inputs[0], 0.0),)
    return None
