"""A pipeline becomes one folder, written whole or not at all, and the folder is verified part by part and in one step.

Small classes stand for those of diffusers and transformers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app
from normdeploy.errors import InputError, LoadError, NormdeployError
from normdeploy.storage.export_record import read_record

from ...pipeline_stand_ins import FILES, PARTS, WEIGHTS, install_stand_ins, write_pipeline

COPIED = (
    *("model_index.json", "scheduler/scheduler_config.json", "tokenizer/tokenizer.json"),
    *(f"{part}/config.json" for part in PARTS),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a pipeline and its export."""
    patch = pytest.MonkeyPatch()
    install_stand_ins(patch)
    place = tmp_path_factory.mktemp("pipeline")
    write_pipeline(place / "model")
    normdeploy.export_parts(place / "model", place / "onnx", dims=["batch_size=1:2:4"])
    yield place
    patch.undo()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install_stand_ins(monkeypatch)
    return write_pipeline(tmp_path / "model")


def test_folder_holds_each_part_and_the_files_that_are_no_models(place: Path) -> None:
    files = {path.relative_to(place / "onnx").as_posix() for path in (place / "onnx").rglob("*") if path.is_file()}
    assert files == {*FILES, *COPIED}
    for file in COPIED:
        original = file.replace("vae_encoder", "vae").replace("vae_decoder", "vae")
        assert (place / "onnx" / file).read_bytes() == (place / "model" / original).read_bytes()


def test_each_file_records_its_part(place: Path) -> None:
    for part, file in zip(PARTS, FILES, strict=True):
        record = read_record(onnx.load(place / "onnx" / file))
        assert record["load"] == {"dims": ["batch_size=1:2:4"], "part": part}
        assert record["model"]["kind"] == "diffusers pipeline"


def test_pipeline_is_verified_part_by_part_and_in_one_step(place: Path) -> None:
    found = normdeploy.verify_parts(place / "model", place / "onnx", seeds=1)
    assert found
    assert tuple(found.comparisons) == FILES
    assert found.step is not None
    outputs = {result.output for result in found.step.results}
    assert {"noise", "latents", "image"} <= outputs
    assert {result.runtime for result in found.step.results} == {
        *("eager", "onnxruntime (optimizer off)", "onnxruntime (optimizer on)")
    }
    assert "all 4 parts are verified, and so is the denoising step" in str(found)


def test_one_file_is_verified_as_its_record_says(place: Path) -> None:
    assert normdeploy.verify(place / "model", place / "onnx" / "unet" / "model.onnx", seeds=1)


def test_wrong_weight_fails_its_part_and_the_step(place: Path, tmp_path: Path) -> None:
    """An error of the text encoder reaches the image."""
    changed = tmp_path / "changed"
    shutil.copytree(place / "onnx", changed)
    file = changed / "text_encoder" / "model.onnx"
    proto = onnx.load(file)
    table = next(each for each in proto.graph.initializer if list(each.dims) == [16, 8])
    values = onnx.numpy_helper.to_array(table).copy()
    values[:, 0] *= 1.01
    table.CopyFrom(onnx.numpy_helper.from_array(values, table.name))
    onnx.save(proto, file)
    found = normdeploy.verify_parts(place / "model", changed, seeds=1)
    assert [name for name, comparison in found.comparisons.items() if not comparison] == [FILES[0]]
    assert found.step is not None
    assert {result.output for result in found.step.results if not result} >= {"noise", "image"}
    assert "1 of 4 parts fail: text_encoder/model.onnx; the denoising step fails too" in str(found)
    told = CliRunner().invoke(app, ["verify", str(place / "model"), str(changed), "--seeds", "1", "-q"])
    assert told.exit_code == 1
    assert "fail: image, onnxruntime (optimizer on), the step" in told.output


def test_command_line_exports_a_pipeline_without_an_option_and_reports_each_part(folder: Path, tmp_path: Path) -> None:
    told = CliRunner().invoke(
        app, ["export", str(folder), "-o", str(tmp_path / "made"), "--report", str(tmp_path / "r.json")]
    )
    assert told.exit_code == 0, told.output
    places = [told.output.index(file) for file in FILES]
    assert places == sorted(places)
    for part, file in zip(PARTS, FILES, strict=True):
        report = json.loads((tmp_path / f"r.{part}.json").read_text())
        assert report["files"]["output"] == str(tmp_path / "made" / file)


