"""Show the result of a fleet's run as tables for the terminal, as Markdown, and as JSON (`normdeploy/fleet/1`)."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from ..errors import escape_line
from ..findings.console_tables import Column, WordTable
from ..reports.markdown_text import markdown_list, markdown_table

if TYPE_CHECKING:
    from rich.console import Console

    from .outcomes import CellOutcome, FleetRun, StepEnd
    from .publishing import PublishResult

SCHEMA = "normdeploy/fleet/1"
_COLOURS = {
    **{"verified": "green", "built": "cyan", "wrong": "bold red", "failed": "bold red", "not run": "yellow"},
    **{"stale": "yellow"},
}
_MARKS = {"verified": "✅", "built": "🔨", "wrong": "❌", "failed": "❌", "not run": "⏸", "stale": "⏳"}
# Maximum number of reasons or notes that are printed.
_MOST = 40
# Maximum number of a step's files that are printed.
_FILES = 12


def run_to_json(run: FleetRun) -> str:
    """Write a run as JSON.

    The keys are schema, ok, id, file, store, started, seconds, ran, cached and unrun (steps), counts (status → cells),
    cells and notes. Each cell has model, variant, target, status, reason, step, seconds, bytes, measures, change (since
    the previous run) and logs.

    Returns:
        the text.
    """
    cells = [
        {
            **{"model": c.model, "variant": c.variant, "target": c.target, "status": c.status, "reason": c.reason},
            **{"step": c.step, "seconds": round(c.seconds, 3), "bytes": c.bytes, "measures": dict(c.measures)},
            **{"change": describe_change(c, run.before.get(c.name)), "logs": dict(c.logs)},
        }
        for c in run.cells
    ]
    told = {
        **{"schema": SCHEMA, "ok": bool(run), "id": run.id, "file": run.file, "store": run.store},
        **{"started": run.started, "seconds": round(run.seconds, 3), "ran": run.ran, "cached": run.cached},
        "unrun": run.unrun,
        **{"counts": run.count_by_status(), "cells": cells, "notes": list(run.notes)},
    }
    return json.dumps(told, indent=1, ensure_ascii=False) + "\n"


def cells_by_target(run: FleetRun) -> tuple[list[str], list[tuple[str, str, list[CellOutcome | None]]]]:
    """Arrange the cells of a run as a table.

    Returns:
        the targets, and rows (model, variant, cells in the order of the targets). A missing cell is None.
    """
    targets = list(dict.fromkeys(cell.target for cell in run.cells))
    rows: dict[tuple[str, str], dict[str, CellOutcome]] = {}
    for cell in run.cells:
        rows.setdefault((cell.model, cell.variant), {})[cell.target] = cell
    return targets, [(m, v, [cells.get(t) for t in targets]) for (m, v), cells in rows.items()]


def describe_change(now: CellOutcome, before: CellOutcome | None) -> str:
    """Describe the changes of a cell since the previous run.

    A size must change by at least 0.1 %, a time or an error by at least 10 %.

    Returns:
        for example "was built, size +1.2 %"; "" without a change.
    """
    if before is None:
        return ""
    if before.status != now.status:
        told = [f"was {before.status}"]
    else:
        told = []
    if now.status == "stale":
        return "".join(told)
    if before.bytes and now.bytes and abs(now.bytes / before.bytes - 1) >= 0.001:
        told.append(f"size {100 * (now.bytes / before.bytes - 1):+.1f} %")
    for name, words in (("milliseconds", "time"), ("error", "error")):
        was = before.measures.get(name, 0.0)
        is_ = now.measures.get(name, 0.0)
        if was and is_ and abs(is_ / was - 1) >= 0.1:
            told.append(f"{words} {100 * (is_ / was - 1):+.0f} %")
    return ", ".join(told)


def show_fleet_run(
    console: Console, run: FleetRun, *, file: str | None = None, store: str | None = None, page: str | None = None
) -> None:
    """Print the table of a run, the reasons of cells that are not verified, and where the results are.

    Args:
        file: path of fleet.toml as the user typed it; None takes its name.
        store: store as the user typed it; None if the user gave none.
        page: path of the page; None if none was written.
    """
    targets, rows = cells_by_target(run)
    shown = WordTable([Column(escape_line(name)) for name in ("model", "variant", *targets)], padding=(0, 3))
    for model, variant, cells in rows:
        shown.add_row(_escaped_text(model), _escaped_text(variant), *(_status_text(c, run) for c in cells))
    console.print(shown)
    reasons = _cells_by_reason(run)
    for text, names in list(reasons.items())[:_MOST]:
        console.print()
        _print_line(console, f"{_abbreviate_names(names)}: {text}")
    if len(reasons) > _MOST:
        console.print(f"\nand {len(reasons) - _MOST} more reasons; --report writes all")
    for note in _abbreviate_notes(run.notes):
        _print_line(console, f"note: {note}")
    console.print()
    _print_line(console, summarize_counts(run))
    _print_line(console, f"store of the results: {run.store}", soft_wrap=True)
    if command := copy_command(run, file=file, store=store):
        _print_line(console, f"to copy the files of a cell: {command}", soft_wrap=True)
    _print_line(
        console, f"HTML page: {'none; --html FILE.html writes a page' if page is None else page}", soft_wrap=True
    )


def copy_command(run: FleetRun, *, file: str | None = None, store: str | None = None) -> str:
    """Write the command that copies the files of a cell out of the store.

    Args:
        file, store: see `show_fleet_run`.

    Returns:
        a command line for the first cell with files, else with logs; "" if no cell has any.
    """
    cell = next((c for c in run.cells if c.files), None) or next((c for c in run.cells if c.logs), None)
    if cell is None:
        return ""
    place = [] if store is None else ["--store", store]
    return shlex.join(["normdeploy", "fleet", "show", file or run.file, cell.name, *place, "-o", "FOLDER"])


def _escaped_text(text: str, style: str = "") -> Text:
    """Return text from a file or a store on one line, escaped so that rich finds no markup in it."""
    return Text(escape_line(text), style=style)


def _print_line(console: Console, text: str, *, style: str = "", soft_wrap: bool = False) -> None:
    console.print(_escaped_text(text, style), soft_wrap=soft_wrap)


def _status_text(cell: CellOutcome | None, run: FleetRun) -> Text:
    if cell is None:
        return Text("")
    return Text(cell.status, style=_COLOURS[cell.status]).append(
        escape_line(_change_suffix(cell, run)), style="default"
    )


def summarize_counts(run: FleetRun) -> str:
    """Summarize cells, steps and time of a run.

    Returns:
        one line.
    """
    counts = ", ".join(f"{count} {status}" for status, count in run.count_by_status().items())
    every = _pluralize(run.step_count, "step")
    if run.dry:
        steps = f"{run.cached} of {every} in the store"
    else:
        steps = f"{run.ran} of {every} run, {run.cached} from the store"
        if run.unrun:
            steps += f", {run.unrun} not run"
    return f"{_pluralize(len(run.cells), 'cell')}: {counts}; {steps}; {run.seconds:.1f} s"


def _pluralize(count: int, what: str) -> str:
    if count == 1:
        return f"{count} {what}"
    return f"{count} {what}s"


def run_to_markdown(run: FleetRun) -> str:
    """Write the table of a run for a pull request.

    Returns:
        Markdown.
    """
    targets, rows = cells_by_target(run)
    lines = []
    for model, variant, cells in rows:
        words = ["" if c is None else f"{_MARKS[c.status]} {c.status}{_change_suffix(c, run)}" for c in cells]
        lines.append((model, variant, *words))
    table = markdown_table(("model", "variant", *targets), lines)
    reasons = [f"{_abbreviate_names(names)}: {text}" for text, names in _cells_by_reason(run).items()]
    notes = [f"note: {note}" for note in _abbreviate_notes(run.notes)]
    text = f"{table}\n{summarize_counts(run)}\n\n{markdown_list([*reasons, *notes])}"
    return text.rstrip() + "\n"


def show_rechecks(console: Console, ends: Sequence[StepEnd]) -> None:
    """Print the outcome of each recheck, with the reason of each outcome that is not "ok"."""
    words = {"ok": "nothing got worse", "wrong": "worse", "failed": "failed", "not run": "not run"}
    shown = WordTable([Column("bundle"), Column("now"), Column("because")], padding=(0, 3))
    for end in ends:
        colour = _COLOURS["verified" if end.outcome == "ok" else "not run" if end.outcome == "not run" else "wrong"]
        shown.add_row(
            _escaped_text(end.step.removesuffix("/recheck")),
            Text(words[end.outcome], style=colour),
            _escaped_text(end.reason),
        )
    console.print(shown)
    counts = Counter(words[end.outcome] for end in ends)
    console.print(f"{_pluralize(len(ends), 'bundle')}: {', '.join(f'{n} {word}' for word, n in counts.items())}")


def show_steps(console: Console, found: Any, log: Callable[[Any, Any], str] | None = None) -> None:
    """Print the steps of a cell: command, key, inputs and outputs.

    Args:
        found: steps from `normdeploy.fleet.step_details.find_steps`.
        log: function that reads the log of a step; None prints no logs.
    """
    for name, outcome, record in found.steps:
        _print_line(console, f"{name}: {outcome}", style="bold")
        if record is None:
            continue
        _print_line(console, f"  normdeploy {shlex.join(record.depends['argv'])}")
        _print_line(
            console, f"  key {record.key}; {record.started}; {record.seconds:.1f} s, {record.peak / 2**20:.0f} MB"
        )
        for kind, files in (("reads", record.depends["inputs"]), ("makes", record.outputs)):
            for path, told in list(files.items())[:_FILES]:
                if isinstance(told, str):
                    digest = told
                else:
                    digest = f"{told.sha256} ({told.bytes} bytes)"
                _print_line(console, f"  {kind} {path} {digest}", soft_wrap=True)
            if len(files) > _FILES:
                console.print(f"  and {kind} {len(files) - _FILES} more")
        if record.reason:
            _print_line(console, f"  {record.reason}")
        if log is not None:
            for line in log(found, record).rstrip("\n").split("\n"):
                _print_line(console, line, soft_wrap=True)


def show_published(console: Console, done: PublishResult) -> None:
    """Print the outcome of publishing each cell."""
    words = {"published": "published as", "there": "is already in the registry:", "refused": "refused:"}
    for item in done.items:
        if item.outcome == "refused":
            style = "red"
        else:
            style = ""
        _print_line(
            console, f"{item.cell} {words[item.outcome]} {item.where or item.reason}", style=style, soft_wrap=True
        )
    for note in _abbreviate_notes(done.notes):
        _print_line(console, f"note: {note}")
    counts = Counter(item.outcome for item in done.items)
    console.print(
        f"{counts['published']} published, {counts['there']} already in the registry, {counts['refused']} refused"
    )


def _abbreviate_notes(notes: Sequence[str]) -> Sequence[str]:
    return [*notes[:_MOST], *([f"and {len(notes) - _MOST} more; --report writes all"] if len(notes) > _MOST else [])]


def _change_suffix(cell: CellOutcome, run: FleetRun) -> str:
    told = describe_change(cell, run.before.get(cell.name))
    if told:
        return f" ({told})"
    return ""


def _cells_by_reason(run: FleetRun) -> Mapping[str, Sequence[str]]:
    """Group the cells by reason, worst status first."""
    found: dict[str, list[str]] = {}
    for status in ("wrong", "failed", "stale", "not run", "built"):
        for cell in run.cells:
            if cell.status == status and cell.reason:
                at = cell.step.rsplit("/", 1)[-1]
                found.setdefault(f"{status} (step {at}): {cell.reason}", []).append(cell.name)
    return found


def group_names_by_reason(reasons: Mapping[str, str]) -> list[str]:
    """Group names that share a reason.

    Args:
        reasons: name → reason.

    Returns:
        one line for each reason, with the first names that have this reason.
    """
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return [f"{_abbreviate_names(some)}: {reason}" for reason, some in names.items()]


def _abbreviate_names(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
