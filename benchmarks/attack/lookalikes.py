"""Draw norms with one subtle fault, and norms whose inner tensors have other readers."""

from __future__ import annotations

import numpy as np

from .builder import Case
from .norms import draw, frame, norm
from .whole import start


def subtle(rng: np.random.Generator) -> Case:
    """Draw a norm with one subtle fault.

    Returns:
        the case.
    """
    b = start(rng)
    dims, axes = frame(b, dynamic_last=False)
    n = int(dims[-1])
    s = draw(b, [-1] if b.chance(0.8) else axes)
    s.order = "plain"
    x = b.input("x", dims)
    fault = b.pick(
        "mean_weights",
        "eps_row",
        "square_weight",
        "residual",
        "axis",
        "gamma_row",
        "sign",
        "permuted",
        "two_inputs",
        "roll",
        "count",
        "power",
        "gate",
        "gamma_zero",
        "eps_data",
        "half_gamma",
        "mean_of_other",
        "var_weight",
    )
    off = float(b.pick(1e-5, 1e-4, 1e-6, 1e-2, -1e-5)) if b.dtype != np.float16 else 0.05
    one = b.rng.integers(n)
    row = np.ones(n)
    row[one] += off
    # A mean by MatMul with one weight off.
    if fault == "mean_weights":
        w = np.full((n, 1), 1 / n)
        w[one] *= 1 + off
        d = b.op("Sub", x, b.op("MatMul", x, b.const(w)))
        s.rms, s.axes = True, (-1,)
        y = norm(b, d, dims, s)
    elif fault in ("eps_row", "eps_data"):
        s.hooks["variance"] = lambda v: b.op(
            "Add",
            v,
            b.const(np.array([0, 1, 0, 2.0][:1]) * 0 + 1e-3)
            if fault == "eps_row"
            else b.op("Mul", b.op("Abs", b.slice(x, 0, 1, -1)), b.const(1e-6)),
        )
        y = norm(b, x, dims, s)
    elif fault in ("square_weight", "var_weight"):
        s.variance, s.ddof = b.pick("mul", "pow"), 0
        s.hooks["square"] = lambda v: b.op("Mul", v, b.const(row))
        y = norm(b, x, dims, s)
    elif fault == "residual":
        y = norm(b, b.op("Add", x, x), dims, s)
        y = b.op("Add", y, b.op("Mul", x, b.number(1 + off)))
    elif fault == "axis":
        s.rms = False
        s.hooks["variance"] = lambda v: b.reduce("ReduceMean", v, [-2])
        y = norm(b, x, dims, s)
    elif fault == "gamma_row":
        s.hooks["normed"] = lambda v: b.op("Mul", v, b.const(row))
        y = norm(b, x, dims, s)
    elif fault == "sign":
        s.rms = False
        s.hooks["d"] = lambda v: b.op("Mul", v, b.const(np.where(np.arange(n) == one, -1.0, 1.0)))
        y = norm(b, x, dims, s)
    elif fault in ("permuted", "roll"):
        order = np.roll(np.arange(n), 1) if fault == "roll" else b.rng.permutation(n)
        s.hooks[b.pick("normed", "x", "y")] = lambda v: b.op("Gather", v, b.const(order, np.int64), axis=-1)
        y = norm(b, x, dims, s)
    elif fault in ("two_inputs", "mean_of_other"):
        z = b.input("z", dims)
        s.rms = False
        s.hooks["d" if fault == "two_inputs" else "normed"] = lambda v: b.op("Add", v, b.op("Mul", z, b.const(off)))
        y = norm(b, x, dims, s)
    elif fault == "count":
        s.mean = s.variance = "sum_const"
        s.hooks["count"] = lambda v: b.op("Mul", v, b.const(1 + off))
        y = norm(b, x, dims, s)
    elif fault == "power":
        s.hooks["root"] = lambda v: b.op("Pow", v, b.const(1 + off))
        y = norm(b, x, dims, s)
    elif fault == "gate":
        s.hooks["scaled"] = lambda v: b.op("Mul", v, b.op("Sigmoid", b.op("Add", x, b.number(b.pick(30.0, 60.0)))))
        b.numbers += [-30.0, -60.0]
        y = norm(b, x, dims, s)
    elif fault == "gamma_zero":
        zero = np.where(np.arange(n) == one, 0.0, 1.0)
        s.hooks["normed"] = lambda v: b.op("Mul", v, b.const(zero))
        y = norm(b, x, dims, s)
    else:
        s.hooks["normed"] = lambda v: b.op(
            "Mul", v, b.op("Slice", b.const(np.r_[row, row * 2]), b.ints(0), b.ints(n), b.ints(0))
        )
        y = norm(b, x, dims, s)
    b.output(y)
    b.note(f"{fault}:{off:.0e}")
    return b.case("", False)


def outputs(rng: np.random.Generator) -> Case:
    """Draw a norm whose inner tensors are graph outputs or feed other nodes; sometimes the result is also read twice.

    Returns:
        the case.
    """
    b = start(rng)
    dims, axes = frame(b)
    s = draw(b, axes)
    seen: list[str] = []
    for place in ("x", "d", "square", "variance", "root", "normed", "scaled", "y"):
        if b.chance(0.3):
            s.hooks[place] = lambda v: (seen.append(v), v)[1]  # type: ignore[func-returns-value]
    x = b.input("x", dims)
    y = norm(b, x, dims, s)
    for tensor in dict.fromkeys(seen):
        if b.chance(0.5) or tensor == x:
            tensor = b.op(b.pick("Neg", "Abs", "Identity", "Relu"), tensor)
        if tensor != y:
            b.output(tensor)
    b.output(b.op("Add", y, y) if b.chance(0.2) else y)
    b.note(f"outputs{len(seen)}")
    return b.case("", False)
