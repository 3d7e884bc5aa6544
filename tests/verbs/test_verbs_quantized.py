"""``bench``, ``package``, ``recheck``, ``build`` and ``inspect`` on files that ``--quantize`` made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import normdeploy
from normdeploy.compare.runtime_agreement import find_disagreement
from normdeploy.verbs.verify.quantized_reference import QuantizedAnswer, evaluate_quantized

KINDS = ("int8", "uint8", "fp8", "int4", "half")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("quantized")
    x = np.random.default_rng(0).standard_normal((4096, 64)).astype(np.float32)
    paths = {"plain": folder / "plain.onnx"}
    normdeploy.export(Block().eval(), inputs=["x:float32[batch=1:8:16,64]"], output=paths["plain"])
    for kind in KINDS:
        paths[kind] = folder / f"{kind}.onnx"
        runtime = {"uint8": "onnxruntime", "fp8": "tensorrt-rtx"}.get(kind, "any")
        normdeploy.optimize(
            paths["plain"],
            paths[kind],
            quantize=kind if kind in ("fp8", "int4") else "int8",
            runtime=runtime,
            precision="fp16" if kind == "half" else None,
            calibrate=[{"x": x}],
        )
    return paths


@pytest.mark.parametrize("kind", KINDS)
def test_bench_times_it_beside_the_model(kind: str, files: dict[str, Path]) -> None:
    """Its error is told, and is no wrong answer: what it is held against is what the file says."""
    race = normdeploy.bench([files["plain"], files[kind]], rounds=2)
    names = [(entry.file, entry.reason) for entry in race.entries]
    if kind == "fp8":  # onnxruntime's optimizer makes a QGemm of float8, which it has not
        assert names == [("plain.onnx", "")]
        assert any("fp8.onnx" in missed.runtime and "load" in missed.reason for missed in race.not_run)
        return
    assert names == [("plain.onnx", ""), (f"{kind}.onnx", "")]
    error = race.entries[1].error
    assert error is not None
    assert 1e-4 < error < 0.2


def test_a_wrong_answer_of_a_quantized_file_is_seen(files: dict[str, Path]) -> None:
    """A scale times four, in one output channel of the last layer."""
    x = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    own = evaluate_quantized(files["int8"], {"x": x})
    assert isinstance(own, QuantizedAnswer)
    allowed = [*own.allowed.values()]
    proto = onnx.load(files["int8"])
    last = next(n for n in reversed(proto.graph.node) if n.op_type == "DequantizeLinear" and "down" in n.input[0])
    tensor = next(t for t in proto.graph.initializer if t.name == last.input[1])
    scale = numpy_helper.to_array(tensor).copy()
    scale[3] *= 4
    tensor.CopyFrom(numpy_helper.from_array(scale, tensor.name))
    altered = files["int8"].with_name("altered.onnx")
    onnx.save(proto, altered)
    for file, right in ((files["int8"], True), (altered, False)):
        with normdeploy.open_runner(file) as runner:
            answers = [*runner.infer({"x": x}).values()]
        assert bool(find_disagreement(answers, [*own.outputs.values()], 2.0**-24, allowed)) == right


@pytest.mark.parametrize("kind", ["int8", "half"])
def test_package_keeps_the_optimizer_on_and_recheck_passes(kind: str, files: dict[str, Path], tmp_path: Path) -> None:
    """onnxruntime's integer kernels round some values to the other side: that is no broken file."""
    bundle = normdeploy.package(files[kind], tmp_path / "bundle")
    assert bundle
    assert not any("optimizer breaks" in note for note in bundle.notes)
    config = next((tmp_path / "bundle").rglob("config.pbtxt")).read_text()
    assert "level: 2" not in config
    assert normdeploy.recheck(tmp_path / "bundle")


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "half"])
def test_an_engine_is_built(kind: str, files: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    assert normdeploy.build(files[kind], tmp_path / "x.engine", compute_capabilities=["8.9"]).layers


@pytest.mark.parametrize("kind", KINDS)
def test_inspect_counts_its_layers(kind: str, files: dict[str, Path]) -> None:
    layers = normdeploy.inspect(files[kind]).layers
    assert [layer.status for layer in layers] == ["weight" if kind == "int4" else "quantized"] * 2
