"""Check that a fold costs no accuracy, by running both sides in the model's type on inputs that fit the statistics.

A fold computes the same function, but not always as accurately. (z − mean)/std is exact to an ulp even if mean/std is
1e6. After a fold into the next linear op, W·(z/std) and W·(mean/std) are large: each of them is rounded, and their
difference is small. The rule, for each channel:

    error after ≤ 4 · error before + 4 ulp        (ulp of the channel's largest result; errors are the largest over
                                                  the drawn inputs)

**Inputs.** The input z of a BatchNormalization is drawn from N(running mean, running variance) of its channel. The
input of an explicit scale a and shift b is drawn from N(−b/a, 1/a²), so that the result has magnitude one. If the
linear op comes before the norm, its input x is drawn so that z = w·x + c has this distribution, N(m, σ²). So x ~ N(μ,
s²·I), where s = σ/|w| and μ = w·(m − c)/|w|², the shortest possible mean.

**Arithmetic.** Each node's result is rounded to its type. A linear op sums in float32, as kernels do even for half
precision. A BatchNormalization is computed as runtimes do: γ/sqrt(var + ε) · z + (β − mean·γ/sqrt(var + ε)). Results of
a float64 model are rounded to float32, but its constants are not rounded. This is allowed because the ratio of the
errors does not depend on the unit roundoff.

Nothing here depends on the sizes of the model's tensors. For a convolution, one window is evaluated without strides and
dilations. At most `_ROWS` output channels are evaluated: those with most cancellation, and some others spread evenly.
Each channel has at most `weight_rows.TAPS` products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx_graphsurgeon as gs

from ..compare.element_errors import absolute_difference
from ..compare.rewrite_errors import TIMES, ULPS
from ..compare.verdict import Verdict, nearest_to_bound
from ..dtypes import UNIT_ROUNDOFF
from ..evaluate import evaluator
from ..forms.batch_norm import AffineFold, FoldShare
from ..forms.constant_linear import ConstantLinear
from ..graphs.graph import Graph
from ..graphs.region import Refusal
from ..recognition.affine_chains import AffineChain
from .weight_rows import cancellation_factors, select_rows, weight_row, weight_table

_DRAWS = 8
# Maximum number of output channels to evaluate
_ROWS = 24
# Maximum number of evaluated places of a convolution's window
_WINDOW = 9
_POOL = 2**17


class RunChain(Protocol):
    """Function that computes a scale and shift of z."""

    def __call__(self, z: np.ndarray, *, rounding: bool) -> np.ndarray:
        """Compute y from z, both of shape (draws, channels).

        Args:
            rounding: True to round each result as the runtime does; False to compute in float64.

        Returns:
            y in float64.
        """


@dataclass(frozen=True)
class CostlyFold(Refusal):
    """Refusal of a fold that would cost accuracy."""


def drop_costly_fold(graph: Graph, chain: AffineChain, form: AffineFold | Refusal) -> AffineFold | Refusal:
    """Refuse a fold that costs accuracy.

    Returns:
        ``form``, or the refusal with the worst channel.
    """
    if isinstance(form, Refusal):
        return form
    with evaluator.silence_numpy():
        if form.shares:
            losses = [_loss_of_share(graph, chain, share) for share in form.shares]
        else:
            losses = [_loss_of_lone_chain(graph, chain)]
    worst = max((loss for loss in losses if loss is not None), key=lambda loss: loss.after.bound_ratio, default=None)
    if worst is None:
        return form
    if worst.into:
        into = f"folded into {worst.into}, it"
    else:
        into = "as one scale and shift, it"
    reason = (
        f"{into} would lose accuracy: for inputs with its stored statistics, the error in channel "
        f"{worst.channel} ({chain.dtype.name}) would grow from {worst.before:.2g} to {worst.after.error:.2g}; "
        f"the limit is {TIMES} times the error before plus {ULPS} ulp"
    )
    return CostlyFold(reason, chain.y.name)


@dataclass(frozen=True)
class AccuracyLoss:
    """Channel in which a fold exceeds the allowed error by the largest factor.

    Attributes:
        channel: number of the channel.
        before: largest error before the fold, against float64.
        after: verdict on the error after the fold.
        into: name of the linear op for messages; "" without a linear op.
    """

    channel: int
    before: float
    after: Verdict
    into: str


# ------------------------------------------------------------------ the scale and shift


@dataclass(frozen=True)
class _StatedAffine:
    """Scale and shift over the channels of a fold, with the distribution of z that it implies.

    Attributes:
        run: computes the scale and shift.
        mean: mean of z per channel.
        spread: standard deviation of z per channel.
    """

    run: RunChain
    mean: np.ndarray
    spread: np.ndarray


def stated_affine(
    graph: Graph, chain: AffineChain, a: np.ndarray, b: np.ndarray, axis: int | None, channels: int
) -> _StatedAffine:
    """Read the distribution of z from the statistics of a scale and shift.

    Args:
        a: scale per channel.
        b: shift per channel.
        axis: axis of the channels in z; None if the chain contains views, so that only ``a`` and ``b`` are known.
        channels: number of channels.

    Returns:
        the function with the distribution of its input.
    """
    batched = next((n for n in chain.nodes if n.op == "BatchNormalization"), None)
    if axis is not None:
        run = _chain_by_nodes(graph, chain, axis, channels)
    else:
        run = None
    if batched is not None and batched.inputs[0] is chain.z and axis == 1:
        known = [graph.known_value(t) for t in batched.inputs[3:5]]
        if all(v is not None and v.size == channels for v in known):
            mean, variance = (np.asarray(v).reshape(-1) for v in known)
            return _StatedAffine(
                run or most_accurate_chain(chain, a, b, shifted=True), mean, np.sqrt(np.maximum(variance, 0))
            )
    mean, spread = (np.where(a != 0, v / np.where(a != 0, a, 1), neutral) for v, neutral in ((-b, 0.0), (1.0, 1.0)))
    return _StatedAffine(run or most_accurate_chain(chain, a, b, shifted=batched is not None), mean, np.abs(spread))


def most_accurate_chain(chain: AffineChain, a: np.ndarray, b: np.ndarray, *, shifted: bool) -> RunChain:
    """Build a closed form for a chain that cannot be run node by node.

    Args:
        shifted: True to compute a·z + b; False to compute the more accurate (z + b/a)·a.

    Returns:
        a function of z.
    """
    stored = (
        round_to_dtype(a, chain.dtype),
        round_to_dtype(b, chain.dtype),
        round_to_dtype(np.where(a != 0, b / np.where(a != 0, a, 1), 0), chain.dtype),
    )

    def run_chain(z: np.ndarray, *, rounding: bool) -> np.ndarray:
        if not rounding:
            return z * a + b
        if shifted:
            return round_to_dtype(round_to_dtype(z * stored[0], chain.dtype) + stored[1], chain.dtype)
        return np.where(
            a != 0, round_to_dtype(round_to_dtype(z + stored[2], chain.dtype) * stored[0], chain.dtype), stored[1]
        )

    return run_chain


def _chain_by_nodes(graph: Graph, chain: AffineChain, axis: int, channels: int) -> RunChain | None:
    """Build a function that runs the chain node by node, at one place per draw; None if it needs the file's sizes."""
    rank = max(chain.scale.ndim, 1)
    along = next((i for i in range(rank) if i != axis), None)
    if along is None:
        return None

    def run_chain(z: np.ndarray, *, rounding: bool) -> np.ndarray:
        laid = np.moveaxis(z.reshape(*z.shape, *[1] * (rank - 2)), (0, 1), (along, axis))
        y = _evaluate_chain(graph, chain, laid, rounding=rounding)
        return np.moveaxis(y, (along, axis), (0, 1)).reshape(z.shape)

    probe = np.random.default_rng(3).standard_normal((2, channels))
    try:
        y = run_chain(probe, rounding=False)
        a, b = (np.broadcast_to(_channel_vector(v, channels), (channels,)) for v in (chain.scale, chain.shift))
    except Exception:
        # numpy raises various errors for sizes that do not fit.
        return None
    if np.allclose(y, a * probe + b, rtol=1e-6, atol=1e-6 * (1 + float(np.abs(b).max()))):
        return run_chain
    return None


