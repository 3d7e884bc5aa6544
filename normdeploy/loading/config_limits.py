"""Find the largest sizes of dims in the model's config, for dims whose range the user does not state.

Libraries store a model's number of positions in its config, under various names. If the config states no number, the
dim is traced without a limit. The traced program then determines the limit: the number of rows of the table that
positions index, or the range in which the model's code is valid.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..model import Dim
from .input_request import InputRequest
from .shape_expressions import split_words

# Upper bound for tracing a dim whose limit is unknown. It is larger than the limit of any model, and products of such
# sizes do not overflow.
OPEN = 2**20

# Names of inputs of shape (batch, positions, ...).
_TEXT = split_words("input_ids attention_mask token_type_ids position_ids inputs_embeds")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx", "seq_length")
_DECODED = ("max_target_positions", *_POSITIONS)
# Name of the input of shape (batch, channels, height, width).
_IMAGE = "pixel_values"


@dataclass(frozen=True)
class ConfigLimit:
    """Largest size of a dim.

    Attributes:
        most: the largest size.
        source: the config entry that states the largest size, for messages.
        best: the usual size, or None if the config does not state it.
    """

    most: int
    source: str
    best: int | None = None


def widen_unstated_dims(wishes: InputRequest, config: Any) -> InputRequest:
    """Set the ranges of dims without a stated range from ``config``. A dim that the config does not limit stays open.

    Args:
        config: a library's config object, or any object.

    Returns:
        The request with wider dims and the source of each limit.
    """
    limits = _find_config_limits(wishes, config)
    dims = dict(wishes.dims)
    for name, dim in dims.items():
        if name not in wishes.stated and name in limits:
            most = limits[name].most
            best = limits[name].best or dim.opt
            dims[name] = Dim(name, 1, min(best, most), most)
        elif name not in wishes.stated:
            dims[name] = replace(dim, max=max(OPEN, dim.max))
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
    """Return the limit of the text positions. For a model of several parts, such as CLIP, return the limit of its text
    part.
    """
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
