"""Find the nodes of a file that compute something else than the PyTorch model, by comparing values.

The search covers a stretch: the nodes between tensors that are right and a wrong tensor, the end. The stretch and the
corresponding operators of the model are evaluated in float64 from the same right tensors.

A tensor of the file and a tensor of the model are counterparts if they have the same elements in the same memory order.
A tensor without a counterpart is not always wrong, because fused and decomposed forms have different inner tensors. The
fault begins after the last counterpart on every path to the end.

Trials find where the fault stops: a tensor of the file gets the value of a tensor of the model. If the tensors after it
then have counterparts, the fault ends at this tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...runtimes.float64_evaluator import Float64Evaluator, NotEvaluated, tensor_values
from ...types import Array, Arrays
from ..verify.parameter_orders import squeeze_shape
from .reference_program import ReferenceProgram

# Number of elements of two tensors that are compared first, to reject most pairs quickly.
_SAMPLE = 64
# Maximum number of nodes after the changed tensor that a trial evaluates.
_NEAR = 60
# Maximum number of operators whose values are tried in each tensor.
_OPERATORS = 10
# Maximum number of trials, each with one operator's value in one tensor.
_TRIALS = 60
# If at least this share of the next tensors has counterparts in a trial, the value in the trial is right. Even fused
# forms reach this share.
_PLENTY = 1 / 3


# Inputs that nodes divide by.
_DIVISORS = {"Div": 1, "Reciprocal": 0, "Log": 0}
# Nodes through which a zero comes from the first input. An epsilon is added before them.
_CARRYING = frozenset({"Sqrt", "Pow", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Expand"})


@dataclass(frozen=True)
class FaultSpot:
    """Nodes that compute something else than the model from right values.

    Attributes:
        places: indices of the nodes in the file.
        end: tensor of the file that the nodes compute; its right value is ``expected``.
        allowed: allowed absolute error of ``end``.
        node: first operator of the PyTorch graph without a counterpart; "" if all operators have one.
        last: the operator whose value ``end`` should have.
        operators: operators of the model that the nodes compute.
        left_out: tensor that the nodes read or compute in place of the result of ``node``, because the file leaves this
            operator out; "" if no operator is left out.
    """

    places: tuple[int, ...]
    end: str
    expected: Array
    allowed: float
    node: str = ""
    last: str = ""
    operators: tuple[str, ...] = ()
    left_out: str = ""


def find_counterparts(values: Arrays, reference: Arrays, allowed: Mapping[str, float]) -> dict[str, list[str]]:
    """Find the operators whose results equal tensors of the file.

    Args:
        values: tensors of the file.
        reference: results of the model's operators.
        allowed: operator -> allowed absolute error.

    Returns:
        Tensor of the file -> operators with the same elements; only for tensors that have such an operator.
    """
    by_size: dict[int, list[str]] = {}
    for node, value in reference.items():
        by_size.setdefault(value.size, []).append(node)
    pairs: dict[str, list[str]] = {}
    for name, value in values.items():
        flat = value.reshape(-1)
        few = slice(None, None, max(1, flat.size // _SAMPLE))
        for node in by_size.get(value.size, ()):
            other = reference[node].reshape(-1)
            if (flat.dtype.kind in "f") == (other.dtype.kind in "f") and all(
                _is_within_allowed(flat[s], other[s], allowed[node]) for s in (few, slice(None))
            ):
                pairs.setdefault(name, []).append(node)
    return pairs


def _is_within_allowed(value: Array, other: Array, allowed: float) -> bool:
    with np.errstate(all="ignore"):
        a = value.astype(np.float64)
        b = other.astype(np.float64)
        return bool(np.all((np.abs(a - b) <= allowed) | (a == b) | (np.isnan(a) & np.isnan(b))))


def _reshape_like(value: Array, like: Array) -> Array:
    """Return ``value`` in the shape of ``like``; unchanged if their sizes differ."""
    if value.size == like.size:
        return value.reshape(like.shape)
    return value


@dataclass(kw_only=True, eq=False)
class CounterpartSearch:
    """Search in one stretch of the file and of the PyTorch graph: from right tensors to the wrong tensor ``end``.

    Attributes:
        known: right values of the tensors at the start of the stretch, float64.
        reference: float64 values of the operators of the stretch and of ``starts``.
        allowed: operator -> allowed absolute error.
        starts: operators at the start of the stretch.
        target: the operator whose value ``end`` should have.
        fixed: the model's tensors that depend on no input.
    """

    exact: Float64Evaluator
    program: ReferenceProgram
    known: Arrays
    end: str
    reference: Arrays
    allowed: Mapping[str, float]
    starts: Collection[str]
    target: str
    fixed: Arrays

    def __post_init__(self) -> None:
        self.places = self.exact.nodes_between([self.end], self.known.keys())
        self.values = self.exact.evaluate_nodes(self.places, self.known)
        self.tensors = tensor_values(self.values)
        made = {name for place in self.places for name in self.exact.nodes[place].output} - self.exact.sizes
        inner = {name: value for name, value in self.tensors.items() if name in made}
        self.found = find_counterparts(inner, self.reference, self.allowed)
        self._divides_by_zero = self._drop_zero_divisors()

    def _drop_zero_divisors(self) -> bool:
        """Drop the counterparts of zeros that nodes divide by, and of the roots and sums that make them.

        A lost epsilon changes a root by less than any bound, and a zero has the value of many tensors. But the model
        divides by no zero, because its result is finite.

        Returns:
            True if there is such a zero.
        """
        if not np.isfinite(self.reference[self.target]).all():
            return False
        pending = [name for place in self.places for name in self._zero_divisors(place)]
        if not pending:
            return False
        # The model's sum of a zero and its epsilon is near any zero, but not a counterpart of it.
        found = {name: self._without_nonzero(name, nodes) for name, nodes in self.found.items()}
        self.found = {name: nodes for name, nodes in found.items() if nodes}
        while pending:
            name = pending.pop()
            if name not in self.exact.makers or self.found.pop(name, None) is None:
                continue
            maker = self.exact.nodes[self.exact.makers[name]]
            if maker.op_type in _CARRYING:
                pending.append(maker.input[0])
        return True

    def _without_nonzero(self, name: str, nodes: list[str]) -> list[str]:
        """Return the operators without those that are nowhere 0, if the tensor is 0 everywhere."""
        if self.values[name].any():
            return nodes
        return [node for node in nodes if not self.reference[node].all()]

    def _zero_divisors(self, place: int) -> list[str]:
        """Return the inputs by which a node divides, if there is a zero among them and the result is not finite."""
        node = self.exact.nodes[place]
        result = self.tensors.get(node.output[0])
        if node.op_type not in _DIVISORS or result is None or np.isfinite(result).all():
            return []
        name = node.input[_DIVISORS[node.op_type]]
        return [name] if name in self.found and not self.values[name].all() else []

    @property
    def wanted(self) -> Array:
        """Return the expected value of the end tensor."""
        return _reshape_like(self.reference[self.target], self.values[self.end])

    @property
    def matched_operators(self) -> set[str]:
        """Return the operators whose results are also tensors of the file."""
        return {node for nodes in self.found.values() for node in nodes}.union(self.starts)

    def with_equal_shapes(self) -> CounterpartSearch:
        """Restrict the search to counterparts of the same shape.

        Otherwise, the result of a Concat on a wrong axis can match a tensor that the model computes only after a later
        transposition.

        Returns:
            A copy of the search without counterparts of another shape (dims of 1 don't count).
        """
        other = copy.copy(self)
        other.found = {}
        for name, nodes in self.found.items():
            shape = squeeze_shape(self.values[name].shape)
            if kept := [node for node in nodes if squeeze_shape(self.reference[node].shape) == shape]:
                other.found[name] = kept
        return other

    @property
    def _stretch_operators(self) -> tuple[str, ...]:
        return tuple(n for n in self.reference if n not in self.starts)

    def whole_stretch(self) -> FaultSpot:
        """Build the spot of all nodes from the right tensors to the end.

        Returns:
            The spot; its ``operators`` are all operators of the stretch.
        """
        return replace(self.unmatched_spot(), places=tuple(self.places), node="", operators=self._stretch_operators)

    def find_spot(self) -> FaultSpot | None:
        """Find the nodes of the fault.

        Returns:
            The spot; None if the file computes the model's value of the end.
        """
        if self.target in self.found.get(self.end, ()):
            return None
        suspects = self._suspect_places()
        best = self._nearest_candidate(suspects, self._candidate_pairs(suspects))
        if best is None:
            return self.unmatched_spot()
        return self._spot_at(suspects, *best)

    def unmatched_spot(self) -> FaultSpot:
        """Build the spot of all nodes that lead to the end and have no counterpart.

        Returns:
            The spot, with the expected value of the end.
        """
        return FaultSpot(
            places=tuple(self._suspect_places()),
            end=self.end,
            expected=self.wanted,
            allowed=self.allowed[self.target],
            node=next(iter(self._first_unmatched()), ""),
            last=self.target,
            operators=self._read_operators(tuple(self._unmatched_operators())),
        )

    def _read_operators(self, unmatched: tuple[str, ...]) -> tuple[str, ...]:
        """Return the operators whose numbers a spot may have.

        Zeros pair with each other, so after a division by 0 the operator with the epsilon may seem to have a
        counterpart.
        """
        return self._stretch_operators if self._divides_by_zero else unmatched

    def _suspect_places(self) -> list[int]:
        stops = (self.found.keys() | self.exact.sizes) - {self.end} | self.known.keys()
        return self.exact.nodes_between([self.end], stops)

    def omission_spot(self) -> FaultSpot:
        """Build the spot of a fault where the file leaves operators out, so that ``end`` has the value of an earlier
        tensor of the model.

        Returns:
            The spot at the node that computes ``end``, with ``left_out`` set.
        """
        operators = tuple(self._unmatched_operators()) or (self.target,)
        return replace(
            self.unmatched_spot(),
            places=(self.exact.makers[self.end],),
            node=operators[0],
            operators=operators,
            left_out=self.end,
        )

    def _unmatched_operators(self) -> list[str]:
        """Return the operators from which a path without counterparts leads to the end."""
        operators = self.program.operators_between(self.target, self.matched_operators - {self.target})
        return [n for n in operators if n in self.reference]

    def _first_unmatched(self) -> list[str]:
        """Return the unmatched operators that read no result of another unmatched operator."""
        strange = self._unmatched_operators()
        return [node for node in strange if not set(self.program.inputs_of(node)) & set(strange)]

    def _candidate_pairs(self, suspects: Sequence[int]) -> list[tuple[str, str]]:
        """Pair each tensor of the file with the unmatched operators that may have computed it. The nearest tensors come
        first.
        """
        if not suspects:
            return []
        near = [self.exact.nodes[place] for place in suspects[:_NEAR]]
        names = [n for n in self.exact.read_names(near[0]) if n in self.tensors and n not in self.exact.sizes]
        names += [o for node in near for o in node.output if o in self.tensors and o != self.end]
        names += [n for node in near for n in self.exact.read_names(node) if n in self.found]
        strange = self._unmatched_operators()
        operators = dict.fromkeys([*(self._first_unmatched() or strange[:1]), *strange[:_OPERATORS]])
        pairs = list[tuple[str, str]]()
        for name in dict.fromkeys(names):
            value = self.values[name]
            for node in operators:
                other = self.reference[node]
                # Tensors of other types, such as results of comparisons, are not paired.
                if value.dtype.kind == other.dtype.kind == "f" and value.size == other.size:
                    pairs.append((name, node))
        return pairs[:_TRIALS]

    def _nearest_candidate(
        self, suspects: Sequence[int], candidates: Sequence[tuple[str, str]]
    ) -> tuple[str, str] | None:
        """Return the first candidate that restores about as many counterparts as the best one.

        The nearest candidate is preferred, because a tensor after the end of the fault restores counterparts too.
        """
        gains: list[float] = []
        for candidate in candidates:
            gains.append(self._counterpart_gain(suspects, *candidate))
            if gains[-1] >= _PLENTY:
                return candidate
        most = max(gains, default=0.0)
        return next((c for c, gain in zip(candidates, gains, strict=True) if gain and gain >= most / 2), None)

    def _counterpart_gain(self, suspects: Sequence[int], name: str, node: str) -> float:
        """Set tensor ``name`` to the value of operator ``node``, and return the share of the next tensors that then
        have a counterpart after ``node``.

        Copies of the value do not count as counterparts.
        """
        maker = self.exact.makers.get(name, -1)
        own = set(self.exact.nodes_between([name]))
        near = [p for p in suspects if p > maker and p not in own][:_NEAR]
        outputs = {o for place in near for o in self.exact.nodes[place].output}
        known = {k: v for k, v in self.values.items() if k not in outputs}
        known[name] = _reshape_like(self.reference[node], self.values[name])
        try:
            values = self.exact.evaluate_nodes(near, known)
        except NotEvaluated:
            return 0.0
        after = {o: v for o, v in tensor_values(values).items() if o in outputs and o not in self.exact.sizes}
        again = find_counterparts(after, self.reference, self.allowed)
        copies = set(find_counterparts({name: known[name]}, self.reference, self.allowed).get(name, ()))
        order = self.program.order
        behind = (any(n not in copies and order[n] > order[node] for n in nodes) for nodes in again.values())
        return sum(behind) / max(len(after), 1)

    def _spot_at(self, suspects: Sequence[int], name: str, node: str) -> FaultSpot:
        strange = self._unmatched_operators()
        operators = tuple(n for n in self.program.operators_between(node, self.matched_operators) if n in strange)
        made = self.exact.nodes_between([name], self.found.keys() | self.known.keys())
        spot = FaultSpot(
            places=tuple(p for p in made if p in set(suspects)),
            end=name,
            expected=_reshape_like(self.reference[node], self.values[name]),
            allowed=self.allowed[node],
            node=operators[0] if operators else node,
            last=node,
            operators=self._read_operators(operators),
        )
        if spot.places:
            return spot
        reader = next(p for p in suspects if name in self.exact.read_names(self.exact.nodes[p]))
        outputs = self.exact.nodes[reader].output
        known = {k: v for k, v in self.values.items() if k not in outputs} | {name: spot.expected}
        end = outputs[0]
        expected = self.exact.evaluate_nodes([reader], known)[end]
        same = find_counterparts({end: expected}, self.reference, self.allowed).get(end, [node])
        return replace(spot, places=(reader,), end=end, expected=expected, allowed=self.allowed[same[0]], left_out=name)
