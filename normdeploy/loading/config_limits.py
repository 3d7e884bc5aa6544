"""How large a dim may be of which the user says nothing: what the model's config says of it.

Libraries keep the number of positions that a model was made for in its config, under names of their own. Without one
the dim is traced open, and what the traced program says counts: the table that positions index, or the range in which
the model's code holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..model import Dim
from .input_request import InputRequest
from .shape_expressions import split_words

# traced up to this where nothing is known: beyond what a model is made for, and below any overflow of products
OPEN = 2**20

# of shape (batch, positions, ...)
_TEXT = split_words("input_ids attention_mask token_type_ids position_ids inputs_embeds")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx", "seq_length")
_DECODED = ("max_target_positions", *_POSITIONS)
# of shape (batch, channels, height, width)
_IMAGE = "pixel_values"


@dataclass(frozen=True)
class ConfigLimit:
    """The largest size of a dim, and what says so; ``best`` is the usual size, where that is said too."""

    most: int
    source: str
    best: int | None = None


def widen_unstated_dims(wishes: InputRequest, config: Any) -> InputRequest:
    """The wishes with the dims of which no range was stated as wide as ``config`` (of a library's model; any object)
    says, else open."""
    limits = _find_config_limits(wishes, config)
    dims = dict(wishes.dims)
    for name, dim in dims.items():
        if name not in wishes.stated and name in limits:
            most = limits[name].most
            best = limits[name].best or dim.opt
            dims[name] = Dim(name, 1, min(best, most), most)
        elif name not in wishes.stated:
            dims[name] = Dim(name, dim.min, dim.opt, max(OPEN, dim.max))
    return replace(
        wishes.with_dims(dims),
        sources={name: limit.source for name, limit in limits.items() if name not in wishes.stated},
    )


def _find_config_limits(wishes: InputRequest, config: Any) -> dict[str, ConfigLimit]:
    limits: dict[str, ConfigLimit] = {}
    for wish in wishes.inputs:
        name = wish.name.removeprefix("decoder_")
        keys = _DECODED if name != wish.name else _POSITIONS
        if (
            name in _TEXT
            and len(wish.shape) >= 2
            and not wish.shape[1].terms
            and (dim := wish.shape[1].name)
            and (limit := _text_position_limit(config, keys))
        ):
            limits.setdefault(dim, limit)
        if name == _IMAGE and len(wish.shape) == 4:
            for dim, size in zip((d.name for d in wish.shape[2:]), _config_image_size(config), strict=True):
                if dim and size:
                    limits.setdefault(dim, ConfigLimit(size, "image_size of its config", size))
    return limits


def _text_position_limit(config: Any, keys: tuple[str, ...]) -> ConfigLimit | None:
    """Of models of several parts (CLIP) those of the text."""
    for part in (config, getattr(config, "text_config", None)):
        for key in keys:
            if (size := getattr(part, key, None)) and type(size) is int and size > 1:
                return ConfigLimit(size, f"{key} of its config")
    return None


def _config_image_size(config: Any) -> tuple[int, int]:
    for part in (config, getattr(config, "vision_config", None)):
        size = getattr(part, "image_size", None)
        if type(size) is int and size > 0:
            return size, size
        if isinstance(size, list | tuple) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
            return size[0], size[1]
    return 0, 0
