"""Choose the nodes that stay float32 in a half-precision model.

Nodes with a reason stay float32 (``float32_reasons``), and so do some nodes around them.

The following nodes stay float32 because of a node with a reason:

- nodes that compute squares, if a reduction in float32 adds up the squares;
- the nodes after a statistic or an epsilon, up to the division by it;
- readers of a tensor whose values do not fit into half precision;
- cheap nodes between float32 nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

from ..findings.precision_report import Float32Region
from .exact_arguments import find_exact_arguments
from .float32_reasons import MOVES, REDUCTIONS, STEPS, describe_overflow, explicit_float32_nodes, float32_reason
from .logits import find_inexact_logits, find_logarithms
from .precision_view import PrecisionView, module_path

_SQUARES = frozenset({"Mul", "Pow", "Abs", "Sub"})
_HEAVY = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Attention", "LSTM", "GRU", "RNN", "Softmax"})


def find_float32_regions(
    view: PrecisionView,
    carried: Collection[str],
    wide_inputs: Collection[str],
    requested: Mapping[int, Float32Region],
) -> tuple[dict[int, Float32Region], list[Float32Region]]:
    """Find the nodes that stay float32, and group them into regions.

    Args:
        carried: tensors that carry a mask. Only their largest value has to fit into half precision, not their most
            negative value.
        wide_inputs: inputs of the graph that stay float32.
        requested: index of a node -> its region, for nodes that stay float32 although no rule requires it.

    Returns:
        index of a node -> its region, and the regions in the graph's order.
    """
    kept: dict[int, Float32Region] = {}
    author = explicit_float32_nodes(view)
    for i, node in enumerate(view.graph.node):
        if not view.has_floats(i):
            continue
        why = float32_reason(view, i, carried, author)
        if why is not None:
            kind, tensor, text, value = why
            kept[i] = Float32Region(kind, node.op_type, module_path(node), tensor, text, value)
    _keep_argument_nodes(view, kept)
    _keep_exponent_nodes(view, kept)
    for i, region in requested.items():
        kept.setdefault(i, region)
    _grow_regions(view, kept, carried, wide_inputs)
    return kept, _regions_in_order(view, kept)


def _keep_argument_nodes(view: PrecisionView, kept: dict[int, Float32Region]) -> None:
    """Keep the nodes that compute an argument that must not be rounded to half precision."""
    for argument in find_exact_arguments(view):
        node = view.graph.node[argument.place]
        region = Float32Region(
            argument.kind, node.op_type, module_path(node), node.output[0], argument.reason, argument.magnitude
        )
        for i in argument.made:
            kept.setdefault(i, region)


def _keep_exponent_nodes(view: PrecisionView, kept: dict[int, Float32Region]) -> None:
    """Keep logarithms whose argument would lose digits in half precision, and factors of the exponents of a softmax.

    A factor is kept only if rounding it to half precision would visibly change the result of the softmax.
    """
    form = view.form.dtype.name
    for what, places in find_logarithms(view):
        node = view.graph.node[places[0]]
        if what == "log-sigmoid":
            why = "the sigmoid of a large negative number is 0"
        else:
            why = "1 + x loses digits of a small x"
        region = Float32Region("logarithm", what, module_path(node), node.output[0], f"in {form} {why}")
        for i in places:
            # Replace an earlier reason, such as "the type has no such op", because this reason is more specific.
            kept[i] = region
    for i, (name, magnitude) in find_inexact_logits(view).items():
        node = view.graph.node[i]
        why = f"{form} rounds {name!r}, which is visible after a softmax of values up to {magnitude:.3g}"
        kept.setdefault(i, Float32Region("logits", node.op_type, module_path(node), name, why, magnitude))


# ------------------------------------------------------------------ nodes around the nodes with a reason


def _grow_regions(
    view: PrecisionView, kept: dict[int, Float32Region], carried: Collection[str], wide_inputs: Collection[str]
) -> None:
    """Add the nodes around the nodes kept so far, as the module's docstring describes."""
    roots = dict(kept)
    for i, region in roots.items():
        if region.kind == "statistics":
            _keep_squares(view, kept, i, region)
    counting = ("statistics", "constant")
    _keep_until_division(
        view, kept, {i: s for i, s in roots.items() if s.kind in counting and s.op in STEPS | REDUCTIONS}
    )
    for i, region in roots.items():
        if region.kind in ("range", "constant"):
            for j in (
                j
                for name in view.floating_outputs(i)
                if describe_overflow(view, name, carried)
                for j in view.readers.get(name, ())
            ):
                kept.setdefault(j, region)
    for name in wide_inputs:
        if why := describe_overflow(view, name, carried):
            for j in view.readers.get(name, ()):
                node = view.graph.node[j]
                kept.setdefault(
                    j, Float32Region("range", node.op_type, module_path(node), name, why, view.ranges[name].magnitude)
                )
    _keep_enclosed_nodes(view, kept, wide_inputs)


