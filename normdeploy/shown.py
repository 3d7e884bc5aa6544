"""Results as a person sees them: ``print`` and a notebook show the tables that the command line shows."""

from __future__ import annotations


class Shown:
    """A result of a verb. ``str(result)`` is its table in 120 columns, and a notebook shows the same with its colours."""

    def __str__(self) -> str:
        from .reports.shown import text

        return text(self)

    def _repr_html_(self) -> str:
        from .reports.shown import html

        return html(self)
