"""Quantized files of other tools, which say nothing of their calibration, on inputs that it did not see."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnxruntime.quantization import QuantType, quantize_dynamic

from normdeploy.exporting.exporter import export_to_proto
from normdeploy.model import LoadedModel
from normdeploy.verbs.verify.file_comparison import compare_files
from tests import quantized_files as files

MODELS = {"net": files.net, "conv": files.conv}
NOTE = "exceed the calibrated ranges"


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return MODELS[request.param]()


def test_ranges_that_calibration_can_have_given_are_right(model: LoadedModel, tmp_path: Path) -> None:
    comparison = compare_files(model, files.quantized(model, tmp_path, margin=1.0), seeds=3)
    assert comparison, str(comparison)
    assert any(NOTE in note for note in comparison.notes)


def test_what_is_cut_off_of_inputs_that_are_given_counts(model: LoadedModel, tmp_path: Path) -> None:
    path = files.quantized(model, tmp_path, margin=1.0)
    # Half of them lie within all ranges.
    given = [*files.samples(model), *({n: 2 * x for n, x in s.items()} for s in files.samples(model))]
    comparison = compare_files(model, path, inputs=given)
    assert not comparison
    assert "saturates" in str(comparison)


def test_a_weight_is_wrong_whatever_the_ranges_cut_off(model: LoadedModel, tmp_path: Path) -> None:
    def grown(proto: onnx.ModelProto) -> None:
        node = next(files.weights(proto))
        files.own_constants(proto, node)
        files.replace_constant(proto, node.input[1], files.constant(proto, node.input[1]) * 1.1)

    path = files.quantized(model, tmp_path, margin=1.0)
    assert not compare_files(model, files.edited(path, "wrong.onnx", grown), seeds=3)


@pytest.mark.parametrize("factor", [0.25, 0.5, 0.75])
def test_a_range_that_holds_no_usual_run_is_wrong(factor: float, model: LoadedModel, tmp_path: Path) -> None:
    path = files.quantized(model, tmp_path, margin=1.0)
    name = files.activations(onnx.load(path))[1].input[0]

    def narrowed(proto: onnx.ModelProto) -> None:
        files.scale_pair(proto, files.activations(proto)[1], factor)

    comparison = compare_files(model, files.edited(path, "narrow.onnx", narrowed), seeds=3)
    assert not comparison
    assert f"{name!r} saturates" in str(comparison)


def test_products_that_a_processor_adds_wrongly_speak_against_no_file(tmp_path: Path) -> None:
    """Weights of 8 bits, whose pairs of products saturate without VNNI where onnxruntime's optimizer is off."""
    model = files.net()
    onnx.save(export_to_proto(model), tmp_path / "float32.onnx")
    quantize_dynamic(tmp_path / "float32.onnx", tmp_path / "dynamic.onnx", weight_type=QuantType.QInt8)
    comparison = compare_files(model, tmp_path / "dynamic.onnx", seeds=3)
    assert comparison, str(comparison)
    assert {"onnxruntime (optimizer on)"} <= {r.runtime for r in comparison.results}
