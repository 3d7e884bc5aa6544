"""NVIDIA's compiled Python bindings over the stub of libnvinfer, in a process of their own: they call the functions of
runtime, engine and context by their places, so that a wrong place is a wrong answer or a crash. Prints the answers as
JSON (python -m tests.cpp.layout STUB MOCK BINDINGS PLAN).
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

from ..plugins.bindings import mock


def main(stub: str, libraries: str, bindings: str, plan: str) -> None:
    ctypes.CDLL(stub, ctypes.RTLD_GLOBAL)  # before the mock, whose createInferRuntime makes nothing
    trt = mock.load(Path(libraries), Path(bindings))
    logger = trt.Logger(trt.Logger.ERROR)
    runtime = trt.Runtime(logger)
    refused = runtime.deserialize_cuda_engine(Path(plan).read_bytes())
    runtime.engine_host_code_allowed = True
    engine = runtime.deserialize_cuda_engine(Path(plan).read_bytes())
    context = engine.create_execution_context()

    def profile(index: int) -> bool:
        try:
            return context.set_optimization_profile_async(index, 0)
        except RuntimeError:  # what the bindings make of false
            return False

    answers = {
        "refused": refused is None,
        "profiles": engine.num_optimization_profiles,
        "names": [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)],
        "modes": [engine.get_tensor_mode(name).name for name in "xy"],
        "type": engine.get_tensor_dtype("x").name,
        "location": engine.get_tensor_location("x").name,
        "format": engine.get_tensor_format("x").name,
        "shape": list(engine.get_tensor_shape("x")),
        "profile": [list(shape) for shape in engine.get_tensor_profile_shape("x", 1)],
        "chosen": [profile(i) for i in (2, 1)],
        "unknown": context.infer_shapes(),
        "set": [context.set_input_shape("x", (rows, 4)) for rows in (8, 9)],
        "inferred": context.infer_shapes(),
        "output": list(context.get_tensor_shape("y")),
        "addresses": [context.set_tensor_address("x", address) for address in (4100, 4096)],
        "run": context.execute_async_v3(0),
    }
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
