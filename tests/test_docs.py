"""The pages say what is true: links resolve, code runs, commands exist, the files and tests named are there, the reference is current."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import typer.main
from typer.testing import CliRunner

from docs.reference import PAGE, page
from docs.refresh import ROOT, Block, blocks, run_python
from normdeploy import passes
from normdeploy.cli import app

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
RUN = ("README", "identities", "certificates", "custom-norm", "unet-block", "export", "optimize", "inspect", "adding-a-norm")
"""Pages whose code is run. Of their commands those are run whose results later code reads, and Python's."""


def pages(*names: str) -> list[Any]:
    """Parameters: every page, or those named; both READMEs are called README."""
    return [pytest.param(path, id=path.stem) for path in PAGES if not names or path.stem in names]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    bare = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", bare, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", pages())
def test_links_resolve(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text):
        link = "".join(target)
        if re.match(r"\w+:", link):
            assert link.startswith("https://"), link
            continue
        file, _, anchor = link.partition("#")
        there = path.parent / file if file else path
        assert there.exists(), f"{path.name} links to {link}"
        assert not anchor or anchor in anchors(there.read_text()), f"{path.name} links to {link}"


@pytest.mark.parametrize("path", pages())
def test_files_and_tests_that_are_named_exist(path: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for file in re.findall(r"`((?:normdeploy|tests|models|plugins|benchmarks|docs)/[\w./]*(?:\.\w+|/))`", text):
        assert (ROOT / file).exists(), f"{path.name} names {file}"
    tests = "".join(p.read_text() for p in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, f"{path.name} names {name}"


@pytest.mark.parametrize("path", pages())
def test_no_page_shows_a_traceback_or_this_machine(path: Path) -> None:
    text = path.read_text()
    assert "Traceback (most recent call last)" not in text
    assert str(ROOT) not in text


def commands(path: Path) -> list[str]:
    """Every line of code that calls normdeploy, up to what the shell does with it."""
    text = path.read_text()
    lines = [line.strip() for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL) for line in block.splitlines()]
    called = [m[1] for line in lines if (m := re.match(r"(?:\$ |run: |- run: )?(?:\.venv/bin/)?(normdeploy [a-z-].*)", line))]
    return [re.split(r" *(?:\|\||&&|[;|>]) *(?=\S)| # ", line)[0] for line in called]


@pytest.mark.parametrize("path", [p for p in PAGES if p != PAGE and commands(p)], ids=lambda path: path.stem)
def test_commands_exist(path: Path) -> None:
    """Each is parsed, without being run."""
    verbs: dict[str, Any] = getattr(typer.main.get_command(app), "commands", {})
    for line in commands(path):
        verb, *arguments = shlex.split(line, comments=True)[1:]
        if verb.startswith("-"):
            continue
        assert verb in verbs, f"{path.name}: {line}"
        try:
            verbs[verb].make_context(verb, arguments)
        except Exception as error:
            pytest.fail(f"{path.name}: {line}: {error}")


@pytest.mark.parametrize("path", pages(*RUN))
def test_code_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    every, names = list(blocks(path.read_text())), {"__name__": "__main__"}
    imported = set(sys.modules)
    monkeypatch.setattr("normdeploy.passes.PASSES", passes.PASSES)  # a page plants a mistake there, and leaves it
    try:
        for i, block in enumerate(every):
            if block.language == "python":
                run_python(block, names, str(path))
            if block.language == "console":
                _run_commands(block, "".join(b.text for b in every[i:] if b.language == "python"), capsys)
    finally:
        torch.set_default_dtype(torch.float32)
        for name in set(sys.modules) - imported:
            if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
                del sys.modules[name]


def _run_commands(block: Block, later: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run what writes a file that later code reads, and Python files, whose output is compared with the page's."""
    for command in block.commands:
        words = shlex.split(command)
        if words[0] == "python":
            capsys.readouterr()
            runpy.run_path(words[1], run_name="__main__")
            printed = capsys.readouterr().out
            assert _numberless(printed) in _numberless(block.text)
        elif "-o" in words and f'"{words[words.index("-o") + 1]}"' in later:
            done = CliRunner().invoke(app, words[1:], catch_exceptions=False)
            assert done.exit_code == 0, done.output


def _numberless(text: str) -> str:
    """Text without the numbers that differ from one machine to the next."""
    return re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", text)


def test_reference_is_current() -> None:
    assert PAGE.read_text() == page(), "the command line or a docstring has changed: run python -m docs.reference"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name == "README.md" or f"]({path.name})" in index, f"docs/README.md does not list {path.name}"


def test_readme_lists_every_verb() -> None:
    rows = re.findall(r"^\| \[?`([\w-]+)`", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert set(getattr(typer.main.get_command(app), "commands", {})) <= set(rows)


def test_picture_shows_the_graphs_as_they_are() -> None:
    """The number of nodes that the picture states is that of the exporter today."""
    drawn = (ROOT / "docs" / "images" / "norm.svg").read_text()
    graphs = runpy.run_path(str(ROOT / "docs" / "images" / "norm.py"))["graphs"]
    before, after, _ = graphs()
    assert isinstance(before, onnx.GraphProto)
    assert f"torch's exporter: {len(before.node)} nodes" in drawn
    assert [node.op_type for node in after.node] == ["LayerNormalization"]
    for op in {node.op_type for node in before.node} - {"Constant", "Reshape"}:
        assert f">{op}</text>" in drawn
