"""model_index.json is read as data: broken, hostile and incomplete folders are refused with the entry's name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from normdeploy.errors import InputError, LoadError, TrustError
from normdeploy.loading.pipeline_index import read_pipeline_index

from ..pipeline_stand_ins import FILES, INDEX, PARTS, write_pipeline


def refusal(folder: Path) -> str:
    with pytest.raises(LoadError) as caught:
        read_pipeline_index(folder)
    return str(caught.value)


def test_models_become_parts_and_other_components_are_copied(tmp_path: Path) -> None:
    index = read_pipeline_index(write_pipeline(tmp_path / "p"))
    assert index.class_name == "StableDiffusionPipeline"
    assert index.part_files == dict(zip(PARTS, FILES, strict=True))
    assert [each.name for each in index.components if not each.parts] == ["scheduler", "tokenizer"]
    assert index.settings == {"requires_safety_checker": False}
    assert index.find_component("vae_decoder").name == "vae"
    with pytest.raises(InputError, match=r"has no part 'vae'; choose one of text_encoder, unet, vae_encoder"):
        index.find_component("vae")


def test_component_that_is_null_is_left_out(tmp_path: Path) -> None:
    index = read_pipeline_index(write_pipeline(tmp_path / "p", text_encoder=[None, None]))
    assert "text_encoder" not in index.part_files


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (3, "names no model"),
        ([], "sets 'unet' to [] instead of a library and a class"),
        (["diffusers"], "instead of a library and a class"),
        (["diffusers", None], "instead of a library and a class"),
        (["diffusers", "x; rm -rf"], "instead of a library and a class"),
        (["os", "system"], "takes the class 'system' of 'unet' from the library 'os'"),
        (["stable_diffusion", "StableDiffusionPipeline"], "from the library 'stable_diffusion'"),
        (["../x", "Net"], "from the library '../x'"),
    ],
)
def test_entry_that_names_no_class_of_the_two_libraries_is_refused(tmp_path: Path, entry: Any, said: str) -> None:
    write_pipeline(tmp_path / "p", unet=entry, vae=[None, None], text_encoder=[None, None])
    assert said in refusal(tmp_path / "p")


@pytest.mark.parametrize("content", ["[]", "{", "3", '{"unet": ["diffusers", "UNet2DConditionModel"]}'])
def test_broken_index_is_refused(tmp_path: Path, content: str) -> None:
    write_pipeline(tmp_path / "p")
    (tmp_path / "p" / "model_index.json").write_text(content)
    assert "model_index.json" in refusal(tmp_path / "p")


def test_name_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "p")
    (folder / "model_index.json").write_text(json.dumps({**INDEX, "../p/unet": INDEX["unet"]}))
    assert "sets '../p/unet' to" in refusal(folder)


def test_missing_folder_of_a_component_is_named(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "p", text_encoder_2=["transformers", "CLIPTextModelWithProjection"])
    assert "names 'text_encoder_2' (CLIPTextModelWithProjection), but there is no folder 'text_encoder_2'" in refusal(
        folder
    )


@pytest.mark.parametrize("link", ["unet", "unet/weights.safetensors", "scheduler/scheduler_config.json"])
def test_link_outside_the_folder_is_refused(tmp_path: Path, link: str) -> None:
    folder = write_pipeline(tmp_path / "p")
    outside = tmp_path / "outside"
    (folder / link).rename(outside)
    (folder / link).symlink_to(outside)
    assert "points outside the folder" in refusal(folder)


def test_index_of_shards_in_a_component_may_not_leave_the_folder(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "p")
    shards = {"weight_map": {"conv.weight": "../../secret.safetensors"}}
    (folder / "unet" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(shards))
    assert "points outside the folder" in refusal(folder)


def test_links_of_a_snapshot_to_the_blobs_of_its_repository_are_followed(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "models--a--b" / "snapshots" / "1234")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for file in (folder / "model_index.json", folder / "unet" / "weights.safetensors"):
        file.rename(blobs / file.name)
        file.symlink_to(os.path.relpath(blobs / file.name, file.parent))
    assert read_pipeline_index(folder).part_files


def test_custom_pipeline_is_refused_without_trust(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "p", _class_name=["pipeline", "MyPipeline"])
    (folder / "pipeline.py").write_text("raise SystemExit")
    with pytest.raises(TrustError, match=r"names the custom pipeline 'MyPipeline', so 'pipeline' would run"):
        read_pipeline_index(folder)
    assert read_pipeline_index(folder, trust=True).class_name == "MyPipeline"


@pytest.mark.parametrize("place", ["unet/net.py", "net.py"])
@pytest.mark.parametrize("trust", [False, True])
def test_component_with_its_own_code_is_refused(tmp_path: Path, place: str, trust: bool) -> None:
    folder = write_pipeline(tmp_path / "p", unet=["net", "Net"])
    (folder / place).write_text("raise SystemExit")
    with pytest.raises(TrustError, match=r"'Net' of 'unet' from the file 'net.py', which would run"):
        read_pipeline_index(folder, trust=trust)
