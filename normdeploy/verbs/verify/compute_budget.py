"""Limit the cost of a comparison: seconds of processor time, and bytes for the inner tensors of a model.

A file of 90 KB can contain a convolution whose result has 700 million elements. In float64, together with the temporary
tensors of random roundings, such a file took 23 GB.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx

from ...graphs.declared_inputs import declared_inputs
from ...graphs.dims import Dims, evaluate_dim
from ...graphs.shape_inference import infer_graph, stated_types
from ...inputs.input_cases import InputCase, join_sizes
from ...model import InputSpec
from ...storage.proto_traversal import attribute_graphs
from .reference_models import Original
from .wording import list_some

# Bytes of a float64 element.
_WIDE = 8
# Number of tensors of the largest size that are assumed to be in memory at a time. Nine were measured for a convolution
# and its square.
_HELD = 16
# Number of these tensors that are temporary tensors for random roundings. The remaining ones are tensors of the graph.
_TEMPORARIES = 8
# Copies of the unfolded windows of a convolution in memory: one in the evaluator or torch, and one during a copy.
_WINDOWS = 2
# Maximum number of sizes that a note names.
_NAMED = 3
# Minimum seconds of an extended clock. Even for a small model, starting processes that import onnxruntime takes time.
_LEAST_AGAIN = 5.0


@dataclass(frozen=True)
class ComparisonBudget:
    """Limits on the cost of a comparison.

    Attributes:
        seconds: processor time, including child processes. Half of it is for the model in eager mode and in float64.
            The runtimes, the allowed errors and the audit of weights take about as long.
        memory: bytes in addition to the weights of the model.
        begun: processor time from which the seconds are counted; None for the start of the comparison.
    """

    seconds: float = 60.0
    memory: int = 4 * 2**30
    begun: float | None = None

    def start_clock(self) -> BudgetClock:
        """Start a clock for the budget.

        Returns:
            a clock that shows the time left.
        """
        if self.begun is None:
            return BudgetClock(self.seconds)
        return BudgetClock(self.seconds, begun=self.begun)

    @property
    def most_elements(self) -> int:
        """Return the largest number of elements in one tensor that the memory allows."""
        return self.memory // (_WIDE * _HELD)


def processor_time() -> float:
    """Measure the processor time of this process and of the child processes that it waited for.

    Returns:
        seconds.
    """
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


class OutOfTime(Exception):
    """Error that is raised when the budget of seconds is spent."""


@dataclass
class BudgetClock:
    """Processor time that is left of a budget, and a record of the work that was skipped for lack of time.

    Attributes:
        cases: inputs on which nothing ran.
        unrun: runtime -> inputs on which only this runtime did not run.
        weights: file -> number of weights that were not traced to the model.
        drift: file and runtime -> number of inner tensors that were not compared.
        undecided: inputs on which an output fails, but with fewer random roundings than the rule requires.
        blamed: wrong files for which the search for the faulty optimizer was not finished.
        module: inputs on which a live module was not compared with its trace.
        begun: processor time at the start.
    """

    seconds: float
    cases: list[str] = field(default_factory=list)
    unrun: dict[str, list[str]] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    drift: dict[str, int] = field(default_factory=dict)
    undecided: dict[str, None] = field(default_factory=dict)
    blamed: dict[str, None] = field(default_factory=dict)
    module: list[str] = field(default_factory=list)
    begun: float = field(default_factory=processor_time)

    def extended_clock(self) -> BudgetClock:
        """Start a clock for the same time as was spent so far. It has at least `_LEAST_AGAIN` seconds, within the whole
        budget.

        Returns:
            the new clock.
        """
        spent = self._spent_seconds()
        return BudgetClock(min(self.seconds, spent + max(spent, _LEAST_AGAIN)), begun=self.begun)

    def is_over(self) -> bool:
        """Return whether the whole budget is spent."""
        return self._spent_seconds() > self.seconds

    def require_time(self) -> None:
        """Check that time is left.

        Raises:
            OutOfTime: the whole budget is spent.
        """
        if self.is_over():
            raise OutOfTime

    def has_time(self, seconds: float) -> bool:
        """Return whether at least ``seconds`` of the whole budget are left."""
        return self._spent_seconds() + seconds <= self.seconds

    def is_half_over(self) -> bool:
        """Return whether the references have used their half of the budget."""
        return self._spent_seconds() > self.seconds / 2

    @property
    def has_left_out(self) -> bool:
        """Return whether work was skipped that the verdict would include with more time."""
        return bool(self.cases or self.unrun or self.weights or self.drift or self.undecided or self.module)

    def describe_left_out(self) -> Iterable[str]:
        """Describe the work that was left out.

        Yields:
            one note for each kind of work.
        """
        if self.cases:
            yield f"the references took {self.seconds / 2:g} s of processor time, so not run: {_list_cases(self.cases)}"
        for runtime, cases in self.unrun.items():
            yield f"{runtime} was not run, for lack of time, on {_list_cases(cases)}"
        for label, count in self.weights.items():
            yield f"{label}: {count} weights were not traced to the model for lack of time"
        for label, count in self.drift.items():
            yield f"drift of {label}: {count} tensors were not compared for lack of time"
        if self.undecided:
            yield (
                f"too few roundings were drawn, for lack of time, to decide on {_list_cases(self.undecided)}:"
                " failures there may pass with more draws"
            )
        for label in self.blamed:
            yield (
                f"{label}: the time limit ended the search for the responsible optimizer of onnxruntime;"
                " disabled_optimizers of its sessions turns some off"
            )
        if self.module:
            yield f"the module itself was not compared with its trace, for lack of time, on {_list_cases(self.module)}"
        if self.has_left_out:
            yield f"the comparison is limited to {self.seconds:g} s of processor time; --max-seconds raises the limit"

    def describe_limits(self) -> Iterable[str]:
        """Describe the limit of the verdict if work was left out.

        Yields:
            a phrase that follows "verified".
        """
        if self.has_left_out:
            yield f"within {self.seconds:g} s"

    def _spent_seconds(self) -> float:
        return processor_time() - self.begun


def _list_cases(cases: Iterable[str]) -> str:
    return list_some([*dict.fromkeys(cases)])


class _MemoryScope:
    """Nodes of a graph or body, with the number of elements in memory while each node runs.

    Attributes:
        shapes: shapes of the tensors of this graph and of outer graphs.
    """

    def __init__(self, graph: onnx.GraphProto, around: Mapping[str, Dims]) -> None:
        own = {name: dims for name, (_, dims) in stated_types(graph).items() if dims is not None}
        self.shapes = {**around, **{t.name: tuple(t.dims) for t in graph.initializer}, **own}
        self._own = {name for node in graph.node for name in node.output} | {v.name for v in graph.input}
        self._nodes = [*graph.node]
        kept = {name: len(self._nodes) for name in (v.name for v in graph.output)}
        self._last = {name: place for place, node in enumerate(self._nodes) for name in node.input} | kept
        self._bodies = {
            place: [_MemoryScope(body, self.shapes) for a in node.attribute for body in attribute_graphs(a)]
            for place, node in enumerate(self._nodes)
        }

    def largest_tensor(self, symbols: Mapping[str, int], weights: Collection[str] = ()) -> tuple[str, int]:
        """Find the tensor during whose computation most memory is used.

        Args:
            symbols: sizes of the dims.
            weights: tensors that do not count.

        Returns:
            (name, size of the memory as a number of elements of one tensor).
        """
        counts = {
            name: math.prod(1 if (n := evaluate_dim(d, symbols)) is None else n for d in dims)
            for name, dims in self.shapes.items()
            if name not in weights
        }
        alone = {name: count for name, count in counts.items() if name in self._own}
        held = [
            *alone.items(),
            *self._unfolded_windows(counts, symbols).items(),
            *self._live_tensors(counts, symbols).items(),
        ]
        return max(held, key=lambda each: each[1], default=("", 0))

    def _unfolded_windows(self, counts: Mapping[str, int], symbols: Mapping[str, int]) -> dict[str, int]:
        """Return, for each convolution, the memory of its unfolded windows as a number of elements of one tensor."""
        unfolded = dict[str, int]()
        for node in self._nodes:
            if node.op_type not in ("Conv", "ConvTranspose"):
                continue
            weight = self.shapes.get(node.input[1], ())
            kernel = math.prod(d for d in weight[2:] if isinstance(d, int))
            # Each position of the output [N, M, *out] has a window of C * kernel elements. For a transposed
            # convolution, each place of the input has one.
            moved = node.output[0]
            other = node.input[0]
            if node.op_type == "ConvTranspose":
                moved, other = other, moved
            places = counts.get(moved, 0) // self._num_channels(moved, symbols)
            windows = places * self._num_channels(other, symbols) * kernel
            unfolded[node.output[0]] = windows * _WINDOWS // _HELD
        return unfolded

    def _num_channels(self, name: str, symbols: Mapping[str, int]) -> int:
        dims = self.shapes.get(name, ())
        return (evaluate_dim(dims[1], symbols) if len(dims) > 1 else None) or 1

    def _live_tensors(self, counts: Mapping[str, int], symbols: Mapping[str, int]) -> dict[str, int]:
        """Return, for each result, the memory of all live tensors and bodies as a number of elements of one tensor."""
        made = dict[str, int]()
        waiting = dict[str, int]()
        for place, node in enumerate(self._nodes):
            waiting |= {name: counts.get(name, 0) for name in node.output if name}
            total = sum(waiting.values())
            largest = max((counts.get(name, 0) for name in node.output), default=0)
            # Only one body runs at a time.
            inside = max((body.largest_tensor(symbols)[1] for body in self._bodies[place]), default=0)
            made |= dict.fromkeys(filter(None, node.output), (total + _TEMPORARIES * largest) // _HELD + inside)
            waiting = {name: size for name, size in waiting.items() if self._last.get(name, -1) > place}
        return made


class InnerSizes:
    """Estimate the memory of running an ONNX file in float64, at given sizes of the model's dims."""

    def __init__(self, proto: onnx.ModelProto, inputs: Mapping[str, str], specs: Sequence[InputSpec]) -> None:
        """Infer the shapes of a file.

        Args:
            proto: the file; its weights need not be loaded.
            inputs: the file's name of an input -> the model's, if they differ.
            specs: the model's inputs.
        """
        # The budget does not include the weights.
        weights = {tensor.name: tuple(tensor.dims) for tensor in proto.graph.initializer}
        self._weights = frozenset(weights)
        self._scope = _MemoryScope(infer_graph(proto), weights)
        self._stated = {inputs.get(item.name, item.name): item.dims for item in declared_inputs(proto.graph)}
        self._specs = {spec.name: spec for spec in specs}

    def largest_tensor(self, sizes: Mapping[str, int]) -> tuple[str, int]:
        """Find the tensor at which most memory is used.

        This is usually the largest tensor. A convolution may need more memory, because it unfolds its input into a copy
        for each element of the kernel. Many tensors that wait for a later node, or a body, may also need more. A dim
        that shape inference can't determine counts as 1.

        Args:
            sizes: sizes of the model's dims.

        Returns:
            (name, elements of one tensor that would take as much).
        """
        symbols: dict[str, int] = {}
        for name, dims in self._stated.items():
            spec = self._specs.get(name)
            if spec is None or dims is None or len(dims) != len(spec.shape):
                continue
            pairs = zip(dims, spec.concrete_shape(sizes), strict=True)
            symbols |= {dim: size for dim, size in pairs if isinstance(dim, str)}
        return self._scope.largest_tensor(symbols, self._weights)


