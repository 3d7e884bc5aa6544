"""Files with one planted error each, that a comparison at a few ordinary inputs lets pass: ``verify`` must fail every
one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser
from torch import nn

import normdeploy
from normdeploy.exporting.exporter import export_to_proto
from normdeploy.loading import from_module
from normdeploy.model import LoadedModel
from normdeploy.verbs.verify.comparison_result import Comparison
from normdeploy.verbs.verify.edge_cases import make_edge_cases
from normdeploy.verbs.verify.file_choices import ChoiceReader
from normdeploy.verbs.verify.file_comparison import compare_files

HEAD = '<ir_version: 8, opset_import: ["": 20]> planted '
SPECS = ["x:float32[batch=1:3:8,seq=1:6:40,16]"]
LARGEST = float(np.finfo(np.float32).max)


class Net(nn.Module):
    """A norm with a residual stream around it, which numbers that are not finite do not leave their row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(16, 24), nn.LayerNorm(24), nn.Linear(24, 16)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


@pytest.fixture(scope="module")
def net() -> LoadedModel:
    return from_module(Net().eval(), inputs=SPECS)


@pytest.fixture(scope="module")
def exported() -> onnx.ModelProto:
    return normdeploy.export(Net().eval(), inputs=SPECS).proto


def verified(model: LoadedModel, proto: onnx.ModelProto, folder: Path, seeds: int = 3) -> Comparison:
    onnx.save(proto, folder / "planted.onnx")
    return compare_files(model, folder / "planted.onnx", seeds=seeds)


