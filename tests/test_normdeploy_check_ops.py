"""Test the ops and the arithmetic of the independent checker of certificates.

Each op of the page is compared with onnx's reference evaluator, and with rational numbers.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import normdeploy_check as checker
from tests.certificate_cases import Case, Json, make_case, make_node, parse_nodes


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Write a case and run the program on it. Returns: the exit code and the output."""

    def run(case: Case, *options: str) -> tuple[int, str]:
        code = checker.main([*case.write(tmp_path), "--seed", "5", *options])
        return code, capsys.readouterr().out

    return run


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def exact(rng: np.random.Generator) -> Iterator[checker.Evaluator]:
    with decimal.localcontext(checker.CONTEXT), np.errstate(all="ignore"):
        yield checker.Evaluator(rng, {}, exact=True)


@dataclass(frozen=True)
class Op:
    """An op with its leaves and constants. ``wrong``: attributes that give another function."""

    op: str
    leaves: Json
    attributes: Json = field(default_factory=dict)
    constants: Json = field(default_factory=dict)
    wrong: Json = field(default_factory=dict)
    opset: int = 21
    outputs: int = 1

    def node(self, output: str, **changed: Any) -> onnx.NodeProto:
        outputs = [output, *[f"{output}_{i}" for i in range(1, self.outputs)]]
        return make_node(self.op, [*self.leaves, *self.constants], outputs, **(self.attributes | changed))

    def arrays(self) -> dict[str, np.ndarray]:
        arrays = {n: np.asarray(v) for n, v in self.constants.items()}
        return {n: v.astype(np.float32) if v.dtype == np.float64 else v for n, v in arrays.items()}

    def case(self, **changed: Any) -> Case:
        """Return the certificate op(x) = −(−op(x)), with changed attributes on the right side."""
        after = [self.node("mid", **changed), *parse_nodes("neg = Neg(mid)\nz = Neg(neg)")]
        return make_case([self.node("z")], after, self.leaves, self.arrays(), opset=self.opset)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def ramp(*shape: int) -> np.ndarray:
    return (np.arange(math.prod(shape)) % 7 + 1).reshape(shape) / 4


