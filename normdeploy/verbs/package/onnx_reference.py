"""The reference where there is no PyTorch model: onnxruntime with its optimizer off, and how far its outputs move when
the inputs are off by one rounding."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import onnx

from ...compare.perturbation import perturb_array
from ...dtypes import unit_roundoff
from ...errors import InputError, RuntimeUnavailable
from ...precision.emulated_half import emulate_half
from ...precision.half_conversion import recorded_precision
from ...precision.type_conversion import initializer_values
from ...runtimes import HeldRunner, Runner, RunResult
from ...runtimes.onnx_float64 import is_floating
from ...runtimes.ort_runner import OrtRunner
from ...storage.onnx_files import load_onnx
from ...storage.proto_traversal import copy_model
from ...types import Array, Arrays

# bytes; the copy of a larger file with other weights would take too much memory
_WEIGHTS = 2**30
_DISTURBANCES = 3


class _StepwiseRunner(HeldRunner):
    """A file in half precision where the CPU lacks kernels (``normdeploy.precision.emulated_half``), with the file's
    own types outside."""

    name = "each node in float32, rounded"

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._types = {
            v.name: onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for v in proto.graph.output
        }
        self._runner = OrtRunner(emulate_half(proto), optimize=False)

    def infer(self, feeds: Arrays) -> RunResult:
        wide = {
            n: a.astype(np.float32) if is_floating(a.dtype) and a.dtype.itemsize == 2 else a for n, a in feeds.items()
        }
        return {name: value.astype(self._types[name]) for name, value in self._runner.infer(wide).items()}

    def _free_model(self) -> None:
        self._runner.__exit__(None, None, None)


def reference_runner(path: Path, proto: onnx.ModelProto) -> Runner:
    """onnxruntime with its optimizer off, ``proto`` being the file at ``path`` without its weights."""
    try:
        return OrtRunner(path, optimize=False)
    except RuntimeUnavailable:
        if recorded_precision(proto):
            return _StepwiseRunner(load_onnx(path))
        raise


def open_perturbed_runners(path: Path, proto: onnx.ModelProto, stack: ExitStack) -> tuple[float, list[Runner]]:
    """The unit of the coarsest floating type, and runners of the file with weights that are off by up to it."""
    whole = load_onnx(path)
    kinds = [t.data_type for t in whole.graph.initializer]
    kinds += [v.type.tensor_type.elem_type for v in (*proto.graph.input, *proto.graph.output)]
    types = [np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind)) for kind in set(kinds)]
    unit = max((unit_roundoff(t) for t in types if is_floating(t)), default=0.0)
    if whole.ByteSize() > _WEIGHTS:
        raise InputError(
            f"{path.name} is too large to tell from it alone how far a correct runtime may be off; give its PyTorch"
            " model with --source"
        )
    runners: list[Runner] = []
    for seed in range(_DISTURBANCES):
        other = copy_model(whole)
        rng = np.random.default_rng(seed)
        for tensor in other.graph.initializer:
            if len(tensor.dims) > 1 and is_floating(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))):
                tensor.CopyFrom(
                    onnx.numpy_helper.from_array(perturb_array(initializer_values(tensor), unit, rng), tensor.name)
                )
        try:
            runners.append(stack.enter_context(OrtRunner(other, optimize=False)))
        except RuntimeUnavailable:
            runners.append(stack.enter_context(_StepwiseRunner(other)))
    return unit, runners


def perturb_feeds(feeds: Arrays, unit: float, seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        name: perturb_array(value, unit, rng) if is_floating(value.dtype) else value for name, value in feeds.items()
    }
