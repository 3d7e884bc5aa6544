"""A stand-in for the compiled half of ``tensorrt``, enough to run the real ``tensorrt.plugin`` (pure Python, in the
bindings' wheel).

``install`` puts both into sys.modules; ``Build`` takes a plugin through the calls that TensorRT's builder makes, with
symbolic sizes that can be evaluated for any shape afterwards.
"""

from __future__ import annotations

import enum
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Environment = dict[str, int]


class Expression:
    """IDimensionExpr: a size as a function of the dynamic ones."""

    def __init__(self, value: Callable[[Environment], int], constant: int | None = None) -> None:
        self.value, self.constant = value, constant

    def is_constant(self) -> bool:
        return self.constant is not None

    def get_constant_value(self) -> int:
        assert self.constant is not None
        return self.constant


def literal(value: int) -> Expression:
    assert -(2**31) <= value < 2**31, "TensorRT's constants are int32"
    return Expression(lambda _: value, value)


DimensionOperation = enum.Enum("DimensionOperation", "SUM PROD MAX MIN SUB EQUAL LESS FLOOR_DIV CEIL_DIV")
_OPERATIONS: dict[Any, Callable[[int, int], int]] = {
    DimensionOperation.SUM: lambda a, b: a + b,
    DimensionOperation.PROD: lambda a, b: a * b,
    DimensionOperation.MAX: max,
    DimensionOperation.MIN: min,
    DimensionOperation.SUB: lambda a, b: a - b,
    DimensionOperation.EQUAL: lambda a, b: int(a == b),
    DimensionOperation.LESS: lambda a, b: int(a < b),
    DimensionOperation.FLOOR_DIV: lambda a, b: a // b,
    DimensionOperation.CEIL_DIV: lambda a, b: -(-a // b),
}


class Builder:
    """IExprBuilder."""

    def constant(self, value: int) -> Expression:
        return literal(value)

    def operation(self, op: Any, a: Expression, b: Expression) -> Expression:
        apply = _OPERATIONS[op]
        if a.constant is not None and b.constant is not None:
            return literal(apply(a.constant, b.constant))
        return Expression(lambda env: apply(a.value(env), b.value(env)))


DataType = enum.Enum("DataType", "FLOAT HALF BF16 INT8 INT32 INT64 BOOL UINT8 FP8 INT4 FP4")
TensorFormat = enum.Enum("TensorFormat", "LINEAR HWC HWC8 CHW32")


class Dims(tuple):
    MAX_DIMS = 8


@dataclass
class PluginTensorDesc:
    dims: Any = ()
    type: Any = None
    format: Any = TensorFormat.LINEAR
    scale: float = 0.0


@dataclass
class DynamicPluginTensorDesc:
    desc: PluginTensorDesc
    min: Any = ()
    opt: Any = ()
    max: Any = ()


@dataclass
class PluginField:
    name: str
    data: Any = None
    type: Any = None


class DimsExprs(list):
    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


class Registry:
    def __init__(self) -> None:
        self.creators: dict[tuple[str, str], Any] = {}

    def register_creator(self, creator: Any, namespace: str) -> bool:
        self.creators[creator.name, namespace] = creator
        return True

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        return self.creators[name, namespace]


def module() -> types.ModuleType:
    trt = types.ModuleType("tensorrt")
    registry = Registry()
    empty = (
        "ITensor",
        "IPluginV3",
        "IPluginV3QuickCore",
        "IPluginV3QuickBuild",
        "IPluginV3QuickRuntime",
        "IPluginV3QuickAOTBuild",
    )
    for name in (*empty, "IPluginCreatorV3Quick", "ISymExpr"):
        setattr(trt, name, type(name, (), {}))

    class Logger:
        WARNING = 1

        def log(self, *_: Any) -> None:
            pass

    members: dict[str, Any] = {
        "Logger": Logger,
        "IDimensionExpr": Expression,
        "DimensionOperation": DimensionOperation,
        "DataType": DataType,
        "TensorFormat": TensorFormat,
        "Dims": Dims,
        "DimsExprs": DimsExprs,
        "PluginTensorDesc": PluginTensorDesc,
        "DynamicPluginTensorDesc": DynamicPluginTensorDesc,
        "PluginField": PluginField,
        "PluginFieldCollection": list,
        "PluginFieldType": enum.Enum("PluginFieldType", "INT8 INT16 INT32 INT64 FLOAT16 FLOAT32 FLOAT64 CHAR UNKNOWN"),
        "PluginArgType": enum.Enum("PluginArgType", "INT"),
        "PluginArgDataType": enum.Enum("PluginArgDataType", "INT8 INT16 INT32"),
        "QuickPluginCreationRequest": enum.Enum(
            "QuickPluginCreationRequest", "PREFER_JIT PREFER_AOT STRICT_JIT STRICT_AOT"
        ),
        "TensorRTPhase": enum.Enum("TensorRTPhase", "BUILD RUNTIME"),
        "get_plugin_registry": lambda: registry,
        "float32": DataType.FLOAT,
        "int32": DataType.INT32,
    }
    for name, member in members.items():
        setattr(trt, name, member)
    return trt


def plugin_folder() -> Path | None:
    """Where the wheel tensorrt-cu13-bindings has ``tensorrt.plugin``; its compiled half, which wants libnvinfer, is
    never imported."""
    spec = importlib.util.find_spec("tensorrt_bindings")
    folder = Path(spec.origin).parent / "plugin" if spec and spec.origin else None
    return folder if folder and folder.is_dir() else None


def install(folder: Path) -> types.ModuleType:
    """Put the stand-in and the real ``tensorrt.plugin`` into sys.modules; gives ``tensorrt.plugin``."""
    sys.modules["tensorrt"] = trt = module()
    trt.__path__ = []  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location(
        "tensorrt.plugin", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["tensorrt.plugin"] = plugin = importlib.util.module_from_spec(spec)
    trt.plugin = plugin  # type: ignore[attr-defined]
    spec.loader.exec_module(plugin)
    return plugin


def _data(value: Any) -> np.ndarray:
    """As the ONNX parser hands it over: float32 and int32, texts with a zero byte at their end."""
    if isinstance(value, (str, bytes)):
        return np.frombuffer((value.encode() if isinstance(value, str) else value) + b"\0", np.uint8)
    return np.array([value], np.int32 if isinstance(value, int) else np.float32)


_NAMES = {"fp32": DataType.FLOAT, "fp16": DataType.HALF, "bf16": DataType.BF16}
_NAMES |= {"i8": DataType.INT8, "fp8e4nv": DataType.FP8}


@dataclass
class Params:
    grid_x: Any = None
    grid_y: Any = None
    grid_z: Any = None
    block_x: Any = None
    block_y: Any = None
    block_z: Any = None
    shared_mem: Any = None


@dataclass
class Arguments:
    """The setter of the extra arguments."""

    nbSymExprs: int = 0
    found: dict[int, Any] = field(default_factory=dict)

    def __setitem__(self, i: int, value: Any) -> None:
        self.found[i] = value


class Build:
    """One plugin on its way through the builder. ``shapes``: ints, or names of dynamic sizes; ``types``: fp32, fp16 or
    bf16; ``attributes``: as a node holds them."""

    def __init__(
        self, name: str, shapes: Sequence[Sequence[int | str]], types: Sequence[str], attributes: dict[str, Any]
    ) -> None:
        trt: Any = sys.modules["tensorrt"]
        creator = trt.get_plugin_registry().get_creator(name, "1", "normdeploy")
        # the parser walks over the creator's fields, so that attributes come in the order in which they were registered
        order = [f.name for f in creator.field_names]
        fields = [
            PluginField(name, _data(attributes[name]))
            for name in sorted(attributes, key=lambda n: order.index(n) if n in order else 99)
        ]
        request = trt.QuickPluginCreationRequest.STRICT_AOT
        self.plugin = creator.create_plugin(name, "normdeploy", fields, trt.TensorRTPhase.BUILD, request)
        self.types = [_NAMES[t] for t in types]
        self.output_types = self.plugin.get_output_data_types(self.types, [len(s) for s in shapes])
        self.inputs = [[self._dim(d) for d in shape] for shape in shapes]
        self.named = {
            id(d): n for dims, shape in zip(self.inputs, shapes, strict=True) for d, n in zip(dims, shape, strict=True)
        }
        self.outputs = self.plugin.get_output_shapes(self.inputs, [], Builder())
        self.described = [
            DynamicPluginTensorDesc(
                PluginTensorDesc(Dims(-1 if d.constant is None else d.constant for d in dims), kind)
            )
            for dims, kind in zip([*self.inputs, *self.outputs], [*self.types, *self.output_types], strict=True)
        ]
        formats = self.plugin.get_supported_format_combinations(self.described, len(shapes))
        wide = len(self.described)
        self.combinations = [tuple(f.type for f in formats[i : i + wide]) for i in range(0, len(formats), wide)]
        self.plugin.configure_plugin(self.described[: len(shapes)], self.described[len(shapes) :])
        self.tactics = self.plugin.get_valid_tactics()

    @staticmethod
    def _dim(d: int | str) -> Expression:
        return literal(d) if isinstance(d, int) else Expression(lambda env: env[d])

    def output_shapes(self, env: Environment) -> list[tuple[int, ...]]:
        return [tuple(d.value(env) for d in dims) for dims in self.outputs]

    def launch(self, tactic: int, env: Environment) -> tuple[str, bytes, dict[str, int], list[int]]:
        """Kernel name, PTX, launch parameters and extra arguments for one set of sizes."""
        params, arguments = Params(), Arguments()
        self.plugin.set_tactic(tactic)
        self.plugin.get_launch_params(self.inputs, self.described, len(self.inputs), params, arguments, Builder())
        kernel, ptx = self.plugin.get_kernel(
            [d.desc for d in self.described[: len(self.inputs)]], [d.desc for d in self.described[len(self.inputs) :]]
        )
        extra = [arguments.found[i] for i in range(arguments.nbSymExprs)]
        return kernel, ptx, {k: v.expr.value(env) for k, v in vars(params).items()}, [a.expr.value(env) for a in extra]
