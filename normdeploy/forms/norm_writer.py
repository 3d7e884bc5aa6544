"""What the passes share: a ``NormForm`` is a norm written as nodes, and the few nodes that stand around a norm node."""

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

SLOWER = "the runtime asked for computes it faster as it is written (measured: normdeploy/forms/norm_forms.json)"
# elements of a scale that is written out only because the runtime is faster with one for each element
WIDEST = 2**20


@dataclass(frozen=True)
class NormForm:
    """The nodes that take the place of a norm, the last one giving its result; ``became`` says it in words."""

    nodes: tuple[gs.Node, ...]
    became: str
    notes: tuple[str, ...] = ()
    # the lowest opset that has these nodes
    opset: int = 1
    # the norm's own op
    op: str = ""
    # that brought the form
    package: str = ""
    # as reports call the norm, where that is not what recognition calls it
    kind: str = ""


class NodeWriter:
    """Strings nodes together: each step takes the output of the one before."""

    def __init__(self, graph: Graph, norm: Norm) -> None:
        self.graph = graph
        self.norm = norm
        self.nodes: list[gs.Node] = []
        self.t: gs.Tensor = norm.x

    def add_node(self, op: str, *others: gs.Tensor, domain: str = "", **attrs: Any) -> None:
        node = self.graph.make_node(op, [self.t, *others], self.norm.y, attrs, domain)
        self.nodes.append(node)
        self.t = node.outputs[0]

    def transpose(self, perm: Sequence[int]) -> None:
        if list(perm) != sorted(perm):
            self.add_node("Transpose", perm=list(perm))

    def parameter(self, param: MeasuredParameter | None, shape: Sequence[int], neutral: float, name: str) -> gs.Tensor:
        """A scale or bias of ``shape`` in x's type: data as it is, an initializer of the file where it fits, else a new
        one."""
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
            # else it varies along fewer axes than the other parameter
            laid_out = param.value.size == math.prod(shape)
            if laid_out:
                own = shape
            else:
                own = [param.value.shape[a] for a in axes]
            exact = np.broadcast_to(param.value.reshape(own if param.value.size > 1 else ()), shape)
        return self.graph.add_constant(f"{self.norm.y.name}_{name}", np.array(exact, dtype=np.float64), self.norm.dtype)

    def affine(self, gamma: MeasuredParameter | None, beta: MeasuredParameter | None) -> None:
        """Scale and shift by nodes of their own."""
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
        """Scale and shift of axis 1 as a BatchNormalization of mean 0, variance 1 and epsilon 0, whose kernel in
        onnxruntime does both in one pass: 15 to 40 % less than Mul and Add take behind a norm
        (``benchmarks.norm_forms``)."""
        values = {"scale": scale, "shift": shift, "mean": np.zeros_like(scale), "variance": np.ones_like(scale)}
        tensors = [
            self.graph.add_constant(f"{self.norm.y.name}_{name}", value, self.norm.dtype)
            for name, value in values.items()
        ]
        self.add_node("BatchNormalization", *tensors, epsilon=0.0)

    @property
    def stash_type(self) -> int:
        """The type to compute in: ONNX's number of float64 for a norm in float64, else of float32."""
        if self.norm.dtype == np.float64:
            return 11
        return 1

    def make_form(self, op: str, became: str, opset: int = 0) -> NormForm:
        """``opset``: the lowest that has the nodes, where it is another than that of the standard op ``op``."""
        extra = [n.op for n in self.nodes if n.op != op]
        words = became + (f" with {' '.join(extra)} around it" if extra else "")
        notes = ("the output depends on the batch",) if 0 in self.norm.axes and len(self.norm.shape) > 1 else ()
        return NormForm(tuple(self.nodes), words, notes, opset or STANDARD[op].first_opset(self.norm.dtype.name), op)


