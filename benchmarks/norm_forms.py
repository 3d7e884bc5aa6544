"""Measure the time and accuracy of each form of each norm in onnxruntime's CPU or CUDA provider, or in OpenVINO.

The results are the table that ``--runtime onnxruntime``, with and without ``--provider cuda``, and ``--runtime
openvino`` use.

``python -m benchmarks.norm_forms [--runtime openvino|onnxruntime-cuda]`` writes the rows of the runtime in
``normdeploy/forms/norm_forms.json``, which the package reads (`normdeploy.forms.measured_forms` describes how it
chooses). It also writes each size to ``benchmarks/results/norm_forms.md`` and ``.json``, for the others to
``norm_forms_<runtime>.md`` and ``.json``. Times are medians with one thread; all forms of a norm run in turns in random
order. OpenVINO's times are processor time. It computes in float32, and its rows have only this type. On a GPU, inputs
and outputs are in its memory, a run ends when the GPU is done, and sizes of the GPU's own come in addition. Errors
are the largest absolute differences from float64. The inputs are standard normal around an offset, or constant (0.3,
like a zero image after a convolution with a bias). "allowed" is the larger of two values: twice the error of the
decomposed form, and the error of statistics that are off by a few ulps of the largest element.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from normdeploy.forms.measured_forms import MeasuredForm, best_form
from normdeploy.option_values import CUDA, OPENVINO, USUAL
from normdeploy.runtimes.openvino_runner import OpenVinoRunner
from normdeploy.runtimes.ort_runner import require_cuda, shorten_ort_error
from normdeploy.verbs.bench.machine_info import describe_machine
from normdeploy.verbs.bench.norm_cases import FORMS, KINDS, NormCase
from normdeploy.verbs.bench.timing import MOST_WARMUP, race_calls

RESULTS = Path(__file__).with_name("results")
TABLE = Path(__file__).resolve().parents[1] / "normdeploy" / "forms" / "norm_forms.json"
OFFSETS = (0.0, 1e2, 1e3, 1e4)
CONSTANT = 0.3
LOOKED = (*(f"error at {offset:g}" for offset in OFFSETS), "error at a constant")
ROWS = ((1, 16, 64), (8, 128, 768), (1, 512, 1024), (32, 256))
IMAGES = ((1, 16, 16, 16), (1, 64, 32, 32), (2, 320, 32, 32), (1, 256, 56, 56))
OTHER_TYPES = (
    NormCase("LayerNorm", (8, 128, 768)),
    NormCase("RMSNorm", (8, 128, 768)),
    NormCase("ChannelLayerNorm", (1, 96, 28, 28)),
    NormCase("BatchLayerNorm", (8, 16, 16, 16)),
    NormCase("GroupNorm", (1, 64, 32, 32), groups=8),
    NormCase("InstanceNorm", (1, 64, 32, 32)),
    NormCase("ResidualLayerNorm", (8, 128, 768)),
)
CASES = (
    *(NormCase(kind, shape) for kind in ("LayerNorm", "RMSNorm") for shape in ROWS),
    *(
        NormCase(kind, shape, axis=1)
        for kind in ("LayerNorm", "RMSNorm")
        for shape in ((1, 16, 16, 16), (2, 64, 32, 32))
    ),
    *(
        NormCase("ChannelLayerNorm", shape)
        for shape in ((1, 8, 16, 16), (1, 96, 56, 56), (2, 384, 14, 14), (1, 768, 7, 7))
    ),
    *(NormCase("BatchLayerNorm", shape) for shape in ((4, 6, 7, 5), (8, 16, 16, 16), (32, 64, 14, 14))),
    *(NormCase("GroupNorm", shape, groups=8 if shape[1] < 256 else 32) for shape in IMAGES),
    *(NormCase("InstanceNorm", shape) for shape in IMAGES),
    *(NormCase("ResidualLayerNorm", shape) for shape in ((1, 16, 64), (1, 64, 384), (8, 128, 768), (1, 512, 1024))),
    *(replace(case, dtype=dtype) for dtype in ("float16", "float64") for case in OTHER_TYPES),
)
# Sizes at which the kernels, and not their launches, take the time
GPU_CASES = tuple(
    replace(case, dtype=dtype)
    for dtype in ("float32", "float16")
    for case in (
        NormCase("LayerNorm", (32, 512, 1024)),
        NormCase("RMSNorm", (32, 512, 1024)),
        NormCase("ChannelLayerNorm", (16, 192, 56, 56)),
        NormCase("GroupNorm", (8, 320, 64, 64), groups=32),
        NormCase("InstanceNorm", (8, 128, 128, 128)),
        NormCase("ResidualLayerNorm", (32, 512, 1024)),
    )
)

Infer = Callable[[dict[str, np.ndarray]], np.ndarray]


def open_onnxruntime(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> tuple[Infer, Callable[[], object]]:
    """Open a session with one thread.

    Returns:
        a function that returns the result for an input, and one that runs the session on bound inputs.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    made = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = made.io_binding()
    for name, array in feeds.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("y")
    return lambda given: made.run(None, given)[0], lambda: made.run_with_iobinding(binding)


