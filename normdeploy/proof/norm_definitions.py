"""Evaluate the norm definitions of `normdeploy.norms.interpreter` on `Value`s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from ..graphs.symbolic_sizes import Size
from ..norms.interpreter import Definition, Interpreter
from ..norms.norm_table import DEFAULT
from .interpreter import ProofInterpreter
from .lemmas import congruence
from .op_definitions import TABLE as ALGEBRA
from .op_definitions import Attrs, Inputs, Op, broadcast_over_channels, lift_input
from .proof_errors import NotProved, ProofFailure
from .value import Value


class ValueInterpreter(Interpreter):
    """Interpreter of norm definitions on the prover's values. A Cast between floating types is an identity."""

    def __init__(self, m: ProofInterpreter, opset: int, outputs: int) -> None:
        self._m = m
        self.opset = opset
        self.outputs = outputs

    def __call__(self, op: str, *inputs: Any, **attributes: Any) -> Any:
        function = ALGEBRA.get(op) or congruence.TABLE[op]
        return function(self._m, inputs, attributes, self.opset, 1)

    def reduce(self, op: str, x: Any, axes: Sequence[int], **attributes: Any) -> Any:
        """Reduce ``x`` over ``axes`` with a reduction op.

        Returns:
            the result of ``op``.
        """
        return self(op, x, axes=list(axes), **attributes)

    def refuse(self, reason: str) -> NoReturn:
        """Raise NotProved with this reason."""
        raise NotProved(ProofFailure.OP, reason)

    def rank_of(self, x: Any) -> int:
        """Count the axes of ``x``.

        Returns:
            its rank.
        """
        return len(x.shape)

    def make_scalar(self, value: float, like: Value) -> Value:
        """Evaluate a number exactly.

        Returns:
            a value without axes.
        """
        return self._m.number(float(value))

    def make_epsilon(self, value: float, like: Value) -> Value:
        """Evaluate the epsilon of the current node (`ProofInterpreter.exact_epsilon`).

        Returns:
            a value without axes.
        """
        return self._m.exact_epsilon(value)

    def make_vector(self, values: Any, like: Value, name: str, trailing: int = 0) -> Value:
        """Evaluate a constant vector.

        Args:
            trailing: number of axes of size 1 to append.

        Returns:
            a value with 1 + ``trailing`` axes.
        """
        v = self._m.constant(np.asarray(values, dtype=np.float64).reshape(-1))
        return v.with_axes((*v.axes, *((),) * trailing))

    def split_into_groups(self, x: Value, groups: int) -> Value:
        """Reshape x from (N, C, …) to (N, groups, rest).

        Returns:
            a value with three axes.
        """
        return x.with_axes(self._m.plan.regroup_atoms(x.atoms, [x.shape[0], Size.from_int(groups), None]))

    def reshape_like(self, y: Value, x: Value) -> Value:
        """Reshape ``y`` to the shape of ``x``.

        Returns:
            the elements of ``y`` with the axes of ``x``.
        """
        return y.with_axes(self._m.plan.regroup_atoms(y.atoms, list(x.shape)))

    def last_size_of(self, x: Value) -> int:
        """Return the size of the last axis.

        Raises:
            NotProved: it is dynamic.
        """
        size = x.shape[-1].constant_value
        if size is None:
            raise NotProved(ProofFailure.SIZE, f"the last axis has the dynamic size {x.shape[-1]}")
        return int(size)

    def split_last_axis(self, x: Value, size: int) -> Value:
        """Reshape (…, n) to (…, n / size, size).

        Returns:
            a value with one more axis; ``x`` itself if n is ``size``.
        """
        if x.shape[-1] == Size.from_int(size):
            return x
        return x.with_axes(self._m.plan.regroup_atoms(x.atoms, [*x.shape[:-1], None, Size.from_int(size)]))

    def reshape_per_channel(self, v: Value, x: Value) -> Value:
        """Align a vector with the channels of ``x``, (N, C, …).

        Returns:
            ``v`` with trailing axes of size 1.
        """
        return broadcast_over_channels(self._m, v, x)

    def reshape_per_group(self, v: Value, groups: int) -> Value:
        """Align a vector with (N, groups, rest).

        Returns:
            ``v`` with one trailing axis of size 1.

        Raises:
            NotProved: the shape of ``v`` is not (groups,).
        """
        if v.shape != (Size.from_int(groups),):
            raise NotProved(
                ProofFailure.SIZE, f"GroupNormalization with {groups} groups has a scale of shape {v.shape}"
            )
        return v.with_axes((*v.axes, ()))

    def reshape_per_element(self, v: Value, x: Value, axes: Sequence[int]) -> Value:
        """Reshape ``v`` to the axes of ``x`` from the first of ``axes`` on.

        Returns:
            ``v`` in the shape of these axes.
        """
        return v.with_axes(self._m.plan.regroup_atoms(v.atoms, list(x.shape[axes[0] :])))


def _make_evaluator(definition: Definition) -> Op:
    def evaluate_op(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
        values = [None if x is None else lift_input(m, x) for x in inputs]
        return definition(ValueInterpreter(m, opset, outputs), *values, **attrs)

    return evaluate_op


TABLE: dict[str, Op] = {
    op: _make_evaluator(row.definition) for op, row in DEFAULT.items() if row.definition is not None
}
