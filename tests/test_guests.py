"""A package that knows normdeploy alone brings a norm, a runtime and a rule: tests/guests/clamped_scale_norm, installed
by pip without network into a folder of its own. And packages that break each part of the contract."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx.reference
import pytest
import torch
from onnx.reference.op_run import OpRun

import normdeploy
from normdeploy import extensions
from normdeploy.cli import app as cli
from normdeploy.engines.norm_implementations import implement_norms, list_plugin_packages
from normdeploy.errors import ExtensionError, InputError
from normdeploy.evaluate import evaluator
from normdeploy.graphs.graph import Graph
from normdeploy.norms import function_bodies, third_party
from normdeploy.norms.norm_table import OURS, ROWS, OpOwner
from normdeploy.storage.proto_traversal import nodes_with_opsets
from normdeploy.verbs.check.sarif import to_sarif

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "tests" / "guests" / "clamped_scale_norm"
X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(3))
NODES = [("guests", "ClampedScaleNorm"), ("", "MatMul"), ("", "Add"), ("guests", "ClampedScaleNorm")]


class ScaleNorm(torch.nn.Module):
    """g · x / max(‖x‖₂, ε)."""

    def __init__(self, g: float, epsilon: float) -> None:
        super().__init__()
        self.g, self.epsilon = torch.nn.Parameter(torch.tensor(g)), epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return self.g * x / torch.clamp(length, min=self.epsilon)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.linear, self.last = ScaleNorm(3.5, 1e-5), torch.nn.Linear(16, 16), ScaleNorm(1.25, 1e-2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.linear(self.first(x)))


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip has installed the package; nothing of it stands in this repository's own."""
    folder = tmp_path_factory.mktemp("guests")
    source = shutil.copytree(SOURCE, folder / "source")  # pip leaves its build folders beside what it builds
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(folder / "site")]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, capture_output=True)
    return folder / "site"


@pytest.fixture
def package(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(installed))
    yield installed
    sys.modules.pop("clamped_scale_norm", None)


