"""Export the parts of a Hugging Face encoder-decoder, or of a diffusers pipeline, into one folder.

<folder>/ of an encoder-decoder
  encoder_model.onnx             the encoder, on the whole input
  decoder_model.onnx             the decoder for the first tokens; returns the keys and values of its self-attention
                                 and of its cross-attention
  decoder_with_past_model.onnx   the decoder for later tokens; takes all keys and values, and returns the keys and
                                 values of its self-attention
  config.json, tokenizer.json, ...   copied from the model's folder (``output_folder.COPIED``, if present)

<folder>/ of a pipeline
  unet/model.onnx, vae_decoder/model.onnx, ...   each model of the pipeline (`normdeploy.loading.pipeline_parts`)
  unet/config.json, ...                          the config of each model
  scheduler/, tokenizer/, ...                    copied from the pipeline's folder (`pipeline_index.COPIED_SUFFIXES`)
  model_index.json                               copied

The ONNX export of the optimum library writes the same names, and optimum's classes look for them. `verify` also accepts
a folder that optimum wrote.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...errors import InputError, NormdeployError
from ...findings.rendering import Renderable
from ...inputs.image_input_options import has_image_options
from ...loading import find_part_files, load_parts
from ...loading.file_kinds import PIPELINE_INDEX
from ...loading.hub import resolve_model_path
from ...loading.huggingface_tasks import ALL_PARTS
from ...loading.pipeline_index import PipelineIndex, read_pipeline_index
from ...storage.folder_replacement import replace_folder_atomically
from ...types import PathLike
from ...verb_options import as_keywords
from ..arguments.argument_validation import take_fields_as_arguments
from ..arguments.export_result import ExportResult, ModelOrigin
from ..export.export_options import ExportFolderCall, ExportOptions
from ..stage_progress import prefix_progress
from .export_function import export
from .output_folder import copy_data_files, require_new_folder, require_outside

if TYPE_CHECKING:
    from rich.console import Console

_OF_FOLDERS = frozenset({"trust", "imports", "dims", "task", "part"})


class ExportedParts(Renderable, dict[str, ExportResult]):
    """Result of ``export_parts``: file name -> the result of ``export`` for that part."""

    def summarize(self) -> str:
        """Return the summary of each part in one line."""
        return "; ".join(f"{file}: {exported.summarize()}" for file, exported in self.items())

    def show(self, console: Console) -> None:
        from ...findings.console_tables import file_title

        for file, exported in self.items():
            console.print(file_title(file))
            exported.show(console)
            console.print()


@take_fields_as_arguments(ExportFolderCall)
def export_parts(call: ExportFolderCall) -> ExportedParts:
    """Export the parts of a Hugging Face encoder-decoder or a diffusers pipeline to ONNX files that can run together.

    The parts of an encoder-decoder are the encoder, the decoder, and the decoder with its past. The parts of a pipeline
    are its models, such as the UNet, the text encoders, and the two halves of the VAE. The output folder appears only
    when all files are written.

    Args:
        source: a folder that ``save_pretrained`` wrote, or a model's name on the Hub.
        output: a new or empty folder; ``normdeploy.verbs.export.parts_export`` lists its files.
        opset, runtime, provider, fuse, strict, strict_proof, precision, keep_io, compare_limit, check: as for
            ``export``; they apply to each part. Calibration samples and quantization are refused here: export one part
            to use them.
        progress: called with (part and stage, done, total).
        trust, imports, dims, task: as for ``export``. Each part uses the dims that it has.

    Returns:
        File name -> the result of ``export`` for that part.

    Raises:
        InputError: the model has no parts, or an option applies to single files only.
        NormdeployError: as for ``export``, with the name of the part; or ``output`` is not empty or can't be written.
    """
    _require_one_for_all(call)
    target = require_new_folder(call.output, "the parts need", "or export one part with --part")
    read = _loading_of_all(call)
    options = as_keywords(call, ExportOptions)
    files = find_part_files(os.fspath(call.source), trust=call.trust)
    require_outside(target, resolve_model_path(os.fspath(call.source)))
    results: dict[str, ExportResult] = {}
    with replace_folder_atomically(target) as folder:
        for part, model in load_parts(os.fspath(call.source), **cast("Any", read)):
            place = folder / files[part]
            place.parent.mkdir(exist_ok=True)
            with name_part(part):
                results[part] = export(
                    cast("Any", model),
                    output=place,
                    trust=call.trust,
                    progress=prefix_progress(part, call.progress),
                    **options,
                )
        _copy_config(call.source, folder)
    written: dict[str, ExportResult] = {}
    for part, result in results.items():
        origin = ModelOrigin(call.source, loading={**read, "part": part})
        written[files[part]] = replace(result, path=target / files[part], origin=origin)
    return ExportedParts(written)


@contextmanager
def name_part(part: str) -> Iterator[None]:
    """Name the part of a model in the errors of its export.

    Raises:
        NormdeployError: the error of the body, with the part in front.
    """
    try:
        yield
    except NormdeployError as error:
        raise type(error)(f"{part}: {error}") from error


def _require_one_for_all(options: ExportOptions) -> None:
    """Refuse options that apply to a single part only.

    Raises:
        InputError: such an option is set.
    """
    if options.calibrate:
        raise InputError(
            "--calibrate has the inputs of one part, but all parts are exported; omit it, or export only that part"
        )
    if options.external_data_name is not None:
        raise InputError(
            f"the external data {options.external_data_name!r} is one file, but each part has its own weights; omit"
            " --external-data-name, or export one part with --part NAME"
        )
    if has_image_options(options):
        raise InputError("images are inputs of one part, but all parts are exported; export that part with --part NAME")
    if options.quantize is not None:
        raise InputError("parts are quantized one at a time; export one part with --part NAME")


def _loading_of_all(call: ExportFolderCall) -> dict[str, Any]:
    """Return the loading options that apply to all parts, without the option ``part``.

    Raises:
        InputError: an option applies to a single part only.
    """
    stated: dict[str, Any] = {name: value for name, value in call.load_keywords.items() if value}
    if foreign := sorted(name for name in stated if name not in _OF_FOLDERS):
        raise InputError(
            f"{foreign[0]} applies to one part, but all parts are exported; omit it, or export the parts one by one"
        )
    part = stated.pop("part", ALL_PARTS)
    if part != ALL_PARTS:
        raise InputError(f"the part {part!r} is a single file; use `normdeploy export`, or normdeploy.export in Python")
    return stated


def _copy_config(source: PathLike, folder: Path) -> None:
    model = resolve_model_path(os.fspath(source))
    if (model / PIPELINE_INDEX).is_file():
        # The index was read before, with the user's choice about trust. Code is not copied in any case.
        _copy_pipeline_files(read_pipeline_index(model, trust=True), folder)
        return
    copy_data_files(model, folder)


def _copy_pipeline_files(index: PipelineIndex, folder: Path) -> None:
    """Copy the index, the configs of the models, and the components other than models."""
    for component in index.components:
        if not component.is_model:
            (folder / component.name).mkdir()
    for name, source in index.copied_files.items():
        shutil.copyfile(source, folder / name)
