"""Write the certificate file of a converted model: every rewrite with both sides, so that a stranger can check it.

docs/reference/certificate-format.md defines each field. The document has no times, paths or random numbers, so the same
model, options and versions give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import onnx

from ..findings.records import Finding
from ..graphs.dims import dim_size
from ..graphs.symbolic_sizes import UNKNOWN, Size
from ..norms.function_bodies import norm_function_body
from ..norms.norm_table import STANDARD as STANDARD_NORMS
from ..norms.third_party import function_op_row
from ..storage.onnx_domains import STANDARD, is_standard
from ..storage.shared_weights import tensor_array
from ..version import __version__
from .rewrite_records import RecordedConstant, RecordedNode, RecordedSide, RewriteRecord

SCHEMA = "normdeploy/rewrites/1"

ALGEBRAIC = frozenset(
    {
        *("Add", "Concat", "Constant", "ConstantOfShape", "Conv", "ConvTranspose", "Div", "Dropout", "Einsum"),
        *("Expand", "Flatten", "Gemm", "GlobalAveragePool", "Identity", "MatMul", "Mean", "Mul", "Neg", "Pow"),
        *("Reciprocal", "ReduceL2", "ReduceMean", "ReduceSum", "ReduceSumSquare", "Reshape", "Slice", "Split", "Sqrt"),
        *("Squeeze", "Sub", "Sum", "Tile", "Transpose", "Unsqueeze", "SimplifiedLayerNormalization"),
        *(STANDARD_NORMS.keys() - {"LRN", "LpNormalization"}),
    }
)
"""Ops with a definition in the prime field."""

OPAQUE = frozenset({"Sigmoid", "Tanh", "Erf", "Softplus", "HardSigmoid", "Gelu", "Swish", "Softmax"})
"""Ops that are unknown functions of their argument in the prime field."""

# Epsilons are computed as quotients in float64.
_SOLVED = 2.0**-38
_MOST_TERMS = 2**16
# Largest difference of the two sides of a numeric claim, relative to the largest element before the rewrite
NUMERIC_BOUND = 2.0**-16
# Largest relative difference of the two sides of an affine claim in float64
AFFINE_BOUND = 2.0**-30
# Relative error of a float64 computation of an expression, beside the rounding to the stored type
EXPRESSION_BOUND = 2.0**-40
# Ops on sizes in the bodies of own ops
_SIZES = frozenset({"Shape", "Size", "Gather", "Cast", "CastLike", "Range", "ReduceProd"})
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
_FLOAT_TYPES = frozenset(
    {
        onnx.TensorProto.DOUBLE,
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.FLOAT16,
        onnx.TensorProto.BFLOAT16,
    }
)


@dataclass(frozen=True)
class CertifiedFile:
    """Written file that a certificate belongs to.

    Attributes:
        proto: the written model.
        digest: SHA-256 of the file.
        data: SHA-256 of each file of external data, by its location.
        source: SHA-256 of the ONNX file that was optimized; None after an export.
        source_opset: opset of the graph that the first rewrite changed.
    """

    proto: onnx.ModelProto
    digest: str
    data: Mapping[str, str] = field(default_factory=dict)
    source: str | None = None
    source_opset: int = 0


def certificate_bytes(file: CertifiedFile, records: Sequence[RewriteRecord], findings: Sequence[Finding]) -> bytes:
    """Serialize the certificate of a written file.

    Returns:
        JSON with sorted keys, in UTF-8, with a line break at the end.
    """
    document = _DocumentWriter(file).write(records, findings)
    return (json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


@dataclass
class _FinalNode:
    """Node of the written file, with the constants that it can read."""

    proto: onnx.NodeProto
    constants: Mapping[str, onnx.TensorProto]
    used: bool = False


class _DocumentWriter:
    """State of one document: the table of constants, and the nodes of the written file."""

    def __init__(self, file: CertifiedFile) -> None:
        self.file = file
        self.constants: list[dict[str, Any]] = []
        self._keys: dict[tuple[str, tuple[int, ...], str], str] = {}
        self._initializers = {
            _array_key(array): t.name
            for t in reversed(file.proto.graph.initializer)
            if (array := _initializer_array(t)) is not None
        }
        self._final = list(_iter_final_nodes(file.proto))
        self._final_by_output = {o: n for n in self._final for o in n.proto.output if o}
        # Rewrite that wrote a tensor, by (place, name)
        self._writers: dict[tuple[str, str], int] = {}

    def write(self, records: Sequence[RewriteRecord], findings: Sequence[Finding]) -> dict[str, Any]:
        rewrites = [self._describe_rewrite(i, record) for i, record in enumerate(records)]
        self._tie_to_file(records, rewrites)
        functions = [self._describe_function(f, in_file=in_file) for f, in_file in self._called_functions(records)]
        return {
            "schema": SCHEMA,
            "normdeploy": __version__,
            "model": {"sha256": self.file.digest, "data": dict(self.file.data)},
            "source": {"sha256": self.file.source, "opset": self.file.source_opset},
            "bounds": {"numeric": NUMERIC_BOUND, "affine": AFFINE_BOUND, "expression": EXPRESSION_BOUND},
            "constants": {f"k{i}": c for i, c in enumerate(self.constants)},
            "functions": functions,
            "rewrites": rewrites,
            "findings": [_describe_finding(f) for f in findings if f.status in ("fused", "folded")],
        }

    # ------------------------------------------------------------------ one rewrite

    def _describe_rewrite(self, index: int, record: RewriteRecord) -> dict[str, Any]:
        mode, reason = choose_mode(record)
        epsilons = _exact_epsilons(record) if mode == "affine" else {}
        if epsilons is None:
            mode, reason, epsilons = "numeric", "its exact epsilon is not a simple fraction of an epsilon before", {}
        told: dict[str, Any] = {
            "index": index,
            "place": record.place,
            "stage": record.stage,
            "kind": record.kind,
            "tensor": record.tensor,
            "became": record.became,
            "mode": mode,
            "reason": reason,
            "converted": record.converted,
            "proof": _describe_proof(record),
        }
        own = {o for node in record.after.nodes for o in node.proto.output} if record.after is not None else set()
        if mode == "none" or record.before is None or record.after is None:
            told |= {"claims": [], "writes": sorted({*record.writes, *own} - {""})}
            self._writers.update({(record.place, name): index for name in told["writes"]})
            return told
        told["writes"] = sorted(set(record.writes) - own)
        told["leaves"] = [
            {
                "name": leaf.name,
                "dtype": leaf.dtype,
                "shape": _describe_dims(leaf.name, leaf.dims),
                "only_shape": leaf.only_shape,
            }
            for leaf in record.leaves
        ]
        told["before"] = self._describe_side(record.before)
        for node in told["before"]["nodes"]:
            written = [self._writers.get((record.place, o)) for o in node["outputs"] if o]
            node["from"] = next((j for j in written if j is not None), None)
        told["after"] = self._describe_side(record.after)
        if mode == "expressions":
            assert record.expressions is not None
            told["expressions"] = {
                "nodes": [self._describe_node(proto, opset) for proto, opset in record.expressions.nodes],
                "constants": {name: {"value": self._store(v)} for name, v in record.expressions.constants.items()},
                "results": dict(record.expressions.results),
            }
        told["epsilons"] = {
            name: {"numerator": str(exact.numerator), "denominator": str(exact.denominator)}
            for name, exact in epsilons.items()
        }
        told["facts"] = _list_facts(record)
        told["claims"] = _list_claims(record, mode, epsilons)
        self._writers.update({(record.place, name): index for name in (*told["writes"], *own)})
        return told

    def _describe_side(self, side: RecordedSide) -> dict[str, Any]:
        return {
            "nodes": [self._describe_node(n.proto, n.opset) for n in side.nodes],
            "constants": {name: self._describe_constant(c) for name, c in side.constants.items()},
            "outputs": list(side.outputs),
        }

    def _describe_constant(self, constant: RecordedConstant) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if constant.value is not None:
            told["value"] = self._store(constant.value)
        if constant.rounded is not None:
            told["rounded"] = self._store(constant.rounded)
        if constant.computed:
            told["computed"] = True
        return told

    def _describe_node(self, proto: onnx.NodeProto, opset: int) -> dict[str, Any]:
        return {
            "op": proto.op_type,
            "domain": _normalize_domain(proto.domain),
            "opset": opset,
            "inputs": list(proto.input),
            "outputs": list(proto.output),
            "attributes": {a.name: self._describe_attribute(a) for a in proto.attribute},
        }

    def _describe_attribute(self, a: onnx.AttributeProto) -> dict[str, Any]:
        if a.ref_attr_name:
            return {"type": "reference", "value": a.ref_attr_name}
        if a.type == onnx.AttributeProto.TENSOR:
            return {"type": "tensor", "value": self._store(tensor_array(a.t))}
        value = onnx.helper.get_attribute_value(a)
        kind = onnx.AttributeProto.AttributeType.Name(a.type).lower()
        if kind == "float":
            return {"type": kind, "value": _describe_float(value)}
        if kind == "floats":
            return {"type": kind, "value": [_describe_float(v) for v in value]}
        if kind == "string":
            return {"type": kind, "value": value.decode()}
        if kind == "strings":
            return {"type": kind, "value": [v.decode() for v in value]}
        if kind in ("int", "ints"):
            return {"type": kind, "value": list(value) if kind == "ints" else int(value)}
        return {"type": "other", "value": hashlib.sha256(a.SerializeToString(deterministic=True)).hexdigest()}

    def _called_functions(self, records: Sequence[RewriteRecord]) -> Iterator[tuple[onnx.FunctionProto, bool]]:
        """Yield the functions that a rewrite calls, and True for those in the written file."""
        stored = {(f.domain, f.name): f for f in self.file.proto.functions}
        calls = {(n.proto.domain, n.proto.op_type): n.opset for r in records for n in r.nodes}
        for (domain, op), opset in sorted(calls.items()):
            row = function_op_row(domain, op)
            if row is None:
                continue
            known = stored.get((domain, op))
            yield known or norm_function_body(row, max(opset, row.since)), known is not None

    def _describe_function(self, f: onnx.FunctionProto, *, in_file: bool) -> dict[str, Any]:
        opset = next((o.version for o in f.opset_import if o.domain in STANDARD), 0)
        return {
            "in_file": in_file,
            "name": f.name,
            "domain": f.domain,
            "inputs": list(f.input),
            "outputs": list(f.output),
            "attributes": list(f.attribute),
            "defaults": {a.name: self._describe_attribute(a) for a in f.attribute_proto},
            "nodes": [self._describe_node(n, opset) for n in f.node],
        }

    # ------------------------------------------------------------------ constants

    def _store(self, array: np.ndarray) -> str:
        """Add an array to the table of constants. Returns its key; equal arrays have one key."""
        key = _array_key(array)
        known = self._keys.get(key)
        if known is not None:
            return known
        dtype, shape, digest = key
        entry: dict[str, Any] = {"dtype": dtype, "shape": list(shape), "sha256": digest}
        name = self._initializers.get(key)
        if name is not None and array.size > _INLINE:
            entry["initializer"] = name
        else:
            entry["data"] = base64.b64encode(_little_endian(array)).decode()
        made = self._keys[key] = f"k{len(self.constants)}"
        self.constants.append(entry)
        return made

    # ------------------------------------------------------------------ the written file

    def _tie_to_file(self, records: Sequence[RewriteRecord], rewrites: Sequence[dict[str, Any]]) -> None:
        """Tell where each node after a rewrite is: in the file, in a later rewrite, or changed by the cleanup."""
        readers: dict[tuple[str, str], list[int]] = {}
        for j, record in enumerate(records):
            if record.before is not None and "before" in rewrites[j]:
                for node in record.before.nodes:
                    for output in node.proto.output:
                        readers.setdefault((record.place, output), []).append(j)
        for i, (record, told) in enumerate(zip(records, rewrites, strict=True)):
            if record.after is None or "after" not in told:
                continue
            for node, described in zip(record.after.nodes, told["after"]["nodes"], strict=True):
                described["final"] = self._locate_node(record.after, node, exactly=True)
                later = next((j for j in readers.get((record.place, node.proto.output[0]), ()) if j > i), None)
                if described["final"] is None and later is not None:
                    described["final"] = {"where": "rewrite", "index": later}
        for record, told in zip(records, rewrites, strict=True):
            if record.after is None or "after" not in told:
                continue
            for node, described in zip(record.after.nodes, told["after"]["nodes"], strict=True):
                if described["final"] is None:
                    described["final"] = self._locate_node(record.after, node, exactly=False) or {"where": "cleanup"}

    def _locate_node(self, side: RecordedSide, node: RecordedNode, *, exactly: bool) -> dict[str, Any] | None:
        if exactly:
            known = self._final_by_output.get(node.proto.output[0])
            candidates = [known] if known is not None else []
        else:
            candidates = [n for n in self._final if not n.used]
        for final in candidates:
            if self._is_same_node(side, node.proto, final, names=exactly):
                final.used = True
                return {
                    "where": "file",
                    "output": next(o for o in final.proto.output if o),
                    "inputs": list(final.proto.input),
                }
        return None

    def _is_same_node(self, side: RecordedSide, node: onnx.NodeProto, final: _FinalNode, *, names: bool) -> bool:
        other = final.proto
        if (node.op_type, _normalize_domain(node.domain)) != (other.op_type, _normalize_domain(other.domain)):
            return False
        if _attribute_bytes(node) != _attribute_bytes(other):
            return False
        inputs, theirs = _strip_omitted(node.input), _strip_omitted(other.input)
        if len(inputs) != len(theirs):
            return False
        for mine, its in zip(inputs, theirs, strict=True):
            constant = side.constants.get(mine)
            tensor = final.constants.get(its)
            if (constant is None) != (tensor is None):
                return False
            if constant is None:
                if names and mine != its:
                    return False
                continue
            assert tensor is not None
            stored = constant.rounded if constant.rounded is not None else constant.value
            if stored is None or constant.computed or _array_key(stored) != _array_key(tensor_array(tensor)):
                return False
        return True


# Largest number of elements of a constant that is written into the document even if the file has an equal initializer
_INLINE = 16


def choose_mode(record: RewriteRecord) -> tuple[str, str]:
    """Choose how the equality of both sides can be checked.

    Returns:
        "exact", "affine", "expressions", "numeric" or "none", and the reason for one of the last two.
    """
    if record.before is None or record.after is None:
        return "none", record.reason
    foreign = {f"{n.proto.domain}.{n.proto.op_type}" for n in record.nodes if not _is_defined(n.proto)}
    if foreign:
        return "none", f"the format does not define {', '.join(sorted(foreign))}"
    if record.identity is None:
        return "numeric", "the rewrite was proved without a prime field"
    if record.identity.read:
        read = ", ".join(f"{number!r} as {fraction}" for number, fraction in record.identity.read)
        return "numeric", f"constants were read as the exact numbers that they approximate: {read}"
    others = set(_iter_undefined_ops(record.before, record)) | set(_iter_undefined_ops(record.after, record))
    if others:
        return "numeric", f"no definition in the field: {', '.join(sorted(others))}"
    if record.expressions is not None:
        return "expressions", ""
    if record.identity.parameters or record.identity.epsilons:
        return "affine", ""
    if record.has_undescribed_constants:
        return "numeric", "the format has no expressions for its constants"
    return "exact", ""


def _is_defined(node: onnx.NodeProto) -> bool:
    return is_standard(node) or function_op_row(node.domain, node.op_type) is not None


def _iter_undefined_ops(side: RecordedSide, record: RewriteRecord) -> Iterator[str]:
    """Yield the standard ops of a side that the format defines neither in the field nor on integers."""
    integers = {name for name, c in side.constants.items() if _is_integer_constant(c)}
    integers |= {leaf.name for leaf in record.leaves if leaf.dtype and leaf.dtype not in _FLOATS}
    for recorded in side.nodes:
        node = recorded.proto
        on_integers = all(name in integers for name in node.input if name)
        to = next((a.i for a in node.attribute if a.name == "to"), None)
        if node.op_type in ("Shape", "Size"):
            integers.update(node.output)
        elif node.op_type in ("Cast", "CastLike"):
            is_integer_cast = to is not None and to not in _FLOAT_TYPES
            if is_integer_cast and not on_integers:
                yield node.op_type
            elif is_integer_cast:
                integers.update(node.output)
        elif on_integers and node.input and is_standard(node) and node.op_type != "ConstantOfShape":
            integers.update(node.output)
        elif is_standard(node):
            yield from {node.op_type} - ALGEBRAIC - OPAQUE
        elif (row := function_op_row(node.domain, node.op_type)) is not None:
            body = norm_function_body(row, max(recorded.opset, row.since))
            yield from {inner.op_type for inner in body.node} - ALGEBRAIC - OPAQUE - _SIZES


def _is_integer_constant(constant: RecordedConstant) -> bool:
    return constant.value is not None and constant.value.dtype.name not in _FLOATS


def _describe_proof(record: RewriteRecord) -> dict[str, Any] | None:
    certificate = record.certificate
    if certificate is None:
        return None
    told: dict[str, Any] = {
        "method": certificate.method,
        "points": certificate.cases,
        "bits": certificate.bits,
        "degree": certificate.degree,
        "gains": certificate.gains,
        "note": certificate.note,
    }
    if record.identity is not None:
        told["prime_bits"] = record.identity.length
        told["roots"] = record.identity.roots
        told["zero_sizes"] = [_describe_size(size) for size in record.identity.zeros]
        told["free_lengths"] = sorted(record.free_lengths)
    return told


def _list_claims(record: RewriteRecord, mode: str, epsilons: Mapping[str, Fraction]) -> list[dict[str, Any]]:
    assert record.before is not None
    assert record.after is not None
    claims: list[dict[str, Any]] = [
        {"claim": "shape", "before": [b], "after": [a]}
        for b, a in zip(record.before.outputs, record.after.outputs, strict=True)
    ]
    claims += [
        {"claim": "equal", "before": b, "after": a, "mode": mode}
        for b, a in zip(record.before.outputs, record.after.outputs, strict=True)
    ]
    claims += [
        {"claim": "stored", "constant": name, "dtype": c.rounded.dtype.name}
        for name, c in record.after.constants.items()
        if c.rounded is not None and (c.value is not None or mode != "numeric")
    ]
    claims += [{"claim": "epsilon", "node": name} for name in epsilons]
    if record.certificate is not None and record.certificate.method == "exact":
        claims.append({"claim": "nonfinite", "gains": record.certificate.gains})
    return claims


def _list_facts(record: RewriteRecord) -> list[dict[str, Any]]:
    """List the facts on constants that the equality rests on: divisors are not zero, radicands are positive."""
    facts: list[dict[str, Any]] = []
    assert record.before is not None
    assert record.after is not None
    for name, side in (("before", record.before), ("after", record.after)):
        for recorded in side.nodes:
            node = recorded.proto
            if not is_standard(node):
                continue
            inputs = list(node.input)
            if node.op_type == "Div" and inputs[1] in side.constants:
                facts.append({"fact": "nonzero", "side": name, "constant": inputs[1]})
            elif node.op_type == "Reciprocal" and inputs[0] in side.constants:
                facts.append({"fact": "nonzero", "side": name, "constant": inputs[0]})
            elif node.op_type == "Sqrt" and inputs[0] in side.constants:
                facts.append({"fact": "positive", "side": name, "constant": inputs[0]})
            elif node.op_type == "BatchNormalization" and len(inputs) > 4 and inputs[4] in side.constants:
                epsilon = next((a.f for a in node.attribute if a.name == "epsilon"), float(np.float32(1e-5)))
                facts.append(
                    {"fact": "positive", "side": name, "constant": inputs[4], "plus": _describe_float(epsilon)}
                )
    return facts


def _exact_epsilons(record: RewriteRecord) -> dict[str, Fraction] | None:
    """Express each epsilon after the rewrite as a small fraction of an epsilon before.

    Returns:
        exact epsilon by the name of the node's first output; None if one is not such a fraction.
    """
    assert record.before is not None
    known = {a.f for n in record.before.nodes for a in n.proto.attribute if a.name == "epsilon"}
    known |= {
        float(c.value.reshape(-1)[0])
        for c in record.before.constants.values()
        if c.value is not None and c.value.dtype.name in _FLOATS and c.value.size == 1
    }
    found: dict[str, Fraction] = {}
    for name, value in record.epsilons.items():
        tried = [
            Fraction(e) * Fraction(value / e).limit_denominator(_MOST_TERMS)
            for e in sorted(known)
            if e > 0 and math.isfinite(e)
        ]
        fits = [q for q in tried if abs(float(q) - value) <= _SOLVED * abs(value)]
        if not fits:
            return None
        found[name] = min(fits, key=lambda q: (q.denominator.bit_length() + q.numerator.bit_length(), q))
    return found


def _describe_dims(name: str, dims: Sequence[int | str | Size | None] | None) -> list[Any] | None:
    if dims is None:
        return None
    sizes = [d if isinstance(d, Size) else dim_size(d, f"{name}:{i}") for i, d in enumerate(dims)]
    return [_describe_size(size) for size in sizes]


def _describe_size(size: Size) -> Any:
    """Describe a size: a number, a symbol, a polynomial of symbols, or null for a size that is unknown."""
    if size.constant_value is not None:
        return size.constant_value
    if any(UNKNOWN in symbol for symbols, _ in size.terms for symbol in symbols):
        return None
    if len(size.terms) == 1 and size.terms[0][1] == 1 and len(size.terms[0][0]) == 1:
        return size.terms[0][0][0]
    return {"sum": [[coefficient, list(symbols)] for symbols, coefficient in size.terms]}


def _describe_finding(finding: Finding) -> dict[str, Any]:
    return {
        "tensor": finding.tensor,
        "place": finding.place,
        "kind": finding.kind,
        "status": finding.status,
        "became": finding.became,
    }


def _describe_float(value: float) -> Any:
    value = float(value)
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _normalize_domain(domain: str) -> str:
    return "" if domain in STANDARD else domain


def _strip_omitted(names: Iterable[str]) -> list[str]:
    kept = list(names)
    while kept and not kept[-1]:
        kept.pop()
    return kept


def _attribute_bytes(node: onnx.NodeProto) -> list[bytes]:
    made = []
    for a in sorted(node.attribute, key=lambda a: a.name):
        plain = onnx.AttributeProto()
        plain.CopyFrom(a)
        plain.ClearField("doc_string")
        made.append(plain.SerializeToString(deterministic=True))
    return made


def _iter_final_nodes(proto: onnx.ModelProto) -> Iterator[_FinalNode]:
    yield from _iter_graph_nodes(proto.graph.node, {t.name: t for t in proto.graph.initializer})
    for function in proto.functions:
        yield from _iter_graph_nodes(function.node, {})


def _iter_graph_nodes(nodes: Iterable[onnx.NodeProto], around: Mapping[str, onnx.TensorProto]) -> Iterator[_FinalNode]:
    constants = dict(around)
    for node in nodes:
        if node.op_type == "Constant" and is_standard(node):
            constants.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
        yield _FinalNode(node, constants)
        for a in node.attribute:
            for body in (a.g, *a.graphs):
                if body.node:
                    yield from _iter_graph_nodes(body.node, constants | {t.name: t for t in body.initializer})


def _initializer_array(t: onnx.TensorProto) -> np.ndarray | None:
    if t.data_type == onnx.TensorProto.STRING:
        return None
    return tensor_array(t)


def _array_key(array: np.ndarray) -> tuple[str, tuple[int, ...], str]:
    return array.dtype.name, tuple(array.shape), hashlib.sha256(_little_endian(array)).hexdigest()


def _little_endian(array: np.ndarray) -> bytes:
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return np.ascontiguousarray(array).tobytes()
