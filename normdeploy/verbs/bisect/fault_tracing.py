"""Trace one fault of a file or a runtime: the first wrong tensor, the nodes that compute it, and the cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np
import onnx

from ...compare.ulp_spacing import allowed_beside_eager
from ...errors import GraphError, InputError, RuntimeUnavailable
from ...findings.rendering import ShortRepr
from ...graphs.file_graph import widen_to_float64
from ...graphs.proto_queries import module_path
from ...precision.emulated_half import emulate_half
from ...precision.type_conversion import FORMATS
from ...runtimes.float64_evaluator import Float64Evaluator, extract_nodes, inferred_dtypes, with_float32_region
from ...runtimes.named_runners import BUILTIN_RUNNERS, BUILTIN_TITLES
from ...runtimes.ort_runner import ort_title
from ...types import Array, Arrays, Progress
from ..verify.output_results import OutputResult
from ..verify.precision_trial import round_inputs
from ..verify.reference_models import Original
from ..verify.runtime_candidates import ON, STEPWISE
from ..verify.tensor_drift import DriftPoint
from .counterpart_search import CounterpartSearch, FaultSpot
from .intervention_runner import FirstWrongSearch, InterventionRunner, longest_ordered_pairs
from .reference_program import open_program
from .reference_tensors import find_followed_choices, open_inner_tensors, pair_with_model
from .reproduction import Reproduction
from .runtime_faults import (
    HALVES,
    Float32Trial,
    RuntimeUnits,
    TensorError,
    WrongNodes,
    iter_float32_regions,
    make_runtime_cause,
)
from .spot_explanation import explain_spot
from .trial_changes import Cause

CUDA = ort_title("cuda", optimize=False), ort_title("cuda", optimize=True)


# Name of the part of a model that is in none of its modules, for messages.
TOP_LEVEL = "top level of the model"


@dataclass(frozen=True, repr=False, kw_only=True)
class Fault(ShortRepr):
    """Fault: nodes that compute a wrong result from right inputs.

    Attributes:
        module: qualified path of the module, "" for the model itself.
        tensor: the first wrong tensor.
        nodes: "op name" of the node at fault; if it is not known exactly, of each node that may be at fault.
        operator: the corresponding operator of the model; "" if unknown.
        wrong: "file" if the file, by ONNX's definition of its ops, does not compute the model's function; "runtime" if
            the runtime does not follow ONNX's definition; "between" if each node is right on right inputs, but small
            errors grow.
        error: error of ``tensor`` if the nodes read right inputs.
        allowed: allowed error of ``tensor``.
        scale: largest magnitude in the right value of ``tensor``.
        reason: a difference that an error can't express, such as NaN.
        kind, cause: see ``verbs.bisect.trial_changes.Cause``.
        widened: result of the trial that computes the nodes in float32.
        output_error, output_allowed, output_reason: error, allowed error and reason for ``output`` of the unchanged
            file on the input ``case``.
        mended_error: error of the output if ``tensor`` is set to its right value. If the type of ``tensor`` can't
            represent this value, the float32 region of ``widened`` is used instead. Null if neither can be run.
        mended: True if ``mended_error`` is within the allowed error of the output.
    """

    runtime: str
    case: str
    module: str = ""
    tensor: str
    nodes: tuple[str, ...]
    operator: str = ""
    wrong: str = "file"
    error: float = 0.0
    allowed: float = 0.0
    scale: float = 0.0
    reason: str = ""
    kind: str
    cause: str
    widened: Float32Trial
    output: str
    output_error: float
    output_allowed: float
    output_reason: str
    mended_error: float | None = None
    mended: bool = False

    def summarize(self) -> str:
        """Return the main facts in one line."""
        return f"{self.module or TOP_LEVEL}, {', '.join(self.nodes[:2])}: {self.kind}: {self.cause}"


@dataclass(frozen=True)
class FaultyOutput:
    """Output of a file that ``verify`` found wrong, and the input on which its faults are searched.

    Attributes:
        result: the failed comparison of the output.
        altered: weights of the file that differ from the model's -> description of the difference.
    """

    result: OutputResult
    case: str
    feeds: Arrays
    altered: Mapping[str, str]


@dataclass(frozen=True)
class FaultTrace:
    """Fault with the values and the model that show it.

    Attributes:
        right: right value of the fault's tensor, None if unknown.
        wrong: the wrong tensor from which the fault was traced.
        reproduction: a small model that shows the fault.
        held: right values of other tensors that mend the fault; empty if the fault's tensor mends it.
    """

    fault: Fault
    right: Array | None
    wrong: str
    reproduction: Reproduction | None = None
    held: Arrays = field(default_factory=dict)


class FaultTracer:
    """Find the first fault of an output.

    Attributes:
        at_output: current error of the output, with all found faults mended.
    """

    def __init__(
        self, model: Original, proto: onnx.ModelProto, subject: FaultyOutput, progress: Progress | None
    ) -> None:
        result = subject.result
        self._model = model
        self._subject = subject
        self._result = result
        self._output = result.output
        self._progress = progress
        if result.precision:
            half = FORMATS[result.precision].dtype
        else:
            half = None
        if half is None:
            self._dtype = np.dtype(result.dtype if result.dtype == "float64" else np.float32)
        else:
            self._dtype = half
        self._exact = Float64Evaluator(proto, inferred_dtypes(proto))
        ran = self._exact
        if result.runtime == STEPWISE:
            running = emulate_half(proto)
            ran = Float64Evaluator(running, inferred_dtypes(running))
        optimize = result.runtime in (ON, CUDA[1], *BUILTIN_TITLES)
        if result.runtime in BUILTIN_TITLES:
            provider = BUILTIN_TITLES[result.runtime].provider
        else:
            provider = "cuda" if result.runtime in CUDA else "cpu"
        feeds = round_inputs(subject.feeds, half)
        guide = find_followed_choices(model, ran.proto, feeds, result.precision, optimize=optimize, provider=provider)
        insides = open_inner_tensors(model, feeds, result.precision, guide)
        self._bench = InterventionRunner(insides, ran.proto, feeds, result.precision, optimize, provider)
        self._program = open_program(model)
        self._units = RuntimeUnits(self._exact, ran, self._bench)
        self._pairs = longest_ordered_pairs(pair_with_model(model, proto))
        self._first = FirstWrongSearch(self._bench, self._pairs, self._exact, progress)
        self._buffers = self._program.stored_buffers()
        # Faults that make the output worse if each is mended without the others.
        self._doubted = list[FaultTrace]()
        self.notes: list[str] = []
        self.reproduction: Reproduction | None = None
        # Last computed value of the output.
        self._value: Array | None = None
        self.at_output = self._point_of_result()

    def _point_of_result(self) -> DriftPoint:
        r = self._result
        return DriftPoint("", self._output, "output", r.max_abs_error, 0.0, r.allowed, 0.0, r.reason or "it differs")

    def output_error(self) -> DriftPoint:
        """Compare the output with the reference.

        Returns:
            The output's error and allowed error. If the output has no counterpart, the values of ``verify`` are used.
        """
        pair = self._first.pairs.get(self._output)
        point, self._value = (None, None) if pair is None else self._bench.compare_at(pair)
        if point is None:
            return self._point_of_result()
        return point

    @contextmanager
    def _running(self, proto: onnx.ModelProto) -> Iterator[None]:
        """Run a changed copy of the file inside the context."""
        own = self._bench.proto
        value = self._value
        self._bench.proto = proto
        try:
            yield
        finally:
            self._bench.proto = own
            self._value = value

    def trace_fault(self) -> FaultTrace:
        """Trace the first fault.

        Returns:
            The fault. Its kind is "unknown" if each node is right on right inputs.
        """
        while True:
            tensor = self._first.find(self._output)
            search = self.stretch_search(tensor)
            spot = search.find_spot()
            if spot is None or tensor == self._output or not search.found.get(tensor):
                break
            if self._mends_output(tensor, search):
                spot = search.omission_spot()
                break
            # The tensor was paired with a wrong tensor of the model, and is itself right. The pair is dropped.
            self._first.drop(tensor)
        if spot is not None:
            return self._trace_in_file(spot, search)
        coarse = self._find_coarse_nodes(search)
        if coarse is not None:
            return self._trace_in_precision(coarse, search)
        # A node that is wrong alone in onnxruntime is also wrong with the optimizer off, which is searched first.
        if self._bench.optimize and self._bench.provider not in BUILTIN_RUNNERS:
            wrong = None
        else:
            wrong = self._units.find_first_wrong(search.places, search.values)
        wrong = wrong or self._units.shrink_wrong_nodes(search.places, tensor, search.values)
        if wrong:
            return self._trace_in_runtime(wrong, search)
        cause = Cause("unknown", "each node is correct on correct inputs: small earlier errors grow here")
        fault = self._make_fault(tensor, search.places, cause, self._error_of(tensor), wrong="between")
        return FaultTrace(self._with_float32_trial(fault, search.places), search.values.get(tensor), tensor)

    def _error_of(self, tensor: str) -> DriftPoint:
        return self._first.points.get(tensor) or self.at_output

    def _mends_output(self, tensor: str, search: CounterpartSearch) -> bool:
        """Check that the error of the output vanishes or halves if ``tensor`` gets the value of its pair in the model.

        This detects an operator that the file leaves out. The file then uses the operator's input in place of its
        result, so the tensor equals another tensor of the model than its pair.
        """
        before = self.at_output
        self._bench.held[tensor] = self._units.round_to_file_type(tensor, search.wanted)
        try:
            with self._running(self._bench.proto):
                after = self.output_error()
        finally:
            del self._bench.held[tensor]
        return bool(after) or (not after.reason and (bool(before.reason) or after.error < before.error / 2))

    def stretch_search(self, tensor: str) -> CounterpartSearch:
        """Build the search in the nodes between the wrong tensor and the last right tensors before it.

        Returns:
            A search with the right values at its start and the reference's values of the inner tensors.
        """
        program = self._program
        paired = self._first.pairs
        if tensor in paired:
            target = paired[tensor].node
        else:
            target = program.output_operator(self._output)
        starts = [name for name in self._first.compared_predecessors(tensor) if name != tensor]
        right = {paired[name].node for name, point in self._first.points.items() if point and name in paired}
        operators = program.operators_between(target, right)
        read = {name for operator in operators for name in program.inputs_of(operator)}
        named = dict.fromkeys([*(paired[name].node for name in starts), *operators, *(n for n in right if n in read)])
        tensors = program.tensor_operators(named)
        reference = self._bench.reference_values(tensors)
        eager = self._bench.eager_values(tensors)
        shapes = self._bench.runtime_values(starts)
        known = {name: widen_to_float64(value) for name, value in self._bench.input_values().items()}
        known |= {name: reference[paired[name].node].reshape(shapes[name].shape) for name in starts}
        known |= {name: widen_to_float64(value) for name, value in self._bench.held.items()}
        return CounterpartSearch(
            exact=self._exact,
            program=program,
            known=known,
            end=tensor,
            reference=reference,
            allowed={n: self._allowed_error(eager[n], reference[n]) for n in tensors},
            starts=right,
            target=target,
            fixed=self._bench.reference_values(program.fixed_ancestors(operators)) | self._buffers,
        )

    def _allowed_error(self, eager: Array, reference: Array) -> float:
        """Return the allowed error of ``verify`` for one tensor."""
        if reference.dtype.kind != "f":
            return 0.0
        return allowed_beside_eager(eager, reference, self._dtype)

    def _trace_in_file(self, spot: FaultSpot, search: CounterpartSearch) -> FaultTrace:
        program = self._program
        explained = explain_spot(self._exact, program, self._subject.altered, search, spot)
        spot = explained.spot
        cause = explained.cause
        got = self._exact.evaluate_nodes(spot.places, explained.known)[spot.end]
        off = TensorError.of_tensor(got, spot.expected, spot.allowed, "the model's is")
        if cause.place is None:
            places = spot.places
        else:
            places = (cause.place,)
        theirs = spot.node
        module = self._module_of_places(places)
        if spot.left_out:
            module = ""
        elif [*places] == [self._exact.makers[spot.end]]:
            theirs = spot.last
        # If the cause has ``held``, it sets tensors to their right values. Many nodes may read these tensors, so no
        # single operator is at fault.
        if theirs and not cause.held:
            operator = program.operator_kind(theirs)
        else:
            operator = ""
        values = {**search.values, **explained.known}
        alone = self._include_sequence_makers(spot.places, values)
        given = self._units.input_values(alone, values)
        model = self._make_reproduction(alone, spot.end, given, spot.expected, spot.allowed, cause)
        fault = self._make_fault(spot.end, places, cause, off, module=module or program.module_of(theirs))
        fault = self._with_float32_trial(replace(fault, operator=operator), spot.places)
        return FaultTrace(fault, spot.expected, search.end, model, cause.held)

    def _include_sequence_makers(self, places: Sequence[int], values: Arrays) -> list[int]:
        """Add the nodes that make the sequences which ``places`` read, because a sequence can't be an input of a
        model.
        """
        every = set(places)
        while True:
            made = {name for p in every for name in self._exact.nodes[p].output}
            read = {name for p in every for name in self._exact.read_names(self._exact.nodes[p])} - made
            makers = {self._exact.makers[n] for n in read if isinstance(self._exact.tensor_value(n, values), list)}
            if not makers:
                return sorted(every)
            every |= makers

    def _trace_in_runtime(self, wrong: WrongNodes, search: CounterpartSearch) -> FaultTrace:
        dtype = self._exact.types.get(wrong.end, np.dtype(np.float32))
        cause = make_runtime_cause(wrong, dtype, self._result)
        same = next(iter(search.found.get(wrong.end, ())), "")
        model = self._make_reproduction(wrong.places, wrong.end, wrong.given, wrong.expected, wrong.off.allowed, cause)
        module = self._module_of_places(wrong.places) or self._program.module_of(same)
        fault = self._make_fault(wrong.end, wrong.places, cause, wrong.off, module=module, wrong="runtime")
        if same:
            operator = self._program.operator_kind(same)
        else:
            operator = ""
        fault = self._with_float32_trial(replace(fault, operator=operator), wrong.places)
        return FaultTrace(fault, search.values.get(wrong.end), search.end, model)

    def _find_coarse_nodes(self, search: CounterpartSearch) -> list[int] | None:
        """Find nodes that compute in a coarser type than the rest of the file.

        Returns:
            The nodes, if computing them in float32 makes the output right; otherwise None.
        """
        narrow = [p for p in search.places if any(self._is_coarser(name) for name in self._exact.nodes[p].output)]
        if not narrow or len(narrow) == len(search.places):
            return None
        # Add the nodes that convert the results of these nodes to the file's type.
        written = {name for p in narrow for name in self._exact.nodes[p].output}
        back = [p for p, n in enumerate(self._exact.nodes) if n.op_type == "Cast" and n.input[0] in written]
        chosen = sorted({*narrow, *back})
        if self._is_right_in_float32(chosen, search.end):
            return chosen
        return None

    def _is_coarser(self, name: str) -> bool:
        own = self._exact.types.get(name)
        is_floating = own is not None and (own.kind == "f" or own in HALVES)
        return is_floating and ml_dtypes.finfo(own).eps > ml_dtypes.finfo(self._dtype).eps

    def _is_right_in_float32(self, places: Sequence[int], tensor: str) -> bool:
        """Check that a tensor is right if the nodes compute in float32. If it has no counterpart, check the output
        instead.
        """
        try:
            with self._running(with_float32_region(self._exact.proto, set(places), self._exact.types)):
                pair = self._first.pairs.get(tensor)
                return bool(self.output_error() if pair is None else self._bench.compare_at(pair)[0])
        except (GraphError, InputError, RuntimeUnavailable):
            return False

    def _trace_in_precision(self, places: Sequence[int], search: CounterpartSearch) -> FaultTrace:
        tensor = search.end
        name = next(name for p in places for name in self._exact.nodes[p].output if self._is_coarser(name))
        cause = Cause(
            "precision",
            f"{name!r} is {self._exact.types[name].name}, but the file computes in {self._dtype.name}: with"
            f" {self._dtype.name} the result is correct",
        )
        fault = self._make_fault(tensor, places, cause, self._error_of(tensor))
        widened = Float32Trial(True, self._node_names(places))
        return FaultTrace(replace(fault, widened=widened), search.wanted, tensor)

    def _make_fault(
        self,
        tensor: str,
        places: Sequence[int],
        cause: Cause,
        off: TensorError | DriftPoint,
        *,
        module: str | None = None,
        wrong: str = "file",
    ) -> Fault:
        """Build a fault of the nodes at ``places``. If ``module`` is None, the module of the nodes is used."""
        return Fault(
            runtime=self._result.runtime,
            case=self._subject.case,
            module=self._module_of_places(places) if module is None else module,
            tensor=tensor,
            nodes=self._node_names(places),
            wrong=wrong,
            error=off.error,
            allowed=off.allowed,
            scale=off.scale,
            reason=off.reason,
            kind=cause.kind,
            cause=cause.text,
            widened=Float32Trial(None),
            output=self._output,
            output_error=self.at_output.error,
            output_allowed=self.at_output.allowed,
            output_reason=self.at_output.reason,
        )

    def _node_names(self, places: Sequence[int]) -> tuple[str, ...]:
        """Name the nodes as the user's file does.

        `rename_ends` adds Identity nodes without a name. If there are only such nodes, the node before them is named.
        """
        nodes = [self._exact.nodes[p] for p in places]
        named = [node for node in nodes if node.op_type != "Identity" or node.name]
        if not named:
            makers = (self._exact.makers.get(node.input[0]) for node in nodes)
            named = [self._exact.nodes[p] for p in makers if p is not None]
        return tuple(f"{node.op_type} {node.name}".strip() for node in named or nodes)

    def _module_of_places(self, places: Sequence[int]) -> str:
        return next(filter(None, (module_path(self._exact.nodes[p]) for p in reversed(places))), "")

    def _make_reproduction(
        self, places: Sequence[int], end: str, given: Arrays, expected: Array, allowed: float, cause: Cause
    ) -> Reproduction:
        ran = self._units.ran
        nodes = [ran.nodes[p] for p in self._units.places_in_runtime(places)]
        model = extract_nodes(ran, nodes, [end], given)
        return Reproduction(
            model=model,
            inputs={v.name: np.asarray(given[v.name]) for v in model.graph.input},
            output=end,
            expected=expected,
            allowed=allowed,
            optimizer=self._bench.optimize,
            provider=self._bench.provider,
            title=cause.text,
        )

    def _with_float32_trial(self, fault: Fault, places: Sequence[int]) -> Fault:
        return replace(fault, widened=self._try_float32(places))

    def _try_float32(self, places: Sequence[int]) -> Float32Trial:
        """Run the file with the nodes in float32, and check whether the output becomes right."""
        nodes = [self._exact.nodes[p] for p in places]
        if not {self._exact.types.get(name) for n in nodes for name in (*n.input, *n.output)} & HALVES:
            return Float32Trial(None, reason=f"the node already computes in {self._dtype.name}")
        try:
            for wide, chosen in iter_float32_regions(self._exact, places):
                with self._running(emulate_half(wide) if self._result.runtime == STEPWISE else wide):
                    point = self.output_error()
                if point:
                    return Float32Trial(True, self._node_names(chosen), point.error)
        except (GraphError, InputError, RuntimeUnavailable) as error:
            return Float32Trial(None, reason=str(error))
        return Float32Trial(False)
