"""The pages say what is true: links resolve, code runs, commands exist, the files and tests named are there, the
reference is current."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import onnx

# It puts its folder on sys.path. Imported within a test, that entry would go with the test's other changes of the path.
import onnxruntime.transformers  # noqa: F401
import pytest
import torch
import typer.main

from docs.reference import PAGE, page
from docs.refresh import ROOT, blocks, run_python
from normdeploy import forms
from normdeploy.cli.app import app, main

STUBS = sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "README.md")
"""Pages at old places, which only name the new place."""
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {*STUBS})
RUN = ("python", "console")
"""Languages of blocks that are run."""
SLOW = ("bench", "bisect", "fleet", "parity-tests-in-pytest", "unet-block", "verify")
"""Pages whose blocks take more than ten seconds."""
HOW_TO = ROOT / "docs" / "how-to"
KINDS = ("tutorials", "reference", "explanation")
"""Folders of the pages that docs/README.md lists."""


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
    folders = "normdeploy|tests|models|plugins|benchmarks|docs|examples"
    for file in re.findall(rf"`((?:{folders})/[\w./]*(?:\.\w+|/))`", text):
        assert (ROOT / file).exists(), f"{path.name} names {file}"
    tests = "".join(p.read_text() for p in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, f"{path.name} names {name}"


@pytest.mark.parametrize("path", pages())
def test_commands_stand_where_they_are_run(path: Path) -> None:
    for block in blocks(path.read_text()):
        assert block.language == "console" or not block.commands, f"{path.name}: {block.commands}"


@pytest.mark.parametrize("path", pages())
def test_no_page_shows_a_traceback_or_this_machine(path: Path) -> None:
    text = path.read_text()
    assert "Traceback (most recent call last)" not in text
    assert str(ROOT) not in text


def commands(path: Path) -> list[str]:
    """Every line of code that calls normdeploy, up to what the shell does with it."""
    text = path.read_text()
    lines = [
        line.strip()
        for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    called = [
        m[1] for line in lines if (m := re.match(r"(?:\$ |run: |- run: )?(?:\.venv/bin/)?(normdeploy [a-z-].*)", line))
    ]
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


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem in SLOW else [])
        for p in PAGES
        if p != PAGE and any(b.language in RUN for b in blocks(p.read_text()))
    ],
)
def test_pages_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every block in order, commands in this process; they print the page's words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # Where it is set, pytest prints whole messages in its summary.
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("normdeploy.forms.FORMS", forms.FORMS)  # a page plants a mistake there, and leaves it
    _without_gpu(monkeypatch)
    names, imported = {"__name__": "__main__"}, set(sys.modules)
    try:
        for block in blocks(path.read_text()):
            if block.language == "python":
                run_python(block, names, str(path))
            if block.language == "console":
                printed = "".join(f"$ {c}\n{_printed(c, monkeypatch, capsys)}" for c in block.commands).replace(
                    f"{tmp_path}/", ""
                )
                assert _words(printed) == _words(block.text), (
                    f"{path.name}: refresh it (docs/refresh.py), or mend the code\n{printed}"
                )
    finally:
        torch.set_default_dtype(torch.float32)
        for name in set(sys.modules) - imported:
            if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
                del sys.modules[name]


def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and pictures were made on a machine without a GPU."""
    for module in ("trt_runner", "ort_runner"):
        monkeypatch.setattr(
            f"normdeploy.runtimes.{module}.explain_missing_gpu", lambda: "no GPU: this machine has no NVIDIA driver"
        )


def _printed(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the text that bash would show for a command of normdeploy or a Python file.

    ``python -m`` runs in a process of its own: pytest inside pytest would share its settings and captured output.
    """
    line, _, after = command.partition("; ")
    assert after in ("", 'echo "exit code $?"')
    program, *arguments = shlex.split(line)
    if program == "python" and arguments[0] == "-m":
        done = subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert after or done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}"
        return done.stdout + (f"exit code {done.returncode}\n" if after else "")
    monkeypatch.setattr("sys.argv", [program, *arguments] if program == "normdeploy" else arguments)
    capsys.readouterr()
    code: object = 0
    try:
        main() if program == "normdeploy" else runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    told = capsys.readouterr()
    assert after or code == 0, f"{command} ended with {code}\n{told.out}{told.err}"
    return told.out + told.err + (f"exit code {code}\n" if after else "")


def _words(text: str) -> Counter[str]:
    """The words of two letters and more, in whatever order: numbers differ between machines, and with them where a
    table breaks its lines.

    Words that rounding or load decide are left out. They name the worst input, the place where an error grows most,
    and what ``bench`` says of the machine and of the winner. The note on onnxruntime's sums of one pass is left out
    too, because these sums exceed their bound on some CPUs only.
    """
    winner = r"^(?:no clear winner|fastest): .*?(?=^inputs: |^\d+ thread)"
    machine = r"\d+ rounds of warm-up.*?(?=^\$ |\Z)"
    sums = r"^note: onnxruntime computes GroupNormalization in one pass.*?(?=^note: |^\$ |\Z)"
    rows = r"\brows \d+ to \d+ of \w+"
    steady = re.sub(rf"{winner}|{machine}|{sums}|{rows}|\blayers\.\S+", "", text, flags=re.DOTALL | re.MULTILINE)
    return Counter(re.findall(r"[^\W\d_]{2,}", steady)) - Counter(
        dict.fromkeys(
            (
                "seed",
                "zeros",
                "inputs",
                "around",
                "constant",
                "positive",
                "negative",
                "outlier",
                "all",
                "one",
                "times",
                "small",
            ),
            len(text),
        )
    )


def test_reference_is_current() -> None:
    assert PAGE.read_text() == page(), "the command line or a docstring has changed: run python -m docs.reference"


def test_index_lists_every_page_once() -> None:
    """The tables of the how-to pages are in their folder's index."""
    docs = ROOT / "docs"
    indexes = {
        docs / "README.md": [path for kind in KINDS for path in (docs / kind).glob("*.md")],
        HOW_TO / "README.md": [path for path in HOW_TO.glob("*.md") if path.name != "README.md"],
    }
    for index, pages_of_index in indexes.items():
        rows = re.findall(r"^\|.*?\[[^\]]+\]\(([^)\s]+)\)", index.read_text(), re.MULTILINE)
        listed = Counter(rows)
        names = [path.relative_to(index.parent).as_posix() for path in pages_of_index]
        wrong = {name: listed[name] for name in names if listed[name] != 1}
        assert not wrong, f"{index.relative_to(ROOT)} does not list these pages once: {wrong}"
    assert "](how-to/README.md)" in (docs / "README.md").read_text()


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in STUBS])
def test_stub_is_a_heading_and_a_sentence_with_the_new_place(path: Path) -> None:
    found = re.fullmatch(r"# [^\n]+\n\n[^\n.\[]*\[([^\]\n]+)\]\(([^)\s]+)\)[^\n.\[]*\.\n", path.read_text())
    assert found, f"docs/{path.name}: move the page to a folder, and leave one heading and one sentence with a link"
    text, place = found.groups()
    assert text == place
    assert (path.parent / place).is_file(), f"docs/{path.name} links to {place}"
    assert (path.parent / place) not in STUBS


