"""Describe folders of Hugging Face libraries that hold no single model of transformers, and say how to export them.

| library | marker |
|---|---|
| diffusers, one model | ``config.json`` with ``_diffusers_version`` |
| peft, an adapter without its base model | ``adapter_config.json``, and no weights but ``adapter_model.*`` |
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..storage.regular_file import read_regular

_BYTES = 1 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_ADAPTER_WEIGHTS = "adapter_model."
MERGE_FIRST = (
    "merge it into its base model first, in Python: merged = peft.AutoPeftModel...from_pretrained('ADAPTER')"
    ".merge_and_unload(); merged.save_pretrained('merged'); then pass the folder merged"
)


def describe_foreign_folder(path: Path) -> str:
    """Describe a folder of diffusers or peft that can't be exported as it is.

    Returns:
        the kind of folder and the way to export it; "" for other folders.
    """
    config = _read_object(path / "config.json")
    if "_diffusers_version" in config:
        return _describe_diffusers_model(path, _class_name(config.get("_class_name")))
    if (path / "adapter_config.json").is_file() and not _has_own_weights(path):
        return f"{path} is an adapter of peft, which has no weights of the base model: {MERGE_FIRST}"
    return ""


def is_adapter(names: Iterable[str]) -> bool:
    """Return True if these names of weights are those of a LoRA adapter alone, without the layers it changes."""
    parts = [name.split(".") for name in names]
    return bool(parts) and all(any(part.startswith("lora_") for part in name) for name in parts)


def _describe_diffusers_model(path: Path, cls: str) -> str:
    return (
        f"{path} is a model of diffusers ({cls}), which transformers can't load; load it in Python and pass the module:"
        f" net = diffusers.{cls}.from_pretrained({str(path)!r}); normdeploy.export(net.eval(), example_inputs,"
        " output='net.onnx')"
    )


def _has_own_weights(path: Path) -> bool:
    return any(file.suffix in _WEIGHTS and not file.name.startswith(_ADAPTER_WEIGHTS) for file in path.iterdir())


def _class_name(name: Any) -> str:
    """Return the name of a class from an untrusted file, or a placeholder if the text is not a name."""
    return name if isinstance(name, str) and name.isidentifier() else "ModelMixin"


def _read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object; {} if there is none, because a broken file is reported where it is loaded."""
    try:
        value = json.loads(read_regular(file, most=_BYTES))
    except (OSError, InputError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
