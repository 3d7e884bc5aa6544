"""Integers of 4 bits are integers, though numpy calls them void."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest

import normdeploy
from normdeploy.dtypes import is_float_dtype, is_integer_dtype


@pytest.mark.parametrize("name", ["int4", "uint4", "int2", "uint2", "bfloat16", "float8_e4m3fn", "float4_e2m1fn"])
def test_each_type_is_an_integer_or_floating(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    assert (is_float_dtype(dtype), is_integer_dtype(dtype)) == ("float" in name, "int" in name)


def test_a_cast_of_4_bits_is_optimized() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> net (float[n, 3] x) => (float[n, 3] y)
        { scale = Cast <to = 1> (codes) y = Mul (x, scale) }"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.helper.make_tensor("codes", onnx.TensorProto.UINT4, [3], [1, 7, 15]))
    made = normdeploy.optimize(proto)
    assert made.proto.graph.output[0].name == "y"
