"""Export the parts of a Hugging Face encoder-decoder into one folder.

<folder>/
  encoder_model.onnx             the encoder, on the whole input
  decoder_model.onnx             the decoder for the first tokens; returns the keys and values of its self-attention
                                 and of its cross-attention
  decoder_with_past_model.onnx   the decoder for later tokens; takes all keys and values, and returns the keys and
                                 values of its self-attention
  config.json, tokenizer.json, ...   copied from the model's folder (``COPIED``, if present)

The ONNX export of the optimum library writes the same names, and optimum's classes look for them. `verify` also accepts
a folder that optimum wrote.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...errors import InputError
from ...findings.rendering import Renderable
from ...loading import load_parts
from ...loading.hub import resolve_model_path
from ...loading.huggingface_tasks import ALL_PARTS, PART_FILES
from ...storage.folder_replacement import replace_folder_atomically, require_empty_dir
from ...types import PathLike
from ...verb_options import ConversionOptions, as_keywords
from ..arguments.argument_validation import take_fields_as_arguments
from ..arguments.export_result import ExportResult, ModelOrigin
from ..export.export_options import ExportOptions, ExportPartsCall
from ..stage_progress import prefix_progress
from .export_function import export

if TYPE_CHECKING:
    from rich.console import Console

COPIED = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "normalizer.json"),
    *("spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "source.spm", "target.spm"),
)
"""Files that tell how to make inputs and decode outputs: data only, no weights and no code."""
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


@take_fields_as_arguments(ExportPartsCall)
def export_parts(call: ExportPartsCall) -> ExportedParts:
    """Export the parts of a Hugging Face encoder-decoder to ONNX files that can run together.

    The parts are the encoder, the decoder, and the decoder with its past. The weights are read once. The output folder
    appears only when all files are written.

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
        InputError: the model is not an encoder-decoder, or an option applies to single files only.
        NormdeployError: as for ``export``; or ``output`` is not empty or can't be written.
    """
    _require_one_for_all(call)
    target = _require_new_folder(call.output)
    read = _loading_of_all(call)
    options = as_keywords(call, ExportOptions)
    results: dict[str, ExportResult] = {}
    with replace_folder_atomically(target) as folder:
        for part, model in load_parts(os.fspath(call.source), **cast("Any", read)):
            results[part] = export(
                cast("Any", model),
                output=folder / PART_FILES[part],
                trust=call.trust,
                progress=prefix_progress(part, call.progress),
                **options,
            )
        _copy_config(call.source, folder)
    written: dict[str, ExportResult] = {}
    for part, result in results.items():
        origin = ModelOrigin(call.source, loading={**read, "part": part})
        written[PART_FILES[part]] = replace(result, path=target / PART_FILES[part], origin=origin)
    return ExportedParts(written)


def _require_one_for_all(options: ConversionOptions) -> None:
    """Refuse options that apply to a single part only.

    Raises:
        InputError: such an option is set.
    """
    if options.calibrate:
        raise InputError(
            "--calibrate has the inputs of one part, but all parts are exported; omit it, or export only that part"
        )
    if options.quantize is not None:
        raise InputError("parts are quantized one at a time; export one part with --part NAME")


def _loading_of_all(call: ExportPartsCall) -> dict[str, Any]:
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


def _require_new_folder(output: PathLike) -> Path:
    """Check that ``output`` can be created as a new folder, and return its path.

    Raises:
        InputError: ``output`` is a file, or its name ends in ".onnx".
        NormdeployError: the folder is not empty, or its parent does not exist.
    """
    path = Path(output)
    if path.suffix == ".onnx" or path.is_file():
        raise InputError(
            f"the parts need a folder, but the output {os.fspath(output)!r} is"
            f" {'a' if path.is_file() else 'named like a'} file; pass a new folder, such as"
            f" {os.fspath(path.with_suffix(''))}-onnx, or export one part with --part"
        )
    return require_empty_dir(output)


def _copy_config(source: PathLike, folder: Path) -> None:
    model = resolve_model_path(os.fspath(source))
    for name in COPIED:
        if (model / name).is_file():
            shutil.copyfile(model / name, folder / name)
