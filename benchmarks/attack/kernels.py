"""Define convolutions in float64 for ReferenceEvaluator: the sum of one tensor product per kernel element."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

Ints = list[int] | None
ALL = slice(None)


def _shifted(bias: np.ndarray | None, y: np.ndarray) -> np.ndarray:
    return y if bias is None else y + bias.reshape(1, -1, *[1] * (y.ndim - 2))


def conv(
    x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, group: int, pads: Ints, strides: Ints, dilations: Ints
) -> np.ndarray:
    """Convolve x [N, C, *S] with w [M, C/group, *K].

    Returns:
        [N, M, *T].
    """
    rank = x.ndim - 2
    pads, strides, dilations = pads or [0] * 2 * rank, strides or [1] * rank, dilations or [1] * rank
    x = np.pad(x, [(0, 0), (0, 0), *((pads[i], pads[rank + i]) for i in range(rank))])
    kernel = w.shape[2:]
    out = [(x.shape[2 + i] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1 for i in range(rank)]
    y = np.zeros((x.shape[0], w.shape[0], *out), np.float64)
    inner, outer = x.shape[1] // group, w.shape[0] // group
    place: Any
    for place in product(*map(range, kernel)):
        cut: Any = tuple(
            slice(p * d, p * d + (o - 1) * s + 1, s) for p, d, s, o in zip(place, dilations, strides, out, strict=True)
        )
        part = x[(ALL, ALL, *cut)]
        for g in range(group):
            lane = part[:, g * inner : (g + 1) * inner]
            y[:, g * outer : (g + 1) * outer] += np.einsum(
                "nc...,mc->nm...", lane, w[(slice(g * outer, (g + 1) * outer), ALL, *place)]
            )
    return _shifted(bias, y)


def conv_transpose(
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None,
    group: int,
    pads: Ints,
    strides: Ints,
    dilations: Ints,
    extra: Ints,
) -> np.ndarray:
    """Convolve x [N, C, *S] with w [C, M/group, *K], transposed.

    Returns:
        [N, M, *T].
    """
    rank = x.ndim - 2
    pads, strides, dilations, extra = (
        pads or [0] * 2 * rank,
        strides or [1] * rank,
        dilations or [1] * rank,
        extra or [0] * rank,
    )
    kernel = w.shape[2:]
    full = [strides[i] * (x.shape[2 + i] - 1) + extra[i] + (kernel[i] - 1) * dilations[i] + 1 for i in range(rank)]
    y = np.zeros((x.shape[0], w.shape[1] * group, *full), np.float64)
    inner, outer = x.shape[1] // group, w.shape[1]
    place: Any
    for place in product(*map(range, kernel)):
        cut: Any = tuple(
            slice(p * d, p * d + (n - 1) * s + 1, s)
            for p, d, s, n in zip(place, dilations, strides, x.shape[2:], strict=True)
        )
        for g in range(group):
            lane = x[:, g * inner : (g + 1) * inner]
            part = np.einsum("nc...,cm->nm...", lane, w[(slice(g * inner, (g + 1) * inner), ALL, *place)])
            y[(slice(None), slice(g * outer, (g + 1) * outer), *cut)] += part
    keep: Any = tuple(slice(pads[i], full[i] - pads[rank + i]) for i in range(rank))
    return _shifted(bias, y[(ALL, ALL, *keep)])


class Conv(OpRun):
    """Conv for ReferenceEvaluator."""

    op_domain = ""

    def _run(
        self,
        X: Any,
        W: Any,
        B: Any = None,
        auto_pad: Any = None,
        dilations: Any = None,
        group: Any = None,
        kernel_shape: Any = None,
        pads: Any = None,
        strides: Any = None,
    ) -> tuple[np.ndarray]:
        if auto_pad not in (None, "NOTSET"):
            raise NotImplementedError("auto_pad")
        return (conv(X, W, B, group or 1, pads, strides, dilations),)


class ConvTranspose(OpRun):
    """ConvTranspose for ReferenceEvaluator."""

    op_domain = ""

    def _run(
        self,
        X: Any,
        W: Any,
        B: Any = None,
        auto_pad: Any = None,
        dilations: Any = None,
        group: Any = None,
        kernel_shape: Any = None,
        output_padding: Any = None,
        output_shape: Any = None,
        pads: Any = None,
        strides: Any = None,
    ) -> tuple[np.ndarray]:
        if auto_pad not in (None, "NOTSET") or output_shape:
            raise NotImplementedError("auto_pad, output_shape")
        return (conv_transpose(X, W, B, group or 1, pads, strides, dilations, output_padding),)


OPS = [Conv, ConvTranspose]
