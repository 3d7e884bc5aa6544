"""``run --generate`` by a decoder that counts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app
from normdeploy.errors import InputError
from tests.decoders import counting_decoder


@pytest.fixture
def counting(tmp_path: Path) -> Path:
    path = tmp_path / "counting.onnx"
    onnx.save(counting_decoder(), path)
    return path


def test_token_ids_are_continued(counting: Path, tmp_path: Path) -> None:
    done = normdeploy.run(counting, output=tmp_path / "out.npz", generate=3, prompt_ids=[[4, 5], "9"])
    np.testing.assert_array_equal(done.arrays["tokens"], [[6, 7, 8], [10, 11, 0]])
    np.testing.assert_array_equal(np.load(tmp_path / "out.npz")["tokens"], done.arrays["tokens"])
    assert "prompt 2: 10,11,0" in str(done)


def test_one_text_of_token_ids_is_one_prompt(counting: Path) -> None:
    assert normdeploy.run(counting, generate=1, prompt_ids="10").arrays["tokens"].tolist() == [[11]]


def test_the_command_prints_and_reports_the_tokens(counting: Path, tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    arguments = ["run", str(counting), "--generate", "2", "--prompt-ids", "1,2", "--report", str(report)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "prompt 1: 3,4" in done.output
    assert json.loads(report.read_text())["inference"]["tokens"] == [[3, 4]]


def test_arrays_give_prompts_and_random_tokens_replace_missing_prompts(counting: Path) -> None:
    done = normdeploy.run(counting, {"input_ids": np.array([[7]])}, generate=1)
    assert done.arrays["tokens"].tolist() == [[8]]
    random = normdeploy.run(counting, generate=2)
    assert random.arrays["tokens"].shape == (1, 2)
    assert any("no prompt was passed" in note for note in random.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_ids": ["1"]}, "add --generate N"),
        ({"generate": 0, "prompt_ids": ["1"]}, "generate is 0; pass a whole number of 1 or more"),
        ({"generate": 2, "prompts": "hello"}, "has no tokenizer"),
        ({"generate": 2, "prompt_ids": ["a"]}, "not a list of token ids"),
        ({"generate": 2, "prompt_ids": np.array([[1, 2], [3, 4]])}, "not a list of token ids"),
        ({"generate": 2, "prompt_ids": [1, 2]}, "the prompt 1 is not a list of token ids"),
        ({"generate": 2, "prompt_ids": ["99999999999999999999"]}, "not a list of token ids"),
        ({"generate": 2, "prompt_ids": ["1"], "prompts": ["x"]}, "pass the prompts in one way"),
        ({"generate": 2, "stated_inputs": ["input_ids=0:3"]}, "pass --prompt or --prompt-ids"),
    ],
)
def test_wrong_options_are_refused(counting: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        normdeploy.run(counting, **options)


def test_a_file_without_a_cache_is_refused(tmp_path: Path) -> None:
    graph = "<ir_version: 10, opset_import: ['': 21]> g (float[n] x) => (float[n] y) { y = Relu(x) }".replace("'", '"')
    onnx.save(onnx.parser.parse_model(graph), tmp_path / "relu.onnx")
    with pytest.raises(InputError, match="a decoder that generates takes 'input_ids' and a cache"):
        normdeploy.run(tmp_path / "relu.onnx", generate=2)
