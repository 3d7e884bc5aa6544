"""Parallel branches of one input become one convolution where they read the same places, with an exact proof;
lookalikes stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.forms.nan_visibility import find_hiding_op
from normdeploy.graphs.graph import Graph
from normdeploy.graphs.region import Refusal, compile_region
from normdeploy.graphs.shape_completion import ShapedGraph
from normdeploy.rewriting import certification
from normdeploy.rewriting.branch_merging import BranchMerge, merge_branches, parallel_branches
from normdeploy.rewriting.norm_optimizer import optimize_norms
from normdeploy.verbs.arguments.export_result import ExportResult
from tests.recognition.test_affine_chains import norm
from tests.rewriting.test_constant_evaluation import graph, of
from tests.support import run_onnxruntime

C = 32


class Block(nn.Module):
    """RepVGG's, MobileOne's: convolutions with a batch norm each, and a batch norm of the input."""

    def __init__(
        self, out: int = C, k: int = 3, stride: int = 1, groups: int = 1, identity: bool = True, copies: int = 1
    ) -> None:
        super().__init__()
        sizes = [1, *[k] * copies]
        self.convs = nn.ModuleList(
            nn.Sequential(nn.Conv2d(C, out, n, stride, n // 2, groups=groups, bias=False), norm(out, 4)) for n in sizes
        )
        self.identity = norm(C, 4) if identity else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = sum(conv(x) for conv in self.convs)
        return y if self.identity is None else y + self.identity(x)


def net(block: nn.Module, out: int = C, activation: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, C, 1), nn.ReLU(), block, activation or nn.ReLU(), nn.Conv2d(out, 4, 1)).eval()


def exported(module: nn.Module, path: str | None = None) -> ExportResult:
    torch.manual_seed(0)
    return normdeploy.export(module, (torch.randn(2, 3, 9, 9),), output=path)


@pytest.mark.parametrize(
    "block",
    [Block(), Block(groups=2), Block(k=5, groups=C, copies=2), Block(out=40, stride=2, identity=False)],
    ids=["full", "groups", "depthwise", "strides"],
)
def test_branches_become_one_convolution(block: Block, tmp_path: str) -> None:
    torch.manual_seed(1)
    depthwise = block.convs[0][0].groups == C  # of one infinity in two Relu makes zero there, and GELU NaN
    module = net(block, 40 if block.identity is None else C, nn.GELU() if depthwise else None)
    made = exported(module, f"{tmp_path}/net.onnx")
    assert made.summary.ops_after == ({"Conv": 3, "Relu": 1, "Gelu": 1} if depthwise else {"Conv": 3, "Relu": 2})
    assert {f.status for f in made.summary.findings} == {"folded"}
    assert all("merged with its parallel branches" in f.became and not f.remains for f in made.summary.findings)
    assert all(
        f.certificate and f.certificate.method == "exact" and f.certificate.bits >= 80 for f in made.summary.findings
    )
    if block.identity is not None and block.convs[0][0].groups == 1:  # once: it takes seconds
        compared = normdeploy.verify(module, f"{tmp_path}/net.onnx", (torch.randn(2, 3, 9, 9),))
        assert compared, [r.reason for r in compared.results]


class InPlace(Block):
    """As timm sums up (`x += identity`)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.convs[0](x)
        y += self.convs[1](x)
        y += self.identity(x)  # type: ignore[misc]
        return y


def test_sums_in_place_are_verified_too(tmp_path: str) -> None:
    """verify follows the branches of the model to know a merged weight again; it called this one altered."""
    torch.manual_seed(1)
    module = net(InPlace())
    assert exported(module, f"{tmp_path}/net.onnx").summary.ops_after == {"Conv": 3, "Relu": 2}
    compared = normdeploy.verify(module, f"{tmp_path}/net.onnx", (torch.randn(2, 3, 9, 9),))
    assert compared, [w.reason for w in compared.weights if w.reason]


def test_open_sizes_and_negative_scales_are_merged() -> None:
    block = Block()
    with torch.no_grad():
        for conv in block.convs:
            conv[1].weight.copy_(-conv[1].weight.abs())
    x = torch.randn(2, 3, 9, 9)
    made = normdeploy.export(net(block), (x,), inputs=["x[n,3,h,w]"], dims=["n=1:2:4", "h=3:9:32", "w=3:9:32"])
    assert made.summary.ops_after == {"Conv": 3, "Relu": 2}


