"""Load the model that a verb was given.

If the verb was also given an ONNX file, the loading options that ``export`` recorded in the file are applied.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import onnx

from ...errors import InputError, LoadError, TrustError
from ...inputs.file_inputs import describe_file_inputs
from ...model import LoadedModel
from ...storage import record_signing
from ...storage.export_record import CODE, DATA, raw_record, read_record
from ...storage.memory_models import is_memory_model, to_model_proto
from ...storage.onnx_files import load_onnx, normalize_model
from ...storage.shared_weights import Weights
from ...storage.weight_serialization import share_large_weights
from ...types import PathLike, Progress
from ...verb_options import LoadKeywords
from ...zoo_sources import parse_zoo_source
from .argument_validation import has_examples

# torch takes seconds to import.
if TYPE_CHECKING:
    import torch

    from ...model import LoadedModel
    from .argument_validation import Example, Onnx
    from .export_result import ExportResult

    Source = str | os.PathLike[str] | torch.nn.Module | torch.export.ExportedProgram | ExportResult


def load_source(
    source: Source, args: Example, kwargs: Mapping[str, Any] | None, loading: LoadKeywords, shared: bool = False
) -> LoadedModel:
    """Load a model from a file, a live module or an exported program.

    Args:
        source: a file or folder, a live module, or an exported program.
        args: example arguments of a live module: one tensor or a tuple of arguments. A mapping whose keys are
            parameters of forward gives the argument of each parameter; any other mapping is the only argument.
        kwargs: example keyword arguments of a live module.
        shared: as for ``from_module``.

    Returns:
        the model; a `LoadedModel` given as ``source`` is returned unchanged.

    Raises:
        InputError: arguments or options are for another kind of source.
    """
    from ...loading import from_module, from_program, load

    # A model of several parts is read once; each of its parts is passed in already loaded.
    if isinstance(source, LoadedModel):
        return source
    if isinstance(source, str | os.PathLike):
        refuse_examples(args, kwargs, f"the file {os.fspath(source)!r}; describe a file's inputs with inputs=[...]")
        return load(os.fspath(source), **_applicable_options(loading, _OF_FILES, "a file"))
    if type(source).__name__ == "ExportedProgram":
        refuse_examples(args, kwargs, "an exported program, which already has inputs; omit them")
        return from_program(
            cast("torch.export.ExportedProgram", source),
            **_applicable_options(loading, _OF_PROGRAMS, "an exported program"),
        )
    return from_module(
        cast("torch.nn.Module", source),
        args,
        kwargs,
        shared=shared,
        **_applicable_options(loading, _OF_MODULES, "a live module"),
    )


_OF_PROGRAMS = {"inputs", "dims", "eval"}
_OF_MODULES = {*_OF_PROGRAMS, "dynamic_shapes", "part"}
_OF_FILES = {*_OF_PROGRAMS, "model", "model_args", "key", "trust", "imports", "code", "task", "part"}


def _applicable_options(loading: LoadKeywords, known: set[str], source: str) -> dict[str, Any]:
    """Return the options that are in ``known``, and refuse every other option that has a value.

    Raises:
        InputError: an option is not for this kind of source.
    """
    if foreign := sorted(name for name, value in loading.items() if name not in known and value):
        raise InputError(f"{foreign[0]} does not apply to {source}, which accepts {', '.join(sorted(known))}; omit it")
    return {name: value for name, value in loading.items() if name in known}


def refuse_examples(args: Example, kwargs: Mapping[str, Any] | None, source: str) -> None:
    """Refuse example arguments for a source that does not take them.

    Args:
        source: description of the source for the message.

    Raises:
        InputError: example arguments were given.
    """
    if has_examples(args, kwargs):
        raise InputError(f"example arguments were passed with {source}")


def is_live_module(source: object) -> bool:
    """Check whether ``source`` is a module in memory.

    Returns:
        True for an object with ``named_modules`` that is not a path or a `LoadedModel`.
    """
    return not isinstance(source, str | os.PathLike | LoadedModel) and hasattr(source, "named_modules")


def load_as_recorded(
    source: Source, args: Example, kwargs: Mapping[str, Any] | None, loading: LoadKeywords, given: LoadKeywords
) -> LoadedModel:
    """Load a model as `load_source` does.

    If loading fails and recorded options are in use, the error names the record and these options.

    Args:
        loading: all options to load with: the user's and the recorded options of an ONNX file.
        given: the options that the user gave.

    Returns:
        the model.

    Raises:
        InputError: arguments or options do not fit the source.
        LoadError: the model can't be loaded.
    """
    recorded = {name: value for name, value in loading.items() if value and value != given.get(name)}
    try:
        return load_source(source, args, kwargs, loading)
    except (InputError, LoadError) as error:
        if not recorded or isinstance(error, TrustError) or (isinstance(error, LoadError) and "key" not in recorded):
            raise
        options = ", ".join(f"{name}={value!r}" for name, value in sorted(recorded.items()))
        raise type(error)(
            f"{error}. The ONNX file's export record contains {options}: pass the value for this model instead"
        ) from error


def _require_inputs(proto: onnx.ModelProto, label: str, loading: LoadKeywords) -> None:
    """Refuse inputs and dims that an ONNX file does not have.

    Raises:
        InputError: an input or dim is not in the file.
    """
    if loading.get("inputs") or loading.get("dims"):
        describe_file_inputs(proto, loading.get("inputs", ()), loading.get("dims", ()), label)


def open_onnx_source(
    source: Source | Onnx,
    args: Example = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loading: LoadKeywords,
    custom_translation_table: Mapping[Any, Any] | None = None,
    progress: Progress | None = None,
) -> tuple[onnx.ModelProto, Weights, bool]:
    """Open an ONNX model, or export a PyTorch model to one.

    Returns:
        (model, its large weights, True if the source was already ONNX). If the source was not ONNX, the model is an
        export without any rewrite, and the caller must still rewrite it.
    """
    if is_memory_model(source):
        proto = normalize_model(to_model_proto(source))
        _require_inputs(proto, proto.graph.name or "the model", loading)
        return *share_large_weights(proto), True
    if isinstance(source, str | os.PathLike) and is_onnx_file(source):
        proto = load_onnx(source)
        _require_inputs(proto, os.path.basename(source), loading)
        return *share_large_weights(proto), True
    from ...exporting.exporter import export_without_weights

    model = load_source(cast("Source", source), args, kwargs, loading, shared=True)
    return *export_without_weights(model, custom_translation_table=custom_translation_table, progress=progress), False


def recall_loading(source: Source, onnx_path: PathLike, given: LoadKeywords) -> tuple[LoadKeywords, list[str]]:
    """Complete ``given`` with the loading options that ``export`` recorded in an ONNX file.

    Options that run no code (`storage.export_record.DATA`) are always followed, even from an unsigned file. Options
    that may run code are followed only if they are signed by this user or team. The signature must also cover the model
    file and the modules that it imports (`storage.record_signing`).

    Returns:
        (completed options, notes).

    Raises:
        GraphError: the file is not valid ONNX, or its record is malformed.
        InputError: recorded options may run code and are not signed, or a team's key can't be used.
    """
    from ...loading.file_kinds import hash_model_files
    from ...loading.hub import resolve_model_path

    if isinstance(source, str | os.PathLike):
        source = resolve_model_path(os.fspath(source))
    proto = load_onnx(onnx_path, external_data=False)
    record = read_record(proto)
    if not record or not isinstance(source, str | os.PathLike):
        return given, []
    if not os.path.exists(source) and parse_zoo_source(source) is None:
        return given, []
    name = os.fspath(onnx_path)
    # The recorded hash is "" if a live module or an ONNX file was exported.
    same = record["model"].get("sha256") in ("", hash_model_files(Path(source)))
    notes = [] if same else [f"{name} was exported from another file, not {os.fspath(source)}"]
    load, strange = _drop_foreign_options(
        {n: value for n, value in record["load"].items() if value and not given.get(n)}, Path(source), given
    )
    notes += [f"{name} records {oddity}" for oddity in strange]
    data = {n: value for n, value in load.items() if n in DATA}
    code = {n: value for n, value in load.items() if n in CODE}
    trust = bool(record["export"].get("trust")) and not given.get("trust")
    followed: dict[str, Any] = dict(data)
    if code or trust:
        signed, why = record_signing.find_signed_modules(raw_record(proto), onnx_path)
        if not record["model"].get("sha256") or not same:
            why = f"{os.fspath(source)!r} is not the file that was exported"
        elif signed is not None and (file := record_signing.find_changed_module(signed)):
            why = f"the module {file!r} is not the one that was signed"
        if not why:
            # If the user passes options that run code, modules are imported from the working directory. Otherwise they
            # are imported from the signed copies.
            bare = not any(given.get(n) for n in (*CODE, "trust"))
            followed |= {**code, "trust": trust or given.get("trust", False), **({"code": signed} if bare else {})}
        elif code:
            oddity = ", ".join(f"{n}={value!r}" for n, value in sorted(code.items()))
            raise InputError(
                f"{name!r} records that its model was loaded with {oddity}, which may run code and is ignored"
                f" because {why}; if you trust these options, pass them here"
            )
    if data and "code" not in followed:
        notes.append(f"as {name} records: {', '.join(f'{n}={value!r}' for n, value in sorted(data.items()))}")
    return {**given, **followed}, notes  # type: ignore[typeddict-item]


def _drop_foreign_options(
    load: Mapping[str, Any], source: Path, given: LoadKeywords
) -> tuple[dict[str, Any], list[str]]:
    """Drop recorded options that do not apply to this model.

    Such options exist if the ONNX file was exported from a model of another format.

    Returns:
        (remaining options, a reason for each dropped group).
    """
    from ...loading.file_kinds import FileKind, detect_kind
    from ...loading.input_request import dynamic_dim_names, parse_input_request

    kind = None
    if load.keys() & {"task", "part", "key", "model"}:
        if source.suffix == ".py":
            kind = FileKind.PYTHON
        else:
            kind = detect_kind(source)
    of_folder = kind is FileKind.HUGGINGFACE
    has_parts = kind is not FileKind.PROGRAM
    of_pickle = kind in (FileKind.PICKLE, FileKind.LEGACY_PICKLE)
    # Files of these kinds contain the model's code, so the option "model" is not needed. A trusted pickle also contains
    # the code.
    is_whole = kind in (FileKind.PROGRAM, FileKind.TORCHSCRIPT, FileKind.PYTHON, FileKind.ZOO) or (
        of_pickle and bool(given.get("trust"))
    )
    meant = {"task": of_folder, "part": has_parts, "key": of_pickle, "model": not is_whole}
    left = {n: value for n, value in load.items() if meant.get(n, True)}
    strange = list[str]()
    if foreign := [f"{n}={load[n]!r}" for n in load if n not in left]:
        strange.append(f"{', '.join(foreign)}, which is ignored: {source} is of the kind {kind}")
    # The inputs that the user describes may name their dims differently than the record does.
    if (dims := left.get("dims")) and given.get("inputs"):
        named = set(dynamic_dim_names(parse_input_request(given["inputs"], ()).inputs))
        left["dims"] = [text for text in dims if text.partition("=")[0].strip() in named]
        if other := [text for text in dims if text not in left["dims"]]:
            strange.append(
                f"dims={other}, which is ignored: the inputs that you passed have the dynamic dims {sorted(named)}"
            )
    return {n: value for n, value in left.items() if value}, strange


def is_onnx_file(path: PathLike) -> bool:
    """Detect an ONNX file by its name or its first bytes.

    Writers of protobuf put the field ir_version first, so an ONNX file starts with the byte 0x08. A safetensors file
    may start with the same byte, but its first 8 bytes are a length and the next byte is "{".

    Returns:
        True for a name ending in ".onnx" or a file that starts like an ONNX model.
    """
    if os.fspath(path).endswith(".onnx"):
        return True
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        head = file.read(9)
    return head.startswith(b"\x08") and head[8:] != b"{"
