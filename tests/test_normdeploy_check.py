"""Test the independent checker of certificates.

Certificates of normdeploy are accepted, and planted faults are rejected. tests/certificates holds certificates of an
earlier version. The ops are tested in test_normdeploy_check_ops.py.
"""

from __future__ import annotations

import ast
import copy
import decimal
import hashlib
import json
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import normdeploy
import normdeploy_check as checker
from normdeploy.verbs.conversion.certificate_file import describe_certified_file
from tests.certificate_cases import (
    NAMES,
    SAMPLES,
    Case,
    Json,
    load_sample,
    make_case,
    make_node,
    parse_nodes,
    subtract_case,
)
from tests.planted_certificates import planted_certificates, to_json
from tests.rewriting.test_certificate_document import TEXTS, Certified, certify

Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Write a case and run the program on it. Returns: the exit code and the output."""

    def run(case: Case, *options: str) -> tuple[int, str]:
        code = checker.main([*case.write(tmp_path), "--seed", "5", *options])
        return code, capsys.readouterr().out

    return run


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Certified]:
    return {name: certify(name, tmp_path_factory.mktemp(name)) for name in TEXTS}


# --- The program -----------------------------------------------------------------------------------------------------


def test_checker_imports_only_numpy_and_onnx() -> None:
    tree = ast.parse(Path(checker.__file__).read_text())
    plain = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    sources = [n.module or "." for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    libraries = {name.partition(".")[0] for name in [*plain, *sources]} - set(sys.stdlib_module_names)
    assert libraries == {"numpy", "onnx"}


def test_checker_is_one_file_of_fewer_than_600_lines() -> None:
    lines = Path(checker.__file__).read_text().splitlines()
    assert len(lines) < 600
    assert max(map(len, lines)) <= 120


# --- Valid certificates ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_sample_is_accepted(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = checker.main([str(SAMPLES / f"{name}.{s}") for s in ("json", "onnx")]), capsys.readouterr().out
    assert code == 0, text
    assert text.startswith("accepted: ")


def test_source_with_its_hash_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(SAMPLES / n) for n in ("norm.json", "norm.onnx", "norm_source.onnx")]
    assert checker.main(files) == 0
    assert "not in the source" not in capsys.readouterr().out
    assert checker.main([*files[:2], files[1]]) == 1
    assert "claim hash" in capsys.readouterr().out


@pytest.mark.parametrize("name", TEXTS)
def test_new_certificate_is_accepted_with_its_source(
    name: str, certified: dict[str, Certified], capsys: pytest.CaptureFixture[str]
) -> None:
    one = certified[name]
    files = [one.certificate, one.path, one.path.parent / f"{name}.onnx"]
    code, text = checker.main([*map(str, files), "--seed", "3"]), capsys.readouterr().out
    assert code == 0, text
    # Every rewrite of these files is proved, and each node of the file is in one.
    assert "0 tested (numeric)" in text
    assert "rewrites not covered: 0 none" in text
    assert "not covered: none" in text


def test_node_that_differs_from_the_source_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = load_sample("norm")
    node = case.raw["rewrites"][0]["before"]["node"][2]
    node.update(op_type="Pow", input=["d", "two"])
    case.raw["rewrites"][0]["constants"]["before"]["two"] = case.store(np.float32(2))
    code = checker.main([*case.write(tmp_path), str(SAMPLES / "norm_source.onnx")])
    text = capsys.readouterr().out
    # The node, and the exponent that it reads
    assert (code, "2 nodes and constants that are not in the source file" in text) == (0, True), text


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


@pytest.mark.parametrize("external", [False, True], ids=["inside", "external data"])
def test_weight_that_differs_from_the_source_is_refused(
    external: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], rng: np.random.Generator
) -> None:
    """Both sides of the rewrite have the same wrong weight, so only the source shows it."""
    model = onnx.parser.parse_model(SHAPE_OF_INPUT.replace("8", "32"))
    for name in ("scale", "shift", "mean", "variance", "w"):
        values = rng.uniform(0.5, 2.0, (32, 32) if name == "w" else 32).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    files = [tmp_path / name for name in ("c.json", "out.onnx", "source.onnx")]
    certificate, out, source = files
    onnx.save(model, source)
    normdeploy.optimize(source, out, certificate=certificate)
    document = json.loads(certificate.read_text())

    def check(weight: np.ndarray) -> tuple[int, str]:
        """Write this weight into the source, and its hash into the certificate."""
        model.graph.initializer[-1].CopyFrom(numpy_helper.from_array(weight, "w"))
        options = {"save_as_external_data": True, "location": "w.data", "size_threshold": 100} if external else {}
        (tmp_path / "w.data").unlink(missing_ok=True)
        onnx.save(copy.deepcopy(model), source, **options)
        document["source"]["sha256"] = hashlib.sha256(source.read_bytes()).hexdigest()
        certificate.write_text(json.dumps(document))
        return checker.main([*map(str, files), "--seed", "3"]), capsys.readouterr().out

    weight = numpy_helper.to_array(model.graph.initializer[-1]).copy()
    assert check(weight)[0] == 0
    weight[3, 5] = np.nextafter(weight[3, 5], np.float32(9))
    reason = "the file: rewrite 0: w has other elements in the source file"
    assert check(weight) == (1, f"rejected: claim constants fails, {reason}\n")


def test_external_data_of_a_body_is_hashed(tmp_path: Path, rng: np.random.Generator) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[n, 32] x, bool b) => (float[n, 32] y) {
          y = If (b) <then_branch = g1 () => (float[n, 32] p) { p = MatMul(x, w) },
                      else_branch = g2 () => (float[n, 32] q) { q = Neg(x) }> }"""
    )
    weight = numpy_helper.from_array(rng.standard_normal((32, 32)).astype(np.float32), "w")
    model.graph.node[0].attribute[0].g.initializer.append(weight)
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.data", size_threshold=100)
    written = describe_certified_file(path, None, 21)
    assert written.data == {"w.data": hashlib.sha256((tmp_path / "w.data").read_bytes()).hexdigest()}
    assert checker.read_model(path, written.digest, written.data).graph.node[0].attribute[0].g.initializer[0].raw_data
    with pytest.raises(checker.Rejection, match="the model has the external data"):
        checker.read_model(path, written.digest, {})


