"""The option ``-v`` of every verb."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

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


def logged(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with the option ``-v``, which it need not know of."""

    @functools.wraps(verb)
    def call(*args: Any, verbose: int = 0, **kwargs: Any) -> None:
        watch(verbose)
        verb(*args, **kwargs)

    signature = inspect.signature(verb, eval_str=True)
    option = inspect.Parameter("verbose", inspect.Parameter.KEYWORD_ONLY, default=0, annotation=Verbose)
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])  # type: ignore[attr-defined]
    call.__annotations__ = {**inspect.get_annotations(verb, eval_str=True), "verbose": Verbose}
    return call
