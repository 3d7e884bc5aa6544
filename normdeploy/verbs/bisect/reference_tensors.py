"""The inner tensors of an ONNX file that is the reference: in float64, and as it runs; and which of a file's are
theirs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import onnx

from ...model import LoadedModel
from ...runtimes import RunResult
from ...runtimes.float64_evaluator import inferred_dtypes
from ...runtimes.torch_runners import HALVES
from ...storage.proto_traversal import copy_model
from ...types import Arrays
from ..verify.reference_models import FileModel, Original, own_precision_runner
from ..verify.tensor_drift import InnerTensors, TensorPair, TorchInnerTensors, boundaries_of_file, pair_tensors


class FileInnerTensors:
    """The tensors of a reference on one input.

    Args:
        precision: "" where the file that is compared computes in the reference's own types, else "fp16" or "bf16".
    """

    def __init__(self, model: FileModel, feeds: Arrays, precision: str) -> None:
        self._model, self._feeds, self._half = model, feeds, HALVES.get(precision)
        self._types = inferred_dtypes(model.proto)

    def reference_values(self, nodes: Iterable[str]) -> RunResult:
        """Return tensors in float64."""
        names = list(nodes)
        values = self._with_outputs(names).float64_runner.infer(self._feeds)
        return {name: values[name] for name in names}

    def eager_values(self, nodes: Iterable[str]) -> RunResult:
        """Return tensors as the reference has them when it runs, in the precision of the file that is compared."""
        names = list(nodes)
        _, make = own_precision_runner(self._with_outputs(names), self._half)
        with make() as runner:
            values = runner.infer(self._feeds)
        return {name: values[name] for name in names}

    def _with_outputs(self, names: Iterable[str]) -> FileModel:
        """The reference with ``names`` among its outputs."""
        proto = copy_model(self._model.proto)
        known = {v.name for v in proto.graph.output}
        for name in dict.fromkeys(names):
            if name not in known:
                proto.graph.output.append(self._output_info(name))
        # What runs is this copy, so neither the user's session nor the file on disk.
        return replace(self._model, proto=proto, session=None, path=None)

    def _output_info(self, name: str) -> onnx.ValueInfoProto:
        """A tensor as an output, of its own type where that is known: an output without one hides the type."""
        kind = self._types.get(name)
        if kind is None:
            return onnx.ValueInfoProto(name=name)
        return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(kind), None)


def open_inner_tensors(model: Original, feeds: Arrays, precision: str) -> InnerTensors:
    """Return the inner tensors of a PyTorch model or an ONNX file."""
    if isinstance(model, FileModel):
        return FileInnerTensors(model, feeds, precision)
    return TorchInnerTensors(model, feeds, precision)


def pair_with_model(model: Original, proto: onnx.ModelProto) -> list[TensorPair]:
    """Return the corresponding tensors of the model and a file, in the file's order."""
    if isinstance(model, LoadedModel):
        return pair_tensors(model, proto)
    return _pair_files(model, proto)


def _pair_files(model: FileModel, proto: onnx.ModelProto) -> list[TensorPair]:
    """Pair the tensors of one name, and those that alone enter or leave a module of one name.

    Exporters number tensors, so of two files those of one name may differ: only results of the same op are paired.
    """
    theirs, their_order = boundaries_of_file(model.proto)
    ours, order = boundaries_of_file(proto)
    their_ops = _op_types_by_tensor(model.proto)
    our_ops = _op_types_by_tensor(proto)
    matched: dict[tuple[str, str], TensorPair] = {}
    for where in sorted(theirs.keys() & ours.keys()):
        if len(theirs[where]) == len(ours[where]) == 1:
            (node,), (tensor,) = theirs[where], ours[where]
            if tensor in order and node in their_order:
                matched[tensor, node] = TensorPair(tensor, node, "", where, (order[tensor], their_order[node]))
    paired = {tensor for tensor, _ in matched} | {node for _, node in matched}
    for name in order.keys() & their_order.keys() - paired:
        if our_ops[name] == their_ops[name]:
            matched[name, name] = TensorPair(name, name, "", "of one name", (order[name], their_order[name]))
    return sorted(matched.values(), key=lambda pair: pair.place)


def _op_types_by_tensor(proto: onnx.ModelProto) -> dict[str, str]:
    """Tensor -> the op that makes it."""
    return {name: node.op_type for node in proto.graph.node for name in node.output}
