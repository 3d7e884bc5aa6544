"""What the norm nodes of TensorRT's plugins mean, written as standard nodes.

Most of these plugins have been removed, and others borrow their names: a node whose epsilon is not written, or that has
an attribute of unknown meaning, is refused. Semantics and defaults: `normdeploy.proof.contrib`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..graphs.region import Refused
from ..norms.ops import Owner, owned_by
from ..proof.contrib import GROUPS, SKIP_EPSILON
from .write import Attrs, Writer, written_by

_PARSED = {"plugin_version", "plugin_namespace", "aot", "name", "info"}  # for TensorRT's parser, no part of the op


def _trt_group_norm(w: Writer, attrs: Attrs) -> None:
    groups = attrs.get("num_groups", GROUPS)
    w.check_groups(w.input(0), 1, groups)
    y = w.cast(w.grouped(w.input(0), groups, attrs.get("epsilon", 1e-5), len(w.shape(w.input(0)))), w.kind(w.input(0)))
    w.give(0, w.silu(y) if attrs.get("bSwish", 0) else y)
    if "num_groups" not in attrs:
        w.notes = (f"the plugin's own number of groups: {GROUPS}",)


def _trt_group_normalization(w: Writer, attrs: Attrs) -> None:
    w.check_groups(w.input(0), 1, attrs.get("num_groups", 1))
    y = w.grouped(w.input(0), attrs.get("num_groups", 1), _epsilon(attrs, 1e-5), len(w.shape(w.input(0))))
    w.give(0, w.cast(y, w.kind(w.input(0))))


def _trt_layer_norm(w: Writer, attrs: Attrs) -> None:
    """Several plugins are called LayerNorm: only TensorRT's own has an axis, and a default for epsilon; others have one
    compiled in."""
    x = w.input(0)
    axes = w.from_axis(x, attrs.get("axis", -1))
    epsilon = _epsilon(attrs, 1e-5 if "axis" in attrs else None)
    shape = [] if len(axes) == 1 else [_known(d) for d in w.shape(x)[axes[0] :]]
    w.give(0, w.cast(w.scaled(w.normalized(x, axes, epsilon).value, w.input(1), w.input(2), shape), w.kind(x)))


def _known(dim: int | str | None) -> int:
    if not isinstance(dim, int):
        raise Refused(f"it normalizes over the dynamic size {dim!r}, and gamma has to be laid along it")
    return dim


def _epsilon(attrs: Attrs, default: float | None) -> float:
    given = [attrs[name] for name in ("eps", "epsilon") if name in attrs]
    if len(given) > 1 or not (given or default):
        raise Refused(
            "it has two epsilons" if given else "its epsilon is not written, and plugins of this name differ in it"
        )
    return float(given[0]) if given else float(default or 0.0)


def _trt_instance_norm(w: Writer, attrs: Attrs) -> None:
    x, kind = w.input(0), w.kind(w.input(0))
    if "epsilon" not in attrs:
        raise Refused("its epsilon is not written")
    normalized = w.normalized(x, list(range(2 - len(w.shape(x)), 0)), attrs["epsilon"])
    scale, bias = w.input(1), w.input(2)
    if not scale:
        scale, bias = (_vector(w, attrs, name, w.wide(kind)) for name in ("scales", "bias"))
    y = w.cast(w.scaled(normalized.value, scale, bias, shape=[-1, *(1,) * (len(w.shape(x)) - 2)]), kind)
    if attrs.get("relu", 0):
        y = w.then("LeakyRelu", y, alpha=float(attrs["alpha"])) if attrs.get("alpha") else w.then("Relu", y)
    w.give(0, y)


def _trt_skip_layer_norm(w: Writer, attrs: Attrs) -> None:
    """input, skip of (S, B, E, 1, 1), or with E last; beta, gamma and bias are attributes."""
    version, type_id = _text(attrs.get("plugin_version", "1")), attrs.get("type_id", 0)
    if version not in ("1", "2") or type_id not in SKIP_EPSILON:
        raise Refused(f"version {version}, type_id {type_id} computes in int8, with scales that the file does not hold")
    rank, kind = len(w.shape(w.input(0))), w.kind(w.input(0))
    ones = [1, 1] if rank == 5 else []
    if rank == 5 and tuple(w.shape(w.input(0))[3:]) != (1, 1):
        raise Refused(f"its input has the shape {w.shape(w.input(0))}, not (S, B, E, 1, 1)")
    total = w.then("Add", w.input(0), w.input(1))
    if "bias" in attrs:  # the plugin holds its vectors in float32, whatever the type of its data
        total = w.cast(total, w.wide(kind))
        total = w.then("Add", total, _vector(w, attrs, "bias", w.wide(kind), ones))
    normalized = w.normalized(total, list(range(-1 - len(ones), 0)), SKIP_EPSILON[type_id])
    gamma, beta = (_vector(w, attrs, name, w.wide(kind), ones) for name in ("gamma", "beta"))
    w.give(0, w.cast(w.scaled(normalized.value, gamma, beta), kind))
    w.notes = (f"epsilon {SKIP_EPSILON[type_id]:.3g} is compiled into the plugin; before February 2024 it had none",)


def _vector(w: Writer, attrs: Attrs, name: str, kind: int, ones: Sequence[int] = ()) -> str:
    if name not in attrs:
        raise Refused(f"its {name} is not written")
    return w.constant(np.asarray(attrs[name], dtype=np.float64).reshape(-1, *ones), kind, name)


def _text(value: str | bytes | int) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


_WRITERS: dict[str, Callable[[Writer, Attrs], None]] = {
    "GroupNorm": _trt_group_norm,
    "GroupNormalizationPlugin": _trt_group_normalization,
    "LayerNorm": _trt_layer_norm,
    "LayerNormPlugin": _trt_layer_norm,
    "InstanceNormalization_TRT": _trt_instance_norm,
    "CustomSkipLayerNormPluginDynamic": _trt_skip_layer_norm,
}
PLUGINS = {op: written_by(row, _WRITERS[op], _PARSED) for op, row in owned_by(Owner.TENSORRT).items()}
