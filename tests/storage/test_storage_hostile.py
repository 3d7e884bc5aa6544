"""Small files that ask for much: each is refused in a sentence, and in a time that is linear in its size."""

from __future__ import annotations

import glob
import json
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import normdeploy
from normdeploy.errors import GraphError, InputError, LoadError, escape_line
from normdeploy.fleet import source_patterns
from normdeploy.fleet.fleet_file import read_fleet
from normdeploy.loading.state_dicts import find_state_dict
from normdeploy.storage import regular_file
from normdeploy.storage.export_record import read_record
from normdeploy.storage.npz_files import read_npy, read_npz
from normdeploy.storage.onnx_files import load_onnx
from normdeploy.verbs.verify.policy_file import read_policy
from tests.work import count_calls


def _model(weights: list[TensorProto], domains: int = 0) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    graph = helper.make_graph(nodes, "g", [value("x", 1, [2, 8])], [value("y", 1, [2, 8])], weights)
    imports = [helper.make_opsetid("", 17), *(helper.make_opsetid(f"d{i}", 1) for i in range(domains))]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def _external(name: str, count: int, file: str, offset: int = 0) -> TensorProto:
    tensor = TensorProto(name=name, data_type=1, dims=[count], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", file), ("offset", str(offset)), ("length", str(4 * count))):
        tensor.external_data.add(key=key, value=value)
    return tensor


@pytest.mark.parametrize("how", ["one name", "hard links", "links"])
def test_weights_that_share_one_sparse_file_are_refused(tmp_path: Path, how: str) -> None:
    """40 weights of 16 MB on one file of 16 MB, which takes no place on the disk."""
    (tmp_path / "w0.bin").touch()
    os.truncate(tmp_path / "w0.bin", 16 << 20)
    for i in range(1, 40):
        if how == "hard links":
            os.link(tmp_path / "w0.bin", tmp_path / f"w{i}.bin")
        elif how == "links":
            (tmp_path / f"w{i}.bin").symlink_to("w0.bin")
    names = ["w0.bin" if how == "one name" else f"w{i}.bin" for i in range(40)]
    onnx.save(_model([_external(f"w{i}", 4 << 20, name) for i, name in enumerate(names)]), tmp_path / "m.onnx")
    with pytest.raises(
        GraphError, match=f"are {40 * (16 << 20)} bytes, but the files that contain them have {16 << 20}:"
    ):
        load_onnx(tmp_path / "m.onnx")


def test_weight_in_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.bin").symlink_to("w.bin")
    onnx.save(_model([_external("w", 4, "w.bin")]), tmp_path / "m.onnx")
    with pytest.raises(GraphError, match=r"refers to|broken reference|missing from the model's folder"):
        load_onnx(tmp_path / "m.onnx")


def test_weights_that_are_tied_in_the_file_are_read(tmp_path: Path) -> None:
    np.arange(64, dtype=np.float32).tofile(tmp_path / "w.bin")
    weights = [_external("a", 64, "w.bin"), _external("b", 64, "w.bin"), _external("c", 8, "w.bin", 32)]
    onnx.save(_model(weights), tmp_path / "m.onnx")
    loaded = load_onnx(tmp_path / "m.onnx")
    assert [onnx.numpy_helper.to_array(t)[0] for t in loaded.graph.initializer] == [0, 0, 8]


@pytest.mark.parametrize("dims", [[2**40, 0, 2**40], [0, 2**60], [2**62, 2, 0]])
def test_weight_without_elements_whose_sizes_overflow_is_refused(tmp_path: Path, dims: list[int]) -> None:
    onnx.save(_model([TensorProto(name="w", data_type=1, dims=dims, raw_data=b"")]), tmp_path / "m.onnx")
    with pytest.raises(GraphError, match="whose nonzero sizes make"):
        load_onnx(tmp_path / "m.onnx")


def test_weight_without_elements_is_read(tmp_path: Path) -> None:
    onnx.save(_model([TensorProto(name="w", data_type=1, dims=[2**20, 0, 2**20], raw_data=b"")]), tmp_path / "m.onnx")
    assert list(load_onnx(tmp_path / "m.onnx").graph.initializer[0].dims) == [2**20, 0, 2**20]


def test_many_domains_take_linear_time(tmp_path: Path) -> None:
    onnx.save(_model([], domains=30_000), tmp_path / "m.onnx")
    # A few calls for each domain.
    assert count_calls(lambda: load_onnx(tmp_path / "m.onnx")) < 1_000_000


def test_domain_that_is_stated_twice_is_named(tmp_path: Path) -> None:
    model = _model([], domains=3)
    model.opset_import.add(domain="d1", version=2)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(GraphError, match="the domain 'd1' has two opsets"):
        load_onnx(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("limits", "size"),
    [
        ("[NaN, Infinity]", 2),
        ("[-Infinity, 0]", 2),
        ("[2, 1]", 2),
        (f"[1{'0' * 400}, 2{'0' * 400}]", 2),
        ("[-1.7e308, 1.7e308]", 2),
        ("[0, 1]", 10**30),
    ],
)
def test_range_or_size_of_the_record_that_makes_no_sense_is_refused(tmp_path: Path, limits: str, size: int) -> None:
    def dim(n: int) -> dict[str, Any]:
        return {"name": None, "min": n, "opt": n, "max": n, "terms": []}

    entry = {"name": "x", "dtype": "float32", "shape": [dim(size), dim(8)], "range": "RANGE", "mask": False}
    record = {"schema": 2, "model": {"sha256": "", "kind": "onnx"}, "inputs": [entry], "outputs": ["y"]}
    text = json.dumps({**record, "load": {}, "export": {}, "versions": {}}).replace('"RANGE"', limits)
    model = _model([])
    model.metadata_props.add(key="normdeploy", value=text)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(GraphError, match="is invalid"):
        read_record(load_onnx(tmp_path / "m.onnx"))
    # What the file itself says of its input is enough.
    normdeploy.run(tmp_path / "m.onnx", output=tmp_path / "o.npz")


def _npy(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + b"\0" * 64


@pytest.mark.parametrize("read_one", [read_npz, read_npy])
@pytest.mark.parametrize(
    "header",
    [
        "(" * 9000,
        "{'descr':'<f4','fortran_order':False,'shape':(True,16)}",
        f"{{'descr':'<f4','fortran_order':False,'shape':(0,{2**70})}}",
        "{'descr':'<f4,(2','fortran_order':False,'shape':(1,)}",
        f"{{'descr':'<f4','fortran_order':False,'shape':({'1' * 5000},)}}",
        "-" * 9000 + "1",
    ],
    ids=["parentheses", "truth value as a size", "size beyond int64", "broken type", "5000 digits", "signs"],
)
def test_header_of_an_array_that_is_damaged_is_refused(
    tmp_path: Path, header: str, read_one: Callable[[Path], Any]
) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", _npy(header))
    (tmp_path / "a.npy").write_bytes(_npy(header))
    with pytest.raises(InputError, match=r"is not a plain array|is not an \.npz file") as caught:
        read_one(tmp_path / ("a.npz" if read_one is read_npz else "a.npy"))
    assert len(str(caught.value)) < 1000


def test_many_names_of_arrays_take_linear_time(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for i in range(20_000):
            archive.writestr(f"a{i}.txt", b"")

    def read() -> None:
        with pytest.raises(InputError, match="and 19996 more, which are not arrays"):
            read_npz(tmp_path / "a.npz")

    # zipfile makes about 30 calls for each name.
    assert count_calls(read) < 2_000_000


def test_checkpoint_that_holds_itself_is_refused() -> None:
    checkpoint: dict[str, Any] = {}
    checkpoint["self"] = {"again": checkpoint}
    with pytest.raises(LoadError, match="contains no weights"):
        find_state_dict(checkpoint, None, Path("x.pt"))


@pytest.mark.parametrize("depth", [3000, 100_000])
def test_checkpoint_of_dicts_without_end_is_refused(depth: int) -> None:
    checkpoint: dict[str, Any] = {"w": torch.zeros(1)}
    whole = [checkpoint]
    for _ in range(depth):
        checkpoint = {"inner": checkpoint}
        whole.append(checkpoint)
    with pytest.raises(LoadError, match="more than 64 dicts deep"):
        find_state_dict(checkpoint, None, Path("x.pt"))
    # Python frees nested dicts by recursion; from the outside in there is none.
    while whole:
        whole.pop().clear()


@pytest.mark.parametrize("reader", [read_policy, read_fleet])
@pytest.mark.parametrize("kind", ["device", "link to a device"])
def test_file_that_never_ends_is_refused(tmp_path: Path, reader: Callable[[Path], Any], kind: str) -> None:
    path = tmp_path / "x.toml" if kind != "device" else Path("/dev/zero")
    if kind == "link to a device":
        path.symlink_to("/dev/zero")
    with pytest.raises(InputError, match="is not a regular file"):
        reader(path)


def test_pattern_that_walks_through_everything_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds nothing, so the number of what it finds bounds nothing."""
    monkeypatch.setattr(source_patterns, "MOST_SEEN", 50)
    for i in range(10):
        (tmp_path / f"a{i}").mkdir()
        for j in range(10):
            (tmp_path / f"a{i}" / f"b{j}.txt").touch()
    (tmp_path / "fleet.toml").write_text(
        '[models.a]\nsource="**/*.pt2"\n[targets.t]\nruntime="onnxruntime"\n[variants.v]\n'
    )
    with pytest.raises(InputError, match="scans more than 200000 files"):
        read_fleet(tmp_path / "fleet.toml")


@pytest.mark.parametrize(
    "pattern", ["*.pt2", "**/*.pt2", "a/**/*.pt2", "*/[b-c]/?.pt2", "**", ".h/*.pt2", "gone/*.pt2"]
)
def test_pattern_finds_what_glob_finds(tmp_path: Path, pattern: str) -> None:
    for name in ("x.pt2", "a/y.pt2", "a/b/z.pt2", "a/c/u.pt2", ".h/v.pt2", "a/.w.pt2", "a/b/t.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    wanted = {Path(os.path.abspath(tmp_path / p)) for p in glob.glob(pattern, root_dir=tmp_path, recursive=True)}
    assert set(source_patterns.expand_pattern(pattern, tmp_path)) == wanted


def _piped(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Read a pipe, as which bash passes the output of ``command``."""
    code = (
        "import sys; from normdeploy.storage.regular_file import read_regular; "
        "print(read_regular(sys.argv[1], most=99))"
    )
    words = ["bash", "-c", f'"$0" -c "$1" <({command})', sys.executable, code]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


def test_pipe_that_ends_is_read(tmp_path: Path) -> None:
    assert (
        _piped(tmp_path, "echo seeds = 2; sleep 0.2; echo strict = true").stdout == "b'seeds = 2\\nstrict = true\\n'\n"
    )


@pytest.mark.parametrize(
    ("command", "reason"), [("yes", "bytes or more; at most 99 are read"), ("true", "is a pipe without data")]
)
def test_pipe_without_end_or_content_is_refused(tmp_path: Path, command: str, reason: str) -> None:
    assert reason in _piped(tmp_path, command).stderr


def test_pipe_that_stays_silent_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular_file, "PATIENCE", 0.2)
    os.mkfifo(tmp_path / "x.toml")
    writer = os.open(tmp_path / "x.toml", os.O_RDWR)
    try:
        with pytest.raises(InputError, match=r"did not end in 0\.2 seconds"):
            read_policy(tmp_path / "x.toml")
    finally:
        os.close(writer)


def test_pipe_that_nobody_writes_into_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.toml")
    with pytest.raises(InputError, match="is a pipe without data"):
        read_policy(tmp_path / "x.toml")


def _sparse(name: str, elements: int) -> onnx.SparseTensorProto:
    sparse = onnx.SparseTensorProto(dims=[elements])
    sparse.values.CopyFrom(onnx.numpy_helper.from_array(np.ones(1, np.float32), name))
    sparse.indices.CopyFrom(onnx.numpy_helper.from_array(np.zeros(1, np.int64)))
    return sparse


def test_sparse_tensors_that_are_large_together_are_refused(tmp_path: Path) -> None:
    """100 of 2^26 elements, of which each by itself is small enough."""
    model = _model([])
    model.graph.sparse_initializer.extend(_sparse(f"s{i}", 2**26) for i in range(100))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(GraphError, match=f"have {100 * 2**26} elements in dense form and 100 values"):
        load_onnx(tmp_path / "m.onnx")


@pytest.mark.parametrize("place", ["dim", "domain", "weight", "input"])
def test_name_of_any_length_is_refused(tmp_path: Path, place: str) -> None:
    model, long = _model([TensorProto(name="w", data_type=1, dims=[1], float_data=[1])]), "a" * 10_000_000
    if place == "dim":
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = long
    elif place == "domain":
        model.opset_import.add(domain=long, version=1)
    elif place == "weight":
        model.graph.initializer[0].name = long
    else:
        model.graph.node[0].input[0] = long
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(GraphError, match="has 10000000 characters; at most 65536 are read") as caught:
        load_onnx(tmp_path / "m.onnx")
    assert len(str(caught.value)) < 200


def test_long_line_is_cut_in_its_middle() -> None:
    assert len(escape_line("a" * 10_000_000)) < 2000


def test_pattern_that_explodes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(
        f'[models.a]\nsource="{"**/" * 12}x.pt2"\n[targets.t]\nruntime="onnxruntime"\n[variants.v]\n'
    )
    with pytest.raises(InputError, match=r"contains \*\* more than once"):
        read_fleet(tmp_path / "fleet.toml")


def test_export_record_that_can_not_be_read_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def malformed(proto: onnx.ModelProto) -> dict[str, Any]:
        raise GraphError("the record is malformed")

    monkeypatch.setattr("normdeploy.verbs.export.export_function.read_record", malformed)
    with pytest.raises(GraphError, match="is malformed"):
        normdeploy.export(torch.nn.Linear(4, 4).eval(), (torch.zeros(2, 4),), output=tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", ["a" + ".a" * 50_000 + " = 1\n", "[" + "a . " * 200 + "a]\n", "x = {" + "'q'." * 200 + "q = 1}"]
)
@pytest.mark.parametrize("reader", [read_fleet, read_policy])
def test_toml_key_of_many_parts_is_refused(tmp_path: Path, text: str, reader: Callable[[Path], Any]) -> None:
    (tmp_path / "f.toml").write_text(text)
    with pytest.raises(InputError, match=r"is not valid TOML: a key has more than 100 parts \(at line 1\)"):
        reader(tmp_path / "f.toml")
