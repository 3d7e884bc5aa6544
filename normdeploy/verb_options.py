"""Define each option of the verbs once, as a field of a frozen dataclass with its flag and its help.

Three places read these fields. The command line makes its options from the fields (`normdeploy.cli.options`). Each
verb's Python function takes its keywords from the fields
(`normdeploy.verbs.arguments.argument_validation.take_fields_as_arguments`). The schema of ``fleet.toml`` takes its keys
from the fields. This module must not import heavy libraries, because the command line's help imports it.
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
    """Keyword arguments that load a model: fields of `LoadingOptions` by name.

    ``normdeploy.loading.load`` documents each field, and ``from_module`` lists the fields that a live module takes.
    """

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
    """Command-line spelling of a field.

    Attributes:
        metavar: placeholder of the value in the help; None derives it from the type.
        type: type of the value on the command line; None for the field's own type.
        minimum: smallest accepted number; None if there is no minimum.
        parse: function that converts one text to a value.
        read: function that converts all given values to the field's value.
        negated: True for a flag that sets the field to False.
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
        """Return the option's key in a ``fleet.toml``: the flag without "--", and with "_" instead of "-"."""
        return self.flag.removeprefix("--").replace("-", "_")

    def value_of(self, given: Any, default: Any) -> Any:
        """Convert a value from the command line to the field's value.

        Args:
            given: value from the command line; None or [] if the option was not given.

        Returns:
            the converted value, or ``default`` if the option was not given.

        Raises:
            InputError: a text can't be read.
        """
        if given is None or given == []:
            return default
        if self.negated:
            return not given
        if self.read is None:
            return given
        return self.read(given)


def option_field(default: Any, flag: str, help: str, **spelling: Any) -> Any:
    """Declare a dataclass field that the command line sets with ``flag``.

    Args:
        spelling: values of the other fields of ``Option``.

    Returns:
        a dataclass field with this default and the `Option` in its metadata.
    """
    return field(default=default, metadata={"option": Option(flag=flag, help=help, **spelling)})


def repeat_option_field(options: type, name: str) -> Any:
    """Declare a field again, with the default and the command-line spelling of the first declaration.

    Args:
        options: dataclass with the first declaration.
        name: name of the field in ``options``.

    Returns:
        a dataclass field.
    """
    original = next(f for f in fields(options) if f.name == name)
    return field(default=original.default, metadata=original.metadata)


def iter_options(options: type) -> Iterator[tuple[str, Option, Any]]:
    """List the fields that are options, in the order of the help.

    Yields:
        (field name, option, default).
    """
    for each in fields(options):
        if "option" in each.metadata:
            yield each.name, each.metadata["option"], each.default


def find_option(options: type, name: str) -> Option:
    """Find the command-line spelling of a field.

    Returns:
        the `Option` of the field ``name``.
    """
    return next(spelled for field_name, spelled, _ in iter_options(options) if field_name == name)


def command_line_type(options: type, name: str) -> Any:
    """Find the type of a field's value on the command line.

    Returns:
        the option's own type if it has one, otherwise the evaluated annotation of the field.
    """
    spelling = find_option(options, name)
    if spelling.type is not None:
        return spelling.type
    owner = next(cls for cls in options.__mro__ if name in vars(cls).get("__annotations__", {}))
    return eval(owner.__annotations__[name], vars(sys.modules[owner.__module__]))


def as_keywords(options: Any, *groups: type) -> dict[str, Any]:
    """Convert a record of options to keyword arguments.

    Args:
        groups: option classes that select the fields; without any, all fields of ``options`` are taken.

    Returns:
        field name -> value.
    """
    return {name: getattr(options, name) for group in groups or (type(options),) for name, _, _ in iter_options(group)}


