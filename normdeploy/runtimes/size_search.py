"""Search for sizes at which a file runs if none are given and the default guesses fail.

A convolutional net needs as many pixels as its kernels span; a net that halves them five times needs a multiple of 32;
an audio net needs a window of samples. Some files name a batch dim but run only with a batch of one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from ..inputs.input_cases import count_elements
from ..model import ModelSignature

# Small steps first, then typical sizes of images (224), audio windows (400, 512) and a second of audio (16,000).
_SIZES = (16, 32, 64, 128, 224, 256, 400, 512, 1024, 4096, 16_000, 2**15)
# Limit of input elements: a batch of two 512 by 512 images with three channels, rounded up.
_MOST = 2**21


def find_runnable_sizes(
    model: ModelSignature, guessed: Collection[str], runs: Callable[[Mapping[str, int]], bool]
) -> dict[str, int]:
    """Search for sizes of the dims ``guessed`` at which the model runs.

    Args:
        model: dims that are not ``guessed`` keep their usual sizes.
        guessed: names of dims.
        runs: returns whether the model runs at given sizes.

    Returns:
        Dim name -> size; {} if the usual sizes work or no sizes are found.
    """
    usual = model.usual_sizes
    if runs(usual):
        return {}
    for others in _iter_other_sizes(model, guessed):
        if count_elements(model, usual | others) <= _MOST and runs(usual | others):
            return others
    return {}


def _iter_other_sizes(model: ModelSignature, guessed: Collection[str]) -> Iterator[dict[str, int]]:
    """Yield other sizes to try.

    First a batch of one, which many files fix. Then larger and larger sizes: of all dims but the batch (which is 2 or
    1), and of all dims.
    """
    first = {dim.name for spec in model.inputs for dim in spec.shape[:1]}
    inner = [name for name in guessed if name not in first]
    batches = [dict.fromkeys((name for name in guessed if name in first), size) for size in (2, 1)]
    if batches[-1]:
        yield batches[-1]
    for size in _SIZES:
        if inner:
            yield from (batch | dict.fromkeys(inner, size) for batch in batches)
        yield dict.fromkeys(guessed, size)
