"""Treat part of a graph as a function: find the nodes between two tensors, and evaluate them in float64.

``compile_region`` returns the nodes between tensors as a ``Region``. ``Region.bind`` fixes the sizes of the symbolic
dims, and ``BoundRegion.run`` evaluates the region any number of times. Shape arithmetic is computed once, in ``bind``,
and is never treated as data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import onnx_graphsurgeon as gs

from ..evaluate import evaluator
from ..norms import third_party
from .dims import Dims, dim_symbols, evaluate_dim
from .file_graph import stored_array
from .graph import Graph, value_inputs

# Maximum number of elements of a floating constant that a region's template includes by value. Such small constants
# (epsilon, exponents) determine the function; larger constants are weights.
_SMALL = 4


class RefusalKind(Enum):
    """Kind of a refusal. Code decides by the kind; the text of the reason is for people."""

    PLAIN = auto()
    # The evaluation failed at the tried sizes. At other sizes it may succeed.
    NOT_EVALUATED = auto()
    # The function gives the same result for x and −x.
    EVEN = auto()
    # The form does not exist for this kind of norm. If another form was refused too, its reason is more informative.
    OTHER_NORM = auto()
    # The file's opset is too old for the form.
    OPSET = auto()
    # No linear op is available to take a scale and shift.
    NO_LINEAR_OP = auto()


@dataclass(frozen=True)
class Refusal:
    """Reason why a region is not a norm or can't be folded, and the tensor that shows this. A refusal is falsy."""

    reason: str
    tensor: str = ""
    kind: RefusalKind = RefusalKind.PLAIN

    def __bool__(self) -> bool:
        return False


class RefusedError(Exception):
    """Raised if a step is impossible. Its text is the reason that the report shows, like `Refusal.reason`."""


_Result = TypeVar("_Result")


def require_success(result: _Result | Refusal) -> _Result:
    """Return ``result`` unless it is a refusal.

    Returns: ``result``.

    Raises:
        RefusedError: it is a refusal.
    """
    if isinstance(result, Refusal):
        raise RefusedError(result.reason)
    return result


class EvaluationFailed(Exception):
    """Raised if the sizes don't fit the region, or the evaluator does not cover the form of an op."""


@dataclass(frozen=True)
class Region:
    """Nodes that compute ``y`` from ``leaves``.

    Attributes:
        leaves: data tensors that the nodes read from outside the region.
        nodes: in topological order.
        shape_leaves: other outside tensors, of which the nodes read only the shape.
        symbols: symbolic dims, which need a size before the region can be evaluated.
    """

    graph: Graph
    y: gs.Tensor
    leaves: tuple[gs.Tensor, ...]
    nodes: tuple[gs.Node, ...]
    shape_leaves: tuple[gs.Tensor, ...]
    symbols: frozenset[str]
    _bounds: dict[tuple[tuple[str, int], ...], BoundRegion] = field(default_factory=dict, repr=False, compare=False)

    def spelling(self) -> str:
        """List the ops in the graph's order, without shape arithmetic and constants.

        Returns: op types separated by spaces.
        """
        return " ".join(n.op for n in self.nodes if not self.graph.is_shape_valued(n.outputs[0]))

    def bind(self, sizes: Mapping[str, int]) -> BoundRegion:
        """Fix the sizes of the symbolic dims; equal sizes are bound once.

        Returns: the region at these sizes.

        Raises:
            EvaluationFailed: an op can't be evaluated, or the shape arithmetic fails at these sizes.
        """
        key = tuple(sorted(sizes.items()))
        if key not in self._bounds:
            self._bounds[key] = BoundRegion(self, sizes)
        return self._bounds[key]

    @cached_property
    def template(self) -> tuple[object, ...]:
        """Return a description that is equal for regions that differ only in larger constants (gamma, beta).

        The template contains ops, attributes, connections, and shapes and types of leaves. It also contains the values
        of constants with up to `_SMALL` elements, and of all constants that are not floating (sizes, axes, masks).
        """
        return self.template_with_names({})

    @cached_property
    def is_determined_by_template(self) -> bool:
        """Return True if regions with the same template compute the same function: no constant is larger."""
        constants = [t for node in self.nodes for t in node.inputs if not t.is_empty() and self.graph.is_constant(t)]
        return not any(_is_left_out_of_template(self.graph, t) for t in constants)

    def template_with_names(self, names: Mapping[int, object]) -> tuple[object, ...]:
        """Build the `template`, and replace certain dims of leaves and of floating constants by names.

        Args:
            names: size of a dim → name that replaces it.

        Returns: a hashable value.
        """
        graph = self.graph

        def dims_with_names(shape: Sequence[object] | None) -> tuple[object, ...] | None:
            """Replace sizes by their names.

            Returns: the dims; None for an unknown shape.
            """
            if shape is None:
                return None
            return tuple(names.get(n, n) if isinstance(n, int) else n for n in shape)

        place: dict[int, object] = {
            id(t): ("leaf", i, dims_with_names(graph.shape(t)), str(graph.dtype(t))) for i, t in enumerate(self.leaves)
        }
        place |= {
            id(t): ("shape", i, dims_with_names(graph.shape(t)))
            for i, t in enumerate(self.shape_leaves)
            if id(t) not in place
        }
        steps: list[object] = []
        for n, node in enumerate(self.nodes):
            inputs = tuple(place.get(id(t)) or _constant_template(graph, t, dims_with_names) for t in node.inputs)
            attrs = graph.attrs(node)
            told = tuple((name, _attribute_template(attrs[name])) for name in sorted(attrs))
            steps.append((node.domain, node.op, told, inputs, tuple(not o.is_empty() for o in node.outputs)))
            place |= {id(o): (n, i) for i, o in enumerate(node.outputs)}
        return (*steps, place.get(id(self.y)) or _constant_template(graph, self.y, dims_with_names))


