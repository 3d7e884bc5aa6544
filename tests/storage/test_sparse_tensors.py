"""Sparse tensors and every other form of stored numbers, read by us, by ``onnx.numpy_helper`` and by onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import normdeploy
from normdeploy.errors import GraphError
from normdeploy.storage.onnx_files import load_onnx, normalize_model
from normdeploy.storage.shared_weights import tensor_array
from normdeploy.storage.sparse_tensors import MOST_ELEMENTS

from ..support import run_onnxruntime

DENSE = np.array([[0, 1.5, 0], [-2, 0, 0], [0, 0, 3]])


def sparse_tensor(
    dense: np.ndarray, *, coordinates: bool, typed: bool, indices: np.ndarray | None = None, name: str = "w"
) -> onnx.SparseTensorProto:
    """``dense`` as ONNX stores its nonzero values; ``typed``: in the fields of their type, else in ``raw_data``."""
    positions = np.flatnonzero(dense)
    values = dense.reshape(-1)[positions]
    if indices is None:
        indices = np.argwhere(dense) if coordinates else positions
    kind = helper.np_dtype_to_tensor_dtype(dense.dtype)
    if typed:
        stored = helper.make_tensor(name, kind, values.shape, values.tolist())
        places = helper.make_tensor("places", TensorProto.INT64, indices.shape, indices.reshape(-1).tolist())
    else:
        stored, places = numpy_helper.from_array(values, name), numpy_helper.from_array(indices.astype(np.int64))
    return helper.make_sparse_tensor(stored, places, dense.shape)


def added(sparse: onnx.SparseTensorProto, place: str) -> onnx.ModelProto:
    """A model that adds its input to the sparse tensor, which lies in the named place."""
    kind, dims = sparse.values.data_type, list(sparse.dims)
    x = helper.make_tensor_value_info("x", kind, dims)
    y = helper.make_tensor_value_info("y", kind, dims)
    add = helper.make_node("Add", ["x", "w"], ["y"])
    constant = helper.make_node("Constant", [], ["w"], sparse_value=sparse)
    functions = []
    domains = [helper.make_opsetid("", 17)]
    graph = helper.make_graph([add], "g", [x], [y])
    if place == "initializer":
        graph.sparse_initializer.append(sparse)
    elif place == "constant":
        graph.node.insert(0, constant)
    elif place == "function":
        functions = [helper.make_function("own", "F", ["x"], ["y"], [constant, add], domains)]
        domains = [*domains, helper.make_opsetid("own", 1)]
        graph = helper.make_graph([helper.make_node("F", ["x"], ["y"], domain="own")], "g", [x], [y])
    else:
        yes = numpy_helper.from_array(np.array(True), "yes")
        branch = helper.make_graph([add], "branch", [], [y])
        branch.sparse_initializer.append(sparse)
        other = helper.make_graph([helper.make_node("Identity", ["x"], ["z"])], "other", [], [])
        other.output.append(helper.make_tensor_value_info("z", kind, dims))
        node = helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=other)
        graph = helper.make_graph([node], "g", [x], [y], [yes])
    return helper.make_model(graph, opset_imports=domains, ir_version=8, functions=functions)


@pytest.mark.parametrize("place", ["initializer", "constant", "function", "body"])
@pytest.mark.parametrize("coordinates", [False, True])
@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int64])
def test_opened_model_sparse_is_dense(place: str, coordinates: bool, typed: bool, dtype: type) -> None:
    dense = DENSE.astype(dtype)
    proto = normalize_model(added(sparse_tensor(dense, coordinates=coordinates, typed=typed), place))
    x = np.ones_like(dense)
    assert (run_onnxruntime(proto, {"x": x})[0] == x + dense).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_optimize_sparse_gamma_is_folded_as_it_is(dtype: type) -> None:
    """graphsurgeon reads raw sparse values as zeros; the fold of gamma was then exact, of zeros."""
    gamma = np.array([1.5, 0, -2, 3], dtype)
    weight = np.random.default_rng(0).standard_normal((4, 3, 1)).astype(dtype)
    stored = [numpy_helper.from_array(np.full(4, 0.5, dtype), n) for n in "bmv"]
    stored.append(numpy_helper.from_array(weight, "w"))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("BatchNormalization", ["c", "g", "b", "m", "v"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(n, kind, ["B", c, 5]) for n, c in (("x", 3), ("y", 4)))
    graph = helper.make_graph(nodes, "g", [x], [y], stored)
    graph.sparse_initializer.append(sparse_tensor(gamma, coordinates=False, typed=False, name="g"))
    result = normdeploy.optimize(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert [node.op_type for node in result.proto.graph.node] == ["Conv"]
    folded, bias = (numpy_helper.to_array(t).astype(np.float64) for t in result.proto.graph.initializer)
    scale = gamma.astype(np.float64) / np.sqrt(0.5 + float(np.float32(1e-5)))
    # The fold rounds once. The expected values round a sum, a root, a quotient and a product: 2.5 units in all.
    unit = float(np.finfo(dtype).eps)
    expected = weight.astype(np.float64) * scale[:, None, None]
    np.testing.assert_allclose(folded, expected, rtol=3 * unit, atol=0)
    np.testing.assert_allclose(bias, 0.5 - 0.5 * scale, rtol=4 * unit, atol=4 * unit)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 2, 9], r"has the index 9, and its shape \[3, 3\] holds 9 elements"),
        ([-1, 2, 3], "has the index -1"),
        ([3, 1, 8], "position 3 comes before 1"),
        ([1, 1, 8], "position 1 comes before 1"),
        ([[0, 1], [1, 3], [2, 2]], r"has the index \[1, 3\], outside its shape \[3, 3\]"),
        ([[0, 1], [0, 0], [2, 2]], "position 1 comes before 0"),
        ([0, 1], r"has 3 values and indices of shape \[2\]"),
    ],
)
def test_opened_model_indices_that_do_not_fit_are_refused(indices: Sequence[object], message: str) -> None:
    sparse = sparse_tensor(DENSE.astype(np.float32), coordinates=False, typed=False, indices=np.array(indices))
    with pytest.raises(GraphError, match=message):
        normalize_model(added(sparse, "initializer"))


@pytest.mark.parametrize("place", ["initializer", "constant", "body", "function"])
def test_load_onnx_sparse_of_a_huge_shape_is_refused(place: str, tmp_path: Path) -> None:
    sparse = sparse_tensor(DENSE.astype(np.float32), coordinates=False, typed=False)
    sparse.dims[:] = [2**20, 2**20]
    onnx.save(added(sparse, place), tmp_path / "huge.onnx")
    with pytest.raises(GraphError, match=f"at most {MOST_ELEMENTS} elements are read"):
        load_onnx(tmp_path / "huge.onnx")


def test_load_onnx_sparse_values_in_another_file_are_read(tmp_path: Path) -> None:
    sparse = sparse_tensor(DENSE.astype(np.float32), coordinates=True, typed=False)
    data = sparse.values.raw_data
    (tmp_path / "w.bin").write_bytes(b"\0" * 8 + data)
    sparse.values.ClearField("raw_data")
    sparse.values.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "w.bin"), ("offset", "8"), ("length", str(len(data)))):
        sparse.values.external_data.add(key=key, value=value)
    onnx.save(added(sparse, "initializer"), tmp_path / "outside.onnx")
    (weight,) = load_onnx(tmp_path / "outside.onnx").graph.initializer
    assert (numpy_helper.to_array(weight) == DENSE).all()


NUMBERS = {
    "float32": [1.5, -0.0, np.inf, np.nan, 1e-45],
    "float64": [1.5, -0.0, np.inf, np.nan, 5e-324],
    "float16": [1.5, -0.0, np.inf, np.nan, 6e-8],
    "bfloat16": [1.5, -0.0, np.inf, np.nan, 1e-40],
    "float8_e4m3fn": [1.5, -0.0, np.nan, 448, 0.001953125],
    "float8_e5m2": [1.5, -0.0, np.inf, np.nan, 57344],
    "float8_e4m3fnuz": [1.5, 0.0, np.nan, 240, 0.5],
    "int8": [-128, 0, 127, 1, -1],
    "uint8": [0, 255, 128, 1, 2],
    "int16": [-(2**15), 0, 2**15 - 1, 1, -1],
    "uint16": [0, 2**16 - 1, 2**15, 1, 2],
    "int32": [-(2**31), 0, 2**31 - 1, 1, -1],
    "uint32": [0, 2**32 - 1, 2**31, 1, 2],
    "int64": [-(2**63), 0, 2**63 - 1, 1, -1],
    "uint64": [0, 2**64 - 1, 2**63, 1, 2],
    "int4": [-8, 7, 0, 1, -1],
    "uint4": [0, 15, 8, 1, 2],
    "bool": [True, False, True, True, False],
}


def typed_tensor(values: np.ndarray) -> onnx.TensorProto:
    """The tensor in the field of its type, written with the packing that onnx.proto states."""
    kind = helper.np_dtype_to_tensor_dtype(values.dtype)
    tensor = TensorProto(name="w", data_type=kind, dims=values.shape)
    field = helper.tensor_dtype_to_field(kind)
    name = values.dtype.name
    numbers: Sequence[float]
    if name in ("float16", "bfloat16"):
        numbers = values.view(np.uint16).tolist()
    elif name.startswith("float8"):
        numbers = values.view(np.uint8).tolist()
    elif name in ("int4", "uint4"):
        nibbles = [int(v) & 15 for v in values.tolist()] + [0] * (values.size % 2)
        numbers = [low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True)]
    else:
        numbers = values.astype(np.int32).tolist() if name == "bool" else values.tolist()
    getattr(tensor, field).extend(numbers)
    return tensor


@pytest.mark.parametrize("form", ["raw", "typed", "external"])
@pytest.mark.parametrize("name", [*NUMBERS])
def test_load_onnx_numbers_in_every_form_are_the_same_bytes(name: str, form: str, tmp_path: Path) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    numbers = NUMBERS[name]
    # Through float64, numpy would round 64-bit integers.
    values = np.array(numbers, dtype) if dtype.kind in "iu" else np.array(numbers).astype(dtype)
    tensor = typed_tensor(values) if form == "typed" else numpy_helper.from_array(values, "w")
    if form == "external":
        (tmp_path / "w.bin").write_bytes(b"\xff" * 16 + tensor.raw_data)
        length = str(len(tensor.raw_data))
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "w.bin"), ("offset", "16"), ("length", length)):
            tensor.external_data.add(key=key, value=value)
    kind = tensor.data_type
    output = helper.make_tensor_value_info("y", kind, [5])
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "g", [], [output], [tensor])
    path = tmp_path / "numbers.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    (read,) = load_onnx(path).graph.initializer
    assert tensor_array(read).tobytes() == values.tobytes()
    assert numpy_helper.to_array(read).tobytes() == values.tobytes()
    if dtype.kind != "V" and name not in ("int4", "uint4") and not name.startswith(("float8", "bfloat")):
        # onnxruntime gives only numpy's own types back.
        assert run_onnxruntime(onnx.load(path), {})[0].tobytes() == values.tobytes()
