"""Inputs of an ONNX file that others are compared with: names of any kind, and what is no tensor of numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import normdeploy
from normdeploy.errors import InputError
from normdeploy.graphs.declared_inputs import DeclaredInput, declared_inputs
from normdeploy.inputs.input_ranges import resolve_input_ranges
from normdeploy.model import Dim
from normdeploy.precision.tensor_ranges import calibration_input_specs as few
from normdeploy.rewriting.model_comparison import comparison_input_specs as bare
from normdeploy.storage.export_record import read_record
from normdeploy.verbs.verify.reference_models import open_original
from tests.support import parsed

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
    assert declared_inputs(proto.graph) == [
        DeclaredInput("x", "bfloat16", ("x_0", 3)),
        DeclaredInput("i", "int64", ("i_0", "i_1")),
    ]
    for specs in (
        bare(proto),
        few(proto),
        resolve_input_ranges(proto, (), [f"{n}=1:2:3" for n in ("x_0", "i_0", "i_1")])[0],
        open_original(proto).inputs,
    ):
        assert [(s.name, s.dtype, [d.name for d in s.shape]) for s in specs] == [
            ("x", "bfloat16", ["x_0", None]),
            ("i", "int64", ["i_0", "i_1"]),
        ]
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    assert declared_inputs(proto.graph)[0] == DeclaredInput("x", "bfloat16", None)


STRINGS = """<ir_version: 8, opset_import: ["": 18]> net (float[n, 3] x) => (float[n, 3] y, string[n] label)
    <string[3] words = {"a", "b", "c"}> { y = Neg(x) best = ArgMax <axis = -1, keepdims = 0> (y)
    label = Gather(words, best) }"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (STRINGS, "a.onnx: the output 'label' is a tensor of strings, so it can't be compared; make the index"),
        (
            TEXT.replace("int64[n, m] i", "string[n] i"),
            "a.onnx: the input 'i' takes strings; only numeric tensors can be passed",
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
    assert all(
        "it is a tensor of strings" in r.reason or "it is object" in r.reason for r in found.results if r.file
    ), found.results


RATE = """<ir_version: 8, opset_import: ["": 17]> net (float[n, 4] x, int64 sr) => (float[n, 4] y) {
    rate = Cast <to = 1> (sr)
    y = Div (x, rate)
}"""


@pytest.fixture
def rate_file(tmp_path: Path) -> Path:
    """A file with an integer input of which only large values make sense."""
    onnx.save(onnx.parser.parse_model(RATE), tmp_path / "rate.onnx")
    return tmp_path / "rate.onnx"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("sr=16000", 16000), ("sr=8000:8001", 8000), ("sr{7:8}", None), ("sr[]{7:8}", 7)],
)
def test_run_stated_values_are_given(rate_file: Path, text: str, expected: int | None) -> None:
    texts = [text, "x[2,4]"]
    if expected is None:
        with pytest.raises(InputError, match=r"write NAME\[DIM,...\]"):
            normdeploy.run(rate_file, stated_inputs=texts)
        return
    output = rate_file.with_name("out.npz")
    normdeploy.run(rate_file, output=output, stated_inputs=texts)
    given = np.load(output.with_name("out.inputs.npz"))
    assert given["sr"] == expected
    assert given["x"].shape == (2, 4)


