"""Find a file that expects preprocessed inputs: channels last, blue before red, 0 to 255, or normalized.

A few common transforms are tried on an input of rank 4. If the file gives the model's outputs for a transformed input,
the file is right but expects this preprocessing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from ...compare.element_errors import difference_from_float64, largest_finite
from ...errors import NormdeployError
from ...runtimes import Runner
from ...runtimes.onnx_float64 import OnnxFloat64Runner
from ...runtimes.ort_runner import OrtRunner
from ...types import Array, Arrays
from ..verify.output_results import OutputResult
from ..verify.reference_models import FloatReference, Original

# Rank of a batch of images.
_IMAGE = 4
_CHANNELS = (1, 3, 4)
# Mean and standard deviation of ImageNet, as in torchvision.
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_DRAWS = 3
# Scales of the random inputs that confirm a transform. Random inputs are needed because many transforms give the same
# result for a constant input, or for an input whose effect a norm removes. Small inputs are needed because a large
# input, such as one in the range 0 to 255, hides a wrong epsilon.
_CONFIRMED = (1.0, 1.0, 0.01)
# Maximum error of a candidate, relative to the output's largest element. A wrong transform changes the output more.
_NEAR = 1e-2
# Bound of the rounding errors of a transform, relative to |x| + 1: a transform rounds three times.
_UNITS = 12 * 2.0**-24


@dataclass(frozen=True)
class InputTransform:
    """Transform of an input.

    Attributes:
        text: formula of the transform of x in numpy's notation; "" for the identity.
    """

    text: str
    apply: Callable[[Array], Array]


@dataclass(frozen=True, kw_only=True)
class FoundPreprocessing:
    """Preprocessing that the file expects for ``tensor``.

    Attributes:
        text: sentence that describes the preprocessing.
        error: error of the output with the preprocessing.
        allowed: allowed error of the output.
    """

    tensor: str
    text: str
    error: float
    allowed: float


def find_preprocessing(
    model: Original, proto: onnx.ModelProto, result: OutputResult, feeds: Arrays
) -> FoundPreprocessing | None:
    """Find the transform of an input that makes a file's output equal the model's.

    Args:
        proto: the file, with the model's names of inputs and outputs.
        result: the failed comparison of an output.

    Returns:
        The preprocessing; None if the file is wrong with every transform.
    """
    images = [name for name, x in feeds.items() if x.ndim == _IMAGE and x.dtype.kind == "f"]
    if not images:
        return None
    reference = FloatReference(model).float64_runner.infer(feeds)[result.output]
    scale = float(np.abs(reference[np.isfinite(reference)]).max(initial=0))
    types = {v.name: onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for v in proto.graph.input}
    own = {name: value.astype(types.get(name, value.dtype)) for name, value in feeds.items()}
    with OnnxFloat64Runner(proto) as exact:
        plain = _output_error(exact, own, result.output, reference)
    if plain is not None and plain <= _NEAR * scale:
        # Without a transform, the file is already right up to rounding. A transform of the input's range could only
        # hide the rounding.
        return None
    with OrtRunner(proto, optimize=False) as runner:
        for name in images:
            allowed: float | None = None
            for transform in _iter_transforms(own[name]):
                error = _output_error(runner, {**own, name: transform.apply(own[name])}, result.output, reference)
                # Transforms with large errors are dropped first, because the exact allowed error needs runs of the
                # model.
                if error is None or error > _NEAR * scale:
                    continue
                if allowed is None:
                    allowed = _allowed_error(model, feeds, name, result, reference)
                if error <= allowed and _is_confirmed(model, runner, transform, own, name, result.output):
                    if "mean" in transform.text:
                        more = " (mean and std of ImageNet)"
                    else:
                        more = ""
                    text = f"the file expects {transform.text}{more}, but the model expects x, its input {name!r}"
                    return FoundPreprocessing(tensor=name, text=text, error=error, allowed=allowed)
    return None


def _is_confirmed(
    model: Original, runner: OrtRunner, transform: InputTransform, feeds: Arrays, name: str, output: str
) -> bool:
    """Check that a transform also makes the file right on other inputs, on which the file is wrong without it."""
    for seed, size in enumerate(_CONFIRMED):
        x = feeds[name]
        moved = (size * (x + np.random.default_rng(seed).uniform(-0.5, 0.5, x.shape))).astype(x.dtype)
        reference = FloatReference(model).float64_runner.infer({**feeds, name: moved})[output]
        scale = largest_finite(reference)
        right = _output_error(runner, {**feeds, name: transform.apply(moved)}, output, reference)
        plain = _output_error(runner, {**feeds, name: moved}, output, reference)
        if right is None or right > _NEAR * scale or (plain is not None and plain <= 2 * right):
            return False
    return True


def _output_error(runner: Runner, feeds: Arrays, output: str, reference: Array) -> float | None:
    """Return the largest error of the output; None if the file does not run or the shapes differ."""
    try:
        got = runner.infer(feeds)[output]
    except NormdeployError:
        return None
    if got.shape != reference.shape:
        return None
    found = difference_from_float64(got, reference)
    if found.reason:
        return None
    return found.error


def _allowed_error(model: Original, feeds: Arrays, name: str, result: OutputResult, reference: Array) -> float:
    """Return the allowed error of the output, plus the effect of rounding the transformed input."""
    moved = 0.0
    runner = FloatReference(model).float64_runner
    for seed in range(_DRAWS):
        x = feeds[name].astype(np.float64)
        off = _UNITS * np.random.default_rng(seed).uniform(-1, 1, x.shape) * (np.abs(x) + 1)
        shifted = (x + off).astype(feeds[name].dtype)
        moved = max(
            moved, difference_from_float64(runner.infer({**feeds, name: shifted})[result.output], reference).error
        )
    if np.isfinite(result.allowed):
        own = result.allowed
    else:
        own = 0.0
    return own + moved


def _iter_transforms(x: Array) -> Iterator[InputTransform]:
    """Yield changes of the layout, of the order of channels and of the range, and their combinations, simplest
    first.
    """
    if x.shape[1] in _CHANNELS:
        channel = 1
    else:
        channel = 3
    layouts = [InputTransform("", lambda v: v)]
    layouts.append(_layout_transform((0, 2, 3, 1)) if channel == 1 else _layout_transform((0, 3, 1, 2)))
    orders = [InputTransform("", lambda v: v)]
    if x.shape[channel] == 3:
        if channel == 1:
            text = "{}[:, ::-1]"
        else:
            text = "{}[..., ::-1]"
        orders.append(InputTransform(text, lambda v: np.flip(v, channel)))
    ranges = [InputTransform("", lambda v: v), *_iter_range_transforms(channel, x.shape[channel])]
    every = [c for c in itertools.product(ranges, orders, layouts) if any(t.text for t in c)]
    for parts in sorted(every, key=lambda chosen: sum(bool(t.text) for t in chosen)):
        yield _combine_transforms(parts)


def _layout_transform(order: Sequence[int]) -> InputTransform:
    return InputTransform(f"{{}}.transpose({', '.join(map(str, order))})", lambda v: v.transpose(order))


def _iter_range_transforms(channel: int, channels: int) -> Iterator[InputTransform]:
    """Yield transforms between the ranges 0 to 1, 0 to 255, −1 to 1, and ImageNet's mean and standard deviation."""
    yield InputTransform("255 * {}", lambda v: 255 * v)
    yield InputTransform("{} / 255", lambda v: v / 255)
    yield InputTransform("(2 * {} - 1)", lambda v: 2 * v - 1)
    yield InputTransform("({} + 1) / 2", lambda v: (v + 1) / 2)
    if channels == 3:
        shape = [3 if axis == channel else 1 for axis in range(_IMAGE)]
        mean, deviation = np.reshape(_MEAN, shape), np.reshape(_DEVIATION, shape)
        yield InputTransform("({} - mean) / std", lambda v: (v - mean) / deviation)
        yield InputTransform("({} * std + mean)", lambda v: v * deviation + mean)
        yield InputTransform("255 * ({} * std + mean)", lambda v: 255 * (v * deviation + mean))
        yield InputTransform("({} / 255 - mean) / std", lambda v: (v / 255 - mean) / deviation)


def _combine_transforms(parts: Sequence[InputTransform]) -> InputTransform:
    text = "x"
    for part in parts:
        if part.text:
            text = part.text.format(text)

    def apply_parts(x: Array) -> Array:
        """Apply the transforms in order, in float64.

        Returns:
            The result in the dtype of ``x``.
        """
        value = x.astype(np.float64)
        for part in parts:
            value = part.apply(value)
        return np.ascontiguousarray(value.astype(x.dtype))

    return InputTransform(text, apply_parts)