X = {"x": [2, 3, 4]}
IMAGE = {"x": [2, 4, 6, 5]}
OPS = [
    Op("Add", X | {"y": [3, 1]}),
    Op("Sub", X | {"y": [4]}),
    Op("Mul", X | {"y": [2, 1, 4]}),
    Op("Div", X | {"y": [4]}),
    Op("Neg", X),
    Op("Sum", X | {"y": [4], "u": [3, 1]}),
    Op("Mean", X | {"y": [4], "u": [3, 1]}),
    Op("Reciprocal", X),
    Op("Pow", X, constants={"c": np.array(2.0)}),
    Op("Pow", X, constants={"c": np.array(-3.0)}),
    Op("Pow", {"x": [2, 3]}, constants={"c": np.array([-0.5])}),
    Op("Pow", {"x": [2, 3]}, constants={"c": np.array([1.5])}),
    Op("Sqrt", {"x": [2, 3]}),
    Op("ReduceSum", X, {"keepdims": 0}, {"a": ints(-1, 0)}, {"keepdims": 1}),
    Op("ReduceSum", X, {"axes": [1]}, wrong={"axes": [2]}, opset=11),
    Op("ReduceSum", X, {"noop_with_empty_axes": 1}, wrong={"noop_with_empty_axes": 0}),
    Op("ReduceMean", X, {}, {"a": ints(1)}, {"keepdims": 0}),
    Op("ReduceMean", X, {"axes": [1, 2]}, wrong={"axes": [1]}, opset=13),
    Op("ReduceMean", X),
    Op("ReduceSumSquare", X, {}, {"a": ints(-2)}, {"keepdims": 0}),
    Op("ReduceL2", {"x": [2, 5]}, {}, {"a": ints(1)}, {"keepdims": 0}),
    Op("ReduceL2", {"x": [2, 5]}, {"axes": [1], "keepdims": 0}, wrong={"axes": [0]}, opset=13),
    Op("GlobalAveragePool", IMAGE),
    Op("MatMul", {"x": [2, 3, 4], "y": [4, 5]}),
    Op("MatMul", {"x": [4], "y": [3, 4, 5]}),
    Op("MatMul", {"x": [2, 3, 4], "y": [4]}),
    Op("Gemm", {"x": [3, 4], "y": [4, 5], "u": [5]}, {"alpha": 0.5, "beta": 2.0}, wrong={"beta": 1.0}),
    Op("Gemm", {"x": [4, 3], "y": [5, 4]}, {"transA": 1, "transB": 1}, wrong={"alpha": 2.0}),
    Op("Gemm", {"x": [3, 3], "y": [3, 3]}, {"transB": 1}, wrong={"transB": 0}),
    Op("Einsum", {"x": [2, 3, 4], "y": [2, 4, 5]}, {"equation": "bij,bjk->bik"}, wrong={"equation": "bij,bjk->bki"}),
    Op("Einsum", {"x": [3, 3]}, {"equation": "ii->i"}, wrong={"equation": "ij->i"}),
    Op("Einsum", {"x": [2, 3, 4], "y": [4, 3]}, {"equation": "...ij,jk"}, wrong={"equation": "...ij,jk->...ki"}),
    Op("Einsum", {"x": [2, 3], "y": [3, 4], "u": [4]}, {"equation": "ij,jk,k->i"}, wrong={"equation": "ij,jk,k->j"}),
    Op("Conv", IMAGE, {"group": 2}, {"w": ramp(6, 2, 3, 2), "b": ramp(6)}, {"pads": [1, 0, 1, 0]}),
    Op("Conv", IMAGE, {"strides": [2, 1], "dilations": [1, 2], "pads": [1, 0, 2, 1]}, {"w": ramp(3, 4, 3, 2)},
       {"pads": [2, 0, 1, 1]}),
    Op("Conv", IMAGE, {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, {"w": ramp(3, 4, 3, 2)},
       {"auto_pad": "SAME_LOWER"}),
    Op("Conv", {"x": [2, 4, 7]}, {"group": 4}, {"w": ramp(8, 1, 3)}, {"pads": [1, 1]}),
    Op("ConvTranspose", IMAGE, {"group": 2}, {"w": ramp(4, 3, 3, 2), "b": ramp(6)}, {"pads": [1, 0, 1, 0]}),
    Op("ConvTranspose", IMAGE, {"strides": [2, 3], "dilations": [2, 1], "pads": [1, 0, 2, 1],
       "output_padding": [1, 0]}, {"w": ramp(4, 3, 2, 2)}, {"pads": [2, 0, 1, 1]}),
    Op("Reshape", X, {}, {"s": ints(0, -1)}),
    Op("Flatten", X, {"axis": 2}, wrong={"axis": 1}),
    Op("Squeeze", {"x": [1, 3, 1]}, {}, {"a": ints(-1)}),
    Op("Squeeze", {"x": [1, 3, 1]}, {"axes": [0]}, wrong={"axes": [2]}, opset=11),
    Op("Unsqueeze", X, {}, {"a": ints(0, -1)}),
    Op("Unsqueeze", X, {"axes": [1]}, wrong={"axes": [0]}, opset=11),
    Op("Transpose", X, {"perm": [2, 0, 1]}, wrong={"perm": [0, 2, 1]}),
    Op("Transpose", X),
    Op("Expand", {"x": [3, 1]}, {}, {"s": ints(2, 1, 4)}),
    Op("Tile", {"x": [2, 3]}, {}, {"r": ints(2, 3)}),
    Op("Concat", X | {"y": [2, 1, 4]}, {"axis": -2}),
    Op("Split", X, {"axis": 2}, {"s": ints(1, 3)}, outputs=2),
    Op("Split", {"x": [5, 2]}, {"num_outputs": 2}, wrong={"axis": 1}, outputs=2),
    Op("Slice", X, {}, {"s": ints(3, -1), "e": ints(-9, 0), "a": ints(2, 1), "t": ints(-2, -1)}),
    Op("Slice", X, {}, {"s": ints(1), "e": ints(2**63 - 1), "a": ints(-1)}),
    Op("Slice", X, {"starts": [-2], "ends": [5], "axes": [1]}, wrong={"starts": [0]}, opset=9),
    Op("Identity", X),
    Op("Dropout", X),
    Op("Cast", X, {"to": 11}),
    Op("BatchNormalization", {"x": [2, 3, 4]}, {"epsilon": 0.25}, {n: ramp(3) + i for i, n in enumerate("sbmv")},
       {"epsilon": 0.5}),
    Op("LayerNormalization", {"x": [2, 3, 4]}, {}, {"s": ramp(4), "b": ramp(4)}, {"axis": 1}),
    Op("LayerNormalization", {"x": [2, 3, 4]}, {"axis": 1, "epsilon": 0.5}, {"s": ramp(3, 4)}, {"epsilon": 0.25}),
    Op("RMSNormalization", {"x": [2, 3, 4]}, {}, {"s": ramp(4)}, {"axis": 1}, opset=23),
    Op("InstanceNormalization", {"x": [2, 3, 2, 2]}, {}, {"s": ramp(3), "b": ramp(3) + 1}, {"epsilon": 0.5}),
    Op("GroupNormalization", {"x": [2, 4, 3]}, {"num_groups": 2}, {"s": ramp(4), "b": ramp(4) + 1},
       {"num_groups": 1}),
    Op("MeanVarianceNormalization", {"x": [2, 3, 2, 2]}, {}, {}, {"axes": [2, 3]}),
    Op("Sigmoid", X), Op("Tanh", X), Op("Erf", X), Op("Softplus", X),
    Op("HardSigmoid", X, {"alpha": 0.5}, {}, {"alpha": 0.25}),
    Op("Gelu", X, {"approximate": "tanh"}, {}, {"approximate": "none"}),
    Op("Swish", X, {"alpha": 0.5}, {}, {"alpha": 1.0}, opset=24),
    Op("Softmax", X, {"axis": 1}, {}, {"axis": 2}),
    Op("Softmax", X, {"axis": 1}, {}, {"axis": 2}, opset=11),
]  # fmt: skip
IDS = [f"{o.op}-{i}" for i, o in enumerate(OPS)]
UNUSABLE_REFERENCE = {("Swish", 24), ("MeanVarianceNormalization", 21), ("Softmax", 11)}


@pytest.mark.parametrize("case", OPS, ids=IDS)
def test_op_right_identity_is_accepted(case: Op, check: Callable[..., tuple[int, str]]) -> None:
    code, text = check(case.case())
    assert code == 0, text


@pytest.mark.parametrize("case", OPS, ids=IDS)
def test_op_wrong_identity_is_refused(case: Op, check: Callable[..., tuple[int, str]]) -> None:
    wrong = case.case(**case.wrong)
    if not case.wrong:
        wrong.model.graph.node[-1].op_type = "Identity"
    code, text = check(wrong)
    assert code == 1, text
    assert text.split()[2] in ("equal", "shape"), text


@pytest.mark.parametrize("case", OPS, ids=IDS)
def test_op_in_float64_equals_reference(case: Op, rng: np.random.Generator) -> None:
    node = case.node("z")
    if (case.op, case.opset) in UNUSABLE_REFERENCE or (case.op == "ConvTranspose" and "group" in case.attributes):
        pytest.skip("onnx's reference does not compute this op; another test does")
    values = {n: np.abs(rng.standard_normal(s)) + 0.1 for n, s in case.leaves.items()}
    values |= {n: checker.widen(v, exact=False) for n, v in case.arrays().items()}
    inputs = [values[n] for n in node.input]
    actual = checker.Evaluator(rng, {}, exact=False).compute(node, case.opset, inputs)
    for ours, theirs in zip(actual, checker.reference(node, case.opset, inputs), strict=False):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "case", [o for o in OPS if o.op not in checker.UNKNOWN and o.op != "Swish"], ids=lambda o: o.op
)
def test_op_in_decimals_equals_float64(case: Op, exact: checker.Evaluator, rng: np.random.Generator) -> None:
    node = case.node("z")
    values = {n: np.abs(rng.standard_normal(s)) + 0.1 for n, s in case.leaves.items()}
    arrays = values | case.arrays()
    results = []
    for evaluator in (exact, checker.Evaluator(rng, {}, exact=False)):
        inputs = {n: checker.widen(a, exact=evaluator.exact) for n, a in arrays.items()}
        results.append(evaluator.run([(node, case.opset)], inputs)["z"])
    assert results[0].dtype == object
    np.testing.assert_allclose(results[0].astype(float), results[1], rtol=1e-12, atol=1e-12)


