"""Keep LSTM, GRU and RNN as single operators while a model is traced, so that their length may be dynamic.

torch.export (2.13) unrolls these layers over time, which fixes the number of steps to that of the example. This module
makes the layers call its own operators instead, whose results have the same length as their input. The exporter writes
these operators as ONNX's LSTM, GRU and RNN. Each operator takes weights in the order of torch's ``_flat_weights``.

ONNX supports neither packed sequences (``batch_sizes``) nor projections (``proj_size``). torch.export can't trace
packed sequences, and this module refuses projections.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops.core import aten_gru, aten_lstm
from torch.nn.modules import rnn

from ..errors import InputError

Tensor = torch.Tensor

PROJECTION = (
    "an LSTM with proj_size, but ONNX has no projection of the state: train it with proj_size=0, or write it as a "
    "loop over its steps"
)


def _define_operator(name: str, states: int, run: Callable[..., Any], activation: str = "") -> Any:
    """Register an operator ``normdeploy::name`` that takes x, the initial states, weights and options.

    Args:
        states: number of state tensors.
        run: function that computes the operator in torch.
        activation: schema of an additional argument; "" for none.

    Returns:
        The operator. It returns y and the final states. The shape of y is (time, batch, directions · hidden), or begins
        with the batch for ``batch_first``.
    """
    first = ", ".join(f"Tensor state{place}" for place in range(states))
    schema = f"(Tensor x, {first}, {_OPTIONS}{activation}) -> ({', '.join(['Tensor'] * (states + 1))})"
    operator = torch.library.custom_op(f"normdeploy::{name}", run, mutates_args=(), schema=schema)

    def make_outputs(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        hidden = rest[0]
        bidirectional = rest[states + 3]
        width = hidden.shape[-1] * (2 if bidirectional else 1)
        return hidden.new_empty((*x.shape[:-1], width)), *map(torch.empty_like, rest[:states])

    operator.register_fake(make_outputs)
    return operator


_OPTIONS = "Tensor[] weights, bool has_biases, int num_layers, bool bidirectional, bool batch_first"


def _call_options(has_biases: bool, num_layers: int, bidirectional: bool, batch_first: bool) -> tuple[Any, ...]:
    """Return the options in the order of torch's own operators, with dropout and training off."""
    return has_biases, num_layers, 0.0, False, bidirectional, batch_first


def _run_lstm(x: Tensor, hidden: Tensor, cell: Tensor, weights: list[Tensor], *options: Any) -> tuple[Tensor, ...]:
    return torch.lstm(x, (hidden, cell), weights, *_call_options(*options))


def _run_gru(x: Tensor, hidden: Tensor, weights: list[Tensor], *options: Any) -> tuple[Tensor, ...]:
    return torch.gru(x, hidden, weights, *_call_options(*options))


def _run_rnn(x: Tensor, hidden: Tensor, weights: list[Tensor], *options: Any) -> tuple[Tensor, ...]:
    *options_of_all, activation = options
    if activation == "Tanh":
        run = torch.rnn_tanh
    else:
        run = torch.rnn_relu
    return run(x, hidden, weights, *_call_options(*options_of_all))


_LSTM = _define_operator("lstm", 2, _run_lstm)
_GRU = _define_operator("gru", 1, _run_gru)
_RNN = _define_operator("rnn", 1, _run_rnn, ", str activation")


# ------------------------------------------------------------------ tracing


@contextlib.contextmanager
def keep_recurrent_ops() -> Iterator[None]:
    """Make torch.nn.LSTM, GRU and RNN call the operators of this module within the context. This affects the whole
    process.
    """
    functions = rnn._VF
    rnn._VF = _recurrent_functions(functions)  # type: ignore[assignment]
    try:
        yield
    finally:
        rnn._VF = functions


