"""One fault of a file or a runtime: the first tensor that right inputs leave wrong, its nodes and its cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np
import onnx

from ...compare.element_errors import difference_from_float64, largest_finite
from ...compare.ulp_spacing import allowed_beside_eager
from ...errors import GraphError, InputError, RuntimeUnavailable
from ...graphs.file_graph import widen_to_float64
from ...graphs.proto_queries import module_path
from ...precision.emulated_half import emulate_half
from ...precision.type_conversion import FORMATS
from ...runtimes.float64_evaluator import Array, Float64Evaluator, Values, inferred_dtypes, with_float32_island
from ...runtimes.ort_runner import ort_title
from ...types import Progress
from ..verify.output_results import OutputResult
from ..verify.reference_models import Original
from ..verify.runtime_candidates import ON, STEPWISE
from ..verify.tensor_drift import DriftPoint
from . import runtime_faults as bisect_runtime
from .counterpart_search import CounterpartSearch, FaultSpot
from .intervention_runner import FirstWrongSearch, InterventionRunner, longest_ordered_pairs, round_inputs
from .reference_program import open_program
from .reference_tensors import pair_with_model
from .reproduction import Reproduction
from .runtime_faults import HALVES, Float32Trial, RuntimeUnits, WrongNodes
from .spot_explanation import explain_spot
from .trial_changes import Cause

CUDA = ort_title("cuda", optimize=False), ort_title("cuda", optimize=True)


@dataclass(frozen=True)
class Fault:
    """One place where right inputs give a wrong result.

    ``wrong``: "file" (by ONNX's definition it computes something else than the model), "runtime" (it computes otherwise
    than ONNX defines) or "between" (each node is right on right inputs, and small errors grow). ``nodes``: "op name" of
    each node that it may be, one where it could be told; ``operator``: of the model. ``error`` of ``tensor`` on right
    inputs, ``allowed``, and ``scale``, its largest |right value|; ``reason``: what no error can say. ``kind`` and
    ``cause``: see ``verbs.bisect.cause_search``. ``output_error``, ``output_allowed`` and ``output_reason``: of
    ``output`` on
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
    widened: Float32Trial
    output: str
    output_error: float
    output_allowed: float
    output_reason: str
    mended_error: float | None = None
    mended: bool = False


@dataclass(frozen=True)
class TensorError:
    """How far a tensor is off on right inputs; ``scale``: its largest finite |right value|; ``reason``: what no error
    can say."""

    error: float
    allowed: float
    scale: float
    reason: str


@dataclass(frozen=True)
class FaultTrace:
    """A fault, the right value of its tensor, the compared tensor that led to it, and its model; ``held``: tensors with
    right values that mend it, where these are others."""

    fault: Fault
    right: Array | None
    wrong: str
    reproduction: Reproduction | None = None
    held: Values = field(default_factory=dict)