# --- Decimals --------------------------------------------------------------------------------------------------------


def fractions(values: np.ndarray) -> np.ndarray:
    return np.vectorize(lambda v: Fraction(int(v)), otypes=[object])(values)


def assert_close(actual: np.ndarray, expected: np.ndarray, digits: int) -> None:
    """Compare Decimals with fractions, relative to the largest one."""
    assert actual.shape == expected.shape
    largest = max(abs(v) for v in expected.flat)
    assert all(
        abs(Fraction(a) - b) <= largest * Fraction(1, 10**digits)
        for a, b in zip(actual.flat, expected.flat, strict=True)
    )


def test_float_becomes_its_exact_decimal() -> None:
    values = np.array([0.0, -0.0, 1.5, -0.1, 1e300, 5e-324, -2.2250738585072014e-308, 2.0**53, float(np.float32(1e-5))])
    assert [Fraction(v) for v in checker.widen(values, exact=True)] == [Fraction(v) for v in values.tolist()]


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div", "MatMul", "Sum", "ReduceSum", "Mean", "ReduceMean"])
def test_op_equals_fractions(op: str, exact: checker.Evaluator, rng: np.random.Generator) -> None:
    a, b = (fractions(rng.integers(-9, 9, (4, 4)) * 2 + 1) for _ in range(2))
    expected = {"Add": a + b, "Sub": a - b, "Mul": a * b, "MatMul": a @ b, "Div": a / b, "Sum": a + b}
    expected |= {"Mean": (a + b) / 2, "ReduceSum": a.sum(keepdims=True), "ReduceMean": a.sum(keepdims=True) / 16}
    inputs = [np.asarray(checker.to_decimals(v.astype(int).astype(object)), object) for v in (a, b)]
    node = make_node(op, ["x", "y"][: 1 if op.startswith("Reduce") else 2], ["z"])
    result = exact.run([(node, 21)], dict(zip("xy", inputs, strict=True)))["z"]
    assert_close(np.asarray(result), np.asarray(expected[op]), 35 if op == "MatMul" else 55)


