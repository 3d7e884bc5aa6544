"""Note a norm whose epsilon is 0: where its root is 0, it divides 0 by 0.

A file that guards the result, such as ``where(variance > 0, y, 0)`` or ``nan_to_num(y)``, gets no note.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from ..graphs.graph import Graph
from .anchors import POINTWISE, VIEWS
from .norm_facts import Norm

# Input whose root is 0.
_ROWS = {
    "RMSNorm": "a row of zeros",
    "LayerNorm": "a constant row",
    "GroupNorm": "a constant group",
    "InstanceNorm": "a constant channel",
}
# Maximum number of nodes after the norm that are searched for a guard.
_FARTHEST = 64


def zero_epsilon_notes(graph: Graph, norm: Norm) -> tuple[str, ...]:
    """Describe the input for which a norm without epsilon gives NaN.

    Returns:
        one note; none if the epsilon is not 0, or if the file guards the result.
    """
    if norm.epsilon != 0 or _has_guard(norm.y):
        return ()
    row = _ROWS.get(norm.kind, "a constant row")
    return (f"epsilon is 0: {row} gives NaN, as in the original",)


def _has_guard(y: gs.Tensor) -> bool:
    """Return True if a Where or IsNaN reads the norm's result, directly or after pointwise ops and views."""
    pending = [y]
    seen = set[int]()
    while pending and len(seen) < _FARTHEST:
        for node in pending.pop().outputs:
            if id(node) in seen:
                continue
            seen.add(id(node))
            if node.op in ("Where", "IsNaN"):
                return True
            if node.op in POINTWISE | VIEWS:
                pending.extend(node.outputs)
    return False
