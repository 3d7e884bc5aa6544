"""The runtime under test with some tensors held at their right values, and the first tensor that is wrong there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx

from ...compare.element_errors import difference_from_float64
from ...compare.error_tally import ErrorTally
from ...graphs.proto_queries import forget_dim_names
from ...precision.tensor_ranges import serialize_for_session
from ...runtimes import RunResult
from ...runtimes.float64_evaluator import Array, Float64Evaluator
from ...runtimes.ort_runner import OrtRunner
from ...storage.proto_traversal import copy_model
from ...types import Progress
from ..verify.reference_models import Original
from ..verify.tensor_drift import DriftPoint, TensorComparison, TensorPair
from .reference_tensors import open_inner_tensors

# tensors fetched in one run
_AT_ONCE = 64
# bytes of weights, of values
_IN_MEMORY = _KEPT = 1 << 30


class InterventionRunner(TensorComparison):
    """A laboratory in which tensors can be held at a value, on the CPU or on CUDA.

    Args:
        alone: one inner tensor is read at a time: the optimizer fuses less around each that is read.
    """

    def __init__(
        self,
        model: Original,
        proto: onnx.ModelProto,
        feeds: Mapping[str, Array],
        precision: str,
        optimize: bool,
        provider: str,
        alone: bool,
    ) -> None:
        super().__init__(open_inner_tensors(model, feeds, precision), proto, feeds, precision, optimize)
        self.provider = provider
        self.alone = alone
        self.held: dict[str, Array] = {}
        self._references: RunResult = {}
        self._eagers: RunResult = {}

    def open_runner_of(self, proto: onnx.ModelProto) -> OrtRunner:
        """``proto`` in the runtime under test."""
        if sum(t.ByteSize() for t in proto.graph.initializer) < _IN_MEMORY:
            return OrtRunner(proto, optimize=self.optimize, provider=self.provider)
        with serialize_for_session(proto) as source:
            return OrtRunner(
                proto if isinstance(source, bytes) else source, optimize=self.optimize, provider=self.provider
            )

    def reference_values(self, nodes: Iterable[str]) -> RunResult:
        return self._cached_values(self._references, nodes, super().reference_values)

    def eager_values(self, nodes: Iterable[str]) -> RunResult:
        return self._cached_values(self._eagers, nodes, super().eager_values)

    def _cached_values(
        self, known_values: RunResult, nodes: Iterable[str], run: Callable[[list[str]], RunResult]
    ) -> RunResult:
        """Values do not change from run to run; as many are kept as fit."""
        wanted = list(nodes)
        known = {n: known_values[n] for n in wanted if n in known_values}
        if missing := [n for n in wanted if n not in known_values]:
            known |= run(missing)
            if sum(v.nbytes for v in (*known_values.values(), *known.values())) < _KEPT:
                known_values |= known
        return known

    def runtime_values(self, tensors: Sequence[str]) -> RunResult:
        probed = copy_model(self.proto)
        forget_dim_names(probed.graph)
        given = {v.name for v in probed.graph.input}
        for node in probed.graph.node if self.held else ():
            for i, name in enumerate(node.output):
                if name in self.held:
                    node.output[i] = f"{name}_replaced"
        for place in reversed(range(len(probed.graph.initializer))):
            if probed.graph.initializer[place].name in self.held:
                del probed.graph.initializer[place]
        for name, value in self.held.items():
            kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
            if name not in given:
                probed.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, value.shape))
        known = {v.name for v in probed.graph.output} | given | self.held.keys()
        probed.graph.output.extend(
            onnx.ValueInfoProto(name=name) for name in dict.fromkeys(tensors) if name not in known
        )
        own = {**self._ours, **self.held}
        with self.open_runner_of(probed) as runner:
            values = runner.infer(own)
        return {name: own[name] if name in own else values[name] for name in tensors}

    def compare_at(self, pair: TensorPair) -> tuple[DriftPoint | None, Array]:
        """One pair judged, and what the runtime has there."""
        value = self.runtime_values([pair.tensor])[pair.tensor]
        reference = self.reference_values([pair.node])[pair.node]
        eager = self.eager_values([pair.node])[pair.node]
        if reference.dtype.kind in "iub":
            return _compare_integers(pair, value, reference, eager), value
        return self._compare_pair(pair, value, reference, eager), value

    def input_values(self) -> dict[str, Array]:
        """The inputs in the file's types."""
        return dict(self._ours)


