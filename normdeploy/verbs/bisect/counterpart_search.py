"""Find the place inside a stretch of nodes after which a file computes something else than the PyTorch model, by
values.

Both are evaluated in float64 from the same right tensors. If a tensor of the file holds the same elements in the same
memory order as a tensor of the model, the two are counterparts. Fused and decomposed forms leave other tensors without
a counterpart, which proves nothing. The fault begins where every path to the end stops meeting counterparts. Its extent
is found by trials: put the model's value into a tensor of the file, and check whether the tensors after it find their
counterparts again.
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

# Number of elements that are compared first.
_SAMPLE = 64
# Maximum number of nodes that are evaluated to see whether a trial helps.
_NEAR = 60
# Maximum number of operators whose value the fault's end may have, and of trials.
_OPERATORS = 10
_TRIALS = 60
# When a fault is mended, at least this share of the nodes behind it finds a counterpart, in any fused form.
_PLENTY = 1 / 3


# Inputs that nodes divide by.
_DIVISORS = {"Div": 1, "Reciprocal": 0, "Log": 0}
# Nodes through which a zero comes from the first input. An epsilon is added before them.
_CARRYING = frozenset({"Sqrt", "Pow", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Expand"})


@dataclass(frozen=True)
class FaultSpot:
    """Nodes at ``places`` that compute something else from right values than the model.

    Attributes:
        places: indices of the nodes in the file.
        end: the tensor of the file that should be ``expected``.
        allowed: largest absolute error of ``end``.
        node: first operator of the PyTorch graph without a counterpart, "" if all have one.
        last: the operator whose value ``end`` should have.
        operators: operators of the model that the nodes compute.
        left_out: a tensor that ``places`` read or make and that should be the result of ``node``, which the file leaves
            out; "" if nothing is left out.
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
        allowed: operator -> largest absolute error.

    Returns:
        Tensor of the file -> operators with the same elements; tensors without one are left out.
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
    """Search in one stretch of the file and of the PyTorch graph, from right tensors to ``end``, which is wrong.

    Attributes:
        known: right values of the tensors that the file's nodes start from, float64.
        reference: float64 values of the operators of the stretch and of ``starts``.
        allowed: operator -> largest absolute error.
        starts: operators that the stretch begins with.
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

        A Concat on a wrong axis may give the numbers that the model has only after a later transposition.

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
            The spot; None if the file computes the model's value.
        """
        if self.target in self.found.get(self.end, ()):
            return None
        suspects = self._suspect_places()
        best = self._nearest_candidate(suspects, self._candidate_pairs(suspects))
        if best is None:
            return self.unmatched_spot()
        return self._spot_at(suspects, *best)

    def unmatched_spot(self) -> FaultSpot:
        """Build the spot of all nodes without a counterpart that lead to the end.

        Returns:
            The spot, with the end's expected value.
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

        Zeros pair with each other, so behind a division by 0 the operator with the epsilon may seem to have a
        counterpart.
        """
        return self._stretch_operators if self._divides_by_zero else unmatched

    def _suspect_places(self) -> list[int]:
        stops = (self.found.keys() | self.exact.sizes) - {self.end} | self.known.keys()
        return self.exact.nodes_between([self.end], stops)

    def omission_spot(self) -> FaultSpot:
        """Build the spot of a fault whose ``end`` holds another tensor of the model, because the file leaves operators
        out.

        Returns:
            The spot at the node that makes ``end``, with ``left_out`` set.
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
        """Return operators without a counterpart from which paths without one lead to the end."""
        operators = self.program.operators_between(self.target, self.matched_operators - {self.target})
        return [n for n in operators if n in self.reference]

    def _first_unmatched(self) -> list[str]:
        """Return those unmatched operators that read the result of no other."""
        strange = self._unmatched_operators()
        return [node for node in strange if not set(self.program.inputs_of(node)) & set(strange)]

    def _candidate_pairs(self, suspects: Sequence[int]) -> list[tuple[str, str]]:
        """Pair tensors of the file with unmatched operators whose value they may be, nearest first."""
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
                # Results of comparisons are not floating.
                if value.dtype.kind == other.dtype.kind == "f" and value.size == other.size:
                    pairs.append((name, node))
        return pairs[:_TRIALS]

    def _nearest_candidate(
        self, suspects: Sequence[int], candidates: Sequence[tuple[str, str]]
    ) -> tuple[str, str] | None:
        """Return the first candidate that restores about as many counterparts as the best one.

        The nearest is preferred, because a tensor behind the fault's end helps as well.
        """
        gains: list[float] = []
        for candidate in candidates:
            gains.append(self._counterpart_gain(suspects, *candidate))
            if gains[-1] >= _PLENTY:
                return candidate
        most = max(gains, default=0.0)
        return next((c for c, gain in zip(candidates, gains, strict=True) if gain and gain >= most / 2), None)

    def _counterpart_gain(self, suspects: Sequence[int], name: str, node: str) -> float:
        """Return the share of the next suspects that find a counterpart behind ``node`` if ``name`` has its value.

        Mere copies of the value do not count.
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
