"""List the models of the race, at usual sizes and with random weights.

Some have fewer layers than usual, if more layers would only repeat the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from models import minilm

from ..architectures.catalogue.building import randomised, timm, torchvision, transformers
from ..architectures.catalogue.torchvision_ops import declare_torchvision

BATCHES = (1, 8)


@dataclass(frozen=True)
class Subject:
    """Model and its inputs for a batch.

    Attributes:
        images: True if the inputs are drawn around an offset; False for ids.
        kind: name of the model type in `onnxruntime.transformers`; "" if it has none.
        heads: number of heads for `onnxruntime.transformers`.
        width: hidden size for `onnxruntime.transformers`.
        open: True if the batch is exported as a dynamic dim; False if it is 1.
    """

    name: str
    make: Callable[[], nn.Module]
    args: Callable[[int], tuple[torch.Tensor, ...]]
    images: bool = True
    kind: str = ""
    heads: int = 0
    width: int = 0
    open: bool = True

    def build(self) -> nn.Module:
        """Build the model in eval mode with scales, shifts and statistics like trained ones, the same at each call.

        Returns:
            the module.
        """
        declare_torchvision()
        torch.manual_seed(0)
        net = self.make()
        return net.eval() if self.name.endswith("trained") else randomised(net)


class First(nn.Module):
    """First result of a model of transformers, given ids."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    # The argument has a name, because for *args torch.export takes dims as one tuple.
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made: Any = self.model(ids)
        return made if isinstance(made, torch.Tensor) else made[0]


# ------------------------------------------------------------------ by hand


def group_norm(channels: int) -> nn.Module:
    """Build a group norm.

    Returns:
        the module.
    """
    return nn.GroupNorm(32, channels)