def test_external_data_is_read_and_hashed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rng: np.random.Generator
) -> None:
    model = onnx.parser.parse_model(SHAPE_OF_INPUT.replace("8", "32"))
    for name in ("scale", "shift", "mean", "variance", "w"):
        values = rng.uniform(0.5, 2.0, (32, 32) if name == "w" else 32).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    onnx.save(model, tmp_path / "source.onnx")
    certificate = tmp_path / "c.json"
    normdeploy.optimize(tmp_path / "source.onnx", tmp_path / "out.onnx", certificate=certificate)
    written = onnx.load(tmp_path / "out.onnx")
    onnx.save(written, tmp_path / "out.onnx", save_as_external_data=True, location="w.data", size_threshold=100)
    document = json.loads(certificate.read_text())
    digests = {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("out.onnx", "w.data")}
    document["model"] = {"sha256": digests["out.onnx"], "data": {"w.data": digests["w.data"]}}
    certificate.write_text(json.dumps(document))
    files = [str(tmp_path / name) for name in ("c.json", "out.onnx", "source.onnx")]
    assert checker.main(files) == 0
    data = bytearray((tmp_path / "w.data").read_bytes())
    data[-1] ^= 1
    (tmp_path / "w.data").write_bytes(data)
    capsys.readouterr()
    assert checker.main(files) == 1
    assert "claim hash" in capsys.readouterr().out
    document["model"]["data"] = {}
    certificate.write_text(json.dumps(document))
    assert checker.main(files) == 1
    assert "claim hash" in capsys.readouterr().out


# --- Planted faults --------------------------------------------------------------------------------------------------


