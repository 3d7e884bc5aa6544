"""Derive the inputs of a Hugging Face model if the user does not state them.

The module supports texts, images, videos, sound, time series and points. Sizes come from the config, the preprocessor
and the model's own layers. The dims are named as follows. The batch is always ``batch``. A text has ``seq`` tokens, and
a decoder's input ``decoder_seq`` tokens. Sound has ``samples`` or ``frames``. In a model that compares texts with
images, the batch of images is named ``image_batch``.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..model import Dim
from .shape_expressions import split_words

# Types of models whose tokenizers make segment ids. RoBERTa is not listed: it has a table for segment ids, but its
# tokenizer does not make them.
_SEGMENTED = frozenset(
    split_words("bert albert electra mobilebert convbert rembert roformer xlnet tapas big_bird funnel")
)
# Parts of processor_config.json that prepare one modality each.
_PREPROCESSORS = ("image_processor", "video_processor", "feature_extractor")
_IMAGE_SIZE = 224
_CHANNELS = 3
# Kind of tokens that stand for parts of an image, a video or sound in a text -> inputs that give these parts.
_PLACEHOLDERS = {
    "image": ("pixel_values",),
    "video": ("pixel_values_videos",),
    "audio": ("input_features", "input_values"),
}
# Frames of a video, and values of a time series, of a model whose config states no number.
_FRAMES = 16
_SERIES = 512
_BINS = 80
# Settings with the width of features of sound.
_FEATURE_WIDTHS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")
# Numbers of frames of a sound encoder: 0.2 s, 1 s and 30 s, for the usual frame length of 20 ms.
_STRIDES = {"min": 10, "opt": 50, "max": 1500}

# Sizes of dims that a model fixes: one sample, and texts that most callers can pad theirs to.
_FIXED = {"batch": 1, "image_batch": 1, "seq": 128, "decoder_seq": 128}


def choose_fixed_size(dim: Dim) -> int:
    """Choose the only size of a dim that the model fixes.

    Returns:
        A size in the dim's range.
    """
    return max(dim.min, min(_FIXED.get(dim.name or "", dim.opt), dim.max))


@dataclass(frozen=True)
class DefaultInputs:
    """Inputs of a model that the user did not describe.

    Attributes:
        specs: inputs in the notation of ``--input``.
        ranges: dim name -> range in the notation of ``--dim``, for dims that need a special range.
        notes: inputs that the model would also take.
    """

    specs: list[str]
    ranges: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def infer_default_inputs(model: nn.Module, folder: Path | None) -> DefaultInputs:
    """Infer the inputs of ``model``.

    Args:
        model: a model of transformers, with its ``config``.
        folder: may contain ``preprocessor_config.json``, which states the image size. None for a model in memory.

    Returns:
        The inputs. A model that puts images or sound at the places of special tokens gets the text alone. Only the
        model's processor can make a text that has these tokens at the right places.
    """
    parameters = inspect.signature(model.forward).parameters
    preprocessor = read_preprocessor(folder) if folder is not None else {}
    config = config_of(model)
    shapes: dict[str, str] = {}
    ranges: dict[str, str] = {}
    embedded = _embedded_feature_width(config, parameters)
    if embedded is not None:
        shapes["input_features"] = f"float32[batch,frames,{embedded}]"
        if "attention_mask" in parameters:
            shapes["attention_mask"] = "int64[batch,frames]"
    elif "input_ids" in parameters:
        shapes["input_ids"] = "int64[batch,seq]"
        if "attention_mask" in parameters:
            shapes["attention_mask"] = "int64[batch,seq]"
        if "token_type_ids" in parameters and takes_text_pairs(config):
            shapes["token_type_ids"] = f"int64[batch,seq]{{0:{config.type_vocab_size}}}"
    if "pixel_values" in parameters:
        shapes["pixel_values"] = f"float32[{_describe_image_input(model, parameters, preprocessor)}]"
    if "noise" in parameters and (units := _count_masked_units(model)):
        shapes["noise"] = f"float32[batch,{units}]{{0:1}}"
    if "pixel_values_videos" in parameters and _is_main_input(model, "pixel_values_videos"):
        shapes["pixel_values_videos"] = f"float32[{_describe_video_input(config, preprocessor)}]"
    if "past_values" in parameters:
        shapes |= _describe_time_series(config, parameters)
    if "input_features" in parameters and embedded is None:
        shapes["input_features"] = f"float32[batch,{_describe_feature_input(config, preprocessor)}]"
    if "input_values" in parameters:
        shape, ranges = _describe_sound_input(model)
        shapes["input_values"] = f"float32[batch,{shape}]"
    if "input_points" in parameters:
        height = preprocessed_image_size(config, preprocessor)[0]
        shapes["input_points"] = f"float32[batch,point_batch,points,2]{{0:{height}}}"
        if "input_labels" in parameters:
            shapes["input_labels"] = "int64[batch,point_batch,points]{0:2}"
        ranges |= {"point_batch": "1:2:4", "points": "1:2:8"}
    if "grid_thw" in parameters and "hidden_states" in parameters:
        shapes |= _describe_patches(config)
    if "decoder_input_ids" in parameters and getattr(config, "is_encoder_decoder", False):
        shapes["decoder_input_ids"] = "int64[batch,decoder_seq]"
    beside = [name for name in shapes if _is_placed_by_tokens(model, parameters, name)]
    specs = [f"{name}:{shapes[name]}" for name in parameters if name in shapes and name not in beside]
    if not beside:
        return DefaultInputs(specs, ranges)
    dims = {dim for spec in specs for dim in spec.partition("[")[2].partition("]")[0].split(",")}
    used = {name: text for name, text in ranges.items() if name in dims}
    note = (
        f"the file takes the text alone, not {' or '.join(beside)}, because the model places them at special tokens of"
        " the text; describe all inputs with --input to export the model with them"
    )
    return DefaultInputs(specs, used, (note,))


def _embedded_feature_width(config: Any, parameters: Mapping[str, Any]) -> int | None:
    """Return the width of features of sound that replace the embeddings of a text (Pop2Piano).

    Such a model has neither layers for features of another width, nor tokens that stand for sound.

    Returns:
        The width of the embeddings; None for other models.
    """
    if not {"input_ids", "inputs_embeds", "input_features"} <= parameters.keys():
        return None
    others = (*_FEATURE_WIDTHS, "audio_config", "audio_token_id", "audio_token_index")
    if any(modality_setting(config, name) is not None for name in others):
        return None
    width = getattr(config, "hidden_size", None)
    return width if isinstance(width, int) else None


def _is_placed_by_tokens(model: nn.Module, parameters: Mapping[str, Any], name: str) -> bool:
    """Return whether the text of the model has tokens for which this input gives values."""
    kinds = [kind for kind, names in _PLACEHOLDERS.items() if name in names]
    if not kinds or "input_ids" not in parameters or _is_main_input(model, name) or _is_required(parameters, name):
        return False
    config = config_of(model)
    ids = (getattr(config, f"{kinds[0]}_token_{suffix}", None) for suffix in ("id", "index"))
    return any(isinstance(token, int) for token in ids)


def config_of(model: nn.Module) -> Any:
    """Return the config of a model of transformers."""
    return model.config


def takes_text_pairs(config: Any) -> bool:
    """Return whether the tokenizer of such a model marks the first and second text with segment ids."""
    return getattr(config, "model_type", "") in _SEGMENTED and (getattr(config, "type_vocab_size", 0) or 0) > 1


def read_preprocessor(folder: Path) -> dict[str, Any]:
    """Read the settings of the preprocessor: ``preprocessor_config.json``, or its part of ``processor_config.json``.

    Returns:
        The settings; {} if they are missing or unreadable.
    """
    whole = _read_settings(folder / "processor_config.json")
    parts = (whole.get(name) for name in _PREPROCESSORS)
    files = (_read_settings(folder / name) for name in ("preprocessor_config.json", "video_preprocessor_config.json"))
    return next((found for found in (*files, *parts) if found and isinstance(found, dict)), {})


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if isinstance(content, dict):
        return content
    return {}


def modality_setting(config: Any, name: str, default: Any = None) -> Any:
    """Look up a setting in the config, then in the config's part for images or sound.

    Returns:
        The first value that is not None, else ``default``.
    """
    places = (
        config,
        *(
            getattr(config, part, None)
            for part in ("vision_config", "encoder", "encoder_config", "backbone_config", "audio_config")
        ),
    )
    parts = (
        value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        for value in places
        if value is not None
    )
    return next((value for value in parts if value is not None), default)


def preprocessed_image_size(config: Any, preprocessor: Mapping[str, Any]) -> tuple[int, int]:
    """Find the size of the images that the preprocessor makes. If it is unknown, find the size of images for which the
    model was made.

    Returns:
        (height, width).
    """
    sizes = []
    if preprocessor.get("do_pad"):
        sizes.append(preprocessor.get("pad_size"))
    if preprocessor.get("do_center_crop"):
        sizes.append(preprocessor.get("crop_size"))
    if preprocessor.get("do_resize", True):
        sizes.append(preprocessor.get("size"))
    made_for = (modality_setting(config, name) for name in ("image_size", "crop_size"))
    for size in (*sizes, *made_for, _IMAGE_SIZE):
        if (pair := _height_and_width(size)) is not None:
            return pair
    raise AssertionError("224 is a size")


def _height_and_width(size: Any) -> tuple[int, int] | None:
    if isinstance(size, Mapping):
        both = (size.get("height"), size.get("width"))
        if None not in both:
            size = both
        else:
            size = size.get("shortest_edge", size.get("longest_edge"))
    if isinstance(size, int) and not isinstance(size, bool):
        size = (size, size)
    fits = isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)
    if fits:
        return (size[0], size[1])
    return None


def _describe_image_input(model: nn.Module, parameters: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> str:
    config = config_of(model)
    height, width = preprocessed_image_size(config, preprocessor)
    compared = "input_ids" in parameters and any(name.endswith("logit_scale") for name, _ in model.named_parameters())
    frames = modality_setting(config, "num_frames")
    if isinstance(frames, int) and getattr(model, "main_input_name", "") == "pixel_values" and _is_video_model(config):
        several = f"{frames},"
    else:
        several = ""
    if compared:
        batch = "image_batch"
    else:
        batch = "batch"
    channels = modality_setting(config, "num_channels", _CHANNELS)
    return f"{batch},{several}{channels},{height},{width}"


def _count_masked_units(model: nn.Module) -> int:
    """Count the patches of an image of which a masked autoencoder hides some at random (ViT-MAE).

    The model sorts the patches by a noise. It draws the noise itself unless the noise is passed.

    Returns:
        Number of patches; 0 if the model hides none.
    """
    for part in model.modules():
        # Hiera has the method too, and hides patches in another way.
        if hasattr(part, "random_masking") and not hasattr(part, "is_mae"):
            return int(getattr(getattr(part, "patch_embeddings", None), "num_patches", 0))
    return 0


def _describe_patches(config: Any) -> dict[str, str]:
    """Return the inputs of a vision encoder that takes the patches of all images in one list (Qwen-VL, GLM-V): the
    pixels of each patch, and the number of patches in time, height and width.

    The numbers are those of one image, because such an encoder can be traced only at known numbers. The size of the
    image is that of the config: the preprocessor states only limits of the number of pixels.
    """
    side = getattr(config, "patch_size", None) or 14
    merged = getattr(config, "spatial_merge_size", None) or 1
    channels = getattr(config, "in_channels", None) or getattr(config, "in_chans", None) or _CHANNELS
    frames = getattr(config, "temporal_patch_size", None) or 1
    height, width = (max(size // (side * merged), 1) * merged for size in preprocessed_image_size(config, {}))
    return {
        "hidden_states": f"float32[{height * width},{channels * frames * side**2}]",
        "grid_thw": f"int64[1,3]{{1,{height},{width}}}",
    }


def _is_main_input(model: nn.Module, name: str) -> bool:
    """Return whether the model always needs this input; others take it beside a text."""
    main = getattr(model, "main_input_name", "")
    return name == main or (isinstance(main, list | tuple) and name in main)


def _describe_video_input(config: Any, preprocessor: Mapping[str, Any]) -> str:
    """Return the shape "batch,frames,channels,height,width"."""
    height, width = preprocessed_image_size(config, preprocessor)
    named = (modality_setting(config, name) for name in ("num_frames", "frames_per_clip"))
    frames = next((count for count in named if isinstance(count, int) and count > 0), _FRAMES)
    channels = modality_setting(config, "num_channels", modality_setting(config, "in_chans", _CHANNELS))
    return f"batch,{frames},{channels},{height},{width}"


def _describe_time_series(config: Any, parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return the inputs of a time series model: past values, and what is known about the past and the future.

    A model with lags reads as many values before its context as the largest lag.
    """
    length = getattr(config, "context_length", None) or _SERIES
    length += max(getattr(config, "lags_sequence", None) or [0])
    ahead = getattr(config, "prediction_length", None) or 1
    channels = getattr(config, "num_input_channels", None)
    if channels is None and getattr(config, "input_size", 1) > 1:
        channels = config.input_size
    width = f",{channels}" if channels is not None else ""
    features = getattr(config, "num_time_features", 0)
    categories = getattr(config, "num_static_categorical_features", 0)
    reals = getattr(config, "num_static_real_features", 0)
    shapes = {"past_values": f"float32[batch,{length}{width}]"}
    required = {
        "past_values_padding": f"int64[batch,{length}]{{0:2}}",
        "past_observed_mask": f"float32[batch,{length}{width}]{{0:1}}",
        "past_time_features": f"float32[batch,{length},{features}]",
        "freq": f"int64[batch,1]{{0:{getattr(config, 'freq_size', 1)}}}",
    }
    shapes |= {name: text for name, text in required.items() if _is_required(parameters, name)}
    if "past_time_features" in shapes:
        shapes["future_values"] = f"float32[batch,{ahead}{width}]"
        shapes["future_time_features"] = f"float32[batch,{ahead},{features}]"
    if categories:
        shapes["static_categorical_features"] = f"int64[batch,{categories}]{{0:{min(config.cardinality)}}}"
    if reals:
        shapes["static_real_features"] = f"float32[batch,{reals}]"
    return shapes


