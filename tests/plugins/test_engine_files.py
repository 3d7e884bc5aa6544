"""Files as ``build --norm-impl plugin`` hands them to TensorRT, through the real ``tensorrt.plugin``; the whole build
over a stand-in."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from normdeploy_plugins import qdp
from normdeploy_plugins.ops import BY_NAME

import normdeploy
from normdeploy.engines.norm_implementations import implement_norms
from normdeploy.errors import BuildError, RuntimeUnavailable
from normdeploy.storage.onnx_files import save_onnx

from ..norm_nodes import MODELS, SIZES
from . import library, standin

FOLDER = standin.plugin_folder()
pytestmark = [
    pytest.mark.usefixtures("cache"),
    pytest.mark.skipif(
        FOLDER is None, reason="tensorrt.plugin is not here (pip install --no-deps tensorrt-cu13-bindings)"
    ),
]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMDEPLOY_COMPUTE_CAPABILITY", "8.9")
        real = {name: held for name, held in sys.modules.items() if name.partition(".")[0] == "tensorrt"}
        assert FOLDER is not None
        standin.install(FOLDER)
        try:
            qdp.register()
            yield
        finally:
            for name in [n for n in sys.modules if n.partition(".")[0] == "tensorrt"]:
                del sys.modules[name]
            sys.modules.update(real)


def read(proto: onnx.ModelProto, sizes: dict[str, int] | None = None) -> list[library.Layer]:
    written, _ = implement_norms(proto, norm_impl="plugin", runtime="tensorrt", sizes=sizes)
    network = library.Network()
    network.read(written)
    return network.layers


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("dtype", ["float", "float16", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_importer_makes_plugins_of_the_nodes(name: str, dtype: str, static: bool) -> None:
    """Names, attributes, types and tactics of the very nodes that were written; outputs have the shape that the file
    states."""
    model = MODELS[name]
    layers = read(model.portable(dtype, static=static), SIZES)
    found = [layer for layer in layers if layer.plugin]
    assert tuple(layer.node.op_type for layer in found) == model.plugins
    last = found[-1].plugin
    assert last is not None
    shapes = [
        [SIZES.get(d, d) if not d.isdigit() else int(d) for d in dims.split(",")] for dims in model.outputs.values()
    ]
    assert [list(shape) for shape in last.output_shapes(SIZES)][: len(shapes)] == shapes
    assert last.tactics


@pytest.mark.parametrize("name", MODELS)
def test_what_is_launched(name: str) -> None:
    """The kernel of the first tactic, compiled, with its grid and arguments for two sets of sizes: those of the op at
    these sizes."""
    for layer in (layer for layer in read(MODELS[name].portable("float16"), SIZES) if layer.plugin):
        assert layer.plugin is not None
        op = BY_NAME[layer.node.op_type]
        kernels = set()
        for sizes in (SIZES, {"b": 3, "s": 19, "h": 8, "w": 8}):
            kernel, ptx, params, extra = layer.plugin.launch(1, sizes)
            text = ptx.decode()
            kernels.add(text)
            assert f".entry {kernel}(" in text
            assert params["grid_x"] >= 1
            parameters = re.findall(r"\.param \.(\w+)", text[: text.index("{")])
            assert parameters == ["u64"] * len(op.inputs) + ["u32"] * len(extra) + ["u64"] * len(op.outputs)
        assert len(kernels) == 1


def test_two_launches() -> None:
    sizes = {"b": 1, "h": 128, "w": 128}
    first, second = read(MODELS["GroupNormalization"].portable("float16"), sizes)
    assert first.plugin is not None
    assert second.plugin is not None
    assert first.plugin.output_shapes(sizes) == [(8, 8, 2)]
    assert second.plugin.output_shapes(sizes) == [(1, 32, 128, 128)]
    assert first.plugin.launch(1, sizes)[2]["grid_x"] == 8 * 8


# ------------------------------------------------------------------ the whole build


@pytest.fixture
def engine_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in; the worker finds the stand-in as ``tensorrt``."""
    package = tmp_path / "packages" / "tensorrt"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from tests.plugins.library import install\ninstall()\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("STANDIN_SIZES", json.dumps(SIZES))
    build_module = importlib.import_module("normdeploy.verbs.build.build_function")
    monkeypatch.setattr(build_module, "describe_missing_runtime", lambda runtime, gpu: "")
    monkeypatch.setattr(build_module, "installed_version", lambda runtime: "11.4.0.106")
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.mark.parametrize("external", [False, True])
def test_the_worker_registers_the_plugins_and_the_engine_holds_their_kernels(
    engine_builder: Path, external: bool
) -> None:
    name = "Add, RMSNormalization"
    source, target = engine_builder / "m.onnx", engine_builder / "m.engine"
    save_onnx(MODELS[name].proto("float16", static=True), source, external=external)
    before = sorted(p.name for p in engine_builder.iterdir())
    engine = normdeploy.build(source, target, library="tensorrt", norm_impl="plugin")
    assert sorted(p.name for p in engine_builder.iterdir()) == sorted([*before, "m.engine"])
    assert [(n.op, n.form) for n in engine.norms] == [("normdeploy.AddRMSNorm", "plugin AddRMSNorm")]
    assert engine.norm_impl == "plugin"
    held = json.loads(target.read_bytes()[4:])
    assert sorted(held["flags"]) == ["PREFER_AOT_PYTHON_PLUGINS", "STRONGLY_TYPED"]
    (kernel,) = held["kernels"]
    assert re.search(r"\.entry add_rms_norm_kernel_[0-9a-f]{16}\(", kernel)
    assert ".target sm_89\n" in kernel


