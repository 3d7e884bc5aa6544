"""The whole model before and after: what goes wrong behind every certificate is found, blamed on its rewrite and taken
back."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

import normdeploy
from normdeploy.errors import CertificateError, ExportError
from normdeploy.findings.records import Finding
from normdeploy.graphs.simplification import SimplifiedModel
from normdeploy.rewriting import model_comparison, norm_optimizer, perturbed_model, rewrite_rollback
from normdeploy.rewriting.rewrite_ledger import RewriteOptions, RewriteStep
from normdeploy.verbs.arguments.export_result import ExportResult
from tests.support import parsed, run_onnxruntime

NORM = """
    m{i} = ReduceMean(x{i}, axes) d{i} = Sub(x{i}, m{i}) q{i} = Mul(d{i}, d{i}) v{i} = ReduceMean(q{i}, axes)
    e{i} = Add(v{i}, eps) r{i} = Sqrt(e{i}) n{i} = Div(d{i}, r{i})"""
Edit = Callable[[onnx.ModelProto, onnx.NodeProto], None]


def norms(count: int, shape: str = "batch, seq, 16") -> onnx.ModelProto:
    """Layer norms by hand, one behind the other, a Tanh between."""
    body = " ".join(NORM.format(i=i) + f" x{i + 1} = Tanh(n{i})" for i in range(count))
    return onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 21]>
        net (float[{shape}] x0) => (float[{shape}] x{count})
        <int64[1] axes = {{-1}}, float eps = {{0.00001}}>
        {{ {body} }}""")


def net(text: str, constants: Mapping[str, np.ndarray] | None = None) -> onnx.ModelProto:
    return parsed(text, **(constants or {}))


def other_epsilon(_: onnx.ModelProto, node: onnx.NodeProto) -> None:
    next(a for a in node.attribute if a.name == "epsilon").f = 0.1


def unknown_op(_: onnx.ModelProto, node: onnx.NodeProto) -> None:
    node.op_type = "NoSuchNormalization"


