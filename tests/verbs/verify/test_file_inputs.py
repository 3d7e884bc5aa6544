"""Inputs of an ONNX file that others are compared with: names of any kind, and what is no tensor of numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import normdeploy
from normdeploy.errors import InputError
from normdeploy.graphs.stated import Stated, stated_inputs
from normdeploy.model import Dim
from normdeploy.precision.calibrate import specs_of as few
from normdeploy.ranges import described
from normdeploy.rewriting.side_by_side import specs_of as bare
from normdeploy.verbs.verify.originals import open_original

TEXT = '<ir_version: 8, opset_import: ["": 18]> net (float[n, 3] x, int64[n, m] i) => (float[n, 3] y) { y = Neg(x) }'


@pytest.fixture
def foreign() -> onnx.ModelProto:
    """As tf2onnx and torch name inputs and dims."""
    proto = onnx.parser.parse_model(TEXT)
    for v, name in zip(proto.graph.input, ("x:0", "past.0[key]"), strict=True):
        v.name = name
    proto.graph.node[0].input[0] = "x:0"
    for v in (*proto.graph.input, proto.graph.output[0]):
        v.type.tensor_type.shape.dim[0].dim_param = "unk-1"
    proto.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "unk-1 + 1"
    return proto


def sizes(dim: Dim) -> tuple[str | None, int, int, int]:
    return dim.name, dim.min, dim.opt, dim.max


def test_names_that_are_no_words_can_be_said(foreign: onnx.ModelProto) -> None:
    opened = open_original(foreign, ["past.0[key]:int64[unk-1,unk-1 + 1]{0:9}"], ["unk-1=1:2:4"])
    x, past = opened.inputs
    assert [sizes(d) for d in x.shape] == [("unk-1", 1, 2, 4), (None, 3, 3, 3)]
    assert [sizes(d) for d in past.shape] == [("unk-1", 1, 2, 4), ("unk-1 + 1", 2, 3, 5)]
    assert (past.range, opened.notes) == ((0, 9), ())
    x, past = open_original(foreign, ["x:0[unk-1=2:2:9,3]", "past.0[key][a,b]"], []).inputs
    assert [sizes(d) for d in x.shape] == [("unk-1", 2, 2, 9), (None, 3, 3, 3)]
    assert [d.name for d in past.shape] == ["a", "b"]
    assert sizes(open_original(foreign, dims=["unk-1 + 1=1:2:3"]).inputs[1].shape[1]) == ("unk-1 + 1", 1, 2, 3)
    for inputs, dims, said in (
        ([], ["unk-2=1:2:4"], r"no dynamic dim 'unk-2'; it has \['unk-1', 'unk-1 \+ 1'\]"),
        (["x:1[unk-1,3]"], [], r"unknown dtype '1': .*; the inputs are \['x:0', 'past.0\[key\]'\]"),
        (["x:0[unk-2,3]"], [], "the dim 'unk-2' of 'x:0.unk-2,3.' can't be read"),
        ([], ["unk-1=1:2"], "must|can't be read: write unk-1=MIN:OPT:MAX"),
    ):
        with pytest.raises(InputError, match=said):
            open_original(foreign, inputs, dims)


def test_the_command_takes_them(foreign: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(foreign, tmp_path / "a.onnx")
    found = normdeploy.verify(
        tmp_path / "a.onnx", tmp_path / "a.onnx", dims="unk-1=2:2:5", inputs=["x:0[unk-1,3]{1:2}"]
    )
    assert found, found.results
    assert any("unk-1=5" in case for case in found.cases)


def test_all_who_read_a_file_s_inputs_read_the_same() -> None:
    """A default, a dim without a name, one of −1, a bfloat16 and no rank at all."""
    proto = onnx.parser.parse_model(TEXT.replace("float[n, 3] x", "bfloat16[?, 3] x, float[2] w"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(2, np.float32), "w"))
    for dim in proto.graph.input[2].type.tensor_type.shape.dim:
        dim.dim_value = -1
    assert stated_inputs(proto.graph) == [Stated("x", "bfloat16", ("x_0", 3)), Stated("i", "int64", ("i_0", "i_1"))]
    for specs in (
        bare(proto),
        few(proto),
        described(proto, (), [f"{n}=1:2:3" for n in ("x_0", "i_0", "i_1")])[0],
        open_original(proto).inputs,
    ):
        assert [(s.name, s.dtype, [d.name for d in s.shape]) for s in specs] == [
            ("x", "bfloat16", ["x_0", None]),
            ("i", "int64", ["i_0", "i_1"]),
        ]
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    assert stated_inputs(proto.graph)[0] == Stated("x", "bfloat16", None)


STRINGS = """<ir_version: 8, opset_import: ["": 18]> net (float[n, 3] x) => (float[n, 3] y, string[n] label)
    <string[3] words = {"a", "b", "c"}> { y = Neg(x) best = ArgMax <axis = -1, keepdims = 0> (y)
    label = Gather(words, best) }"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (STRINGS, "a.onnx: the output 'label' is strings; only numbers are compared: give the index"),
        (
            TEXT.replace("int64[n, m] i", "string[n] i"),
            "a.onnx: the input 'i' takes strings; only tensors of numbers can be given",
        ),
    ],
)
def test_strings_are_refused(text: str, said: str, tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(text), tmp_path / "a.onnx")
    with pytest.raises(InputError, match=said):
        normdeploy.verify(tmp_path / "a.onnx", tmp_path / "a.onnx")


@pytest.mark.parametrize("rules", [{}, {"tolerance": "1:1"}, {"metric": "y=cosine>=0"}])
def test_strings_in_the_place_of_numbers_fail(rules: dict[str, Any], tmp_path: Path) -> None:
    head = '<ir_version: 8, opset_import: ["": 18]> net (float[2, 3] x) => '
    onnx.save(onnx.parser.parse_model(head + "(float[2, 3] y) { y = Neg(x) }"), tmp_path / "a.onnx")
    onnx.save(onnx.parser.parse_model(head + "(string[2, 3] y) { y = Cast <to = 8> (x) }"), tmp_path / "b.onnx")
    found = normdeploy.verify(tmp_path / "a.onnx", tmp_path / "b.onnx", **rules)
    assert not found
    assert all("it is strings" in r.reason or "it is object" in r.reason for r in found.results if r.file), (
        found.results
    )
