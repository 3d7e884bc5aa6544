"""What was proved is what is written: a node that changes between its proof and the file is found."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from normdeploy.errors import ExportError
from normdeploy.graphs.graph import Graph
from normdeploy.rewriting.norm_optimizer import optimize_norms

NORM = """u = ReduceMean(t, last) d = Sub(t, u) q = Mul(d, d) v = ReduceMean(q, last) e = Add(v, eps) r = Sqrt(e) n =
Div(d, r)
    g = Mul(n, gamma) y = Add(g, beta)"""


def constants() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {name: rng.uniform(0.5, 1.5, 8) for name in ("gamma", "beta", "mean", "variance")}
    return {**made, "eps": np.array(1e-5), "w": rng.standard_normal((8, 8, 3, 3)), "last": np.array([-1])}


def model(body: str, shape: str, names: tuple[str, ...]) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> net (float[{shape}] t) => (float[{shape}] y) {{ {body} }}'
    )
    for name, value in constants().items():
        if name in names:
            proto.graph.initializer.append(
                numpy_helper.from_array(value if name == "last" else value.astype(np.float32), name)
            )
    return proto


def by_hand() -> onnx.ModelProto:
    return model(NORM, "N, 8", ("gamma", "beta", "eps", "last"))


def branched() -> onnx.ModelProto:
    """The norm in both branches of an If."""
    inner = by_hand().graph
    branch = onnx.GraphProto(name="b", node=inner.node, initializer=inner.initializer, output=inner.output)
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> net (float[N, 8] t, bool c) => (float[N, 8] z) { z = If(c) }'
    )
    for name in ("then_branch", "else_branch"):
        proto.graph.node[0].attribute.append(onnx.helper.make_attribute(name, branch))
    return proto


def twice() -> onnx.ModelProto:
    """Two norms with the same constants, of which one is changed."""
    first = re.sub(r"\by\b", "f", NORM)
    second = re.sub(r"\b([udqvernga])\b", r"\g<1>2", re.sub(r"\bt\b", "f", NORM))
    return model(first + second, "N, 8", ("gamma", "beta", "eps", "last"))


def folded() -> onnx.ModelProto:
    body = "c = Conv <pads = [1, 1, 1, 1]> (t, w) y = BatchNormalization(c, gamma, beta, mean, variance)"
    return model(body, "N, 8, H, W", ("gamma", "beta", "mean", "variance", "w"))


def each(proto: onnx.GraphProto, op: str) -> list[tuple[onnx.GraphProto, onnx.NodeProto]]:
    found = [(proto, n) for n in proto.node if n.op_type == op]
    return found + [pair for n in proto.node for a in n.attribute if a.HasField("g") for pair in each(a.g, op)]


def other_epsilon(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    next(a for a in node.attribute if a.name == "epsilon").f *= 1 + 2.0**-23


def another_order(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    held = next(t for t in graph.initializer if t.name == node.input[1])
    held.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(held)[::-1].copy(), held.name))


def other_type(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    held = next(t for t in graph.initializer if t.name == node.input[1])
    held.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(held).astype(np.float64), held.name))


def one_input_less(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    del node.input[2]


def other_pads(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    next(a for a in node.attribute if a.name == "pads").ints[:] = [0, 1, 2, 1]


EDITS = [
    *((by_hand, "LayerNormalization", edit) for edit in (other_epsilon, another_order, other_type, one_input_less)),
    *((twice, "LayerNormalization", edit) for edit in (other_epsilon,)),
    *((branched, "LayerNormalization", edit) for edit in (other_epsilon, another_order)),
    *((folded, "Conv", edit) for edit in (another_order, other_pads, one_input_less)),
]


@pytest.mark.parametrize(("make", "op", "edit"), EDITS)
def test_a_node_that_changes_after_its_proof_is_found(
    make: Callable[[], onnx.ModelProto],
    op: str,
    edit: Callable[[onnx.GraphProto, onnx.NodeProto], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, changed = Graph.to_proto, []

    def wrong(self: Graph) -> onnx.ModelProto:
        out = right(self)
        for graph, node in each(out.graph, op)[-1:]:
            edit(graph, node)
            changed.append(node)
        return out

    assert {f.status for f in optimize_norms(make())[1].findings} <= {"fused", "folded"}
    monkeypatch.setattr(Graph, "to_proto", wrong)
    with pytest.raises(ExportError, match="in the file differs from the proved one"):
        optimize_norms(make())
    assert changed
