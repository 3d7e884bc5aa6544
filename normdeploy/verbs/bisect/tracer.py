"""One fault of a file or a runtime: the first tensor that right inputs leave wrong, its nodes and its cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np
import onnx

from ...compare.elements import difference, largest_finite
from ...compare.spacing import of_eager
from ...errors import GraphError, InputError, RuntimeUnavailable
from ...graphs.file_graph import widen
from ...graphs.protos import module
from ...precision.retype import FORMATS
from ...precision.stepwise import stepwise
from ...runtimes.exact import Array, Exact, Values, island, types_in
from ...runtimes.ort import title
from ...types import Progress
from ..verify.candidates import ON, STEPWISE
from ..verify.drift import Point
from ..verify.originals import Original
from ..verify.results import OutputResult
from . import runtime as bisect_runtime
from .changes import Cause
from .explain import explanation
from .insides import pairs_with
from .lab import Bench, FirstWrong, in_order, rounded_inputs
from .match import Search, Spot
from .program import program_of
from .reproduce import Reproduction
from .runtime import HALVES, Units, Widened, Wrong

CUDA = title("cuda", optimize=False), title("cuda", optimize=True)


@dataclass(frozen=True)
class Fault:
    """One place where right inputs give a wrong result.

    ``wrong``: "file" (by ONNX's definition it computes something else than the model), "runtime" (it computes otherwise
    than ONNX defines) or "between" (each node is right on right inputs, and small errors grow). ``nodes``: "op name" of
    each node that it may be, one where it could be told; ``operator``: of the model. ``error`` of ``tensor`` on right
    inputs, ``allowed``, and ``scale``, its largest |right value|; ``reason``: what no error can say. ``kind`` and
    ``cause``: see ``verbs.bisect.cause``. ``output_error``, ``output_allowed`` and ``output_reason``: of ``output`` on
    the input ``case``, as the file is. ``mended_error``: of the output with ``tensor`` held at its right value,
    or where its type can't hold that, with the island of ``widened``; null where neither can be run. ``mended``:
    that is within.
    """

    runtime: str
    case: str
    module: str
    tensor: str
    nodes: tuple[str, ...]
    operator: str
    wrong: str
    error: float
    allowed: float
    scale: float
    reason: str
    kind: str
    cause: str
    widened: Widened
    output: str
    output_error: float
    output_allowed: float
    output_reason: str
    mended_error: float | None = None
    mended: bool = False


@dataclass(frozen=True)
class Off:
    """How far a tensor is off on right inputs; ``scale``: its largest finite |right value|; ``reason``: what no error
    can say."""

    error: float
    allowed: float
    scale: float
    reason: str


@dataclass(frozen=True)
class Trace:
    """A fault, the right value of its tensor, the compared tensor that led to it, and its model; ``held``: tensors with
    right values that mend it, where these are others."""

    fault: Fault
    right: Array | None
    wrong: str
    reproduction: Reproduction | None = None
    held: Values = field(default_factory=dict)


class Tracer:
    """Finds the first fault of an output.

    ``result``: of ``verify``, for the output that is wrong; ``case`` and ``feeds``: the input that it is looked for
    on; ``altered``: weights of the file that are not the model's -> how they differ.
    """

    def __init__(
        self,
        model: Original,
        proto: onnx.ModelProto,
        result: OutputResult,
        case: str,
        feeds: Mapping[str, Array],
        progress: Progress | None,
        altered: Mapping[str, str],
    ) -> None:
        self._result, self._case, self._output = result, case, result.output
        precision = result.precision
        half = FORMATS[precision].dtype if precision else None
        self._dtype = np.dtype(result.dtype if result.dtype == "float64" else np.float32) if half is None else half
        running = stepwise(proto) if result.runtime == STEPWISE else proto
        optimize, provider = result.runtime in (ON, CUDA[1]), "cuda" if result.runtime in CUDA else "cpu"
        self._bench = Bench(model, running, rounded_inputs(feeds, half), precision, optimize, provider, alone=optimize)
        self._program = program_of(model)
        self._exact = Exact(proto, types_in(proto))
        ran = self._exact if running is proto else Exact(running, types_in(running))
        self._units = Units(self._exact, ran, self._bench)
        self._altered, self._model = altered, model
        self._pairs, self._progress = in_order(pairs_with(model, proto)), progress
        self._first = FirstWrong(self._bench, self._pairs, self._exact, progress)
        self._buffers = self._program.buffers()
        self._doubted = list[Trace]()  # faults that, mended alone, leave the output more wrong
        self.notes: list[str] = []
        self.reproduction: Reproduction | None = None
        self._value: Array | None = None  # of the output, when it was last looked at

    def at_output(self) -> Point:
        """How far off the output is."""
        pair = self._first.pairs.get(self._output)
        point, self._value = (None, None) if pair is None else self._bench.at(pair)
        if point is not None:
            return point
        r = self._result
        return Point("", self._output, "output", r.max_abs_error, 0.0, r.allowed, 0.0, r.reason or "it differs")

    def trace(self, at_output: Point) -> Trace:
        """The first fault."""
        while True:
            tensor = self._first.find(self._output)
            search = self._stretch(tensor)
            spot = search.spot()
            if spot is None or tensor == self._output or not search.found.get(tensor):
                break
            if self._helps(tensor, search, at_output):
                spot = search.left_out()
                break
            self._first.drop(tensor)  # no pair: it is another tensor of the model, and right
        if spot is not None:
            return self._in_the_file(spot, search, at_output)
        coarse = self._coarse(tensor, search)
        if coarse is not None:
            return self._in_precision(coarse, tensor, search, at_output)
        wrong = None if self._bench.optimize else self._units.first_wrong(search.places, search.values)
        wrong = wrong or self._units.shrunk(search.places, tensor, search.values)
        return self._in_the_runtime(wrong, search, at_output) if wrong else self._between(tensor, search, at_output)

    def _helps(self, tensor: str, search: Search, before: Point) -> bool:
        """Whether the output gets right, or half as wrong, with ``tensor`` at what its pair has: an operator that is
        left out leaves its input there, which is another tensor of the model too."""
        right = search.reference[search.target].reshape(search.values[tensor].shape)
        own, self._bench.held[tensor] = self._value, self._units.stored(tensor, right)
        try:
            after = self.at_output()
        finally:
            del self._bench.held[tensor]
            self._value = own
        return bool(after) or (not after.reason and (bool(before.reason) or after.error < before.error / 2))

    def _stretch(self, tensor: str) -> Search:
        """What lies between the wrong tensor and the right ones before it."""
        paired = self._first.pairs
        node = paired[tensor].node if tensor in paired else self._program.end(self._output)
        starts = [name for name in self._first.frontier(tensor) if name != tensor]
        right = {paired[name].node for name, point in self._first.points.items() if point and name in paired}
        operators = self._program.before(node, right)
        named = self._program.tensors(dict.fromkeys([*(paired[s].node for s in starts), *operators]))
        named += self._program.tensors(
            n for n in right if n not in named and any(n in self._program.inputs(o) for o in operators)
        )
        reference, eager = self._bench.references(named), self._bench.eager(named)
        allowed = {n: self._allowed(eager[n], reference[n]) for n in named}
        shapes = self._bench.fetch(starts)
        known = {name: widen(value) for name, value in self._bench.own().items()}
        known |= {name: reference[paired[name].node].reshape(shapes[name].shape) for name in starts}
        known |= {name: widen(value) for name, value in self._bench.held.items()}
        places = self._exact.before([tensor], known.keys())
        fixed = self._bench.references(self._program.fixed(operators)) | self._buffers
        return Search(self._exact, places, known, tensor, self._program, reference, allowed, right, node, fixed)

    def _allowed(self, eager: Array, reference: Array) -> float:
        """The rule of ``verify``, for one tensor."""
        if reference.dtype.kind != "f":
            return 0.0
        return of_eager(eager, reference, self._dtype)

    def _in_the_file(self, spot: Spot, search: Search, at_output: Point) -> Trace:
        explained = explanation(self._exact, self._program, self._altered, search, spot)
        spot, cause, known = explained.spot, explained.cause, explained.known
        got = self._exact.run(spot.places, known)[spot.end]
        if got.size == spot.expected.size:
            found = difference(got.reshape(spot.expected.shape), spot.expected)
            off = Off(found.error, spot.allowed, found.scale, found.reason)
        else:
            shapes = f"its shape is {list(got.shape)}, the model's is {list(spot.expected.shape)}"
            off = Off(0.0, spot.allowed, largest_finite(spot.expected), shapes)
        places = spot.places if cause.place is None else (cause.place,)
        theirs = spot.last if [*places] == [self._exact.makers[spot.end]] and not spot.left_out else spot.node
        path = self._program.module(theirs) if spot.left_out else self._module(places) or self._program.module(theirs)
        # A tensor that is held at its right value may have many readers, and stands for no operator.
        operator = self._program.operator(theirs) if theirs and not cause.held else ""
        alone = self._without_sequences(spot.places, {**search.values, **known})
        given = self._units.given(alone, {**search.values, **known})
        model = self._reproduction(alone, spot.end, given, spot.expected, spot.allowed, cause)
        fault = self._told(path, spot.end, places, "file", off, cause, at_output)
        fault = replace(fault, operator=operator, widened=self._widened(spot.places))
        return Trace(fault, spot.expected, search.end, model, cause.held)

    def _without_sequences(self, places: Sequence[int], values: Values) -> list[int]:
        """``places``, and the makers of the sequences that they read: these are no inputs of a model."""
        every = set(places)
        while True:
            made = {name for p in every for name in self._exact.nodes[p].output}
            read = {name for p in every for name in self._exact.reads(self._exact.nodes[p])} - made
            makers = {self._exact.makers[n] for n in read if isinstance(self._exact.value(n, values), list)}
            if not makers:
                return sorted(every)
            every |= makers

    def _in_the_runtime(self, wrong: Wrong, search: Search, at_output: Point) -> Trace:
        dtype = self._exact.types.get(wrong.end, np.dtype(np.float32))
        cause = bisect_runtime.cause_of(wrong, dtype, self._result)
        same = next(iter(search.found.get(wrong.end, ())), "")
        model = self._reproduction(wrong.places, wrong.end, wrong.given, wrong.expected, wrong.allowed, cause)
        off = Off(wrong.error, wrong.allowed, largest_finite(wrong.expected), wrong.reason)
        fault = self._told(
            self._module(wrong.places) or self._program.module(same),
            wrong.end,
            wrong.places,
            "runtime",
            off,
            cause,
            at_output,
        )
        operator = self._program.operator(same) if same else ""
        fault = replace(fault, operator=operator, widened=self._widened(wrong.places))
        return Trace(fault, search.values.get(wrong.end), search.end, model)

    def _coarse(self, tensor: str, search: Search) -> tuple[int, ...] | None:
        """Find the nodes of a stretch that compute in a coarser type than the file, if float32 in them mends it."""
        narrow = [p for p in search.places if any(self._is_coarser(name) for name in self._exact.nodes[p].output)]
        if not narrow or len(narrow) == len(search.places):
            return None
        chosen = self._joined(narrow)
        return chosen if self._right_in_float32(chosen, tensor) else None

    def _is_coarser(self, name: str) -> bool:
        own = self._exact.types.get(name)
        is_floating = own is not None and (own.kind == "f" or own in HALVES)
        return is_floating and ml_dtypes.finfo(own).eps > ml_dtypes.finfo(self._dtype).eps

    def _joined(self, narrow: Sequence[int]) -> tuple[int, ...]:
        """``narrow`` and the nodes that bring its results back into the file's type."""
        written = {name for p in narrow for name in self._exact.nodes[p].output}
        back = [p for p, n in enumerate(self._exact.nodes) if n.op_type == "Cast" and n.input[0] in written]
        return tuple(sorted({*narrow, *back}))

    def _right_in_float32(self, places: Sequence[int], tensor: str) -> bool:
        """Whether a tensor is right, or the output where it is compared with nothing, with ``places`` in float32."""
        proto = self._bench.proto
        try:
            self._bench.proto = island(self._exact.proto, set(places), self._exact.types)
            pair = self._first.pairs.get(tensor)
            return bool(self.at_output() if pair is None else self._bench.at(pair)[0])
        except (GraphError, InputError, RuntimeUnavailable):
            return False
        finally:
            self._bench.proto = proto

    def _in_precision(self, places: tuple[int, ...], tensor: str, search: Search, at_output: Point) -> Trace:
        names = [name for p in places for name in self._exact.nodes[p].output if self._is_coarser(name)]
        cause = Cause(
            "precision",
            f"{names[0]!r} is {self._exact.types[names[0]].name}, and the file computes in {self._dtype.name}: with"
            f" {self._dtype.name} there it is right",
        )
        point = self._first.points.get(tensor) or at_output
        fault = self._told(self._module(places), tensor, places, "file", point, cause, at_output)
        right = search.reference[search.target].reshape(search.values[tensor].shape)
        widened = Widened(True, self._names(places))
        return Trace(replace(fault, widened=widened), right, tensor)

    def _between(self, tensor: str, search: Search, at_output: Point) -> Trace:
        point = self._first.points.get(tensor) or at_output
        cause = Cause("unknown", "each node is right on right inputs: small errors of what comes before grow here")
        fault = self._told(self._module(search.places), tensor, search.places, "between", point, cause, at_output)
        return Trace(replace(fault, widened=self._widened(search.places)), search.values.get(tensor), tensor)

    def _told(
        self,
        path: str,
        tensor: str,
        places: Sequence[int],
        wrong: str,
        off: Off | Point,
        cause: Cause,
        at: Point,
    ) -> Fault:
        return Fault(
            runtime=self._result.runtime,
            case=self._case,
            module=path,
            tensor=tensor,
            nodes=self._names(places),
            operator="",
            wrong=wrong,
            error=off.error,
            allowed=off.allowed,
            scale=off.scale,
            reason=off.reason,
            kind=cause.kind,
            cause=cause.text,
            widened=Widened(None),
            output=self._output,
            output_error=at.error,
            output_allowed=at.allowed,
            output_reason=at.reason,
        )

    def _names(self, places: Sequence[int]) -> tuple[str, ...]:
        """Name the nodes of the user's file: an Identity without a name, which `renamed` puts at an end, is named by
        the node in front of it, if nothing else is named."""
        nodes = [self._exact.nodes[p] for p in places]
        named = [node for node in nodes if node.op_type != "Identity" or node.name]
        if not named:
            makers = (self._exact.makers.get(node.input[0]) for node in nodes)
            named = [self._exact.nodes[p] for p in makers if p is not None]
        return tuple(f"{node.op_type} {node.name}".strip() for node in named or nodes)

    def _module(self, places: Sequence[int]) -> str:
        return next(filter(None, (module(self._exact.nodes[p]) for p in reversed(places))), "")

    def _reproduction(
        self, places: Sequence[int], end: str, given: Values, expected: Array, allowed: float, cause: Cause
    ) -> Reproduction:
        ran, bench = self._units.ran, self._bench
        return Reproduction.of(
            ran, self._units.running(places), end, given, expected, allowed, bench.optimize, bench.provider, cause.text
        )

    def _widened(self, places: Sequence[int]) -> Widened:
        """Whether the output is right when the nodes compute in float32."""
        nodes = [self._exact.nodes[p] for p in places]
        if not {self._exact.types.get(name) for n in nodes for name in (*n.input, *n.output)} & HALVES:
            return Widened(None, reason=f"it computes in {self._dtype.name} already")
        proto = self._bench.proto
        try:
            for wide, chosen in bisect_runtime.islands(self._exact, places):
                self._bench.proto = stepwise(wide) if self._result.runtime == STEPWISE else wide
                if point := self.at_output():
                    return Widened(True, self._names(chosen), point.error)
        except (GraphError, InputError, RuntimeUnavailable) as error:
            return Widened(None, reason=str(error))
        finally:
            self._bench.proto = proto
        return Widened(False)
