"""Write the report as a page: one HTML file without scripts that makes no network requests.

The page is made only from the JSON document (`normdeploy.reports.report`), so a saved report can become a page later.
All texts come from untrusted files. They are escaped, control characters are replaced, and long texts are truncated.
The page's content policy stops the browser from loading anything. Long tables are truncated, with a note on the rows
left out, so that every page stays below 2 MB.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import NormdeployError
from ..findings.records import STATUS_WORDS, NodeCounts
from . import diagram_svg
from .page_rows import PageRow, TruncatedRows, float32_rows, norm_rows, parse_finding
from .page_templates import format_bytes, format_number, sanitize_texts, template_environment
from .race_summary import describe_fastest
from .report import SCHEMA

if TYPE_CHECKING:
    from .plots import Plot

# Maximum number of letters of one text
_LONGEST = 300
_COMMAND = 4000
# Maximum number of runtimes with a drift plot, and of norms with a race plot
_DRAWN = 6
# Maximum number of entries of one race in a plot
_ENTRIES = 12
_LEFT = tuple(status for status, word in STATUS_WORDS.items() if word == "skipped")
# Keys of ``environment`` that describe the machine; all other keys have versions.
_MACHINE = ("cpu", "system", "driver")
_OPTIONAL = (
    "bisection",
    "command",
    "engine",
    "engine_layers",
    "notes",
    "parity",
    "precision",
    "quantization",
    "race",
    "seconds",
)
_SUBJECT = ("source", "model", "onnx", "output")


def render_page(document: Mapping[str, Any]) -> str:
    """Render the HTML page of a report.

    Args:
        document: output of ``Report.to_json``, parsed, with the schema ``normdeploy/report/1``. Missing keys are left
            out of the page.

    Returns:
        HTML text.

    Raises:
        NormdeployError: the document has another schema, or a library of the extra ``report`` is missing.
    """
    if document.get("schema") != SCHEMA:
        raise NormdeployError(
            f"can't make a page from this report: its schema is {document.get('schema')!r}, not {SCHEMA!r}"
        )
    report = {
        name: sanitize_texts(value, _COMMAND if name == "command" else _LONGEST) for name, value in document.items()
    }
    return template_environment().get_template("report.html").render(_page_context(report))


def _page_context(report: dict[str, Any]) -> dict[str, Any]:
    """Compute the variables of the template."""
    rows = norm_rows(report.get("norms") or ())
    parity = report.get("parity")
    precision = report.get("precision")
    race = report.get("race")
    quantization = report.get("quantization")
    files = report.get("files") or {}
    versions = report.get("environment") or {"normdeploy": report["normdeploy"]}
    return {
        "report": (
            dict.fromkeys(_OPTIONAL) | {"files": {}, "sizes": {}} | {k: v for k, v in report.items() if v is not None}
        ),
        "subject": _subject_names(files) or report["verb"],
        "output": _output_name(files),
        "stats": _headline_figures(report),
        "done": TruncatedRows.truncate_rows([row for row in rows if row.status not in _LEFT]),
        "left": TruncatedRows.truncate_rows([row for row in rows if row.status in _LEFT]),
        "explain": _explain_command(files, rows),
        "versions": {k: v for k, v in versions.items() if k not in _MACHINE and not k.startswith("gpu")},
        "machine": {k: v for k, v in versions.items() if k in _MACHINE or k.startswith("gpu")},
        "islands": TruncatedRows.truncate_rows(float32_rows(precision["islands"])) if precision else None,
        "layers": TruncatedRows.truncate_rows(quantization["layers"]) if quantization else None,
        "forms": TruncatedRows.truncate_rows(report["engine"]["norms"]) if report.get("engine") else None,
        "builds": _engine_contexts(report.get("engine_layers")),
        "changes": TruncatedRows.truncate_rows(_changed_norms(report.get("engine_layers"))),
        "results": TruncatedRows.truncate_rows(parity["results"]) if parity else None,
        "drift": TruncatedRows.truncate_rows(_wrong_drift_points(parity)) if parity else None,
        "points": TruncatedRows.truncate_rows(parity.get("drift") or ()) if parity else None,
        "faults": TruncatedRows.truncate_rows(report["bisection"]["faults"]) if report.get("bisection") else None,
        "busy": _describe_machine_load(race or {}),
        "entries": TruncatedRows.truncate_rows(race["entries"]) if race else None,
        "plots": _draw_plots(report),
        "pictures": [_diagram_context(picture, i) for i, picture in enumerate(report.get("pictures") or ())],
    }


def _engine_contexts(told: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return each engine whose layers were read, with its norms as rows."""
    return [{**build, "rows": TruncatedRows.truncate_rows(build["norms"])} for build in (told or {}).get("builds", ())]


