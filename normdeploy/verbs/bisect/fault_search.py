"""Search for the faults that make one output wrong, in one runtime on one input.

``normdeploy.verbs.bisect.file_bisection`` describes the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import onnx

from ...errors import GraphError, InputError, RuntimeUnavailable
from ...graphs.file_graph import widen_to_float64
from ...runtimes.float64_evaluator import NotEvaluated, tensor_values
from ...runtimes.openvino_runner import PRECISIONS, describe_wide_integers
from ...types import Array
from ..verify.model_tensors import model_tensors_by_name
from .cause_search import SpotRecomputer
from .counterpart_search import FaultSpot
from .exchanged_modules import iter_exchanges
from .fault_tracing import TOP_LEVEL, Fault, FaultTrace, FaultTracer
from .intervention_runner import FirstWrongSearch, is_output_changed, is_worse
from .stale_weights import replace_weights
from .training_mode import BATCH, with_eval_mode
from .trial_changes import Cause
from .wiring_trials import iter_same_source_siblings, try_exchanged_tensors

# Maximum number of faults that are searched.
MOST = 5
# Maximum number of exchanges of two modules that are tried. Each exchange takes a run of the file.
_MOST_EXCHANGES = 16


class FaultSearch(FaultTracer):
    """Find the faults of one output, one after another.

    Each fault is mended before the next one is searched: the wrong tensor is set to its right value.
    """

    def faults(self) -> list[Fault]:
        """Find the faults that make the output wrong.

        Returns:
            At least one fault if the output is wrong.
        """
        whole = self.output_error()
        if whole:
            return []
        self.at_output = whole
        everywhere = self._find_global_fault()
        if everywhere is not None:
            return [everywhere]
        named = self._find_successive_faults()
        if len(named) == 1 and named[0].mended and named[0].kind != "unknown":
            return named
        if self._doubted and not (named and named[-1].mended):
            self.at_output = whole
            named = self._find_joint_faults() or named
        self._bench.held.clear()
        self.at_output = whole
        together = self._find_exchanged_tensors()
        if together is not None:
            self.notes.clear()
            return [together]
        if all(fault.kind == "unknown" and not fault.mended for fault in named):
            self.notes.clear()
            return named or [self._stretch_fault("no single change explains it")]
        return named

    def _find_joint_faults(self) -> list[Fault]:
        """Find faults that must be mended together, because mending only one of them makes the output worse.

        An example is a fault in the queries of an attention together with a fault in its keys.

        Returns:
            The faults; empty if the output is still wrong with all of them mended.
        """
        notes = list(self.notes)
        self.notes.clear()
        self._bench.held.clear()
        self._first = FirstWrongSearch(self._bench, self._pairs, self._exact, self._progress)
        named = self._find_successive_faults(keeps_worse=True)
        if named and named[-1].mended:
            return named
        self.notes[:] = notes
        return []

    def _find_successive_faults(self, *, keeps_worse: bool = False) -> list[Fault]:
        """Find the first fault and mend it, then find the next fault, until the output is right.

        Args:
            keeps_worse: mend a fault with a known cause even if that makes the output worse.
        """
        named = list[Fault]()
        for _ in range(MOST):
            if self.at_output:
                break
            try:
                trace = self.trace_fault()
            except NotEvaluated as refusal:
                named.append(self._stretch_fault(str(refusal)))
                break
            fault = trace.fault
            mends = self._mending_values(trace)
            if mends is None:
                if fault.tensor == self._output and trace.right is not None:
                    fault = replace(fault, mended=True, mended_error=0.0)
                else:
                    fault = replace(fault, mended=bool(fault.widened.mends), mended_error=fault.widened.error)
                self._add_fault(named, fault, trace)
                break
            before = self._value
            held = dict(self._bench.held)
            self._bench.held |= mends
            after = self.output_error()
            is_kept = keeps_worse and fault.kind != "unknown"
            is_inner = trace.wrong in self._first.pairs and trace.wrong != self._output
            if is_worse(after, self.at_output) and is_inner and not is_kept:
                self._bench.held = held
                self._doubted.append(trace)
                # The tensor was compared with a wrong tensor of the model, so this pair is dropped.
                self._first.drop(trace.wrong)
                continue
            self._first.clear_points()
            if self._has_integer_output or is_output_changed(before, self._value, self.at_output.allowed):
                error = None if after.reason else after.error
                self._add_fault(named, replace(fault, mended=bool(after), mended_error=error), trace)
            else:
                self.notes.append(
                    f"{fault.tensor!r} of {fault.module or TOP_LEVEL} is also wrong ({fault.cause}),"
                    " but does not change the output"
                )
            self.at_output = after
        if named and not named[-1].mended:
            self.notes.append(f"{self._output!r} stays wrong with all found faults fixed: there are more faults")
        return named

    def _add_fault(self, named: list[Fault], fault: Fault, trace: FaultTrace) -> None:
        """Add a fault, or update it if the same fault was already found at another tensor.

        A fault is found several times at a node with several results or several readers.
        """
        self.reproduction = self.reproduction or trace.reproduction
        for i, other in enumerate(named):
            if (other.nodes, other.kind, other.cause) == (fault.nodes, fault.kind, fault.cause):
                named[i] = replace(other, mended=fault.mended, mended_error=fault.mended_error)
                return
        named.append(fault)

    def _mending_values(self, trace: FaultTrace) -> dict[str, Array] | None:
        """Choose the tensors and values that mend a fault.

        Returns:
            Tensor -> value. None if the right value is unknown or overflows the tensor's type or the integers of
            OpenVINO, or if the tensor is the output.
        """
        if trace.held:
            return {name: self._units.round_to_file_type(name, value) for name, value in trace.held.items()}
        tensor = trace.fault.tensor
        right = trace.right
        if right is None or tensor == self._output:
            return None
        stored = self._units.round_to_file_type(tensor, right)
        if self._bench.provider in PRECISIONS and describe_wide_integers(stored):
            return None
        if np.isfinite(stored.astype(np.float64))[np.isfinite(right)].all():
            return {tensor: stored}
        return None

    def _find_exchanged_tensors(self) -> Fault | None:
        """Find two exchanged tensors that are computed from the same tensor, such as the queries and keys of an
        attention.

        The search for single faults does not find them, because the output stays wrong if only one of the two is
        mended.
        """
        target = self._program.output_operator(self._output)
        places = self._exact.nodes_between([self._output])
        known = {name: widen_to_float64(value) for name, value in self._bench.input_values().items()}
        try:
            values = self._exact.evaluate_nodes(places, known)
            expected = self._bench.reference_values([target])[target]
        except (NotEvaluated, GraphError, InputError, RuntimeUnavailable):
            return None
        if expected.size != values[self._output].size:
            return None
        expected = expected.reshape(values[self._output].shape)
        spot = FaultSpot(tuple(places), self._output, expected, self.at_output.allowed)
        afresh = SpotRecomputer(self._exact, values, spot)
        tensors = tensor_values(values)
        for trial in try_exchanged_tensors(self._exact, iter_same_source_siblings(self._exact, tensors), tensors):
            error = afresh.largest_error(trial.change)
            if error <= spot.allowed:
                names = trial.cause.held.keys() & self._exact.makers.keys()
                made = sorted({self._exact.makers[name] for name in names})
                return self._make_whole_fault(made, trial.cause, error, module=None)
        return None

    def _stretch_fault(self, why: str) -> Fault:
        """Return a fault that covers all nodes between the last right tensors and the first wrong tensor."""
        first = FirstWrongSearch(self._bench, self._pairs, self._exact, self._progress)
        tensor = first.find(self._output)
        starts = [name for name in first.compared_predecessors(tensor) if name != tensor]
        places = self._exact.nodes_between([tensor], set(starts))
        before = ", ".join(map(repr, starts)) or "the inputs"
        cause = Cause("unknown", f"{why}; it is between {before}, correct, and {tensor!r}, wrong")
        if tensor in first.pairs:
            node = first.pairs[tensor].node
        else:
            node = ""
        module = self._module_of_places(places) or self._program.module_of(node)
        return self._make_fault(tensor, places, cause, first.points.get(tensor) or self.at_output, module=module)

    def _find_global_fault(self) -> Fault | None:
        """Find a fault of the whole file: weights of another training state, exchanged modules, or training mode."""
        nodes = self._exact.nodes
        replacement = replace_weights(self._model, self._bench.proto)
        if replacement.cause is not None and (error := self._error_of_file(replacement.proto)) is not None:
            places = [p for p, node in enumerate(nodes) if set(replacement.names) & set(node.input)]
            return self._make_whole_fault(places, replacement.cause, error)
        for exchange in islice(iter_exchanges(self._model, self._program, self._bench.proto), _MOST_EXCHANGES):
            if (error := self._error_of_file(exchange.proto)) is not None:
                places = [next(p for p, n in enumerate(nodes) if name in n.input) for name in exchange.names]
                return self._make_whole_fault(places, exchange.cause, error)
        changed, results = with_eval_mode(self._bench.proto, model_tensors_by_name(self._model))
        if results and (error := self._error_of_file(changed)) is not None:
            places = [self._exact.makers[name] for name in results]
            text = f"{len(places)} BatchNormalizations are in training mode: they use {BATCH}"
            return self._make_whole_fault(places, Cause("training mode", text), error)
        return None

    def _error_of_file(self, changed: onnx.ModelProto) -> float | None:
        """Return the output's error in a changed file; None if the output is still wrong or the file can't be run."""
        try:
            with self._running(changed):
                after = self.output_error()
        except (GraphError, InputError, RuntimeUnavailable):
            return None
        if after:
            return after.error
        return None

    def _make_whole_fault(self, places: Sequence[int], cause: Cause, error: float, module: str | None = "") -> Fault:
        """Return a fault that is visible only at the output. ``error`` is the error of the output after the fault is
        mended.
        """
        fault = self._make_fault(self._output, places, cause, self.at_output, module=module)
        return replace(fault, mended=True, mended_error=error)

    @property
    def compared_tensors(self) -> list[str]:
        """Return the tensors that were compared with the model's."""
        return list(self._first.pairs)

    @property
    def _has_integer_output(self) -> bool:
        """Return whether the output has integers, which may not change when a fault is mended."""
        return self._value is not None and self._value.dtype.kind in "iub"
