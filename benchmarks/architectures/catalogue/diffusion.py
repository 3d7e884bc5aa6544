"""UNets, autoencoders and diffusion transformers of diffusers."""

from __future__ import annotations

from .building import diffusers

_UNET = {
    "sample_size": 16,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}
_PLAIN = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
_CROSS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
_UNET_3D = {
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
}
_CONTROL = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "conditioning_embedding_out_channels": (4, 8)}
_VAE = {
    **{
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "sample_size": 32,
    },
    **{"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
}
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
_DIT = {**_HEADS, "in_channels": 4, "out_channels": 8, "sample_size": 8, "patch_size": 2}
_SD3 = {
    **{
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 4,
    },
    **{
        "joint_attention_dim": 24,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 20,
        "out_channels": 4,
        "pos_embed_max_size": 8,
    },
}
_FLUX = {
    **{"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "num_single_layers": 1, "in_channels": 4},
    **{"joint_attention_dim": 24, "pooled_projection_dim": 20, "axes_dims_rope": (4, 6, 6)},
}
_WAN = {
    **{
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "in_channels": 4,
        "out_channels": 4,
        "ffn_dim": 48,
    },
    **{"text_dim": 24, "freq_dim": 16, "rope_max_seq_len": 32},
}
_WAN_VAE = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [False],
    "attn_scales": [],
}
_SANA = {
    **{
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 2,
        "sample_size": 8,
    },
    **{
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": 16,
        "caption_channels": 24,
        "patch_size": 1,
    },
}
_COGVIEW = {
    "in_channels": 4,
    "out_channels": 4,
    "text_embed_dim": 24,
    "time_embed_dim": 16,
    "condition_dim": 8,
    "sample_size": 8,
}
_COGVIDEO = {
    **{
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "time_embed_dim": 8,
    },
    **{"text_embed_dim": 24, "sample_width": 8, "sample_height": 8, "sample_frames": 5, "max_text_seq_length": 7},
}
_LTX = {
    **{
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
    },
    **{"num_layers": 2, "caption_channels": 24},
}
_AURA = {
    **{
        "in_channels": 4,
        "out_channels": 4,
        "num_mmdit_layers": 1,
        "num_single_dit_layers": 1,
        "attention_head_dim": 16,
    },
    **{
        "num_attention_heads": 2,
        "joint_attention_dim": 24,
        "caption_projection_dim": 32,
        "sample_size": 8,
        "pos_embed_max_size": 16,
    },
}
_UVIT = {
    **{
        "hidden_size": 32,
        "cond_embed_dim": 16,
        "micro_cond_encode_dim": 8,
        "micro_cond_embed_dim": 40,
        "encoder_hidden_size": 24,
    },
    **{
        "vocab_size": 32,
        "codebook_size": 30,
        "in_channels": 32,
        "block_out_channels": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
    },
    **{"num_attention_heads": 4, "block_num_heads": 4, "sample_size": 8},
}
_PRIOR = {**_HEADS, "embedding_dim": 24, "num_embeddings": 7, "additional_embeddings": 4}

_STEP = "timestep:int64[batch]{0:1000}"
_LATENT = "sample:float32[batch,4,16,16]"
_HIDDEN = "hidden_states:float32[batch,4,8,8]"
_TEXT = "encoder_hidden_states:float32[batch,7,24]"
_POOLED = "pooled_projections:float32[batch,20]"
_DECODED = ("x:float32[batch,4,8,8]",)
_VIDEO = "hidden_states:float32[batch,4,2,8,8]"
_ENCODED = ("x:float32[batch,3,16,16]",)

DIFFUSION = (
    diffusers("UNet2D", "UNet2DModel", ("sample:float32[batch,3,16,16]", _STEP), **_UNET, **_PLAIN),
    diffusers(
        "UNet2D, conditioned",
        "UNet2DConditionModel",
        (_LATENT, _STEP, _TEXT),
        **_UNET,
        cross_attention_dim=24,
        **_CROSS,
    ),
    diffusers(
        "UNet3D",
        "UNet3DConditionModel",
        ("sample:float32[batch,4,2,16,16]", _STEP, _TEXT),
        **{**_UNET, **_UNET_3D},
        cross_attention_dim=24,
    ),
    diffusers(
        "ControlNet",
        "ControlNetModel",
        (_LATENT, _STEP, _TEXT, "controlnet_cond:float32[batch,3,32,32]"),
        **{k: v for k, v in _UNET.items() if k != "sample_size"},
        **_CONTROL,
        cross_attention_dim=24,
    ),
    diffusers("VAE decoder", "AutoencoderKL", _DECODED, method="decode", **_VAE),
    diffusers("VAE encoder", "AutoencoderKL", _ENCODED, method="encode", **_VAE),
    diffusers("VQ-VAE", "VQModel", ("sample:float32[batch,3,16,16]",), **_VAE, num_vq_embeddings=16),
    diffusers(
        "Tiny autoencoder", "AutoencoderTiny", _ENCODED, method="encode", encoder_block_out_channels=(8, 8, 8, 8)
    ),
    diffusers("Wan VAE, decoder", "AutoencoderKLWan", ("x:float32[batch,4,1,8,8]",), method="decode", **_WAN_VAE),
    diffusers(
        "DiT",
        "DiTTransformer2DModel",
        (_HIDDEN, _STEP, "class_labels:int64[batch]{0:10}"),
        **_DIT,
        num_embeds_ada_norm=10,
    ),
    diffusers("SD3", "SD3Transformer2DModel", (_HIDDEN, _TEXT, _POOLED, _STEP), **_SD3),
    diffusers("SD3, qk norm", "SD3Transformer2DModel", (_HIDDEN, _TEXT, _POOLED, _STEP), **_SD3, qk_norm="rms_norm"),
    diffusers(
        "Flux",
        "FluxTransformer2DModel",
        (
            *("hidden_states:float32[batch,16,4]", _TEXT, _POOLED, "timestep:float32[batch]{0:1}"),
            *("img_ids:float32[16,3]{0:8}", "txt_ids:float32[7,3]{0:8}"),
        ),
        **_FLUX,
    ),
    diffusers("Wan", "WanTransformer3DModel", (_VIDEO, _STEP, _TEXT), **_WAN),
    diffusers("Sana", "SanaTransformer2DModel", (_HIDDEN, _TEXT, _STEP), **_SANA),
    diffusers("AuraFlow", "AuraFlowTransformer2DModel", (_HIDDEN, _TEXT, "timestep:float32[batch]{0:1}"), **_AURA),
    diffusers(
        "CogView 4",
        "CogView4Transformer2DModel",
        (
            *(_HIDDEN, _TEXT, _STEP, "original_size:float32[batch,2]{8:64}", "target_size:float32[batch,2]{8:64}"),
            "crop_coords:float32[batch,2]{0:8}",
        ),
        **{**_COGVIEW, **_HEADS},
    ),
    diffusers(
        "CogVideoX", "CogVideoXTransformer3DModel", ("hidden_states:float32[batch,2,4,8,8]", _TEXT, _STEP), **_COGVIDEO
    ),
    diffusers(
        "Prior",
        "PriorTransformer",
        ("hidden_states:float32[batch,24]", _STEP, "proj_embedding:float32[batch,24]", _TEXT),
        **_PRIOR,
    ),
)
