"""Validate the options of ``build``, and write them for the build process."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...runtimes.trt_runner import TITLES
from ...storage.file_replacement import resolve_writable_path
from ...verb_options import find_option
from ..build.build_options import EngineOptions

HARDWARE = {"ampere-plus": "AMPERE_PLUS", "same-compute-capability": "SAME_COMPUTE_CAPABILITY"}
EP_CONTEXTS = ("embed", "file")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

_WHAT_TO_DO = {
    "timing_cache": "omit --timing-cache, or name another file",
    "workspace": "omit --workspace, or pass another size",
    "refit": "omit --refit",
    "version_compatible": "install the lean runtime (pip install tensorrt-lean) or omit --version-compatible",
    "hardware_compatibility": "omit --hardware-compat",
    "weight_streaming": "omit --weight-streaming",
    "optimization_level": "omit --optimization-level, or pass a supported level",
}
_WHAT_RTX_DOES = {
    "timing_cache": "it measures no timings during a build; omit --timing-cache",
    "version_compatible": "its engines run only with the version that built them; omit --version-compatible",
    "hardware_compatibility": "name the GPUs with --compute-capability",
}


@dataclass(frozen=True)
class BuildOptions:
    """Requested build options; an option that is None or False keeps the library's default.

    Attributes:
        workspace: maximum memory of a layer in bytes.
        hardware_compatibility: a key of ``HARDWARE``.
        ep_context: one of ``EP_CONTEXTS``.
    """

    timing_cache: str | None = None
    workspace: int | None = None
    optimization_level: int | None = None
    hardware_compatibility: str | None = None
    version_compatible: bool = False
    refit: bool = False
    weight_streaming: bool = False
    ep_context: str | None = None

    def to_request(self) -> dict[str, Any]:
        """Convert the options to the request that `normdeploy.runtimes.build_options` reads.

        Returns:
            Option -> value, without the options that have their default value.
        """
        asked = {name: value for name, value in vars(self).items() if value not in (None, False)}
        asked.pop("ep_context", None)
        if self.timing_cache:
            asked["timing_cache"] = os.path.realpath(self.timing_cache)
        if self.hardware_compatibility:
            asked["hardware_compatibility"] = HARDWARE[self.hardware_compatibility]
        return asked

    def notes(self, runtime: str) -> tuple[str, ...]:
        """Describe each ability that the options give an engine, and the cost of the ability.

        Returns:
            A line for each requested option that needs a note.
        """
        title = TITLES[runtime]
        known = [
            (
                self.refit,
                "refittable: its weights can be replaced without a rebuild (IRefitter), at some cost in speed",
            ),
            (
                self.version_compatible,
                f"version-compatible: newer versions of {title} with the same major version can load it; they"
                " run code from the engine (engine_host_code_allowed)",
            ),
            (
                self.weight_streaming,
                "weight streaming: all weights stay on the GPU until a budget is set (run --weight-budget)",
            ),
            (
                self.hardware_compatibility is not None,
                f"hardware compatibility {self.hardware_compatibility}: it may be slower than an engine for a"
                " single GPU",
            ),
        ]
        return tuple(text for asked, text in known if asked)


def resolve_options(asked: EngineOptions, taken: dict[str, Path]) -> BuildOptions:
    """Validate the build options.

    Args:
        taken: role of a file (for the message) -> the file, which the timing cache must not replace.

    Returns:
        The options, with the workspace in bytes.

    Raises:
        InputError: a value is unknown, or two options exclude each other.
        NormdeployError: the timing cache can't be written.
    """
    if asked.hardware_compatibility is not None and asked.hardware_compatibility not in HARDWARE:
        raise InputError(
            f"unknown hardware compatibility {asked.hardware_compatibility!r}; choose one of {', '.join(HARDWARE)}"
        )
    if asked.optimization_level is not None and asked.optimization_level < 0:
        raise InputError(f"the optimization level is {asked.optimization_level}; pass 0 or more")
    if asked.ep_context is not None and asked.ep_context not in EP_CONTEXTS:
        raise InputError(f"unknown EPContext mode {asked.ep_context!r}; choose one of {', '.join(EP_CONTEXTS)}")
    if asked.ep_context is not None and asked.library != "tensorrt-rtx":
        raise InputError(
            "an EPContext file is for onnxruntime's TensorRT-RTX provider and needs the library tensorrt-rtx,"
            f" not {asked.library}"
        )
    cache = None
    if asked.timing_cache is not None:
        cache = os.fspath(asked.timing_cache)
        for role, path in taken.items():
            if os.fspath(resolve_writable_path(cache)) == os.path.realpath(path):
                raise InputError(
                    f"the timing cache {str(asked.timing_cache)!r} would replace {role}; choose another name"
                )
    size = None if asked.workspace is None else parse_byte_size(asked.workspace)
    return BuildOptions(
        cache,
        size,
        asked.optimization_level,
        asked.hardware_compatibility,
        asked.version_compatible,
        asked.refit,
        asked.weight_streaming,
        asked.ep_context,
    )


def parse_byte_size(size: int | str) -> int:
    """Parse a size in bytes, or a text such as "512M" and "2GiB" (powers of 1024).

    Returns:
        Bytes.

    Raises:
        InputError: the size can't be read, or is below 1.
    """
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", str(size), re.IGNORECASE)
    if match is None or not int(match[1]):
        raise InputError(f"can't read the workspace {size!r}; pass bytes, or a size such as 512M or 2G")
    return int(match[1]) * _UNITS[match[2].upper()]


def describe_refused_option(option: str, reason: str, runtime: str) -> str:
    """Describe why the library does not support an option, and name a fix.

    Returns:
        One line for the user.
    """
    if runtime == "tensorrt-rtx":
        advice = _WHAT_RTX_DOES.get(option)
    else:
        advice = None
    flag = find_option(EngineOptions, option).flag
    return f"{TITLES[runtime]} does not support {flag}: {reason}; {advice or _WHAT_TO_DO[option]}"