def copied(proto: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    return copy


def before_input(proto: onnx.ModelProto, body: str) -> onnx.ModelProto:
    """``body`` makes ``y`` of ``x``, and all that read the input x read that instead."""
    planted = copied(proto)
    made = parser.parse_model(f"{HEAD} (float[a,b,c] x) => (float[a,b,c] y) {body}").graph
    for node in planted.graph.node:
        node.input[:] = ["y" if name == "x" else name for name in node.input]
    nodes = [*made.node, *planted.graph.node]
    del planted.graph.node[:]
    planted.graph.node.extend(nodes)
    planted.graph.initializer.extend(made.initializer)
    del planted.graph.value_info[:]
    return planted


def failed(comparison: Comparison) -> set[str]:
    """The cases in which onnxruntime's results fail."""
    assert all(r for r in comparison.results if r.runtime == "eager")
    return {r.case for r in comparison.results if not r}


def test_the_file_as_exported_passes(net: LoadedModel, exported: onnx.ModelProto, tmp_path: Path) -> None:
    assert verified(net, exported, tmp_path)
    same = before_input(exported, "{ y = Identity(x) }")
    assert verified(net, same, tmp_path), "the way in which errors are planted is none"


def test_nan_above_five(net: LoadedModel, exported: onnx.ModelProto, tmp_path: Path) -> None:
    planted = before_input(
        exported, "<float five = {5}, float zero = {0}> { n = Div(zero, zero) c = Greater(x, five) y = Where(c, n, x) }"
    )
    comparison = verified(net, planted, tmp_path)
    assert not comparison
    assert any("nan" in r.reason for r in comparison.results if not r)


@pytest.mark.parametrize(("axis", "size"), [(0, 5), (0, 7), (1, 2), (1, 33)])
def test_an_error_at_one_size(
    net: LoadedModel, exported: onnx.ModelProto, tmp_path: Path, axis: int, size: int
) -> None:
    body = f"""<int64[1] at = {{{axis}}}, int64[1] size = {{{size}}}, float f = {{1.01}}> {{
        s = Shape(x) n = Gather(s, at) c = Equal(n, size) w = Mul(x, f) y = Where(c, w, x) }}"""
    comparison = verified(net, before_input(exported, body), tmp_path)
    assert not comparison
    assert all(f"{('batch', 'seq')[axis]}={size}" in case for case in failed(comparison))


class Halves(nn.Module):
    """A large half, and a small one of sigmoids."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large, self.small = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([1e4 * self.large(x), 1e-4 * torch.sigmoid(self.small(x))], -1)


def test_tanh_for_sigmoid_in_the_small_half(tmp_path: Path) -> None:
    model = from_module(Halves().eval(), inputs=SPECS)
    proto = normdeploy.export(Halves().eval(), inputs=SPECS).proto
    assert verified(model, proto, tmp_path)
    next(n for n in proto.graph.node if n.op_type == "Sigmoid").op_type = "Tanh"
    comparison = verified(model, proto, tmp_path)
    assert failed(comparison)
    # far below an ulp of the large half, which is what one bound for all allows
    assert all(r.max_abs_error < np.spacing(np.float32(1e4)) for r in comparison.results if r.file)


@pytest.mark.parametrize("limits", [(-LARGEST, LARGEST), (-1e30, 1e30)])
def test_a_clamp_that_hides_inf(
    net: LoadedModel, exported: onnx.ModelProto, tmp_path: Path, limits: tuple[float, float]
) -> None:
    low, high = (
        numpy_helper.from_array(np.float32(limit), name) for name, limit in zip(("low", "high"), limits, strict=True)
    )
    planted = before_input(exported, "{ y = Clip(x, low, high) }")
    planted.graph.initializer.extend([low, high])
    comparison = verified(net, planted, tmp_path)
    assert {case.partition(" in ")[0] for case in failed(comparison)} <= {"one inf", "one -inf"}
    assert failed(comparison)


class Clamped(nn.Module):
    """An RMS norm whose input is kept finite: an Inf becomes 0, as its square is Inf all the same."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clamp(-self.limit, self.limit)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def test_a_clamp_that_is_lost(tmp_path: Path) -> None:
    model, unclamped = from_module(Clamped(LARGEST).eval(), inputs=SPECS), Clamped(np.inf).eval()
    assert verified(model, export_to_proto(model), tmp_path)
    comparison = verified(model, normdeploy.export(unclamped, inputs=SPECS).proto, tmp_path)
    assert {case.partition(" in ")[0] for case in failed(comparison)} <= {"one inf", "one -inf"}
    assert failed(comparison)


# ------------------------------------------------------------------ weights


class Folding(nn.Module):
    """Convolutions whose BatchNorm is folded, and one that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 6, 1), nn.Linear(6, 5)
        with torch.no_grad():
            assert self.norm.running_mean is not None
            assert self.norm.running_var is not None
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2)
            self.norm.weight.uniform_(0.5, 1.5)
            self.norm.bias.normal_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(torch.relu(self.norm(self.first(x)))).mean((2, 3)))


class Recurrent(nn.Module):
    """Its gates are packed in another order than torch's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(16, 12, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


NETS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "norm": (Net, SPECS),
    "folded": (Folding, ["x:float32[batch=1:2:4,3,6,6]"]),
    "packed": (Recurrent, ["x:float32[batch=1:2:4,6,16]"]),
}


@pytest.mark.parametrize("name", NETS)
def test_one_weight_off_by_a_ten_thousandth(name: str, tmp_path: Path) -> None:
    """In each weight of the file in turn, one element; folded and packed ones too."""
    make, specs = NETS[name]
    model, proto = from_module(make().eval(), inputs=specs), normdeploy.export(make().eval(), inputs=specs).proto
    whole = verified(model, proto, tmp_path, seeds=1)
    assert whole
    assert all(whole.weights)
    weights = [t for t in proto.graph.initializer if t.data_type == onnx.TensorProto.FLOAT and np.prod(t.dims) > 1]
    assert len(weights) >= 3
    for place, tensor in enumerate(weights):
        array = numpy_helper.to_array(tensor).copy()
        at = np.random.default_rng(place).integers(array.size)
        array.flat[at] *= np.float32(1.0001)
        planted = copied(proto)
        next(t for t in planted.graph.initializer if t.name == tensor.name).CopyFrom(
            numpy_helper.from_array(array, tensor.name)
        )
        comparison = verified(model, planted, tmp_path, seeds=1)
        assert not comparison, tensor.name
        (wrong,) = (w for w in comparison.weights if not w)
        assert wrong.name == tensor.name


