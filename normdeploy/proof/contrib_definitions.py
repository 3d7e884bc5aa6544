"""Define norm ops outside standard ONNX on `Value`s, from `normdeploy.norms.interpreter`.

Expansions of these ops are proved against these definitions.

A definition is called with (machine, inputs, attributes, opset, number of outputs) and returns the outputs. Inputs are
`Value`, `IndexTensor` or `LookupTable`; an omitted input is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..norms.interpreter import Definition
from ..norms.norm_table import ROWS, OpOwner
from .interpreter import ProofInterpreter
from .norm_definitions import ValueInterpreter
from .op_definitions import Attrs, Inputs, Op
from .proto_evaluation import apply_op


class _ForeignInterpreter(ValueInterpreter):
    """Interpreter of values and of integers that pick rows from tables (`normdeploy.proof.proto_evaluation`)."""

    def __call__(self, op: str, *inputs: Any, **attributes: Any) -> Any:
        return apply_op(self._m, op, list(inputs), attributes, self.opset, 1)[0]


def _make_evaluator(definition: Definition) -> Op:
    def evaluate_op(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
        return definition(_ForeignInterpreter(m, opset, outputs), *inputs, **attrs)

    return evaluate_op


TABLE: Mapping[tuple[str, str], Op] = {
    (row.owner, row.op): _make_evaluator(row.definition)
    for row in ROWS
    if row.definition is not None and row.owner is not OpOwner.ONNX
}
"""Definitions by owner and op type."""
