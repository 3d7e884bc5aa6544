"""Make small pipelines of diffusers with random weights, as their users have them on the disk (``save_pretrained``).

Needs diffusers and transformers, which the project's own environment lacks: ``make test-architectures`` makes an
environment that has them. Nothing is downloaded: the tokenizers get a vocabulary of letters.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .architectures.catalogue import declare_torchvision, randomised

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_START, _END = "<|startoftext|>", "<|endoftext|>"
# Number of tokens of a prompt.
_TOKENS = 16
_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": _TOKENS,
    "projection_dim": 32,
}
_VAE = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "sample_size": 32,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
_UNET = {
    "sample_size": 16,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}


@dataclass(frozen=True)
class PipelineModel:
    """Pipeline with random weights.

    Attributes:
        build: returns the pipeline; its argument is a scratch folder.
    """

    name: str
    build: Callable[[Path], Any]

    def save(self, place: Path) -> Path:
        """Save the pipeline.

        Args:
            place: folder for the pipeline's folder and for scratch files.

        Returns:
            the pipeline's folder.
        """
        declare_torchvision()
        scratch = place / "vocabulary"
        scratch.mkdir(parents=True, exist_ok=True)
        folder = place / self.name
        self.build(scratch).save_pretrained(folder)
        return folder


def _clip_tokenizer(scratch: Path) -> Any:
    """Write a vocabulary of letters, and load it."""
    from transformers import CLIPTokenizer

    tokens = [*_LETTERS, *(f"{letter}</w>" for letter in _LETTERS), _START, _END]
    (scratch / "vocab.json").write_text(json.dumps({token: place for place, token in enumerate(tokens)}))
    (scratch / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer.from_pretrained(scratch, model_max_length=_TOKENS)


def _word_tokenizer() -> Any:
    """Return a tokenizer of words of one letter in the form that a T5 encoder is saved with."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: place for place, token in enumerate(["<pad>", "</s>", "<unk>", *_LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=_TOKENS
    )


def _clip_text_encoder(tokenizer: Any, name: str, **settings: Any) -> Any:
    import transformers

    size = len(tokenizer)
    config = transformers.CLIPTextConfig(
        **{**_CLIP, **settings}, vocab_size=size, bos_token_id=size - 2, eos_token_id=size - 1, pad_token_id=size - 1
    )
    return randomised(getattr(transformers, name)(config))


def _t5_encoder(tokenizer: Any) -> Any:
    from transformers import T5Config, T5EncoderModel

    settings = {"d_model": 64, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return randomised(T5EncoderModel(T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, **settings)))


def _stable_diffusion(scratch: Path) -> Any:
    import diffusers

    tokenizer = _clip_tokenizer(scratch)
    unet = diffusers.UNet2DConditionModel(
        **_UNET,
        cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    return diffusers.StableDiffusionPipeline(
        vae=randomised(diffusers.AutoencoderKL(**_VAE, latent_channels=4)),
        text_encoder=_clip_text_encoder(tokenizer, "CLIPTextModel"),
        tokenizer=tokenizer,
        unet=randomised(unet),
        scheduler=diffusers.PNDMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True, steps_offset=1
        ),
        safety_checker=_safety_checker(),
        feature_extractor=_feature_extractor(),
    )


def _safety_checker() -> Any:
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers import CLIPConfig

    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    }
    return randomised(StableDiffusionSafetyChecker(CLIPConfig(vision_config=vision, projection_dim=16)))


def _feature_extractor() -> Any:
    from transformers import CLIPImageProcessorPil

    return CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})


def _stable_diffusion_xl(scratch: Path) -> Any:
    import diffusers

    tokenizer = _clip_tokenizer(scratch)
    # The size of the text embedding and of six numbers about the image.
    conditions = _CLIP["projection_dim"] + 6 * 8
    unet = diffusers.UNet2DConditionModel(
        **{**_UNET, "attention_head_dim": (2, 4)},
        cross_attention_dim=64,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=conditions,
    )
    return diffusers.StableDiffusionXLPipeline(
        vae=randomised(diffusers.AutoencoderKL(**_VAE, latent_channels=4)),
        text_encoder=_clip_text_encoder(tokenizer, "CLIPTextModel"),
        text_encoder_2=_clip_text_encoder(tokenizer, "CLIPTextModelWithProjection", hidden_act="gelu"),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=randomised(unet),
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
        ),
    )


def _stable_diffusion_3(scratch: Path) -> Any:
    import diffusers

    tokenizer = _clip_tokenizer(scratch)
    words = _word_tokenizer()
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=8,
        out_channels=8,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        caption_projection_dim=32,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        pos_embed_max_size=32,
    )
    vae = diffusers.AutoencoderKL(
        **_VAE,
        latent_channels=8,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5,
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=randomised(transformer),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=randomised(vae),
        text_encoder=_clip_text_encoder(tokenizer, "CLIPTextModelWithProjection"),
        tokenizer=tokenizer,
        text_encoder_2=_clip_text_encoder(tokenizer, "CLIPTextModelWithProjection", hidden_act="gelu"),
        tokenizer_2=tokenizer,
        text_encoder_3=_t5_encoder(words),
        tokenizer_3=words,
    )


def _flux(scratch: Path) -> Any:
    import diffusers

    tokenizer = _clip_tokenizer(scratch)
    words = _word_tokenizer()
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=32,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    vae = diffusers.AutoencoderKL(
        **_VAE,
        latent_channels=8,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.1159,
        scaling_factor=0.3611,
    )
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=randomised(vae),
        text_encoder=_clip_text_encoder(tokenizer, "CLIPTextModel"),
        tokenizer=tokenizer,
        text_encoder_2=_t5_encoder(words),
        tokenizer_2=words,
        transformer=randomised(transformer),
    )


PIPELINES = (
    PipelineModel("stable-diffusion", _stable_diffusion),
    PipelineModel("stable-diffusion-xl", _stable_diffusion_xl),
    PipelineModel("stable-diffusion-3", _stable_diffusion_3),
    PipelineModel("flux", _flux),
)
