"""What constants alone feed is computed once, where the file does not grow by it, and norms in it are told of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import normdeploy
from normdeploy.rewriting.norm_optimizer import optimize_norms
from tests.support import run_onnxruntime

WIDTH = 48


class Standardized(nn.Conv2d):
    """Weight standardization: by batch norm's statistics (NF-ResNet's), or by hand, also with an unbiased variance."""

    def __init__(self, by_hand: bool, unbiased: bool = False) -> None:
        super().__init__(WIDTH, 64, 3)
        self.gain, self.by_hand = nn.Parameter(torch.randn(64, 1, 1, 1)), by_hand
        self.unbiased = unbiased

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.by_hand:
            d = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            squares = d.pow(2).mean((1, 2, 3), keepdim=True)
            variance = self.weight.var((1, 2, 3), keepdim=True) if self.unbiased else squares
            weight = d / (variance + 1e-6).sqrt() * self.gain
        else:
            rows = self.weight.reshape(1, 64, -1)
            weight = F.batch_norm(
                rows, None, None, weight=(self.gain * 0.3).view(-1), training=True, momentum=0.0, eps=1e-6
            )
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias)


class Learned(nn.Module):
    """A learned constant, normalized and modulated by data: the first block of StyleGAN."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand, self.start, self.style = by_hand, nn.Parameter(torch.randn(1, 8, 4, 4)), nn.Linear(5, 8)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        x = self.start.expand(z.shape[0], -1, -1, -1) if self.by_hand else self.start.repeat(z.shape[0], 1, 1, 1)
        if self.by_hand:
            d = x - x.mean((2, 3), keepdim=True)
            x = d * torch.rsqrt(d.pow(2).mean((2, 3), keepdim=True) + 1e-5)
        else:
            x = F.instance_norm(x)
        return x * (1 + self.style(z)[:, :, None, None])


class Positions(nn.Module):
    """DeBERTa's keys of relative positions: a product of weights, as many rows as there are positions."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.table, self.key = nn.Parameter(torch.randn(positions, 192)), nn.Linear(192, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.key(F.layer_norm(self.table, (192,))).transpose(0, 1)


@pytest.mark.parametrize(
    ("net", "x", "kind", "ops"),
    [
        (Standardized(False), (1, WIDTH, 5, 5), "weight standardization", {"Conv": 1}),
        (Standardized(True), (1, WIDTH, 5, 5), "weight standardization", {"Conv": 1}),
        # torch computes n of n/(n − 1) from the shape.
        (Standardized(True, unbiased=True), (1, WIDTH, 5, 5), "weight standardization", {"Conv": 1}),
        (
            nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 64, 5, groups=2), dim=2),
            (2, 8, 9),
            "weight norm",
            {"Conv": 1},
        ),
        (Learned(False), (2, 5), "InstanceNorm", None),
        (Learned(True), (2, 5), "norm of a constant", None),
    ],
    ids=["batch statistics", "by hand", "unbiased", "weight norm", "instance norm of a constant", "the same by hand"],
)
def test_a_norm_of_constants_is_computed_once_and_told_of(
    net: nn.Module, x: tuple[int, ...], kind: str, ops: dict[str, int] | None, tmp_path: str
) -> None:
    torch.manual_seed(0)
    args, path = (torch.randn(x),), f"{tmp_path}/net.onnx"
    made = normdeploy.export(net.eval(), args, output=path)
    assert [(f.kind, f.status) for f in made.summary.findings] == [(kind, "folded")]
    left = {n.op_type for n in made.proto.graph.node}
    assert not left & {"ReduceMean", "ReduceL2", "Sqrt", "BatchNormalization", "InstanceNormalization"}
    assert ops is None or made.summary.ops_after == ops
    assert normdeploy.verify(net, path, args)


def test_each_stored_number_is_the_exact_one_rounded_once() -> None:
    net = Standardized(True).eval()
    proto = normdeploy.export(net, (torch.randn(1, WIDTH, 5, 5),)).proto
    (stored,) = (numpy_helper.to_array(t) for t in proto.graph.initializer if len(t.dims) == 4)
    w = net.weight.detach().double()
    d = w - w.mean((1, 2, 3), keepdim=True)
    exact = d / (d.pow(2).mean((1, 2, 3), keepdim=True) + float(np.float32(1e-6))).sqrt() * net.gain.detach().double()
    assert np.array_equal(stored, exact.numpy().astype(np.float32))


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_norm_of_a_constant_repeated_along_an_open_batch_is_fused(by_hand: bool) -> None:
    made = normdeploy.export(Learned(by_hand).eval(), (torch.randn(2, 5),), inputs=["z[batch,5]"], dims=["batch=1:2:8"])
    assert [f.status for f in made.summary.findings] == ["fused"]
    assert made.summary.findings[0].certificate


class StartTokens(nn.Module):
    """Decoder whose first tokens are always the same: its first norm reads rows of a table, one row for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gain = nn.Embedding(7, 32), nn.Parameter(torch.rand(32) + 0.5)
        self.offsets = torch.tensor([1, 4])

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        tokens = torch.full((z.shape[0], 2), 1, dtype=torch.int64) + self.offsets
        x = self.table(tokens).sum(1)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.gain + z.sum(-1, keepdim=True)


