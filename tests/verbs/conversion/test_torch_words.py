"""Words of torch.onnx.export and of optimum at ``export`` and ``optimize``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import typer.testing

import normdeploy
from normdeploy.cli.app import app
from normdeploy.errors import InputError


class Net(torch.nn.Module):
    """Two inputs and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm(x) + y, x * 2


@pytest.fixture(scope="module")
def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def args() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 8, generator=generator), torch.randn(2, 8, generator=generator)


def ends(path: Path) -> list[list[str]]:
    graph = onnx.load(path).graph
    return [[value.name for value in graph.input], [value.name for value in graph.output]]


def test_a_call_of_torch_works_unchanged(net: torch.nn.Module, args: tuple[torch.Tensor, ...], tmp_path: Path) -> None:
    call: dict[str, Any] = {"input_names": ["p", "q"], "output_names": ["a", "b"], "opset_version": 20, "dynamo": True}
    call |= {"export_params": True, "do_constant_folding": True, "verbose": False}
    torch.onnx.export(net, args, str(tmp_path / "theirs.onnx"), **call)
    result = normdeploy.export(net, args, str(tmp_path / "ours.onnx"), **call)
    assert ends(tmp_path / "ours.onnx") == ends(tmp_path / "theirs.onnx") == [["p", "q"], ["a", "b"]]
    assert onnx.load(tmp_path / "ours.onnx").opset_import[0].version == 20
    assert normdeploy.verify(result)
    assert normdeploy.verify(net, tmp_path / "ours.onnx", args=args)
    result = normdeploy.export(model=net, args=args, f=tmp_path / "named.onnx", **call)  # type: ignore[call-arg]
    assert result.path == tmp_path / "named.onnx"


def test_a_renamed_file_verifies_against_the_saved_program(
    net: torch.nn.Module, args: tuple[torch.Tensor, ...], tmp_path: Path
) -> None:
    torch.export.save(torch.export.export(net, args), tmp_path / "net.pt2")
    normdeploy.export(tmp_path / "net.pt2", f=tmp_path / "m.onnx", input_names=["p", "q"], output_names=["a", "b"])  # type: ignore[call-arg]
    assert ends(tmp_path / "m.onnx") == [["p", "q"], ["a", "b"]]
    assert normdeploy.verify(tmp_path / "net.pt2", tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"dynamic_axes": {"x": {0: "batch"}}}, "dims="),
        ({"dynamo": False}, "only with torch.export"),
        ({"do_constant_folding": False}, "constants are always computed"),
        ({"verify": False}, "check=False"),
        ({"external_data": True}, "external_data_name="),
        ({"custom_opsets": {"mine": 1}}, "custom_translation_table"),
        ({"training": 1}, "eval=True"),
        ({"atol": 1e-3}, "verify"),
        ({"f": "a.onnx", "output": "b.onnx"}, "f and output are the same argument; pass only output"),
        ({"opset_version": 20, "opset": 21}, "opset_version and opset are the same argument; pass only opset"),
        ({"dtype": "fp16", "precision": "fp16"}, "pass only precision"),
        ({"trust_remote_code": True, "trust": False}, "pass only trust"),
        ({"opset_version": 5}, "opset 5 can't be written"),
        ({"input_names": ["p"]}, "input_names has 1 names, but the model has 2 inputs (x, y)"),
        ({"input_names": "pq"}, "pass a list of names"),
        ({"input_names": ["p", "p"]}, "two inputs the name 'p'"),
        ({"input_names": ["y", "x"]}, "mixes new names with 'y'"),
        ({"output_names": ["a", "b", "c"]}, "output_names has 3 names, but the model has 2 outputs"),
    ],
)
def test_an_argument_without_a_counterpart_names_ours(
    net: torch.nn.Module, args: tuple[torch.Tensor, ...], call: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        normdeploy.export(net, args, **call)
    assert message in str(caught.value)


def test_an_unknown_argument_is_still_a_type_error(net: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'opsetversion'"):
        normdeploy.export(net, args, opsetversion=20)  # type: ignore[call-arg]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[2, 3] x) => (float[2, 3] y) { y = Relu(x) }'
    onnx.save(onnx.parser.parse_model(text), "m.onnx")
    return tmp_path


def run(line: str) -> typer.testing.Result:
    return typer.testing.CliRunner().invoke(app, line.split())


@pytest.mark.parametrize("word", ["--fp16", "--dtype fp16", "--dtype=float16", "--precision fp16"])
def test_words_for_half_precision(folder: Path, word: str) -> None:
    done = run(f"optimize m.onnx -o half.onnx {word}")
    assert done.exit_code == 0, done.output
    (relu,) = (node for node in onnx.load("half.onnx").graph.node if node.op_type == "Relu")
    assert relu.input[0] != "x" or onnx.load("half.onnx").graph.input[0].type.tensor_type.elem_type == 10


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("optimize m.onnx -o half.onnx --fp16 --precision bf16", ["--fp16 and --precision", "only --precision"]),
        ("optimize m.onnx -o half.onnx --device cuda", ["--provider"]),
        ("export m.pt2 -o m2.onnx --opset_version 20 --opset 21", ["--opset_version and --opset", "only --opset"]),
        ("export m.pt2 -o m2.onnx --atol 1e-3", ["--atol", "normdeploy verify", "--no-check"]),
    ],
)
def test_a_word_without_a_counterpart_names_ours(folder: Path, line: str, words: list[str]) -> None:
    done = run(line)
    assert isinstance(done.exception, InputError)
    for word in words:
        assert word in str(done.exception)
    assert [path.name for path in folder.iterdir()] == ["m.onnx"]
