"""Print the verdicts of ``verify``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ...errors import NEITHER, escape_line
from ...findings.console_tables import Column, WordTable, file_title, make_table
from .drift_outline import DRIFT, outline_drift
from .generation_tables import show_generation

if TYPE_CHECKING:
    from .comparison_result import Comparison
    from .parts_comparison import PartsComparison

# Title of the table of a pipeline's denoising step.
STEP_TITLE = "one denoising step"
# Width of a terminal, in columns, from which the full table is printed.
_WIDE = 100


def show_parity(console: Console, parity: Comparison) -> None:
    """Print a row for each output and runtime, reasons of failures, drift, runtimes that did not run, notes, and the
    verdict.
    """
    console.print(_result_table(parity, narrow=console.width < _WIDE))
    for result in parity.results:
        if result.reason or result.rules_summary:
            where = ", ".join(filter(None, (result.output, result.runtime, result.file)))
            if not result:
                style = "red"
            elif result.rules_summary and result.by_default == "fail":
                style = "yellow"
            else:
                style = ""
            console.print(Text(f"{result.verdict}: {where}: {result.rules_summary or result.reason}", style=style))
    for line in _altered_weight_lines(parity):
        console.print(Text(line, style="red"))
    if parity.drift:
        table = make_table("file", *DRIFT)
        for row in outline_drift(parity.drift):
            table.add_row(*map(Text, row))
        console.print(table)
    if parity.generation is not None:
        show_generation(console, parity.generation)
    for missed in parity.not_run:
        console.print(Text(f"not run: {missed.runtime}: {missed.reason}", style="dim"))
    for proof in parity.proofs:
        console.print(Text(proof.describe(), style="yellow" if proof.is_different else ""))
    for note in parity.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    sentence = Text(
        describe_verdict(parity), style="red" if not parity else "yellow" if parity.beyond_default else "green"
    )
    console.print(sentence.append(_describe_inputs(parity), style="default"))


def failure_lines(parity: Comparison) -> list[str]:
    """Describe a failed comparison for a quiet run.

    Returns:
        one line for each failure, then the verdict. Runtimes that did not run are listed only if nothing else failed.
    """
    lines = [
        f"fail: {', '.join(filter(None, (r.output, r.runtime, r.file)))}: "
        + (r.reason or f"error {r.max_abs_error:.2e}, allowed {r.allowed:.2e}")
        + (f", at {r.case}" if r.case and not r.rules else "")
        for r in parity.results
        if not r and r.file
    ]
    if parity.generation is not None:
        lines += parity.generation.describe_failures()
    missed = [f"not run: {', '.join(filter(None, (m.runtime, m.file)))}: {m.reason}" for m in parity.not_run]
    return [
        *lines,
        *_altered_weight_lines(parity),
        *(missed if not lines else ()),
        describe_verdict(parity) + _describe_inputs(parity),
    ]


def _altered_weight_lines(parity: Comparison) -> list[str]:
    wrong = [w for w in parity.weights if not w]
    if parity.trace:
        traced = [f"fail: {parity.trace}"]
    else:
        traced = []
    return traced + [
        f"fail: {w.file}: weight {w.name}{f' in {w.module}' if w.module else ''}: {w.reason}" for w in wrong
    ]


def describe_verdict(parity: Comparison) -> str:
    """Describe the verdict, with the rules that decided if any were given.

    Returns:
        for example "verified up to 4096 input elements".
    """
    if not parity:
        if parity.outcome == "failed":
            return f"NOT verified{_compare_with_proofs(parity)}"
        return NEITHER
    if parity.unrun:
        ran = {result.file for result in parity.results}
        names = [f"{m.file} in {m.runtime}" if m.file in ran else m.file for m in parity.unrun]
        left_out = f", except for {', '.join(names)}, which was not run,"
    else:
        left_out = ""
    if parity.up_to is not None:
        far = f" up to {parity.up_to} input elements"
    else:
        far = ""
    if parity.limits:
        limits = f" {'; '.join(parity.limits)};"
    else:
        limits = ""
    standard = f" {parity.standard}" if parity.standard else ""
    return f"verified{left_out}{limits}{far}{standard}{_compare_with_proofs(parity)}"


def _compare_with_proofs(parity: Comparison) -> str:
    """Say where the proofs say something else than the comparison."""
    if parity:
        different = [proof.file for proof in parity.proofs if proof.is_different]
        return f" (although {', '.join(different)} computes a different function)" if different else ""
    if parity.proofs and all(proof.is_proved for proof in parity.proofs):
        return " (although proved equal in exact arithmetic: only rounding or infinite numbers differ)"
    return ""


def summarize_verdict(parity: Comparison) -> str:
    """Describe the verdict and the inputs on which the files were compared.

    Returns:
        for example "verified on 34 inputs against the model in float64".
    """
    return describe_verdict(parity) + _describe_inputs(parity)


def _describe_inputs(parity: Comparison) -> str:
    count = len(parity.cases)
    if parity.word:
        word = f", with sizes and values from {parity.word}"
    else:
        word = ""
    if parity.narrow:
        narrow = f" except for {parity.narrow}"
    else:
        narrow = ""
    return f" on {count} input{'' if count == 1 else 's'} against {parity.reference} in float64{narrow}{word}"


def _result_table(parity: Comparison, narrow: bool) -> WordTable:
    """Build the table of results. If ``narrow`` is set, the table fits 80 columns without line breaks in numbers."""
    told = [
        i
        for i, column in enumerate(parity.columns)
        if not (narrow and "file" in parity.columns and column == "max rel error")
    ]
    columns = [
        Column(
            column.replace(" error", "\nerror") if narrow else column,
            whole=column.endswith("error") or column in ("allowed", "verdict"),
        )
        for column in (parity.columns[i] for i in told)
    ]
    table = make_table(*columns, padding=(0, 1) if narrow else (1, 1))
    bare = replace(parity, results=tuple(replace(result, reason="") for result in parity.results))
    for result, row in zip(parity.results, bare.rows(), strict=True):
        table.add_row(*(Text(row[i]) for i in told), style="" if result else "red")
    return table


def parts_verdict(result: PartsComparison) -> Text:
    """Summarize all files of a ``PartsComparison``.

    Returns:
        one line for each wrong file besides ONNX files, one line for each note, then one line with the verdict.
    """
    faults = "".join(f"{line}\n" for line in describe_faults(result))
    notes = "".join(f"note: {escape_line(note)}\n" for note in result.notes)
    return (
        Text(faults, style="red")
        .append(notes, style="yellow")
        .append(escape_line(summarize_parts(result)), style="green" if result else "red")
    )


def describe_faults(result: PartsComparison) -> list[str]:
    """Describe the wrong files besides ONNX files.

    Returns:
        one line for each file.
    """
    return [escape_line(f"fail: {fault}") for fault in result.faults]


def summarize_parts(result: PartsComparison) -> str:
    """Summarize all files of a ``PartsComparison``.

    Returns:
        the verdict, with the names of files that fail, and the limits of the verdict.
    """
    failing = [file for file, comparison in result.comparisons.items() if not comparison]
    count = len(result.comparisons)
    if result.step is None:
        step = ""
    elif result.step:
        step = ", and so is the denoising step" if not failing else "; the denoising step passes"
    else:
        step = ", but the denoising step fails" if not failing else "; the denoising step fails too"
    if result.faults:
        some = "1 other file is" if len(result.faults) == 1 else f"{len(result.faults)} other files are"
        step += f"; {some} wrong: {result.faults[0]}"
    limits = "".join(f"; {limit}" for limit in result.limits)
    if failing:
        return f"{len(failing)} of {count} parts fail: {', '.join(failing)}{step}{limits}"
    return f"all {count} parts are verified{step}{limits}"


def show_parts(console: Console, result: PartsComparison) -> None:
    """Print the tables of each part under the name of its file, then one verdict."""
    for file, comparison in result.comparisons.items():
        console.print(file_title(file))
        comparison.show(console)
        console.print()
    if result.step is not None:
        console.print(file_title(STEP_TITLE))
        result.step.show(console)
        console.print()
    console.print(parts_verdict(result))
