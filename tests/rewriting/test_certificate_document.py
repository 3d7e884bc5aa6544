"""Certificate files: every rewrite is in them, both sides agree in float64, and each node is tied to the model."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import normdeploy
from normdeploy.rewriting import norm_optimizer
from normdeploy.rewriting.rewrite_ledger import RewriteOptions
from normdeploy.rewriting.rewrite_records import RewriteRecorder
from normdeploy.storage.file_hash import hash_file
from tests.planted_certificates import FAULT_NAMES, planted_certificates

HEAD = '<ir_version: 10, opset_import: ["" : 21]>'
NORM = f"""{HEAD} g (float[batch, 6, 16] x) => (float[batch, 6, 16] y) <int64[1] axes = {{-1}}, float eps = {{0.00001}}>
    {{ mean = ReduceMean(x, axes) d = Sub(x, mean) square = Mul(d, d) variance = ReduceMean(square, axes)
       v = Add(variance, eps) root = Sqrt(v) y = Div(d, root) }}"""
# Variance with n − 1: the rewrite computes gamma and epsilon.
UNBIASED = f"""{HEAD} g (float[batch, 6, 16] x) => (float[batch, 6, 16] y)
    <int64[1] axes = {{-1}}, float eps = {{0.00001}}, float less = {{15.0}}>
    {{ mean = ReduceMean(x, axes) d = Sub(x, mean) square = Mul(d, d) sum = ReduceSum(square, axes)
       variance = Div(sum, less) v = Add(variance, eps) root = Sqrt(v) n = Div(d, root) y = Mul(n, gamma) }}"""
FOLD = f"""{HEAD} g (float[batch, 4, 9, 9] x) => (float[batch, 8, 4, 4] y)
    {{ c = Conv <group = 2, strides = [2, 2], kernel_shape = [3, 3]> (x, w)
       y = BatchNormalization(c, scale, shift, mean, variance) }}"""
INPUTS = f"""{HEAD} g (float[batch, 8] x) => (float[batch, 5] y)
    {{ s = Mul(x, scale) t = Add(s, shift) y = Gemm <transB = 1> (t, w, b) }}"""
OWN = f"""{HEAD} g (float[batch, 6, 16] x, float[batch, 6, 16] r) => (float[batch, 6, 16] h, float[batch, 6, 16] y)
    <int64[1] axes = {{-1}}, float eps = {{0.000001}}, float two = {{2.0}}>
    {{ h = Add(x, r) square = Pow(h, two) m = ReduceMean(square, axes) v = Add(m, eps) root = Sqrt(v)
       n = Div(h, root) y = Mul(n, gamma) }}"""
SHAPES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "norm": {},
    "unbiased": {"gamma": (16,)},
    "fold": {"w": (8, 2, 3, 3), "scale": (8,), "shift": (8,), "mean": (8,), "variance": (8,)},
    "inputs": {"scale": (8,), "shift": (8,), "w": (5, 8), "b": (5,)},
    "own": {"gamma": (16,)},
}
TEXTS = {"norm": NORM, "unbiased": UNBIASED, "fold": FOLD, "inputs": INPUTS, "own": OWN}
MODES = {"norm": "exact", "unbiased": "affine", "fold": "expressions", "inputs": "expressions", "own": "exact"}


@dataclass(frozen=True)
class Certified:
    """A written file with its certificate, and the result of the verb."""

    path: Path
    certificate: Path
    result: Any

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.certificate.read_text())  # type: ignore[no-any-return]

    @property
    def model(self) -> onnx.ModelProto:
        return onnx.load(self.path)


def write_source(name: str, folder: Path) -> Path:
    rng = np.random.default_rng(5)
    model = onnx.parser.parse_model(TEXTS[name])
    for key, shape in SHAPES[name].items():
        # Variances are positive; other constants have any sign.
        values = rng.uniform(0.5, 2.0, shape) if key == "variance" else rng.standard_normal(shape)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.float32), key))
    path = folder / f"{name}.onnx"
    onnx.save(model, path)
    return path


def certify(name: str, folder: Path, output: str = "out") -> Certified:
    source = write_source(name, folder)
    path = folder / f"{output}.onnx"
    certificate = folder / f"{output}.json"
    fuse = "portable" if name == "own" else "standard"
    result = normdeploy.optimize(source, path, certificate=certificate, fuse=fuse)
    return Certified(path, certificate, result)


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Certified]:
    return {name: certify(name, tmp_path_factory.mktemp(name)) for name in TEXTS}


def array_of(document: Mapping[str, Any], model: onnx.ModelProto, key: str) -> np.ndarray:
    entry = document["constants"][key]
    if "initializer" in entry:
        array = onnx.numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == entry["initializer"]))
    else:
        array = np.frombuffer(base64.b64decode(entry["data"]), entry["dtype"]).reshape(entry["shape"])
    assert array.dtype.name == entry["dtype"]
    assert list(array.shape) == entry["shape"]
    assert hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest() == entry["sha256"]
    return np.array(array)


def node_of(document: Mapping[str, Any], model: onnx.ModelProto, node: Mapping[str, Any]) -> onnx.NodeProto:
    made = onnx.helper.make_node(node["op"], node["inputs"], node["outputs"], domain=node["domain"])
    for name, a in node["attributes"].items():
        if a["type"] == "reference":
            kind = onnx.AttributeProto.INTS if a["value"] == "axes" else onnx.AttributeProto.FLOAT
            made.attribute.append(onnx.AttributeProto(name=name, ref_attr_name=a["value"], type=kind))
        elif a["type"] == "tensor":
            value = onnx.numpy_helper.from_array(widened(array_of(document, model, a["value"])))
            made.attribute.append(onnx.helper.make_attribute(name, value))
        else:
            made.attribute.append(onnx.helper.make_attribute(name, a["value"]))
    return made


def widened(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def run_nodes(
    certified: Certified, nodes: list[Any], constants: Mapping[str, np.ndarray], outputs: list[str], feeds: Any
) -> list[np.ndarray]:
    """Run nodes of a certificate in float64."""
    document, model = certified.document, certified.model
    values = {name: widened(array) for name, array in constants.items()} | feeds
    inputs = [
        onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in values.items()
    ]
    graph = onnx.helper.make_graph(
        [node_of(document, model, n) for n in nodes],
        "side",
        inputs,
        [onnx.helper.make_value_info(o, onnx.TypeProto()) for o in outputs],
    )
    functions = [
        onnx.helper.make_function(
            f["domain"],
            f["name"],
            f["inputs"],
            f["outputs"],
            [node_of(document, model, n) for n in f["nodes"]],
            [onnx.helper.make_opsetid("", 21)],
            f["attributes"],
        )
        for f in document["functions"]
    ]
    opsets = [onnx.helper.make_opsetid("", max(n["opset"] for n in nodes)), onnx.helper.make_opsetid("normdeploy", 1)]
    made = onnx.helper.make_model(graph, opset_imports=opsets, functions=functions)
    return list(ReferenceEvaluator(made).run(outputs, values))  # type: ignore[arg-type]


def run_sides(certified: Certified, rewrite: Mapping[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Run both sides on normal samples, with 3 for each symbol. Returns the pairs of results."""
    document, model = certified.document, certified.model
    rng = np.random.default_rng(0)
    feeds = {
        leaf["name"]: rng.standard_normal([n if isinstance(n, int) else 3 for n in leaf["shape"]])
        for leaf in rewrite["leaves"]
    }
    results = []
    for side in (rewrite["before"], rewrite["after"]):
        constants = {
            name: array_of(document, model, c["value"]) for name, c in side["constants"].items() if "value" in c
        }
        if side is rewrite["after"] and "expressions" in rewrite:
            constants |= run_expressions(certified, rewrite)
        results.append(run_nodes(certified, side["nodes"], constants, side["outputs"], feeds))
    return list(zip(*results, strict=True))