class FaultTracer:
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
        self._result = result
        self._case = case
        self._output = result.output
        precision = result.precision
        half = FORMATS[precision].dtype if precision else None
        if half is None:
            self._dtype = np.dtype(result.dtype if result.dtype == "float64" else np.float32)
        else:
            self._dtype = half
        if result.runtime == STEPWISE:
            running = emulate_half(proto)
        else:
            running = proto
        optimize = result.runtime in (ON, CUDA[1])
        provider = "cuda" if result.runtime in CUDA else "cpu"
        self._bench = InterventionRunner(
            model, running, round_inputs(feeds, half), precision, optimize, provider, alone=optimize
        )
        self._program = open_program(model)
        self._exact = Float64Evaluator(proto, inferred_dtypes(proto))
        if running is proto:
            ran = self._exact
        else:
            ran = Float64Evaluator(running, inferred_dtypes(running))
        self._units = RuntimeUnits(self._exact, ran, self._bench)
        self._altered = altered
        self._model = model
        self._pairs = longest_ordered_pairs(pair_with_model(model, proto))
        self._progress = progress
        self._first = FirstWrongSearch(self._bench, self._pairs, self._exact, progress)
        self._buffers = self._program.stored_buffers()
        # faults that, mended alone, leave the output more wrong
        self._doubted = list[FaultTrace]()
        self.notes: list[str] = []
        self.reproduction: Reproduction | None = None
        # of the output, when it was last looked at
        self._value: Array | None = None

    def output_error(self) -> DriftPoint:
        """How far off the output is."""
        pair = self._first.pairs.get(self._output)
        point, self._value = (None, None) if pair is None else self._bench.compare_at(pair)
        if point is not None:
            return point
        r = self._result
        return DriftPoint("", self._output, "output", r.max_abs_error, 0.0, r.allowed, 0.0, r.reason or "it differs")

    def trace_fault(self, at_output: DriftPoint) -> FaultTrace:
        """The first fault."""
        while True:
            tensor = self._first.find(self._output)
            search = self.stretch_search(tensor)
            spot = search.find_spot()
            if spot is None or tensor == self._output or not search.found.get(tensor):
                break
            if self._mends_output(tensor, search, at_output):
                spot = search.omission_spot()
                break
            # no pair: it is another tensor of the model, and right
            self._first.drop(tensor)
        if spot is not None:
            return self._trace_in_file(spot, search, at_output)
        coarse = self._find_coarse_nodes(tensor, search)
        if coarse is not None:
            return self._trace_in_precision(coarse, tensor, search, at_output)
        wrong = None if self._bench.optimize else self._units.find_first_wrong(search.places, search.values)
        wrong = wrong or self._units.shrink_wrong_nodes(search.places, tensor, search.values)
        if wrong:
            return self._trace_in_runtime(wrong, search, at_output)
        return self._trace_between(tensor, search, at_output)

    def _mends_output(self, tensor: str, search: CounterpartSearch, before: DriftPoint) -> bool:
        """Whether the output gets right, or half as wrong, with ``tensor`` at what its pair has: an operator that is
        left out leaves its input there, which is another tensor of the model too."""
        right = search.reference[search.target].reshape(search.values[tensor].shape)
        own, self._bench.held[tensor] = self._value, self._units.round_to_file_type(tensor, right)
        try:
            after = self.output_error()
        finally:
            del self._bench.held[tensor]
            self._value = own
        return bool(after) or (not after.reason and (bool(before.reason) or after.error < before.error / 2))

    def stretch_search(self, tensor: str) -> CounterpartSearch:
        """What lies between the wrong tensor and the right ones before it."""
        paired = self._first.pairs
        if tensor in paired:
            node = paired[tensor].node
        else:
            node = self._program.output_operator(self._output)
        starts = [name for name in self._first.compared_predecessors(tensor) if name != tensor]
        right = {paired[name].node for name, point in self._first.points.items() if point and name in paired}
        operators = self._program.operators_between(node, right)
        named = self._program.tensor_operators(dict.fromkeys([*(paired[s].node for s in starts), *operators]))
        named += self._program.tensor_operators(
            n for n in right if n not in named and any(n in self._program.inputs_of(o) for o in operators)
        )
        reference = self._bench.reference_values(named)
        eager = self._bench.eager_values(named)
        allowed = {n: self._allowed_error(eager[n], reference[n]) for n in named}
        shapes = self._bench.runtime_values(starts)
        known = {name: widen_to_float64(value) for name, value in self._bench.input_values().items()}
        known |= {name: reference[paired[name].node].reshape(shapes[name].shape) for name in starts}
        known |= {name: widen_to_float64(value) for name, value in self._bench.held.items()}
        places = self._exact.nodes_between([tensor], known.keys())
        fixed = self._bench.reference_values(self._program.fixed_ancestors(operators)) | self._buffers
        return CounterpartSearch(
            self._exact, places, known, tensor, self._program, reference, allowed, right, node, fixed
        )

    def _allowed_error(self, eager: Array, reference: Array) -> float:
        """The rule of ``verify``, for one tensor."""
        if reference.dtype.kind != "f":
            return 0.0
        return allowed_beside_eager(eager, reference, self._dtype)

    def _trace_in_file(self, spot: FaultSpot, search: CounterpartSearch, at_output: DriftPoint) -> FaultTrace:
        explained = explain_spot(self._exact, self._program, self._altered, search, spot)
        spot = explained.spot
        cause = explained.cause
        known = explained.known
        got = self._exact.evaluate_nodes(spot.places, known)[spot.end]
        if got.size == spot.expected.size:
            found = difference_from_float64(got.reshape(spot.expected.shape), spot.expected)
            off = TensorError(found.error, spot.allowed, found.scale, found.reason)
        else:
            shapes = f"its shape is {list(got.shape)}, the model's is {list(spot.expected.shape)}"
            off = TensorError(0.0, spot.allowed, largest_finite(spot.expected), shapes)
        places = spot.places if cause.place is None else (cause.place,)
        if [*places] == [self._exact.makers[spot.end]] and not spot.left_out:
            theirs = spot.last
        else:
            theirs = spot.node
        if spot.left_out:
            path = self._program.module_of(theirs)
        else:
            path = self._module_of_places(places) or self._program.module_of(theirs)
        # A tensor that is held at its right value may have many readers, and stands for no operator.
        if theirs and not cause.held:
            operator = self._program.operator_kind(theirs)
        else:
            operator = ""
        alone = self._include_sequence_makers(spot.places, {**search.values, **known})
        given = self._units.input_values(alone, {**search.values, **known})
        model = self._make_reproduction(alone, spot.end, given, spot.expected, spot.allowed, cause)
        fault = self._make_fault(path, spot.end, places, "file", off, cause, at_output)
        fault = replace(fault, operator=operator, widened=self._try_float32(spot.places))
        return FaultTrace(fault, spot.expected, search.end, model, cause.held)

    def _include_sequence_makers(self, places: Sequence[int], values: Values) -> list[int]:
        """``places``, and the makers of the sequences that they read: these are no inputs of a model."""
        every = set(places)
        while True:
            made = {name for p in every for name in self._exact.nodes[p].output}
            read = {name for p in every for name in self._exact.read_names(self._exact.nodes[p])} - made
            makers = {self._exact.makers[n] for n in read if isinstance(self._exact.tensor_value(n, values), list)}
            if not makers:
                return sorted(every)
            every |= makers

    def _trace_in_runtime(self, wrong: WrongNodes, search: CounterpartSearch, at_output: DriftPoint) -> FaultTrace:
        dtype = self._exact.types.get(wrong.end, np.dtype(np.float32))
        cause = bisect_runtime.make_runtime_cause(wrong, dtype, self._result)
        same = next(iter(search.found.get(wrong.end, ())), "")
        model = self._make_reproduction(wrong.places, wrong.end, wrong.given, wrong.expected, wrong.allowed, cause)
        off = TensorError(wrong.error, wrong.allowed, largest_finite(wrong.expected), wrong.reason)
        fault = self._make_fault(
            self._module_of_places(wrong.places) or self._program.module_of(same),
            wrong.end,
            wrong.places,
            "runtime",
            off,
            cause,
            at_output,
        )
        operator = self._program.operator_kind(same) if same else ""
        fault = replace(fault, operator=operator, widened=self._try_float32(wrong.places))
        return FaultTrace(fault, search.values.get(wrong.end), search.end, model)

    def _find_coarse_nodes(self, tensor: str, search: CounterpartSearch) -> tuple[int, ...] | None:
        """Find the nodes of a stretch that compute in a coarser type than the file, if float32 in them mends it."""
        narrow = [p for p in search.places if any(self._is_coarser(name) for name in self._exact.nodes[p].output)]
        if not narrow or len(narrow) == len(search.places):
            return None
        chosen = self._include_casts(narrow)
        if self._is_right_in_float32(chosen, tensor):
            return chosen
        return None

    def _is_coarser(self, name: str) -> bool:
        own = self._exact.types.get(name)
        is_floating = own is not None and (own.kind == "f" or own in HALVES)
        return is_floating and ml_dtypes.finfo(own).eps > ml_dtypes.finfo(self._dtype).eps

    def _include_casts(self, narrow: Sequence[int]) -> tuple[int, ...]:
        """``narrow`` and the nodes that bring its results back into the file's type."""
        written = {name for p in narrow for name in self._exact.nodes[p].output}
        back = [p for p, n in enumerate(self._exact.nodes) if n.op_type == "Cast" and n.input[0] in written]
        return tuple(sorted({*narrow, *back}))

    def _is_right_in_float32(self, places: Sequence[int], tensor: str) -> bool:
        """Whether a tensor is right, or the output where it is compared with nothing, with ``places`` in float32."""
        proto = self._bench.proto
        try:
            self._bench.proto = with_float32_island(self._exact.proto, set(places), self._exact.types)
            pair = self._first.pairs.get(tensor)
            return bool(self.output_error() if pair is None else self._bench.compare_at(pair)[0])
        except (GraphError, InputError, RuntimeUnavailable):
            return False
        finally:
            self._bench.proto = proto

    def _trace_in_precision(
        self, places: tuple[int, ...], tensor: str, search: CounterpartSearch, at_output: DriftPoint
    ) -> FaultTrace:
        names = [name for p in places for name in self._exact.nodes[p].output if self._is_coarser(name)]
        cause = Cause(
            "precision",
            f"{names[0]!r} is {self._exact.types[names[0]].name}, and the file computes in {self._dtype.name}: with"
            f" {self._dtype.name} there it is right",
        )
        point = self._first.points.get(tensor) or at_output
        fault = self._make_fault(self._module_of_places(places), tensor, places, "file", point, cause, at_output)
        right = search.reference[search.target].reshape(search.values[tensor].shape)
        widened = Float32Trial(True, self._node_names(places))
        return FaultTrace(replace(fault, widened=widened), right, tensor)

    def _trace_between(self, tensor: str, search: CounterpartSearch, at_output: DriftPoint) -> FaultTrace:
        point = self._first.points.get(tensor) or at_output
        cause = Cause("unknown", "each node is right on right inputs: small errors of what comes before grow here")
        fault = self._make_fault(
            self._module_of_places(search.places), tensor, search.places, "between", point, cause, at_output
        )
        return FaultTrace(replace(fault, widened=self._try_float32(search.places)), search.values.get(tensor), tensor)

    def _make_fault(
        self,
        path: str,
        tensor: str,
        places: Sequence[int],
        wrong: str,
        off: TensorError | DriftPoint,
        cause: Cause,
        at: DriftPoint,
    ) -> Fault:
        return Fault(
            runtime=self._result.runtime,
            case=self._case,
            module=path,
            tensor=tensor,
            nodes=self._node_names(places),
            operator="",
            wrong=wrong,
            error=off.error,
            allowed=off.allowed,
            scale=off.scale,
            reason=off.reason,
            kind=cause.kind,
            cause=cause.text,
            widened=Float32Trial(None),
            output=self._output,
            output_error=at.error,
            output_allowed=at.allowed,
            output_reason=at.reason,
        )

    def _node_names(self, places: Sequence[int]) -> tuple[str, ...]:
        """Name the nodes of the user's file: an Identity without a name, which `renamed` puts at an end, is named by
        the node in front of it, if nothing else is named."""
        nodes = [self._exact.nodes[p] for p in places]
        named = [node for node in nodes if node.op_type != "Identity" or node.name]
        if not named:
            makers = (self._exact.makers.get(node.input[0]) for node in nodes)
            named = [self._exact.nodes[p] for p in makers if p is not None]
        return tuple(f"{node.op_type} {node.name}".strip() for node in named or nodes)

    def _module_of_places(self, places: Sequence[int]) -> str:
        return next(filter(None, (module_path(self._exact.nodes[p]) for p in reversed(places))), "")

    def _make_reproduction(
        self, places: Sequence[int], end: str, given: Values, expected: Array, allowed: float, cause: Cause
    ) -> Reproduction:
        ran = self._units.ran
        bench = self._bench
        return Reproduction.make_reproduction(
            ran,
            self._units.places_in_runtime(places),
            end,
            given,
            expected,
            allowed,
            bench.optimize,
            bench.provider,
            cause.text,
        )

    def _try_float32(self, places: Sequence[int]) -> Float32Trial:
        """Whether the output is right when the nodes compute in float32."""
        nodes = [self._exact.nodes[p] for p in places]
        if not {self._exact.types.get(name) for n in nodes for name in (*n.input, *n.output)} & HALVES:
            return Float32Trial(None, reason=f"it computes in {self._dtype.name} already")
        proto = self._bench.proto
        try:
            for wide, chosen in bisect_runtime.iter_float32_islands(self._exact, places):
                if self._result.runtime == STEPWISE:
                    self._bench.proto = emulate_half(wide)
                else:
                    self._bench.proto = wide
                if point := self.output_error():
                    return Float32Trial(True, self._node_names(chosen), point.error)
        except (GraphError, InputError, RuntimeUnavailable) as error:
            return Float32Trial(None, reason=str(error))
        finally:
            self._bench.proto = proto
        return Float32Trial(False)
