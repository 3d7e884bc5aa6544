"""Write each norm as nodes; one module per kind of norm, tried in order.

Recognition may read one region in several ways, and a norm may have several forms. The combination that leaves the
fewest nodes is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..graphs.graph import Graph
from ..graphs.own_op_functions import DOMAIN
from ..graphs.region import Refusal, RefusalKind
from ..recognition.fit_measurement import CLAMPED
from ..recognition.norm_facts import Norm
from ..recognition.norm_parameters import stored_epsilon
from . import group_norm, instance_norm, layer_norm, mean_variance_norm, portable_norms, third_party_forms
from .norm_writer import NormForm

# Half an ulp of a normal float32 number, relative to the number
_HALF_ULP = 2.0**-24

_UNBIASED = (
    "its variance is unbiased (n − 1) over a dynamic size n: no fixed gamma and epsilon can express it "
    "as a standard norm"
)

# normdeploy's own ops that ``--fuse portable`` writes even if standard nodes can express the norm
_OURS_FIRST = ("RMSNorm", "ChannelLayerNorm")

_KEPT_MEAN = "its numerator keeps the mean that its variance subtracts: x / sqrt(variance + epsilon)"

FORMS = (instance_norm.write_instance_norm, group_norm.write_group_norm, layer_norm.write_layer_norm)


def write_norm(
    graph: Graph, norm: Norm, runtime: str, fuse: str = "standard", excluded: Mapping[str, str] | None = None
) -> NormForm | Refusal:
    """Write a norm in the first form that can express it.

    Args:
        fuse: "portable" also allows normdeploy's own ops and the ops of installed packages. The ops of packages are
            tried first.
        excluded: standard norm ops that must not be written, with the reasons. The next form that does without them is
            written.

    Returns:
        the form. If no form can express the norm, the refusal of the last form that was tried.

    Raises:
        ExtensionError: a package's form breaks its contract.
    """
    name = norm.y.name
    if abs(float(np.float32(norm.epsilon)) - norm.epsilon) > _HALF_ULP * norm.epsilon:
        return Refusal(f"its epsilon ({norm.epsilon:.3g}) can't be stored: ONNX attributes are float32", name)
    if norm.fit.clamped:
        exact = stored_epsilon(graph, norm.region, norm.epsilon)
        if exact is not None and exact != float(np.float32(exact)):
            return Refusal(f"its clamp bound {exact!r} can't be stored: ONNX attributes are float32", name)
    portable_op = portable_norms.portable_op_of(graph, norm)
    if fuse == "portable":
        third_party_form = third_party_forms.write_third_party_norm(graph, norm)
        if third_party_form is not None:
            return third_party_form
        only_ours = norm.fit.clamped or norm.fit.keeps_mean
        if portable_op is not None and (only_ours or portable_op in _OURS_FIRST):
            return portable_norms.write_portable_norm(graph, norm, portable_op)
    if portable_op is not None:
        hint = f"; --fuse portable writes it as {DOMAIN}.{portable_op}"
    else:
        hint = ""
    if norm.fit.clamped:
        return Refusal(CLAMPED + hint, name)
    if norm.fit.keeps_mean:
        return Refusal(_KEPT_MEAN + hint, name)
    if norm.ddof or norm.fit.outside:
        if norm.fit.outside:
            made = mean_variance_norm.write_mean_variance_norm(graph, norm, runtime)
        else:
            made = Refusal(_UNBIASED, name)
        if isinstance(made, NormForm) or portable_op is None:
            return made
        portable_form = portable_norms.write_portable_norm(graph, norm, portable_op)
        if fuse == "portable" or isinstance(portable_form, Refusal):
            return portable_form
        return replace(made, reason=made.reason + hint)
    refusal = Refusal("", name)
    for form in FORMS:
        if form is group_norm.write_group_norm:
            made = group_norm.write_group_norm(graph, norm, runtime, excluded or {}, own=fuse == "portable")
        else:
            made = form(graph, norm, runtime)
        if isinstance(made, NormForm):
            unwanted = [node.op for node in made.nodes if node.op in (excluded or {})]
            if not unwanted:
                return made
            assert excluded is not None
            made = Refusal(excluded[unwanted[0]], made.nodes[-1].outputs[0].name, kind=RefusalKind.OPSET)
        if made.kind is not RefusalKind.OTHER_NORM:
            refusal = made
    return refusal
