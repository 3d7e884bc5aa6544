"""The ranges that half precision is decided by, and the emulation that rounds after each node."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto
from torch import nn

from normdeploy.errors import InputError
from normdeploy.loading import from_module
from normdeploy.precision.emulated_half import emulate_half
from normdeploy.precision.half_conversion import convert_to_half
from normdeploy.precision.tensor_ranges import (
    TensorRange,
    fit_samples_to_model,
    generate_samples,
    input_ranges,
    load_samples,
    measure_ranges,
)
from normdeploy.precision.type_conversion import FORMATS
from tests.half_graphs import X, text
from tests.support import run_onnxruntime


def test_ranges_are_those_of_all_samples() -> None:
    proto = text("h = Mul(x, two) y = Relu(h)", two=np.array(2.0))
    both = [{"x": X}, {"x": -10 * X}]
    for order in (both, both[::-1]):
        assert measure_ranges(proto, ["h", "y"], order) == {"h": TensorRange(-80, 40), "y": TensorRange(0, 40)}
        assert input_ranges(order) == {"x": TensorRange(-40, 20)}


def test_the_magnitude_is_that_of_the_larger_end() -> None:
    assert [TensorRange(low, high).magnitude for low, high in ((-8, 1), (1, 8), (-8, -1), (-1, 8))] == [8, 8, 8, 8]


def test_ranges_are_the_same_in_one_run_and_in_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays bounded: a run holds a few tensors, here one."""
    proto = text("h = Mul(x, two) g = Neg(h) y = Relu(g)", two=np.array(2.0))
    steps: list[tuple[str, int, int]] = []
    once = measure_ranges(proto, ["h", "g", "y"], [{"x": X}], lambda *step: steps.append(step))
    assert steps == [("calibrate", 0, 1)]
    monkeypatch.setattr("normdeploy.precision.tensor_ranges._AT_ONCE", X.nbytes)
    assert measure_ranges(proto, ["h", "g", "y"], [{"x": X}], lambda *step: steps.append(step)) == once
    assert steps[1:] == [("calibrate", i, 3) for i in range(3)]


def test_what_is_empty_or_not_finite_says_nothing() -> None:
    proto = text("h = Log(x) y = Relu(h)", inputs="float[n,4] x", outputs="float[n,4] y")
    assert measure_ranges(proto, ["h"], [{"x": np.zeros((0, 4), np.float32)}]) == {}
    assert measure_ranges(proto, ["h"], [{"x": np.full((1, 4), -1, np.float32)}]) == {}
    assert measure_ranges(proto, ["h"], [{"x": np.array([[0, 1, 1, -1]], np.float32)}]) == {"h": TensorRange(0, 0)}


def test_samples_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    proto = text("y = Relu(x)")
    with pytest.raises(InputError, match=r"sample 0 lacks \['x'\]"):
        fit_samples_to_model([{}], proto)
    with pytest.raises(InputError, match=r"has \['z'\], which are not inputs of the model"):
        fit_samples_to_model([{"x": X, "z": X}], proto)
    with pytest.raises(InputError, match="'x' is int64, but the model expects float32"):
        fit_samples_to_model([{"x": X.astype(np.int64)}], proto)
    with pytest.raises(InputError, match=r"sample 0: input 'x' has shape \[2, 4\], but got \[4\]; reshape it"):
        convert_to_half(proto, "fp16", [{"x": X[0]}])
    (tmp_path / "bad.npz").write_bytes(b"no zip")
    with pytest.raises(InputError, match=r"is not an \.npz file of arrays"):
        load_samples([tmp_path / "bad.npz"])
    np.savez(tmp_path / "pickled.npz", x=np.array([{}], dtype=object))
    with pytest.raises(InputError, match=r"is not an \.npz file of arrays"):
        load_samples([tmp_path / "pickled.npz"])


def test_generated_inputs_take_the_sizes_and_values_that_the_model_does() -> None:
    model = from_module(nn.Embedding(100, 4).eval(), inputs=["ids:int64[batch=1:3:8,seq=2:4:6]{50:60}"])
    found = generate_samples(model.inputs)
    assert [f["ids"].shape for f in found] == [(3, 4), (3, 4), (1, 2), (8, 6)]
    assert all(f["ids"].min() >= 50 and f["ids"].max() < 60 for f in found)


def test_without_calibration_the_account_says_so() -> None:
    """Of integers a file does not say the values: an index that is out of range makes generated inputs useless."""
    proto = text("y = Gather(w, i)", inputs="int64[2] i", outputs="float[2,4] y", w=np.ones((1, 4)))
    _, account = convert_to_half(proto, "fp16")
    assert account.calibrated == "" or account.samples
    assert any("--calibrate" in note for note in account.notes)


@pytest.mark.parametrize("to", ["fp16", "bf16"])
def test_stepwise_rounds_after_each_node(to: str) -> None:
    kind = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}[to]
    name = FORMATS[to].dtype.name
    proto = text("h = Mul(x, x) y = Add(h, x)", inputs=f"{name}[2,4] x", outputs=f"{name}[2,4] y")
    assert proto.graph.input[0].type.tensor_type.elem_type == kind
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(FORMATS[to].dtype)
    wide = x.astype(np.float32)
    expected = ((wide * wide).astype(FORMATS[to].dtype).astype(np.float32) + wide).astype(FORMATS[to].dtype)
    np.testing.assert_array_equal(run_onnxruntime(emulate_half(proto), {"x": wide})[0], expected.astype(np.float32))
    assert ml_dtypes.finfo(expected.dtype).bits == 16
