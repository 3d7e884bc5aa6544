"""The search for what makes one output wrong, in one runtime on one input (the steps:
``normdeploy.verbs.bisect.bisect``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import onnx

from ...errors import GraphError, InputError, RuntimeUnavailable
from ...graphs.file_graph import widen
from ...runtimes.exact import Array, NotEvaluated, tensors_of
from ..verify.drift import Point
from ..verify.stored import stored_in
from .cause import Afresh
from .changes import Cause
from .lab import FirstWrong, output_changed, worse
from .match import Spot
from .modules import exchanges
from .stale import replaced
from .tracer import Fault, Trace, Tracer
from .training import BATCH, in_eval
from .wiring import exchanged_tensors, of_one_source

MOST = 5  # faults that are looked for
_MOST_EXCHANGES = 16  # of modules, each of which is one run


class Hunt(Tracer):
    """Traces the faults of one output one after the other, each mended before the next is looked for."""

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
                trace = self.trace(point)
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

    def _mending(self, trace: Trace) -> dict[str, Array] | None:
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
                fault = self._told(self._module(made), self._output, made, "file", at_output, cause, at_output)
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
        path = self._module(places) or self._program.module(node)
        return self._told(path, tensor, places, "file", point, cause, at_output)

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
        fault = self._told("", self._output, places, "file", at_output, cause, at_output)
        return replace(fault, mended=True, mended_error=mended_error)

    def _kept(self, trace: Trace, fault: Fault) -> Fault:
        self.reproduction = self.reproduction or trace.reproduction
        return fault

    @property
    def looked_at(self) -> list[str]:
        """The tensors that were compared with the model's."""
        return list(self._first.pairs)

    @property
    def _names_classes(self) -> bool:
        """Whether the output holds integers: one that stays what it was does not tell how far a fault reaches."""
        return self._value is not None and self._value.dtype.kind in "iub"


def _add(named: list[Fault], fault: Fault) -> None:
    """Add a fault; what was found before is one with it: a node of several results, or one that several nodes read."""
    for i, other in enumerate(named):
        if (other.nodes, other.kind, other.cause) == (fault.nodes, fault.kind, fault.cause):
            named[i] = replace(other, mended=fault.mended, mended_error=fault.mended_error)
            return
    named.append(fault)