def wrong_beyond_20(proto: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """A second axis of more than 20 is zeroed."""
    y = node.output[0]
    node.output[0] = f"{y}_right"
    proto.graph.initializer.append(numpy_helper.from_array(np.array(20), f"{y}_most"))
    made = [
        helper.make_node("Shape", [node.input[0]], [f"{y}_shape"], start=1, end=2),
        helper.make_node("LessOrEqual", [f"{y}_shape", f"{y}_most"], [f"{y}_fits"]),
        helper.make_node("Cast", [f"{y}_fits"], [f"{y}_one"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", [f"{y}_right", f"{y}_one"], [y]),
    ]
    place = next(i for i, n in enumerate(proto.graph.node) if n.output[0] == node.output[0])
    for i, new in enumerate(made):
        proto.graph.node.insert(place + 1 + i, new)


def plant(monkeypatch: pytest.MonkeyPatch, tensors: Collection[str], edit: Edit) -> None:
    """Let the fused nodes that make ``tensors`` be written with a mistake, behind the back of every proof."""
    right = norm_optimizer.optimize_with_steps

    def wrong(proto: onnx.ModelProto, wanted: RewriteOptions, strict: bool = False) -> rewrite_rollback.Made:
        out, summary, taken = right(proto, wanted, strict)
        graphs = [out.graph, *(a.g for n in out.graph.node for a in n.attribute if a.HasField("g"))]
        for node in [n for g in graphs for n in g.node if n.op_type == "LayerNormalization" and n.output[0] in tensors]:
            edit(out, node)
        return out, summary, taken

    monkeypatch.setattr(norm_optimizer, "optimize_with_steps", wrong)


def statuses(found: ExportResult) -> dict[str, str]:
    return {f.tensor: f.status for f in found.summary.findings}


@pytest.mark.parametrize("edit", [other_epsilon, unknown_op, wrong_beyond_20])
@pytest.mark.parametrize("bad", [{"n0"}, {"n3"}, {"n1", "n4"}, {"n0", "n1", "n2", "n3", "n4"}])
def test_the_rewrite_to_blame_is_taken_back(bad: set[str], edit: Edit, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, bad, edit)
    proto = norms(5)
    result = normdeploy.optimize(proto)
    assert statuses(result) == {f"n{i}": "undone" if f"n{i}" in bad else "fused" for i in range(5)}
    for finding in result.summary.findings:
        if finding.tensor in bad:
            assert "without this rewrite the difference is gone" in finding.reason
            assert "'x5'" in finding.reason or "but not the rewritten one" in finding.reason
    x = np.random.default_rng(0).standard_normal((2, 33, 16), np.float32)
    before, after = (run_onnxruntime(p, {"x0": x})[0] for p in (proto, result.proto))
    assert np.abs(before - after).max() < 1e-5  # five norms and Tanhs of numbers below 4, some twenty roundings each


def test_more_than_a_few_are_taken_back_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """From `SEARCHES` on all are left out at once: each search makes the model several times."""
    count = rewrite_rollback.SEARCHES + 4
    plant(monkeypatch, {f"n{i}" for i in range(count)}, other_epsilon)
    assert set(statuses(normdeploy.optimize(norms(count))).values()) == {"undone"}


def test_strict_makes_it_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, {"n1"}, other_epsilon)
    with pytest.raises(CertificateError, match=r"1 of 3 rewrites.*'n1'.*taken back"):
        normdeploy.optimize(norms(3), strict=True)


def test_a_rewrite_in_a_body_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = norms(2, "batch, 16").graph
    branches = []
    for name in ("then_branch", "else_branch"):
        body = onnx.GraphProto(name=name, node=inner.node, initializer=inner.initializer, output=inner.output)
        for node in body.node:
            for i, tensor in enumerate(node.output):
                if name == "else_branch" and tensor != "x2":
                    node.output[i] = f"{tensor}_else"
            for i, tensor in enumerate(node.input):
                if name == "else_branch" and tensor not in ("x0", "axes", "eps"):
                    node.input[i] = f"{tensor}_else"
        branches.append(body)
    gate = helper.make_tensor_value_info("gate", onnx.TensorProto.BOOL, [])
    node = helper.make_node("If", ["gate"], ["y"], name="switch", then_branch=branches[0], else_branch=branches[1])
    graph = helper.make_graph(
        [node], "net", [inner.input[0], gate], [helper.make_tensor_value_info("y", 1, ["batch", 16])]
    )
    plant(monkeypatch, {"n1", "n1_else"}, other_epsilon)
    result = normdeploy.optimize(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    found = statuses(result)
    assert found["n0"] == found["n0_else"] == "fused"
    assert "undone" in (found["n1"], found["n1_else"])  # the gate is drawn: one branch may not have been run


def test_without_a_step_to_blame_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right = norm_optimizer.optimize_with_steps

    def wrong(proto: onnx.ModelProto, wanted: RewriteOptions, strict: bool = False) -> rewrite_rollback.Made:
        out, summary, taken = right(proto, wanted, strict)
        next(n for n in out.graph.node if n.op_type == "Tanh").op_type = "Sigmoid"
        return out, summary, taken

    monkeypatch.setattr(norm_optimizer, "optimize_with_steps", wrong)
    with pytest.raises(ExportError, match=r"output 'x2' is .* None of the rewrites causes this"):
        normdeploy.optimize(norms(2))


class ByHand(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)


def test_cleaning_up_may_be_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(proto: onnx.ModelProto, samples: Any = (), **_: Any) -> SimplifiedModel:
        copy = onnx.ModelProto()
        copy.CopyFrom(proto)
        for node in copy.graph.node:
            if node.op_type == "LayerNormalization":
                other_epsilon(copy, node)
        return SimplifiedModel(copy)

    monkeypatch.setattr("normdeploy.graphs.simplification.simplify", wrong)
    result = normdeploy.export(ByHand().eval(), (torch.randn(2, 16),), inputs=["x:float32[batch,16]"])
    assert [f.status for f in result.summary.findings] == ["fused"]
    assert any("not simplified: at batch=" in note for note in result.notes)
    epsilons = [a.f for n in result.proto.graph.node for a in n.attribute if a.name == "epsilon"]
    assert epsilons == [np.float32(1e-5)]


def test_an_export_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ByHand().eval()
    (tensor,) = [f.tensor for f in normdeploy.export(model, (torch.randn(2, 16),)).summary.findings]
    plant(monkeypatch, {tensor}, other_epsilon)
    result = normdeploy.export(model, (torch.randn(2, 16),))
    assert [f.status for f in result.summary.findings] == ["undone"]
    assert "LayerNormalization" not in {n.op_type for n in result.proto.graph.node}


def test_for_another_runtime_it_need_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, {"n0"}, unknown_op)
    result = normdeploy.optimize(norms(1), runtime="tensorrt")
    assert statuses(result) == {"n0": "fused"}
    assert any("was not compared: onnxruntime can load the original model but not" in note for note in result.notes)


# ------------------------------------------------------------------ what can't be compared


def test_sizes_at_which_the_model_does_not_run_are_left_out() -> None:
    proto = net("n (float[N] x) => (float[A, 7] y) <int64[2] to = {-1, 7}> { z = Reshape(x, to) y = Tanh(z) }")
    (note,) = normdeploy.optimize(proto).notes
    assert note.startswith("the whole model was compared at N=7, but not at N=1 (the model failed to run: ")
    assert "N=33" in note


@pytest.mark.parametrize(
    ("proto", "why"),
    [
        (
            net("n (float[N] x) => (float[A, 64] y) <int64[2] to = {-1, 64}> { z = Reshape(x, to) y = Tanh(z) }"),
            "can't be run at any",
        ),
        (
            net("n (seq(float[N]) x) => (float[N] y) <int64 i = {0}> { z = SequenceAt(x, i) y = Tanh(z) }"),
            "is not a numeric tensor",
        ),
        (net("n (float[N] x) => (float[N] y) { y = com.nobody.Twist(x) }"), "can't load the original model"),
    ],
)
def test_what_can_not_be_compared_is_said(proto: onnx.ModelProto, why: str) -> None:
    if "can't load" in why:
        proto.opset_import.append(helper.make_opsetid("com.nobody", 1))
    assert any(why in note for note in normdeploy.optimize(proto).notes)


def test_above_a_size_it_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, {"n0"}, other_epsilon)
    result = normdeploy.optimize(norms(1), compare_limit=0)
    assert statuses(result) == {"n0": "fused"}
    compared, cleaned = result.notes
    assert compared == "the whole model was not compared with the original: its weights exceed compare_limit"
    assert cleaned.startswith("the graph was not cleaned up")
    held = 8 + 4  # bytes: the axis, int64, and epsilon, float32
    assert normdeploy.optimize(norms(1), compare_limit=held - 1).notes == result.notes
    assert statuses(normdeploy.optimize(norms(1), compare_limit=held)) == {"n0": "undone"}


def without_the_largest() -> None:
    """All dims at their largest at once are left out, and each is tried by itself."""
    (note,) = normdeploy.optimize(norms(1)).notes
    compared, left = note.split(", but not at ")
    assert compared.endswith("batch=1, seq=1; batch=7, seq=7; batch=33, seq=1; batch=1, seq=33")
    assert left == "batch=33, seq=33 (17,424 input elements would take too long)"


def test_a_size_that_would_take_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_comparison, "_LARGEST", 2000)
    without_the_largest()


