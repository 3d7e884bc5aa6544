"""Express the constants of a fold by the constants of the original file, before rounding.

A chain of scales and shifts computes y = a·z + b from its input z, with b = chain(0) and a = chain(1) − b. A linear op
takes a and b as

    output channels   W' = a·W      c' = a·c + b
    input channels    W' = W·a      c' = c + Σ W·b

(`normdeploy.forms.constant_linear`). This module computes the same constants in the prover's field, from the nodes of
the original file (`normdeploy.proof.computed_constants`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import onnx_graphsurgeon as gs

from ..graphs.graph import Graph
from ..graphs.region import Region
from ..proof.axis_plan import Atoms
from ..proof.computed_constants import ComputedConstants
from ..proof.convolutions import merge_axes, split_channels
from ..proof.interpreter import ProofInterpreter
from ..proof.proof_errors import NotProved, ProofFailure
from ..proof.region_evaluation import constant_value, evaluate_region, shape_of
from ..proof.value import Value
from .constant_linear import ConstantLinear


@dataclass(frozen=True)
class FoldShare:
    """Part of a scale and shift that one linear op takes, and the constants of the written op.

    The prover checks the constants through `FoldExpressions`, and `normdeploy.rewriting.fold_accuracy` computes how
    much accuracy they cost.

    Attributes:
        side: "output" if the op's output channels take scale and shift, "input" if its input channels do, "scale" if
            its input channels take the scale only.
        scale, shift: vectors over these channels.
        weight, bias: the written constants.
        viewed: True if views lie between the chain and the op.
        start: index of the op's first channel among the channels of the scale and shift.
        whole: number of channels of the scale and shift if the op takes only a part of them; otherwise 0.
        index: index of the op among the parts of a Concat.
    """

    linear: ConstantLinear
    side: Literal["output", "input", "scale"]
    scale: np.ndarray
    shift: np.ndarray
    weight: gs.Constant
    bias: gs.Constant | None
    viewed: bool = False
    start: int = 0
    whole: int = 0
    index: int = 0


@dataclass(frozen=True)
class FoldExpressions(ComputedConstants):
    """Formulas of a fold's constants: the chain's scale a and shift b, and the linear ops that take them.

    Attributes:
        chain: region from z to y.
        scale, shift, ratio: constants of the written nodes that store a, b and b/a.
        shares: the linear ops that take a and b.
    """

    chain: Region
    scale: tuple[gs.Constant, ...] = ()
    shift: tuple[gs.Constant, ...] = ()
    ratio: tuple[gs.Constant, ...] = ()
    shares: tuple[FoldShare, ...] = ()

    @property
    def nodes(self) -> Sequence[gs.Node]:
        """Return the chain's nodes."""
        return self.chain.nodes

    @property
    def leaves(self) -> Sequence[gs.Tensor]:
        """Return the chain's leaves."""
        return self.chain.leaves

    @property
    def weights(self) -> Sequence[np.ndarray]:
        """Return the float64 weights and biases of the linear ops before the fold."""
        return [values for share in self.shares for values in (share.linear.w, share.linear.c)]

    def template_with_names(self, names: Mapping[int, object]) -> tuple[object, ...]:
        """Describe the fold's structure independent of tensor names.

        Returns:
            the chain's template with ``names``, and the structure of each share.
        """
        return (
            self.chain.template_with_names(names),
            *((s.side, s.linear.node.op, s.start, s.whole, s.bias is None) for s in self.shares),
        )

    def computed_constants(self) -> list[gs.Constant]:
        """List the constants whose values the fold computes.

        Returns:
            scales, shifts, ratios, then the weights and biases of the shares.
        """
        taken = [c for share in self.shares for c in (share.weight, share.bias) if c is not None]
        return [*self.scale, *self.shift, *self.ratio, *taken]

    def evaluate_constants(self, m: ProofInterpreter, graph: Graph, *, absolute: bool = False) -> dict[int, Value]:
        """Compute the constants in the proof's arithmetic.

        Args:
            absolute: use the magnitudes of a, b, weights and biases.

        Returns:
            values by the id of the constant.

        Raises:
            NotProved: the scale or shift depends on a size, or its axes don't match the axes of a constant.
        """
        # If ``whole`` is set, the linear ops compute the parts of a Concat.
        if self.shares and self.shares[0].whole:
            channels = tuple(m.plan.size_of_length(share.linear.output_channels) for share in self.shares)
            m.plan.join_axes(m.plan.size_of_length(self.shares[0].whole), channels)
        a, b = evaluate_scale_and_shift(m, graph, self.chain)
        # A stored constant is right for one size only, so the scale and shift must not depend on a size.
        if a.sized or b.sized:
            raise NotProved(ProofFailure.SIZE, "its scale or shift depends on a size")
        if absolute:
            a.f, b.f = np.abs(a.f), np.abs(b.f)
        values = {id(c): _broadcast_to_shape(m, a, c.shape) for c in self.scale}
        values |= {id(c): _broadcast_to_shape(m, b, c.shape) for c in self.shift}
        values |= {id(c): _broadcast_to_shape(m, m.div(b, a), c.shape) for c in self.ratio}
        for share in self.shares:
            values |= _evaluate_share(m, graph, share, a, None if share.side == "scale" else b, absolute=absolute)
        return values


