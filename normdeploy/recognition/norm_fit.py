"""The reading of a region: a `NormFit`, or a `RejectedReading` with the reason."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum, IntEnum, auto

import numpy as np

from ..graphs.region import Refusal, Region


class Denominator(Enum):
    """The denominator of a norm as a function of v, the mean square of its numerator."""

    # sqrt(v + epsilon)
    EPSILON_INSIDE_ROOT = auto()
    # sqrt(v) + epsilon
    EPSILON_OUTSIDE_ROOT = auto()
    # max(‖x‖₂, epsilon), no mean square: so gamma and epsilon of F.normalize are the same at every size
    CLAMPED_LENGTH = auto()


@dataclass(frozen=True)
class NormFit:
    """A norm at concrete sizes: x̂ = (x − mean)/denominator over ``axes`` (and over blocks of ``block`` along
    ``split``)."""

    shape: tuple[int, ...]
    # normalized in full; axes of size 1 are never listed
    axes: tuple[int, ...]
    # the axis that is cut into groups (group norm)
    split: int | None
    # its extent inside a group
    block: int
    centered: bool
    # NaN in a refusal that could not tell it
    epsilon: float
    # the shape of y
    gamma: np.ndarray
    beta: np.ndarray
    denominator: Denominator = Denominator.EPSILON_INSIDE_ROOT

    @property
    def outside(self) -> bool:
        """Whether epsilon is added to the root, not under it."""
        return self.denominator is Denominator.EPSILON_OUTSIDE_ROOT

    @property
    def clamped(self) -> bool:
        """Whether it divides by a length that is clamped from below."""
        return self.denominator is Denominator.CLAMPED_LENGTH

    @property
    def group_size(self) -> int:
        """Elements in a group."""
        return math.prod(self.shape[a] for a in self.axes) * self.block

    @property
    def normalized_axes(self) -> tuple[int, ...]:
        """The axes normalized over, the one that is cut into groups included."""
        return tuple(sorted({*self.axes, *(() if self.split is None else (self.split,))}))

    @property
    def kind(self) -> str:
        """What it is called where gamma and beta are not looked at (an instance norm is a layer norm then)."""
        if not self.centered:
            return "RMSNorm"
        if self.split is None:
            return "LayerNorm"
        return "GroupNorm"

    def resize(self, shape: tuple[int, ...]) -> NormFit:
        """The same grouping at another size of x (gamma and beta are dropped).

        Raises:
            ValueError: the blocks don't divide the axis.
        """
        if self.split is not None and shape[self.split] % self.block:
            raise ValueError(f"blocks of {self.block} don't divide {shape[self.split]}")
        return replace(self, shape=shape, gamma=np.ones(()), beta=np.zeros(()))

    def center_and_square(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(x − mean, or x where not centered; its mean square), both broadcast to x's shape."""
        view, axes = self._grouped_view(x)
        if self.centered:
            d = view - view.mean(axis=axes, keepdims=True)
        else:
            d = view
        v = np.broadcast_to(np.square(d).mean(axis=axes, keepdims=True), view.shape)
        return d.reshape(self.shape), v.reshape(self.shape)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        d, v = self.center_and_square(x)
        y = np.asarray(self.gamma * d)
        del d
        y = np.asarray(y / self.divisor(v))
        del v
        return np.asarray(y + self.beta)

    def divisor(self, v: np.ndarray) -> np.ndarray:
        """Compute the denominator of mean squares ``v`` (of any shape)."""
        match self.denominator:
            case Denominator.CLAMPED_LENGTH:
                return np.maximum(np.sqrt(self.group_size * v), self.epsilon)
            case Denominator.EPSILON_OUTSIDE_ROOT:
                return np.sqrt(v) + self.epsilon
            case Denominator.EPSILON_INSIDE_ROOT:
                return np.sqrt(v + self.epsilon)

    @property
    def epsilon_scale(self) -> float:
        """The magnitude of x at which epsilon counts as much as x does."""
        match self.denominator:
            case Denominator.CLAMPED_LENGTH:
                return self.epsilon / math.sqrt(self.group_size)
            case Denominator.EPSILON_OUTSIDE_ROOT:
                return self.epsilon
            case Denominator.EPSILON_INSIDE_ROOT:
                return math.sqrt(self.epsilon)

    def arrange_rows(self, rows: np.ndarray) -> np.ndarray:
        """An x whose groups are the given rows (number of groups, n)."""
        view, axes = self._grouped_view(np.empty(self.shape))
        rest = [a for a in range(view.ndim) if a not in axes]
        order = [*rest, *sorted(axes)]
        return rows.reshape([view.shape[a] for a in order]).transpose(np.argsort(order)).reshape(self.shape)

    def rows_of(self, x: np.ndarray) -> np.ndarray:
        """The groups of ``x`` as rows (number of groups, n): the inverse of ``arrange_rows``."""
        view, axes = self._grouped_view(x)
        rest = [a for a in range(view.ndim) if a not in axes]
        return view.transpose([*rest, *sorted(axes)]).reshape(-1, self.group_size)

    def _grouped_view(self, x: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
        if self.split is None:
            return x, self.axes
        s = self.split
        view = x.reshape(*self.shape[:s], self.shape[s] // self.block, self.block, *self.shape[s + 1 :])
        return view, (*(a if a < s else a + 1 for a in self.axes), s + 1)


class Clarity(IntEnum):
    """How much a rejected reading says of a norm."""

    # these two ends don't belong together
    APART = 0
    # said only where there is nothing better
    VAGUE = 1
    # it names the norm's flaw
    SPECIFIC = 2


@dataclass(frozen=True)
class RejectedReading(Refusal):
    """Why what lies between two tensors is no norm.

    Attributes:
        clarity: how much the reason says.
        start, end: the names of the two tensors.
        region: the nodes that were evaluated; None where none were.
        fit: the norm that they seemed to be, before something spoke against it.
    """

    clarity: Clarity = Clarity.SPECIFIC
    start: str = ""
    end: str = ""
    region: Region | None = None
    fit: NormFit | None = None
