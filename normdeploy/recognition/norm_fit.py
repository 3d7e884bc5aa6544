"""Define the results of reading a region: a `NormFit`, or a `RejectedReading` with the reason."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum, IntEnum, auto

import numpy as np

from ..graphs.region import Refusal, Region


class Denominator(Enum):
    """Denominator of a norm as a function of v, the mean square of its numerator."""

    # sqrt(v + epsilon)
    EPSILON_INSIDE_ROOT = auto()
    # sqrt(v) + epsilon
    EPSILON_OUTSIDE_ROOT = auto()
    # max(‖x‖₂, epsilon). The length is a sum without a mean, so gamma and epsilon of F.normalize do not depend on the
    # size.
    CLAMPED_LENGTH = auto()
    # max(sqrt(v), epsilon)
    CLAMPED_ROOT = auto()


@dataclass(frozen=True)
class NormFit:
    """Norm at concrete sizes: x̂ = (x − mean)/denominator over ``axes`` and over blocks of ``block`` along ``split``.

    Calling it with x computes gamma · x̂ + beta.

    Attributes:
        shape: shape of x.
        axes: axes normalized in full; never lists axes of size 1.
        split: axis that is cut into groups (group norm), or None.
        block: extent of a group along ``split``.
        centered: True if the mean square is that of x − mean.
        epsilon: NaN in a rejected reading whose epsilon could not be measured.
        gamma, beta: arrays that broadcast to y.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    split: int | None
    block: int
    centered: bool
    epsilon: float
    gamma: np.ndarray
    beta: np.ndarray
    denominator: Denominator = Denominator.EPSILON_INSIDE_ROOT
    # The numerator is x, although the mean square is that of x − mean: x / sqrt(variance + epsilon).
    keeps_mean: bool = False

    @property
    def outside(self) -> bool:
        """Return True if epsilon is added to the root instead of the radicand."""
        return self.denominator is Denominator.EPSILON_OUTSIDE_ROOT

    @property
    def clamped(self) -> bool:
        """Return True if the denominator is clamped from below."""
        return self.denominator in (Denominator.CLAMPED_LENGTH, Denominator.CLAMPED_ROOT)

    @property
    def group_size(self) -> int:
        """Return the number of elements in a group."""
        return math.prod(self.shape[a] for a in self.axes) * self.block

    @property
    def normalized_axes(self) -> tuple[int, ...]:
        """Return the normalized axes, including the one that is cut into groups."""
        return tuple(sorted({*self.axes, *(() if self.split is None else (self.split,))}))

    @property
    def kind(self) -> str:
        """Return "RMSNorm", "SimpleNorm", "LayerNorm" or "GroupNorm".

        Gamma and beta are ignored, so the kind of an instance norm is "LayerNorm".
        """
        if self.keeps_mean:
            return "SimpleNorm"
        if not self.centered:
            return "RMSNorm"
        if self.split is None:
            return "LayerNorm"
        return "GroupNorm"

    def resize(self, shape: tuple[int, ...]) -> NormFit:
        """Apply the same grouping to another size of x.

        Returns:
            the fit with gamma 1 and beta 0.

        Raises:
            ValueError: the blocks don't divide the axis.
        """
        if self.split is not None and shape[self.split] % self.block:
            raise ValueError(f"an axis of size {shape[self.split]} is not divisible into blocks of {self.block}")
        return replace(self, shape=shape, gamma=np.ones(()), beta=np.zeros(()))

    def clamp_root(self) -> NormFit:
        """Express a clamped length as a clamped root: with n elements, ‖x‖₂ = sqrt(n)·sqrt(v).

        Returns:
            an equal fit.
        """
        root = math.sqrt(self.group_size)
        return replace(self, gamma=self.gamma / root, epsilon=self.epsilon / root, denominator=Denominator.CLAMPED_ROOT)

    def center_and_square(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute the numerator (x, or x − mean) and the mean square of x or of x − mean.

        Returns:
            both, broadcast to the shape of x.
        """
        view, axes = self._grouped_view(x)
        if self.centered:
            d = view - view.mean(axis=axes, keepdims=True)
        else:
            d = view
        v = np.broadcast_to(np.square(d).mean(axis=axes, keepdims=True), view.shape)
        if self.keeps_mean:
            d = view
        return d.reshape(self.shape), v.reshape(self.shape)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Compute gamma · x̂ + beta in float64."""
        d, v = self.center_and_square(x)
        y = np.asarray(self.gamma * d)
        del d
        y = np.asarray(y / self.divisor(v))
        del v
        return np.asarray(y + self.beta)

    def divisor(self, v: np.ndarray) -> np.ndarray:
        """Compute the denominator from mean squares ``v`` of any shape.

        Returns:
            an array of the shape of ``v``.
        """
        match self.denominator:
            case Denominator.CLAMPED_LENGTH:
                return np.maximum(np.sqrt(self.group_size * v), self.epsilon)
            case Denominator.CLAMPED_ROOT:
                return np.maximum(np.sqrt(v), self.epsilon)
            case Denominator.EPSILON_OUTSIDE_ROOT:
                return np.sqrt(v) + self.epsilon
            case Denominator.EPSILON_INSIDE_ROOT:
                return np.sqrt(v + self.epsilon)

    @property
    def epsilon_scale(self) -> float:
        """Return the magnitude of x at which epsilon matters as much as x."""
        match self.denominator:
            case Denominator.CLAMPED_LENGTH:
                return self.epsilon / math.sqrt(self.group_size)
            case Denominator.EPSILON_OUTSIDE_ROOT | Denominator.CLAMPED_ROOT:
                return self.epsilon
            case Denominator.EPSILON_INSIDE_ROOT:
                return math.sqrt(self.epsilon)

    def arrange_rows(self, rows: np.ndarray) -> np.ndarray:
        """Build an x whose groups are the given rows, shape (number of groups, group_size).

        Returns:
            x of ``shape``.
        """
        view, axes = self._grouped_view(np.empty(self.shape))
        rest = [a for a in range(view.ndim) if a not in axes]
        order = [*rest, *sorted(axes)]
        return rows.reshape([view.shape[a] for a in order]).transpose(np.argsort(order)).reshape(self.shape)

    def rows_of(self, x: np.ndarray) -> np.ndarray:
        """Read the groups of ``x`` as rows: the inverse of ``arrange_rows``.

        Returns:
            array of shape (number of groups, group_size).
        """
        view, axes = self._grouped_view(x)
        rest = [a for a in range(view.ndim) if a not in axes]
        return view.transpose([*rest, *sorted(axes)]).reshape(-1, self.group_size)

    def _grouped_view(self, x: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
        """View x with the split axis cut into (groups, block); return it with the axes to reduce."""
        if self.split is None:
            return x, self.axes
        s = self.split
        view = x.reshape(*self.shape[:s], self.shape[s] // self.block, self.block, *self.shape[s + 1 :])
        return view, (*(a if a < s else a + 1 for a in self.axes), s + 1)


class Clarity(IntEnum):
    """Rank of the reasons of rejected readings; the reason with the highest rank is reported."""

    # The two tensors can't be input and output of one norm.
    APART = 0
    # The reason applies to many regions.
    VAGUE = 1
    # The reason names the property by which the region differs from a norm.
    SPECIFIC = 2


@dataclass(frozen=True)
class RejectedReading(Refusal):
    """Reason why the nodes between two tensors are not a norm.

    Attributes:
        clarity: rank of the reason.
        start, end: names of the two tensors.
        region: the nodes that were evaluated; None if nothing was evaluated.
        fit: the norm that the nodes seemed to compute before a check failed.
    """

    clarity: Clarity = Clarity.SPECIFIC
    start: str = ""
    end: str = ""
    region: Region | None = None
    fit: NormFit | None = None