class FirstWrongSearch:
    """Finds it among ``pairs``; ``exact`` knows what is computed from what."""

    def __init__(
        self, bench: InterventionRunner, pairs: Sequence[TensorPair], exact: Float64Evaluator, progress: Progress | None
    ) -> None:
        self._bench = bench
        self._exact = exact
        self._progress = progress
        self.pairs = {pair.tensor: pair for pair in pairs}
        self.points: dict[str, DriftPoint | None] = {}

    def drop(self, tensor: str) -> None:
        """Take a pair for none: the two are not the same tensor after all."""
        del self.pairs[tensor]

    def clear_points(self) -> None:
        """Something is held now: all is to be read again."""
        self.points.clear()

    def find(self, output: str) -> str:
        """The first wrong tensor on a way of wrong ones to ``output``, which is known to be wrong; its compared
        predecessors are right.

        First in the file's order, so that of two branches that are both wrong the earlier is named.
        """
        before = [name for name in self._tensors_before(output) if name != output]
        if self._bench.alone:
            start = self._bisect_tensors(before, output)
        else:
            self._compare_tensors(before)
            start = output
        tensors = set[str]()
        stack = [start]
        while stack:
            name = stack.pop()
            tensors.add(name)
            stack += [
                other for other in self.compared_predecessors(name) if other not in tensors and not self.is_right(other)
            ]
        return min(tensors, key=lambda name: self._exact.makers.get(name, -1))

    def compared_predecessors(self, name: str) -> list[str]:
        """The compared tensors that ``name`` is computed from without another between."""
        tensors = list[str]()
        seen = set[int]()
        stack = [name]
        while stack:
            place = self._exact.makers.get(stack.pop())
            if place is None or place in seen:
                continue
            seen.add(place)
            for read in self._exact.read_names(self._exact.nodes[place]):
                if self._is_compared(read):
                    tensors.append(read)
                else:
                    stack.append(read)
        return list(dict.fromkeys(tensors))

    def is_right(self, tensor: str) -> bool:
        self._compare_tensors([tensor])
        return bool(self.points[tensor])

    def _is_compared(self, tensor: str) -> bool:
        if tensor in self.pairs and tensor not in self._bench.held:
            self._compare_tensors([tensor])
            return self.points[tensor] is not None
        return False

    def _tensors_before(self, output: str) -> list[str]:
        made = {name for place in self._exact.nodes_between([output]) for name in self._exact.nodes[place].output}
        return [name for name in self.pairs if name in made and name not in self._bench.held]

    def _bisect_tensors(self, ordered: Sequence[str], output: str) -> str:
        """A wrong one next to a right one, by halves."""
        low = -1
        high = len(ordered)
        while high - low > 1:
            middle = (low + high) // 2
            self._compare_tensors([ordered[middle]])
            point = self.points[ordered[middle]]
            low, high = (low, middle) if point is not None and not point else (middle, high)
        if high == len(ordered):
            return output
        return ordered[high]

    def _compare_tensors(self, tensors: Sequence[str]) -> None:
        wanted = [name for name in tensors if name not in self.points]
        step = 1 if self._bench.alone else _AT_ONCE
        for start in range(0, len(wanted), step):
            if self._progress is not None:
                self._progress("compare inner tensors", start, len(wanted))
            some = wanted[start : start + step]
            self.points |= dict(zip(some, self._bench.compare_pairs([self.pairs[name] for name in some]), strict=True))


def _compare_integers(pair: TensorPair, value: Array, reference: Array, eager: Array) -> DriftPoint:
    """Judge integers, which are right where they equal the reference, in float64 or as it runs."""
    tally = ErrorTally(reference.dtype)
    tally.add("", value, reference, lambda got: (got == reference) | (got == eager))
    return DriftPoint(
        module=pair.module,
        tensor=pair.tensor,
        where=pair.where,
        error=0.0,
        eager=0.0,
        allowed=0.0,
        scale=0.0,
        reason=tally.broken or "",
    )


def longest_ordered_pairs(pairs: Sequence[TensorPair]) -> list[TensorPair]:
    """The most pairs that stand in one order in the file and in the PyTorch graph: a tool that fuses nodes may leave
    the module of one on another. Outputs are kept in any case."""
    # of chains by length: the last place in the PyTorch graph, and the pair
    ends: list[tuple[int, int]] = []
    before: dict[int, int] = {}
    for i, pair in enumerate(pairs):
        at = bisect_right(ends, (pair.place[1], len(pairs)))
        if at:
            before[i] = ends[at - 1][1]
        ends[at : at + 1] = [(pair.place[1], i)]
    chain = set[int]()
    i = ends[-1][1] if ends else -1
    while i >= 0:
        chain.add(i)
        i = before.get(i, -1)
    return [pair for i, pair in enumerate(pairs) if i in chain or pair.where.startswith("output ")]


def round_inputs(feeds: Mapping[str, Array], half: np.dtype | None) -> dict[str, Array]:
    """Floating inputs as numbers of ``half``, in their own types."""
    if half is None:
        return dict(feeds)
    return {n: v.astype(half).astype(v.dtype) if v.dtype in (np.float32, np.float64) else v for n, v in feeds.items()}


def is_output_changed(before: Array | None, after: Array | None, allowed: float) -> bool:
    """Whether the output has changed by more than it may be off by."""
    if before is None or after is None:
        return True
    found = difference_from_float64(after, before)
    return bool(found.reason) or found.error > allowed


def is_worse(after: DriftPoint, before: DriftPoint) -> bool:
    """Whether the output has become more wrong by what was changed."""
    return bool(after.reason and not before.reason) or (
        not after and after.error > 1.5 * before.error and not before.reason
    )
