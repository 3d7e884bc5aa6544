"""Files that a Hugging Face folder names, and what its config asks for: refused where they lie outside."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from normdeploy.errors import LoadError
from normdeploy.loading.folder_containment import require_contained_files, require_plausible_config
from normdeploy.loading.huggingface_folder import load_folder_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a model, with somebody else's beside it."""
    for name in ("m", "private"):
        _write(tmp_path / name)
    return tmp_path / "m"


def _write(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    save_file({"w": torch.zeros(2)}, folder / "model.safetensors")


def _index(folder: Path, name: Any, index: str = "model.safetensors.index.json") -> None:
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": {"w": name}}))


def test_folder_of_regular_files_is_read(folder: Path) -> None:
    _index(folder, "model.safetensors")
    (folder / "parts").mkdir()
    (folder / "parts" / "a.safetensors").symlink_to("../model.safetensors")
    require_contained_files(folder)


@pytest.mark.parametrize(
    "index", ["model.safetensors.index.json", "pytorch_model.bin.index.json", "model.safetensors.index.fp16.json"]
)
@pytest.mark.parametrize("name", ["../private/model.safetensors", "/dev/zero", "/etc/passwd", "parts/../../private/x"])
def test_index_that_leads_out_of_the_folder_is_refused(folder: Path, index: str, name: str) -> None:
    _index(folder, name, index)
    with pytest.raises(LoadError, match=r"points outside the folder|not a regular file"):
        load_folder_model(folder, False)


def test_config_that_names_weights_outside_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"transformers_weights": "../private/model.safetensors"}))
    with pytest.raises(LoadError, match=r"config\.json names .*points outside"):
        load_folder_model(folder, False)


def test_adapter_of_a_model_outside_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "../private"}))
    with pytest.raises(LoadError, match=r"adapter_config\.json names .*points outside"):
        load_folder_model(folder, False)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/name"}))
    require_contained_files(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "generation_config.json", "sub/x.txt"])
@pytest.mark.parametrize("target", ["private/model.safetensors", "/dev/zero"])
def test_link_out_of_the_folder_is_refused(folder: Path, name: str, target: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(folder.parent / target)
    with pytest.raises(LoadError, match="points outside the folder"):
        load_folder_model(folder, False)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "generation_config.json"])
def test_pipe_in_the_folder_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(LoadError, match="not a regular file"):
        load_folder_model(folder, False)


def test_pipe_that_an_index_names_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "shard")
    _index(folder, "shard")
    with pytest.raises(LoadError, match="not a regular file"):
        load_folder_model(folder, False)


@pytest.mark.parametrize("name", [7, None, ["a"], "a\0b"])
def test_index_without_names_is_refused(folder: Path, name: Any) -> None:
    _index(folder, name)
    with pytest.raises(LoadError, match="instead of a file name"):
        load_folder_model(folder, False)


def test_index_that_is_no_object_is_refused(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(LoadError, match="holds a list"):
        load_folder_model(folder, False)


def _snapshot(cache: Path) -> Path:
    """A model in the layout of huggingface_hub's cache, its files links into the blobs."""
    _write(cache / "blobs")
    snapshot = cache / "snapshots" / "0123abcd"
    (snapshot / "sub").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    (snapshot / "sub" / "shard").symlink_to("../../../blobs/model.safetensors")
    _index(snapshot, "sub/shard")
    return snapshot


def test_snapshot_of_the_hubs_cache_is_read(tmp_path: Path) -> None:
    snapshot = _snapshot(tmp_path / "models--org--name")
    require_contained_files(snapshot)
    (tmp_path / "linked").symlink_to(snapshot)
    require_contained_files(tmp_path / "linked")


def test_snapshot_that_leads_into_another_repository_is_refused(tmp_path: Path) -> None:
    snapshot = _snapshot(tmp_path / "models--org--name")
    _snapshot(tmp_path / "models--org--private")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../../models--org--private/blobs/model.safetensors")
    with pytest.raises(LoadError, match="points outside the folder"):
        require_contained_files(snapshot)


def test_snapshot_whose_blobs_are_elsewhere_is_refused(tmp_path: Path) -> None:
    snapshot = _snapshot(tmp_path / "models--org--name")
    blobs = snapshot.parent.parent / "blobs"
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LoadError, match="points outside the folder"):
        require_contained_files(snapshot)


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 10**6},
        {"text_config": {"n_layer": 10**6}},
        {"depths": [2, 10**6]},
        {"parts": [{"num_local_experts": 10**6}]},
    ],
)
def test_config_with_more_layers_than_weights_is_refused(folder: Path, config: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match=r"to 100000[02].* contain 1 tensors"):
        require_plausible_config(folder, config)


@pytest.mark.parametrize("config", [{"num_labels": 10**9}, {"text_config": {"num_labels": 10**9}}])
def test_config_with_a_name_for_each_of_many_labels_is_refused(folder: Path, config: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match="sets num_labels to 1000000000; at most 1048576 are read"):
        require_plausible_config(folder, config)


def test_config_with_layers_that_the_weights_have_is_read(folder: Path) -> None:
    config = {"num_hidden_layers": 1200, "block_size": 10**6, "vocab_size": 10**6}
    save_file({f"w{i}": torch.zeros(1) for i in range(1200)}, folder / "model.safetensors")
    require_plausible_config(folder, config)