def test_a_run_that_takes_longer_than_small_ones_promised_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    real = model_comparison.PerturbableModel.run_perturbed

    def slow(
        self: model_comparison.PerturbableModel,
        feeds: dict[str, np.ndarray],
        *args: Any,
        patience: float = 60.0,
        **more: Any,
    ) -> list[Any]:
        if next(iter(feeds.values())).shape[:2] == (33, 33):
            time.sleep(patience)
            raise RuntimeError("Exiting due to terminate flag being set to true.")
        return real(self, feeds, *args, patience=patience, **more)

    monkeypatch.setattr(model_comparison, "_LATER", 0.05)
    monkeypatch.setattr(model_comparison.PerturbableModel, "run_perturbed", slow)
    without_the_largest()


def test_a_size_for_which_there_is_no_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models ran there; looking at their results in float64 takes more than they did."""
    compared = model_comparison.BaselineModel.compare_outputs

    def full(self: model_comparison.BaselineModel, seen: model_comparison.BaselineRun, outputs: Sequence[Any]) -> str:
        if seen.sizes["batch"] == 33:
            raise MemoryError
        return compared(self, seen, outputs)

    plant(monkeypatch, {"n0"}, other_epsilon)
    monkeypatch.setattr(model_comparison.BaselineModel, "compare_outputs", full)
    result = normdeploy.optimize(norms(2))
    assert statuses(result) == {"n0": "undone", "n1": "fused"}
    assert result.notes == ("the whole model was not compared at batch=33, seq=33: not enough memory",)


def test_what_the_file_records_of_its_inputs_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn from 0 and 1 alone, two of the embedding's rows would ever be seen."""
    seen: list[int] = []
    model = torch.nn.Sequential(torch.nn.Embedding(50, 16), ByHand()).eval()
    ids = torch.randint(0, 50, (2, 5))
    exported = normdeploy.export(model, (ids,), inputs=["ids:int64[batch=1:2:5,n=2:5:9]"])
    run = perturbed_model.PerturbableModel.run_perturbed

    def spied(
        self: perturbed_model.PerturbableModel, feeds: Mapping[str, np.ndarray], *rest: Any, **named: Any
    ) -> list[Any]:
        seen.extend(int(v) for value in feeds.values() for v in value.reshape(-1))
        return run(self, feeds, *rest, **named)

    monkeypatch.setattr(perturbed_model.PerturbableModel, "run_perturbed", spied)
    normdeploy.optimize(exported.proto)
    assert max(seen) > 40


