"""The page of what verify costs is the one that its benchmark writes."""

from __future__ import annotations

from benchmarks.verify_cost import RESULTS, kept, sample, table


def test_page_shows_the_rows_that_were_measured() -> None:
    written = RESULTS.with_suffix(".md").read_text().splitlines()
    expected = table(list(kept().values())).splitlines()
    # One line names the machine that it is written on.
    assert len(written) == len(expected)
    differing = [line for line, own in zip(written, expected, strict=True) if line != own]
    assert all(" architectures, " in line for line in differing)
    assert len(differing) <= 1


def test_sample_is_every_sixth_architecture_and_more() -> None:
    assert len(sample()) >= 30
    assert {"MobileOne", "RepViT", "Whisper"} <= {a.name for a in sample()}
