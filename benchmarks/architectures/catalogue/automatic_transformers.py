"""Make models of transformers: the class that people deploy, a small config, inputs of its forward."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from normdeploy.loading.default_inputs import DefaultInputs, infer_default_inputs

from .. import shrinking
from .automatic import Candidate, Refused, brief

# Tasks in the order of preference: the class of the first task that has one is measured.
TASKS = (
    *("SPEECH_SEQ_2_SEQ", "CTC", "SEQ_TO_SEQ_CAUSAL_LM", "OBJECT_DETECTION", "UNIVERSAL_SEGMENTATION"),
    *("SEMANTIC_SEGMENTATION", "INSTANCE_SEGMENTATION", "DEPTH_ESTIMATION", "IMAGE_CLASSIFICATION"),
    *("VIDEO_CLASSIFICATION", "AUDIO_CLASSIFICATION", "ZERO_SHOT_OBJECT_DETECTION", "ZERO_SHOT_IMAGE_CLASSIFICATION"),
    *("MASK_GENERATION", "KEYPOINT_DETECTION", "KEYPOINT_MATCHING", "TEXT_TO_WAVEFORM", "TIME_SERIES_PREDICTION"),
    *("IMAGE_TEXT_TO_TEXT", "MASKED_LM", "CAUSAL_LM"),
)
_TEXT = ("input_ids", "attention_mask", "decoder_input_ids")
_IDS = "{3:100}"
_FRAMES = "16:32:64"
# Frames of sound: so many steps of the encoder
_STEPS = (10, 20, 40)


def task_of(model_type: str) -> str:
    """Find the first task for which transformers has a class.

    Returns:
        the task; "MODEL" if only ``AutoModel`` has one, else "PART".
    """
    from transformers.models.auto import modeling_auto

    for task in TASKS:
        if model_type in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES"):
            return task
    return "MODEL" if model_type in modeling_auto.MODEL_MAPPING_NAMES else "PART"


def candidates(model_type: str) -> Iterator[Candidate | Refused]:
    """Yield small models of a type with inputs to try, the best first."""
    try:
        configs = list(itertools.islice(shrinking.small_configs(model_type), len(shrinking.PLANS)))
    except Exception as error:
        yield Refused(f"its config: {brief(error)}")
        return
    for _, config in configs:
        for kind in _classes(model_type, config):
            try:
                module = shrinking.construct(config, kind)
            except Exception as error:
                yield Refused(brief(error))
                continue
            _switch_caches_off(config)
            for inputs, ranges in _inputs(module):
                yield Candidate(module, inputs, ranges)


def _classes(model_type: str, config: Any) -> Iterator[Any]:
    """Yield the class of the task, then the class of ``find_class``."""
    import transformers
    from transformers.models.auto import modeling_auto

    task = task_of(model_type)
    if task not in ("MODEL", "PART"):
        named = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")[model_type]
        kind = getattr(transformers, named[0] if isinstance(named, tuple) else named, None)
        if kind is not None:
            yield kind
    try:
        yield shrinking.find_class(config)
    except LookupError:
        return


def _switch_caches_off(config: Any) -> None:
    """Ask for no cache of keys and values, because torch's exporter can't write caches."""
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))):
        if getattr(part, "use_cache", None):
            part.use_cache = False


def _inputs(module: nn.Module) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """Yield inputs to try: normdeploy's own choice, its texts alone, and inputs by the names in forward."""
    try:
        default = infer_default_inputs(module, Path("no folder"))
    except Exception:
        default = DefaultInputs([])
    specs = [_with_ids(spec) for spec in default.specs]
    ranges = _shorten(default.ranges)
    if specs:
        yield tuple(specs), ranges
        texts = [spec for spec in specs if spec.partition(":")[0] in _TEXT]
        if texts and len(texts) < len(specs):
            yield tuple(texts), {}
    yield from _by_name(module, specs, ranges)


def _with_ids(spec: str) -> str:
    """State a range for ids of tokens that contains no special token."""
    name = spec.partition(":")[0]
    return spec + _IDS if name in ("input_ids", "decoder_input_ids") and not spec.endswith("}") else spec


def _shorten(ranges: dict[str, str]) -> dict[str, str]:
    """Shorten sounds, so that a model runs in less than a second."""
    if "samples" not in ranges:
        return ranges
    step = int(ranges["samples"].split(":")[0]) // 10
    return ranges | {"samples": ":".join(str(step * n) for n in _STEPS)}


def _by_name(
    module: nn.Module, specs: list[str], ranges: dict[str, str]
) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    parameters = inspect.signature(module.forward).parameters
    needed = [n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    main = getattr(module, "main_input_name", "")
    if not needed and isinstance(main, str) and main in parameters:
        needed = [main]
    known = {spec.partition(":")[0]: spec for spec in specs}
    config: Any = getattr(module, "config", None)
    choices = [_choices(name, known, config) for name in needed]
    if not needed or not all(choices):
        return
    for chosen in itertools.islice(itertools.product(*choices), 6):
        yield tuple(chosen), ranges


def _choices(name: str, known: dict[str, str], config: Any) -> list[str]:
    """Return specifications to try for an input of this name; [] if the name is unknown."""
    width = shrinking.WIDTH
    for field in ("hidden_size", "d_model", "embed_dim", "hidden_dim"):
        if isinstance(getattr(config, field, None), int):
            width = getattr(config, field)
            break
    size = getattr(config, "image_size", None)
    size = size if isinstance(size, int) else shrinking.IMAGE
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "mel_dim", None) or 80
    by_name = {
        "input_ids": ["int64[batch,seq]" + _IDS, "int64[1,seq]" + _IDS],
        "decoder_input_ids": ["int64[batch,decoder_seq]" + _IDS],
        "attention_mask": ["int64[batch,seq]"],
        "hidden_states": [f"float32[batch,seq,{width}]", f"float32[batch,{width},16]", f"float32[batch,{width},8,8]"],
        "inputs_embeds": [f"float32[batch,seq,{width}]"],
        "encoder_hidden_states": [f"float32[batch,6,{width}]"],
        "query_embeds": [f"float32[batch,4,{width}]"],
        "pixel_values": [
            f"float32[batch,{channels},{size},{size}]",
            f"float32[batch,4,{channels},{size},{size}]",
            f"float32[batch,{channels},4,{size},{size}]",
            f"float32[batch,{channels},224,224]",
        ],
        "pixel_values_videos": [f"float32[batch,4,{channels},{size},{size}]"],
        "input_values": ["float32[batch,1,3200]", "float32[batch,3200]", f"float32[batch,64,{bins}]"],
        "input_features": [f"float32[batch,{bins},128]", f"float32[batch,128,{bins}]"],
        "spectrogram": [f"float32[batch,64,{bins}]"],
        "audio_codes": ["int64[batch,4,16]{0:16}"],
        "codes": ["int64[batch,4,16]{0:16}"],
        "timestep": ["int64[batch]{0:1000}"],
        "timesteps": ["int64[batch]{0:1000}"],
    }
    found = [f"{name}:{text}" for text in by_name.get(name, [])]
    return ([known[name]] if name in known else []) + found