def _channel_vector(values: np.ndarray, channels: int) -> np.ndarray:
    if values.size not in (1, channels):
        raise ValueError(f"{values.size} values for {channels} channels")
    return values.reshape(-1)


def _evaluate_chain(graph: Graph, chain: AffineChain, z: np.ndarray, *, rounding: bool) -> np.ndarray:
    """Run the chain on ``z``; if ``rounding``, round each node's result to its type."""
    values: dict[int, Any] = {id(chain.z): z}
    for node in chain.region.nodes:
        inputs = [
            None
            if t.is_empty()
            else values[id(t)]
            if id(t) in values
            else _constant_value(graph, chain, t, rounding=rounding)
            for t in node.inputs
        ]
        if node.op == "BatchNormalization":
            made: tuple[Any, ...] = (_evaluate_batch_norm(graph, chain, node, inputs, rounding=rounding),)
        else:
            made = graph.node_evaluator(node)(inputs)
        for t, value in zip(node.outputs, made, strict=False):
            floating = isinstance(value, np.ndarray) and value.dtype.kind == "f"
            values[id(t)] = round_to_dtype(value, chain.dtype, graph.dtype(t)) if rounding and floating else value
    return np.asarray(values[id(chain.y)])


def _evaluate_batch_norm(
    graph: Graph, chain: AffineChain, node: gs.Node, inputs: list[Any], *, rounding: bool
) -> np.ndarray:
    z, gamma, beta, mean, variance = inputs[:5]
    shape = (-1, *[1] * (z.ndim - 2))
    scale = gamma / np.sqrt(variance + float(graph.attrs(node).get("epsilon", 1e-5)))
    if not rounding:
        return np.asarray((z - mean.reshape(shape)) * scale.reshape(shape) + beta.reshape(shape))
    scale = round_to_dtype(scale, chain.dtype)
    shift = round_to_dtype(beta - round_to_dtype(mean * scale, chain.dtype), chain.dtype)
    return np.asarray(round_to_dtype(z * scale.reshape(shape), chain.dtype) + shift.reshape(shape))


