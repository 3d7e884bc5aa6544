"""Check that a Hugging Face folder refers only to regular files inside it.

transformers joins any name in the shard index or the config to the folder's path and opens the result. Such a path may
lead to another user's file or to an endless device. A snapshot in huggingface_hub's cache consists of links to the
folder ``blobs`` of the same repository. Files there count as inside.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import LoadError
from .file_kinds import BOOKKEEPING

# Maximum size in bytes of an index or config. The largest index of a public model has 90,000 tensors and 9 MB.
_MOST = 100 << 20
_LAYERS = re.compile(r"(^|_)(layers?|layers_per_block|blocks?|depths?|experts)$")
_LABELS = re.compile(r"^num_labels$")
# Maximum number of labels. The largest public classifiers have about 20,000 labels.
_MOST_LABELS = 2**20
_READ = (".json", ".safetensors", ".bin", ".txt", ".model", ".h5", ".msgpack")


def require_contained_files(folder: Path, *, root: Path | None = None) -> None:
    """Require that every file of the folder, and every file that its config or an index names, is inside the folder.

    Args:
        root: folder of the whole model, if ``folder`` is one of its parts. Files may then be anywhere inside ``root``.

    Raises:
        LoadError: a file is outside the folder or not a regular file, or a list of files can't be read.
    """
    roots = _allowed_roots(folder if root is None else root)
    for file in _iter_folder_files(folder):
        _require_inside_roots(file, folder, roots, "it is a link")
    for index in sorted(folder.glob("*index*.json")):
        for name in _referenced_file_names(index, "weight_map"):
            _require_inside_roots(folder / name, folder, roots, f"{index.name} names {name!r}")
    for name in _referenced_file_names(folder / "config.json", "transformers_weights"):
        _require_inside_roots(folder / name, folder, roots, f"config.json names {name!r}")
    for name in _referenced_file_names(folder / "adapter_config.json", "base_model_name_or_path"):
        if os.path.isabs(name) or ".." in Path(name).parts:
            _require_inside_roots(folder / name, folder, roots, f"adapter_config.json names {name!r}")


def indexed_shards(index: Path) -> list[Path]:
    """Read the shards that a safetensors index names.

    Returns:
        Sorted paths of the shards, which are in the folder of the index.

    Raises:
        LoadError: the index names no shards, or a shard is missing or in another folder.
    """
    names = sorted(set(map(str, _referenced_file_names(index, "weight_map"))))
    if not names:
        raise LoadError(f"{index} lists no shards in its weight_map; pass the index that was saved with them")
    roots = _allowed_roots(index.parent)
    for name in names:
        _require_inside_roots(index.parent / name, index.parent, roots, f"{index.name} names {name!r}")
        if not (index.parent / name).is_file():
            raise LoadError(f"{index} names {name!r}, but no such file is next to it; copy all shards")
    return [index.parent / name for name in names]


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Returns:
        The object; {} if the file does not exist.

    Raises:
        LoadError: the file is not regular, is too long, or does not contain an object.
    """
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST:
            if stat.S_ISREG(status.st_mode):
                size = f"has {status.st_size} bytes; at most {_MOST} are read"
            else:
                size = ""
            raise LoadError(f"{file} can't be read: it {size or 'is not a regular file'}; use the original folder")
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{file} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{file} holds a {type(value).__name__}, not an object: this is not a Hugging Face folder")
    return value


def require_plausible_config(folder: Path, config: dict[str, Any]) -> None:
    """Require plausible numbers of layers and labels, because transformers and diffusers create all of them before they
    read the weights.

    The number of layers may not exceed the number of weight tensors, since each layer has its own tensor. Models that
    reuse layers are exceptions, but they have fewer than 1000 layers. So up to 1000 layers are always allowed.

    Raises:
        LoadError: a number is too large.
    """
    labels = max((count for _, count in _iter_config_counts(config, _LABELS)), default=0)
    if labels > _MOST_LABELS:
        raise LoadError(
            f"{folder / 'config.json'} sets num_labels to {labels}; at most {_MOST_LABELS} are read, because "
            "transformers creates a name for each; use the original folder"
        )
    asked = max(_iter_config_counts(config, _LAYERS), default=("", 0), key=lambda item: item[1])
    most = 1000
    if asked[1] > most and asked[1] > (there := _count_weight_tensors(folder)):
        raise LoadError(
            f"{folder / 'config.json'} sets {asked[0]} to {asked[1]}, but the weights next to it contain {there} "
            "tensors: one of the two belongs to another model; use the original folder"
        )


