"""ONNX files that hold no model but what a library compiled of one: onnxruntime's EPContext nodes.

Such a file is for one execution provider of onnxruntime, on one kind of GPU, by one version of a library (onnxruntime's
"EP Context Cache Feature Design"). There is nothing in it to recognise, rewrite or compare; it is refused by name.
"""

from __future__ import annotations

import onnx

from ..errors import GraphError

OP = "EPContext"
DOMAIN = "com.microsoft"
PROVIDER = "NvTensorRTRTXExecutionProvider"
# its wheel; cu12 for CUDA 12
PACKAGE = "onnxruntime-ep-nv-tensorrt-rtx-cu13"
# characters of what a file says of itself
_SHOWN = 80


def require_model(proto: onnx.ModelProto, name: str) -> None:
    """
    Raises:
        GraphError: the file holds a compiled model.
    """
    node = next((n for n in proto.graph.node if n.op_type == OP and n.domain == DOMAIN), None)
    if node is not None:
        raise GraphError(
            f"{name} {describe_context_node(node)}; give the ONNX file that it was made "
            f"of{_original_model_clause(node)}"
        )


def describe_context_node(node: onnx.NodeProto) -> str:
    """What an EPContext node says of itself."""
    provider = attribute_text(node, "source") or "an execution provider that it does not name"
    built = [
        f"for compute capability {architecture}"
        if (architecture := attribute_text(node, "hardware_architecture"))
        else "",
        f"by version {version}" if (version := attribute_text(node, "ep_sdk_version")) else "",
    ]
    if provider == PROVIDER:
        need = f" (pip install {PACKAGE}) on such a GPU"
    else:
        need = ""
    title = " ".join(part for part in ("compiled", *built) if part)
    return (
        f"holds, in the place of nodes, an engine for onnxruntime's {provider}, {title}: only onnxruntime with that"
        f" provider{need} runs it"
    )


def attribute_text(node: onnx.NodeProto, name: str) -> str:
    """A text among the attributes, "" where it is not there; nothing in it is believed."""
    value = next((a.s for a in node.attribute if a.name == name), b"")
    text = value[: 4 * _SHOWN].decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text)[:_SHOWN]


def _original_model_clause(node: onnx.NodeProto) -> str:
    source = attribute_text(node, "onnx_model_filename")
    if source:
        return f", {source!r}"
    return ""
