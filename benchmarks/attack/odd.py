"""Draw traps that combine causes: several norms, wide rows, defaults that a caller may override, views, casts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from onnx import numpy_helper

from .builder import Builder, Case, Dim
from .norms import draw, frame, norm
from .values import PIECEWISE, row_wise
from .whole import start


def stacked(rng: np.random.Generator) -> Case:
    """Draw up to ten norms of one spelling in a row. At most one differs, sometimes only at other sizes.

    Returns:
        the case.
    """
    b = start(rng, half=False)
    dims: list[Dim] = [b.pick("d0", "?0"), int(b.pick(3, 4, 6))]
    if b.chance(0.4):
        dims = [dims[0], b.pick("s", "?s"), dims[1]]
    x = b.input("x", dims)
    count = int(b.pick(2, 3, 9, 10))
    wrong = int(b.rng.integers(count))
    plan = draw(b, [-1])
    plan.order = "plain"
    t = int(b.pick(3, 7, 12, 40))
    axis = str(dims[len(dims) - 2])
    b.sizes[axis] = [t, t + 1, 1, 2]
    fault = b.pick("none", "size", "trap", "row", "eps", "square")

    def by_size(v: str) -> str:
        """Change the value beyond a size.

        Returns:
            name of the result.
        """
        more = b.op("Greater", b.size_of(v, len(dims) - 2), b.const(t, np.int64))
        return b.op("Where", more, b.op("Mul", v, b.const(1.5)), v)

    y = x
    for k in range(count):
        s = replace(plan, hooks={})
        if k == wrong and fault == "size":
            s.hooks[b.pick("x", "variance", "y")] = by_size
        elif k == wrong and fault == "trap":
            trap = b.pick(*PIECEWISE)
            s.hooks["x"] = lambda v, trap=trap: trap(b, v)  # type: ignore[misc]
        elif k == wrong and fault == "row":
            s.hooks["normed"] = lambda v: row_wise(b, v)
        elif k == wrong and fault == "eps":
            s.eps = plan.eps * 3 + 1e-6
        elif k == wrong and fault == "square":
            s.hooks["square"] = lambda v: b.op("Abs", b.op("Mul", v, b.const(1 + 1e-4)))
        y = norm(b, y, dims, s)
        if b.chance(0.5):
            y = b.op("Add", y, x)
    b.output(y)
    b.note(f"stacked{count}:{wrong}:{fault}{t}")
    return b.case("", fault in ("none", "eps"))


def wide(rng: np.random.Generator) -> Case:
    """Draw a static row so wide that a normalized element can be far larger than in a narrow one: |x̂| reaches sqrt(n −
    1).

    Returns:
        the case.
    """
    b = start(rng, half=False)
    n = int(b.pick(64, 256, 1024, 4096))
    dims: list[Dim] = [b.pick("d0", 1, 2), n]
    b.sizes["d0"] = [1, 2]
    x = b.input("x", dims)
    top = float(np.sqrt(n - 1) * b.rng.uniform(0.3, 0.95))
    s = draw(b, [-1])
    s.order = "plain"
    s.gamma = s.beta = False

    def trap(v: str) -> str:
        """Change large elements.

        Returns:
            name of the result.
        """
        how = b.rng.integers(5)
        if how == 0:
            return b.op("Max", v, b.const(-top))
        if how == 1:
            return b.op("Min", v, b.const(top))
        if how == 2:
            return b.clip(v, b.const(-top), b.const(top))
        if how == 3:
            return b.op("Where", b.op("Less", b.op("Abs", v), b.const(top)), v, b.const(0.0))
        return b.op("Sub", b.op("Relu", b.op("Add", v, b.param(top))), b.param(top))

    s.hooks[b.pick("normed", "y")] = trap
    b.output(norm(b, x, dims, s))
    b.note(f"wide{n}:{top:.0f}")
    return b.case("", False)


def overridable(rng: np.random.Generator) -> Case:
    """Draw a parameter that is also a graph input: its initializer is only a default, which a caller may override.

    Returns:
        the case.
    """
    b = start(rng, half=False)
    dims, axes = frame(b, dynamic_last=False)
    s = draw(b, axes)
    s.order = "plain"
    x = b.input("x", dims)
    y = norm(b, x, dims, s)
    if b.chance(0.3):
        y = b.op("MatMul", y, b.param(rng.normal(size=(int(dims[-1]), 3))))
        y = b.op("Div", b.op("Sub", y, b.param(rng.normal(size=3))), b.param(rng.uniform(0.5, 2, 3)))
    b.output(y)
    free = [t for t in b.constants if t.data_type in (1, 11)]
    for tensor in free:
        array = numpy_helper.to_array(tensor)
        if b.chance(0.6) and array.size and not np.array_equal(array, np.asarray(2.0)):
            b.input(tensor.name, array.shape, array.dtype)
            b.inputs[-1] = replace(b.inputs[-1], mean=array, std=np.abs(array) * 0.2 + 1e-6)
    b.note(f"overridable{len(b.inputs) - 1}")
    return b.case("", False)


def views(rng: np.random.Generator) -> Case:
    """Draw a norm with views that regroup the elements: some are a GroupNorm, others nearly.

    Returns:
        the case.
    """
    b = start(rng, half=False)
    n, c = b.pick("d0", 2, 4), int(b.pick(4, 6, 8))
    w = b.pick("w", 4, 6)
    b.sizes["w"] = [2, 4, 6, 8, 12]
    b.sizes["d0"] = [1, 2, 4, 8]
    dims: list[Dim] = [n, c, w]
    x = b.input("x", dims)
    how = b.rng.integers(7)
    s = draw(b, [-1], rms=b.chance(0.2))
    s.gamma = s.beta = False
    s.order, s.mean = "plain", "mean"
    s.variance = b.pick("pow", "mul") if s.variance not in ("pow", "mul", "expect", "flax") else s.variance
    free: list[Dim] = [n, "r", "q"]
    # Interleaved groups.
    if how == 0:
        v = b.op("Transpose", b.reshape(x, 0, c // 2, 2, -1), perm=[0, 2, 1, 3])
        v = b.reshape(v, 0, 2, -1)
        y = norm(b, v, free, s)
        y = b.op("Transpose", b.reshape(y, 0, 2, c // 2, -1), perm=[0, 2, 1, 3])
    # The number of groups grows with the batch.
    elif how == 1:
        y = norm(b, b.reshape(x, -1, c), free, s)
    # A row is two channels of one image, or of two images.
    elif how == 2:
        y = norm(b, b.reshape(x, 2, -1), free, s)
    elif how == 3:
        y = norm(b, b.reshape(x, 0, 2, -1), free, s)
    # The shape is computed: n·c // 2 rows.
    elif how == 4:
        rows = b.op("Div", b.op("Mul", b.size_of(x, 0, False), b.size_of(x, 1, False)), b.ints(2))
        v = b.op("Reshape", x, b.op("Concat", rows, b.ints(-1), axis=0))
        y = norm(b, v, free, s)
    # Transposed, and back by a reshape that does not undo it.
    elif how == 5:
        v = b.op("Transpose", x, perm=[0, 2, 1])
        y = norm(b, v, [n, w, c], s)
    # As many rows as the width.
    else:
        v = b.op(
            "Reshape", x, b.op("Concat", b.ints(0), b.op("Min", b.size_of(x, 2, False), b.ints(4)), b.ints(-1), axis=0)
        )
        y = norm(b, v, free, s)
    y = b.op("Reshape", y, b.op("Shape", x))
    if b.chance(0.5):
        y = b.op("Add", b.op("Mul", y, b.param(rng.normal(1, 0.3, (c, 1)))), b.param(rng.normal(size=(c, 1))))
    b.output(y, dims)
    b.note(f"views{how}")
    return b.case("", False)


def captured(rng: np.random.Generator) -> Case:
    """Draw a norm with an inner tensor that only the body of an If reads.

    Returns:
        the case.
    """
    b = start(rng, half=False)
    dims, axes = frame(b)
    s = draw(b, axes)
    held: list[str] = []
    s.hooks[b.pick("x", "d", "variance", "root", "normed", "scaled")] = lambda v: (held.append(v), v)[1]  # type: ignore[func-returns-value]
    x = b.input("x", dims)
    y = norm(b, x, dims, s)
    flag = b.input("flag", [], np.bool_)
    graphs = []
    for prefix, tensor in (("yes_", held[0] if held else x), ("no_", y)):
        inner = Builder(rng, b.opset, b.dtype, prefix)
        inner.output(inner.op("Mul", tensor, inner.const(2.0)))
        graphs.append(inner.graph(prefix))
    b.output(y)
    b.output(b.op("If", flag, then_branch=graphs[0], else_branch=graphs[1]))
    b.note("captured")
    return b.case("", False)


def casts(rng: np.random.Generator) -> Case:
    """Draw half precision around a float32 norm, with the clamps that models use there.

    Returns:
        the case.
    """
    b = Builder(rng, dtype=np.float16)
    dims, axes = frame(b)
    x = b.input("x", dims)
    clamped = b.chance(0.5)
    v = b.clip(x, b.const(-64504.0), b.const(64504.0)) if clamped and b.chance(0.5) else x
    b.dtype = np.dtype(np.float32)
    wide_x = b.cast(v, np.float32)
    s = draw(b, axes)
    if clamped:
        top = float(b.pick(6e4, 65504.0, 1000.0, 100.0))
        b.numbers += [top, -top]
        s.hooks[b.pick("x", "y")] = lambda t: b.clip(t, b.const(-top), b.const(top))
    y = norm(b, wide_x, dims, s)
    b.output(b.cast(y, np.float16), None, np.float16)
    b.dtype = np.dtype(np.float16)
    b.note(f"casts{int(clamped)}")
    return b.case("", not clamped)


def degenerate(rng: np.random.Generator) -> Case:
    """Draw an epsilon of zero, with the code that models use to catch the 0/0 of a constant row.

    Returns:
        the case.
    """
    b = start(rng, half=False)
    dims, axes = frame(b)
    s = draw(b, axes)
    s.eps, s.outside, s.order = 0.0, False, "plain"
    s.inverse = b.pick("div_sqrt", "recip_sqrt", "pow_minus")
    b.degenerate = True
    caught = b.chance(0.7)
    if caught:

        def catch(v: str) -> str:
            """Catch NaN.

            Returns:
                name of the result.
            """
            how = b.rng.integers(3)
            if how == 0 and b.dtype == np.float32:
                return b.op("Where", b.op("IsNaN", v), b.const(0.0), v)
            return b.op("Where", b.op("Equal", v, v), v, b.const(0.0))

        s.hooks[b.pick("normed", "y")] = catch
        if b.chance(0.3):
            s.hooks = {"root": lambda v: b.op("Where", b.op("Equal", v, b.const(0.0)), b.const(1.0), v)}
            s.inverse = "div_sqrt"
    x = b.input("x", dims)
    b.output(norm(b, x, dims, s))
    b.note(f"degenerate{int(caught)}:{s.inverse}")
    return b.case("", not caught)
