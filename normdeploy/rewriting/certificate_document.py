"""Write the certificate file of a converted model: the nodes before every rewrite, so that a stranger can check it.

docs/reference/certificate-format.md defines each field. The document has no times, paths or random numbers, so the same
model, options and versions give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx.serialization import registry

from ..findings.records import Finding
from ..graphs.dims import dim_size
from ..graphs.symbolic_sizes import UNKNOWN, Size
from ..storage.onnx_domains import is_standard
from ..storage.shared_weights import tensor_array
from ..version import __version__
from .certificate_merging import MergedRewrite, merge_chains
from .rewrite_records import RecordedConstant, RecordedLeaf, RecordedNode, RewriteRecord

SCHEMA = "normdeploy/rewrites/2"

# Largest number of elements of a constant that is written into the document even if the file has an equal initializer
_INLINE = 16


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
class _Scope:
    """Graph, body or function of the written file: its nodes by their outputs, and the constants that they can read."""

    nodes: dict[str, onnx.NodeProto]
    constants: dict[str, onnx.TensorProto]

    def walk(self, outputs: Iterable[str], leaves: Collection[str]) -> set[str]:
        """Walk from results back to leaves and constants. Returns: the tensors on the way, with the leaves."""
        pending = list(outputs)
        seen: set[str] = set()
        while pending:
            name = pending.pop()
            if name and name not in seen and name not in self.constants:
                seen.add(name)
                if name not in leaves and name in self.nodes:
                    pending += self.nodes[name].input
        return seen


class _DocumentWriter:
    """State of one document: the table of constants, and the nodes of the written file."""

    def __init__(self, file: CertifiedFile) -> None:
        self.file = file
        self.constants: dict[str, Any] = {}
        self._initializers = {
            _digest(array): t.name
            for t in reversed(file.proto.graph.initializer)
            if (array := _initializer_array(t)) is not None
        }
        self._scopes = list(_iter_scopes(file.proto.graph.node, _named(file.proto.graph.initializer)))
        for function in file.proto.functions:
            self._scopes += _iter_scopes(function.node, {})

    def write(self, records: Sequence[RewriteRecord], findings: Sequence[Finding]) -> dict[str, Any]:
        final = {name for scope in self._scopes for name in scope.nodes}
        rewrites = [self._describe_rewrite(rewrite) for rewrite in merge_chains(records, final)]
        self._add_shared_results(rewrites)
        return {
            "schema": SCHEMA,
            "normdeploy": __version__,
            "model": {"sha256": self.file.digest, "data": dict(self.file.data)},
            "source": {"sha256": self.file.source, "opset": self.file.source_opset},
            "constants": self.constants,
            "rewrites": rewrites,
            "findings": [_describe_finding(f) for f in findings if f.status in ("fused", "folded")],
        }

    # ------------------------------------------------------------------ one rewrite

    def _describe_rewrite(self, rewrite: MergedRewrite) -> dict[str, Any]:
        record, mode, reason = rewrite.record, rewrite.mode, rewrite.reason
        scope, replaced = self._find_nodes(record)
        if mode != "none" and scope is None:
            mode, reason = "none", "the file does not compute its results from its leaves"
        if mode != "none" and record.converted:
            mode, reason = "none", "the file stores its weights in another form"
        told: dict[str, Any] = {
            "place": record.place,
            "stage": record.stage,
            "kind": record.kind,
            "tensors": list(rewrite.tensors),
            "became": record.became,
            "mode": mode,
            "reason": reason,
            "proof": _describe_proof(record),
        }
        if mode == "none" or record.before is None or record.after is None:
            return told
        exact = {} if record.expressions is None else dict(record.expressions.constants)
        results = {} if record.expressions is None else dict(record.expressions.results)
        for name, constant in record.after.constants.items():
            if constant.rounded is not None and constant.value is not None:
                exact[name], results[name] = constant.value, name
        return told | {
            "scope": scope,
            "before": {
                "node": [self._describe_node(node) for node in record.before.nodes],
                "input": _describe_leaves(record.leaves),
                "output": [{"name": name} for name in record.before.outputs],
            },
            "exact": {
                "node": [self._describe_node(RecordedNode(*n)) for n in getattr(record.expressions, "nodes", ())]
            },
            "results": {name: tensor for name, tensor in results.items() if name in record.after.constants},
            "constants": {
                "before": {n: self._store(_exact_array(c)) for n, c in record.before.constants.items()},
                "exact": {n: self._store(a) for n, a in exact.items()},
            },
            "epsilons": {name: [str(n) for n in exact.as_integer_ratio()] for name, exact in rewrite.epsilons.items()},
            "replaced": replaced,
            "computed": sorted(n for n, c in record.before.constants.items() if c.computed),
        }

    def _add_shared_results(self, rewrites: Sequence[dict[str, Any]]) -> None:
        """Make tensors inside both sides results if another rewrite reads them as leaves, so that they are compared."""
        leaves = {(r["scope"], leaf["name"]) for r in rewrites if "scope" in r for leaf in r["before"]["input"]}
        for rewrite in rewrites:
            if "scope" in rewrite:
                before = rewrite["before"]
                outputs = [o["name"] for o in before["output"]]
                own = {leaf["name"] for leaf in before["input"]} | rewrite["replaced"].keys()
                seen = self._scopes[rewrite["scope"]].walk(outputs, own) - own - {*outputs}
                inside = {name for node in before["node"] for name in node["output"]}
                shared = sorted(name for name in seen & inside if (rewrite["scope"], name) in leaves)
                before["output"] += [{"name": name} for name in shared]

    def _describe_node(self, node: RecordedNode) -> dict[str, Any]:
        proto = onnx.NodeProto()
        proto.CopyFrom(node.proto)
        for name in ("name", "doc_string", "metadata_props"):
            proto.ClearField(name)
        if node.opset != self.file.source_opset:
            proto.metadata_props.add(key="opset", value=str(node.opset))
        return _json(proto)

    def _find_nodes(self, record: RewriteRecord) -> tuple[int | None, dict[str, str]]:
        """Find the graph of the file that computes the results of a record from its leaves.

        Returns:
            the index of the graph; None if there is none, or if two graphs do. Tensors that the cleanup put in the
            place of leaves, and the leaves.
        """
        if record.after is None:
            return None, {}
        leaves = {leaf.name for leaf in record.leaves}
        found: dict[int, dict[str, str]] = {}
        for index, scope in enumerate(self._scopes if record.place else self._scopes[:1]):
            replaced: dict[str, str] = {}
            for node in record.after.nodes:
                theirs = scope.nodes.get(node.proto.output[0])
                if theirs is not None and theirs.op_type == node.proto.op_type:
                    pairs = zip(node.proto.input, theirs.input, strict=False)
                    replaced |= {b: a for a, b in pairs if a != b and a in leaves and b not in leaves}
            seen = scope.walk(record.after.outputs, leaves | replaced.keys())
            unknown = seen - leaves - replaced.keys() - scope.nodes.keys()
            if not unknown and not replaced.keys() & {*record.after.outputs}:
                found[index] = {name: leaf for name, leaf in replaced.items() if name in seen}
        if len(found) != 1:
            return None, {}
        return next(iter(found.items()))

    # ------------------------------------------------------------------ constants

    def _store(self, array: np.ndarray) -> str:
        """Add an array to the table of constants. Returns its key; equal arrays have one key."""
        digest = _digest(array)
        if digest not in self.constants:
            name = self._initializers.get(digest)
            if name is not None and array.size > _INLINE:
                self.constants[digest] = name
            else:
                self.constants[digest] = _json(onnx.numpy_helper.from_array(array))
        return digest


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
        told["zero_sizes"] = [_describe_size(size, {}, "") for size in record.identity.zeros]
        told["free_lengths"] = sorted(record.free_lengths)
    return told


def _describe_leaves(leaves: Sequence[RecordedLeaf]) -> list[dict[str, Any]]:
    """Describe leaves as inputs of a graph. A symbol gets the same text in all leaves."""
    texts: dict[str, str] = {}
    described = []
    for leaf in leaves:
        elem_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(leaf.dtype)) if leaf.dtype else 0
        sizes = None
        if leaf.dims is not None:
            sizes = [
                _describe_size(d if isinstance(d, Size) else dim_size(d, f"{leaf.name}:{i}"), texts, f"{leaf.name}:{i}")
                for i, d in enumerate(leaf.dims)
            ]
        described.append(_json(onnx.helper.make_tensor_value_info(leaf.name, elem_type, sizes)))
    return described


def _describe_size(size: Size, texts: dict[str, str], own: str) -> int | str:
    """Describe a size: a number, or a sum of products of symbols and numbers. ``own``: symbol of an unknown size."""
    if size.constant_value is not None:
        return size.constant_value
    unknown = any(UNKNOWN in symbol for symbols, _ in size.terms for symbol in symbols)
    terms = []
    for symbols, coefficient in [((own,), 1)] if unknown else size.terms:
        for symbol in symbols:
            # The signs + and * join symbols.
            text = re.sub(r"[^\w.:]", "_", symbol)
            taken = {t for s, t in texts.items() if s != symbol}
            while text in taken or text.isdigit():
                text += "_"
            texts[symbol] = text
        factors = [texts[symbol] for symbol in symbols]
        terms.append("*".join(factors if factors and coefficient == 1 else [str(coefficient), *factors]))
    return "+".join(terms)


def _describe_finding(finding: Finding) -> dict[str, Any]:
    return {
        "tensor": finding.tensor,
        "place": finding.place,
        "kind": finding.kind,
        "status": finding.status,
        "became": finding.became,
    }


def _json(proto: Any) -> Any:
    """Return ONNX's own JSON form of a message."""
    return json.loads(registry.get("json").serialize_proto(proto))


