"""Check a normdeploy certificate against its model, from docs/reference/certificate-format.md alone.

    python -m normdeploy_check c.json model.onnx [source.onnx]

Exit code 0: accepted, 1: a claim fails, 2: a file can't be read or a limit is reached. Both sides of a rewrite are
computed at random points: in float64, and modulo a random prime. onnx's reference evaluator computes the ops that need
only +, − and ×, in both arithmetics. The other ops of the page are defined here. Each tensor is a numpy array: float64
for real numbers, dtype object with Python's integers for elements of the field, int64 or bool for integers.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import itertools
import json
import math
import os
import resource
import secrets
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, external_data_helper, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

Array = np.ndarray

BOUNDS = {"affine": 2.0**-30, "expression": 2.0**-40, "numeric": 2.0**-16}
EXACT_BOUND = 2.0**-20
FIELD_MODES = ("exact", "affine", "expressions")
EPSILON = float(np.float32(1e-5))
MAX_FILE_BYTES = 4 << 30
MAX_NODES = 20_000
# Opsets at which the meaning or the form of an op changes
BREAKS = {"GroupNormalization": (21,), "BatchNormalization": (14,), "Dropout": (12,), "Slice": (10,), "Reshape": (5,)}
BREAKS |= dict.fromkeys(("Softmax", "Squeeze", "Unsqueeze", "ReduceSum"), (13,)) | {"Split": (13, 18)}
BREAKS |= dict.fromkeys((f"Reduce{kind}" for kind in ("Mean", "SumSquare", "L2", "Prod", "Max", "Min")), (18,))
# Nodes that the cleanup bypasses: their output has the elements of their first input
PASSING = ("Identity", "Cast", "Dropout", "Reshape", "Flatten", "Squeeze", "Unsqueeze")


class Refusal(Exception):
    """Report a file that can't be read or is over a limit (exit code 2)."""


class Undefined(Exception):
    """Report that a side is undefined at the chosen sizes."""


class Rejection(Exception):
    """Report a claim that fails (exit code 1)."""

    def __init__(self, claim: str, detail: str) -> None:
        super().__init__(f"claim {claim} fails, {detail}")
        self.claim, self.detail = claim, detail


def require(condition: Any, claim: str, detail: str) -> None:
    if not condition:
        raise Rejection(claim, detail)


# --- Arithmetic ------------------------------------------------------------------------------------------------------


class Arithmetic:
    """Real numbers in float64, or integers modulo a prime p with p mod 4 = 3. Undefined results are NaN in both."""

    def __init__(self, rng: np.random.Generator, prime: int | None = None) -> None:
        self.rng = rng
        self.prime = prime
        self.kind = np.dtype(object if prime else np.float64)
        self.key = rng.bytes(32)
        self.irrational = False
        self.powers_of_two = np.array([pow(2, e, prime) for e in range(-1200, 1100)] if prime else [], object)

    def array(self, values: Any) -> Array:
        values = np.asarray(values, self.kind)
        return np.asarray(values % self.prime, object) if self.prime else values

    def number(self, value: Any) -> Any:
        exact = Fraction(value)
        return exact.numerator * pow(exact.denominator, -1, self.prime) % self.prime if self.prime else float(exact)

    def element(self, values: Array) -> Array:
        """Return the elements of float64 numbers m·2^e."""
        if not self.prime:
            return values
        if not np.isfinite(values).all():
            raise Undefined("a constant is not finite")
        mantissa, exponent = np.frexp(values)
        integers = np.asarray(np.ldexp(mantissa, 53)).astype(np.int64).astype(object)
        return self.array(integers * self.powers_of_two[exponent - 53 + 1200])

    def random(self, shape: Any) -> Array:
        return self.rng.integers(0, self.prime, shape).astype(object) if self.prime else self.rng.standard_normal(shape)

    def divide(self, a: Array, b: Array) -> Array:
        if not self.prime:
            return np.divide(a, b)
        inverse = np.frompyfunc(lambda v: pow(v, -1, self.prime) if v == v and v else math.nan, 1, 1)
        return a * inverse(self.array(b))

    def root(self, x: Array, real: Array | None = None) -> Array:
        """Return principal roots. ``real``: x in float64 if x depends on no leaf."""
        if not self.prime:
            return np.sqrt(x)
        roots = np.frompyfunc(self._root, 1, 1) if real is None else np.frompyfunc(self._constant_root, 2, 1)
        return roots(self.array(x), *([] if real is None else [real]))

    def _root(self, v: Any) -> Any:
        principal = pow(v, (self.prime + 1) // 4, self.prime) if v == v else v
        return principal if principal * principal % self.prime == v else math.nan

    def _constant_root(self, v: Any, real: float) -> Any:
        """Return the rational root if there is one, else the principal root, else a random element."""
        positive = math.sqrt(max(real, 0.0))
        for fraction in (Fraction(positive), Fraction(positive).limit_denominator(1 << 20)):
            rational = self.number(fraction)
            if rational * rational % self.prime == v:
                return rational
        self.irrational = True
        principal = self._root(v)
        return principal if principal == principal else self.hash("root", v)

    def contract(self, node: Node, x: Array, y: Array) -> Array:
        """Compute sums of products: in the field from pieces of 16 bits, whose products float64 adds exactly."""
        if not self.prime:
            return reference(node, [x, y])[0]
        pieces = []
        for factor in (x, y):
            missing = (factor != factor).astype(bool)
            integers = np.where(missing, 0, factor).astype(np.int64)
            pieces.append([np.where(missing, np.nan, integers >> s & 0xFFFF) for s in range(0, 64, 16)])
        total: Any = 0
        for (i, a), (j, b) in itertools.product(enumerate(pieces[0]), enumerate(pieces[1])):
            part = reference(node, [a, b])[0]
            missing = np.isnan(part)
            if np.max(part, initial=0, where=~missing) >= 2**53:
                raise Refusal(f"{node.op} has too many terms")
            integers = np.where(missing, 0, part).astype(np.int64).astype(object) << 16 * (i + j)
            total = total + np.where(missing, math.nan, integers)
        return total

    def hash(self, *values: Any) -> Any:
        """Return a random element that depends on the values alone."""
        digest = hashlib.blake2b(repr(values).encode(), key=self.key, digest_size=16).digest()
        return int.from_bytes(digest) % self.prime if values[-1] == values[-1] else math.nan

    def unknown(self, node: Node, x: Array) -> Array:
        if not self.prime:
            return reference(node, [x])[0]
        attributes = [node.get(name, default) for name, default in UNKNOWN[node.op].items()]
        return np.frompyfunc(lambda v: self.hash(node.op, attributes, v), 1, 1)(x)

    def softmax(self, x: Array, axes: tuple[int, ...]) -> Array:
        if not self.prime:
            powers = np.exp(x - x.max(axis=axes, keepdims=True))
            return powers / powers.sum(axis=axes, keepdims=True)
        row = np.frompyfunc(lambda v: self.hash("row", v), 1, 1)(x).sum(axis=axes, keepdims=True)
        return np.frompyfunc(lambda v, r: self.hash("softmax", v, r), 2, 1)(x, self.array(row))


def random_prime(rng: np.random.Generator) -> int:
    """Return a prime p of 62 bits with p mod 4 = 3."""
    while True:
        n = int(rng.integers(2**59, 2**60)) * 4 + 3
        # Miller and Rabin with these bases is exact below 2^64. As n mod 4 = 3, one squaring step suffices.
        if all(pow(a, n // 2, n) in (1, n - 1) for a in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)):
            return n


# --- Ops -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A node of the certificate or of the model. ``attributes``: name → (type, value)."""

    op: str
    domain: str
    opset: int
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, (None, default))[1]


def is_float(code: int) -> bool:
    return "float" in helper.tensor_dtype_to_np_dtype(code).name


def literal(array: Array) -> Array:
    """Return a stored array as float64, int64 or bool."""
    if array.dtype in (bool, object):
        return array
    return array.astype(np.float64 if "float" in array.dtype.name else np.int64)


def reference(node: Node, inputs: list[Any]) -> list[Any]:
    """Compute a node with onnx's reference evaluator, with float64 in place of every float type."""
    names = [f"i{i}" if x is not None else "" for i, x in enumerate(inputs)]
    feeds = {n: x for n, x in zip(names, inputs, strict=True) if n}
    outputs = [o or f"o{i}" for i, o in enumerate(node.outputs)]
    if node.op in ("Loop", "If", "Scan") or node.op.startswith("Random"):
        raise Undefined(f"{node.op} can't be evaluated here")
    attributes = {}
    for name, (kind, value) in node.attributes.items():
        if kind in ("other", "reference"):
            raise Undefined(f"attribute {name} of {node.op} has no value")
        if name in ("to", "dtype", "softmax_precision") and is_float(value):
            value = TensorProto.DOUBLE
        attributes[name] = numpy_helper.from_array(literal(value)) if kind == "tensor" else value
    try:
        proto = helper.make_node(node.op, names, outputs, domain=node.domain, **attributes)
        # The evaluator does not read the type of an object array.
        types = {
            n: helper.np_dtype_to_tensor_dtype(np.dtype(float) if x.dtype == object else x.dtype)
            for n, x in feeds.items()
        }
        infos = [helper.make_tensor_value_info(n, code, None) for n, code in types.items()]
        results = [helper.make_tensor_value_info(o, TensorProto.DOUBLE, None) for o in outputs]
        graph = helper.make_graph([proto], "node", infos, results)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid(node.domain, node.opset)])
        return list(ReferenceEvaluator(model).run(None, feeds))
    except (MemoryError, Refusal):
        raise
    except Exception as error:
        raise Undefined(f"{node.op}: {type(error).__name__}: {error}") from None


