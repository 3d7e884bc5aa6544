"""Expand norm nodes to elementary ops, by the text of the ONNX specification and of onnxruntime's contrib ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

MS = "com.microsoft"
EXPANDED = {
    ("", "LayerNormalization"),
    ("", "RMSNormalization"),
    ("", "SimplifiedLayerNormalization"),
    ("", "InstanceNormalization"),
    ("", "GroupNormalization"),
    ("", "BatchNormalization"),
    (MS, "SkipLayerNormalization"),
    (MS, "SkipSimplifiedLayerNormalization"),
}


class _Writer:
    def __init__(self, stem: str, opset: int) -> None:
        self.stem, self.opset = stem, opset
        self.nodes: list[onnx.NodeProto] = []

    def __call__(self, kind: str, *inputs: str, out: str | None = None, **attributes: Any) -> str:
        name = out or f"{self.stem}__{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def const(self, value: Any, dtype: Any = np.float64) -> str:
        """Add a constant.

        Returns:
            its name.
        """
        return self("Constant", value=numpy_helper.from_array(np.asarray(value, dtype)))

    def mean_last(self, x: str) -> str:
        """Add a mean over the last axis.

        Returns:
            its name.
        """
        if self.opset >= 18:
            return self("ReduceMean", x, self.const([-1], np.int64), keepdims=1)
        return self("ReduceMean", x, axes=[-1], keepdims=1)

    def normed(self, x: str, eps: float, rms: bool = False) -> str:
        """Add (x − mean)/sqrt(var + ε) over the last axis.

        Returns:
            its name.
        """
        d = x if rms else self("Sub", x, self.mean_last(x))
        v = self("Add", self.mean_last(self("Mul", d, d)), self.const(eps))
        return self("Div", d, self("Sqrt", v))

    def column(self, x: str) -> str:
        """Reshape [C] to [C, 1].

        Returns:
            its name.
        """
        return self("Unsqueeze", x, self.const([1], np.int64))


def expand(node: onnx.NodeProto, opset: int) -> list[onnx.NodeProto]:
    """Expand ``node`` to elementary ops of ``opset`` on doubles. Only its first output, and the sum of the Skip ops, is
    written.

    Returns:
        the nodes.
    """
    w = _Writer(node.output[0], opset)
    a = {x.name: helper.get_attribute_value(x) for x in node.attribute}
    given = [*node.input, "", "", "", "", ""]
    x, kind, out = given[0], node.op_type, node.output[0]
    eps = float(a.get("epsilon", 1e-12 if kind.startswith("Skip") else 1e-5))
    shape = None
    if kind.startswith("Skip"):
        rms = "Simplified" in kind
        beta, bias = ("", given[3]) if rms else (given[3], given[4])
        total = w("Add", x, given[1])
        if bias:
            total = w("Add", total, bias)
        if len(node.output) > 3 and node.output[3]:
            w("Identity", total, out=node.output[3])
        y = w("Mul", w.normed(total, eps, rms), given[2])
        w("Add", y, beta, out=out) if beta else w("Identity", y, out=out)
        return w.nodes
    shape = w("Shape", x)
    if kind in ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"):
        rms = kind != "LayerNormalization"
        flat = w("Flatten", x, axis=int(a.get("axis", -1)))
        y = w("Reshape", w.normed(flat, eps, rms), shape)
        y = w("Mul", y, given[1])
        w("Add", y, given[2], out=out) if given[2] else w("Identity", y, out=out)
        return w.nodes
    columns = w.const([0, 0, -1], np.int64)
    cube = w("Reshape", x, columns)
    if kind == "BatchNormalization":
        root = w("Sqrt", w("Add", given[4], w.const(eps)))
        y = w("Div", w("Sub", cube, w.column(given[3])), w.column(root))
        y = w("Add", w("Mul", y, w.column(given[1])), w.column(given[2]))
    elif kind == "InstanceNormalization":
        y = w("Add", w("Mul", w.normed(cube, eps), w.column(given[1])), w.column(given[2]))
    else:
        groups = int(a["num_groups"])
        inner = w("Shape", cube)
        y = w.normed(w("Reshape", x, w.const([0, groups, -1], np.int64)), eps)
        scale, shift = w.column(given[1]), w.column(given[2])
        # Gamma and beta are per group.
        if opset < 21:
            y = w("Reshape", w("Add", w("Mul", y, scale), shift), inner)
        else:
            y = w("Add", w("Mul", w("Reshape", y, inner), scale), shift)
    w("Reshape", y, shape, out=out)
    return w.nodes
