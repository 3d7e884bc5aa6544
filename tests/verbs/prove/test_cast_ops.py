"""Casts and integer overflow: equalities in exact arithmetic that number types break must not be proved."""

from __future__ import annotations

import onnx
import pytest

from normdeploy.verbs.prove.proof_result import Verdict

from .graphs import prove

FLOAT, UINT8, INT8, INT32, INT64, HALF, DOUBLE, BFLOAT = 1, 2, 3, 6, 7, 10, 11, 16


def typed(body: str, given: str, out: str, opset: int = 19, shape: str = "2, 8", end: str = "2, 8") -> onnx.ModelProto:
    """Build a model that computes y of type ``out`` from x of type ``given``."""
    head = f'<ir_version: 9, opset_import: ["" : {opset}]>'
    text = f"{head} g ({given}[{shape}] x) => ({out}[{end}] y) <int64[1] last = {{1}}, float two = {{2}}> {{ {body} }}"
    return onnx.parser.parse_model(text)


# Type of x, type of y, and two bodies
OVERFLOWS = {
    "sum of int8": ("int8", "int64", "a = Add(x, x) y = Cast <to = 7> (a)", "a = Cast <to = 7> (x) y = Add(a, a)"),
    "product of uint8": ("uint8", "int32", "a = Mul(x, x) y = Cast <to=6> (a)", "a = Cast <to=6> (x) y = Mul(a, a)"),
    "difference of uint8": (
        "uint8",
        "float",
        "a = Sub(x, x) b = Sub(a, x) y = Cast <to=1> (b)",
        "a = Cast <to=1> (x) y = Neg(a)",
    ),
    "reduced int32": (
        "int32",
        "int64",
        "s = ReduceSum(x, last) a = Cast <to=7> (s) y = Add(a, z)",
        "b = Cast <to=7> (x) a = ReduceSum(b, last) y = Add(a, z)",
    ),
    "square is not negative": ("int8", "int8", "y = Mul(x, x)", "a = Mul(x, x) y = Relu(a)"),
    "magnitude of int8": ("int8", "int32", "a = Abs(x) y = Cast <to=6> (a)", "a = Cast <to=6> (x) y = Abs(a)"),
    "sum in float": ("int32", "float", "a = Add(x, x) y = Cast <to=1> (a)", "a = Cast <to=1> (x) y = Add(a, a)"),
    "comparison": (
        "int8",
        "bool",
        "a = Add(x, x) y = Less(a, x)",
        "b = Cast <to=6> (x) a = Add(b, b) y = Less(a, b)",
    ),
    "narrow and widen": ("int64", "int64", "a = Cast <to=6> (x) y = Cast <to=7> (a)", "y = Identity(x)"),
    "signed and unsigned": ("int8", "int32", "a = Cast <to=2> (x) y = Cast <to=6> (a)", "y = Cast <to=6> (x)"),
    "matrix product": (
        "int32",
        "int64",
        "t = Transpose(x) a = MatMul(x, t) y = Cast <to=7> (a)",
        "b = Cast <to=7> (x) t = Transpose(b) y = MatMul(b, t)",
    ),
    "mean of integers": (
        "int32",
        "int32",
        "a = ReduceMean(x, last) b = Add(a, a) y = Add(b, w)",
        "c = Add(x, x) b = ReduceMean(c, last) y = Add(b, w)",
    ),
    "bits": ("uint8", "int32", "a = BitwiseNot(x) y = Cast <to=6> (a)", "a = Cast <to=6> (x) y = BitwiseNot(a)"),
}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_prove_overflow_of_integers_is_not_equal(name: str) -> None:
    given, out, *bodies = OVERFLOWS[name]
    end = "2, 2" if name == "matrix product" else "2, 8"
    zero = f"w = Sub(x, x) z = Cast <to = {onnx.TensorProto.DataType.Value(out.upper())}> (w) "
    first, second = (typed((zero if "z)" in b or "w)" in b else "") + b, given, out, end=end) for b in bodies)
    assert not prove(first, second)


