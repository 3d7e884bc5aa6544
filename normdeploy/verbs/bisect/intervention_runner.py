"""Run a file in a runtime with some tensors set to their right values, and find the first wrong tensor."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

import onnx

from ...compare.element_errors import difference_from_float64
from ...compare.error_tally import ErrorTally
from ...graphs.proto_queries import forget_dim_names
from ...runtimes import RunResult
from ...runtimes.float64_evaluator import Float64Evaluator
from ...storage.proto_traversal import copy_model
from ...types import Array, Arrays, Progress
from ..verify.tensor_drift import DriftPoint, InnerTensors, TensorComparison, TensorPair

# Maximum number of tensors fetched in one run.
_AT_ONCE = 64
# Maximum bytes of values that are cached (1 GiB).
_KEPT = 1 << 30


class InterventionRunner(TensorComparison):
    """Run a file in onnxruntime with chosen tensors fixed at given values, on the CPU or on CUDA.

    Attributes:
        held: tensor -> value at which the tensor is fixed.
    """

    def __init__(
        self,
        insides: InnerTensors,
        proto: onnx.ModelProto,
        feeds: Arrays,
        precision: str,
        optimize: bool,
        provider: str,
    ) -> None:
        super().__init__(insides, proto, feeds, precision, optimize, provider)
        self.held: dict[str, Array] = {}
        self._references: RunResult = {}
        self._eagers: RunResult = {}

    def reference_values(self, nodes: Iterable[str]) -> RunResult:
        """Evaluate the model's operators in float64. Results are cached.

        Returns:
            Operator -> array.
        """
        return _values_once(self._references, nodes, super().reference_values)

    def eager_values(self, nodes: Iterable[str]) -> RunResult:
        """Evaluate the model's operators in the model's own precision. Results are cached.

        Returns:
            Operator -> array.
        """
        return _values_once(self._eagers, nodes, super().eager_values)

    def runtime_values(self, tensors: Sequence[str]) -> RunResult:
        """Run the file with the tensors of ``held`` fixed.

        Returns:
            Tensor -> its value in the runtime.
        """
        probed = copy_model(self.proto)
        graph = probed.graph
        forget_dim_names(graph)
        given = {v.name for v in graph.input}
        for node in graph.node if self.held else ():
            node.output[:] = [f"{name}_replaced" if name in self.held else name for name in node.output]
        for place in reversed(range(len(graph.initializer))):
            if graph.initializer[place].name in self.held:
                del graph.initializer[place]
        for name, value in self.held.items():
            if name not in given:
                kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
                graph.input.append(onnx.helper.make_tensor_value_info(name, kind, value.shape))
        return self._run_probed(probed, tensors, {**self._ours, **self.held})

    def compare_at(self, pair: TensorPair) -> tuple[DriftPoint | None, Array]:
        """Compare one tensor of the file with its pair in the model.

        Returns:
            The error, the allowed error, and the runtime's value.
        """
        value = self.runtime_values([pair.tensor])[pair.tensor]
        reference = self.reference_values([pair.node])[pair.node]
        eager = self.eager_values([pair.node])[pair.node]
        if reference.dtype.kind in "iub":
            return _compare_integers(pair, value, reference, eager), value
        return self._compare_pair(pair, value, reference, eager), value


def _values_once(known: RunResult, nodes: Iterable[str], run: Callable[[list[str]], RunResult]) -> RunResult:
    """Return the values of nodes. The values are equal in every run, so ``known`` caches them, up to `_KEPT` bytes."""
    wanted = list(nodes)
    values = {name: known[name] for name in wanted if name in known}
    if missing := [name for name in wanted if name not in known]:
        values |= run(missing)
        if sum(v.nbytes for v in (*known.values(), *values.values())) < _KEPT:
            known |= values
    return values


class FirstWrongSearch:
    """Find the first wrong tensor of a file among the tensors that have a pair in the model.

    Attributes:
        pairs: tensor of the file -> its pair.
        points: tensor -> its error and allowed error; None if it can't be compared.
    """

    def __init__(
        self, bench: InterventionRunner, pairs: Sequence[TensorPair], exact: Float64Evaluator, progress: Progress | None
    ) -> None:
        self._bench = bench
        self._exact = exact
        self._progress = progress
        self.pairs = {pair.tensor: pair for pair in pairs}
        self.points: dict[str, DriftPoint | None] = {}

    def drop(self, tensor: str) -> None:
        """Remove a pair whose two tensors do not correspond."""
        del self.pairs[tensor]

    def clear_points(self) -> None:
        """Forget all errors, because they change when another tensor is fixed."""
        self.points.clear()

    def find(self, output: str) -> str:
        """Find the first wrong tensor on a path of wrong tensors to ``output``, which is known to be wrong.

        If tensors in two branches are wrong, the tensor that is earlier in the file is returned.

        Returns:
            A tensor whose compared predecessors are right.
        """
        before = [name for name in self._tensors_before(output) if name != output]
        # A tensor that is read can't be fused away. So that the optimizer fuses as usual, only one inner tensor is read
        # in each run.
        if self._bench.optimize:
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
        """Find the nearest compared tensors that ``name`` is computed from.

        Returns:
            Tensors from which a path without other compared tensors leads to ``name``.
        """
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
        """Compare a tensor.

        Returns:
            True if its error is allowed.
        """
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
        """Find a wrong tensor next to a right one by bisection."""
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
        if self._bench.optimize:
            step = 1
        else:
            step = _AT_ONCE
        for start in range(0, len(wanted), step):
            if self._progress is not None:
                self._progress("compare inner tensors", start, len(wanted))
            some = wanted[start : start + step]
            self.points |= dict(zip(some, self._bench.compare_pairs([self.pairs[name] for name in some]), strict=True))


def _compare_integers(pair: TensorPair, value: Array, reference: Array, eager: Array) -> DriftPoint:
    """Compare integers. They are right if they equal the float64 reference or the result of the model in its own
    type.
    """
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
    """Keep the largest set of pairs whose order is the same in the file and in the PyTorch graph.

    A tool that fuses nodes may give a node the module name of another node, which makes a wrong pair. Outputs are
    always kept.

    Returns:
        Pairs in the file's order.
    """
    # ends[k] describes the best chain of k + 1 pairs: position of the chain's last pair in the PyTorch graph, and index
    # of this pair.
    ends: list[tuple[int, int]] = []
    before: dict[int, int] = {}
    for i, pair in enumerate(pairs):
        at = bisect_right(ends, (pair.place[1], len(pairs)))
        if at:
            before[i] = ends[at - 1][1]
        ends[at : at + 1] = [(pair.place[1], i)]
    chain = set[int]()
    if ends:
        i = ends[-1][1]
    else:
        i = -1
    while i >= 0:
        chain.add(i)
        i = before.get(i, -1)
    return [pair for i, pair in enumerate(pairs) if i in chain or pair.where.startswith("output ")]


def is_output_changed(before: Array | None, after: Array | None, allowed: float) -> bool:
    """Check whether the output has changed by more than its allowed error.

    Returns:
        True if it has changed, or if one of the values is missing.
    """
    if before is None or after is None:
        return True
    found = difference_from_float64(after, before)
    return bool(found.reason) or found.error > allowed


def is_worse(after: DriftPoint, before: DriftPoint) -> bool:
    """Check that a change has made the output worse.

    Returns:
        True if the error grew by more than half, or the output became NaN or Inf.
    """
    return bool(after.reason and not before.reason) or (
        not after and after.error > 1.5 * before.error and not before.reason
    )
