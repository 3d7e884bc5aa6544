"""Fill a model from a file of weights: a state_dict, a checkpoint that contains a state_dict, or safetensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ..errors import LoadError
from .export_errors import PACKED
from .file_kinds import INDEX
from .folder_containment import indexed_shards
from .torch_pickles import describe_type, join_names
from .train_mode_checks import iter_reachable

State = dict[str, torch.Tensor]
_SHOWN = 10
_LIGHTNING = {"pytorch-lightning_version", "state_dict"}
# Name of a BatchNorm's buffer that counts training batches. It exists since torch 0.4.1, so older files lack it. It
# does not affect inference.
_COUNTER = "num_batches_tracked"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.\w+$")
# Maximum depth of nested dicts to which weights are searched if no key is given.
_DEEPEST = 64


def read_safetensors(path: Path) -> State:
    """Read all tensors of a file, or of the shards that an index names, in their own dtypes.

    Returns:
        Name -> tensor.

    Raises:
        LoadError: the file is broken.
    """
    if path.name.endswith(INDEX):
        shards = indexed_shards(path)
    else:
        shards = [path]
    try:
        return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    except (SafetensorError, ValueError, KeyError, OSError, RuntimeError) as error:
        raise LoadError(
            f"{path} can't be read as safetensors: {error}; it is truncated or broken: copy or save it again"
        ) from error


def find_state_dict(checkpoint: Any, key: str | None, path: Path) -> State | nn.Module:
    """Find the weights in an object that torch.save wrote. They are the object itself, the part under ``key``, or the
    only part that contains weights.

    Args:
        key: key of the weights. Dots separate nested keys. None searches for the weights.

    Returns:
        Name -> tensor, or a whole module.

    Raises:
        LoadError: no weights are found, or several sets of weights are found and no ``key`` is given.
    """
    if isinstance(checkpoint, Mapping) and checkpoint.keys() >= _LIGHTNING:
        # A checkpoint of Lightning also contains tensors of callbacks and optimizers, so only its state_dict is
        # searched.
        if key is None:
            key = "state_dict"
        elif key.partition(".")[0] not in checkpoint:
            key = f"state_dict.{key}"
    if key is not None:
        state = _state_at_key(checkpoint, key, path)
    else:
        state = checkpoint
    depth = 0
    while not _is_state_dict(state):
        depth += 1
        if depth > _DEEPEST:
            raise LoadError(f"{path} contains weights more than {_DEEPEST} dicts deep; pass the keys that lead to them")
        if not isinstance(state, Mapping):
            raise LoadError(
                f"{path} contains {describe_type(state)}{f' under {key!r}' if key else ''}, not weights: expected a "
                "dict of tensors, or a dict that contains one"
            )
        barren: set[int] = set()
        candidates = [
            name for name, value in state.items() if _is_state_dict(value) or _contains_weights(value, barren)
        ]
        if any(str(name).endswith("._packed_params") for name in state):
            raise LoadError(f"{path} contains weights that torch.ao has {PACKED}")
        if _is_optimizer_state(state) or (not candidates and any(map(_is_optimizer_state, state.values()))):
            raise LoadError(
                f"{path} contains the state of an optimizer and no weights: pass the file with the model's state_dict"
            )
        if len(candidates) != 1:
            inside = ", ".join(f"{name!r} ({describe_type(value)})" for name, value in list(state.items())[:_SHOWN])
            if candidates:
                problem = f"contains several sets of weights: {', '.join(map(repr, candidates))}"
            else:
                problem = "contains no weights"
            raise LoadError(f"{path} {problem}; choose with --key (in it: {inside})")
        state = state[candidates[0]]
    if isinstance(state, nn.Module):
        return state
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _state_at_key(checkpoint: Any, key: str, path: Path) -> Any:
    rest = key
    value = checkpoint
    while rest:
        if isinstance(value, Mapping):
            names = list(value)
        else:
            names = []
        step = next(
            (
                name
                for name in sorted(map(str, names), key=len, reverse=True)
                if rest == name or rest.startswith(f"{name}.")
            ),
            None,
        )
        below = {name.removeprefix(f"{rest}."): value[name] for name in names if str(name).startswith(f"{rest}.")}
        if step is None and below:
            # The key may also be a prefix of names within one set of weights: the key "model" selects
            # model.encoder.weight.
            return below
        if step is None:
            raise LoadError(
                f"{path} has no key {key!r}; its keys are: "
                f"{join_names([repr(name) for name in names], _SHOWN) or 'none'}"
            )
        value = value[step]
        rest = rest[len(step) + 1 :]
    return value


def _is_state_dict(value: Any) -> bool:
    """Return whether a value is a module, or a dict from names to tensors. The dict may also contain numbers, such as
    an EMA's decay, and extra state.
    """
    if isinstance(value, nn.Module):
        return True
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return False
    tensors = [name for name, item in value.items() if isinstance(item, torch.Tensor)]
    others = [
        item for name, item in value.items() if not isinstance(item, torch.Tensor) and not name.endswith("_extra_state")
    ]
    return bool(tensors) and all(isinstance(item, int | float | type(None)) for item in others)


def _is_optimizer_state(value: Any) -> bool:
    return isinstance(value, Mapping) and "param_groups" in value


def _contains_weights(value: Any, barren: set[int]) -> bool:
    """Return whether a dict contains weights at any depth; tensors of an optimizer's state do not count as weights.

    Args:
        barren: ids of dicts that are known to contain no weights. New ids are added. They are needed because a dict may
            be in many other dicts, and in itself.
    """
    looked = set[int]()
    stack = [value]
    while stack:
        item = stack.pop()
        if not isinstance(item, Mapping) or _is_optimizer_state(item) or id(item) in looked or id(item) in barren:
            continue
        looked.add(id(item))
        if any(map(_is_state_dict, item.values())):
            return True
        stack.extend(item.values())
    barren |= looked
    return False


def fill_module(module: nn.Module, state: State, path: Path) -> list[str]:
    """Remove prefixes that wrappers added to the names in ``state``, and load it into ``module`` in place.

    A parameter that shares its memory with a loaded parameter (tied weights) may be missing from the file.

    Returns:
        Notes on tensors of the file that the model does not use, and on tensors of the model that this kind of file
        can't contain.

    Raises:
        LoadError: keys are missing or left over, or shapes differ; the message lists them.
    """
    own = module.state_dict()
    part = _select_model_state(_strip_common_prefixes(state, own.keys()), own, path)
    state = part.state
    filled = {own[name].data_ptr() for name in own.keys() & state.keys()}
    missing = [
        name
        for name, value in own.items()
        if name not in state
        and isinstance(value, torch.Tensor)
        and (value.data_ptr() not in filled or not value.numel())
        and name.rpartition(".")[2] != _COUNTER
    ]
    unexpected = [name for name in state if name not in own]
    differing = [
        f"{name}: the file has {list(state[name].shape)}, the model {list(own[name].shape)}"
        for name in own.keys() & state.keys()
        if state[name].shape != own[name].shape
    ]
    problems = [
        f"{len(names)} {kind}:\n    {join_names(sorted(names), _SHOWN)}"
        for kind, names in (
            ("missing from the file", missing),
            ("not in the model", unexpected),
            ("of another shape", differing),
        )
        if names
    ]
    if problems:
        shard = "; the file is one of several shards: pass their index, *.index.json"
        raise LoadError(
            f"the weights of {path} do not fit {type(module).__name__}:\n  "
            + "\n  ".join(problems)
            + "\nCheck the factory's arguments, or choose other weights with --key"
            + (shard if _SHARD.search(path.name) else "")
        )
    module.load_state_dict(state, strict=False)
    return [*part.notes, *_iter_unregistered_tensors(module)]


def _iter_unregistered_tensors(module: nn.Module) -> Iterator[str]:
    registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    unregistered = [
        path
        for path, item in iter_reachable(module)
        if isinstance(item, torch.Tensor) and item.is_floating_point() and id(item) not in registered
    ]
    if unregistered:
        yield (
            f"no state_dict contains {join_names(unregistered, _SHOWN)}, which are plain attributes: they keep the "
            "values from the factory"
        )


@dataclass(frozen=True)
class _ModelState:
    """Weights of one model.

    Attributes:
        state: name -> tensor.
        notes: notes on tensors of the file that were left out.
    """

    state: State
    notes: tuple[str, ...] = ()


def _select_model_state(state: State, own: Mapping[str, Any], path: Path) -> _ModelState:
    """Select the part of ``state`` below one prefix that fits a model with the weights ``own``.

    The other keys belong to losses or metrics, as in a checkpoint of Lightning.

    Raises:
        LoadError: several prefixes fit.
    """
    fitting = _find_fitting_prefixes(state, own)
    if not fitting:
        return _ModelState(state)
    if len(fitting) > 1:
        keys = ", ".join(prefix.removesuffix(".") for prefix in fitting)
        raise LoadError(f"{path} contains the model {len(fitting)} times, under {keys}; choose with --key")
    part = {name.removeprefix(fitting[0]): value for name, value in state.items() if name.startswith(fitting[0])}
    others = sorted(name for name in state if not name.startswith(fitting[0]))
    note = (
        f"the weights are {fitting[0]}* in {path.name}; ignored, because the model has no such tensors: "
        f"{join_names(others, _SHOWN)}"
    )
    return _ModelState(part, (note,))


def _find_fitting_prefixes(state: State, own: Mapping[str, Any]) -> list[str]:
    """Return the prefixes below which ``state`` has most of the model's tensors; [] if no prefix is needed.

    Losses and metrics may repeat names of the model's layers under their own prefixes, so shapes are compared too.
    """
    found = Counter[str]()
    for name, value in state.items():
        parts = name.split(".")
        for depth in range(len(parts)):
            held = own.get(".".join(parts[depth:]))
            if isinstance(held, torch.Tensor) and held.shape == value.shape:
                found["".join(f"{part}." for part in parts[:depth])] += 1
    most = max(found.values(), default=0)
    best = [prefix for prefix, count in found.items() if count == most]
    if "" in best or 2 * most <= len(own):
        return []
    return best


def _strip_common_prefixes(state: State, own: Sequence[str] | Any) -> State:
    """Rename keys to match the model: remove ``_orig_mod.`` (torch.compile), and prefixes common to all keys that do
    not match.
    """
    variants = [state, {name.replace("_orig_mod.", ""): value for name, value in state.items()}]
    while True:
        # torch's AveragedModel has this key besides the keys module.*, so it is ignored.
        keys = [name for name in variants[-1] if name != "n_averaged"]
        prefixes = {name.partition(".")[0] for name in keys}
        if len(prefixes) != 1 or not all("." in name for name in keys):
            break
        variants.append({name.partition(".")[2]: variants[-1][name] for name in keys})
    return max(variants, key=lambda variant: len(variant.keys() & own) - len(variant.keys() - own) / (len(variant) + 1))