def test_matmul_of_many_digits_has_30_digits(exact: checker.Evaluator, rng: np.random.Generator) -> None:
    a, b = (rng.integers(-(2**62), 2**62, s).astype(object) for s in ((3, 5000), (5000, 2)))
    inputs = {"x": np.asarray(checker.to_decimals(a), object) / 3, "y": np.asarray(checker.to_decimals(b), object)}
    result = exact.run([(make_node("MatMul", ["x", "y"], ["z"]), 21)], inputs)["z"]
    assert_close(result, fractions(a) @ fractions(b) / 3, 30)


def test_result_without_a_root_is_nan_and_spreads(exact: checker.Evaluator) -> None:
    x = np.asarray(checker.to_decimals(np.array([[4, -4]], dtype=object)), object)
    text = (
        "r = Sqrt(x)\nt = Transpose(r)\nf = Slice(r, zero, one, one)\nm = MatMul(t, f)\ns = Sigmoid(r)\nk = Softmax(r)"
    )
    constants = {"zero": np.array([0]), "one": np.array([1])}
    values = exact.run([(node, 21) for node in parse_nodes(text)], {"x": x} | constants)
    assert abs(values["m"][0, 0] - 4) < Decimal("1e-50")
    assert math.isnan(values["m"][1, 0])
    assert [math.isnan(v) for v in values["s"][0]] == [False, True]
    assert [math.isnan(v) for v in values["k"][0]] == [True, True]


def test_unknown_function_depends_on_op_attributes_and_argument(exact: checker.Evaluator) -> None:
    x = np.array([Decimal("0.5"), Decimal("0.5") + Decimal("1e-45"), Decimal("0.5000001"), Decimal("-0.5")], object)
    sigmoid, tanh, other = (
        exact.unknown(op, attributes, x) for op, attributes in (("Sigmoid", {}), ("Tanh", {}), ("Sigmoid", {"a": 1}))
    )
    assert sigmoid[0] == sigmoid[1]
    assert len({*sigmoid, *tanh, *other}) == 9


