"""What a comparison may spend: sizes with huge inner tensors, and models that take long."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

import normdeploy
from normdeploy.compare.error_bounds import MOST_RUNS, RUNS, ErrorBounds
from normdeploy.compare.rounding_ties import RoundingTies
from normdeploy.inputs.input_cases import InputCase
from normdeploy.model import Dim, InputSpec
from normdeploy.runtimes import RunResult
from normdeploy.runtimes.rounding_draws import RoundingDraw
from normdeploy.runtimes.rounding_noise import RoundingRunner
from normdeploy.runtimes.torch_runners import Float64Runner
from normdeploy.verbs.verify import compute_budget, optimizer_bisect, precision_trial, verify_function
from normdeploy.verbs.verify.compute_budget import (
    BudgetClock,
    ComparisonBudget,
    InnerSizes,
    drop_large_cases,
    processor_time,
)
from normdeploy.verbs.verify.quantization_budget import CaseBudget
from normdeploy.verbs.verify.reference_models import open_original
from normdeploy.verbs.verify.runtime_candidates import RuntimeCandidate
from normdeploy.verbs.verify.tensor_drift import AT_ONCE
from normdeploy.verbs.verify.weight_audit import audit_weights
from tests.work import count_calls


def file_of(
    nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], shape: tuple[str | int, ...], *, opset: int = 17
) -> onnx.ModelProto:
    """Build a file of one float32 input "x" of ``shape`` and one output "y" of any."""
    tensors = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    x = helper.make_tensor_value_info("x", 1, shape)
    y = helper.make_tensor_value_info("y", 1, [None] * len(shape))
    graph = helper.make_graph(nodes, "g", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def spec_of(*shape: int) -> InputSpec:
    """Build the spec of "x" with a batch "n" before ``shape``."""
    return InputSpec("x", "float32", (Dim("n", 1, 4, 8), *(Dim.from_size(size) for size in shape)))


@pytest.fixture
def wide() -> onnx.ModelProto:
    """A convolution whose result is 64 times as large as its input."""
    rng = np.random.default_rng(0)
    stored = {"w": rng.standard_normal((64, 1, 3)), "v": rng.standard_normal((1, 64, 1)) * 0.1}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1]),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Conv", ["r", "v"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, 1, ["n", 1, 1000]) for name in "xy"]
    weights = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in stored.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_largest_inner_tensor_follows_the_models_dims(wide: onnx.ModelProto) -> None:
    # The model calls the dim "batch", the file "n".
    spec = InputSpec("x", "float32", (Dim("batch", 1, 4, 8), Dim.from_size(1), Dim.from_size(1000)))
    name, elements = InnerSizes(wide, {}, [spec]).largest_tensor({"batch": 3})
    assert name in ("a", "r")
    assert elements == 3 * 64 * 1000


def test_affordable_keeps_one_case_and_names_the_rest(wide: onnx.ModelProto) -> None:
    spec = InputSpec("x", "float32", (Dim("n", 1, 4, 8), Dim.from_size(1), Dim.from_size(1000)))
    cases = [InputCase(f"n={n}", "random", dict, sizes=(("n", n),)) for n in (1, 2, 8)]
    insides = [InnerSizes(wide, {}, [spec])]
    kept, notes = drop_large_cases(cases, {"n": 4}, insides, ComparisonBudget(memory=128 * 2 * 64_000))
    assert [case.name for case in kept] == ["n=1", "n=2"]
    assert "not run at n=8: the tensor" in notes[0]
    assert [case.name for case in drop_large_cases(cases, {"n": 4}, insides, ComparisonBudget(memory=1))[0]] == ["n=1"]


def test_verify_within_little_memory_says_up_to_which_size(wide: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(wide, tmp_path / "wide.onnx")
    verdict = normdeploy.verify(wide, tmp_path / "wide.onnx", max_memory=128 * 2 * 64_000)
    assert verdict
    assert "verified at sizes whose tensors have up to 128,000 elements" in str(verdict)
    # Random inputs, zeros and extremes are drawn at sizes that fit, so most kinds of inputs are still run.
    assert len(verdict.cases) > 10


def test_verify_within_little_time_says_so(wide: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(wide, tmp_path / "wide.onnx")
    verdict = normdeploy.verify(wide, tmp_path / "wide.onnx", max_seconds=1e-9)
    assert verdict
    assert len(verdict.cases) == 1
    assert "within 1e-09 s" in str(verdict)


def test_largest_counts_the_unfolded_windows_of_a_convolution() -> None:
    """A window of 65 x 65 around each of 256 x 256 places is 277 million elements, of a file of 17 KB."""
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[32] * 4)
    file = file_of([node], {"w": np.zeros((1, 1, 65, 65))}, ("n", 1, 256, 256))
    name, elements = InnerSizes(file, {}, [spec_of(1, 256, 256)]).largest_tensor({"n": 2})
    assert name == "y"
    # They are held twice, as sixteenths of what a tensor of that size would be.
    assert elements == 2 * 256 * 256 * 65 * 65 * 2 // 16


def test_largest_counts_the_columns_of_a_transposed_convolution() -> None:
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2])
    file = file_of([node], {"w": np.zeros((4, 8, 33, 33))}, ("n", 4, 64, 64))
    elements = InnerSizes(file, {}, [spec_of(4, 64, 64)]).largest_tensor({"n": 1})[1]
    assert elements == 64 * 64 * 8 * 33 * 33 * 2 // 16


def test_largest_counts_tensors_that_wait_for_a_later_node() -> None:
    parts = [f"t{i}" for i in range(40)]
    nodes = [helper.make_node("Mul", ["x", "c"], [part]) for part in parts] + [helper.make_node("Sum", parts, ["y"])]
    file = file_of(nodes, {"c": np.zeros((1, 1, 100))}, ("n", 10, 1))
    elements = InnerSizes(file, {}, [spec_of(10, 1)]).largest_tensor({"n": 1})[1]
    # The 40 parts, the sum, and the temporaries of one.
    assert elements == (40 + 1 + 8) * 1000 // 16


def test_largest_of_a_chain_is_its_largest_tensor() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    assert InnerSizes(file_of(nodes, {}, ("n", 100)), {}, [spec_of(100)]).largest_tensor({"n": 3})[1] == 300


def test_largest_leaves_weights_out() -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    file = file_of([node], {"w": np.zeros((10, 50_000))}, ("n", 10))
    assert InnerSizes(file, {}, [spec_of(10)]).largest_tensor({"n": 1}) == ("y", 50_000)


def test_verify_counts_what_the_reference_alone_holds(wide: onnx.ModelProto, tmp_path: Path) -> None:
    # Both convolutions of the reference in one: its 64 channels are nowhere in the file.
    w, v = (numpy_helper.to_array(t).astype(np.float64) for t in wide.graph.initializer)
    merged = {"w": np.einsum("oik,poj->pik", w, v)}
    reference = file_of(
        [helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1]), helper.make_node("Conv", ["a", "v"], ["y"])],
        {"w": w, "v": v},
        ("n", 1, 1000),
    )
    file = file_of([helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1])], merged, ("n", 1, 1000))
    onnx.save(file, tmp_path / "merged.onnx")
    verdict = normdeploy.verify(reference, tmp_path / "merged.onnx", max_memory=128 * 2 * 64_000)
    assert "at sizes whose tensors have up to 128,000 elements" in str(verdict)


def test_clock_counts_the_time_of_children() -> None:
    clock = BudgetClock(0.01)
    # A child process that counts for some hundredths of a second.
    subprocess.run([sys.executable, "-S", "-c", "sum(range(3_000_000))"], check=True)
    assert clock.is_over()


def test_bounds_out_of_time_draw_no_more_roundings() -> None:
    drawn = list[int]()

    def rounded(seed: int) -> RunResult:
        drawn.append(seed)
        return {"y": np.zeros(4)}

    eager = {"y": np.zeros(4, np.float32)}
    bounds = ErrorBounds({"y": np.zeros(4)}, eager, rounded, lambda: False)
    assert len(drawn) == 1
    assert (bounds.allowed_error("y", 1.0, np.zeros(4)) < 1).all()
    assert len(drawn) == 1
    # What fails, fails on no fewer than ever.
    assert (bounds.allowed_error("y", 1.0, np.ones(4)) < 1).all()
    assert len(drawn) == RUNS


def test_ties_out_of_time_disturb_the_reference_no_more() -> None:
    drawn = list[int]()

    def perturbed(seed: int) -> RunResult:
        drawn.append(seed)
        return {"y": np.ones(3, np.int64)}

    reference = {"y": np.zeros(3, np.int64)}
    ties = RoundingTies(perturbed, reference, reference, may_draw=lambda: False)
    assert not ties.explain_elements("y", np.ones(3, np.int64)).any()
    assert not drawn


def test_audit_out_of_time_counts_the_weights_that_it_did_not_trace() -> None:
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((8, 8)).astype(np.float32) for name in "abc"}
    nodes = [helper.make_node("MatMul", ["x", "a"], ["y"])]
    model = file_of(nodes, weights, ("n", 8))
    # One weight as it is, and two that are twice the model's.
    file = file_of(nodes, {"a": weights["a"], "b": 2 * weights["b"], "c": 2 * weights["c"]}, ("n", 8))
    clock = BudgetClock(0.0)
    assert audit_weights(open_original(model), file, "file.onnx", clock) == []
    assert clock.weights == {"file.onnx": 2}
    assert "2 weights were not traced" in next(iter(clock.describe_left_out()))


def test_verify_of_a_wrong_file_out_of_time_fails_and_says_that_roundings_are_missing(
    wide: onnx.ModelProto, tmp_path: Path
) -> None:
    wrong = onnx.ModelProto()
    wrong.CopyFrom(wide)
    v = numpy_helper.to_array(wide.graph.initializer[1])
    wrong.graph.initializer[1].CopyFrom(numpy_helper.from_array(v * np.float32(1.01), "v"))
    onnx.save(wrong, tmp_path / "wrong.onnx")
    verdict = normdeploy.verify(wide, tmp_path / "wrong.onnx", max_seconds=1e-9)
    assert not verdict
    assert any("too few roundings were drawn" in note for note in verdict.notes)


def test_audit_looks_for_runs_only_at_numbers_that_the_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    biases = {f"b{i}": rng.standard_normal(64).astype(np.float32) for i in range(20)}
    foreign = {f"b{i}": rng.standard_normal(64).astype(np.float32) for i in range(20)}
    nodes = [helper.make_node("Add", ["x", "b0"], ["y"])]
    searches = list[int]()
    search = np.flatnonzero

    def counted(array: np.ndarray) -> np.ndarray:
        searches.append(array.size)
        return search(array)

    monkeypatch.setattr(np, "flatnonzero", counted)
    audit_weights(open_original(file_of(nodes, biases, ("n", 64))), file_of(nodes, foreign, ("n", 64)), "file.onnx")
    # Of each of 20 x 64 numbers each of 20 vectors was searched.
    assert len(searches) < 100


def test_audit_out_of_time_within_a_weight_counts_it_and_accuses_nobody() -> None:
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((8, 8)).astype(np.float32) for name in "abc"}
    nodes = [helper.make_node("MatMul", ["x", "a"], ["y"])]
    # Half of "a" is altered: its derivation from the others takes many trials.
    altered = weights["a"].copy()
    altered[:4] += 1

    class Short(BudgetClock):
        asked = 0

        def is_over(self) -> bool:
            self.asked += 1
            return self.asked > 20

    clock = Short(60.0)
    file = file_of(nodes, {"a": altered}, ("n", 8))
    assert audit_weights(open_original(file_of(nodes, weights, ("n", 8))), file, "file.onnx", clock) == []
    assert clock.weights == {"file.onnx": 1}


def test_steps_out_of_time_draw_no_more_than_the_first() -> None:
    drawn = list[RoundingDraw]()

    def run(feeds: Mapping[str, np.ndarray], draw: RoundingDraw) -> RunResult:
        drawn.append(draw)
        return {"y": np.ones(4)}

    steps = CaseBudget(run, {}, may_draw=lambda: False)
    first = len(drawn)
    assert (steps.allowed_error("y", ("weights", "activations"), np.zeros(4), np.full(4, 1e-9)) == 0).all()
    assert len(drawn) == first
    # Integers: one draw of each source.
    assert not steps.explain_integers("y", np.full(4, 2)).any()
    assert len(drawn) == first + 2


def test_drift_out_of_time_looks_at_the_first_tensors_and_counts_the_rest(tmp_path: Path) -> None:
    layers = [layer for _ in range(AT_ONCE) for layer in (torch.nn.Linear(4, 4), torch.nn.Tanh())]
    module = torch.nn.Sequential(*layers).eval()
    path = normdeploy.export(module, output=tmp_path / "deep.onnx", inputs=("x:float32[2,4]",)).path
    verdict = normdeploy.verify(module, path, inputs=("x:float32[2,4]",), drift=True, max_seconds=1e-9)
    assert verdict.drift is not None
    assert len(verdict.drift) <= 2 * AT_ONCE
    assert any("tensors were not compared for lack of time" in note for note in verdict.notes)


def body_of(nodes: list[onnx.NodeProto], result: str) -> onnx.GraphProto:
    """Build a body without inputs."""
    return helper.make_graph(nodes, "body", [], [helper.make_tensor_value_info(result, 1, None)])


def test_largest_counts_what_the_larger_body_of_an_if_holds() -> None:
    wide_nodes = [
        helper.make_node("Conv", ["x", "w"], ["many"], pads=[1, 1]),
        helper.make_node("Relu", ["many"], ["still"]),
        helper.make_node("ReduceSum", ["still"], ["a"]),
    ]
    bodies = {
        "then_branch": body_of(wide_nodes, "a"),
        "else_branch": body_of([helper.make_node("ReduceSum", ["x"], ["b"])], "b"),
    }
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["highest"], keepdims=0),
        helper.make_node("Cast", ["highest"], ["condition"], to=onnx.TensorProto.BOOL),
        helper.make_node("If", ["condition"], ["y"], **bodies),
    ]
    file = file_of(nodes, {"w": np.zeros((64, 1, 3))}, ("n", 1, 1000))
    elements = InnerSizes(file, {}, [spec_of(1, 1000)]).largest_tensor({"n": 2})[1]
    assert elements >= 2 * 64 * 1000


def test_largest_counts_bodies_within_bodies_of_loops() -> None:
    inner = body_of([helper.make_node("MatMul", ["column", "row"], ["square"])], "square")
    outer_nodes = [
        helper.make_node("If", ["go"], ["made"], then_branch=inner, else_branch=inner),
        helper.make_node("ReduceSum", ["made"], ["part"], keepdims=0),
        helper.make_node("Identity", ["go"], ["again"]),
    ]
    stated = helper.make_tensor_value_info
    loop = helper.make_graph(
        outer_nodes,
        "loop",
        [stated("turn", onnx.TensorProto.INT64, []), stated("go", onnx.TensorProto.BOOL, [])],
        [stated("again", onnx.TensorProto.BOOL, []), stated("part", onnx.TensorProto.FLOAT, [])],
    )
    nodes = [
        helper.make_node("Transpose", ["x"], ["column"], perm=[0, 2, 1]),
        helper.make_node("Identity", ["x"], ["row"]),
        helper.make_node("Loop", ["turns", ""], ["y"], body=loop),
    ]
    file = file_of(nodes, {}, ("n", 1, 500))
    file.graph.initializer.append(numpy_helper.from_array(np.array(3, np.int64), "turns"))
    assert InnerSizes(file, {}, [spec_of(1, 500)]).largest_tensor({"n": 2})[1] >= 2 * 500 * 500


def test_clock_of_a_budget_counts_what_was_spent_before_the_comparison() -> None:
    assert ComparisonBudget(60.0, begun=processor_time() - 61).start_clock().is_over()
    assert not ComparisonBudget(60.0).start_clock().is_over()


def test_verify_counts_the_tracing_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.Linear(4, 4).eval()
    path = normdeploy.export(module, output=tmp_path / "m.onnx", inputs=("x:float32[2,4]",)).path
    plain = normdeploy.verify(module, path, inputs=("x:float32[2,4]",))
    loaded = verify_function.load_original

    def slow(*args: Any, **kwargs: Any) -> Any:
        end = time.process_time() + 1.1
        while time.process_time() < end:
            pass
        return loaded(*args, **kwargs)

    monkeypatch.setattr(verify_function, "load_original", slow)
    late = normdeploy.verify(module, path, inputs=("x:float32[2,4]",), max_seconds=1)
    assert len(late.cases) < len(plain.cases)
    assert "within 1 s" in str(late)


@pytest.fixture
def roundings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds of all roundings that are drawn."""
    drawn, plain = list[int](), RoundingRunner.run_rounded

    def counted(runner: RoundingRunner, feeds: Any, seed: int, half: Any = None) -> RunResult:
        drawn.append(seed)
        return plain(runner, feeds, seed, half)

    monkeypatch.setattr(RoundingRunner, "run_rounded", counted)
    return drawn


