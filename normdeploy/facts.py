"""Norms as facts: what ``recognise`` says of a square root in the graph.

Structure proposes where a norm may begin and end (`normdeploy.region`), values say whether it is one and which (`normdeploy.probe`),
and the passes say which of the readings is written as the fewest nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from .dims import Dims, evaluate_dim, invented
from .graph import Graph, value_inputs
from .parameters import Param, cast_to_zero, epsilon_of, held_epsilon, parameter
from .probe import Fit, fit
from .region import (
    INSIDE,
    NORMS,
    REDUCTIONS,
    Bound,
    NoMatch,
    Region,
    assignments,
    compile_region,
    concrete,
    entries,
    is_root,
    narrowing,
    results,
    tensor_symbols,
)
from .sizes import bindings


@dataclass(frozen=True)
class Norm:
    """y = gamma · (x − mean)/sqrt(variance + epsilon) + beta; x and y have one shape and type."""

    region: Region
    x: gs.Tensor
    y: gs.Tensor
    fit: Fit
    shape: Dims  # as the file states it
    dtype: np.dtype
    epsilon: float
    gamma: Param | None  # None: one everywhere
    beta: Param | None  # None: zero everywhere
    ddof: int = 0  # 1: the variance divides by n − 1, and n is dynamic (of a static n gamma and epsilon hold the factor)
    notes: tuple[str, ...] = ()  # what its user should know where it is fused
    guessed: bool = False  # read like another norm, its constants taken from where that one has them: its certificate must tell

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes normalized over; of group norm's channel axis only a part."""
        return self.fit.over

    @property
    def kind(self) -> str:
        if self.fit.kind != "LayerNorm":
            return self.fit.kind
        rank, varies = len(self.shape), {a for p in (self.gamma, self.beta) if p is not None for a in p.varies}
        spatial = rank - 2
        if spatial >= 1 and len(self.axes) == spatial and 0 not in self.axes and varies and not varies & set(self.axes):
            return "InstanceNorm"
        return "LayerNorm"


@dataclass(frozen=True)
class Candidate:
    """A root with its surroundings: where the norm around it may begin (nearest first) and end (in the graph's order)."""

    root: gs.Node
    xs: tuple[gs.Tensor, ...]
    ys: tuple[gs.Tensor, ...]
    passed: tuple[gs.Node, ...]


def candidate(graph: Graph, root: gs.Node) -> Candidate | None:
    """None where nothing looks like a norm: no reduction lies before the root."""
    xs, passed = entries(graph, root)
    if root.op not in NORMS and root.op != "ReduceL2" and not any(n.op in REDUCTIONS for n in passed):
        return None
    return Candidate(root, tuple(xs), tuple(results(graph, root, xs)), tuple(passed))


def readings(graph: Graph, c: Candidate) -> Iterator[Norm | NoMatch]:
    """The readings of the norm around a root, outermost first; between them why another candidate is none.

    For each end the farthest beginning is tried first: x̂ of a layer norm is also the RMS norm of what is centered already.
    """
    for y in reversed(c.ys):
        for x in reversed(c.xs):
            reading = _read(graph, c, x, y)
            if isinstance(reading, Norm):
                yield reading
                break
            yield replace(reading, start=x.name, end=y.name)
    cast = narrowing(graph, c.passed, graph.dtype(c.xs[-1]) if c.xs else None)
    if cast is not None:  # none begins behind it: it is no entry to a part in half precision
        yield NoMatch(f"its statistics are narrowed by the Cast {cast.name!r} in the middle of it", cast.outputs[0].name)
    default = next((t.name for n in c.passed for t in n.inputs if graph.is_default(t.name)), "")
    if default:
        yield NoMatch(f"{default!r} is an initializer and a graph input too: a caller may replace it, so it is no constant", default)


