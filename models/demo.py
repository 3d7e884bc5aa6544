"""Run the demo of ``make demo``.

The demo exports a trained sentence encoder, runs five verbs of the command line, and compares the similarities of real
sentences before and after.

It writes the saved PyTorch model, the ONNX file, the TensorRT-RTX engines and the JSON reports to ``demo/``.
"""

from __future__ import annotations

import logging
import shlex
import subprocess
import sys
import time
from pathlib import Path

import onnxruntime
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from normdeploy.errors import NOT_RUN

from . import minilm

FOLDER = Path("demo")
SENTENCES = (
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "The match was postponed because of heavy rain.",
    "How do I reset my password?",
    "I forgot my login and can't get into my account.",
)
# Allowed difference of similarities, as a number of roundings. Each of the six layers has about 16 operations, and each
# operation rounds the components of vectors of length one. So there are about 100 roundings.
ROUNDINGS = 100
console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def save(path: Path) -> torch.Tensor:
    """Save the encoder as an ExportedProgram with dynamic batch and length.

    Returns:
        the vectors that eager computes for the sentences, (B, hidden).
    """
    encoder, inputs = minilm.load(), minilm.tokenize(SENTENCES)
    axes = {0: torch.export.Dim("batch", min=1, max=32), 1: torch.export.Dim("seq", min=1, max=minilm.MAX_LENGTH)}
    # Hide the warning that the file should be named .pt2.
    logging.getLogger("torch.export").setLevel(logging.ERROR)
    with torch.no_grad():
        program = torch.export.export(encoder, inputs, dynamic_shapes=(axes, axes))
        torch.export.save(program, path)
        return encoder(*inputs)


def normdeploy(*args: str) -> None:
    """Print a command as a user would type it, and run it.

    The demo ends if a verb fails. An engine that was not run because there is no GPU is not a failure.
    """
    console.print(Text(f"\n$ normdeploy {shlex.join(args)}", style="bold"), soft_wrap=True)
    start = time.perf_counter()
    done = subprocess.run([Path(sys.executable).with_name("normdeploy"), *args])
    console.print(f"[dim]{time.perf_counter() - start:.1f} s")
    if done.returncode not in (0, NOT_RUN):
        sys.exit(f"normdeploy {args[0]} failed with exit code {done.returncode}")


def similarities(vectors: torch.Tensor) -> torch.Tensor:
    """Compute the cosines of vectors of length one, (B, hidden).

    Returns:
        (B, B).
    """
    return vectors @ vectors.T


def compare(eager: torch.Tensor, exported: torch.Tensor) -> float:
    """Print both (B, B) matrices side by side.

    Returns:
        the largest difference.
    """
    console.print("\ncosine similarities of the sentences, from eager PyTorch and from onnxruntime", style="bold")
    for i, sentence in enumerate(SENTENCES):
        console.print(f"  {i}  {sentence}")
    table = Table("", "eager", "onnxruntime", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, rows in enumerate(zip(eager.tolist(), exported.tolist(), strict=True)):
        table.add_row(str(i), *("".join(f"{value:8.4f}" for value in row) for row in rows))
    console.print(table)
    return float((eager - exported).abs().max())


def main() -> None:
    """Run the demo. Exit with 1 if a verb fails, or if the similarities differ by more than rounding errors."""
    FOLDER.mkdir(exist_ok=True)
    source, model, engine = (str(FOLDER / f"model.{suffix}") for suffix in ("pt", "onnx", "engine"))
    console.print(f"saving the sentence encoder all-MiniLM-L6-v2 with its trained weights as {source}")
    eager = save(Path(source))
    # torch saves the ranges of dims but not their names, so pass the names.
    names = [f"{name}:int64[batch,seq]" for name in ("input_ids", "attention_mask")]
    normdeploy(
        "export", source, "-o", model, "--input", names[0], "--input", names[1], "--report", str(FOLDER / "export.json")
    )
    normdeploy("build", model, "-o", engine, "--compute-capability", "8.6", "8.9", "12.0")
    normdeploy("verify", source, model, engine, "--report", str(FOLDER / "verify.json"))

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [spec.name for spec in session.get_inputs()]
    feed = dict(zip(names, (t.numpy() for t in minilm.tokenize(SENTENCES)), strict=True))
    exported = torch.from_numpy(session.run(None, feed)[0])
    worst = compare(similarities(eager), similarities(exported))
    allowed = ROUNDINGS * torch.finfo(torch.float32).eps
    console.print(f"largest difference: {worst:.1e} (rounding explains {allowed:.1e})")
    if not worst <= allowed:
        sys.exit("the similarities differ by more than rounding")


if __name__ == "__main__":
    main()
