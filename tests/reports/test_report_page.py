"""The report's page: whole in one file, harmless whatever the names in it, and right in its numbers; looked at in a
real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from normdeploy.cli.console import require_writable_report
from normdeploy.errors import NormdeployError
from normdeploy.findings.precision_report import Float32Region, PrecisionReport
from normdeploy.findings.records import Certificate, Finding, Summary
from normdeploy.reports import plots
from normdeploy.reports.report import Report
from normdeploy.reports.report_page import render_page

from ..cli.test_app import layer_norm_by_hand, run

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
HOSTILE = "a<script>alert(1)</script>\"' onload=x </style><img src=http://h/x> $x^{ \u202e\x1b[31m 模型 \ud800"
PROOF = Certificate(True, 2e-9, 1e-7, 14, "constant", rounding_before=2e-6, rounding_after=1e-6, rounding_bound=4e-6)
LAYERS = Finding(
    "LayerNorm",
    "fused",
    "y",
    "layers.0.norm",
    spelling="ReduceMean Sub",
    became="LayerNormalization",
    certificate=PROOF,
    proved=("identity",),
)


def document(*findings: Finding, **changes: Any) -> dict[str, Any]:
    """A report that has everything."""
    summary = Summary(
        findings, 598, 130, 21, ops_before={"Sub": 26, "Add": 40}, ops_after={"LayerNormalization": 13, "Add": 27}
    )
    island = Float32Region("range", "Pow", "layers.0", "t", "its square does not fit", 3e5, ("t", "u"))
    half = PrecisionReport(
        "fp16",
        (island,),
        80,
        2,
        4,
        (400, 200),
        "generated",
        3,
        {"x": "float16"},
        {"y": "float16"},
        ("a mask is -65504 now",),
    )
    made = json.loads(
        Report(
            "export", {"source": "model.pt"}, summary, {"precision": half}, notes=("take note",), command="normdeploy x"
        ).to_json()
    )
    points = [
        {"runtime": "onnxruntime", "module": f"m{i}", "tensor": f"t{i}", "where": "leaves", "scale": 1.0, "reason": ""}
        for i in range(9)
    ]
    drift = [p | {"error": 1e-7 * 2**i, "eager": 1e-7, "allowed": 4e-6} for i, p in enumerate(points)]
    result = {
        "output": "y",
        "runtime": "onnxruntime",
        "dtype": "float32",
        "max_abs_error": "nan",
        "max_rel_error": 0.1,
        "allowed": 1e-6,
    }
    parity = {
        "ok": False,
        "rule": {"reference": "float64", "eager_multiple": 4.0, "ulps": 4.0},
        "results": [
            result | {"verdict": "fail", "case": "zeros", "near_ties": 0, "reason": "NaN where the model has 1"}
        ],
        "not_run": [{"runtime": "TensorRT", "reason": "no GPU"}],
        "cases": ["zeros"],
        "notes": [],
        "drift": drift,
    }
    entry = {
        "runtime": "eager",
        "file": "",
        "form": "",
        "median": 2.0,
        "p95": 2.5,
        "p99": 3.0,
        "ratio": 1.0,
        "reason": "",
    }
    entry |= {"norm": "", "interval": [0.9, 1.1], "error": 3e-7, "far_error": None}
    nothing = {
        "median": None,
        "p95": None,
        "p99": None,
        "samples": [],
        "ratio": None,
        "interval": None,
        "reason": "no compiler",
    }
    race = {
        "threads": 1,
        "warmup": 5,
        "rounds": 40,
        "shapes": {"x": [4, 8]},
        "entries": [
            entry | {"samples": [2.0 + i / 1000 for i in range(400)]},
            entry | {"runtime": "torch.compile"} | nothing,
        ],
        "not_run": [],
        "notes": [],
        "reference": "the model in float64",
    }
    fault = {
        "runtime": "onnxruntime",
        "case": "zeros",
        "module": "layers.3",
        "tensor": "t",
        "nodes": ["Sqrt n"],
        "operator": "aten.sqrt",
    }
    fault |= {
        "wrong": "file",
        "error": "nan",
        "allowed": 1e-6,
        "scale": 2.0,
        "reason": "",
        "kind": "epsilon",
        "cause": "ε is 1e-5, not 1e-12",
    }
    fault |= {
        "widened": {"mends": None, "nodes": [], "error": None, "reason": "not half"},
        "output": "y",
        "output_error": 0.1,
    }
    fault |= {"output_allowed": 1e-6, "output_reason": "", "mended_error": None, "mended": False}
    bisection = {"ok": False, "faults": [fault], "not_searched": [], "notes": [], "seconds": 1.0}
    norms = {"op": "LayerNormalization", "node": "n", "module": "m", "form": "native node", "reason": "", "types": {}}
    engine = {
        "path": "e",
        "bytes": 12_300_000,
        "runtime": "tensorrt-rtx",
        "version": "1.7",
        "compute_capabilities": [],
        "layers": 4,
    }
    engine |= {
        "profile": {"x": [[1, 8], [4, 8], [8, 8]]},
        "seconds": 1.0,
        "norm_impl": "native",
        "norms": [norms],
        "types": {"float": 4},
    }
    return (
        made
        | {"bisection": bisection, "parity": parity, "race": race, "engine": engine | {"proved": "built only"}}
        | changes
    )


@pytest.fixture(scope="module")
def hostile() -> dict[str, Any]:
    """Every text is hostile, but for the words that the schema fixes."""

    def poisoned(value: Any, fixed: bool = False) -> Any:
        if isinstance(value, dict):
            words = ("schema", "verb", "status", "verdict", "proved", "dtype", "wrong")
            return {k: poisoned(v, k in words) for k, v in value.items()}
        if isinstance(value, list):
            return [poisoned(v, fixed) for v in value]
        return value + HOSTILE if isinstance(value, str) and value not in ("nan", "") and not fixed else value

    refused = Finding("unknown", "refused", "div_20", reason="why")
    return poisoned(
        document(LAYERS, replace(LAYERS, notes=("note",), certificate=replace(PROOF, identity=False)), refused)
    )


class Elements(HTMLParser):
    """What a browser would make of the text: start tags with their attributes, and the texts outside of style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.style = ""
        self.inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "style":
            self.style += data
        else:
            self.text += data

    def values(self, name: str) -> list[str]:
        return [attrs[name] or "" for _, attrs in self.tags if name in attrs]


