"""Engines built for real by TensorRT-RTX, which needs no GPU; what is refused before, and what the user learns of
failures."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.compose
import pytest
from onnx import helper

from normdeploy.errors import BuildError, GraphError, InputError, RuntimeUnavailable
from normdeploy.runtimes import trt_runner
from normdeploy.verbs.build.build_function import Engine, build
from tests.norm_nodes import MODELS as NODES

RTX = ("8.6", "8.9", "12.0")


def saved(path: Path, text: str, **constants: np.ndarray) -> Path:
    """An ONNX file from onnx's own text form ``(inputs) => (outputs) { nodes }``, with the given initializers."""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> g {text}')
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(v, np.float32), k) for k, v in constants.items()
    )
    for number, node in enumerate(proto.graph.node):
        node.name = f"node{number}"
        node.metadata_props.add(key="normdeploy.module", value=f"layers.{number}.norm")
    onnx.save(proto, path)
    return path


ONES = np.ones(8)
MODELS: Mapping[str, tuple[str, dict[str, np.ndarray]]] = {
    "LayerNorm": (
        "(float[batch, 8] x) => (float[batch, 8] y) { y = LayerNormalization(x, s, b) }",
        {"s": ONES, "b": ONES},
    ),
    "GroupNorm": (
        "(float[batch, 8, 4, 4] x) => (float[batch, 8, 4, 4] y) { y = GroupNormalization<num_groups=2>(x, s, b) }",
        {"s": ONES, "b": ONES},
    ),
    "InstanceNorm": (
        "(float[batch, 8, 4, 4] x) => (float[batch, 8, 4, 4] y) { y = InstanceNormalization(x, s, b) }",
        {"s": ONES, "b": ONES},
    ),
    "BatchNorm": (
        (
            "(float[batch, 3, 4, 4] x) => (float[batch, 8, 4, 4] y) "
            "{ c = Conv<pads=[1, 1, 1, 1]>(x, w) y = BatchNormalization(c, s, b, m, v) }"
        ),
        {"w": np.ones((8, 3, 3, 3)), "s": ONES, "b": ONES, "m": ONES, "v": ONES},
    ),
    "attention": (
        (
            "(float[batch, seq, 8] x) => (float[batch, seq, 8] y) { t = Transpose<perm=[0, 2, 1]>(x) q = MatMul(x, t) a"
            " = Softmax(q) h = MatMul(a, x) r = Add(h, x) y = LayerNormalization(r, s) }"
        ),
        {"s": ONES},
    ),
}


@pytest.fixture
def layer_norm(tmp_path: Path) -> Path:
    text, constants = MODELS["LayerNorm"]
    return saved(tmp_path / "m.onnx", text, **constants)


@pytest.mark.parametrize("name", MODELS)
def test_engines_for_three_generations_of_gpus(name: str, tmp_path: Path) -> None:
    text, constants = MODELS[name]
    path = saved(tmp_path / "m.onnx", text, **constants)
    steps: list[tuple[str, int, int]] = []
    profiles = ["batch=1:2:4", "seq=1:16:64"] if "seq" in text else ["batch=1:2:4"]
    engine = build(
        path,
        tmp_path / "m.engine",
        compute_capabilities=RTX,
        profiles=profiles,
        progress=lambda *step: steps.append(step),
    )
    assert isinstance(engine, Engine)
    assert engine.path.read_bytes()[:4] == b"vtrt"
    assert engine.bytes == engine.path.stat().st_size > 10_000
    assert engine.runtime == "tensorrt-rtx"
    assert engine.version == importlib.metadata.version("tensorrt-rtx")
    assert engine.compute_capabilities == RTX
    assert [shape[0] for shape in engine.profile["x"]] == [1, 2, 4]
    assert engine.layers >= len(onnx.load(path).graph.node)
    assert engine.seconds > 0
    assert steps[0] == ("build", 0, 0)
    assert steps[-1][1] > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.engine", "m.onnx"]


def test_two_builds_give_the_same_bytes(layer_norm: Path, tmp_path: Path) -> None:
    engines = [
        build(layer_norm, tmp_path / f"{i}.engine", profiles={"batch": (1, 2, 4)}, compute_capabilities=RTX)
        for i in range(2)
    ]
    assert engines[0].path.read_bytes() == engines[1].path.read_bytes()
    other = build(
        layer_norm, tmp_path / "other.engine", profiles={"x": ((1, 8), (2, 8), (4, 8))}, compute_capabilities=("7.5",)
    )
    assert other.path.read_bytes() != engines[0].path.read_bytes()


