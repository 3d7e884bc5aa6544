"""The command line: one verb for each stage (``normdeploy.verbs``)."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from typing import Annotated, NoReturn

import typer

from . import __version__, stopping
from .errors import NormdeployError, printable
from .verbs import bench, bisect, build, check, export, inspect, optimize, package, recheck, run, verify

app = typer.Typer(
    help="PyTorch models in onnxruntime and TensorRT, every normalization fused or folded, and proved.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"normdeploy {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    pass


app.command()(export.export)
app.command(cls=build.Spread)(build.build)
app.command()(verify.verify)
app.command()(bisect.bisect)
app.command()(inspect.inspect)
app.command()(optimize.optimize)
app.command()(run.run)
app.command()(check.check)
app.command()(bench.bench)
app.command()(package.package)
app.command()(recheck.recheck)


def main() -> None:
    """Run the command line; a user's error is one message on standard error and exit code 1."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # the libraries' own remarks; what the user should know is in the report
    stopping.watch()
    try:
        app()
    except NormdeployError as error:
        _refuse(str(error))
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            _refuse(f"the name {str(error.filename)!r} is too long for the file system; give a shorter one")
        if error.errno == errno.ENOSPC and error.filename is None:  # files are written by storage.atomic, which tells it itself
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would be written at the exit
            _refuse(f"can't write to standard output: {error.strerror}; make room")
        raise
    except MemoryError as error:
        _refuse(f"there is not enough memory here: {error or 'none is left'}; give smaller sizes, or take a larger machine")


def _refuse(said: str) -> NoReturn:
    print(f"error: {printable(said)}", file=sys.stderr)
    sys.exit(1)
