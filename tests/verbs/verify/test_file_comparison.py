"""Parity: correct files pass in every type, planted faults fail and are named, what was not run never passes."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from normdeploy.errors import GraphError, InputError
from normdeploy.exporting.exporter import export_to_proto
from normdeploy.loading import from_module
from normdeploy.model import Dim, InputSpec, LoadedModel
from normdeploy.runtimes import RunResult, trt_runner
from normdeploy.runtimes.ort_runner import OrtRunner
from normdeploy.storage.onnx_files import save_onnx
from normdeploy.verbs.verify.comparison_result import Comparison
from normdeploy.verbs.verify.file_choices import ChoiceReader
from normdeploy.verbs.verify.file_comparison import compare_files
from normdeploy.verbs.verify.output_results import COLUMNS, OutputResult
from normdeploy.verbs.verify.runtime_candidates import STEPWISE, NotRun

OFF, ON = "onnxruntime (optimizer off)", "onnxruntime (optimizer on)"


class Net(nn.Module):
    """A small model with a norm, attention, and an answer in integers and one in bools."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(16, 24), nn.Linear(24, 5)
        self.norm = nn.LayerNorm(24, eps=1e-5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.norm(torch.tanh(self.inner(x)))
        h = h + torch.softmax(h @ h.transpose(1, 2) / 5, -1) @ h
        logits = self.outer(h)
        return {"logits": logits, "label": logits.argmax(-1), "sure": logits.max(-1).values > 0.5}


@pytest.fixture(scope="module")
def net() -> LoadedModel:
    return from_module(Net().eval(), inputs=["x:float32[batch=1:3:8,seq=1:6:12,16]"])


@pytest.fixture(scope="module")
def proto(net: LoadedModel) -> onnx.ModelProto:
    return export_to_proto(net)


def verified(model: LoadedModel, proto: onnx.ModelProto, folder: Path, **kwargs: Any) -> Comparison:
    save_onnx(proto, folder / "m.onnx")
    return compare_files(model, folder / "m.onnx", **kwargs)


def of(comparison: Comparison, output: str, runtime: str) -> OutputResult:
    (result,) = (r for r in comparison.results if (r.output, r.runtime) == (output, runtime))
    return result


# ------------------------------------------------------------------ what is right passes


def test_a_correct_file_passes(net: LoadedModel, proto: onnx.ModelProto, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    comparison = verified(net, proto, tmp_path, progress=lambda *step: steps.append(step))
    assert comparison
    assert [(r.output, r.runtime) for r in comparison.results] == [
        (output, runtime) for output in ("logits", "label", "sure") for runtime in ("eager", OFF, ON)
    ]
    for result in comparison.results:
        assert result
        assert result.max_abs_error <= result.allowed or result.near_ties
    logits = of(comparison, "logits", OFF)
    assert 0 < logits.max_abs_error < logits.allowed < 1e-4
    assert logits.dtype == "float32"
    assert (of(comparison, "label", ON).dtype, of(comparison, "label", ON).allowed) == ("int64", 0.0)
    assert steps == [("reference", i, len(comparison.cases)) for i in range(len(comparison.cases))] + [
        ("verify", i, 2) for i in range(2)
    ]
    assert comparison.seconds > 0


def test_the_cases_are_seeds_sizes_small_ones_and_zeros(
    net: LoadedModel, proto: onnx.ModelProto, tmp_path: Path
) -> None:
    comparison = verified(net, proto, tmp_path, seeds=2)
    assert comparison.cases[:7] == (
        "seed 0, batch=3, seq=6",
        "seed 1, batch=3, seq=6",
        "seed 4, batch=1, seq=1",
        "seed 5, batch=5, seq=3",
        "seed 6, batch=8, seq=12",
        "inputs around 0.0001, batch=3, seq=6",
        "zeros, batch=3, seq=6",
    )
    assert [case.partition(",")[0] for case in comparison.cases[7:15]] == [
        *(
            "all negative",
            "all positive",
            "constant",
            "times 100",
            "one outlier",
            "one nan in x",
            "one inf in x",
            "one -inf in x",
        )
    ]
    sizes = {case.partition(", ")[2] for case in comparison.cases}
    assert {f"batch={n}, seq=6" for n in range(1, 9)} | {f"batch=3, seq={n}" for n in range(1, 13)} | {
        "batch=2, seq=2"
    } <= sizes


@pytest.mark.parametrize(
    ("dtype", "limits", "fed"),
    [
        ("float32", (-3.0, -1.0), -1.0),
        ("float32", (2.0, 3.0), 2.0),
        ("float32", (-1.0, 1.0), 0.0),
        ("int64", (-9, -3), -4),  # half-open
        ("int64", (2, 5), 2),
    ],
)
def test_where_zero_is_out_of_range_the_nearest_number_is_fed(
    dtype: str, limits: tuple[float, float], fed: float
) -> None:
    from normdeploy.inputs.input_cases import zero_values

    assert zero_values(InputSpec("x", dtype, (Dim(None, 2, 2, 2),), limits)).tolist() == [fed, fed]


def test_sizes_that_cost_too_much_are_said() -> None:
    from normdeploy.inputs.input_cases import generate_cases

    model = from_module(nn.ReLU().eval(), inputs=["x:float32[batch=1:8:64,seq=8:64:512,16]"])
    cases, notes = generate_cases(model, 1)
    assert [c.name for c in cases if "512" in c.name] == ["seed 6, batch=1, seq=512"]
    assert [c.name for c in cases if "=64," in c.name] == ["seed 5, batch=64, seq=8"]
    assert notes == ["not run at batch=64, seq=512: 524288 input elements, more than 65536"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_type_passes(dtype: str, tmp_path: Path) -> None:
    """LayerNorm alone: of bfloat16 onnxruntime has little else on the CPU."""
    model = from_module(nn.LayerNorm(32).eval().to(getattr(torch, dtype)), inputs=[f"x:{dtype}[batch=1:3:5,32]"])
    comparison = verified(model, export_to_proto(model), tmp_path)
    assert comparison
    result = of(comparison, "output", OFF)
    assert result.dtype == dtype
    assert 0 < result.max_abs_error < result.allowed


def test_the_user_s_own_inputs_are_run_alone(net: LoadedModel, proto: onnx.ModelProto, tmp_path: Path) -> None:
    one = net.samples(5)
    assert verified(net, proto, tmp_path, inputs=one).cases == ("given input 0",)
    assert verified(net, proto, tmp_path, inputs=[one, net.samples(6, {"batch": 1})]).cases == (
        "given input 0",
        "given input 1",
    )
    with pytest.raises(InputError, match=r"given input 0: .* needs the inputs"):
        verified(net, proto, tmp_path, inputs={"y": one["x"]})
    with pytest.raises(InputError, match="nothing to compare on"):
        verified(net, proto, tmp_path, inputs=[])


# ------------------------------------------------------------------ planted faults

Fault = Callable[[onnx.ModelProto], None]


def edited(proto: onnx.ModelProto, fault: Fault) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    fault(copy)
    return copy


def attribute(op: str, name: str, value: Any) -> Fault:
    def fault(proto: onnx.ModelProto) -> None:
        node = next(n for n in proto.graph.node if n.op_type == op)
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])

    return fault


def weight(name: str, index: int, change: Callable[[float], float]) -> Fault:
    def fault(proto: onnx.ModelProto) -> None:
        tensor = next(t for t in proto.graph.initializer if name in t.name)
        array = onnx.numpy_helper.to_array(tensor).copy()
        array.flat[index] = change(array.flat[index])
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))

    return fault


