"""Define the independent choices in a hand-written norm, each as a small function; ``models.spellings`` combines them.

Every statistic keeps the reduced dims as 1, so that all parts can be combined. Dims are non-negative numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import torch

Dims = tuple[int, ...]
Mean = Callable[[torch.Tensor, Dims], torch.Tensor]
Variance = Callable[[torch.Tensor, torch.Tensor, Dims], torch.Tensor]
Root = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Outer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Affine = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Root, torch.Tensor, torch.Tensor], torch.Tensor]


def count(x: torch.Tensor, dims: Dims) -> int:
    """Count the elements of one statistic.

    Returns:
        the product of the sizes along ``dims``.
    """
    n = 1
    for d in dims:
        n *= x.shape[d]
    return n


def put_back(statistic: torch.Tensor, dims: Dims) -> torch.Tensor:
    """Insert the reduced dims as 1, with one unsqueeze per dim.

    Returns:
        the statistic with the rank of its input.
    """
    for d in sorted(dims):
        statistic = statistic.unsqueeze(d)
    return statistic


def viewed(x: torch.Tensor, statistic: torch.Tensor, dims: Dims) -> torch.Tensor:
    """Insert the reduced dims as 1, with one view.

    Returns:
        the statistic with the rank of ``x``.
    """
    return statistic.view([1 if d in dims else size for d, size in enumerate(x.shape)])


MEANS: dict[str, Mean] = {
    "keepdim": lambda x, dims: x.mean(dims, keepdim=True),
    "unsqueeze": lambda x, dims: put_back(x.mean(dims), dims),
    "view": lambda x, dims: viewed(x, x.mean(dims), dims),
    "expand": lambda x, dims: x.mean(dims, keepdim=True).expand_as(x),
    "sum": lambda x, dims: x.sum(dims, keepdim=True) / count(x, dims),
}

VARIANCES: dict[str, Variance] = {
    "square": lambda x, u, dims: ((x - u) ** 2).mean(dims, keepdim=True),
    "product": lambda x, u, dims: put_back(((x - u) * (x - u)).mean(dims), dims),
    "square_sum": lambda x, u, dims: (x - u).square().sum(dims, keepdim=True) / count(x, dims),
    "biased": lambda x, u, dims: x.var(dims, unbiased=False, keepdim=True),
    "unbiased": lambda x, u, dims: x.var(dims, keepdim=True),
    "unbiased_sum": lambda x, u, dims: (x - u).pow(2).sum(dims, keepdim=True) / (count(x, dims) - 1),
    "moments": lambda x, u, dims: (x**2).mean(dims, keepdim=True) - u**2,
    "moments_clamped": lambda x, u, dims: torch.clamp((x * x).mean(dims, keepdim=True) - u * u, min=0),
    "std": lambda x, u, dims: x.std(dims, unbiased=False, keepdim=True) ** 2,
    "unbiased_std": lambda x, u, dims: put_back(x.std(dims).pow(2), dims),
    "var_mean": lambda x, u, dims: torch.var_mean(x, dims, correction=0, keepdim=True)[0],
}

ROOTS: dict[str, Root] = {
    "sqrt": lambda t, v: t / torch.sqrt(v),
    "rsqrt": lambda t, v: t * torch.rsqrt(v),
    "reciprocal": lambda t, v: torch.reciprocal(torch.sqrt(v)) * t,
    "one_over": lambda t, v: t * (1 / v.sqrt()),
    "pow_minus_half": lambda t, v: t * v.pow(-0.5),
    "pow_half": lambda t, v: t / v**0.5,
}
"""t · v^(−1/2), where v already holds the epsilon."""

OUTERS: dict[str, Outer] = {
    "after": lambda x_hat, gamma, beta: x_hat * gamma + beta,
    "absent": lambda x_hat, gamma, beta: x_hat,
    "only_gamma": lambda x_hat, gamma, beta: gamma * x_hat,
    "only_beta": lambda x_hat, gamma, beta: x_hat + beta,
    "one_plus": lambda x_hat, gamma, beta: x_hat * (1 + gamma) + beta,
    "scalar": lambda x_hat, gamma, beta: x_hat * 1.5 + 0.25,
    "element": lambda x_hat, gamma, beta: x_hat * gamma.flatten()[:1] + beta.flatten()[:1],
}
"""From x̂ and the parameters to the output."""


def outer(function: Outer) -> Affine:
    """Wrap a function of x̂ in the signature of affines that use more arguments.

    Returns:
        the affine.
    """
    return lambda x, u, v, root, gamma, beta: function(root(x - u, v), gamma, beta)


AFFINES: dict[str, Affine] = {name: outer(function) for name, function in OUTERS.items()} | {
    "before": lambda x, u, v, root, gamma, beta: beta + root(gamma * (x - u), v),
    "into_root": lambda x, u, v, root, gamma, beta: (x - u) * root(gamma, v) + beta,
    "tensorflow": lambda x, u, v, root, gamma, beta: x * root(gamma, v) + (beta - u * root(gamma, v)),
    "tensorflow_flat": lambda x, u, v, root, gamma, beta: x * root(gamma, v) - u * root(gamma, v) + beta,
    "minus": lambda x, u, v, root, gamma, beta: beta - root(u - x, v) * gamma,
}
"""From x, mean u, variance plus epsilon v, and the parameters to the output."""

EPSILONS: tuple[float, ...] = (1e-5, 1e-12, 1e-8, 1e-6, 1e-3)


def pairwise(*choices: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield combinations of options. Any two options of different choices occur together in at least one combination.

    The result is a covering array of strength 2, built greedily and deterministically.

    Faults of recognition typically depend on two choices. All combinations of all choices would take thousands of
    exports.

    Yields:
        one option for each choice.
    """
    columns = list(combinations(range(len(choices)), 2))
    # A dict instead of a set, because it keeps the order.
    left = {(i, j, a, b): None for i, j in columns for a in choices[i] for b in choices[j]}
    while left:
        i, j, a, b = next(iter(left))
        row: list[str | None] = [None] * len(choices)
        row[i], row[j] = a, b
        for k, options in enumerate(choices):
            if row[k] is None:
                row[k] = max(
                    options, key=lambda option, k=k, row=row: sum(pair in left for pair in _pairs(row, k, option))
                )  # type: ignore[misc]
        done = tuple(choice for choice in row if choice is not None)
        for k, m in columns:
            left.pop((k, m, done[k], done[m]), None)
        yield done


def _pairs(row: Sequence[str | None], at: int, option: str) -> Iterator[tuple[int, int, str, str]]:
    """Yield the pairs of ``option`` at position ``at`` and each option that was already chosen."""
    for k, other in enumerate(row):
        if other is not None and k != at:
            yield (k, at, other, option) if k < at else (at, k, option, other)
