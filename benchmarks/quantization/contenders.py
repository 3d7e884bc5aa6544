"""Write quantized files with each tool, from the same float32 file and calibration samples."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from . import environments

SUBJECTS = ("minilm", "mobilenet", "efficientnet", "decoder")
LINEARS = ["Conv", "ConvTranspose", "Gemm", "MatMul"]
# Number of calibration samples per run of the model
STEP = 8
# Function of the float32 file, the samples, and the file to write
Write = Callable[[Path, Path, Path], None]


@dataclass(frozen=True)
class Contender:
    """Tool with its settings.

    Attributes:
        form: runtimes that can run the file: "symmetric" is TensorRT's form, "asymmetric" is onnxruntime's.
    """

    name: str
    form: str
    write: Write
    subjects: tuple[str, ...] = SUBJECTS


def modelopt(mode: str, method: str, source: Path, samples: Path, target: Path) -> None:
    """Quantize with ModelOpt in its own environment and with its default decisions.

    Raises:
        RuntimeError: it failed; has the end of its output.
    """
    worker = Path(__file__).with_name("modelopt_worker.py")
    with np.load(samples) as arrays:
        shapes = ",".join(f"{name}:{'x'.join(map(str, (STEP, *arrays[name].shape[1:])))}" for name in arrays)
    command = [environments.modelopt(), worker, source, samples, target, mode, method, shapes]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not target.exists():
        lines = (done.stderr + done.stdout).strip().splitlines() or ["no message"]
        raise RuntimeError(lines[-1][:300])


class Samples(CalibrationDataReader):
    """Calibration reader with `STEP` samples at a time."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            held = {name: arrays[name] for name in arrays.files}
        count = len(next(iter(held.values())))
        self.parts: Iterator[dict[str, np.ndarray]] = iter(
            [{name: a[i : i + STEP] for name, a in held.items()} for i in range(0, count, STEP)]
        )

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return the next samples.

        Returns:
            name -> array, or None at the end.
        """
        return next(self.parts, None)


def static(options: dict[str, Any], source: Path, samples: Path, target: Path) -> None:
    """Quantize with onnxruntime's quantize_static after its own pre-processing, as its documentation recommends."""
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder, "prepared.onnx")
        quant_pre_process(source, prepared, skip_symbolic_shape=True)
        quantize_static(prepared, target, Samples(samples), **options)


def ours(verb: tuple[str, ...], source: Path, samples: Path, target: Path) -> None:
    """Quantize with normdeploy.

    Raises:
        RuntimeError: it failed; has the end of its output.
    """
    command = [sys.executable, "-m", "normdeploy", "optimize", source, "-o", target, "--calibrate", samples, *verb]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        words = (done.stderr or done.stdout or "no message").translate(dict.fromkeys(map(ord, "╭╮╰╯─│"))).split()
        raise RuntimeError(" ".join(words)[-300:])


