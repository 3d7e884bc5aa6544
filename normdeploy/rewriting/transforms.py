"""The transforms and cleanups, in the order in which they are applied to a graph.

Norms come first; then scales and shifts are folded into their neighbors, and branches merged; then norms are joined
with what stands around them. A transform is a module with a function that proposes (`proposal`), and a row here.
Cleanups look at the whole graph behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import onnx

from ..graphs.graph import Graph
from ..graphs.opsets import needs_conversion
from . import activations, attention, constants, dequantized
from .branching import merge
from .folding import fold
from .fusing import fuse
from .gemms import by_rows
from .joining import join
from .ledger import Wanted
from .proposal import Propose, Sweep
from .quantizing import quantize
from .residuals import part


def _always(proto: onnx.ModelProto, wanted: Wanted) -> bool:
    return True


def _is_portable(proto: onnx.ModelProto, wanted: Wanted) -> bool:
    return wanted.fuse == "portable"


def _is_standard(proto: onnx.ModelProto, wanted: Wanted) -> bool:
    return wanted.fuse != "portable"


def _takes_attentions(proto: onnx.ModelProto, wanted: Wanted) -> bool:
    """Whether an attention may become one node: in the main graph of a file whose opset has it, or can be raised."""
    asked = wanted.attentions and wanted.runtime == "onnxruntime" and not wanted.place
    return asked and not needs_conversion(proto, attention.OPSET)


def _unchanged(graph: Graph) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Transform:
    """One row.

    Args:
        stage: as times, progress and steps name it.
        propose: what it proposes at one node.
        applies: whether it is applied to a graph.
        around: what is opened in the graph meanwhile.
    """

    stage: str
    propose: Propose
    applies: Callable[[onnx.ModelProto, Wanted], bool] = _always
    around: Callable[[Graph], AbstractContextManager[None]] = _unchanged


@dataclass(frozen=True)
class Cleanup:
    """One row.

    Args:
        stage: as times and steps name it.
        begin: looks at the graph before anything is rewritten; what it returns proposes.
    """

    stage: str
    begin: Callable[[Graph], Sweep]


TRANSFORMS = (
    Transform("norms", fuse),
    Transform(activations.STAGE, activations.write),
    Transform("scales", fold, around=dequantized.opened),
    Transform("branches", merge),
    Transform("neighbours", join, _is_portable),
    Transform("quantized", quantize, _is_portable),
    Transform("residuals", part, _is_standard),
    Transform("linears", by_rows, _is_standard),
    Transform(attention.STAGE, attention.attend, _takes_attentions),
)

CLEANUPS = (Cleanup(constants.STAGE, constants.begin),)


def chosen(proto: onnx.ModelProto, wanted: Wanted) -> list[Transform]:
    """The transforms that are applied to a graph, in order."""
    return [transform for transform in TRANSFORMS if transform.applies(proto, wanted)]
