"""Prove that two ONNX files compute the same function.

The verdict is one of four: equal, equal up to the rounding of stored constants, different (with an input that shows the
difference), or not known (with the node that stops the proof). docs/reference/prove.md explains the method.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from ..arguments.argument_validation import take_fields_as_arguments
from ..arguments.export_result import resolve_onnx
from ..stage_progress import StageTimer
from .cast_matching import list_exact_casts, outputs_rounded_differently
from .constant_matching import RoundedConstant
from .counterexamples import FAILURES, Difference, Float64File, find_difference, write_npz
from .equality_proof import PROMISED_BITS, Comparison, compare_files
from .field_values import CastRounding, OutOfTime
from .file_pair import FilePair, NotComparable, OpenFile, draw_feeds, iter_sizes, pair_files, parse_map
from .proof_result import Counterexample, ExactCast, FileProof, Place, Verdict
from .prove_options import ProveCall

# Relative difference in float64 above which files differ by more than the rounding of constants of float32
_ROUNDING = 2.0**-20
# Relative difference below which a difference in float64 is not conclusive: a margin for errors that moving the inputs
# and constants does not show
_FLOAT64_NOISE = 2.0**-36
# The same for constants of half precision
_HALF_ROUNDING = 2.0**-7


@take_fields_as_arguments(ProveCall)
def prove(call: ProveCall) -> FileProof:
    """Prove that two ONNX files compute the same function, or show an input at which they differ.

    Args:
        first: an ONNX file, a model in memory or a result of ``export`` or ``optimize``.
        second: another one, with the same inputs and outputs.
        map: "A=B" for each input or output whose name differs.
        counterexample: .npz file to write with the inputs that show a difference.
        max_seconds: limit on processor time; None for none. A single large node may exceed it.
        progress: called with (stage, done, total).

    Returns:
        the verdict, with the error probability or the difference. The result is true if the files are proved equal,
        exactly or up to the rounding of stored constants.

    Raises:
        InputError: an input or output has no counterpart.
        GraphError: a file is missing or broken.
    """
    limit = ProofLimit.from_seconds(call.max_seconds)
    stage = StageTimer(call.progress)
    with stage("load"):
        first = OpenFile(resolve_onnx(call.first), "A")
        second = OpenFile(resolve_onnx(call.second), "B")
    texts = [call.map] if isinstance(call.map, str) else list(call.map or ())
    with stage("prove"):
        proof = prove_files(first, second, parse_map(texts), limit)
    if call.counterexample is not None and proof.counterexample is not None:
        write_npz(call.counterexample, proof.counterexample.inputs)
    return proof


@dataclass(frozen=True)
class ProofLimit:
    """Limit on the processor time of a proof.

    Attributes:
        seconds: the limit; None without one.
        start: begin of the proof, as `time.process_time` counts.
    """

    seconds: float | None
    start: float

    @classmethod
    def from_seconds(cls, seconds: float | None) -> Self:
        """Start to count now."""
        return cls(seconds, time.process_time())

    @property
    def deadline(self) -> float:
        """Return the end, as `time.process_time` counts."""
        return math.inf if self.seconds is None else self.start + self.seconds


def prove_files(first: OpenFile, second: OpenFile, names: Mapping[str, str], limit: ProofLimit) -> FileProof:
    """Prove that two open files compute the same function.

    Args:
        names: names in the second file that differ, by the names in the first file.

    Returns:
        the verdict.

    Raises:
        InputError: an input or output has no counterpart.
    """
    draft = _Draft(first.shown, second.shown, 0, limit, time.perf_counter())
    try:
        pair = pair_files(first, second, names)
    except NotComparable as error:
        return draft.finish(Verdict.UNKNOWN, str(error))
    draft.outputs = len(pair.outputs)
    try:
        return _prove_pair(pair, draft)
    except OutOfTime:
        return draft.finish(Verdict.UNKNOWN, f"the time limit of {limit.seconds:g} s was reached")


@dataclass
class _Draft:
    """Parts of the result that are known so far."""

    first: str
    second: str
    outputs: int
    limit: ProofLimit
    start: float
    notes: tuple[str, ...] = ()
    sizes: str = ""
    rounded: tuple[RoundedConstant, ...] = ()
    casts: tuple[ExactCast, ...] = ()
    places: tuple[Place | None, Place | None] = (None, None)

    def finish(
        self, verdict: Verdict, reason: str = "", *, bits: int = 0, shown: Counterexample | None = None
    ) -> FileProof:
        """Make the result."""
        return FileProof(
            verdict=verdict,
            first=self.first,
            second=self.second,
            outputs=self.outputs,
            error_bits=bits,
            sizes=self.sizes,
            rounded=self.rounded,
            casts=self.casts,
            reason=reason,
            places=self.places,
            counterexample=shown,
            notes=self.notes,
            seconds=time.perf_counter() - self.start,
        )


def _prove_pair(pair: FilePair, draft: _Draft) -> FileProof:
    draft.notes = pair.notes
    deadline = draft.limit.deadline
    compared = compare_files(pair, deadline=deadline)
    cast_reason = ""
    if compared.different_outputs() and compared.has_roundings:
        relaxed, cast_reason = _compare_with_exact_casts(pair, deadline)
        compared = relaxed or compared
    if compared.different_outputs():
        return _explain_difference(pair, compared, draft, cast_reason)
    obstacle = _find_obstacle(compared)
    if obstacle:
        return draft.finish(Verdict.UNKNOWN, obstacle)
    draft.sizes = "for the sizes that the files state"
    if pair.symbols:
        limits = sorted(f"{size} ≤ {most}" for size, most in compared.point.limits)
        draft.sizes = "for all sizes of 1 or more" + (f" with {', '.join(limits)}" if limits else "")
    draft.rounded = tuple(r for side in compared.rounded for r in side.values())
    draft.casts = tuple(list_exact_casts(compared))
    verdict = Verdict.ROUNDED if draft.rounded or draft.casts else Verdict.EQUAL
    return draft.finish(verdict, bits=compared.point.security_bits)


def _compare_with_exact_casts(pair: FilePair, deadline: float) -> tuple[Comparison | None, str]:
    """Compare two files under the assumption that Casts do not round.

    Returns:
        the comparison, if the outputs agree and both files round to the same types; and a reason why it does not count.
    """
    for casts in (CastRounding.CONSTANTS, CastRounding.NONE):
        compared = compare_files(pair, casts, deadline=deadline)
        if compared.different_outputs():
            continue
        if not outputs_rounded_differently(compared):
            return compared, ""
        return None, "the outputs would be equal if no Cast to a narrower type rounded"
    return None, ""


def _find_obstacle(compared: Comparison) -> str:
    """Say why agreeing outputs are not a proof; "" if they are."""
    if not compared.is_defined_alike:
        return _describe_undefined(compared)
    bits = compared.point.security_bits
    if bits < PROMISED_BITS:
        return f"the error probability of 2^-{bits} is larger than 2^-{PROMISED_BITS}; the files are too deep"
    if not compared.has_enough_points:
        return (
            f"a proof for all sizes needs {compared.point.required_points} points of an open size; the limit is "
            f"{compared.point.open_points}"
        )
    return ""


def _choose_sizes(pair: FilePair) -> list[dict[str, int]]:
    """Choose sizes of the open dims at which the first file runs: two rows of different sizes, and ones."""
    if not pair.symbols:
        return [{}]
    runner = Float64File(pair.first)
    ports = [one for one, _ in pair.inputs]
    chosen = []
    for sizes in iter_sizes(pair.symbols):
        feeds = draw_feeds(ports, pair.shapes_at(sizes), np.random.default_rng(0))
        try:
            runner.run(feeds, {})
        except FAILURES:
            continue
        chosen.append(sizes)
        if len(chosen) == 2:
            break
    return [*chosen, dict.fromkeys(pair.symbols, 1)]


def _describe_undefined(compared: Comparison) -> str:
    kinds = compared.undefined_kinds()
    return (
        f"the outputs agree, but the files are not defined at the same inputs: their arguments of {', '.join(kinds)} "
        "differ, and no structure shows that these arguments are always valid"
    )


def _explain_difference(pair: FilePair, compared: Comparison, draft: _Draft, cast_reason: str) -> FileProof:
    """Say how the files differ, or why the proof stops."""
    found = [compared.first_difference(side) for side in (0, 1)]
    draft.places = (found[0][0] if found[0] else None, found[1][0] if found[1] else None)
    unknown = [f"{place.op} ({reason})" for place, reason in filter(None, found) if reason]
    numbers = tuple({n: v.approx.numbers for n, v in exact.items() if v.approx is not None} for exact in compared.exact)
    random_ops = compared.random_ops()
    difference = None
    if not random_ops:
        difference = find_difference(pair, _choose_sizes(pair), (numbers[0], numbers[1]), deadline=draft.limit.deadline)
    changed = list(compared.changed_constants())
    only_constants = bool(changed) and compared.is_equal_with(changed)
    shown = None if difference is None else difference.shown
    if shown is not None and difference is not None and _is_conclusive(difference, pair, only_constants=only_constants):
        if only_constants:
            one, other = changed[0]
            reason = f"{pair.second.label} stores other numbers in {other!r} than {pair.first.label} in {one!r}"
            if len(changed) > 1:
                reason += f", and {len(changed) - 1} more constants differ"
        else:
            reason = f"the output {shown.output!r} differs by {difference.relative:.2g} of its largest element"
        return draft.finish(Verdict.DIFFERENT, reason, shown=shown)
    reason = _describe_obstacle(pair, draft, unknown, changed, difference, random_ops)
    if cast_reason:
        reason += f"; {cast_reason}"
    return draft.finish(Verdict.UNKNOWN, reason)


def _is_conclusive(difference: Difference, pair: FilePair, *, only_constants: bool) -> bool:
    """Return True if a difference in float64 shows that the files differ.

    A tool may have folded constants in a way that the proof does not know. Then the constants may be rounded correctly,
    and cause small differences. If only stored constants differ, any difference is conclusive.
    """
    if only_constants and difference.is_exact:
        return difference.relative > _FLOAT64_NOISE
    return difference.relative > (_HALF_ROUNDING if pair.first.is_half or pair.second.is_half else _ROUNDING)


def _describe_obstacle(
    pair: FilePair,
    draft: _Draft,
    unknown: Sequence[str],
    changed: Sequence[tuple[str, str]],
    difference: Difference | None,
    random_ops: Sequence[str],
) -> str:
    if random_ops:
        return f"{random_ops[0]} gives other numbers in each run"
    parts = []
    if unknown:
        parts.append(f"the proof stops at {' and '.join(dict.fromkeys(unknown))}")
    else:
        sides = (pair.first.label, pair.second.label)
        places = [f"{p.describe()} in {side}" for p, side in zip(draft.places, sides, strict=True) if p is not None]
        parts.append(f"the proof stops at {' and '.join(places)}")
    if changed:
        one, other = pair.first.label, pair.second.label
        parts.append(f"the constant {changed[0][1]!r} of {other} is not computed from constants of {one}")
    if difference is not None and difference.shown is None:
        if difference.ran:
            parts.append(f"{difference.ran} inputs in float64 show no difference")
        else:
            parts.append(f"the files did not run in float64 ({difference.failed})")
    elif difference is not None:
        parts.append(f"in float64 they differ by {difference.relative:.1g}, which rounded constants may explain")
    return "; ".join(parts)
