"""Race whole models in onnxruntime on a GPU: torch's plain export and normdeploy's files.

``python -m benchmarks.whole_models_cuda [--rounds N] [--only TEXT …]`` writes
``benchmarks/results/whole_models_cuda.md`` and ``.json``. It needs a GPU.

The models are those of `benchmarks.whole_models`, with a dynamic batch. Each file is loaded into two sessions, with
onnxruntime's defaults (its optimizer on, products in TF32). Inputs and outputs are in the GPU's memory. All sessions of
a model run in turns in random order; times are wall-clock times from the call until the GPU is done. A file's ratio is
the median over the rounds of its time over the plain export's time in the same round, with the range of its two
sessions; below 1 is faster. Errors are the largest differences from the model in float64, over the largest output,
without TF32, for inputs around 0 and around 1e3 (token ids: 0 alone).
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import tempfile
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch

import normdeploy
from normdeploy.environment import describe_environment
from normdeploy.runtimes.ort_runner import OrtRunner, require_cuda
from normdeploy.verbs.bench.timing import Timing, race_calls

from .whole_models.__main__ import DEFAULT, OFFSETS, PLAIN, errors_of, fed
from .whole_models.subjects import LIBRARIES, SUBJECTS, Subject

RESULTS = Path(__file__).with_name("results")
CUDA = "--runtime onnxruntime --provider cuda"
BATCHES = (1, 8, 32)
SESSIONS = 2


def write_files(subject: Subject, folder: Path) -> dict[str, Path]:
    """Write the model with each tool.

    Returns:
        name -> file.
    """
    net, args = subject.build(), subject.args(2)
    batch = torch.export.Dim("batch", min=1, max=64)
    dims = tuple({0: batch} for _ in args)
    files = {name: folder / f"{i}.onnx" for i, name in enumerate((PLAIN, DEFAULT, CUDA))}
    # Without no_grad, torch 2.13 does not decompose T5's views.
    with torch.no_grad():
        program = torch.onnx.export(net, args, dynamo=True, verbose=False, dynamic_shapes=dims)
    assert program is not None
    program.save(files[PLAIN])
    normdeploy.export(net, args, output=files[DEFAULT], dynamic_shapes=dims)
    normdeploy.export(net, args, output=files[CUDA], dynamic_shapes=dims, runtime="onnxruntime", provider="cuda")
    return files


def open_session(path: Path) -> ort.InferenceSession:
    """Open a session on the GPU with onnxruntime's defaults.

    Returns:
        the session.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(str(path), options, providers=["CUDAExecutionProvider"])


def bind_run(session: ort.InferenceSession, args: tuple[torch.Tensor, ...]) -> Any:
    """Put inputs and outputs into the GPU's memory.

    Returns:
        a function that runs the session once.
    """
    binding = session.io_binding()
    held = {n: ort.OrtValue.ortvalue_from_numpy(a, "cuda", 0) for n, a in fed(session, args).items()}
    for name, value in held.items():
        binding.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        binding.bind_output(output.name, "cuda")

    def run_once(held: object = held) -> None:
        session.run_with_iobinding(binding)

    return run_once


def ratio_of(timing: Timing, file: int) -> tuple[float, float, float]:
    """Compute a file's time over the plain export's.

    Returns:
        the ratio, and the smaller and larger one of its sessions.
    """
    turns = np.array(timing.turns).reshape(-1, SESSIONS, len(timing.turns[0]))
    own = np.median(turns[file] / turns[0].mean(0), axis=1)
    return float(own.mean()), float(own.min()), float(own.max())


def measure_errors(subject: Subject, files: dict[str, Path]) -> dict[str, list[float]]:
    """Measure the errors of each file on the GPU, without TF32.

    Returns:
        name -> error at each offset.
    """
    with ExitStack() as stack:
        runners = {name: stack.enter_context(OrtRunner(path, provider="cuda")) for name, path in files.items()}
        return errors_of(subject, {name: runner.session for name, runner in runners.items()})


