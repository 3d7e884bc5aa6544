"""Options of ``export``, ``export_parts`` and ``export_genai``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from ...types import PathLike, Progress
from ...verb_options import ConversionOptions, ImageInputOptions, LoadingOptions, option_field


@dataclass(frozen=True, kw_only=True)
class OpsetOptions:
    """Option for the opset of an exported file."""

    opset: int | None = option_field(
        None, "--opset", "Opset, 13 to 28; it is not raised. Default: 21, or higher if a norm needs it."
    )


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ConversionOptions, ImageInputOptions, OpsetOptions):
    """Options for the file that ``export`` writes."""

    check: bool = option_field(
        True,
        "--no-check",
        "Skip the final comparison with PyTorch at two small sizes. Rewrites are still proved.",
        negated=True,
    )


@dataclass(frozen=True, kw_only=True)
class EveryPartOptions(LoadingOptions):
    """Options for loading a model, as in `LoadingOptions`, but ``part`` can also be "all"."""

    part: str | None = option_field(
        None,
        "--part",
        "Part of a Hugging Face encoder-decoder: encoder, decoder, decoder-with-past, or all. With all, the output is a"
        " folder with one file for each part. Default: the whole model. For a diffusers pipeline: a part such as unet."
        " Default: all. For other models: names of modules, such as backbone..head.",
    )


@dataclass(frozen=True, kw_only=True)
class GenaiOption:
    """Option for a folder that onnxruntime-genai loads."""

    genai: bool = option_field(
        False,
        "--genai",
        "Write a folder that onnxruntime-genai loads: a decoder with its past as model.onnx, genai_config.json, and the"
        " files of the tokenizer. Only for Hugging Face folders.",
    )


@dataclass(frozen=True)
class ExportFolderCall(ExportOptions, LoadingOptions):
    """Arguments of a call of ``export_parts`` or ``export_genai``."""

    source: PathLike
    output: PathLike
    _: KW_ONLY
    progress: Progress | None = None
