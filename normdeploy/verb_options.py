"""The options of the verbs, each stated once: a field of a frozen dataclass, with its flag and its help.

The command line makes its options of these fields (`normdeploy.cli.options`), a verb in Python its keywords
(`normdeploy.verbs.arguments.argument_validation.take_fields_as_arguments`), and the schema of ``fleet.toml`` its keys.
Nothing heavy is imported here.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

from .dtypes import half_precision_of
from .errors import InputError
from .option_values import Calibrator, Fuse, Quantize, Runtime
from .types import PathLike

if TYPE_CHECKING:
    from .compare.policy import Thresholds

Calibration = Sequence[PathLike | Mapping[str, Any]]
T = TypeVar("T")


class LoadKeywords(TypedDict, total=False):
    """How to load a model: fields of `LoadingOptions` by name. ``normdeploy.loading.load`` says what each means,
    ``from_module`` which of them a live module takes."""

    model: str | None
    model_args: Mapping[str, Any] | None
    key: str | None
    trust: bool
    imports: Sequence[str]
    inputs: Sequence[str]
    dims: Sequence[str]
    eval: bool
    task: str | None
    part: str | None
    dynamic_shapes: Any
    code: Mapping[str, str] | None


@dataclass(frozen=True, kw_only=True)
class Option:
    """How the command line spells a field.

    Args:
        type: the type of its value there; None: the field's.
        parse: makes the value of a text.
        read: makes the field's value of the values given.
        negated: a flag that sets the field to False.
    """

    flag: str
    help: str
    short: str = ""
    metavar: str | None = None
    type: Any = None
    minimum: float | None = None
    parse: Callable[[str], Any] | None = None
    read: Callable[[Any], Any] | None = None
    negated: bool = False
    show_default: bool = True

    @property
    def toml_key(self) -> str:
        """Its name in a ``fleet.toml``."""
        return self.flag.removeprefix("--").replace("-", "_")

    def value_of(self, given: Any, default: Any) -> Any:
        """Return the field's value for the one that the command line gives, None or [] where it gives none.

        Raises:
            InputError: texts can't be read.
        """
        if given is None or given == []:
            return default
        if self.negated:
            return not given
        if self.read is None:
            return given
        return self.read(given)


def option_field(default: Any, flag: str, help: str, **spelling: Any) -> Any:
    """Return a dataclass field with a default that the command line takes as ``flag``; for ``spelling`` see
    ``Option``."""
    return field(default=default, metadata={"option": Option(flag=flag, help=help, **spelling)})


def repeat_option_field(options: type, name: str) -> Any:
    """Return a field with the default and the spelling of the field ``name`` of other options."""
    original = next(f for f in fields(options) if f.name == name)
    return field(default=original.default, metadata=original.metadata)


def iter_options(options: type) -> Iterator[tuple[str, Option, Any]]:
    """Return (field, option, default) of each field that is an option, in the order of help."""
    for each in fields(options):
        if "option" in each.metadata:
            yield each.name, each.metadata["option"], each.default


def find_option(options: type, name: str) -> Option:
    """Return how the command line spells a field."""
    return next(spelled for field_name, spelled, _ in iter_options(options) if field_name == name)


def command_line_type(options: type, name: str) -> Any:
    """Return the type of a field's value on the command line."""
    spelling = find_option(options, name)
    if spelling.type is not None:
        return spelling.type
    owner = next(cls for cls in options.__mro__ if name in vars(cls).get("__annotations__", {}))
    return eval(owner.__annotations__[name], vars(sys.modules[owner.__module__]))


def as_keywords(options: Any, *groups: type) -> dict[str, Any]:
    """Return the options of a record as keyword arguments: those of ``groups``, or all."""
    return {name: getattr(options, name) for group in groups or (type(options),) for name, _, _ in iter_options(group)}


def options_from_table(options: type[T], table: Mapping[str, Any]) -> T:
    """Return the options that a table of a ``fleet.toml`` gives: flag, with _ for -, -> value, or a list of them.

    Keys that are no flags of ``options`` are ignored.

    Raises:
        InputError: a text can't be read.
    """
    values: dict[str, Any] = {}
    for name, spelled, default in iter_options(options):
        given = table.get(spelled.toml_key)
        if given is not None and spelled.parse is not None:
            given = spelled.parse(given)
        if given is not None and isinstance(default, tuple) and not isinstance(given, list):
            given = [given]
        values[name] = spelled.value_of(given, default)
    return cast("Any", options)(**values)


