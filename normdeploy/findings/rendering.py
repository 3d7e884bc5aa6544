"""Results as a person sees them: ``print`` and a notebook show the tables that the command line shows.

The tables are made in `normdeploy.reports`, which knows the results of every verb: a result that imported it would
close a circle. ``normdeploy/__init__.py``, which is run before any other module of the package, names the two functions
that render.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Renderer = Callable[[Any], str]

_renderers: dict[str, Renderer] = {}


def set_renderers(text: Renderer, html: Renderer) -> None:
    """From now on results are shown by these two."""
    _renderers.update(text=text, html=html)


class Renderable:
    """A result of a verb. ``str(result)`` is its table in 120 columns, and a notebook shows the same with its
    colours."""

    def __str__(self) -> str:
        return _renderers["text"](self)

    def _repr_html_(self) -> str:
        return _renderers["html"](self)
