"""Collect the attributes of a norm that a report shows: ddof, affine parameters, dtype of statistics, fit of constants
into half precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypedDict

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ..dtypes import is_float_dtype
from ..evaluate import evaluator
from ..findings.records import HalfConstants, NormParameter
from ..graphs.dims import Dims
from ..graphs.graph import Graph
from ..graphs.own_op_functions import JOINED
from ..graphs.region import EvaluationFailed, Region, concrete_shape
from ..norms.norm_table import DEFAULT, OURS
from .affine_chains import AffineChain
from .anchors import REDUCTIONS, VIEWS, is_anchor, is_norm_node
from .norm_facts import Norm
from .norm_fit import NormFit
from .norm_parameters import MeasuredParameter, snap_epsilon, snap_to_file
from .probe_sizes import bound_regions

# Exporters write this number for "no bound", so it is not counted as a constant that may overflow.
_BOUND = float(np.finfo(np.float32).max)
# Scale of x at which float64 arithmetic does not see an epsilon.
_LARGE = 2.0**34
# Ops that compute in float32 if the node has no ``stash_type``. normdeploy's own ops without this attribute always do.
_STASHED = frozenset(op for op, row in DEFAULT.items() if "stash_type" in row.attributes) | OURS.keys()


class NormAttributes(TypedDict, total=False):
    """Fields of a `normdeploy.findings.records.Finding`."""

    input: str
    shape: Dims | None
    axes: tuple[int, ...]
    epsilon: float | None
    ddof: int | None
    epsilon_as_written: float | None
    outside: bool
    gamma: NormParameter | None
    beta: NormParameter | None
    statistics: str
    half: tuple[HalfConstants, ...]
    tensors: tuple[str, ...]


def attributes_of_norm(graph: Graph, norm: Norm) -> NormAttributes:
    """Collect the attributes of a norm.

    Returns:
        fields of its finding.
    """
    traits = attributes_of_region(graph, norm.region, norm.fit, norm.ddof)
    gamma = norm.gamma
    if traits["ddof"] and not norm.ddof and gamma is not None and gamma.value is not None:
        # The factor sqrt((n - 1)/n) in gamma comes from the variance.
        value = gamma.value / math.sqrt((norm.fit.group_size - 1) / norm.fit.group_size)
        if value.size == 1 and abs(value.item() - 1) < 1e-9:
            gamma = None
        else:
            gamma = snap_to_file(graph, norm.region, value, gamma.varies)
    traits["gamma"] = _parameter_record(graph, norm.region, gamma, scale=True)
    traits["beta"] = _parameter_record(graph, norm.region, norm.beta, scale=False)
    return traits


def attributes_of_region(graph: Graph, region: Region, fit: NormFit | None, told: int = 0) -> NormAttributes:
    """Collect the attributes of a region that is not a norm, or is a norm that no node can express.

    Args:
        fit: the fit that recognition reached; None if it reached none.
        told: ddof of the variance to which the fit's epsilon is added.

    Returns:
        fields of its finding.
    """
    x = region.leaves[0]
    traits = NormAttributes(
        input=x.name,
        shape=graph.shape(x),
        statistics=statistics_dtype(graph, region.nodes),
        tensors=_output_names(region.nodes),
    )
    epsilon = None
    if fit is not None:
        ddof = _measure_ddof(graph, region, fit)
        if not math.isnan(fit.epsilon):
            if ddof and not told:
                biased = fit.group_size / (fit.group_size - 1)
            else:
                biased = 1.0
            epsilon = snap_epsilon(graph, region, fit.epsilon * (math.sqrt(biased) if fit.outside else biased))
        traits |= NormAttributes(ddof=ddof, epsilon_as_written=epsilon, outside=fit.outside)
    traits["half"] = _half_constants(graph, region.nodes, epsilon)
    return traits


def attributes_of_scale(graph: Graph, chain: AffineChain) -> NormAttributes:
    """Collect the attributes of an eval-mode BatchNorm, whose statistics are constants.

    Returns:
        fields of its finding; ``axes`` is empty unless the chain normalizes along known channels.
    """
    channels = _varying_axes(chain.scale) or _varying_axes(chain.shift) or _stated_channel_axes(graph, chain)
    node = next((n for n in chain.nodes if n.op == "BatchNormalization"), None)
    if node is None:
        names = ["", ""]
    else:
        names = [t.name for t in node.inputs[1:3]]
    if node is None:
        epsilon = None
    else:
        epsilon = float(graph.attrs(node).get("epsilon", 1e-5))
    return NormAttributes(
        input=chain.z.name,
        shape=graph.shape(chain.z),
        axes=tuple(a for a in range(chain.scale.ndim) if a not in channels) if chain.normalizes and channels else (),
        epsilon=epsilon,
        epsilon_as_written=epsilon,
        gamma=NormParameter(False, channels, names[0]),
        beta=NormParameter(False, channels, names[1]),
        statistics="constant" if chain.normalizes else "",
        half=_half_constants(graph, chain.region.nodes, epsilon),
        tensors=_output_names(chain.region.nodes),
    )


def attributes_of_joined(graph: Graph, node: gs.Node, epsilon: float) -> NormAttributes:
    """Collect the attributes of a norm joined with its neighbors, one of `normdeploy.graphs.own_op_functions.JOINED`.

    Returns:
        fields of its finding.
    """
    row = OURS[node.op]
    x = node.inputs[0]
    rank = len(graph.shape(x) or ())
    modulated = "shift" in row.inputs
    if row.kind == "GroupNorm":
        channel = 1
    else:
        channel = rank - 1
    if modulated:
        varies = _varying_dims(graph, node.inputs[1])
    else:
        varies = (channel,)
    parameters = [
        NormParameter(modulated, varies, t.name)
        for name, t in zip(row.inputs, node.inputs, strict=False)
        if name in ("scale", "bias", "shift")
    ]
    gamma, beta = (*parameters, None)[:2]
    return NormAttributes(
        input=x.name,
        shape=graph.shape(x),
        ddof=0 if row.centered else None,
        epsilon_as_written=epsilon,
        gamma=replace(gamma, one_plus=node.op == "ModulatedLayerNorm") if gamma is not None else None,
        beta=beta,
        statistics=statistics_dtype(graph, (node,)),
        half=_half_constants(graph, (node,), epsilon),
        tensors=_output_names((node,)),
    )


def _varying_dims(graph: Graph, t: gs.Tensor) -> tuple[int, ...]:
    """Return the axes of data along which its size is not 1."""
    return tuple(a for a, n in enumerate(graph.shape(t) or ()) if n != 1)


def _varying_axes(values: np.ndarray) -> tuple[int, ...]:
    return tuple(a for a, n in enumerate(values.shape) if n > 1)


def _stated_channel_axes(graph: Graph, chain: AffineChain) -> tuple[int, ...]:
    """Return the axes along which the constants may vary.

    Their values are all equal, for example in a BatchNorm that was never trained, so the values do not show the axes.
    """
    if any(n.op in VIEWS for n in chain.nodes):
        return ()
    if any(n.op == "BatchNormalization" for n in chain.nodes):
        return (1,)
    rank = chain.scale.ndim
    shapes = [graph.value(t).shape for n in chain.nodes for t in n.inputs if graph.is_constant(t)]
    return tuple(
        sorted({rank - len(shape) + a for shape in shapes for a, n in enumerate(shape) if n > 1 and len(shape) <= rank})
    )


def _output_names(nodes: Iterable[gs.Node]) -> tuple[str, ...]:
    return tuple(o.name for n in nodes for o in n.outputs if o.name)


def _measure_ddof(graph: Graph, region: Region, fit: NormFit) -> int | None:
    """Compare the number under the root with the biased variance, at a scale at which epsilon is negligible.

    Returns:
        0 or 1; None if the norm is not centered or neither value matches.
    """
    if not fit.centered:
        return None
    for root in (n for n in region.nodes if is_anchor(graph, n)):
        if is_norm_node(root):
            return int(graph.attrs(root).get("ddof", 0))
        if root.op == "ReduceL2":
            continue
        try:
            with evaluator.silence_numpy():
                bound, size = next(bound_regions(region))
                here = fit.resize(size)
                row = np.random.default_rng(23).standard_normal(here.group_size)
                x = here.arrange_rows(np.tile(_LARGE * row, (math.prod(size) // here.group_size, 1)))
                others = [np.ones(concrete_shape(graph, t, bound.sizes) or ()) for t in region.leaves[1:]]
                ratio = float(np.median(bound.run([x, *others], wanted=root.inputs[0]))) / (
                    _LARGE**2 * float(row.var())
                )
        except (EvaluationFailed, StopIteration, ValueError):
            continue
        for ddof in (0, 1):
            if here.group_size > ddof and abs(ratio * (here.group_size - ddof) / here.group_size - 1) < 1e-9:
                return ddof
    return None


def statistics_dtype(graph: Graph, nodes: Sequence[gs.Node]) -> str:
    """Name the dtypes in which the norm's reductions compute, from ``stash_type`` or the input's dtype.

    Returns:
        for example "float32", or "float16 and float32" for several dtypes; empty if unknown.
    """
    kinds: dict[str, None] = {}
    for node in nodes:
        if graph.is_shape_valued(node.outputs[0]) or not (node.op in REDUCTIONS | JOINED or is_norm_node(node)):
            continue
        stash = graph.attrs(node).get("stash_type", int(node.op in _STASHED))
        if stash:
            dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(int(stash)))
        else:
            dtype = graph.dtype(node.inputs[0])
        if dtype is not None:
            kinds[dtype.name] = None
    return " and ".join(kinds)


def _parameter_record(
    graph: Graph, region: Region, param: MeasuredParameter | None, *, scale: bool
) -> NormParameter | None:
    """Record gamma or beta for a report. If gamma is computed as 1 + w, record w too."""
    if param is None:
        return None
    if param.tensor is not None:
        name = param.tensor.name
    else:
        name = ""
    if param.data:
        above = [param.tensor]
    else:
        above = [t for n in region.nodes for t in n.inputs if graph.is_constant(t)]
    if scale:
        plus = _find_one_plus_source(graph, [t for t in above if t is not None], param.value)
    else:
        plus = None
    return NormParameter(param.data, param.varies, plus or name, plus is not None)


def _find_one_plus_source(graph: Graph, tensors: Sequence[gs.Tensor], value: np.ndarray | None) -> str | None:
    """Find the tensor w of a gamma that is computed as 1 + w, possibly followed by views and Casts.

    Args:
        value: gamma itself if it is a constant, otherwise None.
    """
    for t in tensors:
        node = graph.producer(t)
        while node is not None and node.op in VIEWS | {"Cast", "CastLike", "Identity"}:
            t = node.inputs[0]
            node = graph.producer(t)
        if node is None or node.op != "Add" or (value is not None and not _holds_value(graph, t, value)):
            continue
        for one, w in (node.inputs, node.inputs[::-1]):
            number = graph.known_value(one)
            if number is not None and number.size == 1 and number.item() == 1:
                return str(w.name)
    return None


def _holds_value(graph: Graph, t: gs.Tensor, value: np.ndarray) -> bool:
    number = graph.known_value(t)
    return number is not None and number.size == value.size and np.allclose(number.ravel(), value.ravel(), rtol=1e-9)


def _half_constants(graph: Graph, nodes: Sequence[gs.Node], epsilon: float | None) -> tuple[HalfConstants, ...]:
    """Describe how float16 and bfloat16 would store the constants that ``nodes`` read."""
    largest = dict(_largest_constants(graph, nodes))
    return tuple(_half_constants_in(name, np.dtype(kind), largest, epsilon) for name, kind in _KINDS)


_KINDS: tuple[tuple[Any, Any], ...] = (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16))


def _half_constants_in(name: Any, kind: np.dtype, largest: dict[str, float], epsilon: float | None) -> HalfConstants:
    """Describe how one half type stores epsilon, and list the constants that overflow."""
    with evaluator.silence_numpy():
        overflow = tuple(
            sorted(
                tensor
                for tensor, value in largest.items()
                if np.isinf(np.float64(value).astype(kind).astype(np.float64))
            )
        )
        if epsilon is None:
            return HalfConstants(name, None, "", overflow)
        stored = float(np.float64(epsilon).astype(kind).astype(np.float64))
    if math.isinf(stored):
        return HalfConstants(name, stored, "", (*overflow, "epsilon"))
    if epsilon and not stored:
        return HalfConstants(name, stored, "zero", overflow)
    return HalfConstants(
        name, stored, "subnormal" if 0 < stored < float(ml_dtypes.finfo(kind).smallest_normal) else "", overflow
    )


def _largest_constants(graph: Graph, nodes: Sequence[gs.Node]) -> Iterator[tuple[str, float]]:
    """Yield the name of each floating constant that the nodes read, and its largest finite magnitude."""
    seen: set[int] = set()
    stack = [t for n in nodes if not graph.is_shape_valued(n.outputs[0]) for t in n.inputs if graph.is_constant(t)]
    while stack:
        t = stack.pop()
        if id(t) in seen or t.is_empty():
            continue
        seen.add(id(t))
        node = graph.producer(t)
        if isinstance(t, gs.Constant) or (node is not None and node.op == "Constant"):
            dtype = graph.dtype(t)
            value = graph.known_value(t)
            if value is not None and value.size and (dtype is None or is_float_dtype(dtype)):
                magnitude = np.abs(value[np.abs(value) < _BOUND])
                yield t.name, float(magnitude.max(initial=0.0))
        elif node is not None:
            stack.extend(node.inputs)
