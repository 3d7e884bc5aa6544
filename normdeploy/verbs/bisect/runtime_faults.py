"""Find the node that a runtime computes wrongly: run each node alone on right inputs, and compare it with float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import ml_dtypes
import numpy as np
import onnx

from ...compare.element_errors import difference_from_float64, largest_finite
from ...compare.perturbation import perturb_array
from ...compare.ulp_spacing import allowed_beside_peer
from ...dtypes import is_float_dtype, unit_roundoff
from ...errors import GraphError, InputError, RuntimeUnavailable
from ...graphs.file_graph import widen_to_float64
from ...runtimes.float64_evaluator import Float64Evaluator, extract_nodes, with_float32_region
from ...runtimes.named_runners import BUILTIN_TITLES
from ...runtimes.openvino_runner import TITLE
from ...types import Array, Arrays
from ..verify.output_results import OutputResult
from ..verify.runtime_candidates import HALF_TYPES, ON
from .intervention_runner import InterventionRunner
from .trial_changes import Cause

_DRAWS = 3
# Inputs are perturbed by this many units of roundoff to measure the effect of rounding.
_UNITS = 4
# Maximum number of trials that make a failing group of nodes smaller.
_CUTS = 80
# Number of float32 regions that are tried. Each one adds the readers of the previous region.
_GROWN = 6
HALVES = frozenset(HALF_TYPES)
_LARGEST_INT32 = np.iinfo(np.int32).max


@dataclass(frozen=True)
class TensorError:
    """Error of a tensor that is computed from right inputs; true if the error is allowed.

    Attributes:
        scale: largest finite magnitude in the right value.
        reason: a difference that an error can't express, such as NaN.
    """

    error: float
    allowed: float
    scale: float
    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason and self.error <= self.allowed

    @classmethod
    def of_tensor(cls, got: Array, expected: Array, allowed: float, whose: str) -> Self:
        """Compare a tensor with the right values.

        Args:
            whose: subject and verb for the expected shape in a message, such as "the model's is".

        Returns:
            The error. If the sizes differ, it has a reason.
        """
        if got.size != expected.size:
            reason = f"its shape is {list(got.shape)}, but {whose} {list(expected.shape)}"
            return cls(0.0, allowed, largest_finite(expected), reason)
        found = difference_from_float64(got.reshape(expected.shape), expected)
        return cls(found.error, allowed, found.scale, found.reason)


@dataclass(frozen=True)
class WrongNodes:
    """Result of running the nodes at ``places`` on right inputs; ``end`` is the tensor that they compute.

    Attributes:
        given: the right inputs, in the types of the file that ran.
        expected: float64 value of ``end``.
        got: the runtime's value; None if the nodes do not run.
        judged_alone: True if each of the nodes was also run alone, and is right.
        undefined: description of a Cast whose result ONNX does not define; "" if there is none.
    """

    places: tuple[int, ...]
    end: str
    given: dict[str, Array]
    expected: Array
    off: TensorError
    got: Array | None = None
    judged_alone: bool = False
    undefined: str = ""

    @property
    def is_lost(self) -> bool:
        """Return whether the result is NaN or Inf where float64 is finite, or the reverse."""
        return self.got is not None and self.got.size == self.expected.size and bool(self.off.reason)


class RuntimeUnits:
    """Run nodes of a file alone in a runtime.

    The file that runs (``ran``) may have more Casts than the ``original`` file, so positions of nodes are
    translated.
    """

    def __init__(self, original: Float64Evaluator, ran: Float64Evaluator, bench: InterventionRunner) -> None:
        self.original = original
        self.ran = ran
        self.bench = bench

    def places_in_runtime(self, places: Sequence[int]) -> list[int]:
        """Translate positions of nodes to the file that runs.

        Returns:
            Positions in the file that runs, including those of the added Casts.
        """
        if self.original is self.ran:
            return list(places)
        kept: set[int] = set()
        for node in (self.original.nodes[p] for p in places):
            kept |= set(self.ran.nodes_between(filter(None, node.output), set(self.original.read_names(node))))
        return sorted(kept)

    def find_first_wrong(self, places: Sequence[int], right: Arrays) -> WrongNodes | None:
        """Find the first node of a stretch that is wrong on right inputs.

        Returns:
            The result of this node; None if every node is right.
        """
        for place in places:
            for end in self.original.nodes[place].output:
                if self._is_judged_alone(place, end, right):
                    judged = self.judge_nodes([place], end, right)
                    if not judged.off:
                        return judged
        return None

    def _is_judged_alone(self, place: int, end: str, right: Arrays) -> bool:
        """Return whether a node can be judged at ``end``: a float, or an integer that depends on integers only.

        An integer that is made of floats, such as an index of a maximum, may differ because of rounding.
        """
        value = right.get(end)
        if not isinstance(value, np.ndarray):
            return False
        if value.dtype.kind in "iu":
            read = [self.original.tensor_value(name, right) for name in self.original.nodes[place].input if name]
            return all(isinstance(array, np.ndarray) and array.dtype.kind in "iub" for array in read)
        return value.dtype.kind == "f"

    def judge_nodes(self, places: Sequence[int], end: str, right: Arrays) -> WrongNodes:
        """Run ``places`` as one model, and compare ``end`` with float64 on the same inputs.

        Returns:
            The result, which may be right. If the nodes do not run, the result says so.
        """
        given = self.input_values(places, right)
        known = {name: widen_to_float64(value) for name, value in given.items()}
        expected = self.original.evaluate_nodes(places, known)[end]
        dtype = self.original.types.get(end, np.dtype(np.float32))
        allowed = self._allowed_error(places, known, end, expected, dtype)
        try:
            got = self._run_nodes(places, end, given)
        except (GraphError, InputError, RuntimeUnavailable) as error:
            off = TensorError(0.0, allowed, largest_finite(expected), str(error))
            return WrongNodes(tuple(places), end, given, expected, off)
        off = TensorError.of_tensor(got, expected, allowed, "by ONNX's definition it is")
        return WrongNodes(tuple(places), end, given, expected, off, got)

    def input_values(self, places: Sequence[int], right: Arrays) -> dict[str, Array]:
        """Collect the tensors that the nodes at ``places`` read but do not compute.

        Returns:
            Name -> array, in the types of the file that runs.
        """
        nodes = [self.original.nodes[p] for p in places]
        written = {name for node in nodes for name in node.output}
        read = dict.fromkeys(
            n
            for node in nodes
            for n in self.original.read_names(node)
            if n not in written and n not in self.original.weights
        )
        return {name: self.round_to_file_type(name, self.original.tensor_value(name, right)) for name in read}

    def _run_nodes(self, places: Sequence[int], end: str, given: Arrays) -> Array:
        """Run the nodes in the runtime, and return ``end``."""
        model = extract_nodes(self.ran, [self.ran.nodes[p] for p in self.places_in_runtime(places)], [end], given)
        with self.bench.open_runner_of(model) as runner:
            return runner.infer({v.name: given[v.name] for v in model.graph.input})[end]

    def round_to_file_type(self, name: str, value: Array) -> Array:
        """Round ``value`` to the type in the original file.

        A half-precision value is rounded to half precision even if the file that runs keeps it in float32.

        Returns:
            An array in the type of the file that runs.
        """
        if name in self.original.types:
            value = widen_to_float64(self.original.round_to_file_type(name, value))
        return self.ran.round_to_file_type(name, value)

    def _allowed_error(self, places: Sequence[int], known: Arrays, end: str, expected: Array, dtype: np.dtype) -> float:
        """Return the allowed error: the effect of a few units of roundoff in the inputs, plus a few ulps.

        No kernel that computes in this type can be more accurate.
        """
        if not is_float_dtype(dtype):
            return 0.0
        unit = unit_roundoff(dtype)
        moved = 0.0
        for seed in range(_DRAWS):
            rng = np.random.default_rng(seed)
            other = {
                n: (perturb_array(v, _UNITS * unit, rng) if v.dtype.kind == "f" and n not in self.original.sizes else v)
                for n, v in known.items()
            }
            shifted = self.original.evaluate_nodes(places, other)[end]
            if shifted.shape == expected.shape:
                moved = max(moved, difference_from_float64(shifted, expected).error)
        return allowed_beside_peer(moved, largest_finite(expected), dtype)

    def shrink_wrong_nodes(self, places: Sequence[int], end: str, right: Arrays) -> WrongNodes | None:
        """Find a small group of nodes that is wrong on right inputs, by removing nodes from the start of a stretch.

        Returns:
            The result of this group; None if the whole stretch is right.
        """
        judged = self.judge_nodes(places, end, right)
        if judged.off:
            return None
        stops = set(right) - {name for p in places for name in self.original.nodes[p].output}
        for place in places[:_CUTS]:
            fewer = stops | set(self.original.nodes[place].output)
            rest = self.original.nodes_between([end], fewer)
            if rest and len(rest) < len(judged.places):
                smaller = self.judge_nodes(rest, end, right)
                if not smaller.off:
                    judged = smaller
                    stops = fewer
        written = [(place, end) for place in judged.places for end in self.original.nodes[place].output if end]
        return replace(
            judged,
            judged_alone=all(self._is_judged_alone(place, end, right) for place, end in written),
            undefined=self._find_undefined_cast(judged.places, right),
        )

    def _find_undefined_cast(self, places: Sequence[int], right: Arrays) -> str:
        """Describe a Cast of a float that the integer type can't represent. ONNX does not define its result."""
        for node in (self.original.nodes[p] for p in places):
            dtype = self.original.types.get(node.output[0])
            value = right.get(node.input[0]) if node.op_type == "Cast" else None
            if dtype is None or dtype.kind not in "iu" or not isinstance(value, np.ndarray) or value.dtype.kind != "f":
                continue
            limits = np.iinfo(dtype)
            outside = value[~((limits.min - 1 < value) & (value < limits.max + 1))]
            if outside.size:
                return f"the Cast turns {outside.flat[0]:.4g} into {dtype.name}, and ONNX does not define the result"
        return ""


