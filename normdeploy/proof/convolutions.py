"""Evaluate convolutions as sums over taps of gathered places.

y[n, o, s] = Σ_{i,t} W[o, i, t]·(G x)[n, i, s, t]. For each place s of the output and each tap t of the kernel, the
gather G reads one place of the input. It reads a zero instead if the tap lies in the padding or, in a transposed
convolution, between the strides.

Only strides, dilations and pads determine G, and an identity that holds for every linear G holds for the actual G. Two
properties of G must stay: equal attributes give the same G, and without padding its rows add up to one. So the field
uses one random matrix G for each set of attributes. A G that copies elements would be a weak test, because with few
points two taps read the same point. The size of the matrix does not depend on strides and dilations.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..evaluate.evaluator_core import decode_text, optional_input
from ..graphs.symbolic_sizes import AxisSize, Size, product_of_sizes
from .axis_plan import Atoms, Axes
from .degree import Degree
from .interpreter import ProofInterpreter
from .modular_products import modular_matmul
from .op_definitions import Attrs, Inputs, Op, broadcast_over_channels, lift_input
from .proof_errors import NotProved, ProofFailure
from .value import Array, Value, axis_identity

_PLACES = "places of a convolution"


def split_channels(m: ProofInterpreter, x: Value, axis: int, groups: int) -> Value:
    """Split an axis of g·c places into two axes of g and c places.

    Args:
        axis: number of the axis.
        groups: g.

    Returns:
        ``x`` with one more axis.
    """
    head, tail = m.plan.regroup_atoms(x.axes[axis], [Size.from_int(groups), None])
    return x.with_axes((*x.axes[:axis], head, tail, *x.axes[axis + 1 :]))


def merge_axes(x: Value, axis: int) -> Value:
    """Merge axis ``axis`` with the next one.

    Returns:
        ``x`` with one axis fewer.
    """
    return x.with_axes((*x.axes[:axis], x.axes[axis] + x.axes[axis + 1], *x.axes[axis + 2 :]))


def _convolution_op(transposed: bool) -> Op:
    def run(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
        x = lift_input(m, inputs[0])
        w = lift_input(m, inputs[1])
        groups = int(attrs.get("group", 1))
        rank = len(w.axes) - 2
        if len(x.axes) != rank + 2:
            raise NotProved(
                ProofFailure.SIZE, f"a convolution has {rank} spatial axes, but its input has {len(x.axes)} axes"
            )
        kernel = w.shape[2:]
        if m.plan.displaced:
            for k in kernel:
                m.plan.sample_every_place(k)
        # (N, g, i, S…)
        x = split_channels(m, x, 1, groups)
        # (g, o, i, K…), transposed (g, i, o, K…)
        w = split_channels(m, w, 0, groups)
        if transposed:
            order = [0, 2, 1, *range(3, rank + 3)]
            w = w.with_axes(tuple(w.axes[i] for i in order), [0] + [s for i in order for s in w.array_axes(i)])
        # (N, g, i, S'…, K…)
        gathered = _gather_cached(m, x, kernel, attrs, transposed)
        left = gathered.with_axes((*gathered.axes[:2], (), *gathered.axes[2:]))
        right = w.with_axes(((), *w.axes[:3], *((),) * rank, *w.axes[3:]))
        y = m.inner_product(left, right, [3, *range(4 + rank, 4 + 2 * rank)])
        y = y.with_axes(tuple(axis for i, axis in enumerate(y.axes) if i != 3 and i < 4 + rank))
        y = merge_axes(y, 1)
        bias = optional_input(inputs, 2)
        if bias is None:
            return y
        return m.add(y, broadcast_over_channels(m, bias, y))

    return run


def _gather_cached(m: ProofInterpreter, x: Value, kernel: tuple[Size, ...], attrs: Attrs, transposed: bool) -> Value:
    """Run `_gather_windows` once for all convolutions that read one input with the same attributes.

    The convolutions before and after a rewrite usually share their input and attributes.
    """
    key = (
        id(x.a),
        id(x.f),
        x.axes,
        kernel,
        transposed,
        *(_tap_attributes(attrs, i, len(kernel)) for i in range(len(kernel))),
    )
    if key not in m.gathered:
        m.gathered[key] = x, m.node, _gather_windows(m, x, kernel, attrs, transposed)
    # The cache keeps x alive, so no other array can get the id of x.
    _, node, y = m.gathered[key]
    if node == m.node:
        return y

    def canonical_atom(atom: Size) -> Size:
        of_it = isinstance(atom, AxisSize) and atom.label[:2] == (_PLACES, node)
        return AxisSize(atom, (_PLACES, m.node, *atom.label[2:])) if of_it else atom  # type: ignore[attr-defined]

    axes = tuple(tuple(canonical_atom(atom) for atom in axis) for axis in y.axes)
    return replace(y, axes=axes, fixed=_fixed_input_axes(x, axes, len(kernel)))


def _fixed_input_axes(x: Value, axes: Axes, rank: int) -> frozenset[Any]:
    """Return the fixed axes of a gathered input.

    Two places of the output may read the same place of the input, so a fixed axis of the input fixes other axes too.
    """
    return x.fixed | frozenset(axis_identity(atom) for axis in axes[3 : 3 + rank] for atom in axis)


@dataclass(frozen=True)
class _ConvolvedAxis:
    """Axis along which a convolution reads windows.

    Attributes:
        attributes: attributes of the convolution along the axis: stride, dilation, output padding and pads.
        source: atoms of the axis in the input.
        places: atoms of the axis in the output.
        tap: atoms of the axis in the kernel, whose length is ``kernel``.
    """

    attributes: tuple[Any, ...]
    source: Atoms
    places: Atoms
    tap: Atoms
    kernel: Size


def _gather_windows(m: ProofInterpreter, x: Value, kernel: tuple[Size, ...], attrs: Attrs, transposed: bool) -> Value:
    """Gather the windows of x.

    Returns (N, g, i, S'…, K…) from x of (N, g, i, S…).
    """
    rank = len(kernel)
    a = x.a
    f = x.f
    axes = list(x.axes)
    taps = []
    for i in range(rank):
        source = axes[3 + i]
        slots = _axis_slots(axes, 3 + i)
        for atom in source:
            m.plan.sum_over(atom)
        if x.degree.has_denominator and any(axis_identity(atom) in x.fixed for atom in source):
            raise NotProved(ProofFailure.LIMIT, "a convolution sums elements with different denominators")
        label = (_PLACES, m.node, i)
        places = tuple(
            AxisSize(a, label)
            for a in m.plan.atoms_of(_output_length(attrs, i, rank, product_of_sizes(source), kernel[i], transposed))
        )
        tap = m.plan.atoms_of(kernel[i])
        for atom in tap:
            m.plan.sum_over(atom)
        axis = _ConvolvedAxis(_tap_attributes(attrs, i, rank), source, places, tap, kernel[i])
        if not m.draws.turn and not m.plan.displaced and not transposed and _copies_axis(m, axis):
            f = _split_places_and_taps(m, _flatten_slots(m, f, slots, source), slots.start, places, tap)
            if a is not None:
                a = _split_places_and_taps(m, _flatten_slots(m, a, slots, source), slots.start, places, tap)
            axes[3 + i] = places
            taps.append(tap)
            continue
        if m.plan.displaced and not transposed and _auto_pad(attrs) == "NOTSET":
            index, exact, real = _displacement_map(m, axis, exactly=a is not None)
        else:
            has_zeros = transposed or _reaches_padding(attrs, i, rank)
            index, exact, real = _point_map(m, axis, transposed=transposed, has_zeros=has_zeros, exactly=a is not None)
        laid = [1] * slots.start + [-1] + [1] * (f.ndim - slots.stop)
        f = _take_points(m, f, slots, source, index)
        f = f if real is None else np.where(real.reshape(laid) == 0, 0.0, f)
        if a is not None and exact is not None and m.gf is not None:
            flat = np.moveaxis(_flatten_slots(m, a, slots, source), slots.start, -1)
            m.work.count_operations(flat.size * exact.shape[-1] * 2 * (m.bits // 30 + 1) ** 2)
            rows = modular_matmul(flat.reshape(-1, flat.shape[-1]), exact, m.gf.p)
            a = np.moveaxis(rows.reshape(*flat.shape[:-1], -1), -1, slots.start)
        f = _split_places_and_taps(m, f, slots.start, places, tap)
        a = None if a is None else _split_places_and_taps(m, a, slots.start, places, tap)
        axes[3 + i] = places
        taps.append(tap)
    sources = Degree.of_sums(a for axis in x.axes[3 : 3 + rank] for a in axis)
    degree = x.degree.times(Degree.of_each(axes[3 : 3 + rank])).times(sources)
    made = Value((*axes, *taps), a, f, x.data, degree=degree, sized=x.sized, sums=x.sums)
    made.fixed = _fixed_input_axes(x, tuple(axes), rank)
    return made


def _copies_axis(m: ProofInterpreter, axis: _ConvolvedAxis) -> bool:
    """Return True if each place of the output reads the same place of the input, so that G is the identity."""
    stride, _, _, begin, end, *_ = axis.attributes
    alone = axis.kernel.constant_value == 1 and stride == 1 and not begin and not end
    return alone and [m.plan.point_count(atom) for atom in axis.source] == [
        m.plan.point_count(atom) for atom in axis.places
    ]


def _axis_slots(axes: list[Atoms], axis: int) -> range:
    start = 1 + sum(len(a) for a in axes[:axis])
    return range(start, start + len(axes[axis]))


def _take_points(m: ProofInterpreter, x: Array, slots: range, source: Atoms, index: Array) -> Array:
    """Replace the axes of ``slots`` by one axis that holds the points ``index``."""
    return np.take(_flatten_slots(m, x, slots, source), index, axis=slots.start)


def _flatten_slots(m: ProofInterpreter, x: Array, slots: range, source: Atoms) -> Array:
    """Merge the axes of ``slots`` into one."""
    counts = [m.plan.point_count(atom) for atom in source]
    full = np.broadcast_to(x, (*x.shape[: slots.start], *counts, *x.shape[slots.stop :]))
    return full.reshape(*x.shape[: slots.start], int(np.prod(counts, dtype=int)), *x.shape[slots.stop :])


def _split_places_and_taps(m: ProofInterpreter, x: Array, at: int, places: Atoms, tap: Atoms) -> Array:
    """Split the axis made by `_take_points` into the atoms of the output's places and, at the end, of the taps."""
    first, last = ([m.plan.point_count(atom) for atom in atoms] for atoms in (places, tap))
    y = x.reshape(*x.shape[:at], *first, *last, *x.shape[at + 1 :])
    ends = range(at + len(first), at + len(first) + len(last))
    return y.transpose([s for s in range(y.ndim) if s not in ends] + list(ends))


def _count_points(m: ProofInterpreter, *axes: Atoms) -> list[int]:
    """Return the number of points drawn along each axis."""
    return [int(np.prod([m.plan.point_count(a) for a in atoms], dtype=int)) for atoms in axes]


def _point_map(
    m: ProofInterpreter, axis: _ConvolvedAxis, *, transposed: bool, has_zeros: bool, exactly: bool
) -> tuple[Array, Array | None, Array | None]:
    """Map each place and tap to the input.

    Args:
        has_zeros: True if the window may reach into the padding, or between the strides of a transposed convolution.

    Returns:
        three arrays. First, the index of the point that each tap reads in floats, (places · taps,). Second, the factor
        of each point in the field, (points, places · taps); None without a field. Third, factors in floats, 0 for one
        tap and 1 for the others, (places · taps,); None without zeros.
    """
    counts = _count_points(m, axis.source, axis.places, axis.tap)
    reads = counts[1] * counts[2]
    if m.draws.turn:
        return _shifted_points(counts, axis.attributes, m.draws.turn), None, None
    index = _shuffled_points(counts[0], reads, axis.attributes)
    real = None
    if has_zeros:
        real = np.ones(reads)
        # The zero is in the middle, because the tests for NaN use the first and the last place.
        real[reads // 2 if reads > 2 else 0] = 0.0
    if m.gf is None or not exactly:
        return index, None, real
    key = ("gather", transposed, axis.attributes, axis.source, axis.places, axis.tap)
    exact = m.random_elements(key, (counts[0], reads))
    if not has_zeros:
        exact = exact.copy()
        exact[-1] = (1 - exact[:-1].sum(axis=0)) % m.gf.p
    return index, exact, real


def _shuffled_points(points: int, reads: int, key: tuple[Any, ...]) -> Array:
    """Choose the point that each read takes in floats.

    All points are used. The first read takes the first point, and the last read takes the last point. The order depends
    on ``key``, the attributes of the convolution.
    """
    rng = np.random.default_rng([53, zlib.crc32(repr(key).encode())])
    index = rng.permutation(np.resize(np.arange(points), reads))
    index[0], index[-1] = 0, points - 1
    return index


def _shifted_points(counts: Sequence[int], key: tuple[Any, ...], turn: int) -> Array:
    """Choose one point for all taps of a place, shifted along the axis.

    Turn 1 shifts by one point; other turns shift by a hash of the attributes.
    """
    points, places, taps = counts
    if turn == 1:
        further = 1
    else:
        further = zlib.crc32(repr((key, turn)).encode()) % points
    return np.repeat((np.arange(places) + further) % points, taps)


def _displacement_map(
    m: ProofInterpreter, axis: _ConvolvedAxis, *, exactly: bool
) -> tuple[Array, Array | None, Array | None]:
    """Map each place and tap to the input, as `_point_map` does.

    Taps with the same displacement share one map, in all convolutions.

    The lemma is in `normdeploy.rewriting.branch_expressions`.
    """
    points, outputs = _count_points(m, axis.source, axis.places)
    stride, dilation, _, begin, *_ = axis.attributes
    taps = axis.kernel.constant_value
    if taps is None:
        raise NotProved(ProofFailure.SIZE, "a convolution kernel has a dynamic size")
    length = product_of_sizes(axis.source)
    made = product_of_sizes(axis.places)
    index = []
    exact = []
    real = []
    for tap in range(taps):
        e = tap * dilation - begin
        same = stride == 1 and e == 0 and length == made
        inside = e >= 0 and (length - 1 - (made - 1) * stride - e).is_nonnegative
        index.append(
            np.arange(points) if same else np.random.default_rng([53, e + 2**20, stride]).integers(0, points, outputs)
        )
        real.append(np.ones(outputs))
        real[-1][0] = 1.0 if inside else 0.0
        if m.gf is not None and exactly:
            if same:
                one: Array = np.zeros((points, points), dtype=object)
                one[np.arange(points), np.arange(points)] = 1
            else:
                one = m.random_elements(("gather", stride, e, axis.source, axis.places), (points, outputs)).copy()
                if inside:
                    one[-1] = (1 - one[:-1].sum(axis=0)) % m.gf.p
            exact.append(one)
    # Each array is (places, taps).
    laid = [np.stack(parts, axis=-1) for parts in (index, real)]
    if exact:
        whole = np.stack(exact, axis=-1).reshape(points, -1)
    else:
        whole = None
    return laid[0].reshape(-1), whole, laid[1].reshape(-1)


def _tap_attributes(attrs: Attrs, i: int, rank: int) -> tuple[Any, ...]:
    one = tuple(
        (attrs.get(name) or [default] * rank)[i]
        for name, default in (("strides", 1), ("dilations", 1), ("output_padding", 0))
    )
    pads = attrs.get("pads") or [0] * (2 * rank)
    given = attrs.get("output_shape")
    return (*one, pads[i], pads[i + rank], _auto_pad(attrs), None if given is None else tuple(given)[-rank:][i])


def _auto_pad(attrs: Attrs) -> str:
    return decode_text(attrs.get("auto_pad", "NOTSET"))


def _reaches_padding(attrs: Attrs, i: int, rank: int) -> bool:
    """Return True if the kernel may reach beyond the input along an axis."""
    pads = attrs.get("pads") or [0] * (2 * rank)
    return bool(pads[i] or pads[i + rank]) or _auto_pad(attrs) in ("SAME_UPPER", "SAME_LOWER")


def _output_length(attrs: Attrs, i: int, rank: int, n: Size, k: Size, transposed: bool) -> Size:
    """Compute the length of the output along an axis.

    A length that is not a polynomial is an opaque symbol, the same for the same attributes.
    """
    stride, dilation, extra, begin, end, auto, given = _tap_attributes(attrs, i, rank)
    span = (k - 1) * dilation + 1
    if auto == "NOTSET" or (auto == "VALID" and not begin and not end):
        if transposed and given is None:
            return (n - 1) * stride + span + extra - begin - end
        if not transposed and stride == 1:
            return n - span + 1 + begin + end
        if not transposed and n.constant_value is not None and span.constant_value is not None:
            return Size.from_int((n.constant_value - span.constant_value + begin + end) // stride + 1)
    if auto in ("SAME_UPPER", "SAME_LOWER") and n.constant_value is not None and given is None:
        return Size.from_int(n.constant_value * stride if transposed else -(-n.constant_value // stride))
    # ⌊(n − span + begin + end)/stride⌋ + 1
    if auto == "NOTSET" and not transposed and span.constant_value is not None:
        return Size.opaque(f"convolution of {n} in strides of {stride}", n, begin + end - span.constant_value, stride)
    return Size.opaque(
        f"{'transposed ' if transposed else ''}convolution of {n} by {k}",
        transposed,
        n,
        k,
        *_tap_attributes(attrs, i, rank),
    )


TABLE: dict[str, Op] = {"Conv": _convolution_op(False), "ConvTranspose": _convolution_op(True)}