def options_from_table(options: type[T], table: Mapping[str, Any]) -> T:
    """Read options from one table of a ``fleet.toml``.

    Args:
        table: key -> a value or a list of values. A key is a flag without "--", with _ instead of -. Keys that are not
            flags of ``options`` are ignored.

    Returns:
        an instance of ``options``, with defaults for missing keys.

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
    """Read arguments of a factory: ``["layers=12"]`` gives {"layers": 12}.

    Returns:
        name -> value; a value that is not a Python literal stays text.

    Raises:
        InputError: a text is not NAME=VALUE.
    """
    return dict(map(parse_factory_argument, texts))


def parse_factory_argument(text: str) -> tuple[str, Any]:
    """Read one argument of a factory: ``layers=12`` gives ("layers", 12).

    Returns:
        (name, value); a value that is not a Python literal stays text.

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
    """Options that load a model (``normdeploy.loading.load``; for a live module, ``from_module``)."""

    model: str | None = option_field(
        None,
        "--model",
        "Class or function that builds the model, such as mypackage.nets:Net, or name of a package's model, such"
        " as timm:resnet50. Needed for a file that holds only weights.",
        metavar="MODULE:FACTORY",
    )
    model_args: Mapping[str, Any] | None = option_field(
        None,
        "--model-arg",
        "Argument for the class or function that --model names. The value is a Python literal or text. Repeatable.",
        metavar="NAME=VALUE",
        type=list[str] | None,
        read=parse_factory_arguments,
    )
    key: str | None = option_field(None, "--key", "Name of the checkpoint entry that holds the weights.")
    trust: bool = option_field(
        False, "--trust-remote-code", "Run code that the model file contains, such as a pickled module."
    )
    imports: Sequence[str] = option_field(
        (),
        "--import",
        "Python module to import before the model is loaded, because it registers operators or output classes."
        " Repeatable.",
        metavar="MODULE",
        type=list[str] | None,
    )
    inputs: Sequence[str] = option_field(
        (),
        "--input",
        r'Name, dtype, shape and value range of an input. For example, "ids:int64\[n,s]{0:99}" is the input ids of'
        " shape n × s with values from 0 to 98. {1,16,16} lists all values of a constant input. Repeatable.",
        metavar="SPEC",
        type=list[str] | None,
    )
    dims: Sequence[str] = option_field(
        (),
        "--dim",
        "Smallest, usual and largest size of a dynamic dim. If all sizes are multiples of a step, add :STEP."
        " Repeatable.",
        metavar="NAME=MIN:OPT:MAX",
        type=list[str] | None,
    )
    eval: bool = option_field(False, "--eval", "Put the model in eval mode after loading it.")
    task: str | None = option_field(
        None, "--task", "Task of a Hugging Face folder, such as feature-extraction or text-generation."
    )
    part: str | None = option_field(
        None,
        "--part",
        "Part of a Hugging Face encoder-decoder: encoder, decoder or decoder-with-past. Default: the whole model. For a"
        " diffusers pipeline: a part such as unet. For other models: names of modules, such as backbone..head.",
    )
    dynamic_shapes: Any = None
    code: Mapping[str, str] | None = None

    @property
    def load_keywords(self) -> LoadKeywords:
        """Return the loading options that differ from their defaults, by name."""
        stated = {each.name: getattr(self, each.name) for each in fields(LoadingOptions)}
        return cast(LoadKeywords, {name: value for name, value in stated.items() if value != _DEFAULTS[name]})


_DEFAULTS = {each.name: each.default for each in fields(LoadingOptions)}


@dataclass(frozen=True, kw_only=True)
class RunnersOption:
    """Option that adds runtimes, besides onnxruntime, to run ONNX files in."""

    runners: Sequence[str] = option_field(
        (),
        "--runner",
        "Also run ONNX files in this runtime: openvino, openvino-bf16, openvino-fp16, onnxruntime-web, or the runtime"
        " of an installed package. Repeatable.",
        metavar="NAME",
        type=list[str] | None,
    )


@dataclass(frozen=True, kw_only=True)
class ImageInputOptions:
    """Options for the images that a file takes (`normdeploy.image_input`)."""

    normalize: str | Sequence[str] = option_field(
        (),
        "--normalize",
        "Normalize the image inside the file: mean and standard deviation of each channel, such as"
        " .5,.4,.4/.2,.2,.2 (torchvision's Normalize, for pixels from 0 to 1). For the mean and"
        " deviation of pixels from 0 to 255, append /255. Or the image config of a transformers model, the"
        " config.json of a timm model, or a folder with one of them. Repeatable, with the input's name.",
        metavar="[IN=]MEAN/STD",
        type=list[str] | None,
    )
    input_layout: str | Sequence[str] = option_field(
        (),
        "--input-layout",
        "Layout of the image that the file takes: nhwc. Repeatable, with the input's name.",
        metavar="[IN=]LAYOUT",
        type=list[str] | None,
    )
    input_type: str | Sequence[str] = option_field(
        (),
        "--input-type",
        "Type of the pixels that the file takes: uint8, from 0 to 255. The file divides them by 255. Repeatable, with"
        " the input's name.",
        metavar="[IN=]TYPE",
        type=list[str] | None,
    )


@dataclass(frozen=True, kw_only=True)
class CertificateOption:
    """Option that writes a certificate file beside the model."""

    certificate: PathLike | None = option_field(
        None,
        "--certificate",
        "Write a JSON file with the nodes before each rewrite, so that another program can check the rewrites without"
        " normdeploy.",
        metavar="C.json",
        type=Path | None,
    )