class EncodedPositions(nn.Module):
    def forward(self, z: torch.Tensor) -> torch.Tensor:
        places = torch.arange(z.shape[0]).float()[:, None] * torch.linspace(0.1, 1.0, 32)
        x = torch.sin(places)
        d = x - x.mean(-1, keepdim=True)
        return d / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-5) + z.sum(-1, keepdim=True)


class CountedPositions(nn.Module):
    def forward(self, z: torch.Tensor) -> torch.Tensor:
        x = torch.arange(z.shape[0]).float()[:, None] * torch.linspace(-1.0, 1.0, 32)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) + z.sum(-1, keepdim=True)


@pytest.mark.parametrize("net", [StartTokens(), EncodedPositions(), CountedPositions()], ids=lambda n: type(n).__name__)
def test_a_norm_of_data_that_only_an_open_batch_determines_is_fused(net: nn.Module, tmp_path: Path) -> None:
    example = (torch.randn(2, 5),)
    path = tmp_path / "net.onnx"
    made = normdeploy.export(net.eval(), example, output=path, inputs=["z[batch,5]"], dims=["batch=1:2:8"])
    assert [f.status for f in made.summary.findings] == ["fused"]
    assert normdeploy.verify(net, path, example)


def test_a_product_of_weights_is_stored_where_it_is_smaller() -> None:
    small = normdeploy.export(Positions(64).eval(), (torch.randn(1, 5, 192),))
    assert small.summary.ops_after == {"MatMul": 1}
    assert [(f.kind, f.status) for f in small.summary.findings] == [("LayerNorm", "folded")]
    assert small.proto.ByteSize() < 64 * 192 * 4 + 4096
    large = normdeploy.export(Positions(1024).eval(), (torch.randn(1, 5, 192),))
    weights = (1024 + 192 + 1) * 192 * 4
    assert large.summary.ops_after["MatMul"] == 1, (
        "the weight of the product costs less than nothing where the table has more rows"
    )
    assert large.proto.ByteSize() < weights + 4096


# ------------------------------------------------------------------ graphs

FLOAT = TensorProto.FLOAT


def graph(
    nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], x: tuple[int, ...], outputs: int = 1
) -> onnx.ModelProto:
    given = [helper.make_tensor_value_info("x", FLOAT, x)]
    results = [helper.make_tensor_value_info(f"y{i or ''}", FLOAT, None) for i in range(outputs)]
    stored = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "g", given, results, stored), opset_imports=[helper.make_opsetid("", 21)]
    )
    model.ir_version = 10
    return model


def of(op: str, inputs: str, output: str, **attrs: object) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), [output], **attrs)


NORM = [of("ReduceL2", "w axis", "n"), of("Div", "w n", "u")]
WEIGHT = {"w": np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32), "axis": np.array([1])}


def left(proto: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in proto.graph.node]


