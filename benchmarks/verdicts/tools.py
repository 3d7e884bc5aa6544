"""Tools that write the files: torch's two exporters, onnxruntime's converters and optimizers, onnxsim, onnxslim.

Each gets the arguments that its users pass, with its defaults.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from onnxruntime.transformers.float16 import convert_float_to_float16
from onnxruntime.transformers.onnx_model import OnnxModel

from .nets import Net

Feeds = dict[str, np.ndarray]
Tool = Callable[[onnx.ModelProto, list[Feeds]], onnx.ModelProto]


def dynamo(net: Net, open_dims: bool) -> onnx.ModelProto:
    """Export as ``torch.onnx.export(net, args, dynamo=True)`` does.

    Returns:
        the model.
    """
    program = torch.onnx.export(
        net.build(),
        net.args(),
        dynamo=True,
        verbose=False,
        input_names=[i.name for i in net.inputs],
        dynamic_shapes=dynamic_shapes(net) if open_dims else None,
    )
    assert program is not None
    return program.model_proto


def torchscript(net: Net, open_dims: bool) -> onnx.ModelProto:
    """Export as ``torch.onnx.export(net, args, dynamo=False)`` does.

    Returns:
        the model.
    """
    file = io.BytesIO()
    names = [i.name for i in net.inputs]
    axes = {i.name: {k: s[0] for k, s in enumerate(i.shape) if not isinstance(s, int)} for i in net.inputs}
    torch.onnx.export(
        net.build(),
        net.args(),
        file,
        dynamo=False,
        opset_version=17,
        input_names=names,
        dynamic_axes=axes if open_dims else None,
    )
    return onnx.load_from_string(file.getvalue())


EXPORTERS = {"dynamo": dynamo, "torchscript": torchscript}


def dynamic_shapes(net: Net) -> tuple[dict[int, Any], ...] | None:
    """Convert the dynamic dims for torch.export.

    Returns:
        axis -> dim for each input; None if all are fixed.
    """
    dims = {name: torch.export.Dim(name, min=low, max=high) for name, low, _, high in net.dims.values()}
    shapes = tuple({k: dims[s[0]] for k, s in enumerate(i.shape) if not isinstance(s, int)} for i in net.inputs)
    return shapes if dims else None


def _onnxsim(proto: onnx.ModelProto, _: list[Feeds]) -> onnx.ModelProto:
    made: onnx.ModelProto = import_module("onnxsim").simplify(proto)[0]
    return made


def _onnxslim(proto: onnx.ModelProto, _: list[Feeds]) -> onnx.ModelProto:
    made: onnx.ModelProto = import_module("onnxslim").slim(proto)
    return made


def _onnxscript(proto: onnx.ModelProto, _: list[Feeds]) -> onnx.ModelProto:
    made: onnx.ModelProto = import_module("onnxscript.optimizer").optimize(proto)
    return made


def _offline(level: str) -> Tool:
    """Return a tool that writes the file of onnxruntime's optimizer at this level."""

    def optimize(proto: onnx.ModelProto, _: list[Feeds]) -> onnx.ModelProto:
        """Optimize the file.

        Returns:
            the model.
        """
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "optimized.onnx"
            options.optimized_model_filepath = str(path)
            ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
            return onnx.load(path)

    return optimize


def _half(keep_io_types: bool) -> Tool:
    def convert(proto: onnx.ModelProto, _: list[Feeds]) -> onnx.ModelProto:
        """Convert the file.

        Returns:
            the model.
        """
        half = convert_float_to_float16(proto, keep_io_types=keep_io_types)
        # The converter appends its Casts; onnxruntime requires them in order.
        OnnxModel(half).topological_sort()
        return half

    return convert


class Reader(CalibrationDataReader):
    """Calibration reader over the feeds."""

    def __init__(self, feeds: list[Feeds]) -> None:
        self._left = iter(feeds)

    def get_next(self) -> Any:
        """Return the next feed.

        Returns:
            name -> array, or None at the end.
        """
        return next(self._left, None)


def int8(proto: onnx.ModelProto, quantize: Callable[[Path, Path], None]) -> onnx.ModelProto:
    """Prepare the file as onnxruntime recommends, then quantize it.

    Returns:
        the model.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, ready, target = (Path(folder) / name for name in ("in.onnx", "ready.onnx", "out.onnx"))
        onnx.save(proto, source)
        quant_pre_process(str(source), str(ready), skip_symbolic_shape=True)
        prepared = onnx.load(ready)
        # torch's exporter states shapes of weights, and the quantizer transposes them without updating these.
        del prepared.graph.value_info[:]
        onnx.save(prepared, ready)
        quantize(ready, target)
        return onnx.load(target)


def _int8_dynamic(proto: onnx.ModelProto, _: list[Feeds]) -> onnx.ModelProto:
    return int8(proto, quantize_dynamic)


def _int8_static(proto: onnx.ModelProto, feeds: list[Feeds]) -> onnx.ModelProto:
    def quantize(ready: Path, target: Path) -> None:
        """Quantize a prepared file."""
        quantize_static(ready, target, Reader(feeds), quant_format=QuantFormat.QDQ, per_channel=True)

    return int8(proto, quantize)


TOOLS: dict[str, Tool] = {
    "onnxsim": _onnxsim,
    "onnxslim": _onnxslim,
    "onnxscript": _onnxscript,
    "onnxruntime basic": _offline("BASIC"),
    "onnxruntime extended": _offline("EXTENDED"),
    "onnxruntime fp16": _half(keep_io_types=False),
    "onnxruntime fp16, float io": _half(keep_io_types=True),
    "onnxruntime int8 dynamic": _int8_dynamic,
    "onnxruntime int8 static": _int8_static,
}


def applied(tool: Tool, proto: onnx.ModelProto, feeds: list[Feeds]) -> onnx.ModelProto:
    """Apply ``tool`` to a copy of ``proto``.

    Returns:
        the result.
    """
    copy = onnx.ModelProto.FromString(proto.SerializeToString())
    with quieted():
        return tool(copy, feeds)


@contextlib.contextmanager
def quieted() -> Any:
    """Drop the output and warnings of tools."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield
