"""Arguments and options that more than one verb takes."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..choices import Calibrator, Fuse, Quantize, Runtime
from ..dtypes import precision_of
from ..errors import InputError

if TYPE_CHECKING:
    from ..arguments import Loading


ModelFile = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help=(
            "A model file (.pt, .pt2, .safetensors ...), my_model.py:Net, a Hugging Face folder or its name on the Hub."
        ),
    ),
]


def precision(text: str) -> str:
    """A precision in its one spelling; "" for float32, which is no change."""
    try:
        return precision_of(text) or ""
    except InputError as error:
        raise typer.BadParameter(str(error)) from error


OnnxFile = Annotated[Path, typer.Argument(metavar="ONNX", help="An ONNX file.")]
Output = Annotated[
    Path, typer.Option("--output", "-o", help="Where to write the result; replaced only when the new file is whole.")
]
RuntimeOption = Annotated[
    Runtime,
    typer.Option(
        "--runtime",
        metavar="RUNTIME",
        help=(
            "Choose between equal standard forms for this runtime: any, onnxruntime, onnxruntime-accurate, tensorrt or"
            " tensorrt-rtx."
        ),
    ),
]
ProviderOption = Annotated[
    str, typer.Option("--provider", help="cpu or cuda: for --runtime onnxruntime, where the file will run.")
]
FuseOption = Annotated[
    Fuse,
    typer.Option(
        "--fuse", help="portable: our own ops, with bodies that run anywhere, for norms that no standard op says."
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        "--precision",
        parser=precision,
        metavar="fp16|bf16",
        help=(
            "Compute in half precision (float16 and bfloat16 are understood too), but for what it can't hold; float32"
            " without it."
        ),
    ),
]
Calibrate = Annotated[
    list[Path] | None,
    typer.Option(
        "--calibrate",
        metavar="IN.npz",
        help="Inputs, by name, to see what half precision can't hold; with --quantize samples. Repeatable.",
    ),
]
QuantizeOption = Annotated[
    Quantize | None,
    typer.Option(
        "--quantize",
        help="Let linear layers and convolutions compute in int8 or FP8, or hold their weights in INT4 (QDQ).",
    ),
]
CalibrationOption = Annotated[
    Calibrator | None,
    typer.Option(
        "--calibration",
        metavar="METHOD",
        help="With --quantize: how ranges are taken of the samples, minmax (without it), entropy or percentile.",
    ),
]
MetricOption = Annotated[
    list[str] | None,
    typer.Option(
        "--metric",
        metavar=r"'\[OUT=]NAME>=X'",
        help=(
            "With --quantize: what the file has to reach on samples that do not calibrate, such as cosine:0.995; layers"
            " stay float until it does. Repeatable."
        ),
    ),
]
DynamicOption = Annotated[
    bool,
    typer.Option(
        "--dynamic", help="With --quantize int8: take ranges while the model runs, in onnxruntime; without samples."
    ),
]
RotateOption = Annotated[
    bool,
    typer.Option(
        "--rotate",
        help=(
            "With --quantize: rotate the residual stream and the values of attentions by Hadamard matrices first, where"
            " that is proved to change nothing."
        ),
    ),
]
KeepFloat = Annotated[
    list[str] | None,
    typer.Option(
        "--keep-float",
        metavar="LAYER",
        help=(
            "With --quantize: a layer that stays float, by its module or its result; * stands for any letters."
            " Repeatable."
        ),
    ),
]
KeepIO = Annotated[bool, typer.Option("--keep-io", help="With --precision: inputs and outputs stay float32.")]
CompareLimit = Annotated[
    int,
    typer.Option(
        "--compare-limit",
        min=0,
        metavar="BYTES",
        help="Compare the whole model before and after up to these bytes of weights.",
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="A rewrite that fails its certificate is an error; without it, the rewrite is undone."
    ),
]
StrictProof = Annotated[
    bool,
    typer.Option(
        "--strict-proof",
        help="A rewrite whose certificate is not exact is an error, or that makes NaN of a number at Inf.",
    ),
]
ReportFile = Annotated[Path | None, typer.Option("--report", metavar="FILE.json", help="Write the report as JSON too.")]
HtmlFile = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE.html", help="Write the report as a page too: one file that needs no network."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No tables and no progress bars; errors are still printed.")]

Factory = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODULE:FACTORY",
        help="Makes the model that a file of weights is put into, such as mypackage.nets:Encoder.",
    ),
]
FactoryArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--model-arg", metavar="NAME=VALUE", help="An argument of the factory, as a Python literal or text. Repeatable."
    ),
]
Key = Annotated[str | None, typer.Option("--key", help="Which entry of a checkpoint holds the weights.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run code that the file brings along (a pickled module, for example).")
]
SignOption = Annotated[
    Path | None,
    typer.Option("--sign", metavar="KEY.pem", help="Sign with this private key, and say what it was made of."),
]
TrustedKeys = Annotated[
    list[Path] | None,
    typer.Option("--trust", metavar="PUBLIC.pem", help="Believe only what this key has signed. Repeatable."),
]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import", metavar="MODULE", help="Import first, to register operators or output classes. Repeatable."
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="SPEC",
        help=r'An input, such as "ids:int64\[n,s]{0:999}": dtype, shape, values. Repeatable.',
    ),
]
InputValues = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="SPEC",
        help=(
            r'An input: NAME=LOW:HIGH, NAME=VALUE or NAME=FILE.npy; "ids:int64\[n,s]{0:999}" states sizes too.'
            " Repeatable."
        ),
    ),
]
Dims = Annotated[
    list[str] | None, typer.Option("--dim", metavar="NAME=MIN:OPT:MAX", help="The range of a dynamic dim. Repeatable.")
]
Eval = Annotated[bool, typer.Option("--eval", help="Put the model in eval mode where it is not.")]

Runners = Annotated[
    list[str] | None,
    typer.Option("--runner", metavar="NAME", help="Also run ONNX files in an installed package's runtime. Repeatable."),
]

TaskOption = Annotated[
    str | None,
    typer.Option(
        "--task",
        help="Of a Hugging Face folder: what it is for, such as feature-extraction or text-generation.",
    ),
]
PartOption = Annotated[
    str | None,
    typer.Option(
        "--part", help="Of a Hugging Face encoder-decoder: encoder, decoder or decoder-with-past; else the whole."
    ),
]
EveryPart = Annotated[
    str | None,
    typer.Option(
        "--part",
        help=(
            "Of a Hugging Face encoder-decoder: encoder, decoder or decoder-with-past, or all, a folder of these; else"
            " the whole."
        ),
    ),
]


@dataclass(frozen=True)
class LoadingOptions:
    """How a model is loaded: one group of options, which `verbose.logged` spells out for each verb that takes it."""

    model: Factory = None
    model_arg: FactoryArgs = None
    key: Key = None
    trust: Trust = False
    import_: Imports = None
    input_: Inputs = None
    dim: Dims = None
    eval_mode: Eval = False
    task: TaskOption = None
    part: PartOption = None

    def keywords(self) -> Loading:
        """As the Python functions take them."""
        return {
            "model": self.model,
            "model_args": dict(map(factory_arg, self.model_arg or ())),
            "key": self.key,
            "trust": self.trust,
            "imports": self.import_ or (),
            "inputs": self.input_ or (),
            "dims": self.dim or (),
            "eval": self.eval_mode,
            "task": self.task,
            "part": self.part,
        }


@dataclass(frozen=True)
class ExportOptions(LoadingOptions):
    """As `LoadingOptions`, where all parts may be asked for at once."""

    part: EveryPart = None


LOADING = LoadingOptions()
EXPORTING = ExportOptions()


def factory_arg(text: str) -> tuple[str, Any]:
    """``layers=12`` -> ("layers", 12); what is no Python literal stays text."""
    name, separator, value = text.partition("=")
    if not name.isidentifier() or not separator:
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--model-arg")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
