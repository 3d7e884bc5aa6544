"""Build small files of quantized linear layers with TensorRT-RTX, each in one spelling, for several GPUs.

``python -m benchmarks.quantization.forms [--only TEXT]`` writes ``benchmarks/results/quantization_forms.md`` and
``.json``. Spellings with the same answers share a row; for a refused build the row has the library's message. A build
proves that the parser and the builder accept the file, not that its kernels are fast: without a GPU nothing runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import normdeploy
from normdeploy.errors import NormdeployError

RESULTS = Path(__file__).parents[1] / "results"
CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0")
# Features in and out.
K, N = 128, 64
INT8, FP8, E5M2, INT4, UINT4 = (
    TensorProto.INT8,
    TensorProto.FLOAT8E4M3FN,
    TensorProto.FLOAT8E5M2,
    TensorProto.INT4,
    TensorProto.UINT4,
)
LARGEST = {INT8: 127.0, TensorProto.UINT8: 255.0, FP8: 448.0, E5M2: 57344.0, INT4: 7.0, UINT4: 15.0}


@dataclass
class Sheet:
    """Graph under construction; ``dtype`` is the floating type of activations and scales."""

    dtype: Any = np.float32
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    stored: list[onnx.TensorProto] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def const(self, value: Any, dtype: Any = None) -> str:
        """Store a tensor.

        Returns:
            its name.
        """
        name = f"c{len(self.stored)}"
        self.stored.append(numpy_helper.from_array(np.asarray(value, dtype or self.dtype), name))
        return name

    def stored_as(self, kind: int, values: np.ndarray) -> str:
        """Store values on ``kind``'s grid as ``kind``.

        Returns:
            the name.
        """
        name = f"c{len(self.stored)}"
        array = values.astype(helper.tensor_dtype_to_np_dtype(kind))
        self.stored.append(numpy_helper.from_array(array, name))
        return name

    def add(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node.

        Returns:
            its output.
        """
        out = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, [*inputs], [out], name=out, **attributes))
        return out

    def qdq(self, x: str, kind: int = INT8, *, zero: int | None = 0, scale: float = 0.05) -> str:
        """Add x → QuantizeLinear → DequantizeLinear with one scale; without a zero point QuantizeLinear has
        output_dtype.

        Returns:
            the result.
        """
        s = self.const(scale)
        if zero is None:
            return self.add("DequantizeLinear", [self.add("QuantizeLinear", [x, s], output_dtype=kind), s])
        z = self.stored_as(kind, np.array(zero, np.float32))
        return self.add("DequantizeLinear", [self.add("QuantizeLinear", [x, s, z]), s, z])

    def weight(
        self, shape: Sequence[int], axis: int | None, kind: int = INT8, *, block: int = 0, zero: int | None = 0
    ) -> str:
        """Add a weight stored as ``kind``, followed by DequantizeLinear.

        Args:
            axis: axis of the scales; None for one scale.
            block: size of blocks along ``axis``; 0 for none.

        Returns:
            the result.
        """
        sizes: Any = () if axis is None else (shape[axis],)
        if block:
            sizes = [-(-n // block) if i == axis else n for i, n in enumerate(shape)]
        scale = self.const(self.rng.uniform(0.5, 1.5, sizes) / LARGEST[kind] / 8)
        grid = self.rng.uniform(0 if kind == UINT4 else -1, 1, shape) * LARGEST[kind]
        given = [self.stored_as(kind, grid if kind in (FP8, E5M2) else np.round(grid)), scale]
        if zero is not None:
            given.append(self.stored_as(kind, np.full(sizes, zero, np.float32)))
        attributes = ({} if axis is None else {"axis": axis}) | ({"block_size": block} if block else {})
        return self.add("DequantizeLinear", given, **attributes)

    def bias(self, size: int = N) -> str:
        """Store a bias.

        Returns:
            its name.
        """
        return self.const(self.rng.standard_normal(size))

    def model(self, out: str, shape: Sequence[int | str]) -> onnx.ModelProto:
        """Build the file with the input ``x`` of shape ``shape`` and the output ``out``.

        Returns:
            the model.
        """
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        x = helper.make_tensor_value_info("x", kind, shape)
        y = helper.make_tensor_value_info(out, kind, [f"out{i}" for i in range(len(shape))])
        graph = helper.make_graph(self.nodes, "form", [x], [y], self.stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


Make = Callable[[], onnx.ModelProto]


def matmul(
    kind: int = INT8,
    axis: int | None = 1,
    *,
    to: int | None = INT8,
    dtype: Any = np.float32,
    zero: int | None = 0,
    weight_zero: int | None = 0,
    block: int = 0,
) -> Make:
    """Make x[batch, 16, K] @ W[K, N] + b, with activations as ``to`` (None: unquantized) and W as ``kind``.

    Returns:
        function that builds the file.
    """

    def make() -> onnx.ModelProto:
        """Build the file.

        Returns:
            the model.
        """
        sheet = Sheet(dtype)
        x = "x" if to is None else sheet.qdq("x", to, zero=zero)
        y = sheet.add("MatMul", [x, sheet.weight((K, N), axis, kind, block=block, zero=weight_zero)])
        return sheet.model(sheet.add("Add", [y, sheet.bias()]), ("batch", 16, K))

    return make


def gemm(kind: int = INT8, axis: int | None = 0, *, to: int | None = INT8, dtype: Any = np.float32, **w: Any) -> Make:
    """Make a Gemm of x[batch, K] with W[N, K] (transB) and a float bias.

    Returns:
        function that builds the file.
    """

    def make() -> onnx.ModelProto:
        """Build the file.

        Returns:
            the model.
        """
        sheet = Sheet(dtype)
        x = "x" if to is None else sheet.qdq("x", to)
        given = [x, sheet.weight((N, K), axis, kind, **w), sheet.bias()]
        return sheet.model(sheet.add("Gemm", given, transB=1), ("batch", K))

    return make


def conv(
    kind: int = INT8, axis: int | None = 0, *, to: int | None = INT8, groups: int = 1, bias: str = "float",
    op: str = "Conv", dtype: Any = np.float32, **w: Any,
) -> Make:  # fmt: skip
    """Make a 3×3 convolution of 32 channels; ``bias`` is "float", or "int32" followed by DequantizeLinear.

    Returns:
        function that builds the file.
    """

    def make() -> onnx.ModelProto:
        """Build the file.

        Returns:
            the model.
        """
        sheet, width = Sheet(dtype), 32
        x = "x" if to is None else sheet.qdq("x", to)
        given = [x, sheet.weight((width, width // groups, 3, 3), axis, kind, **w)]
        if bias == "float":
            given.append(sheet.bias(width))
        else:
            whole = sheet.const(sheet.rng.integers(-99, 99, width), np.int32)
            given.append(sheet.add("DequantizeLinear", [whole, sheet.const(np.full(width, 1e-3))], axis=0))
        out = sheet.add(op, given, pads=[1, 1, 1, 1], kernel_shape=[3, 3], group=groups)
        return sheet.model(out, ("batch", width, 16, 16))

    return make


def float_weight(kind: int = INT8) -> onnx.ModelProto:
    """Store W as float before Q and DQ, as some exporters do.

    Returns:
        the model.
    """
    sheet = Sheet()
    w, scale = sheet.const(sheet.rng.standard_normal((K, N))), sheet.const(np.full(N, 0.03))
    zero = sheet.stored_as(kind, np.zeros(N))
    held = sheet.add("DequantizeLinear", [sheet.add("QuantizeLinear", [w, scale, zero], axis=1), scale, zero], axis=1)
    return sheet.model(sheet.add("MatMul", [sheet.qdq("x", kind), held]), ("batch", 16, K))


def attention(kind: int = INT8) -> onnx.ModelProto:
    """Multiply two activations.

    Returns:
        the model.
    """
    sheet = Sheet()
    x = sheet.qdq("x", kind)
    turned = sheet.add("Transpose", [sheet.qdq("x", kind)], perm=[0, 2, 1])
    return sheet.model(sheet.add("Softmax", [sheet.add("MatMul", [x, turned])]), ("batch", 16, K))


def transposed(kind: int = INT8, **w: Any) -> onnx.ModelProto:
    """Store W[N, K] followed by DequantizeLinear and Transpose, as torch stores it.

    Returns:
        the model.
    """
    sheet = Sheet()
    held = sheet.add("Transpose", [sheet.weight((N, K), w.pop("axis", 0), kind, **w)], perm=[1, 0])
    x = sheet.qdq("x", kind) if kind in (INT8, FP8) else "x"
    return sheet.model(sheet.add("MatMul", [x, held]), ("batch", 16, K))


def dynamic() -> onnx.ModelProto:
    """Quantize activations at run time.

    Returns:
        the model.
    """
    sheet = Sheet()
    sheet.nodes.append(helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]))
    x = sheet.add("DequantizeLinear", ["q", "s", "z"])
    return sheet.model(sheet.add("MatMul", [x, sheet.weight((K, N), 1)]), ("batch", 16, K))


def per_token() -> onnx.ModelProto:
    """Compute a scale for each row in the graph.

    Returns:
        the model.
    """
    sheet = Sheet()
    axis = sheet.const([-1], np.int64)
    largest = sheet.add("ReduceMax", [sheet.add("Abs", ["x"]), axis], keepdims=1)
    scale = sheet.add("Div", [largest, sheet.const(127.0)])
    whole = sheet.add("Round", [sheet.add("Div", ["x", scale])])
    x = sheet.add("Mul", [whole, scale])
    return sheet.model(sheet.add("MatMul", [x, sheet.weight((K, N), 1)]), ("batch", 16, K))


def residual(kind: int = INT8, where: str = "both") -> onnx.ModelProto:
    """Make y = LayerNorm(x + Linear(x)), with Q/DQ before the linear layer; if ``where`` is "both", before the residual
    too.

    Returns:
        the model.
    """
    sheet = Sheet()
    x = sheet.qdq("x", kind)
    y = sheet.add("MatMul", [x, sheet.weight((K, K), 1, kind)])
    y = sheet.add("Add", [y, sheet.bias(K)])
    y = sheet.add("Add", [y, x if where == "both" else "x"])
    return sheet.model(sheet.add("LayerNormalization", [y, sheet.bias(K), sheet.bias(K)], axis=-1), ("batch", 16, K))


def embedding(kind: int = INT8, **w: Any) -> onnx.ModelProto:
    """Quantize a table that Gather reads.

    Returns:
        the model.
    """
    sheet = Sheet()
    ids = sheet.const(np.arange(16), np.int64)
    rows = sheet.add("Gather", [sheet.weight((N, K), kind=kind, **w), ids])
    return sheet.model(sheet.add("Add", ["x", rows]), ("batch", 16, K))


F16 = np.float16
BLOCKS = (16, 32, 48, 64, 128)
FORMS: dict[str, Make] = {
    "int8 MatMul, weight by channel": matmul(),
    "int8 MatMul, weight with one scale": matmul(axis=None),
    "int8 MatMul, scales along the wrong axis (0 of [K, N])": matmul(axis=0),
    "int8 MatMul, no zero points": matmul(zero=None, weight_zero=None),
    "int8 MatMul, zero point 3": matmul(zero=3),
    "uint8 activations, zero point 128": matmul(to=TensorProto.UINT8, zero=128),
    "uint8 activations, zero point 0": matmul(to=TensorProto.UINT8),
    "int8 MatMul in float16": matmul(dtype=F16),
    "int8 weight alone": matmul(to=None),
    "int8 weight alone, float16": matmul(to=None, dtype=F16),
    "int8 weight alone in blocks of 32": matmul(axis=0, to=None, block=32),
    "int8 weight in blocks of 32, int8 activations": matmul(axis=0, block=32),
    "int8 weight as float behind Q and DQ": float_weight,
    "int8 weight behind Transpose": transposed,
    "int8 Gemm, transB": gemm(),
    "int8 Conv, float bias": conv(),
    "int8 Conv, int32 bias": conv(bias="int32"),
    "int8 Conv, weight alone": conv(to=None),
    "int8 Conv, one scale": conv(axis=None),
    "int8 Conv in float16": conv(dtype=F16),
    "int8 Conv, depthwise": conv(groups=32),
    "int8 ConvTranspose, axis 1": conv(axis=1, op="ConvTranspose"),
    "int8 ConvTranspose, axis 0": conv(axis=0, op="ConvTranspose"),
    "int8 attention": attention,
    "int8, residual quantized": residual,
    "int8, residual float": lambda: residual(where="linear"),
    "int8 embedding (Gather)": lambda: embedding(axis=0),
    "DynamicQuantizeLinear": dynamic,
    "int8 by token, computed in the graph": per_token,
    "fp8 MatMul, weight by channel": matmul(FP8, to=FP8),
    "fp8 MatMul, weight with one scale": matmul(FP8, None, to=FP8),
    "fp8 MatMul, no zero points on x": matmul(FP8, to=FP8, zero=None),
    "fp8 MatMul in float16": matmul(FP8, to=FP8, dtype=F16),
    "fp8 MatMul in float16, one scale": matmul(FP8, None, to=FP8, dtype=F16),
    "fp8 weight alone": matmul(FP8, to=None),
    "fp8 Gemm, transB": gemm(FP8, to=FP8),
    "fp8 Conv": conv(FP8, to=FP8),
    "fp8 Conv, one scale": conv(FP8, None, to=FP8),
    "fp8 Conv in float16": conv(FP8, to=FP8, dtype=F16),
    "fp8 Conv, depthwise": conv(FP8, to=FP8, groups=32),
    "fp8 attention": lambda: attention(FP8),
    "fp8, residual quantized": lambda: residual(FP8),
    "fp8 E5M2": matmul(E5M2, to=E5M2),
    "fp8 activations, int8 weight": matmul(INT8, to=FP8),
    **{f"int4 weight of [K, N], blocks of {b} along 0": matmul(INT4, 0, to=None, block=b) for b in BLOCKS},
    **{f"int4 weight of [K, N], blocks of {b} along 1": matmul(INT4, 1, to=None, block=b) for b in (32, 64)},
    "int4 blocks of 128 along 0, float16": matmul(INT4, 0, to=None, block=128, dtype=F16),
    "int4 blocks of 32 along 0, no zero points": matmul(INT4, 0, to=None, block=32, weight_zero=None),
    "int4 blocks of 32 along 0, zero point 1": matmul(INT4, 0, to=None, block=32, weight_zero=1),
    "int4 Gemm of [N, K], transB, blocks of 32 along 1": gemm(INT4, 1, to=None, block=32),
    "int4 [N, K] behind Transpose, blocks of 32 along 1": lambda: transposed(INT4, axis=1, block=32),
    "int4 by channel, no blocks": matmul(INT4, 1, to=None),
    "int4, one scale": matmul(INT4, None, to=None),
    "int4 blocks of 32, int8 activations": matmul(INT4, 0, block=32),
    "int4 by channel, int8 activations": matmul(INT4, 1),
    "int4 blocks of 32, fp8 activations": matmul(INT4, 0, to=FP8, block=32),
    "uint4 blocks of 32": matmul(UINT4, 0, to=None, block=32),
    "int4 Conv by channel": conv(INT4, to=None),
    "int4 Conv, blocks of 16 along 1": conv(INT4, 1, to=None, block=16),
    "int4 embedding, blocks of 32": lambda: embedding(INT4, axis=1, block=32),
}  # fmt: skip


def words(error: Exception) -> str:
    """Put an error's message on one line.

    Returns:
        text.
    """
    return " ".join(str(error).split())


def tried(make: Make, capabilities: Sequence[str]) -> str:
    """Build a file.

    Returns:
        "1.2 s", or the library's message.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "form.onnx")
        onnx.save(make(), path)
        try:
            ranges = ["batch=1:4:8"]
            engine = normdeploy.build(
                path, Path(folder, "form.engine"), compute_capabilities=capabilities, profiles=ranges, timeout=60
            )
        except NormdeployError as error:
            return words(error).replace(folder + os.sep, "")
        return f"{engine.seconds:.1f} s"


def write(answers: dict[str, dict[str, str]], version: str) -> None:
    """Write the table; spellings with the same answers share a line."""
    alike: dict[str, list[str]] = {}
    for name, by_capability in answers.items():
        told: dict[str, list[str]] = {}
        for capability, answer in by_capability.items():
            told.setdefault("builds" if answer.endswith(" s") else reason(answer), []).append(capability)
        line = "<br>".join(f"{', '.join(places)}: {answer}" for answer, places in told.items())
        alike.setdefault(line, []).append(name)
    rows = "\n".join(f"| {'; '.join(names)} | {line} |" for line, names in alike.items())
    slowest = max(float(a.removesuffix(" s")) for by in answers.values() for a in by.values() if a.endswith(" s"))
    (RESULTS / "quantization_forms.json").write_text(json.dumps(answers, indent=1) + "\n")
    (RESULTS / "quantization_forms.md").write_text(
        f"# What TensorRT-RTX builds of quantized layers\n\n{(__doc__ or '').strip()}\n\nTensorRT-RTX {version}; the"
        f" slowest build took {slowest:.1f} s.\n\n| spelling | by compute capability |\n|---|---|\n{rows}\n"
    )


def reason(answer: str) -> str:
    """Reduce an answer to the library's own words, without names that differ from file to file.

    Returns:
        text.
    """
    ours = r"TensorRT-RTX (can't read|could not build) \S+( engine)?:( -)?|Nothing was built\.|The log is in \S+"
    answer = re.sub(ours, "", answer)
    answer = re.sub(r"\bt\d+(_U\d+)?\b", "t", answer).replace("IBuilder::buildSerializedNetwork: Error Code 1: ", "")
    return re.sub(r"sm\d+\b", "sm…", answer).replace("|", "\\|").strip()


def main() -> None:
    """Build the files and write the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.quantization.forms", description=__doc__)
    parser.add_argument("--only", default="", help="forms whose name holds this; the others' rows stay")
    parser.add_argument("--capabilities", nargs="*", default=CAPABILITIES)
    given = parser.parse_args()
    kept = RESULTS / "quantization_forms.json"
    answers: dict[str, dict[str, str]] = json.loads(kept.read_text()) if kept.exists() else {}
    for name, make in FORMS.items():
        if given.only in name:
            for capability in given.capabilities:
                answers.setdefault(name, {})[capability] = tried(make, [capability])
                print(f"{name} | {capability} | {answers[name][capability]}", flush=True)
    write({name: answers[name] for name in FORMS if name in answers}, version("tensorrt_rtx"))


if __name__ == "__main__":
    main()
