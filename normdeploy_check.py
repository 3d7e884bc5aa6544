"""Check a normdeploy certificate against its model, from the specification of the file format alone.

Usage: ``python -m normdeploy_check c.json model.onnx [source.onnx]``. Exit code 0: accepted, 1: a claim fails, 2: a
file can't be read. Both sides of each rewrite are evaluated anew: in float64, and modulo random 30-bit primes. Elements
of the field are uint64 arrays, real numbers float64 arrays, integers int64 arrays, and booleans bool arrays.
docs/reference/certificate-format.md is the specification. This file imports nothing of normdeploy.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import math
import resource
import secrets
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx
from onnx import TensorProto, external_data_helper, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

Array = np.ndarray
Json = dict[str, Any]

SCHEMA = "normdeploy/rewrites/1"
BOUNDS = {"affine": 2.0**-30, "expression": 2.0**-40, "numeric": 2.0**-16}
EXACT_TOLERANCE = 2.0**-20
EPSILON = float(np.float32(1e-5))
FIELD_MODES = ("exact", "affine", "expressions")
MAX_FILE_BYTES = 4 << 30
MAX_ELEMENTS = 1 << 26
MAX_NODES = 20_000
MAX_CONSTANT_PRIMES = 256
NOT_REAL = (TensorProto.UNDEFINED, TensorProto.STRING, TensorProto.COMPLEX64, TensorProto.COMPLEX128)
CODES = {t: helper.tensor_dtype_to_np_dtype(t) for t in TensorProto.DataType.values() if t not in NOT_REAL}
DTYPES = {t.name: t for t in CODES.values()}
FLOAT_NAMES = {n for n in DTYPES if "float" in n}
FLOAT_CODES = {code for code, t in CODES.items() if t.name in FLOAT_NAMES}
# Precision in bits, and exponent of the smallest subnormal number.
PRECISION = {"float64": (53, -1074), "float32": (24, -149), "float16": (11, -24), "bfloat16": (8, -133)}
# Opsets that changed the meaning or the form of an op. A model's opset and a node's opset must lie on the same side.
BREAKS = {"GroupNormalization": (21,), "Softmax": (13,), "Squeeze": (13,), "Unsqueeze": (13,), "Split": (13, 18)}
BREAKS |= {"Slice": (10,), "ReduceSum": (13,), "Dropout": (12,), "BatchNormalization": (14,), "Reshape": (5,)}
BREAKS |= dict.fromkeys(("ReduceMean", "ReduceSumSquare", "ReduceL2", "ReduceProd", "ReduceMax", "ReduceMin"), (18,))


# Nodes that the cleanup bypasses or merges: their output has the elements of their first input.
PASSING = ("Identity", "Cast", "Dropout", "Reshape", "Flatten", "Squeeze", "Unsqueeze")


class Refusal(Exception):
    """Report a file that can't be read or is over a limit (exit code 2)."""


class Undefined(Exception):
    """Report that a side is undefined at the chosen sizes."""


class NewPrime(Exception):
    """Report that a divisor is 0 in the field, or that roots do not exist for this prime."""


class Rejection(Exception):
    """Report a claim that fails (exit code 1)."""


@dataclass(frozen=True)
class NotSquare(Exception):
    """Report leaf elements under a root that is no square. ``elements``: mask over all leaf elements."""

    elements: Array
    root: int
    everywhere: bool


def reject(claim: str, where: str, detail: str) -> NoReturn:
    raise Rejection(f"claim {claim} fails, {where}: {detail}")


# --- Reading ---------------------------------------------------------------------------------------------------------


def number(value: Any) -> bool:
    """Tell whether ``value`` is a float of the file: a JSON number, or the name of a float that is not finite."""
    return type(value) in (int, float) or value in ("inf", "-inf", "nan")


def natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


ATTRIBUTE_VALUES = {"float": number, "int": int, "string": str, "floats": [number], "ints": [int], "strings": [str]}
ATTRIBUTE_VALUES |= {"tensor": str, "reference": str, "other": str}


def attribute(value: Any) -> bool:
    kind = value.get("type") if type(value) is dict else None
    spec = ATTRIBUTE_VALUES.get(kind) if isinstance(kind, str) else None
    return spec is not None and "value" in value and conforms(value["value"], spec)


def decimal(value: Any) -> bool:
    return type(value) is str and 0 < len(value) <= 4000 and value.lstrip("-").isascii() and value.lstrip("-").isdigit()


def positive_decimal(value: Any) -> bool:
    return decimal(value) and int(value) > 0


def term(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and type(value[0]) is int and conforms(value[1], [str])


NODE = {"op": str, "domain": str, "opset": natural, "inputs": [str], "outputs": [str], "attributes": {"*": attribute}}
ENTRY = {"value?": str, "rounded?": str, "computed?": bool}
FINAL = (
    {"where": "file", "output": str, "inputs": [str]},
    {"where": "rewrite", "index": natural},
    {"where": "cleanup"},
)
NODES = [NODE | {"from?": (natural, None), "final?": FINAL}]
SIDE = {"nodes": NODES, "constants": {"*": ENTRY}, "outputs": [str]}
SIZE = (natural, str, None, {"sum": [term]})
LEAF = {"name": str, "dtype": str, "shape": ([SIZE], None), "only_shape": bool}
FACT = {"fact": ("nonzero", "positive"), "side": ("before", "after"), "constant": str, "plus?": number}
MODE = (*FIELD_MODES, "numeric")
CLAIM = (
    {"claim": "shape", "before": [str], "after": [str]},
    {"claim": "equal", "before": str, "after": str, "mode": MODE},
    {"claim": "stored", "constant": str, "dtype": str},
    {"claim": "epsilon", "node": str},
    {"claim": "nonfinite", "gains": bool},
)
HEAD = {
    "index": natural,
    "place": str,
    "stage": str,
    "kind": str,
    "tensor": str,
    "became": str,
    "converted": bool,
    "writes?": [str],
}
EXPRESSIONS = {"nodes": NODES, "constants": {"*": {"value": str}}, "results": {"*": str}}
REWRITE = HEAD | {"mode": MODE, "reason": str, "proof": (dict, None), "leaves": [LEAF], "before": SIDE, "after": SIDE}
REWRITE |= {
    "epsilons": {"*": {"numerator": decimal, "denominator": positive_decimal}},
    "facts": [FACT],
    "claims": [CLAIM],
}
REWRITE |= {"expressions?": EXPRESSIONS}
UNCOVERED = HEAD | {"mode": "none", "reason": str, "proof": (dict, None), "claims": []}
FUNCTION = {"name": str, "domain": str, "inputs": [str], "outputs": [str], "attributes": [str], "in_file": bool}
FUNCTION |= {"defaults": {"*": attribute}, "nodes": [NODE]}
CONSTANT = {"dtype": str, "shape": [natural], "sha256": str, "data?": str, "initializer?": str}
MODEL = {"sha256": str, "data": {"*": str}}
FILE = {"schema": SCHEMA, "normdeploy": str, "model": MODEL, "source": {"sha256": (str, None), "opset": natural}}
FILE |= {"bounds": dict.fromkeys(BOUNDS, number), "constants": {"*": CONSTANT}, "functions": [FUNCTION]}
FILE |= {"rewrites": [(REWRITE, UNCOVERED)], "findings": list}


def mismatch(value: Any, spec: Any, path: str) -> str:
    """Return the path of the first field that does not have the type of ``spec``, or an empty text."""
    if type(spec) is tuple:
        found = [mismatch(value, option, path) for option in spec]
        return "" if "" in found else max(found, key=len)
    if type(spec) is list:
        if type(value) is not list or (not spec and value):
            return path
        return next(filter(None, (mismatch(v, spec[0], f"{path}[{i}]") for i, v in enumerate(value))), "")
    if type(spec) is dict:
        if type(value) is not dict:
            return path
        if "*" in spec:
            return next(filter(None, (mismatch(v, spec["*"], f"{path}.{k}") for k, v in value.items())), "")
        required = [k for k in spec if not k.endswith("?") and k not in value]
        if required:
            return f"{path}.{required[0]}"
        present = ((k.rstrip("?"), s) for k, s in spec.items())
        return next(filter(None, (mismatch(value[k], s, f"{path}.{k}") for k, s in present if k in value)), "")
    if isinstance(spec, type):
        return "" if type(value) is spec else path
    if callable(spec):
        return "" if spec(value) else path
    return "" if type(value) is type(spec) and value == spec else path


def conforms(value: Any, spec: Any) -> bool:
    return not mismatch(value, spec, "")


def unique_keys(pairs: list[tuple[str, Any]]) -> Json:
    if len(dict(pairs)) != len(pairs):
        raise Refusal("the certificate has an object with the same key twice")
    return dict(pairs)


def no_constant(text: str) -> NoReturn:
    raise Refusal(f"the certificate has {text}, which is not JSON")


def read_bytes(path: Path) -> bytes:
    if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
        raise Refusal(f"{path} is not a file of at most {MAX_FILE_BYTES >> 30} GiB")
    return path.read_bytes()


def parse_model(data: bytes, path: Path) -> onnx.ModelProto:
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Refusal:
        raise
    except Exception as error:
        raise Refusal(f"{path} is not an ONNX model: {error}") from None
    return model


def to_array(tensor: TensorProto) -> Array:
    """Return the elements of a tensor of the model."""
    try:
        small(tensor.dims)
        return numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Refusal(f"the model has an unreadable tensor {tensor.name}: {error}") from None


@dataclass(frozen=True)
class Scope:
    """Hold the names of one graph or function body of the model."""

    parent: Scope | None
    opsets: dict[str, int]
    function: bool = False
    nodes: dict[str, onnx.NodeProto] = field(default_factory=dict)
    tensors: dict[str, TensorProto] = field(default_factory=dict)
    constants: dict[str, onnx.NodeProto] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)

    def stored(self, name: str) -> Array | None:
        """Return the tensor that ``name`` denotes in this scope, or None if it is not constant."""
        if name in self.tensors:
            return to_array(self.tensors[name])
        if name in self.constants:
            return constant_value(model_attributes(self.constants[name]))
        return None if name in self.written or self.parent is None else self.parent.stored(name)

    def has(self, name: str) -> bool:
        return name in self.written or (self.parent is not None and self.parent.has(name))

    def passes(self, name: str, origin: str) -> bool:
        """Tell whether nodes that pass on their first input lead from ``origin`` to ``name``."""
        seen: set[str] = set()
        while name not in seen and name in self.nodes and self.nodes[name].op_type in PASSING:
            seen.add(name)
            name = self.nodes[name].input[0]
        return name == origin


def walk(nodes: Any, scope: Scope) -> Iterator[Scope]:
    """Yield the scope of ``nodes``, filled, and those of the bodies inside."""
    for node in nodes:
        scope.written.update(node.output)
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx") and node.output:
            scope.constants[node.output[0]] = node
        first = node.output[0] if node.output else ""
        scope.nodes[first] = node
    yield scope
    for node in nodes:
        for item in node.attribute:
            for graph in ([item.g] if item.HasField("g") else []) + list(item.graphs):
                yield from walk_graph(graph, scope, scope.opsets)


def walk_graph(graph: onnx.GraphProto, parent: Scope | None, opsets: dict[str, int]) -> Iterator[Scope]:
    scope = Scope(parent, opsets)
    scope.tensors.update({t.name: t for t in graph.initializer})
    scope.written.update(i.name for i in graph.input)
    yield from walk(graph.node, scope)


def opset_versions(imports: Any) -> dict[str, int]:
    return {"" if o.domain == "ai.onnx" else o.domain: o.version for o in imports}


def model_attributes(node: onnx.NodeProto) -> Json:
    """Return the attributes of a model's node, with numpy arrays for tensors and None for what has no such form."""
    simple = {1, 2, 3, 6, 7, 8}
    values: Json = {}
    for item in node.attribute:
        if item.ref_attr_name:
            values[item.name] = ("reference", item.ref_attr_name)
        elif item.type in simple:
            plain = helper.get_attribute_value(item)
            kind = onnx.AttributeProto.AttributeType.Name(item.type).lower()
            values[item.name] = (kind, tuple(plain) if kind.endswith("s") else plain)
        elif item.type == onnx.AttributeProto.TENSOR:
            values[item.name] = ("tensor", to_array(item.t))
        else:
            values[item.name] = ("other", None)
    return values


def same_attributes(ours: Json, theirs: Json) -> bool:
    """Compare two maps of attributes: name → (type, value). An unknown attribute equals only an unknown attribute."""

    def key(pair: Any) -> Any:
        if isinstance(pair[1], np.ndarray):
            return pair[0], pair[1].dtype.name, pair[1].shape, pair[1].tobytes()
        return repr(pair)

    return {n: key(v) for n, v in ours.items()} == {n: key(v) for n, v in theirs.items()}


def constant_value(attributes: Json) -> Array:
    for name, (_, value) in attributes.items():
        if name in ("value_float", "value_floats"):
            return np.array(value, dtype=np.float32)
        if name in ("value", "value_int", "value_ints"):
            return np.asarray(value)
    raise Undefined("a Constant without a numeric value")


# --- Arithmetics -----------------------------------------------------------------------------------------------------


