"""What a verb is given: a model in whatever form, how it is to be loaded, and where the result goes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import onnx

from .errors import InputError, NormdeployError
from .storage.atomic import writable
from .storage.files import load_onnx

if TYPE_CHECKING:  # torch takes seconds to import
    import torch

    from .model import Model

Progress = Callable[[str, int, int], None]
PathLike = str | os.PathLike[str]


class Loading(TypedDict, total=False):
    """How to load a model; ``normdeploy.loading.load`` says what each means, ``from_module`` which of them a live module takes."""

    model: str | None
    model_args: Mapping[str, Any] | None
    key: str | None
    trust: bool
    imports: Sequence[str]
    inputs: Sequence[str]
    dims: Sequence[str]
    eval_mode: bool
    dynamic_shapes: Any


def loaded(source: PathLike | torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, loading: Loading) -> Model:
    from .loading import from_module, load

    if not isinstance(source, str | os.PathLike):
        return from_module(source, args, kwargs, **loading)  # type: ignore[misc]  # it refuses what only files have
    if args or kwargs:
        raise InputError(f"example arguments were given with the file {os.fspath(source)!r}; describe a file's inputs with inputs=[...]")
    return load(os.fspath(source), **loading)  # type: ignore[misc]


def opened(
    source: PathLike | onnx.ModelProto | torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loading: Loading,
    progress: Progress | None = None,
) -> tuple[onnx.ModelProto, bool]:
    """The ONNX model that is meant, and whether it is one already: nobody deploys the raw export of a PyTorch model."""
    if isinstance(source, onnx.ModelProto):
        return source, True
    if isinstance(source, str | os.PathLike) and is_onnx(source):
        return load_onnx(source), True
    from .exporter import to_onnx

    return to_onnx(loaded(source, args, kwargs, loading), progress=progress), False


def remembered_by_any(source: PathLike | torch.nn.Module, files: Sequence[PathLike], given: Loading) -> tuple[Loading, list[str]]:
    """``remembered`` by the first of the ONNX files whose record may be followed; the refusal of another does not matter then.

    Raises:
        GraphError, InputError: as ``remembered``; or the ONNX file was given first and the model behind it.
    """
    from .runtimes.trt import is_engine

    if isinstance(source, str | os.PathLike) and os.path.isfile(source) and is_onnx(source):
        model = next((file for file in files if os.path.isfile(file) and not is_onnx(file) and not is_engine(Path(file))), None)
        order = f"give {os.fspath(model)!r} first and it second" if model is not None else "give that first, and this file behind it"
        raise InputError(f"{os.fspath(source)!r} is an ONNX file where the PyTorch model that it was made from is wanted; {order}")
    refused, notes = None, []
    for file in files:
        if not is_engine(Path(file)):
            try:
                loading, said = remembered(source, file, given)
            except InputError as error:
                refused = refused or error
                continue
            notes += said
            if loading is not given:
                return loading, notes
    if refused is not None:
        raise refused
    return given, notes


def remembered(source: PathLike | torch.nn.Module, onnx_path: PathLike, given: Loading) -> tuple[Loading, list[str]]:
    """``given`` completed by what the ONNX file recorded at its export, and notes.

    Raises:
        GraphError: the file is no valid ONNX, or its record is malformed.
        InputError: flags are recorded, but not by this user for this model file: they are not followed, since some of them run code.
    """
    from .loading.kinds import sha256
    from .storage.record import recorded

    record = recorded(load_onnx(onnx_path, external_data=False))
    if not record or not isinstance(source, str | os.PathLike) or not os.path.exists(source):
        return given, []
    same = record["model"].get("sha256") == sha256(Path(source))
    stated = {name for name, value in given.items() if value}
    if record["signed"] and same:
        flags = {**record["load"], "trust": record["export"].get("trust", False)}
        return {**given, **{name: value for name, value in flags.items() if name not in stated}}, []  # type: ignore[typeddict-item]
    missing = {name: value for name, value in record["load"].items() if name not in stated}
    if missing:
        said = ", ".join(f"{name}={value!r}" for name, value in sorted(missing.items()))
        why = (
            "it was exported on another machine or by another user" if same else f"{os.fspath(source)!r} is not the file that was exported"
        )
        raise InputError(
            f"{os.fspath(onnx_path)!r} says that its model was loaded with {said}, which is not followed because {why}; "
            "give these here, if you trust them"
        )
    return given, [] if same else [f"{os.fspath(onnx_path)} was exported from another file than {os.fspath(source)}"]


def is_onnx(path: PathLike) -> bool:
    """Told from the name, or from the first field that writers of protobuf give a model (safetensors start with a length)."""
    if os.fspath(path).endswith(".onnx"):
        return True
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        head = file.read(9)
    return head.startswith(b"\x08") and head[8:] != b"{"


def check_output(output: PathLike, source: object) -> None:
    """Before any work: the output can be written, and is not the input."""
    target = writable(output)
    if isinstance(source, str | os.PathLike) and os.path.realpath(source) == os.fspath(target):
        raise NormdeployError(
            f"the output {os.fspath(output)!r} is the input {os.fspath(source)!r}, which would be lost; give another name with -o"
        )