def _is_required(parameters: Mapping[str, Any], name: str) -> bool:
    return name in parameters and parameters[name].default is inspect.Parameter.empty


def _is_video_model(config: Any) -> bool:
    return getattr(config, "model_type", "") in ("videomae", "vivit", "timesformer")


def _describe_feature_input(config: Any, preprocessor: Mapping[str, Any]) -> str:
    """Return the shape of audio features: "mel bins,frames" with a fixed length for Whisper, else "frames,features"."""
    bins = modality_setting(config, "num_mel_bins")
    if bins is not None and getattr(config, "model_type", "") == "whisper":
        return f"{bins},{2 * modality_setting(config, 'max_source_positions')}"
    widths = (modality_setting(config, name) for name in _FEATURE_WIDTHS[1:])
    return f"frames,{next((width for width in widths if width), preprocessor.get('feature_size', bins or _BINS))}"


def _describe_sound_input(model: nn.Module) -> tuple[str, dict[str, str]]:
    """Return the shape and ranges of sound. The input is samples, in multiples of the encoder's frame, or the
    spectrogram of an audio transformer.
    """
    config = config_of(model)
    strides = getattr(config, "conv_stride", None)
    if not strides:
        if (length := getattr(config, "max_length", None)) and (bins := getattr(config, "num_mel_bins", None)):
            return f"{length},{bins}", {}
        strides = [part.stride[0] for part in model.modules() if isinstance(part, nn.Conv1d) and part.stride[0] > 1]
    if not strides:
        return "samples", {}
    step = 1
    for stride in strides:
        step *= int(stride)
    return "samples", {"samples": ":".join(str(step * _STRIDES[which]) for which in ("min", "opt", "max"))}
