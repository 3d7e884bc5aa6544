"""Half precision: as near as eager in half, on every model of the list; planted overflows and vanishing numbers are
kept wide and told.

The bound of parity: twice the larger of eager's own error in the type and of one rounding of the largest output. Eager
is one correct evaluation in half; another sums in another order. Runs: ``stepwise`` (each node in float32, its result
rounded to half: what a GPU does, and the only way to run bfloat16 on a CPU) and for float16 onnxruntime itself, its
optimizer off and on.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from torch import nn

import normdeploy
from models.registry import CASES, LOOKALIKES, SMALL, Bank, samples
from normdeploy.errors import InputError
from normdeploy.precision import half_conversion
from normdeploy.precision.half_conversion import convert_to_half
from normdeploy.precision.type_conversion import FORMATS
from normdeploy.storage.export_record import read_record
from tests.half_graphs import X, runs, text

TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16}
MODELS = [
    c for c in (*SMALL, *CASES) if c.name not in {"S2a_plain", "S2b_plain", "S2a_torch", "S2b_torch"}
]  # the same graphs again
DECOMPOSED = [
    c
    for c in LOOKALIKES
    if c.name in {"normalize", "max_with_eps", "std_plus_eps", "sum_of_moments", "response_norm", "softmax"}
]


@pytest.fixture(scope="module")
def bank() -> tuple[Bank, onnx.ModelProto]:
    """All models side by side, exported at once."""
    with torch.random.fork_rng(devices=[]):
        together = Bank([*MODELS, *DECOMPOSED]).eval()
    return together, normdeploy.export(together, together.samples()).proto


def eager(module: nn.Module, inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> list[np.ndarray]:
    with (
        torch.no_grad(),
        torch.backends.mkldnn.flags(enabled=False),
    ):  # oneDNN's bfloat16 needs instructions that not every machine has
        found = module.to(dtype)(*(x.to(dtype) if x.is_floating_point() else x for x in inputs))
    return [v.double().numpy() for v in (found if isinstance(found, list | tuple) else [found])]


def worst(found: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(a.astype(np.float64) - b).max()) for a, b in zip(found, reference, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("to", ["fp16", "bf16"])
def test_no_model_is_worse_than_twice_eager(bank: tuple[Bank, onnx.ModelProto], to: str) -> None:
    together, wide = bank
    proto, account = convert_to_half(wide, to)
    assert account.calibrated == "generated"
    names = [v.name for v in proto.graph.input]
    allowed: dict[str, float] = {}
    errors: dict[tuple[str, str], float] = {}
    for seed in range(3):
        drawn = [
            [x.to(TORCH[to]).float() if x.is_floating_point() else x for x in samples(c, seed=seed)]
            for c in together.cases
        ]
        feeds = dict(zip(names, (x.numpy() for inputs in drawn for x in inputs), strict=True))
        found = {runtime: iter(outputs) for runtime, outputs in runs(proto, to, feeds).items()}
        for case, member, inputs in zip(together.cases, together.members, drawn, strict=True):
            reference = eager(copy.deepcopy(member), inputs, torch.float64)
            rounding = FORMATS[to].unit_roundoff * max(float(np.abs(v).max()) for v in reference)
            half = worst(eager(copy.deepcopy(member), inputs, TORCH[to]), reference)
            allowed[case.name] = max(allowed.get(case.name, 0.0), 2 * half, 2 * rounding)
            for runtime, outputs in found.items():
                error = worst([next(outputs) for _ in reference], reference)
                errors[case.name, runtime] = max(errors.get((case.name, runtime), 0.0), error)
    assert len(allowed) == len(together.cases)
    assert {key: (e, allowed[key[0]]) for key, e in errors.items() if not e <= allowed[key[0]]} == {}


# ------------------------------------------------------------------ the verbs


class Stream(nn.Module):
    """A residual stream that one channel drives to 3e4, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        with torch.no_grad():
            self.inner.weight[0] *= 1e5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x + self.inner(x)))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, normdeploy.ExportResult]:
    folder = tmp_path_factory.mktemp("precision")
    torch.manual_seed(0)
    result = normdeploy.export(
        Stream().eval(), inputs=["x:float32[batch=1:4:8,8]"], precision="fp16", output=folder / "m.onnx"
    )
    return folder, result


def test_export_records_what_was_asked_and_the_inputs_as_they_are(
    exported: tuple[Path, normdeploy.ExportResult],
) -> None:
    folder, result = exported
    proto = onnx.load(folder / "m.onnx")
    record = read_record(proto)
    assert (half_conversion.recorded_precision(proto), record["export"]["precision"], record["inputs"][0].dtype) == (
        "fp16",
        "fp16",
        "float16",
    )
    assert result.precision is not None
    assert "range" in {i.kind for i in result.precision.islands}
    assert {i.module for i in result.precision.islands} >= {"norm", "inner"}


def test_optimize_takes_the_recorded_ranges(tmp_path: Path) -> None:
    torch.manual_seed(0)
    normdeploy.export(Stream().eval(), inputs=["x:float32[batch=1:4:8,8]{0:1e-6}"], output=tmp_path / "wide.onnx")
    result = normdeploy.optimize(tmp_path / "wide.onnx", tmp_path / "half.onnx", precision="bf16")
    record = read_record(onnx.load(tmp_path / "half.onnx"))
    assert (record["inputs"][0].dtype, record["export"]["precision"]) == ("bfloat16", "bf16")
    assert result.precision is not None
    assert (result.precision.calibrated, result.precision.samples) == ("generated", 4)
    fp16 = normdeploy.optimize(
        tmp_path / "wide.onnx", precision="fp16", calibrate=[{"x": np.ones((2, 8), np.float32)}]
    ).precision
    assert fp16 is not None
    assert (fp16.calibrated, fp16.samples) == ("given", 1)


def test_options_of_precision_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="keep_io needs half precision"):
        normdeploy.optimize(text("y = Relu(x)"), keep_io=True)
    with pytest.raises(InputError, match="unknown precision 'quarter'"):
        normdeploy.optimize(text("y = Relu(x)"), precision="quarter")


def test_the_command_line_prints_the_islands_and_writes_them(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from normdeploy.cli.app import app

    onnx.save(
        text("h = MatMul(x, w) y = LayerNormalization<axis = -1>(h, g)", w=np.eye(4) * 1e5, g=np.ones(4)),
        tmp_path / "in.onnx",
    )
    np.savez(tmp_path / "x.npz", x=X)
    args = ["optimize", str(tmp_path / "in.onnx"), "-o", str(tmp_path / "out.onnx"), "--precision", "fp16"]
    done = CliRunner().invoke(
        app, [*args, "--calibrate", str(tmp_path / "x.npz"), "--report", str(tmp_path / "r.json")]
    )
    assert done.exit_code == 0, done.output
    assert "2 of 2 floating-point nodes in float32" in " ".join(done.output.split())
    told = json.loads((tmp_path / "r.json").read_text())["precision"]
    assert [i["kind"] for i in told["islands"]] == ["constant", "norm"]
    assert told["calibrated"] == "given"
    assert half_conversion.recorded_precision(onnx.load(tmp_path / "out.onnx")) == "fp16"
