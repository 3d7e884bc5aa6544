"""Race whole models in OpenVINO on the CPU: torch's plain export, normdeploy's default file, and its file of
``--runtime openvino``.

``python -m benchmarks.openvino_models [--rounds N] [--only TEXT] [--rest]`` writes
``benchmarks/results/openvino_models.md`` and ``.json`` after each model. With ``--only`` the rows of the other models
stay, and ``--rest`` measures the models that have no row yet. The models are those of ``benchmarks.whole_models``. It
needs OpenVINO, and for most of the models transformers, timm and torchvision.

OpenVINO computes in float32 with one thread. Each file is loaded three times. All runners of a model run in turns in
random order at batch 1, after a warm-up; times are processor time. A file's ratio is the mean of its runners' medians
over the mean of the plain export's, with a 95 % interval from their differences; below 1 is faster. The difference is
the largest one from the plain export's output in OpenVINO, over the largest output.

The requirements: at most 1.02 for the default file, and a geometric mean of at most 0.95 for ``--runtime openvino``. A
ratio misses its requirement if its whole interval is above it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

import normdeploy
from normdeploy.runtimes.openvino_runner import OpenVinoRunner
from normdeploy.verbs.bench.machine_info import describe_machine
from normdeploy.verbs.bench.timing import race_calls

from .whole_models.__main__ import SESSIONS, ratio
from .whole_models.subjects import LIBRARIES, SUBJECTS, Subject

RESULTS = Path(__file__).with_name("results")
PLAIN, DEFAULT, OPENVINO = "plain export", "default", "--runtime openvino"
FILES = (PLAIN, DEFAULT, OPENVINO)
BOUND, MEAN_BOUND = 1.02, 0.95


def write_files(subject: Subject, folder: Path) -> dict[str, Path]:
    """Write the plain export of a model at batch 1, and the two files that ``optimize`` makes of the model.

    Returns:
        name -> file.
    """
    net, args = subject.build(), subject.args(1)
    files = {name: folder / f"{i}.onnx" for i, name in enumerate(FILES)}
    with torch.no_grad():
        program = torch.onnx.export(net, args, dynamo=True, verbose=False)
    assert program is not None
    program.save(files[PLAIN])
    normdeploy.export(net, args, output=files[DEFAULT])
    normdeploy.export(net, args, output=files[OPENVINO], runtime="openvino")
    return files


def measured(subject: Subject, rounds: int) -> dict[str, Any]:
    """Write and measure the files of a model.

    Returns:
        a row of the results.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(subject, Path(folder))
        nodes = {name: len(onnx.load(path, load_external_data=False).graph.node) for name, path in files.items()}
        runners = [OpenVinoRunner(path, threads=1) for path in files.values() for _ in range(SESSIONS)]
        arrays = [a.numpy() for a in subject.args(1)]
        feeds = [{spec.name: a for spec, a in zip(r.inputs, arrays, strict=True)} for r in runners]
        outputs = [next(iter(runners[i * SESSIONS].infer(feeds[i * SESSIONS]).values())) for i in range(len(FILES))]
        calls = [runner.prepare(given) for runner, given in zip(runners, feeds, strict=True)]
        timing = race_calls(calls, rounds=rounds, clock=time.process_time, most_warmup=3)
    largest = float(np.abs(outputs[0]).max())
    return {
        "model": subject.name,
        "nodes": nodes,
        "milliseconds": 1e3 * timing.percentile(0, 50),
        "ratios": {name: ratio(timing, i) for i, name in enumerate(FILES)},
        "differences": {
            name: float(np.abs(value - outputs[0]).max()) / largest for name, value in zip(FILES, outputs, strict=True)
        },
    }


def missed(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """List the requirements that are missed.

    Returns:
        a text for each.
    """
    found = [
        f"{name}, default: {row['ratios'][DEFAULT][0]:.3f} of plain export's time, at most {BOUND} wanted"
        for name, row in rows.items()
        if row["ratios"][DEFAULT][1] > BOUND
    ]
    mean = geometric_mean(rows, OPENVINO)
    if mean > MEAN_BOUND:
        found.append(f"{OPENVINO}: geometric mean {mean:.3f}, at most {MEAN_BOUND} wanted")
    return found


def geometric_mean(rows: Mapping[str, Mapping[str, Any]], name: str) -> float:
    """Average the ratios of a file over the models."""
    return float(np.exp(np.mean([np.log(row["ratios"][name][0]) for row in rows.values()])))


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the rows.

    Returns:
        Markdown.
    """
    lines = [
        "| model | plain, ms | file | nodes | time of plain's | difference |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows.values():
        for name in FILES:
            first = [row["model"], f"{row['milliseconds']:.2f}"] if name == PLAIN else ["", ""]
            middle, low, high = row["ratios"][name]
            told = "1" if name == PLAIN else f"{middle:.3f} ({low:.3f} to {high:.3f})"
            cells = [*first, name, str(row["nodes"][name]), told, f"{row['differences'][name]:.1e}"]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [f"| geometric mean | | {name} | | {geometric_mean(rows, name):.3f} | |" for name in FILES[1:]]
    return "\n".join(lines)


def save(rows: Mapping[str, Mapping[str, Any]], told: str, machine: Mapping[str, Any], total: int) -> None:
    """Write the results and the page."""
    held = {"machine": machine, "measured": told, "rows": rows, "missed": missed(rows)}
    (RESULTS / "openvino_models.json").write_text(json.dumps(held, indent=1) + "\n")
    said = "\n".join(f"- {fault}" for fault in missed(rows)) or "Every requirement is reached."
    assert __doc__ is not None
    parts = [__doc__.strip(), told, f"{len(rows)} of {total} models were measured.", table(rows), said]
    (RESULTS / "openvino_models.md").write_text("# Whole models in OpenVINO\n\n" + "\n\n".join(parts) + "\n")


def main() -> None:
    """Race the models."""
    parser = argparse.ArgumentParser(prog="benchmarks.openvino_models")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default="", help="models whose name holds this; the rows of the others stay")
    parser.add_argument("--rest", action="store_true", help="only models that have no row yet")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    path = RESULTS / "openvino_models.json"
    rows = json.loads(path.read_text())["rows"] if (given.only or given.rest) and path.exists() else {}
    machine = describe_machine()
    told = f"{datetime.date.today().isoformat()}, {given.rounds} rounds; {machine}"
    subjects = (*SUBJECTS, *LIBRARIES)
    for subject in subjects:
        if given.only.lower() not in subject.name.lower() or (given.rest and subject.name in rows):
            continue
        rows[subject.name] = measured(subject, given.rounds)
        ratios = {name: [round(r, 3) for r in three] for name, three in rows[subject.name]["ratios"].items()}
        print(subject.name, ratios, rows[subject.name]["nodes"], flush=True)
        save(rows, told, asdict(machine), len(subjects))


if __name__ == "__main__":
    main()
