"""What a file alone states about its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

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
    initializers = {t.name for t in graph.initializer}
    return [_declared_input(v) for v in graph.input if v.name not in initializers]


def _declared_input(v: onnx.ValueInfoProto) -> DeclaredInput:
    kind, dims = value_info_type(v)
    if not kind:
        dtype = ""
    elif kind == onnx.TensorProto.STRING:
        dtype = STRING
    else:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind).name
    if dims is None:
        return DeclaredInput(v.name, dtype, None)
    named = (d if isinstance(d, str) and d else f"{v.name}_{i}" for i, d in enumerate(dims))
    return DeclaredInput(
        v.name, dtype, tuple(d if isinstance(d, int) and d >= 0 else name for d, name in zip(dims, named, strict=True))
    )
