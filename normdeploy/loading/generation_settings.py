"""Read how a Hugging Face folder generates text: its special tokens, its limits, and its settings for sampling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, LoadError
from .huggingface_folder import check_folder
from .huggingface_generation import find_window
from .torch_pickles import first_line
from .torch_state import silence_logger
from .traceable_models import count_positions

# Settings of transformers' generation config -> type. The names are the names of onnxruntime-genai too.
_SEARCH: Mapping[str, type] = {
    "do_sample": bool,
    "early_stopping": bool,
    "length_penalty": float,
    "no_repeat_ngram_size": int,
    "num_beams": int,
    "num_return_sequences": int,
    "repetition_penalty": float,
    "temperature": float,
    "top_k": int,
    "top_p": float,
}
_GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of a decoder for generating text.

    Attributes:
        positions: number of positions of the model.
        bos: token that begins a text; None if there is none.
        eos: tokens that end a text.
        pad: token that fills shorter rows of a batch; None if there is none.
        window: number of positions that a layer with a sliding window sees; None without a window.
        search: stated settings of the search by transformers' name, such as {"do_sample": True, "top_p": 0.9}.
    """

    positions: int
    bos: int | None
    eos: tuple[int, ...]
    pad: int | None
    window: int | None
    search: Mapping[str, bool | int | float]


def read_generation_settings(path: Path, *, trust: bool) -> GenerationSettings:
    """Read the settings as transformers' ``generate`` does: ``generation_config.json``, else ``config.json``.

    Args:
        trust: True lets the folder's own config class run.

    Returns:
        The settings.

    Raises:
        InputError: the model is an encoder-decoder, or no token ends a text.
        LoadError: a setting is invalid.
        NormdeployError: as for ``check_folder``.
    """
    checked = check_folder(path, trust=trust)
    from transformers import AutoConfig, GenerationConfig

    try:
        with silence_logger("transformers"):
            whole: Any = AutoConfig.from_pretrained(str(path), **checked.options)
            config: Any = whole.get_text_config(decoder=True)
            if (path / _GENERATION_FILE).is_file():
                generation: Any = GenerationConfig.from_pretrained(str(path), local_files_only=True)
            else:
                generation = GenerationConfig.from_model_config(whole)
    except Exception as error:
        # The errors of transformers share no base class.
        raise LoadError(f"{path} has no readable config: {type(error).__name__}: {first_line(error, '')}") from error
    if getattr(whole, "is_encoder_decoder", False):
        raise InputError(
            f"{path} is an encoder-decoder ({whole.model_type}), and its encoder and decoder are several files; --genai"
            " writes decoders alone. Export the parts with --part all"
        )
    eos = _read_tokens(path, "eos_token_id", generation, config)
    if not eos:
        raise InputError(
            f"{path} states no token that ends a text, without which onnxruntime-genai ends a text at the token for"
            f" padding; set eos_token_id in {_GENERATION_FILE}"
        )
    return GenerationSettings(
        positions=count_positions(config),
        bos=next(iter(_read_tokens(path, "bos_token_id", generation, config)), None),
        eos=eos,
        pad=next(iter(_read_tokens(path, "pad_token_id", generation, config)), None),
        window=find_window(config),
        search=_read_search(path, generation),
    )


def _read_tokens(path: Path, name: str, generation: Any, config: Any) -> tuple[int, ...]:
    """Return the token ids of one kind, which the folder states as a number or as a list; () if there are none."""
    stated = getattr(generation, name, None)
    if stated is None:
        stated = getattr(config, name, None)
    if stated is None:
        return ()
    ids = stated if isinstance(stated, list | tuple) else [stated]
    # Old folders of Llama write -1 for no token.
    ids = [token for token in ids if token != -1]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise LoadError(f"{path} sets {name} to {stated!r}, which is not a token id of 0 or more; correct the folder")
    return tuple(ids)


def _read_search(path: Path, generation: Any) -> dict[str, bool | int | float]:
    settings: dict[str, bool | int | float] = {}
    for name, kind in _SEARCH.items():
        value = getattr(generation, name, None)
        if value is None or (name == "early_stopping" and value == "never"):
            continue
        valid = type(value) is kind or (kind is float and type(value) is int)
        if not valid or not math.isfinite(value):
            raise LoadError(
                f"{path} sets {name} to {value!r}, but a number of type {kind.__name__} is needed; correct"
                f" {_GENERATION_FILE}"
            )
        settings[name] = kind(value)
    return settings
