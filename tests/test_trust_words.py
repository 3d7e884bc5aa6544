"""``--trust`` is parted: one word runs code, the other names a key. No word means more than before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer.testing

from normdeploy.cli.app import app
from normdeploy.errors import InputError
from normdeploy.other_words import OwnOptions, TranslatedLine, translate_command_line
from normdeploy.trust_words import CODE_WORDS, KEY_WORDS

CODE = OwnOptions(names={"--trust-remote-code": "trust"})
KEY = OwnOptions(names={"--trust-key": "trust"}, valued={"trust"}, repeatable={"trust"})


def translate(line: str, *, keys: bool = False) -> TranslatedLine:
    if keys:
        return translate_command_line(line.split(), KEY_WORDS, KEY)
    return translate_command_line(line.split(), CODE_WORDS, CODE)


def test_the_former_word_works_in_each_verb_with_a_note() -> None:
    line = translate("model.pt --trust -o m.onnx")
    assert line.args == ["model.pt", "--trust-remote-code", "-o", "m.onnx"]
    assert line.notes == ["--trust is now --trust-remote-code: it runs the code of the model file"]
    line = translate("bundle --trust a.pem --trust=b.pem", keys=True)
    assert line.args == ["bundle", "--trust-key", "a.pem", "--trust-key", "b.pem"]
    assert set(line.notes) == {"--trust is now --trust-key: only content that this key has signed is accepted"}


@pytest.mark.parametrize("line", ["--trust public.pem", "--trust=public.pem", "--trust key.pub", "--trust=anything"])
def test_a_key_after_the_word_that_runs_code_is_an_error_that_names_both(line: str) -> None:
    with pytest.raises(InputError) as caught:
        translate(f"model.pt m.onnx {line}")
    for word in ("--trust-remote-code", "--trust-key", line.replace("=", " ").split()[1]):
        assert word in str(caught.value)


def test_a_key_is_recognized_by_its_content(tmp_path: Path) -> None:
    key = tmp_path / "team"
    key.write_text("-----BEGIN PUBLIC KEY-----\n")
    with pytest.raises(InputError, match="--trust-key"):
        translate(f"model.pt --trust {key}")
    key.write_bytes(b"\x08 an ONNX file")
    assert translate(f"model.pt --trust {key}").args == ["model.pt", "--trust-remote-code", str(key)]


@pytest.mark.parametrize("line", ["bundle --trust", "bundle --trust --report r.json"])
def test_the_former_word_without_a_key_is_an_error_that_names_both(line: str) -> None:
    with pytest.raises(InputError) as caught:
        translate(line, keys=True)
    assert "--trust-remote-code" in str(caught.value)
    assert "--trust-key PUBLIC.pem" in str(caught.value)


def test_the_word_of_the_other_kind_of_verb_is_refused() -> None:
    with pytest.raises(InputError, match="only recheck and the verbs of fleet check signatures"):
        translate("model.pt --trust-key public.pem")
    with pytest.raises(InputError, match="trust_remote_code = true"):
        translate("fleet.toml --trust-remote-code", keys=True)


def test_nothing_runs_when_a_key_follows_the_former_word(tmp_path: Path) -> None:
    model, key = tmp_path / "model.pt", tmp_path / "public.pem"
    ran = tmp_path / "ran"
    torch.save({"weights": Executed(str(ran))}, model)
    key.write_text("-----BEGIN PUBLIC KEY-----\n")
    done = typer.testing.CliRunner().invoke(app, ["verify", str(model), str(tmp_path / "m.onnx"), "--trust", str(key)])
    assert isinstance(done.exception, InputError)
    assert not ran.exists()


class Executed:
    """An object whose unpickling makes a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        import os

        return os.mkdir, (self.folder,)
