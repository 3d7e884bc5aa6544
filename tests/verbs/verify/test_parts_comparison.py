"""The denoising step of a pipeline leaves the verdicts of the parts as they are, and its verdict names its limits.

Small classes stand for those of diffusers and transformers. The parts themselves are not compared again here.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import typer

import normdeploy
from normdeploy.cli.options import ReportingOptions
from normdeploy.cli.verify import verify_parts
from normdeploy.errors import InputError
from normdeploy.verb_options import LoadingOptions
from normdeploy.verbs.verify.comparison_result import Comparison
from normdeploy.verbs.verify.output_results import OutputResult
from normdeploy.verbs.verify.parts_comparison import PartsComparison
from normdeploy.verbs.verify.verify_options import StrictOption, VerifyOptions

from ... import pipeline_stand_ins
from ...pipeline_stand_ins import FILES, PNDMScheduler, install_stand_ins, write_pipeline

RIGHT = Comparison(
    (OutputResult("y", "ort", "float32", 0.0, 0.0, 1e-6, "pass", "seed 0", file="model.onnx", by_default="pass"),),
    (),
    ("seed 0",),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a pipeline and its export."""
    patch = pytest.MonkeyPatch()
    install_stand_ins(patch)
    place = tmp_path_factory.mktemp("pipeline")
    write_pipeline(place / "model")
    normdeploy.export_parts(place / "model", place / "onnx")
    yield place
    patch.undo()


@pytest.fixture(autouse=True)
def no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every part pass, so that only the step is compared."""
    monkeypatch.setattr("normdeploy.verbs.verify.parts_comparison.verify", lambda *args, **kwargs: RIGHT)


def test_scheduler_that_fails_leaves_the_verdicts_of_the_parts(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, count: int) -> None:
        raise ValueError("num_inference_steps is 20, but there are 10 steps")

    monkeypatch.setattr(PNDMScheduler, "set_timesteps", fail)
    found = normdeploy.verify_parts(place / "model", place / "onnx")
    assert found
    assert tuple(found.comparisons) == FILES
    assert found.step is None
    assert (
        "all 4 parts are verified; the denoising step was not compared: the scheduler PNDMScheduler can't set 20 steps:"
        " ValueError: num_inference_steps is 20, but there are 10 steps" in found.summarize()
    )


def test_scheduler_without_sigmas_keeps_the_real_cause(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Any, noise: Any, timestep: int, latents: Any, return_dict: bool) -> Any:
        return (latents * float(noise.sum()),)

    monkeypatch.setattr(PNDMScheduler, "step", step)
    found = normdeploy.verify_parts(place / "model", place / "onnx")
    assert found.step is not None
    (note,) = found.step.notes
    assert "torch can't trace it" in note
    assert "sigmas" not in note
    assert "so is the denoising step; without the scheduler's step" in found.summarize()


def test_file_that_onnxruntime_cannot_run_fails_the_step(place: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(place / "onnx", changed)
    file = changed / "unet" / "model.onnx"
    proto = onnx.load(file)
    # The kernel of the convolution gets 5 instead of 4 input channels.
    kernel = next(each for each in proto.graph.initializer if list(each.dims) == [4, 4, 3, 3])
    kernel.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(kernel).repeat(2, 1)[:, :5], kernel.name))
    del proto.graph.value_info[:]
    onnx.save(proto, file)
    found = normdeploy.verify_parts(place / "model", changed)
    assert not found
    assert found.step is not None
    assert {result.output for result in found.step.results if not result} >= {"noise", "image"}
    assert "all 4 parts are verified, but the denoising step fails" in found.summarize()


@pytest.mark.parametrize("rule", [{"tolerance": "1e-3:1e-3"}, {"metric": "cosine>=0.9"}])
def test_given_rules_do_not_judge_the_step(place: Path, rule: dict[str, Any]) -> None:
    found = normdeploy.verify_parts(place / "model", place / "onnx", **rule)
    assert found.step is None
    assert "the denoising step was not compared: the given tolerances and metrics are for" in found.summarize()


def test_strict_refuses_a_limited_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ("the denoising step was not compared: a reason",)
    verdict = PartsComparison({"a.onnx": RIGHT}, folder_limits=limits)
    monkeypatch.setattr(normdeploy, "verify_parts", lambda *args, **kwargs: verdict)
    monkeypatch.setattr("normdeploy.loading.find_part_files", lambda *args, **kwargs: {"a": "a.onnx"})
    (tmp_path / "a.onnx").write_bytes(b"not looked at")
    given = (tmp_path / "model", tmp_path, VerifyOptions(), LoadingOptions(), ReportingOptions(quiet=True))
    verify_parts(*given, StrictOption())
    with pytest.raises(typer.Exit, match=r"^1$"):
        verify_parts(*given, StrictOption(strict=True))


def test_latents_of_inpainting_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The UNet takes 9 channels and returns 4."""
    install_stand_ins(monkeypatch)

    class UNet2DConditionModel(pipeline_stand_ins.UNet2DConditionModel):
        def forward(self, sample: Any, *given: Any, **named: Any) -> Any:
            return super().forward(sample[:, :4] + sample[:, 5:], *given, **named)

    monkeypatch.setattr("diffusers.UNet2DConditionModel", UNet2DConditionModel)
    monkeypatch.setitem(pipeline_stand_ins.CONFIGS["unet"], "in_channels", 9)
    write_pipeline(tmp_path / "model")
    normdeploy.export_parts(tmp_path / "model", tmp_path / "onnx")
    found = normdeploy.verify_parts(tmp_path / "model", tmp_path / "onnx")
    assert found
    assert "the unet takes latents [2, 9, 8, 8], but its noise is [2, 4, 8, 8]" in found.summarize()


