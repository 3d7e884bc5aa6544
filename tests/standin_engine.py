"""A stand-in for TensorRT and TensorRT-RTX as far as a runner goes: its memory is the CPU's, and ``CALLS`` is what it
was asked, in order."""

from __future__ import annotations

import enum
from enum import Enum
from types import ModuleType
from typing import Any

import torch

CALLS: list[tuple[Any, ...]] = []
Mode = Enum("Mode", "INPUT OUTPUT")
Place = Enum("Place", "DEVICE HOST")


class Stream:
    """In the place of ``CudaStream``: the CPU as the device."""

    device, handle = torch.device("cpu"), 77

    def __init__(self, index: int, stream: Any) -> None: ...

    def use_stream(self) -> Any:
        import contextlib

        return contextlib.nullcontext()

    def record_use(self, tensors: Any) -> None: ...

    def synchronize(self) -> None:
        CALLS.append(("synchronize",))

    def capture_graph(self, work: Any) -> Any:
        CALLS.append(("capture",))
        work()
        return lambda: CALLS.append(("replay",))


class Context:
    def __init__(self, unknown: bool) -> None:
        self.active_optimization_profile, self.unknown, self.memory = 0, unknown, {}
        self.shape: tuple[int, ...] = ()
        self.allocator: Any = None

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.active_optimization_profile = profile
        CALLS.append(("profile", profile, stream))
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shape = shape
        CALLS.append(("shape", name, shape))
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address
        assert address % 256 == 0, "set_tensor_address needs 256-byte alignment (NvInferRuntime.h)"
        self.memory[name] = address
        CALLS.append(("address", name))
        return True

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        self.allocator = allocator
        return True

    def infer_shapes(self) -> list[str]:
        CALLS.append(("infer",))
        return []

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, 4) if self.unknown and name == "y" else self.shape

    def execute_async_v3(self, stream: int) -> bool:
        import ctypes

        CALLS.append(("execute", stream))
        size = self.shape[0] * 16
        target = self.memory.get("y") or self.allocator.reallocate_output_async("y", 0, size, 256, stream)
        if self.allocator is not None:
            self.allocator.notify_shape("y", self.shape)
        ctypes.memmove(target, self.memory["x"], size)
        return True


class Validity(enum.IntEnum):
    VALID, SUBOPTIMAL, INVALID = range(3)


class Diagnostics(enum.IntEnum):
    VERSION_MISMATCH, UNSUPPORTED_CC, OLD_CUDA_DRIVER = 1, 2, 4


class Cache:
    """IRuntimeCache: what was compiled, as bytes; a file of another GPU begins with another letter."""

    def __init__(self) -> None:
        self.held = b""

    def deserialize(self, blob: bytes) -> bool:
        CALLS.append(("deserialize cache", blob))
        if not blob.startswith(b"G"):
            return False
        self.held = blob
        return True

    def serialize(self) -> bytes:
        return self.held if self.held.endswith(b"kernels") else b"G kernels"


class Config:
    """IRuntimeConfig."""

    def create_runtime_cache(self) -> Cache:
        return Cache()

    def set_runtime_cache(self, cache: Cache) -> bool:
        CALLS.append(("set cache", cache.held))
        return True


def library(
    unknown: bool = False, *, validity: tuple[Validity, int] | None = None, loads: bool = True, streamable: int = 0
) -> ModuleType:
    """``unknown``: whether the output's shape is known before the run; ``validity``: what TensorRT-RTX says of the
    engine, None of TensorRT, which says nothing."""

    class Engine:
        num_io_tensors, num_optimization_profiles = 2, 2
        get_tensor_name = staticmethod(lambda i: "xy"[i])
        get_tensor_mode = staticmethod(lambda n: Mode.INPUT if n == "x" else Mode.OUTPUT)
        get_tensor_location = staticmethod(lambda n: Place.DEVICE)
        get_tensor_dtype = staticmethod(lambda n: Enum("DataType", "FLOAT")["FLOAT"])
        get_tensor_shape = staticmethod(lambda n: (-1, 4))
        get_tensor_profile_shape = staticmethod(lambda n, p: [((1, 4), (2, 4), (4, 4)), ((5, 4), (6, 4), (8, 4))][p])
        create_runtime_config = staticmethod(Config)
        streamable_weights_size, weight_streaming_budget_v2 = streamable, streamable

        @staticmethod
        def create_execution_context(config: Any = None) -> Context:
            return Context(unknown)

    class Runtime:
        engine_host_code_allowed = False

        def __init__(self, log: Any) -> None:
            self.log = log

        def deserialize_cuda_engine(self, data: bytes) -> Any:
            CALLS.append(("load", self.engine_host_code_allowed))
            if not loads:
                self.log.log(module.ILogger.Severity.ERROR, "no creator for NVIDIA's plugin")
            return Engine() if loads else None

    if validity is not None:
        Runtime.get_engine_validity = lambda self, data: validity  # type: ignore[attr-defined]
    module: Any = ModuleType("tensorrt")
    module.ILogger, module.IOutputAllocator = type("ILogger", (), {}), type("IOutputAllocator", (), {})
    module.ILogger.Severity = Enum("Severity", "ERROR INTERNAL_ERROR")
    module.TensorIOMode, module.TensorLocation = Mode, Place
    module.EngineValidity, module.EngineInvalidityDiagnostics = Validity, Diagnostics
    module.init_libnvinfer_plugins = lambda log, namespace: CALLS.append(("plugins", namespace))
    module.Runtime = Runtime
    return module