def _constant_value(graph: Graph, chain: AffineChain, t: gs.Tensor, *, rounding: bool) -> np.ndarray:
    """Read a constant. If ``rounding``, round a computed constant as it will be stored."""
    value = graph.value(t)
    computed = not isinstance(t, gs.Constant) or id(t) in graph.exact
    if rounding and computed and value.dtype.kind == "f":
        return round_to_dtype(value, chain.dtype, graph.dtype(t))
    return value


def round_to_dtype(values: np.ndarray, dtype: np.dtype, own: np.dtype | None = None) -> np.ndarray:
    """Round to the model's type, or to the node's type ``own`` if that is given.

    The values of a float64 model are rounded to float32. In other models, an ``own`` of float64 is not rounded.

    Args:
        own: type of the node's result; None for the model's.

    Returns:
        the rounded values in float64.
    """
    if dtype == np.float64:
        kind = np.dtype(np.float32)
    elif own is None:
        kind = dtype
    else:
        kind = own
    if kind == np.float64:
        return values
    return np.asarray(np.asarray(values).astype(kind), dtype=np.float64)


# ------------------------------------------------------------------ what a fold makes of it


def _loss_of_lone_chain(graph: Graph, chain: AffineChain) -> AccuracyLoss | None:
    """Measure the loss, for each element, if a chain becomes one Mul and one Add."""
    shape = np.broadcast_shapes(chain.scale.shape, chain.shift.shape)
    varying = [i for i, n in enumerate(shape) if n > 1]
    a, b = (np.broadcast_to(v, shape).reshape(-1) for v in (chain.scale, chain.shift))
    if varying:
        channel = varying[0]
    else:
        channel = min(1, len(shape) - 1)
    stated = stated_affine(graph, chain, a, b, channel if len(varying) < 2 and shape else None, a.size)
    z = round_to_dtype(
        stated.mean + stated.spread * normal_numbers(_DRAWS * a.size).reshape(_DRAWS, a.size), chain.dtype
    )
    after = most_accurate_chain(chain, a, b, shifted=True)(z, rounding=True)
    exact = stated.run(z, rounding=False)
    before = stated.run(z, rounding=True)
    return worst_channel(exact, before, after, chain.dtype, np.arange(a.size), "")


