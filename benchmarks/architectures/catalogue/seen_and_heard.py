"""Vision, audio, multimodal and time-series models of transformers."""

from __future__ import annotations

from .building import transformers

_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
_TEXT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_PLACES = {"max_position_embeddings": 64}
_SPEECH = {
    **_TEXT,
    **{"conv_dim": [16, 16, 16], "conv_stride": [5, 2, 2], "conv_kernel": [10, 3, 3]},
    **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4},
}
_LEVIT = {
    **{
        "image_size": 64,
        "hidden_sizes": [16, 24, 32],
        "num_attention_heads": [2, 3, 4],
        "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
    },
    **{"down_ops": [["Subsample", 8, 2, 2, 2, 2], ["Subsample", 8, 3, 2, 2, 2]]},
}
_CONVNEXT = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1], "image_size": 64}
_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4}
_PYRAMID = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 2, 4]}
_SEGFORMER = {**_PYRAMID, "decoder_hidden_size": 16, "num_labels": 4}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}
_REGNET = {**_RESNET, "groups_width": 8}
_CVT = {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3], "cls_token": [False, False, True]}
_MOBILEVIT = {
    "hidden_sizes": [12, 16, 24],
    "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
    "image_size": 64,
    "num_attention_heads": 2,
}
_FOCAL = {
    "image_size": 32,
    "embed_dim": 8,
    "depths": [1, 1],
    "hidden_sizes": [8, 16],
    "focal_levels": [2, 2],
    "focal_windows": [3, 3],
}
_SAM = {
    **{
        "hidden_size": 32,
        "output_channels": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 64,
        "patch_size": 16,
    },
    **{"window_size": 2, "global_attn_indexes": [1], "mlp_dim": 48, "num_pos_feats": 8},
}
_WHISPER = {
    **{
        "vocab_size": 64,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "num_mel_bins": 16,
    },
    **{
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_source_positions": 30,
        "use_cache": False,
    },
    **{"max_target_positions": 32, "decoder_start_token_id": 1, **_SPECIAL},
}
_AST = {**{k: v for k, v in _VIT.items() if k != "image_size"}, "max_length": 32, "num_mel_bins": 16, "patch_size": 8}
_CLIP_TEXT = {**_TEXT, **_SPECIAL, "max_position_embeddings": 32, "projection_dim": 24}
_CLIP_VISION = {**_VIT, "projection_dim": 24}
_VIDEO = {**_VIT, "num_frames": 4, "tubelet_size": 2}
_SERIES = {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 16}

_SMALL = ("pixel_values:float32[batch,3,32,32]",)
_IMAGE = ("pixel_values:float32[batch,3,64,64]",)
_WAVE = ("input_values:float32[batch,800]",)
_IDS = "input_ids:int64[batch,9]{0:64}"

VISION = (
    transformers("ConvNeXt V2", "ConvNextV2Model", _IMAGE, left={"not divided by its own deviation": 5}, **_CONVNEXT),
    transformers("ConvNeXt", "ConvNextModel", _IMAGE, **_CONVNEXT),
    transformers("LeViT", "LevitModel", _IMAGE, **_LEVIT),
    transformers("ViT", "ViTModel", _SMALL, **_VIT),
    transformers("DeiT", "DeiTModel", _SMALL, **_VIT),
    transformers("BEiT", "BeitModel", _SMALL, **_VIT, use_relative_position_bias=True),
    transformers("DINOv2", "Dinov2Model", _SMALL, **_VIT),
    transformers("DINOv3", "DINOv3ViTModel", _SMALL, **_VIT),
    transformers("Swin", "SwinModel", _SMALL, **_SWIN),
    transformers("Swin V2", "Swinv2Model", _SMALL, **_SWIN),
    transformers("SegFormer", "SegformerForSemanticSegmentation", _IMAGE, **_SEGFORMER),
    transformers("CvT", "CvtModel", _IMAGE, **_CVT),
    transformers("MobileViT", "MobileViTModel", _IMAGE, **_MOBILEVIT),
    transformers("PoolFormer", "PoolFormerModel", _IMAGE, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1]),
    transformers("FocalNet", "FocalNetModel", _SMALL, **_FOCAL),
    transformers("RegNet", "RegNetModel", _IMAGE, **_REGNET),
    transformers("BiT", "BitModel", _IMAGE, **_RESNET, num_groups=4),
    transformers("SAM, image encoder", "SamVisionModel", _IMAGE, **_SAM),
    transformers(
        "YOLOS", "YolosForObjectDetection", _SMALL, **{**_VIT, "image_size": [32, 32]}, num_detection_tokens=5
    ),
    transformers("VideoMAE", "VideoMAEModel", ("pixel_values:float32[batch,4,3,32,32]",), **_VIDEO),
    transformers(
        "TimeSformer", "TimesformerModel", ("pixel_values:float32[batch,4,3,32,32]",), **{**_VIT, "num_frames": 4}
    ),
)
AUDIO = (
    transformers("Wav2Vec2 (group norm)", "Wav2Vec2Model", _WAVE, **_SPEECH),
    transformers(
        "Wav2Vec2 (layer norm)", "Wav2Vec2Model", _WAVE, **_SPEECH, feat_extract_norm="layer", do_stable_layer_norm=True
    ),
    transformers("HuBERT", "HubertModel", _WAVE, **_SPEECH),
    transformers("WavLM", "WavLMModel", _WAVE, **_SPEECH),
    transformers("Wav2Vec2 Conformer", "Wav2Vec2ConformerModel", _WAVE, **_SPEECH, conv_depthwise_kernel_size=5),
    transformers("AST", "ASTModel", ("input_values:float32[batch,32,16]",), **_AST),
    transformers(
        "Whisper",
        "WhisperModel",
        ("input_features:float32[batch,16,60]", "decoder_input_ids:int64[batch,5]{0:64}"),
        **_WHISPER,
    ),
    transformers(
        "EnCodec",
        "EncodecModel",
        ("input_values:float32[batch,1,640]",),
        num_filters=4,
        hidden_size=16,
        codebook_size=32,
    ),
    transformers(
        "DAC", "DacModel", ("input_values:float32[batch,1,512]",), encoder_hidden_size=8, decoder_hidden_size=64
    ),
)
MULTIMODAL = (
    transformers(
        "CLIP", "CLIPModel", (_IDS, *_SMALL), text_config=_CLIP_TEXT, vision_config=_CLIP_VISION, projection_dim=24
    ),
    transformers("SigLIP", "SiglipModel", (_IDS, *_SMALL), text_config=_CLIP_TEXT, vision_config=_VIT),
    transformers(
        "ViLT", "ViltModel", (_IDS, *_SMALL), **_VIT, vocab_size=64, max_position_embeddings=40, max_image_length=-1
    ),
    transformers("BLIP, image encoder", "BlipVisionModel", _SMALL, **_VIT),
    transformers(
        "PatchTST",
        "PatchTSTModel",
        ("past_values:float32[batch,16,2]",),
        **_SERIES,
        num_hidden_layers=2,
        num_attention_heads=2,
    ),
    transformers("PatchTSMixer", "PatchTSMixerModel", ("past_values:float32[batch,16,2]",), **_SERIES, num_layers=2),
)

SEEN_AND_HEARD = (*VISION, *AUDIO, *MULTIMODAL)
