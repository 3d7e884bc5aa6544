"""A stated opset is binding, and ``--for`` chooses forms that the target runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app
from normdeploy.errors import InputError
from normdeploy.ort_sessions.session import open_session
from normdeploy.storage.onnx_domains import default_domain_opset
from tests.verbs.inspect.test_norm_census import AFTER, BIASED, model

RMS_NORM = "y = RMSNormalization<axis = -1>(x, w)"
GROUP_NORM = "y = GroupNormalization<num_groups = 2>(x, w, b)"


class Rms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gamma


class Groups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def exported(module: nn.Module, shape: tuple[int, ...], **options: Any) -> onnx.ModelProto:
    torch.manual_seed(0)
    result = normdeploy.export(module.eval(), (torch.randn(shape),), **options)
    assert isinstance(result.model, onnx.ModelProto)
    return result.model


def ops_of(proto: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in proto.graph.node}


def optimized(body: str, target: str, **given: Any) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    before = model(body, **{"opset": 21} | given)
    after = normdeploy.optimize(before, target=target).model
    assert isinstance(after, onnx.ModelProto)
    return before, after


def require_same_outputs(before: onnx.ModelProto, after: onnx.ModelProto, shape: tuple[int, ...]) -> None:
    feeds = {"x": np.random.default_rng(0).normal(size=shape).astype(np.float32)}
    (expected,), (actual,) = (
        open_session(proto.SerializeToString(), optimize=False).run(None, feeds) for proto in (before, after)
    )
    np.testing.assert_allclose(actual, expected, atol=1e-5)


# ------------------------------------------------------------------ the opset


def test_stated_opset_keeps_rms_norm_in_several_nodes() -> None:
    assert default_domain_opset(exported(Rms(), (2, 8))) == 23
    proto = exported(Rms(), (2, 8), opset=18)
    assert default_domain_opset(proto) == 18
    assert "RMSNormalization" not in ops_of(proto)


def test_stated_opset_writes_rms_norm_as_own_op() -> None:
    proto = exported(Rms(), (2, 8), opset=18, fuse="portable")
    assert default_domain_opset(proto) == 18
    assert "RMSNorm" in ops_of(proto)


def test_stated_opset_writes_group_norm_as_instance_norm() -> None:
    """GroupNormalization of opset 21 is the form for TensorRT, which opset 18 can't hold."""
    assert "GroupNormalization" in ops_of(exported(Groups(), (2, 8, 4), runtime="tensorrt"))
    proto = exported(Groups(), (2, 8, 4), runtime="tensorrt", opset=18)
    assert default_domain_opset(proto) == 18
    assert ops_of(proto) & {"InstanceNormalization", "LayerNormalization"}


# ------------------------------------------------------------------ the target


@pytest.mark.parametrize(("target", "opset"), [("nnapi", 21), ("tensorrt-10.9", 21), ("triton-26.07", 21)])
def test_export_for_target_without_rms_norm(target: str, opset: int) -> None:
    proto = exported(Rms(), (2, 8), target=target)
    assert default_domain_opset(proto) == opset
    assert "RMSNormalization" not in ops_of(proto)


def test_export_for_target_with_rms_norm() -> None:
    for target in ("qnn", "tensorrt-10.15"):
        assert "RMSNormalization" in ops_of(exported(Rms(), (2, 8), target=target))


@pytest.mark.parametrize("target", ["webgpu", "directml", "jetpack-6"])
def test_group_norm_becomes_instance_norm(target: str) -> None:
    before, after = optimized(GROUP_NORM, target, x="2,8,4", held="")
    assert "GroupNormalization" not in ops_of(after)
    assert "InstanceNormalization" in ops_of(after)
    require_same_outputs(before, after, (2, 8, 4))


@pytest.mark.parametrize(
    ("body", "given", "shape"),
    [
        ("y = LayerNormalization<axis = -1>(x, w, b)", {"x": "2,8"}, (2, 8)),
        (RMS_NORM, {"x": "2,8", "opset": 23}, (2, 8)),
        (GROUP_NORM, {"x": "2,8,4"}, (2, 8, 4)),
        ("y = InstanceNormalization(x, w, b)", {"x": "2,8,4"}, (2, 8, 4)),
        ("y = com.microsoft.SkipLayerNormalization(x, x, w, b)", {"x": "1,4,8"}, (1, 4, 8)),
    ],
)
def test_norm_becomes_several_nodes_that_target_runs(
    body: str, given: dict[str, Any], shape: tuple[int, ...], tmp_path: Path
) -> None:
    before, after = optimized(body, "nnapi", **given)
    assert not ops_of(after) & {node.op_type for node in before.graph.node}
    require_same_outputs(before, after, shape)
    onnx.save(after, tmp_path / "after.onnx")
    assert normdeploy.check([tmp_path / "after.onnx"], target="nnapi", fail_on="all")


def test_norm_in_several_nodes_stays_for_target_without_norms() -> None:
    before, after = optimized(f"{BIASED} {AFTER}", "nnapi")
    assert "LayerNormalization" not in ops_of(after)
    _, fused = optimized(f"{BIASED} {AFTER}", "coreml-mlprogram")
    assert "LayerNormalization" in ops_of(fused)
    require_same_outputs(before, after, (3, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "jetpack-7"}, "can't choose forms for 'jetpack-7'"),
        ({"target": "nnapi", "runtime": "tensorrt"}, "needs runtime 'any', but the runtime is 'tensorrt'"),
        ({"target": "tensorrt-11.1", "opset": 25}, "reads opsets up to 24, not 25; pass --opset 24"),
        ({"target": "directml", "precision": "bf16"}, "takes float16 and float32, not bfloat16"),
        ({"target": "nowhere"}, "unknown target 'nowhere'"),
    ],
)
def test_target_that_cannot_be_held_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        normdeploy.export(Rms().eval(), (torch.randn(2, 8),), **options)


def test_file_of_newer_opset_is_lowered() -> None:
    before = model(RMS_NORM, opset=25)
    after = normdeploy.optimize(before, target="tensorrt-11.1").model
    assert after.opset_import[0].version == 24
    require_same_outputs(before, after, (3, 8))


def test_command_line_option(tmp_path: Path) -> None:
    onnx.save(model(GROUP_NORM, opset=21, x="2,8,4"), tmp_path / "m.onnx")
    out = tmp_path / "out.onnx"
    told = CliRunner().invoke(app, ["optimize", str(tmp_path / "m.onnx"), "-o", str(out), "--for", "webgpu"])
    assert told.exit_code == 0, told.output
    assert "InstanceNormalization" in ops_of(onnx.load(out))
