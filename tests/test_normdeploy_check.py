"""Test the independent checker of certificates.

Certificates of normdeploy are accepted, and planted faults are rejected. Each op of the tables is compared with
rational numbers and onnx's reference evaluator. tests/certificates holds certificates of an earlier version.
"""

from __future__ import annotations

import ast
import base64
import copy
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import normdeploy
import normdeploy_check as checker
from tests.planted_certificates import planted_certificates
from tests.rewriting.test_certificate_document import TEXTS, Certified, certify

Json = dict[str, Any]
SAMPLES = Path(__file__).parent / "certificates"
NAMES = ("block", "convs", "norm", "own")
F32 = {n: float(np.float32(n)) for n in (1e-5, 1e-6)}
DTYPE_BFLOAT16 = helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)


@dataclass
class Case:
    """A certificate and its model, changed by a test and then checked."""

    raw: Json
    model: onnx.ModelProto
    data: bytes | None = None
    folder: Path = field(default_factory=Path)

    def rehash(self) -> None:
        self.raw["model"]["sha256"] = hashlib.sha256(self.model.SerializeToString()).hexdigest()

    def set_constant(self, key: str, values: np.ndarray) -> None:
        """Store new elements in the table of constants, with the new hash."""
        self.raw["constants"][key] = stored(values)

    def array(self, key: str) -> np.ndarray:
        entry = self.raw["constants"][key]
        if "initializer" in entry:
            return self.initializer(entry["initializer"])
        return np.frombuffer(base64.b64decode(entry["data"]), entry["dtype"]).reshape(entry["shape"])

    def initializer(self, name: str) -> np.ndarray:
        return next(numpy_helper.to_array(t) for t in self.model.graph.initializer if t.name == name)

    def set_initializer(self, name: str, values: np.ndarray) -> None:
        tensor = next(t for t in self.model.graph.initializer if t.name == name)
        tensor.CopyFrom(numpy_helper.from_array(values, name))
        self.rehash()
        for entry in self.raw["constants"].values():
            if entry.get("initializer") == name:
                entry["sha256"] = hashlib.sha256(values.tobytes()).hexdigest()

    def node(self, output: str) -> onnx.NodeProto:
        return next(n for n in self.model.graph.node if n.output[0] == output)


def stored(values: np.ndarray) -> Json:
    data = np.ascontiguousarray(values).tobytes()
    entry = {"dtype": values.dtype.name, "shape": list(values.shape), "sha256": hashlib.sha256(data).hexdigest()}
    return entry | {"data": base64.b64encode(data).decode()}


