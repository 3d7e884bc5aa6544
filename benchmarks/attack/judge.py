"""Judge whether the optimized file computes the same function as the original file.

Both files run in float64, and both run as they are in onnxruntime with its optimizer off.

Kinds of a false rewrite:

- ``numbers``: at finite inputs, the files differ in float64 by more than a change of all parameters by half an ulp
  explains, or only one result is finite.
- ``hidden``: the original file gives NaN or Inf, both in float64 and as it is, and the optimized file gives a number.
- ``runs``: the optimized file does not load or run, or returns another shape or type.
- ``accuracy``: at ordinary inputs (normal, or drawn from the statistics in the graph), the error in the model's type is
  more than 16 times the error of the original file. Next to a linear op, the error must also be more than 64 ulp of the
  channel. For the kernel of a norm, it must be more than 1,000 ulp.

Two kinds of results are counted, but are not false. In ``exposed``, a finite result at an infinite input becomes NaN.
In ``runtime``, a kernel hides a NaN that the file in float64 does not hide.

The bound of ``numbers`` is per element: 16 times the largest change of four draws, plus 16 half ulps of the result. A
draw moves every parameter, sum of parameters and root by half an ulp, and every other sum and difference by 1e-13
(hundreds of roundings of float64).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from .builder import Case
from .double import Evaluator, NoDouble, session
from .inputs import FINITE_AT_ONE, feeds

DRAWS = 4
SLACK = 16
FOLD_ULPS = 64
NODE_ULPS = 1000
HALF_ULP = {
    np.dtype(np.float16): 2.0**-11,
    np.dtype(np.float32): 2.0**-24,
    # For float64, use half an ulp of float32, because epsilon is a float32.
    np.dtype(np.float64): 2.0**-24,
}
FALSE = ("numbers", "hidden", "runs", "accuracy")

Feed = dict[str, np.ndarray]
Arrays = Sequence[np.ndarray]


@dataclass
class Verdict:
    """Result for one graph.

    Attributes:
        kind: "" (no difference seen), "skipped" (nothing could be judged), or one of ``FALSE``.
        feed: input that shows the difference.
    """

    kind: str = ""
    detail: str = ""
    feed: Feed = field(default_factory=dict)
    exposed: bool = False
    runtime: bool = False
    judged: int = 0
    notes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.kind in FALSE


class _Unsure(Exception):
    """Raised if the judge's float64 form computes another function than the runtime."""


# Number of inputs that are tried near an input whose error grew
_NEIGHBOURS = 24


@dataclass
class _Files:
    """Both files in their own type and in float64.

    Attributes:
        after64: None if the optimized file has no float64 form.
    """

    before: Any
    after: Any
    before64: Evaluator
    after64: Evaluator | None
    ulp: float


def judge(case: Case, optimized: onnx.ModelProto, rng: np.random.Generator, count: int = 12) -> Verdict:
    """Compare ``case.model`` with ``optimized`` at ``count`` inputs.

    Returns:
        the verdict on the first input that shows a false rewrite, else on all.
    """
    verdict = Verdict()
    try:
        before = session(case.model)
        before64 = Evaluator(case.model, noisy=True)
    # A graph that the runtime refuses can't be judged.
    except Exception as error:
        return Verdict("skipped", f"the original: {str(error)[:300]}")
    try:
        after = session(optimized)
    except Exception as error:
        return Verdict("runs", f"does not load: {str(error)[:300]}")
    try:
        after64 = Evaluator(optimized)
    except NoDouble as error:
        after64 = None
        verdict.notes.append(f"no float64 after: {str(error)[:200]}")
    kinds = {i.dtype for i in case.inputs if i.dtype.kind == "f"}
    files = _Files(before, after, before64, after64, max((HALF_ULP[k] for k in kinds), default=2.0**-24))
    for kind, feed in feeds(case, rng, count):
        try:
            found = _compare(case, files, kind, feed, rng, verdict)
        except _Unsure:
            return Verdict("skipped", "float64 of the original is not the original in onnxruntime")
        if found is not None and (found[0] != "accuracy" or _confirmed(case, files, feed, rng)):
            verdict.kind, verdict.detail, verdict.feed = found[0], f"{kind}: {found[1]}", feed
            return verdict
    if not verdict.judged:
        return Verdict("skipped", "; ".join(verdict.notes[:3]) or "no input runs")
    return verdict


