"""A pipeline's folder, and small classes for those of diffusers and transformers, which the suite does not have."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

WEIGHTS = "weights.safetensors"
INDEX: dict[str, Any] = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": "0.42.1",
    "requires_safety_checker": False,
    "safety_checker": [None, None],
    "scheduler": ["diffusers", "PNDMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "unet": {
        "_class_name": "UNet2DConditionModel",
        "in_channels": 4,
        "cross_attention_dim": 8,
        "block_out_channels": [4, 4],
        "sample_size": 8,
    },
    "vae": {
        "_class_name": "AutoencoderKL",
        "in_channels": 3,
        "latent_channels": 4,
        "block_out_channels": [4, 4],
        "sample_size": 16,
        "scaling_factor": 0.5,
    },
    "text_encoder": {"architectures": ["CLIPTextModel"], "vocab_size": 16, "max_position_embeddings": 6},
}
PARTS = ("text_encoder", "unet", "vae_encoder", "vae_decoder")
FILES = tuple(f"{part}/model.onnx" for part in PARTS)


class _Pretrained(nn.Module):
    """Class with weights in a folder, as diffusers' models."""

    @classmethod
    def from_pretrained(cls, folder: str, *, local_files_only: bool, output_loading_info: bool) -> Any:
        assert local_files_only
        assert output_loading_info
        path = Path(folder) / WEIGHTS
        if not path.is_file():
            raise OSError(f"no file named {WEIGHTS}")
        model = cls()
        missing, _ = model.load_state_dict(load_file(path), strict=False)
        return model, {"missing_keys": missing}


class UNet2DConditionModel(_Pretrained):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.text = nn.Linear(8, 4)

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        return_dict: bool = True,
    ) -> Any:
        assert not return_dict
        condition = self.text(encoder_hidden_states).mean(1) * torch.cos(timestep.float() / 100)
        return (self.norm(self.conv(sample)) + condition[:, :, None, None],)


class AutoencoderKL(_Pretrained):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 2, stride=2)
        self.up = nn.ConvTranspose2d(4, 3, 2, stride=2)
        self.norm = nn.GroupNorm(1, 3)

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a part has its own forward")

    def encode(self, sample: torch.Tensor, return_dict: bool) -> Any:
        return (types.SimpleNamespace(parameters=self.down(sample)),)

    def decode(self, latents: torch.Tensor, return_dict: bool) -> Any:
        return (self.norm(self.up(latents)),)


class CLIPTextModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, input_ids: torch.Tensor, output_hidden_states: bool, return_dict: bool) -> Any:
        states = self.norm(self.table(input_ids))
        return {"last_hidden_state": states, "pooler_output": states[:, 0]}


class PNDMScheduler:
    """Scheduler whose step has two numbers that depend on the time step."""

    config = types.SimpleNamespace()
    draws = False

    @classmethod
    def from_pretrained(cls, folder: str, *, local_files_only: bool) -> PNDMScheduler:
        return cls()

    def set_timesteps(self, count: int) -> None:
        self.timesteps = torch.arange(950, -1, -50)
        self.weights = torch.linspace(0.1, 0.9, 1000)
        self.counter = 0

    def step(self, noise: torch.Tensor, timestep: int, latents: torch.Tensor, return_dict: bool) -> Any:
        # A step depends on the number of steps before it.
        weight = self.weights[timestep] + self.counter
        self.counter += 1
        if self.draws:
            latents = latents + torch.randn_like(latents)
        return (latents * weight - noise / weight,)


def write_pipeline(folder: Path, **index: Any) -> Path:
    """Write a pipeline's folder with random weights.

    Args:
        index: entries of ``model_index.json`` that differ from ``INDEX``.

    Returns:
        ``folder``.
    """
    torch.manual_seed(0)
    models = {"unet": UNet2DConditionModel(), "vae": AutoencoderKL(), "text_encoder": CLIPTextModel()}
    for name, model in models.items():
        (folder / name).mkdir(parents=True)
        save_file(model.state_dict(), folder / name / WEIGHTS)
        (folder / name / "config.json").write_text(json.dumps(CONFIGS[name]))
    for name, file in {"scheduler": "scheduler_config.json", "tokenizer": "tokenizer.json"}.items():
        (folder / name).mkdir()
        (folder / name / file).write_text("{}")
    (folder / "tokenizer" / "code.py").write_text("raise SystemExit")
    (folder / "model_index.json").write_text(json.dumps({**INDEX, **index}))
    return folder


def install_stand_ins(patch: pytest.MonkeyPatch) -> None:
    """Put the small classes in the place of diffusers', and load text encoders without transformers."""
    module: Any = types.ModuleType("diffusers")
    module.__spec__ = importlib.machinery.ModuleSpec("diffusers", None)
    for cls in (UNet2DConditionModel, AutoencoderKL, PNDMScheduler):
        setattr(module, cls.__name__, cls)
    patch.setitem(sys.modules, "diffusers", module)

    def load_text_encoder(path: Path, trust: bool, *, root: Path) -> Any:
        model = CLIPTextModel()
        model.load_state_dict(load_file(path / WEIGHTS))
        return types.SimpleNamespace(model=model.eval(), missing=frozenset())

    patch.setattr("normdeploy.loading.pipeline_folder.load_folder_model", load_text_encoder)
