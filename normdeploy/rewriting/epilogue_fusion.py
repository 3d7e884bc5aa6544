"""Join a norm node with its neighbors into one op of this project (``--fuse portable``).

- Add, then a norm over the last axis: AddLayerNorm, AddRMSNorm. The sum stays an output for the residual stream.
- LayerNormalization with scale 1 + s and bias t, both data: ModulatedLayerNorm (DiT, Peebles and Xie 2022).
- GroupNorm or GroupNormalization, then SiLU (Sigmoid and Mul, or Swish): GroupNormSiLU.
- Group or instance norm, then Mul and Add by data, and possibly SiLU: AdaGroupNorm, AdaGroupNormSiLU
  (`normdeploy.rewriting.adaptive_norms`).
- RMS norm over the last axis, times SiLU or the sigmoid of a tensor of its shape: GatedRMSNorm, SigmoidGatedRMSNorm
  (`normdeploy.rewriting.silu_gates`).

At this stage each norm is a single node in one spelling, so its neighbors are matched by structure. The certificate
does not rely on this match: it compares the computed functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from ..findings.records import Certificate, Finding, combine_certificates
from ..forms.norm_writer import format_epsilon
from ..graphs.dims import Dims, is_invented_name
from ..graphs.graph import Graph
from ..graphs.own_op_functions import DOMAIN, JOINED, oldest_opset
from ..graphs.region import Refusal
from ..norms.function_bodies import describe_missing
from ..norms.norm_table import OURS, STANDARD
from ..option_values import CUDA
from ..recognition import norm_attributes
from .adaptive_norms import find_adaptive_norm, write_adaptive_parameters
from .certification import pair_of, unproved_finding
from .epilogue_rounding_cases import NormGrouping, make_epilogue_trial
from .node_queries import (
    channel_values,
    constant_number,
    is_own_group_norm,
    is_standard_op,
    silu_nodes,
    standard_producer,
)
from .proposals import NodeReplacement, Proposal, Remark, RewriteTarget
from .silu_gates import find_gate, find_gate_before, strip_widening_casts

# Activation of the gate -> op of an RMS norm with such a gate
_GATED_OPS = {"SiLU": "GatedRMSNorm", "Sigmoid": "SigmoidGatedRMSNorm"}


@dataclass(frozen=True)
class EpilogueFusion:
    """One of normdeploy's own ops, and the nodes that it replaces.

    Attributes:
        op: name of this op.
        norm: result of the norm node.
        old: tensors that the op's outputs replace, the norm's result first.
        leaves: input data of the nodes before and after the fusion.
        inputs: inputs of the op.
        attrs: attributes of the op.
        grouping: which elements are normalized together.
        scale: constant scale of the norm; None if it is data.
        norm_op: type of the norm node.
        before: op types of the joined nodes before the norm.
        behind: op types of the joined nodes after the norm.
        differs: True if the op's body computes the norm by other nodes than the norm node.
        views: new nodes before the op that compute an input from a leaf.
    """

    op: str
    norm: gs.Tensor
    old: tuple[gs.Tensor, ...]
    leaves: tuple[gs.Tensor, ...]
    inputs: tuple[gs.Tensor, ...]
    attrs: dict[str, float | int]
    grouping: NormGrouping
    scale: gs.Tensor | None
    norm_op: str
    before: str = ""
    behind: str = ""
    differs: bool = False
    views: tuple[gs.Node, ...] = ()


def propose_epilogue_fusion(graph: Graph, node: gs.Node, target: RewriteTarget) -> Proposal | Finding | Remark | None:
    """Propose to join the norm of ``node`` with its neighbors.

    Returns:
        the proposal; a finding if ``node`` is already a joined op; a remark if a gate stays before the norm; None if
        there is nothing to join.
    """
    if (
        node.domain == DOMAIN
        and node.op in JOINED
        and not describe_missing(OURS[node.op], [t.name for t in node.inputs], node.attrs)
    ):
        return _own_op_finding(graph, node, node.outputs[0], target)
    for find in (_match_modulation, _match_residual_add, _match_silu_epilogue, _match_adaptive_norm, _match_gate):
        found = find(graph, node)
        # onnxruntime's CUDA provider has a good kernel for Add and LayerNormalization. The op's body would prevent it.
        if found is not None and not (found.op == "AddLayerNorm" and target.wanted.runtime == CUDA):
            return _epilogue_proposal(graph, found, target)
    return _remark_gate_before(graph, node, target)


# ------------------------------------------------------------------ what may be joined


def _match_residual_add(graph: Graph, node: gs.Node) -> EpilogueFusion | None:
    """Match a norm of the sum of two tensors of one shape."""
    row = _match_row_norm(graph, node)
    if row is not None:
        add = standard_producer(graph, node.inputs[0], "Add", "Sum")
    else:
        add = None
    if row is None or add is None or len(add.inputs) != 2 or not all(map(graph.is_constant, node.inputs[1:])):
        return None
    total = add.outputs[0]
    shapes = [graph.shape(t) for t in (*add.inputs, total)]
    if any(graph.is_constant(t) for t in add.inputs) or len(set(shapes)) > 1:
        return None
    op, parameters = (
        ("AddLayerNorm", _scale_and_bias(graph, node)) if row.centered else ("AddRMSNorm", node.inputs[1:2])
    )
    attrs = {"epsilon": row.epsilon, "stash_type": row.stash}
    y = node.outputs[0]
    leaves = tuple(add.inputs)
    return EpilogueFusion(
        op,
        y,
        (y, total),
        leaves,
        (*leaves, *parameters),
        attrs,
        NormGrouping(row.epsilon, row.centered, added=True),
        parameters[0],
        node.op,
        add.op,
    )


def _match_modulation(graph: Graph, node: gs.Node) -> EpilogueFusion | None:
    """Match a LayerNormalization with scale 1 + s and bias t, both data of shape (B, 1, D)."""
    row = _match_row_norm(graph, node)
    if row is None or node.op != "LayerNormalization" or len(node.inputs) < 3:
        return None
    x, scale, shift = node.inputs[:3]
    shape = graph.shape(x)
    if (
        not _is_static_shape(shape)
        or shape is None
        or len(shape) < 3
        or any(graph.is_constant(t) for t in (scale, shift))
    ):
        return None
    if any(graph.shape(t) != (shape[0], *[1] * (len(shape) - 2), shape[-1]) for t in (scale, shift)):
        return None
    weight = _strip_added_one(graph, scale)
    if weight is None:
        return None
    plain, s, views = weight
    attrs = {"epsilon": row.epsilon, "stash_type": row.stash}
    y = node.outputs[0]
    return EpilogueFusion(
        "ModulatedLayerNorm",
        y,
        (y,),
        (x, plain, shift),
        (x, s, shift),
        attrs,
        NormGrouping(row.epsilon),
        None,
        node.op,
        "Add",
        views=views,
    )


def _match_silu_epilogue(graph: Graph, node: gs.Node) -> EpilogueFusion | None:
    """Match a group norm with a scale per channel that only SiLU reads."""
    standard = is_standard_op(node, "GroupNormalization") and graph.opset >= STANDARD["GroupNormalization"].since
    if not standard and not is_own_group_norm(node):
        return None
    x, *parameters = node.inputs
    shape = graph.shape(x)
    dtype = graph.dtype(x)
    attrs = graph.attrs(node)
    y = node.outputs[0]
    activation = silu_nodes(graph, y)
    if not activation or shape is None or len(shape) < 3 or not isinstance(shape[1], int):
        return None
    # The op computes in float32.
    if dtype is None or dtype.itemsize > 4:
        return None
    scale, bias = (_stored_parameter(graph, t, shape[1]) for t in parameters)
    if scale is None or bias is None:
        return None
    epsilon = float(attrs.get("epsilon", 1e-5))
    groups = int(attrs["num_groups"])
    given: dict[str, float | int] = {"epsilon": epsilon, "num_groups": groups}
    return EpilogueFusion(
        "GroupNormSiLU",
        y,
        (activation[-1].outputs[0],),
        (x,),
        (x, scale, bias),
        given,
        NormGrouping(epsilon, groups=groups),
        scale,
        node.op,
        behind=" ".join(n.op for n in activation),
        differs=standard,
    )


def _stored_parameter(graph: Graph, t: gs.Tensor, channels: int) -> gs.Tensor | None:
    """Return a parameter as a constant with one number for each channel; None if it is something else.

    torch computes the parameters of a norm without weights from a shape.
    """
    value = channel_values(graph, t, channels)
    if value is None or graph.is_constant(t):
        return t if value is not None else None
    return graph.add_constant(f"{t.name}_stored", value, graph.dtype(t))


def _match_adaptive_norm(graph: Graph, node: gs.Node) -> EpilogueFusion | None:
    """Match a group or instance norm that only a product with data reads, and that product only a sum with data."""
    found = find_adaptive_norm(graph, node)
    if found is None:
        return None
    scale, shift, views = write_adaptive_parameters(graph, found)
    return EpilogueFusion(
        found.op,
        node.outputs[0],
        (found.result,),
        (node.inputs[0], found.scale, found.shift),
        (node.inputs[0], scale, shift),
        {"epsilon": found.epsilon, "num_groups": found.groups},
        NormGrouping(found.epsilon, groups=found.groups, scaled=True, sized=node.op == "LayerNormalization"),
        node.inputs[1],
        node.op,
        behind=" ".join(n.op for n in found.nodes),
        differs=True,
        views=views,
    )


def _match_gate(graph: Graph, node: gs.Node) -> EpilogueFusion | None:
    """Match an RMS norm that only a product with an activation of a gate reads; the gate is data of the norm's shape.

    The activation is SiLU or the sigmoid.
    """
    row = _match_row_norm(graph, node)
    if row is None or row.centered or not all(map(graph.is_constant, node.inputs[1:])):
        return None
    x, scale = node.inputs[:2]
    y = node.outputs[0]
    # The body widens X itself, so a half-precision X before a Cast will do if the product is cast back.
    narrow = strip_widening_casts(graph, x)
    found = find_gate(graph, y, graph.dtype(narrow))
    if found is not None:
        x = narrow
    else:
        found = find_gate(graph, y, graph.dtype(x))
    # A gate that is the norm's input is another function of one tensor.
    if found is None or graph.is_constant(found.gate) or strip_widening_casts(graph, found.gate) is narrow:
        return None
    shape = graph.shape(x)
    if not _is_static_shape(shape) or graph.shape(found.gate) != shape:
        return None
    return EpilogueFusion(
        _GATED_OPS[found.activation],
        y,
        (found.product,),
        (x, found.gate),
        (x, scale, found.gate),
        {"epsilon": row.epsilon, "stash_type": row.stash},
        NormGrouping(row.epsilon, centered=False, gate=found.activation),
        scale,
        node.op,
        behind=" ".join(n.op for n in found.nodes),
    )


def _remark_gate_before(graph: Graph, node: gs.Node, target: RewriteTarget) -> Remark | None:
    """Name the gate of an RMS norm of h · SiLU(g). No op of this project has this order."""
    row = _match_row_norm(graph, node)
    gate = find_gate_before(graph, node.inputs[0]) if row is not None and not row.centered else None
    entry = target.entry_of(node.outputs[0].name)
    if gate is None or entry is None:
        return None
    note = f"the gate {gate.name!r} comes before the norm, so its SiLU and product stay"
    return Remark([entry], lambda finding: replace(finding, notes=(*finding.notes, note)))


@dataclass(frozen=True)
class _RowNorm:
    """Norm over the last axis only."""

    centered: bool
    epsilon: float
    stash: int


def _match_row_norm(graph: Graph, node: gs.Node) -> _RowNorm | None:
    ours = node.domain == DOMAIN and node.op == "RMSNorm"
    # The node has the name of one of normdeploy's own ops, but not the inputs of this op.
    if ours and describe_missing(OURS[node.op], [t.name for t in node.inputs], node.attrs):
        return None
    if not ours and not is_standard_op(node, "LayerNormalization", "RMSNormalization"):
        return None
    attrs = graph.attrs(node)
    shape = graph.shape(node.inputs[0])
    if ours:
        axes = [int(a) for a in attrs["axes"]]
    else:
        axes = [int(attrs.get("axis", -1))]
    if shape is None or len(axes) != 1 or axes[0] not in (-1, len(shape) - 1):
        return None
    # The optional outputs, mean and inverse standard deviation, must be unused.
    if any(graph.is_output(t) or graph.consumers(t) for t in node.outputs[1:]):
        return None
    if not all(_is_row_parameter(graph.shape(t), shape[-1]) for t in node.inputs[1:] if graph.is_constant(t)):
        return None
    return _RowNorm(node.op == "LayerNormalization", float(attrs.get("epsilon", 1e-5)), int(attrs.get("stash_type", 1)))


def _is_row_parameter(shape: Dims | None, n: int | str | None) -> bool:
    """Return True if a parameter holds one number, or one per element of the last axis."""
    return shape is not None and all(d == 1 for d in shape[:-1]) and (not shape or shape[-1] in (1, n))


def _scale_and_bias(graph: Graph, node: gs.Node) -> list[gs.Tensor]:
    scale, *rest = node.inputs[1:3]
    if rest and not rest[0].is_empty():
        return [scale, rest[0]]
    return [
        scale,
        graph.add_constant(f"{node.outputs[0].name}_bias", np.zeros_like(graph.value(scale)), graph.dtype(scale)),
    ]


def _strip_added_one(graph: Graph, scale: gs.Tensor) -> tuple[gs.Tensor, gs.Tensor, tuple[gs.Node, ...]] | None:
    """Return s of a scale 1 + s, s in the scale's shape, and the new nodes that reshape s to it."""
    views: list[gs.Node] = []
    node = graph.producer(scale)
    while (
        node is not None
        and is_standard_op(node, "Unsqueeze", "Reshape")
        and all(map(graph.is_constant, node.inputs[1:]))
    ):
        views.append(node)
        node = graph.producer(node.inputs[0])
    if node is None or not is_standard_op(node, "Add"):
        return None
    ones = [t for t in node.inputs if constant_number(graph, t) == 1.0]
    others = [t for t in node.inputs if not any(t is one for one in ones)]
    if len(ones) != 1 or graph.shape(others[0]) != graph.shape(node.outputs[0]):
        return None
    plain = s = others[0]
    made: list[gs.Node] = []
    for view in reversed(views):
        made.append(graph.make_node(view.op, [s, *view.inputs[1:]], view.outputs[0], graph.attrs(view)))
        s = made[-1].outputs[0]
    return plain, s, tuple(made)


