"""Certificate files: every rewrite is in them, and both sides agree in float64."""

from __future__ import annotations

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
from onnx.serialization import registry

import normdeploy
from normdeploy.rewriting import norm_optimizer
from normdeploy.rewriting.certificate_document import CertifiedFile, certificate_bytes
from normdeploy.rewriting.rewrite_ledger import RewriteOptions
from normdeploy.rewriting.rewrite_records import (
    RecordedLeaf,
    RecordedNode,
    RecordedSide,
    RewriteRecord,
    RewriteRecorder,
)
from normdeploy.storage.file_hash import hash_file
from tests.planted_certificates import FAULT_NAMES, constant_key, planted_certificates

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
MODES = {"norm": "exact", "unbiased": "affine", "fold": "exact", "inputs": "exact", "own": "exact"}


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


def array_of(document: Mapping[str, Any], model: onnx.ModelProto, digest: str) -> np.ndarray:
    entry = document["constants"][digest]
    if isinstance(entry, str):
        array = onnx.numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == entry))
    else:
        array = onnx.numpy_helper.to_array(from_json(entry, onnx.TensorProto()))
    assert constant_key(array) == digest
    return np.array(array)


def from_json(raw: Any, proto: Any) -> Any:
    return registry.get("json").deserialize_proto(json.dumps(raw), proto)


