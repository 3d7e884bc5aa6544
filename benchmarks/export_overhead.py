"""Measure the cost of fusing, proving and cleaning: the processor time and peak memory of normdeploy's export.
Both are compared with torch's exporter.

    python -m benchmarks.export_overhead [PAIRS] [PART OF A NAME …]        default: 3, all

Each model is exported and saved by ``torch.onnx.export`` with its default optimizer and by ``normdeploy.export``, in
turn, each time in a fresh process. Only the call is timed, including its lazy imports. Models of timm need the
environment of `make architectures`. Writes ``benchmarks/results/export_overhead.md`` and ``.json``. The bounds on time
apply to the ratio of the medians. The bound on the ratio of the memory peaks, which include Python and the libraries,
is 1.1. Exits with 1 if a bound is exceeded.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.minilm import MiniLM
from normdeploy.verbs.bench.machine_info import describe_machine

from .whole_models.subjects import LIBRARIES, SUBJECTS, Subject, image, pictured

RESULTS = Path(__file__).parent / "results"
PEAK = 1.1


def bert() -> nn.Module:
    """Build a BERT of 110 M parameters with hand-written layer norms.

    Returns:
        the module.
    """
    return MiniLM(30522, 512, 2, hidden=768, layers=12, heads=12, intermediate=3072, eps=1e-12)


def sentences(batch: int) -> tuple[torch.Tensor, ...]:
    """Make inputs of 16 tokens.

    Returns:
        ids and mask.
    """
    return (torch.ones(batch, 16, dtype=torch.int64),) * 2


def named(name: str) -> Subject:
    """Find a subject by name.

    Returns:
        the subject.
    """
    return next(s for s in (*SUBJECTS, *LIBRARIES) if s.name == name)


# Models, each with the bound on the ratio of times and the expected number of rewritten norms

MODELS: tuple[tuple[Subject, float, int], ...] = (
    (Subject("BERT, 12 layers, norms by hand", bert, sentences, images=False), 1.2, 25),
    (pictured("ViT-B", "vit_base_patch16_224"), 1.15, 1),
    (named("ResNet-50 of timm"), 1.3, 53),
    (named("DenseNet-121"), 1.3, 121),
    (named("LeViT 256"), 1.4, 64),
    (named("UNet"), 1.2, 7),
    (Subject("ResNet-50, BatchNorm", named("ResNet-50, BatchNorm").make, image(160)), 1.3, 53),
)


def plain(net: nn.Module, args: tuple[Any, ...], dims: Any, path: Path) -> dict[str, float]:
    """Export with torch.

    Returns:
        no stages.
    """
    torch.onnx.export(net, args, path, dynamic_shapes=dims, dynamo=True, verbose=False)
    return {}


def ours(net: nn.Module, args: tuple[Any, ...], dims: Any, path: Path) -> dict[str, float]:
    """Export with normdeploy.

    Returns:
        seconds of each stage, and the number of rewrites.
    """
    import normdeploy

    result = normdeploy.export(net, args, output=path, dynamic_shapes=dims)
    done = sum(
        finding.status in ("fused", "folded") and bool(finding.certificate) for finding in result.summary.findings
    )
    return {**result.seconds, "rewrites": done}


EXPORTS: dict[str, Callable[[nn.Module, tuple[Any, ...], Any, Path], dict[str, float]]] = {
    "torch": plain,
    "normdeploy": ours,
}


def one(name: str, exporter: str) -> dict[str, Any]:
    """Export once in this process.

    Returns:
        processor seconds, and MiB at the peak.
    """
    subject = next(s for s, *_ in MODELS if s.name == name)
    net, args = subject.build(), subject.args(2)
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=512)
    dims = tuple({0: batch} if subject.images else {0: batch, 1: length} for _ in args)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time()
        stages = EXPORTS[exporter](net, args, dims, Path(folder) / "model.onnx")
        seconds = time.process_time() - begun
    return {"seconds": seconds, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "stages": stages}


def measured(subject: Subject, bound: float, rewrites: int, pairs: int) -> dict[str, Any]:
    """Export with both in turn, each in fresh processes.

    Returns:
        a row of the results.
    """
    runs: dict[str, list[dict[str, Any]]] = {exporter: [] for exporter in EXPORTS}
    for _ in range(pairs):
        # In turn, so that other load on the machine affects both.
        for exporter, done in runs.items():
            command = [sys.executable, "-m", "benchmarks.export_overhead", "--one", subject.name, exporter]
            output = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
            if output.returncode:
                raise SystemExit(f"{subject.name}: {exporter}: {output.stderr[-1000:]}")
            done.append(json.loads(output.stdout.splitlines()[-1]))
    middle = {
        e: {k: statistics.median(run[k] for run in done) for k in ("seconds", "peak")} for e, done in runs.items()
    }
    ratios = {k: middle["normdeploy"][k] / middle["torch"][k] for k in ("seconds", "peak")}
    stages = {
        s: statistics.median(run["stages"][s] for run in runs["normdeploy"]) for s in runs["normdeploy"][0]["stages"]
    }
    if {run["stages"]["rewrites"] for run in runs["normdeploy"]} != {rewrites}:
        raise SystemExit(
            f"{subject.name}: {stages['rewrites']:.0f} of {rewrites} norms were rewritten and certified: not what is to"
            " be timed"
        )
    return {"model": subject.name, "bound": bound, "ratio": ratios, "median": middle, "stages": stages, "runs": runs}


def table(rows: list[dict[str, Any]], pairs: int) -> str:
    """Format the results.

    Returns:
        Markdown.
    """
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "onnx", "onnxscript"))
    lines = [
        *("# Export, beside torch's own", "", (__doc__ or "").split("\n\n", 2)[2].strip(), ""),
        *(f"{pairs} runs of each; {describe_machine()}; {libraries}", ""),
        (
            "| model | torch, s | normdeploy, s | ratio | at most | torch, MiB | normdeploy, MiB | ratio | norms |"
            " whole model compared |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        (t, n), ratio, stages = row["median"].values(), row["ratio"], row["stages"]
        times = f"{t['seconds']:.1f} | {n['seconds']:.1f} | {ratio['seconds']:.2f} | {row['bound']}"
        peaks = f"{t['peak']:.0f} | {n['peak']:.0f} | {ratio['peak']:.2f}"
        lines.append(f"| {row['model']} | {times} | {peaks} | {stages['norms']:.1f} s | {stages['compare']:.1f} s |")
    return "\n".join([*lines, "", *(missed(rows) or ["Every bound is kept."]), ""])


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """List the exceeded bounds.

    Returns:
        a line for each.
    """
    bounds = {"seconds": "time", "peak": "peak memory"}
    return [
        f"- {row['model']}: {what} {row['ratio'][k]:.2f} times torch's, at most {most}"
        for row in rows
        for k, what in bounds.items()
        if row["ratio"][k] > (most := row["bound"] if k == "seconds" else PEAK)
    ]


def main(arguments: list[str]) -> None:
    """Measure the models, and write the table if all are measured."""
    pairs = int(arguments[0]) if arguments and arguments[0].isdigit() else 3
    wanted = arguments[1:] if arguments and arguments[0].isdigit() else arguments
    rows = []
    for subject, bound, rewrites in MODELS:
        if not wanted or any(part in subject.name for part in wanted):
            rows.append(measured(subject, bound, rewrites, pairs))
            print(subject.name, {k: round(v, 3) for k, v in rows[-1]["ratio"].items()}, rows[-1]["stages"], flush=True)
    if not wanted:
        (RESULTS / "export_overhead.json").write_text(json.dumps(rows, indent=1) + "\n")
        (RESULTS / "export_overhead.md").write_text(table(rows, pairs))
    else:
        print(table(rows, pairs))
    raise SystemExit(1 if missed(rows) else 0)


if __name__ == "__main__":
    if "--one" in sys.argv:
        print(json.dumps(one(*sys.argv[2:])))
    else:
        main(sys.argv[1:])