def test_what_steps_read_is_not_rounded_otherwise() -> None:
    nodes = [*NORM, of("Mul", "u s", "t"), of("Round", "t", "q"), of("MatMul", "x q", "y")]
    before = graph(nodes, WEIGHT | {"s": np.float32(127)}, (2, 64))
    out, summary = optimize_norms(before)
    assert left(out) == left(before)
    assert [(f.kind, f.status) for f in summary.findings] == [("weight norm", "refused")]
    assert "step" in summary.findings[0].reason
    stored = graph([of("Round", "w", "q"), of("MatMul", "q w", "p"), of("MatMul", "x p", "y")], WEIGHT, (2, 64))
    assert left(optimize_norms(stored)[0]) == ["MatMul"], "a step of stored numbers is the same in every type"


def test_a_cast_to_a_narrower_type_stays() -> None:
    half, single = TensorProto.FLOAT16, FLOAT
    nodes = [*NORM, of("Cast", "u", "h", to=half), of("Cast", "h", "v", to=single), of("MatMul", "x v", "y")]
    before = graph(nodes, WEIGHT, (2, 64))
    out, _ = optimize_norms(before)
    x = {"x": np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)}
    assert np.array_equal(run_onnxruntime(before, x)[0], run_onnxruntime(out, x)[0])
    assert "Cast" in left(out)


def test_a_weight_that_others_read_is_not_stored_twice() -> None:
    weights = WEIGHT | {
        "w": np.random.default_rng(0).standard_normal((512, 64)).astype(np.float32),
        "g": np.ones(64, np.float32),
    }
    behind = [of("Transpose", "u", "v"), of("MatMul", "x v", "y"), of("MatMul", "y w", "y1")]
    before = graph([*NORM, *behind], weights, (2, 64), outputs=2)
    out, summary = optimize_norms(before)
    assert left(out) == ["Div", "Transpose", "MatMul", "MatMul"], "the norms of the rows alone are stored"
    assert [f.status for f in summary.findings] == ["folded"]
    assert out.ByteSize() < before.ByteSize() + 512 * 4 + 64
    before = graph([of("LayerNormalization", "w g", "u"), *behind], weights, (2, 64), outputs=2)
    out, summary = optimize_norms(before)
    assert left(out) == left(before)
    assert [f.status for f in summary.findings] == ["refused"]
    assert "add 130,816 bytes" in summary.findings[0].reason


def test_an_expansion_is_not_written_out() -> None:
    big = {"w": np.ones((64, 64), np.float32), "shape": np.array([4096, 64, 64])}
    nodes = [of("Expand", "u shape", "e"), of("MatMul", "x e", "y")]
    out, summary = optimize_norms(graph([*NORM, *nodes], WEIGHT | big, (2, 64)))
    assert left(out) == ["Expand", "MatMul"]
    assert [f.status for f in summary.findings] == ["folded"]
    assert out.ByteSize() < 3 * 64 * 64 * 4


def test_a_hostile_size_is_not_computed() -> None:
    weights = WEIGHT | {"shape": np.array([2**20, 2**20]), "one": np.float32(1)}
    nodes = [of("Expand", "one shape", "e"), of("ReduceL2", "e axis", "n"), of("MatMul", "x n", "y")]
    before = graph(nodes, weights, (2, 2**20))
    out, summary = optimize_norms(before)
    assert left(out) == left(before)
    assert [f.status for f in summary.findings] == ["refused"]


def test_an_overflow_stays_as_it_was() -> None:
    nodes = [of("Mul", "w w", "s"), of("ReduceSum", "s axis", "n"), of("MatMul", "x n", "y")]
    huge = {"w": np.full((64, 64), 3e38, np.float32)}
    assert left(optimize_norms(graph(nodes, WEIGHT | huge, (2, 64)))[0]) == ["Mul", "ReduceSum", "MatMul"]


def test_a_constant_output_keeps_its_nodes() -> None:
    before = graph([*NORM, of("Transpose", "u", "y1"), of("MatMul", "x u", "y")], WEIGHT, (2, 64), outputs=2)
    out, _ = optimize_norms(before)
    x = {"x": np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)}
    for old, new in zip(run_onnxruntime(before, x), run_onnxruntime(out, x), strict=True):
        assert np.abs(old - new).max() <= 1e-5