def _read(graph: Graph, c: Candidate, x: gs.Tensor, y: gs.Tensor) -> Norm | NoMatch:
    """The norm from x to y; of clarity 0 where the two can't belong together at all."""
    shape, dtype = graph.shape(x), graph.dtype(x)
    if shape is None or dtype is None:
        return NoMatch(f"the type or shape of {x.name!r} is not known", x.name, clarity=1)
    if (graph.dtype(y) or dtype) != dtype:
        return NoMatch(f"its result is of {graph.dtype(y)}, its input of {dtype}", y.name, clarity=0)
    if _differ(graph, x, y):
        return NoMatch(f"its result has the shape {graph.shape(y)}, its input {shape}", y.name, clarity=0)
    region = compile_region(graph, y, [x], INSIDE)
    if isinstance(region, NoMatch):
        leaves = _operands(graph, c, x, y)
        if leaves and len(leaves) <= 2:
            region = compile_region(graph, y, [x, *leaves], INSIDE)
        if isinstance(region, NoMatch):
            return replace(region, clarity=0)
    if region.shape_leaves and not _same(graph, x, y):  # sizes can be chosen at which the two agree, though they are others
        return NoMatch(f"its result takes its shape from elsewhere, and it can't be told that it is that of {x.name!r}", y.name, clarity=0)
    if not any(n.op in REDUCTIONS or n.op in NORMS for n in region.nodes if not graph.is_shape_valued(n.outputs[0])):
        return NoMatch("no mean is taken between them", y.name, clarity=0)
    cast = narrowing(graph, region.nodes, dtype)
    if cast is not None:
        return NoMatch(f"its statistics are narrowed by the Cast {cast.name!r} in the middle of it", cast.outputs[0].name, region=region)
    if _norms_in_a_row(graph, region) > 1:  # their product is a norm too, but with an epsilon that nobody wrote
        return NoMatch("two norms, one after the other, lie between them", y.name, clarity=0)
    return _fit_region(graph, region, shape, dtype)


def _norms_in_a_row(graph: Graph, region: Region) -> int:
    """The largest number of roots on one path through the region that each have a reduction of their own before them."""
    seen: dict[int, tuple[int, bool]] = {}  # tensor -> (roots so far, a reduction since the last one)
    for node in region.nodes:
        roots, fresh = max((seen.get(id(t), (0, False)) for t in value_inputs(node)), default=(0, False))
        fresh = fresh or node.op in REDUCTIONS or node.op in NORMS
        if fresh and is_root(graph, node):
            roots, fresh = roots + 1, False
        seen.update((id(o), (roots, fresh)) for o in node.outputs)
    return seen.get(id(region.y), (0, False))[0]


def _fit_region(graph: Graph, region: Region, shape: Dims, dtype: np.dtype) -> Norm | NoMatch:
    fits: list[Fit] = []
    given: list[list[np.ndarray]] = []
    refusal = NoMatch("it can't be evaluated at any size", region.y.name, clarity=0, region=region)
    template = region.template
    like = graph.memo.get(template)
    guess = _like(region, like) if isinstance(like, Norm) else None
    if guess is not None:
        return guess
    for bound, size in bindings(region):
        others = [_random_leaf(graph, t, bound, i) for i, t in enumerate(region.leaves[1:])]
        if any(o.shape == size and o.size > 1 for o in others):
            return NoMatch("data of its input's own shape enters it: a residual stream, no gamma or beta", region.y.name, clarity=0)
        like = graph.memo.get((template, size))
        found = fit(bound, size, others, like if isinstance(like, Fit) else None)
        if isinstance(found, NoMatch):
            refusal = replace(found, tensor=region.y.name, region=region)
            if "can't be evaluated" in found.reason:
                continue
            return refusal
        graph.memo.setdefault((template, size), found)
        fits.append(found)
        given.append(others)
        if len(fits) == 2 or not _group_is_dynamic(shape, found):
            break
    if not fits:
        return refusal
    unbiased = _unbiased(*fits) if len(fits) == 2 else _as_written(graph, region, fits[0])
    wrong = _differ_by_size(*fits) if len(fits) == 2 and unbiased is None else ""
    if wrong:
        return NoMatch(wrong, region.y.name, region=region, fit=fits[0])
    norm = _norm(graph, region, unbiased or fits[0], given[0], shape, dtype, ddof=0 if unbiased is None else 1)
    if isinstance(norm, NoMatch):
        return replace(norm, region=region, fit=fits[0])
    graph.memo[template] = norm
    return norm


