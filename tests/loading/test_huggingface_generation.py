"""The window of a decoder's attention, under the names that configs of transformers give it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from normdeploy.loading.huggingface_generation import find_window


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({}, None),
        # Mistral, Qwen 2 with its window off and on
        ({"sliding_window": 8}, 8),
        ({"sliding_window": 8, "use_sliding_window": False}, None),
        ({"sliding_window": None}, None),
        ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, 8),
        # No layer uses the window.
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, None),
        # Llama 4; the encoders for sound in Gemma 3n have chunks too
        ({"attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"]}, 8),
        ({"attention_chunk_size": 8}, None),
        # GPT-Neo; the encoders for images have windows too
        ({"window_size": 8, "attention_layers": ["global", "local"]}, 8),
        ({"window_size": 8, "attention_layers": ["global"]}, None),
        ({"window_size": 8}, None),
        # ModernBERT's decoder, RecurrentGemma, Inkling
        ({"local_attention": 8}, 8),
        ({"attention_window_size": 8}, 8),
        ({"sliding_window_size": 8}, 8),
    ],
)
def test_window_is_found_under_each_name(config: dict[str, Any], window: int | None) -> None:
    assert find_window(SimpleNamespace(**config)) == window
