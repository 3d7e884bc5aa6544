"""Verdicts of ``prove`` on pairs of small files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import normdeploy
from normdeploy.errors import GraphError, InputError
from normdeploy.verbs.prove.counterexamples import find_difference
from normdeploy.verbs.prove.file_pair import OpenFile, pair_files
from normdeploy.verbs.prove.proof_result import Verdict

from .graphs import model, prove

LAST = np.array([-1])
BY_HAND = """
    u = ReduceMean(x, last)
    d = Sub(x, u)
    q = Mul(d, d)
    v = ReduceMean(q, last)
    e = Add(v, eps)
    r = Sqrt(e)
    n = Div(d, r)
    g = Mul(n, gamma)
    y = Add(g, beta)"""
NODE = "y = LayerNormalization <axis = -1, epsilon = {epsilon}> (x, gamma, beta)"
ANY = "b, s, 8"


@pytest.fixture
def affine() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"gamma": rng.uniform(0.5, 1.5, 8), "beta": rng.standard_normal(8)}


@pytest.fixture
def conv() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    held = {name: rng.uniform(0.5, 1.5, 4) for name in ("gamma", "beta", "mean", "variance")}
    return {"w": rng.standard_normal((4, 3, 3, 3)), **held}


CONV = """
    c = Conv <pads = [1, 1, 1, 1]> (x, w)
    y = BatchNormalization <epsilon = 1e-5> (c, gamma, beta, mean, variance)"""
IMAGE = {"shape": "b, 3, h, k", "out": "b, 4, h, k"}


def folded(conv: dict[str, np.ndarray], change: float = 0.0) -> onnx.ModelProto:
    """Fold the BatchNormalization in float64 and store the result in float32, with one weight changed."""
    held = {name: np.asarray(value, np.float32).astype(np.float64) for name, value in conv.items()}
    scale = held["gamma"] / np.sqrt(held["variance"] + float(np.float32(1e-5)))
    weight = held["w"] * scale[:, None, None, None]
    weight[0, 0, 0, 0] *= 1 + change
    bias = held["beta"] - held["mean"] * scale
    return model("y = Conv <pads = [1, 1, 1, 1]> (x, f, b)", f=weight, b=bias, **IMAGE)


def test_prove_norm_by_hand_and_node_equal_for_all_sizes(affine: dict[str, np.ndarray]) -> None:
    first = model(BY_HAND, ANY, ANY, last=LAST, eps=np.float32(1e-5), **affine)
    proof = prove(first, model(NODE.format(epsilon=1e-5), ANY, ANY, **affine))
    assert proof.verdict is Verdict.EQUAL
    assert proof
    assert proof.exit_code == 0
    assert proof.error_bits >= 80
    assert "all sizes" in str(proof)
    assert "finite inputs" in str(proof)


def test_prove_changed_epsilon_different(affine: dict[str, np.ndarray]) -> None:
    first = model(BY_HAND, ANY, ANY, last=LAST, eps=np.float32(1e-5), **affine)
    proof = prove(first, model(NODE.format(epsilon=1e-6), ANY, ANY, **affine))
    assert proof.verdict is Verdict.DIFFERENT
    assert proof.exit_code == 1
    shown = proof.counterexample
    assert shown is not None
    assert shown.first != shown.second


def test_prove_folded_batch_norm_equal_up_to_rounding(conv: dict[str, np.ndarray]) -> None:
    proof = prove(model(CONV, **IMAGE, **conv), folded(conv))
    assert proof.verdict is Verdict.ROUNDED
    # One rounding of the exact number, and the error of float64
    assert all(r.ulps < 0.51 for r in proof.rounded)
    assert {r.name for r in proof.rounded} == {"f", "b"}


def test_prove_wrong_folded_weight_is_not_equal(conv: dict[str, np.ndarray]) -> None:
    assert not prove(model(CONV, **IMAGE, **conv), folded(conv, change=1e-5))


def test_prove_constant_off_by_one_ulp_different(affine: dict[str, np.ndarray]) -> None:
    changed = {name: value.astype(np.float32) for name, value in affine.items()}
    changed["gamma"] = changed["gamma"].copy()
    changed["gamma"][3] = np.nextafter(changed["gamma"][3], np.float32(2))
    text = NODE.format(epsilon=1e-5)
    proof = prove(model(text, **affine), model(text, **changed))
    assert proof.verdict is Verdict.DIFFERENT
    assert "'gamma'" in proof.reason
    assert proof.counterexample is not None


PLANTED = {
    "clip dropped": ("y = Clip(x, low, high)", "y = Identity(x)"),
    "softmax axis": ("y = Softmax <axis = -1> (x)", "y = Softmax <axis = 1> (x)"),
    "transposed weight": ("y = MatMul(x, w)", "t = Transpose(w) y = MatMul(x, t)"),
    "wrong branch": ("c = Greater(x, low) y = Where(c, x, high)", "c = Greater(x, low) y = Where(c, high, x)"),
    "attribute": ("y = LeakyRelu <alpha = 0.1> (x)", "y = LeakyRelu <alpha = 0.2> (x)"),
    "swapped subtraction": ("a = Exp(x) y = Sub(x, a)", "a = Exp(x) y = Sub(a, x)"),
    "mean for sum": ("m = ReduceMean(x, last) y = Sub(x, m)", "m = ReduceSum(x, last) y = Sub(x, m)"),
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("shape", ["2, 3, 8", ANY])
def test_prove_planted_fault_different(name: str, shape: str) -> None:
    rng = np.random.default_rng(0)
    held = {"low": np.float32(-0.5), "high": np.float32(0.5), "last": LAST, "w": rng.standard_normal((8, 8))}
    first, second = (model(text, shape, shape, **held) for text in PLANTED[name])
    assert prove(first, first)
    assert prove(first, second).verdict is Verdict.DIFFERENT


TRUE = {
    "exp of a sum of equal terms": ("a = Add(x, w) y = Exp(a)", "a = Add(w, x) y = Exp(a)"),
    "two transposes": ("y = Relu(x)", "a = Transpose <perm=[2,0,1]> (x) b = Relu(a) y = Transpose <perm=[1,2,0]> (b)"),
    "power": ("y = Mul(x, x)", "y = Pow(x, two)"),
    "relu as a clip": ("y = Relu(x)", 'y = Clip(x, zero, "")'),
    "dropout in inference": ("y = Exp(x)", "a = Dropout(x) y = Exp(a)"),
    "reshape of rows": ("y = MatMul(x, m)", "a = Reshape(x, rows) b = MatMul(a, m) y = Reshape(b, back)"),
    "zero times a finite number": ("a = Mul(x, zero) y = Add(a, w)", "a = Sub(x, x) y = Add(a, w)"),
}


@pytest.mark.parametrize("name", TRUE)
def test_prove_true_rewrite_equal(name: str) -> None:
    rng = np.random.default_rng(0)
    held = {"w": rng.standard_normal(8), "m": rng.standard_normal((8, 8)), "two": np.float32(2), "zero": np.float32(0)}
    held |= {"rows": np.array([-1, 8]), "back": np.array([2, 3, 8])}
    first, second = (model(text.replace('""', ""), **held) for text in TRUE[name])
    assert prove(first, second).verdict is Verdict.EQUAL


def test_prove_quotient_that_may_be_undefined_is_not_known() -> None:
    proof = prove(model("a = Div(x, x) y = Mul(a, x)"), model("y = Identity(x)"))
    assert proof.verdict is Verdict.UNKNOWN
    assert proof.exit_code == 2
    assert "divisor" in proof.reason


def test_prove_unknown_op_same_inputs_equal_and_other_attribute_not_known() -> None:
    first = model("y = Hardmax <axis = 1> (x)", ANY, ANY)
    assert prove(first, model("a = Identity(x) y = Hardmax <axis = 1> (a)", ANY, ANY)).verdict is Verdict.EQUAL
    assert not prove(first, model("y = Hardmax <axis = 2> (x)", ANY, ANY))


def test_prove_random_op_is_not_known() -> None:
    first = model("a = RandomNormalLike(x) y = Add(a, x)")
    proof = prove(first, first)
    assert proof.verdict is Verdict.UNKNOWN
    assert "RandomNormalLike" in proof.reason


def test_prove_other_output_name_needs_map() -> None:
    first = model("y = Relu(x)")
    second = onnx.parser.parse_model(onnx.printer.to_text(first).replace("y", "z"))
    with pytest.raises(InputError, match="--map"):
        prove(first, second)
    assert normdeploy.prove(first, second, map="y=z").verdict is Verdict.EQUAL


def test_prove_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="file not found"):
        normdeploy.prove(tmp_path / "a.onnx", tmp_path / "b.onnx")


def test_prove_writes_counterexample(tmp_path: Path) -> None:
    file = tmp_path / "inputs.npz"
    proof = normdeploy.prove(model("y = Relu(x)"), model("y = Abs(x)"), counterexample=file)
    assert proof.verdict is Verdict.DIFFERENT
    assert np.load(file)["x"].shape == (2, 3, 8)


def test_prove_other_type_is_not_known() -> None:
    second = onnx.parser.parse_model(onnx.printer.to_text(model("y = Relu(x)")).replace("float", "double"))
    proof = prove(model("y = Relu(x)"), second)
    assert proof.verdict is Verdict.UNKNOWN
    assert "double" in proof.reason


def with_default(alpha: float) -> onnx.ModelProto:
    """Call a function whose attribute has a default value."""
    made = model("y = Relu(x)")
    node = made.graph.node[0]
    node.op_type, node.domain = "foo", "f"
    made.opset_import.append(onnx.helper.make_opsetid("f", 1))
    inner = onnx.helper.make_node("LeakyRelu", ["a"], ["b"])
    reference = inner.attribute.add(name="alpha", type=onnx.AttributeProto.FLOAT)
    reference.ref_attr_name = "al"
    opset = [onnx.helper.make_opsetid("", 18)]
    default = onnx.helper.make_attribute("al", alpha)
    made.functions.append(
        onnx.helper.make_function("f", "foo", ["a"], ["b"], [inner], opset, attribute_protos=[default])
    )
    return made


def test_prove_default_of_a_function_attribute_counts() -> None:
    assert prove(with_default(0.3), with_default(0.4)).verdict is Verdict.DIFFERENT
    assert prove(with_default(0.3), model("y = LeakyRelu <alpha = 0.3> (x)")).verdict is Verdict.EQUAL


def test_find_difference_of_rounding_errors_at_zeros_is_none() -> None:
    """The bias cancels, so an output of zeros differs by float64's own rounding only."""
    bias = np.array([0.1, 0.7, -0.3, 0.9, 1.3, -2.1, 0.4, 0.6], np.float32)
    body = "a = Add(x, c) m = ReduceMean(a, two) y = Sub(a, m)"
    first, second = (model(body, two=np.array([0, 1]), c=c) for c in (bias, bias * np.float32(1.7)))
    pair = pair_files(OpenFile(first, "A"), OpenFile(second, "B"), {})
    assert find_difference(pair, [{}]).shown is None
    assert prove(first, second).verdict is Verdict.EQUAL


