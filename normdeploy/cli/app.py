"""Command line with one verb for each stage (``normdeploy.cli``)."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import warnings
from inspect import cleandoc
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import NEITHER, NOT_RUN, NormdeployError, RuntimeUnavailable, escape_lines
from ..trust_words import CODE_WORDS, KEY_WORDS
from ..verbs.build.trtexec_words import TRTEXEC_WORDS
from ..verbs.conversion.torch_words import EXPORT_WORDS, HALF_WORDS
from ..verbs.verify.verify_words import SAMPLE_WORDS
from . import (
    bench,
    bisect,
    build,
    check,
    export,
    fleet,
    inspect,
    optimize,
    package,
    prove,
    recheck,
    run,
    signals,
    verify,
)
from .other_words import TranslatingCommand
from .stored import add_store_option
from .supervised import supervise_in_child
from .verbose import add_common_options


class _PlainHelp:
    """Base class of verbs that cleans up the help text.

    typer keeps the line breaks of a docstring, and writes <bool> after a flag. This class removes both.
    """

    def __init__(self, *args: Any, help: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, help=_unwrap_lines(help), **kwargs)  # type: ignore[call-arg]

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the command's parameters, with an empty metavar for each flag."""
        params = super().get_params(ctx)  # type: ignore[misc]
        for option in params:
            if getattr(option, "is_flag", False) and option.metavar is None:
                option.metavar = ""
        return params


def _unwrap_lines(text: str | None) -> str | None:
    """Join the lines of each paragraph."""
    if text is None:
        return None
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in cleandoc(text).split("\n\n"))


class _VerbGroup(_PlainHelp, TyperGroup):
    pass


class _VerbCommand(_PlainHelp, TranslatingCommand):
    pass


class _BuildCommand(_PlainHelp, build.RepeatedValuesCommand):
    words = TRTEXEC_WORDS


class _ExportCommand(_VerbCommand):
    words = (*CODE_WORDS, *HALF_WORDS, *EXPORT_WORDS)


class _OptimizeCommand(_VerbCommand):
    words = (*CODE_WORDS, *HALF_WORDS)


class _CodeCommand(_VerbCommand):
    words = CODE_WORDS


class _CompareCommand(_VerbCommand):
    words = (*CODE_WORDS, *SAMPLE_WORDS)


class _KeyCommand(_VerbCommand):
    words = KEY_WORDS


app = typer.Typer(
    cls=_VerbGroup,
    help="Export PyTorch models to onnxruntime and TensorRT, with every normalization fused or folded and proved.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"normdeploy {__version__}")
        raise typer.Exit


@app.callback()
def _root_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command(cls=_ExportCommand)(add_store_option(add_common_options(export.export)))
app.command(cls=_BuildCommand)(add_store_option(add_common_options(build.build)))
app.command(cls=_CompareCommand)(add_store_option(add_common_options(verify.verify)))
app.command(cls=_CompareCommand)(add_common_options(bisect.bisect))
app.command(cls=_CodeCommand)(add_common_options(inspect.inspect))
app.command(cls=_OptimizeCommand)(add_store_option(add_common_options(optimize.optimize)))
app.command(cls=_VerbCommand)(add_common_options(prove.prove))
app.command(cls=_VerbCommand)(add_common_options(run.run))
app.command(cls=_CodeCommand)(add_common_options(check.check))
app.command(cls=_CodeCommand)(add_common_options(bench.bench))
app.command(cls=_CodeCommand)(add_common_options(package.package))
app.command(cls=_KeyCommand)(add_common_options(recheck.recheck))

of_fleets = typer.Typer(
    cls=_VerbGroup,
    no_args_is_help=True,
    help="Export, build and verify many models for many targets. Steps whose inputs are unchanged do not run again.",
)
for _verb in (fleet.run, fleet.status, fleet.diff, fleet.recheck, fleet.show, fleet.publish, fleet.gc):
    of_fleets.command(cls=_KeyCommand)(add_common_options(_verb))
app.add_typer(of_fleets, name="fleet")


def main() -> None:
    """Run the command line. An error of the user is printed as one message on standard error, with exit code 1.

    In every verb, exit code 3 means that a package or a GPU is missing.
    """
    supervise_in_child()
    if not sys.warnoptions:
        # Hide the warnings of libraries, because the report contains everything that concerns the user.
        warnings.simplefilter("ignore")
    # Without a handler, libraries would log straight to the terminal, with unescaped names from a file.
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.NullHandler())
    for stream in (sys.stdout, sys.stderr):
        # The terminal's encoding may not have all characters of a name, or the dashes in our messages.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    signals.watch_signals()
    try:
        app()
    except RuntimeUnavailable as error:
        # A package or a GPU is missing, so the verb neither passed nor failed.
        _exit_with_error(str(error), NOT_RUN)
    except NormdeployError as error:
        _exit_with_error(str(error))
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            _exit_with_error(f"the name {str(error.filename)!r} is too long for the file system; use a shorter one")
        if error.errno == errno.ENOSPC and error.filename is None:
            # Errors of written files are reported by storage.atomic, so this error is about standard output. Standard
            # output is redirected, because Python would flush the buffer at exit and fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            _exit_with_error(f"can't write to standard output: {error.strerror}; free some space")
        raise
    except MemoryError as error:
        _exit_with_error(f"out of memory: {error or 'no memory left'}; use smaller sizes or a larger machine")
    finally:
        signals.restore_default_sigint()


def _exit_with_error(message: str, code: int = 1) -> NoReturn:
    print(f"{NEITHER if code == NOT_RUN else 'error'}: {escape_lines(message)}", file=sys.stderr)
    sys.exit(code)
