"""Names of models on the Hugging Face Hub, ``org/name``: their folder in huggingface_hub's cache, fetched where it is
not there yet."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import LoadError
from .python_file import parse_python_source
from .torch_pickles import first_line

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = re.compile(r"\.(pt|pt2|pth|bin|ckpt|onnx|safetensors|npz|zip|json|engine|plan|ts|pkl|h5|tflite)$")
# no pickles, no code
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.model"]
# for an answer of the Hub
_SECONDS = 10


def is_hub_id(source: str | Path) -> bool:
    """``org/name``, where neither a file nor a folder of that name, nor a folder ``org``, is here."""
    text = Path(source).as_posix()
    here = Path(source).exists() or Path(text.partition("/")[0]).exists()
    return bool(_ID.fullmatch(text)) and not _FILES.search(text) and not here


def resolve_model_path(source: str | Path) -> Path:
    """The folder of a model that is named by its id on the Hub, the file of ``my_model.py:Net``; every other path as it
    is.

    The cache comes first. What is not in it is fetched, config and safetensors alone, unless huggingface_hub is told to
    stay offline (HF_HUB_OFFLINE) or the Hub gives no answer within ten seconds.

    Raises:
        LoadError: the model is not in the cache and can't be fetched.
    """
    named = parse_python_source(source)
    if named is not None:
        return named.path
    if not is_hub_id(source):
        return Path(source)
    try:
        import huggingface_hub
    except ImportError:
        # there is no such file, as the loader says
        return Path(source)
    name = Path(source).as_posix()
    if (cached := _find_cached_folder(huggingface_hub, name)) is not None:
        return cached
    try:
        # the fetch itself tries for minutes where there is no network
        huggingface_hub.HfApi().model_info(name, timeout=_SECONDS)
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=_WANTED, etag_timeout=_SECONDS))
    except Exception as error:
        # offline, unknown, gated, no network: errors of several libraries
        first = first_line(error, "")
        raise LoadError(
            f"{name} is no file or folder here and no model in the cache of huggingface_hub, and it can't be fetched"
            f" from the Hub: {type(error).__name__}: {first}; check the name, or give a folder"
        ) from error
    return folder


def _find_cached_folder(huggingface_hub: object, name: str) -> Path | None:
    """The folder in the cache, if config and weights are there."""
    try:
        folder = Path(huggingface_hub.snapshot_download(name, local_files_only=True))  # type: ignore[attr-defined]
    except Exception:
        # LocalEntryNotFoundError, HFValidationError, ...: not there
        return None
    weights = any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))
    if (folder / "config.json").is_file() and weights:
        return folder
    return None
