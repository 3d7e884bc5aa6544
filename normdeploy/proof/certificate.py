"""Turn the result of a proof into the certificate of the report, with one wording for all kinds of rewrites."""

from __future__ import annotations

from ..findings.records import Certificate
from .identity_check import Identity
from .proof_errors import NotProved, ProofFailure

# Failures after which the rewrite may still be right: the prover could not decide.
NOT_KNOWN = frozenset({ProofFailure.OP.name, ProofFailure.SIZE.name, ProofFailure.LAYOUT.name, ProofFailure.LIMIT.name})


def certificate_of(identity: Identity | NotProved, more: str = "") -> Certificate:
    """Build the certificate of a proof or of its refusal.

    Args:
        more: text to append to the note of a success.

    Returns:
        a certificate with method ``exact``: passed with points, bits and degree, or failed with reason and culprit.
    """
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
        gains = "an infinite input that gave a number before now gives NaN"
    else:
        gains = ""
    return "; ".join(
        filter(None, (f"constants are read as the exact values that they approximate: {read}" if read else "", gains))
    )
