"""Plant faults into certificates and models: a checker must reject each changed pair, by one of the named claims.

The rows follow the table "Planted faults" of docs/reference/certificate-format.md.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx.serialization import registry

Document = dict[str, Any]


@dataclass(frozen=True)
class PlantedFault:
    """Certificate and model with one fault.

    Attributes:
        name: the fault.
        claims: claims of which at least one must fail; empty if a checker must accept, but count the rewrite as tested.
        document: the changed certificate.
        model: bytes of the model file that belongs to it.
    """

    name: str
    claims: frozenset[str]
    document: Document
    model: bytes


@dataclass
class _Copy:
    """Certificate and model that a fault changes in place."""

    document: Document
    model: onnx.ModelProto

    def rewrites(self, *modes: str) -> Iterator[Document]:
        """Yield the rewrites with both sides, of these modes or of any mode."""
        for rewrite in self.document["rewrites"]:
            if rewrite["mode"] != "none" and (not modes or rewrite["mode"] in modes):
                yield rewrite

    def array(self, digest: str) -> np.ndarray:
        """Read a constant of the table."""
        entry = self.document["constants"][digest]
        if isinstance(entry, str):
            tensor = next(t for t in self.model.graph.initializer if t.name == entry)
        else:
            tensor = registry.get("json").deserialize_proto(json.dumps(entry), onnx.TensorProto())
        return np.array(onnx.numpy_helper.to_array(tensor))

    def store(self, array: np.ndarray) -> str:
        """Add a constant to the table. Returns its key."""
        digest = constant_key(array)
        self.document["constants"][digest] = to_json(onnx.numpy_helper.from_array(array))
        return digest

    def set_initializer(self, tensor: onnx.TensorProto, array: np.ndarray) -> None:
        """Change an initializer of the model. The certificate keeps the elements that it referred to."""
        for digest, entry in self.document["constants"].items():
            if entry == tensor.name:
                self.document["constants"][digest] = to_json(onnx.numpy_helper.from_array(self.array(digest)))
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))

    def file_nodes(self, rewrite: Document) -> Iterator[onnx.NodeProto]:
        """Yield the nodes of the model's main graph that compute the results of a rewrite, the last one first."""
        writers = {name: node for node in self.model.graph.node for name in node.output}
        leaves = {leaf["name"] for leaf in rewrite["before"]["input"]}
        pending = [output["name"] for output in rewrite["before"]["output"]]
        while pending:
            name = pending.pop(0)
            if name in writers and name not in leaves and rewrite["scope"] == 0:
                yield writers[name]
                pending += writers[name].input


def constant_key(array: np.ndarray) -> str:
    """Return the key of a constant: the SHA-256 of its type, shape and elements."""
    head = json.dumps([array.dtype.name, list(array.shape)]).encode()
    return hashlib.sha256(head + array.tobytes()).hexdigest()


def to_json(proto: Any) -> Any:
    """Return ONNX's JSON form of a message."""
    return json.loads(registry.get("json").serialize_proto(proto))


Plant = Callable[[_Copy], bool]
"""Changes a copy in place. Returns False if the certificate has no place for the fault."""


def planted_certificates(document: Document, model: bytes) -> Iterator[PlantedFault]:
    """Yield a damaged copy for each fault that the certificate can hold.

    Args:
        document: a valid certificate.
        model: bytes of its model file, which has no external data.
    """
    for plant, name, claims in _FAULTS:
        changed = _Copy(copy.deepcopy(document), onnx.ModelProto.FromString(model))
        before = changed.model.SerializeToString(deterministic=True)
        if not plant(changed):
            continue
        data = model
        if changed.model.SerializeToString(deterministic=True) != before:
            data = changed.model.SerializeToString(deterministic=True)
            if "hash" not in claims:
                changed.document["model"]["sha256"] = hashlib.sha256(data).hexdigest()
        yield PlantedFault(name, frozenset(claims), changed.document, data)


def _change_model(c: _Copy) -> bool:
    c.model.doc_string += "."
    return True


def _change_schema(c: _Copy) -> bool:
    c.document["schema"] = "normdeploy/rewrites/1"
    return True


