"""S3c: norms of different names that are the same function, in float64; and the settings in which they are not.

``TIGHT``: two orders of the same few float64 operations on standard normal values differ by some 1e-15; anything that
differs in axes, ddof or epsilon differs by 1e-4 or more, which the negative cases show.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from models.batch import BatchNorm2d
from models.case import seeded
from models.group import GroupNorm
from models.instance import ChannelsLastInstanceNorm, DummyChannelNorm, InstanceNorm2d, TokenInstanceNorm
from models.layer import FlatLayerNorm, LayerNorm, UnbiasedLayerNorm
from models.plain import LayerNorm1d

TIGHT = 1e-12


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 2 + 1


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).detach().abs().max())


def copied(target: nn.Module, source: nn.Module) -> nn.Module:
    """``target`` in float64 with the gamma and beta of ``source``."""
    target = target.double()
    with torch.no_grad():
        target.gamma.copy_(source.gamma.view(target.gamma.shape))
        target.beta.copy_(source.beta.view(target.beta.shape))
    return target


def test_instance_norm_with_one_dummy_channel_is_layer_norm() -> None:
    x = normal(3, 4, 5, 6)
    layer = FlatLayerNorm(4 * 5 * 6).double()  # gamma and beta as they start: ones and zeros
    by_hand = InstanceNorm2d(1).double()(x.reshape(3, 1, 20, 6)).view(x.shape)
    by_torch = nn.InstanceNorm2d(1)(x.reshape(3, 1, 20, 6)).view(x.shape)
    for found in (DummyChannelNorm()(x), by_hand, by_torch):
        assert gap(found, layer(x)) < TIGHT
    assert gap(InstanceNorm2d(4).double()(x), layer(x)) > 1e-4  # with the real channels it is not


def test_the_dummy_channel_has_one_gamma_where_layer_norm_has_one_for_each_element() -> None:
    x = normal(3, 4, 5, 6)
    layer = seeded(lambda: FlatLayerNorm(120)).double()
    dummy = DummyChannelNorm()(x)
    assert gap(dummy * layer.gamma.view(4, 5, 6) + layer.beta.view(4, 5, 6), layer(x)) < TIGHT
    assert gap(dummy * layer.gamma[0] + layer.beta[0], layer(x)) > 1e-4


def test_layer_norm_for_convolution_outputs_is_instance_norm() -> None:
    x = normal(3, 6, 7, 5)
    channels_last = seeded(lambda: ChannelsLastInstanceNorm(5)).double()
    instance = copied(InstanceNorm2d(5), channels_last)
    assert gap(channels_last(x), instance(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)) < TIGHT
    assert gap(channels_last(x), functional.layer_norm(x, (5,), channels_last.gamma, channels_last.beta)) > 1e-4


@pytest.mark.parametrize("norm", [BatchNorm2d, nn.BatchNorm2d])
def test_layer_norm_for_convolution_outputs_is_batch_norm_of_one_sample(norm: type[nn.Module]) -> None:
    channels_last = ChannelsLastInstanceNorm(5).double()
    batch = norm(5).double().train()
    one, two = normal(1, 6, 7, 5), normal(2, 6, 7, 5)
    assert gap(channels_last(one), batch(one.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)) < TIGHT
    assert gap(channels_last(two), batch(two.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)) > 1e-4


def test_group_norm_with_one_group_has_layer_norm_s_statistics() -> None:
    x = normal(3, 8, 5, 4)
    group = seeded(lambda: GroupNorm(1, 8)).double()
    x_hat = LayerNorm((8, 5, 4), affine=False)(x)
    assert gap(group(x), x_hat * group.gamma.view(8, 1, 1) + group.beta.view(8, 1, 1)) < TIGHT
    assert gap(copied(GroupNorm(2, 8), group)(x), group(x)) > 1e-4


def test_group_norm_with_a_group_for_each_channel_is_instance_norm() -> None:
    x = normal(3, 8, 5, 4)
    group = seeded(lambda: GroupNorm(8, 8)).double()
    assert gap(group(x), copied(InstanceNorm2d(8), group)(x)) < TIGHT
    assert gap(copied(GroupNorm(4, 8), group)(x), group(x)) > 1e-4


def test_instance_norm_of_positions_is_token_wise_layer_norm() -> None:
    x = normal(3, 5, 24)
    token = TokenInstanceNorm(5).eval()
    assert gap(token(x), LayerNorm([24], affine=False)(x)) < TIGHT
    assert gap(token(x), LayerNorm([5, 24], affine=False)(x)) > 1e-4


@pytest.mark.parametrize("scale", [1.0, 3e-3, 1e-5])
def test_the_unbiased_layer_norm_is_a_biased_one_of_another_epsilon_and_gamma(scale: float) -> None:
    """var·n/(n − 1) + ε = (var + ε·(n − 1)/n) · n/(n − 1), with the root of the last factor going into gamma."""
    x = normal(4, 24) * scale
    ours = seeded(lambda: UnbiasedLayerNorm(24)).double()
    plain = LayerNorm1d(24)
    plain.gamma, plain.beta = ours.gamma.detach(), ours.beta.detach()
    shrink = 23 / 24
    biased = functional.layer_norm(x, (24,), ours.gamma * math.sqrt(shrink), ours.beta, 1e-5 * shrink)
    assert gap(ours(x), biased) < TIGHT
    assert gap(plain(x), biased) < TIGHT
    if scale < 1:  # where epsilon counts, gamma alone does not mend it
        assert gap(functional.layer_norm(x, (24,), ours.gamma * math.sqrt(shrink), ours.beta, 1e-5), ours(x)) > 1e-4
