"""A linear op's weight as rows, one for each output channel, and which of them are worth a look."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..forms.constant_linear import ConstantLinear

# products that are summed up for one output
TAPS = 2**14


@dataclass(frozen=True)
class WeightRow:
    """What one output channel sums up: ``weights`` as (inputs, places of the window)."""

    output: int
    inputs: np.ndarray
    weights: np.ndarray


def weight_table(linear: ConstantLinear) -> np.ndarray:
    """The weight as (rows, inputs of a group, places of the window); rows are output channels, those of each matrix of
    a MatMul by several.

    Of a transposed convolution each place of the window is an output of its own without strides: the largest is taken.
    """
    w = linear.w
    if linear.node.op == "Conv":
        return w.reshape(*w.shape[:2], -1)
    if linear.node.op == "ConvTranspose":
        flat = w.reshape(*w.shape[:2], -1)
        flat = flat[..., [int(np.argmax(np.square(flat).sum(axis=(0, 1))))]]
        grouped = flat.reshape(linear.groups, -1, *flat.shape[1:])
        return np.swapaxes(grouped, 1, 2).reshape(-1, grouped.shape[1], 1)
    if linear.node.op == "Gemm":
        by_rows = linear.is_transposed
    else:
        by_rows = linear.weight == 0
    if by_rows:
        turned = w
    else:
        turned = np.swapaxes(w, -1, -2)
    return turned.reshape(-1, turned.shape[-1], 1)


def weight_row(linear: ConstantLinear, table: np.ndarray, r: int) -> WeightRow:
    inputs = _first_input_channels(linear, table, np.array([r]))[0] + np.arange(table.shape[1])
    weights = table[r]
    most = max(2, TAPS // table.shape[2])
    # the largest, and some between
    if len(inputs) > most:
        largest = np.argsort(np.abs(weights).sum(axis=1))[-(most // 2) :]
        chosen = np.unique(np.r_[largest, np.linspace(0, len(inputs) - 1, most // 2).astype(int)])
        inputs = inputs[chosen]
        weights = weights[chosen]
    return WeightRow(r % linear.output_channels, inputs, weights)


def _first_input_channels(linear: ConstantLinear, table: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The first input channel that each row reads."""
    return (
        rows
        % linear.output_channels
        // max(1, linear.output_channels // linear.groups)
        * (table.shape[1] if linear.groups > 1 else 0)
    )


def cancellation_factors(linear: ConstantLinear, table: np.ndarray, large: np.ndarray, small: np.ndarray) -> np.ndarray:
    """For each row how much larger its terms get than what they come to."""
    rows = []
    step = max(1, 2**18 // max(1, table[0].size))
    for start in range(0, len(table), step):
        each = np.abs(table[start : start + step]).sum(axis=2)
        if linear.groups > 1:
            read = _first_input_channels(linear, table, np.arange(start, start + len(each)))[:, None] + np.arange(
                table.shape[1]
            )
            rows.append((each * large[read]).sum(axis=1) / ((each * small[read]).sum(axis=1) + 1e-300))
        else:
            rows.append((each @ large) / (each @ small + 1e-300))
    return np.nan_to_num(np.concatenate(rows))


def select_rows(cancels: np.ndarray, most: int) -> np.ndarray:
    """Up to ``most`` places: those of the largest values, and a third spread over all."""
    if cancels.size <= most:
        return np.arange(cancels.size)
    spread = np.linspace(0, cancels.size - 1, most // 3).astype(int)
    return np.unique(np.r_[np.argsort(cancels)[-(most - len(spread)) :], spread])
