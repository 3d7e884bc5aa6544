"""Separate the input ranges that a tested file claims from those that the model declares.

The export record of a file may claim that the model accepts only values and sizes at which a wrong file happens to be
right. Therefore a file is judged on the inputs that the model itself accepts, and claimed values are tried in addition.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import onnx

from ...graphs.declared_inputs import STRING, declared_inputs
from ...image_input import ImageInput
from ...inputs.input_cases import is_floating_input
from ...model import Dim, InputSpec, LoadedModel

THE_MODEL = "the model"
_NOT_A_NAME = re.compile(r"\W")


def may_narrow(inputs: Sequence[str], dims: Sequence[str]) -> bool:
    """Check whether claimed inputs and dims may restrict the inputs of a model.

    Returns:
        True if they contain values or ranges of sizes, and not only names.
    """
    return bool(dims) or any(mark in text for text in inputs for mark in "{=")


def merge_claims(claimed: LoadedModel, own: LoadedModel | None, label: str) -> LoadedModel:
    """Combine the model's own inputs with the claimed ones.

    Args:
        claimed: the model with inputs as the record of ``label`` describes them.
        own: the model with the inputs that it describes itself; None if it can't be loaded without the record.
        label: the file with the record.

    Returns:
        the model with its own sizes and values if they are known. `ModelSignature.claimed` has claims that are
        narrower. `ModelSignature.word` names the record if only the record describes the inputs.
    """
    if own is None or len(own.inputs) != len(claimed.inputs) or not _has_same_constants(own, claimed):
        word = f"the record of {label}"
        # The record's range of an integer input is kept, because only the record knows which integers index a table.
        # Floating-point inputs get standard normal values.
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


def _has_same_constants(own: LoadedModel, claimed: LoadedModel) -> bool:
    """Return whether both models have the same constants in place of inputs. Otherwise the models are different."""
    return own.constants.keys() == claimed.constants.keys() and all(
        value.shape == own.constants[name].shape and bool((value == own.constants[name]).all())
        for name, value in claimed.constants.items()
    )


def _narrows_inputs(theirs: InputSpec, ours: InputSpec) -> bool:
    """Return whether the claim ``theirs`` excludes a size or value that the model accepts (``ours``)."""
    if theirs.mask and not ours.mask:
        return True
    if theirs.range is not None and theirs.range != ours.range and (is_floating_input(ours) or ours.range is not None):
        return True
    return len(theirs.shape) != len(ours.shape) or any(map(_narrows_dim, theirs.shape, ours.shape))


def _narrows_dim(claim: Dim, dim: Dim) -> bool:
    """Return whether ``claim`` excludes a size of ``dim``."""
    if claim.min > dim.min or claim.max < dim.max:
        return True
    # The terms of a sum have the steps; the only term of another dim is the dim itself.
    terms = claim.named_dims()
    own = dim.named_dims()
    if len(terms) != len(own):
        return any(term.step > 1 for term in terms)
    return any(mine.step % term.step for term, mine in zip(terms, own, strict=True))


def _merge_value_range(ours: InputSpec, theirs: InputSpec) -> InputSpec:
    """Return the model's input. If it has integers of unknown range, it gets the claimed range."""
    if ours.range is None and not is_floating_input(ours) and theirs.dtype == ours.dtype:
        return replace(ours, range=theirs.range)
    return ours


def describe_dynamic_inputs(
    proto: onnx.ModelProto, recorded: Mapping[str, InputSpec], images: Sequence[ImageInput] = ()
) -> list[str]:
    """Describe the inputs of a file, with names for the dynamic dims, in the format of
    `normdeploy.loading.input_request`.

    Args:
        recorded: inputs in the file's record, by name. Names of dims are taken from it, ranges are not.
        images: images that the file prepares itself. Their channels are described on axis 1, as in the model.

    Returns:
        "x[batch,3,8,8]" for each input, in the file's order; [] if no dim is dynamic or an input can't be described.
    """
    texts = []
    is_dynamic = False
    channels_last = {image.name for image in images if image.channels_last}
    for number, stated in enumerate(declared_inputs(proto.graph)):
        spec = recorded.get(stated.name)
        if spec is None:
            dims = stated.dims
        else:
            dims = _dims_as_names(spec.shape)
        if dims is None or stated.dtype in ("", STRING):
            return []
        if stated.name in channels_last:
            dims = (dims[0], dims[-1], *dims[1:-1])
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
    """Return sizes and names of recorded dims; None if a dim is the sum of others."""
    dims = list(shape)
    if any(dim.terms for dim in dims):
        return None
    return tuple(dim.opt if dim.name is None else dim.name for dim in dims)


def describe_unseen_sizes(
    proto: onnx.ModelProto, label: str, inputs: Mapping[str, str], model_inputs: Sequence[InputSpec]
) -> list[str]:
    """Describe the only sizes at which a file was judged, if the file accepts other sizes too.

    Args:
        inputs: the file's name of an input -> the model's, if they differ.
        model_inputs: the inputs on which the file was judged.

    Returns:
        one phrase with "batch=4" for each dynamic dim of the file that has a fixed size in the model; [] without such
        dims.
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
    return [f"at {', '.join(seen)} only; {label} accepts other sizes, which the model as passed does not"]
