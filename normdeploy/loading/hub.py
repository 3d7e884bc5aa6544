"""Resolve names of models on the Hugging Face Hub, ``org/name``, to folders in huggingface_hub's cache.

A model that is not in the cache is downloaded.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import LoadError
from .python_file import parse_python_source
from .torch_pickles import first_line

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = re.compile(r"\.(pt|pt2|pth|bin|ckpt|onnx|safetensors|npz|zip|json|engine|plan|ts|pkl|h5|tflite)$")
# Patterns of the files that are downloaded. They match neither pickles nor code.
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.model"]
# Maximum seconds until the Hub answers.
_SECONDS = 10


def is_hub_id(source: str | Path) -> bool:
    """Return whether ``source`` has the form ``org/name``, and neither this path nor a folder ``org`` exists.

    Returns:
        False also for a name with the suffix of a model file.
    """
    text = Path(source).as_posix()
    here = Path(source).exists() or Path(text.partition("/")[0]).exists()
    return bool(_ID.fullmatch(text)) and not _FILES.search(text) and not here


def resolve_model_path(source: str | Path) -> Path:
    """Resolve a model's name or path: a Hub id to its folder, ``my_model.py:Net`` to its file.

    A Hub id is first looked up in the cache. A model that is not in the cache is downloaded, without pickles and code
    (only JSON, text, ``*.model`` and safetensors files). Nothing is downloaded if huggingface_hub is offline
    (HF_HUB_OFFLINE) or the Hub does not answer within ten seconds.

    Returns:
        Path of a file or folder. A path that is neither a Hub id nor of the form ``my_model.py:Net`` is returned
        unchanged.

    Raises:
        LoadError: the model is not in the cache and can't be downloaded.
    """
    named = parse_python_source(source)
    if named is not None:
        return named.path
    if not is_hub_id(source):
        return Path(source)
    try:
        import huggingface_hub
    except ImportError:
        # The loader then reports that the file does not exist.
        return Path(source)
    name = Path(source).as_posix()
    if (cached := _find_cached_folder(huggingface_hub, name)) is not None:
        return cached
    try:
        # Without a network, the download itself would try for minutes.
        huggingface_hub.HfApi().model_info(name, timeout=_SECONDS)
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=_WANTED, etag_timeout=_SECONDS))
    except Exception as error:
        # The Hub is offline or unreachable, or the model is unknown or gated. The errors come from several libraries.
        first = first_line(error, "")
        raise LoadError(
            f"{name} is neither a local file or folder nor a model in huggingface_hub's cache, and it can't be "
            f"downloaded from the Hub: {type(error).__name__}: {first}; check the name, or pass a folder"
        ) from error
    return folder


def _find_cached_folder(huggingface_hub: object, name: str) -> Path | None:
    """Return the folder in the cache if it has config and weights, else None."""
    try:
        folder = Path(huggingface_hub.snapshot_download(name, local_files_only=True))  # type: ignore[attr-defined]
    except Exception:
        # The model is not in the cache. The error may be LocalEntryNotFoundError, HFValidationError or any other error.
        return None
    weights = any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))
    if (folder / "config.json").is_file() and weights:
        return folder
    return None
