"""Shapes in trtexec's and Polygraphy's spelling become a profile."""

from __future__ import annotations

import pytest

from normdeploy.errors import InputError
from normdeploy.verbs.build.shape_texts import profile_from_shapes


@pytest.mark.parametrize(
    ("low", "best", "high", "profile"),
    [
        ([], [], [], []),
        (["x:1x3"], ["x:2x3"], ["x:4x3"], ["x=1x3:2x3:4x3"]),
        (["x:1x3,y:1"], ["y:2,x:2x3"], ["x:4x3", "y:3"], ["x=1x3:2x3:4x3", "y=1:2:3"]),
        (["x:[1,3],y:[1]"], ["x:[2, 3]", "y:[2]"], ["x:4x3,y:[3]"], ["x=1x3:2x3:4x3", "y=1:2:3"]),
        # trtexec: the usual shapes alone are all shapes.
        ([], ["x:2x3"], [], ["x=2x3:2x3:2x3"]),
        # A name may contain a colon, and trtexec accepts quotes around it.
        (["in:0:1x3"], ["'in:0':2x3"], ["in:0:4x3"], ["in:0=1x3:2x3:4x3"]),
    ],
)
def test_shapes_become_a_profile(low: list[str], best: list[str], high: list[str], profile: list[str]) -> None:
    assert profile_from_shapes(low, best, high) == profile


@pytest.mark.parametrize(
    ("low", "best", "high", "message"),
    [
        (["x:1x3"], [], [], "--optShapes has no shape for 'x'; pass all three of"),
        (["x:1"], ["x:1,y:2"], ["x:3"], "--minShapes has no shape for 'y'"),
        (["x=1x3"], [], [], "--minShapes 'x=1x3' can't be read; write NAME:1x3x224x224"),
        ([], ["x:1x3,"], ["x:ax3"], "--maxShapes 'x:ax3' can't be read"),
        ([], ["x:1,x:2"], [], "--optShapes has two shapes for 'x', 1 and 2; pass one"),
    ],
)
def test_shapes_that_state_no_profile_are_refused(
    low: list[str], best: list[str], high: list[str], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        profile_from_shapes(low, best, high)
    assert str(caught.value).startswith(message)
