"""Wrong files whose own record names the inputs on which they are right, and files that take more sizes than the model
was given."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app
from normdeploy.loading import load
from normdeploy.model import Dim, InputSpec, LoadedModel
from normdeploy.verbs.verify.claimed_inputs import describe_dynamic_inputs, may_narrow, merge_claims


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A saved program with a dynamic batch, which says itself what it takes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)).eval()
    dims = ({0: torch.export.Dim("batch", min=1, max=32)},)
    torch.export.save(torch.export.export(net, (torch.randn(8, 16),), dynamic_shapes=dims), tmp_path / "net.pt2")
    return tmp_path / "net.pt2"


def changed_output(path: Path, nodes: Callable[[str, str], list[onnx.NodeProto]], stored: dict[str, Any]) -> None:
    """Put ``nodes(input, output)`` behind the file's first output, which they read as "inner"."""
    proto = onnx.load(path)
    output, given = proto.graph.output[0].name, proto.graph.input[0].name
    for node in proto.graph.node:
        node.output[:] = ["inner" if name == output else name for name in node.output]
    proto.graph.node.extend(nodes(given, output))
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), name) for name, v in stored.items())
    onnx.save(proto, path)


def with_record(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    proto = onnx.load(path)
    entry = next(p for p in proto.metadata_props if p.key == "normdeploy")
    record = json.loads(entry.value)
    change(record)
    entry.value = json.dumps(record)
    onnx.save(proto, path)


def wrong_where_positive(given: str, output: str) -> list[onnx.NodeProto]:
    """Add the sum of the positive inputs: right where all of them are negative."""
    return [
        helper.make_node("Relu", [given], ["positive"]),
        helper.make_node("ReduceSum", ["positive"], ["sum"], keepdims=1),
        helper.make_node("Add", ["inner", "sum"], [output]),
    ]


@pytest.mark.parametrize("claim", [["input[batch,16]{-1:0}"], ["input[batch=1:2:4,16]{-3:-2}"]])
@pytest.mark.parametrize("verb", [normdeploy.verify, normdeploy.bisect])
def test_values_by_the_tested_file_alone_pass_nothing(program: Path, claim: list[str], verb: Any) -> None:
    file = program.with_name("wrong.onnx")
    normdeploy.export(program, output=file)
    changed_output(file, wrong_where_positive, {})
    with_record(file, lambda record: record["load"].update(inputs=claim))
    assert not verb(program, file)


def wrong_at_odd_batches(given: str, output: str) -> list[onnx.NodeProto]:
    """Add batch mod 2."""
    return [
        helper.make_node("Shape", [given], ["sizes"], start=0, end=1),
        helper.make_node("Mod", ["sizes", "two"], ["odd"]),
        helper.make_node("Cast", ["odd"], ["number"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Add", ["inner", "number"], [output]),
    ]


def test_a_claimed_step_alone_does_not_narrow_the_cases(tmp_path: Path) -> None:
    net, x = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8)).eval(), torch.randn(8, 16)
    program, file = tmp_path / "net.pt2", tmp_path / "net.onnx"
    dims = ({0: torch.export.Dim("batch", min=2, max=32)},)
    torch.export.save(torch.export.export(net, (x,), dynamic_shapes=dims), program)
    normdeploy.export(program, output=file)
    changed_output(file, wrong_at_odd_batches, {"two": np.array([2])})
    with_record(file, lambda record: record["load"].update(inputs=["input[batch,16]"], dims=["batch=2:8:32:2"]))
    assert not normdeploy.verify(program, file)


def test_a_claimed_step_of_a_term_narrows_a_sum(program: Path) -> None:
    model = load(program)

    def with_past(past: Dim) -> LoadedModel:
        mask = InputSpec("mask", "int64", (Dim.sum_of((past, Dim("seq", 1, 4, 8))),))
        return replace(model, inputs=(mask,))

    own, stepped = with_past(Dim("past", 2, 8, 16)), with_past(Dim("past", 2, 8, 16, step=2))
    assert merge_claims(stepped, own, "f.onnx").claimed == stepped.inputs
    assert merge_claims(own, stepped, "f.onnx").claimed == ()


def test_claimed_constants_make_another_model(program: Path) -> None:
    model = load(program)
    claimed = replace(model, constants={"grid": torch.tensor([[1, 4, 4]])})
    other = replace(model, constants={"grid": torch.tensor([[1, 8, 8]])})
    # The file is compared with the model of its own constants, and the record is named as the source.
    assert merge_claims(claimed, other, "f.onnx").word == "the record of f.onnx"
    assert merge_claims(claimed, other, "f.onnx").constants == claimed.constants
    assert merge_claims(claimed, replace(claimed), "f.onnx").word == ""


def test_verify_right_file_with_claims_passes_and_tries_them(program: Path) -> None:
    file = program.with_name("right.onnx")
    normdeploy.export(program, output=file, inputs=["x[batch=1:2:4,16]{-1:0}"])
    verdict = normdeploy.verify(program, file)
    assert verdict
    assert any("as the file claims its inputs" in case for case in verdict.cases)
    assert verdict.word == ""


def test_verify_inputs_that_nobody_else_states_are_named(tmp_path: Path) -> None:
    """Weights alone say nothing of their inputs, so the record's word is all there is, and the verdict says so."""
    torch.save(nn.LayerNorm(8).state_dict(), tmp_path / "weights.pt")
    model, file = tmp_path / "weights.pt", tmp_path / "net.onnx"
    options = {"model": "torch.nn:LayerNorm", "model_args": {"normalized_shape": 8}}
    normdeploy.export(model, output=file, inputs=["x[batch,8]{-1:0}"], dims=["batch=1:2:4"], **options)
    verdict = normdeploy.verify(model, file, **options)
    assert verdict
    assert verdict.word == "the record of net.onnx"
    assert "sizes and values from the record of net.onnx" in str(verdict)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))


