"""Definitions on `Value`s, evaluated on arrays: every place of every axis, in float64 alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from normdeploy.evaluate import evaluate
from normdeploy.graphs.sizes import Size
from normdeploy.proof.errors import Restart
from normdeploy.proof.machine import Draws, Machine
from normdeploy.proof.plan import Plan
from normdeploy.proof.value import Value


class _Every(Plan):
    """A point for each place."""

    def count(self, atom: Size) -> int:
        assert atom.number is not None
        return atom.number


def evaluated(
    definition: Callable[[Machine, list[Value]], Any], arrays: Sequence[np.ndarray]
) -> list[np.ndarray | None]:
    """The outputs of ``definition`` of the given leaves."""
    plan = _Every()
    while True:
        m = Machine(plan, Draws(random.Random(1)), None)
        try:
            with evaluate.quiet():
                leaves = [
                    m.leaf(i, [Size.of(n) for n in a.shape], lambda counts, a=a: a.reshape(1, *counts))
                    for i, a in enumerate(arrays)
                ]
                found = definition(m, leaves)
        except Restart:
            continue
        return [None if v is None else _array(plan, v) for v in (found if isinstance(found, tuple) else (found,))]


def _array(plan: Plan, v: Value) -> np.ndarray:
    shape = [s.number for s in v.shape]
    return np.broadcast_to(v.f, (1, *(plan.count(a) for a in v.atoms))).reshape(shape)  # type: ignore[arg-type]