def _iter_config_counts(config: dict[str, Any], keys: re.Pattern[str]) -> Iterator[tuple[str, int]]:
    """Yield (key, count) for each matching key of the config and its parts. If the value is a list, the count is the
    sum of its numbers.
    """
    stack: list[Any] = [config]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(value for value in item.values() if isinstance(value, dict | list))
            for key, value in item.items():
                if isinstance(value, list):
                    counts = value
                else:
                    counts = [value]
                if keys.search(key) and all(isinstance(count, int) for count in counts):
                    yield key, sum(counts)
        else:
            stack.extend(value for value in item if isinstance(value, dict | list))


def _count_weight_tensors(folder: Path) -> int:
    """Return an upper bound of the number of tensors in the weight files."""
    count = 0
    for file in folder.rglob("*"):
        if file.suffix == ".safetensors" and file.is_file():
            with file.open("rb") as stream:
                header = stream.read(min(int.from_bytes(stream.read(8), "little"), _MOST))
            # The header contains one such entry for each tensor.
            count += header.count(b'"data_offsets"')
        elif file.suffix == ".bin" and file.is_file():
            try:
                with zipfile.ZipFile(file) as archive:
                    count += len(archive.namelist())
            except (zipfile.BadZipFile, OSError, ValueError):
                # The legacy format has no table of contents, so the count is estimated: each tensor takes at least 64
                # bytes of the pickle.
                count += file.stat().st_size // 64
    return count


def _allowed_roots(folder: Path) -> list[Path]:
    root = folder.resolve()
    snapshot = root.parent.name == "snapshots"
    if snapshot:
        return [root, root.parent.parent / "blobs"]
    return [root]


def _iter_folder_files(folder: Path) -> Iterator[Path]:
    """Yield all links in the folder, because they are hashed too, and the top-level files that transformers may
    open.
    """
    for path in folder.rglob("*"):
        top = path.relative_to(folder).parts[0]
        if top not in BOOKKEEPING and (path.is_symlink() or (path.parent == folder and path.suffix in _READ)):
            yield path


def _referenced_file_names(file: Path, key: str) -> list[str]:
    """Return the distinct file names that an index or a config has under ``key``. The value is a single name or a
    mapping to names.
    """
    given = read_json(file).get(key)
    if given is None:
        return []
    if isinstance(given, dict):
        names = list(given.values())
    else:
        names = [given]
    if odd := [name for name in names if not isinstance(name, str) or "\0" in name]:
        raise LoadError(f"{file} has {odd[0]!r} in its {key} instead of a file name: it is damaged")
    return list(dict.fromkeys(names))


def _require_inside_roots(file: Path, folder: Path, roots: list[Path], why: str) -> None:
    try:
        target = file.resolve()
        status = target.stat()
    except (FileNotFoundError, NotADirectoryError):
        # The file is missing, which transformers reports.
        status = None
    except (OSError, RuntimeError, ValueError) as error:
        raise LoadError(f"{file} can't be read: {error}") from error
    if not any(target.is_relative_to(root) for root in roots):
        raise LoadError(
            f"{folder} is not loaded: {why}, and {file.name} points outside the folder, to {target}; copy the "
            "model's files into its folder"
        )
    if status is not None and not (stat.S_ISREG(status.st_mode) or (file.is_symlink() and target.is_dir())):
        raise LoadError(f"{folder} is not loaded: {file.name} in it is not a regular file")
