"""Fold BatchNorms into the weights and biases of layers, and find the epsilon with which a file folded them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...types import Array, Arrays
from ..verify.model_tensors import BatchNorm, NormVectors, iter_batch_norms
from ..verify.reference_models import Original

# Allowed error of a fold in float32, relative to the largest element: a few roundings of 2^-24.
_NEAR = 2.0**-20
# Allowed relative error of the sum variance + epsilon, if it is computed from folded elements. Squaring an element
# doubles its relative error, and elements down to an eighth of the largest element are used.
_SAME = 2.0**-14
EPSILONS = (1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)


@dataclass(frozen=True, kw_only=True)
class FoldedTensor:
    """Weight or bias with the BatchNorm ``owner`` folded in.

    ``right - offset`` is proportional to 1 / sqrt(variance + epsilon).

    Attributes:
        right: the tensor, folded with the model's epsilon.
        offset, variance, gamma: arrays that broadcast to ``right``.
        transposed: True for a weight of a ConvTranspose, False for other weights; None for a bias.
    """

    owner: str
    epsilon: float
    right: Array
    offset: Array
    variance: Array
    gamma: Array
    transposed: bool | None = None

    def with_epsilon(self, epsilon: float) -> Array:
        """Fold the tensor with another epsilon.

        Returns:
            An array of the shape of ``right``.
        """
        scale = np.sqrt((self.variance + self.epsilon) / (self.variance + epsilon))
        return np.asarray(self.offset + (self.right - self.offset) * scale)

    def is_near(self, stored: Array) -> bool:
        """Check that ``stored`` equals the tensor in any layout, up to the rounding of a fold in float32.

        Returns:
            True if every element is equal up to rounding.
        """
        return _is_near_in_any_layout(self.right, stored)

    def find_epsilon(self, stored: Array) -> float | None:
        """Find the epsilon that ``stored`` was folded with.

        Returns:
            The epsilon; None if it is the model's epsilon, or if no epsilon explains ``stored``.
        """
        if stored.size != self.right.size or self.is_near(stored):
            return None
        for epsilon in (*EPSILONS, *self._solve_epsilons(stored)):
            if _is_near_in_any_layout(self.with_epsilon(epsilon), stored):
                return epsilon
        return None

    def describe_statistics(self, stored: Array) -> str:
        """Describe a fold with the same variance or gamma in every channel.

        A new BatchNorm has variance and gamma 1. So this detects a file that was made before training, or without the
        trained state.

        Returns:
            A sentence; "" if no single number explains ``stored``.
        """
        if self.offset.any() or stored.size != self.right.size:
            return ""
        for laid in _iter_layouts(stored, self.right):
            large = np.abs(self.right) > np.abs(self.right).max(initial=0) / 8
            with np.errstate(all="ignore"):
                ratio = laid / self.right
                variances = (self.variance + self.epsilon) / np.square(ratio) - self.epsilon
                gammas = self.gamma * ratio
            for what, own, solved in (("running_var", self.variance, variances), ("weight", self.gamma, gammas)):
                if large.any():
                    value = float(np.median(solved[large]))
                else:
                    value = np.nan
                if np.isfinite(value) and (np.abs(solved[large] - value) <= _SAME * abs(value)).all():
                    return (
                        f"the BatchNorm {self.owner} is folded with a {what} of {value:.4g} in every channel,"
                        f" but the model has {own.min():.4g} to {own.max():.4g}"
                    )
        return ""

    def _solve_epsilons(self, stored: Array) -> Iterator[float]:
        for laid in _iter_layouts(stored, self.right):
            with np.errstate(all="ignore"):
                own = self.right - self.offset
                ratio = (laid - self.offset) / own
                solved = (self.variance + self.epsilon) / np.square(ratio) - self.variance
                large = np.abs(own) > np.abs(own).max(initial=0) / 8
                if large.any():
                    epsilon = float(np.median(solved[large]))
                else:
                    epsilon = np.nan
            if np.isfinite(epsilon) and epsilon > 0:
                # Written epsilons have one or two digits, so the computed number is rounded to three.
                yield float(f"{epsilon:.3g}")
                yield epsilon


def fold_parameters(model: Original, parameters: Arrays) -> dict[str, FoldedTensor]:
    """Fold each BatchNorm into every weight and bias in ``parameters`` with the same number of channels.

    Returns:
        Names of the parameter and the BatchNorm -> folded tensor.
    """
    folds: dict[str, FoldedTensor] = {}
    for norm in iter_batch_norms(model):
        vectors = norm.read_vectors(parameters)
        if vectors is not None:
            folds |= _fold_with_norm(norm, vectors, parameters)
    return folds


def _fold_with_norm(norm: BatchNorm, vectors: NormVectors, parameters: Arrays) -> dict[str, FoldedTensor]:
    own = {norm.weight, norm.bias, norm.mean, norm.variance}
    channels = vectors.variance.size
    biases = {"no bias": np.zeros(channels)}
    folds: dict[str, FoldedTensor] = {}
    for name, value in parameters.items():
        if name in own:
            continue
        for axis, told in ((0, "folded"), (1, "folded as in a ConvTranspose")):
            if value.ndim > 1 + axis and value.shape[axis] == channels:
                column = [-1 if dim == axis else 1 for dim in range(value.ndim)]
                folds[f"{name} with the BatchNorm {norm.owner} {told}"] = FoldedTensor(
                    owner=norm.owner,
                    epsilon=norm.epsilon,
                    right=value * vectors.scale.reshape(column),
                    offset=np.zeros(1),
                    variance=vectors.variance.reshape(column),
                    gamma=vectors.gamma.reshape(column),
                    transposed=axis == 1,
                )
        if value.size == channels:
            biases[name] = value.astype(np.float64).reshape(-1)
    for name, value in biases.items():
        folds[f"{name} with the BatchNorm {norm.owner} folded"] = FoldedTensor(
            owner=norm.owner,
            epsilon=norm.epsilon,
            right=(value - vectors.mean) * vectors.scale + vectors.shift,
            offset=vectors.shift,
            variance=vectors.variance,
            gamma=vectors.gamma,
        )
    return folds


def _is_near_in_any_layout(right: Array, stored: Array) -> bool:
    if right.size != stored.size:
        return False
    near = _NEAR * np.abs(right).max(initial=0)
    return any(np.abs(laid - right).max(initial=0) <= near for laid in _iter_layouts(stored, right))


def _iter_layouts(stored: Array, like: Array) -> Iterator[Array]:
    """Yield a tensor in the shape of another, unchanged and transposed."""
    yield stored.reshape(like.shape)
    if stored.ndim > 1 and stored.T.shape == like.shape:
        yield stored.T