def behind(
    output: str, op: str, becomes: str = "", elem_type: int = onnx.TensorProto.FLOAT, rank: int = 3, **attributes: Any
) -> Fault:
    """One more node before an output, which gets another name where ``becomes`` is given."""

    def fault(proto: onnx.ModelProto) -> None:
        for node in proto.graph.node:
            for names in (node.input, node.output):
                names[:] = [f"{output}_before" if name == output else name for name in names]
        proto.graph.node.append(onnx.helper.make_node(op, [f"{output}_before"], [becomes or output], **attributes))
        value = next(v for v in proto.graph.output if v.name == output)
        value.CopyFrom(onnx.helper.make_tensor_value_info(becomes or output, elem_type, [None] * rank))

    return fault


FAULTS: Mapping[str, tuple[Fault, str]] = {
    "epsilon 1e-5 to 1e-6": (attribute("LayerNormalization", "epsilon", 1e-6), ""),
    "epsilon 1e-5 to 1.1e-5": (attribute("LayerNormalization", "epsilon", 1.1e-5), ""),
    "softmax along another axis": (attribute("Softmax", "axis", 1), ""),
    "a weight off by 1e-3": (weight("inner.bias", 3, lambda w: w * 1.001), ""),
    "a NaN": (weight("outer.bias", 0, lambda w: np.nan), r"nan where the reference is -?\d\.\d{1,8} at \[0, 0, 0\]"),
    "another shape": (
        behind("logits", "Flatten", rank=2),
        r"its shape is \[3, 30\], but the reference's is \[3, 6, 5\]",
    ),
    "another type": (
        behind("logits", "Cast", elem_type=onnx.TensorProto.DOUBLE, to=onnx.TensorProto.DOUBLE),
        "it is float64, but the reference is float32",
    ),
    "a missing output": (behind("logits", "Identity", becomes="other"), "the output is missing"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails(name: str, net: LoadedModel, proto: onnx.ModelProto, tmp_path: Path) -> None:
    fault, said = FAULTS[name]
    comparison = verified(net, edited(proto, fault), tmp_path)
    assert not comparison
    assert of(comparison, "logits", "eager")
    for runtime in (OFF, ON):
        result = of(comparison, "logits", runtime)
        assert result.verdict == "fail"
        assert re.search(said, result.reason) if said else result.max_abs_error > result.allowed
        assert "optimizer is the cause" not in result.reason
    assert any("['other']" in note for note in comparison.notes) == (name == "a missing output")


def test_an_epsilon_is_seen_in_half_precision_too(tmp_path: Path) -> None:
    """Around one, 1e-5 and 1e-6 give the same float16 numbers; the small inputs tell them apart."""
    model = from_module(nn.LayerNorm(32).eval().half(), inputs=["x:float16[4,32]"])
    comparison = verified(model, edited(export_to_proto(model), FAULTS["epsilon 1e-5 to 1e-6"][0]), tmp_path)
    assert not comparison
    assert of(comparison, "output", OFF).case == "inputs around 0.0001"


def test_a_file_that_holds_for_one_size_only(net: LoadedModel, proto: onnx.ModelProto, tmp_path: Path) -> None:
    def fault(proto: onnx.ModelProto) -> None:
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([3, 6, 5]), "fixed"))
        behind("logits", "Reshape")(proto)
        proto.graph.node[-1].input.append("fixed")

    comparison = verified(net, edited(proto, fault), tmp_path)
    result = of(comparison, "logits", OFF)
    assert not result
    assert "does not run the model on these inputs" in result.reason
    assert result.case == "seed 5, batch=1, seq=1"
    assert not of(comparison, "label", OFF)  # what does not run gives nothing


