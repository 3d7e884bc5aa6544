"""Move scales and shifts into linear layers before quantization; each move is proved (`normdeploy.proof`).

A norm's gamma and beta give the channels of its result different ranges, but a quantized activation has only one scale.
Let n = (x − mean)/sqrt(var + ε), and choose any s > 0 for each channel. Then

    γ∘n + β = y            W·y + c = (W·diag(γ·s))·(n/s) + (c + W·β)

So the norm computes n/s with gamma 1/s, and the linear layer reads n/s. The layer's weight and bias absorb γ·s and β.
All other readers of y (a residual, an output, another op) read (n/s)·(γ·s) + β. With s = 1, all channels of n have the
same variance. Any other s (SmoothQuant, Xiao et al., arXiv 2211.10438) makes the range of the activations smaller and
the range of the weights larger, or the reverse. In this case 1/s is stored exactly, and γ∘s is rounded once
(`normdeploy.quantization.smoothing.smoothing_factors`).

If no norm precedes the layer, two ops before the layer compute (y − shift)/s, with one shift per channel (Wei et al.,
Outlier Suppression+, arXiv 2304.09145).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ..findings.quantization_report import Migration
from ..findings.records import Certificate
from ..forms.channel_views import input_channel_vector
from ..forms.constant_linear import ConstantLinear, absorb_added_bias, constant_linear_of
from ..forms.fold_expressions import FoldExpressions, FoldShare
from ..graphs.graph import Graph
from ..graphs.region import RefusedError, compile_region, require_success
from ..recognition.affine_chains import AffineChain, measure_affine
from ..rewriting.certification import ResultPair, pair_of
from ..rewriting.rewrite_ledger import RewriteOptions
from ..rewriting.rewriter import DecidedProposal, Rewriter
from .linear_layers import SPLIT, LayerSource, find_linear_layers, layer_source
from .stream_edits import STAGE, layer_bias, prove_nodes


@dataclass(frozen=True)
class InputCondition:
    """Shift and scale of a tensor that linear layers read: (y − shift)/scale over its channels.

    Attributes:
        scale: [channels]. After a norm, float32 must represent 1/scale exactly.
        shift: [channels]; None for no shift.
        kind: kind of the migration, "smooth" or "shift".
        alpha: SmoothQuant's α; None for other factors.
        reach: the range for quantization is from −reach to reach; None to use the range of the samples.
        recentred: bool [channels], True if the bias compensates the channel's shift with the rounded weight
            (`bias_corrections`). None means True for all channels.
    """

    scale: np.ndarray
    shift: np.ndarray | None = None
    kind: str = "smooth"
    alpha: float | None = None
    reach: float | None = None
    recentred: np.ndarray | None = None


@dataclass
class _MigrationPass:
    rewriter: Rewriter
    conditions: Mapping[str, InputCondition]
    migrations: list[Migration] = field(default_factory=list)
    # (id of the new input, id of the original view) → copy of the view, which all layers share.
    views: dict[tuple[int, int], gs.Node] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.rewriter.graph

    def replace_output(
        self,
        old: gs.Tensor,
        nodes: Sequence[gs.Node],
        pairs: tuple[ResultPair, ...] = (),
        made_of: FoldExpressions | None = None,
    ) -> DecidedProposal:
        """Replace the nodes that compute ``old`` by ``nodes``.

        Returns:
            the proposal as it was proved and applied.

        Raises:
            RefusedError: the replacement is not proved.
        """
        decided = prove_nodes(self.rewriter, old, nodes, pairs, made_of)
        self.rewriter.apply_decided(STAGE, decided)
        return decided


def migrate_scales(
    proto: onnx.ModelProto, conditions: Mapping[str, InputCondition] | None = None, idle: Collection[str] = ()
) -> tuple[onnx.ModelProto, tuple[Migration, ...]]:
    """Move the scale and shift of each norm into the linear layers after it.

    Args:
        proto: a float32 model with its weights; not changed.
        conditions: additional scale and shift, by the name of the tensor that the layers read. If a norm computes a
            tensor without a condition, the norm's scale and shift are moved with s = 1.
        idle: results of layers that stay float. Tensors that only these layers read are not changed.

    Returns:
        the model, and a record of each migration, made or refused.

    Raises:
        GraphError: the model can't be read.
    """
    work = _MigrationPass(Rewriter(Graph(proto), RewriteOptions()), conditions or {})
    for y, nodes in _float32_layer_groups(work.graph):
        if not all(_layer_result_name(work.graph, node) in idle for node in nodes):
            _migrate_into_layers(work, y, nodes)
    return work.rewriter.build_proto(), tuple(work.migrations)


def migrate_norm_scales(rewriter: Rewriter, results: Collection[int]) -> list[Migration]:
    """Do the same as `migrate_scales`, but only for some norms of a graph that is already being rewritten.

    Args:
        results: ids of the results of the norms to migrate.

    Returns:
        a record of each migration, made or refused.
    """
    work = _MigrationPass(rewriter, {})
    for y, nodes in _float32_layer_groups(work.graph):
        if id(y) in results:
            _migrate_into_layers(work, y, nodes)
    return work.migrations


def _float32_layer_groups(graph: Graph) -> list[tuple[gs.Tensor, list[gs.Node]]]:
    """Group the float32 linear layers by the tensor that they read."""
    groups: dict[int, list[gs.Node]] = {}
    inputs: dict[int, gs.Tensor] = {}
    for linear in find_linear_layers(graph):
        if isinstance(linear, ConstantLinear) and graph.dtype(linear.data_input) == np.float32:
            data = layer_source(graph, linear.data_input).y
            groups.setdefault(id(data), []).append(linear.node)
            inputs[id(data)] = data
    return [(inputs[key], nodes) for key, nodes in groups.items()]


def _migrate_into_layers(work: _MigrationPass, y: gs.Tensor, nodes: Sequence[gs.Node]) -> None:
    """Move the scale and shift before ``y`` into the layers ``nodes`` that read it."""
    graph, condition = work.graph, work.conditions.get(y.name)
    source = layer_source(graph, y)
    if source.affine is None:
        whole = source.norm
    else:
        whole = None
    if whole is None:
        inputs = []
    else:
        inputs = [_as_initializer(graph, t) for t in whole.inputs]
    if source.affine is None and source.norm is not None:
        try:
            split = _split_norm_parameters(work, source, condition)
        except RefusedError as error:
            names = tuple(_layer_result_name(graph, node) for node in nodes)
            work.migrations.append(Migration("gamma and beta", y.name, names, "refused", str(error)))
            return
        if split:
            source = layer_source(graph, y)
    if source.affine is None:
        if condition is not None and (condition.shift is not None or bool((condition.scale != 1).any())):
            _move_into_each(work, y, nodes, condition, lambda linear: _apply_condition(work, y, linear, condition))
        return
    affine = source.affine
    if affine.scale.size == 1 and not affine.shift.any() and float(affine.scale.reshape(-1)[0]) == 1.0:
        return
    _move_into_each(work, y, nodes, condition, lambda linear: _fold_affine(work, affine, linear))
    if whole is not None and all(m.status == "refused" for m in work.migrations[-len(nodes) :]):
        # No layer absorbed the scale or shift, so write the norm as one node again, as in the file.
        same = graph.make_node(whole.op, inputs, y, dict(whole.attrs), domain=whole.domain or "")
        with contextlib.suppress(RefusedError):
            work.replace_output(y, [same])
        return
    _redirect_shape_readers(work, affine.z, y)


def _as_initializer(graph: Graph, t: gs.Tensor) -> gs.Tensor:
    """Replace the result of a Constant node by an initializer.

    The Constant node would be removed once no other node reads it.

    Other tensors are returned as they are.
    """
    if t.is_empty() or isinstance(t, gs.Constant) or (value := graph.known_value(t)) is None:
        return t
    return graph.add_constant(t.name, value, graph.dtype(t))


def _redirect_shape_readers(work: _MigrationPass, z: gs.Tensor, y: gs.Tensor) -> None:
    """Make the readers of the shape of ``y`` read the shape of ``z``.

    The two shapes are equal. Without this change, ``y`` would still be computed, only for its shape.
    """
    graph = work.graph
    if graph.shape(y) is None or graph.shape(y) != graph.shape(z):
        return
    for node in graph.consumers(y):
        if node.op in ("Shape", "Size"):
            asked = graph.make_node(node.op, [z], node.outputs[0], dict(node.attrs))
            with contextlib.suppress(RefusedError):
                work.replace_output(node.outputs[0], [asked])


def _layer_result_name(graph: Graph, node: gs.Node) -> str:
    """Return the name of the layer's result, after an added bias; rewrites keep this name."""
    linear = constant_linear_of(graph, node)
    if isinstance(linear, ConstantLinear):
        return absorb_added_bias(graph, linear).out.name
    return str(node.outputs[0].name)


