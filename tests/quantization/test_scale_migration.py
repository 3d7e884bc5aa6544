"""Migrations: the same function in float64 at any input, no more nodes than are needed, and refusals with a reason."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from normdeploy.findings.quantization_report import Migration
from normdeploy.quantization.scale_migration import InputCondition, migrate_scales
from normdeploy.runtimes.onnx_float64 import OnnxFloat64Runner
from tests.half_graphs import text

RNG = np.random.default_rng(5)
GAMMA, BETA = RNG.uniform(-3, 3, 8), RNG.uniform(-2, 2, 8)
W, B = RNG.standard_normal((8, 5)), RNG.standard_normal(5)
SHAPE = {"inputs": "float[b,3,8] x", "outputs": "float[b,3,5] y"}
NORM = "n = LayerNormalization <axis=-1> (x, gamma, beta) "


def same(before: onnx.ModelProto, after: onnx.ModelProto, name: str = "x") -> None:
    """Equal in float64 but for the rounding of the constants to float32."""
    onnx.checker.check_model(after, full_check=True)
    runners = [OnnxFloat64Runner(before), OnnxFloat64Runner(after)]
    width = before.graph.input[0].type.tensor_type.shape.dim
    for rows in (1, 4):
        shape = [d.dim_value or rows for d in width]
        for scale, shift in ((1.0, 0.0), (1e-3, 0.0), (50.0, 300.0)):
            x = (np.random.default_rng(rows).standard_normal(shape) * scale + shift).astype(np.float32)
            a, b = (runner.infer({name: x}) for runner in runners)
            for key in a:
                # each constant is rounded once to 24 bits; a product of 8 terms of about one adds 8 of these
                bound = 32 * 2.0**-24 * (1 + np.abs(a[key]).max())
                assert np.abs(a[key] - b[key]).max() <= bound, key


def ops(proto: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in proto.graph.node]


def made(migrations: tuple[Migration, ...]) -> list[str]:
    assert all(m.certificate is not None and m.certificate.method == "exact" for m in migrations if m.status == "made")
    return [m.kind for m in migrations if m.status == "made"]


def test_gamma_and_beta_go_into_every_layer_behind() -> None:
    body = NORM + "a = MatMul(n, w) b = MatMul(n, w2) c = Add(a, bias) y = Add(b, c)"
    proto = text(body, **SHAPE, gamma=GAMMA, beta=BETA, w=W, w2=W[::-1] * 2, bias=B)
    after, migrations = migrate_scales(proto)
    assert made(migrations) == ["gamma and beta"] * 2
    same(proto, after)
    norm = next(n for n in after.graph.node if n.op_type == "LayerNormalization")
    assert len(norm.input) == 2  # no beta
    scale = next(t for t in after.graph.initializer if t.name == norm.input[1])
    assert (onnx.numpy_helper.to_array(scale) == 1).all()
    assert "Mul" not in ops(after)  # nobody else reads the norm


@pytest.mark.parametrize("who", ["residual", "output"])
def test_who_else_reads_the_norm_reads_what_it_read(who: str) -> None:
    body = NORM + "m = MatMul(n, w) "
    outputs = "float[b,3,8] y"
    if who == "residual":
        body += "y = Add(m, n)"
    else:
        body, outputs = (
            body.replace("m = ", "y = ").replace("n = ", "k = ").replace("(n,", "(k,"),
            ("float[b,3,8] y, float[b,3,8] k"),
        )
    proto = text(
        body, "float[b,3,8] x", outputs, gamma=GAMMA, beta=BETA, w=np.random.default_rng(2).standard_normal((8, 8))
    )
    after, migrations = migrate_scales(proto)
    assert made(migrations) == ["gamma and beta"]
    assert ops(after).count("Mul") == 1  # (n/s)·(γ·s) on the other path
    same(proto, after)


def test_a_condition_is_written_into_the_norm() -> None:
    s = np.exp2(np.random.default_rng(1).integers(-4, 1, 8)).astype(float)
    proto = text(NORM + "y = MatMul(n, w)", **SHAPE, gamma=GAMMA, beta=BETA, w=W)
    after, migrations = migrate_scales(proto, {"n": InputCondition(s, None, "smooth", 0.5)})
    assert [(m.kind, m.alpha) for m in migrations] == [("smooth", 0.5)]
    assert made(migrations) == ["smooth"]
    same(proto, after)
    norm = next(n for n in after.graph.node if n.op_type == "LayerNormalization")
    scale = next(t for t in after.graph.initializer if t.name == norm.input[1])
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(scale), 1 / s)


@pytest.mark.parametrize("shift", [None, RNG.standard_normal(8)], ids=["scale", "scale and shift"])
def test_behind_no_norm_a_condition_is_two_ops_at_most(shift: np.ndarray | None) -> None:
    s = np.exp2(np.random.default_rng(1).integers(-4, 1, 8)).astype(float)
    proto = text("t = Tanh(x) m = MatMul(t, w) y = Add(m, bias)", **SHAPE, w=W, bias=B)
    after, migrations = migrate_scales(proto, {"t": InputCondition(s, shift)})
    assert made(migrations) == ["smooth"]
    assert ops(after) == ["Tanh", *(["Sub"] if shift is not None else []), "Div", "MatMul", "Add"]
    same(proto, after)


def test_a_condition_for_nobody_changes_nothing() -> None:
    proto = text("t = Tanh(x) y = MatMul(t, w)", **SHAPE, w=W)
    after, migrations = migrate_scales(proto, {"other": InputCondition(np.full(8, 0.5))})
    assert migrations == ()
    assert ops(after) == ops(proto)


def test_scales_of_a_batch_norm_go_through_views_into_a_layer() -> None:
    body = (
        "h = BatchNormalization(x, gamma, beta, mean, var) t = Transpose<perm=[0, 2, 1]>(h) m = MatMul(t, w) "
        "y = Add(m, bias)"
    )
    proto = text(body, "float[b,8,3] x", "float[b,3,5] y", gamma=GAMMA, beta=BETA, mean=BETA, var=GAMMA**2, w=W, bias=B)
    after, migrations = migrate_scales(proto)
    assert made(migrations) == ["gamma and beta"]
    assert "BatchNormalization" not in ops(after)
    same(proto, after)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (NORM.replace("(x, gamma, beta)", "(x, g, beta)").replace("n =", "g = Relu(gamma_in) n ="), "not constant"),
    ],
)
def test_what_is_no_constant_is_refused(body: str, why: str) -> None:
    proto = text(body + "y = MatMul(n, w)", "float[b,3,8] x, float[8] gamma_in", "float[b,3,5] y", beta=BETA, w=W)
    after, migrations = migrate_scales(proto)
    assert [m.status for m in migrations] == ["refused"]
    assert why in migrations[0].reason
    assert ops(after) == ops(proto)


def test_a_padded_convolution_does_not_take_the_shift() -> None:
    body = "h = BatchNormalization(x, gamma, beta, mean, var) r = Identity(h) y = Conv<pads=[1, 1, 1, 1]>(r, k)"
    proto = text(
        body,
        "float[b,8,4,4] x",
        "float[b,2,4,4] y",
        gamma=GAMMA,
        beta=BETA,
        mean=BETA,
        var=GAMMA**2,
        k=np.random.default_rng(3).standard_normal((2, 8, 3, 3)),
    )
    after, migrations = migrate_scales(proto)
    assert [m.status for m in migrations] == ["refused"]
    assert "pads" in migrations[0].reason
    same(proto, after)


def test_a_weight_of_two_layers_is_taken_by_each() -> None:
    """A tied weight: one layer behind a norm, one that reads the model's input."""
    proto = text(NORM + "a = MatMul(n, w) b = MatMul(x, w) y = Add(a, b)", **SHAPE, gamma=GAMMA, beta=BETA, w=W)
    after, migrations = migrate_scales(proto)
    assert made(migrations) == ["gamma and beta"]
    same(proto, after)


