"""Tokens and settings of the search, as transformers' ``generate`` reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from normdeploy.errors import InputError, LoadError
from normdeploy.loading.generation_settings import GenerationSettings, read_generation_settings

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    **{"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_without_a_generation_config_the_config_is_read(folder: Path) -> None:
    expected = GenerationSettings(positions=128, bos=1, eos=(2,), pad=None, window=None, search={})
    assert read_generation_settings(folder, trust=False) == expected


def test_generation_config_comes_first(folder: Path) -> None:
    stated = {"eos_token_id": [7, 8], "pad_token_id": 0, "do_sample": True, "temperature": 1, "top_p": 0.9, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    settings = read_generation_settings(folder, trust=False)
    assert (settings.bos, settings.eos, settings.pad) == (1, (7, 8), 0)
    assert settings.search == {"do_sample": True, "temperature": 1.0, "top_p": 0.9, "top_k": 20}


def test_window_is_read(folder: Path) -> None:
    changed = {**CONFIG, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16}
    (folder / "config.json").write_text(json.dumps(changed))
    assert read_generation_settings(folder, trust=False).window == 16


@pytest.mark.parametrize(
    ("stated", "said"),
    [({"top_p": "high"}, "sets top_p to 'high'"), ({"eos_token_id": [2, "x"]}, r"sets eos_token_id to \[2, 'x'\]")],
)
def test_invalid_setting_is_refused(folder: Path, stated: dict[str, Any], said: str) -> None:
    (folder / "generation_config.json").write_text(json.dumps(stated))
    with pytest.raises(LoadError, match=said):
        read_generation_settings(folder, trust=False)


def test_folder_without_a_token_that_ends_a_text_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": None}))
    with pytest.raises(InputError, match="states no token that ends a text"):
        read_generation_settings(folder, trust=False)


def test_encoder_decoder_is_refused(folder: Path) -> None:
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"is an encoder-decoder \(t5\).*--part all"):
        read_generation_settings(folder, trust=False)
