"""The exported file is what was asked for, and says nothing about the machine it was made on."""

from __future__ import annotations

import copy
import gc
import importlib.util
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim as TorchDim

import normdeploy
from normdeploy.errors import ExportError, InputError
from normdeploy.exporting.exporter import CLASS, MODULE, export_to_proto
from normdeploy.graphs.simplification import simplify
from normdeploy.loading import from_module
from normdeploy.model import Dim, InputSpec, LoadedModel

BATCH, SEQ = Dim("batch", 1, 2, 8), Dim("seq", 2, 5, 16)


def spec(name: str, *shape: int | Dim, dtype: str = "float32") -> InputSpec:
    return InputSpec(
        name,
        dtype,
        tuple(d if isinstance(d, Dim) else Dim.from_size(d) for d in shape),
        (0, 2) if dtype == "int64" else None,
    )


def model(
    module: nn.Module, *inputs: InputSpec, outputs: tuple[str, ...] = ("out",), auto: bool = False
) -> LoadedModel:
    """Exported with the specs' dims; with ``auto`` torch decides what stays dynamic."""
    args = tuple(torch.ones(i.concrete_shape({}), dtype=getattr(torch, i.dtype)) for i in inputs)
    dims = {
        d.name: TorchDim.AUTO if auto else TorchDim(d.name, min=d.min, max=d.max)
        for i in inputs
        for d in i.shape
        if d.name
    }
    shapes = tuple({axis: dims[d.name] for axis, d in enumerate(i.shape) if d.name} for i in inputs)
    program = torch.export.export(module.eval(), args, dynamic_shapes=shapes)
    return LoadedModel(program=program, inputs=inputs, outputs=outputs, kind="module", sha256="12ab")


def run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    onnx.checker.check_model(proto, full_check=True)
    return ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)


def agrees(proto: onnx.ModelProto, made: LoadedModel, **dims: int) -> None:
    samples = made.samples(0, dims)
    expected = made.program.module()(*(torch.from_numpy(v) for v in samples.values()))
    expected = expected if isinstance(expected, tuple) else (expected,)
    for got, wanted in zip(run(proto, samples), expected, strict=True):
        # Two float32 evaluations of at most a few hundred terms: each within n·u of the truth.
        np.testing.assert_allclose(got, wanted.detach().numpy(), rtol=1e-4, atol=1e-5)


def symbols(proto: onnx.ModelProto) -> set[str]:
    values = (*proto.graph.input, *proto.graph.output, *proto.graph.value_info)
    return {d.dim_param for v in values for d in v.type.tensor_type.shape.dim if d.dim_param}


def metadata(node: onnx.NodeProto) -> dict[str, str]:
    return {p.key: p.value for p in node.metadata_props}


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.norm(x)).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Inner() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([layer(x) for layer in self.layers], 1)  # twice the sequence
        return y.flatten(0, 1) * 2


# ------------------------------------------------------------------ opset


@pytest.mark.parametrize("opset", [18, 21, 23, 25])
def test_opset(opset: int) -> None:
    made = model(nn.Sequential(nn.Linear(8, 8), nn.GroupNorm(2, 8)), spec("x", BATCH, 8))
    proto = export_to_proto(made, opset=opset)
    assert [(o.domain, o.version) for o in proto.opset_import] == [("", opset)]
    assert proto.ir_version >= onnx.helper.find_min_ir_version_for(proto.opset_import)
    assert proto.producer_name == "normdeploy"
    agrees(proto, made, batch=3)


@pytest.mark.parametrize("opset", [17, 26, 0, -1, "21", 21.0, None])
def test_opset_out_of_range(opset: object) -> None:
    made = LoadedModel(program=None, inputs=(), outputs=(), kind="module")  # type: ignore[arg-type]  # refused before anything is touched
    with pytest.raises(ExportError, match=rf"opset {opset!r} can't be exported; .* 18 to 25"):
        export_to_proto(made, opset=opset)  # type: ignore[arg-type]


# ------------------------------------------------------------------ names and dims


