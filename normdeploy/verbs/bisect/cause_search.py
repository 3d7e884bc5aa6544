"""Find the cause of a fault: the kind of mistake in the file.

A spot is the group of nodes at a fault; its end is the tensor that these nodes compute wrongly. For each kind of
mistake, a change of the nodes is tried in float64. The likely cause is the kind whose change gives the end its right
value.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from itertools import islice

import numpy as np

from ...compare.element_errors import difference_from_float64
from ...runtimes.float64_evaluator import Float64Evaluator, NodeChange, NotEvaluated, tensor_values
from ...types import Array, Arrays
from .counterpart_search import FaultSpot
from .difference_analysis import explain_difference
from .function_trials import find_other_function
from .node_trials import iter_trials, try_hidden_rows
from .number_trials import solve_numbers
from .reference_program import ReferenceProgram
from .trial_changes import Cause, TrialSpot
from .weight_trials import try_parameters

# Kinds of causes that explain nearly every error. A cause of another kind is preferred to them. For example, a gamma
# that is off by the root of n / (n - 1) is explained by "ddof", but also by "weights".
_LAST = ("weights", "added", "input")
# Kinds of causes that explain even more errors. They are the last choice. For example, a sum may give the same result
# as a product if a softmax or a norm follows.
_LAST_OF_ALL = ("operator",)
# Constant part of a node's cost, in elements: the call of a node takes as long as this many elements.
_NODE = 10_000
_PRODUCTS = ("Conv", "ConvTranspose", "MatMul", "Gemm")
# Number of terms in a sum of products that take as long as one element of an elementwise op.
_TERMS = 20
# Budget of the trials at one spot, in elements: a few seconds.
_MOST = 300_000_000


def find_cause(
    exact: Float64Evaluator, known: Arrays, spot: FaultSpot, program: ReferenceProgram, held: Arrays, reference: Arrays
) -> Cause:
    """Find the likely cause of a fault.

    Args:
        known: right values of all tensors that the spot reads, float64.
        held: results of the model's operators that are also tensors of the file.
        reference: results of all operators of the model around the spot.

    Returns:
        The cause. Its kind is "unknown" if no change explains the fault.
    """
    every = exact.evaluate_nodes(spot.places, known)
    around = TrialSpot(exact, tensor_values(every), spot, program)
    afresh = SpotRecomputer(exact, every, spot)
    right = list[tuple[float, Cause]]()
    for trial in iter_trials(around, held):
        error = afresh.largest_error(trial.change)
        if error <= spot.allowed:
            right.append((error, trial.cause))
        if afresh.is_spent:
            break
    # Numbers are not tried in nodes that the model does not have. Otherwise an added division by 1.01 would be reported
    # as a wrong number that should be 1.
    if spot.node:
        operator = program.operator_kind(spot.node)
    else:
        operator = ""
    if not spot.left_out and all(_is_model_operator(exact, cause, operator) for _, cause in right):
        right += islice(solve_numbers(around, afresh.error_tensor), 1)
    if not right and (function := find_other_function(around)) is not None:
        return function
    if right:
        return min(right, key=lambda pair: _rank(*pair))[1]
    if (behind := _explain_behind_hidden_rows(around, afresh)) is not None:
        return behind
    if spot.left_out:
        return _cause_of_omission(around)
    if (inside := _find_omitted_inside(around, reference, afresh)) is not None:
        return inside
    return explain_difference(around, reference)


def _rank(error: float, cause: Cause) -> tuple[bool, bool, bool, float]:
    return cause.kind in _LAST_OF_ALL, bool(cause.held), cause.kind in _LAST, error


def _is_model_operator(exact: Float64Evaluator, cause: Cause, operator: str) -> bool:
    """Check that the cause is an added node of the same kind as the model's operator."""
    if cause.kind != "added" or cause.place is None:
        return False
    return exact.nodes[cause.place].op_type.lower() in operator


def _explain_behind_hidden_rows(around: TrialSpot, afresh: SpotRecomputer) -> Cause | None:
    """Find a weight that explains the error, without the error in attention rows that a mask hides completely."""
    for at in around.nodes:
        for hidden in try_hidden_rows(at):
            for reader in around.nodes:
                for weight in try_parameters(reader, around.parameters):
                    inputs = {**hidden.change.inputs, **weight.change.inputs}
                    if afresh.largest_error(replace(weight.change, inputs=inputs)) <= around.spot.allowed:
                        text = f"{weight.cause.text}; the rows that the mask hides completely at {at} are also wrong"
                        return Cause("weights", text, reader.place)
    return None


