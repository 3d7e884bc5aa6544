"""Write the lines of trtexec that build the same engine as ``build`` (``build --print-trtexec``).

The flags are from trtexec's help and from NVIDIA's pages on moving trtexec from TensorRT 10 to 11. TensorRT 11 removed
--fp16 and the other flags of types, because all its networks are strongly typed, and needs no --stronglyTyped.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import cast

import onnx

from ...engines.norm_implementations import needs_native_rewrite
from ...engines.parser_input import graph_inputs, has_regrouped_norms, recorded_input_specs
from ...errors import InputError
from ...model import Shapes
from ...norms.function_bodies import functions_to_rename
from ...precision.half_conversion import builder_request
from ...runtimes.optimization_profiles import resolve_profile
from ...storage.onnx_files import load_onnx
from ...storage.proto_traversal import nodes_with_opsets
from ...types import PathLike
from .build_options import BuildCall
from .build_request import BuildOptions, resolve_options

# Place of trtexec on a Jetson and in NVIDIA's containers.
_INSTALLED = "/usr/src/tensorrt/bin/trtexec"
_HARDWARE = {"ampere-plus": "ampere+", "same-compute-capability": "sameComputeCapability"}
# Domains of ops that TensorRT's parser knows without a library of plugins.
_KNOWN_DOMAINS = frozenset({"", "ai.onnx", "trt"})


@dataclass(frozen=True)
class TrtexecLines:
    """Lines of trtexec for one file.

    Attributes:
        tensorrt10: arguments for TensorRT 10.
        tensorrt11: arguments for TensorRT 11.
        container: arguments of docker, in the folder of the files; () if the paths leave this folder.
        notes: differences to the engine of ``build``.
    """

    tensorrt10: tuple[str, ...]
    tensorrt11: tuple[str, ...]
    container: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        """Return lines for a shell. Everything but the commands is a comment."""
        parts = [f"# TensorRT 10, for example on a Jetson with JetPack 6 (there it is {_INSTALLED}):"]
        parts += [shlex.join(self.tensorrt10)]
        parts += ["# TensorRT 11, for example on an H100. Its networks are always strongly typed, so --fp16, --bf16,"]
        parts += ["# --int8, --fp8, --best and --stronglyTyped are gone:", shlex.join(self.tensorrt11)]
        if self.container:
            parts += ["# Triton's container of the version YY.MM that will load the engine. If it has TensorRT 10, add"]
            parts += ["# --stronglyTyped:", shlex.join(self.container).replace("'$PWD:/models'", '"$PWD":/models')]
        return "\n".join([*parts, *(f"# note: {note}" for note in self.notes)])


def trtexec_lines(call: BuildCall) -> TrtexecLines:
    """Write the lines of trtexec for the arguments of ``build``. No library is needed and nothing is built.

    Returns:
        the lines, and notes on differences.

    Raises:
        GraphError: the file is not valid ONNX.
        InputError: an option is invalid, or trtexec has no counterpart.
    """
    _require_expressible(call)
    source = Path(cast("PathLike", call.onnx_path))
    target = Path(call.engine_path)
    options = resolve_options(call, taken={"the model": source, "the engine": target})
    proto = load_onnx(source, external_data=False)
    shapes = resolve_profile(graph_inputs(proto), recorded_input_specs(proto), call.first_profile)
    files = (f"--onnx={source}", f"--saveEngine={target}")
    # `build` keeps the details of layers too, which `inspect` reads (Polygraphy's default).
    always = ("--noTF32", "--profilingVerbosity=detailed", "--skipInference")
    common = (*files, *_shape_flags(shapes), *_option_flags(options), *always)
    container = list[str]()
    if not any(_leaves_folder(path) for path in (source, target, *([call.timing_cache] if call.timing_cache else []))):
        container += ["docker", "run", "--rm", "--gpus", "all", "-v", "$PWD:/models", "-w", "/models"]
        container += ["nvcr.io/nvidia/tritonserver:YY.MM-py3", _INSTALLED, *common]
    return TrtexecLines(
        ("trtexec", *common, "--stronglyTyped"), ("trtexec", *common), tuple(container), tuple(_notes(call, proto))
    )


def _require_expressible(call: BuildCall) -> None:
    """Check that trtexec can build such an engine.

    Raises:
        InputError: an option has no counterpart in trtexec.
    """
    if call.norm_impl == "plugin":
        raise InputError(
            "trtexec can't put normdeploy's kernels into an engine: on the target, run normdeploy build --library"
            " tensorrt --norm-impl plugin, or print the line without --norm-impl"
        )
    if call.ep_context is not None:
        raise InputError(
            "trtexec writes no EPContext file, which is for onnxruntime's TensorRT-RTX provider; omit --ep-context"
        )
    if call.more_profiles:
        raise InputError("--print-trtexec prints a line with one profile; omit --add-profile")
    if call.compute_capabilities:
        raise InputError(
            "trtexec builds for the GPU on which it runs, so --compute-capability has no counterpart; omit it"
        )


def _shape_flags(shapes: Mapping[str, Shapes]) -> list[str]:
    """Write the profile; [] if all inputs are static."""
    flags = list[str]()
    for place, flag in enumerate(("--minShapes", "--optShapes", "--maxShapes")):
        texts = [f"{name}:{'x'.join(map(str, sizes[place]))}" for name, sizes in shapes.items()]
        if texts:
            flags.append(f"{flag}={','.join(texts)}")
    return flags


def _option_flags(options: BuildOptions) -> list[str]:
    flags = list[str]()
    if options.timing_cache is not None:
        flags.append(f"--timingCacheFile={options.timing_cache}")
    if options.workspace is not None:
        flags.append(f"--memPoolSize=workspace:{options.workspace}B")
    if options.optimization_level is not None:
        flags.append(f"--builderOptimizationLevel={options.optimization_level}")
    if options.hardware_compatibility is not None:
        flags.append(f"--hardwareCompatibilityLevel={_HARDWARE[options.hardware_compatibility]}")
    switches = {
        "--versionCompatible": options.version_compatible,
        "--refit": options.refit,
        "--allowWeightStreaming": options.weight_streaming,
    }
    return [*flags, *(flag for flag, wanted in switches.items() if wanted)]


def _leaves_folder(path: PathLike) -> bool:
    pure = PurePath(os.fspath(path))
    return pure.is_absolute() or ".." in pure.parts


def _notes(call: BuildCall, proto: onnx.ModelProto) -> list[str]:
    """Describe how the engine of trtexec would differ from the engine of ``build``."""
    source = os.fspath(cast("PathLike", call.onnx_path))
    notes = ["not run here: the lines were only written, and an engine runs on the kind of GPU on which it is built"]
    if call.library == "tensorrt-rtx":
        notes.append("the lines are for TensorRT: engines of TensorRT-RTX are built by build, without a GPU")
    if builder_request(proto):
        notes.append("the types are in the file, so the engine computes in half precision without a flag")
    if has_regrouped_norms(proto) or needs_native_rewrite(proto, "tensorrt", "") or functions_to_rename(proto):
        notes.append(
            f"build --library tensorrt would rewrite nodes of {source} that TensorRT runs slowly or misreads, and"
            f" trtexec does not: first run normdeploy optimize {source} -o FILE.onnx --runtime tensorrt, and pass"
            " FILE.onnx to trtexec"
        )
    bodies = {(function.domain, function.name) for function in proto.functions}
    foreign = {
        f"{node.domain}.{node.op_type}"
        for node, _ in nodes_with_opsets(proto)
        if node.domain not in _KNOWN_DOMAINS and (node.domain, node.op_type) not in bodies
    }
    if foreign:
        notes.append(
            f"add --staticPlugins=LIBRARY.so with the library that provides {', '.join(sorted(foreign))}; TensorRT"
            " itself has no such op"
        )
    if call.norm_impl == "auto":
        notes.append("build --norm-impl auto would use normdeploy's kernels, which trtexec can't put into an engine")
    return notes
