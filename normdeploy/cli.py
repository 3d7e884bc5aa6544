"""The command line: one verb for each stage. A verb parses, calls ``normdeploy.deploy`` and prints; nothing heavy is imported before."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from . import __version__
from .errors import NormdeployError, printable

if TYPE_CHECKING:
    from rich.console import Console

    from .deploy import Loading, Progress
    from .report import Report

app = typer.Typer(
    help="PyTorch models in onnxruntime and TensorRT, every normalization fused or folded, and proved.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Runtime(StrEnum):
    """Which of equal standard forms to write."""

    any = "any"
    onnxruntime = "onnxruntime"
    tensorrt = "tensorrt"
    tensorrt_rtx = "tensorrt-rtx"


class Fuse(StrEnum):
    """Which ops may be written."""

    standard = "standard"
    portable = "portable"


ModelFile = Annotated[Path, typer.Argument(metavar="MODEL", help="A model file (.pt, .pt2, .safetensors ...) or a Hugging Face folder.")]


class EngineRuntime(StrEnum):
    """What an engine is built with."""

    tensorrt_rtx = "tensorrt-rtx"
    tensorrt = "tensorrt"


class Precision(StrEnum):
    """What a file computes in."""

    fp16 = "fp16"
    bf16 = "bf16"


class NormImpl(StrEnum):
    """The form of the norms in an engine."""

    native = "native"
    plugin = "plugin"
    auto = "auto"


OnnxFile = Annotated[Path, typer.Argument(metavar="ONNX", help="An ONNX file.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Where to write the result; replaced only when the new file is whole.")]
RuntimeOption = Annotated[Runtime, typer.Option("--runtime", help="Choose between equal standard forms for this runtime.")]
FuseOption = Annotated[
    Fuse, typer.Option("--fuse", help="portable: our own ops, with bodies that run anywhere, for norms that no standard op says.")
]
PrecisionOption = Annotated[
    Precision | None, typer.Option("--precision", help="Compute in half precision, but for what it can't hold; float32 without it.")
]
Calibrate = Annotated[
    list[Path] | None,
    typer.Option("--calibrate", metavar="IN.npz", help="Inputs, by name, to see what half precision can't hold. Repeatable."),
]
KeepIO = Annotated[bool, typer.Option("--keep-io", help="With --precision: inputs and outputs stay float32.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="A rewrite that fails its certificate is an error; without it, the rewrite is undone.")
]
ReportFile = Annotated[Path | None, typer.Option("--report", metavar="FILE.json", help="Write the report as JSON too.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No tables and no progress bars; errors are still printed.")]

Factory = Annotated[
    str | None, typer.Option("--model", metavar="PACKAGE.MODULE:FACTORY", help="Makes the model that a file of weights is put into.")
]
FactoryArgs = Annotated[
    list[str] | None,
    typer.Option("--model-arg", metavar="NAME=VALUE", help="An argument of the factory, as a Python literal or text. Repeatable."),
]
Key = Annotated[str | None, typer.Option("--key", help="Which entry of a checkpoint holds the weights.")]
Trust = Annotated[bool, typer.Option("--trust", help="Run code that the file brings along (a pickled module, for example).")]
Imports = Annotated[
    list[str] | None, typer.Option("--import", metavar="MODULE", help="Import first, to register operators or output classes. Repeatable.")
]
Inputs = Annotated[
    list[str] | None,
    typer.Option("--input", metavar="SPEC", help=r'An input, such as "ids:int64\[batch,seq]{0:30522}": dtype, shape, values. Repeatable.'),
]
Dims = Annotated[list[str] | None, typer.Option("--dim", metavar="NAME=MIN:OPT:MAX", help="The range of a dynamic dim. Repeatable.")]
Eval = Annotated[bool, typer.Option("--eval", help="Put the model in eval mode where it is not.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"normdeploy {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    pass


@app.command()
def export(
    source: ModelFile,
    output: Output,
    model: Factory = None,
    model_arg: FactoryArgs = None,
    key: Key = None,
    trust: Trust = False,
    import_: Imports = None,
    input_: Inputs = None,
    dim: Dims = None,
    eval_mode: Eval = False,
    opset: Annotated[int | None, typer.Option("--opset", help="18 to 25; without it 21, raised only where a norm needs it.")] = None,
    runtime: RuntimeOption = Runtime.any,
    fuse: FuseOption = Fuse.standard,
    strict: Strict = False,
    precision: PrecisionOption = None,
    calibrate: Calibrate = None,
    keep_io: KeepIO = False,
    report: ReportFile = None,
    quiet: Quiet = False,
) -> None:
    """Turn a PyTorch model into ONNX, every normalization fused or folded with proof."""
    from . import deploy
    from .report import Report

    loading = _loading(model, model_arg, key, trust, import_, input_, dim, eval_mode)
    _check_report(report)
    with _bars(quiet) as progress:
        result = deploy.export(
            source,
            output=output,
            opset=opset,
            runtime=runtime,
            fuse=fuse,
            strict=strict,
            precision=precision,
            calibrate=calibrate or (),
            keep_io=keep_io,
            progress=progress,
            **loading,
        )
    files = {"source": str(source), "output": str(output)}
    _tell(Report("export", files, result.summary, precision=result.precision, notes=result.notes, seconds=result.seconds), report, quiet)


class Spread(TyperCommand):
    """Lets one option take several values, as in ``--compute-capability 8.6 8.9 12.0``, by repeating it."""

    option = "--compute-capability"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spread: list[str] = []
        for arg in args:
            if spread[-2:-1] == [self.option] and re.fullmatch(r"\d+(\.\d+)?", arg):
                spread.append(self.option)
            spread.append(arg)
        return super().parse_args(ctx, spread)


@app.command(cls=Spread)
def build(
    source: OnnxFile,
    output: Output,
    runtime: Annotated[
        EngineRuntime, typer.Option("--runtime", help="The library that builds and will run the engine.")
    ] = EngineRuntime.tensorrt_rtx,
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(
            Spread.option, metavar="X.Y ...", help="The GPUs to build for (TensorRT-RTX), such as 8.6 8.9 12.0; all where not given."
        ),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            "--profile",
            metavar="NAME=MIN:OPT:MAX",
            help="Sizes of a dynamic dim (batch=1:8:64) or input (ids=1x8:8x128:64x512). Repeatable.",
        ),
    ] = None,
    norm_impl: Annotated[
        NormImpl,
        typer.Option("--norm-impl", help="plugin: norms in our kernels, held by the engine (tensorrt only); auto: where that helps."),
    ] = NormImpl.native,
    report: ReportFile = None,
    quiet: Quiet = False,
) -> None:
    """Build a TensorRT-RTX or TensorRT engine; TensorRT-RTX needs no GPU for it."""
    from . import deploy
    from .report import Report

    _check_report(report)
    with _bars(quiet) as progress:
        engine = deploy.build(
            source,
            output,
            runtime=runtime,
            compute_capabilities=compute_capability or (),
            profiles=profile or (),
            norm_impl=norm_impl,
            progress=progress,
        )
    files = {"source": str(source), "output": str(output)}
    _tell(Report("build", files, engine=engine, seconds={"build": engine.seconds}), report, quiet)


@app.command()
def verify(
    source: ModelFile,
    onnx: OnnxFile,
    engine: Annotated[
        list[Path] | None, typer.Option("--engine", help="An engine made of the ONNX file; run where a GPU is. Repeatable.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Random inputs at the usual sizes, besides those at other sizes.")] = 3,
    model: Factory = None,
    model_arg: FactoryArgs = None,
    key: Key = None,
    trust: Trust = False,
    import_: Imports = None,
    input_: Inputs = None,
    dim: Dims = None,
    eval_mode: Eval = False,
    report: ReportFile = None,
    quiet: Quiet = False,
) -> None:
    """Compare onnxruntime, and engines on a GPU, with the PyTorch model; exit code 1 where one is worse than rounding.

    Options that were given to export need not be given again, unless the files come from somebody else.
    """
    from . import deploy
    from .report import Report

    loading = _loading(model, model_arg, key, trust, import_, input_, dim, eval_mode)
    _check_report(report)
    with _bars(quiet) as progress:
        parity = deploy.verify(source, onnx, engines=engine or (), seeds=seeds, progress=progress, **loading)
    files = {"model": str(source), "onnx": str(onnx)} | ({"engines": ", ".join(map(str, engine))} if engine else {})
    _tell(Report("verify", files, parity=parity, seconds={"verify": parity.seconds}), report, quiet)
    if not parity:
        raise typer.Exit(1)


@app.command()
def inspect(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="An ONNX file, or what export takes.")],
    model: Factory = None,
    model_arg: FactoryArgs = None,
    key: Key = None,
    trust: Trust = False,
    import_: Imports = None,
    input_: Inputs = None,
    dim: Dims = None,
    eval_mode: Eval = False,
    runtime: RuntimeOption = Runtime.any,
    fuse: FuseOption = Fuse.standard,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="NAME", help="Say why this tensor, node or module path was fused or not.")
    ] = None,
    report: ReportFile = None,
    quiet: Quiet = False,
) -> None:
    """List the normalizations of an ONNX file or a model, what would become of each, and what runtimes make of it; changes nothing."""
    from . import deploy
    from .report import Report

    loading = _loading(model, model_arg, key, trust, import_, input_, dim, eval_mode)
    _check_report(report)
    with _bars(quiet) as progress:
        summary = deploy.inspect(source, runtime=runtime, fuse=fuse, explain=explain, progress=progress, **loading)
    _tell(Report("inspect", {"source": str(source)}, summary, seconds=summary.seconds), report, quiet)


@app.command()
def optimize(
    source: OnnxFile,
    output: Output,
    runtime: RuntimeOption = Runtime.any,
    fuse: FuseOption = Fuse.standard,
    strict: Strict = False,
    precision: PrecisionOption = None,
    calibrate: Calibrate = None,
    keep_io: KeepIO = False,
    report: ReportFile = None,
    quiet: Quiet = False,
) -> None:
    """Fuse and fold the normalizations of an ONNX file from anywhere."""
    from . import deploy
    from .report import Report

    _check_report(report)
    with _bars(quiet) as progress:
        result = deploy.optimize(
            source,
            output,
            runtime=runtime,
            fuse=fuse,
            strict=strict,
            precision=precision,
            calibrate=calibrate or (),
            keep_io=keep_io,
            progress=progress,
        )
    files = {"source": str(source), "output": str(output)}
    _tell(Report("optimize", files, result.summary, precision=result.precision, notes=result.notes, seconds=result.seconds), report, quiet)


@app.command()
def run(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="An ONNX file or an engine, told apart by their content.")],
    output: Output,
    inputs: Annotated[
        Path | None, typer.Option("--inputs", metavar="IN.npz", help="Arrays by name; without it some are generated.")
    ] = None,
    provider: Annotated[str | None, typer.Option("--provider", help="cpu or cuda, for an ONNX file; an engine runs on a GPU.")] = None,
    device: Annotated[int, typer.Option("--device", min=0, help="Which GPU.")] = 0,
    profile: Annotated[
        int | None, typer.Option("--profile", min=0, help="Which profile of an engine; the first that holds the shapes without it.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the generated inputs.")] = 0,
    quiet: Quiet = False,
) -> None:
    """Run an ONNX file or an engine once; outputs, and inputs that were generated, go to .npz files."""
    from . import deploy

    done = deploy.run(source, inputs, output, provider=provider, device=device, profile=profile, seed=seed)
    if not quiet:
        lines = [f"{done.runner}: loaded in {done.seconds['load']:.2f} s, ran in {done.seconds['run']:.3f} s"]
        lines += [f"  in   {name}  {said}" for name, said in done.inputs.items()]
        lines += [f"  out  {name}  {said}" for name, said in done.outputs.items()]
        print(printable("\n".join([*lines, *(f"note: {note}" for note in done.notes)])))


def _loading(
    model: str | None,
    model_args: list[str] | None,
    key: str | None,
    trust: bool,
    imports: list[str] | None,
    inputs: list[str] | None,
    dims: list[str] | None,
    eval_mode: bool,
) -> Loading:
    return {
        "model": model,
        "model_args": dict(map(_factory_arg, model_args or ())),
        "key": key,
        "trust": trust,
        "imports": imports or (),
        "inputs": inputs or (),
        "dims": dims or (),
        "eval_mode": eval_mode,
    }


def _factory_arg(text: str) -> tuple[str, Any]:
    """``layers=12`` -> ("layers", 12); what is no Python literal stays text."""
    name, separator, value = text.partition("=")
    if not name.isidentifier() or not separator:
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--model-arg")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _check_report(file: Path | None) -> None:
    """Before any work: the report can be written."""
    if file is not None:
        from .atomic import writable

        writable(file)


def _tell(account: Report, file: Path | None, quiet: bool) -> None:
    """Print the report and write its file."""
    if file is not None:
        from .atomic import write_bytes

        write_bytes(file, account.json().encode())
    if not quiet:
        account.show(_console())


def _console() -> Console:
    """Standard output; wide enough for the tables where it is a file or a pipe."""
    import os

    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=120)


@contextmanager
def _bars(quiet: bool) -> Iterator[Progress | None]:
    """A progress bar on standard error that is gone afterwards; none where nobody would see it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True) as bars:
        task = bars.add_task("")

        def show(stage: str, done: int, total: int) -> None:
            bars.update(task, description=stage, completed=done, total=total or None)

        yield show


def main() -> None:
    """Run the command line; a user's error is one message on standard error and exit code 1."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # the libraries' own remarks; what the user should know is in the report
    try:
        app()
    except NormdeployError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(1)
