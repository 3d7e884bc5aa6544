"""Parts of a pipeline are loaded one by one with the names of optimum's export. Small classes stand for diffusers'."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from normdeploy.errors import InputError, LoadError, RuntimeUnavailable, TrustError
from normdeploy.loading import find_part_files, load, load_parts
from normdeploy.loading.file_kinds import FileKind, detect_kind
from normdeploy.loading.pipeline_folder import load_scheduler
from normdeploy.loading.pipeline_index import read_pipeline_index

from ..pipeline_stand_ins import CONFIGS, FILES, PARTS, WEIGHTS, install_stand_ins, write_pipeline

NAMES = {
    "text_encoder": (["input_ids"], ["last_hidden_state", "pooler_output"]),
    "unet": (["sample", "timestep", "encoder_hidden_states"], ["out_sample"]),
    "vae_encoder": (["sample"], ["latent_parameters"]),
    "vae_decoder": (["latent_sample"], ["sample"]),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install_stand_ins(monkeypatch)
    return write_pipeline(tmp_path / "pipeline")


def set_config(folder: Path, part: str, **settings: Any) -> None:
    (folder / part / "config.json").write_text(json.dumps({**CONFIGS[part], **settings}))


def test_every_part_has_the_names_of_optimum(folder: Path) -> None:
    assert find_part_files(folder) == dict(zip(PARTS, FILES, strict=True))
    for part, model in load_parts(folder):
        assert ([spec.name for spec in model.inputs], list(model.outputs)) == NAMES[part]
        assert model.kind == FileKind.PIPELINE
        assert model.recorded == {"part": part}


def test_one_part_is_loaded_by_its_name(folder: Path) -> None:
    model = load(folder, part="unet", dims=["batch_size=1:1:2"])
    assert [spec.shape[0].max for spec in model.inputs if spec.shape] == [2, 2]
    assert model.inputs[1].shape == ()
    assert model.inputs[1].dtype == "int64"
    # Each of two blocks but the last halves the image.
    assert model.inputs[0].shape[2].name == "height_by_2 + height_by_2"
    assert model.inputs[0].shape[2].opt == 8
    with pytest.raises(InputError, match="has no part 'vae'; choose one of text_encoder, unet"):
        load(folder, part="vae")


@pytest.mark.parametrize("part", [None, "all"])
def test_pipeline_without_a_part_is_not_one_model(folder: Path, part: str | None) -> None:
    with pytest.raises(InputError, match=r"is a diffusers pipeline with the parts text_encoder, unet, .*export_parts"):
        load(folder, part=part)
    assert detect_kind(folder) is FileKind.PIPELINE


def test_dims_of_no_part_and_tasks_are_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="the dim 'depth' is not in any part; the parts have the dims batch_size"):
        list(load_parts(folder, dims=["depth=1:2:3"]))
    with pytest.raises(InputError, match="so --task does not apply"):
        load(folder, part="unet", task="text-generation")
    with pytest.raises(InputError, match="so --task does not apply"):
        list(load_parts(folder, task="text-generation"))


def test_unknown_class_refuses_the_whole_pipeline_and_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_stand_ins(monkeypatch)
    folder = write_pipeline(tmp_path / "p", unet=["diffusers", "UNet9D"])
    with pytest.raises(InputError, match="its part 'unet' is a UNet9D") as caught:
        find_part_files(folder)
    said = str(caught.value)
    assert "one by one with --part: text_encoder, vae_encoder, vae_decoder" in said
    assert f"diffusers.UNet9D.from_pretrained({str(folder)!r}, subfolder='unet')" in said
    # Other parts of the same pipeline are exported one by one.
    assert load(folder, part="vae_decoder").outputs == ("sample",)
    with pytest.raises(InputError, match=r"the part 'unet' of .* is a UNet9D"):
        load(folder, part="unet")


def test_missing_weights_are_refused(folder: Path) -> None:
    weights = load_file(folder / "unet" / WEIGHTS)
    del weights["conv.bias"]
    save_file(weights, folder / "unet" / WEIGHTS)
    with pytest.raises(LoadError, match=r"has no weights for conv\.bias"):
        load(folder, part="unet")
    (folder / "unet" / WEIGHTS).unlink()
    with pytest.raises(
        LoadError, match="can't be loaded as a UNet2DConditionModel of diffusers: OSError: no file named"
    ):
        load(folder, part="unet")


@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        ({"auto_map": {"AutoModel": "net.Net"}}, TrustError, "names custom classes"),
        ({"_class_name": "UNet2DModel"}, LoadError, "states the class UNet2DConditionModel for 'unet', but"),
        ({"class_embed_type": "timestep"}, InputError, "sets class_embed_type to 'timestep'"),
        ({"addition_embed_type": "image"}, InputError, "sets addition_embed_type to 'image'"),
    ],
)
def test_config_that_asks_for_more_is_refused(
    folder: Path, settings: dict[str, Any], kind: type[Exception], said: str
) -> None:
    set_config(folder, "unet", **settings)
    with pytest.raises(kind, match=said):
        load(folder, part="unet")
    with pytest.raises(kind, match=said):
        list(load_parts(folder))


def test_more_layers_than_weights_are_refused_before_the_model_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of a million layers takes hours and all memory."""
    monkeypatch.delattr("diffusers.UNet2DConditionModel")
    for key in ("num_layers", "layers_per_block"):
        set_config(folder, "unet", **{key: 1_000_000})
        with pytest.raises(LoadError, match=rf"sets {key} to 1000000, but the weights next to it contain 6 tensors"):
            load(folder, part="unet")


def test_config_without_a_size_is_refused(folder: Path) -> None:
    (folder / "unet" / "config.json").write_text(json.dumps({"_class_name": "UNet2DConditionModel"}))
    with pytest.raises(LoadError, match=r"has no '(cross_attention_dim|block_out_channels)'"):
        load(folder, part="unet")


def test_diffusers_that_is_missing_or_too_old_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["diffusers"], "UNet2DConditionModel")
    with pytest.raises(RuntimeUnavailable, match="the installed diffusers has no UNet2DConditionModel for 'unet'"):
        load(folder, part="unet")
    monkeypatch.delitem(sys.modules, "diffusers")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeUnavailable, match="diffusers is not installed: pip install diffusers"):
        load(folder, part="unet")


def test_scheduler_must_be_one(folder: Path) -> None:
    assert load_scheduler(read_pipeline_index(folder)) is not None
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "scheduler": ["diffusers", "AutoencoderKL"]}))
    with pytest.raises(LoadError, match="states the class AutoencoderKL for the scheduler, which has no steps"):
        load_scheduler(read_pipeline_index(folder))
