"""Export and verify small pipelines of diffusers with random weights.

    python -m benchmarks.pipelines [NAME...]     default: all pipelines; the rows of those named replace older ones

Each pipeline is saved as its users have it (``save_pretrained``), exported as a folder and verified, with one denoising
step. The step's error is the largest error of the image, beside the error of eager mode and the allowed error. Needs
diffusers and transformers, which ``make test-architectures`` installs. Writes ``benchmarks/results/pipelines.md``.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import normdeploy
from normdeploy.verbs.verify.denoising_chain import IMAGE
from normdeploy.verbs.verify.parts_comparison import PartsComparison

from .architectures.catalogue import declare_torchvision
from .pipeline_models import PIPELINES, PipelineModel

RESULT = Path(__file__).parent / "results" / "pipelines.md"
HEAD = (
    "pipeline",
    "parts",
    "norms",
    "export s",
    "verify s",
    "parts verified",
    "step",
    "image error",
    "eager",
    "allowed",
)
# Number of random inputs, and seconds of processor time, for each part.
SEEDS, SECONDS = 1, 20


def measure(pipeline: PipelineModel) -> list[str]:
    """Export and verify one pipeline.

    Returns:
        the cells of its row, under ``HEAD``.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = pipeline.save(Path(scratch))
        made = Path(scratch) / "made"
        start = time.perf_counter()
        exported = normdeploy.export_parts(folder, made)
        middle = time.perf_counter()
        verified = normdeploy.verify_parts(folder, made, seeds=SEEDS, max_seconds=SECONDS)
        end = time.perf_counter()
    print(verified)
    norms = sum(len(result.summary.findings) for result in exported.values())
    passed = sum(map(bool, verified.comparisons.values()))
    times = [f"{middle - start:.0f}", f"{end - middle:.0f}"]
    return [
        pipeline.name,
        ", ".join(file.partition("/")[0] for file in exported),
        str(norms),
        *times,
        f"{passed} of {len(exported)}",
        *_step_cells(verified),
    ]


def _step_cells(verified: PartsComparison) -> list[str]:
    """Return the verdict of the step, the image's error in onnxruntime and in eager mode, and the allowed error."""
    step = verified.step
    if step is None:
        return ["not compared", "", "", ""]
    verdict = "pass" if step else "fail"
    images = [result for result in step.results if result.output == IMAGE]
    own = next(result for result in images if not result.file)
    worst = max((result for result in images if result.file), key=lambda result: result.max_abs_error / result.allowed)
    cells = [worst.max_abs_error, own.max_abs_error, worst.allowed]
    return ["; ".join([verdict, *step.notes]), *(f"{cell:.2e}" for cell in cells)]


def write_rows(rows: Sequence[Sequence[str]]) -> None:
    """Write the table, with the older rows of pipelines that were not measured now."""
    found = {row[0]: list(row) for row in _older_rows()} | {row[0]: list(row) for row in rows}
    names = [pipeline.name for pipeline in PIPELINES if pipeline.name in found]
    lines = ["# Pipelines of diffusers", "", *_INTRODUCTION.splitlines(), ""]
    lines += [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    lines += [f"| {' | '.join(found[name])} |" for name in names]
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("diffusers", "transformers", "torch", "onnxruntime-gpu")
    )
    lines += ["", f"Versions: {packages}."]
    RESULT.write_text("\n".join(lines) + "\n")


_INTRODUCTION = f"""\
Small pipelines with random weights, made by `benchmarks/pipeline_models.py`, were exported as a folder and verified
with {SEEDS} seed for each part. The seconds are from a busy machine with two cores. `norms` counts the norms of all
parts.
The step runs from token ids to the image. Its error is the largest absolute error of the image in onnxruntime against
float64; `eager` is the error of PyTorch in float32, and `allowed` is the bound at the element that is nearest to it.
`python -m benchmarks.pipelines` writes this page."""


def _older_rows() -> list[list[str]]:
    if not RESULT.is_file():
        return []
    rows = [line for line in RESULT.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1:]]


def main() -> None:
    """Measure the pipelines that the arguments name, or all."""
    declare_torchvision()
    wanted = sys.argv[1:] or [pipeline.name for pipeline in PIPELINES]
    for pipeline in PIPELINES:
        if pipeline.name in wanted:
            write_rows([measure(pipeline)])


if __name__ == "__main__":
    main()
