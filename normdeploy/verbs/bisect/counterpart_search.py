"""Where inside a stretch of nodes a file stops computing what the PyTorch model computes, told by values.

Both are evaluated in float64 from the same right tensors. A tensor of the file that holds what some tensor of the model
holds, element by element in memory's order, is that tensor; fused and decomposed forms leave others without a
counterpart, which says nothing. The fault lies where no path to the end meets a counterpart any more. How far it
reaches is found by trial: put what the model has into a tensor of the file, and see whether the tensors after it find
their counterparts again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...runtimes.float64_evaluator import Array, Float64Evaluator, NotEvaluated, Values, tensor_values
from .reference_program import ReferenceProgram

# elements that are looked at first
_SAMPLE = 64
# nodes that are evaluated to see whether a trial helps
_NEAR = 60
# of which one may be what the fault's end should be
_OPERATORS = 10
_TRIALS = 60
# of the nodes behind a fault that is taken away find a counterpart, whatever is fused
_PLENTY = 1 / 3


@dataclass(frozen=True)
class FaultSpot:
    """The nodes at ``places`` make something else of right values than the model does: ``end`` should be ``expected``.

    ``node``: the first operator of the PyTorch graph without a counterpart, "" where all have one; ``last``: the one
    whose value ``end`` should have; ``operators``: those that the place stands for. ``left_out``: what ``places`` read,
    or make, should be the result of ``node``, which the file leaves out.
    """

    places: tuple[int, ...]
    end: str
    expected: Array
    allowed: float
    node: str = ""
    last: str = ""
    operators: tuple[str, ...] = ()
    left_out: str = ""


def find_counterparts(values: Values, reference: Values, allowed: Mapping[str, float]) -> dict[str, list[str]]:
    """Tensor of the file -> operators that give the same."""
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
    """Return ``value`` in the shape of another of as many elements; as it is where they have not as many."""
    if value.size == like.size:
        return value.reshape(like.shape)
    return value


def _squeezed_shape(value: Array) -> list[int]:
    """The dims that are not one."""
    return [size for size in value.shape if size != 1]


class CounterpartSearch:
    """One stretch of the file and of the PyTorch graph, from tensors that are right to ``end``, which is not.

    Args:
        places: of the file's nodes, in order.
        known: the right values of what they start from, float64.
        operators: of the stretch and those that it starts from, with their values in float64 and what is allowed of
        each.
        target: the one whose value ``end`` should have.
        fixed: the model's tensors that depend on no input.
    """

    def __init__(
        self, exact: Float64Evaluator, places: Sequence[int], known: Values, end: str, program: ReferenceProgram,
        reference: Values,
        allowed: Mapping[str, float], starts: Iterable[str], target: str, fixed: Values,
    ) -> None:  # fmt: skip
        self.exact = exact
        self.known = known
        self.end = end
        self.program = program
        self.reference = reference
        self.allowed = allowed
        self.target = target
        self.fixed = fixed
        self.values = exact.evaluate_nodes(places, known)
        self.tensors = tensor_values(self.values)
        self.places = list(places)
        self.inner = [
            name
            for place in places
            for name in exact.nodes[place].output
            if name in self.tensors and name not in exact.sizes
        ]
        self.found = find_counterparts({name: self.values[name] for name in self.inner}, reference, allowed)
        self._starts = set(starts)

    @property
    def matched_operators(self) -> set[str]:
        """The operators whose results are tensors of the file too."""
        return {node for nodes in self.found.values() for node in nodes} | self._starts

    def with_equal_shapes(self) -> CounterpartSearch:
        """Return the search that takes no tensor of another shape for a counterpart: a Concat on a wrong axis may give
        the numbers that the model has a transposition later."""
        other = copy.copy(self)
        shapes = {node: _squeezed_shape(value) for node, value in self.reference.items()}
        kept = {
            n: [o for o in nodes if shapes[o] == _squeezed_shape(self.values[n])] for n, nodes in self.found.items()
        }
        other.found = {name: nodes for name, nodes in kept.items() if nodes}
        return other

    def whole_stretch(self) -> FaultSpot:
        """All nodes from the right tensors to the end."""
        operators = [n for n in self.reference if n not in self._starts]
        return replace(self.unmatched_spot(), places=tuple(self.places), node="", operators=tuple(operators))

    def find_spot(self) -> FaultSpot | None:
        """None where the file computes what the model does."""
        if self.target in self.found.get(self.end, ()):
            return None
        suspects = self._suspect_places()
        strange = self._unmatched_operators()
        firsts = [node for node in strange if not set(self.program.inputs_of(node)) & set(strange)]
        candidates = self._candidate_pairs(suspects, [n for n in firsts if n in self.reference] or strange[:1])
        best = self._nearest_candidate(suspects, candidates)
        if best is None:
            return self.unmatched_spot()
        return self._spot_at(suspects, strange, *best)

    def unmatched_spot(self) -> FaultSpot:
        """All nodes without a counterpart that lead to the end."""
        strange = self._unmatched_operators()
        firsts = [node for node in strange if not set(self.program.inputs_of(node)) & set(strange)]
        return FaultSpot(
            tuple(self._suspect_places()),
            self.end,
            _reshape_like(self.reference[self.target], self.values[self.end]),
            self.allowed[self.target],
            firsts[0] if firsts else "",
            self.target,
            tuple(strange),
        )

    def _suspect_places(self) -> list[int]:
        stops = (self.found.keys() | self.exact.sizes) - {self.end} | self.known.keys()
        return self.exact.nodes_between([self.end], stops)

    def omission_spot(self) -> FaultSpot:
        """``end`` holds another tensor of the model: what makes of that the one that is wanted is not in the file."""
        expected = _reshape_like(self.reference[self.target], self.values[self.end])
        place = self.exact.makers[self.end]
        operators = tuple(self._unmatched_operators()) or (self.target,)
        return FaultSpot(
            (place,),
            self.end,
            expected,
            self.allowed[self.target],
            operators[0],
            self.target,
            operators,
            left_out=self.end,
        )

    def _unmatched_operators(self) -> list[str]:
        """Operators without a counterpart from which paths without one lead to the end."""
        return [
            n
            for n in self.program.operators_between(self.target, self.matched_operators - {self.target})
            if n in self.reference
        ]

    def _candidate_pairs(self, suspects: Sequence[int], firsts: Sequence[str]) -> list[tuple[str, str]]:
        """Tensors of the file that may stand in the place of one of ``firsts`` or of what follows it, the nearest
        first."""
        if not suspects:
            return []
        head = self.exact.nodes[suspects[0]]
        names = [n for n in self.exact.read_names(head) if n in self.tensors and n not in self.exact.sizes]
        names += [
            o
            for place in suspects[:_NEAR]
            for o in self.exact.nodes[place].output
            if o in self.tensors and o != self.end
        ]
        names += [
            n for place in suspects[:_NEAR] for n in self.exact.read_names(self.exact.nodes[place]) if n in self.found
        ]
        sizes = {name: self.values[name].size for name in names if self.values[name].dtype.kind == "f"}
        after = list(dict.fromkeys([*firsts, *self._unmatched_operators()[:_OPERATORS]]))
        # What a comparison gives is no tensor of numbers.
        numbers = [node for node in after if self.reference[node].dtype.kind == "f"]
        return [(name, node) for name, size in sizes.items() for node in numbers if self.reference[node].size == size][
            :_TRIALS
        ]

    def _nearest_candidate(
        self, suspects: Sequence[int], candidates: Sequence[tuple[str, str]]
    ) -> tuple[str, str] | None:
        """The first that brings back about as many as the best does: what lies behind the fault's end helps as well."""
        gains: list[float] = []
        for candidate in candidates:
            gains.append(self._counterpart_gain(suspects, *candidate))
            if gains[-1] >= _PLENTY:
                return candidate
        most = max(gains, default=0.0)
        return next((c for c, gain in zip(candidates, gains, strict=True) if gain and gain >= most / 2), None)

    def _counterpart_gain(self, suspects: Sequence[int], name: str, node: str) -> float:
        """Which part of the next suspects finds a counterpart behind ``node`` when ``name`` is what that gives, a mere
        copy not counted."""
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

    def _spot_at(self, suspects: Sequence[int], strange: Sequence[str], name: str, node: str) -> FaultSpot:
        operators = tuple(n for n in self.program.operators_between(node, self.matched_operators) if n in strange)
        first = operators[0] if operators else node
        expected = _reshape_like(self.reference[node], self.values[name])
        made = [
            p for p in self.exact.nodes_between([name], self.found.keys() | self.known.keys()) if p in set(suspects)
        ]
        if made:
            return FaultSpot(tuple(made), name, expected, self.allowed[node], first, node, operators)
        reader = next(p for p in suspects if name in self.exact.read_names(self.exact.nodes[p]))
        values = self.exact.evaluate_nodes(
            [reader],
            {k: v for k, v in self.values.items() if k not in self.exact.nodes[reader].output} | {name: expected},
        )
        end = self.exact.nodes[reader].output[0]
        same = find_counterparts({end: values[end]}, self.reference, self.allowed).get(end, [node])
        return FaultSpot((reader,), end, values[end], self.allowed[same[0]], first, node, operators, left_out=name)
