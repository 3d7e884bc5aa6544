"""The architectures: built from their configurations alone, nothing is downloaded; a few layers, random weights.

Every parameter and running statistic that the library starts at one number (gamma at 1, beta at 0, a variance at 1) gets random values:
a gamma that is lost, or a mean taken for another, shows then. The libraries are imported inside the builders, so that pytest can
collect this where they are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

BATCH = "batch=1:2:3"
_KEPT: list[torch.library.Library] = []  # what is declared lives as long as its library


@dataclass(frozen=True)
class Architecture:
    """One model and what is expected of it.

    ``inputs`` are as normdeploy's ``--input``. ``left`` maps a part of a reason to how many findings must be refused or kept with it:
    those that no standard node can hold, or that have no linear op to fold into. Everything else must be one node, or gone.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[str, ...]
    left: Mapping[str, int] = field(default_factory=dict)


def declare_torchvision() -> None:
    """Its wheels are built for one torch; beside another (here the CPU's) the ops of its missing library have to be declared first."""
    if not _KEPT:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    """``module`` in eval mode; what is one number everywhere is drawn: zeros from N(0, 0.2²), another c from U(c/2, 3c/2)."""
    generator = torch.Generator().manual_seed(seed)
    frozen = ("running_mean", "running_var", "weight", "bias")  # statistics, and the buffers of a frozen BatchNorm
    buffers = [b for name, b in module.named_buffers() if name.rpartition(".")[2] in frozen]
    with torch.no_grad():
        for t in [*module.parameters(), *buffers]:
            if not t.is_floating_point() or t.numel() < 2 or not bool((t == t.flatten()[0]).all()):
                continue
            if t.flatten()[0] == 0:
                t.copy_(0.2 * torch.randn(t.shape, generator=generator))
            else:
                t.mul_(0.5 + torch.rand(t.shape, generator=generator))
    return module.eval()


def made(architecture: Architecture) -> nn.Module:
    """The model, the same one at each call."""
    declare_torchvision()
    torch.manual_seed(0)
    return randomised(architecture.build())


# ------------------------------------------------------------------ transformers


def _transformers(model: str, config: str, /, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return build


_ENCODER = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False, "max_position_embeddings": 64}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SPEECH = {
    **_ENCODER,
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 2, 2],
    "conv_kernel": [10, 3, 3],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
_LEVIT = {
    "image_size": 64,
    "hidden_sizes": [16, 24, 32],
    "num_attention_heads": [2, 3, 4],
    "depths": [1, 1, 1],
    "key_dim": [8, 8, 8],
    "down_ops": [["Subsample", 8, 2, 2, 2, 2], ["Subsample", 8, 3, 2, 2, 2]],
}
_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "use_cache": False}
_DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0, "max_position_embeddings": 32}
_IDS = ("input_ids:int64[batch,12]{0:64}",)
_IMAGE = ("pixel_values:float32[batch,3,64,64]",)

TRANSFORMERS = (
    Architecture(
        "BERT",
        _transformers("BertModel", "BertConfig", **_ENCODER, max_position_embeddings=32),
        (*_IDS, "attention_mask:int64[batch,12]{1:2}"),
    ),
    Architecture("DeBERTa v1", _transformers("DebertaModel", "DebertaConfig", **_ENCODER, **_DEBERTA), _IDS),
    Architecture("Llama", _transformers("LlamaModel", "LlamaConfig", **_DECODER), _IDS),
    Architecture("Gemma 2", _transformers("Gemma2Model", "Gemma2Config", **_DECODER), _IDS),
    Architecture("Cohere", _transformers("CohereModel", "CohereConfig", **_DECODER, **_SPECIAL, use_qk_norm=True), _IDS),
    Architecture(
        "T5",
        # its fused attention with a bias is what torch's exporter can't decompose for a dynamic batch ("Cannot view a tensor")
        _transformers("T5ForConditionalGeneration", "T5Config", **_T5, decoder_start_token_id=0, attn_implementation="eager"),
        (*_IDS, "decoder_input_ids:int64[batch,5]{0:64}"),
    ),
    Architecture(
        "ConvNeXt V2",
        _transformers("ConvNextV2Model", "ConvNextV2Config", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], image_size=64),
        _IMAGE,
        left={"not divided by its own deviation": 5},
    ),
    Architecture("LeViT", _transformers("LevitModel", "LevitConfig", **_LEVIT), _IMAGE),
    Architecture(
        "Wav2Vec2 (group norm)", _transformers("Wav2Vec2Model", "Wav2Vec2Config", **_SPEECH), ("input_values:float32[batch,800]",)
    ),
    Architecture(
        "Wav2Vec2 (layer norm)",
        _transformers("Wav2Vec2Model", "Wav2Vec2Config", **_SPEECH, feat_extract_norm="layer", do_stable_layer_norm=True),
        ("input_values:float32[batch,800]",),
    ),
    Architecture(
        "Mamba",
        _transformers("MambaModel", "MambaConfig", vocab_size=64, hidden_size=32, state_size=8, num_hidden_layers=2, use_cache=False),
        ("input_ids:int64[batch,6]{0:64}",),
    ),
)

