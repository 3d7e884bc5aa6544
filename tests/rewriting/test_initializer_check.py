"""What the prover reads of a file is what onnxruntime loads, bit for bit, in every form that holds a number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from normdeploy.graphs.file_graph import stored_array
from normdeploy.graphs.graph import Graph
from normdeploy.proof.proof_errors import NotProved
from normdeploy.rewriting.initializer_check import require_same_as_file
from normdeploy.storage.onnx_files import load_onnx
from tests.support import run_onnxruntime

COUNT = 300  # more than 1 KiB of four bytes each, from where weights may be held apart
KINDS = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "float16": TensorProto.FLOAT16,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "int16": TensorProto.INT16,
    "uint16": TensorProto.UINT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "uint64": TensorProto.UINT64,
    "bool": TensorProto.BOOL,
}
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 6e-8, 65504.0]


def numbers(name: str) -> np.ndarray:
    """Random bits: NaNs with payloads, subnormals, and the ends of the type among them."""
    dtype = np.dtype(name)
    rng = np.random.default_rng(3)
    if dtype.kind == "b":
        return rng.integers(0, 2, COUNT).astype(bool)
    drawn = np.frombuffer(rng.bytes(COUNT * dtype.itemsize), dtype).copy()
    if dtype.kind == "f":
        with np.errstate(all="ignore"):
            drawn[: len(SPECIAL)] = SPECIAL
        # A signaling NaN may become a quiet one wherever it is copied by way of a register.
        drawn[np.isnan(drawn)] = np.nan
    return drawn


def raw(name: str, values: np.ndarray) -> TensorProto:
    return numpy_helper.from_array(values, name)


def typed(name: str, values: np.ndarray) -> TensorProto:
    """In the field of its type: int32_data holds half and all short integers."""
    kind = helper.np_dtype_to_tensor_dtype(values.dtype)
    tensor = TensorProto(name=name, data_type=kind, dims=values.shape)
    if values.dtype == np.float16:
        tensor.int32_data.extend(values.view(np.uint16).tolist())
    elif values.dtype == np.float32:
        tensor.float_data.extend(values.tolist())
    elif values.dtype == np.float64:
        tensor.double_data.extend(values.tolist())
    elif values.dtype == np.int64:
        tensor.int64_data.extend(values.tolist())
    elif values.dtype == np.uint64:
        tensor.uint64_data.extend(values.tolist())
    else:
        tensor.int32_data.extend(int(v) for v in values)
    return tensor


def model(tensor: TensorProto) -> onnx.ModelProto:
    node = helper.make_node("Identity", ["w"], ["y"])
    out = helper.make_tensor_value_info("y", tensor.data_type, list(tensor.dims))
    graph = helper.make_graph([node], "g", [], [out], [tensor])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("form", [raw, typed])
def test_the_prover_reads_what_onnxruntime_loads(name: str, form: Callable[[str, np.ndarray], TensorProto]) -> None:
    proto = model(form("w", numbers(name)))
    graph = Graph(proto)
    (weight,) = graph.nodes[0].inputs
    (loaded,) = run_onnxruntime(proto, {})
    assert stored_array(weight).dtype == loaded.dtype
    assert stored_array(weight).tobytes() == loaded.tobytes() == numbers(name).tobytes()
    require_same_as_file(graph, [weight])


@pytest.mark.parametrize("offset", [0, 64])
def test_the_prover_reads_what_onnxruntime_loads_of_another_file(tmp_path: Path, offset: int) -> None:
    values = numbers("float32")
    (tmp_path / "w.bin").write_bytes(bytes(offset) + values.tobytes() + b"more")
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=values.shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "w.bin"), ("offset", offset), ("length", values.nbytes)):
        tensor.external_data.add(key=key, value=str(value))
    (tmp_path / "m.onnx").write_bytes(model(tensor).SerializeToString())
    graph = Graph(load_onnx(tmp_path / "m.onnx"))
    (weight,) = graph.nodes[0].inputs
    assert stored_array(weight).tobytes() == values.tobytes()
    require_same_as_file(graph, [weight])


def test_bfloat16_is_read_as_its_bits() -> None:
    values = numbers("float32").astype(ml_dtypes.bfloat16)
    graph = Graph(model(raw("w", values)))
    assert stored_array(graph.nodes[0].inputs[0]).tobytes() == values.tobytes()
    require_same_as_file(graph, graph.nodes[0].inputs)


@pytest.mark.parametrize("at", [0, COUNT - 1])
def test_a_weight_that_is_read_otherwise_is_refused(at: int) -> None:
    """One bit of one element."""
    graph = Graph(model(raw("w", numbers("float32"))))
    (weight,) = graph.nodes[0].inputs
    values = stored_array(weight).copy()
    values.view(np.uint32)[at] ^= 1
    weight.values = values
    with pytest.raises(NotProved, match="differ from the values in the file"):
        require_same_as_file(graph, [weight])


def test_a_sparse_weight_that_reaches_a_proof_is_refused() -> None:
    """graphsurgeon reads zeros of one in raw form, and a fold of them was "exact"."""
    graph = Graph(model(raw("w", numbers("float32"))))
    places = np.arange(4)
    sparse = helper.make_sparse_tensor(raw("w", np.ones(4, np.float32)), raw("places", places), [COUNT])
    graph.proto.graph.sparse_initializer.append(sparse)
    with pytest.raises(NotProved, match="is sparse"):
        require_same_as_file(graph, graph.nodes[0].inputs)