def test_gammas_of_zero_are_migrated() -> None:
    gamma = GAMMA.copy()
    gamma[[1, 4]] = 0.0
    proto = text(NORM + "m = MatMul(n, w) y = Add(m, bias)", **SHAPE, gamma=gamma, beta=BETA, w=W, bias=B)
    after, migrations = migrate_scales(proto)
    assert made(migrations) == ["gamma and beta"]
    same(proto, after)


def test_half_precision_is_left_alone() -> None:
    proto = text(
        NORM + "y = MatMul(n, w)",
        "float16[b,3,8] x",
        "float16[b,3,5] y",
        gamma=GAMMA.astype(np.float16),
        beta=BETA.astype(np.float16),
        w=W.astype(np.float16),
    )
    after, migrations = migrate_scales(proto)
    assert migrations == ()
    assert ops(after) == ops(proto)


def test_factors_for_another_number_of_channels_are_refused() -> None:
    proto = text(NORM + "y = MatMul(n, w)", **SHAPE, gamma=GAMMA, beta=BETA, w=W)
    for body in (proto, text("n = Tanh(x) y = MatMul(n, w)", **SHAPE, w=W)):
        after, migrations = migrate_scales(body, {"n": InputCondition(np.full(5, 0.5))})
        assert [m.status for m in migrations] == ["refused"]
        assert "5 factors were passed for the 8" in migrations[0].reason
        assert ops(after) == ops(body)


