"""Decide whether two files compute the same outputs, at a random point of prime fields.

Both files are evaluated at one random point (`normdeploy.verbs.prove.field_run`). Equal outputs are a proof, because
the terms of different functions agree with a negligible probability. docs/reference/prove.md explains the method.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .constant_matching import RoundedConstant, match_constants, match_epsilons
from .field_run import RANDOM, ConcreteGraph, Trace, evaluate_graph
from .field_values import CastRounding, Field, Value, hash_matrix, is_large_matrix
from .file_pair import FilePair, Port
from .folded_constants import fold_neighbors
from .op_call import Call
from .proof_result import Place
from .residues import draw_primes

# Number of points of an open size at first, and at most
_POINTS = 4
_MOST_POINTS = 24
# Number of primes at first, and at most
_PRIMES = 8
_MOST_PRIMES = 24
# Number of times that exact constants are looked for
_PASSES = 3
# Every proof has an error probability of at most 2^-80.
PROMISED_BITS = 80


@dataclass
class Comparison:
    """Comparison of two files at one random point.

    Attributes:
        traces: evaluation of each file.
        rounded: constants that were replaced by exact values, for each file.
        exact: the exact values, for each file.
        epsilons: exact values of the epsilons of norm nodes, by the stored number, for each file.
    """

    point: Field
    graphs: tuple[ConcreteGraph, ConcreteGraph]
    inputs: tuple[Mapping[str, Value], Mapping[str, Value]]
    outputs: tuple[tuple[Port, Port], ...]
    traces: list[Trace] = field(default_factory=list)
    rounded: list[dict[str, RoundedConstant]] = field(default_factory=lambda: [{}, {}])
    exact: list[dict[str, Value]] = field(default_factory=lambda: [{}, {}])
    epsilons: list[dict[float, Value]] = field(default_factory=lambda: [{}, {}])

    def run(self, side: int) -> None:
        """Evaluate one file with the exact values of its constants."""
        self.point.exact_numbers = self.epsilons[side]
        made = evaluate_graph(self.point, self.graphs[side], self.inputs[side], self.exact[side])
        if len(self.traces) <= side:
            self.traces.append(made)
        else:
            self.traces[side] = made

    def digest(self, side: int, name: str) -> bytes:
        """Return the digest of a tensor's term."""
        value = self.traces[side].values[name]
        return value.digest or self.point.digest(value)

    def different_outputs(self) -> list[str]:
        """List the outputs whose terms differ, by their names in the first file."""
        return [one.name for one, other in self.outputs if self.digest(0, one.name) != self.digest(1, other.name)]

    def note_outputs(self) -> None:
        """Record the degrees of the outputs."""
        for one, other in self.outputs:
            self.point.note_compared(self.traces[0].values[one.name], self.traces[1].values[other.name])

    @property
    def has_enough_points(self) -> bool:
        """Return True if open sizes have as many points as the few-points lemma requires."""
        return self.point.required_points <= self.point.open_points

    @property
    def has_roundings(self) -> bool:
        """Return True if a file converts to a narrower floating type."""
        return any(n.op_type in ("Cast", "CastLike") for graph in self.graphs for n in graph.nodes)

    @property
    def is_defined_alike(self) -> bool:
        """Return True if both files divide by the same values and take roots of the same values."""
        return not self.undefined_kinds()

    def undefined_kinds(self) -> list[str]:
        """List the kinds of arguments that only one file requires to be valid."""
        first, second = (trace.facts.found for trace in self.traces)
        kinds = sorted(first.keys() | second.keys())
        safe = self.point.safe.found
        return [k for k in kinds if (first.get(k, set()) ^ second.get(k, set())) - safe.get(k, set())]

    def propose_exact_constants(self, side: int) -> bool:
        """Replace constants of one file by exact values from the other file.

        Returns:
            whether a constant was replaced.
        """
        other = 1 - side
        replaced = self._propose_epsilons(side)
        # Numbers by which a constant may be multiplied are known only after epsilons are exact.
        for _ in range(_PASSES):
            self.point.exact_numbers = self.epsilons[other]
            candidates = fold_neighbors(self.point, self.graphs[other], self.traces[other])
            found = match_constants(
                self.point,
                self.graphs[side],
                self.traces[side],
                self.graphs[other],
                self.traces[other],
                candidates,
            )
            if not found:
                break
            for name, (value, rounded) in found.items():
                self.exact[side][name] = value
                self.rounded[side][name] = rounded
            self.run(side)
            replaced = True
        return replaced

    def _propose_epsilons(self, side: int) -> bool:
        other = 1 - side
        found = match_epsilons(self.point, self.graphs[side], self.graphs[other], self.traces[other])
        for epsilon, (value, rounded) in found.items():
            self.epsilons[side][epsilon] = value
            self.rounded[side][rounded.name] = rounded
        if found:
            self.run(side)
        return bool(found)

    def drop_exact_constants(self, side: int) -> None:
        """Use the stored constants again."""
        if self.exact[side] or self.epsilons[side]:
            self.exact[side] = {}
            self.epsilons[side] = {}
            self.rounded[side] = {}
            self.run(side)

    def first_difference(self, side: int) -> tuple[Place, str] | None:
        """Find the first node whose result has no counterpart, while its inputs have one.

        Returns:
            the node, and why the field can't evaluate it ("" if it can); None if there is no such node.
        """
        other = 1 - side
        known = {self.digest(other, name) for name in self.traces[other].values}
        trace = self.traces[side]
        needed = self._needed_by_different_outputs(side)
        for node in self.graphs[side].nodes:
            names = [name for name in node.output if name in trace.values and name in needed]
            if not names or all(self.digest(side, name) in known for name in names):
                continue
            reads = [name for name in node.input if name and name in trace.values]
            data = [n for n in reads if trace.values[n].stored is None]
            if all(self.digest(side, name) in known for name in data):
                op, reason = trace.reasons.get(names[0], (node.op_type, ""))
                return Place(op, names[0], tuple(reads)), reason
        return None

    def _needed_by_different_outputs(self, side: int) -> set[str]:
        wrong = set(self.different_outputs())
        needed = {ports[side].name for ports in self.outputs if ports[0].name in wrong}
        for node in reversed(self.graphs[side].nodes):
            if needed.intersection(node.output):
                needed.update(name for name in node.input if name)
        return needed

    def random_ops(self) -> list[str]:
        """List the ops that give different results in each run."""
        found = [n.op_type for graph in self.graphs for n in graph.nodes if n.op_type in RANDOM]
        for graph, trace in zip(self.graphs, self.traces, strict=True):
            found += [n.op_type for n in graph.nodes if n.op_type == "Dropout" and n.output[0] in trace.reasons]
        return found

    def is_equal_with(self, changed: Sequence[tuple[str, str]]) -> bool:
        """Return True if the outputs agree once the second file stores the first file's constants.

        Args:
            changed: names of constants in both files.
        """
        kept = dict(self.exact[1])
        for one, other in changed:
            value = self.traces[0].values[one]
            shape = self.traces[1].values[other].dims
            call = Call(self.point, "", [], {}, 21, 1)
            self.exact[1][other] = call.reshape(value, shape)
        self.run(1)
        equal = not self.different_outputs()
        self.exact[1] = kept
        self.run(1)
        return equal

    def changed_constants(self) -> Iterator[tuple[str, str]]:
        """Yield pairs of stored constants of equal shape, of which each exists in one file only.

        Yields:
            the name in the first file and the name in the second file.
        """
        stored: list[dict[str, Value]] = []
        for trace in self.traces:
            stored.append({n: v for n, v in trace.values.items() if v.stored is not None and v.kind == "f"})
        held = [{self.digest(side, n) for n in stored[side]} for side in (0, 1)]
        mine = {n: v for n, v in stored[0].items() if self.digest(0, n) not in held[1]}
        theirs = {n: v for n, v in stored[1].items() if self.digest(1, n) not in held[0]}
        for name, value in theirs.items():
            if name in self.exact[1]:
                continue
            alike = [n for n, v in mine.items() if v.size == value.size and n not in self.exact[0]]
            if alike:
                yield min(alike, key=lambda n: _distance(mine[n], value)), name


