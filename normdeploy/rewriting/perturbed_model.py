"""Run a model in onnxruntime with perturbed parameters, inputs and reductions, to see the effect of rounding.

The results of reductions are perturbed too. In a constant row, x − mean is zero, and only a perturbed mean changes it.
The norm divides this difference by √epsilon, so the effect is large, for example in an instance norm of one place.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from ..compare.perturbation import perturb_array
from ..dtypes import is_float_dtype
from ..graphs import ort_equivalence
from ..graphs.transposed_weights import transpose_column_weights
from ..norms.norm_table import STANDARD
from ..ort_sessions.session import ort_error_message
from ..recognition.anchors import VIEWS
from ..storage.heap import trim_heap
from ..storage.proto_traversal import iter_bodies, required_inputs
from ..storage.shared_weights import tensor_array
from ..storage.weight_serialization import detach_weights

FLOATING = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
# Maximum number of elements of a parameter that is perturbed. For a larger parameter, the bias or norm of its layer is
# perturbed instead
_LARGE = 2**16
_PRODUCTS = ("MatMul", "Gemm", "Conv", "Einsum")
_POOLS = ("GlobalAveragePool", "AveragePool", "Sum", "Mean")
_REDUCTIONS = frozenset({"ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2", *_POOLS, *_PRODUCTS})
_NORMS = [op for op, row in STANDARD.items() if row.has_scale]
_ARITHMETIC = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Add", "Sub", "Mul", "Div", "PRelu", *_NORMS})
# Ops that only move the elements of their first input
_MOVES = VIEWS | {"Tile"}
# Number of binary digits that every floating-point type can represent, bfloat16 included
_DIGITS = 8
# Seconds after which a run of the original model is terminated; a run of the rewritten model gets four times as many
PATIENCE = 20.0


class PerturbableModel:
    """onnxruntime session without optimizations.

    Attributes:
        outputs: names of the model's outputs.
        values: large weights by name.
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        other: PerturbableModel | None = None,
        floating: Mapping[str, int] | None = None,
    ) -> None:
        """Load the model.

        Args:
            proto: the model.
            other: model with which equal large weights are shared, so that they are in memory only once.
            floating: elem_types of the floating-point tensors, for a model that will be perturbed: small parameters
                become inputs, and each reduction's result is multiplied by an input that is 1. None for a model that
                will not be perturbed.
        """
        light, weights = detach_weights(proto, fed=True)
        self._inputs = [v.name for v in required_inputs(light.graph)]
        if floating is None:
            own = {}
        else:
            own = _parameters_to_inputs(light)
        if floating is None:
            self._parameters = own
        else:
            self._parameters = own | _add_reduction_factors(light, floating)
        self._stored: dict[str, np.ndarray] = {}
        self.values: dict[str, ort.OrtValue] = {}
        for name, stored in transpose_column_weights(
            light, {name: tensor_array(tensor) for name, tensor in weights.items()}
        ).items():
            if other is not None and name in other.values and _have_same_bytes(stored, other._stored[name]):
                self._stored[name], self.values[name] = other._stored[name], other.values[name]
            else:
                self._stored[name], self.values[name] = stored, ort_equivalence.make_ort_value(stored)
        unread = {name: value for name, value in self.values.items() if name not in self._parameters}
        for name in self._parameters:
            if name in self.values:
                self._parameters[name] = self.values[name].numpy()
        # Numbers of few binary digits are not perturbed, because a product with such a number, or its sum with
        # integers, is not rounded. A perturbed 1 in x·1 would let a later Cast to integers return the next lower
        # integer.
        self._exact = frozenset(name for name in own if _has_few_digits(self._parameters[name]))
        self._session, self._fed = ort_equivalence.open_session_without_weights(light, unread)
        self.outputs = [o.name for o in self._session.get_outputs()]

    def run_perturbed(
        self,
        feeds: Mapping[str, np.ndarray],
        rng: np.random.Generator | None = None,
        by: float = 0.0,
        patience: float = PATIENCE,
        *,
        move_inputs: bool = True,
    ) -> list[Any]:
        """Run the model on ``feeds``.

        Args:
            feeds: inputs by name.
            rng: generator of the perturbations; None for none.
            by: each parameter and reduction is multiplied by up to 1 ± ``by``.
            patience: seconds after which the run is terminated.
            move_inputs: perturb the inputs too.

        Returns:
            the outputs in the model's order.
        """
        given = {name: feeds[name] for name in self._inputs} | self._parameters
        if move_inputs:
            still = self._exact
        else:
            still = self._exact.union(self._inputs)
        fed = dict(self._fed)
        for name, value in given.items():
            if rng is not None and name not in still and is_float_dtype(value.dtype):
                value = perturb_array(value, by, rng)
            fed[name] = ort.OrtValue.ortvalue_from_numpy(ort_equivalence.to_computable_type(value))
        options = ort.RunOptions()
        # Two sessions are open but only one runs at a time, so a session frees its memory after each run.
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        # A loop in an untrusted file may never end.
        watch = threading.Timer(patience, lambda: setattr(options, "terminate", True))
        watch.daemon = True
        watch.start()
        try:
            return [
                v.numpy() if v.is_tensor() else v for v in self._session.run_with_ort_values(self.outputs, fed, options)
            ]
        finally:
            watch.cancel()
            trim_heap()


