"""Texts and tables in Markdown, read back by a parser of CommonMark."""

from __future__ import annotations

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from normdeploy.reports.markdown_text import escape_markdown, markdown_code, markdown_list, markdown_table

HOSTILE = (
    "a|b",
    "a\\|b",
    "`code`",
    "a\\",
    "<img src=x onerror=alert(1)>",
    "[text](http://evil.example)",
    "![alt](http://evil.example/x.png)",
    "*bold* _it_ __init__ ~~gone~~",
    "&lt;b&gt; &#124;",
    "# heading",
    "- item",
    "12. item",
    "> quotation",
    "===",
    "https://evil.example and www.evil.example",
    "<!-- comment",
    "$math$",
    "<https://evil.example>",
)
_PARSER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def _tokens(text: str) -> list[Token]:
    return [inner for token in _PARSER.parse(text) for inner in (token, *(token.children or ()))]


def _shown(text: str) -> str:
    return "".join(t.content for t in _tokens(text) if t.type in ("text", "text_special", "code_inline", "code_block"))


@pytest.mark.parametrize("text", HOSTILE)
def test_text_shows_itself_and_makes_no_markup(text: str) -> None:
    made = escape_markdown(text)
    types = {token.type for token in _tokens(made)}
    assert types <= {"paragraph_open", "inline", "text", "text_special", "paragraph_close"}
    assert _shown(made) == text


@pytest.mark.parametrize("text", HOSTILE)
def test_text_stays_in_its_cell_and_its_item(text: str) -> None:
    types = [token.type for token in _tokens(markdown_table(("one", "two"), [(text, "x"), ("y", text)]))]
    assert types.count("td_open") == 4
    assert not {"link_open", "html_inline", "html_block", "image", "code_inline", "em_open", "strong_open"} & {*types}
    items = [token.type for token in _tokens(markdown_list([text, "next"]))]
    assert items.count("list_item_open") == 2
    assert items.count("bullet_list_open") == 1
    assert not {"ordered_list_open", "heading_open", "blockquote_open", "html_block", "hr", "link_open"} & {*items}


def test_line_feeds_and_control_characters_are_replaced() -> None:
    made = markdown_table(("a",), [("one\n| two |\r\x1b[31m",)])
    assert len(made.splitlines()) == 3
    assert made.isascii() is False
    assert "\x1b" not in made


def test_plain_names_stay_as_they_are() -> None:
    for name in ("encoder.layer_norm.0", "/model/Add_output_0", "onnxruntime (optimizer off)", "error: 1.5e-07"):
        assert escape_markdown(name) == name


def test_addresses_are_no_links_on_github() -> None:
    """GitHub makes links of addresses without brackets; its parser does not, after a backslash."""
    assert escape_markdown("http://a www.b") == r"http\://a www\.b"


def test_code_can_not_be_closed() -> None:
    tokens = _tokens(markdown_code(["```", "a\nb", "<b>"]))
    assert [token.type for token in tokens] == ["code_block"]
    assert tokens[0].content == "```\na\N{REPLACEMENT CHARACTER}b\n<b>\n"


def test_no_texts_are_no_list() -> None:
    assert markdown_list([]) == ""
