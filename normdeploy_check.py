"""Check a normdeploy certificate against its model, as docs/reference/certificate-format.md defines the checks.

    python -m normdeploy_check c.json model.onnx [source.onnx]

Exit code 0: accepted, 1: a claim fails, 2: a file can't be read or a limit is reached. Both sides of a rewrite are
computed at random points, node by node, mostly by onnx's reference evaluator. A float tensor is a numpy array of
Decimals with 60 digits (dtype object), or of float64 in the mode numeric. Other tensors are arrays of integers or bool.
"""

from __future__ import annotations

import argparse
import decimal
import hashlib
import json
import math
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.external_data_helper import _get_all_tensors
from onnx.reference import ReferenceEvaluator
from onnx.serialization import registry

Array = np.ndarray
SCHEMA = "normdeploy/rewrites/2"
# Largest difference of both sides, relative to the largest element
BOUNDS = {"exact": Decimal("1e-25"), "affine": Decimal(2) ** -30, "numeric": 2.0**-16}
# Relative error of the float64 computation from which a constant was rounded
SLACK = Decimal(2) ** -40
CONTEXT = decimal.Context(prec=60, traps=[])
MAX_FILE_BYTES = 4 << 30
STANDARD = ("", "ai.onnx")
PRODUCTS = ("MatMul", "Einsum", "Gemm", "Conv", "ConvTranspose")
NORMS = ("Batch", "Layer", "RMS", "Instance", "Group", "MeanVariance")
# Ops that keep the elements of their first input, in their order
PASSING = ("Identity", "Cast", "Dropout", "Reshape", "Flatten", "Squeeze", "Unsqueeze")
# Functions of one number that are unknown in the modes exact and affine
UNKNOWN = ("Sigmoid", "Tanh", "Erf", "Softplus", "Log", "HardSigmoid", "Gelu")


class Refusal(Exception):
    """Report a file that can't be read or is over a limit (exit code 2)."""


class Undefined(Exception):
    """Report that a side is undefined at the chosen sizes."""


class Rejection(Exception):
    """Report a claim that fails (exit code 1). The arguments are the claim and the details."""


def require(condition: Any, claim: str, detail: str) -> None:
    if not condition:
        raise Rejection(claim, detail)


to_decimals = np.frompyfunc(Decimal, 1, 1)
is_finite = np.frompyfunc(math.isfinite, 1, 1)
numpy_type = helper.tensor_dtype_to_np_dtype


def widen(array: Any, *, exact: bool) -> Array:
    """Return floats as Decimals or as float64, and other numbers as int64 or bool."""
    array = np.asarray(array)
    if array.dtype != object and "float" not in array.dtype.name:
        return array if array.dtype.kind in "biu" else array.astype(np.int64)
    numbers = array if array.dtype == object else array.astype(np.float64)
    return np.asarray(to_decimals(numbers.astype(object)), object) if exact else numbers.astype(np.float64)


def magnitude(array: Array) -> Any:
    return np.max(np.abs(np.ravel(array)), initial=0)


def opset_of(holder: Any) -> int:
    return max([o.version for o in holder.opset_import if o.domain in STANDARD], default=1)


def attributes_of(node: NodeProto) -> dict[str, Any]:
    """Return the attributes of a standard op, with ONNX's defaults."""
    op = node.op_type.replace("SimplifiedLayer", "RMS")
    known = onnx.defs.get_schema(op).attributes.values() if onnx.defs.has(op) else ()
    defaults = {a.name: helper.get_attribute_value(a.default_value) for a in known if a.default_value.name}
    return defaults | {a.name: helper.get_attribute_value(a) for a in node.attribute}


def reference(node: NodeProto, opset: int, inputs: list[Any]) -> list[Any]:
    """Compute a node with onnx's reference evaluator, which adds and multiplies the elements of any array."""
    names = [f"i{i}" if x is not None else "" for i, x in enumerate(inputs)]
    outputs = [name or f"o{i}" for i, name in enumerate(node.output)]
    proto = NodeProto(op_type=node.op_type, input=names, output=outputs, attribute=node.attribute)
    infos = [[helper.make_tensor_value_info(n, TensorProto.DOUBLE, None) for n in ns if n] for ns in (names, outputs)]
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(helper.make_graph([proto], "node", *infos), opset_imports=opsets)
    return list(ReferenceEvaluator(model).run(None, {n: x for n, x in zip(names, inputs, strict=True) if n}))