def run_expressions(certified: Certified, rewrite: Mapping[str, Any]) -> dict[str, np.ndarray]:
    told = rewrite["expressions"]
    constants = {
        name: array_of(certified.document, certified.model, c["value"]) for name, c in told["constants"].items()
    }
    values = run_nodes(certified, told["nodes"], constants, list(told["results"].values()), {})
    return dict(zip(told["results"], values, strict=True))


@pytest.mark.parametrize("name", TEXTS)
def test_certificate_has_expected_mode_and_hash(certified: dict[str, Certified], name: str) -> None:
    document = certified[name].document
    assert {rewrite["mode"] for rewrite in document["rewrites"]} == {MODES[name]}
    assert document["model"] == {"sha256": hash_file(certified[name].path), "data": {}}
    assert [rewrite["index"] for rewrite in document["rewrites"]] == list(range(len(document["rewrites"])))


@pytest.mark.parametrize("name", TEXTS)
def test_every_rewrite_of_report_is_in_certificate(certified: dict[str, Certified], name: str) -> None:
    made = [f.tensor for f in certified[name].result.summary.findings if f.status in ("fused", "folded")]
    assert made
    assert set(made) <= {rewrite["tensor"] for rewrite in certified[name].document["rewrites"]}
    assert [f["tensor"] for f in certified[name].document["findings"]] == made


