"""Read a region between two tensors as a norm from its values.

A norm is fitted to the region's values at one size, or at two sizes if the size of the groups is dynamic. The fits have
to agree. Constants of the file then replace the measured values that they agree with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from ..evaluate import evaluator
from ..graphs.dims import Dims
from ..graphs.graph import Graph
from ..graphs.region import BoundRegion, Refusal, RefusalKind, Region, compile_region, concrete_shape
from .anchors import INSIDE
from .fit_measurement import measure_fit
from .norm_facts import Norm
from .norm_fit import Clarity, NormFit, RejectedReading
from .norm_parameters import MeasuredParameter, find_parameter, numbers_cast_to_zero, snap_epsilon, stored_epsilon
from .probe_sizes import bound_regions


def read_region(region: Region, shape: Dims, dtype: np.dtype) -> Norm | RejectedReading:
    """Read the norm that a region computes from its first leaf, of ``shape`` and ``dtype``.

    Returns:
        the norm, or a rejected reading with the reason.
    """
    graph = region.graph
    template = region.template
    like = graph.memo.get(template)
    if isinstance(like, RejectedReading):
        return replace(like, tensor=region.y.name, region=region)
    guess = norm_like_other(region, like) if isinstance(like, Norm) else None
    if guess is not None:
        return guess
    reading = _measure_region(region, shape, dtype)
    if isinstance(reading, Norm) or region.is_determined_by_template:
        graph.memo[template] = reading
    return reading


def _measure_region(region: Region, shape: Dims, dtype: np.dtype) -> Norm | RejectedReading:
    """Read the norm from results of the region."""
    graph = region.graph
    fits: list[NormFit] = []
    given: list[list[np.ndarray]] = []
    refusal = RejectedReading("it can't be evaluated at any size", region.y.name, clarity=Clarity.APART, region=region)
    for bound, size in bound_regions(region):
        others = [_random_leaf(graph, t, bound, i) for i, t in enumerate(region.leaves[1:])]
        if any(o.shape == size and o.size > 1 for o in others):
            return RejectedReading(
                "it uses other data of its input's shape: a residual stream, not gamma or beta",
                region.y.name,
                clarity=Clarity.APART,
            )
        fitted = measure_fit(bound, size, others, _find_similar_fit(region, size))
        if isinstance(fitted, RejectedReading):
            refusal = replace(fitted, tensor=region.y.name, region=region)
            if fitted.kind is RefusalKind.NOT_EVALUATED:
                continue
            return refusal
        for key in _similarity_keys(region, size):
            graph.memo.setdefault(key, fitted.resize(size))
        fits.append(fitted)
        given.append(others)
        if len(fits) == 2 or not _has_dynamic_groups(shape, fitted):
            break
    if not fits:
        return refusal
    if _stores_clamped_root(graph, region, fits[0]):
        fits = [f.clamp_root() for f in fits]
    if len(fits) == 2:
        unbiased = _unbiased_fit(*fits)
    else:
        unbiased = _fit_with_stored_epsilon(graph, region, fits[0])
    if len(fits) == 2 and unbiased is None:
        difference = _describe_size_difference(*fits)
        if difference is not None:
            return RejectedReading(difference, region.y.name, region=region, fit=fits[0])
    norm = _build_norm(region, unbiased or fits[0], given[0], shape, dtype)
    if isinstance(norm, Refusal):
        return RejectedReading(norm.reason, norm.tensor, region=region, fit=fits[0])
    if unbiased is not None:
        norm = replace(norm, ddof=1)
    return norm


def _similarity_keys(region: Region, size: tuple[int, ...]) -> tuple[object, ...]:
    """Return keys of fits that a region may share, the most similar region first.

    Regions of one template have the same function up to large constants. Regions of one leaf may be a norm without and
    with its gamma. Regions with the same ops may be the norms of layers with other sizes.
    """
    ops = tuple(node.op for node in region.nodes)
    return (region.template, size), (id(region.leaves[0]), size), (ops, len(size))


def _find_similar_fit(region: Region, size: tuple[int, ...]) -> NormFit | None:
    """Find the fit of a similar region, whose gamma and beta may differ."""
    same, *others = (region.graph.memo.get(key) for key in _similarity_keys(region, size))
    # A fit with epsilon 0 also passes the check for another small epsilon, so only an equal template vouches for 0.
    fits = [same, *(fit for fit in others if isinstance(fit, NormFit) and fit.epsilon > 0)]
    fit = next((fit for fit in fits if isinstance(fit, NormFit)), None)
    if fit is None or (fit.split is not None and size[fit.split] % fit.block):
        return None
    return fit.resize(size)


def norm_like_other(region: Region, other: Norm) -> Norm | None:
    """Read ``region`` like the norm ``other``, whose region differs only in the values of large constants.

    Returns:
        a guessed norm. None if it is unknown which constants hold gamma and beta, if the region reads data other than
        x, or if ``other`` is in half precision.
    """
    # Half precision may not represent a constant that has a wider type.
    if len(region.leaves) > 1 or other.dtype.itemsize == 2:
        return None
    params: list[MeasuredParameter | None] = []
    for param in (other.gamma, other.beta):
        if region.is_determined_by_template and (param is None or param.tensor is None):
            params.append(param)
            continue
        if param is not None:
            tensor = param.tensor
        else:
            tensor = None
        place = next(
            ((n, i) for n, node in enumerate(other.region.nodes) for i, t in enumerate(node.inputs) if t is tensor),
            None,
        )
        if param is None or param.value is None or place is None:
            return None
        t = region.nodes[place[0]].inputs[place[1]]
        if not isinstance(t, gs.Constant) or not np.isfinite(t.values).all():
            return None
        params.append(MeasuredParameter(region.graph.value(t).reshape(param.value.shape), t, param.varies))
    return replace(other, region=region, x=region.leaves[0], y=region.y, gamma=params[0], beta=params[1], guessed=True)


def _random_leaf(graph: Graph, t: gs.Tensor, bound: BoundRegion, seed: int) -> np.ndarray:
    return np.random.default_rng(7 + seed).uniform(0.5, 1.5, concrete_shape(graph, t, bound.sizes) or ())


def _has_dynamic_groups(shape: Dims, fitted: NormFit) -> bool:
    return not all(isinstance(shape[a], int) for a in fitted.normalized_axes)


def _stores_clamped_root(graph: Graph, region: Region, fitted: NormFit) -> bool:
    """Return True if the file stores the number that clamps sqrt(mean(x²)), and not the number that clamps ‖x‖₂."""
    return (
        fitted.clamped
        and stored_epsilon(graph, region, fitted.epsilon) is None
        and stored_epsilon(graph, region, fitted.clamp_root().epsilon) is not None
    )


def _unbiased_fit(a: NormFit, b: NormFit) -> NormFit | None:
    """Return the fit with a variance that divides by n − 1, if gamma and epsilon of this fit agree at both sizes n."""
    if (
        (a.axes, a.split, a.centered, a.outside, a.keeps_mean) != (b.axes, b.split, b.centered, b.outside, b.keeps_mean)
        or a.group_size == b.group_size
        or not a.centered
    ):
        return None
    told = [
        replace(f, gamma=f.gamma * np.sqrt(k), epsilon=f.epsilon * (np.sqrt(k) if f.outside else k))
        for f in (a, b)
        for k in [f.group_size / (f.group_size - 1)]
    ]
    if _describe_size_difference(*told):
        return None
    return told[0]


def _fit_with_stored_epsilon(graph: Graph, region: Region, fitted: NormFit) -> NormFit | None:
    """Return the fit with a variance that divides by n − 1, if its epsilon is stored in the file.

    This applies to a norm of static size without a standard op. One of normdeploy's own ops expresses this norm with
    the epsilon that the file stores.
    """
    if not (fitted.outside or fitted.keeps_mean) or not fitted.centered or fitted.group_size < 2:
        return None
    ratio = fitted.group_size / (fitted.group_size - 1)
    factor = np.sqrt(ratio)
    exact = stored_epsilon(graph, region, fitted.epsilon * (factor if fitted.outside else ratio))
    if exact is None or stored_epsilon(graph, region, fitted.epsilon) is not None:
        return None
    return replace(fitted, gamma=fitted.gamma * factor, epsilon=exact)


def _describe_size_difference(a: NormFit, b: NormFit) -> str | None:
    """Describe how two fits of one region at two sizes differ; None if they agree."""
    if (a.axes, a.split, a.centered, a.denominator, a.keeps_mean) != (
        b.axes,
        b.split,
        b.centered,
        b.denominator,
        b.keeps_mean,
    ):
        return "the normalized elements change with the dynamic sizes"
    same = abs(a.epsilon - b.epsilon) <= 1e-9 * max(a.epsilon, b.epsilon)
    factor = float(np.median(np.abs(a.gamma))) / float(np.median(np.abs(b.gamma)) or 1.0)
    if a.gamma.shape == b.gamma.shape:
        alike = np.allclose(a.gamma, b.gamma, rtol=1e-9)
    else:
        alike = abs(factor - 1) < 1e-9 or _has_varying_gamma(a) or _has_varying_gamma(b)
    if same and alike:
        return None
    return "its epsilon or gamma depends on a dynamic size"


def _has_varying_gamma(fit: NormFit) -> bool:
    """Return True if gamma differs between elements, so that no single number can be compared between sizes."""
    return bool(np.ptp(np.abs(fit.gamma)) > 1e-9 * np.abs(fit.gamma).max())


def _build_norm(
    region: Region, fitted: NormFit, others: Sequence[np.ndarray], shape: Dims, dtype: np.dtype
) -> Norm | Refusal:
    """Build the norm of a fit, with the file's own gamma, beta and epsilon if they agree with the measured values.

    Args:
        others: values that the leaves other than x had during the measurement.
    """
    graph = region.graph
    grouped = fitted.split is not None
    gamma = find_parameter(graph, region, fitted.gamma, others, neutral=1.0, vector=grouped)
    beta = find_parameter(graph, region, fitted.beta, others, neutral=0.0, vector=grouped)
    if isinstance(gamma, Refusal):
        return gamma
    if isinstance(beta, Refusal):
        return beta
    if sum(p is not None and p.data for p in (gamma, beta)) != len(others):
        return Refusal("data enters it other than as a scale or shift", region.y.name)
    dynamic = [
        a for p in (gamma, beta) if p is not None and not p.data for a in p.varies if not isinstance(shape[a], int)
    ]
    if dynamic:
        return Refusal(f"its gamma or beta varies along the dynamic axis {dynamic[0]}", region.y.name)
    if dtype.itemsize == 2 and _has_wider_constants(graph, region):
        for p in (gamma, beta):
            if p is not None and p.value is not None and not _is_representable(p.value, dtype):
                return Refusal(f"its gamma or beta can't be represented in {dtype.name}", region.y.name)
    data = [p.tensor for p in (gamma, beta) if p is not None and p.data and p.tensor is not None]
    if data:
        again = compile_region(graph, region.y, [region.leaves[0], *data], INSIDE)
    else:
        again = region
    if isinstance(again, Refusal):
        return again
    region = again
    epsilon = snap_epsilon(graph, region, fitted.epsilon)
    return Norm(
        region,
        region.leaves[0],
        region.y,
        # Keep the fit without its gamma and beta arrays, because each takes as much memory as x.
        fitted.resize(fitted.shape),
        shape,
        dtype,
        epsilon,
        gamma,
        beta,
        notes=_epsilon_notes(graph, region, epsilon),
    )


def _epsilon_notes(graph: Graph, region: Region, epsilon: float) -> tuple[str, ...]:
    """Write a note if a Cast of the file turns epsilon into zero. The fused node keeps the epsilon before the Cast."""
    return tuple(
        f"its epsilon {number:.7g} becomes 0 when the file casts it to {kind}: the original may divide by "
        f"zero on constant rows; the node uses {number:.7g} as written in the model"
        for number, kind in numbers_cast_to_zero(graph, region)
        if abs(number - epsilon) <= 1e-7 * epsilon
    )


def _is_representable(value: np.ndarray, dtype: np.dtype) -> bool:
    with evaluator.silence_numpy():
        return np.array_equal(value.astype(dtype).astype(np.float64), value)


def _has_wider_constants(graph: Graph, region: Region) -> bool:
    """Return True if gamma or beta may have a wider type than x. Rounding them to x's type would change them."""
    constants = [t for n in region.nodes for t in n.inputs if graph.is_constant(t)]
    return any(
        (d := graph.dtype(t)) is not None and d.kind == "f" and d.itemsize > 2 and graph.value(t).size > 1
        for t in constants
    )
