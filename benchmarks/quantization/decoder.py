"""Train a small text decoder: RMS norm, rotary positions, gated feed-forward, as in Llama (Touvron et al., arXiv
2302.13971), with four layers of width 192.

Its text is the prose of ``data.sentences().train``, which is not used for judging, in byte pairs learned from the same
prose. It is not a useful language model: it is trained for minutes, its norms' γ are nearer to 1 than a large model's,
and it has hardly any outliers.
"""

from __future__ import annotations

import hashlib
import time
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn

from models.rms import LlamaRMSNorm

from . import data, environments

VOCABULARY, WIDTH, HEADS, HIDDEN, LAYERS, LENGTH = 1024, 192, 6, 512, 4, 64
STEPS, BATCH, RATE = 1500, 24, 3e-3
# Token between sentences; it also pads short ones.
END = 0


class Block(nn.Module):
    """(B, S, WIDTH) to the same: causal attention, then the feed-forward, each after an RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = LlamaRMSNorm(WIDTH), LlamaRMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        q, k, v = (layer(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = rotated(q, turn) @ rotated(k, turn).transpose(2, 3) / (WIDTH // HEADS) ** 0.5
        x = x + self.o(((scores + mask).softmax(-1) @ v).transpose(1, 2).flatten(2))
        y = self.feed_norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def rotated(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply rotary positions (Su et al., arXiv 2104.09864) to (B, heads, S, width).

    Returns:
        like x.
    """
    cos, sin = turn
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Decoder(nn.Module):
    """int64 (B, S) token ids, S at most LENGTH, to float32 (B, S, VOCABULARY) scores of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = LlamaRMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        half = WIDTH // HEADS // 2
        angle = torch.arange(LENGTH)[:, None] / 10000 ** (torch.arange(half) / half)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -1e4).triu(1), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        x, turn = self.embedding(ids), (self.cos[:length], self.sin[:length])
        for block in self.blocks:
            x = block(x, turn, self.mask[:length, :length])
        return self.head(self.norm(x))


@cache
def tokenizer() -> Tokenizer:
    """Train the tokenizer, once.

    Returns:
        the tokenizer.
    """
    made = Tokenizer(models.BPE(unk_token=None))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(data.sentences().train, trainer)
    return made


def encoded(sentences: tuple[str, ...]) -> np.ndarray:
    """Encode sentences: each begins with END, and is truncated or padded with END.

    Returns:
        int64 [sentences, LENGTH].
    """
    rows = np.full((len(sentences), LENGTH), END, np.int64)
    for row, ids in zip(rows, tokenizer().encode_batch(list(sentences)), strict=True):
        row[1 : 1 + len(ids.ids)] = ids.ids[: LENGTH - 1]
    return rows


def loss(scores: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Compute the nats of each token of each sentence, including its end. Their mean is the logarithm of perplexity
    (Jelinek et al., 1977).

    Returns:
        float64 [tokens].
    """
    wide = scores[:, :-1].astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    nats = np.log(np.exp(wide).sum(-1)) - np.take_along_axis(wide, ids[:, 1:, None], -1)[..., 0]
    lengths = (ids[:, 1:] != END).sum(-1)
    counted: np.ndarray = nats[np.arange(LENGTH - 1) <= lengths[:, None]]
    return counted


@cache
def load() -> Decoder:
    """Load the decoder with the weights from `train`, which are cached.

    Returns:
        the module in eval mode.
    """
    text = Path(__file__).read_bytes() + data.sentences().digest.encode()
    kept = environments.cache() / f"decoder-{hashlib.sha256(text).hexdigest()[:16]}.safetensors"
    if not kept.exists():
        save_file(train().state_dict(), kept)
    model = Decoder()
    model.load_state_dict(load_file(kept))
    return model.eval()


def train() -> Decoder:
    """Train with AdamW and a cosine schedule (Loshchilov and Hutter, arXiv 1711.05101), on one thread, with a fixed
    seed.

    Returns:
        the module.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, start = Decoder(), time.perf_counter()
    rows = [[END, *e.ids] for e in tokenizer().encode_batch(list(data.sentences().train))]
    stream = torch.tensor([token for row in rows for token in row])
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS, pct_start=0.1)
    for step in range(STEPS):
        places = torch.randint(len(stream) - LENGTH, (BATCH,))
        ids = torch.stack([stream[p : p + LENGTH + 1] for p in places])
        scores = model(ids[:, :-1])
        nats = nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        nats.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == STEPS - 1:
            print(f"decoder, step {step}: {nats.item():.3f} nats, {time.perf_counter() - start:.0f} s", flush=True)
    return model