def _move_into_each(
    work: _MigrationPass,
    y: gs.Tensor,
    nodes: Sequence[gs.Node],
    condition: InputCondition | None,
    move: Callable[[ConstantLinear], Certificate],
) -> None:
    """Call ``move`` for each layer, and record each success or refusal."""
    if condition is None:
        kind = "gamma and beta"
    else:
        kind = condition.kind
    if condition is None:
        alpha = None
    else:
        alpha = condition.alpha
    for node in nodes:
        name = _layer_result_name(work.graph, node)
        try:
            linear = require_success(constant_linear_of(work.graph, node))
            done = move(absorb_added_bias(work.graph, linear))
            work.migrations.append(Migration(kind, y.name, (name,), "made", "", alpha, done))
        except RefusedError as error:
            work.migrations.append(Migration(kind, y.name, (name,), "refused", str(error), alpha))


def _split_norm_parameters(work: _MigrationPass, source: LayerSource, condition: InputCondition | None) -> bool:
    """Write a norm's gamma and beta as a Mul and an Add after the norm.

    Returns:
        False if the norm has no gamma and beta to separate.

    Raises:
        RefusedError: they can't be separated.
    """
    graph = work.graph
    node = source.norm
    y = source.y
    assert node is not None
    if node.op not in SPLIT or (not condition and not _is_scaling(graph, node)):
        return False
    known = [graph.known_value(t) if not t.is_empty() else None for t in node.inputs[1:3]]
    gamma = known[0]
    beta = known[1] if len(known) > 1 else None
    if gamma is None or (len(node.inputs) > 2 and beta is None):
        raise RefusedError(f"gamma or beta of {node.op} {node.name!r} is not constant")
    rank = len(graph.shape(y) or ())
    axis = int(graph.attrs(node).get("axis", -1))
    if (
        gamma.ndim != 1
        or not rank
        or axis % rank != rank - 1
        or sum(o.name != "" and bool(graph.consumers(o)) for o in node.outputs[1:])
    ):
        raise RefusedError(f"{node.op} {node.name!r} normalizes over several axes, or its statistics are also used")
    scale = np.ones_like(gamma) if condition is None else condition.scale
    if scale.shape != gamma.shape:
        raise RefusedError(f"{len(scale)} factors were passed for the {len(gamma)} channels of {node.op} {node.name!r}")
    dtype = np.dtype(np.float32)
    inverse = graph.add_constant(f"{y.name}_inverse", (1.0 / scale).astype(dtype).astype(np.float64), dtype)
    norm = graph.make_node(node.op, [node.inputs[0], inverse], y, dict(node.attrs), domain=node.domain or "")
    nodes = [norm]
    expressions = None
    factor = gamma / inverse.values.astype(np.float64)
    if (factor != 1).any():
        nodes.append(graph.make_node("Mul", [norm.outputs[0], graph.add_constant(f"{y.name}_gamma", factor, dtype)], y))
        expressions = _quotient_expression(graph, nodes[1], gamma, inverse)
    if beta is not None and beta.any():
        nodes.append(
            graph.make_node("Add", [nodes[-1].outputs[0], graph.add_constant(f"{y.name}_beta", beta, dtype)], y)
        )
    if len(nodes) == 1:
        return False
    pair = pair_of(graph, y, [node.inputs[0]], nodes[-1].outputs[0])
    work.replace_output(y, nodes, (pair,), expressions)
    return True