def _find_omitted_inside(around: TrialSpot, reference: Arrays, afresh: SpotRecomputer) -> Cause | None:
    """Find an operator that the file leaves out inside the spot: a node reads another right tensor in place of the
    operator's result.
    """
    spot = around.spot
    program = around.program
    made = {name for at in around.nodes for name in at.node.output}
    for at, operator in itertools.product(around.nodes, spot.operators):
        right = reference.get(operator)
        if right is None or operator == spot.last:
            continue
        for i, name in enumerate(at.node.input):
            read = at.input_value(i)
            if read is None or read.size != right.size or name in made or name in around.exact.constants:
                continue
            source = program.describe_operator(operator, program.module_of(operator))
            text = f"{source} is missing: {at} reads {name!r} directly"
            trial = at.with_inputs("left out", text, {i: right.reshape(read.shape)})
            if afresh.largest_error(trial.change) <= spot.allowed:
                return trial.cause
    return None


class SpotRecomputer:
    """Recompute only the nodes of a spot that a change affects, as long as the budget lasts.

    Args:
        values: all tensors that the spot reads and computes, with the file's values.
    """

    def __init__(self, exact: Float64Evaluator, values: Arrays, spot: FaultSpot) -> None:
        self._exact = exact
        self._values = values
        self._spot = spot
        self._tensors = tensor_values(values)
        self._left: float = _MOST
        self._reads = {p: exact.read_names(exact.nodes[p]) for p in spot.places}

    @property
    def is_spent(self) -> bool:
        """Return whether the budget of elements is used up."""
        return self._left < 0

    def largest_error(self, change: NodeChange) -> float:
        """Compute the largest error of the spot's end with ``change``.

        Returns:
            The absolute error; inf if the end can't be computed, has another shape, or is NaN or Inf where the right
            value is not.
        """
        got = self._evaluate_end(change)
        if got is None:
            return math.inf
        found = difference_from_float64(got, self._spot.expected)
        if found.reason:
            return math.inf
        return found.error

    def error_tensor(self, change: NodeChange) -> Array | None:
        """Compute the error of the spot's end with ``change``.

        Returns:
            Elementwise difference from the expected value; None if it is not finite, has another shape or can't be
            computed.
        """
        got = self._evaluate_end(change)
        if got is None or got.dtype.kind != "f":
            return None
        with np.errstate(all="ignore"):
            off = np.where(got == self._spot.expected, 0.0, got - self._spot.expected)
        if np.isfinite(off).all():
            return off
        return None

    def _evaluate_end(self, change: NodeChange) -> Array | None:
        """Compute the spot's end with ``change``.

        Returns:
            The end in the expected shape; None if it can't be computed or has another size.
        """
        places = self._affected_places(change)
        anew = {name for p in places for name in self._exact.nodes[p].output}
        self._left -= sum(map(self._node_cost, places))
        if self.is_spent or self._spot.end not in anew | change.given.keys():
            return None
        known = {name: value for name, value in self._values.items() if name not in anew}
        try:
            got = self._exact.evaluate_nodes(places, known, change).get(self._spot.end)
        except NotEvaluated:
            return None
        # The node that replaces the original node may write fewer tensors.
        if got is None:
            return None
        expected = self._spot.expected
        if got.size == expected.size:
            return got.reshape(expected.shape)
        return None

    def _node_cost(self, place: int) -> float:
        """Return the cost of a node, in elements of an elementwise op."""
        node = self._exact.nodes[place]
        made = sum(self._tensors[name].size for name in node.output if name in self._tensors)
        if len(node.input) > 1 and node.op_type in _PRODUCTS:
            weight = self._exact.weights.get(node.input[1])
        else:
            weight = None
        if weight is None:
            terms = 0
        else:
            terms = math.prod(weight.dims[1:] if node.op_type == "Conv" else weight.dims[:1])
        return _NODE + made * (1 + terms / _TERMS)

    def _affected_places(self, change: NodeChange) -> list[int]:
        """Return the places whose results ``change`` may affect."""
        first = {*change.nodes, *(place for place, _ in change.inputs)}
        touched = set(change.given)
        places = list[int]()
        for p in self._spot.places:
            made = set(self._exact.nodes[p].output)
            if made <= change.given.keys():
                continue
            if p in first or touched.intersection(self._reads[p]):
                places.append(p)
                touched |= made
        return places


def _cause_of_omission(around: TrialSpot) -> Cause:
    exact = around.exact
    spot = around.spot
    program = around.program
    name = spot.left_out
    readers = range(len(exact.nodes)) if name == spot.end else spot.places
    at = around.node_at(next(p for p in readers if name in exact.read_names(exact.nodes[p])))
    first = program.operator_kind(spot.node)
    last = program.describe_operator(spot.last or spot.node, program.module_of(spot.node))
    if program.operator_kind(spot.last or spot.node) == first:
        operators = f"{last} is"
    else:
        operators = f"{first} to {last} are"
    return Cause("left out", f"{operators} missing: {at} reads {name!r} directly", at.place)
