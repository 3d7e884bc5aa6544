"""Parallel branches as one convolution: its weight as an expression, and the two lemmas that its proof needs.

**Displacements.** Tap t of a convolution reads, for the output at place s, the input at place s·stride + e with e =
t·dilation − pad, or a zero where there is none. So two taps with the same stride and e, over the same input and with as
many outputs, read the same numbers whatever kernels they belong to: one linear map G_e of the places. With stride 1, e
= 0 and as many outputs as inputs it is the identity.
Proof: t and pad enter the place in e alone; s·1 + 0 = s, for which there is a place. ∎ In the field G_e is a matrix of
random elements for each e (`normdeploy.proof.convolutions`), the identity where it is that; what holds for all such
matrices holds for these. Each tap has a point of its own, and so has each zero that is put around a smaller kernel.

**The unit matrix.** Of an axis of n places k hold values of their own and the others one, all the same
(docs/certificates.md); the point of the others has the weight n − k. The unit matrix maps tensors that are such to
such, the common value to itself. As a weight that is summed over with the points' weights w it is therefore δ/w: Σⱼ
wⱼ·(δᵢⱼ/wⱼ)·xⱼ = xᵢ. It is equal for any order of the places and of degree 0, so that the argument of degrees goes
through. ∎ It is used as a part of a weight that is summed over, nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from ..forms.constant_linear import ConstantLinear
from ..forms.fold_expressions import evaluate_bias, evaluate_scale_and_shift
from ..graphs.graph import Graph
from ..graphs.region import Region
from ..graphs.symbolic_sizes import Size
from ..proof.axis_plan import Atoms
from ..proof.computed_constants import ComputedConstants
from ..proof.interpreter import ProofInterpreter
from ..proof.proof_errors import NotProved, ProofFailure
from ..proof.region_evaluation import constant_value
from ..proof.value import Array, Value


@dataclass(frozen=True)
class BranchExpression:
    """``sign`` times a convolution, or times the scale and shift that ``chain`` is of the input.

    ``at``: the place of its first tap in the kernel that is written, for each axis.
    """

    sign: int
    linear: ConstantLinear | None
    chain: Region | None
    at: tuple[int, ...]


@dataclass(frozen=True)
class MergedBranchExpressions(ComputedConstants):
    """The constants of a convolution that branches were merged into, and what they are made of; ``frame`` has its
    kernel and attributes."""

    displaced = True

    parts: tuple[BranchExpression, ...]
    frame: ConstantLinear
    weight: gs.Constant
    bias: gs.Constant | None

    def computed_constants(self) -> list[gs.Constant]:
        return [self.weight, *([] if self.bias is None else [self.bias])]

    @property
    def _affine_chains(self) -> list[Region]:
        return [p.chain for p in self.parts if p.chain is not None]

    @property
    def nodes(self) -> Sequence[gs.Node]:
        return [n for c in self._affine_chains for n in c.nodes] + [
            p.linear.node for p in self.parts if p.linear is not None
        ]

    @property
    def leaves(self) -> Sequence[gs.Tensor]:
        return [t for c in self._affine_chains for t in c.leaves]

    def template_with_names(self, names: Mapping[int, object]) -> tuple[object, ...]:
        kinds = (
            (
                p.sign,
                p.linear is None,
                p.at,
                p.chain and p.chain.template_with_names(names),
                p.linear and p.linear.biased,
            )
            for p in self.parts
        )
        return ("branches", *kinds, self.bias is None)

    def evaluate_constants(self, m: ProofInterpreter, graph: Graph, *, absolute: bool = False) -> dict[int, Value]:
        kernel = [int(k) for k in self.frame.w.shape[2:]]
        weight = bias = m.number(0)
        for part in self.parts:
            w, c = self._evaluate_branch(m, graph, part)
            if absolute:
                w.f, c.f = np.abs(w.f), np.abs(c.f)
            w = _embed_kernel(m, w, kernel, part.at)
            if part.sign > 0 or absolute:
                add = m.add
            else:
                add = m.sub
            weight = add(weight, w)
            bias = add(bias, c)
        values = {id(self.weight): weight}
        if self.bias is not None:
            values[id(self.bias)] = bias
        return values

    def _evaluate_branch(self, m: ProofInterpreter, graph: Graph, part: BranchExpression) -> tuple[Value, Value]:
        """Return weight and bias of one branch as a convolution."""
        if part.linear is not None:
            return constant_value(m, graph, part.linear.node.inputs[1]), evaluate_bias(m, graph, part.linear)
        assert part.chain is not None
        a, c = evaluate_scale_and_shift(m, graph, part.chain)
        if a.sized or c.sized:
            raise NotProved(ProofFailure.SIZE, "a scale or shift of it depends on a size")
        taps = ((),) * (self.frame.w.ndim - 2)
        a = _as_channel_vector(m, a, self.frame.output_channels)
        c = _as_channel_vector(m, c, self.frame.output_channels)
        unit = _identity_weight(m, self.frame.output_channels, int(self.frame.w.shape[1]))
        return m.mul(a.with_axes((*a.axes, (), *taps)), unit.with_axes((*unit.axes, *taps))), c


def _as_channel_vector(m: ProofInterpreter, v: Value, n: int) -> Value:
    """A scale or shift that varies along the channels alone, or not at all, with one axis for these."""
    if v.a is None:
        array = v.f
    else:
        array = v.a
    atoms = m.plan.atoms_of(m.plan.size_of_length(n))
    kept = [i for i, k in enumerate(array.shape[1:], start=1) if k > 1]
    if not kept:
        flat = (1,) * (1 + len(atoms))
        return Value(
            (atoms,),
            None if v.a is None else v.a.reshape(v.a.shape[0], *flat[1:]),
            v.f.reshape(v.f.shape[0], *flat[1:]),
        )
    first = 1 + sum(len(axis) for axis in v.axes[:1])
    slots = range(first, first + len(atoms))
    shape = [array.shape[s] for s in slots]
    return Value(
        (atoms,), None if v.a is None else v.a.reshape(v.a.shape[0], *shape), v.f.reshape(v.f.shape[0], *shape)
    )


def _identity_weight(m: ProofInterpreter, channels: int, inputs: int) -> Value:
    """The unit matrix in each group, as a weight: output channels, and input channels of a group."""
    outer = m.plan.atoms_of(m.plan.size_of_length(channels))
    inner = m.plan.atoms_of(m.plan.size_of_length(inputs))
    exact: Array = np.ones((1,) * (1 + len(outer) + len(inner)), dtype=object)
    real: Array = np.ones(exact.shape, dtype=m.real)
    own = outer[len(outer) - len(inner) :]
    if own != inner and inner:
        m.plan.unify_atoms(own, inner)
    for i, atom in enumerate(inner):
        k = m.plan.point_count(atom)
        weights, floats = m._point_weights(atom)
        shape = [1] * exact.ndim
        shape[1 + len(outer) - len(inner) + i] = shape[1 + len(outer) + i] = k
        diagonal: Array = np.zeros((k, k), dtype=object)
        diagonal[np.arange(k), np.arange(k)] = 1 if weights is None or m.gf is None else m.gf.inverse(weights)
        exact = exact * diagonal.reshape(shape)
        real = real * np.diag(np.ones(k) if floats is None else 1 / floats).reshape(shape).astype(m.real)
    return Value((outer, inner), None if m.gf is None else exact, real)


def _embed_kernel(m: ProofInterpreter, w: Value, kernel: Sequence[int], at: Sequence[int]) -> Value:
    """A weight in a larger kernel, its first tap at ``at``, with zeros around it."""
    axes: list[Atoms] = list(w.axes[:2])
    head = 1 + sum(len(axis) for axis in axes)
    taps = [m.plan.atoms_of(Size.from_int(k)) for k in kernel]

    def embed_array(x: Array) -> Array:
        own = []
        slot = head
        # each tap has a point, or the axis none
        for axis in w.axes[2:]:
            own.append(1 if not axis else x.shape[slot])
            slot += len(axis)
        small = [1 if not axis else m.plan.point_count(axis[0]) for axis in w.axes[2:]]
        x = np.broadcast_to(x.reshape(*x.shape[:head], *own), (*x.shape[:head], *small))
        made: Array = np.zeros((*x.shape[:head], *kernel), dtype=x.dtype)
        made[(slice(None),) * head + tuple(slice(o, o + k) for o, k in zip(at, small, strict=True))] = x
        return made.reshape(*x.shape[:head], *(k for k in kernel if k > 1))

    return Value((*axes, *taps), None if w.a is None else embed_array(w.a), embed_array(w.f), degree=w.degree)
