"""The command line: one verb for each stage. A verb parses, calls ``normdeploy.deploy`` and prints; nothing heavy is imported before."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import __version__
from .errors import NormdeployError

if TYPE_CHECKING:
    from rich.console import Console

    from .deploy import Progress
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


OnnxFile = Annotated[Path, typer.Argument(metavar="ONNX", help="An ONNX file.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Where to write the result; replaced only when the new file is whole.")]
RuntimeOption = Annotated[Runtime, typer.Option("--runtime", help="Choose between equal standard forms for this runtime.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="A rewrite that fails its certificate is an error; without it, the rewrite is undone.")
]
ReportFile = Annotated[Path | None, typer.Option("--report", metavar="FILE.json", help="Write the report as JSON too.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No tables and no progress bars; errors are still printed.")]


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
def optimize(
    source: OnnxFile,
    output: Output,
    runtime: RuntimeOption = Runtime.any,
    strict: Strict = False,
    report: ReportFile = None,
    quiet: Quiet = False,
) -> None:
    """Fuse and fold the normalizations of an ONNX file from anywhere."""
    from . import deploy
    from .report import Report

    with _bars(quiet) as progress:
        result = deploy.optimize(source, output, runtime=runtime, strict=strict, progress=progress)
    _tell(
        Report("optimize", {"source": str(source), "output": str(output)}, result.summary, notes=result.notes, seconds=result.seconds),
        report,
        quiet,
    )


def _tell(account: Report, file: Path | None, quiet: bool) -> None:
    """Print the report and write its file."""
    if file is not None:
        from .files import write_bytes

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
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
