"""Where inside a stretch of nodes a file stops computing what the PyTorch model computes, told by values.

Both are evaluated in float64 from the same right tensors. A tensor of the file that holds what some tensor of the model
holds, element by element in memory's order, is that tensor; fused and decomposed forms leave others without a
counterpart, which says nothing. The fault lies where no path to the end meets a counterpart any more. How far it
reaches is found by trial: put what the model has into a tensor of the file, and see whether the tensors after it find
their counterparts again.
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


def find_counterparts(values: Arrays, reference: Arrays, allowed: Mapping[str, float]) -> dict[str, list[str]]:
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


@dataclass(kw_only=True, eq=False)
class CounterpartSearch:
    """One stretch of the file and of the PyTorch graph, from tensors that are right to ``end``, which is not.

    ``known``: the right values of what the file's nodes start from, float64. ``reference``: values in float64 of the
    operators of the stretch, and of ``starts``, with which it begins; ``allowed``: what each may be off by.
    ``target``: the operator whose value ``end`` should have. ``fixed``: the model's tensors that depend on no input.
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

    @property
    def wanted(self) -> Array:
        """Expected value of the end tensor."""
        return _reshape_like(self.reference[self.target], self.values[self.end])

    @property
    def matched_operators(self) -> set[str]:
        """The operators whose results are tensors of the file too."""
        return {node for nodes in self.found.values() for node in nodes}.union(self.starts)

    def with_equal_shapes(self) -> CounterpartSearch:
        """Return the search that takes no tensor of another shape for a counterpart: a Concat on a wrong axis may give
        the numbers that the model has a transposition later."""
        other = copy.copy(self)
        other.found = {}
        for name, nodes in self.found.items():
            shape = squeeze_shape(self.values[name].shape)
            if kept := [node for node in nodes if squeeze_shape(self.reference[node].shape) == shape]:
                other.found[name] = kept
        return other

    def whole_stretch(self) -> FaultSpot:
        """All nodes from the right tensors to the end."""
        operators = tuple(n for n in self.reference if n not in self.starts)
        return replace(self.unmatched_spot(), places=tuple(self.places), node="", operators=operators)

    def find_spot(self) -> FaultSpot | None:
        """None where the file computes what the model does."""
        if self.target in self.found.get(self.end, ()):
            return None
        suspects = self._suspect_places()
        best = self._nearest_candidate(suspects, self._candidate_pairs(suspects))
        if best is None:
            return self.unmatched_spot()
        return self._spot_at(suspects, *best)

    def unmatched_spot(self) -> FaultSpot:
        """All nodes without a counterpart that lead to the end."""
        return FaultSpot(
            places=tuple(self._suspect_places()),
            end=self.end,
            expected=self.wanted,
            allowed=self.allowed[self.target],
            node=next(iter(self._first_unmatched()), ""),
            last=self.target,
            operators=tuple(self._unmatched_operators()),
        )

    def _suspect_places(self) -> list[int]:
        stops = (self.found.keys() | self.exact.sizes) - {self.end} | self.known.keys()
        return self.exact.nodes_between([self.end], stops)

    def omission_spot(self) -> FaultSpot:
        """``end`` holds another tensor of the model: what makes of that the one that is wanted is not in the file."""
        operators = tuple(self._unmatched_operators()) or (self.target,)
        return replace(
            self.unmatched_spot(),
            places=(self.exact.makers[self.end],),
            node=operators[0],
            operators=operators,
            left_out=self.end,
        )

    def _unmatched_operators(self) -> list[str]:
        """Operators without a counterpart from which paths without one lead to the end."""
        operators = self.program.operators_between(self.target, self.matched_operators - {self.target})
        return [n for n in operators if n in self.reference]

    def _first_unmatched(self) -> list[str]:
        """Those of them that read the result of none."""
        strange = self._unmatched_operators()
        return [node for node in strange if not set(self.program.inputs_of(node)) & set(strange)]

    def _candidate_pairs(self, suspects: Sequence[int]) -> list[tuple[str, str]]:
        """Tensors of the file that may stand in the place of a first operator without a counterpart, or of what
        follows it, the nearest first."""
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
                # What a comparison gives is no tensor of numbers.
                if value.dtype.kind == other.dtype.kind == "f" and value.size == other.size:
                    pairs.append((name, node))
        return pairs[:_TRIALS]

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
            operators=operators,
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