def test_what_is_computed_once_can_be_taken_back() -> None:
    from normdeploy.rewriting import norm_optimizer
    from normdeploy.rewriting.rewrite_ledger import RewriteOptions

    before = graph([*NORM, of("MatMul", "x u", "y")], WEIGHT, (2, 64))
    out, _, taken = norm_optimizer.optimize_with_steps(before, RewriteOptions())
    assert left(out) == ["MatMul"]
    ((step, told),) = taken
    again, summary, _ = norm_optimizer.optimize_with_steps(
        before, RewriteOptions(undone={step: norm_optimizer.undone_finding(told, "a reason")})
    )
    assert left(again) == left(before)
    assert "a reason" in summary.findings[0].reason


@pytest.mark.parametrize("narrow", [TensorProto.BFLOAT16, TensorProto.FLOAT16])
def test_whole_numbers_that_a_cast_rounds_stay(narrow: int) -> None:
    """Positions of a rotary embedding in half precision: float64 would not round them."""
    nodes = [
        of("Cast", "places", "h", to=narrow),
        of("Cast", "h", "f", to=TensorProto.FLOAT),
        of("MatMul", "f rates", "t"),
    ]
    nodes += [of("Sin", "t", "s"), of("MatMul", "x s", "y")]
    held = {"places": np.arange(4033, 4097).reshape(64, 1), "rates": np.linspace(1, 1e-4, 64, dtype=np.float32)[None]}
    before = graph(nodes, held, (2, 64))
    out, _ = optimize_norms(before)
    assert "Cast" in left(out)
    x = {"x": np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)}
    np.testing.assert_array_equal(run_onnxruntime(before, x)[0], run_onnxruntime(out, x)[0])


@pytest.mark.parametrize("kind", [TensorProto.INT4, TensorProto.UINT4])
def test_casts_of_four_bit_integers_do_not_fail(kind: int) -> None:
    """numpy has no kind for them, and they have no mantissa."""
    nodes = [of("Cast", "table", "f", to=TensorProto.FLOAT), of("Cast", "f", "four", to=kind)]
    nodes += [of("Cast", "four", "g", to=TensorProto.FLOAT), of("Add", "x g", "y")]
    table = np.arange(64).reshape(1, 64).clip(0, 7).astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
    before = graph(nodes, {"table": table}, (2, 64))
    before.opset_import[0].version = 21
    before.ir_version = 10
    x = {"x": np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)}
    np.testing.assert_array_equal(run_onnxruntime(optimize_norms(before)[0], x)[0], run_onnxruntime(before, x)[0])


def test_casts_of_strings_stay() -> None:
    nodes = [of("Cast", "table", "f", to=TensorProto.FLOAT), of("Add", "x f", "y")]
    before = graph(nodes, {"table": np.array(["1.5"] * 64, object).reshape(1, 64)}, (2, 64))
    assert left(optimize_norms(before)[0]) == ["Cast", "Add"]


def test_whole_numbers_that_a_cast_holds_are_computed() -> None:
    nodes = [of("Cast", "places", "f", to=TensorProto.FLOAT), of("MatMul", "f rates", "t"), of("MatMul", "x t", "y")]
    held = {"places": np.arange(64).reshape(64, 1), "rates": np.linspace(1, 1e-4, 64, dtype=np.float32)[None]}
    assert left(optimize_norms(graph(nodes, held, (2, 64)))[0]) == ["MatMul"]


def test_a_proved_node_may_read_what_is_computed_afterwards() -> None:
    """Its seal is of the node that is written."""
    nodes = [of("MatMul", "a v", "g"), of("Add", "x other", "z"), of("LayerNormalization", "z g", "y", axis=-1)]
    rng = np.random.default_rng(0)
    held = {"a": rng.standard_normal((64, 64)), "v": rng.standard_normal(64), "other": rng.standard_normal((1, 64))}
    before = graph(nodes, {k: v.astype(np.float32) for k, v in held.items()}, (2, 64))
    out, _ = optimize_norms(before, fuse="portable")
    assert "MatMul" not in left(out)
    x = {"x": rng.standard_normal((2, 64)).astype(np.float32)}
    np.testing.assert_allclose(run_onnxruntime(out, x)[0], run_onnxruntime(before, x)[0], atol=1e-4)
