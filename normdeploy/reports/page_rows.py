"""Build the rows of the page's tables from the JSON report. The terminal shows the same rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..findings.finding_groups import (
    FindingGroup,
    describe_outcome,
    describe_proof,
    describe_reason,
    group_findings,
)
from ..findings.records import STATUS_WORDS, Certificate, Finding, HalfConstants, NormParameter, RuntimeSupport

# Maximum number of rows of one table
_ROWS = 120
# Maximum number of ops of a norm that are listed
_CHIPS = 24


@dataclass(frozen=True)
class TruncatedRows:
    """First rows of a table, and the number of rows left out."""

    rows: Sequence[Any]
    left_out: int

    @classmethod
    def truncate_rows(cls, rows: Sequence[Any]) -> TruncatedRows:
        """Keep the first 120 rows.

        Returns:
            these rows, and the number of rows left out.
        """
        return cls(rows[:_ROWS], max(0, len(rows) - _ROWS))


@dataclass(frozen=True)
class PageRow:
    """Row for norms or float32 regions whose names differ only in numbers.

    Attributes:
        name: common name of the members.
        count: number of members.
        place: body or function; "" for the main graph.
        kind: kind of the norm, or op type of the region.
        found: op types of the norm in the original file; for a region, the kind of reason.
        became: form after the rewrite; for a region, the largest magnitude seen.
        failed: True if a certificate of the group failed.
        tensor: output of the group's first member.
        nodes: number of nodes of all members.
    """

    name: str
    count: int
    place: str
    kind: str
    status: str
    # Word that is shown for ``status``
    word: str
    # Op types of the norm, or the kind of reason of a region
    found: tuple[str, ...]
    became: str
    reason: str
    notes: tuple[str, ...]
    proof: tuple[str, ...]
    failed: bool
    tensor: str
    nodes: int


def norm_rows(told: Iterable[Mapping[str, Any]]) -> list[PageRow]:
    """Build the rows of ``norms`` of the JSON report, in its order."""
    return [_make_row(group) for group in group_findings(map(parse_finding, told))]


def float32_rows(told: Iterable[Mapping[str, Any]]) -> list[PageRow]:
    """Build the rows of ``precision.islands`` (float32 regions) of the JSON report.

    Returns:
        rows with the kind of reason in ``found`` and the largest magnitude seen in ``became``.
    """
    values = {i["tensor"]: float(i["value"]) for i in told if i["value"] is not None and i["kind"] == "range"}
    kept = [
        Finding(
            i["op"], "kept", i["tensor"], i["module"], reason=i["reason"], spelling=i["kind"], tensors=tuple(i["nodes"])
        )
        for i in told
    ]
    return [
        _make_row(group, max((values[f.tensor] for f in group.findings if f.tensor in values), default=None))
        for group in group_findings(kept)
    ]


def _make_row(group: FindingGroup, seen: float | None = None) -> PageRow:
    first = group.first_finding
    ops = first.spelling.split()
    return PageRow(
        name=group.name,
        count=len(group.findings),
        place=first.place,
        kind=first.kind,
        status=first.status,
        word=STATUS_WORDS[first.status],
        found=(*ops[:_CHIPS], f"… {len(ops) - _CHIPS} more") if len(ops) > _CHIPS else tuple(ops),
        became=f"largest value {seen:.3g}" if seen is not None else describe_outcome(group),
        reason=describe_reason(group),
        notes=first.notes,
        proof=tuple(describe_proof(group)),
        failed=any(f.certificate is not None and not f.certificate for f in group.findings),
        tensor=first.tensor,
        nodes=sum(len(f.tensors) for f in group.findings),
    )


def parse_finding(told: Mapping[str, Any]) -> Finding:
    """Rebuild the finding from its object in the report."""
    known = {f.name: _freeze_value(told[f.name]) for f in fields(Finding) if f.name in told}
    kinds: Mapping[str, type] = {
        "certificate": Certificate,
        "gamma": NormParameter,
        "beta": NormParameter,
        "half": HalfConstants,
        "runtimes": RuntimeSupport,
    }
    for name in kinds.keys() & known.keys():
        value = told[name]
        known[name] = (
            tuple(_parse_record(kinds[name], v) for v in value)
            if isinstance(value, list)
            else value and _parse_record(kinds[name], value)
        )
    return Finding(**known | {"attempts": ()})


def _parse_record(kind: type, told: Mapping[str, Any]) -> Any:
    return kind(**{f.name: _freeze_value(told[f.name]) for f in fields(kind) if f.name in told})


def _freeze_value(value: Any) -> Any:
    """Convert lists to tuples, and the strings "nan", "inf" and "-inf", which stand for numbers in JSON, to floats."""
    if isinstance(value, list):
        return tuple(map(_freeze_value, value))
    if value in ("nan", "inf", "-inf"):
        return float(value)
    return value
