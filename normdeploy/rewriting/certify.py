"""Certificates: the subgraph before and the nodes after, both evaluated in float64 on inputs chosen to tell lookalikes apart.

The reference is the BEFORE subgraph itself, never the recognised fact: a norm that was misread would certify itself. The fact only shapes
the inputs (each group of elements that is said to share statistics gets one pattern of the battery) and scales the bound.

The bound has two parts. 1e-7 relative to what the norm adds to its shift: epsilon is a float32 attribute (half an ulp is 6e-8, and the
result depends on its root). And the rounding of float64 itself, 64 ulp times the condition of the statistics: max|x|/σ for the mean,
(mean² + variance)/(variance + ε) for E[x²] − E[x]².
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import onnx_graphsurgeon as gs

from ..evaluate import evaluate
from ..graphs.graph import Graph, value_inputs
from ..recognition.facts import Norm
from ..recognition.probe import Fit
from ..recognition.region import Bound, EvaluationFailed, NoMatch, Region, assignments, compile_region, concrete
from ..recognition.sizes import bindings, loose_axes
from ..records import Certificate

BOUND = 1e-7
_ULP = 64 * np.finfo(np.float64).eps


@dataclass(frozen=True)
class Rewrite:
    """A subgraph and what shall take its place: both are functions of the same leaves."""

    before: Region
    after: Region


@dataclass(frozen=True)
class Case:
    """One input of the battery, laid out for a rewrite: leaf values, and the name of the pattern in each group."""

    leaves: tuple[np.ndarray, ...]
    names: tuple[str, ...]
    before: Bound
    after: Bound


Pattern = Callable[[np.random.Generator, int, float], np.ndarray]

# The battery: a name and what it makes of (generator, elements of the group, epsilon), each with its reason.
PATTERNS: dict[str, Pattern] = {
    "normal": lambda rng, n, e: rng.standard_normal(n),
    "constant": lambda rng, n, e: np.full(n, 0.5),  # x̂ is zero but for a lost epsilon (a power of two: its mean is exact)
    "zero": lambda rng, n, e: np.zeros(n),  # 0/0 where epsilon did not survive
    "offset 1e3": lambda rng, n, e: 1e3 + rng.standard_normal(n),  # cancellation
    "scale 1e-4": lambda rng, n, e: 1e-4 * rng.standard_normal(n),  # the usual epsilons dominate
    "scale of epsilon": lambda rng, n, e: np.sqrt(e or 1e-12) * rng.standard_normal(n),  # and here this one counts, whatever it is
    "one-hot": lambda rng, n, e: np.eye(1, n, int(rng.integers(n)))[0],  # ddof
    "large 3e4": lambda rng, n, e: 3e4 * rng.uniform(-1, 1, n),  # near the limit of half precision
    "skewed": lambda rng, n, e: rng.standard_normal(n) ** 3 + np.arange(n) / n,
}


def rewrite_of(graph: Graph, before: Region, nodes: Sequence[gs.Node]) -> Rewrite | NoMatch:
    """Pair a region with the nodes that shall replace it."""
    after = compile_region(graph, nodes[-1].outputs[0], before.leaves)
    return after if isinstance(after, NoMatch) else Rewrite(before, after)


def norm_cases(norm: Norm, rewrite: Rewrite, sizes: int = 2) -> list[Case]:
    """The battery at two sizes of every dynamic dim (at one where nothing is dynamic), every pattern in some group.

    Large static dims along which the norm does the same everywhere count as dynamic (`recognition.sizes`), where the new nodes can be
    evaluated at small sizes of them as well. ``sizes``: 1 for a norm that differs in gamma and beta alone from others that were judged
    at two.
    """
    loose = loose_axes(norm.region)
    return _cases(norm, rewrite, sizes, loose) or (_cases(norm, rewrite, sizes, ()) if loose else [])


def _cases(norm: Norm, rewrite: Rewrite, sizes: int, loose: tuple[int, ...]) -> list[Case]:
    rng = np.random.default_rng(11)
    cases: list[Case] = []
    sizes_seen = 0
    for bound, size in bindings(norm.region, loose):
        try:
            after = rewrite.after.bind(bound.sizes)
            layout = norm.fit.resized(size)
            if len(bound.sizes) > 1 or loose:  # the sizes may not suit each other: where the original does not run nothing is proved
                with evaluate.quiet():
                    others = [np.zeros(concrete(norm.region.graph, t, bound.sizes) or ()) for t in norm.region.leaves[1:]]
                    bound.run([np.zeros(size), *others])
                    if loose:
                        after.run([np.zeros(size)])
        except (EvaluationFailed, ValueError):
            continue
        for x, names in battery(size, layout.axes, layout.split, layout.block, norm.epsilon, _compared(norm.region)):
            others = [rng.standard_normal(concrete(norm.region.graph, t, bound.sizes) or ()) for t in norm.region.leaves[1:]]
            cases.append(Case((x, *others), names, bound, after))
        sizes_seen += 1
        if sizes_seen == sizes:
            break
    return cases


def _compared(region: Region) -> tuple[float, ...]:
    """The numbers which the region compares data with: elsewhere a masked value would never be met."""
    graph = region.graph
    operands = [t for n in region.nodes if n.op == "Equal" for t in value_inputs(n) if graph.is_constant(t)]
    return tuple(sorted({float(v) for t in operands for v in np.unique(graph.value(t)) if np.isfinite(v)})[:8])


def _holding(number: float) -> dict[str, Pattern]:
    """Patterns that hold a number: everywhere, in one element, as the mean."""
    return {
        f"constant {number:g}": lambda rng, n, e: np.full(n, number),
        f"one element {number:g}": lambda rng, n, e: np.append(number, rng.standard_normal(n - 1)),
        f"mean {number:g}": lambda rng, n, e: number + np.append(np.resize([1.0, -1.0], n - n % 2), [0.0] * (n % 2)),
    }


@lru_cache(maxsize=8)
def battery(
    shape: tuple[int, ...], axes: tuple[int, ...], split: int | None, block: int, epsilon: float, numbers: tuple[float, ...]
) -> tuple[tuple[np.ndarray, tuple[str, ...]], ...]:
    """Every pattern in some group, for all norms that group alike: inputs of the shape, and the patterns of their groups."""
    rng = np.random.default_rng(11)
    layout = Fit(shape, axes, split, block, True, epsilon, np.ones(()), np.zeros(()))
    patterns = PATTERNS | {name: pattern for number in numbers for name, pattern in _holding(number).items()}
    order, groups = list(patterns), math.prod(shape) // layout.n
    made: list[tuple[np.ndarray, tuple[str, ...]]] = []
    for start in range(0, len(order), groups):
        names = tuple(order[(start + g) % len(order)] for g in range(groups))
        x = layout.arrange(np.array([patterns[name](rng, layout.n, epsilon) for name in names]))
        x.setflags(write=False)
        made.append((x, names))
    return tuple(made)


def certify_norm(norm: Norm, rewrite: Rewrite, cases: Sequence[Case]) -> Certificate:
    """The identity verdict on one norm's rewrite."""
    if not cases:
        return Certificate(False, float("inf"), BOUND, 0, "", note="the replacement could not be evaluated")
    worst, name = 0.0, cases[0].names[0]
    for case in cases:
        try:
            with evaluate.quiet():
                ratio = _norm_error(norm, case, case.before.run(case.leaves), case.after.run(case.leaves))
        except EvaluationFailed as e:
            return Certificate(False, float("inf"), BOUND, len(cases), "", note=str(e))
        g = int(np.argmax(ratio))
        if not ratio[g] <= worst:
            worst, name = float(ratio[g]), case.names[g]
    proved = bool(worst <= BOUND)
    return Certificate(proved, float(worst), BOUND, sum(len(c.names) for c in cases), name, note=_smaller(norm, cases) if proved else "")