def test_step_beyond_the_memory_is_not_compared(place: Path) -> None:
    found = normdeploy.verify_parts(place / "model", place / "onnx", max_memory=10_000)
    assert found.step is None
    assert "but 10,000 bytes hold only 78; --max-memory raises the limit" in found.summarize()


def test_renamed_and_narrower_ends_are_matched_as_in_the_parts(place: Path, tmp_path: Path) -> None:
    """Another exporter writes int32 ids and other names."""
    other = tmp_path / "other"
    shutil.copytree(place / "onnx", other)
    file = other / "text_encoder" / "model.onnx"
    proto = onnx.load(file)
    proto.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT32
    for node in proto.graph.node:
        node.input[:] = ["wide" if name == "input_ids" else name for name in node.input]
    proto.graph.node.insert(0, onnx.helper.make_node("Cast", ["input_ids"], ["wide"], to=onnx.TensorProto.INT64))
    onnx.save(proto, file)
    file = other / "unet" / "model.onnx"
    proto = onnx.load(file)
    proto.graph.node.append(onnx.helper.make_node("Identity", [proto.graph.output[0].name], ["predicted"]))
    proto.graph.output[0].name = "predicted"
    onnx.save(proto, file)
    found = normdeploy.verify_parts(place / "model", other)
    assert found.step
    assert not found.step.not_run


def test_fractional_time_step_is_a_limit(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def set_timesteps(self: Any, count: int) -> None:
        self.timesteps = torch.linspace(946.42, 0, count)

    def step(self: Any, noise: Any, timestep: float, latents: Any, return_dict: bool) -> Any:
        return (latents - noise * 0.1,)

    monkeypatch.setattr(PNDMScheduler, "set_timesteps", set_timesteps)
    monkeypatch.setattr(PNDMScheduler, "step", step)
    found = normdeploy.verify_parts(place / "model", place / "onnx")
    assert found.step
    assert found.summarize().endswith("so is the denoising step; at whole time steps only")


def test_each_part_takes_its_own_dims(place: Path) -> None:
    """The text encoder has no height."""
    assert normdeploy.verify_parts(place / "model", place / "onnx", dims=["height_by_2=2:4:8"])
    with pytest.raises(InputError, match="the dim 'depth' is not in any part; the parts have the dims batch_size"):
        normdeploy.verify_parts(place / "model", place / "onnx", dims=["depth=1:2:4"])