def _attribute_template(value: object) -> object:
    """Return an attribute's part of a template. Arrays become bytes: numpy prints only eight digits."""
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype.str, value.tobytes())
    return repr(value)


def _constant_template(graph: Graph, t: gs.Tensor, named: Callable[[Sequence[object]], object]) -> object:
    """Return a constant's part of a template."""
    if _is_large_float(t):
        # The values are not part of the template, so the large constant is not read.
        return (named(t.shape), t.dtype.str, None)
    value = stored_array(t) if isinstance(t, gs.Constant) else graph.known_value(t)
    if value is None:
        return ("unknown", id(t))
    if value.dtype.kind in "iub":
        return (value.shape, value.dtype.str, value.tobytes())
    return (named(value.shape), value.dtype.str, value.tobytes() if value.size <= _SMALL else None)


def _is_large_float(t: gs.Tensor) -> bool:
    """Return True for a stored float constant of more than `_SMALL` elements."""
    return isinstance(t, gs.Constant) and math.prod(t.shape) > _SMALL and getattr(t.dtype, "kind", "") == "f"


def _is_left_out_of_template(graph: Graph, t: gs.Tensor) -> bool:
    """Return True if the template of a constant does not hold its values."""
    if isinstance(t, gs.Constant) and not _is_large_float(t) and math.prod(t.shape) <= _SMALL:
        return False
    value = None if _is_large_float(t) else graph.known_value(t)
    return value is None or (value.size > _SMALL and value.dtype.kind not in "iub")