def test_files_of_something_else(net: LoadedModel, proto: onnx.ModelProto, tmp_path: Path) -> None:
    other = from_module(nn.ReLU().eval(), inputs=["z:float32[2]"])
    with pytest.raises(InputError, match=r"has the inputs \['x'\], but the model has \['z'\]"):
        verified(other, proto, tmp_path)
    (tmp_path / "junk.onnx").write_bytes(b"junk" * 9)
    with pytest.raises(GraphError, match="not an ONNX file"):
        compare_files(net, tmp_path / "junk.onnx")


# ------------------------------------------------------------------ who is to blame


class Meddling(OrtRunner):
    """onnxruntime with a fault of its own."""

    meddle: Callable[[Meddling, RunResult], None]

    def infer(self, feeds: Mapping[str, np.ndarray]) -> RunResult:
        result = super().infer(feeds)
        type(self).meddle(self, result)
        return result


@pytest.fixture
def meddle(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Meddling, RunResult], None]], None]:
    def install(function: Callable[[Meddling, RunResult], None]) -> None:
        monkeypatch.setattr(Meddling, "meddle", function, raising=False)
        monkeypatch.setattr(
            importlib.import_module("normdeploy.verbs.verify.runtime_candidates"), "OrtRunner", Meddling
        )

    return install


def test_onnxruntime_s_optimizer_is_named(
    net: LoadedModel, proto: onnx.ModelProto, tmp_path: Path, meddle: Any
) -> None:
    def when_optimized(runner: Meddling, result: RunResult) -> None:
        if runner.name == ON:
            result["logits"][..., 0] += 1e-3

    meddle(when_optimized)
    comparison = verified(net, proto, tmp_path)
    assert not comparison
    assert of(comparison, "logits", OFF)
    assert "onnxruntime's optimizer is the cause" in of(comparison, "logits", ON).reason
    assert of(comparison, "label", ON)
    assert not any(
        "optimizer is the cause" in r.reason for r in comparison.results if r.output != "logits" or r.runtime != ON
    )


