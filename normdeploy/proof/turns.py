"""A linear op whose results or inputs are multiplied by a matrix, or have their mean taken off: its weight as an
expression.

    results   lin'(x) = lin(x)·A/√k        W' = W·A/√k, c' = c·A/√k
    inputs    lin'(u) = lin(u·A/√k)        W' = A·W/√k
    mean      lin'(x) = lin(x) − mean      W' = W − the mean of each row, c' = c − mean(c)

for rows x and weights that lie inputs first. Each holds for any matrix A of whole numbers and any k > 0, and is proved
so: the elements of A are variables. √k is the positive root, in the field one element whose square is k. That two such
matrices are inverse is no part of this: `normdeploy.proof.lemmas.isometry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_graphsurgeon as gs

from ..graphs.graph import Graph
from .machine import Machine
from .run import constant
from .value import Value


@dataclass(frozen=True)
class Share:
    """``linear``: `normdeploy.forms.linear.Linear`; ``weight``, ``bias``: the constants that were computed."""

    linear: Any
    weight: gs.Constant
    bias: gs.Constant | None


@dataclass(frozen=True)
class Turned:
    """What was done to one linear op, a MatMul with its weight behind or a Gemm.

    ``side``: of the matrix; None where the mean is taken off its results. ``turn``: a node whose input 1 is the matrix
    A, whose elements are whole numbers. ``square``: k.
    """

    share: Share
    side: Literal["output", "input"] | None
    turn: gs.Node | None = None
    square: int = 1

    @property
    def shares(self) -> tuple[Share, ...]:
        return (self.share,)

    @property
    def nodes(self) -> tuple[gs.Node, ...]:
        """Whose constants it is made of."""
        return () if self.turn is None else (self.turn,)

    @property
    def leaves(self) -> Sequence[gs.Tensor]:
        return ()

    def told(self, names: Mapping[int, object]) -> tuple[object, ...]:
        """Equal for rewrites that differ in the elements of larger constants alone."""
        linear = self.share.linear
        return ("turned", self.side, self.square, linear.node.op, linear.biased, self.share.bias is None)

    def constants(self) -> list[gs.Constant]:
        """All that was computed."""
        return [self.share.weight, *([] if self.share.bias is None else [self.share.bias])]

    def before(self, m: Machine, graph: Graph, leaf: Value, run: Callable[[Value], Value]) -> Value:
        """What the rewritten op is to compute of ``leaf``; ``run``: the op before."""
        if self.side == "input":
            return run(self._times(m, graph, leaf))
        y = run(leaf)
        return m.sub(y, m.mean(y, [len(y.axes) - 1])) if self.side is None else self._times(m, graph, y)

    def _times(self, m: Machine, graph: Graph, rows: Value) -> Value:
        """rows·A/√k."""
        return scaled(m, contracted(m, rows, len(rows.axes) - 1, self.matrix(m, graph), 0), self.square)

    def matrix(self, m: Machine, graph: Graph) -> Value:
        assert self.turn is not None
        a = constant(m, graph, self.turn.inputs[1])
        assert isinstance(a, Value)
        return a


def given_of(m: Machine, graph: Graph, e: Turned, bias_of: Any, absolute: bool) -> dict[int, Value]:
    """The weight and the bias by their ids. ``bias_of``: of `normdeploy.proof.folds`. ``absolute``: in floats alone,
    the sums of the magnitudes of their terms."""
    linear = e.share.linear
    w, c = constant(m, graph, linear.node.inputs[linear.weight]), bias_of(m, graph, linear)
    alpha = linear.node.attrs.get("alpha", 1.0) if linear.node.op == "Gemm" else 1.0
    w = w if alpha == 1.0 else m.mul(m.number(float(alpha)), w)
    a = None if e.side is None else e.matrix(m, graph)
    if absolute:
        w.f, c.f = np.abs(w.f), np.abs(c.f)
        if a is not None:
            a.f = np.abs(a.f)
    less = m.add if absolute else m.sub
    inputs, outputs = (1, 0) if linear.transposed else (0, 1)
    if a is None:
        weight, bias = less(w, m.mean(w, [outputs])), less(c, m.mean(c, [0]))
    elif e.side == "output":
        weight = scaled(m, contracted(m, w, outputs, a, 0), e.square)
        bias = scaled(m, contracted(m, c, 0, a, 0), e.square)
    else:
        weight, bias = scaled(m, contracted(m, w, inputs, a, 1), e.square), c
    values = {id(e.share.weight): weight}
    if e.share.bias is not None:
        values[id(e.share.bias)] = bias
    return values


def contracted(m: Machine, x: Value, axis: int, a: Value, over: int) -> Value:
    """``x`` with axis ``axis`` summed against axis ``over`` of the matrix ``a``, whose other axis takes its place."""
    left = x.moved((*x.axes[: axis + 1], (), *x.axes[axis + 1 :]))
    rows = (a.axes[0], a.axes[1])
    if over:  # the axis that is summed comes first
        cut = len(a.axes[0])
        order = [0, *range(1 + cut, 1 + len(a.atoms)), *range(1, 1 + cut)]
        a, rows = a.moved((a.axes[1], a.axes[0]), order), (a.axes[1], a.axes[0])
    right = a.moved((*rows, *((),) * (len(x.axes) - axis - 1)))
    y = m.inner(left, right, [axis])
    return y.moved((*y.axes[:axis], *y.axes[axis + 1 :]))


def scaled(m: Machine, x: Value, square: int) -> Value:
    """x/√k."""
    return x if square == 1 else m.div(x, m.root(m.number(square)))
