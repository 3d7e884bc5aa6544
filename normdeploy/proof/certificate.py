"""What a proof found, as the certificate that goes into the report: one wording for norms, folds, joins, foreign ops
and plugins."""

from __future__ import annotations

from ..findings.records import Certificate
from .identity_check import Identity
from .proof_errors import NotProved, ProofFailure

# nobody can say what it is at every input
NOT_KNOWN = frozenset({ProofFailure.OP.name, ProofFailure.SIZE.name, ProofFailure.LAYOUT.name, ProofFailure.LIMIT.name})


def certificate_of(identity: Identity | NotProved, more: str = "") -> Certificate:
    """``more``: what else there is to say of how a success was come by."""
    if isinstance(identity, NotProved):
        if identity.culprit and identity.culprit not in identity.reason:
            at = f" (at {identity.culprit!r})"
        else:
            at = ""
        return Certificate(
            False,
            float("inf"),
            0.0,
            0,
            "",
            method="exact",
            why=identity.why.name,
            note=identity.reason + at,
            culprit=identity.culprit,
        )
    note = "; ".join(filter(None, (_describe_identity(identity), more)))
    return Certificate(
        True,
        0.0,
        0.0,
        identity.points,
        "",
        method="exact",
        bits=identity.security_bits,
        degree=identity.degree,
        gains=identity.gains,
        note=note,
    )


def _describe_identity(identity: Identity) -> str:
    read = ", ".join(f"{number:.9g} as {fraction}" for number, fraction in identity.read)
    if identity.gains:
        gains = "an infinite input gives NaN where it gave a number before"
    else:
        gains = ""
    return "; ".join(filter(None, (f"constants are read as what they are roundings of: {read}" if read else "", gains)))
