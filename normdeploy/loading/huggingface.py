"""A Hugging Face model folder, where transformers is installed: the class that its config names, in eval mode."""

from __future__ import annotations

import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import LoadError, RuntimeUnavailable, TrustError


def load_folder(path: Path, trust: bool) -> nn.Module:
    """The model of the folder; nothing is fetched, and no code of the folder runs without ``trust``.

    Raises:
        RuntimeUnavailable: transformers is not installed.
        TrustError: the folder brings its own classes.
        LoadError: the config or the weights are broken.
    """
    config = _config(path)
    if "auto_map" in config and not trust:
        files = sorted({str(value).partition(".")[0].rpartition("--")[2] + ".py" for value in config["auto_map"].values()})
        raise TrustError(
            f"{path} is not loaded: its config.json names classes of its own (auto_map), so {', '.join(files)} would "
            "run. If you trust who made it, pass --trust"
        )
    if importlib.util.find_spec("transformers") is None:
        raise RuntimeUnavailable(
            f"{path} is a Hugging Face folder, and transformers is not installed: pip install transformers, or export "
            "the model once and give the .pt2 file"
        )
    import transformers

    named = (config.get("architectures") or [""])[0]
    loader = getattr(transformers, named, None) if "auto_map" not in config else None
    loader = loader if hasattr(loader, "from_pretrained") else transformers.AutoModel
    options: dict[str, Any] = {"trust_remote_code": True} if trust and "auto_map" in config else {}
    try:
        model = loader.from_pretrained(str(path), local_files_only=True, **options)  # type: ignore[union-attr]
    except Exception as error:  # OSError, ValueError, SafetensorError, ...: transformers names no common class
        raise LoadError(f"{path} can't be loaded by transformers' {loader.__name__}: {type(error).__name__}: {error}") from error  # type: ignore[union-attr]
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # a cache among the outputs has no place in an exported graph
    return model.eval()


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path / 'config.json'} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise LoadError(f"{path / 'config.json'} holds a {type(config).__name__}, not an object: this is no Hugging Face folder")
    return config


def default_inputs(model: nn.Module) -> list[str]:
    """The inputs of a text model, where the user names none: token ids and their mask."""
    parameters = inspect.signature(model.forward).parameters
    return (
        [f"{name}:int64[batch,seq]" for name in ("input_ids", "attention_mask") if name in parameters] if "input_ids" in parameters else []
    )
