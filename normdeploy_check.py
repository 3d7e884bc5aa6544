"""Check a normdeploy certificate against its model, as docs/reference/certificate-format.md defines the checks.

    python -m normdeploy_check c.json model.onnx [source.onnx]

Exit code 0: accepted, 1: a claim fails, 2: a file can't be read or a limit is reached. Both sides of a rewrite are
computed at random points: in float64, and modulo a random prime. onnx's reference evaluator computes the ops that need
only +, − and ×, in both arithmetics. The other ops of the page are defined here. Each tensor is a numpy array: float64
for real numbers, dtype object with Python's integers for elements of the field, int64 or bool for integers.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
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
from dataclasses import dataclass, replace
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
BREAKS: dict[str, tuple[int, ...]] = {"GroupNormalization": (21,), "Dropout": (12,), "Slice": (10,), "Reshape": (5,)}
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
        self.elements: dict[int, tuple[Array, Array]] = {}
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
        # Both sides often read the same large weight.
        if id(values) not in self.elements:
            mantissa, exponent = np.frexp(values)
            integers = np.asarray(np.ldexp(mantissa, 53)).astype(np.int64).astype(object)
            elements = self.array(integers * self.powers_of_two[exponent - 53 + 1200])
            self.elements[id(values)] = values, elements
        return self.elements[id(values)][1]

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
        assert self.prime is not None
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
        digits: list[Any] = [0.0] * 7
        for (i, a), (j, b) in itertools.product(enumerate(pieces[0]), enumerate(pieces[1])):
            digits[i + j] = digits[i + j] + reference(node, [a, b])[0]
        missing = np.isnan(digits[0])
        total: Any = 0
        for digit in reversed(digits):
            if np.max(digit, initial=0, where=~missing) >= 2**53:
                raise Refusal(f"{node.op} has too many terms")
            total = total * 2**16 + np.where(missing, 0, digit).astype(np.int64).astype(object)
        return np.where(missing, math.nan, total)

    def hash(self, *values: Any) -> Any:
        """Return a random element that depends on the values alone, or NaN if one is NaN."""
        if any(v != v for v in values):
            return math.nan
        digest = hashlib.blake2b(repr(values).encode(), key=self.key, digest_size=16).digest()
        assert self.prime is not None
        return int.from_bytes(digest) % self.prime

    def unknown(self, node: Node, x: Array, axes: tuple[int, ...] = ()) -> Array:
        """Compute an unknown function of one number, or of a number and its row along the axes."""
        if not self.prime and axes:
            powers = np.exp(x - x.max(axis=axes, keepdims=True))
            return powers / powers.sum(axis=axes, keepdims=True)
        if not self.prime:
            return reference(node, [x])[0]
        attributes = [node.get(name, default) for name, default in UNKNOWN[node.op].items()]
        row = np.frompyfunc(lambda v: self.hash("row", v), 1, 1)(x).sum(axis=axes, keepdims=True) if axes else 0
        return np.frompyfunc(lambda v, r: self.hash(node.op, attributes, v, r), 2, 1)(x, row)


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

    @property
    def signature(self) -> Any:
        """Return op, domain and attributes in a form that can be compared."""
        values = {n: (k, identity(v) if k == "tensor" else repr(v)) for n, (k, v) in self.attributes.items()}
        return self.op, self.domain, values


def renamed(node: Node, prefix: str, names: dict[str, str] | None = None) -> Node:
    """Return a node on other tensors. ``names``: the new names of some; all others get the prefix."""
    new = {n: (names or {}).get(n, prefix + n) for n in (*node.inputs, *node.outputs)} | {"": ""}
    return replace(node, inputs=[new[n] for n in node.inputs], outputs=[new[n] for n in node.outputs])


def identity(array: Array) -> Any:
    """Return type, shape and elements in a form that can be compared."""
    return array.dtype.name, array.shape, array.tobytes()


def is_float(code: int) -> bool:
    return "float" in helper.tensor_dtype_to_np_dtype(code).name


def literal(array: Array) -> Array:
    """Return a stored array as float64, int64 or bool."""
    if array.dtype in (bool, object):
        return array
    return array.astype(np.float64 if "float" in array.dtype.name else np.int64)


def reference(node: Node, inputs: list[Any]) -> list[Any]:
    """Compute a node with onnx's reference evaluator, with float64 in place of every float type."""
    if node.op in ("Loop", "If", "Scan") or node.op.startswith("Random"):
        raise Undefined(f"{node.op} can't be evaluated here")
    feeds = {f"i{i}": x for i, x in enumerate(inputs) if x is not None}
    outputs = [name or f"o{i}" for i, name in enumerate(node.outputs)]
    attributes = {}
    for name, (kind, value) in node.attributes.items():
        if name in ("to", "dtype", "softmax_precision") and is_float(value):
            value = TensorProto.DOUBLE
        attributes[name] = numpy_helper.from_array(literal(value)) if kind == "tensor" else value
    try:
        names = [f"i{i}" if x is not None else "" for i, x in enumerate(inputs)]
        proto = helper.make_node(node.op, names, outputs, domain=node.domain, **attributes)
        # The evaluator does not use the type of an object array.
        types = {n: np.dtype(float) if x.dtype == object else x.dtype for n, x in feeds.items()}
        infos = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(t), None) for n, t in types.items()]
        results = [helper.make_tensor_value_info(n, TensorProto.DOUBLE, None) for n in outputs]
        opsets = [helper.make_opsetid(node.domain, node.opset)]
        model = helper.make_model(helper.make_graph([proto], "node", infos, results), opset_imports=opsets)
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
    kind, x, ar = c.node.op.removesuffix("Normalization"), c.x, c.ar
    epsilon = Fraction(c.node.get("epsilon", EPSILON))
    along = (-1, *[1] * (x.ndim - 2))
    real = None
    if kind == "Batch":
        require(not c.node.get("training_mode"), "structure", f"{c.node.outputs[0]} is computed in training mode")
        center, variance = (p.reshape(along) for p in c.inputs[3:5])
        real = None if c.real[4] is None else c.real[4].reshape(along) + float(epsilon)
    else:
        first = {"Instance": 2, "Group": 2}.get(kind, c.node.get("axis", -1) % x.ndim)
        x = x.reshape(x.shape[0], c.node.get("num_groups"), -1) if kind == "Group" else x
        axes = tuple(c.node.get("axes", (0, 2, 3))) if kind == "MeanVariance" else tuple(range(first, x.ndim))
        center = 0 if kind in ("RMS", "SimplifiedLayer") else c.mean(x, axes)
        variance = c.mean((x - center) ** 2, axes)
    if kind == "MeanVariance":
        root = ar.root(variance) + ar.number(float(np.float32(1e-9)))
    else:
        root = ar.root(variance + ar.number(epsilon), real)
    inverse = ar.divide(ar.array(1), root)
    normal = (x - center) * inverse
    grouped = kind == "Group" and c.node.opset < 21
    normal = normal if grouped else normal.reshape(c.x.shape)
    shape = (-1, 1) if grouped else along if kind in ("Batch", "Instance", "Group") else None
    scale, bias = (p if p is None or not shape else p.reshape(shape) for p in [*c.inputs, None, None][1:3])
    normal = normal if scale is None else normal * scale
    normal = normal if bias is None else normal + bias
    return [normal, center, inverse] if kind == "Layer" else normal.reshape(c.x.shape)


