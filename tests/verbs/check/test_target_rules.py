"""Norms are compared with the op lists of runtimes that can't run here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app
from normdeploy.errors import InputError
from normdeploy.verbs.check.norm_rules import Problem
from tests.verbs.inspect.test_norm_census import AFTER, BIASED, model

LAYER_NORM = "y = LayerNormalization<axis = -1>(x, w, b)"
RMS_NORM = "y = RMSNormalization<axis = -1>(x, w)"
GROUP_NORM = "y = GroupNormalization<num_groups = 2>(x, w, b)"
SIMPLIFIED = "y = SimplifiedLayerNormalization<axis = -1>(x, w)"
BATCH_NORM = "y = BatchNormalization(x, w, b, b, w)"


def problems(folder: Path, body: str, target: str, **given: Any) -> list[Problem]:
    onnx.save(model(body, **{"opset": 21} | given), folder / "m.onnx")
    (file,) = normdeploy.check([folder / "m.onnx"], target=target).files
    assert not file.error
    rules = ("unsupported", "unsupported-opset", "unknown-support")
    return [p for p in file.findings if p.rule in rules]


def broken(folder: Path, body: str, target: str, **given: Any) -> list[str]:
    return [p.rule for p in problems(folder, body, target, **given)]


@pytest.mark.parametrize(
    ("target", "body", "given", "expected"),
    [
        ("coreml-mlprogram", LAYER_NORM, {}, []),
        ("coreml-mlprogram", RMS_NORM, {"opset": 23}, ["unsupported"]),
        ("coreml-mlprogram", "y = LayerNormalization<axis = -1>(x, x)", {"x": "8"}, ["unsupported"]),  # scale is data
        ("coreml-mlprogram", "y = LayerNormalization<stash_type = 11>(x, w, b)", {}, ["unsupported"]),
        ("coreml-mlprogram", BATCH_NORM, {"x": "2,8,4,4"}, []),
        ("coreml-mlprogram", BATCH_NORM, {"x": "2,8,4"}, ["unsupported"]),  # BatchNormalization of rank 4 alone
        ("coreml-neuralnetwork", LAYER_NORM, {}, ["unsupported"]),
        ("nnapi", BATCH_NORM, {"x": "2,8,4,4"}, []),
        ("nnapi", LAYER_NORM, {}, ["unsupported"]),
        ("xnnpack", BATCH_NORM, {"x": "2,8,4,4"}, ["unsupported"]),
        ("qnn", RMS_NORM, {"opset": 23}, []),
        ("qnn", "y = LayerNormalization<axis = 1>(x, w)", {"x": "1,4,8"}, ["unsupported"]),
        ("qnn", "y = InstanceNormalization(x, w, b)", {"x": "2,8,4"}, []),
        ("qnn", "y = InstanceNormalization(x, w, b)", {"x": "2,8,4,4,4"}, ["unsupported"]),
        ("qnn", "y = LpNormalization<axis = -1, p = 1>(x)", {}, ["unsupported"]),
        ("qnn", "y = LpNormalization<axis = -1>(x)", {}, []),
        ("directml", GROUP_NORM, {"x": "2,8,4"}, ["unsupported"]),
        ("directml", SIMPLIFIED, {}, []),
        ("directml", LAYER_NORM, {"kind": "bfloat16"}, ["unsupported"]),
        ("directml", LAYER_NORM, {"kind": "float16"}, []),
        ("webgpu", GROUP_NORM, {"x": "2,8,4"}, ["unsupported"]),
        ("webgpu", "y = com.microsoft.SkipLayerNormalization(x, x, w, b)", {"x": "1,4,8"}, []),
        ("tensorrt-10.14", RMS_NORM, {"opset": 23}, ["unsupported"]),
        ("tensorrt-10.15", RMS_NORM, {"opset": 23}, []),
        ("tensorrt-10.9", GROUP_NORM, {"x": "2,8,4"}, []),
        ("jetpack-6", GROUP_NORM, {"x": "2,8,4"}, ["unsupported"]),
        ("tensorrt-11.4", LAYER_NORM, {"opset": 25}, ["unsupported-opset"]),
        ("tensorrt-11.5", LAYER_NORM, {"opset": 25}, []),
        ("tensorrt-11.5", "y = com.microsoft.SkipLayerNormalization(x, x, w, b)", {"x": "1,4,8"}, ["unsupported"]),
        ("jetpack-7", LAYER_NORM, {}, ["unknown-support"]),
        ("triton-26.07", LAYER_NORM, {}, ["unknown-support"]),
    ],
)
def test_norm_node_in_target(
    tmp_path: Path, target: str, body: str, given: dict[str, Any], expected: list[str]
) -> None:
    assert broken(tmp_path, body, target, **given) == expected


def test_finding_names_consequence_form_and_source(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, RMS_NORM, "directml", opset=23)
    assert "the CPU runs the node instead" in problem.message
    assert "It runs as SimplifiedLayerNormalization of onnxruntime." in problem.message
    assert "docs/OperatorKernels.md" in problem.message
    (problem,) = problems(tmp_path, RMS_NORM, "tensorrt-10.9", opset=23)
    assert "TensorRT 10.9 rejects the file" in problem.message
    assert "It runs as several nodes" in problem.message
    (problem,) = problems(tmp_path, LAYER_NORM, "xnnpack")
    assert "No other form of this norm runs there." in problem.message
    (problem,) = problems(tmp_path, LAYER_NORM, "tensorrt-11.4", opset=25)
    assert "TensorRT 11.4 reads opsets up to 24: TensorRT 11.4 rejects the file" in problem.message
    assert "onnx/onnx-tensorrt 11.1, commit 7c51a63a, docs/operators.md" in problem.message


def test_norm_in_several_nodes_is_not_advised_to_become_unsupported_node(tmp_path: Path) -> None:
    onnx.save(model(f"{BIASED} {AFTER}", opset=21), tmp_path / "m.onnx")
    for target, expected in (("nnapi", []), ("coreml-mlprogram", ["decomposed"])):
        (file,) = normdeploy.check([tmp_path / "m.onnx"], target=target).files
        assert [p.rule for p in file.findings] == expected


def test_norm_inside_body_and_function_is_found(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 21, "own": 1]>
        g (float[2,8] x, bool c) => (float[2,8] y, float[2,8] z)
        <float[8] w = {1, 1, 1, 1, 1, 1, 1, 1}> {
            y = own.F(x, w)
            z = If (c) <
                then_branch = t () => (float[2,8] u) { u = LayerNormalization(x, w) },
                else_branch = e () => (float[2,8] v) { v = Identity(x) }>
        }
        <domain: "own", opset_import: ["": 21]> F (a, s) => (r) { r = LayerNormalization(a, s) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    (file,) = normdeploy.check([tmp_path / "m.onnx"], target="nnapi").files
    assert {p.tensor for p in file.findings if p.rule == "unsupported"} == {"u", "r"}


def test_unknown_target_and_both_words_are_refused(tmp_path: Path) -> None:
    onnx.save(model(LAYER_NORM, opset=21), tmp_path / "m.onnx")
    with pytest.raises(InputError, match=r"unknown target 'coreml'; choose one of coreml-mlprogram"):
        normdeploy.check([tmp_path / "m.onnx"], target="coreml")
    with pytest.raises(InputError, match="pass one of them"):
        normdeploy.check([tmp_path / "m.onnx"], target="nnapi", runtime="tensorrt")


def test_command_line_fails_on_unsupported_norm(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(model(LAYER_NORM, opset=21), path)
    run = CliRunner()
    told = run.invoke(app, ["check", str(path), "--target", "nnapi", "--fail-on", "unsupported"])
    assert told.exit_code == 1
    assert "error   unsupported" in told.output
    assert run.invoke(app, ["check", str(path), "--target", "nnapi"]).exit_code == 0
    assert run.invoke(app, ["check", str(path), "--target", "coreml-mlprogram", "--fail-on", "all"]).exit_code == 0
    assert run.invoke(app, ["check", str(path), "--target", "nowhere"]).exit_code == 2
    told = run.invoke(app, ["check", str(path), "--target", "jetpack-7"])
    assert told.exit_code == 0
    assert "note: no source was read that says which TensorRT release JetPack 7 has" in told.output


@pytest.mark.parametrize("form", ["json", "sarif"])
def test_machine_readable_result_has_finding(tmp_path: Path, form: str) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(model(LAYER_NORM, opset=21), path)
    told = CliRunner().invoke(app, ["check", str(path), "--target", "nnapi", "--format", form])
    document = json.loads(told.output)
    if form == "json":
        assert [p["rule"] for p in document["files"][0]["findings"]] == ["unsupported"]
    else:
        assert [r["ruleId"] for r in document["runs"][0]["results"]] == ["unsupported"]