def _have_same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Return True if dtype, shape and bytes are equal."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return _memory_location(a) == _memory_location(b) or np.array_equal(_as_bytes(a), _as_bytes(b))


def _memory_location(array: np.ndarray) -> tuple[object, ...]:
    return array.__array_interface__["data"][0], array.strides


def _as_bytes(array: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if flat.size % 8 == 0:
        return flat.view(np.uint64)
    return flat


def _parameters_to_inputs(light: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Turn the small floating-point parameters of arithmetic ops into inputs.

    Returns their values by name; empty arrays for external ones.
    """
    readers = _ops_that_read(light)
    named = {v.name for v in (*light.graph.input, *light.graph.output)}
    inputs = {}
    for tensor in list(light.graph.initializer):
        floating = tensor.data_type in FLOATING and tensor.data_type != onnx.TensorProto.BFLOAT16
        if (
            floating
            and tensor.name not in named
            and readers.get(tensor.name, {""}) <= _ARITHMETIC
            and math.prod(tensor.dims) <= _LARGE
        ):
            external = tensor.data_location == onnx.TensorProto.EXTERNAL
            inputs[tensor.name] = np.zeros(0) if external else onnx.numpy_helper.to_array(tensor)
            light.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
            light.graph.initializer.remove(tensor)
    return inputs


def _ops_that_read(light: onnx.ModelProto) -> dict[str, set[str]]:
    """Collect the ops that read each tensor, directly or through a Tile or a view; "" stands for the caller."""
    readers: dict[str, set[str]] = {output.name: {""} for output in light.graph.output}
    # Backwards, so that the readers of a moved tensor are known.
    for node in reversed([node for body in iter_bodies(light) for node in body.node]):
        op = f"{node.domain}{node.op_type}"
        for i, name in enumerate(node.input):
            moved = i == 0 and op in _MOVES
            readers.setdefault(name, set()).update(readers.get(node.output[0], {""}) if moved else {op})
    return readers


def _add_reduction_factors(light: onnx.ModelProto, floating: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Multiply the results of reductions by inputs that are 1, which is exact. Returns these inputs by name."""
    nodes = list(light.graph.node)
    shaken: dict[str, np.ndarray] = {}
    made: list[onnx.NodeProto] = []
    for node in nodes:
        made.append(node)
        if node.output:
            y = node.output[0]
        else:
            y = ""
        if node.op_type in _REDUCTIONS and not node.domain and (kind := floating.get(y)) is not None:
            factor = f"{y}/normdeploy.factor"
            exact = f"{y}/normdeploy.exact"
            node.output[0] = exact
            made.append(onnx.helper.make_node("Mul", [exact, factor], [y]))
            light.graph.input.append(onnx.helper.make_tensor_value_info(factor, kind, []))
            shaken[factor] = np.ones((), onnx.helper.tensor_dtype_to_np_dtype(kind))
    if shaken:
        light.graph.ClearField("node")
        light.graph.node.extend(made)
    return shaken


def _has_few_digits(value: np.ndarray) -> bool:
    """Return True for one number of at most `_DIGITS` binary digits, which every floating-point type represents."""
    if value.size != 1 or value.dtype.kind in "biuSOU":
        return False
    number = float(value.reshape(-1)[0])
    return math.isfinite(number) and (math.frexp(number)[0] * 2**_DIGITS).is_integer()


def short_error_message(e: Exception) -> str:
    """Return onnxruntime's message as one line (`session.ort_error_message`).

    Returns:
        at most 200 characters.
    """
    return ort_error_message(e)[:200]