def unknown(c: Call) -> Array:
    """Compute functions that are unknown in the field: equal arguments give equal elements."""
    if c.node.op == "Softmax":
        axis = c.node.get("axis", -1 if c.node.opset >= 13 else 1) % c.x.ndim
        return c.ar.unknown(c.node, c.x, (axis,) if c.node.opset >= 13 else tuple(range(axis, c.x.ndim)))
    if c.node.op == "Swish":
        argument = c.ar.array(c.x * c.ar.number(c.node.get("alpha", 1)))
        return c.x * c.ar.unknown(replace(c.node, op="Sigmoid", attributes={}), argument)
    return c.ar.unknown(c.node, c.x)


# Ops of floats that onnx's reference evaluator computes in both arithmetics
SAME: tuple[str, ...] = (
    "Reshape",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
    "Transpose",
    "Expand",
    "Tile",
    "Split",
    "Slice",
    "Identity",
)
SAME += ("Concat", "ReduceSum", "ReduceSumSquare")
SIZES = ("Shape", "Size", "Constant", "ConstantOfShape", "Cast", "CastLike", "Dropout")
# Unknown functions in the field, with the defaults of their attributes
UNKNOWN: dict[str, dict[str, Any]] = {"Sigmoid": {}, "Tanh": {}, "Erf": {}, "Softplus": {}, "Softmax": {}}
UNKNOWN |= {"HardSigmoid": {"alpha": float(np.float32(0.2)), "beta": 0.5}, "Gelu": {"approximate": b"none"}}
OPS: dict[str, Callable[[Call], Any]] = {
    "Add": lambda c: c.x + c.inputs[1],
    "Sub": lambda c: c.x - c.inputs[1],
    "Mul": lambda c: c.x * c.inputs[1],
    "Div": lambda c: c.ar.divide(c.x, c.inputs[1]),
    "Neg": lambda c: -c.x,
    "Reciprocal": lambda c: c.ar.divide(c.ar.array(1), c.x),
    "Sum": lambda c: sum(c.inputs),
    "Mean": lambda c: sum(c.inputs) * c.ar.number(Fraction(1, len(c.inputs))),
    "Sqrt": lambda c: c.ar.root(c.x, c.real[0]),
    "GlobalAveragePool": lambda c: c.mean(c.x, tuple(range(2, c.x.ndim))),
    "Pow": power,
}
OPS |= dict.fromkeys(("ReduceMean", "ReduceL2"), reduction)
OPS |= dict.fromkeys(("MatMul", "Einsum", "Gemm", "Conv", "ConvTranspose"), product)
OPS |= dict.fromkeys((*UNKNOWN, "Swish"), unknown)
NORMS = ("Batch", "Layer", "RMS", "SimplifiedLayer", "Instance", "Group", "MeanVariance")
OPS |= dict.fromkeys((f"{kind}Normalization" for kind in NORMS), norm)


