"""Rounding by the error of the products beside rounding to the nearest, on inputs that it did not see; biases; what
verify says of such files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import normdeploy
from normdeploy.errors import InputError
from normdeploy.exporting.exporter import export_to_proto
from normdeploy.quantization.gptq import DAMPING, factor_feedback, round_with_feedback, shrink_scales
from normdeploy.quantization.hessian import SecondMoments
from normdeploy.quantization.number_formats import (
    FP8,
    INT4,
    INT8,
    CodeFormat,
    broadcast_scales,
    quantize_to_codes,
    weight_scales,
)
from normdeploy.quantization.quantizer import quantize_model
from normdeploy.quantization.sample_split import split_samples
from normdeploy.verbs.verify.file_comparison import compare_files
from normdeploy.verbs.verify.quantization_budget import ROUNDED, UNROUNDED
from tests import quantized_files as files
from tests.half_graphs import text
from tests.quantization.test_quantizer import BODY, SPECS, WEIGHTS, WIDTH, X, quantized_layers, wish
from tests.verbs.verify.test_verify_quantized import WRONG, verdicts

CHANNELS, OUTPUTS, RANK = 64, 24, 12


def inputs(seed: int, rows: int = 1024) -> np.ndarray:
    """Rows whose channels hang together, as those of activations do; float32 [rows, CHANNELS]."""
    mix = np.random.default_rng(0).standard_normal((RANK, CHANNELS))
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, RANK)) @ mix + 0.1 * rng.standard_normal((rows, CHANNELS))).astype(np.float32)


def weight() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((CHANNELS, OUTPUTS)).astype(np.float32)


def moments(x: np.ndarray) -> SecondMoments:
    held = SecondMoments(x[None, :10].mean(1))
    for part in np.array_split(x, 7):
        held.accumulate(part[None], None)
    return held


def test_moments_are_those_of_all_rows_at_once() -> None:
    x = inputs(2) + np.float32(100)  # float32 alone would lose two digits of what lies around the mean
    exact = x.T.astype(np.float64) @ x / len(x)
    np.testing.assert_allclose(moments(x).hessian()[0], exact, rtol=1e-6)


def test_the_order_and_the_factors_are_those_of_h() -> None:
    """(I + U)·D·(I + U)ᵀ is H with its diagonal raised, rows in the order of the diagonal."""
    h = moments(inputs(2)).hessian()[0]
    made = factor_feedback(h, 0.1)
    assert made is not None
    order, unit = made
    assert (np.diff(np.diag(h)[order]) <= 0).all()
    assert np.array_equal(np.triu(unit), unit)
    raised = h[np.ix_(order, order)] + 0.1 * np.diag(h).mean() * np.eye(len(h))
    d = np.linalg.inv(unit) @ raised @ np.linalg.inv(unit).T
    assert np.abs(d - np.diag(np.diag(d))).max() < 1e-5 * np.diag(d).max()  # float32
    assert factor_feedback(np.full((4, 4), np.nan), 0.1) is None


@pytest.mark.parametrize("form", [INT8, INT4, FP8], ids=lambda form: form.name)
def test_products_are_nearer_on_inputs_that_it_did_not_see(form: CodeFormat) -> None:
    w, unseen = weight(), inputs(3).astype(np.float64)
    scales = np.broadcast_to(broadcast_scales(weight_scales(w, 1, form), w.shape, 1), w.shape)
    feedback = factor_feedback(moments(inputs(2)).hessian()[0], DAMPING[False])
    assert feedback is not None

    def error(q: np.ndarray) -> float:
        off = unseen @ (q.astype(np.float64) * scales - w)
        return float(np.sqrt(np.mean(off**2)))

    assert error(round_with_feedback(w, scales, feedback, form)) < 0.6 * error(quantize_to_codes(w, scales, form))


def test_independent_inputs_leave_rounding_as_it_is() -> None:
    """Where H is diagonal no weight can make up for another."""
    w = weight()
    scales = np.broadcast_to(broadcast_scales(weight_scales(w, 1, INT8), w.shape, 1), w.shape)
    feedback = factor_feedback(np.diag(np.arange(1.0, CHANNELS + 1)), DAMPING[False])
    assert feedback is not None
    np.testing.assert_array_equal(round_with_feedback(w, scales, feedback, INT8), quantize_to_codes(w, scales, INT8))


def test_scales_of_blocks_shrink_where_that_is_nearer() -> None:
    w, h = weight(), np.full(CHANNELS, 1.0)
    plain = weight_scales(w, 0, INT4, 32)
    made = shrink_scales(w, h, 0, INT4, 32)
    assert (made <= plain).all()
    assert (made < plain).any()

    def errors(scales: np.ndarray) -> np.ndarray:
        wide = broadcast_scales(scales, w.shape, 0, 32)
        off = (quantize_to_codes(w, wide, INT4).astype(np.float32) * wide - w) ** 2
        return off.reshape(2, 32, -1).sum(1)

    assert (errors(made) <= errors(plain)).all()
    np.testing.assert_array_equal(shrink_scales(w, h, 1, INT8, 0), weight_scales(w, 1, INT8))


def test_the_account_and_the_bias_that_stays() -> None:
    """`verify` holds it against the model's."""
    proto = text("m = MatMul(x, w1) y = Add(m, b1)", f"float[b,{WIDTH}] x", "float[b,128] y", **WEIGHTS)
    made, account = quantize_model(proto, wish(), split_samples([{"x": X + np.float32(2)}], SPECS))
    (layer,) = account.layers
    assert layer.rounding == "GPTQ"
    kept = next(numpy_helper.to_array(t) for t in made.graph.initializer if t.name == "b1")
    np.testing.assert_array_equal(kept, WEIGHTS["b1"].astype(np.float32))