@pytest.mark.parametrize("loaded", [False, True])
def test_names_and_dims_are_the_users(tmp_path: Path, loaded: bool) -> None:
    made = model(Net(), spec("hidden states", BATCH, SEQ, 8), outputs=("result",))
    if loaded:
        torch.export.save(made.program, tmp_path / "m.pt2")
        made = LoadedModel(
            program=torch.export.load(tmp_path / "m.pt2"), inputs=made.inputs, outputs=made.outputs, kind=made.kind
        )
    proto = export_to_proto(made)
    assert [i.name for i in proto.graph.input] == ["hidden states"]
    assert [o.name for o in proto.graph.output] == ["result"]
    assert {"batch", "seq", "2*seq"} <= symbols(proto)
    assert not any(set("0123456789") & set(s) - set("2") for s in symbols(proto))  # no s77 anywhere, in no expression
    agrees(proto, made, batch=3, seq=7)


class TwoAxes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, x), 1).reshape(-1)


def test_dim_names_may_be_torchs_own_swapped() -> None:
    program = model(TwoAxes(), spec("x", BATCH, SEQ)).program
    first, second = (str(s) for s in next(n for n in program.graph.nodes if n.name == "x").meta["val"].shape)
    made = LoadedModel(
        program=program,
        inputs=(spec("x", Dim(second, 1, 2, 8), Dim(first, 2, 5, 16)),),
        outputs=("out",),
        kind="module",
    )
    proto = export_to_proto(made)
    assert [d.dim_param for d in proto.graph.input[0].type.tensor_type.shape.dim] == [second, first]
    concat = next(n for n in proto.graph.node if n.op_type == "Concat" and n.input[0] == "x")
    shape = next(v for v in proto.graph.value_info if v.name == concat.output[0]).type.tensor_type.shape
    assert [d.dim_param for d in shape.dim] == [second, f"2*{first}"]


class ChannelsByPosition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(5, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x[..., None])[..., 0]


def test_a_dim_that_came_out_fixed_is_an_error() -> None:
    made = model(ChannelsByPosition(), spec("x", BATCH, SEQ, 8), auto=True)
    with pytest.raises(
        InputError,
        match=r"dim 'seq' \(axis 1 of input 'x'\) was requested to range from 2 to 16, but the model fixes it at 5",
    ):
        export_to_proto(made)


def test_a_dim_with_one_size_is_static() -> None:
    five = Dim("seq", 5, 5, 5)
    made = model(ChannelsByPosition(), spec("x", BATCH, 5, 8), auto=True)
    proto = export_to_proto(
        LoadedModel(program=made.program, inputs=(spec("x", BATCH, five, 8),), outputs=made.outputs, kind=made.kind)
    )
    assert symbols(proto) == {"batch"}


