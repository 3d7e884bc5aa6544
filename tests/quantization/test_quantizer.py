"""Whole models quantized: what is near enough, what stays float and why, and what is refused."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from rich.console import Console

from normdeploy.compare.metrics import cosine
from normdeploy.compare.policy import parse_policy
from normdeploy.errors import InputError
from normdeploy.findings.quantization_report import QuantizationReport
from normdeploy.findings.quantization_tables import quantization_summary
from normdeploy.graphs.graph import Graph
from normdeploy.graphs.quantization_info import RECORD
from normdeploy.model import Dim, InputSpec
from normdeploy.quantization import accuracy
from normdeploy.quantization.accuracy import lower_share_bound
from normdeploy.quantization.activation_stats import observe_activations
from normdeploy.quantization.layer_groups import find_candidates
from normdeploy.quantization.number_formats import INT8, step_for_range
from normdeploy.quantization.qdq_writer import write_quantized
from normdeploy.quantization.quantization_request import QuantizationRequest
from normdeploy.quantization.quantizer import quantize_model
from normdeploy.quantization.sample_split import SampleSplit, split_samples
from normdeploy.runtimes.onnx_float64 import OnnxFloat64Runner
from normdeploy.storage.proto_traversal import metadata_text
from normdeploy.verbs.verify.reference_models import FileModel
from normdeploy.verbs.verify.weight_audit import audit_weights
from normdeploy.verbs.verify.weight_origin import WeightOrigin, are_smoothing_factors
from tests.half_graphs import text
from tests.support import run_onnxruntime

RNG = np.random.default_rng(11)
WIDTH = 64
SPECS = [InputSpec("x", "float32", (Dim("b", 1, 8, 64), Dim.from_size(WIDTH)))]
X = (RNG.standard_normal((64, WIDTH)) * np.exp(RNG.standard_normal(WIDTH))).astype(np.float32)
GAMMA = np.where(np.arange(WIDTH) % 16 == 0, 40.0, 0.5) * RNG.uniform(0.5, 1.5, WIDTH)  # some channels stand out
WEIGHTS: dict[str, Any] = {
    "gamma": GAMMA,
    "beta": RNG.standard_normal(WIDTH) * GAMMA,
    "w1": RNG.standard_normal((WIDTH, 128)) / np.maximum(GAMMA, 1)[:, None] / 8,
    "b1": RNG.standard_normal(128) / 4,
    "w2": RNG.standard_normal((128, WIDTH)) / 11,
    "b2": RNG.standard_normal(WIDTH) / 4,
    "one": np.ones(WIDTH),
    "zero": np.zeros(WIDTH),
}
BODY = (
    "n = LayerNormalization(x, gamma, beta) m = MatMul(n, w1) a = Add(m, b1) h = Relu(a) p = MatMul(h, w2)"
    " q = Add(p, b2) r = Add(q, n) y = LayerNormalization(r, one, zero)"
)


@pytest.fixture(scope="module")
def block() -> onnx.ModelProto:
    """A block of an encoder: norm, two layers, the residual that reads the norm too, norm."""
    return text(BODY, f"float[b,{WIDTH}] x", f"float[b,{WIDTH}] y", **WEIGHTS)


@pytest.fixture(scope="module")
def halves() -> SampleSplit:
    return split_samples([{"x": X}], SPECS)


def wish(to: str = "int8", runtime: str = "any", metric: str | None = None, **more: Any) -> QuantizationRequest:
    return QuantizationRequest(to, runtime, policy=parse_policy(None, metric), **more)


def worst(proto: onnx.ModelProto, made: onnx.ModelProto, x: np.ndarray = X) -> float:
    """The least cosine of a sample, beside float64."""
    right = OnnxFloat64Runner(proto).infer({"x": x})["y"]
    (value,) = run_onnxruntime(made, {"x": x})
    return min(cosine(a, b) for a, b in zip(value, right, strict=True))


def quantized_layers(account: QuantizationReport) -> list[str]:
    return [layer.tensor for layer in account.layers if layer.status == "quantized"]


@pytest.mark.parametrize(
    ("to", "runtime", "least"),
    # a step of 1/127 of the range is some 0.5 % of a typical value; E4M3 has steps of up to 6 %, INT4 of up to 14 %
    [("int8", "any", 0.999), ("int8", "onnxruntime", 0.999), ("fp8", "tensorrt", 0.995), ("int4", "any", 0.98)],
)
def test_each_kind_is_near_the_model(
    block: onnx.ModelProto, halves: SampleSplit, to: str, runtime: str, least: float
) -> None:
    made, account = quantize_model(block, wish(to, runtime, "cosine>=0.9"), halves)
    assert quantized_layers(account) == ["a", "q"]
    assert json.loads(metadata_text(made, RECORD))["to"] == to
    assert worst(block, made) >= least
    assert account.judged[0].met
    assert account.calibrated == account.judging == 32
    assert account.bytes[1] < account.bytes[0] / 2


def test_moving_gamma_is_what_makes_it_good(block: onnx.ModelProto, halves: SampleSplit) -> None:
    """Beside the same layers with one scale for all channels that gamma and beta have spread."""
    made, account = quantize_model(block, wish(), halves)
    assert {m.status for m in account.migrations} == {"made"}
    layers = find_candidates(Graph(block), INT8)
    seen = observe_activations(block, {c.input: c.axis for c in layers}, halves.calibrating)
    ends = {name: (float(s.low.min()), float(s.high.max())) for name, s in seen.items()}
    plain = write_quantized(
        block, {c.plan.tensor: replace(c.plan, step=step_for_range(*ends[c.input], INT8)) for c in layers}
    )
    assert 1 - worst(block, made) < (1 - worst(block, plain)) / 4


def test_the_residual_reads_float(block: onnx.ModelProto, halves: SampleSplit) -> None:
    made, _ = quantize_model(block, wish(), halves)
    makers = {o: n.op_type for n in made.graph.node for o in n.output}
    readers = {i: n.op_type for n in made.graph.node for i in n.input}
    assert all(readers[o] == "MatMul" for n in made.graph.node if n.op_type == "DequantizeLinear" for o in n.output)
    residual = next(n for n in made.graph.node if n.output[0] == "r")
    assert "DequantizeLinear" not in {makers.get(i) for i in residual.input}


def test_forms_of_the_runtimes(block: onnx.ModelProto, halves: SampleSplit) -> None:
    """uint8 with a zero point for onnxruntime, symmetric int8 for TensorRT, a scale for each output channel."""
    for runtime, kind in (("onnxruntime", onnx.TensorProto.UINT8), ("tensorrt", onnx.TensorProto.INT8)):
        made, account = quantize_model(block, wish(runtime=runtime), halves)
        constants = {t.name: t for t in made.graph.initializer}
        pairs = [n for n in made.graph.node if n.op_type == "QuantizeLinear"]
        assert len(pairs) == 2
        assert {constants[n.input[2]].data_type for n in pairs} == {kind}
        if runtime == "tensorrt":
            assert not any(np.any(onnx.numpy_helper.to_array(constants[n.input[2]])) for n in pairs)
        weights = [n for n in made.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in constants]
        assert [list(constants[n.input[1]].dims) for n in weights] == [[128], [WIDTH]]
        # what a Relu gives begins at zero anyway
        assert [layer.zero_point == 0 for layer in account.layers] == [runtime == "tensorrt", True]


def test_the_layer_that_costs_most_stays_float(halves: SampleSplit) -> None:
    """A weight of 90 in each channel, for a hidden unit that is never on: one scale leaves nothing of the others.

    (Behind no norm onnxruntime's form takes no factors; TensorRT's does, and saves the layer.)
    """
    b1, w2 = WEIGHTS["b1"].copy(), WEIGHTS["w2"].copy()
    b1[7], w2[7] = -1000.0, 90.0
    proto = text(BODY, f"float[b,{WIDTH}] x", f"float[b,{WIDTH}] y", **{**WEIGHTS, "b1": b1, "w2": w2})
    _, account = quantize_model(proto, wish(runtime="onnxruntime", metric="cosine>=0.9995"), halves)
    assert quantized_layers(account) == ["a"]
    assert next(layer for layer in account.layers if layer.tensor == "q").reason.startswith("its error exceeds")
    (step,) = account.exclusions
    assert step.tensors == ("q",)
    assert step.before < 0.9995 <= step.after
    errors = {layer.tensor: layer.error or 0.0 for layer in account.layers}
    assert errors["q"] > 10 * errors["a"] > 0
    _, smoothed = quantize_model(proto, wish(metric="cosine>=0.9995"), halves)
    assert quantized_layers(smoothed) == ["a", "q"]


def test_a_share_of_few_samples_is_told_what_it_can_not_tell(block: onnx.ModelProto, halves: SampleSplit) -> None:
    """32 rows that all agree: of 0.95 of all there are, three in ten draws of 32 have none that disagrees."""
    _, account = quantize_model(block, wish(metric="nearest>=0.6"), halves)
    (judged,) = account.judged
    assert (judged.samples, judged.met) == (32, True)
    assert not any("may be" in note for note in account.notes)
    _, account = quantize_model(block, wish(metric="nearest>=0.95"), halves)
    (note,) = (note for note in account.notes if "may be" in note)
    assert "on 32 rows of the judging samples" in note
    assert "the threshold is 0.95, which needs at least 52 rows to confirm" in note
    _, account = quantize_model(block, wish(metric="cosine>=0.95"), halves)
    assert account.judged[0].samples == 0
    assert not any("may be" in note for note in account.notes)


def test_wilsons_interval() -> None:
    """Its end solves (p̂ − p)² = z² p (1 − p) / n, from which the formula is."""
    for agreeing, rows in ((81, 263), (15, 148), (0, 20), (29, 29)):
        share, least = agreeing / rows, lower_share_bound(agreeing / rows, rows)
        assert (share - least) ** 2 == pytest.approx(1.6449**2 * least * (1 - least) / rows, abs=1e-12)
        assert least <= share


def test_how_far_outputs_move_is_told_without_a_metric(block: onnx.ModelProto, halves: SampleSplit) -> None:
    made, account = quantize_model(block, wish(), halves)
    right = np.concatenate([OnnxFloat64Runner(block).infer(s)["y"] for s in halves.judging])
    value = np.concatenate([run_onnxruntime(made, s)[0] for s in halves.judging])
    (moved,) = account.moved
    assert moved.output == "y"
    assert moved.error == pytest.approx(np.linalg.norm(value - right) / np.linalg.norm(right), rel=1e-3)
    assert moved.float32 < 1e-6
    assert not any("--metric" in note for note in account.notes)
    printed = io.StringIO()
    Console(width=120, file=printed).print(quantization_summary(account))
    assert f"y: relative error {moved.error:.2g}, cosine {moved.cosine:.6g}" in printed.getvalue()


@pytest.mark.parametrize(("value", "error", "cosine"), [(0.0, 1, 0), (0.8, 0.2, 1), (np.nan, np.nan, np.nan)])
def test_an_output_that_is_far_off_is_noted(value: float, error: float, cosine: float) -> None:
    right = [{"y": np.ones((4, 3), np.float32)}, {"y": np.ones((2, 3), np.float32)}]
    samples = [{"x": np.ones((4, 1))}, {"x": np.ones((2, 1))}]
    judging = accuracy.AccuracyJudge(samples, right, parse_policy(None, None), False)
    (moved,) = judging.measure_drift([{"y": value * r["y"]} for r in right], right)
    assert (moved.error, moved.cosine) == pytest.approx((error, cosine), nan_ok=True, abs=1e-6)
    assert moved.float32 == 0
    (note,) = accuracy.drift_notes([moved])
    assert "pass --metric" in note
    assert accuracy.drift_notes([replace(moved, error=0.1)]) == []


def test_masked_outputs_and_such_of_other_shapes_are_compared() -> None:
    masked = np.array([[1.0, -np.inf, np.nan], [2.0, 3.0, np.inf]], np.float32)
    judging = accuracy.AccuracyJudge([{"x": np.ones((2, 1))}], [{"y": masked}], parse_policy(None, None), False)
    (moved,) = judging.measure_drift([{"y": masked}], [{"y": masked}])
    assert (moved.error, moved.cosine) == (0, 1)
    for other in (masked[:1], np.where(np.isinf(masked), 0, masked)):
        (moved,) = judging.measure_drift([{"y": other}], [{"y": masked}])
        (note,) = accuracy.drift_notes([moved])
        assert "differs from the model's output in shape" in note


def test_a_metric_out_of_reach_is_an_error_that_names_the_layers(block: onnx.ModelProto, halves: SampleSplit) -> None:
    with pytest.raises(InputError, match=r"with only one layer quantized.*'q'|with only one layer quantized.*'a'"):
        quantize_model(block, wish(metric="snr>=80"), halves)
    with pytest.raises(InputError, match="the float32 model reaches"):
        quantize_model(block, wish(metric="snr>=300"), halves)


def test_dynamic_ranges_need_no_samples(block: onnx.ModelProto) -> None:
    made, account = quantize_model(block, wish(runtime="onnxruntime", dynamic=True), None)
    assert quantized_layers(account) == ["a", "q"]
    assert worst(block, made) >= 0.999
    assert {"DynamicQuantizeLinear", "MatMulInteger"} <= {n.op_type for n in made.graph.node}


W3 = RNG.standard_normal((WIDTH, WIDTH)) / 8
ON_ROWS = f"float[b,{WIDTH}] x", f"float[b,{WIDTH}] y"


@pytest.mark.parametrize("metric", [None, "cosine>=0.99"])
def test_dynamic_ranges_serve_gemms(halves: SampleSplit, metric: str | None) -> None:
    """Layers of `nn.Linear` on rows are what MatMul and Add are, bit by bit; a Gemm with a factor stays float."""
    linears = (
        "a = Gemm<transB = 1>(x, w1, b1) h = Relu(a) p = Gemm(h, w2, b2) q = Gemm(p, w3)",
        "m = MatMul(x, w1) a = Add(m, b1) h = Relu(a) o = MatMul(h, w2) p = Add(o, b2) q = MatMul(p, w3)",
    )
    weights = {n: WEIGHTS[n] for n in ("w1", "b1", "w2", "b2")} | {"w3": W3}
    plan = wish(runtime="onnxruntime", dynamic=True, metric=metric)
    values, accounts = [], []
    for layers, w1 in zip(linears, (WEIGHTS["w1"].T, WEIGHTS["w1"]), strict=True):
        proto = text(f"{layers} y = Gemm<alpha = 0.5>(q, w3, b2)", *ON_ROWS, **weights | {"w1": w1})
        made, account = quantize_model(proto, plan, halves if metric else None)
        assert [n.op_type for n in made.graph.node].count("MatMulInteger") == 3
        values.append(run_onnxruntime(made, {"x": X})[0])
        accounts.append(account)
        assert worst(proto, made) >= 0.99
    assert np.array_equal(*values)
    assert quantized_layers(accounts[0]) == ["a", "p", "q"]
    (left,) = [layer for layer in accounts[0].layers if layer.status == "float"]
    assert (left.tensor, left.op) == ("y", "Gemm")
    assert "for MatMul, and Gemm of alpha = beta = 1" in left.reason


@pytest.mark.parametrize("calibration", ["entropy", "percentile"])
def test_onnxruntimes_calibrators(
    block: onnx.ModelProto, halves: SampleSplit, calibration: str, capfd: pytest.CaptureFixture[str]
) -> None:
    made, account = quantize_model(block, wish(calibration=calibration), halves)
    assert capfd.readouterr().out == ""  # which belongs to the command line's own output
    plain = quantize_model(block, wish(), halves)[1]
    assert worst(block, made) >= 0.99
    for ours, widest in zip(account.layers, plain.layers, strict=True):
        assert ours.scale is not None
        assert widest.scale is not None
        assert 0.2 * widest.scale < ours.scale <= 1.01 * widest.scale  # they cut, and never widen


def test_convolutions_in_onnxruntime_are_integers_from_end_to_end() -> None:
    rng = np.random.default_rng(0)
    k, k2 = rng.standard_normal((8, 3, 3, 3)) / 5, rng.standard_normal((8, 8, 3, 3)) / 9
    proto = text(
        "c = Conv<pads=[1, 1, 1, 1]>(x, k, bias) h = Relu(c) d = Conv<pads=[1, 1, 1, 1]>(h, k2) y = Add(d, h)",
        "float[b,3,8,8] x",
        "float[b,8,8,8] y",
        k=k,
        k2=k2,
        bias=rng.standard_normal(8),
    )
    x = rng.standard_normal((64, 3, 8, 8)).astype(np.float32)
    specs = [InputSpec("x", "float32", (Dim("b", 1, 4, 16), *map(Dim.from_size, (3, 8, 8))))]
    made, account = quantize_model(proto, wish(runtime="onnxruntime"), split_samples([{"x": x}], specs))
    assert quantized_layers(account) == ["c", "d"]
    assert worst(proto, made, x) >= 0.999
    kinds = {t.name: t.data_type for t in made.graph.initializer}
    conv = next(n for n in made.graph.node if n.op_type == "Conv")
    bias = next(n for n in made.graph.node if n.output[0] == conv.input[2])
    assert kinds[bias.input[0]] == onnx.TensorProto.INT32


@pytest.mark.parametrize(("to", "layers"), [("int4", ["y"]), ("fp8", ["c", "y"])])
def test_convolutions_in_other_formats(to: str, layers: list[str]) -> None:
    """TensorRT has FP8 kernels of them, and INT4 weights of matrix products alone."""
    rng = np.random.default_rng(1)
    proto = text(
        "c = Conv(x, k) m = ReduceMean<keepdims=0>(c, axes) y = MatMul(m, w)",
        "float[b,3,8,8] x",
        "float[b,5] y",
        k=rng.standard_normal((64, 3, 3, 3)),
        axes=np.array([2, 3]),
        w=rng.standard_normal((64, 5)),
    )
    x = rng.standard_normal((16, 3, 8, 8)).astype(np.float32)
    specs = [InputSpec("x", "float32", (Dim("b", 1, 4, 16), *map(Dim.from_size, (3, 8, 8))))]
    made, account = quantize_model(proto, wish(to, "tensorrt"), split_samples([{"x": x}], specs))
    assert quantized_layers(account) == layers
    assert all(layer.reason for layer in account.layers if layer.status == "float")
    assert worst(proto, made, x) >= 0.9


def test_few_rows_smooth_nothing(block: onnx.ModelProto) -> None:
    """Factors for each channel, taken of four rows, cut off what other rows hold: the file of one layer had a cosine of
    0.71."""
    made, account = quantize_model(block, wish(), split_samples([{"x": X[:8]}], SPECS))
    assert {m.kind for m in account.migrations} == {"gamma and beta"}
    assert worst(block, made) >= 0.99


def test_what_can_not_be_quantized_is_named(halves: SampleSplit) -> None:
    proto = text(
        "d = Cast<to=10>(x) e = MatMul(d, w) y = Cast<to=1>(e)",
        f"float[b,{WIDTH}] x",
        "float[b,4] y",
        w=np.ones((WIDTH, 4), np.float16),
    )
    with pytest.raises(InputError, match="'e': its input is float16, not float32"):
        quantize_model(proto, wish(), halves)
    proto = text(
        "t = Transpose<perm=[1, 0]>(w) y = MatMul(x, t)",
        f"float[b,{WIDTH}] x",
        "float[b,4] y",
        w=np.ones((4, WIDTH)),
    )
    with pytest.raises(InputError, match="'y': its weight is computed by Transpose from constants"):
        quantize_model(proto, wish(), halves)
    with pytest.raises(InputError, match="it has no linear layers"):
        quantize_model(text("y = Relu(x)"), wish(), halves)


FUNCTION = f"""<ir_version: 10, opset_import: ["": 21, "acme": 1]> g (float[b,{WIDTH}] x) => (float[b,4] y)
    <float[{WIDTH},4] w = {{{", ".join(["1"] * 4 * WIDTH)}}}> {{ y = acme.Head(x, w) }}
    <opset_import: ["": 21], domain: "acme"> Head (a, v) => (o) {{ o = MatMul(a, v) }}"""
LOOSE = f"""<ir_version: 10, opset_import: ["": 21]> g (float[b,{WIDTH}] x, float[{WIDTH},4] w) => (float[b,4] y)
    {{ y = MatMul(x, w) }}"""
BRANCHES = f"""<ir_version: 10, opset_import: ["": 21]> g (float[b,{WIDTH}] x) => (float[b,4] y)
    <float[{WIDTH},4] w = {{{", ".join(["1"] * 4 * WIDTH)}}}, bool c = {{1}}>
    {{ y = If(c) <then_branch = t () => (float[b,4] p) {{ p = MatMul(x, w) }},
                   else_branch = e () => (float[b,4] q) {{ q = MatMul(x, w) }}> }}"""


@pytest.mark.parametrize(
    ("written_as", "weight", "why"),
    [
        (FUNCTION, None, r"its linear layers are in functions \('Head'\), which are not quantized; inline them"),
        (LOOSE, np.ones((WIDTH, 4), np.float32), r"the weight 'w' of MatMul 'y' is also a model input"),
        (LOOSE, None, "none of its layers has a constant weight; the first is MatMul 'y'"),
        (BRANCHES, None, "its linear layers are in bodies of If, Loop or Scan"),
    ],
)
def test_layers_that_are_out_of_reach_are_not_called_none(
    halves: SampleSplit, written_as: str, weight: np.ndarray | None, why: str
) -> None:
    proto = onnx.parser.parse_model(written_as)
    if weight is not None:
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.checker.check_model(proto, full_check=True)
    with pytest.raises(InputError, match=why):
        quantize_model(proto, wish(), halves)


def test_a_quantized_file_is_refused(block: onnx.ModelProto, halves: SampleSplit) -> None:
    made, _ = quantize_model(block, wish(), halves)
    with pytest.raises(InputError, match=r"already quantized: it contains (Quantize|Dequantize)Linear"):
        quantize_model(made, wish(), halves)


@pytest.mark.parametrize(
    ("samples", "why"),
    [
        ({"x": X[:1]}, "calibration and judging need different samples; pass at least two"),
        ({"z": X}, r"has no \['x'\]"),
        ({"x": np.where(np.arange(WIDTH) == 3, np.nan, X)}, "contains NaN or Inf"),
        ({"x": np.full((8, WIDTH), 2.5, np.float32)}, "are 2.5"),
        ({"x": X[:, :5]}, "5"),
        ({"x": X[:0]}, "0"),
    ],
)
def test_samples_that_can_not_calibrate(samples: dict[str, np.ndarray], why: str) -> None:
    with pytest.raises(InputError, match=why):
        split_samples([samples], SPECS)


def test_no_sample_calibrates_and_judges() -> None:
    for count in (2, 3, 9, 40):
        parts = split_samples([{"x": X[:count]}], SPECS)
        a, b = (np.concatenate([f["x"] for f in part]) for part in (parts.calibrating, parts.judging))
        assert parts.sample_counts == (len(a), len(b))
        assert len(a) + len(b) == count
        assert not any((row == b).all(1).any() for row in a)


def test_verify_knows_a_gamma_that_was_divided(block: onnx.ModelProto) -> None:
    """Factors that the norm takes back are no altered weight; one element changed besides is."""
    spread = np.exp(np.random.default_rng(3).standard_normal(WIDTH))
    many = (np.random.default_rng(4).standard_normal((512, WIDTH)) * spread).astype(np.float32)
    made, account = quantize_model(block, wish(), split_samples([{"x": many}], SPECS))
    assert "smooth" in {m.kind for m in account.migrations}
    model = FileModel(inputs=tuple(SPECS), outputs=("y",), kind="onnx", proto=block, label="block")
    told = {w.name: w for w in audit_weights(model, made, "made")}
    assert {name for name, w in told.items() if w.origin is WeightOrigin.ALTERED} == set()
    gamma = next(name for name, w in told.items() if "divided by the factors in its norm" in w.reason)
    for t in made.graph.initializer:
        if t.name == gamma:
            array = onnx.numpy_helper.to_array(t).copy()
            array[3] *= 1.5
            t.CopyFrom(onnx.numpy_helper.from_array(array, gamma))
    assert {w.name for w in audit_weights(model, made, "made") if w.origin is WeightOrigin.ALTERED} == {gamma}


def test_what_a_norm_is_written_with_has_three_binary_digits() -> None:
    assert are_smoothing_factors(np.array([1.75, 0.5, 640.0], np.float32))
    for none in ([1.0, 1.0], [1.0, np.inf], [1.0, np.nan], [1.0, 0.0], [1.0, -2.0], [1.0, 1.125]):
        assert not are_smoothing_factors(np.array(none, np.float32)), none


def test_verify_takes_the_factors_of_the_gammas_own_norm() -> None:
    """Those of two norms are alike in most places: MiniLM's file failed for the other norm's."""
    rng = np.random.default_rng(9)
    gammas = {n: rng.standard_normal(16).astype(np.float32) for n in ("g", "h")}
    body = "y = Mul(x, g) z = Mul(x, h)"
    proto = text(body, "float[b,16] x", "float[b,16] y, float[b,16] z", **gammas)
    model = FileModel(inputs=(), outputs=("y", "z"), kind="onnx", proto=proto, label="model")
    inverses = {n: np.ones(16, np.float32) for n in gammas}
    inverses["g"][3], inverses["h"][5] = 1.75, 8
    made = text(
        "q = QuantizeLinear(x, step) d = DequantizeLinear(q, step) a = Mul(d, pg) c = Mul(d, ph) y = Mul(a, mg)"
        " z = Mul(c, mh)",
        "float[b,16] x",
        "float[b,16] y, float[b,16] z",
        step=np.array(0.1),
        pg=inverses["g"],
        ph=inverses["h"],
        **{f"m{n}": gammas[n] / inverses[n] for n in gammas},
    )
    told = {w.name: (w.origin, w.parameter) for w in audit_weights(model, made, "made")}
    assert {n: told[n] for n in ("mg", "mh")} == {"mg": (WeightOrigin.FOLDED, "g"), "mh": (WeightOrigin.FOLDED, "h")}