@dataclass(frozen=True)
class Call:
    """A node with its inputs in one arithmetic. ``real``: float64 values of the inputs that depend on no leaf."""

    node: Node
    ar: Arithmetic
    inputs: list[Any]
    real: list[Any]

    @property
    def x(self) -> Array:
        return self.inputs[0]

    @property
    def epsilon(self) -> Any:
        return self.ar.number(self.node.get("epsilon", EPSILON))

    def mean(self, x: Array, axes: tuple[int, ...]) -> Array:
        return x.sum(axis=axes, keepdims=True) * self.ar.number(Fraction(1, math.prod(x.shape[a] for a in axes)))


def reduction(c: Call) -> Array:
    """Compute ReduceMean and ReduceL2 by the sums of the reference evaluator."""
    if c.node.op == "ReduceL2":
        return c.ar.root(reference(replace(c.node, op="ReduceSumSquare"), c.inputs)[0], c.real[0])
    # The axes of ReduceSum became an input at opset 13, those of ReduceMean at 18.
    node = replace(c.node, op="ReduceSum", opset=18 if c.node.opset >= 18 else 11)
    total = c.ar.array(reference(node, c.inputs)[0])
    return total * c.ar.number(Fraction(total.size, c.x.size))


def power(c: Call) -> Array:
    """Raise to a constant half-integer: x^(k/2) = (√x)^k."""
    exponents, result = c.real[1], c.node.outputs[0]
    require(
        exponents is not None and exponents.size and not np.ptp(exponents), "structure", f"{result} has no exponent"
    )
    twice = 2 * float(exponents.flat[0])
    require(twice.is_integer() and abs(twice) <= 32, "structure", f"{result} is the power {twice / 2}")
    exact = c.inputs[1].dtype != c.ar.kind or np.all(c.inputs[1] == c.ar.number(twice / 2))
    require(exact, "structure", f"the exponent of {result} is not exactly {twice / 2}")
    factors = [c.ar.root(c.x, c.real[0])] * int(abs(twice)) if twice % 2 else [c.x] * int(abs(twice) / 2)
    ones = c.ar.array(np.ones(exponents.shape, int))
    powers = reduce(lambda a, b: c.ar.array(a * b), factors, ones)
    return c.ar.divide(ones, powers) if twice < 0 else powers


def product(c: Call) -> Array:
    """Compute MatMul, Einsum, Gemm, Conv and ConvTranspose."""
    node = c.node
    if node.op == "Einsum" and len(c.inputs) != 2:
        return reference(node, c.inputs)[0]
    x, weight, bias = [*c.inputs, None][:3]
    if node.op == "Gemm":
        transposes = {name: pair for name, pair in node.attributes.items() if name.startswith("trans")}
        result = c.ar.contract(replace(node, attributes=transposes), x, weight) * c.ar.number(node.get("alpha", 1))
        return result if bias is None else result + bias * c.ar.number(node.get("beta", 1))
    if tuple(node.get("kernel_shape", weight.shape[2:])) != weight.shape[2:]:
        raise Undefined("kernel_shape is not the shape of the weight")
    if node.op == "ConvTranspose" and node.get("group", 1) > 1:
        # The evaluator is wrong for several groups.
        single = replace(node, attributes=node.attributes | {"group": ("int", 1)})
        groups = zip(*(np.split(a, node.get("group"), axis) for a, axis in ((x, 1), (weight, 0))), strict=True)
        result = np.concatenate([c.ar.contract(single, *group) for group in groups], axis=1)
    else:
        result = c.ar.contract(node, x, weight)
    return result if bias is None else result + bias.reshape(-1, *[1] * (x.ndim - 2))


def norm(c: Call) -> Any:
    """Compute the norms of the standard: (x − center)/√(variance + ε)·scale + bias."""
    op, x, epsilon = c.node.op.removesuffix("Normalization"), c.x, c.epsilon
    scale, bias = [*c.inputs, None, None][1:3]
    real = None
    along = (-1, *[1] * (x.ndim - 2))
    axes = tuple(range(c.node.get("axis", -1) % x.ndim, x.ndim))
    if op == "Group":
        x = x.reshape(x.shape[0], c.node.get("num_groups"), -1)
        axes = (2,)
    elif op in ("Instance", "MeanVariance"):
        axes = tuple(range(2, x.ndim)) if op == "Instance" else tuple(c.node.get("axes", (0, 2, 3)))
    if op == "Batch":
        require(not c.node.get("training_mode"), "structure", f"{c.node.outputs[0]} is computed in training mode")
        center, variance = (p.reshape(along) for p in c.inputs[3:5])
        real = None if c.real[4] is None else c.real[4].reshape(along) + float(c.node.get("epsilon", EPSILON))
    else:
        center = 0 if op in ("RMS", "SimplifiedLayer") else c.mean(x, axes)
        variance = c.mean((x - center) ** 2, axes)
    root = (
        c.ar.root(variance, None) + c.ar.number(float(np.float32(1e-9)))
        if op == "MeanVariance"
        else c.ar.root(variance + epsilon, real)
    )
    inverse = c.ar.divide(c.ar.array(1), root)
    normal = (x - center) * inverse
    if op == "Group" and c.node.opset < 21:
        normal = (normal * scale.reshape(-1, 1) + bias.reshape(-1, 1)).reshape(c.x.shape)
        scale = bias = None
    if op in ("Batch", "Instance", "Group"):
        normal = normal.reshape(c.x.shape)
        scale, bias = (None if p is None else p.reshape(along) for p in (scale, bias))
    normal = normal if scale is None else normal * scale
    normal = normal if bias is None else normal + bias
    return [normal, center, inverse] if op == "Layer" else normal