@pytest.fixture(scope="session")
def written(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The file of two such norms, and the result of the export."""
    path = tmp_path_factory.mktemp("file") / "net.onnx"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(installed))
        return path, normdeploy.export(Net().eval(), X, output=path, fuse="portable")


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in standard ops."""
    path = tmp_path_factory.mktemp("plain") / "net.onnx"
    normdeploy.export(Net().eval(), X, output=path)
    return path


def ops(model: onnx.ModelProto) -> list[tuple[str, str]]:
    return [(n.domain, n.op_type) for n in model.graph.node]


def command(monkeypatch: pytest.MonkeyPatch, *args: str | Path) -> int:
    """``normdeploy ARGS`` in this process; the exit code."""
    monkeypatch.setattr(sys, "argv", ["normdeploy", *map(str, args)])
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


# ---------------------------------------------------------------------------------------------------- the norm


def test_two_norms_become_the_packages_nodes_proved_exactly(written: tuple[Path, Any], package: Path) -> None:
    path, result = written
    model = onnx.load(path)
    assert ops(model) == NODES
    assert [(f.domain, f.name) for f in model.functions] == [NODES[0]]
    assert ("guests", 1) in {(o.domain, o.version) for o in model.opset_import}
    found = [(f.kind, f.status, f.module, f.became, f.certificate.method) for f in result.summary.findings]
    assert found == [
        ("ScaleNorm", "fused", "first", "guests.ClampedScaleNorm(epsilon=1e-05)", "exact"),
        ("ScaleNorm", "fused", "last", "guests.ClampedScaleNorm(epsilon=0.01)", "exact"),
    ]
    assert all(f.certificate and f.certificate.bits >= 100 for f in result.summary.findings)


def test_the_numbers_of_onnxruntime_are_the_formulas(written: tuple[Path, Any]) -> None:
    """Rows whose norm is above and below both epsilons; 2^-20 is eight units of float32's last place, relative."""
    net = Net().eval().double()
    x = (X * torch.logspace(-6, 1, 10).reshape(2, 5, 1)).float()
    with normdeploy.open_runner(written[0]) as runner:
        (got,) = runner.infer({"x": x.numpy()}).values()
    want = net(x.double()).detach().numpy()
    assert np.abs(got - want).max() <= 2**-20 * np.abs(want).max()


def test_optimizing_again_changes_nothing(written: tuple[Path, Any], package: Path, tmp_path: Path) -> None:
    again = normdeploy.optimize(written[0], tmp_path / "again.onnx", fuse="portable")
    assert (tmp_path / "again.onnx").read_bytes() == written[0].read_bytes()
    assert [(f.kind, f.status, f.reason) for f in again.summary.findings] == [
        ("ScaleNorm", "kept", "it is already one node")
    ] * 2


def test_standard_ops_alone_open_the_packages_node(written: tuple[Path, Any], package: Path) -> None:
    """As with our own ops: without --fuse portable nothing of them is left."""
    plain = normdeploy.optimize(written[0])
    assert not {domain for domain, _ in ops(plain.proto)} - {""}
    assert {f.status for f in plain.summary.findings} == {"refused"}


def test_tensorrt_rtx_builds_it(written: tuple[Path, Any], package: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    engine = normdeploy.build(written[0], tmp_path / "net.engine")
    assert engine.layers > 4


def test_verify_passes_with_the_packages_runtime_too(written: tuple[Path, Any], package: Path) -> None:
    _, result = written
    comparison = normdeploy.verify(result, seeds=1, runners="reference")
    assert comparison
    assert {r.runtime for r in comparison.results} >= {"onnxruntime (optimizer on)", "reference (clamped-scale-norm)"}


def test_without_extensions_it_is_as_though_nothing_were_installed(plain: Path, package: Path) -> None:
    """In one process, one after the other, in both orders."""
    first = normdeploy.optimize(plain, fuse="portable")
    with extensions.disabled():
        without = normdeploy.optimize(plain, fuse="portable")
    second = normdeploy.optimize(plain, fuse="portable")
    assert ops(first.proto) == ops(second.proto) == NODES
    assert [op for domain, op in ops(without.proto) if domain] == ["L2Norm"] * 2
    with extensions.disabled():
        assert third_party.all_third_party_norms() == ()
        assert not evaluator.is_supported("guests", "ClampedScaleNorm")


def test_a_file_of_the_packages_is_a_strangers_without_it(written: tuple[Path, Any], tmp_path: Path) -> None:
    """The function in the file is one of the file's own then; onnxruntime runs it, and nothing is rewritten."""
    result = normdeploy.optimize(written[0], tmp_path / "out.onnx", fuse="portable")
    assert ops(result.proto) == NODES
    assert normdeploy.verify(written[0], tmp_path / "out.onnx", seeds=1)


def test_half_precision_keeps_it_in_float32(package: Path) -> None:
    result = normdeploy.export(Net().eval(), X, fuse="portable", precision="fp16", keep_io=True)
    kinds = {
        t.name: t.type.tensor_type.elem_type for t in onnx.shape_inference.infer_shapes(result.proto).graph.value_info
    }
    named = [n for n in result.proto.graph.node if n.domain]
    assert len(named) == 2
    assert {kinds.get(n.input[0], onnx.TensorProto.FLOAT) for n in named} == {onnx.TensorProto.FLOAT}
    assert result.precision is not None
    assert [(i.kind, i.op) for i in result.precision.islands] == [("norm", "ClampedScaleNorm")] * 2
    assert normdeploy.verify(result, seeds=1)


def test_a_function_of_the_file_may_hold_it(written: tuple[Path, Any], package: Path) -> None:
    """A caller's own function around the node: it is not opened into, its norm is known."""
    model = onnx.load(written[0])
    inner = next(n for n in model.graph.node if n.domain)
    weight = next(t for t in model.graph.initializer if t.name == inner.input[1])
    outer = onnx.helper.make_function(
        "mine",
        "Block",
        ["x", "g"],
        ["y"],
        [onnx.helper.make_node("ClampedScaleNorm", ["x", "g"], ["y"], domain="guests", epsilon=1e-5)],
        [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("guests", 1)],
    )
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Block", ["x", "g"], ["y"], domain="mine")],
        "net",
        [onnx.helper.make_tensor_value_info("x", 1, [2, 16])],
        [onnx.helper.make_tensor_value_info("y", 1, [2, 16])],
        [onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight), "g")],
    )
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in (("", 21), ("guests", 1), ("mine", 1))]
    whole = onnx.helper.make_model(graph, opset_imports=imports, functions=[outer, *model.functions], ir_version=10)
    result = normdeploy.optimize(whole, fuse="portable")
    assert [(f.kind, f.status, f.place) for f in result.summary.findings] == [
        ("ScaleNorm", "kept", "function mine.Block")
    ]
    assert {f.name for f in result.proto.functions} == {"Block", "ClampedScaleNorm"}


