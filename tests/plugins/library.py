"""A stand-in for TensorRT's library as far as a build goes: its ONNX importer's choice for each node, and an engine
that holds the kernels.

The importer (onnx-tensorrt, 10.9 and newer) takes a node for the first of: an op of its own, by the op type alone; a
local function, by its name alone; a plugin of that name in ``plugin_namespace``, with the attributes that its creator
names. Plugins go through the real ``tensorrt.plugin`` (`standin.Build`). ``install`` makes what is imported as
``tensorrt`` of it.
"""

from __future__ import annotations

import enum
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
from onnx import helper

from . import standin

TYPES = {onnx.TensorProto.FLOAT: "fp32", onnx.TensorProto.FLOAT16: "fp16", onnx.TensorProto.BFLOAT16: "bf16"}
TYPES |= {onnx.TensorProto.INT8: "i8", onnx.TensorProto.FLOAT8E4M3FN: "fp8e4nv"}
TENSORRT_TYPES = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16", "i8": "INT8", "fp8e4nv": "FP8"}
LayerType = enum.Enum("LayerType", "NORMALIZATION PLUGIN_V3 OTHER")


@dataclass
class Layer:
    type: Any
    node: onnx.NodeProto
    plugin: standin.Build | None = None
    outputs: list[Any] = field(default_factory=list)

    num_outputs = property(lambda self: len(self.outputs))

    def get_output(self, index: int) -> Any:
        return self.outputs[index]


