"""Search for sizes at which a file runs, if the user gives no sizes and the default sizes fail.

A convolutional net needs at least as many pixels as its kernels span. A net that halves the image five times needs a
multiple of 32. An audio net needs a full window of samples. Some files name a batch dim but run only with a batch of
one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from ..inputs.input_cases import count_elements
from ..model import ModelSignature

# Sizes to try: small powers of two, typical sizes of images (224) and audio windows (400, 512), and a second of audio
# (16,000).
_SIZES = (16, 32, 64, 128, 224, 256, 400, 512, 1024, 4096, 16_000, 2**15)
# Maximum number of elements of an input: a batch of two 512 by 512 images with three channels, rounded up.
_MOST = 2**21


def find_runnable_sizes(
    model: ModelSignature, guessed: Collection[str], runs: Callable[[Mapping[str, int]], bool]
) -> dict[str, int]:
    """Search for sizes of the dims ``guessed`` at which the model runs.

    Args:
        model: description of the model. Its dims that are not ``guessed`` keep their usual sizes.
        guessed: names of the dims whose sizes to search.
        runs: function that returns whether the model runs at given sizes.

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

    The first try is a batch of one, because many files run only with such a batch. Then come increasing sizes: first
    for all dims except the batch, which is 2 or 1, and then for all dims.
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
