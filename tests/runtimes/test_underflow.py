"""Numbers that a type does not hold are 0 there, and equal ones may come in any order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from normdeploy import verify
from normdeploy.runtimes.underflow import round_underflow
from tests.support import parsed


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_small_numbers_keep_sign_and_mean_and_lie_on_the_types_grid(
    kind: torch.dtype, rng: np.random.Generator
) -> None:
    normal, unit = torch.finfo(kind).tiny, torch.finfo(kind).eps / 2
    start = np.concatenate([rng.uniform(-normal, normal, 4000), [0.0, normal, 1.0, np.inf, 1e-300]])
    values = start.copy()
    round_underflow(values, unit, rng)
    assert np.array_equal(torch.from_numpy(values).to(kind).double().numpy(), values)
    assert (values * np.sign(start) >= 0).all()
    assert np.array_equal(values[4000:], [0.0, normal, 1.0, np.inf, 0.0])
    assert abs(values[:4000].mean() - start[:4000].mean()) < 0.05 * normal


class Ordered(torch.nn.Module):
    """The scores of classes in order, and how many there are, as a sampler has them."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear, self.form = torch.nn.Linear(8, 12), form

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = self.linear(x).softmax(-1)
        if self.form == "topk":
            return scores.topk(8)
        if self.form == "count":
            return ((scores > 0).sum(-1),)
        # Squares of small numbers underflow sooner.
        return ((scores * scores).argsort(-1),)


@pytest.mark.parametrize("form", ["topk", "count", "argsort"])
def test_a_tie_of_numbers_that_underflow_is_no_fault(form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = Ordered(form).eval(), tmp_path / "right.onnx"
    x = torch.randn(3, 8)
    torch.onnx.export(model, (x,), path, dynamo=False, input_names=["x"])
    assert verify(model, path, (x,), seeds=1)
    assert verify(path, path, seeds=1)


def test_another_order_of_numbers_that_float32_holds_is_a_fault(tmp_path: Path) -> None:
    def saved(name: str, axis: int, largest: int) -> Path:
        body = f"s = Softmax <axis = {axis}> (x) y, i = TopK <largest = {largest}> (s, k)"
        proto = parsed(f"net (float[3, 8] x) => (float[3, 4] y, int64[3, 4] i) {{ {body} }}", k=np.array([4]))
        onnx.save(proto, tmp_path / name)
        return tmp_path / name

    reference = saved("right.onnx", -1, 1)
    assert verify(reference, reference, seeds=1)
    assert not verify(reference, saved("wrong.onnx", -1, 0), seeds=1)