class Overflows(nn.Module):
    """Finite, but not on the way there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(x * x * 60000)


def test_a_model_that_overflows_is_told_from_a_file_that_is_wrong(tmp_path: Path, meddle: Any) -> None:
    model = from_module(Overflows().eval(), inputs=["x:float16[4,8]{1.5:2}"])
    comparison = verified(model, export_to_proto(model), tmp_path)  # onnxruntime computes float16 in float32 on the CPU
    assert comparison, "more accurate than the model is no fault"
    eager = of(comparison, "output", "eager")
    assert not eager
    assert re.match(r"inf where the reference is \d{3}\.", eager.reason)
    (note,) = (note for note in comparison.notes if "the model itself exceeds the range of float16" in note)
    assert note.endswith("a file's outputs are not judged at these non-finite elements")

    meddle(lambda runner, result: result["output"].fill(np.inf))
    comparison = verified(model, export_to_proto(model), tmp_path)
    assert not comparison
    assert "eager also fails here" in of(comparison, "output", OFF).reason


def test_nan_and_infinity_may_stand_where_the_reference_has_them(tmp_path: Path, meddle: Any) -> None:
    class Undefined(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(x)

    model = from_module(Undefined().eval(), inputs=["x:float32[4,8]"])
    assert verified(model, export_to_proto(model), tmp_path)

    def other_sign(runner: Meddling, result: RunResult) -> None:
        result["output"][np.isneginf(result["output"])] = np.inf

    meddle(other_sign)
    result = of(verified(model, export_to_proto(model), tmp_path), "output", OFF)
    assert result.reason.startswith("inf where the reference is -inf at [0, 0] (32 of 32 elements differ)")
    assert result.case == "zeros"


# ------------------------------------------------------------------ integers


class Close(nn.Module):
    """The second of three candidates is larger by 1e-8, which float32 can't see: it takes the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, x * 1.00000001, x * 0.5]).argmax(0)


@pytest.fixture
def unread_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The indices of the file's ArgMax are unknown, as those of an engine are."""
    monkeypatch.setattr(ChoiceReader, "read", lambda self, feeds: None)


@pytest.mark.usefixtures("unread_choices")
def test_integers_that_hang_on_a_rounding_are_counted(tmp_path: Path, meddle: Any) -> None:
    model = from_module(Close().eval(), inputs=["x:float32[4,8]{1:2}"])
    comparison = verified(model, export_to_proto(model), tmp_path)
    assert comparison
    for runtime in ("eager", OFF, ON):
        assert of(comparison, "output", runtime).near_ties == 5 * 32  # all cases: what is nearest to zero is one
        assert "160 near-ties" in of(comparison, "output", runtime).row()[5]

    def third(runner: Meddling, result: RunResult) -> None:
        result["output"][1, 2] = 2

    meddle(third)
    result = of(verified(model, export_to_proto(model), tmp_path), "output", OFF)
    assert not result
    assert result.reason.startswith(
        "2 where the reference is 1 at [1, 2] (1 of 32 elements differ), and no rounding explains it"
    )


@pytest.mark.usefixtures("unread_choices")
def test_a_tie_that_eager_happens_to_get_right_is_found_by_disturbing_the_reference(
    tmp_path: Path, meddle: Any
) -> None:
    class Compare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, 1.0 + 2.0**-23, 1.001]))  # a thousandth is no rounding

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x[:, None] * self.weight).argmax(-1)

    model = from_module(
        Compare().eval(), inputs=["x:float32[6]{-2:-1}"]
    )  # negative: the smallest weight wins, by one unit

    def flip_to(choice: int) -> Comparison:
        meddle(lambda runner, result: result["output"].__setitem__(0, choice))
        return verified(model, export_to_proto(model), tmp_path)

    near = flip_to(1)
    assert near
    assert of(near, "output", OFF).near_ties > 0
    assert of(near, "output", "eager").near_ties == 0
    assert not flip_to(2)


# ------------------------------------------------------------------ what was not run


def test_what_was_not_run_is_said_and_never_passes(
    net: LoadedModel, proto: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        importlib.import_module("normdeploy.verbs.verify.runtime_candidates"),
        "explain_missing_cuda",
        lambda: "no GPU: none here",
    )
    monkeypatch.setattr(trt_runner, "explain_missing_gpu", lambda: "no GPU: none here")
    assert verified(net, proto, tmp_path).not_run == (
        NotRun("onnxruntime CUDA", "no GPU: none here"),
        NotRun("TensorRT", "no engine was passed"),
    )
    (tmp_path / "m.engine").write_bytes(b"vtrt and more")
    comparison = verified(net, proto, tmp_path, engines=[tmp_path / "m.engine"])
    missed = NotRun("TensorRT-RTX (m.engine)", "no GPU: none here", "m.engine")
    assert missed in comparison.not_run
    assert missed.runtime not in {r.runtime for r in comparison.results}
    assert ("m.engine", "", missed.runtime, "", "", "", "not run: no GPU: none here", "") in comparison.table()


