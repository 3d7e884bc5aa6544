"""Convert transformers' key-value caches to tensors and back while a model is traced.

The cache of one layer is a pair of tensors [batch, heads, length, head size]. torch.export takes tensors, not cache
objects. The tensors have the same names as in optimum: input ``past_key_values.0.key`` and output ``present.0.key``.
In an encoder-decoder, the names are ``past_key_values.0.decoder.key`` and ``past_key_values.0.encoder.key``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..errors import ExportError

KINDS = ("key", "value")
Pair = tuple[torch.Tensor, torch.Tensor]


def cache_tensor_names(prefix: str, layers: int, side: str = "") -> list[str]:
    """Build the names of a cache's tensors.

    Returns:
        ``prefix.0.key``, ``prefix.0.value``, ``prefix.1.key``, ...; with the ``side`` "decoder",
        ``prefix.0.decoder.key``, ....
    """
    if side:
        inner = f".{side}"
    else:
        inner = ""
    return [f"{prefix}.{layer}{inner}.{kind}" for layer in range(layers) for kind in KINDS]


def pair_keys_values(tensors: Sequence[torch.Tensor]) -> list[Pair]:
    """Pair keys and values.

    Args:
        tensors: keys and values in the order of ``cache_tensor_names``.

    Returns:
        One (key, value) for each layer.
    """
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def flatten_cache(cache: Any) -> list[torch.Tensor]:
    """Take the keys and values out of a cache.

    Returns:
        Tensors in the order of ``cache_tensor_names``.

    Raises:
        ExportError: a layer's cache is not a pair of tensors, but for example the state of a recurrent layer or a
            quantized cache.
    """
    tensors: list[torch.Tensor] = []
    for layer in _cache_layers(cache):
        keys = getattr(layer, "keys", None)
        values = getattr(layer, "values", None)
        if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
            raise ExportError(
                f"a layer of the model's cache is a {type(layer).__name__}, not keys and values; export the model"
                " without its past"
            )
        tensors += [keys, values]
    return tensors


def _cache_layers(cache: Any) -> Sequence[Any]:
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise ExportError(
            f"the model's cache is a {type(cache).__name__}, which has no layers of keys and values; export it without"
            " its past"
        )
    return layers


def make_cache(past: Sequence[Pair]) -> Any:
    """Make a cache that contains ``past``, whose length may be 0. The model appends new tokens to the cache.

    Returns:
        A DynamicCache.
    """
    from transformers import DynamicCache

    cache = DynamicCache()
    cache.layers = [prefilled_layer_class()(*pair) for pair in past]
    return cache


@functools.cache
def prefilled_layer_class() -> type:
    """Return the class of a cache's layer that starts with given keys and values."""
    from transformers.cache_utils import DynamicLayer

    class PrefilledLayer(DynamicLayer):  # type: ignore[misc]
        """Layer of a cache that starts with given keys and values.

        transformers' own layer checks whether its cache is empty, and a trace would keep the result as a condition on
        the length. In transformers' layer with a sliding window, a trace would keep the counter of tokens as a
        constant. The window itself is applied by the mask.
        """

        def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
            super().__init__()
            self.lazy_initialization(keys, values)
            self.keys = keys
            self.values = values

        def get_seq_length(self, *_: Any) -> int:
            """Return the length of the keys, which is dynamic in a trace."""
            return self.keys.shape[-2]  # type: ignore[no-any-return]

    return PrefilledLayer


@functools.cache
def static_layer_class() -> type:
    """Return the class of a cache's layer of fixed length that starts with given keys and values."""
    from transformers.cache_utils import StaticLayer

    class FilledStaticLayer(StaticLayer):  # type: ignore[misc]
        """Layer of fixed length. New keys and values replace those from the place ``start`` on.

        transformers' own layer writes into its tensors and counts its tokens, but a trace has no tensors that change.
        """

        def __init__(self, keys: torch.Tensor, values: torch.Tensor, start: torch.Tensor) -> None:
            super().__init__(max_cache_len=keys.shape[-2])
            self.keys = keys
            self.values = values
            self.start = start
            self.is_initialized = True

        def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Pair:
            """Write new keys and values.

            Returns:
                All keys and all values, [batch, heads, fixed length, head size].
            """
            self.keys = self._write(self.keys, keys)
            self.values = self._write(self.values, values)
            return self.keys, self.values

        def _write(self, whole: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            places = self.start + torch.arange(new.shape[-2], device=new.device)
            return whole.scatter(2, places[None, None, :, None].expand_as(new), new)

        def get_seq_length(self) -> torch.Tensor:
            """Return the number of tokens before the new ones, int64 []."""
            return self.start[0]

    return FilledStaticLayer


def make_encoder_decoder_cache(own: Sequence[Pair], cross: Sequence[Pair]) -> Any:
    """Make the cache of a decoder that also attends to an encoder.

    Args:
        own: keys and values of the decoder.
        cross: keys and values of the encoder, already computed.

    Returns:
        An EncoderDecoderCache.
    """
    from transformers import EncoderDecoderCache

    cache = EncoderDecoderCache(make_cache(own), make_cache(cross))
    cache.is_updated = dict.fromkeys(range(len(cross)), True)
    return cache


def flatten_both_caches(cache: Any) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Take the tensors out of an encoder-decoder cache.

    Yields:
        ("decoder", its tensors), then ("encoder", tensors of the cross attention).
    """
    yield "decoder", flatten_cache(cache.self_attention_cache)
    yield "encoder", flatten_cache(cache.cross_attention_cache)
