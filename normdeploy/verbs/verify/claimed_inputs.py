"""Keeps what the file under test says of its inputs apart from what the model says.

A file's record may name values and sizes at which a wrong file is right, so it chooses nothing alone. What the model
itself takes is judged; the claimed values are tried beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import onnx

from ...graphs.declared_inputs import STRING, declared_inputs
from ...inputs.input_cases import is_floating_input
from ...model import Dim, InputSpec, LoadedModel

THE_MODEL = "the model"
_NOT_A_NAME = re.compile(r"\W")


def may_narrow(inputs: Sequence[str], dims: Sequence[str]) -> bool:
    """Return whether claimed inputs and dims state more than names: values or ranges of sizes."""
    return bool(dims) or any(mark in text for text in inputs for mark in "{=")


def merge_claims(claimed: LoadedModel, own: LoadedModel | None, label: str) -> LoadedModel:
    """Return the model with the inputs on which a file is judged.

    Args:
        claimed: the model as the record of ``label`` describes its inputs.
        own: the model as it describes them itself, None where it can't be loaded without the record.
        label: the file whose record it is.

    Returns:
        The model with its own sizes and values where they are known, with the claimed ones in `Signature.claimed` where
        they are narrower, and with whose word the inputs are in `Signature.word`.
    """
    if own is None or len(own.inputs) != len(claimed.inputs):
        word = f"the record of {label}"
        # Of integers nobody else says which values index a table; standard normal floats need no leave.
        free = tuple(replace(spec, range=None) if is_floating_input(spec) else spec for spec in claimed.inputs)
        if free != claimed.inputs:
            narrowed = claimed.inputs
        else:
            narrowed = ()
        return replace(claimed, inputs=free, claimed=narrowed, word=word)
    pairs = list(zip(own.inputs, claimed.inputs, strict=True))
    if not any(_narrows_inputs(theirs, ours) for ours, theirs in pairs):
        return claimed
    inputs = tuple(_merge_value_range(ours, theirs) for ours, theirs in pairs)
    narrowed = tuple(replace(theirs, name=ours.name) for ours, theirs in pairs)
    return replace(own, inputs=inputs, claimed=narrowed)


def _narrows_inputs(theirs: InputSpec, ours: InputSpec) -> bool:
    """Whether the claim leaves out a size or value that the model takes."""
    if theirs.mask and not ours.mask:
        return True
    if theirs.range is not None and theirs.range != ours.range and (is_floating_input(ours) or ours.range is not None):
        return True
    return len(theirs.shape) != len(ours.shape) or any(
        claim.min > dim.min or claim.max < dim.max for claim, dim in zip(theirs.shape, ours.shape, strict=True)
    )


def _merge_value_range(ours: InputSpec, theirs: InputSpec) -> InputSpec:
    """The model's input, with the claimed range of integers where the model says nothing of them."""
    if ours.range is None and not is_floating_input(ours) and theirs.dtype == ours.dtype:
        return replace(ours, range=theirs.range)
    return ours


def describe_dynamic_inputs(proto: onnx.ModelProto, recorded: Mapping[str, InputSpec]) -> list[str]:
    """Describe the inputs of a file with names for its dynamic dims, as `normdeploy.loading.input_request` reads them.

    Args:
        recorded: what the file records of its inputs; its names of dims are taken, its ranges are not.

    Returns:
        "x[batch,3,8,8]" for each input, in the file's order; [] where no dim is dynamic, or an input has no such text.
    """
    texts = []
    is_dynamic = False
    for number, stated in enumerate(declared_inputs(proto.graph)):
        spec = recorded.get(stated.name)
        if spec is None:
            dims = stated.dims
        else:
            dims = _dims_as_names(spec.shape)
        if dims is None or stated.dtype in ("", STRING):
            return []
        named = [dim if isinstance(dim, int) else _NOT_A_NAME.sub("_", dim) for dim in dims]
        named = [f"d{dim}" if isinstance(dim, str) and not dim[:1].isalpha() else dim for dim in named]
        is_dynamic |= any(isinstance(dim, str) for dim in named)
        name = _NOT_A_NAME.sub("_", stated.name)
        if not name[:1].isalpha():
            name = f"x{number}"
        texts.append(f"{name}[{','.join(map(str, named))}]")
    if is_dynamic:
        return texts
    return []


def _dims_as_names(shape: Iterable[Dim]) -> tuple[int | str, ...] | None:
    """Sizes and names of recorded dims; None where one is the sum of others."""
    dims = list(shape)
    if any(dim.terms for dim in dims):
        return None
    return tuple(dim.opt if dim.name is None else dim.name for dim in dims)


def describe_unseen_sizes(
    proto: onnx.ModelProto, label: str, inputs: Mapping[str, str], model_inputs: Sequence[InputSpec]
) -> list[str]:
    """Say at which sizes alone a file was judged that takes others.

    Args:
        inputs: the file's name of an input -> the model's, where they differ.
        model_inputs: the inputs on which it was judged.

    Returns:
        "batch=4 only" for each dynamic dim of the file that has one size in the model.
    """
    ours = {spec.name: spec for spec in model_inputs}
    seen: dict[str, None] = {}
    for stated in declared_inputs(proto.graph):
        spec = ours.get(inputs.get(stated.name, stated.name))
        if spec is None or stated.dims is None or len(stated.dims) != len(spec.shape):
            continue
        for dim, judged in zip(stated.dims, spec.shape, strict=True):
            if isinstance(dim, str) and not judged.is_dynamic:
                seen[f"{dim}={judged.opt}"] = None
    if not seen:
        return []
    return [f"at {', '.join(seen)} only; {label} takes other sizes there, which the model as given does not"]
