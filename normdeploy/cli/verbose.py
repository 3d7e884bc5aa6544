"""The options that every verb takes and need not know of: ``-v`` and ``--no-extensions``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ..extensions import disabled
from ..log import watch
from ..options import options_of
from .options import parameters_of, values_of

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
    """The verb with these options, and with each parameter that is a group of options (a dataclass) spelled out."""
    signature = inspect.signature(verb, eval_str=True)
    groups: dict[str, Any] = {
        n: p.annotation for n, p in signature.parameters.items() if dataclasses.is_dataclass(p.annotation)
    }

    @functools.wraps(verb)
    def call(*args: Any, verbose: int = 0, no_extensions: bool = False, **kwargs: Any) -> None:
        watch(verbose)
        for name, group in groups.items():
            kwargs[name] = values_of(group, {option: kwargs.pop(option) for option, _, _ in options_of(group)})
        with disabled(no_extensions):
            verb(*args, **kwargs)

    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        parameters += parameters_of(groups[parameter.name]) if parameter.name in groups else [parameter]
    # In typer's order of options, which is that of the parameters, some without a default stand behind others.
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    added: dict[str, tuple[Any, Any]] = {"no_extensions": (NoExtensions, False), "verbose": (Verbose, 0)}
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in added.items()
    ]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call
