"""The account of a quantized model in the terminal and on the page, and the census of a quantized file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import normdeploy
from normdeploy.findings.quantization_report import (
    LayerExclusion,
    LayerReport,
    MetricReport,
    Migration,
    QuantizationReport,
)
from normdeploy.findings.quantization_tables import show_quantization
from normdeploy.reports import quantization_plots
from normdeploy.reports.report import Report, to_plain
from normdeploy.reports.report_page import render_page
from tests import quantized_files as files

FIRST = LayerReport(
    "h",
    "MatMul",
    "encoder.0.query",
    "n",
    "quantized",
    weight="int8 for each of 384 channels",
    activation="int8",
    low=-3.175,
    high=3.175,
    scale=0.025,
    zero_point=0,
    migrated=("gamma and beta", "smooth"),
    error=2.5e-3,
)
LEFT = replace(FIRST, tensor="o", module="", status="float", reason="it costs most", error=0.31, low=-90.0, high=88.0)
ACCOUNT = QuantizationReport(
    "int8",
    "tensorrt",
    "entropy",
    24,
    120,
    (FIRST, LEFT),
    (
        Migration("gamma and beta", "n", ("h",), "made"),
        Migration("rotate", "m", ("o",), "refused", "its result is a graph output"),
    ),
    (
        MetricReport("embedding", "cosine", 0.995, 0.9971, 0.9999998, True),
        MetricReport("score", "top1", 0.99, 0.95, 1.0, False),
    ),
    (LayerExclusion(("o",), "cosine>=0.995", 0.91, 0.9971),),
    (90_000_000, 23_000_000),
    ("builds for 8.6, 8.9",),
)


def shown(account: QuantizationReport, width: int = 200) -> str:
    console = Console(width=width, record=True, color_system=None, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    show_quantization(console, account)
    return console.export_text()


def test_the_table_has_every_layer_metric_and_exclusion() -> None:
    lines = shown(ACCOUNT).splitlines()
    first = next(line for line in lines if "encoder.0.query" in line)
    for cell in ("quantized", "int8 for each of 384 channels", "int8, scale 0.025", "2.5e-03"):
        assert cell in first
    assert "gamma and beta, smooth" in first
    assert "it costs most" in next(line for line in lines if "(o)" in line)
    assert re.search(r"embedding +cosine +0\.9971 +1 - 2e-07 +0\.995 +met", "\n".join(lines))
    assert re.search(r"score +top1 +0\.95 +1 +0\.99 +not met", "\n".join(lines))
    assert re.search(r"o +cosine>=0\.995 +0\.91 +0\.9971", "\n".join(lines))
    assert "int8 for tensorrt: 1 of 2 linear layers; weights 90.0 MB → 23.0 MB; calibration entropy on 24" in "\n".join(
        lines
    )
    assert lines[-3:] == [
        "not migrated: rotate of m: its result is a graph output",
        "migrated: gamma and beta of 1 norm",
        "note: builds for 8.6, 8.9",
    ]


def test_refusals_of_one_reason_are_one_line() -> None:
    alike = [Migration("rotate", f"q{i}", (), "refused", f"Mul 'rope_{i}' does not commute with it") for i in range(3)]
    other = Migration("rotate", "x", (), "refused", "'x' is a graph output")
    lines = shown(replace(ACCOUNT, migrations=(*alike, other))).splitlines()
    assert [line for line in lines if line.startswith("not migrated")] == [
        "not migrated: rotate of q0 and 2 more: Mul 'rope_0' does not commute with it",
        "not migrated: rotate of x: 'x' is a graph output",
    ]


def test_layers_of_one_lot_are_one_line() -> None:
    second = replace(FIRST, tensor="h2", module="encoder.1.query", scale=0.5, error=4e-3)
    lines = shown(replace(ACCOUNT, layers=(FIRST, LEFT, second))).splitlines()
    line = next(line for line in lines if "encoder.0.query" in line)
    for cell in ("encoder.0.query and 1 more", "4.0e-03", "int8"):
        assert cell in line
    assert "scale" not in line
    assert not any("encoder.1.query" in line for line in lines)


def test_an_account_without_calibration_or_metric_is_short() -> None:
    text = shown(QuantizationReport("int4", "any", "none", 0, 0, ()))
    assert text == "int4 for any runtime: 0 of 0 linear layers; weights 0.0 MB → 0.0 MB; calibration none\n"


def test_the_plots_draw_each_layer_and_name_the_worst() -> None:
    layers = to_plain(ACCOUNT)["layers"]
    ranges, costs = quantization_plots.plot_ranges(layers), quantization_plots.plot_costs(layers)
    assert ranges is not None
    assert costs is not None
    assert "mathdefault" not in ranges.svg
    assert ranges.alt == "2 ranges; the widest is -90 to 88, of o."
    assert "o costs most, 3.1e-01" in costs.alt
    assert "1 were left in float" in costs.alt
    assert quantization_plots.plot_ranges([to_plain(replace(FIRST, low=None))]) is None
    assert quantization_plots.plot_costs([to_plain(replace(FIRST, error=None))]) is None


def test_a_range_of_the_plot_is_as_long_as_it_is() -> None:
    """Two layers, one of twice the range of the other, below the width from which the axis is logarithmic."""
    layers = [to_plain(replace(FIRST, low=-a, high=a)) for a in (1.0, 2.0, 2.0)]
    plot = quantization_plots.plot_ranges(layers)
    assert plot is not None
    path = next(d for d in re.findall(r' d="([^"]*)"', plot.svg) if d.count("M") == 3)
    heights = [abs(float(b) - float(a)) for a, b in re.findall(r"M ?\S+ (\S+) L ?\S+ (\S+)", path)]
    assert len(heights) == 3
    assert heights[1] == pytest.approx(2 * heights[0], rel=0.02)  # paths have two decimals


def test_the_page_has_a_section_of_it() -> None:
    document = json.loads(Report("export", {"output": "m.onnx"}).to_json())
    bare = render_page(document)
    assert "Quantization" not in bare
    html = render_page(document | {"quantization": json.loads(json.dumps(to_plain(ACCOUNT)))})
    assert "<h2>Quantization</h2>" in html
    for text in (
        "encoder.0.query",
        "it costs most",
        "not met",
        "0.9971",
        "builds for 8.6, 8.9",
        "1 of 2 linear layers",
    ):
        assert text in html
    assert html.count('class="plot"') == 2
    hostile = replace(ACCOUNT, layers=(replace(FIRST, module="<script>", reason="<img src=x>"),))
    html = render_page(document | {"quantization": json.loads(json.dumps(to_plain(hostile)))})
    assert "<script>" not in html
    assert "<img" not in html


def test_the_census_of_files_that_others_wrote(tmp_path: Path) -> None:
    summary = normdeploy.inspect(files.quantized(files.net(), tmp_path, margin=1.0))
    assert [(v.op, v.module, v.status, v.weight, v.granularity) for v in summary.layers] == [
        ("MatMul", "inner", "quantized", "int8", "64 channels"),
        ("MatMul", "outer", "quantized", "int8", "32 channels"),
        ("MatMul", "last", "quantized", "int8", "8 channels"),
    ]
    first = summary.layers[0]
    largest = max(float(abs(feeds["x"]).max()) for feeds in files.samples(files.net()))
    assert first.input == "x"
    assert first.scale == pytest.approx(largest / 127, rel=1e-5)  # 127 steps to either side
    assert first.high == pytest.approx(127 * first.scale)
    assert first.low == pytest.approx(-128 * first.scale)
    assert "3 of 3 linear layers quantized" in str(summary)
    told = json.loads(Report("inspect", {}, summary).to_json())["layers"]
    assert [row["activation"] for row in told] == ["int8"] * 3


def test_the_census_of_activations_that_are_quantized_as_they_come(tmp_path: Path) -> None:
    layers = normdeploy.inspect(files.dynamic(files.net(), tmp_path)).layers
    assert [(v.op, v.status, v.weight, v.activation, v.dynamic) for v in layers] == [
        ("MatMulInteger", "quantized", "int8", "uint8", True)
    ] * 3
    assert layers[0].input == "x"


def test_a_weight_alone_and_a_file_without_any(tmp_path: Path) -> None:
    layers = normdeploy.inspect(files.weights_alone(files.net(), tmp_path)).layers
    assert [(v.status, v.granularity) for v in layers] == [("weight", "tensor"), ("float", ""), ("float", "")]
    files.quantized(files.net(), tmp_path)
    assert normdeploy.inspect(tmp_path / "float32.onnx").layers == ()