@pytest.mark.parametrize("kept", ["file", "folder"])
def test_existing_output_is_left_alone(folder: Path, tmp_path: Path, kept: str) -> None:
    made = tmp_path / "made"
    if kept == "folder":
        made.mkdir()
        (made / "mine").write_text("kept")
    else:
        made.write_text("kept")
    with pytest.raises(NormdeployError, match=r"not an empty folder|need a folder"):
        normdeploy.export_parts(folder, made)
    assert (made / "mine" if kept == "folder" else made).read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "model"]


@pytest.mark.parametrize("inside", ["made", "unet/made"])
def test_output_inside_the_pipeline_is_refused(folder: Path, inside: str) -> None:
    before = sorted(path.name for path in folder.rglob("*"))
    with pytest.raises(InputError, match="is inside the model's folder"):
        normdeploy.export_parts(folder, folder / inside)
    assert sorted(path.name for path in folder.rglob("*")) == before


def test_last_part_that_fails_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "vae" / WEIGHTS)
    del weights["up.bias"]
    save_file(weights, folder / "vae" / WEIGHTS)
    with pytest.raises(LoadError, match=r"the part 'vae_decoder' can't be exported: .* has no weights for up\.bias"):
        normdeploy.export_parts(folder, tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_interrupt_between_two_parts_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage.startswith("unet"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        normdeploy.export_parts(folder, tmp_path / "made", progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_folder_without_a_part_is_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "made" / "unet").mkdir(parents=True)
    with pytest.raises(InputError, match=r"has no text_encoder/model\.onnx, unet/model\.onnx, vae_encoder"):
        normdeploy.verify_parts(place / "model", tmp_path / "made")


def test_half_precision_has_no_rule_for_the_step(folder: Path, tmp_path: Path) -> None:
    normdeploy.export_parts(folder, tmp_path / "made", precision="fp16")
    found = normdeploy.verify_parts(folder, tmp_path / "made", seeds=1)
    assert found.step is None
    assert "the denoising step was not compared: text_encoder/model.onnx is in half" in found.summarize()


def _rewrite(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_changed_scheduler_and_config_fail_by_name(place: Path, tmp_path: Path) -> None:
    """The parts and the step are right, but the folder makes other images."""
    changed = tmp_path / "changed"
    shutil.copytree(place / "onnx", changed)
    _rewrite(changed / "vae_decoder" / "config.json", scaling_factor=1, _diffusers_version="0.1")
    (changed / "tokenizer" / "tokenizer.json").write_bytes(b"[]")
    found = normdeploy.verify_parts(place / "model", changed, seeds=1)
    assert all(found.comparisons.values())
    assert found.step
    assert not found
    assert found.faults == (
        "tokenizer/tokenizer.json is not the file of the pipeline: the two files have different bytes",
        "vae_decoder/config.json is not the file of the pipeline: scaling_factor is 0.5 in the pipeline, and 1 in the"
        " folder",
    )
    assert (
        "all 4 parts are verified, and so is the denoising step; 2 other files are wrong: tokenizer"
        in found.summarize()
    )
    told = CliRunner().invoke(app, ["verify", str(place / "model"), str(changed), "--seeds", "1", "-q"])
    assert told.exit_code == 1
    assert "fail: vae_decoder/config.json is not the file of the pipeline: scaling_factor is 0.5" in told.output


def test_folder_of_another_tool_is_judged_by_common_files(place: Path, tmp_path: Path) -> None:
    """Missing files, additional keys and the version of the writer do not fail, but the verdict names them."""
    other = tmp_path / "other"
    shutil.copytree(place / "onnx", other)
    shutil.rmtree(other / "tokenizer")
    _rewrite(other / "unet" / "config.json", dropout=0.0, _diffusers_version="0.1")
    (other / "ort_config.json").write_text("{}")
    found = normdeploy.verify_parts(place / "model", other, seeds=1)
    assert found
    assert "without tokenizer/tokenizer.json, which the folder does not have" in found.summarize()
    assert "without dropout in unet/config.json, which the pipeline does not state" in found.summarize()
