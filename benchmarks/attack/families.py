"""List the families of graphs, each a function (rng) -> Case. Half of the drawn graphs have no trap."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import folds, lookalikes, nesting, odd, poles, sizing, values, whole
from .builder import Case

Family = Callable[[np.random.Generator], Case]

HONEST: dict[str, Family] = {
    "honest_layer": whole.layer,
    "honest_channels": whole.channels,
    "honest_group": whole.group,
    "honest_nodes": whole.nodes,
    "honest_fold": folds.honest,
    "honest_nested": nesting.honest,
}
TRAPS: dict[str, Family] = {
    "piecewise": values.piecewise,
    "nonfinite": values.nonfinite,
    "rows": values.rows,
    "sizes_mask": sizing.masked,
    "sizes_count": sizing.counted,
    "sizes_cut": sizing.cut,
    "broadcast": sizing.broadcast,
    "static_far": sizing.far,
    "fold_trap": folds.trapped,
    "fold_scales": folds.scales,
    "fold_accuracy": folds.accuracy,
    "subtle": lookalikes.subtle,
    "outputs": lookalikes.outputs,
    "stacked": odd.stacked,
    "wide": odd.wide,
    "overridable": odd.overridable,
    "views": odd.views,
    "captured": odd.captured,
    "casts": odd.casts,
    "degenerate": odd.degenerate,
    "poles": poles.poles,
    "selection": poles.selection,
    "negative": poles.negative,
    "shadowed": nesting.shadowed,
    "nested_trap": nesting.trapped,
}
FAMILIES = HONEST | TRAPS


def generate(seed: int, index: int, names: tuple[str, ...] = ()) -> Case:
    """Generate graph ``index`` of run ``seed``. The result does not depend on the process or the order of calls.

    Returns:
        the case.
    """
    rng = np.random.default_rng([seed, index])
    if names:
        name = names[int(rng.integers(len(names)))]
    else:
        pool = list(HONEST if rng.random() < 0.5 else TRAPS)
        name = pool[int(rng.integers(len(pool)))]
    case = FAMILIES[name](rng)
    case.family = name
    return case
