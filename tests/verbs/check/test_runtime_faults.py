"""Known faults of runtimes are found, and those of onnxruntime's CPU provider are still there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import normdeploy
from normdeploy.ort_sessions.session import open_session
from tests.verbs.inspect.test_norm_census import model

LARGER = "q = Pow(x, two) v = ReduceMean(q, ax) e = Add(v, eps) r = Sqrt(e) n = Div(x, r) y = Mul(n, w)"
SINGLE = "a = Add(x, x) y = LayerNormalization<axis = -1>(a, one1)"
ONE = ", float[1] one1 = {2.0}"
NARROW = "y = LayerNormalization<axis = 1>(x, w)"
SKIP = "y = com.microsoft.SkipSimplifiedLayerNormalization(x, x, w)"
GROUP = "y = GroupNormalization<num_groups = {}>(x, w, b)"


def faults(folder: Path, body: str, *, runtime: str = "any", target: str | None = None, **given: Any) -> list[str]:
    onnx.save(model(body, **{"opset": 21} | given), folder / "m.onnx")
    (file,) = normdeploy.check([folder / "m.onnx"], runtime=runtime, target=target).files
    assert not file.error
    return [p.message for p in file.findings if p.rule == "runtime-fault"]


@pytest.mark.parametrize(
    ("body", "given", "issue"),
    [
        (NARROW, {"x": "2,3,8"}, "onnxruntime#28971"),
        (SKIP, {"x": "1,4,8", "kind": "float16"}, "onnxruntime#29034"),
        (SINGLE, {"x": "2,3,8", "held": ONE}, "SkipLayerNormalization"),
        (GROUP.format(1), {"x": "2,8,4", "runtime": "tensorrt-rtx"}, "TensorRT#4756"),
        (GROUP.format(1), {"x": "2,8,4", "target": "tensorrt-10.16"}, "TensorRT#4756"),
    ],
)
def test_fault_is_found(tmp_path: Path, body: str, given: dict[str, Any], issue: str) -> None:
    (message,) = faults(tmp_path, body, **given)
    assert issue in message


@pytest.mark.parametrize(
    ("body", "given"),
    [
        ("y = LayerNormalization<axis = -1>(x, w)", {"x": "2,3,8"}),
        (SKIP, {"x": "1,4,8"}),
        ("a = Mul(x, x) y = LayerNormalization<axis = -1>(a, one1)", {"x": "2,3,8", "held": ONE}),
        ("a = Add(x, x) y = LayerNormalization<axis = -1>(a, w)", {"x": "2,3,8"}),
        (LARGER, {"x": "2,8", "held": ", float two = {2.0}"}),
        (GROUP.format(1), {"x": "2,8,4"}),
        (GROUP.format(2), {"x": "2,8,4", "runtime": "tensorrt"}),
        (NARROW, {"x": "2,3,8", "runtime": "tensorrt"}),
    ],
)
def test_sound_node_has_no_fault(tmp_path: Path, body: str, given: dict[str, Any]) -> None:
    assert not faults(tmp_path, body, **given)


def larger() -> onnx.ModelProto:
    proto = model(LARGER, opset=21, x="1,1")
    proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 8
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(2), "two"))
    return proto


def test_larger_result_is_found(tmp_path: Path) -> None:
    onnx.save(larger(), tmp_path / "m.onnx")
    (file,) = normdeploy.check([tmp_path / "m.onnx"]).files
    assert ["onnxruntime#31980" in p.message for p in file.findings if p.rule == "runtime-fault"] == [True]


@pytest.mark.parametrize(
    ("proto", "shape"), [(larger(), (1, 1)), (model(SINGLE, opset=21, x="2,3,8", held=ONE), (2, 3, 8))]
)
def test_optimizer_of_installed_onnxruntime_has_fault(proto: onnx.ModelProto, shape: tuple[int, ...]) -> None:
    """If this fails, onnxruntime has mended the fault: its version belongs into the rule."""
    feeds = {"x": np.random.default_rng(0).normal(size=shape).astype(np.float32)}
    file = proto.SerializeToString()
    open_session(file, optimize=False).run(None, feeds)
    with pytest.raises(Exception, match="INVALID_ARGUMENT"):
        open_session(file, optimize=True).run(None, feeds)
