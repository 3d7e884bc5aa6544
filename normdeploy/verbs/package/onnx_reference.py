"""Compute the reference outputs of an ONNX file without its PyTorch model.

The reference is onnxruntime with its optimizer off. The scale of its error is estimated from perturbed runs: how much
the outputs change when inputs and weights change by one rounding.
"""

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

# Maximum bytes of a file (1 GiB). Copies of a larger file with perturbed weights would take too much memory.
_WEIGHTS = 2**30
_DISTURBANCES = 3


class _StepwiseRunner(HeldRunner):
    """Emulate a half-precision file that onnxruntime has no CPU kernels for (``normdeploy.precision.emulated_half``).

    Inputs and outputs have the types of the file.
    """

    name = "each node in float32, rounded"

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._types = {
            v.name: onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for v in proto.graph.output
        }
        self._runner = OrtRunner(emulate_half(proto), optimize=False)

    def infer(self, feeds: Arrays) -> RunResult:
        """Run the emulated model on inputs in half precision.

        Returns:
            Output name -> array, in the file's own types.
        """
        wide = {
            n: a.astype(np.float32) if is_floating(a.dtype) and a.dtype.itemsize == 2 else a for n, a in feeds.items()
        }
        return {name: value.astype(self._types[name]) for name, value in self._runner.infer(wide).items()}

    def _free_model(self) -> None:
        self._runner.__exit__(None, None, None)


def reference_runner(path: Path, proto: onnx.ModelProto) -> Runner:
    """Open the ONNX file in onnxruntime with its optimizer off.

    Args:
        proto: the file at ``path`` without its weights.

    Returns:
        A runner of the file. If onnxruntime has no CPU kernels for a half-precision file, the runner emulates the file.
    """
    try:
        return OrtRunner(path, optimize=False)
    except RuntimeUnavailable:
        if recorded_precision(proto):
            return _StepwiseRunner(load_onnx(path))
        raise


def open_perturbed_runners(path: Path, proto: onnx.ModelProto, stack: ExitStack) -> tuple[float, list[Runner]]:
    """Open runners of copies of the file with perturbed weights.

    Each weight changes by up to one unit roundoff of the coarsest floating type in the file.

    Args:
        proto: the file at ``path`` without its weights.
        stack: exit stack that closes the runners.

    Returns:
        The unit roundoff of the coarsest floating type, and the runners.

    Raises:
        InputError: the file is too large for copies in memory.
    """
    whole = load_onnx(path)
    kinds = [t.data_type for t in whole.graph.initializer]
    kinds += [v.type.tensor_type.elem_type for v in (*proto.graph.input, *proto.graph.output)]
    types = [np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind)) for kind in set(kinds)]
    unit = max((unit_roundoff(t) for t in types if is_floating(t)), default=0.0)
    if whole.ByteSize() > _WEIGHTS:
        raise InputError(
            f"{path.name} is too large to derive the allowed error from the file only; pass its PyTorch model"
            " with --source"
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
    """Perturb floating inputs by up to ``unit``, relative to each element.

    Returns:
        Input name -> array.
    """
    rng = np.random.default_rng(seed)
    return {
        name: perturb_array(value, unit, rng) if is_floating(value.dtype) else value for name, value in feeds.items()
    }