def test_a_scaled_difference_of_branches_is_merged() -> None:
    """FastViT's token mixer: x + scale·(mixer(x) − norm(x)); the sum with x stays."""

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer, self.norm = Block(groups=C), norm(C, 4)
            self.scale = nn.Parameter(torch.randn(C, 1, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.scale * (self.mixer(x) - self.norm(x))

    made = exported(nn.Sequential(nn.Conv2d(3, C, 1), nn.ReLU(), Mixer()).eval())
    assert made.summary.ops_after == {"Conv": 2, "Relu": 1, "Add": 1}


class Far(nn.Module):
    """A batch norm of inputs around ``mean`` beside a convolution that makes small numbers of them."""

    def __init__(self, mean: float, sign: int) -> None:
        super().__init__()
        self.conv, self.norm, self.sign = nn.Conv2d(C, C, 3, padding=1, groups=C, bias=False), norm(C, 4), sign
        with torch.no_grad():
            self.conv.weight.mul_(1e-3)
            for t, value in zip(
                (self.norm.running_mean, self.norm.running_var, self.norm.weight), (mean, 1.0, 1.0), strict=True
            ):
                assert t is not None
                t.fill_(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) + self.norm(x) if self.sign > 0 else self.conv(x) - self.norm(x)


@pytest.mark.parametrize("sign", [1, -1])
def test_branches_whose_merger_costs_accuracy_stay(sign: int) -> None:
    """x − 1000 is exact in float32 where x is near it, and a sum of products of 1000 is not."""
    for mean, nodes in ((1000.0, {"Conv": 2, "Relu": 1, "BatchNormalization": 1}), (0.0, {"Conv": 2, "Relu": 1})):
        made = exported(nn.Sequential(nn.Conv2d(3, C, 1), nn.ReLU(), Far(mean, sign)).eval())
        left = {op: n for op, n in made.summary.ops_after.items() if op in ("Conv", "Relu", "BatchNormalization")}
        assert left == nodes
        assert ("merging it would lose accuracy" in made.summary.findings[0].reason) == (mean > 0)


# ------------------------------------------------------------------ lookalikes


class Lookalike(nn.Module):
    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        given = {
            "strides": {"stride": 2},
            "dilations": {"dilation": 2, "padding": 2},
            "groups": {"groups": 2},
            "paddings": {"padding": 0},
        }
        self.a = nn.Sequential(
            nn.Conv2d(C, C, 3, padding=1, stride=2 if change == "strides" else 1, bias=False), norm(C, 4)
        )
        told = {"kernel_size": 3, "padding": 1, **given.get(change, {})}
        if change == "strides":  # of another stride, and by other paddings the same size
            told = {"kernel_size": 3, "stride": 1, "padding": 1}
        self.b = nn.Sequential(nn.Conv2d(C, C, bias=False, **told), norm(C, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        a, b = self.a(x), self.b(x)
        if self.change == "strides":
            b = b[:, :, :5, :5]
        if self.change == "paddings":
            b = nn.functional.pad(b, (1, 1, 1, 1))
        if self.change == "activation":
            b = b.relu()
        if self.change == "output":
            return a + b, b
        if self.change == "reader":
            return (a + b) * b.sigmoid()
        if self.change == "input":
            b = self.b(x.sigmoid())
        return a + b


@pytest.mark.parametrize(
    "change", ["strides", "dilations", "groups", "paddings", "activation", "output", "reader", "input"]
)
def test_a_lookalike_stays(change: str) -> None:
    made = exported(nn.Sequential(nn.Conv2d(3, C, 1), Lookalike(change)).eval())
    assert made.summary.ops_after["Conv"] == 3
    assert not any("merged" in f.became for f in made.summary.findings)


def _beside(large: dict[str, object], small: dict[str, object], k: int) -> BranchMerge | Refusal:
    """What is said of a convolution of 3×3 and one of k×k beside it."""
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((C, C, 3, 3)).astype(np.float32),
        "v": rng.standard_normal((C, C, k, k)).astype(np.float32),
    }
    opened = ShapedGraph(
        graph(
            [of("Conv", "x w", "p", **large), of("Conv", "x v", "q", **small), of("Add", "p q", "y")],
            weights,
            (1, C, 6, 6),
        )
    )
    parts = parallel_branches(opened, opened.nodes[-1])
    assert parts is not None
    return merge_branches(opened, opened.nodes[-1], parts)


@pytest.mark.parametrize(
    ("large", "small", "k"),
    [
        ({"pads": [1, 1, 1, 1]}, {"pads": [2, 2, 0, 0]}, 3),
        ({"pads": [1, 1, 1, 1]}, {"pads": [0, 0, 2, 2]}, 3),
        ({"pads": [0, 0, 2, 2]}, {"pads": [1, 1, -1, -1]}, 1),
        ({"pads": [2, 2, 0, 0]}, {"pads": [-1, -1, 1, 1]}, 1),
        ({"pads": [2, 2, 2, 2], "dilations": [2, 2]}, {"pads": [1, 1, -1, -1]}, 1),
    ],
    ids=["before", "behind", "before, negative pads", "behind, negative pads", "between the places of a dilation"],
)
def test_kernels_that_do_not_line_up_stay(large: dict[str, object], small: dict[str, object], k: int) -> None:
    """As many outputs, but of other places. Nobody is asked for a proof: that the kernel lies nowhere is seen
    before."""
    found = _beside(large, small, k)
    assert isinstance(found, Refusal)
    assert (
        "do not align" in found.reason or "dilations" in large
    )  # of the other in the one's place the dilation is told


@pytest.mark.parametrize(
    ("large", "small", "at"),
    [
        ([1, 1, 1, 1], [0, 0, 0, 0], 1),
        ([2, 2, 0, 0], [0, 0, 0, 0], 2),
        ([1, 1, 1, 1], [1, 1, -1, -1], 0),
        ([2, 2, 1, 1], [1, 1, 0, 0], 1),
    ],
)
def test_a_kernel_is_put_where_the_paddings_say(large: list[int], small: list[int], at: int) -> None:
    found = _beside({"pads": large}, {"pads": small}, 1)
    assert isinstance(found, BranchMerge)
    assert [branch.at for branch in found.expressions.parts] == [(0, 0), (at, at)]


def test_kernels_that_line_up_are_merged() -> None:
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((C, C, 3, 3)).astype(np.float32),
        "v": rng.standard_normal((C, C, 1, 1)).astype(np.float32),
    }
    weights |= {name: (rng.random(C) + 0.5).astype(np.float32) for name in ("g", "b", "m", "s")}
    for pads, small in (([1, 1, 1, 1], [0, 0, 0, 0]), ([2, 2, 0, 0], [0, 0, 0, 0]), ([2, 2, 1, 1], [1, 1, 0, 0])):
        nodes = [
            of("Conv", "x w", "p", pads=pads),
            of("Conv", "x v", "q", pads=small),
            of("BatchNormalization", "q g b m s", "r"),
        ]
        before = graph([*nodes, of("Add", "p r", "y")], weights, (1, C, 6, 6))
        out, _ = optimize_norms(before)
        assert [n.op_type for n in out.graph.node] == ["Conv"]
        x = {"x": rng.standard_normal((1, C, 6, 6)).astype(np.float32)}
        assert np.abs(run_onnxruntime(before, x)[0] - run_onnxruntime(out, x)[0]).max() <= 1e-4


def test_what_an_activation_would_hide_stays() -> None:
    """Inf − Inf is NaN, which Relu shows; of the merged kernel's −Inf it makes zero, whatever other channels do."""
    module = nn.Sequential(nn.Conv2d(3, C, 1), nn.ReLU(), Block(groups=C), nn.ReLU(), nn.Conv2d(C, 4, 1)).eval()
    made = exported(module)
    assert made.summary.ops_after["Conv"] == 4
    assert not any("merged" in f.became for f in made.summary.findings)


def of_one_sign(tail: str, **held: np.ndarray) -> onnx.ModelProto:
    """Two branches of one channel whose infinities are of two signs, of 32 outputs alike; merged each is −Inf."""
    batch = ", ".join(["one, zero, zero, one"])
    body = f"""c1 = Conv <pads = [1, 1, 1, 1]> (x, w1) n1 = BatchNormalization(c1, {batch})
        c2 = Conv(x, w2) n2 = BatchNormalization(c2, {batch}) s = Add(n1, n2) {tail}"""
    proto = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 18]> net (float[N, 1, H, W] x) => (float[N, K, P, Q] y) {{ {body} }}'
    )
    held = {
        "w1": np.ones((C, 1, 3, 3)),
        "w2": np.full((C, 1, 1, 1), -3.0),
        "one": np.ones(C),
        "zero": np.zeros(C),
        **held,
    }
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(v.astype(np.float32), k) for k, v in held.items())
    return proto


