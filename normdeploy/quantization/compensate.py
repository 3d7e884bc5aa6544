"""Rounding of weights by the error of the layer's products (GPTQ).

With the inputs x of the calibration samples, as the file will have them (rounded), and H = E[x·xᵀ], the
error of a layer's products is tr((W − Ŵ)ᵀ·H·(W − Ŵ)). GPTQ (Frantar et al., arXiv 2210.17323) rounds the rows of W one
after the other, those of the largest inputs first, and adds to each what makes up for the errors of the rows before it.
With H = (I + U)·D·(I + U)ᵀ, U strictly upper triangular, that is

    ŵ_k = round(w_k + Σ_{j<k} (w_j − ŵ_j)·U_jk)

(LDLQ, the same numbers without an inverse: Chee et al., QuIP, arXiv 2307.13304, theorem 6). A share of the mean of H's
diagonal is added to it: the samples are few, and what they have in common by chance tells nothing of other inputs.

Biases stay the model's own but for shifts (`shifts`): a correction of their means (Nagel et al., arXiv 1906.04721, 4.2)
would leave none in the file that `verify` could hold against the model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
from onnx import numpy_helper

from ..errors import InputError
from ..precision.calibrate import Samples, chunks, session
from ..types import Progress
from .groups import Candidate
from .observe import rows_of
from .qdq import Plan
from .steps import Format, Step, codes, held, laid, rounded, weight_scales

DAMPING = 0.1  # of the mean of H's diagonal; times channels / rows where these are fewer
_HELD = 2**30  # bytes of H that are held at a time
_WIDE = 4096  # channels, from which on H is factored in float32
_BLOCK = 128  # rows of W between products with all that were rounded before
_FEWEST = 16  # rows, of which nothing can be said
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of a block's largest weight, for its scale


@dataclass
class Moments:
    """Of the inputs of a layer, streamed: ``second`` is H.

    Sums are of x̂ − ``origin``, the mean of the first batch: little is lost to cancellation in float32.
    """

    origin: np.ndarray
    rows: int = 0
    sums: np.ndarray = field(default_factory=lambda: np.zeros(()))  # of x̂ − origin
    squares: np.ndarray = field(default_factory=lambda: np.zeros((), np.float32))

    def add(self, x: np.ndarray, step: Step | None, offset: np.ndarray | None = None) -> None:
        """float32 [rows, channels]; ``offset``: what they were shifted by, which the layer's bias takes back."""
        quantized = x if step is None else rounded(x, step)
        away = (quantized if offset is None else quantized + offset) - self.origin
        self.rows += len(x)
        self.sums = self.sums + away.sum(0, dtype=np.float64)
        self.squares = self.squares + away.T @ away

    def second(self) -> np.ndarray:
        """H, [channels, channels]."""
        kind = np.dtype(np.float32 if len(self.origin) > _WIDE else np.float64)
        around, mean = self.sums / self.rows, np.asarray(self.origin + self.sums / self.rows)
        h = np.asarray(self.squares / self.rows, kind)
        return np.asarray(h - np.outer(around, around).astype(kind) + np.outer(mean, mean).astype(kind))


def compensated(
    proto: onnx.ModelProto,
    layers: Sequence[Candidate],
    plans: Mapping[str, Plan],
    samples: Samples,
    progress: Progress | None = None,
) -> dict[str, Plan]:
    """``plans`` with the codes of matrices, for each MatMul or Gemm whose weight is a matrix
    that no other node reads. The others stay as they are.

    Raises:
        InputError: the model does not run on a sample.
    """
    weights = {t.name: t for t in proto.graph.initializer}
    nodes = {n.output[0]: n for n in proto.graph.node if n.output}
    readers: dict[str, int] = {}
    for n in proto.graph.node:
        for name in n.input:
            readers[name] = readers.get(name, 0) + 1
    ready: dict[tuple[str, Step | None], list[tuple[Candidate, Plan, str]]] = {}
    axes: dict[str, int] = {}
    offsets: dict[tuple[str, Step | None], np.ndarray] = {}
    for c in layers:
        plan = plans.get(c.plan.tensor)
        if plan is None or c.op not in ("MatMul", "Gemm") or c.reason:
            continue
        node = nodes[plan.tensor]
        name = node.input[plan.weight]
        attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        plain = all(attrs.get(k, 1) == 1 for k in ("alpha", "beta")) and not attrs.get("transA", 0)
        if plain and name in weights and readers[name] == 1 and len(weights[name].dims) == 2:
            key = (node.input[plan.data], plan.step)
            if plan.shift is not None:
                offsets[key] = plan.shift.offset.astype(np.float32)
            ready.setdefault(key, []).append((c, plan, name))
            axes[node.input[plan.data]] = c.axis
    done, made = 0, dict(plans)
    for tensor, moments in _moments(proto, axes, {key: offsets.get(key) for key in ready}, samples):
        group = ready[tensor]
        for _, plan, name in group:
            if progress is not None:
                progress("round", done, sum(map(len, ready.values())))
            done += 1
            if moments.rows >= _FEWEST:
                made[plan.tensor] = _fitted(plan, numpy_helper.to_array(weights[name]), moments)
    return made


def carried(before: onnx.ModelProto, plan: Plan, now: onnx.ModelProto, bare: Plan) -> Plan:
    """``bare``, of a layer in ``now``, as it was planned in ``before``; rounded so where its weight is the same."""
    weights = []
    for proto, one in ((before, plan), (now, bare)):
        node = next(n for n in proto.graph.node if n.output and n.output[0] == one.tensor)
        stored = next(t for t in proto.graph.initializer if t.name == node.input[one.weight])
        weights.append(numpy_helper.to_array(stored))
    made = replace(bare, step=plan.step, dynamic=plan.dynamic, scales=plan.scales, shift=plan.shift)
    if not np.array_equal(*weights):
        return made
    return replace(made, stored=plan.stored)