def _loss_of_share(graph: Graph, chain: AffineChain, share: FoldShare) -> AccuracyLoss | None:
    rank = max(chain.scale.ndim, 1)
    linear = share.linear
    channels = len(share.scale)
    if share.side == "output":
        axis = linear.channel_axis(rank)
    else:
        axis = linear.input_channel_axis(rank)
    # If the linear op makes one part of a Concat, the chain covers the channels of all parts.
    if share.whole:
        every = [np.broadcast_to(_channel_vector(v, share.whole), (share.whole,)) for v in (chain.scale, chain.shift)]
    else:
        every = [share.scale, share.shift]
    stated = stated_affine(graph, chain, every[0], every[1], None if share.viewed else axis, share.whole or channels)
    if share.side == "output":
        return _loss_of_fold_into_previous(chain, share, stated)
    return _loss_of_fold_into_next(chain, share, stated)


def _loss_of_fold_into_previous(chain: AffineChain, share: FoldShare, stated: _StatedAffine) -> AccuracyLoss | None:
    """Measure the loss of a·(W·x + c) + b folded to (a·W)·x + (a·c + b)."""
    linear = share.linear
    dtype = chain.dtype
    own = slice(share.start, share.start + len(share.scale))
    mean = stated.mean[own]
    spread = stated.spread[own]
    bias = np.broadcast_to(linear.c, (linear.output_channels,))
    cancels = (np.abs(share.scale * mean) + np.abs(share.shift)) / (
        np.abs(share.scale) * spread + np.abs(share.scale * mean + share.shift)
    )
    table = weight_table(linear)
    rows = [
        weight_row(linear, table, int(r)) for r in select_rows(np.nan_to_num(np.resize(cancels, len(table))), _ROWS)
    ]
    exact, before, after = (np.tile(stated.mean, (_DRAWS, 1)) for _ in range(3))
    channels = np.array([row.output for row in rows], dtype=int)

    def find_loss(among: np.ndarray) -> AccuracyLoss | None:
        cut = share.start + among
        whole = stated.run(exact, rounding=False)
        rounded = stated.run(before, rounding=True)
        return worst_channel(whole[:, cut], rounded[:, cut], after[:, cut], dtype, among, linear.title)

    losses: list[AccuracyLoss | None] = []
    for row in rows:
        o = row.output
        w = row.weights.reshape(-1)
        # A filter of zeros returns its bias for any x. The threads of BLAS would cost more than they save.
        size = float(np.square(w).sum()) or 1.0
        noise = normal_numbers(_DRAWS * w.size).reshape(_DRAWS, w.size)
        x = round_to_dtype(noise * (spread[o] / np.sqrt(size)) + w * ((mean[o] - bias[o]) / size), dtype)
        folded = (
            round_to_dtype(w * share.scale[o], dtype),
            round_to_dtype(share.scale[o] * bias[o] + share.shift[o], dtype),
        )
        products = x * w
        exact[:, share.start + o] = products.sum(axis=1) + bias[o]
        before[:, share.start + o] = sum_products(linear, products, bias[o], dtype)
        after[:, share.start + o] = sum_products(linear, x * folded[0], folded[1], dtype)
        # If the rows come from several matrices of one MatMul, each matrix is judged alone.
        if np.count_nonzero(channels == o) > 1:
            losses.append(find_loss(np.array([o])))
    losses.append(find_loss(np.unique(channels)))
    return max((loss for loss in losses if loss is not None), key=lambda loss: loss.after.bound_ratio, default=None)


