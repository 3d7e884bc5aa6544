"""Print the faults that ``bisect`` found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ...errors import escape_line
from .fault_tracing import TOP_LEVEL

if TYPE_CHECKING:
    from .fault_tracing import Fault
    from .file_bisection import Bisection

_WRONG = {
    "file": "the file computes something other than the model",
    "runtime": "the runtime computes something other than ONNX defines",
    "between": "given correct inputs, each node is correct; small errors grow from node to node",
}
# Maximum number of nodes of one fault that are printed.
_MANY = 8


def show_bisection(console: Console, bisection: Bisection) -> None:
    """Print each fault, the runtimes that were not searched, the notes and the verdict."""
    for number, fault in enumerate(bisection.faults, 1):
        module = escape_line(fault.module or TOP_LEVEL)
        console.print(Text(f"{number}. {module}", style="red").append(f"  ({_WRONG[fault.wrong]})", style="default"))
        for name, text in _describe_fault(fault).items():
            console.print(Text(f"   {name:<12}", style="dim").append(escape_line(text), style="default"))
    for missed in bisection.not_searched:
        console.print(Text(escape_line(f"not searched: {missed.runtime}: {missed.reason}"), style="dim"))
    for note in bisection.notes:
        console.print(Text(escape_line(f"note: {note}"), style="yellow"))
    if bisection:
        console.print(Text("nothing to find: no output exceeds its allowed error", style="green"))
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
        f"{fault.tensor}: given correct inputs, {off}, allowed {fault.allowed:.3g}, largest value {fault.scale:.3g}",
    )
    yield "runtime", f"{fault.runtime}, at {fault.case}"
    yield "cause", f"{fault.kind}: {fault.cause}"
    widened = fault.widened
    if widened.mends is None:
        yield "in float32", f"not tried: {widened.reason}"
    elif widened.mends:
        yield "in float32", f"the output passes, with Casts to float32 around {', '.join(widened.nodes)}"
    else:
        yield "in float32", "the output still fails"
    before = fault.output_reason or f"off by {fault.output_error:.3g}"
    if fault.mended_error is None:
        after = "not run"
    elif fault.mended:
        after = f"off by {fault.mended_error:.3g}, passes"
    else:
        after = f"off by {fault.mended_error:.3g}, still fails"
    yield "output", f"{fault.output}: {before}, allowed {fault.output_allowed:.3g}"
    yield "corrected", f"{fault.output} with the right values of {fault.tensor}: {after}"
