"""Norm ops on `Value`s, by their definitions (`normdeploy.norms.definitions`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from ..graphs.sizes import Size
from ..norms.definitions import Definition, Interpreter
from ..norms.ops import DEFAULT
from .errors import NotProved, Why
from .lemmas import congruence
from .machine import Machine
from .ops import TABLE as ALGEBRA
from .ops import Attrs, Inputs, Op, by_channel, lifted
from .value import Value


class Values(Interpreter):
    """Computes with the prover's values. A Cast between floating types is an identity."""

    def __init__(self, m: Machine, opset: int, outputs: int) -> None:
        self._m = m
        self.opset = opset
        self.outputs = outputs

    def __call__(self, op: str, *inputs: Any, **attributes: Any) -> Any:
        function = ALGEBRA.get(op) or congruence.TABLE[op]
        return function(self._m, inputs, attributes, self.opset, 1)

    def reduce(self, op: str, x: Any, axes: Sequence[int], **attributes: Any) -> Any:
        return self(op, x, axes=list(axes), **attributes)

    def refuse(self, reason: str) -> NoReturn:
        raise NotProved(Why.OP, reason)

    def rank(self, x: Any) -> int:
        return len(x.shape)

    def number(self, value: float, like: Value) -> Value:
        return self._m.number(float(value))

    def epsilon(self, value: float, like: Value) -> Value:
        return self._m.epsilon(value)

    def vector(self, values: Any, like: Value, name: str, trailing: int = 0) -> Value:
        v = self._m.constant(np.asarray(values, dtype=np.float64).reshape(-1))
        return v.moved((*v.axes, *((),) * trailing))

    def group(self, x: Value, groups: int) -> Value:
        return x.moved(self._m.plan.regrouped(x.atoms, [x.shape[0], Size.of(groups), None]))

    def reshape_like(self, y: Value, x: Value) -> Value:
        return y.moved(self._m.plan.regrouped(y.atoms, list(x.shape)))

    def per_channel(self, v: Value, x: Value) -> Value:
        return by_channel(self._m, v, x)

    def per_group(self, v: Value, groups: int) -> Value:
        if v.shape != (Size.of(groups),):
            raise NotProved(Why.SIZE, f"GroupNormalization in {groups} groups with a scale of {v.shape}")
        return v.moved((*v.axes, ()))

    def per_element(self, v: Value, x: Value, axes: Sequence[int]) -> Value:
        return v.moved(self._m.plan.regrouped(v.atoms, list(x.shape[axes[0] :])))


def _on_values(definition: Definition) -> Op:
    def run(m: Machine, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
        values = [None if x is None else lifted(m, x) for x in inputs]
        return definition(Values(m, opset, outputs), *values, **attrs)

    return run


TABLE: dict[str, Op] = {op: _on_values(row.definition) for op, row in DEFAULT.items() if row.definition is not None}
