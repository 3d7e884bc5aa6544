"""Norms in random spellings, with what each must compute and what must become of it. Imports nothing of normdeploy.

``generate(choices, book, route)`` draws a case (kind, shape, axes), an epsilon, an affine and one spelling at each
point of choice, and returns an ``Example``: PyTorch source or an ONNX graph, its float64 definition, the expected
number of norm nodes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx
import torch

from tests.norm_onnx import OnnxWriter
from tests.norm_spellings import KNOWN, Stats, affine, to
from tests.norm_writers import Book, Choices, Size, T, TorchWriter, Writer

Route = Literal["torch", "onnx"]
Function = Callable[[np.ndarray], tuple[np.ndarray, ...]]  # float64 input -> the outputs in float64

NORM_OPS = frozenset({"LayerNormalization", "RMSNormalization", "GroupNormalization", "InstanceNormalization"})
NORM_OPS |= {"MeanVarianceNormalization", "BatchNormalization"}
DECOMPOSED = frozenset({"ReduceMean", "ReduceSum", "ReduceL2", "ReduceSumSquare", "Sqrt", "Reciprocal", "Pow"})


@dataclass(frozen=True)
class Case:
    """What is normalized; ``affine`` is gamma's shape against the input, 1 where it does not vary."""

    kind: str
    shape: tuple[Size, ...]
    axes: tuple[int, ...]
    affine: tuple[int, ...]
    groups: int = 0


CASES = {
    "LN last": Case("LayerNorm", ("B", "S", 16), (2,), (1, 1, 16)),
    "LN last, static": Case("LayerNorm", (2, 5, 12), (2,), (1, 1, 12)),
    "LN last, 2-D": Case("LayerNorm", ("B", 24), (1,), (1, 24)),
    "LN last, 4-D": Case("LayerNorm", ("B", 3, "S", 8), (3,), (1, 1, 1, 8)),
    "LN last two": Case("LayerNorm", ("B", 4, 6), (1, 2), (1, 4, 6)),
    "LN sample": Case("LayerNorm", ("B", 3, 4, 5), (1, 2, 3), (1, 3, 4, 5)),
    "LN channel": Case("LayerNorm", ("B", 8, 4, 3), (1,), (1, 8, 1, 1)),
    "LN middle": Case("LayerNorm", (2, 6, 5), (1,), (1, 6, 1)),
    "LN batch": Case("LayerNorm", (8, 3, 4), (0,), (1, 1, 4)),
    "LN gamma across": Case("LayerNorm", ("B", 5, 16), (2,), (1, 5, 1)),
    "RMS last": Case("RMSNorm", ("B", "S", 16), (2,), (1, 1, 16)),
    "RMS last, static": Case("RMSNorm", (2, 3, 12), (2,), (1, 1, 12)),
    "RMS heads": Case("RMSNorm", ("B", "S", 2, 8), (3,), (1, 1, 1, 8)),
    "GN": Case("GroupNorm", ("B", 12, 3, 4), (), (1, 12, 1, 1), 3),
    "GN, G = 1": Case("GroupNorm", ("B", 6, 3, 3), (), (1, 6, 1, 1), 1),
    "GN, G = C": Case("GroupNorm", ("B", 4, 3, 4), (), (1, 4, 1, 1), 4),
    "GN, 3-D": Case("GroupNorm", ("B", 8, "L"), (), (1, 8, 1), 2),
    "GN, 5-D": Case("GroupNorm", (2, 8, 2, 3, 2), (), (1, 8, 1, 1, 1), 4),
    "IN": Case("InstanceNorm", ("B", 4, 4, 5), (2, 3), (1, 4, 1, 1)),
    "IN, 3-D": Case("InstanceNorm", ("B", 6, 9), (2,), (1, 6, 1)),
    "IN, 5-D": Case("InstanceNorm", (2, 3, 2, 3, 4), (2, 3, 4), (1, 3, 1, 1, 1)),
    "IN, channels last": Case("InstanceNorm", ("B", 4, 5, 3), (1, 2), (1, 1, 1, 3)),
    "BN 2-D": Case("BatchNorm", ("B", 10), (), (1, 10)),
    "BN 3-D": Case("BatchNorm", ("B", "S", 6), (), (1, 1, 6)),
    "BN 4-D": Case("BatchNorm", ("B", 6, 4, 5), (), (1, 6, 1, 1)),
}