def _distance(one: Value, other: Value) -> float:
    assert one.stored is not None
    assert other.stored is not None
    a = one.stored.astype(np.float64).reshape(-1)
    b = other.stored.astype(np.float64).reshape(-1)
    return float(np.abs(a - b).max(initial=0.0))


def compare_files(pair: FilePair, casts: CastRounding = CastRounding.ALL, *, deadline: float = math.inf) -> Comparison:
    """Compare two files at a random point.

    If their outputs differ, constants that one file may have computed from the other file's constants are replaced by
    their exact values.

    Args:
        casts: Casts to a narrower floating type that change numbers.
        deadline: time limit, as `time.process_time` counts.

    Returns:
        the comparison.

    Raises:
        OutOfTime: the time limit is reached.
    """
    rng = random.Random(random.SystemRandom().getrandbits(128))
    first, second = (
        file.with_shapes({ports[k].name: shape for ports, shape in zip(pair.inputs, pair.shapes, strict=True)})
        for k, file in enumerate((pair.first, pair.second))
    )
    primes = _PRIMES
    points = _POINTS
    shared = _shared_matrices(first, second)
    while True:
        seed = rng.getrandbits(128)
        point = Field(draw_primes(primes, rng), seed, points, shared, casts=casts, deadline=deadline)
        values = [
            point.free(f"input {i}", shape, _kind(ports[0]), ports[0].elem_type)
            for i, (ports, shape) in enumerate(zip(pair.inputs, pair.shapes, strict=True))
        ]
        mine, theirs = (
            {ports[k].name: value for ports, value in zip(pair.inputs, values, strict=True)} for k in (0, 1)
        )
        compared = Comparison(point, (first, second), (mine, theirs), pair.outputs)
        compared.run(0)
        compared.run(1)
        if compared.different_outputs():
            _replace_rounded_constants(compared)
        if compared.different_outputs() and shared:
            # The proof may need the numbers of the matrices.
            shared = frozenset()
            continue
        if compared.different_outputs():
            return compared
        compared.note_outputs()
        if point.required_points > points and points < _MOST_POINTS:
            points = point.required_points
        elif point.security_bits < PROMISED_BITS and primes < _MOST_PRIMES:
            primes = min(2 * primes, _MOST_PRIMES)
        else:
            return compared


def _shared_matrices(first: ConcreteGraph, second: ConcreteGraph) -> frozenset[bytes]:
    """Hash the large matrices that both files store, as they are or transposed."""
    hashes = []
    for graph in (first, second):
        large = [a for a in graph.constants.values() if is_large_matrix(a)]
        hashes.append({hash_matrix(a) for a in large} | {hash_matrix(a.T) for a in large})
    return frozenset(hashes[0] & hashes[1])


def _replace_rounded_constants(compared: Comparison) -> None:
    """Replace constants of the second file, or else of the first file, or else of both."""
    for sides in ((1,), (0,), (1, 0)):
        compared.drop_exact_constants(0)
        compared.drop_exact_constants(1)
        replaced = [compared.propose_exact_constants(side) for side in sides]
        if any(replaced) and not compared.different_outputs():
            return


def _kind(port: Port) -> str:
    if port.elem_type in (1, 10, 11, 16):
        return "f"
    return "b" if port.elem_type == 9 else "i"
