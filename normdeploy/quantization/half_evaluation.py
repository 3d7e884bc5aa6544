"""Measure the accuracy of a quantized file again, after its other layers were converted to float16 or bfloat16.

Quantization comes first, on the float32 model. The quantization uses only scales that the half type can represent. So
the conversion to half precision (`normdeploy.precision`) changes neither codes nor scales. In ONNX, the scale of
QuantizeLinear or DequantizeLinear has the type of the floating-point tensor (operator schemas QuantizeLinear-21,
DequantizeLinear-21). Strongly typed TensorRT requires the same.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx

from ..findings.quantization_report import QuantizationReport
from ..precision.emulated_half import emulate_half
from ..precision.type_conversion import FORMATS, HalfFormat
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
    """Measure the metrics of a file in half precision. The result of each node is rounded to its declared type.

    Args:
        made: the quantized file in half precision.
        before: the float32 model.
        account: report of the quantized file before the conversion.
        split: samples on which the metrics of ``account`` were measured; None if the user passed no samples.

    Returns:
        ``account`` with the size and metrics of ``made``.
    """
    account = replace(account, bytes=(account.bytes[0], model_bytes(made)))
    if split is None:
        return account
    judge, float32, notes = make_judge(before, wish.policy, split, progress, optimize=False)
    judge.samples = [round_half_inputs(sample, made, FORMATS[wish.half]) for sample in judge.samples]
    outputs = judge.run_samples(emulate_half(made))
    judged = judge.measure_metrics(outputs, float32)
    moved = judge.measure_drift(outputs, float32)
    old = (*drift_notes(account.moved), *few_sample_notes(account.judged))
    kept = [note for note in account.notes if note not in old]
    notes = [*drift_notes(moved), *kept, *few_sample_notes(judged), *notes]
    return replace(account, judged=judged, moved=moved, notes=tuple(dict.fromkeys(notes)))


def round_half_inputs(sample: Arrays, proto: onnx.ModelProto, form: HalfFormat) -> dict[str, np.ndarray]:
    """Round the half-precision inputs of ``proto`` to their type, and store them in float32.

    Returns:
        name of an input -> array.
    """
    half = {v.name for v in proto.graph.input if v.type.tensor_type.elem_type == form.onnx}
    return {name: form.round_to_format(v).astype(np.float32) if name in half else v for name, v in sample.items()}