@dataclass(frozen=True)
class Example:
    """A generated model. ``nodes`` is the least and the most norm nodes that a correct result may hold."""

    route: Route
    case: Case
    dtype: str
    shape: tuple[Size, ...]
    source: str  # PyTorch text (torch route), "" for a graph
    params: Mapping[str, np.ndarray]
    proto: onnx.ModelProto | None
    exact_proto: onnx.ModelProto | None  # the same graph in float64, for checks of the generator itself
    definition: Function | None  # None for lookalikes: nothing defines them but their own text
    nodes: tuple[int, int]
    vector: Mapping[str, Any]
    forbidden: frozenset[str] = DECOMPOSED  # op types that must be gone
    why: str = ""  # lookalikes: why no node says it
    only_ops: frozenset[str] = NORM_OPS  # the norm ops that a correct result may hold

    def __repr__(self) -> str:
        """All that is needed to see the failure: the vector, then the text."""
        text = self.source or onnx.printer.to_text(self.proto)
        head = (
            f"{self.case}\n{self.why or 'spelling'}; {self.dtype}, norm nodes {self.nodes}\nvector:"
            f" {json.dumps(self.vector)}"
        )
        return f"<{self.route}\n{head}\n{text}>"

    @property
    def dynamic(self) -> dict[int, str]:
        return {axis: size for axis, size in enumerate(self.shape) if isinstance(size, str)}

    def inputs(self, seed: int = 0, **sizes: int) -> np.ndarray:
        """An input of the model's type: every sample on its own scale and offset, the last one all zero (has epsilon
        survived?) but where a second norm would divide the first one's rounding by sqrt(eps)."""
        rng = np.random.default_rng(seed)
        shape = [{"B": 3, "S": 4, "L": 5, **sizes}[s] if isinstance(s, str) else s for s in self.shape]
        scale, offset = np.array([(0.03, 0.0), (1.0, 2.0), (4.0, 0.0)])[rng.integers(0, 3, shape[0])].T.reshape(
            2, -1, *[1] * (len(shape) - 1)
        )
        x = rng.standard_normal(shape) * scale + offset
        if self.nodes != (2, 2):
            x[-1] = 0.0
        return x.astype(self.dtype)

    def module(self, exact: bool = False) -> torch.nn.Module:
        """The source run as Python; with ``exact`` every floating type in it is float64."""
        text = self.source
        if exact:
            text = text.replace(
                "torch.float16, torch.float32, torch.float64", "torch.float64, torch.float64, torch.float64"
            )
        namespace: dict[str, Any] = {}
        exec(compile(text, "<generated>", "exec"), namespace)
        kind = np.float64 if exact else np.dtype(self.dtype)
        held = {name: torch.from_numpy(np.asarray(values, kind)) for name, values in self.params.items()}
        return namespace["Norm"](held).eval()


