"""Interpret torch.export's errors about dims that can't take their full range. The ranges are narrowed, or the error is
explained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm

from ..errors import InputError
from ..model import Dim
from .input_request import InputRequest
from .size_conditions import TracedConditions

_RANGE = re.compile(r"Dim\('\w+'(, min=(?P<min>\d+))?(, max=(?P<max>\d+))?\)")
_STEPS = re.compile(r"(?P<step>\d+)\*(?P<root>\w+)( \+ (?P<offset>\d+))?")


class FixedDimError(InputError):
    """Raised if a dim that was requested as dynamic can't be: the model fixes it, or takes sizes that form no range.

    Attributes:
        name: of the dim; "" if the message tells of several attempts.
        place: in the model, as `size_conditions.describe_location` describes it; "" if unknown.
        size: the only size that the trace takes, whatever the range; None if a narrower range may be dynamic.
    """

    def __init__(self, message: str, name: str = "", place: str = "", size: int | None = None) -> None:
        super().__init__(message)
        self.name = name
        self.place = place
        self.size = size


class DimRangeError(InputError):
    """Raised if the stated range of a dim is wider than the model's.

    Attributes:
        accepted: the largest range within the stated one; None if there is none.
    """

    def __init__(self, message: str, accepted: Dim | None) -> None:
        super().__init__(message)
        self.accepted = accepted


def _parse_suggested_fixes(message: str) -> dict[str, str]:
    """Parse torch's suggested fixes into ``{"seq": "Dim('seq', max=12)"}``."""
    lines = message.partition("Suggested fixes:")[2].splitlines()
    return {
        name: value
        for line in lines
        if line.startswith("  ")
        for name, separator, value in [line.strip().partition(" = ")]
        if separator
    }


def narrow_ranges(message: str, wishes: InputRequest, conditions: TracedConditions) -> tuple[InputRequest, bool]:
    """Narrow the dims to the ranges that torch suggests.

    Args:
        conditions: conditions that torch met while tracing. They give the place in the model for the message.

    Returns:
        The request with narrowed dims, which may have steps, and True if the sizes of some dim are multiples of a step
        plus an offset.

    Raises:
        InputError: a dim is fixed by the model or always equal to another dim, or its stated range is too wide.
    """
    dims = dict(wishes.dims)
    steps = False
    intervals = _parse_violated_intervals(message)
    fixes = _scale_root_fixes(_parse_suggested_fixes(message), dims)
    for name, fix in fixes.items():
        if fix.isdecimal():
            if name in dims:
                wished = f" ({dims[name]})"
            else:
                wished = ""
            place = conditions.place_limiting(name)
            raise FixedDimError(
                f"the dim {name!r} was requested as dynamic{wished}, but the model fixes it to the size {fix}, or "
                f"computes differently at that size{place}: write {fix} instead of its name, or pass --dim "
                f"{name}={fix}:{fix}:{fix}, use an example of another size, or change the code of the model that "
                "fixes it",
                name,
                place,
                int(fix),
            )
        if name in dims and fix in dims:
            raise InputError(
                f"the dims {name!r} and {fix!r} are always equal in the model{conditions.place_limiting(name)}: use "
                "one name for both"
            )
        taken = _parse_range_fix(fix, fixes)
        if taken is not None and taken.step > 1:
            taken = intervals.get(name, taken)
        if name in dims and taken is not None:
            steps |= taken.offset > 0
            dims[name] = _fit_dim_to_range(dims[name], taken, name in wishes.demanded, conditions)
    return wishes.with_dims(dims), steps


def root_dim_name(name: str) -> str:
    """Return the name that torch gets for n if the sizes of the dim are step·n."""
    return f"_{name}"


def _scale_root_fixes(fixes: Mapping[str, str], dims: Mapping[str, Dim]) -> dict[str, str]:
    """Express fixes of n as fixes of the dim step·n, in torch's own form."""
    scaled = dict(fixes)
    for name, dim in dims.items():
        root = root_dim_name(name)
        if dim.step == 1 or name in fixes or root not in fixes:
            continue
        fix = scaled.pop(root)
        if fix.isdecimal():
            scaled[name] = str(dim.step * int(fix))
        elif match := _STEPS.fullmatch(fix):
            offset = dim.step * int(match["offset"] or 0)
            scaled[name] = f"{dim.step * int(match['step'])}*{match['root']}{f' + {offset}' if offset else ''}"
        else:
            scaled[name] = f"{dim.step}*{root}"
            scaled[root] = fix
    return scaled


@dataclass(frozen=True)
class _TakenSizes:
    """Sizes that the model accepts according to torch: step·n + offset, from ``low`` to ``high``. None means no
    limit.
    """

    low: int
    high: int | None
    step: int
    offset: int


