"""Explain why a model fails in PyTorch on its example inputs. The message names the layer, the line, and the inputs to
state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from ..model import InputSpec
from .example_call import ExampleCall, forward_signature
from .input_request import InputRequest
from .program_signature import dtype_name
from .size_conditions import describe_location, module_paths, traceback_frames
from .torch_pickles import first_line

_ADVICE = "describe its inputs with --input, and write the size instead of a name for each dim that the model fixes"


@dataclass(frozen=True)
class _FailedLayer:
    """Innermost module that was running at the failure, and its input tensor."""

    module: nn.Module
    given: torch.Tensor


def describe_failure(module: nn.Module, call: ExampleCall, wishes: InputRequest, error: Exception) -> str:
    """Build the message for a call that fails in PyTorch.

    Args:
        module: the module that was called.

    Returns:
        Inputs, place, reason and advice in one line.
    """
    head = f"{type(module).__name__}{forward_signature(module)} does not run on the inputs {_describe_tensors(call)}"
    head = (
        f"{head}{_describe_dim_sizes(call, wishes)}{describe_location(module_paths(module), traceback_frames(error))}"
    )
    layer = _find_failed_layer(module, error)
    if layer is not None and (reason := _explain_layer_failure(layer, wishes)):
        return f"{head}: the {type(layer.module).__name__} {reason}"
    detail = first_line(error, "")
    return f"{head}: {type(error).__name__}: {detail}; {_ADVICE}"


def _explain_layer_failure(layer: _FailedLayer, wishes: InputRequest) -> str:
    """Return the layer's expected input, its actual input and advice; "" if the input is not the cause of the
    failure.
    """
    given = layer.given
    module = layer.module
    if isinstance(module, nn.Linear) and given.dim() and given.shape[-1] != module.in_features:
        return (
            f"expects {module.in_features} features but got {given.shape[-1]}; pass the sizes that the model was "
            "built for with --input"
        )
    if isinstance(module, nn.Embedding) and given.is_floating_point():
        return (
            f"expects indices but got {dtype_name(given)}; pass integers and their range with --input "
            f"{_suggest_index_input(wishes, module)}"
        )
    if isinstance(module, _ConvNd) and given.dim() == len(module.kernel_size) + 2:
        return _explain_convolution_failure(module, given, wishes)
    return ""


def _explain_convolution_failure(module: _ConvNd, given: torch.Tensor, wishes: InputRequest) -> str:
    channels = module.in_channels
    if given.shape[1] == channels:
        return ""
    fault = f"expects {channels} channels in dim 1 but got the shape {list(given.shape)}"
    wish = next((wish for wish in wishes.inputs if wish.shape[-1:] and wish.shape[-1].opt == channels), None)
    if given.shape[-1] != channels or wish is None:
        return f"{fault}; pass that many with --input"
    batch, *rest, last = [dim.name or str(dim.opt) for dim in wish.shape]
    return f"{fault}: the channels are last; pass --input '{wish.name}[{','.join([batch, last, *rest])}]'"


def _suggest_index_input(wishes: InputRequest, embedding: nn.Embedding) -> str:
    """Return the text of an input of indices into the embedding's table, such as ``'ids:int64[b,s]{0:100}'``."""
    floats = [wish for wish in wishes.inputs if not wish.dtype or wish.dtype.startswith(("float", "bfloat"))]
    wish = next(iter(floats or wishes.inputs), None)
    if wish is None:
        return f"'NAME:int64[...]{{0:{embedding.num_embeddings}}}'"
    dims = ",".join(dim.name or str(dim.opt) for dim in wish.shape)
    return f"'{wish.name}:int64[{dims}]{{0:{embedding.num_embeddings}}}'"


def _find_failed_layer(module: nn.Module, error: Exception) -> _FailedLayer | None:
    names = module_paths(module)
    found = None
    for frame, _ in traceback_frames(error):
        part = frame.f_locals.get("self")
        if isinstance(part, nn.Module) and id(part) in names:
            given = frame.f_locals.get("input")
            if isinstance(given, torch.Tensor):
                found = _FailedLayer(part, given)
            else:
                found = None
    return found


def _describe_tensors(call: ExampleCall) -> str:
    return ", ".join(f"{dtype_name(leaf)}{list(leaf.shape)}" for leaf in call.tensors())


def _describe_dim_sizes(call: ExampleCall, wishes: InputRequest) -> str:
    """Return the sizes of the named dims in the example as text, such as `` (b=8, seq=16)``."""
    sizes: dict[str, int] = {}
    for leaf, wish in zip(call.tensors(), call.matched_inputs(wishes), strict=True):
        if wish is not None:
            sizes |= _sizes_by_dim(wish, leaf)
    if sizes:
        return f" ({', '.join(f'{name}={size}' for name, size in sizes.items())})"
    return ""


def _sizes_by_dim(wish: InputSpec, leaf: torch.Tensor) -> dict[str, int]:
    return {dim.name: size for dim, size in zip(wish.shape, leaf.shape, strict=True) if dim.name}
