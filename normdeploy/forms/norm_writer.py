"""Build the nodes of a norm.

The module defines `NormForm`, the writers that chain nodes, and helpers for axes and parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from ..graphs.graph import Graph
from ..graphs.region import Refusal
from ..norms.norm_table import STANDARD, NormOp
from ..recognition.norm_facts import Norm
from ..recognition.norm_parameters import MeasuredParameter
from .measured_forms import best_form

SLOWER = "it runs faster as separate nodes in the target runtime (measured: normdeploy/forms/norm_forms.json)"
# Maximum number of elements of a scale that is expanded to one value per element to make the runtime faster
WIDEST = 2**20


@dataclass(frozen=True)
class NormForm:
    """Nodes that replace a norm; the last one computes its result.

    Attributes:
        became: description of the form for reports.
        opset: lowest opset that has the ops of these nodes.
        op: the op that computes the norm itself, without the nodes around it.
        package: installed package that defines the op; empty for all other ops.
        kind: kind of norm in reports, if it differs from the kind that recognition found.
    """

    nodes: tuple[gs.Node, ...]
    became: str
    notes: tuple[str, ...] = ()
    opset: int = 1
    op: str = ""
    package: str = ""
    kind: str = ""


class NodeWriter:
    """Chain of nodes: the first node reads x, and each further node reads the output of the previous node."""

    def __init__(self, graph: Graph, norm: Norm) -> None:
        self.graph = graph
        self.norm = norm
        self.nodes: list[gs.Node] = []
        self.t: gs.Tensor = norm.x

    def add_node(self, op: str, *others: gs.Tensor, domain: str = "", **attrs: Any) -> None:
        """Append a node that reads the current tensor first, then ``others``."""
        node = self.graph.make_node(op, [self.t, *others], self.norm.y, attrs, domain)
        self.nodes.append(node)
        self.t = node.outputs[0]

    def transpose(self, perm: Sequence[int]) -> None:
        """Append a Transpose unless ``perm`` is the identity."""
        if list(perm) != sorted(perm):
            self.add_node("Transpose", perm=list(perm))

    def parameter(self, param: MeasuredParameter | None, shape: Sequence[int], neutral: float, name: str) -> gs.Tensor:
        """Provide a scale or bias of ``shape`` in the type of x.

        Args:
            param: None means ``neutral`` everywhere.

        Returns:
            the tensor: data unchanged, an initializer of the file if it fits, or else a new constant.
        """
        if param is None:
            exact = np.full(shape, neutral)
        elif param.value is None:
            assert param.tensor is not None
            return param.tensor
        else:
            tensor = param.tensor
            if (
                isinstance(tensor, gs.Constant)
                and tensor.name
                and tuple(tensor.shape) == tuple(shape)
                and tensor.dtype == self.norm.dtype
            ):
                return tensor
            axes = self.norm.axes if len(self.norm.axes) == len(shape) else range(-len(shape), 0)
            # If the sizes differ, the other parameter varies along more axes than this parameter, which must be
            # broadcast.
            laid_out = param.value.size == math.prod(shape)
            if laid_out:
                own = shape
            else:
                own = [param.value.shape[a] for a in axes]
            exact = np.broadcast_to(param.value.reshape(own if param.value.size > 1 else ()), shape)
        return self.graph.add_constant(f"{self.norm.y.name}_{name}", np.array(exact, dtype=np.float64), self.norm.dtype)

    def affine(self, gamma: MeasuredParameter | None, beta: MeasuredParameter | None) -> None:
        """Append a Mul for gamma and an Add for beta; a parameter that is None gets no node."""
        for param, op, name in ((gamma, "Mul", "scale"), (beta, "Add", "shift")):
            if param is not None:
                if param.value is None:
                    value = param.tensor
                else:
                    value = None
                if value is None:
                    assert param.value is not None
                    shape = param.value.shape
                    while shape and shape[0] == 1:
                        shape = shape[1:]
                    value = self.graph.add_constant(
                        f"{self.norm.y.name}_{name}", param.value.reshape(shape), self.norm.dtype
                    )
                self.add_node(op, value)

    def scale_channels(self, scale: np.ndarray, shift: np.ndarray) -> None:
        """Append a scale and shift of axis 1 as a BatchNormalization of mean 0, variance 1 and epsilon 0.

        onnxruntime's kernel does both in one pass. After a norm it takes 15 to 40 % less time than Mul and Add
        (``benchmarks.norm_forms``).
        """
        values = {"scale": scale, "shift": shift, "mean": np.zeros_like(scale), "variance": np.ones_like(scale)}
        tensors = [
            self.graph.add_constant(f"{self.norm.y.name}_{name}", value, self.norm.dtype)
            for name, value in values.items()
        ]
        self.add_node("BatchNormalization", *tensors, epsilon=0.0)

    @property
    def stash_type(self) -> int:
        """Return the ONNX number of the dtype to compute in: float64 for a norm in float64, otherwise float32."""
        if self.norm.dtype == np.float64:
            return 11
        return 1

    def make_form(self, op: str, became: str, opset: int = 0) -> NormForm:
        """Build the form from the nodes so far.

        Args:
            op: the standard op that computes the norm.
            became: description of the form for reports.
            opset: lowest opset that has the ops of the nodes; 0 to use the lowest opset of ``op``.

        Returns:
            the form, with a note if the output depends on the batch.
        """
        extra = [n.op for n in self.nodes if n.op != op]
        words = became + (f" with {' '.join(extra)} around it" if extra else "")
        notes = ("the output depends on the batch",) if 0 in self.norm.axes and len(self.norm.shape) > 1 else ()
        return NormForm(tuple(self.nodes), words, notes, opset or STANDARD[op].first_opset(self.norm.dtype.name), op)


class OpWriter(NodeWriter):
    """Writer of a norm as one of normdeploy's own ops, or as an op of an installed package."""

    def __init__(self, graph: Graph, norm: Norm, row: NormOp) -> None:
        super().__init__(graph, norm)
        self.row = row

    def op(self, *parameters: gs.Tensor, **attributes: Any) -> None:
        """Append the op. Its first input is the current tensor, which is x before the first node.

        Args:
            parameters: the other inputs of the op.

        Raises:
            ValueError: the inputs or attributes are not those of the op.
        """
        row = self.row
        if len(parameters) != len(row.inputs) - 1 or {*attributes} != {*row.attributes}:
            wanted = f"{row.name}({', '.join(row.inputs)}) with the attributes {', '.join(row.attributes) or 'none'}"
            raise ValueError(
                f"{wanted} was written with {len(parameters) + 1} inputs and the attributes "
                f"{', '.join(attributes) or 'none'}"
            )
        self.add_node(row.op, *parameters, domain=row.domains[0], **attributes)

    def done(self) -> NormForm:
        """Build the form from the nodes so far.

        Returns:
            the form. For a third-party op, it contains the row's package and kind.
        """
        row = self.row
        attributes: dict[str, Any] = next(
            (n.attrs for n in self.nodes if (n.domain, n.op) == (row.domains[0], row.op)), {}
        )
        listed = [
            f"{name}={format_epsilon(v) if isinstance(v, float) else v}"
            for name, v in attributes.items()
            if name != "stash_type"
        ]
        made = self.make_form(row.op, f"{row.name}({', '.join(listed)})", row.since)
        if row.package:
            return replace(made, package=row.package, kind=row.kind)
        return made

    def refuse(self, reason: str) -> Refusal:
        """Refuse to write the norm as this op.

        Returns:
            the refusal with ``reason``.
        """
        return Refusal(reason, self.norm.y.name)


