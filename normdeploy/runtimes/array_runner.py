"""Base of runners that take an ONNX file and compute on numpy arrays on the CPU."""

from __future__ import annotations

import onnx

from ..graphs.declared_inputs import tensor_spec
from ..storage.proto_traversal import required_inputs
from ..types import Tensors
from .live_runner import LiveRunner
from .tensor_spec import as_numpy, as_tensor


class ArrayRunner(LiveRunner):
    """Runner that describes its inputs and outputs as the file does, and converts tensors to arrays and back."""

    _takes_arrays = True

    def _set_specs(self, graph: onnx.GraphProto) -> None:
        self.inputs = tuple(map(tensor_spec, required_inputs(graph)))
        self.outputs = tuple(map(tensor_spec, graph.output))

    def _run_tensors(self, tensors: Tensors) -> Tensors:
        outputs = self._run_arrays({name: as_numpy(tensor.cpu().contiguous()) for name, tensor in tensors.items()})
        return {name: as_tensor(name, array) for name, array in outputs.items()}
