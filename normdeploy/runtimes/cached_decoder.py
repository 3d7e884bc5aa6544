"""Generate tokens with a decoder file that takes its keys and values as inputs, as ``export`` and optimum write it.

The file reads new tokens and the cache of all earlier tokens, and returns logits and the longer cache. The first run
reads the prompt with an empty cache. Each later run reads one token:

    input_ids [batch, new], attention_mask [batch, past + new], position_ids [batch, new], past_key_values.*  →
    logits [batch, new, vocabulary], present.*

The output ``present.0.key`` of a run is the input ``past_key_values.0.key`` of the next run. A state whose size does
not grow, such as that of a convolution or a linear attention, begins with zeros. The file itself must hide the padding
from such a state. A file that fixes the number of new tokens to 1 reads the prompt token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import InputError
from ..inputs.token_prompts import IDS, MASK, PromptBatch, find_positions
from ..model import TensorSpec
from ..types import Array

POSITIONS = "position_ids"
# Input of a file with a static cache: the place of the first new token.
PLACE = "cache_position"
LOGITS = "logits"
PAST = "past_key_values."
# Start of the names of a cache's inputs -> start of the names of its outputs.
_RECURRENT = ("past_recurrent.", "past_ssm.", "past_state.")
_CACHES = {start: start.replace("past", "present") for start in ("past_conv.", *_RECURRENT)} | {PAST: "present."}
_KNOWN = (IDS, MASK, POSITIONS, PLACE)
_HOW = "export the folder with --task text-generation-with-past"
# Maximum number of names that a message lists.
_NAMED = 4


@dataclass(frozen=True)
class DecoderPorts:
    """Inputs and outputs of a decoder file.

    Attributes:
        inputs: input name -> description.
        cache: name of a cache's input -> name of the output that continues it.
    """

    inputs: Mapping[str, TensorSpec]
    cache: Mapping[str, str]

    @property
    def takes_mask(self) -> bool:
        """Return whether the file has an attention mask, so that rows can be padded."""
        return MASK in self.inputs

    @property
    def is_recurrent(self) -> bool:
        """Return whether the cache contains states of a linear attention."""
        return any(name.startswith(_RECURRENT) for name in self.cache)

    @property
    def cache_length(self) -> int | None:
        """Return the number of places of a static cache; None if the cache grows."""
        return find_static_length(self.inputs)

    @property
    def fixed_batch(self) -> int | None:
        """Return the only batch size of the file; None if any size can be passed."""
        size = self.inputs[IDS].shape[0]
        if isinstance(size, int):
            return size
        return None

    @property
    def fixed_length(self) -> int | None:
        """Return the only number of new tokens that one run reads; None if any number can be passed."""
        size = self.inputs[IDS].shape[1]
        if isinstance(size, int):
            return size
        return None


def find_decoder_ports(label: str, inputs: Iterable[TensorSpec], outputs: Sequence[str]) -> DecoderPorts:
    """Find the cache among a file's inputs and outputs.

    Args:
        label: name of the file in messages.
        outputs: names of the outputs.

    Returns:
        The inputs, and each input of the cache with its output.

    Raises:
        InputError: the file is not a decoder with a cache, or it has an input of unknown meaning.
    """
    specs = {spec.name: spec for spec in inputs}
    past = {name: start for name in specs for start in _CACHES if name.startswith(start)}
    if not past and IDS not in specs:
        raise InputError(
            f"{label} has the inputs {_list_names(specs)}, but a decoder that generates takes {IDS!r} and a cache"
            f" ({PAST}0.key); {_HOW}, or omit --generate"
        )
    if not past:
        raise InputError(
            f"{label} has no cache among its inputs ({PAST}0.key), so it can't read one token after the other: it has"
            f" {_list_names(specs)}; if the model is a decoder, {_HOW}"
        )
    if find_static_length(specs) is None:
        _refuse_static_cache(label, specs, [name for name, start in past.items() if start == PAST])
    if foreign := [name for name in specs if name not in (*_KNOWN, *past)]:
        raise InputError(
            f"{label} has the inputs {_list_names(foreign)}, which --generate does not know: it passes"
            f" {', '.join(_KNOWN)} and {PAST}*; the decoder of an encoder-decoder can't be run alone"
        )
    if IDS not in specs or len(specs[IDS].shape) != 2:
        raise InputError(f"{label} has no input {IDS!r} of shape [batch, length]; {_HOW}")
    cache = {name: _CACHES[start] + name.removeprefix(start) for name, start in past.items()}
    wanted = [LOGITS, *cache.values()]
    if lacking := [name for name in wanted if name not in outputs]:
        raise InputError(
            f"{label} has no output {_list_names(lacking)}, so its cache can't be passed on; it has"
            f" {_list_names(outputs)}; {_HOW}"
        )
    return DecoderPorts(specs, cache)


def find_static_length(specs: Mapping[str, TensorSpec]) -> int | None:
    """Find the number of places of a static cache.

    Returns:
        The fixed length of all keys and values, if the file has an input of one axis for the places of new tokens; None
        otherwise.
    """
    if PLACE not in specs or len(specs[PLACE].shape) != 1:
        return None
    shapes = [spec.shape for name, spec in specs.items() if name.startswith(PAST)]
    lengths = {shape[2] for shape in shapes if len(shape) == 4}
    if len(lengths) != 1:
        return None
    (length,) = lengths
    return length if isinstance(length, int) else None


def _refuse_static_cache(label: str, specs: Mapping[str, TensorSpec], past: Sequence[str]) -> None:
    """Refuse a file whose past has a fixed length, such as a file of transformers' StaticCache.

    Such a file writes new keys into free places of the past, and only its program knows which places are free.

    Args:
        past: names of the inputs with keys and values, [batch, heads, length, head size].

    Raises:
        InputError: a past has a fixed length.
    """
    for name in past:
        shape = specs[name].shape
        length = shape[2] if len(shape) == 4 else None
        if isinstance(length, int):
            raise InputError(
                f"{label} has a past of the fixed length {length} ({name!r}), as a static cache has, but no input"
                f" {PLACE!r} that says where its free places begin; export the folder with --task"
                " text-generation-with-static-cache"
            )


def _list_names(names: Iterable[str]) -> str:
    every = list(names)
    return f"{', '.join(map(repr, every[:_NAMED]))}{', ...' if len(every) > _NAMED else ''}"


def require_fitting_prompts(ports: DecoderPorts, prompts: PromptBatch) -> None:
    """Check that a file can read prompts and then single tokens.

    Raises:
        InputError: the file fixes another batch size or number of tokens, or it can't hide padding.
    """
    length = ports.fixed_length
    if length not in (None, 1):
        raise InputError(
            f"the file reads {length} tokens in each run, but a token that was generated is read alone; export it"
            " with --dim seq=1:1:1, or with any number of tokens"
        )
    fixed = ports.fixed_batch
    if fixed is not None and fixed != prompts.ids.shape[0]:
        raise InputError(f"the file reads {fixed} prompts at once, but {prompts.ids.shape[0]} were passed")
    if prompts.is_padded and not ports.takes_mask:
        raise InputError(
            f"the prompts have different lengths, but the file has no {MASK} to hide the padding; pass one prompt,"
            " or prompts of the same length"
        )


def require_places(tokens: int, length: int) -> None:
    """Raise InputError if a static cache of ``length`` places can't hold ``tokens`` tokens."""
    if tokens > length:
        raise InputError(
            f"{tokens} tokens are read, but the static cache of the file has {length} places; generate fewer tokens,"
            f" pass shorter prompts, or export with --dim cache={tokens}:{tokens}:{tokens}"
        )


