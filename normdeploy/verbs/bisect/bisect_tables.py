"""Print the faults that ``bisect`` found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ...errors import escape_line

if TYPE_CHECKING:
    from .fault_tracing import Fault
    from .file_bisection import Bisection

_WRONG = {
    "file": "the file computes something else than the model",
    "runtime": "the runtime computes it otherwise than ONNX defines it",
    "between": "each node is right on right inputs, and small errors grow",
}
# Maximum number of nodes of one fault that are printed.
_MANY = 8


def show_bisection(console: Console, bisection: Bisection) -> None:
    """Print each fault, the runtimes that were not searched, the notes and the verdict."""
    for number, fault in enumerate(bisection.faults, 1):
        module = escape_line(fault.module) or "the model itself"
        console.print(Text(f"{number}. {module}", style="red").append(f"  ({_WRONG[fault.wrong]})", style="default"))
        for name, text in _describe_fault(fault).items():
            console.print(Text(f"   {name:<10}", style="dim").append(escape_line(text), style="default"))
    for missed in bisection.not_searched:
        console.print(Text(escape_line(f"not searched: {missed.runtime}: {missed.reason}"), style="dim"))
    for note in bisection.notes:
        console.print(Text(escape_line(f"note: {note}"), style="yellow"))
    if bisection:
        console.print(Text("nothing to find: no output leaves the bound", style="green"))
    elif bisection.parity.outcome == "not run":
        console.print(Text("nothing was run, so there is nothing to find", style="yellow"))
    elif not bisection.faults:
        console.print(Text("the file is wrong, and no node is named: the notes say what differs", style="red"))


def _describe_fault(fault: Fault) -> Mapping[str, str]:
    return dict(_iter_fault_lines(fault))


def _iter_fault_lines(fault: Fault) -> Iterator[tuple[str, str]]:
    if len(fault.nodes) > _MANY:
        more = f" and {len(fault.nodes) - _MANY} more"
    else:
        more = ""
    yield "node", ", ".join(fault.nodes[:_MANY]) + more + (f" (the model's {fault.operator})" if fault.operator else "")
    off = fault.reason or f"off by {fault.error:.3g}"
    yield (
        "tensor",
        f"{fault.tensor}: {off} on right inputs, allowed {fault.allowed:.3g}, largest value {fault.scale:.3g}",
    )
    yield "runtime", f"{fault.runtime}, {fault.case}"
    yield "cause", f"{fault.kind}: {fault.cause}"
    widened = fault.widened
    if widened.mends is None:
        yield "float32", f"not asked: {widened.reason}"
    elif widened.mends:
        yield "float32", f"mends it, between Casts around {', '.join(widened.nodes)}"
    else:
        yield "float32", "does not mend it"
    before = fault.output_reason or f"off by {fault.output_error:.3g}"
    if fault.mended_error is None:
        after = "not run"
    else:
        after = f"off by {fault.mended_error:.3g}"
    if fault.mended:
        verdict = "right"
    else:
        verdict = "still wrong"
    yield "output", f"{fault.output}: {before}, allowed {fault.output_allowed:.3g}; with this mended {after}, {verdict}"
