"""Translate the former option ``--trust``, which had two meanings.

In verbs that load models, ``--trust`` let the code of a model file run: this is now ``--trust-remote-code``. In
``recheck`` and in the verbs of ``fleet``, ``--trust`` named a public key, and only content signed with this key was
accepted: this is now ``--trust-key``. A word that may mean the other option is an error, so nobody runs code by
mistake.
"""

from __future__ import annotations

import os

from .errors import InputError
from .other_words import CommandWord

CODE_FLAG = "--trust-remote-code"
KEY_FLAG = "--trust-key"
_BOTH = (
    f"{CODE_FLAG} runs the code of the model file, and {KEY_FLAG} PUBLIC.pem names a key that must have signed a bundle"
    " or a record"
)
# First bytes of a key's file.
_PEM = b"-----BEGIN "


def _describe_key(value: str) -> str:
    """Return an error if a word after ``--trust`` is the file of a key; else ""."""
    if not _is_key_file(value):
        return ""
    return f"{_BOTH}. This verb checks no signatures, so it would run code of any author; omit the key"


def _is_key_file(value: str) -> bool:
    if value.endswith((".pem", ".pub")):
        return True
    if not os.path.isfile(value):
        return False
    with open(value, "rb") as file:
        return file.read(len(_PEM)) == _PEM


def _require_key(value: str) -> str:
    """Return the file of a key.

    Raises:
        InputError: the word is another option, so ``--trust`` may be meant to run code.
    """
    if not value or value.startswith("-"):
        raise InputError(f"--trust without a key has two meanings: {_BOTH}")
    return value


CODE_WORDS = (
    CommandWord(
        flags=("--trust",),
        means=(CODE_FLAG,),
        misread=_describe_key,
        refusal=_BOTH,
        note=f"--trust is now {CODE_FLAG}: it runs the code of the model file",
    ),
    CommandWord(
        flags=(KEY_FLAG,),
        refusal=f"only recheck and the verbs of fleet check signatures of keys; {_BOTH}",
    ),
)
"""Words of verbs that load models."""

KEY_WORDS = (
    CommandWord(
        flags=("--trust",),
        means=(KEY_FLAG,),
        takes_value=True,
        convert=_require_key,
        note=f"--trust is now {KEY_FLAG}: only content that this key has signed is accepted",
    ),
    CommandWord(
        flags=(CODE_FLAG,),
        refusal=f"this verb takes no such option; {_BOTH}. In a fleet.toml, write trust_remote_code = true",
    ),
)
"""Words of verbs that check signatures."""