def test_a_static_model_needs_no_profile_and_external_weights_are_read_by_path(tmp_path: Path) -> None:
    path = saved(tmp_path / "s.onnx", "(float[2, 8] x) => (float[2, 8] y) { y = LayerNormalization(x, s) }", s=ONES)
    inside = build(path, tmp_path / "inside.engine")
    assert inside.profile == {}
    assert inside.compute_capabilities == ()
    onnx.save(
        onnx.load(path), path, save_as_external_data=True, location="w.bin", size_threshold=0, convert_attribute=False
    )
    assert (tmp_path / "w.bin").stat().st_size == 32
    assert build(path, tmp_path / "outside.engine").path.read_bytes() == inside.path.read_bytes()


def test_the_ranges_that_the_file_recorded_are_the_profile(tmp_path: Path) -> None:
    import torch

    from normdeploy.exporting.exporter import export_to_proto, write_record
    from normdeploy.loading import from_module
    from normdeploy.storage.onnx_files import save_onnx

    model = from_module(torch.nn.LayerNorm(8).eval(), inputs=["x:float32[batch=1:3:9,8]"])
    proto = export_to_proto(model)
    save_onnx(proto, tmp_path / "bare.onnx")
    with pytest.raises(InputError, match="dim 'batch' of input"):
        build(tmp_path / "bare.onnx", tmp_path / "m.engine")
    write_record(proto, model, {})
    save_onnx(proto, tmp_path / "m.onnx")
    assert build(tmp_path / "m.onnx", tmp_path / "m.engine").profile == {"x": ((1, 8), (3, 8), (9, 8))}
    given = build(tmp_path / "m.onnx", tmp_path / "m.engine", profiles=["batch=2:2:5"])
    assert given.profile == {"x": ((2, 8), (2, 8), (5, 8))}


def test_layers_of_a_quantized_file_are_counted_by_type(tmp_path: Path) -> None:
    text = """(float[2, 8] x) => (float[2, 8] y) <float scale = {0.1}, int8 zero = {0}> {
        q = QuantizeLinear(x, scale, zero)
        a = DequantizeLinear(q, scale, zero)
        y = MatMul(a, w) }"""
    path = saved(tmp_path / "q.onnx", text, w=np.ones((8, 8)))
    assert build(path, tmp_path / "q.engine").types["int8"] >= 1


def test_a_plan_of_tensorrt_rtx_is_noted_as_such(layer_norm: Path, tmp_path: Path) -> None:
    plan = build(layer_norm, tmp_path / "m.plan", profiles=["batch=1:2:4"])
    assert any("TensorRT and Triton's TensorRT backend do not load it" in note for note in plan.notes)
    engine = build(layer_norm, tmp_path / "m.engine", profiles=["batch=1:2:4"])
    assert not any("Triton" in note for note in engine.notes)


# ------------------------------------------------------------------ refused before anything is built


