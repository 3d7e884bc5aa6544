"""Planted faults are found in the module where they are, each with its kind; the folder that is written shows the error
by itself."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import normdeploy
from benchmarks.planted_faults import DIMS, FAULTS, Encoder, Fault, planted, specs
from normdeploy.errors import NormdeployError
from normdeploy.runtimes import named_runners
from normdeploy.runtimes.ort_runner import OrtRunner
from normdeploy.verbs.bisect.counterpart_search import find_counterparts
from normdeploy.verbs.bisect.fault_search import FaultSearch
from normdeploy.verbs.bisect.file_bisection import Bisection
from normdeploy.verbs.verify import runtime_candidates
from normdeploy.verbs.verify.tensor_drift import DriftPoint

SMALL = {"layers": 2, "hidden": 32, "heads": 4, "inner": 64, "vocabulary": 50}
LAYER = 1
EPSILON = next(fault for fault in FAULTS if fault.kind == "epsilon")


def encoder() -> Encoder:
    return Encoder(**SMALL).eval()


def looked_for(model: nn.Module, file: Path, **options: object) -> Bisection:
    return normdeploy.bisect(model, file, inputs=specs(50), dims=DIMS, seeds=1, **options)


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(folder / "reproduce.py")], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def exported() -> onnx.ModelProto:
    return normdeploy.export(encoder(), inputs=specs(50), dims=DIMS).proto


def copied(proto: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(proto.SerializeToString())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind)
def test_a_planted_fault_is_found_where_it_is(fault: Fault, exported: onnx.ModelProto, tmp_path: Path) -> None:
    model, file, folder = encoder(), tmp_path / "planted.onnx", tmp_path / "repro"
    if fault.before is None:
        proto = copied(exported)
        fault.plant(proto, LAYER)
        onnx.save(proto, file)
    else:
        planted(fault, model, LAYER, 50, file)
    found = looked_for(model, file, output=folder)
    assert not found
    (first,) = found.faults
    assert (first.module, first.kind) == (fault.module.format(LAYER), fault.kind)
    assert len(first.nodes) == 1
    assert first.mended
    assert first.widened.mends is (True if fault.kind == "overflow" else None)
    shown = run(folder)
    assert shown.returncode == 1, shown.stderr
    assert first.tensor in shown.stdout
    json.dumps(found.to_json())


def test_nothing_is_found_in_a_right_file(exported: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(exported, tmp_path / "right.onnx")
    found = looked_for(encoder(), tmp_path / "right.onnx", output=tmp_path / "repro")
    assert found
    assert not found.faults
    assert not (tmp_path / "repro").exists()


@pytest.mark.parametrize("lost", [1, None], ids=["one number", "all"])
def test_a_weight_that_is_nan_is_named(lost: int | None, exported: onnx.ModelProto, tmp_path: Path) -> None:
    proto = copied(exported)
    weight = next(t for t in proto.graph.initializer if "mix" in t.name and len(t.dims) == 1)
    values = numpy_helper.to_array(weight).copy()
    values[:lost] = np.nan
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    onnx.save(proto, tmp_path / "nan.onnx")
    (fault,) = looked_for(encoder(), tmp_path / "nan.onnx").faults
    assert fault.kind == "weights"
    assert "nan, but the model has" in fault.cause
    assert f"({lost or values.size} of {values.size} numbers differ)" in fault.cause


def test_two_faults_are_both_found(exported: onnx.ModelProto, tmp_path: Path) -> None:
    proto = copied(exported)
    for fault, layer in ((EPSILON, 0), (next(f for f in FAULTS if f.kind == "weights"), 1)):
        fault.plant(proto, layer)
    onnx.save(proto, tmp_path / "two.onnx")
    found = looked_for(encoder(), tmp_path / "two.onnx")
    assert [(f.module, f.kind, f.mended) for f in found.faults] == [
        ("layers.0.attention_norm", "epsilon", False),
        ("layers.1.mix", "weights", True),
    ]
    assert {r.runtime for r in found.parity.results if not r} == {runtime_candidates.OFF, runtime_candidates.ON}
    assert {f.runtime for f in found.faults} == {runtime_candidates.OFF}  # the optimizer has no part in it


class Healing(nn.Module):
    """Two branches; of the first hardly anything is left at the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * 1e-12 + self.second(x)


