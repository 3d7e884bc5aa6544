"""The corpus of verdicts (`benchmarks.verdicts`): pairs are judged, planted faults are observed, rows make a page."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from benchmarks.verdicts import observe, rows
from benchmarks.verdicts.__main__ import run
from benchmarks.verdicts.faults import FAULTS, Right, kinds_of
from benchmarks.verdicts.files import Source
from benchmarks.verdicts.judge import named_by
from benchmarks.verdicts.observe import Observer
from benchmarks.verdicts.pairs import Made, Pair, pairs
from benchmarks.verdicts.rows import Row
from benchmarks.verdicts.table import page
from benchmarks.verdicts.written import FUNCTION, LOOP


def _pair(name):
    return next(pair for pair in pairs() if pair.name == name)


@pytest.mark.parametrize(
    "name", ["Linear, BatchNorm1d, Tanh | module | dynamo", "If with two layers | file | onnxruntime basic"]
)
def test_judge_right_pair_passes_and_its_faults_are_caught(name):
    row = run(_pair(name))
    assert (row.right, row.broken) == ("pass", "")
    states = {fault: found["state"] for fault, found in row.faults.items()}
    assert set(states) == set(FAULTS)
    assert states["weight moved by 1e-3"] == "caught"
    assert set(states.values()) <= {"caught", "no place", "not observable"}


def test_run_process_that_ends_is_reported(monkeypatch):
    def ends(folder):
        raise SystemExit(7)

    row = run(Pair("x", "file", "tool", ends))
    assert row.broken == "make: the process ended with 7"
    assert row.wrong


def test_run_pair_that_does_not_end_is_reported():
    def waits(folder):
        while True:
            pass

    assert run(Pair("x", "file", "tool", waits), limit=0.5).broken == "make: nothing after 0.5 s"


def test_pairs_names_differ():
    names = [pair.name for pair in pairs()]
    assert len(names) == len(set(names))


@pytest.fixture
def made(tmp_path):
    proto, path = FUNCTION(), tmp_path / "right.onnx"
    onnx.save(proto, path)
    feeds, others = Source("functions", FUNCTION, ((2, 5, 8),), ((4, 5, 8),)).feeds(proto)
    return Made(path, path, feeds, others, None, path)


def test_effect_of_the_right_file_is_none_and_of_a_large_change_is_observable(made):
    right = onnx.load(made.file)
    observer = Observer(made, right)
    assert observer.effect(right).ratio == 0
    gamma = next(t for t in right.graph.initializer if t.name == "gamma")
    gamma.CopyFrom(onnx.numpy_helper.from_array(2 * onnx.numpy_helper.to_array(gamma), "gamma"))
    assert observer.effect(right).observable


def test_effect_of_a_change_within_rounding_is_not_observable(made):
    right = onnx.load(made.file)
    observer = Observer(made, right)
    gamma = next(t for t in right.graph.initializer if t.name == "gamma")
    value = np.nextafter(onnx.numpy_helper.to_array(gamma), np.float32(9))
    gamma.CopyFrom(onnx.numpy_helper.from_array(value, "gamma"))
    assert not observer.effect(right).observable


def test_effect_of_a_file_that_ends_the_process_is_none(made, monkeypatch):
    observer = Observer(made, onnx.load(made.file))
    monkeypatch.setattr(observe, "session", lambda *_, **__: os.abort())
    assert observer.effect(onnx.load(made.file)) is None


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in ("epsilon times ten", "an axis swapped")])
def test_planters_change_the_file_and_name_the_place(name):
    right = LOOP()
    for planted in FAULTS[name](right, random.Random(0), Right(2, kinds_of(right))):
        onnx.checker.check_model(planted.proto)
        assert planted.proto != right
        assert planted.names
        break
    else:
        pytest.fail(f"{name} found no place")


def test_named_by_takes_the_tensor_the_nodes_and_what_the_cause_quotes():
    fault = SimpleNamespace(tensor="y", nodes=("Conv node_1",), cause="Conv 'node_1': 'weight' is not 'w.weight' of it")
    assert named_by(fault) == {"y", "node_1", "weight", "w.weight"}


def test_named_by_reads_quotes_around_apostrophes_and_names_of_inlined_functions():
    cause = "Mul 'added__1' does what the model's does not: with 'n__1' or \"a'b\" it is the model's"
    fault = SimpleNamespace(tensor="y", nodes=("Mul added__1",), cause=cause)
    assert named_by(fault) == {"y", "added__1", "added", "n__1", "n", "a'b"}


def test_page_counts_misses_refusals_and_pairs_left_out(tmp_path):
    missed = {"state": "missed", "planted": "weight w", "ratio": 9.0, "named": False, "bisect": "no fault"}
    faulty = Row("b", "file", "tool", right="fail: y", faults={"weight moved by 1e-3": missed})
    told = page(
        [
            Row("a", "file", "tool", right="pass", commit="2026-01-02 abc"),
            faulty,
            Row("c", "file", "tool", not_made="no tool"),
        ],
        9,
    )
    assert "2 of 9 pairs were run, 0 of these with their faults; 1 could not be made" in told
    assert "false alarms: 1 of 2" in told
    assert "the code of 2026-01-02 abc (1 rows), earlier ones that were not recorded (2 rows)" in told
    assert "misses: 1 of 1 observable faults" in told
    kept = tmp_path / "rows.jsonl"
    rows.append(kept, faulty)
    assert rows.read(kept) == {"b": faulty}
