"""The demo's encoder against BERT written a second time, from the checkpoint's own names, and against published
figures."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from models import minilm

# the quick start of the sentence-transformers documentation prints these for all-MiniLM-L6-v2, four digits each
PUBLISHED = {
    ("The weather is lovely today.", "It's so sunny outside!"): 0.6660,
    ("The weather is lovely today.", "He drove to the stadium."): 0.1046,
    ("It's so sunny outside!", "He drove to the stadium."): 0.1411,
}
SENTENCES = [
    *dict.fromkeys(sentence for pair in PUBLISHED for sentence in pair),
    "A man is playing a guitar on stage.",
    (
        "Someone performs music for an audience, with a guitar in their hands and the whole crowd singing along to"
        " every word of it."
    ),
    "?",
]


@pytest.fixture(scope="module")
def encoder() -> minilm.MiniLM:
    return minilm.load()


def reference(ids: torch.Tensor) -> torch.Tensor:
    """One unpadded sentence, (S,) ids to (hidden,) float64: no mask, torch's own layer norm and attention."""
    config = json.loads((minilm.folder() / "config.json").read_text())
    weights = {
        k: v.double() for k, v in load_file(minilm.folder() / "model.safetensors").items() if v.is_floating_point()
    }

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(
            x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], config["layer_norm_eps"]
        )

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(len(ids), config["num_attention_heads"], -1).transpose(0, 1)

    tables = (weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type"))
    word, position, token_type = tables
    x = norm(word[ids] + position[: len(ids)] + token_type[0], "embeddings.LayerNorm")
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        q, k, v = (heads(linear(x, f"{layer}.attention.self.{name}")) for name in ("query", "key", "value"))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(len(ids), -1)
        x = norm(x + linear(attended, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm")
        x = norm(
            x + linear(F.gelu(linear(x, f"{layer}.intermediate.dense")), f"{layer}.output.dense"),
            f"{layer}.output.LayerNorm",
        )
    mean = x.mean(0)
    return mean / mean.norm()


@torch.no_grad()
def test_encoder_is_bert(encoder: minilm.MiniLM) -> None:
    ids, mask = minilm.tokenize(SENTENCES)
    assert ids.shape == mask.shape
    assert mask.sum(1).unique().numel() > 2, "sentences of several lengths, so that padding is tried"
    want = torch.stack([reference(row[keep.bool()]) for row, keep in zip(ids, mask, strict=True)])
    double = minilm.load().double()(ids, mask)
    # some 16 operations in each of six layers, each rounding once, on components of vectors of length one
    roundings = 100
    assert (double - want).abs().max() < roundings * torch.finfo(torch.float64).eps
    assert (encoder(ids, mask) - want).abs().max() < roundings * torch.finfo(torch.float32).eps


@torch.no_grad()
def test_similarities_are_the_published_ones(encoder: minilm.MiniLM) -> None:
    sentences = SENTENCES[:3]
    vectors = encoder(*minilm.tokenize(sentences))
    for (a, b), want in PUBLISHED.items():
        got = float(vectors[sentences.index(a)] @ vectors[sentences.index(b)])
        assert abs(got - want) < 0.5e-4 + 1e-6, (a, b)  # half of the last printed digit


@torch.no_grad()
def test_sentence_without_words_is_the_zero_vector(encoder: minilm.MiniLM) -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    assert torch.equal(encoder(ids, torch.zeros_like(ids)), torch.zeros(2, 384))


def test_every_parameter_of_the_file_has_a_place() -> None:
    names = {name for name in load_file(minilm.folder() / "model.safetensors") if name not in minilm.UNUSED}
    ours = {minilm.our_name(name) for name in names}
    assert len(ours) == len(names)
    assert ours == set(dict(minilm.load().named_parameters()))


def test_long_sentences_are_cut() -> None:
    ids, _ = minilm.tokenize(["word " * 1000, "one"])
    assert ids.shape == (2, minilm.MAX_LENGTH)
