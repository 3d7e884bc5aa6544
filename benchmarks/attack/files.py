"""Test the reading of files, with models whose weights are stored in every form that ONNX allows.

``python -m benchmarks.attack.files --count 20000 --seed 0`` prints how many files were drawn, their forms, and how many
became another function; it writes those to ``--output``.

Each model is a chain of norms, convolutions and products, some in bodies of If and Loop and in local functions, with
tables of each data type. onnxruntime without its optimizer runs the model with dense raw initializers, and the
disguised file as `normdeploy.storage.onnx_files` opens it. All bits of all outputs must be the same. Every tenth file
is given to ``normdeploy.optimize``, and those of every hundredth seed to ``inspect`` and ``verify``.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto

import normdeploy
from normdeploy.errors import NormdeployError
from normdeploy.storage.onnx_files import load_onnx

from .file_models import draw
from .storing import Disguise

# Largest difference of outputs that rounding can cause. A misread number changes an output by about its magnitude,
# 1e-1. Rewrites round in float32. There are at most 8 blocks with sums of 36 products and norms that divide by about 1,
# so the difference is at most 8 · 36 · 2^-24 · 10 < 2e-4.
_ROUNDED = 2e-4
_DEEP_EVERY = 100
# Program of a child process that runs a file with and without onnxruntime's optimizer
_CHILD = """
import sys
import numpy as np
import onnxruntime as ort
feeds = dict(np.load(sys.argv[2]))
level = ort.GraphOptimizationLevel
options = ort.SessionOptions()
for options.graph_optimization_level in (level.ORT_DISABLE_ALL, level.ORT_ENABLE_ALL):
    ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"]).run(None, feeds)