class Sum(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def test_two_names_for_one_size_is_an_error() -> None:
    made = model(Sum(), spec("x", Dim("rows", 2, 3, 8)), spec("y", Dim("lines", 2, 3, 8)), auto=True)
    with pytest.raises(InputError, match=r"dims 'rows' and 'lines' \(axis 0 of input 'y'\) have two names"):
        export_to_proto(made)


class Passes(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = x @ y
        return z, x, z


def test_outputs_that_are_inputs_or_each_other() -> None:
    made = model(Passes(), spec("a", BATCH, 4), spec("b", 4, 4), outputs=("first", "second", "third"))
    proto = export_to_proto(made)
    for result in (proto, simplify(proto, [made.samples()]).proto):
        assert [i.name for i in result.graph.input] == ["a", "b"]
        assert [o.name for o in result.graph.output] == ["first", "second", "third"]
        agrees(result, made, batch=3)


def test_an_output_of_an_input_s_name() -> None:
    class Denoiser(nn.Module):
        def forward(self, sample: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"sample": sample * 2}

    made = from_module(Denoiser().eval(), (torch.ones(3),))
    assert made.outputs == ("output_sample",)
    assert [o.name for o in export_to_proto(made).graph.output] == ["output_sample"]


def test_names_that_the_exporter_uses_itself() -> None:
    made = model(Net(), spec("val_0", BATCH, SEQ, 8), outputs=("layers.0.up.weight",))
    taken = export_to_proto(
        LoadedModel(program=made.program, inputs=(spec("x", BATCH, SEQ, 8),), outputs=("y",), kind="module")
    )
    inside = next(o for n in taken.graph.node for o in n.output)
    proto = export_to_proto(
        LoadedModel(program=made.program, inputs=(spec(inside, BATCH, SEQ, 8),), outputs=made.outputs, kind="module")
    )
    assert [i.name for i in proto.graph.input] == [inside]
    agrees(
        proto,
        LoadedModel(program=made.program, inputs=(spec(inside, BATCH, SEQ, 8),), outputs=made.outputs, kind="module"),
        batch=2,
    )


# ------------------------------------------------------------------ what is in the file


SOURCE = """
from torch import nn
class Planted(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
    def forward(self, x):
        return self.norm(x).relu()  # a line of the user's source
"""


def test_module_paths_are_kept_and_file_paths_are_not(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(SOURCE)
    loader = importlib.util.spec_from_file_location("planted", tmp_path / "planted.py")
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    made = model(nn.Sequential(nn.Linear(8, 8), module.Planted()), spec("x", BATCH, 8))
    assert str(tmp_path) in "".join(n.meta.get("stack_trace", "") for n in made.program.graph.nodes)  # the trap is set
    proto = export_to_proto(made)
    found = {n.op_type: metadata(n) for n in proto.graph.node}
    assert found["LayerNormalization"] == {MODULE: "1.norm", CLASS: "torch.nn.modules.normalization.LayerNorm"}
    assert found["Relu"] == {MODULE: "1", CLASS: "planted.Planted"}
    data = proto.SerializeToString()
    for trace in (
        str(tmp_path),
        str(Path.home()),
        str(Path(torch.__file__).parent),
        "site-packages",
        ".py",
        "user's source",
        "pkg.torch",
    ):
        assert trace.encode() not in data, trace


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: self.a(t).relu(), lambda t: self.b(t) * 3, (x,)) + 1


CALL = """
<ir_version: 10, opset_import: ["": 21, "pkg": 1]>
made (float[s0, 4] x) => (float[s0, 4] y) { y = pkg.Leaky (x) }
<domain: "pkg", opset_import: ["": 21]>
Leaky <slope: float = 0.25> (a) => (c) { b = LeakyRelu <alpha: float = @slope> (a)
    c = Neg (b) }
"""


def test_functions_are_inlined_with_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = onnx.parser.parse_model(CALL)
    scopes = {
        "pkg.torch.onnx.name_scopes": "['', 'act', 'leaky']",
        "pkg.torch.onnx.class_hierarchy": "['Net', 'pkg.Act', 'aten.leaky']",
    }
    onnx.helper.set_model_props(calls.graph.node[0], scopes)  # type: ignore[arg-type]
    program = torch.export.export(nn.Identity(), (torch.zeros(2, 4),))
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: SimpleNamespace(model=ir.from_proto(calls)))
    proto = export_to_proto(
        LoadedModel(program=program, inputs=(spec("x", BATCH, 4),), outputs=("out",), kind="module")
    )
    assert not proto.functions
    assert [o.domain for o in proto.opset_import] == [""]
    assert [metadata(n) for n in proto.graph.node] == [{MODULE: "act", CLASS: "pkg.Act"}] * 2
    np.testing.assert_array_equal(run(proto, {"x": np.full((1, 4), -4, np.float32)})[0], np.ones((1, 4)))


def test_branches_are_kept() -> None:
    made = model(Branch(), spec("x", BATCH, 4))
    proto = export_to_proto(made)
    assert "If" in {n.op_type for n in proto.graph.node}
    for sign in (1, -1):
        x = np.full((3, 4), sign, np.float32)
        np.testing.assert_allclose(
            run(proto, {"x": x})[0], made.program.module()(torch.from_numpy(x)).detach().numpy(), rtol=1e-5
        )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(50, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.word(ids) @ self.word.weight.t()


def test_weights_are_stored_once_and_the_way_they_are_read() -> None:
    linear = export_to_proto(model(nn.Linear(8, 12), spec("x", BATCH, 8)))
    assert "Transpose" not in {n.op_type for n in linear.graph.node}
    made = model(Tied(), spec("ids", BATCH, SEQ, dtype="int64"))
    proto = export_to_proto(made)
    assert Counter(t.name for t in proto.graph.initializer if 50 in t.dims) == {"word.weight": 1}
    agrees(proto, made, batch=3, seq=4)


def test_epsilons_are_kept() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / torch.sqrt(x * x + 1e-12)

    proto = export_to_proto(model(Root(), spec("x", BATCH, 8)))
    np.testing.assert_array_equal(run(proto, {"x": np.zeros((2, 8), np.float32)})[0], np.zeros((2, 8)))


def test_nothing_is_printed_and_nothing_changed(capfd: pytest.CaptureFixture[str]) -> None:
    made = model(Net(), spec("x", BATCH, SEQ, 8))
    graph, state = str(made.program.graph), {k: v.clone() for k, v in made.program.state_dict.items()}
    capfd.readouterr()
    seen: list[tuple[str, int, int]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = export_to_proto(made, progress=lambda *step: seen.append(step))
    assert not caught
    assert capfd.readouterr() == ("", "")
    assert seen[0][1:] == (0, 2)
    assert seen[-1][1:] == (2, 2)
    assert str(made.program.graph) == graph
    assert all(torch.equal(v, state[k]) for k, v in made.program.state_dict.items())
    assert export_to_proto(made).SerializeToString(deterministic=True) == first.SerializeToString(deterministic=True)


class Biased(nn.Module):
    """Attention with a learned bias for each distance, as T5 has it (Raffel et al., arXiv 1910.10683)."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.bias = nn.Linear(32, 96), nn.Embedding(15, 4)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        q, k, v = (t.view(x.shape[0], n, 4, 8).transpose(1, 2) for t in self.heads(x).chunk(3, -1))
        at = torch.arange(n)
        y = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=self.bias(at[None] - at[:, None] + 7).permute(2, 0, 1)[None]
        )
        return y.transpose(1, 2).reshape(x.shape[0], n, -1)


@pytest.mark.parametrize("how", ["live", "saved"])
def test_attentions_that_would_have_gradients(how: str, tmp_path: Path) -> None:
    """torch 2.13 can't decompose its own views of them while gradients are on."""
    torch.manual_seed(0)
    net, x = Biased().eval(), torch.randn(2, 8, 32)
    if how == "saved":
        torch.export.save(torch.export.export(net, (x,), strict=False), tmp_path / "net.pt2")
    made = normdeploy.export(tmp_path / "net.pt2") if how == "saved" else normdeploy.export(net, (x,))
    assert all(p.requires_grad for p in net.parameters())
    exact = copy.deepcopy(net).double()(x.double()).detach().numpy()
    own = np.abs(net(x).detach().numpy() - exact).max()
    error = np.abs(run(made.proto, {made.proto.graph.input[0].name: x.numpy()})[0] - exact).max()
    assert error <= 4 * own + 4 * 2.0**-24 * np.abs(exact).max()


class Bessel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x)


def test_an_operator_without_onnx_form_is_named() -> None:
    made = model(nn.Sequential(nn.Linear(4, 4), Bessel()), spec("x", BATCH, 4))
    with pytest.raises(ExportError, match=r"no equivalent of the operator \w+\.bessel_j0.*in module '1'") as error:
        export_to_proto(made)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("live", [False, True])
def test_a_small_model_is_not_searched_for_cycles(live: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's modules in memory a collection takes up to half a second, a tenth of the export of a small model; a
    live module's weights stay where they are, and nothing is searched at all."""
    net = nn.Linear(4, 4).eval()
    torch.export.save(torch.export.export(net, (torch.zeros(2, 4),)), tmp_path / "m.pt2")
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda *_: collected.append(1) or 0)
    counts = []
    for heavy in (2**26, 0):
        monkeypatch.setattr("normdeploy.verbs.export.export_function._HEAVY", heavy)
        if live:
            normdeploy.export(net, inputs=["x:float32[batch,4]"])
        else:
            normdeploy.export(tmp_path / "m.pt2")
        counts.append(len(collected))
        collected.clear()
    assert counts[1] == counts[0] + (0 if live else 1)