_MIXED = np.random.default_rng(0).standard_normal((1, C, 1, 1))


@pytest.mark.parametrize(
    ("tail", "w3"),
    [
        ("g = Relu(s) y = Conv(g, w3)", _MIXED),
        ("g = Conv(s, w3) y = Relu(g)", np.abs(_MIXED)),  # one op later
        ("g = Sigmoid(s) y = Conv(g, w3)", _MIXED),
        ("g = Clip(s, lo, hi) y = Conv(g, w3)", _MIXED),
        ("g = Relu(s) h = Conv <group = 32> (g, w4) y = Conv(h, w3)", _MIXED),
        ("g = Relu(s) h = GlobalAveragePool(g) y = Conv(h, w3)", _MIXED),
        (
            "h = GlobalAveragePool(s) k = Conv(h, w4s) m = Sigmoid(k) t = Mul(s, m) y = Conv(t, w3)",
            _MIXED,
        ),  # other places are numbers
    ],
)
def test_branches_whose_infinities_all_have_one_sign_stay(tail: str, w3: np.ndarray) -> None:
    """That channels are many says nothing of their weights."""
    held = {
        "w3": w3,
        "w4": np.ones((C, 1, 1, 1)),
        "w4s": np.eye(C)[:, :, None, None],
        "lo": np.array(-9.0),
        "hi": np.array(9.0),
    }
    proto = of_one_sign(tail, **held)
    out, summary = optimize_norms(proto)
    assert not any("merged" in f.became for f in summary.findings)
    for shape in ((1, 1, 1, 1), (1, 1, 3, 3)):
        x = np.ones(shape, np.float32)
        x[0, 0, shape[2] // 2, shape[3] // 2] = np.inf
        before, after = (run_onnxruntime(model, {"x": x})[0] for model in (proto, out))
        assert not (~np.isfinite(before) & np.isfinite(after)).any()


@pytest.mark.parametrize(
    "tail", ["y = Conv(s, w3)", "g = Sigmoid(s) h = Mul(s, g) y = Conv(h, w3)", "g = LeakyRelu(s) y = Conv(g, w3)"]
)
def test_branches_are_merged_where_infinities_show(tail: str) -> None:
    out, _ = optimize_norms(of_one_sign(tail, w3=_MIXED))
    assert [n.op_type for n in out.graph.node].count("Conv") == 2


@pytest.mark.parametrize(
    "tail",
    [
        "y = Atan(s)",
        "y = Div(one, s)",
        "y = MaxPool <kernel_shape = [2, 2]> (s)",
        "b = Greater(s, one) y = Cast <to = 1> (b)",
        "y = Relu(s) z = Conv(y, dense)",  # what Relu makes is seen, whatever the channels behind it show
    ],
)
def test_what_any_op_may_hide_stays(tail: str) -> None:
    """No list of ops that hide is complete: those that do not are listed, and every path is looked at."""
    rng = np.random.default_rng(0)
    held = {
        "w1": rng.standard_normal((C, C, 3, 3)),
        "w2": rng.standard_normal((C, C, 1, 1)),
        "dense": rng.standard_normal((2, C, 1, 1)),
    }
    held |= {f"{name}{i}": rng.uniform(0.5, 1.5, C) for name in "abmv" for i in (1, 2)} | {"one": np.array(1.0)}
    body = f"""c1 = Conv <pads = [1, 1, 1, 1]> (x, w1) n1 = BatchNormalization(c1, a1, b1, m1, v1)
        c2 = Conv(x, w2) n2 = BatchNormalization(c2, a2, b2, m2, v2) s = Add(n1, n2) {tail}"""
    ends = "float[N, P, Q, R] y" + (", float[N, 2, 6, 6] z" if "z =" in tail else "")
    proto = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 18]> net (float[N, {C}, 6, 6] x) => ({ends}) {{ {body} }}'
    )
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(v.astype(np.float32), k) for k, v in held.items())
    out, summary = optimize_norms(onnx.shape_inference.infer_shapes(proto))
    assert not any("merged" in f.became for f in summary.findings)
    x = rng.standard_normal((1, C, 6, 6)).astype(np.float32)
    x[0, 0, 2, 2] = np.inf
    for before, after in zip(run_onnxruntime(proto, {"x": x}), run_onnxruntime(out, {"x": x}), strict=True):
        assert not (~np.isfinite(before) & np.isfinite(after)).any()