@pytest.mark.parametrize("name", TEXTS)
def test_both_sides_agree_in_float64(certified: dict[str, Certified], name: str) -> None:
    # onnx's reference evaluator computes the epsilon of an own op's body in float32: 2^-24 of 1.
    bound = 2.0**-22 if name == "own" else 2.0**-40
    for rewrite in certified[name].document["rewrites"]:
        for before, after in run_sides(certified[name], rewrite):
            assert before.shape == after.shape
            np.testing.assert_allclose(after, before, rtol=0, atol=bound * np.abs(before).max())


@pytest.mark.parametrize("name", ["fold", "inputs"])
def test_stored_constants_are_expressions_rounded_once(certified: dict[str, Certified], name: str) -> None:
    for rewrite in certified[name].document["rewrites"]:
        for constant, exact in run_expressions(certified[name], rewrite).items():
            key = rewrite["after"]["constants"][constant]["rounded"]
            stored = array_of(certified[name].document, certified[name].model, key)
            assert stored.shape == exact.shape
            # Half an ulp, and the rounding of float64 sums of up to 18 terms near 1.
            half = np.spacing(np.abs(stored)) / 2 + 2.0**-46
            assert (np.abs(stored - exact) <= half).all()


@pytest.mark.parametrize("name", TEXTS)
def test_nodes_after_rewrites_are_in_file_or_later_rewrite(certified: dict[str, Certified], name: str) -> None:
    document = certified[name].document
    written = {o for n in certified[name].model.graph.node for o in n.output}
    for rewrite in document["rewrites"]:
        for node in rewrite["after"]["nodes"]:
            final = node["final"]
            assert final["where"] in ("file", "rewrite")
            if final["where"] == "file":
                assert final["output"] in written
            else:
                readers = document["rewrites"][final["index"]]["before"]["nodes"]
                (same,) = [n for n in readers if n["outputs"] == node["outputs"]]
                assert same["from"] == rewrite["index"]
                assert all(same[key] == node[key] for key in ("op", "domain", "attributes", "inputs"))


def test_chain_of_rewrites_is_recorded(certified: dict[str, Certified]) -> None:
    first, second = certified["own"].document["rewrites"]
    assert {node["from"] for node in first["before"]["nodes"]} == {None}
    assert {node["from"] for node in second["before"]["nodes"]} == {0, None}
    assert {f["name"]: f["in_file"] for f in certified["own"].document["functions"]} == {
        "RMSNorm": False,
        "AddRMSNorm": True,
    }


def test_exact_epsilon_is_fraction_of_epsilon_before(certified: dict[str, Certified]) -> None:
    (rewrite,) = certified["unbiased"].document["rewrites"]
    ((_, told),) = rewrite["epsilons"].items()
    eps = float(np.float32(0.00001)).as_integer_ratio()
    assert int(told["numerator"]) * eps[1] * 16 == int(told["denominator"]) * eps[0] * 15


def test_same_call_gives_same_bytes(certified: dict[str, Certified], tmp_path: Path) -> None:
    for name in ("unbiased", "own"):
        again = certify(name, tmp_path, output="elsewhere")
        assert again.certificate.read_bytes() == certified[name].certificate.read_bytes()


def test_variance_fact_is_listed(certified: dict[str, Certified]) -> None:
    (rewrite,) = certified["fold"].document["rewrites"]
    (fact,) = rewrite["facts"]
    assert fact == {"fact": "positive", "side": "before", "constant": "variance", "plus": float(np.float32(1e-5))}


