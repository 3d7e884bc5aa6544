"""Find words and sentences that a tired reader has to read twice, in docstrings, comments, messages and pages."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Longer sentences are rarely understood at once.
LONGEST = 30
# A docstring that opens with one of these hides its verb.
_OPENINGS = frozenset({"what", "whether", "where", "which", "how", "the", "a", "an", "of", "as"})
_REPAIRS = {
    r"\b(?:is|are|was|were|be) told\b": "say who reports it: 'reported', 'noted', 'printed'",
    r"\b(?:is|are) no\b(?! longer| more| less)": "'is not a', 'are not', 'there is no'",
    r"\bof one's own\b": "'its own', 'a separate'",
    r"\bhangs? on\b": "'depends on'",
    r"\bwhoever\b": "name the reader or the caller",
    r"\bin the place of\b": "'instead of'",
    r"\bto be had\b": "'available'",
    r"\b[Ww]hat (?:\w+ ){1,3}(?:is|are)\b(?! the\b)": "use a noun",
    r"\bof what\b": "use a noun",
}
_REPAIRED = {re.compile(pattern): repair for pattern, repair in _REPAIRS.items()}
# "there is no file" is plain English.
_PLAIN = re.compile(r"\b[Tt]here (?:is|are) no\b")


@dataclass(frozen=True)
class Complaint:
    """One place that has to be written again."""

    file: str
    line: int
    text: str
    repair: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text!r}: {self.repair}"


def check_python(file: Path, name: str) -> Iterator[Complaint]:
    """Yield the complaints about the docstrings, comments and messages of a module.

    Args:
        name: the file's name in the complaints.
    """
    text = file.read_text()
    tree = ast.parse(text)
    docstrings = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if not node.body or not isinstance(node.body[0], ast.Expr) or not isinstance(node.body[0].value, ast.Constant):
            continue
        constant = node.body[0].value
        if not isinstance(constant.value, str):
            continue
        docstrings.add(id(constant))
        words = constant.value.split()
        first = words[0].strip("`*:,.").lower() if words else ""
        if first in _OPENINGS:
            yield Complaint(name, constant.lineno, words[0], "open with a verb, or a class with a noun")
        yield from check_prose(_without_blocks(constant.value), name, constant.lineno)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from _check_phrases(token.string, name, token.start[0])
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docstrings:
            continue
        # Shorter texts are names and keys.
        if len(node.value.split()) > 3:
            yield from _check_phrases(node.value, name, node.lineno)


def check_page(file: Path, name: str) -> Iterator[Complaint]:
    """Yield the complaints about a Markdown page, without its code blocks."""

    def blank_lines(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    prose = re.sub(r"^( *)```.*?^\1```", blank_lines, file.read_text(), flags=re.MULTILINE | re.DOTALL)
    yield from check_prose(prose, name, 1)


def check_prose(text: str, name: str, line: int) -> Iterator[Complaint]:
    """Yield the phrases to repair and the sentences that are too long.

    Args:
        line: the line of the file that the text begins in.
    """
    for number, each in enumerate(text.split("\n")):
        yield from _check_phrases(each, name, line + number)
    for start, sentence in _sentences(text):
        words = sentence.split()
        if len(words) > LONGEST:
            repair = f"{len(words)} words in a sentence; write several, of {LONGEST} at most"
            yield Complaint(name, line + text.count("\n", 0, start), " ".join(words[:6]) + " ...", repair)


def _check_phrases(text: str, name: str, line: int) -> Iterator[Complaint]:
    plain = _PLAIN.sub("", _without_code(text))
    for pattern, repair in _REPAIRED.items():
        if found := pattern.search(plain):
            yield Complaint(name, line, found[0], repair)


def _without_blocks(docstring: str) -> str:
    """Blank formulas and tables: the paragraphs of a docstring that begin with an indented line or ===."""
    first, *rest = docstring.split("\n")
    margin = min((len(line) - len(line.lstrip()) for line in rest if line.strip()), default=0)
    lines = [first, *(line[margin:] for line in rest)]
    kept = []
    inside = False
    for number, line in enumerate(lines):
        if number == 0 or not lines[number - 1].strip():
            inside = line.startswith(("    ", "==="))
        kept.append("" if inside else line)
    return "\n".join(kept)


def _without_code(text: str) -> str:
    """Replace inline code and the targets of links by one word of the same length."""
    text = re.sub(r"``?[^`\n]+``?", lambda match: "x" * len(match[0]), text)
    return re.sub(r"\]\([^)]*\)", lambda match: "]" + "x" * (len(match[0]) - 1), text)


def _sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield each sentence with its place in the text; cells of tables and items of lists are sentences too."""
    ends = re.compile(r"[.?!:;](?=[\s)\"'*]|$)|\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.|\w[\w, `*.-]*:)\s)|\|")
    plain = _without_code(text)
    start = 0
    for end in ends.finditer(plain):
        yield start, plain[start : end.end()]
        start = end.end()
    yield start, plain[start:]
