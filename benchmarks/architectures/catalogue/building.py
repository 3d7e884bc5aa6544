"""Build a model from a line of the catalogue, without downloads, with random weights.

Libraries initialize gamma to 1, beta to 0 and variances to 1. Every such constant parameter and running statistic gets
random values, so that a lost gamma or a wrong mean changes the outputs. The libraries are imported inside the builders,
so that the catalogue can be read without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import nn

from .torchvision_ops import declare_torchvision

# Ranges min:opt:max of the dims that inputs may name
SIZES = {
    "batch": "1:2:3",
    "image_batch": "1:3:4",
    "sequence": "2:8:16",
    "seq": "2:8:16",
    "decoder_seq": "2:6:16",
    "frames": "16:32:64",
}


@dataclass(frozen=True)
class Architecture:
    """One model.

    Attributes:
        inputs: specifications as for normdeploy's ``--input``.
        ranges: more dims that the inputs name, dim -> min:opt:max.
        model: name in the library of the model.
        left: expected number of refused norms, by a part of the reason. These are norms that no standard node can
            express, or that have no linear op to fold into. All other norms must become one node, or be folded.
        part: part of the model that is measured if both exporters refuse the whole model.
    """

    name: str
    library: str
    build: Callable[[], nn.Module]
    inputs: tuple[str, ...]
    left: Mapping[str, int] = field(default_factory=dict)
    ranges: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    part: Architecture | None = None

    @property
    def sizes(self) -> dict[str, str]:
        """Return the dims that the inputs name, dim -> min:opt:max."""
        shapes = (part for spec in self.inputs for part in re.findall(r"\[(.*?)\]", spec))
        named = {dim for shape in shapes for dim in shape.split(",")}
        return {name: text for name, text in {**SIZES, **self.ranges}.items() if name in named}

    @property
    def dims(self) -> tuple[str, ...]:
        """Return the ranges of the dims that the inputs name, as for normdeploy's ``--dim``."""
        return tuple(f"{name}={text}" for name, text in self.sizes.items())


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    """Put a module in eval mode, and draw values for tensors that are constant: zeros from N(0, 0.2²), another c from
    U(c/2, 3c/2).

    Returns:
        the module.
    """
    generator = torch.Generator().manual_seed(seed)
    # Statistics, and the buffers of a frozen BatchNorm.
    frozen = ("running_mean", "running_var", "weight", "bias")
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
    """Build the model, the same one at each call.

    Returns:
        the module in eval mode.
    """
    declare_torchvision()
    torch.manual_seed(0)
    return randomised(architecture.build())


# ------------------------------------------------------------------ one function for each library: a line of the catalo


def transformers(
    name: str, model: str, inputs: tuple[str, ...], *, left: Mapping[str, int] | None = None, **settings: Any
) -> Architecture:
    """Describe a class of transformers; the class names its config's class.

    Returns:
        the architecture.
    """

    def build() -> nn.Module:
        """Build the model.

        Returns:
            the module.
        """
        import transformers

        kind = getattr(transformers, model)
        return kind(kind.config_class(**settings))

    return Architecture(name, "transformers", build, inputs, left or {}, model=model)


class Method(nn.Module):
    """Method of a model as a module, as a pipeline calls it: ``decode`` of an autoencoder."""

    def __init__(self, model: Any, method: str) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Latents of a VAE are a distribution.
        result = getattr(self.model, self.method)(x, return_dict=False)[0]
        return result if isinstance(result, torch.Tensor) else result.mode()


def diffusers(
    name: str,
    model: str,
    inputs: tuple[str, ...],
    *,
    method: str = "",
    left: Mapping[str, int] | None = None,
    **settings: Any,
) -> Architecture:
    """Describe a class of diffusers with its constructor's arguments.

    Args:
        method: name of a method to use instead of forward; its input is ``x``.

    Returns:
        the architecture.
    """

    def build() -> nn.Module:
        """Build the model.

        Returns:
            the module.
        """
        import diffusers

        made = getattr(diffusers, model)(**settings)
        return Method(made, method) if method else made

    return Architecture(name, "diffusers", build, inputs, left or {}, model=model)


def _named(path: str) -> Callable[..., nn.Module]:
    where, _, what = path.rpartition(".")
    found: Callable[..., nn.Module] = getattr(import_module(where), what)
    return found


def timm(
    name: str, model: str, size: int = 64, *, left: Mapping[str, int] | None = None, **settings: Any
) -> Architecture:
    """Describe a model of timm by its name, or a class of timm.models ("convmixer.ConvMixer"), on images of one size.

    Returns:
        the architecture.
    """

    def build() -> nn.Module:
        """Build the model.

        Returns:
            the module.
        """
        import timm

        if "." in model:
            return _named(f"timm.models.{model}")(num_classes=10, **settings)
        return timm.create_model(model, pretrained=False, num_classes=10, **settings)

    return Architecture(name, "timm", build, (f"x:float32[batch,3,{size},{size}]",), left or {}, model=model)


def torchvision(
    name: str,
    model: str,
    shape: tuple[int, ...] = (3, 64, 64),
    *,
    left: Mapping[str, int] | None = None,
    **settings: Any,
) -> Architecture:
    """Describe a function or class of torchvision.models with its arguments.

    Returns:
        the architecture.
    """

    def build() -> nn.Module:
        """Build the model.

        Returns:
            the module.
        """
        return _named(f"torchvision.models.{model}")(**settings)

    sizes = ",".join(str(size) for size in shape)
    return Architecture(name, "torchvision", build, (f"x:float32[batch,{sizes}]",), left or {}, model=model)
