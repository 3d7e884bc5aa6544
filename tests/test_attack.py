"""The attack's own judge must see planted falsehoods and let true rewrites pass; its families must write valid
graphs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from benchmarks.attack.builder import Builder, Case
from benchmarks.attack.double import Evaluator
from benchmarks.attack.families import FAMILIES, generate
from benchmarks.attack.inputs import feeds
from benchmarks.attack.judge import judge, session
from benchmarks.attack.linears import statistics
from benchmarks.attack.norms import Spelling, norm

N = 6
EPS = 1e-5
GAMMA = np.linspace(0.5, 2, N)
BETA = np.linspace(-1, 1, N)
Wrong = Callable[[Builder, str], str]


def _case(
    build: Callable[[Builder], str], numbers: tuple[float, ...] = (), sizes: tuple[int, ...] = (), **marks: bool
) -> Case:
    """A case over x [d0, d1, N]; ``build`` writes the graph."""
    b = Builder(np.random.default_rng(0), opset=18)
    b.numbers = list(numbers)
    if sizes:
        b.sizes = {"d1": list(sizes)}
    b.input("x", ["d0", "d1", N])
    b.output(build(b), ["d0", "d1", N])
    for name, value in marks.items():
        setattr(b, name, value)
    return b.case("test", True)


def _by_hand(b: Builder) -> str:
    m = b.reduce("ReduceMean", "x", [-1])
    d = b.op("Sub", "x", m)
    v = b.reduce("ReduceMean", b.op("Mul", d, d), [-1])
    y = b.op("Div", d, b.op("Sqrt", b.op("Add", v, b.param(EPS))))
    return b.op("Add", b.op("Mul", y, b.param(GAMMA)), b.param(BETA))


def _node(b: Builder, x: str = "x", gamma: np.ndarray = GAMMA, eps: float = EPS) -> str:
    return b.op("LayerNormalization", x, b.param(gamma), b.param(BETA), axis=-1, epsilon=eps)


def _verdict(before: Case, after: Case, count: int = 30) -> str:
    """The kind of the first falsehood in ``count`` inputs."""
    return judge(before, after.model, np.random.default_rng(3), count).kind


def _equal_at(number: float) -> Wrong:
    return lambda b, x: b.op("Where", b.op("Equal", x, b.const(number)), b.const(0.0), x)


def _short_mask(b: Builder, x: str) -> str:
    r = b.op("Range", b.const(0, np.int64), b.size_of(x, 1), b.const(1, np.int64))
    return b.op("Where", b.op("Less", b.unsqueeze(r, 1), b.const(7, np.int64)), x, b.const(0.0))


WRONG: dict[str, tuple[Wrong, tuple[float, ...], tuple[int, ...]]] = {
    "zero at 7.25": (_equal_at(7.25), (7.25,), ()),
    "zero at -100": (_equal_at(-100.0), (100.0,), ()),
    "zero beyond 1e5": (lambda b, x: b.op("Where", b.op("Greater", x, b.const(1e5)), b.const(0.0), x), (1e5,), ()),
    "zero in a negative row": (
        lambda b, x: b.op("Where", b.op("Less", b.reduce("ReduceMax", x, [-1]), b.const(0.0)), b.const(0.0), x),
        (),
        (),
    ),
    "NaN to 0": (lambda b, x: b.op("Where", b.op("IsNaN", x), b.const(0.0), x), (), ()),
    "zero from row 7 on": (_short_mask, (), (6, 7, 8, 20)),
    "a cubic term": (lambda b, x: b.op("Add", x, b.op("Mul", b.op("Mul", x, x), b.const(1e-6))), (), ()),
}


def test_true_rewrite_passes() -> None:
    assert _verdict(_case(_by_hand, (7.25, 1e5)), _case(_node), 100) == ""


def test_noise_covers_rounding_of_float64() -> None:
    """E[x²] − E[x]² at mean/std = 1e5 loses ten digits of float64 itself: the bound must know, or right fusions are
    called false."""
    b = Builder(np.random.default_rng(0), opset=18, dtype=np.float64)
    b.output(
        norm(
            b,
            b.input("x", ["d0", N]),
            ["d0", N],
            Spelling((-1,), gamma=False, beta=False, variance="expect", eps=1e-12),
        )
    )
    evaluator = Evaluator(b.model(), noisy=True)
    rng = np.random.default_rng(1)
    x = 1e4 + 0.1 * rng.normal(size=(50, N))
    wide = x.astype(np.longdouble)
    d = wide - wide.mean(-1, keepdims=True)
    exact = d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-12)
    (seen,) = evaluator({"x": x})
    error = np.abs(seen - exact)
    moved = np.max([np.abs(evaluator({"x": x}, rng, 0.0)[0] - seen) for _ in range(4)], axis=0)
    assert error.max() > 1e-8
    assert (error <= 16 * moved).all()


@pytest.mark.parametrize("name", WRONG)
def test_judge_sees_another_function(name: str) -> None:
    wrong, numbers, sizes = WRONG[name]
    after = _case(lambda b: _node(b, wrong(b, "x")))
    kind = _verdict(_case(_by_hand, numbers, sizes), after)
    allowed = {
        "NaN to 0": ("hidden",),
        "zero beyond 1e5": ("hidden", "numbers"),
        "zero from row 7 on": ("hidden", "numbers"),
    }
    assert kind in allowed.get(name, ("numbers",))  # a NaN may fall where the wrong one writes zero


def test_judge_sees_parameters() -> None:
    before = _case(_by_hand)
    off = GAMMA.copy()
    off[2] *= 1 + 1e-5
    assert _verdict(before, _case(lambda b: _node(b, gamma=off))) == "numbers"
    assert _verdict(before, _case(lambda b: _node(b, gamma=GAMMA[::-1]))) == "numbers"
    assert _verdict(before, _case(lambda b: _node(b, eps=1.01e-5))) == "numbers"
    off[2] = np.float32(GAMMA[2]) * (1 + 2.0**-24)  # a rounding is no falsehood
    assert _verdict(before, _case(lambda b: _node(b, gamma=off))) == ""


def test_judge_sees_files_that_do_not_run() -> None:
    before = _case(_by_hand)
    unknown = _case(lambda b: b.op("NoSuchOp", _node(b), domain="nowhere"))
    assert _verdict(before, unknown) == "runs"
    fixed = _case(lambda b: b.op("Reshape", _node(b), b.ints(1, 2, N)))
    assert _verdict(before, fixed) == "runs"
    flat = _case(lambda b: b.op("Flatten", _node(b), axis=2))
    del flat.model.graph.output[0].type.tensor_type.shape.dim[2]
    assert _verdict(before, flat) == "runs"


def _affine(scale: float, folded: bool, wrong: float = 0.0) -> Case:
    """(x − mean)/std before a MatMul, with mean/std = ``scale``; ``folded`` into it, with one weight off by
    ``wrong``."""
    b = Builder(np.random.default_rng(1), opset=18)
    s = statistics(b, 4)
    std = np.sqrt(s.var).astype(np.float32)
    mean = (scale * std).astype(np.float32)
    w = b.rng.normal(size=(4, 3)).astype(np.float32)
    b.input("x", ["d0", 4], mean=mean, std=std)
    if folded:
        weight = w.astype(np.float64) / std.astype(np.float64)[:, None]
        shift = -(mean.astype(np.float64) @ weight)
        weight[1, 1] *= 1 + wrong
        y = b.op("Add", b.op("MatMul", "x", b.param(weight)), b.param(shift))
    else:
        y = b.op("MatMul", b.op("Div", b.op("Sub", "x", b.param(mean)), b.param(std)), b.param(w))
    b.output(y, ["d0", 3])
    b.fold = True
    return b.case("test", True)


def test_folds_are_judged_by_accuracy() -> None:
    assert _verdict(_affine(1, False), _affine(1, True), 60) == ""
    assert _verdict(_affine(1, False), _affine(1, True, 1e-5)) == "numbers"
    assert _verdict(_affine(1e4, False), _affine(1e4, True)) == "accuracy"


def test_overridden_default_is_used() -> None:
    """A parameter that is a graph input too: a rewrite that takes its default for a constant is false."""

    def build(folded: bool) -> Case:
        b = Builder(np.random.default_rng(2), opset=18)
        b.input("x", ["d0", N])
        gamma = numpy_helper.from_array(GAMMA.astype(np.float32), "w_gamma")
        b.constants.append(gamma)
        b.input("w_gamma", [N])
        b.output(b.op("Mul", "x", b.const(GAMMA) if folded else "w_gamma"), ["d0", N])
        return b.case("test", True)

    assert _verdict(build(False), build(True)) == "numbers"
    assert _verdict(build(False), build(False)) == ""


def test_spelled_norms_are_the_node() -> None:
    """Every spelling is a layer norm: else the honest half would be full of traps."""
    for variance in ("pow", "mul", "sumsq", "l2", "sum_shape", "times", "expect", "flax"):
        for inverse in ("div_sqrt", "recip_sqrt", "pow_minus", "div_pow", "sqrt_recip", "explog", "one_over"):
            s = Spelling((-1,), gamma=False, beta=False, variance=variance, inverse=inverse)
            before = _case(lambda b, s=s: norm(b, "x", ["d0", "d1", N], s))  # type: ignore[misc]
            after = _case(lambda b: b.op("LayerNormalization", "x", b.const(np.ones(N)), axis=-1, epsilon=EPS))
            assert _verdict(before, after, 6) == "", (variance, inverse)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_writes_valid_graphs(name: str) -> None:
    ran = 0
    for index in range(6):
        case = generate(17, index, (name,))
        assert case.model == generate(17, index, (name,)).model
        if not any(
            n.op_type == "SimplifiedLayerNormalization" for n in case.model.graph.node
        ):  # onnxruntime's, unknown to onnx
            onnx.checker.check_model(case.model, full_check=True)
        before = session(case.model)
        for _, feed in feeds(case, np.random.default_rng(index), 3):
            try:
                before.run(None, feed)
                ran += 1
            except Exception:  # some sizes do not broadcast, and are not meant to
                continue
    assert ran >= 9


def test_first_input_is_ordinary() -> None:
    case = generate(1, 0)
    kinds = [kind for kind, _ in feeds(case, np.random.default_rng(0), 4)]
    assert kinds[0] == "normal"
    assert {"nan", "inf"} <= set(kinds)
