"""The table of norm ops: the standard's, ours and other tools', a row for each. Whoever needs a property of a norm op
asks its row.

The rows say what an op takes and gives. What it computes is said where it is computed: in float64
(`normdeploy.evaluate`), in the prover's field (`normdeploy.proof.norms`, `normdeploy.proof.foreign`), as a function
body (`normdeploy.graphs.functions`). Sources:

- ONNX: its operator schemas (https://onnx.ai/onnx/operators), which the ``onnx`` package holds; tests/test_norm_ops.py
  compares;
- onnxruntime: docs/ContribOperators.md, and the schemas that the installed package gives;
- TensorRT: the creators in its ``plugin/`` folder, and onnx-tensorrt's changelog and importer for the versions in
  ``tensorrt``.

This module imports nothing of the package, so that every layer may ask it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

DOMAIN = "normdeploy"  # of our own ops
CONTRIB = "com.microsoft"  # of onnxruntime's

Version = tuple[int, ...]


class Owner(StrEnum):
    """Who defines an op."""

    ONNX = "ONNX"
    ONNX_18 = "ONNX 18"  # GroupNormalization as it was from opset 18 to 20
    OURS = "normdeploy"
    ONNXRUNTIME = "onnxruntime"
    TENSORRT = "TensorRT"


class Statistics(Enum):
    """What a norm divides by is computed of ..."""

    INPUT = "groups of its input's elements"
    CONSTANT = "nothing: it is given, and fixed by the file"  # BatchNormalization in eval mode
    WINDOW = "a window that slides along the channels"  # LRN


@dataclass(frozen=True)
class NormOp:
    """One op.

    ``inputs`` go by what they mean, in the op's order: X is normalized, after ``residual`` and ``added`` are added to
    it; ``scale`` and ``bias`` are gamma and beta. Among the ``outputs`` Y is the norm and ``sum`` is what was
    normalized; both have X's shape.
    """

    op: str
    owner: Owner
    kind: str  # as reports call the norm: LayerNorm, RMSNorm, GroupNorm, ...
    inputs: tuple[str, ...]
    attributes: tuple[str, ...]  # all that it may have; an op of ours has all
    outputs: tuple[str, ...] = ("Y",)
    optional: frozenset[str] = frozenset()  # inputs that may be left out
    since: int = 1  # the first opset in which it means this
    bfloat16: int = 1  # the first in which it takes that type
    domains: tuple[str, ...] = ("",)  # in which a node of this name is this op; () where the name alone tells
    typed_by: str = "X"  # the input whose element type Y has
    centered: bool = True  # it takes the mean off
    statistics: Statistics = Statistics.INPUT
    joined: bool = False  # a norm and its neighbours
    plugin: str = ""  # the kernel of ours that runs it in TensorRT, "" where none does
    # the first TensorRT whose parser reads it as it is meant; TensorRT-RTX has read all of them since 1.4
    tensorrt: Version = ()
    layer: bool = False  # TensorRT has one fused layer for it

    @property
    def name(self) -> str:
        """The op as reports write it, with the domain of ours: "LayerNormalization", "normdeploy.AddLayerNorm"."""
        return f"{DOMAIN}.{self.op}" if self.owner is Owner.OURS else self.op

    def opset(self, dtype: str) -> int:
        """The first opset that has it in a type, "float32" or "bfloat16"."""
        return max(self.since, self.bfloat16) if dtype == "bfloat16" else self.since

    @property
    def fewest(self) -> int:
        """How many inputs a node has at least."""
        return 1 + max(i for i, name in enumerate(self.inputs) if name not in self.optional)

    @property
    def skippable(self) -> tuple[int, ...]:
        """The places of inputs before the last required one that may be left out by an empty name."""
        return tuple(i for i, name in enumerate(self.inputs[: self.fewest]) if name in self.optional)

    @property
    def alike(self) -> tuple[int, ...]:
        """The places of the outputs that have X's shape."""
        return tuple(i for i, name in enumerate(self.outputs) if name in ("Y", "sum") and "X" in self.inputs)

    @property
    def rescaled(self) -> bool:
        """Whether it multiplies by a scale of its own."""
        return "scale" in self.inputs


