"""Run TensorRT and TensorRT-RTX engines through Polygraphy on the machine's GPU.

Polygraphy uses only one of the two libraries per process, and selects this library at its first import.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import InputError, NormdeployError, RuntimeUnavailable
from ..inputs.array_conversion import check_names, to_numpy, to_torch
from ..types import Arrays, PathLike
from . import HeldRunner, RunResult
from .engine_loading import check_engine_validity, make_engine_loader
from .network_types import FLOATS
from .runtime_cache import RuntimeCache, Wanted

# Runtime -> its Python package.
PACKAGES = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
TITLES = {"tensorrt-rtx": "TensorRT-RTX", "tensorrt": "TensorRT"}
# First bytes of an engine of TensorRT-RTX. An engine of TensorRT differs in the first byte only.
_RTX_MAGIC = b"vtrt"


class TrtRunner(HeldRunner):
    """Runner of an engine file on the GPU of this machine.

    Args:
        engine: the engine file. Its first bytes identify the runtime that it is for.
        runtime_cache: the file of TensorRT-RTX's compiled kernels (see ``RuntimeCache``).

    Raises:
        RuntimeUnavailable: the package, the GPU or a CUDA library is missing.
        InputError: the file does not exist or is not an engine.
        NormdeployError: the engine was not built for this GPU and this version.
    """

    def __init__(self, engine: PathLike, runtime_cache: Wanted = None) -> None:
        self._path = Path(engine)
        self.runtime = read_runtime(self._path)
        self.name = f"{TITLES[self.runtime]} ({self._path.name})"
        if reason := describe_missing_runtime(self.runtime):
            raise RuntimeUnavailable(f"{self.name}: {reason}")
        library = select_library(self.runtime)
        from polygraphy.backend.trt import TrtRunner as PolygraphyRunner
        from polygraphy.backend.trt import engine_from_bytes
        from polygraphy.backend.trt.util import get_trt_logger
        from polygraphy.exception import PolygraphyException

        self._failures: tuple[type[Exception], ...] = (PolygraphyException,)
        self._log = _error_log()
        self._cache = RuntimeCache(self._path, self.runtime, runtime_cache)
        data = self._path.read_bytes()
        why = ""
        try:
            loader = make_engine_loader(library, get_trt_logger())
            valid, why = check_engine_validity(library, loader, data)
            if valid or not why:
                loaded = engine_from_bytes(data, runtime=loader)
            else:
                loaded = None
            self._runner = PolygraphyRunner(self._make_context(loaded) if self.runtime == "tensorrt-rtx" else loaded)
            self._runner.activate()
        except self._failures as error:
            why = why or (
                f"{self._log.take_errors()}; build it with this version of {TITLES[self.runtime]} for this "
                "GPU's compute"
                " capability"
            )
            raise NormdeployError(f"{self._path.name} can't be loaded on this GPU: {why}") from error

    def _make_context(self, engine: Any) -> Any:
        """Make TensorRT-RTX's execution context with its runtime cache."""
        if engine is None:
            return None
        config = engine.create_runtime_config()
        self._cache.attach(config)
        return engine.create_execution_context(config)

    def accepts_shapes(self, feeds: Arrays) -> bool:
        """Return whether one of the engine's profiles admits the shape of every input.

        Returns:
            False if some shape is outside every profile.
        """
        return self._find_profile(feeds) is not None

    def _find_profile(self, feeds: Arrays) -> int | None:
        """Return the first profile that admits the shape of every input, or None."""

        def accepts_all_shapes(index: int) -> bool:
            for name, array in feeds.items():
                low, _, high = self._runner.engine.get_tensor_profile_shape(name, index)
                within = all(a <= n <= b for a, n, b in zip(low, array.shape, high, strict=False))
                if len(low) == array.ndim and not within:
                    return False
            return True

        return next((i for i in range(self._runner.engine.num_optimization_profiles) if accepts_all_shapes(i)), None)

    def input_dtypes(self) -> dict[str, np.dtype]:
        """Read the dtypes of the inputs.

        Returns:
            Input name -> numpy dtype.
        """
        return {
            name: _numpy_dtype(self._runner.engine.get_tensor_dtype(name).name)
            for name in self._runner.get_input_metadata()
        }

    def float_types(self) -> set[str]:
        """Collect the floating types of inputs and outputs.

        Returns:
            Set of "float32", "float16", "bfloat16".
        """
        engine = self._runner.engine
        kinds = {engine.get_tensor_dtype(engine.get_tensor_name(i)).name for i in range(engine.num_io_tensors)}
        return {FLOATS[kind] for kind in kinds if kind in FLOATS}

    def infer(self, feeds: Arrays) -> RunResult:
        """Run the engine once.

        Returns:
            Output name -> array.

        Raises:
            InputError: the feeds do not fit the engine's inputs and profile.
        """
        check_names(self.name, feeds, list(self._runner.get_input_metadata()))
        try:
            if self._runner.engine.num_optimization_profiles > 1:
                self._runner.set_profile(self._find_profile(feeds) or 0)
            outputs = self._runner.infer({name: to_torch(array) for name, array in feeds.items()})
        except self._failures as error:
            raise InputError(f"{self.name} does not run on these inputs: {self._log.take_errors()}") from error
        return {name: to_numpy(value) for name, value in outputs.items()}

    def _free_model(self) -> None:
        try:
            self._cache.save()
        finally:
            self._runner.deactivate()


