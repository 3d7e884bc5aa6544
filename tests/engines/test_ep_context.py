"""EPContext files for onnxruntime's TensorRT-RTX provider: what they hold, and what becomes of them elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app
from normdeploy.errors import BuildError, GraphError, InputError
from normdeploy.storage import onnx_files
from normdeploy.storage.compiled_models import PROVIDER
from normdeploy.verbs.build.build_function import Engine, build

# What the provider reads of a node, and the type that it asks for (EPContextNodeReader in onnx_ctx_model_helper.cc of
# NVIDIA/TensorRT-RTX-EP-ABI, TensorRTCacheModelHandler in that of microsoft/onnxruntime), and what it writes besides.
READ = {
    "embed_mode": onnx.AttributeProto.INT,
    "ep_cache_context": onnx.AttributeProto.STRING,
    "partition_name": onnx.AttributeProto.STRING,
    "onnx_model_filename": onnx.AttributeProto.STRING,
}
WRITTEN = {
    "main_context": onnx.AttributeProto.INT,
    "hardware_architecture": onnx.AttributeProto.STRING,
    "ep_sdk_version": onnx.AttributeProto.STRING,
    "source": onnx.AttributeProto.STRING,
}
TEXT = """<ir_version: 10, opset_import: ["": 21]> g (float[batch, 8] x, float16[4] half, float[8] s)
    => (float[batch, 8] y, float16[4] z) { y = LayerNormalization(x, s) z = Relu(half) }"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, and one engine of it in three ways."""
    folder = tmp_path_factory.mktemp("context")
    proto = onnx.parser.parse_model(TEXT)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(8, np.float32), "s"))
    onnx.save(proto, folder / "my model.onnx")
    for name, mode in (("plain.engine", None), ("embed.onnx", "embed"), ("beside.onnx", "file")):
        made(folder, name, mode)
    return folder


def made(folder: Path, name: str, mode: str | None, **options: Any) -> Engine:
    given = {"profiles": ["batch=1:2:4"], "compute_capabilities": ["8.6", "12.0"]} | options
    return build(folder / "my model.onnx", folder / name, ep_context=mode, **given)


def attributes(path: Path) -> dict[str, Any]:
    (node,) = onnx.load(path).graph.node
    assert (node.op_type, node.domain) == ("EPContext", "com.microsoft")
    assert {a.name: a.type for a in node.attribute} == READ | WRITTEN
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


@pytest.mark.parametrize("name", ["embed.onnx", "beside.onnx"])
def test_the_node_has_what_the_provider_reads(name: str, folder: Path) -> None:
    engine = (folder / "plain.engine").read_bytes()
    found = attributes(folder / name)
    if name == "embed.onnx":
        assert found["embed_mode"] == 1
        assert found["ep_cache_context"] == engine
    else:
        beside = Path(found["ep_cache_context"].decode())
        assert found["embed_mode"] == 0
        assert (beside.name, beside.parent) == (str(beside), Path())  # neither absolute nor out of the folder
        assert beside.suffixes[-2:] != [".stripped", ".engine"]  # by that name the provider would refit it
        assert (folder / beside).read_bytes() == engine
    assert found["main_context"] == 0
    assert found["source"].decode() == PROVIDER
    assert found["hardware_architecture"] == b"86,120"
    assert found["ep_sdk_version"].decode().startswith("1.")
    assert found["onnx_model_filename"] == b"my model.onnx"
    partition = found["partition_name"].decode()  # the provider names its runtime cache so
    assert partition.replace("_", "").isalnum()
    assert partition.startswith(f"{PROVIDER}_my_model_")


@pytest.mark.parametrize("name", ["embed.onnx", "beside.onnx"])
def test_the_file_takes_and_gives_what_the_model_does(name: str, folder: Path) -> None:
    model, file = onnx.load(folder / "my model.onnx"), onnx.load(folder / name)
    onnx.checker.check_model(file)
    assert list(file.graph.input) == [v for v in model.graph.input if v.name != "s"]
    assert list(file.graph.output) == list(model.graph.output)
    assert not file.graph.initializer
    (node,) = file.graph.node
    assert (list(node.input), list(node.output)) == (["x", "half"], ["y", "z"])
    (told,) = file.metadata_props  # onnxruntime gives it to the provider, which compares it with getEngineValidity
    assert told.key == f"ep_compatibility_info.{PROVIDER}"
    assert told.value == (folder / "plain.engine").read_bytes()[:64].hex()


def test_the_header_is_as_long_as_the_library_says() -> None:
    library = pytest.importorskip("tensorrt_rtx")
    assert library.Runtime(library.Logger(library.Logger.ERROR)).engine_header_size == 64


def test_targets_that_were_not_named_are_those_that_the_library_takes(folder: Path, tmp_path: Path) -> None:
    found = made(folder, "all.onnx", "file", compute_capabilities=())
    assert found.ep_context is not None
    assert found.ep_context.architecture.split(",")[:3] == ["80", "86", "89"]


# ------------------------------------------------------------------ elsewhere