def _moments(
    proto: onnx.ModelProto,
    axes: Mapping[str, int],
    wanted: Mapping[tuple[str, Step | None], np.ndarray | None],
    samples: Samples,
) -> Iterator[tuple[tuple[str, Step | None], Moments]]:
    """Of each input with its step, and what it was shifted by; as many at a time as `_HELD` allows."""
    shapes = {t.name: t.dims for t in proto.graph.initializer}
    size = {
        n.input[i]: max(shapes[n.input[1 - i]]) ** 2 * 4
        for n in proto.graph.node
        if n.op_type in ("MatMul", "Gemm")
        for i in (0, 1)
        if n.input[1 - i] in shapes and n.input[i] in axes
    }
    for chunk in chunks(proto, list(dict.fromkeys(name for name, _ in wanted)), samples) if wanted else ():
        part: list[str] = []
        for name in [*chunk, ""]:
            if part and (not name or sum(size.get(p, 0) for p in part) + size.get(name, 0) > _HELD):
                yield from _of(proto, axes, {w: off for w, off in wanted.items() if w[0] in part}, part, samples)
                part = []
            part.append(name)


def _of(
    proto: onnx.ModelProto,
    axes: Mapping[str, int],
    wanted: Mapping[tuple[str, Step | None], np.ndarray | None],
    part: Sequence[str],
    samples: Samples,
) -> Iterator[tuple[tuple[str, Step | None], Moments]]:
    held: dict[tuple[str, Step | None], Moments] = {}
    runner = session(proto, part)
    for number, sample in enumerate(samples):
        try:
            values = dict(zip(part, runner.run(list(part), dict(sample)), strict=True))
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise InputError(
                f"the model does not run on calibration sample {number}: {' '.join(str(error).split())[:300]}"
            ) from error
        for key, offset in wanted.items():
            x = rows_of(values[key[0]], axes[key[0]], sample)
            if len(x):
                if key not in held:
                    held[key] = Moments(x.mean(0) if offset is None else x.mean(0) + offset)
                held[key].add(x, key[1], offset)
    for key in wanted:
        if key in held:
            yield key, held.pop(key)


def _fitted(plan: Plan, stored: np.ndarray, moments: Moments) -> Plan:
    across = stored if plan.channels_first else stored.T  # [channels, outputs]
    share = DAMPING * max(1.0, len(across) / moments.rows)
    h = moments.second()
    axis = None if plan.axis is None else plan.axis if across is stored else 1 - plan.axis
    scales = held(shrunk(across, np.diag(h), axis, plan.form, plan.block), plan.scales)
    wide = laid(scales, across.shape, axis, plan.block)
    feedback = feedback_of(h, share)
    if feedback is None:
        return plan
    q = fed_back(across, np.broadcast_to(wide, across.shape), feedback, plan.form)
    if across is not stored:
        q, scales = np.ascontiguousarray(q.T), np.ascontiguousarray(scales.T)
    return replace(plan, stored=(q, scales))


def shrunk(w: np.ndarray, h: np.ndarray, axis: int | None, form: Format, block: int) -> np.ndarray:
    """Scales of ``w`` [channels, outputs]: of blocks each the largest weight's, or that times one of `SHRINKS` that
    leaves the least Σ h_k (w_k − ŵ_k)² (the clipping of AWQ, Lin et al., arXiv 2306.00978, by H's diagonal)."""
    scales = weight_scales(w, axis, form, block)
    if not block or axis != 0:
        return scales
    best, least = scales, np.full(scales.shape, np.inf)
    for share in SHRINKS:
        tried = (scales * np.float32(share)).astype(np.float32)
        wide = laid(tried, w.shape, axis, block)
        off = h[:, None] * (codes(w, wide, form).astype(np.float32) * wide - w) ** 2
        error = off.reshape(len(w) // block, block, -1).sum(1)
        best, least = np.where(error < least, tried, best), np.minimum(error, least)
    return np.asarray(best, np.float32)


def feedback_of(h: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray] | None:
    """The order of the rows and, in it, float32 I + U of H = (I + U)·D·(I + U)ᵀ; None where H can't be factored."""
    diagonal = np.diag(h).copy()
    mean = float(diagonal.mean())
    if not np.isfinite(mean) or mean <= 0:
        return None
    order = np.argsort(-diagonal, kind="stable")
    h = h[np.ix_(order, order)]
    h[np.diag_indices(len(h))] += share * mean
    try:
        upper = np.linalg.cholesky(h[::-1, ::-1])[::-1, ::-1]
    except np.linalg.LinAlgError:
        return None
    return order, (upper / np.diag(upper)).astype(np.float32)


def fed_back(w: np.ndarray, scales: np.ndarray, feedback: tuple[np.ndarray, np.ndarray], form: Format) -> np.ndarray:
    """Codes of ``w`` [channels, outputs], rounded row by row with what the rows before lost."""
    order, unit = feedback
    w, scales = w[order].astype(np.float32), scales[order].astype(np.float32)
    lost, q = np.zeros_like(w), np.zeros(w.shape, form.dtype)
    for start in range(0, len(w), _BLOCK):
        end = min(start + _BLOCK, len(w))
        wanted = w[start:end] + unit[:start, start:end].T @ lost[:start]
        for k in range(start, end):
            row = wanted[k - start] + unit[start:k, k] @ lost[start:k]
            q[k] = codes(row, scales[k], form)
            lost[k] = w[k] - q[k].astype(np.float32) * scales[k]
    made = np.empty_like(q)
    made[order] = q
    return made
