"""How each norm is written: one file for each kind, tried in this order; the reading and form with the fewest nodes
wins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..graphs.functions import DOMAIN
from ..graphs.graph import Graph
from ..graphs.region import Kind, Refusal
from ..recognition.facts import Norm
from ..recognition.parameters import held_epsilon
from ..recognition.probe import CLAMPED
from . import group, guests, instance, layer, mean_variance, portable
from .form import Form

_HALF_ULP = 2.0**-24  # of a float32 number that is not subnormal, relative to it

_UNBIASED = (
    "its variance is unbiased (n − 1) over a dynamic size n: no fixed gamma and epsilon make it a standard"
    " normalization"
)

FORMS = (instance.form, group.form, layer.form)


def write(graph: Graph, norm: Norm, runtime: str, fuse: str = "standard") -> Form | Refusal:
    """The first form that can hold the norm, or why the last one could not. ``fuse``: "portable" allows the ops of
    installed packages, which are asked first, and this project's own.

    Raises:
        ExtensionError: a package's form breaks its contract.
    """
    if abs(float(np.float32(norm.epsilon)) - norm.epsilon) > _HALF_ULP * norm.epsilon:
        return Refusal(
            f"its epsilon ({norm.epsilon:.3g}) can't be written: an attribute is a float32 number", norm.y.name
        )
    by_row = portable.by_row(graph, norm)
    own = portable.op_of(graph, norm) if by_row is None else by_row.core
    if (
        norm.fit.clamped
        and (exact := held_epsilon(graph, norm.region, norm.epsilon)) is not None
        and exact != float(np.float32(exact))
    ):
        return Refusal(
            f"the number {exact!r} that clamps it can't be written: an attribute is a float32 number", norm.y.name
        )
    if fuse == "portable" and (brought := guests.form(graph, norm)) is not None:
        return brought
    if norm.fit.clamped and (not own or fuse != "portable"):
        return Refusal(f"{CLAMPED}{f'; --fuse portable writes it as {DOMAIN}.{own}' if own else ''}", norm.y.name)
    if fuse == "portable" and by_row is not None:
        return by_row
    if fuse == "portable" and own in ("RMSNorm", "ChannelLayerNorm"):
        return portable.form(graph, norm)
    if norm.ddof or norm.fit.outside:
        made = mean_variance.form(graph, norm, runtime) if norm.fit.outside else Refusal(_UNBIASED, norm.y.name)
        if isinstance(made, Form) or not own:
            return made
        portably = portable.form(graph, norm) if by_row is None else by_row
        if fuse == "portable" or not isinstance(portably, Form):
            return portably
        return replace(made, reason=f"{made.reason}; --fuse portable writes it as {DOMAIN}.{own}")
    refusal = Refusal("", norm.y.name)
    for form in FORMS:
        made = form(graph, norm, runtime)
        if isinstance(made, Form):
            return made
        if made.kind is not Kind.OTHER_NORM:
            refusal = made
    return refusal
