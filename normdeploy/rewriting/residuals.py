"""The step that writes the sum before a layer norm as Sum instead of Add, where the runtime runs the two faster apart.

onnxruntime (1.31) joins Add and LayerNormalization into SkipLayerNormalization where both summands have one shape of
rank 3 and the norm alone reads the sum. Its CPU kernel goes through the rows one by one and computes E[x²] − E[x]²: at
1×64×384 it takes several times as long as both ops apart, and loses more digits where the mean is large. It does not
know Sum, which adds the same two numbers.

Which is faster was measured (`normdeploy.forms.norm_forms`, kind ResidualLayerNorm).
"""

from __future__ import annotations

from dataclasses import replace

import onnx_graphsurgeon as gs

from ..domains import is_standard
from ..forms.norm_forms import best
from ..graphs.region import Refusal, compile_region
from ..records import Finding
from . import certify
from .pricing import price
from .sealed import seals
from .work import Work

KIND = "ResidualLayerNorm"
_NOTE = "the sum before it is written as Sum: onnxruntime would join an Add with it into a slower kernel"


def part(work: Work, node: gs.Node) -> None:
    """Write the Add before the layer norm ``node`` as Sum; a note of the norm's finding tells."""
    graph = work.graph
    if node.op != "LayerNormalization" or not is_standard(node):
        return
    total = node.inputs[0]
    add, dtype = graph.producer(total), graph.dtype(total)
    if add is None or add.op != "Add" or not is_standard(add) or dtype is None or graph.is_output(total):
        return
    shapes = [graph.shape(t) for t in (total, *add.inputs)]
    if shapes[0] is None or len(shapes[0]) != 3 or shapes != shapes[:1] * 3 or len(graph.consumers(total)) != 1:
        return
    if best(KIND, work.wanted.forms, dtype.name, ("standard", "sum")) != "sum":
        return
    before = compile_region(graph, total, [t for t in add.inputs if not graph.is_constant(t)])
    made = graph.node("Sum", list(add.inputs), total)
    rewrite = before if isinstance(before, Refusal) else certify.rewrite_of(graph, before, [made])
    if isinstance(rewrite, Refusal) or not certify.certified(work.proofs, [rewrite]):
        return
    told = Finding("sum", "fused", total.name, graph.module(add), became="Sum")
    price(work, rewrite, told, dtype, opset=1)
    work.sealed += seals(graph, [made])
    graph.replace(total, [made])
    place = work.place(node.outputs[0].name)
    if place is not None:
        work.findings[place] = replace(work.findings[place], notes=(*work.findings[place].notes, _NOTE))
        if work.step is not None:
            work.steps.setdefault(place, []).append(work.step)
