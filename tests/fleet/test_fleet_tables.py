"""Tables of a fleet: no name and no reason in them makes a line, a color or a link of its own."""

from __future__ import annotations

import html
import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from normdeploy.cli.app import app
from normdeploy.fleet import fleet_commands, fleet_tables
from normdeploy.fleet.outcomes import CellOutcome, FleetRun, StepEnd
from normdeploy.fleet.publishing import PublishedCell, PublishResult

FORGED = "m\n::error::forged\r\x1b[31m[red]verified[/]\u2028verified"


@pytest.fixture
def run() -> FleetRun:
    cells = (
        CellOutcome(FORGED, FORGED, FORGED, "failed", reason=FORGED, step=f"a/{FORGED}", seconds=1.0),
        CellOutcome("good_one", "fp16", "cpu", "verified"),
    )
    return FleetRun("1", "fleet.toml", "store", cells, 1, 0, 1.0, "now", notes=(FORGED,))


def printed(show: object, *args: object) -> str:
    # As a terminal gets it, colors included.
    stream = io.StringIO()
    console = Console(file=stream, width=400, force_terminal=True, color_system=None)
    show(console, *args)  # type: ignore[operator]
    return stream.getvalue()


def require_unforged(text: str) -> None:
    assert "\x1b[31m" not in text
    assert "::error" not in text
    assert not any(line.startswith(("verified", "forged", "::")) for line in text.splitlines())
    # Markup is shown, not obeyed.
    assert "[red]verified[/]" in text


def test_show_forged_names_make_no_line(run: FleetRun) -> None:
    require_unforged(printed(fleet_tables.show_fleet_run, run))


@pytest.fixture
def made_run() -> FleetRun:
    cells = (
        CellOutcome("bad", "fp32", "cpu", "failed", reason="it broke", logs=(("bad/fp32/export", "cd" * 32),)),
        CellOutcome("net", "fp32", "cpu", "verified", files=(("model.onnx", "ab" * 32),)),
    )
    return FleetRun("1", "fleet.toml", "/there/store", cells, 1, 0, 1.0, "now")


def test_show_fleet_run_ends_with_the_places_of_the_results(made_run: FleetRun) -> None:
    assert printed(fleet_tables.show_fleet_run, made_run).splitlines()[-3:] == [
        "store of the results: /there/store",
        "to copy the files of a cell: normdeploy fleet show fleet.toml net/fp32/cpu -o FOLDER",
        "HTML page: none; --html FILE.html writes a page",
    ]


def test_copy_command_without_any_file_is_empty(made_run: FleetRun) -> None:
    assert "bad/fp32/cpu" in fleet_tables.copy_command(replace(made_run, cells=made_run.cells[:1]))
    assert fleet_tables.copy_command(replace(made_run, cells=())) == ""


@pytest.mark.parametrize("verb", ["run", "status", "diff"])
def test_verbs_name_the_places_as_the_user_typed_them(
    made_run: FleetRun, verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = {"run": "run_fleet", "status": "fleet_status", "diff": "preview_update"}
    monkeypatch.setattr(fleet_commands, functions[verb], lambda *_, **__: replace(made_run, cells=made_run.cells[1:]))
    page = tmp_path / "fleet.html"
    arguments = ["fleet", verb, "some where/fleet.toml", "--store", "s3://b/x", "--html", str(page)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    command = "normdeploy fleet show 'some where/fleet.toml' net/fp32/cpu --store s3://b/x -o FOLDER"
    assert f"to copy the files of a cell: {command}\n" in done.stdout
    assert done.stdout.endswith(f"page: {page}\n")
    text = html.unescape(page.read_text())
    assert "<code>/there/store</code>" in text
    assert f"<code>{command}</code>" in text


def test_show_rechecks_forged_names_make_no_line() -> None:
    require_unforged(
        printed(fleet_tables.show_rechecks, [StepEnd(f"{FORGED}/recheck", "recheck", "wrong", reason=FORGED)])
    )


def test_show_published_forged_names_make_no_line() -> None:
    items = (PublishedCell(FORGED, "published", where=FORGED), PublishedCell(FORGED, "refused", reason=FORGED))
    require_unforged(printed(fleet_tables.show_published, PublishResult("oci://h/r", items, (FORGED,))))


def test_show_steps_forged_names_make_no_line() -> None:
    stored = SimpleNamespace(sha256=FORGED, bytes=1)
    record = SimpleNamespace(
        depends={"argv": ["verify", FORGED], "inputs": {FORGED: FORGED}},
        key=FORGED,
        started=FORGED,
        seconds=1.0,
        peak=1,
        outputs={FORGED: stored},
        reason=FORGED,
    )
    found = SimpleNamespace(steps=[(FORGED, "wrong", record)])
    require_unforged(printed(fleet_tables.show_steps, found, lambda *_: f"first\n{FORGED}"))


def test_markdown_forged_names_make_no_row_link_or_tag(run: FleetRun) -> None:
    name = "a|b](http://x)<img>`c`\n| forged | row |\n![x](http://y)&lt;*b*"
    run = FleetRun("1", "f", "s", (CellOutcome(name, name, name, "failed", reason=name, step="a/b"),), 1, 0, 1.0, "now")
    text = fleet_tables.run_to_markdown(run)
    assert len([line for line in text.splitlines() if line.startswith("|")]) == 3
    assert "<img>" not in text
    assert "](" not in text.replace(r"\](", "")
    assert r"\`c\`" in text
    assert "&amp;lt;" in text


def test_markdown_plain_names_stay_as_they_are(run: FleetRun) -> None:
    assert "| good_one | fp16 |" in fleet_tables.run_to_markdown(run)
