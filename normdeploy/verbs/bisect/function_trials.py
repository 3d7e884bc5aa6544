"""Identify elementwise functions of one tensor, for example GELU, from their values.

The nodes of a spot (the group of nodes at a fault) may compute another function than the model. Both functions are
identified, even if they consist of several nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.nn import functional

from ...types import Array
from .difference_analysis import all_within
from .trial_changes import Cause, TrialSpot

# Minimum number of distinct values. Fewer values can't distinguish functions.
_FEWEST = 4
_MOST_OPERANDS = 16
_TANH = math.sqrt(2 / math.pi)


def _wrap_torch_function(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Array], Array]:
    return lambda x: function(torch.from_numpy(np.ascontiguousarray(x))).numpy()


# GELU and its parts. A spot may end inside a GELU, and then one of the parts identifies it.
_GELUS: dict[str, Callable[[Array], Array]] = {
    "GELU (erf)": _wrap_torch_function(functional.gelu),
    "GELU (tanh)": _wrap_torch_function(lambda x: functional.gelu(x, approximate="tanh")),
    "GELU (sigmoid of 1.702 x)": lambda x: x * _sigmoid(1.702 * x),
    "the erf of GELU": _wrap_torch_function(lambda x: torch.erf(x / math.sqrt(2))),
    "the tanh of GELU": lambda x: np.tanh(_TANH * (x + 0.044715 * x**3)),
    "the sigmoid of GELU": lambda x: _sigmoid(1.702 * x),
}
_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "Identity": lambda x: x,
    "ReLU": lambda x: np.maximum(x, 0),
    "ReLU6": lambda x: np.clip(x, 0, 6),
    "SiLU": _wrap_torch_function(functional.silu),
    "Mish": _wrap_torch_function(functional.mish),
    "HardSwish": _wrap_torch_function(functional.hardswish),
    "HardSigmoid": _wrap_torch_function(functional.hardsigmoid),
    "Sigmoid": lambda x: _sigmoid(x),
    "Tanh": np.tanh,
    "ELU": _wrap_torch_function(functional.elu),
    "SELU": _wrap_torch_function(functional.selu),
    "Softplus": _wrap_torch_function(functional.softplus),
    "Softsign": _wrap_torch_function(functional.softsign),
    "log(sigmoid)": _wrap_torch_function(functional.logsigmoid),
    "Erf": _wrap_torch_function(torch.erf),
    "Exp": np.exp,
    "Log": np.log,
    "Sqrt": np.sqrt,
    "Abs": np.abs,
    "square": np.square,
    "Reciprocal": np.reciprocal,
    **_GELUS,
}


def find_other_function(around: TrialSpot) -> Cause | None:
    """Identify the function that the model computes at a spot, and the function of the file if it is a known function.

    Returns:
        A cause; None if the model's function is not known.
    """
    spot = around.spot
    got = around.values[spot.end]
    expected = spot.expected
    if spot.left_out or got.size != expected.size or expected.dtype.kind != "f" or not np.isfinite(expected).all():
        return None
    if len(np.unique(expected)) < _FEWEST:
        return None
    got = got.reshape(expected.shape)
    for operand, x in _iter_operands(around):
        right = _identify_function(x, expected, spot.allowed)
        if right is None:
            continue
        own = _identify_function(x, got, spot.allowed)
        if len(spot.places) == 1:
            place = spot.places[0]
        else:
            place = None
        # The file's function is not a known function. The kind stays "unknown", so that a spot with more nodes is tried
        # too.
        if own is None:
            text = f"the model computes {right} of {operand!r} here, the file another function"
            return Cause("unknown", text, place)
        if {own, right} <= _GELUS.keys():
            kind = "approximation"
        else:
            kind = "operator"
        return Cause(kind, f"the file computes {own} of {operand!r}, the model {right}", place)
    behind = _identify_function(got, expected, spot.allowed)
    if behind is None:
        return None
    return Cause("left out", f"{behind} of {spot.end!r} is missing", around.exact.makers.get(spot.end))


def _iter_operands(around: TrialSpot) -> Iterator[tuple[str, Array]]:
    """Yield each tensor that the spot reads but does not compute, in the shape of the spot's end. Tensors with another
    number of elements are skipped.
    """
    exact = around.exact
    expected = around.spot.expected
    made = {name for at in around.nodes for name in at.node.output}
    read = dict.fromkeys(name for at in around.nodes for name in exact.read_names(at.node))
    for name in [n for n in read if n not in made and n not in exact.constants][:_MOST_OPERANDS]:
        value = around.values.get(name)
        if value is not None and value.size == expected.size and value.dtype.kind == "f":
            yield name, value.reshape(expected.shape)


def _identify_function(x: Array, y: Array, allowed: float) -> str | None:
    """Return the name of the function that maps ``x`` to ``y``; None if no known function maps ``x`` to ``y``."""
    if np.isfinite(x).all():
        with np.errstate(all="ignore"):
            for name, function in _FUNCTIONS.items():
                if all_within(function(x), y, allowed):
                    return name
            return _identify_leaky_relu(x, y, allowed) or _identify_clip(x, y, allowed)
    return None


def _identify_leaky_relu(x: Array, y: Array, allowed: float) -> str | None:
    """Identify a leaky ReLU by the slope at the most negative element."""
    lowest = int(x.argmin())
    if x.flat[lowest] >= 0:
        return None
    slope = float(y.flat[lowest] / x.flat[lowest])
    if all_within(np.where(x > 0, x, slope * x), y, allowed):
        return f"LeakyReLU with slope {slope:.4g}"
    return None


def _identify_clip(x: Array, y: Array, allowed: float) -> str | None:
    """Identify a clip. Its bounds are the smallest and the largest element of the result, and at least one bound must
    clip an element.
    """
    low = float(y.min())
    high = float(y.max())
    if not all_within(np.clip(x, low, high), y, allowed):
        return None
    if low > x.min() + allowed:
        told = [f"min {low:.4g}"]
    else:
        told = []
    if high < x.max() - allowed:
        told += [f"max {high:.4g}"]
    if told:
        return f"Clip ({', '.join(told)})"
    return None


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))
