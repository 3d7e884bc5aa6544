"""What a file computes in, and verdicts on half-precision files that other tools wrote."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import normdeploy
from normdeploy.verbs.verify.compute_precision import find_compute_precision
from normdeploy.verbs.verify.runtime_candidates import STEPWISE
from tests.half_graphs import text


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.relu(self.a(x)))
        return self.c(x + torch.relu(self.b(x)))


SPEC = ["x[b=1:2:4,16]"]


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def folder(net: Net, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """torch's own float32, float16 and bfloat16 files of one net."""
    made = tmp_path_factory.mktemp("halves")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        sample = torch.randn(2, 16).to(dtype)
        dims = ({0: torch.export.Dim("b", min=1, max=4)},)
        path = made / f"{str(dtype).removeprefix('torch.')}.onnx"
        module = copy.deepcopy(net).to(dtype)
        torch.onnx.export(module, (sample,), path, dynamo=True, verbose=False, dynamic_shapes=dims, external_data=False)
    return made


def products(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [n for n in proto.graph.node if n.op_type in ("Gemm", "MatMul")]


def cast_result(proto: onnx.ModelProto, place: int, to: int, back: int) -> onnx.ModelProto:
    """Round the result of the product at ``place`` to a coarser type."""
    node = products(proto)[place]
    at = list(proto.graph.node).index(node)
    name = node.output[0]
    node.output[0] = f"{name}_exact"
    proto.graph.node.insert(at + 1, onnx.helper.make_node("Cast", [f"{name}_exact"], [f"{name}_coarse"], to=to))
    proto.graph.node.insert(at + 2, onnx.helper.make_node("Cast", [f"{name}_coarse"], [name], to=back))
    return proto


@pytest.mark.parametrize("how", ["float16", "bfloat16"])
def test_a_half_file_of_torch_is_verified_as_one(net: Net, folder: Path, how: str) -> None:
    comparison = normdeploy.verify(net, folder / f"{how}.onnx", inputs=SPEC)
    assert comparison, comparison.table()
    assert any(f"eager also ran in {how}" in note for note in comparison.notes)


@pytest.mark.parametrize(
    "options",
    [{}, {"keep_io_types": True}, {"keep_io_types": True, "op_block_list": ["LayerNormalization", "Relu"]}],
    ids=["all half", "float32 ends", "islands"],
)
def test_a_file_of_onnxruntimes_converter_is_verified(
    net: Net, folder: Path, options: dict[str, object], tmp_path: Path
) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    made = convert_float_to_float16(onnx.load(folder / "float32.onnx"), **options)
    onnx.save(made, tmp_path / "half.onnx")
    comparison = normdeploy.verify(net, tmp_path / "half.onnx", inputs=SPEC)
    assert comparison, comparison.table()


def test_a_weight_that_is_off_fails_in_a_half_file(net: Net, folder: Path, tmp_path: Path) -> None:
    proto = onnx.load(folder / "float16.onnx")
    tensor = next(t for t in proto.graph.initializer if list(t.dims) in ([32, 32],))
    array = numpy_helper.to_array(tensor).copy()
    array[3, 5] += np.float16(0.05) * np.abs(array).max()
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.save(proto, tmp_path / "wrong.onnx")
    assert not normdeploy.verify(net, tmp_path / "wrong.onnx", inputs=SPEC)


@pytest.mark.parametrize(("written", "to"), [("float32", TensorProto.FLOAT16), ("float32", TensorProto.BFLOAT16)])
def test_one_layer_of_lower_precision_fails_in_a_float32_file(
    net: Net, folder: Path, written: str, to: int, tmp_path: Path
) -> None:
    proto = cast_result(onnx.load(folder / f"{written}.onnx"), 1, to, TensorProto.FLOAT)
    assert not find_compute_precision(proto).precision
    onnx.save(proto, tmp_path / "wrong.onnx")
    assert not normdeploy.verify(net, tmp_path / "wrong.onnx", inputs=SPEC)


def test_one_layer_in_bfloat16_fails_in_a_float16_file(net: Net, folder: Path, tmp_path: Path) -> None:
    proto = cast_result(onnx.load(folder / "float16.onnx"), 1, TensorProto.BFLOAT16, TensorProto.FLOAT16)
    onnx.save(proto, tmp_path / "wrong.onnx")
    comparison = normdeploy.verify(net, tmp_path / "wrong.onnx", inputs=SPEC)
    assert not comparison
    assert any("have a coarser dtype than float16" in r.reason for r in comparison.results)


def test_a_record_does_not_make_a_file_half() -> None:
    proto = text("y = Relu(x)")
    proto.metadata_props.add(key="normdeploy.precision", value='{"to": "bf16"}')
    assert find_compute_precision(proto).precision == ""


def test_weights_stored_in_half_make_their_products_half() -> None:
    proto = text("v = Cast<to = 1>(w) y = MatMul(x, v)", w=np.eye(4, dtype=np.float16))
    assert find_compute_precision(proto).precision == "fp16"


@pytest.mark.parametrize("op", ["Conv2d", "GELU", "Hardswish", "CELU"])
def test_a_bfloat16_module_becomes_a_valid_file_that_is_judged(op: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 8, 3) if op == "Conv2d" else getattr(nn, op)()
    module = nn.Sequential(layer, nn.Flatten()).to(torch.bfloat16).eval()
    made = normdeploy.export(module, torch.randn(2, 3, 8, 8).bfloat16(), output=tmp_path / "m.onnx")
    onnx.checker.check_model(onnx.load(made.path), full_check=True)
    comparison = normdeploy.verify(made)
    assert comparison, comparison.table()


def test_the_opset_follows_an_activation_that_a_rewrite_wrote(tmp_path: Path) -> None:
    module = nn.Hardswish().bfloat16().eval()
    made = normdeploy.export(module, torch.randn(4, 8).bfloat16(), output=tmp_path / "m.onnx")
    onnx.checker.check_model(onnx.load(made.path), full_check=True)


def test_bodies_deep_inside_each_other_are_read_once() -> None:
    """Each visit of a body twice would take 2^27 of them here."""
    relu = helper.make_node("Relu", ["x"], ["z0"])
    body = helper.make_graph([relu], "g", [], [helper.make_tensor_value_info("z0", TensorProto.FLOAT, [2])])
    for depth in range(1, 28):
        out = helper.make_tensor_value_info(f"z{depth}", TensorProto.FLOAT, [2])
        # The other branch is short: the file would not fit otherwise.
        short = helper.make_graph(
            [helper.make_node("Relu", ["x"], ["e"])],
            "e",
            [],
            [helper.make_tensor_value_info("e", TensorProto.FLOAT, [2])],
        )
        node = helper.make_node("If", ["k"], [f"z{depth}"], then_branch=body, else_branch=short)
        body = helper.make_graph([node], f"g{depth}", [], [out])
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [2]),
        helper.make_tensor_value_info("k", TensorProto.BOOL, []),
    ]
    graph = helper.make_graph(list(body.node), "top", inputs, list(body.output))
    assert find_compute_precision(helper.make_model(graph)).precision == ""


