"""Pass the cache of a decoder as tensors, whatever form the cache has in transformers.

Most decoders keep a ``Cache`` object, which they take as ``past_key_values``, or as ``cache_params`` if they have no
attention (Mamba). Three families have other forms:

- RWKV takes and returns a list of five tensors, [batch, hidden size, layers] each;
- xLSTM takes an object with three tensors for each layer;
- RecurrentGemma leaves the states of its recurrent layers in the layers, beside a ``Cache`` of its attention.

All states begin with zeros. They are inputs and outputs of the file, named by ``CacheSlot``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ..errors import ExportError, InputError
from .decoder_cache import (
    CONV,
    RECURRENT,
    STATE,
    CacheSlot,
    choose_recurrent_kind,
    find_cache_slots,
    make_decoder_cache,
    mask_every_length,
    read_cache,
)
from .torch_pickles import first_line
from .torch_state import silence_logger

# Input of a static cache: the place of the first new token, int64 [1].
CACHE_POSITION = "cache_position"
# Value that RWKV gives its largest exponent before the first token (``RwkvModel.forward``).
_LOWEST_EXPONENT = -1e30
# Places of the denominator and of the largest exponent in RWKV's list of states.
_DENOMINATOR = 3
_EXPONENT = 4


@dataclass(frozen=True)
class StatefulRun:
    """Result of one run of a decoder.

    Attributes:
        logits: [batch, length, vocabulary].
        states: tensors of the cache after the run, one for each slot.
    """

    logits: torch.Tensor
    states: list[torch.Tensor]


class DecoderStates(Protocol):
    """Cache of a decoder.

    Attributes:
        slots: places of the cache's tensors.
        examples: one tensor for each slot, as one run leaves them.
        reads_mask: False if the model ignores its attention_mask.
        can_be_static: True if the keys and values can have a fixed length.
    """

    @property
    def slots(self) -> Sequence[CacheSlot]: ...

    @property
    def examples(self) -> Sequence[torch.Tensor]: ...

    @property
    def reads_mask(self) -> bool: ...

    @property
    def can_be_static(self) -> bool: ...

    def run(self, given: Mapping[str, torch.Tensor], states: Sequence[torch.Tensor]) -> StatefulRun:
        """Run the decoder on new tokens after ``states``.

        Args:
            given: inputs of the decoder other than the cache.
        """
        ...


def find_decoder_states(model: nn.Module, config: Any, tokens: torch.Tensor) -> DecoderStates:
    """Find how a decoder keeps its cache. The decoder runs once, because configs have no common names for the sizes.

    Args:
        config: config of the decoder.
        tokens: token ids for the run, int64 [1, length].

    Returns:
        The cache.

    Raises:
        InputError: the model has no cache, or it does not run.
        ExportError: a layer has a cache of an unknown form.
    """
    known = inspect.signature(model.forward).parameters
    forward = model.forward
    made = run_with_cache(model, input_ids=tokens)
    recurrent = choose_recurrent_kind(config)
    if "state" in known and isinstance(getattr(made, "state", None), list):
        return _StateList(forward, made.state)
    if blocks := _find_stateful_blocks(model):
        return _BlockStates(model, forward, tokens, blocks)
    for keyword in ("past_key_values", "cache_params"):
        cache = getattr(made, keyword, None)
        if cache is None or keyword not in known:
            continue
        if isinstance(getattr(cache, "rnn_state", None), dict):
            return _LayerTuples(forward, keyword, cache)
        slots = find_cache_slots(cache, recurrent)
        return _CacheObject(model, forward, keyword, slots, read_cache(cache, slots), len(cache.layers))
    raise InputError(
        f"{type(model).__name__} returns no past_key_values and no other cache that is known, so there is no past to"
        " export; omit -with-past"
    )


def run_with_cache(model: nn.Module, **example: Any) -> Any:
    """Run a model once, and let it return its cache.

    Raises:
        InputError: the model does not run.
    """
    try:
        # transformers recommends kernels that a trace can't use.
        with torch.no_grad(), silence_logger("transformers"):
            return model(**example, use_cache=True)
    except Exception as error:
        # Code of transformers and of a folder may raise errors of any type.
        raise InputError(
            f"{type(model).__name__} does not run with a cache in PyTorch: {type(error).__name__}:"
            f" {first_line(error, '')}; correct the folder, or omit -with-past"
        ) from error


@dataclass(frozen=True)
class _CacheObject:
    """Cache of transformers' class ``Cache``."""

    model: nn.Module
    forward: Callable[..., Any]
    keyword: str
    slots: Sequence[CacheSlot]
    examples: Sequence[torch.Tensor]
    layers: int
    reads_mask: bool = True
    can_be_static: bool = True

    def run(self, given: Mapping[str, torch.Tensor], states: Sequence[torch.Tensor]) -> StatefulRun:
        given = dict(given)
        # Only a static cache takes its first free place as an input.
        start = given.pop(CACHE_POSITION, None)
        cache = make_decoder_cache(self.slots, states, self.layers, start)
        if self.keyword == "cache_params" and "attention_mask" in given:
            # A model without attention masks the new tokens alone.
            given["attention_mask"] = given["attention_mask"][:, -given["input_ids"].shape[1] :]
        with mask_every_length(self.model):
            made = self.forward(**given, **{self.keyword: cache}, use_cache=True)
        return StatefulRun(made.logits, read_cache(getattr(made, self.keyword), self.slots))


