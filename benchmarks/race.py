"""Race files of ``--runtime onnxruntime`` against the exporter's own optimized files, in onnxruntime on the CPU with
one thread.

``python -m benchmarks.race`` exports every model of ``models/`` twice, by ``torch.onnx.export(dynamo=True,
optimize=True)`` and by ``normdeploy.export``. It compares both with the model in float64, and times them in turns in
random order (`normdeploy.verbs.bench.timing`). It writes ``benchmarks/results/race.json``, ``race.md`` and, if
matplotlib is installed, ``race.png``; with ``--only``, the rows of other models stay. "faster" is the exporter's time
divided by our time in the same round: the median over the rounds, with its 95 % interval. Times are processor time of
the one thread, which other load on the machine affects less than wall time. Three norms are also timed as separate
models at usual sizes. They have required speedups.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

import normdeploy
from models.group import GroupNorm
from models.layer import UnbiasedLayerNorm
from models.registry import CASES, LOOKALIKES, SMALL, export_args, samples, seeded
from models.rms import LlamaRMSNorm
from normdeploy.compare.runtime_agreement import find_disagreement
from normdeploy.verbs.bench.machine_info import MachineInfo, describe_machine
from normdeploy.verbs.bench.timing import race_calls

RESULTS = Path(__file__).with_name("results")
# Minimum of "faster" for every model
SLOWEST = 0.97
UNIT = 2.0**-24


@dataclass
class Subject:
    """Module, its inputs, and the speedup required."""

    name: str
    module: nn.Module
    args: tuple[torch.Tensor, ...]
    dims: Any
    bound: float


def subjects() -> Iterator[Subject]:
    """Yield the models.

    Yields:
        subjects.
    """
    batch = ({0: torch.export.Dim("batch", min=1, max=64)},)
    for name, build, shape, bound in (
        ("unbiased LayerNorm", lambda: UnbiasedLayerNorm(768), (8, 128, 768), 2.3),
        ("RMSNorm", lambda: LlamaRMSNorm(768), (8, 128, 768), 2.5),
        ("GroupNorm by hand", lambda: GroupNorm(8, 64), (2, 64, 32, 32), 1.7),
        ("GroupNorm by hand, wide", lambda: GroupNorm(32, 320), (2, 320, 32, 32), 1.7),
    ):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        yield Subject(f"{name} {'×'.join(map(str, shape))}", seeded(build), (x,), batch, bound)
    for case in (*SMALL, *CASES, *LOOKALIKES):
        _, dims = export_args(case, dynamic=case.dynamic)
        yield Subject(case.name, case.make(), samples(case), dims, SLOWEST)


def measured(subject: Subject, rounds: int) -> dict[str, Any]:
    """Export with both, compare and race.

    Returns:
        times in microseconds, the speedup, and both errors relative to float64.
    """
    told: dict[str, Any] = {"model": subject.name, "bound": subject.bound}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        theirs, ours = Path(folder) / "theirs.onnx", Path(folder) / "ours.onnx"
        options = {"dynamic_shapes": subject.dims, "dynamo": True, "optimize": True, "verbose": False}
        torch.onnx.export(subject.module, subject.args, theirs, **options)
        result = normdeploy.export(
            subject.module, subject.args, dynamic_shapes=subject.dims, runtime="onnxruntime", output=ours
        )
        told["became"] = sorted({f.became.split("(")[0] or f.status for f in result.summary.findings})
        reference, calls = wide(subject), []
        for side, path in (("theirs", theirs), ("ours", ours)):
            runner = stack.enter_context(normdeploy.open_runner(path, threads=1))
            feeds = {spec.name: x.numpy() for spec, x in zip(runner.inputs, subject.args, strict=True)}
            verdict = find_disagreement([*runner.infer(feeds).values()], reference, UNIT)
            error, wrong = verdict.error, verdict.reason
            told[side] = {"nodes": len(onnx.load(path).graph.node), "error": error, "wrong": wrong}
            calls.append(runner.prepare(feeds))
        timing = race_calls(calls, rounds=rounds, clock=time.thread_time)
        for i, side in enumerate(("theirs", "ours")):
            told[side]["microseconds"] = 1e6 * timing.percentile(i, 50)
        told["faster"], *told["interval"] = timing.round_ratio(0, 1)
        told["load"] = describe_machine().load
    return told


def wide(subject: Subject) -> list[np.ndarray]:
    """Run the model in float64.

    Returns:
        outputs.
    """
    inputs = [x.double() if x.is_floating_point() else x for x in subject.args]
    with torch.no_grad():
        found = copy.deepcopy(subject.module).double()(*inputs)
    return [v.numpy() for v in (found if isinstance(found, list | tuple) else [found])]


def table(results: list[dict[str, Any]]) -> str:
    """Format the results.

    Returns:
        Markdown.
    """
    head = (
        "model",
        "exporter's µs",
        "ours µs",
        "faster",
        "95 %",
        "measure",
        "nodes",
        "exporter's error",
        "our error",
        "load",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for r in results:
        if "failed" in r:
            lines.append(f"| {r['model']} | not raced: {r['failed']} |" + " |" * (len(head) - 2))
            continue
        met = "yes" if r["faster"] >= r["bound"] else "**no**"
        errors = [r[side]["wrong"] or f"{r[side]['error']:.0e}" for side in ("theirs", "ours")]
        cells = [
            r["model"],
            *(f"{r[side]['microseconds']:.1f}" for side in ("theirs", "ours")),
            f"{r['faster']:.2f}",
            f"{r['interval'][0]:.2f} to {r['interval'][1]:.2f}",
            f"≥ {r['bound']:g}: {met}",
            f"{r['theirs']['nodes']} → {r['ours']['nodes']}",
            *errors,
            f"{r['load']:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(results: list[dict[str, Any]]) -> None:
    """Plot the speedups."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = sorted((r for r in results if "failed" not in r), key=lambda r: r["faster"])
    figure, axes = plt.subplots(figsize=(7, 0.17 * len(shown) + 1), layout="constrained")
    places = range(len(shown))
    sides = [[r["faster"] - r["interval"][0] for r in shown], [r["interval"][1] - r["faster"] for r in shown]]
    axes.errorbar(
        [r["faster"] for r in shown], places, xerr=sides, fmt="o", ms=3, color="tab:blue", label="ours, 95 % interval"
    )
    axes.plot([r["bound"] for r in shown], places, "|", ms=7, color="tab:orange", label="what it shall be")
    axes.axvline(1, color="grey", lw=0.8)
    axes.set_yticks(places, [r["model"] for r in shown], fontsize=6)
    axes.set_xlabel("times as fast as the exporter's own optimized file (onnxruntime CPU, one thread)")
    axes.legend(loc="lower right")
    figure.savefig(RESULTS / "race.png", dpi=120)


