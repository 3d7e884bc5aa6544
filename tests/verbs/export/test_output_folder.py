"""The tokenizer of a decoder's folder lies beside the exported file, if no other tokenizer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

import normdeploy
from normdeploy.loading import from_module
from normdeploy.storage.export_record import TOKENIZER_FLAG, read_record
from normdeploy.storage.tokenizer_files import hash_vocabulary
from tests.decoders import PAST_DIMS, PAST_INPUTS, Decoder, WithPast, past_example

FILES = {"config.json": "{}", "tokenizer.json": "{1}", "tokenizer_config.json": "{2}", "merges.txt": "a b"}
OTHERS = {"model.safetensors": "weights", "modeling.py": "raise SystemExit"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for name, text in (FILES | OTHERS).items():
        (made / name).write_text(text)

    def load_small(*_: Any, **__: Any) -> Any:
        return from_module(WithPast(Decoder()).eval(), past_example(), inputs=PAST_INPUTS, dims=PAST_DIMS)

    monkeypatch.setattr("normdeploy.verbs.export.export_function.load_source", load_small)
    (tmp_path / "out").mkdir()
    return made


def export(folder: Path, output: Path, task: str | None = "text-generation-with-past") -> Any:
    return normdeploy.export(folder, output=output, task=task)


def names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_tokenizer_lies_beside_the_file(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out" / "decoder.onnx"
    assert not any("tokenizer" in note for note in export(folder, output).notes)
    assert names_in(output.parent) == sorted([*FILES, "decoder.onnx"])
    assert (output.parent / "merges.txt").read_text() == "a b"
    assert read_record(onnx.load(output))["export"][TOKENIZER_FLAG] == hash_vocabulary(folder)
    # The same model once more, as another file.
    assert not any("tokenizer" in note for note in export(folder, tmp_path / "out" / "again.onnx").notes)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "vocab.txt"])
def test_other_files_are_neither_replaced_nor_mixed(name: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / name).write_text("of another model")
    (note,) = [note for note in export(folder, tmp_path / "out" / "decoder.onnx").notes if "tokenizer" in note]
    assert f"has another {name}; pass --tokenizer" in note
    assert names_in(tmp_path / "out") == sorted([name, "decoder.onnx"])
    assert (tmp_path / "out" / name).read_text() == "of another model"


def test_model_without_a_past_or_a_tokenizer_copies_nothing(folder: Path, tmp_path: Path) -> None:
    export(folder, tmp_path / "out" / "encoder.onnx", task="text-generation")
    assert names_in(tmp_path / "out") == ["encoder.onnx"]
    for name in ("tokenizer.json", "merges.txt"):
        (folder / name).unlink()
    export(folder, tmp_path / "out" / "decoder.onnx")
    assert names_in(tmp_path / "out") == ["decoder.onnx", "encoder.onnx"]


def test_a_file_inside_the_model_s_folder_changes_nothing_else(folder: Path) -> None:
    export(folder, folder / "decoder.onnx")
    assert names_in(folder) == sorted([*FILES, *OTHERS, "decoder.onnx"])


def test_failed_copy_is_a_note_beside_a_complete_file(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out" / "decoder.onnx"
    # A folder with the name of a file of the tokenizer.
    (output.parent / "merges.txt").mkdir()
    (note,) = [note for note in export(folder, output).notes if "tokenizer" in note]
    assert note.startswith("the tokenizer was not copied: can't write")
    assert f"pass --tokenizer {folder}" in note
    assert onnx.load(output).graph.node
