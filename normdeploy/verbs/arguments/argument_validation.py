"""Validate and normalize a verb's arguments before it starts work.

``take_fields_as_arguments`` turns a function into a verb. Every verb then accepts:

- a single value where it takes a sequence, such as ``dims="batch=1:8:64"``;
- a result, or an ONNX model in memory (`normdeploy.storage.memory_models`), where it takes a file;
- every common name of a dtype.
"""

from __future__ import annotations

import functools
import inspect
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, cast

from onnx import ModelProto

from ...dtypes import half_precision_of
from ...errors import InputError, NormdeployError
from ...option_values import CALIBRATORS, FUSES, LIBRARIES, OPSETS, PROVIDERS, QUANTIZE, RUNTIMES
from ...other_words import COMMON_ARGUMENTS, ArgumentWord, translate_arguments
from ...storage.file_replacement import resolve_writable_path
from ...storage.memory_models import is_memory_model
from ...storage.onnx_files import save_onnx
from ...types import PathLike
from ...verb_options import LoadKeywords
from .export_result import ExportResult, as_sequence, resolve_onnx, resolve_result

# torch takes seconds to import.
if TYPE_CHECKING:
    import onnx_ir
    import torch

    Example = torch.Tensor | Sequence[Any] | Mapping[str, Any]

Onnx: TypeAlias = "PathLike | ModelProto | onnx_ir.Model | torch.onnx.ONNXProgram | bytes | ExportResult"
"""ONNX file, model in memory with its weights (`normdeploy.storage.memory_models`), or export result."""


_LEAST = {
    "seeds": 1,
    "rounds": 1,
    "threads": 1,
    "max_elements": 1,
    "instances": 1,
    "generate": 1,
    "seed": 0,
    "device": 0,
    "compare_limit": 0,
}
_SEVERAL = frozenset(
    {
        *("sources", "files", "engines", "runners", "calibrate", "compute_capabilities", "profiles", "fail_on"),
        *("onnx_files", "profile_json"),
        *("dims", "imports", "keep_float", "prompts", "prompt_ids"),
    }
)
_OPTIONAL = frozenset({"provider", "quantize", "calibration"})
_LOADING = frozenset(LoadKeywords.__annotations__)

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


