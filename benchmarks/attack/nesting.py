"""Draw norms in branches, loops, scans and local functions.

Their bodies capture outer tensors and shadow names, and some functions have the names of built-in ops.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import helper

from .builder import Builder, Case, Dim
from .norms import draw, norm
from .values import NONFINITE, PIECEWISE, row_wise, some_number

Body = Callable[[Builder, str], str]


def _plain(dims: list[Dim]) -> Body:
    return lambda b, x: norm(b, x, dims, draw(b, [-1]))


def _trapped(dims: list[Dim]) -> Body:
    def body(b: Builder, x: str) -> str:
        """Write a norm with a trap.

        Returns:
            its result.
        """
        s = draw(b, [-1])
        s.order = "plain"
        trap = b.pick(*PIECEWISE, *NONFINITE, row_wise)
        s.hooks[b.pick("x", "y", "scaled")] = lambda t: trap(b, t)
        b.note(trap.__name__)
        return norm(b, x, dims, s)

    return body


def _inner(outer: Builder, prefix: str) -> Builder:
    inner = Builder(outer.rng, outer.opset, outer.dtype, prefix)
    inner.numbers, inner.sizes = outer.numbers, outer.sizes
    return inner


def _if(b: Builder, x: str, dims: list[Dim], one: Body, other: Body) -> str:
    """Put each body in a branch that reads x from outside. The condition is an input, a size or a value."""
    how = b.rng.integers(3)
    if how == 0:
        condition = b.input("flag", [], np.bool_)
    elif how == 1:
        t = int(b.rng.integers(2, 60))
        b.sizes.setdefault(str(dims[0]), []).extend([t, t + 1, 1])
        condition = b.op("Greater", b.size_of(x, 0), b.const(t, np.int64))
    else:
        condition = b.op("Greater", b.op("ReduceMax", x, keepdims=0), b.number(some_number(b)))
    graphs = []
    for prefix, body in (("then_", one), ("else_", other)):
        inner = _inner(b, prefix)
        inner.output(body(inner, x))
        graphs.append(inner.graph(prefix))
        b.note(inner.label)
    b.note("if")
    return b.op("If", condition, then_branch=graphs[0], else_branch=graphs[1])


def _loop(b: Builder, x: str, dims: list[Dim], body: Body, by_turn: bool) -> str:
    """Normalize the carried tensor several times; with ``by_turn`` the loop does something else from some turn on."""
    inner = _inner(b, "loop_")
    turn = inner.input("loop_i", [], np.int64)
    going = inner.input("loop_go", [], np.bool_)
    held = inner.input("loop_v", dims)
    again = inner.op("Identity", going)
    y = body(inner, held)
    if by_turn:
        late = inner.op("Less", turn, inner.const(int(b.pick(1, 2, 3)), np.int64))
        y = inner.op("Where", late, y, inner.op("Mul", held, inner.const(2.0)))
    inner.output(again, [], np.bool_)
    inner.output(y, dims)
    turns = b.const(int(b.pick(1, 2, 4)), np.int64) if b.chance(0.6) else b.size_of(x, 0)
    b.note(f"loop-{inner.label}")
    return b.op("Loop", turns, b.const(True, np.bool_), x, body=inner.graph("loop"))


def _scan(b: Builder, x: str, dims: list[Dim], body: Body) -> str:
    """Normalize each row, and keep a running sum that a trap may use."""
    inner = _inner(b, "scan_")
    total = inner.input("scan_s", [dims[-1]])
    row = inner.input("scan_x", dims[1:])
    y = body(inner, row)
    inner.output(inner.op("Add", total, row), [dims[-1]])
    inner.output(y, dims[1:])
    b.note(f"scan-{inner.label}")
    zero = b.const(np.zeros(int(dims[-1])))
    return b.many("Scan", zero, x, outputs=2, body=inner.graph("scan"), num_scan_inputs=1)[1]


def _function(
    b: Builder, domain: str, name: str, body: Callable[[Builder, list[str]], str], given: list[str], **attributes: float
) -> str:
    """Call a local function whose body ``body`` writes; constants are nodes inside it."""
    if not any(f.name == name and f.domain == domain for f in b.functions):
        inner = _inner(b, f"{name}_")
        names = [f"{name}_in{k}" for k in range(len(given))]
        result = body(inner, names)
        held = [helper.make_node("Constant", [], [t.name], value=t) for t in inner.constants]
        imports = [helper.make_opsetid("", b.opset)] + [
            helper.make_opsetid(d, 1) for d in sorted(inner.domains | {domain})
        ]
        b.functions.append(
            helper.make_function(
                domain, name, names, [result], [*held, *inner.nodes], imports, attributes=list(attributes)
            )
        )
        b.note(inner.label)
    return b.op(name, *given, outputs=1, domain=domain, **attributes)


def _frame(rng: np.random.Generator) -> tuple[Builder, list[Dim], str]:
    b = Builder(rng)
    dims: list[Dim] = [b.pick("d0", "?0"), int(b.pick(3, 4, 8))]
    return b, dims, b.input("x", dims)


def _nest(rng: np.random.Generator, trapped: bool) -> Case:
    b, dims, x = _frame(rng)
    body = _trapped(dims) if trapped else _plain(dims)
    how = b.rng.integers(4)
    if how == 0:
        y = _if(b, x, dims, body, _plain(dims))
    elif how == 1:
        y = _loop(b, x, dims, body if b.chance(0.5) or not trapped else _plain(dims), trapped)
    elif how == 2:
        y = _scan(b, x, dims, _trapped(dims[1:]) if trapped else _plain(dims[1:]))
    else:
        y = _function(b, "local", "Block", lambda i, names: body(i, names[0]), [x])
        y = _function(b, "local", "Block", lambda i, names: body(i, names[0]), [b.op("Neg", y)]) if b.chance(0.5) else y
    b.output(y, dims)
    return b.case("", not trapped)


def honest(rng: np.random.Generator) -> Case:
    """Draw nested norms without a trap.

    Returns:
        the case.
    """
    return _nest(rng, False)


def trapped(rng: np.random.Generator) -> Case:
    """Draw nested norms with a trap.

    Returns:
        the case.
    """
    return _nest(rng, True) if rng.random() < 0.75 else _captured(rng)


def _captured(rng: np.random.Generator) -> Case:
    """Draw two branches that use the same inner names for different things; half of a norm is outside."""
    b, dims, x = _frame(rng)
    n = int(dims[-1])
    d = b.op("Sub", x, b.reduce("ReduceMean", x, [-1]))
    flag = b.input("flag", [], np.bool_)
    graphs = []
    for power in (2.0, float(b.pick(2.0, 4.0))):
        inner = Builder(rng, b.opset, np.float32, "same_")
        inner.domains = b.domains
        source = d if power == 2.0 or b.chance(0.5) else x
        v = inner.reduce("ReduceMean", inner.op("Pow", source, inner.const(power)), [-1])
        y = inner.op("Div", d, inner.op("Sqrt", inner.op("Add", v, inner.const(1e-5))))
        y = inner.op("Mul", y, inner.const(rng.normal(1, 0.3, n)))
        inner.output(y)
        graphs.append(inner.graph("same"))
    y = b.op("If", flag, then_branch=graphs[0], else_branch=graphs[1])
    b.output(y, dims)
    b.note("captured")
    return b.case("", False)


BUILT_IN = (
    ("com.microsoft", "SimplifiedLayerNormalization", 2),
    ("com.microsoft", "SkipLayerNormalization", 4),
    ("com.microsoft", "SkipSimplifiedLayerNormalization", 3),
    ("com.microsoft", "LayerNormalization", 3),
    ("com.microsoft", "SimplifiedLayerNormalization", 2),
    ("com.microsoft", "RMSNorm", 2),
    ("normdeploy", "AddLayerNorm", 4),
    ("normdeploy", "AddRMSNorm", 3),
    ("normdeploy", "RMSNorm", 2),
    ("normdeploy", "StdNorm", 3),
    ("normdeploy", "LayerNorm", 3),
    ("normdeploy", "ModulatedLayerNorm", 3),
    ("normdeploy", "ChannelLayerNorm", 3),
    ("pkg.onnxscript.torch_lib", "aten_layer_norm", 3),
)


def shadowed(rng: np.random.Generator) -> Case:
    """Draw a model-local function with the name of a built-in op or of this project's own, and another body.

    Returns:
        the case.
    """
    b, dims, x = _frame(rng)
    n = int(dims[-1])
    domain, name, count = b.pick(*BUILT_IN)
    given = [x]
    if "Skip" in name or "Add" in name:
        given.append(b.input("skip", dims))
    while len(given) < count:
        given.append(b.param(rng.normal(1, 0.3, n)))
    fault = b.pick("none", "eps", "axis", "twist", "scale", "other", "trap")

    def body(i: Builder, names: list[str]) -> str:
        """Write the function's body.

        Returns:
            its result.
        """
        v = i.op("Add", names[0], names[1]) if len(given) > 1 and given[1] == "skip" else names[0]
        if fault == "trap":
            v = i.pick(*PIECEWISE)(i, v)
        rms = "RMS" in name or "Simplified" in name
        d = v if rms else i.op("Sub", v, i.reduce("ReduceMean", v, [-1]))
        axis = -2 if fault == "axis" else -1
        square = i.reduce("ReduceMean", i.op("Mul", d, d), [axis])
        y = i.op("Div", d, i.op("Sqrt", i.op("Add", square, i.const(0.3 if fault == "eps" else 1e-5))))
        if fault == "twist":
            y = i.op("Tanh", y)
        if fault == "scale":
            y = i.op("Mul", y, i.const(1.25))
        rest = names[2 if given[1:2] == ["skip"] else 1 :]
        for k, p in enumerate(rest):
            y = i.op("Mul" if (k == 0) != (fault == "other") else "Add", y, p)
        return y

    y = _function(b, domain, name, body, given, **({"epsilon": 1e-5} if b.chance(0.5) else {}))
    if b.chance(0.4):
        y = norm(b, y, dims, draw(b, [-1]))
    b.output(y, dims)
    b.note(f"{name}:{fault}")
    return b.case("", fault == "none")


__all__ = ["honest", "shadowed", "trapped"]