def test_an_engine_is_run_within_its_profile(
    net: LoadedModel, proto: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands in for the engine is onnxruntime: there is no GPU in CI."""

    class Engine(OrtRunner):
        largest = 5

        def __init__(self, path: Path) -> None:
            super().__init__(path.with_suffix(".onnx"))

        def input_dtypes(self) -> dict[str, np.dtype]:
            return {"x": np.dtype(np.float32)}

        def float_types(self) -> set[str]:
            return {"float32"}

        def accepts_shapes(self, feeds: Mapping[str, np.ndarray]) -> bool:
            return len(feeds["x"]) <= self.largest

    candidates = importlib.import_module("normdeploy.verbs.verify.runtime_candidates")
    monkeypatch.setattr(candidates, "TrtRunner", Engine)
    monkeypatch.setattr(candidates, "describe_missing_runtime", lambda runtime: "")
    (tmp_path / "m.engine").write_bytes(b"vtrt and more")
    name = "TensorRT-RTX (m.engine)"
    comparison = verified(net, proto, tmp_path, engines=[tmp_path / "m.engine"])
    assert of(comparison, "logits", name)
    told = rf"{re.escape(name)}: 4 of \d+ cases are outside the engine's profile and were not run"
    assert any(re.fullmatch(told, note) for note in comparison.notes)

    monkeypatch.setattr(Engine, "largest", 0)
    comparison = verified(net, proto, tmp_path, engines=[tmp_path / "m.engine"])
    assert name not in {r.runtime for r in comparison.results}
    assert (
        NotRun(
            name,
            "all cases are outside the engine's profile; build it for the sizes that the model accepts",
            "m.engine",
        )
        in comparison.not_run
    )


def test_where_nothing_but_eager_ran_nothing_is_shown(tmp_path: Path) -> None:
    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.elu(x)

    model = from_module(Double().eval(), inputs=["x:float64[2,4]"])
    comparison = verified(model, export_to_proto(model), tmp_path)
    assert {r.runtime for r in comparison.results} == {"eager"}
    assert all(comparison.results)
    assert not comparison
    assert [m.runtime for m in comparison.not_run if "Could not find an implementation" in m.reason] == [OFF, ON]
    assert "no runtime could run m.onnx: nothing is known about it" in comparison.notes


def test_a_bfloat16_file_is_judged_node_by_node_where_the_cpu_has_no_kernel(tmp_path: Path) -> None:
    model = from_module(nn.Linear(4, 4).eval().bfloat16(), inputs=["x:bfloat16[2,4]"])
    proto = export_to_proto(model)
    comparison = verified(model, proto, tmp_path)
    assert comparison
    assert {r.runtime for r in comparison.results} == {"eager", STEPWISE}
    assert [m.runtime for m in comparison.not_run if "Could not find an implementation" in m.reason] == [OFF, ON]

    weight = next(t for t in proto.graph.initializer if len(t.dims) == 2)
    array = numpy_helper.to_array(weight).astype(np.float32)
    array[1, 2] += 0.1
    weight.CopyFrom(numpy_helper.from_array(array.astype(ml_dtypes.bfloat16), weight.name))
    assert not verified(model, proto, tmp_path)


def test_a_file_that_onnxruntime_refuses_fails(tmp_path: Path) -> None:
    model = from_module(nn.Conv2d(2, 2, 1).eval().bfloat16(), inputs=["x:bfloat16[1,2,3,3]"])
    proto = export_to_proto(model)
    # bfloat16 convolutions begin at opset 22.
    proto.opset_import[0].version = 21
    comparison = verified(model, proto, tmp_path)
    assert not comparison
    assert "invalid model" in of(comparison, "output", OFF).reason


# ------------------------------------------------------------------ the account


def test_the_account_is_plain(net: LoadedModel, proto: onnx.ModelProto, tmp_path: Path) -> None:
    comparison = verified(net, proto, tmp_path)
    document = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    assert document["ok"] is True
    assert document["rule"] == {"multiple": 4.0, "most_ratio": 8.0, "most_runs": 48, "reference": "float64 reference"}
    assert len(document["results"]) == len(comparison.results) == 9
    assert {len(row) for row in comparison.table()} == {len(COLUMNS)}
    assert len(comparison.table()) == 9 + len(comparison.not_run)
