"""The table of norm ops: the standard's, ours and other tools', a row for each. Whoever needs a property of a norm op
asks its row.

The rows say what an op takes and gives, and name what it computes: a function of `normdeploy.norms.definitions`; of our
own ops (`normdeploy.norms.normdeploy_ops`), and of those that installed packages bring
(`normdeploy.norms.third_party`), a body that travels in the file. Sources:

- ONNX: its operator schemas (https://onnx.ai/onnx/operators), which the ``onnx`` package holds;
  tests/norms/test_norm_ops.py compares;
- onnxruntime: docs/ContribOperators.md, and the schemas that the installed package gives;
- TensorRT: the creators in its ``plugin/`` folder, and onnx-tensorrt's changelog and importer for the versions in
  ``tensorrt``.
"""

from __future__ import annotations

from typing import Any

from . import definitions, normdeploy_ops
from .definitions import Definition
from .norm_op import CONTRIB, DOMAIN, NormOp, OpOwner, StatisticsKind, Version, make_row

__all__ = ["CONTRIB", "DEFAULT", "DOMAIN", "OURS", "ROWS", "STANDARD", "NormOp", "OpOwner", "StatisticsKind", "Version"]


def _standard_row(*words: str, **more: Any) -> NormOp:
    return make_row(OpOwner.ONNX, *words, **more)


def _contrib_row(*words: str, domains: tuple[str, ...] = (CONTRIB,), **more: Any) -> NormOp:
    return make_row(OpOwner.ONNXRUNTIME, *words, domains=domains, **more)


def _plugin_creator_row(op: str, kind: str, inputs: str, attributes: str, definition: Definition) -> NormOp:
    return make_row(OpOwner.TENSORRT, op, kind, inputs, attributes, domains=(), definition=definition)


_AXIS = "axis epsilon stash_type"
_GROUPS = "epsilon num_groups stash_type"
_AFFINE = "X scale bias"
_MAY_SHIFT = "X scale bias?"
_SUMMED = "Y mean inverse_deviation sum"
_BATCH = "X scale bias mean variance"
_TRAINED = "Y mean variance saved_mean saved_variance"
_EMBEDDED = "ids segments? words positions segment_words? scale bias mask? position_ids?"
# in the default domain where the standard has no op of that name
_OPEN: dict[str, Any] = {
    "domains": (CONTRIB, ""),
    "typed_by": "scale",
}