RINGS = {
    "order of a sum": ("int8", "int8", "a = Add(x, x) y = Mul(a, x)", "a = Mul(x, x) y = Add(a, a)"),
    "overflow on both sides": (
        "int8",
        "int64",
        "a = Add(x, x) b = Sub(a, x) y = Cast <to=7> (b)",
        "a = Sub(x, x) b = Add(x, a) y = Cast <to=7> (b)",
    ),
    "widened first": ("int8", "int64", "a = Cast <to=6> (x) y = Cast <to=7> (a)", "y = Cast <to=7> (x)"),
    "narrowed sum": (
        "int64",
        "int8",
        "a = Add(x, x) y = Cast <to=3> (a)",
        "b = Cast <to=3> (x) y = Add(b, b)",
    ),
    "through a wider type": ("int8", "int8", "a = Cast <to=7> (x) y = Cast <to=3> (a)", "y = Identity(x)"),
    "small integers as floats": ("uint8", "double", "a = Cast <to=1> (x) y = Cast <to=11> (a)", "y = Cast <to=11> (x)"),
}


@pytest.mark.parametrize("name", RINGS)
def test_prove_arithmetic_of_one_integer_type_equal(name: str) -> None:
    given, out, first, second = RINGS[name]
    assert prove(typed(first, given, out), typed(second, given, out)).verdict is Verdict.EQUAL


def rounded(to: int, back: int) -> str:
    return f"a = Cast <to = {to}> (x) y = Cast <to = {back}> (a)"


ROUNDINGS = {
    "float16": ("float", rounded(HALF, FLOAT), "y = Identity(x)"),
    "bfloat16": ("float", rounded(BFLOAT, FLOAT), "y = Identity(x)"),
    "float8": ("float", rounded(onnx.TensorProto.FLOAT8E4M3FN, FLOAT), "y = Identity(x)"),
    "double": ("double", rounded(FLOAT, DOUBLE), "y = Identity(x)"),
    "two types": ("float", rounded(HALF, FLOAT), rounded(BFLOAT, FLOAT)),
    "float16 by bfloat16": ("float16", rounded(BFLOAT, HALF), "y = Identity(x)"),
    "sum in half": (
        "float",
        "a = Cast <to=10> (x) b = Add(a, a) y = Cast <to=1> (b)",
        "y = Add(x, x)",
    ),
    "large integers": ("int64", "a = Cast <to=1> (x) y = Cast <to=7> (a)", "y = Identity(x)"),
    "constant": (
        "float",
        "c = Constant <value_float = 0.1> () h = Cast <to=10> (c) w = Cast <to=1> (h) y = Mul(x, w)",
        "c = Constant <value_float = 0.1> () y = Mul(x, c)",
    ),
}


@pytest.mark.parametrize("name", ROUNDINGS)
def test_prove_cast_that_rounds_is_not_equal(name: str) -> None:
    given, first, second = ROUNDINGS[name]
    assert not prove(typed(first, given, given), typed(second, given, given))


EXACT = {
    "widened and narrowed": ("float16", rounded(FLOAT, HALF), "y = Identity(x)"),
    "float by double": ("float", rounded(DOUBLE, FLOAT), "y = Identity(x)"),
    "moved between": (
        "bfloat16",
        "a = Cast <to=1> (x) b = Transpose(a) c = Cast <to=16> (b) y = Transpose(c)",
        "y = Identity(x)",
    ),
    "same roundings": (
        "float",
        "a = Cast <to=10> (x) y = Cast <to=1> (a)",
        f"b = Identity(x) {rounded(HALF, FLOAT).replace('x', 'b')}",
    ),
    "rounded twice": (
        "float",
        "a = Cast <to=10> (x) b = Cast <to=11> (a) c = Cast <to=10> (b) y = Cast <to=1> (c)",
        rounded(HALF, FLOAT),
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_prove_exact_casts_equal(name: str) -> None:
    given, first, second = EXACT[name]
    assert prove(typed(first, given, given), typed(second, given, given)).verdict is Verdict.EQUAL


def test_prove_names_casts_that_must_be_exact() -> None:
    proof = prove(typed(rounded(HALF, FLOAT), "float", "float"), typed("y = Identity(x)", "float", "float"))
    assert "would be equal if no Cast to a narrower type rounded" in proof.reason


def test_prove_outputs_of_other_shapes_different() -> None:
    first = typed("y = ReduceSum <keepdims = 0> (x, last)", "float", "float", end="2")
    second = typed("z = Sub(last, last) y = ReduceSum <keepdims = 0> (x, z)", "float", "float", end="8")
    assert prove(first, second).verdict is Verdict.DIFFERENT


def test_prove_quantization_to_another_type_is_not_equal() -> None:
    text = "q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)"
    held = [
        typed(
            f"s = Constant <value_float = 0.1> () l = Sub(last, last) k = Squeeze(l) z = Cast <to = {to}> (k) {text}",
            "float",
            "float",
        )
        for to in (INT8, UINT8)
    ]
    assert prove(held[0], held[0])
    assert not prove(held[0], held[1])
