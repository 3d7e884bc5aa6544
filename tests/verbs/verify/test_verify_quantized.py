"""Quantized files: what is quantized properly lies within the budget of its steps, and planted faults do not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
from torch import nn

import normdeploy
from normdeploy.compare.policy import parse_policy
from normdeploy.loading import from_module
from normdeploy.model import LoadedModel
from normdeploy.runtimes import RunResult
from normdeploy.runtimes.quantized_float64 import QuantizedRunner
from normdeploy.runtimes.rounding_draws import RoundingDraw
from normdeploy.verbs.verify import edge_cases
from normdeploy.verbs.verify.comparison_result import Comparison
from normdeploy.verbs.verify.file_comparison import compare_files
from normdeploy.verbs.verify.quantization_budget import ROUNDED, UNROUNDED
from normdeploy.verbs.verify.reference_models import FileModel
from normdeploy.verbs.verify.weight_audit import audit_weights
from tests import quantized_files as files
from tests.half_graphs import text

OFF, ON = "onnxruntime (optimizer off)", "onnxruntime (optimizer on)"


@pytest.fixture(scope="module")
def net() -> LoadedModel:
    return files.net()


@pytest.fixture(scope="module")
def conv() -> LoadedModel:
    return files.conv()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


@pytest.fixture(scope="module")
def int8(net: LoadedModel, folder: Path) -> Path:
    return files.quantized(net, folder, margin=1.0)


def compared(model: LoadedModel, path: Path) -> Comparison:
    """On what the file was calibrated on, which no range cuts off."""
    return compare_files(model, path, inputs=files.samples(model))


def verdicts(comparison: Comparison) -> dict[str, str]:
    return {r.runtime: r.verdict for r in comparison.results if r.file}


FORMS = {
    "symmetric": {},
    "asymmetric": {"activations": QuantType.QUInt8, "symmetric": False},
    "per tensor": {"per_channel": False},
    "16 bits": {"activations": QuantType.QInt16},
}


@pytest.mark.parametrize("make", ["net", "conv"])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_quantized_properly_passes(form: str, make: str, folder: Path, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(make)
    comparison = compared(model, files.quantized(model, folder, f"{make}.onnx", margin=1.0, **FORMS[form]))
    assert comparison, str(comparison)
    assert set(verdicts(comparison)) == {UNROUNDED, ROUNDED, OFF, ON}
    own = [r for r in comparison.results if r.file]
    assert all(r.steps is not None and 0 < r.steps < 0.1 for r in own)
    assert {r.decided_by for r in own} == {"error budget of its steps"}
    assert max(r.max_abs_error for r in own) > 1e-4  # far more than any float32 evaluation is off by


def test_activations_that_are_quantized_as_they_come(net: LoadedModel, folder: Path) -> None:
    """DynamicQuantizeLinear has a range for each input: no input is beyond it."""
    comparison = compare_files(net, files.dynamic(net, folder))
    assert comparison, str(comparison)


def test_the_verdict_is_told_and_written(net: LoadedModel, int8: Path) -> None:
    comparison = compared(net, int8)
    assert any("half a step of each scale" in note for note in comparison.notes)
    told = json.loads(json.dumps(comparison.to_json()["results"]))
    assert {r["decided_by"] for r in told if r["file"]} == {"error budget of its steps"}
    assert {r["steps"] for r in told if not r["file"]} == {None}


def weight_scale(proto: onnx.ModelProto) -> None:
    node = next(iter(files.weights(proto)))
    scale = files.constant(proto, node.input[1]).copy()
    scale[3] *= 1.5
    files.replace_constant(proto, node.input[1], scale)


def weight_zero_point(proto: onnx.ModelProto) -> None:
    node = list(files.weights(proto))[1]
    files.own_constants(proto, node)
    files.replace_constant(proto, node.input[2], np.full(files.constant(proto, node.input[2]).shape, 9))


def swapped_channels(proto: onnx.ModelProto) -> None:
    node = next(iter(files.weights(proto)))
    axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
    codes = np.moveaxis(files.constant(proto, node.input[0]).copy(), axis, 0)
    codes[[1, 2]] = codes[[2, 1]]
    files.replace_constant(proto, node.input[0], np.moveaxis(codes, 0, axis))


def zero_point_of_one_end(proto: onnx.ModelProto) -> None:
    """DequantizeLinear subtracts what QuantizeLinear did not add."""
    quantize = files.activations(proto)[1]
    node = next(n for n in proto.graph.node if n.op_type == "DequantizeLinear" and n.input[0] == quantize.output[0])
    files.own_constants(proto, node)
    files.replace_constant(proto, node.input[2], np.full((), 12))


def scale_of_one_end(proto: onnx.ModelProto) -> None:
    quantize = files.activations(proto)[1]
    node = next(n for n in proto.graph.node if n.op_type == "DequantizeLinear" and n.input[0] == quantize.output[0])
    files.own_constants(proto, node)
    files.replace_constant(proto, node.input[1], files.constant(proto, node.input[1]) * 1.2)


WRONG = [weight_scale, weight_zero_point, swapped_channels, zero_point_of_one_end, scale_of_one_end]


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("make", ["net", "conv"])
def test_what_is_not_the_model_fails_without_any_rounding(
    fault: object, make: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(make)
    path = files.quantized(model, folder, f"{make}_right.onnx", margin=1.0)
    comparison = compared(model, files.edited(path, "wrong.onnx", fault))  # type: ignore[arg-type]
    assert verdicts(comparison)[UNROUNDED] == "fail"
    reason = next(r.reason for r in comparison.results if r.runtime == UNROUNDED)
    assert "differs from the model's" in reason


@pytest.mark.parametrize("make", ["net", "conv"])
def test_a_range_that_clips_fails_and_is_named(make: str, folder: Path, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(make)
    path = files.quantized(model, folder, f"{make}_right.onnx", margin=1.0)
    name = files.activations(onnx.load(path))[1].input[0]

    def clipped(proto: onnx.ModelProto) -> None:
        files.scale_pair(proto, files.activations(proto)[1], 1 / 4)

    comparison = compared(model, files.edited(path, "clipped.onnx", clipped))
    assert verdicts(comparison) == {UNROUNDED: "fail", ROUNDED: "fail", OFF: "fail", ON: "fail"}
    assert f"{name!r} saturates" in next(r.reason for r in comparison.results if r.runtime == ROUNDED)


def test_a_metric_decides_in_the_place_of_the_budget(net: LoadedModel, int8: Path, folder: Path) -> None:
    inputs = files.samples(net)
    good = compare_files(net, int8, inputs=inputs, policy=parse_policy(None, "cosine>=0.995"))
    assert good
    path = files.edited(int8, "wrong.onnx", swapped_channels)
    assert not compare_files(net, path, inputs=inputs, policy=parse_policy(None, "cosine>=0.9999"))
    assert compare_files(net, path, inputs=inputs, policy=parse_policy(None, "cosine>=0.5"))


def test_what_decides_nothing_is_not_computed(net: LoadedModel, int8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget takes dozens of runs in float64; where a metric decides, the file is run in float64 once."""
    runs = counted(monkeypatch)
    comparison = compare_files(net, int8, inputs=files.samples(net), policy=parse_policy(None, "cosine>=0.995"))
    assert runs == [AS_THE_FILE_SAYS] * len(comparison.cases)
    made = [r for r in comparison.results if r.file]
    assert {(r.by_default, r.runtime == UNROUNDED) for r in made} == {("", False)}
    assert {m.runtime for m in comparison.not_run} >= {UNROUNDED}
    assert all("not judged, --also-default asks for it" in r.rules_summary for r in made)
    assert comparison.standard == "by cosine>=0.995 alone, without the default rule,"
    assert [row[comparison.columns.index("allowed")] for row in comparison.rows() if row[1] != "eager"] == [
        "by metric"
    ] * len(made)
    assert "nan" not in str(comparison)
    assert f"verified {comparison.standard} on " in comparison.summarize()


