"""Names of a file and of the model: what is renamed stays the same function, and a map that can't be followed is an
error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import normdeploy
from normdeploy.errors import InputError
from normdeploy.verbs.verify.io_matching import rename_ends

from ...support import run_onnxruntime

X, Z = (np.random.default_rng(5).standard_normal((2, 3)).astype(np.float32) for _ in range(2))
HEAD = '<ir_version: 8, opset_import: ["": 18]> net (float[2, 3] x, float[2, 3] z) => (float[2, 3] a, float[2, 3] b)'
PLAIN = HEAD + " <float[3] w = {1.0, 2.0, 3.0}> { h = Mul(x, w) a = Sub(h, z) b = Neg(a) }"
BODY = (
    HEAD
    + """ <float[3] w = {1.0, 2.0, 3.0}> {
        h = Mul(x, w)
        s = ReduceSum <keepdims = 0> (h)
        yes = Greater(s, s)
        a = If (yes) <then_branch = t () => (float[2, 3] p) { p = Mul(h, w) }, else_branch = e () => (float[2, 3] q) {
        q = Sub(h, z) }>
        b = Neg(a)
    }"""
)


@pytest.mark.parametrize("text", [PLAIN, BODY], ids=["plain", "with bodies"])
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ({}, {"a": "b", "b": "a"}),
        ({"x": "z", "z": "x"}, {}),
        ({"x": "a", "z": "b"}, {"a": "x", "b": "z"}),
        ({"x": "h"}, {"a": "w"}),
        ({}, {"a": "b"}),  # the other b is an output more, which nothing is compared with
        ({"x": "input"}, {"b": "output"}),
    ],
    ids=[
        "outputs swapped",
        "inputs swapped",
        "inputs and outputs swapped",
        "names of inner tensors",
        "one of two",
        "new names",
    ],
)
def test_a_renamed_file_computes_the_same(text: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> None:
    proto = onnx.parser.parse_model(text)
    made = rename_ends(proto, inputs, outputs)
    onnx.checker.check_model(made, full_check=True)
    plain = dict(zip(("a", "b"), run_onnxruntime(proto, {"x": X, "z": Z}), strict=True))
    feeds = {inputs.get(name, name): value for name, value in {"x": X, "z": Z}.items()}
    found = dict(zip((v.name for v in made.graph.output), run_onnxruntime(made, feeds), strict=True))
    for name, value in plain.items():
        if name in outputs or name not in outputs.values():
            np.testing.assert_array_equal(found[outputs.get(name, name)], value)


class Two(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(x), torch.sigmoid(x)


def test_drift_of_a_file_whose_outputs_are_swapped(tmp_path: Path) -> None:
    example = torch.randn(2, 3)
    exported = normdeploy.export(Two().eval(), example, output=tmp_path / "net.onnx")
    first, second = (v.name for v in exported.proto.graph.output)
    onnx.save(rename_ends(exported.proto, {}, {first: second, second: first}), tmp_path / "swapped.onnx")
    swapped = {first: second, second: first}
    assert normdeploy.verify(Two().eval(), tmp_path / "swapped.onnx", example, map=swapped, drift=True)
    assert not normdeploy.verify(Two().eval(), tmp_path / "swapped.onnx", example)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "a=x",
            (
                "map a=x mixes inputs and outputs: 'a' is an output of f.onnx, but 'x' is an input of the model; .*"
                " outputs to outputs: a=a or a=b"
            ),
        ),
        (
            "x=b",
            (
                "map x=b mixes inputs and outputs: 'x' is an input of f.onnx, but 'b' is an output of the model; .*"
                ": x=x or x=z"
            ),
        ),
    ],
)
def test_an_output_is_not_mapped_onto_an_input(said: str, told: str, tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(PLAIN), tmp_path / "f.onnx")
    with pytest.raises(InputError, match=told):
        normdeploy.verify(tmp_path / "f.onnx", tmp_path / "f.onnx", map=[said])


def test_input_in_another_layout_is_told_with_the_transposition(tmp_path: Path) -> None:
    last = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> net (float[1, 6, 5, 3] pixels) => (float[1, 6, 5, 3] y)'
        " { y = Relu(pixels) }"
    )
    onnx.save(last, tmp_path / "net.onnx")
    with pytest.raises(InputError) as caught:
        normdeploy.verify(torch.nn.ReLU().eval(), tmp_path / "net.onnx", torch.randn(1, 3, 6, 5))
    assert "pixels looks like input.transpose(0, 2, 3, 1), the channels last" in str(caught.value)
    assert "`bisect --map pixels=input`" in str(caught.value)


class Padded(torch.nn.Module):
    """Takes the kinds of the tokens, as a BERT does, and does not use them."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        return x * mask


def test_an_input_that_the_model_does_not_use_may_be_left_out_of_the_file(tmp_path: Path) -> None:
    inputs = ["x:float32[b,n]", "mask:float32[b,n]", "kinds:int64[b,n]"]
    text = """<ir_version: 8, opset_import: ["": 17]> net (float[b,n] x, float[b,n] mask) => (float[b,n] output)
      { output = Mul (x, OTHER) }"""
    for other, right in (("mask", True), ("x", False)):
        path = tmp_path / f"{other}.onnx"
        onnx.save(onnx.parser.parse_model(text.replace("OTHER", other)), path)
        comparison = normdeploy.verify(Padded().eval(), path, inputs=inputs, seeds=1)
        assert bool(comparison) is right
        assert f"{path.name} does not have the inputs kinds, which the model does not use" in comparison.notes


def test_an_input_that_the_model_uses_may_not_be_left_out(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["": 17]> net (float[b,n] x) => (float[b,n] output) { output = Abs (x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "one.onnx")
    inputs = ["x:float32[b,n]", "mask:float32[b,n]", "kinds:int64[b,n]"]
    with pytest.raises(InputError, match="was the file exported from this model"):
        normdeploy.verify(Padded().eval(), tmp_path / "one.onnx", inputs=inputs, seeds=1)
