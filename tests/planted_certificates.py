"""Plant faults into certificates: each changed certificate must make a checker reject, by one of the named claims.

The rows follow the table "Planted faults" of docs/reference/certificate-format.md.
"""

from __future__ import annotations

import base64
import copy
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

Document = dict[str, Any]


@dataclass(frozen=True)
class PlantedFault:
    """Certificate and model with one fault.

    Attributes:
        name: the fault.
        claims: claims of which at least one must fail; empty if a checker must accept, but count a node or a rewrite.
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
            if "after" in rewrite and (not modes or rewrite["mode"] in modes):
                yield rewrite

    def array(self, key: str) -> np.ndarray:
        """Read a constant of the table."""
        entry = self.document["constants"][key]
        if "initializer" in entry:
            tensor = next(t for t in self.model.graph.initializer if t.name == entry["initializer"])
            return np.array(onnx.numpy_helper.to_array(tensor))
        data = base64.b64decode(entry["data"])
        return np.frombuffer(data, np.dtype(entry["dtype"])).reshape(entry["shape"]).copy()

    def store(self, array: np.ndarray) -> str:
        """Add a constant to the table. Returns its key."""
        key = f"k{len(self.document['constants'])}"
        data = array.tobytes()
        self.document["constants"][key] = {
            "dtype": array.dtype.name,
            "shape": list(array.shape),
            "sha256": hashlib.sha256(data).hexdigest(),
            "data": base64.b64encode(data).decode(),
        }
        return key

    def keep_data(self, initializer: str) -> None:
        """Write the elements of an initializer that is about to change into the table."""
        for key, entry in self.document["constants"].items():
            if entry.get("initializer") == initializer:
                data = self.array(key).tobytes()
                del entry["initializer"]
                entry["data"] = base64.b64encode(data).decode()

    def file_node(self, node: Document) -> onnx.NodeProto | None:
        """Find the node of the model's main graph that a node of ``after`` became."""
        if node["final"]["where"] != "file":
            return None
        output = node["final"]["output"]
        return next((n for n in self.model.graph.node if output in n.output), None)

    def file_constant(self, rewrite: Document, name: str) -> onnx.TensorProto | None:
        """Find the initializer that a constant of ``after`` became."""
        for node in rewrite["after"]["nodes"]:
            if name in node["inputs"] and node["final"]["where"] == "file":
                own = node["final"]["inputs"][node["inputs"].index(name)]
                return next((t for t in self.model.graph.initializer if t.name == own), None)
        return None


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
    c.document["schema"] = "normdeploy/rewrites/0"
    return True


def _raise_bound(c: _Copy) -> bool:
    c.document["bounds"]["numeric"] = 1.0
    return True


def _change_data(c: _Copy) -> bool:
    entry = next((e for e in c.document["constants"].values() if e.get("data")), None)
    if entry is None:
        return False
    data = bytearray(base64.b64decode(entry["data"]))
    data[0] ^= 1
    entry["data"] = base64.b64encode(bytes(data)).decode()
    return True


def _change_initializer(c: _Copy) -> bool:
    entry = next((e for e in c.document["constants"].values() if "initializer" in e), None)
    if entry is None:
        return False
    entry["initializer"] = "no such initializer"
    return True


def _change_weight_before(c: _Copy) -> bool:
    for rewrite in c.rewrites("exact", "affine", "expressions"):
        for constant in rewrite["before"]["constants"].values():
            array = c.array(constant["value"])
            if array.dtype == np.float32 and array.size > 1 and "rounded" not in constant:
                flat = array.reshape(-1)
                worst = int(np.argmax(np.abs(flat)))
                flat[worst] *= 1.5
                constant["value"] = c.store(array)
                return True
    return False


def _change_epsilon_alone(c: _Copy) -> bool:
    return _change_epsilon(c, in_model=False)


def _change_epsilon_everywhere(c: _Copy) -> bool:
    return _change_epsilon(c, in_model=True)


def _change_epsilon(c: _Copy, *, in_model: bool) -> bool:
    for rewrite in c.rewrites("exact", "affine"):
        for node in rewrite["after"]["nodes"]:
            attribute = node["attributes"].get("epsilon")
            own = c.file_node(node)
            if attribute is None or own is None or not attribute["value"]:
                continue
            attribute["value"] = float(np.float32(attribute["value"] * 2))
            if in_model:
                next(a for a in own.attribute if a.name == "epsilon").f = attribute["value"]
            return True
    return False


def _change_exact_epsilon(c: _Copy) -> bool:
    for rewrite in c.rewrites("affine"):
        for fraction in rewrite["epsilons"].values():
            fraction["numerator"] = str(int(fraction["numerator"]) * 2)
            return True
    return False


