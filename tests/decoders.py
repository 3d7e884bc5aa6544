"""Small decoders with a cache: one that counts, as ONNX; in torch, one with attention and rotary positions, and one
with a linear attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import torch
from torch import nn

VOCABULARY = 12
HIDDEN, HEADS, HEAD = 16, 2, 8
# Number of tokens that the convolution sees.
WIDTH = 3
COUNTING = f"""
<ir_version: 10, opset_import: ["": 21]>
counting (int64[batch, seq] input_ids, int64[batch, total] attention_mask, int64[batch, seq] position_ids,
          float[batch, 1, past, 1] past_key, float[batch, 1, past, 1] past_value)
  => (float[batch, seq, {VOCABULARY}] logits, float[batch, 1, all, 1] present_key,
      float[batch, 1, all, 1] present_value)
<int64 one = {{1}}, int64[1] depth = {{{VOCABULARY}}}, float[2] values = {{0, 1}}, int64[2] axes = {{1, 3}}>
{{
  next = Add(input_ids, one)
  token = Mod(next, depth)
  logits = OneHot(token, depth, values)
  read = Cast<to = 1>(input_ids)
  key = Unsqueeze(read, axes)
  place = Cast<to = 1>(position_ids)
  value = Unsqueeze(place, axes)
  present_key = Concat<axis = 2>(past_key, key)
  present_value = Concat<axis = 2>(past_value, value)
}}
"""


def counting_decoder() -> onnx.ModelProto:
    """Return a decoder whose next token is the last token plus 1. Its cache holds the tokens and their positions."""
    proto = onnx.parser.parse_model(COUNTING)
    # The notation has no names with dots.
    names = {f"past_{kind}": f"past_key_values.0.{kind}" for kind in ("key", "value")}
    names |= {f"present_{kind}": f"present.0.{kind}" for kind in ("key", "value")}
    for value in (*proto.graph.input, *proto.graph.output):
        value.name = names.get(value.name, value.name)
    for node in proto.graph.node:
        for ends in (node.input, node.output):
            ends[:] = [names.get(name, name) for name in ends]
    return proto


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    angles = positions[:, None, :, None] / torch.tensor([1.0, 3.0, 9.0, 27.0])
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Decoder(nn.Module):
    """One layer of attention with rotary positions. ``forward`` reads the whole text without a cache."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.project, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        empty = torch.zeros(input_ids.shape[0], HEADS, 0, HEAD)
        return {"logits": self.read(input_ids, attention_mask, position_ids, empty, empty)[0]}

    def read(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Read tokens after a past.

        Returns:
            logits, all keys, all values.
        """
        x = self.embed(ids)
        parts = self.project(self.norm(x)).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for p in parts)
        places = self.places(positions, key.shape[2])
        keys = torch.cat([key, rotate(k, places)], 2)
        values = torch.cat([value, v], 2)
        scores = rotate(q, places) @ keys.transpose(-1, -2) / HEAD**0.5
        distance = torch.arange(ids.shape[1])[:, None] + key.shape[2] - torch.arange(keys.shape[2])
        return self.mix(x, scores, distance, mask, values), keys, values

    def read_static(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        place: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Read tokens into a static cache, from the place ``place`` on.

        Returns:
            logits, all keys, all values.
        """
        x = self.embed(ids)
        parts = self.project(self.norm(x)).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for p in parts)
        places = torch.arange(ids.shape[1]) + place
        index = places[None, None, :, None].expand_as(k)
        keys, values = key.scatter(2, index, rotate(k, positions)), value.scatter(2, index, v)
        scores = rotate(q, positions) @ keys.transpose(-1, -2) / HEAD**0.5
        distance = places[:, None] - torch.arange(keys.shape[2])
        return self.mix(x, scores, distance, mask, values), keys, values

    def mix(
        self, x: torch.Tensor, scores: torch.Tensor, distance: torch.Tensor, mask: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        allowed = self.sees(distance) & (self.seen(mask)[:, None, None, :] != 0)
        weights = scores.masked_fill(~allowed, -1e9).softmax(-1)
        mixed = (weights @ values).transpose(1, 2).flatten(-2)
        return self.head(x + self.out(mixed))

    def sees(self, distance: torch.Tensor) -> torch.Tensor:
        """Return which earlier tokens are seen, by their distance."""
        return distance >= 0

    def places(self, positions: torch.Tensor, past: int) -> torch.Tensor:
        return positions

    def seen(self, mask: torch.Tensor) -> torch.Tensor:
        return mask


class WithPast(nn.Module):
    """The decoder with its cache as inputs and outputs."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        logits, keys, values = self.decoder.read(ids, mask, positions, key, value)
        return {"logits": logits, "present.0.key": keys, "present.0.value": values}


class WrongOffset(Decoder):
    """Fault: the tokens of the past are counted twice. A prompt, which has no past, is read rightly."""

    def places(self, positions: torch.Tensor, past: int) -> torch.Tensor:
        return positions + past


class BlindToPadding(Decoder):
    """Fault: the padding is read like tokens."""

    def seen(self, mask: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(mask)


class Windowed(Decoder):
    """Each token sees itself and the tokens before it, five in all."""

    window = 5

    def sees(self, distance: torch.Tensor) -> torch.Tensor:
        return (distance >= 0) & (distance < self.window)


class WiderWindow(Windowed):
    """Fault: the window has one token more."""

    window = 6


class Chunked(Decoder):
    """Each token sees the tokens before it in its chunk of four, counted from the start of the row (Llama 4)."""

    def sees(self, distance: torch.Tensor) -> torch.Tensor:
        place = torch.arange(distance.shape[0])[:, None] + distance.shape[1] - distance.shape[0]
        return (distance >= 0) & (distance <= place % 4)


class RestartedChunks(Chunked):
    """Fault: the chunks begin at the first new token."""

    def sees(self, distance: torch.Tensor) -> torch.Tensor:
        place = torch.arange(distance.shape[0])[:, None]
        return (distance >= 0) & (distance <= place % 4)


class WithStaticCache(nn.Module):
    """The decoder with a static cache as inputs and outputs."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        place: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        logits, keys, values = self.decoder.read_static(ids, mask, positions, self.first(place), key, value)
        return {"logits": logits, "present.0.key": keys, "present.0.value": values}

    def first(self, place: torch.Tensor) -> torch.Tensor:
        return place


class OverwrittenToken(WithStaticCache):
    """Fault: after the prompt, each token replaces the token before it."""

    def first(self, place: torch.Tensor) -> torch.Tensor:
        return (place - 1).clamp(min=0)


PLAIN_INPUTS = (
    f"input_ids:int64[batch,seq]{{0:{VOCABULARY}}}",
    "attention_mask:int64[batch,seq]",
    "position_ids:int64[batch,seq]{0:64}",
)
PAST_INPUTS = (
    PLAIN_INPUTS[0],
    "attention_mask:int64[batch,past+seq]",
    PLAIN_INPUTS[2],
    f"past_key_values.0.key:float32[batch,{HEADS},past,{HEAD}]{{-3.0:3.0}}",
    f"past_key_values.0.value:float32[batch,{HEADS},past,{HEAD}]{{-3.0:3.0}}",
)
PAST_DIMS = ("past=0:8:40",)
# Number of places of the static cache.
PLACES = 24
STATIC_INPUTS = (
    PLAIN_INPUTS[0],
    f"attention_mask:int64[batch,{PLACES}]",
    PLAIN_INPUTS[2],
    f"cache_position:int64[1]{{0:{PLACES - 11}}}",
    f"past_key_values.0.key:float32[batch,{HEADS},{PLACES},{HEAD}]{{-3.0:3.0}}",
    f"past_key_values.0.value:float32[batch,{HEADS},{PLACES},{HEAD}]{{-3.0:3.0}}",
)
STATIC_DIMS = ("batch=1:2:4", "seq=1:3:12")


def plain_example() -> tuple[torch.Tensor, ...]:
    return torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64), torch.arange(3).expand(2, 3)


