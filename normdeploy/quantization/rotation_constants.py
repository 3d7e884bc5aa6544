"""Express the constants of a linear op if its results or inputs are rotated, or if the mean of its results is
subtracted.

    results   lin'(x) = lin(x)·A/√k        W' = W·A/√k, c' = c·A/√k

    inputs    lin'(u) = lin(u·A/√k)        W' = A·W/√k

    mean      lin'(x) = lin(x) − mean      W' = W − the mean of each row, c' = c − mean(c)

Here x is a matrix of rows, and the first axis of the weight W is its inputs. Each identity holds for any matrix A of
integers and any k > 0. It is proved in this generality: in a proof, the elements of A are variables. √k is the positive
root; in the finite field of the proofs, it is an element whose square is k. These proofs do not show that a rotation
and its inverse cancel, which `normdeploy.proof.lemmas.isometry` shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_graphsurgeon as gs

from ..forms.constant_linear import ConstantLinear
from ..forms.fold_expressions import evaluate_bias
from ..graphs.graph import Graph
from ..proof.computed_constants import ComputedConstants, Side
from ..proof.interpreter import ProofInterpreter
from ..proof.region_evaluation import constant_value
from ..proof.value import Value


@dataclass(frozen=True)
class RotationConstants(ComputedConstants):
    """Change of one linear op: a Gemm, or a MatMul whose second input is the weight.

    Attributes:
        weight: computed weight.
        bias: computed bias; None if there is none.
        side: "output" or "input" for rotated results or inputs; None if the mean of the results is subtracted.
        turn: node whose second input is the matrix A of integers; None if there is no matrix.
        square: k.
    """

    linear: ConstantLinear
    weight: gs.Constant
    bias: gs.Constant | None
    side: Literal["output", "input"] | None
    turn: gs.Node | None = None
    square: int = 1

    @property
    def nodes(self) -> Sequence[gs.Node]:
        """Return the node that reads the matrix A; empty without a matrix."""
        if self.turn is None:
            return ()
        return (self.turn,)

    @property
    def weights(self) -> Sequence[np.ndarray]:
        """Return the original weight and bias."""
        return (self.linear.w, self.linear.c)

    def template_with_names(self, names: Mapping[int, object]) -> tuple[object, ...]:
        return ("turned", self.side, self.square, self.linear.node.op, self.linear.biased, self.bias is None)

    def computed_constants(self) -> list[gs.Constant]:
        """Return the computed weight and bias."""
        return [self.weight, *([] if self.bias is None else [self.bias])]

    def expected_side(self, before: Side, graph: Graph) -> Side:
        """Return the function of the op with its input or its results rotated.

        Args:
            before: function of the original op, with one input.

        Returns:
            a function that takes the interpreter and the input.
        """

        def rotated_side(m: ProofInterpreter, leaves: Sequence[Value]) -> list[Value]:
            (x,) = leaves
            if self.side == "input":
                return before(m, [self._rotate_rows(m, graph, x)])
            (y,) = before(m, [x])
            if self.side is None:
                return [m.sub(y, m.mean(y, [len(y.axes) - 1]))]
            return [self._rotate_rows(m, graph, y)]

        return rotated_side

    def _rotate_rows(self, m: ProofInterpreter, graph: Graph, rows: Value) -> Value:
        """Compute rows·A/√k."""
        return divide_by_root(
            m, contract_axis(m, rows, len(rows.axes) - 1, self._matrix_value(m, graph), 0), self.square
        )

    def _matrix_value(self, m: ProofInterpreter, graph: Graph) -> Value:
        assert self.turn is not None
        a = constant_value(m, graph, self.turn.inputs[1])
        assert isinstance(a, Value)
        return a

    def evaluate_constants(self, m: ProofInterpreter, graph: Graph, *, absolute: bool = False) -> dict[int, Value]:
        """Evaluate the computed constants as expressions of the original constants.

        Args:
            absolute: replace each term of a sum by its magnitude, to bound the rounding error.

        Returns:
            id of the constant → its value.
        """
        linear = self.linear
        w = constant_value(m, graph, linear.node.inputs[linear.weight])
        c = evaluate_bias(m, graph, linear)
        if linear.node.op == "Gemm":
            alpha = linear.node.attrs.get("alpha", 1.0)
        else:
            alpha = 1.0
        if alpha != 1.0:
            w = m.mul(m.number(float(alpha)), w)
        if self.side is None:
            a = None
        else:
            a = self._matrix_value(m, graph)
        if absolute:
            w.f, c.f = np.abs(w.f), np.abs(c.f)
            if a is not None:
                a.f = np.abs(a.f)
        if absolute:
            less = m.add
        else:
            less = m.sub
        inputs, outputs = (1, 0) if linear.is_transposed else (0, 1)
        if a is None:
            weight = less(w, m.mean(w, [outputs]))
            bias = less(c, m.mean(c, [0]))
        elif self.side == "output":
            weight = divide_by_root(m, contract_axis(m, w, outputs, a, 0), self.square)
            bias = divide_by_root(m, contract_axis(m, c, 0, a, 0), self.square)
        else:
            weight = divide_by_root(m, contract_axis(m, w, inputs, a, 1), self.square)
            bias = c
        values = {id(self.weight): weight}
        if self.bias is not None:
            values[id(self.bias)] = bias
        return values


def contract_axis(m: ProofInterpreter, x: Value, axis: int, a: Value, over: int) -> Value:
    """Sum axis ``axis`` of ``x`` against axis ``over`` of the matrix ``a``.

    Returns:
        ``x`` with the other axis of ``a`` instead of the summed axis.
    """
    left = x.with_axes((*x.axes[: axis + 1], (), *x.axes[axis + 1 :]))
    rows = (a.axes[0], a.axes[1])
    # The summed axis of the matrix must be its first axis.
    if over:
        cut = len(a.axes[0])
        order = [0, *range(1 + cut, 1 + len(a.atoms)), *range(1, 1 + cut)]
        a, rows = a.with_axes((a.axes[1], a.axes[0]), order), (a.axes[1], a.axes[0])
    right = a.with_axes((*rows, *((),) * (len(x.axes) - axis - 1)))
    y = m.inner_product(left, right, [axis])
    return y.with_axes((*y.axes[:axis], *y.axes[axis + 1 :]))


def divide_by_root(m: ProofInterpreter, x: Value, square: int) -> Value:
    """Compute x/√k, with k = ``square``.

    Returns:
        the quotient; ``x`` itself for k = 1.
    """
    if square == 1:
        return x
    return m.div(x, m.root(m.number(square)))
