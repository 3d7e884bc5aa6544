"""Describes what a time was measured on: the machine, its load, and the versions."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

from ...environment import describe_environment

_LIBRARIES = ("torch", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "onnx", "normdeploy")


@dataclass(frozen=True)
class MachineInfo:
    """``load``: processes that wanted a core, averaged over the last minute; None where the system does not tell."""

    cpu: str
    # that this process may use
    cores: int
    load: float | None
    system: str
    versions: dict[str, str]

    def __str__(self) -> str:
        if self.load is None:
            busy = ""
        else:
            busy = f", load {self.load:.1f}"
        return f"{self.cpu}, {self.cores} cores{busy}; " + ", ".join(
            f"{name} {version}" for name, version in self.versions.items()
        )


def describe_machine() -> MachineInfo:
    """This one, now."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    if hasattr(os, "getloadavg"):
        load = os.getloadavg()[0]
    else:
        load = None
    facts = describe_environment()
    system = f"{platform.system()} {platform.machine()}, Python {facts['python']}"
    return MachineInfo(facts["cpu"], cores, load, system, {name: facts[name] for name in _LIBRARIES if name in facts})