def test_a_loop_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perturbed_model.PerturbableModel.run_perturbed, "__defaults__", (None, 0.0, 0.5))
    body = onnx.parser.parse_graph(
        "b (int64 i, bool c, float[2] s) => (bool d, float[2] t) { d = Identity(c) t = Tanh(s) }"
    )
    proto = net(
        "n (float[2] x) => (float[2] y) <int64 many = {9000000000000000000}, bool on = {1}> { y = Loop(many, on, x) }"
    )
    proto.graph.node[0].attribute.append(helper.make_attribute("body", body))
    assert any("can't be run at any of the sizes" in note for note in normdeploy.optimize(proto).notes)


def test_a_tensor_without_measure_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """At N = 33 the product would have 10^9 elements; at 1 and 7 the model is compared."""
    proto = net("n (float[N, 5600] x) => (float[N, N] y) { t = Transpose(x) y = MatMul(x, t) }")
    proto.graph.node[0].input[0], proto.graph.node[1].input[:] = "x", ["x", "t"]
    wide = net("n (float[M, 1] x) => (float[M, 40000] y) <int64[2] to = {1, 40000}> { y = Expand(x, to) }")
    monkeypatch.setattr(model_comparison, "_INNER", 2**20)  # so that what is made takes no time worth speaking of
    (note,) = normdeploy.optimize(wide).notes
    assert note.startswith("the whole model was compared at M=1; M=7, but not at M=33 (tensor 'y' would have more than")
    assert normdeploy.optimize(proto).notes == ()


def test_a_record_that_can_not_be_read_is_no_error() -> None:
    proto = norms(1)
    proto.metadata_props.add(key="normdeploy", value='{"record": {"schema": 999}, "hmac": ""}')
    result = normdeploy.optimize(proto)
    assert statuses(result) == {"n0": "fused"}
    assert result.notes == ()


