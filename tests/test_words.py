"""Every docstring, comment, message and page keeps to plain words; the checker finds what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from .words import check_page, check_prose, check_python

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(file for folder in ("normdeploy", "plugins") for file in (ROOT / folder).rglob("*.py"))
# The changelog is history.
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_modules_keep_to_plain_words() -> None:
    complaints = [str(each) for file in MODULES for each in check_python(file, str(file.relative_to(ROOT)))]
    assert not complaints, "\n".join(complaints)


def test_pages_keep_to_plain_words() -> None:
    complaints = [str(each) for file in PAGES for each in check_page(file, str(file.relative_to(ROOT)))]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It is told as a note.", "is told"),
        ("The file is no model.", "is no"),
        ("A process of one's own.", "of one's own"),
        ("It shows what the file says is there.", "what the file says is"),
        ("A matter that hangs on the batch.", "hangs on"),
    ],
)
def test_a_phrase_that_reads_as_translated_is_found_with_its_line(text: str, found: str) -> None:
    (complaint,) = check_prose(f"Plain.\n{text}", "page.md", 10)
    assert (complaint.file, complaint.line, complaint.text) == ("page.md", 11, found)


@pytest.mark.parametrize(
    "text", ["There is no such file.", "It is no longer needed.", "`is told` is code.", "Read [it](what-is-told.md)."]
)
def test_plain_phrases_and_code_are_left_alone(text: str) -> None:
    assert not [*check_prose(text, "page.md", 1)]


def test_a_sentence_of_more_than_30_words_is_found() -> None:
    (complaint,) = check_prose("Short one.\n\n" + "word " * 30 + "end.", "page.md", 1)
    assert (complaint.line, complaint.repair.split()[0]) == (3, "31")
    assert not [*check_prose("word " * 29 + "end.", "page.md", 1)]


def test_a_docstring_that_hides_its_verb_is_found(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text('"""Read files."""\n\n\ndef size() -> int:\n    """The size of a file."""\n    return 1\n')
    (complaint,) = check_python(file, "module.py")
    assert (complaint.line, complaint.text) == (5, "The")