def unknown(c: Call) -> Array:
    """Compute functions that are unknown in the field: equal arguments give equal elements."""
    node = c.node
    if node.op == "Softmax":
        axis = node.get("axis", -1 if node.opset >= 13 else 1) % c.x.ndim
        return c.ar.softmax(c.x, (axis,) if node.opset >= 13 else tuple(range(axis, c.x.ndim)))
    if node.op == "Swish":
        argument = c.ar.array(c.x * c.ar.number(node.get("alpha", 1)))
        return c.x * c.ar.unknown(replace(node, op="Sigmoid", attributes={}), argument)
    return c.ar.unknown(node, c.x)


# Ops of floats that onnx's reference evaluator computes in both arithmetics
RING = ("Concat", "ReduceSum", "ReduceSumSquare")
MOVES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile", "Split", "Slice", "Identity")
SIZES = ("Shape", "Size", "Constant", "ConstantOfShape", "Cast", "CastLike", "Dropout")
# Unknown functions of one number in the field, with the defaults of their attributes
UNKNOWN: dict[str, dict[str, Any]] = {"Sigmoid": {}, "Tanh": {}, "Erf": {}, "Softplus": {}}
UNKNOWN |= {"HardSigmoid": {"alpha": float(np.float32(0.2)), "beta": 0.5}, "Gelu": {"approximate": "none"}}
OPS: dict[str, Callable[[Call], Any]] = {
    "Add": lambda c: c.x + c.inputs[1],
    "Sub": lambda c: c.x - c.inputs[1],
    "Mul": lambda c: c.x * c.inputs[1],
    "Neg": lambda c: -c.x,
    "Sum": lambda c: sum(c.inputs),
    "Div": lambda c: c.ar.divide(*c.inputs),
    "Reciprocal": lambda c: c.ar.divide(c.ar.array(1), c.x),
    "Mean": lambda c: sum(c.inputs) * c.ar.number(Fraction(1, len(c.inputs))),
    "Sqrt": lambda c: c.ar.root(c.x, c.real[0]),
    "GlobalAveragePool": lambda c: c.mean(c.x, tuple(range(2, c.x.ndim))),
    "Pow": power,
}
OPS |= dict.fromkeys(("ReduceMean", "ReduceL2"), reduction)
OPS |= dict.fromkeys(("MatMul", "Einsum", "Gemm", "Conv", "ConvTranspose"), product)
OPS |= dict.fromkeys((*UNKNOWN, "Swish", "Softmax"), unknown)
NORMS = tuple(f"{kind}Normalization" for kind in ("Batch", "Layer", "RMS", "Instance", "Group", "MeanVariance"))
OPS |= dict.fromkeys((*NORMS, "SimplifiedLayerNormalization"), norm)


def compute(c: Call, mode: str) -> list[Array]:
    """Compute the outputs of a node. Modes other than numeric allow only the ops of the page."""
    node, ar = c.node, c.ar
    first_alone = node.op in (*MOVES, "Pow") or node.op.startswith("Reduce")
    floats = [x.dtype == ar.kind for x in (c.inputs[:1] if first_alone else c.inputs) if x is not None]
    standard = not node.domain or (node.domain, node.op) == ("com.microsoft", "SimplifiedLayerNormalization")
    if any(floats) and not all(floats) and mode != "numeric" and node.op not in SIZES:
        raise Undefined(f"{node.op} of floats and integers")
    defined = OPS.get(node.op) if standard and any(floats) and (mode, node.op) != ("numeric", "Pow") else None
    integral = floats and not any(floats)
    allowed = standard and (defined or integral or node.op in (*RING, *MOVES, *SIZES))
    require(
        allowed or mode == "numeric", "structure", f"{node.op}, which computes {node.outputs[0]}, has no definition"
    )
    if node.op == "CastLike":
        like = (
            TensorProto.DOUBLE if c.inputs[1].dtype == ar.kind else helper.np_dtype_to_tensor_dtype(c.inputs[1].dtype)
        )
        node = replace(node, op="Cast", inputs=node.inputs[:1], attributes={"to": ("int", like)})
    if node.op == "Dropout" or (node.op == "Cast" and c.x.dtype == ar.kind and is_float(node.get("to"))):
        return c.inputs[:1]
    require(node.op != "Cast" or c.x.dtype != object, "structure", f"{node.outputs[0]} is a float as an integer")
    if isinstance(node.get("value_float"), Fraction):
        return [ar.array(ar.number(node.get("value_float")))]
    try:
        results = defined(c) if defined else reference(node, c.inputs[: len(node.inputs)])
    except (ValueError, IndexError, TypeError, ArithmeticError, AttributeError, KeyError) as error:
        raise Undefined(f"{node.op}: {error}") from None
    results = results if isinstance(results, list) else [results]
    if any(floats) and node.op not in SIZES and (ar.prime or defined):
        results = [ar.array(r) for r in results]
    results = [literal(np.asarray(r)) for r in results]
    require(not any(node.outputs[len(results) :]), "structure", f"{node.outputs[-1]} is no output of {node.op}")
    created = [r.dtype == np.float64 and not any(floats) for r in results]
    require(node.op in SIZES or mode == "numeric" or not any(created), "structure", f"{node.op} has no definition")
    return [ar.element(r) if r.dtype == np.float64 else r for r in results]


# --- Equality --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """One side of a rewrite, without function calls. ``dependent``: tensors that depend on elements of leaves."""

    nodes: list[Node]
    constants: dict[str, Array]
    dependent: set[str]

    def evaluate(self, ar: Arithmetic, leaves: dict[str, Array], known: dict[str, Any], mode: str) -> dict[str, Any]:
        """Return all tensors. ``known``: those of an evaluation in float64, or nothing if this is the first one."""
        values: dict[str, Any] = {n: ar.element(a) if a.dtype == np.float64 else a for n, a in self.constants.items()}
        values |= leaves | {"": None}
        for node in self.nodes:
            real = [None if n in self.dependent else (known or values).get(n) for n in node.inputs]
            results = compute(Call(node, ar, [values[n] for n in node.inputs], real), mode)
            values |= {n: r for n, r in zip(node.outputs, results, strict=False) if n}
        return values