def _compare(
    case: Case, files: _Files, kind: str, feed: Feed, rng: np.random.Generator, verdict: Verdict
) -> tuple[str, str] | None:
    try:
        own = files.before.run(None, feed)
        exact = files.before64(feed)
        moved = [files.before64(feed, rng, files.ulp) for _ in range(DRAWS)]
    except NoDouble as error:
        verdict.notes.append(f"no float64: {str(error)[:200]}")
        return None
    # Sizes that the graph itself does not accept.
    except Exception as error:
        verdict.notes.append(f"{kind}: does not run before: {str(error)[:200]}")
        return None
    try:
        new = files.after.run(None, feed)
    except Exception as error:
        return "runs", f"ran before, fails after: {str(error)[:300]}"
    for name, a, c in zip(files.before64.outputs, own, new, strict=True):
        if a.shape != c.shape or a.dtype != c.dtype:
            return "runs", f"output {name}: {a.dtype}{a.shape} before, {c.dtype}{c.shape} after"
    finite_input = all(np.isfinite(v).all() for v in feed.values() if v.dtype.kind == "f")
    if kind == "normal" and not _agree(own, exact, files.ulp):
        raise _Unsure
    verdict.judged += 1
    other = None
    if files.after64 is not None:
        try:
            other = files.after64(feed)
        except NoDouble as error:
            verdict.notes.append(f"no float64 after: {str(error)[:200]}")
    for place in range(len(own)):
        found = _output(case, files, kind, finite_input, verdict, [own[place], new[place], exact[place]],
                        None if other is None else other[place], [m[place] for m in moved])  # fmt: skip
        if found is not None:
            return found[0], f"output {files.before64.outputs[place]}: {found[1]}"
    return None


def _agree(own: Arrays, exact: Arrays, ulp: float) -> bool:
    """Check that the float64 form equals the original at ordinary inputs; this guards against a judge that evaluates
    something else.
    """
    for a, b in zip(own, exact, strict=True):
        if a.shape != b.shape:
            return False
        if a.dtype.kind != "f" or not a.size:
            continue
        a64, fine = a.astype(np.float64), np.isfinite(a) & np.isfinite(b)
        with np.errstate(all="ignore"):
            off = np.abs(a64 - b)[fine] > 0.05 * np.abs(b[fine]) + 0.05 * np.abs(b[fine]).max(initial=0) + ulp
        if off.mean() > 0.5 if off.size else False:
            return False
    return True


def _output(case: Case, files: _Files, kind: str, finite_input: bool, verdict: Verdict, trio: list[np.ndarray],
            other: np.ndarray | None, draws: list[np.ndarray]) -> tuple[str, str] | None:  # fmt: skip
    own, new, exact = trio
    if own.dtype.kind != "f":
        return None if np.array_equal(own, new) else ("numbers", f"{own.dtype} values differ")
    with np.errstate(all="ignore"):
        bad = ~np.isfinite(exact) & ~np.isfinite(own) & np.all([~np.isfinite(m) for m in draws], axis=0)
        good = np.isfinite(exact) & np.all([np.isfinite(m) for m in draws], axis=0)
        bound = (
            SLACK * np.max([np.abs(m - exact) for m in draws], axis=0)
            + SLACK * files.ulp * np.abs(exact)
            + _floor(own.dtype)
        )
    bound = _smoothed(np.where(good, bound, 0.0)) if case.honest else np.where(good, bound, 0.0)
    hidden = bad & np.isfinite(new)
    if other is not None:
        if other.shape != exact.shape:
            return "numbers", f"shape {exact.shape} before, {other.shape} after in float64"
        verdict.runtime |= bool((hidden & ~np.isfinite(other)).any())
        hidden &= np.isfinite(other)
        lost = good & ~np.isfinite(other)
        if lost.any():
            if finite_input and np.isfinite(own[lost]).any() and (not case.degenerate or kind == "zero"):
                return "numbers", f"{_show(exact, lost)} before, {_show(other, lost)} after, in float64"
            verdict.exposed |= not finite_input
        with np.errstate(all="ignore"):
            off = good & np.isfinite(other) & (np.abs(other - exact) > bound)
        if (
            off.any() and not finite_input
            # The effect of a NaN on numbers is undefined; the same input without it decides.
        ):
            verdict.exposed = True
        elif off.any():
            if _contradicted(own, new, exact, other, off):
                raise _Unsure
            return (
                "numbers",
                f"{_show(exact, off)} before, {_show(other, off)} after, in float64; allowed {_show(bound, off)}",
            )
    if hidden.any():
        return "hidden", f"{_show(exact, hidden)} before, {_show(new, hidden)} after"
    if kind in FINITE_AT_ONE and not case.degenerate:
        return _accuracy(case, own, new, exact, good)
    return None


