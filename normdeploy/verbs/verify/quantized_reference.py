"""Evaluate a quantized file in float64, as the reference of ``bench`` and ``package``.

``verify`` compares a quantized file with the original model. ``bench`` and ``package`` use the evaluation of the file
itself, because they may have no model, and because generated inputs may exceed the calibrated ranges.

Even a tiny error of a runtime can round a value near a tie to the other side. Therefore the allowed error of each
element includes the effect of other roundings of the activations (`runtimes.quantized_float64`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...compare.element_errors import absolute_difference
from ...compare.ulp_spacing import EAGER_MULTIPLE
from ...errors import GraphError, NormdeployError
from ...graphs.qoperator_expansion import unexpandable_ops
from ...graphs.quantization_info import all_quantizations, is_quantized
from ...runtimes.quantized_float64 import QuantizedRunner
from ...runtimes.rounding_draws import RoundingDraw
from ...storage.onnx_files import load_onnx
from ...types import Array, Arrays, PathLike
from .quantization_budget import raise_to_floor

_DRAWS = 3
_FOUR_BITS = ("int4", "uint4")


@dataclass(frozen=True)
class QuantizedAnswer:
    """Float64 outputs of a quantized file, by name and in the file's order.

    Attributes:
        outputs: name -> float64 output.
        allowed: name -> allowed error of each element, from other roundings.
    """

    outputs: dict[str, Array]
    allowed: dict[str, Array]


def is_supported_quantized(file: PathLike) -> bool:
    """Check whether a file is quantized and float64 evaluation supports all its ops.

    Returns:
        True if both hold; False for a file that onnx's checker rejects.
    """
    try:
        proto = load_onnx(file, external_data=False)
    except GraphError:
        # onnxruntime runs some files that onnx's checker rejects.
        return False
    return is_quantized(proto) and not unexpandable_ops(proto)


def has_four_bit_weights(file: PathLike) -> bool:
    """Check whether layers hold 4-bit weights.

    onnxruntime's optimizer rounds the activations that such layers read to 8 bits.

    Returns:
        True if a quantized layer has int4 or uint4 weights.
    """
    return any(layer.weight in _FOUR_BITS for q in all_quantizations(load_onnx(file)) for layer in q.quantized_layers())


def evaluate_quantized(file: PathLike, feeds: Arrays, weights: bool = False) -> QuantizedAnswer | None:
    """Evaluate a quantized file in float64.

    Args:
        feeds: inputs by name.
        weights: True to also allow the effect of half a quantization step in each stored weight, so that outputs of the
            float model pass.

    Returns:
        outputs and allowed errors; None if float64 evaluation can't run the file.
    """
    try:
        runner = QuantizedRunner(load_onnx(file))
        plain = dict(runner.run_with_draw(feeds, RoundingDraw()))
        draws = [runner.run_with_draw(feeds, RoundingDraw(seed, clips=False)) for seed in range(_DRAWS)]
        if weights:
            exact = runner.run_with_draw(feeds, RoundingDraw("exact", clips=False))
        else:
            exact = {}
        others = [
            runner.run_with_draw(feeds, RoundingDraw("exact", seed, clips=False))
            for seed in range(_DRAWS if weights else 0)
        ]
    except NormdeployError:
        return None
    allowed = {name: _allowed_error(value, [draw[name] for draw in draws]) for name, value in plain.items()}
    for name, value in exact.items():
        allowed[name] = allowed[name] + _allowed_error(value, [other[name] for other in others])
    return QuantizedAnswer(plain, allowed)


def _allowed_error(value: Array, draws: Sequence[Array]) -> Array:
    if value.dtype.kind != "f" or any(draw.shape != value.shape for draw in draws):
        return np.zeros(value.shape)
    moved = np.max([absolute_difference(draw, value, one_sided=0.0) for draw in draws], axis=0)
    return EAGER_MULTIPLE * raise_to_floor(moved)