def test_a_weight_that_is_off_is_named_with_its_module_and_the_difference(
    net: LoadedModel, exported: onnx.ModelProto, tmp_path: Path
) -> None:
    planted = copied(exported)
    tensor = next(t for t in planted.graph.initializer if t.name == "down.bias")
    array = numpy_helper.to_array(tensor).copy()
    before = float(array[3])
    array[3] += np.float32(1e-4)
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    (wrong,) = (w for w in verified(net, planted, tmp_path).weights if not w)
    assert (wrong.name, wrong.module, wrong.parameter) == ("down.bias", "down", "down.bias")
    assert wrong.difference == pytest.approx(1e-4, rel=1e-2)
    assert wrong.reason.startswith("1 of 16 elements differ from down.bias: ")
    assert f"at [3], but the model has {before:.9g}" in wrong.reason


def test_all_of_a_weight_off_by_a_little(net: LoadedModel, exported: onnx.ModelProto, tmp_path: Path) -> None:
    planted = copied(exported)
    tensor = next(t for t in planted.graph.initializer if tuple(t.dims) == (24, 16) or tuple(t.dims) == (16, 24))
    array = numpy_helper.to_array(tensor)
    noise = np.random.default_rng(0).uniform(-1e-4, 1e-4, array.shape)
    tensor.CopyFrom(numpy_helper.from_array((array * (1 + noise)).astype(np.float32), tensor.name))
    assert [w.name for w in verified(net, planted, tmp_path).weights if not w] == [tensor.name]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_weights_of_a_half_file_are_those_of_the_model_rounded(
    net: LoadedModel, tmp_path: Path, precision: str
) -> None:
    normdeploy.export(Net().eval(), inputs=SPECS, precision=precision, output=tmp_path / "half.onnx")
    comparison = compare_files(net, tmp_path / "half.onnx", seeds=1)
    assert comparison
    assert comparison.weights == ()


# ------------------------------------------------------------------ what is right passes


@pytest.mark.parametrize("seed", range(4))
def test_constant_rows_of_a_group_norm_hang_on_roundings(seed: int, tmp_path: Path) -> None:
    """On zeros a convolution gives its bias, x − mean is a rounding, and 1/sqrt(eps) makes it 300 times as large."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(8, 8), nn.SiLU()).eval()
    specs = ["x:float32[batch=1:2:4,3,8,8]"]
    normdeploy.export(module, inputs=specs, output=tmp_path / "right.onnx")
    comparison = compare_files(from_module(module, inputs=specs), tmp_path / "right.onnx")
    assert comparison, [r.row() for r in comparison.results]


class Tied(nn.Module):
    """The order of many zeros, and what stands where they do: torch and onnxruntime choose differently."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(16, 24)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.up(x)
        places = torch.relu(y - 1).topk(6, -1).indices
        return places, y.gather(-1, places)