@dataclass
class Comparison:
    """Compare both sides of a rewrite at random points. ``known``: tensors of both sides in float64."""

    mode: str
    leaves: list[Any]
    outputs: list[str]
    sides: list[Side]
    rng: np.random.Generator
    sizes: list[dict[str, int]] = field(default_factory=list)
    known: list[dict[str, Any]] = field(default_factory=lambda: [{}, {}])

    def check(self) -> None:
        """Compare at two choices of sizes, or at one if all sizes are fixed."""
        reason = ""
        for attempt in range(56):
            sizes: dict[str, int] = {}
            try:
                shapes = self.choose_shapes(attempt, sizes)
                if sizes not in self.sizes:
                    self.compare_floats(shapes)
                    if self.mode != "numeric":
                        self.compare_field(shapes)
                    self.sizes.append(sizes)
            except Undefined as error:
                reason = f" ({error})"
            if len(self.sizes) == 2 or not (sizes or any(leaf["shape"] is None for leaf in self.leaves)):
                break
        require(self.sizes, "equal", f"found no sizes at which both sides are defined{reason}")

    def choose_shapes(self, attempt: int, sizes: dict[str, int]) -> dict[str, list[int]]:
        """Choose a size for each symbol: distinct small sizes, then random ones. Returns: the shapes of the leaves."""
        largest = (4, 4, 4, 8, 16, 32, 64)[attempt // 8]

        def choose(size: Any) -> int:
            if isinstance(size, int):
                return size
            if isinstance(size, dict):
                return sum(k * math.prod(map(choose, symbols)) for k, symbols in size["sum"])
            same = attempt % 4 == 3 and len(sizes) > 0
            drawn = next(iter(sizes.values())) if same else int(self.rng.integers(1, largest + 1))
            return sizes.setdefault(size, drawn if attempt else 2 + len(sizes) % 3)

        shapes = {}
        for leaf in self.leaves:
            dims = [None] * (3, 4, 2, 1, 5)[attempt % 5] if leaf["shape"] is None else leaf["shape"]
            shapes[leaf["name"]] = [choose(f"{leaf['name']}:{i}" if n is None else n) for i, n in enumerate(dims)]
        if any(n < 1 for shape in shapes.values() for n in shape):
            raise Undefined("a leaf has no elements")
        return shapes

    def run(self, ar: Arithmetic, shapes: dict[str, list[int]], *, positive: bool = False) -> list[list[Array]]:
        """Return both forms of each result at random leaves."""
        leaves = {}
        for leaf in self.leaves:
            name, dtype = leaf["name"], leaf["dtype"] or "float32"
            drawn = ar.random(shapes[name]) if "float" in dtype else self.rng.integers(0, 2, shapes[name])
            leaves[name] = np.abs(drawn) if positive else drawn.astype(bool) if dtype == "bool" else drawn
        both = [s.evaluate(ar, leaves, k, self.mode) for s, k in zip(self.sides, self.known, strict=True)]
        self.known = self.known if ar.prime else both
        pairs = [[values[name] for values in both] for name in self.outputs]
        for name, (before, after) in zip(self.outputs, pairs, strict=True):
            shapes_of_both = f"tensor {name} has the shapes {before.shape} and {after.shape}"
            require(before.shape == after.shape, "shape", shapes_of_both)
        return pairs

    def require_none(self, wrong: Array, name: str, before: Array, after: Array, how: str) -> None:
        if np.any(wrong):
            place = tuple(np.argwhere(wrong)[0].tolist())
            detail = f"element {list(place)} of tensor {name} is {before[place]} before and {after[place]} after"
            raise Rejection("equal", f"{detail}, {how}")

    def compare_floats(self, shapes: dict[str, list[int]]) -> None:
        self.known = [{}, {}]
        ar = Arithmetic(self.rng)
        # A root of a normal number is often NaN, so one draw has positive leaves.
        runs = [self.run(ar, shapes, positive=self.mode == "exact" and draw == 1) for draw in range(4)]
        for i, name in enumerate(self.outputs):
            before, after = (np.stack([pairs[i][side] for pairs in runs]) for side in (0, 1))
            bound: Any = 0
            if self.mode == "affine":
                bound = BOUNDS["affine"] * (np.abs(after) + np.abs(before) + np.ptp(after, axis=0))
            elif before.dtype == np.float64:
                finite = np.where(np.isfinite(before), np.abs(before), 0.0)
                largest = finite.max(axis=tuple(range(1, before.ndim)), keepdims=True, initial=0.0)
                bound = (BOUNDS["numeric"] if self.mode == "numeric" else EXACT_BOUND) * largest
            undefined = (before != before) & ((after != after) | (self.mode not in ("numeric", "affine")))
            near = np.abs(np.subtract(before, after, dtype=np.float64)) <= bound
            self.require_none(~(near | (before == after) | undefined), name, before, after, "in float64")
            shown = self.mode == "numeric" or not before.size or np.any(np.isfinite(before))
            require(shown, "equal", f"tensor {name} has no finite element in float64")

    def compare_field(self, shapes: dict[str, list[int]]) -> None:
        """Compare modulo a prime. If a constant has an irrational root, its sign may be wrong: try other primes."""
        for tried in range(1, 257):
            ar = Arithmetic(self.rng, random_prime(self.rng))
            try:
                if self.compare_modulo(ar, shapes):
                    return
            except Rejection:
                if not ar.irrational or tried == 256:
                    raise
        raise Undefined("no prime makes the divisors nonzero and the arguments of roots squares")

    def compare_modulo(self, ar: Arithmetic, shapes: dict[str, list[int]]) -> bool:
        """Draw leaves until each element was compared where it is not NaN. Returns: False if some never are."""
        runs: list[Any] = []
        compared = [0] * len(self.outputs)
        for draw in range(200):
            runs = [self.run(ar, shapes), *runs[:2]]
            for i, name in enumerate(self.outputs):
                before, after = runs[0][i]
                differences = [np.subtract(before, after, dtype=object)]
                if self.mode == "affine" and after.dtype == object:
                    if draw < 2:
                        continue
                    # Three points on a line b = A·a + B
                    (b1, a1), (b2, a2) = runs[1][i], runs[2][i]
                    differences = [(b1 - before) * (a2 - after) - (b2 - before) * (a1 - after)]
                    differences += [(b1 - before) * (a1 == after)]
                for difference in map(ar.array, differences):
                    defined = (difference == difference).astype(bool)
                    self.require_none(defined & (difference != 0), name, before, after, f"modulo {ar.prime}")
                compared[i] = compared[i] + defined
            if all(np.all(count > (self.mode == "affine")) for count in compared):
                return True
            if draw == 10 and not any(np.any(count) for count in compared):
                return False
        return False


# --- Files -----------------------------------------------------------------------------------------------------------


def key_of(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return attributes in a form that can be compared."""
    tensors = {n: (v.dtype.name, v.shape, v.tobytes()) for n, (_, v) in attributes.items() if isinstance(v, Array)}
    return {n: repr(pair) for n, pair in attributes.items()} | tensors


def same_node(ours: Node, theirs: Node) -> bool:
    """Compare op, domain and attributes, and the meaning of both opsets."""
    breaks = BREAKS.get(ours.op, ()) if not ours.domain else ()
    same_opset = all((ours.opset < b) == (theirs.opset < b) for b in breaks)
    same_op = (ours.op, ours.domain) == (theirs.op, theirs.domain)
    return same_op and same_opset and key_of(ours.attributes) == key_of(theirs.attributes)


def model_node(proto: onnx.NodeProto, opset: int) -> Node:
    """Return a node of the model in the form of the certificate."""
    attributes: dict[str, Any] = {}
    for item in proto.attribute:
        kind = AttributeProto.AttributeType.Name(item.type).lower()
        if item.ref_attr_name:
            attributes[item.name] = ("reference", item.ref_attr_name)
        elif kind == "tensor":
            attributes[item.name] = (kind, numpy_helper.to_array(item.t))
        elif kind in ("float", "int", "string", "floats", "ints", "strings"):
            value = helper.get_attribute_value(item)
            plain = [v.decode() if isinstance(v, bytes) else v for v in (value if kind.endswith("s") else [value])]
            attributes[item.name] = (kind, plain if kind.endswith("s") else plain[0])
        else:
            attributes[item.name] = ("other", None)
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    return Node(proto.op_type, domain, opset, list(proto.input), list(proto.output), attributes)


class Scope:
    """Names of one graph or function body of the model. ``place``: the place of its rewrites, once known."""

    def __init__(
        self, nodes: Any, opset: int, tensors: Any = (), inputs: Any = (), parent: Scope | None = None
    ) -> None:
        self.parent = parent
        self.place: str | None = None
        self.nodes = {p.output[0]: model_node(p, opset) for p in nodes if p.output}
        self.written = {*inputs, *(o for p in nodes for o in p.output)}
        self.tensors = {t.name: t for t in tensors}
        self.bodies = [g for p in nodes for a in p.attribute for g in (*([a.g] if a.HasField("g") else []), *a.graphs)]
        self.inner = [Scope(g.node, opset, g.initializer, [i.name for i in g.input], self) for g in self.bodies]

    def walk(self) -> Iterator[Scope]:
        yield self
        for scope in self.inner:
            yield from scope.walk()

    def stored(self, name: str) -> Array | None:
        """Return the initializer or the Constant of this name, or None."""
        if name in self.tensors:
            return numpy_helper.to_array(self.tensors[name])
        node = self.nodes.get(name)
        if node is not None and node.op == "Constant" and not node.domain:
            return next(
                (np.asarray(v, np.float32 if k[:5] == "float" else None) for k, v in node.attributes.values()), None
            )
        return None if name in self.written or self.parent is None else self.parent.stored(name)

    def origin(self, name: str) -> str:
        """Follow nodes that pass their first input on."""
        node = self.nodes.get(name)
        return self.origin(node.inputs[0]) if node is not None and node.op in PASSING else name

    def has(self, name: str) -> bool:
        return name in self.written or (self.parent is not None and self.parent.has(name))


def read_bytes(path: Path) -> bytes:
    if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
        raise Refusal(f"{path} is not a file of at most {MAX_FILE_BYTES >> 30} GiB")
    return path.read_bytes()


def read_certificate(path: Path) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise Refusal(f"{path} has an object with the same key twice")
        return dict(pairs)

    def refuse(text: str) -> None:
        raise Refusal(f"{path} has {text}, which is not JSON")

    try:
        raw = json.loads(read_bytes(path).decode(), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{path} is not a JSON file: {error}") from None
    if not isinstance(raw, dict):
        raise Refusal(f"{path} does not hold a JSON object")
    return raw


def read_model(path: Path, digest: str, data: dict[str, str] | None = None) -> onnx.ModelProto:
    """Read an ONNX file with this SHA-256, and its external data."""
    content = read_bytes(path)
    actual = hashlib.sha256(content).hexdigest()
    require(actual == digest, "hash", f"{path.name} has the SHA-256 {actual}, not {digest}")
    try:
        model = onnx.ModelProto.FromString(content)
    except Exception as error:
        raise Refusal(f"{path} is not an ONNX model: {error}") from None
    if data is not None:
        tensors = [t for t in model.graph.initializer if external_data_helper.uses_external_data(t)]
        locations = {e.value for t in tensors for e in t.external_data if e.key == "location"}
        require(locations == set(data), "hash", f"the model has the external data {sorted(locations)}")
        for location in locations:
            if Path(location).is_absolute() or ".." in Path(location).parts or (path.parent / location).is_symlink():
                raise Refusal(f"the model names a file outside of its folder: {location}")
            actual = hashlib.sha256(read_bytes(path.parent / location)).hexdigest()
            require(actual == data[location], "hash", f"{location} has the SHA-256 {actual}, not {data[location]}")
        for tensor in tensors:
            external_data_helper.load_external_data_for_tensor(tensor, str(path.parent))
    return model


def read_constant(entry: Any, tensors: dict[str, TensorProto]) -> Array:
    """Return a constant of the table, with dtype, shape and SHA-256 as stated."""
    dtype, shape = np.dtype(entry["dtype"]), entry["shape"]
    require(("data" in entry) != ("initializer" in entry), "structure", "not one of `data` and `initializer`")
    if "data" in entry:
        array = np.frombuffer(base64.b64decode(entry["data"], validate=True), dtype).reshape(shape)
    else:
        require(entry["initializer"] in tensors, "constants", f"the model has no {entry['initializer']}")
        array = numpy_helper.to_array(tensors[entry["initializer"]])
    actual = [array.dtype, list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]
    require(actual == [dtype, shape, entry["sha256"]], "constants", f"its type, shape and SHA-256 are {actual}")
    require("data" in entry or array.size > 16, "constants", "a small constant is not in the file")
    return array


# --- Claims ----------------------------------------------------------------------------------------------------------


def half_ulp(array: Array) -> Array:
    """Return half an ulp at each element, as in the claim stored."""
    return np.spacing(np.abs(array)).astype(np.float64) / 2


def graph_scopes(model: onnx.ModelProto) -> list[Scope]:
    graph = model.graph
    return list(Scope(graph.node, opset_of(model), graph.initializer, [i.name for i in graph.input]).walk())


class Checker:
    """Check the claims of one certificate."""

    def __init__(
        self, raw: Any, model: onnx.ModelProto, source: onnx.ModelProto | None, rng: np.random.Generator
    ) -> None:
        self.raw, self.model, self.rng = raw, model, rng
        self.counts: Counter[str] = Counter()
        self.lines: list[str] = []
        self.arrays: dict[str, Array] = {}
        tensors = {t.name: t for t in model.graph.initializer}
        for key, entry in raw["constants"].items():
            with located(f"constant {key}"):
                self.arrays[key] = read_constant(entry, tensors)
        self.functions = {(f["domain"], f["name"]): f for f in raw["functions"]}
        self.scopes = graph_scopes(model)
        self.source = None if source is None else graph_scopes(source)[0]
        for function in model.functions:
            self.scopes += Scope(function.node, opset_of(function), inputs=function.input).walk()
        self.scopes[0].place = ""
        self.found: set[tuple[int, str]] = set()
        # By place and tensor: the last rewrite that writes it, tensors before rewrites, and exact values of constants
        self.writers: dict[tuple[str, str], int] = {}
        self.seen: set[tuple[str, str]] = set()
        self.exact: dict[tuple[str, str], tuple[Array, Array, float]] = {}

    def run(self) -> None:
        for bound, largest in BOUNDS.items():
            require(self.raw["bounds"][bound] <= largest, "structure", f"the bound {bound} is above {largest}")
        self.check_functions()
        for index, rewrite in enumerate(self.raw["rewrites"]):
            with located(f"rewrite {index}"):
                require(rewrite["index"] == index, "structure", f"the index is {rewrite['index']}")
                self.counts[rewrite["mode"]] += 1
                if rewrite["mode"] != "none":
                    self.check_rewrite(index, rewrite)
                self.writers |= {(rewrite["place"], n): index for n in rewrite.get("writes", [])}
        for index, rewrite in enumerate(self.raw["rewrites"]):
            with located(f"rewrite {index}"):
                for node in rewrite.get("after", {"nodes": []})["nodes"]:
                    self.check_final(index, rewrite, node)

    def node(self, raw: Any, bound: dict[str, Any] | None = None) -> Node:
        """Read a node. ``bound``: attributes of the call, in place of references to them."""
        attributes = {}
        for name, item in raw["attributes"].items():
            kind, value = item["type"], item["value"]
            if kind == "tensor":
                value = self.arrays[value]
            elif kind == "float":
                value = float(value)
            elif kind == "floats":
                value = [float(v) for v in value]
            elif kind == "other":
                value = None
                self.counts["attributes without a defined form"] += 1
            if kind != "reference" or bound is None:
                attributes[name] = (kind, value)
            elif value in bound:
                attributes[name] = bound[value]
        domain = "" if raw["domain"] == "ai.onnx" else raw["domain"]
        known = not domain or raw["op"] == "SimplifiedLayerNormalization" or (domain, raw["op"]) in self.functions
        require(known, "functions", f"{domain}.{raw['op']} is not in the list of functions")
        return Node(raw["op"], domain, raw["opset"], raw["inputs"], raw["outputs"], attributes)

    def expand(
        self, raws: Any, names: dict[str, str], prefix: str, bound: dict[str, Any], depth: int = 0
    ) -> list[Node]:
        """Read nodes, with the body of a function in place of each call."""
        nodes: list[Node] = []
        for i, raw in enumerate(raws):
            node = self.node(raw, bound)
            inputs = [names.get(n, prefix + n) if n else "" for n in node.inputs]
            outputs = [names.get(n, prefix + n) if n else "" for n in node.outputs]
            node = replace(node, inputs=inputs, outputs=outputs)
            if depth == 0 and outputs[0] in self.epsilons:
                node.attributes["epsilon"] = ("float", self.epsilons[outputs[0]])
            function = self.functions.get((node.domain, node.op))
            if function is None:
                nodes.append(node)
            else:
                formal = dict.fromkeys(function["inputs"], "") | dict(zip(function["inputs"], inputs, strict=False))
                formal |= {f: n for f, n in zip(function["outputs"], outputs, strict=False) if n}
                values = self.node({**raw, "attributes": function["defaults"]}).attributes | node.attributes
                nodes += self.expand(function["nodes"], formal, f"{prefix}{i}:", values, depth + 1)
            if len(nodes) > MAX_NODES or depth > 16:
                raise Refusal(f"functions call each other too deeply, or there are more than {MAX_NODES} nodes")
        return nodes

    def check_functions(self) -> None:
        """Compare each function that the model has with its body there."""
        theirs = {(f.domain, f.name): f for f in self.model.functions}
        require(len(self.functions) == len(self.raw["functions"]), "structure", "a function is defined twice")
        for (domain, name), ours in self.functions.items():
            require(domain not in ("", "ai.onnx"), "structure", f"the standard op {name} is redefined")
            function = theirs.get((domain, name))
            require(function is not None or not ours["in_file"], "functions", f"the model has no {domain}.{name}")
            nodes = [self.node(raw) for raw in ours["nodes"]]
            if function is None:
                continue
            others = [model_node(proto, opset_of(function)) for proto in function.node]
            formal = sorted([*function.attribute, *(a.name for a in function.attribute_proto)])
            head = [list(function.input), list(function.output), formal]
            defaults = model_node(onnx.NodeProto(attribute=function.attribute_proto), 1).attributes
            stated = self.node(
                {"op": "", "domain": "", "opset": 1, "inputs": [], "outputs": [], "attributes": ours["defaults"]}
            )
            same = head == [ours["inputs"], ours["outputs"], sorted(ours["attributes"])]
            same = same and key_of(defaults) == key_of(stated.attributes) and len(nodes) == len(others)
            for a, b in zip(nodes, others, strict=False):
                same = same and same_node(a, b) and (a.inputs, a.outputs) == (b.inputs, b.outputs)
                same = same and ((a.domain, a.op) not in self.functions or (a.domain, a.op) in theirs)
            require(same, "functions", f"{domain}.{name} has another body in the model")
            require(ours["in_file"], "functions", f"the model has {domain}.{name}, but `in_file` is false")

    def check_rewrite(self, index: int, rewrite: Any) -> None:
        """Check the claims of a rewrite with both sides."""
        mode, before, after = rewrite["mode"], rewrite["before"], rewrite["after"]
        require(mode in (*FIELD_MODES, "numeric"), "structure", f"the mode is {mode}")
        require((mode == "expressions") == ("expressions" in rewrite), "structure", "`expressions` is another mode's")
        extra = rewrite.get("expressions", {"nodes": [], "constants": {}, "results": {}})
        self.epsilons = {
            n: Fraction(int(e["numerator"]), int(e["denominator"])) for n, e in rewrite["epsilons"].items()
        }
        outputs = before["outputs"]
        require(outputs and outputs == after["outputs"], "structure", "the sides have different outputs")
        self.check_claims(rewrite)
        self.check_leaves(rewrite)
        self.check_chain(index, rewrite)
        self.check_facts(rewrite)
        # The expressions are a part of `after`: each defines the exact value of a constant.
        constants = {n: e for n, e in after["constants"].items() if "value" in e or mode == "numeric"}
        alone = after["constants"].keys() - constants.keys()
        require(alone == extra["results"].keys(), "structure", "`results` does not define exactly the other constants")
        for name, entry in extra["constants"].items():
            same = entry["value"] == before["constants"].get(name, entry).get("value")
            require(same and name not in constants, "structure", f"{name} has two values")
        copies = [{"op": "Identity", "inputs": [n], "outputs": [c]} for c, n in extra["results"].items()]
        standard = {"domain": "", "opset": 21, "attributes": {}}
        nodes = [*extra["nodes"], *(copy | standard for copy in copies), *after["nodes"]]
        sides = [self.side(rewrite, before["nodes"], before["constants"])]
        sides.append(self.side(rewrite, nodes, constants | extra["constants"]))
        comparison = Comparison(mode, rewrite["leaves"], outputs, sides, self.rng)
        comparison.check()
        sizes = " and ".join(str(sizes) if sizes else "fixed" for sizes in comparison.sizes)
        self.lines.append(f"rewrite {index}: sizes {sizes}")
        self.check_stored(rewrite, comparison.known[1])

    def side(self, rewrite: Any, raws: Any, entries: Any) -> Side:
        """Read a side, in which each name is defined once, before it is read."""
        leaves = [leaf["name"] for leaf in rewrite["leaves"]]
        defined = {*leaves, *entries}
        count = len(leaves) + len(entries)
        for raw in raws:
            undefined = {*raw["inputs"]} - defined - {""}
            require(not undefined and any(raw["outputs"]), "structure", f"{raw['op']} reads {sorted(undefined)}")
            defined |= {*raw["outputs"]} - {""}
            count += len(raw["outputs"]) - raw["outputs"].count("")
        require({*rewrite["before"]["outputs"]} <= defined, "structure", "an output has no definition")
        require(count == len(defined), "structure", "a tensor is defined twice")
        nodes = self.expand(raws, {n: n for n in defined}, "", {})
        dependent = set(leaves)
        for node in nodes:
            read = node.inputs[:1] if node.op == "CastLike" else node.inputs
            if node.op not in ("Shape", "Size") and dependent & set(read):
                dependent |= set(node.outputs) - {""}
        for entry in entries.values():
            self.counts["constants that are computed"] += entry.get("computed", False)
        return Side(nodes, {n: literal(self.exact_array(e)) for n, e in entries.items()}, dependent)

    def exact_array(self, entry: Any) -> Array:
        return self.arrays[entry["value"] if "value" in entry else entry["rounded"]]

    def check_claims(self, rewrite: Any) -> None:
        """Require the claims of the page, because each shows that its check is needed."""
        mode, after = rewrite["mode"], rewrite["after"]
        required = [{"claim": "shape", "before": [n], "after": [n]} for n in after["outputs"]]
        required += [{"claim": "equal", "before": n, "after": n, "mode": mode} for n in after["outputs"]]
        rounded = {
            n: e for n, e in after["constants"].items() if "rounded" in e and (mode != "numeric" or "value" in e)
        }
        dtypes = {n: self.arrays[e["rounded"]].dtype.name for n, e in rounded.items()}
        required += [{"claim": "stored", "constant": n, "dtype": dtype} for n, dtype in dtypes.items()]
        required += [{"claim": "epsilon", "node": n} for n in rewrite["epsilons"]]
        for claim in required:
            require(claim in rewrite["claims"], "structure", f"the claim {json.dumps(claim)} is missing")
        for claim in rewrite["claims"]:
            self.counts["claims about NaN and Inf"] += claim["claim"] == "nonfinite"
            others = claim in required or claim["claim"] == "nonfinite"
            require(others, "structure", f"the claim {json.dumps(claim)} does not belong to the rewrite")

    def check_leaves(self, rewrite: Any) -> None:
        """Compare leaves with the inputs of the model. The model does not state the shapes of other leaves."""
        inputs = {i.name: i.type.tensor_type for i in self.model.graph.input if rewrite["place"] == ""}
        for leaf in rewrite["leaves"]:
            name, shape = leaf["name"], leaf["shape"]
            np.dtype(leaf["dtype"] or "float32")
            fixed = any(isinstance(size, int) for size in shape or [])
            self.counts["leaves with sizes that the model does not state"] += fixed and name not in inputs
            if name in inputs and inputs[name].HasField("shape") and shape is not None:
                dims = [d.dim_value if d.HasField("dim_value") else None for d in inputs[name].shape.dim]
                same = len(dims) == len(shape)
                same = same and all(not isinstance(n, int) or n == d for n, d in zip(shape, dims, strict=True))
                require(same, "structure", f"leaf {name} has the shape {shape}, but the model's input has {dims}")
            if name in inputs and leaf["dtype"]:
                same = helper.tensor_dtype_to_np_dtype(inputs[name].elem_type) == np.dtype(leaf["dtype"])
                require(same, "structure", f"leaf {name} has another type than the model's input")

    def check_chain(self, index: int, rewrite: Any) -> None:
        """Check that the nodes of `before` are in the graph that the earlier rewrites left."""
        place, before, after = rewrite["place"], rewrite["before"], rewrite["after"]
        leaves = {leaf["name"] for leaf in rewrite["leaves"]}
        for raw in before["nodes"]:
            origin, node = raw["from"], self.node(raw)
            for name in filter(None, raw["outputs"]):
                last = self.writers.get((place, name))
                require(last == origin, "chain", f"`from` is {origin}, but rewrite {last} writes {name} last")
            if origin is None:
                source = replace(node, opset=self.raw["source"]["opset"])
                require(same_node(node, source), "chain", f"opset {node.opset} of {node.op} is not that of the source")
                self.count_source(node)
            elif self.raw["rewrites"][origin]["mode"] == "none":
                self.counts["nodes that a rewrite of mode none wrote"] += 1
            else:
                earlier = self.raw["rewrites"][origin]["after"]
                twins = [n for n in earlier["nodes"] if (n["outputs"], n["inputs"]) == (raw["outputs"], raw["inputs"])]
                same = any(same_node(replace(self.node(n), opset=node.opset), node) for n in twins)
                require(same, "chain", f"rewrite {origin} has no node equal to the {node.op} that computes {name}")
                for name in before["constants"].keys() & {*raw["inputs"]}:
                    old, new = earlier["constants"].get(name, {}), before["constants"][name]
                    self.counts["inputs that became constants"] += not old
                    if "value" in old:
                        same = np.array_equal(literal(self.exact_array(old)), literal(self.exact_array(new)))
                        require(same, "chain", f"constant {name} differs from that of rewrite {origin}")
        for name, entry in before["constants"].items():
            require("value" in entry, "structure", f"constant {name} has no value")
            last = self.writers.get((place, name))
            self.counts["constants of unknown origin"] += last is not None
            written = last is None or name in self.raw["rewrites"][last].get("writes", [])
            require(written or entry.get("computed"), "chain", f"rewrite {last} computes the constant {name}")
            if "rounded" in entry:
                require((place, name) in self.exact, "chain", f"no earlier rewrite computed the constant {name}")
                rounded, exact, slack = self.exact[place, name]
                value = self.arrays[entry["value"]]
                same = rounded.tobytes() == self.arrays[entry["rounded"]].tobytes()
                same = same and np.all(np.abs(value - exact) <= (slack and half_ulp(value) + slack))
                require(same, "chain", f"constant {name} is not that of an earlier rewrite")
        made = {n for node in after["nodes"] for n in node["outputs"]} - {""}
        held = {n for node in before["nodes"] for n in node["outputs"]} - {""}
        for name in made - {*after["outputs"]} - held:
            old = (place, name) in self.seen or (place, name) in self.writers or name in leaves
            require(not old, "chain", f"the new tensor {name} has the name of an older one")
        self.seen |= {(place, n) for n in held | leaves}
        self.writers |= dict.fromkeys([(place, n) for n in made], index)

    def count_source(self, node: Node) -> None:
        if self.source is not None:
            theirs = self.source.nodes.get(node.outputs[0])
            same = theirs is not None and same_node(node, theirs) and node.inputs == theirs.inputs
            self.counts["nodes that are not in the source file"] += not same

    def check_final(self, index: int, rewrite: Any, raw: Any) -> None:
        """Look a node of `after` up in the model, or in a later rewrite."""
        final, node, constants = raw["final"], self.node(raw), rewrite["after"]["constants"]
        if rewrite["converted"]:
            self.counts["nodes of converted rewrites"] += 1
        elif final["where"] == "cleanup":
            self.counts["nodes left to the cleanup"] += 1
        elif final["where"] == "rewrite":
            later = self.raw["rewrites"][final["index"]].get("before", {"nodes": []})
            same = any(n["outputs"] == raw["outputs"] and n["from"] == index for n in later["nodes"])
            require(final["index"] > index and same, "final", f"rewrite {final['index']} does not replace {node.op}")
        else:
            require(final["where"] == "file", "structure", f"`final` is {final['where']}")
            self.find_in_file(rewrite, node, final, constants)

    def find_in_file(self, rewrite: Any, node: Node, final: Any, constants: Any) -> None:
        # Each scope belongs to one place, so a made-up place can't hide earlier rewrites from the chain.
        scopes = [s for s in self.scopes if final["output"] in s.nodes and s.place in (None, rewrite["place"])]
        scopes = [s for s in scopes if s.place is not None or rewrite["place"] != ""]
        require(scopes, "final", f"the model has no node with the output {final['output']}")
        reasons = [self.difference(scope, rewrite, node, final, constants) for scope in scopes]
        require("" in reasons, "final", f"{node.op}, which computes {node.outputs[0]}: {reasons[0]}")
        scope = scopes[reasons.index("")]
        scope.place = rewrite["place"]
        self.found.add((id(scope), final["output"]))
        self.counts["outputs that the cleanup renamed"] += final["output"] != node.outputs[0]

    def difference(self, scope: Scope, rewrite: Any, node: Node, final: Any, constants: Any) -> str:
        """Compare a node of `after` with the node of the model. Returns: the difference, or an empty text."""
        theirs = scope.nodes[final["output"]]
        if not same_node(node, theirs) or final["inputs"] != theirs.inputs or len(node.inputs) != len(theirs.inputs):
            return f"the model has another {theirs.op} with the inputs {theirs.inputs}"
        function = self.functions.get((node.domain, node.op))
        if function is not None and not function["in_file"]:
            return "`in_file` of its function is false"
        writers = {n: (w["final"], i) for w in rewrite["after"]["nodes"] for i, n in enumerate(w["outputs"])}
        for ours, name in zip(node.inputs, theirs.inputs, strict=True):
            writer, position = writers.get(ours, ({"where": None}, 0))
            if (ours == "") != (name == ""):
                return "an input is omitted on one side"
            if ours in constants:
                wanted = self.arrays[constants[ours].get("rounded", constants[ours].get("value"))]
                stored = scope.stored(name)
                if stored is None or (stored.dtype, stored.shape) != (wanted.dtype, wanted.shape):
                    return f"{name} is no constant of the same type and shape in the model"
                if stored.tobytes() != wanted.tobytes():
                    return f"constant {name} has other elements in the model"
            elif writer["where"] == "file":
                outputs = scope.nodes[writer["output"]].outputs if writer["output"] in scope.nodes else []
                if outputs[position : position + 1] != [name]:
                    return f"input {name} is not the output of the node that computes {ours}"
            elif ours and ours != name:
                self.counts["inputs that the cleanup replaced"] += 1
                if scope.has(ours) and scope.origin(ours) != scope.origin(name):
                    return f"the model reads {name} in place of {ours}"
        return ""

    def check_facts(self, rewrite: Any) -> None:
        """Check the facts, and that the facts on constants under roots and in divisors are among them."""
        for fact in rewrite["facts"]:
            values = literal(self.exact_array(rewrite[fact["side"]]["constants"][fact["constant"]]))
            values = values + float(fact.get("plus", 0))
            holds = values > 0 if fact["fact"] == "positive" else (values != 0) & (values == values)
            require(np.all(holds), "facts", f"an element of {fact['constant']} is not {fact['fact']}")
        places = {"Div": (1, "nonzero"), "Reciprocal": (0, "nonzero"), "Sqrt": (0, "positive")}
        places["BatchNormalization"] = (4, "positive")
        for name in ("before", "after") if rewrite["mode"] in FIELD_MODES else ():
            for raw in rewrite[name]["nodes"]:
                node = self.node(raw)
                place, fact = places.get(node.op, (9, "")) if not node.domain else (9, "")
                constant = "".join(node.inputs[place : place + 1])
                entry = rewrite[name]["constants"].get(constant)
                if entry is not None and "float" in self.exact_array(entry).dtype.name:
                    plus = {"plus": node.get("epsilon", EPSILON)} if place == 4 else {}
                    wanted = {"fact": fact, "side": name, "constant": constant} | plus
                    require(wanted in rewrite["facts"], "facts", f"the fact {json.dumps(wanted)} is missing")

    def check_stored(self, rewrite: Any, values: dict[str, Array]) -> None:
        """Check that constants and epsilons are rounded once. ``values``: tensors of `after` in float64."""
        for name, entry in rewrite["after"]["constants"].items():
            if "rounded" not in entry or (rewrite["mode"] == "numeric" and "value" not in entry):
                continue
            rounded, exact = self.arrays[entry["rounded"]], values[name]
            slack = 0.0
            if "value" not in entry:
                computed = [values[n] for node in rewrite["expressions"]["nodes"] for n in node["outputs"] if n]
                computed += [values[n] for n in rewrite["expressions"]["constants"]]
                largest = max(float(np.abs(v).max(initial=0)) for v in computed if v.dtype == np.float64)
                slack = BOUNDS["expression"] * largest
            close = exact.shape == rounded.shape and np.abs(literal(rounded) - exact) <= half_ulp(rounded) + slack
            require(np.all(close), "stored", f"constant {name} is not its exact value rounded once")
            self.exact[rewrite["place"], name] = rounded, exact, slack
        for name, exact in self.epsilons.items():
            nodes = [self.node(raw) for raw in rewrite["after"]["nodes"] if raw["outputs"][0] == name]
            require(nodes, "epsilon", f"no node computes {name}")
            stored = np.float32(nodes[0].get("epsilon", EPSILON))
            close = abs(Fraction(float(stored)) - exact) <= Fraction(float(half_ulp(stored)))
            require(close, "epsilon", f"the epsilon of {name} is {stored}, not {float(exact)!r} rounded once")

    def summary(self) -> str:
        """Describe the checks and their limits."""
        counts = self.counts
        proved = ", ".join(f"{counts[mode]} {mode}" for mode in FIELD_MODES)
        total = sum(counts[mode] for mode in FIELD_MODES)
        lines = [f"accepted: {total} rewrites proved ({proved}), {counts['numeric']} tested (numeric)"]
        lines.append(f"rewrites not covered: {counts['none']} none")
        nodes = sum(len(scope.nodes) for scope in self.scopes if scope.place is not None)
        counts["nodes of the model outside of every rewrite"] = nodes - len(self.found)
        others = [
            f"{n} {what}" for what, n in sorted(counts.items()) if n and what not in (*FIELD_MODES, "numeric", "none")
        ]
        lines.append(f"nodes covered: {len(self.found)}; not covered: {'; '.join(others) or 'none'}")
        compared = "not given, so not covered" if self.source is None else "nodes compared with it"
        lines += [*self.lines, f"sizes: only the listed ones; source: {compared}; rounding and overflow: not covered"]
        return "\n".join(lines)


@contextmanager
def located(where: str) -> Iterator[None]:
    """Name the place in the certificate at which a claim fails."""
    try:
        yield
    except Rejection as error:
        raise Rejection(error.claim, f"{where}: {error.detail}") from None
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        detail = f"{where}: a field is missing or has another type ({type(error).__name__}: {error})"
        raise Rejection("structure", detail.replace("\n", " ")) from None


def opset_of(holder: Any) -> int:
    return max([o.version for o in holder.opset_import if o.domain in ("", "ai.onnx")], default=1)


def check_files(paths: list[Path], rng: np.random.Generator) -> str:
    raw = read_certificate(paths[0])
    with located("the file"):
        require(raw["schema"] == "normdeploy/rewrites/1", "structure", f"the schema is {raw['schema']}")
        model = read_model(paths[1], raw["model"]["sha256"], raw["model"]["data"])
        source = read_model(paths[2], raw["source"]["sha256"]) if len(paths) == 3 else None
        checker = Checker(raw, model, source, rng)
        checker.run()
        return checker.summary()


def stop(signum: int, frame: object) -> None:
    raise Refusal("the time limit is reached; raise it with --seconds")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="normdeploy_check", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="certificate, model and optionally the source")
    parser.add_argument("--seed", type=int, help="repeat a run; the default is the system's generator")
    parser.add_argument("--seconds", type=int, default=900, help="time limit")
    parser.add_argument("--gigabytes", type=int, default=12, help="memory limit")
    options = parser.parse_args(arguments)
    if not 2 <= len(options.files) <= 3:
        parser.error("expected a certificate, a model and optionally a source")
    resource.setrlimit(resource.RLIMIT_AS, (options.gigabytes << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGALRM, stop)
    # The signal repeats, because code that is called may catch the exception.
    signal.setitimer(signal.ITIMER_REAL, options.seconds, 1)
    seed = secrets.randbits(256) if options.seed is None else options.seed
    code = 2
    try:
        with np.errstate(all="ignore"):
            text = check_files(options.files, np.random.default_rng(seed))
        code = 0
    except Rejection as error:
        text, code = f"rejected: {error}", 1
    except (Refusal, OSError) as error:
        text = f"refused: {error}"
    except MemoryError:
        text = "refused: the memory limit is reached; raise it with --gigabytes"
    except RecursionError:
        text = "refused: the files are nested too deeply"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


if __name__ == "__main__":
    sys.exit(main())
