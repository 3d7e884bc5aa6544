"""Turn texts into token ids and back with the tokenizer of a Hugging Face folder. Code of the folder is not run."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import InputError, RuntimeUnavailable
from ...runtimes.cached_decoder import TextEnd
from ...storage.tokenizer_files import VOCABULARY_FILES, hash_vocabulary, list_vocabulary_files

# Files that name the tokens that end a text, in the order of transformers' ``generate``.
_GENERATION_FILES = ("generation_config.json", "config.json")


class PromptTokenizer:
    """Tokenizer of a folder.

    Args:
        folder: the folder of the tokenizer, for example the folder of a model.

    Raises:
        InputError: the folder has no tokenizer, or the tokenizer can't be loaded.
        RuntimeUnavailable: transformers is not installed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer = _load_tokenizer(folder)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, with the special tokens that the tokenizer adds.

        Raises:
            InputError: the text has no tokens.
        """
        tokens = list(self._tokenizer(text)["input_ids"])
        if not tokens:
            raise InputError(
                f"the prompt {text!r} has no tokens, and the tokenizer adds no token that begins a text; pass a text"
            )
        return tokens

    def encode_message(self, text: str) -> list[int]:
        """Return the token ids of a chat with one message of the user, up to the start of the answer.

        Raises:
            InputError: the tokenizer has no chat template, or the template fails.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise InputError(
                f"the tokenizer in {str(self._folder)!r} has no chat template, which --chat needs; omit --chat"
            )
        try:
            # The template adds the special tokens itself.
            whole = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:
            # A template may raise errors of any type. transformers runs it without access to Python's functions.
            raise InputError(
                f"the chat template in {str(self._folder)!r} fails: {type(error).__name__}:"
                f" {' '.join(str(error).split()):.200}; omit --chat"
            ) from error
        return list(self._tokenizer(whole, add_special_tokens=False)["input_ids"])

    def describe_mismatch(self, recorded: str) -> list[str]:
        """Compare the vocabulary with that of the folder that a file was exported from.

        Args:
            recorded: hash of the vocabulary in the file's record; "" if there is none.

        Returns:
            A note if the vocabularies differ, otherwise no notes.
        """
        if recorded in ("", hash_vocabulary(self._folder)):
            return []
        return [
            f"the tokenizer in {str(self._folder)!r} is not that of the exported folder, so its token ids may mean"
            " other texts; pass --tokenizer FOLDER with the model's own"
        ]

    def decode_answer(self, prompt: Sequence[int], answer: Sequence[int]) -> str:
        """Decode generated tokens without their special tokens.

        Many tokenizers drop the space before the first word of a text. So the prompt is decoded too, and its text is
        removed.

        Args:
            prompt: token ids before the answer.
            answer: generated token ids.

        Returns:
            The text of the answer.
        """
        before = self._decode(prompt)
        whole = self._decode([*prompt, *answer])
        if whole.startswith(before):
            return whole.removeprefix(before)
        return self._decode(answer)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def read_text_end(self) -> TextEnd | None:
        """Read which tokens end a text: those of ``generation_config.json`` or ``config.json``, else the tokenizer's.

        Returns:
            The tokens; None if no token ends a text.

        Raises:
            InputError: a file of the folder states something else than token ids.
            LoadError: a file of the folder can't be read.
        """
        ends: list[int] = []
        for name in _GENERATION_FILES:
            ends = ends or _read_tokens(self._folder / name)
        if not ends and self._tokenizer.eos_token_id is not None:
            ends = [self._tokenizer.eos_token_id]
        if not ends:
            return None
        padding = self._tokenizer.pad_token_id
        return TextEnd(frozenset(ends), ends[0] if padding is None else padding)


def _read_tokens(file: Path) -> list[int]:
    """Read ``eos_token_id`` of a config, which is a number or a list of numbers.

    Raises:
        InputError: the value is something else.
    """
    # The package of this module imports torch.
    from ...loading.folder_containment import read_json

    stated = read_json(file).get("eos_token_id")
    if stated is None:
        return []
    tokens = stated if isinstance(stated, list) else [stated]
    # Old folders of Llama write -1 for no token.
    tokens = [token for token in tokens if token != -1]
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise InputError(f"{file} sets eos_token_id to {stated!r}, which is not a token id of 0 or more; correct it")
    return tokens


def _load_tokenizer(folder: Path) -> Any:
    if not list_vocabulary_files(folder):
        raise InputError(
            f"the folder {str(folder)!r} has no tokenizer ({', '.join(VOCABULARY_FILES)}), which --prompt needs; pass"
            " its folder with --tokenizer, or pass --prompt-ids"
        )
    missing = [name for name in ("transformers", "tokenizers") if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeUnavailable(
            f"the tokenizer needs {missing[0]}, which is not installed: pip install {missing[0]}, or pass --prompt-ids"
        )
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # The errors of transformers share no base class.
        raise InputError(
            f"the tokenizer in {str(folder)!r} can't be loaded: {type(error).__name__}:"
            f" {' '.join(str(error).split()):.200}; pass --prompt-ids"
        ) from error