def naive_conv_transpose(x: np.ndarray, w: np.ndarray, groups: int, strides: Any, dilations: Any) -> np.ndarray:
    """Scatter each element of x, as the standard defines it, without pads."""
    n, c, *spatial = x.shape
    per_group = w.shape[1]
    shape = [s * (i - 1) + d * (k - 1) + 1 for s, i, d, k in zip(strides, spatial, dilations, w.shape[2:], strict=True)]
    result = np.zeros((n, groups * per_group, *shape), dtype=object)
    for image, channel, out in np.ndindex(n, c, per_group):
        target = (channel // (c // groups)) * per_group + out
        for i, j, k, m in np.ndindex(*spatial, *w.shape[2:]):
            place = (i * strides[0] + k * dilations[0], j * strides[1] + m * dilations[1])
            result[(image, target, *place)] += x[image, channel, i, j] * w[channel, out, k, m]
    return result


def naive_conv(x: np.ndarray, w: np.ndarray, groups: int, strides: Any, dilations: Any) -> np.ndarray:
    """Convolve without pads, element by element."""
    spans = [d * (k - 1) + 1 for d, k in zip(dilations, w.shape[2:], strict=True)]
    spatial = [(i - k) // s + 1 for i, k, s in zip(x.shape[2:], spans, strides, strict=True)]
    result = np.zeros((x.shape[0], w.shape[0], *spatial), dtype=object)
    for n, m, i, j, c, k, q in np.ndindex(*result.shape, *w.shape[1:]):
        channel = m // (w.shape[0] // groups) * w.shape[1] + c
        pixel = x[n, channel, i * strides[0] + k * dilations[0], j * strides[1] + q * dilations[1]]
        result[n, m, i, j] += pixel * w[m, c, k, q]
    return result


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("op", "naive", "shape", "dilations"),
    [("ConvTranspose", naive_conv_transpose, (4, 3, 3, 2), [2, 1]), ("Conv", naive_conv, (6, 4, 2, 2), [2, 3])],
)
def test_convolution_equals_integers(
    op: str,
    naive: Callable[..., np.ndarray],
    shape: tuple[int, ...],
    dilations: list[int],
    groups: int,
    exact: checker.Evaluator,
    rng: np.random.Generator,
) -> None:
    shape = shape if op == "ConvTranspose" else (shape[0], shape[1] // groups, *shape[2:])
    x, w = (rng.integers(-5, 5, s).astype(object) for s in ((2, 4, 6, 5), shape))
    node = make_node(op, ["x", "w"], ["z"], group=groups, strides=[2, 3], dilations=dilations)
    inputs = {n: np.asarray(checker.to_decimals(a), object) for n, a in (("x", x), ("w", w))}
    result = exact.run([(node, 21)], inputs)["z"]
    assert_close(result, fractions(naive(x, w, groups, [2, 3], dilations)), 35)


# --- Identities ------------------------------------------------------------------------------------------------------


LAYER_NORM = """
m = ReduceMean(x, last)
d = Sub(x, m)
q = Mul(d, d)
v = ReduceMean(q, last)
e = Add(v, eps)
r = Sqrt(e)
n = Div(d, r)
g = Mul(n, s)
z = Add(g, b)
"""
NORM = {"last": ints(-1), "eps": np.float32(0.25), "s": ramp(4).astype(np.float32), "b": ramp(4).astype(np.float32)}
IDENTITIES = {
    "layer norm": (LAYER_NORM, "z = LayerNormalization(x, s, b) epsilon=0.25", {"x": ["n", 3, 4]}, NORM),
    "inverse deviation": (
        LAYER_NORM.replace("n = Div(d, r)", "n = Reciprocal(r)")
        .replace("g = Mul(n, s)", "g = Mul(n, one)")
        .replace("z = Add(g, b)", "z = Add(g, zero)"),
        "y, k, z0 = LayerNormalization(x, s, b) epsilon=0.25\nz = Identity(z0)",
        {"x": [2, 4]},
        NORM | {"one": np.float32(1), "zero": np.float32(0)},
    ),
    "group norm, opset 18": (
        "h = Reshape(x, rows)\ni = InstanceNormalization(h, s, b) epsilon=0.25\nz = Reshape(i, back)",
        "z = GroupNormalization(x, s, b) num_groups=2 epsilon=0.25",
        {"x": [3, 4, 2]},
        {"rows": ints(0, 2, -1), "back": ints(3, 4, 2), "s": np.float32([2, 3]), "b": np.float32([1, -1])},
        20,
    ),
    "simplified layer norm": (
        "q = Mul(x, x)\nv = ReduceMean(q, last)\ne = Add(v, eps)\nr = Sqrt(e)\nn = Div(x, r)\nz = Mul(n, s)",
        "z = RMSNormalization(x, s) epsilon=0.25",
        {"x": [2, 4]},
        NORM,
        23,
    ),
    "principal roots multiply": (
        "a = Sqrt(x)\nb = Sqrt(y)\nz = Mul(a, b)",
        "q = Mul(x, y)\nz = Sqrt(q)",
        {"x": [5], "y": [5]},
        {},
    ),
    "L2 norm": ("z = ReduceL2(x, last)", "q = ReduceSumSquare(x, last)\nz = Sqrt(q)", {"x": ["n", "n"]}, NORM),
    "mean over a shape": (
        "h = Shape(x) start=1\np = ReduceProd(h) keepdims=0\nf = Cast(p) to=1\n"
        "t = ReduceSum(x, last) keepdims=0\nz = Div(t, f)",
        "z = ReduceMean(x, last) keepdims=0",
        {"x": ["a", "b"]},
        NORM,
    ),
    "zeros of a shape": (
        "h = Shape(x)\nk = ConstantOfShape(h)\nz = Add(x, k)",
        "z = Identity(x)",
        {"x": ["a", "b"]},
        {},
    ),
    "cast like": ("h = Size(x)\nk = CastLike(h, x)\nt = Mul(x, k)\nz = Div(t, k)", "z = Identity(x)", {"x": ["a"]}, {}),
    "swish": ("k = Sigmoid(x)\nz = Mul(x, k)", "z = Swish(x)", {"x": [4]}, {}, 24),
    "permuted softmax": (
        "f = Slice(x, one, low, last, back)\nk = Softmax(f)\nz = Slice(k, one, low, last, back)",
        "z = Softmax(x)",
        {"x": [3, 4]},
        {"one": ints(-1), "low": ints(-9), "last": ints(-1), "back": ints(-1)},
    ),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_identity_is_accepted_and_its_scaled_form_refused(name: str, check: Callable[..., tuple[int, str]]) -> None:
    before, after, leaves, constants, *opset = IDENTITIES[name]
    code, text = check(make_case(parse_nodes(before), parse_nodes(after), leaves, constants, opset=(opset or [21])[0]))
    assert code == 0, text
    *rest, last = parse_nodes(after)
    last.output[:] = ["zz" if n == "z" else n for n in last.output]
    wrong = [*rest, last, *parse_nodes("z = Sum(zz, zz)")]
    code, text = check(make_case(parse_nodes(before), wrong, leaves, constants, opset=(opset or [21])[0]))
    assert (code, "claim equal" in text) == (1, True), text


@pytest.mark.parametrize(("product", "code"), [(6, 0), (5, 1), (-6, 1)])
def test_roots_of_constants_are_positive_roots(product: int, code: int, check: Callable[..., tuple[int, str]]) -> None:
    constants = {"c": np.float32(3), "d": np.float32(12), "product": np.float32(product)}
    before = parse_nodes("a = Sqrt(c)\nb = Sqrt(d)\nt = Mul(a, b)\nz = Mul(x, t)")
    actual, text = check(make_case(before, parse_nodes("z = Mul(x, product)"), {"x": [3]}, constants))
    assert (actual, "claim equal" in text) == (code, code == 1), text


def test_many_roots_of_constants_are_accepted(check: Callable[..., tuple[int, str]]) -> None:
    scale = {n: ramp(64).astype(np.float32) for n in "sbmv"}
    before = parse_nodes("y = Identity(x)\nz = BatchNormalization(y, s, b, m, v)")
    after = parse_nodes("z = BatchNormalization(x, s, b, m, v)")
    code, text = check(make_case(before, after, {"x": [2, 64]}, scale))
    assert code == 0, text


def test_sizes_that_are_sums_of_products_are_accepted(check: Callable[..., tuple[int, str]]) -> None:
    leaves = {"x": ["n"], "y": ["2*n*n+-1"]}
    after = parse_nodes("a = Identity(y)\nz = Concat(x, a) axis=0")
    code, text = check(make_case(parse_nodes("z = Concat(x, y) axis=0"), after, leaves))
    assert code == 0, text
    assert "sizes {'n': 2} and {'n': 1}" in text


def test_unknown_rank_is_accepted(check: Callable[..., tuple[int, str]]) -> None:
    assert check(make_case(parse_nodes("z = Add(x, x)"), parse_nodes("z = Sum(x, x)"), {"x": None}))[0] == 0


# --- Other ops -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["z = Relu(x)", "z = Exp(x)", "z = Pow(x, y)", "z = Gather(x, i)", "z = Abs(x)"])
def test_other_op_that_is_exact_in_decimals_is_compared(line: str, check: Callable[..., tuple[int, str]]) -> None:
    leaves, constants = {"x": [3], "y": [3]}, {"i": ints(0)}
    assert check(make_case(parse_nodes(line), parse_nodes(line), leaves, constants))[0] == 0
    wrong = parse_nodes(line.replace("z =", "k =") + "\nz = Neg(k)")
    code, text = check(make_case(parse_nodes(line), wrong, leaves, constants))
    assert (code, "claim equal" in text) == (1, True), text


@pytest.mark.parametrize("line", ["z = Sin(x)", "z = Celu(x)", "z = Lgamma(x)", "z = Foo(x)"])
def test_op_without_exact_form_is_refused(line: str, check: Callable[..., tuple[int, str]]) -> None:
    code, text = check(make_case(parse_nodes(line), parse_nodes(line), {"x": [3]}))
    assert code == 1, text
    assert text.split()[2] in ("structure", "equal"), text


@pytest.mark.parametrize("domain", ["com.microsoft", "other"])
def test_op_of_another_domain_fails_structure(domain: str, check: Callable[..., tuple[int, str]]) -> None:
    case = make_case(
        parse_nodes("z = LayerNormalization(x, s)"),
        parse_nodes("z = LayerNormalization(x, s)"),
        {"x": [3]},
        {"s": np.float32([1, 2, 3])},
    )
    assert check(case)[0] == 0
    case.raw["rewrites"][0]["before"]["node"][0]["domain"] = domain
    case.model.graph.node[0].domain = domain
    code, text = check(case)
    assert (code, "claim structure" in text) == (1, True), text


@pytest.mark.parametrize(("after", "code"), [("z = Relu(x)", 0), ("z = Abs(x)", 1), ("z = Clip(x, zero)", 0)])
def test_numeric_mode_uses_the_reference(after: str, code: int, check: Callable[..., tuple[int, str]]) -> None:
    before = parse_nodes("k = Greater(x, zero)\nz = Where(k, x, zero)")
    built = make_case(before, parse_nodes(after), {"x": ["a", 3]}, {"zero": np.float32(0)}, mode="numeric")
    assert check(built)[0] == code


def test_node_of_the_model_has_the_opset_of_the_model(check: Callable[..., tuple[int, str]]) -> None:
    # Until opset 12, the Softmax is over all axes from the second one on.
    before = parse_nodes("r = Flatten(x)\nk = Softmax(r)\nz = Reshape(k, shape)")
    built = make_case(before, parse_nodes("z = Softmax(x)"), {"x": [2, 3, 4]}, {"shape": ints(2, 3, 4)}, opset=12)
    assert check(built)[0] == 0
    built.model.opset_import[0].version = 13
    code, text = check(built)
    assert (code, "claim equal" in text) == (1, True), text


@pytest.mark.parametrize(
    "line",
    [
        "z = Reshape(x, two)",
        "z = Conv(x, w) kernel_shape=[2]",
        "z = Concat(x, i) axis=0",
    ],
)
def test_wrong_types_and_shapes_fail_equal(line: str, check: Callable[..., tuple[int, str]]) -> None:
    constants = {"i": ints(1, 2), "two": np.float32([2]), "w": np.ones((1, 1, 1), np.float32)}
    code, text = check(make_case(parse_nodes(line), parse_nodes(line), {"x": [1, 1, 2]}, constants))
    assert (code, "claim equal" in text) == (1, True), text


def test_wide_layer_takes_seconds(check: Callable[..., tuple[int, str]], rng: np.random.Generator) -> None:
    weight = {
        "w": rng.standard_normal((1024, 1024)).astype(np.float32),
        "b": rng.standard_normal(1024).astype(np.float32),
    }
    before = parse_nodes("h = MatMul(x, w)\nz = Add(h, b)")
    code, text = check(make_case(before, parse_nodes("z = Gemm(x, w, b)"), {"x": ["n", 1024]}, weight))
    assert code == 0, text
