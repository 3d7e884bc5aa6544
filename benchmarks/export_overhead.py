"""What fusing, certifying and cleaning up cost: the whole of normdeploy's export against the bare exporter's.

    python benchmarks/export_overhead.py [PAIRS]        default: 5

A 12-layer encoder of BERT's size (110 M parameters, layer norms by hand, random weights), batch and sequence dynamic, is exported and
saved by ``torch.onnx.export`` with its default optimizer and by ``normdeploy.export``, in turn, each time in a fresh process; what is
timed is the call alone, with what it imports lazily. Writes ``benchmarks/results/export_overhead.json``. The measure: a ratio of the
medians of at most 1.2 (issue F).
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = Path(__file__).parent / "results" / "export_overhead.json"
BOUND = 1.2


def one(variant: str) -> dict[str, Any]:
    """Export once in this process; wall and processor seconds, and the number of nodes written."""
    import onnx
    import torch

    from models.minilm import MiniLM

    torch.manual_seed(0)
    module = MiniLM(30522, 512, 2, hidden=768, layers=12, heads=12, intermediate=3072, eps=1e-12).eval()
    args = (torch.ones(2, 16, dtype=torch.int64), torch.ones(2, 16, dtype=torch.int64))
    dims = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("sequence", min=2, max=512)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        wall, cpu = time.perf_counter(), time.process_time()
        stages = bare(module, args, (dims, dims), path) if variant == "torch" else ours(module, args, (dims, dims), path)
        seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        nodes = len(onnx.load(path, load_external_data=False).graph.node)
    return {**seconds, "nodes": nodes, "stages": stages}


def bare(module: Any, args: tuple[Any, ...], dims: tuple[Any, ...], path: Path) -> dict[str, float]:
    import torch

    torch.onnx.export(module, args, path, dynamic_shapes=dims, dynamo=True, verbose=False)
    return {}


def ours(module: Any, args: tuple[Any, ...], dims: tuple[Any, ...], path: Path) -> dict[str, float]:
    import normdeploy

    result = normdeploy.export(module, args, output=path, dynamic_shapes=dims)
    fused = sum(finding.status == "fused" and bool(finding.certificate) for finding in result.summary.findings)
    if fused != 25:
        raise SystemExit(f"{fused} of 25 norms were fused and certified: not what is to be timed")
    return result.seconds


def main(pairs: int) -> None:
    runs: dict[str, list[dict[str, Any]]] = {"torch": [], "normdeploy": []}
    for _ in range(pairs):
        for variant, done in runs.items():  # in turn, so that whatever else the machine does hits both
            command = [sys.executable, __file__, "--one", variant]
            output = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True, text=True).stdout
            done.append(json.loads(output.splitlines()[-1]))
    medians = {v: {k: statistics.median(run[k] for run in done) for k in ("wall", "cpu")} for v, done in runs.items()}
    ratio = {k: medians["normdeploy"][k] / medians["torch"][k] for k in ("wall", "cpu")}
    stages = {s: statistics.median(run["stages"][s] for run in runs["normdeploy"]) for s in runs["normdeploy"][0]["stages"]}
    result = {
        "pairs": pairs,
        "seconds": medians,
        "ratio": ratio,
        "bound": BOUND,
        "stages": stages,
        "nodes": {v: done[0]["nodes"] for v, done in runs.items()},
        "runs": runs,
        "versions": {name: version(name) for name in ("torch", "onnx", "onnxscript", "normdeploy")},
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.system()},
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'':12}{'wall s':>8}{'cpu s':>8}{'nodes':>8}")
    for variant, seconds in medians.items():
        print(f"{variant:12}{seconds['wall']:8.1f}{seconds['cpu']:8.1f}{result['nodes'][variant]:8}")
    print("stages: " + ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in stages.items()))
    print(f"ratio: {ratio['wall']:.2f} wall, {ratio['cpu']:.2f} cpu (bound {BOUND})")


if __name__ == "__main__":
    if "--one" in sys.argv:
        print(json.dumps(one(sys.argv[-1])))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