def past_example() -> tuple[torch.Tensor, ...]:
    ids, _, positions = plain_example()
    past = torch.ones(2, HEADS, 5, HEAD)
    return ids, torch.ones(2, 8, dtype=torch.int64), positions, past, past


def static_example() -> tuple[torch.Tensor, ...]:
    ids, _, positions = plain_example()
    buffer = torch.ones(2, HEADS, PLACES, HEAD)
    return ids, torch.ones(2, PLACES, dtype=torch.int64), positions, torch.tensor([5]), buffer, buffer


@dataclass(frozen=True)
class Greedy:
    tokens: np.ndarray
    logits: np.ndarray


class EagerLoop:
    """The decoder in eager mode, with its own loop and cache."""

    vocabulary = VOCABULARY
    window = None

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @torch.no_grad()
    def generate(self, ids: np.ndarray, mask: np.ndarray, count: int) -> Greedy:
        tokens: Sequence[torch.Tensor] = []
        logits = []
        read, seen = torch.from_numpy(ids), torch.from_numpy(mask)
        key = value = torch.zeros(len(ids), HEADS, 0, HEAD)
        for _ in range(count):
            positions = (seen.cumsum(1) - 1).clamp(min=0)[:, -read.shape[1] :]
            out, key, value = self.decoder.read(read, seen, positions, key, value)
            logits.append(out[:, -1])
            read = out[:, -1].argmax(-1, keepdim=True)
            tokens = [*tokens, read]
            seen = torch.cat([seen, torch.ones_like(read)], 1)
        return Greedy(torch.cat(list(tokens), 1).numpy(), torch.stack(logits, 1).numpy())


