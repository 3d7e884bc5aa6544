"""``verify``, ``bisect``, ``bench`` and ``run`` in OpenVINO: right files pass, and OpenVINO's own faults are named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.runtimes.openvino_runner import explain_missing_openvino
from tests.quantized_files import conv, quantized
from tests.support import parsed

pytestmark = pytest.mark.skipif(explain_missing_openvino() is not None, reason="OpenVINO is not installed")

IDS = torch.randint(1, 50, (4, 8), generator=torch.Generator().manual_seed(0))


class Normed(nn.Module):
    """A norm and a linear layer, with a scalar output besides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head(self.norm(x)), x.mean()


class Products(nn.Module):
    """Products of integers beyond int32, in which OpenVINO computes."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ((ids * 100000 * 100000) % 7).float().cumsum(1)


@pytest.fixture
def normed(tmp_path: Path) -> Path:
    normdeploy.export(Normed().eval(), (torch.randn(8, 16),), output=tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


@pytest.fixture
def products(tmp_path: Path) -> Path:
    normdeploy.export(Products().eval(), (IDS,), output=tmp_path / "net.onnx", inputs=["ids:int64[4,8]{1:50}"])
    return tmp_path / "net.onnx"


def test_verify_compares_in_each_precision(normed: Path) -> None:
    runners = ["openvino", "openvino-bf16", "openvino-fp16"]
    verdict = normdeploy.verify(Normed().eval(), normed, (torch.randn(8, 16),), runners=runners, seeds=1)
    assert verdict
    allowed = {(r.runtime, r.precision): r.allowed for r in verdict.results if r.output == "output_0"}
    assert allowed["OpenVINO", ""] < allowed["OpenVINO fp16", "fp16"] < allowed["OpenVINO bf16", "bf16"]
    assert "OpenVINO, OpenVINO bf16, OpenVINO fp16 was not compared on NaN" in "".join(verdict.notes)


def test_verify_fails_a_wrong_file_in_openvino_too(normed: Path) -> None:
    proto = onnx.load(normed)
    weight = next(t for t in proto.graph.initializer if list(t.dims) == [4])
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) + 0.01, weight.name))
    onnx.save(proto, normed)
    verdict = normdeploy.verify(Normed().eval(), normed, (torch.randn(8, 16),), runners="openvino", seeds=1)
    failed = {r.runtime: r for r in verdict.results if not r}
    assert {"onnxruntime (optimizer off)", "OpenVINO"} <= set(failed)
    assert "OpenVINO is the cause" not in failed["OpenVINO"].reason


def test_verify_names_openvino_where_only_openvino_is_wrong(products: Path) -> None:
    verdict = normdeploy.verify(Products().eval(), products, (IDS,), runners="openvino", seeds=1)
    (failed,) = (r for r in verdict.results if not r)
    assert failed.runtime == "OpenVINO"
    assert "OpenVINO is the cause, not the file" in failed.reason


def test_verify_does_not_judge_a_fault_that_the_reference_file_shares(products: Path) -> None:
    verdict = normdeploy.verify(products, products, runners="openvino", seeds=1, prove=False)
    assert all(verdict.results)
    assert "not judged: the runtime is wrong, not the file" in "".join(map(str, verdict.not_run))


def test_verify_says_that_openvino_narrows_float64(tmp_path: Path) -> None:
    onnx.save(parsed("g (double[N, 4] x) => (double[N, 4] y) { y = Softmax<axis = 1>(x) }"), tmp_path / "net.onnx")
    verdict = normdeploy.verify(tmp_path / "net.onnx", tmp_path / "net.onnx", runners="openvino", seeds=1, prove=False)
    (failed,) = (r for r in verdict.results if not r)
    assert failed.reason == "OpenVINO's CPU plugin computes float64 in float32"


def test_bisect_names_the_node_that_openvino_computes_wrongly(products: Path, tmp_path: Path) -> None:
    found = normdeploy.bisect(Products().eval(), products, (IDS,), runners="openvino", seeds=1)
    fault = found.faults[0]
    assert (fault.runtime, fault.wrong, fault.kind) == ("OpenVINO", "runtime", "overflow")
    assert fault.nodes[0].startswith("Mul")
    assert "OpenVINO computes int64 in int32" in fault.cause
    folder = found.write(tmp_path / "smallest")
    assert folder is not None
    shown = subprocess.run([sys.executable, folder / "reproduce.py"], capture_output=True, text=True)
    assert shown.returncode == 1, shown.stderr
    assert "error" in shown.stdout


def test_bench_times_it_with_its_threads(normed: Path) -> None:
    race = normdeploy.bench(normed, rounds=1, runners=["openvino", "openvino-bf16"])
    assert [e.runtime for e in race.entries] == ["onnxruntime CPU", "OpenVINO", "OpenVINO bf16"]
    assert race


def test_run_and_open_runner_give_the_numbers_of_onnxruntime(normed: Path) -> None:
    ours = normdeploy.run(normed, runner="openvino")
    theirs = normdeploy.run(normed)
    assert ours.runner == "OpenVINO (net.onnx)"
    for name, value in theirs.arrays.items():
        np.testing.assert_allclose(ours.arrays[name], value, rtol=0, atol=1e-6)
    with normdeploy.open_runner(normed, runner="openvino", threads=1) as runner:
        assert [spec.name for spec in runner.outputs] == list(theirs.arrays)
    with pytest.raises(normdeploy.errors.InputError, match="'openvino'; omit them"):
        normdeploy.open_runner(normed, runner="openvino", provider="cpu")


def test_int8_files_pass(tmp_path: Path) -> None:
    model = conv()
    path = quantized(model, tmp_path)
    assert normdeploy.verify(model, path, runners="openvino", seeds=1)
