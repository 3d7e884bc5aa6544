"""Former keys of fleet.toml still work, and a note names the present key."""

from __future__ import annotations

from pathlib import Path

import pytest

from normdeploy.errors import InputError
from normdeploy.fleet.fleet_file import read_fleet
from normdeploy.fleet.former_keys import rename_former_keys
from normdeploy.fleet.job_steps import job_steps_of

NOTE = ("the key trust is now trust_remote_code",)


def fleet_of(folder: Path, table: str) -> Path:
    (folder / "model.pt").write_bytes(b"")
    (folder / "fleet.toml").write_text(f"[models.net]\nsource = 'model.pt'\n{table}")
    return folder / "fleet.toml"


@pytest.mark.parametrize(
    "level", ["models.net.export", "defaults.export", "variants.a.export", "models.net.variant.default.export"]
)
def test_the_former_key_runs_code_as_before(tmp_path: Path, level: str) -> None:
    fleet = read_fleet(fleet_of(tmp_path, f"[{level}]\ntrust = true\n"))
    assert fleet.notes == NOTE
    (job,) = fleet.iter_jobs()
    step = job_steps_of(job)[0]
    assert "--trust-remote-code" in step.argv
    # A step that may run code depends on the modules beside the file.
    assert step.code == tmp_path


def test_the_present_key_needs_no_note(tmp_path: Path) -> None:
    fleet = read_fleet(fleet_of(tmp_path, "[models.net.export]\ntrust_remote_code = true\n"))
    assert fleet.notes == ()
    assert "--trust-remote-code" in job_steps_of(next(fleet.iter_jobs()))[0].argv


def test_both_keys_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"fleet\.toml: trust and trust_remote_code are the same key"):
        read_fleet(fleet_of(tmp_path, "[models.net.export]\ntrust = false\ntrust_remote_code = true\n"))


def test_a_key_in_place_of_a_switch_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"trust_remote_code is 'public\.pem'; expected true or false"):
        read_fleet(fleet_of(tmp_path, "[models.net.export]\ntrust = 'public.pem'\n"))


@pytest.mark.parametrize("told", [{"models": 3}, {"models": {"a": 3}}, {"defaults": {"export": 3}}, {"variants": []}])
def test_a_malformed_file_is_left_to_the_schema(told: dict[str, object]) -> None:
    assert rename_former_keys(told) == (told, ())


def test_the_given_tables_are_not_changed() -> None:
    told = {"defaults": {"export": {"trust": True}}}
    assert rename_former_keys(told) == ({"defaults": {"export": {"trust_remote_code": True}}}, NOTE)
    assert told == {"defaults": {"export": {"trust": True}}}
