"""Check and fill the folder that an export with several files writes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ...errors import InputError
from ...storage.folder_replacement import require_empty_dir
from ...types import PathLike

COPIED = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "normalizer.json"),
    *("spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "source.spm", "target.spm"),
)
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
