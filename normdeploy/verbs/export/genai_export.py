"""Export a Hugging Face decoder to a folder that onnxruntime-genai loads.

<folder>/
  model.onnx                         the decoder with its past (task text-generation-with-past)
  genai_config.json                  names, sizes, tokens and limits (`normdeploy.verbs.export.genai_config`)
  config.json, tokenizer.json, ...   copied from the model's folder (``output_folder.COPIED``, if present)
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from ...errors import InputError
from ...loading.file_kinds import PIPELINE_INDEX
from ...loading.generation_settings import GenerationSettings, read_generation_settings
from ...loading.hub import resolve_model_path
from ...storage.folder_replacement import replace_folder_atomically
from ...verb_options import as_keywords
from ..arguments.argument_validation import take_fields_as_arguments
from ..arguments.export_result import ExportResult, ModelOrigin
from ..export.export_options import ExportFolderCall, ExportOptions
from .export_function import export
from .genai_config import CONFIG_FILE, MODEL_FILE, make_genai_config
from .output_folder import copy_data_files, require_new_folder, require_outside

TASK = "text-generation-with-past"
# Largest number of tokens that are read at once, unless the user states it. The past gets all other positions.
_LARGEST_PIECE = 512
# At most this part of the positions is for the tokens that are read at once.
_PIECES = 8


@take_fields_as_arguments(ExportFolderCall)
def export_genai(call: ExportFolderCall) -> ExportResult:
    """Export a Hugging Face decoder to a folder that onnxruntime-genai loads.

    The folder contains the decoder with its past, ``genai_config.json`` and the files of the tokenizer. It appears only
    when all files are written.

    Args:
        source: a folder that ``save_pretrained`` wrote, or a model's name on the Hub.
        output: a new or empty folder; ``normdeploy.verbs.export.genai_export`` lists its files.
        dims: as for ``export``. If neither "past" nor "seq" is stated, at most an eighth of the positions and at most
            512 are read at once, and the past gets the other positions.
        opset, runtime, provider, fuse, strict, strict_proof, precision, calibrate, keep_io, quantize, compare_limit,
            check, trust, imports, progress: as for ``export``.

    Returns:
        The result of ``export`` for ``model.onnx``.

    Raises:
        InputError: the model is not a decoder of a Hugging Face folder, or onnxruntime-genai can't run its file.
        NormdeployError: as for ``export``; or ``output`` is not empty or can't be written.
    """
    _require_decoder_options(call)
    target = require_new_folder(call.output, "--genai writes", "or omit --genai")
    model = _require_model_folder(call)
    require_outside(target, model)
    settings = read_generation_settings(model, trust=call.trust)
    loading: dict[str, Any] = {**call.load_keywords, "task": TASK, "dims": _choose_dims(call, settings)}
    with replace_folder_atomically(target) as folder:
        file = folder / MODEL_FILE
        try:
            result = export(
                os.fspath(call.source),
                output=file,
                progress=call.progress,
                **as_keywords(call, ExportOptions),
                **loading,
            )
        except InputError as error:
            # The message may name the task, which the user did not pass.
            raise InputError(f"--genai exports with the task {TASK}: {error}") from error
        described = make_genai_config(onnx.load(file, load_external_data=False), settings)
        (folder / CONFIG_FILE).write_text(json.dumps(described.content, indent=4) + "\n")
        copy_data_files(model, folder)
    return replace(
        result,
        path=target / MODEL_FILE,
        notes=(*result.notes, *described.notes),
        origin=ModelOrigin(call.source, loading=loading),
    )


def _require_decoder_options(call: ExportFolderCall) -> None:
    """Refuse options that contradict a decoder with its past.

    Raises:
        InputError: such an option is set.
    """
    if call.part is not None:
        raise InputError(
            f"--genai writes decoders alone, but the part {call.part!r} was passed; omit --part or omit --genai"
        )
    if call.task not in (None, TASK):
        raise InputError(
            f"--genai exports with the task {TASK}, but the task {call.task!r} was passed; omit --task or omit --genai"
        )


def _require_model_folder(call: ExportFolderCall) -> Path:
    """Return the folder of the model.

    Raises:
        InputError: the model is not a Hugging Face folder.
    """
    model = resolve_model_path(os.fspath(call.source))
    if not (model / "config.json").is_file():
        if (model / PIPELINE_INDEX).is_file():
            what = "a pipeline of diffusers"
        else:
            what = "not a Hugging Face folder with a config.json"
        raise InputError(
            f"{os.fspath(call.source)!r} is {what}, but --genai reads tokens and settings of a decoder's folder; pass"
            " such a folder, or omit --genai"
        )
    return model


def _choose_dims(call: ExportFolderCall, settings: GenerationSettings) -> list[str]:
    """Add the range of new tokens to the user's dims, unless the user states the tokens' ranges or inputs."""
    names = {text.partition("=")[0].strip() for text in call.dims}
    if call.inputs or names & {"past", "seq"}:
        return list(call.dims)
    largest = max(1, min(_LARGEST_PIECE, settings.positions // _PIECES))
    return [*call.dims, f"seq=1:{min(8, largest)}:{largest}"]