def test_the_budget_holds_beside_a_metric_where_it_is_asked_for(net: LoadedModel, int8: Path) -> None:
    path, inputs = files.edited(int8, "swapped.onnx", swapped_channels), files.samples(net)
    both = parse_policy(None, "cosine>=0.5").require_default(True)
    good, wrong = (compare_files(net, file, inputs=inputs, policy=both) for file in (int8, path))
    assert {r.by_default for r in good.results if r.file} == {"pass"}
    assert good.standard == "by the rules given, and by the default rule"
    assert good
    assert {r.by_default for r in wrong.results if r.file} == {"fail"}
    assert not wrong


class WithClass(files.Net):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return y, y.argmax(-1)


def test_a_rule_for_one_output_leaves_the_budget_to_the_others(folder: Path) -> None:
    """An integer output is the default rule's."""
    model = from_module(WithClass().eval(), inputs=["x:float32[batch=1:4:8,6,32]"])
    path = files.quantized(model, folder, "class.onnx", margin=1.0)
    comparison = compare_files(model, path, inputs=files.samples(model), policy=parse_policy(None, "cosine>=0.9"))
    assert {r.by_default for r in comparison.results if r.file} == {"pass"}


def test_no_run_in_float64_is_made_twice(net: LoadedModel, int8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = counted(monkeypatch)
    compare_files(net, int8, seeds=1)
    inputs = runs.count((1, None, False, 1.0))  # of each one budget, with one draw of this seed
    assert inputs > 1
    assert runs.count(AS_THE_FILE_SAYS) == runs.count(("exact", None, False, 1.0)) == inputs


def test_inputs_beyond_the_usual_are_not_made_for_quantized_files_alone(
    net: LoadedModel, int8: Path, folder: Path
) -> None:
    alone = compare_files(net, int8, seeds=1)
    assert not any("nan" in case or "times 100" in case for case in alone.cases)
    plain = folder / "plain.onnx"
    normdeploy.export(net, output=plain)
    assert any("nan" in case for case in compare_files(net, [int8, plain], seeds=1).cases)


def test_sizes_that_cost_too_much_are_left_out_and_told(
    conv: LoadedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 1, 2 (usual) and 4 of the model; where 2 take 8e9 operations, 4 are too many for a dozen runs."""
    path = files.quantized(conv, folder, "large.onnx")
    monkeypatch.setattr(edge_cases, "count_flops", lambda model: 8e9)
    costly = compare_files(conv, path, seeds=1)
    assert not any("batch=4" in case for case in costly.cases)
    assert any("batch=2" in case for case in costly.cases)
    assert costly.up_to == 1.25 * 2 * 3 * 12 * 12
    assert any(note.startswith("not run at batch=4") for note in costly.notes)
    asked = compare_files(conv, path, seeds=1, most=4 * 3 * 12 * 12)
    assert any("batch=4" in case for case in asked.cases)


AS_THE_FILE_SAYS = (None, None, True, 1.0)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """The runs of quantized files in float64 from here on: how each is drawn."""
    runs: list[tuple[object, ...]] = []
    run = QuantizedRunner.run_with_draw

    def counting(self: QuantizedRunner, feeds: Mapping[str, np.ndarray], draw: RoundingDraw) -> RunResult:
        runs.append((draw.activations, draw.weights, draw.clips, draw.width))
        return run(self, feeds, draw)

    monkeypatch.setattr(QuantizedRunner, "run_with_draw", counting)
    return runs


def by_hand(model: LoadedModel, folder: Path, kind: int, block: int, activations: bool) -> Path:
    """The float file with its first weight in ``kind``: in blocks, or for each channel with its input in it too."""
    files.quantized(model, folder)  # writes the float file
    proto = onnx.load(folder / "float32.onnx")
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind))
    largest = 7.0 if "int4" in dtype.name else float(ml_dtypes.finfo(dtype).max)
    node = next(n for n in proto.graph.node if n.op_type in ("MatMul", "Gemm"))
    weight = (
        files.constant(proto, node.input[1]) if node.input[1] in {t.name for t in proto.graph.initializer} else None
    )
    if weight is None:  # a transposed one
        turned = next(n for n in proto.graph.node if n.output[0] == node.input[1])
        weight = files.constant(proto, turned.input[0]).T
    if block:
        blocks = weight.reshape(-1, block, weight.shape[1])
        scale = (np.abs(blocks).max(1) / largest).astype(np.float32)
        steps, attrs = weight / np.repeat(scale, block, 0), {"axis": 0, "block_size": block}
    else:
        scale = (np.abs(weight).max(0) / largest).astype(np.float32)
        steps, attrs = weight / scale, {"axis": 1}
    codes = (np.rint(steps) if "int" in dtype.name else steps).astype(np.float32).astype(dtype)
    proto.graph.initializer.append(numpy_helper.from_array(codes, "codes"))
    proto.graph.initializer.append(numpy_helper.from_array(scale, "scales"))
    place = list(proto.graph.node).index(node)
    new = [helper.make_node("DequantizeLinear", ["codes", "scales"], ["weight_back"], **attrs)]
    if activations:
        x = max(float(np.abs(feeds["x"]).max()) for feeds in files.samples(model)) / largest
        proto.graph.initializer.append(numpy_helper.from_array(np.float32(x).reshape(()), "x_scale"))
        proto.graph.initializer.append(numpy_helper.from_array(np.zeros((), dtype), "x_zero"))
        new += [
            helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["x_codes"]),
            helper.make_node("DequantizeLinear", ["x_codes", "x_scale", "x_zero"], ["x_back"]),
        ]
        node.input[0] = "x_back"
    node.input[1] = "weight_back"
    for i, made in enumerate(new):
        proto.graph.node.insert(place + i, made)
    proto.opset_import[0].version = max(21, proto.opset_import[0].version)
    onnx.save(proto, folder / "by_hand.onnx")
    return folder / "by_hand.onnx"


@pytest.mark.parametrize(
    ("kind", "block", "activations"),
    [(TensorProto.INT4, 16, False), (TensorProto.FLOAT8E4M3FN, 0, True), (TensorProto.FLOAT8E5M2, 0, True)],
)
def test_four_bits_and_floats_of_eight(
    kind: int, block: int, activations: bool, net: LoadedModel, folder: Path
) -> None:
    path = by_hand(net, folder, kind, block, activations)
    comparison = compared(net, path)
    kinds = verdicts(comparison)
    optimized = next(r for r in comparison.results if r.runtime == ON)
    if kind == TensorProto.INT4:  # onnxruntime 1.31.1 computes with activations of 8 bits, by its default
        assert "session.qdq_matmulnbits_accuracy_level=1" in str(comparison)
    else:
        del kinds[ON]
        assert not optimized
        # it makes an integer product of it, and can't load that then
        assert "QDQSelectorActionTransformer" in optimized.culprit
    assert set(kinds.values()) == {"pass"}, str(comparison)

    def wrong(proto: onnx.ModelProto) -> None:
        scale = files.constant(proto, "scales").copy()
        scale[..., 1] *= 3
        files.replace_constant(proto, "scales", scale)

    assert verdicts(compared(net, files.edited(path, "wrong.onnx", wrong)))[UNROUNDED] == "fail"


def test_steps_as_large_as_the_output_say_nothing(net: LoadedModel, int8: Path) -> None:
    def coarse(proto: onnx.ModelProto) -> None:
        """Scales of 90 times the size, with the codes to them: within every budget, and worth nothing."""
        for node in files.weights(proto):
            codes, scale = files.constant(proto, node.input[0]), files.constant(proto, node.input[1])
            files.replace_constant(proto, node.input[0], np.rint(codes / 90))
            files.replace_constant(proto, node.input[1], scale * 90)

    comparison = compared(net, files.edited(int8, "coarse.onnx", coarse))
    assert verdicts(comparison)[ROUNDED] == "fail"
    assert "can't tell right from wrong: pass a metric" in next(
        r.reason for r in comparison.results if r.runtime == ROUNDED
    )


def unquantized_weights(proto: onnx.ModelProto) -> None:
    """As ModelOpt and torch write it: each weight in float32 with a QuantizeLinear of its own in front of its pair."""
    for node in list(files.weights(proto)):
        codes, scale = files.constant(proto, node.input[0]), files.constant(proto, node.input[1])
        axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
        shape = [-1 if i == axis and scale.ndim else 1 for i in range(codes.ndim)]
        values = (codes * scale.reshape(shape if scale.ndim else ())).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(values, f"{node.input[0]}_float"))
        made = helper.make_node(
            "QuantizeLinear", [f"{node.input[0]}_float", *node.input[1:]], [f"{node.input[0]}_again"], axis=axis
        )
        proto.graph.node.insert(list(proto.graph.node).index(node), made)
        node.input[0] = made.output[0]


def test_weights_that_are_quantized_in_the_graph(net: LoadedModel, int8: Path) -> None:
    path = files.edited(int8, "in_graph.onnx", unquantized_weights)
    comparison = compared(net, path)
    assert comparison, str(comparison)

    def wrong(proto: onnx.ModelProto) -> None:
        unquantized_weights(proto)
        node = next(n for n in proto.graph.node if n.op_type == "DequantizeLinear" and n.input[0].endswith("_again"))
        files.own_constants(proto, node)
        files.replace_constant(proto, node.input[1], files.constant(proto, node.input[1]) * 1.2)

    assert verdicts(compared(net, files.edited(int8, "wrong_in_graph.onnx", wrong)))[UNROUNDED] == "fail"


def test_an_onnx_file_as_the_reference_and_names_of_its_own(net: LoadedModel, folder: Path) -> None:
    path = files.quantized(net, folder, "theirs.onnx", margin=1.0)

    def renamed(proto: onnx.ModelProto) -> None:
        proto.graph.input[0].name = "theirs"
        for node in proto.graph.node:
            for i, name in enumerate(node.input):
                node.input[i] = "theirs" if name == "x" else name

    files.edited(path, "renamed.onnx", renamed)
    original = folder / "float32.onnx"
    inputs = [folder / f"in{i}.npz" for i in range(3)]
    for file, feeds in zip(inputs, files.samples(net), strict=False):
        np.savez(file, **feeds)
    good = normdeploy.verify(original, [folder / "renamed.onnx"], feeds=inputs, map={"theirs": "x"})
    assert good, str(good)
    assert set(verdicts(good)) == {UNROUNDED, ROUNDED, OFF, ON}
    wrong = files.edited(path, "wrong.onnx", swapped_channels)
    assert not normdeploy.verify(original, [wrong], feeds=inputs)


@pytest.fixture
def operators(net: LoadedModel, folder: Path) -> Path:
    """onnxruntime's QOperator form: QLinearMatMul and QLinearAdd in the place of pairs."""
    files.quantized(net, folder)
    quantize_static(
        folder / "float32.onnx",
        folder / "operators.onnx",
        files.Samples(files.samples(net)),
        quant_format=QuantFormat.QOperator,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
    )
    return folder / "operators.onnx"


def test_operators_that_quantize_inside_have_the_budget_of_their_pairs(net: LoadedModel, operators: Path) -> None:
    comparison = compared(net, operators)
    assert comparison, str(comparison)
    assert set(verdicts(comparison)) == {UNROUNDED, ROUNDED, OFF, ON}
    # Scales are no weights.
    assert not comparison.weights, str(comparison.weights)


def test_operators_with_a_doubled_scale_fail(net: LoadedModel, operators: Path) -> None:
    def doubled(proto: onnx.ModelProto) -> None:
        node = next(n for n in proto.graph.node if n.op_type == "QLinearMatMul")
        files.own_constants(proto, node)
        files.replace_constant(proto, node.input[4], 2 * files.constant(proto, node.input[4]))

    comparison = compared(net, files.edited(operators, "wrong.onnx", doubled))
    assert verdicts(comparison)[UNROUNDED] == "fail", str(comparison)


def test_operators_without_a_plain_form_ask_for_a_metric(net: LoadedModel, operators: Path) -> None:
    """Without the zero point of its result nothing says to which type a QLinearAdd rounds."""

    def untyped(proto: onnx.ModelProto) -> None:
        node = next(n for n in proto.graph.node if n.op_type == "QLinearAdd")
        node.input[7] = ""

    sealed = files.edited(operators, "sealed.onnx", untyped)
    comparison = compared(net, sealed)
    assert not comparison
    assert any("pass a metric: --metric 'cosine>=0.99'" in note for note in comparison.notes)
    assert UNROUNDED not in verdicts(comparison)
    assert compare_files(net, operators, inputs=files.samples(net), policy=parse_policy(None, "cosine>=0.99"))


def test_scales_of_quantizers_are_no_weights(int8: Path, net: LoadedModel) -> None:
    """The error budget judges them."""
    proto = onnx.load(int8)
    pairs = [n for n in proto.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    told = {w.name for w in audit_weights(net, proto, "int8")}
    assert not told & {name for n in pairs for name in n.input[1:]}


def test_a_mask_that_half_does_not_hold_alters_no_weight(folder: Path) -> None:
    """−3.4e38 of the reference is −Inf in float16, and any number may stand for it in the half file."""
    lowest = np.array(np.finfo(np.float32).min)
    reference = text("m = Where(c, x, low) y = Softmax(m)", c=np.array([[True, False, True, True]]), low=lowest)
    half = text("m = Where(c, x, low) y = Softmax(m)", c=np.array([[True, False, True, True]]), low=lowest)
    (tensor,) = (t for t in half.graph.initializer if t.name == "low")
    tensor.CopyFrom(numpy_helper.from_array(np.array(-16384, np.float16), "low"))
    model = FileModel(inputs=(), outputs=("y",), kind="onnx", proto=reference, label="reference")
    assert [w.name for w in audit_weights(model, half, "half") if not w] == []


@pytest.mark.parametrize("seed", range(4))
def test_kinks_behind_what_is_rounded_are_no_faults(seed: int, tmp_path: Path) -> None:
    """Half of all elements are 0 behind ReLU, many of them by a hair: there a draw of the steps moves nothing."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()).eval()
    with torch.no_grad():
        model[0].weight.mul_(torch.empty(8, 1, 1, 1).uniform_(0.5, 2))
    specs = ["x:float32[batch=1:2:4,3,8,8]"]
    given = np.random.default_rng(seed).standard_normal((96, 3, 8, 8)).astype(np.float32)
    path = tmp_path / "net.onnx"
    normdeploy.export(model, inputs=specs, output=path, quantize="int8", runtime="tensorrt-rtx", calibrate={"x": given})
    found = normdeploy.verify(model, path, inputs=specs)
    assert [(r.runtime, r.case, r.reason) for r in found.results if r.verdict != "pass"] == []


def test_one_weight_of_a_convolution_in_front_of_relu_is_still_seen(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()).eval()
    specs = ["x:float32[batch=1:2:4,3,8,8]"]
    given = np.random.default_rng(1).standard_normal((96, 3, 8, 8)).astype(np.float32)
    path = tmp_path / "net.onnx"
    normdeploy.export(model, inputs=specs, output=path, quantize="int8", runtime="tensorrt-rtx", calibrate={"x": given})
    proto = onnx.load(path)
    codes = next(t for t in proto.graph.initializer if t.data_type == TensorProto.INT8 and len(t.dims) == 4)
    altered = numpy_helper.to_array(codes).copy()
    altered[5, 1, 1, 1] = np.int8(-np.sign(altered[5, 1, 1, 1]) * 100)
    codes.CopyFrom(numpy_helper.from_array(altered, codes.name))
    onnx.save(proto, path)
    found = normdeploy.verify(model, path, inputs=specs)
    assert [r.verdict for r in found.results if r.runtime == UNROUNDED] == ["fail"]


@pytest.mark.parametrize(
    "reads",
    [
        "e = Gather (codes, ids)  t = Transpose <perm = [1, 0, 2]> (e)  d = DequantizeLinear (t, scale, zero)",
        "e = Gather (codes, ids)  d0 = DequantizeLinear (e, scale, zero)  d = Transpose <perm = [1, 0, 2]> (d0)",
    ],
    ids=["dequantized at last", "dequantized at once"],
)
@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.05, False)])
def test_rows_of_a_quantized_table_have_the_half_step_of_its_codes(
    reads: str, factor: float, right: bool, tmp_path: Path
) -> None:
    """onnxruntime's `quantize_dynamic` writes embeddings so: Gather of codes, then DequantizeLinear."""
    rng = np.random.default_rng(0)
    table, weight = (
        rng.standard_normal((40, 16)).astype(np.float32),
        rng.standard_normal((16, 8)).astype(np.float32) / 4,
    )
    scale = np.float32((table.max() - table.min()) / 255)
    zero = np.uint8(np.rint(-table.min() / scale))
    codes = np.clip(np.rint(table / scale) + zero, 0, 255).astype(np.uint8)

    def save(name: str, rows: str, **held: np.ndarray) -> Path:
        head = '<ir_version: 9, opset_import: ["": 17]> net (int64[n,t] ids) => (float[t,n,8] y)'
        proto = onnx.parser.parse_model(f"{head} {{ {rows}  h = MatMul (d, weight)  y = Tanh (h) }}")
        for key, value in {"weight": weight, **held}.items():
            proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), key))
        onnx.save(proto, tmp_path / name)
        return tmp_path / name

    wide = save("wide.onnx", "e = Gather (table, ids)  d = Transpose <perm = [1, 0, 2]> (e)", table=table)
    quantized = save("int8.onnx", reads, codes=codes, scale=np.float32(scale * factor), zero=zero)
    assert bool(normdeploy.verify(wide, quantized, inputs=["ids:int64[n,t]{0:40}"], seeds=2)) is right