class RecurrentDecoder(nn.Module):
    """One layer of a gated linear attention behind a convolution, without biases, so that 0 leaves zero states zero.

    ``forward`` reads the whole text without a cache.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.project = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.decay = nn.Linear(HIDDEN, 1, bias=False)
        self.kernel = nn.Parameter(torch.randn(3 * HIDDEN, WIDTH))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        conv, state = empty_states(input_ids.shape[0], self.kernel.dtype)
        logits = []
        for place in range(input_ids.shape[1]):
            seen = attention_mask[:, : place + 1]
            made, conv, state = self.read(input_ids[:, place : place + 1], seen, conv, state)
            logits.append(made)
        return {"logits": torch.cat(logits, 1)}

    def read(
        self, ids: torch.Tensor, mask: torch.Tensor, conv: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Read one token.

        Returns:
            logits, the last inputs of the convolution, the state of the linear attention.
        """
        x = self.norm(self.embed(ids[:, 0])) * self.seen(mask)
        conv = torch.cat([conv[:, :, 1:], self.project(x)[:, :, None]], -1)
        query, key, value = nn.functional.silu((conv * self.kernel).sum(-1)).chunk(3, -1)
        state = state * torch.exp(-self.rate(x))[:, :, None] + key[:, :, None] * value[:, None] / HIDDEN
        mixed = (state * query[:, :, None]).sum(1)
        return self.head(x + mixed)[:, None], conv, state

    def rate(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.softplus(self.decay(x))

    def seen(self, mask: torch.Tensor) -> torch.Tensor:
        return mask[:, -1:]


class GrowingState(RecurrentDecoder):
    """Fault: the decay has the wrong sign."""

    def rate(self, x: torch.Tensor) -> torch.Tensor:
        return -super().rate(x)


class PaddedState(RecurrentDecoder):
    """Fault: the padding is read into the states."""

    def seen(self, mask: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(mask[:, -1:])


class WithStates(nn.Module):
    """The decoder with its states as inputs and outputs. It reads one token."""

    def __init__(self, decoder: RecurrentDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, conv: torch.Tensor, state: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        logits, conv, state = self.decoder.read(ids, mask, conv, state)
        return {"logits": logits, "present_conv.0": conv, "present_recurrent.0": self.passed_on(state)}

    def passed_on(self, state: torch.Tensor) -> torch.Tensor:
        return state


class ForgottenState(WithStates):
    """Fault: the state is not passed on."""

    def passed_on(self, state: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(state)


def empty_states(batch: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states before the first token."""
    return torch.zeros(batch, 3 * HIDDEN, WIDTH, dtype=dtype), torch.zeros(batch, HIDDEN, HIDDEN, dtype=dtype)


STATE_INPUTS = (
    f"input_ids:int64[batch,1]{{0:{VOCABULARY}}}",
    "attention_mask:int64[batch,total]",
    f"past_conv.0:float32[batch,{3 * HIDDEN},{WIDTH}]{{-3.0:3.0}}",
    f"past_recurrent.0:float32[batch,{HIDDEN},{HIDDEN}]{{-3.0:3.0}}",
)
STATE_DIMS = ("total=1:8:64",)


def state_example() -> tuple[torch.Tensor, ...]:
    ids, mask = (torch.ones(2, length, dtype=torch.int64) for length in (1, 8))
    return ids, mask, *empty_states(2)


class RecurrentLoop:
    """The decoder with a linear attention in eager mode, with its own loop and states."""

    vocabulary = VOCABULARY
    window = None

    def __init__(self, decoder: RecurrentDecoder) -> None:
        self.decoder = decoder

    @torch.no_grad()
    def generate(self, ids: np.ndarray, mask: np.ndarray, count: int) -> Greedy:
        read, seen = torch.from_numpy(ids), torch.from_numpy(mask)
        states = empty_states(len(ids))
        logits: list[torch.Tensor] = []
        for place in range(ids.shape[1] + count - 1):
            made, *states = self.decoder.read(read[:, place : place + 1], seen[:, : place + 1], *states)
            if place + 1 < ids.shape[1]:
                continue
            logits.append(made[:, 0])
            read = torch.cat([read, made[:, 0].argmax(-1, keepdim=True)], 1)
            seen = torch.cat([seen, torch.ones_like(seen[:, :1])], 1)
        return Greedy(read[:, ids.shape[1] :].numpy(), torch.stack(logits, 1).numpy())