@pytest.mark.parametrize("off", [1e-4, 1.0])
def test_verify_wrong_file_draws_more_roundings_for_one_input_alone(
    off: float, roundings: list[int], tmp_path: Path
) -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).eval(), torch.randn(3, 8)
    file = "net.onnx"
    normdeploy.export(net, x, output=tmp_path / file, inputs="x[b,8]", dims="b=1:3:8")
    assert normdeploy.verify(net, tmp_path / file, x)
    # Some elements are outside the bounds of few draws, so that more are made now and then.
    of_right_file = len(roundings)
    roundings.clear()
    proto = onnx.load(tmp_path / file)
    weight = next(t for t in proto.graph.initializer if list(t.dims) == [4, 8])
    values = numpy_helper.to_array(weight) * np.float32(1 + off)
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    onnx.save(proto, tmp_path / file)
    verdict = normdeploy.verify(net, tmp_path / file, x)
    assert not verdict
    assert len(roundings) <= of_right_file + MOST_RUNS


def test_trial_out_of_one_wrong_input_disturbs_integers_no_more(tmp_path: Path) -> None:
    """An index that is wrong on every input costs the draws of one."""
    drawn, plain = list[int](), RoundingRunner.run_perturbed

    class Index(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).argmax(-1)

    def counted(runner: RoundingRunner, feeds: Any, unit: float, seed: int) -> RunResult:
        drawn.append(seed)
        return plain(runner, feeds, unit, seed)

    net, x, file = Index().eval(), torch.randn(16, 8), tmp_path / "net.onnx"
    normdeploy.export(net, x, output=file)
    proto = onnx.load(file)
    for tensor in proto.graph.initializer:
        values = -numpy_helper.to_array(tensor) if len(tensor.dims) else numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(proto, file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundingRunner, "run_perturbed", counted)
        assert not normdeploy.verify(net, file, x)
    assert len(drawn) <= 16


