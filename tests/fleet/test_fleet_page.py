"""The page of a fleet: links to the files that were made, and times of shared steps counted once."""

from __future__ import annotations

import json
from dataclasses import asdict

from normdeploy.fleet.fleet_page import render_fleet_page
from normdeploy.fleet.outcomes import CellOutcome, FleetRun
from normdeploy.fleet.run_history import cells_by_name

CELLS = tuple(
    CellOutcome(
        "net", "fp32", target, "verified", seconds=7.0 + own, bytes=100, ran=2, shared_seconds=7.0,
        files=(("model.onnx", "ab" * 32),),
    )
    for target, own in (("cpu", 0.0), ("ada", 1.5))
)  # fmt: skip
RUN = FleetRun("1", "fleet.toml", "store", CELLS, 3, 0, 9.0, "now")


def page(href: bool) -> str:
    return render_fleet_page(RUN, lambda digest: "", (lambda digest: f"objects/{digest}") if href else None)


def test_page_links_each_file_that_was_made() -> None:
    assert page(href=True).count(f'<a href="objects/{"ab" * 32}" download="model.onnx">model.onnx</a>') == 2


def test_page_of_remote_store_has_no_links() -> None:
    assert "<a " not in page(href=False)


def test_time_of_shared_steps_is_shown_once() -> None:
    text = page(href=True)
    assert text.count("shared steps 7.0 s") == 1
    assert "1.5 s" in text
    assert "8.5 s" not in text
    assert text.count("7.0 s") == 1


def test_cells_of_an_older_store_are_read(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    told = json.loads(json.dumps(asdict(CELLS[0])))
    for name in ("shared_seconds", "files"):
        del told[name]
    monkeypatch.setattr("normdeploy.fleet.run_history._read_manifest_lines", lambda store, run, name: [told])
    (cell,) = cells_by_name(None, "1").values()  # type: ignore[arg-type]
    assert (cell.shared_seconds, cell.files) == (0.0, ())