def _changed_norms(told: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the norms that differ between two engines, each with its form in both."""
    changes = (told or {}).get("changes") or ()
    return [
        {
            **change,
            "forms": [
                None if change[side] is None else build["norms"][change[side]]
                for side, build in zip(("first", "second"), (told or {})["builds"], strict=True)
            ],
        }
        for change in changes
        if change["changed"]
    ]


def _subject_names(files: Mapping[str, str]) -> str:
    """Return the names of the files that the report is about, including "source 2" and so on."""
    own = next((role for role in _SUBJECT if role in files), "")
    return ", ".join(Path(path).name for role, path in files.items() if own and role.partition(" ")[0] == own)


def _output_name(files: Mapping[str, str]) -> str:
    """Return the name of the file that the verb wrote; "" if it wrote none, or if the page is only about this file."""
    if "output" not in files or not any(role in files for role in _SUBJECT[:-1]):
        return ""
    return Path(files["output"]).name


def _describe_machine_load(race: Mapping[str, Any]) -> str:
    """Describe how many cores a race had, and how many processes competed for them."""
    machine = race.get("machine") or {}
    if "cores" in machine:
        words = [f"{machine['cores']} core{'' if machine['cores'] == 1 else 's'}"]
    else:
        words = []
    loads = (("before", machine.get("load")), ("at the end", race.get("load")))
    words += [f"CPU load {format_number(load)} {when}" for when, load in loads if load is not None]
    if words:
        return f"{', '.join(words)}."
    return ""


def _explain_command(files: Mapping[str, str], rows: Sequence[PageRow]) -> str:
    """Return the command that explains the first norm that was left unchanged."""
    subject = next((files[role] for role in ("source", "model", "onnx") if role in files), "FILE")
    tensor = next((row.tensor for row in rows if row.status in _LEFT), "NAME")
    return shlex.join(["normdeploy", "inspect", subject, "--explain", tensor])


def _draw_plots(report: Mapping[str, Any]) -> dict[str, list[Plot]]:
    """Draw the plots of each section. Plots of a single dot are omitted, because a table shows the same.

    Returns:
        the plots of each section.
    """
    from . import engine_plots, plots, quantization_plots

    certificates = [norm["certificate"] for norm in report.get("norms") or () if norm["certificate"]]
    ops = report.get("ops") or {}
    race = report.get("race") or {"entries": ()}
    drawn: list[tuple[str, Plot | None]] = []
    exact = [c for c in certificates if c.get("method") == "exact" and c["identity"]]
    others = [c for c in certificates if c.get("method") != "exact"]
    drawn += [
        ("certificates", plot(some))
        for plot, some in ((plots.plot_proof_errors, exact), (plots.plot_identity_errors, others))
        if len(some) > 1
    ]
    if sum(c["rounding_after"] is not None for c in certificates) > 1:
        drawn.append(("certificates", plots.plot_rounding(certificates)))
    if ops.get("before") and ops.get("after"):
        drawn.append(("ops", plots.plot_op_counts(ops["before"], ops["after"])))
    builds = (report.get("engine_layers") or {}).get("builds") or ()
    drawn += [
        ("engine_layers", plot(builds)) for plot in (engine_plots.plot_engine_share, engine_plots.plot_norm_times)
    ]
    layers = (report.get("quantization") or {}).get("layers") or ()
    drawn += [
        ("quantization", plot(layers))
        for plot, key in ((quantization_plots.plot_ranges, "low"), (quantization_plots.plot_costs, "error"))
        if sum(layer[key] is not None for layer in layers) > 1
    ]
    runs = _group_by_name(
        (report.get("parity") or {}).get("drift") or (),
        lambda p: " · ".join(filter(None, (p["runtime"], p.get("file")))),
    )
    drawn += [
        ("drift", plots.plot_drift(name, points, i))
        for i, (name, points) in enumerate(list(runs.items())[:_DRAWN])
        if len(points) > 1
    ]
    races = _group_by_name([e for e in race["entries"] if not e.get("reason")], lambda e: e.get("norm") or "")
    drawn += [
        ("race", plots.plot_race(norm, ran[:_ENTRIES], i)) for i, (norm, ran) in enumerate(list(races.items())[:_DRAWN])
    ]
    sections = ("certificates", "ops", "engine_layers", "quantization", "drift", "race")
    kept: dict[str, list[Plot]] = {section: [] for section in sections}
    for section, plot in drawn:
        if plot is not None:
            kept[section].append(plot)
    return kept


def _diagram_context(picture: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Draw a norm's graph before and after the rewrite, as SVG and in words."""
    count = len(picture["tensors"])
    forms = [("now", picture["before"]), ("optimized", picture["after"])]
    drawn = [
        (when, diagram_svg.draw_diagram(boxes, f"head-{number}-{when}"), diagram_svg.diagram_caption(boxes))
        for when, boxes in forms
        if boxes
    ]
    name = picture["module"] or picture["tensors"][0]
    return {
        "name": name,
        "kind": picture["kind"],
        "status": STATUS_WORDS[picture["status"]],
        "count": count,
        "forms": drawn,
    }


def _group_by_name(
    values: Iterable[Mapping[str, Any]], name: Callable[[Mapping[str, Any]], str]
) -> dict[str, list[Mapping[str, Any]]]:
    """Group values by name, in the order of each name's first value."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for value in values:
        groups.setdefault(name(value), []).append(value)
    return groups


def _wrong_drift_points(parity: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the drift points that exceed the allowed error or have a reason, in their order."""
    return [p for p in parity.get("drift") or () if p.get("reason") or not float(p["error"]) <= float(p["allowed"])]


def _headline_figures(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (value, label, tone) of each figure at the top of the page."""
    stats: list[tuple[str, str, str]] = []
    tones = {"fused": "good", "folded": "good", "kept": "", "skipped": "warn"}
    counts = Counter(STATUS_WORDS[norm["status"]] for norm in report.get("norms") or ())
    stats += [(str(counts[word]), word, tone) for word, tone in tones.items() if counts[word]]
    if told := [parse_finding(norm) for norm in report.get("norms") or () if "nodes_left" in norm]:
        stats.append((str(NodeCounts.of_findings(told)), "norm nodes", ""))
    if nodes := report.get("nodes"):
        stats.append((str(NodeCounts(nodes["before"], nodes["after"])), "all nodes", ""))
    if report.get("opset"):
        stats.append((str(report["opset"]), "opset", ""))
    if parity := report.get("parity"):
        verdict = ("verified", "good") if parity["ok"] else ("not verified", "bad")
        stats.append(
            (verdict[0], f"on {len(parity['cases'])} {'input' if len(parity['cases']) == 1 else 'inputs'}", verdict[1])
        )
    if faults := (report.get("bisection") or {}).get("faults"):
        stats.append((str(len(faults)), "fault" if len(faults) == 1 else "faults", "bad"))
    if precision := report.get("precision"):
        stats.append((precision["to"], f"{precision['kept']} of {precision['nodes']} nodes in float32", ""))
    if quantization := report.get("quantization"):
        count = sum(layer["status"] == "quantized" for layer in quantization["layers"])
        stats.append((quantization["to"], f"{count} of {len(quantization['layers'])} linear layers", ""))
    if engine := report.get("engine"):
        stats.append((format_bytes(engine["bytes"]), f"engine for {engine['runtime']} {engine['version']}", ""))
    for build in (report.get("engine_layers") or {}).get("builds") or ():
        stats.append((str(len(build["norms"])), f"norms in {len(build['layers'])} layers", ""))
        if build["total_ms"] and build["norm_ms"] is not None:
            stats.append((f"{100 * build['norm_ms'] / build['total_ms']:.1f} %", "of the time in layers of norms", ""))
    if race := report.get("race"):
        ran = [e for e in race["entries"] if not e.get("reason") and not e.get("norm")]
        best = min(ran, key=lambda e: float(e["median"]), default=None)
        if best is not None:
            stats.append((f"{format_number(best['median'])} ms", describe_fastest(ran) or "the only one timed", ""))
    return stats
