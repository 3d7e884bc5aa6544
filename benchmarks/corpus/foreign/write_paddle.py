"""Write norms of PaddlePaddle with paddle2onnx, with and without its constant folding (Polygraphy's).

    python benchmarks/corpus/foreign/write_paddle.py FOLDER

Needs paddlepaddle, paddle2onnx, packaging and polygraphy, in a separate environment.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import paddle
import paddle2onnx
from manifest import BN, FOLDED, GN, IN, LN, RMS, Expect, Saver, Shape
from paddle import nn

LAST, IMAGE = (None, 5, 16), (None, 8, 6, 7)
rng = np.random.default_rng(5)


class Affine(nn.Layer):
    """gamma · function(x) + beta."""

    def __init__(self, function: Callable[[Any], Any], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.gamma, self.beta = self.create_parameter(list(shape)), self.create_parameter(list(shape), is_bias=True)

    def forward(self, x: Any) -> Any:
        return self.gamma * self.function(x) + self.beta


def centred(x: Any, axes: Any = -1) -> Any:
    """Subtract the mean.

    Returns:
        like x.
    """
    return x - x.mean(axes, keepdim=True)


def standardized(axes: Any, epsilon: float) -> Callable[[Any], Any]:
    """Build a norm without affine.

    Returns:
        the function.
    """

    def norm(x: Any) -> Any:
        """Normalize x.

        Returns:
            like x.
        """
        d = centred(x, axes)
        return d / paddle.sqrt((d * d).mean(axes, keepdim=True) + epsilon)

    return norm


def grouped(x: Any) -> Any:
    """Normalize in two groups.

    Returns:
        like x.
    """
    y = x.reshape([-1, 2, 4, 6, 7])
    return standardized([2, 3, 4], 1e-5)(y).reshape([-1, 8, 6, 7])


def rms(x: Any) -> Any:
    """Apply an RMS norm.

    Returns:
        like x.
    """
    return x * paddle.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def randomised(layer: Any) -> Any:
    """Randomize all parameters, and switch to evaluation mode.

    Returns:
        the layer.
    """
    state = layer.state_dict()
    layer.set_state_dict(
        {name: paddle.to_tensor(rng.uniform(0.5, 1.5, v.shape).astype(np.float32)) for name, v in state.items()}
    )
    layer.eval()
    return layer


def norms() -> list[tuple[str, Shape, Expect, Any]]:
    """List the norms: name, shape, expectation and layer.

    Returns:
        rows.
    """
    return [
        ("LayerNorm", LAST, (LN,), nn.LayerNorm(16)),
        ("GroupNorm", IMAGE, (GN,), nn.GroupNorm(2, 8)),
        ("InstanceNorm2D", IMAGE, (IN,), nn.InstanceNorm2D(8)),
        ("Conv2D BatchNorm2D", IMAGE, (FOLDED,), nn.Sequential(nn.Conv2D(8, 4, 3), nn.BatchNorm2D(4))),
        (
            "Conv2D no bias BatchNorm2D",
            IMAGE,
            (FOLDED,),
            nn.Sequential(nn.Conv2D(8, 4, 3, bias_attr=False), nn.BatchNorm2D(4)),
        ),
        ("depthwise BatchNorm2D", IMAGE, (FOLDED,), nn.Sequential(nn.Conv2D(8, 8, 3, groups=8), nn.BatchNorm2D(8))),
        (
            "Conv2DTranspose BatchNorm2D",
            IMAGE,
            (FOLDED,),
            nn.Sequential(nn.Conv2DTranspose(8, 4, 3), nn.BatchNorm2D(4)),
        ),
        ("Linear BatchNorm1D", (None, 16), (FOLDED,), nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1D(8))),
        ("BatchNorm2D", IMAGE, (BN,), nn.BatchNorm2D(8)),
        ("by hand", LAST, (LN,), Affine(standardized(-1, 1e-6), 16)),
        ("by hand, small epsilon", LAST, (LN,), Affine(standardized(-1, 1e-12), 16)),
        ("by hand, channels", IMAGE, (LN,), Affine(standardized(1, 1e-6), 8, 1, 1)),
        ("by hand, instance", IMAGE, (IN,), Affine(standardized([2, 3], 1e-5), 8, 1, 1)),
        ("by hand, groups", IMAGE, (GN,), Affine(grouped, 8, 1, 1)),
        (
            "var",
            LAST,
            (LN,),
            Affine(lambda x: centred(x) / paddle.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5), 16),
        ),
        ("var, unbiased", LAST, (LN,), Affine(lambda x: centred(x) / paddle.sqrt(x.var(-1, keepdim=True) + 1e-5), 16)),
        ("rms", LAST, (RMS,), Affine(rms, 16)),
        ("std plus epsilon", LAST, (), Affine(lambda x: centred(x) / (x.std(-1, keepdim=True) + 1e-3), 16)),
        ("F.normalize", LAST, (), Affine(lambda x: nn.functional.normalize(x, axis=-1), 16)),
    ]


def export(layer: Any, shape: Shape, opset: int, fold: bool, folder: Path) -> onnx.ModelProto:
    """Export a layer.

    Returns:
        the model.
    """
    spec = paddle.static.InputSpec([-1 if d is None else d for d in shape], "float32", "x")
    paddle.jit.save(layer, str(folder / "model"), input_spec=[spec])
    paddle2onnx.export(
        str(folder / "model.json"),
        str(folder / "model.pdiparams"),
        str(folder / "model.onnx"),
        opset_version=opset,
        optimize_tool="polygraphy" if fold else "None",
    )
    return onnx.load(folder / "model.onnx")


def main(folder: str) -> None:
    """Write the archive."""
    saver = Saver(folder, "paddle2onnx")
    for number, (name, shape, expect, layer) in enumerate(norms()):
        randomised(layer)
        for opset, fold, sizes in ((11, True, shape), (13, False, (2, *shape[1:])), (17, False, shape)):
            if number % 2 and opset == 11:
                continue
            with tempfile.TemporaryDirectory() as work:
                proto = export(layer, sizes, opset, fold, Path(work))
            saver.add(name + (", folded" if fold else ""), proto, sizes, expect)
    saver.finish()


if __name__ == "__main__":
    main(sys.argv[1])
