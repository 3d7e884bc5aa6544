"""Prepare the models of a diffusers pipeline for tracing, each with the inputs and outputs that its pipeline uses.

Inputs, outputs and dims have the same names as in the ONNX export of the optimum library (``model_configs.py`` of
optimum-onnx). So optimum's ``ORTDiffusionPipeline`` finds them. The config of a model states all sizes.

| class | inputs | outputs |
|---|---|---|
| UNet2DConditionModel | sample, timestep, encoder_hidden_states, [timestep_cond, text_embeds, time_ids] | out_sample |
| SD3Transformer2DModel | hidden_states, encoder_hidden_states, pooled_projections, timestep | out_hidden_states |
| FluxTransformer2DModel | the same, [guidance], txt_ids, img_ids | out_hidden_states |
| AutoencoderKL, vae_encoder | sample | latent_parameters |
| AutoencoderKL, vae_decoder | latent_sample | sample |
| CLIPTextModel | input_ids | last_hidden_state, pooler_output, [hidden_states.0, ...] |
| CLIPTextModelWithProjection | input_ids | text_embeds, last_hidden_state, [hidden_states.0, ...] |
| T5EncoderModel | input_ids | last_hidden_state |
| StableDiffusionSafetyChecker | clip_input, images | out_images, has_nsfw_concepts |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from .pipeline_index import ENCODER, PipelineIndex
from .traceable_models import Outputs, TraceableModel, input_names, replace_forward

Config = Mapping[str, Any]

# Number of time steps that a scheduler was trained with, if the scheduler's config states no number.
_STEPS = 1000
# Number of sizes and positions of an image in SDXL. Pipelines with a score of aesthetics use one number less.
_TIME_IDS = 6
# Number of coordinates of a token in Flux.
_AXES = 3
# Number of tokens that a text encoder without a table of positions gets.
_TOKENS = 512
_DEFAULT_SIZE = 64


@dataclass(frozen=True)
class PartContext:
    """Facts about a part that are outside of its module.

    Attributes:
        config: the config of the part's model.
    """

    index: PipelineIndex
    part: str
    config: Config


Prepare = Callable[[Any, PartContext], TraceableModel]


def prepare_part(model: nn.Module, context: PartContext) -> TraceableModel:
    """Prepare the model of a pipeline's part for tracing.

    Returns:
        The model with the part's ``forward``, and its inputs.

    Raises:
        InputError: the model needs an input that is not supported.
    """
    return PART_CLASSES[type(model).__name__](model, context)


def returns_hidden_states(index: PipelineIndex) -> bool:
    """Return whether the pipeline reads the hidden states of its CLIP text encoders, as SDXL and SD3 do."""
    for component in index.components:
        if component.class_name == "SD3Transformer2DModel":
            return True
        if component.class_name == "UNet2DConditionModel":
            return index.read_config(component.name).get("addition_embed_type") == "text_time"
    return False


def count_time_ids(index: PipelineIndex) -> int:
    """Return the number of sizes and positions that an SDXL model takes for each image."""
    return _TIME_IDS - bool(index.settings.get("requires_aesthetics_score"))


# ------------------------------------------------------------------ models that denoise


def _prepare_unet(model: Any, context: PartContext) -> TraceableModel:
    config = context.config
    _refuse_conditions(context, config)
    text_width = config.get("encoder_hid_dim") or config["cross_attention_dim"]
    if isinstance(text_width, list | tuple):
        text_width = text_width[0]
    # Each block but the last halves the image.
    image = _describe_image(_size_of(config), 2 ** (len(config["block_out_channels"]) - 1))
    inputs = [
        f"sample:float32[batch_size,{config['in_channels']},{image.height},{image.width}]",
        f"timestep:int64[]{{0:{_STEPS}}}",
        f"encoder_hidden_states:float32[batch_size,sequence_length,{text_width}]",
    ]
    if condition := config.get("time_cond_proj_dim"):
        inputs.append(f"timestep_cond:float32[batch_size,{condition}]")
    if config.get("addition_embed_type") == "text_time":
        count = count_time_ids(context.index)
        text = config["projection_class_embeddings_input_dim"] - count * config["addition_time_embed_dim"]
        inputs.append(f"text_embeds:float32[batch_size,{text}]")
        inputs.append(f"time_ids:float32[batch_size,{count}]{{0:1024}}")
    names = input_names(inputs)
    original = model.forward

    def denoise(*tensors: torch.Tensor) -> Outputs:
        given = dict(zip(names, tensors, strict=True))
        # diffusers takes these two inputs in a dictionary.
        added = {name: given.pop(name) for name in ("text_embeds", "time_ids") if name in given}
        made = original(**given, **({"added_cond_kwargs": added} if added else {}), return_dict=False)
        return {"out_sample": made[0]}

    return TraceableModel(replace_forward(model, len(names), denoise), inputs, image.ranges | _TOKEN_RANGE)


def _refuse_conditions(context: PartContext, config: Config) -> None:
    """Refuse a UNet that needs inputs other than the time step, the text and SDXL's numbers about the image.

    Raises:
        InputError: the config demands other inputs.
    """
    known: dict[str, tuple[Any, ...]] = {
        "addition_embed_type": (None, "text_time"),
        "class_embed_type": (None,),
        "num_class_embeds": (None,),
        "encoder_hid_dim_type": (None, "text_proj"),
    }
    for name, values in known.items():
        if config.get(name) not in values:
            raise InputError(
                f"its config sets {name} to {config[name]!r}, which needs inputs that are not supported; load the model"
                " in Python and pass the module to normdeploy.export"
            )


def _prepare_sd3(model: Any, context: PartContext) -> TraceableModel:
    config = context.config
    # The table of positions covers this number of patches in each direction.
    largest = config["pos_embed_max_size"] * config["patch_size"]
    image = _describe_image(_size_of(config), config["patch_size"], largest)
    inputs = [
        f"hidden_states:float32[batch_size,{config['in_channels']},{image.height},{image.width}]",
        f"encoder_hidden_states:float32[batch_size,sequence_length,{config['joint_attention_dim']}]",
        f"pooled_projections:float32[batch_size,{config['pooled_projection_dim']}]",
        f"timestep:float32[batch_size]{{0:{_STEPS}}}",
    ]
    return _denoise_by_name(model, inputs, image.ranges | _TOKEN_RANGE)


def _prepare_flux(model: Any, context: PartContext) -> TraceableModel:
    config = context.config
    inputs = [
        f"hidden_states:float32[batch_size,packed_height_width,{config['in_channels']}]",
        f"encoder_hidden_states:float32[batch_size,sequence_length,{config['joint_attention_dim']}]",
        f"pooled_projections:float32[batch_size,{config['pooled_projection_dim']}]",
        # diffusers multiplies the step by 1000.
        "timestep:float32[batch_size]{0.0:1.0}",
    ]
    if config.get("guidance_embeds"):
        inputs.append("guidance:float32[batch_size]{0.0:10.0}")
    inputs.append(f"txt_ids:float32[sequence_length,{_AXES}]{{0.0:1.0}}")
    inputs.append(f"img_ids:float32[packed_height_width,{_AXES}]{{0.0:64.0}}")
    patches = (_DEFAULT_SIZE // 4) ** 2
    ranges = {"batch_size": "1:2:8", "packed_height_width": f"1:{patches}:{16 * patches}"} | _TOKEN_RANGE
    return _denoise_by_name(model, inputs, ranges)


def _denoise_by_name(model: Any, inputs: list[str], ranges: dict[str, str]) -> TraceableModel:
    names = input_names(inputs)
    original = model.forward

    def denoise(*tensors: torch.Tensor) -> Outputs:
        made = original(**dict(zip(names, tensors, strict=True)), return_dict=False)
        return {"out_hidden_states": made[0]}

    return TraceableModel(replace_forward(model, len(names), denoise), inputs, ranges)


# ------------------------------------------------------------------ autoencoders


def _prepare_autoencoder(model: Any, context: PartContext) -> TraceableModel:
    config = context.config
    step = 2 ** (len(config["block_out_channels"]) - 1)
    size = _size_of(config)
    if context.part == ENCODER:

        def encode(sample: torch.Tensor) -> Outputs:
            return {"latent_parameters": model.encode(sample, return_dict=False)[0].parameters}

        image = _describe_image(size, step, prefix="sample_")
        inputs = [f"sample:float32[batch_size,{config['in_channels']},{image.height},{image.width}]{{-1.0:1.0}}"]
        return TraceableModel(replace_forward(model, 1, encode), inputs, image.ranges)

    def decode(latents: torch.Tensor) -> Outputs:
        return {"sample": model.decode(latents, return_dict=False)[0]}

    image = _describe_image(max(size // step, 1), 1, prefix="latent_")
    inputs = [f"latent_sample:float32[batch_size,{config['latent_channels']},{image.height},{image.width}]"]
    return TraceableModel(replace_forward(model, 1, decode), inputs, image.ranges)


# ------------------------------------------------------------------ text encoders and the safety checker


def _prepare_clip_text(model: Any, context: PartContext) -> TraceableModel:
    return _prepare_text_encoder(model, context, ("last_hidden_state", "pooler_output"))


def _prepare_clip_text_with_projection(model: Any, context: PartContext) -> TraceableModel:
    return _prepare_text_encoder(model, context, ("text_embeds", "last_hidden_state"))


def _prepare_t5_encoder(model: Any, context: PartContext) -> TraceableModel:
    return _prepare_text_encoder(model, context, ("last_hidden_state",))


def _prepare_text_encoder(model: Any, context: PartContext, outputs: tuple[str, ...]) -> TraceableModel:
    config = context.config
    layers = returns_hidden_states(context.index) and type(model).__name__.startswith("CLIP")
    original = model.forward

    def encode(ids: torch.Tensor) -> Outputs:
        made = original(input_ids=ids, output_hidden_states=layers, return_dict=True)
        states = {name: made[name] for name in outputs}
        if layers:
            states |= {f"hidden_states.{place}": state for place, state in enumerate(made.hidden_states)}
        return states

    inputs = [f"input_ids:int64[batch_size,sequence_length]{{0:{config['vocab_size']}}}"]
    most = config.get("max_position_embeddings") or _TOKENS
    usual = min(most, _TOKENS)
    ranges = {"batch_size": "1:2:8", "sequence_length": f"1:{usual}:{most}"}
    return TraceableModel(replace_forward(model, 1, encode), inputs, ranges)


def _prepare_safety_checker(model: Any, context: PartContext) -> TraceableModel:
    vision = context.config.get("vision_config") or {}
    size = vision.get("image_size", 224)

    def check(clip_input: torch.Tensor, images: torch.Tensor) -> Outputs:
        # diffusers writes into the images that it gets.
        checked, found = model.forward_onnx(clip_input, images.clone())
        return {"out_images": checked, "has_nsfw_concepts": found}

    image = _describe_image(_DEFAULT_SIZE, 1)
    inputs = [
        f"clip_input:float32[batch_size,{vision.get('num_channels', 3)},{size},{size}]",
        f"images:float32[batch_size,{image.height},{image.width},3]{{0.0:1.0}}",
    ]
    return TraceableModel(replace_forward(model, 2, check), inputs, image.ranges)


# ------------------------------------------------------------------ sizes

_TOKEN_RANGE = {"sequence_length": "1:77:512"}


def _size_of(config: Config) -> int:
    """Return the height and width that a model was made for."""
    size = config.get("sample_size")
    if isinstance(size, list | tuple):
        size = max(size)
    return size if isinstance(size, int) and size > 0 else _DEFAULT_SIZE


@dataclass(frozen=True)
class _ImageSizes:
    """Height and width of an image.

    Attributes:
        height, width: the two dims in the notation of ``--input``.
        ranges: dim name -> range in the notation of ``--dim``, with the range of the batch.
    """

    height: str
    width: str
    ranges: dict[str, str]


def _describe_image(usual: int, step: int, largest: int | None = None, prefix: str = "") -> _ImageSizes:
    """Describe the height and width of an image.

    Args:
        usual: usual height and width.
        step: height and width are multiples of this number. A multiple is written as a sum of equal dims.
        largest: limit of height and width; None for no limit.
        prefix: of the dims' names.

    Returns:
        The two dims with their ranges.
    """
    best = max(usual // step, 1)
    most = 2 * best if largest is None else max(largest // step, best)
    names = [f"{prefix}{side}" if step == 1 else f"{prefix}{side}_by_{step}" for side in ("height", "width")]
    height, width = ("+".join([name] * step) for name in names)
    return _ImageSizes(height, width, {"batch_size": "1:2:8"} | dict.fromkeys(names, f"1:{best}:{most}"))


PART_CLASSES: Mapping[str, Prepare] = {
    "UNet2DConditionModel": _prepare_unet,
    "SD3Transformer2DModel": _prepare_sd3,
    "FluxTransformer2DModel": _prepare_flux,
    "AutoencoderKL": _prepare_autoencoder,
    "CLIPTextModel": _prepare_clip_text,
    "CLIPTextModelWithProjection": _prepare_clip_text_with_projection,
    "T5EncoderModel": _prepare_t5_encoder,
    "StableDiffusionSafetyChecker": _prepare_safety_checker,
}
"""Class of a model -> function that prepares it."""
