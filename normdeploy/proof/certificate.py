"""What a proof found, as the certificate that goes into the report: one wording for norms, folds, joins, foreign ops
and plugins."""

from __future__ import annotations

from ..records import Certificate
from .errors import NotProved, Why
from .prove import Identity

NOT_KNOWN = frozenset(
    {Why.OP.name, Why.SIZE.name, Why.LAYOUT.name, Why.LIMIT.name}
)  # nobody can say what it is at every input


def certificate_of(found: Identity | NotProved, more: str = "") -> Certificate:
    """``more``: what else there is to say of how a success was come by."""
    if isinstance(found, NotProved):
        at = f" (at {found.culprit!r})" if found.culprit and found.culprit not in found.reason else ""
        return Certificate(
            False,
            float("inf"),
            0.0,
            0,
            "",
            method="exact",
            why=found.why.name,
            note=found.reason + at,
            culprit=found.culprit,
        )
    note = "; ".join(filter(None, (_told(found), more)))
    return Certificate(
        True,
        0.0,
        0.0,
        found.points,
        "",
        method="exact",
        bits=found.bits,
        degree=found.degree,
        gains=found.gains,
        note=note,
    )


def _told(found: Identity) -> str:
    read = ", ".join(f"{number:.9g} as {fraction}" for number, fraction in found.read)
    gains = "an infinite input gives NaN where it gave a number before" if found.gains else ""
    return "; ".join(filter(None, (f"constants are read as what they are roundings of: {read}" if read else "", gains)))
