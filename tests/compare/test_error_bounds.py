"""What each element of an output may be off by: the roundings put back into the float64 reference, and the bounds made
of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.compare.error_bounds import DECIDING_RUNS, MOST_RATIO, MOST_RUNS, RUNS, ErrorBounds
from normdeploy.compare.ulp_spacing import EAGER_MULTIPLE, float_spacing
from normdeploy.loading import from_module
from normdeploy.runtimes import RunResult
from normdeploy.runtimes.rounding_noise import LANES, RoundingRunner, float32_sum_error, statistics_error
from normdeploy.runtimes.torch_runners import EagerRunner

from ..support import run_onnxruntime


class Fn(nn.Module):
    def __init__(self, function) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def spread(function, x: np.ndarray, half: torch.dtype | None = None, runs: int = 32) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[no-untyped-def]
    """The float64 result, and how far roundings move each element."""
    runner = RoundingRunner(from_module(Fn(function).eval(), (torch.from_numpy(x),)))
    (reference,) = runner.infer({"x": x}).values()
    moved = [next(iter(runner.run_rounded({"x": x}, seed, half).values())) for seed in range(runs)]
    return reference, np.max([np.abs(m - reference) for m in moved], axis=0)


X = np.linspace(0.51, 1.99, 64, dtype=np.float32)


def test_one_rounding_moves_a_result_by_a_unit_at_most() -> None:
    reference, moved = spread(lambda x: x + 1, X)
    assert (moved <= 2.0**-24 * reference).all()
    assert (moved > 2.0**-26 * reference).all()  # 32 draws below a quarter of the unit: 1e-19
    assert (spread(lambda x: x + 1, X, torch.float16)[1] > 2.0**-13 * reference).all()


def test_a_short_result_of_a_sum_or_product_is_exact() -> None:
    """Ties behind them stay ties: 4x + 0.5 of a multiple of 1/8; a tenth of it is rounded."""
    x = np.arange(1, 17, dtype=np.float32) / 8
    _, moved = spread(lambda x: torch.cat([4 * x + 0.5, x / 0.1]), x)
    assert not moved[:16].any()
    assert (moved[16:] > 0).all()


def test_moves_and_choices_round_nothing() -> None:
    _, moved = spread(lambda x: torch.relu(-x.reshape(8, 8).t()).flip(0), X)
    assert not moved.any()


def test_cancellation_is_seen_where_it_happens() -> None:
    """(x + 1000) - 1000 has lost the digits of x, and 2·x has not."""
    _, moved = spread(lambda x: torch.cat([(x + 1000) - 1000, 2 * x]), X)
    assert (moved[:64] > 1e-5).all()
    assert (moved[64:] < 1e-6).all()


def test_a_sum_in_lanes_loses_what_float32_loses() -> None:
    """The same by a loop; and a row whose partial sums float32 holds loses nothing."""
    rows = np.stack([np.full(1003, 0.3), np.random.default_rng(0).normal(size=1003), np.full(1003, 0.25)])
    rows = rows.astype(np.float32).astype(np.float64)
    found = float32_sum_error(rows)
    for row, off in zip(rows, found[:, 0], strict=True):
        sums = np.zeros(LANES, np.float32)
        for i, number in enumerate(row):
            sums[i % LANES] += np.float32(number)
        total = np.float32(0)
        for one in sums:
            total += one
        assert off == abs(float(total) - row.sum())
    assert found[0] > 1e-6
    assert found[2] == 0


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 0.9])
@pytest.mark.parametrize("n", [2048, 16384, 65536])
def test_a_constant_row_may_be_off_by_what_onnxruntime_loses(n: int, value: float) -> None:
    """Its InstanceNormalization adds up in 8 lanes or more; a kernel with more of them loses less."""
    row = np.full((1, 1, n), value, np.float32)
    body = "y = InstanceNormalization <epsilon = 1e-5> (x, one, zero)"
    text = (
        f'<ir_version: 10, opset_import: ["": 21]> g (float[1,1,{n}] x) => (float[1,1,{n}] y) <float[1] one = {{1}},'
        " float[1] zero = {0}>"
    )
    (found,) = run_onnxruntime(onnx.parser.parse_model(f"{text} {{ {body} }}"), {"x": row})
    away, _ = statistics_error(row.astype(np.float64), 1e-5, 2.0**-24)
    assert np.abs(found).max() <= EAGER_MULTIPLE * away.max()
    assert away.max() <= n * 2.0**-24 * value / np.sqrt(1e-5)  # the worst case of any order


@pytest.mark.parametrize("norm", [nn.GroupNorm(4, 16), nn.InstanceNorm2d(16, affine=True)], ids=["group", "instance"])
def test_norms_of_large_images_pass_and_others_do_not(norm: nn.Module, tmp_path: Path) -> None:
    """A zero image behind a convolution is one number in each row. An epsilon that is another is seen nevertheless."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), norm, nn.LeakyReLU()).eval()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(1, 3, 96, 96)
    made = normdeploy.export(net, x, output=tmp_path / "net.onnx")
    assert normdeploy.verify(made, seeds=1)
    proto = onnx.load(tmp_path / "net.onnx")
    (node,) = (n for n in proto.graph.node if n.op_type == "InstanceNormalization")
    next(a for a in node.attribute if a.name == "epsilon").f = 2e-5
    onnx.save(proto, tmp_path / "other.onnx")
    assert not normdeploy.verify(net, tmp_path / "other.onnx", args=x, seeds=1)