def test_clock_of_as_much_again_ends_with_the_whole_budget() -> None:
    begun = processor_time() - 20
    assert BudgetClock(60.0, begun=begun).extended_clock().seconds == pytest.approx(40, abs=1)
    assert BudgetClock(30.0, begun=begun).extended_clock().seconds == 30


def test_search_for_an_optimizer_out_of_time_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = BudgetClock(60.0)
    monkeypatch.setattr(BudgetClock, "extended_clock", lambda self: BudgetClock(-1.0))
    monkeypatch.setattr(optimizer_bisect, "list_applied_optimizers", lambda *args: ["Some"])
    subject = SimpleNamespace(path=tmp_path / "net.onnx", label="net.onnx", ops=frozenset())
    candidate = RuntimeCandidate("on", lambda: None, subject, provider="cpu", optimize=True)  # type: ignore[arg-type, return-value]
    optimizer_bisect.blame_optimizer(SimpleNamespace(passes=None), candidate, ["y"], ["seed 0"], clock)  # type: ignore[arg-type]
    assert "optimizer is the cause" in candidate.advice
    assert any(
        "the time limit ended the search for the responsible optimizer" in note for note in clock.describe_left_out()
    )


@pytest.mark.parametrize("seconds", [30.0, 16.0, 7.0, 3.0])
def test_verify_large_model_keeps_to_its_time(seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run in float64 takes some seconds, and more at larger sizes."""
    net, x, file = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).eval(), torch.randn(3, 8), tmp_path / "net.onnx"
    normdeploy.export(net, x, output=file, inputs="x[b,8]", dims="b=1:4:32")
    now, plain = [0.0], Float64Runner.infer

    def slow(runner: Float64Runner, feeds: Any) -> RunResult:
        now[0] += seconds * len(feeds["x"]) / 4
        return plain(runner, feeds)

    monkeypatch.setattr(Float64Runner, "infer", slow)
    for module in (compute_budget, precision_trial, verify_function):
        monkeypatch.setattr(module, "processor_time", lambda: now[0])
    verdict = normdeploy.verify(net, file, x, inputs="x[b,8]", dims="b=1:4:32")
    assert verdict
    assert now[0] <= 60
    assert verdict.limits == ("within 60 s",)


def test_verify_many_outputs_are_judged_in_linear_time(tmp_path: Path) -> None:
    """Each result was looked for among all: of 2,000 outputs that took minutes."""
    steps = [_steps_of_judging(tmp_path, outputs) for outputs in (40, 80)]
    # Each output takes a step at least.
    assert steps[0] >= 40
    # Where each is looked for among all, twice the outputs are nearly four times the steps.
    assert steps[1] <= 2.2 * steps[0]


def _steps_of_judging(folder: Path, outputs: int) -> int:
    """Count the calls, and the rounds of generators, inside verify's own modules."""
    names = ", ".join(f"float[2, 1] y{i}" for i in range(outputs))
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 13]> net (float[2, {outputs}] x) => ({names})'
        f" {{ {', '.join(f'y{i}' for i in range(outputs))} = Split <axis = 1> (x) }}"
    )
    onnx.save(model, folder / "m.onnx")

    def judge() -> None:
        assert normdeploy.verify(folder / "m.onnx", folder / "m.onnx", seeds=1)

    return count_calls(judge, within=Path(compute_budget.__file__).parent)