def _row(owner: Owner, op: str, kind: str, inputs: str, attributes: str, outputs: str = "Y", **more: Any) -> NormOp:
    """A row from lists of words; "bias?" is an input that may be left out."""
    names = tuple(name.removesuffix("?") for name in inputs.split())
    optional = frozenset(name.removesuffix("?") for name in inputs.split() if name.endswith("?"))
    return NormOp(op, owner, kind, names, tuple(attributes.split()), tuple(outputs.split()), optional, **more)


def _standard(*words: str, **more: Any) -> NormOp:
    return _row(Owner.ONNX, *words, **more)


def _ours(op: str, *words: str, since: int = 17, plugin: str | None = None, **more: Any) -> NormOp:
    """Bodies are written for opset 17 and newer ones, kernels have their op's name, and TensorRT's parser reads
    functions from 9.0 on."""
    kernel = op if plugin is None else plugin
    return _row(Owner.OURS, op, *words, since=since, domains=(DOMAIN,), plugin=kernel, tensorrt=(9, 0), **more)


def _contrib(*words: str, domains: tuple[str, ...] = (CONTRIB,), **more: Any) -> NormOp:
    return _row(Owner.ONNXRUNTIME, *words, domains=domains, **more)


def _creator(*words: str) -> NormOp:
    return _row(Owner.TENSORRT, *words, domains=())


_AXIS, _GROUPS = "axis epsilon stash_type", "epsilon num_groups stash_type"
_AFFINE, _MAY_SHIFT, _SUMMED = "X scale bias", "X scale bias?", "Y mean inverse_deviation sum"
_BATCH, _TRAINED = "X scale bias mean variance", "Y mean variance saved_mean saved_variance"
_EMBEDDED = "ids segments? words positions segment_words? scale bias mask? position_ids?"
_OPEN: dict[str, Any] = {
    "domains": (CONTRIB, ""),
    "typed_by": "scale",
}  # in the default domain where the standard has no op of that name

