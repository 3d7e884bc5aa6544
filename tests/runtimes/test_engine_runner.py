"""Engines run over a stand-in for TensorRT: the order of its calls, memory as it takes it, what it refuses, the runtime
cache."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import normdeploy
from normdeploy.errors import InputError, NormdeployError
from normdeploy.runtimes import engine_runner
from normdeploy.runtimes.aligned_memory import allocate_aligned, allocate_tensor

from ..standin_engine import CALLS, Diagnostics, Stream, Validity, library


@pytest.fixture(params=[False, True], ids=["shapes known", "shapes depend on values"])
def engine_file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return placed(monkeypatch, tmp_path, library(request.param))


def placed(monkeypatch: pytest.MonkeyPatch, folder: Path, module: Any, *, rtx: bool = False) -> Path:
    """An engine file that the stand-in loads."""
    monkeypatch.setitem(sys.modules, "tensorrt_rtx" if rtx else "tensorrt", module)
    monkeypatch.setattr(engine_runner, "describe_missing_runtime", lambda runtime: "")
    monkeypatch.setattr(engine_runner, "CudaStream", Stream)
    CALLS.clear()
    (folder / "m.plan").write_bytes(b"vtrt and more" if rtx else b"ftrt and more")
    return folder / "m.plan"


def aligned(*shape: int) -> torch.Tensor:
    tensor, _ = allocate_tensor(shape, torch.float32, torch.device("cpu"))
    return tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float32).view(shape))


def test_an_engine_is_told_profile_shapes_and_addresses_in_order(engine_file: Path) -> None:
    x = aligned(6, 4)
    with normdeploy.open_runner(engine_file) as runner:
        assert runner.inputs[0].profiles == (((1, 4), (2, 4), (4, 4)), ((5, 4), (6, 4), (8, 4)))
        found = runner.infer({"x": x})["y"]
        addressed = runner._context.memory["x"]  # type: ignore[attr-defined]
    assert torch.equal(found, x)
    assert found.data_ptr() != x.data_ptr() == addressed
    steps = [c for c in CALLS if c != ("address", "y")]
    assert steps == [
        ("plugins", ""),
        ("load", True),
        ("profile", 1, 77),
        ("shape", "x", (6, 4)),
        ("address", "x"),
        ("infer",),
        ("execute", 77),
        ("synchronize",),
    ]


def test_shapes_outside_the_profiles_are_refused(engine_file: Path) -> None:
    with normdeploy.open_runner(engine_file, profile_index=0) as runner:
        with pytest.raises(InputError, match=r"shape \[6, 4\], but profile 0 accepts \[1, 4\] to \[4, 4\]"):
            runner.infer({"x": np.zeros((6, 4), np.float32)})
        assert [c[0] for c in CALLS] == ["plugins", "load"]
        assert isinstance(runner.infer({"x": np.zeros((2, 4), np.float32)})["y"], np.ndarray)
    with pytest.raises(InputError, match="has no profile 2; its profiles are 0 to 1"):
        normdeploy.open_runner(engine_file, profile_index=2)


@pytest.mark.parametrize(("profile", "usual"), [(None, (2, 4)), (0, (2, 4)), (1, (6, 4))])
def test_inputs_that_nobody_gave_have_the_usual_sizes_of_the_profile(
    engine_file: Path, tmp_path: Path, profile: int | None, usual: tuple[int, int]
) -> None:
    found = normdeploy.run(engine_file, None, tmp_path / "y.npz", profile_index=profile)
    assert np.load(tmp_path / "y.inputs.npz")["x"].shape == np.load(tmp_path / "y.npz")["y"].shape == usual
    assert ["the file does not state the values of x" in note for note in found.notes] == [True]


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


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_slice_that_tensorrt_can_not_read_is_copied(engine_file: Path, start: int) -> None:
    """A row is 16 bytes, so that x[1:] begins at no multiple of 256; the stand-in asserts the address."""
    whole = aligned(8, 4)
    x = whole[start:6]
    with normdeploy.open_runner(engine_file) as runner:
        found = runner.infer({"x": x})["y"]
        bound = runner._context.memory["x"]  # type: ignore[attr-defined]
        again = runner.infer({"x": x.numpy()})["y"]
        once = runner.prepare({"x": x})
        once()
    assert torch.equal(found, x)
    assert (again == x.numpy()).all()
    assert (bound == x.data_ptr()) == (start == 0)
    assert torch.equal(whole, aligned(8, 4))


def test_an_input_of_no_elements_has_an_address_too() -> None:
    device = torch.device("cpu")
    for shape in ((0,), (3, 0), (), (5,)):
        tensor, address = allocate_tensor(shape, torch.float64, device)
        assert tensor.shape == shape
        assert address
        assert address % 256 == 0
        assert tensor.numel() == 0 or tensor.data_ptr() == address
    for alignment in (64, 256, 4096):
        memory = allocate_aligned(100, device, alignment)
        assert memory.numel() == 100
        assert memory.data_ptr() % alignment == 0


# ------------------------------------------------------------------ whether it can run here


def test_tensorrt_s_own_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = placed(monkeypatch, tmp_path, library(loads=False))
    with pytest.raises(NormdeployError, match=r"m\.plan can't be loaded on this GPU: no creator .*; build it"):
        normdeploy.open_runner(path)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((Validity.INVALID, Diagnostics.UNSUPPORTED_CC), r"not built for this GPU; build it .* --compute-capability$"),
        ((Validity.INVALID, Diagnostics.VERSION_MISMATCH | Diagnostics.OLD_CUDA_DRIVER), "another version.*driver is"),
    ],
)
def test_an_engine_that_is_not_valid_here_is_not_loaded(
    found: Any, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = placed(monkeypatch, tmp_path, library(validity=found), rtx=True)
    with pytest.raises(NormdeployError, match=rf"m\.plan can't be loaded on this GPU: it was .*{said}"):
        normdeploy.open_runner(path)
    assert ("load", True) not in CALLS


def test_an_engine_that_is_slow_here_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = placed(monkeypatch, tmp_path, library(validity=(Validity.SUBOPTIMAL, 2)), rtx=True)
    done = normdeploy.run(path, {"x": aligned(2, 4).numpy()})
    assert done.notes == (
        "the engine may be slow on this GPU: it was not built for this GPU; build it with this GPU's"
        " --compute-capability",
    )


# ------------------------------------------------------------------ streamed weights


def test_a_weight_budget_is_set_where_weights_can_be_streamed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = placed(monkeypatch, tmp_path, library(streamable=1000))
    with normdeploy.open_runner(path) as runner:
        assert runner._engine.weight_streaming_budget_v2 == 1000  # type: ignore[attr-defined]
    with normdeploy.open_runner(path, weight_budget=0) as runner:
        assert runner._engine.weight_streaming_budget_v2 == 0  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"the weight budget is 1001 bytes; TensorRT \(m\.plan\) accepts 0 to 1000"):
        normdeploy.open_runner(path, weight_budget=1001)
    with pytest.raises(InputError, match=r"has no weights that can be streamed, .* build it with --weight-streaming"):
        normdeploy.open_runner(placed(monkeypatch, tmp_path, library()), weight_budget=5)


# ------------------------------------------------------------------ TensorRT-RTX's runtime cache


@pytest.fixture
def rtx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return placed(monkeypatch, tmp_path, library(validity=(Validity.VALID, 0)), rtx=True)


def test_what_was_compiled_is_kept_when_asked_and_read_from_then_on(rtx: Path) -> None:
    x, cache = {"x": aligned(2, 4).numpy()}, rtx.with_name("m.plan.runtime-cache")
    normdeploy.run(rtx, x)
    assert not cache.exists()
    normdeploy.run(rtx, x, runtime_cache=True)
    assert cache.read_bytes() == b"G kernels"
    cache.write_bytes(b"G more kernels")
    stamp = cache.stat().st_mtime_ns
    for wanted in (None, True):
        CALLS.clear()
        normdeploy.run(rtx, x, runtime_cache=wanted)
        assert ("set cache", b"G more kernels") in CALLS
        assert cache.stat().st_mtime_ns == stamp  # nothing new to keep
    CALLS.clear()
    normdeploy.run(rtx, x, runtime_cache=False)
    assert not any("cache" in c[0] for c in CALLS)
    assert sorted(p.name for p in rtx.parent.iterdir()) == ["m.plan", "m.plan.runtime-cache"]


def test_a_cache_of_another_machine_is_told_and_replaced_when_asked(rtx: Path) -> None:
    x, cache = {"x": aligned(2, 4).numpy()}, rtx.with_name("other")
    cache.write_bytes(b"another GPU's")
    assert "m.plan.runtime-cache" not in str(normdeploy.run(rtx, x).notes)
    done = normdeploy.run(rtx, x, runtime_cache=cache)
    assert "the runtime cache other was not used: it is damaged, or was written on another GPU" in done.notes[0]
    assert cache.read_bytes() == b"G kernels"


def test_caches_that_can_not_be(rtx: Path, engine_file: Path, tmp_path: Path) -> None:
    (tmp_path / "full.plan").write_bytes(b"ftrt and more")
    with pytest.raises(InputError, match=r"full\.plan is a TensorRT engine, .* it has no runtime cache"):
        normdeploy.open_runner(tmp_path / "full.plan", runtime_cache=True)
    (tmp_path / "m.plan").write_bytes(b"vtrt and more")
    with pytest.raises(InputError, match="would replace the engine"):
        normdeploy.open_runner(tmp_path / "m.plan", runtime_cache=tmp_path / "m.plan")
    with pytest.raises(NormdeployError, match="the folder 'none' does not exist"):
        normdeploy.open_runner(tmp_path / "m.plan", runtime_cache=tmp_path / "none" / "cache")