def _change_data(c: _Copy) -> bool:
    entry = next((e for e in c.document["constants"].values() if isinstance(e, dict) and e.get("raw_data")), None)
    if entry is None:
        return False
    data = bytearray(base64.b64decode(entry["raw_data"]))
    data[0] ^= 1
    entry["raw_data"] = base64.b64encode(bytes(data)).decode()
    return True


def _change_initializer(c: _Copy) -> bool:
    for digest in c.document["constants"]:
        c.document["constants"][digest] = "no such initializer"
        return True
    return False


def _exchange_constants(c: _Copy) -> bool:
    for rewrite in c.rewrites():
        constants = rewrite["constants"]["before"]
        floats = [n for n, digest in constants.items() if c.array(digest).dtype.kind == "f"]
        for first in floats:
            for second in floats:
                arrays = [c.array(constants[name]) for name in (first, second)]
                if arrays[0].shape == arrays[1].shape and not np.array_equal(*arrays):
                    constants[first], constants[second] = constants[second], constants[first]
                    return True
    return False


def _change_weight_before(c: _Copy) -> bool:
    for rewrite in c.rewrites("exact", "affine"):
        for name, digest in rewrite["constants"]["before"].items():
            array = c.array(digest)
            if array.dtype == np.float32 and array.size > 1:
                flat = array.reshape(-1)
                flat[int(np.argmax(np.abs(flat)))] *= 1.5
                rewrite["constants"]["before"][name] = c.store(array)
                return True
    return False


def _negate_variance(c: _Copy) -> bool:
    for rewrite in c.rewrites("exact", "affine"):
        for node in rewrite["before"]["node"]:
            if node["op_type"] == "BatchNormalization":
                name = node["input"][4]
                array = c.array(rewrite["constants"]["before"][name])
                array[0] = -1
                rewrite["constants"]["before"][name] = c.store(array)
                return True
    return False


def _change_epsilon(c: _Copy) -> bool:
    for rewrite in c.rewrites("exact", "affine"):
        for node in c.file_nodes(rewrite):
            for attribute in node.attribute:
                if attribute.name == "epsilon" and attribute.f:
                    attribute.f *= 2
                    return True
    return False


def _change_exact_epsilon(c: _Copy) -> bool:
    for rewrite in c.rewrites("affine"):
        for fraction in rewrite["epsilons"].values():
            fraction[0] = str(int(fraction[0]) * 2)
            return True
    return False


def _leave_out_epsilon(c: _Copy) -> bool:
    for rewrite in c.rewrites("affine"):
        if rewrite["epsilons"]:
            rewrite["epsilons"] = {}
            return True
    return False


def _leave_out_result(c: _Copy) -> bool:
    for rewrite in c.rewrites("exact"):
        for name, tensor in rewrite["results"].items():
            # The exact value of a constant of ones is the stored one.
            if tensor not in rewrite["constants"]["exact"]:
                del rewrite["results"][name]
                return True
    return False


def _move_stored(c: _Copy) -> bool:
    for rewrite in c.rewrites("exact", "affine"):
        for name in rewrite["results"]:
            tensor = next((t for t in c.model.graph.initializer if t.name == name), None)
            if tensor is not None and tensor.data_type == onnx.TensorProto.FLOAT:
                array = np.array(onnx.numpy_helper.to_array(tensor))
                flat = array.reshape(-1)
                worst = int(np.argmax(np.abs(flat)))
                # Two ulp: one ulp could still be within half an ulp and the error of the expression.
                flat[worst] = np.nextafter(np.nextafter(flat[worst], np.float32(np.inf)), np.float32(np.inf))
                c.set_initializer(tensor, array)
                return True
    return False


def _change_value(c: _Copy) -> bool:
    for rewrite in c.rewrites("affine"):
        for name in rewrite["results"]:
            digest = rewrite["constants"]["exact"].get(name)
            if digest is not None:
                rewrite["constants"]["exact"][name] = c.store(c.array(digest) * (1 + 2.0**-20))
                return True
    return False


def _change_axis(c: _Copy) -> bool:
    for rewrite in c.rewrites("exact", "affine"):
        for node in c.file_nodes(rewrite):
            for attribute in node.attribute:
                if node.op_type == "LayerNormalization" and attribute.name == "axis":
                    attribute.i = -2
                    return True
    return False