def compute(c: Call, mode: str) -> list[Array]:
    """Compute the outputs of a node. Modes other than numeric allow only the ops of the page."""
    node, ar = c.node, c.ar
    # Other inputs of these ops are integers.
    first_alone = node.op in SAME[:-3] or node.op.startswith("Reduce") or (node.op == "Pow" and c.x.dtype == ar.kind)
    floats = [x.dtype == ar.kind for x in (c.inputs[:1] if first_alone else c.inputs) if x is not None]
    standard = not node.domain or (node.domain, node.op) == ("com.microsoft", "SimplifiedLayerNormalization")
    defined = OPS.get(node.op) if standard and any(floats) and (mode, node.op) != ("numeric", "Pow") else None
    if mode != "numeric":
        allowed = defined or node.op in (*SAME, *SIZES) or (floats and not any(floats))
        require(standard and allowed, "structure", f"{node.op}, which computes {node.outputs[0]}, has no definition")
        if any(floats) and not all(floats) and node.op not in SIZES:
            raise Undefined(f"{node.op} of floats and integers")
    if node.op == "CastLike":
        like = np.dtype(float) if c.inputs[1].dtype == ar.kind else c.inputs[1].dtype
        attributes = {"to": ("int", helper.np_dtype_to_tensor_dtype(like))}
        node = replace(node, op="Cast", inputs=node.inputs[:1], attributes=attributes)
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
    require(not any(node.outputs[len(results) :]), "structure", f"{node.outputs[-1]} is no output of {node.op}")
    if any(floats) and node.op not in SIZES and (ar.prime or defined):
        return [ar.array(r) for r in results]
    results = [literal(np.asarray(r)) for r in results]
    created = node.op not in SIZES and not any(floats) and any(r.dtype == np.float64 for r in results)
    require(mode == "numeric" or not created, "structure", f"{node.op}, which computes floats, has no definition")
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
    sizes: list[dict[str, int]] = dataclasses.field(default_factory=list)
    known: list[dict[str, Any]] = dataclasses.field(default_factory=lambda: [{}, {}])
    field: Arithmetic | None = None

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
        largest = (2, 4, 4, 8, 16, 32, 64)[attempt // 8]

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
        """Compare modulo a prime. A root of a constant may have the wrong sign, so try other primes then."""
        failure: Exception = Undefined("no prime makes the divisors nonzero and the arguments of roots squares")
        for _ in range(64):
            ar = self.field or Arithmetic(self.rng, random_prime(self.rng))
            self.field = None
            try:
                if self.compare_modulo(ar, shapes):
                    self.field = ar
                    return
            except Rejection as error:
                failure = error
                if not ar.irrational:
                    break
        raise failure

    def compare_modulo(self, ar: Arithmetic, shapes: dict[str, list[int]]) -> bool:
        """Draw leaves until each element was compared where it is not NaN. Returns: False if some never are."""
        compared: list[Any] = [0] * len(self.outputs)
        # For each element, both forms at the last two draws at which it was defined
        points: list[Any] = [[math.nan] * 4 for _ in self.outputs]
        for draw in range(200):
            for i, (name, (before, after)) in enumerate(zip(self.outputs, self.run(ar, shapes), strict=True)):
                differences = [np.subtract(before, after, dtype=object)]
                if self.mode == "affine" and after.dtype == object:
                    # Three points on a line b = A·a + B
                    b1, a1, b2, a2 = points[i]
                    differences = [(b1 - before) * (a1 == after)]
                    differences += [(b1 - before) * (a2 - after) - (b2 - before) * (a1 - after)]
                    defined = ((before == before) & (after == after)).astype(bool)
                    latest = zip((before, after, b1, a1), points[i], strict=True)
                    points[i] = [np.where(defined, new, old) for new, old in latest]
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


def same_node(ours: Node, theirs: Node) -> bool:
    """Compare op, domain and attributes, and the meaning of both opsets."""
    breaks = BREAKS.get(ours.op, ()) if not ours.domain else ()
    same_opset = all((ours.opset < b) == (theirs.opset < b) for b in breaks)
    return same_opset and ours.signature == theirs.signature


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
            attributes[item.name] = (kind, helper.get_attribute_value(item))
        else:
            attributes[item.name] = ("other", None)
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    return Node(proto.op_type, domain, opset, list(proto.input), list(proto.output), attributes)


@dataclass
class Scope:
    """One graph or function body of the model. ``names``: constants that nodes can read, and None for other tensors.

    ``place`` is the place of its rewrites, once known.
    """

    nodes: dict[str, Node]
    names: dict[str, Any]
    place: str | None = None

    def stored(self, name: str) -> Array | None:
        value = self.names.get(name)
        return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value

    def origin(self, name: str) -> str:
        """Follow nodes that pass their first input on."""
        node = self.nodes.get(name)
        return self.origin(node.inputs[0]) if node is not None and node.op in PASSING else name


def scopes_of(nodes: Any, opset: int, inputs: Any, tensors: Any = (), outer: Any = None) -> Iterator[Scope]:
    """Yield the scope of these nodes, and those of the bodies inside."""
    own = {p.output[0]: model_node(p, opset) for p in nodes if p.output}
    names: dict[str, Any] = {**(outer or {}), **dict.fromkeys(inputs), **{o: None for p in nodes for o in p.output}}
    for name, node in own.items():
        if node.op == "Constant" and not node.domain:
            kind, value = next(iter(node.attributes.values()), ("", None))
            names[name] = np.asarray(value, np.float32 if kind in ("float", "floats") else None)
    names |= {t.name: t for t in tensors}
    yield Scope(own, names)
    for attribute in (a for p in nodes for a in p.attribute):
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            yield from scopes_of(graph.node, opset, [i.name for i in graph.input], graph.initializer, names)


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
    return list(scopes_of(graph.node, opset_of(model), [i.name for i in graph.input], graph.initializer))


class Checker:
    """Check the claims of one certificate."""

    def __init__(self, raw: Any, model: onnx.ModelProto, source: onnx.ModelProto | None, rng: Any) -> None:
        self.rewrites, self.model, self.rng = raw["rewrites"], model, rng
        self.source_opset = raw["source"]["opset"]
        self.source = graph_scopes(source)[0] if source is not None else None
        self.functions = {(f["domain"], f["name"]): f for f in raw["functions"]}
        self.counts: Counter[str] = Counter()
        self.lines: list[str] = []
        self.arrays: dict[str, Array] = {}
        self.literals: dict[str, Array] = {}
        tensors = {t.name: t for t in model.graph.initializer}
        for key, entry in raw["constants"].items():
            with located(f"constant {key}"):
                self.arrays[key] = read_constant(entry, tensors)
        self.scopes = graph_scopes(model)
        self.scopes[0].place = ""
        self.scopes += [s for f in model.functions for s in scopes_of(f.node, opset_of(f), f.input)]
        self.found: set[tuple[int, str]] = set()
        # By place and tensor: the last rewrite that writes it, and the constants that a rewrite computed
        self.writers: dict[Any, int] = {}
        self.computed: dict[Any, tuple[Array, Array, float]] = {}
        self.seen: set[Any] = set()

    def run(self) -> None:
        with located("functions"):
            self.check_functions()
        for check in (self.check_chain, self.check_final, self.check_values):
            for index, rewrite in enumerate(self.rewrites):
                with located(f"rewrite {index}"):
                    check(index, rewrite)

    def attributes(self, raws: Any, bound: dict[str, Any] | None) -> dict[str, Any]:
        """Read attributes. ``bound``: those of the call, in place of references to them."""
        attributes: dict[str, Any] = {}
        for name, item in raws.items():
            kind, value = item["type"], item["value"]
            self.counts["attributes without a defined form"] += kind == "other"
            if kind == "reference" and bound is not None:
                attributes |= {name: bound[value]} if value in bound else {}
                continue
            if kind in ("float", "floats"):
                value = float(value) if kind == "float" else [float(v) for v in value]
            elif kind in ("string", "strings"):
                value = value.encode() if kind == "string" else [v.encode() for v in value]
            attributes[name] = (kind, self.arrays[value] if kind == "tensor" else None if kind == "other" else value)
        return attributes

    def node(self, raw: Any, bound: dict[str, Any] | None = None) -> Node:
        domain = "" if raw["domain"] == "ai.onnx" else raw["domain"]
        known = not domain or raw["op"] == "SimplifiedLayerNormalization" or (domain, raw["op"]) in self.functions
        require(known, "functions", f"{domain}.{raw['op']} is not in the list of functions")
        attributes = self.attributes(raw["attributes"], bound)
        return Node(raw["op"], domain, raw["opset"], raw["inputs"], raw["outputs"], attributes)

    def expand(self, nodes: list[Node], names: dict[str, str], prefix: str = "") -> list[Node]:
        """Put the body of a function in place of each call. ``names``: tensors that keep or change their name."""
        expanded: list[Node] = []
        for i, node in enumerate(nodes):
            node = renamed(node, prefix, names)
            function = self.functions.get((node.domain, node.op))
            if function is None:
                expanded.append(node)
            else:
                formal = dict.fromkeys(function["inputs"], "")
                formal |= zip(function["inputs"], node.inputs, strict=False)
                formal |= {f: n for f, n in zip(function["outputs"], node.outputs, strict=False) if n}
                bound = self.attributes(function["defaults"], None) | node.attributes
                body = [self.node(raw, bound) for raw in function["nodes"]]
                expanded += self.expand(body, formal, f"{prefix}{i}:")
            if len(expanded) > MAX_NODES:
                raise Refusal(f"there are more than {MAX_NODES} nodes")
        return expanded

    def check_functions(self) -> None:
        """Compare each function that the model has with its body there."""
        theirs = {(f.domain, f.name): f for f in self.model.functions}
        redefined = [name for domain, name in self.functions if domain in ("", "ai.onnx")]
        require(not redefined, "structure", f"the standard ops {redefined} are redefined")
        for (domain, name), ours in self.functions.items():
            present = (domain, name) in theirs
            require(ours["in_file"] == present, "functions", f"`in_file` of {domain}.{name} is not {present}")
            nodes, defaults = [self.node(raw) for raw in ours["nodes"]], self.attributes(ours["defaults"], None)
            if not ours["in_file"]:
                continue
            function = theirs[domain, name]
            others = [model_node(proto, opset_of(function)) for proto in function.node]
            header = model_node(onnx.NodeProto(attribute=function.attribute_proto), 1)
            formal = sorted([*function.attribute, *header.attributes])
            same = (list(function.input), list(function.output)) == (ours["inputs"], ours["outputs"])
            same = same and formal == sorted(ours["attributes"])
            same = same and header.signature == replace(header, attributes=defaults).signature
            same = same and [(n.inputs, n.outputs) for n in nodes] == [(n.inputs, n.outputs) for n in others]
            same = same and all(map(same_node, nodes, others))
            require(same, "functions", f"{domain}.{name} is another function in the model")
            missing = [n.op for n in nodes if (n.domain, n.op) in self.functions and (n.domain, n.op) not in theirs]
            require(not missing, "functions", f"{domain}.{name} calls {missing}, which the model does not have")

    def check_values(self, index: int, rewrite: Any) -> None:
        """Check facts, and the claims shape, equal, stored and epsilon."""
        if rewrite["mode"] == "none":
            return
        self.literals = {}
        mode, place, before, after = (rewrite[key] for key in ("mode", "place", "before", "after"))
        epsilons = {n: Fraction(int(e["numerator"]), int(e["denominator"])) for n, e in rewrite["epsilons"].items()}
        self.check_facts(rewrite)
        for name, entry in before["constants"].items():
            if "rounded" in entry:
                self.check_computed(place, name, entry)
        # The expressions are a part of `after`: each result is the exact value of a constant.
        extra = rewrite.get("expressions", {"nodes": [], "constants": {}, "results": {}})
        constants = {n: e for n, e in after["constants"].items() if "value" in e or mode == "numeric"}
        alone = after["constants"].keys() - constants.keys()
        require(alone == extra["results"].keys(), "structure", "`results` does not define exactly the other constants")
        for name, entry in extra["constants"].items():
            value = self.arrays[before["constants"].get(name, entry)["value"]]
            require(np.array_equal(value, self.arrays[entry["value"]]), "structure", f"constant {name} has two values")
            constants |= {f"expression {name}": entry}
        inner = [renamed(self.node(raw), "expression ") for raw in extra["nodes"]]
        for name, result in extra["results"].items():
            inner.append(Node("Identity", "", 21, [f"expression {result}"], [name], {}))
        nodes = [self.node(raw) for raw in after["nodes"]]
        for node in nodes:
            if node.outputs[0] in epsilons:
                node.attributes["epsilon"] = ("float", epsilons[node.outputs[0]])
        sides = [self.side(rewrite, [self.node(raw) for raw in before["nodes"]], before["constants"])]
        sides.append(self.side(rewrite, inner + nodes, constants))
        comparison = Comparison(mode, rewrite["leaves"], before["outputs"], sides, self.rng)
        comparison.check()
        sizes = " and ".join(str(sizes) if sizes else "fixed" for sizes in comparison.sizes)
        how = "in float64" if mode == "numeric" else "modulo random primes of 62 bits and in float64"
        self.lines.append(f"rewrite {index}: compared {how}, sizes {sizes}")
        values = comparison.known[1]
        names = [f"expression {name}" for name in extra["constants"]] + [n for node in inner for n in node.outputs if n]
        computed = [values[name] for name in names]
        largest = [np.abs(v).max(initial=0) for v in computed if v.dtype == np.float64]
        slack = BOUNDS["expression"] * max(largest, default=0.0)
        for name, entry in after["constants"].items():
            if "rounded" in entry and (mode != "numeric" or "value" in entry):
                rounded, exact = self.arrays[entry["rounded"]], values[name]
                allowed = 0.0 if "value" in entry else slack
                same = exact.shape == rounded.shape and np.abs(literal(rounded) - exact) <= half_ulp(rounded) + allowed
                require(np.all(same), "stored", f"constant {name} is not its exact value rounded once")
                self.computed[place, name] = rounded, exact, allowed
        for name, exact in epsilons.items():
            stored = np.float32(
                next(self.node(n).get("epsilon", EPSILON) for n in after["nodes"] if n["outputs"][0] == name)
            )
            same = abs(Fraction(float(stored)) - exact) <= Fraction(float(half_ulp(np.asarray(stored))))
            require(same, "epsilon", f"the epsilon of {name} is {stored}, not {float(exact)!r} rounded once")

    def side(self, rewrite: Any, nodes: list[Node], entries: Any) -> Side:
        """Read a side, in which each name is defined once, before it is read."""
        leaves = [leaf["name"] for leaf in rewrite["leaves"]]
        names = [*leaves, *entries]
        defined = {*names, ""}
        for node in nodes:
            undefined = {*node.inputs} - defined
            require(not undefined and any(node.outputs), "structure", f"{node.op} reads {sorted(undefined)}")
            names += filter(None, node.outputs)
            defined |= {*node.outputs}
        require({*rewrite["before"]["outputs"]} <= {*names}, "structure", "an output has no definition")
        require(len(names) == len({*names}) and "" not in names, "structure", "a tensor is defined twice")
        self.counts["constants that are computed"] += sum(bool(e.get("computed")) for e in entries.values())
        dependent = set(leaves)
        nodes = self.expand(nodes, {n: n for n in names})
        for node in nodes:
            read = node.inputs[:1] if node.op == "CastLike" else node.inputs
            if node.op not in ("Shape", "Size") and dependent & {*read}:
                dependent |= {*node.outputs} - {""}
        return Side(nodes, {n: self.exact(entry) for n, entry in entries.items()}, dependent)

    def exact(self, entry: Any) -> Array:
        key = entry["value"] if "value" in entry else entry["rounded"]
        return self.literals.setdefault(key, literal(self.arrays[key]))

    def check_claims(self, rewrite: Any) -> None:
        """Compare the list of claims with those that the page requires."""
        mode, after = rewrite["mode"], rewrite["after"]
        required = [{"claim": "shape", "before": [n], "after": [n]} for n in after["outputs"]]
        required += [{"claim": "equal", "before": n, "after": n, "mode": mode} for n in after["outputs"]]
        required += [{"claim": "epsilon", "node": n} for n in rewrite["epsilons"]]
        for name, entry in after["constants"].items():
            if "rounded" in entry and (mode != "numeric" or "value" in entry):
                dtype = self.arrays[entry["rounded"]].dtype.name
                required.append({"claim": "stored", "constant": name, "dtype": dtype})
        others = [claim for claim in rewrite["claims"] if claim["claim"] != "nonfinite"]
        self.counts["claims about NaN and Inf"] += len(rewrite["claims"]) - len(others)
        for claim in [c for c in required if c not in others] + [c for c in others if c not in required]:
            raise Rejection("structure", f"the claim {json.dumps(claim)} is missing, or does not belong to the rewrite")

    def check_leaves(self, rewrite: Any) -> None:
        """Compare leaves with the inputs of the model. The model does not state the shapes of other leaves."""
        inputs = {i.name: i.type.tensor_type for i in self.model.graph.input if rewrite["place"] == ""}
        for leaf in rewrite["leaves"]:
            name, shape, dtype = leaf["name"], leaf["shape"], np.dtype(leaf["dtype"] or "float32")
            fixed = shape is not None and any(isinstance(size, int) for size in shape)
            if name not in inputs:
                self.counts["leaves with sizes that the model does not state"] += fixed
                continue
            actual = helper.tensor_dtype_to_np_dtype(inputs[name].elem_type)
            same = actual == dtype or not leaf["dtype"]
            require(same, "structure", f"leaf {name} has the type {dtype}, not {actual}")
            if inputs[name].HasField("shape") and shape is not None:
                dims = [d.dim_value if d.HasField("dim_value") else None for d in inputs[name].shape.dim]
                same = [d if isinstance(size, int) else size for size, d in zip(shape, dims, strict=False)] == shape
                same = same and len(dims) == len(shape)
                require(same, "structure", f"leaf {name} has the shape {shape}, but the model's input has {dims}")

    def check_chain(self, index: int, rewrite: Any) -> None:
        """Check that the nodes of `before` are in the graph that the earlier rewrites left."""
        mode, place = rewrite["mode"], rewrite["place"]
        writes = dict.fromkeys([(place, name) for name in rewrite.get("writes", [])], index)
        require(rewrite["index"] == index, "structure", f"the index is {rewrite['index']}")
        self.counts[mode] += 1
        if mode == "none":
            self.writers |= writes
            return
        before, after = rewrite["before"], rewrite["after"]
        require(mode in (*FIELD_MODES, "numeric"), "structure", f"the mode is {mode}")
        require((mode == "expressions") == ("expressions" in rewrite), "structure", "`expressions` is for another mode")
        same = before["outputs"] and before["outputs"] == after["outputs"]
        require(same, "structure", "the sides have different outputs")
        self.check_claims(rewrite)
        self.check_leaves(rewrite)
        for raw in before["nodes"]:
            origin, node = raw["from"], self.node(raw)
            last = {self.writers.get((place, name)) for name in node.outputs if name}
            require(last == {origin}, "chain", f"`from` of {node.outputs} is {origin}, the last writers are {last}")
            if origin is None:
                same = same_node(node, replace(node, opset=self.source_opset))
                require(same, "chain", f"opset {node.opset} of {node.op} is not {self.source_opset} of the source")
                self.count_source(node)
            elif self.rewrites[origin]["mode"] == "none":
                self.counts["nodes that a rewrite of mode none wrote"] += 1
            else:
                self.check_origin(node, before["constants"], self.rewrites[origin]["after"])
        for name, entry in before["constants"].items():
            require("value" in entry, "structure", f"constant {name} has no value")
            if (place, name) in self.writers:
                self.counts["constants of unknown origin"] += 1
                allowed = entry.get("computed") or name in self.rewrites[self.writers[place, name]].get("writes", [])
                require(allowed, "chain", f"an earlier rewrite computes the constant {name}")
        written = {n for raw in after["nodes"] for n in raw["outputs"]} - {""}
        held = {n for raw in before["nodes"] for n in raw["outputs"]} | {leaf["name"] for leaf in rewrite["leaves"]}
        replaced = {n for raw in before["nodes"] for n in raw["outputs"]} | {*after["outputs"]}
        for name in written - replaced:
            old = (place, name) in self.seen or (place, name) in self.writers or name in held
            require(not old, "chain", f"the new tensor {name} has the name of an older one")
        self.seen |= {(place, name) for name in held}
        self.writers |= dict.fromkeys([(place, name) for name in written], index) | writes

    def check_computed(self, place: str, name: str, entry: Any) -> None:
        """Compare a constant of `before` with the one that an earlier rewrite computed."""
        require((place, name) in self.computed, "chain", f"no earlier rewrite computed the constant {name}")
        rounded, exact, slack = self.computed[place, name]
        value = self.arrays[entry["value"]]
        bound = half_ulp(value) + slack if slack else 0.0
        same = rounded.tobytes() == self.arrays[entry["rounded"]].tobytes() and value.shape == exact.shape
        same = same and bool(np.all(np.abs(value - exact) <= bound))
        require(same, "chain", f"an earlier rewrite computed another constant {name}")

    def check_origin(self, node: Node, constants: Any, earlier: Any) -> None:
        """Compare a node of `before` with the node of the earlier rewrite that wrote it, and their constants."""
        twins = [self.node(raw) for raw in earlier["nodes"] if raw["outputs"] == node.outputs]
        same = twins and twins[0].signature == node.signature and twins[0].inputs == node.inputs
        require(same, "chain", f"the earlier rewrite has no such node {node.op} with the outputs {node.outputs}")
        for name in constants.keys() & {*node.inputs}:
            old = earlier["constants"].get(name)
            self.counts["inputs that became constants"] += old is None
            same = old is None or "value" not in old or np.array_equal(self.exact(old), self.exact(constants[name]))
            require(same, "chain", f"constant {name} is another one in the earlier rewrite")

    def count_source(self, node: Node) -> None:
        if self.source is not None:
            theirs = self.source.nodes.get(node.outputs[0])
            same = theirs is not None and same_node(node, theirs) and node.inputs == theirs.inputs
            self.counts["nodes that are not in the source file"] += not same

    def check_final(self, index: int, rewrite: Any) -> None:
        """Look up the nodes of `after` in the model, or in a later rewrite."""
        for raw in rewrite["after"]["nodes"] if rewrite["mode"] != "none" else []:
            final, node = raw["final"], self.node(raw)
            if rewrite["converted"] or final["where"] == "cleanup":
                self.counts["nodes of converted rewrites" if rewrite["converted"] else "nodes left to the cleanup"] += 1
            elif final["where"] == "rewrite":
                later = self.rewrites[final["index"]]
                same = any(n["outputs"] == node.outputs and n["from"] == index for n in later["before"]["nodes"])
                same = same and final["index"] > index
                require(same, "final", f"rewrite {final['index']} does not replace {node.outputs}")
            else:
                self.find_in_model(rewrite, node, final)

    def find_in_model(self, rewrite: Any, node: Node, final: Any) -> None:
        # Each scope belongs to one place, so a made-up place can't hide earlier rewrites from the chain.
        scopes = [s for s in self.scopes if s.place in (None if rewrite["place"] else "", rewrite["place"])]
        reasons = {self.difference(scope, rewrite, node, final): scope for scope in reversed(scopes)}
        require("" in reasons, "final", f"{node.op}, which computes {node.outputs[0]}: {', '.join(reasons)}")
        reasons[""].place = rewrite["place"]
        self.found.add((id(reasons[""]), final["output"]))
        self.counts["outputs that the cleanup renamed"] += final["output"] != node.outputs[0]

    def difference(self, scope: Scope, rewrite: Any, node: Node, final: Any) -> str:
        """Compare a node of `after` with the node of the model. Returns: the difference, or an empty text."""
        theirs, constants = scope.nodes.get(final["output"]), rewrite["after"]["constants"]
        if theirs is None:
            return f"the model has no node with the output {final['output']}"
        if not same_node(node, theirs) or final["inputs"] != theirs.inputs or len(node.inputs) != len(theirs.inputs):
            return f"the model has {theirs.op} with other attributes or inputs"
        if (node.domain, node.op) in self.functions and not self.functions[node.domain, node.op]["in_file"]:
            return "the model does not have its function"
        writers = {n: (raw["final"], i) for raw in rewrite["after"]["nodes"] for i, n in enumerate(raw["outputs"])}
        for ours, name in zip(node.inputs, theirs.inputs, strict=True):
            writer, position = writers.get(ours, ({}, 0))
            if ours in constants:
                wanted = self.arrays[constants[ours].get("rounded", constants[ours].get("value"))]
                stored = scope.stored(name)
                if stored is None or identity(stored) != identity(wanted):
                    return f"{name} of the model is not the constant {ours}"
            elif "output" in writer:
                source = scope.nodes.get(writer["output"])
                if source is None or source.outputs[position : position + 1] != [name]:
                    return f"{name} of the model is not the output of the node that computes {ours}"
            elif ours != name:
                self.counts["inputs that the cleanup replaced"] += 1
                if "" in (ours, name) or (ours in scope.names and scope.origin(ours) != scope.origin(name)):
                    return f"the model reads {name} in place of {ours}"
        return ""

    def check_facts(self, rewrite: Any) -> None:
        """Check the facts. Those on constants under roots and in divisors must be among them."""
        for fact in rewrite["facts"]:
            values = self.exact(rewrite[fact["side"]]["constants"][fact["constant"]]) + float(fact.get("plus", 0))
            holds = values > 0 if fact["fact"] == "positive" else (values != 0) & (values == values)
            require(np.all(holds), "facts", f"an element of {fact['constant']} is not {fact['fact']}")
        facts = {"Div": (1, "nonzero"), "Reciprocal": (0, "nonzero"), "Sqrt": (0, "positive")}
        facts |= {"BatchNormalization": (4, "positive")}
        for side in ("before", "after") if rewrite["mode"] in FIELD_MODES else ():
            for node in map(self.node, rewrite[side]["nodes"]):
                place, kind = facts.get(node.op, (99, ""))
                name = "".join(node.inputs[place : place + 1])
                entry = rewrite[side]["constants"].get(name)
                if entry is not None and not node.domain and self.exact(entry).dtype == np.float64:
                    fact = {"fact": kind, "side": side, "constant": name}
                    fact |= {"plus": node.get("epsilon", EPSILON)} if place == 4 else {}
                    require(fact in rewrite["facts"], "facts", f"the fact {json.dumps(fact)} is missing")

    def summary(self) -> str:
        """Describe the checks and their limits."""
        counts = self.counts
        nodes = sum(len(scope.nodes) for scope in self.scopes if scope.place is not None)
        counts["nodes of the model outside of every rewrite"] = nodes - len(self.found)
        proved = [f"{counts.pop(mode, 0)} {mode}" for mode in FIELD_MODES]
        total = len(self.lines) - counts["numeric"]
        tested = counts.pop("numeric", 0)
        lines = [f"accepted: {total} rewrites proved ({', '.join(proved)}), {tested} tested (numeric)"]
        lines.append(f"rewrites not covered: {counts.pop('none', 0)} none")
        others = "; ".join(f"{count} {kind}" for kind, count in sorted(counts.items()) if count)
        lines.append(f"nodes covered: {len(self.found)}; not covered: {others or 'none'}")
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
        for bound, largest in BOUNDS.items():
            require(raw["bounds"][bound] <= largest, "structure", f"the bound {bound} is above {largest}")
        checker = Checker(raw, model, source, rng)
        require(len(checker.functions) == len(raw["functions"]), "structure", "a function is defined twice")
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
    signal.setitimer(signal.ITIMER_REAL, options.seconds, 10)
    seed = secrets.randbits(256) if options.seed is None else options.seed
    code = 2
    try:
        try:
            with np.errstate(all="ignore"):
                text = check_files(options.files, np.random.default_rng(seed))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        code = 0
    except Rejection as error:
        text, code = f"rejected: {error}", 1
    except (Refusal, OSError) as error:
        text = f"refused: {error}"
    except MemoryError:
        text = "refused: the memory limit is reached; raise it with --gigabytes"
    except RecursionError:
        text = "refused: the files are nested too deeply"
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


if __name__ == "__main__":
    sys.exit(main())