@pytest.mark.parametrize("are_read", [True, False])
def test_the_order_of_equal_values_is_free_and_that_of_others_is_not(
    are_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the reference follows the file's indices or not. Those of an engine can't be read."""
    if not are_read:
        monkeypatch.setattr(ChoiceReader, "read", lambda self, feeds: None)
    model, proto = from_module(Tied().eval(), inputs=SPECS), normdeploy.export(Tied().eval(), inputs=SPECS).proto
    right = verified(model, proto, tmp_path)
    assert right, [r.row() for r in right.results]
    assert are_read or any(r.near_ties for r in right.results)
    next(a for n in proto.graph.node if n.op_type == "TopK" for a in n.attribute if a.name == "largest").i = 0
    assert not verified(model, proto, tmp_path)


# ------------------------------------------------------------------ rows and sizes


def test_a_wrong_row_of_a_table_is_found_by_running_it(tmp_path: Path) -> None:
    """A Gather that reads row 41 for row 17; no weight is wrong."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(50, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids)

    specs = ["ids:int64[batch=1:1:2,4]{0:50}"]
    model, proto = from_module(Table().eval(), inputs=specs), normdeploy.export(Table().eval(), inputs=specs).proto
    assert verified(model, proto, tmp_path)
    fragment = parser.parse_model(
        f"{HEAD} (int64[a,b] ids) => (int64[a,b] other) <int64 bad = {{17}}, int64 good = {{41}}> "
        "{ c = Equal(ids, bad) other = Where(c, good, ids) }"
    ).graph
    nodes = [*fragment.node, *proto.graph.node]
    for node in proto.graph.node:
        node.input[:] = ["other" if name == "ids" else name for name in node.input]
    nodes = [*fragment.node, *proto.graph.node]
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del proto.graph.node[:]
    proto.graph.node.extend(kept)
    proto.graph.initializer.extend(fragment.initializer)
    comparison = verified(model, proto, tmp_path, seeds=1)
    assert any(case.startswith("rows ") for case in comparison.cases)
    assert failed(comparison)


def test_every_row_of_a_table_is_run() -> None:
    """The first and the last too, each in the case whose name says so."""
    model = from_module(nn.Embedding(53, 8).eval(), inputs=["ids:int64[batch=1:1:2,4]{3:53}"])
    ran = set[int]()
    for case in make_edge_cases(model, 1).cases:
        if told := re.fullmatch(r"rows (\d+) to (\d+) of ids, batch=2", case.name):
            ids, stated = set(case.make()["ids"].flat), set(range(int(told[1]), int(told[2]) + 1))
            assert stated <= ids <= set(range(3, 53))
            ran |= stated
    assert ran == set(range(3, 53))


def test_what_was_not_run_for_its_size_is_in_the_verdict(tmp_path: Path) -> None:
    specs = ["x:float32[batch=1:2:64,seq=1:8:512,16]"]
    model = from_module(nn.ReLU().eval(), inputs=specs)
    normdeploy.export(nn.ReLU().eval(), inputs=specs, output=tmp_path / "m.onnx")
    some = compare_files(model, tmp_path / "m.onnx", seeds=1)
    assert some
    assert some.up_to == 2048  # 8 times 2 by 8 by 16
    assert "not run at batch=64, seq=512: 524288 input elements, more than 2048" in some.notes
    assert any("batch=1, seq=128" in case for case in some.cases), "as far as it goes, more sizes are run"
    every = compare_files(model, tmp_path / "m.onnx", seeds=1, most=524288)
    assert every.up_to is None
    assert any("batch=64, seq=512" in case for case in every.cases)


class Quantizer(nn.Module):
    """``torch.cdist`` packs the codebook, the sums of its squares and ones into one constant (VQ-VAE)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.codebook = nn.Embedding(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cdist(x, self.codebook.weight)


def test_a_weight_packed_with_what_is_computed_of_it_is_none_that_was_altered(tmp_path: Path) -> None:
    model = from_module(Quantizer().eval(), (torch.randn(40, 4),))
    proto = normdeploy.export(Quantizer().eval(), torch.randn(40, 4)).proto
    assert verified(model, proto, tmp_path, seeds=1)
    (packed,) = (t for t in proto.graph.initializer if tuple(t.dims) == (6, 32))
    array = numpy_helper.to_array(packed).copy()
    array[2] = np.random.default_rng(0).normal(size=32)
    packed.CopyFrom(numpy_helper.from_array(array, packed.name))
    assert [w.name for w in verified(model, proto, tmp_path, seeds=1).weights if not w] == [packed.name]


class Positions(nn.Module):
    """Rows that are always the same ones: of a table of positions, and one of a table of types."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions, self.types = nn.Embedding(64, 16), nn.Embedding(2, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.positions(torch.arange(x.shape[1])) + self.types.weight[1]


def test_rows_of_the_models_tables_are_the_models(tmp_path: Path) -> None:
    net, specs = Positions().eval(), ["x:float32[batch=1:2:4,20,16]"]
    model, proto = from_module(net, inputs=specs), normdeploy.export(net, inputs=specs).proto
    assert {node.op_type for node in proto.graph.node} == {"Add"}
    assert not verified(model, proto, tmp_path, seeds=1).weights
    (rows,) = (t for t in proto.graph.initializer if 20 in t.dims)
    array = numpy_helper.to_array(rows).copy()
    array.reshape(-1, 16)[3, 5] += 1e-4
    rows.CopyFrom(numpy_helper.from_array(array, rows.name))
    assert [w.name for w in verified(model, proto, tmp_path, seeds=1).weights if not w] == [rows.name]
