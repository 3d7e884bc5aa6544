"""A model that fails in PyTorch on its example inputs: which layer fails, in which line, and what to state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from .calls import Call, signature_of
from .inputs import Wish, Wishes
from .origins import paths, place, steps
from .signature import dtype_name

_ADVICE = "say what it takes with --input, and write the size of a dim that the model fixes in the place of its name"


@dataclass(frozen=True)
class _Layer:
    """The innermost module that was running, and the tensor that it was given."""

    module: nn.Module
    given: torch.Tensor


def describe_failure(module: nn.Module, call: Call, wishes: Wishes, error: Exception) -> str:
    """Return the message for a call that fails in PyTorch.

    Args:
        module: the one that ran.
    """
    head = f"{type(module).__name__}{signature_of(module)} does not run on the inputs {_shapes(call)}"
    head = f"{head}{_sizes(call, wishes)}{place(paths(module), steps(error))}"
    layer = _running(module, error)
    if layer is not None and (reason := _of_layer(layer, wishes)):
        return f"{head}: the {type(layer.module).__name__} {reason}"
    detail = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{head}: {type(error).__name__}: {detail}; {_ADVICE}"


def _of_layer(layer: _Layer, wishes: Wishes) -> str:
    """Say what a layer takes, what it is given and what to state; "" where that is not the fault."""
    given, module = layer.given, layer.module
    if isinstance(module, nn.Linear) and given.dim() and given.shape[-1] != module.in_features:
        return (
            f"takes {module.in_features} features and is given {given.shape[-1]}; state with --input the sizes for"
            " which the model was made"
        )
    if isinstance(module, nn.Embedding) and given.is_floating_point():
        return (
            f"takes indices and is given {dtype_name(given)}; state integers and their range, --input"
            f" {_ranged(wishes, module)}"
        )
    if isinstance(module, _ConvNd) and given.dim() == len(module.kernel_size) + 2:
        return _of_convolution(module, given, wishes)
    return ""


def _of_convolution(module: _ConvNd, given: torch.Tensor, wishes: Wishes) -> str:
    channels = module.in_channels
    if given.shape[1] == channels:
        return ""
    fault = f"takes {channels} channels in dim 1 and is given {list(given.shape)}"
    wish = next((wish for wish in wishes.inputs if wish.shape[-1:] and wish.shape[-1].opt == channels), None)
    if given.shape[-1] != channels or wish is None:
        return f"{fault}; state as many with --input"
    batch, *rest, last = [dim.name or str(dim.opt) for dim in wish.shape]
    return f"{fault}: the channels are last; state --input '{wish.name}[{','.join([batch, last, *rest])}]'"


def _ranged(wishes: Wishes, embedding: nn.Embedding) -> str:
    """Write an input of indices into the table: ``'ids:int64[b,s]{0:100}'``."""
    floats = [wish for wish in wishes.inputs if wish.spec().dtype.startswith(("float", "bfloat"))]
    wish = next(iter(floats or wishes.inputs), None)
    if wish is None:
        return f"'NAME:int64[...]{{0:{embedding.num_embeddings}}}'"
    dims = ",".join(dim.name or str(dim.opt) for dim in wish.shape)
    return f"'{wish.name}:int64[{dims}]{{0:{embedding.num_embeddings}}}'"


def _running(module: nn.Module, error: Exception) -> _Layer | None:
    names, found = paths(module), None
    for frame, _ in steps(error):
        part = frame.f_locals.get("self")
        if isinstance(part, nn.Module) and id(part) in names:
            given = frame.f_locals.get("input")
            found = _Layer(part, given) if isinstance(given, torch.Tensor) else None
    return found


def _shapes(call: Call) -> str:
    return ", ".join(f"{dtype_name(leaf)}{list(leaf.shape)}" for leaf in call.tensors())


def _sizes(call: Call, wishes: Wishes) -> str:
    """`` (b=8, seq=16)``: the sizes of the named dims in the example."""
    sizes: dict[str, int] = {}
    for leaf, wish in zip(call.tensors(), call.wished(wishes), strict=True):
        sizes |= _named(wish, leaf) if wish is not None else {}
    return f" ({', '.join(f'{name}={size}' for name, size in sizes.items())})" if sizes else ""


def _named(wish: Wish, leaf: torch.Tensor) -> dict[str, int]:
    return {dim.name: size for dim, size in zip(wish.shape, leaf.shape, strict=True) if dim.name}
