"""Prompts of token ids: padding on the left, positions, random prompts, and prompts of the user."""

from __future__ import annotations

import numpy as np
import pytest

from normdeploy.errors import InputError
from normdeploy.inputs.token_prompts import draw_prompts, find_positions, pad_left, read_prompts


def test_shorter_rows_are_padded_on_the_left() -> None:
    batch = pad_left("two", [[5, 6, 7], [8]], padding=1)
    np.testing.assert_array_equal(batch.ids, [[5, 6, 7], [1, 1, 8]])
    np.testing.assert_array_equal(batch.mask, [[1, 1, 1], [0, 0, 1]])
    np.testing.assert_array_equal(find_positions(batch.mask), [[0, 1, 2], [0, 0, 0]])
    longer = batch.extend(np.array([[2], [3]]))
    np.testing.assert_array_equal(longer.ids[:, -1], [2, 3])
    np.testing.assert_array_equal(longer.mask[:, -1], [1, 1])
    wider = batch.pad_to(4)
    np.testing.assert_array_equal(wider.mask, [[0, 1, 1, 1], [0, 0, 0, 1]])
    np.testing.assert_array_equal(wider.ids[:, 1:], batch.ids)


def test_drawn_prompts_depend_on_the_seed_alone() -> None:
    first, again, other = (draw_prompts(99, 8, seed, 2) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.ids, again.ids)
    assert first.ids.tolist() != other.ids.tolist()
    assert first.is_padded
    assert not draw_prompts(99, 8, 0).is_padded


@pytest.mark.parametrize("rows", [[], [[]], [[1], []]])
def test_a_prompt_without_tokens_is_refused(rows: list[list[int]]) -> None:
    with pytest.raises(InputError, match="has no tokens"):
        pad_left("mine", rows)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.ones((1, 2))}, "has no array 'input_ids'"),
        ({"input_ids": np.ones(3, np.int64)}, r"'input_ids' is int64\[3\]"),
        ({"input_ids": np.ones((1, 3), np.float32)}, r"'input_ids' is float32\[1, 3\]"),
        ({"input_ids": np.ones((1, 0), np.int64)}, "at least one token"),
        ({"input_ids": np.ones((1, 2), np.int64), "attention_mask": np.ones((1, 5), np.int64)}, "no past"),
        ({"input_ids": np.ones((1, 2), np.int64), "attention_mask": np.array([[1, 0]])}, "pad each row on the left"),
    ],
)
def test_wrong_prompts_of_the_user_are_refused(arrays: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_prompts("mine.npz", arrays)
