"""Write the numbers of a model in every form that the ONNX specification allows.

The module follows onnx.proto and onnx's documents on sparse tensors and external data. It does not use
``onnx.numpy_helper`` to pack weights, so readers of such files are tested against an independent implementation.
`Disguise` takes a model with dense raw initializers, and returns the same model with each weight in a random form.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, SparseTensorProto, TensorProto, helper

# Bits per number of the types of which a byte holds several numbers. The first number is in the lowest bits
# (onnx.proto).
PACKED = {
    TensorProto.INT4: 4,
    TensorProto.UINT4: 4,
    TensorProto.FLOAT4E2M1: 4,
    TensorProto.INT2: 2,
    TensorProto.UINT2: 2,
}
# Field of TensorProto for each type, and the type as which its bytes are read (onnx.proto). All other types are stored
# byte by byte in int32_data.
_FIELDS = {
    TensorProto.FLOAT: ("float_data", "<f4"),
    TensorProto.COMPLEX64: ("float_data", "<f4"),
    TensorProto.DOUBLE: ("double_data", "<f8"),
    TensorProto.COMPLEX128: ("double_data", "<f8"),
    TensorProto.INT64: ("int64_data", "<i8"),
    TensorProto.UINT32: ("uint64_data", "<u4"),
    TensorProto.UINT64: ("uint64_data", "<u8"),
    TensorProto.INT32: ("int32_data", "<i4"),
    TensorProto.INT16: ("int32_data", "<i2"),
    TensorProto.INT8: ("int32_data", "i1"),
    TensorProto.UINT16: ("int32_data", "<u2"),
    TensorProto.FLOAT16: ("int32_data", "<u2"),
    TensorProto.BFLOAT16: ("int32_data", "<u2"),
}
_SHORT = {
    TensorProto.FLOAT: "value_float",
    TensorProto.INT64: "value_int",
    TensorProto.STRING: "value_string",
}
# Types of which onnxruntime supports no sparse tensors: packed types, strings and complex numbers
_NEVER_SPARSE = {*PACKED, TensorProto.STRING, TensorProto.COMPLEX64, TensorProto.COMPLEX128}
_SHORT_SINCE = 12
# Share of sparse tensors with a disputed form: one that the specification forbids (descending indices) or does not
# mention (external values). A reader may refuse such a tensor, but must not misread it.
_DISPUTED = 0.01


class Disguise:
    """Draw a form for each weight of a model."""

    def __init__(self, rng: np.random.Generator, folder: Path) -> None:
        """Set the random generator and the folder of the file."""
        self.rng = rng
        self.folder = folder
        self.used: list[str] = []
        self._shared = bytearray()

    def model(self, proto: onnx.ModelProto) -> onnx.ModelProto:
        """Give each weight its own form, and write the external data to the folder.

        Returns:
            the changed copy.
        """
        made = onnx.ModelProto()
        made.CopyFrom(proto)
        self._graph(made.graph, made.opset_import[0].version)
        for function in made.functions:
            for node in function.node:
                self._constant(node, function.opset_import[0].version)
        if self._shared:
            (self.folder / "shared.bin").write_bytes(bytes(self._shared))
        return made

    def _graph(self, graph: GraphProto, opset: int) -> None:
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == AttributeProto.GRAPH:
                    self._graph(attribute.g, opset)
            self._constant(node, opset)
        weights = list(graph.initializer)
        del graph.initializer[:]
        moved = []
        for weight in weights:
            place = self.rng.random()
            sparse = self._may_be_sparse(weight)
            if place < 0.35 and sparse:
                graph.sparse_initializer.append(self._sparse(weight))
            elif place < 0.6 and weight.name not in {v.name for v in graph.input}:
                node = helper.make_node("Constant", [], [weight.name])
                node.attribute.append(_attribute("value", tensor=weight))
                self._constant(node, opset)
                moved.append(node)
            else:
                graph.initializer.append(self._dense(weight))
        nodes = [*moved, *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)

    def _may_be_sparse(self, weight: TensorProto) -> bool:
        # A sparse tensor has at least one dim; onnx.proto's checker requires a positive size of each.
        return bool(weight.dims) and 0 not in weight.dims and weight.data_type not in _NEVER_SPARSE

    def _constant(self, node: NodeProto, opset: int) -> None:
        """Rewrite the ``value`` of a Constant in place."""
        if node.op_type != "Constant" or node.attribute[0].name != "value":
            return
        weight = TensorProto()
        weight.CopyFrom(node.attribute[0].t)
        short = _SHORT.get(weight.data_type, "")
        forms = ["value"]
        if opset >= _SHORT_SINCE and short and len(weight.dims) < 2:
            forms.append("short")
        if opset >= _SHORT_SINCE and self._may_be_sparse(weight):
            forms.append("sparse")
        form = str(self.rng.choice(forms))
        if form == "short":
            self.used.append(short + "s" * len(weight.dims))
            attribute = _short(weight)
        elif form == "sparse":
            attribute = AttributeProto(name="sparse_value", type=AttributeProto.SPARSE_TENSOR)
            attribute.sparse_tensor.CopyFrom(self._sparse(weight))
            self.used.append("sparse_value")
        else:
            attribute = _attribute("value", tensor=self._dense(weight))
        del node.attribute[:]
        node.attribute.append(attribute)

    def _dense(self, weight: TensorProto) -> TensorProto:
        form = str(self.rng.choice(["raw", "typed", "external"]))
        if weight.data_type == TensorProto.STRING:
            form = "typed"
        self.used.append(f"{form} {TensorProto.DataType.Name(weight.data_type).lower()}")
        made = TensorProto(name=weight.name, data_type=weight.data_type, dims=weight.dims)
        if form == "typed":
            _fill(made, weight)
        elif form == "raw":
            made.raw_data = weight.raw_data
        else:
            self._write_outside(made, weight.raw_data)
        return made

    def _write_outside(self, made: TensorProto, data: bytes) -> None:
        """Point ``made`` to its own file or to a shared one, with or without offset and length."""
        made.data_location = TensorProto.EXTERNAL
        if self.rng.random() < 0.3:
            name = f"own_{len(list(self.folder.glob('own_*')))}.bin"
            (self.folder / name).write_bytes(data)
            entries = {"location": name}
            if self.rng.random() < 0.5:
                entries["length"] = str(len(data))
            if self.rng.random() < 0.3:
                entries["offset"] = "0"
        else:
            step = int(self.rng.choice([1, 64, 4096]))
            # The bytes between weights are arbitrary and must not be read.
            self._shared.extend(b"\x7f" * (-len(self._shared) % step))
            entries = {"location": "shared.bin", "offset": str(len(self._shared)), "length": str(len(data))}
            self._shared.extend(data)
        if self.rng.random() < 0.1:
            entries["checksum"] = "da39a3ee5e6b4b0d3255bfef95601890afd80709"
        for key in self.rng.permutation(list(entries)):
            made.external_data.add(key=str(key), value=entries[str(key)])

    def _sparse(self, weight: TensorProto) -> SparseTensorProto:
        """Return the weight as values and indices, linear or per dim, with some explicit zeros."""
        dims = list(weight.dims)
        size = int(np.prod(dims))
        width = len(weight.raw_data) // size
        cells = [weight.raw_data[i * width : (i + 1) * width] for i in range(size)]
        explicit = self.rng.random(size) < self.rng.choice([0.0, 0.3, 1.0])
        kept = [i for i, cell in enumerate(cells) if any(cell) or explicit[i]]
        if len(kept) > 1 and self.rng.random() < _DISPUTED:
            kept.reverse()
            self.used.append("disputed: unsorted indices")
        made = SparseTensorProto(dims=dims)
        made.values.CopyFrom(TensorProto(name=weight.name, data_type=weight.data_type, dims=[len(kept)]))
        values = TensorProto(data_type=weight.data_type, dims=[len(kept)], raw_data=b"".join(cells[i] for i in kept))
        typed = bool(self.rng.random() < 0.5)
        if self.rng.random() < _DISPUTED:
            self._write_outside(made.values, values.raw_data)
            self.used.append("disputed: sparse values outside the file")
        elif typed:
            _fill(made.values, values)
        else:
            made.values.raw_data = values.raw_data
        places = np.array(kept, np.int64)
        linear = bool(self.rng.random() < 0.5)
        if not linear:
            places = np.stack(np.unravel_index(places, dims), axis=1).astype(np.int64)
        made.indices.CopyFrom(TensorProto(data_type=TensorProto.INT64, dims=places.shape))
        if self.rng.random() < 0.5:
            made.indices.int64_data.extend(places.ravel().tolist())
        else:
            made.indices.raw_data = places.astype("<i8").tobytes()
        amount = "empty" if not kept else "full" if len(kept) == size else "some"
        self.used.append(f"sparse {'typed' if typed else 'raw'} {'linear' if linear else 'per dim'} {amount}")
        return made


def _attribute(name: str, *, tensor: TensorProto) -> AttributeProto:
    made = AttributeProto(name=name, type=AttributeProto.TENSOR)
    made.t.CopyFrom(tensor)
    return made


def _short(weight: TensorProto) -> AttributeProto:
    """Return value_float, value_ints and the like."""
    name = _SHORT[weight.data_type]
    made = AttributeProto(name=name + "s" * len(weight.dims))
    kind = name.removeprefix("value_").upper() + "S" * len(weight.dims)
    made.type = AttributeProto.AttributeType.Value(kind)
    if weight.data_type == TensorProto.STRING:
        values = list(weight.string_data)
    else:
        values = np.frombuffer(weight.raw_data, _FIELDS[weight.data_type][1]).tolist()
    if weight.dims:
        getattr(made, kind.lower()).extend(values)
    else:
        setattr(made, kind[0].lower(), values[0])
    return made


def _fill(made: TensorProto, weight: TensorProto) -> None:
    """Write the raw data of ``weight`` to the typed field of ``made``."""
    if weight.data_type == TensorProto.STRING:
        made.string_data.extend(weight.string_data)
        return
    field, layout = _FIELDS.get(weight.data_type, ("int32_data", "u1"))
    getattr(made, field).extend(np.frombuffer(weight.raw_data, layout).tolist())