def _loss_of_fold_into_next(chain: AffineChain, share: FoldShare, stated: _StatedAffine) -> AccuracyLoss | None:
    """Measure the loss of W·(a·z + b) + c folded to (W·a)·z + (c + W·b), or to (W·a)·(z + b/a) + c."""
    linear = share.linear
    dtype = chain.dtype
    inputs = len(share.scale)
    table = weight_table(linear)
    taps = min(table.shape[2], _WINDOW)
    draws = max(2, min(_DRAWS, 2**19 // max(1, taps * inputs)))
    z = round_to_dtype(
        stated.mean + stated.spread * normal_numbers(draws * taps * inputs).reshape(draws * taps, inputs), dtype
    )
    y = stated.run(z, rounding=False).reshape(draws, taps, inputs)
    computed = stated.run(z, rounding=True).reshape(draws, taps, inputs)
    z = z.reshape(draws, taps, inputs)
    if share.side == "scale":
        z = round_to_dtype(z + round_to_dtype(share.shift / share.scale, dtype), dtype)
    bias = np.broadcast_to(linear.c, (linear.output_channels,))
    exact = []
    before = []
    after = []
    channels = []
    large = np.abs(share.scale) * (np.abs(stated.mean) + stated.spread) + np.abs(share.shift)
    small = np.abs(share.scale) * stated.spread + np.abs(share.scale * stated.mean + share.shift)
    for r in select_rows(cancellation_factors(linear, table, large, small), _ROWS):
        row = weight_row(linear, table, int(r))
        w = row.weights
        o = row.output
        cut = slice(None) if w.shape[1] == taps else np.linspace(0, w.shape[1] - 1, taps).astype(int)
        # Weights: (taps, inputs of the row).
        w = w[:, cut].T
        folded = round_to_dtype(w * share.scale[row.inputs], dtype)
        if share.side == "scale":
            shifted = bias[o]
        else:
            shifted = round_to_dtype(bias[o] + (w * share.shift[row.inputs]).sum(), dtype)
        exact.append((y[..., row.inputs] * w).sum(axis=(1, 2)) + bias[o])
        before.append(sum_products(linear, (computed[..., row.inputs] * w).reshape(draws, -1), bias[o], dtype))
        after.append(sum_products(linear, (z[..., row.inputs] * folded).reshape(draws, -1), shifted, dtype))
        channels.append(o)
    return worst_channel(
        np.array(exact).T, np.array(before).T, np.array(after).T, dtype, np.array(channels), linear.title
    )


def sum_products(linear: ConstantLinear, products: np.ndarray, bias: np.ndarray | float, dtype: np.dtype) -> np.ndarray:
    """Sum each row in float32 and add the bias. The bias of a MatMul is a separate Add.

    Returns:
        one number per row, rounded to ``dtype``, in float64.
    """
    # numpy sums pairwise.
    total = np.ascontiguousarray(products, dtype=np.float32).sum(axis=1, dtype=np.float32).astype(np.float64)
    return round_to_dtype((round_to_dtype(total, dtype) if linear.node.op == "MatMul" else total) + bias, dtype)


def worst_channel(
    exact: np.ndarray, before: np.ndarray, after: np.ndarray, dtype: np.dtype, channels: np.ndarray, into: str
) -> AccuracyLoss | None:
    """Find the channel that exceeds the rule most.

    Args:
        exact: results in float64, (draws, channels).
        before: results of the nodes before, (draws, channels).
        after: results after the fold, (draws, channels).
        channels: number of each column's channel.
        into: name of the linear op for messages.

    Returns:
        the channel; None if no channel exceeds the rule.
    """
    valid = np.isfinite(exact) & np.isfinite(before)
    was, now = (np.where(valid, absolute_difference(y, exact), 0.0).max(axis=0, initial=0.0) for y in (before, after))
    allowed = TIMES * was + ULPS * 2 * _unit(dtype) * np.where(valid, np.abs(exact), 0.0).max(axis=0, initial=0.0)
    verdict = nearest_to_bound(now, allowed)
    if verdict:
        return None
    return AccuracyLoss(int(channels[verdict.place]), float(was[verdict.place]), verdict, into)


def _unit(dtype: np.dtype) -> float:
    """Return the unit roundoff of the dtype. For float64 it is that of float32, to which float64 is rounded here."""
    return UNIT_ROUNDOFF["float32" if dtype == np.float64 else dtype.name]


_NORMAL = np.random.default_rng(23).standard_normal(_POOL)
_NORMAL.setflags(write=False)


def normal_numbers(count: int) -> np.ndarray:
    """Return standard normal numbers from a fixed pool, because drawing new numbers would take most of the time.

    Returns:
        (count,), the same numbers in each call. Up to `_POOL` numbers are a view of the pool.
    """
    if count <= _POOL:
        return _NORMAL[:count]
    return np.resize(_NORMAL, count)
