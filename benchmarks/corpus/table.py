"""Write the rows of all tools as one table: ``benchmarks/results/corpus.md`` and ``corpus.json``."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .entry import MANIFEST, Entry, from_json

RESULTS = Path(__file__).parents[1] / "results"
Row = dict[str, Any]

_HEAD = """# Norms as exporters write them, and what becomes of them

{files} files: {norms} with norms that standard ONNX can say in single nodes (or that fold away), {open} of these not
so as exported; {lookalikes} lookalikes. Written by `python -m benchmarks.corpus` ({versions}).

A file counts as fused where every norm of it is the expected standard node or folded, in a valid file of standard ops
alone with right numbers. Numbers are right within max(2·error of the original file, 64 u·max|y|) of float64
(`benchmarks/corpus/judge.py`). A crash is an exception, a process that ends, a minute without an end, or a file that
onnxruntime can't load. The others keep a file's opset, below 17, 21 and 23 of which there is no node for some of
these norms to be fused into; bfloat16 has no kernels in onnxruntime's CPU provider, which is not counted against
anybody.
"""


def write(folder: Path) -> None:
    """Read the rows in ``folder`` and write both files."""
    entries = from_json((folder / MANIFEST).read_text())
    rows = {p.stem.removeprefix("rows-"): json.loads(p.read_text()) for p in sorted(folder.glob("rows-*.json"))}
    ours = {r["name"]: r for r in rows.pop("normdeploy")}
    by_exporter = [
        _exporter(name, [e for e in entries if e.exporter == name], ours)
        for name in dict.fromkeys(e.exporter for e in entries)
    ]
    tools = [_tool(entries, list(ours.values())), *(_tool(entries, found) for found in rows.values())]
    together = {r["name"] for found in rows.values() for r in found if r["fused"] and not r["was"]}
    tools.append(
        {"tool": "all others together", "newly fused": sum(e.expressible and e.name in together for e in entries)}
    )
    norms = [e for e in entries if e.expressible]
    head = _HEAD.format(
        files=len(entries),
        norms=len(norms),
        open=sum(not ours[e.name]["was"] for e in norms),
        lookalikes=sum(not e.expressible for e in entries),
        versions=", ".join(f"{p} {version(p)}" for p in ("torch", "onnx", "onnxscript", "onnxruntime-gpu"))
        + f", {platform.machine()}",
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "corpus.md").write_text(
        f"{head}\n{_markdown(tools)}\n## This project, by exporter\n\n{_markdown(by_exporter)}"
    )
    files = [
        _file(e, ours[e.name], {t: r for t, found in rows.items() for r in found if r["name"] == e.name})
        for e in entries
    ]
    summary = {"tools": tools, "exporters": by_exporter}
    lines = ",\n".join(json.dumps(f) for f in files)
    (RESULTS / "corpus.json").write_text(json.dumps(summary, indent=1)[:-2] + f',\n "files": [\n{lines}\n]}}\n')
    print((RESULTS / "corpus.md").read_text())


def _tool(entries: Sequence[Entry], rows: Sequence[Row]) -> Row:
    known = {e.name: e for e in entries}
    faults = Counter(kind for r in rows for kind in {_kind(f) for f in r["faults"]})
    open_ = [r for r in rows if known[r["name"]].expressible and not r["was"]]
    return {
        "tool": rows[0]["tool"],
        "newly fused": sum(r["fused"] and not r["faults"] for r in open_),
        "of": len(open_),
        "wrong numbers": faults["wrong"],
        "crashes": faults["crash"],
        "invalid files": faults["invalid"],
    }


def _kind(fault: str) -> str:
    start = fault.split(":")[0].split(" ")[0]
    return {"off": "wrong", "can't": "crash", "the": "invalid"}.get(start, start)


def _exporter(name: str, entries: Sequence[Entry], ours: dict[str, Row]) -> Row:
    rows = [ours[e.name] for e in entries]
    norms = [e for e in entries if e.expressible]
    worst = max(r["error"] / r["bound"] for r in rows)
    return {
        "exporter": name,
        "files": len(entries),
        "opsets": f"{min(e.opset for e in entries)}–{max(e.opset for e in entries)}",
        "norms": len(norms),
        "standard as exported": sum(ours[e.name]["was"] for e in norms),
        "standard now": sum(ours[e.name]["fused"] for e in norms),
        "lookalikes": len(entries) - len(norms),
        "refused": sum(not ours[e.name]["faults"] for e in entries if not e.expressible),
        "faults": sum(bool(r["faults"]) for r in rows),
        "worst error / bound": f"{worst:.2f}",
        "nodes": f"{sum(r['before'] for r in rows)} → {sum(r['after'] for r in rows)}",
    }


def _file(entry: Entry, ours: Row, others: dict[str, Row]) -> Row:
    return {
        "name": entry.name,
        "expect": entry.expect,
        "was": ours["was"],
        "fused": ours["fused"],
        "became": ours["became"],
        "nodes": [ours["before"], ours["after"]],
        "error": float(f"{ours['error']:.3g}"),
        "bound": float(f"{ours['bound']:.3g}"),
        "faults": ours["faults"],
        "others": {
            t: "fused" if r["fused"] and not r["was"] else _kind(r["faults"][0])
            for t, r in others.items()
            if r["faults"] or (r["fused"] and not r["was"])
        },
    }


def _markdown(rows: Sequence[Row]) -> str:
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([str(r.get(c, "")) for c in columns] for r in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