class OpWriter(NodeWriter):
    """What the form that stands in an op's row writes with: one of ours, or an installed package's."""

    def __init__(self, graph: Graph, norm: Norm, row: NormOp) -> None:
        super().__init__(graph, norm)
        self.row = row

    def op(self, *parameters: gs.Tensor, **attributes: Any) -> None:
        """The op on what was strung together so far, x at first; ``parameters``: its other inputs.

        Raises:
            ValueError: the inputs or attributes are not those of the op.
        """
        row = self.row
        if len(parameters) != len(row.inputs) - 1 or {*attributes} != {*row.attributes}:
            wanted = f"{row.name}({', '.join(row.inputs)}) with the attributes {', '.join(row.attributes) or 'none'}"
            raise ValueError(
                f"{wanted} is written with {len(parameters) + 1} inputs and {', '.join(attributes) or 'none'}"
            )
        self.add_node(row.op, *parameters, domain=row.domains[0], **attributes)

    def done(self) -> NormForm:
        """What was strung together, as a form."""
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
        """Why the norm is none of the op."""
        return Refusal(reason, self.norm.y.name)


def trailing_axis(norm: Norm) -> int | None:
    """The axis from which on everything is normalized (axes of size 1 don't matter); None where other axes lie between
    or behind."""
    first = min(norm.axes)
    if all(a in norm.axes or norm.shape[a] == 1 for a in range(first, len(norm.shape))):
        return first
    return None


def needs_full_parameters(norm: Norm, runtime: str, axes: Sequence[int]) -> bool:
    """Whether scale and shift are to hold one number for each element of ``axes``, even where fewer would say the
    same."""
    sizes = [norm.shape[a] for a in axes]
    static = all(isinstance(n, int) for n in sizes) and math.prod(n for n in sizes if isinstance(n, int)) <= WIDEST
    if norm.fit.centered:
        kind = "LayerNorm"
    else:
        kind = "RMSNorm"
    return static and best_form(kind, runtime, norm.dtype.name, ("narrow", "standard")) == "standard"


def epsilon_for_single(norm: Norm) -> float:
    """Its epsilon where a row may have one place, else 1: what is normalized there is 0, whatever the epsilon."""
    known = [n for a in norm.axes if isinstance(n := norm.shape[a], int) and a != norm.fit.split]
    if math.prod(known) == 1 and (norm.fit.split is None or norm.fit.block == 1):
        return norm.epsilon
    return 1.0


def prefers_instances(norm: Norm, runtime: str) -> bool:
    """Whether it is a layer norm whose scale is narrower than its rows and can't be written out, and instances run
    faster then."""
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
    """True where the parameter varies along ``axes`` only."""
    return param is None or set(param.varies) <= set(axes)


@dataclass(frozen=True)
class TrailingAxes:
    """The normalized axes as the last ones of x.

    Attributes:
        perm: the axes of x in the order in which the normalized ones are last.
        axis: where in it these begin.
    """

    perm: list[int]
    axis: int

    @property
    def normalized(self) -> list[int]:
        """The axes of x that are last, in their order."""
        return self.perm[self.axis :]

    @property
    def is_moved(self) -> bool:
        """Whether a Transpose is needed."""
        return self.perm != sorted(self.perm)

    def parameter_shape(self, *parameters: MeasuredParameter | None) -> list[int]:
        """Return the shape over the normalized axes that all constant ``parameters`` broadcast to."""
        shape = [1] * len(self.normalized)
        for p in parameters:
            if p is not None and p.value is not None:
                shape = [max(n, p.value.shape[a]) for n, a in zip(shape, self.normalized, strict=True)]
        return shape

    def check_data(self, norm: Norm) -> Refusal | None:
        """Refuse a scale or shift that is data where x has to be transposed."""
        if self.is_moved and any(p is not None and p.data for p in (norm.gamma, norm.beta)):
            return Refusal("its scale or shift is data along an axis that has to be transposed", norm.y.name)
        return None


def axes_last(norm: Norm) -> TrailingAxes:
    """Return the normalized axes as the last ones: as they are, or moved there."""
    rank = len(norm.shape)
    axis = trailing_axis(norm)
    if axis is not None:
        return TrailingAxes(list(range(rank)), axis)
    perm = [a for a in range(rank) if a not in norm.axes] + list(norm.axes)
    return TrailingAxes(perm, rank - len(norm.axes))


def inverse_permutation(perm: Sequence[int]) -> list[int]:
    return [int(i) for i in np.argsort(perm)]


def format_epsilon(epsilon: float) -> str:
    """Epsilon as people write it: the shortest number that is the same float32."""
    if epsilon:
        return f"{float(np.float32(epsilon)):.7g}"
    return "0"
