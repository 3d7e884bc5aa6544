"""Render the HTML page of a fleet's run: colored cells by model and target, failures, changes, and the trend over runs.

The page is one HTML file as `normdeploy.reports.page_templates` describes. It loads nothing from the network and runs
no script. All text in the page is escaped, stripped of control characters and shortened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..reports.page_templates import sanitize_texts, template_environment
from .fleet_tables import cells_by_target, copy_command, describe_change, summarize_counts

if TYPE_CHECKING:
    from .outcomes import CellOutcome, FleetRun

_TONES = {
    **{"verified": "good", "built": "partly", "wrong": "bad", "failed": "bad", "not run": "muted", "stale": "warn"},
}
_SAID = {
    "verified": "all requested steps ran, and the results are correct",
    "built": "the engine was built but not run: no machine here has its target GPU",
    "wrong": "it runs, but its results are wrong",
    "failed": "a step ended without a result",
    "not run": "no machine here can build it",
    "stale": "an input has changed since it was made",
}
# Maximum number of rows of the table. The JSON report contains all rows.
_ROWS = 2000
# Maximum number of logs that the page itself contains.
_LOGS = 50
# Number of lines that are shown from the end of a log.
_LINES = 40
# Maximum number of characters of one text.
_LONGEST = 300


def render_fleet_page(
    run: FleetRun, log: Callable[[str], str], href: Callable[[str], str] | None = None, *, command: str | None = None
) -> str:
    """Render the page of a run.

    Args:
        log: function that returns the text of a log by its SHA-256.
        href: function that returns the link to a log by its SHA-256; None if a browser can't open the store.
        command: command that copies the files of a cell; None uses `normdeploy.fleet.fleet_tables.copy_command`.

    Returns:
        the page's HTML.

    Raises:
        NormdeployError: a library of the extra ``report`` is missing.
    """
    targets, rows = cells_by_target(run)
    bad = [c for c in run.cells if c.status in ("wrong", "failed")]
    shown = {
        "run": {"id": run.id, "file": run.file, "store": run.store, "started": run.started, "notes": run.notes[:50]},
        "summary": summarize_counts(run),
        "command": copy_command(run) if command is None else command,
        "counts": [(count, status, _TONES[status], _SAID[status]) for status, count in run.count_by_status().items()],
        "targets": targets,
        "rows": [
            (model, variant, _shared_time(cells), [_cell_context(c, run, href) for c in cells])
            for model, variant, cells in rows[:_ROWS]
        ],
        "left_out": max(0, len(rows) - _ROWS),
        "bad": [_failure_context(c, log) for c in bad[:_LOGS]],
        "bad_left_out": max(0, len(bad) - _LOGS),
        "machines": [dict(m) for m in run.machines],
    }
    if len(run.trend) > 1:
        plot = _plot_trend(run)
    else:
        plot = None
    return template_environment().get_template("fleet.html").render(sanitize_texts(shown, _LONGEST) | {"plot": plot})


def _cell_context(cell: CellOutcome | None, run: FleetRun, href: Callable[[str], str] | None) -> dict[str, Any] | None:
    if cell is None:
        return None
    told = [f"{value:.3g} ms" for name, value in cell.measures.items() if name == "milliseconds"]
    told += [f"{100 * value:.0f} % of the allowed error" for name, value in cell.measures.items() if name == "error"]
    return {
        "status": cell.status,
        "tone": _TONES[cell.status],
        "change": describe_change(cell, run.before.get(cell.name)),
        "bytes": cell.bytes,
        "told": told,
        "reason": cell.reason,
        "seconds": f"{own:.1f} s" if (own := cell.seconds - cell.shared_seconds) > 0 else "",
        "files": [(name, href(digest)) for name, digest in cell.files] if href is not None else [],
        "logs": [(step.rsplit("/", 1)[-1], href(digest)) for step, digest in cell.logs] if href is not None else [],
    }


def _shared_time(cells: Sequence[CellOutcome | None]) -> str:
    """Describe the time of the steps that the cells of a row share, such as the export. Return "" if no such step
    ran.
    """
    shared = max((cell.shared_seconds for cell in cells if cell is not None), default=0.0)
    return f"shared steps {shared:.1f} s" if shared > 0 else ""


def _failure_context(cell: CellOutcome, log: Callable[[str], str]) -> dict[str, Any]:
    digest = dict(cell.logs).get(cell.step, "")
    if digest:
        lines = log(digest).rstrip().splitlines()[-_LINES:]
    else:
        lines = []
    return {"name": cell.name, "status": cell.status, "step": cell.step, "reason": cell.reason, "log": lines}


def _plot_trend(run: FleetRun) -> Mapping[str, str]:
    """Plot the number of cells by status over the last runs."""
    from ..reports.svg_drawing import BAD, FIRST, MUTED, SECOND, MaxNLocator, draw_legend, figure_to_svg, open_figure

    runs = list(run.trend)
    groups = (("verified", FIRST), ("built", SECOND), ("wrong", BAD), ("failed", BAD), ("not run", MUTED))
    with open_figure(2.2) as (figure, axes):
        places = range(1, len(runs) + 1)
        for status, colour in groups:
            counts = [told.get(status, 0) for told in runs]
            if any(counts):
                axes.plot(
                    places, counts, color=colour, marker="o", markersize=3, linewidth=1.2, label=status,
                    linestyle=":" if status == "failed" else "-",
                )  # fmt: skip
        axes.set_xlabel("runs, latest at the right")
        axes.set_ylabel("cells")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        draw_legend(axes)
        first = runs[0]
        last = runs[-1]
        alt = "; ".join(f"{s}: {first.get(s, 0):g} → {last.get(s, 0):g}" for s, _ in groups if last.get(s, 0))
        return {"caption": f"The last {len(runs)} runs.", "alt": alt, "svg": figure_to_svg(figure, "trend")}
