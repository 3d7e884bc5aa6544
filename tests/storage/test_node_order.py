"""Files whose nodes stand in no valid order: put into one at reading; a circle is refused by the name of a node in
it."""

from __future__ import annotations

import random
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper, parser

from normdeploy.errors import GraphError
from normdeploy.rewriting.norm_optimizer import optimize_norms
from normdeploy.storage.node_order import sort_nodes, with_sorted_nodes
from normdeploy.storage.onnx_files import load_onnx
from normdeploy.verbs.inspect.norm_census import take_census
from tests.graphs.test_subgraphs import CONSTANTS, EPSILON_GIVEN, FUNCTIONS, HEAD, LAYER_NORM

NORM = (
    f"{HEAD} net (float[N,8] h, bool c) => (float[N,8] y) <{CONSTANTS}> {{ {LAYER_NORM.format(out='a')} y = Relu(a) }}"
)
IN_A_BODY = f"""{HEAD} net (float[N,8] x, bool c) => (float[N,8] y) <{CONSTANTS}> {{ h = Relu(x)
    y = If(c) <then_branch = t () => (float[N,8] y) {{ {LAYER_NORM.format(out="y")} }},
                 else_branch = e () => (float[N,8] b) {{ b = Exp(h) }}> }}"""
IN_A_FUNCTION = f"""{FUNCTIONS} net (float[N,8] x) => (float[N,8] y) <{CONSTANTS}> {{ a = my.norm<epsilon=1e-5>(x, g, s)
y = Relu(a) }}
    {EPSILON_GIVEN}"""


def reversed_nodes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """``proto`` with the nodes of every graph in it written backwards."""
    turned = onnx.ModelProto()
    turned.CopyFrom(proto)
    bodies = [a.g for n in turned.graph.node for a in n.attribute if a.HasField("g")]
    for holder in (*bodies, turned.graph, *turned.functions):
        nodes = list(holder.node)[::-1]
        del holder.node[:]
        holder.node.extend(nodes)
    return turned


@pytest.mark.parametrize("text", [NORM, IN_A_BODY, IN_A_FUNCTION], ids=["graph", "body", "function"])
def test_a_file_written_backwards_is_the_same_file(text: str, tmp_path: Path) -> None:
    proto = parser.parse_model(text)
    turned = reversed_nodes(proto)
    before = turned.SerializeToString(deterministic=True)
    out, summary = optimize_norms(turned)
    assert turned.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(out, full_check=True)
    assert [f.status for f in summary.findings] == ["fused"]
    assert out == optimize_norms(with_sorted_nodes(turned))[0]
    onnx.save(turned, tmp_path / "m.onnx")
    assert load_onnx(tmp_path / "m.onnx") == with_sorted_nodes(turned)
    assert [f.status for f in take_census(turned, explain="y" if text is not NORM else "a").findings] == ["fused"]


def test_what_stands_in_order_stays_as_it_is() -> None:
    proto = parser.parse_model(IN_A_BODY)
    assert with_sorted_nodes(proto) is proto
    late = parser.parse_model(
        f"{HEAD} net (float[8] x) => (float[8] y) {{ a = Relu(x) y = Add(a, k) b = Exp(x) k = Cast<to = 1>(h) h ="
        " Cast<to = 10>(b) }"
    )
    assert [n.output[0] for n in with_sorted_nodes(late).graph.node] == ["a", "b", "h", "k", "y"]


def test_shuffled_nodes_stand_behind_what_they_read() -> None:
    """A chain as deep as the graph: no recursion. What a body reads counts."""
    count = 20_000
    nodes = [helper.make_node("Add", [f"t{i}", f"t{i // 2}"], [f"t{i + 1}"]) for i in range(count)]
    body = helper.make_graph(
        [helper.make_node("Neg", [f"t{count}"], ["b"])], "b", [], [helper.make_tensor_value_info("b", 1, [2])]
    )
    nodes.append(helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body))
    random.Random(5).shuffle(nodes)
    kinds = (("t0", TensorProto.FLOAT), ("c", TensorProto.BOOL), ("y", TensorProto.FLOAT))
    t0, c, y = (
        helper.make_tensor_value_info(name, kind, [2] if kind == TensorProto.FLOAT else []) for name, kind in kinds
    )
    proto = helper.make_model(helper.make_graph(nodes, "g", [t0, c], [y]))
    assert sort_nodes(proto)
    assert [n.output[0] for n in proto.graph.node] == [*(f"t{i + 1}" for i in range(count)), "y"]
    assert not sort_nodes(proto)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            f"{HEAD} net (float[8] x) => (float[8] y) {{ y = Add(x, m) m = Mul(y, x) }}",
            "Add 'y' needs its own result 'y' through Mul 'm'",
        ),
        (
            f"{HEAD} net (float[8] x) => (float[8] y) {{ z = Relu(x) a = Add(z, a) y = Neg(a) }}",
            "Add 'a' needs its own result 'a': ",
        ),
        (IN_A_BODY.replace("h = Relu(x)", "h = Add(x, y)"), "Add 'h' needs its own result 'h' through If 'y'"),
        (
            IN_A_BODY.replace("b = Exp(h)", "b = Add(i, h) i = Exp(b)"),
            "Add 'b' needs its own result 'b' through Exp 'i'",
        ),
    ],
    ids=["two", "one", "through a body", "in a body"],
)
def test_a_circle_is_refused_by_the_name_of_a_node(text: str, said: str, tmp_path: Path) -> None:
    proto = parser.parse_model(text)
    with pytest.raises(GraphError, match=said):
        optimize_norms(proto)
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(GraphError, match=said):
        load_onnx(tmp_path / "m.onnx")