def _change_op(c: _Copy) -> bool:
    other = {"Add": "Sub", "Sub": "Add", "Mul": "Add", "Gelu": "Erf", "LayerNormalization": "RMSNormalization"}
    for rewrite in c.rewrites():
        for node in c.file_nodes(rewrite):
            if node.op_type in other:
                node.op_type = other[node.op_type]
                return True
    return False


def _exchange_inputs(c: _Copy) -> bool:
    for rewrite in c.rewrites():
        for node in c.file_nodes(rewrite):
            if node.op_type in ("BatchNormalization", "Conv", "Gemm", "LayerNormalization", "MatMul", "Reshape"):
                node.input[0], node.input[1] = node.input[1], node.input[0]
                return True
    return False


def _rename_result(c: _Copy) -> bool:
    for rewrite in c.rewrites():
        before = rewrite["before"]
        name = before["output"][0]["name"]
        before["output"][0]["name"] = "no such tensor"
        for node in before["node"]:
            node["output"] = ["no such tensor" if output == name else output for output in node["output"]]
        return True
    return False


def _leave_out_node(c: _Copy) -> bool:
    for rewrite in c.rewrites():
        if len(rewrite["before"]["node"]) > 1:
            del rewrite["before"]["node"][0]
            return True
    return False


def _define_twice(c: _Copy) -> bool:
    for rewrite in c.rewrites():
        nodes = rewrite["before"]["node"]
        if len(nodes) > 1:
            nodes.insert(0, nodes[-1] | {"op_type": "Identity", "attribute": [], "input": nodes[0]["input"][:1]})
            return True
    return False


def _invent_leaf(c: _Copy) -> bool:
    """Make a tensor between the nodes before a leaf, which the model does not compute."""
    for rewrite in c.rewrites("exact", "affine"):
        before = rewrite["before"]
        for node in before["node"][:-1]:
            if node["op_type"] in ("Add", "Sub", "Mul", "ReduceMean"):
                leaf = copy.deepcopy(before["input"][0])
                leaf["name"] = node["output"][0]
                before["node"].remove(node)
                before["input"].append(leaf)
                return True
    return False


def _leave_out_leaf(c: _Copy) -> bool:
    for rewrite in c.rewrites():
        if rewrite["before"]["input"]:
            del rewrite["before"]["input"][0]
            return True
    return False


def _replace_leaf(c: _Copy) -> bool:
    for rewrite in c.rewrites():
        leaf = rewrite["before"]["input"][0]["name"]
        node = next(iter(c.file_nodes(rewrite)), None)
        if node is not None:
            rewrite["replaced"] = {node.output[0]: leaf}
            return True
    return False


def _change_function(c: _Copy) -> bool:
    for rewrite in c.rewrites():
        called = {(node.domain, node.op_type) for node in c.file_nodes(rewrite)}
        for function in c.model.functions:
            if (function.domain, function.name) in called:
                function.node[-1].op_type = "Neg"
                del function.node[-1].input[1:]
                return True
    return False


def _redefine_standard_op(c: _Copy) -> bool:
    for function in c.model.functions:
        other = c.model.functions.add()
        other.CopyFrom(function)
        other.domain, other.name = "", "Add"
        return True
    return False


def _invent_scope(c: _Copy) -> bool:
    for rewrite in c.rewrites():
        rewrite["scope"] = 99
        return True
    return False


def _other_scope(c: _Copy) -> bool:
    for rewrite in c.rewrites():
        if c.model.functions:
            rewrite["scope"] = 1 - rewrite["scope"]
            return True
    return False


def _fix_leaf(c: _Copy) -> bool:
    inputs = {i.name for i in c.model.graph.input}
    for rewrite in c.rewrites():
        for leaf in rewrite["before"]["input"]:
            sizes = leaf["type"]["tensor_type"]["shape"]["dim"]
            if leaf["name"] in inputs and sizes and "dim_param" in sizes[0]:
                sizes[0] = {"dim_value": "3"}
                return True
    return False


