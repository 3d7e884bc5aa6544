"""Calibrate ranges by onnxruntime's calibrators, entropy and percentile.

The source of the entropy method is Migacz, 8-bit inference with TensorRT, 2017. The model runs on one sample at a time,
and the calibrator adds up the histograms. So memory does not grow with the number of samples.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization.calibrate import CalibrationDataReader, EntropyCalibrater, PercentileCalibrater

from ..precision.tensor_ranges import Samples, name_failing_sample
from ..storage.onnx_files import save_onnx
from ..types import Arrays, Progress

# Minimum size in bytes of a model whose weights are saved in a separate file
_LARGE = 2**30


def calibrate_ranges(
    proto: onnx.ModelProto,
    tensors: Sequence[str],
    samples: Samples,
    method: str,
    symmetric: bool,
    progress: Progress | None = None,
) -> dict[str, tuple[float, float]]:
    """Calibrate the ranges of ``tensors``, which are float32 tensors of the main graph.

    Args:
        method: "entropy" or "percentile" (a range that contains 99.999 % of the values).
        symmetric: True to center each range on zero.

    Returns:
        tensor name → (low, high).

    Raises:
        InputError: the model does not run on a sample.
    """
    kind = {"entropy": EntropyCalibrater, "percentile": PercentileCalibrater}[method]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        large = proto.ByteSize() >= _LARGE
        save_onnx(proto, path, external=large)
        calibrator = kind(path, [], str(Path(folder) / "augmented.onnx"), large, method, symmetric)
        values = {name: onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in tensors}
        calibrator.select_tensors_to_calibrate = lambda model: (set(tensors), values)
        calibrator.augment_graph()
        calibrator.create_inference_session()
        for number, sample in enumerate(samples):
            if progress is not None:
                progress("calibrate", number, len(samples))
            with name_failing_sample(number), _silence_stdout():
                calibrator.collect_data(_SampleReader(sample))
        with _silence_stdout():
            computed = calibrator.compute_data()
    ends = {name: computed[name].range_value for name in tensors if name in computed}
    return {name: (float(np.min(low)), float(np.max(high))) for name, (low, high) in ends.items()}


def _silence_stdout() -> redirect_stdout[io.StringIO]:
    """Suppress stdout, because the calibrators print their progress for each sample."""
    return redirect_stdout(io.StringIO())


class _SampleReader(CalibrationDataReader):  # type: ignore[misc]
    """Reader that yields one sample."""

    def __init__(self, sample: Arrays) -> None:
        self._left: Iterator[dict[str, Any]] = iter([dict(sample)])

    def get_next(self) -> dict[str, Any] | None:
        return next(self._left, None)
