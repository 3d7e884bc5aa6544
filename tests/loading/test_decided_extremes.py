"""Guards with a minimum of sizes that is always the same argument do not limit the dims."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from normdeploy.errors import InputError
from normdeploy.loading import from_module
from normdeploy.loading.decided_extremes import decide_extremes


class RepeatedHeads(nn.Module):
    """Keys of grouped queries: torch compares min(8·(n + 1), 16·(n + 1)) with 8·(n + 1)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, heads, length, size = x.shape
        x = torch.cat([x, x[:, :, :1]], 2)
        return x[:, :, None].expand(batch, heads, 2, length + 1, size).reshape(batch, 2 * heads, length + 1, size) * 2


class FlattenedCopies(nn.Module):
    """The same guard from ``flatten`` and a permuted copy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x, x[:, :, :1]], 2)
        return x[:, :, None].expand(-1, -1, 4, -1, -1).flatten(1, 2).permute(0, 1, 3, 2).contiguous() + 1


class Diagonal(nn.Module):
    """A diagonal has min(n, n + 1) elements."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, 0]
        return torch.cat([x @ x.mT, x[:, :, :1]], -1).diagonal(0, 1, 2) * x[:, :, 0]


class ShortDiagonal(nn.Module):
    """A diagonal has min(n, 6) elements, so the product with n numbers needs n ≤ 6."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, 0]
        return (x @ x.new_ones(8, 6)).diagonal(0, 1, 2) * x[:, :, 0]


INPUT = "x[batch,2,length,8]"


@pytest.mark.parametrize("net", [RepeatedHeads(), FlattenedCopies(), Diagonal()])
def test_a_minimum_that_is_decided_keeps_the_whole_range(net: nn.Module) -> None:
    model = from_module(net.eval(), inputs=[INPUT], dims=["batch=1:2:64", "length=1:5:100"])
    dims = model.named_dims
    assert (dims["length"].min, dims["length"].max, dims["length"].step) == (1, 100, 1)
    assert not model.notes
    for length in (1, 2, 100):
        x = torch.randn(3, 2, length, 8, generator=torch.Generator().manual_seed(length))
        torch.testing.assert_close(model.program.module(check_guards=False)(x), net(x))


@pytest.mark.parametrize(
    ("extreme", "first", "second"),
    [
        # A convolution of three taps, and a pooling of two steps, both with stride 2
        (torch.sym_min, lambda n: 1 + (n - 1) // 2, lambda n: (n + 1) // 2),
        (torch.sym_max, lambda n: 1 + (n - 1) // 2, lambda n: (n + 1) // 2),
        # The same after another convolution
        (torch.sym_min, lambda n: 1 + ((n - 3) // 2 - 1) // 2, lambda n: ((n - 3) // 2 + 1) // 2),
    ],
)
def test_an_extreme_of_one_size_in_two_forms_is_decided(
    extreme: Callable[..., Any], first: Callable[[Any], Any], second: Callable[[Any], Any]
) -> None:
    assert all(first(n) == second(n) for n in range(-20, 20))
    # torch refuses to guess a condition on a size that it does not know.
    size = ShapeEnv().create_unbacked_symint()
    with decide_extremes():
        assert extreme(first(size), second(size)) == second(size)


def test_a_minimum_that_depends_on_the_size_still_limits_it() -> None:
    with pytest.raises(InputError, match="length"):
        from_module(ShortDiagonal().eval(), inputs=[INPUT], dims=["batch=1:2:64", "length=1:5:100"])


class SmallFirst(nn.Module):
    """min(3·n - 3, n + 1) is n + 1 for n ≥ 2, but 0 for n = 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        return x + 1 if torch.sym_min(3 * n - 3, n + 1) == n + 1 else x + 2


def test_a_minimum_that_another_argument_is_at_size_1_is_not_decided() -> None:
    with pytest.raises(InputError, match=r"the model needs min\(1 \+ n"):
        from_module(SmallFirst().eval(), inputs=["x[n=1:8:64,4]"])


def test_two_traces_at_the_same_time_restore_torch() -> None:
    before = (ShapeEnv._evaluate_expr, ShapeEnv._log_guard)
    with ThreadPoolExecutor(4) as pool:
        modules = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).eval() for _ in range(4)]
        models = list(pool.map(lambda module: from_module(module, inputs=["x[n,4]"]), modules))
    assert [model.named_dims["n"].min for model in models] == [1] * 4
    assert (ShapeEnv._evaluate_expr, ShapeEnv._log_guard) == before


# pytest rewrites assertions in the files of tests, so the modules are made from text.
ASSERTING = """
class AssertedLengths(torch.nn.Module):
    def forward(self, x, lengths):
        assert lengths.max().item() <= x.shape[1]
        return torch.where(torch.arange(x.shape[1]) < lengths[:, None], x, 0.0)


class AssertedSum(torch.nn.Module):
    def forward(self, x, lengths):
        assert lengths.sum().item() >= 0
        return x * lengths[:, None]
"""


@pytest.mark.parametrize("name", ["AssertedLengths", "AssertedSum"])
def test_an_assertion_on_values_does_not_stop_the_trace(name: str) -> None:
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ASSERTING, "asserting.py", "exec"), names)
    net = names[name]().eval()
    model = from_module(net, inputs=["x[batch,n]", "lengths:int64[batch]{0:2}"])
    x, lengths = torch.randn(3, 5), torch.tensor([0, 2, 1])
    torch.testing.assert_close(model.program.module(check_guards=False)(x, lengths), net(x, lengths))


class TwoImages(nn.Module):
    """The images of a pair go through one encoder, and torch.chunk parts them again."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second = torch.chunk(torch.cat([x, x.flip(1)]) * 2, 2)
        return first - second + y


class ImagesOfTwoInputs(nn.Module):
    """torch has a symbol for each input, so it does not know that the sum of the two sizes is even."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second = torch.chunk(torch.cat([x, y]), 2)
        return (first - second).reshape(x.shape[0], 2, -1).mean(-1)


class ThreeImages(nn.Module):
    """torch.split by the size of a batch gives three parts."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second, third = torch.split(torch.cat([x, x.flip(1), x + y]), x.shape[0])
        return first - second * third


class ChunkedBatch(nn.Module):
    """The number of rows of the first part is n // 2 rounded up."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second = torch.chunk(x, 2)
        return first - second + y.sum()


@pytest.mark.parametrize("net", [TwoImages(), ImagesOfTwoInputs(), ThreeImages()])
def test_a_quotient_that_is_decided_keeps_the_whole_range(net: nn.Module) -> None:
    model = from_module(net.eval(), inputs=["x[n,4]", "y[n,4]"], dims=["n=1:4:64"])
    assert (model.named_dims["n"].min, model.named_dims["n"].max, model.named_dims["n"].step) == (1, 64, 1)
    for n in (1, 2, 7):
        x, y = torch.randn(2, n, 4, generator=torch.Generator().manual_seed(n))
        torch.testing.assert_close(model.program.module(check_guards=False)(x, y), net(x, y))


def test_a_quotient_that_depends_on_the_size_still_limits_it() -> None:
    with pytest.raises(InputError, match="n"):
        from_module(ChunkedBatch().eval(), inputs=["x[n,4]", "y[n,4]"], dims=["n=3:4:63"])