def links_to_stubs(text: str, folder: Path) -> list[str]:
    """Find links and names of old places.

    Args:
        text: content of a file in ``folder``.

    Returns:
        the links and paths, as they are written.
    """
    names = {path.name for path in STUBS}
    paths = re.finditer(r"\bdocs\"?\s?/\s?\"?([\w-]+\.md)\b", text)
    links = re.finditer(r"(?:\]\(|\]: |(?:href|src)=\")([^)\s#\"]+\.md)\b", text)
    return [
        *(path[0] for path in paths if path[1] in names),
        *(link[1] for link in links if Path(os.path.normpath(folder / link[1])) in STUBS),
    ]


def test_links_to_stubs_are_found() -> None:
    name = STUBS[0].name
    assert links_to_stubs(f"More in docs/{name}.", ROOT) == [f"docs/{name}"]
    assert links_to_stubs(f'(ROOT / "docs" / "{name}").read_text()', ROOT / "tests") == [f'docs" / "{name}']
    assert links_to_stubs(f"[page](../{name}#part)", HOW_TO) == [f"../{name}"]
    assert links_to_stubs(f"[page]({name}) docs/how-to/{name} docs/README.md", HOW_TO) == []


def test_nothing_links_to_a_stub() -> None:
    """The changelog may: its old entries keep the names of their time."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    wrong = {}
    for name in filter(None, listed):
        path = ROOT / name
        if name == "CHANGELOG.md" or path in STUBS or not path.is_file():
            continue
        if links := links_to_stubs(path.read_text(errors="replace"), path.parent):
            wrong[name] = links
    assert wrong == {}, "write the new places"


def test_index_lists_every_verb() -> None:
    rows = re.findall(r"^\| \[?`([\w-]+)`", (ROOT / "docs" / "README.md").read_text(), re.MULTILINE)
    assert set(getattr(typer.main.get_command(app), "commands", {})) <= set(rows)


def test_readme_is_short() -> None:
    prose = re.sub(r"^```.*?^```", "", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) <= 900


def test_picture_of_the_speed_and_the_readme_are_of_the_measured_figures() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "images" / "speed.py"))
    current = (ROOT / "docs" / "images" / "speed.svg").read_text() == made["picture"]()
    assert current, "a JSON of benchmarks/results has changed: run docs/images/speed.py"
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert [claim for claim in made["claims"]() if claim not in readme] == []


def test_picture_of_the_terminal_shows_what_the_commands_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _without_gpu(monkeypatch)
    made = runpy.run_path(str(ROOT / "docs" / "images" / "terminal.py"))
    made["prepare"]()
    printed = ""
    for command in made["COMMANDS"]:
        output = _printed(f'{command}; echo "exit code $?"', monkeypatch, capsys)
        assert output.endswith("exit code 1\n")
        printed += f"$ {command}\n" + output.removesuffix("exit code 1\n")
    shown = made["read_text"](made["PICTURE"].read_text())
    assert _words(printed) == _words(shown), f"run docs/images/terminal.py, or mend the code\n{printed}"


def test_picture_of_the_report_shows_the_words_of_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers aside: errors and times differ between machines."""
    made = runpy.run_path(str(ROOT / "docs" / "images" / "report.py"))
    if made["find_chromium"]() is None:
        pytest.skip("there is no Chromium here; install one (apt-get install chromium)")
    monkeypatch.chdir(tmp_path)
    _without_gpu(monkeypatch)
    shown = made["read_words"](made["PICTURE"].read_bytes())
    assert shown["Normalizations"] == 1
    pages = made["make_pages"](lambda command: _printed(command, monkeypatch, capsys))
    current = _words(" ".join(made["page_words"](pages).elements()))
    assert current == _words(" ".join(shown.elements())), "run docs/images/report.py and look at the picture"


def test_picture_of_the_norm_is_of_today() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "images" / "norm.py"))
    assert (ROOT / "docs" / "images" / "norm.svg").read_text() == made["picture"](*made["graphs"]())


def test_picture_of_the_flow_names_what_is_there() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "images" / "flow.py"))
    assert (ROOT / "docs" / "images" / "flow.svg").read_text() == made["picture"]()
    assert [name for name in made["folders"]() if not (ROOT / "normdeploy" / name).exists()] == []


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
