"""Check that the configurations of a bundle fit its model."""

from __future__ import annotations

from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np

from ...errors import NormdeployError
from ...storage.onnx_files import load_onnx
from ...storage.proto_traversal import required_inputs
from ..package import triton_config
from ..package.evidence_bundle import EvidenceBundle
from .bundle_change import BundleChange

_BYTES = 16 * 2**20


def check_configs(bundle: EvidenceBundle, onnx_file: Path) -> list[BundleChange]:
    """Check that each configuration can be read and fits the ONNX file and the other files of its folder.

    Returns:
        A change for each configuration that can't be read or does not fit.
    """
    configs = bundle.read_part("configs", lambda value: [str(path) for path in value])
    problems = []
    for path in configs:
        try:
            wrong = _describe_config_error(bundle, path, onnx_file)
        except NormdeployError as error:
            wrong = str(error)
        if wrong:
            problems.append(BundleChange("config", path, "it matched the model", wrong, True))
    return problems


def _describe_config_error(bundle: EvidenceBundle, path: str, onnx_file: Path) -> str:
    file = bundle.file_path(path)
    if file.stat().st_size > _BYTES:
        return f"it has more than {_BYTES} bytes"
    try:
        config = triton_config.parse_config(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        return f"it is not text: {error}"
    graph = load_onnx(onnx_file, external_data=False).graph
    batched = config.max_batch_size > 0
    inputs = triton_config.make_ports(required_inputs(graph))
    outputs = triton_config.make_ports(graph.output)
    if exact := config.backend == triton_config.BACKENDS["onnxruntime"][0]:
        outputs = triton_config.runtime_outputs(
            onnx_file, outputs, optimize=config.optimization.graph.level != triton_config.UNOPTIMIZED
        )
    for stated, values, whole in ((config.input, inputs, False), (config.output, outputs, exact)):
        ports = {port.name: port for port in values}
        names = [tensor.name for tensor in stated]
        if sorted(names) != sorted(ports):
            return f"it names {names}, but the model has {list(ports)}"
        for tensor in stated:
            if wrong := _describe_port_mismatch(tensor, ports[tensor.name], batched, whole):
                return wrong
    return _describe_missing_file(bundle, PurePosixPath(path).parent, config)


def _describe_port_mismatch(tensor: Any, port: triton_config.TritonPort, batched: bool, exact: bool) -> str:
    """Describe how the configuration of one tensor differs from the model; return "" if it fits.

    Args:
        exact: True if a dynamic dim of the model must not have a fixed size in the configuration.
    """
    kind = triton_config.ModelConfig.DESCRIPTOR.file.enum_types_by_name["DataType"].values_by_number.get(
        tensor.data_type
    )
    if tensor.HasField("reshape"):
        dims = list(tensor.reshape.shape)
    else:
        dims = list(tensor.dims)
    if batched:
        shape = port.shape[1:]
    else:
        shape = port.shape or (1,)
    if kind is None or kind.name != triton_config.TYPES[port.dtype]:
        return (
            f"it declares {tensor.name!r} as {kind.name if kind else tensor.data_type}, but the model has {port.dtype}"
        )
    if batched and (not port.shape or isinstance(port.shape[0], int)):
        return f"it lets Triton join requests along the first dim of {tensor.name!r}, but the model has {port}"
    known = [n if isinstance(n, int) else -1 if exact else d for n, d in zip(shape, dims, strict=False)]
    if len(dims) != len(shape) or known != dims:
        return f"it declares {tensor.name!r} with the dims {dims}, but the model has {port}"
    return ""


def _describe_missing_file(bundle: EvidenceBundle, folder: PurePosixPath, config: Any) -> str:
    """Describe a file that the configuration names and that has the wrong size; return "" if there is none.

    Raises:
        InputError: a named file is missing.
    """
    models = [pair.value for pair in config.cc_model_filenames] or [config.default_model_filename]
    for name in models:
        bundle.file_path(f"{folder}/1/{name}")
    sizes = {
        value: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name).itemsize
        for name, value in triton_config.TYPES.items()
    }
    kinds = triton_config.ModelConfig.DESCRIPTOR.file.enum_types_by_name["DataType"].values_by_number
    for warmup in config.model_warmup:
        for pair in warmup.inputs:
            if not pair.value.input_data_file:
                continue
            size = bundle.file_path(f"{folder}/warmup/{pair.value.input_data_file}").stat().st_size
            if pair.value.data_type in kinds:
                needed = prod(pair.value.dims) * sizes.get(kinds[pair.value.data_type].name, 0)
            else:
                needed = 0
            if size != needed:
                return f"the warm-up data {pair.value.input_data_file!r} has {size} bytes, but its dims need {needed}"
    return ""
