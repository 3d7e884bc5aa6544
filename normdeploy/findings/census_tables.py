"""Print the norm census and the answers of ``--explain``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from .console_tables import Column, fit_words, make_grid
from .finding_groups import (
    FindingGroup,
    group_findings,
    location_text,
    result_text,
    summarize_proof,
)

if TYPE_CHECKING:
    from .records import Explanation, Finding, HalfConstants, NormParameter, RuntimeSupport, Summary

_FORMS = {"now": "now", "optimized": "optimized"}
# Maximum number of ops or layer types that are listed one by one
_SHOWN = 6


def show_census(console: Console, summary: Summary) -> None:
    """Print each norm with its formula, its rewrite by ``optimize``, and how the runtimes run it."""
    for group in group_findings(summary.findings):
        _print_group(console, group, _iter_group_rows(group))


def show_explanations(console: Console, explanations: Sequence[Explanation]) -> None:
    """Print each explained norm with the path through its nodes.

    Norms whose names differ only in numbers are printed once.
    """
    for alone in (e for e in explanations if e.finding is None):
        console.print(Text(alone.name, style="bold"))
        _print_lines(console, alone.said)
    by_finding = {id(e.finding): e for e in explanations if e.finding is not None}
    for group in group_findings(e.finding for e in explanations if e.finding is not None):
        explanation = by_finding[id(group.first_finding)]
        _print_group(console, group, _iter_group_rows(group, runtimes=False))
        if explanation.way:
            _print_path(console, explanation, several=len(group.findings) > 1)
        _print_lines(console, explanation.said)


def _print_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))


def _print_path(console: Console, explanation: Explanation, several: bool) -> None:
    if explanation.finding is not None:
        first = explanation.finding.tensor
    else:
        first = ""
    if explanation.start:
        console.print(
            Padding(Text(f"from {explanation.start}{f' (of {first})' if several else ''}:"), (0, 0, 0, 2), expand=False)
        )
    table = make_grid(Column(""), Column(""))
    for step in explanation.way:
        mark = Text(f"  ← {step.mark}" if step.mark else "", style="yellow")
        table.add_row(Text(step.tensor, style="dim"), Text(step.text).append(mark))
    console.print(Padding(table, (0, 0, 0, 4), expand=False))


def _print_group(console: Console, group: FindingGroup, rows: Iterable[tuple[str, Text]]) -> None:
    title = location_text(group).append(f"  {group.first_finding.kind}", style="bold")
    console.print(fit_words(title, console.width))
    table = make_grid(Column("", whole=True, style="dim"), Column(""))
    for label, value in rows:
        table.add_row(label, value)
    console.print(Padding(table, (0, 0, 1, 2), expand=False))


def _iter_group_rows(group: FindingGroup, runtimes: bool = True) -> Iterable[tuple[str, Text]]:
    first = group.first_finding
    if first.spelling:
        yield "written as", Text(first.spelling)
    if computed := _describe_computation(group):
        yield "computes", Text(computed)
    for half in first.half:
        if words := _describe_half_constants(half, first, several=len(group.findings) > 1):
            yield f"in {half.dtype}", Text(words, style="yellow")
    yield "optimize", Text("would be ").append_text(result_text(group))
    for note in first.notes:
        yield "", Text(note, style="yellow")
    if proved := summarize_proof(group):
        yield "proof", Text(", ".join(proved))
    if runtimes:
        for runtime in dict.fromkeys(s.runtime for s in first.runtimes):
            name, _, version = runtime.partition(" ")
            lines = Text("\n").join(_support_text(s) for s in first.runtimes if s.runtime == runtime)
            yield name + (f" {version.split()[-1]}" if version.endswith(("CPU", "CUDA")) else ""), lines


def _describe_computation(group: FindingGroup) -> str:
    """Describe the norm's formula, as far as recognition knows it."""
    first = group.first_finding
    parts = []
    if first.axes:
        if len({f.shape for f in group.findings}) == 1:
            shape = first.shape
        else:
            shape = None
        if shape is not None:
            of = f" of ({', '.join('?' if d is None else str(d) for d in shape)})"
        else:
            of = ""
        parts.append(f"over {_format_axes(first.axes)}{of}")
    if first.epsilon_as_written is None:
        epsilon = first.epsilon
    else:
        epsilon = first.epsilon_as_written
    if epsilon is not None:
        parts.append(f"ε {epsilon:.7g}{' outside the root' if first.outside else ''}")
    if first.ddof is not None:
        parts.append(f"variance {'unbiased' if first.ddof else 'biased'} (ddof {first.ddof})")
    if first.statistics == "constant":
        parts.append("statistics are constants")
    elif first.statistics:
        parts.append(f"statistics in {first.statistics}")
    if affine := _describe_affine(first):
        parts.append(affine)
    return ", ".join(parts)


