"""The one place that makes onnxruntime's sessions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# On x86 processors without VNNI, onnxruntime adds pairs of uint8 · int8 products in 16 bits, where they saturate. This
# entry (onnxruntime_session_options_config_keys.h) takes the kernels that don't: results are then those of the file.
EXACT_INTEGERS = {"session.x64quantprecision": "1"}
_FATAL = 4  # onnxruntime's severity: an exception says everything else better than its log


def open_session(
    model: str | os.PathLike[str] | bytes,
    *,
    optimize: bool = False,
    provider: str = "cpu",
    settings: Mapping[str, str] | None = None,
    threads: int = 0,
    entries: Mapping[str, str] | None = None,
    initializers: Mapping[str, ort.OrtValue] | None = None,
    saved: Path | None = None,
) -> ort.InferenceSession:
    """
    Args:
        model: a path (needed where weights are external or above 2 GB), or the bytes of a model.
        optimize: onnxruntime's own optimizer: all of it, or none.
        provider: "cpu" or "cuda", behind which stands the CPU, as onnxruntime adds it itself.
        settings: of the provider.
        threads: of one operator; 0: one for each core.
        entries: of the session's configuration, by their names in onnxruntime_session_options_config_keys.h.
        initializers: values of external weights, taken where they lie.
        saved: where to write the optimized graph.

    Raises:
        Exception: onnxruntime refuses the model; its exceptions share no base class.
    """
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL
    options.intra_op_num_threads = threads
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    if saved is not None:
        options.optimized_model_filepath = os.fspath(saved)
    # It is a part of the optimizer.
    exact = EXACT_INTEGERS if optimize and not _lacks_zero_points(model) else {}
    for name, value in {**exact, **(entries or {})}.items():
        options.add_session_config_entry(name, value)
    if initializers:
        options.add_external_initializers(list(initializers), list(initializers.values()))
    providers: list[Any] = [(PROVIDERS[provider], dict(settings or {}))]
    return ort.InferenceSession(model if isinstance(model, bytes) else os.fspath(model), options, providers=providers)


def _lacks_zero_points(model: str | os.PathLike[str] | bytes) -> bool:
    """Whether a DequantizeLinear has a scale for each channel and no zero points.

    onnxruntime 1.31 with `EXACT_INTEGERS` gives its int8 weight a zero point that is one number, and then refuses to
    run the node, which asks for one for each scale.
    """
    content = model if isinstance(model, bytes) else Path(model).read_bytes()
    if b"DequantizeLinear" not in content:
        return False
    try:
        graph = onnx.ModelProto.FromString(content).graph
    except DecodeError:
        # onnxruntime says what is wrong with it.
        return False
    scalars = {tensor.name for tensor in graph.initializer if not tensor.dims}
    return any(
        node.op_type == "DequantizeLinear" and not any(node.input[2:]) and node.input[1] not in scalars
        for node in graph.node
    )
