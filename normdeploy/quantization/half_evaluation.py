"""Judge a quantized file again after its other layers became float16 or bfloat16.

Quantization comes first, on the float32 model, with scales that are numbers of the half type already. So half precision
(`normdeploy.precision`) changes no code and no scale. QuantizeLinear and DequantizeLinear take scales of the type that
they read and write (ONNX operator schemas QuantizeLinear-21, DequantizeLinear-21). So does strongly typed TensorRT.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx

from ..errors import InputError
from ..findings.quantization_report import QuantizationReport
from ..precision.emulated_half import emulate_half
from ..precision.type_conversion import FORMATS
from ..types import Arrays, Progress
from .accuracy import drift_notes, few_sample_notes
from .quantization_request import QuantizationRequest
from .quantizer import make_judge, model_bytes
from .sample_split import SampleSplit


def judge_half_file(
    made: onnx.ModelProto,
    before: onnx.ModelProto,
    account: QuantizationReport,
    wish: QuantizationRequest,
    split: SampleSplit | None,
    progress: Progress | None = None,
) -> QuantizationReport:
    """Measure the metrics of a file in half precision, each of its nodes rounded to its declared type.

    Args:
        made: the quantized file in half precision.
        before: the float32 model.
        account: report of the quantized file with float32.
        split: the samples that ``account`` was judged on; None if none were given.

    Returns:
        ``account`` with the size and metrics of ``made``.

    Raises:
        InputError: half precision misses a metric that the quantized file reached.
    """
    account = replace(account, bytes=(account.bytes[0], model_bytes(made)))
    if split is None:
        return account
    judge, float32, notes = make_judge(before, wish, split, progress)
    judge.samples = [_round_inputs(sample, made, wish) for sample in judge.samples]
    outputs = judge.run_samples(emulate_half(made))
    judged = judge.measure_metrics(outputs, float32)
    moved = judge.measure_drift(outputs, float32)
    for told, was in zip(judged, account.judged, strict=True):
        if was.met and not told.met:
            raise InputError(
                f"{told.metric} of {told.output!r} is {told.value:.6g} in {wish.half}, but was "
                f"{was.value:.6g} in {wish.to} with float32; the threshold is {told.threshold:g}. Lower "
                "the threshold, or omit --precision"
            )
    old = (*drift_notes(account.moved), *few_sample_notes(account.judged))
    kept = [note for note in account.notes if note not in old]
    notes = [*drift_notes(moved), *kept, *few_sample_notes(judged), *notes]
    return replace(account, judged=judged, moved=moved, notes=tuple(dict.fromkeys(notes)))


def _round_inputs(sample: Arrays, proto: onnx.ModelProto, wish: QuantizationRequest) -> dict[str, np.ndarray]:
    """Round the inputs as ``proto`` receives them: half-precision inputs to their type, stored in float32."""
    form = FORMATS[wish.half]
    half = {v.name for v in proto.graph.input if v.type.tensor_type.elem_type == form.onnx}
    return {name: form.round_to_format(v).astype(np.float32) if name in half else v for name, v in sample.items()}