def load(name: str) -> Case:
    model = SAMPLES / f"{name}.onnx"
    return Case(json.loads((SAMPLES / f"{name}.json").read_text()), onnx.load(model), model.read_bytes())


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Write a case and run the program on it. Returns: the exit code and the output."""

    def run(case: Case, *options: str) -> tuple[int, str]:
        (tmp_path / "c.json").write_text(json.dumps(case.raw))
        actual = hashlib.sha256(case.data or b"").hexdigest()
        keep = case.data is not None and actual == case.raw["model"]["sha256"]
        (tmp_path / "m.onnx").write_bytes(case.data if keep else case.model.SerializeToString())
        arguments = [str(tmp_path / "c.json"), str(tmp_path / "m.onnx"), "--seed", "5", *options]
        code = checker.main(arguments)
        return code, capsys.readouterr().out

    return run


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


# --- Samples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_sample_is_accepted(name: str, check: Callable[..., tuple[int, str]]) -> None:
    code, text = check(load(name))
    assert code == 0, text
    assert "accepted" in text


def test_source_with_its_hash_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(SAMPLES / n) for n in ("norm.json", "norm.onnx", "norm_source.onnx")]
    assert checker.main(files) == 0
    assert "not in the source" not in capsys.readouterr().out
    assert checker.main([*files[:2], files[1]]) == 1
    assert "claim hash" in capsys.readouterr().out


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Certified]:
    return {name: certify(name, tmp_path_factory.mktemp(name)) for name in TEXTS}


@pytest.mark.parametrize("name", TEXTS)
def test_new_certificate_is_accepted_with_its_source(
    name: str, certified: dict[str, Certified], capsys: pytest.CaptureFixture[str]
) -> None:
    one = certified[name]
    files = [one.certificate, one.path, one.path.parent / f"{name}.onnx"]
    code, text = checker.main([*map(str, files), "--seed", "3"]), capsys.readouterr().out
    assert code == 0, text
    # Every rewrite of these files is proved.
    assert "0 tested (numeric)" in text
    assert "rewrites not covered: 0 none" in text


@pytest.mark.parametrize("name", TEXTS)
def test_planted_certificates_are_rejected_by_a_named_claim(
    name: str, certified: dict[str, Certified], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = certified[name]
    files = [tmp_path / "c.json", tmp_path / "m.onnx"]
    for fault in planted_certificates(one.document, one.path.read_bytes()):
        files[0].write_text(json.dumps(fault.document))
        files[1].write_bytes(fault.model)
        code, text = checker.main([*map(str, files), "--seed", "3"]), capsys.readouterr().out
        found = re.match(r"rejected: claim (\w+) fails", text)
        if fault.claims:
            assert code == 1, (fault.name, text)
            assert found is not None, (fault.name, text)
            assert found[1] in fault.claims, (fault.name, text)
        else:
            assert code == 0, (fault.name, text)
            assert re.search(r"[1-9]\d* (nodes left to the cleanup|tested \(numeric\))", text), (fault.name, text)


SHAPE_OF_INPUT = """<ir_version: 10, opset_import: ["" : 21]> g (float[n, 3, 8] x) => (float[n, 3, 8] y)
    <int64[2] rows = {-1, 8}>
    { m = MatMul(x, w) f = Reshape(m, rows) b = BatchNormalization(f, scale, shift, mean, variance)
      s = Shape(x) y = Reshape(b, s) }"""


def test_fold_whose_chain_reads_a_shape_is_certified(tmp_path: Path, rng: np.random.Generator) -> None:
    model = onnx.parser.parse_model(SHAPE_OF_INPUT)
    for name in ("scale", "shift", "mean", "variance", "w"):
        values = rng.uniform(0.5, 2.0, (8, 8) if name == "w" else 8).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    onnx.save(model, tmp_path / "source.onnx")
    normdeploy.optimize(tmp_path / "source.onnx", tmp_path / "out.onnx", certificate=tmp_path / "c.json")
    assert checker.main([str(tmp_path / "c.json"), str(tmp_path / "out.onnx"), "--seed", "3"]) == 0


@pytest.mark.parametrize("name", NAMES)
def test_planted_samples_are_rejected(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads((SAMPLES / f"{name}.json").read_text())
    files = [tmp_path / "c.json", tmp_path / "m.onnx"]
    rejected = 0
    for fault in planted_certificates(document, (SAMPLES / f"{name}.onnx").read_bytes()):
        files[0].write_text(json.dumps(fault.document))
        files[1].write_bytes(fault.model)
        code, text = checker.main([*map(str, files), "--seed", "3"]), capsys.readouterr().out
        rejected += code
        assert code == bool(fault.claims), (fault.name, text)
        assert not fault.claims or text.split()[2] in fault.claims, (fault.name, text)
    assert rejected >= 12


def test_checker_imports_only_numpy_and_onnx() -> None:
    tree = ast.parse(Path(checker.__file__).read_text())
    plain = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    sources = [n.module or "." for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    libraries = {name.partition(".")[0] for name in [*plain, *sources]} - set(sys.stdlib_module_names)
    assert libraries == {"numpy", "onnx"}


# --- Planted faults --------------------------------------------------------------------------------------------------


def model_byte(case: Case) -> None:
    case.raw["model"]["sha256"] = "0" * 64


def schema(case: Case) -> None:
    case.raw["schema"] = "normdeploy/rewrites/2"


def data_byte(case: Case) -> None:
    key = case.raw["rewrites"][0]["before"]["constants"]["n.g"]["value"]
    values = case.array(key).copy()
    values[0] += 1
    case.raw["constants"][key]["data"] = stored(values)["data"]


def other_initializer(case: Case) -> None:
    case.raw["constants"]["k6"]["initializer"] = "l.bias"


def weight_bit(case: Case) -> None:
    key = case.raw["rewrites"][1]["before"]["constants"]["0.weight"]["value"]
    values = case.array(key).copy()
    values.view(np.uint32).flat[0] ^= 1
    case.set_constant(key, values)
    case.raw["rewrites"][1]["expressions"]["constants"]["0.weight"]["value"] = "k_old"
    case.raw["constants"]["k_old"] = load("convs").raw["constants"][key]


def consistent_weight_bit(case: Case) -> None:
    key = case.raw["rewrites"][2]["before"]["constants"]["q.weight.T"]["value"]
    values = case.array(key).copy()
    values.view(np.uint32).flat[5] ^= 1
    case.set_constant("k_new", values)
    case.raw["rewrites"][2]["before"]["constants"]["q.weight.T"]["value"] = "k_new"


def epsilon(case: Case) -> None:
    case.raw["rewrites"][0]["after"]["nodes"][0]["attributes"]["epsilon"]["value"] = F32[1e-6]


def epsilon_in_both(case: Case) -> None:
    epsilon(case)
    node = case.node(case.raw["rewrites"][0]["after"]["nodes"][0]["outputs"][0])
    next(a for a in node.attribute if a.name == "epsilon").f = 1e-6
    case.rehash()


def numerator(case: Case) -> None:
    exact = next(iter(case.raw["rewrites"][0]["epsilons"].values()))
    exact["numerator"] = str(int(exact["numerator"]) + 1)


def rounded_ulp(case: Case) -> None:
    values = case.initializer("add_29_scale").copy()
    values[3] = np.nextafter(values[3], np.float32(9))
    case.set_initializer("add_29_scale", values)


def expression_ulp(case: Case) -> None:
    name = "0.weight_2"
    values = case.initializer(name).copy()
    values.flat[3] = np.nextafter(values.flat[3], np.float32(9))
    case.set_initializer(name, values)


def computed_value(case: Case) -> None:
    values = case.array("k7").copy()
    values[3] *= 1 + 2.0**-20
    case.set_constant("k7", values)


def axis_in_both(case: Case) -> None:
    case.raw["rewrites"][0]["after"]["nodes"][0]["attributes"]["axis"]["value"] = 1
    next(a for a in case.node("y").attribute if a.name == "axis").i = 1
    case.rehash()


def after_op(case: Case) -> None:
    case.raw["rewrites"][2]["after"]["nodes"][-2]["op"] = "MatMul"


def sub_case() -> Case:
    """Return x − y with a Neg in between, as a certificate with a Sub in the model."""
    before = [raw_node("Neg", ["y"], ["m"]), raw_node("Add", ["x", "m"], ["z"])]
    return case_of(before, [raw_node("Sub", ["x", "y"], ["z"])], {"x": [3], "y": [3]})


def other_output(case: Case) -> None:
    case.raw["rewrites"][0]["after"]["nodes"][0]["final"]["output"] = "mul_84"


def other_from(case: Case) -> None:
    for node in case.raw["rewrites"][1]["before"]["nodes"]:
        node["from"] = 0 if node["from"] is None else None


def without_first(case: Case) -> None:
    del case.raw["rewrites"][0]
    case.raw["rewrites"][0]["index"] = 0


def without_last(case: Case) -> None:
    del case.raw["rewrites"][1]


def without_claim(case: Case) -> None:
    del case.raw["rewrites"][0]["claims"][1]


def without_stored(case: Case) -> None:
    claims = case.raw["rewrites"][0]["claims"]
    case.raw["rewrites"][0]["claims"] = [c for c in claims if c["claim"] != "stored"]


def without_fact(case: Case) -> None:
    case.raw["rewrites"][1]["facts"] = []


def negative_variance(case: Case) -> None:
    key = case.raw["rewrites"][1]["before"]["constants"]["1.running_var"]["value"]
    values = case.array(key).copy()
    values[0] = -1
    case.set_constant(key, values)


def bound(case: Case) -> None:
    case.raw["bounds"]["affine"] *= 2


def function_body(case: Case) -> None:
    case.raw["functions"][0]["nodes"][0]["op"] = "Sub"


def affine_to_exact(case: Case) -> None:
    case.raw["rewrites"][0]["mode"] = "exact"
    case.raw["rewrites"][0]["claims"][1]["mode"] = "exact"


FAULTS = [
    ("norm", model_byte, "hash"),
    ("norm", schema, "structure"),
    ("block", data_byte, "constants"),
    ("block", other_initializer, "constants"),
    ("convs", weight_bit, "equal|structure"),
    ("block", consistent_weight_bit, "equal"),
    ("norm", epsilon, "final"),
    ("norm", epsilon_in_both, "equal"),
    ("block", epsilon, "final"),
    ("block", epsilon_in_both, "epsilon"),
    ("block", numerator, "equal"),
    ("convs", numerator, "equal"),
    ("block", rounded_ulp, "stored"),
    ("convs", expression_ulp, "stored"),
    ("block", computed_value, "equal"),
    ("norm", axis_in_both, "equal|shape"),
    ("block", after_op, "final"),
    ("block", other_output, "final"),
    ("own", other_from, "chain"),
    ("own", without_first, "chain"),
    ("own", without_last, "chain|structure"),
    ("norm", without_claim, "structure"),
    ("block", without_stored, "structure"),
    ("convs", without_fact, "facts"),
    ("convs", negative_variance, "facts"),
    ("norm", bound, "structure"),
    ("own", function_body, "functions"),
    ("block", affine_to_exact, "equal"),
]


@pytest.mark.parametrize(("name", "fault", "claims"), FAULTS, ids=lambda v: getattr(v, "__name__", v))
def test_planted_fault_is_rejected(
    name: str, fault: Callable[[Case], None], claims: str, check: Callable[..., tuple[int, str]]
) -> None:
    case = load(name)
    fault(case)
    code, text = check(case)
    assert code == 1, text
    assert re.match(rf"rejected: claim ({claims}) fails", text), text


def test_one_changed_byte_of_the_model_fails_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray((SAMPLES / "block.onnx").read_bytes())
    data[-10] ^= 1
    (tmp_path / "m.onnx").write_bytes(data)
    assert checker.main([str(SAMPLES / "block.json"), str(tmp_path / "m.onnx")]) == 1
    assert "claim hash" in capsys.readouterr().out


def test_add_in_place_of_sub_fails_final(check: Callable[..., tuple[int, str]]) -> None:
    case = sub_case()
    assert check(case)[0] == 0
    case.raw["rewrites"][0]["after"]["nodes"][0]["op"] = "Add"
    code, text = check(case)
    assert (code, "claim final" in text) == (1, True)


def test_exchanged_inputs_fail(check: Callable[..., tuple[int, str]]) -> None:
    case = sub_case()
    node = case.raw["rewrites"][0]["after"]["nodes"][0]
    node["inputs"].reverse()
    assert check(case)[0] == 1
    node["final"]["inputs"].reverse()
    code, text = check(case)
    assert (code, "claim final" in text) == (1, True)


def test_cleanup_in_place_of_file_is_counted(check: Callable[..., tuple[int, str]]) -> None:
    case = load("norm")
    case.raw["rewrites"][0]["after"]["nodes"][0]["final"] = {"where": "cleanup"}
    code, text = check(case)
    assert (code, "1 nodes left to the cleanup" in text) == (0, True), text


def test_mode_numeric_is_counted_as_tested(check: Callable[..., tuple[int, str]]) -> None:
    case = load("norm")
    case.raw["rewrites"][0]["mode"] = "numeric"
    case.raw["rewrites"][0]["claims"][1]["mode"] = "numeric"
    code, text = check(case)
    assert (code, "0 rewrites proved" in text, "1 tested" in text) == (0, True, True), text


# --- Certificates by hand --------------------------------------------------------------------------------------------


def raw_attribute(value: Any) -> Json:
    kinds = {int: "int", float: "float", str: "string"}
    if isinstance(value, list):
        return {"type": kinds[type(value[0])] + "s" if value else "ints", "value": value}
    return {"type": kinds[type(value)], "value": value}


def raw_node(op: str, inputs: list[str], outputs: list[str], opset: int = 21, **attributes: Any) -> Json:
    named = {n: raw_attribute(v) for n, v in attributes.items()}
    return {"op": op, "domain": "", "opset": opset, "inputs": inputs, "outputs": outputs, "attributes": named}


def case_of(
    before: list[Json],
    after: list[Json],
    leaves: Json,
    constants: dict[str, np.ndarray] | None = None,
    mode: str = "exact",
    **more: Any,
) -> Case:
    """Return a certificate of one rewrite, and the model of its nodes. Constants may be read by both sides."""
    constants = constants or {}
    table = {f"k_{n}": stored(v) for n, v in constants.items()}
    opset = max([n["opset"] for n in after], default=21)
    protos = []
    for node in after:
        values = {n: a["value"] for n, a in node["attributes"].items()}
        protos.append(helper.make_node(node["op"], node["inputs"], node["outputs"], **values))
        node["final"] = {"where": "file", "output": node["outputs"][0], "inputs": list(node["inputs"])}
    for node in before:
        node["from"] = None
    results = after[-1]["outputs"][:1] if after else before[-1]["outputs"][:1]
    tensors = [numpy_helper.from_array(v, n) for n, v in constants.items()]
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in [*leaves, *results]]
    graph = helper.make_graph(protos, "g", infos[: len(leaves)], infos[len(leaves) :], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    entries = {n: {"value": f"k_{n}"} for n in constants}
    head = {"index": 0, "place": "", "stage": "", "kind": "", "tensor": "", "became": "", "converted": False}
    claims = [{"claim": "shape", "before": [n], "after": [n]} for n in results]
    claims += [{"claim": "equal", "before": n, "after": n, "mode": mode} for n in results]
    rewrite = head | {
        "mode": mode,
        "reason": "",
        "proof": None,
        "leaves": [{"name": n, "dtype": "float32", "shape": s, "only_shape": False} for n, s in leaves.items()],
        "before": {"nodes": before, "constants": dict(entries), "outputs": list(results)},
        "after": {"nodes": after, "constants": dict(entries), "outputs": list(results)},
        "epsilons": {},
        "facts": [],
        "claims": claims,
    }
    raw = {
        "schema": "normdeploy/rewrites/1",
        "normdeploy": "0",
        "model": {"sha256": "", "data": {}},
        "source": {"sha256": None, "opset": opset},
        "bounds": {"affine": 2.0**-30, "expression": 2.0**-40, "numeric": 2.0**-16},
        "constants": table,
        "functions": [],
        "rewrites": [rewrite | more],
        "findings": [],
    }
    case = Case(raw, model)
    case.rehash()
    return case


@dataclass(frozen=True)
class Op:
    """An op with its leaves and constants. ``wrong``: attributes or an op that give another function."""

    op: str
    leaves: Json
    attributes: Json = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    wrong: Json = field(default_factory=dict)
    opset: int = 21
    outputs: int = 1
    order: str = ""

    def node(self, output: str, **changed: Any) -> Json:
        inputs = self.order.split() or [*self.leaves, *self.constants]
        outputs = [output, *[f"{output}_{i}" for i in range(1, self.outputs)]]
        inputs = ["" if n == "-" else n for n in inputs]
        return raw_node(self.op, inputs, outputs, self.opset, **(self.attributes | changed))

    def arrays(self) -> dict[str, np.ndarray]:
        arrays = {n: np.asarray(v) for n, v in self.constants.items()}
        return {n: v.astype(np.float32) if v.dtype == np.float64 else v for n, v in arrays.items()}


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def ramp(*shape: int) -> np.ndarray:
    return (np.arange(math.prod(shape)) % 7 + 1).reshape(shape) / 4


X = {"x": [2, 3, 4]}
IMAGE = {"x": [2, 4, 6, 5]}
OPS = [
    Op("Add", X | {"y": [3, 1]}),
    Op("Sub", X | {"y": [4]}),
    Op("Mul", X | {"y": [2, 1, 4]}),
    Op("Div", X | {"y": [4]}),
    Op("Neg", X),
    Op("Sum", X | {"y": [4], "u": [3, 1]}),
    Op("Mean", X | {"y": [4], "u": [3, 1]}),
    Op("Reciprocal", X),
    Op("Pow", X, constants={"c": np.array(2.0)}),
    Op("Pow", X, constants={"c": np.array(-3.0)}),
    Op("Pow", {"x": [2, 3]}, constants={"c": np.array([-0.5])}),
    Op("Pow", {"x": [2, 3]}, constants={"c": np.array([1.5])}),
    Op("Sqrt", {"x": [2, 3]}),
    Op("ReduceSum", X, {"keepdims": 0}, {"a": ints(-1, 0)}, {"keepdims": 1}),
    Op("ReduceSum", X, {"axes": [1]}, wrong={"axes": [2]}, opset=11),
    Op("ReduceSum", X, {"noop_with_empty_axes": 1}, wrong={"noop_with_empty_axes": 0}),
    Op("ReduceMean", X, {}, {"a": ints(1)}, {"keepdims": 0}),
    Op("ReduceMean", X, {"axes": [1, 2]}, wrong={"axes": [1]}, opset=13),
    Op("ReduceMean", X),
    Op("ReduceSumSquare", X, {}, {"a": ints(-2)}, {"keepdims": 0}),
    Op("ReduceL2", {"x": [2, 5]}, {}, {"a": ints(1)}, {"keepdims": 0}),
    Op("ReduceL2", {"x": [2, 5]}, {"axes": [1], "keepdims": 0}, wrong={"axes": [0]}, opset=13),
    Op("GlobalAveragePool", IMAGE),
    Op("MatMul", {"x": [2, 3, 4], "y": [4, 5]}),
    Op("MatMul", {"x": [4], "y": [3, 4, 5]}),
    Op("MatMul", {"x": [2, 3, 4], "y": [4]}),
    Op("Gemm", {"x": [3, 4], "y": [4, 5], "u": [5]}, {"alpha": 0.5, "beta": 2.0}, wrong={"beta": 1.0}),
    Op("Gemm", {"x": [4, 3], "y": [5, 4]}, {"transA": 1, "transB": 1}, wrong={"alpha": 2.0}),
    Op("Gemm", {"x": [3, 3], "y": [3, 3]}, {"transB": 1}, wrong={"transB": 0}),
    Op("Einsum", {"x": [2, 3, 4], "y": [2, 4, 5]}, {"equation": "bij,bjk->bik"}, wrong={"equation": "bij,bjk->bki"}),
    Op("Einsum", {"x": [3, 3]}, {"equation": "ii->i"}, wrong={"equation": "ij->i"}),
    Op("Einsum", {"x": [2, 3, 4], "y": [4, 3]}, {"equation": "...ij,jk"}, wrong={"equation": "...ij,jk->...ki"}),
    Op("Einsum", {"x": [2, 3], "y": [3, 4], "u": [4]}, {"equation": "ij,jk,k->i"}, wrong={"equation": "ij,jk,k->j"}),
    Op("Conv", IMAGE, {"group": 2}, {"w": ramp(6, 2, 3, 2), "b": ramp(6)}, {"pads": [1, 0, 1, 0]}),
    Op("Conv", IMAGE, {"strides": [2, 1], "dilations": [1, 2], "pads": [1, 0, 2, 1]}, {"w": ramp(3, 4, 3, 2)},
       {"pads": [2, 0, 1, 1]}),
    Op("Conv", IMAGE, {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, {"w": ramp(3, 4, 3, 2)},
       {"auto_pad": "SAME_LOWER"}),
    Op("Conv", {"x": [2, 4, 7]}, {"group": 4}, {"w": ramp(8, 1, 3)}, {"pads": [1, 1]}),
    Op("ConvTranspose", IMAGE, {"group": 2}, {"w": ramp(4, 3, 3, 2), "b": ramp(6)}, {"pads": [1, 0, 1, 0]}),
    Op("ConvTranspose", IMAGE, {"strides": [2, 3], "dilations": [2, 1], "pads": [1, 0, 2, 1],
       "output_padding": [1, 0]}, {"w": ramp(4, 3, 2, 2)}, {"pads": [2, 0, 1, 1]}),
    Op("Reshape", X, {}, {"s": ints(0, -1)}),
    Op("Flatten", X, {"axis": 2}, wrong={"axis": 1}),
    Op("Squeeze", {"x": [1, 3, 1]}, {}, {"a": ints(-1)}),
    Op("Squeeze", {"x": [1, 3, 1]}, {"axes": [0]}, wrong={"axes": [2]}, opset=11),
    Op("Unsqueeze", X, {}, {"a": ints(0, -1)}),
    Op("Unsqueeze", X, {"axes": [1]}, wrong={"axes": [0]}, opset=11),
    Op("Transpose", X, {"perm": [2, 0, 1]}, wrong={"perm": [0, 2, 1]}),
    Op("Transpose", X),
    Op("Expand", {"x": [3, 1]}, {}, {"s": ints(2, 1, 4)}),
    Op("Tile", {"x": [2, 3]}, {}, {"r": ints(2, 3)}),
    Op("Concat", X | {"y": [2, 1, 4]}, {"axis": -2}),
    Op("Split", X, {"axis": 2}, {"s": ints(1, 3)}, outputs=2),
    Op("Split", {"x": [5, 2]}, {"num_outputs": 2}, wrong={"axis": 1}, outputs=2),
    Op("Slice", X, {}, {"s": ints(3, -1), "e": ints(-9, 0), "a": ints(2, 1), "t": ints(-2, -1)}),
    Op("Slice", X, {}, {"s": ints(1), "e": ints(2**63 - 1), "a": ints(-1)}),
    Op("Slice", X, {"starts": [-2], "ends": [5], "axes": [1]}, wrong={"starts": [0]}, opset=9),
    Op("Identity", X),
    Op("Dropout", X),
    Op("Cast", X, {"to": 11}),
    Op("BatchNormalization", {"x": [2, 3, 4]}, {"epsilon": 0.25}, {n: ramp(3) + i for i, n in enumerate("sbmv")},
       {"epsilon": 0.5}),
    Op("LayerNormalization", {"x": [2, 3, 4]}, {}, {"s": ramp(4), "b": ramp(4)}, {"axis": 1}),
    Op("LayerNormalization", {"x": [2, 3, 4]}, {"axis": 1, "epsilon": 0.5}, {"s": ramp(3, 4)}, {"epsilon": 0.25}),
    Op("RMSNormalization", {"x": [2, 3, 4]}, {}, {"s": ramp(4)}, {"axis": 1}, opset=23),
    Op("InstanceNormalization", {"x": [2, 3, 2, 2]}, {}, {"s": ramp(3), "b": ramp(3) + 1}, {"epsilon": 0.5}),
    Op("GroupNormalization", {"x": [2, 4, 3]}, {"num_groups": 2}, {"s": ramp(4), "b": ramp(4) + 1},
       {"num_groups": 1}),
    Op("MeanVarianceNormalization", {"x": [2, 3, 2, 2]}, {}, {}, {"axes": [2, 3]}),
    Op("Sigmoid", X), Op("Tanh", X), Op("Erf", X), Op("Softplus", X),
    Op("HardSigmoid", X, {"alpha": 0.5}, {}, {"alpha": 0.25}),
    Op("Gelu", X, {"approximate": "tanh"}, {}, {"approximate": "none"}),
    Op("Swish", X, {"alpha": 0.5}, {}, {"alpha": 1.0}, opset=24),
    Op("Softmax", X, {"axis": 1}, {}, {"axis": 2}),
    Op("Softmax", X, {"axis": 1}, {}, {"axis": 2}, opset=11),
]  # fmt: skip
IDS = [f"{o.op}-{i}" for i, o in enumerate(OPS)]
UNUSABLE_REFERENCE = {("Swish", 24), ("MeanVarianceNormalization", 21), ("Softmax", 11)}


def result_case(case: Op, **changed: Any) -> Case:
    """Return the certificate op(x) = −(−op(x)), with changed attributes on the right side."""
    after = [
        case.node("mid", **changed),
        raw_node("Neg", ["mid"], ["neg"], case.opset),
        raw_node("Neg", ["neg"], ["z"], case.opset),
    ]
    facts = [{"fact": "positive", "side": s, "constant": "v", "plus": 0.25} for s in ("before", "after")]
    facts = facts if case.op == "BatchNormalization" else []
    if facts and changed:
        facts[1]["plus"] = changed["epsilon"]
    built = case_of([case.node("z")], after, case.leaves, case.arrays(), facts=facts)
    built.raw["rewrites"][0]["before"]["outputs"] = ["z"]
    return built


@pytest.mark.parametrize("case", OPS, ids=IDS)
def test_op_right_identity_is_accepted(case: Op, check: Callable[..., tuple[int, str]]) -> None:
    code, text = check(result_case(case))
    assert code == 0, text


@pytest.mark.parametrize("case", OPS, ids=IDS)
def test_op_wrong_identity_is_refused(case: Op, check: Callable[..., tuple[int, str]]) -> None:
    wrong = result_case(case, **case.wrong)
    if not case.wrong:
        node = wrong.raw["rewrites"][0]["after"]["nodes"][-1]
        node["op"] = "Identity"
        node["final"] = {"where": "cleanup"}
    code, text = check(wrong)
    assert (code, bool(re.search("claim (equal|shape) fails", text))) == (1, True), text


def node_of(raw: Json) -> checker.Node:
    values = {n: (a["type"], a["value"]) for n, a in raw["attributes"].items()}
    return checker.Node(raw["op"], "", raw["opset"], raw["inputs"], raw["outputs"], values)


def compute(raw: Json, ar: checker.Arithmetic, inputs: list[Any], constants: set[str]) -> list[np.ndarray]:
    """Compute a node. The inputs in ``constants`` depend on no leaf."""
    real = [x if name in constants else None for name, x in zip(raw["inputs"], inputs, strict=True)]
    with np.errstate(all="ignore"):
        return checker.compute(checker.Call(node_of(raw), ar, inputs, real), "exact")


@pytest.mark.parametrize("case", OPS, ids=IDS)
def test_op_in_float64_equals_reference(case: Op, rng: np.random.Generator) -> None:
    raw = case.node("z")
    if (case.op, case.opset) in UNUSABLE_REFERENCE or (case.op == "ConvTranspose" and "group" in raw["attributes"]):
        pytest.skip("onnx's reference does not compute this op; another test does")
    values = {n: np.abs(rng.standard_normal(s)) + 0.1 for n, s in case.leaves.items()}
    values |= {n: checker.literal(v) for n, v in case.arrays().items()}
    inputs = [values[n] for n in raw["inputs"]]
    actual = compute(raw, checker.Arithmetic(rng), inputs, set(case.constants))
    for ours, theirs in zip(actual, checker.reference(node_of(raw), inputs), strict=False):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


# --- The field -------------------------------------------------------------------------------------------------------


PRIME = 2_305_843_009_213_693_951


@pytest.fixture
def modular_arithmetic(rng: np.random.Generator) -> checker.Arithmetic:
    return checker.Arithmetic(rng, PRIME)


def modular(values: np.ndarray) -> np.ndarray:
    """Return fractions as elements of the field."""
    flat = [Fraction(v).numerator * pow(Fraction(v).denominator, -1, PRIME) % PRIME for v in np.ravel(values).tolist()]
    result = np.empty(len(flat), dtype=object)
    result[:] = flat
    return result.reshape(np.shape(values))


def test_random_prime_has_62_bits_and_root_of_square_is_its_power(rng: np.random.Generator) -> None:
    prime = checker.random_prime(rng)
    assert (prime.bit_length(), prime % 4) == (62, 3)
    assert all(pow(a, prime - 1, prime) == 1 for a in range(2, 100))


def test_field_element_equals_the_exact_fraction(modular_arithmetic: checker.Arithmetic) -> None:
    values = np.array([0.0, -0.0, 1.5, -0.1, 1e300, 5e-324, -2.2250738585072014e-308, 2.0**53, float(np.float32(1e-5))])
    np.testing.assert_array_equal(modular_arithmetic.element(values), modular(values))


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div", "MatMul", "Sum", "ReduceSum"])
def test_op_in_the_field_equals_fractions(
    op: str, modular_arithmetic: checker.Arithmetic, rng: np.random.Generator
) -> None:
    a, b = (rng.integers(-9, 9, (4, 4)) * 2 + 1 for _ in range(2))
    inputs = [modular(a)] if op == "ReduceSum" else [modular(a), modular(b)]
    fraction = np.vectorize(lambda v: Fraction(int(v)), otypes=[object])
    exact = {"Add": a + b, "Sub": a - b, "Mul": a * b, "MatMul": a @ b, "Sum": a + b, "ReduceSum": a.sum(keepdims=True)}
    expected = fraction(a) / fraction(b) if op == "Div" else exact[op]
    (actual,) = compute(raw_node(op, ["x", "y"][: len(inputs)], ["z"]), modular_arithmetic, inputs, set())
    np.testing.assert_array_equal(actual, modular(expected))


def test_matmul_in_the_field_equals_big_integers(
    modular_arithmetic: checker.Arithmetic, rng: np.random.Generator
) -> None:
    a, b = (rng.integers(0, PRIME, s).astype(object) for s in ((3, 5000), (5000, 2)))
    (actual,) = compute(raw_node("MatMul", ["x", "y"], ["z"]), modular_arithmetic, [a, b], set())
    np.testing.assert_array_equal(actual, a @ b % PRIME)


def test_result_without_a_root_is_nan_and_spreads(modular_arithmetic: checker.Arithmetic) -> None:
    # As p mod 4 = 3, exactly one of 4 and −4 is a square.
    with np.errstate(invalid="ignore"):
        roots = modular_arithmetic.root(modular(np.array([[4, -4]])))
    assert roots[0, 0] in (2, PRIME - 2)
    assert math.isnan(roots[0, 1])
    (total,) = compute(raw_node("MatMul", ["x", "y"], ["z"]), modular_arithmetic, [roots.T, roots[:, :1]], set())
    assert total[0, 0] == 4
    assert math.isnan(total[1, 0])
    (sigmoid,) = compute(raw_node("Sigmoid", ["x"], ["z"]), modular_arithmetic, [roots], set())
    (softmax,) = compute(raw_node("Softmax", ["x"], ["z"]), modular_arithmetic, [roots], set())
    assert [math.isnan(v) for v in sigmoid[0]] == [False, True]
    assert [math.isnan(v) for v in softmax[0]] == [True, True]


def naive_conv_transpose(x: np.ndarray, w: np.ndarray, groups: int, strides: Any, dilations: Any) -> np.ndarray:
    """Scatter each element of x, as the standard defines it, without pads."""
    n, c, *spatial = x.shape
    per_group = w.shape[1]
    shape = [s * (i - 1) + d * (k - 1) + 1 for s, i, d, k in zip(strides, spatial, dilations, w.shape[2:], strict=True)]
    result = np.zeros((n, groups * per_group, *shape), dtype=object)
    for image, channel, out in np.ndindex(n, c, per_group):
        target = (channel // (c // groups)) * per_group + out
        for i, j, k, m in np.ndindex(*spatial, *w.shape[2:]):
            place = (i * strides[0] + k * dilations[0], j * strides[1] + m * dilations[1])
            result[(image, target, *place)] += x[image, channel, i, j] * w[channel, out, k, m]
    return result


def naive_conv(x: np.ndarray, w: np.ndarray, groups: int, strides: Any, dilations: Any) -> np.ndarray:
    """Convolve without pads, element by element."""
    spans = [d * (k - 1) + 1 for d, k in zip(dilations, w.shape[2:], strict=True)]
    spatial = [(i - k) // s + 1 for i, k, s in zip(x.shape[2:], spans, strides, strict=True)]
    result = np.zeros((x.shape[0], w.shape[0], *spatial), dtype=object)
    for n, m, i, j, c, k, q in np.ndindex(*result.shape, *w.shape[1:]):
        channel = m // (w.shape[0] // groups) * w.shape[1] + c
        pixel = x[n, channel, i * strides[0] + k * dilations[0], j * strides[1] + q * dilations[1]]
        result[n, m, i, j] += pixel * w[m, c, k, q]
    return result


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("op", "naive", "shape", "dilations"),
    [("ConvTranspose", naive_conv_transpose, (4, 3, 3, 2), [2, 1]), ("Conv", naive_conv, (6, 4, 2, 2), [2, 3])],
)
def test_convolution_in_the_field_equals_integers(
    op: str,
    naive: Callable[..., np.ndarray],
    shape: tuple[int, ...],
    dilations: list[int],
    groups: int,
    modular_arithmetic: checker.Arithmetic,
    rng: np.random.Generator,
) -> None:
    shape = shape if op == "ConvTranspose" else (shape[0], shape[1] // groups, *shape[2:])
    x, w = rng.integers(-5, 5, (2, 4, 6, 5)), rng.integers(-5, 5, shape)
    raw = raw_node(op, ["x", "w"], ["z"], group=groups, strides=[2, 3], dilations=dilations)
    (actual,) = compute(raw, modular_arithmetic, [modular(x), modular(w)], set())
    np.testing.assert_array_equal(actual, modular(naive(x.astype(object), w.astype(object), groups, [2, 3], dilations)))


# --- Identities ------------------------------------------------------------------------------------------------------


def node_list(text: str, opset: int = 21) -> list[Json]:
    """Parse lines such as ``z = Sub(x, y) axis=1``."""
    nodes = []
    for line in filter(None, map(str.strip, text.split("\n"))):
        outputs, op, inputs, rest = re.fullmatch(r"(.*?) = (\w+)\((.*?)\)(.*)", line).groups()
        attributes = {k: json.loads(v) for k, v in re.findall(r"(\w+)=(\S+)", rest)}
        nodes.append(
            raw_node(
                op, [n.strip() for n in inputs.split(",")] if inputs else [], outputs.split(", "), opset, **attributes
            )
        )
    return nodes


LAYER_NORM = """
m = ReduceMean(x, last)
d = Sub(x, m)
q = Mul(d, d)
v = ReduceMean(q, last)
e = Add(v, eps)
r = Sqrt(e)
n = Div(d, r)
g = Mul(n, s)
z = Add(g, b)
"""
NORM = {"last": ints(-1), "eps": np.float32(0.25), "s": ramp(4).astype(np.float32), "b": ramp(4).astype(np.float32)}
IDENTITIES = {
    "layer norm": (LAYER_NORM, "z = LayerNormalization(x, s, b) epsilon=0.25", {"x": ["n", 3, 4]}, NORM),
    "inverse deviation": (
        LAYER_NORM.replace("n = Div(d, r)", "n = Reciprocal(r)")
        .replace("g = Mul(n, s)", "g = Mul(n, one)")
        .replace("z = Add(g, b)", "z = Add(g, zero)"),
        "y, k, z0 = LayerNormalization(x, s, b) epsilon=0.25\nz = Identity(z0)",
        {"x": [2, 4]},
        NORM | {"one": np.float32(1), "zero": np.float32(0)},
    ),
    "group norm, opset 18": (
        "h = Reshape(x, rows)\ni = InstanceNormalization(h, s, b) epsilon=0.25\nz = Reshape(i, back)",
        "z = GroupNormalization(x, s, b) num_groups=2 epsilon=0.25",
        {"x": [3, 4, 2]},
        {"rows": ints(0, 2, -1), "back": ints(3, 4, 2), "s": np.float32([2, 3]), "b": np.float32([1, -1])},
        20,
    ),
    "simplified layer norm": (
        "q = Mul(x, x)\nv = ReduceMean(q, last)\ne = Add(v, eps)\nr = Sqrt(e)\nn = Div(x, r)\nz = Mul(n, s)",
        "z = RMSNormalization(x, s) epsilon=0.25",
        {"x": [2, 4]},
        NORM,
        23,
    ),
    "principal roots multiply": (
        "a = Sqrt(x)\nb = Sqrt(y)\nz = Mul(a, b)",
        "q = Mul(x, y)\nz = Sqrt(q)",
        {"x": [5], "y": [5]},
        {},
    ),
    "L2 norm": ("z = ReduceL2(x, last)", "q = ReduceSumSquare(x, last)\nz = Sqrt(q)", {"x": ["n", "n"]}, NORM),
    "mean over a shape": (
        "h = Shape(x) start=1\np = ReduceProd(h) keepdims=0\nf = Cast(p) to=1\n"
        "t = ReduceSum(x, last) keepdims=0\nz = Div(t, f)",
        "z = ReduceMean(x, last) keepdims=0",
        {"x": ["a", "b"]},
        NORM,
    ),
    "zeros of a shape": (
        "h = Shape(x)\nk = ConstantOfShape(h)\nz = Add(x, k)",
        "z = Identity(x)",
        {"x": ["a", None]},
        {},
    ),
    "cast like": ("h = Size(x)\nk = CastLike(h, x)\nt = Mul(x, k)\nz = Div(t, k)", "z = Identity(x)", {"x": ["a"]}, {}),
    "swish": ("k = Sigmoid(x)\nz = Mul(x, k)", "z = Swish(x)", {"x": [4]}, {}, 24),
    "permuted softmax": (
        "f = Slice(x, one, low, last, back)\nk = Softmax(f)\nz = Slice(k, one, low, last, back)",
        "z = Softmax(x)",
        {"x": [3, 4]},
        {"one": ints(-1), "low": ints(-9), "last": ints(-1), "back": ints(-1)},
    ),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_identity_is_accepted_and_its_scaled_form_refused(name: str, check: Callable[..., tuple[int, str]]) -> None:
    before, after, leaves, constants, *opset = IDENTITIES[name]
    one, other = (node_list(t, *opset) for t in (before, after))
    code, text = check(case_of(one, other, leaves, constants))
    assert code == 0, text
    *rest, last = node_list(after, *opset)
    last["outputs"] = [n.replace("z", "zz") if n == "z" else n for n in last["outputs"]]
    wrong = [*rest, last, raw_node("Sum", ["zz", "zz"], ["z"], *opset)]
    code, text = check(case_of(node_list(before, *opset), wrong, leaves, constants))
    assert (code, "claim equal" in text) == (1, True), text


def test_roots_of_constants_are_accepted_for_one_of_many_primes(check: Callable[..., tuple[int, str]]) -> None:
    constants = {"c": np.float32(3), "d": np.float32(12), "six": np.float32(6), "five": np.float32(5)}
    facts = [{"fact": "positive", "side": "before", "constant": n} for n in "cd"]
    before = "a = Sqrt(c)\nb = Sqrt(d)\nt = Mul(a, b)\nz = Mul(x, t)"
    code, text = check(case_of(node_list(before), node_list("z = Mul(x, six)"), {"x": [3]}, constants, facts=facts))
    assert code == 0, text
    code, text = check(case_of(node_list(before), node_list("z = Mul(x, five)"), {"x": [3]}, constants, facts=facts))
    assert (code, "claim equal" in text) == (1, True), text


def test_wrong_sign_is_refused(check: Callable[..., tuple[int, str]]) -> None:
    constants = {"c": np.float32(3), "d": np.float32(12), "six": np.float32(-6)}
    facts = [{"fact": "positive", "side": "before", "constant": n} for n in "cd"]
    before = "a = Sqrt(c)\nb = Sqrt(d)\nt = Mul(a, b)\nz = Mul(x, t)"
    assert check(case_of(node_list(before), node_list("z = Mul(x, six)"), {"x": [3]}, constants, facts=facts))[0] == 1


def test_many_roots_of_constants_are_accepted(check: Callable[..., tuple[int, str]]) -> None:
    scale = {n: np.float32(1) * ramp(64).astype(np.float32) for n in "sbmv"}
    facts = [{"fact": "positive", "side": s, "constant": "v", "plus": F32[1e-5]} for s in ("before", "after")]
    before = "y = Identity(x)\nz = BatchNormalization(y, s, b, m, v)"
    after = "z = BatchNormalization(x, s, b, m, v)"
    code, text = check(case_of(node_list(before), node_list(after), {"x": [2, 64]}, scale, facts=facts))
    assert code == 0, text


def test_sizes_that_are_sums_are_accepted(check: Callable[..., tuple[int, str]]) -> None:
    length = {"sum": [[2, ["n", "n"]], [-1, []]]}
    before = "z = Concat(x, y) axis=0"
    after = "a = Identity(y)\nz = Concat(x, a) axis=0"
    assert check(case_of(node_list(before), node_list(after), {"x": ["n"], "y": [length]}))[0] == 0


def test_unknown_rank_is_accepted(check: Callable[..., tuple[int, str]]) -> None:
    assert check(case_of(node_list("z = Add(x, x)"), node_list("z = Sum(x, x)"), {"x": None}))[0] == 0


# --- Ops that the modes do not allow ---------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["z = Relu(x)", "z = Exp(x)", "z = Pow(x, y)", "z = Gather(x, i)", "z = Abs(x)"])
def test_op_outside_of_the_tables_fails_structure(line: str, check: Callable[..., tuple[int, str]]) -> None:
    code, text = check(case_of(node_list(line), node_list(line), {"x": [3], "y": [3]}, {"i": ints(0)}))
    assert (code, "claim structure" in text) == (1, True), text


@pytest.mark.parametrize(("after", "code"), [("z = Relu(x)", 0), ("z = Abs(x)", 1), ("z = Clip(x, zero)", 0)])
def test_numeric_mode_uses_the_reference(after: str, code: int, check: Callable[..., tuple[int, str]]) -> None:
    before = node_list("k = Greater(x, zero)\nz = Where(k, x, zero)")
    built = case_of(before, node_list(after), {"x": ["a", 3]}, {"zero": np.float32(0)}, mode="numeric")
    assert check(built)[0] == code


def test_opset_with_another_meaning_fails_final(check: Callable[..., tuple[int, str]]) -> None:
    constants = {"s": np.float32([2, 3]), "b": np.float32([1, -1])}
    line = "z = GroupNormalization(x, s, b) num_groups=2"
    built = case_of(node_list(line, 20), node_list(line, 20), {"x": [2, 2, 3]}, constants)
    assert check(built)[0] == 0
    built.model.opset_import[0].version = 21
    built.rehash()
    code, text = check(built)
    assert (code, "claim final" in text) == (1, True), text


# --- Hostile files ---------------------------------------------------------------------------------------------------


def hostile(name: str) -> bytes:
    text = (SAMPLES / "norm.json").read_text()
    return {
        "empty": b"",
        "binary": bytes(range(256)),
        "list": b"[]",
        "deep": b"[" * 200_000,
        "long integer": b'{"schema": ' + b"9" * 100_000 + b"}",
        "nan": b'{"schema": NaN}',
        "twice": b'{"schema": 1, "schema": 2}',
        "cut": text[:1000].encode(),
    }[name]


@pytest.mark.parametrize("name", ["empty", "binary", "list", "deep", "long integer", "nan", "twice", "cut"])
def test_unreadable_certificate_exits_with_2(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.json").write_bytes(hostile(name))
    assert checker.main([str(tmp_path / "c.json"), str(SAMPLES / "norm.onnx")]) == 2
    text = capsys.readouterr().out
    assert text.startswith("refused: ")
    assert text.count("\n") == 1


def test_missing_file_exits_with_2(tmp_path: Path) -> None:
    assert checker.main([str(tmp_path / "none.json"), str(SAMPLES / "norm.onnx")]) == 2


def test_model_that_is_not_onnx_exits_with_2(check: Callable[..., tuple[int, str]]) -> None:
    case = load("norm")
    case.data = b"not a model"
    case.raw["model"]["sha256"] = hashlib.sha256(case.data).hexdigest()
    assert check(case)[0] == 2


def large_leaf(raw: Json) -> None:
    raw["rewrites"][0]["leaves"][0]["shape"] = [1 << 40, 64]


def large_constant(raw: Json) -> None:
    raw["constants"]["k1"]["shape"] = [1 << 40]


def wrong_type(raw: Json) -> None:
    raw["rewrites"][0]["leaves"] = {"x": 1}


def no_index(raw: Json) -> None:
    del raw["rewrites"][0]["index"]


def other_key(raw: Json) -> None:
    raw["rewrites"][0]["before"]["constants"]["axes"]["value"] = "k99"


def undefined_name(raw: Json) -> None:
    raw["rewrites"][0]["before"]["nodes"][0]["inputs"][0] = "nothing"


def name_twice(raw: Json) -> None:
    raw["rewrites"][0]["before"]["nodes"][1]["outputs"][0] = "mean"


def not_finite(raw: Json) -> None:
    raw["constants"]["k1"] = stored(np.array(np.nan, dtype=np.float32))


def wrong_axis(raw: Json) -> None:
    raw["rewrites"][0]["before"]["nodes"][0]["attributes"]["axes"] = {"type": "ints", "value": [2**62]}


def no_base64(raw: Json) -> None:
    raw["constants"]["k1"]["data"] = "???"


@pytest.mark.parametrize(
    "change",
    [large_leaf, large_constant, wrong_type, no_index, other_key, undefined_name, name_twice, not_finite, no_base64],
    ids=lambda f: f.__name__,
)
def test_malformed_field_is_one_plain_line(
    change: Callable[[Json], None], check: Callable[..., tuple[int, str]]
) -> None:
    case = load("norm")
    change(case.raw)
    code, text = check(case)
    assert code in (1, 2)
    assert text.count("\n") == 1, text


@pytest.mark.parametrize("line", ["z = Expand(x, s)", "z = Tile(x, s)", "h = ConstantOfShape(s)\nz = Add(x, h)"])
def test_tensor_over_the_limit_is_refused(line: str, check: Callable[..., tuple[int, str]]) -> None:
    code, text = check(case_of(node_list(line), node_list(line.replace("h", "k")), {"x": [1]}, {"s": ints(1 << 40)}))
    assert (code, "memory limit" in text) == (2, True), text


def test_recursive_function_is_refused(check: Callable[..., tuple[int, str]]) -> None:
    call = raw_node("F", ["x"], ["z"]) | {"domain": "d"}
    built = case_of([copy.deepcopy(call)], [copy.deepcopy(call)], {"x": [1]})
    built.raw["rewrites"][0]["after"]["nodes"][0]["final"] = {"where": "cleanup"}
    body = {"name": "F", "domain": "d", "inputs": ["x"], "outputs": ["z"], "attributes": [], "defaults": {}}
    built.raw["functions"] = [body | {"nodes": [call], "in_file": False}]
    assert check(built)[0] == 2


def test_wide_layer_takes_seconds(check: Callable[..., tuple[int, str]], rng: np.random.Generator) -> None:
    weight = {
        "w": rng.standard_normal((2048, 2048)).astype(np.float32),
        "b": rng.standard_normal(2048).astype(np.float32),
    }
    before = "h = MatMul(x, w)\nz = Add(h, b)"
    code, text = check(case_of(node_list(before), node_list("z = Gemm(x, w, b)"), {"x": ["n", 2048]}, weight))
    assert code == 0, text


# --- Holes that the page leaves open ---------------------------------------------------------------------------------


def test_weight_shared_with_expressions_fails_stored(check: Callable[..., tuple[int, str]]) -> None:
    case = load("convs")
    key = case.raw["rewrites"][1]["before"]["constants"]["0.weight"]["value"]
    values = case.array(key).copy()
    values.flat[0] *= np.float32(1.5)
    case.set_constant(key, values)
    code, text = check(case)
    assert (code, "claim stored" in text) == (1, True), text


def test_numeric_mode_with_another_rounded_constant_fails_stored(check: Callable[..., tuple[int, str]]) -> None:
    case = load("norm")
    rewrite = case.raw["rewrites"][0]
    rewrite["mode"] = rewrite["claims"][1]["mode"] = "numeric"
    case.set_initializer("y_scale", np.full(64, 7, np.float32))
    code, text = check(case)
    assert (code, "claim stored" in text) == (1, True), text


def test_constant_that_differs_along_the_chain_fails_chain(check: Callable[..., tuple[int, str]]) -> None:
    case = load("own")
    values = case.initializer("g").copy()
    values[0] = 0
    case.set_constant("k_new", values)
    case.raw["rewrites"][1]["before"]["constants"]["g"]["value"] = "k_new"
    code, text = check(case)
    assert (code, "claim chain" in text) == (1, True), text


def test_right_node_in_an_unused_function_fails_final(check: Callable[..., tuple[int, str]]) -> None:
    case = sub_case()
    right = copy.deepcopy(case.node("z"))
    case.node("z").op_type = "Mul"
    opsets = [helper.make_opsetid("", 21)]
    case.model.functions.append(helper.make_function("d", "F", ["x", "y"], ["z"], [right], opsets))
    case.rehash()
    code, text = check(case)
    assert (code, "claim final" in text) == (1, True), text


def test_redefined_standard_op_fails_structure(check: Callable[..., tuple[int, str]]) -> None:
    case = sub_case()
    body = [raw_node("Neg", ["x"], ["z"])]
    names = {"name": "Sub", "domain": "", "inputs": ["x", "y"], "outputs": ["z"], "attributes": [], "defaults": {}}
    case.raw["functions"] = [names | {"nodes": body, "in_file": False}]
    code, text = check(case)
    assert (code, "claim structure" in text) == (1, True), text


def test_half_ulp_equals_its_definition() -> None:
    values = np.array([1.0, 1.5, -2.0, 0.0, 2.0**-149, 2.0**-126], np.float32)
    np.testing.assert_array_equal(checker.half_ulp(values), [2.0**-24, 2.0**-24, 2.0**-23, *[2.0**-150] * 3])
    short = np.array([1.0, 1.5, -2.0, 0.0], DTYPE_BFLOAT16)
    np.testing.assert_array_equal(checker.half_ulp(short), [2.0**-8, 2.0**-8, 2.0**-7, 2.0**-134])


def mutated(value: Any, path: list[Any], new: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


def paths_of(value: Any, path: list[Any]) -> list[list[Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    return [path] * bool(path) + [p for k, v in items for p in paths_of(v, [*path, k])]


@pytest.mark.parametrize("name", ["norm", "own"])
def test_random_changes_never_cause_a_traceback(
    name: str, check: Callable[..., tuple[int, str]], rng: np.random.Generator
) -> None:
    paths = [p for p in paths_of(load(name).raw, []) if p[0] != "model"]
    values = [None, "x", "", -1, 1 << 80, 0.5, [], {}, [None], True, "inf", "k0", "x" * 50]
    for index in rng.choice(len(paths), 60, replace=False):
        case = load(name)
        mutated(case.raw, paths[index], values[rng.integers(len(values))])
        code, text = check(case)
        assert code in (0, 1, 2)
        assert "Traceback" not in text
        assert "cause a" not in text, (paths[index], text)


def test_function_of_the_model_with_another_body_fails_functions(check: Callable[..., tuple[int, str]]) -> None:
    case = load("own")
    case.raw["functions"][0]["in_file"] = False
    code, text = check(case)
    assert (code, "claim functions" in text) == (1, True), text
    function_body(case)
    assert check(case)[0] == 1


def test_made_up_place_fails_final(check: Callable[..., tuple[int, str]]) -> None:
    case = load("norm")
    case.raw["rewrites"][0]["place"] = "elsewhere"
    code, text = check(case)
    assert (code, "claim final" in text) == (1, True), text


@pytest.mark.parametrize("shape", [["batch", 17, 64], [2, 16, 64], ["batch", 16]])
def test_leaf_with_another_shape_than_the_input_fails(shape: list[Any], check: Callable[..., tuple[int, str]]) -> None:
    case = load("norm")
    case.raw["rewrites"][0]["leaves"][0]["shape"] = shape
    code, text = check(case)
    assert (code, "claim structure" in text) == (1, True), text


def test_opset_of_before_with_another_meaning_fails_chain(check: Callable[..., tuple[int, str]]) -> None:
    case = load("norm")
    case.raw["rewrites"][0]["before"]["nodes"][0]["opset"] = 13
    code, text = check(case)
    assert (code, "claim chain" in text) == (1, True), text


@pytest.mark.parametrize(
    "line",
    [
        "z = Pow(i, two)",
        "z = Reshape(x, two)",
        "z = Add(x, i)",
        "z = Conv(x, w) kernel_shape=[2]",
        "z = Concat(x, i) axis=0",
    ],
)
def test_wrong_types_and_shapes_fail_equal(line: str, check: Callable[..., tuple[int, str]]) -> None:
    constants = {"i": ints(1, 2), "two": np.float32([2]), "w": np.ones((1, 1, 1), np.float32)}
    code, text = check(case_of(node_list(line), node_list(line), {"x": [1, 1, 2]}, constants))
    assert (code, "claim equal" in text) == (1, True), text
