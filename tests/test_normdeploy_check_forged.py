"""Test the independent checker on forged pairs: the model computes something else than the nodes of the certificate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import normdeploy_check as checker
from tests.certificate_cases import Case, make_case, make_node, parse_nodes
from tests.planted_certificates import to_json

Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Write a case and run the program on it. Returns: the exit code and the output."""

    def run(case: Case, *options: str) -> tuple[int, str]:
        code = checker.main([*case.write(tmp_path), "--seed", "5", *options])
        return code, capsys.readouterr().out

    return run


def set_types(case: Case, kind: int, shape: list[Any] | None = None) -> None:
    """Give the leaf and the input of the model a type and a shape."""
    info = helper.make_tensor_value_info("x", kind, shape)
    case.model.graph.input[0].CopyFrom(info)
    case.raw["rewrites"][0]["before"]["input"][0] = to_json(info)


def dropped_upper_clamp() -> Case:
    before, after = parse_nodes("z = Clip(x, , six)"), parse_nodes("z = Identity(x)")
    return make_case(before, after, {"x": [3]}, {"six": np.float32(6)})


def dropped_clamp_of_half() -> Case:
    ends = {"low": np.float32(-65504), "high": np.float32(65504)}
    return make_case(parse_nodes("z = Clip(x, low, high)"), parse_nodes("z = Identity(x)"), {"x": [3]}, ends)


def other_branch_of_large_numbers() -> Case:
    before = parse_nodes("c = Greater(x, hundred)\nn = Neg(x)\nz = Where(c, n, x)")
    return make_case(before, parse_nodes("z = Identity(x)"), {"x": [3]}, {"hundred": np.float32(100)})


def fault_beside_a_huge_element() -> Case:
    mask = np.float32([0, -3.4e38, 0])
    before, after = "z = Add(x, mask)", "n = Neg(x)\nz = Add(n, mask)"
    return make_case(parse_nodes(before), parse_nodes(after), {"x": [3]}, {"mask": mask})


def fault_beside_a_huge_element_in_float64() -> Case:
    case = fault_beside_a_huge_element()
    case.raw["rewrites"][0]["mode"] = "numeric"
    return case


def fault_beside_a_huge_constant() -> Case:
    before, after = "z = Concat(x, mask) axis=0", "n = Neg(x)\nz = Concat(n, mask) axis=0"
    return make_case(parse_nodes(before), parse_nodes(after), {"x": [3]}, {"mask": np.float64([1e300])})


def stored_number_beside_a_huge_constant() -> Case:
    """A number of the model has any value, because `exact` holds a huge number."""
    case = make_case(parse_nodes("z = Mul(x, w)"), parse_nodes("z = Mul(x, w)"), {"x": [3]}, {"w": np.float32(2)})
    case.set_initializer("w", np.float32(7).reshape(()))
    rewrite = case.raw["rewrites"][0]
    rewrite["exact"]["node"] = [to_json(node) for node in parse_nodes("v = Sub(n, huge)")]
    rewrite["constants"]["exact"] = {"n": case.store(np.float64(2e18 + 2048)), "huge": case.store(np.float64(2e18))}
    rewrite["constants"]["before"] = {"w": case.store(np.float32(2048))}
    rewrite["results"] = {"w": "v"}
    return case


def function_with_a_standard_name(name: str, domain: str) -> Case:
    """A function of another domain has the name of a standard op."""
    opsets = [helper.make_opsetid("", 21)]
    if name == "Constant":
        case = make_case(parse_nodes("z = Mul(x, k)"), parse_nodes("z = Mul(x, k)"), {"x": [3]}, {"k": np.float32(2)})
        del case.model.graph.initializer[:]
        value = numpy_helper.from_array(np.float32(2))
        case.model.graph.node.insert(0, helper.make_node(name, [], ["k"], domain=domain, value=value))
        inner = helper.make_node("Constant", [], ["v"])
        inner.attribute.add(name="value", ref_attr_name="value", type=onnx.AttributeProto.TENSOR)
        body = [inner, make_node("Add", ["v", "v"], ["c"])]
        case.model.functions.append(helper.make_function(domain, name, [], ["c"], body, opsets, ["value"]))
        return case
    case = make_case(parse_nodes("z = Neg(x)"), parse_nodes("k = Abs(x)\nz = Neg(t)"), {"x": [3]})
    case.model.graph.node.insert(0, helper.make_node(name, ["x"], ["t"], domain=domain))
    body = [make_node("Abs", ["a"], ["b"])]
    case.model.functions.append(helper.make_function(domain, name, ["a"], ["b"], body, opsets))
    case.raw["rewrites"][0]["replaced"] = {"t": "x"}
    return case


