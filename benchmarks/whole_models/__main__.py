"""Whole models in onnxruntime on the CPU: what torch's exporter writes, what peers make of that, and normdeploy's files.

``python -m benchmarks.whole_models [--rounds N] [--only TEXT]`` writes ``benchmarks/results/whole_models.md`` and ``.json``
after each model. It needs onnxslim and onnxsim, and for most of the models transformers, timm and torchvision
(``make whole-models`` installs all). The batch is a dynamic dim. The files of a model run in turns in random order at batch 1
and 8, one thread, processor time, onnxruntime's optimizer on as users have it. A ratio is the median over the rounds of a file's
time over that of the plain export in the same round, with its 95 % interval; below 1 is faster. Errors are the largest
differences from the model in float64, over the largest output, for inputs around 0 and around 1e3 (token ids: 0 alone).

The measures (issue 14): default at most 1.02 of plain, ``--runtime onnxruntime`` at most 1.01 of plain and of the best peer, each
at least as exact as plain. It exits with 1 where one is missed by more than its interval.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch

import normdeploy
from normdeploy.race.machine import machine
from normdeploy.race.timing import race

from .peers import PEERS, versions
from .subjects import BATCHES, LIBRARIES, SUBJECTS, Subject

RESULTS = Path(__file__).parents[1] / "results"
PLAIN, DEFAULT, ORT = "plain export", "default", "--runtime onnxruntime"
BOUNDS = {DEFAULT: 1.02, ORT: 1.01}
OFFSETS = (0.0, 1e3)
WORSE = 1.5  # times the error of plain export: two evaluations that are as exact differ by as much


class _Fixed(Exception):
    """torch can't export the model with an open batch (T5's views, torch 2.13): at batch 1, then."""


def written(subject: Subject, folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """The files by who wrote them, and what the tools said that wrote none."""
    net, args = subject.build(), subject.args(2 if subject.open else 1)
    batch = torch.export.Dim("batch", min=1, max=64)
    dims = tuple({0: batch} for _ in args) if subject.open else None
    files, said = {name: folder / f"{i}.onnx" for i, name in enumerate((PLAIN, *BOUNDS))}, {}
    try:
        program = torch.onnx.export(net, args, dynamo=True, verbose=False, dynamic_shapes=dims)
    except torch.onnx.errors.OnnxExporterError:
        if not subject.open:
            raise
        raise _Fixed from None
    assert program is not None
    program.save(files[PLAIN])
    normdeploy.export(net, args, output=files[DEFAULT], dynamic_shapes=dims)
    normdeploy.export(net, args, output=files[ORT], dynamic_shapes=dims, runtime="onnxruntime")
    for name, tool in PEERS.items():
        path = folder / f"{name}.onnx"
        try:
            tool(files[PLAIN], path, subject)
            session(path)
            files[name] = path
        except LookupError as e:
            said[name] = str(e)
        except Exception as e:  # what a peer can't do is a result
            said[name] = f"fails: {type(e).__name__}: {' '.join(str(e).split())[:100]}"
    return files, said


def session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def fed(made: ort.InferenceSession, args: tuple[torch.Tensor, ...]) -> dict[str, np.ndarray]:
    return {i.name: a.numpy() for i, a in zip(made.get_inputs(), args, strict=True)}


def measured(subject: Subject, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        files, said = written(subject, Path(folder))
        sessions = {name: session(path) for name, path in files.items()}
        nodes = {name: len(onnx.load(path, load_external_data=False).graph.node) for name, path in files.items()}
        ratios: dict[str, dict[int, tuple[float, float, float]]] = {name: {} for name in sessions}
        milliseconds = {}
        for batch in BATCHES if subject.open else (1,):
            args = subject.args(batch)
            feeds = {name: fed(made, args) for name, made in sessions.items()}
            runs = [lambda made=made, given=feeds[name]: made.run(None, given) for name, made in sessions.items()]
            timing = race(runs, rounds=rounds if batch == 1 else max(8, rounds // 3), clock=time.process_time)
            milliseconds[batch] = 1e3 * timing.percentile(0, 50)
            for i, name in enumerate(sessions):
                ratios[name][batch] = timing.ratio(i, 0)
        errors = errors_of(subject, sessions)
    return {"model": subject.name, "milliseconds": milliseconds, "ratios": ratios, "errors": errors, "nodes": nodes, "said": said}


def errors_of(subject: Subject, sessions: Mapping[str, ort.InferenceSession]) -> dict[str, list[float]]:
    exact, args = copy.deepcopy(subject.build()).double(), subject.args(1)
    errors: dict[str, list[float]] = {name: [] for name in sessions}
    for offset in OFFSETS if subject.images else OFFSETS[:1]:
        given = tuple(a + offset if a.is_floating_point() else a for a in args)
        with torch.no_grad():
            want = exact(*(a.double() if a.is_floating_point() else a for a in given)).numpy()
        for name, made in sessions.items():
            errors[name].append(float(np.abs(made.run(None, fed(made, given))[0] - want).max() / np.abs(want).max()))
    return errors


def missed(row: Mapping[str, Any]) -> list[str]:
    """The measures that a row does not reach."""
    found = []
    for name, bound in BOUNDS.items():
        for batch, (ratio, low, high) in row["ratios"][name].items():
            if low > bound:
                found.append(f"{row['model']}, {name}, batch {batch}: {ratio:.3f} of plain export's time, at most {bound} wanted")
            for peer in PEERS if name == ORT else ():
                theirs = row["ratios"].get(peer, {}).get(batch)
                if theirs is not None and low > bound * theirs[2]:
                    found.append(
                        f"{row['model']}, {name}, batch {batch}: {ratio:.3f} ({low:.3f} to {high:.3f}) of plain export's time, "
                        f"{peer} {theirs[0]:.3f} ({theirs[1]:.3f} to {theirs[2]:.3f})"
                    )
        for own, plain in zip(row["errors"][name], row["errors"][PLAIN], strict=True):
            if not own <= WORSE * plain:
                found.append(f"{row['model']}, {name}: error {own:.2g}, plain export {plain:.2g}")
    return found


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | plain, ms | file | nodes | time of plain's, batch 1 | batch 8 | error at 0 | error at 1e3 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for name, ratios in row["ratios"].items():
            errors = [f"{e:.1e}" for e in row["errors"][name]] + [""] * (len(OFFSETS) - len(row["errors"][name]))
            ms = ", ".join(f"{m:.0f}" for m in row["milliseconds"].values()) if name == PLAIN else ""
            told = ["1" if name == PLAIN else "{:.3f} ({:.3f} to {:.3f})".format(*ratios[b]) if b in ratios else "" for b in BATCHES]
            shown = [row["model"] if name == PLAIN else "", ms, name, str(row["nodes"][name]), *told, *errors]
            lines.append(f"| {' | '.join(shown)} |")
        lines += [f"| | | {name} | {said} | | | | |" for name, said in row["said"].items()]
    for name in (*BOUNDS, *PEERS):
        known = [r for row in rows for r in row["ratios"].get(name, {}).values()]
        if known:
            lines.append(f"| geometric mean | | {name} | | {float(np.exp(np.mean([np.log(r[0]) for r in known]))):.3f} | | | |")
    return "\n".join(lines)


def save(rows: list[dict[str, Any]], told: str, on: Any) -> list[str]:
    faults = [fault for row in rows for fault in missed(row)]
    held = {"measured": told, "machine": asdict(on), "rows": rows, "missed": faults}
    (RESULTS / "whole_models.json").write_text(json.dumps(held, indent=1) + "\n")
    said = "\n".join(f"- {fault}" for fault in faults) or "Every measure is reached."
    (RESULTS / "whole_models.md").write_text(f"# Whole models\n\n{__doc__}\n{told}\n\n{table(rows)}\n\n{said}\n")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.whole_models")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="", help="models whose name holds this")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    on, rows, faults = machine(), [], []
    for subject in (*SUBJECTS, *LIBRARIES):
        if given.only.lower() not in subject.name.lower():
            continue
        try:
            rows.append(measured(subject, given.rounds))
        except _Fixed:
            rows.append(measured(replace(subject, open=False), given.rounds))
        shown = {name: [round(r[0], 3) for r in ratios.values()] for name, ratios in rows[-1]["ratios"].items()}
        print(subject.name, shown, rows[-1]["nodes"], rows[-1]["said"], flush=True)
        faults = save(rows, f"{datetime.date.today().isoformat()}, {given.rounds} rounds; {on}; {versions()}", on)
    print(*faults, sep="\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