# ------------------------------------------------------------------ what is a difference, and what is none


def difference(before: onnx.ModelProto, after: onnx.ModelProto) -> str:
    found = model_comparison.BaselineModel(before, ()).find_difference(after)
    return "" if found is None else found.message


# ------------------------------------------------------------------ PyTorch's outputs in place of the original model's

SCALED = "n (float[batch, 8] x) => (float[batch, 8] y) { y = Mul(x, s) }"


def scaled(factor: float) -> onnx.ModelProto:
    return net(SCALED, {"s": np.full(8, factor, np.float32)})


def known_run(batch: int, factor: float, seconds: float = 1.0) -> model_comparison.KnownRun:
    """A run in PyTorch of a model that multiplies by ``factor``, which takes ``seconds``."""
    x = np.random.default_rng(5).standard_normal((batch, 8)).astype(np.float32)
    return model_comparison.KnownRun({"batch": batch}, {"x": x}, [x * np.float32(factor)], seconds)


def find_difference(
    before: onnx.ModelProto, after: onnx.ModelProto, *known: model_comparison.KnownRun
) -> model_comparison.ModelDifference | None:
    specs = model_comparison.comparison_input_specs(before)
    return model_comparison.BaselineModel(before, specs, known).find_difference(after)


def inputs_of_runs(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Record the inputs of every run in onnxruntime."""
    fed: list[np.ndarray] = []
    run = perturbed_model.PerturbableModel.run_perturbed

    def record(self: Any, feeds: Mapping[str, np.ndarray], *args: Any, **options: Any) -> list[Any]:
        fed.append(feeds["x"])
        return run(self, feeds, *args, **options)

    monkeypatch.setattr(perturbed_model.PerturbableModel, "run_perturbed", record)
    return fed


def test_original_does_not_run_where_the_rewritten_model_has_pytorch_s_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    fed, first, last, after = inputs_of_runs(monkeypatch), known_run(1, 3.0), known_run(33, 3.0), scaled(3.0)
    assert find_difference(scaled(3.0), after, first, last) is None
    # The original runs at the first sizes, because its time decides which sizes are compared.
    assert sum(x is first.feeds["x"] for x in fed) > 1
    assert sum(x is last.feeds["x"] for x in fed) == 1
    for known in (first, last):
        assert known.file is after
        np.testing.assert_allclose(known.file_outputs[0], known.outputs[0], rtol=1e-6)


def test_wrong_rewrite_at_the_largest_size_is_found_where_pytorch_ran() -> None:
    text = "n (float[batch, 8] x) => (float[batch, 8] y) { f = Shape <start = 0, end = 1> (x) g = Greater(f, n) "
    after = net(text + "c = Cast <to = 1> (g) d = Mul(c, e) t = Add(s, d) y = Mul(x, t) }", WRONG_ABOVE_20)
    known = known_run(33, 3.0)
    found = find_difference(scaled(3.0), after, known)
    assert found is not None
    assert found.sizes == {"batch": 33}
    assert "in the original model" in found.message


WRONG_ABOVE_20 = {"n": np.array([20]), "e": np.float32([0.01]), "s": np.full(8, 3, np.float32)}


def test_wrong_export_is_no_fault_of_the_rewrites() -> None:
    """Both models differ from PyTorch, but not from each other. The check of export refuses the file later."""
    assert find_difference(scaled(2.0), scaled(2.0), known_run(1, 3.0), known_run(33, 3.0)) is None


def test_short_run_in_pytorch_replaces_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fed, known = inputs_of_runs(monkeypatch), known_run(33, 3.0, seconds=0.0)
    assert find_difference(scaled(3.0), scaled(3.0), known) is None
    assert not any(x is known.feeds["x"] for x in fed)
    assert known.file is None


# ------------------------------------------------------------------ bounds


def test_each_row_has_a_bound_of_its_own() -> None:
    """The first row is of the size of 1e6: relative to that, an error of 1e-3 in the second would be rounding."""
    scale = np.array([[1e6], [1.0]], np.float32)
    text = "n (float[2, 8] x) => (float[2, 8] y) { y = Mul(x, s) }"
    off = scale.copy()
    off[1] *= 1 + 1e-3
    assert difference(net(text, {"s": scale}), net(text, {"s": scale})) == ""
    assert "output 'y' is" in difference(net(text, {"s": scale}), net(text, {"s": off}))


def test_what_is_not_finite_stays_so() -> None:
    log = net("n (float[4, 64] x) => (float[4, 64] y) { y = Log(x) }")
    hidden = net(
        "n (float[4, 64] x) => (float[4, 64] y) { z = Relu(x) e = Add(z, c) y = Log(e) }", {"c": np.float32([1e-30])}
    )
    other = net(
        "n (float[4, 64] x) => (float[4, 64] y) { z = Relu(x) y = Log(z) }"
    )  # -Inf where NaN was counts as the same
    assert "in the original model" in difference(log, hidden)
    assert "in the original model" in difference(hidden, log)
    assert difference(log, other) == ""


def test_other_shapes_and_types_are_differences() -> None:
    plain = net("n (float[N, 4] x) => (float[N, 4] y) { y = Tanh(x) }")
    assert "float32" in difference(plain, net("n (float[N, 4] x) => (float[4, N] y) { z = Tanh(x) y = Transpose(z) }"))
    cast = net("n (float[N, 4] x) => (double[N, 4] y) { z = Tanh(x) y = Cast <to: int = 11> (z) }")
    assert "float64" in difference(plain, cast)


TIES = "n (float[N, 40] x) => (float[N, 40] y, int64[N, 40] i) <int64[1] k = {40}> { z = BODY y, i = TopK(z, k) }"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # a sum in another order, and one that cancels to rounding
        ("n (float[N, 3, 50] x) => (float[N] y) <int64[2] a = {1, 2}> { y = ReduceSum <keepdims: int = 0> (x, a) }",)
        * 2,
        (
            "n (float[N, 64] x) => (float[N] y) <int64[1] a = {1}> { y = ReduceSum <keepdims: int = 0> (x, a) }",
            (
                "n (float[N, 64] x) => (float[N] y) <int64[1] a = {1}, float n = {64}> "
                "{ z = ReduceMean <keepdims: int = 0> (x, a) y = Mul(z, n) }"
            ),
        ),
        # near-ties
        (TIES.replace("BODY", "Identity(x)"), TIES.replace("BODY", "Identity(x)")),
        # one less than a root: cancels at small x
        (
            (
                "n (float[N, 8] x) => (float[N, 8] y) <float one = {1}> { q = Mul(x, x) s = Add(q, one) r = Sqrt(s) y ="
                " Sub(r, one) }"
            ),
            (
                "n (float[N, 8] x) => (float[N, 8] y) <float one = {1}, float h = {0.5}> "
                "{ q = Mul(x, x) s = Add(q, one) r = Pow(s, h) y = Sub(r, one) }"
            ),
        ),
    ],
)
def test_rounding_is_no_difference(before: str, after: str) -> None:
    assert difference(net(before), net(after)) == ""


@pytest.mark.parametrize("seed", range(12))
def test_no_false_alarms(seed: int) -> None:
    """Nets of usual layers with random weights: everything stays fused or folded, and no note says that it was not
    compared."""
    nn = torch.nn
    torch.manual_seed(seed)
    size = 2 + seed % 3
    model = nn.Sequential(
        *(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
        ),
        *(nn.InstanceNorm2d(8, affine=True), nn.AvgPool2d(size), nn.Flatten(2), nn.Linear((6 // size) ** 2, 12)),
        *(nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 1), nn.Sigmoid()),
    ).eval()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_()  # type: ignore[union-attr]
            layer.running_var.uniform_(0.1, 2)  # type: ignore[union-attr]
    result = normdeploy.export(model, (torch.randn(2, 3, 6, 6),), inputs=["x:float32[batch=1:2:64,3,6,6]"])
    assert {f.status for f in result.summary.findings} <= {"fused", "folded", "kept"}
    assert result.notes == ()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "double"])
def test_no_false_alarms_in_other_types(dtype: str) -> None:
    kind = {"float16": 10, "bfloat16": 16, "double": 11}[dtype]
    proto = norms(3)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = kind
    for tensor in proto.graph.initializer:
        if tensor.name == "eps":
            held = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(kind))
            tensor.CopyFrom(numpy_helper.from_array(held, "eps"))
    result = normdeploy.optimize(proto)
    assert set(statuses(result).values()) == {"fused"}


def test_a_step_is_told_by_the_place_where_it_began() -> None:
    """The same file without one of its steps: what is told of it is what was given."""
    proto = norms(2)
    _, summary, taken = norm_optimizer.optimize_with_steps(proto, RewriteOptions())
    assert [finding.tensor for _, finding in taken] == ["n0", "n1"] == [f.tensor for f in summary.findings]
    step, finding = taken[0]
    told = Finding("LayerNorm", "undone", finding.tensor, reason="said by the test")
    out, summary, again = norm_optimizer.optimize_with_steps(proto, RewriteOptions(undone={step: told}))
    assert summary.findings[0] is told
    assert [s for s, _ in again] == [taken[1][0]]
    assert isinstance(step, RewriteStep)
    assert [n.op_type for n in out.graph.node].count("LayerNormalization") == 1


@pytest.mark.parametrize("slow", [False, True])
def test_a_model_that_draws_random_numbers_is_not_compared(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of it differ, and no rewrite is to blame for that; one that takes long is not run twice for nothing."""
    if slow:
        monkeypatch.setattr(model_comparison, "_QUICK", 0.0)
    body = (
        "n = RandomNormalLike(x) t = Add(x, n) q = Mul(t, t) v = ReduceMean <axes = [-1]> (q) e = Reciprocal(v) y ="
        " Mul(t, e)"
    )
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> net (float[b, n, 16] x) => (float[b, n, 16] y) {{ {body} }}'
    )
    for _ in range(3):
        found = normdeploy.optimize(proto)
        assert any("the model draws random numbers" in note for note in found.notes)


