"""Outputs are whole or not there at all; what is read is an ONNX file and nothing beyond its folder."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import normdeploy
from normdeploy.errors import GraphError, InputError, NormdeployError
from normdeploy.storage import file_replacement as storage_atomic
from normdeploy.storage import folder_replacement as storage_folder
from normdeploy.storage import onnx_files
from normdeploy.storage.file_hash import hash_file
from normdeploy.storage.onnx_files import load_onnx, replace_atomically, save_onnx, write_bytes
from normdeploy.storage.weight_serialization import detach_weights


def model(value: float = 1.0, size: int = 4096) -> onnx.ModelProto:
    """x + w + 2, w and an unused v of 4·size bytes."""
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["t"]), helper.make_node("Add", ["t", "small"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [size])],
        [
            numpy_helper.from_array(np.full(size, value, np.float32), "w"),
            numpy_helper.from_array(np.arange(size, dtype=np.float32) + value, "v"),
            numpy_helper.from_array(np.float32(2), "small"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


# ------------------------------------------------------------------ replacing


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert hash_file(tmp_path / "a") == hashlib.sha256(b"abc").hexdigest()


def test_write_and_replace(tmp_path: Path) -> None:
    path = tmp_path / "out"
    write_bytes(path, b"one")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask  # as any program's output, not as a temporary file's
    path.chmod(0o640)
    write_bytes(path, b"two")
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert names(tmp_path) == {"out"}


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"one")
    (tmp_path / "link").symlink_to("real")
    write_bytes(tmp_path / "link", b"two")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"two"


def test_an_exception_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    write_bytes(path, b"old")
    with pytest.raises(ZeroDivisionError), replace_atomically(path) as temporary:
        assert temporary.write_bytes(b"half of the n") // 0
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == {"out"}


@pytest.mark.parametrize("what", ["folder", "pipe", "no folder"])
def test_targets_that_cannot_be_replaced(tmp_path: Path, what: str) -> None:
    path = tmp_path / "out"
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path = tmp_path / "missing" / "out"
    before = names(tmp_path)
    with pytest.raises(NormdeployError, match=r"can't write.*(not a regular file|the folder 'missing' does not exist)"):
        write_bytes(path, b"x")
    assert names(tmp_path) == before


def test_a_folder_that_can_not_be_replaced_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two names can't be exchanged, the old folder is renamed before the new one can take its place."""
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "old").write_text("kept")
    rename = os.rename

    def refusing(source: Path, target: Path) -> None:
        if (source / "new").exists():
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        rename(source, target)

    monkeypatch.setattr(storage_folder, "exchange_names", lambda *_: False)
    monkeypatch.setattr(os, "rename", refusing)
    with (
        pytest.raises(NormdeployError, match=r"can't write 'made' .*: Permission denied"),
        storage_folder.replace_folder_atomically(tmp_path / "made") as fresh,
    ):
        (fresh / "new").touch()
    assert names(tmp_path) == {"made"}
    assert (tmp_path / "made" / "old").read_text() == "kept"


SLOW_WRITER = """
import signal, sys, time
from normdeploy.storage.file_replacement import replace_atomically
signal.signal(signal.SIGINT, signal.default_int_handler)  # which nohup and a shell's & ignore
with replace_atomically(sys.argv[1]) as temporary:
    temporary.write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(60)
"""


