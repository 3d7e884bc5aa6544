"""Count false alarms of ``verify``: 38 correct nets of many kinds, exported with default options for 24 seeds each, and
verified.

``python -m benchmarks.verify_alarms [SEEDS] [--int8 RUNTIME]`` writes ``benchmarks/results/verify_alarms.md`` after
each seed, with ``--int8`` ``verify_alarms_int8.md``. If the run is interrupted, the table says how many nets were
verified. With ``--int8`` the nets are quantized for that runtime on 96 random inputs, and verified by the error budget
of their quantization steps. Nets without anything to quantize, and nets whose budget exceeds a quarter of the output
and so decides nothing, are counted separately and not as alarms.

A seed determines the weights (and running statistics, scales and shifts of norms) and the inputs. A net counts as a
false alarm if ``verify`` does not pass; the first reason is shown. The nets are assumed to be correct, because each is
exported from the same model that it is compared with.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import normdeploy
from normdeploy.errors import InputError

RESULTS = Path(__file__).with_name("results")
SAMPLES = 96
# Input with rows of 9,216 elements and more, whose sums lose digits in float32
LARGE = "x:float32[1,3,96,96]"
IMAGE, TOKENS, ROWS = (
    "x:float32[batch=1:2:4,3,8,8]",
    "x:float32[batch=1:2:4,seq=1:6:40,16]",
    "x:float32[batch=1:3:8,16]",
)
# torch.export fixes the length of a recurrent net.
FIXED = "x:float32[batch=1:2:4,6,16]"
IDS = "ids:int64[batch=1:2:4,seq=1:6:40]{0:50}"


class Fn(nn.Module):
    """Function of the input with layers that it uses."""

    def __init__(self, function: Callable[..., torch.Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleDict(layers)

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(self.layers, *args)


class RMS(nn.Module):
    """RMS norm by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def conv(*after: nn.Module, out: int = 8) -> nn.Module:
    """Build a convolution of an image, followed by other modules.

    Returns:
        the module.
    """
    return nn.Sequential(nn.Conv2d(3, out, 3, padding=1), *after)