def test_run_array_of_a_file_is_given_as_it_is(rate_file: Path) -> None:
    array = rate_file.with_name("sr.npy")
    np.save(array, np.int64(22050))
    output = rate_file.with_name("out.npz")
    normdeploy.run(rate_file, output=output, stated_inputs=[f"sr={array}", "x[1,4]"])
    assert np.load(output.with_name("out.inputs.npz"))["sr"] == 22050


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate=5", r"no input 'rate'; it has \['sr', 'x'\]"),
        ("sr=9:2", "the range 9:2 of the input 'sr' is empty"),
        ("sr=nan", "can't be read"),
        ("sr=1e999", "can't be read"),
        ("sr=missing.npy", "file not found: 'missing.npy'"),
        ("sr=0.5:2", "'sr' is int64, but its values are stated as 0.5:2; write integers"),
        ("sr=99999999999999999999", "which holds -9223372036854775808 to 9223372036854775807"),
        ("x[n,5]", "dim 1 of the input 'x' is 4, but --input says 5"),
    ],
)
@pytest.mark.parametrize("verb", [normdeploy.optimize, normdeploy.inspect])
def test_stated_values_that_fit_nothing_are_refused(verb: Any, rate_file: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        verb(rate_file, inputs=[text])


@pytest.mark.parametrize("text", ["sr", "=0:1", "sr:int64"])
def test_input_without_sizes_and_values_is_told_both_forms(rate_file: Path, text: str) -> None:
    with pytest.raises(
        InputError, match=r"states neither .*; write NAME\[DIM,...\], NAME=LOW:HIGH, NAME=VALUE, or NAME=F"
    ):
        normdeploy.inspect(rate_file, inputs=[text])


def test_floats_of_a_file_are_no_values_of_an_integer_input(
    rate_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("rate.npy", np.ones(1, np.float32))
    with pytest.raises(InputError, match="'sr' is int64, but the file of its values holds float32"):
        normdeploy.optimize(rate_file, inputs=["sr=rate.npy"])


# "stated_inputs" is what "inputs" was once called.
@pytest.mark.parametrize("keyword", ["inputs", "stated_inputs"])
def test_optimize_values_reach_the_record(rate_file: Path, keyword: str) -> None:
    values: Any = {keyword: ["sr=16000"]}
    result = normdeploy.optimize(rate_file, dims=["n=1:2:4"], **values)
    inputs = {spec.name: spec for spec in read_record(result.proto)["inputs"]}
    assert inputs["sr"].range == (16000, 16001)


def test_nameless_dims_are_each_their_own(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["": 17]> net (float[a, b] x) => (float[a, b] y) { y = Relu(x) }'
    proto = onnx.parser.parse_model(text)
    for value in (*proto.graph.input, *proto.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_param = "?"
    onnx.save(proto, tmp_path / "paddle.onnx")
    with normdeploy.open_runner(tmp_path / "paddle.onnx") as runner:
        assert runner.infer({"x": np.ones((2, 3), np.float32)})["y"].shape == (2, 3)
    assert {d.name for d in open_original(tmp_path / "paddle.onnx").inputs[0].shape} == {"x_0", "x_1"}


CONTRADICTED = """<ir_version: 8, opset_import: ["": 17]> net (float[n, 4, 7, 7] x) => (float[STATED] y)
    <float[6, 4, 3, 3] w = {WEIGHTS}> { a = Conv(x, w) y = Relu(a) }"""


@pytest.mark.parametrize("stated", ["n, 6", "n, 6, 9, 9"])
def test_optimize_drops_a_shape_that_the_nodes_contradict(tmp_path: Path, stated: str) -> None:
    text = CONTRADICTED.replace("STATED", stated).replace("WEIGHTS", ", ".join(["0.5"] * 216))
    onnx.save(onnx.parser.parse_model(text), tmp_path / "wrong.onnx")
    result = normdeploy.optimize(tmp_path / "wrong.onnx", precision="fp16")
    assert any(f"'y' is declared as [{stated}] but computed as [n, 6, 5, 5]" in note for note in result.notes)
    onnx.checker.check_model(result.proto, full_check=True)


def test_optimize_drops_a_type_that_the_nodes_contradict() -> None:
    """onnxruntime runs it; rounding of the mean explains nothing where the mean is taken for an integer."""
    text = """<ir_version: 8, opset_import: ["": 18]> net (float[b, l, 4] x) => (float[b, l, 4] y)
        <int64[1] last = {-1}, float epsilon = {0.00001}, int64[b, l, 1] mean> {
            mean = ReduceMean (x, last)
            centered = Sub (x, mean)
            squares = Mul (centered, centered)
            variance = ReduceMean (squares, last)
            guarded = Add (variance, epsilon)
            deviation = Sqrt (guarded)
            y = Div (centered, deviation)
        }"""
    result = normdeploy.optimize(onnx.parser.parse_model(text))
    assert any("'mean' is declared as int64 but computed as float" in note for note in result.notes)
    assert [node.op_type for node in result.proto.graph.node] == ["LayerNormalization"]


def test_feeds_with_channels_last_are_told_how_to_turn_them(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["": 17]> net (float[n, 3, 8, 9] x) => (float[n, 3, 8, 9] y) { y = Relu(x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "image.onnx")
    image = np.zeros((2, 8, 9, 3), np.float32)
    with (
        normdeploy.open_runner(tmp_path / "image.onnx") as runner,
        pytest.raises(InputError, match=r"the channels are last: x.transpose\(0, 3, 1, 2\)"),
    ):
        runner.infer({"x": image})
    # The advice is right: what it names is taken.
    with normdeploy.open_runner(tmp_path / "image.onnx") as runner:
        assert runner.infer({"x": image.transpose(0, 3, 1, 2)})["y"].shape == (2, 3, 8, 9)


def test_dim_of_a_file_with_fixed_sizes_says_that_only_an_export_helps() -> None:
    proto = parsed("g (float[4, 8] x) => (float[4, 8] y) { y = Relu(x) }")
    with pytest.raises(InputError) as caught:
        resolve_input_ranges(proto, (), ["batch=1:2:8"])
    said = str(caught.value)
    assert "'batch' is not in any input: the file fixes all sizes (x[4,8])" in said
    assert "no option can change them; export the model again with a dynamic dim" in said
    assert "normdeploy export --dim batch=1:8:64" in said
