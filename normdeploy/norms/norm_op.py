"""A norm op: what it is called, what it takes and gives, and where it runs. `normdeploy.norms.norm_table` is the
table."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from .interpreter import Definition

# of our own ops
DOMAIN = "normdeploy"
# of onnxruntime's
CONTRIB = "com.microsoft"

Version = tuple[int, ...]


class OpOwner(StrEnum):
    """Who defines an op."""

    ONNX = "ONNX"
    # GroupNormalization as it was from opset 18 to 20
    ONNX_18 = "ONNX 18"
    OURS = "normdeploy"
    ONNXRUNTIME = "onnxruntime"
    TENSORRT = "TensorRT"
    GUEST = "an installed package"


class StatisticsKind(Enum):
    """What a norm divides by is computed of ..."""

    INPUT = "groups of its input's elements"
    # BatchNormalization in eval mode
    CONSTANT = "nothing: it is given, and fixed by the file"
    # LRN
    WINDOW = "a window that slides along the channels"


@dataclass(frozen=True)
class NormOp:
    """One op.

    ``inputs`` go by what they mean, in the op's order: X is normalized, after ``residual`` and ``added`` are added to
    it; ``scale`` and ``bias`` are gamma and beta; ``y_scale`` and ``y_zero_point`` are QuantizeLinear's. Among the
    ``outputs`` Y is the norm and ``sum`` is what was normalized; both have X's shape.
    """

    op: str
    owner: OpOwner
    # as reports call the norm: LayerNorm, RMSNorm, GroupNorm, ...
    kind: str
    inputs: tuple[str, ...]
    # all that it may have; an op of ours has all
    attributes: tuple[str, ...]
    outputs: tuple[str, ...] = ("Y",)
    # inputs that may be left out
    optional: frozenset[str] = frozenset()
    # the first opset in which it means this
    since: int = 1
    # the first in which it takes that type
    bfloat16: int = 1
    # in which a node of this name is this op; () where the name alone tells
    domains: tuple[str, ...] = ("",)
    # the input whose element type Y has
    typed_by: str = "X"
    # it takes the mean off
    centered: bool = True
    statistics: StatisticsKind = StatisticsKind.INPUT
    # a norm and its neighbours
    joined: bool = False
    # the norm's own op, as reports write it, where QuantizeLinear is one of these
    quantizes: str = ""
    # the kernel of ours that runs it in TensorRT, "" where none does
    plugin: str = ""
    # the first TensorRT whose parser reads it as it is meant; TensorRT-RTX has read all of them since 1.4
    tensorrt: Version = ()
    # TensorRT has one fused layer for it
    layer: bool = False
    # what it computes, where the file brings it along: nodes in ONNX's textual syntax, or a whole function in bytes
    # (`normdeploy.norms.function_bodies`)
    body: str | bytes = field(default="", repr=False)
    # what it computes, of all others (`normdeploy.norms.interpreter`); None of those that have no definition
    definition: Definition | None = field(default=None, repr=False, compare=False)
    # that brings it; "" of all in the table
    package: str = ""

    @property
    def name(self) -> str:
        """The op as reports write it, with the domain of ours: "LayerNormalization", "normdeploy.AddLayerNorm"."""
        if self.owner in (OpOwner.OURS, OpOwner.GUEST):
            return f"{self.domains[0]}.{self.op}"
        return self.op

    def first_opset(self, dtype: str) -> int:
        """The first opset that has it in a type, "float32" or "bfloat16"."""
        if dtype == "bfloat16":
            return max(self.since, self.bfloat16)
        return self.since

    @property
    def min_inputs(self) -> int:
        """How many inputs a node has at least."""
        return 1 + max(i for i, name in enumerate(self.inputs) if name not in self.optional)

    @property
    def skippable_inputs(self) -> tuple[int, ...]:
        """The places of inputs before the last required one that may be left out by an empty name."""
        return tuple(i for i, name in enumerate(self.inputs[: self.min_inputs]) if name in self.optional)

    @property
    def x_shaped_outputs(self) -> tuple[int, ...]:
        """The places of the outputs that have X's shape."""
        return tuple(i for i, name in enumerate(self.outputs) if name in ("Y", "sum") and "X" in self.inputs)

    @property
    def is_quantized_by_row(self) -> bool:
        """Whether it is quantized by a scale of each row, which it gives."""
        return bool(self.quantizes) and "y_scale" in self.outputs

    @property
    def has_scale(self) -> bool:
        """Whether it multiplies by a scale of its own."""
        return "scale" in self.inputs


def make_row(
    owner: OpOwner, op: str, kind: str, inputs: str, attributes: str, outputs: str = "Y", **more: Any
) -> NormOp:
    """A row from lists of words; "bias?" is an input that may be left out."""
    names = tuple(name.removesuffix("?") for name in inputs.split())
    optional = frozenset(name.removesuffix("?") for name in inputs.split() if name.endswith("?"))
    return NormOp(op, owner, kind, names, tuple(attributes.split()), tuple(outputs.split()), optional, **more)
