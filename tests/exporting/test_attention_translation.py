"""Attention over any number of leading dims gives PyTorch's values in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import normdeploy
from normdeploy.ort_sessions.session import open_session

LENGTH, WIDTH = 6, 8


class Attention(nn.Module):
    """Attention of x to itself after a projection; ``mask`` is "none", "causal", "bool" or "float"."""

    def __init__(self, mask: str, scale: float | None = None) -> None:
        super().__init__()
        self.mask = mask
        self.scale = scale
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projection(x).chunk(3, dim=-1)
        visible = x[..., 0].unsqueeze(-2) > 0
        masks = {"bool": visible, "float": visible.to(x.dtype) * 3}
        return functional.scaled_dot_product_attention(
            query, key, value, masks.get(self.mask), is_causal=self.mask == "causal", scale=self.scale
        )


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("leading", [(), (3,), (3, 2, 2)])
def test_attention_of_other_rank_is_pytorchs(mask: str, leading: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = Attention(mask).eval()
    x = torch.randn(*leading, LENGTH, WIDTH)
    if mask == "bool":
        # The mask hides every key of this row, so that its result is 0.
        x[..., 0] = x[..., 0].abs()
        x.view(-1, LENGTH, WIDTH)[0, :, 0] *= -1
    made = normdeploy.export(module, (x,))
    (given,) = open_session(made.proto.SerializeToString()).run(None, {"x": x.numpy()})
    right = module.double()(x.double()).detach().numpy()
    # Each element is a sum of at most LENGTH products of weights of at most 1, after two sums of WIDTH products.
    bound = 16 * (2 * WIDTH + LENGTH) * 2.0**-24 * np.abs(x.numpy()).max() ** 2
    assert np.abs(given - right).max() <= bound


class Given(nn.Module):
    """Attention of tensors as they are, with ``options`` of torch's function."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, **self.options)


@pytest.mark.parametrize(
    ("query", "key", "options"),
    [
        # The lengths of a causal mask are those of the second to last axes, at any ranks.
        pytest.param((2, 6, 8), (2, 5, 8), {"is_causal": True}, id="causal, more queries"),
        pytest.param((2, 3, 8), (2, 5, 8), {"is_causal": True}, id="causal, fewer queries"),
        pytest.param((6, 8), (1, 5, 8), {"is_causal": True}, id="causal, query of lower rank"),
        pytest.param((2, 4, 6, 8), (4, 5, 8), {"is_causal": True}, id="causal, key of lower rank"),
        pytest.param((3, 1, 2, 6, 8), (1, 4, 2, 5, 8), {}, id="broadcast"),
        pytest.param((4, 6, 8), (2, 6, 8), {"enable_gqa": True}, id="grouped heads of 3 dims"),
        pytest.param((2, 3, 4, 6, 8), (2, 3, 2, 6, 8), {"enable_gqa": True}, id="grouped heads of 5 dims"),
        pytest.param((2, 6, 8), (2, 5, 8), {"scale": -0.3}, id="negative scale"),
        pytest.param((2, 4, 6, 8), (2, 4, 5, 8), {"scale": -0.3}, id="negative scale of 4 dims"),
        pytest.param((2, 4, 6, 8), (2, 2, 6, 8), {"scale": -0.3, "enable_gqa": True}, id="both"),
    ],
)
def test_attention_with_options_is_pytorchs(
    query: tuple[int, ...], key: tuple[int, ...], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(query), torch.randn(key), torch.randn(key)]
    module = Given(**options).eval()
    made = normdeploy.export(module, tuple(inputs))
    feeds = {name: x.numpy() for name, x in zip(("query", "key", "value"), inputs, strict=True)}
    (given,) = open_session(made.proto.SerializeToString()).run(None, feeds)
    right = module(*(x.double() for x in inputs)).numpy()
    assert given.shape == right.shape
    # Scores of WIDTH products change the weights of at most LENGTH values.
    largest = max(float(x.abs().max()) for x in inputs)
    assert np.abs(given - right).max() <= 16 * (2 * WIDTH + LENGTH) * 2.0**-24 * largest**2


def test_a_float32_mask_of_half_tensors_is_cast() -> None:
    torch.manual_seed(0)

    class Masked(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(query, key, value, mask)

    half = [torch.randn(2, LENGTH, WIDTH).half() for _ in range(3)]
    mask = torch.randn(LENGTH, LENGTH)
    made = normdeploy.export(Masked().eval(), (*half, mask))
    feeds = {name: x.numpy() for name, x in zip(("query", "key", "value", "mask"), [*half, mask], strict=True)}
    (given,) = open_session(made.proto.SerializeToString()).run(None, feeds)
    right = Masked()(*(x.double() for x in half), mask.double()).numpy()
    # Half precision rounds each of the WIDTH products of a score, the weights and the result by 2⁻¹¹.
    assert np.abs(given - right).max() <= (WIDTH + 4) * 2.0**-11 * float(max(x.abs().max() for x in half)) ** 2


def test_attention_of_windows_with_dynamic_sizes_is_verified(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = [f"x[batch,windows,2,length,{WIDTH}]"]
    module = Attention("none", scale=0.3).eval()
    normdeploy.export(module, inputs=inputs, output=tmp_path / "windows.onnx")
    comparison = normdeploy.verify(module, tmp_path / "windows.onnx", inputs=inputs, seeds=1)
    assert comparison, str(comparison)


def test_attention_of_four_dims_stays_the_exporters_own() -> None:
    made = normdeploy.export(Attention("none").eval(), (torch.randn(2, 2, LENGTH, WIDTH),), opset=23)
    assert "Attention" in {node.op_type for node in made.proto.graph.node}