def trailing_axis(norm: Norm) -> int | None:
    """Find the axis from which on all axes are normalized; axes of size 1 don't count.

    Returns:
        the axis, or None if an axis after it is not normalized.
    """
    first = min(norm.axes)
    if all(a in norm.axes or norm.shape[a] == 1 for a in range(first, len(norm.shape))):
        return first
    return None


def needs_full_parameters(norm: Norm, runtime: str, axes: Sequence[int]) -> bool:
    """Check whether the runtime is faster with scale and shift expanded to one number per element of ``axes``.

    Returns:
        True if so, and if the sizes are static with at most `WIDEST` elements.
    """
    sizes = [norm.shape[a] for a in axes]
    static = all(isinstance(n, int) for n in sizes) and math.prod(n for n in sizes if isinstance(n, int)) <= WIDEST
    if norm.fit.centered:
        kind = "LayerNorm"
    else:
        kind = "RMSNorm"
    return static and best_form(kind, runtime, norm.dtype.name, ("narrow", "standard")) == "standard"


def epsilon_for_single(norm: Norm) -> float:
    """Return the norm's epsilon if a row may have one element, otherwise 1.

    The normalized value of a single element is 0 at any epsilon, but some forms have a large rounding error in this
    case (`best_form`).
    """
    known = [n for a in norm.axes if isinstance(n := norm.shape[a], int) and a != norm.fit.split]
    if math.prod(known) == 1 and (norm.fit.split is None or norm.fit.block == 1):
        return norm.epsilon
    return 1.0