def measure(subject: Subject, rounds: int) -> dict[str, Any]:
    """Write and measure the files of a model.

    Returns:
        a row of the results.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(subject, Path(folder))
        nodes = {name: len(onnx.load(path, load_external_data=False).graph.node) for name, path in files.items()}
        errors = measure_errors(subject, files)
        sessions = [open_session(path) for path in files.values() for _ in range(SESSIONS)]
        ratios: dict[str, dict[int, tuple[float, float, float]]] = {name: {} for name in files}
        milliseconds = {}
        for batch in BATCHES:
            runs = list(map(partial(bind_run, args=subject.args(batch)), sessions))
            timing = race_calls(runs, rounds=rounds, most_warmup=20)
            milliseconds[batch] = 1e3 * timing.percentile(0, 50)
            for i, name in enumerate(files):
                ratios[name][batch] = ratio_of(timing, i)
    return {"model": subject.name, "milliseconds": milliseconds, "ratios": ratios, "errors": errors, "nodes": nodes}


def format_table(rows: list[dict[str, Any]]) -> str:
    """Format the rows.

    Returns:
        Markdown.
    """
    batches = " | ".join(f"batch {b}" for b in BATCHES)
    lines = [
        f"| model | file | nodes | {batches} | error at 0 | error at 1e3 |",
        f"| --- | --- | --- |{' --- |' * len(BATCHES)} --- | --- |",
    ]
    for row in rows:
        for name, ratios in row["ratios"].items():
            if name == PLAIN:
                times = [f"{row['milliseconds'][b]:.2f} ms" for b in BATCHES]
            else:
                times = ["{:.2f} ({:.2f} to {:.2f})".format(*ratios[b]) for b in BATCHES]
            errors = [f"{e:.1e}" for e in row["errors"][name]] + [""] * (len(OFFSETS) - len(row["errors"][name]))
            cells = [row["model"] if name == PLAIN else "", name, str(row["nodes"][name]), *times, *errors]
            lines.append(f"| {' | '.join(cells)} |")
    for name in (DEFAULT, CUDA):
        means = [f"{float(np.exp(np.mean([np.log(row['ratios'][name][b][0]) for row in rows]))):.3f}" for b in BATCHES]
        lines.append(f"| geometric mean | {name} | | {' | '.join(means)} | | |")
    return "\n".join(lines)


def main() -> None:
    """Race the models."""
    parser = argparse.ArgumentParser(prog="benchmarks.whole_models_cuda", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", nargs="*", default=[""], help="models whose name holds one of these")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args()
    require_cuda()
    warnings.simplefilter("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    facts = describe_environment()
    gpu = next((value for name, value in facts.items() if name.startswith("gpu ")), "unknown GPU")
    rows: list[dict[str, Any]] = []
    failed = []
    for subject in (*SUBJECTS, *LIBRARIES):
        if not any(text.lower() in subject.name.lower() for text in given.only):
            continue
        try:
            row = measure(subject, given.rounds)
        # The failure of one model is a result; the others still run.
        except Exception as error:
            failed.append(f"{subject.name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            print(failed[-1], flush=True)
            continue
        rows.append(row)
        shown = {name: [round(r[0], 2) for r in ratios.values()] for name, ratios in row["ratios"].items()}
        print(subject.name, shown, row["nodes"], row["errors"], flush=True)
        told = (
            f"{datetime.date.today().isoformat()}, {given.rounds} rounds; {gpu}; onnxruntime {ort.__version__}, "
            f"torch {torch.__version__}"
        )
        held = {"machine": facts, "rows": rows, "failed": failed}
        (given.out / "whole_models_cuda.json").write_text(json.dumps(held, indent=1) + "\n")
        lost = "\n".join(f"- not measured: {line}" for line in failed)
        page = "\n\n".join(["# Whole models on a GPU", str(__doc__).strip(), told, format_table(rows), lost]).strip()
        (given.out / "whole_models_cuda.md").write_text(page + "\n")


if __name__ == "__main__":
    main()
