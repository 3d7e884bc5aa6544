"""Describe torch.export's failures in one line, with the cause, the module and line of the model, and advice."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from types import FrameType

import torch
import torch.ao.nn.quantized
from torch import nn

from ..errors import ExportError
from .module_parts import SEPARATOR, takes_image_list
from .program_signature import dtype_name, user_outputs
from .size_conditions import LONGEST, TORCH, describe_location, module_paths, traceback_frames
from .torch_pickles import first_line, join_names

_DISTRIBUTIONS = os.path.join(TORCH, "distributions") + os.sep
_PACKING = os.path.join(TORCH, "nn", "utils", "rnn.py")
_RECURRENT = os.path.join(TORCH, "nn", "modules", "rnn.py")
PACKED = (
    "packed as integers for torch's own kernels, which no file can call: pass the float model and quantize it with "
    "--quantize int8, or use fake quantization (prepare_qat) and export that model"
)
_UNKNOWN_OUTPUT = re.compile(r"Found <class '(?P<name>[^']+)'> in output")
# Matches the names of torch.ao's integer modules. torch.ao.nn.qat does not match, because its modules round in float.
_INTEGER_MODULE = re.compile(r"torch\.ao\.nn\.(intrinsic\.)?quantized\b")
# Classes into which torch.ao converts QuantStub and DeQuantStub. They have no weights.
_FLOAT_ENDS = (torch.ao.nn.quantized.Quantize, torch.ao.nn.quantized.DeQuantize)
_SHOWN = 4


# Names of functions that suppress boxes: torchvision's batched_nms, Ultralytics' non_max_suppression.
_SUPPRESSION = re.compile(r"(^|_)nms(_|$)|non_?max(imum)?_suppression", re.IGNORECASE)


def make_export_error(module: nn.Module, error: Exception) -> ExportError:
    """Make an ExportError from torch.export's failure.

    Returns:
        The error, with cause, place and advice.
    """
    name = type(module).__name__
    kind = type(error).__name__
    text = str(error)
    head = f"torch.export can't trace {name}"
    where = describe_location(module_paths(module), traceback_frames(error))
    if unknown := _UNKNOWN_OUTPUT.search(text):
        returned = unknown["name"].rpartition(".")[2]
        if returned.endswith("Cache"):
            return ExportError(
                f"{head}: its forward returns {returned}, but a file can return only tensors: call it with "
                "use_cache=False, or save the model to a folder and export that with --task text-generation-with-past"
            )
        return ExportError(
            f"{head}: its forward returns {returned}, but a file can return only tensors: return tensors, or tuples, "
            "lists and dicts of them (a dataclass is accepted after torch.export.register_dataclass)"
        )
    if any(frame.f_code.co_filename.startswith(_DISTRIBUTIONS) for frame, _ in traceback_frames(error)):
        return ExportError(
            f"{head}: a distribution validates its values{where}, but a file can't stop at a value: create it with "
            "validate_args=False"
        )
    if any(
        frame.f_code.co_filename == _PACKING or _is_packed_recurrence(frame) for frame, _ in traceback_frames(error)
    ):
        return ExportError(
            f"{head}: it packs sequences by their lengths{where}, but ONNX has no packed sequences: run the layer on "
            "the padded batch, and gather the last step of each row"
        )
    data_dependent = kind == "GuardOnDataDependentSymNode" or "data-dependent" in text
    if data_dependent and any(_SUPPRESSION.search(frame.f_code.co_name) for frame, _ in traceback_frames(error)):
        return ExportError(
            f"{head}: the number of boxes that non-maximum suppression keeps depends on the values{where}, but a file "
            f"contains no Python: run it in your program, and export the part before it"
            f"{_describe_part_before(module, error)}"
        )
    if data_dependent:
        return ExportError(
            f"{head}: the values of a tensor control the computation{where}, through an if, while, assert, int() or "
            ".item(), but a file contains no Python: use torch.where or torch.cond instead"
        )
    if kind == "UnsupportedOperatorException":
        operator = re.sub(r"^torch\.ops\.", "", first_line(error, "no reason given"))
        return ExportError(f"{head}: it does not support the operator {operator}{where}; use other operators there")
    if ".numpy()" in text:
        return ExportError(f"{head}: it calls numpy{where}, but a file can contain only torch's operators")
    return ExportError(f"{head}{where}: {kind}: {first_line(error, 'no reason given')}")


def _describe_part_before(module: nn.Module, error: Exception) -> str:
    """Name the part of the model that runs before the module that failed.

    Returns:
        Text such as ", from backbone to head: --part backbone..head"; "" if no module before it has parameters.
    """
    names = module_paths(module)
    callers = [
        names[id(frame.f_locals["self"])]
        for frame, _ in traceback_frames(error)
        if id(frame.f_locals.get("self")) in names
    ]
    failed = callers[-1] if callers else ""
    parts = list(_iter_earlier_parts(module, failed))
    if not parts:
        return ""
    if takes_image_list(module):
        return f", from {parts[0]} to {parts[-1]}: --part {parts[0]}{SEPARATOR}{parts[-1]}"
    return f", which ends with {parts[-1]}: --part {SEPARATOR}{parts[-1]}"


def _iter_earlier_parts(module: nn.Module, failed: str, prefix: str = "") -> Iterator[str]:
    """Yield the paths of the modules with parameters that are registered before a module that failed, and its parts.

    Args:
        failed: path of the module; "" for the model itself.
        prefix: path of ``module`` with a dot; "" for the model itself.
    """
    for name, part in module.named_children():
        path = f"{prefix}{name}"
        if f"{failed}.".startswith(f"{path}."):
            yield from _iter_earlier_parts(part, failed, f"{path}.")
            return
        if any(True for _ in part.parameters()):
            yield path


def refuse_integer_modules(module: nn.Module) -> None:
    """Refuse the integer modules that torch.ao makes (quantize_dynamic, convert).

    Raises:
        ExportError: the model has such modules; the message names them.
    """
    found = [
        f"{name or 'the model itself'} ({type(part).__name__})"
        for name, part in module.named_modules()
        if _INTEGER_MODULE.match(type(part).__module__)
        and not isinstance(part, _FLOAT_ENDS)
        and not name.endswith("_packed_params")
    ]
    if found:
        raise ExportError(f"torch.ao stores the weights of {join_names(found, _SHOWN)} {PACKED}")


def require_tensor_outputs(program: torch.export.ExportedProgram) -> None:
    """Refuse a program with outputs that ONNX can't have: Python numbers, texts, complex tensors, or no tensors at all.

    Raises:
        ExportError: the message names the output.
    """
    specs = user_outputs(program)
    constants = [spec.value for spec in specs if getattr(spec, "value", None) is not None]
    if constants:
        shown = f"{constants[0]!r}"[:LONGEST]
        raise ExportError(
            f"forward returns {shown} ({type(constants[0]).__name__}) alongside or instead of tensors, but a file "
            "can return only tensors: omit it, or make it a tensor"
        )
    if all(hasattr(spec, "value") for spec in specs):
        raise ExportError(
            "forward returns no tensor, so there is nothing to export: return the tensors that it computes"
        )
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    for spec in specs:
        value = values.get(spec.name)
        if isinstance(value, torch.Tensor) and value.is_complex():
            raise ExportError(
                f"forward returns a tensor of {dtype_name(value)}, but ONNX has no complex tensors: return "
                "torch.view_as_real of it"
            )


def _is_packed_recurrence(frame: FrameType) -> bool:
    """Return whether the frame belongs to a recurrent layer whose input is a packed sequence."""
    return frame.f_code.co_filename == _RECURRENT and frame.f_locals.get("batch_sizes") is not None