def test_an_early_tensor_that_heals_is_not_named(tmp_path: Path) -> None:
    model, file = Healing().eval(), tmp_path / "healing.onnx"
    proto = normdeploy.export(model, inputs=["x:float32[4,8]"]).proto
    for factor, name in ((2.0, "first"), (1.01, "second")):
        (weight,) = (t for t in proto.graph.initializer if name in t.name and "weight" in t.name)
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(factor), weight.name))
    onnx.save(proto, file)
    found = normdeploy.bisect(model, file, inputs=["x:float32[4,8]"], seeds=1)
    assert [f.module for f in found.faults] == ["second"]
    assert any("of first is also wrong" in note for note in found.notes)


@pytest.mark.parametrize(("after", "fault"), [(0.05, True), (0.45, True), (0.55, False), (0.99, False), (2.0, False)])
def test_what_helps_the_output_by_a_hair_is_no_fault(after: float, fault: bool) -> None:
    """A tensor at what its pair has is the fault where the output, off by 1 of 0.1, gets right or half as wrong; less
    is what another value may do by chance."""

    def off(error: float) -> DriftPoint:
        return DriftPoint("", "y", "output", error, 0.0, 0.1, 0.0, "")

    class Held(FaultSearch):
        def __init__(self) -> None:
            self._bench, self._value = SimpleNamespace(held={}, proto=None), None
            self.at_output = off(1.0)
            self._units = SimpleNamespace(round_to_file_type=lambda tensor, value: value)

        def output_error(self) -> DriftPoint:
            assert [*self._bench.held] == ["t"]
            return off(after)

    search = SimpleNamespace(wanted=np.zeros(2))
    hunt = Held()
    assert hunt._mends_output("t", search) is fault
    assert hunt._bench.held == {}


