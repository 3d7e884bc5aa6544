"""What the verbs did, as tables for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import NEITHER, escape_line
from ..findings.records import Finding, Summary
from .census_tables import show_census
from .drift_outline import DRIFT, outline_drift
from .finding_groups import (
    COLOURS,
    FindingGroup,
    describe_outcome,
    describe_proof,
    describe_reason,
    group_findings,
    kind_text,
    location_text,
)
from .quantization_tables import show_layers

if TYPE_CHECKING:
    from ..engines.ep_context import EpContext
    from ..engines.norm_implementations import Implementation
    from ..verbs.build.build_function import Engine
    from ..verbs.run.run_function import Inference
    from ..verbs.verify.comparison_result import Comparison

_ORDER = ("fused", "folded", "reduced", "kept", "refused", "undone")
# than norms, that the rewrites make nodes of
_OTHERS = {
    "attention": ("Attention",),
    "activation": ("Gelu", "HardSwish", "HardSigmoid", "Sigmoid", "Tanh", "Softsign"),
}
# columns of a terminal, from which on the comparison's table fits as it is
_WIDE = 100


def show_norms(console: Console, summary: Summary, *, planned: bool = False) -> None:
    """The norms, what is left as it is with the reasons, and the totals; ``planned``: nothing was changed yet, and all
    is wanted."""
    if planned:
        show_census(console, summary)
        if summary.layers:
            show_layers(console, summary.layers)
    else:
        _show_done_norms(console, summary)
    counts = Counter("reduced" if f.remains else f.status for f in summary.findings)
    text = (
        ", ".join(f"{counts[status]} {_describe_status(summary, status)}" for status in _ORDER if counts[status])
        or "no normalization found"
    )
    nodes = f"{summary.nodes_before} nodes{' now' if planned else ' before'}, {summary.nodes_after} after"
    others = "".join(
        f"; {n} {word}{'s' * (n > 1)} as one node each"
        for word, ops in _OTHERS.items()
        if (n := _count_added_nodes(summary, ops))
    )
    console.print(f"{text}; {nodes}{others}; opset {summary.opset}")


def _count_added_nodes(summary: Summary, ops: tuple[str, ...]) -> int:
    """How many nodes of these ops there are now that there were not."""
    return sum(max(0, summary.ops_after.get(op, 0) - summary.ops_before.get(op, 0)) for op in ops)


def _describe_status(summary: Summary, status: str) -> str:
    """The word for a status; of norms that could not be folded away as a whole also what is left of them."""
    if status != "reduced":
        return status
    left = Counter(f.remains for f in summary.findings if f.remains)
    return (
        "reduced to one scale and shift (left: "
        + ", ".join(f"{n} × {' and '.join(ops.split())}" for ops, n in left.items())
        + ")"
    )


def _show_done_norms(console: Console, summary: Summary) -> None:
    done = [f for f in summary.findings if f.status in ("fused", "folded", "kept")]
    left = [f for f in summary.findings if f.status in ("refused", "undone")]
    if done:
        table = _make_table("module", "found", "what became of it", "proof")
        for group in group_findings(done):
            table.add_row(*_outcome_row(group))
        console.print(table)
    if left:
        table = _make_table("module", "found", "left as it is, because")
        for group in group_findings(left):
            table.add_row(
                location_text(group),
                kind_text(group),
                Text(describe_reason(group), style=COLOURS[group.first_finding.status]),
            )
        console.print(table)


def show_engine(console: Console, engine: Engine) -> None:
    """What was built, and that it was only built."""
    gpus = ", ".join(engine.compute_capabilities) or "every GPU that it knows"
    size = f"{engine.bytes / 1e6:.1f} MB, {engine.layers} layers"
    console.print(Text(f"{engine.path}: {engine.runtime} {engine.version}, {size}, for {gpus}"))
    if engine.norms:
        show_forms(console, engine.norms)
    if engine.ep_context is not None:
        console.print(
            Text(f"  EPContext for onnxruntime's TensorRT-RTX provider, engine {_context_location(engine.ep_context)}")
        )
    for index, profile in enumerate((engine.profile, *engine.more_profiles)):
        of = f"profile {index}, " if engine.more_profiles else ""
        for name, (low, best, high) in profile.items():
            console.print(
                Text(f"  {of}{name}: {_format_shape(low)} to {_format_shape(high)}, best at {_format_shape(best)}")
            )
    for note in engine.notes:
        console.print(Text(f"note: {note}"))
    if engine.types:
        console.print(
            Text(
                "layers by type, as the file says: "
                + ", ".join(f"{count} {kind}" for kind, count in engine.types.items())
            )
        )
    console.print("proved: built only, not run")


def _context_location(context: EpContext) -> str:
    if context.file:
        return f"in {context.file}"
    return "in the file"


def show_forms(console: Console, norms: Sequence[Implementation]) -> None:
    """In which form each norm is in the engine's network, those of all layers in one line."""
    table = _make_table("module", "norm", "built as", "because")
    for group in group_findings(Finding(n.op, "kept", n.node, n.module, became=n.form, reason=n.reason) for n in norms):
        table.add_row(
            location_text(group),
            kind_text(group),
            Text(group.first_finding.became),
            Text(group.first_finding.reason, style="dim"),
        )
    console.print(table)


