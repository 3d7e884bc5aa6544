"""Looks for sizes at which a file runs, where nobody says them and those that are guessed do not.

A net of convolutions needs as many pixels as its kernels span, one that halves them five times a multiple of 32, and
an audio net a window of samples. Some files name a batch and run with a batch of one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from ..inputs.input_cases import count_elements
from ..model import ModelSignature

# Small steps first, then the sizes of images (224), of audio windows (400, 512) and of a second of audio (16,000).
_SIZES = (16, 32, 64, 128, 224, 256, 400, 512, 1024, 4096, 16_000, 2**15)
# input elements that are tried: a batch of two images of 512 by 512 in three channels
_MOST = 2**21


def find_runnable_sizes(
    model: ModelSignature, guessed: Collection[str], runs: Callable[[Mapping[str, int]], bool]
) -> dict[str, int]:
    """Return sizes of the dims ``guessed`` at which the model runs; {} where their usual sizes do, or none is found.

    Args:
        model: its dims that are not ``guessed`` keep their usual sizes.
        guessed: names of dims.
        runs: whether the model runs at some sizes.
    """
    usual = model.usual_sizes
    if runs(usual):
        return {}
    for others in _iter_other_sizes(model, guessed):
        if count_elements(model, usual | others) <= _MOST and runs(usual | others):
            return others
    return {}


def _iter_other_sizes(model: ModelSignature, guessed: Collection[str]) -> Iterator[dict[str, int]]:
    """Return other sizes: a batch of one, which many files fix; then larger and larger sizes of all dims but the batch,
    which is 2 or 1 then, and of all dims."""
    first = {dim.name for spec in model.inputs for dim in spec.shape[:1]}
    inner = [name for name in guessed if name not in first]
    batches = [dict.fromkeys((name for name in guessed if name in first), size) for size in (2, 1)]
    if batches[-1]:
        yield batches[-1]
    for size in _SIZES:
        if inner:
            yield from (batch | dict.fromkeys(inner, size) for batch in batches)
        yield dict.fromkeys(guessed, size)