def _like(region: Region, other: Norm) -> Norm | None:
    """``region`` as the norm that ``other`` is, whose region differs in larger constants only; None where their places can't be told."""
    if len(region.leaves) > 1 or other.dtype.itemsize == 2:  # half precision may not hold a wider constant
        return None
    found: list[Param | None] = []
    for param in (other.gamma, other.beta):
        held = param.tensor if param is not None else None
        place = next(((n, i) for n, node in enumerate(other.region.nodes) for i, t in enumerate(node.inputs) if t is held), None)
        if param is None or param.value is None or place is None:
            return None
        t = region.nodes[place[0]].inputs[place[1]]
        if not isinstance(t, gs.Constant) or not np.isfinite(t.values).all():
            return None
        found.append(Param(region.graph.value(t).reshape(param.value.shape), t, param.varies))
    return replace(other, region=region, x=region.leaves[0], y=region.y, gamma=found[0], beta=found[1], guessed=True)


def _random_leaf(graph: Graph, t: gs.Tensor, bound: Bound, seed: int) -> np.ndarray:
    return np.random.default_rng(7 + seed).uniform(0.5, 1.5, concrete(graph, t, bound.sizes) or ())


def _group_is_dynamic(shape: Dims, found: Fit) -> bool:
    return not all(isinstance(shape[a], int) for a in found.over)


def _unbiased(a: Fit, b: Fit) -> Fit | None:
    """The fit with the variance that divides by n − 1, where that makes two sizes n agree in gamma and epsilon."""
    if (a.axes, a.split, a.centered, a.outside) != (b.axes, b.split, b.centered, b.outside) or a.n == b.n or not a.centered:
        return None
    told = [
        replace(f, gamma=f.gamma * np.sqrt(k), epsilon=f.epsilon * (np.sqrt(k) if f.outside else k))
        for f in (a, b)
        for k in [f.n / (f.n - 1)]
    ]
    return None if _differ_by_size(*told) else told[0]


def _as_written(graph: Graph, region: Region, found: Fit) -> Fit | None:
    """Of epsilon outside the root over a static size: the fit with n − 1, where that is the epsilon that the file holds."""
    if not found.outside or not found.centered or found.n < 2:
        return None
    factor = np.sqrt(found.n / (found.n - 1))
    held = held_epsilon(graph, region, found.epsilon * factor)
    if held is None or held_epsilon(graph, region, found.epsilon) is not None:
        return None
    return replace(found, gamma=found.gamma * factor, epsilon=held)


def _differ_by_size(a: Fit, b: Fit) -> str:
    if (a.axes, a.split, a.centered) != (b.axes, b.split, b.centered):
        return "what it normalizes over changes with the dynamic sizes"
    same = abs(a.epsilon - b.epsilon) <= 1e-9 * max(a.epsilon, b.epsilon)
    factor = float(np.median(np.abs(a.gamma))) / float(np.median(np.abs(b.gamma)) or 1.0)
    alike = (
        np.allclose(a.gamma, b.gamma, rtol=1e-9) if a.gamma.shape == b.gamma.shape else abs(factor - 1) < 1e-9 or _varies(a) or _varies(b)
    )
    return "" if same and alike else "its epsilon or gamma depends on a dynamic size"


def _varies(fit: Fit) -> bool:
    """Whether gamma differs between elements, so that one number can't be compared with another size's."""
    return bool(np.ptp(np.abs(fit.gamma)) > 1e-9 * np.abs(fit.gamma).max())


