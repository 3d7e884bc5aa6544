"""Write ``docs/reference/commands.md``. It lists every verb and option with the command line's help, and every function
with its signature and docstring.

    python -m docs.reference

``tests/test_docs.py`` fails if the page is older than the code.
"""

from __future__ import annotations

import html
import inspect
import re
from pathlib import Path
from types import ModuleType

import typer.cli
from typer.testing import CliRunner

import normdeploy
from normdeploy import testing

PAGE = Path(__file__).parent / "reference" / "commands.md"

_HEAD = """# Commands and functions

Written by `python -m docs.reference` from the command line's help and the docstrings; change those, not this page.

Errors that a user can cause are classes of `normdeploy.errors`: one message, no traceback, exit code 1.
"""


def page() -> str:
    """Generate the page.

    Returns:
        Markdown.

    Raises:
        RuntimeError: typer could not describe the command line.
    """
    told = CliRunner().invoke(
        typer.cli.app, ["normdeploy.cli.app", "utils", "docs", "--name", "normdeploy", "--title", "The command line"]
    )
    if told.exit_code:
        raise RuntimeError(f"typer utils docs failed:\n{told.output}")
    verbs = (
        re.sub(r"^(#+ )", r"#\1", html.unescape(told.output), flags=re.MULTILINE).replace("\\[", "[").replace("$ ", "")
    )
    functions = [_function(normdeploy, name) for name in normdeploy.__all__ if name != "__version__"]
    functions += [_function(testing, name) for name in testing.__all__]
    return "\n".join([_HEAD, verbs.strip() + "\n", "## From Python\n", *functions])


def _function(module: ModuleType, name: str) -> str:
    """Return a function's signature, one parameter per line, and its docstring, exactly as in the code."""
    function = getattr(module, name)
    signature = inspect.signature(function)
    lines: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in lines:
            lines.append("*")
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        lines.append(f"{stars}{parameter.name}: {parameter.annotation}{default}")
    arguments = "".join(f"    {line},\n" for line in lines)
    return (
        f"### {module.__name__}.{name}\n\n```text\n{name}(\n{arguments}) ->"
        f" {signature.return_annotation}\n\n{inspect.getdoc(function)}\n```\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page())