# ------------------------------------------------------------------ the proof


def _moved(w: np.ndarray) -> np.ndarray:
    return np.roll(w, 1, axis=3)


def _one_off(w: np.ndarray) -> np.ndarray:
    w = w.copy()
    w[1, 0, 0, 2] += 1e-5
    return w


def _unit_off(w: np.ndarray) -> np.ndarray:
    w = w.copy()
    w[np.arange(C), 0, 1, 1] += 0.25
    return w


def _small() -> tuple[Graph, gs.Node]:
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((C, C, 3, 3)).astype(np.float32)}
    weights |= {name: (rng.random(C) + 0.5).astype(np.float32) for name in ("g", "b", "m", "s")}
    nodes = [
        of("Conv", "x w", "p", pads=[1, 1, 1, 1]),
        of("BatchNormalization", "x g b m s", "r"),
        of("Add", "p r", "y"),
    ]
    opened = ShapedGraph(graph(nodes, weights, (2, C, 6, 6)))
    return opened, opened.nodes[-1]


def _proved(change: Callable[[np.ndarray], np.ndarray] | None, **attrs: object) -> bool:
    opened, node = _small()
    parts = parallel_branches(opened, node)
    assert parts is not None
    form = merge_branches(opened, node, parts)
    assert form, form
    made = form.nodes[0]
    if change is not None:
        stored = opened.add_constant("changed", change(opened.value(made.inputs[1])), np.float32)
        made.inputs[1] = stored
        form = replace(form, expressions=replace(form.expressions, weight=stored))
    made.attrs.update(attrs)
    before = compile_region(opened, form.old, [form.data])
    rewrite = certification.rewrite_of(opened, certification.ResultPair(before, form.nodes[-1].outputs[0]))
    return bool(certification.certify_rewrites({}, [rewrite], form.expressions))


