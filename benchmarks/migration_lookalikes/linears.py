"""Draw consumers of a norm: linear layers and convolutions of every spelling, and lookalikes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import numpy_helper

from .norms import branch, two
from .sheet import Sheet, Value

WEIGHTS = {"stored": 12, "overridable": 0.7, "graph input": 0.7, "from data": 0.7, "shared": 3, "read elsewhere": 1,
           "behind Transpose": 1.5, "an output of the graph": 0.5}  # fmt: skip


class Linears:
    """Draw consumers of ``y``; weights may be shared with earlier ones. ``size`` is the usual number of output
    features.
    """

    def __init__(self, sheet: Sheet, size: int) -> None:
        self.sheet, self.size = sheet, size
        self.weights: list[Value] = []

    def weight(self, shape: tuple[int, ...]) -> Value:
        """Draw a weight.

        Returns:
            the tensor.
        """
        sheet = self.sheet
        kind = sheet.pick("weight", WEIGHTS)
        alike = [w for w in self.weights if w.shape == shape]
        if kind == "shared" and alike:
            return alike[int(sheet.rng.integers(len(alike)))]
        if kind in ("overridable", "graph input"):
            made = Value(sheet.given(shape), shape)
            if kind == "overridable":
                sheet.stored.append(numpy_helper.from_array(sheet.numbers(shape), made.name))
        elif kind == "behind Transpose" and len(shape) == 2:
            made = sheet.add("Transpose", [sheet.const(sheet.numbers(shape[::-1])).name], shape, perm=[1, 0])
        else:
            made = sheet.const(sheet.numbers(shape))
            if kind == "from data":
                scale = sheet.add("ReduceMax", [sheet.inputs[0].name], (), keepdims=0)
                made = sheet.add("Mul", [made.name, scale.name], shape)
            elif kind == "read elsewhere":
                sheet.outputs.append(sheet.add("Abs", [made.name], shape))
            elif kind == "an output of the graph":
                sheet.outputs.append(made)
        self.weights.append(made)
        return made

    def features(self) -> int:
        """Draw the number of output features.

        Returns:
            number.
        """
        return self.size if self.sheet.chance(0.6) else int(self.sheet.rng.integers(1, 6))

    def bias(self, y: Value, axis: int = -1) -> Value:
        """Add a bias after the linear layer, or none.

        Returns:
            the result.
        """
        sheet, size = self.sheet, y.shape[axis]
        trailing = len(y.shape) - 1 - axis % len(y.shape)
        kind = sheet.pick("bias", {"none": 4, "by feature": 6, "one number": 1, "of all": 1, "Sub": 0.5})
        if kind == "none":
            return y
        shape = {"one number": (), "of all": y.shape[1:]}.get(kind, (size, *[1] * trailing))
        return two(sheet, "Sub" if kind == "Sub" else "Add", y, sheet.const(sheet.numbers(shape)), turned=kind != "Sub")

    # -------------------------------------------------------------- of rows

    def matmul(self, y: Value) -> Value:
        """Add a MatMul.

        Returns:
            the result.
        """
        w = self.weight((y.shape[-1], self.features()))
        return self.bias(self.sheet.add("MatMul", [y.name, w.name], (*y.shape[:-1], w.shape[1])))

    def vector(self, y: Value) -> Value:
        """Add a MatMul with a vector.

        Returns:
            the result.
        """
        return self.sheet.add("MatMul", [y.name, self.weight((y.shape[-1],)).name], y.shape[:-1])

    def batched(self, y: Value) -> Value:
        """Add a MatMul with a batch of weights.

        Returns:
            the result.
        """
        leading = 1 if self.sheet.chance(0.6) else y.shape[1] if len(y.shape) == 4 else 3
        w = self.weight((leading, y.shape[-1], self.features()))
        shape = y.shape[:-2] if len(y.shape) > 2 else (leading,)
        return self.sheet.add("MatMul", [y.name, w.name], (*shape, y.shape[-2], w.shape[-1]))

    def left(self, y: Value) -> Value:
        """Add a MatMul with the constant on the left: rows are summed instead of channels.

        Returns:
            the result.
        """
        w = self.weight((self.features(), y.shape[-2]))
        return self.bias(self.sheet.add("MatMul", [w.name, y.name], (*y.shape[:-2], w.shape[0], y.shape[-1])))

    def itself(self, y: Value) -> Value:
        """Multiply y by its own transpose.

        Returns:
            the result.
        """
        perm = [*range(len(y.shape) - 2), len(y.shape) - 1, len(y.shape) - 2]
        shape = (*y.shape[:-2], y.shape[-1], y.shape[-2])
        turned = self.sheet.add("Transpose", [y.name], shape, perm=perm)
        return self.sheet.add("MatMul", [y.name, turned.name], (*y.shape[:-1], y.shape[-2]))

    def gemm(self, y: Value) -> Value:
        """Add a Gemm; it needs two axes, so other tensors are flattened first.

        Returns:
            the result.
        """
        sheet = self.sheet
        if len(y.shape) != 2:
            if sheet.chance(0.5):
                return self.matmul(y)
            y = sheet.add("Reshape", [y.name, sheet.whole(-1, y.shape[-1])], (int(np.prod(y.shape[:-1])), y.shape[-1]))
        place = sheet.pick("y in Gemm", {"A": 8, "B": 1, "C": 1, "A and C": 1})
        turned = [int(sheet.chance(0.4)) for _ in range(2)]
        scalars = {"alpha": float(sheet.rng.choice([1, 1, 0.5, -2])), "beta": float(sheet.rng.choice([1, 1, 2, 0]))}
        rows, width = y.shape
        if place.startswith("A"):
            # transA sums over the rows, whose number is dynamic.
            if turned[0] and sheet.chance(0.8):
                turned[0] = 0
            inner, m = (rows, width) if turned[0] else (width, rows)
            n = width if place == "A and C" else self.features()
            w = self.weight((n, inner) if turned[1] else (inner, n))
            given = [y.name, w.name]
            if place == "A and C":
                given.append(y.name)
            elif (kind := sheet.pick("C", {"none": 1, "(N,)": 3, "one number": 0.7, "(1, N)": 1})) != "none":
                given.append(sheet.const(sheet.numbers({"(N,)": (n,), "one number": (), "(1, N)": (1, n)}[kind])).name)
        elif place == "B":
            inner, n = (width, rows) if turned[1] else (rows, width)
            w = self.weight((inner, self.features()) if turned[0] else (self.features(), inner))
            m, given = w.shape[1] if turned[0] else w.shape[0], [w.name, y.name]
        else:
            inner, n, m = self.features(), width, rows
            a, b = sheet.const(sheet.numbers((1, inner))), self.weight((inner, n))
            turned, given = [0, 0], [a.name, b.name, y.name]
            m = 1
        return sheet.add("Gemm", given, (m, n), transA=turned[0], transB=turned[1], **scalars)

    def einsum(self, y: Value) -> Value:
        """Add an Einsum.

        Returns:
            the result.
        """
        if len(y.shape) != 3:
            return self.matmul(y)
        equation = self.sheet.pick("einsum", {"bsc,cn->bsn": 2, "bsc,nc->bsn": 1, "bsc,sn->bcn": 1, "bsc,c->bsc": 1})
        b, s, c = y.shape
        n = self.features()
        shape = {"cn": (c, n), "nc": (n, c), "sn": (s, n), "c": (c,)}[equation[4:-5]]
        out = {"bsn": (b, s, n), "bcn": (b, c, n), "bsc": y.shape}[equation[-3:]]
        return self.sheet.add("Einsum", [y.name, self.weight(shape).name], out, equation=equation)

    def inside(self, y: Value) -> Value:
        """Add a MatMul inside an If.

        Returns:
            the result.
        """
        return branch(self.sheet, y, self.weight((y.shape[-1], self.features())))

    # -------------------------------------------------------------- of channels

    def conv(self, y: Value) -> Value:
        """Add a Conv.

        Returns:
            the result.
        """
        sheet, channels = self.sheet, y.shape[1]
        size = int(sheet.rng.choice([1, 3]))
        padded = sheet.pick("padding", {"none": 4, "zeros": 3, "one side": 1, "SAME_UPPER": 1, "VALID": 0.5})
        count = int(sheet.rng.choice([g for g in (1, 1, 1, 2, channels) if channels % g == 0]))
        wide = count * int(sheet.rng.integers(1, 4))
        stride, dilation = int(sheet.rng.choice([1, 1, 2])), int(sheet.rng.choice([1, 1, 2]))
        edges = {"zeros": [size // 2] * 4, "one side": [0, 0, 1, 1]}.get(padded, [0] * 4)
        attributes = {"auto_pad": padded} if padded.isupper() else {"pads": edges}
        if padded == "SAME_UPPER":
            dilation = 1
        reach = dilation * (size - 1)
        spatial = tuple(
            -(-n // stride)
            if padded == "SAME_UPPER"
            else max(1, (n + edges[i] + edges[i + 2] - reach - 1) // stride + 1)
            for i, n in enumerate(y.shape[2:])
        )
        given = [y.name, self.weight((wide, channels // count, size, size)).name]
        if sheet.chance(0.5):
            given.append(sheet.const(sheet.numbers((wide,))).name)
        out = sheet.add(
            "Conv", given, (y.shape[0], wide, *spatial), group=count, strides=[stride] * 2, dilations=[dilation] * 2,
            kernel_shape=[size, size], **attributes,
        )  # fmt: skip
        return self.bias(out, 1) if sheet.chance(0.3) else out

    def turned_conv(self, y: Value) -> Value:
        """Add a ConvTranspose; near the border fewer products are summed.

        Returns:
            the result.
        """
        sheet, channels = self.sheet, y.shape[1]
        size = int(sheet.rng.choice([1, 2, 3]))
        stride = int(sheet.rng.choice([1, 2]))
        wide = int(sheet.rng.integers(1, 4))
        given = [y.name, self.weight((channels, wide, size, size)).name]
        if sheet.chance(0.5):
            given.append(sheet.const(sheet.numbers((wide,))).name)
        spatial = tuple((n - 1) * stride + size for n in y.shape[2:])
        return sheet.add("ConvTranspose", given, (y.shape[0], wide, *spatial), strides=[stride] * 2)

    def columns(self, y: Value) -> Value:
        """Add a MatMul over the last axis of an image, which is not the channels' axis.

        Returns:
            the result.
        """
        return self.matmul(y)

    def pooled(self, y: Value) -> Value:
        """Add a global pool and a Gemm.

        Returns:
            the result.
        """
        pool = self.sheet.add("GlobalAveragePool", [y.name], (*y.shape[:2], 1, 1))
        flat = self.sheet.add("Flatten", [pool.name], y.shape[:2])
        return self.gemm(flat)

    def flattened(self, y: Value) -> Value:
        """Add Flatten and a Gemm.

        Returns:
            the result.
        """
        return self.gemm(self.sheet.add("Flatten", [y.name], (y.shape[0], int(np.prod(y.shape[1:])))))

    def tokens(self, y: Value) -> Value:
        """Reshape [B, C, H, W] to [B, H·W, C] and add a linear layer, like the start of vision transformers.

        Returns:
            the result.
        """
        b, c, h, w = y.shape
        rows = self.sheet.add("Reshape", [y.name, self.sheet.whole(0, c, h * w)], (b, c, h * w))
        return self.matmul(self.sheet.add("Transpose", [rows.name], (b, h * w, c), perm=[0, 2, 1]))

    def rows_by_kind(self) -> dict[Callable[[Value], Value], float]:
        """List the consumers of rows.

        Returns:
            method -> weight.
        """
        return {self.matmul: 8, self.gemm: 6, self.left: 2, self.batched: 1.5, self.vector: 1, self.itself: 0.7,
                self.einsum: 1, self.inside: 1}  # fmt: skip

    def channels_by_kind(self) -> dict[Callable[[Value], Value], float]:
        """List the consumers of channels.

        Returns:
            method -> weight.
        """
        return {self.conv: 9, self.turned_conv: 2, self.columns: 1.5, self.pooled: 1, self.flattened: 1, self.tokens: 1}
