"""What a verb did: tables for the terminal and the same as JSON.

The JSON's schema is ``normdeploy/report/1``. A later version may add keys; one that changes or removes a key gets the next number.
A number that is not finite is written as the string "nan", "inf" or "-inf"; what is not known or does not apply is null.

    schema      "normdeploy/report/1"
    normdeploy  the version that wrote the report
    verb        "export" | "optimize" | "inspect" | "build" | "verify"
    files       role -> path as given; roles: "source", "output", "model", "onnx", "engines"
    opset       of the ONNX file
    nodes       {"before", "after"}: number of nodes
    norms       one object for each normalization of the model, in the graph's order:
        kind, status ("fused" | "folded" | "kept" | "refused" | "undone"), module (qualified path), tensor, spelling (op types
        found), became, reason, axes, epsilon, dtype, notes, proved (where it was seen: "identity", "onnxruntime run", ...),
        certificate: null, or identity, error and bound (relative, float64), cases, worst, rounding_before, rounding_after and
        rounding_bound (absolute, in onnxruntime, in the model's own type), rounding_ok, note
    engine      path, bytes, runtime, version (of the library), compute_capabilities (empty: every GPU that the library builds for),
        profile (input -> [min, opt, max] shapes), layers, seconds, proved ("built only": nothing was run)
    parity      ok, rule (reference, eager_multiple, ulps), cases (names), notes, seconds, not_run (runtime, reason), and results:
        output, runtime, dtype, max_abs_error, max_rel_error, allowed, verdict ("pass" | "fail"), case (the worst), near_ties, reason
    notes       what else the user should know, one string each
    seconds     stage -> seconds
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .records import Finding, Summary

if TYPE_CHECKING:
    from .build import Engine
    from .compare import Comparison

SCHEMA = "normdeploy/report/1"
COLOURS = {"fused": "green", "folded": "green", "kept": "cyan", "refused": "yellow", "undone": "red"}


@dataclass(frozen=True)
class Report:
    """The account of one run of one verb; ``json`` and ``show`` say the same."""

    verb: str
    files: Mapping[str, str]
    summary: Summary | None = None
    engine: Engine | None = None
    parity: Comparison | None = None
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    def json(self) -> str:
        """The document described at the top of this module."""
        from . import __version__

        summary = self.summary
        document = {
            "schema": SCHEMA,
            "normdeploy": __version__,
            "verb": self.verb,
            "files": self.files,
            "opset": summary.opset if summary else None,
            "nodes": {"before": summary.nodes_before, "after": summary.nodes_after} if summary else None,
            "norms": [_norm(finding) for finding in summary.findings] if summary else [],
            "engine": None if self.engine is None else {**vars(self.engine), "proved": "built only"},
            "parity": None if self.parity is None else self.parity.to_json(),  # a failed comparison is false
            "notes": self.notes,
            "seconds": self.seconds,
        }
        return json.dumps(_plain(document), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def show(self, console: Console) -> None:
        """Print the tables."""
        if self.summary is not None:
            show_norms(console, self.summary, planned=self.verb == "inspect")
        if self.engine is not None:
            show_engine(console, self.engine)
        if self.parity is not None:
            show_parity(console, self.parity)
        for note in self.notes:
            console.print(Text(f"note: {note}", style="yellow"))


def _norm(finding: Finding) -> dict[str, Any]:
    document = asdict(finding)
    if finding.certificate is not None:
        document["certificate"]["rounding_ok"] = finding.certificate.rounding_ok
    return document


def _plain(value: Any) -> Any:
    """``value`` in the types that JSON has."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@dataclass(frozen=True)
class Group:
    """Findings that differ in nothing but the numbers in their module paths, such as the layers of an encoder."""

    module: str  # "layers.{0..11}.norm"
    findings: tuple[Finding, ...]

    @property
    def first(self) -> Finding:
        return self.findings[0]


def grouped(findings: Iterable[Finding]) -> list[Group]:
    """Findings by what the reader would call the same line, in the order of their first members."""
    alike: dict[tuple[Any, ...], list[Finding]] = {}
    for f in findings:
        said = (f.kind, f.status, f.spelling, _unnumbered(f.became), _unnumbered(f.reason), f.notes, f.proved, f.axes, f.epsilon, f.dtype)
        failed = f.certificate is not None and not f.certificate
        alike.setdefault((said, re.sub(r"\d+", "#", f.module) or f.tensor, failed), []).append(f)
    return [group for members in alike.values() for group in _by_path(members)]


def _unnumbered(text: str) -> str:
    """``text`` with the numbers inside quoted names taken out: 'layers.3.conv' and 'layers.4.conv' are named alike."""
    return re.sub(r"'[^']*'", lambda name: re.sub(r"\d+", "*", name[0]), text)


def _by_path(findings: list[Finding]) -> list[Group]:
    """Findings whose paths have the same words, merged number by number, the last one first."""
    words = re.split(r"\d+", findings[0].module)
    rows: list[tuple[tuple[frozenset[int], ...], list[Finding]]] = [
        (tuple(frozenset({int(n)}) for n in re.findall(r"\d+", f.module)), [f]) for f in findings
    ]
    for place in reversed(range(-1, len(words) - 1)):
        merged: dict[tuple[frozenset[int], ...], list[tuple[tuple[frozenset[int], ...], list[Finding]]]] = {}
        for numbers, members in rows:
            others = numbers if place < 0 else numbers[:place] + numbers[place + 1 :]
            merged.setdefault(others, []).append((numbers, members))
        rows = [
            (
                tuple(frozenset().union(*column) for column in zip(*(numbers for numbers, _ in same), strict=True)),
                [f for _, members in same for f in members],
            )
            for same in merged.values()
        ]
    return [Group(_path(words, numbers), tuple(members)) for numbers, members in rows]