class _StateList:
    """List of five tensors (RWKV): two shifted inputs, numerators, denominators and largest exponents."""

    reads_mask = False
    can_be_static = False

    def __init__(self, forward: Callable[..., Any], states: Sequence[torch.Tensor]) -> None:
        if len(states) != _EXPONENT + 1:
            raise ExportError(f"the model's cache is a list of {len(states)} tensors, not of five as that of RWKV")
        self._forward = forward
        self.slots = [CacheSlot(place, STATE) for place in range(len(states))]
        self.examples = states

    def run(self, given: Mapping[str, torch.Tensor], states: Sequence[torch.Tensor]) -> StatefulRun:
        # The model writes into its states, but the inputs of a trace must not change.
        copies = [state.clone() for state in states]
        # The denominator is 0 before the first token alone.
        is_empty = copies[_DENOMINATOR] == 0
        copies[_EXPONENT] = torch.where(is_empty, _LOWEST_EXPONENT, copies[_EXPONENT])
        made = self._forward(**given, state=copies, use_cache=True)
        return StatefulRun(made.logits, list(made.state))


class _LayerTuples:
    """Object with a tuple of tensors for each layer (xLSTM)."""

    reads_mask = False
    can_be_static = False

    def __init__(self, forward: Callable[..., Any], keyword: str, cache: Any) -> None:
        self._forward = forward
        self._keyword = keyword
        self._cache = cache
        self.slots = [
            CacheSlot(layer, RECURRENT, place)
            for layer, states in cache.rnn_state.items()
            for place in range(len(states))
        ]
        self.examples = [state for states in cache.rnn_state.values() for state in states]

    def run(self, given: Mapping[str, torch.Tensor], states: Sequence[torch.Tensor]) -> StatefulRun:
        cache = type(self._cache)(self._cache.config, max_batch_size=1, dtype=states[0].dtype)
        by_slot = dict(zip(self.slots, states, strict=True))
        cache.rnn_state = {
            layer: tuple(tensor.clone() for slot, tensor in by_slot.items() if slot.layer == layer)
            for layer in self._cache.rnn_state
        }
        made = self._forward(**given, **{self._keyword: cache}, use_cache=True)
        after = getattr(made, self._keyword).rnn_state
        return StatefulRun(made.logits, [after[slot.layer][slot.index] for slot in self.slots])


@dataclass(frozen=True)
class _Block:
    """Recurrent layer that keeps its states in attributes (RecurrentGemma)."""

    layer: int
    # The attributes are tensors or None, which the type of a module does not express.
    convolution: Any
    recurrence: Any


def _find_stateful_blocks(model: nn.Module) -> list[_Block]:
    blocks = []
    for name, module in model.named_modules():
        recurrence = getattr(module, "rg_lru", None)
        if hasattr(module, "conv1d_state") and isinstance(recurrence, nn.Module):
            layer = next(int(part) for part in name.split(".") if part.isdigit())
            blocks.append(_Block(layer, module, recurrence))
    return blocks


class _BlockStates:
    """States in the recurrent layers, and a ``Cache`` for the attention (RecurrentGemma)."""

    reads_mask = True
    can_be_static = False

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], tokens: torch.Tensor, blocks: Sequence[_Block]
    ) -> None:
        from transformers import DynamicCache

        self._forward = forward
        self._blocks = blocks
        cache = DynamicCache()
        run_with_cache(model, input_ids=tokens, past_key_values=cache)
        # Layers after the last attention do not use the cache.
        self._layers = len(cache.layers)
        recurrent = {block.layer for block in blocks}
        attention = [layer for layer in range(len(cache.layers)) if layer not in recurrent]
        self._pairs = [CacheSlot(layer, kind) for layer in attention for kind in ("key", "value")]
        states = [CacheSlot(block.layer, kind) for block in blocks for kind in (CONV, RECURRENT)]
        self.slots = [*self._pairs, *states]
        self.examples = [*read_cache(cache, self._pairs), *self._take_states()]

    def run(self, given: Mapping[str, torch.Tensor], states: Sequence[torch.Tensor]) -> StatefulRun:
        count = len(self._pairs)
        cache = make_decoder_cache(self._pairs, states[:count], self._layers)
        for place, block in enumerate(self._blocks):
            block.convolution.conv1d_state = states[count + 2 * place]
            block.recurrence.recurrent_states = states[count + 2 * place + 1]
        try:
            made = self._forward(**given, past_key_values=cache, use_cache=True)
            return StatefulRun(made.logits, [*read_cache(cache, self._pairs), *self._take_states()])
        finally:
            self._take_states()

    def _take_states(self) -> list[torch.Tensor]:
        """Return the states, and remove them from the layers, because a trace leaves no tensors in a model."""
        taken: list[Any] = []
        for block in self._blocks:
            taken += [block.convolution.conv1d_state, block.recurrence.recurrent_states]
            block.convolution.conv1d_state = None
            block.recurrence.recurrent_states = None
        return taken
