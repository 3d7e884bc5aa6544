"""The race as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .bench import Entry, Race


def show_race(console: Console, race: Race) -> None:
    """One line for each contestant, those of a norm together; what was not run, and where and how all was measured."""
    for norm, entries in groupby(race.entries, key=lambda entry: entry.norm):
        if norm:
            console.print(Text(norm, style="bold"))
        console.print(_table(list(entries)))
    if not any(entry.norm for entry in race.entries):
        console.print(Text("inputs: " + ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in race.shapes.items())))
    threads = f"{race.threads} thread{'s' if race.threads > 1 else ''}"
    console.print(
        Text(f"{threads}, {race.warmup} rounds of warm-up, {race.rounds} counted, seed {race.seed}; errors against {race.reference}")
    )
    after = "" if race.load is None else f"; load {race.load:.1f} at the end"
    console.print(Text(f"{race.machine}{after}", style="dim"))
    for missed in race.not_run:
        console.print(Text(f"not run: {missed.runtime}: {missed.reason}", style="dim"))
    for note in race.notes:
        console.print(Text(f"note: {note}", style="yellow"))


def _table(entries: Iterable[Entry]) -> Table:
    entries = list(entries)
    far = any(entry.far_error is not None for entry in entries)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    what = "form" if any(entry.form for entry in entries) else "file"
    for column in ("runtime", what, "median ms", "p95", "p99", "time, of the first", "error", *(["around 1000"] if far else [])):
        table.add_column(column, overflow="fold", justify="left" if column in ("runtime", what) else "right")
    for entry in entries:
        table.add_row(*map(Text, _row(entry, far)), style="red" if entry.reason else "")
    return table


def _row(entry: Entry, far: bool) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else f"{value:{form}}"

    ratio = f"{entry.ratio:.2f} ({entry.interval[0]:.2f} to {entry.interval[1]:.2f})" if entry.ratio is not None and entry.interval else ""
    times = [number(value, ".3g") for value in (entry.median, entry.p95, entry.p99)]
    errors = [number(entry.error, ".1e"), *([number(entry.far_error, ".1e")] if far else [])]
    where = " · ".join(part for part in (entry.file, entry.form) if part)
    return [entry.runtime, f"{where}\n{entry.reason}".strip() if entry.reason else where, *times, ratio, *errors]