@pytest.mark.parametrize(("value", "verdict"), [(1e-5, Verdict.ROUNDED), (1.1e-5, Verdict.DIFFERENT)])
def test_float64_constant_in_float32_is_rounded(value: float, verdict: Verdict) -> None:
    body = "w = Cast <to = 11> (x) q = Mul(w, w) e = Add(q, eps) r = Sqrt(e) y = Cast <to = 1> (r)"
    wide = model(body)
    wide.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1e-5), "eps"))
    narrow = model("q = Mul(x, x) e = Add(q, eps) y = Sqrt(e)", eps=value)
    assert prove(wide, narrow).verdict is verdict


def test_mish_is_its_function_body() -> None:
    assert prove(model("y = Mish(x)"), model("s = Softplus(x) t = Tanh(s) y = Mul(x, t)")).verdict is Verdict.EQUAL


def test_gelu_after_a_group_norm_is_evaluated() -> None:
    body = "g = GroupNormalization <num_groups = 3> (x, gamma, gamma) y = Gelu(g)"
    files = [model(body, opset=opset, gamma=np.array([1.0, 2.0, 3.0])) for opset in (21, 22)]
    named = files[1].graph.node[0]
    named.output[0] = files[1].graph.node[1].input[0] = "h"
    assert prove(*files).verdict is Verdict.EQUAL


@pytest.mark.parametrize(("root", "verdict"), [(np.sqrt(2.0), Verdict.ROUNDED), (1.4143, Verdict.DIFFERENT)])
def test_gelu_in_simple_ops_is_equal_up_to_its_stored_root(root: float, verdict: Verdict) -> None:
    body = "d = Div(x, root) e = Erf(d) s = Add(e, one) h = Mul(half, x) y = Mul(h, s)"
    by_hand = model(body, root=np.array(root), one=np.array(1.0), half=np.array(0.5))
    assert prove(model("y = Gelu(x)", opset=20), by_hand).verdict is verdict
