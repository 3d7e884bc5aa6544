"""Verify whole models in onnxruntime-web, in Node.js and in a browser.

``python -m benchmarks.onnxruntime_web [--only TEXT] [--rest]`` exports each model of ``benchmarks.whole_models`` and a
network with InstanceNorm with ``normdeploy.export``, at batch 1. ``normdeploy.verify`` compares the file with PyTorch
in float64, in onnxruntime and in onnxruntime-web, on one random input and on the edge cases, for 10 s of processor
time. The page shows the largest error, also on extreme inputs, and its largest share of the allowed error. The same
file with one changed weight, 1 % larger, must fail: it shows that the comparison is not blind.

``python -m benchmarks.onnxruntime_web --browser`` runs one of the files in headless Chromium with
``examples/browser/compare.py``, and compares the outputs bit by bit with those of onnxruntime-web in Node.js.

The script writes ``benchmarks/results/onnxruntime_web.md`` and ``.json`` after each model. With ``--only`` the rows of
the other models stay, and ``--rest`` measures the models that have no row yet. It needs Node.js, onnxruntime-web, and
for most of the models transformers, timm and torchvision.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

import normdeploy
from normdeploy.environment import WEB
from normdeploy.errors import NormdeployError
from normdeploy.runtimes.ort_runner import ort_title
from normdeploy.verbs.bench.machine_info import describe_machine
from normdeploy.verbs.verify.comparison_result import Comparison

from .whole_models.subjects import LIBRARIES, SUBJECTS, Subject, image

RESULTS = Path(__file__).with_name("results")
SECONDS = 10
# Ops whose second input is a weight that scales the result.
_SCALED = frozenset({"MatMul", "Gemm", "Conv", "LayerNormalization", "RMSNormalization"})
BROWSED = "MiniLM, trained"
COMPARE = Path(__file__).parents[1] / "examples" / "browser" / "compare.py"


class StyleTransfer(nn.Module):
    """Convolutions and InstanceNorm that change the style of an image (Johnson et al., arXiv 1603.08155)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = self.block(3, width, 9, 1)
        self.down = nn.Sequential(self.block(width, 2 * width, 3, 2), self.block(2 * width, 4 * width, 3, 2))
        self.middle = nn.ModuleList(self.block(4 * width, 4 * width, 3, 1) for _ in range(3))
        self.up = nn.Sequential(
            *(nn.Upsample(scale_factor=2), self.block(4 * width, 2 * width, 3, 1)),
            *(nn.Upsample(scale_factor=2), self.block(2 * width, width, 3, 1)),
        )
        self.last = nn.Conv2d(width, 3, 9, padding=4)

    @staticmethod
    def block(first: int, out: int, size: int, stride: int) -> nn.Sequential:
        """Build a convolution with its norm.

        Returns:
            the module.
        """
        norm = nn.InstanceNorm2d(out, affine=True)
        return nn.Sequential(nn.Conv2d(first, out, size, stride, size // 2), norm, nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(self.first(x))
        for block in self.middle:
            x = x + block(x)
        return self.last(self.up(x))


MODELS = (*SUBJECTS, Subject("style transfer, InstanceNorm", StyleTransfer, image(96)), *LIBRARIES)


def plant_fault(path: Path, changed: Path) -> str:
    """Enlarge the weight of the last node that has one by 1 %.

    Returns:
        op of the node.
    """
    proto = onnx.load(path)
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    node = [n for n in proto.graph.node if n.op_type in _SCALED and n.input[1] in weights][-1]
    weight = weights[node.input[1]]
    array = onnx.numpy_helper.to_array(weight)
    weight.CopyFrom(onnx.numpy_helper.from_array((array * 1.01).astype(array.dtype), weight.name))
    onnx.save(proto, changed)
    return node.op_type


def measured(subject: Subject) -> dict[str, Any]:
    """Verify and time a model.

    Returns:
        a row of the results.
    """
    net, args = subject.build(), subject.args(1)
    options: dict[str, Any] = {"runners": WEB, "seeds": 1, "max_seconds": SECONDS, "prove": False}
    with tempfile.TemporaryDirectory() as folder:
        path, changed = Path(folder, "net.onnx"), Path(folder, "changed.onnx")
        normdeploy.export(net, args, output=path)
        planted = plant_fault(path, changed)
        verdict = normdeploy.verify(net, path, args, **options)
        wrong = normdeploy.verify(net, changed, args, **options)
        graph = onnx.load(path, load_external_data=False).graph
        return {
            "nodes": len(graph.node),
            "norms": sorted({n.op_type for n in graph.node if n.op_type.endswith("Normalization")}),
            "results": described(verdict),
            "planted": planted,
            "faulty": described(wrong)[WEB]["verdict"],
        }


def described(verdict: Comparison) -> dict[str, dict[str, Any]]:
    """Describe the results in onnxruntime and in onnxruntime-web.

    Returns:
        runtime -> verdict, largest error, and largest share of the allowed error.
    """
    rows = {}
    for runtime in (ort_title("cpu", optimize=True), WEB):
        own = [r for r in verdict.results if r.runtime == runtime]
        unrun = [str(miss.reason) for miss in verdict.not_run if miss.runtime == runtime]
        shares = [r.max_abs_error / r.allowed for r in own if r.allowed > 0]
        rows[runtime] = {
            "verdict": "not run" if unrun or not own else "pass" if all(own) else "fail",
            "error": max((r.max_abs_error for r in own), default=0.0),
            "share": max(shares, default=0.0),
            "reason": "; ".join(unrun or [r.reason for r in own if not r]),
        }
    return rows


def browsed(subject: Subject) -> str:
    """Run a model in headless Chromium (`examples/browser`), and compare it with onnxruntime-web in Node.js.

    Returns:
        what the page and the comparison print.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "net.onnx")
        args = subject.args(1)
        normdeploy.export(subject.build(), args, output=path)
        graph = onnx.load(path, load_external_data=False).graph
        given = {v.name: a.numpy() for v, a in zip(graph.input, args, strict=True)}
        normdeploy.run(path, given, output=Path(folder, "expected.npz"), runner=WEB)
        np.savez(Path(folder, "inputs.npz"), **given)
        command = [sys.executable, COMPARE, path, Path(folder, "inputs.npz"), Path(folder, "expected.npz")]
        done = subprocess.run(command, capture_output=True, text=True)
    printed = (done.stdout + done.stderr).replace(f"{folder}/", "")
    return f"{subject.name}, exit code {done.returncode}:\n{printed}"


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the rows.

    Returns:
        Markdown.
    """
    passed = [name for name, row in rows.items() if row["results"][WEB]["verdict"] == "pass"]
    caught = [name for name, row in rows.items() if row["faulty"] == "fail"]
    lines = [
        f"**{len(passed)} of {len(rows)} models pass in onnxruntime-web, and {len(caught)} of {len(rows)} changed files"
        f" fail.** {len(rows)} of {len(MODELS)} models were measured.",
        "",
        "| model | nodes | norms in the file | onnxruntime: error, share of allowed | onnxruntime-web: verdict, error,"
        " share of allowed | changed weight |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        usual, web = row["results"].values()
        norms = ", ".join(op.removesuffix("Normalization") for op in row["norms"]) or "folded"
        lines.append(
            f"| {name} | {row['nodes']} | {norms} | {usual['error']:.1e}, {usual['share']:.2f} | {web['verdict']},"
            f" {web['error']:.1e}, {web['share']:.2f} | {row['planted']}: {row['faulty']} |"
        )
    lines += [f"\n**{n}**: {r['results'][WEB]['reason']}" for n, r in rows.items() if r["results"][WEB]["reason"]]
    return "\n".join(lines)


def save(held: Mapping[str, Any]) -> None:
    """Write the results and the page."""
    (RESULTS / "onnxruntime_web.json").write_text(json.dumps(held, indent=1) + "\n")
    assert __doc__ is not None
    browser = f"## In Chromium\n\n```\n{held['browser'].strip()}\n```"
    parts = [__doc__.strip(), held["measured"], table(held["rows"]), browser]
    (RESULTS / "onnxruntime_web.md").write_text("# Models in onnxruntime-web\n\n" + "\n\n".join(parts) + "\n")


def main() -> None:
    """Verify the models."""
    parser = argparse.ArgumentParser(prog="benchmarks.onnxruntime_web")
    parser.add_argument("--only", default="", help="models whose name holds this; the rows of the others stay")
    parser.add_argument("--rest", action="store_true", help="only models that have no row yet")
    parser.add_argument("--browser", action="store_true", help="only the model in Chromium")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    path = RESULTS / "onnxruntime_web.json"
    held: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": {}, "browser": "not run"}
    if not (given.only or given.rest or given.browser):
        held["rows"] = {}
    held["measured"] = f"{datetime.date.today().isoformat()}; {describe_machine()}"
    if given.browser:
        (subject,) = (s for s in MODELS if s.name == BROWSED)
        held["browser"] = browsed(subject)
        print(held["browser"])
        save(held)
        return
    for subject in MODELS:
        if given.only.lower() not in subject.name.lower() or (given.rest and subject.name in held["rows"]):
            continue
        try:
            held["rows"][subject.name] = measured(subject)
        except NormdeployError as error:
            print(subject.name, "not measured:", error, flush=True)
            continue
        print(subject.name, held["rows"][subject.name], flush=True)
        save(held)


if __name__ == "__main__":
    main()