def test_a_stack_of_weights_is_refused() -> None:
    stack = np.random.default_rng(4).standard_normal((3, 8, 5))
    proto = text(NORM + "y = MatMul(n, w)", "float[3,2,8] x", "float[3,2,5] y", gamma=GAMMA, beta=BETA, w=stack)
    after, migrations = migrate_scales(proto)
    assert [m.status for m in migrations] == ["refused"]
    assert "a stack of weights" in migrations[0].reason
    same(proto, after)


def test_a_norm_over_several_axes_is_refused() -> None:
    proto = text("n = LayerNormalization <axis=1> (x, gamma) y = MatMul(n, w)", **SHAPE, gamma=GAMMA, w=W)
    after, migrations = migrate_scales(proto)
    assert [m.status for m in migrations] == ["refused"]
    assert "several axes" in migrations[0].reason
    assert ops(after) == ops(proto)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_scale_into_a_transposed_convolution(groups: int) -> None:
    """Its shift can't be taken, nor is there one here."""
    body = f"h = BatchNormalization(x, gamma, zero, zero, var) y = ConvTranspose<group={groups}>(h, k, bias)"
    rng = np.random.default_rng(6)
    proto = text(
        body,
        "float[b,8,4,4] x",
        f"float[b,{2 * groups},6,6] y",
        gamma=GAMMA,
        zero=np.zeros(8),
        var=GAMMA**2 + 1,
        k=rng.standard_normal((8, 2, 3, 3)),
        bias=rng.standard_normal(2 * groups),
    )
    after, migrations = migrate_scales(proto)
    assert made(migrations) == ["gamma and beta"]
    assert "BatchNormalization" not in ops(after)
    same(proto, after)


def test_nothing_is_moved_for_layers_that_stay_float() -> None:
    body = NORM + "a = MatMul(n, w) b = MatMul(n, w2) y = Add(a, b)"
    proto = text(body, **SHAPE, gamma=GAMMA, beta=BETA, w=W, w2=W[::-1] * 2)
    after, migrations = migrate_scales(proto, idle={"a", "b"})
    assert migrations == ()
    assert ops(after) == ops(proto)
    after, migrations = migrate_scales(proto, idle={"a"})  # the other one wants it
    assert made(migrations) == ["gamma and beta"] * 2
    same(proto, after)