def test_compute_capabilities_that_do_not_exist(layer_norm: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"does not support compute capability 9\.0; it supports 7\.5, 8\.0, 8\.6, 8\.9, 12\.0, 12\.1\. For"
        " another GPU, build on a machine that has it, with the full TensorRT: normdeploy build --library tensorrt",
    ):
        build(layer_norm, tmp_path / "m.engine", profiles=["batch=1:2:4"], compute_capabilities=["8.6", "9.0"])
    with pytest.raises(
        InputError, match=r"can't read the compute capability 'sm86'; write it as NVIDIA does, such as 8\.6"
    ):
        build(layer_norm, tmp_path / "m.engine", profiles=["batch=1:2:4"], compute_capabilities=["sm86"])
    assert not list(tmp_path.glob("m.engine*"))


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (b"", GraphError, "not an ONNX file"),
        (b"junk" * 99, GraphError, "not an ONNX file"),
        ("(float[2] x) => (float[2] y) { y = Ident(x) }", GraphError, "violates the ONNX specification"),
        ("(float[2] x) => (float[2] x) { }", BuildError, "has no nodes"),
    ],
    ids=["empty", "junk", "unknown operator", "no nodes"],
)
def test_files_that_are_no_models(text: str | bytes, kind: type[Exception], said: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    if isinstance(text, bytes):
        path.write_bytes(text)
    else:
        saved(path, text)
    with pytest.raises(kind, match=said):
        build(path, tmp_path / "m.engine")
    assert not list(tmp_path.glob("m.engine*"))


def test_what_is_not_there(layer_norm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GraphError, match="file not found"):
        build(tmp_path / "none.onnx", tmp_path / "m.engine")
    with pytest.raises(InputError, match="unknown library 'openvino'"):
        build(layer_norm, tmp_path / "m.engine", library="openvino")
    with pytest.raises(InputError, match="would replace the model it is built from"):
        build(layer_norm, layer_norm)
    monkeypatch.setattr(trt_runner.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(trt_runner, "explain_missing_gpu", lambda: "no GPU: none here")
    with pytest.raises(RuntimeUnavailable, match=r"TensorRT \(.*\): no GPU: none here"):
        build(layer_norm, tmp_path / "m.engine", library="tensorrt")
    monkeypatch.setattr(trt_runner, "explain_missing_gpu", lambda: "")
    with pytest.raises(InputError, match=r"TensorRT builds only for the GPU in this machine, not for 8\.6"):
        build(layer_norm, tmp_path / "m.engine", library="tensorrt", compute_capabilities=["8.6"])
    monkeypatch.setattr(trt_runner.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeUnavailable, match=r"TensorRT-RTX is not installed; pip install tensorrt-rtx"):
        build(layer_norm, tmp_path / "m.engine")


# ------------------------------------------------------------------ failures of the library


REFUSED = {
    "SkipLayerNormalization": ("y = com.microsoft.SkipLayerNormalization(x, x, s)", "Plugin not found"),
    "mixed types": ("h = Cast<to=10>(s) y = LayerNormalization(x, h)", "must have identical types"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_parser_s_errors_name_node_operator_and_module(name: str, tmp_path: Path) -> None:
    nodes, said = REFUSED[name]
    path = saved(tmp_path / "m.onnx", f"(float[2, 8] x) => (float[2, 8] y) {{ {nodes} }}", s=ONES)
    number = len(onnx.load(path).graph.node) - 1
    with pytest.raises(BuildError) as caught:
        build(path, tmp_path / "m.engine")
    message = str(caught.value)
    assert f"node 'node{number}', " in message
    assert f"LayerNormalization (module layers.{number}.norm): " in message
    assert said in message
    assert "CUDA" not in message  # the library's remark that there is no GPU is not the reason
    assert f"The log is in {str(tmp_path / 'm.engine.log')!r}" in message
    assert "[E]" in (tmp_path / "m.engine.log").read_text()


def test_a_shape_that_is_an_input(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.onnx", "(float[2, 8] x, int64[2] shape) => (float[a, b] y) { y = Reshape(x, shape) }")
    with pytest.raises(BuildError, match=r"needs the values of \['shape'\]"):
        build(path, tmp_path / "m.engine")


def test_an_error_inside_a_function_names_the_way_to_it(tmp_path: Path) -> None:
    inner = helper.make_node("LayerNormalization", ["a", "s"], ["b"], name="inner")
    function = helper.make_function("ours", "Norm", ["a", "s"], ["b"], [inner], [helper.make_opsetid("", 21)])
    x, y = (helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [2, 8]) for n in "xy")
    half = onnx.numpy_helper.from_array(np.ones(8, np.float16), "s")
    graph = helper.make_graph(
        [helper.make_node("Norm", ["x", "s"], ["y"], name="outer", domain="ours")], "g", [x], [y], [half]
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("ours", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=10), tmp_path / "m.onnx")
    with pytest.raises(BuildError, match=r"LayerNormalization \(in function .*outer.*\): .*identical types"):
        build(tmp_path / "m.onnx", tmp_path / "m.engine")


def test_a_failed_build_leaves_the_old_engine_and_a_good_one_removes_the_old_log(
    layer_norm: Path, tmp_path: Path
) -> None:
    engine = tmp_path / "m.engine"
    build(layer_norm, engine, profiles=["batch=1:2:4"])
    before = engine.read_bytes()
    nodes, _ = REFUSED["mixed types"]
    bad = saved(tmp_path / "bad.onnx", f"(float[2, 8] x) => (float[2, 8] y) {{ {nodes} }}", s=ONES)
    with pytest.raises(BuildError, match=r"m\.engine is unchanged"):
        build(bad, engine)
    assert engine.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.onnx", "m.engine", "m.engine.log", "m.onnx"]
    build(layer_norm, engine, profiles=["batch=1:2:4"])
    assert engine.read_bytes() == before
    assert not (tmp_path / "m.engine.log").exists()


# ------------------------------------------------------------------ the form of the norms


@pytest.mark.parametrize("norm_impl", ["native", "auto"])
def test_every_norm_is_built_in_a_form_that_tensorrt_rtx_reads(norm_impl: str, tmp_path: Path) -> None:
    """All our ops in one file, and GroupNormalization of one group, of which its parser would make an instance norm."""
    names = [
        "GroupNormalization, SiLU",
        "GroupNormalization of one group",
        "LayerNorm over channels",
        "GroupNormalization",
    ]
    parts = [replace(NODES[n], opset=21).portable(static=True) for n in names]
    merged = onnx.compose.add_prefix(parts[0], "0")
    for i, part in enumerate(parts[1:], 1):
        part.ir_version = merged.ir_version
        merged = onnx.compose.merge_models(
            merged, onnx.compose.add_prefix(part, str(i)), io_map=[(f"{i - 1}y", f"{i}x")]
        )
    onnx.save(merged, tmp_path / "m.onnx")
    engine = build(tmp_path / "m.onnx", tmp_path / "m.engine", norm_impl=norm_impl)
    assert engine.norm_impl == norm_impl
    assert len(engine.norms) == (
        4 if norm_impl == "auto" else 0
    )  # portable has written no GroupNormalization of one group
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.engine", "m.onnx"]


def test_a_native_build_mends_what_would_be_read_wrongly(tmp_path: Path) -> None:
    onnx.save(NODES["GroupNormalization of one group"].proto(static=True), tmp_path / "m.onnx")
    before = (tmp_path / "m.onnx").read_bytes()
    engine = build(tmp_path / "m.onnx", tmp_path / "m.engine")
    assert [(n.module, n.op, n.form) for n in engine.norms] == [
        ("layers.0", "GroupNormalization", "LayerNormalization(axis=1)")
    ]
    assert (tmp_path / "m.onnx").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.engine", "m.onnx"]


def test_a_rewritten_model_above_protobuf_s_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights go to a file beside it, and both are gone afterwards."""
    proto = NODES["LayerNormalization over two dims"].proto(static=True)
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=1024)
    monkeypatch.setattr(importlib.import_module("normdeploy.storage.onnx_files"), "PROTOBUF_LIMIT", 1500)
    engine = build(tmp_path / "m.onnx", tmp_path / "m.engine", norm_impl="auto")
    assert [n.form for n in engine.norms] == ["native node"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.engine", "m.onnx", "w.bin"]


def test_plugins_for_tensorrt_rtx_are_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="TensorRT-RTX's ONNX parser supports no plugins"):
        build(tmp_path / "none.onnx", tmp_path / "m.engine", norm_impl="plugin")


@pytest.mark.parametrize(
    ("more", "said", "code"),
    [
        pytest.param(
            ["--runtime", "tensorrt"],
            "not run, so neither passed nor failed: TensorRT (m.onnx): TensorRT is not installed; pip install tensorrt",
            3,
            marks=pytest.mark.skipif(
                importlib.util.find_spec("tensorrt") is not None, reason="tensorrt is installed here"
            ),
        ),
        (
            [],
            "TensorRT-RTX's ONNX parser supports no plugins, so its engines can't contain our kernels; choose "
            "--norm-impl",
            1,
        ),
    ],
)
def test_what_a_user_sees_who_asks_for_plugins(more: list[str], said: str, code: int, tmp_path: Path) -> None:
    onnx.save(NODES["LayerNormalization"].proto(), tmp_path / "m.onnx")
    command = [sys.executable, "-m", "normdeploy", "build", "m.onnx", "-o", "m.engine", "--norm-impl", "plugin", *more]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_the_report_says_how_each_norm_was_built(tmp_path: Path) -> None:
    onnx.save(NODES["GroupNormalization of one group"].proto(static=True), tmp_path / "m.onnx")
    command = [
        sys.executable,
        "-m",
        "normdeploy",
        "build",
        "m.onnx",
        "-o",
        "m.engine",
        "--report",
        "r.json",
        "--norm-impl",
        "auto",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert re.search(r"layers\.0\s+LayerNormalization\s+native node", done.stdout)
    engine = json.loads((tmp_path / "r.json").read_text())["engine"]
    assert engine["norm_impl"] == "auto"
    assert engine["norms"] == [
        {
            "node": engine["norms"][0]["node"],
            "module": "layers.0",
            "op": "LayerNormalization",
            "form": "native node",
            "reason": "TensorRT has its own layer for it",
        }
    ]


def test_fp8_is_refused_for_gpus_without_it(tmp_path: Path) -> None:
    """The library's own words are of its compiler's passes."""
    weight = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT8E4M3FN, [2, 2], [1.0, 2.0, 3.0, 4.0])
    scale = onnx.helper.make_tensor("s", onnx.TensorProto.FLOAT, [], [0.5])
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 2]) for name in "xy"]
    nodes = [
        onnx.helper.make_node("DequantizeLinear", ["w", "s"], ["d"]),
        onnx.helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    graph = onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:], [weight, scale])
    file = tmp_path / "fp8.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10), file)
    with pytest.raises(
        InputError, match=r"computes in FP8 .*needs compute capability 8\.9 or newer, but 8\.6 was requested"
    ):
        build(file, tmp_path / "e.engine", compute_capabilities=["8.6", "8.9"])
    assert list(tmp_path.iterdir()) == [file]
