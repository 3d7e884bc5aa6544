"""Measure how many nodes stay float32 if a metric decides, on models whose activations have outliers.

    python -m benchmarks.half_metric [NAME ...]

The models are entries of ``benchmarks.architectures`` with random weights. In each norm, the scale of two random
channels is multiplied by 30, because half precision rounds the large channels of trained models coarsely (Sun et al.,
"Massive Activations in Large Language Models", 2024). ``--precision fp16 --keep-io`` converts each model by its rules
alone. Then ``--metric`` asks for 6 dB more than this file reaches. The results are measured on samples that chose
nothing, with each result rounded to its type. In T5, a few samples have most of the error, because its attention has
near-ties. So fresh samples may miss what the given samples reach. The script writes
``benchmarks/results/half_metric.md``. It runs in the environment of ``benchmarks.architectures``.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import nn

import normdeploy
from benchmarks.architectures.catalogue import ARCHITECTURES, Architecture, declare_torchvision, made, samples
from normdeploy.compare.metrics import snr
from normdeploy.errors import InputError
from normdeploy.ort_sessions.session import open_session
from normdeploy.precision.emulated_half import emulate_half

RESULTS = Path(__file__).parent / "results" / "half_metric.md"
NAMES = (
    "BERT",
    "Llama",
    "GPT-2",
    "T5",
    "Mamba",
    "Whisper",
    "ViT",
    "Swin V2",
    "ConvNeXt",
    "UNet2D",
    "DiT",
    "EfficientNet",
)
COLUMNS = (
    "model",
    "nodes",
    "float32 by rules",
    "Casts by rules",
    "SNR by rules",
    "SNR asked",
    "float32 by metric",
    "Casts by metric",
    "SNR by metric",
    "seconds",
)
# Decibels that are asked beyond the file of the rules: half its error
_MORE = 6.0
_OUTLIER = 30.0
# Number of samples for ``--calibrate``, and of samples that measure the results
_CHOSEN = 16
_FRESH = 16


def main() -> None:
    """Measure the models and write the page."""
    logging.disable(logging.WARNING)
    declare_torchvision()
    wanted = sys.argv[1:] or NAMES
    rows = []
    for architecture in (a for name in wanted for a in ARCHITECTURES if a.name == name):
        rows.append(measure_model(architecture))
        print(*rows[-1], sep=" | ", flush=True)
    lines = ["# Half precision by a metric", "", (__doc__ or "").strip(), ""]
    for row in (COLUMNS, ["---"] * len(COLUMNS), *rows):
        lines.append(f"| {' | '.join(row)} |")
    RESULTS.write_text("\n".join(lines) + "\n")


def measure_model(architecture: Architecture) -> list[str]:
    """Convert one model by the rules and by a metric.

    Returns:
        cells of its row.
    """
    torch.manual_seed(0)
    module = made(architecture)
    add_outliers(module, np.random.default_rng(0))
    every = [_arrays(architecture) for _ in range(_CHOSEN + _FRESH)]
    given, fresh = every[:_CHOSEN], every[_CHOSEN:]
    # The files are compared with the float32 file, so no other comparison is needed.
    proto = normdeploy.export(
        module, inputs=architecture.inputs, dims=architecture.dims, compare_limit=0, output=None
    ).proto
    assert proto is not None
    right = run(proto, fresh)
    rules = normdeploy.optimize(proto, precision="fp16", calibrate=given, keep_io=True)
    assert rules.proto is not None
    assert rules.precision is not None
    reached = measure_snr(rules.proto, fresh, right)
    asked = round(reached + _MORE, 1)
    cells = [architecture.name, str(rules.precision.nodes), str(rules.precision.kept), str(rules.precision.casts)]
    cells += [f"{reached:.1f}", f"{asked:.1f}"]
    start = time.process_time()
    try:
        chosen = normdeploy.optimize(proto, precision="fp16", calibrate=given, keep_io=True, metric=f"snr>={asked}")
    except InputError as error:
        return [*cells, str(error).split(";")[0], "", "", f"{time.process_time() - start:.0f}"]
    assert chosen.proto is not None
    assert chosen.precision is not None
    cells += [str(chosen.precision.kept), str(chosen.precision.casts)]
    return [*cells, f"{measure_snr(chosen.proto, fresh, right):.1f}", f"{time.process_time() - start:.0f}"]


def add_outliers(module: nn.Module, rng: np.random.Generator) -> None:
    """Multiply the scale of two random channels of each norm, in place."""
    for part in module.modules():
        weight = getattr(part, "weight", None)
        if "Norm" in type(part).__name__ and isinstance(weight, nn.Parameter) and weight.ndim == 1:
            with torch.no_grad():
                weight[torch.from_numpy(rng.integers(len(weight), size=2))] *= _OUTLIER


def _arrays(architecture: Architecture) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in samples.draw(architecture).items()}


def run(proto: onnx.ModelProto, feeds: Sequence[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """Run a float32 file without onnxruntime's optimizer."""
    session = open_session(proto.SerializeToString(), optimize=False)
    names = [v.name for v in proto.graph.output]
    return [dict(zip(names, session.run(names, sample), strict=True)) for sample in feeds]


def measure_snr(
    proto: onnx.ModelProto, fresh: Sequence[dict[str, np.ndarray]], right: Sequence[dict[str, np.ndarray]]
) -> float:
    """Measure the smallest signal-to-noise ratio of the outputs, over all samples together, in dB."""
    half = {v.name for v in proto.graph.input if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16}
    rounded = [
        {name: v.astype(np.float16).astype(np.float32) if name in half else v for name, v in sample.items()}
        for sample in fresh
    ]
    outputs = run(emulate_half(proto), rounded)
    names = [name for name, value in right[0].items() if value.dtype.kind == "f"]
    return min(
        float(snr(*(np.concatenate([case[name].ravel() for case in side]) for side in (outputs, right))))
        for name in names
    )


if __name__ == "__main__":
    main()
