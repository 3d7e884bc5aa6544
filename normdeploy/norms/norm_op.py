"""Define a norm op: its names, inputs, outputs, attributes, and the runtimes that run it.

`normdeploy.norms.norm_table` lists all norm ops.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from .interpreter import Definition

# Domain of normdeploy's own ops
DOMAIN = "normdeploy"
# Domain of onnxruntime's contrib ops
CONTRIB = "com.microsoft"

Version = tuple[int, ...]


class OpOwner(StrEnum):
    """Standard, project or package that defines an op."""

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

    Inputs and outputs are listed in the op's order, with names that have a fixed meaning. X is the tensor that is
    normalized; if the op has the inputs ``residual`` and ``added``, the sum of all three is normalized. ``scale`` and
    ``bias`` are gamma and beta. ``y_scale`` and ``y_zero_point`` are the inputs of QuantizeLinear. The output Y is the
    result of the norm, and ``sum`` is the sum that was normalized. Both have the shape of X.

    Attributes:
        kind: kind of norm in reports: LayerNorm, RMSNorm, GroupNorm, ...
        attributes: all attributes that a node may have. A node of one of normdeploy's own ops has all of them.
        optional: inputs that a node may omit.
        since: first opset in which the op has this meaning.
        bfloat16: first opset in which the op accepts bfloat16.
        domains: domains in which a node with this op name is this op; () for any domain.
        typed_by: name of the input that determines the dtype of Y.
        centered: True if the op subtracts the mean.
        joined: True if the op is a norm together with its neighboring ops.
        quantizes: name in reports of the norm without the QuantizeLinear that is joined to it; "" for other ops.
        plugin: kernel of this project, or of the package, that runs the op in TensorRT; "" for none.
        tensorrt: first version of TensorRT whose parser reads the op correctly. TensorRT-RTX reads all norm ops since
            1.4.
        layer: True if TensorRT has one fused layer for the op.
        tuned: True if the body has views that only onnxruntime needs. A native build for TensorRT writes other nodes.
        body: definition of one of normdeploy's own ops, or of a third-party op, which files contain: nodes in ONNX's
            textual syntax, or a serialized function (`normdeploy.norms.function_bodies`).
        definition: definition of any other op (`normdeploy.norms.interpreter`); None if it has no definition.
        package: installed package that defines the op; "" for all ops of the table.
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
    tuned: bool = False
    body: str | bytes = field(default="", repr=False)
    definition: Definition | None = field(default=None, repr=False, compare=False)
    package: str = ""

    @property
    def name(self) -> str:
        """Return the op's name in reports, with the domain of non-standard ops: "normdeploy.AddLayerNorm"."""
        if self.owner in (OpOwner.OURS, OpOwner.GUEST):
            return f"{self.domains[0]}.{self.op}"
        return self.op

    def first_opset(self, dtype: str) -> int:
        """Find the first opset in which the op accepts a dtype.

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
        """Return the indices of the optional inputs that precede a required input.

        A node omits such an input by an empty name.
        """
        return tuple(i for i, name in enumerate(self.inputs[: self.min_inputs]) if name in self.optional)

    @property
    def x_shaped_outputs(self) -> tuple[int, ...]:
        """Return the indices of the outputs that have X's shape."""
        return tuple(i for i, name in enumerate(self.outputs) if name in ("Y", "sum") and "X" in self.inputs)

    @property
    def is_quantized_by_row(self) -> bool:
        """Return True if the op quantizes each row by the row's own scale, and returns the scales as an output."""
        return bool(self.quantizes) and "y_scale" in self.outputs

    @property
    def has_scale(self) -> bool:
        """Return True if the op multiplies by a scale."""
        return "scale" in self.inputs


def make_row(
    owner: OpOwner, op: str, kind: str, inputs: str, attributes: str, outputs: str = "Y", **more: Any
) -> NormOp:
    """Build a row. Each list of names is one string, separated by spaces; "bias?" is an optional input.

    Returns:
        the row.
    """
    names = tuple(name.removesuffix("?") for name in inputs.split())
    optional = frozenset(name.removesuffix("?") for name in inputs.split() if name.endswith("?"))
    return NormOp(op, owner, kind, names, tuple(attributes.split()), tuple(outputs.split()), optional, **more)
