"""Names of a file that hold line feeds, escapes and orders to a CI server: no line of the output is theirs."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from normdeploy.cli import app
from normdeploy.errors import printable, printable_lines

FORGED = "\n::error file=x::forged\nverified on 9 inputs\r\x1b[31m\u2028verified"


@pytest.fixture
def forged(tmp_path: Path) -> Path:
    """A LayerNorm without scale, all of whose names are forged."""

    def value(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name + FORGED, 1, ["batch" + FORGED, 8])

    steps = [
        ("ReduceMean", ["x"], "mean", {"axes": [-1], "keepdims": 1}),
        ("Sub", ["x", "mean"], "centred", {}),
        ("Pow", ["centred", "two"], "squares", {}),
        ("ReduceMean", ["squares"], "variance", {"axes": [-1], "keepdims": 1}),
        ("Add", ["variance", "epsilon"], "guarded", {}),
        ("Sqrt", ["guarded"], "deviation", {}),
        ("Div", ["centred", "deviation"], "y", {}),
    ]
    nodes = [
        helper.make_node(
            op, [n + FORGED for n in taken], [made + FORGED], name=f"/norm{FORGED}/{op}{made}", **attributes
        )
        for op, taken, made, attributes in steps
    ]
    constants = [numpy_helper.from_array(np.float32(c), n + FORGED) for n, c in (("two", 2.0), ("epsilon", 1e-5))]
    graph = helper.make_graph(nodes, "g" + FORGED, [value("x")], [value("y")], constants)
    imports = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8, producer_name="p" + FORGED)
    path = tmp_path / f"forged{FORGED.replace('/', '')}.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    "options",
    [
        ["inspect", "FILE"],
        ["inspect", "FILE", "--explain", "nothing"],
        ["check", "FILE", "--fail-on", "all"],
        ["run", "FILE", "-o", "o.npz"],
        ["run", "FILE", "-o", "o.npz", "--inputs", "x.npz"],
        ["verify", "FILE", "FILE", "--seeds", "2"],
    ],
    ids=lambda options: " ".join(options),
)
def test_no_line_of_the_output_is_a_names(
    options: list[str],
    forged: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("x.npz", **{"x" + FORGED.replace("/", ""): np.ones((2, 8), np.float32)})
    monkeypatch.setattr(sys, "argv", ["normdeploy", *(str(forged) if o == "FILE" else o for o in options)])
    with contextlib.suppress(SystemExit):
        app.main()
    told = capsys.readouterr()
    lines = (told.out + told.err).splitlines()
    assert lines
    assert not [line for line in lines if line.lstrip().startswith(("::", "##[")) or line.startswith("verified on 9")]
    assert "\x1b" not in told.out + told.err


def test_printable_is_one_line_without_orders() -> None:
    assert printable("a\nb\x1b\u2028") == "a\ufffdb\ufffd\ufffd"
    assert printable("::error::x ##[error]y ##vso[z]") == "\ufffd:error::x \ufffd#[error]y \ufffd#vso[z]"
    assert printable("torch::nn::Module aten::add") == "torch::nn::Module aten::add"


def test_message_keeps_the_line_feeds_that_are_ours() -> None:
    ours = "x is not loaded:\n  - a\n  - b\nIf you trust who made the file, pass --trust"
    assert printable_lines(ours) == ours
    assert printable_lines("the input a\nverified on 9") == "the input a\ufffdverified on 9"
