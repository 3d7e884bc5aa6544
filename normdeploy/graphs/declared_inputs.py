"""Read the inputs that a file declares."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from ..model import TensorSpec
from ..storage.proto_traversal import required_inputs
from .proto_queries import value_info_type

STRING = "string"


@dataclass(frozen=True)
class DeclaredInput:
    """Input without a default value.

    Attributes:
        dtype: numpy's name, "bfloat16" or ``STRING``; "" if it is not a tensor or its type is unknown.
        dims: sizes, and names of dynamic dims; None if the rank is unknown. An unnamed dim gets a name from its input
            and axis, for example ``x_0``.
    """

    name: str
    dtype: str
    dims: tuple[int | str, ...] | None


def declared_inputs(graph: onnx.GraphProto) -> list[DeclaredInput]:
    """List the inputs of a graph that have no default value.

    Returns: one declaration per input, in the graph's order.
    """
    return [_declared_input(v) for v in required_inputs(graph)]


def _declared_input(v: onnx.ValueInfoProto) -> DeclaredInput:
    spec = tensor_spec(v)
    if not v.type.tensor_type.HasField("shape"):
        return DeclaredInput(v.name, spec.dtype, None)
    dims = (f"{v.name}_{i}" if d is None or (isinstance(d, int) and d < 0) else d for i, d in enumerate(spec.shape))
    return DeclaredInput(v.name, spec.dtype, tuple(dims))


def tensor_spec(v: onnx.ValueInfoProto) -> TensorSpec:
    """Read the declaration of an input or output.

    Returns: name, dtype ("" if it is not a tensor) and dims; rank 0 if the file declares no shape.
    """
    kind, dims = value_info_type(v)
    if kind is None:
        dtype = ""
    elif kind == onnx.TensorProto.STRING:
        dtype = STRING
    else:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind).name
    return TensorSpec(v.name, dtype, dims or ())
