"""Generate tokens with a decoder file: read the prompts, run the file token by token, and decode the tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...errors import GraphError, InputError
from ...inputs.token_prompts import MASK, USUAL_LENGTH, PromptBatch, draw_prompts, pad_left, read_prompts
from ...runtimes.cached_decoder import LOGITS, CachedDecoder, find_decoder_ports, generate_greedily, require_places
from ...runtimes.trt_runner import is_engine
from ...storage.export_record import TOKENIZER_FLAG, read_record
from ...storage.npz_files import read_npz
from ...storage.onnx_files import load_onnx
from ...types import Array, PathLike
from .prompt_tokenizer import PromptTokenizer
from .run_options import RunCall

if TYPE_CHECKING:
    from ...runtimes.live_runner import LiveRunner

# Name of the only output of a run that generates.
TOKENS = "tokens"


@dataclass(frozen=True)
class GeneratedTokens:
    """Tokens after each prompt.

    Attributes:
        tokens: int64 [prompts, length]. Rows that end early are padded on the right.
        lengths: number of tokens of each prompt before the padding.
        texts: the tokens of each prompt as text; () without a tokenizer.
        load_seconds: time to load the tokenizer.
    """

    prompts: PromptBatch
    tokens: Array
    lengths: tuple[int, ...]
    texts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    load_seconds: float = 0.0


def require_token_options(call: RunCall) -> None:
    """Check the options for generating tokens before the file is loaded.

    Raises:
        InputError: options contradict each other.
    """
    given = [
        ("--prompt", call.prompts),
        ("--prompt-ids", call.prompt_ids),
        ("--tokenizer", call.tokenizer),
        ("--chat", ("user",) if call.chat else ()),
    ]
    used = [flag for flag, value in given if value is not None and len_of(value)]
    if call.generate is None:
        if used:
            raise InputError(f"{used[0]} is for generating tokens; add --generate N with the number of tokens")
        return
    if is_engine(cast(PathLike, call.source)):
        raise InputError(
            f"{os.fspath(cast(PathLike, call.source))!r} is an engine; --generate runs ONNX files, so pass the ONNX"
            " file of the engine"
        )
    if call.stated_inputs:
        raise InputError("--input describes inputs of a single run; with --generate, pass --prompt or --prompt-ids")
    if call.chat and not call.prompts:
        raise InputError("--chat puts texts into the chat template of a tokenizer; pass them with --prompt")
    sources = [flag for flag, value in (*given[:2], ("--inputs", call.inputs)) if value is not None and len_of(value)]
    if len(sources) > 1:
        raise InputError(f"{' and '.join(sources)} were passed; pass the prompts in one way")


def len_of(value: Any) -> int:
    """Return the number of prompts in an option; 1 for a path or a text."""
    if isinstance(value, str | os.PathLike):
        return 1
    return len(value)


def generate_tokens(runner: LiveRunner, source: PathLike, call: RunCall, count: int) -> GeneratedTokens:
    """Generate ``count`` tokens after each prompt of a call.

    Args:
        runner: the opened file.
        source: the file.

    Returns:
        The tokens.

    Raises:
        InputError: the file is not a decoder with a cache, or the prompts can't be read.
        RuntimeUnavailable: transformers, which reads tokenizers, is not installed.
    """
    label = os.path.basename(source)
    ports = find_decoder_ports(label, runner.inputs, [spec.name for spec in runner.outputs])
    tokenizer = None
    text_end = None
    notes: list[str] = []
    recorded = _read_decoder_record(source)
    start = time.perf_counter()
    if call.prompts or call.tokenizer is not None:
        tokenizer = PromptTokenizer(Path(source).parent if call.tokenizer is None else Path(call.tokenizer))
        text_end = tokenizer.read_text_end()
        notes += tokenizer.describe_mismatch(recorded.tokenizer)
    load_seconds = time.perf_counter() - start
    if call.prompts and tokenizer is not None:
        encode = tokenizer.encode_message if call.chat else tokenizer.encode
        prompts = pad_left("the prompts", [encode(text) for text in call.prompts])
    elif call.prompt_ids:
        prompts = pad_left("the prompts", [_parse_ids(given) for given in call.prompt_ids])
    elif call.inputs is not None:
        prompts = _read_given_prompts(call.inputs)
    else:
        vocabulary = _vocabulary_size(runner)
        prompts = draw_prompts(vocabulary, USUAL_LENGTH, call.seed)
        notes.append(f"no prompt was passed: a {prompts.name} is continued")
    _require_known_tokens(label, runner, prompts)
    if ports.cache_length is not None:
        require_places(prompts.ids.shape[1] + count - 1, ports.cache_length)
    _require_positions(label, prompts, count, recorded.positions)
    rows = generate_greedily(CachedDecoder(runner.infer, ports), prompts, count, text_end)
    tokens = np.full((len(rows), max(map(len, rows))), text_end.padding if text_end else 0, np.int64)
    texts = []
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = row
        if tokenizer is not None:
            read = prompts.ids[place][prompts.mask[place] != 0]
            texts.append(tokenizer.decode_answer(read.tolist(), row.tolist()))
    return GeneratedTokens(prompts, tokens, tuple(map(len, rows)), tuple(texts), tuple(notes), load_seconds)


def _read_given_prompts(inputs: PathLike | Mapping[str, Any]) -> PromptBatch:
    if isinstance(inputs, Mapping):
        return read_prompts("the inputs", {name: np.asarray(value) for name, value in inputs.items()})
    return read_prompts(os.fspath(inputs), read_npz(inputs))


def _parse_ids(given: str | Sequence[int]) -> list[int]:
    """Return the token ids of a prompt.

    Raises:
        InputError: an id is not a whole number of 0 or more that int64 holds.
    """
    if isinstance(given, str):
        parts: Any = [part for part in given.replace(" ", ",").split(",") if part]
    else:
        parts = given
    try:
        ids = [int(part) for part in parts]
    except (TypeError, ValueError):
        ids = [-1]
    if not ids or min(ids) < 0 or max(ids) > np.iinfo(np.int64).max:
        raise InputError(f"the prompt {given!r} is not a list of token ids; write numbers of 0 or more, such as 1,15,7")
    return ids


@dataclass(frozen=True)
class _DecoderRecord:
    """Facts on a decoder in the record that ``export`` wrote.

    Attributes:
        positions: largest number of tokens that a text may have; None if the file states none.
        tokenizer: hash of the tokenizer's vocabulary; "" if the file states none.
    """

    positions: int | None = None
    tokenizer: str = ""


def _read_decoder_record(source: PathLike) -> _DecoderRecord:
    try:
        record = read_record(load_onnx(source, external_data=False))
    except GraphError:
        # onnxruntime runs files that onnx's checker rejects.
        return _DecoderRecord()
    if not record:
        return _DecoderRecord()
    lengths = [spec.shape[1] for spec in record["inputs"] if spec.name == MASK and len(spec.shape) == 2]
    # The mask is as long as past and new tokens together.
    positions = next((dim.max for dim in lengths if dim.terms), None)
    return _DecoderRecord(positions, str(record["export"].get(TOKENIZER_FLAG, "")))


def _require_known_tokens(label: str, runner: LiveRunner, prompts: PromptBatch) -> None:
    """Raise InputError if a prompt has a token id that the file does not know."""
    size = _stated_vocabulary(runner)
    highest = int(prompts.ids.max())
    if size is not None and highest >= size:
        raise InputError(
            f"the token id {highest} of a prompt is not among the {size} tokens of {label}; pass the tokenizer of the"
            " exported folder with --tokenizer, or smaller ids"
        )


def _require_positions(label: str, prompts: PromptBatch, count: int, positions: int | None) -> None:
    """Raise InputError if prompts and tokens exceed the positions of the file. The last token is not read."""
    length = prompts.ids.shape[1]
    if positions is None or length + count - 1 <= positions:
        return
    room = max(positions - length + 1, 0)
    raise InputError(
        f"{count} tokens after {length} of the longest prompt are read as {length + count - 1} positions, but {label}"
        f" takes {positions}; generate at most {room}, pass a shorter prompt, or export with a larger --dim past if the"
        " model has the positions"
    )


def _stated_vocabulary(runner: LiveRunner) -> int | None:
    logits = next(spec for spec in runner.outputs if spec.name == LOGITS)
    size = logits.shape[-1] if logits.shape else None
    return size if isinstance(size, int) else None


def _vocabulary_size(runner: LiveRunner) -> int:
    size = _stated_vocabulary(runner)
    if size is None:
        raise InputError("the file does not state the number of its tokens; pass --prompt-ids or --prompt")
    return size
