"""What a file alone states about its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from ..model import TensorSpec
from ..storage.proto_traversal import required_inputs
from .proto_queries import value_info_type

STRING = "string"


@dataclass(frozen=True)
class DeclaredInput:
    """An input that has to be given.

    ``dtype``: numpy's name, "bfloat16" or ``STRING``; "" where it is no tensor, or of no type that is known. ``dims``:
    sizes, and names of those that are dynamic; one without a name is called after its input and axis, ``x_0``. None
    where the rank is not known.
    """

    name: str
    dtype: str
    dims: tuple[int | str, ...] | None


def declared_inputs(graph: onnx.GraphProto) -> list[DeclaredInput]:
    """The inputs of a graph without those that have a default."""
    return [_declared_input(v) for v in required_inputs(graph)]


def _declared_input(v: onnx.ValueInfoProto) -> DeclaredInput:
    spec = tensor_spec(v)
    if not v.type.tensor_type.HasField("shape"):
        return DeclaredInput(v.name, spec.dtype, None)
    dims = (f"{v.name}_{i}" if d is None or (isinstance(d, int) and d < 0) else d for i, d in enumerate(spec.shape))
    return DeclaredInput(v.name, spec.dtype, tuple(dims))


def tensor_spec(v: onnx.ValueInfoProto) -> TensorSpec:
    """Declaration of an input or output in a file; rank 0 if the file declares no shape."""
    kind, dims = value_info_type(v)
    if kind is None:
        dtype = ""
    elif kind == onnx.TensorProto.STRING:
        dtype = STRING
    else:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind).name
    return TensorSpec(v.name, dtype, dims or ())
