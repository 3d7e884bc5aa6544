"""Norm ops that are not standard ONNX, on `Value`s, by their definitions (`normdeploy.norms.definitions`): what an
expansion of one is proved against.

A definition gets (machine, inputs, attributes, opset, how many outputs), inputs as `Value`, `Indices` or `Table`, None
where left out, and gives its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..norms.definitions import Definition
from ..norms.ops import ROWS, Owner
from .machine import Machine
from .nodes import apply_op
from .norms import Values
from .ops import Attrs, Inputs, Op


class _Foreign(Values):
    """Values, and the whole numbers that pick rows from tables (`normdeploy.proof.nodes`)."""

    def __call__(self, op: str, *inputs: Any, **attributes: Any) -> Any:
        return apply_op(self._m, op, list(inputs), attributes, self.opset, 1)[0]


def _on_values(definition: Definition) -> Op:
    def run(m: Machine, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
        return definition(_Foreign(m, opset, outputs), *inputs, **attrs)

    return run


TABLE: Mapping[tuple[str, str], Op] = {
    (row.owner, row.op): _on_values(row.definition)
    for row in ROWS
    if row.definition is not None and row.owner is not Owner.ONNX
}
"""By the owner and the op's name."""
