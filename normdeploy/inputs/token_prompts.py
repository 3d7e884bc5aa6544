"""Make prompts of token ids for decoders: batches of rows that are padded on the left.

Rows of a batch have different lengths. A decoder reads its next token at the end of a row, so shorter rows begin with
padding, and the attention mask is 0 there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InputError
from ..types import Array

# Length of generated prompts, in tokens.
USUAL_LENGTH = 8
IDS = "input_ids"
MASK = "attention_mask"


@dataclass(frozen=True)
class PromptBatch:
    """Prompts that are read together.

    Attributes:
        name: name for messages and tables.
        ids: token ids, int64 [batch, length].
        mask: 1 for a token and 0 for padding, int64 [batch, length].
    """

    name: str
    ids: Array
    mask: Array

    @property
    def is_padded(self) -> bool:
        """Return whether a row begins with padding."""
        return bool((self.mask == 0).any())

    def extend(self, tokens: Array) -> PromptBatch:
        """Append tokens to the rows.

        Args:
            tokens: token ids, int64 [batch, count].

        Returns:
            Rows of the prompts and their tokens.
        """
        return PromptBatch(
            self.name, np.concatenate([self.ids, tokens], 1), np.concatenate([self.mask, np.ones_like(tokens)], 1)
        )

    def pad_to(self, length: int) -> PromptBatch:
        """Add padding on the left.

        Args:
            length: new length, at least the present length.

        Returns:
            The same prompts with more padding.
        """
        more = ((0, 0), (length - self.ids.shape[1], 0))
        return PromptBatch(self.name, np.pad(self.ids, more), np.pad(self.mask, more))


def find_positions(mask: Array) -> Array:
    """Count the positions of tokens from the first token after the padding.

    Args:
        mask: int64 [batch, length].

    Returns:
        Positions, int64 [batch, length]; 0 in the padding.
    """
    return np.asarray(np.maximum(mask.cumsum(1) - 1, 0), np.int64)


def pad_left(name: str, rows: Sequence[Sequence[int]], padding: int = 0) -> PromptBatch:
    """Build a batch of rows of different lengths.

    Args:
        rows: token ids of each row.
        padding: token id of the padding. Any id works, because the mask hides the padding.

    Returns:
        The batch.

    Raises:
        InputError: there is no row, or a row is empty.
    """
    if not rows or not all(len(row) for row in rows):
        raise InputError(f"{name}: a prompt has no tokens; pass at least one token id in each prompt")
    length = max(map(len, rows))
    ids = np.full((len(rows), length), padding, np.int64)
    mask = np.zeros((len(rows), length), np.int64)
    for place, row in enumerate(rows):
        ids[place, length - len(row) :] = row
        mask[place, length - len(row) :] = 1
    return PromptBatch(name, ids, mask)


def draw_prompts(vocabulary: int, length: int, seed: int, rows: int = 1, *, equal_lengths: bool = False) -> PromptBatch:
    """Draw prompts of random token ids.

    Args:
        vocabulary: number of token ids.
        length: tokens of the longest row. The other rows are shorter, if ``length`` is above 1.
        rows: number of rows.
        equal_lengths: make all rows equally long, for a file that can't hide padding.

    Returns:
        The batch.
    """
    rng = np.random.default_rng(seed)
    if equal_lengths:
        lengths = [length] * rows
    else:
        lengths = [length, *(int(n) for n in rng.integers(1, max(length, 2), rows - 1))]
    tokens = [rng.integers(0, vocabulary, size).tolist() for size in lengths]
    listed = " and ".join(map(str, lengths))
    if rows == 1:
        name = f"random prompt of {listed} tokens, seed {seed}"
    else:
        name = f"random prompts of {listed} tokens, seed {seed}"
    return pad_left(name, tokens)


def read_prompts(name: str, arrays: Mapping[str, Array]) -> PromptBatch:
    """Take prompts out of a user's input arrays.

    Args:
        arrays: ``input_ids`` [batch, length], and ``attention_mask`` of the same shape if rows are padded. Other
            arrays, such as an empty past, are ignored.

    Returns:
        The batch.

    Raises:
        InputError: an array is missing or has a wrong dtype or shape, or a row is not padded on the left.
    """
    ids = arrays.get(IDS)
    if ids is None:
        raise InputError(f"{name} has no array {IDS!r}, which holds the prompts' tokens; it has {sorted(arrays)}")
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or not ids.size:
        raise InputError(
            f"{name}: {IDS!r} is {ids.dtype}{list(ids.shape)}; pass token ids as int64[batch, length], with at least"
            " one token"
        )
    mask = arrays.get(MASK, np.ones_like(ids))
    if mask.shape != ids.shape:
        raise InputError(
            f"{name}: {MASK!r} is {list(mask.shape)}, but {IDS!r} is {list(ids.shape)}; a prompt has no past, so pass"
            " both in the same shape"
        )
    whole = (mask != 0).astype(np.int64)
    if (np.diff(whole, axis=1) < 0).any() or not whole[:, -1].all():
        raise InputError(f"{name}: {MASK!r} has zeros after a token; pad each row on the left")
    return PromptBatch(name, ids.astype(np.int64), whole)