def parse_factory_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Read arguments of a factory: ``["layers=12"]`` -> {"layers": 12}; what is no Python literal stays text.

    Raises:
        InputError: a text is not NAME=VALUE.
    """
    return dict(map(parse_factory_argument, texts))


def parse_factory_argument(text: str) -> tuple[str, Any]:
    """Read ``layers=12`` as ("layers", 12).

    Raises:
        InputError: the text is not NAME=VALUE.
    """
    name, separator, value = text.partition("=")
    if not name.isidentifier() or not separator:
        raise InputError(f"{text!r} is not NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


@dataclass(frozen=True, kw_only=True)
class LoadingOptions:
    """How a model is loaded (``normdeploy.loading.load``; a live module: ``from_module``)."""

    model: str | None = option_field(
        None,
        "--model",
        "Makes the model that a file of weights is put into, such as mypackage.nets:Encoder.",
        metavar="MODULE:FACTORY",
    )
    model_args: Mapping[str, Any] | None = option_field(
        None,
        "--model-arg",
        "An argument of the factory, as a Python literal or text. Repeatable.",
        metavar="NAME=VALUE",
        type=list[str] | None,
        read=parse_factory_arguments,
    )
    key: str | None = option_field(None, "--key", "Which entry of a checkpoint holds the weights.")
    trust: bool = option_field(False, "--trust", "Run code that the file brings along (a pickled module, for example).")
    imports: Sequence[str] = option_field(
        (),
        "--import",
        "Import first, to register operators or output classes. Repeatable.",
        metavar="MODULE",
        type=list[str] | None,
    )
    inputs: Sequence[str] = option_field(
        (),
        "--input",
        r'An input, such as "ids:int64\[n,s]{0:999}": dtype, shape, values. Repeatable.',
        metavar="SPEC",
        type=list[str] | None,
    )
    dims: Sequence[str] = option_field(
        (), "--dim", "The range of a dynamic dim. Repeatable.", metavar="NAME=MIN:OPT:MAX", type=list[str] | None
    )
    eval: bool = option_field(False, "--eval", "Put the model in eval mode where it is not.")
    task: str | None = option_field(
        None, "--task", "Of a Hugging Face folder: what it is for, such as feature-extraction or text-generation."
    )
    part: str | None = option_field(
        None, "--part", "Of a Hugging Face encoder-decoder: encoder, decoder or decoder-with-past; else the whole."
    )
    dynamic_shapes: Any = None
    code: Mapping[str, str] | None = None

    @property
    def load_keywords(self) -> LoadKeywords:
        """Those that say something, by name."""
        stated = {each.name: getattr(self, each.name) for each in fields(LoadingOptions)}
        return cast(LoadKeywords, {name: value for name, value in stated.items() if value != _DEFAULTS[name]})


_DEFAULTS = {each.name: each.default for each in fields(LoadingOptions)}


@dataclass(frozen=True, kw_only=True)
class RunnersOption:
    """The runtimes that ONNX files are run in besides onnxruntime."""

    runners: Sequence[str] = option_field(
        (),
        "--runner",
        "Also run ONNX files in an installed package's runtime. Repeatable.",
        metavar="NAME",
        type=list[str] | None,
    )


@dataclass(frozen=True, kw_only=True)
class ConversionOptions:
    """What the file that ``export`` or ``optimize`` writes shall be like."""

    # The target.
    runtime: str = option_field(
        "any",
        "--runtime",
        "Choose between equal standard forms for this runtime: any, onnxruntime, onnxruntime-accurate, tensorrt or"
        " tensorrt-rtx.",
        metavar="RUNTIME",
        type=Runtime,
    )
    provider: str = option_field(
        "cpu", "--provider", "cpu or cuda: for --runtime onnxruntime, where the file will run."
    )
    fuse: str = option_field(
        "standard",
        "--fuse",
        "portable: our own ops, with bodies that run anywhere, for norms that no standard op says.",
        type=Fuse,
    )

    # What a rewrite must prove.
    strict: bool = option_field(
        False, "--strict", "A rewrite that fails its certificate is an error; without it, the rewrite is undone."
    )
    strict_proof: bool = option_field(
        False,
        "--strict-proof",
        "A rewrite whose certificate is not exact is an error, or that makes NaN of a number at Inf.",
    )

    # Half precision.
    precision: str | None = option_field(
        None,
        "--precision",
        "Compute in half precision (float16 and bfloat16 are understood too), but for what it can't hold; float32"
        " without it.",
        metavar="fp16|bf16",
        parse=half_precision_of,
    )
    calibrate: Calibration = option_field(
        (),
        "--calibrate",
        "Inputs, by name, to see what half precision can't hold; with --quantize samples. Repeatable.",
        metavar="IN.npz",
        type=list[Path] | None,
    )
    keep_io: bool = option_field(False, "--keep-io", "With --precision: inputs and outputs stay float32.")

    # Quantization.
    quantize: str | None = option_field(
        None,
        "--quantize",
        "Let linear layers and convolutions compute in int8 or FP8, or hold their weights in INT4 (QDQ).",
        type=Quantize | None,
    )
    calibration: str | None = option_field(
        None,
        "--calibration",
        "With --quantize: how ranges are taken of the samples, minmax (without it), entropy or percentile.",
        metavar="METHOD",
        type=Calibrator | None,
    )
    metric: Thresholds | None = option_field(
        None,
        "--metric",
        "With --quantize: what the file has to reach on samples that do not calibrate, such as cosine:0.995; layers"
        " stay float until it does. Repeatable.",
        metavar=r"'\[OUT=]NAME>=X'",
        type=list[str] | None,
    )
    dynamic: bool = option_field(
        False,
        "--dynamic",
        "With --quantize int8: take ranges while the model runs, in onnxruntime; without samples.",
    )
    rotate: bool = option_field(
        False,
        "--rotate",
        "With --quantize: rotate the residual stream and the values of attentions by Hadamard matrices first, where"
        " that is proved to change nothing.",
    )
    keep_float: Sequence[str] = option_field(
        (),
        "--keep-float",
        "With --quantize: a layer that stays float, by its module or its result; * stands for any letters. Repeatable.",
        metavar="LAYER",
        type=list[str] | None,
    )

    # Limits.
    compare_limit: int = option_field(
        2**30,
        "--compare-limit",
        "Compare the whole model before and after up to these bytes of weights.",
        metavar="BYTES",
        minimum=0,
    )
