"""Compare the norms of two engines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from .engine_norms import EngineNorm
from .engine_report import EngineBuild, NormChange

# Times of one layer in two runs of trtexec differ by some percent. A smaller difference is not called a change.
_SAME_TIME = 0.1


def compare_builds(first: EngineBuild, second: EngineBuild) -> tuple[NormChange, ...]:
    """Compare two engines norm by norm.

    Norms are matched by their module path, or by their tensor if the path is unknown. Norms of the same name are
    matched in their order.

    Returns:
        the norms of the first engine, then the norms that are only in the second one.
    """
    waiting: defaultdict[str, list[int]] = defaultdict(list)
    for index, norm in enumerate(second.norms):
        waiting[norm.name].append(index)
    changes: list[NormChange] = []
    for index, norm in enumerate(first.norms):
        matches = waiting[norm.name]
        if matches:
            place = matches.pop(0)
            changes.append(_compare_norms(norm, second.norms[place], index, place))
        else:
            changes.append(
                NormChange(name=norm.name, kind=norm.kind, first=index, second=None, changed=("only in one",))
            )
    for place in sorted(place for places in waiting.values() for place in places):
        norm = second.norms[place]
        changes.append(NormChange(name=norm.name, kind=norm.kind, first=None, second=place, changed=("only in one",)))
    return tuple(changes)


def _compare_norms(first: EngineNorm, second: EngineNorm, index: int, place: int) -> NormChange:
    changed: list[str] = []
    if (first.form, len(first.layers)) != (second.form, len(second.layers)):
        changed.append("form")
    if set(first.fused_with) != set(second.fused_with):
        changed.append("fused with")
    if _types_changed(first.inputs, second.inputs) or _types_changed(first.outputs, second.outputs):
        changed.append("types")
    if len(first.reformats) != len(second.reformats):
        changed.append("reformats")
    before = time_with_reformats(first)
    after = time_with_reformats(second)
    factor = after / before if before and after is not None else None
    if factor is not None and abs(factor - 1) > _SAME_TIME:
        changed.append("time")
    return NormChange(
        name=first.name,
        kind=first.kind or second.kind,
        first=index,
        second=place,
        changed=tuple(changed),
        factor=factor,
    )


def time_with_reformats(norm: EngineNorm) -> float | None:
    """Add the time of the reformats around a norm, because a faster layer may only need another layout.

    Returns:
        milliseconds; None if the norm was not timed.
    """
    if norm.ms is None:
        return None
    return norm.ms + (norm.reformat_ms or 0.0)


def _types_changed(first: Sequence[str], second: Sequence[str]) -> bool:
    """Check if two lists of types differ. An empty list means that the types are unknown."""
    return bool(first) and bool(second) and set(first) != set(second)
