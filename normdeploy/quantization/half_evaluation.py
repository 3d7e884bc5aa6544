"""Half precision around quantized layers: what is not quantized becomes float16 or bfloat16 afterwards, and the file is
judged again.

Quantization comes first, on the float32 model, with scales that are numbers of the half type already; so half precision
(`normdeploy.precision`) changes no code and no scale. QuantizeLinear and DequantizeLinear take scales of the type that
they read and write (ONNX operator schemas QuantizeLinear-21, DequantizeLinear-21), and so does strongly typed TensorRT.
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
    """``account`` with the metrics that ``made`` reaches, each of its nodes rounded to the type that it states.

    Args:
        made: the quantized file in half precision.
        before: the float32 model.
        split: the samples that ``account`` was judged on; None: none were given.

    Raises:
        InputError: a metric that the quantized file reached is missed in half precision.
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
                f"{told.metric} of {told.output!r} is {told.value:.6g} in {wish.half} and was {was.value:.6g} in"
                f" {wish.to} with float32, and {told.threshold:g} is asked for; ask for less, or leave --precision out"
            )
    old = (*drift_notes(account.moved), *few_sample_notes(account.judged))
    kept = [note for note in account.notes if note not in old]
    notes = [*drift_notes(moved), *kept, *few_sample_notes(judged), *notes]
    return replace(account, judged=judged, moved=moved, notes=tuple(dict.fromkeys(notes)))


def _round_inputs(sample: Arrays, proto: onnx.ModelProto, wish: QuantizationRequest) -> dict[str, np.ndarray]:
    """The inputs as ``proto`` gets them: those that are half are rounded to it, in float32."""
    form = FORMATS[wish.half]
    half = {v.name for v in proto.graph.input if v.type.tensor_type.elem_type == form.onnx}
    return {name: form.round_to_format(v).astype(np.float32) if name in half else v for name, v in sample.items()}
