"""Print the result of ``bench`` as tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ...findings.console_tables import Column, WordTable, make_table
from ...reports.race_summary import describe_fastest

if TYPE_CHECKING:
    from .model_benchmark import Race, RaceEntry


def show_race(console: Console, race: Race) -> None:
    """Print a line for each contestant, grouped by norm, then the errors, the setup, the machine and the notes."""
    for norm, group in groupby(race.entries, key=lambda entry: entry.norm):
        entries = list(group)
        one = norm and len({entry.runtime for entry in entries}) == 1
        if norm:
            console.print(Text(f"{norm}, {entries[0].runtime}" if one else norm, style="bold"))
        console.print(_entry_table(entries, runtimes=not one))
        if fastest := describe_fastest([vars(entry) for entry in entries]):
            console.print(Text(fastest))
    for entry in race.entries:
        if entry.reason:
            who = " · ".join(filter(None, (entry.norm, entry.runtime, entry.file, entry.form)))
            console.print(Text(f"not timed: {who}: {entry.reason}", style="red"))
    if not any(entry.norm for entry in race.entries):
        console.print(
            Text("inputs: " + ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in race.shapes.items()))
        )
    threads = f"{race.threads} thread{'s' if race.threads > 1 else ''}"
    console.print(
        Text(
            f"{threads}, {race.warmup} rounds of warm-up, {race.rounds} timed, seed {race.seed}; errors against"
            f" {race.reference}"
        )
    )
    if race.load is None:
        after = ""
    else:
        after = f"; CPU load {race.load:.1f} at the end"
    console.print(Text(f"{race.machine}{after}", style="dim"))
    for missed in race.not_run:
        console.print(Text(f"not run: {missed.runtime}: {missed.reason}", style="dim"))
    for note in race.notes:
        console.print(Text(f"note: {note}", style="yellow"))


def _entry_table(entries: Sequence[RaceEntry], runtimes: bool) -> WordTable:
    far = any(entry.far_error is not None for entry in entries)
    if any(entry.form for entry in entries):
        what = "form"
    else:
        what = "file"
    names = [Column(name) for name in (*(["runtime"] if runtimes else []), what)]
    numbers = [
        Column(name, whole=True, justify="right")
        for name in (
            "median\nms",
            "p95\nms",
            "p99\nms",
            "ratio to\nthe first",
            "95 %\ninterval of\nthe ratio",
            *(["error for\ninputs\naround 0", "error for\ninputs\naround\n1000"] if far else ["relative\nerror"]),
        )
    ]
    table = make_table(*names, *numbers, padding=(0, 1))
    for entry in entries:
        table.add_row(*map(Text, _entry_cells(entry, runtimes, far)), style="red" if entry.reason else "")
    return table


def _entry_cells(entry: RaceEntry, runtimes: bool, far: bool) -> list[str]:
    def format_number(value: float | None, form: str) -> str:
        if value is None:
            return ""
        return f"{value:{form}}"

    times = [format_number(value, ".3g") for value in (entry.median, entry.p95, entry.p99)]
    if entry.interval is None:
        interval = ""
    else:
        interval = "{:.2f}–{:.2f}".format(*entry.interval)
    errors = [format_number(entry.error, ".1e"), *([format_number(entry.far_error, ".1e")] if far else [])]
    where = " · ".join(filter(None, (entry.file, entry.form)))
    return [*([entry.runtime] if runtimes else []), where, *times, format_number(entry.ratio, ".2f"), interval, *errors]
