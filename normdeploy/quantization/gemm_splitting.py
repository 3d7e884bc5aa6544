"""Split Gemms into MatMul and Add, for layers whose input range is measured at run time.

For integer products in such layers, onnxruntime has the op MatMulInteger, but no integer Gemm.

    Gemm(x, w, c) = x·w + c,  for alpha = beta = 1 and x not transposed     (ONNX operator schema Gemm-13)
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..graphs.proto_queries import all_names, drop_unused_initializers
from ..storage.onnx_domains import is_standard
from ..storage.proto_traversal import attribute_values, copy_model, unique_name


def split_gemms(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Split each plain Gemm with a constant float32 weight into MatMul and Add.

    The weight is [in, out], or [out, in] if the Gemm transposes it. The last new node keeps the name of the Gemm's
    result.

    Returns:
        a changed copy; ``proto`` itself if no Gemm can be split.
    """
    held = {t.name: t for t in proto.graph.initializer if t.data_type == onnx.TensorProto.FLOAT}
    for value in proto.graph.input:
        held.pop(value.name, None)
    if not any(_is_plain_gemm(n) and n.input[1] in held for n in proto.graph.node):
        return proto
    out = copy_model(proto)
    taken, turned, nodes = set(all_names(out.graph)), dict[str, str](), list[onnx.NodeProto]()

    for node in out.graph.node:
        if not _is_plain_gemm(node) or node.input[1] not in held:
            nodes.append(node)
            continue
        x, weight, *c = node.input
        if any(a.name == "transB" and a.i for a in node.attribute):
            if weight not in turned:
                turned[weight] = unique_name(f"{weight}_transposed", taken)
                values = np.ascontiguousarray(numpy_helper.to_array(held[weight]).T)
                out.graph.initializer.append(numpy_helper.from_array(values, turned[weight]))
            weight = turned[weight]
        biased = any(c)
        if biased:
            product = unique_name(f"{node.output[0]}_product", taken)
        else:
            product = node.output[0]
        made = [helper.make_node("MatMul", [x, weight], [product], name=product if biased else node.name)]
        if biased:
            made.append(helper.make_node("Add", [product, *c], list(node.output), name=node.name))
        for one in made:
            one.metadata_props.extend(node.metadata_props)
        nodes += made
    del out.graph.node[:]
    out.graph.node.extend(nodes)
    return drop_unused_initializers(out)


def _is_plain_gemm(node: onnx.NodeProto) -> bool:
    if node.op_type != "Gemm" or not is_standard(node):
        return False
    given = attribute_values(node)
    return not given.get("transA", 0) and given.get("alpha", 1.0) == 1.0 and given.get("beta", 1.0) == 1.0