CONSTANTS = {"five": np.float32(5), "nine": np.float32(9), "hundred": np.float32(100), "one": np.float32(1)}


def compared(before: str, after: str, kind: str = "float", made: str = "float") -> str:
    """What the comparison of two bodies says, "" where they are the same."""
    pair = [net(f"g ({kind}[b, 4] x) => ({made}[b, 4] y) {{ {body} }}", CONSTANTS) for body in (before, after)]
    reference = model_comparison.BaselineModel(pair[0], model_comparison.comparison_input_specs(pair[0]))
    assert not reference.failed
    difference = reference.find_difference(pair[1])
    return "" if difference is None else difference.message


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("y = Clip(x, five, nine)", "y = Max(x, five)"),
        ("m = Greater(x, hundred) y = Where(m, one, x)", "y = Identity(x)"),
        ("m = Greater(x, hundred) y = Where(m, one, x)", "m = GreaterOrEqual(x, hundred) y = Where(m, one, x)"),
        ("y = Relu(x)", "n = IsNaN(x) z = Sub(one, one) r = Relu(x) y = Where(n, z, r)"),
        ("d = Mul(x, nine) m = Less(d, hundred) y = Where(m, d, one)", "y = Mul(x, nine)"),
    ],
)
def test_a_difference_that_normal_inputs_seldom_show_is_found(before: str, after: str) -> None:
    said = compared(before, after)
    assert "near its thresholds" in said or "NaN and Inf" in said