def evaluate_scale_and_shift(m: ProofInterpreter, graph: Graph, chain: Region) -> tuple[Value, Value]:
    """Compute a = (chain(s) − chain(−s))/2s and b = chain(0).

    s is large, so that floats lose no digits if b is much larger than a.

    Returns:
        a and b, over the axes of the chain's output.
    """
    axes = tuple(m.plan.atoms_of(s) for s in m.plan.shape_of_file(shape_of(graph, chain.leaves[0])))
    # Evaluate the chain once with three draws: the inputs 0, s and −s.
    numbers = [m.number(n) for n in (0, 2**40, -(2**40))]
    flat = (len(numbers), *(1,) * sum(len(x) for x in axes))
    if m.gf is None:
        exact = None
    else:
        exact = np.concatenate([n.a.reshape(-1) for n in numbers if n.a is not None]).reshape(flat)
    z = Value(axes, exact, np.concatenate([n.f.reshape(-1) for n in numbers]).reshape(flat))
    y = evaluate_region(m, chain, {id(chain.leaves[0]): z})
    b, high, low = (_select_draw(y, i) for i in range(len(numbers)))
    a = m.mul(m.sub(high, low), m.number(Fraction(1, 2**41)))
    # b is divided by a, so declare a nonzero. `normdeploy.proof.stored_constants.check_fold_constants` checks every
    # element.
    a.nonzero = True
    return a, b


def _select_draw(y: Value, i: int) -> Value:
    """Select draw ``i``. If a value does not depend on the draws, return its only draw."""
    place = slice(i, i + 1)
    return replace(
        y, a=None if y.a is None else y.a[place] if len(y.a) > 1 else y.a, f=y.f[place] if len(y.f) > 1 else y.f
    )


def _broadcast_to_shape(m: ProofInterpreter, v: Value, shape: Sequence[int]) -> Value:
    """Broadcast ``v``, which varies along few of its axes, to the shape of a constant."""
    wanted = tuple(m.plan.atoms_of(m.plan.size_of_length(n)) for n in shape)
    if v.a is None:
        array = v.f
    else:
        array = v.a
    atoms, _ = v.drop_constant_axes(array)
    flat = tuple(x for axis in wanted for x in axis)
    where = _atom_positions(flat, atoms)
    if where is None:
        raise NotProved(
            ProofFailure.LAYOUT, f"its scale or shift varies along {atoms}, but a constant varies along {flat}"
        )

    def broadcast_array(x: Any) -> Any:
        kept = x.reshape(x.shape[0], *(n for n in x.shape[1:] if n > 1))
        lengths = dict(zip(where, kept.shape[1:], strict=True))
        return kept.reshape(x.shape[0], *(lengths.get(i, 1) for i in range(len(flat))))

    return Value(
        wanted, None if v.a is None else broadcast_array(v.a), broadcast_array(v.f), sign=v.sign, degree=v.degree
    )


def _atom_positions(flat: Atoms, atoms: Atoms) -> list[int] | None:
    """Find the positions of ``atoms`` in ``flat``, in order; None if one is missing."""
    positions = []
    at = 0
    for atom in atoms:
        while at < len(flat) and flat[at] != atom:
            at += 1
        if at == len(flat):
            return None
        positions.append(at)
        at += 1
    return positions


def _channel_vector(m: ProofInterpreter, v: Value, n: int, share: FoldShare) -> Value:
    """Return ``v`` as a vector over the n channels that ``share`` takes."""
    if not share.whole:
        return _broadcast_to_shape(m, v, (n,))
    whole = _broadcast_to_shape(m, v, (share.whole,))
    bounds = m.plan.part_bounds(m.plan.size_of_length(share.whole))
    size = m.plan.size_of_length(n)
    atoms = m.plan.atoms_of(size)
    if whole.f.shape[1] == 1:
        if len(atoms) == 1:
            return whole.with_axes((atoms,))
        return whole.with_axes(((),))
    part = slice(bounds[share.index], bounds[share.index + 1])
    counts = [m.plan.point_count(x) for x in atoms]

    def slice_array(x: Any) -> Any:
        return x[:, part].reshape(x.shape[0], *counts)

    return Value(
        (atoms,),
        None if whole.a is None else slice_array(whole.a),
        slice_array(whole.f),
        sign=whole.sign,
        degree=whole.degree,
    )


