"""Nodes get the names that TensorRT's ONNX parser gives them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

import normdeploy
from normdeploy.engines.layer_info import parse_metadata
from normdeploy.verbs.inspect.engine_norms import NormForm
from normdeploy.verbs.inspect.norm_nodes import name_node, read_onnx_norms
from tests.engine_files import BY_HAND, layer, save, tensor, write_model

# Parses argv[1] and prints the metadata of each layer; with a second argument, builds the engine into this file.
PARSE = """
import json, sys
import tensorrt_rtx as trt
log = trt.Logger(trt.Logger.ERROR)
builder = trt.Builder(log)
network = builder.create_network(0)
parser = trt.OnnxParser(network, log)
assert parser.parse(open(sys.argv[1], "rb").read())
print(json.dumps([network.get_layer(i).metadata for i in range(network.num_layers)]))
if len(sys.argv) > 2:
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    open(sys.argv[2], "wb").write(builder.build_serialized_network(network, config))
"""


def parse_with_tensorrt_rtx(*arguments: Path) -> list[str]:
    pytest.importorskip("tensorrt_rtx")
    done = subprocess.run(
        [sys.executable, "-c", PARSE, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    told: list[str] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_unnamed_nodes_and_functions_are_named_as_the_parser_does(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21, "my": 1]>
        net (float[4, 8] x) => (float[4, 8] y) <float[8] g = {1, 2, 3, 4, 5, 6, 7, 8}> {
            a = LayerNormalization<axis = -1>(x, g)
            y = my.Square(a)
        }
        <domain: "my", opset_import: ["": 21]> Square (q) => (o) { o = Mul(q, q) }""")
    onnx.save(model, tmp_path / "m.onnx")
    nodes, callers = set[str](), set[str]()
    for text in parse_with_tensorrt_rtx(tmp_path / "m.onnx"):
        own, outer, whole = parse_metadata(text)
        assert whole
        nodes |= set(own)
        callers |= set(outer)
    first, second = model.graph.node
    assert nodes == {name_node(first), "node_of_o"}
    assert callers == {name_node(second)}


def test_nodes_of_norms_are_listed_without_constants(tmp_path: Path) -> None:
    read = read_onnx_norms(write_model(tmp_path / "m.onnx"))
    assert [(norm.kind, set(norm.nodes)) for norm in read.norms] == [("LayerNorm", set(BY_HAND)), ("LayerNorm", {"ln"})]
    assert read.ops["linear"] == "Gemm"
    assert read.outputs["ln"] == ("y",)


def test_kernels_of_a_real_engine_are_read(tmp_path: Path) -> None:
    """The inspector needs a GPU, but the engine's bytes list the kernels and the metadata of their nodes."""
    source = write_model(tmp_path / "m.onnx")
    parse_with_tensorrt_rtx(source, tmp_path / "m.engine")
    layers = compiled_kernels((tmp_path / "m.engine").read_bytes())
    if not layers:
        pytest.skip("this version of TensorRT-RTX lists its kernels in another way")
    (build,) = normdeploy.inspect_engine(
        save(tmp_path / "e.json", {"Layers": layers, "Bindings": ["x", "y"]}), onnx_files=source
    ).builds
    assert [norm.form for norm in build.norms] == [NormForm.KERNEL] * 2
    assert [norm.missing for norm in build.norms] == [()] * 2
    assert build.norms[0].layers != build.norms[1].layers


def compiled_kernels(engine: bytes) -> list[dict[str, Any]]:
    """The kernels of a TensorRT-RTX engine, in the inspector's form."""
    layers = []
    for line in engine.split(b"\n"):
        kind, found, rest = line.strip().partition(b"={ name=")
        if found and kind in (b"function", b"runtime_fusion") and b' layers="' in rest:
            name = rest.split(b" ")[0].decode()
            nodes = rest.partition(b' layers="')[2].partition(b'"')[0].decode()
            layers.append(layer(name, "kgen", [tensor("x")], [tensor("y")], Metadata=nodes))
    return layers