def widened(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def run_nodes(raw: Any, constants: Mapping[str, np.ndarray], outputs: list[str], feeds: Any) -> list[np.ndarray]:
    """Run nodes of a certificate in float64."""
    values = {name: widened(array) for name, array in constants.items()} | feeds
    inputs = [
        onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in values.items()
    ]
    results = [onnx.helper.make_value_info(o, onnx.TypeProto()) for o in outputs]
    nodes = from_json({"node": raw["node"]}, onnx.GraphProto()).node
    graph = onnx.helper.make_graph(nodes, "side", inputs, results)
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    return list(ReferenceEvaluator(made).run(outputs, values))  # type: ignore[arg-type]


def run_exact(certified: Certified, rewrite: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Compute the exact values of the constants after a rewrite, in float64."""
    digests = rewrite["constants"]["before"] | rewrite["constants"]["exact"]
    constants = {name: array_of(certified.document, certified.model, digest) for name, digest in digests.items()}
    own = [tensor for tensor in rewrite["results"].values() if tensor not in constants]
    computed = dict(zip(own, run_nodes(rewrite["exact"], constants, own, {}), strict=True)) if own else {}
    return {name: (computed | constants)[tensor] for name, tensor in rewrite["results"].items()}


def run_model(certified: Certified, exact: Mapping[str, np.ndarray], outputs: list[str], feeds: Any) -> Any:
    """Run the written file in float64, with exact values in place of stored constants."""
    model = certified.model
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer} | dict(exact)
    del model.graph.initializer[:]
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(widened(array), name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    return ReferenceEvaluator(model).run(outputs, feeds)


def run_sides(certified: Certified, rewrite: Mapping[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Run both sides on normal samples, with 3 for each symbol. Returns the pairs of results."""
    rng = np.random.default_rng(0)
    feeds = {}
    for leaf in rewrite["before"]["input"]:
        dims = leaf["type"]["tensor_type"]["shape"]["dim"]
        feeds[leaf["name"]] = rng.standard_normal([int(d.get("dim_value", 3)) for d in dims])
    digests = rewrite["constants"]["before"]
    constants = {name: array_of(certified.document, certified.model, digest) for name, digest in digests.items()}
    outputs = [output["name"] for output in rewrite["before"]["output"]]
    before = run_nodes(rewrite["before"], constants, outputs, feeds)
    after = run_model(certified, run_exact(certified, rewrite), outputs, feeds)
    return list(zip(before, after, strict=True))


@pytest.mark.parametrize("name", TEXTS)
def test_certificate_has_expected_mode_and_hash(certified: dict[str, Certified], name: str) -> None:
    document = certified[name].document
    assert {rewrite["mode"] for rewrite in document["rewrites"]} == {MODES[name]}
    assert document["model"] == {"sha256": hash_file(certified[name].path), "data": {}}
    assert document["schema"] == "normdeploy/rewrites/2"


@pytest.mark.parametrize("name", TEXTS)
def test_every_rewrite_of_report_is_in_certificate(certified: dict[str, Certified], name: str) -> None:
    made = [f.tensor for f in certified[name].result.summary.findings if f.status in ("fused", "folded")]
    assert made
    assert set(made) <= {tensor for rewrite in certified[name].document["rewrites"] for tensor in rewrite["tensors"]}
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
def test_stored_constants_are_exact_values_rounded_once(certified: dict[str, Certified], name: str) -> None:
    for rewrite in certified[name].document["rewrites"]:
        assert rewrite["exact"]["node"]
        for constant, exact in run_exact(certified[name], rewrite).items():
            (tensor,) = [t for t in certified[name].model.graph.initializer if t.name == constant]
            stored = onnx.numpy_helper.to_array(tensor)
            assert stored.shape == exact.shape
            # Half an ulp, and the rounding of float64 sums of up to 18 terms near 1.
            half = np.spacing(np.abs(stored)) / 2 + 2.0**-46
            assert (np.abs(stored - exact) <= half).all()


def test_chain_of_rewrites_is_one_rewrite(certified: dict[str, Certified]) -> None:
    (rewrite,) = certified["own"].document["rewrites"]
    assert rewrite["tensors"] == ["y", "y"]
    # The nodes before are those of the source, and the node after is that of the file.
    source = onnx.parser.parse_model(OWN)
    assert {n["output"][0] for n in rewrite["before"]["node"]} == {n.output[0] for n in source.graph.node}
    assert [node.op_type for node in certified["own"].model.graph.node] == ["AddRMSNorm"]
    assert [output["name"] for output in rewrite["before"]["output"]] == ["y", "h"]


def test_exact_epsilon_is_fraction_of_epsilon_before(certified: dict[str, Certified]) -> None:
    (rewrite,) = certified["unbiased"].document["rewrites"]
    ((_, (numerator, denominator)),) = rewrite["epsilons"].items()
    eps = float(np.float32(0.00001)).as_integer_ratio()
    assert int(numerator) * eps[1] * 16 == int(denominator) * eps[0] * 15


def test_same_call_gives_same_bytes(certified: dict[str, Certified], tmp_path: Path) -> None:
    for name in ("unbiased", "own"):
        again = certify(name, tmp_path, output="elsewhere")
        assert again.certificate.read_bytes() == certified[name].certificate.read_bytes()


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
    ("text", "op", "mode", "reason"),
    [
        (GELU, "Gelu", "numeric", "the rewrite was proved without a prime field"),
        (CLAMPED, "LayerNormalization", "exact", ""),
    ],
)
def test_mode_depends_on_exact_definitions(tmp_path: Path, text: str, op: str, mode: str, reason: str) -> None:
    onnx.save(onnx.parser.parse_model(text), tmp_path / "source.onnx")
    result = normdeploy.optimize(tmp_path / "source.onnx", tmp_path / "out.onnx", certificate=tmp_path / "out.json")
    certified = Certified(tmp_path / "out.onnx", tmp_path / "out.json", result)
    (rewrite,) = certified.document["rewrites"]
    assert (rewrite["mode"], rewrite["reason"]) == (mode, reason)
    assert [node.op_type for node in certified.model.graph.node] == [op]
    ((before, after),) = run_sides(certified, rewrite)
    # The stored √½ is rounded to float32, the node's √½ is not.
    bound = 2.0**-16 if mode == "numeric" else 2.0**-40
    np.testing.assert_allclose(after, before, rtol=0, atol=bound * np.abs(before).max())


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
    known = {"", *(leaf["name"] for leaf in rewrite["before"]["input"]), *rewrite["constants"]["before"]}
    for node in rewrite["before"]["node"]:
        assert set(node["input"]) <= known
        known |= set(node["output"])


def test_leaf_that_the_cleanup_bypassed_is_replaced() -> None:
    # The other way from the result to a leaf, through t, is not a side of the rewrite.
    model = onnx.parser.parse_model(f"{HEAD} g (float[3] x) => (float[3] y) {{ t = Neg(x) y = Sum(x, t) }}")
    sides = []
    for op in ("Add", "Sum"):
        node = RecordedNode(onnx.helper.make_node(op, ["x", "clone"], ["y"]), 21)
        sides.append(RecordedSide((node,), {}, ("y",)))
    leaves = tuple(RecordedLeaf(name, "float32", (3,)) for name in ("x", "clone"))
    record = RewriteRecord("", "sums", "y", "Sum", "Sum", leaves, *sides)
    document = json.loads(certificate_bytes(CertifiedFile(model, "", source_opset=21), [record], []))
    assert document["rewrites"][0]["replaced"] == {"t": "clone"}