def _smaller(norm: Norm, cases: Sequence[Case]) -> str:
    """What is to be said of static sizes that others stood in for."""
    seen = [sorted(set(sizes)) for sizes in zip(*(c.leaves[0].shape for c in cases), strict=True)]
    said = [
        f"{' and '.join(map(str, some))} for {n} along axis {a}"
        for a, (n, some) in enumerate(zip(norm.shape, seen, strict=True))
        if isinstance(n, int) and some != [n]
    ]
    return f"judged at smaller sizes ({', '.join(said)}), where it does the same at each place" if said else ""


def _norm_error(norm: Norm, case: Case, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The relative difference of each group, float64's own rounding taken off."""
    if before.shape != after.shape:
        return np.array([np.inf])
    layout = norm.fit.resized(case.leaves[0].shape)
    ref, got = layout.rows(before), layout.rows(after)
    if not (np.isnan(ref) == np.isnan(got)).all():
        return np.where((np.isnan(ref) != np.isnan(got)).any(axis=1), np.inf, 0.0)
    largest = np.nan_to_num(np.where(ref == got, 0.0, np.abs(ref - got)), nan=0.0, posinf=np.inf).max(axis=1)
    ref = np.nan_to_num(ref)
    signal = np.abs(ref - layout.rows(_parameter(norm, case, norm.beta, 0.0))).max(axis=1)
    if (largest <= BOUND * signal).all():  # within the bound without any allowance
        return np.divide(largest, signal, out=np.zeros_like(largest), where=largest > 0)
    gamma = np.abs(layout.rows(_parameter(norm, case, norm.gamma, 1.0))).max(axis=1)
    x = layout.rows(case.leaves[0])
    mean, variance = x.mean(axis=1), x.var(axis=1)
    power = np.square(x).mean(axis=1)
    sigma = np.sqrt((variance if norm.fit.centered else power) + norm.epsilon) + 1e-300
    condition = gamma * np.abs(x).max(axis=1) / sigma + signal * (1 + (mean**2 + variance) / sigma**2) + np.abs(ref).max(axis=1)
    beyond = largest - _ULP * np.nan_to_num(condition, nan=0.0, posinf=0.0)
    return np.where(beyond > 0, beyond / (signal + 1e-300), 0.0)


def fold_cases(rewrite: Rewrite, windows: Sequence[tuple[int, ...] | None]) -> list[Case]:
    """Inputs for a fold at two sizes of the dynamic dims: ordinary, large with an offset, zero (where only shifts show), small.

    ``windows``: for each leaf a shape that shows everything at less cost (a convolution's window); the file's own sizes are the fallback.
    """
    graph, leaves = rewrite.before.graph, rewrite.before.leaves
    rng = np.random.default_rng(13)
    cases: list[Case] = []
    for sizes in assignments(rewrite.before.symbols | rewrite.after.symbols):
        for shapes in (windows, [concrete(graph, leaf, sizes) for leaf in leaves]):
            known = [shape for shape in shapes if shape is not None]
            if len(known) < len(leaves):
                continue
            draws: dict[str, Callable[[tuple[int, ...]], np.ndarray]] = {
                "normal": lambda shape: rng.standard_normal(shape),
                "offset 1e3": lambda shape: 1e3 + 10 * rng.standard_normal(shape),
                "zero": lambda shape: np.zeros(shape),
                "scale 1e-4": lambda shape: 1e-4 * rng.standard_normal(shape),
            }
            try:
                with evaluate.quiet():
                    before, after = rewrite.before.bind(sizes), rewrite.after.bind(sizes)
                    before.run([np.zeros(shape) for shape in known])
            except EvaluationFailed:
                continue
            cases.extend(Case(tuple(map(draw, known)), (name,), before, after) for name, draw in draws.items())
            break
        if len(cases) >= 8:
            break
    return cases


def certify_fold(rewrite: Rewrite, cases: Sequence[Case]) -> tuple[Certificate, float]:
    """The identity verdict on a fold, and the largest sum of magnitudes that an output adds up (for the rounding's bound).

    Bound: 1e-7 of the largest output, float64's rounding of the terms that are added up taken off.
    """
    if not cases:
        return Certificate(False, float("inf"), BOUND, 0, "", note="the replacement could not be evaluated"), 0.0
    worst, name, terms = 0.0, cases[0].names[0], 0.0
    for case in cases:
        try:
            with evaluate.quiet():
                ref, got = case.before.run(case.leaves), case.after.run(case.leaves)
                magnitude = max(float(np.abs(case.before.run(case.leaves, t)).max()) for n in rewrite.before.nodes for t in n.outputs[:1])
        except (EvaluationFailed, ValueError) as e:
            return Certificate(False, float("inf"), BOUND, len(cases), "", note=str(e)), 0.0
        if ref.shape != got.shape or not np.isfinite(got).all():
            return Certificate(
                False, float("inf"), BOUND, len(cases), case.names[0], note="the replacement has another shape or overflows"
            ), 0.0
        beyond = float(np.abs(ref - got).max()) - _ULP * magnitude
        ratio = max(beyond, 0.0) / (float(np.abs(ref).max()) + 1e-300)
        if case.names[0] == "normal":
            terms = magnitude
        if not ratio <= worst:
            worst, name = ratio, case.names[0]
    return Certificate(bool(worst <= BOUND), float(worst), BOUND, len(cases), name), terms


def _parameter(norm: Norm, case: Case, param: object, neutral: float) -> np.ndarray:
    shape = case.leaves[0].shape
    if param is None:
        return np.full(shape, neutral)
    value = getattr(param, "value", None)
    return np.full(shape, neutral) if value is None else np.broadcast_to(value, shape)
