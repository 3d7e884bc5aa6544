"""Describe the environment of a result: the versions of all software that can change the result, and the machine."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

NODE = "node"
WEB = "onnxruntime-web"
"""Package of npm that runs ONNX files in a browser and in Node.js (`normdeploy.runtimes.web_runner`)."""
# Maximum seconds for Node.js to print its version.
_PATIENCE = 20.0

LIBRARIES = (
    "normdeploy",
    "torch",
    "onnx",
    "onnx-ir",
    "onnxscript",
    "onnx-graphsurgeon",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "tensorrt-rtx",
    "openvino",
    WEB,
    NODE,
    "polygraphy",
    "triton",
    "numpy",
    "ml_dtypes",
    "protobuf",
    "safetensors",
    "transformers",
)


def describe_environment() -> dict[str, str]:
    """List versions and names without importing a library.

    Returns:
        key -> version or name: libraries, "python", "system", "cpu", "driver", "gpu 0", ...
    """
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    versions = library_versions(LIBRARIES)
    return versions | {"python": platform.python_version(), "system": system, "cpu": _cpu_name()} | _gpu_names()


def library_versions(libraries: Iterable[str]) -> dict[str, str]:
    """Read the versions of installed libraries without importing the libraries.

    Args:
        libraries: Python packages, `WEB` and `NODE`.

    Returns:
        library -> version; libraries that are not installed are left out. Node.js is left out if `WEB` is missing.
    """
    # The command line imports this module at its start. Importing importlib.metadata at the top of the file would make
    # the start 10 % slower.
    import importlib.metadata

    versions = dict[str, str]()
    for library in libraries:
        if library in (NODE, WEB):
            if version := _web_versions().get(library):
                versions[library] = version
            continue
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def find_web_package() -> Path | None:
    """Find the folder of `WEB` where Node.js looks for packages: in ``node_modules`` of the working folder and of the
    folders above it, then in the folders of the variable NODE_PATH.

    Returns:
        the folder of the package; None if there is none.
    """
    try:
        here = Path.cwd()
        places = [folder / "node_modules" for folder in (here, *here.parents)]
    except OSError:
        # The working folder was removed.
        places = []
    places += [Path(folder) for folder in os.environ.get("NODE_PATH", "").split(os.pathsep) if folder]
    # Unlike pathlib, `os.path` answers False for a folder that may not be read.
    return next((place / WEB for place in places if os.path.isfile(place / WEB / "package.json")), None)


def _web_versions() -> dict[str, str]:
    """Read the versions of `WEB` and of Node.js.

    Returns:
        {} if one of the two is missing.
    """
    package = find_web_package()
    program = shutil.which(NODE)
    if package is None or program is None:
        return {}
    try:
        version = json.loads((package / "package.json").read_text(encoding="utf-8"))["version"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {WEB: str(version), NODE: _node_version(program)}


@functools.cache
def _node_version(program: str) -> str:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().removeprefix("v")


def source_date_epoch() -> int | None:
    """Read SOURCE_DATE_EPOCH (reproducible-builds.org). If the variable is set, written files contain neither the time
    of writing nor durations.

    Returns:
        seconds since 1970 that replace the current time; None if the variable is not set.
    """
    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    if text.isdecimal():
        return int(text)
    return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text().splitlines()
    else:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    if named:
        return named[0]
    return platform.processor() or platform.machine()


def _gpu_names() -> dict[str, str]:
    """Return the driver and the GPUs with their compute capabilities, as NVIDIA's management library reports them.
    Without that library, return {}.
    """
    try:
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return {}
    if nvml.nvmlInit_v2():
        return {}
    try:
        text = ctypes.create_string_buffer(96)
        count = ctypes.c_uint(0)
        major = ctypes.c_int(0)
        minor = ctypes.c_int(0)
        gpus = {}
        if not nvml.nvmlSystemGetDriverVersion(text, len(text)):
            gpus["driver"] = text.value.decode(errors="replace")
        if not nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            for index in range(count.value):
                device = ctypes.c_void_p()
                if not nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) and not nvml.nvmlDeviceGetName(
                    device, text, len(text)
                ):
                    gpus[f"gpu {index}"] = text.value.decode(errors="replace")
                if not nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)):
                    gpus[f"capability {index}"] = f"{major.value}.{minor.value}"
        return gpus
    finally:
        nvml.nvmlShutdown()