def _evaluate_share(
    m: ProofInterpreter, graph: Graph, share: FoldShare, a: Value, b: Value | None, *, absolute: bool
) -> dict[int, Value]:
    """Compute weight and bias of one linear op, keyed by the id of the constant."""
    linear = share.linear
    # The weight is only multiplied by scales in float64, so it may stay in its narrow type.
    w = constant_value(m, graph, linear.node.inputs[linear.weight], narrow=True)
    c = evaluate_bias(m, graph, linear)
    if linear.node.op == "Gemm":
        alpha = linear.node.attrs.get("alpha", 1.0)
    else:
        alpha = 1.0
    if alpha != 1.0:
        w = m.mul(m.number(float(alpha)), w)
    if absolute:
        w.f, c.f = np.abs(w.f), np.abs(c.f)
    if share.side == "output":
        side = linear.output_channels
    else:
        side = linear.input_channels
    a = _channel_vector(m, a, side, share)
    if b is not None:
        b = _channel_vector(m, b, side, share)
    if share.side == "output":
        weight = _scale_channels(m, linear, w, a, output=True)
        bias = m.add(m.mul(a, c), b) if b is not None else m.mul(a, c)
    else:
        weight = _scale_channels(m, linear, w, a, output=False)
        if b is None:
            bias = c
        else:
            bias = m.add(c, _sum_over_inputs(m, linear, w, b))
    values = {id(share.weight): weight}
    if share.bias is not None:
        shape = share.bias.shape
        values[id(share.bias)] = _broadcast_to_shape(m, bias, shape) if len(shape) != 1 or bias.axes else bias
    return values


def evaluate_bias(m: ProofInterpreter, graph: Graph, linear: ConstantLinear) -> Value:
    """Compute the bias before the fold: the op's bias times beta, or the constant that is added to a MatMul.

    Returns:
        a vector over the output channels, or a single 0.
    """
    if linear.biased:
        c = _flatten_value(constant_value(m, graph, linear.node.inputs[2]))
        if linear.node.op == "Gemm":
            beta = linear.node.attrs.get("beta", 1.0)
        else:
            beta = 1.0
        if beta == 1.0:
            return c
        return m.mul(m.number(float(beta)), c)
    if len(linear.nodes) == 2:
        added = next(t for t in linear.nodes[1].inputs if t is not linear.node.outputs[0])
        return _flatten_value(constant_value(m, graph, added))
    return m.constant(np.zeros(1))


def _flatten_value(v: Value) -> Value:
    return v.with_axes((v.atoms,))


def _scale_channels(m: ProofInterpreter, linear: ConstantLinear, w: Value, v: Value, output: bool) -> Value:
    """Multiply W by v along its output or input channels."""
    op = linear.node.op
    ones = ((),) * (len(w.axes) - 2)
    if op in ("Conv", "ConvTranspose"):
        # (g, o, i, …) or, transposed, (g, i, o, …)
        cut = split_channels(m, w, 0, linear.groups)
        v = split_channels(m, v, 0, linear.groups)
        if output != (op == "ConvTranspose"):
            own = 1
        else:
            own = 2
        laid = v.with_axes((v.axes[0], v.axes[1], (), *ones) if own == 1 else (v.axes[0], (), v.axes[1], *ones))
        return merge_axes(m.mul(cut, laid), 0)
    rows = _has_channels_in_rows(linear, output)
    return m.mul(w, v.with_axes((*v.axes, ())) if rows else v)


def _sum_over_inputs(m: ProofInterpreter, linear: ConstantLinear, w: Value, b: Value) -> Value:
    """Sum W·b over input channels and kernel taps; the result is a vector over the output channels."""
    y = _scale_channels(m, linear, w, b, output=False)
    if linear.node.op == "Conv":
        y = m.sum_over(y, range(1, len(y.axes)))
        return y.with_axes((y.axes[0],))
    rows = _has_channels_in_rows(linear, False)
    y = m.sum_over(y, [len(y.axes) - 2 if rows else len(y.axes) - 1])
    return y.with_axes((y.axes[-1] if rows else y.axes[-2],))


def _has_channels_in_rows(linear: ConstantLinear, output: bool) -> bool:
    """Return True if the channels lie along the rows of the weight, its second-to-last axis."""
    if linear.node.op == "Gemm":
        return bool(linear.is_transposed) == output
    return bool(linear.weight == 1) != output
