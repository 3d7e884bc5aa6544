"""The mock of TensorRT's libraries (mock.cpp) from Python: compiled, put under NVIDIA's compiled bindings, and what a
builder does with a plugin, step by step."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIBRARIES = ("libnvinfer", "libnvonnxparser", "libnvinfer_plugin")
# TensorRT's numbers of types (DataType) and of field types (PluginFieldType)
TYPES = {"fp32": 0, "fp16": 1, "i8": 2, "fp8e4nv": 6, "bf16": 7}
NAMES = {number: name for name, number in TYPES.items()}
FLOAT32, INT32, CHAR = 1, 5, 6
PARAMETERS = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_mem")
AOT = "PLUGIN|PLUGIN_V3QUICK_CORE|PLUGIN_V3QUICKAOT_BUILD"


class Refused(Exception):
    """A step that the plugin answered with an error; what the bindings printed is on stderr."""


def compiled(folder: Path, major: int, layout: int | None = None) -> Path:
    """The folder with the three libraries under the names that bindings of TensorRT ``major`` look for; made by g++
    where it is not there. ``layout``: of another release, to see that it is found."""
    sources = [*sorted(HERE.glob("*.h")), HERE / "mock.cpp"]
    digest = hashlib.sha256(b"".join(s.read_bytes() for s in sources)).hexdigest()[:16]
    made = folder / f"mock-{digest}-{major}-{layout or major}"
    made.mkdir(parents=True, exist_ok=True)
    for name in LIBRARIES:
        target = made / f"{name}.so.{major}"
        if not target.exists():
            source = [str(HERE / "mock.cpp")] if name == "libnvinfer" else ["-x", "c++", "/dev/null"]
            options = ["-std=c++17", "-shared", "-fPIC", f"-DLAYOUT_MAJOR={layout or major}"]
            part = made / f"{target.name}.part-{os.getpid()}"  # another process may be at it too
            command = ["g++", *options, f"-Wl,-soname,{target.name}", *source, "-o", str(part)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            part.replace(target)
    return made


def load(libraries: Path, bindings: Path) -> Any:
    """``tensorrt`` of the wheel that was unpacked to ``bindings``, over the mock; it and ``tensorrt.plugin`` are put
    into sys.modules."""
    global _library
    # a library that is loaded is found by its soname when the bindings want it
    loaded = [
        ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL) for file in sorted(libraries.iterdir()) if file.suffix[1:].isdigit()
    ]
    _library = next(found for found in loaded if hasattr(found, "mock_size"))
    for name in ("faults", "called", "kinds", "name", "timing_cache_id", "metadata"):
        getattr(_library, f"mock_{name}").restype = ctypes.c_char_p
    for name in ("create", "clone"):
        getattr(_library, f"mock_{name}").restype = ctypes.c_void_p
    sys.path.insert(0, str(bindings))
    sys.modules["tensorrt"] = trt = importlib.import_module("tensorrt_bindings")
    sys.modules["tensorrt.plugin"] = importlib.import_module("tensorrt_bindings.plugin")
    return trt


_library: Any = None


class Field(ctypes.Structure):
    """PluginField."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("length", ctypes.c_int32),
    ]


def field(name: str, value: Any) -> tuple[Field, Any]:
    """An attribute of a node as TensorRT's ONNX parser hands it over, and the memory that holds it: FLOAT is a float32,
    INT an int32, STRING characters with a zero byte at their end (onnx-tensorrt, ``loadFields``)."""
    if isinstance(value, str):
        held: Any = ctypes.create_string_buffer(value.encode())
        kind, length = CHAR, len(held)
    else:
        held = ctypes.c_int32(value) if isinstance(value, int) else ctypes.c_float(value)
        kind, length = INT32 if isinstance(value, int) else FLOAT32, 1
    return Field(name.encode(), ctypes.cast(ctypes.pointer(held), ctypes.c_void_p), kind, length), held


def faults() -> list[str]:
    """What was done since the last call that a plugin must not do."""
    found = _library.mock_faults().decode().splitlines()
    _library.mock_forget()
    return sorted(set(found))


def called() -> list[str]:
    """The registry's functions that were called since `faults`, in order."""
    return list(_library.mock_called().decode().split())


def fields_of(name: str, space: str = "normdeploy") -> list[str]:
    """The names of the attributes that a creator asks the parser for, in order."""
    names, types = (ctypes.c_char_p * 32)(), (ctypes.c_int32 * 32)()
    count = _library.mock_fields(name.encode(), space.encode(), names, types, 32)
    if count < 0:
        raise Refused(f"no creator for {name}")
    return [names[i].decode() for i in range(count)]