def _is_static_shape(shape: Dims | None) -> bool:
    return bool(shape) and not any(d is None or is_invented_name(d) for d in shape or ())


# ------------------------------------------------------------------ what is written


def _epilogue_proposal(graph: Graph, found: EpilogueFusion, target: RewriteTarget) -> Proposal:
    node = graph.make_node(found.op, found.inputs, found.old[0], found.attrs, DOMAIN, outputs=len(found.old))
    pairs = [pair_of(graph, old, found.leaves, new) for old, new in zip(found.old, node.outputs, strict=True)]
    norm = target.entry_of(found.norm.name)
    if norm is None:
        told = _own_op_finding(graph, node, found.norm, target)
    else:
        told = norm.finding
    if found.scale is not None:
        scale = graph.known_value(found.scale)
    else:
        scale = None
    return Proposal(
        told,
        tuple(pairs),
        (_epilogue_replacement(found, node),),
        unproved=lambda failure: (
            None
            if isinstance(failure, Refusal)
            else unproved_finding(_own_op_finding(graph, node, found.norm, target), failure)
        ),
        opset=oldest_opset(found.op),
        # If the norm is certified, onnxruntime already ran the nodes of the body, so no trial is needed.
        trial=None
        if told.certificate is not None and not found.differs
        else make_epilogue_trial(found.grouping, scale, oldest_opset(found.op)),
        revised_entries=() if norm is None else (norm,),
        revise=lambda finding, certificate: _epilogue_finding(finding, found, node, certificate, target.wanted.census),
    )