def _contradicted(own: np.ndarray, new: np.ndarray, exact: np.ndarray, other: np.ndarray, off: np.ndarray) -> bool:
    """Detect a fault of the judge: float64 sees a gross difference, but the files as they are agree everywhere."""
    with np.errstate(all="ignore"):
        gap = np.abs(other - exact)
        gross = off & (gap > 1e-2 * np.abs(exact)) & np.isfinite(own) & np.isfinite(new)
        seen = np.abs(own.astype(np.float64) - new.astype(np.float64))
        # Rounding does not hide the difference here.
        close = np.abs(own.astype(np.float64) - exact) < 0.1 * gap
        return bool((gross & close).any() and not (seen > 0.1 * gap)[gross & close].any())


def _floor(kind: np.dtype) -> float:
    """Return a number that the model's own type can't distinguish from zero."""
    return SLACK * float(np.finfo(kind).smallest_subnormal if kind == np.float16 else np.finfo(kind).tiny)


def _smoothed(bound: np.ndarray) -> np.ndarray:
    """Raise each element's bound to a quarter of the largest of its row, so that a lucky draw causes no false alarm."""
    return bound if bound.ndim == 0 or not bound.size else np.maximum(bound, 0.25 * bound.max(axis=-1, keepdims=True))


def _confirmed(case: Case, files: _Files, feed: Feed, rng: np.random.Generator) -> bool:
    """Check that the error also grew for inputs a few ulps away from ``feed``, all together; a channel of few elements
    may be right by luck.
    """
    runs: list[list[Arrays]] = []
    for _ in range(_NEIGHBOURS):
        near = {n: _jittered(v, files.ulp, rng) for n, v in feed.items()}
        runs.append([files.before.run(None, near), files.after.run(None, near), files.before64(near)])
    for place in range(len(runs[0][0])):
        own, new, exact = (np.stack([run[side][place] for run in runs], axis=-1) for side in range(3))
        good = np.isfinite(exact)
        if (
            own.dtype.kind == "f"
            and own.ndim > 1
            and _accuracy(case, own, new, exact, good, case.channel % (own.ndim - 1)) is not None
        ):
            return True
    return False


def _jittered(value: np.ndarray, ulp: float, rng: np.random.Generator) -> np.ndarray:
    if value.dtype.kind != "f":
        return value
    return (value * (1 + 2 * ulp * rng.integers(-8, 9, value.shape))).astype(value.dtype)


def _accuracy(
    case: Case, own: np.ndarray, new: np.ndarray, exact: np.ndarray, good: np.ndarray, axis: int | None = None
) -> tuple[str, str] | None:
    fine = good & np.isfinite(own)
    if not fine.any() or own.ndim == 0:
        return None
    axis = case.channel % own.ndim if axis is None else axis
    rest = tuple(k for k in range(own.ndim) if k != axis)
    size = np.where(fine, np.abs(exact), 0.0).max(axis=rest, keepdims=True)
    with np.errstate(all="ignore"):
        before = np.where(fine, np.abs(own.astype(np.float64) - exact), 0.0).max(axis=rest, keepdims=True)
        after = np.where(fine, np.abs(new.astype(np.float64) - exact), 0.0)
    after = np.where(fine & ~np.isfinite(new), np.inf, after)
    ulp = max(2 * HALF_ULP[own.dtype], float(np.finfo(own.dtype).eps))
    allowed = SLACK * before + (FOLD_ULPS if case.fold else NODE_ULPS) * ulp * size
    off = fine & (after > allowed)
    if not off.any():
        return None
    where = tuple(int(k) for k in np.argwhere(off)[0])
    spot = tuple(w if k == axis else 0 for k, w in enumerate(where))
    return (
        "accuracy",
        f"error {before[spot]:.2e} before, {after[where]:.2e} after at {where}, channel up to {size[spot]:.2e}",
    )


def _show(values: np.ndarray, mask: np.ndarray) -> str:
    where = tuple(int(k) for k in np.argwhere(mask)[0])
    return f"{values[where]:.8g} at {where}"
