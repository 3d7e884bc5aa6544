"""Suggest how to make an array fit an input."""

from __future__ import annotations

from collections.abc import Sequence


def advise_on_shape(name: str, wanted: Sequence[int | str | None], given: Sequence[int]) -> str:
    """Suggest how to turn an array of shape ``given`` into an array of shape ``wanted``.

    Args:
        name: name of the input.
        wanted: dims of the input. A name or None matches any size.
        given: sizes of the array.

    Returns:
        The end of an error message. It gives a numpy expression if moving or adding one dim makes the shape fit, for
        example "the channels are last: x.transpose(0, 3, 1, 2)". Otherwise "reshape it".
    """

    def is_broadcastable(shape: Sequence[int]) -> bool:
        """Return whether ``shape`` has the same rank as ``wanted`` and the same fixed sizes."""
        if len(shape) != len(wanted):
            return False
        return all(not isinstance(want, int) or want == size for want, size in zip(wanted, shape, strict=True))

    rank = len(given)
    # Only arrays of rank 3 and more can be images with channels. In rank 2, the same permutation would transpose a
    # matrix of features.
    if rank > 2:
        channels_first = (0, rank - 1, *range(1, rank - 1))
        channels_last = (0, *range(2, rank), 1)
        for order, side in ((channels_first, "last"), (channels_last, "first")):
            if is_broadcastable([given[axis] for axis in order]):
                return f"the channels are {side}: {name}.transpose({', '.join(map(str, order))})"
    if is_broadcastable([1, *given]):
        return f"the batch dim is missing: {name}[None]"
    return "reshape it"