def _exact_array(constant: RecordedConstant) -> np.ndarray:
    array = constant.rounded if constant.value is None else constant.value
    assert array is not None
    return array


def _iter_scopes(nodes: Iterable[onnx.NodeProto], around: Mapping[str, onnx.TensorProto]) -> Iterator[_Scope]:
    """Yield a graph, and then the bodies of its nodes, in the order of the file."""
    constants = dict(around)
    for node in nodes:
        if node.op_type == "Constant" and is_standard(node):
            constants.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
    yield _Scope({o: n for n in nodes for o in n.output if o}, constants)
    for a in (a for n in nodes for a in n.attribute):
        for body in filter(lambda body: body.node, (a.g, *a.graphs)):
            yield from _iter_scopes(body.node, constants | _named(body.initializer))


def _named(tensors: Iterable[onnx.TensorProto]) -> dict[str, onnx.TensorProto]:
    return {t.name: t for t in tensors}


def _initializer_array(t: onnx.TensorProto) -> np.ndarray | None:
    if t.data_type == onnx.TensorProto.STRING:
        return None
    return tensor_array(t)


def _digest(array: np.ndarray) -> str:
    """Return the SHA-256 of dtype, shape and elements."""
    head = json.dumps([array.dtype.name, list(array.shape)]).encode()
    return hashlib.sha256(head + _little_endian(array)).hexdigest()


def _little_endian(array: np.ndarray) -> bytes:
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return np.ascontiguousarray(array).tobytes()
