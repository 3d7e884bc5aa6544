"""Print the verdict of ``prove``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ...errors import escape_line
from .proof_result import Verdict

if TYPE_CHECKING:
    from .proof_result import FileProof

_STYLES = {Verdict.EQUAL: "green", Verdict.ROUNDED: "green", Verdict.DIFFERENT: "red", Verdict.UNKNOWN: "yellow"}
# Maximum number of rounded constants that are printed
_ROWS = 5


def show_proof(console: Console, proof: FileProof) -> None:
    """Print the difference or the reason, the rounded constants, the notes and the verdict."""
    for side, place in zip((proof.first, proof.second), proof.places, strict=True):
        if place is not None:
            reads = ", ".join(map(repr, place.inputs)) or "nothing"
            _print(console, f"{side}: {place.describe()} has no counterpart; its inputs {reads} are proved equal")
    if proof.counterexample is not None:
        shown = proof.counterexample
        index = ", ".join(map(str, shown.index))
        _print(console, f"in float64, {shown.output}[{index}] is {shown.first:.9g} in A and {shown.second:.9g} in B")
        _print(console, f"inputs: {shown.described}")
    worst = sorted(proof.rounded, key=lambda r: -r.ulps)
    for rounded in worst[:_ROWS]:
        told = f"{rounded.name!r} differs from the exact constant by {rounded.ulps:.2g} ulp"
        _print(console, f"{told}; a computation in floats may be off by {rounded.bound:.1f} ulp")
    if len(worst) > _ROWS:
        _print(console, f"and {len(worst) - _ROWS} more rounded constants; --report writes all")
    for note in proof.notes:
        _print(console, f"note: {note}", "yellow")
    _print(console, proof.describe(), _STYLES[proof.verdict])


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(Text(escape_line(text), style=style))