def set_sizes(sizes: Mapping[str, int], numbers: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if name in numbers:
            _library.mock_size(numbers[name], ctypes.c_int64(size))


class Plugin:
    """One plugin on its way through the builder. ``shapes``: ints, or names of dynamic sizes, whose numbers are
    ``numbers``.

    Raises Refused where a step fails; the steps are to be called in the order in which they stand here.
    """

    def __init__(self, handle: int | None, numbers: Mapping[str, int]) -> None:
        if not handle:
            raise Refused("no plugin was made")
        self.handle, self.numbers = ctypes.c_void_p(handle), numbers
        self.kinds = _library.mock_kinds(self.handle).decode()

    @staticmethod
    def create(
        name: str, attributes: Mapping[str, Any], numbers: Mapping[str, int], space: str = "normdeploy"
    ) -> Plugin:
        """As the parser does: it walks over the fields that the creator names."""
        made = [field(key, attributes[key]) for key in fields_of(name, space) if key in attributes]
        fields = (Field * len(made))(*[f for f, _ in made])
        return Plugin(_library.mock_create(name.encode(), space.encode(), len(made), fields), numbers)

    def clone(self) -> Plugin:
        return Plugin(_library.mock_clone(self.handle), self.numbers)

    def identity(self) -> list[str]:
        return [_library.mock_name(self.handle, which).decode() for which in range(3)]

    def output_types(self, types: Sequence[str], ranks: Sequence[int]) -> list[str]:
        given = (ctypes.c_int32 * 16)(*[TYPES[t] for t in types])
        held = (ctypes.c_int32 * len(ranks))(*ranks)
        self.outputs = _library.mock_output_types(self.handle, len(types), given, held)
        if self.outputs < 0:
            raise Refused("getOutputDataTypes failed")
        self.inputs = len(types)
        self.types = [NAMES.get(n, str(n)) for n in given[: self.inputs + self.outputs]]
        return self.types[self.inputs :]

    def output_shapes(self, shapes: Sequence[Sequence[int | str]]) -> None:
        dims = [-self.numbers[d] if isinstance(d, str) else d for shape in shapes for d in shape]
        if _library.mock_output_shapes(self.handle, (ctypes.c_int64 * len(dims))(*dims)):
            raise Refused("getOutputShapes failed")

    def output_dims(self, sizes: Mapping[str, int]) -> list[list[int]]:
        """The outputs' shapes at these sizes."""
        set_sizes(sizes, self.numbers)
        dims, found = (ctypes.c_int64 * 8)(), []
        for output in range(self.outputs):
            rank = _library.mock_output_dims(self.handle, output, dims)
            found.append(list(dims[:rank]))
        return found

    def combinations(self) -> list[list[tuple[str, int]]]:
        """Each with (type, TensorRT's number of the format) of every input and output."""
        count = _library.mock_combinations(self.handle)
        if count < 0:
            raise Refused("getSupportedFormatCombinations failed")
        width, found = self.inputs + self.outputs, []
        types, formats = (ctypes.c_int32 * width)(), (ctypes.c_int32 * width)()
        for i in range(count):
            _library.mock_combination(self.handle, i, types, formats)
            found.append([(NAMES.get(t, str(t)), f) for t, f in zip(types, formats, strict=True)])
        return found

    def configure(self, index: int) -> None:
        if _library.mock_configure(self.handle, index):
            raise Refused("configurePlugin failed")

    def tactics(self) -> list[int]:
        held = (ctypes.c_int32 * 64)()
        count = _library.mock_tactics(self.handle, held, 64)
        if count < 0:
            raise Refused("getValidTactics failed")
        return list(held[:count])

    def timing_cache_id(self) -> str:
        return (_library.mock_timing_cache_id(self.handle) or b"").decode()

    def metadata(self) -> str:
        return (_library.mock_metadata(self.handle) or b"").decode()

    def aliased(self, output: int) -> int:
        return int(_library.mock_aliased(self.handle, output))

    def mark(self) -> None:
        """Make every number of the tensors' descriptions another one."""
        _library.mock_mark(self.handle)

    def launch(self, tactic: int) -> tuple[str, str]:
        """Kernel name and PTX."""
        name, kernel, size = ctypes.c_char_p(), ctypes.POINTER(ctypes.c_char)(), ctypes.c_int32()
        self.extra = _library.mock_launch(
            self.handle, tactic, ctypes.byref(name), ctypes.byref(kernel), ctypes.byref(size)
        )
        if self.extra < 0:
            raise Refused("getLaunchParams or getKernel failed")
        assert name.value is not None
        return name.value.decode(), bytes(kernel[: size.value]).decode()

    def values(self, sizes: Mapping[str, int]) -> tuple[dict[str, int], list[int], list[int]]:
        """Launch parameters and extra arguments of the last launch at these sizes, and the kinds of them all: 10 · type
        + data type (2: int32)."""
        set_sizes(sizes, self.numbers)
        values, kinds = (ctypes.c_int64 * (7 + self.extra))(), (ctypes.c_int32 * (7 + self.extra))()
        _library.mock_values(self.handle, values, kinds)
        return dict(zip(PARAMETERS, values[:7], strict=True)), list(values[7:]), list(kinds)
