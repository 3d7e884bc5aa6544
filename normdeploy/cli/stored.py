"""Add ``--store`` to a verb, which returns a stored result if the verb already ran with the same input."""

from __future__ import annotations

import functools
import inspect
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InputError, escape_line
from ..storage.file_replacement import write_bytes
from .console import require_writable_report, silence_output

# Environment variable of the store. It equals `normdeploy.fleet.fleet_commands.STORE`, which is not imported because
# that would load onnx.
_PLACE = "NORMDEPLOY_STORE"
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="PLACE",
        help="Folder or URL that caches results. If nothing changed, the cached result is returned. Default: the"
        " environment variable NORMDEPLOY_STORE.",
    ),
]


def add_store_option(verb: Callable[..., None]) -> Callable[..., None]:
    """Add ``--store`` to a verb.

    The files that the verb reads and writes are found in its signature: arguments and options of type Path are files,
    and ``output`` is written.

    Returns:
        the verb with the option.
    """
    signature = inspect.signature(verb)

    @functools.wraps(verb)
    def run_with_store(*, store: str | None = None, **kwargs: Any) -> None:
        """Run the verb, or take its result from ``store`` if a store is given."""
        place = store or os.environ.get(_PLACE, "")
        # A store can't hold a printed command.
        if not place or kwargs.get("print_trtexec"):
            verb(**kwargs)
            return
        _take_from_store(verb.__name__, signature, place, kwargs)

    option = inspect.Parameter("store", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=StoreOption)
    run_with_store.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])  # type: ignore[attr-defined]
    run_with_store.__annotations__ = {**verb.__annotations__, "store": StoreOption}
    return run_with_store


def _take_from_store(verb: str, signature: inspect.Signature, place: str, given: dict[str, Any]) -> None:
    from ..fleet.cached_call import call_with_cache as made

    output, report, html = (given.pop(name, None) for name in ("output", "report", "html"))
    quiet = given.pop("quiet", False)
    given.pop("verbose", None)
    sources: dict[str, Path] = {}
    options: dict[str, Any] = {}
    for name, value in given.items():
        parameter = signature.parameters[name]
        flag = _option_name(parameter.annotation)
        if flag is None:
            for path in value if isinstance(value, list) else [value]:
                _add_source(sources, path)
        elif value is not None and value != parameter.default:
            options[flag] = value
    require_writable_report(report, html, [*sources.values(), *([output] if output is not None else [])])
    with silence_output(quiet=quiet):
        result = made(verb, sources, options, place, output)
    if not quiet:
        for note in result.notes:
            print(escape_line(f"note: {note}"), file=sys.stderr)
    if report is not None:
        write_bytes(report, result.report)
    if html is not None:
        from ..reports.report_page import render_page

        write_bytes(html, render_page(json.loads(result.report)).encode())
    if not quiet:
        # Anyone who can write to the store can change its logs, so the logs are escaped.
        for line in io.StringIO(result.log):
            print(escape_line(line.removesuffix("\n")))
        if result.cached:
            print(escape_line(f"from the store: made {result.record.started} in {result.record.seconds:.1f} s"))
    if result.record.outcome != "ok":
        raise typer.Exit(1)


def _add_source(sources: dict[str, Path], path: Path) -> None:
    if not path.exists():
        raise InputError(f"file not found: {str(path)!r}; pass a file or a folder")
    if sources.setdefault(path.name, path) != path:
        raise InputError(
            f"{str(sources[path.name])!r} and {str(path)!r} have the same file name, which the store uses as"
            " the key; copy one to another name, or omit --store"
        )


def _option_name(annotation: Any) -> str | None:
    """Return an option's name, for example "keep_io"; None for an argument."""
    marks = getattr(annotation, "__metadata__", ())
    option = next((m for m in marks if isinstance(m, typer.models.OptionInfo)), None)
    if option is None:
        return None
    # typer stores the first flag as the default.
    declared = (option.default, *(option.param_decls or ()))
    name = next(d for d in declared if isinstance(d, str) and d.startswith("--"))
    return name.split("/")[0].removeprefix("--").replace("-", "_")