def _move_stored(c: _Copy) -> bool:
    for rewrite in c.rewrites("affine", "expressions"):
        for name, constant in rewrite["after"]["constants"].items():
            tensor = c.file_constant(rewrite, name)
            if "rounded" not in constant or tensor is None:
                continue
            array = c.array(constant["rounded"])
            if array.dtype != np.float32:
                continue
            flat = array.reshape(-1)
            worst = int(np.argmax(np.abs(flat)))
            # Two ulp: one ulp could still be within half an ulp and the error of the expression.
            flat[worst] = np.nextafter(np.nextafter(flat[worst], np.float32(np.inf)), np.float32(np.inf))
            c.keep_data(tensor.name)
            constant["rounded"] = c.store(array)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
            return True
    return False


def _change_value(c: _Copy) -> bool:
    for rewrite in c.rewrites("affine"):
        for constant in rewrite["after"]["constants"].values():
            if "rounded" in constant and "value" in constant:
                constant["value"] = c.store(c.array(constant["value"]) * (1 + 2.0**-20))
                return True
    return False


def _change_axis(c: _Copy) -> bool:
    for rewrite in c.rewrites("exact", "affine"):
        for node in rewrite["after"]["nodes"]:
            own = c.file_node(node)
            attribute = node["attributes"].get("axis")
            if node["op"] != "LayerNormalization" or own is None or attribute is None:
                continue
            rank = next((len(leaf["shape"]) for leaf in rewrite["leaves"] if leaf["name"] == node["inputs"][0]), 0)
            if rank < 3:
                continue
            attribute["value"] = -2
            next(a for a in own.attribute if a.name == "axis").i = -2
            return True
    return False


def _change_op(c: _Copy) -> bool:
    other = {"Add": "Sub", "Sub": "Add", "Mul": "Add", "Gelu": "Erf", "LayerNormalization": "RMSNormalization"}
    for rewrite in c.rewrites():
        for node in rewrite["after"]["nodes"]:
            if node["final"]["where"] == "file" and node["op"] in other:
                node["op"] = other[node["op"]]
                return True
    return False


def _exchange_inputs(c: _Copy) -> bool:
    for rewrite in c.rewrites():
        for node in rewrite["after"]["nodes"]:
            if node["final"]["where"] == "file" and len(node["inputs"]) >= 2 and "" not in node["inputs"][:2]:
                node["inputs"][:2] = node["inputs"][1::-1]
                return True
    return False


def _change_final_output(c: _Copy) -> bool:
    for rewrite in c.rewrites():
        for node in rewrite["after"]["nodes"]:
            if node["final"]["where"] == "file":
                node["final"]["output"] = "no such tensor"
                return True
    return False


def _hide_final(c: _Copy) -> bool:
    for rewrite in c.rewrites():
        for node in rewrite["after"]["nodes"]:
            if node["final"]["where"] == "file":
                node["final"] = {"where": "cleanup"}
                return True
    return False


def _change_from(c: _Copy) -> bool:
    for rewrite in c.rewrites():
        for node in rewrite["before"]["nodes"]:
            if node["from"] is not None:
                node["from"] = None
                return True
    return False


def _leave_out_rewrite(c: _Copy) -> bool:
    used = {n["from"] for r in c.rewrites() for n in r["before"]["nodes"]} - {None}
    if not used:
        return False
    del c.document["rewrites"][min(used)]
    for index, rewrite in enumerate(c.document["rewrites"]):
        rewrite["index"] = index
    return True


def _leave_out_claim(c: _Copy) -> bool:
    for rewrite in c.rewrites("exact", "affine", "expressions"):
        rewrite["claims"] = [claim for claim in rewrite["claims"] if claim["claim"] != "equal"]
        return True
    return False


def _leave_out_fact(c: _Copy) -> bool:
    for rewrite in c.rewrites():
        if rewrite["facts"]:
            del rewrite["facts"][0]
            return True
    return False


def _change_function(c: _Copy) -> bool:
    for function in c.document["functions"]:
        if function["in_file"]:
            function["nodes"][-1]["op"] = "Neg"
            return True
    return False


def _weaken_mode(c: _Copy) -> bool:
    for rewrite in c.rewrites("exact", "affine", "expressions"):
        rewrite["mode"] = "numeric"
        rewrite.pop("expressions", None)
        rewrite["claims"] = [
            claim
            for claim in rewrite["claims"]
            if claim["claim"] != "stored" or "value" in rewrite["after"]["constants"][claim["constant"]]
        ]
        for claim in rewrite["claims"]:
            if claim["claim"] == "equal":
                claim["mode"] = "numeric"
        return True
    return False


def _hide_function(c: _Copy) -> bool:
    for function in c.document["functions"]:
        if function["in_file"]:
            function["in_file"] = False
            function["nodes"][-1]["op"] = "Neg"
            return True
    return False