def attention(layers: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    """Apply pre-norm self-attention with a residual.

    Returns:
        like x.
    """
    y = layers["norm"](x)
    q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in layers["qkv"](y).chunk(3, -1))
    return x + layers["mix"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def causal(layers: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    """Apply causal self-attention with a boolean mask.

    Returns:
        like x.
    """
    q, k, v = layers["qkv"](x).chunk(3, -1)
    scores = q @ k.transpose(-1, -2) / 4
    n = x.shape[1]
    mask = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ v


def rotary(layers: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    """Rotate halves of the features by their position.

    Returns:
        rotated features.
    """
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * (0.1 ** torch.arange(8, dtype=x.dtype))
    one, two = layers["up"](x).chunk(2, -1)
    return torch.cat([one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()], -1)


def words(layers: nn.ModuleDict, ids: torch.Tensor) -> torch.Tensor:
    """Embed ids, normalize and project.

    Returns:
        scores.
    """
    return layers["head"](layers["norm"](layers["table"](ids)))


def pooled_words(layers: nn.ModuleDict, ids: torch.Tensor) -> torch.Tensor:
    """Embed ids, average and normalize.

    Returns:
        vectors of length one.
    """
    return F.normalize(layers["table"](ids).mean(1), dim=-1)


def by_hand(layers: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    """Apply a hand-written layer norm and a linear layer.

    Returns:
        scores.
    """
    mean = x.mean(-1, keepdim=True)
    return layers["head"]((x - mean) / torch.sqrt(((x - mean) ** 2).mean(-1, keepdim=True) + 1e-5))


def gated(layers: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    """Apply a gated feed-forward part.

    Returns:
        like x.
    """
    return layers["down"](F.silu(layers["gate"](x)) * layers["up"](x))


def lin(i: int = 16, o: int = 16) -> nn.Linear:
    """Build a linear layer.

    Returns:
        the module.
    """
    return nn.Linear(i, o)


NETS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "Conv, BatchNorm, ReLU": (lambda: conv(nn.BatchNorm2d(8), nn.ReLU()), IMAGE),
    "Conv, BatchNorm, Conv, BatchNorm": (
        lambda: conv(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4)),
        IMAGE,
    ),
    "depthwise Conv, BatchNorm, Hardswish": (
        lambda: conv(nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.Hardswish()),
        IMAGE,
    ),
    "Conv, GroupNorm, SiLU": (lambda: conv(nn.GroupNorm(4, 8), nn.SiLU()), IMAGE),
    "Conv, GroupNorm of one channel each, SiLU": (lambda: conv(nn.GroupNorm(8, 8), nn.SiLU()), IMAGE),
    "Conv, InstanceNorm, LeakyReLU": (lambda: conv(nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU()), IMAGE),
    "Conv, GroupNorm, SiLU, 96×96": (lambda: conv(nn.GroupNorm(4, 8), nn.SiLU()), LARGE),
    "Conv, InstanceNorm, LeakyReLU, 96×96": (lambda: conv(nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU()), LARGE),
    "Conv, mean pool, Linear, 96×96": (lambda: conv(nn.AdaptiveAvgPool2d(1), nn.Flatten(), lin(8, 5)), LARGE),
    "Conv, max pool, Linear": (lambda: conv(nn.MaxPool2d(2), nn.Flatten(), lin(128, 5)), IMAGE),
    "Conv, mean pool, Linear": (lambda: conv(nn.AdaptiveAvgPool2d(1), nn.Flatten(), lin(8, 5)), IMAGE),
    "ConvTranspose, BatchNorm": (
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 6, 2, stride=2), nn.BatchNorm2d(6), nn.GELU()),
        IMAGE,
    ),
    "bilinear resize, Conv": (
        lambda: nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(3, 4, 3)),
        IMAGE,
    ),
    "nearest resize, Conv": (lambda: nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(3, 4, 3)), IMAGE),
    "channels-last LayerNorm of an image": (
        lambda: Fn(
            lambda m, x: m["norm"](m["conv"](x).permute(0, 2, 3, 1)), conv=nn.Conv2d(3, 8, 3), norm=nn.LayerNorm(8)
        ),
        IMAGE,
    ),
    "Linear, BatchNorm1d, Tanh": (lambda: nn.Sequential(lin(), nn.BatchNorm1d(16), nn.Tanh(), lin()), ROWS),
    "MLP with Sigmoid": (lambda: nn.Sequential(lin(16, 32), nn.Sigmoid(), lin(32, 4)), ROWS),
    "MLP with ELU and Softplus": (lambda: nn.Sequential(lin(), nn.ELU(), lin(), nn.Softplus()), ROWS),
    "LayerNorm, GELU MLP": (lambda: nn.Sequential(nn.LayerNorm(16), lin(16, 64), nn.GELU(), lin(64, 16)), TOKENS),
    "LayerNorm by hand": (lambda: Fn(by_hand, head=lin()), TOKENS),
    "RMSNorm, gated MLP": (
        lambda: nn.Sequential(RMS(16), Fn(gated, gate=lin(16, 32), up=lin(16, 32), down=lin(32, 16))),
        TOKENS,
    ),
    "attention with LayerNorm": (lambda: Fn(attention, norm=nn.LayerNorm(16), qkv=lin(16, 48), mix=lin()), TOKENS),
    "causal attention with a mask": (lambda: Fn(causal, qkv=lin(16, 48)), TOKENS),
    "rotary positions": (lambda: Fn(rotary, up=lin()), TOKENS),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), TOKENS),
    "LSTM": (lambda: Fn(lambda m, x: m["lstm"](x)[0], lstm=nn.LSTM(16, 12, batch_first=True)), FIXED),
    "GRU": (lambda: Fn(lambda m, x: m["gru"](x)[0], gru=nn.GRU(16, 12, batch_first=True)), FIXED),
    "Embedding, LayerNorm, Linear": (
        lambda: Fn(words, table=nn.Embedding(50, 16), norm=nn.LayerNorm(16), head=lin()),
        IDS,
    ),
    "Embedding, mean, unit length": (lambda: Fn(pooled_words, table=nn.Embedding(50, 16)), IDS),
    "TopK values": (lambda: Fn(lambda m, x: torch.topk(m["up"](x), 4, -1).values, up=lin()), TOKENS),
    "TopK indices": (lambda: Fn(lambda m, x: torch.topk(m["up"](x), 4, -1).indices, up=lin()), TOKENS),
    "TopK and gather": (
        lambda: Fn(lambda m, x: torch.gather(m["v"](x), -1, torch.topk(m["up"](x), 4, -1).indices), up=lin(), v=lin()),
        TOKENS,
    ),
    "argmax of logits": (lambda: Fn(lambda m, x: m["up"](x).argmax(-1), up=lin()), TOKENS),
    "running sum": (lambda: Fn(lambda m, x: m["up"](x).cumsum(1), up=lin()), TOKENS),
    "log-softmax": (lambda: Fn(lambda m, x: F.log_softmax(m["up"](x), -1), up=lin(16, 20)), TOKENS),
    "variance and standard deviation": (
        lambda: Fn(lambda m, x: torch.cat([m["up"](x).std(-1), x.var(-1)], -1), up=lin()),
        TOKENS,
    ),
    "weight norm": (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(lin()), nn.ReLU(), lin()), ROWS),
    "mixture of two experts": (
        lambda: Fn(
            lambda m, x: (torch.softmax(m["gate"](x), -1)[..., None] * torch.stack([m["a"](x), m["b"](x)], -2)).sum(-2),
            gate=lin(16, 2),
            a=lin(),
            b=lin(),
        ),
        TOKENS,
    ),
}


def made(name: str, seed: int) -> nn.Module:
    """Build a net with the seed's weights; norms get scales, shifts and statistics like trained ones.

    Returns:
        the module in eval mode.
    """
    torch.manual_seed(seed)
    net = NETS[name][0]()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_(0, 0.5)
                module.running_var.uniform_(0.3, 2)
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.LayerNorm | nn.GroupNorm | nn.InstanceNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.3)
            if isinstance(module, RMS):
                module.weight.uniform_(0.5, 1.5)
    return net.eval()