def test_each_fault_is_planted_in_some_certificate(certified: dict[str, Certified]) -> None:
    planted = set()
    for each in certified.values():
        for fault in planted_certificates(each.document, each.path.read_bytes()):
            planted.add(fault.name)
            assert (fault.document, fault.model) != (each.document, each.path.read_bytes())
            if "hash" not in fault.claims:
                assert hashlib.sha256(fault.model).hexdigest() == fault.document["model"]["sha256"]
    assert planted == set(FAULT_NAMES)


GELU = f"""{HEAD} g (float[n, 8] x) => (float[n, 8] y)
    <float half = {{0.5}}, float one = {{1.0}}, float root = {{0.70710677}}>
    {{ a = Mul(x, root) e = Erf(a) o = Add(e, one) h = Mul(x, half) y = Mul(h, o) }}"""
CLAMPED = f"""{HEAD} g (float[batch, 16] x) => (float[batch, 16] y)
    <int64[1] axes = {{-1}}, float eps = {{0.00001}}, float zero = {{0.0}}>
    {{ mean = ReduceMean(x, axes) d = Sub(x, mean) square = Mul(d, d) s = ReduceMean(square, axes)
       variance = Max(s, zero) v = Add(variance, eps) root = Sqrt(v) y = Div(d, root) }}"""


@pytest.mark.parametrize(
    ("text", "op", "reason"),
    [
        (GELU, "Gelu", "the rewrite was proved without a prime field"),
        (CLAMPED, "LayerNormalization", "no definition in the field: Max"),
    ],
)
def test_sides_without_definition_in_field_are_numeric(tmp_path: Path, text: str, op: str, reason: str) -> None:
    onnx.save(onnx.parser.parse_model(text), tmp_path / "source.onnx")
    result = normdeploy.optimize(tmp_path / "source.onnx", tmp_path / "out.onnx", certificate=tmp_path / "out.json")
    certified = Certified(tmp_path / "out.onnx", tmp_path / "out.json", result)
    (rewrite,) = certified.document["rewrites"]
    assert (rewrite["mode"], rewrite["reason"]) == ("numeric", reason)
    assert [node["op"] for node in rewrite["after"]["nodes"]] == [op]
    assert {claim["claim"] for claim in rewrite["claims"]} <= {"shape", "equal", "nonfinite", "stored"}
    ((before, after),) = run_sides(certified, rewrite)
    # The stored √½ is rounded to float32, the node's √½ is not.
    np.testing.assert_allclose(after, before, rtol=0, atol=2.0**-16 * np.abs(before).max())


def test_only_last_pass_over_a_file_is_recorded(tmp_path: Path) -> None:
    source = write_source("norm", tmp_path)
    recorder = RewriteRecorder()
    first = norm_optimizer.optimize_with_steps(onnx.load(source), RewriteOptions(recorder=recorder))
    assert [record.tensor for record in recorder.records] == ["y"]
    # A second pass omits the step that is to be undone.
    undone = dict(first[2])
    norm_optimizer.optimize_with_steps(onnx.load(source), RewriteOptions(recorder=recorder, undone=undone))
    assert recorder.records == []


CAST_LIKE = f"""{HEAD} g (float[3, 8, 6] x) => (float[3, 8, 6] y)
    <int64[3] groups = {{0, 4, -1}}, float[4] ones = {{1, 1, 1, 1}}, float[4] zeros = {{0, 0, 0, 0}}>
    {{ shape = Shape(x) rows = Reshape(x, groups)
       i = InstanceNormalization(rows, ones, zeros) normal = Reshape(i, shape)
       factors = Expand(scale, shape) s = CastLike(factors, normal) scaled = Mul(normal, s)
       offsets = Expand(bias, shape) b = CastLike(offsets, scaled) y = Add(scaled, b) }}"""


def test_node_that_reads_only_a_type_follows_its_writer(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(CAST_LIKE)
    for name, value in (("scale", 2.0), ("bias", 3.0)):
        values = np.full((8, 1), value, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    onnx.save(model, tmp_path / "source.onnx")
    normdeploy.optimize(tmp_path / "source.onnx", tmp_path / "out.onnx", certificate=tmp_path / "out.json")
    (rewrite,) = json.loads((tmp_path / "out.json").read_text())["rewrites"]
    known = {"", *(leaf["name"] for leaf in rewrite["leaves"]), *rewrite["before"]["constants"]}
    for node in rewrite["before"]["nodes"]:
        assert set(node["inputs"]) <= known
        known |= set(node["outputs"])
