"""The stage of ``export`` and ``optimize`` that quantizes: what is asked for, and the file that comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import onnx

from ..choices import TENSORRT
from ..errors import GraphError, InputError
from ..model import InputSpec
from ..precision.calibrate import loadable
from ..quantization.quantize import described, quantized
from ..quantization.samples import split
from ..quantization.wish import Wish, require_runtime
from ..quantized import Quantization
from ..sessions import open_session
from ..types import Progress
from ..verbs.verify.policy import Thresholds, policy_of

if TYPE_CHECKING:
    from .common import Calibration


def wish_of(
    quantize: str | None,
    runtime: str,
    calibration: str | None,
    metric: Thresholds | None,
    calibrate: Calibration,
    precision: str | None,
    dynamic: bool = False,
    keep_float: Sequence[str] = (),
) -> Wish | None:
    """What is asked for, looked at before any work; None where nothing is to be quantized.

    Raises:
        InputError: options contradict each other, or the runtime has no kernels.
    """
    if quantize is None:
        if metric or calibration or dynamic or keep_float:
            raise InputError(
                "metric, calibration, dynamic and keep_float are for quantization alone; ask for it with quantize:"
                " int8, fp8 or int4"
            )
        return None
    if precision is not None:
        raise InputError(
            f"{quantize} and {precision} in one file are not written; leave one out (what is not quantized stays"
            " float32)"
        )
    if not calibrate and quantize != "int4" and not dynamic:
        raise InputError(
            f"{quantize} takes ranges of samples; give some with --calibrate samples.npz (INT4 weights do without, and"
            " --dynamic in onnxruntime)"
        )
    if metric and not calibrate:
        raise InputError("a metric is judged on samples; give some with --calibrate samples.npz")
    wish = Wish(quantize, runtime, calibration or "minmax", policy_of(None, metric), dynamic, tuple(keep_float))
    require_runtime(wish)
    return wish


def quantized_file(
    proto: onnx.ModelProto,
    wish: Wish,
    calibrate: Calibration,
    inputs: Sequence[InputSpec],
    progress: Progress | None,
) -> tuple[onnx.ModelProto, Quantization]:
    """
    Raises:
        InputError: the samples do not fit, or no choice of layers reaches the metrics.
        GraphError: onnxruntime does not load the file, which it should.
    """
    samples = split(calibrate, described(proto, inputs)) if calibrate else None
    made, account = quantized(proto, wish, samples, inputs, progress)
    if wish.runtime not in TENSORRT:
        try:
            with loadable(made) as file:
                open_session(file, optimize=True)
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise GraphError(
                f"the quantized file would not run, and nothing is written: {' '.join(str(error).split())[:300]}; leave"
                " --quantize out, and please report it"
            ) from error
    return made, account