def take_fields_as_arguments(
    call: Callable[P, T], *, onnx: str = "", words: Sequence[ArgumentWord] = ()
) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """Turn a function of one record into a verb whose parameters are the fields of the record.

    The verb validates and normalizes its arguments before it creates the record.

    Args:
        call: dataclass that the function takes as its only argument.
        onnx: name of the parameter that takes ONNX files. Models in memory, including the models of results, are
            written to a temporary folder for the duration of the call. If the parameter "source" is a result, it is
            replaced by the model that was exported or optimized and by the example arguments of that model.
        words: other names of the verb's parameters, in addition to ``COMMON_ARGUMENTS``.

    Returns:
        a decorator for the function.
    """
    signature = inspect.signature(call)

    def wrap_function(function: Callable[[T], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call_with_record(*args: P.args, **kwargs: P.kwargs) -> R:
            named = translate_arguments(kwargs, signature.parameters, (*words, *COMMON_ARGUMENTS))
            try:
                given = signature.bind(*args, **named).arguments
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            _move_output_path(given, signature)
            _require_keywords(given)
            for name in given.keys() - {"kwargs"}:
                if isinstance(signature.parameters[name].default, bool) and not isinstance(given[name], bool):
                    raise InputError(f"{name} is {given[name]!r}; pass True or False")
                given[name] = _normalize_option(name, given[name])
            # The default () means that this verb describes its inputs by texts. Verbs with another default take arrays.
            if isinstance(given.get("inputs"), str) and signature.parameters["inputs"].default == ():
                given["inputs"] = [given["inputs"]]
            if onnx and "args" in signature.parameters:
                loading = {name: given.pop(name) for name in _LOADING & given.keys()}
                given["loading"] = loading
                _fill_in_from_result(given, onnx)
                given |= given.pop("loading")
                if "source" in given:
                    given["source"] = resolve_onnx(given["source"])
            elif "source" in given and onnx != "source":
                given["source"] = resolve_result(given["source"])
            with ExitStack() as stack:
                if onnx in given:
                    given[onnx] = write_to_disk(given[onnx], stack)
                return function(cast("Any", call)(**given))

        returned = inspect.signature(function).return_annotation
        call_with_record.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
        return call_with_record

    return wrap_function


def _move_output_path(given: dict[str, Any], signature: inspect.Signature) -> None:
    """Take a path instead of ``kwargs`` as the output file, which is the third argument of torch.onnx.export."""
    path = given.get("kwargs")
    if isinstance(path, str | os.PathLike) and "output" in signature.parameters and "output" not in given:
        given["output"] = given.pop("kwargs")


def _require_keywords(given: Mapping[str, Any]) -> None:
    """Check that ``kwargs`` is a mapping.

    Raises:
        InputError: ``kwargs`` is not a mapping.
    """
    if not isinstance(keywords := given.get("kwargs") or {}, Mapping):
        raise InputError(
            f"kwargs is {keywords!r}; pass a mapping of forward's keyword arguments, and the output file as output=…"
        )


def _normalize_option(name: str, value: Any) -> Any:
    """Validate the value of one option and normalize its spelling.

    Returns:
        the normalized value. A single value is wrapped in a list if the option takes several.

    Raises:
        InputError: the value is invalid.
    """
    if name == "precision":
        return half_precision_of(value)
    for choices, wanted in (
        (RUNTIMES, "runtime"),
        (LIBRARIES, "library"),
        (FUSES, "fuse"),
        (PROVIDERS, "provider"),
        (QUANTIZE, "quantize"),
        (CALIBRATORS, "calibration"),
    ):
        if name == wanted and value not in choices and (value is not None or name not in _OPTIONAL):
            # The options in _OPTIONAL also accept None: the verb then chooses a value that fits the file, or none.
            raise InputError(f"unknown {name} {value!r}; choose one of {', '.join(choices)}")
    if name == "opset" and value is not None and (type(value) is not int or value not in OPSETS):
        raise InputError(
            f"opset {value!r} can't be written; choose one of {OPSETS.start} to {OPSETS.stop - 1} (the"
            " default, 21, runs in every runtime)"
        )
    if name in _LEAST and value is not None and (type(value) is not int or value < _LEAST[name]):
        raise InputError(f"{name} is {value!r}; pass a whole number of {_LEAST[name]} or more")
    if name == "dims" and isinstance(value, Mapping):
        raise InputError(f"dims is {value!r}; pass texts, dims=['batch=1:8:64']")
    if name == "fail_on" and isinstance(value, str):
        return [rule.strip() for rule in value.split(",")]
    if name not in _SEVERAL or value is None or (name == "profiles" and isinstance(value, Mapping)):
        return value
    if isinstance(value, Iterator | Set):
        return value
    return as_sequence(value)


def _fill_in_from_result(given: dict[str, Any], onnx: str) -> None:
    """If the source is a result, replace it by the model that was exported or optimized.

    The result itself becomes the first ONNX file of the verb. ``given`` is changed in place; its loading options
    override the options of the result.

    Raises:
        InputError: the result has no origin, or example arguments were given besides the result's own.
    """
    result = given.get("source")
    if not isinstance(result, ExportResult):
        return
    origin = result.origin
    if origin is None:
        raise InputError("this result does not record its model; pass the model first, then the result")
    if has_examples(given.get("args", ()), given.get("kwargs")):
        raise InputError(
            "the result was made with its own example arguments, and others were passed; pass the model"
            " instead of the result"
        )
    loading = {**origin.loading, **given.get("loading", {})}
    given |= {"source": origin.source, "args": origin.args, "kwargs": origin.kwargs, "loading": loading}
    if onnx == "files":
        given[onnx] = [result, *(f for f in given.get(onnx, ()) if f is not result and f != result.path)]
    else:
        given.setdefault(onnx, result)


def has_examples(args: Example, kwargs: Mapping[str, Any] | None) -> bool:
    """Check whether example arguments were given.

    Returns:
        True for keyword arguments, a tensor, or a non-empty sequence or mapping.
    """
    # A tensor has no single truth value, so test its type first.
    return bool(kwargs) or not isinstance(args, Sequence | Mapping) or bool(args)


def require_writable_output(output: PathLike, source: object) -> None:
    """Check before any work that the output can be written and is not the input.

    Raises:
        NormdeployError: the output can't be written, or is the same file as ``source``.
    """
    target = resolve_writable_path(output)
    if isinstance(source, str | os.PathLike) and os.path.realpath(source) == os.fspath(target):
        raise NormdeployError(
            f"the output {os.fspath(output)!r} would overwrite the input {os.fspath(source)!r}; choose another"
            " name with -o"
        )


def write_to_disk(value: Any, stack: ExitStack) -> Any:
    """Write models in memory to a temporary folder.

    ``stack`` deletes the folder when it closes.

    Args:
        value: a file, result or model, or several.

    Returns:
        the path of each model; other values are returned unchanged.

    Raises:
        GraphError: as for ``resolve_onnx``.
    """

    def path_of(item: Any) -> Any:
        item = resolve_onnx(item)
        if not isinstance(item, ModelProto):
            return item
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        save_onnx(item, Path(folder) / "model.onnx")
        return Path(folder) / "model.onnx"

    if isinstance(value, Iterable) and not isinstance(value, str) and not is_memory_model(value):
        return [path_of(item) for item in value]
    return path_of(value)
