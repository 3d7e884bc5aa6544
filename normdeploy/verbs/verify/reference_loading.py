"""Load the reference of a comparison: a PyTorch model with options that the files recorded, or an ONNX model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import onnx

from ...errors import ExportError, InputError, LoadError
from ...inputs.file_inputs import read_recorded_inputs
from ...model import LoadedModel
from ...runtimes.trt_runner import is_engine
from ...storage.image_metadata import read_image_inputs
from ...storage.onnx_files import load_onnx
from ...types import PathLike
from ...verb_options import ImageInputOptions, LoadKeywords
from ..arguments.argument_validation import has_examples
from ..arguments.model_source import (
    is_live_module,
    is_onnx_file,
    load_as_recorded,
    load_source,
    recall_loading,
    refuse_examples,
)
from .claimed_inputs import describe_dynamic_inputs, may_narrow, merge_claims

if TYPE_CHECKING:
    from ..arguments.argument_validation import Example
    from ..arguments.model_source import Source
    from .reference_models import Original


def load_original(
    source: Any,
    files: Sequence[PathLike],
    args: Example,
    kwargs: Mapping[str, Any] | None,
    loading: LoadKeywords,
    *,
    own_code: bool = False,
    images: ImageInputOptions | None = None,
) -> tuple[Original, list[str]]:
    """Load the model that files are compared with: a PyTorch model, or an ONNX model given instead.

    Args:
        own_code: True if the user names functions. They need ``trust``, whatever the model is.
        images: the user's options for images.

    Returns:
        (model, notes).

    Raises:
        InputError: options for a PyTorch model were given with an ONNX model.
        NormdeployError: as for `load_judged_model`.
    """
    from .image_references import prepare_reference
    from .reference_models import is_ort_session, open_original

    if isinstance(source, str | os.PathLike):
        path = source
    else:
        path = None
    if (
        isinstance(source, onnx.ModelProto)
        or is_ort_session(source)
        or (path is not None and _is_used_as_model(path, files))
    ):
        refuse_examples(args, kwargs, "an ONNX model as the reference; omit them")
        fitting = {"inputs", "dims"} | ({"trust"} if own_code else set())
        if given := sorted(name for name, value in loading.items() if value and name not in fitting):
            raise InputError(
                f"{', '.join(given)}: applies to a PyTorch model, but the reference is an ONNX model; omit it"
            )
        return prepare_reference(
            open_original(source, loading.get("inputs", ()), loading.get("dims", ())), files, images
        )
    if own_code and path is None:
        # A model in memory runs no code of a file, so loading has no such option.
        loading = cast("LoadKeywords", {name: value for name, value in loading.items() if name != "trust"})
    return load_judged_model(source, files, args, kwargs, loading, images)


def load_judged_model(
    source: Source,
    files: Sequence[PathLike],
    args: Example,
    kwargs: Mapping[str, Any] | None,
    given: LoadKeywords,
    images: ImageInputOptions | None = None,
) -> tuple[LoadedModel, list[str]]:
    """Load the PyTorch model with which ``files`` are compared.

    The export records of the files complete the given options. If a record restricts the sizes or values that the model
    itself accepts, the model's own inputs are used, and the claimed inputs are tried in addition
    (`verify.claimed_inputs`). A live module without given dims is traced with the dynamic dims of the files, if it runs
    with them. The model takes the images that the files take (`verify.image_references`).

    Returns:
        (model, notes).

    Raises:
        NormdeployError: as for ``recall_from_any`` and ``load_source``.
    """
    from .image_references import prepare_reference

    model, notes = _load_claimed_model(source, files, args, kwargs, given)
    prepared, more = prepare_reference(model, files, images)
    return cast("LoadedModel", prepared), [*notes, *more]


def _load_claimed_model(
    source: Source, files: Sequence[PathLike], args: Example, kwargs: Mapping[str, Any] | None, given: LoadKeywords
) -> tuple[LoadedModel, list[str]]:
    """Load the model with the options and claims of the files' records, before its images are prepared."""
    followed, notes = recall_from_any(source, files, given)
    if is_live_module(source) and not any(given.get(name) for name in ("inputs", "dims", "dynamic_shapes")):
        wider = _trace_with_file_dims(source, files, args, kwargs, given)
        if wider is not None:
            return wider, [*notes, *wider.notes]
    model = load_as_recorded(source, args, kwargs, followed, given)
    notes += model.notes
    claims: LoadKeywords = {}
    for name in ("inputs", "dims"):
        if followed.get(name) and not given.get(name):
            claims[name] = followed[name]  # type: ignore[literal-required]
    if not may_narrow(claims.get("inputs", ()), claims.get("dims", ())):
        return model, notes
    label = next((os.path.basename(file) for file in files if not is_engine(file)), "the file")
    bare: LoadKeywords = {**followed}
    for name in claims:
        bare[name] = given.get(name, ())  # type: ignore[literal-required]
    try:
        own = load_source(source, args, kwargs, bare)
    except (InputError, LoadError, ExportError):
        # A file of weights, or a module without a program, does not describe its inputs and can't be loaded alone.
        own = None
    return merge_claims(model, own, label), notes


def _trace_with_file_dims(
    source: Source, files: Sequence[PathLike], args: Example, kwargs: Mapping[str, Any] | None, given: LoadKeywords
) -> LoadedModel | None:
    """Trace a live module with the dynamic dims of the first ONNX file.

    Returns:
        the model; None if the file has no dynamic dims or the trace fails.
    """
    for file in files:
        if is_engine(file) or not has_examples(args, kwargs):
            continue
        proto = load_onnx(file, external_data=False)
        texts = describe_dynamic_inputs(proto, read_recorded_inputs(proto), read_image_inputs(proto))
        try:
            if texts:
                return load_source(source, args, kwargs, {**given, "inputs": texts})
            return None
        except (InputError, LoadError, ExportError):
            return None
    return None


def recall_from_any(source: Source, files: Sequence[PathLike], given: LoadKeywords) -> tuple[LoadKeywords, list[str]]:
    """Complete the loading options by the first ONNX file whose record may be followed (`recall_loading`).

    A file whose record is refused is skipped if a later file's record is followed.

    Returns:
        (completed options, notes). The options are unchanged if no record adds an option.

    Raises:
        GraphError: as for ``recall_loading``.
        InputError: as for ``recall_loading``, or the ONNX file was given before its model.
    """
    if isinstance(source, str | os.PathLike) and os.path.isfile(source) and is_onnx_file(source):
        model = next(
            (file for file in files if os.path.isfile(file) and not is_onnx_file(file) and not is_engine(file)), None
        )
        if model is not None:
            order = f"pass {os.fspath(model)!r} first and the ONNX file second"
        else:
            order = "pass the model first, then this file"
        raise InputError(
            f"{os.fspath(source)!r} is an ONNX file, but the PyTorch model that it was exported from is"
            f" expected; {order}"
        )
    refused = None
    notes = []
    for file in files:
        if not is_engine(file):
            try:
                loading, remarks = recall_loading(source, file, given)
            except InputError as error:
                refused = refused or error
                continue
            notes += remarks
            if loading != given:
                return loading, notes
    if refused is not None:
        raise refused
    return given, notes


def _is_used_as_model(source: PathLike, files: Sequence[PathLike]) -> bool:
    """Return whether ``source`` is an ONNX file that is meant as the reference: there is no model among the files."""
    if not os.path.isfile(source) or not is_onnx_file(source):
        return False
    return all(
        not os.path.exists(file) or (os.path.isfile(file) and (is_onnx_file(file) or is_engine(file))) for file in files
    )