@dataclass(frozen=True, kw_only=True)
class ConversionOptions:
    """Options for the file that ``export`` or ``optimize`` writes."""

    # Target.
    runtime: str = option_field(
        "any",
        "--runtime",
        "Runtime that will run the written file: any, onnxruntime, onnxruntime-accurate, openvino, tensorrt or"
        " tensorrt-rtx. If a norm has several equivalent forms, the form that is best for this runtime is written.",
        metavar="RUNTIME",
        type=Runtime,
    )
    target: str | None = option_field(
        None,
        "--for",
        "Runtime that can't run here, such as coreml-mlprogram, qnn, directml, webgpu, nnapi, tensorrt-10.9, jetpack-6"
        " or triton-26.07. It chooses --runtime and the newest opset, and no norm op is written that the runtime's"
        " published op list lacks.",
        metavar="NAME",
    )
    provider: str = option_field(
        "cpu", "--provider", "With --runtime onnxruntime: device that will run the written file, cpu or cuda."
    )
    fuse: str = option_field(
        "standard",
        "--fuse",
        "portable: use normdeploy's own ops for norms that have no standard op, and for group norms. Runtimes that"
        " read functions run the bodies of these ops. standard: write only ONNX's standard ops.",
        type=Fuse,
    )

    # Required proofs.
    strict: bool = option_field(
        False,
        "--strict",
        "Fail if a rewrite fails its proof. Without --strict, the rewrite is undone, and the norm is listed as"
        " skipped.",
    )
    strict_proof: bool = option_field(
        False,
        "--strict-proof",
        "Fail if a proof is not exact, or if a rewrite turns a number into NaN at an infinite input.",
    )

    # Half precision.
    precision: str | None = option_field(
        None,
        "--precision",
        "Compute in half precision. Nodes whose values exceed the range of this type stay float32. The names float16"
        " and bfloat16 are accepted too. Default: float32.",
        metavar="fp16|bf16",
        parse=half_precision_of,
    )
    calibrate: Calibration = option_field(
        (),
        "--calibrate",
        "File of input arrays by name. With --precision, the model runs on these arrays to find values that half"
        " precision can't hold. With --quantize, the arrays are the calibration samples. Repeatable.",
        metavar="IN.npz",
        type=list[Path] | None,
    )
    preprocess: PathLike | Callable[[Path], Any] | None = option_field(
        None,
        "--preprocess",
        "With --calibrate: the calibration folder holds pictures, which are prepared as this file says: the"
        " image processor's config of a transformers model, or the config of a timm model. Or MODULE:FUNCTION, a"
        " function from the path of a file to an array.",
        metavar="CONFIG",
        type=Path | None,
    )
    keep_io: bool = option_field(
        False, "--keep-io", "With --precision: keep the model's inputs and outputs in float32."
    )

    # Quantization.
    quantize: str | None = option_field(
        None,
        "--quantize",
        "int8 or fp8: compute linear layers and convolutions in this type. int4: store their weights in INT4. The file"
        " contains QuantizeLinear and DequantizeLinear nodes.",
        type=Quantize | None,
    )
    calibration: str | None = option_field(
        None,
        "--calibration",
        "With --quantize: how value ranges are computed from the samples: minmax (default), entropy or percentile.",
        metavar="METHOD",
        type=Calibrator | None,
    )
    metric: Thresholds | None = option_field(
        None,
        "--metric",
        "With --quantize or --precision: metric that the file must reach, such as 'cosine>=0.995' (or cosine:0.995)."
        " The metric is computed on samples that are not used for calibration. Layers go back to float until the file"
        " reaches the metric. Repeatable.",
        metavar="'[OUT=]NAME>=X'",
        type=list[str] | None,
    )
    dynamic: bool = option_field(
        False,
        "--dynamic",
        "With --quantize int8: no samples are needed, because onnxruntime computes the activation ranges at run time.",
    )
    rotate: bool = option_field(
        False,
        "--rotate",
        "With --quantize: first rotate the residual stream and the attention values by Hadamard matrices. A rotation is"
        " made only if it is proved equivalent.",
    )
    keep_float: Sequence[str] = option_field(
        (),
        "--keep-float",
        "With --quantize: layer that is not quantized. With --precision alone: module that stays float32. Give the name"
        " of the module or of its output tensor; * matches any characters. Repeatable.",
        metavar="LAYER",
        type=list[str] | None,
    )

    # Files.
    external_data_name: str | None = option_field(
        None,
        "--external-data-name",
        "Write the weights to a file of this name in the output's folder, such as model.onnx.data (as torch) or"
        " model.onnx_data (as optimum). Default: the ONNX file contains them; above 2 GB, they go to a file whose name"
        " contains a hash.",
        metavar="NAME",
    )

    # Limits.
    compare_limit: int = option_field(
        2**30,
        "--compare-limit",
        "Skip the comparison of the outputs before and after the rewrites if the model's weights take more than this"
        " number of bytes.",
        metavar="BYTES",
        minimum=0,
    )
