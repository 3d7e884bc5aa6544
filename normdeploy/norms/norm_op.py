"""Define a norm op: its names, inputs, outputs, attributes, and the runtimes that run it.

`normdeploy.norms.norm_table` is the table of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from .interpreter import Definition

# domain of own ops
DOMAIN = "normdeploy"
# domain of onnxruntime's contrib ops
CONTRIB = "com.microsoft"

Version = tuple[int, ...]


class OpOwner(StrEnum):
    """Owner of the definition of an op."""

    ONNX = "ONNX"
    # GroupNormalization of opsets 18 to 20
    ONNX_18 = "ONNX 18"
    OURS = "normdeploy"
    ONNXRUNTIME = "onnxruntime"
    TENSORRT = "TensorRT"
    GUEST = "an installed package"


class StatisticsKind(Enum):
    """Source of the statistics that a norm divides by."""

    INPUT = "groups of its input's elements"
    # BatchNormalization in eval mode
    CONSTANT = "nothing: it is given, and fixed by the file"
    # LRN
    WINDOW = "a window that slides along the channels"


@dataclass(frozen=True)
class NormOp:
    """One norm op.

    The names of inputs and outputs give their meaning, in the op's order. X is normalized, after ``residual`` and
    ``added`` are added to it. ``scale`` and ``bias`` are gamma and beta; ``y_scale`` and ``y_zero_point`` are
    QuantizeLinear's. Of the outputs, Y is the norm and ``sum`` the normalized sum; both have X's shape.

    Attributes:
        kind: kind of norm in reports: LayerNorm, RMSNorm, GroupNorm, ...
        attributes: all attributes that a node may have; a node of an own op has all of them.
        optional: inputs that a node may omit.
        since: first opset in which the op has this meaning.
        bfloat16: first opset in which it accepts bfloat16.
        domains: domains in which a node of this name is this op; () if the name alone decides.
        typed_by: input whose dtype Y has.
        centered: it subtracts the mean.
        joined: it is a norm together with its neighbors.
        quantizes: name of the norm's own op in reports, if QuantizeLinear is one of these neighbors.
        plugin: kernel of this project, or of the package, that runs it in TensorRT; "" if there is none.
        tensorrt: first TensorRT whose parser reads it correctly; TensorRT-RTX has read all of them since 1.4.
        layer: TensorRT has one fused layer for it.
        body: definition of an op that is stored in the file: nodes in ONNX's textual syntax, or a whole function in
            bytes (`normdeploy.norms.function_bodies`).
        definition: definition of any other op (`normdeploy.norms.interpreter`); None if it has no definition.
        package: package that defines it; "" for all ops of the table.
    """

    op: str
    owner: OpOwner
    kind: str
    inputs: tuple[str, ...]
    attributes: tuple[str, ...]
    outputs: tuple[str, ...] = ("Y",)
    optional: frozenset[str] = frozenset()
    since: int = 1
    bfloat16: int = 1
    domains: tuple[str, ...] = ("",)
    typed_by: str = "X"
    centered: bool = True
    statistics: StatisticsKind = StatisticsKind.INPUT
    joined: bool = False
    quantizes: str = ""
    plugin: str = ""
    tensorrt: Version = ()
    layer: bool = False
    body: str | bytes = field(default="", repr=False)
    definition: Definition | None = field(default=None, repr=False, compare=False)
    package: str = ""

    @property
    def name(self) -> str:
        """Return the op's name in reports: "LayerNormalization", or with a domain "normdeploy.AddLayerNorm"."""
        if self.owner in (OpOwner.OURS, OpOwner.GUEST):
            return f"{self.domains[0]}.{self.op}"
        return self.op

    def first_opset(self, dtype: str) -> int:
        """Find the first opset that has the op in a dtype.

        Args:
            dtype: for example "float32" or "bfloat16".

        Returns:
            the opset.
        """
        if dtype == "bfloat16":
            return max(self.since, self.bfloat16)
        return self.since

    @property
    def min_inputs(self) -> int:
        """Return the smallest number of inputs of a node."""
        return 1 + max(i for i, name in enumerate(self.inputs) if name not in self.optional)

    @property
    def skippable_inputs(self) -> tuple[int, ...]:
        """Return the indices of optional inputs before the last required one, which an empty name may omit."""
        return tuple(i for i, name in enumerate(self.inputs[: self.min_inputs]) if name in self.optional)

    @property
    def x_shaped_outputs(self) -> tuple[int, ...]:
        """Return the indices of the outputs that have X's shape."""
        return tuple(i for i, name in enumerate(self.outputs) if name in ("Y", "sum") and "X" in self.inputs)

    @property
    def is_quantized_by_row(self) -> bool:
        """Return True if it quantizes each row by a scale of its own, which is an output."""
        return bool(self.quantizes) and "y_scale" in self.outputs

    @property
    def has_scale(self) -> bool:
        """Return True if it multiplies by a scale."""
        return "scale" in self.inputs


def make_row(
    owner: OpOwner, op: str, kind: str, inputs: str, attributes: str, outputs: str = "Y", **more: Any
) -> NormOp:
    """Build a row from lists of words; "bias?" is an optional input.

    Returns:
        the row.
    """
    names = tuple(name.removesuffix("?") for name in inputs.split())
    optional = frozenset(name.removesuffix("?") for name in inputs.split() if name.endswith("?"))
    return NormOp(op, owner, kind, names, tuple(attributes.split()), tuple(outputs.split()), optional, **more)