def make_runtime_cause(wrong: WrongNodes, dtype: np.dtype, result: OutputResult) -> Cause:
    """Describe how a runtime computes nodes wrongly.

    Args:
        dtype: type of the wrong tensor.
        result: the result of ``verify``, which names the optimizers of onnxruntime that break the file.

    Returns:
        A cause of kind "optimizer", "overflow", "underflow", "accuracy" or "unknown".
    """
    kind, text = _explain_runtime(wrong, dtype, result)
    return Cause(kind, text, wrong.places[0] if len(wrong.places) == 1 else None)


def _explain_runtime(wrong: WrongNodes, dtype: np.dtype, result: OutputResult) -> tuple[str, str]:
    """Return the kind of a runtime's mistake and its description."""
    off = wrong.off
    if dtype == np.int64 and off.scale > _LARGEST_INT32 and result.runtime.startswith(TITLE):
        return "overflow", f"it reaches {off.scale:.4g}, but OpenVINO computes int64 in int32"
    if wrong.undefined:
        return "overflow", wrong.undefined
    if len(wrong.places) > 1 and wrong.judged_alone and result.runtime in BUILTIN_TITLES:
        name = BUILTIN_TITLES[result.runtime].runtime
        return "optimizer", f"{name}'s optimizer changes the result of these nodes: each of them alone is correct"
    if result.runtime == ON:
        if result.culprit:
            names = f" ({', '.join(result.culprit)})"
        else:
            names = ""
        return "optimizer", f"onnxruntime's optimizer{names} changes its result: with the optimizer off it is correct"
    largest = np.inf
    smallest = 0.0
    if is_float_dtype(dtype):
        largest = float(ml_dtypes.finfo(dtype).max)
        smallest = float(ml_dtypes.finfo(dtype).smallest_normal)
    if off.reason and off.scale > largest:
        return "overflow", f"it reaches {off.scale:.4g}, but the largest {dtype.name} is {largest:.5g}"
    if wrong.is_lost:
        floats = [widen_to_float64(value) for value in wrong.given.values() if is_float_dtype(value.dtype)]
        squares = [float(np.abs(value).max(initial=0)) ** 2 * value.size for value in floats]
        if max(squares, default=0.0) > largest:
            text = f"the result fits {dtype.name}, but a sum of squares inside the node may not: {off.reason}"
            return "overflow", text
        return "accuracy", f"the runtime's kernel loses all digits: {off.reason}"
    if off.reason:
        return "unknown", off.reason
    if 0 < off.scale < smallest:
        text = f"its largest number is {off.scale:.3g}, below the smallest normal {dtype.name}, {smallest:.3g}"
        return "underflow", text
    return "accuracy", (
        f"the runtime's kernel loses digits: off by {off.error:.3g} on correct inputs, allowed {off.allowed:.3g}"
    )


@dataclass(frozen=True)
class Float32Trial:
    """Result of a trial that computes the nodes of a fault in float32, between Casts.

    Attributes:
        mends: True if float32 makes the output right, False if it does not; None if the trial is not possible.
        nodes: nodes of the float32 region.
        error: error of the output with the float32 region.
        reason: reason why the trial is not possible.
    """

    mends: bool | None
    nodes: tuple[str, ...] = ()
    error: float | None = None
    reason: str = ""


def iter_float32_regions(
    original: Float64Evaluator, places: Sequence[int]
) -> Iterator[tuple[onnx.ModelProto, list[int]]]:
    """Build the file with the nodes at ``places`` in float32, then also with the nodes that read their results, and so
    on.

    A value that overflowed must stay in float32 until a later node makes it small again.

    Yields:
        The model, and the positions of the nodes in its float32 region.
    """
    chosen = set(places)
    for _ in range(_GROWN):
        yield with_float32_region(original.proto, chosen, original.types), sorted(chosen)
        written = {name for p in chosen for name in original.nodes[p].output}
        chosen |= {p for p, node in enumerate(original.nodes) if written & set(original.read_names(node))}
