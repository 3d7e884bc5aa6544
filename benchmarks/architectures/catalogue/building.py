"""What a line of the catalogue is, and how a model is made from it: from its configuration alone, nothing is
downloaded, random weights.

Every parameter and running statistic that the library starts at one number (gamma at 1, beta at 0, a variance at 1)
gets random values: a gamma that is lost, or a mean taken for another, shows then. The libraries are imported inside the
builders, so that the catalogue can be read where they are missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import nn

SIZES = {"batch": "1:2:3", "sequence": "2:8:16"}  # min:opt:max of the dims that inputs may name
_KEPT: list[torch.library.Library] = []  # what is declared lives as long as its library


@dataclass(frozen=True)
class Architecture:
    """One model: how it is built, and what it is given.

    ``inputs`` are as normdeploy's ``--input``. ``left`` maps a part of a reason to how many findings are refused with
    it: those that no standard node can hold, or that have no linear op to fold into. Everything else must be one node,
    or gone.
    """

    name: str
    library: str
    build: Callable[[], nn.Module]
    inputs: tuple[str, ...]
    left: Mapping[str, int] = field(default_factory=dict)

    @property
    def dims(self) -> tuple[str, ...]:
        """The ranges of the dims that the inputs name, as normdeploy's ``--dim``."""
        shapes = "".join(part for spec in self.inputs for part in re.findall(r"\[.*?\]", spec))
        return tuple(f"{name}={sizes}" for name, sizes in SIZES.items() if name in shapes)


def declare_torchvision() -> None:
    """Its wheels are built for one torch; beside another (here the CPU's) the ops of its missing library have to be
    declared first."""
    if not _KEPT:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    """``module`` in eval mode; what is one number everywhere is drawn: zeros from N(0, 0.2²), another c from U(c/2,
    3c/2)."""
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


# ------------------------------------------------------------------ one function for each library: a line of the catalo


def transformers(
    name: str, model: str, inputs: tuple[str, ...], *, left: Mapping[str, int] | None = None, **settings: Any
) -> Architecture:
    """A class of transformers, its config's class being the one that it names."""

    def build() -> nn.Module:
        import transformers

        kind = getattr(transformers, model)
        return kind(kind.config_class(**settings))

    return Architecture(name, "transformers", build, inputs, left or {})


class Method(nn.Module):
    """A method of a model as a model, as a pipeline calls it: ``decode`` of an autoencoder."""

    def __init__(self, model: Any, method: str) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = getattr(self.model, self.method)(x, return_dict=False)[0]  # latents of a VAE come as a distribution
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
    """A class of diffusers with the arguments of its constructor; with ``method`` that method of it, whose input is
    ``x``."""

    def build() -> nn.Module:
        import diffusers

        made = getattr(diffusers, model)(**settings)
        return Method(made, method) if method else made

    return Architecture(name, "diffusers", build, inputs, left or {})


def _named(path: str) -> Callable[..., nn.Module]:
    where, _, what = path.rpartition(".")
    found: Callable[..., nn.Module] = getattr(import_module(where), what)
    return found


def timm(
    name: str, model: str, size: int = 64, *, left: Mapping[str, int] | None = None, **settings: Any
) -> Architecture:
    """A model of timm by its name, or a class of timm.models ("convmixer.ConvMixer"), on images of one size."""

    def build() -> nn.Module:
        import timm

        if "." in model:
            return _named(f"timm.models.{model}")(num_classes=10, **settings)
        return timm.create_model(model, pretrained=False, num_classes=10, **settings)

    return Architecture(name, "timm", build, (f"x:float32[batch,3,{size},{size}]",), left or {})


def torchvision(
    name: str,
    model: str,
    shape: tuple[int, ...] = (3, 64, 64),
    *,
    left: Mapping[str, int] | None = None,
    **settings: Any,
) -> Architecture:
    """A function or class of torchvision.models with its arguments."""

    def build() -> nn.Module:
        return _named(f"torchvision.models.{model}")(**settings)

    sizes = ",".join(str(size) for size in shape)
    return Architecture(name, "torchvision", build, (f"x:float32[batch,{sizes}]",), left or {})
