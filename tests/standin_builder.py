"""A stand-in for the ``tensorrt`` that builds: its "engine" says what its configuration was told, its timing cache is a
JSON object of what was timed.

``install`` makes what is imported as ``tensorrt`` of it. The environment says what it lacks: STANDIN_LACKS names
members of its enums, "level" keeps the optimization level at 3, "lean" builds no version-compatible engine.
STANDIN_TIMES is what a build times, STANDIN_GPU the GPU that a cache is for.
"""

from __future__ import annotations

import enum
import json
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx

LACKS = os.environ.get("STANDIN_LACKS", "").split()
GPU = os.environ.get("STANDIN_GPU", "A")
_FLAGS = "REFIT VERSION_COMPATIBLE EXCLUDE_LEAN_RUNTIME WEIGHT_STREAMING TF32"


def _enum(name: str, members: str) -> Any:
    return enum.IntEnum(name, [m for m in members.split() if m not in LACKS], start=0)


BuilderFlag = _enum("BuilderFlag", _FLAGS)
HardwareCompatibilityLevel = _enum("HardwareCompatibilityLevel", "NONE AMPERE_PLUS SAME_COMPUTE_CAPABILITY")
MemoryPoolType = _enum("MemoryPoolType", "WORKSPACE TACTIC_DRAM")
CALLS: list[str] = []


class TimingCache:
    """ITimingCache: {"gpu": ..., "times": {...}}."""

    def __init__(self, data: bytes) -> None:
        self.held = json.loads(data) if data else {"gpu": GPU, "times": {}}

    def combine(self, other: TimingCache | None, ignore_mismatch: bool) -> bool:
        if other is None or (other.held["gpu"] != self.held["gpu"] and not ignore_mismatch):
            return False
        self.held["times"] = other.held["times"] | self.held["times"]
        return True

    @contextmanager
    def serialize(self) -> Iterator[bytes]:
        yield json.dumps(self.held).encode()


class Config:
    DLA_core, default_device_type = -1, "GPU"
    engine_capability = enum.Enum("EngineCapability", "STANDARD")["STANDARD"]
    hardware_compatibility_level = HardwareCompatibilityLevel.NONE

    def __init__(self) -> None:
        self.flags: set[Any] = set()
        self.pools: dict[Any, int] = {}
        self.profiles: list[dict[str, Any]] = []
        self.cache: TimingCache | None = None
        self._level = 3

    @property
    def builder_optimization_level(self) -> int:
        return self._level

    @builder_optimization_level.setter
    def builder_optimization_level(self, level: int) -> None:
        self._level = 3 if "level" in LACKS else min(level, 5)

    num_optimization_profiles = property(lambda self: len(self.profiles))

    def set_flag(self, flag: Any) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: Any) -> None:
        self.flags.discard(flag)

    def get_flag(self, flag: Any) -> bool:
        return flag in self.flags

    def set_memory_pool_limit(self, pool: Any, size: int) -> None:
        self.pools[pool] = size

    def get_memory_pool_limit(self, pool: Any) -> int:
        return self.pools.get(pool, 0)

    def add_optimization_profile(self, profile: Any) -> int:
        self.profiles.append(profile.shapes)
        return len(self.profiles) - 1

    def create_timing_cache(self, data: bytes) -> TimingCache | None:
        try:
            return TimingCache(bytes(data))
        except ValueError:
            return None

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        if cache.held["gpu"] != GPU and not ignore_mismatch:
            return False
        self.cache = cache
        return True

    def get_timing_cache(self) -> TimingCache | None:
        return self.cache

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get_"):  # what Polygraphy logs
            return lambda *_, **__: None
        raise AttributeError(name)


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, name: str, *shapes: Any) -> None:
        self.shapes[name] = [list(s) for s in shapes]

    def get_shape(self, name: str) -> Any:
        return self.shapes[name]


class Tensor:
    is_shape_tensor, dtype = False, types.SimpleNamespace(name="FLOAT")

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.shape = name, shape


class Network:
    num_outputs, has_implicit_batch_dimension = 1, False

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.num_layers = 0

    num_inputs = property(lambda self: len(self.inputs))

    def get_input(self, i: int) -> Tensor:
        return self.inputs[i]

    def add_input(self, name: str, dtype: Any, shape: tuple[int, ...]) -> Tensor:
        return Tensor(name, shape)

    def add_identity(self, tensor: Tensor) -> Any:
        return types.SimpleNamespace(get_output=lambda i: tensor)

    def mark_output(self, tensor: Tensor) -> None:
        self.num_layers += 1

    def get_layer(self, i: int) -> Any:
        return types.SimpleNamespace(num_outputs=0)

    def __iter__(self) -> Any:
        return iter(())


class Builder:
    def __init__(self, logger: Any) -> None:
        pass

    def create_network(self, flags: int = 0) -> Network:
        return Network()

    create_builder_config = staticmethod(Config)
    create_optimization_profile = staticmethod(Profile)

    def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
        if "lean" in LACKS and getattr(BuilderFlag, "VERSION_COMPATIBLE", None) in config.flags:
            return None
        before = dict(config.cache.held["times"]) if config.cache else {}
        if config.cache and network.inputs:
            config.cache.held["times"] |= json.loads(os.environ.get("STANDIN_TIMES", "{}"))
        told = {
            "flags": sorted(f.name for f in config.flags),
            "level": config.builder_optimization_level,
            "hardware": config.hardware_compatibility_level.name,
            "pools": {p.name: size for p, size in config.pools.items()},
            "profiles": config.profiles,
            "known": before,
            "calls": CALLS,
        }
        return b"ptrt" + json.dumps(told).encode()


class OnnxParser:
    num_errors = 0

    def __init__(self, network: Network, logger: Any) -> None:
        CALLS.append("parser")
        self.network = network

    def parse_from_file(self, path: str) -> bool:
        graph = onnx.load(path).graph
        held = {t.name for t in graph.initializer}
        for value in (v for v in graph.input if v.name not in held):
            shape = tuple(d.dim_value or -1 for d in value.type.tensor_type.shape.dim)
            self.network.inputs.append(Tensor(value.name, shape))
        self.network.num_layers = len(graph.node)
        return True


def install() -> None:
    """Put it into sys.modules as ``tensorrt``."""
    trt: Any = types.ModuleType("tensorrt")
    members: dict[str, Any] = {
        "__version__": "11.4.0.106",
        "Builder": Builder,
        "OnnxParser": OnnxParser,
        "BuilderFlag": BuilderFlag,
        "HardwareCompatibilityLevel": HardwareCompatibilityLevel,
        "MemoryPoolType": MemoryPoolType,
        "NetworkDefinitionCreationFlag": enum.IntEnum("NetworkDefinitionCreationFlag", "STRONGLY_TYPED"),
        "ProfilingVerbosity": enum.Enum("ProfilingVerbosity", "DETAILED"),
        "DeviceType": enum.Enum("DeviceType", "GPU DLA"),
        "LayerType": enum.Enum("LayerType", "PLUGIN_V3"),
        "float32": "FLOAT",
        "init_libnvinfer_plugins": lambda logger, namespace: CALLS.append("plugins"),
    }
    for name, member in members.items():
        setattr(trt, name, member)
    for name in ("ILogger", "IProgressMonitor", "Logger"):
        setattr(trt, name, type(name, (), {"__init__": lambda self, *_: None}))
    for severity in ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"):
        setattr(trt.Logger, severity, severity)
    sys.modules["tensorrt"] = trt
