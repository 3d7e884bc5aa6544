"""Copy a model's files into a bundle, under fixed names.

ONNX files and engines become hard links if the file system allows it; otherwise they are copied. Weights outside the
ONNX file are always copied. With a hard link, onnx's checker would refuse the weights ("potential hardlink attack"),
and would also refuse the weights of the user's file.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from ...errors import InputError
from ...runtimes.runtime_cache import default_cache_path
from ...runtimes.trt_runner import read_runtime
from ...storage.onnx_files import iter_tensors
from ...types import PathLike
from .triton_config import DEFAULT_FILES, safe_model_name

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


@dataclass(frozen=True)
class PackagedEngine:
    """Engine of a bundle.

    Attributes:
        path: path that the user gave; after the copy, path in the bundle.
        capability: compute capability; "" if the user did not state it.
    """

    path: str
    runtime: str
    capability: str

    @property
    def is_served(self) -> bool:
        """Return whether Triton can load the engine. Triton's backend loads engines of TensorRT, but not of
        TensorRT-RTX.
        """
        return self.runtime == "tensorrt"


def parse_engines(given: Sequence[PathLike]) -> list[PackagedEngine]:
    """Parse engines from paths and from texts such as "8.6=a.plan".

    Returns:
        Engines with absolute paths.

    Raises:
        InputError: a file is missing or is not an engine. With several TensorRT engines: a compute capability is
            missing or repeated.
    """
    engines = []
    for entry in given:
        text = os.fspath(entry)
        match = re.match(r"(\d+\.\d)=", text)
        if match:
            capability = match[1]
        else:
            capability = ""
        if match:
            path = text[len(capability) + 1 :]
        else:
            path = text
        engines.append(PackagedEngine(os.path.realpath(path), read_runtime(Path(path)), capability))
    served = [e.capability for e in engines if e.is_served]
    if len(served) > 1 and ("" in served or len(set(served)) < len(served)):
        raise InputError(
            f"with {len(served)} TensorRT engines, Triton must know the GPU of each; the compute capabilities"
            f" are {[c or '?' for c in served]}: write --engine 8.6=FILE, each compute capability once"
        )
    return engines


def copy_engines(engines: Sequence[PackagedEngine], served: Path, aside: Path) -> list[PackagedEngine]:
    """Put the engines of TensorRT into ``served``. Put the engines of TensorRT-RTX and their runtime caches into
    ``aside``.

    Returns:
        The engines with their paths in the bundle.
    """
    placed = []
    for index, engine in enumerate(engines):
        if engine.is_served:
            if engine.capability:
                name = f"sm{engine.capability.replace('.', '')}.plan"
            else:
                name = DEFAULT_FILES["tensorrt"]
        else:
            name = f"{index}_{safe_model_name(Path(engine.path).stem)}.engine"
        target = link_or_copy(Path(engine.path), (served if engine.is_served else aside) / name)
        if not engine.is_served and (cache := default_cache_path(engine.path)).is_file():
            link_or_copy(cache, default_cache_path(target))
        placed.append(PackagedEngine(target.relative_to(aside.parent).as_posix(), engine.runtime, engine.capability))
    return placed


def copy_onnx(path: Path, proto: onnx.ModelProto, folder: Path) -> Path:
    """Put the ONNX file and its weights into ``folder``.

    If the files of weights have plain names in the folder of the ONNX file, the ONNX file is copied byte for byte.
    Otherwise (subfolders, unusual characters) the files of weights get new names, and the ONNX file is written with
    these names. So text from the file never becomes a path.

    Args:
        proto: the file without its weights, as read by ``load_onnx``, which has checked that the files of weights are
            inside the folder.

    Returns:
        The path of the ONNX file in ``folder``.
    """
    target = folder / DEFAULT_FILES["onnxruntime"]
    entries = [
        e
        for t in iter_tensors(proto)
        if t.data_location == onnx.TensorProto.EXTERNAL
        for e in t.external_data
        if e.key == "location"
    ]
    locations = list(dict.fromkeys(e.value for e in entries))
    if all(_PLAIN.fullmatch(location) and location != target.name for location in locations):
        link_or_copy(path, target)
        for location in locations:
            shutil.copyfile(path.parent / location, folder / location)
        return target
    names = {location: f"weights_{index}.data" for index, location in enumerate(locations)}
    for entry in entries:
        entry.value = names[entry.value]
    folder.mkdir(parents=True, exist_ok=True)
    target.write_bytes(proto.SerializeToString())
    for location, name in names.items():
        shutil.copyfile(path.parent / location, folder / name)
    return target


def link_or_copy(source: Path, target: Path) -> Path:
    """Make ``target`` a hard link to ``source``, or a copy if linking fails.

    Returns:
        ``target``.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    real = os.path.realpath(source)
    try:
        os.link(real, target)
    except OSError:
        # Linking fails if the target is on another file system, if the file system has no links, or if the file belongs
        # to another user.
        shutil.copyfile(real, target)
    return target