def constant_of_another_domain() -> Case:
    return function_with_a_standard_name("Constant", "other")


def identity_of_another_domain() -> Case:
    return function_with_a_standard_name("Identity", "other")


def overload_of_a_function() -> Case:
    call = helper.make_node("F", ["x"], ["z"], domain="d", overload="a")
    case = make_case(parse_nodes("z = Neg(x)"), [call], {"x": [3]})
    opsets = [helper.make_opsetid("", 21)]
    for overload, op in (("a", "Abs"), ("b", "Neg")):
        body = [make_node(op, ["a"], ["b"])]
        case.model.functions.append(helper.make_function("d", "F", ["a"], ["b"], body, opsets, overload=overload))
    return case


def initializer_that_an_input_replaces() -> Case:
    case = make_case(parse_nodes("z = Mul(x, w)"), parse_nodes("z = Mul(x, w)"), {"x": [3]}, {"w": np.float32(2)})
    case.model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, []))
    return case


def input_in_place_of_another_input() -> Case:
    case = make_case(parse_nodes("z = Neg(x)"), parse_nodes("z = Neg(w)"), {"x": [3], "w": [3]})
    case.raw["rewrites"][0]["before"]["input"].pop()
    case.raw["rewrites"][0]["replaced"] = {"w": "x"}
    return case


def equal_sizes_of_an_input() -> Case:
    """The leaf is square. The input of the model is not."""
    nodes = [*parse_nodes("s = ReduceSum(x)\nh = Shape(x)"), make_node("Gather", ["h", "one"], ["g"])]
    nodes += [make_node("Cast", ["g"], ["f"], to=1), *parse_nodes("q = Mul(f, f)\nz = Div(s, q)")]
    case = make_case(parse_nodes("z = ReduceMean(x)"), nodes, {"x": ["n", "n"]}, {"one": np.int64(1)})
    case.model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["a", "b"]))
    return case


def even_size_of_an_input() -> Case:
    """The size of the leaf is even. That of the input is any."""
    nodes = [*parse_nodes("h = Shape(x)\np = Div(h, two)\nq = Mul(p, two)\ng = Sub(h, q)")]
    nodes += [make_node("Cast", ["g"], ["f"], to=1), *parse_nodes("z = Add(x, f)")]
    case = make_case(parse_nodes("z = Identity(x)"), nodes, {"x": ["2*n"]}, {"two": np.int64(2)})
    case.model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"]))
    return case


def division_of_an_integer_input() -> Case:
    """The leaf has no type, so it counts as a float. The input of the model is an integer."""
    nodes = [make_node("Div", ["x", "two"], ["h"]), make_node("Cast", ["h"], ["z"], to=1)]
    before = [make_node("Cast", ["x"], ["f"], to=1), *parse_nodes("z = Mul(f, half)")]
    case = make_case(before, nodes, {"x": [3]}, {"two": np.int64(2), "half": np.float32(0.5)})
    set_types(case, TensorProto.INT64, [3])
    case.raw["rewrites"][0]["before"]["input"][0] = to_json(helper.make_tensor_value_info("x", 0, [3]))
    return case


def division_of_an_integer_leaf() -> Case:
    """As above, but the model computes the leaf."""
    case = division_of_an_integer_input()
    case.model.graph.input[0].name = "w"
    case.model.graph.node.insert(0, make_node("Abs", ["w"], ["x"]))
    return case


