"""The model card: written from the bundle's documents alone, in Markdown that hostile names can't change."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

import normdeploy
from normdeploy.verbs.package.model_card import render_model_card
from tests.packaged import ADD, given, written

_PARSER = MarkdownIt("commonmark", {"html": True}).enable("table")
_HOSTILE = (
    "x|y`z`</td><script>alert(1)</script>[a](http://evil.example)\n# top\n| forged | row |\n---\nlicense: mit\n&lt;*b*"
)


class Documents:
    """A bundle's documents, to be changed."""

    def __init__(self, bundle: Path) -> None:
        self.manifest: dict[str, Any] = json.loads((bundle / "manifest.json").read_text())
        self.report: dict[str, Any] = json.loads((bundle / "report.json").read_text())
        self.certificates = [json.loads(file.read_text()) for file in sorted((bundle / "certificates").glob("*.json"))]

    def card(self) -> str:
        return render_model_card(self.manifest, self.report, self.certificates)


@pytest.fixture(scope="module")
def read(made: Path) -> Documents:
    return Documents(made / "bundle")


@pytest.fixture
def documents(read: Documents) -> Documents:
    return copy.deepcopy(read)


def _split(card: str) -> tuple[dict[str, Any], str]:
    """Front matter and body."""
    _, front, body = card.split("---\n", 2)
    return yaml.safe_load(front), body


def _sections(card: str) -> dict[str, list[Token]]:
    """Heading -> tokens below it."""
    found: dict[str, list[Token]] = {}
    tokens = _PARSER.parse(_split(card)[1])
    title = ""
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open":
            assert after is not None
            title = after.content
        found.setdefault(title, []).append(token)
    return found


def _rows(tokens: list[Token]) -> list[list[str]]:
    """Cells of each row of the tables, with the titles."""
    rows: list[list[str]] = []
    for token, after in pairwise(tokens):
        if token.type == "tr_open":
            rows.append([])
        elif token.type in ("td_open", "th_open"):
            rows[-1].append("".join(t.content for t in after.children or ()))
    return rows


def test_card_in_the_bundle_is_that_of_its_documents(made: Path, read: Documents) -> None:
    assert (made / "bundle" / "README.md").read_text() == read.card() == read.card()


def test_front_matter_is_that_of_hugging_face(read: Documents) -> None:
    front, _ = _split(read.card())
    assert front == {"library_name": "onnx", "tags": ["onnx", "onnxruntime", "normalization", "normdeploy"]}


def test_model_inputs_and_outputs_are_named(made: Path, read: Documents) -> None:
    sections = _sections(read.card())
    model = dict(_rows(sections["Model"])[1:])
    assert model["file"] == "model_repository/model_onnx/1/model.onnx"
    assert model["SHA-256"] == read.manifest["source"]["sha256"]
    assert model["PyTorch model"].startswith("ExportedProgram, SHA-256 ")
    proto = onnx.load(made / "model.onnx")
    assert model["opset"] == str(proto.opset_import[0].version)
    assert model["nodes"].startswith(f"{len(proto.graph.node)}: ")
    assert _rows(sections["Inputs"]) == [["name", "type", "dims"], ["x", "float32", "d0 × 8"]]
    assert _rows(sections["Outputs"])[1:] == [[proto.graph.output[0].name, "float32", "d0 × 8"]]


def test_numbers_of_the_verdict_are_those_of_the_report(read: Documents) -> None:
    card = read.card()
    assert "**Every sample gives the expected outputs.**" in card
    rows = _rows(_sections(card)["Verification"])
    assert rows[0] == ["output", "runtime", "max abs error", "allowed", "verdict", "worst sample"]
    results = read.report["parity"]["results"]
    assert len(rows) == len(results) + 1
    for row, result in zip(rows[1:], results, strict=True):
        assert row[:2] == [result["output"], result["runtime"]]
        assert float(row[2]) == pytest.approx(result["max_abs_error"], rel=5e-3)
        assert float(row[3]) == pytest.approx(result["allowed"], rel=5e-3)
        assert row[4:] == [result["verdict"], result["case"]]


def test_norms_and_proofs_are_listed(read: Documents) -> None:
    rows = _rows(_sections(read.card())["Norms"])
    (certificate,) = read.certificates
    assert rows[1] == [
        "1",
        "LayerNorm",
        certificate["spelling"],
        f"fused into {certificate['became']}",
        "exact, checked in onnxruntime",
    ]
    assert rows[3][:3] == ["1", "LayerNorm", "LayerNormalization"]
    assert "CPU: kernel" in rows[3][3]


def test_equal_norms_are_one_row(documents: Documents) -> None:
    documents.certificates *= 24
    documents.report["norms"] *= 24
    assert [row[0] for row in _rows(_sections(documents.card())["Norms"])] == ["number", "24", "number", "24"]