def slow_writer(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITER, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_killed_writer(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "out"
    write_bytes(path, b"old")
    process = slow_writer(path)
    assert len(names(tmp_path)) == 2
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert path.read_bytes() == b"old"
    # Nobody can clean up after SIGKILL but the next writer.
    assert len(names(tmp_path)) == (2 if number == signal.SIGKILL else 1)
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == {"out"}


def test_a_living_writer_keeps_its_temporary(tmp_path: Path) -> None:
    path = tmp_path / "out"
    (tmp_path / ".out.backup.tmp").write_bytes(b"a user's own file")
    process = slow_writer(path)
    try:
        before = names(tmp_path)
        write_bytes(path, b"mine")
        assert names(tmp_path) == before | {"out"}
    finally:
        process.kill()
        process.communicate()


def test_a_temporary_that_was_swept_away_before_its_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process takes it for a left-over in the moment between its creation and its lock."""
    lock, swept = storage_atomic.lock_handle, list[Path]()

    def late(handle: int, *, wait: bool = True) -> bool:
        if not swept:
            swept.extend(tmp_path.glob(".out.*.tmp"))
            swept[0].unlink()
        return lock(handle, wait=wait)

    monkeypatch.setattr(storage_atomic, "lock_handle", late)
    with replace_atomically(tmp_path / "out") as temporary:
        temporary.write_bytes(b"x")
        handle = os.open(temporary, os.O_RDWR)
        assert not lock(handle, wait=False), "another process may sweep it away again"
        os.close(handle)
    assert (tmp_path / "out").read_bytes() == b"x"
    assert names(tmp_path) == {"out"}


def test_a_full_disk_is_said_so(tmp_path: Path) -> None:
    write_bytes(tmp_path / "out", b"old")
    script = (
        "import resource, sys; from normdeploy.storage.onnx_files import write_bytes; from normdeploy.errors import"
        " NormdeployError\n"
        # the kernel refuses the write as it does on a full disk
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: write_bytes(sys.argv[1], bytes(100000))\n"
        "except NormdeployError as error: print(error)"
    )
    said = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out")], capture_output=True, text=True, check=True
    ).stdout
    assert "can't write 'out'" in said
    assert "MB are free in its folder" in said
    assert (tmp_path / "out").read_bytes() == b"old"
    assert names(tmp_path) == {"out"}


# ------------------------------------------------------------------ ONNX files


def test_round_trip_in_one_file(tmp_path: Path) -> None:
    save_onnx(model(), tmp_path / "m.onnx")
    assert names(tmp_path) == {"m.onnx"}
    assert load_onnx(tmp_path / "m.onnx") == model()


def test_round_trip_with_external_data(tmp_path: Path) -> None:
    before = model()
    save_onnx(before, tmp_path / "m.onnx", external=True)
    assert before == model()
    data = [n for n in names(tmp_path) if n != "m.onnx"]
    assert len(data) == 1
    assert data[0].startswith("m.onnx.")
    assert data[0].endswith(".data")
    onnx.checker.check_model(str(tmp_path / "m.onnx"))
    light = load_onnx(tmp_path / "m.onnx", external_data=False)
    assert {t.name for t in light.graph.initializer if t.data_location == TensorProto.EXTERNAL} == {"w", "v"}
    assert load_onnx(tmp_path / "m.onnx") == model()
    theirs = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "m.onnx").graph.initializer}
    assert all((theirs[t.name] == numpy_helper.to_array(t)).all() for t in model().graph.initializer)


def test_what_protobuf_cannot_hold_goes_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_files, "PROTOBUF_LIMIT", 20_000)
    save_onnx(model(), tmp_path / "m.onnx")
    assert len(names(tmp_path)) == 2
    assert (tmp_path / "m.onnx").stat().st_size < 2000
    assert load_onnx(tmp_path / "m.onnx") == model()


def test_old_weights_go_with_the_old_model(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    (tmp_path / "m.onnx.data").write_bytes(b"another tool's")
    save_onnx(model(1), path, external=True)
    first = names(tmp_path)
    save_onnx(model(1), path, external=True)
    assert names(tmp_path) == first  # the name comes from the content
    save_onnx(model(2), path, external=True)
    assert len(names(tmp_path) & first) == 2
    assert len(names(tmp_path)) == 3
    assert load_onnx(path) == model(2)
    save_onnx(model(3), path)
    assert names(tmp_path) == {"m.onnx", "m.onnx.data"}


@pytest.mark.parametrize("at", [1, 2])
def test_the_old_pair_is_valid_until_the_new_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    path = tmp_path / "m.onnx"
    save_onnx(model(1), path, external=True)
    real, calls = os.replace, []

    def replace(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(NormdeployError, match="No space left"):
        save_onnx(model(2), path, external=True)
    monkeypatch.undo()
    assert load_onnx(path) == model(1)
    save_onnx(model(2), path, external=True)
    assert len(names(tmp_path)) == 2


def test_weights_that_were_not_loaded_cannot_be_saved(tmp_path: Path) -> None:
    save_onnx(model(), tmp_path / "m.onnx", external=True)
    with pytest.raises(GraphError, match="load the model with its external data"):
        save_onnx(load_onnx(tmp_path / "m.onnx", external_data=False), tmp_path / "n.onnx")
    assert "n.onnx" not in names(tmp_path)


@pytest.mark.parametrize("external", [False, True])
def test_a_weight_of_another_size_than_its_shape_is_refused(tmp_path: Path, external: bool) -> None:
    proto = model()
    proto.graph.initializer[0].raw_data = proto.graph.initializer[0].raw_data[:-4]
    with pytest.raises(GraphError, match=r"needs \d+ bytes but holds \d+"):
        save_onnx(proto, tmp_path / "m.onnx", external=external)
    assert not names(tmp_path)


def test_detached_shares_nothing_that_can_be_changed() -> None:
    proto = model()
    light, weights = detach_weights(proto)
    assert set(weights) == {"w", "v"}
    light.graph.initializer[0].name = light.graph.node[0].name = "changed"
    assert proto == model()
    assert light.ByteSize() < 1000


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize(
    ("opset", "node"),
    [
        (18, "GroupNormalization<num_groups = 2>(x, s, s)"),
        (12, "LayerNormalization<axis = -1, epsilon = 0.001>(x, s)"),
        (13, "InstanceNormalization_TRT<epsilon = 0.001>(x, s, s)"),
    ],
)
def test_norms_of_other_tools_in_the_standards_domain_are_read(
    tmp_path: Path, opset: int, node: str, external: bool
) -> None:
    size = 2 if opset == 18 else 1024
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> g (float[n,1024,1024] x) => (float[n,1024,1024] y) {{ y ='
        f" {node} }}"
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.linspace(1, 2, size, dtype=np.float32), "s"))
    path = tmp_path / "m.onnx"
    save_onnx(proto, path, external=external)
    with pytest.raises(onnx.checker.ValidationError):  # so it is this test that tells, not a newer onnx
        onnx.checker.check_model(str(path))
    assert load_onnx(path) == proto
    proto.graph.node.add(op_type="Add", input=["y", "nowhere"], output=["z"])
    save_onnx(proto, path, external=external)
    with pytest.raises(GraphError, match="violates the ONNX specification"):
        load_onnx(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "file not found"),
        (b"", "contains no graph"),
        (b"not an onnx file at all", "not an ONNX file, or is truncated"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
            "fetch the file with `git lfs pull`",
        ),
        (b"\x08\x0a", "contains no graph"),
        (onnx.TensorProto(name="w", dims=[1]).SerializeToString(), "not an ONNX file"),
        (model().SerializeToString()[:-3000], "not an ONNX file, or is truncated"),
        (helper.make_model(model().graph, opset_imports=[]).SerializeToString(), "opset"),
    ],
)
def test_foreign_and_broken_files(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "m.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(GraphError, match=said):
        load_onnx(path)


def test_a_file_that_breaks_the_specification(tmp_path: Path) -> None:
    proto = model()
    proto.graph.node[0].op_type = "Ad"
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(GraphError, match=r"violates the ONNX specification: .*Ad"):
        load_onnx(tmp_path / "m.onnx")


@pytest.mark.parametrize("inside", ["initializer", "attribute", "function"])
@pytest.mark.parametrize("location", ["../secret", "absolute", "link", "sub/../../secret", ""])
def test_external_data_outside_the_folder_is_refused(tmp_path: Path, location: str, inside: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(16))
    (folder / "link").symlink_to("../secret")
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=str(tmp_path / "secret") if location == "absolute" else location)
    proto = model()
    constant = helper.make_node("Constant", [], ["c"])
    constant.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(tensor)
    if inside == "initializer":
        proto.graph.initializer.append(tensor)
    elif inside == "attribute":
        proto.graph.node.append(constant)
    else:
        proto.functions.append(helper.make_function("d", "f", [], ["c"], [constant], [helper.make_opsetid("", 21)]))
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(GraphError, match="outside the model's folder"):
        load_onnx(folder / "m.onnx")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data, _: data.unlink(), "missing from the model's folder; copy it there"),
        (lambda data, _: os.truncate(data, 20_000), "needs 16384 bytes .* which has 20000; the file is truncated"),
        (lambda _, entries: entries["length"].__setattr__("value", "400"), "needs 16384 bytes but refers to 400 bytes"),
        (lambda _, entries: entries["offset"].__setattr__("value", "-1"), "refers to 16384 bytes at -1"),
        (lambda _, entries: entries["offset"].__setattr__("value", "x"), "broken reference"),
        (lambda _, entries: entries["length"].__setattr__("value", "-4"), "needs 16384 bytes but refers to -4 bytes"),
        (lambda _, entries: entries["location"].__setattr__("value", "a\0b"), "broken reference"),
        (
            lambda _, entries: entries["location"].__setattr__("value", "a" * 5000),
            "broken reference|missing from the model's folder",
        ),
    ],
)
def test_broken_external_data(tmp_path: Path, change: object, said: str) -> None:
    path = tmp_path / "m.onnx"
    save_onnx(model(), path, external=True)
    proto = load_onnx(path, external_data=False)
    data = next(tmp_path.glob("*.data"))
    tensor = next(t for t in proto.graph.initializer if t.name == "v")  # the second one in the data file
    change(data, {e.key: e for e in tensor.external_data})  # type: ignore[operator]
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(GraphError, match=said):
        load_onnx(path)


def test_a_size_of_minus_one_is_an_open_one(tmp_path: Path) -> None:
    """PaddlePaddle's older writers put it for a dynamic size."""
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[1,1,4] x) => (float[1,1,4] y) { h = Relu(x) y = Neg(h) }'
    )
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("h", onnx.TensorProto.FLOAT, [-1, -1, 4]))
    for value in (*proto.graph.input, *proto.graph.output):
        for dim in value.type.tensor_type.shape.dim[:2]:
            dim.dim_value = -1
    before = proto.SerializeToString()
    path = tmp_path / "paddle.onnx"
    path.write_bytes(before)
    for result in (load_onnx(path), normdeploy.optimize(path).proto, normdeploy.optimize(proto).proto):
        for value in (*result.graph.input, *result.graph.output, *result.graph.value_info):
            assert [d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim] == [
                None,
                None,
                4,
            ]
    assert proto.SerializeToString() == before


