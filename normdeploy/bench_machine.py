"""What a time was measured on: the machine, how busy it was, and the versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path

_LIBRARIES = ("torch", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "onnx", "normdeploy")


@dataclass(frozen=True)
class Machine:
    """``load``: processes that wanted a core, averaged over the last minute; None where the system does not tell."""

    cpu: str
    cores: int  # that this process may use
    load: float | None
    system: str
    versions: dict[str, str]

    def __str__(self) -> str:
        busy = "" if self.load is None else f", load {self.load:.1f}"
        return f"{self.cpu}, {self.cores} cores{busy}; " + ", ".join(f"{name} {version}" for name, version in self.versions.items())


def machine() -> Machine:
    """This one, now."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return Machine(_cpu(), cores, load, f"{platform.system()} {platform.machine()}, Python {platform.python_version()}", _versions())


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        told = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        named = {key.strip(): value.strip() for key, value in told.items()}
        if name := named.get("model name"):
            kind = [f"family {named['cpu family']}, model {named['model']}"] if {"cpu family", "model"} <= named.keys() else []
            return " ".join([name, *(f"({k})" for k in kind)])
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for library in _LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
