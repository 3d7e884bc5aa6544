"""Express the weight of merged parallel branches for the prover, and state the two lemmas that the proof needs.

**Displacements.** Let e = t·dilation − pad. For the output at place s, tap t of a convolution reads the input at place
s·stride + e, or a zero if the input has no such place. Two taps, also of different kernels, read the same numbers if
stride, e, input and number of outputs are equal. So each e gives one linear map G_e of the places. With stride 1, e = 0
and as many outputs as inputs, G_e is the identity.

Proof: the place depends on t and pad only through e. For stride 1 and e = 0 it is s·1 + 0 = s, and the input has this
    place. ∎

In the prover's finite field, each G_e is a matrix of random elements (`normdeploy.proof.convolutions`), or the identity
as above. An equation that holds for all matrices holds for the matrices of the convolution. Each tap has its own point,
and each zero around a smaller kernel has its own point too.

**The unit matrix.** Of an axis of n places, k places hold separate values, and all other places share one value
(docs/explanation/certificates.md). The point of the shared value has weight n − k. The unit matrix maps a tensor of
this form to itself. The prover sums over points with their weights w, so it writes the unit matrix as δ/w: Σⱼ
wⱼ·(δᵢⱼ/wⱼ)·xⱼ = xᵢ. δ/w does not depend on the order of the places and has degree 0, so the proof's bound on degrees
still holds. ∎

The unit matrix is used only inside a weight. The product with the weight then sums over this axis.
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
    """Branch of a merged convolution, with its sign: a convolution, or the scale and shift of the input.

    Attributes:
        sign: 1 or −1.
        linear: the convolution; None for a scale and shift.
        chain: the scale and shift; None for a convolution.
        at: position of the branch's first tap in the written kernel, for each axis.
    """

    sign: int
    linear: ConstantLinear | None
    chain: Region | None
    at: tuple[int, ...]


@dataclass(frozen=True)
class MergedBranchExpressions(ComputedConstants):
    """Constants of a convolution that merges branches, with their expressions.

    Attributes:
        parts: the branches.
        frame: the convolution whose kernel and attributes the result has.
        weight: the computed weight.
        bias: the computed bias; None if there is none.
    """

    displaced = True

    parts: tuple[BranchExpression, ...]
    frame: ConstantLinear
    weight: gs.Constant
    bias: gs.Constant | None

    def computed_constants(self) -> list[gs.Constant]:
        """Return weight and bias.

        Returns:
            one or two constants.
        """
        return [self.weight, *([] if self.bias is None else [self.bias])]

    @property
    def _affine_chains(self) -> list[Region]:
        return [p.chain for p in self.parts if p.chain is not None]

    @property
    def nodes(self) -> Sequence[gs.Node]:
        """Return the nodes of the branches."""
        return [n for c in self._affine_chains for n in c.nodes] + [
            p.linear.node for p in self.parts if p.linear is not None
        ]

    @property
    def leaves(self) -> Sequence[gs.Tensor]:
        """Return the leaves of the scales and shifts."""
        return [t for c in self._affine_chains for t in c.leaves]

    def template_with_names(self, names: Mapping[int, object]) -> tuple[object, ...]:
        """Return a key that is equal for merges that differ only in the elements of larger constants.

        Returns:
            a hashable tuple.
        """
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
        """Compute weight and bias from the file's constants.

        Returns:
            values by the ids of the constants.

        Raises:
            NotProved: a scale or shift depends on a size.
        """
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
            raise NotProved(ProofFailure.SIZE, "one of its scales or shifts depends on a size")
        taps = ((),) * (self.frame.w.ndim - 2)
        a = _as_channel_vector(m, a, self.frame.output_channels)
        c = _as_channel_vector(m, c, self.frame.output_channels)
        unit = _identity_weight(m, self.frame.output_channels, int(self.frame.w.shape[1]))
        return m.mul(a.with_axes((*a.axes, (), *taps)), unit.with_axes((*unit.axes, *taps))), c


def _as_channel_vector(m: ProofInterpreter, v: Value, n: int) -> Value:
    """Return a scale or shift that varies at most along the channels as a vector over the channels."""
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
    """Build the unit matrix of each group as a weight (output channels, input channels of a group)."""
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
    """Embed a weight into a larger kernel with zeros around it; its first tap goes to ``at``."""
    axes: list[Atoms] = list(w.axes[:2])
    head = 1 + sum(len(axis) for axis in axes)
    taps = [m.plan.atoms_of(Size.from_int(k)) for k in kernel]

    def embed_array(x: Array) -> Array:
        own = []
        slot = head
        # Each tap of an axis has a point. An axis of one tap has no slot in the array.
        for axis in w.axes[2:]:
            own.append(1 if not axis else x.shape[slot])
            slot += len(axis)
        small = [1 if not axis else m.plan.point_count(axis[0]) for axis in w.axes[2:]]
        x = np.broadcast_to(x.reshape(*x.shape[:head], *own), (*x.shape[:head], *small))
        made: Array = np.zeros((*x.shape[:head], *kernel), dtype=x.dtype)
        made[(slice(None),) * head + tuple(slice(o, o + k) for o, k in zip(at, small, strict=True))] = x
        return made.reshape(*x.shape[:head], *(k for k in kernel if k > 1))

    return Value((*axes, *taps), None if w.a is None else embed_array(w.a), embed_array(w.f), degree=w.degree)
