"""Which architectures of the benchmark's catalogue are tested, and what ``--fuse portable`` must make of them."""

from __future__ import annotations

from benchmarks.architectures.catalogue import ARCHITECTURES, Architecture

TESTED = (
    *("BERT", "DeBERTa v1", "Llama", "Gemma 2", "Cohere", "T5", "ConvNeXt V2", "LeViT", "Wav2Vec2 (group norm)"),
    *(
        "Wav2Vec2 (layer norm)",
        "Mamba",
        "UNet2D",
        "UNet2D, conditioned",
        "VAE decoder",
        "DiT",
        "DenseNet",
        "RepVGG",
        "ResNet, frozen",
    ),
)


def tested() -> list[Architecture]:
    """One of each form of norm; the benchmark runs all of the catalogue."""
    return [a for a in ARCHITECTURES if a.name in TESTED]


# What ``--fuse portable`` writes: a norm behind every residual sum of blocks, every GroupNorm that SiLU follows, DiT's
# modulated norms, the norms over channels that need Transposes as standard nodes.
JOINED: dict[str, dict[str, int]] = {
    "BERT": {"AddLayerNorm": 4},
    "DeBERTa v1": {"AddLayerNorm": 4},
    "Llama": {"AddRMSNorm": 4},
    "Gemma 2": {"AddRMSNorm": 4},
    "Cohere": {"AddLayerNorm": 2},
    "T5": {"AddRMSNorm": 10},
    "ConvNeXt V2": {"ChannelLayerNorm": 4},
    "Wav2Vec2 (group norm)": {"AddLayerNorm": 5},
    "Wav2Vec2 (layer norm)": {"AddLayerNorm": 5, "ChannelLayerNorm": 3},
    "Mamba": {"AddRMSNorm": 2},
    "UNet2D": {"GroupNormSiLU": 17},
    "UNet2D, conditioned": {"AddLayerNorm": 8, "GroupNormSiLU": 17},
    "VAE decoder": {"GroupNormSiLU": 13},
    "DiT": {"ModulatedLayerNorm": 5},
}