def _parse_range_fix(fix: str, fixes: Mapping[str, str]) -> _TakenSizes | None:
    """Return the sizes of one suggested fix, or None if it can't be parsed."""
    step = 1
    offset = 0
    if match := _STEPS.fullmatch(fix):
        step = int(match["step"])
        offset = int(match["offset"] or 0)
        fix = fixes.get(match["root"], "")
    if not (match := _RANGE.fullmatch(fix)):
        return None
    if match["max"]:
        high = int(match["max"]) * step + offset
    else:
        high = None
    return _TakenSizes(int(match["min"] or 1) * step + offset, high, step, offset)


def _fit_dim_to_range(wished: Dim, taken: _TakenSizes, stated: bool, conditions: TracedConditions) -> Dim:
    low = taken.low
    if taken.offset:
        step = wished.step
    else:
        step = lcm(taken.step, wished.step)
    if taken.high is None:
        high = wished.max
    else:
        high = min(taken.high, wished.max)
    sizes = range(low + max(0, -(-(wished.min - low) // taken.step)) * taken.step, high + 1, taken.step)
    kind = ""
    if taken.step > 1:
        kind = f"multiples of {taken.step}{f' plus {taken.offset}' if taken.offset else ''} "
    outside = sorted({wished.min, wished.opt, wished.max} - set(sizes))
    if not sizes or (stated and outside):
        where = next(
            (found for size in reversed(outside) if (found := conditions.place_limiting(wished.name, size))), ""
        )
        raise DimRangeError(
            f"the dim {wished} was requested, but the model accepts only {kind}from {low} to {high}{where}: pass "
            "such a range, or change the code of the model that limits it",
            _fit_dim_to_sizes(wished, sizes, step),
        )
    fitted = _fit_dim_to_sizes(wished, sizes, step)
    if fitted is None:
        raise InputError(
            f"the dim {wished} was requested, but the model accepts only multiples of {taken.step}: pass a range with "
            f"a multiple of {step}"
        )
    return fitted


def _fit_dim_to_sizes(wished: Dim, sizes: Sequence[int], step: int) -> Dim | None:
    """Return the dim with those of the sizes that are multiples of ``step``; None if there are none."""
    if not sizes:
        return None
    fitted = Dim(wished.name, sizes[0], min(sizes, key=lambda size: abs(size - wished.opt)), sizes[-1], step=step)
    # With both steps, fewer sizes remain than with the model's step alone.
    allowed = fitted.allowed_sizes()
    if not allowed:
        return None
    return replace(fitted, min=allowed[0], opt=fitted.nearest_size(wished.opt), max=allowed[-1])


_VIOLATED = re.compile(
    r"Not all values of (?P<name>\w+) = (?P<source>.*) in the specified range .* satisfy the generated guard"
    r" (?P<guard>.*)"
)
_SIZE = r"L\[\S*\.size\(\)\[\d+\]"
_INTERVAL = re.compile(rf"(?P<low>\d+) <= {_SIZE}(?: and {_SIZE} <= (?P<high>\d+))?\.?")
_EXCLUDED = re.compile(r"\(\((?P<offset>-\d+)\) \+ L\[\S*\.size\(\)\[\d+\]\) != (?P<size>[01])\.?")
_SPECIAL = re.compile(r"L\[\S*\.size\(\)\[\d+\] != (?P<size>\d+)\.?")


def _parse_violated_intervals(message: str) -> dict[str, _TakenSizes]:
    """Parse the ranges of the dims that violate nothing but a range. torch then suggests multiples without a need."""
    intervals = dict[str, _TakenSizes]()
    others = set[str]()
    for line in message.splitlines():
        if (match := _VIOLATED.match(line.strip().removeprefix("- "))) is None:
            continue
        found = _INTERVAL.fullmatch(match["guard"])
        if found is None or match["name"] in intervals:
            others.add(match["name"])
        else:
            high = int(found["high"]) if found["high"] else None
            # torch assumes at least 2 elements, but takes 1 too.
            low = 1 if found["low"] == "2" else int(found["low"])
            intervals[match["name"]] = _TakenSizes(low, high, 1, 0)
    return {name: taken for name, taken in intervals.items() if name not in others}


def violates_division(message: str) -> bool:
    """Check if a violated condition divides a size. torch can't decide such a condition for a range of sizes."""
    guards = [
        match["guard"] for line in message.splitlines() if (match := _VIOLATED.match(line.strip().removeprefix("- ")))
    ]
    return any("//" in guard or "%" in guard for guard in guards)


def suggests_steps(message: str) -> bool:
    """Check if torch suggests multiples of a number for a dim."""
    return any(_STEPS.fullmatch(fix) for fix in _parse_suggested_fixes(message).values())


def _parse_excluded_sizes(message: str) -> dict[str, int]:
    """Parse the sizes that torch can't trace together with other sizes. At these sizes, the shortened dim of a slice
    such as x[:, 1:] has size 0 or 1.
    """
    lines = [match for line in message.splitlines() if (match := _VIOLATED.match(line.strip().removeprefix("- ")))]
    return {m["name"]: int(e["size"]) - int(e["offset"]) for m in lines if (e := _EXCLUDED.fullmatch(m["guard"]))}


def raise_above_excluded(message: str, wishes: InputRequest) -> InputRequest:
    """Raise the minimum of dims without a stated range above the sizes that torch excludes.

    Returns:
        The changed request.
    """
    dims = dict(wishes.dims)
    for name, size in _parse_excluded_sizes(message).items():
        dim = dims.get(name)
        if dim is not None and name not in wishes.demanded and dim.min <= size < dim.max:
            first = next(iter(dim.allowed_sizes(size + 1)), dim.max)
            dims[name] = replace(dim, min=first, opt=max(dim.opt, first))
    return wishes.with_dims(dims)


_BOUND = re.compile(r"Expected op to be '==', got \S+ for (?P<over>\d+)(/(?P<under>\d+))? <= (?P<name>\w+)")


def describe_unsolved_dims(message: str, wishes: InputRequest, conditions: TracedConditions) -> str:
    """Explain which range to state if torch.export's solver fails on the dims.

    Returns:
        The message; "" if the error is of another kind.
    """
    bound = _BOUND.search(message)
    if bound is not None and (dim := wishes.dims.get(bound["name"])) is not None:
        # At this bound a slice such as x[1:-1] has size 1, which torch can't trace together with other sizes.
        first = -(-int(bound["over"]) // int(bound["under"] or 1)) + 1
        if first <= dim.max:
            begun = Dim(dim.name, first, max(dim.opt, first), dim.max)
            return (
                f"the dim {dim} was requested, but torch can't trace the model with sizes below "
                f"{first}{conditions.last_place([dim.name])}: start there, with --dim {begun}"
            )
    if bound is None and "Cannot create Dim with inconsistent" not in message:
        return ""
    dims = ", ".join(map(str, wishes.dims.values()))
    return (
        f"torch.export can't determine which sizes of {dims} the model accepts, for example because it divides a "
        f"size or pads it to a multiple{conditions.last_place(wishes.dims)}: pass a range of multiples with --dim, "
        "such as NAME=4:8:64 for multiples of 4, use an example of such a size, or write a fixed size instead"
    )


def make_violation_error(message: str, wishes: InputRequest, conditions: TracedConditions) -> InputError:
    """Explain which constraint of the model the dims violate, and which line of the model causes the constraint.

    The message leaves out torch's advice on its own API.

    Returns:
        The error; a FixedDimError if a dim can have only one size.
    """
    lines = [
        line.strip().removeprefix("- ")
        for line in message.partition("Suggested fixes")[0].splitlines()
        if line.startswith("  ")
    ]
    violated = [match for line in lines if (match := _VIOLATED.match(line))]
    for match in violated:
        if special := _SPECIAL.fullmatch(match["guard"]):
            size = special["size"]
            dim = wishes.dims.get(match["name"])
            if dim:
                wished = f" ({dim})"
            else:
                wished = ""
            asked = f"the dim {match['name']!r} was requested as dynamic{wished}"
            where = conditions.place_limiting(match["name"])
            return FixedDimError(
                f"{asked}, but the model was built for the size {size}{where}: write {size} instead of its name",
                match["name"],
                where,
            )
    for name, size in _parse_excluded_sizes(message).items():
        if name in wishes.dims:
            return InputError(
                f"the dim {wishes.dims[name]} was requested, but torch can't trace the model with "
                f"{size}{conditions.place_limiting(name, size)}: start at {size + 1}"
            )
    if violated:
        name = violated[0]["name"]
        needed = "; ".join(_substitute_dim_names(match["guard"].rstrip("."), violated) for match in violated[:3])
        asked = f"the dim {name!r} does not have the requested range"
        place = conditions.last_place([name])
        return FixedDimError(f"{asked}: the model needs {needed}{place}; pass another with --dim", name, place)
    return InputError("the dynamic dims do not fit the model: " + "; ".join(lines[:3]))


def _substitute_dim_names(guard: str, violated: Iterable[re.Match[str]]) -> str:
    """Replace torch's ``L['x'].size()[0]`` in a guard by the dims' names."""
    for match in violated:
        guard = guard.replace(match["source"], match["name"])
    return guard