def _keep_squares(view: PrecisionView, kept: dict[int, Float32Region], i: int, region: Float32Region) -> None:
    """Keep the nodes whose results are read only by the reduction ``i``, which adds up these results."""
    stack = [view.producer[name] for name in view.floating_inputs(i) if name in view.producer]
    while stack:
        j = stack.pop()
        node = view.graph.node[j]
        alone = all(k in kept for k in view.reading_nodes(j)) and not view.outputs.intersection(node.output)
        if j not in kept and node.op_type in _SQUARES and alone:
            kept[j] = region
            stack += [view.producer[name] for name in view.floating_inputs(j) if name in view.producer]


def _keep_until_division(
    view: PrecisionView, kept: dict[int, Float32Region], seeds: Mapping[int, Float32Region]
) -> None:
    """Keep the nodes from statistics and epsilons up to and including the node that combines them with the data."""
    # Tensor -> region; the tensors are computed only from statistics, epsilons and constants.
    owner: dict[str, Float32Region] = {}
    for i, node in enumerate(view.graph.node):
        made_of = [owner[name] for name in view.floating_inputs(i) if name in owner]
        alone = len(made_of) == len(view.floating_inputs(i))
        if i in seeds:
            owner.update((name, seeds[i]) for name in view.floating_outputs(i))
        elif made_of and (node.op_type in STEPS or (node.op_type in MOVES and alone)):
            kept.setdefault(i, made_of[0])
            if alone:
                owner.update((name, made_of[0]) for name in view.floating_outputs(i))


def _keep_enclosed_nodes(view: PrecisionView, kept: dict[int, Float32Region], wide_inputs: Collection[str]) -> None:
    """Keep cheap nodes whose inputs and readers all stay float32, because they cost less than two Casts."""
    nodes = view.graph.node
    cheap = {
        i
        for i, n in enumerate(nodes)
        if i not in kept and view.has_floats(i) and n.op_type not in _HEAVY and view.floating_inputs(i)
    }
    fed: set[int] = set()
    for i in sorted(cheap):
        sources = [view.producer.get(name) for name in view.floating_inputs(i)]
        if all(
            s in kept or s in fed if s is not None else name in wide_inputs
            for s, name in zip(sources, view.floating_inputs(i), strict=True)
        ):
            fed.add(i)
    read: set[int] = set()
    for i in sorted(fed, reverse=True):
        after = list(view.reading_nodes(i))
        if after and all(j in kept or j in read for j in after) and not view.outputs.intersection(nodes[i].output):
            read.add(i)
            kept[i] = kept[after[0]]


def _regions_in_order(view: PrecisionView, kept: Mapping[int, Float32Region]) -> list[Float32Region]:
    """List the regions in the graph's order, each with the first outputs of its nodes."""
    members: dict[int, list[int]] = defaultdict(list)
    by_id: dict[int, Float32Region] = {}
    for i in sorted(kept):
        members[id(kept[i])].append(i)
        by_id[id(kept[i])] = kept[i]
    return [
        replace(region, nodes=tuple(view.graph.node[i].output[0] for i in members[key]))
        for key, region in by_id.items()
    ]
