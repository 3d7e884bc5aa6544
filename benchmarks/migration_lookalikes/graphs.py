"""Draw whole graphs: an input, one or two norms, nodes between, linear layers, and other readers of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from .linears import Linears
from .norms import CHANNELS, OPSETS, ROWS
from .sheet import Sheet, Value

# Share of float16 graphs.
HALVES = 0.06


@dataclass(frozen=True)
class Drawn:
    """Drawn graph.

    Attributes:
        plain: a norm with a constant γ by channel, followed by stored weights that nothing else reads, though a
            residual may read the norm. A migration is expected here.
    """

    proto: onnx.ModelProto
    words: tuple[str, ...]
    plain: bool


def drawn(seed: int) -> Drawn:
    """Draw the graph of a seed, always the same.

    Returns:
        the graph.
    """
    rng = np.random.default_rng((17, seed))
    if rng.random() < 0.1:
        return _plain(rng)
    sheet = Sheet(rng, half=bool(rng.random() < HALVES))
    if sheet.half:
        sheet.words.append("float16")
    images = sheet.chance(0.35)
    x = _image(sheet) if images else _rows(sheet)
    y = _normed(sheet, x, images)
    y = _between(sheet, y, images)
    _consumers(sheet, x, y, images)
    least = max((n for op, n in OPSETS.items() if any(node.op_type == op for node in sheet.nodes)), default=18)
    opset = int(rng.choice([n for n in (18, 20, 21, 23) if n >= least]))
    return Drawn(sheet.model(opset), tuple(sheet.words), plain=False)


def _plain(rng: np.random.Generator) -> Drawn:
    """Draw LayerNormalization or RMSNormalization, then MatMul and bias; sometimes two, and a residual."""
    sheet = Sheet(rng)
    width = int(rng.integers(2, 9))
    x = Value(sheet.given(("batch", "length", width)), (2, 3, width))
    op = str(rng.choice(["LayerNormalization", "RMSNormalization"]))
    stored = [sheet.numbers((width,)) + np.float32(3), sheet.numbers((width,))]
    given = [x.name, *(_initializer(sheet, array) for array in stored[: 2 if op.startswith("Layer") else 1])]
    y = sheet.add(op, given, x.shape, axis=-1, epsilon=1e-3)
    for _ in range(int(rng.integers(1, 4))):
        product = sheet.add("MatMul", [y.name, _initializer(sheet, sheet.numbers((width, width)))], y.shape)
        sheet.outputs.append(sheet.add("Add", [product.name, _initializer(sheet, sheet.numbers((width,)))], y.shape))
    if residual := sheet.chance(0.3):
        sheet.outputs.append(sheet.add("Add", [y.name, x.name], x.shape))
    return Drawn(sheet.model(23), (f"plain {op}", f"residual: {residual}"), plain=True)


def _initializer(sheet: Sheet, array: np.ndarray) -> str:
    name = sheet.name("p")
    sheet.stored.append(onnx.numpy_helper.from_array(array, name))
    return name


def _rows(sheet: Sheet) -> Value:
    """Draw [B, C], [B, S, C] or [B, H, S, C], or rows of an embedding whose table a later layer may read. Sizes are
    often equal, so that a wrong axis causes no error.
    """
    width = int(sheet.rng.choice([1, 2, 3, 4, 6]))
    middle = tuple(
        width if sheet.chance(0.5) else int(n) for n in sheet.rng.integers(1, 5, int(sheet.rng.choice([0, 1, 1, 1, 2])))
    )
    batch = width if sheet.chance(0.3) else 2
    dims: list[int | str] = ["batch" if sheet.chance(0.7) else batch, *middle]
    if middle and sheet.chance(0.4):
        dims[1] = "length"
    if sheet.chance(0.1):
        sheet.words.append("embedding")
        table = sheet.const(sheet.numbers((5, width)))
        ids = sheet.given(dims, TensorProto.INT64)
        return sheet.add("Gather", [table.name, ids], (batch, *middle, width))
    return Value(sheet.given([*dims, width]), (batch, *middle, width))


def _image(sheet: Sheet) -> Value:
    channels = int(sheet.rng.choice([1, 2, 4, 4, 6]))
    height, width = (channels if sheet.chance(0.4) else int(n) for n in sheet.rng.integers(3, 6, 2))
    height, width = max(3, height), max(3, width)
    dims = ["batch" if sheet.chance(0.7) else 2, channels, height, width]
    return Value(sheet.given(dims), (2, channels, height, width))


def _normed(sheet: Sheet, x: Value, images: bool) -> Value:
    table: dict[str, Callable[[Sheet, Value], Value]] = CHANNELS if images else ROWS
    if len(x.shape) == 2:
        table = {name: norm for name, norm in table.items() if name != "over the rows"}
    kinds = (
        dict.fromkeys(table, 1.0) | {"LayerNormalization": 3.0, "RMSNormalization": 2.0}
        if not images
        else dict.fromkeys(table, 1.0)
    )
    y = table[sheet.pick("norm", kinds)](sheet, x)
    several = sheet.pick("norms", {"one": 12, "their sum": 1, "side by side": 1, "one or the other": 0.6})
    if several == "one":
        return y
    other = table[sheet.pick("norm", kinds)](sheet, x)
    if several == "their sum":
        return sheet.add("Add", [y.name, other.name], x.shape)
    if several == "side by side":
        axis = 1 if images else -1
        shape = list(x.shape)
        shape[axis] *= 2
        return sheet.add("Concat", [y.name, other.name], shape, axis=axis)
    flag = sheet.given((), TensorProto.BOOL)
    return sheet.add("Where", [flag, y.name, other.name], x.shape)


def _between(sheet: Sheet, y: Value, images: bool) -> Value:
    kinds: dict[str, float] = {"nothing": 14, "Identity": 1, "Relu": 1, "x + y": 1, "times 2": 1, "turned": 1.5,
                               "cut": 1, "folded": 1.5, "Dropout": 0.7, "unsqueezed": 0.7}  # fmt: skip
    kind = sheet.pick("between", kinds)
    if kind in ("Identity", "Relu", "Dropout"):
        return sheet.add(kind, [y.name], y.shape)
    if kind == "times 2":
        return sheet.add("Mul", [y.name, sheet.number(2)], y.shape)
    if kind == "x + y":
        return sheet.add("Add", [y.name, sheet.const(sheet.numbers((1,))).name], y.shape)
    if kind == "turned" and len(y.shape) > 2:
        perm = [0, *(int(i) for i in sheet.rng.permutation(np.arange(1, len(y.shape))))]
        return sheet.add("Transpose", [y.name], [y.shape[i] for i in perm], perm=perm)
    axis = 1 if images else len(y.shape) - 1
    if kind == "cut" and y.shape[axis] > 1:
        shape = list(y.shape)
        shape[axis] -= 1
        cut = [sheet.whole(0), sheet.whole(shape[axis]), sheet.whole(axis)]
        return sheet.add("Slice", [y.name, *cut], shape)
    if kind == "folded" and len(y.shape) == 3 and y.shape[2] % 2 == 0:
        return sheet.add(
            "Reshape", [y.name, sheet.whole(0, -1, y.shape[2] // 2)], (y.shape[0], 2 * y.shape[1], y.shape[2] // 2)
        )
    if kind == "unsqueezed" and not images:
        return sheet.add("Unsqueeze", [y.name, sheet.whole(0)], (1, *y.shape))
    return y


def _consumers(sheet: Sheet, x: Value, y: Value, images: bool) -> None:
    linears = Linears(sheet, y.shape[1] if images else y.shape[-1])
    if any(word == "embedding" for word in sheet.words) and sheet.chance(0.6):
        table = next(n for n in sheet.nodes if n.op_type == "Gather").input[0]
        sheet.words.append("tied")
        tied = sheet.add("Transpose", [table], (x.shape[-1], 5), perm=[1, 0])
        if x.shape[-1] == y.shape[-1]:
            sheet.outputs.append(sheet.add("MatMul", [y.name, tied.name], (*y.shape[:-1], 5)))
    kinds = linears.channels_by_kind() if images and len(y.shape) == 4 else linears.rows_by_kind()
    weights = np.array(list(kinds.values()))
    for _ in range(int(sheet.rng.choice([1, 1, 2, 2, 3]))):
        make = list(kinds)[int(sheet.rng.choice(len(kinds), p=weights / weights.sum()))]
        sheet.words.append(f"linear: {make.__name__}")
        made = make(y)
        if sheet.chance(0.2):
            made = sheet.add("Relu", [made.name], made.shape)
        sheet.outputs.append(made)
    other = sheet.pick("other readers", {"none": 8, "residual": 3, "output": 1.5, "Sigmoid": 1, "a linear of x": 1.5})
    if other == "residual":
        sheet.outputs.append(sheet.add("Add", [y.name, y.name if y.shape != x.shape else x.name], y.shape))
    elif other == "output":
        sheet.outputs.append(y)
    elif other == "Sigmoid":
        sheet.outputs.append(sheet.add("Sigmoid", [y.name], y.shape))
    elif other == "a linear of x" and not images:
        sheet.outputs.append(linears.matmul(x))