def _numpy_dtype(kind: str) -> np.dtype:
    name = FLOATS.get(kind, kind.lower())
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


class _ErrorLogHandler(logging.Handler):
    """Collect errors that Polygraphy and TensorRT log. Without this handler, the errors would appear only in the
    terminal, because the exceptions do not contain them.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        from polygraphy.logger import G_LOGGER

        G_LOGGER.module_severity = G_LOGGER.ERROR
        G_LOGGER.use_python_logging_system = True
        G_LOGGER.colors = G_LOGGER.letter = False
        G_LOGGER.python_logger.handlers = [self]
        G_LOGGER.python_logger.propagate = False
        self._messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Collect a record as one line."""
        self._messages.append(" ".join(record.getMessage().split()))

    def take_errors(self) -> str:
        """Return all messages since the last call.

        Returns:
            One line; "no reason given" if there are none.
        """
        messages = "; ".join(dict.fromkeys(self._messages))
        self._messages = []
        return messages or "no reason given"


@functools.cache
def _error_log() -> _ErrorLogHandler:
    return _ErrorLogHandler()


def is_engine(path: PathLike) -> bool:
    """Return whether the first bytes of a file are those of an engine.

    Returns:
        True for an engine of either runtime.

    Raises:
        InputError: the file does not exist.
    """
    if not os.path.isfile(path):
        raise InputError(f"file not found: {os.fspath(path)!r}; pass an ONNX file or an engine")
    with open(path, "rb") as file:
        return file.read(4)[1:] == _RTX_MAGIC[1:]


def read_runtime(engine: Path) -> str:
    """Read from an engine's first bytes which runtime it is for.

    Returns:
        "tensorrt-rtx" or "tensorrt".

    Raises:
        InputError: the file does not exist or is not an engine.
    """
    if not engine.is_file():
        raise InputError(f"engine not found: {str(engine)!r}; build one with `normdeploy build`")
    with engine.open("rb") as file:
        magic = file.read(4)
    if magic[1:] != _RTX_MAGIC[1:]:
        raise InputError(
            f"{engine.name} is not a TensorRT engine: it begins with {magic!r}; build one with `normdeploy build`"
        )
    if magic == _RTX_MAGIC:
        return "tensorrt-rtx"
    return "tensorrt"


def describe_missing_runtime(runtime: str, *, gpu: bool = True) -> str | None:
    """Explain why ``runtime`` can't be used on this machine.

    Args:
        gpu: True to also require a GPU.

    Returns:
        The missing part and advice, or None if nothing is missing.
    """
    if importlib.util.find_spec(PACKAGES[runtime]) is None:
        return f"{TITLES[runtime]} is not installed; pip install {PACKAGES[runtime].replace('_', '-')}"
    if importlib.util.find_spec("polygraphy") is None:
        return "Polygraphy is not installed; pip install polygraphy"
    if gpu:
        return explain_missing_gpu()
    return None


def installed_version(runtime: str) -> str:
    """Look up the version of the installed library without importing it.

    Returns:
        The version; "" if the package's metadata is missing.
    """
    distributions = importlib.metadata.packages_distributions().get(PACKAGES[runtime], ())
    if distributions:
        return importlib.metadata.version(distributions[0])
    return ""


@functools.cache
def explain_missing_gpu() -> str | None:
    """Explain why no NVIDIA GPU can be used here.

    Returns:
        The reason, or None if a GPU can be used.
    """
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return "no GPU: this machine has no NVIDIA driver"
    count = ctypes.c_int(0)
    if code := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return f"no GPU: the NVIDIA driver does not start (CUDA error {code})"
    if count.value:
        return None
    return "no GPU: the NVIDIA driver finds none"


def select_library(runtime: str) -> Any:
    """Select the library that Polygraphy uses, and import the library's package.

    Returns:
        The module ``tensorrt`` or ``tensorrt_rtx``.

    Raises:
        RuntimeUnavailable: this process has already used the other library.
    """
    rtx = runtime == "tensorrt-rtx"
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1" if rtx else "0"
    from polygraphy import config

    if rtx != config.USE_TENSORRT_RTX:
        if rtx:
            other = "TensorRT"
        else:
            other = "TensorRT-RTX"
        raise RuntimeUnavailable(
            f"{TITLES[runtime]} can't be used in a process that already uses {other} through Polygraphy; start "
            "another process"
        )
    return importlib.import_module(PACKAGES[runtime])