def open_openvino(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> tuple[Infer, Callable[[], object]]:
    """Open a model in OpenVINO with one thread.

    Returns:
        a function that returns the result for an input, and one that runs the model on bound inputs.
    """
    made, bound = (OpenVinoRunner(proto.SerializeToString(), threads=1) for _ in range(2))
    return lambda given: made.infer(given)["y"], bound.prepare(feeds)


def open_cuda(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> tuple[Infer, Callable[[], object]]:
    """Open a session on the GPU.

    Returns:
        a function that returns the result for an input, and one that runs the session on inputs and outputs in the
        GPU's memory.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    made = ort.InferenceSession(proto.SerializeToString(), options, providers=["CUDAExecutionProvider"])
    binding = made.io_binding()
    held = {name: ort.OrtValue.ortvalue_from_numpy(array, "cuda", 0) for name, array in feeds.items()}
    for name, value in held.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("y", "cuda")

    def run_once(held: object = held) -> None:
        made.run_with_iobinding(binding)

    return lambda given: made.run(None, given)[0], run_once


# Runtime -> function that opens a model.
OPENERS = {USUAL: open_onnxruntime, OPENVINO: open_openvino, CUDA: open_cuda}


def measured(case: NormCase, rounds: int, runtime: str, warmup: int) -> dict[str, Any]:
    """Measure all forms of a case.

    Args:
        warmup: maximum number of rounds before the counted ones.
        runtime: a key of ``OPENERS``.

    Returns:
        times in microseconds, errors by offset, and the allowed errors.
    """
    runs, refused = {}, {}
    for form in case.distinct_forms:
        try:
            runs[form] = OPENERS[runtime](case.make_model(form), case.feeds())
            runs[form][1]()
        # Catch every exception, because onnxruntime's exceptions share no base class.
        except Exception as error:
            runs.pop(form, None)
            refused[form] = shorten_ort_error(error)
    clock = time.process_time if runtime == OPENVINO else time.perf_counter
    timing = race_calls([call for _, call in runs.values()], rounds=rounds, clock=clock, most_warmup=warmup)
    errors: dict[str, list[float]] = {form: [] for form in runs}
    allowed = []
    constant = {"x": np.full(case.shape, CONSTANT, case.dtype)}
    for feeds in (*map(case.feeds, OFFSETS), constant):
        expected = case.evaluate_float64(feeds["x"])
        for form, (infer, _) in runs.items():
            error = np.abs(infer(feeds) - expected).max()
            errors[form].append(float(error) if np.isfinite(error) else float("inf"))
        allowed.append(max(2 * errors["decomposed"][-1], case.allowed_error(feeds["x"])))
    base = list(runs).index("decomposed")
    forms = {}
    for i, form in enumerate(runs):
        ratio, low, high = timing.round_ratio(i, base)
        excess = max(e / a for e, a in zip(errors[form], allowed, strict=True))
        forms[form] = {
            "microseconds": 1e6 * timing.percentile(i, 50),
            "ratio": ratio,
            "interval": [low, high],
            "errors": errors[form],
            "excess": excess,
        }
    return {
        "norm": str(case),
        "kind": case.kind,
        "dtype": case.dtype,
        "allowed": allowed,
        "forms": forms,
        "refused": refused,
    }


def rows(results: list[dict[str, Any]], runtime: str) -> list[MeasuredForm]:
    """Build the package's table: one row for each kind and form, over all sizes.

    Returns:
        rows.
    """
    found = []
    for kind, dtype in product(KINDS, ("float32", "float16", "float64")):
        own = [r["forms"] for r in results if (r["kind"], r["dtype"]) == (kind, dtype)]
        # A form that the runtime refuses for some sizes is not chosen for any.
        for form in [form for form in own[0] if all(form in f for f in own)] if own else ():
            ratio = statistics.geometric_mean(f[form]["ratio"] for f in own)
            excess = max(f[form]["excess"] for f in own)
            found.append(MeasuredForm(runtime, kind, dtype, form, round(ratio, 3), min(1e9, round(excess, 3))))
    return found


def table(results: list[dict[str, Any]], chosen: list[MeasuredForm]) -> str:
    """Format the results.

    Returns:
        Markdown.
    """
    lines = [
        "| norm | form | µs | time, of decomposed | " + " | ".join(LOOKED) + " |",
        "| --- | --- | --- | --- |" + " --- |" * len(LOOKED),
    ]
    for result in results:
        for form, told in result["forms"].items():
            low, high = told["interval"]
            errors = " | ".join(f"{e:.1e}" for e in told["errors"])
            lines.append(
                f"| {result['norm']} | {form} | {told['microseconds']:.1f} | {told['ratio']:.2f} ({low:.2f} to"
                f" {high:.2f}) | {errors} |"
            )
        lines.append("| | allowed | | | " + " | ".join(f"{a:.1e}" for a in result["allowed"]) + " |")
        lines += [
            f"| {result['norm']} | {form} | not run: {why[:100]} |" + " |" * (len(LOOKED) + 1)
            for form, why in result["refused"].items()
        ]
    lines += ["", "| kind | type | form | time, of decomposed | error, of allowed | |", "| --- |" + " --- |" * 5]
    for row in chosen:
        mark = (
            "best"
            if row.form == best_form(row.kind, row.runtime, row.dtype, FORMS, chosen)
            else "too inaccurate"
            if row.excess > 1
            else ""
        )
        lines.append(f"| {row.kind} | {row.dtype} | {row.form} | {row.time:.2f} | {row.excess:.2g} | {mark} |")
    return "\n".join(lines)


def main() -> None:
    """Measure all cases and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=MOST_WARMUP, help="most rounds before the counted ones")
    parser.add_argument("--runtime", choices=OPENERS, default=USUAL)
    given = parser.parse_args()
    rounds, runtime = given.rounds, given.runtime
    before = describe_machine()
    if runtime == CUDA:
        require_cuda()
    results = []
    for case in (*CASES, *GPU_CASES) if runtime == CUDA else CASES:
        if runtime == OPENVINO and case.dtype != "float32":
            continue
        results.append(measured(case, rounds, runtime, given.warmup))
        print(
            results[-1]["norm"],
            {form: round(told["ratio"], 2) for form, told in results[-1]["forms"].items()},
            flush=True,
        )
    after, date = describe_machine(), datetime.date.today().isoformat()
    stem = "norm_forms" if runtime == USUAL else f"norm_forms_{runtime}"
    held = {"date": date, "rounds": rounds, "machine": asdict(before), "load at the end": after.load, "norms": results}
    (RESULTS / f"{stem}.json").write_text(json.dumps(held, indent=1) + "\n")
    chosen = rows(results, runtime)
    told = f"{date}, {rounds} rounds; {before}; load {after.load:.1f} at the end"
    known = json.loads(TABLE.read_text())
    others = [row for row in known["rows"] if row["runtime"] != runtime]
    table_of_package = {
        "measured": known["measured"] | {runtime: told},
        "rows": [*others, *(asdict(row) for row in chosen)],
    }
    TABLE.write_text(json.dumps(table_of_package, indent=1) + "\n")
    (RESULTS / f"{stem}.md").write_text(f"# Forms of norms\n\n{__doc__}\n{told}\n\n{table(results, chosen)}\n")


if __name__ == "__main__":
    main()
