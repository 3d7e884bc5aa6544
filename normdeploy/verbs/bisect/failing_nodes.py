"""Find the nodes that can't be computed on the model's inputs, and the model's settings that would mend these nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx

from ...compare.element_errors import difference_from_float64
from ...compare.ulp_spacing import allowed_beside_eager
from ...graphs.file_graph import widen_to_float64
from ...runtimes.float64_evaluator import Float64Evaluator, NodeChange, NotEvaluated, inferred_dtypes
from ...types import Arrays
from ..verify.reference_models import Original
from .attribute_trials import try_model_attributes, try_model_integers
from .counterpart_search import FaultSpot
from .fault_tracing import Fault, FaultyOutput
from .reference_program import ReferenceProgram, open_program
from .reference_tensors import open_inner_tensors
from .runtime_faults import Float32Trial
from .trial_changes import Cause, Trial, TrialSpot

# Maximum number of failing nodes that are reported.
_MOST = 5
# Maximum number of nodes before a failing node that are changed, because they may have computed a wrong shape.
_MOST_BEFORE = 20
_SHAPED = ("Reshape", "Expand")


@dataclass(frozen=True, kw_only=True)
class _FailingNode:
    """Node that can't be computed.

    Attributes:
        message: reason why the node can't be computed.
        known: tensors that were computed before the node.
    """

    place: int
    message: str
    known: Arrays


def find_failing_nodes(model: Original, proto: onnx.ModelProto, subject: FaultyOutput) -> list[Fault]:
    """Find the nodes that can't be computed by ONNX's definition.

    Returns:
        A fault for each such node; no fault if all nodes can be computed.
    """
    exact = Float64Evaluator(proto, inferred_dtypes(proto))
    program = open_program(model)
    known: Arrays = {name: widen_to_float64(value) for name, value in subject.feeds.items()}
    change = NodeChange()
    found = list[tuple[_FailingNode, Cause]]()
    while (at := _run_until_failure(exact, known, change)) is not None and len(found) < _MOST:
        cause, change = _find_mending_change(exact, program, at, change)
        found.append((at, cause))
        if cause.kind == "unknown":
            break
    faults = [_make_fault(exact, subject, stop, cause) for stop, cause in found]
    if faults and at is None and _is_right(exact, program, model, subject, change):
        faults[-1] = replace(faults[-1], mended=True, mended_error=0.0)
    return faults


def _run_until_failure(exact: Float64Evaluator, known: Arrays, change: NodeChange) -> _FailingNode | None:
    """Compute the file up to the first node that can't be computed. Return None if all nodes can be computed."""
    for place in range(len(exact.nodes)):
        try:
            known = exact.evaluate_nodes([place], known, change)
        except NotEvaluated as error:
            return _FailingNode(place=place, message=str(error), known=known)
    return None


def _find_mending_change(
    exact: Float64Evaluator, program: ReferenceProgram, stop: _FailingNode, change: NodeChange
) -> tuple[Cause, NodeChange]:
    """Find a change of the node, or of a shape before it, with which the node can be computed."""
    before = [p for p in exact.nodes_between(exact.nodes[stop.place].output) if exact.nodes[p].op_type in _SHAPED]
    inputs = {name: value for name, value in stop.known.items() if name not in exact.makers}
    for place in dict.fromkeys([stop.place, *before[: -_MOST_BEFORE - 1 : -1]]):
        for trial in _iter_trials(exact, program, place):
            nodes = {**change.nodes, **trial.change.nodes}
            both = NodeChange(nodes=nodes, inputs={**change.inputs, **trial.change.inputs})
            after = _run_until_failure(exact, inputs, both)
            if after is None or after.place > stop.place:
                return trial.cause, both
    return Cause("unknown", f"it does not run on these inputs: {stop.message}", stop.place), change


def _iter_trials(exact: Float64Evaluator, program: ReferenceProgram, place: int) -> Iterator[Trial]:
    """Yield settings of the reference's nodes, then other shapes for a node that reads a shape. Nodes of the reference
    whose result has the same name come first. In each shape, one dim is taken from the input.
    """
    same = [name for name in exact.nodes[place].output if name in program.order]
    # The spot has a dummy end and expected value, because the trials here need neither.
    spot = FaultSpot((place,), "", np.zeros(0), 0.0)
    for operators in (same, program.order):
        around = TrialSpot(exact, {}, replace(spot, operators=tuple(operators)), program)
        yield from try_model_integers(around.node_at(place))
        yield from try_model_attributes(around.node_at(place))
    at = TrialSpot(exact, {}, spot, program).node_at(place)
    stated = at.fixed_input(1, "iu")
    if at.op not in _SHAPED or stated is None:
        return
    shape = np.atleast_1d(stated)
    # Values in a shape that take a dim from the input: 1 for Expand; for Reshape -1, or 0 if -1 is already used.
    if at.op == "Expand":
        told_by_input = 1
    else:
        if -1 in shape:
            told_by_input = 0
        else:
            told_by_input = -1
    for i in range(len(shape)):
        other = shape.copy()
        other[i] = told_by_input
        if not np.array_equal(other, shape):
            text = at.describe_other(repr(at.name_of_input(1)), shape.tolist(), other.tolist())
            yield at.with_inputs("attribute", text, {1: other})


def _is_right(
    exact: Float64Evaluator, program: ReferenceProgram, model: Original, subject: FaultyOutput, change: NodeChange
) -> bool:
    """Check that the output equals the model's output if ``change`` is made."""
    output = subject.result.output
    end = program.output_operator(output)
    insides = open_inner_tensors(model, subject.feeds, "")
    reference = insides.reference_values([end])[end]
    eager = insides.eager_values([end])[end]
    known = {name: widen_to_float64(value) for name, value in subject.feeds.items()}
    got = exact.evaluate_nodes(exact.nodes_between([output]), known, change)[output]
    if got.shape != reference.shape:
        return False
    found = difference_from_float64(got, reference)
    if reference.dtype.kind != "f":
        return not found.error
    return not found.reason and found.error <= allowed_beside_eager(eager, reference, np.dtype(np.float32))


def _make_fault(exact: Float64Evaluator, subject: FaultyOutput, stop: _FailingNode, cause: Cause) -> Fault:
    node = exact.nodes[stop.place if cause.place is None else cause.place]
    result = subject.result
    return Fault(
        runtime=result.runtime,
        case=subject.case,
        tensor=exact.nodes[stop.place].output[0],
        nodes=(f"{node.op_type} {node.name}".strip(),),
        reason=f"not computed: {stop.message}",
        kind=cause.kind,
        cause=cause.text,
        widened=Float32Trial(None, reason="the file does not run"),
        output=result.output,
        output_error=result.max_abs_error,
        output_allowed=result.allowed,
        output_reason="the file does not run",
    )
