"""Decide without ``verify`` if a fault can be observed.

The right and the faulty file run in onnxruntime on eight random inputs at the example's sizes and four at other sizes.
A fault is observable if it moves an output by more than `TIMES` the error that precision explains. That error is the
largest of four differences over these inputs: between the right file and the module in float64 (or the reference file
as it runs); between onnxruntime's optimizer on and off; between an input and its neighbors in floating point; and half
a unit in the last place of the largest value.

Two right evaluations may lie on opposite sides of the true value, so a difference of twice the first is not a fault.
`TIMES` is twice that again, because twelve inputs do not reach the worst rounding. For an integer output, the elements
that differ are counted.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort

from .pairs import Made
from .tools import Feeds

TIMES = 4.0
Outputs = list[np.ndarray]


def session(proto: onnx.ModelProto, *, optimized: bool) -> ort.InferenceSession:
    """Open a session with one thread.

    Returns:
        the session.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def ran(made: ort.InferenceSession, feeds: Feeds) -> Outputs:
    """Run ``made`` on feeds by position, in the types that it takes.

    Returns:
        outputs.
    """
    types = {"tensor(float16)": np.float16, "tensor(float)": np.float32, "tensor(double)": np.float64}
    given = {
        i.name: a.astype(types.get(i.type, a.dtype)) for i, a in zip(made.get_inputs(), feeds.values(), strict=True)
    }
    return [np.asarray(a) for a in made.run(None, given)]


def neighbors(feeds: Feeds, rng: np.random.Generator) -> Feeds:
    """Move each float to the next number above or below.

    Returns:
        the moved feeds.
    """
    moved = {}
    for name, array in feeds.items():
        if array.dtype.kind == "f":
            toward = np.where(rng.random(array.shape) < 0.5, -np.inf, np.inf).astype(array.dtype)
            array = np.nextafter(array, toward)
        moved[name] = array
    return moved


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Measure the largest difference.

    Returns:
        infinite if only one is finite; for integers the number of unequal elements.
    """
    if one.dtype.kind != "f":
        return float(np.count_nonzero(one != other))
    a, b = one.astype(np.float64), other.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    apart = np.abs(a - b)[~same]
    return float(np.where(np.isnan(apart), np.inf, apart).max(initial=0.0))


@dataclass(frozen=True)
class Effect:
    """Effect of a fault on an output, relative to the error that precision explains there."""

    ratio: float
    moved: float
    explained: float

    @property
    def observable(self) -> bool:
        """Return whether the effect is large enough."""
        return self.ratio > TIMES


class Observer:
    """Hold the right file's results and the error of each output that precision explains."""

    def __init__(self, made: Made, right: onnx.ModelProto) -> None:
        self.feeds = [*made.feeds, *made.other_feeds]
        plain, optimized = session(right, optimized=False), session(right, optimized=True)
        self.right = [ran(plain, feeds) for feeds in self.feeds]
        if made.truth is not None:
            truths = [made.truth(feeds) for feeds in self.feeds]
        else:
            assert made.reference_file is not None
            reference = session(onnx.load(made.reference_file), optimized=False)
            truths = [ran(reference, feeds) for feeds in self.feeds]
        rng = np.random.default_rng(0)
        self.explained = [0.0] * len(self.right[0])
        for feeds, right_outputs, truth in zip(self.feeds, self.right, truths, strict=True):
            others = (truth, ran(optimized, feeds), ran(plain, neighbors(feeds, rng)))
            for place, output in enumerate(right_outputs):
                apart = [distance(output, other[place]) for other in others]
                self.explained[place] = max(self.explained[place], *apart, least(output))

    def effect(self, faulty: onnx.ModelProto) -> Effect | None:
        """Measure the largest effect over the outputs. The file runs in a child process, because some faulty files
        crash onnxruntime.

        Returns:
            the effect, or None if the file does not run or changes a shape.
        """
        context = multiprocessing.get_context("fork")
        source, sink = context.Pipe(duplex=False)
        child = context.Process(target=lambda: sink.send(self._effect(faulty)))
        child.start()
        sink.close()
        try:
            found: Effect | None = source.recv()
        except EOFError:
            found = None
        child.join()
        return found

    def _effect(self, faulty: onnx.ModelProto) -> Effect | None:
        try:
            made = session(faulty, optimized=False)
            outputs = [ran(made, feeds) for feeds in self.feeds]
        # onnxruntime's errors share no base class.
        except Exception:
            return None
        pairs = list(zip(self.right, outputs, strict=True))
        if any(a.shape != b.shape for right, wrong in pairs for a, b in zip(right, wrong, strict=True)):
            return None
        effects = []
        for place, explained in enumerate(self.explained):
            moved = max(distance(right[place], wrong[place]) for right, wrong in pairs)
            effects.append(Effect(moved / explained, moved, explained))
        return max(effects, key=lambda effect: effect.ratio)


def least(output: np.ndarray) -> float:
    """Return half a unit in the last place of the largest value; for integers half an element.

    Returns:
        number.
    """
    if output.dtype.kind != "f":
        return 0.5
    finite = np.abs(output[np.isfinite(output)].astype(np.float64)).max(initial=0.0)
    eps = float(np.finfo(output.dtype).eps) / 2
    return max(eps * finite, float(np.finfo(output.dtype).tiny))
