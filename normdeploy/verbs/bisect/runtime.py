"""Which node a runtime computes wrongly: each alone, on its right inputs, against its float64 value on the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx

from ...compare.elements import difference, largest_finite
from ...compare.perturbation import perturbed
from ...compare.spacing import of_peer
from ...element_types import is_float, unit_roundoff
from ...errors import GraphError, InputError, RuntimeUnavailable
from ...graphs.file_graph import widen
from ...graphs.region import Refusal
from ...runtimes.exact import Array, Exact, Values, cut, island
from ..verify.candidates import HALF_TYPES, ON
from ..verify.results import OutputResult
from .changes import Cause
from .lab import Bench

_DRAWS = 3
_UNITS = 4  # of roundoff, by which inputs are moved to see what rounding may do
_CUTS = 80  # trials to make a failing region smaller
_GROWN = 6  # steps by which an island grows around a node
HALVES = frozenset(HALF_TYPES)


@dataclass(frozen=True)
class Wrong:
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
    lost: bool = False  # it is not finite where float64 is, or the other way

    def __bool__(self) -> bool:
        return bool(self.reason) or self.error > self.allowed


class Units:
    """The nodes of ``original``, and where each stands in the file that runs (beside its Casts where these are
    added)."""

    def __init__(self, original: Exact, ran: Exact, bench: Bench) -> None:
        self.original, self.ran, self.bench = original, ran, bench

    def running(self, places: Sequence[int]) -> list[int]:
        """The places in the file that runs."""
        if self.original is self.ran:
            return list(places)
        kept: set[int] = set()
        for node in (self.original.nodes[p] for p in places):
            kept |= set(self.ran.before(filter(None, node.output), set(self.original.reads(node))))
        return sorted(kept)

    def first_wrong(self, places: Sequence[int], right: Values) -> Wrong | None:
        """The first node of a stretch that is wrong on right inputs."""
        for place in places:
            for end in self.original.nodes[place].output:
                if isinstance(right.get(end), np.ndarray) and right[end].dtype.kind == "f":
                    judged = self.judged([place], end, right)
                    if judged:
                        return judged
        return None

    def judged(self, places: Sequence[int], end: str, right: Values) -> Wrong:
        """``places`` run as one model, against float64 on the very same inputs."""
        given = self.given(places, right)
        known = {name: widen(value) for name, value in given.items()}
        expected = self.original.run(places, known)[end]
        dtype = self.original.types.get(end, np.dtype(np.float32))
        allowed = self._allowed(places, known, end, expected, dtype)
        got = self.run(places, end, given)
        if isinstance(got, Refusal):
            return Wrong(tuple(places), end, given, expected, 0.0, allowed, got.reason)
        if got.size != expected.size:
            reason = f"its shape is {list(got.shape)}, by ONNX's definition it is {list(expected.shape)}"
            return Wrong(tuple(places), end, given, expected, 0.0, allowed, reason)
        found = difference(got.reshape(expected.shape), expected)
        return Wrong(tuple(places), end, given, expected, found.error, allowed, found.reason, lost=bool(found.reason))

    def given(self, places: Sequence[int], right: Values) -> dict[str, Array]:
        """What ``places`` read and do not make, in the types of the file that runs."""
        nodes = [self.original.nodes[p] for p in places]
        written = {name for node in nodes for name in node.output}
        read = dict.fromkeys(
            n
            for node in nodes
            for n in self.original.reads(node)
            if n not in written and n not in self.original.weights
        )
        return {name: self.stored(name, self.original.value(name, right)) for name in read}

    def run(self, places: Sequence[int], end: str, given: Mapping[str, Array]) -> Array | Refusal:
        """What the runtime makes of them."""
        model = cut(self.ran, [self.ran.nodes[p] for p in self.running(places)], [end], given)
        inputs = {v.name for v in model.graph.input}
        try:
            with self.bench.runner(model) as runner:
                return runner.infer({name: value for name, value in given.items() if name in inputs})[end]
        except (GraphError, InputError, RuntimeUnavailable) as error:
            return Refusal(str(error))

    def stored(self, name: str, value: Array) -> Array:
        """``value`` as the file holds it: a half number, even where what runs keeps half numbers in float32."""
        return self.ran.rounded(
            name, widen(self.original.rounded(name, value)) if name in self.original.types else value
        )

    def _allowed(self, places: Sequence[int], known: Values, end: str, expected: Array, dtype: np.dtype) -> float:
        """What a few units of roundoff in the inputs do, and a few ulps: no kernel of the type can be asked for
        more."""
        if not is_float(dtype):
            return 0.0
        unit = unit_roundoff(dtype)
        moved = 0.0
        for seed in range(_DRAWS):
            rng = np.random.default_rng(seed)
            other = {
                n: (perturbed(v, _UNITS * unit, rng) if v.dtype.kind == "f" and n not in self.original.sizes else v)
                for n, v in known.items()
            }
            shifted = self.original.run(places, other)[end]
            if shifted.shape == expected.shape:
                moved = max(moved, difference(shifted, expected).error)
        return of_peer(moved, largest_finite(expected), dtype)

    def shrunk(self, places: Sequence[int], end: str, right: Values) -> Wrong | None:
        """The smallest part of a stretch, its front cut off node by node, that is wrong on right inputs; None where all
        is right."""
        judged = self.judged(places, end, right)
        if not judged:
            return None
        stops = set(right) - {name for p in places for name in self.original.nodes[p].output}
        for place in places[:_CUTS]:
            fewer = stops | set(self.original.nodes[place].output)
            rest = self.original.before([end], fewer)
            if rest and len(rest) < len(judged.places):
                smaller = self.judged(rest, end, right)
                if smaller:
                    judged, stops = smaller, fewer
        return judged


def cause_of(wrong: Wrong, dtype: np.dtype, result: OutputResult) -> Cause:
    """``result``: of ``verify``, which names the optimizers that break a file."""
    place = wrong.places[0] if len(wrong.places) == 1 else None
    if result.runtime == ON:
        names = f" ({', '.join(result.culprit)})" if result.culprit else ""
        return Cause(
            "optimizer", f"onnxruntime's optimizer{names} makes something else of it: with it off this is right", place
        )
    largest = float(ml_dtypes.finfo(dtype).max) if is_float(dtype) else np.inf
    seen = float(np.abs(wrong.expected[np.isfinite(wrong.expected)]).max(initial=0))
    if wrong.reason and seen > largest:
        return Cause("overflow", f"it reaches {seen:.4g}, {dtype.name} ends at {largest:.5g}", place)
    inner = max(
        (float(np.abs(widen(v)).max(initial=0)) ** 2 * v.size for v in wrong.given.values() if is_float(v.dtype)),
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
class Widened:
    """Whether float32 between Casts mends a fault: ``mends`` is None where it can't be asked; ``nodes``: in the island;
    ``error``: of the output then."""

    mends: bool | None
    nodes: tuple[str, ...] = ()
    error: float | None = None
    reason: str = ""


def islands(original: Exact, places: Sequence[int]) -> Iterator[tuple[onnx.ModelProto, list[int]]]:
    """The file with ``places`` in float32, then with their readers too, and so on: what overflowed stays wide until it
    is small again."""
    chosen = set(places)
    for _ in range(_GROWN):
        yield island(original.proto, chosen, original.types), sorted(chosen)
        written = {name for p in chosen for name in original.nodes[p].output}
        chosen |= {p for p, node in enumerate(original.nodes) if written & set(original.reads(node))}