def _redefine_standard_op(c: _Copy) -> bool:
    for function in c.document["functions"]:
        c.document["functions"].append(function | {"domain": "", "name": "Add", "in_file": False})
        return True
    return False


def _invent_place(c: _Copy) -> bool:
    for rewrite in c.rewrites():
        if rewrite["place"] == "" and any(n["final"]["where"] == "file" for n in rewrite["after"]["nodes"]):
            rewrite["place"] = "elsewhere"
            return True
    return False


def _fix_leaf(c: _Copy) -> bool:
    inputs = {i.name for i in c.model.graph.input}
    for rewrite in c.rewrites():
        for leaf in rewrite["leaves"]:
            if leaf["name"] in inputs and leaf["shape"] and isinstance(leaf["shape"][0], str):
                leaf["shape"][0] = 3
                return True
    return False


def _change_opset(c: _Copy) -> bool:
    for rewrite in c.rewrites():
        for node in rewrite["before"]["nodes"]:
            if node["op"] == "ReduceMean" and node["from"] is None and node["opset"] >= 18:
                node["opset"] = 13
                return True
    return False


def _move_stored_in_mode_numeric(c: _Copy) -> bool:
    for rewrite in c.rewrites("affine"):
        for name, constant in rewrite["after"]["constants"].items():
            tensor = c.file_constant(rewrite, name)
            if "rounded" in constant and tensor is not None:
                array = c.array(constant["rounded"]) * np.float32(2)
                c.keep_data(tensor.name)
                constant["rounded"] = c.store(array)
                tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
                return _weaken_mode(c)
    return False


def _leave_out_epsilon_in_mode_numeric(c: _Copy) -> bool:
    for rewrite in c.rewrites("affine"):
        if rewrite["epsilons"]:
            rewrite["claims"] = [claim for claim in rewrite["claims"] if claim["claim"] != "epsilon"]
            return _weaken_mode(c)
    return False


def _change_constant_along_chain(c: _Copy) -> bool:
    for rewrite in c.rewrites():
        for node in rewrite["before"]["nodes"]:
            for name in node["inputs"] if node["from"] is not None else []:
                constant = rewrite["before"]["constants"].get(name)
                if constant is not None and c.array(constant["value"]).dtype.kind == "f":
                    constant["value"] = c.store(c.array(constant["value"]) * np.float32(2))
                    return True
    return False


_FAULTS: tuple[tuple[Plant, str, tuple[str, ...]], ...] = (
    (_change_model, "the model has other bytes", ("hash",)),
    (_change_schema, "another schema", ("structure",)),
    (_raise_bound, "a bound is raised", ("structure",)),
    (_change_data, "one bit of a constant changed", ("constants",)),
    (_change_initializer, "an initializer that is not in the model", ("constants",)),
    (_change_weight_before, "a weight before changed", ("equal", "structure", "chain")),
    (_change_epsilon_alone, "epsilon changed in the certificate", ("final",)),
    (_change_epsilon_everywhere, "epsilon changed in certificate and model", ("equal", "epsilon")),
    (_change_exact_epsilon, "an exact epsilon changed", ("equal", "epsilon")),
    (_move_stored, "a stored constant moved by two ulp", ("stored",)),
    (_change_value, "the exact value of a constant changed", ("equal", "stored")),
    (_change_axis, "the axis of a norm changed", ("equal", "shape")),
    (_change_op, "another op after the rewrite", ("final",)),
    (_exchange_inputs, "two inputs exchanged", ("final",)),
    (_change_final_output, "a node that is not in the model", ("final",)),
    (_hide_final, "a node in the model is said to be cleaned up", ()),
    (_change_from, "a node of an earlier rewrite is said to be of the source", ("chain",)),
    (_leave_out_rewrite, "a rewrite is left out", ("chain", "final", "structure")),
    (_leave_out_claim, "a claim is left out", ("structure",)),
    (_leave_out_fact, "a fact is left out", ("facts",)),
    (_change_function, "the body of a function changed", ("functions",)),
    (_hide_function, "a function of the model with another body, said to be in no file", ("functions",)),
    (_redefine_standard_op, "a function redefines a standard op", ("structure",)),
    (_invent_place, "a place that is not in the model", ("final", "chain")),
    (_fix_leaf, "a leaf with a fixed size in place of a symbol", ("structure",)),
    (_change_opset, "an opset with another meaning of the op", ("chain",)),
    (_move_stored_in_mode_numeric, "a stored constant changed in mode numeric", ("stored",)),
    (_leave_out_epsilon_in_mode_numeric, "the claim epsilon left out in mode numeric", ("structure",)),
    (_change_constant_along_chain, "a constant changed along a chain", ("chain", "equal")),
    (_weaken_mode, "a weaker mode", ()),
)

FAULT_NAMES: tuple[str, ...] = tuple(name for _, name, _ in _FAULTS)
"""Names of all faults."""
