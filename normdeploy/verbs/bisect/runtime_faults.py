"""Which node a runtime computes wrongly: each alone, on its right inputs, against its float64 value on the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx

from ...compare.element_errors import difference_from_float64, largest_finite
from ...compare.perturbation import perturb_array
from ...compare.ulp_spacing import allowed_beside_peer
from ...dtypes import is_float_dtype, unit_roundoff
from ...errors import GraphError, InputError, RuntimeUnavailable
from ...graphs.file_graph import widen_to_float64
from ...graphs.region import Refusal
from ...runtimes.float64_evaluator import Array, Float64Evaluator, Values, extract_nodes, with_float32_island
from ..verify.output_results import OutputResult
from ..verify.runtime_candidates import HALF_TYPES, ON
from .intervention_runner import InterventionRunner
from .trial_changes import Cause

_DRAWS = 3
# of roundoff, by which inputs are moved to see what rounding may do
_UNITS = 4
# trials to make a failing region smaller
_CUTS = 80
# steps by which an island grows around a node
_GROWN = 6
HALVES = frozenset(HALF_TYPES)


@dataclass(frozen=True)
class WrongNodes:
    """The nodes at ``places`` of the file make ``end`` off by ``error`` from right inputs; true where that is too much.

    ``given``: those inputs in the types of the file that ran; ``reason`` what no error can express.
    """

    places: tuple[int, ...]
    end: str
    given: dict[str, Array]
    expected: Array
    error: float
    allowed: float
    reason: str
    # it is not finite where float64 is, or the other way
    lost: bool = False

    def __bool__(self) -> bool:
        return bool(self.reason) or self.error > self.allowed


class RuntimeUnits:
    """The nodes of ``original``, and where each stands in the file that runs (beside its Casts where these are
    added)."""

    def __init__(self, original: Float64Evaluator, ran: Float64Evaluator, bench: InterventionRunner) -> None:
        self.original = original
        self.ran = ran
        self.bench = bench

    def places_in_runtime(self, places: Sequence[int]) -> list[int]:
        """The places in the file that runs."""
        if self.original is self.ran:
            return list(places)
        kept: set[int] = set()
        for node in (self.original.nodes[p] for p in places):
            kept |= set(self.ran.nodes_between(filter(None, node.output), set(self.original.read_names(node))))
        return sorted(kept)

    def find_first_wrong(self, places: Sequence[int], right: Values) -> WrongNodes | None:
        """The first node of a stretch that is wrong on right inputs."""
        for place in places:
            for end in self.original.nodes[place].output:
                if isinstance(right.get(end), np.ndarray) and right[end].dtype.kind == "f":
                    judged = self.judge_nodes([place], end, right)
                    if judged:
                        return judged
        return None

    def judge_nodes(self, places: Sequence[int], end: str, right: Values) -> WrongNodes:
        """``places`` run as one model, against float64 on the very same inputs."""
        given = self.input_values(places, right)
        known = {name: widen_to_float64(value) for name, value in given.items()}
        expected = self.original.evaluate_nodes(places, known)[end]
        dtype = self.original.types.get(end, np.dtype(np.float32))
        allowed = self._allowed_error(places, known, end, expected, dtype)
        got = self.run_nodes(places, end, given)
        if isinstance(got, Refusal):
            return WrongNodes(tuple(places), end, given, expected, 0.0, allowed, got.reason)
        if got.size != expected.size:
            reason = f"its shape is {list(got.shape)}, by ONNX's definition it is {list(expected.shape)}"
            return WrongNodes(tuple(places), end, given, expected, 0.0, allowed, reason)
        found = difference_from_float64(got.reshape(expected.shape), expected)
        return WrongNodes(
            tuple(places), end, given, expected, found.error, allowed, found.reason, lost=bool(found.reason)
        )

    def input_values(self, places: Sequence[int], right: Values) -> dict[str, Array]:
        """What ``places`` read and do not make, in the types of the file that runs."""
        nodes = [self.original.nodes[p] for p in places]
        written = {name for node in nodes for name in node.output}
        read = dict.fromkeys(
            n
            for node in nodes
            for n in self.original.read_names(node)
            if n not in written and n not in self.original.weights
        )
        return {name: self.round_to_file_type(name, self.original.tensor_value(name, right)) for name in read}

    def run_nodes(self, places: Sequence[int], end: str, given: Mapping[str, Array]) -> Array | Refusal:
        """What the runtime makes of them."""
        model = extract_nodes(self.ran, [self.ran.nodes[p] for p in self.places_in_runtime(places)], [end], given)
        inputs = {v.name for v in model.graph.input}
        try:
            with self.bench.open_runner_of(model) as runner:
                return runner.infer({name: value for name, value in given.items() if name in inputs})[end]
        except (GraphError, InputError, RuntimeUnavailable) as error:
            return Refusal(str(error))

    def round_to_file_type(self, name: str, value: Array) -> Array:
        """``value`` as the file holds it: a half number, even where what runs keeps half numbers in float32."""
        return self.ran.round_to_file_type(
            name,
            widen_to_float64(self.original.round_to_file_type(name, value)) if name in self.original.types else value,
        )

    def _allowed_error(self, places: Sequence[int], known: Values, end: str, expected: Array, dtype: np.dtype) -> float:
        """What a few units of roundoff in the inputs do, and a few ulps: no kernel of the type can be asked for
        more."""
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

    def shrink_wrong_nodes(self, places: Sequence[int], end: str, right: Values) -> WrongNodes | None:
        """The smallest part of a stretch, its front cut off node by node, that is wrong on right inputs; None where all
        is right."""
        judged = self.judge_nodes(places, end, right)
        if not judged:
            return None
        stops = set(right) - {name for p in places for name in self.original.nodes[p].output}
        for place in places[:_CUTS]:
            fewer = stops | set(self.original.nodes[place].output)
            rest = self.original.nodes_between([end], fewer)
            if rest and len(rest) < len(judged.places):
                smaller = self.judge_nodes(rest, end, right)
                if smaller:
                    judged = smaller
                    stops = fewer
        return judged


def make_runtime_cause(wrong: WrongNodes, dtype: np.dtype, result: OutputResult) -> Cause:
    """``result``: of ``verify``, which names the optimizers that break a file."""
    place = wrong.places[0] if len(wrong.places) == 1 else None
    if result.runtime == ON:
        names = f" ({', '.join(result.culprit)})" if result.culprit else ""
        return Cause(
            "optimizer", f"onnxruntime's optimizer{names} makes something else of it: with it off this is right", place
        )
    if is_float_dtype(dtype):
        largest = float(ml_dtypes.finfo(dtype).max)
    else:
        largest = np.inf
    seen = float(np.abs(wrong.expected[np.isfinite(wrong.expected)]).max(initial=0))
    if wrong.reason and seen > largest:
        return Cause("overflow", f"it reaches {seen:.4g}, {dtype.name} ends at {largest:.5g}", place)
    inner = max(
        (
            float(np.abs(widen_to_float64(v)).max(initial=0)) ** 2 * v.size
            for v in wrong.given.values()
            if is_float_dtype(v.dtype)
        ),
        default=0.0,
    )
    if wrong.lost and inner > largest:
        return Cause(
            "overflow", f"the result fits {dtype.name}, a sum of squares inside the node may not: {wrong.reason}", place
        )
    if wrong.lost:
        return Cause("accuracy", f"the runtime's kernel loses all digits: {wrong.reason}", place)
    if wrong.reason:
        return Cause("unknown", wrong.reason, place)
    if 0 < seen < float(ml_dtypes.finfo(dtype).smallest_normal):
        return Cause(
            "underflow",
            f"its largest number is {seen:.3g}, {dtype.name}'s smallest with all digits"
            f" {ml_dtypes.finfo(dtype).smallest_normal:.3g}",
            place,
        )
    return Cause(
        "accuracy",
        f"the runtime's kernel loses digits: off by {wrong.error:.3g} on right inputs, rounding explains"
        f" {wrong.allowed:.3g}",
        place,
    )


@dataclass(frozen=True)
class Float32Trial:
    """Whether float32 between Casts mends a fault: ``mends`` is None where it can't be asked; ``nodes``: in the island;
    ``error``: of the output then."""

    mends: bool | None
    nodes: tuple[str, ...] = ()
    error: float | None = None
    reason: str = ""


def iter_float32_islands(
    original: Float64Evaluator, places: Sequence[int]
) -> Iterator[tuple[onnx.ModelProto, list[int]]]:
    """The file with ``places`` in float32, then with their readers too, and so on: what overflowed stays wide until it
    is small again."""
    chosen = set(places)
    for _ in range(_GROWN):
        yield with_float32_island(original.proto, chosen, original.types), sorted(chosen)
        written = {name for p in chosen for name in original.nodes[p].output}
        chosen |= {p for p, node in enumerate(original.nodes) if written & set(original.read_names(node))}