def test_a_plain_onnxruntime_says_which_provider_is_missing(folder: Path) -> None:
    file = onnx.load(folder / "embed.onnx")
    with pytest.raises(Exception, match=r"Failed to find kernel for com\.microsoft\.EPContext"):  # with half inputs
        onnxruntime.InferenceSession(file.SerializeToString(), providers=["CPUExecutionProvider"])
    for value in (*file.graph.input, *file.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    with pytest.raises(Exception, match=f"EPContext node generated by '{PROVIDER}' is not compatible with any"):
        onnxruntime.InferenceSession(file.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    "verb",
    [
        ["inspect", "FILE"],
        ["run", "FILE", "-o", "out.npz"],
        ["verify", "my model.onnx", "FILE"],
        ["optimize", "FILE", "-o", "out.onnx"],
        ["build", "FILE", "-o", "out.engine"],
        ["bench", "FILE"],
        ["package", "FILE", "-o", "bundle"],
    ],
    ids=lambda verb: verb[0],
)
@pytest.mark.parametrize("name", ["embed.onnx", "beside.onnx"])
def test_our_verbs_say_what_the_file_is(
    name: str, verb: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(p.name for p in folder.iterdir())
    done = CliRunner().invoke(app, [name if part == "FILE" else part for part in verb])
    assert isinstance(done.exception, GraphError), done.output
    said = str(done.exception)
    assert said.startswith(f"{name} holds, instead of nodes, an engine for onnxruntime's {PROVIDER}, compiled for")
    assert "compute capability 86,120 by version 1." in said
    assert "pip install onnxruntime-ep-nv-tensorrt-rtx-cu13" in said
    assert said.endswith("pass the ONNX file that it was made from, 'my model.onnx'")
    assert sorted(p.name for p in folder.iterdir()) == before


def test_check_counts_it_as_a_file_that_can_not_be_checked(folder: Path) -> None:
    done = CliRunner().invoke(app, ["check", str(folder / "embed.onnx")])
    assert done.exit_code == 2
    assert "could not be checked" in done.output


def test_what_such_a_file_says_of_itself_is_not_believed(tmp_path: Path) -> None:
    """Bytes that are no text, which graphsurgeon can't read; control characters; texts without end."""
    node = helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft", ep_cache_context=b"\xff\x00" * 9)
    node.attribute.append(helper.make_attribute("source", b"\xff\x1b[31m" + b"a" * 10_000))
    x, y = (helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [2]) for n in "xy")
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=opsets), tmp_path / "m.onnx")
    with pytest.raises(GraphError) as caught:
        normdeploy.inspect(tmp_path / "m.onnx")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


# ------------------------------------------------------------------ whole or not at all


def test_a_new_engine_replaces_the_old_one_and_a_failed_build_leaves_both(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "my model.onnx").write_bytes((folder / "my model.onnx").read_bytes())
    first = made(tmp_path, "m.onnx", "file")
    again = made(tmp_path, "m.onnx", "file", profiles=["batch=1:4:16"])
    assert first.ep_context is not None
    assert again.ep_context is not None
    assert first.ep_context.file != again.ep_context.file
    held = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert sorted(held) == sorted(["my model.onnx", "m.onnx", again.ep_context.file])
    with pytest.raises(InputError, match="is 4:2:1"):
        made(tmp_path, "m.onnx", "file", profiles=["batch=4:2:1"])
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == held
    made(tmp_path, "m.onnx", "embed")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "my model.onnx"]


def test_an_engine_that_no_onnx_file_can_hold(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(p.name for p in folder.iterdir())
    monkeypatch.setattr(onnx_files, "PROTOBUF_LIMIT", 10_000)
    with pytest.raises(BuildError, match=r"the engine has \d+ bytes, .* at most 10000; write it .* --ep-context file"):
        made(folder, "large.onnx", "embed")
    assert sorted(p.name for p in folder.iterdir()) == before


def test_modes_that_there_are_not(folder: Path) -> None:
    with pytest.raises(InputError, match="unknown EPContext mode 'both'; choose one of embed, file"):
        made(folder, "m.onnx", "both")
    with pytest.raises(InputError, match="needs the library tensorrt-rtx, not tensorrt"):
        made(folder, "m.onnx", "embed", library="tensorrt")


def test_on_the_command_line_and_in_the_report(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "normdeploy", "build", str(folder / "my model.onnx"), "-o", "m.onnx"]
    command += ["--ep-context", "file", "--profile", "batch=1:1:1", "--compute-capability", "8.9", "--report", "r.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    engine = json.loads((tmp_path / "r.json").read_text())["engine"]
    assert engine["ep_context"]["architecture"] == "89"
    assert engine["ep_context"]["mode"] == engine["options"]["ep_context"] == "file"
    said = " ".join(done.stdout.split())
    assert f"EPContext for onnxruntime's TensorRT-RTX provider, engine in {engine['ep_context']['file']}" in said
    assert engine["bytes"] == (tmp_path / engine["ep_context"]["file"]).stat().st_size
