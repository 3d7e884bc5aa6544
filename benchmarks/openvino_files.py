"""Optimize the plain files of architectures, and verify the results in OpenVINO.

``python -m benchmarks.openvino_files FOLDER [--only TEXT] [--rest]`` takes the files that ``python -m
benchmarks.architectures.plain_files FOLDER`` writes, and the models of this repository. Each file goes through
``normdeploy.optimize`` with its default options. ``normdeploy.verify`` then compares the result with the plain file in
float64, in onnxruntime and in OpenVINO in float32, on one random input and on the edge cases, for 4 s of processor
time. A crash of the process counts as a result. A file that fails only in OpenVINO is searched by
``normdeploy.bisect``. The plain file itself is also verified in OpenVINO. An error that it has too was not
caused by the optimized file.

The script writes ``benchmarks/results/openvino_files.md`` and ``.json`` after each file. With ``--only``
the rows of the other files stay. ``--rest`` measures the files that have no row yet.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import onnx
import torch

import normdeploy
from models.registry import CASES, SMALL, export_args
from normdeploy.errors import NormdeployError
from normdeploy.verbs.bench.machine_info import describe_machine
from normdeploy.verbs.verify.comparison_result import Comparison

RESULTS = Path(__file__).with_name("results")
TITLE = "OpenVINO"
SECONDS = 4


def write_own_models(folder: Path, only: str) -> Iterator[Path]:
    """Export the models of this repository with ``torch.onnx.export``.

    Args:
        only: part of the file's name.

    Yields:
        the files.
    """
    for case in (*CASES, *SMALL):
        path = folder / f"models_{case.name}.onnx"
        if only.lower() in path.stem.lower():
            args, shapes = export_args(case, dynamic=bool(case.dynamic))
            with torch.no_grad():
                torch.onnx.export(
                    case.make().eval(), args, path, dynamic_shapes=shapes, dynamo=True, verbose=False,
                    external_data=False,
                )  # fmt: skip
            yield path


def measured(plain: Path) -> dict[str, Any]:
    """Optimize and verify one file.

    Returns:
        a row of the results.
    """
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "optimized.onnx"
        optimized = normdeploy.optimize(plain, made)
        row: dict[str, Any] = {
            "nodes": [len(onnx.load(p, load_external_data=False).graph.node) for p in (plain, made)],
            "norms": len(optimized.summary.findings),
        }
        verdict = normdeploy.verify(plain, made, runners="openvino", seeds=1, max_seconds=SECONDS, prove=False)
        row |= described(verdict)
        if row["openvino"] != "pass":
            row["plain"] = described(normdeploy.verify(plain, plain, runners="openvino", seeds=1, prove=False))
            row["culprit"] = culprit(plain, made)
    return row


def described(verdict: Comparison) -> dict[str, Any]:
    """Describe the results in onnxruntime and OpenVINO.

    Returns:
        verdicts, the reason of a failure, and the largest error as a share of the allowed error.
    """
    own = [r for r in verdict.results if r.runtime == TITLE]
    others = [r for r in verdict.results if r.runtime != TITLE]
    unrun = next((str(miss.reason) for miss in verdict.not_run if miss.runtime == TITLE), "")
    failed = next((r for r in own if not r), None)
    shares = [r.max_abs_error / r.allowed for r in own if r.allowed > 0]
    return {
        "onnxruntime": "pass" if all(others) else "fail",
        "openvino": "fail" if failed else "not judged" if unrun else "pass",
        "share": max(shares, default=0.0),
        "reason": f"{failed.output}, {failed.case}: {failed.reason}" if failed else unrun,
    }


def culprit(plain: Path, made: Path) -> str:
    """Search the node that OpenVINO computes wrongly.

    Returns:
        the node and the cause.
    """
    try:
        found = normdeploy.bisect(plain, made, runners="openvino", seeds=1, max_seconds=SECONDS)
    except NormdeployError as error:
        return f"not searched: {error}"
    if found.faults:
        return found.faults[0].summarize()
    return "; ".join(map(str, (*found.not_searched, *found.notes)))


class Worker:
    """Process that measures one file after another, and is replaced after a crash."""

    def __init__(self) -> None:
        self._pool = self._start()

    @staticmethod
    def _start() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=silence)

    def run(self, plain: Path) -> dict[str, Any]:
        """Measure a file.

        Returns:
            the row; its key "error" says why there is no other.
        """
        try:
            return self._pool.submit(measured, plain).result()
        except BrokenProcessPool:
            self._pool = self._start()
            return {"error": "the process crashed"}
        # An error of any step is a result.
        except Exception as error:
            return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def silence() -> None:
    """Turn off the warnings of torch."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the rows.

    Returns:
        Markdown.
    """
    good = {name: row for name, row in rows.items() if "error" not in row}
    passed = [name for name, row in good.items() if row["openvino"] == "pass"]
    lines = [
        f"**{len(passed)} of {len(rows)} files pass in OpenVINO.**",
        "",
        "| file | norms | nodes, plain | optimized | onnxruntime | OpenVINO | error, of allowed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in good.items():
        before, after = row["nodes"]
        lines.append(
            f"| {name} | {row['norms']} | {before} | {after} | {row['onnxruntime']} | {row['openvino']} |"
            f" {row['share']:.2g} |"
        )
    lines += [f"| {name} | not measured: {row['error']} | | | | | |" for name, row in rows.items() if "error" in row]
    for name, row in good.items():
        if row["openvino"] != "pass":
            same = row["plain"]
            lines += [
                "",
                f"**{name}**: {row['reason']}. The plain file in OpenVINO: {same['openvino']}"
                f"{', ' + same['reason'] if same['reason'] else ''}. Culprit: {row['culprit']}.",
            ]
    return "\n".join(lines)


def save(rows: Mapping[str, Mapping[str, Any]], told: str) -> None:
    """Write the results and the page."""
    held = {"measured": told, "rows": rows}
    (RESULTS / "openvino_files.json").write_text(json.dumps(held, indent=1) + "\n")
    assert __doc__ is not None
    (RESULTS / "openvino_files.md").write_text(f"# Files in OpenVINO\n\n{__doc__}\n{told}\n\n{table(rows)}\n")


def main() -> None:
    """Measure the files."""
    parser = argparse.ArgumentParser(prog="benchmarks.openvino_files")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="files whose name holds this; the rows of the others stay")
    parser.add_argument("--rest", action="store_true", help="only files that have no row yet")
    given = parser.parse_args()
    silence()
    worker = Worker()
    path = RESULTS / "openvino_files.json"
    rows = json.loads(path.read_text())["rows"] if (given.only or given.rest) and path.exists() else {}
    told = f"{datetime.date.today().isoformat()}; {describe_machine()}"
    with tempfile.TemporaryDirectory() as folder:
        own = write_own_models(Path(folder), given.only)
        for plain in chain(sorted(given.folder.glob("*.onnx")), own):
            if given.only.lower() not in plain.stem.lower() or (given.rest and plain.stem in rows):
                continue
            rows[plain.stem] = worker.run(plain)
            print(plain.stem, rows[plain.stem], flush=True)
            save(rows, told)


if __name__ == "__main__":
    main()
