"""Names of a file that hold line feeds, escapes and orders to a CI server: no line of the output is theirs."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from normdeploy.cli import app
from normdeploy.errors import escape_line, escape_lines
from normdeploy.ort_sessions import child_process

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
    assert escape_line("a\nb\x1b\u2028") == "a\ufffdb\ufffd\ufffd"
    assert escape_line("::error::x ##[error]y ##vso[z]") == "\ufffd:error::x \ufffd#[error]y \ufffd#vso[z]"
    assert escape_line("torch::nn::Module aten::add") == "torch::nn::Module aten::add"


def test_message_keeps_the_line_feeds_that_are_ours() -> None:
    ours = "x is not loaded:\n  - a\n  - b\nIf you trust its author, pass --trust-remote-code"
    assert escape_lines(ours) == ours
    assert escape_lines("the input a\nverified on 9") == "the input a\ufffdverified on 9"


def test_optimize_names_that_a_library_logs_make_no_line(tmp_path: Path) -> None:
    """Of two equal initializers one is an output: onnx_ir leaves it alone, and logs its name."""
    name = "w\nverified on 9 inputs"
    x, y, z = (helper.make_tensor_value_info(n, 1, [4, 4]) for n in ("x", name, "z"))
    weights = [numpy_helper.from_array(np.eye(4, dtype=np.float32), n) for n in (name, "v")]
    nodes = [helper.make_node("MatMul", ["x", name], ["q"]), helper.make_node("MatMul", ["q", "v"], ["z"])]
    graph = helper.make_graph(nodes, "g", [x], [y, z], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    # pytest handles what is logged in its own process.
    words = [*child_process.module_command("normdeploy"), "optimize", "m.onnx", "-o", "o.onnx"]
    done = subprocess.run(
        words, cwd=tmp_path, env=child_process.child_environment(), capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


def test_mistakes_in_a_fleet_stand_on_a_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fleet.toml").write_text('store = "s"\n[models."a\\nb"]\nsource = "x.onnx"\nfile = 1\n')
    monkeypatch.setattr(sys, "argv", ["normdeploy", "fleet", "run", str(tmp_path / "fleet.toml")])
    with pytest.raises(SystemExit):
        app.main()
    name, key = capsys.readouterr().err.splitlines()
    assert name.startswith("error: fleet.toml, line 2: models: the name 'a\\nb' may contain")
    assert key.startswith("  fleet.toml, line 4: models.a\N{REPLACEMENT CHARACTER}b: unknown 'file'")
