"""At which sizes inputs are generated."""

from __future__ import annotations

from normdeploy.inputs.input_cases import find_largest_sizes
from normdeploy.model import Dim, InputSpec, ModelSignature


def signature(count: int) -> ModelSignature:
    dims = [Dim(f"d{i}", 1, 2, 50) for i in range(count)]
    inputs = tuple(InputSpec(f"x{i}", "float32", (dim,)) for i, dim in enumerate(dims))
    return ModelSignature(inputs=inputs, outputs=("y",), kind="onnx")


def test_largest_sizes_few_dims_are_each_tried_alone() -> None:
    largest = find_largest_sizes(signature(30), most=1000)
    assert len(largest.kept) == 30
    assert len(largest.left_out) == 1


def test_largest_sizes_many_dims_the_first_are_tried_alone_and_the_others_told() -> None:
    largest = find_largest_sizes(signature(5000), most=100_000)
    assert len(largest.kept) == 64
    assert largest.left_out[-1] == "4936 of 5000 dims were not tried at their largest size individually"