@dataclass
class Row:
    """Results for one net.

    Attributes:
        ran: number of exports that were verified.
        alarms: number of false alarms.
        silent: number of nets with nothing to quantize, or without a usable error budget.
        nearest: largest ratio of an error and its allowed error.
        reasons: reasons of the false alarms.
    """

    name: str
    ran: int = 0
    alarms: int = 0
    silent: int = 0
    nearest: float = 0.0
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)

    def cells(self) -> tuple[str, ...]:
        """Format the row.

        Returns:
            cells.
        """
        first = self.reasons.most_common(1)[0][0] if self.reasons else ""
        return (
            self.name,
            str(self.ran),
            str(self.alarms),
            str(self.silent),
            f"{self.nearest:.2f}",
            f"{self.seconds / max(self.ran, 1):.2f}",
            first,
        )


def samples(spec: str, seed: int) -> dict[str, np.ndarray]:
    """Draw `SAMPLES` inputs as ``spec`` describes them, each dim at its middle size.

    Returns:
        name -> array.
    """
    name, kind, dims, below = re.fullmatch(r"(\w+):(\w+)\[(.*)\](?:{0:(\d+)})?", spec).groups()  # type: ignore[union-attr]
    sizes = [int(dim.split("=")[-1].split(":")[len(dim.split(":")) // 2]) for dim in dims.split(",")]
    rng, shape = np.random.default_rng(seed), (SAMPLES, *sizes[1:])
    return {name: rng.integers(0, int(below), shape) if below else rng.standard_normal(shape).astype(kind)}


def run(row: Row, seed: int, folder: Path, runtime: str | None) -> None:
    """Export and verify one net, and count the result."""
    specs = [NETS[row.name][1]]
    net = made(row.name, seed)
    quantized = {"quantize": "int8", "runtime": runtime, "calibrate": samples(specs[0], seed)} if runtime else {}
    try:
        normdeploy.export(net, inputs=specs, output=folder / "net.onnx", **quantized)  # type: ignore[arg-type]
    except InputError as error:
        if not runtime or "can be quantized" not in str(error):
            raise
        row.silent += 1
        return
    start = time.perf_counter()
    found = normdeploy.verify(net, folder / "net.onnx", inputs=specs)
    row.seconds += time.perf_counter() - start
    row.ran += 1
    if runtime and any("metric" in (r.reason or "") for r in found.results):
        row.silent += 1
        return
    row.alarms += not found
    made_of = [r for r in found.results if r.runtime != "eager"]
    row.nearest = max([row.nearest, *(r.max_abs_error / r.allowed for r in made_of if r.allowed)])
    for r in made_of:
        if not r:
            row.reasons[
                f"{r.runtime}, {r.case.partition(',')[0]}: {r.reason or f'{r.max_abs_error:.1e} of {r.allowed:.1e}'}"[
                    :160
                ]
            ] += 1
    if not found and all(made_of):
        row.reasons[str(found.notes)[:160]] += 1


def main() -> None:
    """Run all nets for each seed."""
    parser = argparse.ArgumentParser(prog="benchmarks.verify_alarms")
    parser.add_argument("seeds", nargs="?", type=int, default=24)
    parser.add_argument("--int8", metavar="RUNTIME", help="quantized for tensorrt-rtx, onnxruntime or any")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = [Row(name) for name in NETS]
    for seed in range(given.seeds):
        for row in rows:
            with tempfile.TemporaryDirectory() as folder:
                run(row, seed, Path(folder), given.int8)
        # Results are kept if the run is interrupted.
        write(rows, given.int8)
        print(f"{seed + 1} of {given.seeds} seeds, {sum(r.alarms for r in rows)} false alarms", flush=True)
    sys.exit(1 if any(r.alarms for r in rows) else 0)


def write(rows: list[Row], runtime: str | None) -> None:
    """Write the table of the results so far."""
    ran, alarms, silent = (sum(numbers) for numbers in zip(*((r.ran, r.alarms, r.silent) for r in rows), strict=True))
    kind = f" of int8 files for {runtime}" if runtime else ""
    counts = f"{len(rows)} nets, {ran} exports verified, {alarms} false alarms"
    counts += f", {silent} without anything to quantize or a budget" if runtime else ""
    head = f"# False alarms of verify{kind}\n\n{__doc__}\n{counts}.\n"
    columns = (
        "net",
        "verified",
        "false alarms",
        "no budget",
        "largest error / allowed",
        "seconds each",
        "the first reason",
    )
    lines = [columns, ("---",) * len(columns), *(row.cells() for row in rows)]
    name = "verify_alarms_int8.md" if runtime else "verify_alarms.md"
    (RESULTS / name).write_text("\n".join([head, *(f"| {' | '.join(line)} |" for line in lines), ""]))


if __name__ == "__main__":
    main()
