"""Runners for inference: what they refuse, whose memory they use, their life; files in and out; engines over a
stand-in."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch

import normdeploy
from normdeploy.errors import InputError, NormdeployError
from normdeploy.runtimes import engine
from normdeploy.runtimes.tensors import as_numpy, as_tensor
from normdeploy.storage import archive


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
        ({"x": None}, r"is not given \['x'\]"),
        ({"w": np.zeros(1)}, r"has no inputs \['w'\]"),
        ({"x": np.zeros((3, 4))}, "'x' is float32, it was given float64; convert it"),
        ({"x": np.zeros(4, np.float32)}, r"x:float32\[n, 4\], it was given the shape \[4\]"),
        ({"x": np.zeros((3, 5), np.float32)}, r"x:float32\[n, 4\], it was given the shape \[3, 5\]"),
        ({"z": np.zeros((2, 4), np.float32)}, "the dim 'n' is 3 in input 'x', but 2 in input 'z'"),
        ({"x": [[1.0]]}, "'x' is a list"),
        ({"x": np.array(["a"])}, "'x' can't be taken"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_runs(
    model: Path, monkeypatch: pytest.MonkeyPatch, change: Any, said: str
) -> None:
    given = {name: value for name, value in (feeds() | change).items() if value is not None}
    with normdeploy.open_runner(model) as runner:
        monkeypatch.setattr(runner, "_run", lambda tensors: pytest.fail("it ran"))
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
        (model, {"provider": "tpu"}, "no provider 'tpu'"),
        (model, {"profile_index": 0}, "is no engine and has no profile 0"),
        (model, {"cuda_graph": True}, "add provider='cuda'"),
        (tmp_path / "m.onnx", {"provider": "cpu"}, "is an engine, which runs on a GPU"),
        (tmp_path / "none", {}, "there is no file"),
    ]:
        with pytest.raises(InputError, match=said):
            normdeploy.open_runner(path, **options)  # type: ignore[arg-type]


def test_files_in_and_out(model: Path, tmp_path: Path) -> None:
    given, output = feeds(), tmp_path / "out.npz"
    archive.write_npz(tmp_path / "in.npz", given)
    normdeploy.run(model, tmp_path / "in.npz", output)
    found = np.load(output)
    assert (found["y"] == given["x"] - given["z"]).all()
    assert (found["c"].view(ml_dtypes.bfloat16) == given["b"]).all()
    before = output.read_bytes()
    archive.write_npz(tmp_path / "in.npz", given | {"x": np.zeros((9, 9), np.float32)})
    with pytest.raises(InputError, match="it was given the shape"):
        normdeploy.run(model, tmp_path / "in.npz", output)
    assert output.read_bytes() == before
    with pytest.raises(InputError, match="nothing says which sizes the input"):
        normdeploy.run(model, None, output)
    with pytest.raises(InputError, match="which would be lost"):
        normdeploy.run(model, tmp_path / "in.npz", tmp_path / "in.npz")


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
        archive.read_npz(path)
    np.savez_compressed(path, x=np.zeros(10**6))
    with pytest.raises(InputError, match="unpacks to 8000128 bytes, more than the 1000 that are read"):
        archive.read_npz(path, limit=1000)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**12,)})
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", header.getvalue())
    with pytest.raises(InputError, match="claims 8000000000000 bytes of 128"):
        archive.read_npz(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", b"")
        with pytest.warns(UserWarning, match="Duplicate name"):
            file.writestr("x.npy", b"")
    with pytest.raises(InputError, match=r"holds \['x\.npy'\] twice"):
        archive.read_npz(path)
    path.write_bytes(b"PK junk")
    with pytest.raises(InputError, match=r"is no \.npz file of arrays"):
        archive.read_npz(path)


# ------------------------------------------------------------------ engines, over a stand-in that writes down what is a

CALLS: list[tuple[Any, ...]] = []
Mode, Place = Enum("Mode", "INPUT OUTPUT"), Enum("Place", "DEVICE HOST")


class Stream:
    """In the place of ``Cuda``: the CPU as the device."""

    device, handle = torch.device("cpu"), 77

    def __init__(self, index: int, stream: Any) -> None: ...

    def running(self) -> Any:
        import contextlib

        return contextlib.nullcontext()

    def share(self, tensors: Any) -> None: ...

    def synchronize(self) -> None:
        CALLS.append(("synchronize",))

    def captured(self, work: Any) -> Any:
        CALLS.append(("capture",))
        work()
        return lambda: CALLS.append(("replay",))


class Context:
    def __init__(self, unknown: bool) -> None:
        self.active_optimization_profile, self.unknown, self.memory = 0, unknown, {}
        self.shape: tuple[int, ...] = ()
        self.allocator: Any = None

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.active_optimization_profile = profile
        CALLS.append(("profile", profile, stream))
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shape = shape
        CALLS.append(("shape", name, shape))
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address
        self.memory[name] = address
        CALLS.append(("address", name))
        return True

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        self.allocator = allocator
        return True

    def infer_shapes(self) -> list[str]:
        CALLS.append(("infer",))
        return []

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, 4) if self.unknown and name == "y" else self.shape

    def execute_async_v3(self, stream: int) -> bool:
        import ctypes

        CALLS.append(("execute", stream))
        size = self.shape[0] * 16
        target = self.memory.get("y") or self.allocator.reallocate_output_async("y", 0, size, 256, stream)
        if self.allocator is not None:
            self.allocator.notify_shape("y", self.shape)
        ctypes.memmove(target, self.memory["x"], size)
        return True


def library(unknown: bool) -> ModuleType:
    class Engine:
        num_io_tensors, num_optimization_profiles = 2, 2
        get_tensor_name = staticmethod(lambda i: "xy"[i])
        get_tensor_mode = staticmethod(lambda n: Mode.INPUT if n == "x" else Mode.OUTPUT)
        get_tensor_location = staticmethod(lambda n: Place.DEVICE)
        get_tensor_dtype = staticmethod(lambda n: Enum("DataType", "FLOAT").FLOAT)
        get_tensor_shape = staticmethod(lambda n: (-1, 4))
        get_tensor_profile_shape = staticmethod(lambda n, p: [((1, 4), (2, 4), (4, 4)), ((5, 4), (6, 4), (8, 4))][p])
        create_execution_context = staticmethod(lambda: Context(unknown))

    module: Any = ModuleType("tensorrt")
    module.ILogger, module.IOutputAllocator = type("ILogger", (), {}), type("IOutputAllocator", (), {})
    module.TensorIOMode, module.TensorLocation = Mode, Place
    module.Runtime = lambda log: type("Runtime", (), {"deserialize_cuda_engine": lambda self, data: Engine()})()
    return module


@pytest.fixture(params=[False, True], ids=["shapes known", "shapes depend on values"])
def engine_file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(sys.modules, "tensorrt", library(request.param))
    monkeypatch.setattr(engine, "missing", lambda runtime: "")
    monkeypatch.setattr(engine, "Cuda", Stream)
    CALLS.clear()
    (tmp_path / "m.plan").write_bytes(b"ftrt and more")
    return tmp_path / "m.plan"


def test_an_engine_is_told_profile_shapes_and_addresses_in_order(engine_file: Path) -> None:
    x = torch.arange(24, dtype=torch.float32).view(6, 4)
    with normdeploy.open_runner(engine_file) as runner:
        assert runner.inputs[0].profiles == (((1, 4), (2, 4), (4, 4)), ((5, 4), (6, 4), (8, 4)))
        found = runner.infer({"x": x})["y"]
        addressed = runner._context.memory["x"]  # type: ignore[attr-defined]
    assert torch.equal(found, x)
    assert found.data_ptr() != x.data_ptr() == addressed
    steps = [c for c in CALLS if c != ("address", "y")]
    assert steps == [
        ("profile", 1, 77),
        ("shape", "x", (6, 4)),
        ("address", "x"),
        ("infer",),
        ("execute", 77),
        ("synchronize",),
    ]


def test_shapes_outside_the_profiles_are_refused(engine_file: Path) -> None:
    with normdeploy.open_runner(engine_file, profile_index=0) as runner:
        with pytest.raises(InputError, match=r"shape \[6, 4\], profile 0 takes \[1, 4\] to \[4, 4\]"):
            runner.infer({"x": np.zeros((6, 4), np.float32)})
        assert CALLS == []
        assert isinstance(runner.infer({"x": np.zeros((2, 4), np.float32)})["y"], np.ndarray)
    with pytest.raises(InputError, match="has the profiles 0 to 1, there is no 2"):
        normdeploy.open_runner(engine_file, profile_index=2)


def test_a_graph_is_recorded_once_for_a_shape(engine_file: Path, request: pytest.FixtureRequest) -> None:
    x = torch.ones(2, 4)
    with normdeploy.open_runner(engine_file, cuda_graph=True) as runner:
        if "values" in request.node.name:
            with pytest.raises(InputError, match=r"shapes of \['y'\] depend on values"):
                runner.infer({"x": x})
            return
        for size in (2, 2, 3):
            runner.infer({"x": torch.ones(size, 4)})
    assert [c[0] for c in CALLS].count("capture") == 2
    assert [c[0] for c in CALLS].count("replay") == 3


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

    from normdeploy.cli import app

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
    assert f"out  less  {report['inference']['outputs']['less']}" in done.stdout
