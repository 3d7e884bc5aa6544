"""A plugin takes the place of the function body of the same name: both have to say the same."""

from __future__ import annotations

import numpy as np
import pytest
from normdeploy_plugins.ops import BY_NAME

from normdeploy import functions


@pytest.mark.parametrize("name", sorted(functions.OPS))
@pytest.mark.parametrize("axes", [(-1,), (-2, -1)])
@pytest.mark.parametrize("ddof", [0, 1])
def test_plugin_and_function_agree(name: str, axes: tuple[int, ...], ddof: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 5, 7)) * 3 + 2
    op, row = BY_NAME[name], x.shape[min(axes) :]
    parameters = [rng.standard_normal(row) for _ in op.inputs[1:]]
    given = {"epsilon": 1e-2, "axis": min(axes)} | ({"ddof": ddof} if "ddof" in op.attributes else {"offset": 0.0})
    expected = functions.reference(name, x, *parameters, axes=axes, epsilon=1e-2, **({"ddof": ddof} if "ddof" in op.attributes else {}))
    assert np.abs(op.reference(x, *parameters, **given) - expected).max() <= 1e-13
