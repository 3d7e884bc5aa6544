"""A metric of the user decides in ``verify`` and in quantization, and runs only with trust."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import typer.testing

import normdeploy
from normdeploy.cli.app import app
from normdeploy.compare.policy import parse_policy
from normdeploy.errors import InputError, TrustError
from normdeploy.verbs.arguments.user_metrics import declare_metric

MODEL = """<ir_version: 10, opset_import: ["" : 21]> g (float[n, 8] x) => (float[n, 4] y) { y = MatMul(x, w) }"""
CODE = """
import pathlib
import numpy
pathlib.Path("ran").touch()
def closeness(outputs, expected):
    assert outputs.shape == expected.shape
    pathlib.Path("rows").write_text(str(len(outputs)))
    return 1 - numpy.abs(outputs - expected).max()
def text(outputs, expected):
    return "close"
def fails(outputs, expected):
    raise ValueError("too close")
def first(outputs, expected):
    return outputs[:, 0]
def leaves(outputs, expected):
    raise SystemExit(0)
"""
W, NOISE = np.random.default_rng(1).standard_normal((2, 8, 4)).astype(np.float32) * np.float32([[[1]], [[0.02]]])
X = np.random.default_rng(0).standard_normal((37, 8)).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """right.onnx, off.onnx (its weights have noise), samples, and a module of the user."""
    monkeypatch.chdir(tmp_path)
    for name, weight in (("right", W), ("off", W + NOISE)):
        proto = onnx.parser.parse_model(MODEL)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
        onnx.save(proto, f"{name}.onnx")
    np.savez("data.npz", x=X)
    Path("my_metrics.py").write_text(CODE)
    return tmp_path


def verified(metric: Any, **options: Any) -> Any:
    return normdeploy.verify(
        "right.onnx", "off.onnx", dims=["n=1:4:8"], dataset="data.npz", metric=metric, **{"trust": True, **options}
    )


def test_the_function_decides_on_the_rows_of_all_inputs(folder: Path) -> None:
    off = 1 - np.abs(X.astype(np.float64) @ NOISE).max()
    assert verified(f"my_metrics:closeness>={off - 1e-5}")
    comparison = verified({"y": f"my_metrics:closeness:{off + 1e-5}"})
    assert not comparison
    (row,) = {r.measured for result in comparison.results if result.file for r in result.rules}
    assert row == pytest.approx(off, abs=1e-5)
    assert Path("rows").read_text() == "37"


def test_the_function_judges_a_model_in_memory(folder: Path) -> None:
    module = torch.nn.Linear(8, 4, bias=False).eval()
    module.weight.data = torch.from_numpy(W.T.copy())
    options: Any = {"inputs": ["x[n,8]"], "dims": ["n=1:4:8"], "seeds": 1}
    assert normdeploy.verify(module, "right.onnx", metric="my_metrics:closeness>=0.5", trust=True, **options)
    with pytest.raises(TrustError):
        normdeploy.verify(module, "right.onnx", metric="my_metrics:closeness>=0.5", **options)


def test_no_code_runs_without_trust(folder: Path) -> None:
    Path("rules.toml").write_text('metric = "my_metrics:closeness>=0.5"')
    for options in ({"metric": "my_metrics:closeness>=0.5"}, {"metric": None, "policy": "rules.toml"}):
        with pytest.raises(TrustError, match=r"--metric: my_metrics:closeness runs .*--trust-remote-code"):
            verified(trust=False, **options)
    assert not Path("ran").exists()
    Path("other_rules.toml").write_text('metric = "my_metrics:closeness>=-9"')
    assert verified(None, policy="other_rules.toml")


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("my_metrics:missing>=0.5", "--metric: the module my_metrics has no function 'missing'"),
        ("no_such_metrics:closeness>=0.5", "module not found: no_such_metrics"),
        ("my_metrics:text>=0.5", "the metric my_metrics:text returned str; return one number"),
        ("my_metrics:first>=0.5", "the metric my_metrics:first returned ndarray; return one number"),
        (
            "my_metrics:fails>=0.5",
            "the metric my_metrics:fails failed: ValueError: too close (line 12 of my_metrics.py)",
        ),
        ("my_metrics:leaves>=0.5", "the metric my_metrics:leaves failed: it exits the process (line 16"),
        ("my_metrics:closeness<=0.5", "the larger my_metrics:closeness is, the better"),
        ("my_metrics:closeness>=high", "the threshold 'high' is not a number"),
        ("my_metrics:closeness>=nan", "is a finite number"),
    ],
)
def test_errors_name_the_function(folder: Path, metric: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        verified(metric)
    assert message in str(caught.value)


def test_inputs_of_several_shapes_fail_the_metric(folder: Path) -> None:
    text = (
        MODEL.replace("float[n, 8] x", "float[n, m] x").replace("MatMul(x, w)", "Relu(x)").replace("[n, 4]", "[n, m]")
    )
    onnx.save(onnx.parser.parse_model(text), "relu.onnx")
    comparison = normdeploy.verify(
        "relu.onnx", "relu.onnx", dims=["n=1:2:4", "m=1:2:4"], metric="my_metrics:closeness>=0", trust=True
    )
    assert not comparison
    assert any("its rows are" in result.reason for result in comparison.results)


def test_the_command_and_quantization_take_it_too(folder: Path) -> None:
    words = ["--dataset", "data.npz", "--metric", "my_metrics:closeness:-9", "--dim", "n=1:4:8"]
    done = typer.testing.CliRunner().invoke(app, ["verify", "right.onnx", "off.onnx", *words])
    assert isinstance(done.exception, TrustError)
    done = typer.testing.CliRunner().invoke(app, ["verify", "right.onnx", "off.onnx", *words, "--trust-remote-code"])
    assert done.exit_code == 0, done.output
    assert "my_metrics:closeness 0." in done.output
    result = normdeploy.optimize(
        "right.onnx",
        dims=["n=1:4:8"],
        quantize="int8",
        runtime="onnxruntime",
        calibrate="data.npz",
        metric="my_metrics:closeness>=0.5",
        trust=True,
    )
    assert result.quantization is not None
    (judged,) = result.quantization.judged
    assert judged.metric == "my_metrics:closeness"
    assert 0.5 <= judged.value < 1


def test_a_fleet_checks_rules_without_importing_them(folder: Path) -> None:
    policy = parse_policy(None, ["y=my_metrics:closeness>=0.5", "cosine:0.9"], declare_metric)
    assert [str(rule) for rule in policy.rules_for("y")] == ["cosine>=0.9", "my_metrics:closeness>=0.5"]
    assert not Path("ran").exists()
