"""Prepare Hugging Face models for tracing in the form in which users deploy them. A model may have a task's outputs,
may be a decoder with its past, or may be a part of an encoder-decoder.

The prepared model is the model itself with another ``forward``, so that its modules keep their paths. This ``forward``
takes tensors in the order of the inputs and returns tensors by name. Outputs of one part can be inputs of another part:
the encoder's ``last_hidden_state`` is the decoder's ``encoder_hidden_states``, and the output ``present.0.decoder.key``
is the next input ``past_key_values.0.decoder.key``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from .decoder_states import CACHE_POSITION, find_decoder_states, run_with_cache
from .default_inputs import DefaultInputs, infer_default_inputs
from .huggingface_tasks import HuggingfaceTask
from .input_request import InputRequest, parse_input_request
from .key_value_cache import (
    cache_tensor_names,
    flatten_both_caches,
    flatten_cache,
    make_encoder_decoder_cache,
    pair_keys_values,
)
from .program_signature import dtype_name
from .static_cache_sizes import LENGTH, choose_static_sizes, require_one_length, state_places

# Number of positions if neither the config nor a table of the model determines the number.
_POSITIONS = 512
_ONE_TOKEN = (
    "the file reads one token in each run, because transformers computes several tokens of a linear attention in a loop"
    " over chunks: read a prompt token by token"
)
Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TraceableModel:
    """Module to trace.

    Attributes:
        module: the module, with a suitable forward.
        inputs: inputs in the notation of ``--input``, in the order of forward's arguments.
        ranges: dim name -> range in the notation of ``--dim``.
        new: name of the dim of the new tokens, which share ``positions`` with the past tokens; "" for a model without a
            past.
        positions: number of positions for past and new tokens together.
        unlimited: True if the model reads any number of tokens, so ``positions`` is only the default.
        static_length: default length of a static cache; 0 without such a cache.
        one_token: True if the model is traced with one new token alone.
        notes: about the inputs, for a user who states none.
    """

    module: nn.Module
    inputs: list[str]
    ranges: dict[str, str] = field(default_factory=dict)
    new: str = ""
    positions: int = 0
    unlimited: bool = False
    static_length: int = 0
    one_token: bool = False
    notes: tuple[str, ...] = ()


def prepare_model(model: nn.Module, folder: Path, task: HuggingfaceTask | None, part: str | None) -> TraceableModel:
    """Prepare a model, or a part of it, for tracing.

    Args:
        part: "encoder", "decoder" or "decoder-with-past". None takes the whole model.

    Returns:
        The module to trace, with its inputs and ranges.

    Raises:
        InputError: the model has no such part, or no past, or the task does not support the model's inputs.
    """
    if part is not None:
        return _PARTS[part](model, folder)
    if task is not None and task.past:
        return _prepare_decoder_only(model, static=task.static)
    default = infer_default_inputs(model, folder)
    inputs = default.specs
    if task is None:
        return TraceableModel(model, inputs, default.ranges, notes=default.notes)
    # The forward of a task takes its inputs by order, but a constant is passed by name.
    if constants := parse_input_request(inputs, ()).constants:
        raise InputError(
            f"{type(model).__name__} is exported with constant values of {', '.join(constants)}, which the task "
            f"{task.name} does not support: omit --task"
        )
    if task.name == "text-generation" and "position_ids" in inspect.signature(model.forward).parameters:
        mask = next((i for i, text in enumerate(inputs) if text.startswith("attention_mask:")), len(inputs) - 1)
        inputs.insert(mask + 1, f"position_ids:int64[batch,seq]{{0:{_position_limit(model)}}}")
    return TraceableModel(_select_outputs(model, inputs, task.outputs), inputs, default.ranges, notes=default.notes)


def input_names(inputs: Sequence[str]) -> list[str]:
    """Return the names of inputs in the notation of ``--input``."""
    return [text.partition(":")[0] for text in inputs]


def replace_forward(module: nn.Module, count: int, forward: Callable[..., Outputs]) -> nn.Module:
    """Give ``module`` a forward with ``count`` parameters for tensors. No input has the name of a parameter, so inputs
    are matched by order.

    Returns:
        ``module``, which was changed.
    """
    parameters = [
        inspect.Parameter(f"tensor_{index}", inspect.Parameter.POSITIONAL_OR_KEYWORD) for index in range(count)
    ]
    signature = inspect.Signature(parameters)

    def forward_by_position(*args: Any, **kwargs: Any) -> Outputs:
        return forward(*signature.bind(*args, **kwargs).args)

    forward_by_position.__signature__ = signature  # type: ignore[attr-defined]
    module.forward = forward_by_position
    return module


def _select_outputs(model: nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> nn.Module:
    """Make ``model`` return only those of ``outputs`` that it has. If it has none of them, it returns all its
    outputs.
    """
    original, keys = model.forward, input_names(inputs)

    def forward_selected(*tensors: torch.Tensor) -> Outputs:
        made = dict(original(**dict(zip(keys, tensors, strict=True))))
        return {name: made[name] for name in outputs if name in made} or made

    return replace_forward(model, len(keys), forward_selected)


# ------------------------------------------------------------------ decoders


def _text_config_of(model: nn.Module) -> Any:
    config: Any = model.config
    if hasattr(config, "get_text_config"):
        return config.get_text_config(decoder=True)
    return config


def count_positions(config: Any) -> int:
    """Find the number of positions in the config of a decoder.

    Args:
        config: config of transformers, without the parts for images or sound.

    Returns:
        The number, or 512 if the config states none.
    """
    positions = (
        getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_target_positions")
    )
    return next((n for n in positions if isinstance(n, int) and n > 0), _POSITIONS)


def _position_limit(model: nn.Module) -> int:
    """Return the number of positions that the model supports."""
    return count_positions(_text_config_of(model))


def _run_for_cache(model: nn.Module, **example: Any) -> Any:
    """Return the cache of one run of the model. A run is needed because configs have no common names for the cache's
    layers, heads and sizes.
    """
    made = run_with_cache(model, **example)
    cache = getattr(made, "past_key_values", None)
    if cache is None:
        raise InputError(
            f"{type(model).__name__} returns no past_key_values, so there is no past to export; omit -with-past"
        )
    return cache


def _make_example_tokens() -> torch.Tensor:
    # The length 3 differs from any number of heads and any head size, so the axis of the length can be recognized.
    return torch.ones(1, 3, dtype=torch.int64)


def _describe_cache_inputs(tensors: Sequence[torch.Tensor], length: str, side: str) -> list[str]:
    titles = cache_tensor_names("past_key_values", len(tensors) // 2, side)
    return [
        f"{title}:{dtype_name(t)}[batch,{t.shape[1]},{length},{t.shape[3]}]{{-3.0:3.0}}"
        for title, t in zip(titles, tensors, strict=True)
    ]


def _prepare_decoder_only(model: nn.Module, *, static: bool) -> TraceableModel:
    """Prepare a decoder that takes the cache of past tokens as inputs. It returns the cache of the past tokens and the
    new tokens.

    Args:
        static: the keys and values have a fixed length, the dim "cache". The input ``cache_position`` is the place of
            the first new token. Earlier places hold past tokens, and later places are free.
    """
    known = inspect.signature(model.forward).parameters
    states = find_decoder_states(model, _text_config_of(model), _make_example_tokens())
    grows = any(slot.grows for slot in states.slots)
    if static and not (grows and states.can_be_static):
        raise InputError(
            f"{type(model).__name__} has no keys and values, or other states than transformers' cache holds, so it has"
            " no static cache; export it with the task text-generation-with-past"
        )
    limit = _position_limit(model)
    inputs = ["input_ids:int64[batch,seq]"]
    if "attention_mask" in known and states.reads_mask:
        inputs += [f"attention_mask:int64[batch,{'cache' if static else 'past+seq'}]"]
    if "position_ids" in known:
        inputs += [f"position_ids:int64[batch,seq]{{0:{limit}}}"]
    if static:
        inputs += [f"{CACHE_POSITION}:int64[1]"]
    keys = input_names(inputs)
    length = "cache" if static else "past"
    inputs += [slot.describe_input(tensor, length) for slot, tensor in zip(states.slots, states.examples, strict=True)]
    presents = [slot.present_name for slot in states.slots]

    def forward_with_past(*tensors: torch.Tensor) -> Outputs:
        given = dict(zip(keys, tensors[: len(keys)], strict=True))
        made = states.run(given, tensors[len(keys) :])
        return {"logits": made.logits, **dict(zip(presents, made.states, strict=True))}

    # transformers reads a single token without the loop over chunks, whose number a trace can't leave open.
    one_token = any(slot.is_recurrent for slot in states.slots)
    return TraceableModel(
        replace_forward(model, len(inputs), forward_with_past),
        inputs,
        new="" if static else "seq",
        positions=limit,
        unlimited=not grows,
        static_length=limit if static else 0,
        one_token=one_token,
        notes=(_ONE_TOKEN,) if one_token else (),
    )


# ------------------------------------------------------------------ encoder-decoders


def _require_encoder(model: nn.Module) -> nn.Module:
    if not getattr(model.config, "is_encoder_decoder", False) or not hasattr(model, "get_encoder"):
        raise InputError(
            f"{type(model).__name__} is not an encoder-decoder, so it has no parts; omit --part. A decoder with its "
            "past is one file: pass --task text-generation-with-past"
        )
    return model.get_encoder()  # type: ignore[operator, no-any-return]


def _encoder_inputs(model: nn.Module, folder: Path) -> DefaultInputs:
    """Return the inputs of the whole model, without the inputs of its decoder."""
    default = infer_default_inputs(model, folder)
    return replace(default, specs=[text for text in default.specs if not text.startswith("decoder_")])


def _prepare_encoder(model: nn.Module, folder: Path) -> TraceableModel:
    encoder, default = _require_encoder(model), _encoder_inputs(model, folder)
    known = inspect.signature(encoder.forward).parameters
    inputs = [text for text in default.specs if text.partition(":")[0] in known]
    module = _select_outputs(encoder, inputs, ("last_hidden_state",))
    return TraceableModel(module, inputs, default.ranges, notes=default.notes)


def _prepare_decoder(model: nn.Module, folder: Path) -> TraceableModel:
    """Prepare the decoder for the first tokens. It returns keys and values of the self attention and of the cross
    attention.
    """
    example, hidden, masked = _run_encoder(model, folder)
    original = model.forward
    inputs = ["input_ids:int64[batch,decoder_seq]", hidden]
    if masked:
        inputs += ["encoder_attention_mask:int64[batch,seq]"]
    layers = len(flatten_cache(_run_for_cache(model, **example).self_attention_cache)) // 2

    def forward_decoder(ids: torch.Tensor, states: torch.Tensor, *mask: torch.Tensor) -> Outputs:
        made = original(encoder_outputs=(states,), decoder_input_ids=ids, use_cache=True, **_mask_keywords(mask))
        return {"logits": made.logits, **_name_present_tensors(made.past_key_values, layers)}

    return TraceableModel(replace_forward(model, len(inputs), forward_decoder), inputs)


def _prepare_decoder_with_past(model: nn.Module, folder: Path) -> TraceableModel:
    """Prepare the decoder for tokens that follow ``past`` earlier tokens.

    Keys and values of the cross attention are inputs but not outputs, since they do not change.
    """
    example, hidden, masked = _run_encoder(model, folder)
    original = model.forward
    own, cross = (tensors for _, tensors in flatten_both_caches(_run_for_cache(model, **example)))
    width, length = int(hidden.rpartition(",")[2].rstrip("]")), hidden.split(",")[1]
    inputs = ["input_ids:int64[batch,decoder_seq]", *(["encoder_attention_mask:int64[batch,seq]"] if masked else [])]
    first = len(inputs)
    inputs += _describe_cache_inputs(own, "past", "decoder")
    inputs += _describe_cache_inputs(cross, length, "encoder")
    middle = first + len(own)

    def forward_with_past(ids: torch.Tensor, *tensors: torch.Tensor) -> Outputs:
        mask = tensors[: first - 1]
        past = tensors[first - 1 : middle - 1]
        seen = tensors[middle - 1 :]
        cache = make_encoder_decoder_cache(pair_keys_values(past), pair_keys_values(seen))
        # The decoder does not read the encoder's states, because the keys and values computed from them are in the
        # cache. Only the shape of the states matters.
        states = seen[0].new_zeros(seen[0].shape[0], seen[0].shape[2], width)
        made = original(
            encoder_outputs=(states,),
            decoder_input_ids=ids,
            past_key_values=cache,
            use_cache=True,
            **_mask_keywords(mask),
        )
        return {"logits": made.logits, **_name_present_tensors(made.past_key_values, len(own) // 2, ("decoder",))}

    return TraceableModel(
        replace_forward(model, len(inputs), forward_with_past),
        inputs,
        new="decoder_seq",
        positions=_position_limit(model),
    )


def request_inputs(ready: TraceableModel, inputs: Sequence[str], dims: Sequence[str]) -> InputRequest:
    """Request the user's inputs, or the model's default inputs if the user states none or only constants.

    Args:
        inputs, dims: texts of ``--input`` and ``--dim``.

    Returns:
        The request. Dims of default inputs are assumed unless the user states their ranges.

    Raises:
        InputError: a text can't be parsed, or as for ``unstated_ranges``.
    """
    own = parse_input_request(inputs, dims)
    if own.inputs:
        return own
    described = [text for text in ready.inputs if text.partition(":")[0] not in own.constants] + [*inputs]
    wishes = parse_input_request(described, dims)
    stated = {name: wishes.dims[name].max for name in wishes.stated} | {
        name: dim.max for name, dim in wishes.single.items()
    }
    sizes = unstated_ranges(ready, stated)
    if ready.static_length:
        if LENGTH in wishes.stated:
            require_one_length(wishes.dims[LENGTH])
        described = [state_places(text, sizes, stated) for text in described]
    ranges = [f"{name}={text}" for name, text in sizes.items()]
    request = parse_input_request(described, [*dims, *ranges])
    return replace(request, assumed=frozenset(request.dims) - wishes.stated, notes=ready.notes)


def add_default_inputs(module: nn.Module, wishes: InputRequest) -> InputRequest:
    """Give a transformers model in memory the inputs of its folder, if ``wishes`` have no inputs.

    Returns:
        The request; ``wishes`` if it has inputs, or if the module is not a transformers model.

    Raises:
        InputError: as for ``request_inputs``.
    """
    if wishes.inputs or not isinstance(getattr(getattr(module, "config", None), "model_type", None), str):
        return wishes
    default = infer_default_inputs(module, None)
    stated = wishes.dims | wishes.single
    dims = [f"{name}={dim.min}:{dim.opt}:{dim.max}:{dim.step}" for name, dim in stated.items()]
    if not default.specs:
        return wishes
    specs = [spec for spec in default.specs if spec.partition(":")[0] not in wishes.constants]
    ready = TraceableModel(module, specs, default.ranges, notes=default.notes)
    request = request_inputs(ready, (), dims)
    return replace(request, constants=request.constants | wishes.constants)


def unstated_ranges(ready: TraceableModel, stated: Mapping[str, int]) -> dict[str, str]:
    """Choose ranges of dims that the user did not state, for dims with a known limit.

    Past and new tokens together must fit the decoder's table of positions.

    Args:
        stated: dim name -> largest size that the user states. If the user limits only the past tokens or only the new
            tokens, the other dim gets the remaining positions.

    Returns:
        Dim name -> range in the notation of ``--dim``.

    Raises:
        InputError: past and new tokens together exceed the number of positions, or no position is left for one of them;
            or the model reads one new token alone, and the user states more.
    """
    ranges = {name: text for name, text in ready.ranges.items() if name not in stated}
    if ready.static_length:
        return choose_static_sizes(ready.static_length, ready.positions, stated, one_token=ready.one_token)
    if not ready.new:
        return ranges
    new = ready.new
    known = ready.positions
    if ready.unlimited:
        known = max(known, stated.get("past", 0) + stated.get(new, 1))
    if ready.one_token and stated.get(new, 1) != 1:
        raise InputError(
            f"{new} may have up to {stated[new]} tokens, but this model is exported with one token, because"
            f" transformers computes several tokens of a linear attention in a loop over chunks: omit the dim {new}, or"
            f" pass {new}=1:1:1"
        )
    if ready.one_token and new not in stated:
        return unstated_ranges(ready, {**stated, new: 1}) | {new: "1:1:1"}
    past = stated.get("past", known - stated[new] if new in stated else known // 2)
    tokens = stated.get(new, known - past)
    if past < 0 or tokens < 1 or past + tokens > known:
        raise InputError(
            f"past and {new} together may have at most the model's {known} positions, but {past} and {tokens} were "
            "requested: pass smaller ones with --dim"
        )
    shared = {new: f"1:{min(8, tokens)}:{tokens}"}
    # A model with states of constant size, and without a mask, has no dim for the past tokens.
    if any("past" in text.partition("[")[2] for text in ready.inputs):
        shared["past"] = f"0:{min(8, past)}:{past}"
    return ranges | {name: text for name, text in shared.items() if name not in stated}


def _mask_keywords(mask: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    if mask:
        return {"attention_mask": mask[0]}
    return {}


def _name_present_tensors(cache: Any, layers: int, wanted: Sequence[str] = ("decoder", "encoder")) -> Outputs:
    presents: Outputs = {}
    for side, tensors in flatten_both_caches(cache):
        if side in wanted:
            presents |= dict(zip(cache_tensor_names("present", layers, side), tensors, strict=True))
    return presents


def _run_encoder(model: nn.Module, folder: Path) -> tuple[dict[str, Any], str, bool]:
    """Return an example call, the encoder's states as an input, and whether the decoder takes the encoder's mask."""
    encoder, inputs = _require_encoder(model), _encoder_inputs(model, folder).specs
    # The inputs are texts in the notation of ``--input``. Parsing them gives the sizes of the example.
    example = _make_example_tensors(parse_input_request(inputs, ()).inputs)
    known = inspect.signature(encoder.forward).parameters
    with torch.no_grad():
        states = encoder(**{name: value for name, value in example.items() if name in known})[0]
    text = "input_ids" in example
    if text:
        length = "seq"
    else:
        length = states.shape[1]
    hidden = f"encoder_hidden_states:{dtype_name(states)}[batch,{length},{states.shape[2]}]"
    return {**example, "decoder_input_ids": _make_example_tokens()}, hidden, text and "attention_mask" in example


def _make_example_tensors(wishes: Sequence[Any]) -> dict[str, torch.Tensor]:
    def example_size(dim: Any) -> int:
        if dim.name is None:
            return dim.opt
        if dim.name == "batch":
            return 1
        return 3

    made = {}
    for wish in wishes:
        shape = [example_size(dim) for dim in wish.shape]
        kind = getattr(torch, wish.dtype or "float32")
        made[wish.name] = torch.zeros(shape, dtype=kind) if kind.is_floating_point else torch.ones(shape, dtype=kind)
    return made


_PARTS: Mapping[str, Callable[[nn.Module, Path], TraceableModel]] = {
    "encoder": _prepare_encoder,
    "decoder": _prepare_decoder,
    "decoder-with-past": _prepare_decoder_with_past,
}
