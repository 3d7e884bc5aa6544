"""What is worth knowing of a norm beyond what fusing it takes: ddof, affine, type of statistics, its constants in half
precision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypedDict

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ..element_types import is_float
from ..evaluate import evaluate
from ..graphs.dims import Dims
from ..graphs.functions import JOINED
from ..graphs.graph import Graph
from ..graphs.region import EvaluationFailed, Region, concrete
from ..norms.ops import DEFAULT, OURS
from ..records import Half, Parameter
from .facts import Norm
from .parameters import Param, epsilon_of, snapped
from .probe import Fit
from .roots import REDUCTIONS, VIEWS, is_norm, is_root
from .scales import Affine
from .sizes import bindings

_BOUND = float(np.finfo(np.float32).max)  # what exporters write for "no bound", no number
_LARGE = 2.0**34  # an epsilon is far below float64's precision there
_STASHED = frozenset(
    op for op, row in DEFAULT.items() if "stash_type" in row.attributes
)  # it is 1, float32, where a node does not say


class Traits(TypedDict, total=False):
    """Fields of a `normdeploy.records.Finding`."""

    input: str
    shape: Dims | None
    axes: tuple[int, ...]
    epsilon: float | None
    ddof: int | None
    epsilon_as_written: float | None
    outside: bool
    gamma: Parameter | None
    beta: Parameter | None
    statistics: str
    half: tuple[Half, ...]
    tensors: tuple[str, ...]


def of_norm(graph: Graph, norm: Norm) -> Traits:
    """The traits of a norm."""
    traits = of_region(graph, norm.region, norm.fit, norm.ddof)
    gamma = norm.gamma
    if (
        traits["ddof"] and not norm.ddof and gamma is not None and gamma.value is not None
    ):  # its factor sqrt((n - 1)/n) is the variance's
        value = gamma.value / math.sqrt((norm.fit.n - 1) / norm.fit.n)
        gamma = (
            None
            if value.size == 1 and abs(value.item() - 1) < 1e-9
            else snapped(graph, norm.region, value, gamma.varies)
        )
    traits["gamma"] = _parameter(graph, norm.region, gamma, scale=True)
    traits["beta"] = _parameter(graph, norm.region, norm.beta, scale=False)
    return traits


def of_region(graph: Graph, region: Region, fit: Fit | None, told: int = 0) -> Traits:
    """What can be told of what is no norm, or none that a node can hold.

    ``fit``: what recognition came to, None where to nothing; ``told``: the ddof of the variance that it speaks of.
    """
    x = region.leaves[0]
    traits = Traits(
        input=x.name,
        shape=graph.shape(x),
        statistics=_statistics(graph, region.nodes),
        tensors=_outputs(region.nodes),
    )
    epsilon = None
    if fit is not None:
        ddof = _ddof(graph, region, fit)
        if not math.isnan(fit.epsilon):
            biased = fit.n / (fit.n - 1) if ddof and not told else 1.0
            epsilon = epsilon_of(graph, region, fit.epsilon * (math.sqrt(biased) if fit.outside else biased))
        traits |= Traits(ddof=ddof, epsilon_as_written=epsilon, outside=fit.outside)
    traits["half"] = _half(graph, region.nodes, epsilon)
    return traits


def of_scale(graph: Graph, chain: Affine) -> Traits:
    """The traits of an eval BatchNorm: its statistics are constants."""
    channels = _varying(chain.scale) or _varying(chain.shift) or _stated_channels(graph, chain)
    node = next((n for n in chain.nodes if n.op == "BatchNormalization"), None)
    names = ["", ""] if node is None else [t.name for t in node.inputs[1:3]]
    epsilon = None if node is None else float(graph.attrs(node).get("epsilon", 1e-5))
    return Traits(
        input=chain.z.name,
        shape=graph.shape(chain.z),
        axes=tuple(a for a in range(chain.scale.ndim) if a not in channels) if chain.normalizes and channels else (),
        epsilon=epsilon,
        epsilon_as_written=epsilon,
        gamma=Parameter(False, channels, names[0]),
        beta=Parameter(False, channels, names[1]),
        statistics="constant" if chain.normalizes else "",
        half=_half(graph, chain.region.nodes, epsilon),
        tensors=_outputs(chain.region.nodes),
    )


def of_joined(graph: Graph, node: gs.Node, epsilon: float) -> Traits:
    """The traits of a norm that was joined with its neighbours: one of `normdeploy.graphs.functions.JOINED`."""
    row, x = OURS[node.op], node.inputs[0]
    rank, modulated = len(graph.shape(x) or ()), "shift" in row.inputs
    channel = 1 if row.kind == "GroupNorm" else rank - 1
    parameters = [
        Parameter(modulated, (0, channel) if modulated else (channel,), t.name)
        for name, t in zip(row.inputs, node.inputs, strict=False)
        if name in ("scale", "bias", "shift")
    ]
    gamma, beta = (*parameters, None)[:2]
    return Traits(
        input=x.name,
        shape=graph.shape(x),
        ddof=0 if row.centered else None,
        epsilon_as_written=epsilon,
        gamma=replace(gamma, one_plus=modulated) if gamma is not None else None,
        beta=beta,
        statistics=_statistics(graph, (node,)),
        half=_half(graph, (node,), epsilon),
        tensors=_outputs((node,)),
    )


def _varying(values: np.ndarray) -> tuple[int, ...]:
    return tuple(a for a, n in enumerate(values.shape) if n > 1)


def _stated_channels(graph: Graph, chain: Affine) -> tuple[int, ...]:
    """The axes along which the constants may vary, though their values are all the same (a BatchNorm that was never
    trained)."""
    if any(n.op in VIEWS for n in chain.nodes):
        return ()
    if any(n.op == "BatchNormalization" for n in chain.nodes):
        return (1,)
    rank = chain.scale.ndim
    shapes = [graph.value(t).shape for n in chain.nodes for t in n.inputs if graph.is_constant(t)]
    return tuple(
        sorted({rank - len(shape) + a for shape in shapes for a, n in enumerate(shape) if n > 1 and len(shape) <= rank})
    )


def _outputs(nodes: Iterable[gs.Node]) -> tuple[str, ...]:
    return tuple(o.name for n in nodes for o in n.outputs if o.name)


def _ddof(graph: Graph, region: Region, fit: Fit) -> int | None:
    """Ask what stands under the root, at a scale at which epsilon vanishes, how it compares with the biased
    variance."""
    if not fit.centered:
        return None
    for root in (n for n in region.nodes if is_root(graph, n)):
        if is_norm(root):
            return int(graph.attrs(root).get("ddof", 0))
        if root.op == "ReduceL2":
            continue
        try:
            with evaluate.quiet():
                bound, size = next(bindings(region))
                here = fit.resized(size)
                row = np.random.default_rng(23).standard_normal(here.n)
                x = here.arrange(np.tile(_LARGE * row, (math.prod(size) // here.n, 1)))
                others = [np.ones(concrete(graph, t, bound.sizes) or ()) for t in region.leaves[1:]]
                ratio = float(np.median(bound.run([x, *others], wanted=root.inputs[0]))) / (
                    _LARGE**2 * float(row.var())
                )
        except (EvaluationFailed, StopIteration, ValueError):
            continue
        for ddof in (0, 1):
            if here.n > ddof and abs(ratio * (here.n - ddof) / here.n - 1) < 1e-9:
                return ddof
    return None


def _statistics(graph: Graph, nodes: Sequence[gs.Node]) -> str:
    kinds: dict[str, None] = {}
    for node in nodes:
        if graph.is_shape_valued(node.outputs[0]) or not (node.op in REDUCTIONS | JOINED or is_norm(node)):
            continue
        stash = graph.attrs(node).get("stash_type", int(node.op in _STASHED))
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(int(stash))) if stash else graph.dtype(node.inputs[0])
        if dtype is not None:
            kinds[dtype.name] = None
    return " and ".join(kinds)


def _parameter(graph: Graph, region: Region, param: Param | None, *, scale: bool) -> Parameter | None:
    if param is None:
        return None
    name = param.tensor.name if param.tensor is not None else ""
    above = [param.tensor] if param.data else [t for n in region.nodes for t in n.inputs if graph.is_constant(t)]
    plus = _one_plus(graph, [t for t in above if t is not None], param.value) if scale else None
    return Parameter(param.data, param.varies, plus or name, plus is not None)


def _one_plus(graph: Graph, tensors: Sequence[gs.Tensor], value: np.ndarray | None) -> str | None:
    """The w of a gamma that is 1 + w, looked for behind views and Casts; ``value``: the gamma itself, where it is a
    constant."""
    for t in tensors:
        node = graph.producer(t)
        while node is not None and node.op in VIEWS | {"Cast", "CastLike", "Identity"}:
            t = node.inputs[0]
            node = graph.producer(t)
        if node is None or node.op != "Add" or (value is not None and not _holds(graph, t, value)):
            continue
        for one, w in (node.inputs, node.inputs[::-1]):
            number = graph.known(one)
            if number is not None and number.size == 1 and number.item() == 1:
                return str(w.name)
    return None


def _holds(graph: Graph, t: gs.Tensor, value: np.ndarray) -> bool:
    number = graph.known(t)
    return number is not None and number.size == value.size and np.allclose(number.ravel(), value.ravel(), rtol=1e-9)


def _half(graph: Graph, nodes: Sequence[gs.Node], epsilon: float | None) -> tuple[Half, ...]:
    """What float16 and bfloat16 make of the constants that ``nodes`` read."""
    largest = dict(_largest(graph, nodes))
    return tuple(_half_in(name, np.dtype(kind), largest, epsilon) for name, kind in _KINDS)


_KINDS: tuple[tuple[Any, Any], ...] = (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16))


def _half_in(name: Any, kind: np.dtype, largest: dict[str, float], epsilon: float | None) -> Half:
    with evaluate.quiet():
        overflow = tuple(
            sorted(
                tensor
                for tensor, value in largest.items()
                if np.isinf(np.float64(value).astype(kind).astype(np.float64))
            )
        )
        if epsilon is None:
            return Half(name, None, "", overflow)
        stored = float(np.float64(epsilon).astype(kind).astype(np.float64))
    if math.isinf(stored):
        return Half(name, stored, "", (*overflow, "epsilon"))
    if epsilon and not stored:
        return Half(name, stored, "zero", overflow)
    return Half(
        name, stored, "subnormal" if 0 < stored < float(ml_dtypes.finfo(kind).smallest_normal) else "", overflow
    )


def _largest(graph: Graph, nodes: Sequence[gs.Node]) -> Iterator[tuple[str, float]]:
    """The largest finite magnitude in each of the file's floating constants that the nodes read, by name."""
    seen: set[int] = set()
    stack = [t for n in nodes if not graph.is_shape_valued(n.outputs[0]) for t in n.inputs if graph.is_constant(t)]
    while stack:
        t = stack.pop()
        if id(t) in seen or t.is_empty():
            continue
        seen.add(id(t))
        node = graph.producer(t)
        if isinstance(t, gs.Constant) or (node is not None and node.op == "Constant"):
            dtype, value = graph.dtype(t), graph.known(t)
            if value is not None and value.size and (dtype is None or is_float(dtype)):
                magnitude = np.abs(value[np.abs(value) < _BOUND])
                yield t.name, float(magnitude.max(initial=0.0))
        elif node is not None:
            stack.extend(node.inputs)