def test_a_node_that_reads_nothing_is_told_in_one_whole_line(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["": 13]> net (float[2] x) => (float[2] y) { [first] y = Relu (nosuch) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    with pytest.raises(GraphError, match="input 'nosuch' of node: name: first OpType: Relu is not output of") as told:
        load_onnx(tmp_path / "m.onnx")
    assert "\n" not in str(told.value)


def locations(path: Path) -> set[str]:
    """Names of the files that hold weights of an ONNX file."""
    tensors = onnx.load(path, load_external_data=False).graph.initializer
    return {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}


def test_weights_go_to_the_named_file_and_are_replaced_with_it(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    for value in (1.0, 2.0):
        save_onnx(model(value), path, data_name="m.onnx_data")
        assert names(tmp_path) == {"m.onnx", "m.onnx_data"}
        assert locations(path) == {"m.onnx_data"}
        weights = {t.name: numpy_helper.to_array(t) for t in load_onnx(path).graph.initializer}
        assert weights["w"][0] == value
    # A file without large weights needs no second file.
    save_onnx(model(3.0, size=2), path, data_name="m.onnx_data")
    assert names(tmp_path) == {"m.onnx"}


def test_the_old_model_never_reads_new_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the writer ends between the two files, no model with wrong weights is left."""
    path = tmp_path / "m.onnx"
    save_onnx(model(1.0), path, data_name="w.data")

    def end(temporary: Path, target: Path) -> None:
        if target == path:
            raise KeyboardInterrupt
        os.replace(temporary, target)

    monkeypatch.setattr(onnx_files, "commit_temporary", end)
    with pytest.raises(KeyboardInterrupt):
        save_onnx(model(2.0), path, data_name="w.data")
    assert not path.exists()


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", "a/w.data", "/w.data", "..\\w.data", "m.onnx", 3, "w\0", "w" * 256]
)
def test_a_name_that_is_no_file_beside_the_model_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="external data"):
        save_onnx(model(), tmp_path / "m.onnx", data_name=name)
    assert names(tmp_path) == set()


def test_a_file_that_is_not_the_weights_of_this_model_is_kept(tmp_path: Path) -> None:
    save_onnx(model(1.0), tmp_path / "other.onnx", data_name="w.data")
    before = (tmp_path / "w.data").read_bytes()
    with pytest.raises(InputError, match=r"would replace 'w\.data', which is not the external data of m\.onnx"):
        save_onnx(model(2.0), tmp_path / "m.onnx", data_name="w.data")
    (tmp_path / "m.onnx").write_bytes(b"no model")
    with pytest.raises(InputError, match="would replace"):
        save_onnx(model(2.0), tmp_path / "m.onnx", data_name="w.data")
    assert (tmp_path / "w.data").read_bytes() == before


def test_weights_that_another_model_shares_are_kept(tmp_path: Path) -> None:
    save_onnx(model(1.0), tmp_path / "m.onnx", data_name="w.data")
    shutil.copyfile(tmp_path / "m.onnx", tmp_path / "copy.onnx")
    before = (tmp_path / "w.data").read_bytes()
    with pytest.raises(InputError, match=r"'w\.data', which is the external data of copy\.onnx too"):
        save_onnx(model(2.0), tmp_path / "m.onnx", data_name="w.data")
    assert (tmp_path / "w.data").read_bytes() == before


def test_the_option_reaches_the_file(tmp_path: Path) -> None:
    result = normdeploy.optimize(model(), tmp_path / "m.onnx", external_data_name="m.onnx.data")
    assert result.path == tmp_path / "m.onnx"
    assert locations(tmp_path / "m.onnx") == {"m.onnx.data"}
    with pytest.raises(InputError, match="no output was passed"):
        normdeploy.optimize(model(), external_data_name="m.onnx.data")
