"""List the rows in other spellings: combinations of ``models.parts`` for layer, instance, group and batch norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from .case import Case, Size
from .parts import AFFINES, EPSILONS, MEANS, OUTERS, ROOTS, VARIANCES, Affine, Dims, Mean, Root, Variance, pairwise
from .rows import BATCH, FOLDED, GN, HEIGHT, IN, LN, SEQ, WIDTH, case


class Spelled(nn.Module):
    """Layer or instance norm over ``dims`` in a given spelling, with gamma and beta of ``shape``.

    The ``style`` "once" computes the mean once, "twice" computes it again for each use, and "upcast" computes
    everything in float32.
    """

    def __init__(
        self,
        dims: Dims,
        shape: tuple[int, ...],
        mean: Mean,
        variance: Variance,
        root: Root,
        affine: Affine,
        eps: float,
        style: str,
    ) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(*shape))
        self.beta = nn.Parameter(torch.zeros(*shape))
        self.dims, self.eps, self.style = dims, eps, style
        self.mean, self.variance, self.root, self.affine = mean, variance, root, affine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        if self.style == "upcast":
            x = x.float()
        u = self.mean(x, self.dims)
        v = self.variance(x, u, self.dims) + self.eps
        if self.style == "twice":
            u = self.mean(x, self.dims)
        return self.affine(x, u, v, self.root, self.gamma, self.beta).to(dtype)


@dataclass(frozen=True)
class Layout:
    """Axes of the statistics.

    Attributes:
        row: name of the row in the table.
        input: shape of the input. Its normalized dims are fixed.
        dims: normalized dims.
        params: shape of gamma and beta.
        op: expected op type.
    """

    row: str
    input: tuple[Size, ...]
    dims: Dims
    params: tuple[int, ...]
    op: str


LAYOUTS: dict[str, Layout] = {
    "last": Layout("S2a", (BATCH, SEQ, 24), (2,), (24,), LN),
    "last_two": Layout("S2b", (BATCH, 5, 24), (1, 2), (5, 24), LN),
    "sample": Layout("S3a", (BATCH, 4, 3, 5), (1, 2, 3), (4, 3, 5), LN),
    "channel": Layout("channel LN", (BATCH, 8, HEIGHT, WIDTH), (1,), (8, 1, 1), LN),
    "batch": Layout("S0b", (4, HEIGHT, WIDTH, 5), (0,), (5,), LN),
    "nchw": Layout("S1c", (BATCH, 8, 6, 7), (2, 3), (8, 1, 1), IN),
    "nhwc": Layout("S3b", (BATCH, 6, 7, 5), (1, 2), (5,), IN),
    "ncl": Layout("S1c", (BATCH, 8, 12), (2,), (8, 1), IN),
    "ncdhw": Layout("S1c", (BATCH, 4, 3, 4, 5), (2, 3, 4), (4, 1, 1, 1), IN),
}


def layers() -> Iterator[Case]:
    """Yield layer and instance norms.

    The choices are mean, variance, root, affine, layout, epsilon and style. Any two options occur together at least
    once.

    Yields:
        cases.
    """
    styles = ("once", "twice", "upcast")
    for words in pairwise(
        *(tuple(table) for table in (MEANS, VARIANCES, ROOTS, AFFINES, LAYOUTS)), tuple(map(str, EPSILONS)), styles
    ):
        mean, variance, root, affine, layout_name, eps, style = words
        layout = LAYOUTS[layout_name]
        arguments = (MEANS[mean], VARIANCES[variance], ROOTS[root], AFFINES[affine], float(eps), style)
        # Without a gamma or beta per channel, an instance norm over the last dims is a layer norm too.
        per_channel = affine not in ("absent", "scalar", "element")
        op = layout.op if layout.op == LN or per_channel else f"{IN}|{LN}"
        row = "S1a" if layout.row == "S2a" and "unbiased" in variance else layout.row
        build = partial(Spelled, layout.dims, layout.params, *arguments)
        yield case(
            "_".join(("ln", layout_name, mean, variance, root, affine, eps, style)), build, layout.input, op, row=row
        )


class SpelledGroup(nn.Module):
    """Group norm of (N, C, H, W) in a given spelling.

    ``view`` is the shape in which the norm is computed: "3d" is (N, G, −1), "4d" is (N, G, C/G, −1), and "5d" is (N, G,
    C/G, H, W). Gamma and beta are applied after the view back to (N, C, H, W). Only in "5d" are they applied in the
    view.
    """

    def __init__(
        self, groups: int, channels: int, view: str, variance: Variance, root: Root, affine: str, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels))
        self.beta = nn.Parameter(torch.zeros(channels))
        self.groups, self.view, self.eps = groups, view, eps
        self.variance, self.root, self.affine = variance, root, affine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        views = {
            "3d": (n, self.groups, -1),
            "4d": (n, self.groups, c // self.groups, -1),
            "5d": (n, self.groups, c // self.groups, h, w),
        }
        y = x.reshape(views[self.view])
        dims = tuple(range(2, y.ndim))
        u = y.mean(dims, keepdim=True)
        v = self.variance(y, u, dims) + self.eps
        if self.view == "5d":
            shape = (1, self.groups, c // self.groups, 1, 1)
            return AFFINES[self.affine](y, u, v, self.root, self.gamma.view(shape), self.beta.view(shape)).view(
                n, c, h, w
            )
        x_hat = self.root(y - u, v).view(n, c, h, w)
        return OUTERS[self.affine](x_hat, self.gamma.view(1, c, 1, 1), self.beta.view(1, c, 1, 1))


def groups() -> Iterator[Case]:
    """Yield group norms: combinations of groups (1, 2 or C), view, variance, root and affine.

    Yields:
        cases.
    """
    variances = ("biased", "square", "moments", "unbiased", "unbiased_sum", "std")
    affines = ("after", "absent", "only_gamma", "one_plus")
    for count, view, variance, root, affine in pairwise(
        ("2", "1", "8"), ("3d", "5d", "4d"), variances, tuple(ROOTS), affines
    ):
        # With G = 1, the statistics are those of a layer norm. With G = C, they are those of an instance norm. Without
        # gamma and beta, a single node of any of the three ops computes the norm.
        op = {"1": LN, "2": GN, "8": f"{IN}|{GN}"}[count] if affine != "absent" else f"{GN}|{IN}|{LN}"
        # With ddof 1, the number of elements n must be known, because only then is eps·(n − 1)/n a constant.
        image: tuple[Size, Size] = (6, 7) if "unbiased" in variance else (HEIGHT, WIDTH)
        build = partial(SpelledGroup, int(count), 8, view, VARIANCES[variance], ROOTS[root], affine)
        yield case(
            "_".join(("gn", count, view, variance, root, affine)),
            build,
            (BATCH, 8, *image),
            op,
            row="S1d",
        )


class SpelledBatch(nn.Module):
    """Batch norm with running statistics in a given spelling. Channels are dim 1, and ``spatial`` dims follow."""

    def __init__(self, channels: int, spatial: int, root: Root, affine: Affine, eps: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels))
        self.beta = nn.Parameter(torch.zeros(channels))
        self.running_mean: torch.Tensor
        self.running_var: torch.Tensor
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.spatial, self.root, self.affine, self.eps = spatial, root, affine, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (-1, *(1,) * self.spatial)
        mean, var, gamma, beta = (t.view(shape) for t in (self.running_mean, self.running_var, self.gamma, self.beta))
        return self.affine(x, mean, var + self.eps, self.root, gamma, beta)


IMAGE3: tuple[Size, ...] = (BATCH, 4, HEIGHT, WIDTH)
PLACES: dict[str, tuple[int, int, tuple[Size, ...], Callable[[nn.Module], nn.Module]]] = {
    "alone": (4, 2, IMAGE3, lambda bn: bn),
    "after_conv": (6, 2, IMAGE3, lambda bn: nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), bn)),
    "after_grouped_conv": (
        6,
        2,
        IMAGE3,
        lambda bn: nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=False), bn),
    ),
    "after_conv1d": (6, 1, (BATCH, 4, SEQ), lambda bn: nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), bn)),
    "after_conv3d": (6, 3, (BATCH, 4, 3, 4, 5), lambda bn: nn.Sequential(nn.Conv3d(4, 6, 2), bn)),
    "after_transposed": (6, 2, IMAGE3, lambda bn: nn.Sequential(nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), bn)),
    "after_linear": (6, 0, (BATCH, 4), lambda bn: nn.Sequential(nn.Linear(4, 6), bn)),
    "before_linear": (4, 0, (BATCH, 4), lambda bn: nn.Sequential(bn, nn.Linear(4, 6))),
    "before_conv": (4, 2, (BATCH, 4, 6, 7), lambda bn: nn.Sequential(bn, nn.Conv2d(4, 6, 3))),
}
"""Where a batch norm stands: its channels, its spatial dims, the input, what is around it."""


def batches() -> Iterator[Case]:
    """Yield batch norms in eval mode: combinations of place, root and affine.

    Each must be folded into the neighbor, or to a scale and shift.

    Yields:
        cases.
    """
    affines = ("after", "tensorflow", "into_root", "absent", "before", "one_plus", "minus")
    for place, root, affine in pairwise(tuple(PLACES), tuple(ROOTS), affines):
        build = partial(_placed, place, root, affine)
        yield case("_".join(("bn", place, root, affine)), build, PLACES[place][2], FOLDED, row="S1b")


def _placed(place: str, root: str, affine: str) -> nn.Module:
    channels, spatial, _, around = PLACES[place]
    return around(SpelledBatch(channels, spatial, ROOTS[root], AFFINES[affine]))
