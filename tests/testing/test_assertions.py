"""The assertions pass right files, and name the numbers and the culprit of planted faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import normdeploy
from normdeploy.errors import GraphError, InputError
from normdeploy.testing import assert_no_regression, assert_norms_fused, assert_parity
from normdeploy.testing.verdicts import Verdict, listening
from tests.packaged import written
from tests.support import LAYER_NORM

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def program(net: Net) -> torch.onnx.ONNXProgram:
    batch = torch.export.Dim("batch", min=1, max=16)
    made = torch.onnx.export(net, (X,), dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    assert made is not None
    return made


def changed_epsilon(program: torch.onnx.ONNXProgram) -> onnx.ModelProto:
    proto = program.model_proto
    (epsilon,) = [a for n in proto.graph.node for a in n.attribute if a.name == "epsilon"]
    epsilon.f = 1e-2
    return proto


def transposed_weight(program: torch.onnx.ONNXProgram) -> onnx.ModelProto:
    proto = program.model_proto
    (weight,) = [t for t in proto.graph.initializer if t.name == "linear.weight"]
    turned = np.ascontiguousarray(onnx.numpy_helper.to_array(weight).T)
    weight.CopyFrom(onnx.numpy_helper.from_array(turned, weight.name))
    return proto


def wrong_at_other_batches(program: torch.onnx.ONNXProgram) -> onnx.ModelProto:
    """Add |batch − 3| to the output: zero at the batch size of the example, and at no other."""
    proto = program.model_proto
    output = proto.graph.output[0].name
    proto.graph.node[-1].output[0] = "right"
    added = onnx.parser.parse_graph(
        f"g (float[n,8] right) => (float[n,8] {output})"
        " { whole = Shape <start = 0, end = 1> (right) three = Constant <value = int64[1] {3}> ()"
        f" off = Sub (whole, three) size = Abs (off) far = Cast <to = 1> (size) {output} = Add (right, far) }}"
    )
    proto.graph.node.extend(added.node)
    return proto


def failure(call: Any, *args: Any, **kwargs: Any) -> tuple[str, Verdict]:
    """The message of the assertion, and its verdict."""
    verdicts = list[Verdict]()
    with listening(verdicts.append), pytest.raises(AssertionError) as error:
        call(*args, **kwargs)
    (verdict,) = verdicts
    assert not verdict.ok
    assert verdict.message == str(error.value)
    return str(error.value), verdict


def test_right_file_passes_and_the_verdict_has_numbers_and_versions(net: Net, program: Any) -> None:
    verdicts = list[Verdict]()
    with listening(verdicts.append):
        assert_parity(net, program, X, seeds=1)
    (verdict,) = verdicts
    assert verdict.ok
    assert verdict.text.startswith("verified on ")
    assert verdict.error is not None
    assert verdict.allowed is not None
    assert 0 < verdict.error <= verdict.allowed
    assert verdict.output
    assert verdict.runtime.startswith("onnxruntime")
    assert verdict.versions["torch"] == torch.__version__
    assert verdict.versions["normdeploy"] == normdeploy.__version__
    assert verdict.seconds > 0


@pytest.mark.parametrize(
    ("spoil", "culprit"),
    [
        (changed_epsilon, "has epsilon 0.01, but the model has 1e-05"),
        (transposed_weight, "linear, Gemm node_linear: "),
        (wrong_at_other_batches, "Add"),
    ],
    ids=["epsilon", "transposed", "batch"],
)
def test_planted_fault_is_named_with_its_numbers(net: Net, program: Any, spoil: Any, culprit: str) -> None:
    message, verdict = failure(assert_parity, net, spoil(program), X, seeds=1)
    first, second, *_, last = message.splitlines()
    assert first.startswith("NOT verified on ")
    assert second.startswith(f"output {verdict.output!r} in {verdict.runtime}: error {verdict.error:.2e}, allowed ")
    assert second.endswith(f", at {verdict.case}")
    assert verdict.error is not None
    assert verdict.allowed is not None
    assert verdict.error > verdict.allowed > 0
    assert last.startswith("culprit: ")
    assert culprit in last


def test_fault_at_another_batch_size_names_an_input_of_another_batch_size(net: Net, program: Any) -> None:
    _, verdict = failure(assert_parity, net, wrong_at_other_batches(program), X, culprit=False)
    assert "batch=" in verdict.case
    assert "batch=3" not in verdict.case
    # The file is right at the batch size of the example.
    assert_parity(net, wrong_at_other_batches(program), X, feeds={"x": X.numpy()})


def test_culprit_is_searched_only_if_it_is_wanted(net: Net, program: Any) -> None:
    message, verdict = failure(assert_parity, net, changed_epsilon(program), X, seeds=1, culprit=False)
    assert verdict.culprit == ""
    assert "culprit" not in message


def test_given_tolerance_decides_and_is_the_allowed_error(net: Net, program: Any) -> None:
    assert_parity(net, changed_epsilon(program), X, seeds=1, tolerance="10:10")
    _, verdict = failure(assert_parity, net, changed_epsilon(program), X, seeds=1, tolerance="1e-4:0", culprit=False)
    assert verdict.allowed == pytest.approx(1e-4)


def test_wrong_weight_of_a_right_output_is_told(net: Net, program: Any) -> None:
    """A weight that no generated input shows: verify compares the weights too, and the message has its line."""
    proto = program.model_proto
    (weight,) = [t for t in proto.graph.initializer if t.name == "linear.weight"]
    value = onnx.numpy_helper.to_array(weight).copy()
    value[0, 0] += 1e-3
    weight.CopyFrom(onnx.numpy_helper.from_array(value, weight.name))
    message, _ = failure(assert_parity, net, proto, X, seeds=1, tolerance="10:10", culprit=False)
    assert "weight linear.weight" in message


def test_result_of_export_needs_no_file(net: Net) -> None:
    assert_parity(normdeploy.export(net, X), seeds=1)


def test_missing_file_is_an_error_not_a_failure(net: Net) -> None:
    with pytest.raises(InputError, match="no ONNX file to compare"):
        assert_parity(net, args=X)
    with pytest.raises(InputError, match="file not found"):
        assert_parity(net, "none.onnx", X)


def test_engine_that_can_not_run_fails_with_the_reason(net: Net, program: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    if torch.cuda.is_available():
        pytest.skip("this machine can run the engine")
    normdeploy.build(program, tmp_path / "m.engine", profiles="batch=1:3:16")
    message, verdict = failure(assert_parity, net, tmp_path / "m.engine", X, seeds=1)
    assert "GPU" in message
    assert verdict.culprit == ""


# ------------------------------------------------------------------ fused norms


@pytest.fixture(scope="module")
def decomposed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("norms"), LAYER_NORM, "hand.onnx")


def test_decomposed_norm_is_named_with_what_it_can_be(decomposed: Path) -> None:
    message, verdict = failure(assert_norms_fused, decomposed)
    first, second = message.splitlines()
    assert first == "1 norm is neither one node nor folded"
    assert "LayerNorm in " in second
    assert "can be LayerNormalization(" in second
    assert verdict.file == str(decomposed)


def test_norms_of_other_kinds_are_not_asserted(decomposed: Path) -> None:
    assert_norms_fused(decomposed, kinds="BatchNorm")
    failure(assert_norms_fused, decomposed, kinds=["BatchNorm", "LayerNorm"])


def test_fused_norms_pass(decomposed: Path, program: Any) -> None:
    assert_norms_fused(normdeploy.optimize(decomposed))
    assert_norms_fused(program, kinds="LayerNorm", runtime="onnxruntime")


def test_verdict_says_how_many_norms_it_looked_at(decomposed: Path, program: Any) -> None:
    passed: list[Verdict] = []
    with listening(passed.append):
        assert_norms_fused(program, kinds="LayerNorm")
        assert_norms_fused(decomposed, kinds=["BatchNorm", "GroupNorm"])
    assert passed[0].text == "no LayerNorm can be fused or folded further; the file has 1"
    assert passed[1].text == "the file has no BatchNorm or GroupNorm: either each is folded, or the model had none"


def test_misspelled_kind_is_refused(decomposed: Path) -> None:
    with pytest.raises(InputError, match="unknown kind of norm 'Layernorm'; choose from BatchNorm, "):
        assert_norms_fused(decomposed, kinds="Layernorm")


def test_broken_file_is_an_error_not_a_failure(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"\x08")
    with pytest.raises(GraphError, match=r"broken\.onnx"):
        assert_norms_fused(tmp_path / "broken.onnx")


# ------------------------------------------------------------------ bundles


def test_bundle_passes_until_it_gets_worse(net: Net, program: Any, tmp_path: Path) -> None:
    normdeploy.package(program, tmp_path / "bundle", name="net")
    assert_no_regression(tmp_path / "bundle")
    assert_no_regression(tmp_path / "bundle", onnx=program)
    message, verdict = failure(assert_no_regression, tmp_path / "bundle", onnx=changed_epsilon(program))
    assert "got worse" in message.splitlines()[0]
    assert any(line.startswith("result ") for line in verdict.details)
