"""A file that does not run on the model's inputs: the nodes that stop it, and what the model has in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx

from ...compare.elements import difference
from ...compare.spacing import of_eager
from ...graphs.file_graph import widen
from ...runtimes.exact import Array, Change, Exact, NotEvaluated, types_in
from ..verify.originals import Original
from ..verify.results import OutputResult
from .changes import Cause, always, named
from .insides import insides_of
from .program import Program, program_of
from .runtime import Widened
from .settings import as_the_model, integers_of_the_model
from .tracer import Fault

_MOST = 5  # nodes that stop a file
_MOST_BEFORE = 20  # nodes in front of one that stops it, which may have made the wrong shape
_SHAPED = ("Reshape", "Expand")


@dataclass(frozen=True, kw_only=True)
class _Stop:
    """``place`` can't be computed: ``message`` says why; ``known`` is what was computed before."""

    place: int
    message: str
    known: Mapping[str, Array]


def stopped(
    model: Original, proto: onnx.ModelProto, result: OutputResult, case: str, feeds: Mapping[str, Array]
) -> list[Fault]:
    """Name the nodes that ONNX's definition can't compute; none if it can compute all."""
    exact, program = Exact(proto, types_in(proto)), program_of(model)
    known: Mapping[str, Array] = {name: widen(value) for name, value in feeds.items()}
    change, found = Change(), list[tuple[_Stop, Cause]]()
    while (at := _run(exact, known, change)) is not None and len(found) < _MOST:
        cause, change = _mended(exact, program, at, change)
        found.append((at, cause))
        if cause.kind == "unknown":
            break
    right = bool(found) and at is None and _is_right(exact, program, model, result.output, feeds, change)
    return [_fault(exact, result, case, stop, cause, mended=right and stop is found[-1][0]) for stop, cause in found]


def _run(exact: Exact, known: Mapping[str, Array], change: Change) -> _Stop | None:
    """Compute the file up to the first node that can't be computed; None where all can."""
    for place in range(len(exact.nodes)):
        try:
            known = exact.run([place], known, change)
        except NotEvaluated as error:
            return _Stop(place=place, message=str(error), known=known)
    return None


def _mended(exact: Exact, program: Program, stop: _Stop, change: Change) -> tuple[Cause, Change]:
    """Find a change of the node, or of a shape in front of it, with which it can be computed."""
    before = [p for p in exact.before(exact.nodes[stop.place].output) if exact.nodes[p].op_type in _SHAPED]
    for place in dict.fromkeys([stop.place, *before[: -_MOST_BEFORE - 1 : -1]]):
        for cause, trial in _trials(exact, program, place):
            both = Change(nodes={**change.nodes, **trial.nodes}, inputs={**change.inputs, **trial.inputs})
            after = _run(exact, {n: v for n, v in stop.known.items() if n not in exact.makers}, both)
            if after is None or after.place > stop.place:
                return cause, both
    return Cause("unknown", f"it does not run on these inputs: {stop.message}", stop.place), change


def _trials(exact: Exact, program: Program, place: int) -> Iterator[tuple[Cause, Change]]:
    """Yield what the reference's node of the same result has, then shapes with a dim that the input tells."""
    same = [name for name in exact.nodes[place].output if name in program.order]
    for operators in (same, program.order):
        yield from integers_of_the_model(exact, place, program, operators)
        yield from as_the_model(exact, place, program, operators)
    node = exact.nodes[place]
    if node.op_type not in _SHAPED or node.input[1] not in exact.constants:
        return
    shape = np.atleast_1d(exact.value(node.input[1], {}))
    for i in range(len(shape)):
        other = shape.copy()
        # An Expand keeps a dim at 1. A Reshape has one dim of -1, and copies a dim at 0.
        other[i] = 1 if node.op_type == "Expand" else 0 if -1 in shape else -1
        if not np.array_equal(other, shape):
            text = f"{named(exact, place)} has {node.input[1]!r} {shape.tolist()}, with {other.tolist()} it is right"
            yield Cause("attribute", text, place), Change(inputs={(place, 1): always(other)})


def _is_right(
    exact: Exact, program: Program, model: Original, output: str, feeds: Mapping[str, Array], change: Change
) -> bool:
    """Whether the output is the model's with a change."""
    end = program.end(output)
    insides = insides_of(model, feeds, "")
    reference, eager = insides.references([end])[end], insides.eager([end])[end]
    known = {name: widen(value) for name, value in feeds.items()}
    got = exact.run(exact.before([output]), known, change)[output]
    if got.shape != reference.shape:
        return False
    found = difference(got, reference)
    if reference.dtype.kind != "f":
        return not found.error
    return not found.reason and found.error <= of_eager(eager, reference, np.dtype(np.float32))


def _fault(exact: Exact, result: OutputResult, case: str, stop: _Stop, cause: Cause, *, mended: bool) -> Fault:
    place = stop.place if cause.place is None else cause.place
    node = exact.nodes[place]
    fault = Fault(
        runtime=result.runtime,
        case=case,
        module="",
        tensor=exact.nodes[stop.place].output[0],
        nodes=(f"{node.op_type} {node.name}".strip(),),
        operator="",
        wrong="file",
        error=0.0,
        allowed=0.0,
        scale=0.0,
        reason=f"not computed: {stop.message}",
        kind=cause.kind,
        cause=cause.text,
        widened=Widened(None, reason="the file does not run"),
        output=result.output,
        output_error=result.max_abs_error,
        output_allowed=result.allowed,
        output_reason="the file does not run",
    )
    return replace(fault, mended=True, mended_error=0.0) if mended else fault