def test_the_proof_sees_each_planted_error() -> None:
    assert _proved(None)
    assert not _proved(_moved)
    assert not _proved(_one_off)
    assert not _proved(_unit_off)
    assert not _proved(lambda w: -w)
    assert not _proved(lambda w: w[..., ::-1, :])
    assert not _proved(None, dilations=[2, 2], pads=[2, 2, 2, 2])
    assert not _proved(None, pads=[0, 0, 2, 2])
    assert not _proved(None, pads=[2, 1, 0, 1])


def test_the_place_of_a_kernel_is_proved_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the rewrite puts the unit matrix beside the middle, in the weight and in what it says of it, the field says
    no."""
    from normdeploy.rewriting import branch_merging

    real = branch_merging.kernel_offset
    monkeypatch.setattr(branch_merging, "kernel_offset", lambda *given: tuple(o - 1 for o in real(*given)))
    assert not _proved(None)


@pytest.mark.parametrize(
    ("between", "hides"),
    [
        ("r = Relu(y)", None),
        ("q = Relu(y) n = Neg(q) r = Relu(n)", "r"),  # +Inf is −Inf behind Neg, and zero behind Relu
        ("q = Relu(y) n = Sub(zero, q) r = Relu(n)", "r"),
        ("q = Relu(y) n = Sub(q, zero) r = Relu(n)", None),
    ],
)
def test_a_negation_turns_the_infinity_that_is_left(between: str, hides: str | None) -> None:
    w = np.random.default_rng(2).standard_normal((4, 4, 1, 1)).astype(np.float32)
    w[0], w[1] = np.abs(w[0]), -np.abs(w[1])
    text = f"""<ir_version: 10, opset_import: ["" : 21]> g (float[N, 4, 5, 5] x) => (float[N, 4, 5, 5] z)
        <float[1] zero = {{0}}> {{ y = Conv(x, w) {between} z = Conv(r, w) }}"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    made = Graph(proto)
    found = find_hiding_op(made, made.nodes[0].outputs[0], w, 1)
    assert (None if found is None else found.outputs[0].name) == hides
