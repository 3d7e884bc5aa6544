"""Apply a build's options as the installed library supports them.

This module asks the installed library which options it supports, so no table of versions needs maintenance. An
unsupported option is refused before anything is built, and the message names the option. Reasons for a refusal: the
library has no attribute for the option, does not keep the option's value, or states that the option has no effect.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import NormdeployError
from ..storage.file_replacement import lock_folder, write_bytes

Answer = dict[str, Any]
# Option name -> value, as `normdeploy.verbs.build.build_request` writes it. Options that the user did not set are
# absent.
Options = Mapping[str, Any]

_FLAGS = {"refit": "REFIT", "version_compatible": "VERSION_COMPATIBLE", "weight_streaming": "WEIGHT_STREAMING"}


class OptionNotTaken(Exception):
    """Raised if the library does not accept an option."""

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(reason)
        self.option = option

    def to_answer(self) -> Answer:
        """Return the refusal as JSON data.

        Returns:
            "refused": "option", "option": its name, "reason": the library's reason.
        """
        return {"refused": "option", "option": self.option, "reason": str(self)}


def require_options_taken(trt: Any, builder: Any, options: Options) -> None:
    """Set every option on a throwaway configuration and read the option back.

    Raises:
        OptionNotTaken: the library does not accept one of the options.
    """
    if not options:
        return
    config = builder.create_builder_config()
    for option, flag in _FLAGS.items():
        if options.get(option):
            _require_flag(trt, config, option, flag)
    if "optimization_level" in options:
        _require_level(config, options["optimization_level"])
    if "workspace" in options:
        _require_workspace(trt, config, options["workspace"])
    if "hardware_compatibility" in options:
        _require_hardware(trt, config, options["hardware_compatibility"])
    if options.get("version_compatible"):
        _require_lean_runtime(trt, builder)
    if "timing_cache" in options:
        _require_timing_cache(config, Path(options["timing_cache"]))


def config_arguments(trt: Any, options: Options, folder: Path) -> dict[str, Any]:
    """Convert the options to keyword arguments of Polygraphy's CreateConfig.

    Args:
        folder: folder for the files that Polygraphy reads.

    Returns:
        Keyword argument -> value.
    """
    keywords: dict[str, Any] = {}
    if "workspace" in options:
        keywords["memory_pool_limits"] = {trt.MemoryPoolType.WORKSPACE: options["workspace"]}
    if "optimization_level" in options:
        keywords["builder_optimization_level"] = options["optimization_level"]
    if "hardware_compatibility" in options:
        keywords["hardware_compatibility_level"] = _hardware_level(trt, options["hardware_compatibility"])
    if "timing_cache" in options and (data := read_cache_file(Path(options["timing_cache"]))):
        # Polygraphy leaves a lock file next to the file that it reads, so it reads a copy outside the user's folder.
        (copy := folder / "timing-cache").write_bytes(data)
        keywords["load_timing_cache"] = str(copy)
    named = {"refit": "refittable", "version_compatible": "version_compatible", "weight_streaming": "weight_streaming"}
    return keywords | {name: True for option, name in named.items() if options.get(option)}


def save_timing_cache(config: Any, options: Options) -> str | None:
    """Merge this build's timings into the shared timing cache file.

    The folder is locked while the file is read, merged and replaced whole, so timings that other builds wrote in the
    meantime are kept.

    Returns:
        The reason why the file was not written, or None if the file was written or the user requested no cache.
    """
    if "timing_cache" not in options:
        return None
    path = Path(options["timing_cache"])
    cache = config.get_timing_cache()
    with lock_folder(path.parent):
        before = read_cache_file(path)
        if before and not cache.combine(config.create_timing_cache(before), ignore_mismatch=False):
            return f"the timing cache {path.name} was not changed: another library or GPU wrote it during this build"
        try:
            with cache.serialize() as data:
                write_bytes(path, bytes(data))
        except NormdeployError as error:
            # The engine is built even if its timings can't be saved.
            return f"the timing cache was not written: {error}"
    return None


# ------------------------------------------------------------------ checks of single options


def _require_flag(trt: Any, config: Any, option: str, name: str) -> None:
    flag = getattr(trt.BuilderFlag, name, None)
    if flag is None:
        raise OptionNotTaken(option, f"it has no builder flag {name}")
    config.set_flag(flag)
    if not config.get_flag(flag):
        raise OptionNotTaken(option, f"it does not keep the builder flag {name}")


def _require_level(config: Any, level: int) -> None:
    if not hasattr(config, "builder_optimization_level"):
        raise OptionNotTaken("optimization_level", "it has no builder optimization level")
    config.builder_optimization_level = level
    if (kept := config.builder_optimization_level) != level:
        raise OptionNotTaken("optimization_level", f"level {level} was requested, but it uses {kept}")


def _require_workspace(trt: Any, config: Any, size: int) -> None:
    pool = getattr(getattr(trt, "MemoryPoolType", None), "WORKSPACE", None)
    if pool is None or not hasattr(config, "set_memory_pool_limit"):
        raise OptionNotTaken("workspace", "it has no workspace limit")
    config.set_memory_pool_limit(pool, size)
    if (kept := config.get_memory_pool_limit(pool)) != size:
        raise OptionNotTaken("workspace", f"{size} bytes were requested, but it keeps {kept}")


def _hardware_level(trt: Any, name: str) -> Any:
    return getattr(getattr(trt, "HardwareCompatibilityLevel", None), name, None)


def _require_hardware(trt: Any, config: Any, name: str) -> None:
    level = _hardware_level(trt, name)
    if level is None:
        raise OptionNotTaken("hardware_compatibility", f"it has no hardware compatibility level {name}")
    config.hardware_compatibility_level = level
    if (kept := config.hardware_compatibility_level) != level:
        raise OptionNotTaken(
            "hardware_compatibility", f"{name} was requested, but it stays at {getattr(kept, 'name', kept)}"
        )


def _require_lean_runtime(trt: Any, builder: Any) -> None:
    """Build a one-layer engine to check that the lean runtime is installed. Version-compatible engines contain it."""
    flags = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if flags is None else 1 << int(flags))
    x = network.add_input("x", trt.float32, (1,))
    network.mark_output(network.add_identity(x).get_output(0))
    config = builder.create_builder_config()
    config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    if builder.build_serialized_network(network, config) is None:
        raise OptionNotTaken(
            "version_compatible", "it can't build such an engine here, because the lean runtime is missing"
        )


def _require_timing_cache(config: Any, path: Path) -> None:
    if not hasattr(config, "create_timing_cache"):
        raise OptionNotTaken("timing_cache", "it has no timing cache")
    data = read_cache_file(path)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        cache = config.create_timing_cache(data)
        taken = cache is not None and config.set_timing_cache(cache, ignore_mismatch=False)
    if any("no-op" in str(w.message) for w in raised):
        raise OptionNotTaken("timing_cache", "it reports that its timing caches do nothing")
    if not taken:
        raise OptionNotTaken(
            "timing_cache",
            f"{path.name} ({len(data)} bytes) is damaged, or was written by another version or on another GPU",
        )


def read_cache_file(path: Path) -> bytes:
    """Read a timing cache.

    Returns:
        The file's bytes, empty if it does not exist yet.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
