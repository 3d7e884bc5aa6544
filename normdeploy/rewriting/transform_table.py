"""List the transforms and cleanups in the order in which they are applied to a graph.

Norms come first, those of the parts of a tensor as one norm. Then scales and shifts are folded into their neighbors,
and branches are merged. Then norms are joined with adjacent nodes. A transform is a module with a function that
proposes (`proposals`), and a row here. Cleanups process the whole graph after the transforms.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import onnx

from ..graphs.graph import Graph
from ..graphs.opset_conversion import ops_needing_conversion
from . import activation_fusion, attention_fusion, chunk_merging, constant_evaluation, dequantized_weights
from .affine_folding import propose_fold
from .branch_fusion import propose_branch_merge
from .epilogue_fusion import propose_epilogue_fusion
from .norm_fusion import propose_norm
from .proposals import Propose, Sweep
from .quantize_fusion import propose_quantize_fusion
from .residual_sums import propose_residual_sum
from .rewrite_ledger import RewriteOptions
from .row_gemms import propose_row_gemm


def _always_applies(proto: onnx.ModelProto, wanted: RewriteOptions) -> bool:
    return True


def _is_portable(proto: onnx.ModelProto, wanted: RewriteOptions) -> bool:
    return wanted.fuse == "portable"


def _writes_standard_forms(proto: onnx.ModelProto, wanted: RewriteOptions) -> bool:
    return wanted.fuse != "portable"


def _can_write_attention(proto: onnx.ModelProto, wanted: RewriteOptions) -> bool:
    """Return True for the main graph of a file whose opset has Attention or can be raised, if the options allow it."""
    asked = wanted.attentions and wanted.runtime == "onnxruntime" and not wanted.place
    return asked and not ops_needing_conversion(proto, attention_fusion.OPSET)


def _unchanged_graph(graph: Graph) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class GraphTransform:
    """Transform of the table.

    Attributes:
        stage: name in times, progress and steps.
        propose: proposes at one node.
        applies: returns True if the transform applies to a graph.
        around: context manager that is active while the transform runs on the graph.
    """

    stage: str
    propose: Propose
    applies: Callable[[onnx.ModelProto, RewriteOptions], bool] = _always_applies
    around: Callable[[Graph], AbstractContextManager[None]] = _unchanged_graph


@dataclass(frozen=True)
class GraphCleanup:
    """Cleanup of the table.

    Attributes:
        stage: name in times and steps.
        begin: inspects the graph before any rewrite, and returns the sweep that proposes.
    """

    stage: str
    begin: Callable[[Graph], Sweep]


TRANSFORMS = (
    GraphTransform(chunk_merging.STAGE, chunk_merging.propose_chunk_merge),
    GraphTransform("norms", propose_norm),
    GraphTransform(activation_fusion.STAGE, activation_fusion.propose_activation),
    GraphTransform("scales", propose_fold, around=dequantized_weights.treat_dequantized_as_constants),
    GraphTransform("branches", propose_branch_merge),
    GraphTransform("neighbours", propose_epilogue_fusion, _is_portable),
    GraphTransform("quantized", propose_quantize_fusion, _is_portable),
    GraphTransform("residuals", propose_residual_sum, _writes_standard_forms),
    GraphTransform("linears", propose_row_gemm, _writes_standard_forms),
    GraphTransform(attention_fusion.STAGE, attention_fusion.propose_attention, _can_write_attention),
)

CLEANUPS = (GraphCleanup(constant_evaluation.STAGE, constant_evaluation.note_constant_norms),)


def select_transforms(proto: onnx.ModelProto, wanted: RewriteOptions) -> list[GraphTransform]:
    """Select the transforms for a graph.

    Returns:
        the transforms in order.
    """
    return [transform for transform in TRANSFORMS if transform.applies(proto, wanted)]