def _path(words: list[str], numbers: tuple[frozenset[int], ...]) -> str:
    return words[0] + "".join(_range(n) + word for n, word in zip(numbers, words[1:], strict=True))


def _range(numbers: frozenset[int]) -> str:
    low, high = min(numbers), max(numbers)
    if low == high:
        return str(low)
    if len(numbers) == high - low + 1:
        return f"{{{low}..{high}}}"
    return "{" + ",".join(map(str, sorted(numbers))) + "}"


def show_norms(console: Console, summary: Summary, *, planned: bool = False) -> None:
    """The table of norms, what is left as it is with the reasons, and the totals; ``planned``: nothing was changed yet."""
    done = [f for f in summary.findings if f.status in ("fused", "folded", "kept")]
    left = [f for f in summary.findings if f.status in ("refused", "undone")]
    if done:
        table = _table("module", "found", "what would become of it" if planned else "what became of it", "proof")
        for group in grouped(done):
            table.add_row(*_done_row(group))
        console.print(table)
    if left:
        table = _table("module", "found", "left as it is, because")
        for group in grouped(left):
            table.add_row(_where(group), _found(group), Text(_reason(group), style=COLOURS[group.first.status]))
        console.print(table)
    counts = {status: sum(f.status == status for f in summary.findings) for status in COLOURS}
    said = ", ".join(f"{n} {status}" for status, n in counts.items() if n) or "no normalization found"
    nodes = f"{summary.nodes_before} nodes{' now' if planned else ' before'}, {summary.nodes_after} after"
    console.print(f"{said}; {nodes}; opset {summary.opset}")


def show_engine(console: Console, engine: Engine) -> None:
    """What was built, and that it was only built."""
    gpus = ", ".join(engine.compute_capabilities) or "every GPU that it knows"
    size = f"{engine.bytes / 1e6:.1f} MB, {engine.layers} layers"
    console.print(Text(f"{engine.path}: {engine.runtime} {engine.version}, {size}, for {gpus}"))
    for name, (low, best, high) in engine.profile.items():
        console.print(Text(f"  {name}: {_shape(low)} to {_shape(high)}, best at {_shape(best)}"))
    console.print("proved: built only, not run")


def show_parity(console: Console, parity: Comparison) -> None:
    """One line for each output and runtime, what was not run with the reason, and the verdict."""
    from .compare import COLUMNS

    table = _table(*COLUMNS)
    for result in parity.results:
        table.add_row(*map(Text, result.row()), style="" if result else "red")
    console.print(table)
    for missed in parity.not_run:
        console.print(Text(f"not run: {missed.runtime}: {missed.reason}", style="dim"))
    for note in parity.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    verdict = Text("verified", style="green") if parity else Text("NOT verified", style="red")
    console.print(verdict.append(f" on {len(parity.cases)} inputs against the model in float64", style="default"))


def _shape(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes))


def _where(group: Group) -> Text:
    count = f" ×{len(group.findings)}" if len(group.findings) > 1 else ""
    return Text(group.module or f"({group.first.tensor})").append(count, style="dim")


def _found(group: Group) -> Text:
    return Text(group.first.kind, style="bold").append(f" {group.first.spelling}" if group.first.spelling else "", style="not bold dim")


def _reason(group: Group) -> str:
    several = len(group.findings) > 1
    return _unnumbered(group.first.reason) if several else group.first.reason


def _done_row(group: Group) -> tuple[Text, Text, Text, Text]:
    first = group.first
    became = _unnumbered(first.became) if len(group.findings) > 1 else first.became
    what = Text(first.status, style=COLOURS[first.status]).append(f" {became}" if became else "", style="default")
    if first.reason:
        what.append(f"; {_reason(group)}", style="dim")
    for note in first.notes:
        what.append(f"\n{note}", style="yellow")
    return _where(group), _found(group), what, Text("\n".join(_proof(group)))


def _proof(group: Group) -> list[str]:
    """Where the claim was seen, the certificates' worst errors with it."""
    proofs = [f.certificate for f in group.findings if f.certificate is not None]
    if not proofs:
        return list(group.first.proved)
    worst = max(proofs, key=lambda c: math.inf if math.isnan(c.error) else c.error)
    said = {"identity": f"identity {worst.error:.1g} ≤ {worst.bound:.0g}, {sum(c.cases for c in proofs)} inputs"}
    rounding = [c for c in proofs if c.rounding_after is not None and c.rounding_bound is not None]
    if rounding:
        ran = max(rounding, key=lambda c: (c.rounding_after or 0) / (c.rounding_bound or 1))
        sign = "≤" if ran.rounding_ok else ">"
        said["onnxruntime run"] = f"onnxruntime run {ran.rounding_after:.1g} {sign} {ran.rounding_bound:.1g}"
    return [said.get(place, place) for place in group.first.proved]


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
