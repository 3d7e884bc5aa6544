"""Make models of timm and torchvision: the smallest model of a module of timm, a named model of torchvision."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .automatic import Candidate, Refused, brief, iter_tensors

# Words in names of small models
_SMALL = re.compile(
    r"test_|atto|femto|pico|nano|xxs|xx_?small|tiny|_t\d?_|_t\d?$|_xs|mini|_small|_s\d?_|_s\d?$|_050|035|b0|_n$|_t0"
    r"|_s0|_f0|18|_m0|_00|_x0|_a0|_l0|lite"
)
# Number of models of a module whose parameters are counted
_COUNTED = 8
_VIDEOS = ("r3d_18", "mc3_18", "r2plus1d_18", "s3d", "mvit_v1_b", "mvit_v2_s", "swin3d_t", "swin3d_s", "swin3d_b")
_DETECTORS = ("rcnn", "retinanet", "fcos", "ssd")
# Small sizes to which a detector scales its images. The detectors called SSD have one size, which their heads need.
_SCALED = {"min_size": 96, "max_size": 160}


def timm_candidates(module_name: str) -> Iterator[Candidate | Refused]:
    """Yield the smallest model of a module of ``timm.models``, at 64 pixels, 128 pixels and its own size."""
    import timm

    try:
        name = smallest_of_timm(module_name)
    except Exception as error:
        yield Refused(brief(error))
        return
    _, own, _ = timm.get_pretrained_cfg_value(name, "input_size") or (3, 224, 224)
    for size in dict.fromkeys((64, 128, own)):
        for settings in ({"img_size": size}, {}):
            try:
                module = timm.create_model(name, pretrained=False, num_classes=10, **settings).eval()
            except Exception as error:
                yield Refused(brief(error))
                continue
            yield Candidate(module, (f"x:float32[batch,3,{size},{size}]",), {})


def smallest_of_timm(module_name: str) -> str:
    """Find the model of a module with the fewest parameters among those whose names promise a small model.

    Returns:
        its name.
    """
    import timm

    names = timm.list_models(module=module_name)
    promising = sorted(names, key=lambda name: (not name.startswith("test_"), not _SMALL.search(name), len(name)))
    if promising[0].startswith("test_"):
        return str(promising[0])
    sizes = {}
    for name in promising[:_COUNTED]:
        with torch.device("meta"):
            try:
                sizes[name] = sum(p.numel() for p in timm.create_model(name, pretrained=False).parameters())
            except Exception:
                # Some constructors read values of tensors.
                continue
    return str(min(sizes, key=sizes.__getitem__)) if sizes else str(promising[0])


class FirstImage(nn.Module):
    """Detector of torchvision, which takes a list of images: with a list of one image, and tensors as the result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(iter_tensors(self.model([image])[0]))


class BeforeSuppression(nn.Module):
    """Part of a detector of torchvision before its first suppression of boxes: backbone and head, for a batch."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.backbone = model.backbone
        self.head = model.rpn.head if hasattr(model, "rpn") else model.head

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(iter_tensors(self.head(list(self.backbone(images).values()))))


class LastFlow(nn.Module):
    """RAFT, which returns the flow after every step: with the last flow as the result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> Any:
        return self.model(first, second, num_flow_updates=2)[-1]


def torchvision_candidates(name: str) -> Iterator[Candidate | Refused]:
    """Yield a named model of torchvision with inputs of its kind."""
    import torchvision

    # Without an argument for the backbone's weights, its weights would be downloaded.
    accepted = inspect.signature(torchvision.models.get_model_builder(name)).parameters
    settings: dict[str, Any] = {key: None for key in ("weights", "weights_backbone") if key in accepted}
    is_detector = any(word in name for word in _DETECTORS)
    if is_detector and "ssd" not in name:
        settings |= _SCALED
    try:
        module = torchvision.models.get_model(name, **settings).eval()
    except Exception as error:
        yield Refused(brief(error))
        return
    if name.startswith("raft"):
        pair = tuple(f"{which}:float32[batch,3,128,128]{{-1:1}}" for which in ("first", "second"))
        yield Candidate(LastFlow(module), pair, {})
    elif is_detector:
        width, height = module.transform.fixed_size or (_SCALED["min_size"],) * 2
        part = Candidate(BeforeSuppression(module), (f"images:float32[batch,3,{height},{width}]",), {})
        yield Candidate(FirstImage(module), ("image:float32[3,64,64]{0:1}",), {}, part)
    elif name in _VIDEOS:
        for shape in ("3,8,64,64", "3,16,112,112", "3,16,224,224"):
            yield Candidate(module, (f"x:float32[batch,{shape}]",), {})
    else:
        (first, *_) = inspect.signature(module.forward).parameters
        for size in (64, 128, 224, 299):
            yield Candidate(module, (f"{first}:float32[batch,3,{size},{size}]",), {})