def _epilogue_replacement(found: EpilogueFusion, node: gs.Node) -> NodeReplacement:
    if len(found.old) == 1:
        return NodeReplacement(found.old[0], (*found.views, node))
    # The op takes the place of the Add, because other nodes may read the sum before the norm does.
    return NodeReplacement(found.old[1], (node,), output=1, also={0: found.old[0]})


def _epilogue_finding(
    norm: Finding, proposal: EpilogueFusion, node: gs.Node, certificate: Certificate | None, census: bool
) -> Finding:
    """Merge the findings of a norm and its joined neighbors, and add up the errors of the two steps."""
    again = norm.status == "fused"
    return replace(
        norm,
        status="fused",
        tensor=proposal.old[0].name,
        spelling=" ".join(
            filter(None, (proposal.before, norm.spelling if again else proposal.norm_op, proposal.behind))
        ),
        became=f"{DOMAIN}.{proposal.op}({_format_attributes(proposal.attrs)})",
        reason="",
        certificate=combine_certificates(norm.certificate, certificate),
        proved=norm.proved or ("identity",),
        nodes_left=1,
        written=tuple(t.name for t in node.outputs) if census else (),
    )


def _format_attributes(attrs: Mapping[str, float | int]) -> str:
    return ", ".join(
        f"{k}={format_epsilon(v) if isinstance(v, float) else v}" for k, v in attrs.items() if k != "stash_type"
    )