class PreNorm(nn.Module):
    """The sum is read twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.first(x)
        return y + self.second(self.norm(y))


def changed(tmp_path: Path, change: Callable[[onnx.GraphProto], None]) -> Bisection:
    model = PreNorm().eval()
    proto = normdeploy.export(model, inputs=["x:float32[4,8]"]).proto
    change(proto.graph)
    onnx.save(proto, tmp_path / "changed.onnx")
    return normdeploy.bisect(model, tmp_path / "changed.onnx", inputs=["x:float32[4,8]"], seeds=1)


def test_a_residual_that_is_left_out_is_one_fault_whoever_reads_it(tmp_path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        add = next(node for node in graph.node if "x" in node.input and node.op_type == "Add")
        (kept,) = set(add.input) - {"x"}
        add.CopyFrom(onnx.helper.make_node("Identity", [kept], [*add.output], name=add.name))

    (fault,) = changed(tmp_path, change).faults
    assert (fault.kind, fault.operator, fault.mended) == ("left out", "aten.add", True)


def test_a_difference_for_a_sum_is_nothing_left_out(tmp_path: Path) -> None:
    """The sum less one part is the other part, which the model has too."""

    def change(graph: onnx.GraphProto) -> None:
        next(node for node in graph.node if "x" in node.input and node.op_type == "Add").op_type = "Sub"

    (fault,) = changed(tmp_path, change).faults
    assert fault.kind != "left out"
    assert fault.nodes[0].startswith("Sub ")
    assert fault.mended


def test_a_fault_that_the_first_input_does_not_show_is_looked_for_where_it_is(tmp_path: Path) -> None:
    """Values beyond 20 are cut off, and ordinary ones have none."""

    def change(graph: onnx.GraphProto) -> None:
        graph.initializer.extend(numpy_helper.from_array(np.float32(v), n) for v, n in ((-20, "low"), (20, "high")))
        for node in graph.node:
            node.input[:] = ["cut" if name == "x" else name for name in node.input]
        graph.node.insert(0, onnx.helper.make_node("Clip", ["x", "low", "high"], ["cut"], name="cutting"))

    found = changed(tmp_path, change)
    (worst,) = (r.case for r in found.parity.results if r.runtime == runtime_candidates.OFF)
    assert worst != found.parity.cases[0]
    (fault,) = found.faults
    assert (fault.case, fault.runtime) == (worst, runtime_candidates.OFF)
    assert fault.mended


def test_an_output_made_of_a_shape_has_a_node(tmp_path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        graph.node.append(onnx.helper.make_node("Shape", ["x"], ["sizes"]))
        graph.node.append(onnx.helper.make_node("ConstantOfShape", ["sizes"], ["zeros"], name="made"))
        last = next(node for node in graph.node if graph.output[0].name in node.output)
        last.output[0], graph.node[-1].output[0] = "lost", graph.output[0].name

    (fault,) = changed(tmp_path, change).faults
    assert fault.nodes == ("ConstantOfShape made",)


def test_an_output_of_another_name_is_matched_by_its_order(tmp_path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        last = next(node for node in graph.node if graph.output[0].name in node.output)
        last.output[0] = graph.output[0].name = "other"

    found = changed(tmp_path, change)
    assert found
    assert found.faults == ()
    assert not found.not_searched


@pytest.mark.parametrize("opset", [14, 17])
def test_without_module_names_the_values_tell(opset: int, tmp_path: Path) -> None:
    """TorchScript's exporter, the scopes in its names taken away: at opset 14 it takes norms apart."""
    model, file = encoder(), tmp_path / "script.onnx"
    ids = torch.randint(0, 50, (2, 16))
    named = {"input_names": ["ids"], "output_names": ["output"]}
    axes = {name: {0: "batch", 1: "seq"} for name in ("ids", "output")}
    torch.onnx.export(copy.deepcopy(model), (ids,), file, dynamo=False, opset_version=opset, dynamic_axes=axes, **named)
    proto = onnx.load(file)
    for node in proto.graph.node:
        node.name = ""
    if opset == 17:
        node = [n for n in proto.graph.node if n.op_type == "LayerNormalization"][2]
        next(a for a in node.attribute if a.name == "epsilon").f = 1e-3
    else:  # the variance of the third norm over the tokens
        square = [n for n in proto.graph.node if n.op_type == "Pow"][2]
        node = next(n for n in proto.graph.node if square.output[0] in n.input)
        next(a for a in node.attribute if a.name == "axes").ints[0] = 1
    onnx.save(proto, file)
    (first,) = looked_for(model, file).faults
    assert (first.module, first.kind) == ("layers.1.attention_norm", "epsilon" if opset == 17 else "axis")
    assert first.nodes == (node.op_type,)


def test_in_a_file_that_onnxruntime_has_fused(tmp_path: Path) -> None:
    """It leaves the modules of some nodes on others, and has ops that only the evaluator and onnxruntime know."""
    plain = normdeploy.export(
        encoder(), inputs=specs(50), dims=DIMS, runtime="tensorrt"
    ).proto  # residuals as Add, which it joins
    with OrtRunner(plain, saved=tmp_path / "fused.onnx"):
        proto = onnx.load(tmp_path / "fused.onnx")
    node = [n for n in proto.graph.node if n.op_type == "SkipLayerNormalization"][2]
    next(a for a in node.attribute if a.name == "epsilon").f = 1e-3
    onnx.save(proto, tmp_path / "fused.onnx")
    (first,) = looked_for(encoder(), tmp_path / "fused.onnx").faults
    assert (first.module, first.kind) == ("layers.1.attention_norm", "epsilon")
    assert first.nodes == (f"SkipLayerNormalization {node.name}",)


