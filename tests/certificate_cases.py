"""Build certificates by hand, and run the independent checker on certificates that a test changed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.serialization import registry

import normdeploy_check as checker
from tests.planted_certificates import constant_key, to_json

Json = dict[str, Any]
SAMPLES = Path(__file__).parent / "certificates"
NAMES = ("block", "convs", "norm", "own")


@dataclass
class Case:
    """A certificate and its model, changed by a test and then checked."""

    raw: Json
    model: onnx.ModelProto
    data: bytes | None = None

    def write(self, folder: Path) -> list[str]:
        """Write both files. Returns: their paths. The model's hash in the certificate is corrected if it changed."""
        content = self.model.SerializeToString() if self.data is None else self.data
        self.raw["model"]["sha256"] = hashlib.sha256(content).hexdigest()
        (folder / "c.json").write_text(json.dumps(self.raw))
        (folder / "m.onnx").write_bytes(content)
        return [str(folder / "c.json"), str(folder / "m.onnx")]

    def store(self, values: np.ndarray) -> str:
        """Add a constant to the table. Returns its key."""
        key = constant_key(np.ascontiguousarray(values).reshape(values.shape))
        self.raw["constants"][key] = to_json(numpy_helper.from_array(values))
        return key

    def array(self, digest: str) -> np.ndarray:
        """Return a constant of the table that does not refer to the model."""
        entry = json.dumps(self.raw["constants"][digest])
        return np.array(numpy_helper.to_array(registry.get("json").deserialize_proto(entry, TensorProto())))

    def initializer(self, name: str) -> np.ndarray:
        return next(numpy_helper.to_array(t) for t in self.model.graph.initializer if t.name == name)

    def set_initializer(self, name: str, values: np.ndarray) -> None:
        """Change a constant of the model. The certificate keeps the elements that it referred to."""
        tensor = next(t for t in self.model.graph.initializer if t.name == name)
        for digest, entry in self.raw["constants"].items():
            if entry == name:
                self.raw["constants"][digest] = to_json(numpy_helper.from_array(self.initializer(name)))
        tensor.CopyFrom(numpy_helper.from_array(values, name))

    def node(self, output: str) -> onnx.NodeProto:
        return next(n for n in self.model.graph.node if n.output[0] == output)

    def set_attribute(self, output: str, **values: Any) -> None:
        """Change attributes of the model's node."""
        node = self.node(output)
        kept = [a for a in node.attribute if a.name not in values]
        del node.attribute[:]
        node.attribute.extend([*kept, *(helper.make_attribute(n, v) for n, v in values.items())])


def load_sample(name: str) -> Case:
    """Load a sample. Its model is written byte by byte until a test changes it."""
    model = onnx.load(SAMPLES / f"{name}.onnx")
    return Case(json.loads((SAMPLES / f"{name}.json").read_text()), model)


def make_node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    """Make a node. An empty list is an attribute of integers."""
    node = helper.make_node(op, inputs, outputs)
    for name, value in attributes.items():
        kind = onnx.AttributeProto.INTS if value == [] else None
        node.attribute.append(helper.make_attribute(name, value, attr_type=kind))
    return node


def parse_nodes(text: str) -> list[onnx.NodeProto]:
    """Parse lines such as ``z = Sub(x, y) axis=1``."""
    nodes = []
    for line in filter(None, map(str.strip, text.split("\n"))):
        match = re.fullmatch(r"(.*?) = (\w+)\((.*?)\)(.*)", line)
        assert match is not None
        outputs, op, inputs, rest = match.groups()
        attributes = {k: json.loads(v) for k, v in re.findall(r"(\w+)=(\S+)", rest)}
        names = [n.strip() for n in inputs.split(",")] if inputs else []
        nodes.append(make_node(op, names, outputs.split(", "), **attributes))
    return nodes


def make_case(
    before: Sequence[onnx.NodeProto],
    after: Sequence[onnx.NodeProto],
    leaves: Mapping[str, Any],
    constants: Mapping[str, np.ndarray] | None = None,
    mode: str = "exact",
    opset: int = 21,
) -> Case:
    """Return a certificate of one rewrite, and the model of its nodes. Constants may be read by both sides.

    Args:
        leaves: shape of each leaf; None for an unknown rank.
        opset: opset of both sides.
    """
    constants = constants or {}
    results = [(after or before)[-1].output[0]]
    tensors = [numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items()]
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in [*leaves, *results]]
    graph = helper.make_graph(list(after), "g", infos[: len(leaves)], infos[len(leaves) :], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in leaves.items()]
    rewrite = {
        "mode": mode,
        "scope": 0,
        "before": {
            "node": [to_json(node) for node in before],
            "input": [to_json(info) for info in inputs],
            "output": [{"name": name} for name in results],
        },
        "exact": {"node": []},
        "results": {},
        "constants": {"before": {}, "exact": {}},
        "epsilons": {},
        "replaced": {},
        "computed": [],
    }
    raw = {
        "schema": checker.SCHEMA,
        "model": {"sha256": "", "data": {}},
        "source": {"sha256": None, "opset": opset},
        "constants": {},
        "rewrites": [rewrite],
    }
    case = Case(raw, model)
    rewrite["constants"]["before"] = {name: case.store(np.asarray(v)) for name, v in constants.items()}
    return case


def subtract_case() -> Case:
    """Return x − y with a Neg in between, as a certificate with a Sub in the model."""
    return make_case(parse_nodes("m = Neg(y)\nz = Add(x, m)"), parse_nodes("z = Sub(x, y)"), {"x": [3], "y": [3]})