def moments(case: Case, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean (0 for RMS), biased variance (or mean square), both ready to broadcast, and x as the statistics see it."""
    if case.groups:
        x = x.reshape(x.shape[0], case.groups, x.shape[1] // case.groups, *x.shape[2:])
    axes = tuple(range(2, x.ndim)) if case.groups else case.axes
    mean = np.zeros(()) if case.kind == "RMSNorm" else x.mean(axes, keepdims=True)
    return mean, ((x - mean) ** 2).mean(axes, keepdims=True), x


def normalized(case: Case, x: np.ndarray, eps: float) -> np.ndarray:
    """x̂ by its definition, in float64."""
    mean, var, view = moments(case, x)
    return ((view - mean) / np.sqrt(var + eps)).reshape(x.shape)


def affine_values(choices: Choices, shape: tuple[int, ...]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Gamma and beta on a grid of 1/64: exact in float16, also as gamma − 1."""
    which = choices("affine", ["gamma and beta", "gamma", "beta", "none"])
    rng = np.random.default_rng(len(shape) * 100 + sum(shape))
    gamma, beta = rng.integers(32, 97, shape) / 64, rng.integers(-64, 65, shape) / 64
    return gamma if "gamma" in which else None, beta if "beta" in which else None


def parameters(w: Writer, gamma: np.ndarray | None, beta: np.ndarray | None, dtype: str) -> tuple[T | None, T | None]:
    g = None if gamma is None else to(w, w.spell("gamma", gamma), dtype)
    return g, None if beta is None else to(w, w.spell("param", "beta", beta), dtype)


def write_norm(
    w: Writer, case: Case, x: T, eps: float, gamma: np.ndarray | None, beta: np.ndarray | None
) -> tuple[T, Stats]:
    """One norm, spelled."""
    z = w.spell("precision", x)
    layout = w.spell("layout", z, case.axes, case.groups)
    within = [None if v is None else layout.param(v) for v in (gamma, beta)]
    inside = any(v is not None for v in within) and w.choices("affine.inside", [True, False])
    stats = w.spell("rms.stats" if case.kind == "RMSNorm" else "stats", layout.view, layout.axes)
    y = w.spell(
        "whole", layout, stats, eps, *(parameters(w, within[0], within[1], z.dtype) if inside else (None, None))
    )
    y = layout.back(y)
    if not inside:
        early = (
            z.dtype != x.dtype
            and w.choices("cast back", ["after the affine", "before the affine"]) == "before the affine"
        )
        y = to(w, y, x.dtype) if early else y
        y = affine(w, y, *parameters(w, gamma, beta, y.dtype))
    return to(w, y, x.dtype), stats


@KNOWN.spelling("whole", "usual")
def _(w: Writer, layout: Any, stats: Stats, eps: float, gamma: T | None, beta: T | None) -> T:
    return w.spell("apply", layout.view, stats, w.spell("epsilon", stats.var, eps), gamma, beta)


def write_batch_norm(
    w: Writer, case: Case, x: T, eps: float, gamma: np.ndarray | None, beta: np.ndarray | None
) -> tuple[T, Function]:
    """An eval BatchNorm by hand: (x − running mean) / sqrt(running variance + eps)."""
    rng = np.random.default_rng(sum(case.affine))
    mean, var = rng.integers(-64, 65, case.affine) / 64, rng.integers(16, 97, case.affine) / 64
    m, v = (w.spell("param", name, values) for name, values in (("running_mean", mean), ("running_var", var)))
    g, b = parameters(w, gamma, beta, x.dtype)
    stats = Stats(m, w.spell("centre", x, m), v)
    y = w.spell("apply", x, stats, w.spell("epsilon", v, eps), g, b)

    def definition(value: np.ndarray) -> tuple[np.ndarray, ...]:
        scaled = (value - mean) / np.sqrt(var + eps)
        return (scaled * (1.0 if gamma is None else gamma) + (0.0 if beta is None else beta),)

    return y, definition


def new_writer(route: Route, choices: Choices, book: Book, dtype: str, exact: bool = False) -> Any:
    return TorchWriter(choices, book, dtype) if route == "torch" else OnnxWriter(choices, book, dtype, exact=exact)


def finish(route: Route, w: Any, x: T, outputs: Sequence[T]) -> tuple[str, onnx.ModelProto | None]:
    return (w.source([x], outputs), None) if route == "torch" else ("", w.proto(outputs))


EXTRAS = ["none", "residual", "mean too", "centred too", "twice the affine", "two norms"]
Written = tuple[list[T], Function, tuple[int, int], frozenset[str]]


def write_example(w: Writer, x: T, case: Case, eps: float) -> Written:
    """The outputs, their definition, the norm nodes expected and the op types that must be gone."""
    gamma, beta = affine_values(w.choices, case.affine)
    if case.kind == "BatchNorm":
        y, function = write_batch_norm(w, case, x, eps, gamma, beta)
        return [y], function, (0, 0), DECOMPOSED | {"Div", "Sub"}
    extra = w.choices("extra", [e for e in EXTRAS if case.groups == 0 or e in ("none", "residual")])

    def one(value: np.ndarray, scale: float = 1.0) -> np.ndarray:
        y = normalized(case, value, eps)
        return scale * (y * (1.0 if gamma is None else gamma) + (0.0 if beta is None else beta))

    y, stats = write_norm(w, case, x, eps, gamma, beta)
    if extra == "residual":
        return [w.add(x, y)], lambda v: (v + one(v),), (1, 1), DECOMPOSED
    if extra == "two norms":
        # without the relu, x + norm(x) can be a multiple of x - mean, and both norms are one
        z, _ = write_norm(w, case, w.add(x, w.unary("relu", y)), eps, gamma, beta)
        return [z], lambda v: (one(v + np.maximum(one(v), 0.0)),), (2, 2), DECOMPOSED
    if extra == "twice the affine":
        return [y, w.mul(y, 0.5)], lambda v: (one(v), one(v, 0.5)), (1, 2), DECOMPOSED
    direct = w.choices.vector.get("layout") == "direct"
    if extra == "mean too" and stats.mean is not None and direct:
        return (
            [y, stats.mean],
            lambda v: (one(v), moments(case, v)[0]),
            (1, 1),
            DECOMPOSED - {"ReduceMean", "ReduceSum"},
        )
    if extra == "centred too" and stats.mean is not None and direct:
        return (
            [y, stats.centred],
            lambda v: (one(v), v - moments(case, v)[0]),
            (1, 1),
            DECOMPOSED - {"ReduceMean", "ReduceSum"},
        )
    return [y], lambda v: (one(v),), (1, 1), DECOMPOSED


def generate(choices: Choices, book: Book = KNOWN, route: Route = "onnx", kinds: Sequence[str] = ()) -> Example:
    """Draw one example whose norms must all become one node each, or be folded."""
    name = choices("case", [n for n, c in CASES.items() if not kinds or c.kind in kinds])
    dtype = choices("dtype", ["float32", "float16"])
    # in float16 an epsilon below 6e-8 is zero: another function, not another spelling
    eps = choices("eps", [1e-5, 1e-12, 1e-8, 1e-6, 1e-3] if dtype == "float32" else [1e-3, 1e-5])
    case = CASES[name]

    def write(choices: Choices, exact: bool) -> tuple[Any, Written, str, onnx.ModelProto | None]:
        w = new_writer(route, choices, book, dtype, exact)
        x = w.input("x", case.shape)
        written = write_example(w, x, case, eps)
        return w, written, *finish(route, w, x, written[0])

    w, (_, definition, nodes, forbidden), source, proto = write(choices, False)
    exact = write(Choices.replayed(choices.vector), True)[3] if route == "onnx" else None
    return Example(
        route, case, dtype, case.shape, source, w.params, proto, exact, definition, nodes, choices.vector, forbidden
    )
