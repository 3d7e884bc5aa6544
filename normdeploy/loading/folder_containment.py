"""Which files of a Hugging Face folder may be read: regular ones inside it.

transformers joins whatever name the index of the shards or the config gives to the folder's path, and opens what it
finds there: a file of somebody else's, or a device that never ends. A snapshot in huggingface_hub's cache is made of
links into ``blobs`` of its own repository, which count as inside.
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

# The largest index of a public model, with 90,000 tensors, has 9 MB.
_MOST = 100 << 20
_LAYERS = re.compile(r"(^|_)(layers?|blocks?|depths?|experts)$")
_LABELS = re.compile(r"^num_labels$")
# The largest public classifiers have some 20,000.
_MOST_LABELS = 2**20
_READ = (".json", ".safetensors", ".bin", ".txt", ".model", ".h5", ".msgpack")


def require_contained_files(folder: Path) -> None:
    """Require that no file of the folder, and none that its config or an index names, leads out of it.

    Raises:
        LoadError: one does, is no regular file, or names its files in no way that can be read.
    """
    roots = _allowed_roots(folder)
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
    """Return the files that an index of safetensors names, which lie beside it.

    Raises:
        LoadError: it names none, or one that is not there or lies elsewhere.
    """
    names = sorted(set(map(str, _referenced_file_names(index, "weight_map"))))
    if not names:
        raise LoadError(f"{index} names no shards in its weight_map; give the index that was saved with them")
    roots = _allowed_roots(index.parent)
    for name in names:
        _require_inside_roots(index.parent / name, index.parent, roots, f"{index.name} names {name!r}")
        if not (index.parent / name).is_file():
            raise LoadError(f"{index} names {name!r}, and there is no such file beside it; copy all shards")
    return [index.parent / name for name in names]


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file of JSON; an empty one where there is no such file.

    Raises:
        LoadError: it is no regular file, too long, or holds no object.
    """
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST:
            if stat.S_ISREG(status.st_mode):
                size = f"has {status.st_size} bytes, where {_MOST} are read"
            else:
                size = ""
            raise LoadError(f"{file} can't be read: it {size or 'is no regular file'}; give the folder as it was made")
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{file} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{file} holds a {type(value).__name__}, not an object: this is no Hugging Face folder")
    return value


def require_plausible_config(folder: Path, config: dict[str, Any]) -> None:
    """Require that the config asks for no more layers than the weights can fill, and for no more labels than a model
    has: transformers makes each before it looks at the weights.

    Each layer has a tensor of its own, but for models that use one again and again; none of those has 1000.

    Raises:
        LoadError: it does.
    """
    labels = max((count for _, count in _iter_config_counts(config, _LABELS)), default=0)
    if labels > _MOST_LABELS:
        raise LoadError(
            f"{folder / 'config.json'} gives num_labels as {labels}, more than the {_MOST_LABELS} that are read:"
            " transformers makes a name for each; give the folder as it was made"
        )
    asked = max(_iter_config_counts(config, _LAYERS), default=("", 0), key=lambda item: item[1])
    most = 1000
    if asked[1] > most and asked[1] > (there := _count_weight_tensors(folder)):
        raise LoadError(
            f"{folder / 'config.json'} gives {asked[0]} as {asked[1]}, but the weights beside it hold {there} tensors: "
            "one of the two is of another model; give the folder as it was made"
        )


def _iter_config_counts(config: dict[str, Any], keys: re.Pattern[str]) -> Iterator[tuple[str, int]]:
    """Yield what the config and its parts give under such keys: a count, or the sum of several."""
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
    """How many tensors the weight files hold, at most."""
    count = 0
    for file in folder.rglob("*"):
        if file.suffix == ".safetensors" and file.is_file():
            with file.open("rb") as stream:
                header = stream.read(min(int.from_bytes(stream.read(8), "little"), _MOST))
            # Each tensor has its offsets in the header.
            count += header.count(b'"data_offsets"')
        elif file.suffix == ".bin" and file.is_file():
            try:
                with zipfile.ZipFile(file) as archive:
                    count += len(archive.namelist())
            except (zipfile.BadZipFile, OSError, ValueError):
                # The legacy format has no table of contents; a tensor takes at least this many bytes of its pickle.
                count += file.stat().st_size // 64
    return count


def _allowed_roots(folder: Path) -> list[Path]:
    root = folder.resolve()
    snapshot = root.parent.name == "snapshots"
    if snapshot:
        return [root, root.parent.parent / "blobs"]
    return [root]


def _iter_folder_files(folder: Path) -> Iterator[Path]:
    """Links anywhere below it, for its hash is taken of them too, and what transformers may open at its top."""
    for path in folder.rglob("*"):
        top = path.relative_to(folder).parts[0]
        if top not in BOOKKEEPING and (path.is_symlink() or (path.parent == folder and path.suffix in _READ)):
            yield path


def _referenced_file_names(file: Path, key: str) -> list[str]:
    """The distinct file names that an index or a config gives under ``key``: one, or the values of a mapping."""
    given = read_json(file).get(key)
    if given is None:
        return []
    if isinstance(given, dict):
        names = list(given.values())
    else:
        names = [given]
    if odd := [name for name in names if not isinstance(name, str) or "\0" in name]:
        raise LoadError(f"{file} gives {odd[0]!r} in its {key} where the name of a file is wanted: it is damaged")
    return list(dict.fromkeys(names))


def _require_inside_roots(file: Path, folder: Path, roots: list[Path], why: str) -> None:
    try:
        target = file.resolve()
        status = target.stat()
    except (FileNotFoundError, NotADirectoryError):
        # transformers says which file is missing.
        status = None
    except (OSError, RuntimeError, ValueError) as error:
        raise LoadError(f"{file} can't be read: {error}") from error
    if not any(target.is_relative_to(root) for root in roots):
        raise LoadError(
            f"{folder} is not loaded: {why}, and {file.name} leads out of the folder, to {target}; copy what belongs to"
            " the model into its folder"
        )
    if status is not None and not (stat.S_ISREG(status.st_mode) or (file.is_symlink() and target.is_dir())):
        raise LoadError(f"{folder} is not loaded: {file.name} in it is no regular file, and can't be read as one")