def test_a_kernel_that_loses_digits_is_the_runtimes_fault(tmp_path: Path) -> None:
    """GroupNormalization is E[x²] − E[x]² in onnxruntime: around 3000 nothing is left of it in float32."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)
            nn.init.constant_(self.conv.bias, 3000.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.norm(self.conv(x)))

    normdeploy.export(Net().eval(), inputs=["x:float32[2,3,8,8]"], output=tmp_path / "net.onnx", runtime="tensorrt")
    found = normdeploy.bisect(
        Net().eval(), tmp_path / "net.onnx", inputs=["x:float32[2,3,8,8]"], seeds=1, output=tmp_path / "repro"
    )
    (first,) = found.faults
    assert (first.module, first.wrong, first.kind) == ("norm", "runtime", "accuracy")
    assert first.nodes[0].startswith("GroupNormalization")
    assert run(tmp_path / "repro").returncode == 1


class Meddling(OrtRunner):
    """onnxruntime with an optimizer that makes the epsilon of one LayerNormalization larger."""

    def __init__(self, source: object, *, optimize: bool = True, **options: object) -> None:
        if isinstance(source, onnx.ModelProto):
            proto = copied(source)
        elif isinstance(source, bytes):
            proto = onnx.load_from_string(source)
        else:
            proto = onnx.load(source)  # type: ignore[arg-type]
        for node in proto.graph.node if optimize else ():
            if node.name == "node_layer_norm_2":
                next(a for a in node.attribute if a.name == "epsilon").f = 1e-3
        super().__init__(proto, optimize=optimize, **options)  # type: ignore[arg-type]


def test_what_only_the_optimizer_breaks(
    exported: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_runners, "OrtRunner", Meddling)
    monkeypatch.setattr(runtime_candidates, "OrtRunner", Meddling)
    onnx.save(exported, tmp_path / "model.onnx")
    found = looked_for(encoder(), tmp_path / "model.onnx")
    (first,) = found.faults
    assert (first.runtime, first.kind, first.module) == (runtime_candidates.ON, "optimizer", "layers.1.attention_norm")
    assert first.nodes == ("LayerNormalization node_layer_norm_2",)


def test_the_users_own_inputs(exported: onnx.ModelProto, tmp_path: Path) -> None:
    proto = copied(exported)
    EPSILON.plant(proto, LAYER)
    onnx.save(proto, tmp_path / "planted.onnx")
    np.savez(tmp_path / "in.npz", ids=np.arange(8)[None])
    found = normdeploy.bisect(
        encoder(), tmp_path / "planted.onnx", inputs=specs(50), dims=DIMS, feeds=tmp_path / "in.npz"
    )
    assert found.faults[0].case == str(tmp_path / "in.npz")


def test_a_folder_that_holds_something_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "repro").mkdir()
    (tmp_path / "repro" / "mine").touch()
    with pytest.raises(NormdeployError, match="not an empty folder"):
        looked_for(encoder(), tmp_path / "missing.onnx", output=tmp_path / "repro")
    assert [p.name for p in (tmp_path / "repro").iterdir()] == ["mine"]


def test_values_are_counterparts_where_they_are_no_numbers_too() -> None:
    """A NaN stands where the model has one, an infinity only where the model has the same."""
    held = {"n": np.array([np.nan, 1.0, np.inf])}

    def found(*values: float) -> dict[str, list[str]]:
        return find_counterparts({"t": np.array(values)}, held, {"n": 1e-3})

    assert found(np.nan, 1.0005, np.inf) == {"t": ["n"]}
    assert found(np.nan, 1.002, np.inf) == found(0.0, 1.0, np.inf) == found(np.nan, 1.0, -np.inf) == {}
    assert found(np.nan, np.nan, np.inf) == {}
