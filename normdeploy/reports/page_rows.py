"""The rows of the page's tables: what a terminal would show in one line, from the JSON report."""

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

# of one table
_ROWS = 120
# ops of one spelling
_CHIPS = 24


@dataclass(frozen=True)
class TruncatedRows:
    """The first rows of a table, and how many are left out."""

    rows: Sequence[Any]
    left_out: int

    @classmethod
    def truncate_rows(cls, rows: Sequence[Any]) -> TruncatedRows:
        return cls(rows[:_ROWS], max(0, len(rows) - _ROWS))


@dataclass(frozen=True)
class PageRow:
    """Norms, or islands of float32, that differ in nothing but the numbers in their names."""

    name: str
    count: int
    place: str
    kind: str
    status: str
    # the word that is shown for it
    word: str
    # op types
    found: tuple[str, ...]
    became: str
    reason: str
    notes: tuple[str, ...]
    proof: tuple[str, ...]
    # a certificate among them did
    failed: bool
    # of the first
    tensor: str
    # of all
    nodes: int


def norm_rows(told: Iterable[Mapping[str, Any]]) -> list[PageRow]:
    """``norms`` of the JSON report, in its order."""
    return [_make_row(group) for group in group_findings(map(parse_finding, told))]


def island_rows(told: Iterable[Mapping[str, Any]]) -> list[PageRow]:
    """``precision.islands`` of the JSON report; ``found`` is the kind of reason, ``became`` the largest magnitude
    seen."""
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
        became=f"reached {seen:.3g}" if seen is not None else describe_outcome(group),
        reason=describe_reason(group),
        notes=first.notes,
        proof=tuple(describe_proof(group)),
        failed=any(f.certificate is not None and not f.certificate for f in group.findings),
        tensor=first.tensor,
        nodes=sum(len(f.tensors) for f in group.findings),
    )


def parse_finding(told: Mapping[str, Any]) -> Finding:
    """The record that the report was made from."""
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
    """Lists become tuples; the words that stand for numbers which JSON lacks become these."""
    if isinstance(value, list):
        return tuple(map(_freeze_value, value))
    if value in ("nan", "inf", "-inf"):
        return float(value)
    return value
