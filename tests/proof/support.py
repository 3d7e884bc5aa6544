"""Two ways to compute something, written as ONNX text in one graph, and whether they are proved to be one function."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from normdeploy.evaluate import evaluator
from normdeploy.graphs.graph import Graph
from normdeploy.graphs.region import Region, compile_region
from normdeploy.proof.equivalence import equivalence_of_regions
from normdeploy.proof.identity_check import Identity
from normdeploy.proof.proof_errors import NotProved, ProofFailure
from normdeploy.proof.prover import prove

BY_HAND = """
    u = ReduceMean(x, last)
    d = Sub(x, u)
    q = Mul(d, d)
    v = ReduceMean(q, last)
    e = Add(v, eps)
    r = Sqrt(e)
    n = Div(d, r)
    g = Mul(n, gamma)
    before = Add(g, beta)"""
NODE = "after = LayerNormalization <axis = -1, epsilon = 1e-5> (x, gamma, beta)"


def graph_of(
    body: str, shape: str = "B, S, 16", leaves: Sequence[str] = (), opset: int = 21, **constants: object
) -> Graph:
    """A graph that computes ``before`` and ``after`` from x and ``leaves`` ("name: dims"); ``constants``: arrays by
    name.

    There are gamma and beta of 16 elements, last (axis −1), and eps (1e-5).
    """
    rng = np.random.default_rng(3)
    held: dict[str, np.ndarray] = {
        "gamma": rng.uniform(0.5, 1.5, 16).astype(np.float32),
        "beta": rng.standard_normal(16).astype(np.float32),
        "last": np.array([-1]),
        "eps": np.float32(1e-5),
    }
    for name, value in constants.items():
        array = np.asarray(value)
        held[name] = array.astype(np.float32) if array.dtype == np.float64 else array
    inputs = ", ".join(f"float[{dims}] {name}" for name, dims in [("x", shape), *(leaf.split(": ") for leaf in leaves)])
    imports = f'"" : {opset}, "com.microsoft" : 1, "normdeploy" : 1'
    text = f"<ir_version: 10, opset_import: [{imports}]> g ({inputs}) => (float before, float after) {{ {body} }}"
    model = onnx.parser.parse_model(text)
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    used = {i for n in model.graph.node for i in n.input}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(array, name) for name, array in held.items() if name in used
    )
    return Graph(model)


def regions(graph: Graph) -> tuple[Region, Region]:
    tensors = {t.name: t for n in graph.nodes for t in (*n.inputs, *n.outputs)}
    leaves = [tensors[i.name] for i in graph.proto.graph.input if i.name in tensors]
    found = tuple(compile_region(graph, tensors[name], leaves) for name in ("before", "after"))
    assert isinstance(found[0], Region), found[0]
    assert isinstance(found[1], Region), found[1]
    return found[0], found[1]


def judged(body: str, **how: object) -> Identity | NotProved:
    """What the prover says of ``before`` and ``after``."""
    try:
        before, after = regions(graph_of(body, **how))  # type: ignore[arg-type]
        with evaluator.silence_numpy():
            return prove(equivalence_of_regions([before], [after]))
    except NotProved as e:
        return e


def proved(body: str, **how: object) -> Identity:
    found = judged(body, **how)
    assert isinstance(found, Identity), found
    return found


def refused(body: str, *why: ProofFailure, **how: object) -> NotProved:
    """It is refused, for one of the reasons ``why``."""
    found = judged(body, **how)
    assert isinstance(found, NotProved), "it was proved"
    assert found.why in why, (found.why, found.reason)
    return found
