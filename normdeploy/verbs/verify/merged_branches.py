"""Merge the convolutions of a model's parallel branches, for `weight_audit` to compare a merged weight with.

Each result of the program is expressed, if possible, as a convolution of an earlier tensor x: W·x + c. W and c are
composed along convolutions, batch norms in eval mode, sums and differences, and products with one parameter per
channel. Values are float64. For each value, the sum of the magnitudes of its terms is computed too, because rounding
errors are relative to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...loading.train_mode_checks import bind_node_arguments, operator_name
from ...model import LoadedModel
from ...types import Array, Arrays


@dataclass(frozen=True)
class _LinearMap:
    """Linear map W·x + c of the tensor ``x``, with the sums of the magnitudes of its terms.

    Attributes:
        x: name of the input tensor.
        w: kernel with its center in the middle, or a scale for each channel; None for ``x`` itself.
        size_w: magnitudes of ``w``.
        size_c: magnitudes of ``c``.
        groups: groups of the convolution; 0 for a scale.
        settings: stride and dilation.
        names: weights in the map.
    """

    x: str
    w: Array | None
    c: Array
    size_w: Array | None
    size_c: Array
    groups: int
    settings: tuple[Any, ...]
    names: tuple[str, ...]

    def scale_and_shift(self, a: Array, b: Array, size_b: Array) -> _LinearMap:
        """Compose the map with y -> a·y + b for each channel. ``size_b`` has the magnitudes of the terms of ``b``."""
        if self.w is None or self.size_w is None:
            w: Array = np.asarray(a)
            return _LinearMap(self.x, w, a * self.c + b, np.abs(w), np.abs(a) * self.size_c + size_b, 0, (), self.names)
        shape = (-1, *[1] * (self.w.ndim - 1))
        at = a.reshape(shape)
        c = a * self.c + b
        size = np.abs(a) * self.size_c + size_b
        return _LinearMap(
            self.x, self.w * at, c, self.size_w * np.abs(at), size, self.groups, self.settings, self.names
        )


def iter_merged_tensors(model: LoadedModel, stored: Arrays) -> Iterator[tuple[str, Array, Array]]:
    """Compute the merged weight and bias of each sum of branches.

    Args:
        stored: the model's tensors by name.

    Yields:
        (description of the branches, values, magnitudes), float64.
    """
    signature = model.program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    known: dict[str, _LinearMap] = {}

    def stored_tensor(value: Any) -> Array | None:
        array = stored.get(names.get(getattr(value, "name", ""), ""))
        if array is None:
            return None
        return array.astype(np.float64)

    def linear_map_of(value: Any) -> _LinearMap:
        name = str(getattr(value, "name", ""))
        return known.get(name) or _LinearMap(name, None, np.zeros(1), None, np.zeros(1), 0, (), ())

    for node in model.program.graph.nodes:
        if node.op != "call_function":
            continue
        # An in-place operator (x += y) ends in an underscore.
        op, given = operator_name(node).rstrip("_"), bind_node_arguments(node)
        made: _LinearMap | None = None
        if op in ("conv1d", "conv2d", "conv3d"):
            made = _linear_of_convolution(str(given["input"]), given, stored_tensor, names)
        elif "batch_norm" in op and not given.get("training"):
            made = _linear_of_batch_norm(linear_map_of(given.get("input")), given, stored_tensor)
        elif op in ("add", "sub") and given.get("alpha", 1) == 1 and hasattr(given.get("other"), "name"):
            made = _add_linear(linear_map_of(given["self"]), linear_map_of(given["other"]), 1 if op == "add" else -1)
            yield from _iter_merged(made)
        elif op in ("add", "sub") and given.get("other") == 0:
            # Python's sum() starts with 0, so 0 + x is treated as x.
            made = linear_map_of(given["self"])
        elif op == "mul":
            made = _multiply_linear(
                linear_map_of(given["self"]), stored_tensor(given.get("other"))
            ) or _multiply_linear(linear_map_of(given.get("other")), stored_tensor(given["self"]))
            yield from _iter_merged(made)
        if made is not None:
            known[node.name] = made


def _iter_merged(made: _LinearMap | None) -> Iterator[tuple[str, Array, Array]]:
    """Yield the weight and the bias of merged branches."""
    if made is not None and made.w is not None and made.size_w is not None and made.w.ndim > 2:
        source = f"the branches {', '.join(made.names)}"
        yield source, made.w, made.size_w
        yield source, made.c, made.size_c


def _linear_of_convolution(
    x: str, given: Mapping[str, Any], tensor: Any, names: Mapping[str, str]
) -> _LinearMap | None:
    w = tensor(given["weight"])
    bias = tensor(given.get("bias"))
    if w is None:
        return None
    if bias is None:
        c = np.zeros(w.shape[0])
    else:
        c = bias
    settings = (tuple(given["stride"]), tuple(given["dilation"]) if max(w.shape[2:]) > 1 else ())
    name = names.get(getattr(given["weight"], "name", ""), "")
    return _LinearMap(x, w, c, np.abs(w), np.abs(c), int(given.get("groups", 1)), settings, (name,))


def _linear_of_batch_norm(z: _LinearMap, given: Mapping[str, Any], tensor: Any) -> _LinearMap | None:
    mean = tensor(given.get("running_mean"))
    variance = tensor(given.get("running_var"))
    if mean is None or variance is None or "eps" not in given:
        return None
    gamma = tensor(given.get("weight"))
    beta = tensor(given.get("bias"))
    a = (np.ones(mean.shape) if gamma is None else gamma) / np.sqrt(variance + float(given["eps"]))
    if beta is None:
        beta = np.zeros(mean.shape)
    return z.scale_and_shift(a, beta - mean * a, np.abs(beta) + np.abs(mean * a))


def _multiply_linear(z: _LinearMap, by: Array | None) -> _LinearMap | None:
    if by is None or z.w is None or by.size not in (1, len(z.c)):
        return None
    return z.scale_and_shift(np.broadcast_to(by.reshape(-1), len(z.c)), np.zeros(1), np.zeros(1))


def _add_linear(one: _LinearMap, other: _LinearMap, sign: int) -> _LinearMap | None:
    """Add two maps of the same tensor. A smaller kernel is centered in the larger one; a scale becomes a diagonal
    kernel.
    """
    if one.x != other.x or (one.w is None and other.w is None):
        return None
    frame = max((v for v in (one, other) if v.w is not None), key=lambda v: (v.w.ndim, v.w.size))  # type: ignore[union-attr]
    if frame.w is None or frame.w.ndim < 3:
        return None
    first = _expand_to_kernel(one, frame)
    second = _expand_to_kernel(other, frame)
    if first is None or second is None:
        return None
    (w, s), (v, t) = first, second
    settings = frame.settings
    return _LinearMap(
        one.x,
        w + sign * v,
        one.c + sign * other.c,
        s + t,
        one.size_c + other.size_c,
        frame.groups,
        settings,
        (*one.names, *other.names),
    )


def _expand_to_kernel(part: _LinearMap, frame: _LinearMap) -> tuple[Array, Array] | None:
    assert frame.w is not None
    kernel = frame.w.shape[2:]
    if part.w is not None and part.size_w is not None and part.w.ndim > 1:
        if (
            part.w.shape[:2] != frame.w.shape[:2]
            or part.groups != frame.groups
            or part.settings[:1] != frame.settings[:1]
        ):
            return None
        room = [k - n for k, n in zip(kernel, part.w.shape[2:], strict=True)]
        if min(room) < 0 or any(r % 2 for r in room):
            return None
        pads = [(0, 0), (0, 0), *((r // 2, r // 2) for r in room)]
        return np.pad(part.w, pads), np.pad(part.size_w, pads)
    outputs, inputs = frame.w.shape[:2]
    if outputs != inputs * frame.groups:
        return None
    made = np.zeros(frame.w.shape)
    at = (np.arange(outputs), np.arange(outputs) % inputs, *(k // 2 for k in kernel))
    made[at] = 1.0 if part.w is None else part.w
    return made, np.abs(made)