class BoundRegion:
    """Region at concrete sizes. Everything that does not depend on the leaves' values is already computed."""

    def __init__(self, region: Region, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        # The region itself is not kept. It refers to this object, and such a cycle would keep weights in memory.
        self._y, self._leaves, self._nodes = (
            region.y,
            region.leaves,
            region.nodes,
        )
        graph = region.graph
        self._known: dict[int, Any] = {}
        self._steps: list[_RegionStep] = []
        for t in region.shape_leaves:
            shape = concrete_shape(graph, t, sizes)
            if shape is None:
                raise EvaluationFailed(f"the shape of {t.name!r} is unknown")
            self._known[id(t)] = _ShapeOnly(shape)
        moving = {id(t) for t in region.leaves}
        for node in region.nodes:
            inputs = value_inputs(node)
            for t in inputs:
                if id(t) not in self._known and id(t) not in moving:
                    self._known[id(t)] = _run_or_fail(graph.value, t)
            step = _RegionStep(
                graph.node_evaluator(node),
                tuple(None if t.is_empty() else id(t) for t in node.inputs),
                tuple(id(o) for o in node.outputs),
            )
            if any(id(t) in moving for t in inputs):
                moving.update(step.outputs)
                self._steps.append(step)
            else:
                if node.inputs:
                    source = self._known.get(id(node.inputs[0]))
                else:
                    source = None
                # Shape and Size accept any array of that shape.
                if isinstance(source, _ShapeOnly):
                    self._known[id(node.inputs[0])] = np.broadcast_to(np.float64(0), source.shape)
                step.run(self._known)

    def run(self, feeds: Sequence[np.ndarray], wanted: gs.Tensor | None = None) -> np.ndarray:
        """Evaluate the region.

        Args:
            feeds: values of the leaves, in their order.
            wanted: tensor to return; None for the region's y.

        Returns: the tensor's value.
        """
        if wanted is not None:
            end = wanted
        else:
            end = self._y
        return _value_as_array(self._compute_values(feeds, keep=end), end)

    def largest_magnitude(self, feeds: Sequence[np.ndarray]) -> float:
        """Compute the largest magnitude among the first outputs of the region's nodes.

        Args:
            feeds: values of the leaves, in their order.

        Returns: the largest absolute value.
        """
        values = self._compute_values(feeds)
        return max(float(np.abs(_value_as_array(values, t)).max()) for n in self._nodes for t in n.outputs[:1])

    def _compute_values(self, feeds: Sequence[np.ndarray], keep: gs.Tensor | None = None) -> dict[int, Any]:
        """Evaluate all steps.

        Args:
            keep: only tensor whose value is needed. All other tensors are freed after their last use. None keeps all.
        """
        values = dict(self._known)
        values.update((id(t), v) for t, v in zip(self._leaves, feeds, strict=True))
        for step, last in zip(self._steps, self._last_uses, strict=True):
            step.run(values)
            if keep is not None:
                for key in last:
                    if key != id(keep):
                        values.pop(key, None)
        return values

    @cached_property
    def _last_uses(self) -> list[list[int]]:
        """Return, for each step, the tensors that no later step reads."""
        read: set[int] = set()
        lasts = []
        for step in reversed(self._steps):
            here = {i for i in (*step.inputs, *step.outputs) if i is not None}
            lasts.append(sorted(here - read))
            read |= here
        return lasts[::-1]


def _value_as_array(values: Mapping[int, Any], t: gs.Tensor) -> np.ndarray:
    array = values.get(id(t))
    if not isinstance(array, np.ndarray):
        raise EvaluationFailed("the region does not compute the requested tensor")
    return array


@dataclass(frozen=True, slots=True)
class _RegionStep:
    """One node, prepared for repeated evaluation. Tensors are identified by their id."""

    evaluate: Callable[[list[Any]], tuple[Any, ...]]
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]

    def run(self, values: dict[int, Any]) -> None:
        """Evaluate the node and store its outputs in ``values``.

        Raises:
            EvaluationFailed: the evaluation failed for any reason.
        """
        try:
            results = self.evaluate([None if i is None else values.get(i) for i in self.inputs])
        except _FAILURES as e:
            raise EvaluationFailed(f"{type(e).__name__}: {e}") from e
        values.update(zip(self.outputs, results, strict=False))


@dataclass(frozen=True)
class _ShapeOnly:
    shape: tuple[int, ...]