class Bottleneck(nn.Module):
    """ResNet's block (He et al., arXiv 1512.03385), with any norm."""

    def __init__(self, width: int, out: int, stride: int, norm: Callable[[int], nn.Module], first: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(first, width, 1, bias=False), norm(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), norm(width), nn.ReLU()),
            *(nn.Conv2d(width, out, 1, bias=False), norm(out)),
        )
        same = stride == 1 and first == out
        self.skip = nn.Identity() if same else nn.Sequential(nn.Conv2d(first, out, 1, stride, bias=False), norm(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def resnet50(norm: Callable[[int], nn.Module]) -> nn.Module:
    """Build a ResNet-50 with any norm.

    Returns:
        the module.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    first = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            layers.append(Bottleneck(width, 4 * width, 2 if stage and not block else 1, norm, first))
            first = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class Unet(nn.Module):
    """Two scales of residual blocks of GroupNorm, SiLU and convolution, as in diffusion models (Ho et al., arXiv
    2006.11239).
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, width, 3, padding=1)
        self.down, self.middle, self.up = (self.block(width), self.block(width), self.block(width))
        self.last = nn.Sequential(group_norm(width), nn.SiLU(), nn.Conv2d(width, 4, 3, padding=1))

    @staticmethod
    def block(width: int) -> nn.Sequential:
        """Build a block.

        Returns:
            the module.
        """
        half = (group_norm(width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        return nn.Sequential(*half, *copy.deepcopy(half))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + self.down(x)
        small = nn.functional.avg_pool2d(x, 2)
        small = small + self.middle(small)
        x = x + nn.functional.interpolate(small, scale_factor=2.0)
        return self.last(x + self.up(x))


class HandLayer(nn.Module):
    """Layer norm as people write it (Ba et al., arXiv 1607.06450)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        d = x - x.mean(-1, keepdim=True)
        return self.gamma * d / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-6) + self.beta


class HandRms(nn.Module):
    """RMS norm as people write it (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gamma


class ByHand(nn.Module):
    """Blocks of two linear layers with hand-written norms, as wide as small models."""

    def __init__(self, width: int = 256, blocks: int = 8) -> None:
        super().__init__()
        self.norms = nn.ModuleList(kind(width) for _ in range(blocks) for kind in (HandLayer, HandRms))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in self.norms)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + torch.relu(layer(norm(x)))
        return x


def encoder(layers: int, width: int, heads: int, *, first: bool) -> nn.Module:
    """Build an encoder of torch's layers.

    Returns:
        the module.
    """
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True, norm_first=first)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def sentences(batch: int) -> tuple[torch.Tensor, ...]:
    """Tokenize sentences.

    Returns:
        ids and mask.
    """
    return minilm.tokenize(
        ["The norm of a layer is folded, fused or left alone; each with the reason why. " * 3] * batch
    )


# ------------------------------------------------------------------ from libraries


def ids(length: int = 128) -> Callable[[int], tuple[torch.Tensor, ...]]:
    """Make a function that draws ids for a batch.

    Returns:
        the function.
    """
    return lambda batch: (torch.randint(1, 1000, (batch, length)),)


def image(size: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    """Make a function that draws images for a batch.

    Returns:
        the function.
    """
    return lambda batch: (torch.randn(batch, 3, size, size),)


def text(name: str, model: str, settings: Mapping[str, Any], kind: str = "") -> Subject:
    """Describe a model of transformers.

    Returns:
        the subject.
    """
    built = transformers(name, model, (), vocab_size=1000, **settings).build
    return Subject(name, lambda: First(built()), ids(), images=False, kind=kind, heads=12, width=768)


def pictured(name: str, model: str, size: int = 224, kind: str = "", heads: int = 0, width: int = 0) -> Subject:
    """Describe a model of timm.

    Returns:
        the subject.
    """
    return Subject(name, timm(name, model, size).build, image(size), kind=kind, heads=heads, width=width)


_BASE: dict[str, Any] = {"hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12}
_LLAMA = {**_BASE, "intermediate_size": 2048, "use_cache": False}
_QWEN = {**_LLAMA, "num_key_value_heads": 4, "head_dim": 64}
_DEBERTA = {**_BASE, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}
_T5 = {"d_model": 512, "d_ff": 2048, "d_kv": 64, "num_layers": 4, "num_heads": 8, "use_cache": False}
_MODERN = {**_BASE, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}

SUBJECTS = (
    Subject("MiniLM, trained", minilm.load, sentences, images=False, kind="bert", heads=12, width=384),
    Subject(
        "encoder of BERT's size, 4 layers",
        lambda: encoder(4, 768, 12, first=False),
        lambda n: (torch.randn(n, 128, 768),),
    ),
    Subject(
        "encoder of ViT's size, norms first",
        lambda: encoder(4, 768, 12, first=True),
        lambda n: (torch.randn(n, 197, 768),),
    ),
    Subject("ResNet-50, BatchNorm", lambda: resnet50(nn.BatchNorm2d), image(160)),
    Subject("ResNet-50, GroupNorm", lambda: resnet50(group_norm), image(160)),
    Subject("UNet", Unet, lambda n: (torch.randn(n, 4, 64, 64),)),
    Subject("norms by hand", ByHand, lambda n: (torch.randn(n, 128, 256),)),
)
LIBRARIES = (
    text("BERT, 4 layers", "BertModel", _BASE, "bert"),
    text("DeBERTa v1, 4 layers", "DebertaModel", _DEBERTA),
    text("GPT-2, 4 layers", "GPT2Model", {"n_layer": 4, "use_cache": False}, "gpt2"),
    text("Llama, 4 layers", "LlamaModel", _LLAMA),
    text("Qwen 3, 4 layers", "Qwen3Model", _QWEN),
    text("T5's encoder, 4 layers", "T5EncoderModel", _T5),
    text("ModernBERT, 4 layers", "ModernBertModel", _MODERN),
    pictured("DeiT small", "deit_small_patch16_224", kind="vit", heads=6, width=384),
    pictured("ConvNeXt tiny", "convnext_tiny"),
    pictured("LeViT 256", "levit_256"),
    pictured("DenseNet-121", "densenet121"),
    pictured("EfficientNet B0", "efficientnet_b0"),
    pictured("ResNet-50 of timm", "resnet50"),
    pictured("Swin tiny", "swin_tiny_patch4_window7_224"),
    Subject("MobileNet v3", torchvision("MobileNet v3", "mobilenet_v3_large").build, image(224)),
)
