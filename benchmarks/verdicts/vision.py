"""Nets for images, points and tables."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from models.case import Input

from .nets import BATCH, Net, floats


def conv_bn(first: int, out: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Build a convolution with batch norm and ReLU6.

    Returns:
        the module.
    """
    conv = nn.Conv2d(first, out, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out), nn.ReLU6())


class SqueezeExcite(nn.Module):
    """Gate channels by their means."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 8, stride=2)
        self.down, self.up = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        gate = F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))
        return self.head((x * gate).mean((2, 3)))


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = conv_bn(3, 8), conv_bn(8, 16), conv_bn(16, 8)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.first(x)
        x = self.up(self.inner(F.max_pool2d(wide, 2)))
        return self.head(self.last(torch.cat([wide, x], 1)))


class ChannelShuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch = conv_bn(3, 8), nn.Sequential(conv_bn(4, 4, groups=4), conv_bn(4, 4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.stem(x).chunk(2, 1)
        x = torch.cat([left, self.branch(right)], 1)
        b, c, h, w = x.shape
        return x.reshape(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)


class BoxHead(nn.Module):
    """Decode an anchor-free detector's boxes, as YOLO's exported files do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_bn(3, 8, stride=2), conv_bn(8, 8))
        self.boxes, self.classes = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 3, 1)
        ys, xs = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
        self.register_buffer("grid", torch.stack([xs, ys], 0).reshape(1, 2, 64) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        near, far = self.boxes(x).flatten(2).exp().chunk(2, 1)
        low, high = self.grid - near, self.grid + far
        boxes = torch.cat([(low + high) / 2, high - low], 1) * 2
        return torch.cat([boxes, self.classes(x).flatten(2).sigmoid()], 1).transpose(1, 2)


class AnchorHead(nn.Module):
    """Compute scores and offsets of two scales, as SSD does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv_bn(3, 8, stride=2), conv_bn(8, 8, stride=2)
        self.scores = nn.ModuleList(nn.Conv2d(8, 2 * 3, 3, padding=1) for _ in range(2))
        self.offsets = nn.ModuleList(nn.Conv2d(8, 2 * 4, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = self.first(x)
        maps = (a, self.second(a))
        scores = [
            s(m).permute(0, 2, 3, 1).flatten(1).unflatten(1, (-1, 3)) for s, m in zip(self.scores, maps, strict=True)
        ]
        offsets = [
            o(m).permute(0, 2, 3, 1).flatten(1).unflatten(1, (-1, 4)) for o, m in zip(self.offsets, maps, strict=True)
        ]
        return torch.cat(scores, 1).softmax(-1), torch.cat(offsets, 1)


class SuperResolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 5, padding=2), nn.Tanh(), nn.Conv2d(8, 12, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pixel_shuffle(self.body(x), 2) + F.interpolate(x, scale_factor=2.0, mode="nearest")


class Segmentation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = conv_bn(3, 8, stride=2), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        pooled = F.interpolate(y.mean((2, 3), keepdim=True), size=y.shape[2:], mode="nearest")
        y = self.head(torch.cat([y, pooled], 1))
        return F.interpolate(y, scale_factor=2.0, mode="bilinear", align_corners=False)


class SpatialAttention(nn.Module):
    """Gate an image by its channels' mean and largest value (CBAM)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate = conv_bn(3, 8), nn.Conv2d(2, 1, 7, padding=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return x * self.gate(torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)).sigmoid()


class ResponseNorm(nn.Module):
    """Normalize the channels' lengths, as ConvNeXt v2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.depth, self.norm = nn.Conv2d(3, 12, 3, padding=1, groups=3), nn.LayerNorm(12, 1e-6)
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.gamma, self.beta = nn.Parameter(torch.rand(24)), nn.Parameter(torch.rand(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.up(self.norm(self.depth(x).permute(0, 2, 3, 1))))
        lengths = torch.linalg.vector_norm(y, dim=(1, 2), keepdim=True)
        y = self.gamma * (y * (lengths / (lengths.mean(-1, keepdim=True) + 1e-6))) + self.beta + y
        return self.down(y).permute(0, 3, 1, 2)


class PatchTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 1, 16))
        self.places = nn.Parameter(torch.randn(1, 5, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.norm(self.layers(x))[:, 0])


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.tokens = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
        self.channels = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.second(x))


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 24, 1))
        self.head = nn.Sequential(nn.Linear(24, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).amax(2)).log_softmax(-1)


class Recommender(nn.Module):
    """Mix embeddings and numbers by their dot products (DLRM)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(30, 8) for _ in range(3))
        self.dense = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(8 + 16, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        dense = self.dense(numbers)
        rows = torch.stack([dense, *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1)
        dots = (rows @ rows.transpose(1, 2)).flatten(1)
        return self.head(torch.cat([dense, dots], 1)).sigmoid()


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(16, 12), nn.ELU(), nn.LayerNorm(12))
        self.mean, self.spread, self.decode = nn.Linear(12, 4), nn.Linear(12, 4), nn.Linear(4, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = self.encode(x)
        mean = self.mean(y)
        return self.decode(mean), mean, F.softplus(self.spread(y))


class Field(nn.Module):
    """Map coordinates through sines, as radiance fields do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.cat([x * 2.0**k for k in range(4)], -1)
        y = self.body(torch.cat([angles.sin(), angles.cos()], -1))
        return torch.cat([y[..., :3].sigmoid(), F.relu(y[..., 3:])], -1)


class Dueling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 24), nn.ReLU())
        self.value, self.advantage = nn.Linear(24, 1), nn.Linear(24, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        advantage = self.advantage(y)
        return self.value(y) + advantage - advantage.mean(-1, keepdim=True)


IMAGE = floats(BATCH, 3, 16, 16)
ROWS = floats(BATCH, 16)

VISION = (
    Net("squeeze and excite", SqueezeExcite, IMAGE),
    Net("UNet", Unet, IMAGE),
    Net("channel shuffle", ChannelShuffle, IMAGE),
    Net("boxes of a detector", BoxHead, IMAGE),
    Net("anchors of a detector", AnchorHead, IMAGE),
    Net("super resolution", SuperResolution, IMAGE),
    Net("segmentation", Segmentation, IMAGE),
    Net("spatial attention", SpatialAttention, IMAGE),
    Net("response norm", ResponseNorm, floats(BATCH, 3, 8, 8)),
    Net("vision transformer", PatchTransformer, floats(BATCH, 3, 8, 8)),
    Net(
        "3d Conv, BatchNorm",
        lambda: nn.Sequential(nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4), nn.ReLU()),
        floats(BATCH, 2, 5, 6, 6),
    ),
    Net("mixer", Mixer, floats(BATCH, 6, 16)),
    Net("PointNet", PointNet, floats(BATCH, 3, ("points", 4, 10, 30))),
    Net("recommender", Recommender, (Input("ids", "int64", (BATCH, 3), 30), Input("numbers", "float32", (BATCH, 5)))),
    Net("autoencoder", Autoencoder, ROWS),
    Net("radiance field", Field, floats(BATCH, ("rays", 2, 5, 20), 3)),
    Net("dueling heads", Dueling, ROWS),
)
