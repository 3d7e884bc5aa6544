"""Run ONNX files in onnxruntime directly on the memory of the caller's arrays."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort

from ..errors import InputError, RuntimeCrash
from ..model import TensorSpec
from ..ort_sessions.session import FLOAT_OPERANDS, rounds_float_operands, run_in_trial_process
from ..storage.proto_traversal import is_meaningless_dim
from ..types import PathLike, Tensors
from .live_runner import LiveRunner
from .ort_runner import OrtRunner, require_cuda, run_named_feeds, shorten_ort_error
from .tensor_spec import DTYPES, as_numpy

# torch takes seconds to import and is not needed for numpy arrays on the CPU.
if TYPE_CHECKING:
    import torch

    from .cuda_stream import CudaStream

# Value of onnxruntime's gpu_graph_id for a run that neither records nor replays a graph.
_NO_GRAPH = "-1"
_FLOATS = (
    f"onnxruntime runs with the session option {'='.join(*FLOAT_OPERANDS.items())}, as in verify: by default it may "
    "round activations to 8 bits before quantized weights"
)
_TYPES = {"float": "float32", "double": "float64"}
_ELEMENTS: dict[str, int] = {
    name: onnx.TensorProto.BFLOAT16 if name == "bfloat16" else onnx.helper.np_dtype_to_tensor_dtype(np.dtype(name))
    for name in DTYPES
}


class SessionRunner(LiveRunner):
    """ONNX file, opened for inference.

    Args:
        path: the file. External weights must be in its folder.
        provider: "cpu" or "cuda".
        device: number of the GPU.
        stream: the CUDA stream to run on (see ``CudaStream``).
        cuda_graph: True to record the run as a CUDA graph. There is one graph for each combination of input shapes, and
            graphs are kept until the runner is closed.
        threads: number of threads of one operator on the CPU. They do not busy-wait between runs. 0 takes onnxruntime's
            default, one thread per core.

    Raises:
        GraphError: onnxruntime refuses the file.
        RuntimeCrash: onnxruntime crashes on the file (`crash_check`).
        RuntimeUnavailable: onnxruntime has no kernel for an operator in the operator's type, or the provider does not
            work here.
        InputError: an input or output of the model is not a tensor of numbers.
    """

    def __init__(
        self, path: PathLike, provider: str, device: int, stream: Any, cuda_graph: bool, threads: int = 0
    ) -> None:
        super().__init__()
        self.name = f"onnxruntime{' CUDA' if provider == 'cuda' else ''} ({os.path.basename(path)})"
        if provider == "cuda":
            require_cuda()
        self._cuda = _open_cuda(device, stream) if provider == "cuda" else None
        self._takes_arrays = self._cuda is None
        self._graphs: dict[tuple[torch.Size, ...], _SessionGraph] | None = {} if cuda_graph else None
        settings = dict[str, str]()
        if self._cuda is not None:
            settings = {
                "device_id": str(device),
                "user_compute_stream": str(self._cuda.handle),
                "enable_cuda_graph": str(int(cuda_graph)),
            }
        # Threads that busy-wait would occupy cores between runs.
        entries = {"session.force_spinning_stop": "1"} if threads else {}
        # `verify` sets the same option for these files, so `verify` and this runner run the same kernels.
        if provider == "cpu" and os.path.isfile(path) and rounds_float_operands(path):
            entries |= FLOAT_OPERANDS
            self.notes = (_FLOATS,)
        self._session = OrtRunner(
            path, name=self.name, provider=provider, entries=entries, settings=settings, threads=threads, spins=True
        ).session
        self.inputs = tuple(self._tensor_spec(value) for value in self._session.get_inputs())
        # A file may list an output twice.
        self.outputs = tuple({value.name: self._tensor_spec(value) for value in self._session.get_outputs()}.values())

    def _tensor_spec(self, value: Any) -> TensorSpec:
        inner = value.type.removeprefix("tensor(").removesuffix(")")
        dtype = _TYPES.get(inner, inner)
        if dtype not in DTYPES:
            raise InputError(
                f"{self.name}: {value.name!r} is {value.type}, but only tensors of {', '.join(DTYPES)} can be passed "
                "or returned"
            )
        return TensorSpec(value.name, dtype, tuple(map(_parse_dim, value.shape)))

    def _run_tensors(self, tensors: Tensors) -> Tensors:
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu" and (self._cuda is None or tensor.device != self._cuda.device):
                if self._cuda is None:
                    own = "the CPU"
                else:
                    own = str(self._cuda.device)
                raise InputError(
                    f"{self.name} runs on {own}, but input {name!r} is on {tensor.device}; move it, or pass another "
                    "provider and device"
                )
        if self._cuda is None:
            return self._run_bound(tensors, "cpu")
        stays = any(tensor.is_cuda for tensor in tensors.values())
        with self._cuda.use_stream():
            graphs = self._graphs
            if graphs is None:
                outputs = self._run_bound(tensors, "cuda" if stays else "cpu")
            else:
                outputs = self._replay_graph(tensors, graphs)
            self._cuda.record_use([*tensors.values(), *outputs.values()])
            if stays:
                return outputs
            return {name: tensor.cpu() for name, tensor in outputs.items()}

    def _run_arrays(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return run_named_feeds(self._session, arrays, self.name)

    def _bind_run(self, tensors: Tensors) -> Callable[[], None]:
        cuda = self._cuda
        if cuda is None:
            where = "cpu"
        else:
            where = "cuda"
        held = {name: tensor.to(cuda.device if cuda else "cpu").contiguous() for name, tensor in tensors.items()}
        binding, options, run = (
            self._make_binding(held, where),
            self._run_options(_NO_GRAPH),
            self._session.run_with_iobinding,
        )

        def run_once() -> None:
            run(binding, options)
            if cuda is not None:
                cuda.synchronize()

        # The binding holds only addresses, so the returned function keeps the tensors alive.
        run_once.held = held  # type: ignore[attr-defined]
        return run_once

    def _run_bound(self, tensors: Tensors, where: str) -> Tensors:
        """Run once; onnxruntime allocates the outputs, which are returned without a copy."""
        held = {name: tensor.contiguous() for name, tensor in tensors.items()}
        binding = self._make_binding(held, where)
        self._run_binding(binding, _NO_GRAPH)
        values = zip(self.outputs, binding.get_outputs(), strict=True)
        return {spec.name: _tensor_from_ort(value, spec) for spec, value in values}

    def _make_binding(self, tensors: Tensors, where: str) -> ort.IOBinding:
        if where == "cpu":
            self._check_capture(tensors)
        binding = self._session.io_binding()
        for spec in self.inputs:
            self._bind_tensor(binding.bind_input, spec, tensors[spec.name])
        for spec in self.outputs:
            binding.bind_output(
                spec.name, where, (self._cuda.device.index or 0) if where == "cuda" and self._cuda else 0
            )
        return binding

    def _check_capture(self, tensors: Tensors) -> None:
        try:
            run_in_trial_process(self._session, {name: as_numpy(tensor.detach()) for name, tensor in tensors.items()})
        except RuntimeCrash as error:
            raise InputError(f"{self.name} does not run the model on these inputs: {error}") from error

    def _replay_graph(self, tensors: Tensors, graphs: dict[tuple[torch.Size, ...], _SessionGraph]) -> Tensors:
        """Run in the fixed buffers of a recorded graph, then copy the outputs to new memory on the GPU."""
        assert self._cuda is not None
        key = tuple(tensor.shape for tensor in tensors.values())
        if key not in graphs:
            sample = {name: tensor.to(self._cuda.device, copy=True).contiguous() for name, tensor in tensors.items()}
            # A run without a graph comes first, to find the shapes of the outputs.
            graphs[key] = _SessionGraph(self, len(graphs), sample, self._run_bound(sample, "cuda"))
        return graphs[key](tensors)

    def _bind_tensor(self, bind: Callable[..., None], spec: TensorSpec, tensor: torch.Tensor) -> None:
        bind(
            spec.name,
            tensor.device.type,
            tensor.device.index or 0,
            _ELEMENTS[spec.dtype],
            list(tensor.shape),
            tensor.data_ptr(),
        )

    def _run_binding(self, binding: ort.IOBinding, graph: str) -> None:
        try:
            self._session.run_with_iobinding(binding, self._run_options(graph))
        except Exception as error:
            raise InputError(
                f"{self.name} does not run the model on these inputs: {shorten_ort_error(error)}"
            ) from error

    def _run_options(self, graph: str) -> ort.RunOptions | None:
        """Return the options of a run. They are None without CUDA graphs, because options make a run 50 µs longer
        (onnxruntime 1.31).
        """
        if self._graphs is None:
            return None
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", graph)
        return options

    def _free_model(self) -> None:
        self._graphs = None
        del self._session


class _SessionGraph:
    """Buffers and binding of one recorded combination of shapes."""

    def __init__(self, runner: SessionRunner, number: int, inputs: Tensors, outputs: Tensors) -> None:
        import torch

        self._runner, self._number = runner, str(number + 1)
        self._inputs, self._outputs = inputs, {name: torch.empty_like(tensor) for name, tensor in outputs.items()}
        self._binding = runner._session.io_binding()
        for spec in runner.inputs:
            runner._bind_tensor(self._binding.bind_input, spec, inputs[spec.name])
        for spec in runner.outputs:
            runner._bind_tensor(self._binding.bind_output, spec, self._outputs[spec.name])

    def __call__(self, tensors: Tensors) -> Tensors:
        for name, tensor in tensors.items():
            self._inputs[name].copy_(tensor, non_blocking=True)
        self._runner._run_binding(self._binding, self._number)
        return {name: tensor.clone() for name, tensor in self._outputs.items()}


def _parse_dim(size: int | str | None) -> int | str | None:
    """Convert a dim of onnxruntime to a `TensorSpec` dim: None if it has neither a size nor a meaningful name."""
    if isinstance(size, str):
        if is_meaningless_dim(size):
            return None
        return size or None
    return size


def _open_cuda(device: int, stream: Any) -> CudaStream:
    from .cuda_stream import CudaStream

    return CudaStream(device, stream)


def _tensor_from_ort(value: ort.OrtValue, spec: TensorSpec) -> torch.Tensor:
    import torch

    # The __dlpack__ of onnxruntime's Python wrapper rejects the arguments that torch passes.
    tensor = torch.from_dlpack(value._ortvalue)
    # onnxruntime exports bool as uint8.
    return tensor.view(torch.bool) if spec.dtype == "bool" else tensor
