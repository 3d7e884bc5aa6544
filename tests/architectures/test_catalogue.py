"""Rules for small configs, inputs of automatic architectures and their page; no library of models is needed."""

from __future__ import annotations

import pytest
import torch

from benchmarks.architectures import shrinking, table
from benchmarks.architectures.catalogue import ARCHITECTURES, AUTOMATIC, LEFT_OUT, Architecture, Automatic, samples
from benchmarks.architectures.measure import Row, dynamic, with_fixed_sizes

EVERYTHING = shrinking.PLANS[0]
TWO_INPUTS = Architecture(
    "two inputs",
    "none",
    torch.nn.Identity,
    ("ids:int64[batch,seq]{3:9}", "sound:float32[batch,samples]"),
    ranges={"samples": "320:640:1280"},
)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("hidden_size", 4096, shrinking.WIDTH),
        ("d_model", 1024, shrinking.WIDTH),
        ("text_hidden_size", 768, shrinking.WIDTH),
        ("num_attention_heads", 32, shrinking.HEADS),
        ("num_attention_heads", 1, 1),
        ("num_key_value_heads", 8, shrinking.KEY_VALUE_HEADS),
        ("vocab_size", 250002, shrinking.VOCABULARY),
        ("num_hidden_layers", 32, shrinking.LAYERS),
        ("depths", (3, 3, 27, 3), (1, 1, 1, 1)),
        ("num_local_experts", 64, shrinking.EXPERTS),
        ("image_size", 336, 56),
        ("image_size", 224, shrinking.IMAGE),
        ("layer_norm_eps", 1e-12, 1e-12),
        ("hidden_act", "gelu", "gelu"),
        ("use_cache", True, True),
    ],
)
def test_shrink_value_name_of_config_follows_rule(name: str, old: object, new: object) -> None:
    assert shrinking.shrink_value(name, old, EVERYTHING) == new


def test_shrink_value_lists_of_widths_agree_between_names() -> None:
    widths = [256, 512, 1024, 2048]
    assert shrinking.shrink_value("hidden_sizes", widths, EVERYTHING) == shrinking.shrink_value(
        "encoder_in_channels", widths, EVERYTHING
    )


def test_shrink_value_plan_without_widths_keeps_widths() -> None:
    plan = shrinking.Plan("layers alone", widths=False, tables=False)
    assert shrinking.shrink_value("hidden_size", 768, plan) == 768
    assert shrinking.shrink_value("num_hidden_layers", 12, plan) == shrinking.LAYERS


def test_draw_uses_usual_sizes_and_ranges() -> None:
    drawn = samples.draw(TWO_INPUTS)
    assert drawn["ids"].shape == (2, 8)
    assert drawn["ids"].dtype == torch.int64
    assert 3 <= int(drawn["ids"].min()) <= int(drawn["ids"].max()) < 9
    assert drawn["sound"].shape == (2, 640)


def test_dims_of_inputs_are_stated_once() -> None:
    assert TWO_INPUTS.dims == ("batch=1:2:3", "seq=2:8:16", "samples=320:640:1280")
    shapes = dynamic(TWO_INPUTS)
    assert shapes["ids"].keys() == {0, 1}
    assert shapes["ids"][0] is shapes["sound"][0]


def test_with_fixed_sizes_has_no_dims() -> None:
    fixed = with_fixed_sizes(TWO_INPUTS)
    assert fixed.inputs == ("ids:int64[2,8]{3:9}", "sound:float32[2,640]")
    assert fixed.dims == ()


def test_names_are_unique_and_left_out_names_are_no_entries() -> None:
    names = [*(a.name for a in ARCHITECTURES), *(a.name for a in AUTOMATIC)]
    assert len(set(names)) == len(names)
    assert not LEFT_OUT.keys() & set(names)
    assert all(LEFT_OUT.values())


def test_page_tells_rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "version", lambda name: "1.0")
    good, bad, unmade = (Automatic("timm", key) for key in ("good", "bad", "unmade"))
    rows = [
        Row(good.name, "timm", automatic=True, verify="passes", runs={"plain": [1.0], "ours": [1.2]}),
        Row(bad.name, "timm", automatic=True, export="ExportError: no", runs={"plain": [1.0], "ours": []}),
        Row(unmade.name, "timm", automatic=True, unmade="ValueError: no size"),
    ]
    found = [row.to_json() for row in rows]
    assert [bool(table.wrong(row)) for row in found] == [False, True, False]
    page = table.page(found)
    assert "the plain exporter exports 2, ours 1, both 1" in page
    assert "timm: bad: export: ExportError: no" in page
    assert "timm: unmade: ValueError: no size" in page
    assert "median 1.20" in page
