"""What is seen of the inputs of linear layers on samples."""

from __future__ import annotations

import numpy as np

from normdeploy.quantization.activation_stats import observe_activations, unmasked_rows
from normdeploy.quantization.quantization_request import QuantizationRequest
from tests.half_graphs import text


def test_rows_that_the_mask_leaves_out() -> None:
    value = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    mask = np.array([[1, 1, 0], [1, 0, 0]])
    assert unmasked_rows(value, -1, {"attention_mask": mask}).tolist() == [*value[0, :2].tolist(), value[1, 0].tolist()]
    assert unmasked_rows(value, -1, {}).shape == (6, 4)
    assert unmasked_rows(value, 1, {"attention_mask": mask}).shape == (8, 3)  # no tokens along the other axes
    assert unmasked_rows(value, -1, {"attention_mask": mask * 7}).shape == (6, 4)


def test_padding_gives_no_range() -> None:
    """Of each batch the last token is padding, and larger than all that counts."""
    proto = text(
        "s = Cast<to=1>(attention_mask) p = ReduceSum(s) h = Add(x, p) y = MatMul(h, w)",
        "float[b,t,4] x, int64[b,t] attention_mask",
        "float[b,t,2] y",
        w=np.ones((4, 2)),
    )
    x = np.random.default_rng(0).uniform(-1, 1, (2, 3, 4)).astype(np.float32)
    x[:, -1] = 100.0
    mask = np.array([[1, 1, 0], [1, 1, 0]])
    seen = observe_activations(proto, {"x": -1}, [{"x": x, "attention_mask": mask}])["x"]
    assert len(seen.rows) == 4
    assert seen.high.max() <= 1
    np.testing.assert_array_equal(seen.low, x[:, :2].min((0, 1)))
    whole = observe_activations(proto, {"x": -1}, [{"x": x, "attention_mask": mask}], padding=True)["x"]
    assert len(whole.rows) == 6
    assert whole.high.max() == 100


def test_whose_ranges_padding_gives_room() -> None:
    told = {
        (to, runtime): QuantizationRequest(to, runtime).counts_padding
        for to, runtime in (("int8", "any"), ("int8", "onnxruntime"), ("fp8", "tensorrt"), ("int4", "any"))
    }
    assert [wish for wish, padding in told.items() if not padding] == [("int8", "any")]