class Floats:
    """Compute with float64 arrays. ``root_inputs`` records each argument of a root, in order."""

    kind = np.dtype(np.float64)

    def __init__(self) -> None:
        self.root_inputs: list[Array] = []

    def element(self, values: Array) -> Array:
        return np.asarray(values, dtype=np.float64)

    stored = element

    def fraction(self, value: Fraction) -> Array:
        return np.asarray(float(value))

    add, subtract, multiply, divide = np.add, np.subtract, np.multiply, np.divide
    matmul = np.matmul

    def total(self, x: Array, axes: tuple[int, ...], *, keep: bool) -> Array:
        return np.sum(x, axis=axes, keepdims=keep)

    def root(self, x: Array) -> Array:
        self.root_inputs.append(x)
        return np.sqrt(x)

    def opaque(self, name: str, values: Json, x: Array) -> Array:
        erf = np.vectorize(math.erf, otypes=[np.float64])
        if name == "Sigmoid":
            return 1 / (1 + np.exp(-x))
        if name == "HardSigmoid":
            return np.clip(values["alpha"] * x + values["beta"], 0, 1)
        if name == "Gelu" and values["approximate"] == "tanh":
            return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        if name == "Gelu":
            return x / 2 * (1 + erf(x / math.sqrt(2)))
        if name == "Softplus":
            return np.logaddexp(x, 0)
        return np.tanh(x) if name == "Tanh" else erf(x)

    def softmax(self, x: Array, axes: tuple[int, ...]) -> Array:
        powers = np.exp(x - np.max(x, axis=axes, keepdims=True))
        return powers / np.sum(powers, axis=axes, keepdims=True)


class Dependence:
    """Compute which leaf elements each element depends on. An element is a leaf index, or ``NONE`` for constants.

    Indices that occur together are joined by edges, so the connected component is a superset of the dependence.
    """

    kind = np.dtype(np.uint64)
    NONE = np.uint64(2**63)

    def __init__(self, count: int) -> None:
        self.parent = np.arange(count)
        self.edges: list[Array] = []
        self.roots: list[Array | None] = []
        self.groups: list[Array] = []

    def element(self, values: Array) -> Array:
        return np.broadcast_to(self.NONE, np.shape(values))

    stored = element

    def fraction(self, value: Fraction) -> Array:
        return np.broadcast_to(self.NONE, ())

    def add(self, a: Array, b: Array) -> Array:
        shape = np.broadcast_shapes(a.shape, b.shape)
        for constant, other in ((a, b), (b, a)):
            if not any(constant.strides) and constant.size and constant.flat[0] == self.NONE:
                return np.broadcast_to(other, shape)
        low = np.minimum(a, b)
        for side in (a, b):
            self._join(low, np.broadcast_to(side, shape))
        return low

    subtract = multiply = divide = add

    def _join(self, low: Array, high: Array) -> None:
        distinct = (low != high) & (high != self.NONE)
        if distinct.any():
            pairs = np.stack([low[distinct], high[distinct]]).astype(np.int64)
            self.edges.append(np.unique(pairs, axis=1))

    def total(self, x: Array, axes: tuple[int, ...], *, keep: bool) -> Array:
        low = np.min(x, axis=axes, keepdims=True)
        self._join(np.broadcast_to(low, x.shape), x)
        return low if keep else np.squeeze(low, axis=axes)

    def matmul(self, a: Array, b: Array) -> Array:
        if a.shape[-1] != b.shape[-2]:
            raise ValueError(f"a product of shapes {a.shape} and {b.shape}")
        return self.add(self.total(a, (-1,), keep=True), self.total(b, (-2,), keep=True))

    def root(self, x: Array) -> Array:
        self.components()
        self.groups.append(self.parent)
        self.roots.append(x)
        return x

    def components(self) -> Array:
        """Join the collected edges. Returns: the smallest index of the component of each leaf element."""
        if self.edges:
            low, high = np.concatenate(self.edges, axis=1)
            parent = self.parent.copy()
            while True:
                a, b = parent[low], parent[high]
                if (a == b).all():
                    break
                np.minimum.at(parent, np.maximum(a, b), np.minimum(a, b))
                while (parent != parent[parent]).any():
                    parent = parent[parent]
            self.parent = parent
            self.edges = []
        return self.parent

    def opaque(self, name: str, values: Json, x: Array) -> Array:
        return x

    def softmax(self, x: Array, axes: tuple[int, ...]) -> Array:
        return self.add(x, self.total(x, axes, keep=True))


class Field:
    """Compute modulo a prime p < 2³⁰ with p mod 4 = 3.

    ``companions``: float64 argument of each root, which shows whether a constant is the square of a rational number.
    ``dependence``: gives the leaf elements of each root, or None if all roots are roots of constants.
    ``irrational`` is set if a constant has no rational root, so that its sign may be wrong for this prime.
    """

    kind = np.dtype(np.uint64)

    def __init__(self, prime: int, key: bytes, companions: list[Array], dependence: Dependence | None) -> None:
        self.prime = prime
        self.p = np.uint64(prime)
        self.key = key
        self.companions = companions
        self.dependence = dependence
        self.irrational = False
        self.position = 0
        self.seen: list[list[Array]] = []
        self.cache: dict[int, Array] = {}
        # Tables over sign and exponent. The exponent of a subnormal number is that of the smallest normal number.
        powers = [pow(2, max(e, 1) - 1075, prime) for e in range(2048)]
        self.powers = np.array(powers + [(prime - x) % prime for x in powers], dtype=np.uint64)
        self.leading = np.array(([0] + [2**52] * 2047) * 2, dtype=np.uint64)

    def stored(self, constant: Array) -> Array:
        """Return the elements of a constant that outlives this field."""
        if id(constant) not in self.cache:
            self.cache[id(constant)] = self.element(constant)
        return self.cache[id(constant)]

    def element(self, values: Array) -> Array:
        """Return m·2ᵉ mod p for each float m·2ᵉ, in blocks that fit in the cache."""
        floats = np.array(values, dtype=np.float64)
        bits = floats.view(np.uint64).reshape(-1)
        for start in range(0, bits.size, 1 << 14):
            block = bits[start : start + (1 << 14)]
            exponents = (block >> np.uint64(52)).view(np.int64)
            if (exponents & 2047 == 2047).any():
                reject("equal", "field", "a constant is not finite, so the mode is not checkable")
            mantissas = (block & np.uint64(2**52 - 1)) + self.leading[exponents]
            block[:] = self.reduced(self.reduced(mantissas) * self.powers[exponents])
        return floats.view(np.uint64)

    def reduced(self, x: Array) -> Array:
        """Return x mod p. Numpy's floor division is much faster than its remainder."""
        return x - x // self.p * self.p

    def fraction(self, value: Fraction) -> Array:
        return np.asarray(value.numerator * pow(value.denominator, -1, self.prime) % self.prime, dtype=np.uint64)

    def add(self, a: Array, b: Array) -> Array:
        return self.reduced(a + b)

    def subtract(self, a: Array, b: Array) -> Array:
        return self.reduced(a + (self.p - b))

    def multiply(self, a: Array, b: Array) -> Array:
        return self.reduced(a * b)

    def divide(self, a: Array, b: Array) -> Array:
        if (np.asarray(b) == 0).any():
            raise NewPrime
        return self.multiply(a, self.power(b, self.prime - 2))

    def power(self, base: Array, exponent: int) -> Array:
        result = np.ones_like(base)
        while exponent:
            if exponent & 1:
                result = self.reduced(result * base)
            base = self.reduced(base * base)
            exponent >>= 1
        return result

    def total(self, x: Array, axes: tuple[int, ...], *, keep: bool) -> Array:
        return np.asarray(np.sum(x, axis=axes, keepdims=keep, dtype=np.uint64) % self.p)

    def matmul(self, a: Array, b: Array) -> Array:
        """Multiply in halves of 15 bits: sums of up to 2²² products of halves are exact in float64."""
        if a.shape[-1] != b.shape[-2]:
            raise ValueError(f"a product of shapes {a.shape} and {b.shape}")
        columns = b.shape[-1] * (1 << 18) // max(1, b.size)
        if b.ndim > 2 and 64 <= columns < b.shape[-1]:
            parts = range(0, b.shape[-1], columns)
            return np.concatenate([self.matmul(a, b[..., k : k + columns]) for k in parts], axis=-1)
        step = a.shape[-1] if b.ndim > 2 else max(64, (1 << 18) // max(1, b.shape[-1]))
        step = min(step, 1 << 21)
        blocks = range(step, a.shape[-1], step)
        result = self._block(a[..., :step], b[..., :step, :])
        for k in blocks:
            result = self.add(result, self._block(a[..., k : k + step], b[..., k : k + step, :]))
        return result

    def _block(self, a: Array, b: Array) -> Array:
        shift, low = np.uint64(15), np.uint64(2**15 - 1)
        a1, a0, b1, b0 = (x.astype(np.float64) for x in (a >> shift, a & low, b >> shift, b & low))
        high = self.reduced(np.matmul(a1, b1).astype(np.uint64))
        middle = (np.matmul(a1, b0) + np.matmul(a0, b1)).astype(np.uint64)
        high = self.reduced((high << shift) + middle)
        return self.reduced((high << shift) + np.matmul(a0, b0).astype(np.uint64))

    def root(self, x: Array) -> Array:
        """Return principal roots; rational roots of constants; keyed random elements for constants without a root.

        A random element in place of a root is sound: an identity that holds for it needs no property of the root.
        """
        x = np.asarray(x)
        index = self.position
        self.position += 1
        roots = np.array(self.power(x, (self.prime + 1) // 4))
        square = roots * roots % self.p == x
        constant: Array = np.ones(x.shape, dtype=bool)
        if self.dependence is not None:
            labels = self.dependence.roots[index]
            assert labels is not None
            constant = np.asarray(labels == Dependence.NONE)
            wrong = ~constant & (~square | (x == 0))
            if wrong.any():
                groups = self.dependence.groups[index]
                elements = np.isin(groups, groups[labels[wrong].astype(np.int64)])
                raise NotSquare(elements, index, bool((wrong | constant).all()))
            self.seen.append([labels, x])
        if constant.any():
            companion = np.broadcast_to(self.companions[index], x.shape)[constant]
            roots[constant] = self._constant_roots(x[constant], companion, roots[constant])
        return roots

    def _constant_roots(self, x: Array, companion: Array, roots: Array) -> Array:
        rational = self.element(np.sqrt(np.where(companion > 0, companion, 0)))
        matches = rational * rational % self.p == x
        if np.count_nonzero(~matches) <= 4096:
            for i in np.flatnonzero(~matches):
                guess = self.fraction(Fraction(math.sqrt(max(companion[i], 0.0))).limit_denominator(1 << 20))
                if guess * guess % self.p == x[i]:
                    rational[i] = guess
                    matches[i] = True
        self.irrational |= not matches.all()
        roots = np.where(roots * roots % self.p == x, roots, self.opaque("root of a constant", {}, x))
        return np.where(matches, rational, roots)

    def opaque(self, name: str, values: Json, x: Array) -> Array:
        """Return a keyed hash of each element (splitmix64)."""
        digest = hashlib.blake2b(f"{name} {sorted(values.items())}".encode(), key=self.key, digest_size=16).digest()
        salts = np.frombuffer(digest, dtype=np.uint64)
        z = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + salts[0]
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9) ^ salts[1]
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))) % self.p

    def softmax(self, x: Array, axes: tuple[int, ...]) -> Array:
        row = self.total(self.opaque("softmax member", {}, x), axes, keep=True)
        return self.opaque("softmax", {}, self.add(self.multiply(row, self.opaque("softmax factor", {}, row)), x))


Arithmetic = Floats | Dependence | Field


# --- Ops -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node after function calls are replaced by their bodies. ``attributes``: name → value."""

    op: str
    domain: str
    opset: int
    inputs: list[str]
    outputs: list[str]
    attributes: Json


@dataclass(frozen=True, kw_only=True)
class Call:
    """A node with its arrays. ``exponent``: float64 value of the second input, if that is constant."""

    node: Node
    inputs: list[Any]
    ar: Arithmetic
    exponent: Array | None

    @property
    def x(self) -> Array:
        return self.inputs[0]

    def input(self, index: int) -> Any:
        return self.inputs[index] if index < len(self.inputs) else None

    def get(self, name: str, default: Any = None) -> Any:
        return self.node.attributes.get(name, default)

    def integers(self, index: int, name: str) -> Any:
        """Return a list of integers from an input, or from an attribute."""
        values = self.input(index)
        if values is not None and values.dtype != np.int64:
            raise TypeError(f"input {index} is not a list of integers")
        return self.get(name) if values is None else [int(v) for v in np.ravel(values)]

    def real(self, name: str, default: float) -> Array:
        return self.ar.fraction(Fraction(self.get(name, default)))


def axes_of(axes: list[int], rank: int) -> tuple[int, ...]:
    if any(not -rank <= a < rank for a in axes) or len({a % rank for a in axes}) != len(axes):
        raise Undefined(f"axes {axes} of a tensor of rank {rank}")
    return tuple(sorted(a % rank for a in axes))


def small(shape: Any) -> tuple[int, ...]:
    """Return ``shape``, or refuse a tensor that is too large."""
    shape = tuple(int(n) for n in shape)
    if any(n < 0 for n in shape):
        raise Undefined(f"shape {shape}")
    if math.prod(shape) > MAX_ELEMENTS:
        raise Refusal(f"a tensor of shape {shape} has more than {MAX_ELEMENTS} elements")
    return shape