class CachedDecoder:
    """Decoder with the cache of the tokens that it has read.

    Args:
        infer: runs the file once: input name -> array, to output name -> array.
        ports: inputs and outputs of the file.
    """

    def __init__(self, infer: Callable[[Mapping[str, Any]], Mapping[str, Any]], ports: DecoderPorts) -> None:
        self._infer = infer
        self._ports = ports
        self._cache: dict[str, Any] = {}
        self._mask = np.zeros((0, 0), np.int64)

    def read_prompts(self, prompts: PromptBatch) -> Array:
        """Read prompts with an empty cache.

        Returns:
            Logits of the token after each row, [batch, vocabulary].

        Raises:
            InputError: the prompts do not fit the file, or the file does not run on them.
        """
        batch = prompts.ids.shape[0]
        require_fitting_prompts(self._ports, prompts)
        self._cache = {name: self._empty_state(name, batch) for name in self._ports.cache}
        self._mask = np.zeros((batch, 0), np.int64)
        if self._ports.fixed_length == 1:
            logits = [self._run(prompts.ids[:, [i]], prompts.mask[:, [i]]) for i in range(prompts.ids.shape[1])]
            return logits[-1]
        return self._run(prompts.ids, prompts.mask)

    def read_tokens(self, tokens: Array) -> Array:
        """Read one token of each row.

        Args:
            tokens: token ids, int64 [batch].

        Returns:
            Logits of the next token, [batch, vocabulary].
        """
        column = np.asarray(tokens, np.int64)[:, None]
        return self._run(column, np.ones_like(column))

    def _empty_state(self, name: str, batch: int) -> Array:
        """Return the state before the first token. Axes of open size count tokens, so they are empty."""
        spec = self._ports.inputs[name]
        inner = (size if isinstance(size, int) else 0 for size in spec.shape[1:])
        return np.zeros((batch, *inner), ml_dtypes.bfloat16 if spec.dtype == "bfloat16" else spec.dtype)

    def _run(self, ids: Array, mask: Array) -> Array:
        place = self._mask.shape[1]
        self._mask = np.concatenate([self._mask, mask], 1)
        values = {IDS: ids, MASK: self._mask, POSITIONS: find_positions(self._mask)[:, -ids.shape[1] :]}
        length = self._ports.cache_length
        if length is not None:
            require_places(self._mask.shape[1], length)
            # The mask of a static cache is as long as the cache.
            values[MASK] = np.pad(self._mask, ((0, 0), (0, length - self._mask.shape[1])))
            # Files of other exporters take the place of each new token.
            places = 1 if self._ports.inputs[PLACE].shape == (1,) else ids.shape[1]
            values[PLACE] = place + np.arange(places, dtype=np.int64)
        feeds: dict[str, Any] = {
            name: value.astype(self._ports.inputs[name].dtype)
            for name, value in values.items()
            if name in self._ports.inputs
        }
        outputs = self._infer({**feeds, **self._cache})
        self._cache = {name: outputs[output] for name, output in self._ports.cache.items()}
        logits = np.asarray(outputs[LOGITS])
        if logits.ndim != 3:
            raise InputError(
                f"the output {LOGITS!r} is {list(logits.shape)}, but a decoder returns [batch, length, vocabulary]"
            )
        return logits[:, -1]