def _change_opset(c: _Copy) -> bool:
    for rewrite in c.rewrites():
        for node in rewrite["before"]["node"]:
            if node["op_type"] == "ReduceMean" and c.document["source"]["opset"] >= 18 and len(node["input"]) == 2:
                c.document["source"]["opset"] = 13
                return True
    return False


def _train(c: _Copy) -> bool:
    for rewrite in c.rewrites():
        for node in rewrite["before"]["node"]:
            if node["op_type"] == "BatchNormalization":
                node["attribute"] = [{"name": "training_mode", "type": "INT", "i": "1"}]
                return True
    return False


def _weaken_mode(c: _Copy) -> bool:
    for rewrite in c.rewrites("exact", "affine"):
        rewrite["mode"] = "numeric"
        return True
    return False


def _move_stored_in_mode_numeric(c: _Copy) -> bool:
    for rewrite in c.rewrites("affine"):
        for name in rewrite["results"]:
            tensor = next((t for t in c.model.graph.initializer if t.name == name), None)
            if tensor is not None:
                c.set_initializer(tensor, onnx.numpy_helper.to_array(tensor) * np.float32(2))
                return _weaken_mode(c)
    return False


def _strengthen_mode(c: _Copy) -> bool:
    for rewrite in c.rewrites("affine"):
        rewrite["mode"] = "exact"
        return True
    return False


def _invent_mode(c: _Copy) -> bool:
    for rewrite in c.rewrites():
        rewrite["mode"] = "trusted"
        return True
    return False


_FAULTS: tuple[tuple[Plant, str, tuple[str, ...]], ...] = (
    (_change_model, "the model has other bytes", ("hash",)),
    (_change_schema, "another schema", ("structure",)),
    (_change_data, "one bit of a constant changed", ("constants",)),
    (_change_initializer, "an initializer that is not in the model", ("constants",)),
    (_exchange_constants, "two constants exchanged", ("equal", "stored")),
    (_change_weight_before, "a weight before changed", ("equal", "stored")),
    (_negate_variance, "a negative variance", ("equal",)),
    (_change_epsilon, "epsilon changed in the model", ("equal", "epsilon")),
    (_change_exact_epsilon, "an exact epsilon changed", ("equal", "epsilon")),
    (_leave_out_epsilon, "an exact epsilon left out", ("equal",)),
    (_leave_out_result, "the exact value of a constant left out", ("equal",)),
    (_move_stored, "a stored constant moved by two ulp in the model", ("stored",)),
    (_change_value, "the exact value of a constant changed", ("equal", "stored")),
    (_change_axis, "the axis of a norm changed in the model", ("equal", "shape")),
    (_change_op, "another op in the model", ("equal", "shape", "structure")),
    (_exchange_inputs, "two inputs exchanged in the model", ("equal", "shape", "structure")),
    (_rename_result, "a result that the model does not compute", ("final",)),
    (_leave_out_node, "a node before left out", ("structure",)),
    (_define_twice, "a tensor before defined twice", ("structure",)),
    (_invent_leaf, "a tensor between the nodes is said to be a leaf", ("equal", "structure", "final")),
    (_leave_out_leaf, "a leaf left out", ("final", "structure")),
    (_replace_leaf, "another tensor in place of a leaf", ("final", "structure")),
    (_change_function, "the body of a function changed in the model", ("equal", "shape")),
    (_redefine_standard_op, "a function of the model redefines a standard op", ("structure",)),
    (_invent_scope, "a graph that is not in the model", ("final",)),
    (_other_scope, "another graph of the model", ("final", "structure", "equal")),
    (_fix_leaf, "a leaf with a fixed size in place of a symbol", ("structure",)),
    (_change_opset, "an opset with another form of the op", ("equal",)),
    (_train, "a BatchNormalization in training mode", ("structure",)),
    (_invent_mode, "a mode that the page does not define", ("structure",)),
    (_strengthen_mode, "a stronger mode than that of rounded constants", ("equal",)),
    (_move_stored_in_mode_numeric, "a stored constant changed in mode numeric", ("stored", "equal")),
    (_weaken_mode, "a weaker mode", ()),
)

FAULT_NAMES: tuple[str, ...] = tuple(name for _, name, _ in _FAULTS)
"""Names of all faults."""
