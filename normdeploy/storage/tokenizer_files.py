"""List the files of a tokenizer in a folder. All are data: no weights and no code."""

from __future__ import annotations

import hashlib
from pathlib import Path

# Files with the vocabulary, of which a tokenizer's folder has at least one.
VOCABULARY_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "source.spm", "target.spm"),
)
# Files that name the class of the tokenizer, its special tokens, and the tokens that end a text.
SETTING_FILES = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "normalizer.json"),
)


def list_vocabulary_files(folder: Path) -> list[str]:
    """List the files of ``VOCABULARY_FILES`` that a folder has; [] if the folder has no tokenizer."""
    return [name for name in VOCABULARY_FILES if (folder / name).is_file()]


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Read the files of a tokenizer.

    Returns:
        File name -> content, for the files that exist.
    """
    names = [name for name in (*SETTING_FILES, *VOCABULARY_FILES) if (folder / name).is_file()]
    return {name: (folder / name).read_bytes() for name in names}


def hash_vocabulary(folder: Path) -> str:
    """Hash the files with the vocabulary of a tokenizer.

    Returns:
        SHA-256 of the names and contents; "" if the folder has no tokenizer.
    """
    names = list_vocabulary_files(folder)
    if not names:
        return ""
    total = hashlib.sha256()
    for name in names:
        content = hashlib.sha256((folder / name).read_bytes())
        total.update(f"{name} {content.hexdigest()}\n".encode())
    return total.hexdigest()
