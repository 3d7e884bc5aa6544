"""Pipelines of diffusers become a folder with the names of optimum's export, and pass ``verify`` with one step."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import normdeploy
from benchmarks.pipeline_models import PIPELINES, PipelineModel

pytestmark = pytest.mark.architectures

# Part -> names of its inputs and outputs, by pipeline.
_CLIP = (["input_ids"], ["last_hidden_state", "pooler_output"])
_STATES = [f"hidden_states.{place}" for place in range(3)]
_DECODER = (["latent_sample"], ["sample"])
_ENCODER = (["sample"], ["latent_parameters"])
_UNET = ["sample", "timestep", "encoder_hidden_states"]
_TRANSFORMER = ["hidden_states", "encoder_hidden_states", "pooled_projections", "timestep"]
_PROJECTED = (["input_ids"], ["text_embeds", "last_hidden_state", *_STATES])
_T5 = (["input_ids"], ["last_hidden_state"])
NAMES = {
    "stable-diffusion": {
        "safety_checker": (["clip_input", "images"], ["out_images", "has_nsfw_concepts"]),
        "text_encoder": _CLIP,
        "unet": (_UNET, ["out_sample"]),
        "vae_encoder": _ENCODER,
        "vae_decoder": _DECODER,
    },
    "stable-diffusion-xl": {
        "text_encoder": (["input_ids"], [*_CLIP[1], *_STATES]),
        "text_encoder_2": _PROJECTED,
        "unet": ([*_UNET, "text_embeds", "time_ids"], ["out_sample"]),
        "vae_encoder": _ENCODER,
        "vae_decoder": _DECODER,
    },
    "stable-diffusion-3": {
        "text_encoder": _PROJECTED,
        "text_encoder_2": _PROJECTED,
        "text_encoder_3": _T5,
        "transformer": (_TRANSFORMER, ["out_hidden_states"]),
        "vae_encoder": _ENCODER,
        "vae_decoder": _DECODER,
    },
    "flux": {
        "text_encoder": _CLIP,
        "text_encoder_2": _T5,
        "transformer": ([*_TRANSFORMER, "guidance", "txt_ids", "img_ids"], ["out_hidden_states"]),
        "vae_encoder": _ENCODER,
        "vae_decoder": _DECODER,
    },
}


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda pipeline: pipeline.name)
def test_pipeline_is_exported_and_verified(pipeline: PipelineModel, tmp_path: Path) -> None:
    try:
        folder = pipeline.save(tmp_path)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed; make test-architectures installs it")
    made = tmp_path / "made"
    exported = normdeploy.export_parts(folder, made)
    assert set(exported) == {f"{part}/model.onnx" for part in NAMES[pipeline.name]}
    for part, (inputs, outputs) in NAMES[pipeline.name].items():
        graph = onnx.load(made / part / "model.onnx", load_external_data=False).graph
        assert [each.name for each in graph.input] == inputs
        assert [each.name for each in graph.output] == outputs
        assert (made / part / "config.json").is_file()
    found = normdeploy.verify_parts(folder, made, seeds=1)
    assert found, str(found)
    assert found.step is not None
    assert not found.step.limits
    assert {result.output for result in found.step.results} >= {"noise", "latents", "image"}