# Attention's products stay float.
CONSTANT = {"MatMulConstBOnly": True}
ALONE = {"op_types_to_quantize": LINEARS}
SYMMETRIC: dict[str, Any] = {
    "per_channel": True,
    "activation_type": QuantType.QInt8,
    "weight_type": QuantType.QInt8,
    "extra_options": {"ActivationSymmetric": True, "WeightSymmetric": True},
}
UNSIGNED: dict[str, Any] = {"per_channel": True, "activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
PEERS = (
    Contender("ModelOpt int8, max", "symmetric", partial(modelopt, "int8", "max")),
    Contender("ModelOpt int8, entropy", "symmetric", partial(modelopt, "int8", "entropy")),
    Contender("ModelOpt fp8, max", "fp8", partial(modelopt, "fp8", "max")),
    Contender("ModelOpt int4, awq_clip", "int4", partial(modelopt, "int4", "awq_clip"), ("minilm", "decoder")),
    Contender("ModelOpt int4, rtn_dq", "int4", partial(modelopt, "int4", "rtn_dq"), ("minilm", "decoder")),
    Contender("quantize_static, as called", "asymmetric", partial(static, {})),
    Contender("quantize_static, symmetric", "symmetric", partial(static, SYMMETRIC)),
    Contender(
        "quantize_static, symmetric, linears alone",
        "symmetric",
        partial(static, SYMMETRIC | ALONE | {"extra_options": SYMMETRIC["extra_options"] | CONSTANT}),
    ),
    Contender("quantize_static, uint8", "asymmetric", partial(static, UNSIGNED)),
    Contender(
        "quantize_static, uint8, linears alone",
        "asymmetric",
        partial(static, UNSIGNED | ALONE | {"extra_options": CONSTANT}),
    ),
)


def _ours(name: str, form: str, *verb: str, subjects: tuple[str, ...] = SUBJECTS) -> Contender:
    return Contender(f"normdeploy {name}", form, partial(ours, verb), subjects)


METRICS = (
    ("minilm", ("nearest:0.97", "cosine:0.995")),
    ("mobilenet", ("top1:0.99",)),
    ("efficientnet", ("cosine:0.995",)),
    ("efficientnet", ("top1:0.95",)),
    ("efficientnet", ("top1:0.99",)),
    ("decoder", ("top1:0.97",)),
)


def _to_metric(form: str, *verb: str) -> Iterator[Contender]:
    """Yield contenders whose layers stay float until `METRICS` are met on samples that are not used for calibration."""
    for subject, metrics in METRICS:
        asked = [part for metric in metrics for part in ("--metric", metric)]
        name = f"normdeploy {verb[1]}, {verb[3]}, {' '.join(metrics)}"
        yield Contender(name, form, partial(ours, (*verb, *asked)), (subject,))


_RTX, _ORT = ("--runtime", "tensorrt-rtx"), ("--runtime", "onnxruntime")
OURS = (
    _ours("int8, tensorrt-rtx", "symmetric", "--quantize", "int8", *_RTX),
    *_to_metric("symmetric", "--quantize", "int8", *_RTX),
    _ours(
        "int8, tensorrt-rtx, behind norms alone",
        "symmetric",
        *("--quantize", "int8", *_RTX, "--keep-float", "*.attention_output", "--keep-float", "*.output"),
        subjects=("minilm",),
    ),
    _ours("int8, onnxruntime", "asymmetric", "--quantize", "int8", *_ORT),
    *_to_metric("asymmetric", "--quantize", "int8", *_ORT),
    _ours("int8, any", "symmetric", "--quantize", "int8", "--runtime", "any"),
    _ours("fp8", "fp8", "--quantize", "fp8", *_RTX),
    _ours("int4", "int4", "--quantize", "int4", *_RTX),
    # A post-norm encoder and convolutions have no stream to rotate.
    _ours("int8, tensorrt-rtx, rotated", "symmetric", "--quantize", "int8", *_RTX, "--rotate", subjects=("decoder",)),
    _ours("int8, onnxruntime, rotated", "asymmetric", "--quantize", "int8", *_ORT, "--rotate", subjects=("decoder",)),
    _ours("int4, rotated", "int4", "--quantize", "int4", *_RTX, "--rotate", subjects=("decoder",)),
)


def linears(path: Path) -> tuple[int, int]:
    """Count the linear layers and convolutions with a constant weight.

    Returns:
        number of those whose weight has a DequantizeLinear, and number of all.
    """
    graph = onnx.load(path, load_external_data=False).graph
    made = {name: node for node in graph.node for name in node.output}
    stored = {t.name for t in graph.initializer}

    def weight(name: str) -> str:
        """Trace a weight.

        Returns:
            "float", "quantized", or "" if it is not constant.
        """
        quantized = False
        while name in made and made[name].op_type in ("DequantizeLinear", "QuantizeLinear", "Transpose", "Reshape"):
            quantized |= made[name].op_type == "DequantizeLinear"
            name = made[name].input[0]
        constant = name in stored or (name in made and made[name].op_type == "Constant")
        return ("quantized" if quantized else "float") if constant else ""

    kinds = [w for n in graph.node if n.op_type in LINEARS if (w := weight(n.input[1]))]
    whole = sum(n.op_type in ("MatMulInteger", "QLinearMatMul", "QLinearConv", "ConvInteger") for n in graph.node)
    return kinds.count("quantized") + whole, len(kinds) + whole