@pytest.mark.parametrize("shape", [(2, 3, 96, 96), (3, 96, 96)])
def test_a_pool_of_equal_numbers_loses_what_a_sum_loses(shape: tuple[int, ...]) -> None:
    x = np.full(shape, 0.3, np.float32)
    _, moved = spread(nn.AdaptiveAvgPool2d(1), x, runs=16)
    lost = float32_sum_error(np.full((1, 96 * 96), 0.3, np.float32).astype(np.float64)).item() / 96**2
    assert lost / 4 < moved.max() < 2 * lost


def test_a_running_sum_loses_more_and_more() -> None:
    _, moved = spread(lambda x: x.reshape(1, -1).cumsum(1), np.ones(4096, np.float32))
    assert moved[0, -1] > 20 * 2.0**-24 * 4096 / 64  # sqrt(4096) roundings of sums that grow to 4096


def test_constant_rows_of_a_norm() -> None:
    """x - mean is a rounding of 3, and 1/sqrt(eps) is 316; eager in float32 shows that it is so."""
    x = np.full((4, 32), 3, np.float32) * np.float32(1.1)
    _, moved = spread(lambda x: nn.functional.layer_norm(x / 1.1 + 0.1, (32,)), x)
    assert (moved > 1e-6).all()


def bounds(spreads: list[float], eager: float = 0.0) -> tuple[ErrorBounds, list[int]]:
    """Of one output of two elements, 1 and 1000; run k of the reference is off by ``spreads[k]`` in the first."""
    reference, asked = np.array([1.0, 1000.0]), list[int]()

    def rounded(seed: int) -> RunResult:
        asked.append(seed)
        return {"y": reference + np.array([spreads[min(seed, len(spreads) - 1)], 0.0])}

    return ErrorBounds({"y": reference}, {"y": (reference + np.array([eager, 0])).astype(np.float32)}, rounded), asked


ULP = np.array([2.0**-23, 2.0**-14])


def test_each_element_has_a_bound_of_its_own() -> None:
    made, asked = bounds([1e-3])
    np.testing.assert_allclose(made.allowed_error("y", 1.0), EAGER_MULTIPLE * (np.array([1e-3, 0]) + ULP), rtol=1e-6)
    assert asked == list(range(RUNS))


