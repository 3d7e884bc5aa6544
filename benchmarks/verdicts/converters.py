"""Tools for one kind of runtime or weight: onnxruntime's optimizer for transformers, four bits, QOperator files, other
opsets, and torchao's quantizer of exported programs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx
import torch
from onnxruntime.quantization import QuantFormat, quantize_static
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer
from onnxruntime.transformers.optimizer import optimize_model

from .nets import Net
from .tools import Feeds, Reader, Tool, dynamic_shapes, int8

_BLOCK = 16
_SAMPLES = 32


def _transformers(*, half: bool) -> Tool:
    """Write the fused nodes of onnxruntime's optimizer for transformers, for BERT."""

    def optimize(proto: onnx.ModelProto, _: list[Feeds]) -> onnx.ModelProto:
        """Optimize the file.

        Returns:
            the model.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            onnx.save(proto, path)
            made = optimize_model(str(path), model_type="bert", opt_level=0)
            if half:
                made.convert_float_to_float16(keep_io_types=True)
            # The tool adds the opset of its own domain only when it saves.
            made.save_model_to_file(str(path))
            return onnx.load(path)

    return optimize


def _four_bits(form: QuantFormat, *, symmetric: bool) -> Tool:
    def quantize(proto: onnx.ModelProto, _: list[Feeds]) -> onnx.ModelProto:
        """Quantize the weights.

        Returns:
            the model.
        """
        config = DefaultWeightOnlyQuantConfig(block_size=_BLOCK, is_symmetric=symmetric, quant_format=form)
        quantizer = MatMulNBitsQuantizer(proto, algo_config=config)
        quantizer.process()
        made: onnx.ModelProto = quantizer.model.model
        return made

    return quantize


def _operators(proto: onnx.ModelProto, feeds: list[Feeds]) -> onnx.ModelProto:
    """Write QLinearConv and the like, with one scale for each tensor."""

    def quantize(ready: Path, target: Path) -> None:
        """Quantize a prepared file."""
        quantize_static(ready, target, Reader(feeds), quant_format=QuantFormat.QOperator, reduce_range=True)

    return int8(proto, quantize)


def _later_opset(proto: onnx.ModelProto, _: list[Feeds]) -> onnx.ModelProto:
    return onnx.version_converter.convert_version(proto, 21)


def _onnxoptimizer(proto: onnx.ModelProto, _: list[Feeds]) -> onnx.ModelProto:
    made: onnx.ModelProto = import_module("onnxoptimizer").optimize(proto)
    return made


CONVERTERS: dict[str, Tool] = {
    "onnxruntime transformers": _transformers(half=False),
    "onnxruntime transformers, fp16": _transformers(half=True),
    "onnxruntime 4 bits": _four_bits(QuantFormat.QOperator, symmetric=False),
    "onnxruntime 4 bits, symmetric": _four_bits(QuantFormat.QOperator, symmetric=True),
    "onnxruntime 4 bits, pairs": _four_bits(QuantFormat.QDQ, symmetric=True),
    "onnxruntime int8 static, operators": _operators,
    "onnx opset 21": _later_opset,
    "onnxoptimizer": _onnxoptimizer,
}


def torchao(net: Net, open_dims: bool) -> onnx.ModelProto:
    """Quantize the exported program as torchao's users do for CPUs, and write it with torch's exporter.

    Returns:
        the model.
    """
    pt2e = import_module("torchao.quantization.pt2e.quantize_pt2e")
    x86 = import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    shapes = dynamic_shapes(net) if open_dims else None
    program = torch.export.export(net.build(), net.args(), dynamic_shapes=shapes)
    prepared = pt2e.prepare_pt2e(program.module(), quantizer)
    for seed in range(100, 100 + _SAMPLES):
        prepared(*net.args(seed))
    converted = pt2e.convert_pt2e(prepared)
    return _written(converted, net, shapes)


def _written(module: Any, net: Net, shapes: Sequence[Any] | None) -> onnx.ModelProto:
    names = [i.name for i in net.inputs]
    program = torch.onnx.export(
        module, net.args(), dynamo=True, verbose=False, input_names=names, dynamic_shapes=shapes
    )
    assert program is not None
    return program.model_proto