def mean(ar: Arithmetic, x: Array, axes: tuple[int, ...], *, keep: bool) -> Array:
    count = math.prod(x.shape[a] for a in axes)
    if not count:
        raise Undefined("the mean of no elements")
    return ar.multiply(ar.total(x, axes, keep=keep), ar.fraction(Fraction(1, count)))


def reduction(c: Call) -> Array:
    op = c.node.op
    if op == "GlobalAveragePool":
        return mean(c.ar, c.x, tuple(range(2, c.x.ndim)), keep=True)
    axes = c.integers(1, "axes")
    if not axes:
        axes = [] if c.get("noop_with_empty_axes", 0) else list(range(c.x.ndim))
    places = axes_of(axes, c.x.ndim)
    keep = bool(c.get("keepdims", 1))
    if op == "ReduceMean":
        return mean(c.ar, c.x, places, keep=keep)
    x = c.x if op == "ReduceSum" else c.ar.multiply(c.x, c.x)
    result = c.ar.total(x, places, keep=keep)
    return c.ar.root(result) if op == "ReduceL2" else result


def power(c: Call) -> Array:
    """Raise to a constant half-integer: xᵏᐟ² = (√x)ᵏ."""
    if c.exponent is None or not c.exponent.size or np.ptp(c.exponent):
        reject("structure", c.node.outputs[0], "Pow needs a constant exponent with equal elements")
    exponent = float(c.exponent.flat[0])
    if abs(exponent) > 16 or 2 * exponent != round(2 * exponent):
        reject("structure", c.node.outputs[0], f"Pow has the exponent {exponent}, not a half-integer of at most 16")
    given = c.inputs[1]
    if isinstance(c.ar, Field) and given.dtype == c.ar.kind and (given != c.ar.fraction(Fraction(exponent))).any():
        reject("structure", c.node.outputs[0], f"the exponent of Pow is not exactly {exponent}")
    twice = int(2 * abs(exponent))
    base = c.ar.root(c.x) if twice % 2 else c.x
    one = c.ar.element(np.ones(np.shape(given)))
    result = reduce(c.ar.multiply, [base] * (twice if twice % 2 else twice // 2), one)
    return c.ar.divide(one, result) if exponent < 0 else result


def normalize(c: Call, x: Array, axes: tuple[int, ...]) -> list[Array]:
    """Return (x − m)/√(v + ε), m and 1/√(v + ε) over ``axes``."""
    center = mean(c.ar, x, axes, keep=True)
    distance = c.ar.subtract(x, center)
    variance = mean(c.ar, c.ar.multiply(distance, distance), axes, keep=True)
    root = c.ar.root(c.ar.add(variance, c.real("epsilon", EPSILON)))
    return [c.ar.divide(distance, root), center, c.ar.divide(c.ar.fraction(Fraction(1)), root)]


def scaled(c: Call, x: Array, *, shape: tuple[int, ...] | None = None) -> Array:
    """Multiply by the scale (input 1) and add the bias (input 2), reshaped to ``shape``."""
    for index, function in ((1, c.ar.multiply), (2, c.ar.add)):
        factor = c.input(index)
        if factor is not None:
            x = function(x, factor if shape is None else factor.reshape(shape))
    return x


def trailing_axes(c: Call) -> tuple[int, ...]:
    first = axes_of([c.get("axis", -1)], c.x.ndim)[0]
    return tuple(range(first, c.x.ndim))


def layer_norm(c: Call) -> list[Array]:
    normal, *others = normalize(c, c.x, trailing_axes(c))
    return [scaled(c, normal), *others]


def rms_norm(c: Call) -> Array:
    square = mean(c.ar, c.ar.multiply(c.x, c.x), trailing_axes(c), keep=True)
    root = c.ar.root(c.ar.add(square, c.real("epsilon", EPSILON)))
    return c.ar.multiply(c.ar.divide(c.x, root), c.inputs[1])


def along_channels(c: Call) -> tuple[int, ...]:
    return (-1, *[1] * (c.x.ndim - 2))


def instance_norm(c: Call) -> Array:
    normal = normalize(c, c.x, tuple(range(2, c.x.ndim)))[0]
    return scaled(c, normal, shape=along_channels(c))


def group_norm(c: Call) -> Array:
    groups = c.get("num_groups")
    rows = c.x.reshape(c.x.shape[0], groups, -1)
    normal = normalize(c, rows, (2,))[0]
    if c.node.opset < 21:
        return scaled(c, normal, shape=(groups, 1)).reshape(c.x.shape)
    return scaled(c, normal.reshape(c.x.shape), shape=along_channels(c))


def batch_norm(c: Call) -> Array:
    if c.get("training_mode", 0):
        reject("structure", c.node.outputs[0], "BatchNormalization in training mode is outside the tables")
    center, variance = (v.reshape(along_channels(c)) for v in c.inputs[3:5])
    root = c.ar.root(c.ar.add(variance, c.real("epsilon", EPSILON)))
    return scaled(c, c.ar.divide(c.ar.subtract(c.x, center), root), shape=along_channels(c))


def mean_variance_norm(c: Call) -> Array:
    axes = axes_of(c.get("axes", [0, 2, 3]), c.x.ndim)
    distance = c.ar.subtract(c.x, mean(c.ar, c.x, axes, keep=True))
    root = c.ar.root(mean(c.ar, c.ar.multiply(distance, distance), axes, keep=True))
    return c.ar.divide(distance, c.ar.add(root, c.ar.fraction(Fraction(float(np.float32(1e-9))))))


def product(ar: Arithmetic, a: Array, b: Array) -> Array:
    """Multiply matrices as numpy's matmul, with vectors allowed."""
    left = a[None] if a.ndim == 1 else a
    right = b[:, None] if b.ndim == 1 else b
    small((*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1]))
    result = ar.matmul(left, right)
    result = result[..., 0] if b.ndim == 1 else result
    return result[..., 0, :] if a.ndim == 1 and b.ndim > 1 else result[..., 0] if a.ndim == 1 else result


def gemm(c: Call) -> Array:
    a = c.x.T if c.get("transA", 0) else c.x
    b = c.inputs[1].T if c.get("transB", 0) else c.inputs[1]
    result = c.ar.multiply(c.real("alpha", 1.0), product(c.ar, a, b))
    if c.input(2) is None:
        return result
    np.broadcast_to(c.inputs[2], result.shape)
    return c.ar.add(result, c.ar.multiply(c.real("beta", 1.0), c.inputs[2]))


def contract(ar: Arithmetic, a: Array, labels_a: str, b: Array, labels_b: str, kept: str) -> tuple[Array, str]:
    """Multiply two einsum operands and sum over the labels that are not in ``kept``."""
    a, labels_a = summed(ar, a, labels_a, set(labels_b) | set(kept))
    b, labels_b = summed(ar, b, labels_b, set(labels_a) | set(kept))
    shared = [k for k in labels_a if k in labels_b]
    batch = [k for k in shared if k in kept]
    over = [k for k in shared if k not in kept]
    left = [k for k in labels_a if k not in shared]
    right = [k for k in labels_b if k not in shared]
    sizes = dict(zip(labels_b, b.shape, strict=True)) | dict(zip(labels_a, a.shape, strict=True))
    if any(a.shape[labels_a.index(k)] != b.shape[labels_b.index(k)] for k in shared):
        raise Undefined("an Einsum with unequal lengths")
    count = {name: math.prod(sizes[k] for k in ks) for name, ks in (("l", left), ("o", over), ("r", right))}
    dims = [sizes[k] for k in batch]
    a = a.transpose([labels_a.index(k) for k in batch + left + over]).reshape(*dims, count["l"], count["o"])
    b = b.transpose([labels_b.index(k) for k in batch + over + right]).reshape(*dims, count["o"], count["r"])
    order = batch + left + right
    return product(ar, a, b).reshape([sizes[k] for k in order]), "".join(order)


def summed(ar: Arithmetic, x: Array, labels: str, kept: set[str]) -> tuple[Array, str]:
    axes = tuple(i for i, k in enumerate(labels) if k not in kept)
    return (ar.total(x, axes, keep=False) if axes else x), "".join(k for k in labels if k in kept)


def einsum(c: Call) -> Array:
    left, _, right = c.get("equation").replace(" ", "").partition("->")
    if not left.isascii() or not right.isascii():
        raise Undefined("an Einsum with other characters than letters")
    names = left.split(",")
    if "->" not in c.get("equation"):
        letters = left.replace(",", "").replace(".", "")
        right = "..." * ("." in left) + "".join(k for k in sorted(set(letters)) if letters.count(k) == 1)
    ranks = [x.ndim - len(n.replace("...", "")) for x, n in zip(c.inputs, names, strict=True) if "..." in n]
    # Capital Greek letters stand for the axes of the ellipsis.
    dots = "".join(chr(0x391 + i) for i in range(max(ranks, default=0)))
    operands = []
    for x, name in zip(c.inputs, names, strict=True):
        dims = x.ndim - len(name.replace("...", ""))
        labels = name.replace("...", dots[len(dots) - dims :])
        unique = "".join(dict.fromkeys(labels))
        if len(labels) != x.ndim:
            raise Undefined("an Einsum operand of another rank")
        letters = {k: i for i, k in enumerate(unique)}
        x = np.einsum(x, [letters[k] for k in labels], list(range(len(unique))))
        operands.append((x, unique))
    out = right.replace("...", dots)
    for k in dots:
        longest = max(x.shape[n.index(k)] for x, n in operands if k in n)
        operands = [
            (np.broadcast_to(x, [longest if m == k else s for m, s in zip(n, x.shape, strict=True)]), n)
            for x, n in operands
        ]
    result, labels = operands[0]
    for i, (x, name) in enumerate(operands[1:], 2):
        later = "".join(n for _, n in operands[i:])
        result, labels = contract(c.ar, result, labels, x, name, out + later)
    result, labels = summed(c.ar, result, labels, set(out))
    return result.transpose([labels.index(k) for k in out])


def padded(ar: Arithmetic, x: Array, pads: list[int]) -> Array:
    """Pad (or crop, for negative numbers) the axes after the second with zeros."""
    rank = x.ndim - 2
    result = np.array(
        np.broadcast_to(
            ar.element(np.zeros(())),
            small(x.shape[:2] + tuple(x.shape[i + 2] + pads[i] + pads[i + rank] for i in range(rank))),
        )
    )
    target, source = [slice(None)] * 2, [slice(None)] * 2
    for i in range(rank):
        target.append(slice(max(pads[i], 0), result.shape[i + 2] - max(pads[i + rank], 0)))
        source.append(slice(max(-pads[i], 0), x.shape[i + 2] - max(-pads[i + rank], 0)))
    result[tuple(target)] = x[tuple(source)]
    return result


def convolve(ar: Arithmetic, x: Array, w: Array, groups: int, strides: list[int], dilations: list[int]) -> Array:
    """Convolve padded ``x`` (N, C, …) with ``w`` (M, C/groups, …)."""
    rank = x.ndim - 2
    spans = [d * (k - 1) + 1 for d, k in zip(dilations, w.shape[2:], strict=True)]
    windows = np.lib.stride_tricks.sliding_window_view(x, spans, tuple(range(2, x.ndim)))
    steps = [slice(None, None, s) for s in (1, 1, *strides, *dilations)]
    windows = windows[tuple(steps)]
    outer = windows.shape[2 : 2 + rank]
    n, m, inner = x.shape[0], w.shape[0], math.prod(w.shape[1:])
    small((n, groups, inner, *outer))
    moved = windows.transpose(0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank))
    columns = moved.reshape(n, groups, inner, math.prod(outer))
    return product(ar, w.reshape(groups, m // groups, inner), columns).reshape(n, m, *outer)


def convolution(c: Call) -> Array:
    x, w, rank = c.x, c.inputs[1], c.x.ndim - 2
    strides, dilations = c.get("strides", [1] * rank), c.get("dilations", [1] * rank)
    pads, mode, groups = c.get("pads", [0] * 2 * rank), c.get("auto_pad", "NOTSET"), c.get("group", 1)
    spans = [d * (k - 1) + 1 for d, k in zip(dilations, w.shape[2:], strict=True)]
    extra = c.get("output_padding", [0] * rank)
    if c.get("kernel_shape", list(w.shape[2:])) != list(w.shape[2:]):
        raise Undefined(f"kernel_shape differs from the weight of shape {w.shape}")
    transposed = c.node.op == "ConvTranspose"
    if mode not in ("NOTSET", "VALID") or c.get("output_shape"):
        if transposed:
            wanted = c.get("output_shape") or [n * s for n, s in zip(x.shape[2:], strides, strict=True)]
            sums = [strides[i] * (x.shape[i + 2] - 1) + extra[i] + spans[i] - wanted[-rank:][i] for i in range(rank)]
        else:
            sums = [max((-(-n // s) - 1) * s + k - n, 0) for n, s, k in zip(x.shape[2:], strides, spans, strict=True)]
        less, more = [t // 2 for t in sums], [t - t // 2 for t in sums]
        low_first = mode == "SAME_UPPER"
        pads = less + more if low_first else more + less
    if transposed:
        result = np.broadcast_to(
            c.ar.element(np.zeros(())),
            small((*x.shape[:2], *[(n - 1) * s + 1 for n, s in zip(x.shape[2:], strides, strict=True)])),
        )
        spread = np.array(result)
        spread[tuple([slice(None)] * 2 + [slice(None, None, s) for s in strides])] = x
        begin = [k - 1 - p for k, p in zip(spans, pads[:rank], strict=True)]
        end = [k - 1 - p + e for k, p, e in zip(spans, pads[rank:], extra, strict=True)]
        x, strides = padded(c.ar, spread, begin + end), [1] * rank
        w = w.reshape(groups, w.shape[0] // groups, *w.shape[1:]).swapaxes(1, 2)
        w = np.flip(w.reshape(-1, *w.shape[2:]), tuple(range(2, 2 + rank)))
    else:
        x = padded(c.ar, x, pads)
    if x.shape[1] != w.shape[1] * groups:
        raise Undefined(f"a convolution of {x.shape[1]} channels with weights for {w.shape[1] * groups}")
    result = convolve(c.ar, x, w, groups, strides, dilations)
    bias = c.input(2)
    return result if bias is None else c.ar.add(result, bias.reshape(along_channels(c)))


def reshape(c: Call) -> Array:
    wanted = c.integers(1, "shape")
    if not c.get("allowzero", 0):
        wanted = [c.x.shape[i] if n == 0 else n for i, n in enumerate(wanted)]
    return c.x.reshape(wanted)


def squeeze(c: Call) -> Array:
    axes = c.integers(1, "axes")
    return np.squeeze(c.x) if axes is None else np.squeeze(c.x, axes_of(axes, c.x.ndim))


def unsqueeze(c: Call) -> Array:
    axes = c.integers(1, "axes")
    return np.expand_dims(c.x, axes_of(axes, c.x.ndim + len(axes)))


def flatten(c: Call) -> Array:
    axis = c.get("axis", 1)
    axis = axis + c.x.ndim if axis < 0 else axis
    return c.x.reshape(math.prod(c.x.shape[:axis]), math.prod(c.x.shape[axis:]))


def expand(c: Call) -> Array:
    shape = np.broadcast_shapes(c.x.shape, tuple(c.integers(1, "shape")))
    return np.broadcast_to(c.x, small(shape))


def tile(c: Call) -> Array:
    repeats = c.integers(1, "repeats")
    small(n * r for n, r in zip(c.x.shape, repeats, strict=True))
    return np.tile(c.x, repeats)


def concat(c: Call) -> Array:
    if len({x.dtype for x in c.inputs}) != 1:
        raise Undefined("a Concat of different types")
    return np.concatenate(c.inputs, axis=c.get("axis"))


def split(c: Call) -> list[Array]:
    axis = axes_of([c.get("axis", 0)], c.x.ndim)[0]
    length, parts = c.x.shape[axis], len(c.node.outputs)
    sizes = c.integers(1, "split")
    if sizes is None:
        step = -(-length // c.get("num_outputs", parts))
        sizes = [min(step, length - step * i) for i in range(parts)]
    if sum(sizes) != length or min(sizes) < 0:
        raise Undefined(f"a Split of {length} into {sizes}")
    return np.split(c.x, np.cumsum(sizes)[:-1], axis=axis)


def slice_(c: Call) -> Array:
    starts, ends, axes = (c.integers(i, n) for i, n in ((1, "starts"), (2, "ends"), (3, "axes")))
    axes = list(range(len(starts))) if axes is None else axes
    steps = c.integers(4, "steps") or [1] * len(starts)
    places = [slice(None)] * c.x.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        low, high = slice(start, end, step).indices(c.x.shape[axis])[:2]
        places[axis] = slice(low, None if step < 0 and high < 0 else high, step)
    return c.x[tuple(places)]


def filled(c: Call) -> Array:
    if c.x.dtype != np.int64:
        raise TypeError("the shape is not a list of integers")
    value = np.ravel(c.get("value", np.zeros(1, np.float32)))[0]
    plain = literal(np.asarray(value))
    plain = c.ar.element(plain) if plain.dtype == np.float64 else plain
    return np.broadcast_to(plain, small(c.x))


def constant(c: Call) -> Array:
    exact = c.get("value_float")
    if isinstance(exact, Fraction):
        return c.ar.fraction(exact)
    plain = literal(constant_value({k: ("", v) for k, v in c.node.attributes.items()}))
    return c.ar.element(plain) if plain.dtype == np.float64 else plain


def cast(c: Call) -> Array:
    like = c.input(1)
    real = like.dtype == c.ar.kind if c.node.op == "CastLike" else c.get("to") in FLOAT_CODES
    if real:
        return c.x if c.x.dtype == c.ar.kind else c.ar.element(c.x.astype(np.float64))
    if c.x.dtype == c.ar.kind and not isinstance(c.ar, Floats):
        reject("structure", c.node.outputs[0], "a Cast of a float to an integer is outside the tables")
    boolean = like.dtype == bool if c.node.op == "CastLike" else c.get("to") == TensorProto.BOOL
    return c.x.astype(bool if boolean else np.int64)


def shape_of(c: Call) -> Array:
    return np.array(c.x.shape[slice(c.get("start", 0), c.get("end"))], dtype=np.int64)


ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Neg", "Sum", "Mean", "Reciprocal", "Pow", "Sqrt", "BatchNormalization")
OPAQUE: dict[str, Json] = {"Sigmoid": {}, "Tanh": {}, "Erf": {}, "Softplus": {}, "Gelu": {"approximate": "none"}}
OPAQUE["HardSigmoid"] = {"alpha": float(np.float32(0.2)), "beta": 0.5}


def opaque(c: Call) -> Array:
    values = {name: c.get(name, default) for name, default in OPAQUE[c.node.op].items()}
    return c.ar.opaque(c.node.op, values, c.x)


def swish(c: Call) -> Array:
    return c.ar.multiply(c.x, c.ar.opaque("Sigmoid", {}, c.ar.multiply(c.x, c.real("alpha", 1.0))))


def softmax(c: Call) -> Array:
    axis = axes_of([c.get("axis", -1 if c.node.opset >= 13 else 1)], c.x.ndim)[0]
    return c.ar.softmax(c.x, (axis,) if c.node.opset >= 13 else tuple(range(axis, c.x.ndim)))


VIEWS: dict[str, Callable[[Call], Any]] = {
    "Reshape": reshape, "Flatten": flatten, "Squeeze": squeeze, "Unsqueeze": unsqueeze, "Expand": expand,
    "Transpose": lambda c: c.x.transpose(c.get("perm") or range(c.x.ndim)[::-1]), "Tile": tile, "Concat": concat,
    "Split": split, "Slice": slice_, "Identity": lambda c: c.x, "Dropout": lambda c: c.x, "Cast": cast,
    "CastLike": cast, "ConstantOfShape": filled, "Constant": constant, "Shape": shape_of,
    "Size": lambda c: np.array(c.x.size),
}  # fmt: skip
ELEMENTS: dict[str, Callable[[Call], Any]] = {
    "Add": lambda c: c.ar.add(c.x, c.inputs[1]), "Sub": lambda c: c.ar.subtract(c.x, c.inputs[1]),
    "Mul": lambda c: c.ar.multiply(c.x, c.inputs[1]), "Div": lambda c: c.ar.divide(c.x, c.inputs[1]),
    "Neg": lambda c: c.ar.subtract(c.ar.fraction(Fraction(0)), c.x), "Sum": lambda c: reduce(c.ar.add, c.inputs),
    "Mean": lambda c: c.ar.multiply(reduce(c.ar.add, c.inputs), c.ar.fraction(Fraction(1, len(c.inputs)))),
    "Reciprocal": lambda c: c.ar.divide(c.ar.fraction(Fraction(1)), c.x), "Pow": power,
    "Sqrt": lambda c: c.ar.root(c.x), "MatMul": lambda c: product(c.ar, c.x, c.inputs[1]), "Gemm": gemm,
    "Einsum": einsum, "Conv": convolution, "ConvTranspose": convolution, "Swish": swish, "Softmax": softmax,
    "BatchNormalization": batch_norm, "LayerNormalization": layer_norm, "RMSNormalization": rms_norm,
    "SimplifiedLayerNormalization": rms_norm, "InstanceNormalization": instance_norm,
    "GroupNormalization": group_norm, "MeanVarianceNormalization": mean_variance_norm,
} | dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceL2", "GlobalAveragePool"), reduction) | (
    dict.fromkeys(OPAQUE, opaque))  # fmt: skip


# --- Evaluation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Certificate:
    """A certificate whose structure is checked. ``arrays``: key of a constant → its elements."""

    raw: Json
    arrays: dict[str, Array]
    functions: dict[tuple[str, str], Json]
    literals: dict[str, Array] = field(default_factory=dict)

    def attributes(self, node: Json) -> Json:
        """Return name → (type, value), in the form of ``model_attributes``."""
        values: Json = {}
        for name, item in node["attributes"].items():
            kind, value = item["type"], item["value"]
            if kind == "tensor":
                value = self.array(value, name)
            elif kind == "float":
                value = float(value)
            elif kind == "floats":
                value = tuple(float(v) for v in value)
            elif kind == "string":
                value = value.encode()
            elif kind == "strings":
                value = tuple(v.encode() for v in value)
            elif kind == "ints":
                value = tuple(value)
            values[name] = (kind, value)
        return values

    def array(self, key: str, where: str) -> Array:
        if key not in self.arrays:
            reject("structure", where, f"constant {key} is not in the table of constants")
        return self.arrays[key]


@dataclass(frozen=True)
class Side:
    """A side with its function calls replaced. ``dependent``: names that depend on elements of leaves."""

    nodes: list[Node]
    constants: dict[str, Array]
    dependent: set[str]
    outputs: list[str]


def literal(array: Array) -> Array:
    if array.dtype == bool:
        return array
    return array.astype(np.float64 if array.dtype.name in FLOAT_NAMES else np.int64)


def inlined(certificate: Certificate, nodes: list[Json], epsilons: Json) -> list[Node]:
    """Replace each function call by its body."""
    result: list[Node] = []

    def visit(body: list[Json], names: dict[str, str], prefix: str, given: Json | None, depth: int) -> None:
        if depth > 16 or len(result) > MAX_NODES:
            raise Refusal(f"function calls are nested too deeply, or there are more than {MAX_NODES} nodes")
        for position, raw in enumerate(body):
            local = {n: names.get(n, prefix + n) if n else "" for n in raw["inputs"] + raw["outputs"]}
            values = certificate.attributes(raw)
            if given is not None:
                bound = {n: given.get(v) if k == "reference" else (k, v) for n, (k, v) in values.items()}
                values = {n: v for n, v in bound.items() if v is not None}
            inputs, outputs = [local[n] for n in raw["inputs"]], [local[n] for n in raw["outputs"]]
            if depth == 0 and outputs and outputs[0] in epsilons:
                pair = epsilons[outputs[0]]
                values["epsilon"] = ("float", Fraction(int(pair["numerator"]), int(pair["denominator"])))
            function = certificate.functions.get((raw["domain"], raw["op"]))
            if function is not None:
                formal = dict(zip(function["inputs"], inputs, strict=False))
                formal = dict.fromkeys(function["inputs"], "") | formal
                called = {f: o for f, o in zip(function["outputs"], outputs, strict=False) if o}
                defaults = certificate.attributes({"attributes": function["defaults"]})
                visit(function["nodes"], formal | called, f"{prefix}{position}:", defaults | values, depth + 1)
                continue
            unknown = any(k in ("other", "reference") for k, _ in values.values())
            plain = {n: v.decode() if k == "string" else list(v) if k == "ints" else v for n, (k, v) in values.items()}
            domain = "unknown attribute" if unknown else raw["domain"].replace("ai.onnx", "")
            node = {"op": raw["op"], "domain": domain, "opset": raw["opset"]}
            result.append(Node(**node, inputs=inputs, outputs=outputs, attributes=plain))

    visit(nodes, {}, "", None, 0)
    return result


def make_side(
    certificate: Certificate, raw: Json, leaves: set[str], epsilons: Json, *, outputs: list[str] | None = None
) -> Side:
    nodes = inlined(certificate, raw["nodes"], epsilons)
    constants = {}
    for name, entry in raw["constants"].items():
        key = entry.get("value", entry.get("rounded"))
        if key not in certificate.literals:
            certificate.literals[key] = literal(certificate.arrays[key])
        constants[name] = certificate.literals[key]
    dependent = set(leaves)
    for node in nodes:
        read = node.inputs[:1] if node.op == "CastLike" else node.inputs
        if node.op not in ("Shape", "Size") and dependent & set(read):
            dependent |= set(node.outputs) - {""}
    return Side(nodes, constants, dependent, raw["outputs"] if outputs is None else outputs)


def reference(node: Node, inputs: list[Any]) -> list[Array]:
    """Compute a node with onnx's reference evaluator, with float64 in place of every float type."""
    names = [f"i{i}" if x is not None else "" for i, x in enumerate(inputs)]
    feeds = {n: x for n, x in zip(names, inputs, strict=True) if n}
    attributes: Json = {}
    for name, value in node.attributes.items():
        if isinstance(value, np.ndarray):
            value = numpy_helper.from_array(literal(value))
        if name in ("to", "dtype", "softmax_precision") and value in FLOAT_CODES:
            value = TensorProto.DOUBLE
        attributes[name] = float(value) if isinstance(value, Fraction) else value
    if node.op in ("Loop", "If", "Scan") or node.op.startswith("Random"):
        raise Undefined(f"{node.op} can't be evaluated here")
    if node.op == "Range" and abs((inputs[1] - inputs[0]) / inputs[2]) > MAX_ELEMENTS:
        raise Refusal("a Range is too long")
    outputs = [o or f"o{i}" for i, o in enumerate(node.outputs)]
    try:
        made = helper.make_node(node.op, names, outputs, domain=node.domain, **attributes)
        types = {n: helper.np_dtype_to_tensor_dtype(x.dtype) for n, x in feeds.items()}
        info = [helper.make_tensor_value_info(n, t, None) for n, t in types.items()]
        results = [helper.make_tensor_value_info(o, TensorProto.DOUBLE, None) for o in outputs]
        graph = helper.make_graph([made], "node", info, results)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid(node.domain, node.opset)])
        return [literal(np.asarray(r)) for r in ReferenceEvaluator(model).run(None, feeds)]
    except (MemoryError, Refusal):
        raise
    except Exception as error:
        raise Undefined(f"{node.op}: {type(error).__name__}: {error}") from None


@dataclass
class Pass:
    """Evaluate sides in one arithmetic. ``strict``: only ops of the tables are allowed. ``known``: float64 values."""

    ar: Arithmetic
    strict: bool
    known: dict[str, Array]

    def evaluate(self, side: Side, values: dict[str, Array]) -> dict[str, Array]:
        values = dict(values)

        def read(name: str) -> Array | None:
            if name and name not in values:
                if name not in side.constants:
                    raise Undefined(f"tensor {name} has no definition")
                constant = side.constants[name]
                values[name] = self.ar.stored(constant) if constant.dtype == np.float64 else constant
            return values[name] if name else None

        for node in side.nodes:
            inputs = [read(n) for n in node.inputs]
            exponent = None
            if node.op == "Pow" and node.inputs[1] not in side.dependent:
                exponent = inputs[1] if isinstance(self.ar, Floats) else self.known.get(node.inputs[1])
            with np.errstate(all="ignore"):
                results = self.apply(Call(node=node, inputs=inputs, ar=self.ar, exponent=exponent))
            for name, value in zip(node.outputs, results, strict=False):
                values[name] = value
        for name in side.outputs:
            read(name)
        if isinstance(self.ar, Floats):
            self.known.update({n: v for n, v in values.items() if n not in side.dependent})
        return values

    def apply(self, call: Call) -> list[Array]:
        node = call.node
        real = [x is not None and x.dtype == self.ar.kind for x in call.inputs]
        standard = node.domain == "" or (node.domain, node.op) == ("com.microsoft", "SimplifiedLayerNormalization")
        kernel = VIEWS.get(node.op) or (ELEMENTS.get(node.op) if any(real) else None)
        if not standard or (kernel is None and (self.strict and (any(real) or not real))):
            reject("structure" if self.strict else "equal", node.outputs[0], f"{node.op} has no definition here")
        if kernel is None or (node.op in ("Pow", "Cast") and not self.strict):
            return reference(node, call.inputs)
        mixed = not all(r or x is None for r, x in zip(real, call.inputs, strict=True))
        if node.op == "Pow" or node.op.startswith("Reduce"):
            mixed = not real[0]
        if node.op in ELEMENTS and mixed:
            raise Undefined(f"{node.op} of floats and integers")
        try:
            results = kernel(call)
        except (ValueError, IndexError, TypeError, ArithmeticError, AttributeError, KeyError) as error:
            raise Undefined(f"{node.op}: {error}") from None
        results = list(results) if isinstance(results, list) else [results]
        if len(results) < len([o for o in node.outputs if o]) and node.op != "Dropout":
            reject("structure", node.outputs[-1], f"{node.op} has no definition of this output")
        return [np.asarray(r) for r in results]


@dataclass(frozen=True)
class Problem:
    """The two sides of a rewrite. ``formulas`` computes ``results``: constant of ``after`` → name in ``formulas``."""

    where: str
    mode: str
    leaves: list[Json]
    before: Side
    after: Side
    formulas: Side | None
    results: dict[str, str]

    def run(self, ar: Arithmetic, leaves: dict[str, Array], known: list[dict[str, Array]]) -> list[Pair]:
        """Evaluate both sides. Returns: one pair for each result."""
        strict = self.mode in FIELD_MODES
        given = dict(leaves)
        before = Pass(ar, strict, known[0]).evaluate(self.before, leaves)
        if self.formulas is not None:
            values = Pass(ar, strict, known[1]).evaluate(self.formulas, {})
            given |= {name: values[source] for name, source in self.results.items()}
        after = Pass(ar, strict, known[2]).evaluate(self.after, given)
        pairs = [Pair(n, np.asarray(before[n]), np.asarray(after[n])) for n in self.before.outputs]
        for pair in pairs:
            if pair.before.shape != pair.after.shape:
                shapes = f"before {pair.before.shape}, after {pair.after.shape}"
                reject("shape", f"{self.where}, tensor {pair.name}", shapes)
        return pairs


@dataclass(frozen=True)
class Pair:
    """A result of both sides."""

    name: str
    before: Array
    after: Array


@dataclass(frozen=True)
class Layout:
    """Shapes of the leaves at the chosen sizes. All float leaves are parts of one vector with ``count`` elements."""

    shapes: dict[str, tuple[int, ...]]
    fixed: dict[str, Array]
    count: int

    def leaves(self, vector: Array) -> dict[str, Array]:
        values = dict(self.fixed)
        start = 0
        for name, shape in self.shapes.items():
            if name not in self.fixed:
                values[name] = vector[start : start + math.prod(shape)].reshape(shape)
                start += math.prod(shape)
        return values


def symbols_of(leaf: Json) -> Iterator[str]:
    for axis, size in enumerate(leaf["shape"] or []):
        if type(size) is str:
            yield size
        elif size is None:
            yield f"null {leaf['name']} {axis}"
        elif type(size) is dict:
            yield from (s for _, names in size["sum"] for s in names)


def choose_sizes(leaves: list[Json], attempt: int, rng: np.random.Generator) -> dict[str, int]:
    """Choose a size for each symbol: distinct small sizes, then equal ones, then random ones from growing ranges."""
    symbols = sorted({s for leaf in leaves for s in symbols_of(leaf)})
    if attempt == 0:
        return {s: 2 + i % 3 for i, s in enumerate(symbols)}
    limit = (4, 4, 4, 8, 16, 32, 64)[min(attempt // 8, 6)]
    if attempt % 4 == 3:
        return dict.fromkeys(symbols, int(rng.integers(1, limit + 1)))
    return {s: int(rng.integers(1, limit + 1)) for s in symbols}


def make_layout(leaves: list[Json], sizes: dict[str, int], rank: int, rng: np.random.Generator) -> Layout:
    shapes, fixed = {}, {}
    for leaf in leaves:
        shape = []
        for axis, size in enumerate([2] * rank if leaf["shape"] is None else leaf["shape"]):
            if type(size) is dict:
                size = sum(k * math.prod(sizes[s] for s in names) for k, names in size["sum"])
            named = f"null {leaf['name']} {axis}" if size is None else size
            shape.append(sizes[named] if type(named) is str else size)
        if any(n < 1 for n in shape):
            raise Undefined(f"leaf {leaf['name']} has the shape {shape}")
        shapes[leaf["name"]] = small(shape)
        if leaf["dtype"] and leaf["dtype"] not in FLOAT_NAMES:
            fixed[leaf["name"]] = rng.integers(0, 2, shape).astype(bool if leaf["dtype"] == "bool" else np.int64)
    count = sum(math.prod(s) for n, s in shapes.items() if n not in fixed)
    return Layout(shapes, fixed, count)


def random_prime(rng: np.random.Generator) -> int:
    while True:
        n = int(rng.integers(2**27, 2**28)) * 4 + 3
        odd = (n - 1) // 2
        # Miller and Rabin with these bases is exact below 3,215,031,751. As n mod 4 = 3, one squaring step suffices.
        if all(pow(a, odd, n) in (1, n - 1) for a in (2, 3, 5, 7)):
            return n


def degree_bits(problem: Problem, known: list[dict[str, Array]], lengths: dict[str, int]) -> float:
    """Bound log2 of the degree of the identity, without roots. ``lengths``: name → number of elements.

    A sum of rational functions with different denominators has up to the sum of their degrees.
    """
    constants = {name for values in known for name in values}
    total = 1.0
    for side in (problem.before, problem.after):
        degree: dict[str, float] = {leaf["name"]: 1.0 for leaf in problem.leaves}
        rational: set[str] = set()
        for node in side.nodes:
            parts = sum(degree.get(n, 0.0) for n in node.inputs)
            divisor = {"Div": 1, "Reciprocal": 0, "Pow": 0}.get(node.op)
            divides = node.op.endswith("Normalization") and node.op != "BatchNormalization"
            divides |= divisor is not None and node.inputs[divisor] not in constants
            if node.op == "Pow":
                parts *= abs(float(known[0].get(node.inputs[1], known[2].get(node.inputs[1], np.full(1, 16))).flat[0]))
            elif (divides and divisor is None) or node.op in ("ReduceSumSquare", "ReduceL2", "Swish"):
                parts *= 4
            if rational & set(node.inputs) and node.op not in VIEWS and node.op not in ELEMENTWISE:
                parts *= max(lengths.get(n, 1) for n in node.inputs)
            if divides or rational & set(node.inputs):
                rational |= set(node.outputs)
            degree.update(dict.fromkeys(node.outputs, parts))
        total += max(degree.get(n, 0.0) for n in side.outputs)
    return math.log2(total)


def count_roots(ar: Field) -> int:
    """Return the largest number of different roots that one result may depend on."""
    if ar.dependence is None:
        return 0
    parent = ar.dependence.components()
    found = [np.zeros((2, 0), dtype=np.uint64)]
    for labels, values in ar.seen:
        depends = labels != Dependence.NONE
        found.append(np.stack([parent[labels[depends].astype(np.int64)].astype(np.uint64), values[depends]]))
    distinct = np.unique(np.concatenate(found, axis=1), axis=1)
    return int(np.unique(distinct[0], return_counts=True)[1].max(initial=0))


@dataclass(frozen=True)
class Evidence:
    """State how often an equality was checked. ``bits``: the error probability is at most 2⁻ᵇⁱᵗˢ, or None for tests."""

    sizes: list[dict[str, int]]
    bits: float | None
    irrational: bool

    @property
    def chance(self) -> str:
        if self.bits is None:
            return "tested at random points"
        if self.bits < 1:
            return "no bound for the error probability"
        note = ", signs of roots of constants checked in float64" if self.irrational else ""
        return f"error probability at most 2^-{int(min(self.bits, 64))}{note}"


def close(problem: Problem, pairs: list[Pair], tolerance: float) -> None:
    """Require |b − a| ≤ tolerance·max|b| and NaN at the same elements."""
    for pair in pairs:
        b, a = pair.before, pair.after
        if b.dtype != np.float64 or a.dtype != np.float64:
            wrong = b != a
        else:
            finite = np.abs(b[np.isfinite(b)])
            with np.errstate(invalid="ignore"):
                near = np.abs(b - a) <= tolerance * finite.max(initial=0.0)
            # In the field modes, a side that is undefined before the rewrite may become defined.
            undefined = np.isnan(b) & (np.isnan(a) | (problem.mode in FIELD_MODES))
            wrong = ~(near | undefined | (b == a))
        report_wrong(problem, pair, wrong, "in float64")


def require_finite(problem: Problem, runs: list[list[Pair]]) -> None:
    """Require a number in each result, because a comparison of NaN alone shows nothing."""
    for i, pair in enumerate(runs[0]):
        befores = [r[i].before for r in runs]
        if pair.before.size and not any(np.isfinite(b).any() for b in befores):
            reject("equal", f"{problem.where}, tensor {pair.name}", "no element is finite in float64")


def report_wrong(problem: Problem, pair: Pair, wrong: Array, how: str) -> None:
    if np.any(wrong):
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        values = f"before {pair.before[place]}, after {pair.after[place]} at element {list(place)} {how}"
        reject("equal", f"{problem.where}, tensor {pair.name}", values)


def check_sizes(problem: Problem, points: int, rng: np.random.Generator) -> Evidence:
    """Check the shapes and the equality of a rewrite at two choices of sizes, or at one if all sizes are fixed."""
    chosen: list[dict[str, int]] = []
    evidence: list[Evidence] = []
    problem_of = "no sizes were tried"
    free = any(True for leaf in problem.leaves for _ in symbols_of(leaf))
    unknown = any(leaf["shape"] is None for leaf in problem.leaves)
    for attempt in range(56 if free or unknown else 1):
        sizes = choose_sizes(problem.leaves, attempt, rng)
        if sizes in chosen and free:
            continue
        try:
            layout = make_layout(problem.leaves, sizes, (3, 4, 2, 1, 5)[attempt % 5], rng)
            evidence.append(check_layout(problem, layout, sizes, points, rng))
        except Undefined as error:
            problem_of = str(error)
            continue
        chosen.append(sizes)
        if len(chosen) == 2 or not (free or unknown):
            break
    if not chosen:
        reject("equal", problem.where, f"found no sizes at which both sides are defined ({problem_of})")
    bits = [e.bits for e in evidence if e.bits is not None]
    return Evidence(chosen, max(bits) if bits else None, any(e.irrational for e in evidence))


def check_layout(
    problem: Problem, layout: Layout, sizes: dict[str, int], points: int, rng: np.random.Generator
) -> Evidence:
    known: list[dict[str, Array]] = [{}, {}, {}]
    floats = Floats()
    runs = []
    for attempt in range(4 if problem.mode == "affine" else 3):
        floats.root_inputs.clear()
        draw = rng.standard_normal(layout.count)
        # A root of a leaf exists for positive leaves only.
        draw = np.abs(draw) if problem.mode == "exact" and attempt == 1 else draw
        pairs = problem.run(floats, layout.leaves(draw), known)
        if problem.mode != "affine":
            close(problem, pairs, EXACT_TOLERANCE if problem.mode in FIELD_MODES else BOUNDS["numeric"])
        runs.append(pairs)
    if problem.mode in FIELD_MODES:
        require_finite(problem, runs)
    if problem.mode == "numeric":
        return Evidence([sizes], None, False)
    if problem.mode == "affine":
        close_affine(problem, runs)
    dependence = None
    if any(needs_leaf_roots(side) for side in (problem.before, problem.after)):
        dependence = Dependence(layout.count)
        problem.run(dependence, layout.leaves(np.arange(layout.count, dtype=np.uint64)), known)
    draws = 4 if problem.mode == "affine" else 1
    passes = tried = zeros = 0
    bits, irrational = 0.0, False
    shapes = {n: v.size for env in known for n, v in env.items()}
    shapes |= {n: layout.count for side in (problem.before, problem.after) for n in side.dependent}
    degree = degree_bits(problem, known, shapes)
    while passes < points:
        tried += 1
        ar = Field(random_prime(rng), rng.bytes(32), floats.root_inputs, dependence)
        try:
            runs = [draw_squares(problem, layout, ar, known, rng) for _ in range(draws)]
        except NewPrime:
            zeros += 1
            if zeros > 200:
                raise Undefined("no prime makes the divisors nonzero and the arguments of roots squares") from None
            continue
        irrational |= ar.irrational
        try:
            compare_field(problem, runs, ar)
        except Rejection:
            if not ar.irrational or tried >= (MAX_CONSTANT_PRIMES if passes else 64):
                raise
            continue
        passes += 1
        bits += max(0.0, 29 - degree - 2 * count_roots(ar)) * max(1, draws - 2)
    return Evidence([sizes], max(0.0, bits - math.log2(math.comb(tried, passes))), irrational)


def needs_leaf_roots(side: Side) -> bool:
    rooted = (n for n in side.nodes if n.op in ("Sqrt", "Pow", "ReduceL2") or n.op.endswith("Normalization"))
    return any(side.dependent & set(n.inputs[3:] if n.op == "BatchNormalization" else n.inputs) for n in rooted)


def draw_squares(problem: Problem, layout: Layout, ar: Field, known: Any, rng: np.random.Generator) -> list[Pair]:
    """Draw leaves until all roots of elements that depend on leaves exist."""
    vector = rng.integers(0, ar.prime, layout.count, dtype=np.uint64)
    failures: Counter[int] = Counter()
    for _ in range(1000):
        ar.position = 0
        ar.seen.clear()
        try:
            return problem.run(ar, layout.leaves(vector), known)
        except NotSquare as error:
            # Arguments that differ by a constant factor are both squares for half of the primes only.
            failures[error.root] += error.everywhere
            if failures[error.root] > 4:
                raise NewPrime from None
            vector[error.elements] = rng.integers(0, ar.prime, np.count_nonzero(error.elements), dtype=np.uint64)
    raise Undefined("found no leaves that make all arguments of roots squares")


def compare_field(problem: Problem, runs: list[list[Pair]], ar: Field) -> None:
    for i, pair in enumerate(runs[0]):
        if problem.mode != "affine" or pair.before.dtype != ar.kind:
            for pairs in runs:
                report_wrong(problem, pairs[i], pairs[i].before != pairs[i].after, f"modulo {ar.prime}")
            continue
        befores, afters = np.stack([r[i].before for r in runs]), np.stack([r[i].after for r in runs])
        # Only an element whose `after` is the same in every draw has no slope.
        partner = np.argmax(afters != afters[0], axis=0)[None]
        run = ar.subtract(np.take_along_axis(afters, partner, 0)[0], afters[0])
        rise = ar.subtract(np.take_along_axis(befores, partner, 0)[0], befores[0])
        slope = ar.multiply(rise, ar.power(run, ar.prime - 2))
        line = ar.add(befores[0], ar.multiply(slope, ar.subtract(afters, afters[0])))
        for k, pairs in enumerate(runs):
            report_wrong(problem, pairs[i], line[k] != befores[k], f"as A·after + B modulo {ar.prime}")


def close_affine(problem: Problem, runs: list[list[Pair]]) -> None:
    for i, pair in enumerate(runs[0]):
        if pair.before.dtype != np.float64:
            close(problem, [r[i] for r in runs], 0.0)
            continue
        afters = np.stack([r[i].after for r in runs])
        spread = afters.max(axis=0) - afters.min(axis=0)
        for pairs in runs:
            b, a = pairs[i].before, pairs[i].after
            wrong = ~(np.abs(b - a) <= BOUNDS["affine"] * (np.abs(a) + np.abs(b) + spread))
            report_wrong(problem, pairs[i], wrong, "in float64")


# --- Claims ----------------------------------------------------------------------------------------------------------


def half_ulp(values: Array, dtype: str) -> Array:
    """Return half an ulp at each element, as in the claim stored."""
    precision, smallest = PRECISION[dtype]
    exponent = np.where(values == 0, smallest - 1, np.frexp(np.abs(values))[1] - 1 - precision)
    # Half of the smallest float64 underflows to 0: two float64 numbers are equal or differ by more.
    return np.ldexp(1.0, np.maximum(exponent, smallest - 1))


def same_meaning(node: Json, opset: int) -> bool:
    """Tell whether the opset of a node and ``opset`` give a standard op the same meaning."""
    breaks = BREAKS.get(node["op"], ()) if node["domain"] in ("", "ai.onnx") else ()
    return all((node["opset"] < b) == (opset < b) for b in breaks)


def same_shape(stated: list[Any], proto: onnx.TypeProto) -> bool:
    """Tell whether the stated shape of a leaf admits every shape of the model's tensor."""
    dims = proto.tensor_type.shape.dim
    if not proto.tensor_type.HasField("shape") or len(dims) != len(stated):
        return not proto.tensor_type.HasField("shape")
    pairs = zip(stated, dims, strict=True)
    return all(type(s) is not int or (d.HasField("dim_value") and d.dim_value == s) for s, d in pairs)


@dataclass
class Checker:
    """Check the claims of one certificate in the order of the methods."""

    certificate: Certificate
    model: onnx.ModelProto
    scopes: list[Scope]
    points: int
    rng: np.random.Generator
    source: Scope | None = None
    counts: Counter[str] = field(default_factory=Counter)
    evidence: dict[int, Evidence] = field(default_factory=dict)
    formula_values: dict[int, dict[str, Array]] = field(default_factory=dict)
    found: set[tuple[int, str]] = field(default_factory=set)
    places: dict[int, str] = field(default_factory=dict)
    slack: dict[int, float] = field(default_factory=dict)

    @property
    def rewrites(self) -> list[Json]:
        return self.certificate.raw["rewrites"]

    def run(self) -> None:
        self.places[id(self.scopes[0])] = ""
        for index, rewrite in enumerate(self.rewrites):
            self.check_structure(index, rewrite)
        self.check_functions()
        self.check_chain()
        for index, rewrite in enumerate(self.rewrites):
            self.counts[rewrite["mode"]] += 1
            self.counts["rewrites that are converted"] += rewrite["converted"]
            if rewrite["mode"] != "none":
                self.check_leaves(index, rewrite)
                self.count_source(rewrite)
                self.check_final(index, rewrite)
                self.check_facts(index, rewrite)
                self.check_values(index, rewrite)

    def check_structure(self, index: int, rewrite: Json) -> None:
        where = f"rewrite {index}"
        if rewrite["index"] != index:
            reject("structure", where, f"the index is {rewrite['index']}")
        if rewrite["mode"] == "none":
            return
        leaves = [leaf["name"] for leaf in rewrite["leaves"]]
        before, after, mode = rewrite["before"], rewrite["after"], rewrite["mode"]
        if before["outputs"] != after["outputs"] or not before["outputs"]:
            reject("structure", where, f"outputs {before['outputs']} of before and {after['outputs']} of after")
        for leaf in rewrite["leaves"]:
            if leaf["dtype"] and leaf["dtype"] not in DTYPES:
                reject("structure", where, f"leaf {leaf['name']} has the unknown type {leaf['dtype']}")
        for name, side in (("before", before), ("after", after)):
            self.check_names(f"{where}, {name}", side, leaves)
            for tensor, entry in side["constants"].items():
                if "value" not in entry and (name == "before" or mode not in ("expressions", "numeric")):
                    reject("structure", f"{where}, {name}, tensor {tensor}", "the constant has no value")
        if any("from" not in n for n in before["nodes"]) or any("final" not in n for n in after["nodes"]):
            reject("structure", where, "a node has no `from` or no `final`")
        rounded = [n for n, e in after["constants"].items() if "rounded" in e]
        if (mode == "expressions") != ("expressions" in rewrite):
            reject("structure", where, "`expressions` belongs to the mode expressions alone")
        if mode == "expressions":
            self.check_expressions(where, rewrite)
        required: list[Json] = [{"claim": "shape", "before": [n], "after": [n]} for n in before["outputs"]]
        required += [{"claim": "equal", "before": n, "after": n, "mode": mode} for n in before["outputs"]]
        entries = {n: after["constants"][n] for n in rounded}
        dtypes = {n: self.table[e["rounded"]]["dtype"] for n, e in entries.items() if mode != "numeric" or "value" in e}
        required += [{"claim": "stored", "constant": n, "dtype": d} for n, d in dtypes.items()]
        required += [{"claim": "epsilon", "node": n} for n in rewrite["epsilons"]]
        for claim in required:
            if claim not in rewrite["claims"]:
                reject("structure", where, f"the claim {json.dumps(claim)} is missing")
        for claim in rewrite["claims"]:
            if claim not in required and claim["claim"] in ("shape", "equal"):
                reject("structure", where, f"the claim {json.dumps(claim)} does not belong to this rewrite")

    @property
    def table(self) -> Json:
        return self.certificate.raw["constants"]

    def check_names(self, where: str, side: Json, leaves: list[str]) -> None:
        """Check that each name is defined once, before it is read."""
        defined = [*leaves, *side["constants"]]
        for entry in side["constants"].values():
            for key in {"value", "rounded"} & set(entry):
                self.certificate.array(entry[key], where)
        names = set(defined)
        for node in side["nodes"]:
            missing = [n for n in node["inputs"] if n and n not in names]
            if missing or not any(node["outputs"]):
                reject("structure", where, f"{node['op']} has no outputs, or reads undefined tensors {missing}")
            self.check_call(where, node)
            defined += [n for n in node["outputs"] if n]
            names |= set(node["outputs"])
        repeated = [n for n, k in Counter(defined).items() if k > 1]
        undefined = [n for n in side.get("outputs", []) if n not in names]
        if repeated or undefined or "" in defined:
            reject("structure", where, f"tensors defined twice: {repeated}, results not defined: {undefined}")

    def check_call(self, where: str, node: Json) -> None:
        self.certificate.attributes(node)
        if any(a["type"] == "reference" for a in node["attributes"].values()):
            reject("structure", where, f"{node['op']} has an attribute that is a reference outside of a function")
        self.require_known(where, node)

    def require_known(self, where: str, node: Json) -> None:
        standard = node["domain"] in ("", "ai.onnx") or node["op"] == "SimplifiedLayerNormalization"
        if not standard and (node["domain"], node["op"]) not in self.certificate.functions:
            reject("functions", where, f"{node['domain']}.{node['op']} is not in the list of functions")

    def check_expressions(self, where: str, rewrite: Json) -> None:
        expressions, before = rewrite["expressions"], rewrite["before"]["constants"]
        self.check_names(f"{where}, expressions", expressions, [])
        names = {n for node in expressions["nodes"] for n in node["outputs"]} | set(expressions["constants"])
        alone = {n for n, e in rewrite["after"]["constants"].items() if "value" not in e}
        if alone != set(expressions["results"]) or not set(expressions["results"].values()) <= names:
            reject("structure", where, "`results` does not define exactly the constants without a value")
        for name, entry in expressions["constants"].items():
            if name in before and not self.same_constant(before[name].get("value"), entry["value"]):
                values = f"{before[name].get('value')} in before, {entry['value']} in expressions"
                reject("structure", f"{where}, tensor {name}", values)

    def check_functions(self) -> None:
        """Compare each function of the file, and require that every function it calls is listed."""
        theirs = {(f.domain, f.name): f for f in self.model.functions}
        for (domain, name), ours in self.certificate.functions.items():
            where = f"function {domain}.{name}"
            if domain in ("", "ai.onnx"):
                reject("structure", where, "a standard op is redefined")
            for node in ours["nodes"]:
                self.require_known(where, node)
            # A body that only the certificate has must not stand for a body of the model.
            if ours["in_file"] or (domain, name) in theirs:
                self.compare_function(where, ours, theirs.get((domain, name)))

    def compare_function(self, where: str, ours: Json, function: onnx.FunctionProto | None) -> None:
        if function is None:
            reject("functions", where, "the model does not contain it")
        holder = onnx.NodeProto(attribute=function.attribute_proto)
        formal = sorted([*function.attribute, *(a.name for a in function.attribute_proto)])
        found = [list(function.input), list(function.output), formal]
        stated = [ours["inputs"], ours["outputs"], sorted(ours["attributes"])]
        if found != stated:
            reject("functions", where, f"inputs, outputs and attributes are {stated} here, {found} in the model")
        defaults = self.certificate.attributes({"attributes": ours["defaults"]})
        if not same_attributes(defaults, model_attributes(holder)) or len(function.node) != len(ours["nodes"]):
            reject("functions", where, "the defaults or the numbers of nodes differ")
        versions = opset_versions(function.opset_import)
        for i, (raw, proto) in enumerate(zip(ours["nodes"], function.node, strict=True)):
            same = raw["inputs"] == list(proto.input) and raw["outputs"] == list(proto.output)
            if not same or not self.same_node(raw, proto, versions):
                reject("functions", where, f"node {i} is {raw['op']} here, and another {proto.op_type} in the model")

    def same_node(self, raw: Json, proto: onnx.NodeProto, versions: dict[str, int]) -> bool:
        """Compare op, domain, attributes, and the meaning of both opsets."""
        ours, theirs = ("" if d == "ai.onnx" else d for d in (raw["domain"], proto.domain))
        if (raw["op"], ours) != (proto.op_type, theirs) or not same_meaning(raw, versions.get("", 1)):
            return False
        attributes = self.certificate.attributes(raw)
        unknown = {n: ("other", None) for n, (kind, _) in attributes.items() if kind == "other"}
        self.counts["attributes without a defined form"] += len(unknown)
        return same_attributes(attributes | unknown, model_attributes(proto))

    def check_chain(self) -> None:
        writer: dict[tuple[str, str], int] = {}
        seen: set[tuple[str, str]] = set()
        for index, rewrite in enumerate(self.rewrites):
            place = rewrite["place"]
            writes = {(place, n): index for n in rewrite.get("writes", [])}
            if rewrite["mode"] == "none":
                writer |= writes
                continue
            for node in rewrite["before"]["nodes"]:
                where = f"rewrite {index}, tensor {', '.join(node['outputs'])}"
                origin = node["from"]
                for name in filter(None, node["outputs"]):
                    last = writer.get((place, name))
                    if last != origin:
                        reject("chain", where, f"`from` is {origin}, but the last rewrite that writes {name} is {last}")
                opset = self.certificate.raw["source"]["opset"]
                if origin is None and not same_meaning(node, opset):
                    reject("chain", where, f"{node['op']} has opset {node['opset']}, but the source has {opset}")
                if origin is not None:
                    self.check_origin(where, index, origin, node)
            self.check_rounded(index, rewrite, writer)
            made = [n for node in rewrite["after"]["nodes"] for n in node["outputs"] if n]
            held = {n for node in rewrite["before"]["nodes"] for n in node["outputs"] if n}
            leaves = {leaf["name"] for leaf in rewrite["leaves"]}
            for name in set(made) - set(rewrite["after"]["outputs"]) - held:
                if (place, name) in seen | writer.keys() or name in leaves:
                    reject("chain", f"rewrite {index}, tensor {name}", "a new tensor has the name of an older one")
            seen |= {(place, n) for n in held | leaves}
            writer |= {(place, n): index for n in made} | writes

    def check_origin(self, where: str, index: int, origin: int, node: Json) -> None:
        """Compare a node with the node of an earlier rewrite, including the constants that it reads."""
        if self.rewrites[origin]["mode"] == "none":
            self.counts["nodes that a rewrite of mode none wrote"] += 1
            return
        earlier, here = self.rewrites[origin]["after"], self.rewrites[index]["before"]
        twins = [n for n in earlier["nodes"] if all(n[k] == node[k] for k in ("outputs", "op", "domain", "inputs"))]
        ours = self.certificate.attributes(node)
        if not any(same_attributes(self.certificate.attributes(n), ours) for n in twins):
            reject("chain", where, f"rewrite {origin} has no node equal to this {node['op']}")
        for name in node["inputs"]:
            old, new = earlier["constants"].get(name), here["constants"].get(name)
            if new is not None and old is None:
                self.counts["inputs that became constants"] += 1
            elif new is not None and "value" in old:
                a, b = (literal(self.certificate.arrays[e["value"]]) for e in (old, new))
                if a.shape != b.shape or a.tobytes() != b.tobytes():
                    reject("chain", f"{where}, constant {name}", f"differs from the constant of rewrite {origin}")

    def check_rounded(self, index: int, rewrite: Json, writer: dict[tuple[str, str], int]) -> None:
        """Check that an earlier rewrite of the same place made each rounded constant of before."""
        for name, entry in rewrite["before"]["constants"].items():
            # A constant may take the place of a tensor that an earlier rewrite computes from constants, or writes.
            last = self.rewrites[writer[rewrite["place"], name]] if (rewrite["place"], name) in writer else None
            self.counts["constants of unknown origin"] += last is not None
            if last is not None and name not in last.get("writes", []) and not entry.get("computed", False):
                reject("chain", f"rewrite {index}, constant {name}", f"rewrite {last['index']} computes this tensor")
            earlier = [r for r in self.rewrites[:index] if r["mode"] != "none" and r["place"] == rewrite["place"]]
            entries = [r["after"]["constants"].get(name, {}) for r in earlier]
            twins = [e for e in entries if self.same_constant(e.get("rounded"), entry.get("rounded"))]
            if "rounded" in entry and not any(
                "value" not in e or self.same_constant(e["value"], entry["value"]) for e in twins
            ):
                reject("chain", f"rewrite {index}, constant {name}", "no earlier rewrite computed this constant")

    def same_constant(self, a: str | None, b: str | None) -> bool:
        if a is None or b is None:
            return a is b
        return all(self.table[a][k] == self.table[b][k] for k in ("dtype", "shape", "sha256"))

    def check_recomputed(self, index: int, rewrite: Json) -> None:
        """Compare exact values of constants with the expressions of the earlier rewrite that defines them."""
        for name, entry in rewrite["before"]["constants"].items():
            places = [j for j, v in self.formula_values.items() if name in v and j < index]
            sources = [j for j in places if self.rewrites[j]["place"] == rewrite["place"]]
            if "rounded" in entry and sources:
                value = literal(self.certificate.arrays[entry["value"]])
                bound = half_ulp(value, "float64") + BOUNDS["expression"] * self.slack[sources[-1]]
                expected = self.formula_values[sources[-1]][name]
                within("chain", f"rewrite {index}, constant {name}", value, expected, bound)

    def count_source(self, rewrite: Json) -> None:
        """Count the nodes of the source that are not in the source file in this form."""
        if self.source is None:
            return
        for node in rewrite["before"]["nodes"]:
            proto = self.source.nodes.get(node["outputs"][0])
            same = (
                proto is not None
                and self.same_node(node, proto, self.source.opsets)
                and node["inputs"] == list(proto.input)
            )
            for name in filter(rewrite["before"]["constants"].get, node["inputs"] if same else []):
                stored = self.source.stored(name)
                ours = literal(self.certificate.arrays[rewrite["before"]["constants"][name]["value"]])
                same = same and stored is not None and np.array_equal(literal(stored), ours)
            if node["from"] is None:
                self.counts["nodes that are not in the source file"] += not same

    def check_final(self, index: int, rewrite: Json) -> None:
        after = rewrite["after"]
        produced = {n: (node, i) for node in after["nodes"] for i, n in enumerate(node["outputs"]) if n}
        for node in after["nodes"]:
            where = f"rewrite {index}, tensor {node['outputs'][0]}"
            final = node["final"]
            if rewrite["converted"]:
                self.counts["nodes of converted rewrites"] += 1
            elif final["where"] == "cleanup":
                self.counts["nodes left to the cleanup"] += 1
            elif final["where"] == "rewrite":
                self.check_replaced(where, index, node)
            else:
                self.check_file_node(where, node, after["constants"], produced, place=rewrite["place"])

    def require_in_file(self, where: str, node: Json) -> None:
        """Require that the model contains the function of ``node``, and those that it calls."""
        function = self.certificate.functions.get((node["domain"], node["op"]))
        if function is not None and not function["in_file"]:
            reject("functions", where, f"the model calls {node['op']}, but `in_file` is false")
        for inner in function["nodes"] if function is not None else []:
            if (inner["domain"], inner["op"]) != (node["domain"], node["op"]):
                self.require_in_file(where, inner)

    def check_leaves(self, index: int, rewrite: Json) -> None:
        """Compare the leaves with the inputs of the model. The shapes of other leaves are not in the model."""
        inputs = {i.name: i.type for i in self.model.graph.input if rewrite["place"] == ""}
        for leaf in rewrite["leaves"]:
            proto = inputs.get(leaf["name"])
            fixed = any(type(size) is int for size in leaf["shape"] or [])
            self.counts["leaves with sizes that the model does not state"] += proto is None and fixed
            where = f"rewrite {index}, leaf {leaf['name']}"
            if proto is not None and leaf["shape"] is not None and not same_shape(leaf["shape"], proto):
                reject("structure", where, f"the shape {leaf['shape']} is not that of the model's input")
            if proto is not None and leaf["dtype"] and DTYPES[leaf["dtype"]] != CODES.get(proto.tensor_type.elem_type):
                reject("structure", where, f"the type {leaf['dtype']} is not that of the model's input")

    def check_replaced(self, where: str, index: int, node: Json) -> None:
        later = node["final"]["index"]
        if later >= len(self.rewrites) or self.rewrites[later]["mode"] == "none":
            reject("structure", where, f"`final` refers to rewrite {later}, which has no nodes")
        nodes = self.rewrites[later]["before"]["nodes"]
        if later <= index or not any(n["outputs"] == node["outputs"] and n["from"] == index for n in nodes):
            reject("final", where, f"rewrite {later} does not replace this node")

    def check_file_node(self, where: str, node: Json, constants: Json, produced: Json, *, place: str) -> None:
        final = node["final"]
        # Each scope belongs to one place, so that a made-up place can't hide earlier rewrites from the chain.
        scopes = [s for s in self.scopes if self.places.get(id(s), place or None) == place]
        found = [s for s in scopes if final["output"] in s.nodes and final["output"]]
        reasons = [self.file_mismatch(scope, node, constants, produced) for scope in found]
        if "" not in reasons:
            reject("final", where, (reasons or [f"the model has no node with the first output {final['output']}"])[0])
        self.found.add((id(found[reasons.index("")]), final["output"]))
        self.places[id(found[reasons.index("")])] = place
        if (node["domain"], node["op"]) in self.certificate.functions:
            self.require_in_file(where, node)
        self.counts["outputs that the cleanup renamed"] += final["output"] != node["outputs"][0]
        for ours, theirs in zip(node["inputs"], final["inputs"], strict=True):
            checked = ours in constants or (ours in produced and produced[ours][0]["final"]["where"] == "file")
            self.counts["inputs that the cleanup replaced"] += ours != theirs and not checked

    def file_mismatch(self, scope: Scope, node: Json, constants: Json, produced: Json) -> str:
        """Compare a node of `after` with the node of the model. Returns: the difference, or an empty text."""
        final, proto = node["final"], scope.nodes[node["final"]["output"]]
        if not self.same_node(node, proto, scope.opsets):
            ours = {n: v for n, (_, v) in self.certificate.attributes(node).items()}
            theirs = {n: v for n, (_, v) in model_attributes(proto).items()}
            return f"{node['op']} {ours} in the certificate, {proto.op_type} {theirs} in the model"
        if final["inputs"] != list(proto.input) or len(final["inputs"]) != len(node["inputs"]):
            return f"inputs {final['inputs']} in the certificate, {list(proto.input)} in the model"
        for ours, theirs in zip(node["inputs"], final["inputs"], strict=True):
            if (ours == "") != (theirs == ""):
                return f"input {ours!r} in the certificate, {theirs!r} in the model"
            if ours in constants:
                key = constants[ours].get("rounded", constants[ours].get("value"))
                stored, wanted = scope.stored(theirs), self.certificate.arrays[key]
                if stored is None or (stored.dtype, stored.shape) != (wanted.dtype, wanted.shape):
                    return f"input {theirs} of the model is not a constant of type {wanted.dtype} and {wanted.shape}"
                if stored.tobytes() != wanted.tobytes():
                    return f"constant {ours} of the certificate and {theirs} of the model have different elements"
            elif ours in produced and produced[ours][0]["final"]["where"] == "file":
                writer, position = produced[ours]
                source = scope.nodes.get(writer["final"]["output"])
                if source is None or list(source.output)[position : position + 1] != [theirs]:
                    return f"input {theirs} of the model is not the output of the node that computes {ours}"
            elif ours != theirs and scope.has(ours) and not (scope.passes(ours, theirs) or scope.passes(theirs, ours)):
                return f"input {theirs} of the model in place of {ours}, which the model has too"
        return ""

    def check_facts(self, index: int, rewrite: Json) -> None:
        for fact in rewrite["facts"]:
            where = f"rewrite {index}, {fact['side']}, tensor {fact['constant']}"
            entry = rewrite[fact["side"]]["constants"].get(fact["constant"])
            if entry is None:
                reject("structure", where, "a fact about an unknown constant")
            values = literal(self.certificate.arrays[entry.get("value", entry.get("rounded"))])
            values = values + float(fact.get("plus", 0))
            holds = values > 0 if fact["fact"] == "positive" else (values != 0) & ~np.isnan(values)
            if not np.all(holds):
                reject("facts", where, f"an element is {float(values[~holds].flat[0])}, not {fact['fact']}")
        for fact in self.derived_facts(rewrite) if rewrite["mode"] in FIELD_MODES else []:
            if fact not in rewrite["facts"]:
                reject("facts", f"rewrite {index}, {fact['side']}, tensor {fact['constant']}", f"{fact} is missing")

    def derived_facts(self, rewrite: Json) -> Iterator[Json]:
        places = {"Div": 1, "Reciprocal": 0, "Sqrt": 0, "BatchNormalization": 4}
        for name in ("before", "after"):
            for node in rewrite[name]["nodes"]:
                place = places.get(node["op"], 99)
                entry = rewrite[name]["constants"].get("".join(node["inputs"][place : place + 1]))
                if node["domain"] not in ("", "ai.onnx") or entry is None:
                    continue
                if self.table[entry.get("value", entry.get("rounded"))]["dtype"] in FLOAT_NAMES:
                    kind = "nonzero" if node["op"] in ("Div", "Reciprocal") else "positive"
                    fact = {"fact": kind, "side": name, "constant": node["inputs"][place]}
                    default = {"plus": node["attributes"].get("epsilon", {"value": EPSILON})["value"]}
                    yield fact | (default if place == 4 else {})

    def check_values(self, index: int, rewrite: Json) -> None:
        """Check the claims shape, equal, stored and epsilon."""
        where = f"rewrite {index}"
        leaves = {leaf["name"] for leaf in rewrite["leaves"]}
        raw_sides = [rewrite["before"], rewrite["after"]]
        before, after = (make_side(self.certificate, s, leaves, rewrite["epsilons"]) for s in raw_sides)
        formulas, results = None, {}
        if rewrite["mode"] == "expressions":
            results = rewrite["expressions"]["results"]
            formulas = make_side(self.certificate, rewrite["expressions"], set(), {}, outputs=list(results.values()))
            values = Pass(Floats(), True, {}).evaluate(formulas, {})
            self.formula_values[index] = {n: values[s] for n, s in results.items()}
            self.slack[index] = max(np.abs(v).max(initial=0.0) for v in values.values() if v.dtype == np.float64)
        problem = Problem(where, rewrite["mode"], rewrite["leaves"], before, after, formulas, results)
        try:
            self.evidence[index] = check_sizes(problem, self.points, self.rng)
        except Rejection as error:
            text = str(error)
            raise Rejection(text if where in text else text.replace("fails, ", f"fails, {where}, tensor ", 1)) from None
        entries = [e for s in raw_sides for e in s["constants"].values()]
        self.counts["constants that are computed"] += sum(e.get("computed", False) for e in entries)
        for claim in rewrite["claims"]:
            if claim["claim"] == "stored":
                self.check_stored(index, rewrite, claim)
            elif claim["claim"] == "epsilon":
                self.check_epsilon(where, rewrite, claim["node"])
            self.counts["claims about NaN and Inf"] += claim["claim"] == "nonfinite"
        self.check_recomputed(index, rewrite)

    def check_stored(self, index: int, rewrite: Json, claim: Json) -> None:
        where = f"rewrite {index}, constant {claim['constant']}"
        entry = rewrite["after"]["constants"].get(claim["constant"], {})
        if "rounded" not in entry or claim["dtype"] not in PRECISION:
            reject("stored", where, "the constant has no rounded form of a float type")
        stored = self.certificate.arrays[entry["rounded"]]
        if stored.dtype.name != claim["dtype"]:
            reject("stored", where, f"type {claim['dtype']} in the claim, {stored.dtype.name} in the file")
        bound = half_ulp(literal(stored), claim["dtype"])
        if "value" in entry:
            exact = literal(self.certificate.arrays[entry["value"]])
        elif index in self.formula_values:
            exact = self.formula_values[index][claim["constant"]]
            bound = bound + BOUNDS["expression"] * self.slack[index]
        else:
            return
        within("stored", where, literal(stored), exact, bound)

    def check_epsilon(self, where: str, rewrite: Json, name: str) -> None:
        nodes = [n for n in rewrite["after"]["nodes"] if n["outputs"][:1] == [name]]
        exact = rewrite["epsilons"].get(name)
        stored = nodes[0]["attributes"].get("epsilon", {"value": EPSILON})["value"] if nodes else None
        if exact is None or type(stored) is not float:
            reject("epsilon", f"{where}, tensor {name}", "no such node or no such exact epsilon")
        fraction = Fraction(int(exact["numerator"]), int(exact["denominator"]))
        if abs(Fraction(stored) - fraction) > Fraction(float(half_ulp(np.asarray(stored), "float32"))):
            reject("epsilon", f"{where}, tensor {name}", f"{stored!r} is not {float(fraction)!r} rounded once")

    def summary(self) -> str:
        """Describe the checks and their limits."""
        proved = [f"{self.counts[m]} {m}" for m in FIELD_MODES]
        total = sum(self.counts[m] for m in FIELD_MODES)
        lines = [f"accepted: {total} rewrites proved ({', '.join(proved)}), {self.counts['numeric']} tested (numeric)"]
        lines.append(f"rewrites not covered: {self.counts['none']} none")
        model_nodes = sum(len(s.nodes) for s in self.scopes if not s.function)
        in_graphs = [s for s in self.scopes if not s.function and any(id(s) == i for i, _ in self.found)]
        outside = model_nodes - sum(id(s) == i for s in in_graphs for i, _ in self.found)
        self.counts["nodes of the model outside of every rewrite"] = outside
        modes = (*FIELD_MODES, "numeric", "none")
        others = [f"{n} {what}" for what, n in sorted(self.counts.items()) if what not in modes and n]
        lines.append(f"nodes covered: {len(self.found)}; not covered: {'; '.join(others) or 'none'}")
        for index, evidence in self.evidence.items():
            sizes = " and ".join(str(s) if s else "fixed" for s in evidence.sizes)
            lines.append(f"rewrite {index}: sizes {sizes}, {evidence.chance}")
        compared = "nodes compared with it" if self.source is not None else "not given, so not covered"
        lines.append(f"sizes: only the listed ones; source: {compared}; rounding and overflow: not covered")
        return "\n".join(lines)


def within(claim: str, where: str, actual: Array, expected: Array, bound: Array) -> None:
    """Require |actual − expected| ≤ bound for every element."""
    if actual.shape != expected.shape:
        reject(claim, where, f"the shapes are {actual.shape} and {expected.shape}")
    wrong = np.asarray(~(np.abs(actual - expected) <= bound))
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        values = f"{float(actual[place])} and {float(expected[place])} at element {list(place)}"
        reject(claim, where, f"{values} differ by more than {float(np.broadcast_to(bound, wrong.shape)[place])}")


# --- Files -----------------------------------------------------------------------------------------------------------


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_certificate(path: Path) -> Json:
    try:
        raw = json.loads(read_bytes(path).decode(), object_pairs_hook=unique_keys, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{path} is not a JSON file: {error}") from None
    if type(raw) is not dict:
        raise Refusal(f"{path} does not hold a JSON object")
    wrong = mismatch(raw, FILE, "")
    if wrong:
        reject("structure", f"field {wrong.lstrip('.')}", "it is missing or does not have the stated type or value")
    for name, value in raw["bounds"].items():
        if not float(value) <= BOUNDS.get(name, 0.0):
            reject("structure", f"bounds.{name}", f"{value} is larger than {BOUNDS.get(name)}")
    return raw


def read_external(model: onnx.ModelProto, folder: Path, stated: dict[str, str]) -> None:
    """Check the external data files, and load the initializers that they hold."""
    external = [t for t in model.graph.initializer if external_data_helper.uses_external_data(t)]
    places = {e.value for t in external for e in t.external_data if e.key == "location"}
    if places != set(stated):
        reject(
            "hash", "model.data", f"external files {sorted(stated)} in the certificate, {sorted(places)} in the model"
        )
    for place in places:
        path = folder / place
        if Path(place).is_absolute() or ".." in Path(place).parts or path.is_symlink():
            raise Refusal(f"the model names a file outside of its folder: {place}")
        actual = digest(read_bytes(path))
        if actual != stated[place]:
            reject("hash", f"file {place}", f"{stated[place]} in the certificate, {actual} computed")
    for tensor in external:
        external_data_helper.load_external_data_for_tensor(tensor, str(folder))


def read_constants(raw: Json, initializers: dict[str, TensorProto]) -> dict[str, Array]:
    """Return the elements of each constant, with dtype, shape and SHA-256 as stated."""
    arrays = {}
    for key, entry in raw["constants"].items():
        where, dtype = f"constant {key}", DTYPES.get(entry["dtype"])
        if dtype is None or ("data" in entry) == ("initializer" in entry):
            reject("structure", where, "the type is unknown, or there is not exactly one of `data` and `initializer`")
        count = math.prod(small(entry["shape"]))
        if "data" in entry:
            try:
                data = base64.b64decode(entry["data"], validate=True)
            except ValueError:
                reject("constants", where, "`data` is not base64")
        else:
            tensor = initializers.get(entry["initializer"])
            array = None if tensor is None else to_array(tensor)
            if array is None or array.dtype != dtype or list(array.shape) != entry["shape"] or count <= 16:
                reject("constants", where, f"initializer {entry['initializer']} is missing, small or of another type")
            data = array.tobytes()
        if len(data) != count * dtype.itemsize or digest(data) != entry["sha256"]:
            reject("constants", where, f"SHA-256 {entry['sha256']} stated, {digest(data)} computed")
        arrays[key] = np.frombuffer(data, dtype=dtype).reshape(entry["shape"])
    return arrays


def check_files(paths: list[Path], points: int, rng: np.random.Generator) -> str:
    """Check a certificate, its model and optionally its source. Returns: the summary."""
    raw = read_certificate(paths[0])
    stated = [raw["model"]["sha256"], raw["source"]["sha256"]]
    for path, expected in zip(paths[1:], stated, strict=False):
        actual = digest(read_bytes(path))
        if actual != expected:
            reject("hash", f"file {path.name}", f"{expected} in the certificate, {actual} computed")
    model = parse_model(read_bytes(paths[1]), paths[1])
    read_external(model, paths[1].parent, raw["model"]["data"])
    names = [(f["domain"], f["name"]) for f in raw["functions"]]
    if len(set(names)) != len(names):
        reject("structure", "functions", "a function is defined twice")
    arrays = read_constants(raw, {t.name: t for t in model.graph.initializer})
    certificate = Certificate(raw, arrays, dict(zip(names, raw["functions"], strict=True)))
    scopes = list(walk_graph(model.graph, None, opset_versions(model.opset_import)))
    for function in model.functions:
        scope = Scope(None, opset_versions(function.opset_import), function=True, written=set(function.input))
        scopes += walk(function.node, scope)
    source = None
    if len(paths) == 3:
        original = parse_model(read_bytes(paths[2]), paths[2])
        source = next(walk_graph(original.graph, None, opset_versions(original.opset_import)))
    checker = Checker(certificate, model, scopes, points, rng, source)
    checker.run()
    return checker.summary()


def stop(signum: int, frame: object) -> NoReturn:
    raise Refusal("the time limit is reached; raise it with --seconds")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="normdeploy_check", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="certificate, model and optionally the source")
    parser.add_argument("--points", type=int, default=4, help="primes for each choice of sizes (at least 4)")
    parser.add_argument("--seed", type=int, help="repeat a run; the default is the system's generator")
    parser.add_argument("--seconds", type=int, default=900, help="time limit")
    parser.add_argument("--gigabytes", type=int, default=12, help="memory limit")
    options = parser.parse_args(arguments)
    if not 2 <= len(options.files) <= 3:
        parser.error("expected a certificate, a model and optionally a source")
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (options.gigabytes << 30, hard))
    signal.signal(signal.SIGALRM, stop)
    # The signal repeats, because code that is called may catch the exception.
    signal.setitimer(signal.ITIMER_REAL, options.seconds, 1)
    seed = secrets.randbits(256) if options.seed is None else options.seed
    try:
        summary = check_files(options.files, max(4, options.points), np.random.default_rng(seed))
    except Rejection as error:
        print(f"rejected: {error}")
        return 1
    except (Refusal, OSError) as error:
        print(f"refused: {error}")
        return 2
    except MemoryError:
        print("refused: the memory limit is reached; raise it with --gigabytes")
        return 2
    except Exception as error:
        print(f"refused: the files cause a {type(error).__name__}: {str(error).splitlines()[:1]}")
        return 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
