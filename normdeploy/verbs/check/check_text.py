"""Format the result of ``check`` as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import escape_line

if TYPE_CHECKING:
    from .check_function import Check, CheckedFile
    from .norm_rules import Problem


def render_check(result: Check) -> str:
    """Format a line for each file, followed by the findings of the file. The last line has the counts.

    Returns:
        The text; every line ends with a newline.
    """
    lines = [line for file in result.files for line in _file_lines(file)]
    problems = [p for file in result.files for p in file.findings]
    counts = [_count_findings(problems, level) for level in ("error", "warning", "note")]
    counted = f"{len(result.files)} file{'s' if len(result.files) > 1 else ''}: {', '.join(counts)}"
    if n := sum(p.known for p in problems):
        counted += f", {n} known from the baseline"
    notes = dict.fromkeys(
        f"note: {note}"
        for file in result.files
        for note in file.notes
        if "missing-kernel" in result.fail_on or result.target
    )
    last = f"{counted}; rules that fail the check: {', '.join(result.fail_on) or 'none'}"
    return "".join(f"{escape_line(line)}\n" for line in (*lines, *notes, last))


def _count_findings(problems: Sequence[Problem], level: str) -> str:
    count = sum(problem.level == level for problem in problems)
    return f"{count} {level}{'' if count == 1 else 's'}"


def _file_lines(file: CheckedFile) -> list[str]:
    """Format the lines of a file. Findings with the same message share a line."""
    alike: dict[tuple[str, str, str, bool], list[str]] = {}
    for p in file.findings:
        alike.setdefault((p.level, p.rule, p.message, p.known), []).append(
            p.location + (f" in {p.place}" if p.place else "")
        )
    lines = [f"{file.file}: {'could not be checked' if file.error else 'clean' if not alike else ''}".rstrip()]
    for (level, rule, message, known), names in alike.items():
        if len(names) == 1:
            shown = names[0]
        else:
            shown = f"{names[0]} … {names[-1]} ×{len(names)}"
        if shown:
            where = f"{shown}: "
        else:
            where = ""
        lines.append(f"  {level:7} {rule}{' (known)' if known else ''}  {where}{message}")
    return lines