def main() -> None:
    """Race the models and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", nargs="*", default=[], help="models with these names, and no others")
    parser.add_argument("--plot", action="store_true", help="only draw what was measured")
    given = parser.parse_args()
    if given.plot:
        plot(json.loads((RESULTS / "race.json").read_text())["models"])
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    before, results = describe_machine(), []
    for subject in subjects():
        if given.only and subject.name not in given.only:
            continue
        try:
            results.append(measured(subject, given.rounds))
        # A model that an exporter can't export does not end the race.
        except Exception as error:
            results.append({"model": subject.name, "failed": " ".join(str(error).split())[:120]})
        print(json.dumps(results[-1]), flush=True)
    write(results, given.rounds, before)


def write(results: list[dict[str, Any]], rounds: int, before: MachineInfo) -> None:
    """Write the new results, together with the file's results for other models."""
    held = json.loads((RESULTS / "race.json").read_text())["models"] if (RESULTS / "race.json").exists() else []
    every = {r["model"]: r for r in (*held, *results)}
    ordered = [every[s.name] for s in subjects() if s.name in every]
    date = datetime.date.today().isoformat()
    told = {"date": date, "rounds": rounds, "machine": asdict(before), "models": ordered}
    (RESULTS / "race.json").write_text(json.dumps(told, indent=1) + "\n")
    raced = [r for r in ordered if "failed" not in r]
    slow = [f"{r['model']} ({r['faster']:.2f})" for r in raced if r["faster"] < r["bound"]]
    where = f"{date}, {rounds} rounds; {before}. Several people shared the machine: the last column is its load."
    verdict = f"{len(raced)} of {len(ordered)} models raced; short of the measure: {', '.join(slow) or 'none'}."
    (RESULTS / "race.md").write_text(
        f"# Against the exporter's own optimized file\n\n{__doc__}\n{where}\n\n{verdict}\n\n{table(ordered)}\n"
    )
    plot(ordered)


if __name__ == "__main__":
    main()
