"""Run TensorRT and TensorRT-RTX engines directly on the memory of the caller's arrays."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError, NormdeployError, RuntimeUnavailable
from ..model import TensorSpec
from ..types import PathLike, Tensors
from .aligned_memory import allocate_tensor, make_bindable, make_output_allocator
from .cuda_stream import CudaStream
from .engine_loading import load_engine, make_engine_loader, make_error_log, set_weight_budget
from .live_runner import LiveRunner
from .runtime_cache import RuntimeCache, Wanted
from .tensor_spec import select_profile
from .trt_runner import PACKAGES, TITLES, describe_missing_runtime, read_runtime

_TYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
    "UINT8": "uint8",
}


class EngineRunner(LiveRunner):
    """Engine file, opened for inference.

    Args:
        path: the engine file. Its first bytes identify the runtime that it is for.
        device: number of the GPU.
        stream: the CUDA stream to run on (see ``CudaStream``).
        profile: the optimization profile; None selects, at each call, the first profile that admits the shapes.
        cuda_graph: True to replay a recorded CUDA graph. For TensorRT, the graph is recorded again when shapes or
            profile change. TensorRT-RTX manages its graphs itself.
        runtime_cache: the file of TensorRT-RTX's compiled kernels (see ``RuntimeCache``).
        weight_budget: bytes of streamable weights that stay on the GPU; None keeps all of them there.

    Raises:
        RuntimeUnavailable: the package, the GPU or a CUDA library is missing.
        InputError: the file is not an engine, has no such profile, or has an input or output of a dtype that arrays
            can't hold.
        NormdeployError: the engine was not built for this GPU and this version.
    """

    def __init__(
        self,
        path: PathLike,
        device: int,
        stream: Any,
        profile: int | None,
        cuda_graph: bool,
        runtime_cache: Wanted = None,
        weight_budget: int | None = None,
    ) -> None:
        super().__init__()
        self.runtime = read_runtime(Path(path))
        self._cache = RuntimeCache(path, self.runtime, runtime_cache)
        self.name = f"{TITLES[self.runtime]} ({os.path.basename(path)})"
        if reason := describe_missing_runtime(self.runtime):
            raise RuntimeUnavailable(f"{self.name}: {reason}")
        self._library = importlib.import_module(PACKAGES[self.runtime])
        self._cuda = CudaStream(device, stream)
        self._log = make_error_log(self._library)
        with self._cuda.use_stream():
            self._loader = make_engine_loader(self._library, self._log)
            self._engine, self.notes = load_engine(
                self._library, self._loader, self._log, Path(path), TITLES[self.runtime]
            )
            count = self._engine.num_optimization_profiles
            if profile is not None and not 0 <= profile < count:
                raise InputError(f"{self.name} has no profile {profile}; its profiles are 0 to {count - 1}")
            self._named = profile
            if weight_budget is not None:
                set_weight_budget(self._engine, weight_budget, self.name)
            self._read_io_specs()
            self._context = self._make_context(cuda_graph)
        if self._context is None:
            raise NormdeployError(f"{self.name} can't be initialized: {self._log.take_errors()}")
        self._graph: tuple[object, _EngineGraph] | None = None
        self._records = cuda_graph and self.runtime == "tensorrt"

    def _read_io_specs(self) -> None:
        engine = self._engine
        mode = self._library.TensorIOMode
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self.inputs = tuple(self._tensor_spec(n, True) for n in names if engine.get_tensor_mode(n) == mode.INPUT)
        self.outputs = tuple(self._tensor_spec(n, False) for n in names if engine.get_tensor_mode(n) == mode.OUTPUT)
        self._host = {n for n in names if engine.get_tensor_location(n) == self._library.TensorLocation.HOST}

    def _tensor_spec(self, name: str, ranged: bool) -> TensorSpec:
        engine = self._engine
        dtype = _TYPES.get(engine.get_tensor_dtype(name).name)
        if dtype is None:
            raise InputError(
                f"{self.name}: {name!r} is {engine.get_tensor_dtype(name).name}, which numpy and torch arrays can't"
                " hold"
            )
        shape = tuple(None if n < 0 else int(n) for n in engine.get_tensor_shape(name))
        profiles = ()
        if ranged and None in shape:
            every = (engine.get_tensor_profile_shape(name, p) for p in range(engine.num_optimization_profiles))
            profiles = tuple(tuple(tuple(int(n) for n in s) for s in shapes) for shapes in every)  # type: ignore[assignment]
        return TensorSpec(name, dtype, shape, profiles)

    def _make_context(self, cuda_graph: bool) -> Any:
        if self.runtime != "tensorrt-rtx":
            return self._engine.create_execution_context()
        config = self._engine.create_runtime_config()
        if cuda_graph:
            config.cuda_graph_strategy = self._library.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        if warning := self._cache.attach(config):
            self.notes = (*self.notes, warning)
        return self._engine.create_execution_context(config)

    def _run_tensors(self, tensors: Tensors) -> Tensors:
        device = self._cuda.device
        profile = select_profile(self.name, tensors, self.inputs, self._engine.num_optimization_profiles, self._named)
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu" and tensor.device != device:
                raise InputError(
                    f"{self.name} runs on {device}, but input {name!r} is on {tensor.device}; move it, or pass another "
                    "device"
                )
        stays = any(tensor.device == device for tensor in tensors.values())
        with self._cuda.use_stream():
            if self._records:
                outputs = self._run_graph(profile, tensors)
            else:
                outputs = self._run_directly(profile, tensors)
            self._cuda.record_use([*tensors.values(), *outputs.values()])
            if stays and not self._host:
                return outputs
            if stays:
                results = outputs
            else:
                results = {name: tensor.to("cpu") for name, tensor in outputs.items()}
            # The host memory must not be freed before the work is done.
            self._cuda.synchronize()
            return results

    def _bind_run(self, tensors: Tensors) -> Callable[[], None]:
        profile = select_profile(self.name, tensors, self.inputs, self._engine.num_optimization_profiles, self._named)
        with self._cuda.use_stream():
            bindable = self._make_bindable(tensors)
            outputs = self._bind_tensors(profile, bindable)

        def run_once() -> None:
            self._enqueue_run()
            self._cuda.synchronize()

        # TensorRT's context holds only addresses, so the returned function keeps the tensors alive.
        run_once.held = bindable, outputs  # type: ignore[attr-defined]
        return run_once

    def _run_directly(self, profile: int, tensors: Tensors) -> Tensors:
        held = self._make_bindable(tensors)
        outputs = self._bind_tensors(profile, held)
        self._enqueue_run()
        self._cuda.record_use(held.values())
        return outputs()

    def _make_bindable(self, tensors: Tensors) -> Tensors:
        return {n: make_bindable(t, self._device_of(n)) for n, t in tensors.items()}

    def _device_of(self, name: str) -> torch.device:
        if name in self._host:
            return torch.device("cpu")
        return self._cuda.device

    def _run_graph(self, profile: int, tensors: Tensors) -> Tensors:
        key = (profile, tuple(tensor.shape for tensor in tensors.values()))
        if self._graph is None or self._graph[0] != key:
            self._graph = None
            self._graph = key, _EngineGraph(self, profile, tensors)
        return self._graph[1](tensors)

    def _bind_tensors(self, profile: int, tensors: Tensors) -> Callable[[], Tensors]:
        """Bind the profile, then the shapes, then the addresses. Shapes depend on the profile, and addresses on the
        shapes.

        Returns:
            A function that returns the outputs after the run, because some output shapes are known only then.
        """
        context = self._context
        if context.active_optimization_profile != profile:
            self._require_success(
                context.set_optimization_profile_async(profile, self._cuda.handle), f"profile {profile}"
            )
        for name, tensor in tensors.items():
            self._require_success(
                context.set_input_shape(name, tuple(tensor.shape)), f"input {name!r} of shape {list(tensor.shape)}"
            )
            self._require_success(
                context.set_tensor_address(name, _data_address(tensor)), f"the memory of input {name!r}"
            )
        try:
            unknown = context.infer_shapes()
        except RuntimeError as error:
            raise InputError(f"{self.name} does not accept these shapes: {self._log.take_errors() or error}") from error
        if unknown:
            raise InputError(
                f"{self.name} can't infer the shapes of {unknown} from its inputs: {self._log.take_errors()}"
            )
        fixed: Tensors = {}
        allocators: dict[str, Any] = {}
        for spec in self.outputs:
            shape = tuple(context.get_tensor_shape(spec.name))
            dtype = getattr(torch, spec.dtype)
            where = self._device_of(spec.name)
            if any(n < 0 for n in shape):
                allocators[spec.name] = make_output_allocator(self._library, where, dtype)
                self._require_success(
                    context.set_output_allocator(spec.name, allocators[spec.name]),
                    f"the allocator of output {spec.name!r}",
                )
            else:
                fixed[spec.name], address = allocate_tensor(shape, dtype, where)
                self._require_success(
                    context.set_tensor_address(spec.name, address), f"the memory of output {spec.name!r}"
                )

        def output_tensors() -> dict[str, torch.Tensor]:
            tensors = {}
            for spec in self.outputs:
                if spec.name in fixed:
                    tensors[spec.name] = fixed[spec.name]
                else:
                    tensors[spec.name] = allocators[spec.name].output_tensor()
            return tensors

        return output_tensors

    def _enqueue_run(self) -> None:
        if not self._context.execute_async_v3(self._cuda.handle):
            raise InputError(f"{self.name} does not run on these inputs: {self._log.take_errors()}")

    def _require_success(self, done: bool, what: str) -> None:
        if not done:
            raise InputError(f"{self.name} does not accept {what}: {self._log.take_errors()}")

    def _free_model(self) -> None:
        self._cuda.synchronize()
        self._graph = None
        try:
            self._cache.save()
        finally:
            # Free in this order: the context needs the engine, and the engine needs the loader.
            del self._context, self._engine, self._loader


class _EngineGraph:
    """CUDA graph of one run of a TensorRT engine, for one profile and one set of shapes, with its own buffers."""

    def __init__(self, runner: EngineRunner, profile: int, tensors: Tensors) -> None:
        device = runner._cuda.device
        if runner._host:
            raise InputError(
                f"{runner.name}: {sorted(runner._host)} are on the CPU, which a CUDA graph can't read; open it "
                "without cuda_graph"
            )
        self._inputs = {n: allocate_tensor(t.shape, t.dtype, device)[0].copy_(t) for n, t in tensors.items()}
        collect = runner._bind_tensors(profile, self._inputs)
        # After a change of shapes, the first run does additional work, which the graph must not record.
        runner._enqueue_run()
        runner._cuda.synchronize()
        self._outputs = collect()
        if dynamic := [s.name for s in runner.outputs if -1 in tuple(runner._context.get_tensor_shape(s.name))]:
            raise InputError(
                f"{runner.name}: the shapes of {dynamic} depend on values, but a CUDA graph has fixed shapes; open "
                "it without cuda_graph"
            )
        self._replay = runner._cuda.capture_graph(runner._enqueue_run)

    def __call__(self, tensors: Tensors) -> Tensors:
        for name, tensor in tensors.items():
            self._inputs[name].copy_(tensor, non_blocking=True)
        self._replay()
        return {name: tensor.clone() for name, tensor in self._outputs.items()}


def _data_address(tensor: torch.Tensor) -> int:
    # An empty tensor's memory is never read, but its address must not be null.
    return tensor.data_ptr() or allocate_tensor((0,), tensor.dtype, tensor.device)[1]
