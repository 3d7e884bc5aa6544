"""Read a linear op's weight as rows, one per output channel, and select rows to test."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..forms.constant_linear import ConstantLinear

# Maximum number of products in the sum of one output
TAPS = 2**14


@dataclass(frozen=True)
class WeightRow:
    """Weights of one output channel.

    Attributes:
        output: number of the channel.
        inputs: numbers of the input channels, (inputs,).
        weights: weights, (inputs, places of the window).
    """

    output: int
    inputs: np.ndarray
    weights: np.ndarray


def weight_table(linear: ConstantLinear) -> np.ndarray:
    """Lay out the weight as (rows, inputs of a group, places of the window).

    Each row is an output channel. If a MatMul has several matrices, the rows are the output channels of all matrices.
    In a transposed convolution without strides, each place of the window is a separate output; only the place with the
    largest weights is taken.

    Returns:
        a float64 array.
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
    """Read one row, limited to about `TAPS` products.

    Args:
        table: result of `weight_table`.
        r: number of the row.

    Returns:
        the row; if it has too many inputs, only the largest inputs and some others spread evenly.
    """
    inputs = _first_input_channels(linear, table, np.array([r]))[0] + np.arange(table.shape[1])
    weights = table[r]
    most = max(2, TAPS // table.shape[2])
    # Take the inputs with the largest weights, and some others spread evenly.
    if len(inputs) > most:
        largest = np.argsort(np.abs(weights).sum(axis=1))[-(most // 2) :]
        chosen = np.unique(np.r_[largest, np.linspace(0, len(inputs) - 1, most // 2).astype(int)])
        inputs = inputs[chosen]
        weights = weights[chosen]
    return WeightRow(r % linear.output_channels, inputs, weights)


def _first_input_channels(linear: ConstantLinear, table: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the first input channel that each row reads."""
    return (
        rows
        % linear.output_channels
        // max(1, linear.output_channels // linear.groups)
        * (table.shape[1] if linear.groups > 1 else 0)
    )


def cancellation_factors(linear: ConstantLinear, table: np.ndarray, large: np.ndarray, small: np.ndarray) -> np.ndarray:
    """Compute the cancellation of each row.

    Args:
        large: magnitudes of the terms per input channel.
        small: magnitudes of the inputs after cancellation, per input channel.

    Returns:
        for each row, the weighted sum of ``large`` divided by the weighted sum of ``small``.
    """
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
    """Select rows to test.

    Args:
        cancels: cancellation of each row.
        most: number of rows to select.

    Returns:
        indices of the largest values, with a third of ``most`` spread evenly; all indices for ``most`` rows or fewer.
    """
    if cancels.size <= most:
        return np.arange(cancels.size)
    spread = np.linspace(0, cancels.size - 1, most // 3).astype(int)
    return np.unique(np.r_[np.argsort(cancels)[-(most - len(spread)) :], spread])