def _recurrent_functions(torchs: Any) -> Any:
    """Return the functions that torch.nn.modules.rnn calls, with its recurrent functions replaced."""

    def is_ours(args: Sequence[Any], states: int) -> bool:
        # For a packed sequence, the second argument is the tensor of batch sizes. Otherwise it is the initial state,
        # which is a pair for an LSTM.
        packed = isinstance(args[1], torch.Tensor) and (states == 2 or isinstance(args[2], torch.Tensor))
        if packed or len(args) != 9:
            return False
        _, _, weights, has_biases, num_layers, _, _, bidirectional, _ = args
        # This number of weights shows that the layers have no projection: a projection adds a weight to each layer and
        # direction.
        if len(weights) == num_layers * (2 if bidirectional else 1) * (4 if has_biases else 2):
            return True
        raise InputError(f"the model has {PROJECTION}")

    def make_function(name: str, operator: Any, states: int, *more: str) -> Callable[..., Any]:
        def run_recurrent(*args: Any) -> Any:
            if not is_ours(args, states):
                return getattr(torchs, name)(*args)
            x, first, weights, has_biases, num_layers, _, _, bidirectional, batch_first = args
            # An LSTM has a pair of states, a GRU or RNN has one tensor.
            if states == 2:
                given = first
            else:
                given = (first,)
            return operator(x, *given, list(weights), has_biases, num_layers, bidirectional, batch_first, *more)

        return run_recurrent

    ours = {
        "lstm": make_function("lstm", _LSTM, 2),
        "gru": make_function("gru", _GRU, 1),
        "rnn_tanh": make_function("rnn_tanh", _RNN, 1, "Tanh"),
        "rnn_relu": make_function("rnn_relu", _RNN, 1, "Relu"),
    }
    others = {name: getattr(torchs, name) for name in ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")}
    return SimpleNamespace(**others, **ours)


# ------------------------------------------------------------------ ONNX


def _translate_lstm(
    x: Any,
    hidden: Any,
    cell: Any,
    weights: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    return aten_lstm(x, [hidden, cell], weights, has_biases, num_layers, 0.0, False, bidirectional, batch_first)


def _translate_gru(
    x: Any,
    hidden: Any,
    weights: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    return aten_gru(x, hidden, weights, has_biases, num_layers, 0.0, False, bidirectional, batch_first)


def _translate_rnn(
    x: Any,
    hidden: Any,
    weights: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
    activation: str,
) -> Any:
    """Write one ONNX RNN node for each layer (https://onnx.ai/onnx/operators/onnx__RNN.html).

    ONNX's output Y has the shape (time, directions, batch, hidden). ONNX's input B contains the biases of both
    products, concatenated.
    """
    directions = 2 if bidirectional else 1
    step = 4 if has_biases else 2
    if batch_first:
        x = op.Transpose(x, perm=[1, 0, 2])
    last = []
    for layer in range(num_layers):
        own = [
            weights[(layer * directions + d) * step : (layer * directions + d + 1) * step] for d in range(directions)
        ]
        row = layer * directions
        both = [op.Unsqueeze(op.Concat(w[2], w[3], axis=0), int64_constant([0])) for w in own] if has_biases else []
        y, last_of_layer = op.RNN(
            x,
            op.Concat(*(op.Unsqueeze(w[0], int64_constant([0])) for w in own), axis=0),
            op.Concat(*(op.Unsqueeze(w[1], int64_constant([0])) for w in own), axis=0),
            op.Concat(*both, axis=0) if has_biases else None,
            None,
            op.Slice(hidden, int64_constant([row]), int64_constant([row + directions]), int64_constant([0])),
            direction="bidirectional" if bidirectional else "forward",
            hidden_size=hidden.shape[2],
            activations=[activation] * directions,
        )
        last.append(last_of_layer)
        # (time, directions, batch, hidden) becomes (time, batch, directions · hidden).
        x = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), int64_constant([0, 0, -1]))
    if batch_first:
        x = op.Transpose(x, perm=[1, 0, 2])
    return x, op.Concat(*last, axis=0)


def int64_constant(values: Sequence[int]) -> Any:
    """Write a Constant of int64.

    Returns:
        The value of the Constant node.
    """
    return op.Constant(value=ir.tensor(np.array(values, np.int64)))


# In the format of torch.onnx.export's custom_translation_table.
TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.normdeploy.lstm.default: _translate_lstm,
    torch.ops.normdeploy.gru.default: _translate_gru,
    torch.ops.normdeploy.rnn.default: _translate_rnn,
}
