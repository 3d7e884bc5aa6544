"""What the verbs write as JSON is as the schemas in the package say, and the schemas are as the code."""

from __future__ import annotations

import copy
import json
import shutil
import typing
from importlib import resources
from typing import Any

import jsonschema
import numpy as np
import onnx
import pytest
import torch
from typer.testing import CliRunner

from docs.schemas import DOCUMENTS, FOLDER, schemas
from normdeploy.cli.app import app
from normdeploy.reports import report
from normdeploy.runtimes.trt_runner import describe_missing_runtime
from normdeploy.testing import session_report
from normdeploy.verbs.check import check_function
from normdeploy.verbs.package import evidence_bundle
from normdeploy.verbs.prove import proof_result
from normdeploy.verbs.recheck import recheck_function
from tests import engine_files
from tests.packaged import written
from tests.quantized_files import net as quantizable
from tests.quantized_files import weights_alone
from tests.support import LAYER_NORM

VERBS = {
    "export": "report",
    "export in half": "report",
    "export in integers": "report",
    "optimize": "report",
    "inspect": "report",
    "inspect of quantized": "report",
    "inspect of engines": "report",
    "explained": "report",
    "build": "report",
    "verify": "report",
    "bisect": "report",
    "run": "report",
    "bench": "report",
    "bench of norms": "report",
    "package": "package",
    "packaged report": "report",
    "check": "check",
    "prove": "prove",
    "recheck": "recheck",
}
"""What is written -> its schema."""


def schema(name: str) -> Any:
    """As a user reads it from the package."""
    return json.loads(
        resources.files("normdeploy.reports").joinpath("schemas", f"{name}.json").read_text(encoding="utf-8")
    )


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each verb wrote."""
    folder = tmp_path_factory.mktemp("verbs")
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)).eval()
    torch.export.save(torch.export.export(net, (torch.zeros(2, 4),)), folder / "model.pt2")
    written(folder, LAYER_NORM, "hand.onnx")
    found: dict[str, Any] = {}

    def run(name: str, *arguments: str, code: int = 0, file: str = "report.json") -> None:
        written_there = folder / file
        words = [w.replace("@", f"{folder}/") for w in arguments]
        done = CliRunner().invoke(app, [*words, *([] if file != "report.json" else ["--report", str(written_there)])])
        assert done.exit_code == code, f"{name}: {done.output}"
        found[name] = json.loads(written_there.read_text(encoding="utf-8"))

    run("export", "export", "@model.pt2", "-o", "@model.onnx")
    run("export in half", "export", "@model.pt2", "-o", "@half.onnx", "--precision", "fp16")
    np.savez(folder / "samples.npz", input=np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32))
    quantize = ("--quantize", "int8", "--calibrate", "@samples.npz", "--metric", "cosine:0.9")
    run("export in integers", "export", "@model.pt2", "-o", "@int8.onnx", *quantize)
    run("optimize", "optimize", "@hand.onnx", "-o", "@out.onnx")
    run("inspect", "inspect", "@hand.onnx")
    weights_alone(quantizable(), folder)
    run("inspect of quantized", "inspect", "@weights.onnx")
    engine_files.write_model(folder / "named.onnx")
    layers = engine_files.compiled_layers()
    engine_files.save(folder / "e.json", engine_files.info(layers))
    engine_files.save(folder / "times.json", engine_files.profile({layer["Name"]: 0.5 for layer in layers}))
    times = ("--profile-json", "@times.json") * 2
    run("inspect of engines", "inspect", "@e.json", "@e.json", "--onnx", "@named.onnx", *times)
    run("explained", "inspect", "@hand.onnx", "--explain", "y")
    if not describe_missing_runtime("tensorrt-rtx", gpu=False):
        run("build", "build", "@model.onnx", "-o", "@model.engine")
    run("verify", "verify", "@model.pt2", "@model.onnx", "--drift", "--seeds", "1")
    spoiled = onnx.load(folder / "model.onnx")
    for node in spoiled.graph.node:
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                attribute.f = 1.0
    onnx.save(spoiled, folder / "spoiled.onnx")
    run("bisect", "bisect", "@model.pt2", "@spoiled.onnx", "--seeds", "1", code=1)
    run("run", "run", "@model.onnx", "-o", "@result.npz")
    run("bench", "bench", "@hand.onnx", "@out.onnx", "--rounds", "2")
    run("bench of norms", "bench", "@out.onnx", "--norm-impl", "standard,decomposed", "--rounds", "2")
    run("package", "package", "@hand.onnx", "-o", "@bundle", file="bundle/manifest.json")
    found["packaged report"] = json.loads((folder / "bundle" / "report.json").read_text(encoding="utf-8"))
    run("prove", "prove", "@model.onnx", "@spoiled.onnx", code=1)
    run("recheck", "recheck", "@bundle")
    run("check", "check", "@hand.onnx", "--format", "json", "-o", "@checked.json", code=1, file="checked.json")
    shutil.rmtree(folder)
    return found


@pytest.mark.parametrize("name", VERBS)
def test_what_a_verb_writes_fits_its_schema(told: dict[str, Any], name: str) -> None:
    if name not in told:
        pytest.skip("TensorRT-RTX is not installed")
    jsonschema.Draft202012Validator(schema(VERBS[name])).validate(told[name])


def test_every_part_was_written_by_some_verb(told: dict[str, Any]) -> None:
    """Else the schema of a part was held against nothing but null."""
    reports = [document for name, document in told.items() if VERBS[name] == "report"]
    parts = {key for document in reports for key, value in document.items() if value}
    assert parts >= set(schema("report")["properties"]) - (
        {"engine"} if describe_missing_runtime("tensorrt-rtx", gpu=False) else set()
    )
    assert told["bisect"]["bisection"]["faults"]
    assert told["verify"]["parity"]["drift"]
    assert told["check"]["files"][0]["findings"]
    assert told["explained"]["explanations"][0]["way"]


def damaged(document: Any) -> list[Any]:
    """The document without one of its keys, and with a value of another type, for each key of it and of the norms in
    it."""
    made = []
    for key in document:
        for change in ({}, {key: {"a": {}}} if not isinstance(document[key], dict) else {key: 1.5}):
            made.append({k: v for k, v in copy.deepcopy(document).items() if k != key} | change)
    for key in document["norms"][0]:
        spoiled = copy.deepcopy(document)
        del spoiled["norms"][0][key]
        made.append(spoiled)
    return made


def test_schema_refuses_what_no_verb_writes(told: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(schema("report"))
    spoiled = damaged(told["optimize"])
    assert len(spoiled) > 60
    assert not [document for document in spoiled if validator.is_valid(document)]


def test_later_keys_are_allowed(told: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(schema("report")).validate(told["optimize"] | {"a later key": 1})


def test_schemas_are_current() -> None:
    held = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.iterdir()}
    assert held == schemas(), "a type has changed: run python -m docs.schemas"


def test_schemas_are_schemas() -> None:
    for made in schemas().values():
        jsonschema.Draft202012Validator.check_schema(made)


def test_names_are_those_that_the_code_writes() -> None:
    named = [typing.get_args(typing.get_type_hints(document)["schema"])[0] for document in DOCUMENTS.values()]
    schemas_of_code = [
        *(report.SCHEMA, check_function.SCHEMA, proof_result.SCHEMA, recheck_function.SCHEMA),
        *(evidence_bundle.SCHEMA, session_report.SCHEMA),
    ]
    assert named == schemas_of_code
