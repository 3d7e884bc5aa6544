"""Times of layers are read and matched to the layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from normdeploy.engines.layer_info import parse_layer_info
from normdeploy.engines.layer_times import apply_times, choose_profile, read_layer_times
from normdeploy.errors import InputError
from tests.engine_files import info, profile, save


def test_times_are_matched_by_name(tmp_path: Path) -> None:
    times = read_layer_times(save(tmp_path / "p.json", profile({"a": 0.5, "b": 0.25, "other": 0.125})))
    layers, unmatched = apply_times(parse_layer_info(info(["b", "a", "c"]), "f").layers, times, 0)
    assert [layer.ms for layer in layers] == [0.25, 0.5, None]
    assert unmatched == 0.125
    assert (times.runs, times.total_ms) == (100, 0.875)


def test_equal_names_are_matched_in_order(tmp_path: Path) -> None:
    document = [{"count": 2}, {"name": "a", "averageMs": 1}, {"name": "a", "averageMs": 2}]
    times = read_layer_times(save(tmp_path / "p.json", document))
    layers, _ = apply_times(parse_layer_info(info(["a", "a"]), "f").layers, times, 0)
    assert [layer.ms for layer in layers] == [1, 2]


def test_sums_without_means_are_divided_by_the_runs(tmp_path: Path) -> None:
    times = read_layer_times(save(tmp_path / "p.json", [{"count": 4}, {"name": "a", "timeMs": 2.0}]))
    assert times.total_ms == 0.5


def test_timed_profile_is_chosen(tmp_path: Path) -> None:
    layers = parse_layer_info(info(["a", "b", "a [profile 1]", "b [profile 1]"]), "f").layers
    document = profile({"a": 0.0, "b": 0.0, "a [profile 1]": 1.0, "b [profile 1]": 2.0})
    times = read_layer_times(save(tmp_path / "p.json", document))
    assert choose_profile(layers, times) == 1
    assert choose_profile(layers, None) == 0


@pytest.mark.parametrize("ms", ["fast", None, -1, 1e999, True, [1]])
def test_time_that_is_no_number_is_refused(tmp_path: Path, ms: Any) -> None:
    with pytest.raises(InputError, match="the time of layer 'a' is"):
        read_layer_times(save(tmp_path / "p.json", [{"count": 1}, {"name": "a", "averageMs": ms}]))


def test_layers_in_place_of_times_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pass it as FILE"):
        read_layer_times(save(tmp_path / "e.json", info([{"Name": "a", "LayerType": "kgen"}])))


def test_empty_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not the times of layers"):
        read_layer_times(save(tmp_path / "p.json", [{"count": 0}]))
