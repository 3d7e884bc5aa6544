"""A folder for onnxruntime-genai: written whole or not at all, and refused with a reason.

The model is a small decoder in torch. Settings of real folders need transformers
(``tests/loading/test_generation_settings.py``).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app
from normdeploy.errors import InputError, NormdeployError
from normdeploy.loading import from_module
from normdeploy.loading.generation_settings import GenerationSettings
from normdeploy.storage.export_record import read_record
from tests.decoders import HEAD, HEADS, PAST_INPUTS, VOCABULARY, Decoder, WithPast, past_example

SETTINGS = GenerationSettings(positions=80, bos=1, eos=(2,), pad=None, window=None, search={"temperature": 0.5})
WRITTEN = ["config.json", "genai_config.json", "model.onnx", "tokenizer.json"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "tokenizer.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"weights")
    (made / "modeling.py").write_text("raise SystemExit")
    return made


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Load the small decoder in place of the folder's model; what loads it is kept."""
    given: dict[str, Any] = {}

    def load_small(source: Any, args: Any, kwargs: Any, options: Any, **_: Any) -> Any:
        given.update(options)
        dims = [*options["dims"], *given.get("more", ())]
        return from_module(WithPast(Decoder()).eval(), past_example(), inputs=PAST_INPUTS, dims=dims)

    monkeypatch.setattr("normdeploy.verbs.export.export_function.load_source", load_small)
    monkeypatch.setattr("normdeploy.verbs.export.genai_export.read_generation_settings", lambda *_, **__: SETTINGS)
    return given


def _exported(source: Path, output: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["export", str(source), "-o", str(output), "--genai", *options])


def test_folder_has_file_config_and_tokenizer(folder: Path, loading: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "made"
    loading["more"] = ["past=0:8:70"]
    result = normdeploy.export_genai(folder, output)
    assert sorted(file.name for file in output.iterdir()) == WRITTEN
    # An eighth of the positions is read at once.
    assert (loading["task"], loading["dims"]) == ("text-generation-with-past", ["seq=1:8:10"])
    assert result.path == output / "model.onnx"
    config = json.loads((output / "genai_config.json").read_text())
    assert config["model"]["context_length"] == 71
    assert config["model"]["vocab_size"] == VOCABULARY
    assert config["search"] == {
        "temperature": 0.5,
        "top_k": VOCABULARY,
        "max_length": 71,
        "chunk_size": 10,
        "past_present_share_buffer": False,
    }
    decoder = config["model"]["decoder"]
    assert (decoder["num_key_value_heads"], decoder["head_size"], decoder["num_hidden_layers"]) == (HEADS, HEAD, 1)
    names = {value.replace("%d", "0") for value in decoder["inputs"].values()}
    assert names == {value.name for value in result.proto.graph.input}
    names = {value.replace("%d", "0") for value in decoder["outputs"].values()}
    assert names == {value.name for value in result.proto.graph.output}
    assert read_record(result.proto)["inputs"][0].shape[1].max == 10
    assert result.origin is not None
    assert result.origin.source == folder


def test_command_line_prints_the_limits(folder: Path, loading: dict[str, Any], tmp_path: Path) -> None:
    told = _exported(
        folder, tmp_path / "made", "--dim", "past=0:8:40", "--dim", "seq=1:4:9", "--report", str(tmp_path / "r.json")
    )
    assert told.exit_code == 0, told.output
    assert loading["dims"] == ["past=0:8:40", "seq=1:4:9"]
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["files"]["output"] == str(tmp_path / "made" / "model.onnx")
    assert any("onnxruntime-genai reads at most 41 tokens" in note for note in report["notes"])


def test_folder_is_written_whole_or_not_at_all(folder: Path, loading: dict[str, Any], tmp_path: Path) -> None:
    told = _exported(folder, tmp_path / "made", "--dim", "past=4:8:40")
    assert told.exit_code == 1
    assert "the file takes 4 to 40 earlier tokens" in str(told.exception)
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--part", "decoder"], "the part 'decoder' was passed"),
        (["--task", "text-generation"], "the task 'text-generation' was passed; omit --task"),
        (["--store", "store"], "--genai writes a folder.*omit --store"),
    ],
)
def test_options_that_contradict_are_refused(
    options: list[str], said: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = _exported(folder, tmp_path / "made", *options)
    assert told.exit_code == 1
    assert isinstance(told.exception, InputError)
    assert re.search(said, str(told.exception))
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_output_that_is_no_new_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--genai writes a folder, but the output .*model.onnx' is named like a file"):
        normdeploy.export_genai(folder, tmp_path / "model.onnx")
    with pytest.raises(InputError, match="is inside the model's folder"):
        normdeploy.export_genai(folder, folder / "made")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "mine").write_text("kept")
    with pytest.raises(NormdeployError, match="not an empty folder"):
        normdeploy.export_genai(folder, tmp_path / "made")


def test_model_that_is_not_a_decoders_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"")
    with pytest.raises(InputError, match=r"is not a Hugging Face folder with a config\.json"):
        normdeploy.export_genai(tmp_path / "x.pt", tmp_path / "made")
    (folder / "config.json").rename(folder / "model_index.json")
    with pytest.raises(InputError, match="is a pipeline of diffusers"):
        normdeploy.export_genai(folder, tmp_path / "made")