def test_the_page_and_the_report_tell_of_it(
    written: tuple[Path, Any], package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jinja2")
    torch.export.save(torch.export.export(Net().eval(), (X,)), tmp_path / "net.pt2")
    page, report = tmp_path / "net.html", tmp_path / "net.json"
    options = ["--fuse", "portable", "-q", "--html", page, "--report", report]
    assert command(monkeypatch, "export", tmp_path / "net.pt2", "-o", tmp_path / "net.onnx", *options) == 0
    assert "guests.ClampedScaleNorm(epsilon=1e-05)" in re.sub(r"<[^>]*>", "", page.read_text())
    norms = json.loads(report.read_text())["norms"]
    assert {norm["kind"] for norm in norms} == {"ScaleNorm"}


# ---------------------------------------------------------------------------------------------------- its kernel


class Standin(OpRun):
    """Stands for the kernel: the plugin's node by the formula, not by the body."""

    op_domain = "guests"

    def _run(self, x: np.ndarray, scale: np.ndarray, epsilon: float, **_: Any) -> tuple[np.ndarray]:  # type: ignore[override]
        return ((scale * x / np.maximum(np.sqrt(np.square(x).sum(-1, keepdims=True)), epsilon)).astype(np.float32),)


Standin.__name__ = "ClampedScaleNorm"


@pytest.mark.parametrize("norm_impl", ["plugin", "auto"])
def test_the_packages_plugin_takes_its_place_in_tensorrt(
    norm_impl: str, written: tuple[Path, Any], package: Path
) -> None:
    model, account = implement_norms(onnx.load(written[0]), norm_impl=norm_impl, runtime="tensorrt", version="10.15")
    assert not model.functions
    nodes = [n for n in model.graph.node if n.domain == "guests"]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in nodes[0].attribute}
    assert attributes == {
        "epsilon": pytest.approx(1e-5, rel=1e-7),
        "plugin_namespace": b"guests",
        "plugin_version": b"1",
    }
    said = "plugin ClampedScaleNorm of the package clamped-scale-norm, assumed to compute the same as the body"
    assert [(i.op, i.form) for i in account] == [("guests.ClampedScaleNorm", said)] * 2
    assert list_plugin_packages(model) == [("guests", "ClampedScaleNorm")]
    run = onnx.reference.ReferenceEvaluator(model, new_ops=[Standin])
    (got,) = run.run(None, {"x": X.numpy()})
    want = Net().eval().double()(X.double()).detach().numpy()
    assert np.abs(got - want).max() <= 2**-20 * np.abs(want).max()


@pytest.mark.parametrize(("norm_impl", "runtime"), [("native", "tensorrt"), ("auto", "tensorrt-rtx")])
def test_else_its_body_runs(norm_impl: str, runtime: str, written: tuple[Path, Any], package: Path) -> None:
    model, account = implement_norms(onnx.load(written[0]), norm_impl=norm_impl, runtime=runtime, version="10.15")
    assert [f.name for f in model.functions] == ["ClampedScaleNorm"]
    assert {i.form for i in account} == {"function body"}


# ---------------------------------------------------------------------------------------------------- rule, runtime