def show_parity(console: Console, parity: Comparison) -> None:
    """One line for each output and runtime, why some fail, where the error grows, what was not run with the reason, and
    the verdict."""
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
        table = _make_table("file", *DRIFT)
        for row in outline_drift(parity.drift):
            table.add_row(*map(Text, row))
        console.print(table)
    for missed in parity.not_run:
        console.print(Text(f"not run: {missed.runtime}: {missed.reason}", style="dim"))
    for note in parity.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    sentence = Text(
        describe_verdict(parity), style="red" if not parity else "yellow" if parity.beyond_default else "green"
    )
    console.print(sentence.append(_describe_inputs(parity), style="default"))


def failure_lines(parity: Comparison) -> list[str]:
    """What is wrong, a line each, and the verdict: all that a quiet run says of a comparison that fails."""
    lines = [
        f"fail: {', '.join(filter(None, (r.output, r.runtime, r.file)))}: "
        + (r.reason or f"error {r.max_abs_error:.2e}, allowed {r.allowed:.2e}")
        + (f", at {r.case}" if r.case and not r.rules else "")
        for r in parity.results
        if not r and r.file
    ]
    missed = [f"not run: {', '.join(filter(None, (m.runtime, m.file)))}: {m.reason}" for m in parity.not_run]
    return [
        *lines,
        *_altered_weight_lines(parity),
        *(missed if not lines else ()),
        describe_verdict(parity) + _describe_inputs(parity),
    ]


def _altered_weight_lines(parity: Comparison) -> list[str]:
    wrong = [w for w in parity.weights if not w]
    traced = [f"fail: {parity.trace}"] if parity.trace else []
    return traced + [
        f"fail: {w.file}: weight {w.name}{f' in {w.module}' if w.module else ''}: {w.reason}" for w in wrong
    ]


def describe_verdict(parity: Comparison) -> str:
    """By which rules, too, where some were given."""
    if not parity:
        if parity.outcome == "failed":
            return "NOT verified"
        return NEITHER
    if parity.unrun:
        left_out = f", but for {', '.join(m.file for m in parity.unrun)}, which was not run,"
    else:
        left_out = ""
    if parity.up_to is not None:
        far = f" up to {parity.up_to} input elements"
    else:
        far = ""
    limits = f" {'; '.join(parity.limits)};" if parity.limits else ""
    return f"verified{left_out}{limits}{far}{f' {parity.standard}' if parity.standard else ''}"


def _describe_inputs(parity: Comparison) -> str:
    count = len(parity.cases)
    word = f", sizes and values by {parity.word}" if parity.word else ""
    narrow = f" but for {parity.narrow}" if parity.narrow else ""
    return f" on {count} input{'' if count == 1 else 's'} against {parity.reference} in float64{narrow}{word}"


def _result_table(parity: Comparison, narrow: bool) -> Table:
    """``narrow``: no word and no number is broken in 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0) if narrow else (0, 1))
    told = [
        i
        for i, column in enumerate(parity.columns)
        if not (narrow and "file" in parity.columns and column == "max rel error")
    ]
    for column in (parity.columns[i] for i in told):
        fixed = column.endswith("error") or column in ("allowed", "verdict")
        table.add_column(
            column.replace(" error", "\nerror") if narrow else column, overflow="fold", no_wrap=narrow and fixed
        )
    bare = replace(parity, results=tuple(replace(result, reason="") for result in parity.results))
    for result, row in zip(parity.results, bare.rows(), strict=True):
        table.add_row(*(Text(row[i]) for i in told), style="" if result else "red")
    return table


def _format_shape(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes))


def _outcome_row(group: FindingGroup) -> tuple[Text, Text, Text, Text]:
    first = group.first_finding
    what = Text("reduced:" if first.remains else first.status, style=COLOURS[first.status]).append(
        f" {text}" if (text := describe_outcome(group)) else "", style="default"
    )
    if first.reason:
        what.append(f"; {describe_reason(group)}", style="dim")
    for note in first.notes:
        what.append(f"\n{note}", style="yellow")
    return location_text(group), kind_text(group), what, Text("\n".join(describe_proof(group)))


def _make_table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def show_inference(console: Console, done: Inference) -> None:
    """What was run, how long it took, and its arrays."""
    lines = [f"{done.runner}: loaded in {done.seconds['load']:.2f} s, ran in {done.seconds['run']:.3f} s"]
    lines += [f"  in   {name}  {text}" for name, text in done.inputs.items()]
    lines += [f"  out  {name}  {text}" for name, text in done.outputs.items()]
    console.print(Text("\n".join(map(escape_line, lines))), soft_wrap=True)
