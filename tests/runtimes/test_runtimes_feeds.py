"""The check of the names that are fed."""

from __future__ import annotations

import numpy as np
import pytest

from normdeploy.errors import InputError
from normdeploy.inputs.array_conversion import check_names


class Unsearched(list[str]):
    """A list that is read once from its beginning: a search for each of many names takes the time of their square."""

    def __contains__(self, name: object) -> bool:
        raise AssertionError(f"a search for {name!r}")


def test_check_names_list_is_not_searched() -> None:
    names = [f"x{i}" for i in range(8)]
    check_names("runner", dict.fromkeys(names, np.zeros(1)), Unsearched(names))
    with pytest.raises(InputError, match="has no inputs \\['x7'\\]"):
        check_names("runner", dict.fromkeys(names, np.zeros(1)), Unsearched(names[:-1]))
