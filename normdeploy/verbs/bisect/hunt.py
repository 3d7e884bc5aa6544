"""The search for what makes one output wrong, in one runtime on one input (the steps:
``normdeploy.verbs.bisect.bisect``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import ml_dtypes
import numpy as np
import onnx

from ...compare.elements import difference
from ...compare.spacing import of_eager
from ...errors import GraphError, InputError, RuntimeUnavailable
from ...graphs.file_graph import widen
from ...graphs.protos import module
from ...precision.retype import FORMATS
from ...precision.stepwise import stepwise
from ...runtimes.exact import Array, Exact, NotEvaluated, Values, island, tensors_of, types_in
from ...runtimes.ort import title
from ...types import Progress
from ..verify.candidates import ON, STEPWISE
from ..verify.drift import Point
from ..verify.originals import Original
from ..verify.results import OutputResult
from ..verify.stored import stored_in
from . import runtime as bisect_runtime
from .cause import Afresh
from .changes import Cause
from .explain import explanation
from .insides import pairs_with
from .lab import Bench, FirstWrong, in_order, output_changed, rounded_inputs, worse
from .match import Search, Spot
from .modules import exchanges
from .program import program_of
from .reproduce import Reproduction
from .runtime import HALVES, Units, Widened, Wrong
from .stale import replaced
from .training import BATCH, in_eval
from .wiring import exchanged_tensors, of_one_source

CUDA = title("cuda", optimize=False), title("cuda", optimize=True)
MOST = 5  # faults that are looked for
_MOST_EXCHANGES = 16  # of modules, each of which is one run


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
class _Trace:
    """A fault, the right value of its tensor, the compared tensor that led to it, and its model; ``held``: tensors with
    right values that mend it, where these are others."""

    fault: Fault
    right: Array | None
    wrong: str
    reproduction: Reproduction | None = None
    held: Values = field(default_factory=dict)


class Hunt:
    """``result``: of ``verify``, for the output that is wrong; ``case`` and ``feeds``: the input that it is looked for
    on; ``altered``: weights of the file that are not the model's -> how they differ."""

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
        self._doubted = list[_Trace]()  # faults that, mended alone, leave the output more wrong
        self._value: Array | None = None  # of the output, when it was last looked at
        self.notes: list[str] = []
        self.reproduction: Reproduction | None = None

    def faults(self) -> list[Fault]:
        """Those that make the output wrong: never none where it is."""
        point = self.at_output()
        if point:
            return []
        whole = self._everywhere(point)
        if whole is not None:
            return [whole]
        named = self._one_by_one(point)
        if len(named) == 1 and named[0].mended and named[0].kind != "unknown":
            return named
        if self._doubted and not (named and named[-1].mended):
            named = self._together(point) or named
        self._bench.held.clear()
        together = self._exchanged(point)
        if together is not None:
            self.notes.clear()
            return [together]
        if all(fault.kind == "unknown" and not fault.mended for fault in named):
            self.notes.clear()
            return named or [self.stretch(point, "no single change explains it")]
        return named

    def _together(self, point: Point) -> list[Fault]:
        """Faults that make the output more wrong when one is mended alone, as of queries and keys; [] if all mended do
        not make it right."""
        notes = list(self.notes)
        self.notes.clear()
        self._bench.held.clear()
        self._first = FirstWrong(self._bench, self._pairs, self._exact, self._progress)
        named = self._one_by_one(point, keeps_worse=True)
        if named and named[-1].mended:
            return named
        self.notes[:] = notes
        return []

    def _one_by_one(self, point: Point, *, keeps_worse: bool = False) -> list[Fault]:
        """The first fault, and with it mended the next.

        Args:
            keeps_worse: a fault with a cause stays mended where that makes the output more wrong.
        """
        named = list[Fault]()
        for _ in range(MOST):
            if point:
                break
            try:
                trace = self._trace(point)
            except NotEvaluated as refusal:
                named.append(self.stretch(point, str(refusal)))
                break
            fault = trace.fault
            mends = self._mending(trace)
            if mends is None:
                at_end = fault.tensor == self._output and trace.right is not None
                fault = replace(
                    fault,
                    mended=at_end or bool(fault.widened.mends),
                    mended_error=0.0 if at_end else fault.widened.error,
                )
                _add(named, self._kept(trace, fault))
                break
            before, held = self._value, dict(self._bench.held)
            self._bench.held |= mends
            after = self.at_output()
            is_kept = keeps_worse and fault.kind != "unknown"
            is_inner = trace.wrong in self._first.pairs and trace.wrong != self._output
            if worse(after, point) and is_inner and not is_kept:
                self._bench.held = held
                self._doubted.append(trace)
                self._first.drop(trace.wrong)  # no pair: what was taken for the right value is another tensor's
                continue
            self._first.forget()
            if self._names_classes or output_changed(before, self._value, point.allowed):
                error = None if after.reason else after.error
                _add(named, self._kept(trace, replace(fault, mended=bool(after), mended_error=error)))
            else:
                self.notes.append(
                    f"{fault.tensor!r} of {fault.module or 'the model itself'} is off too ({fault.cause}), which the"
                    " output does not feel"
                )
            point = after
        if named and not named[-1].mended:
            self.notes.append(
                f"{self._output!r} would still be wrong with what was found mended: there is more to find then"
            )
        return named

    def _mending(self, trace: _Trace) -> dict[str, Array] | None:
        """What is held to mend a fault; None where the type of its tensor can't hold that, and at the output."""
        if trace.held:
            return {name: self._units.stored(name, value) for name, value in trace.held.items()}
        tensor, right = trace.fault.tensor, trace.right
        if right is None or tensor == self._output:
            return None
        stored = self._units.stored(tensor, right)
        return {tensor: stored} if np.isfinite(stored.astype(np.float64))[np.isfinite(right)].all() else None

    def _exchanged(self, at_output: Point) -> Fault | None:
        """The fault of a file in which two tensors of one source stand in each other's place: each mended alone leaves
        the output as wrong."""
        target = self._program.end(self._output)
        places = self._exact.before([self._output])
        known = {name: widen(value) for name, value in self._bench.own().items()}
        try:
            values = self._exact.run(places, known)
            expected = self._bench.references([target])[target]
        except (NotEvaluated, GraphError, InputError, RuntimeUnavailable):
            return None
        if expected.size != values[self._output].size:
            return None
        expected = expected.reshape(values[self._output].shape)
        spot = Spot(tuple(places), self._output, expected, at_output.allowed)
        afresh = Afresh(self._exact, values, spot)
        tensors = tensors_of(values)
        for cause, change in exchanged_tensors(self._exact, of_one_source(self._exact, tensors), tensors):
            error = afresh.error(change)
            if error <= spot.allowed:
                made = sorted({self._exact.makers[name] for name in cause.held if name in self._exact.makers})
                numbers = (at_output.error, at_output.allowed, at_output.scale, at_output.reason)
                fault = self._told(self._module(made), self._output, made, "file", numbers, cause, at_output)
                return replace(fault, mended=True, mended_error=error)
        return None

    def stretch(self, at_output: Point, why: str) -> Fault:
        """The nodes between the last tensors that are right and the first that is not."""
        first = FirstWrong(self._bench, self._pairs, self._exact, self._progress)
        tensor = first.find(self._output)
        starts = [name for name in first.frontier(tensor) if name != tensor]
        places = self._exact.before([tensor], set(starts))
        point = first.points.get(tensor) or at_output
        before = ", ".join(map(repr, starts)) or "the inputs"
        cause = Cause("unknown", f"{why}; it lies between {before}, right, and {tensor!r}, which is wrong")
        node = first.pairs[tensor].node if tensor in first.pairs else ""
        numbers = (point.error, point.allowed, point.scale, point.reason)
        path = self._module(places) or self._program.module(node)
        return self._told(path, tensor, places, "file", numbers, cause, at_output)

    def _everywhere(self, at_output: Point) -> Fault | None:
        """The fault of a file that is wrong all over: of another state of the model, or in training mode."""
        replacement = replaced(self._model, self._bench.proto)
        if replacement.cause is not None and (error := self._error_of(replacement.proto)) is not None:
            places = [p for p, node in enumerate(self._exact.nodes) if set(replacement.names) & set(node.input)]
            return self._one(places, replacement.cause, at_output, error)
        for exchange in islice(exchanges(self._model, self._program, self._bench.proto), _MOST_EXCHANGES):
            if (error := self._error_of(exchange.proto)) is not None:
                places = [
                    next(p for p, n in enumerate(self._exact.nodes) if name in n.input) for name in exchange.names
                ]
                return self._one(places, exchange.cause, at_output, error)
        changed, results = in_eval(self._bench.proto, stored_in(self._model))
        if results and (error := self._error_of(changed)) is not None:
            places = [self._exact.makers[name] for name in results]
            text = f"{len(places)} BatchNormalizations are in training mode: they take {BATCH}"
            return self._one(places, Cause("training mode", text), at_output, error)
        return None

    def _error_of(self, changed: onnx.ModelProto) -> float | None:
        """What the output of a changed file is off by; None where it is wrong or can't be run."""
        proto, value = self._bench.proto, self._value
        self._bench.proto = changed
        try:
            after = self.at_output()
        except (GraphError, InputError, RuntimeUnavailable):
            return None
        finally:
            self._bench.proto, self._value = proto, value
        return after.error if after else None

    def _one(self, places: Sequence[int], cause: Cause, at_output: Point, mended_error: float) -> Fault:
        numbers = (at_output.error, at_output.allowed, at_output.scale, at_output.reason)
        fault = self._told("", self._output, places, "file", numbers, cause, at_output)
        return replace(fault, mended=True, mended_error=mended_error)

    def _kept(self, trace: _Trace, fault: Fault) -> Fault:
        self.reproduction = self.reproduction or trace.reproduction
        return fault

    @property
    def looked_at(self) -> list[str]:
        """The tensors that were compared with the model's."""
        return list(self._first.pairs)

    def at_output(self) -> Point:
        """How far off the output is."""
        pair = self._first.pairs.get(self._output)
        point, self._value = (None, None) if pair is None else self._bench.at(pair)
        if point is not None:
            return point
        r = self._result
        return Point("", self._output, "output", r.max_abs_error, 0.0, r.allowed, 0.0, r.reason or "it differs")

    @property
    def _names_classes(self) -> bool:
        """Whether the output holds integers: one that stays what it was does not tell how far a fault reaches."""
        return self._value is not None and self._value.dtype.kind in "iub"

    # ------------------------------------------------------------------ one fault

    def _trace(self, at_output: Point) -> _Trace:
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

    def _in_the_file(self, spot: Spot, search: Search, at_output: Point) -> _Trace:
        explained = explanation(self._exact, self._program, self._altered, search, spot)
        spot, cause, known = explained.spot, explained.cause, explained.known
        got = self._exact.run(spot.places, known)[spot.end]
        if got.size == spot.expected.size:
            found = difference(got.reshape(spot.expected.shape), spot.expected)
            error, reason = found.error, found.reason
        else:
            error, reason = 0.0, f"its shape is {list(got.shape)}, the model's is {list(spot.expected.shape)}"
        places = spot.places if cause.place is None else (cause.place,)
        theirs = spot.last if [*places] == [self._exact.makers[spot.end]] and not spot.left_out else spot.node
        path = self._program.module(theirs) if spot.left_out else self._module(places) or self._program.module(theirs)
        # A tensor that is held at its right value may have many readers, and stands for no operator.
        operator = self._program.operator(theirs) if theirs and not cause.held else ""
        alone = self._without_sequences(spot.places, {**search.values, **known})
        given = self._units.given(alone, {**search.values, **known})
        model = self._reproduction(alone, spot.end, given, spot.expected, spot.allowed, cause)
        fault = self._told(
            path, spot.end, places, "file", (error, spot.allowed, _scale(spot.expected), reason), cause, at_output
        )
        fault = replace(fault, operator=operator, widened=self._widened(spot.places))
        return _Trace(fault, spot.expected, search.end, model, cause.held)

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

    def _in_the_runtime(self, wrong: Wrong, search: Search, at_output: Point) -> _Trace:
        dtype = self._exact.types.get(wrong.end, np.dtype(np.float32))
        cause = bisect_runtime.cause_of(wrong, dtype, self._result)
        same = next(iter(search.found.get(wrong.end, ())), "")
        model = self._reproduction(wrong.places, wrong.end, wrong.given, wrong.expected, wrong.allowed, cause)
        numbers = (wrong.error, wrong.allowed, _scale(wrong.expected), wrong.reason)
        fault = self._told(
            self._module(wrong.places) or self._program.module(same),
            wrong.end,
            wrong.places,
            "runtime",
            numbers,
            cause,
            at_output,
        )
        operator = self._program.operator(same) if same else ""
        fault = replace(fault, operator=operator, widened=self._widened(wrong.places))
        return _Trace(fault, search.values.get(wrong.end), search.end, model)

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

    def _in_precision(self, places: tuple[int, ...], tensor: str, search: Search, at_output: Point) -> _Trace:
        names = [name for p in places for name in self._exact.nodes[p].output if self._is_coarser(name)]
        cause = Cause(
            "precision",
            f"{names[0]!r} is {self._exact.types[names[0]].name}, and the file computes in {self._dtype.name}: with"
            f" {self._dtype.name} there it is right",
        )
        point = self._first.points.get(tensor) or at_output
        numbers = (point.error, point.allowed, point.scale, point.reason)
        fault = self._told(self._module(places), tensor, places, "file", numbers, cause, at_output)
        right = search.reference[search.target].reshape(search.values[tensor].shape)
        widened = Widened(True, self._names(places))
        return _Trace(replace(fault, widened=widened), right, tensor)

    def _between(self, tensor: str, search: Search, at_output: Point) -> _Trace:
        point = self._first.points.get(tensor) or at_output
        cause = Cause("unknown", "each node is right on right inputs: small errors of what comes before grow here")
        numbers = (point.error, point.allowed, point.scale, point.reason)
        fault = self._told(self._module(search.places), tensor, search.places, "between", numbers, cause, at_output)
        return _Trace(replace(fault, widened=self._widened(search.places)), search.values.get(tensor), tensor)

    def _told(
        self,
        path: str,
        tensor: str,
        places: Sequence[int],
        wrong: str,
        numbers: tuple[float, float, float, str],
        cause: Cause,
        at: Point,
    ) -> Fault:
        widened, r = Widened(None), self._result
        named = (path, tensor, self._names(places), "", wrong)
        return Fault(
            r.runtime,
            self._case,
            *named,
            *numbers,
            cause.kind,
            cause.text,
            widened,
            r.output,
            at.error,
            at.allowed,
            at.reason,
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

    # ------------------------------------------------------------------ what would mend it

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


def _add(named: list[Fault], fault: Fault) -> None:
    """Add a fault; what was found before is one with it: a node of several results, or one that several nodes read."""
    for i, other in enumerate(named):
        if (other.nodes, other.kind, other.cause) == (fault.nodes, fault.kind, fault.cause):
            named[i] = replace(other, mended=fault.mended, mended_error=fault.mended_error)
            return
    named.append(fault)


def _scale(expected: Array) -> float:
    return float(np.abs(expected[np.isfinite(expected)]).max(initial=0))
