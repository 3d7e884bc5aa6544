"""Tables of the terminal keep words whole at every width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from normdeploy.findings.console_tables import Column, fit_words, make_grid, make_table

PATH = "model.bert.encoder.layers.{0..11}.self_attention.output.layer_norm"


def shown(*rows: tuple[str, ...], width: int = 80, columns: tuple[str | Column, ...] = ("module", "result")) -> str:
    out = io.StringIO()
    table = make_table(*columns)
    for row in rows:
        table.add_row(*row)
    Console(file=out, width=width).print(table)
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_table_of_long_path_breaks_between_modules_only(width: int) -> None:
    lines = shown((PATH, "fused into LayerNormalization(axis=-1, epsilon=1e-12) " * 3), width=width).splitlines()
    assert max(map(len, lines)) <= width
    first = "".join(line.split("  ")[0].strip() for line in lines[3:])
    assert first == PATH
    for line in lines[3:]:
        assert line.split("  ")[0].strip()[-1:] in ("", ".", "m")


def test_table_of_long_name_elides_its_middle() -> None:
    text = shown(("x" * 50 + "y" * 50, "a reason that is short"))
    assert max(map(len, text.splitlines())) <= 80
    assert "xxx…yyy" in text
    assert "a reason that is short" in text


def test_table_that_fits_shows_every_cell_in_one_line() -> None:
    assert "encoder.norm   kept: it is one node" in shown(("encoder.norm", "kept: it is one node"))


def test_numbers_of_narrow_table_stay_whole() -> None:
    columns = ("output", Column("max abs error", whole=True))
    lines = shown(("y" * 200, "1.234e-05"), width=40, columns=columns).splitlines()
    assert any("1.234e-05" in line for line in lines)
    assert max(map(len, lines)) <= 40


def test_wide_characters_fit_their_column() -> None:
    fitted = fit_words(Text("模型" * 20), 11)
    assert fitted.cell_len <= 11
    assert "…" in fitted.plain


def test_call_of_long_word_breaks_behind_parenthesis() -> None:
    assert fit_words(Text("LayerNormalization(axis=-1, epsilon=1e-12)"), 20).plain == (
        "LayerNormalization(\naxis=-1, epsilon=1e-12)"
    )


def test_gap_of_several_spaces_breaks_no_cell_that_fits() -> None:
    out = io.StringIO()
    grid = make_grid(Column(""), Column(""))
    grid.add_row("m", "Max(v, 1e-05)  ← the clamp")
    Console(file=out, width=80).print(grid)
    assert "Max(v, 1e-05)  ← the clamp" in out.getvalue()


def test_grid_has_no_titles() -> None:
    out = io.StringIO()
    grid = make_grid(Column("", whole=True), Column(""))
    grid.add_row("proof", "exact")
    Console(file=out, width=80).print(grid)
    assert out.getvalue().strip() == "proof  exact"