def test_eager_s_error_counts_where_it_is_and_its_ratio_everywhere_up_to_a_limit() -> None:
    made, _ = bounds([0.0], eager=1e-3)
    assert made.eager_ratio("y") == pytest.approx(1e-3 / ULP[0], rel=1e-3)
    np.testing.assert_allclose(
        made.allowed_error("y", made.eager_ratio("y")),
        EAGER_MULTIPLE * np.array([1e-3, MOST_RATIO * ULP[1]]),
        rtol=1e-3,
    )


def test_more_roundings_are_tried_before_a_runtime_fails() -> None:
    """A choice that turns over in the 20th run only."""
    made, asked = bounds([0.0] * 20 + [1.0])
    assert (made.allowed_error("y", 1.0, np.array([0.5, 0.0])) >= [0.5, 0.0]).all()
    assert 20 < len(asked) < MOST_RUNS
    never, asked = bounds([0.0])
    assert (np.array([0.5, 0.0]) > never.allowed_error("y", 1.0, np.array([0.5, 0.0]))).any()
    assert len(asked) >= MOST_RUNS


def without_time(elements: int, fault: float = 0.0) -> tuple[int, int]:
    """Count the elements that fail and the runs, if there is no time for draws.

    The runtime is a correct evaluation whose errors are four times those of a run, as in a deep network of
    convolutions. ``fault`` is added to its first element.
    """
    rng, runs = np.random.default_rng(7), list[int]()
    reference = np.full(elements, 1000.0)

    def rounded(seed: int) -> RunResult:
        runs.append(seed)
        return {"y": reference + np.random.default_rng([8, seed]).standard_normal(elements)}

    eager = reference + 4 * rng.standard_normal(elements)
    made = ErrorBounds({"y": reference}, {"y": eager.astype(np.float32)}, rounded, lambda: False)
    error = np.abs(4 * rng.standard_normal(elements))
    error[0] += fault
    return int((error > made.allowed_error("y", made.eager_ratio("y"), error)).sum()), len(runs)


def test_a_right_file_does_not_fail_because_few_roundings_were_small_at_an_element() -> None:
    """With three runs, five of the elements exceed the bound."""
    failing, runs = without_time(20_000)
    assert failing == 0
    assert RUNS < runs <= DECIDING_RUNS


@pytest.mark.parametrize("fault", [150.0, 300.0, 3000.0])
def test_a_fault_beyond_all_roundings_fails_without_time(fault: float) -> None:
    """The largest error of a correct evaluation is 17 here, and no bound exceeds 4 · 8 · 4.5."""
    failing, runs = without_time(20_000, fault)
    assert failing >= 1
    assert runs <= DECIDING_RUNS


def test_a_gross_fault_takes_no_more_runs_than_any_element() -> None:
    assert without_time(2, 3000.0) == (1, RUNS)


def test_the_spacing_of_numbers() -> None:
    values = np.array([0.0, 1.0, 1.9, 3.0, np.inf, 1e-30])
    assert float_spacing(values, np.dtype(np.float32))[1:4].tolist() == [2.0**-23, 2.0**-23, 2.0**-22]
    # below the smallest normal number results may be flushed to zero
    assert float_spacing(values, np.dtype(np.float32))[0] == 2.0**-126
    assert float_spacing(np.zeros(1), np.dtype(np.float16))[0] == 2.0**-24


def test_eager_stays_within_what_roundings_allow() -> None:
    """The rule allows eager by its own error; the roundings alone nearly do: eager needs less than the limit of
    them."""
    torch.manual_seed(0)
    model = from_module(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval(), inputs=["x:float32[2,7,32]"])
    runner, eager, feeds = RoundingRunner(model), EagerRunner(model), model.samples(0)
    made = ErrorBounds(runner.infer(feeds), eager.infer(feeds), lambda seed: runner.run_rounded(feeds, seed))
    assert 0.5 < made.eager_ratio("output") < MOST_RATIO
