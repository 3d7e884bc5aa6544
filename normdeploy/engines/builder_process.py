"""Build an engine in this process: ``python -m normdeploy.engines.builder_process``, started by
``normdeploy.engines.builder_client``.

The process reads a request as JSON on standard input. It writes one JSON object per line on standard output:
{"progress": [done, total]}, then {"built": {...}} or {"refused": kind, ...}. Everything that the libraries print goes
to standard error, which is the log. Some failures of the libraries abort the process, and then only the log gives the
reason.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from ..errors import ExtensionError
from ..norms.third_party import norm_of_plugin
from ..runtimes.build_options import OptionNotTaken, config_arguments, require_options_taken, save_timing_cache
from ..runtimes.network_types import QUANTIZED, NetworkTypes, check_network_types, count_layer_types
from ..runtimes.trt_runner import select_library

Answer = dict[str, Any]


def build_engine(request: Answer, tell: Callable[[Answer], None]) -> Answer:
    """Parse and build as requested, and write the engine to its path.

    Args:
        request: runtime, paths, profiles and options.
        tell: function that sends an answer, such as the progress.

    Returns:
        last answer.
    """
    trt = select_library(request["runtime"])
    from polygraphy.backend.trt import create_network, engine_bytes_from_network
    from polygraphy.backend.trt.util import get_trt_logger
    from polygraphy.logger import G_LOGGER

    G_LOGGER.module_severity = G_LOGGER.VERBOSE
    G_LOGGER.colors = False
    rtx = request["runtime"] == "tensorrt-rtx"
    known = supported_capabilities(trt) if rtx else {}
    if unknown := [c for c in request["capabilities"] if c not in known]:
        return {"refused": "capabilities", "unknown": unknown, "known": list(known)}

    options = request.get("options", {})
    try:
        require_options_taken(trt, trt.Builder(get_trt_logger()), options)
    except OptionNotTaken as error:
        return error.to_answer()

    if request.get("plugins"):
        if reason := _register_own_plugins():
            return {"refused": "plugins", "reason": reason}
        if reason := _register_package_plugins(request.get("packages", ())):
            return {"refused": "packages", "reason": reason}
        builder, network = _make_plugin_network(trt, get_trt_logger())
    else:
        # Every network of TensorRT-RTX is strongly typed, so the flag is set only for TensorRT.
        builder, network = create_network(strongly_typed=not rtx)
    # The parser finds NVIDIA's own plugins only after this call.
    trt.init_libnvinfer_plugins(get_trt_logger(), "")
    parser = trt.OnnxParser(network, get_trt_logger())
    parsed = parser.parse_from_file(request["onnx"])
    if parser.num_errors or not parsed:
        return {
            "refused": "parser",
            "errors": [_encode_parser_error(parser.get_error(i)) for i in range(parser.num_errors)],
        }
    if network.num_layers == 0:
        return {"refused": "empty"}
    if request.get("plugins"):
        plugins = sum(network.get_layer(i).type == trt.LayerType.PLUGIN_V3 for i in range(network.num_layers))
    else:
        plugins = 0
    # The parser prefers a function or a native op to a plugin of the same name, so a plugin may be missing in the
    # network.
    if plugins != request.get("plugins", 0):
        return {"refused": "plugin layers", "found": plugins, "written": request["plugins"]}
    if request.get("precision"):
        types = check_network_types(trt, network, request["precision"], request["types"])
    else:
        layers = count_layer_types(network)
        # The types of a float32 network are reported only if it also has quantized layers.
        types = NetworkTypes(dict(layers) if layers.keys() & QUANTIZED.values() else {})
    if not types:
        return {"refused": "types", "wrong": list(types.wrong)}
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    if shapes := [t.name for t in inputs if t.is_shape_tensor]:
        return {"refused": "shape inputs", "inputs": shapes}

    with tempfile.TemporaryDirectory() as folder:
        config = _config_factory(trt, request, _make_progress_monitor(trt, tell), Path(folder))(builder, network)
    with open(request["engine"], "wb") as file:
        file.write(engine_bytes_from_network((builder, network), config=config))
    note = save_timing_cache(config, options)
    return {
        "built": {
            "version": trt.__version__,
            "layers": network.num_layers,
            "types": types.layers,
            "targets": request["capabilities"] or [c for c, number in known.items() if number >= (8, 0)],
            "capability": getattr(getattr(config, "engine_capability", None), "name", ""),
            "notes": [note] if note else [],
        }
    }


def _register_own_plugins() -> str:
    """Register our plugins with TensorRT. Return the reason if that fails, else ""."""
    try:
        from normdeploy_plugins import qdp

        qdp.register()
    except (ImportError, AttributeError) as error:
        # This happens if triton is missing or tensorrt.plugin has no aot_impl.
        return f"{type(error).__name__}: {error}"
    return ""


def _register_package_plugins(packages: Sequence[Sequence[str]]) -> str:
    """Let installed packages register their plugins. Return the reason if one package fails, else ""."""
    for domain, name in packages:
        guest = norm_of_plugin(domain, name)
        if guest is None or guest.norm.plugin is None:
            return f"no installed package provides the plugin {name!r} of {domain!r}"
        if guest.norm.plugin.register is not None:
            try:
                guest.extension.run(f"does not register the plugin {name!r}", guest.norm.plugin.register)
            except ExtensionError as error:
                return str(error)
    return ""


def _make_plugin_network(trt: Any, logger: Any) -> tuple[Any, Any]:
    """Create a builder and an empty, strongly typed network that accepts kernels compiled ahead of time.

    The flags are looked up by name, because their values differ between TensorRT 10 and 11.
    """
    builder = trt.Builder(logger)
    known = trt.NetworkDefinitionCreationFlag.__members__
    names = [name for name in ("STRONGLY_TYPED", "PREFER_AOT_PYTHON_PLUGINS") if name in known]
    return builder, builder.create_network(sum(1 << int(known[name]) for name in names))


def supported_capabilities(trt: Any) -> dict[str, tuple[int, int]]:
    """List the compute capabilities that this TensorRT-RTX can build for.

    Returns:
        name -> numbers, for example "8.6" -> (8, 6).
    """
    numbers = sorted(int(name[2:]) for name in trt.ComputeCapability.__members__ if name.startswith("SM"))
    return {f"{n // 10}.{n % 10}": (n // 10, n % 10) for n in numbers}


def _config_factory(trt: Any, request: Answer, monitor: Any, folder: Path) -> Callable[..., Any]:
    from polygraphy.backend.trt import CreateConfig, PostprocessConfig, Profile

    profiles = []
    for ranges in filter(None, (request["profile"], *request.get("more_profiles", ()))):
        profiles.append(profile := Profile())
        for name, (low, best, high) in ranges.items():
            profile.add(name, tuple(low), tuple(best), tuple(high))
    common = {"profiles": profiles or None, "progress_monitor": monitor}
    common |= config_arguments(trt, request.get("options", {}), folder)
    if request["runtime"] != "tensorrt-rtx":
        # Polygraphy's CreateConfig turns TF32 off by default.
        return CreateConfig(**common)
    from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

    known = supported_capabilities(trt)
    create = CreateConfigRTX(compute_capabilities=[known[c] for c in request["capabilities"]] or None, **common)
    # With TF32, float32 products have only float16's precision, whereas an engine should be as accurate as the model.
    return PostprocessConfig(create, func=lambda builder, network, config: config.clear_flag(trt.BuilderFlag.TF32))


def _make_progress_monitor(trt: Any, tell: Callable[[Answer], None]) -> Any:
    """Make a monitor that reports how many steps of the builder's outermost phase are done."""

    class BuildProgressMonitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.phases: dict[str, int] = {}

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            if not parent:
                self.phases[name] = steps

        def step_complete(self, name: str, step: int) -> bool:
            if name in self.phases:
                tell({"progress": [step + 1, self.phases[name]]})
            return True

        def phase_finish(self, name: str) -> None:
            self.phases.pop(name, None)

    return BuildProgressMonitor()


def _encode_parser_error(error: Any) -> Answer:
    return {
        "node": error.node_name(),
        "operator": error.node_operator(),
        "reason": error.desc(),
        "functions": list(error.local_function_stack()),
    }


def main() -> None:
    """Read the request from standard input and write answers to standard output."""
    channel: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    # The libraries print to both streams, so both are redirected to the log.
    os.dup2(2, 1)

    def write_answer(answer: Answer) -> None:
        channel.write(json.dumps(answer) + "\n")

    write_answer(build_engine(json.load(sys.stdin), write_answer))


if __name__ == "__main__":
    main()