def check_harmless(text: str) -> Elements:
    elements = Elements(text)
    tags = Counter(tag for tag, _ in elements.tags)
    assert not tags.keys() & {
        "script",
        "iframe",
        "object",
        "embed",
        "img",
        "image",
        "base",
        "form",
        "foreignobject",
        "audio",
        "video",
    }
    assert tags["style"] == tags["main"] == tags["title"] == 1
    assert [attrs["content"] for tag, attrs in elements.tags if tag == "meta" and "http-equiv" in attrs] == [POLICY]
    ids = elements.values("id")
    assert len(ids) == len(set(ids))
    for _, attrs in elements.tags:
        assert not any(name.startswith("on") or name in ("src", "srcset", "action", "xmlns") for name in attrs)
        links = [attrs.get("href"), *re.findall(r"url\((.*?)\)", " ".join(v or "" for v in attrs.values()))]
        assert all(link is None or link == "data:," or link[1:] in ids for link in links), attrs
    assert "url(" not in elements.style
    assert "@import" not in elements.style
    return elements


def test_everything_is_in_one_harmless_file(hostile: dict[str, Any]) -> None:
    elements = check_harmless(render_page(document(LAYERS)))
    for said in (
        "take note",
        "598 → 130",
        "not verified",
        "12.3 MB",
        "NaN where the model has 1",
        "no compiler",
        "normdeploy x",
        "largest value 3e+05",
    ):
        assert said in elements.text
    assert "<script>alert(1)</script>" in check_harmless(render_page(hostile)).text


