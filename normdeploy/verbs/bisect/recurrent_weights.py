"""Convert weights of torch's recurrent layers to ONNX's layout.

ONNX stacks the directions in one tensor, and both biases in one tensor. It also orders the gates differently: LSTM has
i, o, f, c, but torch has i, f, c, o; GRU has z, r, h, but torch has r, z, h (onnx, docs/Operators.md; torch.nn.LSTM and
torch.nn.GRU).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from ...types import Array, Arrays

GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
_FIRST = re.compile(r"(?P<before>.*)weight_ih_(?P<layer>l\d+)$")


def iter_packed_weights(op: str, place: int, parameters: Arrays) -> Iterator[tuple[str, Array]]:
    """Convert the weights of all layers that an input of a recurrent node may hold.

    Args:
        op: "LSTM", "GRU" or "RNN".
        place: index of the input: 1 for the weights of the input, 2 for those of the state, 3 for the biases.
        parameters: parameters of the model, by torch's names.

    Yields:
        Name of the layer's first parameter, and the array [directions, ...].
    """
    for first in filter(None, map(_FIRST.match, parameters)):
        directions = [first["layer"], f"{first['layer']}_reverse"]
        parts = {1: ("weight_ih",), 2: ("weight_hh",), 3: ("bias_ih", "bias_hh")}[place]
        names = [
            [f"{first['before']}{part}_{layer}" for part in parts]
            for layer in directions
            if f"{first['before']}weight_ih_{layer}" in parameters
        ]
        if all(name in parameters for group in names for name in group):
            stacked = [np.concatenate([_reorder_gates(op, parameters[name]) for name in group]) for group in names]
            yield names[0][0], np.stack(stacked)


def _reorder_gates(op: str, parameter: Array) -> Array:
    gates = np.split(parameter, len(GATES[op]))
    return np.concatenate([gates[place] for place in GATES[op]])
