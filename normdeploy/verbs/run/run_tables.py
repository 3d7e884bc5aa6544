"""Print the outputs of ``run``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ...errors import escape_line

if TYPE_CHECKING:
    from .run_function import Inference


def show_inference(console: Console, done: Inference) -> None:
    """Print the runner, its times and the types of its arrays."""
    lines = [f"{done.runner}: loaded in {done.seconds['load']:.2f} s, ran in {done.seconds['run']:.3f} s"]
    lines += [f"  in   {name}  {text}" for name, text in done.inputs.items()]
    lines += [f"  out  {name}  {text}" for name, text in done.outputs.items()]
    console.print(Text("\n".join(map(escape_line, lines))), soft_wrap=True)
    for note in done.notes:
        console.print(Text(f"note: {escape_line(note)}", style="yellow"))
