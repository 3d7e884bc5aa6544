"""Convert the cache of a decoder to tensors and back while the decoder is traced.

A layer with attention has keys and values [batch, heads, length, head size], which grow. A layer with a convolution
(LFM2) has a state [batch, channels, width] of constant size, which begins with zeros. A layer with a linear attention
has such a state and a recurrent state [batch, heads, head size, state size]. The names are those of optimum and
transformers.js: ``past_key_values.0.key`` and ``present.0.key``, ``past_conv.1`` and ``present_conv.1``,
``past_recurrent.1`` for a delta rule (Qwen3-Next) and ``past_ssm.1`` for a state space (Mamba). A state that belongs to
all layers has the name ``past_state.0`` (RWKV).

transformers reads several tokens of a linear attention in a loop over chunks, and a trace can't leave the number of
chunks open. A single token has its own branch without a loop, so these models are traced with one token.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ExportError
from .key_value_cache import KINDS, prefilled_layer_class, static_layer_class
from .program_signature import dtype_name

CONV = "conv"
RECURRENT = "recurrent"
_STATE_SPACE = "ssm"
# State that belongs to all layers (RWKV).
STATE = "state"
# Kind of a state -> attribute of transformers' layers.
_STATE_ATTRIBUTES = {CONV: "conv_states", RECURRENT: "recurrent_states", _STATE_SPACE: "recurrent_states"}
# Names of a state space's size in configs (Falcon-H1, Nemotron-H, Mamba 2).
_STATE_SIZES = ("mamba_d_state", "ssm_state_size", "state_size")
# Function of transformers that makes the mask of layers with states. It asks whether one token is read.
_MASK_FUNCTION = "create_recurrent_attention_mask"


@dataclass(frozen=True)
class CacheSlot:
    """Place of one tensor in a cache.

    Attributes:
        kind: "key", "value", "conv", "recurrent", "ssm" or "state".
        index: number of the state, if a layer has several of one kind.
    """

    layer: int
    kind: str
    index: int = 0

    @property
    def grows(self) -> bool:
        """Return whether the tensor has one entry for each token."""
        return self.kind in KINDS

    @property
    def is_recurrent(self) -> bool:
        """Return whether the tensor is the state of a linear attention."""
        return self.kind in (RECURRENT, _STATE_SPACE, STATE)

    @property
    def past_name(self) -> str:
        """Return the name of the input."""
        if self.grows:
            return f"past_key_values.{self.layer}.{self.kind}"
        return f"past_{self.kind}.{self._number}"

    @property
    def present_name(self) -> str:
        """Return the name of the output."""
        if self.grows:
            return f"present.{self.layer}.{self.kind}"
        return f"present_{self.kind}.{self._number}"

    @property
    def _number(self) -> str:
        return f"{self.layer}.{self.index}" if self.index else str(self.layer)

    def describe_input(self, tensor: torch.Tensor, length: str) -> str:
        """Describe the input in the notation of ``--input``.

        Args:
            tensor: a tensor of this place.
            length: name of the dim of the keys' length.

        Returns:
            Name, dtype, dims and range of values.
        """
        if self.grows:
            dims = f"batch,{tensor.shape[1]},{length},{tensor.shape[3]}"
        else:
            dims = ",".join(["batch", *map(str, tensor.shape[1:])])
        return f"{self.past_name}:{dtype_name(tensor)}[{dims}]{{-3.0:3.0}}"


def choose_recurrent_kind(config: Any) -> str:
    """Choose the name of the states of a model's linear attention, as transformers.js does.

    Returns:
        "ssm" for a state space (Mamba), else "recurrent".
    """
    if any(hasattr(config, name) for name in _STATE_SIZES):
        return _STATE_SPACE
    return RECURRENT


def find_cache_slots(cache: Any, recurrent: str = RECURRENT) -> list[CacheSlot]:
    """List the tensors of a cache after one run of the model.

    Args:
        recurrent: kind of the states of a linear attention.

    Returns:
        The places, layer by layer.

    Raises:
        ExportError: a layer has a cache of an unknown form, for example a quantized one.
    """
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise ExportError(
            f"the model's cache is a {type(cache).__name__}, which has no layers of keys and values; export it without"
            " its past"
        )
    slots: list[CacheSlot] = []
    for number, layer in enumerate(layers):
        found = [CacheSlot(number, kind) for kind in KINDS if isinstance(_keys_or_values(layer, kind), torch.Tensor)]
        found += [
            CacheSlot(number, kind, index)
            for kind in (CONV, recurrent)
            for index, state in _states(layer, kind).items()
            if isinstance(state, torch.Tensor)
        ]
        # A layer without attention, such as a layer of experts alone, has no cache.
        if not found and type(layer).__name__ != "DummyLayer":
            raise ExportError(
                f"a layer of the model's cache is a {type(layer).__name__}, not keys and values; export the model"
                " without its past"
            )
        slots += found
    return slots


def _states(layer: Any, kind: str) -> dict[int, Any]:
    return getattr(layer, _STATE_ATTRIBUTES[kind], None) or {}


def _keys_or_values(layer: Any, kind: str) -> Any:
    return getattr(layer, f"{kind}s", None)


def read_cache(cache: Any, slots: Sequence[CacheSlot]) -> list[torch.Tensor]:
    """Take the tensors out of a cache.

    Returns:
        One tensor for each of ``slots``.
    """
    tensors = []
    for slot in slots:
        layer = cache.layers[slot.layer]
        if slot.grows:
            tensors.append(_keys_or_values(layer, slot.kind))
        else:
            tensors.append(_states(layer, slot.kind)[slot.index])
    return tensors


def make_decoder_cache(
    slots: Sequence[CacheSlot], tensors: Sequence[torch.Tensor], layers: int, start: torch.Tensor | None = None
) -> Any:
    """Make a cache that contains tensors of earlier tokens, whose number may be 0.

    Args:
        tensors: one tensor for each of ``slots``.
        layers: number of the model's layers.

    Returns:
        A DynamicCache.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DummyLayer

    if any(slot.is_recurrent for slot in slots):
        # One token alone is read, so the layers may take their branch for one token, as in eager mode.
        cache = DynamicCache()
    else:
        cache = _prefilled_cache_class()()
    given = dict(zip(slots, tensors, strict=True))
    made = []
    for number in range(layers):
        own = {slot: tensor for slot, tensor in given.items() if slot.layer == number}
        pair = [tensor for slot, tensor in own.items() if slot.grows]
        states = {slot: tensor for slot, tensor in own.items() if not slot.grows}
        if states and pair and start is not None:
            raise ExportError(
                "a layer of the model's cache has keys and values beside a state, for which no static cache is"
                " supported; export with the task text-generation-with-past"
            )
        if states:
            made.append(_state_layer_class(bool(pair))(pair, states))
        elif pair and start is not None:
            made.append(static_layer_class()(*pair, start))
        elif pair:
            made.append(prefilled_layer_class()(*pair))
        else:
            made.append(DummyLayer())
    cache.layers = made
    return cache


