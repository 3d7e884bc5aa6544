"""Quantize with ModelOpt, in its own interpreter: ``modelopt_worker.py IN.onnx SAMPLES.npz OUT.onnx MODE METHOD
SHAPES``.

It imports nothing of this project. Norms and everything that is not quantized stay float32, as in the other files.
"""

from __future__ import annotations

import sys

import numpy as np


def main() -> None:
    """Quantize one file."""
    source, samples, target, mode, method, shapes = sys.argv[1:]
    from modelopt.onnx.quantization import quantize

    options = {"disable_mha_qdq": False} if mode != "int4" else {}
    quantize(
        source,
        quantize_mode=mode,
        calibration_data=dict(np.load(samples)),
        calibration_method=method,
        calibration_shapes=shapes,
        calibration_eps=["cpu"],
        high_precision_dtype="fp32",
        output_path=target,
        log_level="WARNING",
        **options,
    )


if __name__ == "__main__":
    main()