@pytest.mark.parametrize("conditioned", [False, True])
def test_a_norm_of_which_no_layer_takes_anything_is_one_node_again(conditioned: bool, rng: np.random.Generator) -> None:
    """A convolution that pads can't take beta; the norm then stays as it was, its constants too."""
    body = NORM + "t = Transpose<perm=[0, 3, 1, 2]>(n) y = Conv<pads=[1, 1, 1, 1]>(t, k)"
    proto = text(
        body,
        "float[b,5,5,8] x",
        "float[b,4,5,5] y",
        gamma=GAMMA,
        beta=BETA,
        k=rng.standard_normal((4, 8, 3, 3)),
    )
    conditions = {"n": InputCondition(np.exp2(np.arange(8) % 3 - 1.0))} if conditioned else {}
    after, migrations = migrate_scales(proto, conditions)
    assert [m.status for m in migrations] == ["refused"]
    assert "pads its input with zeros" in migrations[0].reason
    assert ops(after) == ops(proto)
    norm = next(n for n in after.graph.node if n.op_type == "LayerNormalization")
    assert [*norm.input] == ["x", "gamma", "beta"]
    same(proto, after)


def test_a_norm_that_stays_whole_keeps_the_gamma_of_a_constant_node(rng: np.random.Generator) -> None:
    """The node is gone once the norm is split, and nothing made the restored norm's gamma."""
    values = ", ".join(f"{v:.3f}" for v in GAMMA)
    proto = text(
        f"g = Constant<value = float[8] {{{values}}}>() n = RMSNormalization(x, g) y = MatMul(w, n)",
        "float[5,8] x",
        "float[3,8] y",
        opset=23,
        w=rng.standard_normal((3, 5)),
    )
    after, migrations = migrate_scales(proto)
    assert [m.status for m in migrations] == ["refused"]
    assert ops(after) == ["RMSNormalization", "MatMul"]
    same(proto, after)


def test_a_norm_of_which_one_layer_takes_its_part_stays_split(rng: np.random.Generator) -> None:
    body = NORM + "m = MatMul(n, w) t = Transpose<perm=[0, 3, 1, 2]>(n) y = Conv<pads=[1, 1, 1, 1]>(t, k)"
    proto = text(
        body,
        "float[b,5,5,8] x",
        "float[b,4,5,5] y, float[b,5,5,5] m",
        gamma=GAMMA,
        beta=BETA,
        w=W,
        k=rng.standard_normal((4, 8, 3, 3)),
    )
    after, migrations = migrate_scales(proto)
    assert sorted(m.status for m in migrations) == ["made", "refused"]
    assert {"Mul", "Add"} <= set(ops(after))
    same(proto, after)


def test_a_shape_alone_keeps_no_gamma_and_beta() -> None:
    """Who asks for the norm's shape asks for that of what is left of it."""
    body = NORM + "r = Reshape(n, two) m = MatMul(r, w) s = Shape<end=2>(n) five = Constant<value_ints=[5]>()"
    body += " t = Concat<axis=0>(s, five) y = Reshape(m, t)"
    proto = text(body, **SHAPE, gamma=GAMMA, beta=BETA, w=W, two=np.array([-1, 8]))
    after, migrations = migrate_scales(proto)
    assert made(migrations) == ["gamma and beta"]
    assert "Mul" not in ops(after)
    same(proto, after)


def test_layers_behind_one_view_read_one_view() -> None:
    body = NORM + "r = Reshape(n, two) a = MatMul(r, w) b = MatMul(r, w2) y = Add(a, b)"
    proto = text(
        body, "float[b,3,8] x", "float[r,5] y", gamma=GAMMA, beta=BETA, w=W, w2=W[::-1] * 2, two=np.array([-1, 8])
    )
    after, migrations = migrate_scales(proto)
    assert made(migrations) == ["gamma and beta"] * 2
    assert ops(after).count("Reshape") == 1
    same(proto, after)
