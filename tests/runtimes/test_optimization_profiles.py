"""Profiles: the sizes that an engine is built for, by input and by dim."""

from __future__ import annotations

from typing import Any

import pytest

from normdeploy.errors import InputError
from normdeploy.model import Dim, InputSpec, TensorSpec
from normdeploy.runtimes.optimization_profiles import parse_ranges, resolve_profile

IDS, MASK, LONE = (
    TensorSpec("ids", "int64", ("batch", "seq")),
    TensorSpec("mask", "int64", ("batch", "seq", 4)),
    TensorSpec("batch", "int64", ("batch",)),
)


OPEN = TensorSpec("open", "int64", (None, 4))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["batch=1:2:4", "seq=1:8:9"], {"ids": ((1, 1), (2, 8), (4, 9)), "mask": ((1, 1, 4), (2, 8, 4), (4, 9, 4))}),
        (["ids=1x1:2x8:4x9"], {"ids": ((1, 1), (2, 8), (4, 9)), "mask": ((1, 1, 4), (2, 8, 4), (4, 9, 4))}),
        (
            {"batch": (1, 2, 4), "seq": [1, 8, 9]},
            {"ids": ((1, 1), (2, 8), (4, 9)), "mask": ((1, 1, 4), (2, 8, 4), (4, 9, 4))},
        ),
        (
            {"mask": ([1, 1, 4], [2, 8, 4], [4, 9, 4])},
            {"ids": ((1, 1), (2, 8), (4, 9)), "mask": ((1, 1, 4), (2, 8, 4), (4, 9, 4))},
        ),
        ("seq=2:2:2", {"ids": ((5, 2), (6, 2), (7, 2)), "mask": ((5, 2, 4), (6, 2, 4), (7, 2, 4))}),
    ],
)
def test_profiles_by_input_and_by_dim(given: Any, wanted: dict[str, Any]) -> None:
    batch = Dim("batch", 5, 6, 7)
    recorded = [
        InputSpec("ids", "int64", (batch, Dim("seq", 1, 1, 1))),
        InputSpec("mask", "int64", (batch, Dim("seq", 1, 1, 1), Dim.from_size(4))),
    ]
    assert resolve_profile([IDS, MASK], recorded, given) == wanted


def test_an_input_and_a_dim_of_one_name() -> None:
    assert resolve_profile([LONE], (), ["batch=1:2:3"]) == {"batch": ((1,), (2,), (3,))}
    assert resolve_profile([TensorSpec("batch", "int64", ("batch", 2))], (), ["batch=1:2:3"]) == {
        "batch": ((1, 2), (2, 2), (3, 2))
    }
    assert resolve_profile([OPEN], (), ["open=1x4:2x4:3x4"]) == {"open": ((1, 4), (2, 4), (3, 4))}
    assert resolve_profile([TensorSpec("x", "int64", (2, 3))], ()) == {}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["idz=1x1:2x8:4x9"],
            (
                r"names 'idz', which is neither an input nor a dynamic dim; the file's inputs are"
                r" ids:int64\[batch, seq\], mask:int64\["
            ),
        ),
        (["batch=1:2:4"], r"dim 'seq' of input ids:int64\[batch, seq\] is dynamic and has no known range"),
        (["batch=4:2:1", "seq=1:1:1"], "is 4:2:1, but every size must have 1 <= min <= opt <= max"),
        (["batch=0:2:4", "seq=1:1:1"], "1 <= min"),
        (["ids=1x1x1:2x8x1:4x9x1"], r"of rank 3, but ids:int64\[batch, seq\] has rank 2"),
        (["mask=1x1x4:2x8x4:4x9x5"], r"dim 2 of mask:int64\[batch, seq, 4\] is fixed at 4"),
        (
            ["ids=1x1:2x8:4x9", "mask=1x1x4:2x8x4:5x9x4"],
            "'batch' has the range 1:2:4 by the profile of input 'ids', but 1:2:5",
        ),
        (["ids=1x1:2x8:4x9", "batch=1:1:1"], "'batch' has the range 1:1:1 by its own profile, but 1:2:4"),
        (["batch=1x2:1x2:1x2"], "a dim has one size"),
        (["ids=1x1:2x8"], "has 2 parts instead of min, opt and max"),
        (["ids=1x1:2x8:4"], "mixes ranks: 1x1:2x8:4"),
        (["ids=1x1:2x8:4x"], "can't be read; write name=min:opt:max"),
        (["ids"], "can't be read"),
        (["batch=1:2:4", "batch=1:2:4"], "contains 'batch' twice"),
    ],
)
def test_profiles_that_make_no_sense(given: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        resolve_profile([IDS, MASK], (), given)


def test_an_unnamed_dim_is_missed_by_its_place() -> None:
    with pytest.raises(InputError, match=r"dim 0 of input open:int64\[\?, 4\] is dynamic"):
        resolve_profile([OPEN], ())


def test_names_may_hold_what_the_text_uses() -> None:
    assert parse_ranges(["model.x=y=1x2:1x2:3x4"]) == {"model.x=y": ((1, 2), (1, 2), (3, 4))}
