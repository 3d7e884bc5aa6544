"""The parameters of a fold as expressions: what a folded weight is before it is rounded.

A chain of scales and shifts computes y = a·z + b of its input z, with b = chain(0) and a = chain(1) − b. A linear op
takes them as

    output channels   W' = a·W      c' = a·c + b
    input channels    W' = W·a      c' = c + Σ W·b

(`normdeploy.forms.constant_linear`). Here the same is worked out in the field, from the file's own nodes, for the
prover (`normdeploy.proof.computed_constants`).
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
    """What one linear op takes of a scale and shift, and the constants of the op that is written: `FoldExpressions`
    proves them, `normdeploy.rewriting.fold_accuracy` asks what they cost in accuracy."""

    linear: ConstantLinear
    # its output channels, its input channels, or those of its input without the shift
    side: Literal["output", "input", "scale"]
    # over these channels
    scale: np.ndarray
    shift: np.ndarray
    weight: gs.Constant
    bias: gs.Constant | None
    # views stand between
    viewed: bool = False
    # its first channel among those of the scale and shift
    start: int = 0
    # the channels of the scale and shift, where they are more
    whole: int = 0
    # which of the parts of a Concat it is
    index: int = 0


@dataclass(frozen=True)
class FoldExpressions(ComputedConstants):
    """What the constants of a fold are made of: the chain's scale a and shift b.

    ``chain``: from z to y. ``scale``, ``shift``, ``ratio``: constants that hold a, b and b/a themselves. ``shares``:
    the linear ops that take them.
    """

    chain: Region
    scale: tuple[gs.Constant, ...] = ()
    shift: tuple[gs.Constant, ...] = ()
    ratio: tuple[gs.Constant, ...] = ()
    shares: tuple[FoldShare, ...] = ()

    @property
    def nodes(self) -> Sequence[gs.Node]:
        return self.chain.nodes

    @property
    def leaves(self) -> Sequence[gs.Tensor]:
        return self.chain.leaves

    @property
    def weights(self) -> Sequence[np.ndarray]:
        return [values for share in self.shares for values in (share.linear.w, share.linear.c)]

    def template_with_names(self, names: Mapping[int, object]) -> tuple[object, ...]:
        return (
            self.chain.template_with_names(names),
            *((s.side, s.linear.node.op, s.start, s.whole, s.bias is None) for s in self.shares),
        )

    def computed_constants(self) -> list[gs.Constant]:
        taken = [c for share in self.shares for c in (share.weight, share.bias) if c is not None]
        return [*self.scale, *self.shift, *self.ratio, *taken]

    def evaluate_constants(self, m: ProofInterpreter, graph: Graph, *, absolute: bool = False) -> dict[int, Value]:
        # the parts of a Concat
        if self.shares and self.shares[0].whole:
            channels = tuple(m.plan.size_of_length(share.linear.output_channels) for share in self.shares)
            m.plan.join_axes(m.plan.size_of_length(self.shares[0].whole), channels)
        a, b = evaluate_scale_and_shift(m, graph, self.chain)
        # what is stored holds for one size
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
    """a = (chain(s) − chain(−s))/2s and b = chain(0); a large s, so that floats lose nothing where b is large against
    a."""
    axes = tuple(m.plan.atoms_of(s) for s in m.plan.shape_of_file(shape_of(graph, chain.leaves[0])))
    # as three draws of one evaluation
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
    # where b is divided by it; `stored.check_expressions` looks at every element
    a.nonzero = True
    return a, b


def _select_draw(y: Value, i: int) -> Value:
    """One draw of several; what does not depend on the draws has one."""
    place = slice(i, i + 1)
    return replace(
        y, a=None if y.a is None else y.a[place] if len(y.a) > 1 else y.a, f=y.f[place] if len(y.f) > 1 else y.f
    )


def _broadcast_to_shape(m: ProofInterpreter, v: Value, shape: Sequence[int]) -> Value:
    """``v``, which varies along few of its axes, in the shape of a constant."""
    wanted = tuple(m.plan.atoms_of(m.plan.size_of_length(n)) for n in shape)
    if v.a is None:
        array = v.f
    else:
        array = v.a
    atoms, _ = v.drop_constant_axes(array)
    flat = tuple(x for axis in wanted for x in axis)
    where = _atom_positions(flat, atoms)
    if where is None:
        raise NotProved(ProofFailure.LAYOUT, f"its scale or shift varies along {atoms}, a constant along {flat}")

    def broadcast_array(x: Any) -> Any:
        kept = x.reshape(x.shape[0], *(n for n in x.shape[1:] if n > 1))
        lengths = dict(zip(where, kept.shape[1:], strict=True))
        return kept.reshape(x.shape[0], *(lengths.get(i, 1) for i in range(len(flat))))

    return Value(
        wanted, None if v.a is None else broadcast_array(v.a), broadcast_array(v.f), sign=v.sign, degree=v.degree
    )


def _atom_positions(flat: Atoms, atoms: Atoms) -> list[int] | None:
    """Where ``atoms`` stand in ``flat``, in order."""
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
    """``v`` over the n channels that ``share`` takes."""
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
    linear = share.linear
    # only multiplied, by scales in float64
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
    if b is None:
        b = None
    else:
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
    """The bias before as a vector over the output channels: its own, times beta, or the constant that is added behind a
    MatMul."""
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
    """W·v along its output or its input channels."""
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
    """Σ W·b over input channels (and taps), a vector over the output channels."""
    y = _scale_channels(m, linear, w, b, output=False)
    if linear.node.op == "Conv":
        y = m.sum_over(y, range(1, len(y.axes)))
        return y.with_axes((y.axes[0],))
    rows = _has_channels_in_rows(linear, False)
    y = m.sum_over(y, [len(y.axes) - 2 if rows else len(y.axes) - 1])
    return y.with_axes((y.axes[-1] if rows else y.axes[-2],))


def _has_channels_in_rows(linear: ConstantLinear, output: bool) -> bool:
    """Whether the channels lie along the rows of the weight, the last axis but one."""
    if linear.node.op == "Gemm":
        return bool(linear.is_transposed) == output
    return bool(linear.weight == 1) != output