def overflow_of_a_short_integer() -> Case:
    before = [make_node("Cast", [n], [f"{n}f"], to=1) for n in ("x", "one")]
    before += parse_nodes("z = Sub(xf, onef)")
    after = [make_node("Sub", ["x", "one"], ["d"]), make_node("Cast", ["d"], ["z"], to=1)]
    case = make_case(before, after, {"x": [3]}, {"one": np.uint8(1)})
    set_types(case, TensorProto.UINT8, [3])
    return case


def rounding_to_four_bits() -> Case:
    after = [make_node("Cast", ["x"], ["i"], to=TensorProto.INT4), make_node("Cast", ["i"], ["z"], to=1)]
    return make_case(parse_nodes("z = Identity(x)"), after, {"x": [3]})


def other_row_of_a_table() -> Case:
    before, table = [make_node("Gather", ["w", "x"], ["z"])], np.float32([1, 2, 3, 4])
    case = make_case(before, before, {"x": [3]}, {"w": table})
    set_types(case, TensorProto.INT64, [3])
    case.set_initializer("w", np.float32([1, 2, 3, 5]))
    rewrite = case.raw["rewrites"][0]
    rewrite["constants"]["before"]["w"] = case.store(table)
    return case


def square_of_an_integer() -> Case:
    after = [make_node("Mul", ["x", "x"], ["s"]), make_node("Cast", ["s"], ["z"], to=1)]
    case = make_case([make_node("Cast", ["x"], ["z"], to=1)], after, {"x": [3]})
    set_types(case, TensorProto.INT64, [3])
    return case


def result_that_is_a_leaf() -> Case:
    case = make_case(parse_nodes("z = Neg(x)"), parse_nodes("z = Abs(x)"), {"x": [3]})
    before = case.raw["rewrites"][0]["before"]
    before["node"] = []
    before["input"] = [to_json(helper.make_tensor_value_info("z", TensorProto.FLOAT, [3]))]
    return case


def leaf_of_a_body_that_is_new_outside() -> Case:
    """In the source, t is another tensor than in the model. A body reads it."""
    after = parse_nodes("t = Mul(x, two)\ny = Sub(x, t)")
    case = make_case(parse_nodes("y = Neg(x)"), after, {"x": [3]}, {"two": np.float32(2)})
    bodies = [helper.make_graph(parse_nodes(f"{o} = Abs(t)"), "g", [], []) for o in ("v", "w")]
    case.model.graph.node.append(helper.make_node("If", ["b"], ["q"], then_branch=bodies[0], else_branch=bodies[1]))
    second = make_case(parse_nodes("m = Neg(t)\nw = Abs(m)"), [], {"t": [3]}).raw["rewrites"][0]
    case.raw["rewrites"].append(second | {"scope": 1})
    return case


FORGED = [
    dropped_upper_clamp,
    dropped_clamp_of_half,
    other_branch_of_large_numbers,
    fault_beside_a_huge_element,
    fault_beside_a_huge_element_in_float64,
    fault_beside_a_huge_constant,
    stored_number_beside_a_huge_constant,
    constant_of_another_domain,
    identity_of_another_domain,
    overload_of_a_function,
    initializer_that_an_input_replaces,
    input_in_place_of_another_input,
    equal_sizes_of_an_input,
    even_size_of_an_input,
    division_of_an_integer_input,
    division_of_an_integer_leaf,
    overflow_of_a_short_integer,
    rounding_to_four_bits,
    result_that_is_a_leaf,
    leaf_of_a_body_that_is_new_outside,
]


@pytest.mark.parametrize("forge", FORGED, ids=lambda forge: forge.__name__)
def test_forged_pair_is_rejected(forge: Callable[[], Case], check: Check) -> None:
    code, text = check(forge())
    assert code == 1, text


@pytest.mark.parametrize("forge", [other_row_of_a_table, square_of_an_integer], ids=lambda forge: forge.__name__)
def test_integers_that_are_not_tried_are_counted(forge: Callable[[], Case], check: Check) -> None:
    code, text = check(forge())
    assert (code, "1 integer leaves, tried only at 0 and 1" in text) == (0, True), text
