"""Table of all rules by the op type that each rule rewrites, and the pass that applies the rules in one walk."""

from __future__ import annotations

import onnx_ir as ir

from .cast_rules import cast_filling, merge_casts
from .clamp_rules import merge_extremes, merge_limits
from .neutral_rules import drop_neutral_operation
from .node_matching import Rule
from .pad_rules import merge_pad_into_convolution
from .scatter_rules import drop_full_scatter
from .view_rules import (
    drop_full_slice,
    drop_reshape_of_squeeze,
    drop_reshapes_of_matmul,
    merge_reshapes,
    merge_transposes,
    write_flatten_as_reshape,
    write_static_reshape,
)

RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "And", "Or"), (drop_neutral_operation,)),
    "Reshape": (drop_reshapes_of_matmul, write_static_reshape, merge_reshapes, drop_reshape_of_squeeze),
    "Flatten": (write_flatten_as_reshape,),
    "Cast": (cast_filling, merge_casts),
    "Slice": (drop_full_slice,),
    "Transpose": (merge_transposes,),
    "ScatterND": (drop_full_scatter,),
    "Min": (merge_extremes,),
    "Max": (merge_extremes,),
    "Clip": (merge_limits,),
    "Relu": (merge_limits,),
    "Conv": (merge_pad_into_convolution,),
    "ConvInteger": (merge_pad_into_convolution,),
}


class CleaningRules(ir.passes.InPlacePass):
    """Pass that applies the first matching rule to each node, bodies of If, Loop and Scan included."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Walk every graph of the model once.

        Returns: the model, changed in place, and whether it changed.
        """
        modified = False
        for graph in list(model.graphs()):
            for node in graph:
                if node.domain == "":
                    modified |= any(rule(graph, node) for rule in RULES.get(node.op_type, ()))
        return ir.passes.PassResult(model, modified)
