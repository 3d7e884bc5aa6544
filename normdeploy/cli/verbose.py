"""Options that every verb accepts but does not handle itself: ``-v`` and ``--no-extensions``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ..extensions import disabled
from ..log import start_logging
from ..verb_options import iter_options
from .options import options_from_arguments, typer_parameters

Verbose = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        metavar="",
        show_default=False,
        help="Log each stage to standard error. -vv also logs each candidate that was tried.",
    ),
]
NoExtensions = Annotated[
    bool,
    typer.Option(
        "--no-extensions", help="Ignore the norms, runtimes, rules and operators that installed packages provide."
    ),
]


def add_common_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Add the common options to a verb, and expand each parameter that is a dataclass into its options.

    Returns:
        the verb with a signature for typer.
    """
    signature = inspect.signature(verb, eval_str=True)
    groups: dict[str, Any] = {
        n: p.annotation for n, p in signature.parameters.items() if dataclasses.is_dataclass(p.annotation)
    }

    @functools.wraps(verb)
    def run_with_common_options(*args: Any, verbose: int = 0, no_extensions: bool = False, **kwargs: Any) -> None:
        """Start logging, build the dataclasses from their options, and run the verb."""
        start_logging(verbose)
        for name, group in groups.items():
            kwargs[name] = options_from_arguments(
                group, {option: kwargs.pop(option) for option, _, _ in iter_options(group)}
            )
        with disabled(no_extensions):
            verb(*args, **kwargs)

    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.name in groups:
            parameters += typer_parameters(groups[parameter.name])
        else:
            parameters += [parameter]
    # typer lists options in the order of the parameters. In this order, a parameter without a default may follow a
    # parameter with a default, which Python allows only for keyword-only parameters.
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    added: dict[str, tuple[Any, Any]] = {"no_extensions": (NoExtensions, False), "verbose": (Verbose, 0)}
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in added.items()
    ]
    run_with_common_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run_with_common_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return run_with_common_options
