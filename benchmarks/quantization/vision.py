"""Train a small MobileNetV2 (Sandler et al., arXiv 1801.04381) to name the photograph, one of sixteen, that a crop
comes from.

It has batch norms after every convolution, including depthwise ones, ReLU6 and linear bottlenecks, as in the original,
at a width that can be trained in minutes on a CPU. The task is artificial, but the statistics of its inputs are those
of photographs.
"""

from __future__ import annotations

import hashlib
import time
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from . import data, environments

# Crops of a photograph.
OF_EACH = 160
STEPS, BATCH, RATE = 800, 48, 4e-3
# Expansion, channels, blocks, stride of the first.
STAGES = ((1, 16, 1, 1), (4, 24, 2, 2), (4, 32, 2, 2), (4, 64, 2, 2), (4, 96, 1, 1))
FIRST, LAST = 16, 256


def layer(inner: int, outer: int, size: int = 1, stride: int = 1, groups: int = 1, *, bent: bool = True) -> nn.Module:
    """Build a convolution with batch norm.

    Args:
        bent: add ReLU6.

    Returns:
        the module.
    """
    conv = nn.Conv2d(inner, outer, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outer), *([nn.ReLU6()] if bent else []))


class Inverted(nn.Module):
    """1×1 up, 3×3 depthwise, 1×1 down without an activation; added to its input if the shapes are equal."""

    def __init__(self, inner: int, outer: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inner * expansion
        up = [layer(inner, wide)] if expansion > 1 else []
        self.body = nn.Sequential(*up, layer(wide, wide, 3, stride, wide), layer(wide, outer, bent=False))
        self.adds = stride == 1 and inner == outer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.adds else self.body(x)


class MobileNet(nn.Module):
    """float32 (B, 3, SIDE, SIDE) to (B, photographs)."""

    def __init__(self) -> None:
        super().__init__()
        blocks, inner = [layer(3, FIRST, 3, 2)], FIRST
        for expansion, channels, count, stride in STAGES:
            for i in range(count):
                blocks.append(Inverted(inner, channels, stride if i == 0 else 1, expansion))
                inner = channels
        self.features = nn.Sequential(*blocks, layer(inner, LAST))
        self.classifier = nn.Linear(LAST, len(data.PHOTOGRAPHS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


@cache
def load() -> MobileNet:
    """Load the network with the weights from `train`, which are cached.

    Returns:
        the module in eval mode.
    """
    text = Path(__file__).read_bytes() + data.crops("train", OF_EACH, seed=0).images.tobytes()
    kept = environments.cache() / f"mobilenet-{hashlib.sha256(text).hexdigest()[:16]}.safetensors"
    if not kept.exists():
        save_file(train().state_dict(), kept)
    model = MobileNet()
    model.load_state_dict(load_file(kept))
    return model.eval()


def train() -> MobileNet:
    """Train with AdamW and a cosine schedule, on one thread, with a fixed seed; crops are mirrored at random.

    Returns:
        the module.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    crops, start = data.crops("train", OF_EACH, seed=0), time.perf_counter()
    images, labels = torch.from_numpy(crops.images), torch.from_numpy(crops.labels)
    model = MobileNet().train()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS, pct_start=0.1)
    for step in range(STEPS):
        drawn = torch.randint(len(images), (BATCH,))
        given = images[drawn]
        given = given.flip(3) if step % 2 else given
        nats = nn.functional.cross_entropy(model(given), labels[drawn])
        optimizer.zero_grad()
        nats.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == STEPS - 1:
            print(f"mobilenet, step {step}: {nats.item():.3f} nats, {time.perf_counter() - start:.0f} s", flush=True)
    return model