# The versions in ``tensorrt`` are of onnx-tensorrt's changelog (LayerNormalization and GroupNormalization 8.6, local
# functions 9.0) and importer (scale of GroupNormalization for each channel 10.9, RMSNormalization 10.15). TensorRT-RTX:
# the parsers of 1.4, 1.5, 1.6 and 1.7 were asked (2026-11-21): all take all of them, as one NORMALIZATION layer but for
# RMSNormalization (primitives) and BatchNormalization (SCALE).
ROWS: tuple[NormOp, ...] = (
    # the standard's
    _standard(
        "LayerNormalization",
        "LayerNorm",
        _MAY_SHIFT,
        _AXIS,
        "Y mean inverse_deviation",
        since=17,
        plugin="LayerNorm",
        tensorrt=(8, 6),
        layer=True,
    ),
    _standard(
        "RMSNormalization",
        "RMSNorm",
        "X scale",
        _AXIS,
        since=23,
        plugin="RMSNorm",
        tensorrt=(10, 15),
        typed_by="scale",
        centered=False,
    ),
    _standard(
        "GroupNormalization", "GroupNorm", _AFFINE, _GROUPS, since=21, plugin="GroupNorm", tensorrt=(10, 9), layer=True
    ),
    _standard(
        "InstanceNormalization",
        "InstanceNorm",
        _AFFINE,
        "epsilon",
        since=6,
        bfloat16=22,
        plugin="InstanceNorm",
        tensorrt=(0,),
        layer=True,
    ),
    _standard(
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
        statistics=Statistics.CONSTANT,
    ),
    _standard("MeanVarianceNormalization", "StdNorm", "X", "axes", since=9, bfloat16=13),
    _standard("LpNormalization", "L2Norm", "X", "axis p", bfloat16=22, centered=False),
    _standard("LRN", "LRN", "X", "alpha beta bias size", bfloat16=13, centered=False, statistics=Statistics.WINDOW),
    # our own
    _ours("RMSNorm", "RMSNorm", "X scale", "axes epsilon stash_type", centered=False),
    _ours("LayerNorm", "LayerNorm", _AFFINE, "axes epsilon ddof stash_type"),
    _ours("StdNorm", "StdNorm", _AFFINE, "axes epsilon ddof stash_type"),
    _ours(
        "L2Norm", "L2Norm", "X scale", "axes epsilon stash_type", centered=False, plugin=""
    ),  # in TensorRT too its body runs
    _ours("ChannelLayerNorm", "LayerNorm", _AFFINE, "epsilon stash_type"),
    _ours("AddLayerNorm", "LayerNorm", "X residual scale bias", "epsilon stash_type", "Y sum", joined=True),
    _ours("AddRMSNorm", "RMSNorm", "X residual scale", "epsilon stash_type", "Y sum", joined=True, centered=False),
    _ours("ModulatedLayerNorm", "LayerNorm", "X scale shift", "epsilon stash_type", joined=True),
    _ours("GroupNormSiLU", "GroupNorm", _AFFINE, _GROUPS, joined=True, since=21),
    # onnxruntime's
    _contrib("LayerNormalization", "LayerNorm", _MAY_SHIFT, _AXIS, "Y mean inverse_deviation", **_OPEN),
    _contrib(
        "SimplifiedLayerNormalization", "RMSNorm", "X scale", _AXIS, "Y inverse_deviation", centered=False, **_OPEN
    ),
    _contrib("SkipLayerNormalization", "LayerNorm", "X residual scale bias? added?", "epsilon", _SUMMED),
    _contrib(
        "SkipSimplifiedLayerNormalization", "RMSNorm", "X residual scale added?", "epsilon", _SUMMED, centered=False
    ),
    _contrib("EmbedLayerNormalization", "LayerNorm", _EMBEDDED, "mask_index_type epsilon", "Y mask_index sum"),
    _contrib("GroupNorm", "GroupNorm", _AFFINE, "groups activation channels_last epsilon"),
    _contrib(
        "SkipGroupNorm", "GroupNorm", "X scale bias residual added?", "groups activation channels_last epsilon", "Y sum"
    ),
    # TensorRT's plugins
    _creator("GroupNorm", "GroupNorm", _AFFINE, "epsilon bSwish num_groups"),
    _creator("GroupNormalizationPlugin", "GroupNorm", _AFFINE, "eps epsilon num_groups"),
    _creator("LayerNorm", "LayerNorm", _AFFINE, "epsilon eps axis"),
    _creator("LayerNormPlugin", "LayerNorm", _AFFINE, "epsilon eps axis"),
    _creator("InstanceNormalization_TRT", "InstanceNorm", "X scale? bias?", "epsilon scales bias relu alpha"),
    _creator("CustomSkipLayerNormPluginDynamic", "LayerNorm", "X residual", "type_id ld beta gamma bias has_bias"),
    # of older opsets
    _row(Owner.ONNX_18, "GroupNormalization", "GroupNorm", _AFFINE, "epsilon num_groups", since=18),
)


def owned_by(owner: Owner) -> dict[str, NormOp]:
    """The rows of one owner, by their ops' names."""
    return {row.op: row for row in ROWS if row.owner is owner}


STANDARD, OURS = owned_by(Owner.ONNX), owned_by(Owner.OURS)

DEFAULT = {op: row for op, row in (owned_by(Owner.ONNXRUNTIME) | STANDARD).items() if "" in row.domains}
"""What a norm's node of the default domain is, by its op's name: the standard's ops, and those that onnxruntime adds
there."""