@functools.cache
def _prefilled_cache_class() -> type:
    from transformers import DynamicCache

    class PrefilledCache(DynamicCache):  # type: ignore[misc]
        """Cache that never shows the state of a convolution.

        Layers read the convolution's state alone if one token is read, and a trace would keep that branch. Without it,
        they append the new tokens to the state, which is right for any number of tokens.
        """

        def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
            """Return None, so that the layer calls ``update_conv_state``."""

    return PrefilledCache


@functools.cache
def _state_layer_class(attends: bool) -> type:
    """Return the class of a layer with states; with keys and values too if ``attends``."""
    from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

    base: Any = LinearAttentionAndFullAttentionLayer if attends else LinearAttentionLayer

    class StateLayer(base):  # type: ignore[misc]
        """Layer of a cache that starts with given states. Updates make new tensors, because a trace has no tensors that
        change.
        """

        def __init__(self, pair: Sequence[torch.Tensor], states: dict[CacheSlot, torch.Tensor]) -> None:
            super().__init__()
            for slot, tensor in states.items():
                # Some layers write into their states, but the inputs of a trace must not change.
                _states(self, slot.kind)[slot.index] = tensor.clone()
                self.has_previous_state[slot.index] = True
            if pair:
                self.keys, self.values = pair
                self.is_initialized = True

        def get_seq_length(self, *_: Any) -> int:
            """Return the length of the keys, which is dynamic in a trace."""
            return self.keys.shape[-2]  # type: ignore[no-any-return]

        def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
            """Append new values, and keep as many as before.

            Returns:
                The old and the new values.
            """
            old = self.conv_states[state_idx]
            whole = torch.cat([old, conv_states], dim=-1)
            self.conv_states[state_idx] = whole[..., -old.shape[-1] :]
            return whole

        def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
            """Replace the state of a linear attention.

            Returns:
                The new state.
            """
            self.recurrent_states[state_idx] = recurrent_states
            return recurrent_states

    return StateLayer


@contextlib.contextmanager
def mask_every_length(model: nn.Module) -> Iterator[None]:
    """Let layers with states mask the padding without asking how many tokens are read.

    transformers omits the mask for a single token, and a trace would keep this condition on the length.
    """

    def mask_new_tokens(
        config: Any, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, *_: Any, **__: Any
    ) -> torch.Tensor | None:
        if attention_mask is None:
            return None
        return attention_mask[:, -inputs_embeds.shape[1] :]

    changed = []
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        if hasattr(module, _MASK_FUNCTION):
            changed.append((module, getattr(module, _MASK_FUNCTION)))
            setattr(module, _MASK_FUNCTION, mask_new_tokens)
    try:
        yield
    finally:
        for module, original in changed:
            setattr(module, _MASK_FUNCTION, original)
