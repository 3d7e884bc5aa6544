"""A proved node is searched for in the file by its attributes and by the memory or the bytes of its constants."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from normdeploy.errors import ExportError
from normdeploy.graphs.exact_constants import Product, round_product
from normdeploy.graphs.graph import Graph
from normdeploy.rewriting.proved_nodes import NodeSeal, require_sealed, seal_nodes
from normdeploy.storage.shared_weights import Weights, share_array, shared_array, tensor_array
from tests.support import parsed

SIZE = 128


@pytest.fixture
def weights() -> Weights:
    return {}


def sealed_product(weights: Weights) -> tuple[onnx.ModelProto, list[NodeSeal]]:
    """Write a MatMul with a computed weight in read-only memory, and seal it."""
    old = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32)
    proto = parsed(f"net (float[2, {SIZE}] x) => (float[2, {SIZE}] y) {{ y = MatMul(x, w) }}", w=old)
    graph = Graph(proto, weights=weights)
    (node,) = graph.nodes
    rounded = round_product(Product(old.astype(np.float64), np.full((1, SIZE), 1.1)))
    assert rounded is not None
    y = node.outputs[0]
    made = graph.make_node("MatMul", [node.inputs[0], graph.add_rounded("v", rounded)], y)
    graph.replace(y, [made])
    seals = [seal for _, seal in seal_nodes(graph, [made])]
    return graph.to_proto(), seals


def test_the_memory_of_a_proved_constant_is_not_read_again(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    real = hashlib.sha256

    def hash_and_note(data: Any) -> Any:
        hashed.append(len(memoryview(data).cast("B")))
        return real(data)

    monkeypatch.setattr(hashlib, "sha256", hash_and_note)
    proto, seals = sealed_product(weights)
    require_sealed(proto, seals)
    assert max(hashed) < SIZE * SIZE


def test_a_copy_of_a_proved_constant_is_accepted(weights: Weights) -> None:
    proto, seals = sealed_product(weights)
    (tensor,) = (t for t in proto.graph.initializer if shared_array(t) is not None)
    share_array(tensor, tensor_array(tensor).copy(), weights)
    require_sealed(proto, seals)


FAULTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "one element": lambda w: np.where(np.arange(w.size).reshape(w.shape) == 77, np.nextafter(w, np.float32(9)), w),
    "transposed": lambda w: w.T,
    "the same memory, transposed": lambda w: w.T,
    "two rows swapped": lambda w: w[[1, 0, *range(2, len(w))]],
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_changed_constant_is_found(name: str, weights: Weights) -> None:
    proto, seals = sealed_product(weights)
    (tensor,) = (t for t in proto.graph.initializer if shared_array(t) is not None)
    wrong = FAULTS[name](tensor_array(tensor))
    share_array(tensor, wrong if "memory" in name else np.ascontiguousarray(wrong), weights)
    with pytest.raises(ExportError, match="differs from the proved one"):
        require_sealed(proto, seals)


def test_two_equal_proved_nodes_need_two_nodes(weights: Weights) -> None:
    proto, seals = sealed_product(weights)
    with pytest.raises(ExportError, match="differs from the proved one"):
        require_sealed(proto, [*seals, *seals])


def test_nothing_can_write_to_a_proved_constant(weights: Weights) -> None:
    proto, _ = sealed_product(weights)
    (tensor,) = (t for t in proto.graph.initializer if shared_array(t) is not None)
    array: object = tensor_array(tensor)
    while isinstance(array, np.ndarray):
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 1
        array = array.base