@dataclass
class Network:
    """What the importer makes of a model; ``flags``: names of those that it was created with."""

    flags: list[str] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)

    def read(self, model: onnx.ModelProto) -> None:
        """
        Raises:
            ValueError: a node is neither of its own ops nor a function nor a plugin, or a plugin refuses it.
        """
        functions = {f.name: f for f in model.functions}
        types = {v.name: v.type for v in model.graph.input}
        types |= {t.name: helper.make_tensor_type_proto(t.data_type, t.dims) for t in model.graph.initializer}
        data = {t.name: t for t in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type in functions:
                self.layers.append(Layer(LayerType.OTHER, node))
                types.update((name, types[node.input[0]]) for name in node.output)
            elif any(a.name == "plugin_namespace" for a in node.attribute):
                self.layers.append(Layer(LayerType.PLUGIN_V3, node, plugin := _plugin(node, types)))
                types.update((name, _type(plugin, i)) for i, name in enumerate(node.output))
            elif onnx.defs.has(node.op_type):
                self.layers.append(
                    Layer(LayerType.NORMALIZATION if "Normalization" in node.op_type else LayerType.OTHER, node)
                )
                schema = onnx.defs.get_schema(node.op_type, model.opset_import[0].version)
                read = {i: types[i] for i in node.input}
                held = {i: data[i] for i in node.input if i in data}
                types |= onnx.shape_inference.infer_node_outputs(
                    schema, node, read, held, opset_imports=list(model.opset_import)
                )
            else:
                raise ValueError(
                    f"Plugin not found, are the plugin name, version, and namespace correct? {node.op_type}"
                )
            self.layers[-1].outputs = [_tensor(name, types[name]) for name in node.output if name]


def _tensor(name: str, kind: onnx.TypeProto) -> Any:
    """Return the name and the type of a tensor as an ITensor shows them."""
    return SimpleNamespace(name=name, dtype=SimpleNamespace(name=TENSORRT_TYPES[TYPES[kind.tensor_type.elem_type]]))


def _plugin(node: onnx.NodeProto, types: dict[str, onnx.TypeProto]) -> standin.Build:
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    marks = [given.pop(name) for name in ("plugin_namespace", "plugin_version", "aot")]
    if marks != [b"normdeploy", b"1", 1] or onnx.defs.has(node.op_type):
        raise ValueError(f"Plugin not found: {node.op_type}, {marks}")
    shapes = [[d.dim_param or d.dim_value for d in types[i].tensor_type.shape.dim] for i in node.input]
    kinds = [TYPES[types[i].tensor_type.elem_type] for i in node.input]
    plugin = standin.Build(node.op_type, shapes, kinds, given)
    if tuple(plugin.types + plugin.output_types) not in plugin.combinations:
        raise ValueError(f"{node.op_type} takes no such types: {plugin.types}, {plugin.output_types}")
    return plugin


def _type(plugin: standin.Build, output: int) -> onnx.TypeProto:
    """Of one output; a size that is not constant has its place's name if the first input has it, which is enough for
    one more node."""
    names = {kind: number for number, kind in TYPES.items()}
    kind = {v: k for k, v in standin._NAMES.items()}[plugin.output_types[output]]
    dims = [d.constant if d.constant is not None else plugin.named.get(id(d), "n") for d in plugin.outputs[output]]
    return helper.make_tensor_type_proto(names[kind], dims)


# ------------------------------------------------------------------ what is imported as ``tensorrt``


def install(version: str = "11.4.0.106") -> None:
    """Put a ``tensorrt`` into sys.modules that builds "engines" of what its importer reads; the real
    ``tensorrt.plugin`` is in it."""
    folder = standin.plugin_folder()
    assert folder is not None, "tensorrt.plugin is not here (pip install --no-deps tensorrt-cu13-bindings)"
    standin.install(folder)
    trt: Any = sys.modules["tensorrt"]
    trt.__version__ = version

    class Flags(enum.IntEnum):
        PREFER_AOT_PYTHON_PLUGINS = 3  # whatever: only the name is to be relied on
        STRONGLY_TYPED = 5

    class Builder:
        def __init__(self, logger: Any) -> None:
            pass

        def create_network(self, flags: int = 0) -> Any:
            return _Network([f.name for f in Flags if flags >> f & 1])

        def create_builder_config(self) -> Any:
            return _Config()

        create_optimization_profile = create_builder_config

        def build_serialized_network(self, network: Any, config: Any) -> bytes:
            sizes = json.loads(os.environ["STANDIN_SIZES"])
            kernels = [layer.plugin.launch(1, sizes)[1].decode() for layer in network.layers if layer.plugin]
            return b"ptrt" + json.dumps({"flags": network.flags, "kernels": kernels}).encode()

    class _Network(Network):
        num_inputs = 0
        num_outputs = 1
        num_layers = property(lambda self: len(self.layers))
        has_implicit_batch_dimension = False

        def __iter__(self) -> Any:
            return iter(())  # precisions of layers, which TensorRT 11 has no more

        def get_layer(self, i: int) -> Layer:
            return self.layers[i]

    class OnnxParser:
        def __init__(self, network: Any, logger: Any) -> None:
            self.network, self.errors = network, []

        num_errors = property(lambda self: len(self.errors))

        def parse_from_file(self, path: str) -> bool:
            self.network.read(onnx.load(Path(path)))
            if os.environ.get("STANDIN_LOSES_A_LAYER"):
                self.network.layers[0].type = LayerType.OTHER
            return True

    for name, member in {
        "Builder": Builder,
        "init_libnvinfer_plugins": lambda logger, namespace: True,
        "OnnxParser": OnnxParser,
        "NetworkDefinitionCreationFlag": Flags,
        "LayerType": LayerType,
        "ILogger": type("ILogger", (), {"__init__": lambda self: None}),
        "IProgressMonitor": type("IProgressMonitor", (), {"__init__": lambda self: None}),
    }.items():
        setattr(trt, name, member)
    for severity in ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"):
        setattr(trt.Logger, severity, severity)
    for name, members in {"ProfilingVerbosity": "DETAILED", "DeviceType": "GPU DLA", "BuilderFlag": "TF32"}.items():
        setattr(trt, name, enum.Enum(name, members))


class _Config:
    """A builder's config, or a profile: takes whatever it is told."""

    DLA_core, default_device_type, num_optimization_profiles = -1, "GPU", 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("set_", "add_", "clear_", "create_", "get_")):
            return lambda *_, **__: None
        raise AttributeError(name)