def compile_region(
    graph: Graph, y: gs.Tensor, leaves: Sequence[gs.Tensor], ops: Container[str] | None = None, limit: int = 160
) -> Region | Refusal:
    """Find the nodes between ``leaves`` and ``y``.

    Args:
        ops: ops that data may pass through; None for all that can be evaluated.
        limit: maximum number of nodes.

    Returns: the region; a refusal if ``y`` depends on other data, which the refusal names, or if the region is too
        large.
    """
    known = {id(t) for t in leaves}
    nodes: list[gs.Node] = []
    shape_leaves: dict[int, gs.Tensor] = {}
    done: set[int] = set()
    stack: list[tuple[gs.Tensor, bool]] = [(y, False)]
    while stack:
        t, expanded = stack.pop()
        if id(t) in known or isinstance(t, gs.Constant) or t.is_empty():
            continue
        node = graph.producer(t)
        if expanded:
            if id(node) not in done:
                done.add(id(node))
                nodes.append(node)
            continue
        if node is not None and id(node) in done:
            continue
        if graph.is_constant(t):
            continue
        if node is None or not evaluator.is_supported(node.domain or "", node.op):
            return Refusal(f"it also depends on {t.name!r}", t.name)
        if (
            ops is not None
            and node.op not in ops
            and third_party.third_party_row(node.domain, node.op) is None
            and not graph.is_shape_valued(t)
        ):
            return Refusal(f"it also depends on {t.name!r}", t.name)
        if len(nodes) + len(stack) > limit:
            return Refusal(f"more than {limit} nodes precede {y.name!r}", y.name)
        stack.append((t, True))
        if node.op in ("Shape", "Size") and id(node.inputs[0]) not in known:
            source = node.inputs[0]
            if isinstance(compile_region(graph, source, leaves, ops, limit // 2), Refusal):
                shape = graph.shape(source)
                if shape is None or any(d is None for d in shape):
                    return Refusal(
                        f"it depends on the shape of {source.name!r}, which the file does not specify", source.name
                    )
                shape_leaves[id(source)] = source
                continue
        stack.extend((i, False) for i in value_inputs(node))
    names = {s for t in [*leaves, *shape_leaves.values()] for s in shape_symbols(graph, t)}
    return Region(graph, y, tuple(leaves), tuple(nodes), tuple(shape_leaves.values()), frozenset(names))


def concrete_shape(graph: Graph, t: gs.Tensor, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """Compute the shape of ``t`` at the given sizes.

    Args:
        sizes: sizes of symbols; an unnamed dim is a symbol too.

    Returns: sizes; None if the rank or a dim is unknown.
    """
    shape = graph.shape(t)
    if shape is None:
        return None
    dims = [evaluate_dim(_named_dim(t, i, d), sizes) for i, d in enumerate(shape)]
    if any(d is None for d in dims):
        return None
    return tuple(int(d) for d in dims if d is not None)


def shape_symbols(graph: Graph, t: gs.Tensor) -> set[str]:
    """Collect the symbols in the shape of ``t``.

    Returns: their names; an unnamed dim gets a name from its tensor and axis.
    """
    shape: Dims = graph.shape(t) or ()
    return {s for i, d in enumerate(shape) for s in dim_symbols(_named_dim(t, i, d))}


# If x has more static elements than this per unit of its one open dim (the batch), small sizes are tried first.
_HEAVY = 2**15


def size_assignments(names: Iterable[str], x: Dims | None = None) -> list[dict[str, int]]:
    """List sizes to try for symbolic dims.

    Small and distinct sizes come first, because they reveal a swapped axis. Equal and rounder sizes follow, for modules
    that need a divisible or larger size. The size 2 is left out, because two normalized elements are always ±1.

    Args:
        x: shape of the input that is drawn.

    Returns: symbol → size, for each try; [{}] without symbols.
    """
    ordered = sorted(names)
    # Each row assigns its numbers to the symbols in turn. With one symbol, about ten rows give different sizes.
    if len(ordered) == 1:
        first = [[9], [11]]
    else:
        first = [[3, 5, 4, 6, 7], [5, 7, 6, 4, 3]]
    if len(ordered) == 1 and math.prod(n for n in x or () if isinstance(n, int)) > _HEAVY:
        first = [[3], [5], *first]
    tries = [*first, [4, 8, 6, 10, 12], [8], [6], [16], [4], [12], [32]]
    if ordered:
        return [{n: row[i % len(row)] for i, n in enumerate(ordered)} for row in tries]
    return [{}]


def _named_dim(t: gs.Tensor, axis: int, dim: int | str | None) -> int | str:
    if dim is None:
        return f"{t.name}:{axis}".replace(" ", "_")
    return dim


_FAILURES = (
    *(
        evaluator.UnsupportedOp,
        ValueError,
        TypeError,
        IndexError,
        ArithmeticError,
        KeyError,
        AssertionError,
        MemoryError,
    ),
    # Raised if a required input is omitted.
    AttributeError,
)


def _run_or_fail(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except _FAILURES as e:
        raise EvaluationFailed(f"{type(e).__name__}: {e}") from e
