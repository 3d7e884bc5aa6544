"""Runners for inference: what they refuse, whose memory they use, their life; files in and out; engines over a
stand-in."""

from __future__ import annotations

import io
import json
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch

import normdeploy
from normdeploy.errors import InputError, NormdeployError
from normdeploy.runtimes.tensor_spec import as_numpy, as_tensor
from normdeploy.storage import npz_files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[n, 4] x, float[n, 4] z, bfloat16[2] b)
        => (float[n, 4] y, bfloat16[2] c, bool[n, 4] less) { y = Sub(x, z) c = Identity(b) less = Less(x, z) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.bin")  # told by its content
    return tmp_path / "model.bin"


def feeds(n: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n)
    x, z = rng.standard_normal((2, n, 4)).astype(np.float32)
    return {"x": x, "z": z, "b": np.array([1, -2.5], ml_dtypes.bfloat16)}


@pytest.mark.parametrize("n", [3, 0])
def test_numpy_in_numpy_out_torch_in_torch_out(model: Path, n: int) -> None:
    given = feeds(n)
    with normdeploy.open_runner(model) as runner:
        assert [str(s) for s in runner.inputs] == ["x:float32[n, 4]", "z:float32[n, 4]", "b:bfloat16[2]"]
        first = runner.infer(given)
        second = runner.infer({name: as_tensor(name, array) for name, array in given.items()})
        runner.infer(feeds(n + 1))  # what was returned before is left alone
    assert all(isinstance(v, np.ndarray) for v in first.values())
    assert all(isinstance(v, torch.Tensor) for v in second.values())
    for found in (first, {name: as_numpy(v) for name, v in second.items()}):
        assert (found["y"] == given["x"] - given["z"]).all()
        assert found["less"].dtype == bool
        assert (found["less"] == (given["x"] < given["z"])).all()
        assert found["c"].dtype == ml_dtypes.bfloat16
        assert (found["c"] == given["b"]).all()


def test_arrays_are_viewed_not_copied() -> None:
    for array in feeds().values():
        for view in (array, array[::2]):
            view.flags.writeable = False
            tensor = as_tensor("x", view)
            assert tensor.data_ptr() == view.__array_interface__["data"][0]
            assert as_numpy(tensor).ctypes.data == tensor.data_ptr()
            assert (as_numpy(tensor) == view).all()
    assert (
        as_tensor("x", np.arange(3, dtype=">i4")).tolist()
        == as_tensor("x", np.arange(3)[::-1].copy()[::-1]).tolist()
        == [0, 1, 2]
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": None}, r"needs the inputs \['x'\]"),
        ({"w": np.zeros(1)}, r"has no inputs \['w'\]"),
        ({"x": np.zeros((3, 4))}, "'x' is float32, but got float64; convert it"),
        ({"x": np.zeros(4, np.float32)}, r"x:float32\[n, 4\], but got the shape \[4\]"),
        ({"x": np.zeros((3, 5), np.float32)}, r"x:float32\[n, 4\], but got the shape \[3, 5\]"),
        ({"z": np.zeros((2, 4), np.float32)}, "the dim 'n' is 3 in input 'x', but 2 in input 'z'"),
        ({"x": [[1.0]]}, "'x' is a list"),
        ({"x": np.array(["a"])}, "'x' can't be used"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_runs(
    model: Path, monkeypatch: pytest.MonkeyPatch, change: Any, said: str
) -> None:
    given = {name: value for name, value in (feeds() | change).items() if value is not None}
    with normdeploy.open_runner(model) as runner:
        for method in ("_run_tensors", "_run_arrays"):
            monkeypatch.setattr(runner, method, lambda given: pytest.fail("it ran"))
        with pytest.raises(InputError, match=said):
            runner.infer(given)


def test_a_runner_is_entered_once_and_closed_for_good(model: Path) -> None:
    runner = normdeploy.open_runner(model)
    with runner, pytest.raises(NormdeployError, match="entered twice"):
        runner.__enter__()
    runner.close()
    for use in (lambda: runner.infer(feeds()), runner.__enter__):
        with pytest.raises(NormdeployError, match="is closed; open the file again"):
            use()


def test_options_that_do_not_fit_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"ftrt and more")
    for path, options, said in [
        (model, {"provider": "tpu"}, "unknown provider 'tpu'"),
        (model, {"profile_index": 0}, "is not an engine and has no profile 0"),
        (model, {"cuda_graph": True}, "add provider='cuda'"),
        (tmp_path / "m.onnx", {"provider": "cpu"}, "is an engine, which runs on a GPU"),
        (tmp_path / "none", {}, "file not found"),
    ]:
        with pytest.raises(InputError, match=said):
            normdeploy.open_runner(path, **options)  # type: ignore[arg-type]


def test_files_in_and_out(model: Path, tmp_path: Path) -> None:
    given, output = feeds(), tmp_path / "out.npz"
    npz_files.write_npz(tmp_path / "in.npz", given)
    normdeploy.run(model, tmp_path / "in.npz", output)
    found = np.load(output)
    assert (found["y"] == given["x"] - given["z"]).all()
    assert (found["c"].view(ml_dtypes.bfloat16) == given["b"]).all()
    before = output.read_bytes()
    npz_files.write_npz(tmp_path / "in.npz", given | {"x": np.zeros((9, 9), np.float32)})
    with pytest.raises(InputError, match="but got the shape"):
        normdeploy.run(model, tmp_path / "in.npz", output)
    assert output.read_bytes() == before
    with pytest.raises(InputError, match="would overwrite the input"):
        normdeploy.run(model, tmp_path / "in.npz", tmp_path / "in.npz")


def test_sizes_that_nothing_says_are_those_at_which_the_file_runs(model: Path, tmp_path: Path) -> None:
    usual = normdeploy.run(model)
    assert usual.inputs["x"] == usual.inputs["z"] == "float32[8, 4]"
    assert any("the sizes of n: n=8 was used" in note for note in usual.notes)
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[n, 1, t] x) => (float[n, 1, s] y) { y = Conv (x, k) }""")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((1, 1, 20), np.float32), "k"))
    onnx.save(proto, tmp_path / "window.onnx")
    assert normdeploy.run(tmp_path / "window.onnx").inputs["x"] == "float32[2, 1, 32]"


def test_generated_inputs_follow_the_record_and_the_seed(tmp_path: Path) -> None:
    normdeploy.export(torch.nn.Embedding(9, 2).eval(), inputs=["ids:int64[n=1:5:8]{3:9}"], output=tmp_path / "m.onnx")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert normdeploy.run(tmp_path / "m.onnx", None, tmp_path / f"{name}.npz", seed=seed).notes == ()
    a, b, c = (np.load(tmp_path / f"{name}.inputs.npz")["ids"] for name in "abc")
    assert a.shape == (5,)
    assert 3 <= a.min() <= a.max() < 9
    assert (a == b).all()
    assert (a != c).any()


def test_archives_that_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "in.npz"
    np.savez(path, x=np.array([{}], object))
    with pytest.raises(InputError, match="pickled objects, which are never loaded"):
        npz_files.read_npz(path)
    np.savez_compressed(path, x=np.zeros(10**6))
    with pytest.raises(InputError, match="unpacks to 8000128 bytes, but at most 1000 are read"):
        npz_files.read_npz(path, limit=1000)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**12,)})
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", header.getvalue())
    with pytest.raises(InputError, match="claims 8000000000000 bytes, but contains 128"):
        npz_files.read_npz(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", b"")
        with pytest.warns(UserWarning, match="Duplicate name"):
            file.writestr("x.npy", b"")
    with pytest.raises(InputError, match=r"holds \['x\.npy'\] twice"):
        npz_files.read_npz(path)
    path.write_bytes(b"PK junk")
    with pytest.raises(InputError, match=r"is not an \.npz file of arrays"):
        npz_files.read_npz(path)


def test_runners_in_threads_give_each_its_own(model: Path) -> None:
    def work(n: int) -> bool:
        with normdeploy.open_runner(model) as own:
            return all(
                (r.infer(feeds(n))["y"] == feeds(n)["x"] - feeds(n)["z"]).all()
                for r in (own, shared)
                for _ in range(50)
            )

    with normdeploy.open_runner(model) as shared, ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(1, 9)))


def test_the_report_of_a_run(model: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from normdeploy.cli.app import app

    files = {name: tmp_path / name for name in ("in.npz", "out.npz", "run.json")}
    np.savez(files["in.npz"], **{n: v for n, v in feeds().items() if n != "b"}, b=feeds()["b"].view(np.dtype("V2")))
    arguments = [
        "run",
        str(model),
        "--inputs",
        str(files["in.npz"]),
        "-o",
        str(files["out.npz"]),
        "--report",
        str(files["run.json"]),
    ]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    report = json.loads(files["run.json"].read_text())
    assert (report["verb"], report["inference"]["outputs"]["y"]) == ("run", "float32[3, 4]")
    assert f"output  less  {report['inference']['outputs']['less']}" in done.stdout
