"""DynamicQuantizeLSTM is what its Scan says: onnxruntime's kernel differs by a code where float32 rounds elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from normdeploy.graphs.qoperator_expansion import expand_qoperators, unexpandable_ops
from normdeploy.graphs.quantization_info import quantization_parameters
from normdeploy.runtimes.ort_runner import OrtRunner
from normdeploy.runtimes.quantized_float64 import QuantizedRunner
from normdeploy.runtimes.rounding_draws import RoundingDraw

TIME, BATCH, INPUT, HIDDEN = 5, 3, 4, 6
STEP = 2 / 255  # of a state in (-1, 1)


def model(*, given: str = "", columns: bool = False, **attributes: Any) -> onnx.ModelProto:
    """Write one node; ``given``: its inputs beyond the weights, of "B", "H" and "C"."""
    rng = np.random.default_rng(0)
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    scales = (directions, 4 * HIDDEN) if columns else (directions,)
    # Codes below 64: some processors add pairs of products in 16 bits, where larger ones saturate.
    values: dict[str, np.ndarray] = {
        "W": rng.integers(-60, 60, (directions, INPUT, 4 * HIDDEN)).astype(np.int8),
        "R": rng.integers(-60, 60, (directions, HIDDEN, 4 * HIDDEN)).astype(np.int8),
        "B": rng.standard_normal((directions, 8 * HIDDEN)).astype(np.float32),
        "H": rng.uniform(-0.7, 0.7, (directions, BATCH, HIDDEN)).astype(np.float32),
        "C": rng.standard_normal((directions, BATCH, HIDDEN)).astype(np.float32),
        "lengths": np.full(BATCH, TIME, np.int32),
        "Ws": rng.uniform(0.01, 0.02, scales).astype(np.float32),
        "Rs": rng.uniform(0.01, 0.02, scales).astype(np.float32),
        "z": np.zeros(scales, np.int8),
    }
    # Threads that share the batch quantize their rows by the range of these: it is the same.
    values["H"][..., :2] = [-1, 0.7]
    optional = [name if name in given.split() else "" for name in ("B", "lengths", "H", "C")]
    inputs = ["x", "W", "R", *optional, "", "Ws", "z", "Rs", "z"]
    outputs = ["y", "h", "c"]
    node = helper.make_node(
        "DynamicQuantizeLSTM", inputs, outputs, "n", domain="com.microsoft", hidden_size=HIDDEN, **attributes
    )
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [TIME, BATCH, INPUT])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in values.items() if name in inputs],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def feeds() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).standard_normal((TIME, BATCH, INPUT)).astype(np.float32)}


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("given", ["", "B", "B H C"])
@pytest.mark.parametrize("columns", [False, True])
def test_written_computes_what_the_kernel_computes(direction: str, given: str, columns: bool) -> None:
    proto = model(given=given, columns=columns, direction=direction)
    with OrtRunner(proto, optimize=False) as runner:
        ran = runner.infer(feeds())
    got = QuantizedRunner(proto).infer(feeds())
    for name, value in ran.items():
        assert got[name].shape == value.shape
        assert np.abs(got[name] - value).max() < STEP
    # A code that falls to the other side at one step is passed on to the next: the first step has none before it.
    apart = np.abs(got["y"] - ran["y"]).max((2, 3))
    firsts = {"forward": apart[:1], "reverse": apart[-1:], "bidirectional": apart[[0, -1], [0, -1]]}
    assert firsts[direction].max() < 1e-6
    assert not unexpandable_ops(proto)
    assert quantization_parameters(proto) == {"Ws", "Rs", "z"}
    assert {node.name for node in expand_qoperators(proto).graph.node} == {"n"}


def test_drawn_rounds_the_states_too() -> None:
    runner = QuantizedRunner(model(given="B"))
    exact = runner.run_with_draw(feeds(), RoundingDraw("exact"))["y"]
    assert 0 < np.abs(runner.run_with_draw(feeds(), RoundingDraw(0))["y"] - exact).max() < 10 * STEP
    assert 0 < np.abs(runner.run_with_draw(feeds(), RoundingDraw("exact", 0))["y"] - exact).max() < 10 * STEP


def test_node_of_another_form_stays_sealed() -> None:
    clipped = model(clip=3.0)
    own = model(activations=["Relu", "Tanh", "Tanh"])
    lengths = model(given="lengths")
    for proto in (clipped, own, lengths):
        assert unexpandable_ops(proto) == ("DynamicQuantizeLSTM",)


def test_body_rounds_as_the_graph_around_it() -> None:
    """The float form of a file whose branch quantizes is not its rounded form."""
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[2, 8] x, bool b) => (float[2, 8] y) {
      y = If (b) <
        then_branch: graph = t () => (float[2, 8] u) {
          q, s, z = DynamicQuantizeLinear (x)
          u = DequantizeLinear (q, s, z)
        },
        else_branch: graph = e () => (float[2, 8] v) { v = Identity (x) }
      >
    }
    """
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    runner = QuantizedRunner(parser.parse_model(text))
    given = {"x": x, "b": np.array(True)}
    assert np.abs(runner.run_with_draw(given, RoundingDraw("exact"))["y"] - x).max() < 1e-12
    assert np.abs(runner.run_with_draw(given, RoundingDraw())["y"] - x).max() > 1e-4
