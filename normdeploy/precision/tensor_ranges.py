"""Measure the ranges of a model's tensors.

onnxruntime runs the model in float32, several times. Each run returns another chunk of the inner tensors as outputs.

Adding ReduceMin and ReduceMax nodes to the graph would need less memory. But onnxruntime's time to load a graph grows
with the square of the number of these nodes: 31 s for 12,000 nodes.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from ..errors import InputError, NormdeployError
from ..graphs.declared_inputs import declared_inputs
from ..graphs.proto_queries import value_info_type
from ..graphs.shape_inference import infer_types
from ..inputs.shape_advice import advise_on_shape
from ..model import Dim, InputSpec
from ..ort_sessions.session import open_session
from ..storage.image_metadata import image_ranges
from ..storage.npz_files import read_npz
from ..storage.onnx_files import iter_tensors as tensors_of
from ..storage.onnx_files import save_onnx
from ..storage.proto_traversal import copy_model
from ..types import Progress

Samples = Sequence[Mapping[str, np.ndarray]]

# Bytes of inner tensors that one run returns
_AT_ONCE = 1 << 28
# Bytes that are assumed for a tensor of unknown shape
_UNKNOWN = 1 << 22
# If a model's tensors have at most this number of bytes, the model is passed to onnxruntime in memory. A larger model
# is passed as a file.
_IN_MEMORY = 1 << 30
_AFFORDABLE = 8
# Maximum number of elements of generated inputs: 256 MB
_GENERATED = 1 << 26
# Maximum number of elements of a tensor that is computed from generated inputs: 1 GB. The attention of SDXL at 1024²
# has 1.7e8 elements.
_LARGEST = 1 << 28
# Size of an unnamed dynamic dim in generated inputs
_FEW = 2


@dataclass(frozen=True)
class TensorRange:
    """Smallest and largest finite value of a tensor over all samples."""

    low: float
    high: float

    @property
    def magnitude(self) -> float:
        """Return the largest magnitude."""
        return max(abs(self.low), abs(self.high))

    def union(self, other: TensorRange) -> TensorRange:
        """Merge two ranges.

        Returns:
            the smallest range that contains both ranges.
        """
        return TensorRange(min(self.low, other.low), max(self.high, other.high))


def measure_ranges(
    proto: onnx.ModelProto, tensors: Sequence[str], samples: Samples, progress: Progress | None = None
) -> dict[str, TensorRange]:
    """Measure the range of each tensor on ``samples``.

    Args:
        tensors: floating tensors of the main graph.
        samples: each a mapping input name -> array, in the types of the model's inputs.

    Returns:
        tensor -> range. A tensor without a finite number in any sample is missing.

    Raises:
        InputError: the model does not run on a sample.
        NormdeployError: onnxruntime can't load the model.
    """
    measured: dict[str, TensorRange] = {}
    if samples:
        parts = chunk_tensors(proto, tensors, samples)
    else:
        parts = []
    for done, chunk in enumerate(parts):
        if progress is not None:
            progress("calibrate", done, len(parts))
        runner = open_session_with_outputs(proto, chunk)
        for number, sample in enumerate(samples):
            with name_failing_sample(number):
                results = runner.run(chunk, dict(sample))
            for tensor, values in zip(chunk, results, strict=True):
                seen = _finite_range(values)
                if seen is not None:
                    measured[tensor] = measured[tensor].union(seen) if tensor in measured else seen
    return measured


@contextmanager
def name_failing_sample(number: int) -> Iterator[None]:
    """Report the calibration sample on which the model does not run.

    Raises:
        InputError: an exception was raised in the block.
    """
    try:
        yield
    # onnxruntime's exceptions share no base class.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"the model failed to run on calibration sample {number}: {reason}") from error


def input_ranges(samples: Samples) -> dict[str, TensorRange]:
    """Measure the ranges of the floating inputs.

    Returns:
        input -> range. An input without a finite number is missing.
    """
    measured: dict[str, TensorRange] = {}
    for name, values in (pair for sample in samples for pair in sample.items()):
        if values.dtype.kind in "iub":
            seen = None
        else:
            seen = _finite_range(values)
        if seen is not None:
            measured[name] = measured[name].union(seen) if name in measured else seen
    return measured


def _finite_range(values: np.ndarray) -> TensorRange | None:
    values = values.astype(np.float32, copy=False)
    low = values.min(initial=np.inf)
    high = values.max(initial=-np.inf)
    if not (np.isfinite(low) and np.isfinite(high)):
        finite = values[np.isfinite(values)]
        low = finite.min(initial=np.inf)
        high = finite.max(initial=-np.inf)
    if low <= high:
        return TensorRange(float(low), float(high))
    return None


def require_small_run(proto: onnx.ModelProto, tensors: Sequence[str], samples: Samples) -> None:
    """Check that a run on generated samples is small enough, because the user did not ask for this run.

    Raises:
        InputError: a tensor is too large.
    """
    sizes = _tensor_bytes(proto, tensors, samples)
    largest = max(sizes, key=lambda name: sizes[name], default="")
    if sizes.get(largest, 0) > 4 * _LARGEST:
        raise InputError(
            f"{largest!r} has {sizes[largest] // 4} elements; the limit for generated inputs is {_LARGEST}"
        )


def _tensor_bytes(proto: onnx.ModelProto, tensors: Sequence[str], samples: Samples) -> dict[str, int]:
    """Estimate the bytes of each tensor in the largest sample."""
    sizes: dict[str, int] = {}
    for v in proto.graph.input:
        for sample in samples:
            for d, size in zip(value_info_type(v)[1] or (), np.shape(sample.get(v.name, ())), strict=False):
                if isinstance(d, str):
                    sizes[d] = max(sizes.get(d, 0), size)
    shapes = {name: dims for name, (_, dims) in infer_types(proto).items()}
    by_tensor: dict[str, int] = {}
    for tensor in tensors:
        known = shapes.get(tensor)
        dims = [sizes.get(d) if isinstance(d, str) else d for d in ((None,) if known is None else known)]
        by_tensor[tensor] = _UNKNOWN if None in dims else 4 * math.prod(d for d in dims if d is not None)
    return by_tensor


def chunk_tensors(proto: onnx.ModelProto, tensors: Sequence[str], samples: Samples) -> list[list[str]]:
    """Split ``tensors`` into chunks that take about ``_AT_ONCE`` bytes each for the largest sample.

    Returns:
        lists of tensor names.
    """
    parts: list[list[str]] = [[]]
    taken = 0
    for tensor, size in _tensor_bytes(proto, tensors, samples).items():
        if parts[-1] and taken + size > _AT_ONCE:
            parts.append([])
            taken = 0
        parts[-1].append(tensor)
        taken += size
    return parts


def open_session_with_outputs(proto: onnx.ModelProto, tensors: Sequence[str]) -> ort.InferenceSession:
    """Open the model with inner tensors as outputs.

    onnxruntime's optimizer is off, because it would fuse nodes and remove inner tensors.

    Returns:
        the session.

    Raises:
        NormdeployError: onnxruntime can't load the model.
    """
    probed = copy_model(proto)
    ends = {v.name for v in probed.graph.output}
    probed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors if name not in ends)
    try:
        with serialize_for_session(probed) as source:
            return open_session(source)
    except Exception as error:
        raise NormdeployError(
            f"onnxruntime can't load the model for calibration: {' '.join(str(error).split())[:300]}"
        ) from error


@contextmanager
def serialize_for_session(proto: onnx.ModelProto) -> Iterator[str | bytes]:
    """Serialize a model for onnxruntime.

    Yields:
        the bytes. For a large model, the path of a temporary file that is deleted afterwards.
    """
    if sum(t.ByteSize() for t in tensors_of(proto)) < _IN_MEMORY:
        yield proto.SerializeToString()
        return
    with tempfile.TemporaryDirectory() as folder:
        save_onnx(proto, Path(folder) / "model.onnx", external=True)
        yield str(Path(folder) / "model.onnx")


# ------------------------------------------------------------------ sources of samples


def load_samples(files: Sequence[str | os.PathLike[str]]) -> list[dict[str, np.ndarray]]:
    """Load the arrays of each .npz file. Pickled objects are refused, so no code of a file is executed.

    Returns:
        for each file, input name -> array.

    Raises:
        InputError: a file is not an .npz file, or contains objects that are not arrays.
    """
    return [read_npz(file) for file in files]


def fit_samples_to_model(samples: Samples, proto: onnx.ModelProto) -> list[dict[str, np.ndarray]]:
    """Cast ``samples`` to the types of the model's inputs, including half precision and float64.

    Returns:
        for each sample, input name -> array.

    Raises:
        InputError: a name is missing or unknown, an array has integers instead of floats or vice versa, or an input of
            the model is not a tensor.
    """
    initializers = {t.name for t in proto.graph.initializer}
    if other := next((v.name for v in proto.graph.input if not v.type.tensor_type.elem_type), None):
        raise InputError(
            f"input {other!r} is a sequence, an optional or has no type, so it can't be calibrated; make it a tensor"
        )
    wanted = {v.name: onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for v in proto.graph.input}
    declared = {stated.name: stated.dims for stated in declared_inputs(proto.graph)}
    optional = initializers & set(wanted)
    cast = []
    for number, sample in enumerate(samples):
        missing = sorted(set(wanted) - optional - set(sample))
        unknown = sorted(set(sample) - set(wanted))
        if missing or unknown:
            if missing:
                complaint = f"lacks {missing}"
            else:
                complaint = f"has {unknown}, which are not inputs of the model"
            raise InputError(f"calibration sample {number} {complaint}; expected inputs: {sorted(wanted)}")
        for name, array in sample.items():
            if (array.dtype.kind in "iub") != (wanted[name].kind in "iub"):
                raise InputError(
                    f"calibration sample {number}: input {name!r} is {array.dtype}, but the model expects "
                    f"{wanted[name]}; convert it"
                )
            _require_fitting_shape(number, name, array.shape, declared.get(name))
        cast.append({name: np.asarray(array).astype(wanted[name]) for name, array in sample.items()})
    return cast


def _require_fitting_shape(
    number: int, name: str, given: tuple[int, ...], dims: Sequence[int | str | None] | None
) -> None:
    if dims is None:
        return
    if len(given) == len(dims) and all(
        not isinstance(d, int) or d == size for d, size in zip(dims, given, strict=True)
    ):
        return
    expected = ", ".join("?" if d is None else str(d) for d in dims)
    sizes = [d if isinstance(d, int) else None for d in dims]
    raise InputError(
        f"calibration sample {number}: input {name!r} has shape [{expected}], but got {list(given)};"
        f" {advise_on_shape(name, sizes, given)}"
    )


def generate_samples(specs: Sequence[InputSpec]) -> list[dict[str, np.ndarray]]:
    """Generate random samples: two at the usual sizes, one at the smallest sizes, and one at the largest sizes.

    The sample at the largest sizes is omitted if it has more than `_GENERATED` elements, or more than 8 times the
    elements of a usual sample.

    Returns:
        for each sample, input name -> array.

    Raises:
        InputError: the inputs are too large to be generated without a request by the user.
    """
    if (usual := _element_count(specs, {})) > _GENERATED:
        raise InputError(f"the inputs have {usual} elements; the limit for generated inputs is {_GENERATED}")
    dims = {d.name: d for spec in specs for d in spec.shape if d.name is not None}
    sizes: list[dict[str, int]] = [{}, {}, {name: d.min for name, d in dims.items()}]
    every = {name: d.max for name, d in dims.items()}
    if dims and _element_count(specs, every) <= min(_AFFORDABLE * usual, _GENERATED):
        sizes.append(every)
    return [
        {spec.name: spec.sample(np.random.default_rng([seed, i]), size) for i, spec in enumerate(specs)}
        for seed, size in enumerate(sizes)
    ]


def _element_count(specs: Sequence[InputSpec], sizes: Mapping[str, int]) -> int:
    return sum(math.prod(spec.concrete_shape(sizes)) for spec in specs)


def calibration_input_specs(proto: onnx.ModelProto) -> list[InputSpec]:
    """Build input specs from a file's declarations.

    Dynamic dims get size 2, and integers get the values 0 and 1, because the file states no sizes and ranges. Images
    have the range of their pixels.

    Returns:
        a spec for each input that has a dtype.
    """
    ranges = image_ranges(proto)
    return [
        InputSpec(
            stated.name,
            stated.dtype,
            tuple(Dim.from_size(d) if isinstance(d, int) else Dim(d, _FEW, _FEW, _FEW) for d in stated.dims or ()),
            ranges.get(stated.name),
        )
        for stated in declared_inputs(proto.graph)
        if stated.dtype
    ]
