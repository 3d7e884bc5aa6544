"""onnxruntime on a GPU: memory of the caller, streams, recorded graphs, and a verdict that can fail.

Needs a GPU. `make test-gpu` runs it; elsewhere each test is skipped.
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.errors import InputError
from normdeploy.runtimes.ort_runner import explain_missing_cuda
from tests.support import parsed

MISSING = explain_missing_cuda()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"onnxruntime's CUDA provider: {MISSING}")

# onnxruntime's default on a GPU rounds factors to TF32, which has 11 significant bits. Two layers and a norm add up a
# few such roundings, each of which is relative to the largest element at most.
CLOSE = 2.0**-8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(512, 512)
        self.norm = nn.LayerNorm(512)
        self.last = nn.Linear(512, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def file(net: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda") / "net.onnx"
    rows = torch.export.Dim("rows", min=1, max=64)
    normdeploy.export(net, (torch.randn(4, 512),), output=path, dynamic_shapes=({0: rows},))
    return path


def wanted(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = copy.deepcopy(net).double()(x.double().cpu())
    return result


def distance(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.double().cpu() - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_results_stay_where_the_inputs_are(net: nn.Module, file: Path, where: str) -> None:
    x = torch.randn(4, 512)
    with normdeploy.open_runner(file, provider="cuda") as runner:
        (found,) = runner.infer({runner.inputs[0].name: x.to(where)}).values()
    assert found.device.type == where
    assert distance(found, wanted(net, x)) < CLOSE


def test_numpy_in_numpy_out(net: nn.Module, file: Path) -> None:
    x = torch.randn(3, 512)
    with normdeploy.open_runner(file, provider="cuda") as runner:
        (found,) = runner.infer({runner.inputs[0].name: x.numpy()}).values()
    assert isinstance(found, np.ndarray)
    assert distance(torch.from_numpy(found), wanted(net, x)) < CLOSE


def test_a_view_with_strides(net: nn.Module, file: Path) -> None:
    x = torch.randn(512, 8, device="cuda").T[::2]
    with normdeploy.open_runner(file, provider="cuda") as runner:
        (found,) = runner.infer({runner.inputs[0].name: x}).values()
    assert distance(found, wanted(net, x)) < CLOSE


def test_the_stream_of_the_caller(net: nn.Module, file: Path) -> None:
    stream = torch.cuda.Stream()
    x = torch.randn(4, 512)
    with normdeploy.open_runner(file, provider="cuda", stream=stream) as runner:
        with torch.cuda.stream(stream):
            # a long queue before the input exists: a run on another stream would read it too early
            slow = torch.randn(4096, 4096, device="cuda")
            for _ in range(20):
                slow = slow @ slow / 64
            given = x.to("cuda", non_blocking=True) + 0 * slow[:4, :512]
            (found,) = runner.infer({runner.inputs[0].name: given}).values()
            found = found + 0
        stream.synchronize()
    assert distance(found, wanted(net, x)) < CLOSE


def test_a_recorded_graph_takes_new_inputs_and_sizes(net: nn.Module, file: Path) -> None:
    with normdeploy.open_runner(file, provider="cuda", cuda_graph=True) as runner:
        (name,) = (spec.name for spec in runner.inputs)
        for rows in (4, 4, 7, 4, 7):
            x = torch.randn(rows, 512, device="cuda")
            (found,) = runner.infer({name: x}).values()
            assert distance(found, wanted(net, x)) < CLOSE


def test_an_output_outlives_the_next_run(net: nn.Module, file: Path) -> None:
    first, second = torch.randn(4, 512, device="cuda"), torch.randn(4, 512, device="cuda")
    with normdeploy.open_runner(file, provider="cuda", cuda_graph=True) as runner:
        (name,) = (spec.name for spec in runner.inputs)
        (kept,) = runner.infer({name: first}).values()
        runner.infer({name: second})
        assert distance(kept, wanted(net, first)) < CLOSE


@pytest.mark.parametrize("dtype", ["float16", "double", "int64", "bool", "bfloat16"])
def test_types(tmp_path: Path, dtype: str) -> None:
    proto = parsed(f"g ({dtype}[N, 3] x) => ({dtype}[N, 3] y) {{ y = Identity(x) }}")
    path = tmp_path / "copy.onnx"
    onnx.save(proto, path)
    kind = {"double": torch.float64}.get(dtype) or getattr(torch, dtype)
    x = torch.tensor([[0, 1, 1], [1, 0, 0]], device="cuda").to(kind)
    with normdeploy.open_runner(path, provider="cuda") as runner:
        (found,) = runner.infer({"x": x}).values()
    assert found.dtype == kind
    assert torch.equal(found.cpu(), x.cpu())


def test_a_cpu_runner_refuses_memory_of_the_gpu(file: Path) -> None:
    with normdeploy.open_runner(file) as runner, pytest.raises(InputError, match="runs on the CPU, but input"):
        runner.infer({runner.inputs[0].name: torch.randn(1, 512, device="cuda")})


def test_verify_runs_the_gpu_without_tf32(net: nn.Module, file: Path) -> None:
    result = normdeploy.verify(net, file, args=(torch.randn(4, 512),))
    on_gpu = [row for row in result.results if "CUDA" in row.runtime]
    assert len({row.runtime for row in on_gpu}) == 2
    assert result.ok
    assert not [lack for lack in result.not_run if "CUDA" in lack.runtime]


def test_verify_fails_a_wrong_file_on_the_gpu(net: nn.Module, file: Path, tmp_path: Path) -> None:
    proto = onnx.load(file)
    (norm,) = (node for node in proto.graph.node if node.op_type == "LayerNormalization")
    for attribute in norm.attribute:
        if attribute.name == "epsilon":
            attribute.f = 1e-2
    wrong = tmp_path / "wrong.onnx"
    onnx.save(proto, wrong)
    result = normdeploy.verify(net, wrong, args=(torch.randn(4, 512),))
    assert not result.ok
    assert len({row.runtime for row in result.results if "CUDA" in row.runtime and not row}) == 2
