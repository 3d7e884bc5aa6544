"""Write the page ``benchmarks/results/verdicts.md``."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from . import __doc__ as rules
from .faults import FAULTS
from .pairs import LEFT_OUT
from .rows import RESULTS, Row

PAGE = RESULTS.with_suffix(".md")
_MARKS = {"no place": "–", "not observable": "(small)", "missed": "**missed**"}


def page(rows: Sequence[Row], listed: int) -> str:
    """Write the page.

    Returns:
        Markdown.
    """
    ran = [row for row in rows if row.right or row.broken]
    not_made = [row for row in rows if row.not_made]
    found = [fault for row in ran for fault in row.faults.values()]
    observable = [f for f in found if f["state"] not in ("no place", "not observable")]
    named = [f for f in observable if f.get("named")]
    judged = [row for row in ran if row.right]
    lines = [
        "# Verdicts on the files of other tools",
        "",
        str(rules).strip(),
        "",
        f"{len(ran)} of {listed} pairs were run, {sum(row.has_run(FAULTS) for row in ran)} of these with their faults;"
        f" {len(not_made)} could not be made (their tool failed).",
        "",
        f"Judged by the code of {_commits(rows)}.",
        "",
        f"- false alarms: {sum(row.right != 'pass' for row in judged)} of {len(judged)}",
        f"- misses: {sum(f['state'] == 'missed' for f in observable)} of {len(observable)} observable faults"
        f" ({_count(observable, 'refused')} more were refused with a message, {_count(observable, 'crash')} crashed)",
        f"- `bisect` names the node or the weight: {len(named)} of {len(observable)} ({_share(named, observable)})",
        f"- of the faults that it does not name, `bisect` refuses to search"
        f" {sum(f['bisect'].startswith('refused') for f in observable)}; of those that it searches it names"
        f" {_share(named, [f for f in observable if not f['bisect'].startswith('refused')])}",
        f"- faults that could not be observed: {_count(found, 'not observable')}; without a place in the file:"
        f" {_count(found, 'no place')}",
        f"- pairs whose process crashed or ran out of time: {sum(bool(row.broken) for row in ran)}",
    ]
    if judged:
        seconds = [row.seconds for row in judged]
        lines += [f"- seconds of `verify`: median {statistics.median(seconds):.1f}, largest {max(seconds):.1f}"]
    lines += ["", "## By fault", "", *_by_fault(ran), "", "## What is wrong", "", *_wrong(ran), "", "## Pairs", ""]
    lines += [*_pairs(ran), "", *(f"- not made: {row.name}: {row.not_made}" for row in not_made)]
    lines += [*(f"- left out: {name}: {why}" for name, why in LEFT_OUT.items()), ""]
    return "\n".join(lines)


def _commits(rows: Sequence[Row]) -> str:
    """Say how many rows each commit judged, the newest first."""
    counts = Counter(row.commit for row in rows)
    known = sorted((commit for commit in counts if commit), reverse=True)
    told = [f"{commit} ({counts[commit]} rows)" for commit in known]
    return ", ".join([*told, *([f"earlier ones that were not recorded ({counts['']} rows)"] if counts[""] else [])])


def _count(faults: Sequence[dict[str, Any]], state: str) -> int:
    return sum(f["state"] == state for f in faults)


def _share(part: Sequence[Any], whole: Sequence[Any]) -> str:
    return f"{len(part) / len(whole):.1%}" if whole else "none"


def _by_fault(rows: Sequence[Row]) -> list[str]:
    head = ("fault", "observable", "caught", "missed", "named by bisect", "not observable", "no place")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in FAULTS:
        found = [row.faults[name] for row in rows if name in row.faults]
        observable = [f for f in found if f["state"] not in ("no place", "not observable")]
        cells = [name, len(observable), *(_count(found, state) for state in ("caught", "missed"))]
        cells += [sum(bool(f.get("named")) for f in observable)]
        cells += [_count(found, state) for state in ("not observable", "no place")]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _wrong(rows: Sequence[Row]) -> list[str]:
    return [f"- {row.name}: {line}" for row in rows for line in row.wrong] or ["Nothing."]


def _pairs(rows: Sequence[Row]) -> list[str]:
    head = ("pair", "right file", "seconds", *FAULTS)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [row.name.replace("|", "·"), "pass" if row.right == "pass" else f"**{row.right.partition(':')[0]}**"]
        cells += [f"{row.seconds:.1f}", *(_cell(row.faults.get(name)) for name in FAULTS)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(fault: dict[str, Any] | None) -> str:
    if fault is None:
        return "not run"
    state = _MARKS.get(fault["state"], fault["state"])
    return f"{state}, unnamed" if fault.get("named") is False else state
