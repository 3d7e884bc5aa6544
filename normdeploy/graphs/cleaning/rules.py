"""All rules by the op that each rewrites, and the pass that applies them in one walk."""

from __future__ import annotations

import onnx_ir as ir

from .casts import cast_filling, merge_casts
from .neutral import drop_neutral
from .nodes import Rule
from .padding import pad_in_convolution
from .ranges import merge_extremes, merge_limits
from .scatters import drop_scatter
from .views import (
    drop_reshape_of_squeeze,
    drop_reshapes_of_matmul,
    drop_slice,
    flatten_as_reshape,
    merge_reshapes,
    merge_transposes,
    state_reshape,
)

RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "And", "Or"), (drop_neutral,)),
    "Reshape": (drop_reshapes_of_matmul, state_reshape, merge_reshapes, drop_reshape_of_squeeze),
    "Flatten": (flatten_as_reshape,),
    "Cast": (cast_filling, merge_casts),
    "Slice": (drop_slice,),
    "Transpose": (merge_transposes,),
    "ScatterND": (drop_scatter,),
    "Min": (merge_extremes,),
    "Max": (merge_extremes,),
    "Clip": (merge_limits,),
    "Relu": (merge_limits,),
    "Conv": (pad_in_convolution,),
    "ConvInteger": (pad_in_convolution,),
}


class Rules(ir.passes.InPlacePass):
    """Apply the first rule that fits to each node, bodies of If, Loop and Scan included."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for graph in list(model.graphs()):
            for node in graph:
                if node.domain == "":
                    modified |= any(rule(graph, node) for rule in RULES.get(node.op_type, ()))
        return ir.passes.PassResult(model, modified)
