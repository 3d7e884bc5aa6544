"""Choose the length of a decoder's static cache, and the number of new tokens that are read at once."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import InputError
from ..model import Dim
from .decoder_states import CACHE_POSITION

# Dims of a static cache and of the new tokens.
LENGTH = "cache"
_NEW = "seq"


def choose_static_sizes(length: int, positions: int, stated: Mapping[str, int], *, one_token: bool) -> dict[str, str]:
    """Choose sizes that the user did not state.

    Args:
        length: default length of the cache.
        positions: number of positions of the model.
        stated: dim name -> largest size that the user states.
        one_token: the model reads one new token in each run.

    Returns:
        Dim name -> range in the notation of ``--dim``. By default, up to half of the cache is read at once.

    Raises:
        InputError: the cache is longer than the model's positions, or shorter than the new tokens.
    """
    length = stated.get(LENGTH, length)
    tokens = stated.get(_NEW, 1 if one_token else max(1, length // 2))
    if length > positions or tokens > length or (one_token and tokens > 1):
        alone = ", and it reads one token in each run" if one_token else ""
        raise InputError(
            f"the static cache has {length} places for {tokens} new tokens, but the model has {positions} positions"
            f"{alone}; pass a length with --dim {LENGTH}=N:N:N, and at most so many new tokens with --dim {_NEW}=1:8:N"
        )
    sizes = {LENGTH: f"{length}:{length}:{length}", _NEW: f"1:{min(8, tokens)}:{tokens}"}
    return {name: text for name, text in sizes.items() if name not in stated}


def require_one_length(cache: Dim) -> None:
    """Raise InputError if the user states a range for the length of a static cache."""
    if cache.min != cache.max:
        raise InputError(
            f"a static cache has one length, but {cache.min} to {cache.max} were requested: pass --dim"
            f" {LENGTH}={cache.max}:{cache.max}:{cache.max}"
        )


def state_places(text: str, sizes: Mapping[str, str], stated: Mapping[str, int]) -> str:
    """State the range of the input ``cache_position``: the new tokens after it must fit into the cache.

    Args:
        text: an input in the notation of ``--input``.
        sizes: sizes that ``choose_static_sizes`` chose.
        stated: as for ``choose_static_sizes``.

    Returns:
        The text with the range; other inputs unchanged.
    """
    if not text.startswith(f"{CACHE_POSITION}:"):
        return text
    largest = {name: int(size.rpartition(":")[2]) for name, size in sizes.items()} | dict(stated)
    return f"{text}{{0:{largest[LENGTH] - largest[_NEW] + 1}}}"
