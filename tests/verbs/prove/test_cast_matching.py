"""Casts that a tool moved or dropped: equal only if both files hold the values in the narrow type."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from normdeploy.verbs.prove.proof_result import FileProof, Verdict

from .graphs import prove

HALF, FLOAT, DOUBLE, BFLOAT = 10, 1, 11, 16


def typed(body: str, given: str, out: str) -> onnx.ModelProto:
    """Build a model that computes y of type ``out`` from x of type ``given``."""
    head = f'<ir_version: 9, opset_import: ["" : 17]> g ({given}[2, 8] x) => ({out}[2, 8] y)'
    # The parser reads the bits of float16 numbers.
    three = np.float16(3).view(np.uint16) if given == "float16" else 3
    return onnx.parser.parse_model(f"{head} <{given} c = {{{three}}}, float f = {{3}}> {{ {body} }}")


def judge(first: str, second: str, given: str, out: str) -> FileProof:
    return prove(typed(first, given, out), typed(second, given, out))


# Type of x, type of y, and two bodies
ALIKE = {
    "half nodes run in float32": (
        "float16",
        "float16",
        "a = Mul(x, x) y = Add(a, c)",
        "w = Cast <to=1> (x) a = Mul(w, w) h = Cast <to=10> (a) v = Cast <to=1> (h) b = Add(v, f) y = Cast <to=10> (b)",
    ),
    "a Cast between two nodes is dropped": (
        "float16",
        "float16",
        "w = Cast <to=1> (x) a = Exp(w) h = Cast <to=10> (a) y = Add(h, c)",
        "w = Cast <to=1> (x) a = Exp(w) b = Add(a, f) y = Cast <to=10> (b)",
    ),
    "half inside a float32 file": (
        "float",
        "float",
        "h = Cast <to=10> (x) a = Mul(h, h) y = Cast <to=1> (a)",
        "h = Cast <to=10> (x) w = Cast <to=1> (h) a = Mul(w, w) b = Cast <to=10> (a) y = Cast <to=1> (b)",
    ),
    "statistics in double": (
        "float",
        "float",
        "a = Exp(x) y = Mul(a, a)",
        "d = Cast <to=11> (x) a = Exp(d) b = Cast <to=1> (a) y = Mul(b, b)",
    ),
}


@pytest.mark.parametrize("name", ALIKE)
def test_prove_moved_cast_is_equal_up_to_rounding(name: str) -> None:
    given, out, first, second = ALIKE[name]
    for pair in ((first, second), (second, first)):
        proof = judge(*pair, given, out)
        assert proof.verdict is Verdict.ROUNDED
        assert proof.casts
        assert "Cast" in str(proof)


# The other file holds no such value in the narrow type.
OTHERWISE = {
    "rounded input": ("float", "float", "y = Mul(x, x)", "h = Cast <to=10> (x) w = Cast <to=1> (h) y = Mul(w, w)"),
    "rounded result": ("float", "float", "y = Exp(x)", "a = Exp(x) h = Cast <to=10> (a) y = Cast <to=1> (h)"),
    "one of two ways to the output": (
        "float",
        "float",
        "h = Cast <to=10> (x) a = Mul(h, h) w = Cast <to=1> (a) y = Add(w, x)",
        "h = Cast <to=10> (x) a = Mul(h, h) w = Cast <to=1> (a) v = Cast <to=1> (h) y = Add(w, v)",
    ),
    "other narrow type": (
        "float16",
        "float16",
        "a = Exp(x) y = Add(a, c)",
        "a = Exp(x) b = Cast <to=16> (a) d = Cast <to=10> (b) y = Add(d, c)",
    ),
    "other function": ("float16", "float16", "y = Add(x, c)", "w = Cast <to=1> (x) a = Sub(w, f) y = Cast <to=10> (a)"),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_prove_rounding_of_one_file_only_is_not_equal(name: str) -> None:
    given, out, first, second = OTHERWISE[name]
    assert not judge(first, second, given, out)
    assert not judge(second, first, given, out)


@pytest.mark.parametrize("epsilon", ["1e-5", "1e-12"])
def test_prove_epsilon_that_half_precision_loses_is_not_rounded(epsilon: str) -> None:
    norm = """
        m = ReduceMean <axes = [1]> (x) d = Sub(x, m) q = Mul(d, d) v = ReduceMean <axes = [1]> (q)
        e = Constant <value_float = {epsilon}> () h = Cast <to = 10> (e)
        a = Add(v, h) r = Sqrt(a) y = Div(d, r)"""
    node = """
        s = Constant <value_floats = [1., 1., 1., 1., 1., 1., 1., 1.]> () g = Cast <to = 10> (s)
        y = LayerNormalization <axis = 1, epsilon = {epsilon}> (x, g)"""
    proof = judge(norm.format(epsilon=epsilon), node.format(epsilon=epsilon), "float16", "float16")
    # float16 holds 1.0014e-05 for 1e-5, and 0 for 1e-12.
    assert bool(proof) == (epsilon == "1e-5")