def test_commands_versions_and_missing_runtimes_are_listed(read: Documents) -> None:
    sections = _sections(read.card())
    (code,) = (t.content for t in sections["Reproduce"] if t.type == "code_block")
    assert code.splitlines() == read.manifest["commands"]
    assert dict(_rows(sections["Versions"])[1:]) == read.manifest["versions"]
    missing = [t.content for t in sections["Not verified"] if t.type == "inline"]
    for each in read.report["parity"]["not_run"]:
        assert f"{each['runtime']}: {each['reason']}" in missing
    assert any("not recorded" in line for line in missing)
    assert [t.content for t in sections["Notes"] if t.type == "inline"][1:] == read.report["notes"]
    (served,) = (t.content for t in sections["Serve"] if t.type == "code_block")
    assert served == "tritonserver --model-repository=model_repository\n"
    assert "batches of up to 16" in read.card()


def test_failed_verdict_is_reported_as_failed(documents: Documents) -> None:
    parity = documents.report["parity"]
    parity["ok"] = False
    parity["results"][0] |= {"verdict": "fail", "max_abs_error": "nan", "reason": "the output is NaN"}
    card = documents.card()
    assert "**Some outputs are NOT as expected.**" in card
    assert "Every sample gives" not in card
    assert _rows(_sections(card)["Verification"])[1][2] == "nan"
    assert "the output is NaN" in card
    parity["results"] = []
    assert "**No runtime ran the samples.**" in documents.card()


def test_failed_proof_is_reported_as_failed(documents: Documents) -> None:
    documents.certificates[0]["certificate"]["identity"] = False
    assert _rows(_sections(documents.card())["Norms"])[1][4] == "NOT proved"


def test_file_without_its_model_says_what_the_samples_do_not_show(tmp_path: Path) -> None:
    normdeploy.package(written(tmp_path, ADD), tmp_path / "bundle", feeds=[given()])
    sections = _sections((tmp_path / "bundle" / "README.md").read_text())
    assert dict(_rows(sections["Model"])[1:])["PyTorch model"] == "not given"
    missing = [t.content for t in sections["Not verified"] if t.type == "inline"]
    assert any(line.startswith("The file was not compared with the PyTorch model.") for line in missing)
    norms = " ".join(t.content for t in sections["Norms"])
    assert "The bundle has no certificates" in norms
    assert "The file has no norms" in norms


def _spoil(value: Any) -> Any:
    """Add a hostile text to each text of a document."""
    if isinstance(value, dict):
        return {key: _spoil(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_spoil(each) for each in value]
    if isinstance(value, str):
        return f"{value}{_HOSTILE}"
    return value


def _structure(card: str) -> list[tuple[str, str]]:
    """Tokens of a card without its texts, and each title."""
    tokens = [inner for token in _PARSER.parse(card) for inner in (token, *(token.children or ()))]
    return [(t.type, t.tag) for t in tokens if t.type not in ("text", "text_special")]


def test_hostile_texts_change_no_structure(read: Documents, documents: Documents) -> None:
    """Every text that comes from a file at once: the card has the same headings, cells and items."""
    manifest, report = documents.manifest, documents.report
    manifest |= {key: _spoil(manifest[key]) for key in ("source", "samples", "reference", "versions", "commands")}
    for port in (*manifest["inputs"], *manifest["outputs"]):
        port |= {"name": _spoil(port["name"]), "shape": _spoil(port["shape"])}
    report["notes"] = _spoil(report["notes"])
    spoiled = [*((norm, ("kind", "spelling")) for norm in report["norms"])]
    spoiled += [(result, ("output", "runtime", "verdict", "case")) for result in report["parity"]["results"]]
    spoiled += [(missed, ("runtime", "reason")) for missed in report["parity"]["not_run"]]
    spoiled += [(documents.certificates[0], ("kind", "spelling", "became"))]
    for each, names in spoiled:
        each |= {name: _spoil(each[name]) for name in names}
    card = documents.card()
    assert card.count("forged") > 40
    assert _split(card)[0] == _split(read.card())[0]
    assert _structure(_split(card)[1]) == _structure(_split(read.card())[1])


def test_hostile_names_in_a_file_reach_the_card_escaped(tmp_path: Path) -> None:
    proto = onnx.load(written(tmp_path, ADD))
    name = "x|y`z`<b>[a](http://e)"
    proto.graph.input[0].name = proto.graph.node[0].input[0] = name
    onnx.save(proto, tmp_path / "model.onnx")
    normdeploy.package(tmp_path / "model.onnx", tmp_path / "bundle", feeds=[{name: given()["x"]}])
    rows = _rows(_sections((tmp_path / "bundle" / "README.md").read_text())["Inputs"])
    assert rows[1] == [name, "float32", "n × 3"]