def shrink_usual_sizes(signature: Original, insides: Sequence[InnerSizes], budget: ComparisonBudget) -> Original:
    """Halve the usual sizes of the dims until inner tensors fit the budget, or until all dims are at their minimum.

    Most inputs have the usual sizes, so almost nothing would run if these were too large.

    Returns:
        ``signature`` with smaller usual sizes, or unchanged.
    """
    if not insides:
        return signature
    dims = dict(signature.named_dims)
    while not _fits_budget({name: dim.opt for name, dim in dims.items()}, insides, budget):
        smaller = {
            name: replace(dim, opt=max(dim.min, dim.opt // 2 // dim.step * dim.step)) for name, dim in dims.items()
        }
        if smaller == dims:
            break
        dims = smaller
    if dims == signature.named_dims:
        return signature
    inputs = tuple(spec.with_ranges_of(dims) for spec in signature.inputs)
    return replace(signature, inputs=inputs)


def _fits_budget(sizes: Mapping[str, int], insides: Sequence[InnerSizes], budget: ComparisonBudget) -> bool:
    return all(inside.largest_tensor(sizes)[1] <= budget.most_elements for inside in insides)


def drop_large_cases(
    cases: Sequence[InputCase], opt: Mapping[str, int], insides: Sequence[InnerSizes], budget: ComparisonBudget
) -> tuple[list[InputCase], list[str]]:
    """Drop the cases whose inner tensors exceed the memory budget.

    Args:
        opt: usual sizes, for the cases that do not state their sizes.
        insides: sizes of the inner tensors of each ONNX file.

    Returns:
        (remaining cases, at least one; a note on the dropped sizes, if any). The user's own inputs are never dropped.
    """
    kept = list[InputCase]()
    left_out = dict[str, tuple[str, int]]()
    largest: dict[tuple[tuple[str, int], ...], tuple[str, int]] = {}
    for case in cases:
        sizes = case.sizes or tuple(opt.items())
        if sizes not in largest:
            every = (inside.largest_tensor(dict(sizes)) for inside in insides)
            largest[sizes] = max(every, key=lambda each: each[1], default=("", 0))
        if largest[sizes][1] <= budget.most_elements or case.kind == "given":
            kept.append(case)
        else:
            left_out[join_sizes(dict(sizes)) or "its sizes"] = largest[sizes]
    if not kept and cases:
        kept = [min(cases, key=lambda case: largest[case.sizes or tuple(opt.items())][1])]
    if not left_out:
        return kept, []
    tensor, elements = max(left_out.values(), key=lambda each: each[1])
    some = [*left_out][:_NAMED]
    more = len(left_out) - _NAMED
    return kept, [
        f"not run at {'; '.join(some)}{f' and {more} other sizes' if more > 0 else ''}: the tensor {tensor!r},"
        f" with the tensors held at the same time, would need up to {elements:,} elements, but"
        f" {budget.memory:,} bytes hold only {budget.most_elements:,}; --max-memory raises the limit"
    ]
