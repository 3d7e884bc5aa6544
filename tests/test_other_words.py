"""Words of other tools and former words become normdeploy's words, or an error that names the word."""

from __future__ import annotations

import pytest

from normdeploy.errors import InputError
from normdeploy.other_words import (
    ArgumentWord,
    CommandWord,
    OwnOptions,
    translate_arguments,
    translate_command_line,
)

OWN = OwnOptions(
    names={"--output": "output", "-o": "output", "--quiet": "quiet", "--key": "key", "--fast": "fast"},
    valued=frozenset({"output", "key"}),
    repeatable=frozenset({"key"}),
)
WORDS = (
    CommandWord(flags=("--save",), means=("--output",), takes_value=True),
    CommandWord(flags=("--load",), means=(), takes_value=True),
    CommandWord(flags=("--quick",), means=("--fast",), note="--quick is now --fast"),
    CommandWord(flags=("--secret",), means=("--key",), takes_value=True, convert=lambda value: value.upper()),
    CommandWord(flags=("--half",), refusal="write --precision"),
)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("--save=a --load=b", "--output a b"),
        ("--save a b --quick", "--output a b --fast"),
        ("--secret=x --key y", "--key X --key y"),
        # Values of options are not options.
        ("--output --half b", "--output --half b"),
        ("-o--half b", "-o--half b"),
        ("--key=--half", "--key=--half"),
        # After --, every word is an argument.
        ("-- --half", "-- --half"),
        ("--unknown x", "--unknown x"),
    ],
)
def test_words_are_translated_and_others_stay(given: str, wanted: str) -> None:
    assert translate_command_line(given.split(), WORDS, OWN).args == wanted.split()


def test_a_former_word_gives_a_note() -> None:
    assert translate_command_line(["--quick"], WORDS, OWN).notes == ["--quick is now --fast"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--half", "--half: write --precision"),
        ("--save", "--save needs a value; write --output VALUE"),
        ("--quick=yes", "--quick takes no value, but 'yes' was given; write --fast"),
        ("--save a --output b", "--save and --output are the same option; pass only --output"),
        ("-o b --save=a", "-o and --save are the same option; pass only --output"),
        ("-ob --save=a", "-ob and --save are the same option; pass only --output"),
        ("--save=a --save=a", "--save and --save are the same option; pass only --output"),
        ("--fast --quick", "--fast and --quick are the same option; pass only --fast"),
        ("a --load b", "'a' and --load are two files, but this verb takes one; pass one of them"),
    ],
)
def test_a_word_without_a_counterpart_or_given_twice_is_an_error(given: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        translate_command_line(given.split(), WORDS, OWN)
    assert str(caught.value) == message


ARGUMENTS = (
    ArgumentWord(name="f", means="output"),
    ArgumentWord(name="model", means="source", applies=lambda value: not isinstance(value, str)),
    ArgumentWord(name="folding", harmless=(True, None), refusal="constants are always computed"),
    ArgumentWord(name="runtime", means="library", former=True),
)
NAMES = frozenset({"output", "source", "model"})


def test_arguments_get_our_names() -> None:
    assert translate_arguments({"f": "a", "x": 1}, NAMES, ARGUMENTS) == {"output": "a", "x": 1}
    assert translate_arguments({"folding": True}, NAMES, ARGUMENTS) == {}
    assert translate_arguments({"model": 3}, NAMES, ARGUMENTS) == {"source": 3}


def test_an_argument_that_is_ours_for_this_value_stays() -> None:
    assert translate_arguments({"model": "m:f"}, NAMES, ARGUMENTS) == {"model": "m:f"}
    assert translate_arguments({"runtime": "tensorrt"}, NAMES, ARGUMENTS) == {"runtime": "tensorrt"}


def test_a_former_argument_warns() -> None:
    with pytest.warns(DeprecationWarning, match="^runtime is now library$"):
        assert translate_arguments({"runtime": "x"}, {"library"}, ARGUMENTS) == {"library": "x"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"f": "a", "output": "a"}, "f and output are the same argument; pass only output"),
        ({"folding": False}, "folding=False: constants are always computed"),
        # 1 equals True, but is another value.
        ({"folding": 1}, "folding=1: constants are always computed"),
    ],
)
def test_an_argument_without_a_counterpart_or_given_twice_is_an_error(given: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        translate_arguments(given, NAMES, ARGUMENTS)
    assert str(caught.value) == message