# The versions in ``tensorrt`` are of onnx-tensorrt's changelog (LayerNormalization and GroupNormalization 8.6, local
# functions 9.0) and importer (scale of GroupNormalization for each channel 10.9, RMSNormalization 10.15). TensorRT-RTX:
# the parsers of 1.4, 1.5, 1.6 and 1.7 were asked (2026-11-21): all take all of them, as one NORMALIZATION layer but for
# RMSNormalization (primitives) and BatchNormalization (SCALE).
ROWS: tuple[NormOp, ...] = (
    # the standard's
    _standard_row(
        "LayerNormalization",
        "LayerNorm",
        _MAY_SHIFT,
        _AXIS,
        "Y mean inverse_deviation",
        since=17,
        plugin="LayerNorm",
        tensorrt=(8, 6),
        layer=True,
        definition=definitions.layer_norm,
    ),
    _standard_row(
        "RMSNormalization",
        "RMSNorm",
        "X scale",
        _AXIS,
        since=23,
        plugin="RMSNorm",
        tensorrt=(10, 15),
        typed_by="scale",
        centered=False,
        definition=definitions.rms_norm,
    ),
    _standard_row(
        "GroupNormalization",
        "GroupNorm",
        _AFFINE,
        _GROUPS,
        since=21,
        plugin="GroupNorm",
        tensorrt=(10, 9),
        layer=True,
        definition=definitions.group_norm,
    ),
    _standard_row(
        "InstanceNormalization",
        "InstanceNorm",
        _AFFINE,
        "epsilon",
        since=6,
        bfloat16=22,
        plugin="InstanceNorm",
        tensorrt=(0,),
        layer=True,
        definition=definitions.instance_norm,
    ),
    _standard_row(
        "BatchNormalization",
        "BatchNorm",
        _BATCH,
        "epsilon momentum",
        _TRAINED,
        since=9,
        bfloat16=14,
        plugin="ScaleShift",
        tensorrt=(0,),
        layer=True,
        statistics=StatisticsKind.CONSTANT,
        definition=definitions.batch_norm,
    ),
    _standard_row(
        "MeanVarianceNormalization",
        "StdNorm",
        "X",
        "axes",
        since=9,
        bfloat16=13,
        definition=definitions.mean_variance_norm,
    ),
    _standard_row("LpNormalization", "L2Norm", "X", "axis p", bfloat16=22, centered=False),
    _standard_row(
        "LRN", "LRN", "X", "alpha beta bias size", bfloat16=13, centered=False, statistics=StatisticsKind.WINDOW
    ),
    *normdeploy_ops.ROWS,
    # onnxruntime's
    _contrib_row(
        "LayerNormalization",
        "LayerNorm",
        _MAY_SHIFT,
        _AXIS,
        "Y mean inverse_deviation",
        definition=definitions.layer_norm,
        **_OPEN,
    ),
    _contrib_row(
        "SimplifiedLayerNormalization",
        "RMSNorm",
        "X scale",
        _AXIS,
        "Y inverse_deviation",
        centered=False,
        definition=definitions.rms_norm,
        **_OPEN,
    ),
    _contrib_row(
        "SkipLayerNormalization",
        "LayerNorm",
        "X residual scale bias? added?",
        "epsilon",
        _SUMMED,
        definition=definitions.skip_layer_norm,
    ),
    _contrib_row(
        "SkipSimplifiedLayerNormalization",
        "RMSNorm",
        "X residual scale added?",
        "epsilon",
        _SUMMED,
        centered=False,
        definition=definitions.skip_rms_norm,
    ),
    _contrib_row(
        "EmbedLayerNormalization",
        "LayerNorm",
        _EMBEDDED,
        "mask_index_type epsilon",
        "Y mask_index sum",
        definition=definitions.embed_layer_norm,
    ),
    _contrib_row(
        "GroupNorm",
        "GroupNorm",
        _AFFINE,
        "groups activation channels_last epsilon",
        definition=definitions.ort_group_norm,
    ),
    _contrib_row(
        "SkipGroupNorm",
        "GroupNorm",
        "X scale bias residual added?",
        "groups activation channels_last epsilon",
        "Y sum",
        definition=definitions.skip_group_norm,
    ),
    # TensorRT's plugins
    _plugin_creator_row("GroupNorm", "GroupNorm", _AFFINE, "epsilon bSwish num_groups", definitions.plugin_group_norm),
    _plugin_creator_row(
        "GroupNormalizationPlugin",
        "GroupNorm",
        _AFFINE,
        "eps epsilon num_groups",
        definitions.plugin_group_normalization,
    ),
    _plugin_creator_row("LayerNorm", "LayerNorm", _AFFINE, "epsilon eps axis", definitions.plugin_layer_norm),
    _plugin_creator_row("LayerNormPlugin", "LayerNorm", _AFFINE, "epsilon eps axis", definitions.plugin_layer_norm),
    _plugin_creator_row(
        "InstanceNormalization_TRT",
        "InstanceNorm",
        "X scale? bias?",
        "epsilon scales bias relu alpha",
        definitions.plugin_instance_norm,
    ),
    _plugin_creator_row(
        "CustomSkipLayerNormPluginDynamic",
        "LayerNorm",
        "X residual",
        "type_id ld beta gamma bias has_bias",
        definitions.plugin_skip_layer_norm,
    ),
    # of older opsets
    make_row(
        OpOwner.ONNX_18,
        "GroupNormalization",
        "GroupNorm",
        _AFFINE,
        "epsilon num_groups",
        since=18,
        definition=definitions.group_norm,
    ),
)


def rows_of_owner(owner: OpOwner) -> dict[str, NormOp]:
    """The rows of one owner, by their ops' names."""
    return {r.op: r for r in ROWS if r.owner is owner}


STANDARD = rows_of_owner(OpOwner.ONNX)
OURS = rows_of_owner(OpOwner.OURS)

DEFAULT = {op: r for op, r in (rows_of_owner(OpOwner.ONNXRUNTIME) | STANDARD).items() if "" in r.domains}
"""What a norm's node of the default domain is, by its op's name: the standard's ops, and those that onnxruntime adds
there."""