@pytest.mark.parametrize(("to", "element"), [("int8", onnx.TensorProto.INT8), ("fp8", onnx.TensorProto.FLOAT8E4M3FN)])
def test_a_quantized_norm_is_a_kernel_of_the_engine(engine_builder: Path, to: str, element: int) -> None:
    """A residual block in half precision from the file to the engine."""
    source, target = engine_builder / "m.onnx", engine_builder / "m.engine"
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float16[2,5,64] x, float16[2,5,64] r) =>
        (float16[2,5,64] y, float16[2,5,64] sum)
        { sum = Add (x, r) norm = LayerNormalization <axis = -1> (sum, g) q = QuantizeLinear (norm, scale, zero)
          y = DequantizeLinear (q, scale, zero) }"""
    )
    half = onnx.TensorProto.FLOAT16
    proto.graph.initializer.extend(
        [
            onnx.helper.make_tensor("g", half, [64], [1.5] * 64),
            onnx.helper.make_tensor("scale", half, [], [0.0625]),
            onnx.helper.make_tensor("zero", element, [], [0]),
        ]
    )
    save_onnx(proto, source)
    engine = normdeploy.build(source, target, library="tensorrt", norm_impl="plugin")
    assert [(n.op, n.form) for n in engine.norms] == [
        ("normdeploy.AddLayerNormQuantize", "plugin AddLayerNormQuantize")
    ]
    (kernel,) = json.loads(target.read_bytes()[4:])["kernels"]
    assert ("e4m3x2" in kernel) == (to == "fp8")
    assert re.search(r"\.entry add_layer_norm_quantize_kernel_[0-9a-f]{16}\(", kernel)


def test_a_plugin_layer_that_is_missing_is_an_error(engine_builder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "RMSNormalization"
    save_onnx(MODELS[name].proto("float16", static=True), engine_builder / "m.onnx")
    monkeypatch.setenv("STANDIN_LOSES_A_LAYER", "1")
    with pytest.raises(BuildError, match=r"made 0 plugin layers of the 1 plugin nodes in m\.onnx"):
        normdeploy.build(engine_builder / "m.onnx", engine_builder / "m.engine", library="tensorrt", norm_impl="plugin")
    assert sorted(p.name for p in engine_builder.iterdir()) == ["m.engine.log", "m.onnx"]


@pytest.mark.parametrize("lacks", ["triton", "tensorrt.plugin"])
def test_what_the_worker_lacks_is_said(lacks: str, engine_builder: Path) -> None:
    name = "RMSNormalization"
    save_onnx(MODELS[name].proto("float16", static=True), engine_builder / "m.onnx")
    package = engine_builder.parent / "packages" / lacks.partition(".")[0] / "__init__.py"
    if lacks == "triton":
        package.parent.mkdir()
        package.write_text("raise ImportError('no triton in the worker')")
    else:
        package.write_text(package.read_text() + "import sys\nsys.modules['tensorrt.plugin'] = None\n")
    with pytest.raises(RuntimeUnavailable, match=r"TensorRT can't load the kernels: .*; pip install triton"):
        normdeploy.build(engine_builder / "m.onnx", engine_builder / "m.engine", library="tensorrt", norm_impl="plugin")
    assert [p.name for p in engine_builder.iterdir() if "engine" in p.name] == []


def test_native_files_are_parsed_as_they_are(engine_builder: Path) -> None:
    name = "LayerNormalization"
    save_onnx(MODELS[name].proto("float16", static=True), engine_builder / "m.onnx")
    for norm_impl in ("native", "auto"):
        engine = normdeploy.build(
            engine_builder / "m.onnx", engine_builder / "m.engine", library="tensorrt", norm_impl=norm_impl
        )
        assert [n.form for n in engine.norms] == ["native node"] * (norm_impl == "auto")
        assert json.loads(engine.path.read_bytes()[4:]) == {"flags": ["STRONGLY_TYPED"], "kernels": []}
