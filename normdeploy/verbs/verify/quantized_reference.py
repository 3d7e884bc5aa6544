"""What a quantized file is to answer, for ``bench`` and ``package``: what the file itself says, in float64.

How near it comes to the model is what ``verify`` looks at; generated inputs may lie beyond the ranges that it was
calibrated for, which a race need not know. A value next to a tie is rounded to the other side by the least error of a
runtime, so that each element may be off by what other roundings of the activations do to it
(`runtimes.quantized_float64`).
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
    """By the file's outputs, in their order; ``allowed``: how far each element may be off for other roundings."""

    outputs: dict[str, Array]
    allowed: dict[str, Array]


def is_supported_quantized(file: PathLike) -> bool:
    """Whether a file is quantized in a way that float64 follows."""
    try:
        proto = load_onnx(file, external_data=False)
    except GraphError:
        # onnxruntime runs files that onnx's checker does not know
        return False
    return is_quantized(proto) and not unexpandable_ops(proto)


def has_four_bit_weights(file: PathLike) -> bool:
    """Whether layers hold weights of four bits: onnxruntime's optimizer rounds what these read to 8 bits."""
    return any(layer.weight in _FOUR_BITS for q in all_quantizations(load_onnx(file)) for layer in q.quantized_layers())


def evaluate_quantized(file: PathLike, feeds: Arrays, weights: bool = False) -> QuantizedAnswer | None:
    """What ``file`` says of ``feeds``; None where float64 can't tell.

    ``weights``: the outputs may differ by what half a step of each stored weight does, too: those of the model before.
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