def bind(node: NodeProto, attributes: dict[str, Any]) -> NodeProto:
    """Return a node without its name. ``attributes``: those of the function's call, to which the node may refer."""
    values = {a.name: attributes.get(a.ref_attr_name) if a.ref_attr_name else a for a in node.attribute}
    known = sorted((name, a) for name, a in values.items() if a is not None)
    kept = [helper.make_attribute(name, helper.get_attribute_value(a), attr_type=a.type) for name, a in known]
    same = {n: getattr(node, n) for n in ("op_type", "domain", "overload", "input", "output")}
    return NodeProto(**same, attribute=kept)


class Evaluator:
    """Compute nodes in Decimals, or in float64. ``epsilons``: exact epsilons of norms by the id of the node."""

    def __init__(self, rng: np.random.Generator, functions: dict[Any, Any], *, exact: bool) -> None:
        self.rng, self.functions, self.exact = rng, functions, exact
        self.number: Any = Decimal if exact else float
        self.epsilons: dict[int, Decimal] = {}
        self.key, self.shift = rng.bytes(32), Decimal(int(rng.integers(10**18))).scaleb(-38)

    def draw_leaf(self, leaf: onnx.ValueInfoProto, shape: list[int], draw: int) -> Array:
        """Draw integers from 0 and 1, and floats of both signs, small positive ones, or large ones (clamps)."""
        dtype = numpy_type(leaf.type.tensor_type.elem_type or TensorProto.FLOAT)
        if "float" not in dtype.name:
            return widen(self.rng.integers(0, 2, shape).astype(dtype), exact=self.exact)
        numbers = to_decimals(self.rng.integers(-3 * 10**16, 3 * 10**16, shape).astype(object))
        kind = draw % (3 if self.exact else 2)
        return widen((abs(numbers) if kind == 1 else numbers) * Decimal(10) ** (-16, -28, -11)[kind], exact=self.exact)

    def run(self, nodes: Iterable[tuple[NodeProto, int]], values: dict[str, Any]) -> dict[str, Any]:
        """Compute nodes, each with its opset. ``values``: the tensors that they read. Returns: all tensors."""
        values = dict(values)
        for node, opset in nodes:
            inputs = [values[n] if n else None for n in node.input]
            require(not values.keys() & {*node.output}, "structure", f"{list(node.output)} are defined twice")
            try:
                results = [r if r is None else widen(r, exact=self.exact) for r in self.compute(node, opset, inputs)]
            except (MemoryError, RecursionError, Refusal, Rejection, Undefined):
                raise
            except Exception as error:
                raise Undefined(f"{node.op_type}: {type(error).__name__}: {error}") from None
            require(not any(node.output[len(results) :]), "structure", f"{node.output[-1]} is no output")
            values |= {n: r for n, r in zip(node.output, results, strict=False) if n}
        return values

    def compute(self, node: NodeProto, opset: int, inputs: list[Any]) -> list[Any]:
        if (function := self.functions.get((node.domain, node.op_type, node.overload))) is not None:
            call = {a.name: a for a in (*function.attribute_proto, *node.attribute)}
            values = dict.fromkeys(function.input) | dict(zip(function.input, inputs, strict=False))
            values = self.run([(bind(n, call), opset_of(function)) for n in function.node], values)
            return [values[name] for name in function.output]
        op, attributes = node.op_type.replace("SimplifiedLayer", "RMS"), attributes_of(node)
        known = node.domain in STANDARD or (node.domain, op) == ("com.microsoft", "RMSNormalization")
        require(known, "structure", f"{node.domain}.{op}, which computes {node.output[0]}, has no definition")
        x: Any = inputs[0] if inputs else None
        if op in ("Cast", "CastLike"):
            like = inputs[1].dtype if op == "CastLike" else numpy_type(attributes["to"])
            if "float" in like.name or like.kind == "O":
                return [x if x.dtype.kind in "Of" else x.astype(float)]
            return [(x if like.kind == "b" else x.astype(np.int64)).astype(like)]
        if op == "Dropout" or x is None or x.dtype.kind not in "Of":
            return [x] if op == "Dropout" else reference(node, opset, inputs)
        if op in PRODUCTS and (op != "Einsum" or len(inputs) == 2):
            return [self.product(node, opset, inputs, attributes)]
        if op.removesuffix("Normalization") in NORMS:
            return self.norm(node, op.removesuffix("Normalization"), inputs, attributes)
        if op == "Softmax" and opset < 13:
            rows = x.reshape(*x.shape[: next((a.i for a in node.attribute), 1)], -1)
            return [reference(NodeProto(op_type=op, output=node.output), 13, [rows])[0].reshape(x.shape)]
        if op == "Swish":
            sigmoid = NodeProto(op_type="Sigmoid", output=node.output)
            return [x * self.compute(sigmoid, opset, [x * self.number(attributes["alpha"])])[0]]
        if op in ("Sqrt", "Pow"):
            return [np.sqrt(x) if op == "Sqrt" else np.power(*inputs)]
        if op in UNKNOWN and self.exact:
            return [self.unknown(op, attributes, x)]
        results = reference(node, opset, inputs)
        rounded = self.exact and any(isinstance(v, float | np.floating) for r in results for v in np.ravel(r))
        require(not rounded, "structure", f"{op}, which computes {node.output[0]}, is not exact")
        return results

    def unknown(self, op: str, attributes: dict[str, Any], x: Array) -> Array:
        """Return random numbers, which are equal for elements that are equal up to rounding."""

        def draw(v: Decimal) -> Decimal:
            # The random shift moves numbers that have few digits away from the borders between two rounded numbers.
            rounded = (v + self.shift).quantize(Decimal("1e-20"))
            text = repr((op, sorted(attributes.items()), rounded)).encode()
            number = int.from_bytes(hashlib.blake2b(text, key=self.key, digest_size=8).digest())
            return Decimal(number).scaleb(-19) if rounded.is_finite() else rounded

        return np.asarray(np.frompyfunc(draw, 1, 1)(x), object)

    def contract(self, product: Callable[[Array, Array], Array], x: Array, y: Array) -> Array:
        """Compute sums of products: of Decimals in pieces of 16 bits, whose products float64 adds exactly."""
        if not self.exact:
            return product(x, y)
        pieces, total, unit = list[Any](), Decimal(0), Decimal(1)
        for factor in (x, y):
            finite = is_finite(factor).astype(bool)
            numbers = np.where(finite, factor, 0)
            scale = Decimal(2) ** 126 / (magnitude(numbers) or 1)
            unit /= scale
            integers = np.frompyfunc(lambda v, s=scale: int(v * s), 1, 1)(numbers)
            bits = [integers >> k & 0xFFFF for k in range(0, 112, 16)] + [integers >> 112]
            pieces.append([np.where(finite, b, math.nan).astype(float) for b in bits])
        for k in range(7, 15):
            digit = sum(product(pieces[0][i], pieces[1][k - i]) for i in range(k - 7, 8))
            total = total + to_decimals(digit) * Decimal(2) ** (16 * k)
        return np.asarray(total * unit, object)

    def product(self, node: NodeProto, opset: int, inputs: list[Any], attributes: dict[str, Any]) -> Array:
        """Compute MatMul, Einsum, Gemm, Conv and ConvTranspose."""
        op, (x, weight, bias) = node.op_type, [*inputs, None][:3]
        groups = attributes["group"] if op == "ConvTranspose" else 1
        # The evaluator is wrong for several groups of a ConvTranspose, and multiplies by alpha and beta in float64.
        left = {"Gemm": ("alpha", "beta"), "ConvTranspose": ("group",)}.get(op, ())
        node = NodeProto(op_type=op, output=node.output, attribute=[a for a in node.attribute if a.name not in left])
        pairs = [(x, weight)] if groups == 1 else zip(np.split(x, groups, 1), np.split(weight, groups), strict=True)
        parts = [self.contract(lambda a, b: reference(node, opset, [a, b])[0], *pair) for pair in pairs]
        result = (parts[0] if groups == 1 else np.concatenate(parts, axis=1)) * self.number(attributes.get("alpha", 1))
        if bias is not None and op != "Gemm":
            bias = bias.reshape(-1, *[1] * (x.ndim - 2))
        return result if bias is None else result + bias * self.number(attributes.get("beta", 1))

    def norm(self, node: NodeProto, kind: str, inputs: list[Any], attributes: dict[str, Any]) -> list[Any]:
        """Compute the norms of the standard: (x − center)/√(variance + ε)·scale + bias."""
        x, scale, bias = [*inputs, None, None][:3]
        along = (-1, *[1] * (x.ndim - 2))
        rows = x.reshape(x.shape[0], attributes["num_groups"], -1) if kind == "Group" else x
        if kind == "Batch":
            require(not attributes["training_mode"], "structure", f"{node.output[0]} is computed in training mode")
            center, variance = (p.reshape(along) for p in inputs[3:5])
        else:
            first = 2 if kind in ("Instance", "Group") else attributes.get("axis", -1) % rows.ndim
            axes = tuple(attributes["axes"] if kind == "MeanVariance" else range(first, rows.ndim))
            center = 0 if kind == "RMS" else rows.mean(axis=axes, keepdims=True)
            variance = ((rows - center) * (rows - center)).mean(axis=axes, keepdims=True)
        epsilon = self.number(self.epsilons.get(id(node), attributes.get("epsilon", 0)))
        outside = self.number(float(np.float32(1e-9)) if kind == "MeanVariance" else 0)
        inverse = 1 / (np.sqrt(variance + epsilon) + outside)
        normal = ((rows - center) * inverse).reshape(x.shape)
        if kind in ("Batch", "Instance", "Group"):
            # Until opset 20, a GroupNormalization has one scale for each group.
            scale, bias = (p.repeat(x.shape[1] // p.size).reshape(along) for p in (scale, bias))
        normal = normal if scale is None else normal * scale
        return [normal if bias is None else normal + bias, center, inverse][: 3 if kind == "Layer" else 1]


@dataclass
class Comparison:
    """Compare both sides of a rewrite at random points. ``sides``: nodes and constants."""

    mode: str
    before: GraphProto
    sides: list[tuple[list[tuple[NodeProto, int]], dict[str, Array]]]
    evaluator: Evaluator

    def check(self) -> str:
        """Compare at two choices of sizes, or at one if all sizes are fixed. Returns: the sizes."""
        reason, compared = "", []
        for attempt in range(40):
            sizes: dict[str, int] = {}
            try:
                shapes = self.choose_shapes(attempt, sizes)
                if sizes not in compared:
                    self.compare(shapes)
                    compared.append(sizes)
            except Undefined as error:
                reason = f" ({error})"
            if len(compared) == 2 or not sizes:
                break
        require(compared, "equal", f"found no sizes at which both sides are defined{reason}")
        return " and ".join(str(sizes) if sizes else "fixed" for sizes in compared)

    def choose_shapes(self, attempt: int, sizes: dict[str, int]) -> dict[str, list[int]]:
        """Choose a size for each symbol: distinct small sizes, then random ones. Returns: the shapes of the leaves."""

        def choose(factor: str) -> int:
            if factor.lstrip("-").isdigit():
                return int(factor)
            drawn = int(self.evaluator.rng.integers(1, 2 ** (attempt // 8 + 1) + 1))
            return sizes.setdefault(factor, drawn if attempt else 2 + len(sizes) % 3)

        shapes = {}
        for leaf in self.before.input:
            texts = [f"{leaf.name}:{i}" for i in range((3, 4, 2, 1, 5)[attempt % 5])]
            if leaf.type.tensor_type.HasField("shape"):
                texts = [d.dim_param or str(d.dim_value) for d in leaf.type.tensor_type.shape.dim]
            # A size is a sum of products, such as 2*n*n+-1.
            sums = ((math.prod(map(choose, term.split("*"))) for term in text.split("+")) for text in texts)
            shapes[leaf.name] = [sum(products) for products in sums]
        if any(n < 1 for shape in shapes.values() for n in shape):
            raise Undefined("a leaf has no elements")
        return shapes

    def compare(self, shapes: dict[str, list[int]]) -> None:
        """Draw leaves until each element was compared at a point where the side before is finite."""
        points: dict[str, list[tuple[Array, Array]]] = {output.name: [] for output in self.before.output}
        compared: dict[str, Any] = dict.fromkeys(points, False)
        for draw in range(10):
            leaves = {i.name: self.evaluator.draw_leaf(i, shapes[i.name], draw) for i in self.before.input}
            before, after = (self.evaluator.run(nodes, constants | leaves) for nodes, constants in self.sides)
            for name, pairs in points.items():
                shown = f"tensor {name} has the shapes {before[name].shape} and {after[name].shape}"
                require(before[name].shape == after[name].shape, "shape", shown)
                pairs.append((np.atleast_1d(before[name]) * 1, np.atleast_1d(after[name]) * 1))
                if self.mode != "affine" or draw >= 2:
                    compared[name] = compared[name] | self.compare_points(name, pairs)
            if draw >= (2 if self.mode == "exact" else 3) and all(np.all(mask) for mask in compared.values()):
                return
        raise Undefined("an element of a result is finite at no point")

    def compare_points(self, name: str, points: list[tuple[Array, Array]]) -> Any:
        """Compare a result at the last point; a huge element hides no other. Returns: True for compared elements."""
        before, after = points[-1]
        finite = is_finite(before).astype(bool)
        undefined, largest = before != before, magnitude(np.where(finite, before, 0))
        limit = min(largest * BOUNDS[self.mode], 1e-3 if self.mode == "numeric" else Decimal("1e-12"))
        near = abs(before - after) <= np.maximum(np.where(finite, abs(before), 0) * BOUNDS[self.mode], limit)
        if self.mode == "numeric":
            undefined, finite = undefined & (after != after), finite | True
        if self.mode == "affine":
            # Rounded constants scale and move an element, so its last points are on a line b = A·a + B.
            arrays = [array for pair in points[-3:] for array in pair]
            lost = finite & (after != after)
            finite = np.logical_and.reduce([is_finite(array).astype(bool) for array in arrays])
            undefined, largest = ~(finite | lost), np.maximum.reduce([np.where(finite, abs(a), 0) for a in arrays])
            (b1, a1), (b2, a2) = points[-3:-1]
            line = abs((b1 - before) * (a2 - after) - (b2 - before) * (a1 - after)) <= largest**2 * BOUNDS["exact"]
            near = line & (abs(before - after) <= largest * BOUNDS["affine"])
        wrong = ~(near | (before == after) | undefined)
        if np.any(wrong):
            place = tuple(np.argwhere(wrong)[0].tolist())
            values = f"{before[place]:.12g} before and {after[place]:.12g} after"
            raise Rejection("equal", f"element {list(place)} of tensor {name} is {values}")
        return finite


@dataclass
class Scope:
    """One graph or function body of a model: its nodes by their outputs, and the tensors that they can read."""

    opset: int
    nodes: dict[str, NodeProto]
    constants: dict[str, TensorProto]
    visible: dict[str, NodeProto]

    def origin(self, name: str) -> str:
        """Follow a tensor back to one with the same elements."""
        node = self.visible.get(name, NodeProto())
        return self.origin(node.input[0]) if node.op_type in PASSING and node.domain in STANDARD else name


def scopes_of(opset: int, nodes: Any, constants: dict[str, TensorProto], around: dict[str, Any]) -> Iterator[Scope]:
    """Yield the scope of these nodes, and those of the bodies inside. ``around``: nodes outside, by their outputs."""
    stored = [n for n in nodes if n.op_type == "Constant" and n.domain in STANDARD]
    constants = constants | {n.output[0]: a.t for n in stored for a in n.attribute if a.name == "value"}
    own = {o: n for n in nodes for o in n.output if o}
    yield Scope(opset, own, constants, around | own)
    for graph in (g for n in nodes for a in n.attribute for g in (a.g, *a.graphs) if g.node):
        inner = constants | {t.name: t for t in graph.initializer}
        yield from scopes_of(opset, graph.node, inner, around | own)


def from_json(raw: Any, proto: Any) -> Any:
    """Read ONNX's own JSON form of a graph, a node or a tensor."""
    return registry.get("json").deserialize_proto(json.dumps(raw), proto)


def read_bytes(path: Path, digest: str = "") -> bytes:
    """Read a file with this SHA-256."""
    if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
        raise Refusal(f"{path} is not a file of at most {MAX_FILE_BYTES >> 30} GiB")
    content = path.read_bytes()
    actual = hashlib.sha256(content).hexdigest()
    require(digest in ("", actual), "hash", f"{path.name} has the SHA-256 {actual}, not {digest}")
    return content


def read_certificate(path: Path) -> Any:
    """Read a JSON object. An object that has a key twice is nothing, and NaN is no number."""
    rule = json.JSONDecoder(object_pairs_hook=lambda p: dict(p) if len(dict(p)) == len(p) else None, parse_constant=int)
    try:
        return {**rule.decode(read_bytes(path).decode())}
    except (ValueError, TypeError, RecursionError) as error:
        raise Refusal(f"{path} is not a JSON file with an object: {error}") from None


def read_model(path: Path, digest: str, data: dict[str, str] | None = None) -> onnx.ModelProto:
    """Read an ONNX file with this SHA-256, and its external data. ``data``: the SHA-256 of each of its data files."""
    content = read_bytes(path, digest)
    try:
        model = onnx.ModelProto.FromString(content)
    except Exception as error:
        raise Refusal(f"{path} is not an ONNX model: {error}") from None
    locations = {e.value for t in _get_all_tensors(model) for e in t.external_data if e.key == "location"}
    require(data is None or locations == {*data}, "hash", f"the model has the external data {sorted(locations)}")
    for location in locations:
        read_bytes(path.parent / location, (data or {}).get(location, ""))
    onnx.load_external_data_for_model(model, str(path.parent))
    return model


@contextmanager
def located(where: str, claim: str = "structure") -> Iterator[None]:
    """Name the place in the certificate at which a claim fails. ``claim``: the one that fails by a wrong field."""
    try:
        yield
    except Rejection as error:
        raise Rejection(error.args[0], f"{where}: {error.args[1]}") from None
    except (MemoryError, RecursionError, OSError, Refusal):
        raise
    except Exception as error:
        raise Rejection(claim, f"{where}: a field is missing or wrong ({type(error).__name__}: {error})") from None


class Checker:
    """Check the claims of one certificate."""

    def __init__(self, certificate: Path, model: Path, source: Path | None, rng: np.random.Generator) -> None:
        raw = self.raw = read_certificate(certificate)
        require(raw["schema"] == SCHEMA, "structure", f"its schema is {raw['schema']}, but this program reads {SCHEMA}")
        self.rng, self.source_opset, self.source = rng, raw["source"]["opset"], source
        theirs = read_model(source, raw["source"]["sha256"]) if source else onnx.ModelProto()
        self.originals = {n.output[0]: bind(n, {}) for n in theirs.graph.node if opset_of(theirs) == self.source_opset}
        self.held = next(scopes_of(0, theirs.graph.node, {t.name: t for t in theirs.graph.initializer}, {})).constants
        self.model = read_model(model, raw["model"]["sha256"], raw["model"]["data"])
        self.functions = {(f.domain, f.name, f.overload): f for f in self.model.functions}
        # Since IR version 4, a caller may replace an initializer that is an input.
        self.inputs = {i.name: i.type.tensor_type for i in self.model.graph.input}
        given = self.inputs if self.model.ir_version >= 4 else ()
        initializers = {t.name: t for t in self.model.graph.initializer if t.name not in given}
        self.scopes = list(scopes_of(opset_of(self.model), self.model.graph.node, initializers, {}))
        self.bodies = len(self.scopes)
        self.scopes += [scope for f in self.model.functions for scope in scopes_of(opset_of(f), f.node, {}, {})]
        self.counts, self.covered = Counter[str](), set[int]()
        # By the id of the node and name: leaves, and tensors of the model that equal no tensor of the source
        self.leaves, self.new, self.arrays = set[Any](), set[Any](), dict[str, Array]()
        for digest, entry in raw["constants"].items():
            with located(f"constant {digest}", "constants"):
                tensor = initializers[entry] if isinstance(entry, str) else from_json(entry, TensorProto())
                array = self.arrays[digest] = numpy_helper.to_array(tensor)
                head = json.dumps([array.dtype.name, list(array.shape)]).encode()
                actual = hashlib.sha256(head + array.tobytes()).hexdigest()
                require(actual == digest, "constants", f"its type, shape and elements have the SHA-256 {actual}")

    def check(self) -> str:
        """Check all claims. Returns: a description of the checks and their limits."""
        redefined = [f.name for f in self.model.functions if f.domain in STANDARD]
        require(not redefined, "structure", f"the model redefines the standard ops {redefined}")
        lines = []
        for index, rewrite in enumerate(self.raw["rewrites"]):
            with located(f"rewrite {index}"):
                require(rewrite["mode"] in (*BOUNDS, "none"), "structure", f"the mode is {rewrite['mode']}")
                self.counts[rewrite["mode"]] += 1
                if rewrite["mode"] != "none":
                    lines.append(f"rewrite {index}: compared {self.check_rewrite(rewrite)}")
        mixed = self.leaves & self.new
        require(not mixed, "final", f"a rewrite computes the leaves {sorted(n for _, n in mixed)} of another one anew")
        exact, affine, tested, none = (self.counts.pop(mode, 0) for mode in (*BOUNDS, "none"))
        self.counts["nodes outside of every rewrite"] = len({*map(id, self.scopes[0].nodes.values())} - self.covered)
        others = "; ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()) if count)
        compared = "not given, so not covered" if self.source is None else "nodes and constants compared with it"
        proved = f"{exact + affine} rewrites proved ({exact} exact, {affine} affine)"
        lines.insert(0, f"accepted: {proved}, {tested} tested (numeric)\nrewrites not covered: {none} none")
        lines.insert(1, f"nodes covered: {len(self.covered)}; not covered: {others or 'none'}")
        lines.append(f"sizes: only the listed ones; source: {compared}; NaN, Inf, rounding and overflow: not covered")
        return "\n".join(lines)

    def check_rewrite(self, rewrite: Any) -> str:
        """Check the claims of a rewrite. Returns: a description of the comparison."""
        index, before = rewrite["scope"], from_json(rewrite["before"], GraphProto())
        require(before.output and index in range(len(self.scopes)), "final", f"there is no result or scope {index}")
        scope, leaves, outputs = self.scopes[index], [i.name for i in before.input], [o.name for o in before.output]
        require(not {*leaves} & {*outputs}, "structure", "a result is a leaf")
        self.check_leaves(before.input, self.inputs if index == 0 else {})
        nodes = self.find_nodes(scope, outputs, [*leaves, *rewrite["replaced"]])
        for name, leaf in rewrite["replaced"].items():
            # The cleanup may read another tensor with the same elements in place of a leaf.
            present = (scope.visible, scope.constants, self.inputs, *(node.input for node in scope.nodes.values()))
            gone = not any(leaf in names for names in present)
            require(gone or scope.origin(leaf) == scope.origin(name), "final", f"the model reads {name} for {leaf}")
            nodes.insert(0, (helper.make_node("Identity", [leaf], [name]), scope.opset))
            self.counts["inputs that the cleanup replaced"] += 1
        read = scope.constants.keys() & {*outputs, *(name for node, _ in nodes for name in node.input)}
        constants = {name: numpy_helper.to_array(scope.constants[name]) for name in read}
        self.leaves |= {(id(scope.visible[name]), name) for name in leaves if name in scope.visible}
        self.new |= {(id(node), name) for node, _ in nodes for name in node.output if name not in outputs}
        self.counts["constants that are computed"] += len(rewrite["computed"])
        exact, floats = (Evaluator(self.rng, self.functions, exact=e) for e in (True, False))
        evaluator = floats if rewrite["mode"] == "numeric" else exact
        epsilons = {name: Decimal(p) / Decimal(q) for name, (p, q) in rewrite["epsilons"].items()}
        evaluator.epsilons = {id(node): epsilons[node.output[0]] for node, _ in nodes if node.output[0] in epsilons}
        keys, graph = rewrite["constants"], from_json(rewrite["exact"], GraphProto())
        given, own = ({n: self.arrays[k] for n, k in keys[s].items()} for s in ("before", "exact"))
        other: list[Any] = [n for n in before.node if self.originals.get(n.output[0]) != bind(n, {})]
        other += given.keys() - self.held - {*rewrite["computed"]}
        self.counts["nodes and constants that are not in the source file"] += len(other) if self.source else 0
        for name, array in ((n, numpy_helper.to_array(self.held[n])) for n in given.keys() & self.held if not index):
            same = np.array_equal(array, given[name]) or array.tobytes() == given[name].tobytes()
            require(same, "constants", f"{name} has other elements in the source file")
        # A node of `exact` may state its opset, as the result needs no trust.
        steps = [(n, next((int(p.value) for p in n.metadata_props), self.source_opset)) for n in graph.node]
        inner = exact.run(steps, {n: widen(a, exact=True) for n, a in (given | own).items()})
        results = {name: inner[tensor] for name, tensor in rewrite["results"].items()}
        opset = self.source_opset if index < self.bodies else scope.opset
        sides = [([(n, opset) for n in before.node], given), (nodes, constants | results)]
        wide = [(n, {k: widen(a, exact=evaluator.exact) for k, a in c.items()}) for n, c in sides]
        sizes = Comparison(rewrite["mode"], before, wide, evaluator).check()
        largest = max([magnitude(a) for a in inner.values() if a.dtype == object], default=0)
        for name, tensor in rewrite["results"].items():
            slack = SLACK * min(largest, 1024 * magnitude(results[name]))
            self.check_stored(name, constants[name], results[name], 0 if tensor in own else slack)
        stored = {node.output[0]: np.float32(attributes_of(node).get("epsilon", 0)) for node, _ in nodes}
        for name, epsilon in epsilons.items():
            self.check_stored(name, stored[name], epsilon, 0)
        return f"{'with 60 digits' if evaluator is exact else 'in float64'}, sizes {sizes}"

    @staticmethod
    def check_stored(name: str, rounded: Any, exact: Any, slack: Any) -> None:
        """Check that a constant or an epsilon is its exact value, rounded once."""
        ulp, stored = (widen(a, exact=True) for a in (np.spacing(np.abs(rounded)), rounded))
        same = rounded.shape == np.shape(exact) and np.all(abs(stored - exact) <= ulp / 2 + slack)
        claim = "epsilon" if isinstance(exact, Decimal) else "stored"
        require(same, claim, f"the number {name} is not its exact value rounded once")

    def find_nodes(self, scope: Scope, outputs: list[str], leaves: list[str]) -> list[tuple[NodeProto, int]]:
        """Return the nodes of the model that compute the results from leaves and constants."""
        needed, pending = set[int](), [*outputs]
        while pending:
            name = pending.pop()
            if name and name not in leaves and name not in scope.constants:
                require(name in scope.nodes, "final", f"the model has no node that computes {name}, which is no leaf")
                pending += scope.nodes[name].input if id(scope.nodes[name]) not in needed else []
                needed.add(id(scope.nodes[name]))
        self.covered |= needed
        return [(n, scope.opset) for key, n in {id(n): n for n in scope.nodes.values()}.items() if key in needed]

    def check_leaves(self, leaves: Any, inputs: dict[str, Any]) -> None:
        """Compare leaves with the inputs of the model. Equal symbols are equal sizes of the inputs."""
        symbols: dict[str, Any] = {}
        for leaf in leaves:
            ours, theirs = leaf.type.tensor_type, inputs.get(leaf.name)
            self.counts["integer leaves, tried only at 0 and 1"] += "int" in numpy_type(ours.elem_type or 1).name
            if theirs is None:
                self.counts["leaves whose sizes the model does not state"] += any(d.dim_value for d in ours.shape.dim)
                continue
            same = ours.elem_type in (theirs.elem_type, 0 if "float" in numpy_type(theirs.elem_type).name else None)
            same = same and len({len(t.shape.dim) for t in (ours, theirs) if t.HasField("shape")}) < 2
            for i, (d, e) in enumerate(zip(ours.shape.dim, theirs.shape.dim, strict=False)):
                size = e.dim_param or e.dim_value or (leaf.name, i)
                equal = symbols.setdefault(d.dim_param, size) == size
                equal = equal and (d.dim_param == size or not {*d.dim_param} & {*"*+"})
                same = same and (d.dim_value == e.dim_value if d.dim_value else equal)
            require(same, "structure", f"leaf {leaf.name} has another type or shape than the input of the model")


def stop(signum: int, frame: object) -> None:
    raise Refusal("the time limit is reached; raise it with --seconds")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="normdeploy_check", description=__doc__.splitlines()[0])
    parser.add_argument("certificate", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("source", type=Path, nargs="?", help="the file from which the model was made")
    parser.add_argument("--seed", type=int, help="repeat a run; the default is the system's generator")
    parser.add_argument("--seconds", type=int, default=900, help="time limit")
    parser.add_argument("--gigabytes", type=int, default=12, help="memory limit")
    options = parser.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_AS, (options.gigabytes << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGALRM, stop)
    # The signal repeats, because code that is called may catch the exception.
    signal.setitimer(signal.ITIMER_REAL, options.seconds, 10)
    try:
        rng = np.random.default_rng(options.seed)
        with np.errstate(all="ignore"), decimal.localcontext(CONTEXT), located("the file"):
            code, text = 0, Checker(options.certificate, options.model, options.source, rng).check()
    except Rejection as error:
        code, text = 1, f"rejected: claim {error.args[0]} fails, {error.args[1]}"
    except MemoryError:
        code, text = 2, "refused: the memory limit is reached; raise it with --gigabytes"
    except (Refusal, OSError, RecursionError) as error:
        code, text = 2, f"refused: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    print(text.replace("\n", " ") if code else text, flush=True)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
