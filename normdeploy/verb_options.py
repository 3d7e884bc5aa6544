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
from .option_values import Calibrator, EngineRuntime, Fuse, NormImpl, Quantize, Runtime, RuntimeCache
from .types import PathLike, ProfileRanges

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


def _keeps_runtime_cache(mode: str) -> bool:
    return mode == "keep"


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
class EveryPartOptions(LoadingOptions):
    """As `LoadingOptions`, where all parts may be asked for at once."""

    part: str | None = option_field(
        None,
        "--part",
        "Of a Hugging Face encoder-decoder: encoder, decoder or decoder-with-past, or all, a folder of these; else the"
        " whole.",
    )


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


@dataclass(frozen=True, kw_only=True)
class OpsetOptions:
    """The version of ONNX of a file that is exported."""

    opset: int | None = option_field(None, "--opset", "18 to 25; without it 21, raised only where a norm needs it.")


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ConversionOptions, OpsetOptions):
    """What the file that ``export`` writes shall be like."""

    check: bool = option_field(
        True, "--no-check", "Write the file without a run beside PyTorch at two small sizes.", negated=True
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a file is run once."""

    stated_inputs: Sequence[str] = option_field(
        (),
        "--input",
        r'An input: NAME=LOW:HIGH, NAME=VALUE or NAME=FILE.npy; "ids:int64\[n,s]{0:999}" states sizes too.'
        " Repeatable.",
        metavar="SPEC",
        type=list[str] | None,
    )
    provider: str | None = option_field(None, "--provider", "cpu or cuda, for an ONNX file; an engine runs on a GPU.")
    device: int = option_field(0, "--device", "Which GPU.", minimum=0)
    profile_index: int | None = option_field(
        None,
        "--profile-index",
        "Which profile of an engine, from 0 on; without it the first that holds the shapes.",
        minimum=0,
    )
    seed: int = option_field(0, "--seed", "Of the generated inputs.", minimum=0)
    runner: str | None = option_field(
        None, "--runner", "A runtime that an installed package brings; not onnxruntime.", metavar="NAME"
    )
    runtime_cache: Any = option_field(
        None,
        "--runtime-cache",
        "keep: what TensorRT-RTX compiles for this GPU goes beside FILE; off: nothing is read there; without it that"
        " is read.",
        metavar="MODE",
        type=RuntimeCache | None,
        read=_keeps_runtime_cache,
    )
    weight_budget: int | None = option_field(
        None,
        "--weight-budget",
        "How much of an engine's streamed weights stays on the GPU.",
        metavar="BYTES",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class OptimizeOptions(ConversionOptions):
    """What the file that ``optimize`` writes shall be like."""

    simplify: bool = option_field(True, "--no-simplify", "Leave all but the norms as it is.", negated=True)
    inputs: Sequence[str] = repeat_option_field(RunOptions, "stated_inputs")
    dims: Sequence[str] = repeat_option_field(LoadingOptions, "dims")


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """What ``inspect`` is asked."""

    runtime: str = repeat_option_field(ConversionOptions, "runtime")
    fuse: str = repeat_option_field(ConversionOptions, "fuse")
    explain: str | None = option_field(
        None, "--explain", "Say why this tensor, node or module path was fused or not.", metavar="NAME"
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine is built."""

    # What it is for.
    runtime: str = option_field(
        "tensorrt-rtx",
        "--runtime",
        "The library that builds and will run the engine: tensorrt-rtx or tensorrt.",
        metavar="RUNTIME",
        type=EngineRuntime,
    )
    compute_capabilities: Sequence[str] = option_field(
        (),
        "--compute-capability",
        "The GPUs to build for (TensorRT-RTX), such as 8.6 8.9 12.0; all where not given.",
        metavar="X.Y ...",
        type=list[str] | None,
    )
    profiles: ProfileRanges = option_field(
        (),
        "--profile",
        "Sizes of a dynamic dim (batch=1:8:64) or input (ids=1x8:4x64:64x512). Repeatable.",
        metavar="NAME=MIN:OPT:MAX",
        type=list[str] | None,
    )
    norm_impl: str = option_field(
        "native",
        "--norm-impl",
        "native; plugin: norms in our kernels, held by the engine (tensorrt only); auto: where that helps.",
        metavar="FORM",
        type=NormImpl,
    )
    more_profiles: Sequence[ProfileRanges] = option_field(
        (),
        "--add-profile",
        "A further optimization profile, as --profile; several ranges joined by commas. Repeatable.",
        metavar="RANGE[,RANGE]",
        type=list[str] | None,
    )

    # The build.
    timing_cache: PathLike | None = option_field(
        None,
        "--timing-cache",
        "What earlier builds have timed: read, added to, shared by builds side by side (tensorrt only).",
        metavar="FILE",
        type=Path | None,
    )
    workspace: int | str | None = option_field(
        None,
        "--workspace",
        "The most memory that a layer may use: bytes, 512M, 2G.",
        metavar="SIZE",
        type=str | None,
    )
    optimization_level: int | None = option_field(
        None, "--optimization-level", "How long the builder looks for faster kernels, 0 to 5.", metavar="N"
    )

    # What the engine can do.
    hardware_compatibility: str | None = option_field(
        None,
        "--hardware-compat",
        "Other GPUs that the engine is to run on: ampere-plus or same-compute-capability (tensorrt only).",
        metavar="LEVEL",
    )
    version_compatible: bool = option_field(
        False, "--version-compatible", "Let newer versions of the library load the engine (tensorrt only)."
    )
    refit: bool = option_field(False, "--refit", "Let the engine's weights be replaced; needs a GPU to build.")
    weight_streaming: bool = option_field(
        False, "--weight-streaming", "Let weights stay in host memory while the engine runs."
    )
    ep_context: str | None = option_field(
        None,
        "--ep-context",
        "Write an ONNX file for onnxruntime's TensorRT-RTX provider: embed holds the engine, file has it beside.",
        metavar="MODE",
    )
