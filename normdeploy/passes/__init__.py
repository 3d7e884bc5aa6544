"""How each norm is written: one file for each kind, tried in this order; the reading and form with the fewest nodes wins."""

from __future__ import annotations

from ..facts import Norm
from ..graph import Graph
from ..region import NoMatch
from . import group, instance, layer, mean_variance
from .form import Form

PASSES = (instance.form, group.form, layer.form)


def write(graph: Graph, norm: Norm, runtime: str) -> Form | NoMatch:
    """The first form that can hold the norm, or why the last one could not."""
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
