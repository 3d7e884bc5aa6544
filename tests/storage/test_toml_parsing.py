"""TOML of users: integers beyond 64 bits are one plain line that says where they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from normdeploy.errors import InputError
from normdeploy.fleet import fleet_file
from normdeploy.storage.toml_parsing import parse_toml
from normdeploy.verbs.verify.policy_file import read_policy


@pytest.mark.parametrize("digits", [20, 400, 5000])
def test_policy_and_fleet_with_a_long_integer_say_line_and_bound(digits: int, tmp_path: Path) -> None:
    file = tmp_path / "file.toml"
    file.write_text(f"also-default = true\ntolerance = [{'9' * digits}, 0]\n")
    said = (
        rf"file.toml'? is not valid TOML: an integer has {digits} digits \(at line 2\), .* at most 9223372036854775807$"
    )
    for read in (read_policy, fleet_file.read_fleet):
        with pytest.raises(InputError, match=said) as raised:
            read(file)
        assert "set_int_max_str_digits" not in str(raised.value)


def test_numbers_of_64_bits_long_floats_and_texts_are_read() -> None:
    text = f"a = {2**63 - 1}\nb = -{2**63}\nc = 0.{'1' * 40}\nd = '{'7' * 5000}'\n"
    assert parse_toml(text) == {"a": 2**63 - 1, "b": -(2**63), "c": float(f"0.{'1' * 40}"), "d": "7" * 5000}
