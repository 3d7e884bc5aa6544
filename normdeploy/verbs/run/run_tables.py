"""Print the outputs of ``run``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.text import Text

from ...errors import escape_line
from .run_function import copy_to_host
from .token_generation import TOKENS

if TYPE_CHECKING:
    from .run_function import Inference


def show_inference(console: Console, done: Inference) -> None:
    """Print the runner, its times and the types of its arrays."""
    lines = [f"{done.runner}: loaded in {done.seconds['load']:.2f} s, ran in {done.seconds['run']:.3f} s"]
    lines += [f"  input   {name}  {text}" for name, text in done.inputs.items()]
    for name, text in done.outputs.items():
        lines.append(f"  output  {name}  {text}  {summarize_values(done.arrays[name])}".rstrip())
    if set(done.arrays) == {TOKENS}:
        lines += _describe_tokens(done)
    console.print(Text("\n".join(map(escape_line, lines))), soft_wrap=True)
    for note in done.notes:
        console.print(Text(f"note: {escape_line(note)}", style="yellow"))


def _describe_tokens(done: Inference) -> list[str]:
    """Return one line of token ids for each prompt, and its text if there is a tokenizer."""
    lines = []
    for place, row in enumerate(done.arrays[TOKENS]):
        tokens = row[: done.lengths[place]].tolist()
        lines.append(f"  prompt {place + 1}: {','.join(map(str, tokens))}")
        if done.texts:
            lines.append(f"  prompt {place + 1}: {done.texts[place]!r}")
    return lines


def summarize_values(values: Any) -> str:
    """Summarize an output in one phrase.

    Args:
        values: array or tensor of any shape and dtype.

    Returns:
        "min -1.2, max 3, mean 0.5", and counts of NaN and Inf if there are any; "" if the values are texts.
    """
    array = copy_to_host(values)
    if array.dtype.kind in "OSU":
        return ""
    if array.size == 0:
        return "no elements"
    wide = array.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    parts = []
    if finite.size:
        parts.append(f"min {finite.min():.4g}, max {finite.max():.4g}, mean {finite.mean():.4g}")
    for name, count in (("NaN", np.isnan(wide).sum()), ("Inf", np.isinf(wide).sum())):
        if count:
            parts.append(f"{count} of {array.size} {name}")
    return ", ".join(parts)