ISLAND = """<ir_version: 8, opset_import: ["": 17]> net (float[batch,16] x) => (float[batch,16] y)
  <float epsilon = {{0.00001}}, float large = {{300.0}}> {{
    scaled = Mul (x, large)
    mean = ReduceMean <axes = [1]> (scaled)
    centered = Sub (scaled, mean)
    down = {down} (centered)
    product = {op}
    up = {up} (product)
    variance = ReduceMean <axes = [1]> (up)
    raised = Add (variance, epsilon)
    deviation = Sqrt (raised)
    y = Div (centered, deviation)
  }}"""


@pytest.mark.parametrize("to", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.parametrize("op", ["Mul (down, down)", "Abs (down)"])
def test_nodes_in_half_inside_a_float32_file_are_judged_in_half(op: str, to: int, tmp_path: Path) -> None:
    """onnxruntime's CPU provider computes them in float32, and drops the Casts, with its optimizer off too."""
    for name, down, up in (("wide", "Identity", "Identity"), ("island", f"Cast <to = {to}>", "Cast <to = 1>")):
        onnx.save(onnx.parser.parse_model(ISLAND.format(op=op, down=down, up=up)), tmp_path / f"{name}.onnx")
    comparison = normdeploy.verify(tmp_path / "wide.onnx", tmp_path / "island.onnx", seeds=2)
    assert not comparison
    assert {r.runtime for r in comparison.results if not r} >= {STEPWISE}
    assert not any("disable_specified_optimizers" in note for note in comparison.notes), comparison.notes
    assert any("computes 'product' in half precision" in note for note in comparison.notes), comparison.notes
