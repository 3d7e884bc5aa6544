"""Describe a decoder file for onnxruntime-genai: the content of ``genai_config.json``.

The names of inputs and outputs, the sizes and the limits are those of the file. The special tokens and the settings of
the search are those of the model's folder. The keys are documented at
https://onnxruntime.ai/docs/genai/reference/config.html.

The type is "decoder", which onnxruntime-genai (0.9 and newer) has for decoders of every family, or "lfm2" for a file
with the states of convolutions. The types with the names of other families differ in special tokens of chats, or expect
the files of onnxruntime-genai's own builder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx

from ...errors import InputError
from ...graphs.declared_inputs import DeclaredInput, declared_inputs, tensor_spec
from ...inputs.file_inputs import read_recorded_inputs
from ...loading.generation_settings import GenerationSettings
from ...model import Dim

CONFIG_FILE = "genai_config.json"
MODEL_FILE = "model.onnx"
_IDS = "input_ids"
_LOGITS = "logits"
_OPTIONAL = ("attention_mask", "position_ids")
_KEY, _VALUE, _CONV = "past_key_values.%d.key", "past_key_values.%d.value", "past_conv.%d"
_PRESENT = {_KEY: "present.%d.key", _VALUE: "present.%d.value", _CONV: "present_conv.%d"}
_PAST = re.compile(r"(past_key_values|past_conv)\.(\d+)(\.key|\.value)?")
# transformers' default. onnxruntime-genai has no default for a model that samples.
_TOP_K = 50
# Axes of keys and values: heads, tokens, and elements of a head.
_HEADS, _TOKENS, _ELEMENTS = 1, 2, 3
_RANK = 4


@dataclass(frozen=True)
class GenaiConfig:
    """Description of a file.

    Attributes:
        content: the JSON object.
        notes: limits that the user should know.
    """

    content: dict[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Limits:
    """Sizes that the file takes.

    Attributes:
        past: largest number of earlier tokens.
        new: largest number of tokens in one run.
    """

    past: int
    new: int

    @property
    def context(self) -> int:
        """Return the number of tokens that can be read: the past, and one token after the past."""
        return self.past + 1


def make_genai_config(proto: onnx.ModelProto, settings: GenerationSettings) -> GenaiConfig:
    """Describe a file that ``export`` wrote with the task text-generation-with-past.

    Args:
        proto: the file; its weights are not read.

    Returns:
        The content of ``genai_config.json``.

    Raises:
        InputError: onnxruntime-genai can't run such a file; the message says why.
    """
    inputs = {each.name: each for each in declared_inputs(proto.graph)}
    caches = _find_caches(inputs, [output.name for output in proto.graph.output])
    heads, elements = _require_equal_shapes(inputs, caches)
    limits = _read_limits(proto, inputs, caches)
    vocabulary = _vocabulary_size(proto)
    layers = sorted({layer for layer, _ in caches})
    decoder: dict[str, Any] = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": MODEL_FILE,
        "head_size": elements,
        "num_key_value_heads": heads,
        "num_hidden_layers": len(layers),
        "inputs": {name: name for name in (_IDS, *_OPTIONAL) if name in inputs},
        "outputs": {"logits": _LOGITS},
    }
    kinds = {kind for _, kind in caches}
    for kind, name in ((_KEY, "key"), (_VALUE, "value"), (_CONV, "conv")):
        if kind in kinds:
            decoder["inputs"][f"past_{name}_names"] = kind
            decoder["outputs"][f"present_{name}_names"] = _PRESENT[kind]
    if _CONV in kinds:
        decoder["layer_types"] = _list_layer_types(layers, caches)
    model = {
        "type": "lfm2" if _CONV in kinds else "decoder",
        "vocab_size": vocabulary,
        "context_length": limits.context,
        **_list_tokens(settings, vocabulary),
        "decoder": decoder,
    }
    search: dict[str, Any] = {
        **settings.search,
        "top_k": min(settings.search.get("top_k", _TOP_K), vocabulary),
        "max_length": limits.context,
        # A longer prompt is read in pieces of this length.
        "chunk_size": limits.new,
        # The file returns a new cache, which is longer than the cache that the file reads.
        "past_present_share_buffer": False,
    }
    notes = _describe_limits(limits, settings, states=_CONV in kinds)
    return GenaiConfig({"model": model, "search": search}, notes)


def _find_caches(inputs: Mapping[str, DeclaredInput], outputs: list[str]) -> dict[tuple[int, str], str]:
    """Find the inputs of the cache.

    Returns:
        (layer, kind) -> name of the input; the kind is ``_KEY``, ``_VALUE`` or ``_CONV``.

    Raises:
        InputError: an input or output has no place in onnxruntime-genai.
    """
    caches = {}
    for name in inputs:
        if name in (_IDS, *_OPTIONAL):
            continue
        found = _PAST.fullmatch(name)
        kind = "" if found is None else f"{found[1]}.%d{found[3] or ''}"
        if found is None or kind not in _PRESENT:
            raise InputError(
                f"onnxruntime-genai can't run the file, because it has no values for the input {name!r}: it passes"
                f" {_IDS}, {', '.join(_OPTIONAL)}, keys and values, and the states of convolutions"
            )
        caches[int(found[2]), kind] = name
    if _IDS not in inputs:
        raise InputError(f"onnxruntime-genai can't run the file, because the file has no input {_IDS!r}")
    if not any(kind == _KEY for _, kind in caches):
        raise InputError(
            "onnxruntime-genai can't run the file, because no layer of the file has keys and values as inputs"
        )
    wanted = [_LOGITS, *(_PRESENT[kind] % layer for layer, kind in caches)]
    if lacking := [name for name in wanted if name not in outputs]:
        raise InputError(f"onnxruntime-genai can't run the file, because the file has no output {lacking[0]!r}")
    return caches


def _require_equal_shapes(
    inputs: Mapping[str, DeclaredInput], caches: Mapping[tuple[int, str], str]
) -> tuple[int, int]:
    """Require that the keys and values of each layer have one shape, because onnxruntime-genai makes both alike.

    Returns:
        The number of heads and the size of a head, in the first layer with keys.

    Raises:
        InputError: the shapes differ.
    """
    shapes = []
    for layer in sorted({layer for layer, kind in caches if kind != _CONV}):
        both = [inputs[caches[layer, kind]].dims if (layer, kind) in caches else None for kind in (_KEY, _VALUE)]
        sizes = [(dims[_HEADS], dims[_ELEMENTS]) for dims in both if dims is not None and len(dims) == _RANK]
        if len(sizes) < len(both) or sizes[0] != sizes[1]:
            keys, values = map(_show_shape, both)
            raise InputError(
                f"onnxruntime-genai can't run the file, because the keys of layer {layer} are {keys} and its values"
                f" are {values}, but onnxruntime-genai makes both with one shape"
            )
        shapes.append(sizes[0])
    heads, elements = shapes[0]
    if not isinstance(heads, int) or not isinstance(elements, int):
        raise InputError(
            f"onnxruntime-genai can't run the file, because the keys have {heads} heads of {elements} elements, but"
            " both numbers must be fixed"
        )
    return heads, elements


def _show_shape(dims: tuple[int | str, ...] | None) -> str:
    if dims is None:
        return "missing"
    return f"[{', '.join(map(str, dims))}]"


def _read_limits(
    proto: onnx.ModelProto, inputs: Mapping[str, DeclaredInput], caches: Mapping[tuple[int, str], str]
) -> _Limits:
    """Read the sizes that the file was exported for.

    Raises:
        InputError: onnxruntime-genai needs other sizes: an empty past, and single tokens.
    """
    recorded = read_recorded_inputs(proto)
    new = recorded[_IDS].shape[1]
    past = recorded[next(name for (_, kind), name in caches.items() if kind == _KEY)].shape[_TOKENS]
    if past.min > 0 or past.max == 0 or past.step > 1:
        raise InputError(
            f"onnxruntime-genai begins with an empty past and appends single tokens, but the file takes {_show(past)}"
            " earlier tokens; pass --dim past=0:8:64, with your largest number in place of 64"
        )
    if new.min > 1 or new.step > 1:
        raise InputError(
            f"onnxruntime-genai reads single tokens, but the file takes {_show(new)} new tokens; pass --dim seq=1:8:16,"
            " with your largest number in place of 16"
        )
    return _Limits(past.max, new.max)


def _show(dim: Dim) -> str:
    """Return the sizes of a dim in words, such as "2 to 8" or "4"."""
    sizes = str(dim.min) if dim.min == dim.max else f"{dim.min} to {dim.max}"
    return f"{sizes} (multiples of {dim.step})" if dim.step > 1 else sizes


def _vocabulary_size(proto: onnx.ModelProto) -> int:
    logits = next(output for output in proto.graph.output if output.name == _LOGITS)
    size = tensor_spec(logits).shape[-1]
    if not isinstance(size, int):
        raise InputError(
            "onnxruntime-genai can't run the file, because the last dim of the logits is not the fixed number of tokens"
        )
    return size


def _list_layer_types(layers: list[int], caches: Mapping[tuple[int, str], str]) -> list[str]:
    """Name the kind of each layer.

    Raises:
        InputError: a layer has no cache, or both keys and the state of a convolution.
    """
    kinds = []
    for layer in range(layers[-1] + 1):
        own = [kind for kind in (_CONV, _KEY) if (layer, kind) in caches]
        if len(own) != 1:
            raise InputError(
                f"onnxruntime-genai can't run the file, because layer {layer} has"
                f" {'both keys and the state of a convolution' if own else 'no cache'}, but each layer beside"
                " convolutions must have one of both"
            )
        kinds.append("conv" if own == [_CONV] else "full_attention")
    return kinds


def _list_tokens(settings: GenerationSettings, vocabulary: int) -> dict[str, Any]:
    """List the special tokens. A key without a token is left out, because onnxruntime-genai refuses null.

    Raises:
        InputError: no token of the vocabulary ends a text.
    """
    # onnxruntime-genai refuses ids beyond the vocabulary. The model never generates these tokens.
    eos = [token for token in settings.eos if token < vocabulary]
    if not eos:
        raise InputError(
            f"onnxruntime-genai needs a token that ends a text, but eos_token_id is {list(settings.eos)}, and the"
            f" vocabulary of the file has {vocabulary} tokens; correct eos_token_id in generation_config.json"
        )
    # transformers pads with the first token that ends a text too, if there is no token for padding.
    pad = eos[0] if settings.pad is None else settings.pad
    tokens = {"bos_token_id": settings.bos, "eos_token_id": eos, "pad_token_id": pad}
    return {name: value for name, value in tokens.items() if value is not None}


def _describe_limits(limits: _Limits, settings: GenerationSettings, *, states: bool) -> tuple[str, ...]:
    notes = [
        f"onnxruntime-genai reads at most {limits.context} tokens (context_length), because the file's past has up to"
        f" {limits.past}; it reads a prompt in pieces of {limits.new} tokens (chunk_size). --dim past=MIN:OPT:MAX and"
        " --dim seq=MIN:OPT:MAX change both"
    ]
    narrow = settings.window is not None and settings.window < limits.context
    if states or narrow:
        reason = "the states of convolutions" if states else f"the window of {settings.window} tokens"
        notes.append(
            f"onnxruntime-genai pads shorter prompts of a batch on the right, and {reason} would contain the padding:"
            " pass prompts of one length, or one by one. A file with --dim batch=1:1:1 refuses batches"
        )
    return tuple(notes)
