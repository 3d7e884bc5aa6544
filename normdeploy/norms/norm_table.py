"""List all norm ops in one table, a row per op: standard ops, normdeploy's own ops and the ops of other tools.

Every other module reads the properties of a norm op from its row. A row lists the inputs, outputs and attributes of an
op, and its definition. The definition is a Python function in the module that has the row
(`normdeploy.norms.onnx_norms`, `onnxruntime_norms`, `tensorrt_norms`). normdeploy's own ops
(`normdeploy.norms.normdeploy_ops`) and third-party ops (`normdeploy.norms.third_party`) are defined by a function body,
which files contain.
"""

from __future__ import annotations

from . import normdeploy_ops, onnx_norms, onnxruntime_norms, tensorrt_norms
from .norm_op import CONTRIB, DOMAIN, NormOp, OpOwner, StatisticsKind, Version

__all__ = ["CONTRIB", "DEFAULT", "DOMAIN", "OURS", "ROWS", "STANDARD", "NormOp", "OpOwner", "StatisticsKind", "Version"]

ROWS: tuple[NormOp, ...] = (
    *onnx_norms.ROWS,
    *normdeploy_ops.ROWS,
    *onnxruntime_norms.ROWS,
    *tensorrt_norms.ROWS,
    *onnx_norms.OLD_ROWS,
)


def rows_of_owner(owner: OpOwner) -> dict[str, NormOp]:
    """Select the rows of one owner.

    Returns:
        the rows, keyed by op name.
    """
    return {r.op: r for r in ROWS if r.owner is owner}


STANDARD = rows_of_owner(OpOwner.ONNX)
OURS = rows_of_owner(OpOwner.OURS)

DEFAULT = {op: r for op, r in (rows_of_owner(OpOwner.ONNXRUNTIME) | STANDARD).items() if "" in r.domains}
"""What a norm's node of the default domain is, by its op's name: the standard's ops, and those that onnxruntime adds
there."""
