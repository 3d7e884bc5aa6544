"""Prepare a file for half precision: store constants as initializers, inline functions, raise the opset if needed."""

from __future__ import annotations

import onnx
import onnx.inliner
from onnx import TensorProto

from ..contrib.name_clashes import is_clashing
from ..errors import GraphError
from ..graphs.opset_conversion import ops_needing_conversion, raise_opset_number
from ..graphs.proto_queries import IR_OF_CONSTANTS
from ..graphs.shape_inference import infer_types
from ..norms.third_party import is_managed_op
from ..storage.onnx_domains import STANDARD, default_domain_opset, is_standard
from ..storage.proto_traversal import copy_model
from .float32_reasons import allowed_types
from .type_conversion import HalfFormat, constants_to_initializers

# First opset in which Conv, the pools and other ops support bfloat16
_NEWER = 22
# Oldest opset from which the file is raised. Schemas of earlier opsets list bfloat16 incompletely.
_OLDEST = 16


def prepare_for_half(proto: onnx.ModelProto, form: HalfFormat) -> tuple[onnx.ModelProto, list[str]]:
    """Copy the file for the conversion to half precision.

    In the copy, constants are initializers. Functions are inlined, except those of normdeploy's own ops and of
    third-party ops. For bfloat16, the opset is raised if more ops of the file support bfloat16 in the newer opset.

    Returns:
        the copy, and notes about the opset.

    Raises:
        GraphError: a function of the file has the name of a standard op.
    """
    shadow = next((f.name for f in proto.functions if f.domain in STANDARD and is_clashing(f)), None)
    if shadow is not None:
        raise GraphError(
            f"the file has a function named {shadow!r} in ONNX's own domain. Runtimes disagree on whether it or "
            "ONNX's op of that name applies, so the file can't be converted to half precision; rename the "
            "function or move it to another domain"
        )
    notes: list[str] = []
    foreign = [(f.domain, f.name) for f in proto.functions if not is_managed_op(f.domain, f.name)]
    if foreign:
        proto = onnx.inliner.inline_selected_functions(proto, foreign)
    else:
        proto = copy_model(proto)
    # In old IR versions, every weight is listed as an input too, although callers are not meant to replace it.
    if proto.ir_version < IR_OF_CONSTANTS:
        weights = {t.name for t in proto.graph.initializer}
        for v in [v for v in proto.graph.input if v.name in weights]:
            proto.graph.input.remove(v)
        proto.ir_version = IR_OF_CONSTANTS
    constants_to_initializers(proto.graph)
    for node in proto.graph.node:
        # `normdeploy.rewriting.residual_sums` wrote this Sum for float32. onnxruntime 1.31.1 crashes on several Sums of
        # half precision.
        if node.op_type == "Sum" and len(node.input) == 2 and node.domain in STANDARD:
            node.op_type = "Add"
    if form.onnx == TensorProto.BFLOAT16 and _OLDEST <= file_opset(proto) < _NEWER and _ops_gaining_type(proto, form):
        if stuck := ops_needing_conversion(proto, _NEWER):
            notes.append(
                f"{stuck[0]} has another meaning at opset {_NEWER}: ops that support bfloat16 only from "
                "that opset stay float32"
            )
        else:
            notes.append(
                f"the opset of the file was raised to {_NEWER}, the first that supports bfloat16 for "
                f"{', '.join(_ops_gaining_type(proto, form))}"
            )
            proto = raise_opset_number(proto, _NEWER)
    return proto, notes


def _ops_gaining_type(proto: onnx.ModelProto, form: HalfFormat) -> list[str]:
    """List the ops of the main graph that support the type only from the newer opset on."""
    wanted, opset = f"tensor({form.dtype.name})", file_opset(proto)

    def supports_type(op: str, version: int) -> bool:
        allowed = allowed_types(op, version)
        return allowed is not None and any(wanted in kinds for side in allowed for kinds in side)

    return sorted(
        {
            n.op_type
            for n in proto.graph.node
            if is_standard(n) and supports_type(n.op_type, _NEWER) > supports_type(n.op_type, opset)
        }
    )


def file_opset(proto: onnx.ModelProto) -> int:
    """Return the opset of the default domain."""
    return default_domain_opset(proto)


def tensor_elem_types(proto: onnx.ModelProto) -> dict[str, int]:
    """Infer the element type of each tensor of the main graph.

    Returns:
        tensor name -> ONNX elem_type, without sequences.

    Raises:
        GraphError: the type of an output of a nonstandard op is unknown.
    """
    types = {name: kind for name, (kind, _) in infer_types(proto).items() if kind is not None}
    for node in proto.graph.node:
        for name in node.output:
            if name and name not in types and not is_standard(node):
                raise GraphError(
                    f"the type of {name!r}, an output of {node.domain}.{node.op_type} {node.name!r}, is "
                    "unknown, so the file can't be converted to half precision; add it to the file's "
                    "value_info"
                )
    return types
