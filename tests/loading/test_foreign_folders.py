"""Folders of diffusers and peft are recognized, and the refusal says how to export what is in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from normdeploy.errors import LoadError
from normdeploy.loading import load


def written(folder: Path, **files: object) -> Path:
    """A folder with these JSON files; "__" stands for "/"."""
    for name, content in files.items():
        file = folder / f"{name.replace('__', '/')}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
    return folder


def refusal(path: Path) -> str:
    with pytest.raises(LoadError) as caught:
        load(path)
    return str(caught.value)


def test_part_of_a_pipeline_says_how_to_load_it(tmp_path: Path) -> None:
    written(tmp_path, config={"_class_name": "AutoencoderKL", "_diffusers_version": "0.30.0"})
    said = refusal(tmp_path)
    assert "is a model of diffusers (AutoencoderKL)" in said
    assert f"net = diffusers.AutoencoderKL.from_pretrained('{tmp_path}')" in said


@pytest.mark.parametrize("with_config", [False, True])
def test_adapter_folder_says_to_merge_first(tmp_path: Path, with_config: bool) -> None:
    written(tmp_path, adapter_config={"peft_type": "LORA"}, **({"config": {}} if with_config else {}))
    save_file({"base_model.model.up.lora_A.weight": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    said = refusal(tmp_path)
    assert "is an adapter of peft, which has no weights of the base model: merge it into its base model first" in said
    assert "merge_and_unload()" in said
    assert "save_pretrained" in said


def test_folder_with_a_whole_model_beside_an_adapter_is_not_called_an_adapter(tmp_path: Path) -> None:
    written(tmp_path, adapter_config={"peft_type": "LORA"})
    save_file({"up.lora_A.weight": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    save_file({"up.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    assert "is an adapter of peft" not in refusal(tmp_path)


def test_adapter_file_says_to_merge_first(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    names = ("base_model.model.up.lora_A.weight", "base_model.model.up.lora_B.weight")
    save_file({name: torch.ones(2, 2) for name in names}, path)
    assert "contains the weights of a LoRA adapter alone: merge it into its base model first" in refusal(path)
