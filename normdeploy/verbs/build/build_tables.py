"""Print the engines that ``build`` wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ...findings.console_tables import make_table
from ...findings.finding_groups import group_findings, kind_text, location_text
from ...findings.records import Finding
from ...runtimes.trt_runner import explain_missing_gpu

if TYPE_CHECKING:
    from ...engines.ep_context import EpContext
    from ...engines.norm_implementations import Implementation
    from .build_function import Engine


def show_engine(console: Console, engine: Engine) -> None:
    """Print the engine, its norms and profiles, and a line that says that the engine was not run."""
    capabilities = ", ".join(engine.compute_capabilities)
    if not capabilities:
        gpus = "every GPU that the library knows"
    elif len(engine.compute_capabilities) == 1:
        gpus = f"compute capability {capabilities}"
    else:
        gpus = f"compute capabilities {capabilities}"
    size = f"{engine.bytes / 1e6:.1f} MB, {engine.layers} layers"
    console.print(Text(f"{engine.path}: {engine.runtime} {engine.version}, {size}, for {gpus}"))
    if engine.norms:
        show_forms(console, engine.norms)
    if engine.ep_context is not None:
        console.print(
            Text(f"  EPContext for onnxruntime's TensorRT-RTX provider, engine {_context_location(engine.ep_context)}")
        )
    for index, profile in enumerate((engine.profile, *engine.more_profiles)):
        if engine.more_profiles:
            of = f"profile {index}, "
        else:
            of = ""
        for name, (low, best, high) in profile.items():
            shapes = f"{_format_shape(low)} to {_format_shape(high)}, fastest at {_format_shape(best)}"
            console.print(Text(f"  {of}shapes of {name}: {shapes}"))
    for note in engine.notes:
        console.print(Text(f"note: {note}"))
    if engine.types:
        console.print(
            Text(
                "layers by data type, as the ONNX file states: "
                + ", ".join(f"{count} {kind}" for kind, count in engine.types.items())
            )
        )
    console.print("built; not run (no GPU)" if explain_missing_gpu() else "built; not run")


def _context_location(context: EpContext) -> str:
    if context.file:
        return f"in {context.file}"
    return "in the file"


def show_forms(console: Console, norms: Sequence[Implementation]) -> None:
    """Print the form of each norm in the engine's network. Equal norms of several layers share a line."""
    table = make_table("module", "norm", "built as", "because")
    for group in group_findings(Finding(n.op, "kept", n.node, n.module, became=n.form, reason=n.reason) for n in norms):
        table.add_row(
            location_text(group),
            kind_text(group),
            Text(group.first_finding.became),
            Text(group.first_finding.reason, style="dim"),
        )
    console.print(table)


def _format_shape(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes))
