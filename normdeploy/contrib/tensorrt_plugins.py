"""Write the norm nodes of TensorRT's plugins as standard nodes, by their definitions
(`normdeploy.norms.tensorrt_norms`).

Most of these plugins have been removed, and other plugins use their names. A node without an epsilon, or with an
attribute of unknown meaning, is refused.
"""

from __future__ import annotations

from collections.abc import Callable

from ..graphs.region import RefusedError
from ..norms.norm_table import OpOwner, rows_of_owner
from ..norms.tensorrt_norms import PLUGIN_GROUPS, PLUGIN_SKIP_EPSILONS
from .expansion_writer import Attrs, ExpansionWriter, ForeignOp

# Attributes that only TensorRT's parser reads; they are not part of the op.
_PARSED = frozenset({"plugin_version", "plugin_namespace", "aot", "name", "info"})
_TWO_EPSILONS = "it has two epsilons"


def _check_group_norm(w: ExpansionWriter, attrs: Attrs) -> None:
    w.require_divisible_groups(w.input_name(0), 1, attrs.get("num_groups", PLUGIN_GROUPS))
    if "num_groups" not in attrs:
        w.notes = (f"the number of groups is the plugin's default: {PLUGIN_GROUPS}",)


def _check_group_normalization(w: ExpansionWriter, attrs: Attrs) -> None:
    w.require_divisible_groups(w.input_name(0), 1, attrs.get("num_groups", 1))
    if "eps" in attrs and "epsilon" in attrs:
        raise RefusedError(_TWO_EPSILONS)


def _check_layer_norm(w: ExpansionWriter, attrs: Attrs) -> None:
    """Refuse a node that may belong to another plugin than TensorRT's own LayerNorm.

    Several plugins are called LayerNorm. Only TensorRT's own plugin has an axis and a default for epsilon. Other
    plugins contain a fixed epsilon.
    """
    if "eps" in attrs and "epsilon" in attrs:
        raise RefusedError(_TWO_EPSILONS)
    if not {"eps", "epsilon", "axis"} & attrs.keys():
        raise RefusedError("its epsilon is missing, and plugins of this name have different defaults")


def _check_instance_norm(w: ExpansionWriter, attrs: Attrs) -> None:
    if "epsilon" not in attrs:
        raise RefusedError("its epsilon is missing")
    if not w.input_name(1):
        _require_vectors(attrs, "scales", "bias")


def _check_skip_layer_norm(w: ExpansionWriter, attrs: Attrs) -> None:
    version = _decode_text(attrs.get("plugin_version", "1"))
    type_id = attrs.get("type_id", 0)
    if version not in ("1", "2") or type_id not in PLUGIN_SKIP_EPSILONS:
        raise RefusedError(
            f"version {version}, type_id {type_id} computes in int8 with scales that are not in the file"
        )
    shape = w.shape_of(w.input_name(0))
    if len(shape) == 5 and tuple(shape[3:]) != (1, 1):
        raise RefusedError(f"its input has shape {shape}; expected (S, B, E, 1, 1)")
    _require_vectors(attrs, "gamma", "beta")
    epsilon = PLUGIN_SKIP_EPSILONS[type_id]
    w.notes = (f"epsilon {epsilon:.3g} is compiled into the plugin; before February 2024, the plugin had no epsilon",)


def _require_vectors(attrs: Attrs, *names: str) -> None:
    for name in names:
        if name not in attrs:
            raise RefusedError(f"its {name} is missing")


def _decode_text(value: str | bytes | int) -> str:
    if isinstance(value, bytes):
        return value.decode()
    return str(value)


_CHECKS: dict[str, Callable[[ExpansionWriter, Attrs], None]] = {
    "GroupNorm": _check_group_norm,
    "GroupNormalizationPlugin": _check_group_normalization,
    "LayerNorm": _check_layer_norm,
    "LayerNormPlugin": _check_layer_norm,
    "InstanceNormalization_TRT": _check_instance_norm,
    "CustomSkipLayerNormPluginDynamic": _check_skip_layer_norm,
}
PLUGINS = {op: ForeignOp(row, _CHECKS[op], ignored=_PARSED) for op, row in rows_of_owner(OpOwner.TENSORRT).items()}
