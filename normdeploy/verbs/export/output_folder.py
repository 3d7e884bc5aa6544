"""Check and fill the folder that an export with several files writes; copy a decoder's tokenizer beside its file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ...errors import InputError, NormdeployError
from ...storage.file_replacement import write_bytes
from ...storage.folder_replacement import require_empty_dir
from ...storage.tokenizer_files import SETTING_FILES, VOCABULARY_FILES, list_vocabulary_files, read_tokenizer_files
from ...types import PathLike

COPIED = (*SETTING_FILES, *VOCABULARY_FILES, "preprocessor_config.json", "processor_config.json")
"""Files that tell how to make inputs and decode outputs: data only, no weights and no code."""


def require_new_folder(output: PathLike, subject: str, alternative: str) -> Path:
    """Check that ``output`` can be created as a new folder.

    Args:
        subject: start of the message about a file, such as "the parts need".
        alternative: end of this message, which says how to export a single file.

    Returns:
        the path with links followed.

    Raises:
        InputError: ``output`` is a file, or its name ends in ".onnx".
        NormdeployError: the folder is not empty, or its parent does not exist.
    """
    path = Path(output)
    if path.suffix == ".onnx" or path.is_file():
        raise InputError(
            f"{subject} a folder, but the output {os.fspath(output)!r} is"
            f" {'a' if path.is_file() else 'named like a'} file; pass a new folder, such as"
            f" {os.fspath(path.with_suffix(''))}-onnx, {alternative}"
        )
    return require_empty_dir(output)


def require_outside(target: Path, source: Path) -> None:
    """Refuse an output inside the model's folder, because the folder's hash would then cover the output.

    Raises:
        InputError: ``target`` is inside ``source``.
    """
    root = source.resolve()
    if target.is_relative_to(root):
        raise InputError(
            f"the output {os.fspath(target)!r} is inside the model's folder {os.fspath(root)!r}; choose a folder"
            " outside"
        )


def copy_data_files(model: Path, folder: Path) -> None:
    """Copy those of the files ``COPIED`` that exist from the model's folder to ``folder``."""
    for name in COPIED:
        if (model / name).is_file():
            shutil.copyfile(model / name, folder / name)


def copy_tokenizer(model: Path, output: Path) -> str:
    """Copy the tokenizer of a model's folder into the folder of its file, for ``run --generate``.

    Nothing is copied if a file of the same name exists there with other content, because a mixture of two tokenizers
    would give wrong tokens. The written file is complete without the copy, so a failure is only noted.

    Args:
        model: folder of the model.
        output: the written file.

    Returns:
        A note that says why nothing was copied; "" otherwise.
    """
    folder = output.parent
    if not list_vocabulary_files(model) or model.resolve() == folder.resolve():
        return ""
    advice = f"pass --tokenizer {os.fspath(model)} to run --generate"
    try:
        files = read_tokenizer_files(model)
        beside = read_tokenizer_files(folder)
        different = [name for name, content in beside.items() if files.get(name) != content]
        if different:
            return (
                f"the tokenizer was not copied, because {os.fspath(folder)!r} has another {different[0]}; {advice}, or"
                " write each model into a folder of its own"
            )
        for name, content in files.items():
            if name not in beside:
                write_bytes(folder / name, content)
    except (OSError, NormdeployError) as error:
        return f"the tokenizer was not copied: {error}; {advice}"
    return ""
