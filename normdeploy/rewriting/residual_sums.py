"""Write the sum before a layer norm as Sum instead of Add if the runtime runs the sum and the norm faster separately.

onnxruntime (1.31) joins Add and LayerNormalization into SkipLayerNormalization if both summands have one shape of rank
3 and only the norm reads the sum. Its CPU kernel processes the rows one by one and computes E[x²] − E[x]². At 1×64×384
this kernel takes several times as long as the two separate ops, and it loses more digits if the mean is large.
onnxruntime does not join a Sum, which adds the same two numbers.

The faster form was measured (`normdeploy.forms.measured_forms`, kind ResidualLayerNorm).
"""

from __future__ import annotations

from dataclasses import replace

import onnx_graphsurgeon as gs

from ..findings.records import Certificate, Finding
from ..forms.measured_forms import best_form
from ..graphs.graph import Graph
from ..option_values import OPENVINO
from .certification import pair_of
from .node_queries import is_standard_op, sole_consumer, standard_producer
from .proposals import Proposal, RewriteTarget, propose_for_speed
from .rounding_verdicts import fold_trial_maker

KIND = "ResidualLayerNorm"
_NOTE = "the preceding addition is written as Sum: onnxruntime would fuse an Add with it into a slower kernel"


def propose_residual_sum(graph: Graph, node: gs.Node, target: RewriteTarget) -> Proposal | None:
    """Propose to write the Add before the layer norm ``node`` as Sum, with a note in the norm's finding.

    Returns:
        the proposal; None if it does not apply or is not faster.
    """
    if not is_standard_op(node, "LayerNormalization"):
        return None
    total = node.inputs[0]
    add = standard_producer(graph, total, "Add")
    dtype = graph.dtype(total)
    if add is None or dtype is None or sole_consumer(graph, total) is None:
        return None
    shapes = [graph.shape(t) for t in (total, *add.inputs)]
    if shapes[0] is None or len(shapes[0]) != 3 or shapes != shapes[:1] * 3:
        return None
    # OpenVINO does not join the two nodes.
    if target.wanted.runtime == OPENVINO:
        return None
    if best_form(KIND, target.wanted.runtime, dtype.name, ("standard", "sum")) != "sum":
        return None
    summands = [t for t in add.inputs if not graph.is_constant(t)]
    made = graph.make_node("Sum", list(add.inputs), total)
    norm = target.entry_of(node.outputs[0].name)
    return propose_for_speed(
        "sum",
        total,
        [made],
        "Sum",
        graph.module(add),
        (pair_of(graph, total, summands, made.outputs[0]),),
        trial=fold_trial_maker((), dtype),
        revised_entries=() if norm is None else (norm,),
        revise=None if norm is None else _with_sum_note,
    )


def _with_sum_note(finding: Finding, certificate: Certificate | None) -> Finding:
    return replace(finding, notes=(*finding.notes, _NOTE))
