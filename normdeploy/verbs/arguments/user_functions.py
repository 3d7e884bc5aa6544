"""Import functions that the user names as ``MODULE:FUNCTION``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import InputError, TrustError

_NAME = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<function>[A-Za-z_]\w*)")


def is_function_name(text: object) -> bool:
    """Return True for ``MODULE:FUNCTION``, if no file has this name."""
    if not isinstance(text, str | os.PathLike):
        return False
    return _NAME.fullmatch(os.fspath(text)) is not None and not os.path.exists(text)


def import_user_function(text: str, option: str, *, trust: bool) -> Callable[..., Any]:
    """Import a function from the working directory or from an installed package. Importing runs the module's code.

    Args:
        text: ``MODULE:FUNCTION``.
        option: option that names the function, for messages.
        trust: True if the user allows code to run.

    Returns:
        the function.

    Raises:
        TrustError: the user did not allow code to run.
        InputError: the module can't be imported, or has no such function.
    """
    match = _NAME.fullmatch(text)
    if match is None:
        raise InputError(f"{option}: {text!r} is not MODULE:FUNCTION")
    if not trust:
        raise TrustError(
            f"{option}: {text} runs the code of the module {match['module']}. If you trust its author, pass"
            " --trust-remote-code"
        )
    # The module imports torch.
    from ...loading.model_factories import import_user_module
    from ...loading.python_file import import_from_folder

    with import_from_folder(Path.cwd()):
        module = import_user_module(match["module"], option)
    function = getattr(module, match["function"], None)
    if not callable(function):
        raise InputError(f"{option}: the module {match['module']} has no function {match['function']!r}")
    return function


def call_user_function(function: Callable[..., Any], name: str, *arguments: Any) -> Any:
    """Call a function of the user.

    Args:
        name: text for messages.

    Returns:
        the result of the function.

    Raises:
        InputError: the function raised an error. The message has the error and the line that raised it.
    """
    try:
        return function(*arguments)
    # The user's code may raise anything.
    except (Exception, SystemExit) as error:
        from ...loading.model_factories import describe_user_error

        raise InputError(f"{name} failed: {describe_user_error(error)}") from error