def wrong_at_other_batches(given: str, output: str) -> list[onnx.NodeProto]:
    """Add (batch − 4)."""
    return [
        helper.make_node("Shape", [given], ["sizes"], start=0, end=1),
        helper.make_node("Sub", ["sizes", "four"], ["away"]),
        helper.make_node("Cast", ["away"], ["number"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Add", ["inner", "number"], [output]),
    ]


@pytest.mark.parametrize("recorded", [True, False])
def test_verify_live_module_is_run_at_the_dims_of_the_file(tmp_path: Path, recorded: bool) -> None:
    net, x, file = Net().eval(), torch.randn(4, 3, 8, 8), tmp_path / "net.onnx"
    normdeploy.export(net, (x,), output=file, inputs="x[batch,3,8,8]", dims="batch=1:4:16")
    if not recorded:
        proto = onnx.load(file)
        proto.ClearField("metadata_props")
        onnx.save(proto, file)
    assert normdeploy.verify(net, file, (x,))
    changed_output(file, wrong_at_other_batches, {"four": np.array([4])})
    assert not normdeploy.verify(net, file, (x,))


def test_verify_static_program_says_at_which_size_alone(tmp_path: Path) -> None:
    net, x, file = Net().eval(), torch.randn(4, 3, 8, 8), tmp_path / "net.onnx"
    normdeploy.export(net, (x,), output=file, inputs="x[batch,3,8,8]", dims="batch=1:4:16")
    changed_output(file, wrong_at_other_batches, {"four": np.array([4])})
    static = tmp_path / "static.pt2"
    torch.export.save(torch.export.export(net, (x,)), static)
    with_record(file, lambda record: record["load"].clear())
    verdict = normdeploy.verify(static, file)
    assert verdict
    assert "verified at batch=4 only; net.onnx accepts other sizes" in str(verdict)
    command = ["verify", str(static), str(file), "-q"]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert CliRunner().invoke(app, [*command, "--strict"]).exit_code == 1


def test_verify_engine_without_gpu_is_neither_pass_nor_fail(program: Path) -> None:
    plan = program.with_name("net.plan")
    # The first bytes of an engine tell it; nothing after them is read without a GPU.
    plan.write_bytes(b"vtrt" + b"\0" * 64)
    verdict = normdeploy.verify(program, plan)
    assert not verdict
    assert verdict.outcome == "not run"
    assert "neither passed nor failed" in str(verdict)


@pytest.mark.parametrize(
    ("inputs", "dims", "expected"),
    [
        (["x[batch,3]"], [], False),
        (["x[batch,3]{0:1}"], [], True),
        (["x[batch=1:1:1,3]"], [], True),
        ([], ["batch=1:1:1"], True),
        ([], [], False),
    ],
)
def test_may_narrow_names_alone_are_no_claim(inputs: list[str], dims: list[str], expected: bool) -> None:
    assert may_narrow(inputs, dims) is expected


def test_dynamic_specs_names_of_any_kind_become_identifiers() -> None:
    text = '<ir_version: 8, opset_import: ["": 17]> net (float[n, 3] x, int64[m] i) => (float[n, 3] y) { y = Neg(x) }'
    proto = onnx.parser.parse_model(text)
    proto.graph.input[0].name = "x:0"
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "unk-1"
    recorded = {"i": InputSpec("i", "int64", (Dim("seq", 1, 4, 8),))}
    assert describe_dynamic_inputs(proto, recorded) == ["x_0[unk_1,3]", "i[seq]"]


@pytest.mark.parametrize("epsilon", [1e-6, 2.2e-16, 0.0])
def test_verify_default_epsilon_is_that_of_the_models_type(tmp_path: Path, epsilon: float) -> None:
    """torch takes float32's epsilon, 1.2e-7, where RMSNorm states none; its float64 form took 2.2e-16."""
    net, x, file = nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 8)).eval(), torch.randn(3, 16), tmp_path / "net.onnx"
    normdeploy.export(net, x, inputs="x[b,16]", dims="b=1:3:8", output=file)
    assert normdeploy.verify(net, file, x)
    proto = onnx.load(file)
    norm = next(node for node in proto.graph.node if node.op_type == "RMSNormalization")
    next(a for a in norm.attribute if a.name == "epsilon").f = epsilon
    onnx.save(proto, file)
    assert not normdeploy.verify(net, file, x)
