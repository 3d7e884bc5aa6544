"""Decomposed attention as one Attention node for onnxruntime: what it computes, and all that only looks like it and
stays."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.evaluate import evaluator
from normdeploy.graphs.graph import Graph
from normdeploy.graphs.region import Region, compile_region
from normdeploy.proof.lemmas.attention import RoundedFloat
from normdeploy.rewriting import attention_fusion, certification, hidden_mask_rows
from normdeploy.rewriting.norm_optimizer import optimize_norms, optimize_with_steps
from normdeploy.rewriting.rewrite_ledger import RewriteOptions

from ..support import parsed, run_onnxruntime

B, H, S, T, D = 2, 4, 5, 7, 8
U = 2.0**-24
LOWEST = float(np.finfo(np.float32).min)
HEAD = f"float[B,{H},{S},{D}] q, float[B,{H},{T},{D}] k, float[B,{H},{T},{D}] v"
TURNED = "kt = Transpose<perm = [0, 1, 3, 2]>(k)"
PLAIN = f"{TURNED} s0 = MatMul(q, kt) s = Mul(s0, c) p = Softmax<axis = -1>(s) y = MatMul(p, v)"
MASKED = f"{TURNED} s0 = MatMul(q, kt) s = Mul(s0, c) a = Add(s, m) p = Softmax<axis = -1>(a) y = MatMul(p, v)"
BOOL = f"{HEAD}, bool[B,1,{S},{T}] b"
MASK = "m = Where(b, zero, low)"
GUARD = "most = ReduceMax(m, last) shown = Greater(most, half) f = Cast<to = 1>(shown) y = Mul(every, f)"
CONSTANTS = {
    "c": np.float32(D**-0.5),
    "root": np.float32(D**-0.25),
    "under": np.float32(D**0.5),
    "zero": np.float32(0),
    "one": np.float32(1),
    "low": np.float32(-1e4),
    "lowest": np.float32(LOWEST),
    "minus_inf": np.float32(-np.inf),
    "half": np.float32(LOWEST / 2),
    "last": np.array([-1]),
    "flat": np.array([-1, T, D]),
    "heads": np.array([-1, H, D, T]),
    "second": np.array([2]),
}


def graph(
    body: str, head: str = HEAD, outputs: str = "float[e,f,g,h] y", opset: int = 21, **more: np.ndarray
) -> onnx.ModelProto:
    held = {
        name: value
        for name, value in (CONSTANTS | more).items()
        if name in body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    }
    return parsed(f"g ({head}) => ({outputs}) {{ {body} }}", opset, **held)


def ops(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node]


def written(proto: onnx.ModelProto, **wanted: str) -> onnx.ModelProto:
    return optimize_norms(proto, **{"runtime": "onnxruntime", **wanted})[0]


def stays(proto: onnx.ModelProto, **wanted: str) -> bool:
    return "Attention" not in ops(written(proto, **wanted))


def drawn(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng, feeds = np.random.default_rng(0), dict[str, np.ndarray]()
    for spec in proto.graph.input:
        kind = onnx.helper.tensor_dtype_to_np_dtype(spec.type.tensor_type.elem_type)
        shape = [d.dim_value or B for d in spec.type.tensor_type.shape.dim]
        made = rng.standard_normal(shape) if kind.kind == "f" else rng.integers(0, 2, shape)
        feeds[spec.name] = made.astype(kind)
    if "b" in feeds:
        feeds["b"][..., 0] = True
    return feeds


def by_hand(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | float, scale: float
) -> tuple[np.ndarray, float]:
    """In float64, and what float32 may be off by.

    A score is a sum of D products, each scaled: off by δ = (D + 4)·u·scale·Σ|q||k| + u·|mask|. A weight is off by 2δ of
    itself, and by (T + 8)·u for the exponential, their sum and the division; so is the sum of T values, at most the
    largest of them.
    """
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = scale * (q @ k.swapaxes(-1, -2)) + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    kept = weights > 0  # what a mask hides weighs nothing, whatever it is off by
    off = (q.shape[-1] + 4) * U * scale * (np.abs(q) @ np.abs(k).swapaxes(-1, -2)).max() + U * float(
        np.abs(np.where(kept, mask, 0)).max()
    )
    bound = (2 * off + (2 * k.shape[2] + 8) * U) * np.abs(v).max()
    return (weights / weights.sum(-1, keepdims=True)) @ v, float(bound)


# ------------------------------------------------------------------ what becomes one node

WRITTEN = {
    "scaled": (PLAIN, HEAD),
    "divided": (PLAIN.replace("Mul(s0, c)", "Div(s0, under)"), HEAD),
    "both sides": (
        f"qs = Mul(q, root) {TURNED} ks = Mul(kt, root) s = MatMul(qs, ks) p = Softmax(s) y = MatMul(p, v)",
        HEAD,
    ),
    "the query": (f"qs = Mul(c, q) {TURNED} s = MatMul(qs, kt) p = Softmax<axis = 3>(s) y = MatMul(p, v)", HEAD),
    "the exporter's": (
        (
            "r = Reshape(k, flat) t = Transpose<perm = [0, 2, 1]>(r) kt = Reshape(t, heads) qs = Mul(q, root) ks ="
            " Mul(kt, root)s = MatMul(qs, ks) p = Softmax(s) y = MatMul(p, v)"
        ),
        HEAD,
    ),
    "keys by rows": (PLAIN.replace("[0, 1, 3, 2]", "[0, 2, 3, 1]"), HEAD.replace(f"{H},{T},{D}] k", f"{T},{H},{D}] k")),
    "masked": (f"{MASK} {MASKED}", BOOL),
    "a mask in front": (f"{MASK} {MASKED.replace('Add(s, m)', 'Add(m, s)')}", BOOL),
    "a mask of rows": (f"{MASK} {MASKED}", BOOL.replace(f"{S},{T}] b", f"1,{T}] b")),
    "a mask for each head": (f"{MASK} {MASKED}", BOOL.replace("B,1", f"B,{H}")),
    "a mask of two axes": (f"{MASK} {MASKED}", BOOL.replace("B,1,", "")),
    "guarded": (f"{MASK.replace('low', 'lowest')} {MASKED.replace('y =', 'every =')} {GUARD}", BOOL),
    "an integer mask": (
        f"x = Cast<to = 1>(i) d = Sub(one, x) m = Mul(d, low) {MASKED}",
        f"{HEAD}, int64[B,1,1,{T}] i",
    ),
    "open lengths": (
        f"{MASK} {MASKED}",
        BOOL.replace(f"1,{S},{T}] b", "1,1,T] b").replace(f",{S},", ",S,").replace(f",{T},", ",T,"),
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_an_attention_becomes_one_node(name: str) -> None:
    before = graph(*WRITTEN[name])
    after = written(before)
    made = ops(after)
    assert "Attention" in made
    assert not {"Softmax", "MatMul"} & set(made)
    assert after.opset_import[0].version == 23
    feeds = drawn(before)
    if name == "open lengths":
        shapes = {"q": (B, H, S, D), "k": (B, H, T, D), "v": (B, H, T, D)}
        feeds = {
            n: np.random.default_rng(i).standard_normal(s).astype(np.float32) for i, (n, s) in enumerate(shapes.items())
        }
        feeds["b"] = np.ones((B, 1, 1, T), bool)
        feeds["b"][1, ..., 3:] = False
    mask: np.ndarray | float = 0.0
    if "b" in feeds:
        mask = np.where(feeds["b"], 0.0, LOWEST if name == "guarded" else -1e4)
    if "i" in feeds:
        mask = (1.0 - feeds["i"]) * -1e4
    k = feeds["k"].swapaxes(1, 2) if name == "keys by rows" else feeds["k"]
    expected, bound = by_hand(feeds["q"], k, feeds["v"], mask, D**-0.5)
    for optimizer in (False, True):
        (got,) = run_onnxruntime(after, feeds, optimizer)
        assert np.abs(got - expected).max() <= bound


REPEATED = " ".join(
    f"{x}u = Unsqueeze({x}0, axis) {x}e = Expand({x}u, wide) {x}i = Identity({x}e) {x} = Reshape({x}i, back)"
    for x in "kv"
)


@pytest.mark.parametrize("axis", [2, 1])
def test_repeated_keys_are_read_once(axis: int) -> None:
    """Each head of keys for consecutive heads of queries is what Attention says; keys one behind the other and again
    are not."""
    head = f"float[{B},{H},{S},{D}] q, float[{B},2,{T},{D}] k0, float[{B},2,{T},{D}] v0"
    wide = np.array([B, 2, 2, T, D])
    before = graph(f"{REPEATED} {PLAIN}", head, axis=np.array([axis]), wide=wide, back=np.array([B, H, T, D]))
    after = written(before)
    made = next(node for node in after.graph.node if node.op_type == "Attention")
    assert (list(made.input[1:3]) == ["k0", "v0"]) == (axis == 2)
    feeds = drawn(before)
    k, v = feeds["k0"], feeds["v0"]
    if axis == 1:
        k, v = (np.concatenate([x, x], axis=1) for x in (k, v))
    expected, bound = by_hand(feeds["q"], k, v, 0.0, D**-0.5)
    (got,) = run_onnxruntime(after, feeds)
    assert np.abs(got - expected).max() <= bound


# ------------------------------------------------------------------ what stays

HEADS = np.array([1.0, 1.0, 1.0, 2.0], np.float32).reshape(H, 1, 1)
SQUARE = f"float[B,{H},{D},{D}] q, float[B,{H},{D},{D}] k, float[B,{H},{D},{D}] v"
STAYS = {
    "another scale on one head": (PLAIN.replace("(s0, c)", "(s0, each)"), HEAD),
    "softmax over the queries": (PLAIN.replace("axis = -1", "axis = 2"), HEAD),
    "softmax over the queries of a square": (PLAIN.replace("axis = -1", "axis = 2"), SQUARE),
    "a mask behind the softmax": (
        f"{MASK} {PLAIN.replace('p = Soft', 'p0 = Soft').replace('y =', 'p = Add(p0, m) y =')}",
        BOOL,
    ),
    "keys that are not turned": (PLAIN.replace(TURNED, "kt = Identity(k)"), SQUARE),
    "a negative scale": (PLAIN.replace("(s0, c)", "(s0, low)"), HEAD),
    "a mask that is scaled too": (
        f"{MASK} {MASKED.replace('s = Mul(s0, c) a = Add(s, m)', 'a0 = Add(s0, m) a = Mul(a0, c)')}",
        BOOL,
    ),
    "capped scores": (
        PLAIN.replace("Softmax<axis = -1>(s)", "Softmax<axis = -1>(capped)").replace("p =", "capped = Tanh(s) p ="),
        HEAD,
    ),
    "probabilities from the right": (PLAIN.replace("MatMul(p, v)", "MatMul(v, p)"), SQUARE),
    "a mask that may be minus infinity": (MASKED, f"{HEAD}, float[B,1,{S},{T}] m"),
    "a mask of minus infinity": (f"{MASK.replace('low', 'minus_inf')} {MASKED}", BOOL),
    "a mask of the lowest number, no guard": (f"{MASK.replace('low', 'lowest')} {MASKED}", BOOL),
    "a mask of any integer times the lowest number": (
        f"x = Cast<to = 1>(i) d = Sub(one, x) m = Mul(d, lowest) {MASKED}",
        f"{HEAD}, int64[B,1,1,{T}] i",
    ),
    "a mask that makes the result larger": (f"{MASK} {MASKED}", BOOL.replace("float[B,", "float[1,")),
    "a mask of columns, each of which is a whole row": (f"{MASK} {MASKED}", BOOL.replace(f"{S},{T}] b", f"{S},1] b")),
    "three axes": (
        PLAIN.replace("[0, 1, 3, 2]", "[0, 2, 1]"),
        f"float[B,{S},{D}] q, float[B,{T},{D}] k, float[B,{T},{D}] v",
    ),
    "float64": (PLAIN.replace("Mul(s0, c)", "Mul(s0, wide)"), HEAD.replace("float", "double")),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_only_looks_like_one_stays(name: str) -> None:
    body, head = STAYS[name]
    outputs = (
        "float[e,f,g] y" if name == "three axes" else "double[e,f,g,h] y" if name == "float64" else "float[e,f,g,h] y"
    )
    assert stays(graph(body, head, outputs, each=HEADS * np.float32(D**-0.5), wide=np.float64(D**-0.5)))


@pytest.mark.parametrize("tensor", ["p", "s", "s0"])
def test_scores_that_are_read_elsewhere_stay(tensor: str) -> None:
    assert not stays(graph(PLAIN))
    assert stays(graph(PLAIN, outputs=f"float[e,f,g,h] y, float[i,j,l,n] {tensor}"))
    assert stays(graph(f"{PLAIN} z = Neg({tensor})", outputs="float[e,f,g,h] y, float[i,j,l,n] z"))


def test_biased_scores_that_are_read_elsewhere_stay() -> None:
    body, head = WRITTEN["masked"]
    assert stays(graph(f"{body} z = Neg(a)", head, "float[e,f,g,h] y, float[i,j,l,n] z"))


def test_a_softmax_is_a_function_of_its_row_to_the_proof() -> None:
    """Not of its element alone: floats would tell as well, but the field has to."""
    both = f"{PLAIN.replace('axis = -1', 'axis = 2')} z = Attention<scale = 0.5>(q, k, v)".replace("c)", "half)")
    made = Graph(graph(both, SQUARE, "float[e,f,g,h] y, float[i,j,l,n] z", 23, half=np.float32(0.5)))
    leaves = list(made.gs.inputs)
    y, z = (
        compile_region(made, next(o for n in made.nodes for o in n.outputs if o.name == name), leaves) for name in "yz"
    )
    assert isinstance(y, Region)
    assert isinstance(z, Region)
    assert certification.certify_rewrites({}, [certification.Rewrite(y, z)]).note.startswith(
        "it computes a different function"
    )


@pytest.mark.parametrize("runtime", ["any", "onnxruntime-accurate", "tensorrt", "tensorrt-rtx"])
def test_other_runtimes_get_none(runtime: str) -> None:
    assert stays(graph(PLAIN), runtime=runtime)


def test_a_file_that_may_not_be_raised_stays() -> None:
    for wanted in (RewriteOptions("onnxruntime", limit=21), RewriteOptions("onnxruntime", attentions=False)):
        proto, *_ = optimize_with_steps(graph(PLAIN), wanted)
        assert "Attention" not in ops(proto)
        assert proto.opset_import[0].version == 21
    old = graph(PLAIN, opset=13)  # Softmax means the same since then
    assert not stays(old)
    old.graph.node.insert(
        0, onnx.helper.make_node("ReduceMax", ["q"], ["most"], axes=[1])
    )  # whose axes became an input
    old.graph.output.append(onnx.helper.make_tensor_value_info("most", onnx.TensorProto.FLOAT, None))
    assert stays(old)


def test_half_precision_and_a_stated_opset_have_none() -> None:
    result = normdeploy.optimize(graph(PLAIN), runtime="onnxruntime", precision="fp16")
    assert "Softmax" in ops(result.proto)


# ------------------------------------------------------------------ the scale


def test_the_scale_is_the_exact_product_rounded_once() -> None:
    root = Fraction(float(np.float32(64**-0.25)))
    before = graph(WRITTEN["both sides"][0], root=np.float32(64**-0.25))
    (node,) = [n for n in written(before).graph.node if n.op_type == "Attention"]
    (scale,) = [a.f for a in node.attribute if a.name == "scale"]
    assert root * root != Fraction(1, 8)
    assert scale == np.float32(float(root * root)) != np.float32(0.125)


@pytest.mark.parametrize("wrong", [1 + 1e-5, 1 + 2.0**-30, -1.0])
def test_another_scale_is_not_written(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_fusion, "RoundedFloat", lambda exact: RoundedFloat(exact * Fraction(wrong)))
    assert stays(graph(PLAIN))


def test_a_scale_that_is_stored_as_another_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def stored(exact: Fraction) -> RoundedFloat:
        made = float.__new__(RoundedFloat, np.nextafter(np.float32(float(exact)), np.float32(1)))
        made.exact = exact
        return made

    monkeypatch.setattr(attention_fusion, "RoundedFloat", stored)
    assert stays(graph(PLAIN))


def test_what_was_proved_of_one_scale_is_not_taken_for_another() -> None:
    second = (
        f"{TURNED.replace('kt', 'kt2')} a0 = MatMul(q, kt2) a1 = Mul(a0, c) a2 = Mul(a1, d) p2 = Softmax(a2) z ="
        " MatMul(p2, v)"
    )
    before = graph(f"{PLAIN} {second}", outputs="float[e,f,g,h] y, float[i,j,l,n] z", d=np.float32(1 + 2.0**-23))
    scales = [
        a.f for n in written(before).graph.node if n.op_type == "Attention" for a in n.attribute if a.name == "scale"
    ]
    assert scales == [np.float32(D**-0.5), np.float32(float(np.float32(D**-0.5)) * (1 + 2.0**-23))]


# ------------------------------------------------------------------ masks


@pytest.mark.parametrize(("number", "hidden"), [(-np.inf, False), (LOWEST, False), (-np.inf, True), (LOWEST, True)])
def test_a_constant_mask_may_hide_anything_but_a_whole_row(number: float, hidden: bool) -> None:
    mask = np.triu(np.full((S, T), number, np.float32), 1)
    if hidden:
        mask[3] = number
    before = graph(MASKED, m=mask)
    after = written(before)
    assert ("Attention" in ops(after)) == (not hidden)
    if hidden:
        return
    feeds = drawn(before)
    expected, bound = by_hand(feeds["q"], feeds["k"], feeds["v"], mask.astype(np.float64), D**-0.5)
    assert np.abs(run_onnxruntime(after, feeds)[0] - expected).max() <= bound


def test_where_the_kernel_and_softmax_part() -> None:
    """What `mask_rows` is for: zeros where Softmax makes NaN, or the mean of all values. If no more, more masks could
    be taken."""
    node = "every = Attention<scale = 1.0>(q, k, v, m)"
    proto = graph(node, f"{HEAD}, float[B,1,{S},{T}] m", "float[e,f,g,h] every", opset=23)
    feeds = drawn(proto)
    for number in (-np.inf, LOWEST):
        feeds["m"][:] = number
        assert not run_onnxruntime(proto, feeds)[0].any()
    feeds["m"][:] = np.nextafter(np.float32(LOWEST), np.float32(0))
    assert run_onnxruntime(proto, feeds)[0].all()


@pytest.mark.parametrize("guard", ["another mask", "another axis", "another factor", "read beside it"])
def test_a_guard_that_is_none(guard: str) -> None:
    body, head = WRITTEN["guarded"]
    more, outputs = {}, "float[e,f,g,h] y"
    if guard == "another mask":
        body, head = body.replace("ReduceMax(m,", "ReduceMax(o,"), f"{head}, float[B,1,{S},{T}] o"
    if guard == "another axis":
        body, head = body.replace("last)", "second)"), head.replace(f"{S},{T}] b", f"{S},{T}] b")
    if guard == "another factor":
        body, more = body.replace("half", "far"), {"far": np.float32(-np.inf)}
    if guard == "read beside it":
        outputs += ", float[i,j,l,n] every"
    assert stays(graph(body, head, outputs, **more))


def test_hidden_rows_are_zeros_and_show_what_is_no_number() -> None:
    before = graph(*WRITTEN["guarded"])
    after, feeds = written(before), drawn(before)
    feeds["b"][1, :, 2] = False
    (got,) = run_onnxruntime(after, feeds)
    assert not got[1, :, 2].any()
    assert got[1, :, 1].all()
    for bad in (np.nan, np.inf):
        feeds["v"][1, 0, 4, 3] = bad
        old, new = (np.isnan(run_onnxruntime(proto, feeds)[0]) for proto in (before, after))
        assert new[1, 0, 2, 3]
        np.testing.assert_array_equal(new, old)


def test_bounds_of_a_mask() -> None:
    def bounds(
        body: str, head: str = "bool[N] b, int64[N] i, float[N] x", **more: np.ndarray
    ) -> tuple[float, float] | None:
        made = Graph(graph(f"{body} y = Identity(m)", head, "float[N] y", **more))
        return hidden_mask_rows.value_bounds(made, next(n for n in made.nodes if n.outputs[0].name == "y").inputs[0])

    assert bounds("m = Where(b, zero, low)") == (-1e4, 0)
    assert bounds("m = Cast<to = 1>(b)") == (0, 1)
    assert bounds("f = Cast<to = 1>(b) d = Sub(one, f) m = Mul(d, low)") == (-1e4, 0)
    assert bounds("f = Cast<to = 1>(b) n = Neg(f) m = Add(n, low)") == (-10001, -1e4)
    assert bounds("f = Cast<to = 1>(i) m = Mul(f, low)") == (-1e4 * (2.0**63 - 1), 1e4 * 2.0**63)
    assert bounds("f = Cast<to = 1>(i) m = Mul(f, lowest)") is None
    share = "f = Cast<to = 1>(b) s = Sub(one, f)"
    assert bounds(f"{share} w = Sub(f, two) m = Mul(s, w)", two=np.float32(2)) == (-2, 0)  # [0, 1] times [-2, -1]
    assert bounds(f"{share} n = Neg(s) m = Mul(s, n)") == (-1, 0)
    assert bounds("m = Where(b, zero, lowest)") == (LOWEST, 0)
    assert bounds("w = Where(b, zero, lowest) m = Add(w, low)") is None
    assert bounds("m = Where(b, zero, minus_inf)") is None
    assert bounds("m = Where(b, x, low)") is None
    assert bounds("f = Cast<to = 1>(b) m = Div(low, f)") is None


def test_a_mask_is_spread_once_for_all_attentions() -> None:
    second = (
        "kt2 = Transpose<perm = [0, 1, 3, 2]>(k) a0 = MatMul(y, kt2) a1 = Add(a0, m) p2 = Softmax(a1) z = MatMul(p2, v)"
    )
    head = BOOL.replace(f"{S},{T}] b", f"1,{T}] b")
    made = ops(written(graph(f"{MASK} {MASKED} {second}", head, "float[e,f,g,h] z")))
    assert (made.count("Attention"), made.count("Expand")) == (2, 1)


# ------------------------------------------------------------------ the op in float64


def test_attention_in_float64() -> None:
    rng = np.random.default_rng(0)
    q, k, v, mask = (rng.standard_normal(s) for s in ((B, H, S, D), (B, 2, T, D), (B, 2, T, 3), (B, 1, S, T)))
    mask[1, :, 2] = -np.inf
    with evaluator.silence_numpy():
        (got,) = evaluator.evaluate_node("Attention", [q, k, v, mask], {"scale": 0.5}, opset=23)
    keys, values = (np.stack([x[:, h // 2] for h in range(H)], axis=1) for x in (k, v))
    scores = np.einsum("bhsd,bhtd->bhst", q, keys) * 0.5 + mask
    weights = np.exp(scores)
    weights[1, :, 2] = 0
    np.testing.assert_allclose(
        got, np.einsum("bhst,bhtd->bhsd", weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300), values)
    )
    for attrs, inputs in (({"is_causal": 1}, [q, k, v]), ({"softcap": 2.0}, [q, k, v]), ({}, [q, k, v, mask > 0])):
        with pytest.raises(evaluator.UnsupportedOp):
            evaluator.evaluate_node("Attention", inputs, {"scale": 0.5, **attrs}, opset=23)


# ------------------------------------------------------------------ whole models


class Block(nn.Module):
    """Self-attention as libraries write it, with keys and values for ``shared`` heads."""

    def __init__(self, shared: int = 4, masked: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.Linear(32, 32),
            nn.Linear(32, 8 * shared),
            nn.Linear(32, 8 * shared),
            nn.Linear(32, 32),
        )
        self.norm, self.masked = nn.LayerNorm(32), masked

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        n = 4 // k.shape[1]
        if n > 1:
            k, v = (t[:, :, None].expand(-1, -1, n, -1, -1).reshape(t.shape[0], 4, t.shape[2], 8) for t in (k, v))
        shown = mask.bool()[:, None, None, :] if self.masked else None
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown)
        y = self.norm(x + self.o(y.transpose(1, 2).flatten(2)))
        return y if self.masked else y * mask[..., None]


class Two(nn.Module):
    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.first, self.second = Block(**settings), Block(**settings)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, mask), mask)


@pytest.mark.parametrize("settings", [{}, {"masked": False}, {"shared": 2}], ids=["masked", "plain", "groups"])
def test_an_export_for_onnxruntime(settings: dict[str, object], tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Two(**settings).eval()
    options = {"inputs": ["x[batch,seq,32]", "mask:int64[batch,seq]"], "dims": ["batch=1:2:4", "seq=1:5:9"]}
    result = normdeploy.export(net, output=tmp_path / "x.onnx", runtime="onnxruntime", **options)
    made = ops(result.proto)
    assert made.count("Attention") == 2
    assert "Softmax" not in made
    assert made.count("ReduceMax") == (1 if settings.get("masked", True) else 0)
    assert "2 attentions as one node each" in " ".join(str(result).split())
    assert normdeploy.verify(net, tmp_path / "x.onnx", **options)
    plain = normdeploy.export(net, runtime="onnxruntime", opset=21, **options)
    assert "Attention" not in ops(plain.proto)
    assert "as one node each" not in str(plain)


def test_the_comparison_of_the_whole_model_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the kernel wrong, the file would keep its softmax, and the account would say so."""
    assert "Attention" in ops(normdeploy.optimize(graph(PLAIN), runtime="onnxruntime").proto)
    prove = certification._prove_rewrites
    # Each proof is that of a node with itself, so that the wrong kernel is accepted.
    monkeypatch.setattr(
        certification,
        "_prove_rewrites",
        lambda memo, rewrites, *rest: prove(
            {}, [certification.Rewrite(each.before, each.before) for each in rewrites], *rest
        ),
    )
    monkeypatch.setattr(attention_fusion, "RoundedFloat", lambda exact: RoundedFloat(exact * 2))
    result = normdeploy.optimize(graph(PLAIN), runtime="onnxruntime")
    assert "Attention" not in ops(result.proto)
    (finding,) = result.summary.findings
    assert (finding.kind, finding.status) == ("Attention", "undone")