def prefers_instances(norm: Norm, runtime: str) -> bool:
    """Check whether a layer norm runs faster as InstanceNormalization.

    Returns:
        True if its scale has fewer elements than a row and can't be expanded, and the runtime is faster with
        InstanceNormalization.
    """
    axis = trailing_axis(norm)
    if (
        norm.fit.split is not None
        or not norm.fit.centered
        or axis is None
        or needs_full_parameters(norm, runtime, range(axis, len(norm.shape)))
    ):
        return False
    filled = {a for p in (norm.gamma, norm.beta) if p is not None for a in p.varies}
    narrow = not filled >= {a for a in range(axis, len(norm.shape)) if norm.shape[a] != 1}
    return (
        narrow
        and best_form("LayerNorm", runtime, norm.dtype.name, ("narrow", "instance"), epsilon=epsilon_for_single(norm))
        == "instance"
    )


def varies_only_along(param: MeasuredParameter | None, axes: Sequence[int]) -> bool:
    """Return True if the parameter varies only along ``axes``."""
    return param is None or set(param.varies) <= set(axes)


@dataclass(frozen=True)
class TrailingAxes:
    """Order of the axes of x in which the normalized axes are last.

    Attributes:
        perm: the axes of x in that order.
        axis: index in ``perm`` of the first normalized axis.
    """

    perm: list[int]
    axis: int

    @property
    def normalized(self) -> list[int]:
        """Return the normalized axes of x in their order."""
        return self.perm[self.axis :]

    @property
    def is_moved(self) -> bool:
        """Return True if a Transpose is needed."""
        return self.perm != sorted(self.perm)

    def parameter_shape(self, *parameters: MeasuredParameter | None) -> list[int]:
        """Compute the smallest shape over the normalized axes to which all constant ``parameters`` broadcast.

        Returns:
            one size per normalized axis, 1 if no parameter varies along it.
        """
        shape = [1] * len(self.normalized)
        for p in parameters:
            if p is not None and p.value is not None:
                shape = [max(n, p.value.shape[a]) for n, a in zip(shape, self.normalized, strict=True)]
        return shape

    def check_data(self, norm: Norm) -> Refusal | None:
        """Check that scale and shift are not data if x has to be transposed.

        Returns:
            a refusal if they are, otherwise None.
        """
        if self.is_moved and any(p is not None and p.data for p in (norm.gamma, norm.beta)):
            return Refusal("its scale or shift is data along an axis that must be transposed", norm.y.name)
        return None


def axes_last(norm: Norm) -> TrailingAxes:
    """Order the axes of x so that the normalized ones are last.

    Returns:
        the order; the identity if the normalized axes already are last.
    """
    rank = len(norm.shape)
    axis = trailing_axis(norm)
    if axis is not None:
        return TrailingAxes(list(range(rank)), axis)
    perm = [a for a in range(rank) if a not in norm.axes] + list(norm.axes)
    return TrailingAxes(perm, rank - len(norm.axes))


def inverse_permutation(perm: Sequence[int]) -> list[int]:
    """Invert a permutation.

    Returns:
        the permutation that undoes ``perm``.
    """
    return [int(i) for i in np.argsort(perm)]


def format_epsilon(epsilon: float) -> str:
    """Format epsilon as the shortest decimal number that rounds to the same float32.

    Returns:
        for example "1e-05", or "0".
    """
    if epsilon:
        return f"{float(np.float32(epsilon)):.7g}"
    return "0"
