"""How each norm is written: one file for each kind, tried in this order; the reading and form with the fewest nodes wins."""

from __future__ import annotations

import numpy as np

from ..facts import Norm
from ..graph import Graph
from ..region import NoMatch
from . import group, instance, layer, mean_variance
from .form import Form

_HALF_ULP = 2.0**-24  # of a float32 number that is not subnormal, relative to it

PASSES = (instance.form, group.form, layer.form)


def write(graph: Graph, norm: Norm, runtime: str) -> Form | NoMatch:
    """The first form that can hold the norm, or why the last one could not."""
    if abs(float(np.float32(norm.epsilon)) - norm.epsilon) > _HALF_ULP * norm.epsilon:
        return NoMatch(f"its epsilon ({norm.epsilon:.3g}) can't be written: an attribute is a float32 number", norm.y.name)
    if norm.fit.outside:
        return mean_variance.form(graph, norm, runtime)
    refusal = NoMatch("", norm.y.name)
    for form in PASSES:
        made = form(graph, norm, runtime)
        if isinstance(made, Form):
            return made
        if "no " not in made.reason[:3]:
            refusal = made
    return refusal
