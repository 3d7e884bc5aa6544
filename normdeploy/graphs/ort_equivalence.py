"""Check that two ONNX models give the same outputs in onnxruntime, up to a bound on rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort

from ..compare.element_errors import absolute_difference, largest_finite, nonfinite_mismatch
from ..compare.perturbation import regrouping_error
from ..dtypes import UNIT_ROUNDOFF
from ..errors import ExportError
from ..ort_sessions.session import open_session
from ..storage.node_order import iter_read_names
from ..storage.onnx_files import iter_tensors
from ..storage.proto_traversal import iter_bodies, required_inputs
from ..storage.shared_weights import SMALLEST, tensor_array
from ..storage.weight_serialization import detach_weights, set_weight_locations
from ..types import Arrays

# Size in bytes from which a weight is passed to onnxruntime without a copy.
_LARGE = SMALLEST
_FED = {"MatMul", "com.microsoft.FusedMatMul", "Gemm", "Conv", "ConvTranspose", "Gather", "Transpose", "Add", "Mul"}

_FLOATING = {
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "float16": onnx.TensorProto.FLOAT16,
    "float32": onnx.TensorProto.FLOAT,
    "float64": onnx.TensorProto.DOUBLE,
}
# Attributes that hold an element type: of Cast, and of ops that draw random numbers or count.
_TYPE_ATTRIBUTES = {"to", "dtype"}


def require_equal_models(
    before: onnx.ModelProto,
    after: onnx.ModelProto,
    samples: Sequence[Arrays],
    shared: Mapping[str, str] | None = None,
) -> None:
    """Compare every output of both models on each sample, in onnxruntime without its optimizer.

    Cleaning keeps most results bit by bit. Only rounding may differ, because nodes were folded into constants or
    regrouped; there are at most N such nodes, the number of nodes in ``before``. So the bound is 6·√N·u·max|before| for
    each output (`normdeploy.compare.perturbation.regrouping_error`), where u is the unit roundoff of the coarsest
    floating type in the graph. Integers, and the positions of NaN and Inf, must be equal.

    Args:
        samples: inputs by name.
        shared: initializer of ``after`` → large initializer of ``before`` with the same data, to which ``after``
            refers.

    Raises:
        ExportError: an output differs by more than the bound; the message names it, the difference and the bound.
    """
    relative = regrouping_error(len(before.graph.node), unit_roundoff(before))
    light, weights = detach_weights(before, fed=True)
    values = _make_ort_values(weights)
    expected = _run_outputs(light, values, samples)
    light, weights = detach_weights(after, fed=True)
    outputs = _run_outputs(
        light, _make_ort_values(weights) | {name: values[theirs] for name, theirs in (shared or {}).items()}, samples
    )
    for (name, old), (_, new) in zip(expected, outputs, strict=True):
        difference = _largest_difference(old, new)
        bound = relative * largest_finite(old)
        if difference > bound:
            raise ExportError(
                f"simplification changed output {name!r} by {difference:.3g}, but rounding explains at most {bound:.3g}"
            )


_Values = dict[str, ort.OrtValue]


def make_ort_value(weight: np.ndarray) -> ort.OrtValue:
    """Wrap a large weight for onnxruntime without a copy; bfloat16 becomes float32.

    Returns: a value that shares the array's memory if that is contiguous and not bfloat16.
    """
    return ort.OrtValue.ortvalue_from_numpy(to_computable_type(weight))


def _make_ort_values(weights: Mapping[str, onnx.TensorProto]) -> _Values:
    return {name: make_ort_value(tensor_array(t)) for name, t in weights.items()}


def _run_outputs(light: onnx.ModelProto, values: _Values, samples: Sequence[Arrays]) -> list[tuple[str, np.ndarray]]:
    """Return (name, value) of every output for every sample."""
    given = [v.name for v in required_inputs(light.graph)]
    made, fed = open_session_without_weights(light, values)
    names = [o.name for o in made.get_outputs()]
    results: list[tuple[str, np.ndarray]] = []
    for sample in samples:
        feeds = fed | {name: ort.OrtValue.ortvalue_from_numpy(to_computable_type(sample[name])) for name in given}
        results += zip(names, (value.numpy() for value in made.run_with_ort_values(names, feeds)), strict=True)
    return results


def open_session_without_weights(light: onnx.ModelProto, values: _Values) -> tuple[ort.InferenceSession, _Values]:
    """Open a session without optimizations, and feed it large weights as inputs.

    onnxruntime copies initializers, but uses inputs in place.

    Args:
        light: model without weight data; changed in place.
        values: weights by name.

    Returns: the session, and the weights that must be fed.
    """
    _drop_unread_initializers(light)
    _replace_bfloat16(light)
    fed = _weights_as_inputs(light, values)
    kept = {tensor.name for tensor in light.graph.initializer}
    values = {name: value for name, value in values.items() if name in kept}
    set_weight_locations(
        light, {name: ("held by the session", 0, value.tensor_size_in_bytes()) for name, value in values.items()}
    )
    # For one short run, prepacking costs more than it saves, and spinning threads only block other processes.
    entries = {"session.disable_prepacking": "1", "session.intra_op.allow_spinning": "0"}
    return open_session(light.SerializeToString(), entries=entries, initializers=values), fed


def _drop_unread_initializers(light: onnx.ModelProto) -> None:
    """Remove unread initializers, and the inputs whose defaults they are.

    onnxruntime drops them while it loads a model, and then refuses the values given for them: "Failed to find existing
    initializer".
    """
    graph = light.graph
    read = {name for node in graph.node for name in iter_read_names(node)} | {value.name for value in graph.output}
    unread = {tensor.name for tensor in graph.initializer if tensor.name not in read}
    if not unread:
        return
    for field in (graph.initializer, graph.input):
        kept = [item for item in field if item.name not in unread]
        del field[:]
        field.extend(kept)


def _weights_as_inputs(light: onnx.ModelProto, values: _Values) -> _Values:
    """Turn large weights into inputs of ``light`` if every reader accepts an input there, and return them."""
    readers: dict[str, set[str]] = {}
    for body in iter_bodies(light):
        for node in body.node:
            for name in node.input:
                readers.setdefault(name, set()).add(
                    node.op_type if node.domain == "" else f"{node.domain}.{node.op_type}"
                )
    named = {v.name for v in (*light.graph.input, *light.graph.output)}
    fed = {}
    for tensor in list(light.graph.initializer):
        value = values.get(tensor.name)
        if (
            value is not None
            and value.tensor_size_in_bytes() >= _LARGE
            and readers.get(tensor.name, {""}) <= _FED
            and tensor.name not in named
        ):
            light.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
            light.graph.initializer.remove(tensor)
            fed[tensor.name] = value
    return fed


def to_computable_type(array: np.ndarray) -> np.ndarray:
    """Convert an array to a type that onnxruntime computes on the CPU.

    Returns: float32 for bfloat16; other arrays unchanged.
    """
    if array.dtype == ml_dtypes.bfloat16:
        return array.astype(np.float32)
    return array


def _replace_bfloat16(model: onnx.ModelProto) -> None:
    """Replace bfloat16 by float32, which holds each of its values. onnxruntime has few bfloat16 kernels for the CPU."""
    narrow = onnx.TensorProto.BFLOAT16
    wide = onnx.TensorProto.FLOAT
    for tensor in iter_tensors(model):
        if tensor.data_type != narrow:
            continue
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            # The data of this large weight is passed to the session separately.
            tensor.data_type = wide
        else:
            tensor.CopyFrom(
                onnx.numpy_helper.from_array(to_computable_type(onnx.numpy_helper.to_array(tensor)), tensor.name)
            )
    for body in iter_bodies(model):
        for node in body.node:
            for attribute in node.attribute:
                if attribute.name in _TYPE_ATTRIBUTES and attribute.i == narrow:
                    attribute.i = wide
        if isinstance(body, onnx.GraphProto):
            body.ClearField("value_info")
            for value in (*body.input, *body.output):
                if value.type.tensor_type.elem_type == narrow:
                    value.type.tensor_type.elem_type = wide


def unit_roundoff(proto: onnx.ModelProto) -> float:
    """Return the unit roundoff of the coarsest floating type in the graph.

    Returns: the unit roundoff; if there is no floating type, the unit roundoff of float32.
    """
    types = {t.data_type for t in proto.graph.initializer} | {
        v.type.tensor_type.elem_type for v in (*proto.graph.input, *proto.graph.output)
    }
    types |= {
        a.i for body in iter_bodies(proto) for node in body.node for a in node.attribute if a.name in _TYPE_ATTRIBUTES
    }
    known = (UNIT_ROUNDOFF[name] for name, elem_type in _FLOATING.items() if elem_type in types)
    return max(known, default=UNIT_ROUNDOFF["float32"])


def _largest_difference(old: np.ndarray, new: np.ndarray) -> float:
    """Return the largest |old − new|; infinite if shape, dtype or the positions of NaN and Inf differ."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return math.inf
    if np.array_equal(old, new, equal_nan=old.dtype.kind == "f"):
        return 0.0
    if old.dtype.kind != "f" or nonfinite_mismatch(old, new).any():
        return math.inf
    return float(absolute_difference(old, new).max())
