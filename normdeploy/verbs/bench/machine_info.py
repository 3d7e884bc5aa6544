"""Describe the machine that a measurement runs on: CPU, load and versions."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

from ...environment import NODE, WEB, describe_environment

_LIBRARIES = (
    *("torch", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "openvino", WEB, NODE),
    *("onnx", "normdeploy"),
)


@dataclass(frozen=True)
class MachineInfo:
    """Machine that a time was measured on.

    Attributes:
        cores: number of cores that this process may use.
        load: average number of processes that wanted a core over the last minute; None if the system does not report
            it.
        versions: package -> version.
    """

    cpu: str
    cores: int
    load: float | None
    system: str
    versions: dict[str, str]

    def __str__(self) -> str:
        if self.load is None:
            busy = ""
        else:
            busy = f", CPU load {self.load:.1f}"
        return f"{self.cpu}, {self.cores} cores{busy}; " + ", ".join(
            f"{name} {version}" for name, version in self.versions.items()
        )


def describe_machine() -> MachineInfo:
    """Describe this machine as it is now.

    Returns:
        CPU, cores, load, system and versions.
    """
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