@pytest.mark.parametrize(("after", "expected"), [("one", ""), ("five", "is 5")])
def test_integers_behind_a_cast_are_equal_where_nothing_moves(after: str, expected: str) -> None:
    """1 as an integer and 5: a perturbed factor of 1 told every integer from the one below it, and any was taken."""
    body = "f = Cast <to = 1> (x) z = Mul(f, {}) o = Clip(z, {}, {}) y = Cast <to = 7> (o)"
    said = compared(body.format("one", "one", "one"), body.format("one", after, after), "int64", "int64")
    assert expected in said
    assert bool(said) == bool(expected)


def test_integers_that_rounding_moves_may_differ_by_as_much() -> None:
    """9x floored may move by 1 under perturbation, so 9x + 2 is another function."""
    before = "d = Mul(x, nine) f = Floor(d) y = Cast <to = 7> (f)"
    shifted = "d = Mul(x, nine) e = Add(d, one) h = Add(e, one) f = Floor(h) y = Cast <to = 7> (f)"
    assert not compared(before, before, made="int64")
    assert compared(before, shifted, made="int64")


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8])
def test_an_initializer_that_nothing_reads_does_not_stop_the_comparison(dtype: type) -> None:
    """onnxruntime drops it while it loads the model, and refused the value that it was given for it."""
    proto = norms(1)
    proto.graph.initializer.append(numpy_helper.from_array(np.zeros(4096, dtype), "unread"))
    assert not model_comparison.BaselineModel(proto, model_comparison.comparison_input_specs(proto)).failed
    assert not normdeploy.optimize(proto).notes


