"""What Triton refuses to load, and so must not be written: seen with the server itself (2.51) and in its backend's
source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import normdeploy
from normdeploy.errors import InputError
from normdeploy.verbs.package import triton_config
from tests.packaged import written

SHAPED = (
    "<int64[1] i = {0}, int64[1] f = {3}> { s = Shape(x) d = Gather(s, i) t = Concat<axis=0>(d, f) y = Reshape(x, t) }"
)


def config_of(bundle: Path) -> Any:
    return triton_config.parse_config((bundle / "model_repository/model_onnx/config.pbtxt").read_text())


def rows(n: int = 3) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).standard_normal((n, 3)).astype(np.float32)}


def test_scalars_have_no_reshape_where_triton_does_not_batch(tmp_path: Path) -> None:
    path = written(tmp_path, "g (float x, float[3] v) => (float y, float[3] w) { y = Mul(x, x) w = Mul(v, x) }")
    assert normdeploy.package(path, tmp_path / "b", feeds={"x": np.array(2.0, np.float32), "v": rows(1)["x"][0]})
    config = config_of(tmp_path / "b")
    assert [(list(t.dims), t.HasField("reshape")) for t in (*config.input, *config.output)] == [
        ([1], False),
        ([3], False),
        ([1], False),
        ([3], False),
    ]
    assert normdeploy.recheck(tmp_path / "b")


@pytest.mark.parametrize(
    ("text", "dims"),
    [
        ("g (float[n, 3] x) => (float[n, k] y) { y = Relu(x) }", [3]),
        (
            "g (float[n, 3] x) => (float[n, 5] y) { y = Relu(x) }",
            [-1],
        ),  # a wrong statement, which onnxruntime takes back
        (f"g (float[n, 3] x) => (float[n, k] y) {SHAPED}", [3]),  # only its optimizer finds this one
    ],
)
def test_outputs_are_stated_as_onnxruntime_infers_them(tmp_path: Path, text: str, dims: list[int]) -> None:
    assert normdeploy.package(written(tmp_path, text), tmp_path / "b", feeds=rows())
    config = config_of(tmp_path / "b")
    assert config.max_batch_size == 3
    assert list(config.output[0].dims) == dims
    assert normdeploy.recheck(tmp_path / "b")


@pytest.mark.parametrize(
    ("newer", "said"),
    [
        ("g (float[n, 3] x) => (float[n, 3] y) { y = Relu(x) }", ""),
        (
            "g (float[n, k] x) => (float[n, k] y) { y = Relu(x) }",
            "it declares 'y' with the dims [3], but the model has y:float32[n, k]",
        ),
        (
            "g (float[3, 3] x) => (float[3, 3] y) { y = Relu(x) }",
            "it lets Triton join requests along the first dim of 'x'",
        ),
    ],
)
def test_recheck_says_that_triton_would_refuse_a_newer_file(tmp_path: Path, newer: str, said: str) -> None:
    text = "g (float[n, 3] x) => (float[n, 3] y) { y = Relu(x) }"
    normdeploy.package(written(tmp_path, text), tmp_path / "b", feeds=rows())
    found = normdeploy.recheck(tmp_path / "b", onnx=written(tmp_path, newer, "newer.onnx"))
    told = [change.now for change in found.changes if change.what == "config"]
    assert bool(told) == bool(said)
    assert said in "".join(told)


def test_types(tmp_path: Path) -> None:
    half = written(tmp_path, "g (bfloat16[n, 3] x) => (bfloat16[n, 3] y) { y = Identity(x) }")
    made = normdeploy.package(half, tmp_path / "b", feeds={"x": rows()["x"].astype(ml_dtypes.bfloat16)})
    assert any("does not support bfloat16 (x, y) and can't load model_onnx" in note for note in made.notes)
    words = written(tmp_path, "g (string[n, 3] x) => (string[n, 3] y) { y = Identity(x) }")
    with pytest.raises(InputError, match="'x' has the dtype string, which arrays in samples"):
        normdeploy.package(words, tmp_path / "c", feeds=rows())