@dataclass(frozen=True)
class TextEnd:
    """Tokens that end a text.

    Attributes:
        tokens: token ids that end a text.
        padding: token id after the end, where other rows of the batch are longer.
    """

    tokens: frozenset[int]
    padding: int


def generate_greedily(
    decoder: CachedDecoder, prompts: PromptBatch, count: int, text_end: TextEnd | None = None
) -> list[Array]:
    """Generate the most probable tokens.

    Args:
        count: largest number of tokens, at least 1.
        text_end: tokens after which a row ends; None generates ``count`` tokens in each row.

    Returns:
        Token ids of each row, int64 [at most count]. A row that has ended contains its last token.
    """
    logits = decoder.read_prompts(prompts)
    rows: list[list[int]] = [[] for _ in prompts.ids]
    running = set(range(len(rows)))
    for step in range(count):
        tokens = logits.argmax(-1).astype(np.int64)
        for place, row in enumerate(rows):
            if place in running:
                row.append(int(tokens[place]))
            elif text_end is not None:
                tokens[place] = text_end.padding
        if text_end is not None:
            running -= {place for place in running if rows[place][-1] in text_end.tokens}
        if not running or step == count - 1:
            break
        logits = decoder.read_tokens(tokens)
    return [np.array(row, np.int64) for row in rows]


def follow_tokens(decoder: CachedDecoder, prompts: PromptBatch, tokens: Array) -> Array:
    """Read given tokens after the prompts, one by one, whatever the decoder itself would choose.

    Args:
        tokens: token ids, int64 [batch, count]. The last token is not read.

    Returns:
        Logits before each token, [batch, count, vocabulary].
    """
    logits = [decoder.read_prompts(prompts)]
    logits += [decoder.read_tokens(tokens[:, step]) for step in range(tokens.shape[1] - 1)]
    return np.stack(logits, 1)
