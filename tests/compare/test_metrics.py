"""The metrics of ``verify`` against numbers worked out by hand and in other ways, and how a measure adds them up."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from normdeploy.compare import metrics
from normdeploy.compare.metrics import METRICS
from normdeploy.compare.policy import parse_policy
from normdeploy.errors import InputError
from normdeploy.inputs.input_cases import DATASET, InputCase
from normdeploy.verbs.verify.rule_measures import OutputMeasures

NAN, INF = float("nan"), float("inf")


def of(name: str, value: Any, reference: Any) -> Any:
    return METRICS[name].of(np.asarray(value, np.float32), np.asarray(reference, np.float64))


def judged(
    tolerance: Any = None, metric: Any = None, *pairs: tuple[Any, Any], kind: str = "random", dataset: bool = False
) -> Any:
    measures = OutputMeasures(parse_policy(tolerance, metric), dataset)
    for number, (value, reference) in enumerate(pairs):
        value = value if isinstance(value, np.ndarray) or value is None else np.asarray(value, np.float32)
        dtype = np.dtype(np.float32) if value is None else value.dtype
        measures.add("y", InputCase(f"case {number}", kind, dict), value, np.asarray(reference, np.float64), dtype)
    (rule,) = measures.verdicts_of("y")
    return rule


SCORES = [[3, 1, 2, 0, 0, 0, 0], [1, 3, 2, 0, 0, 0, 0], [5, 4, 3, 2, 1, 0, -1], [0, 0, 0, 0, 0, 0, 0]]
"""Four samples of seven classes: the best is 0, 1, 0, and all alike."""


@pytest.mark.parametrize(
    ("name", "labels", "found"),
    [
        ("accuracy_drop", [0, 1, 0, 0], [1, 1, 1, 1]),
        ("accuracy_drop", [2, 2, 1, 1], [0, 0, 0, 0]),  # of equal scores the first class is the answer
        ("accuracy5_drop", [2, 4, 4, 4], [1, 1, 1, 1]),  # in row 1, 1 2 0 3 4 are the first five
        ("accuracy5_drop", [6, 5, 5, 5], [0, 0, 0, 0]),
    ],
)
def test_labels_that_are_found(name: str, labels: list[int], found: list[int]) -> None:
    assert METRICS[name].of(np.array(SCORES, np.float32), np.array(labels)).tolist() == found  # type: ignore[union-attr]


def test_a_file_that_gives_all_classes_one_score_agrees_by_chance_alone() -> None:
    """It agreed with every answer of the reference: no class was larger than the best one."""
    reference = np.eye(7)[[0, 3, 3, 6]]
    dead = np.zeros((4, 7), np.float32)
    assert METRICS["top1"].of(dead, reference).tolist() == [1, 0, 0, 0]  # type: ignore[union-attr]
    assert METRICS["top5"].of(dead, reference).tolist() == [1, 1, 1, 0]  # type: ignore[union-attr]
    assert METRICS["top1"].of(reference.astype(np.float32), np.zeros((4, 7))).tolist() == [1, 1, 1, 1]  # type: ignore[union-attr]


def dropped(metric: str, value: Any, reference: Any, labels: list[int] | None) -> Any:
    measures = OutputMeasures(parse_policy(None, metric), dataset=True)
    for start in range(0, len(reference), 3):  # in batches, as a dataset is run
        rows, own = slice(start, start + 3), None if labels is None else np.array(labels[start : start + 3])
        case = InputCase(f"samples {start}", DATASET, dict, labels=own)
        measures.add(
            "y",
            case,
            np.asarray(value[rows], np.float32),
            np.asarray(reference[rows], np.float64),
            np.dtype(np.float32),
        )
    (rule,) = measures.verdicts_of("y")
    return rule


def test_a_drop_of_accuracy_is_a_difference_of_shares() -> None:
    """Of four samples the reference finds labels 0, 1 and 2, the other 0 alone: 0.75 and 0.25."""
    reference, labels = np.eye(4)[[0, 1, 2, 0]], [0, 1, 2, 3]
    value = np.eye(4)[[0, 0, 0, 0]]
    rule = dropped("accuracy_drop<=0.49", value, reference, labels)
    assert (rule.measured, rule.wanted, rule.verdict, rule.accuracies, rule.samples) == (
        0.5,
        0.49,
        "fail",
        (0.75, 0.25),
        4,
    )
    assert str(rule) == "accuracy_drop 0.5 > 0.49: 0.75 in the reference and 0.25 here, of 4 samples"
    assert dropped("accuracy_drop:0.5", value, reference, labels)  # exactly as much as may be
    better = dropped("accuracy_drop<=0", reference, value, labels)
    assert better
    assert better.measured == -0.5


def test_a_drop_is_exact_where_shares_are_not() -> None:
    """45 of 50 and 44 of 50: 0.9 - 0.88 is more than 0.02 in floating point."""
    labels = [0] * 50
    reference, value = (np.eye(2)[[0] * right + [1] * (50 - right)] for right in (45, 44))
    assert 0.9 - 0.88 > 0.02
    assert dropped("accuracy_drop<=0.02", value, reference, labels)
    assert not dropped("accuracy_drop<=0.0199", value, reference, labels)


def test_labels_that_do_not_fit_the_output() -> None:
    scores = np.eye(4)
    with pytest.raises(InputError, match=r"samples 3: the label in row 0 is 4, but the output has the classes 0 to 3"):
        dropped("accuracy_drop<=0", scores, scores, [0, 1, 2, 4])
    with pytest.raises(InputError, match=r"the label in row 1 is -1"):
        dropped("accuracy_drop<=0", scores, scores, [0, -1, 2, 3])
    with pytest.raises(InputError, match=r"samples 3: the output has 1 rows, but there are 0 labels"):
        dropped("accuracy_drop<=0", scores, scores, [0, 1, 2])
    broken = scores.copy()
    broken[0, 0] = NAN
    assert "it contains a NaN or an infinity" in str(dropped("accuracy_drop<=1", broken, scores, [0, 1, 2, 3]))


@pytest.mark.parametrize(
    ("name", "value", "reference", "wanted"),
    [
        ("cosine", [3, 0], [0, 2], 0.0),
        ("cosine", [1, 1], [1, 0], math.cos(math.pi / 4)),
        ("cosine", [[-1], [-2]], [[2], [4]], -1.0),
        ("cosine", [0, 0], [0, 0], 1.0),
        ("cosine", [0, 0], [1, 0], 0.0),
        ("cosine", [3e38, 0], [1e300, 1e300], math.cos(math.pi / 4)),
        ("psnr", [1, -3], [1, -4], 20 * math.log10(4 / math.sqrt(0.5))),
        ("psnr", [1, 2], [1, 2], INF),
        ("psnr", [1, 2], [0, 0], -INF),
        ("snr", [3, 5], [3, 4], 10 * math.log10(25 / 1)),
        ("snr", [1e-30, 2e-30], [1e-30, 1e-30], 10 * math.log10(2)),
        ("snr", [0, 0], [0, 0], INF),
        ("snr", [0, 1], [0, 0], -INF),
    ],
)
def test_worked_by_hand(name: str, value: Any, reference: Any, wanted: float) -> None:
    assert of(name, value, reference) == pytest.approx(wanted, rel=1e-6, abs=1e-9)


def test_against_other_formulas(rng: np.random.Generator) -> None:
    r = rng.standard_normal((7, 11))
    v = (r + 0.1 * rng.standard_normal(r.shape)).astype(np.float32)
    dot = math.fsum(float(a) * float(b) for a, b in zip(v.ravel(), r.ravel(), strict=True))
    lengths = math.sqrt(math.fsum(float(a) ** 2 for a in v.ravel()) * math.fsum(float(b) ** 2 for b in r.ravel()))
    noise = math.fsum((float(a) - float(b)) ** 2 for a, b in zip(v.ravel(), r.ravel(), strict=True))
    assert of("cosine", v, r) == pytest.approx(dot / lengths, rel=1e-12)
    assert of("snr", v, r) == pytest.approx(
        10 * math.log10(math.fsum(float(b) ** 2 for b in r.ravel()) / noise), rel=1e-12
    )
    assert of("psnr", v, r) == pytest.approx(10 * math.log10(max(abs(r.ravel())) ** 2 / (noise / r.size)), rel=1e-12)


def test_top_counts_rows_and_lets_equal_scores_be_equal(rng: np.random.Generator) -> None:
    reference = [[1, 5, 2, 0, 0, 0, 0], [9, 1, 1, 1, 1, 1, 1], [3, 3, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7]]
    value = [[1, 2, 3, 0, 0, 0, 0], [9, 1, 1, 1, 1, 1, 1], [0, 4, 0, 0, 0, 0, 0], [9, 8, 7, 6, 5, 4, 3]]
    assert of("top1", value, reference).tolist() == [0, 1, 1, 0]
    assert of("top5", value, reference).tolist() == [1, 1, 1, 0]
    # another way: sort, and look
    v, r = rng.standard_normal((400, 20)), rng.standard_normal((400, 20))
    assert of("top5", v, r).tolist() == [
        float(b.argmax() in a.astype(np.float32).argsort()[-5:]) for a, b in zip(v, r, strict=True)
    ]


def test_nearest_is_that_of_all_pairs(rng: np.random.Generator) -> None:
    r = rng.standard_normal((60, 8))
    v = (r + 0.3 * rng.standard_normal(r.shape)).astype(np.float32)

    def neighbour(rows: np.ndarray, i: int) -> int:
        near = [
            -2.0 if i == j else float(a @ rows[i] / np.linalg.norm(a) / np.linalg.norm(rows[i]))
            for j, a in enumerate(rows)
        ]
        return int(np.argmax(near))

    wanted = [float(neighbour(v.astype(np.float64), i) == neighbour(r, i)) for i in range(60)]
    assert of("nearest", v, r).tolist() == wanted
    assert 0 < sum(wanted) < 60
    assert of("nearest", [[1, 0], [2, 0], [3, 0]], [[1, 0], [2, 0], [3, 0]]).tolist() == [
        1,
        1,
        1,
    ]  # all as near as another


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if not metric.labelled])
@pytest.mark.parametrize(("value", "reference"), [(NAN, 1), (1, NAN), (INF, 1), (INF, INF), (NAN, NAN)])
def test_a_metric_of_what_is_not_finite_fails(name: str, value: float, reference: float) -> None:
    v, r = np.ones((3, 7), np.float32), np.ones((3, 7))
    v[1, 2], r[1, 2] = value, reference
    rule = judged(None, f"{name}>=0", (np.ones((3, 7), np.float32), np.ones((3, 7))), (v, r))
    assert not rule
    assert "NaN or an infinity" in str(rule)
    assert "case 1" in str(rule)


def test_the_worst_input_counts_and_shares_are_of_all_rows() -> None:
    pairs = (([1, 0], [1, 0]), ([1, 1], [1, 0]), ([1, 0.1], [1, 0]))
    rule = judged(None, "cosine>=0.9", *pairs)
    assert not rule
    assert (rule.measured, rule.case) == (pytest.approx(math.sqrt(0.5)), "case 1")
    assert judged(None, "cosine>=0.7", *pairs)
    rows = ([[[1, 0]], [[0, 1]]][i % 2] for i in range(4))
    rule = judged(None, "top1>=0.75", *((row, [[1, 0]]) for row in rows))
    assert not rule
    assert rule.measured == 0.5
    assert judged(
        None, "nearest>=1", *(([[a, 1]], [[a, 1]]) for a in (1, 2, 5, 9))
    )  # one row an input, neighbours among all
    assert "no neighbor" in str(judged(None, "nearest>=0.5", ([[1, 2]], [[1, 2]])))


@pytest.mark.parametrize(
    ("tolerance", "value", "reference", "passes", "error", "allowed"),
    [
        ("1e-3:0", [1.0005, 2], [1, 2], True, 5e-4, 1e-3),
        ("1e-3:0", [1.002, 2], [1, 2], False, 2e-3, 1e-3),
        ("0:1e-2", [101, 1], [100, 1], True, 1, 1),
        ("0:1e-2", [1, 1.02], [1000, 1], False, 999, 10),
        ("0.5:0.1", [11.4, 0], [10, 0], True, 1.4, 1.5),
        ("0:0", [1, 2], [1, 2], True, 0, 0),
        ("0:1", [1e-9], [0], False, 1e-9, 0),
        ("1:1", [NAN], [NAN], True, 0, 0),
        ("1:1", [INF], [INF], True, 0, 0),
        # beyond float32
        ("1:1", [INF], [1e39], True, 0, 0),
    ],
)
def test_a_tolerance(tolerance: str, value: Any, reference: Any, passes: bool, error: float, allowed: float) -> None:
    rule = judged(tolerance, None, (value, reference))
    assert bool(rule) is passes
    assert (rule.measured, rule.wanted) == (pytest.approx(error, rel=1e-3), pytest.approx(allowed, rel=1e-6))


@pytest.mark.parametrize(("value", "reference"), [(NAN, 1), (1, NAN), (INF, 1), (-INF, INF), (1, INF)])
def test_no_tolerance_makes_a_nan_a_number(value: float, reference: float) -> None:
    assert "but the reference has" in str(judged("1e30:1e30", None, ([0, value], [0, reference])))


def test_what_is_judged_on_what() -> None:
    wrong, right = np.full(2, 9, np.float32), np.ones(2)
    for kind, tolerated in (
        ("random", True),
        ("given", True),
        ("small", True),
        ("zeros", True),
        ("extreme", False),
        ("nan", False),
    ):
        assert ("no input" not in str(judged("1:0", None, (wrong, right), kind=kind))) is tolerated
    assert "no input" in str(judged(None, "snr>=1", (wrong, right), kind="zeros"))
    assert "no input" in str(judged(None, "snr>=1", (wrong, right), kind="random", dataset=True))
    assert "no input" not in str(judged(None, "snr>=1", (wrong, right), kind=DATASET, dataset=True))


def test_other_types_and_shapes() -> None:
    assert judged("0:1e-2", None, (np.ones(3, ml_dtypes.bfloat16), np.ones(3)))
    assert judged(None, "cosine>=0.999", (np.ones(3, np.float16), np.ones(3)))
    assert judged("1:0", None, (np.asarray([3, 4]), [4, 4]))
    assert "its shape is [3]" in str(judged("1:0", None, (np.ones(3), np.ones(2))))
    assert "no such output" in str(judged("1:0", None, (None, np.ones(2))))


def test_nearest_is_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many vectors are looked at a few at a time, each beside all others but itself."""
    rng = np.random.default_rng(8)
    reference = rng.standard_normal((7, 5))
    value = reference + 0.7 * rng.standard_normal((7, 5))
    whole = metrics.nearest_neighbor_agreement(value, reference)
    assert 0 < whole.sum() < 7
    monkeypatch.setattr(metrics, "AT_ONCE", 14)
    np.testing.assert_array_equal(metrics.nearest_neighbor_agreement(value, reference), whole)