def test_a_quantized_file_is_verified_against_itself(tmp_path: Path) -> None:
    """At inputs around 1e-4 all codes are 0, so that no step allows what the output's own type rounds."""
    rng = np.random.default_rng(0)
    proto = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 18]> net (float[n,16] x) => (float[n,16] y)
          <float scale = {0.0243}, int8 zero = {0}> {
            q = QuantizeLinear (x, scale, zero)  d = DequantizeLinear (q, scale, zero)
            h = MatMul (d, up)  k = Relu (h)  y = MatMul (k, down) }"""
    )
    for name, shape in {"up": (16, 32), "down": (32, 16)}.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape, np.float32) / 4, name))
    onnx.save(proto, tmp_path / "int8.onnx")
    assert normdeploy.verify(tmp_path / "int8.onnx", tmp_path / "int8.onnx", seeds=2)


def test_integer_weights_that_a_cast_reads_are_told(tmp_path: Path) -> None:
    codes = np.random.default_rng(0).integers(-127, 127, (16, 16), np.int8)
    head = '<ir_version: 9, opset_import: ["": 17]> net (float[n,16] x) => (float[n,16] y)'

    def save(name: str, body: str, *tensors: onnx.TensorProto) -> Path:
        proto = onnx.parser.parse_model(f"{head} {{ {body} }}")
        proto.graph.initializer.extend(tensors)
        onnx.save(proto, tmp_path / name)
        return tmp_path / name

    scale = numpy_helper.from_array(np.float32(0.02), "scale")
    weight = (codes + np.random.default_rng(1).uniform(-0.5, 0.5, codes.shape)) * 0.02
    wide = save("wide.onnx", "y = MatMul (x, weight)", numpy_helper.from_array(weight.astype(np.float32), "weight"))
    body = "wide = Cast <to = 1> (codes)  sum = MatMul (x, wide)  y = Mul (sum, scale)"
    narrow = save("codes.onnx", body, numpy_helper.from_array(codes, "codes"), scale)
    comparison = normdeploy.verify(wide, narrow, seeds=1)
    assert not comparison
    assert any("integer weights that a Cast reads ('codes')" in note for note in comparison.notes), comparison.notes


class Loudness(torch.nn.Module):
    """Read the mean size of a sound: silence lies far from all others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 2)
        with torch.no_grad():
            self.first.weight.abs_()
            self.first.bias.fill_(-0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x.abs().mean((2, 3))))


def test_zeros_beyond_ranges_that_hold_all_random_inputs_are_no_fault(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = from_module(Loudness().eval(), inputs=["x:float32[batch=1:2:4,3,8,8]"])
    onnx.save(files.export_to_proto(model), tmp_path / "float32.onnx")
    # Softer and louder than any random input, and not silent.
    samples = [{"x": factor * sample["x"]} for sample in files.samples(model, 4) for factor in (0.5, 2.0)]
    quantize_static(
        tmp_path / "float32.onnx", tmp_path / "int8.onnx", files.Samples(samples), quant_format=QuantFormat.QDQ
    )
    comparison = compare_files(model, tmp_path / "int8.onnx")
    assert comparison, str(comparison)
    assert "exceed the calibrated ranges" in " ".join(str(comparison).split())