def _quotient_expression(graph: Graph, scaled: gs.Node, gamma: np.ndarray, inverse: gs.Constant) -> FoldExpressions:
    """Express the factor of ``scaled`` before rounding: the original gamma divided by the norm's new gamma."""
    z, factor = scaled.inputs
    divided = graph.make_node("Div", [z, inverse], z)
    end = graph.make_node(
        "Mul", [divided.outputs[0], graph.add_constant(f"{z.name}_whole", gamma, gamma.dtype)], z
    ).outputs[0]
    return FoldExpressions(require_success(compile_region(graph, end, [z])), scale=(factor,))


def _is_scaling(graph: Graph, node: gs.Node) -> bool:
    known = [graph.known_value(t) for t in node.inputs[1:3] if not t.is_empty()]
    return any(v is None or bool((v != neutral).any()) for v, neutral in zip(known, (1.0, 0.0), strict=False))


def _fold_affine(work: _MigrationPass, affine: AffineChain, linear: ConstantLinear) -> Certificate:
    """Make ``linear`` read z instead of y = a·z + b."""
    graph = work.graph
    if linear.w.ndim != 2 and linear.node.op == "MatMul":
        raise RefusedError(f"{linear.title} has a stack of weights")
    t = linear.data_input
    views = layer_source(graph, linear.data_input).views
    nodes = list[gs.Node]()
    a, b = (input_channel_vector(graph, values, affine.y, t, linear) for values in (affine.scale, affine.shift))
    if a is None or b is None:
        raise RefusedError(f"its scale or shift varies along more axes than the input channels of {linear.title}")
    if linear.has_padding() and b.any():
        raise RefusedError(f"{linear.title} pads its input with zeros, which the shift would have to change")
    data = affine.z
    made: dict[tuple[int, int], gs.Node] = {}
    for view in views:
        key = id(data), id(view)
        node = work.views.get(key)
        if node is None or not graph.is_alive(node):
            node = made[key] = graph.make_node(view.op, [data, *view.inputs[1:]], view.outputs[0], dict(view.attrs))
            nodes.append(node)
            if (shape := graph.shape(view.outputs[0])) is not None:
                graph.record_type(node.outputs[0], None, shape)
        data = node.outputs[0]
    done = _write_layer(work, affine, linear, (a, b), nodes, data, affine.z)
    work.views |= made
    return done


