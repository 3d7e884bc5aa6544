"""The options that every verb takes and need not know of: ``-v`` and ``--no-extensions``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ..extensions import disabled
from ..log import watch

Verbose = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        metavar="",
        show_default=False,
        help="Log to standard error what is done; -vv: each attempt too.",
    ),
]
NoExtensions = Annotated[
    bool,
    typer.Option("--no-extensions", help="Leave out what installed packages bring: norms, runtimes, rules, operators."),
]


def logged(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with these options."""

    @functools.wraps(verb)
    def call(*args: Any, verbose: int = 0, no_extensions: bool = False, **kwargs: Any) -> None:
        watch(verbose)
        with disabled(no_extensions):
            verb(*args, **kwargs)

    signature = inspect.signature(verb, eval_str=True)
    added: dict[str, tuple[Any, Any]] = {"no_extensions": (NoExtensions, False), "verbose": (Verbose, 0)}
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in added.items()
    ]
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *options])  # type: ignore[attr-defined]
    kinds = {name: annotation for name, (annotation, _) in added.items()}
    call.__annotations__ = {**inspect.get_annotations(verb, eval_str=True), **kinds}
    return call
