"""Measure the time and accuracy of each form of each norm in onnxruntime's CPU provider.

The results are the table that ``--runtime onnxruntime`` uses.

``python -m benchmarks.norm_forms`` writes ``normdeploy/forms/norm_forms.json``, which the package reads
(`normdeploy.forms.measured_forms` describes how it chooses). It also writes ``benchmarks/results/norm_forms.md`` and
``.json`` with each size. Times are medians with one thread; all forms of a norm run in turns in random order. Errors
are the largest absolute differences from float64. The inputs are standard normal around an offset, or constant (0.3,
like a zero image after a convolution with a bias). "allowed" is the larger of two values: twice the error of the
decomposed form, and the error of statistics that are off by a few ulps of the largest element.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from normdeploy.forms.measured_forms import MeasuredForm, best_form
from normdeploy.runtimes.ort_runner import shorten_ort_error
from normdeploy.verbs.bench.machine_info import describe_machine
from normdeploy.verbs.bench.norm_cases import FORMS, KINDS, NormCase
from normdeploy.verbs.bench.timing import race_calls

RESULTS = Path(__file__).with_name("results")
TABLE = Path(__file__).resolve().parents[1] / "normdeploy" / "forms" / "norm_forms.json"
RUNTIME = "onnxruntime"
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


def session(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> tuple[ort.InferenceSession, Callable[[], object]]:
    """Open a session with one thread.

    Returns:
        the session, and a function that runs it on bound inputs.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    made = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = made.io_binding()
    for name, array in feeds.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("y")
    return made, lambda: made.run_with_iobinding(binding)


def measured(case: NormCase, rounds: int) -> dict[str, Any]:
    """Measure all forms of a case.

    Returns:
        times in microseconds, errors by offset, and the allowed errors.
    """
    runs, refused = {}, {}
    for form in case.distinct_forms:
        try:
            runs[form] = session(case.make_model(form), case.feeds())
            runs[form][1]()
        # Catch every exception, because onnxruntime's exceptions share no base class.
        except Exception as error:
            runs.pop(form, None)
            refused[form] = shorten_ort_error(error)
    timing = race_calls([call for _, call in runs.values()], rounds=rounds)
    errors: dict[str, list[float]] = {form: [] for form in runs}
    allowed = []
    constant = {"x": np.full(case.shape, CONSTANT, case.dtype)}
    for feeds in (*map(case.feeds, OFFSETS), constant):
        expected = case.evaluate_float64(feeds["x"])
        for form, (made, _) in runs.items():
            error = np.abs(made.run(None, feeds)[0] - expected).max()
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


def rows(results: list[dict[str, Any]]) -> list[MeasuredForm]:
    """Build the package's table: one row for each kind and form, over all sizes.

    Returns:
        rows.
    """
    found = []
    for kind, dtype in product(KINDS, ("float32", "float16", "float64")):
        own = [r["forms"] for r in results if (r["kind"], r["dtype"]) == (kind, dtype)]
        for form in own[0]:
            time = statistics.geometric_mean(f[form]["ratio"] for f in own)
            excess = max(f[form]["excess"] for f in own)
            found.append(MeasuredForm(RUNTIME, kind, dtype, form, round(time, 3), min(1e9, round(excess, 3))))
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
            if row.form == best_form(row.kind, RUNTIME, row.dtype, FORMS, chosen)
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
    rounds = parser.parse_args().rounds
    before = describe_machine()
    results = []
    for case in CASES:
        results.append(measured(case, rounds))
        print(
            results[-1]["norm"],
            {form: round(told["ratio"], 2) for form, told in results[-1]["forms"].items()},
            flush=True,
        )
    after, date = describe_machine(), datetime.date.today().isoformat()
    chosen = rows(results)
    told = f"{date}, {rounds} rounds; {before}; load {after.load:.1f} at the end"
    TABLE.write_text(json.dumps({"measured": told, "rows": [asdict(row) for row in chosen]}, indent=1) + "\n")
    held = {"date": date, "rounds": rounds, "machine": asdict(before), "load at the end": after.load, "norms": results}
    (RESULTS / "norm_forms.json").write_text(json.dumps(held, indent=1) + "\n")
    (RESULTS / "norm_forms.md").write_text(f"# Forms of norms\n\n{__doc__}\n{told}\n\n{table(results, chosen)}\n")


if __name__ == "__main__":
    main()
