"""Find one change that explains the error of a spot, or of the smallest wider spot that has such a change.

A spot is the group of nodes at a fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ...runtimes.float64_evaluator import Float64Evaluator
from ...types import Arrays
from .cause_search import find_cause
from .constant_trials import find_wrong_constant
from .counterpart_search import CounterpartSearch, FaultSpot
from .reference_program import ReferenceProgram
from .trial_changes import Cause, node_at_text

_UNEXPLAINED = ("unknown", "left out", "factor")
# Kinds of causes that a wrong constant may look like, if only one of its readers is examined.
_BY_A_CONSTANT = (*_UNEXPLAINED, "number", "input", "added", "operator")


@dataclass(frozen=True, kw_only=True)
class SpotExplanation:
    """Cause of the error at ``spot``.

    Attributes:
        known: right values of all tensors that the nodes of the spot read.
    """

    spot: FaultSpot
    cause: Cause
    known: Arrays


def explain_spot(
    exact: Float64Evaluator,
    program: ReferenceProgram,
    altered: Mapping[str, str],
    search: CounterpartSearch,
    spot: FaultSpot,
) -> SpotExplanation:
    """Explain a spot by one change or by a wrong constant.

    If neither explains the spot, wider spots are tried, and then weights that differ from the model's.

    Args:
        altered: weight of the file that differs from the model's -> description of the difference.

    Returns:
        The explanation of this or of a wider spot. Its cause has the kind "unknown" if nothing explains the error.
    """
    first = _explain_as_given(exact, program, search, spot)
    if not _is_symptom(first.cause) and first.cause.kind not in _BY_A_CONSTANT:
        return _narrow_to_added_node(exact, search, first)
    constant = _explain_by_constant(exact, program, search)
    if constant is not None:
        return constant
    if not _is_symptom(first.cause):
        return _narrow_to_added_node(exact, search, first)
    explained = [first]
    for wider in _iter_wider_spots(search):
        if any(wider.places == other.spot.places for other in explained):
            continue
        other = _explain_as_given(exact, program, search, wider)
        # The cause "factor" (the result is a multiple of the right one) says more than a wrong number in a later node.
        if (first.cause.kind, other.cause.kind) == ("factor", "number"):
            continue
        if not _is_symptom(other.cause):
            return _narrow_to_added_node(exact, search, other)
        explained.append(other)
    exchanged = next((other for other in explained if other.cause.held), None)
    if exchanged is not None:
        return exchanged
    if first.cause.kind == "unknown":
        return replace(first, cause=_find_altered_weight(exact, altered, search, spot) or first.cause)
    return first


def _explain_by_constant(
    exact: Float64Evaluator, program: ReferenceProgram, search: CounterpartSearch
) -> SpotExplanation | None:
    whole = search.whole_stretch()
    cause = find_wrong_constant(exact, search.values, whole, search.fixed, program)
    if cause is None:
        return None
    return SpotExplanation(spot=whole, cause=cause, known=search.known)


def _is_symptom(cause: Cause) -> bool:
    """Check whether a cause describes only how a result differs, but not the mistake."""
    # Exchanged results are a symptom: their weights, or the parts of a Split, may be exchanged.
    is_of_the_result = cause.kind == "order" and (cause.place is None or bool(cause.held))
    return cause.kind in _UNEXPLAINED or is_of_the_result


def _iter_wider_spots(search: CounterpartSearch) -> Iterator[FaultSpot]:
    """Yield wider spots, because a wrong layout or order may be visible only in a later tensor."""
    yield search.unmatched_spot()
    strict = search.with_equal_shapes()
    narrow = strict.find_spot()
    if narrow is not None:
        yield narrow
        yield strict.unmatched_spot()
    yield search.whole_stretch()


def _explain_as_given(
    exact: Float64Evaluator, program: ReferenceProgram, search: CounterpartSearch, spot: FaultSpot
) -> SpotExplanation:
    made = {name for p in spot.places for name in exact.nodes[p].output}
    known = {name: value for name, value in search.values.items() if name not in made}
    held = {name: value for name, value in search.reference.items() if name in search.matched_operators}
    return SpotExplanation(
        spot=spot, cause=find_cause(exact, known, spot, program, held, search.reference), known=known
    )


def _narrow_to_added_node(
    exact: Float64Evaluator, search: CounterpartSearch, explained: SpotExplanation
) -> SpotExplanation:
    """If the cause is an added node, narrow the spot to this node. All nodes that read its result are right as soon as
    the result has its right value.
    """
    spot = explained.spot
    cause = explained.cause
    if not cause.instead or cause.place is None:
        return explained
    values = exact.evaluate_nodes(spot.places, explained.known)
    end = exact.nodes[cause.place].output[0]
    known = {**search.known, **values}
    del known[end]
    narrow = replace(spot, places=(cause.place,), end=end, expected=values[cause.instead])
    return SpotExplanation(spot=narrow, cause=cause, known=known)


def _find_altered_weight(
    exact: Float64Evaluator, altered: Mapping[str, str], search: CounterpartSearch, spot: FaultSpot
) -> Cause | None:
    """Find the first altered weight that is read by the spot or by the stretch of nodes before it."""
    for p in dict.fromkeys([*spot.places, *search.places]):
        for name in exact.read_names(exact.nodes[p]):
            if name in altered:
                return Cause(
                    "weights", f"{node_at_text(exact, p)}: {name!r} differs from the model's: {altered[name]}", p
                )
    return None