def _norm(
    graph: Graph, region: Region, found: Fit, others: Sequence[np.ndarray], shape: Dims, dtype: np.dtype, ddof: int = 0
) -> Norm | NoMatch:
    grouped = found.split is not None
    gamma = parameter(graph, region, found.gamma, others, neutral=1.0, vector=grouped)
    beta = parameter(graph, region, found.beta, others, neutral=0.0, vector=grouped)
    if isinstance(gamma, NoMatch):
        return gamma
    if isinstance(beta, NoMatch):
        return beta
    if sum(p is not None and p.data for p in (gamma, beta)) != len(others):
        return NoMatch("data enters it in a way that is no plain scale or shift", region.y.name)
    dynamic = [a for p in (gamma, beta) if p is not None and not p.data for a in p.varies if not isinstance(shape[a], int)]
    if dynamic:
        return NoMatch(f"its gamma or beta varies along the dynamic axis {dynamic[0]}", region.y.name)
    if dtype.itemsize == 2 and _holds_wider_constants(graph, region):
        for p in (gamma, beta):
            if p is not None and p.value is not None and not np.array_equal(p.value.astype(dtype).astype(np.float64), p.value):
                return NoMatch(f"its gamma or beta does not fit into {dtype.name}", region.y.name)
    data = [p.tensor for p in (gamma, beta) if p is not None and p.data and p.tensor is not None]
    again = compile_region(graph, region.y, [region.leaves[0], *data], INSIDE) if data else region
    if isinstance(again, NoMatch):
        return again
    region = again
    epsilon = epsilon_of(graph, region, found.epsilon)
    return Norm(region, region.leaves[0], region.y, found, shape, dtype, epsilon, gamma, beta, ddof, _notes(graph, region, epsilon))


def _notes(graph: Graph, region: Region, epsilon: float) -> tuple[str, ...]:
    """Of an epsilon that a Cast of the file makes zero: its author wrote it, and the node holds it."""
    return tuple(
        f"its epsilon {number:.7g} becomes 0 where the file casts it to {kind}: the original may divide by zero on constant rows, "
        f"the node computes with the {number:.7g} that was written"
        for number, kind in cast_to_zero(graph, region)
        if abs(number - epsilon) <= 1e-7 * epsilon
    )


def _holds_wider_constants(graph: Graph, region: Region) -> bool:
    """Whether gamma or beta may be of a wider type than x: then they must not be rounded to x's."""
    constants = [t for n in region.nodes for t in n.inputs if graph.is_constant(t)]
    return any((d := graph.dtype(t)) is not None and d.kind == "f" and d.itemsize > 2 and graph.value(t).size > 1 for t in constants)


def _operands(graph: Graph, c: Candidate, x: gs.Tensor, y: gs.Tensor) -> list[gs.Tensor]:
    """Data besides x that enters between the root and y (or into a root that takes scale and bias)."""
    root, inside = c.root, {id(t) for t in c.ys}
    found: dict[int, gs.Tensor] = {}
    stack, seen = [y], {id(y)}
    while stack:
        node = graph.producer(stack.pop())
        if node is None or node is root:
            continue
        for t in node.inputs:
            if id(t) in seen or t.is_empty() or graph.is_shape_valued(t) or t is x:
                continue
            seen.add(id(t))
            if id(t) in inside:
                stack.append(t)
            elif isinstance(compile_region(graph, t, [x], INSIDE), NoMatch):
                found[id(t)] = t
    if root.op in NORMS:
        found.update((id(t), t) for t in root.inputs[1:] if not t.is_empty() and not graph.is_shape_valued(t))
    return list(found.values())


def _same(graph: Graph, x: gs.Tensor, y: gs.Tensor) -> bool:
    """True where the file itself says that the two have one shape."""
    sizes = assignments(tensor_symbols(graph, x) | tensor_symbols(graph, y))[0]
    a, b = graph.shape(x), graph.shape(y)
    if a is None or b is None or len(a) != len(b):
        return False
    known = [(evaluate_dim(i, sizes), evaluate_dim(j, sizes)) for i, j in zip(a, b, strict=True)]
    return all(i is not None and i == j for i, j in known)


def _differ(graph: Graph, x: gs.Tensor, y: gs.Tensor) -> bool:
    """True where the file itself says that the two have different shapes."""
    sizes = assignments(tensor_symbols(graph, x) | tensor_symbols(graph, y))[0]
    a, b = graph.shape(x), graph.shape(y)
    if a is None or b is None:
        return False
    if len(a) != len(b):
        return True
    known = [(evaluate_dim(i, sizes), evaluate_dim(j, sizes)) for i, j in zip(a, b, strict=True)]
    if any(invented(d) for d in (*a, *b)):
        return any(isinstance(i, int) and isinstance(j, int) and i != j for i, j in zip(a, b, strict=True))
    return any(i is not None and j is not None and i != j for i, j in known)