def _own_op_finding(graph: Graph, node: gs.Node, norm: gs.Tensor, target: RewriteTarget) -> Finding:
    """Build the finding of one of normdeploy's own ops before the op is in the graph.

    Args:
        norm: result of the norm in the op.
    """
    producer = graph.producer(norm)
    dtype = graph.dtype(norm)
    attrs = graph.attrs(node)
    finding = Finding(
        kind=OURS[node.op].kind,
        status="kept",
        tensor=norm.name,
        module=graph.module(producer) if producer is not None else "",
        spelling=node.op,
        reason="it is already one node",
        axes=_normalized_axes(graph, node),
        epsilon=float(attrs["epsilon"]),
        dtype=dtype.name if dtype is not None else "",
    )
    if target.wanted.census:
        return replace(finding, **norm_attributes.attributes_of_joined(graph, node, float(attrs["epsilon"])))
    return finding


def _normalized_axes(graph: Graph, node: gs.Node) -> tuple[int, ...]:
    """Return the normalized axes: for a group norm all axes but the batch, else the last axes."""
    rank = len(graph.shape(node.inputs[0]) or ())
    attrs = graph.attrs(node)
    # A quantized norm may have several axes.
    if rank and ("axis" in attrs or "axes" in attrs):
        return tuple(range(min(a % rank for a in attrs.get("axes") or [attrs["axis"]]), rank))
    if OURS[node.op].kind == "GroupNorm":
        return tuple(range(1, rank))
    return (rank - 1,)