def test_its_rule_judges_files(
    written: tuple[Path, Any], package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """In text, JSON and SARIF; it fails where --fail-on names it."""
    rule, found = "scale-norm-epsilon", normdeploy.check(written[0])
    (problem,) = [p for p in found.files[0].findings if p.rule == "scale-norm-epsilon"]
    assert (problem.level, problem.message) == ("warning", "its epsilon 1e-05 is subnormal in float16")
    assert problem.node == f"{problem.tensor}_ClampedScaleNorm"
    assert found
    assert not normdeploy.check(written[0], fail_on=rule)
    document = json.loads(to_sarif(found))["runs"][0]
    ids = [r["id"] for r in document["tool"]["driver"]["rules"]]
    assert [ids[r["ruleIndex"]] for r in document["results"] if r["ruleId"] == rule] == [rule]
    assert rule in found.json()
    assert command(monkeypatch, "check", written[0], "--fail-on", rule) == 1
    assert f"error   {rule}" in capsys.readouterr().out
    assert command(monkeypatch, "check", written[0], "--no-extensions") == 0
    assert rule not in capsys.readouterr().out
    assert command(monkeypatch, "check", written[0], "--no-extensions", "--fail-on", rule) == 2
    assert f"unknown rule '{rule}'" in capsys.readouterr().err


def test_its_runtime_runs_files(written: tuple[Path, Any], package: Path) -> None:
    x = X.numpy()
    with normdeploy.open_runner(written[0]) as ours, normdeploy.open_runner(written[0], runner="reference") as theirs:
        assert theirs.name == "reference (clamped-scale-norm) (net.onnx)"
        assert [str(s) for s in theirs.inputs] == [str(s) for s in ours.inputs]
        (a,), (b,) = ours.infer({"x": x}).values(), theirs.infer({"x": x}).values()
        (c,) = theirs.infer({"x": torch.from_numpy(x)}).values()
        assert isinstance(c, torch.Tensor)
        assert np.abs(a - b).max() <= 2**-20 * np.abs(a).max()
        assert (b == c.numpy()).all()
        with pytest.raises(InputError, match="float64"):
            theirs.infer({"x": x.astype(np.float64)})
    race = normdeploy.bench(written[0], rounds=1, runners="reference")
    assert "reference (clamped-scale-norm)" in {entry.runtime for entry in race.entries}
    with pytest.raises(InputError, match=r"provides a runtime 'other'; choose from .*'reference'"):
        normdeploy.run(written[0], runner="other")
    with extensions.disabled(), pytest.raises(InputError, match="runtime 'reference'; choose from 'openvino',"):
        normdeploy.verify(Net().eval(), written[0], X, runners="reference")


# ---------------------------------------------------------------------------------------------------- broken ones

GOOD = (SOURCE / "clamped_scale_norm.py").read_text()
_count = iter(range(10**6))


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, name: str = "guests", kind: str = "norms") -> str:
    """A package of that module, as pip leaves it; its name. Each has a name of its own: modules are imported once."""
    module = f"broken_guest_{next(_count)}"
    where = folder / module
    metadata = where / f"{module}-1.dist-info"
    metadata.mkdir(parents=True)
    (where / f"{module}.py").write_text(code)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    value = {"norms": "NORMS", "runtimes": "Reference", "rules": "RULES"}[kind]
    (metadata / "entry_points.txt").write_text(f"[normdeploy.{kind}]\n{name} = {module}:{value}\n")
    monkeypatch.syspath_prepend(str(where))
    importlib.invalidate_caches()
    return module


def changed(*pairs: tuple[str, str]) -> str:
    code = GOOD
    for old, new in pairs:
        assert old in code, old
        code = code.replace(old, new)
    return code