def _apply_condition(
    work: _MigrationPass, y: gs.Tensor, linear: ConstantLinear, condition: InputCondition
) -> Certificate:
    """Make ``linear`` read (y − shift)/s."""
    graph = work.graph
    rank = len(graph_shape) if (graph_shape := work.graph.shape(y)) else 0
    if linear.w.ndim != 2 and linear.node.op == "MatMul":
        raise RefusedError(f"{linear.title} has a stack of weights")
    if len(condition.scale) != linear.input_channels:
        raise RefusedError(
            f"{len(condition.scale)} factors were passed for the {linear.input_channels} input channels of "
            f"{linear.title}"
        )
    if linear.data_input is not y or not rank:
        raise RefusedError("views separate the two, or its rank is unknown")
    if condition.shift is not None and linear.has_padding():
        raise RefusedError(f"{linear.title} pads its input with zeros, which the shift would have to change")
    laid = [-1 if i == linear.input_channel_axis(rank) else 1 for i in range(rank)]
    dtype = np.dtype(np.float32)
    nodes = list[gs.Node]()
    data = y
    back: list[tuple[str, gs.Constant]] = []
    for op, value, inverse in (
        ("Sub", condition.shift, "Add"),
        ("Div", None if (condition.scale == 1).all() else condition.scale, "Mul"),
    ):
        if value is None:
            continue
        constant = graph.add_constant(f"{y.name}_{op.lower()}", value.astype(np.float32).reshape(laid), dtype)
        nodes.append(graph.make_node(op, [data, constant], y))
        data = nodes[-1].outputs[0]
        back.insert(0, (inverse, constant))
    z = end = data
    for op, constant in back:
        end = graph.make_node(op, [end, constant], y).outputs[0]
    affine = require_success(measure_affine(graph, z, end))
    a, b = (input_channel_vector(graph, values, end, end, linear) for values in (affine.scale, affine.shift))
    if a is None or b is None:
        raise RefusedError(f"its factors vary along more axes than the input channels of {linear.title}")
    return _write_layer(work, affine, linear, (a, b), nodes, z, y)


def _write_layer(
    work: _MigrationPass,
    affine: AffineChain,
    linear: ConstantLinear,
    vectors: tuple[np.ndarray, np.ndarray],
    nodes: list[gs.Node],
    data: gs.Tensor,
    leaf: gs.Tensor,
) -> Certificate:
    graph = work.graph
    made = require_success(linear.write_nodes(graph, data, *linear.scale_input(*vectors), linear.out, affine.dtype))
    weight = made[0].inputs[linear.weight]
    bias = layer_bias(made)
    share = FoldShare(linear, "input" if vectors[1].any() else "scale", *vectors, weight, bias, bool(nodes))
    pair = pair_of(graph, linear.out, [leaf], made[-1].outputs[0])
    done = work.replace_output(linear.out, [*nodes, *made], (pair,), FoldExpressions(affine.region, shares=(share,)))
    assert done.certificate is not None
    return done.certificate