"""


def run(source: str | bytes, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a model without onnxruntime's optimizer.

    Returns:
        outputs by name.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return {name: np.asarray(value) for name, value in zip(names, session.run(None, feeds), strict=True)}


def differing(before: dict[str, np.ndarray], after: dict[str, np.ndarray], exact: list[str]) -> str:
    """Find the first output that is not the same.

    Returns:
        its name, or "".
    """
    for name, wanted in before.items():
        value = after.get(name)
        if value is None or value.shape != wanted.shape or value.dtype != wanted.dtype:
            return name
        if name in exact:
            same = wanted.tobytes() == value.tobytes() if wanted.dtype != object else bool((wanted == value).all())
        else:
            same = bool((np.abs(wanted - value) <= _ROUNDED * max(1.0, float(np.abs(wanted).max()))).all())
        if not same:
            return name
    return ""


@dataclass(frozen=True)
class Verdict:
    """Result for one file.

    Attributes:
        kind: "not run", "read" (opened and not optimized), "same" (optimized, with nothing to rewrite), "right"
            (rewritten and equal), "refused", "false" or "failed".
    """

    kind: str
    detail: str = ""
    forms: tuple[str, ...] = ()


def judge(seed: int, folder: Path, *, rewritten: bool) -> Verdict:
    """Write the file of a seed to the empty ``folder``, and read it.

    Args:
        rewritten: optimize the file too, which takes fifty times as long as reading it.

    Returns:
        the verdict.
    """
    proto, feeds, exact = draw(seed)
    try:
        before = run(proto.SerializeToString(), feeds)
    # Catch every exception, because onnxruntime's exceptions share no base class.
    except Exception as e:
        return Verdict("not run", str(e)[:200])
    disguise = Disguise(np.random.default_rng([seed, 2]), folder)
    source = folder / "model.onnx"
    source.write_bytes(disguise.model(proto).SerializeToString())
    forms = tuple(disguise.used)
    try:
        kind, detail = _read(source, before, feeds)
        if not kind and rewritten:
            kind, detail = _rewritten(seed, source, proto, before, feeds, exact)
    except NormdeployError as e:
        # Forms that the specification forbids may be refused; all others must be read.
        kind = "refused" if any(form.startswith("disputed") for form in forms) else "failed"
        detail = str(e)
    # Every other exception is a fault.
    except Exception as e:
        kind, detail = "failed", f"{type(e).__name__}: {e}"
    return Verdict(kind or "read", detail[:600], forms)


def _read(source: Path, before: dict[str, np.ndarray], feeds: dict[str, np.ndarray]) -> tuple[str, str]:
    """Return the fault of a file that was only opened: all of its outputs must have the same bits."""
    opened = load_onnx(source)
    try:
        after = run(opened.SerializeToString(), feeds)
    # Catch every exception, because onnxruntime's exceptions share no base class.
    except Exception as e:
        return "false", f"as it was opened: {e}"
    name = differing(before, after, list(before))
    return ("false", f"as it was opened: {_shown(name, before, after)}") if name else ("", "")


def _rewritten(
    seed: int,
    source: Path,
    proto: onnx.ModelProto,
    before: dict[str, np.ndarray],
    feeds: dict[str, np.ndarray],
    exact: list[str],
) -> tuple[str, str]:
    """Return the result for a file that was optimized."""
    target = source.parent / "made" / "model.onnx"
    target.parent.mkdir()
    result = normdeploy.optimize(source, target)
    try:
        after = run(str(target), feeds)
    # Catch every exception, because onnxruntime's exceptions share no base class.
    except Exception as e:
        return "false", str(e)
    if name := differing(before, after, exact):
        return "false", _shown(name, before, after)
    if seed % _DEEP_EVERY == 0 and (detail := _asked(source, target, proto, feeds)):
        return "false", detail
    found = any(f.status in ("fused", "folded") for f in result.summary.findings)
    return ("right" if found else "same"), ""


def _shown(name: str, before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> str:
    return f"{name}: {before[name].ravel()[:6]} became {after[name].ravel()[:6]}"


def _asked(source: Path, target: Path, proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> str:
    """Return the first wrong answer of ``inspect`` or ``verify`` about a file and its rewritten form, or ""."""
    seen, plain = normdeploy.inspect(source), normdeploy.inspect(proto)
    if [f.kind for f in seen.findings] != [f.kind for f in plain.findings]:
        return f"inspect finds {seen.findings}, with dense weights {plain.findings}"
    # `verify` compares numbers only.
    if any(output.type.tensor_type.elem_type == TensorProto.STRING for output in proto.graph.output):
        return ""
    # onnxruntime's optimizer rounds activations before quantized weights, which `verify` reports.
    if b"DequantizeLinear" in proto.SerializeToString():
        return ""
    # onnxruntime's shape inference does not read axes and shapes that are stored externally, and its optimizer looks
    # for a body's external data in the working folder instead of next to the model. `verify` reports that such a file
    # does not run.
    if not _runs_in_child(source, feeds):
        return ""
    for reference, file in ((source, target), (proto, source)):
        verdict = normdeploy.verify(reference, file)
        if not verdict:
            return f"verify: {verdict}"
    return ""


def _runs_in_child(source: Path, feeds: dict[str, np.ndarray]) -> bool:
    """Run the stored file in onnxruntime in a child process, which it may crash; return whether it ran."""
    np.savez(source.parent / "feeds.npz", **feeds)  # type: ignore[arg-type]
    command = [sys.executable, "-c", _CHILD, str(source), str(source.parent / "feeds.npz")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def main() -> int:
    """Attack and print the counts.

    Returns:
        exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rewritten", type=int, default=10, help="every which file is optimized, too")
    parser.add_argument("--output", type=Path, help="folder for the files that became another function")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    begun, counts, forms = time.process_time(), Counter[str](), Counter[str]()
    for seed in range(options.seed, options.seed + options.count):
        folder = Path(tempfile.mkdtemp(prefix="files"))
        verdict = judge(seed, folder, rewritten=seed % options.rewritten == 0)
        counts[verdict.kind] += 1
        forms.update(verdict.forms)
        if verdict.kind not in ("read", "right", "same", "not run", "refused"):
            print(seed, verdict.kind, verdict.detail, flush=True)
            if options.output is not None:
                shutil.copytree(folder, options.output / str(seed), dirs_exist_ok=True)
        shutil.rmtree(folder)
    print(dict(counts), f"{time.process_time() - begun:.0f} s")
    print("\n".join(f"{count:7d} {form}" for form, count in sorted(forms.items())))
    return 1 if counts["false"] + counts["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
