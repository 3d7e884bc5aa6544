"""Load a Hugging Face folder as a generator and as a model without a cache, for ``verify --generate``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import ExportError, InputError
from ...inputs.input_cases import NamedInputs
from ...inputs.token_prompts import USUAL_LENGTH, read_prompts
from ...loading import load
from ...loading.file_kinds import FileKind, detect_kind
from ...loading.hub import resolve_model_path
from ...loading.huggingface_generation import GENERATION_TASK, FolderGenerator
from ...types import PathLike
from .compute_budget import BudgetClock
from .generation_check import DecoderFile, check_generation, open_decoder
from .generation_result import Generation
from .verify_options import VerifyCall


def _require_folder(source: Any) -> Path:
    """Return the folder of a Hugging Face model.

    Raises:
        InputError: the source is something else.
    """
    if not isinstance(source, str | os.PathLike):
        raise InputError(
            f"generate compares with a Hugging Face folder, but a {type(source).__name__} was passed; save it with"
            " save_pretrained, and pass the folder"
        )
    path = resolve_model_path(os.fspath(source))
    if detect_kind(path) is not FileKind.HUGGINGFACE:
        raise InputError(
            f"--generate compares with a Hugging Face folder, but {os.fspath(source)!r} is not one; pass the folder"
            " that the file was exported from, or omit --generate"
        )
    return path


def choose_reference_dims(files: Sequence[DecoderFile], inputs: Sequence[NamedInputs] | None, count: int) -> list[str]:
    """Choose the sizes of the model without a cache: one length alone if the model has a linear attention.

    Without a cache, transformers computes a linear attention in a loop over chunks, and a trace can't leave the number
    of chunks open. Shorter rows are padded on the left.

    Returns:
        The option ``dims`` of ``load``.
    """
    if not any(file.ports.is_recurrent for file in files):
        return []
    longest = USUAL_LENGTH
    if inputs is not None:
        longest = max((read_prompts(given.name, given.feeds).ids.shape[1] for given in inputs), default=1)
    # The last token is not read.
    limits = [file.most_past + 1 for file in files if file.most_past is not None]
    length = min([longest + count - 1, *limits])
    return [f"seq={length}:{length}:{length}"]


def generate_from_folder(
    call: VerifyCall, inputs: Sequence[NamedInputs] | None, files: Sequence[PathLike]
) -> Generation:
    """Compare the tokens that ``files`` generate with those of the folder in eager mode.

    Args:
        inputs: the user's prompts; None to draw prompts.

    Returns:
        The verdict on each token.

    Raises:
        InputError: as for ``check_generation``.
        ExportError: the model without a cache can't be traced.
    """
    assert call.generate is not None
    path = _require_folder(call.source)
    # A wrong file is refused before the model is loaded.
    opened = [open_decoder(Path(file)) for file in files]
    dims = choose_reference_dims(opened, inputs, call.generate)
    try:
        # This call also imports the modules that register operators, which the generator may need.
        model = load(path, trust=call.trust, imports=call.imports, task=GENERATION_TASK, dims=dims)
    except ExportError as error:
        raise ExportError(f"--generate needs the model without a cache, which can't be traced: {error}") from error
    generator = FolderGenerator(path, trust=call.trust)
    return check_generation(
        model,
        generator,
        [Path(file) for file in files],
        count=call.generate,
        seeds=call.seeds,
        inputs=inputs,
        runners=call.runners,
        clock=BudgetClock(call.max_seconds),
        progress=call.progress,
    )
