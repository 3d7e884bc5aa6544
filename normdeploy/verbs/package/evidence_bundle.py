"""Define the manifest of an evidence bundle, and read a bundle as untrusted input.

``manifest.json`` has the schema ``normdeploy/package/1``, to which later versions may add keys. Paths are relative to
the bundle and use "/" as separator. The names in a path consist of letters, digits, "_", "." and "-".

    schema      "normdeploy/package/1".
    normdeploy  version that wrote the bundle.
    name        name of the models in the repository, without "_onnx" and "_trt".
    made        time at which the bundle was made (UTC, ISO 8601).
    source      the given ONNX file: file (its name), sha256.
    model       the PyTorch model: kind, sha256; null if it was not given.
    onnx        path of the ONNX file in the bundle.
    configs     paths of every config.pbtxt.
    engines     for each engine: path, runtime ("tensorrt" | "tensorrt-rtx"), compute_capability ("" if not stated),
                served (true if Triton serves the engine).
    max_batch   largest batch that Triton forms; 0 if Triton does not batch.
    inputs, outputs   for each input or output: name, dtype (numpy's name, or "bfloat16"), shape (sizes, names of dims,
                null for unknown sizes), key (in the .npz files of the samples).
    samples     for each sample: name, kind, and paths of .npz files: inputs, expected, free (null if no integer output
                depends on rounding).
    reference   source of the expected outputs.
    bounds      for each output and kind of sample: output, kind, allowed (largest absolute error).
    results     verdicts on the samples: output, runtime, max_abs_error, allowed, verdict, reason.
    not_run     for each runtime that was not run: runtime, reason.
    norms       for each norm: kind, module, tensor, place, runtimes (runtime without version -> verdict, as from
                "inspect").
    versions    library, "driver", "gpu 0", "cpu", "system", ... -> version or name.
    commands    commands that make and check this bundle.
    files       path -> sha256, bytes; for every file except the manifest, and except the signed statement and the bill
                of materials of a signed bundle (`normdeploy.verbs.package.bundle_signing`).
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...errors import InputError
from ...types import PathLike

SCHEMA = "normdeploy/package/1"
MANIFEST = "manifest.json"
# Files that exist only in a signed bundle: the signed statement and the bill of materials.
PROVENANCE, SBOM = "provenance.intoto.jsonl", "sbom.cdx.json"
# Files that the manifest does not list.
BESIDE = frozenset({MANIFEST, PROVENANCE, SBOM})
_MANIFEST_BYTES = 64 * 2**20
_ENTRIES = 100_000
_PATH = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")
_T = TypeVar("_T")


@dataclass(frozen=True)
class EvidenceBundle:
    """Folder with a normdeploy manifest. Its content is untrusted input."""

    root: Path
    manifest: Mapping[str, Any]

    def file_path(self, path: Any) -> Path:
        """Resolve the path of a file that the manifest names.

        Returns:
            The path of a regular file inside the bundle.

        Raises:
            InputError: the path leads out of the bundle or through a link, or it is not a regular file.
        """
        if not isinstance(path, str) or not _PATH.fullmatch(path) or len(path) > 1000:
            raise InputError(
                f"the manifest names the path {str(path)[:100]!r}, which is not valid in a bundle; create the"
                " bundle again"
            )
        here = self.root
        for part in path.split("/"):
            here = here / part
            if here.is_symlink():
                raise InputError(f"{path!r} contains a link, which is not followed; create the bundle again")
        if not here.is_file():
            raise InputError(f"{path!r} is not in the bundle; create it again")
        return here

    def read_part(self, key: str, made: Callable[[Any], _T]) -> _T:
        """Read the part ``key`` of the manifest.

        Args:
            made: function that parses the JSON value of the part.

        Returns:
            The result of ``made``.

        Raises:
            InputError: the part is missing or malformed.
        """
        try:
            return made(self.manifest[key])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise InputError(
                f"{key!r} in {MANIFEST} is malformed ({type(error).__name__}: {error}); create the bundle again"
            ) from error


def open_bundle(folder: PathLike) -> EvidenceBundle:
    """Open a bundle and read its manifest.

    Returns:
        The bundle. Its files are not compared with their hashes yet.

    Raises:
        InputError: the folder is not a normdeploy bundle, or its manifest is malformed or has another schema.
    """
    root = Path(os.path.realpath(folder))
    if not root.is_dir():
        raise InputError(f"folder not found: {os.fspath(folder)!r}; create a bundle with `normdeploy package`")
    path = root / MANIFEST
    if path.is_symlink() or not path.is_file():
        raise InputError(
            f"{os.fspath(folder)!r} is not a bundle: {MANIFEST} not found; create one with `normdeploy package`"
        )
    if (size := path.stat().st_size) > _MANIFEST_BYTES:
        raise InputError(
            f"{MANIFEST} has {size} bytes, more than the limit of {_MANIFEST_BYTES}; create the bundle again"
        )
    try:
        manifest = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"can't read {MANIFEST} as JSON ({error}); create the bundle again") from error
    if isinstance(manifest, dict):
        schema = manifest.get("schema")
    else:
        schema = None
    if schema != SCHEMA:
        raise InputError(
            f"{MANIFEST} has the schema {str(schema)[:100]!r}, but this version reads {SCHEMA!r}; create the"
            " bundle again"
        )
    return EvidenceBundle(root, manifest)


def require_hashes(bundle: EvidenceBundle, known: Collection[str]) -> None:
    """Check that the manifest has a hash for each file that it uses, and uses no file twice.

    Args:
        known: paths for which the manifest has a hash.

    Raises:
        InputError: the manifest is malformed, uses a file without a hash, or uses a file twice.
    """
    used = [
        bundle.read_part("onnx", _require_text),
        *bundle.read_part("configs", lambda value: [_require_text(path) for path in value]),
        *bundle.read_part("engines", lambda value: [_require_text(engine["path"]) for engine in value]),
        *bundle.read_part(
            "samples", lambda value: [_require_text(s[part]) for s in value for part in ("inputs", "expected")]
        ),
        *bundle.read_part("samples", lambda value: [_require_text(s["free"]) for s in value if s["free"] is not None]),
    ]
    if strange := [path for path, count in Counter(used).items() if path not in known or count > 1]:
        raise InputError(f"the manifest has no hash of {strange[0]!r}, or uses it twice; create the bundle again")


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"it holds {constant}")


def scan_folder(root: Path) -> tuple[dict[str, int], list[str]]:
    """List the files below ``root`` without opening them.

    Empty folders are listed too, because Triton treats every folder in a repository as a model or a version.

    Returns:
        Path -> size in bytes of each regular file; and the paths of links, special files and empty folders. The path of
        an empty folder ends with "/".

    Raises:
        InputError: there are more than 100,000 files.
    """
    files: dict[str, int] = {}
    others: list[str] = []
    stack = [(root, "")]
    while stack:
        folder, prefix = stack.pop()
        with os.scandir(folder) as entries:
            listed = list(entries)
            if not listed and prefix:
                others.append(prefix)
            for entry in listed:
                path = f"{prefix}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    stack.append((Path(entry.path), f"{path}/"))
                    continue
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    files[path] = status.st_size
                else:
                    others.append(path)
                if len(files) + len(others) > _ENTRIES:
                    raise InputError(f"{root.name!r} has more than {_ENTRIES} files and is not a normdeploy bundle")
    return files, sorted(others)


def parse_files(value: Any) -> dict[str, tuple[str, int]]:
    """Parse ``files`` of the manifest.

    Returns:
        Path -> (sha256, bytes).
    """
    return {_require_text(path): (_require_text(told["sha256"]), int(told["bytes"])) for path, told in value.items()}


def _require_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value