def test_no_control_character_reaches_the_page(hostile: dict[str, Any]) -> None:
    assert {c for c in render_page(hostile) if not c.isprintable()} == {"\n"}
    render_page(hostile).encode()


@pytest.mark.parametrize(
    "missing",
    ["norms", "parity", "race", "precision", "engine", "ops", "nodes", "files", "notes", "command", "seconds"],
)
def test_a_report_without_a_part_makes_a_page(missing: str) -> None:
    whole = document(LAYERS)
    check_harmless(render_page({key: value for key, value in whole.items() if key != missing}))
    check_harmless(render_page(whole | {missing: None}))


def test_only_a_report_becomes_a_page() -> None:
    with pytest.raises(NormdeployError, match="normdeploy/report/9"):
        render_page({"schema": "normdeploy/report/9"})


def test_ten_thousand_norms_stay_small() -> None:
    words = ["".join(chr(97 + i // 26**k % 26) for k in range(4)) for i in range(10_000)]
    findings = [replace(LAYERS, module=f"model.{w}.{'x' * 400}", became=f"LayerNormalization '{w}'") for w in words]
    findings += [Finding("unknown", "refused", w, f"model.{w}", reason=f"{w} {'because ' * 200}") for w in words[:500]]
    report = document(*findings)
    report["parity"]["drift"] = [p | {"runtime": f"r{i % 9}"} for i, p in enumerate(report["parity"]["drift"] * 2000)]
    report["race"]["entries"] = report["race"]["entries"][:1] * 300
    text = render_page(report)
    assert len(text.encode()) < 2_000_000
    assert "9880 more lines are left out" in text
    assert "180 more entries are left out" in text
    assert "1000 of 2000 are drawn" in text
    assert len(max(paths(text, "first"), key=len)) == 10_000  # every certificate is a dot


def test_the_same_report_is_the_same_page() -> None:
    assert render_page(document(LAYERS)) == render_page(document(LAYERS))


def paths(svg: str, colour: str) -> list[list[tuple[float, float]]]:
    """For each path stroked in a colour of the page, where its pieces begin."""
    drawn = re.findall(r'<path d="([^"]*)"[^>]*style="[^"]*stroke: var\(--(\w+)\)', svg)
    return [
        [(float(x), float(y)) for x, y in re.findall(r"M ?([\d.]+) ([\d.]+)", d)] for d, name in drawn if name == colour
    ]


def certificates(*errors: float | str, bound: float = 1e-8) -> list[dict[str, Any]]:
    return [{"identity": float(e) <= bound, "error": e, "bound": bound} | dict.fromkeys(ROUNDING) for e in errors]


ROUNDING = ("rounding_before", "rounding_after", "rounding_bound")


def test_dots_stand_where_the_errors_are() -> None:
    svg = plots.plot_identity_errors(certificates(1e-16, 1e-14, 1e-12)).svg
    dots = max(paths(svg, "first"), key=len)
    assert len(dots) == 3
    (x0, y0), (x1, y1), (x2, y2) = dots
    assert (x2 - x1, y2 - y1) == pytest.approx((x1 - x0, y1 - y0), abs=0.05)  # equal steps of the logarithm
    ticks = max(paths(svg, "ink"), key=len)
    assert [y for _, y in ticks] == pytest.approx(
        [y2 + 2 * (y1 - y0)] * 3, abs=0.05
    )  # the bound, 1e-8, is two such steps above


def test_failed_and_odd_certificates_are_drawn_apart() -> None:
    plot = plots.plot_identity_errors(certificates(1e-16, 0.0, "inf", "nan", 1e-3))
    assert len(max(paths(plot.svg, "first"), key=len)) == 2
    ((infinite, unknown, large),) = ([y for _, y in path] for path in paths(plot.svg, "bad"))
    right = [y for _, y in max(paths(plot.svg, "first"), key=len)]
    assert infinite == unknown < large < min(right)  # y grows downwards
    assert "5 certificates, 2 passed; the largest error is inf" in plot.alt


def test_rounding_is_drawn_only_where_it_was_run() -> None:
    assert plots.plot_rounding(certificates(1e-16)) is None
    ran = certificates(1e-16, 1e-16)
    ran[0] |= {"rounding_before": None, "rounding_after": 3e-6, "rounding_bound": 1e-6, "rounding_ok": False}
    drawn = plots.plot_rounding(ran)
    assert drawn is not None
    assert "1 norms in onnxruntime" in drawn.alt
    assert "not known before and 3.0e-06 after; 1 exceed" in drawn.alt


def test_the_first_tensor_beyond_the_bound_is_named() -> None:
    points = document(LAYERS)["parity"]["drift"]
    drawn = plots.plot_drift("onnxruntime", points, 0)
    assert "3 exceed what is allowed, the first is m6" in drawn.alt  # 1e-7 · 2⁶ > 4e-6
    assert [len(p) for p in paths(drawn.svg, "bad")] == [3]


def test_each_norm_has_a_race_of_its_own() -> None:
    report = document(LAYERS)
    entry = report["race"]["entries"][0]
    report["race"]["entries"] = [
        entry | {"norm": norm, "form": form} for norm in ("LayerNorm", "GroupNorm") for form in ("standard", "narrow")
    ]
    text = render_page(report)
    assert text.count("each call a dot") == 2
    assert "GroupNorm, each call a dot" in text


def test_every_sample_is_drawn() -> None:
    entries = document(LAYERS)["race"]["entries"][:1]
    svg = plots.plot_race("", entries, 0).svg
    assert len(max(paths(svg, "first"), key=len)) == 400
    (bar,) = re.findall(r'<path d="([^"]*)"[^>]*style="fill: var\(--first\)', svg)
    right = max(float(x) for x in re.findall(r"[ML] ([\d.]+)", bar))
    median, p95 = max(paths(svg, "ink"), key=len)
    assert median[0] == pytest.approx(right)
    assert p95[0] > median[0]


def test_calls_that_are_not_shown_are_counted() -> None:
    entry = document(LAYERS)["race"]["entries"][0] | {"p95": 40.0, "p99": 90.0, "samples": [2.0] * 90 + [50.0] * 10}
    drawn = plots.plot_race("", [entry], 0)
    assert "10 slower ones are not shown" in drawn.caption
    assert len(max(paths(drawn.svg, "first"), key=len)) == 90


def test_every_node_is_counted_in_the_graph() -> None:
    before, after = ({f"Op{i}": n + i for i in range(30)} for n in (5, 1))
    drawn = plots.plot_op_counts(before, after)
    pairs = re.findall(r"(\d+) before, (\d+) after", drawn.alt)
    assert sum(int(b) for b, _ in pairs) == sum(before.values())
    assert sum(int(a) for _, a in pairs) == sum(after.values())
    assert "18 other types" in drawn.alt


def test_the_command_line_writes_the_page(tmp_path: Path) -> None:
    layer_norm_by_hand(tmp_path / "in.onnx")
    done = run(
        "optimize", "in.onnx", "-o", "out put.onnx", "--report", "r.json", "--html", "r.html", "-q", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    report, text = json.loads((tmp_path / "r.json").read_text()), (tmp_path / "r.html").read_text()
    assert text == render_page(report)
    assert report["command"] == "normdeploy optimize in.onnx -o 'out put.onnx' --report r.json --html r.html -q"
    assert report["sizes"] == {
        "source": (tmp_path / "in.onnx").stat().st_size,
        "output": (tmp_path / "out put.onnx").stat().st_size,
    }
    assert report["ops"]["after"] == {"LayerNormalization": 1}
    assert sum(report["ops"]["before"].values()) == report["nodes"]["before"] == 9
    assert report["command"] in check_harmless(text).text


def test_the_page_takes_no_other_files_place(tmp_path: Path) -> None:
    source = layer_norm_by_hand(tmp_path / "in.onnx").read_bytes()
    done = run("optimize", "in.onnx", "-o", "out.onnx", "--html", "in.onnx", cwd=tmp_path)
    assert done.returncode == 1
    assert "the report 'in.onnx' would replace 'in.onnx'; choose another name" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["in.onnx"]
    assert (tmp_path / "in.onnx").read_bytes() == source


@pytest.mark.parametrize(("report", "html"), [("in", None), (None, "link"), ("r", "r"), (None, "here/../out")])
def test_no_two_files_have_one_place(report: str | None, html: str | None, tmp_path: Path) -> None:
    (tmp_path / "in").touch()
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("in")
    with pytest.raises(NormdeployError, match="would replace"):
        require_writable_report(
            *(name and tmp_path / name for name in (report, html)), used=(tmp_path / "in", tmp_path / "out")
        )


def test_without_the_extra_nothing_is_begun(tmp_path: Path) -> None:
    layer_norm_by_hand(tmp_path / "in.onnx")
    code = (
        "import sys; sys.modules['matplotlib'] = None; sys.argv = 'normdeploy optimize in.onnx -o out.onnx --html"
        " r.html'.split()\nfrom normdeploy.cli.app import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "--html needs matplotlib, not installed here: pip install jinja2 matplotlib" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["in.onnx"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium; playwright drives it but brings none."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        said = "THE PAGE WAS NOT LOOKED AT: there is no Chromium here; install one (apt-get install chromium)"
        warnings.warn(said, stacklevel=1)
        pytest.skip(said)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def files(hostile: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two pages: of a report that has everything, and of one in which every text is hostile."""
    made = [tmp_path_factory.mktemp("pages") / name for name in ("page.html", "hostile.html")]
    whole = document(LAYERS, replace(LAYERS, module="layers.1.norm"))
    for file, report in zip(made, (whole, hostile), strict=True):
        file.write_text(render_page(report))
    return made


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
def test_in_a_browser(scheme: str, width: int, browser: Any, files: list[Path]) -> None:
    for file in files:
        shown = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 800})
        asked, said = [], []
        shown.on("request", lambda request, asked=asked: asked.append(request.url))
        for event in ("console", "pageerror", "dialog"):
            shown.on(event, lambda what, said=said: said.append(str(what)))
        shown.goto(file.as_uri(), wait_until="networkidle")
        assert (asked, said) == ([file.as_uri()], [])
        assert shown.evaluate("document.documentElement.scrollWidth") <= width  # nothing sticks out
        plots_shown = shown.locator("svg.plot").all()
        assert len(plots_shown) == 5
        for plot in plots_shown:
            # On a phone the chart scrolls inside its figure.
            box = plot.locator("xpath=ancestor::figure").bounding_box()
            assert 0 <= box["x"] < box["x"] + box["width"] <= width
            if width == 1200:
                whole = plot.bounding_box()
                assert 0 <= whole["x"] < whole["x"] + whole["width"] <= width
            assert box["height"] > 80
        assert readable(shown, "body", "body")
        assert readable(shown, "svg.plot text", "section")
        assert readable(shown, ".warn", "section")
        assert len(set(shown.screenshot(full_page=True))) > 100
        shown.close()


def readable(shown: Any, text: str, ground: str) -> bool:
    """WCAG 2.2's contrast of 4.5 between the text's colour and the ground's."""
    read = "(e, p) => getComputedStyle(e)[p].match(/\\d+/g).slice(0, 3).map(Number)"
    kind = "fill" if "svg" in text else "color"
    colours = (
        shown.locator(text).first.evaluate(read, kind),
        shown.locator(ground).first.evaluate(read, "backgroundColor"),
    )
    high, low = sorted(map(luminance, colours), reverse=True)
    return (high + 0.05) / (low + 0.05) >= 4.5


def luminance(colour: list[int]) -> float:
    """Relative luminance of sRGB, 0 to 1 (WCAG 2.2)."""
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_an_error_that_is_no_number_exceeds_what_is_allowed() -> None:
    """JSON has no NaN: it is null there."""
    point = {"module": "a", "tensor": "t", "error": 1e-7, "eager": 1e-7, "allowed": 1e-6, "reason": ""}
    plot = plots.plot_drift("onnxruntime", [point, point | {"module": "b", "error": None}, point | {"error": 2e-6}], 0)
    assert plot.alt == "3 tensors in onnxruntime: 2 exceed what is allowed, the first is b."
    plot = plots.plot_drift("onnxruntime", [point], 0)
    assert plot.alt.startswith("1 tensors in onnxruntime: 0 exceed what is allowed; the last is off by 1.0e-07")


def table_heads(text: str) -> list[str]:
    """The titles of all columns."""
    return [re.sub(r"<[^>]*>", "", head) for head in re.findall(r"<th[^>]*>(.*?)</th>", text)]


def test_chips_of_ops_never_break_in_a_word() -> None:
    style = Elements(render_page(document(LAYERS))).style
    (rule,) = re.findall(r"^\.ops span \{(.*)\}$", style, re.MULTILINE)
    assert "white-space: nowrap" in rule
    assert "max-width: 100%" in rule


def test_charts_are_as_wide_as_the_page() -> None:
    text = render_page(document(LAYERS))
    style = Elements(text).style
    assert re.search(r"^\.figures \{[^}]*grid-template-columns: minmax\(0, 1fr\)", style, re.MULTILINE)
    assert not re.search(r"^figure \{[^}]*max-width", style, re.MULTILINE)
    widths = {float(w) for w in re.findall(r'<svg viewBox="0 0 ([\d.]+) [\d.]+"[^>]*class="plot"', text)}
    assert widths == {720.0}


@pytest.mark.parametrize("count", [1, 2])
def test_chart_of_one_dot_is_left_out(count: int) -> None:
    proof = replace(PROOF, method="exact", bits=134)
    findings = [replace(LAYERS, module=f"layers.{i}.norm", certificate=proof) for i in range(count)]
    text = render_page(document(*findings) | {"parity": None, "race": None})
    assert text.count("how unlikely it is that a proof is wrong") == count - 1
    assert text.count("Rounding in onnxruntime") == count - 1


def test_head_names_the_output_beside_the_source() -> None:
    text = render_page(document(LAYERS) | {"files": {"source": "folder/model.pt", "output": "out/model.onnx"}})
    assert "<h1>model.pt → model.onnx</h1>" in text
    assert "<h1>model.onnx</h1>" in render_page(document(LAYERS) | {"files": {"output": "out/model.onnx"}})


def test_table_without_proofs_has_no_proof_column() -> None:
    kept = replace(LAYERS, status="kept", certificate=None, proved=())
    assert "proof" not in table_heads(render_page(document(kept)))
    assert "proof" in table_heads(render_page(document(kept, LAYERS)))


def test_table_of_engine_without_reasons_has_no_reason_column() -> None:
    report = document(LAYERS) | dict.fromkeys(("precision", "parity", "bisection"))
    assert "because" not in table_heads(render_page(report))
    assert "" not in table_heads(render_page(document(LAYERS)))


def test_page_shows_the_four_statuses_alone() -> None:
    left = [Finding("unknown", "refused", "t", reason="why"), Finding("unknown", "undone", "u", reason="why not")]
    text = Elements(render_page(document(LAYERS, *left))).text
    assert text.count("skipped") >= 3
    assert "refused" not in text
    assert re.search(r"2 → 2\s*norm nodes", text)
    assert re.search(r"598 → 130\s*all nodes", text)
