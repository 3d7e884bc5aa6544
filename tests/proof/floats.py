"""Definitions on `Value`s, evaluated on arrays: every place of every axis, in float64 alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from normdeploy.evaluate import evaluator
from normdeploy.graphs.symbolic_sizes import Size
from normdeploy.proof.axis_plan import AxisPlan
from normdeploy.proof.interpreter import ProofInterpreter, RandomDraws
from normdeploy.proof.proof_errors import RestartEvaluation
from normdeploy.proof.value import Value


class _Every(AxisPlan):
    """A point for each place."""

    def point_count(self, atom: Size) -> int:
        assert atom.constant_value is not None
        return atom.constant_value


def evaluated(
    definition: Callable[[ProofInterpreter, list[Value]], Any], arrays: Sequence[np.ndarray]
) -> list[np.ndarray | None]:
    """The outputs of ``definition`` of the given leaves."""
    plan = _Every()
    while True:
        m = ProofInterpreter(plan, RandomDraws(random.Random(1)), None)
        try:
            with evaluator.silence_numpy():
                leaves = [
                    m.make_leaf(i, [Size.from_int(n) for n in a.shape], lambda counts, a=a: a.reshape(1, *counts))
                    for i, a in enumerate(arrays)
                ]
                found = definition(m, leaves)
        except RestartEvaluation:
            continue
        return [None if v is None else _array(plan, v) for v in (found if isinstance(found, tuple) else (found,))]


def _array(plan: AxisPlan, v: Value) -> np.ndarray:
    shape = [s.constant_value for s in v.shape]
    return np.broadcast_to(v.f, (1, *(plan.point_count(a) for a in v.atoms))).reshape(shape)  # type: ignore[arg-type]
