"""Write (x − mean)/(sqrt(variance) + 1e-9) as MeanVarianceNormalization (ONNX opset 9).

The op's epsilon is fixed and outside the root. No standard node computes another epsilon outside the root (the form of
"The Annotated Transformer"). A norm with another epsilon is kept as it is, with this reason.
"""

from __future__ import annotations

from ..graphs.graph import Graph
from ..graphs.region import Refusal
from ..recognition.norm_facts import Norm
from .norm_writer import NodeWriter, NormForm, format_epsilon

_EPSILON = 1e-9


def write_mean_variance_norm(graph: Graph, norm: Norm, runtime: str) -> NormForm | Refusal:
    """Write a centered norm with epsilon 1e-9 outside the root.

    Returns:
        the form, or a refusal with the reason.
    """
    if not norm.fit.outside:
        return Refusal("epsilon is inside the root", norm.y.name)
    if (
        abs(norm.epsilon - _EPSILON) > 1e-7 * _EPSILON
        or not norm.fit.centered
        or norm.fit.split is not None
        or norm.ddof
    ):
        if norm.fit.centered:
            to = "standard deviation"
        else:
            to = "root mean square"
        return Refusal(
            f"epsilon ({format_epsilon(norm.epsilon)}) is added to the {to}, outside the root; no standard op "
            "does this",
            norm.y.name,
        )
    writer = NodeWriter(graph, norm)
    writer.add_node("MeanVarianceNormalization", axes=list(norm.axes))
    writer.affine(norm.gamma, norm.beta)
    return writer.make_form("MeanVarianceNormalization", f"MeanVarianceNormalization(axes={list(norm.axes)})")