# ------------------------------------------------------------------ diffusers


class Decoder(nn.Module):
    """Latents to images, as a pipeline calls it."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return self.autoencoder.decode(latents, return_dict=False)[0]


def _diffusers(model: str, /, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import diffusers

        return getattr(diffusers, model)(**settings)

    return build


def _decoder(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: Decoder(_diffusers("AutoencoderKL", **settings)())


_UNET = {"sample_size": 16, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 4}
_TIMESTEP = "timestep:int64[batch]{0:1000}"

DIFFUSERS = (
    Architecture(
        "UNet2D",
        _diffusers(
            "UNet2DModel",
            **_UNET,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
        ("sample:float32[batch,3,16,16]", _TIMESTEP),
    ),
    Architecture(
        "UNet2D, conditioned",
        _diffusers(
            "UNet2DConditionModel",
            **_UNET,
            cross_attention_dim=24,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ),
        ("sample:float32[batch,4,16,16]", _TIMESTEP, "encoder_hidden_states:float32[batch,7,24]"),
    ),
    Architecture(
        "VAE decoder",
        _decoder(
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            latent_channels=4,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            sample_size=32,
        ),
        ("latents:float32[batch,4,8,8]",),
    ),
    Architecture(
        "DiT",
        _diffusers(
            "DiTTransformer2DModel",
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            sample_size=8,
            patch_size=2,
            num_embeds_ada_norm=10,
        ),
        ("hidden_states:float32[batch,4,8,8]", _TIMESTEP, "class_labels:int64[batch]{0:10}"),
    ),
)

# ------------------------------------------------------------------ timm and torchvision


def _densenet() -> nn.Module:
    import timm

    return timm.create_model("densenet121", block_config=(2, 2), growth_rate=8, pretrained=False, num_classes=10)


def _repvgg() -> nn.Module:
    from dataclasses import replace

    from timm.models import byobnet

    config = byobnet.model_cfgs["repvgg_a0"]
    small = tuple(replace(block, d=2, c=width) for block, width in zip(config.blocks, (8, 16, 16, 24), strict=True))
    return byobnet.ByobNet(replace(config, blocks=small, stem_chs=8), num_classes=10)


def _frozen_resnet() -> nn.Module:
    from torchvision.models.resnet import Bottleneck, ResNet
    from torchvision.ops import FrozenBatchNorm2d

    return ResNet(Bottleneck, [1, 2, 1, 1], num_classes=10, width_per_group=8, norm_layer=FrozenBatchNorm2d)


VISION = (
    Architecture("DenseNet", _densenet, ("x:float32[batch,3,32,32]",)),
    Architecture("RepVGG", _repvgg, ("x:float32[batch,3,32,32]",)),
    Architecture("ResNet, frozen", _frozen_resnet, ("x:float32[batch,3,64,64]",)),
)

ARCHITECTURES = (*TRANSFORMERS, *DIFFUSERS, *VISION)

# What ``--fuse portable`` writes: a norm behind every residual sum of blocks, every GroupNorm that SiLU follows, DiT's modulated norms, the
# norms over channels that need Transposes as standard nodes.
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
