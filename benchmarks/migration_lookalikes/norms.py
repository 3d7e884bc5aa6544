"""Draw norms and near-norms, with γ and β of every kind that a file can hold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from .sheet import Sheet, Value

EPSILON = 1e-3
GAMMAS = {
    "plain": 10, "with zeros": 1, "all ones": 1, "all zeros": 0.3, "one number": 1.5, "(1,)": 1, "leading ones": 1.5,
    "along the rows": 2, "of rows and channels": 1.5, "graph input": 1, "overridable": 1, "from data": 1.5,
    "an output of the graph": 1, "with an infinity": 0.5, "with NaN": 0.3, "huge": 0.5, "tiny": 0.5,
}  # fmt: skip


def parameter(sheet: Sheet, what: str, x: Value, axis: int) -> Value:
    """Draw γ or β along ``axis`` of ``x``, in a shape that broadcasts against x as an operand of Mul or Add.

    Returns:
        the tensor.
    """
    size, trailing = x.shape[axis], len(x.shape) - 1 - axis % len(x.shape)
    shape = (size, *[1] * trailing)
    kind = sheet.pick(what, GAMMAS)
    if kind == "from data":
        axes = sheet.whole(*(i for i in range(len(x.shape)) if i != axis % len(x.shape)))
        wide = tuple(size if i == axis % len(x.shape) else 1 for i in range(len(x.shape)))
        return sheet.add("Tanh", [sheet.add("ReduceMean", [x.name, axes], wide, keepdims=1).name], wide)
    if kind in ("graph input", "overridable"):
        name = sheet.given(shape)
        if kind == "overridable":
            sheet.stored.append(numpy_helper.from_array(sheet.numbers(shape), name))
        return Value(name, shape)
    if kind in ("one number", "(1,)"):
        return sheet.const(sheet.numbers(() if kind == "one number" else (1,)))
    if kind == "leading ones":
        return sheet.const(sheet.numbers((*[1] * (len(x.shape) - len(shape)), *shape)))
    if kind == "along the rows" and len(x.shape) > 2:
        # The axis beside the channels.
        other = 1 if axis % len(x.shape) != 1 else 2
        return sheet.const(sheet.numbers((x.shape[other], *[1] * (len(x.shape) - 1 - other))))
    if kind == "of rows and channels" and len(x.shape) > 2:
        return sheet.const(sheet.numbers(x.shape[1:]))
    values = sheet.numbers(shape)
    if kind == "with zeros":
        values.reshape(-1)[::2] = 0
    elif kind in ("all ones", "all zeros"):
        values[...] = kind == "all ones"
    elif kind in ("with an infinity", "with NaN"):
        values.reshape(-1)[0] = np.inf if kind == "with an infinity" else np.nan
    elif kind in ("huge", "tiny") and not sheet.half:
        values *= np.float32(1e30 if kind == "huge" else 1e-30)
    made = sheet.const(values)
    if kind == "an output of the graph":
        sheet.outputs.append(sheet.add("Neg", [made.name], made.shape))
    return made


def affine(sheet: Sheet, n: Value, axis: int, bias: bool) -> Value:
    """Add n · γ + β in one of its spellings.

    Returns:
        the result.
    """
    spelling = sheet.pick("affine", {"n·γ + β": 8, "(n + β)·γ": 1, "n·γ − β": 1, "n / γ + β": 0.7, "γ twice": 1})
    gamma = parameter(sheet, "γ", n, axis)
    beta = parameter(sheet, "β", n, axis) if bias else None
    shift = "Sub" if "−" in spelling else "Add"
    if spelling == "(n + β)·γ" and beta:
        n = sheet.add("Add", [n.name, beta.name], n.shape)
        return sheet.add("Mul", [n.name, gamma.name], n.shape)
    n = two(sheet, "Div", n, gamma, turned=False) if "/" in spelling else two(sheet, "Mul", n, gamma)
    if spelling == "γ twice":
        n = two(sheet, "Mul", n, parameter(sheet, "γ again", n, axis))
    return two(sheet, shift, n, beta, turned=shift == "Add") if beta else n


def two(sheet: Sheet, op: str, a: Value, b: Value, *, turned: bool = True) -> Value:
    """Add a node of two operands, now and then in the other order.

    Returns:
        the result.
    """
    names = [b.name, a.name] if turned and sheet.chance(0.3) else [a.name, b.name]
    return sheet.add(op, names, a.shape)


def reduced(sheet: Sheet, op: str, x: Value, axes: tuple[int, ...]) -> Value:
    """Add a reduction that keeps the axes.

    Returns:
        the result.
    """
    shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
    return sheet.add(op, [x.name, sheet.whole(*axes)], shape, keepdims=1)


def standardized(sheet: Sheet, x: Value, axes: tuple[int, ...], *, center: bool, op: str = "ReduceMean") -> Value:
    """Add (x − mean) / sqrt(mean square + ε) spelled out; without the mean if ``center`` is false.

    Returns:
        the result.
    """
    if center:
        x = sheet.add("Sub", [x.name, reduced(sheet, op, x, axes).name], x.shape)
    square = sheet.add("Mul", [x.name, x.name], x.shape)
    mean = reduced(sheet, op, square, axes)
    root = sheet.add("Sqrt", [sheet.add("Add", [mean.name, sheet.number(EPSILON)], mean.shape).name], mean.shape)
    if sheet.chance(0.5):
        return sheet.add("Div", [x.name, root.name], x.shape)
    return two(sheet, "Mul", x, sheet.add("Reciprocal", [root.name], root.shape))


# ------------------------------------------------------------------ over the last axis


def layer_op(sheet: Sheet, x: Value) -> Value:
    """Add LayerNormalization.

    Returns:
        the result.
    """
    given = [x.name, parameter(sheet, "γ", x, -1).name]
    if sheet.chance(0.7):
        given.append(parameter(sheet, "β", x, -1).name)
    y = sheet.add("LayerNormalization", given, x.shape, axis=-1, epsilon=EPSILON)
    if sheet.chance(0.05):
        sheet.words.append("Mean is read")
        mean = sheet.name()
        sheet.nodes[-1].output.append(mean)
        sheet.outputs.append(Value(mean, (*x.shape[:-1], 1)))
    return y


def rms_op(sheet: Sheet, x: Value) -> Value:
    """Add RMSNormalization.

    Returns:
        the result.
    """
    gamma = parameter(sheet, "γ", x, -1)
    return sheet.add("RMSNormalization", [x.name, gamma.name], x.shape, axis=-1, epsilon=EPSILON)


def spelled(center: bool, op: str = "ReduceMean", axis: int = -1) -> Callable[[Sheet, Value], Value]:
    """Make a function that spells a norm out.

    Returns:
        the function.
    """

    def norm(sheet: Sheet, x: Value) -> Value:
        """Add the norm.

        Returns:
            the result.
        """
        n = standardized(sheet, x, (axis % len(x.shape),), center=center, op=op)
        return affine(sheet, n, -1, bias=sheet.chance(0.6))

    return norm


def bare(op: str) -> Callable[[Sheet, Value], Value]:
    """Make a function that applies γ and β to something that is not a norm.

    Returns:
        the function.
    """

    def norm(sheet: Sheet, x: Value) -> Value:
        """Add the nodes.

        Returns:
            the result.
        """
        n = sheet.add(op, [x.name], x.shape, **({"axis": -1} if op == "Softmax" else {}))
        return affine(sheet, n, -1, bias=sheet.chance(0.6))

    return norm


ROWS: dict[str, Callable[[Sheet, Value], Value]] = {
    "LayerNormalization": layer_op,
    "RMSNormalization": rms_op,
    "layer norm spelled": spelled(True),
    "RMS norm spelled": spelled(False),
    "sums for means": spelled(True, "ReduceSum"),
    "over the rows": spelled(True, axis=-2),
    "Softmax": bare("Softmax"),
    "no norm": bare("Identity"),
}

# ------------------------------------------------------------------ of channels, axis 1 of [B, C, H, W]


def flat(sheet: Sheet, what: str, x: Value) -> str:
    """Draw [C] for an input of a norm op.

    Returns:
        its name.
    """
    kind = sheet.pick(what, {"plain": 8, "with zeros": 1, "overridable": 1, "graph input": 1})
    if kind in ("overridable", "graph input"):
        name = sheet.given((x.shape[1],))
        if kind == "overridable":
            sheet.stored.append(numpy_helper.from_array(sheet.numbers((x.shape[1],)), name))
        return name
    values = sheet.numbers((x.shape[1],))
    if kind == "with zeros":
        values[::2] = 0
    return sheet.const(values).name


def groups(sheet: Sheet, x: Value) -> int:
    """Draw the number of groups.

    Returns:
        a divisor of the channels.
    """
    return int(sheet.rng.choice([g for g in (1, 2, x.shape[1]) if x.shape[1] % g == 0]))


def group_op(sheet: Sheet, x: Value) -> Value:
    """Add GroupNormalization.

    Returns:
        the result.
    """
    given = [x.name, flat(sheet, "γ", x), flat(sheet, "β", x)]
    return sheet.add("GroupNormalization", given, x.shape, num_groups=groups(sheet, x), epsilon=EPSILON)


def instance_op(sheet: Sheet, x: Value) -> Value:
    """Add InstanceNormalization.

    Returns:
        the result.
    """
    given = [x.name, flat(sheet, "γ", x), flat(sheet, "β", x)]
    return sheet.add("InstanceNormalization", given, x.shape, epsilon=EPSILON)


def batch_op(sheet: Sheet, x: Value) -> Value:
    """Add BatchNormalization.

    Returns:
        the result.
    """
    given = [x.name, flat(sheet, "γ", x), flat(sheet, "β", x)]
    given += [sheet.const(sheet.numbers((x.shape[1],))).name]
    given += [sheet.const(np.abs(sheet.numbers((x.shape[1],))) + 0.5).name]
    return sheet.add("BatchNormalization", given, x.shape, epsilon=EPSILON)


def group_spelled(sheet: Sheet, x: Value) -> Value:
    """Add Reshape, standardization by group, Reshape back, γ and β.

    Returns:
        the result.
    """
    count, shape = groups(sheet, x), x.shape
    wide = sheet.add(
        "Reshape", [x.name, sheet.whole(0, count, -1)], (shape[0], count, int(np.prod(shape[1:])) // count)
    )
    n = standardized(sheet, wide, (2,), center=True)
    back = sheet.add("Reshape", [n.name, sheet.whole(-1, *shape[1:])], shape)
    return affine(sheet, back, 1, bias=sheet.chance(0.7))


def channel_layer(sheet: Sheet, x: Value) -> Value:
    """Add a layer norm over the channels.

    Returns:
        the result.
    """
    n = standardized(sheet, x, (1,), center=sheet.chance(0.7))
    return affine(sheet, n, 1, bias=sheet.chance(0.6))


def image_layer(sheet: Sheet, x: Value) -> Value:
    """Add LayerNormalization over [C, H, W]: γ of [C, 1, 1], or of each pixel.

    Returns:
        the result.
    """
    given = [x.name]
    for what in ("γ", "β"):
        kind = sheet.pick(what, {"by channel": 3, "by pixel": 2, "by column": 1})
        shape = {"by channel": (x.shape[1], 1, 1), "by pixel": x.shape[1:], "by column": (x.shape[3],)}[kind]
        given.append(sheet.const(sheet.numbers(shape)).name)
    return sheet.add("LayerNormalization", given, x.shape, axis=1, epsilon=EPSILON)


CHANNELS: dict[str, Callable[[Sheet, Value], Value]] = {
    "GroupNormalization": group_op,
    "InstanceNormalization": instance_op,
    "BatchNormalization": batch_op,
    "group norm spelled": group_spelled,
    "layer norm of channels": channel_layer,
    "LayerNormalization of an image": image_layer,
}
# Minimum opsets.
OPSETS = {"RMSNormalization": 23, "GroupNormalization": 21}


def branch(sheet: Sheet, y: Value, weight: Value) -> Value:
    """Add a MatMul inside an If, which reads norm and weight from the outer graph.

    Returns:
        the result.
    """
    flag = sheet.given((), TensorProto.BOOL)
    shape = (*y.shape[:-1], weight.shape[1])
    kind = TensorProto.FLOAT16 if sheet.half else TensorProto.FLOAT
    graphs = []
    for inner in ("then", "else"):
        out, product = sheet.name(), sheet.name()
        nodes = [helper.make_node("MatMul", [y.name, weight.name], [product])]
        nodes.append(helper.make_node("Neg" if inner == "else" else "Identity", [product], [out]))
        graphs.append(helper.make_graph(nodes, inner, [], [helper.make_tensor_value_info(out, kind, None)]))
    return sheet.add("If", [flag], shape, then_branch=graphs[0], else_branch=graphs[1])