WRONG = {
    "epsilon squared": ("least = CastLike (given, X)", "e = CastLike (given, X) least = Mul (e, e)"),
    "mean instead of sum": (
        "length = ReduceL2 <keepdims: int = 1> (X, axes)",
        "q = Mul (X, X) m = ReduceMean <keepdims: int = 1> (q, axes) length = Sqrt (m)",
    ),
    "no clamp": ("clamped = Clip (length, least)", "clamped = Add (length, least)"),
    "epsilon is not used": ("normal = Div (X, clamped)", "normal = Div (X, length)"),
    "form of another epsilon": ("epsilon=norm.epsilon", "epsilon=2 * norm.epsilon"),
    "form without the scale": ("writer.parameter(norm.gamma, [1], 1.0", "writer.parameter(None, [1], 1.0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_body_or_form_is_refused_like_any_wrong_rewrite(
    name: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = install(tmp_path, monkeypatch, changed(WRONG[name]))
    result = normdeploy.optimize(plain, fuse="portable")
    assert [f.status for f in result.summary.findings] == ["undone"] * 2
    assert all(f.reason.startswith(f"in the form of package {module!r}: ") for f in result.summary.findings)
    assert not [domain for domain, _ in ops(result.proto) if domain]


BROKEN = {
    "import": (("import onnx\n", "import onnx\nimport no_such_module\n"), "can't be imported: ModuleNotFoundError"),
    "no such object": (("NORMS =", "OTHERS ="), "can't be imported: AttributeError"),
    "a form that raises": (
        ('"""The norm as', 'raise KeyError("here")\n    """The norm as'),
        "has a form for .* KeyError",
    ),
    "a form of nothing": (("return writer.done()", "return None"), "returned a NoneType"),
    "a form without the op": (
        ("    writer.op(", "    writer.add_node('Identity')\n    0 and writer.op("),
        "did not write that op",
    ),
    "a wrong type": (("NORMS = GuestNorm(", "NORMS = dict("), "not a GuestNorm"),
    "a form that is none": (("    form=form,", "    form='form',"), "its form is a str"),
    "our name": (('op="ClampedScaleNorm"', 'op="L2Norm"'), "'L2Norm': that name belongs to normdeploy"),
    "a standard name": (('op="ClampedScaleNorm"', 'op="LayerNormalization"'), "that name belongs to ONNX"),
    "onnxruntime's name": (
        ('op="ClampedScaleNorm"', 'op="SkipLayerNormalization"'),
        "that name belongs to onnxruntime",
    ),
    "a body that can't be read": (("Y = Mul (", "Y = Mul ["), "whose body can't be read"),
    "a body that calls others": (("Y = Mul (", "Y = com.microsoft.Gelu ("), "calls com.microsoft.Gelu"),
    "a body of a later opset": (
        ("Y = Mul (normal, scale)", "Y = Swish (normal)"),
        "calls Swish, which is not a standard op of",
    ),
    "a body that reads nothing": (("Div (X, clamped)", "Div (X, other)"), "reads 'other'"),
    "a body of another attribute": (("= @epsilon", "= @eps"), "reads the attribute 'eps'"),
    "inputs": (('inputs=("X", "scale")', 'inputs=("scale", "X")'), "its inputs are"),
    "an opset": (("since=18", "since=3"), "its opset is 3"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_package_that_breaks_the_contract_is_named_and_nothing_written(
    name: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """One line, no traceback, exit code 1."""
    change, said = BROKEN[name]
    module, out = install(tmp_path, monkeypatch, changed(change)), tmp_path / "out.onnx"
    assert command(monkeypatch, "optimize", plain, "-o", out, "--fuse", "portable") == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: the package {module!r} provides '{module}:NORMS' for normdeploy.norms 'guests'")
    assert re.search(said, error)
    assert "Traceback" not in error
    assert len(error.splitlines()) == 1
    assert not out.exists()


def test_a_broken_package_is_in_nobodys_way_who_does_not_ask_for_it(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "1 / 0")
    for options in ((), ("--fuse", "portable", "--no-extensions")):
        assert command(monkeypatch, "optimize", plain, "-o", tmp_path / "out.onnx", "-q", *options) == 0
    monkeypatch.setenv(extensions.VARIABLE, "1")
    assert command(monkeypatch, "optimize", plain, "-o", tmp_path / "out.onnx", "-q", "--fuse", "portable") == 0


@pytest.mark.parametrize("domain", ["normdeploy", "com.microsoft", "ai.onnx.ml", "trt.plugins", "9lives"])
def test_a_domain_that_is_taken(domain: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = install(tmp_path, monkeypatch, GOOD, name=domain)
    with pytest.raises(ExtensionError, match=f"{module!r} .* has the domain '{domain}'"):
        normdeploy.optimize(plain, fuse="portable")


def test_two_packages_of_one_domain_or_one_op(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (install(tmp_path, monkeypatch, GOOD) for _ in range(2))
    with pytest.raises(ExtensionError, match=f"packages '{first}' and '{second}' both provide"):
        normdeploy.optimize(plain, fuse="portable")
    monkeypatch.undo()
    first, second = (install(tmp_path, monkeypatch, GOOD, name=f"domain{i}") for i in range(2))
    with pytest.raises(ExtensionError, match=f"{second!r} .* has an op 'ClampedScaleNorm', but .*{first!r}"):
        normdeploy.optimize(plain, fuse="portable")


RULES = {
    "raises": (
        ("for node in proto", "proto.nothing\n    for node in proto"),
        "has a rule .* that fails: AttributeError",
    ),
    "gives a text": (("yield GuestFinding(f", "yield str(f"), "TypeError"),
    "gives none": (
        (
            'yield GuestFinding(f"its epsilon {attribute.f:.2g} is subnormal in float16", tensor=node.output[0])',
            "yield 3",
        ),
        "returned 3, not a GuestFinding",
    ),
    "is one of ours": (('id="scale-norm-epsilon"', 'id="refused"'), "has a rule 'refused'"),
    "is no rule": (("RULES = GuestRule(", "RULES = dict("), "not a GuestRule"),
    "level": (("    find=small,", "    find=small, level='fatal',"), "of the level 'fatal'"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_is_broken(
    name: str, written: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, said = RULES[name]
    module = install(tmp_path, monkeypatch, changed(change), "broken", "rules")
    with pytest.raises(ExtensionError, match=f"{module!r} .*{said}"):
        normdeploy.check(written[0])


RUNTIMES = {
    "no runner": (("    def infer(", "    def infers("), "not a normdeploy.runtimes.Runner: it lacks infer"),
    "can't open": (("onnx.load(path)", "onnx.load('nothing')"), "can't open 'net.onnx'"),
    "raises": (("return dict(zip(", "1 / 0\n        return dict(zip("), "fails: ZeroDivisionError"),
    "ends the process": (("return dict(zip(", "raise SystemExit(0)\n        return dict(zip("), "fails: SystemExit: 0"),
    "other names": (("self._model.output_names,", "['z'],"), r"returns \['z'\], but the outputs are"),
}


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_runtime_that_is_broken(
    name: str, written: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, said = RUNTIMES[name]
    module = install(tmp_path, monkeypatch, changed(change), "reference", "runtimes")
    with pytest.raises(ExtensionError, match=f"{module!r} .*{said}"):
        normdeploy.run(written[0], runner="reference")


def test_a_runtime_that_gives_other_numbers_does_not_pass(
    written: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path,
        monkeypatch,
        changed(("dict(feeds))", "{k: v + 1 for k, v in feeds.items()})")),
        "reference",
        "runtimes",
    )
    comparison = normdeploy.verify(Net().eval(), written[0], X, seeds=1, runners=["reference"])
    assert not comparison
    assert {r.runtime for r in comparison.results if not r} == {f"reference (broken_guest_{next(_count) - 1})"}


# ---------------------------------------------------------------------------------------------------- the contract


def test_importing_normdeploy_asks_for_no_entry_point(package: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(package)!r}); import normdeploy, normdeploy.cli.app; "
        "print([m for m in ('importlib.metadata', 'clamped_scale_norm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "clamped_scale_norm" not in done.stdout


def test_a_whole_function_may_be_the_body(package: Path) -> None:
    """The same row by an onnx.FunctionProto: the same function at every opset."""
    norm = third_party.all_third_party_norms()[0].norm
    row = third_party.all_third_party_norms()[0].row
    function = function_bodies.norm_function_body(row, 18)
    extension = extensions.find_extension(extensions.NORMS, "guests")
    assert extension is not None
    whole = third_party.build_row(extension, third_party.GuestNorm(**{**vars(norm), "body": function}))
    for opset in (18, 21, 23):
        assert (
            function_bodies.norm_function_body(whole, opset).SerializeToString()
            == function_bodies.norm_function_body(row, opset).SerializeToString()
        )


def test_the_row_of_a_package_is_none_of_the_table(package: Path) -> None:
    assert not [row for row in ROWS if row.owner is OpOwner.GUEST]
    row = third_party.function_op_row("guests", "ClampedScaleNorm")
    assert row is not None
    assert row.package == "clamped-scale-norm"
    assert third_party.function_op_row("normdeploy", "L2Norm") is OURS["L2Norm"]
    assert third_party.function_op_row("", "LayerNormalization") is None
    assert third_party.third_party_row("other", "ClampedScaleNorm") is None


def test_its_function_is_written_anew_and_no_node_of_the_files_own(written: tuple[Path, Any], package: Path) -> None:
    model = onnx.load(written[0])
    assert [n.op_type for n, _ in nodes_with_opsets(model)] == [op for _, op in NODES]
    with extensions.disabled():
        assert len(nodes_with_opsets(model)) > len(NODES)


def test_its_row_tells_shape_and_type_where_inference_stops(package: Path) -> None:
    """A node without its function: onnx's inference knows nothing of it."""
    text = (
        '<ir_version: 10, opset_import: ["": 21, "guests": 1]> net (float16[N,8] x, float[1] g) => (y)'
        " { z = guests.ClampedScaleNorm <epsilon = 0.5> (x, g) y = guests.Other (z, g) }"
    )
    graph = Graph(onnx.parser.parse_model(text))
    (first,), (second,) = (n.outputs for n in graph.nodes)
    assert (graph.shape(first), graph.dtype(first)) == (("N", 8), np.float16)
    assert (graph.shape(second), graph.dtype(second)) == (None, None)
