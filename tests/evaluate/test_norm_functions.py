"""The fast primitive of norms on arrays is the definition's."""

import numpy as np
import pytest

from normdeploy.evaluate.norm_functions import ArrayInterpreter
from normdeploy.norms.interpreter import Interpreter


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(("axes", "epsilon"), [((-1,), 1e-5), ((1, 2), 0.25), ((-2, -1), 0.0)])
def test_arrays_standardize_equals_its_definition(axes: tuple[int, ...], epsilon: float, centered: bool) -> None:
    o = ArrayInterpreter(opset=21, outputs=3)
    x = np.random.default_rng(0).standard_normal((3, 4, 5))
    held = x.copy()
    fast = o.standardize(x, axes, epsilon, centered=centered)
    defined = Interpreter.standardize(o, x, axes, epsilon, centered=centered)
    np.testing.assert_array_equal(x, held)
    for got, expected in zip(fast, defined, strict=True):
        if expected is None:
            assert got is None
        else:
            np.testing.assert_allclose(got, expected, rtol=1e-14, atol=1e-15)