def _describe_affine(finding: Finding) -> str:
    gamma = finding.gamma
    beta = finding.beta
    if (
        gamma is not None
        and beta is not None
        and (gamma.data, gamma.axes, gamma.one_plus) == (beta.data, beta.axes, False)
    ):
        return _describe_parameter("γ and β", gamma)
    words = [_describe_parameter(name, p) for name, p in (("γ", gamma), ("β", beta)) if p is not None]
    if words:
        return " and ".join(words)
    known = finding.ddof is not None or finding.kind == "RMSNorm"
    recognised = not finding.attempts or any(a.stage == "form" for a in finding.attempts)
    if known and recognised:
        return "γ 1 and β 0 everywhere"
    return ""


def _describe_parameter(name: str, p: NormParameter) -> str:
    if p.one_plus:
        text = f"{name} = 1 + w"
    else:
        text = name
    if p.data:
        text += " from data"
    if p.axes:
        return f"{text} along {_format_axes(p.axes)}"
    return f"{text} the same everywhere"


def _format_axes(axes: Sequence[int]) -> str:
    return f"{'axis' if len(axes) == 1 else 'axes'} {' '.join(map(str, axes))}"


def _describe_half_constants(half: HalfConstants, finding: Finding, several: bool) -> str:
    """Describe constants of the norm that a 16-bit type can't represent; "" if it can represent all."""
    words = []
    if finding.epsilon_as_written is None:
        epsilon = finding.epsilon
    else:
        epsilon = finding.epsilon_as_written
    if half.vanishes == "zero":
        words.append(f"ε {epsilon:.7g} becomes 0")
    elif half.vanishes:
        words.append(
            f"ε {epsilon:.7g} is subnormal (stored as {half.epsilon:.4g}; 0 on GPUs that flush subnormal numbers)"
        )
    if half.overflow:
        words.append("constants overflow" if several else f"these constants overflow: {', '.join(half.overflow)}")
    return "; ".join(words)


def _support_text(support: RuntimeSupport) -> Text:
    text = Text(f"{_FORMS[support.form]}: ")
    text.append(support.verdict, style="yellow" if support.verdict in ("missing", "function") else "default")
    if support.parts and support.verdict != "missing":
        text.append(
            f" {_count_layers(support.parts)}" if support.verdict == "layers" else f" ({_count_layers(support.parts)})"
        )
    return text.append(f": {support.reason}" if support.reason else "")


def _count_layers(parts: Sequence[str]) -> str:
    """List the parts. If there are many, list the first parts and the total number."""
    runs: list[tuple[str, int]] = []
    for part in parts:
        if runs and runs[-1][0] == part:
            runs[-1] = (part, runs[-1][1] + 1)
        else:
            runs.append((part, 1))
    shown = " ".join(part if n == 1 else f"{part}×{n}" for part, n in runs[:_SHOWN])
    if len(runs) <= _SHOWN:
        return shown
    return f"{shown} … {len(parts)} in all"
