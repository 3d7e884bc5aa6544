"""Translate words that users bring from other tools, and former words of normdeploy.

A word is translated only if it means the same here. Otherwise, its error names normdeploy's word. The tables of a verb
are next to its options, such as `normdeploy.verbs.build.trtexec_words`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import InputError

# ------------------------------------------------------------------ arguments of Python functions


@dataclass(frozen=True, kw_only=True)
class ArgumentWord:
    """Argument of a Python function that has another name here.

    Attributes:
        means: name of the argument here; "" if no argument means the same.
        applies: True for values that the word takes over; None for all values. Other values stay under their name.
        harmless: values that ask for what happens anyway. They are dropped.
        refusal: end of the error if ``means`` is "".
        former: True for a former name of normdeploy, which gives a DeprecationWarning.
    """

    name: str
    means: str = ""
    applies: Callable[[Any], bool] | None = None
    harmless: Sequence[Any] = ()
    refusal: str = ""
    former: bool = False


def _is_live_model(value: Any) -> bool:
    return value is not None and not isinstance(value, str)


# Words of torch.onnx.export, of optimum and of transformers, and former names, for all verbs. A word is used only by
# functions that have the argument it means.
COMMON_ARGUMENTS = (
    ArgumentWord(name="stated_inputs", means="inputs"),
    ArgumentWord(name="model", means="source", applies=_is_live_model),
    ArgumentWord(name="f", means="output"),
    ArgumentWord(name="opset_version", means="opset"),
    ArgumentWord(name="trust_remote_code", means="trust"),
    ArgumentWord(name="dtype", means="precision"),
)


def translate_arguments(
    given: Mapping[str, Any], parameters: Collection[str], words: Sequence[ArgumentWord]
) -> dict[str, Any]:
    """Give arguments the names that a function takes.

    Args:
        given: name -> value of the keyword arguments.
        parameters: names that the function takes.

    Returns:
        name -> value; names that no word explains are unchanged.

    Raises:
        InputError: an argument and another name of it are both given, or a word has no argument of the same meaning.
    """
    translated = dict(given)
    for word in words:
        if word.name not in translated:
            continue
        value = translated[word.name]
        if word.name in parameters and word.applies is None:
            continue
        if word.applies is not None and not word.applies(value):
            continue
        if any(value is each for each in word.harmless):
            del translated[word.name]
            continue
        if not word.means:
            raise InputError(f"{word.name}={value!r}: {word.refusal}")
        if word.means not in parameters:
            continue
        if word.means in translated:
            raise InputError(f"{word.name} and {word.means} are the same argument; pass only {word.means}")
        if word.former:
            warnings.warn(f"{word.name} is now {word.means}", DeprecationWarning, stacklevel=3)
        translated[word.means] = translated.pop(word.name)
    return translated


# ------------------------------------------------------------------ words of the command line


@dataclass(frozen=True, kw_only=True)
class CommandWord:
    """Option of another command line, or a former option of normdeploy.

    Attributes:
        flags: spellings of the option.
        means: words that replace the option, such as ("--precision", "fp16"). The option's value follows them. () makes
            the value an argument without a flag. None refuses the option.
        takes_value: True if a value follows the option.
        convert: function of the value; it raises InputError for values that have no counterpart here.
        misread: function of the word after an option without a value. It returns an error if that word shows that the
            user means another option, else "".
        refusal: end of the error if ``means`` is None, or if an option without a value gets one.
        note: sentence for standard error.
    """

    flags: tuple[str, ...]
    means: tuple[str, ...] | None = None
    takes_value: bool = False
    convert: Callable[[str], str] | None = None
    misread: Callable[[str], str] | None = None
    refusal: str = ""
    note: str = ""


@dataclass(frozen=True)
class OwnOptions:
    """Options of a verb.

    Attributes:
        names: spelling of an option -> name of the option.
        valued: names of the options that take a value.
        repeatable: names of the options that may be given several times.
    """

    names: Mapping[str, str]
    valued: Collection[str] = frozenset()
    repeatable: Collection[str] = frozenset()


@dataclass
class TranslatedLine:
    """Words of a command line in normdeploy's words.

    Attributes:
        args: words for the verb.
        notes: sentences about former words.
    """

    args: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def translate_command_line(args: Sequence[str], words: Sequence[CommandWord], own: OwnOptions) -> TranslatedLine:
    """Replace the words of other tools in a command line.

    Returns:
        the words that the verb takes, and notes.

    Raises:
        InputError: a word has no counterpart, or an option is given under two names.
    """
    by_flag = {flag: word for word in words for flag in word.flags}
    line = TranslatedLine()
    # Option -> spellings on the command line. The name "" is the argument without a flag.
    spellings: dict[str, list[str]] = {}
    translated = dict[str, str]()
    left = list(args)
    while left:
        arg = left.pop(0)
        if arg == "--":
            line.args += [arg, *left]
            break
        flag = arg.partition("=")[0]
        word = by_flag.get(flag)
        if word is None:
            _copy_own_word(arg, left, own, line, spellings)
            continue
        line.args += _translate_word(word, arg, left)
        if word.note:
            line.notes.append(word.note)
        assert word.means is not None
        ours = word.means[0] if word.means else ""
        name = own.names.get(ours, ours)
        spellings.setdefault(name, []).append(flag)
        translated[name] = ours
    for name, flag in translated.items():
        if len(spellings[name]) > 1 and name not in own.repeatable:
            first, second = spellings[name][:2]
            if not name:
                raise InputError(f"{first} and {second} are two files, but this verb takes one; pass one of them")
            raise InputError(f"{first} and {second} are the same option; pass only {flag}")
    return line


def _translate_word(word: CommandWord, arg: str, left: list[str]) -> list[str]:
    """Replace one word, and take its value from ``left`` if it has one."""
    flag, equals, value = arg.partition("=")
    if word.means is None:
        raise InputError(f"{flag}: {word.refusal}")
    ours = " ".join(word.means)
    if word.takes_value:
        if not equals and left:
            value = left.pop(0)
        if word.convert is not None:
            value = word.convert(value)
        if not value:
            raise InputError(f"{flag} needs a value; write {f'{ours} VALUE' if ours else 'the value alone'}")
        return [*word.means, value]
    if word.misread is not None:
        reason = word.misread(value if equals else "".join(left[:1]))
        if reason:
            raise InputError(f"{flag} {value or left[0]}: {reason}")
    if equals:
        raise InputError(f"{flag} takes no value, but {value!r} was given; {word.refusal or f'write {ours}'}")
    return [*word.means]


def _copy_own_word(
    arg: str, left: list[str], own: OwnOptions, line: TranslatedLine, spellings: dict[str, list[str]]
) -> None:
    """Copy one option with its value, or one argument."""
    line.args.append(arg)
    flag, equals, _ = arg.partition("=")
    name = own.names.get(flag)
    attached = bool(equals)
    # A short option may be joined with its value, as in -oFILE.
    if name is None and arg.startswith("-") and not arg.startswith("--"):
        name = own.names.get(arg[:2])
        attached = len(arg) > 2
    if name is not None:
        spellings.setdefault(name, []).append(flag)
        if name in own.valued and not attached and left:
            line.args.append(left.pop(0))
    elif not arg.startswith("-"):
        spellings.setdefault("", []).append(repr(arg))