def test_an_input_of_unknown_rank_is_not_drawn_as_a_scalar() -> None:
    proto = norms(1)
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    assert "does not specify the rank" in model_comparison.BaselineModel(proto, []).failed


@pytest.mark.parametrize("width", [3, 4])
def test_subnormal_numbers_decide_nothing(width: int) -> None:
    """A norm divides the rounding of a subnormal mean by the root of epsilon."""
    text = f"""<ir_version: 8, opset_import: ["": 18]> net (float[b, l, {width}] x) => (float[b, l, {width}] y)
        <int64[1] last = {{-1}}, float epsilon = {{0.00001}}> {{
            mean = ReduceMean (x, last)
            centered = Sub (x, mean)
            squares = Mul (centered, centered)
            variance = ReduceMean (squares, last)
            guarded = Add (variance, epsilon)
            deviation = Sqrt (guarded)
            y = Div (centered, deviation)
        }}"""
    result = normdeploy.optimize(onnx.parser.parse_model(text))
    assert [finding.status for finding in result.summary.findings] == ["fused"]


def test_reference_of_many_dims_tries_the_first_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more run for each dim takes the time of their square."""
    monkeypatch.setattr(model_comparison, "_LARGEST", 2000)
    inputs = [helper.make_tensor_value_info(f"x{i}", onnx.TensorProto.FLOAT, [f"d{i}"]) for i in range(100)]
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x0"], ["y"])],
        "g",
        inputs,
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["d0"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    reference = model_comparison.BaselineModel(model, model_comparison.comparison_input_specs(model))
    assert not reference.failed
    (note,) = reference.notes
    tried, left = note.split(", but not at ")
    # All at 1, all at 7, and the first 16 at 33 each.
    assert tried.count(";") == 17
    assert left.startswith("d0=33")
    assert "d15=33 and 84 more (3,300 input elements" in left


def test_one_pass_of_the_original_group_norm_is_not_blamed_on_the_rewrite() -> None:
    """onnxruntime's GroupNormalization loses digits at a mean of 3; the two-pass form of the rewrite does not."""
    sizes = "float[1, 32, 64, 64]"
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> net ({sizes} x) => ({sizes} y)
        {{ y = GroupNormalization <num_groups = 8> (x, scale, bias) }}"""
    )
    for name, value in (("scale", np.linspace(0.5, 1.5, 32)), ("bias", np.linspace(-1, 1, 32))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    (finding,) = normdeploy.optimize(proto).summary.findings
    assert finding.status == "fused", finding.reason