def test_few_rows_round_to_the_nearest() -> None:
    proto = text(BODY, f"float[b,{WIDTH}] x", f"float[b,{WIDTH}] y", **WEIGHTS)
    _, account = quantize_model(proto, wish(), split_samples([{"x": X[:8]}], SPECS))
    assert [layer.rounding for layer in account.layers] == ["nearest"] * 2


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, model = tmp_path_factory.mktemp("ours"), files.net()
    onnx.save(export_to_proto(model), folder / "float32.onnx")
    samples = np.concatenate([feeds["x"] for feeds in files.samples(model, 40)])
    normdeploy.optimize(folder / "float32.onnx", folder / "int8.onnx", quantize="int8", calibrate=[{"x": samples}])
    return folder / "int8.onnx"


def test_verify_passes_a_file_of_ours(ours: Path) -> None:
    model = files.net()
    told = compare_files(model, ours, inputs=files.samples(model, 20)[::2])
    assert told, str(told)
    assert {UNROUNDED, ROUNDED} <= set(verdicts(told))


# a zero point on a layer behind a norm without gamma and beta adds a multiple of the channels' sum, which is zero
@pytest.mark.parametrize("fault", [f for f in WRONG if f.__name__ != "weight_zero_point"], ids=lambda f: f.__name__)
def test_verify_sees_a_fault_in_a_file_of_ours(fault: object, ours: Path) -> None:
    model = files.net()
    path = files.edited(ours, "wrong.onnx", fault)  # type: ignore[arg-type]
    assert verdicts(compare_files(model, path, inputs=files.samples(model, 20)[::2]))[UNROUNDED] == "fail"


def test_layers_that_are_named_stay_float() -> None:
    proto = text(BODY, f"float[b,{WIDTH}] x", f"float[b,{WIDTH}] y", **WEIGHTS)
    halves = split_samples([{"x": X}], SPECS)
    made, account = quantize_model(proto, wish(keep_float=("q",)), halves)
    assert quantized_layers(account) == ["a"]
    assert next(layer.reason for layer in account.layers if layer.tensor == "q") == "it was asked to stay float (q)"
    assert [n.op_type for n in made.graph.node].count("QuantizeLinear") == 1
    with pytest.raises(
        InputError, match=r"no linear layer is named 'z', .* of 2 layers the nearest are '[aq]', '[aq]'"
    ):
        quantize_model(proto, wish(keep_float=("a", "z")), halves)
    with pytest.raises(InputError, match="nothing in the model can be quantized to int8: 'a': it was asked to stay"):
        quantize_model(proto, wish(keep_float=("?",)), halves)