def assert_rejected(document: Json, model: bytes, folder: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """Check that each planted fault is rejected by one of its claims. Returns: the number of rejected faults."""
    files = [folder / "c.json", folder / "m.onnx"]
    rejected = 0
    for fault in planted_certificates(document, model):
        files[0].write_text(json.dumps(fault.document))
        files[1].write_bytes(fault.model)
        code, text = checker.main([*map(str, files), "--seed", "3"]), capsys.readouterr().out
        rejected += code
        assert code == bool(fault.claims), (fault.name, text)
        if fault.claims:
            assert text.split()[2] in fault.claims, (fault.name, text)
        else:
            assert re.search(r"[1-9]\d* tested \(numeric\)", text), (fault.name, text)
    return rejected


@pytest.mark.parametrize("name", TEXTS)
def test_planted_certificates_are_rejected_by_a_named_claim(
    name: str, certified: dict[str, Certified], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = certified[name]
    assert assert_rejected(one.document, one.path.read_bytes(), tmp_path, capsys) >= 12


@pytest.mark.parametrize("name", NAMES)
def test_planted_samples_are_rejected(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads((SAMPLES / f"{name}.json").read_text())
    assert assert_rejected(document, (SAMPLES / f"{name}.onnx").read_bytes(), tmp_path, capsys) >= 12


def test_one_changed_byte_of_the_model_fails_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray((SAMPLES / "block.onnx").read_bytes())
    data[-10] ^= 1
    (tmp_path / "m.onnx").write_bytes(data)
    assert checker.main([str(SAMPLES / "block.json"), str(tmp_path / "m.onnx")]) == 1
    assert "claim hash" in capsys.readouterr().out


def test_older_schema_is_refused_in_one_sentence(check: Check) -> None:
    case = load_sample("norm")
    case.raw["schema"] = "normdeploy/rewrites/1"
    code, text = check(case)
    assert code == 1
    assert "its schema is normdeploy/rewrites/1, but this program reads normdeploy/rewrites/2\n" in text


def last_bit_of_a_weight_before(case: Case) -> None:
    constants = case.raw["rewrites"][2]["constants"]["before"]
    values = case.initializer("q.weight.T").copy()
    values.view(np.uint32).flat[5] ^= 1
    constants["q.weight.T"] = case.store(values)


def last_bit_of_a_folded_weight_before(case: Case) -> None:
    constants = case.raw["rewrites"][1]["constants"]
    values = case.array(constants["before"]["0.weight"]).copy()
    # The expressions have the old weight.
    constants["exact"]["0.weight"] = constants["before"]["0.weight"]
    values.view(np.uint32).flat[0] ^= 1
    constants["before"]["0.weight"] = case.store(values)


def weight_of_both_sides(case: Case) -> None:
    constants = case.raw["rewrites"][1]["constants"]
    values = case.array(constants["before"]["0.weight"]).copy()
    values.flat[0] *= np.float32(1.5)
    constants["before"]["0.weight"] = constants["exact"]["0.weight"] = case.store(values)


def exact_epsilon_plus_one(case: Case) -> None:
    fraction = next(iter(case.raw["rewrites"][0]["epsilons"].values()))
    fraction[0] = str(int(fraction[0]) + 1)


def epsilon_of_the_model(case: Case) -> None:
    case.set_attribute("add_29", epsilon=1e-6)


def one_ulp_of_a_stored_scale(case: Case) -> None:
    values = case.initializer("add_29_scale").copy()
    values[3] = np.nextafter(values[3], np.float32(9))
    case.set_initializer("add_29_scale", values)


def one_ulp_of_a_folded_weight(case: Case) -> None:
    values = case.initializer("0.weight_2").copy()
    values.flat[3] = np.nextafter(values.flat[3], np.float32(9))
    case.set_initializer("0.weight_2", values)


def exact_value_of_one_element(case: Case) -> None:
    exact = case.raw["rewrites"][0]["constants"]["exact"]
    values = case.array(exact["add_29_scale"]).copy()
    values[3] *= 1 + 2.0**-20
    exact["add_29_scale"] = case.store(values)


FAULTS: list[tuple[str, Callable[[Case], None], str]] = [
    ("block", last_bit_of_a_weight_before, "equal"),
    ("convs", last_bit_of_a_folded_weight_before, "equal"),
    ("convs", weight_of_both_sides, "stored"),
    ("block", exact_epsilon_plus_one, "equal"),
    ("convs", exact_epsilon_plus_one, "equal"),
    ("block", epsilon_of_the_model, "epsilon"),
    ("block", one_ulp_of_a_stored_scale, "stored"),
    ("convs", one_ulp_of_a_folded_weight, "stored"),
    ("block", exact_value_of_one_element, "equal"),
]


@pytest.mark.parametrize(("name", "fault", "claim"), FAULTS, ids=lambda v: getattr(v, "__name__", v))
def test_smallest_fault_is_rejected(name: str, fault: Callable[[Case], None], claim: str, check: Check) -> None:
    case = load_sample(name)
    fault(case)
    code, text = check(case)
    assert (code, text.split()[2]) == (1, claim), text


@pytest.mark.parametrize("op", ["Add", "Mul"])
def test_other_op_of_the_model_fails_equal(op: str, check: Check) -> None:
    case = subtract_case()
    assert check(case)[0] == 0
    case.node("z").op_type = op
    code, text = check(case)
    assert (code, "claim equal" in text) == (1, True), text


def test_exchanged_inputs_fail_equal(check: Check) -> None:
    case = subtract_case()
    case.node("z").input[:] = ["y", "x"]
    code, text = check(case)
    assert (code, "claim equal" in text) == (1, True), text


def test_constant_that_the_model_computes_fails(check: Check) -> None:
    """A node of the model reads no constant of the certificate."""
    case = make_case(parse_nodes("z = Mul(x, c)"), parse_nodes("z = Mul(x, c)"), {"x": [3]}, {"c": np.float32(2)})
    assert check(case)[0] == 0
    del case.model.graph.initializer[:]
    case.model.graph.node.insert(0, make_node("Shape", ["x"], ["s"]))
    case.model.graph.node.insert(1, make_node("Cast", ["s"], ["c"], to=TensorProto.FLOAT))
    code, text = check(case)
    assert (code, "claim equal" in text or "claim shape" in text) == (1, True), text


def test_leaf_that_another_rewrite_computes_as_a_new_tensor_fails_final(check: Check) -> None:
    """Both rewrites hold, but the second one is about another tensor t than the model's."""
    case = make_case(
        parse_nodes("y = Neg(x)"),
        parse_nodes("t = Mul(x, two)\ny = Sub(x, t)\nz = Abs(t)"),
        {"x": [3]},
        {"two": np.float32(2)},
    )
    first = case.raw["rewrites"][0]
    first["before"]["output"] = [{"name": "y"}]
    assert check(case)[0] == 0
    second = make_case(parse_nodes("m = Neg(t)\nz = Abs(m)"), [], {"t": [3]}).raw["rewrites"][0]
    case.raw["rewrites"].append(second)
    code, text = check(case)
    assert (code, "claim final" in text) == (1, True), text


@pytest.mark.parametrize(("op", "code"), [("Reshape", 0), ("Neg", 1)])
def test_tensor_in_place_of_a_leaf_needs_the_same_elements(op: str, code: int, check: Check) -> None:
    inputs = ["w", "shape"] if op == "Reshape" else ["w"]
    after = [make_node(op, inputs, ["x"]), *parse_nodes("k = Neg(x)\nz = Reshape(w, shape)")]
    constants = {"shape": np.array([3])}
    case = make_case(parse_nodes("z = Reshape(x, shape)"), after, {"x": [3], "w": [3]}, constants)
    rewrite = case.raw["rewrites"][0]
    rewrite["before"]["input"] = rewrite["before"]["input"][:1]
    del case.model.graph.input[0]
    rewrite["replaced"] = {"w": "x"}
    actual, text = check(case)
    assert (actual, "claim final" in text) == (code, code == 1), text
    assert code or "1 inputs that the cleanup replaced" in text


def test_right_node_in_an_unused_function_fails_equal(check: Check) -> None:
    case = subtract_case()
    right = copy.deepcopy(case.node("z"))
    case.node("z").op_type = "Mul"
    opsets = [helper.make_opsetid("", 21)]
    case.model.functions.append(helper.make_function("d", "F", ["x", "y"], ["z"], [right], opsets))
    code, text = check(case)
    assert (code, "claim equal" in text) == (1, True), text


def test_body_of_a_node_is_a_graph_of_its_own(check: Check) -> None:
    case = subtract_case()
    bodies = [helper.make_graph(parse_nodes(f"z = {op}(x, y)"), "g", [], []) for op in ("Sub", "Mul")]
    branch = helper.make_node("If", ["x"], ["q"], then_branch=bodies[0], else_branch=bodies[1])
    case.model.graph.node[0].CopyFrom(branch)
    # The attributes of a node are in alphabetical order.
    for scope, code in ((1, 1), (2, 0), (0, 1), (3, 1)):
        case.raw["rewrites"][0]["scope"] = scope
        actual, text = check(case)
        assert actual == code, (scope, text)


def test_function_of_the_model_defines_its_op(check: Check) -> None:
    case = subtract_case()
    body = [make_node("Mul", ["b", "f"], ["m"]), make_node("Add", ["a", "m"], ["c"])]
    factor = helper.make_node("Constant", [], ["f"])
    factor.attribute.add(name="value_float", ref_attr_name="factor", type=onnx.AttributeProto.FLOAT)
    opsets = [helper.make_opsetid("", 21)]
    function = helper.make_function("d", "F", ["a", "b"], ["c"], [factor, *body], opsets, ["factor"])
    case.model.functions.append(function)
    case.model.graph.node[0].CopyFrom(helper.make_node("F", ["x", "y"], ["z"], domain="d", factor=-1.0))
    assert check(case)[0] == 0
    case.set_attribute("z", factor=-2.0)
    code, text = check(case)
    assert (code, "claim equal" in text) == (1, True), text


def test_recursive_function_is_refused(check: Check) -> None:
    case = subtract_case()
    call = helper.make_node("F", ["x", "y"], ["z"], domain="d")
    opsets = [helper.make_opsetid("", 21)]
    case.model.functions.append(helper.make_function("d", "F", ["x", "y"], ["z"], [call], opsets))
    case.model.graph.node[0].CopyFrom(call)
    assert check(case)[0] == 2


@pytest.mark.parametrize("shape", [["batch", 17, 64], [2, 16, 64], ["batch", 16]])
def test_leaf_with_another_shape_than_the_input_fails(shape: list[Any], check: Check) -> None:
    case = load_sample("norm")
    leaf = to_json(helper.make_tensor_value_info("x", TensorProto.FLOAT, shape))
    case.raw["rewrites"][0]["before"]["input"] = [leaf]
    code, text = check(case)
    assert (code, "claim structure" in text) == (1, True), text


@pytest.mark.parametrize(("factor", "allowed"), [(0.999, True), (1.001, False)])
def test_half_an_ulp_is_the_bound_of_a_stored_number(factor: float, allowed: bool) -> None:
    bfloat16 = helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)
    halves = {1.0: -24, 1.5: -24, -2.0: -23, 0.0: -150, 2.0**-149: -150, 2.0**-126: -150}
    short = {1.0: -8, 1.5: -8, -2.0: -7, 0.0: -134}
    for dtype, bounds in ((np.dtype(np.float32), halves), (bfloat16, short)):
        for number, exponent in bounds.items():
            with decimal.localcontext(checker.CONTEXT):
                exact = np.array([Decimal(number) + Decimal(2) ** exponent * Decimal(factor)], object)
                if allowed:
                    checker.Checker.check_stored("c", np.array([number], dtype), exact, 0)
                else:
                    with pytest.raises(checker.Rejection):
                        checker.Checker.check_stored("c", np.array([number], dtype), exact, 0)


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


def test_model_that_is_not_onnx_exits_with_2(check: Check) -> None:
    case = load_sample("norm")
    case.data = b"not a model"
    assert check(case)[0] == 2


def large_leaf(rewrite: Json) -> None:
    rewrite["before"]["input"][0]["type"]["tensor_type"]["shape"]["dim"][0] = {"dim_param": str(1 << 40)}


def wrong_leaves(rewrite: Json) -> None:
    rewrite["before"]["input"] = {"x": 1}


def no_scope(rewrite: Json) -> None:
    del rewrite["scope"]


def other_key(rewrite: Json) -> None:
    rewrite["constants"]["before"]["axes"] = "k99"


def undefined_name(rewrite: Json) -> None:
    rewrite["before"]["node"][0]["input"][0] = "nothing"


def wrong_axis(rewrite: Json) -> None:
    rewrite["before"]["node"][0]["attribute"] = [{"name": "axes", "type": "INTS", "ints": [str(2**62)]}]


def no_result(rewrite: Json) -> None:
    rewrite["before"]["output"] = []


@pytest.mark.parametrize(
    "change",
    [large_leaf, wrong_leaves, no_scope, other_key, undefined_name, wrong_axis, no_result],
    ids=lambda f: f.__name__,
)
def test_malformed_field_is_one_plain_line(change: Callable[[Json], None], check: Check) -> None:
    case = load_sample("norm")
    change(case.raw["rewrites"][0])
    code, text = check(case)
    assert code in (1, 2)
    assert text.count("\n") == 1, text


@pytest.mark.parametrize("entry", [{"raw_data": "???"}, {"dims": ["1099511627776"], "data_type": 1}, 5, None, "x"])
def test_malformed_constant_fails_constants(entry: Any, check: Check) -> None:
    case = load_sample("norm")
    case.raw["constants"][next(iter(case.raw["constants"]))] = entry
    code, text = check(case)
    assert (code, "claim constants" in text, text.count("\n")) == (1, True, 1), text


def test_constant_that_is_not_finite_fails(check: Check) -> None:
    case = load_sample("norm")
    case.raw["rewrites"][0]["constants"]["before"]["eps"] = case.store(np.array(np.nan, dtype=np.float32))
    assert check(case)[0] == 1


@pytest.mark.parametrize("line", ["z = Expand(x, s)", "z = Tile(x, s)", "h = ConstantOfShape(s)\nz = Add(x, h)"])
def test_tensor_over_the_limit_is_refused(line: str, check: Check) -> None:
    constants = {"s": np.array([1 << 40])}
    code, text = check(make_case(parse_nodes(line), parse_nodes(line), {"x": [1]}, constants))
    assert (code, "memory limit" in text) == (2, True), text


def set_path(value: Any, path: list[Any], new: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


def paths_of(value: Any, path: list[Any]) -> list[list[Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    return [path] * bool(path) + [p for k, v in items for p in paths_of(v, [*path, k])]


@pytest.mark.parametrize("name", ["norm", "own"])
def test_random_changes_never_cause_a_traceback(name: str, check: Check, rng: np.random.Generator) -> None:
    paths = [p for p in paths_of(load_sample(name).raw, []) if p[0] != "model"]
    values = [None, "x", "", -1, 1 << 80, 0.5, [], {}, [None], True, "inf", "k0", "x" * 50]
    for index in rng.choice(len(paths), 60, replace=False):
        case = load_sample(name)
        set_path(case.raw, paths[index], values[rng.integers(len(values))])
        code, text = check(case)
        assert code in (0, 1, 2)
        assert "Traceback" not in text
        assert code == 0 or text.count("\n") == 1, (paths[index], text)
